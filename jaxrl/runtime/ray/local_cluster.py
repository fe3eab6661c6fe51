"""A Ray cluster that this process starts on this host for its run: how it listens, how it is
watched, and how it ends.

Its head is a small process of its own (`HEAD`), so that Ray's daemons, children of the head, get
their settings from its environment; this process joins it as any driver joins a cluster. The
daemons are watched by what the kernel says of them: Ray waits without limit for one that is
stopped, and ends this process a minute after the death of the GCS. The end of a cluster is bounded.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from jaxrl.errors import RunError
from jaxrl.process.child_python import SAFE, python_command
from jaxrl.process.interrupt import left_behind
from jaxrl.runtime.worker import POLL_S

DAEMONS = ("gcs_server", "raylet")
"""Those that a cluster cannot do without."""
HEAD = """
import json, logging, os, sys, time
import psutil, ray
ray.init(address="local", logging_level=logging.CRITICAL, **json.loads(sys.argv[1]))
for process in psutil.Process().children():
    if any(part.endswith(("monitor.py", "dashboard.py")) for part in process.cmdline()):
        process.kill()  # nothing scales this cluster, or reads its logs or its pages
        process.wait(10)
print(ray.get_runtime_context().gcs_address, flush=True)
nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(nowhere, 1), os.dup2(nowhere, 2)
while os.getppid() == int(sys.argv[2]):
    time.sleep(0.5)
"""
"""The program of a head: it tells the address of its cluster, which ends with the driver."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes the daemons listen on 127.0.0.1: on every system Ray then believes, as on macOS, that no
other node can join. Otherwise it takes the address of a network card."""
START_S = 180.0
"""Longest wait for a head; it takes 3 s on a host that has nothing else to do."""
STOPPED_POLLS = 20
"""How often in a row a daemon is seen stopped before it counts as lost: 10 s of this process's own
time, so that a pause of both counts for nothing."""
MISSED_POLLS = 10
"""How often in a row the head of a joined cluster is not reached before it counts as gone."""
CONNECT_S = 1.0
"""Longest wait for a connection to the head: 10 polls take 5 to 15 s of the minute that is left."""
LEAVE_S = 10.0
"""Longest wait for Ray to leave a cluster; it takes 5 s where the daemons are gone."""
STARTED = re.compile(rb"worker process with pid (\d+)")
"""A line of the raylet's log."""
ENDED_S = 3.0
"""How long after the end of a worker's process Ray itself may take to say why."""
LOG_LINES = 12
"""Of Ray's logs, in an error."""


@dataclass(frozen=True)
class LocalCluster:
    """The processes of a cluster that this process started."""

    head: subprocess.Popen[bytes]
    daemons: Mapping[str, psutil.Process]
    """Name, of `DAEMONS` -> process."""
    logs: Path


_cluster: LocalCluster | None = None
_ray_handler: Callable[..., object] | None = None
"""What Ray has registered to run when the process ends."""


def start(options: Mapping[str, object], environment: Mapping[str, str]) -> str:
    """Starts a cluster on this host; returns its address, as this process may use it.

    SIGINT, SIGTERM and SIGHUP are blocked in all of its processes: who ends a run by a signal to
    each of its processes (scancel, systemctl stop, the end of a terminal) asks this one to save,
    which takes the others.

    Args:
        options: of `ray.init`, as JSON allows.
        environment: further variables of its processes.

    Raises:
        RunError: Ray did not start, with the last line of what it said.
    """
    global _cluster
    asking = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, asking)
    try:
        head = subprocess.Popen(
            python_command(HEAD, json.dumps(options), str(os.getpid())),
            env={**os.environ, **SAFE, **LOOPBACK, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        address = _read_address(head)
        children = {child.name(): child for child in psutil.Process(head.pid).children()}
        daemons = {name: children[name] for name in DAEMONS}
        arguments = daemons["raylet"].cmdline()
        logs = next(part.partition("=")[2] for part in arguments if part.startswith("--log_dir="))
    except BaseException:
        with suppress(psutil.Error):
            _kill(psutil.Process(head.pid).children(recursive=True))
        head.kill()
        with suppress(subprocess.TimeoutExpired):
            head.communicate(timeout=LEAVE_S)
        raise
    _cluster = LocalCluster(head, daemons, Path(logs))
    # Ray takes `127.0.0.1` and `localhost`, so spelled, for the address of a network card. Where
    # the name is another address than the one its daemons listen on, that one as IPv6 has it.
    return f"{'[::ffff:127.0.0.1]' if resolution() else 'LOCALHOST'}:{address.rpartition(':')[2]}"


def _read_address(head: subprocess.Popen[bytes]) -> str:
    """Returns the line of a head's output that is an address; Ray may write others before."""
    assert head.stdout is not None
    end, output = time.monotonic() + START_S, b""
    while time.monotonic() < end:
        if not select.select([head.stdout], [], [], POLL_S)[0]:
            continue
        part = os.read(head.stdout.fileno(), 1 << 16)
        output += part
        lines = output.decode(errors="replace").splitlines()
        for line in lines:
            if re.fullmatch(r"(127\.0\.0\.1|\[::1\]):\d+", line) and output.endswith(b"\n"):
                return line
        if not part:
            reason = lines[-1].strip() if lines else "it ended without a word"
            raise RunError(f"Ray did not start on this host: {reason}")
    raise RunError(f"Ray did not start on this host within {START_S:g} s")


def resolution() -> str:
    """Says, as a part of a sentence, how `localhost` resolves here where Ray's processes do not
    listen on that address: they may then wait for each other for minutes."""
    try:
        found = {x[4][0] for x in socket.getaddrinfo("localhost", None, proto=socket.IPPROTO_TCP)}
    except OSError as error:
        return f" at 127.0.0.1; localhost cannot be resolved ({error.strerror})"
    if "127.0.0.1" in found:
        return ""
    return f" at 127.0.0.1; localhost is {', '.join(sorted(map(str, found)))} here (/etc/hosts)"


def started_here() -> bool:
    """Returns whether this process is in a cluster that it started itself."""
    return _cluster is not None


def daemons() -> Mapping[str, psutil.Process]:
    """Returns the daemons of the cluster of this process; none where it is in no such cluster."""
    return {} if _cluster is None else _cluster.daemons


def in_cluster() -> bool:
    """Returns whether this process is in a cluster, its own or a joined one."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def usable() -> bool:
    """Returns whether no daemon of a cluster of this process has ended or is stopped, so that Ray
    may be called without a bound."""
    return all(_status(daemon) == "works" for daemon in daemons().values())


def _status(process: psutil.Process) -> str:
    """Returns `works`, `is stopped` or `has ended`."""
    try:
        status = process.status() if process.is_running() else psutil.STATUS_DEAD
    except psutil.Error:
        return "has ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "has ended"
    return "is stopped" if status == psutil.STATUS_STOPPED else "works"


def ended_daemon() -> str | None:
    """Tells which daemon of the cluster of this process has ended."""
    for name, daemon in daemons().items():
        if _status(daemon) == "has ended":
            return f"the {name} (pid {daemon.pid}) of the run's own Ray cluster has ended"
    return None


class Guard(threading.Thread):
    """A thread that looks at the cluster until the end of a run, and never calls Ray: at the
    daemons of one of this process, at the head of one that was joined. Ray ends this process a
    minute after it cannot reach a head.
    """

    def __init__(self, lost: Callable[[str], None]):
        """Takes `lost`, which is called once, with what is wrong with the cluster."""
        super().__init__(name="guard", daemon=True)
        self._lost = lost
        self._head: str | None = None
        if not started_here():
            self._head = str(sys.modules["ray"].get_runtime_context().gcs_address)
        self._polls: Counter[str] = Counter()
        """Daemon, or head -> how often in a row it was seen stopped, or not reached."""
        self._over = threading.Event()

    def stop(self) -> None:
        """Ends the thread within `POLL_S`."""
        self._over.set()

    def run(self) -> None:
        """Looks every `POLL_S`, until something is wrong."""
        while not self._over.wait(POLL_S):
            if (trouble := self._look()) is not None:
                self._lost(trouble)
                return

    def _look(self) -> str | None:
        for name, daemon in daemons().items():
            stopped = _status(daemon) == "is stopped"
            self._polls[name] = self._polls[name] + 1 if stopped else 0
            if self._polls[name] >= STOPPED_POLLS:
                return f"the {name} (pid {daemon.pid}) of the run's own Ray cluster is stopped"
        if (head := self._head) is None:
            return ended_daemon()
        host, _, port = head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            self._polls.clear()
        except OSError:
            self._polls[head] += 1
        if self._polls[head] < MISSED_POLLS:
            return None
        return f"the head of the Ray cluster at {head} has ended, or cannot be reached"


class Starts:
    """The processes that the raylet of this process's own cluster starts for workers, looked at
    until each is one that Ray knows.

    Ray says nothing of one that ends before (an interpreter that does not run, a library that
    cannot be loaded), and starts the next a minute later. It is a child of the raylet with the
    command line of a worker; once it is known to Ray, its title begins with `ray::`. One that ends
    between two looks is in the raylet's log alone, without a log of its own.
    """

    def __init__(self) -> None:
        assert _cluster is not None
        self._raylet, self._logs = _cluster.daemons["raylet"], _cluster.logs
        self._starting: set[int] = set()
        self._ended: dict[int, float] = {}
        """Process id -> `time.monotonic` seconds of its end."""
        self._errors, self._output = self._logs / "raylet.err", self._logs / "raylet.out"
        self._told = len(_read_from(self._errors, 0))
        self._read = len(_read_from(self._output, 0))

    def trouble(self) -> str | None:
        """Tells how a process ended before Ray knew it, with the last lines of Ray's logs, if one
        did a while ago."""
        output = _read_from(self._output, self._read)
        self._read += len(output)
        begun = {int(pid) for pid in STARTED.findall(output)}
        self._starting |= {
            pid for pid in begun if not any(self._logs.glob(f"python-core-worker-*_{pid}.log"))
        }
        # Not `Process.children`, which compares times of the wall clock, and a clock may be set.
        starting: set[int] = set()
        for child in psutil.process_iter():
            with suppress(psutil.Error):
                if child.ppid() != self._raylet.pid:
                    continue
                command = child.cmdline()
                if any(part.endswith("default_worker.py") for part in command):
                    starting.add(child.pid)
                elif command and child.pid not in begun:  # and not one that is no worker yet
                    self._starting.discard(child.pid)
                else:
                    starting |= {child.pid} & self._starting
        now = time.monotonic()
        self._ended |= dict.fromkeys(self._starting - starting, now)
        self._starting = starting
        ended = [pid for pid, since in self._ended.items() if now - since > ENDED_S]
        if not ended:
            return None
        # What the raylet's error stream got since, and what the process wrote into its own.
        lines = _read_from(self._errors, self._told).decode(errors="replace").splitlines()
        for path in self._logs.glob(f"worker-*-{ended[0]}.err"):
            with suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()
        lines = [line.rstrip() for line in lines if line.strip()][-LOG_LINES:]
        shown = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        return (
            f"its process (pid {ended[0]}) ended before it registered with Ray; the last lines"
            f" of Ray's logs in {self._logs}:\n{shown}"
        )


def _read_from(path: Path, offset: int) -> bytes:
    """Reads a file from `offset` bytes on; nothing where there is none."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(offset)
        return file.read()
    return b""


def leave(answers: bool = True) -> None:
    """Leaves the cluster, in time even where it does not answer; one of this process is ended.

    Ray's own end may wait without limit. It is left behind then, and neither of Ray's handlers
    runs when the process ends: one would wait again, and the other, in C++, frees what threads of
    Ray still use (a segmentation fault instead of the exit code).

    Args:
        answers: False where Ray has been called already and has not come back.
    """
    global _cluster
    if in_cluster():
        ray = sys.modules["ray"]
        healthy = answers and usable()
        if not healthy:
            end_daemons()
        try:
            left = call_within(ray.shutdown, LEAVE_S)
        except RuntimeError:  # from Python 3.12 on, an interpreter that ends starts no thread
            if healthy:
                ray.shutdown()
            left = healthy
        if not left:
            atexit.unregister(leave)
            atexit.unregister(_ray_handler or ray.shutdown)
            # glibc hands the exit code to a function registered by `on_exit`, before it runs the C
            # handlers registered earlier, and `_exit` needs no more. Python's own have run by then.
            # Without `on_exit` (macOS, musl) the handlers run.
            libc = ctypes.CDLL(None)
            with suppress(AttributeError):
                libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    end_daemons()
    if _cluster is not None:
        with suppress(subprocess.TimeoutExpired):
            _cluster.head.communicate(timeout=LEAVE_S)
    _cluster = None


def call_within(function: Callable[[], object], seconds: float) -> bool:
    """Calls `function` on a thread of its own; returns whether it has come back in time. One that
    has not keeps the process from ending as Python would end it (`left_behind`)."""
    thread = threading.Thread(target=function, name=f"bounded:{function.__name__}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        left_behind.append(thread)
    return not thread.is_alive()


def leave_at_exit() -> None:
    """Registers `leave`: before Ray's own handlers, which run in the reverse order."""
    global _ray_handler
    _ray_handler = sys.modules["ray"].shutdown
    atexit.unregister(leave)
    atexit.register(leave)


def end_daemons() -> None:
    """Ends every process of the cluster at once, so that whoever waits for one hears of it."""
    processes = list(daemons().values())
    if _cluster is not None and _cluster.head.poll() is None:
        processes.append(psutil.Process(_cluster.head.pid))
    for process in list(processes):
        with suppress(psutil.Error):
            processes += process.children(recursive=True)
    _kill(processes)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
