"""Which host of a cluster holds which pool: pure arithmetic, no ray.

A pool goes whole to the first host with room for it; where none has, it is shared evenly by the
fewest hosts. What does not fit is refused before anything is asked of the cluster, with what is
needed beside what there is.

A process of GPUs sees those that Ray gives it. TPU chips are chosen here: the runtime of a process
(libtpu) takes a block of neighbours, and Ray would give any that are free.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxrl.errors import UserError
from jaxrl.process.gpu_memory import SHARE, gpu_share, nvidia_smi
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.worker import WorkerState
from jaxrl.sharding.mesh import threads_of_one_process
from jaxrl.sharding.placement import Placement

GB = 1e9
Kind = Literal["GPU", "TPU", "CPU"]
"""What a device is, by the name of its resource in Ray; a CPU stands for an emulated device."""
Resource = Kind | Literal["memory"]
RESOURCES: tuple[Resource, ...] = ("CPU", "GPU", "TPU", "memory")
BLOCKS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of a process -> the shape of their block, as libtpu wants it. The shapes are those that
Ray (`accelerators/tpu.py`) and JAX's own multi-process tests use; a block starts at a multiple of
its size."""
TPU_PORT = 8476
"""The port of libtpu in a process that has the host's first chip; the next chip's is the next."""


@dataclass(frozen=True)
class Host:
    """A machine of the cluster, as it is before the run."""

    id: str
    name: str
    address: str
    has: Mapping[Resource, int]
    """All devices of each kind; bytes of host memory."""
    free: Mapping[Resource, int]
    """What of these nobody has taken."""
    gpu_memory: tuple[int, ...] = ()
    """Bytes of each GPU, where the driver tells."""
    capability: str | None = None
    """Least compute capability of its GPUs, where the driver tells."""
    gpu_kind: str = ""
    """Name of a GPU of that capability, as `jax.Device.device_kind`."""
    gpu_share: float = SHARE
    """The part of them that jax would take in a worker there."""

    def usable(self, kind: Kind) -> int:
        """Counts the devices for a run. A host's TPU chips are for one run: who has which is
        known only where nobody else has any."""
        return 0 if kind == "TPU" and self.free[kind] < self.has[kind] else self.free[kind]


@dataclass(frozen=True)
class Cluster:
    """A cluster and the workers of jaxrl on it, whosever they are."""

    address: str
    hosts: list[Host]
    workers: list[WorkerState]


@dataclass(frozen=True)
class ProcessSlot:
    """One worker process: some devices of one pool on one host."""

    pool: int
    """Index into `Placement.pools`."""
    rank: int
    """Number among the processes of its pool, which share its devices in this order."""
    host: Host
    devices: int
    chips: tuple[int, ...] = ()
    """Numbers of its TPU chips on the host."""


@dataclass(frozen=True)
class ClusterDevice:
    """A device of the cluster as a plan needs it: what `jax.Device` tells of a local one."""

    id: int
    platform: str
    process_index: int
    host: str
    limit: int | None
    """Bytes that a run may use on it; of an emulated one, those that all on its host share."""
    compute_capability: str | None = None
    share: float | None = None
    """Of a GPU's memory, what the limit is."""
    device_kind: str = ""

    def memory_stats(self) -> Mapping[str, int] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


def ask_driver(share: float | None) -> Keywords:
    """Asks the driver of this host's GPUs for their facts, as fields of `Host`.

    Args:
        share: what the user of the run has set; it counts before what is set on this host.
    """
    try:
        gpus = nvidia_smi("--query-gpu=memory.total,compute_cap,name")
    except (OSError, subprocess.SubprocessError):
        return {}
    memory = tuple(int(mib) << 20 for mib, *_ in gpus)
    kinds = [(capability, name) for _, capability, name in gpus]
    least = min(kinds, key=lambda kind: tuple(map(int, kind[0].split("."))), default=(None, ""))
    weakest = dict(zip(("capability", "gpu_kind"), least, strict=True))
    return {"gpu_memory": memory, "gpu_share": share or gpu_share()} | weakest


def process_slots(
    placement: Placement, hosts: Sequence[Host], kind: Kind, most: int | None
) -> tuple[ProcessSlot, ...]:
    """Returns a host, and its share of the devices, for each worker process.

    Args:
        most: devices of one process at most (`ray.devices_per_worker`).

    Raises:
        UserError: the cluster is too small, with both tables; `most` does not divide a share; or a
            pool's TPU chips are no block of one host.
    """
    free = {host.id: host.usable(kind) for host in hosts}
    chips = {host.id: list(range(host.has["TPU"])) for host in hosts}
    found: list[ProcessSlot] = []
    for index, pool in enumerate(placement.pools):
        n = len(pool.devices)
        shares = _shares(n, hosts, free)
        if shares is None:
            raise UserError(_too_small(placement, hosts, kind, pool.name))
        if kind == "TPU" and n:
            (host, *others) = (host for host, _ in shares)
            if n not in BLOCKS or others or (most or n) < n:
                sizes = [size for size in BLOCKS if size <= max(host.has["TPU"] for host in hosts)]
                cut = f" in processes of {most} (ray.devices_per_worker)" if (most or n) < n else ""
                raise UserError(
                    f"the mesh {placement.spec!r} gives {pool.name} {n} TPU chips{cut}; with"
                    " launcher=ray a pool of TPUs is one process with"
                    f" {', '.join(map(str, sizes))} chips of one host, which libtpu can set apart:"
                    f" change that pool{' and leave the key out' if cut else ''}, or set"
                    " launcher=local, where one process has all chips of this host and pools of any"
                    " size"
                )
            # The first block that fits is always the smallest that does, so that blocks of any
            # sizes use up a host of 1, 2, 4 or 8 chips.
            left = chips[host.id]
            starts = (
                chip for chip in left if chip % n == 0 and {*range(chip, chip + n)} <= {*left}
            )
            if (start := next(starts, None)) is None:
                raise UserError(_too_small(placement, hosts, kind, pool.name))
            block = tuple(range(start, start + n))
            chips[host.id] = [chip for chip in left if chip not in block]
            free[host.id] -= n
            found.append(ProcessSlot(index, 0, host, n, block))
            continue
        rank = 0
        for host, count in shares:
            free[host.id] -= count
            size = min(count, most or count)
            if count % max(size, 1):
                raise UserError(
                    f"ray.devices_per_worker={most} does not divide the {count} devices of"
                    f" {pool.name} on one host: every process of a pool has as many"
                )
            for _ in range(count // size if size else 1):
                found.append(ProcessSlot(index, rank, host, size))
                rank += 1
    return tuple(found)


def worker_variables(slot: ProcessSlot, kind: Kind, placement: Placement) -> dict[str, str]:
    """Returns the environment that gives a process its devices, and no others."""
    if kind == "GPU" and slot.devices:
        return {"JAX_PLATFORMS": "cuda,cpu"}
    if kind == "TPU" and slot.devices:  # Ray would name other chips
        ours = {"JAX_PLATFORMS": "tpu,cpu", "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1"}
        if slot.devices == slot.host.has["TPU"]:
            return ours
        port = TPU_PORT + slot.chips[0]
        return ours | {
            "TPU_VISIBLE_CHIPS": ",".join(map(str, slot.chips)),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": BLOCKS[slot.devices],
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
            "TPU_PROCESS_PORT": str(port),
            "CLOUD_TPU_TASK_ID": "0",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # each process has chips of its own
        }
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(max(slot.devices, 1)),
        # As many as one process with all of the run's devices, so that every launcher computes
        # the same bits.
        "NPROC": str(threads_of_one_process(placement.n_devices)),
    }


def _shares(
    n: int, hosts: Sequence[Host], free: Mapping[str, int]
) -> list[tuple[Host, int]] | None:
    for parts in range(1, len(hosts) + 1):
        if n % parts:
            continue
        fitting = [host for host in hosts if free[host.id] >= n // parts]
        if len(fitting) >= parts:
            return [(host, n // parts) for host in fitting[:parts]]
    return None


def _too_small(placement: Placement, hosts: Sequence[Host], kind: Kind, stuck: str) -> str:
    units = {
        "GPU": "GPUs",
        "TPU": "TPU chips (of hosts where all are free)",
        "CPU": "CPUs (one for each emulated device)",
    }
    total = sum(host.usable(kind) for host in hosts)
    return (
        f"the cluster is too small: the mesh {placement.spec!r} needs {placement.n_devices}"
        f" {units[kind]}, {total} are free; there is no room for {stuck}\n"
        f"{needs_table(placement, kind)}\n{hosts_table(hosts)}\n"
        "ask for fewer devices, wait until others are done, or add nodes with"
        " `ray start --address=HEAD:PORT`"
    )


def needs_table(placement: Placement, kind: Kind) -> str:
    """Shows what each pool asks of the cluster."""
    rows = [(f"needs: {pool.name}", f"{len(pool.devices)} {kind}") for pool in placement.pools]
    return _table(rows)


def hosts_table(hosts: Sequence[Host]) -> str:
    """Shows what each node has: free of all."""
    return _table(
        [
            (
                f"has: {host.name} ({host.address})",
                *(f"{host.free[kind]} of {host.has[kind]} {kind}" for kind in shown_kinds(hosts)),
                f"{host.free['memory'] / GB:.1f} of {host.has['memory'] / GB:.1f} GB memory",
            )
            for host in hosts
        ]
    )


def shown_kinds(hosts: Sequence[Host]) -> list[Kind]:
    """Returns the kinds of devices that a table of hosts has columns for."""
    return ["CPU", "GPU", "TPU"] if any(host.has["TPU"] for host in hosts) else ["CPU", "GPU"]


def devices_of(
    placement: Placement, places: Sequence[ProcessSlot], kind: Kind
) -> tuple[ClusterDevice, ...]:
    """Returns every device of the run in the order of the placement."""
    found: list[ClusterDevice] = []
    for process, slot in enumerate(places):
        host = slot.host
        limit = (host.free["memory"] or None) if kind == "CPU" else None
        if kind == "GPU" and host.gpu_memory:
            limit = round(host.gpu_share * min(host.gpu_memory))
        share = host.gpu_share if kind == "GPU" else None
        for _ in range(slot.devices):
            reported = host.name, limit, host.capability, share, host.gpu_kind
            found.append(ClusterDevice(len(found), kind.lower(), process, *reported))
    return tuple(found)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
