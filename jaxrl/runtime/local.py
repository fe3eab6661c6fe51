"""Launcher `local`: each worker is a thread of this process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from jaxrl.errors import RunError, UserError
from jaxrl.process.compilations import Compilations, compilations
from jaxrl.process.interrupt import left_behind
from jaxrl.runtime.awake import awake_since
from jaxrl.runtime.tracing import PROFILE, Tracer
from jaxrl.runtime.worker import (
    POLL_S,
    Future,
    OutOfMemory,
    Phase,
    Stopped,
    T,
    WorkerError,
    WorkerState,
    enter,
    map_leaves,
    methods_of,
    phase,
)
from jaxrl.sharding.ledger import Ledger, use


@runtime_checkable
class RemoteValue(Protocol):
    """A value of another process, as an argument."""

    def arrive(self, stopping: Callable[[], bool]) -> object:
        """Waits for it; the driver bounds the wait."""
        ...


NO_ROOM = "RESOURCE_EXHAUSTED"
"""How XLA's error of a device without room begins."""


@dataclass(eq=False)
class LocalFuture(Future[Any]):
    """The result of one call to a `LocalWorker`."""

    worker: LocalWorker | None
    """None where the value is the driver's own."""
    then: Callable[[object], object] | None = None
    """Makes of the result what is kept, in the worker, before its next call."""
    _once: bool = field(default=False, init=False)
    _turn: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held by who decides whether the call begins, or ends."""
    _value: object = field(default=None, init=False)

    def cancel(self) -> bool:
        with self._turn:
            if self.times.started is not None or self.done():
                return False
            self._end(None, Stopped("the run was asked to end before this call began"))
            return True

    def begin(self) -> bool:
        """Marks the start of the call; False where it was cancelled."""
        with self._turn:
            if not self.done():
                self.times.started = time.monotonic()
            return not self.done()

    def consume(self) -> LocalFuture:
        self._once = True
        return self

    def _fetch(self) -> object:
        return self._value

    def check(self) -> None:
        if self.worker is None:
            return
        for worker in self.worker.worker_group:
            worker.check_alive()
        running = None if self.aside else self.worker.running
        if running is not None and running is not self and not self.done():
            running.check_self()
        self.check_self()

    def check_self(self) -> None:
        for arg in self.inputs():
            if not arg.done():
                arg.check()
        if self.times.started is None or self.done():
            return
        elapsed = awake_since(self.times.started)
        if elapsed > self.deadline:
            assert self.worker is not None, "the driver's own value is there"
            raise self.late(elapsed, self.worker.diagnosis())

    def _finish(self, value: object = None, error: BaseException | None = None) -> None:
        with self._turn:
            if not self.done():
                self._end(value, error)

    def _end(self, value: object, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self.times.finished = time.monotonic()
        self._done.set()


class LocalWorker:
    """A thread that owns a pool of devices and takes the calls to its roles in order."""

    def __init__(
        self,
        name: str,
        devices: tuple[jax.Device, ...] = (),
        worker_group: list[LocalWorker] | None = None,
        tracer: Tracer | None = None,
    ):
        """
        Args:
            worker_group: the workers of the run, to which this one adds itself: who waits for any
                of them hears of the first failure in all of them.
            tracer: of this process.
        """
        self.name = name
        self.worker_group: list[LocalWorker] = [] if worker_group is None else worker_group
        self.worker_group.append(self)
        self.failure: BaseException | None = None
        """What made a call fail, the first time."""
        self.devices = devices
        self.phase = Phase()
        self.ledger = Ledger(announce=phase)
        self.running: LocalFuture | None = None
        self._tracer = Tracer() if tracer is None else tracer
        self._stopping = threading.Event()
        self._roles: dict[str, object] = {}
        self._protocols: dict[str, type | None] = {}
        self._calls: queue.SimpleQueue[LocalFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"worker:{name}", daemon=True)
        self._thread.start()

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

    def stack(self) -> str:
        """The Python stack of the worker's thread, as text."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

    def diagnosis(self) -> str:
        """What the worker does, for the error of a missed deadline."""
        in_phase = time.monotonic() - self.phase.since
        reported = f", {self.phase.detail}" if self.phase.detail else ""
        return (
            f"worker {self.name} ({socket.gethostname()}, pid {os.getpid()}) "
            f"in phase '{self.phase.name}' for {in_phase:.1f} s{reported}\n"
            f"device memory: {device_memory(self.devices)}\n"
            f"stack of the worker:\n{self.stack()}"
        )

    def device_names(self) -> tuple[str, ...]:
        return tuple(f"{device.platform}:{device.id}" for device in self.devices)

    def peak(self) -> int | None:
        """The most bytes that one of its devices has held; None where nobody has counted any."""
        stats = [device.memory_stats() for device in self.devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return max(peaks, default=0) or self.ledger.peak or None

    def check_alive(self) -> None:
        """Raises what failed here, or that the thread is gone."""
        if self.failure is not None:
            raise self.failure
        if not self._thread.is_alive() and not self._stopping.is_set():
            raise WorkerError(f"worker {self.name} has ended; it was in phase '{self.phase.name}'")

    @property
    def stopping(self) -> bool:
        """Whether the run is over: calls that wait are dropped, the running one may give up."""
        return self._stopping.is_set()

    def stop(self, timeout: float) -> bool:
        """Drops the calls that wait, and waits at most `timeout` seconds for the running one.

        True when the thread has ended.
        """
        return stop_all([self], timeout)

    def submit(self, future: LocalFuture) -> LocalFuture:
        if future.aside:
            name = f"aside:{self.name}"
            threading.Thread(target=self._aside, args=(future,), name=name, daemon=True).start()
        else:
            self._calls.put(future)
        return future

    def state(self) -> WorkerState:
        return WorkerState(
            self.name,
            socket.gethostname(),
            os.getpid(),
            tuple(self._roles),
            self.device_names(),
            self.phase.name,
            self.phase.detail,
            self.phase.since,
            time.monotonic(),
        )

    def _aside(self, call: LocalFuture) -> None:
        own = Phase()
        enter(own, self._stopping.is_set)
        self._execute(call, own)

    def _run(self) -> None:
        enter(self.phase, self._stopping.is_set)
        use(self.ledger)
        while self._next():
            _enter(self.phase, "idle")
        for role in self._roles.values():
            if hasattr(role, "close"):  # it has processes of its own
                role.close()

    def _next(self) -> bool:
        """Runs the next call; False at the end. Its own frame, so that no call stays alive."""
        call = self._calls.get()
        if call is None:
            return False
        if call.done():  # cancelled
            return True
        if self.stopping:
            call._finish(error=Stopped("the run is over"))
            return True
        self.running = call
        try:
            self._execute(call, self.phase)
        finally:
            self.running = None
        return True

    def _execute(self, call: LocalFuture, own: Phase) -> None:
        name = f"{call.role}.{call.method}"
        try:
            _enter(own, f"{name}: waiting for arguments")
            value_of = partial(self._value, call)
            args = [map_leaves(arg, value_of) for arg in call.args]
            kwargs = {key: map_leaves(arg, value_of) for key, arg in call.kwargs.items()}
            _enter(own, name)
            if not call.begin():
                return
            if not call.aside and call.method != PROFILE:
                self.ledger.enter(name)
            value: object
            if call.method == PROFILE:
                folder, dtype = args
                value = self._tracer.arrive(folder, dtype, self.devices)
            elif call.method == "start":
                make, lazy, protocol = args
                self._protocols[call.role] = protocol
                self._roles[call.role] = Lazy(make) if lazy else self._made(call.role, make)
                value = None
            else:
                with _annotation(name, kwargs.get("step")):
                    value = self._method(call)(*args, **kwargs)
            value = value if call.then is None else call.then(value)
            if not call.aside:
                call.times.moves = self.ledger.take_moves()
            call._finish(value)
        except (UserError, RunError) as error:  # says all there is to say
            self._fail(call, error)
        except BaseException as error:
            if NO_ROOM in str(error):
                first = str(error).strip().splitlines()[0]
                on = ", ".join(self.device_names())
                self._fail(call, OutOfMemory(f"{name} ran out of memory on {on}: {first}"))
                return
            reported = f"{name} failed in worker {self.name}:\n{_trace(error)}"
            self._fail(call, WorkerError(reported))
        finally:
            call.args, call.kwargs = (), {}  # a finished call keeps no arrays alive

    def _method(self, call: LocalFuture) -> Callable[..., object]:
        """The method of a call, which the role's Protocol names."""
        role, protocol = self._role(call), self._protocols[call.role]
        if protocol is not None and call.method not in methods_of(protocol):
            raise RunError(
                f"{call.role}.{call.method} may not be called: {protocol.__name__} names only"
                f" {', '.join(methods_of(protocol))}"
            )
        return getattr(role, call.method)

    def _made(self, name: str, make: Callable[[], object]) -> object:
        """A new role, with all that its Protocol names."""
        role, protocol = make(), self._protocols[name]
        for method in methods_of(protocol):
            if not callable(getattr(role, method, None)):
                raise RunError(f"{name}: {type(role).__name__} lacks the method {method}")
        return role

    def _role(self, call: LocalFuture) -> object:
        """The role of a call; a lazy one is made now."""
        role = self._roles[call.role]
        if isinstance(role, Lazy):
            began = time.monotonic()
            with phase("made on first use"):
                role = self._roles[call.role] = self._made(call.role, role.make)
            call.times.made_s = time.monotonic() - began
            self.ledger.enter(f"{call.role}.{call.method}")  # now that it says what it needs
        return role

    def _fail(self, call: LocalFuture, error: BaseException) -> None:
        if call.done():  # cancelled while it waited for its arguments
            return
        if not call.aside:  # who asked for something beside the queue decides what it means
            self.failure = self.failure or error
        call._finish(error=error)

    def _value(self, call: LocalFuture, arg: object) -> object:
        """The value of an argument. Bounded by the driver, which watches the chain of calls."""
        if isinstance(arg, RemoteValue):
            return arg.arrive(lambda: self.stopping or call.done())
        if not isinstance(arg, LocalFuture):
            return arg
        while not arg._done.wait(POLL_S):
            if self.stopping or call.done():
                raise Stopped("the run is over")
        if arg._error is not None:
            raise arg._error
        value = arg._value
        if arg._once:
            arg._value = None
        return value


@dataclass(frozen=True)
class Lazy:
    """A role that nobody has called yet."""

    make: Callable[[], object]


def _annotation(name: str, step: int | None) -> TraceAnnotation:
    """What a trace shows of a call; nothing, in a microsecond, where none is written."""
    return TraceAnnotation(name) if step is None else StepTraceAnnotation(name, step_num=step)


def _enter(own: Phase, name: str) -> None:
    own.name, own.since = name, time.monotonic()


@dataclass(frozen=True)
class LocalHandle:
    """A role of a `LocalWorker`, as the loop sees it."""

    worker: LocalWorker
    role: str

    def call(
        self, method: str, *args: object, deadline: float, aside: bool = False, **kwargs: object
    ) -> LocalFuture:
        return self.worker.submit(
            LocalFuture(self.role, method, args, kwargs, deadline, aside, self.worker)
        )


class LocalWorkerGroup:
    """The workers of a run, all of them threads of this process."""

    def __init__(self, stop_s: float, protocols: Mapping[str, type] = MappingProxyType({})):
        """
        Args:
            stop_s: longest wait for the workers at the end.
            protocols: role -> its Protocol, as in `LocalWorker.start_role`.
        """
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
        """A worker that makes its roles, one after the other; workers start up side by side.

        Args:
            lazy: roles that are made at their first call.
        """
        worker = LocalWorker(name, tuple(dict.fromkeys(devices)), self.workers, self._tracer)
        self._handles |= {role: worker.handle(role) for role in makers}
        return {
            role: worker.start_role(role, make, deadline, role in lazy, self._protocols.get(role))
            for role, make in makers.items()
        }

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._handles)

    def handle(self, role: str) -> LocalHandle:
        return self._handles[role]

    def ending(self) -> str | None:
        return None

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
        left_behind.extend(w._thread for w in self.workers if w._thread.is_alive())


def _trace(error: BaseException) -> str:
    """The traceback as text."""
    try:
        return traceback.format_exc()
    except SystemError:  # CPython 3.11.7: threads that parse at once disturb each other
        frames = traceback.extract_tb(error.__traceback__)
        lines = (f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames)
        return "".join(lines) + f"{type(error).__name__}: {error}"


def stop_all(workers: Sequence[LocalWorker], timeout: float) -> bool:
    """Stops all workers within `timeout` seconds. True when every thread has ended."""
    end = time.monotonic() + timeout
    for worker in workers:
        worker._stopping.set()
        worker._calls.put(None)
    for worker in workers:
        worker._thread.join(max(end - time.monotonic(), 0.0))
    return not any(worker._thread.is_alive() for worker in workers)


def done_future(value: T) -> Future[T]:
    """A future that holds `value` already."""
    future = LocalFuture("driver", "value", (), {}, 0.0, False, worker=None)
    future.times.started = time.monotonic()
    future._finish(value)
    return future


def device_memory(devices: tuple[jax.Device, ...]) -> str:
    """Bytes in use and limit of each device, where the platform tells them."""
    reported = []
    for device in devices:
        stats = device.memory_stats()
        if stats:
            used, limit = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
            reported.append(f"{device}: {used / 1e9:.2f} of {limit / 1e9:.2f} GB")
    return ", ".join(reported) or "not told by this platform"
