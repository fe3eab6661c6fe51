"""Reward functions in processes that can be killed.

A process judges one call's items at a time. Answers that it gave before it was lost remain; the
item that it was working on gets no score, and where that may be any of several, each is judged
again by itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

from pydantic import FiniteFloat, TypeAdapter

from jaxrl.errors import RunError
from jaxrl.process.plugin import CodeSource
from jaxrl.process.user_code import (
    CommonAnswer,
    FailedAnswer,
    Failure,
    Lost,
    PoolLimits,
    ProcessAnswer,
    ReadyAnswer,
    UserCodePool,
    UserProcess,
)

SERVICE = "jaxrl.rewards.functions"
CALL_ITEMS = 16
"""Items of one call at most; an async function gets all of a process's share at once."""


@dataclass(frozen=True)
class Item:
    """A completion to judge, with all that is known of its prompt."""

    prompt: str
    completion: str
    answer: str | None
    columns: Mapping[str, object]
    """The other columns of its row, and what the run adds: `messages`, `finish_reason`,
    `n_tokens`."""
    opening: str = ""
    """As of `types.Completion`."""
    conversational: bool = False
    """Whether functions get prompt and completion as messages (`Prompt.conversational`)."""


@dataclass(frozen=True)
class ItemSource(CodeSource):
    """Where a reward function comes from; of a regular expression, it is the place."""

    option: Literal["verifier", "regex", "code"] = "code"


@dataclass(frozen=True)
class Signature:
    """What a loaded function asks for."""

    kind: Literal["each", "batch", "async"]
    """How it is called: for one completion after the other (what comes with jaxrl), for a list of
    them, or for many at the same time, each in a list of its own (`async def`)."""
    needs: Sequence[str] = ()
    """Columns without which it cannot be called."""
    takes: Sequence[str] = ()
    """Parameters that it may be called without: those with defaults, and those that do not come
    from the data (`functions.OF_COMPLETIONS`)."""
    takes_all: bool = False
    """Whether it takes every column (`**columns`)."""


class _Judged(ProcessAnswer):
    items: list[int]
    values: list[FiniteFloat | None]
    messages: list[str] = []


class _Failed(FailedAnswer):
    items: list[int]


ANSWER: TypeAdapter[ProcessAnswer] = TypeAdapter(
    _Judged | _Failed | CommonAnswer | ReadyAnswer[tuple[Signature, ...]]
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
    """Calls with several items that took longer than the timeout; those without an answer were then
    judged again."""
    seconds: float = 0.0
    """From the submission to the last answer."""


class RewardPool(UserCodePool[tuple[Signature, ...]]):
    """Some processes that have loaded the same reward functions. Its facts are what each of these
    asks for."""

    def __init__(self, sources: Sequence[ItemSource], **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them.

        Args:
            limits: the timeout is that of one item; a call with several gets no more before those
                without an answer are judged again: one by one or, of an async function, together
                while there are answers to some.
        """
        self.sources = tuple(sources)
        self._idle: asyncio.Queue[UserProcess] = asyncio.Queue()
        names = ", ".join(source.text for source in self.sources)
        super().__init__("reward", SERVICE, self.sources, names, ANSWER, **limits)
        if not self.sources:
            self._facts.set_result(())

    async def offer(self, process: UserProcess) -> None:
        process.alone = True
        self._idle.put_nowait(process)

    def judge(
        self, function: int, items: Sequence[Item], limit: float = math.inf
    ) -> Future[Scores]:
        """Submits items to a function; returns at once.

        Args:
            limit: number of failures beyond which the future raises RunError with the first one.
        """
        return self.submit(self._judge(function, items, limit))

    async def _judge(self, function: int, items: Sequence[Item], limit: float) -> Scores:
        started, source = time.monotonic(), self.sources[function]
        scores, calls = Scores([None] * len(items), {}), asyncio.TaskGroup()
        if not self._facts.done():
            await asyncio.shield(asyncio.wrap_future(self._facts))
        kind = self._facts.result()[function].kind

        def fail(index: int, failure: Failure) -> None:
            failures = scores.failures
            failures[index] = failure
            if len(failures) <= limit:
                return
            late = sum(failure.kind == "timeout" for failure in failures.values())
            first = next(iter(failures.values()))
            raise RunError(
                f"reward.functions: {source.text} failed on {len(failures)} of {len(items)}"
                f" completions ({late} timeouts, {len(failures) - late} exceptions or ended"
                " processes), more than reward.max_failures allows; the first,"
                f" {first.kind}:\n{first.text}"
            )

        async def judge(indices: Sequence[int]) -> None:
            """Lets a process judge some of the items; creates calls for those to judge again."""
            process, left, again = await self._idle.get(), list(indices), list[list[int]]()
            late = dict[int, Failure]()

            def take(answer: Any) -> bool | None:
                if not isinstance(answer, _Judged | _Failed) or not answer.items:
                    return None
                judged = [indices[k] for k in answer.items if 0 <= k < len(indices)]
                each_once = len(set(judged)) == len(answer.items) and set(judged) <= set(left)
                if not each_once or (
                    isinstance(answer, _Judged)
                    and {len(answer.values), len(answer.messages or judged)} != {len(judged)}
                ):
                    return None
                left[:] = [i for i in left if i not in judged]
                if isinstance(answer, _Judged):
                    messages = answer.messages or [""] * len(judged)
                    for i, value, message in zip(judged, answer.values, messages, strict=True):
                        scores.values[i], scores.messages[i] = value, message
                elif len(judged) > 1:
                    again.extend([i] for i in judged)
                elif answer.failure[0] == "timeout":
                    late[judged[0]] = Failure(*answer.failure)
                else:
                    fail(judged[0], Failure(*answer.failure))
                return not left

            try:
                call = process.send((function, [items[i] for i in indices]), take)
                await call.done
                process.calls.clear()
            except Lost as lost:
                if not lost.guilty:  # an earlier call has broken it
                    again.append(left)
                elif len(left) == 1 or kind == "each":
                    fail(left[0], Failure(lost.kind, str(lost)))
                    again += [left[1:]] if left[1:] else []
                else:
                    scores.slow_calls += lost.kind == "timeout"
                    again += [[i] for i in left]
            except BaseException:  # it may still be at work
                if not process.killed:
                    self.discard(process)
                raise
            finally:
                if not process.killed:
                    self._idle.put_nowait(process)
            if len(late) < len(indices):  # these may have waited for the others
                again += [list(late)] if late else []
                scores.slow_calls += bool(late)
            else:
                for index, failure in late.items():
                    fail(index, failure)
            for some in again:
                calls.create_task(judge(some))

        size = math.ceil(len(items) / max(self._workers, 1))
        size = max(size if kind == "async" else min(size, CALL_ITEMS), 1)
        try:
            async with calls:
                for start in range(0, len(items), size):
                    calls.create_task(judge(range(start, min(start + size, len(items)))))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        late = [i for i, failure in scores.failures.items() if failure.kind == "timeout"]
        late = [i for i in late if items[i].completion]
        if late and source.option == "verifier":
            # The completion is wrong, unless its answer lets no text be judged.
            nothing = [replace(items[i], completion="") for i in late]
            empty = await self._judge(function, nothing, math.inf)
            for i, value in zip(late, empty.values, strict=True):
                scores.values[i] = None if value is None else 0.0
        scores.seconds = time.monotonic() - started
        return scores
