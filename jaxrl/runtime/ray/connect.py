"""Joins a Ray cluster, or starts one on this host: its nodes, what is free on each, and which
process goes where.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace

import jax
import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl.config.settings import RayConfig
from jaxrl.errors import UserError
from jaxrl.process.gpu_memory import given_share, gpu_share
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.cluster import (
    RESOURCES,
    Cluster,
    Host,
    Kind,
    ProcessSlot,
    Resource,
    devices_of,
    process_slots,
)
from jaxrl.runtime.ray.auth import show_token
from jaxrl.runtime.ray.own import leave, leave_at_exit, private, started_here, usable
from jaxrl.runtime.worker import POLL_S
from jaxrl.sharding.mesh import (
    MOST_EMULATED,
    Visible,
    accelerators_here,
    host_available,
    tpu_chips_here,
)
from jaxrl.sharding.placement import Placement

NAMESPACE = "jaxrl"
LEAVE_S = 10.0
"""How long what the cluster has, but is not free, may take to become so."""
NODE_S = 60.0
"""Longest wait for a node's description of itself."""
STATE_S = 5.0
"""Longest wait for the state of another run's worker."""


def connect(config: RayConfig, placement: Placement) -> Visible:
    """Joins the cluster that is named; tells the devices that the run would get.

    Where none is, the run has one of its own on this host; `RayWorkerGroup` starts it.

    Raises:
        UserError: no cluster there, or one that is too small, with both tables.
    """
    address = address_of(config)
    if address is not None:
        join(address, placement.n_devices)
    own = address is None and (not ray.is_initialized() or started_here())
    here = [_this_host(placement.n_devices)]
    kind, places = find_seats(config, placement, (lambda: here) if own else find_hosts)
    note = None
    if kind == "CPU":
        note = f"no accelerator: emulating {placement.n_devices} CPU devices"
    return Visible(devices_of(placement, places, kind), note, "ray", _why(config, address))


def find_seats(
    config: RayConfig, placement: Placement, look_at: Callable[[], list[Host]]
) -> tuple[Kind, tuple[ProcessSlot, ...]]:
    """What the devices are, and where each process goes. What ended a moment ago gets a while to
    leave the cluster.
    """
    end = time.monotonic() + LEAVE_S
    while True:
        hosts = look_at()
        kinds: tuple[Kind, ...] = ("GPU", "TPU")
        kind: Kind = next((k for k in kinds if any(host.has[k] for host in hosts)), "CPU")
        try:
            return kind, process_slots(placement, hosts, kind, config.devices_per_worker)
        except UserError:
            all_free = [replace(h, free={**h.has, "memory": h.free["memory"]}) for h in hosts]
            process_slots(placement, all_free, kind, config.devices_per_worker)  # raises: never
            if time.monotonic() > end:
                raise
        time.sleep(POLL_S)


def _why(config: RayConfig, address: str | None) -> str:
    if config.address:
        return f"ray.address={config.address}"
    return f"RAY_ADDRESS={address}" if address else "a cluster of its own on this host"


def address_of(config: RayConfig) -> str | None:
    return config.address or os.environ.get("RAY_ADDRESS") or None


def join(address: str | None, devices: int) -> None:
    """Joins a cluster; with no address one of this host, which is started where there is none."""
    if ray.is_initialized():
        if _serves(address, devices):
            return
        leave()
    options: Keywords = {"namespace": NAMESPACE, "log_to_driver": False}
    if address is None:
        here = _this_host(devices).has
        options |= {"num_cpus": here["CPU"], "num_gpus": here["GPU"], "include_dashboard": False}
        options |= {"resources": {"TPU": here["TPU"]}} if here["TPU"] else {}
        options |= {"address": "local"}  # without it Ray joins a cluster that runs on this host
    else:
        options |= {"address": address}
        _reach(address)
        show_token()
    ray_worker.print_to_stdstream = lambda *_, **__: None  # what Ray says of deaths, we say
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    jax.config.update("jax_platforms", "cpu")  # the driver holds no device
    try:
        with private() if address is None else nullcontext():
            ray.init(logging_level=logging.CRITICAL, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, RayError) as error:
        reported = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster at {address or 'this host'}: {reported}\n"
            "start one with `ray start --head` on its first node, or leave ray.address out; one"
            " that asks for a token takes that of its head: copy ~/.ray/auth_token from there"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)  # Ray has one of its own for SIGTERM
    leave_at_exit()


def _serves(address: str | None, devices: int) -> bool:
    """Whether the cluster that this process is in already will do."""
    if address is not None or not started_here():
        return True
    if not usable():
        return False
    return bool(ray.cluster_resources().get("CPU", 0) >= devices)  # else of a smaller run


def _reach(address: str) -> None:
    """Ray waits minutes for a head that is not there; a connection tells at once."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"{address!r} is no address of a Ray cluster: write HOST:PORT of its head, as in"
            " 10.0.0.1:6379, or auto for the cluster of this host (ray.address, or else"
            " RAY_ADDRESS)"
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"the Ray cluster at {address} does not answer: {error.strerror or error}\n"
            "start the head with `ray start --head --port=PORT`, and see that the port is open"
        ) from error


def _this_host(devices: int) -> Host:
    """This machine as the one node of a cluster; it emulates as many CPU devices as are asked."""
    gpus = accelerators_here()
    has: dict[Resource, int] = {
        "CPU": max(os.cpu_count() or 1, min(devices, MOST_EMULATED)),
        "GPU": gpus,
        "TPU": 0 if gpus else tpu_chips_here(),
        "memory": host_available(),
    }
    reported = _ask_driver(given_share()) if gpus else {}
    return Host("", socket.gethostname(), "127.0.0.1", has, free=has, **reported)


def find_hosts() -> list[Host]:
    """The nodes that are alive, the head first, with what is free on each."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeID"]))
    free = ray._private.state.available_resources_per_node()
    reported = {n["NodeID"]: _ask_gpus(n["NodeID"]) for n in nodes if n["Resources"].get("GPU")}
    return [
        Host(
            node["NodeID"],
            node.get("NodeName") or node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            _counts(node["Resources"]),
            _counts(free.get(node["NodeID"], {})),
            **reported.get(node["NodeID"], {}),
        )
        for node in nodes
    ]


def _counts(resources: Mapping[str, float]) -> dict[Resource, int]:
    return {name: int(resources.get(name, 0)) for name in RESOURCES}


def on_node(node: str, function: Callable[..., object], *args: object) -> ray.ObjectRef:
    """Runs a function on a node: where its result will be."""
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    options: Keywords = {"scheduling_strategy": there, "runtime_env": python_on(node) or None}
    return task.options(**options).remote(*args)


def python_on(node: str) -> dict[str, str]:
    """The part of a runtime environment without which no worker starts on this host: Ray writes
    the path of its interpreter into a shell's command, which takes one with a space apart.
    """
    quoted = shlex.quote(sys.executable)
    here = node == ray.get_runtime_context().get_node_id()
    return {"py_executable": quoted} if here and quoted != sys.executable else {}


def _ask_gpus(node: str) -> Keywords:
    """`_ask_driver` on a node."""
    try:
        found: Keywords = ray.get(on_node(node, _ask_driver, given_share()), timeout=NODE_S)
    except RayError:
        return {}
    return found


def _ask_driver(share: float | None) -> Keywords:
    """What the driver of the GPUs of this host tells of them, as fields of `Host`.

    Args:
        share: what the user of the run has set; it counts before what is set on this host.
    """
    query = "--query-gpu=memory.total,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        reported = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    memory, capability = read_gpus(reported.stdout)
    return {"gpu_memory": memory, "capability": capability, "gpu_share": share or gpu_share()}


def read_gpus(text: str) -> tuple[tuple[int, ...], str | None]:
    """Of the lines `MIB, MAJOR.MINOR` of nvidia-smi."""
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    capabilities = [capability.strip() for _, capability in rows]
    least = min(capabilities, key=lambda c: tuple(map(int, c.split("."))), default=None)
    return tuple(int(mib) << 20 for mib, _ in rows), least


def cluster(address: str) -> Cluster:
    """The nodes of a cluster and the jaxrl workers on it, for `python -m jaxrl.devices`.

    Raises:
        UserError: no cluster there.
    """
    join(address, 0)
    try:
        hosts = find_hosts()
        asked: list[ray.ObjectRef] = []
        for named in ray.util.list_named_actors(all_namespaces=True):
            if named["name"].startswith("jaxrl:"):
                with suppress(ValueError):  # it has ended since
                    worker = ray.get_actor(named["name"], namespace=named["namespace"])
                    asked.append(worker.state.remote())
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=STATE_S) if asked else ([], [])
        found = []
        for ref in ready:
            with suppress(RayError):
                found.append(ray.get(ref, timeout=STATE_S))
        return Cluster(address, hosts, sorted(found, key=lambda state: (state.host, state.pid)))
    finally:
        leave()
