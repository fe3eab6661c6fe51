"""What all launchers share: the interfaces of futures, roles and worker groups, the times of a
call, the phase that a worker is in, the errors of calls, and the clock of their deadlines.

A worker owns a pool of devices, holds the roles of the pool and executes their calls in order.
`runtime/local.py` and `runtime/ray` implement it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from jax.profiler import TraceAnnotation

from jaxrl.errors import RunError
from jaxrl.process.compilations import Compilations
from jaxrl.sharding.ledger import Move
from jaxrl.sharding.targets import Ceilings

POLL_S = 0.5
"""While waiting: seconds between two checks for failed or late calls."""
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


class Stopped(RunError):
    """The run is ending and has dropped this call; raised where its value is asked for."""


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


@dataclass(frozen=True)
class WorkerState:
    """What one process of a worker reports; for the console, the timeline and `jaxrl.devices`."""

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


_here = threading.local()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Sets what the current worker does in this block, for the error of a missed deadline and for
    a trace."""
    worker_phase: Phase | None = getattr(_here, "phase", None)
    if worker_phase is None:
        yield
        return
    outer = Phase(worker_phase.name, worker_phase.since)
    worker_phase.name, worker_phase.since = f"{outer.name}: {name}", time.monotonic()
    try:
        with TraceAnnotation(name):  # costs a microsecond where no trace is written
            yield
    finally:
        worker_phase.name, worker_phase.since = outer.name, outer.since
        worker_phase.detail = ""


def detail(text: str) -> None:
    """Sets the progress within the current phase, which the error of a missed deadline shows."""
    worker_phase: Phase | None = getattr(_here, "phase", None)
    if worker_phase is not None:
        worker_phase.detail = text


def stopping() -> bool:
    """Returns whether the run is over: what the current worker does is no longer needed."""
    asked: Callable[[], bool] | None = getattr(_here, "stopping", None)
    return asked is not None and asked()


def enter(worker_phase: Phase, asked_to_stop: Callable[[], bool]) -> None:
    """Makes `phase`, `detail` and `stopping` of this thread those of a worker."""
    _here.phase, _here.stopping = worker_phase, asked_to_stop


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

    @property
    def seconds(self) -> float:
        """Returns how long the call took, without the wait for its arguments; 0 before its end."""
        if self.started is None or self.finished is None:
            return 0.0
        return self.finished - self.started


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
    times: Times = field(default_factory=Times, init=False)
    _done: threading.Event = field(default_factory=threading.Event, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _value: Any = field(default=None, init=False)

    def done(self) -> bool:
        """Returns whether the call has ended, with a value or an error."""
        return self._done.is_set()

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


class Wait(Protocol):
    """A function that waits for a future and returns its value. It may raise further errors."""

    def __call__(self, future: Future[T], /) -> T: ...


class Handle(Protocol):
    """A role of some worker, as the loop sees it."""

    @property
    def role(self) -> str: ...

    def call(
        self, method: str, *args: object, deadline: float, aside: bool = False, **kwargs: object
    ) -> Future[Any]:
        """Queues the call. The worker resolves futures among the arguments, also those inside lists
        and dicts, just before it runs the call.

        Args:
            deadline: seconds that the call may take, from its start.
            aside: run the call on a thread of its own, outside the order of the queue.
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


TICK_S = 0.5
"""Seconds between two looks at the clock."""
GAP_S = 3.0
"""Seconds between two looks from which on the process was not awake."""
MOST_GAPS = 1000


class WallClock:
    """A clock, and the stretches of time in which nobody looked at it. Any thread may ask.

    Deadlines do not run while this process is frozen: by Ctrl-Z, a debugger or a paused virtual
    machine, with its workers or without them. When it goes on, every running call would be late,
    though its end could not have been heard of. A thread looks at the clock every `TICK_S`; where
    two looks lie much further apart, the time between them counts for no deadline.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MOST_GAPS)
        """End and seconds of each."""

    def look(self) -> float:
        """Notes how long nobody has looked; returns the time now."""
        with self._lock:
            now = self._clock()
            if now - self._last > GAP_S:
                self._gaps.append((now, now - self._last - TICK_S))
            self._last = now
            return now

    def awake_since(self, at: float) -> float:
        """Returns the seconds since `at` in which the process was awake."""
        now = self.look()
        with self._lock:
            asleep = sum(min(gap, end - at) for end, gap in self._gaps if end > at)
        return now - at - asleep

    def watch(self) -> None:
        """Looks for ever."""
        while True:
            time.sleep(TICK_S)
            self.look()


_starting = threading.Lock()
_wall_clock: WallClock | None = None


def wall_clock() -> WallClock:
    """Returns the clock of this process, which a thread looks at from the first question on."""
    global _wall_clock
    with _starting:
        if _wall_clock is None:
            _wall_clock = WallClock()
            threading.Thread(target=_wall_clock.watch, name="wall_clock", daemon=True).start()
        return _wall_clock
