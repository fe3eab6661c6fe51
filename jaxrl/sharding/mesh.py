"""From visible devices to the meshes of the roles."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import psutil
from jax._src import hardware_utils  # no public function counts chips
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl.errors import UserError, counted
from jaxrl.process import xla_flags
from jaxrl.process.compile_cache import compile_unordered_programs_again
from jaxrl.process.gpu_memory import take_share
from jaxrl.sharding.axes import AXIS_NAMES, Axes
from jaxrl.sharding.placement import Placement, device_list
from jaxrl.types import Tree

HOST_COUNT_FLAG = "xla_force_host_platform_device_count"
DEV = Path("/dev")
CROWD = 8
"""Emulated devices for each core from which on they are called slow."""
MOST_EMULATED = 512
"""CPU devices that are made without being told how many: each takes threads and memory."""


class DeviceFacts(Protocol):
    """A `jax.Device` of this process, or one of a cluster (`runtime.cluster.ClusterDevice`)."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...
    def memory_stats(self) -> Mapping[str, int] | None: ...


@dataclass(frozen=True)
class Visible:
    """The devices that a run may use."""

    devices: tuple[DeviceFacts, ...]
    note: str | None
    """Says so where the devices are emulated."""
    launcher: str = "local"
    why: str = ""
    """What chose the launcher; empty where nobody could have expected another."""

    @property
    def emulated(self) -> bool:
        return self.note is not None


def ensure_devices(needed: int) -> Visible:
    """Returns the visible devices, at least `needed`; on a host without an accelerator they are
    emulated.

    Call it before anything asks jax for its devices: their number is fixed by the first question.
    A number given by JAX_NUM_CPU_DEVICES, XLA_FLAGS or `jax.config` is kept.

    Raises:
        UserError: fewer than `needed`, with the reason and the way out.
    """
    xla_flags.check_jax_settings()
    asked = _count_asked_for()
    late = False
    if asked is None:  # harmless where there is an accelerator: only the CPU backend reads it
        try:
            jax.config.update("jax_num_cpu_devices", min(needed, MOST_EMULATED))
        except RuntimeError:  # the backend runs already
            late = True
    xla_flags.wait_for_slow_devices()
    xla_flags.ignore_absent_accelerators()
    take_share()
    try:
        devices = tuple(jax.devices())
    except (RuntimeError, AssertionError) as error:  # jax asserts where a named platform is missing
        asked = os.environ.get("JAX_PLATFORMS", "")
        raise UserError(
            f"jax finds no device for JAX_PLATFORMS={asked!r}; unset it. {error}".strip()
        ) from error
    if len(devices) < needed:
        seen, platform = len(devices), devices[0].platform
        have = f"the mesh needs {needed} devices, but jax sees {seen} ({platform})"
        if platform != "cpu":
            raise UserError(f"{have}: ask for fewer, or set JAX_PLATFORMS=cpu to emulate them")
        if needed > MOST_EMULATED:
            raise UserError(f"{have}: ask for fewer; at most {MOST_EMULATED} are emulated")
        why = f"{asked} sets that number"
        if late:
            why = "jax was started before the mesh was known"
        raise UserError(f"{have}: {why}; start python with JAX_NUM_CPU_DEVICES={needed}")
    if devices[0].platform != "cpu":
        return Visible(devices, None)
    emulating = emulation_note(len(devices), cores_here())
    note = f"no accelerator: {emulating}"
    if gpus := min(accelerators_here(), len(list(DEV.glob("nvidia[0-9]*")))):
        note = (
            f"WARNING: this host has {counted(gpus, 'NVIDIA GPU')}, and jax sees none:"
            " pip install 'jaxrl[cuda]' (driver 525 or later) or 'jaxrl[cuda13]' (580 or later),"
            f" then check with `jaxrl devices`; {emulating}"
        )
    return Visible(devices, note)


def emulation_note(n: int, cores: int) -> str:
    """Describes n emulated devices, and their speed where they crowd the cores."""
    note = f"emulating {n} CPU {'device' if n == 1 else 'devices'}"
    if n >= CROWD * cores:
        note += f" on {cores} {'core' if cores == 1 else 'cores'}: slow, and no faster than fewer"
    return note


def accelerators_here() -> int:
    """Counts the GPUs of this host that a process may use, without starting jax."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    return len(list(DEV.glob("nvidia[0-9]*")))


def tpu_chips_here() -> int:
    """Counts the TPU chips of this host that a process may use, without starting jax; 0 if jax
    lacks the package that drives them."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return 0
    if importlib.util.find_spec("libtpu") is None:
        return 0
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    return chips


def threads_of_one_process(needed: int) -> int:
    """Counts the threads for which XLA would cut the work of this process if it emulated the
    devices of a run that needs so many: the results of large matrix products depend on that number,
    in their last bits."""
    asked = _count_asked_for()
    cores = int(os.environ.get("NPROC") or cores_here())
    return max(cores, needed if asked is None else int(asked.rpartition("=")[2]))


def cores_here() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return (len(affinity(0)) if affinity else os.cpu_count()) or 1


def _count_asked_for() -> str | None:
    """Returns where the number of CPU devices was set, and to what, or None; jax's own setting
    takes precedence over XLA's flag."""
    settings: Any = jax.config  # the types of jax 0.10 do not know it
    value: int = settings.jax_num_cpu_devices
    if value >= 0:
        name = "JAX_NUM_CPU_DEVICES"
        return f"{name if name in os.environ else name.lower()}={value}"
    match = re.search(rf"{HOST_COUNT_FLAG}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return f"XLA_FLAGS=--{match[0]}" if match else None


def role_mesh(devices: Sequence[DeviceFacts], axes: Axes) -> Mesh:
    """Makes a mesh (data, fsdp, tensor) over `devices` in order; neighbours share the last axis.
    Over described devices (`targets.DescribedDevice`) programs can be traced, but not run."""
    if len(devices) > 1 and isinstance(devices[0], jax.Device) and devices[0].platform == "cpu":
        compile_unordered_programs_again()
    grid = np.asarray(devices, dtype=object).reshape(axes)
    return Mesh(grid, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


def abstract_mesh(axes: Axes) -> AbstractMesh:
    """Returns a mesh without devices, on which arrays have sizes."""
    return AbstractMesh(tuple(axes), AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


def role_meshes(
    devices: Sequence[DeviceFacts], placement: Placement, axes: Mapping[str, Axes]
) -> dict[str, Mesh]:
    """Maps each role that `axes` names to its mesh."""
    return {
        role: role_mesh([devices[i] for i in placement.roles[role].devices], sizes)
        for role, sizes in axes.items()
    }


def verify_arrays(role: str, arrays: Tree, mesh: Mesh) -> None:
    """Checks, inside the worker, that a role's arrays lie on exactly the devices of its mesh."""
    held = {device.id for leaf in jax.tree.leaves(arrays) for device in leaf.sharding.device_set}
    expected = {device.id for device in mesh.devices.flat}
    if held != expected:
        raise RuntimeError(
            f"{role} was given devices {device_list(expected)}, but its arrays lie on"
            f" {device_list(held)}"
        )


def is_primary(devices: Iterable[jax.Device]) -> bool:
    """Returns whether this process is the first of those that share `devices`: the one that writes
    files.

    The others have the same values, and take part where an array is gathered.
    """
    return min(device.process_index for device in devices) == jax.process_index()


def bytes_limit(device: DeviceFacts) -> int | None:
    """Returns the bytes that a run may use on `device` (for an emulated one, those that all on its
    host share), or None if nobody knows."""
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # of a machine that programs are compiled for elsewhere
        return None
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"])
    return host_available() if device.platform == "cpu" else None


def host_available() -> int:
    """Returns the bytes of host memory that are still available, within the container's limit."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return available
    return min(available, max(limit - used, 0))
