"""Who has which device: on this host, and with --address in a Ray cluster.

Lists the devices with their memory, the settings that hide or number them, every run of this user
with its workers, and what is free. NVIDIA GPUs are asked for through nvidia-smi, so that no memory
of theirs is taken; other devices through jax.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import rich.console
from rich import box
from rich.table import Table

from jaxrl.config import cli
from jaxrl.errors import RunError, UserError, short
from jaxrl.process.gpu_memory import OLD_NAME, VARIABLE

if TYPE_CHECKING:
    from jaxrl.runtime.cluster import Cluster
    from jaxrl.runtime.registry import Member, Run
    from jaxrl.runtime.worker import WorkerState

SMI_S = 20.0
"""Seconds that nvidia-smi may take."""
FREE_SHARE = 0.05
"""Share of a GPU's memory that may be in use while nobody has it: the driver keeps some."""
COMMAND_WIDTH = 60
"""Characters of a command that are shown."""
GB, MIB = 1e9, 1 << 20
WORKER = ("worker", "roles", "process", "devices")
"""Columns of a table of workers."""
NODE = ("node", "address")
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "a run from here sees these GPUs only, numbered from 0",
    "JAX_PLATFORMS": "a run from here uses the devices of these platforms only",
    "JAX_NUM_CPU_DEVICES": "a run from here emulates that many CPU devices",
} | dict.fromkeys(
    (VARIABLE, OLD_NAME), "the share of a GPU's memory that jax takes in a run from here"
)
"""Environment variables that decide which devices a run gets."""


@dataclass(frozen=True)
class LocalDevice:
    """A device of this host."""

    name: str
    """As `gpu:3`, counted as nvidia-smi does."""
    kind: str
    uuid: str
    """"" where there is none."""
    used: int | None
    """Bytes; None where unknown."""
    limit: int | None


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    uuid: str
    """Of the GPU."""
    used: int | None
    """Bytes; None where unknown."""


@dataclass(frozen=True)
class LocalHost:
    """The devices of this host and who computes on them."""

    devices: tuple[LocalDevice, ...]
    processes: tuple[GpuProcess, ...]
    notes: tuple[str, ...]
    """Why something is not known."""


def find_host() -> LocalHost:
    """The devices of this host according to nvidia-smi or, if there is none, to JAX."""
    notes: list[str] = []
    if shutil.which("nvidia-smi") is None:
        return LocalHost(jax_devices(notes.append), (), tuple(notes))
    try:
        gpus = parse_gpus(_smi("--query-gpu=index,uuid,name,memory.used,memory.total"))
        processes = parse_processes(_smi("--query-compute-apps=pid,gpu_uuid,used_memory"))
    except subprocess.TimeoutExpired:
        # A driver that does not answer would not answer jax either.
        hangs = f"nvidia-smi has not answered for {SMI_S:g} s: its driver hangs"
        return LocalHost((), (), (hangs,))
    except RunError as error:
        return LocalHost(jax_devices(notes.append), (), (str(error), *notes))
    plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    if gpus and not any(map(importlib.util.find_spec, plugins)):
        notes.append("jax here cannot use these GPUs: pip install 'jaxrl[cuda]'")
    if len({gpu.kind for gpu in gpus}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "these GPUs differ, and jax may count them otherwise: CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return LocalHost(gpus, processes, tuple(notes))


def _smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split())
        raise RunError(f"nvidia-smi failed: {output or f'exit code {done.returncode}'}")
    return done.stdout


def parse_gpus(text: str) -> tuple[LocalDevice, ...]:
    """Rows of index, uuid, name, MiB used, MiB in all."""
    return tuple(
        LocalDevice(f"gpu:{index}", kind, uuid, _bytes(used), _bytes(limit))
        for index, uuid, kind, used, limit in _rows(text)
    )


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """Rows of pid, uuid of the GPU, MiB used."""
    return tuple(GpuProcess(int(pid), uuid, _bytes(used)) for pid, uuid, used in _rows(text))


def _rows(text: str) -> Iterator[list[str]]:
    return (row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row)


def _bytes(mib: str) -> int | None:
    """None for `[N/A]` and the like."""
    return int(mib) * MIB if mib.strip().isdigit() else None


def jax_devices(notify: Callable[[str], None]) -> tuple[LocalDevice, ...]:
    """The devices that jax finds; starts its backend, with as little memory as that takes."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    from jaxrl.process.xla_flags import ignore_absent_accelerators

    try:
        ignore_absent_accelerators()
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an accelerator in use, or a wrong platform
        notify(f"jax cannot start: {error}")
        return ()
    found = []
    for device in devices:
        stats = device.memory_stats() or {}
        used, limit = stats.get("bytes_in_use"), stats.get("bytes_limit")
        name = f"{device.platform}:{device.id}"
        found.append(LocalDevice(name, device.device_kind, "", used, limit))
    return tuple(found)


def settings(environ: Iterable[tuple[str, str]]) -> list[str]:
    """The variables that are set and decide which devices a run from here gets."""
    from jaxrl.sharding.mesh import HOST_COUNT_FLAG

    lines = []
    for name, value in environ:
        if name in SETTINGS:
            lines.append(f"{name}={value}: {SETTINGS[name]}")
        elif name == "XLA_FLAGS" and (count := re.search(rf"{HOST_COUNT_FLAG}=\d+", value)):
            lines.append(f"XLA_FLAGS=--{count[0]}: {SETTINGS['JAX_NUM_CPU_DEVICES']}")
    return sorted(lines)


def physical(name: str, visible: str | None, gpus: Sequence[LocalDevice]) -> str:
    """The name on this host of a device that a process with CUDA_VISIBLE_DEVICES=`visible` counts
    as `name`.
    """
    platform, _, number = name.partition(":")
    if platform != "gpu" or visible is None:
        return name
    entries = visible.split(",")
    entry = entries[int(number)].strip() if int(number) < len(entries) else ""
    if entry.isdigit():
        return f"gpu:{int(entry)}"
    # A UUID, of which the beginning is enough.
    return next((gpu.name for gpu in gpus if entry and gpu.uuid.startswith(entry)), name)


def placed(run: Run, worker: Member, gpus: Sequence[LocalDevice]) -> list[str]:
    """The devices of a worker as its host counts them."""
    # Another process of a run has its own CUDA_VISIBLE_DEVICES, and names devices of its host.
    visible = run.visible if (worker.host, worker.pid) == (run.host, run.pid) else None
    return [physical(name, visible, gpus) for name in worker.devices]


def users(device: LocalDevice, host: LocalHost, runs: Sequence[Run]) -> list[str]:
    """Who has an accelerator; empty if it is free."""
    here = socket.gethostname()
    mine = [
        (run, worker)
        for run in runs
        for worker in run.workers
        if worker.host == here and device.name in placed(run, worker, host.devices)
    ]
    ours = {pid for run, worker in mine for pid in (run.pid, worker.pid)}
    others = [p for p in host.processes if p.uuid == device.uuid and p.pid not in ours]
    found = [f"{Path(run.run_dir).name}: {w.name} (pid {w.pid})" for run, w in mine]
    found += [f"pid {process.pid}: {_command(process)}" for process in others]
    if not found and device.used and device.limit and device.used > FREE_SHARE * device.limit:
        found.append("a process that cannot be seen from here")
    return found


def _command(process: GpuProcess) -> str:
    """The command of a process, cut, and the memory that it takes."""
    try:
        text = shlex.join(psutil.Process(process.pid).cmdline())
    except psutil.Error:
        text = "its command is not known here"
    cut = short(text, COMMAND_WIDTH)
    return cut if process.used is None else f"{cut} ({process.used / GB:.1f} GB)"


def host_page(host: LocalHost, runs: Sequence[Run]) -> list[Table | str]:
    """The devices, who has them, and which are free."""
    from jaxrl.sharding.mesh import host_available

    free_memory = f"{host_available() / GB:.1f} GB of memory free"
    page: list[Table | str] = [
        f"host {socket.gethostname()}: {os.cpu_count()} CPU cores, {free_memory}",
        *settings(os.environ.items()),
        *host.notes,
    ]
    if not host.devices:
        return page
    if all(device.name.startswith("cpu:") for device in host.devices):
        return [*page, "no accelerator: each run emulates the CPU devices that its mesh needs"]
    owners = {device: users(device, host, runs) for device in host.devices}
    rows = [
        (d.name, d.kind, _memory(d.used, d.limit), "; ".join(by) or "free")
        for d, by in owners.items()
    ]
    free = [device.name for device, by in owners.items() if not by]
    return [
        *page,
        _table(("device", "kind", "memory", "used by"), rows),
        f"free: {len(free)} of {len(host.devices)}: {', '.join(free) or 'none'}",
    ]


def run_page(run: Run, gpus: Sequence[LocalDevice]) -> list[Table | str]:
    """A run and its workers."""
    rows = [_worker(worker, placed(run, worker, gpus)) for worker in run.workers]
    head = f"run {run.run_dir}: pid {run.pid} since {run.started}: {run.command}"
    return [head, _table(WORKER, rows) if rows else "its workers have not started yet"]


def cluster_page(cluster: Cluster) -> list[Table | str]:
    """The nodes of a cluster and the workers of jaxrl on it."""
    from jaxrl.runtime.cluster import shown_kinds

    kinds = shown_kinds(cluster.hosts)
    nodes = [
        (
            node.name,
            node.address,
            *(f"{node.free[kind]} of {node.has[kind]}" for kind in kinds),
            _memory(node.free["memory"], node.has["memory"]),
        )
        for node in cluster.hosts
    ]
    rows = [(*_worker(worker, worker.devices), worker.phase) for worker in cluster.workers]
    return [
        f"cluster {cluster.address}",
        _table((*NODE, *(f"{kind}s free" for kind in kinds), "memory free"), nodes),
        _table((*WORKER, "phase"), rows) if rows else "no worker of jaxrl on it",
    ]


def _worker(worker: Member | WorkerState, devices: Iterable[str]) -> tuple[str, ...]:
    process = f"{worker.host}:{worker.pid}"
    return worker.name, ", ".join(worker.roles), process, ", ".join(devices)


def _memory(part: int | None, whole: int | None) -> str:
    if part is None or whole is None:
        return "not told"
    return f"{part / GB:.1f} of {whole / GB:.1f} GB"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def show(page: Iterable[Table | str]) -> None:
    """Prints a page; on no terminal, its lines are as long as they are."""
    width = None if sys.stdout.isatty() else 1000
    console = rich.console.Console(width=width, color_system=None, highlight=False, markup=False)
    for part in page:
        if isinstance(part, str):
            print(part)
            continue
        with console.capture() as captured:
            console.print(part)
        print("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))


def check_address(address: str) -> None:
    """Raises UserError for what cannot be an address, and for any without Ray."""
    if not re.fullmatch(r"auto|(ray://)?[^\s/]+:\d{1,5}", address):
        raise UserError(
            f"{address!r} is no address of a Ray cluster: write HOST:PORT, or auto for the cluster"
            " of this host (--address, or else RAY_ADDRESS)"
        )
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"a cluster ({address}) needs the package ray: pip install 'jaxrl[ray]'")


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.devices", __doc__ or "")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=os.environ.get("RAY_ADDRESS"),
        help="a Ray cluster to list too (default: RAY_ADDRESS, where set)",
    )
    address = parser.parse(argv).address
    if address:
        check_address(address)
    from jaxrl.runtime.registry import running

    notes: list[str] = []
    runs = running(notes.append)
    host = find_host()
    show([*host_page(host, runs), *notes])
    for run in runs:
        show(["", *run_page(run, host.devices)])
    if not runs:
        print("no run of this user works here")
    if address:
        from jaxrl.runtime.ray.connect import cluster

        show(["", *cluster_page(cluster(address))])


if __name__ == "__main__":
    sys.exit(cli.run(main))
