"""A Ray cluster that this process started itself, on this host: how it listens, and how it ends.

Its daemons are children of this process. Ray waits without limit for one that is stopped, and ends
this process a minute after the death of the GCS. So both are watched from outside, by what the
kernel says of them, and the end of a cluster is bounded.
"""

from __future__ import annotations

import atexit
import ctypes
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.node import Node

from jaxrl.runtime.ray.auth import private_token
from jaxrl.runtime.worker import POLL_S

DAEMONS = ("gcs_server", "raylet")
"""Those that a cluster cannot do without."""
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` that start processes which a run's own cluster has no use for: nothing
scales it, `log_to_driver` is off, and it has no dashboard. Each takes time and memory of the host.
"""
STOPPED_POLLS = 20
"""How often in a row a daemon is seen stopped before it counts as lost: 10 s of this process's own
time, so that a pause of both counts for nothing."""
MISSED_POLLS = 10
"""How often in a row the head of a joined cluster is not reached before it counts as gone."""
CONNECT_S = 1.0
"""Longest wait for a connection to the head: 10 polls take 5 to 15 s of the minute that is left."""
LEAVE_S = 10.0
"""Longest wait for Ray to leave a cluster; it takes 5 s where the daemons are gone."""
ENDED_S = 3.0
"""How long after the end of a worker's process Ray itself may take to say why."""
LOG_LINES = 12
"""Of Ray's logs, in an error."""


@contextmanager
def private() -> Iterator[None]:
    """A cluster that is started in this block listens on 127.0.0.1 only, asks for a token, has no
    process that it can do without, and ends with this process alone.

    Ray takes the address of a network card, unless it believes that no cluster can have a second
    node, as on macOS. SIGTERM and SIGHUP are blocked in all processes of the cluster, as Ray blocks
    SIGINT: who ends a run by a signal to each of its processes (scancel, systemctl stop, the end of
    a terminal) asks this one to save, which takes the others.
    """
    replaced: list[tuple[object, str, object]] = [(ray_constants, "ENABLE_RAY_CLUSTER", False)]
    replaced += [(Node, name, _start_nothing) for name in UNUSED if hasattr(Node, name)]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        with private_token():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def _start_nothing(node: Node, **_: object) -> None:
    pass


def started_here() -> bool:
    """Whether this process is in a cluster that it started itself."""
    node = ray_worker._global_node
    return node is not None and bool(node.head)


def usable() -> bool:
    """Whether no daemon of a cluster of this process has ended or is stopped, so that Ray may be
    called without a bound.
    """
    return not any(
        process.poll() is not None or _stopped(process.pid) for process in _daemons().values()
    )


class Health:
    """What is wrong with the cluster of this process, looked at again and again."""

    def __init__(self) -> None:
        self._stopped = dict.fromkeys(DAEMONS, 0)

    def trouble(self) -> str | None:
        """Which daemon has ended, or has been stopped for a while."""
        for name, process in _daemons().items():
            who = f"the {name} (pid {process.pid}) of the run's own Ray cluster"
            if process.poll() is not None:
                return f"{who} has ended"
            self._stopped[name] = self._stopped[name] + 1 if _stopped(process.pid) else 0
            if self._stopped[name] >= STOPPED_POLLS:
                return f"{who} is stopped"
        return None


class Head:
    """Whether the head of a cluster that was joined can be reached. Ray ends this process a minute
    after it cannot.
    """

    def __init__(self) -> None:
        self._address: str = ray.get_runtime_context().gcs_address
        self._missed = 0

    def trouble(self) -> str | None:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            self._missed = 0
        except OSError:
            self._missed += 1
        if self._missed < MISSED_POLLS:
            return None
        return f"the head of the Ray cluster at {self._address} has ended, or cannot be reached"


def leave(answers: bool = True) -> None:
    """Leaves the cluster, in time even where it does not answer; one of this process is ended.

    Ray's own end may wait without limit. It is left behind then, and neither of Ray's handlers
    runs when the process ends: one would wait again, and the other, in C++, frees what threads of
    Ray still use (a segmentation fault instead of the exit code).

    Args:
        answers: False where Ray has been called already and has not come back.
    """
    if not ray.is_initialized():
        return
    mine = _children() if started_here() else []
    for process in _daemons().values():  # else Ray waits a second for each of them to hear SIGTERM
        setattr(process, "terminate", process.kill)  # noqa: B010 (mypy: a method)
    healthy = answers and usable()
    if not healthy:
        _kill(mine)
    try:
        left = bounded(ray.shutdown, LEAVE_S)
    except RuntimeError:  # from Python 3.12 on, an interpreter that ends starts no thread
        if healthy:
            ray.shutdown()
        left = healthy
    _kill(mine)
    if not left:
        _abandon()


def bounded(function: Callable[[], object], seconds: float) -> bool:
    """Calls `function` on a thread of its own; returns whether it has come back in time."""
    thread = threading.Thread(target=function, name=f"bounded:{function.__name__}", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _abandon() -> None:
    """Leaves Ray as it is, and keeps its handlers from running when the process ends.

    The process then ends with its exit code but without the C handlers registered before this
    call. The interpreter runs its own handlers, and flushes its files, before that.

    glibc hands the exit code to a function registered by `on_exit`, and `_exit` needs no more;
    where the C library has no `on_exit` (macOS, musl), the handlers run.
    """
    atexit.unregister(leave)
    atexit.unregister(ray_worker.shutdown)
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def leave_at_exit() -> None:
    """Before Ray's own handlers, which run in the reverse order of their registration."""
    atexit.unregister(leave)
    atexit.register(leave)


def end_daemons() -> None:
    """Ends every process of the cluster at once, so that whoever waits for one hears of it."""
    _kill(_children())


def _daemons() -> dict[str, subprocess.Popen[bytes]]:
    known = getattr(ray_worker._global_node, "all_processes", {})
    return {name: known[name][0].process for name in DAEMONS if name in known}


def _children() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in _daemons().values():
        if process.poll() is not None:
            continue  # its number may be another's by now
        with suppress(psutil.Error):
            daemon = psutil.Process(process.pid)
            found += [daemon, *daemon.children(recursive=True)]
    return found


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


class Starts:
    """The processes that the raylet of this process's own cluster starts for workers, looked at
    until each is one that Ray knows.

    Ray says nothing of one that ends before (an interpreter that does not run, a library that
    cannot be loaded), and starts the next a minute later. It is a child of the raylet with the
    command line of a worker; once it is known to Ray, its title begins with `ray::`.
    """

    def __init__(self) -> None:
        self._starting: set[int] = set()
        self._ended: dict[int, float] = {}
        """Process id -> `time.monotonic` seconds of its end."""
        node: Any = ray_worker._global_node
        self._logs = Path(node.get_logs_dir_path())
        self._errors = self._logs / "raylet.err"
        self._told = self._errors.stat().st_size if self._errors.is_file() else 0

    def trouble(self) -> str | None:
        """How a process ended before Ray knew it, with the last lines of Ray's logs, if one did a
        while ago."""
        raylet = _daemons().get("raylet")
        if raylet is None or raylet.poll() is not None:
            return None
        starting: set[int] = set()
        try:
            for child in psutil.Process(raylet.pid).children():
                with suppress(psutil.Error):
                    command = child.cmdline()
                    if any(part.endswith("default_worker.py") for part in command):
                        starting.add(child.pid)
                    else:
                        self._starting.discard(child.pid)
        except psutil.Error:
            return None
        now = time.monotonic()
        self._ended |= dict.fromkeys(self._starting - starting, now)
        self._starting = starting
        ended = [pid for pid, since in self._ended.items() if now - since > ENDED_S]
        if not ended:
            return None
        lines = self._log_lines(ended[0])
        shown = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return (
            f"its process (pid {ended[0]}) ended before Ray knew it; the last lines of Ray's logs"
            f" in {self._logs}:\n{shown}"
        )

    def _log_lines(self, pid: int) -> list[str]:
        """What the raylet's error stream got since, and what the process wrote into its own."""
        lines: list[str] = []
        with suppress(OSError), open(self._errors, "rb") as file:
            file.seek(self._told)
            lines += file.read().decode(errors="replace").splitlines()
        for path in self._logs.glob(f"worker-*-{pid}.err"):
            with suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-LOG_LINES:]


class Guard(threading.Thread):
    """A thread that looks at the cluster until the end of a run, and never calls Ray."""

    def __init__(self, trouble: Callable[[], str | None], lost: Callable[[str], None]):
        """
        Args:
            trouble: what is wrong with the cluster, if anything.
            lost: called once, with what is wrong.
        """
        super().__init__(name="guard", daemon=True)
        self._trouble, self._lost = trouble, lost
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            trouble = self._trouble()
            if trouble is not None:
                self._lost(trouble)
                return
