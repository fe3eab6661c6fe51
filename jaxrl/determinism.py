"""Kernels whose result does not depend on timing, asked of XLA before jax starts."""

from __future__ import annotations

import os

from jax._src import xla_bridge  # no public function tells whether a backend runs

from jaxrl.errors import UserError

FLAG = "--xla_gpu_exclude_nondeterministic_ops=true"
VARIABLE = "XLA_FLAGS"


def exclude_nondeterministic() -> None:
    """Sets the flag for this process, and for those that it starts on this host.

    Raises:
        UserError: jax runs already without it, and reads it no more.
    """
    flags = os.environ.get(VARIABLE, "").split()
    if FLAG in flags:
        return
    if xla_bridge.backends_are_initialized():
        raise UserError(
            "deterministic=true comes too late: jax has started in this process, and reads"
            f" {VARIABLE} no more. Start python with {VARIABLE}={FLAG}, or ask jax for nothing"
            " before the run; on a CPU leave deterministic=false, for every run is deterministic"
        )
    os.environ[VARIABLE] = " ".join([*flags, FLAG])


def worker_environment(deterministic: bool) -> dict[str, str]:
    """Variables of a process on any host, whose own flags are kept (Ray fills the braces in)."""
    return {VARIABLE: f"${{{VARIABLE}}} {FLAG}"} if deterministic else {}
