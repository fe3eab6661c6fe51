"""A process seen from outside: its node, its stacks, its death; and its end."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import ray
from ray.exceptions import RayError

from jaxrl.runtime.ray.connect import on_node
from jaxrl.runtime.ray.own import Health, started_here, usable
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.server import look
from jaxrl.runtime.worker import RunLost

LOOK_S = 5.0
"""Longest wait for the stacks of a late worker, before the kernel is asked instead."""
SILENT_S = 3.0
"""Seconds without an answer from which on that is told."""


def check_nodes(pool: RayPool) -> None:
    """A pool cannot come back to a node that has left the cluster."""
    if started_here():  # its GCS, which Ray would ask, may be what has ended
        trouble = Health().trouble()
        if trouble is not None:
            raise RunLost(trouble)
        return
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for slot in pool.process_slots:
        if slot.host.id not in alive:
            reported = f"the node {slot.host.name} ({slot.host.address}) of {pool.name} is gone"
            raise RunLost(reported)


def diagnosis(pool: RayPool, rank: int) -> str:
    """What a late process does, as far as anybody can tell."""
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
    """From the process itself or, where it does not answer, from its host."""
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
    the same name, as containers often do: only the node's number tells them apart.
    """
    host = pool.process_slots[rank].host.id
    if host in ("", ray.get_runtime_context().get_node_id()):
        return function(*args)
    return on_node(host, function, *args)


def last_line(error: BaseException) -> str:
    """Of what Ray says, the part that tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _end_process(pid: int) -> None:
    """Of a worker; the number may be another's by now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if title.startswith(b"ray::jaxrl:"):
            os.kill(pid, signal.SIGKILL)
