"""Calls of the user's code (reward functions, environments) in processes that can be killed.

`UserCodePool.call` has a call answered. Every wait has a limit: a process that is late, ends, or
writes what is no answer is killed with all that it has started, and replaced; what it costs is the
call in whose name it was running, with the line where it was, and the others are sent again.
While the run is frozen no limit runs (`awake_clock`).
`process.user_process` is the other side. What the code prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NotRequired, Self, TypedDict, TypeVar, Unpack

from pydantic import BaseModel, TypeAdapter, ValidationError

from jaxrl.errors import RunError, StopTraining, UserError, short
from jaxrl.process.awake_clock import awake_clock
from jaxrl.process.child_python import program_paths, python_command, users_environment
from jaxrl.process.user_process import CELL, LENGTH, MOST_BYTES, Trouble, family, kill_family
from jaxrl.process.waiting import waiting

BOOT = "from jaxrl.process.user_process import main; main(*sys.argv[1:4], *map(int, sys.argv[4:]))"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators are the roles'."""
OURS = os.path.join("process", "user_process.py")
"""A stack is shown down to the user's last frame, above the first line with this."""
STACK_S = 0.5
"""Longest wait for the stack of a process that is late."""
STACK_BYTES, STACK_LINES = 1 << 14, 12
"""Limits of the part of it that is read, and shown."""
END_S = 1.0
"""Longest wait for a process that has nothing to do to end by itself."""
LOOK_S, LAST_LOOK_S = 0.25, 0.01
"""Seconds between two looks whether a process is late that has several calls, or only one."""
ASYNC_SLACK_S = 1.0
"""A process cancels an awaited call at its timeout; so much later the process is killed."""
MAX_PROCESSES = 256

Facts = TypeVar("Facts")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Why the user's code has no answer."""

    kind: Trouble
    """An `exception` comes with its traceback, or with how the process ended."""
    text: str
    killed: bool = False
    """Whether its process was lost with it."""


def too_many_failures(failures: Collection[Failure], who: str, of: str, limit: str) -> RunError:
    """Makes the error of more failures than `limit` allows, with the first one.

    Args:
        of: all that may fail, as in "8 completions".
    """
    late, first = sum(f.kind == "timeout" for f in failures), next(iter(failures))
    return RunError(
        f"{who} failed on {len(failures)} of {of} ({late} timeouts, {len(failures) - late}"
        f" exceptions or ended processes), more than {limit} allows; the first,"
        f" {first.kind}:\n{first.text}"
    )


class Lost(Exception):
    """A process was late or has ended, or wrote what is no answer."""

    def __init__(
        self, kind: Trouble, text: str, guilty: bool | None = None, late: SentCall | None = None
    ):
        super().__init__(text)
        self.kind: Trouble = kind
        self.guilty = guilty
        """Whether the call that raises this is to blame; None: nobody knows."""
        self.late = late
        """The call that it has begun and not answered in time."""


class NoAnswer(Lost):
    """A process wrote something that is no valid JSON answer."""

    def __init__(self, text: str):
        super().__init__("exception", f"it wrote something that is not an answer: {short(text)}")


class ProcessAnswer(BaseModel, extra="forbid"):
    """The shape of an answer; services have further ones."""

    order: int
    """Number of the call that is answered."""


class FailedAnswer(ProcessAnswer):
    failure: tuple[Trouble, str]
    """Of a `Failure`."""


class ReadyAnswer(ProcessAnswer, Generic[Facts]):
    """The first one: the user's code is loaded, in the process with the id `ready`."""

    ready: int
    facts: Facts


class RefusedAnswer(ProcessAnswer):
    refused: str
    """Why what was to be loaded, or done, is a mistake of the user's."""


class ImportsAnswer(ProcessAnswer):
    imports: Literal[True]
    """Something is imported before the user's code is called."""


class BegunAnswer(ProcessAnswer):
    begin: int
    """Number of the times that the user's code is called in this call."""
    awaits: bool = False
    """What it returned is awaited."""


class EndedAnswer(ProcessAnswer):
    ended: str
    """How the process ended, as the guard saw it; to no call."""


CommonAnswer = BegunAnswer | EndedAnswer | FailedAnswer | ImportsAnswer | RefusedAnswer
"""Those of every service."""


@dataclass(eq=False)
class SentCall:
    """A call that a process has, as the run sees it."""

    number: int
    fits: Callable[[Any], bool]
    """Returns whether an answer is one to this call."""
    limit: float
    """Seconds for the next thing that is heard of it."""
    since: float = field(default_factory=lambda: awake_clock().awake())
    """When it was sent, or something was last heard of it, on the clock of `awake`."""
    begun: int = 0
    """Times that the user's code was called for it."""
    done: asyncio.Future[Any] = field(default_factory=asyncio.Future)
    """The answer. Raises Lost, UserError where the process refuses, or StopTraining."""


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


class UserProcess:
    """A process that runs the user's code, for one event loop."""

    def __init__(self, service: str, section: str, shape: TypeAdapter[Any], limits: PoolLimits):
        self._timeout, self._startup = limits["timeout"], limits["startup"]
        self.worker: int | None = None  # id of the process that runs the code, under the guard
        self.killed = False
        self.limit: asyncio.Timeout | None = None
        """Of the wait for its next answer."""
        self.fresh = True
        """Whether it has never called the user's code."""
        self.heard = awake_clock().awake()
        self.calls: dict[int, SentCall] = {}
        """Those that are not over, by number."""
        self.overdue: tuple[SentCall | None, float] = None, 0.0
        """A call whose time is over, and until when its answer still counts."""
        self.looked = 0.0
        """When it was last asked which of its calls are late."""
        self.sessions: set[Hashable] = set()
        """What it holds between the calls, by key."""
        self.alone = False
        """Whether it gets no other call than the one that it has."""
        self._shape, self._number = shape, 0
        self._answers = asyncio.StreamReader(limit=MOST_BYTES)
        self._shared = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        self._shared.write(bytes(CELL))
        self._shared.flush()
        shared = self._shared.fileno()
        most = limits.get("max_processes", MAX_PROCESSES)
        numbers = [str(number) for number in (shared, os.getpid(), most)]
        self._guard = subprocess.Popen(
            python_command(BOOT, service, section, json.dumps(program_paths()), *numbers),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(shared,),
            env={**users_environment(), **ENVIRONMENT},
            start_new_session=True,
        )
        self._pipes: list[Any] = [self._guard.stdin, self._guard.stdout]

    async def connect(self) -> None:
        """Lets the event loop read and write its pipes."""
        loop = asyncio.get_running_loop()
        self._pipes[0], _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._guard.stdin)
        self._pipes[1], _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._answers), self._guard.stdout
        )

    def send(self, content: object, fits: Callable[[Any], bool]) -> SentCall:
        """Sends a call; the caller takes it from `calls` when it is over. One to a process that has
        ended raises Lost."""
        self._number += 1
        call = SentCall(self._number, fits, self._startup if self.fresh else self._timeout)
        call.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # was seen
        if self.killed:
            call.done.set_exception(Lost("exception", "its process is gone", guilty=False))
            return call
        self.calls[self._number] = call
        if len(self.calls) == 1 and self.limit is not None:  # which had none
            with suppress(RuntimeError):  # it is over, and the next wait will know
                self.limit.reschedule(_loop_time(self.first_late()[1]))
        pickled = pickle.dumps((self._number, content))
        self._pipes[0].write(len(pickled).to_bytes(LENGTH, "little") + pickled)
        return call

    async def answer(self) -> Any:
        """Returns the next answer to any call, in the shape of one. Raises Lost where the process
        has ended, or the user's code has written what is no answer."""
        noise = 0
        while noise <= MOST_BYTES:
            try:
                line = await self._answers.readline()
            except ValueError:  # a longer line than that
                break
            if not line.endswith(b"\n"):
                raise Lost("exception", f"its process is gone{self._stack()}")
            noise += len(line)
            try:
                answer = self._shape.validate_json(line, strict=True) if line != b"\n" else None
            except ValidationError:  # text, or a line that is like an answer
                found = None
                with suppress(ValueError, RecursionError):
                    found = json.loads(line)
                if isinstance(found, dict) and found.get("order") in range(1, self._number + 1):
                    raise NoAnswer(json.dumps(found)) from None
                continue
            if isinstance(answer, EndedAnswer):
                raise Lost("exception", f"its process {answer.ended}{self._stack()}")
            if answer is not None and 1 <= answer.order <= self._number:
                return answer
        raise Lost("exception", f"it wrote {MOST_BYTES} bytes that are not an answer")

    def running(self) -> SentCall | None:
        """Returns the call in whose name it is running, or was when it ended."""
        cell = os.pread(self._shared.fileno(), CELL, 0)
        return self.calls.get(int.from_bytes(cell, "little"))

    def first_late(self) -> tuple[SentCall | None, float | None]:
        """Returns the call whose time is over first, if there is one, and when that is, on the
        clock of `awake`. While one runs, others wait for it."""
        running = self.running()
        begun = [call for call in self.calls.values() if call.begun]
        calls = [running] if running is not None else begun or list(self.calls.values())
        ends = [(c.since if c.begun else max(c.since, self.heard)) + c.limit for c in calls]
        first = min(ends, default=None)
        return (None, None) if first is None else (calls[ends.index(first)], first)

    async def late(self, call: SentCall) -> Lost:
        """Returns the error of a call that is late, with the stack of the process."""
        seconds = min(call.limit, self._timeout) if call.begun else call.limit
        # A process that is none of its own may have the id that the user's code has written.
        if self.worker in [child.pid for child in family(self._guard.pid)]:
            with suppress(ProcessLookupError):
                os.kill(self.worker or 0, signal.SIGUSR1)
            end = time.monotonic() + STACK_S
            while not self.killed and time.monotonic() < end:
                if os.fstat(self._shared.fileno()).st_size > CELL:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the lines after the first
        text = f"no answer after {seconds:g} s{self._stack()}"
        return Lost("timeout", text, late=call if call.begun else None)

    def _stack(self) -> str:
        if self.killed:
            return ""
        lines = os.pread(self._shared.fileno(), STACK_BYTES, CELL).decode(errors="replace")
        shown = itertools.takewhile(lambda line: OURS not in line, lines.splitlines())
        return "".join(f"\n{line}" for line in list(shown)[:STACK_LINES] if line)

    async def end(self) -> None:
        """Lets a process that has nothing to do end by itself, and kills any other."""
        self._pipes[0].close()
        if not self.calls:
            with suppress(Lost, TimeoutError):
                async with asyncio.timeout(END_S):
                    while True:
                        await self.answer()
        self.kill()

    def kill(self) -> None:
        """Ends it, and all that it has started, at once."""
        self.killed = True
        kill_family(self._guard.pid)  # it is not reaped: the id is its own
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        for pipe in self._pipes:
            pipe.close()
        self._shared.close()


class UserCodePool(Generic[Facts]):
    """Some processes that have loaded the same code of the user's, kept by the event loop of a
    thread.

    What is submitted runs in that loop, and may await `call`. Once the pool is closed, or a process
    cannot be started, everything that is not done raises why.
    """

    most_sessions: int | None = None
    """That a process holds at once. None: any number, shared out among all once they have started.
    """

    def __init__(
        self,
        section: str,
        service: str,
        setup: object,
        names: str,
        shape: TypeAdapter[Any],
        **limits: Unpack[PoolLimits],
    ) -> None:
        """Starts the processes and does not wait for them; the last step of a subclass's own.

        Args:
            section: of the config, for messages.
            service: module with `load`, as `user_process.main` needs it.
            setup: what `load` gets.
            names: what the processes load, for messages.
            shape: of an answer, `ReadyAnswer` and `CommonAnswer` among them.
        """
        self.lost = 0
        """Processes that were late or ended at work, and are replaced."""
        self.processes: list[UserProcess] = []
        """Those that have loaded the code."""
        self._limits, self._kind = limits, (service, section, shape, limits)
        self._setup, self._section, self._names = setup, f"{section}s", names
        self._workers = limits["workers"]
        self._started = False
        self._to_start = self._workers
        """Of the first processes, those that are not ready."""
        self._holders: dict[Hashable, UserProcess] = {}
        """By session."""
        self._suspects = 0
        """Calls that wait for a process of their own, since any of them may have cost one."""
        self._changed = asyncio.Event()
        """A pulse: a process may take other calls."""
        self._facts: Future[Facts] = Future()
        self._error: Exception | None = None
        """Why the pool has ended."""
        self.stop: StopTraining | None = None
        """What its code raised first, if it did; every later `call` raises it again."""
        self._lock = threading.Lock()
        """Nothing is submitted after `_error` is set."""
        self._starts = asyncio.TaskGroup()
        self._closing = asyncio.Event()
        self._loop = asyncio.new_event_loop()

        def serve() -> None:
            self._loop.run_until_complete(self._serve())
            self._loop.close()

        self._thread = threading.Thread(target=serve, name=section, daemon=True)
        self._thread.start()

    async def call(
        self,
        session: Hashable,
        content: Callable[[bool], tuple[Any, ...]],
        fits: Callable[[Any], bool],
    ) -> Any | Failure:
        """Has a call answered by the process that holds its session, and again by another where it
        lost that through no fault of its own. Raises StopTraining once the code has, in whichever
        call.

        Args:
            content: gets whether the process holds the session already.
            fits: as of `SentCall`.
        """
        suspect = False
        while True:
            if self.stop is not None:
                raise self.stop
            before = self._holders.get(session)
            process = await self.hold(session, alone=suspect)
            try:
                return await self.send(process, content(process is before), fits)
            except StopTraining as stop:
                self.stop = self.stop or stop
                raise
            except Lost as lost:
                if lost.guilty:
                    return Failure(lost.kind, str(lost), killed=True)
                suspect |= lost.guilty is None
            finally:
                if suspect or self._suspects:
                    process.alone = False
                    self._pulse()

    async def send(
        self, process: UserProcess, content: tuple[Any, ...], fits: Callable[[Any], bool]
    ) -> Any | Failure:
        """Returns the answer of one process; raises Lost."""
        call = process.send(content, fits)
        try:
            return await call.done
        except asyncio.CancelledError:
            if [*process.calls] == [call.number]:  # it may still be at work, for nobody
                self.discard(process)
            raise
        finally:
            process.calls.pop(call.number, None)

    async def hold(self, session: Hashable, alone: bool = False) -> UserProcess:
        """Waits for the process that holds a session or, where none does, for the one that holds
        the fewest, which then holds it. A suspect call gets it alone, to be to blame if it is lost.
        """

        def free() -> list[UserProcess]:
            holder, most = self._holders.get(session), self.most_sessions
            if holder is not None and not holder.killed:
                usable = [holder]
            elif len(self.processes) < self._workers if alone else most is None and self._to_start:
                usable = []  # others come, of which none holds a session
            elif alone or most is None:
                usable = self.processes
            else:
                usable = [process for process in self.processes if len(process.sessions) < most]
            if alone:
                return [process for process in usable if not process.calls]
            return [process for process in usable if not process.alone and not self._suspects]

        self._suspects += alone
        try:
            while not (processes := free()):
                await self._changed.wait()
        finally:
            self._suspects -= alone
            if alone and not self._suspects:  # others go on beside it
                self._pulse()
        process = min(processes, key=lambda process: len(process.sessions))
        self._holders[session], process.alone = process, alone
        process.sessions.add(session)
        return process

    def leave(self, session: Hashable) -> UserProcess | None:
        """Forgets a session; returns the process that holds it."""
        process = self._holders.pop(session, None)
        if process is None or process.killed:
            return None
        process.sessions.discard(session)
        self._pulse()
        return process

    def _pulse(self) -> None:
        self._changed.set()
        self._changed.clear()

    def facts(self) -> Facts:
        """Describes the code; waits until a process has loaded it.

        Raises:
            UserError: it cannot be loaded.
            RunError: the processes cannot be started.
        """
        what = f"{self._section}: the process that loads {self._names}"
        with waiting(what, most=self._limits["startup"]):
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

    async def _serve(self) -> None:
        try:
            async with self._starts:
                for _ in range(self._workers):
                    self._starts.create_task(self._keep_one())
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
        await asyncio.gather(*(process.end() for process in self.processes))

    async def _guarded(self, work: Coroutine[object, object, Result]) -> Result:
        try:
            return await work
        except asyncio.CancelledError:
            raise self._error or RunError(f"{self._section}: cancelled") from None

    async def _keep_one(self) -> None:
        """Starts a process and takes its answers until it is lost, and then another one."""
        while True:
            process = await self._start()
            self.processes.append(process)
            self._to_start = max(self._to_start - 1, 0)
            self._pulse()
            try:
                while not process.killed:
                    self._take(process, await self._answer(process))
            except Lost as lost:
                self._lose(process, lost)

    async def _answer(self, process: UserProcess) -> Any:
        """Returns the next answer of a process; raises Lost, also where a call of it is late."""
        while True:
            if process.killed:  # nobody waits for its calls any more
                raise Lost("exception", "its process is gone", guilty=False)
            now, (overdue, until) = awake_clock().awake(), process.overdue
            end: float | None = process.looked + LAST_LOOK_S
            if now >= process.looked + LAST_LOOK_S:  # answers to many calls come faster
                process.looked, (late, end) = now, process.first_late()
                if late is None or end is None or end > now:
                    process.overdue = None, 0.0
                elif late is not overdue:  # what has arrived by now still counts
                    end = now + (LOOK_S if len(process.calls) > 1 else LAST_LOOK_S)
                    process.overdue = late, end
                elif now < until:
                    end = until
                else:
                    raise await process.late(late)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(_loop_time(end)) as process.limit:
                    return await process.answer()

    async def _start(self) -> UserProcess:
        process, limits = None, self._limits
        try:
            process = UserProcess(*self._kind)
            await process.connect()
            first, self._started = not self._started, True
            content = self._setup, first, limits["timeout"], limits.get("memory_mb")
            process.send(content, lambda answer: True)
            answer = await self._answer(process)
            if isinstance(answer, RefusedAnswer):
                raise UserError(answer.refused)
            if not isinstance(answer, ReadyAnswer):
                raise NoAnswer(answer.model_dump_json())
        except BaseException as error:
            if process is not None:
                process.kill()
            if not isinstance(error, Lost | OSError):
                raise
            why = f"{self._section}: the process for {self._names} did not start: {error}"
            raise RunError(why) from error
        process.worker = answer.ready
        process.calls.clear()
        if answer.facts is not None and not self._facts.done():
            self._facts.set_result(answer.facts)
        return process

    def _take(self, process: UserProcess, answer: Any) -> None:
        """Hands an answer to its call; raises NoAnswer where it is none to that."""
        call = process.calls.get(answer.order)
        if call is None or call.done.done():
            return
        process.heard = call.since = awake_clock().awake()
        match answer:
            case RefusedAnswer():
                call.done.set_exception(UserError(answer.refused))
            case ImportsAnswer() if not call.begun:
                call.limit = self._limits["startup"]
            case BegunAnswer() if answer.begin == call.begun + (not answer.awaits):
                call.begun, process.fresh = answer.begin, False
                call.limit = self._limits["timeout"] + ASYNC_SLACK_S * answer.awaits
            case FailedAnswer(failure=("stop", text)) if call.begun:
                call.done.set_exception(StopTraining(text))
            case FailedAnswer() if call.begun:
                call.done.set_result(Failure(*answer.failure))
            case _ if call.begun and call.fits(answer):
                call.done.set_result(answer)
            case _:
                raise NoAnswer(answer.model_dump_json(exclude_unset=True))

    def _lose(self, process: UserProcess, lost: Lost) -> None:
        """Kills a process, and tells its calls who is to blame: the one in whose name it was
        running, or that was late, or the only one that it had, unless an earlier one can have
        broken it."""
        if process.killed:
            return
        calls = list(process.calls.values())
        guilty = process.running() or lost.late
        if isinstance(lost, NoAnswer) and len(calls) > 1:  # any of them may have written it
            guilty = None
        if guilty is None and len(calls) == 1 and (process.alone or self.most_sessions == 1):
            guilty = calls[0] if calls[0].begun or process.fresh else None
        self.discard(process)
        self.lost += 1
        for call in calls:
            if not call.done.done():
                known = call is guilty if guilty is not None else None
                call.done.set_exception(Lost(lost.kind, str(lost), known))
        process.calls.clear()

    def discard(self, process: UserProcess) -> None:
        """Kills a process that may still be at work for nobody; another one takes its place."""
        process.kill()
        self.processes.remove(process)


def _loop_time(end: float | None) -> float | None:
    """Returns when a moment on the clock of `awake` comes at the earliest, on that of the running
    event loop, which goes on while the process is frozen."""
    return None if end is None else asyncio.get_running_loop().time() + end - awake_clock().awake()
