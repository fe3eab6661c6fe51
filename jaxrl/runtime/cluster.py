"""Which host of a cluster holds which pool: pure arithmetic, no ray.

A pool goes whole to the first host with room for it; where none has, it is shared evenly by the
fewest hosts. What does not fit is refused before anything is asked of the cluster, with what is
needed beside what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import UserError
from jaxrl.runtime.worker import WorkerState
from jaxrl.sharding.placement import Placement

GB = 1e9


@dataclass(frozen=True)
class Host:
    """A machine of the cluster, as it is before the run."""

    id: str
    name: str
    address: str
    cpus: int
    cpus_free: int
    gpus: int
    gpus_free: int
    memory: int
    memory_free: int
    """Bytes of host memory."""
    gpu_memory: tuple[int, ...] = ()
    """Bytes of each GPU, where the driver tells."""
    capability: str | None = None
    """Least compute capability of its GPUs, where the driver tells."""


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

    def memory_stats(self) -> Mapping[str, Any] | None:
        return None if self.limit is None else {"bytes_limit": self.limit}


def process_slots(
    placement: Placement, hosts: Sequence[Host], on_gpu: bool, most: int | None
) -> tuple[ProcessSlot, ...]:
    """A host, and its share of the devices, for each worker process.

    Args:
        on_gpu: a device is a GPU; otherwise it is emulated, and takes one CPU.
        most: devices of one process at most (`ray.devices_per_worker`).

    Raises:
        UserError: the cluster is too small, with both tables, or `most` does not divide a share.
    """
    free = {host.id: host.gpus_free if on_gpu else host.cpus_free for host in hosts}
    found: list[ProcessSlot] = []
    for index, pool in enumerate(placement.pools):
        shares = _shares(len(pool.devices), hosts, free)
        if shares is None:
            raise UserError(_too_small(placement, hosts, on_gpu, pool.name))
        rank = 0
        for host, count in shares:
            free[host.id] -= count
            for size in _processes(count, most, pool.name):
                found.append(ProcessSlot(index, rank, host, size))
                rank += 1
    return tuple(found)


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


def _processes(count: int, most: int | None, pool: str) -> list[int]:
    if most is None or count <= most:
        return [count]
    if count % most:
        raise UserError(
            f"ray.devices_per_worker={most} does not divide the {count} devices of {pool} on one"
            " host: every process of a pool has as many"
        )
    return [most] * (count // most)


def _too_small(placement: Placement, hosts: Sequence[Host], on_gpu: bool, stuck: str) -> str:
    kind = "GPUs" if on_gpu else "CPUs (one for each emulated device)"
    total = sum(host.gpus_free if on_gpu else host.cpus_free for host in hosts)
    return (
        f"the cluster is too small: the mesh {placement.spec!r} needs {placement.n_devices} {kind},"
        f" {total} are free; there is no room for {stuck}\n"
        f"{needs_table(placement, on_gpu)}\n{hosts_table(hosts)}\n"
        "ask for fewer devices, wait until others are done, or add nodes with"
        " `ray start --address=HEAD:PORT`"
    )


def needs_table(placement: Placement, on_gpu: bool) -> str:
    """What each pool asks of the cluster."""
    unit = "GPU" if on_gpu else "CPU"
    rows = [(f"needs: {pool.name}", f"{len(pool.devices)} {unit}") for pool in placement.pools]
    return _table(rows)


def hosts_table(hosts: Sequence[Host]) -> str:
    """What each node has: free of all."""
    return _table(
        [
            (
                f"has: {host.name} ({host.address})",
                f"{host.cpus_free} of {host.cpus} CPU",
                f"{host.gpus_free} of {host.gpus} GPU",
                f"{host.memory_free / GB:.1f} of {host.memory / GB:.1f} GB memory",
            )
            for host in hosts
        ]
    )


def devices_of(
    placement: Placement, places: Sequence[ProcessSlot], on_gpu: bool
) -> tuple[ClusterDevice, ...]:
    """Every device of the run in the order of the placement."""
    found: list[ClusterDevice] = []
    for process, slot in enumerate(places):
        host = slot.host
        if on_gpu:
            limit = min(host.gpu_memory) if host.gpu_memory else None
        else:
            limit = host.memory_free or None
        for _ in range(slot.devices):
            platform = "gpu" if on_gpu else "cpu"
            reported = host.name, limit, host.capability
            found.append(ClusterDevice(len(found), platform, process, *reported))
    return tuple(found)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
