"""Environments in processes that can be killed.

The pool sends each episode's turns to the process that holds its instance. A process that hangs or
ends costs the episode in whose name it was running; the others that it held are made again
elsewhere, from their rows and turns, when their next turn comes. Every wait has a limit.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Unpack

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from jaxrl.data.example import JsonObject
from jaxrl.environments.observation import Observation
from jaxrl.environments.process import CELL, Content, Prompted
from jaxrl.environments.process import Session as Session
from jaxrl.environments.source import EnvironmentFacts, EnvironmentSource
from jaxrl.process.killable import (
    BegunAnswer,
    KillableProcess,
    Lost,
    ProcessAnswer,
    RefusedAnswer,
    no_answer,
)
from jaxrl.process.pool import ASYNC_SLACK_S, PoolLimits, ProcessPool
from jaxrl.rewards.items import Failure

SERVICE = "jaxrl.environments.process"
OURS = os.path.join("environments", "process.py")
"""A stack is shown down to the user's last frame, above the first line with this."""
LOOK_S = 0.25
"""Seconds between two looks whether a process is late."""


class _Ready(ProcessAnswer):
    ready: int
    facts: EnvironmentFacts | None


class _Awaits(ProcessAnswer):
    awaits: Literal[True]


class _Message(BaseModel, extra="allow"):
    role: str
    content: str


class _Observation(BaseModel, extra="forbid"):
    messages: list[_Message]
    reward: FiniteFloat | None
    done: bool


class _First(ProcessAnswer):
    first: str | list[_Message]


class _Stepped(ProcessAnswer):
    answer: _Observation


class _Closed(ProcessAnswer):
    closed: Literal[True]


class _Failed(ProcessAnswer):
    failure: tuple[Literal["timeout", "exception"], str]


ANSWER: TypeAdapter[ProcessAnswer] = TypeAdapter(
    _Ready | RefusedAnswer | BegunAnswer | _Awaits | _First | _Stepped | _Closed | _Failed
)
KINDS = {"begin": "first", "step": "answer", "end": "closed"}
"""Kind of an order -> what its answer has."""


class _Process(KillableProcess):
    def __init__(self, max_processes: int):
        self._cell = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        self._cell.write(bytes(CELL))
        self._cell.flush()
        files = (self._cell.fileno(),)
        super().__init__(SERVICE, "environment", OURS, max_processes, ANSWER, files)
        self.sessions: set[Hashable] = set()
        """Keys of the episodes whose instances it holds."""
        self.orders: dict[int, _Order] = {}
        """Those without an answer yet, by number."""
        self.looked = 0.0
        """When it was last looked whether it is late, on the clock of `time.monotonic`."""
        self.suspect: _Order | None = None
        """The order that was late then."""
        self.heard = time.monotonic()
        """When it last said something."""
        self.alone: _Order | None = None
        """The only order that it gets, which it has to answer before it is used for others."""

    def running(self) -> _Order | None:
        """The order in whose name it is running, or was when it ended."""
        number = int.from_bytes(os.pread(self._cell.fileno(), CELL, 0), "little")
        return self.orders.get(number)

    def kill(self) -> None:
        super().kill()
        self._cell.close()


@dataclass
class _Order:
    kind: str
    """Of KINDS."""
    done: asyncio.Future[JsonObject]
    """Its answer; raises Lost where it has cost a process."""
    sent: float
    begun: float | None = None
    """When the user's code was last called for it, on the clock of `time.monotonic`."""
    awaits: bool = False
    """Whether that call returned what is awaited."""


class EnvironmentPool(ProcessPool[_Process, EnvironmentFacts]):
    """Some processes that have loaded the same environment. What is submitted may await `begin`,
    `step` and `end`."""

    def __init__(self, source: EnvironmentSource, **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them."""
        self.source = source
        self._describe = True
        """Whether the next process is to say what the environment is."""
        self._started: list[_Process] = []
        self._ready: list[_Process] = []
        """Those of them that are used for all orders."""
        self._holders: dict[Hashable, _Process] = {}
        """The processes that hold the episodes' instances, by the episodes' keys."""
        self._arrived = asyncio.Condition()
        """Notified when a process is ready."""
        self._suspects = 0
        """Orders that wait for a process of their own, since any of them may have cost one."""
        self._trials: list[_Process] = []
        """Processes for them, at most one for each."""
        self._to_start = limits["workers"]
        """Of the first processes, those that are not ready; episodes are shared out among all."""
        super().__init__("environments", source.text, **limits)

    async def begin(self, session: Session) -> Prompted | Failure:
        """Makes the instance of an episode; the prompt that its `reset` returns."""
        answer = await self._ask(session, lambda past: ("begin", session.key, session.row))
        if isinstance(answer, Failure):
            return answer
        first = answer["first"]
        session.first = first if isinstance(first, str) else tuple(first)
        return session.first

    async def step(self, session: Session, text: str) -> Observation | Failure:
        """The answer to a turn; it is also noted in the session."""
        answer = await self._ask(session, lambda past: ("step", session.key, past, text))
        if isinstance(answer, Failure):
            return answer
        observation = Observation.of_json(answer["answer"])
        session.turns.append((text, observation))
        return observation

    async def end(self, session: Session) -> None:
        """Has the instance of an episode closed, which is over."""
        process = await self._holder(session)
        self._holders.pop(session.key, None)
        if process is not None:
            process.sessions.discard(session.key)
            with suppress(_Blamed):
                await self._order(process, ("end", session.key), None).done

    def _new(self) -> _Process:
        return _Process(self._max_processes)

    def _first_order(self) -> object:
        describe, self._describe = self._describe, False
        return self.source, self.timeout, self._memory_mb, describe

    async def _use(self, process: _Process, answer: JsonObject) -> None:
        """Also listens to it until it is lost."""
        if answer["facts"] is not None and not self._facts.done():
            self._facts.set_result(EnvironmentFacts(**answer["facts"]))
        self._to_start -= 1
        self._started.append(process)
        await self._offer(process)
        try:
            while True:
                await self._listen(process)
        except Lost as lost:
            self._lose(process, lost)
        self._replace()

    async def _offer(self, process: _Process) -> None:
        """Lets a process be used: by a suspect alone, or else by all."""
        async with self._arrived:
            waited_for = self._suspects > len(self._trials)
            (self._trials if waited_for else self._ready).append(process)
            self._arrived.notify_all()

    def _in_use(self) -> list[_Process]:
        return self._started

    async def _listen(self, process: _Process) -> None:
        """Takes the next answer of a process; raises Lost where it is late, or has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                self._take(process, await process.answer())
        now = time.monotonic()
        if now - process.looked < LOOK_S:
            return
        process.looked, suspect = now, process.suspect
        process.suspect = self._late_order(process, now)
        if process.suspect is not None and process.suspect is suspect:
            raise await process.late(self.timeout if suspect.begun else self._patience(process))

    def _late_order(self, process: _Process, now: float) -> _Order | None:
        """The order that is answered too late, if one is. While one runs, others wait for it."""
        running, orders = process.running(), process.orders.values()
        begun = [order for order in orders if order.begun is not None]
        for order in begun if running is None else [running]:
            limit = self.timeout + (ASYNC_SLACK_S if order.awaits else 0)
            if order.begun is not None and now - order.begun > limit:
                return order
        since = now - self._patience(process)
        waiting = [order for order in orders if max(order.sent, process.heard) < since]
        return waiting[0] if waiting and not begun else None

    def _patience(self, process: _Process) -> float:
        """Seconds until a process that does nothing else begins with an order."""
        return self.startup if process.fresh else self.timeout

    def _take(self, process: _Process, answer: JsonObject) -> None:
        """Raises Lost where the answer is none to its order."""
        order = process.orders.get(answer["order"])
        if order is None:
            return
        process.heard = time.monotonic()
        if "begin" in answer or "awaits" in answer:
            process.fresh = False
            order.begun, order.awaits = process.heard, "awaits" in answer
            return
        if not {KINDS[order.kind], "failure"} & answer.keys():
            raise no_answer(answer)
        del process.orders[answer["order"]]
        if not order.done.done():  # whoever waited for it may have been cancelled
            order.done.set_result(answer)

    def _lose(self, process: _Process, lost: Lost) -> None:
        """Takes a process out of use, and tells its orders."""
        late = process.suspect if lost.kind == "timeout" else None
        begun = late if late is not None and late.begun is not None else None
        guilty = process.running() or begun or process.alone
        for some in (self._started, self._ready, self._trials):
            if process in some:
                some.remove(process)
        process.kill()
        self.lost += 1
        for order in process.orders.values():
            if not order.done.done():
                suspect = guilty is None and order.kind != "end"
                order.done.set_exception(_Blamed(lost, order is guilty, suspect))
        process.orders.clear()

    async def _ask(
        self, session: Session, content: Callable[[Session | None], Content]
    ) -> JsonObject | Failure:
        """The answer to an order about an episode; a second time where it lost its process through
        no fault of its own.

        Args:
            content: of the order, given the session where no process holds its instance.
        """
        suspected = False
        while True:
            try:
                if suspected:
                    return await self._ask_alone(session, content(session))
                process, past = await self._holder(session), None
                if process is None:
                    process, past = await self._freest(), session
                return await self._answered(session, self._order(process, content(past), session))
            except _Blamed as blamed:
                self._holders.pop(session.key, None)
                if blamed.guilty:
                    return Failure(blamed.lost.kind, str(blamed.lost))
                suspected |= blamed.suspect

    async def _ask_alone(self, session: Session, content: Content) -> JsonObject | Failure:
        """The answer of a process that gets no other order meanwhile, so that it alone is to blame
        if that is lost."""
        async with self._arrived:
            self._suspects += 1
            try:
                await self._arrived.wait_for(lambda: self._trials)
                process = self._trials.pop()
            finally:
                self._suspects -= 1
                if len(self._trials) > self._suspects:  # it was cancelled
                    self._ready.append(self._trials.pop())
                    self._arrived.notify_all()
        process.alone = order = self._order(process, content, session)
        try:
            return await self._answered(session, order)
        finally:
            process.alone = None
            if not process.killed:
                await self._offer(process)

    async def _answered(self, session: Session, order: _Order) -> JsonObject | Failure:
        answer = await order.done
        return Failure(*answer["failure"]) if "failure" in answer else answer

    def _order(self, process: _Process, content: Content, session: Session | None) -> _Order:
        """Sends an order; the process then holds the instance of the session, if one is given."""
        order = _Order(content[0], asyncio.get_running_loop().create_future(), time.monotonic())
        process.orders[process.order(content)] = order
        if session is not None:
            self._holders[session.key] = process
            process.sessions.add(session.key)
        return order

    async def _holder(self, session: Session) -> _Process | None:
        """The process that holds the instance of an episode, once it is used for all; None where
        there is none."""
        async with self._arrived:
            while (process := self._holders.get(session.key)) is not None:
                if process.killed:
                    return None
                if process in self._ready:
                    return process
                await self._arrived.wait()
        return None

    async def _freest(self) -> _Process:
        """The process that holds the fewest episodes; waits for one to start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._ready and self._to_start <= 0)
        return min(self._ready, key=lambda process: len(process.sessions))


class _Blamed(Exception):
    """An order's process was lost."""

    def __init__(self, lost: Lost, guilty: bool, suspect: bool):
        super().__init__(str(lost))
        self.lost, self.guilty, self.suspect = lost, guilty, suspect
