"""Flags that XLA must have before jax starts, in this process and in those of a cluster."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import jax
from jax._src import xla_bridge  # no public function tells whether a backend runs

from jaxrl.errors import UserError
from jaxrl.process.compile_cache import leave_out_of_keys

VARIABLE = "XLA_FLAGS"
DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "nvmap", "dxg", "kfd", "accel*", "vfio/[0-9]*")
"""Below /dev: NVIDIA's GPUs (also Jetson's and WSL's), AMD's, TPUs."""
DETERMINISTIC = "--xla_gpu_exclude_nondeterministic_ops=true"
TUNED, TUNED_BEFORE = ("--xla_gpu_dump_autotune_results_to", "--xla_gpu_load_autotune_results_from")
"""Where XLA writes, at each compilation, all kernels that it chose by timing them in this process,
and whence it takes such choices, once, at the first; a file of the latter that is not there, or of
another version of XLA, ends the compilation (jaxlib 0.10 to 0.12)."""
TUNED_DIR, TUNED_VARIABLE = "autotune", "JAXRL_AUTOTUNE_DIR"
"""The folder of these files in that of the run, and the variable that names it to workers."""
ON, OFF = ("true", "1", ""), ("false", "0")
COSTLY: dict[str, tuple[tuple[str, ...], str]] = {
    "--xla_gpu_enable_triton_gemm": (
        ON,
        "matrix products of few rows, as of a decode step, are slower; leave it out",
    ),
    "--xla_gpu_autotune_level": (
        ("1", "2", "3", "4", "5"),
        "XLA takes its default tiles for matrix products, which are slower; leave it out",
    ),
    "--xla_gpu_enable_command_buffer": (
        (),
        "it replaces what XLA puts into CUDA graphs, and what jaxrl adds to it for a rollout with"
        " tensor or expert above 1; with an empty value the host launches each kernel by itself",
    ),
    "--xla_gpu_graph_min_graph_size": (
        ("1", "2", "3", "4", "5"),
        "the host launches the kernels of smaller graphs one by one",
    ),
    "--xla_gpu_enable_latency_hiding_scheduler": (
        OFF,
        "an update takes several GB more than planned, and hides hardly more of its collectives",
    ),
    **dict.fromkeys(
        (
            "--xla_gpu_enable_pipelined_all_gather",
            "--xla_gpu_enable_pipelined_reduce_scatter",
            "--xla_gpu_enable_pipelined_all_reduce",
            "--xla_gpu_enable_while_loop_double_buffering",
        ),
        (
            OFF,
            "an update of 8B weights takes about 7 GB more than planned, for at most 2% of its time"
            " in one host",
        ),
    ),
    **dict.fromkeys(
        (
            "--xla_gpu_all_gather_combine_threshold_bytes",
            "--xla_gpu_reduce_scatter_combine_threshold_bytes",
            "--xla_gpu_all_reduce_combine_threshold_bytes",
        ),
        ((), "collectives of larger pieces take memory that the plan does not count"),
    ),
    "--xla_gpu_deterministic_ops": (
        OFF,
        "slower than deterministic=true, which excludes only what depends on timing",
    ),
}
"""Flag of XLA, often found in recipes of other programs -> values that cost nothing here, and what
others cost. Where a number stands, it is of programs compiled for H100 and H200
(docs/troubleshooting.md)."""
_TRANSFERS = (
    (None, "allow", "log", "log_explicit"),
    "batches go to the devices without a call that says so",
)
SETTINGS: dict[str, tuple[tuple[object, ...], str]] = {
    "jax_enable_x64": ((False,), "models are computed in at most 32 bits"),
    "jax_numpy_dtype_promotion": (("standard",), "the optimizers mix dtypes"),
    "jax_transfer_guard": _TRANSFERS,
    "jax_transfer_guard_host_to_device": _TRANSFERS,
    "jax_transfer_guard_device_to_device": _TRANSFERS,
}
"""Setting of jax -> the values with which a run works, and why no others."""
PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=86400"
"""XLA's CPU runtime ends the process, and saves nothing, once a device has waited 40 s for another
in a collective, which on loaded cores may only be slow. A run's own deadlines are named, longer and
leave a checkpoint, so XLA's is moved out of their way (jaxlib 0.10 to 0.12 know the flag; one that
does not know it would not start, so raise the bound only after a look)."""


def exclude_nondeterministic() -> None:
    """Asks for kernels whose result does not depend on timing, in this process and in those that it
    starts on this host.

    Raises:
        UserError: jax runs already without it, and reads it no more.
    """
    if not add_flag(DETERMINISTIC):
        raise UserError(
            "deterministic=true comes too late: jax has started in this process, and reads"
            f" {VARIABLE} no more. Start python with {VARIABLE}={DETERMINISTIC}, or ask jax for"
            " nothing before the run; on a CPU leave deterministic=false, for every run is"
            " deterministic"
        )


def check_jax_settings() -> None:
    """Refuses settings of jax, from the environment or this process, with which no run works.

    Raises:
        UserError: with the setting, the reason and the way out.
    """
    for name, (working, why) in SETTINGS.items():
        value = getattr(jax.config, name)
        value = getattr(value, "value", value)  # of an enum
        if value not in working:
            raise UserError(
                f"jax is set to {name}={value}, but {why}: unset {name.upper()}, or in Python"
                f" jax.config.update({name!r}, {working[0]!r})"
            )


def user_flag_notes() -> list[str]:
    """Returns a note for each flag of the user's own XLA_FLAGS that makes a run on GPUs slower, or
    its memory other than planned."""
    notes = []
    for flag, (harmless, cost) in COSTLY.items():
        value = value_of(flag)
        if value is not None and value.lower() not in harmless:
            notes.append(f"{VARIABLE} has {flag}{'=' * bool(value)}{value}: {cost}")
    return notes


def wait_for_slow_devices() -> None:
    """Lets the emulated devices of this process wait for each other as long as the run does."""
    add_flag(PATIENT)


def worker_environment(deterministic: bool, run_dir: Path) -> dict[str, str]:
    """Returns variables of a process on any host that keeps its flags (Ray fills in the braces).

    Args:
        run_dir: of the run, where a deterministic one keeps what `keep_autotuning` says.
    """
    if not deterministic:
        return {VARIABLE: f"${{{VARIABLE}}} {PATIENT}"}
    return {
        VARIABLE: f"${{{VARIABLE}}} {PATIENT} {DETERMINISTIC}",
        TUNED_VARIABLE: str(run_dir.absolute() / TUNED_DIR),
    }


def keep_autotuning(folder: Path, process: str) -> str | None:
    """Makes XLA choose the GPU kernels that it chose before in this process of a run: by default it
    times them anew in each process, and another kernel adds in another order.

    Each process has a file of its own, below the version of XLA. What was written before is moved
    away and read from there, so that a process that is killed while it writes loses nothing.

    Args:
        folder: of the files of all processes of the run; it is made.
        process: its name, the same after a restart.

    Returns:
        Why the choices are not kept; None where they are. Call it before jax starts.
    """
    folder = folder.absolute() / f"jaxlib-{version('jaxlib')}"
    written, before = (folder / f"{process}{end}.textproto" for end in ("", ".before"))
    if len(str(folder).split()) > 1:
        return f"XLA's choice of kernels is not kept: its flags take no path with a space: {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if written.is_file() and written.read_bytes().endswith(b"\n}\n"):  # else cut
            written.replace(before)
    except OSError as error:
        return f"XLA's choice of kernels is not kept: {folder}: {error.strerror}"
    leave_out_of_keys([TUNED, TUNED_BEFORE])
    # The environment may be that of another process of a run: of the driver, in its workers.
    others = re.compile(rf"(?:{TUNED}|{TUNED_BEFORE})=\S*/{TUNED_DIR}/jaxlib-\S*")
    if not xla_bridge.backends_are_initialized():
        os.environ[VARIABLE] = " ".join(others.sub("", os.environ.get(VARIABLE, "")).split())
    if before.is_file():
        add_flag(f"{TUNED_BEFORE}={before}")
    add_flag(f"{TUNED}={written}")
    there = value_of(TUNED)
    if there == str(written):
        return None
    why = f"{VARIABLE} has {TUNED}={there}" if there else "jax has started in this process"
    return f"XLA's choice of kernels is not kept in {folder}: {why}"


def ignore_absent_accelerators() -> None:
    """Keeps jax from looking for GPUs and TPUs on a host that has none, though plugins for them are
    installed: their search takes seconds, prints errors, and asks a cloud which TPU it has.

    Call it before jax starts; a choice by JAX_PLATFORMS is kept.
    """
    if os.environ.get("JAX_PLATFORMS") or not sys.platform.startswith("linux"):
        return
    present = any(any(Path("/dev").glob(pattern)) for pattern in DEVICE_FILES)
    if not present and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")


def value_of(flag: str) -> str | None:
    """Returns the value of a flag such as `--xla_x` in the environment; None where it has none."""
    values = dict(each.partition("=")[::2] for each in os.environ.get(VARIABLE, "").split())
    return values.get(flag)


def add_flag(flag: str) -> bool:
    """Returns whether XLA has the flag, or another of its name, when jax starts."""
    flags = os.environ.get(VARIABLE, "").split()
    if any(given.partition("=")[0] == flag.partition("=")[0] for given in flags):
        return True
    if xla_bridge.backends_are_initialized():
        return False
    os.environ[VARIABLE] = " ".join([*flags, flag])
    return True
