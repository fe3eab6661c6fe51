"""Launcher `local`: each worker is a thread of this process."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxrl.errors import UserError
from jaxrl.runtime.worker import DeadlineExceeded, Phase, WorkerError, enter

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
    started: float | None = None
    finished: float | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _value: Any = None
    _error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    @property
    def seconds(self) -> float:
        """Seconds the call took, waiting for its arguments excluded; 0 before its end."""
        if self.started is None or self.finished is None:
            return 0.0
        return self.finished - self.started

    def result(self) -> Any:
        """The value; what is late anywhere up the chain of calls is told when its own deadline
        passes.
        """
        while not self._done.wait(POLL_S):
            self.check()
        if self._error is not None:
            raise self._error
        return self._value

    def check(self) -> None:
        """Raises DeadlineExceeded for the call that this one waits for, or for itself."""
        running = self.worker.running
        if running is not None and running is not self and not self.done():
            running.check_self()
        self.check_self()

    def check_self(self) -> None:
        for arg in self.inputs():
            if not arg.done():
                arg.check()
        if self.started is None or self.done():
            return
        elapsed = time.monotonic() - self.started
        if elapsed > self.deadline:
            raise DeadlineExceeded(self.diagnosis(elapsed))

    def inputs(self) -> list[LocalFuture]:
        values = (*self.args, *self.kwargs.values())
        return [value for value in values if isinstance(value, LocalFuture)]

    def diagnosis(self, elapsed: float) -> str:
        phase, worker = self.worker.phase, self.worker
        in_phase = time.monotonic() - phase.since
        return (
            f"{self.role}.{self.method} has run for {elapsed:.1f} s;"
            f" its deadline is {self.deadline:g} s.\n"
            f"worker {worker.name} ({socket.gethostname()}, pid {os.getpid()}) "
            f"in phase '{phase.name}' for {in_phase:.1f} s\n"
            f"device memory: {device_memory(worker.devices)}\n"
            f"stack of the worker:\n{worker.stack()}"
        )

    def _finish(self, value: Any = None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self.finished = time.monotonic()
        self._done.set()


class LocalWorker:
    """A thread that owns a pool of devices and takes the calls to its roles in order."""

    def __init__(self, name: str, devices: tuple[jax.Device, ...] = ()):
        self.name = name
        self.devices = devices
        self.phase = Phase()
        self.running: LocalFuture | None = None
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

    def stop(self, timeout: float) -> bool:
        """No further calls; waits at most `timeout` seconds. True when the thread has ended."""
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, future: LocalFuture) -> LocalFuture:
        self._calls.put(future)
        return future

    def _run(self) -> None:
        enter(self.phase)
        while (call := self._calls.get()) is not None:
            self.running = call
            try:
                self._execute(call)
            finally:
                self.running = None
                self._enter("idle")

    def _execute(self, call: LocalFuture) -> None:
        name = f"{call.role}.{call.method}"
        try:
            self._enter(f"{name}: waiting for arguments")
            args = [_value(arg) for arg in call.args]
            kwargs = {key: _value(arg) for key, arg in call.kwargs.items()}
            self._enter(name)
            call.started = time.monotonic()
            if call.method == "start":
                self._roles[call.role] = args[0]()
                value = None
            else:
                value = getattr(self._roles[call.role], call.method)(*args, **kwargs)
            call._finish(value)
        except (UserError, WorkerError) as error:  # says all there is to say, or has said it below
            call._finish(error=error)
        except BaseException as error:
            told = WorkerError(f"{name} failed in worker {self.name}:\n{traceback.format_exc()}")
            told.__cause__ = error
            call._finish(error=told)
        finally:
            call.args, call.kwargs = (), {}  # a finished call keeps no arrays alive

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


def done_future(value: Any) -> LocalFuture:
    """A future that holds `value` already."""
    future = LocalFuture(_NOBODY, "driver", "value", (), {}, deadline=0.0)
    future.started = time.monotonic()
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


def _value(arg: Any) -> Any:
    """The value of an argument. Unbounded here: the driver, which waits for this call too, watches
    the chain.
    """
    if not isinstance(arg, LocalFuture):
        return arg
    arg._done.wait()
    if arg._error is not None:
        raise arg._error
    return arg._value


class _Nobody:
    """The worker of values that need none."""

    name = "driver"
    running = None
    phase = Phase()
    devices: tuple[jax.Device, ...] = ()

    def stack(self) -> str:
        return ""


_NOBODY: Any = _Nobody()
