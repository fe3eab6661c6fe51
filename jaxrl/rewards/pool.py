"""Reward functions in processes that can be killed.

A thread runs an event loop, which starts the processes, hands them items, and replaces a process
that is late or has ended. Answers that the process gave before remain; the item that it was working
on gets no score, and where that may be any of several, each is judged again by itself. Every wait
has a limit.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl.errors import RunError, UserError
from jaxrl.rewards.family import kill_family
from jaxrl.rewards.items import Failure, Item, ItemSource, Signature

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from jaxrl.rewards.process import main; main(*map(int, sys.argv[2:]))"
)
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators are the roles'."""
CALL_ITEMS = 16
"""Items of one call at most; an async function gets all of a process's share at once."""
ASYNC_SLACK_S = 1.0
"""The process cancels an awaited call at its timeout; so much later the process is killed."""
STACK_S = 0.5
"""Longest wait for the stack of a process that is late."""
STACK_BYTES, STACK_LINES = 1 << 14, 12
"""Limits of the part of it that is read, and shown."""
OURS = os.path.join("rewards", "functions.py")
"""A stack is shown down to the user's last frame, above the first line with this."""
MOST_NOISE = 1 << 20
"""Bytes of other text that a process may send between two answers."""
END_S = 1.0
"""Longest wait for a process that has nothing to do to end by itself."""
MAX_PROCESSES = 256
"""Default of `max_processes`."""
_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass
class Scores:
    """What a function returned for some items."""

    values: list[float | None]
    """One for each item; None where the function said so, or failed."""
    failures: dict[int, Failure]
    """By the item's index."""
    messages: dict[int, str] = field(default_factory=dict)
    """What the function says of an item beside its value, by the item's index."""
    slow_calls: int = 0
    """Calls that took longer than the timeout with several items, which were then judged one by
    one."""
    seconds: float = 0.0
    """From the submission to the last answer."""


class _Lost(Exception):
    """A process was late or has ended, and must be replaced."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str):
        super().__init__(text)
        self.failure = Failure(kind, text)


@dataclass
class _Job:
    """One submission."""

    function: int
    kind: str
    items: Sequence[Item]
    limit: float
    """Failures beyond it end the job."""
    scores: Scores
    calls: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)


class RewardPool:
    """Some processes that have loaded the same reward functions."""

    def __init__(
        self,
        sources: Sequence[ItemSource],
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
            max_processes: number that each process may grow to, itself and all below it.
        """
        self.sources, self.timeout, self.startup = tuple(sources), timeout, startup
        self._workers, self._memory_mb, self._max_processes = workers, memory_mb, max_processes
        self.lost = 0
        """Processes that were late or ended in a call, and are replaced."""
        self._signatures: Future[tuple[Signature, ...]] = Future()
        if not self.sources:
            self._signatures.set_result(())
        self._error: Exception | None = None
        """Why the pool has ended."""
        self._lock = threading.Lock()
        """Nothing is submitted after `_error` is set."""
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._starts = asyncio.TaskGroup()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def signatures(self) -> tuple[Signature, ...]:
        """What each function asks for; waits until a process has loaded them.

        Raises:
            UserError: one of them cannot be loaded.
            RunError: the processes cannot be started.
        """
        return self._signatures.result()

    def submit(
        self, function: int, items: Sequence[Item], limit: float = math.inf
    ) -> Future[Scores]:
        """Submits items to a function; returns at once.

        Args:
            function: index in `sources`.
            limit: number of failures beyond which the future raises RunError with the first one.
        """
        with self._lock:
            if self._error is None:
                judged = self._judge(function, items, limit)
                return asyncio.run_coroutine_threadsafe(judged, self._loop)
        refused: Future[Scores] = Future()
        refused.set_exception(self._error)
        return refused

    def close(self) -> None:
        """Ends all processes; futures that are not done raise RunError."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * END_S)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        """Keeps the processes until the pool is closed, or one of them cannot be started."""
        try:
            async with self._starts:
                for _ in range(self._workers):
                    self._starts.create_task(self._start())
                await self._closing.wait()
                raise RunError("rewards: the pool was closed")
        except ExceptionGroup as group:
            with self._lock:
                self._error = group.exceptions[0]
        if not self._signatures.done():
            self._signatures.set_exception(self._error)
        await asyncio.sleep(0)  # a submission from before becomes a task
        jobs = asyncio.all_tasks() - {asyncio.current_task()}
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.gather(*(self._idle.get_nowait().end() for _ in range(self._idle.qsize())))

    async def _start(self) -> None:
        """Starts a process and adds it to the idle ones once it has loaded the functions."""
        process = _Process(self._max_processes)
        try:
            await process.connect()
            process.order((self.sources, self.timeout, self._memory_mb))
            answer = await process.hear(self.startup)
            if "refused" in answer:
                raise UserError(answer["refused"])
        except BaseException as error:
            process.kill()
            if not isinstance(error, _Lost):
                raise
            names = ", ".join(source.text for source in self.sources)
            raise RunError(f"rewards: the process for {names} did not start: {error}") from error
        process.worker = answer["ready"]
        if not self._signatures.done():
            self._signatures.set_result(tuple(Signature(**s) for s in answer["signatures"]))
        self._idle.put_nowait(process)

    def _replace(self) -> None:
        start = self._start()
        try:
            self._starts.create_task(start)
        except RuntimeError:  # the pool is ending
            start.close()

    async def _judge(self, function: int, items: Sequence[Item], limit: float) -> Scores:
        started = time.monotonic()
        scores = Scores([None] * len(items), {})
        try:
            loaded = await asyncio.shield(asyncio.wrap_future(self._signatures))
            job = _Job(function, loaded[function].kind, items, limit, scores)
            size = math.ceil(len(items) / self._workers)
            if job.kind != "async":
                size = min(size, CALL_ITEMS)
            async with job.calls:
                for start in range(0, len(items), size or 1):
                    indices = range(start, min(start + size, len(items)))
                    job.calls.create_task(self._call(job, indices))
        except asyncio.CancelledError:
            raise self._error or RunError("rewards: cancelled") from None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        scores.seconds = time.monotonic() - started
        return scores

    async def _call(self, job: _Job, indices: Sequence[int]) -> None:
        """Lets a process judge items of a job; creates further calls for those to judge again."""
        process = await self._idle.get()
        left, within = list(indices), self.startup  # until it begins, it imports
        again: list[list[int]] = []
        try:
            process.order((job.function, [job.items[i] for i in indices]))
            while left:
                answer = await process.hear(within)
                if "refused" in answer:
                    raise UserError(answer["refused"])
                if "begin" in answer:
                    within = self.timeout + (ASYNC_SLACK_S if job.kind == "async" else 0)
                    continue
                judged = [indices[k] for k in answer["items"]]
                left = [i for i in left if i not in judged]
                if "values" in answer:
                    for i, value in zip(judged, answer["values"], strict=True):
                        job.scores.values[i] = value
                    messages = answer.get("messages", [""] * len(judged))
                    job.scores.messages |= dict(zip(judged, messages, strict=True))
                elif len(judged) > 1:
                    again += [[i] for i in judged]
                else:
                    self._fail(job, judged[0], Failure(*answer["failure"]))
        except _Lost as lost:
            process.kill()
            self.lost += 1
            if len(left) == 1 or job.kind == "each":
                self._fail(job, left[0], lost.failure)
                again += [left[1:]] if left[1:] else []
            else:
                job.scores.slow_calls += lost.failure.kind == "timeout"
                again += [[i] for i in left]
        except BaseException:  # it may still be at work
            process.kill()
            raise
        finally:
            if process.killed:
                self._replace()
            else:
                self._idle.put_nowait(process)
        for some in again:
            job.calls.create_task(self._call(job, some))

    def _fail(self, job: _Job, index: int, failure: Failure) -> None:
        failures = job.scores.failures
        failures[index] = failure
        if len(failures) <= job.limit:
            return
        late = sum(failure.kind == "timeout" for failure in failures.values())
        first = next(iter(failures.values()))
        name = self.sources[job.function].text
        raise RunError(
            f"reward.functions: {name} failed on {len(failures)} of {len(job.items)} completions"
            f" ({late} timeouts, {len(failures) - late} exceptions or ended processes), more than"
            f" reward.max_failures allows; the first, {first.kind}:\n{first.text}"
        )


class _Process:
    """A process that judges, as the run sees it."""

    def __init__(self, max_processes: int):
        self.worker: int | None = None
        """Process id of the one that runs the functions, under the guard."""
        self.killed = False
        self._number = 0
        """Of the last order; answers to earlier ones are ignored."""
        self._answers = asyncio.StreamReader(limit=MOST_NOISE)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        stacks = self._stacks.fileno()
        numbers = [str(number) for number in (stacks, os.getpid(), max_processes)]
        paths = json.dumps([str(path) for path in sys.path])
        self._guard = subprocess.Popen(
            [sys.executable, "-c", BOOT, paths, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(stacks,),
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        self._pipes: list[Any] = [self._guard.stdin, self._guard.stdout]

    async def connect(self) -> None:
        """Lets the event loop read and write its pipes."""
        loop = asyncio.get_running_loop()
        self._orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._guard.stdin)
        self._pipes[0] = self._orders
        self._pipes[1], _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._answers), self._guard.stdout
        )

    def order(self, content: object) -> None:
        """Sends an order."""
        self._number += 1
        self._orders.write(pickle.dumps((self._number, content)))

    async def hear(self, within: float) -> dict[str, Any]:
        """The next answer to the last order; raises _Lost where none comes in `within` seconds, or
        the process has ended."""
        for seconds in (within, 0.0):  # an answer that has arrived by now still counts
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._answer()
        raise _Lost("timeout", f"no answer after {within:g} s{await self._late_stack()}")

    async def _answer(self) -> dict[str, Any]:
        noise = 0
        while noise <= MOST_NOISE:
            try:
                line = await self._answers.readline()
            except ValueError:  # a longer line than that
                break
            if not line.endswith(b"\n"):
                raise _Lost("exception", f"its process is gone{self._stack()}")
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if isinstance(answer, dict):
                if isinstance(ended := answer.get("ended"), int | str):
                    raise _Lost("exception", f"its process {_how(ended)}{self._stack()}")
                if answer.get("order") == self._number:
                    return answer
            noise += len(line)
        raise _Lost("exception", f"it wrote {MOST_NOISE} bytes that are no answer")

    async def end(self) -> None:
        """Lets a process that has nothing to do end by itself, and kills any other."""
        self._orders.close()
        with suppress(_Lost):
            while True:
                await self.hear(END_S)
        self.kill()

    def kill(self) -> None:
        """Ends it, and all that it has started, at once."""
        self.killed = True
        kill_family(self._guard.pid)  # it is not reaped: the id is its own
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        for pipe in self._pipes:
            pipe.close()
        self._stacks.close()

    async def _late_stack(self) -> str:
        """Where the function is, even if it never releases the GIL, as in a regular expression."""
        if self.worker is not None:
            with suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGUSR1)
            end = time.monotonic() + STACK_S
            while not os.fstat(self._stacks.fileno()).st_size and time.monotonic() < end:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the lines after the first
        return self._stack()

    def _stack(self) -> str:
        """Where the function is or, after a crash, was."""
        lines = os.pread(self._stacks.fileno(), STACK_BYTES, 0).decode(errors="replace")
        shown = list(itertools.takewhile(lambda line: OURS not in line, lines.splitlines()))
        return "".join(f"\n{line}" for line in shown[:STACK_LINES] if line)


def _how(code: int | str) -> str:
    """How a process ended, by its exit code or in the guard's words."""
    if isinstance(code, str):
        return code
    if code < 0:
        return f"was ended by {_NAMES.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
