"""Reward functions in processes that can be killed.

The pool hands its processes items, and replaces a process that is late or has ended. Answers that
the process gave before remain; the item that it was working on gets no score, and where that may be
any of several, each is judged again by itself. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, Unpack

from pydantic import FiniteFloat, TypeAdapter

from jaxrl.errors import RunError, UserError
from jaxrl.process.killable import (
    BegunAnswer,
    KillableProcess,
    Lost,
    ProcessAnswer,
    RefusedAnswer,
    no_answer,
)
from jaxrl.process.plain import JsonObject
from jaxrl.process.pool import ASYNC_SLACK_S, PoolLimits, ProcessPool
from jaxrl.rewards.items import Failure, Item, ItemSource, Signature

SERVICE = "jaxrl.rewards.functions"
CALL_ITEMS = 16
"""Items of one call at most; an async function gets all of a process's share at once."""
OURS = os.path.join("rewards", "functions.py")
"""A stack is shown down to the user's last frame, above the first line with this."""


class _Ready(ProcessAnswer):
    ready: int
    signatures: list[Signature]


class _Imports(ProcessAnswer):
    imports: Literal[True]


class _Judged(ProcessAnswer):
    items: list[int]
    values: list[FiniteFloat | None]
    messages: list[str] = []


class _Failed(ProcessAnswer):
    items: list[int]
    failure: tuple[Literal["timeout", "exception", "user"], str]


ANSWER: TypeAdapter[ProcessAnswer] = TypeAdapter(
    _Ready | RefusedAnswer | _Imports | BegunAnswer | _Judged | _Failed
)


@dataclass
class Scores:
    """What a function returned for some items."""

    values: list[float | None]
    """One for each item; None where the function said so, or failed. A completion that a verifier
    does not judge in time is 0, if it can read the answer."""
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


class RewardPool(ProcessPool[KillableProcess, tuple[Signature, ...]]):
    """Some processes that have loaded the same reward functions. Its facts are what each of these
    asks for."""

    def __init__(self, sources: Sequence[ItemSource], **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them.

        Args:
            limits: the timeout is that of one item; a call with several gets no more before its
                items are judged one by one.
        """
        self.sources = tuple(sources)
        self._idle: asyncio.Queue[KillableProcess] = asyncio.Queue()
        names = ", ".join(source.text for source in self.sources)
        super().__init__("rewards", names, **limits)
        if not self.sources:
            self._facts.set_result(())

    def judge(
        self, function: int, items: Sequence[Item], limit: float = math.inf
    ) -> Future[Scores]:
        """Submits items to a function; returns at once.

        Args:
            function: index in `sources`.
            limit: number of failures beyond which the future raises RunError with the first one.
        """
        return self.submit(self._judge(function, items, limit))

    def _new(self) -> KillableProcess:
        return KillableProcess(SERVICE, "reward", OURS, self._max_processes, ANSWER)

    def _first_order(self) -> object:
        return self.sources, self.timeout, self._memory_mb

    async def _use(self, process: KillableProcess, answer: JsonObject) -> None:
        if not self._facts.done():
            self._facts.set_result(tuple(Signature(**s) for s in answer["signatures"]))
        self._idle.put_nowait(process)

    def _in_use(self) -> list[KillableProcess]:
        return [self._idle.get_nowait() for _ in range(self._idle.qsize())]

    async def _judge(self, function: int, items: Sequence[Item], limit: float) -> Scores:
        started = time.monotonic()
        scores = Scores([None] * len(items), {})
        try:
            loaded = await asyncio.shield(asyncio.wrap_future(self._facts))
            job = _Job(function, loaded[function].kind, items, limit, scores)
            size = math.ceil(len(items) / self._workers)
            if job.kind != "async":
                size = min(size, CALL_ITEMS)
            async with job.calls:
                for start in range(0, len(items), size or 1):
                    indices = range(start, min(start + size, len(items)))
                    job.calls.create_task(self._call(job, indices))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        late = [i for i, failure in scores.failures.items() if failure.kind == "timeout"]
        late = [i for i in late if items[i].completion]
        if late and self.sources[function].option == "verifier":
            # The completion is wrong, unless its answer lets no text be judged.
            nothing = [replace(items[i], completion="") for i in late]
            empty = await self._judge(function, nothing, math.inf)
            for i, value in zip(late, empty.values, strict=True):
                scores.values[i] = None if value is None else 0.0
        scores.seconds = time.monotonic() - started
        return scores

    async def _call(self, job: _Job, indices: Sequence[int]) -> None:
        """Lets a process judge items of a job; creates further calls for those to judge again."""
        process = await self._idle.get()
        left, begun, fresh = list(indices), False, process.fresh
        within, process.fresh = self.startup if fresh else self.timeout, False
        again: list[list[int]] = []
        try:
            process.order((job.function, [job.items[i] for i in indices]))
            while left:
                answer = await process.hear(within)
                if "refused" in answer:
                    raise UserError(answer["refused"])
                if "imports" in answer and not begun:
                    within = self.startup
                    continue
                if "begin" in answer and not begun:
                    within, begun = (
                        self.timeout + (ASYNC_SLACK_S if job.kind == "async" else 0),
                        True,
                    )
                    continue
                if not begun or not _is_about(answer, indices, left):
                    raise no_answer(answer)
                judged = [indices[k] for k in answer["items"]]
                left = [i for i in left if i not in judged]
                if "values" in answer:
                    for i, value in zip(judged, answer["values"], strict=True):
                        job.scores.values[i] = value
                    messages = answer.get("messages") or [""] * len(judged)
                    job.scores.messages |= dict(zip(judged, messages, strict=True))
                elif len(judged) > 1:
                    again += [[i] for i in judged]
                else:
                    self._fail(job, judged[0], Failure(*answer["failure"]))
        except Lost as lost:
            process.kill()
            self.lost += 1
            if not begun and not fresh:  # an earlier call has broken it
                again.append(left)
            elif len(left) == 1 or job.kind == "each":
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


def _is_about(answer: JsonObject, indices: Sequence[int], left: Sequence[int]) -> bool:
    """Whether it judges items that are left of those with the indices, each once."""
    items = answer.get("items", [])
    inside = all(0 <= k < len(indices) and indices[k] in left for k in items)
    lists = [answer.get("values", items), answer.get("messages") or items, set(items)]
    return bool(items) and inside and all(len(some) == len(items) for some in lists)
