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
from typing import Unpack

from jaxrl.data.example import JsonObject
from jaxrl.environments.observation import Observation
from jaxrl.environments.process import CELL, Content, Prompted
from jaxrl.environments.process import Session as Session
from jaxrl.environments.source import EnvironmentFacts, EnvironmentSource
from jaxrl.process.killable import KillableProcess, Lost
from jaxrl.process.pool import ASYNC_SLACK_S, PoolLimits, ProcessPool
from jaxrl.rewards.items import Failure

SERVICE = "jaxrl.environments.process"
OURS = os.path.join("environments", "process.py")
"""A stack is shown down to the user's last frame, above the first line with this."""
LOOK_S = 0.25
"""Seconds between two looks whether a process is late."""
MOST_LOSSES = 2
"""Processes that an order may lose without being the one that was running; then it fails too."""


class _Process(KillableProcess):
    def __init__(self, max_processes: int):
        self._cell = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        self._cell.write(bytes(CELL))
        self._cell.flush()
        files = (self._cell.fileno(),)
        super().__init__(SERVICE, "environment", OURS, max_processes, files)
        self.sessions: set[Hashable] = set()
        """Keys of the episodes whose instances it holds."""
        self.orders: dict[int, _Order] = {}
        """Those without an answer yet, by number."""
        self.looked = 0.0
        """When it was last looked whether it is late, on the clock of `time.monotonic`."""
        self.suspect: _Order | None = None
        """The order that was late then."""

    def running(self) -> _Order | None:
        """The order in whose name it is running, or was when it ended."""
        number = int.from_bytes(os.pread(self._cell.fileno(), CELL, 0), "little")
        return self.orders.get(number)

    def kill(self) -> None:
        super().kill()
        self._cell.close()


@dataclass
class _Order:
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
        self._ready: list[_Process] = []
        self._holders: dict[Hashable, _Process] = {}
        """The processes that hold the episodes' instances, by the episodes' keys."""
        self._arrived = asyncio.Condition()
        """Notified when a process is ready."""
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
        process = self._holders.pop(session.key, None)
        if process is not None and not process.killed:
            process.sessions.discard(session.key)
            with suppress(_Blamed):
                await self._order(process, ("end", session.key)).done

    def _new(self) -> _Process:
        return _Process(self._max_processes)

    def _first_order(self) -> object:
        describe, self._describe = self._describe, False
        return self.source, self.timeout, self._memory_mb, describe

    async def _use(self, process: _Process, answer: JsonObject) -> None:
        """Also listens to it until it is lost."""
        if answer["facts"] is not None:
            self._facts.set_result(EnvironmentFacts(**answer["facts"]))
        self._ready.append(process)
        self._to_start -= 1
        async with self._arrived:
            self._arrived.notify_all()
        try:
            while True:
                await self._listen(process)
        except Lost as lost:
            self._lose(process, lost)
        self._replace()

    def _in_use(self) -> list[_Process]:
        return self._ready

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
            raise await process.late(self.timeout if suspect.begun else self.startup)

    def _late_order(self, process: _Process, now: float) -> _Order | None:
        """The order that is answered too late, if one is. While one runs, others wait for it."""
        running, orders = process.running(), process.orders.values()
        begun = [order for order in orders if order.begun is not None]
        for order in begun if running is None else [running]:
            limit = self.timeout + (ASYNC_SLACK_S if order.awaits else 0)
            if order.begun is not None and now - order.begun > limit:
                return order
        waiting = [order for order in orders if now - order.sent > self.startup]
        return waiting[0] if waiting and not begun else None

    def _take(self, process: _Process, answer: JsonObject) -> None:
        order = process.orders.get(answer["order"])
        if order is None:
            return
        if "begin" in answer or "awaits" in answer:
            order.begun, order.awaits = time.monotonic(), "awaits" in answer
            return
        del process.orders[answer["order"]]
        if not order.done.done():  # whoever waited for it may have been cancelled
            order.done.set_result(answer)

    def _lose(self, process: _Process, lost: Lost) -> None:
        """Takes a process out of use, and tells its orders."""
        guilty = process.running() or (process.suspect if lost.kind == "timeout" else None)
        self._ready.remove(process)
        process.kill()
        self.lost += 1
        for order in process.orders.values():
            if not order.done.done():
                order.done.set_exception(_Blamed(lost, order is guilty, guilty is None))
        process.orders.clear()

    async def _ask(
        self, session: Session, content: Callable[[Session | None], Content]
    ) -> JsonObject | Failure:
        """The answer to an order about an episode; a second time where it lost its process through
        no fault of its own.

        Args:
            content: of the order, given the session where no process holds its instance.
        """
        losses = 0
        while True:
            process, past = self._holders.get(session.key), None
            if process is None or process.killed:
                process, past = await self._freest(), session
            order = self._order(process, content(past))
            self._holders[session.key] = process
            process.sessions.add(session.key)
            try:
                answer = await order.done
            except _Blamed as blamed:
                self._holders.pop(session.key, None)
                losses += blamed.unknown
                if blamed.guilty or losses >= MOST_LOSSES:
                    return Failure(blamed.lost.kind, str(blamed.lost))
                continue
            return Failure(*answer["failure"]) if "failure" in answer else answer

    def _order(self, process: _Process, content: Content) -> _Order:
        order = _Order(asyncio.get_running_loop().create_future(), time.monotonic())
        process.orders[process.order(content)] = order
        return order

    async def _freest(self) -> _Process:
        """The process that holds the fewest episodes; waits for one to start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._ready and self._to_start <= 0)
        return min(self._ready, key=lambda process: len(process.sessions))


class _Blamed(Exception):
    """An order's process was lost."""

    def __init__(self, lost: Lost, guilty: bool, unknown: bool):
        super().__init__(str(lost))
        self.lost, self.guilty, self.unknown = lost, guilty, unknown
