"""Which roles of a starting run share the conversion of a model file, and where it is kept."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxrl.checkpoint.source import ModelSource
from jaxrl.formats.converted import Scratch
from jaxrl.formats.weights import tensor_shapes
from jaxrl.plan import Plan
from jaxrl.process.folder_lock import lock_folder
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sharding.mesh import host_available

Loads = Sequence[tuple[str, ModelSource, str]]
"""(role, a model that it loads when it starts, in which dtype)."""
PREFIX = "jaxrl-converted-"
GB = 1e9


@contextmanager
def converted_once(
    loads: Loads, plan: Plan, wait_s: float, log: Callable[[str], None]
) -> Iterator[dict[Path, Scratch]]:
    """Place of a model file -> where its roles share its conversion, while the block runs.

    It takes host memory that the plan leaves free, or is not made. Workers on other hosts than this
    one do not find it.
    """
    found: dict[Path, Scratch] = {}
    spare = _spare(plan)
    with ExitStack() as made:
        for place, each in _together(loads, plan).items():
            roles, (source, *_) = [role for role, _, _ in each], [source for _, source, _ in each]
            dtype = str(jnp.result_type(*(jnp.dtype(dtype) for _, _, dtype in each)))
            size = _elements(source) * jnp.dtype(dtype).itemsize
            if not size:
                continue
            root = _root(size) if size <= spare else None
            loaded = f"{source.name} is loaded by {' and '.join(roles)}"
            if root is None:
                log(f"{loaded}; each converts it, as {size / GB:.1f} GB are not free to share it")
                continue
            folder, lock = _make(root)
            made.callback(os.close, lock)
            made.callback(shutil.rmtree, folder, ignore_errors=True)
            found[place] = Scratch(folder, dtype, wait_s)
            spare -= size
            log(
                f"{loaded}; it is converted once, into {size / GB:.1f} GB of {root} until they have"
                " started"
            )
        yield found


def _together(loads: Loads, plan: Plan) -> dict[Path, Loads]:
    """The model files that several roles of one host load, with these loads."""
    by_place: dict[Path, list[tuple[str, ModelSource, str]]] = {}
    for load in loads:
        source = load[1]
        if source.path.suffix == ".gguf":  # safetensors are mapped: nothing is converted
            by_place.setdefault(source.path.resolve(), []).append(load)
    hosts = {role: _hosts(plan, role) for role, _, _ in loads}
    return {
        place: each
        for place, each in by_place.items()
        if any(hosts[a] & hosts[b] for a, _, _ in each for b, _, _ in each if a < b)
    }


def _hosts(plan: Plan, role: str) -> set[str]:
    devices = [plan.devices[i] for i in plan.placement.roles[role].devices]
    return {d.host if isinstance(d, ClusterDevice) else "here" for d in devices}


def _spare(plan: Plan) -> int:
    """Bytes of host memory that the run leaves free. On accelerators the plan does not count it:
    half of what is free is left to buffers and to what is offloaded.
    """
    sizes = [pool.bytes for pool in plan.pools]
    if plan.inputs.hosts:
        return min(host.limit - host.needed(sizes) for host in plan.inputs.hosts)
    return host_available() // 2


def _elements(source: ModelSource) -> int:
    """Of the tensors that have to be dequantised."""
    file: Any = source.tensors
    shapes = tensor_shapes(source.config)
    return sum(math.prod(shape) for name, shape in shapes.items() if file.is_quantised(name))


def _root(size: int) -> Path | None:
    """A folder with room: in memory, or else the one of temporary files."""
    for root in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if os.access(root, os.W_OK) and shutil.disk_usage(root).free > size:
            return root
    return None


def _make(root: Path) -> tuple[Path, int]:
    """A new folder and a lock on it; those whose run was killed are removed first."""
    for old in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = lock_folder(old)
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    return folder, lock_folder(folder)
