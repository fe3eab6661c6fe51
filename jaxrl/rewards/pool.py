"""Reward functions in processes that can be killed.

A thread runs an event loop, which starts the processes, hands them items, and replaces a process
that is late or has ended. Answers that the process gave before remain; the item that it was working
on gets no score, and where that may be any of several, each is judged again by itself. Every wait
has a limit.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from jaxrl.errors import RunError, UserError
from jaxrl.process.killable import END_S, MAX_PROCESSES, KillableProcess, Lost
from jaxrl.rewards.items import Failure, Item, ItemSource, Signature

SERVICE = "jaxrl.rewards.process"
CALL_ITEMS = 16
"""Items of one call at most; an async function gets all of a process's share at once."""
ASYNC_SLACK_S = 1.0
"""The process cancels an awaited call at its timeout; so much later the process is killed."""
OURS = os.path.join("rewards", "functions.py")
"""A stack is shown down to the user's last frame, above the first line with this."""


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
        self._idle: asyncio.Queue[KillableProcess] = asyncio.Queue()
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
        process = KillableProcess(SERVICE, "reward", OURS, self._max_processes)
        try:
            await process.connect()
            process.order((self.sources, self.timeout, self._memory_mb))
            answer = await process.hear(self.startup)
            if "refused" in answer:
                raise UserError(answer["refused"])
        except BaseException as error:
            process.kill()
            if not isinstance(error, Lost):
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
        except Lost as lost:
            process.kill()
            self.lost += 1
            if len(left) == 1 or job.kind == "each":
                self._fail(job, left[0], Failure(lost.kind, str(lost)))
                again += [left[1:]] if left[1:] else []
            else:
                job.scores.slow_calls += lost.kind == "timeout"
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
