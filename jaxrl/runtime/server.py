"""One process of a pool under the launcher `ray`: takes calls over the wire, runs them in order.

The calls run in a `LocalWorker`, as under the launcher `local`; this file adds what another process
needs: the order of calls that arrive on many threads, results on their way to other pools, answers
about state and stacks while a call runs. No ray here: `runtime.ray` gives what carries bytes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrl.errors import RunError, UserError
from jaxrl.process.gpu_memory import take_share
from jaxrl.runtime.local import LocalFuture, LocalWorker, device_memory, peak_bytes
from jaxrl.runtime.parcel import Parcel, Store, pack
from jaxrl.runtime.tracing import Tracer
from jaxrl.runtime.worker import OutOfMemory, Phase, Stopped, WorkerError, WorkerState, replaced
from jaxrl.sharding.ledger import Move

KINDS: dict[str, type[Exception]] = {
    "user": UserError,
    "memory": OutOfMemory,
    "worker": WorkerError,
    "run": RunError,
}
"""How an error is named on the wire, most special first."""
BOUNCED = "bounced"
"""A call that did not run because an input was lost, its own or that of a call before it: the
driver sends it again."""


class InputLost(RunError):
    """An argument's process has ended, and the value with it."""


@dataclass(frozen=True)
class LocalRef:
    """An argument that this pool itself made."""

    number: int
    """Of the call."""


@dataclass(frozen=True)
class CallRequest:
    """A call on the wire."""

    number: int
    """In the run; a call that is sent again keeps it."""
    epoch: int
    """Calls of an epoch run in order; after a loss what did not run comes again in a new one."""
    position: int
    """In the epoch, from 0; -1 for a call beside the queue."""
    role: str
    method: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    keeps: bool
    """The result stays in this process, for a later call of the same pool."""
    stores: bool
    """The arrays of the result go to the object store before the next call."""


@dataclass(frozen=True)
class CallReport:
    """What became of a call; small."""

    number: int
    epoch: int
    started: float | None
    finished: float
    """`time.monotonic` seconds of this process."""
    error: tuple[str, str] | None
    """Kind and text."""
    nbytes: int = 0
    """Of arrays that left this process."""
    packed_s: float = 0.0
    """Seconds that it took to pack them."""
    moves: tuple[Move, ...] = ()
    made_s: float | None = None
    """As in `Times`, in `time.monotonic` seconds of this process."""


@dataclass(frozen=True)
class ProcessStatus:
    """What a process says of itself while it works."""

    now: float
    """`time.monotonic` seconds of this process."""
    phase: str
    detail: str
    since: float
    running: tuple[tuple[int, float], ...]
    """Number of each call that runs, and its start."""
    memory: str
    peaks: int | None


@dataclass(frozen=True)
class ProcessInfo:
    """What a process is, and which devices it sees."""

    host: str
    address: str
    pid: int
    devices: tuple[tuple[str, int, str], ...]
    """Platform, id, and what tells the physical device from every other of this host."""
    local: int
    """How many of the devices are this process's own."""
    versions: tuple[tuple[str, str], ...]
    stacks_file: str


@dataclass(eq=False)
class _Call(LocalFuture):
    epoch: int = 0
    packed_s: float = field(default=0.0)


class _Worker(LocalWorker):
    """Lets no call run past one that lost its input."""

    lost_epoch = -1

    def _execute(self, call: LocalFuture, own: Phase) -> None:
        assert isinstance(call, _Call)
        if not call.aside and call.epoch <= self.lost_epoch:
            call._finish(error=InputLost("an earlier call lost its input"))
            return
        super()._execute(call, own)
        if isinstance(call._error, InputLost) and not call.aside:
            self.lost_epoch = call.epoch


class WorkerServer:
    """A process of a pool. Every method may be called from any thread."""

    def __init__(self, name: str, rank: int, cwd: str, store: Store):
        """
        Args:
            cwd: the driver's folder, which relative paths start from.
            store: puts arrays where other processes can get them.
        """
        if os.path.isdir(cwd):
            os.chdir(cwd)
        take_share()
        self.name, self.rank, self._store = name, rank, store
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._worker: _Worker | None = None
        self._turn = threading.Condition()
        self._next: dict[int, int] = {}
        self._kept: dict[int, _Call] = {}
        self._running: dict[int, _Call] = {}

    def info(self) -> ProcessInfo:
        """Starts jax; tells what it sees. After `join`, where there is one."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in visible.split(",") if name]
        found: list[tuple[str, int, str]] = []
        for device in jax.devices():
            own = device.process_index == jax.process_index()
            index = len([d for d in found if d[2]])
            hardware = names[index] if device.platform == "gpu" and index < len(names) else ""
            label = hardware or f"{os.getpid()}.{device.id}"
            found.append((device.platform, device.id, label if own else ""))
        versions = tuple((name, sys.modules[name].__version__) for name in ("jax", "numpy"))
        return ProcessInfo(
            socket.gethostname(),
            "",
            os.getpid(),
            tuple(found),
            len(jax.local_devices()),
            versions,
            f"/proc/{os.getpid()}/fd/{self._stacks.fileno()}",
        )

    def free_port(self) -> int:
        with socket.socket() as file:
            file.bind(("", 0))
            return int(file.getsockname()[1])

    def join(self, coordinator: str, processes: int, devices: int, timeout: float) -> None:
        """Makes the processes of the pool one SPMD program.

        Everything is given here, and jax is kept from looking for a cluster of its own: in a step
        of SLURM, under Open MPI or in a Kubernetes job it would take one GPU for each process.

        Args:
            devices: of this process: all that it was made to see.
            timeout: seconds until all must have joined.
        """
        jax.distributed.initialize(
            coordinator,
            processes,
            self.rank,
            local_device_ids=range(devices),
            cluster_detection_method="deactivate",
            initialization_timeout=round(timeout),
            coordinator_bind_address=coordinator,  # by default it listens everywhere
            heartbeat_timeout_seconds=60,
        )

    def open(self) -> None:
        devices = tuple(jax.local_devices())
        self._worker = _Worker(self.name, devices, tracer=Tracer(self.name))

    def run(self, request: CallRequest) -> tuple[CallReport, Parcel | None]:
        """Runs a call in its turn; returns what became of it, and the result on its way."""
        worker = self._worker
        assert worker is not None, "open() comes first"
        call = self._submit(worker, request)
        while not call._done.wait(1.0):
            pass  # the driver bounds the wait: it asks `answer`, and kills
        self._running.pop(request.number, None)
        finished, error, parcel = time.monotonic(), None, None
        value = call._value
        if call._error is not None:
            error = _named_error(call._error)
        elif not request.keeps:
            try:
                parcel = value if isinstance(value, Parcel) else self._pack(value, None)
            except BaseException as failed:
                error = (
                    "run",
                    f"the result of {request.role}.{request.method} cannot travel: {failed}",
                )
        call.args = call.kwargs = ()  # type: ignore[assignment]
        if not request.keeps:
            call._value = None
        report = CallReport(
            request.number,
            request.epoch,
            call.times.started,
            call.times.finished or finished,
            error,
            0 if parcel is None else parcel.nbytes,
            call.packed_s,
            call.times.moves,
            call.times.made_s,
        )
        return report, parcel

    def _submit(self, worker: _Worker, request: CallRequest) -> _Call:
        call = _Call(
            worker,
            request.role,
            request.method,
            (),
            {},
            deadline=float("inf"),
            aside=request.position < 0,
            epoch=request.epoch,
        )
        if request.stores:
            call.then = lambda value: self._stored(call, value)
        with self._turn:
            while self._next.get(request.epoch, 0) < request.position:
                self._turn.wait(1.0)
                if worker.stopping:
                    call._finish(error=Stopped("the run is over"))
                    return call
            call.args = tuple(self._resolve(list(request.args)))
            call.kwargs = self._resolve(dict(request.kwargs))
            if request.keeps:
                self._kept[request.number] = call
            self._running[request.number] = call
            worker.submit(call)
            if request.position >= 0:
                self._next[request.epoch] = request.position + 1
            self._turn.notify_all()
        return call

    def _resolve(self, value: object) -> Any:
        return replaced(value, lambda x: self._kept[x.number] if isinstance(x, LocalRef) else x)

    def _stored(self, call: _Call, value: object) -> Parcel:
        start = time.monotonic()
        parcel = self._pack(value, self._store)
        call.packed_s = time.monotonic() - start
        return parcel

    def _pack(self, value: object, store: Store | None) -> Parcel:
        """The first process tells the value; the others add their pieces of its arrays."""
        parcel = pack(value, store)
        return parcel if self.rank == 0 else Parcel(b"", (), parcel.arrays, parcel.buckets)

    def answer(self, released: Sequence[int] = ()) -> ProcessStatus:
        """
        Args:
            released: calls whose results nobody needs any more.
        """
        for number in released:
            self._kept.pop(number, None)
        now, worker = time.monotonic(), self._worker
        if worker is None:
            return ProcessStatus(now, "starting", "", now, (), "", None)
        running = tuple(
            (number, call.times.started)
            for number, call in list(self._running.items())
            if call.times.started is not None and not call.done()
        )
        phase = worker.phase
        peaks = peak_bytes(worker.devices) or worker.ledger.peak or None
        reported = device_memory(worker.devices)
        return ProcessStatus(now, phase.name, phase.detail, phase.since, running, reported, peaks)

    def state(self) -> WorkerState:
        """What this process is and does; `since` counts back from now."""
        if self._worker is None:
            now, host = time.monotonic(), socket.gethostname()
            return WorkerState(self.name, host, os.getpid(), (), (), "starting", "", now, now)
        return self._worker.state()

    def stacks(self) -> str:
        """The Python stacks of the thread that works, and then of all."""
        worker = self._worker
        first = worker.stack() if worker is not None else ""
        return first or dump_all()

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.stop(0.0)
        with self._turn:
            self._turn.notify_all()


def dump_all() -> str:
    """The stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _named_error(error: BaseException) -> tuple[str, str]:
    if isinstance(error, InputLost | Stopped):
        return BOUNCED, str(error)
    for kind, of in KINDS.items():
        if isinstance(error, of):
            return kind, str(error)
    return "worker", f"{type(error).__name__}: {error}"


def look(pid: int, stacks_file: str, wait_s: float = 1.0) -> str:
    """What can be said about a process of this host that does not answer: its state in the kernel,
    and its stacks, which a signal writes even where Python code cannot run.
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            state = next(
                (line.split(None, 1)[1].strip() for line in lines if "State:" in line), "?"
            )
    except OSError:
        return "process is gone"
    if state.startswith(("T", "Z")):
        name = "process stopped" if state.startswith("T") else "process is gone"
        return f"{name} (state {state})"
    try:
        size = os.stat(stacks_file).st_size
        os.kill(pid, signal.SIGUSR1)
        time.sleep(wait_s)
        with open(stacks_file, encoding="utf-8", errors="replace") as file:
            file.seek(size)
            reported = file.read()
    except OSError as error:
        reported = f"(no stacks: {error})"
    return f"process state {state}; stacks:\n{reported}"
