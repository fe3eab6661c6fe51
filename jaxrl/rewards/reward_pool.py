"""Reward functions in processes that can be killed.

A process judges a share of the items, one call for each or, where the function takes several, one
for all. The item that it was working on when it was lost gets no score; where that may be any of
several, each is judged again by itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, Unpack

from pydantic import FiniteFloat, TypeAdapter

from jaxrl.errors import StopTraining
from jaxrl.process.plugin import CodeSource
from jaxrl.process.user_code import (
    CommonAnswer,
    Failure,
    PoolLimits,
    ProcessAnswer,
    ReadyAnswer,
    UserCodePool,
    too_many_failures,
)

SERVICE = "jaxrl.rewards.functions"
SHARE_ITEMS = 16
"""Items that a process gets at once at most; those of an async function are shared out evenly."""


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
    values: list[FiniteFloat | None]
    messages: list[str] = []


ANSWER: TypeAdapter[ProcessAnswer] = TypeAdapter(
    _Judged | CommonAnswer | ReadyAnswer[tuple[Signature, ...]]
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
    asks for; a share of the items is a session."""

    most_sessions = 1

    def __init__(self, sources: Sequence[ItemSource], **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them.

        Args:
            limits: the timeout is that of one item; a call with several gets no more before those
                without an answer are judged again: one by one or, of an async function, together
                while there are answers to some.
        """
        self.sources = tuple(sources)
        names = ", ".join(source.text for source in self.sources)
        super().__init__("reward", SERVICE, self.sources, names, ANSWER, **limits)
        if not self.sources:
            self._facts.set_result(())

    def judge(
        self, function: int, items: Sequence[Item], limit: float = math.inf
    ) -> Future[Scores]:
        """Submits items to a function; returns at once. The future raises StopTraining where a
        function of the pool does: none of these items is then judged.

        Args:
            limit: number of failures beyond which the future raises RunError with the first one.
        """
        return self.submit(self._judge(function, items, limit))

    async def _judge(self, function: int, items: Sequence[Item], limit: float) -> Scores:
        started, source = time.monotonic(), self.sources[function]
        scores, tasks = Scores([None] * len(items), {}), asyncio.TaskGroup()
        if not self._facts.done():
            await asyncio.shield(asyncio.wrap_future(self._facts))
        kind = self._facts.result()[function].kind

        def fail(index: int, failure: Failure) -> None:
            scores.failures[index] = failure
            if len(scores.failures) > limit:
                who, of = f"reward.functions: {source.text}", f"{len(items)} completions"
                raise too_many_failures(scores.failures.values(), who, of, "reward.max_failures")

        def share_out(indices: Sequence[int], size: int) -> None:
            for start in range(0, len(indices), size):
                tasks.create_task(judge(indices[start : start + size]))

        async def judge(share: Sequence[int]) -> None:
            """Lets a process judge some of the items, and again those that were only late."""
            late, parts = dict[int, Failure](), [share] if kind == "batch" else [[i] for i in share]
            await self.hold(session := object())
            try:
                for task in [tasks.create_task(ask(session, part, late)) for part in parts]:
                    await task
            finally:
                self.leave(session)
            if 0 < len(late) < len(share):  # these may have waited for the others
                scores.slow_calls += 1
                share_out(list(late), len(late))
                return
            for index, failure in late.items():
                fail(index, failure)

        async def ask(session: object, part: Sequence[int], late: dict[int, Failure]) -> None:
            try:
                answer = await self.call(
                    session,
                    lambda _: (function, [items[i] for i in part]),
                    lambda a: (
                        isinstance(a, _Judged)
                        and len(a.values) == len(part)
                        and len(a.messages) in (0, len(part))
                    ),
                )
            except StopTraining as stop:
                raise stop.from_code(f"reward.functions: {source.text}") from None
            if not isinstance(answer, Failure):
                messages = answer.messages or [""] * len(part)
                for i, value, message in zip(part, answer.values, messages, strict=True):
                    scores.values[i], scores.messages[i] = value, message
            elif len(part) > 1:
                scores.slow_calls += answer.kind == "timeout"
                share_out(part, 1)
            elif answer.kind == "timeout" and not answer.killed:
                late[part[0]] = answer
            else:
                fail(part[0], answer)

        size = max(math.ceil(len(items) / max(self._workers, 1)), 1)
        try:
            async with tasks:
                share_out(range(len(items)), size if kind == "async" else min(size, SHARE_ITEMS))
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
