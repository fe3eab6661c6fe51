"""How much of a GPU's memory jax takes: decided here for every process that jaxrl starts on GPUs,
and read from here by the plan; and what the driver tells of GPUs."""

from __future__ import annotations

import csv
import os
import subprocess

from jaxrl.errors import UserError

VARIABLE, OLD_NAME = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Both are read by jax 0.10 to 0.12, which do not start on a GPU where both are set."""
SHARE = 0.92
"""What jaxrl sets. The rest is for what does not come out of jax's pool: the CUDA context, NCCL's
buffers, cuDNN's and cuBLAS's own, loaded programs."""
JAX_SHARE = 0.75
"""What jax takes by itself."""
SMI_S = 20.0
"""Seconds that nvidia-smi may take."""


def given_share() -> float | None:
    """Returns the share that the user set; the new name counts before the old one. Raises
    UserError where it is no number above 0."""
    for name in (VARIABLE, OLD_NAME):
        text = os.environ.get(name, "")
        if not text:
            continue
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share < float("inf"):
            raise UserError(f"{name}={text!r} must be a share of a GPU's memory, as in 0.9")
        return share
    return None


def gpu_share() -> float:
    """Returns the share that jax takes in a process which starts from here."""
    return given_share() or SHARE


def taken_share() -> float:
    """Returns the share that jax took when it started in this process, after `take_share`."""
    return given_share() or JAX_SHARE


def take_share() -> None:
    """Sets the share of this process and of those that it starts, unless the user has, or jax runs
    already, which reads it when it starts."""
    from jax._src import xla_bridge  # no public function tells whether a backend runs

    share = given_share()
    if xla_bridge.backends_are_initialized():
        return
    if share is None:
        os.environ[VARIABLE] = str(SHARE)
    elif os.environ.get(VARIABLE):
        os.environ.pop(OLD_NAME, None)


def worker_share() -> dict[str, str]:
    """Variables that carry what the user set here to a process on any host, whatever is set there;
    none where nothing is set: that process decides by what its own host has."""
    share = given_share()
    return {} if share is None else {VARIABLE: str(share), OLD_NAME: ""}


def nvidia_smi(query: str, seconds: float = SMI_S) -> list[list[str]]:
    """Asks the driver of this host's NVIDIA GPUs, which takes no memory of theirs; returns the
    fields of each line.

    Raises:
        OSError, subprocess.SubprocessError: there is no nvidia-smi, it failed, or it hangs.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    return [row for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True) if row]
