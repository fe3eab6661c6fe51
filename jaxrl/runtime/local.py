"""Launcher `local`: each worker is a thread of this process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrl.errors import RunError, UserError
from jaxrl.runtime.worker import DeadlineExceeded, Phase, Times, WorkerError, enter


class Stopped(RunError):
    """A call that was dropped because the run is over."""


POLL_S = 0.5
"""How often a wait looks whether a deadline has passed."""


@dataclass(eq=False)
class LocalFuture:
    """The result of one call to a `LocalWorker`."""

    worker: LocalWorker
    role: str
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    deadline: float
    """Seconds that the call itself may take, from its start."""
    times: Times = field(default_factory=Times)
    _once: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _value: Any = None
    _error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def once(self) -> LocalFuture:
        self._once = True
        return self

    def result(self) -> Any:
        """The value. Raises as soon as anything fails in a worker of the same crew, or is late
        anywhere up the chain of calls.
        """
        while not self._done.wait(POLL_S):
            self.check()
        if self._error is not None:
            raise self._error
        return self._value

    def check(self) -> None:
        """Raises for a failure in any worker, and for the late call that this one waits for."""
        for worker in self.worker.crew:
            worker.check_alive()
        running = self.worker.running
        if running is not None and running is not self and not self.done():
            running.check_self()
        self.check_self()

    def check_self(self) -> None:
        for arg in self.inputs():
            if not arg.done():
                arg.check()
        if self.times.started is None or self.done():
            return
        elapsed = time.monotonic() - self.times.started
        if elapsed > self.deadline:
            raise DeadlineExceeded(self.diagnosis(elapsed))

    def inputs(self) -> list[LocalFuture]:
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, LocalFuture)]

    def diagnosis(self, elapsed: float) -> str:
        phase, worker = self.worker.phase, self.worker
        in_phase = time.monotonic() - phase.since
        told = f", {phase.detail}" if phase.detail else ""
        return (
            f"{self.role}.{self.method} has run for {elapsed:.1f} s;"
            f" its deadline is {self.deadline:g} s.\n"
            f"worker {worker.name} ({socket.gethostname()}, pid {os.getpid()}) "
            f"in phase '{phase.name}' for {in_phase:.1f} s{told}\n"
            f"device memory: {device_memory(worker.devices)}\n"
            f"stack of the worker:\n{worker.stack()}"
        )

    def _finish(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self.times.finished = time.monotonic()
        self._done.set()


class LocalWorker:
    """A thread that owns a pool of devices and takes the calls to its roles in order."""

    def __init__(
        self,
        name: str,
        devices: tuple[jax.Device, ...] = (),
        crew: list[LocalWorker] | None = None,
    ):
        """
        Args:
            crew: the workers of the run, to which this one adds itself: who waits for any of them
                hears of the first failure in all of them.
        """
        self.name = name
        self.crew: list[LocalWorker] = [] if crew is None else crew
        self.crew.append(self)
        self.failure: BaseException | None = None
        """What made a call fail, the first time."""
        self.devices = devices
        self.phase = Phase()
        self.running: LocalFuture | None = None
        self._stopping = threading.Event()
        self._roles: dict[str, Any] = {}
        self._calls: queue.SimpleQueue[LocalFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"worker:{name}", daemon=True)
        self._thread.start()

    def start_role(self, role: str, make: Callable[[], Any], deadline: float) -> LocalFuture:
        """Makes the role inside the worker; workers start up side by side."""
        return self._submit(LocalFuture(self, role, "start", (make,), {}, deadline))

    def handle(self, role: str) -> LocalHandle:
        return LocalHandle(self, role)

    def stack(self) -> str:
        """The Python stack of the worker's thread, as text."""
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "".join(traceback.format_stack(frame)) if frame else "  (the thread has ended)"

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

    def _submit(self, future: LocalFuture) -> LocalFuture:
        self._calls.put(future)
        return future

    def _run(self) -> None:
        enter(self.phase, self._stopping.is_set)
        while self._next():
            self._enter("idle")

    def _next(self) -> bool:
        """Runs the next call; False at the end. Its own frame, so that no call stays alive."""
        call = self._calls.get()
        if call is None:
            return False
        if self.stopping:
            call._finish(error=Stopped("the run is over"))
            return True
        self.running = call
        try:
            self._execute(call)
        finally:
            self.running = None
        return True

    def _execute(self, call: LocalFuture) -> None:
        name = f"{call.role}.{call.method}"
        try:
            self._enter(f"{name}: waiting for arguments")
            args = [self._value(arg) for arg in call.args]
            kwargs = {key: self._value(arg) for key, arg in call.kwargs.items()}
            self._enter(name)
            call.times.started = time.monotonic()
            if call.method == "start":
                self._roles[call.role] = args[0]()
                value = None
            else:
                value = getattr(self._roles[call.role], call.method)(*args, **kwargs)
            call._finish(value)
        except (UserError, RunError) as error:  # says all there is to say
            self._fail(call, error)
        except BaseException:
            told = f"{name} failed in worker {self.name}:\n{traceback.format_exc()}"
            self._fail(call, WorkerError(told))
        finally:
            call.args, call.kwargs = (), {}  # a finished call keeps no arrays alive

    def _fail(self, call: LocalFuture, error: BaseException) -> None:
        self.failure = self.failure or error
        call._finish(error=error)

    def _value(self, arg: Any) -> Any:
        """The value of an argument. Bounded by the driver, which watches the chain of calls."""
        if not isinstance(arg, LocalFuture):
            return arg
        while not arg._done.wait(POLL_S):
            if self.stopping:
                raise Stopped("the run is over")
        if arg._error is not None:
            raise arg._error
        value = arg._value
        if arg._once:
            arg._value = None
        return value

    def _enter(self, name: str) -> None:
        self.phase.name, self.phase.since = name, time.monotonic()


@dataclass(frozen=True)
class LocalHandle:
    """A role of a `LocalWorker`, as the loop sees it."""

    worker: LocalWorker
    role: str

    def call(self, method: str, *args: Any, deadline: float, **kwargs: Any) -> LocalFuture:
        """Queues the call. `LocalFuture` arguments are waited for inside the worker, just before it
        runs.
        """
        return self.worker._submit(
            LocalFuture(self.worker, self.role, method, args, kwargs, deadline)
        )


def stop_all(workers: Sequence[LocalWorker], timeout: float) -> bool:
    """Stops all workers within `timeout` seconds. True when every thread has ended."""
    end = time.monotonic() + timeout
    for worker in workers:
        worker._stopping.set()
        worker._calls.put(None)
    for worker in workers:
        worker._thread.join(max(end - time.monotonic(), 0.0))
    return not any(worker._thread.is_alive() for worker in workers)


def done_future(value: Any) -> LocalFuture:
    """A future that holds `value` already."""
    future = LocalFuture(_NOBODY, "driver", "value", (), {}, deadline=0.0)
    future.times.started = time.monotonic()
    future._finish(value)
    return future


def device_memory(devices: tuple[jax.Device, ...]) -> str:
    """Bytes in use and limit of each device, where the platform tells them."""
    told = []
    for device in devices:
        stats = device.memory_stats()
        if stats:
            used, limit = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
            told.append(f"{device}: {used / 1e9:.2f} of {limit / 1e9:.2f} GB")
    return ", ".join(told) or "not told by this platform"


class _Nobody:
    """The worker of values that need none."""

    name = "driver"
    running = None
    phase = Phase()
    devices: tuple[jax.Device, ...] = ()
    crew: tuple[LocalWorker, ...] = ()

    def stack(self) -> str:
        return ""


_NOBODY: Any = _Nobody()
