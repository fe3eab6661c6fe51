"""Environments in processes that can be killed.

The pool sends each episode's turns to the process that holds its instance. A process that hangs or
ends costs the episode in whose name it was running; the others that it held are made again
elsewhere, from their rows and turns, when their next turn comes.
"""

from __future__ import annotations

from collections.abc import Callable
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
from jaxrl.errors import StopTraining
from jaxrl.process.user_code import (
    CommonAnswer,
    Failure,
    Lost,
    PoolLimits,
    ProcessAnswer,
    ReadyAnswer,
    UserCodePool,
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
    _Result | CommonAnswer | ReadyAnswer[EnvironmentFacts | None]
)


class EnvironmentPool(UserCodePool[EnvironmentFacts]):
    """Some processes that have loaded the same environment. What is submitted may await `begin`,
    `step` and `end`; the first two raise StopTraining once the environment has."""

    def __init__(self, source: EnvironmentSource, **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them."""
        self.source, self._by = source, f"environment.name: {source.text}"
        super().__init__("environment", SERVICE, source, source.text, ANSWER, **limits)

    async def begin(self, session: Session) -> Prompted | Failure:
        """Makes the instance of an episode; returns the prompt that its `reset` returned."""
        content = ("begin", session.key, session.row)
        first = await self._ask(session, lambda held: content, str, list)
        if not isinstance(first, Failure):
            session.first = first = first if isinstance(first, str) else tuple(first)
        return first

    async def step(self, session: Session, text: str) -> Observation | Failure:
        """Returns the answer to a turn; it is also noted in the session."""

        def content(held: bool) -> tuple[Any, ...]:
            return ("step", session.key, None if held else session, text)

        answer = await self._ask(session, content, _Observation)
        if isinstance(answer, Failure):
            return answer
        observation = Observation.of_json(answer)
        session.turns.append((text, observation))
        return observation

    async def end(self, session: Session) -> None:
        """Has the instance of an episode closed, which is over."""
        process = self.leave(session.key)
        if process is not None:
            try:
                with suppress(Lost):
                    await self.send(process, ("end", session.key), _gives(type(None)))
            except StopTraining as stop:  # nobody waits for this: the next episode is told
                self.stop = self.stop or stop.from_code(self._by)

    async def _ask(
        self, session: Session, content: Callable[[bool], tuple[Any, ...]], *shapes: type
    ) -> Any | Failure:
        """Returns the result of a call about an episode."""
        try:
            answer = await self.call(session.key, content, _gives(*shapes))
        except StopTraining as stop:
            raise stop.from_code(self._by) from None
        return answer if isinstance(answer, Failure) else answer.model_dump()["result"]


def _gives(*shapes: type) -> Callable[[Any], bool]:
    return lambda answer: isinstance(answer, _Result) and isinstance(answer.result, shapes)
