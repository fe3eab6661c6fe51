"""One process of a pool under the launcher `ray`: receives calls from the driver and runs them in
order.

The calls run in a `LocalWorker`, as under the launcher `local`. This file adds what a separate
process needs: it puts calls that arrive on several threads back in order, sends results to other
pools, and answers questions about state and stacks while a call runs. It does not import ray;
`runtime.ray` provides the transport.
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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl.errors import NotFinite, RunError, Stopped, UserError
from jaxrl.process.child_python import look_in
from jaxrl.process.compilations import Compilations, compilations
from jaxrl.process.gpu_memory import take_share
from jaxrl.process.streams import to_stderr
from jaxrl.process.waiting import waits
from jaxrl.process.xla_flags import TUNED_VARIABLE, keep_autotuning
from jaxrl.runtime.serialization import Parcel, Store, pack
from jaxrl.runtime.worker import (
    LocalFuture,
    LocalWorker,
    OutOfMemory,
    Phase,
    Times,
    Tracer,
    WorkerError,
    WorkerState,
    device_memory,
    map_leaves,
)
from jaxrl.sharding.mesh import accelerators_here

STACKS_S = 1.0
"""Time for a process to write its stacks after a signal."""
STARTING = "starting"
"""Phase of a process that does not take calls yet."""


class InputLost(RunError):
    """A call did not run because its input, or that of an earlier call, is lost with the node that
    held it."""


REPORTED = (InputLost, Stopped, NotFinite, UserError, OutOfMemory, WorkerError, RunError)
"""Classes of the errors in a `CallReport`; subclasses come before their base classes."""


@dataclass(frozen=True)
class LocalRef:
    """Stands for an argument that an earlier call to this pool returned, and that is still here."""

    number: int
    """The number of that call."""


@dataclass(frozen=True)
class CallRequest:
    """A call as the driver sends it."""

    number: int
    """Number of the call in the run; a call that is sent again keeps its number."""
    position: int
    """The calls to a process run in this order, from 0; -1 for a call that runs on a thread of its
    own, outside the order."""
    role: str
    method: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object] = field(default_factory=dict)
    keeps: bool = False
    """Whether the result stays in this process, for a later call to the same pool."""
    stores: bool = False
    """Whether the arrays of the result are copied to the object store before the next call."""


@dataclass(frozen=True)
class CallReport:
    """Times and error of a finished call, without its result."""

    times: Times
    """By the clock of this process."""
    error: Exception | None
    """One of `REPORTED`; None: the call succeeded."""
    stop: tuple[str, str] | None = None
    """(message, what raised it) of the first StopTraining in this process, if there was one."""


@dataclass(frozen=True)
class ProcessStatus:
    """What a process reports while it works."""

    state: WorkerState
    """By the clock of the process; in `RayPool.answers`, by that of the driver."""
    running: tuple[tuple[int, float], ...]
    """(number, start) of each running call, without the time in which others ran meanwhile."""
    memory: str
    peak: int | None
    compiled: Compilations


@dataclass(frozen=True)
class ProcessInfo:
    """Identity, versions and visible devices of a process."""

    host: str
    pid: int
    devices: tuple[tuple[str, str], ...]
    """(name, label) of each device that belongs to this process: the name as in `WorkerState`, the
    label identifies the physical device on its host."""
    versions: tuple[tuple[str, str], ...]
    stacks_file: str


class _Worker(LocalWorker):
    """Runs no further calls once one of them has lost its input: the actor must not save what it
    has not trained on."""

    input_lost = False

    def submit(self, call: LocalFuture) -> LocalFuture:
        self.epoch += 1  # the driver drops what is behind a dropped call, in all processes alike
        return super().submit(call)

    def _execute(self, call: LocalFuture, own: Phase) -> None:
        if self.input_lost and not call.aside:
            call.finish(error=InputLost("an earlier call lost its input"))
            return
        super()._execute(call, own)
        if isinstance(call._error, InputLost) and not call.aside:
            self.input_lost = True


class WorkerServer:
    """A process of a pool. Every method may be called from any thread."""

    def __init__(self, name: str, rank: int, cwd: str, paths: Sequence[str], store: Store):
        """
        Args:
            name: the same after a restart.
            cwd: the driver's working directory.
            paths: where the driver looks for modules; here after all other places.
            store: puts arrays where other processes can fetch them.
        """
        look_in(paths)
        if os.path.isdir(cwd):  # relative paths refer to it
            os.chdir(cwd)
        take_share()
        tuned = os.environ.get(TUNED_VARIABLE)
        if tuned and accelerators_here() and (lost := keep_autotuning(Path(tuned), name)):
            to_stderr(lost)
        self.rank, self._store = rank, store
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._worker = _Worker(name, tracer=Tracer(name))
        self._worker.phase.name = STARTING
        self._turn = threading.Condition()
        self._next = 0
        self._kept: dict[int, LocalFuture] = {}
        self._running: dict[int, LocalFuture] = {}

    def info(self, joins: tuple[str, int, int, float] | None = None) -> ProcessInfo:
        """Initialises JAX and describes this process, which then takes calls.

        Args:
            joins: what `join` gets, for one of several processes of a pool.
        """
        if joins is not None:
            self.join(*joins)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in visible.split(",") if name]
        found: list[tuple[str, str]] = []
        for index, device in enumerate(jax.local_devices()):
            hardware = names[index] if device.platform == "gpu" and index < len(names) else ""
            name = f"{device.platform}:{hardware or device.id}"
            found.append((name, hardware or f"{os.getpid()}.{device.id}"))
        self._worker.devices = tuple(jax.local_devices())
        self._worker.phase.begin("idle")
        versions = tuple((name, sys.modules[name].__version__) for name in ("jax", "numpy"))
        stacks_file = f"/proc/{os.getpid()}/fd/{self._stacks.fileno()}"
        return ProcessInfo(socket.gethostname(), os.getpid(), tuple(found), versions, stacks_file)

    def free_port(self) -> int:
        with socket.socket() as file:
            file.bind(("", 0))
            return int(file.getsockname()[1])

    def join(self, coordinator: str, processes: int, devices: int, timeout: float) -> None:
        """Joins the processes of the pool to one SPMD program (`jax.distributed.initialize`).

        JAX's automatic detection of a cluster is deactivated: in a SLURM step, under Open MPI or in
        a Kubernetes job it would assign one GPU to each process.

        Args:
            coordinator: `host:port` of the pool's first process.
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

    def run(self, request: CallRequest) -> tuple[CallReport, Parcel | None]:
        """Runs a call in its turn. Returns its report and its packed result, None if the result
        stays here or there was an error."""
        worker = self._worker
        call = LocalFuture(
            request.role,
            request.method,
            (),
            {},
            deadline=float("inf"),
            aside=request.position < 0,
            own_error=False,  # the driver decides what it means
            worker=worker,
            then=partial(self._pack, store=self._store) if request.stores else None,
        )

        def resolved(values: object) -> Any:
            return map_leaves(
                values, lambda x: self._kept[x.number] if isinstance(x, LocalRef) else x
            )

        with self._turn:
            while self._next < request.position and not worker.stopping:
                self._turn.wait(1.0)
            if request.keeps:
                self._kept[request.number] = call
            self._running[request.number] = call
            if worker.stopping:
                call.finish(error=Stopped("the run is over"))
            else:
                call.args = tuple(resolved(list(request.args)))
                call.kwargs = resolved(dict(request.kwargs))
                worker.submit(call)
            if not call.aside:
                self._next = request.position + 1
            self._turn.notify_all()
        while not call.wait(1.0):
            pass  # the driver enforces the deadline: it polls `answer`, and kills the process
        self._running.pop(request.number, None)
        error, parcel, value = None, None, call._value
        if call._error is not None:
            text = str(call._error)
            kinds = (kind for kind in REPORTED if isinstance(call._error, kind))
            error = next(kinds, RunError)(text)
        elif not request.keeps:
            try:
                parcel = value if isinstance(value, Parcel) else self._pack(value, None)
            except BaseException as failed:
                name = f"{request.role}.{request.method}"
                error = RunError(f"the result of {name} cannot travel: {failed}")
        stop = None if worker.stop_asked is None else (str(worker.stop_asked), worker.stop_asked.by)
        return CallReport(call.times, error, stop), parcel

    def _pack(self, value: object, store: Store | None) -> Parcel:
        parcel = pack(value, store)  # of the other processes only their pieces of its arrays
        return parcel if self.rank == 0 else Parcel(b"", (), parcel.arrays, parcel.buckets)

    def answer(self, released: Sequence[int] = ()) -> ProcessStatus:
        """Tells the state of this process. Also frees results that are no longer needed."""
        for number in released:
            self._kept.pop(number, None)
        worker = self._worker
        now = time.monotonic()
        running = tuple(  # the clock of a call that has begun stands while another one runs
            (number, call.times.started if call.aside or call is worker.running else now)
            for number, call in list(self._running.items())
            if call.times.started is not None and not call.done()
        )
        memory, peak = device_memory(worker.devices), worker.peak()
        state = replace(worker.state(), waits=waits.going_on())
        return ProcessStatus(state, running, memory, peak, compilations())

    def state(self) -> WorkerState:
        return self._worker.state()

    def stacks(self, number: int | None = None) -> str:
        """Returns the stack of the worker's thread or, while the process starts, of all threads; of
        a call that runs aside, by its number, all that is known."""
        call = None if number is None else self._running.get(number)
        if call is not None and call.aside:
            return self._worker.diagnosis(call)
        if self._worker.phase.name != STARTING:
            return self._worker.stack()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read()

    def stop(self) -> None:
        self._worker.stop(0.0)
        with self._turn:
            self._turn.notify_all()


def examine_process(pid: int, stacks_file: str) -> str:
    """Diagnoses a process of this host that does not answer: its state in the kernel, and its
    Python stacks. A signal makes it write these even if it cannot run Python code (`faulthandler`).
    """
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            state = next(line.split(None, 1)[1].strip() for line in lines if "State:" in line)
    except OSError:
        return "process is gone"
    if state.startswith(("T", "Z")):
        name = "process stopped" if state.startswith("T") else "process is gone"
        return f"{name} (state {state})"
    try:
        size = os.stat(stacks_file).st_size
        os.kill(pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        with open(stacks_file, encoding="utf-8", errors="replace") as file:
            file.seek(size)
            reported = file.read()
    except OSError as error:
        reported = f"(no stacks: {error})"
    return f"process state {state}; stacks:\n{reported}"
