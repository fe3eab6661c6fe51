"""Environments in processes that can be killed.

The pool sends each episode's turns to the process that holds its instance. A process that hangs or
ends costs the episode in whose name it was running; the others that it held are made again
elsewhere, from their rows and turns, when their next turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Unpack

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from jaxrl.environments.environment_process import (
    EnvironmentFacts,
    EnvironmentSource,
    Observation,
    Prompted,
    Session,
)
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

SERVICE = "jaxrl.environments.environment_process"


class _Message(BaseModel, extra="allow"):
    role: str
    content: str


class _Observation(BaseModel, extra="forbid"):
    messages: list[_Message]
    reward: FiniteFloat | None
    done: bool


class _Result(ProcessAnswer):
    result: str | list[_Message] | _Observation | None
    """What `reset` returned, or `step`; None: the instance is closed."""


ANSWER: TypeAdapter[ProcessAnswer] = TypeAdapter(
    _Result | FailedAnswer | CommonAnswer | ReadyAnswer[EnvironmentFacts | None]
)


class EnvironmentPool(UserCodePool[EnvironmentFacts]):
    """Some processes that have loaded the same environment. What is submitted may await `begin`,
    `step` and `end`."""

    def __init__(self, source: EnvironmentSource, **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them."""
        self.source = source
        self._holders: dict[Hashable, UserProcess] = {}  # of episodes' instances, by their keys
        self._changed = asyncio.Condition()  # notified when a process may take other calls
        # Calls that wait for a process of their own, since any of them may have cost one.
        self._suspects = 0
        # Of the first processes, those that are not ready; episodes are shared out among all.
        self._to_start = limits["workers"]
        super().__init__("environment", SERVICE, source, source.text, ANSWER, **limits)

    async def offer(self, process: UserProcess) -> None:
        self._to_start -= 1
        await self._notify()

    async def begin(self, session: Session) -> Prompted | Failure:
        """Makes the instance of an episode; returns the prompt that its `reset` returned."""
        first = await self._ask(session, lambda past: ("begin", session.key, session.row))
        if not isinstance(first, Failure):
            session.first = first = first if isinstance(first, str) else tuple(first)
        return first

    async def step(self, session: Session, text: str) -> Observation | Failure:
        """Returns the answer to a turn; it is also noted in the session."""
        answer = await self._ask(session, lambda past: ("step", session.key, past, text))
        if isinstance(answer, Failure):
            return answer
        observation = Observation.of_json(answer)
        session.turns.append((text, observation))
        return observation

    async def end(self, session: Session) -> None:
        """Has the instance of an episode closed, which is over."""
        process = self._holders.pop(session.key, None)
        if process is None or process.killed:
            return
        process.sessions.discard(session.key)
        with suppress(Lost):
            await self._answer(process, ("end", session.key))

    async def _ask(
        self, session: Session, content: Callable[[Session | None], tuple[Any, ...]]
    ) -> Any | Failure:
        """Returns the answer to a call about an episode, which is sent again where it lost its
        process through no fault of its own; `content` gets the session where none holds it."""
        suspect = False
        while True:
            process = await self._process(session, suspect)
            past = session if self._holders.get(session.key) is not process else None
            self._holders[session.key] = process
            process.sessions.add(session.key)
            try:
                return await self._answer(process, content(past))
            except Lost as lost:
                self._holders.pop(session.key, None)
                if lost.guilty:
                    return Failure(lost.kind, str(lost))
                suspect |= lost.guilty is None
            finally:
                if suspect or self._suspects:
                    process.alone = False
                    await self._notify()

    async def _process(self, session: Session, suspect: bool) -> UserProcess:
        """Waits for the process that holds the instance of an episode or, where there is none, for
        the one that holds the fewest. A suspect call gets it alone, to be to blame if it is lost.
        """

        def free() -> list[UserProcess]:
            holder = self._holders.get(session.key)
            if holder is not None and not holder.killed:
                usable = [holder]
            elif self._to_start <= 0 and (not suspect or len(self.processes) == self._workers):
                usable = self.processes
            else:
                usable = []
            if suspect:
                return [process for process in usable if not process.calls]
            return [process for process in usable if not process.alone and not self._suspects]

        self._suspects += suspect
        try:
            async with self._changed:
                await self._changed.wait_for(free)
                process = min(free(), key=lambda process: len(process.sessions))
                process.alone = suspect
                return process
        finally:
            self._suspects -= suspect
            if suspect and not self._suspects:
                await self._notify()

    async def _answer(self, process: UserProcess, content: tuple[Any, ...]) -> Any | Failure:
        shapes: dict[str, tuple[type, ...]] = {"begin": (str, list), "step": (_Observation,)}

        def take(answer: Any) -> bool | None:
            if isinstance(answer, FailedAnswer):
                return answer.failure[0] != "user" or None
            is_result = isinstance(answer, _Result)
            return (
                is_result and isinstance(answer.result, shapes.get(content[0], (type(None),)))
            ) or None

        call = process.send(content, take)
        try:
            answer = await call.done
        finally:
            process.calls.pop(call.number, None)
        if isinstance(answer, FailedAnswer):
            return Failure(*answer.failure)
        return answer.model_dump()["result"]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
