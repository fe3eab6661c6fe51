"""Who uses which device: on this host, and with --address in a Ray cluster.

Lists the devices with their memory, the settings that hide or number them, who computes on each,
what is free, and the processes of jaxrl on this host. NVIDIA GPUs are asked for through nvidia-smi,
so that no memory of theirs is taken; other devices through jax, which does not tell who uses them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import psutil

from jaxrl.config import cli
from jaxrl.errors import short
from jaxrl.process.gpu_memory import OLD_NAME, SMI_S, VARIABLE, nvidia_smi
from jaxrl.process.streams import table_lines, terminal_width

if TYPE_CHECKING:
    from jaxrl.runtime.cluster import Cluster

FREE_SHARE = 0.05
"""Share of a GPU's memory that may be in use while nobody has it: the driver keeps some."""
COMMAND_WIDTH, RUN_WIDTH = 60, 160
"""Characters of a command that are shown beside a device, and of a process of jaxrl."""
GB, MIB = 1e9, 1 << 20
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
"""What computes on devices; those that are installed are listed."""
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
    used: int | None
    """Bytes; None where unknown."""
    limit: int | None
    users: tuple[str, ...] = ()
    """Who computes on it; empty where it is free, or nobody tells."""


def local_devices(notify: Callable[[str], None]) -> list[LocalDevice]:
    """Returns the devices of this host according to nvidia-smi or, where there is none, to jax.

    Args:
        notify: receives why something is not known.
    """
    if shutil.which("nvidia-smi") is None:
        return jax_devices(notify)
    try:
        gpus = nvidia_smi("--query-gpu=index,uuid,name,memory.used,memory.total", SMI_S)
        processes = nvidia_smi("--query-compute-apps=pid,gpu_uuid,used_memory", SMI_S)
    except subprocess.TimeoutExpired:
        # A driver that does not answer would not answer jax either.
        notify(f"nvidia-smi has not answered for {SMI_S:g} s: its driver hangs")
        return []
    except subprocess.CalledProcessError as error:
        output = " ".join(f"{error.stdout} {error.stderr}".split())
        notify(f"nvidia-smi failed: {output or f'exit code {error.returncode}'}")
        return jax_devices(notify)
    plugins = [f"jax_cuda{version}_plugin" for version in (12, 13)]
    if gpus and not any(map(importlib.util.find_spec, plugins)):
        notify("jax here cannot use these GPUs: pip install 'jaxrl[cuda]'")
    kinds = {kind for _, _, kind, _, _ in gpus}
    if len(kinds) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notify("these GPUs differ, and jax may count them otherwise: CUDA_DEVICE_ORDER=PCI_BUS_ID")
    devices = []
    for index, uuid, kind, memory, total in gpus:
        used, limit = _bytes(memory), _bytes(total)
        users = [_user(int(pid), _bytes(mib)) for pid, gpu, mib in processes if gpu == uuid]
        if not users and used and limit and used > FREE_SHARE * limit:
            users.append("a process that cannot be seen from here")
        devices.append(LocalDevice(f"gpu:{index}", kind, used, limit, tuple(users)))
    return devices


def _bytes(mib: str) -> int | None:
    """Reads a number of MiB; None for `[N/A]` and the like."""
    return int(mib) * MIB if mib.strip().isdigit() else None


def _user(pid: int, used: int | None) -> str:
    try:
        text = shlex.join(psutil.Process(pid).cmdline())
    except psutil.Error:
        text = "its command is not known here"
    memory = "" if used is None else f" ({used / GB:.1f} GB)"
    return f"pid {pid}: {short(text, COMMAND_WIDTH)}{memory}"


def jax_devices(notify: Callable[[str], None]) -> list[LocalDevice]:
    """Returns the devices that jax finds; starts its backend, with as little memory as that takes.

    Args:
        notify: receives why jax cannot start.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    from jaxrl.process.xla_flags import ignore_absent_accelerators

    try:
        ignore_absent_accelerators()
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an accelerator in use, or a wrong platform
        notify(f"jax cannot start: {error}")
        return []
    stats = {device: device.memory_stats() or {} for device in devices}
    return [
        LocalDevice(
            f"{device.platform}:{device.id}",
            device.device_kind,
            memory.get("bytes_in_use"),
            memory.get("bytes_limit"),
        )
        for device, memory in stats.items()
    ]


def settings(environ: Iterable[tuple[str, str]]) -> list[str]:
    """Lists the variables that are set and decide which devices a run from here gets."""
    from jaxrl.sharding.mesh import HOST_COUNT_FLAG

    lines = []
    for name, value in environ:
        if name in SETTINGS:
            lines.append(f"{name}={value}: {SETTINGS[name]}")
        elif name == "XLA_FLAGS" and (count := re.search(rf"{HOST_COUNT_FLAG}=\d+", value)):
            lines.append(f"XLA_FLAGS=--{count[0]}: {SETTINGS['JAX_NUM_CPU_DEVICES']}")
    return sorted(lines)


def host_page(devices: Sequence[LocalDevice]) -> list[str]:
    """Shows the devices of this host, who uses them, and which are free."""
    from jaxrl.sharding.mesh import host_available

    versions = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    with suppress(OSError, subprocess.SubprocessError):  # none, or what `local_devices` reports
        drivers = {row[0] for row in nvidia_smi("--query-gpu=driver_version", SMI_S)}
        versions += [f"NVIDIA driver {driver}" for driver in sorted(drivers)]
    free_memory = f"{host_available() / GB:.1f} GB of memory free"
    page: list[str] = [
        f"host {socket.gethostname()}: {os.cpu_count()} CPU cores, {free_memory}",
        ", ".join(versions),
        *settings(os.environ.items()),
    ]
    if not devices:
        return page
    if all(device.name.startswith("cpu:") for device in devices):
        return [*page, "no accelerator: each run emulates the CPU devices that its mesh needs"]
    rows = [
        (d.name, d.kind, _memory(d.used, d.limit), "; ".join(d.users) or "free") for d in devices
    ]
    free = [device.name for device in devices if not device.users]
    return [
        *page,
        *_table(("device", "kind", "memory", "used by"), rows),
        f"free: {len(free)} of {len(devices)}: {', '.join(free) or 'none'}",
    ]


def is_jaxrl(words: Sequence[str]) -> bool:
    """Returns whether a command line is that of a worker of Ray, or of a command of jaxrl other
    than this one."""
    if words and words[0].startswith("ray::jaxrl:"):
        return True
    command = " ".join(words[1:4])  # `-m jaxrl.train ...`, `-m jaxrl train`, `.../bin/jaxrl train`
    return re.match(r"(-m |\S*/bin/)jaxrl[. ](?!devices\b)\w", command) is not None


def process_page() -> list[str]:
    """Shows the processes of jaxrl on this host that this user may see."""
    rows = []
    for process in psutil.process_iter(["pid", "cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        if is_jaxrl(words):
            since = datetime.fromtimestamp(process.info["create_time"])
            text = short(shlex.join(word for word in words if word), RUN_WIDTH)
            rows.append((str(process.pid), since.isoformat(" ", "minutes"), text))
    if not rows:
        return ["no process of jaxrl works here"]
    return _table(("process", "since", "command"), rows)


def cluster_page(cluster: Cluster) -> list[str]:
    """Shows the nodes of a cluster and the workers of jaxrl on it."""
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
    workers = [
        (w.name, ", ".join(w.roles), f"{w.host}:{w.pid}", ", ".join(w.devices), w.phase)
        for w in cluster.workers
    ]
    columns = ("worker", "roles", "process", "devices", "phase")
    titles = ("node", "address", *(f"{kind}s free" for kind in kinds), "memory free")
    return [
        f"cluster {cluster.address}",
        *_table(titles, nodes),
        *(_table(columns, workers) if workers else ["no jaxrl workers"]),
    ]


def _memory(part: int | None, whole: int | None) -> str:
    if part is None or whole is None:
        return "unknown"
    return f"{part / GB:.1f} of {whole / GB:.1f} GB"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; on no terminal, they are as long as they are."""
    width = terminal_width() if sys.stdout.isatty() else 1000
    return table_lines(None, titles, (), rows, width, wrap=True)


def main(argv: Sequence[str]) -> None:
    """Runs `python -m jaxrl.devices`."""
    parser = cli.Parser("jaxrl.devices", __doc__ or "")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=os.environ.get("RAY_ADDRESS"),
        help="a Ray cluster to list too (default: RAY_ADDRESS, where set)",
    )
    address, notes = parser.parse(argv).address, list[str]()
    if address:
        from jaxrl.runtime.ray.connect import check_address, read_cluster

        check_address(address)
    devices = local_devices(notes.append)
    print("\n".join([*host_page(devices), *notes, "", *process_page()]))
    if address:
        print("\n".join(["", *cluster_page(read_cluster(address))]))


if __name__ == "__main__":
    sys.exit(cli.run(main))
