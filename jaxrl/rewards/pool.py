"""Reward functions in processes that can be killed.

Each process has a thread here that starts it, hands it items, and replaces it when it is late or
has ended. What a call has told before stays; the item that it was at gets no score, and where that
may be any of several, each is judged again in a call of its own. Nothing waits without a limit.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl.errors import RunError, UserError
from jaxrl.rewards.family import kill_family
from jaxrl.rewards.items import Item, Signature, Source, read_answer, write_order

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from jaxrl.rewards.process import main; main(*map(int, sys.argv[2:]))"
)
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators are the roles'."""
CALL_ITEMS = 16
"""Most items of one call, but of async functions."""
ASYNC_SLACK_S = 1.0
"""After its timeout an awaited call is cancelled from inside; later the process is killed."""
LOOK_S = 0.2
"""Seconds between two looks whether the pool is being closed."""
STACK_S = 0.5
"""Longest wait for the stack of a process that is late."""
STACK_BYTES, STACK_LINES = 1 << 14, 12
"""Most of it that is read, and told."""
OURS = os.path.join("rewards", "functions.py")
"""A line of a stack that is of no interest, with all below it."""
MOST_NOISE = 1 << 20
"""Bytes of no answer, between two that are, that a process may send."""
END_S = 1.0
"""Longest wait for a process that has nothing to do to end by itself."""
MAX_PROCESSES = 256
"""That one of ours may become, where nothing else is said."""
_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True)
class Failure:
    """Why an item has no score."""

    kind: Literal["timeout", "exception", "user"]
    """`user`: the data is wrong, as the text says; an `exception` comes with its traceback, or with
    how the process ended."""
    text: str


@dataclass
class Scores:
    """What a function says of some items."""

    values: list[float | None]
    """One for each item; None where the function said so, or failed."""
    failures: dict[int, Failure]
    """By the item's index."""
    slow_calls: int = 0
    """Calls that took longer than the timeout with several items, which were then judged one by
    one."""
    finished: float = 0.0
    """`time.monotonic` seconds."""


class _Lost(Exception):
    """A process that can no longer be used."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str):
        super().__init__(text)
        self.failure = Failure(kind, text)


class _Closing(Exception):
    """The pool is being closed."""


@dataclass(eq=False)
class _Job:
    """One submission."""

    function: int
    items: Sequence[Item]
    limit: float
    """Failures beyond it end the job."""
    future: Future[Scores]
    scores: Scores
    left: int = 0
    """Items that are not judged yet."""

    @classmethod
    def of(cls, function: int, items: Sequence[Item], limit: float) -> _Job:
        future: Future[Scores] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it
        scores = Scores([None] * len(items), {}, finished=time.monotonic())
        return cls(function, items, limit, future, scores, len(items))


@dataclass
class _Call:
    """Items of a job that a process is to judge."""

    job: _Job
    indices: list[int]


class RewardPool:
    """Some processes that have loaded the same reward functions."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        workers: int,
        timeout: float,
        startup: float,
        memory_mb: int | None = None,
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        """Starts the processes and does not wait for them.

        Args:
            timeout: seconds for one item; a call with several gets no more before its items are
                judged one by one.
            startup: seconds for a process to import what it needs.
            memory_mb: megabytes that each process may address; None: no limit.
            max_processes: those that one of them may become, itself included.
        """
        self.sources, self.timeout, self.startup = tuple(sources), timeout, startup
        self._memory_mb, self._max_processes = memory_mb, max_processes
        self._signatures: tuple[Signature, ...] | None = None
        self._broken: Exception | None = None
        self._closing = False
        self._calls: deque[_Call] = deque()
        self._jobs: set[_Job] = set()
        self._changed = threading.Condition()
        self.lost = 0
        """Processes that were late or ended in a call, and are replaced."""
        self._threads = [
            threading.Thread(target=self._run, name=f"rewards:{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def signatures(self) -> tuple[Signature, ...]:
        """What each function asks for; waits until a process has loaded them.

        Raises:
            UserError: one of them cannot be loaded.
            RunError: the processes cannot be started.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._signatures or self._broken or self._closing)
            if self._broken is not None:
                raise self._broken
            if self._signatures is None:
                raise RunError("rewards: closed before the functions were loaded")
            return self._signatures

    def submit(
        self, function: int, items: Sequence[Item], limit: float = math.inf
    ) -> Future[Scores]:
        """Has items judged; returns at once.

        Args:
            function: index in `sources`.
            limit: number of failures beyond which the future raises RunError with the first one.
        """
        job = _Job.of(function, items, limit)
        with self._changed:
            if self._broken is not None or self._closing:
                job.future.set_exception(self._broken or RunError("rewards: the pool is closed"))
            elif not items:
                job.future.set_result(job.scores)
            else:
                self._jobs.add(job)
                self._calls.append(_Call(job, list(range(len(items)))))
                self._changed.notify_all()
        return job.future

    def close(self) -> None:
        """Ends all processes; what is not judged yet raises RunError."""
        self._break(RunError("rewards: the pool was closed"), closing=True)
        for thread in self._threads:
            thread.join(2 * END_S)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _break(self, error: Exception, closing: bool = False) -> None:
        with self._changed:
            self._closing = self._closing or closing
            if not closing:
                self._broken = self._broken or error
            for job in self._jobs:
                job.future.set_exception(error)
            self._jobs.clear()
            self._calls.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        """A thread: one process at a time, until the pool is closed."""
        process: _Process | None = None
        try:
            while not self._closing:
                process = self._start()
                while (call := self._take()) is not None and self._judge(process, call):
                    pass
                if call is None:
                    return
                process.kill()
                process = None
        except _Closing:
            if process is not None:
                process.kill()
                process = None
        except Exception as error:
            self._break(error)
        finally:
            if process is not None:
                process.end()

    def _start(self) -> _Process:
        process = _Process(lambda: self._closing, self._max_processes)
        try:
            process.order((self.sources, self.timeout, self._memory_mb), self.startup)
            told = process.hear(self.startup)
            if "refused" in told:
                raise UserError(told["refused"])
        except _Lost as lost:
            process.kill()
            names = ", ".join(source.text for source in self.sources)
            raise RunError(
                f"rewards: the process for {names} did not start: {lost.failure.text}"
            ) from lost
        except BaseException:
            process.kill()
            raise
        process.worker = told["ready"]
        with self._changed:
            self._signatures = tuple(
                Signature(s["kind"], tuple(s["needs"]), tuple(s["takes"]), s["takes_all"])
                for s in told["signatures"]
            )
            self._changed.notify_all()
        return process

    def _take(self) -> _Call | None:
        """The next call, of a size that suits; None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closing or self._broken)
            if not self._calls:
                return None
            call = self._calls.popleft()
            assert self._signatures is not None, "this thread's process has told them"
            share = math.ceil(len(call.job.items) / len(self._threads))
            kind = self._signatures[call.job.function].kind
            size = share if kind == "async" else min(share, CALL_ITEMS)
            if len(call.indices) > size:
                self._calls.appendleft(_Call(call.job, call.indices[size:]))
            return _Call(call.job, call.indices[:size])

    def _judge(self, process: _Process, call: _Call) -> bool:
        """Whether the process can be used after this call."""
        job, left = call.job, list(call.indices)
        assert self._signatures is not None
        kind = self._signatures[job.function].kind
        within = self.startup  # until it begins, it imports
        try:
            process.order((job.function, [job.items[i] for i in left]), within)
            while left:
                told = process.hear(within)
                if "refused" in told:
                    self._refuse(job, UserError(told["refused"]))
                    return True
                if "begin" in told:
                    within = self.timeout + (ASYNC_SLACK_S if kind == "async" else 0)
                    continue
                mine = [call.indices[k] for k in told["items"]]
                left = [i for i in left if i not in set(mine)]
                self._settle(job, mine, told)
        except _Lost as lost:
            self.lost += 1
            self._lost(job, left, lost.failure, left[:1] if kind == "each" else left)
            return False
        return True

    def _settle(self, job: _Job, indices: list[int], told: dict[str, Any]) -> None:
        """Keeps what a call told of some items."""
        if "values" in told:
            with self._changed:
                for i, value in zip(indices, told["values"], strict=True):
                    job.scores.values[i] = value
                self._judged(job, len(indices))
        elif len(indices) > 1:
            self._again(job, [[i] for i in indices])
        elif "late" in told:
            self._fail(job, indices[0], Failure("timeout", told["late"]))
        else:
            kind: Literal["user", "exception"] = "user" if told["user"] else "exception"
            self._fail(job, indices[0], Failure(kind, told["error"]))

    def _lost(self, job: _Job, left: list[int], failure: Failure, suspects: list[int]) -> None:
        """A process is gone with these items unjudged; one of the suspects is why."""
        if len(suspects) == 1:
            self._fail(job, suspects[0], failure)
            self._again(job, [[i for i in left if i != suspects[0]]])
            return
        if failure.kind == "timeout":
            job.scores.slow_calls += 1
        self._again(job, [[i] for i in left])

    def _again(self, job: _Job, calls: list[list[int]]) -> None:
        with self._changed:
            if job in self._jobs:
                self._calls.extendleft(_Call(job, indices) for indices in calls if indices)
                self._changed.notify_all()

    def _fail(self, job: _Job, index: int, failure: Failure) -> None:
        with self._changed:
            job.scores.failures[index] = failure
            if len(job.scores.failures) <= job.limit:
                self._judged(job, 1)
                return
        self._refuse(job, RunError(self._diagnosis(job)))

    def _diagnosis(self, job: _Job) -> str:
        failures = job.scores.failures.values()
        late = sum(failure.kind == "timeout" for failure in failures)
        first = next(iter(failures))
        name = self.sources[job.function].text
        return (
            f"reward.functions: {name} failed on {len(failures)} of {len(job.items)} completions"
            f" ({late} timeouts, {len(failures) - late} exceptions or ended processes), more than"
            f" reward.max_failures allows; the first, {first.kind}:\n{first.text}"
        )

    def _judged(self, job: _Job, count: int) -> None:
        job.left -= count
        if job.left == 0 and job in self._jobs:
            self._jobs.remove(job)
            job.scores.finished = time.monotonic()
            job.future.set_result(job.scores)

    def _refuse(self, job: _Job, error: Exception) -> None:
        """Ends a job, and drops what is left of it."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                job.future.set_exception(error)
            self._calls = deque(call for call in self._calls if call.job is not job)


class _Process:
    """A process that judges, as the thread that owns it sees it."""

    def __init__(self, closing: Callable[[], bool], max_processes: int):
        """
        Args:
            closing: waits end early once it says so.
        """
        self.worker: int | None = None
        """Process id of the one that runs the functions, under the guard."""
        self._closing = closing
        self._number = 0
        """Of the last order; what answers another one is not taken."""
        self._heard, self._noise = b"", 0
        theirs_in, self._orders = os.pipe()
        self._answers, theirs_out = os.pipe()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        inherited = (theirs_in, theirs_out, self._stacks.fileno())
        os.set_blocking(self._orders, False)
        paths = json.dumps([str(path) for path in sys.path])
        numbers = [str(number) for number in (*inherited, os.getpid(), max_processes)]
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-c", BOOT, paths, *numbers],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env={**os.environ, **ENVIRONMENT},
                start_new_session=True,
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def order(self, content: Any, within: float) -> None:
        """Sends an order; raises _Lost where the process does not take it in time."""
        self._number += 1
        left = memoryview(write_order(self._number, content))
        end = time.monotonic() + within
        while left:
            self._wait(self._orders, select.POLLOUT, end, within)
            try:
                left = left[os.write(self._orders, left) :]
            except BrokenPipeError:
                while True:
                    self.hear(within)  # ends with the word that it has ended

    def hear(self, within: float) -> dict[str, Any]:
        """The next answer to the last order; raises _Lost where none comes in time, or the process
        has ended."""
        end, late = time.monotonic() + within, False
        while not (told := self._answer()):
            if late:
                raise self._late(within)
            late = time.monotonic() >= end  # what there is by now is still read
            self._wait(self._answers, select.POLLIN, end, within)
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise _Lost("exception", self._how_it_ended(None))
            self._heard += data
        if "ended" in told:
            raise _Lost("exception", self._how_it_ended(told["ended"]))
        return told

    def _answer(self) -> dict[str, Any]:
        """The first answer in what was read; empty where there is none."""
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            told = read_answer(line, self._number) if newline else {}
            self._noise = 0 if told else self._noise + len(line) * bool(newline)
            if self._noise + len(self._heard) * (not newline) > MOST_NOISE:
                raise _Lost("exception", f"it wrote {MOST_NOISE} bytes that are no answer")
            if not newline:
                return {}
            self._heard = rest
            if told:
                return told

    def end(self) -> None:
        """Lets a process that has nothing to do end by itself, and kills any other."""
        self._closing = lambda: False
        os.close(self._orders)
        self._orders = -1
        with suppress(_Lost):
            while True:
                self.hear(END_S)
        self.kill()

    def kill(self) -> None:
        """Ends it, and all that it has started, at once."""
        kill_family(self._guard.pid)  # it is not reaped: the id is its own
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._stacks.close()

    def _wait(self, descriptor: int, event: int, end: float, within: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        while not self._closing():
            left = end - time.monotonic()
            if poll.poll(1000 * max(min(left, LOOK_S), 0)):
                return
            if left <= 0:
                raise self._late(within)
        raise _Closing

    def _late(self, within: float) -> _Lost:
        return _Lost("timeout", f"no answer after {within:g} s{self._stack(ask=True)}")

    def _how_it_ended(self, code: int | str | None) -> str:
        if code is None:
            how = "is gone"
        elif isinstance(code, str):
            how = code
        elif code < 0:
            how = f"was ended by {_NAMES.get(-code, f'signal {-code}')}"
        else:
            how = f"ended with exit code {code}"
        return f"its process {how}{self._stack(ask=False)}"

    def _stack(self, ask: bool) -> str:
        """Where the function is or, after a crash, was; also where it never gives the interpreter
        away, as in a regular expression."""
        descriptor, end = self._stacks.fileno(), time.monotonic() + STACK_S
        if ask and self.worker is not None:
            with suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGUSR1)
            while not os.fstat(descriptor).st_size and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.01)  # the lines after the first
        lines = os.pread(descriptor, STACK_BYTES, 0).decode(errors="replace").splitlines()
        ours = [i for i, line in enumerate(lines) if OURS in line]
        shown = lines[: ours[0]] if ours else lines
        return "".join(f"\n{line}" for line in shown[:STACK_LINES] if line)
