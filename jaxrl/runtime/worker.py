"""What all launchers share (the interfaces of futures, roles and worker groups, the times of a
call, the phase that a worker is in, the errors of calls), and the launcher `local`, whose workers
are threads of this process.

A worker owns a pool of devices, holds the roles of the pool and executes their calls in order.
`runtime/ray` has workers in processes of their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from jaxrl.errors import RunError, Stopped, StopTraining, UserError
from jaxrl.process.awake_clock import awake_clock
from jaxrl.process.compilations import Compilations, compilations, compiling
from jaxrl.process.interrupt import left_behind
from jaxrl.process.waiting import Waited
from jaxrl.sharding.ledger import Ledger, Move, use
from jaxrl.sharding.targets import Ceilings, ceilings_of

POLL_S = 0.5
"""While waiting: seconds between two checks for failed or late calls."""
HOLD_S = 0.05
"""While calls that have begun are held: seconds between two looks at the queue."""
PROFILE = "profile"
"""The method of a worker, and of no role, that begins and ends a trace."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DeadlineExceeded(RunError, TimeoutError):
    """A call exceeded its deadline; the message contains the whole diagnosis."""


class WorkerError(RunError):
    """An exception in a worker, with the traceback of the worker."""


class OutOfMemory(WorkerError):
    """A device ran out of memory. The message begins with the role and what it was doing."""


class RunLost(RunError):
    """State was lost that cannot be recomputed from seeds; the run restarts from its newest
    checkpoint."""


@dataclass
class Phase:
    """What a worker is doing, and since when (`time.monotonic` seconds)."""

    name: str = "idle"
    since: float = field(default_factory=time.monotonic)
    detail: str = ""
    """Progress within the phase."""

    def begin(self, name: str) -> None:
        self.name, self.since, self.detail = name, time.monotonic(), ""


@dataclass(frozen=True)
class WorkerState:
    """What a process does; for the console, the timeline and `jaxrl.devices`."""

    name: str
    """Its pool as in `--mesh`; with `.1`, `.2` ... for the other processes of a pool."""
    host: str
    pid: int
    roles: tuple[str, ...]
    devices: tuple[str, ...]
    """As `cpu:0`, `gpu:3`."""
    phase: str
    """`idle`, `rollout.generate: 64 prompts x 4, version 3`, `died`, ..."""
    detail: str
    """Progress within the phase."""
    since: float
    """Beginning of the phase; `time.monotonic` seconds of this process."""
    heard: float
    """When it last answered; `time.monotonic` seconds of this process."""
    restarts: int = 0
    """How many times it was restarted."""
    compiling: str = ""
    """The program that it compiles now; "" where it compiles none."""
    waits: tuple[Waited, ...] = ()
    """What a process of its own waits for."""

    @property
    def where(self) -> str:
        return f"worker {self.name} ({self.host}{f', pid {self.pid}' * (self.pid > 0)})"

    def diagnosis(self, memory: str, stack: str, silent: str = "") -> str:
        """Tells what the worker does, for the error of a missed deadline."""
        compiling = f"compiling {self.compiling}" if self.compiling else ""
        doing = "".join(f", {text}" for text in (self.detail, compiling) if text)
        return (
            f"{self.where} in phase '{self.phase}' for {time.monotonic() - self.since:.1f} s"
            f"{doing}{silent}\ndevice memory: {memory}\nstack of the worker:\n{stack}"
        )


class _Here(threading.local):
    """What this thread does for a worker; nothing, where it is of none."""

    phase: Phase | None = None
    stopping: threading.Event | None = None
    worker: LocalWorker | None = None
    times: Times | None = None


here = _Here()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Sets what the current worker does in this block, for the error of a missed deadline and for
    a trace."""
    now = here.phase
    if now is None:
        yield
        return
    outer = now.name, now.since
    now.begin(f"{now.name}: {name}")
    try:
        with TraceAnnotation(name):  # costs a microsecond where no trace is written
            yield
    finally:
        (now.name, now.since), now.detail = outer, ""


def detail(text: str) -> None:
    """Sets the progress within the current phase, which the error of a missed deadline shows."""
    if here.phase is not None:
        here.phase.detail = text


def stopping() -> bool:
    """Returns whether the run is over: what the current worker does is no longer needed."""
    return here.stopping is not None and here.stopping.is_set()


def ask_to_stop(stop: StopTraining) -> None:
    """Has the run end early, from within a call that ends as any other."""
    if here.worker is None:
        raise stop
    here.worker.stop_asked = here.worker.stop_asked or stop


def note(facts: Mapping[str, int]) -> None:
    """Adds to what is known of the current call when its value is gone."""
    if here.times is not None:
        here.times.noted |= facts


@dataclass
class Times:
    """When a call ran, in `time.monotonic` seconds; it may be kept without the call's value."""

    started: float | None = None
    """None while queued or waiting for arguments."""
    finished: float | None = None
    """None before the end."""
    moves: tuple[Move, ...] = ()
    """Transfers to and from host memory for this call (`offload.*`)."""
    made_s: float | None = None
    """Seconds to build the role before its first call, where `lazy=true`."""
    noted: dict[str, int] = field(default_factory=dict)
    """What the call has noted of its value (`note`)."""

    @property
    def seconds(self) -> float:
        """Returns how long the call took, without the wait for its arguments; 0 before its end."""
        if self.started is None or self.finished is None:
            return 0.0
        return self.finished - self.started


@functools.cache
def methods_of(protocol: type | None) -> list[str]:
    """Returns the methods that a Protocol names; none where there is no Protocol."""
    return [] if protocol is None else [name for name in dir(protocol) if not name.startswith("_")]


def map_leaves(value: object, change: Callable[[object], object]) -> Any:
    """Copies nested lists and dicts with `change` applied to each leaf. Anything else, also a
    tuple, is a leaf."""
    if isinstance(value, list):
        return [map_leaves(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    return change(value)


@dataclass(frozen=True)
class Traced:
    """A worker's report about a trace that it began or ended."""

    problem: str | None = None
    """Why there is none."""
    ceilings: Ceilings | None = None
    """Of its first device, once the trace has ended; None where another worker of the process tells
    them, or it has no device."""


@dataclass(eq=False)
class Future(ABC, Generic[T_co]):
    """The result of a call, now or later. It may be an argument of another call."""

    role: str
    method: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    deadline: float
    """Seconds that the call itself may take, from its start."""
    aside: bool
    """Runs on a thread of its own, not in the order of the worker's queue."""
    own_error: bool
    """An error of the call is the caller's alone: the workers take further calls. That of any other
    call ends the run, except where it runs aside."""
    times: Times = field(default_factory=Times, init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _value: Any = field(default=None, init=False)

    def done(self) -> bool:
        """Returns whether the call has ended, with a value or an error."""
        return self._done.is_set()

    def dropped(self) -> bool:
        """Returns whether the call has ended without having run, or at the wish of the user's code:
        its value raises Stopped."""
        return self.done() and isinstance(self._error, Stopped)

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the call for at most `seconds`. Returns whether it has ended."""
        return self._done.wait(seconds)

    @abstractmethod
    def check(self) -> None:
        """Raises for a failure in any worker of the group, and for a late call that this one waits
        for; does not wait."""

    @abstractmethod
    def cancel(self) -> bool:
        """Cancels a call that has not started; `result` then raises `Stopped`. Returns False, and
        changes nothing, if the call has started or ended."""

    @abstractmethod
    def consume(self) -> Self:
        """Returns this future, as an argument of the last call that needs it: the value is freed
        once that call has it."""

    def result(self) -> T_co:
        """Waits for the value. Raises as soon as anything fails in a worker of the group
        (`WorkerError` has the worker's traceback), or is late anywhere up the chain of calls
        (`DeadlineExceeded`)."""
        while not self._done.wait(POLL_S):
            self.check()
        if self._error is not None:
            raise self._error
        value: T_co = self._value
        return value

    @property
    def error(self) -> BaseException | None:
        """The error that the call ended with; None if it has a value, or has not ended."""
        return self._error

    def inputs(self) -> list[Self]:
        """Returns the futures among its arguments, also those inside lists and dicts."""
        leaves: list[object] = []
        map_leaves([list(self.args), dict(self.kwargs)], leaves.append)
        return [leaf for leaf in leaves if isinstance(leaf, type(self))]

    def late(self, elapsed: float, diagnosis: str) -> DeadlineExceeded:
        """Makes the error of a call that has run for `elapsed` seconds, which is too long."""
        return DeadlineExceeded(
            f"{self.role}.{self.method} has run for {elapsed:.1f} s;"
            f" its deadline is {self.deadline:g} s.\n{diagnosis}"
        )


@dataclass(frozen=True)
class Later(Generic[T]):
    """What a method returns that has begun its work: the worker takes further calls, and works on
    between them, also while a call waits for its arguments."""

    work: Callable[[], None]
    """Does a part of the work of all such calls to the role that have not ended."""
    value: Callable[[], T | None]
    """Returns the value of the call; None before its end."""
    left: Callable[[str | None], int | None] = lambda method: None
    """Returns how many parts of the work come before the next call, which waits for them as they
    wait for it; None: as many as there is time for. Takes the method of that call; None where it
    has not come yet."""


class Wait(Protocol):
    """A function that waits for a future and returns its value. It may raise further errors."""

    def __call__(self, future: Future[T], /) -> T: ...


class Handle(Protocol):
    """A role of some worker, as the loop sees it."""

    @property
    def role(self) -> str: ...

    def call(
        self,
        method: str,
        *args: object,
        deadline: float,
        aside: bool = False,
        own_error: bool = False,
        **kwargs: object,
    ) -> Future[Any]:
        """Queues the call. The worker resolves futures among the arguments, also those inside lists
        and dicts, just before it runs the call.

        Args:
            deadline: seconds that the call may take, from its start.
            aside: run the call on a thread of its own, outside the order of the queue.
            own_error: its error ends neither the run nor other calls.
        """
        ...


class WorkerGroup(Protocol):
    """The workers of a run, however they are launched."""

    @property
    def roles(self) -> tuple[str, ...]: ...

    def handle(self, role: str) -> Handle: ...

    @property
    def ending(self) -> str | None:
        """Why the workers will soon end, so that the run must save and end too; None if they will
        not."""
        ...

    @property
    def stop_asked(self) -> StopTraining | None:
        """What code of the user's raised in a call to end the run early, if any did. That call is
        dropped (its value raises Stopped), with the calls that need its value, and those behind any
        of these in the order of their worker."""
        ...

    def settle(self) -> None:
        """Notes that the caller knows of the end: calls from here on are dropped no more."""
        ...

    def states(self) -> list[WorkerState]: ...

    def peaks(self) -> dict[str, int]:
        """Returns role -> peak bytes of its fullest device, where the platform reports it."""
        ...

    def compiled(self) -> Compilations:
        """Counts the programs that all processes have compiled so far."""
        ...

    def profile(
        self, folder: Path | None, dtype: str, deadline: float
    ) -> Mapping[str, Future[Traced]]:
        """Begins or ends a trace of JAX's profiler in every process. Each worker does so in the
        order of its queue, between the calls queued before and after.

        Args:
            folder: where the trace goes; None: end the trace.
            dtype: of the matrix products that measure the speed of an unknown device.

        Returns:
            Pool -> what its workers report about the trace.
        """
        ...

    def stop(self) -> None:
        """Ends the workers. One that is stuck is abandoned (a thread) or killed (a process)."""
        ...


@runtime_checkable
class RemoteValue(Protocol):
    """A value of another process, as an argument."""

    def arrive(self) -> object: ...


NO_ROOM = "RESOURCE_EXHAUSTED"
"""How XLA's error of a device without room begins."""


@dataclass
class Tracer:
    """Begins the trace once every worker of the process has come to where it shall begin, in the
    order of its own calls, and ends it likewise: what is asked for in between is in it, and as
    little else as can be.
    """

    name: str = ""
    """Of the process, and of its folder; empty where there is one process."""
    workers: int = 1
    """Those that will come."""
    _arrived: Counter[Path | None] = field(default_factory=Counter)
    _device: jax.Device | None = None
    _tracing: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, folder: Path | None, dtype: str, devices: tuple[jax.Device, ...]) -> Traced:
        """Notes that a worker has come to the beginning of a trace (folder None: to its end), and
        begins or ends it with the last of them.

        Args:
            dtype: of the products that tell what an unknown device can do.
        """
        with self._lock:
            self._device = self._device or next(iter(devices), None)
            self._arrived[folder] += 1
            if self._arrived[folder] < self.workers:
                return Traced()
            del self._arrived[folder]
            try:
                if folder is not None:
                    options = jax.profiler.ProfileOptions()
                    options.python_tracer_level = 0  # every Python call: slow, and noise here
                    (folder / self.name).mkdir(parents=True, exist_ok=True)
                    jax.profiler.start_trace(str(folder / self.name), profiler_options=options)
                    self._tracing = True
                elif self._tracing:
                    self._tracing = False  # also where it cannot be written: the next starts over
                    jax.profiler.stop_trace()
            except Exception as error:  # a profiler that refuses ends no run
                return Traced(problem=str(error).strip() or type(error).__name__)
            if folder is not None or self._device is None:
                return Traced()
            return Traced(ceilings=ceilings_of(self._device, dtype))


@dataclass(eq=False)
class LocalFuture(Future[Any]):
    """The result of one call to a `LocalWorker`."""

    worker: LocalWorker | None
    """None where the value is the driver's own."""
    then: Callable[[object], object] | None = None
    """Makes of the result what is kept, in the worker, before its next call."""
    phase: Phase = field(default_factory=Phase, init=False)
    """The worker's once it runs, its own where it runs aside."""
    thread: threading.Thread | None = field(default=None, init=False)
    """Which runs it."""
    epoch: int = field(default=0, init=False)
    """As of its worker when it was queued."""
    _once: bool = field(default=False, init=False)
    _turn: threading.RLock = field(default_factory=threading.RLock, init=False)
    """Held by who decides whether the call begins, or ends."""

    def cancel(self) -> bool:
        with self._turn:
            if self.times.started is not None or self.done():
                return False
            self.finish(error=Stopped("the run was asked to end before this call began"))
            return True

    def consume(self) -> LocalFuture:
        self._once = True
        return self

    def finish(self, value: object = None, error: BaseException | None = None) -> None:
        """Ends the call, with a value or an error, unless it has ended."""
        with self._turn:
            if not self.done():
                self._value, self._error = value, error
                self.times.finished = time.monotonic()
                self._done.set()

    def check(self) -> None:
        """Raises what has failed in any worker, and the lateness of a call that this one waits for:
        the one ahead of it in its worker, one that makes an argument, or itself."""
        if self.worker is None:
            return
        for worker in self.worker.worker_group:
            if worker.failure is not None:
                raise worker.failure
            if not (worker.thread.is_alive() or worker.stopping):
                raise WorkerError(
                    f"worker {worker.name} has ended; it was in phase '{worker.phase.name}'"
                )
        ahead = None if self.aside else self.worker.running
        for call in (ahead, self):
            if call is None or call.done():
                continue
            for argument in call.inputs():
                if not argument.done():
                    argument.check()
            # The clock of a call that has begun stands while another one runs.
            if (call is ahead or call.aside) and call.times.started is not None:
                elapsed = self.worker.clock.awake_since(call.times.started)
                if elapsed > call.deadline:
                    raise call.late(elapsed, self.worker.diagnosis(call))


class LocalWorker:
    """A thread that owns a pool of devices and takes the calls to its roles in order."""

    def __init__(
        self,
        name: str,
        devices: tuple[jax.Device, ...] = (),
        worker_group: list[LocalWorker] | None = None,
        tracer: Tracer | None = None,
    ):
        self.name = name
        # Those of the run: who waits for any of them hears of the first failure in all of them.
        self.worker_group: list[LocalWorker] = [] if worker_group is None else worker_group
        self.worker_group.append(self)
        self.failure: BaseException | None = None
        """What made a call fail, the first time."""
        self.stop_asked: StopTraining | None = None
        """What a call raised to end the run, the first time."""
        self.epoch = 0
        """How often `settle` was called: a dropped call takes those of its epoch with it that are
        behind it, since they count on what it would have done."""
        self._dropped = -1
        """Epoch of the last dropped call of the queue."""
        self.devices = devices
        self.phase = Phase()
        self.ledger = Ledger(announce=phase)
        self.running: LocalFuture | None = None
        self._tracer = Tracer() if tracer is None else tracer
        self._stopping = threading.Event()
        self._roles: dict[str, object] = {}
        self._lazy: dict[str, Callable[[], object]] = {}
        """What makes those that are not there yet."""
        self._protocols: dict[str, type | None] = {}
        self._calls: queue.SimpleQueue[LocalFuture | None] = queue.SimpleQueue()
        self._begun: list[tuple[LocalFuture, Later[object]]] = []
        """Calls that go on between others."""
        self.clock = awake_clock()  # looked at before the first call begins
        self.thread = threading.Thread(target=self._run, name=f"worker:{name}", daemon=True)
        self.thread.start()

    def start_role(
        self,
        role: str,
        make: Callable[[], object],
        deadline: float,
        lazy: bool = False,
        protocol: type | None = None,
    ) -> LocalFuture:
        """Makes the role inside the worker, a lazy one at its first call; workers start up side by
        side.

        Args:
            protocol: names the methods that the role must have, and that may be called; None:
                whatever it has.
        """
        return self.handle(role).call("start", make, lazy, protocol, deadline=deadline)

    def handle(self, role: str) -> LocalHandle:
        return LocalHandle(self, role)

    def submit(self, call: LocalFuture) -> LocalFuture:
        """Queues a call, or runs it on a thread of its own."""
        call.epoch = self.epoch
        if call.aside:
            name, args = f"aside:{self.name}", (call, Phase())
            threading.Thread(target=self._execute, args=args, name=name, daemon=True).start()
        else:
            self._calls.put(call)
        return call

    def _run(self) -> None:
        use(self.ledger)
        while (call := self._next_call()) is not None:
            if self._stopping.is_set():
                call.finish(error=Stopped("the run is over"))
            elif call.epoch <= self._dropped:
                call.finish(error=Stopped("the run ends, and a call before this one was dropped"))
            elif not call.done():  # else it was cancelled
                self.running = call
                self._execute(call, self.phase)
                self._pause_begun(call.times.seconds)
                self._end_begun()  # the call may have ended what others have begun
                self.running = None
            del call  # a worker that waits keeps no call alive
            self.phase.begin("idle")
        for begun, _ in self._begun:
            begun.finish(error=Stopped("the run is over"))
        for role in self._roles.values():
            if hasattr(role, "close"):  # it has processes of its own
                role.close()

    def _next_call(self) -> LocalFuture | None:
        """Waits for the next call, and works meanwhile on those that have begun; None: the run is
        over."""
        queued: list[LocalFuture | None] = []
        while self._begun:
            with contextlib.suppress(queue.Empty):
                queued = queued or [self._calls.get_nowait()]
            call = queued[0] if queued else None
            left = self._begun[0][1].left(None if call is None else call.method)
            if queued:
                if call is None or self._stopping.is_set() or call.done():
                    return call
                if not left and all(needed.done() for needed in call.inputs()):
                    return call
            if left == 0:
                queued = self._hold(queued)
            else:
                self._work_on()
        return queued[0] if queued else self._calls.get()

    def _hold(self, queued: list[LocalFuture | None]) -> list[LocalFuture | None]:
        """Waits a moment for the next call or its arguments, and does no work meanwhile."""
        call, _ = self._enter_begun()
        self.phase.detail = f"{call.role}.{call.method} is held until the next call begins"
        began = time.monotonic()
        if queued and queued[0] is not None:
            needed = [one for one in queued[0].inputs() if not one.done()]
            if needed:
                needed[0].wait(HOLD_S)
        else:
            with contextlib.suppress(queue.Empty):
                queued = [self._calls.get(timeout=HOLD_S)]
        self._pause_begun(time.monotonic() - began)
        return queued

    def _pause_begun(self, seconds: float) -> None:
        """Has so many seconds count as no call's that has begun: they were another one's."""
        for begun, _ in self._begun:
            begun.times.started = (begun.times.started or 0.0) + seconds

    def _work_on(self) -> None:
        """Does a part of the work of the calls that have begun, and ends those that are done."""
        call, later = self._enter_begun()
        with self._ends(call):
            later.work()
        if call.done():  # by an error, which is that of all
            for other, _ in self._begun[1:]:
                other.finish(error=call.error)
            self._begun.clear()
        self._end_begun()

    def _enter_begun(self) -> tuple[LocalFuture, Later[object]]:
        call, later = self._begun[0]
        if self.running is not call:
            name = f"{call.role}.{call.method}"
            self.running = call
            self.phase.begin(name)
            self.ledger.enter(name)
        return call, later

    def _end_begun(self) -> None:
        """Ends the calls that have begun and whose value is there."""
        if self._begun:
            self._enter_begun()
        for one in list(self._begun):
            call, later = one
            with self._ends(call):
                if (value := later.value()) is not None:
                    # The time since the end of the one before is that of the one that ends now.
                    call.times.started = self._begun[0][0].times.started
                    self._finish(call, value)
            if call.done():
                self._begun.remove(one)
                for other, _ in self._begun:
                    other.times.started = call.times.finished
        if not self._begun:
            self.running = None
            self.phase.begin("idle")

    def _execute(self, call: LocalFuture, own: Phase) -> None:
        """Runs one call; `own` is the worker's phase or, where it runs aside, its own."""
        here.phase, here.stopping, here.worker, here.times = own, self._stopping, self, call.times
        call.phase, call.thread = own, threading.current_thread()
        name = f"{call.role}.{call.method}"
        with self._ends(call):
            own.begin(f"{name}: waiting for arguments")
            value_of = functools.partial(self._value, call)
            args = [map_leaves(arg, value_of) for arg in call.args]
            kwargs = {key: map_leaves(arg, value_of) for key, arg in call.kwargs.items()}
            own.begin(name)
            with call._turn:
                if call.done():  # cancelled meanwhile
                    return
                call.times.started = own.since
            if not call.aside and call.method != PROFILE:
                self.ledger.enter(name)
            value: object = None
            if call.method == PROFILE:
                folder, dtype = args
                value = self._tracer.arrive(folder, dtype, self.devices)
            elif call.method == "start":
                make, lazy, self._protocols[call.role] = args
                self._lazy[call.role] = make
                if not lazy:
                    self._make(call.role)
            else:
                protocol = self._protocols[call.role]
                if call.role in self._lazy:
                    began = time.monotonic()
                    with phase("made on first use"):
                        self._make(call.role)
                    call.times.made_s = time.monotonic() - began
                    self.ledger.enter(name)  # now that it says what it needs
                if protocol is not None and call.method not in (named := methods_of(protocol)):
                    raise RunError(
                        f"{name} may not be called: {protocol.__name__} names only"
                        f" {', '.join(named)}"
                    )
                step = kwargs.get("step")
                shown = {} if step is None else {"step_num": step}
                # What a trace shows of the call; a microsecond where none is written.
                with (StepTraceAnnotation if shown else TraceAnnotation)(name, **shown):
                    value = getattr(self._roles[call.role], call.method)(*args, **kwargs)
            if isinstance(value, Later):
                self._begun.append((call, value))
            else:
                self._finish(call, value)

    def _finish(self, call: LocalFuture, value: object) -> None:
        value = value if call.then is None else call.then(value)
        if not call.aside:
            call.times.moves = self.ledger.take_moves()
        call.finish(value)

    @contextlib.contextmanager
    def _ends(self, call: LocalFuture) -> Iterator[None]:
        """Ends the call with the error of this block, if there is one."""
        name = f"{call.role}.{call.method}"
        try:
            yield
        except StopTraining as stop:
            self.stop_asked = self.stop_asked or stop.from_code(name)
            self._drop(call, Stopped(f"{stop.by} raised StopTraining: {stop}"))
        except Stopped as error:
            self._drop(call, error)
        except (UserError, RunError) as error:  # says all there is to say
            self._fail(call, error)
        except BaseException as error:
            if NO_ROOM in str(error):
                first = str(error).strip().splitlines()[0]
                on = ", ".join(self.state().devices)
                self._fail(call, OutOfMemory(f"{name} ran out of memory on {on}: {first}"))
                return
            reported = f"{name} failed in worker {self.name}:\n{_trace(error)}"
            self._fail(call, WorkerError(reported))
        finally:
            call.args, call.kwargs = (), {}  # a finished call keeps no arrays alive

    def _make(self, name: str) -> None:
        role = self._lazy[name]()
        for method in methods_of(self._protocols[name]):
            if not callable(getattr(role, method, None)):
                raise RunError(f"{name}: {type(role).__name__} lacks the method {method}")
        self._roles[name] = role
        del self._lazy[name]

    def _drop(self, call: LocalFuture, error: Stopped) -> None:
        if not (call.aside or call.done()):
            self._dropped = max(self._dropped, call.epoch)
        call.finish(error=error)

    def _fail(self, call: LocalFuture, error: BaseException) -> None:
        if call.done():  # cancelled while it waited for its arguments
            return
        if not (call.aside or call.own_error):  # else who asked decides what it means
            self.failure = self.failure or error
        call.finish(error=error)

    def _value(self, call: LocalFuture, arg: object) -> object:
        """Returns the value of an argument; the driver bounds the wait."""
        if isinstance(arg, RemoteValue):
            return arg.arrive()
        if not isinstance(arg, LocalFuture):
            return arg
        while not arg._done.wait(POLL_S):
            if self._stopping.is_set() or call.done():
                raise Stopped("the run is over")
        if arg._error is not None:
            raise arg._error
        value = arg._value
        if arg._once:
            arg._value = None
        return value

    def state(self) -> WorkerState:
        """Tells what the worker does, for the console, the timeline and `jaxrl.devices`."""
        return WorkerState(
            self.name,
            socket.gethostname(),
            os.getpid(),
            (*self._roles, *self._lazy),
            tuple(f"{device.platform}:{device.id}" for device in self.devices),
            self.phase.name,
            self.phase.detail,
            self.phase.since,
            time.monotonic(),
            compiling=compiling(self.thread.ident),
        )

    def stack(self, thread: threading.Thread | None = None) -> str:
        """Returns the Python stack of a thread, by default the worker's, as text."""
        frame = sys._current_frames().get((thread or self.thread).ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

    def diagnosis(self, call: LocalFuture) -> str:
        """Tells what the thread of a call does, for the error of a missed deadline."""
        doing, thread = call.phase, call.thread or self.thread
        state = replace(
            self.state(),
            phase=doing.name,
            detail=doing.detail,
            since=doing.since,
            compiling=compiling(thread.ident),
        )
        return state.diagnosis(device_memory(self.devices), self.stack(thread))

    def peak(self) -> int | None:
        """Returns the most bytes that one of its devices has held; None where nobody has counted
        any."""
        stats = [device.memory_stats() for device in self.devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return max(peaks, default=0) or self.ledger.peak or None

    @property
    def stopping(self) -> bool:
        """Returns whether the run is over."""
        return self._stopping.is_set()

    def stop(self, timeout: float) -> bool:
        """Does the work of `stop_all` for this one."""
        return stop_all([self], timeout)


@dataclass(frozen=True)
class LocalHandle:
    """A role of a `LocalWorker`, as the loop sees it."""

    worker: LocalWorker
    role: str

    def call(
        self,
        method: str,
        *args: object,
        deadline: float,
        aside: bool = False,
        own_error: bool = False,
        **kwargs: object,
    ) -> LocalFuture:
        what = self.role, method, args, kwargs, deadline, aside, own_error
        return self.worker.submit(LocalFuture(*what, self.worker))


class LocalWorkerGroup:
    """The workers of a run, all of them threads of this process."""

    ending: None = None

    def __init__(self, stop_s: float, protocols: Mapping[str, type] = MappingProxyType({})):
        """Takes the longest wait for the workers at the end, and role -> its Protocol."""
        self.workers: list[LocalWorker] = []
        self._stop_s, self._protocols = stop_s, protocols
        self._tracer = Tracer()
        self._handles: dict[str, LocalHandle] = {}
        self._before = compilations()  # of other runs in this process

    def start(
        self,
        name: str,
        devices: Iterable[jax.Device],
        makers: Mapping[str, Callable[[], object]],
        deadline: float,
        lazy: Collection[str] = (),
    ) -> dict[str, LocalFuture]:
        """Starts a worker that makes its roles, one after the other, beside the other workers."""
        worker = LocalWorker(name, tuple(dict.fromkeys(devices)), self.workers, self._tracer)
        self._handles |= {role: worker.handle(role) for role in makers}
        return {
            role: worker.start_role(role, make, deadline, role in lazy, self._protocols.get(role))
            for role, make in makers.items()
        }

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._handles)

    @property
    def stop_asked(self) -> StopTraining | None:
        return next((w.stop_asked for w in self.workers if w.stop_asked is not None), None)

    def settle(self) -> None:
        for worker in self.workers:
            worker.epoch += 1

    def handle(self, role: str) -> LocalHandle:
        return self._handles[role]

    def states(self) -> list[WorkerState]:
        return [worker.state() for worker in self.workers]

    def peaks(self) -> dict[str, int]:
        peaks = {role: handle.worker.peak() for role, handle in self._handles.items()}
        return {role: peak for role, peak in peaks.items() if peak is not None}

    def compiled(self) -> Compilations:
        return compilations().since(self._before)

    def profile(self, folder: Path | None, dtype: str, deadline: float) -> dict[str, LocalFuture]:
        self._tracer.workers = len(self.workers)
        return {
            worker.name: worker.handle(worker.name).call(PROFILE, folder, dtype, deadline=deadline)
            for worker in self.workers
        }

    def stop(self) -> None:
        """Ends the workers; one that is stuck is left behind."""
        stop_all(self.workers, self._stop_s)
        left_behind.extend(w.thread for w in self.workers if w.thread.is_alive())


def _trace(error: BaseException) -> str:
    try:
        return traceback.format_exc()
    except SystemError:  # CPython 3.11.7: threads that parse at once disturb each other
        frames = traceback.extract_tb(error.__traceback__)
        lines = (f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames)
        return "".join(lines) + f"{type(error).__name__}: {error}"


def stop_all(workers: Sequence[LocalWorker], timeout: float) -> bool:
    """Drops the calls that wait, and waits at most `timeout` seconds for the running ones. Returns
    whether every thread has ended."""
    end = time.monotonic() + timeout
    for worker in workers:
        worker._stopping.set()
        worker._calls.put(None)
    for worker in workers:
        worker.thread.join(max(end - time.monotonic(), 0.0))
    return not any(worker.thread.is_alive() for worker in workers)


def done_future(value: T) -> Future[T]:
    """Makes a future that holds `value` already."""
    future = LocalFuture("driver", "value", (), {}, 0.0, False, False, worker=None)
    future.times.started = time.monotonic()
    future.finish(value)
    return future


def device_memory(devices: tuple[jax.Device, ...]) -> str:
    """Tells bytes in use and limit of each device, where the platform reports them."""
    reported = []
    for device in devices:
        stats = device.memory_stats()
        if stats:
            used, limit = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
            reported.append(f"{device}: {used / 1e9:.2f} of {limit / 1e9:.2f} GB")
    return ", ".join(reported) or "not reported by this platform"
