"""Launcher `local`: each worker is a thread of this process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation

from jaxrl.errors import RunError, UserError
from jaxrl.process.compilations import Compilations, compilations, compiling
from jaxrl.process.interrupt import left_behind
from jaxrl.runtime.worker import (
    POLL_S,
    PROFILE,
    Future,
    OutOfMemory,
    Phase,
    Stopped,
    T,
    Traced,
    WorkerError,
    WorkerState,
    enter,
    map_leaves,
    methods_of,
    phase,
    wall_clock,
)
from jaxrl.sharding.ledger import Ledger, use
from jaxrl.sharding.targets import ceilings_of


@runtime_checkable
class RemoteValue(Protocol):
    """A value of another process, as an argument."""

    def arrive(self, stopping: Callable[[], bool]) -> object:
        """Waits for it; the driver bounds the wait."""
        ...


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
    _once: bool = field(default=False, init=False)
    _turn: threading.RLock = field(default_factory=threading.RLock, init=False)
    """Held by who decides whether the call begins, or ends."""

    def cancel(self) -> bool:
        """Cancels the call unless it has started (`Future.cancel`)."""
        with self._turn:
            if self.times.started is not None or self.done():
                return False
            self.finish(error=Stopped("the run was asked to end before this call began"))
            return True

    def consume(self) -> LocalFuture:
        """Marks the value as needed once (`Future.consume`)."""
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
            if call.times.started is not None:
                elapsed = self.worker.clock.awake_since(call.times.started)
                if elapsed > call.deadline:
                    raise call.late(elapsed, self.worker.diagnosis())


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
        self._methods: dict[str, tuple[str, list[str]] | None] = {}
        """Role -> name of its Protocol, and the methods that this names."""
        self._calls: queue.SimpleQueue[LocalFuture | None] = queue.SimpleQueue()
        self.clock = wall_clock()  # looked at before the first call begins
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
        """Returns what calls a role of this worker."""
        return LocalHandle(self, role)

    def submit(self, call: LocalFuture) -> LocalFuture:
        """Queues a call, or runs it on a thread of its own."""
        if call.aside:
            name, own = f"aside:{self.name}", Phase()
            threading.Thread(target=self._execute, args=(call, own), name=name, daemon=True).start()
        else:
            self._calls.put(call)
        return call

    def _run(self) -> None:
        use(self.ledger)
        while (call := self._calls.get()) is not None:
            if self._stopping.is_set():
                call.finish(error=Stopped("the run is over"))
            elif not call.done():  # else it was cancelled
                self.running = call
                self._execute(call, self.phase)
                self.running = None
            del call  # a worker that waits keeps no call alive
            self.phase.name, self.phase.since = "idle", time.monotonic()
        for role in self._roles.values():
            if hasattr(role, "close"):  # it has processes of its own
                role.close()

    def _execute(self, call: LocalFuture, own: Phase) -> None:
        """Runs one call: waits for its arguments, finds its role, calls the method, ends the call.

        Args:
            own: the phase that the call is in: the worker's, or its own where it runs aside.
        """
        enter(own, self._stopping.is_set)
        name = f"{call.role}.{call.method}"
        try:
            own.name, own.since = f"{name}: waiting for arguments", time.monotonic()
            value_of = partial(self._value, call)
            args = [map_leaves(arg, value_of) for arg in call.args]
            kwargs = {key: map_leaves(arg, value_of) for key, arg in call.kwargs.items()}
            own.name, own.since = name, time.monotonic()
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
                make, lazy, protocol = args
                named = None if protocol is None else (protocol.__name__, methods_of(protocol))
                self._methods[call.role] = named
                self._roles[call.role] = Lazy(make) if lazy else self._make(call.role, make)
            else:
                role, named = self._roles[call.role], self._methods[call.role]
                if isinstance(role, Lazy):
                    began = time.monotonic()
                    with phase("made on first use"):
                        role = self._roles[call.role] = self._make(call.role, role.make)
                    call.times.made_s = time.monotonic() - began
                    self.ledger.enter(name)  # now that it says what it needs
                if named is not None and call.method not in named[1]:
                    raise RunError(
                        f"{name} may not be called: {named[0]} names only {', '.join(named[1])}"
                    )
                step = kwargs.get("step")
                shown = {} if step is None else {"step_num": step}
                # What a trace shows of the call; a microsecond where none is written.
                with (StepTraceAnnotation if shown else TraceAnnotation)(name, **shown):
                    value = getattr(role, call.method)(*args, **kwargs)
            value = value if call.then is None else call.then(value)
            if not call.aside:
                call.times.moves = self.ledger.take_moves()
            call.finish(value)
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

    def _make(self, name: str, make: Callable[[], object]) -> object:
        """Makes a role, with all that its Protocol names."""
        role = make()
        for method in (self._methods[name] or ("", []))[1]:
            if not callable(getattr(role, method, None)):
                raise RunError(f"{name}: {type(role).__name__} lacks the method {method}")
        return role

    def _fail(self, call: LocalFuture, error: BaseException) -> None:
        if call.done():  # cancelled while it waited for its arguments
            return
        if not call.aside:  # who asked for something beside the queue decides what it means
            self.failure = self.failure or error
        call.finish(error=error)

    def _value(self, call: LocalFuture, arg: object) -> object:
        """Returns the value of an argument. Bounded by the driver, which watches the chain of
        calls."""
        if isinstance(arg, RemoteValue):
            return arg.arrive(lambda: self.stopping or call.done())
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
            tuple(self._roles),
            tuple(f"{device.platform}:{device.id}" for device in self.devices),
            self.phase.name,
            self.phase.detail,
            self.phase.since,
            time.monotonic(),
            compiling=compiling(self.thread.ident),
        )

    def stack(self) -> str:
        """Returns the Python stack of the worker's thread, as text."""
        frame = sys._current_frames().get(self.thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

    def diagnosis(self) -> str:
        """Tells what the worker does, for the error of a missed deadline."""
        in_phase = time.monotonic() - self.phase.since
        reported = f", {self.phase.detail}" if self.phase.detail else ""
        reported += f", compiling {program}" if (program := compiling(self.thread.ident)) else ""
        return (
            f"worker {self.name} ({socket.gethostname()}, pid {os.getpid()}) "
            f"in phase '{self.phase.name}' for {in_phase:.1f} s{reported}\n"
            f"device memory: {device_memory(self.devices)}\n"
            f"stack of the worker:\n{self.stack()}"
        )

    def peak(self) -> int | None:
        """Returns the most bytes that one of its devices has held; None where nobody has counted
        any."""
        stats = [device.memory_stats() for device in self.devices]
        peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
        return max(peaks, default=0) or self.ledger.peak or None

    @property
    def stopping(self) -> bool:
        """Returns whether the run is over: calls that wait are dropped, the running one may give
        up."""
        return self._stopping.is_set()

    def stop(self, timeout: float) -> bool:
        """Drops the calls that wait, and waits at most `timeout` seconds for the running one.
        Returns True when the thread has ended."""
        return stop_all([self], timeout)


@dataclass(frozen=True)
class Lazy:
    """A role that nobody has called yet."""

    make: Callable[[], object]


@dataclass(frozen=True)
class LocalHandle:
    """A role of a `LocalWorker`, as the loop sees it."""

    worker: LocalWorker
    role: str

    def call(
        self, method: str, *args: object, deadline: float, aside: bool = False, **kwargs: object
    ) -> LocalFuture:
        """Queues a call (`Handle.call`)."""
        return self.worker.submit(
            LocalFuture(self.role, method, args, kwargs, deadline, aside, self.worker)
        )


class LocalWorkerGroup:
    """The workers of a run, all of them threads of this process."""

    ending: None = None

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
    """Returns the traceback as text."""
    try:
        return traceback.format_exc()
    except SystemError:  # CPython 3.11.7: threads that parse at once disturb each other
        frames = traceback.extract_tb(error.__traceback__)
        lines = (f'  File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in frames)
        return "".join(lines) + f"{type(error).__name__}: {error}"


def stop_all(workers: Sequence[LocalWorker], timeout: float) -> bool:
    """Stops all workers within `timeout` seconds. Returns whether every thread has ended."""
    end = time.monotonic() + timeout
    for worker in workers:
        worker._stopping.set()
        worker._calls.put(None)
    for worker in workers:
        worker.thread.join(max(end - time.monotonic(), 0.0))
    return not any(worker.thread.is_alive() for worker in workers)


def done_future(value: T) -> Future[T]:
    """Makes a future that holds `value` already."""
    future = LocalFuture("driver", "value", (), {}, 0.0, False, worker=None)
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
