"""Processes that can be killed, kept by the event loop of a thread."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Generic, NotRequired, Self, TypedDict, TypeVar, Unpack

from jaxrl.errors import RunError, UserError
from jaxrl.process.killable import END_S, MAX_PROCESSES, KillableProcess, Lost, no_answer
from jaxrl.process.plain import JsonObject

ASYNC_SLACK_S = 1.0
"""A process cancels an awaited call at its timeout; so much later the process is killed."""

Process = TypeVar("Process", bound=KillableProcess)
Facts = TypeVar("Facts")
Result = TypeVar("Result")


class PoolLimits(TypedDict):
    """Keyword arguments of a pool."""

    workers: int
    timeout: float
    """Seconds for the user's code to answer once."""
    startup: float
    """Seconds for a process to import what it needs."""
    memory_mb: NotRequired[int | None]
    """Megabytes that each process may address; None: no limit."""
    max_processes: NotRequired[int]
    """Number that each process may grow to, itself and all below it."""


class ProcessPool(ABC, Generic[Process, Facts]):
    """Some processes that have loaded the same code of the user's.

    What is submitted runs in the event loop. Once the pool is closed, or a process cannot be
    started, everything that is not done raises why.
    """

    def __init__(self, section: str, names: str, **limits: Unpack[PoolLimits]) -> None:
        """Starts the processes and does not wait for them; the last step of a subclass's own.

        Args:
            section: of the config, for messages.
            names: what they load, for messages.
        """
        self.timeout, self.startup = limits["timeout"], limits["startup"]
        self._memory_mb = limits.get("memory_mb")
        self._max_processes = limits.get("max_processes", MAX_PROCESSES)
        self.lost = 0
        """Processes that were late or ended at work, and are replaced."""
        self._section, self._names, self._workers = section, names, limits["workers"]
        self._facts: Future[Facts] = Future()
        """What a process says of the code that it has loaded."""
        self._error: Exception | None = None
        """Why the pool has ended."""
        self._lock = threading.Lock()
        """Nothing is submitted after `_error` is set."""
        self._starts = asyncio.TaskGroup()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=section, daemon=True)
        self._thread.start()

    @abstractmethod
    def _new(self) -> Process:
        """Begins to start a process."""

    @abstractmethod
    def _first_order(self) -> object:
        """What a new process is to load."""

    @abstractmethod
    async def _use(self, process: Process, answer: JsonObject) -> None:
        """Takes a process into use, with its answer to that order; sets `_facts` if they are not
        known."""

    @abstractmethod
    def _in_use(self) -> list[Process]:
        """Those that are to be ended with the pool."""

    def facts(self) -> Facts:
        """What the code is; waits until a process has loaded it.

        Raises:
            UserError: it cannot be loaded.
            RunError: the processes cannot be started.
        """
        return self._facts.result()

    def submit(self, work: Coroutine[object, object, Result]) -> Future[Result]:
        """Runs a coroutine in the pool's event loop."""
        with self._lock:
            if self._error is None:
                return asyncio.run_coroutine_threadsafe(self._guarded(work), self._loop)
        work.close()
        refused: Future[Result] = Future()
        refused.set_exception(self._error)
        return refused

    def close(self) -> None:
        """Ends all processes; futures that are not done raise RunError."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join((2 + self._workers) * END_S)

    def __enter__(self) -> Self:
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
                raise RunError(f"{self._section}: the pool was closed")
        except ExceptionGroup as group:
            with self._lock:
                self._error = group.exceptions[0]
        if not self._facts.done():
            self._facts.set_exception(self._error)
        for _ in range(2):  # a submission from before becomes a task, and begins
            await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._in_use()))

    async def _guarded(self, work: Coroutine[object, object, Result]) -> Result:
        try:
            return await work
        except asyncio.CancelledError:
            raise self._error or RunError(f"{self._section}: cancelled") from None

    async def _start(self) -> None:
        """Starts a process and takes it into use once it has loaded the code."""
        try:
            process = self._new()
        except OSError as error:
            raise self._unstarted(error) from error
        try:
            await process.connect()
            process.order(self._first_order())
            answer = await process.hear(self.startup)
            if "refused" in answer:
                raise UserError(answer["refused"])
            if "ready" not in answer:
                raise no_answer(answer)
        except BaseException as error:
            process.kill()
            if not isinstance(error, Lost):
                raise
            raise self._unstarted(error) from error
        process.worker = answer["ready"]
        await self._use(process, answer)

    def _unstarted(self, error: BaseException) -> RunError:
        return RunError(f"{self._section}: the process for {self._names} did not start: {error}")

    def _replace(self) -> None:
        """Starts another process in place of one that was lost."""
        start = self._start()
        try:
            self._starts.create_task(start)
        except RuntimeError:  # the pool is ending
            start.close()
