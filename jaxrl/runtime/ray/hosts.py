"""The hosts of a cluster, and a process seen from outside: its node, its stacks, its end."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jaxrl.process.gpu_memory import given_share
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.cluster import RESOURCES, Host, Resource, ask_driver
from jaxrl.runtime.ray.local_cluster import ended_daemon, started_here, usable
from jaxrl.runtime.ray.remote_calls import RayPool
from jaxrl.runtime.role_server import look
from jaxrl.runtime.worker import RunLost, WorkerState

LOOK_S = 5.0
"""Longest wait for the stacks of a late worker, before the kernel is asked instead."""
NODE_S = 60.0
"""Longest wait for a node's description of itself."""
SILENT_S = 3.0
"""Seconds without an answer from which on that is told."""


def find_hosts() -> list[Host]:
    """Returns the nodes that are alive, the head first, with what is free on each."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    nodes.sort(key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeID"]))
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    free = {n.node_id: n.available_resources() for n in (*status.active_nodes, *status.idle_nodes)}
    asked = {n["NodeID"]: n for n in nodes if n["Resources"].get("GPU")}
    reports: dict[str, Keywords] = {}
    for node, ref in [(n, on_node(n, ask_driver, given_share())) for n in asked]:
        with suppress(RayError):
            reports[node] = ray.get(ref, timeout=NODE_S)
    return [
        Host(
            node["NodeID"],
            node.get("NodeName") or node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            _counts(node["Resources"]),
            _counts(free.get(node["NodeID"], {})),
            **reports.get(node["NodeID"], {}),
        )
        for node in nodes
    ]


def _counts(resources: Mapping[str, float]) -> dict[Resource, int]:
    return {name: int(resources.get(name, 0)) for name in RESOURCES}


def find_workers() -> list[WorkerState]:
    """Returns the state of every worker of jaxrl in the cluster, whosever it is."""
    asked: list[ray.ObjectRef] = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith("jaxrl:"):
            with suppress(ValueError):  # it has ended since
                worker = ray.get_actor(named["name"], namespace=named["namespace"])
                asked.append(worker.state.remote())
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S) if asked else ([], [])
    states: list[WorkerState] = []
    for ref in ready:
        with suppress(RayError):
            states.append(ray.get(ref, timeout=LOOK_S))
    return sorted(states, key=lambda state: (state.host, state.pid))


def on_node(node: str, function: Callable[..., object], *args: object) -> ray.ObjectRef:
    """Runs a function on a node; returns where its result will be."""
    there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    options: Keywords = {"scheduling_strategy": there, "runtime_env": python_on(node) or None}
    return task.options(**options).remote(*args)


def python_on(node: str) -> dict[str, str]:
    """Returns the part of a runtime environment without which no worker starts on this host: Ray
    writes the path of its interpreter into a shell's command, which takes one with a space apart.
    """
    quoted = shlex.quote(sys.executable)
    here = node == ray.get_runtime_context().get_node_id()
    return {"py_executable": quoted} if here and quoted != sys.executable else {}


def check_nodes(pool: RayPool) -> None:
    """Raises `RunLost` where a pool cannot come back, since its node has left the cluster."""
    if started_here():  # its GCS, which Ray would ask, may be what has ended
        trouble = ended_daemon()
        if trouble is not None:
            raise RunLost(trouble)
        return
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for slot in pool.process_slots:
        if slot.host.id not in alive:
            reported = f"the node {slot.host.name} ({slot.host.address}) of {pool.name} is gone"
            raise RunLost(reported)


def diagnosis(pool: RayPool, rank: int) -> str:
    """Tells what a late process does, as far as anybody can tell."""
    answer, now = pool.answers.get(rank), time.monotonic()
    found = stacks(pool, rank)
    if answer is None:
        return f"{pool.where(rank)} has never answered; {found}"
    phase, ago = answer.phase, now - answer.at
    reported = f", {phase.detail}" if phase.detail else ""
    silent = f" (it last answered {ago:.1f} s ago)" if ago > SILENT_S else ""
    return (
        f"{pool.where(rank)} in phase '{phase.name}' for {now - phase.since:.1f} s"
        f"{reported}{silent}\n"
        f"device memory: {answer.memory}\nstack of the worker:\n{found}"
    )


def stacks(pool: RayPool, rank: int) -> str:
    """Returns the stacks of a process, from itself or, where it does not answer, from its host."""
    try:
        return ray.get(pool.workers[rank].stacks.remote(), timeout=LOOK_S)
    except RayError:
        pass
    if rank >= len(pool.info):
        return "(it has never answered)"
    info = pool.info[rank]
    try:
        found = _there(pool, rank, look, info.pid, info.stacks_file)
        if isinstance(found, ray.ObjectRef):
            found = ray.get(found, timeout=2 * LOOK_S)
        return str(found)
    except RayError as error:
        return f"its host does not answer ({type(error).__name__})"


def kill(pools: Sequence[RayPool]) -> None:
    """Ends their processes, stopped ones too."""
    asked: list[object] = []
    for pool in pools:
        pool.alive = False
    if started_here() and not usable():  # Ray would wait for its GCS, and end this process then
        end_here(pools)
        return
    for pool in pools:
        for rank, worker in enumerate(pool.workers):
            with suppress(Exception):
                ray.kill(worker, no_restart=True)
            if rank < len(pool.info):  # a stopped process does not hear Ray
                with suppress(Exception):
                    asked.append(_there(pool, rank, _end_process, pool.info[rank].pid))
    refs = [ref for ref in asked if isinstance(ref, ray.ObjectRef)]
    if refs:
        with suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=2 * LOOK_S)


def end_here(pools: Sequence[RayPool]) -> None:
    """Ends the processes that are on this host, without Ray."""
    for info in (info for pool in pools for info in pool.info):
        if info.host == socket.gethostname():
            _end_process(info.pid)


def _there(pool: RayPool, rank: int, function: Callable[..., object], *args: object) -> object:
    """Runs a function on the host of a process: its result, or where that will be. Hosts may have
    the same name, as containers often do: only the node's number tells them apart."""
    host = pool.process_slots[rank].host.id
    if host in ("", ray.get_runtime_context().get_node_id()):
        return function(*args)
    return on_node(host, function, *args)


def last_line(error: BaseException) -> str:
    """Returns the part of an error of Ray that tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _end_process(pid: int) -> None:
    """Kills the process of a worker, if the number is not another's by now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if title.startswith(b"ray::jaxrl:"):
            os.kill(pid, signal.SIGKILL)
