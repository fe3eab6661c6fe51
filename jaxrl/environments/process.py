"""What a process that runs environments does; `process.guard` has the rest of it.

It holds the live instances of many episodes. Those whose methods are `async def` run at the same
time; others one after the other, and nothing else meanwhile. A cell of memory that it shares with
the run always has the number of the order in whose name it is running, so that the run knows which
episode to blame for a process that hangs or ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import mmap
import os
import pickle
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, BinaryIO, Literal, TypeVar

from jaxrl.data.example import JsonObject, Message
from jaxrl.environments.environment import Environment, Unavailable
from jaxrl.environments.observation import Observation, first_messages, observed
from jaxrl.environments.source import KEY, EnvironmentSource, facts_of, load
from jaxrl.errors import UserError, short, shown
from jaxrl.process.guard import Say, TooLong, limit_memory, sayer
from jaxrl.process.plugin import traceback_below

_read = pickle.load  # whatever the user's code puts in its place
LONGEST_REASON = 10_000
"""Characters that are told of why an environment cannot be loaded, or has no answer."""
CELL = 8
"""Bytes of the shared cell: an order's number, little endian; 0: none is running."""
T = TypeVar("T")
Prompted = tuple[Message, ...] | str
Content = tuple[str, Hashable, *tuple[Any, ...]]
"""Of an order: its kind, the key of its episode, and what it needs (`serve`)."""
_ORDER: contextvars.ContextVar[int] = contextvars.ContextVar("order")


@dataclass
class Session:
    """One episode, as the run sees it; also what is needed to make its instance again."""

    key: Hashable
    row: JsonObject
    first: Prompted | None = None
    """The prompt that its `reset` returned; None: it was not asked for one."""
    turns: list[tuple[str, Observation]] = field(default_factory=list)
    """The model's turns and their answers."""
    strict: bool = True
    """Whether an instance that is made again must give the same answers again; else these
    count."""


@dataclass
class _Live:
    environment: Environment
    messages: list[Message]


class _Failed(Exception):
    """An environment has no answer."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str):
        super().__init__(text)
        self.kind = kind


def serve(orders: BinaryIO, answers: int, cell: int) -> None:
    """Answers orders until there are no more.

    The content of the first is (source, seconds for a call, megabytes of memory or None, whether to
    say what it is), that of each other one is a tuple that begins with its kind and the key of
    its episode: ("begin", key, row), ("step", key, `Session` of an instance to make again or None,
    text), ("end", key).
    """
    number, (source, timeout, memory_mb, describe) = _read(orders)
    say = sayer(answers, number)
    limit_memory(memory_mb)
    facts = None
    try:
        kind = load(source)
        # A process that comes later lets its episodes fail, should a server be away by then.
        with nullcontext() if describe else suppress(UserError):
            facts = facts_of(source, kind, describe)
    except UserError as error:
        say({"refused": short(str(error), LONGEST_REASON)})
        return
    try:
        say({"ready": os.getpid(), "facts": asdict(facts) if describe and facts else None})
    except TooLong as error:
        assert facts is not None
        what = f"the schemas of its tools ({len(facts.tools)}) are {error}"
        hint = "let it offer fewer, or describe them in fewer words"
        say({"refused": f"{KEY}: {source.text}: {what}: {hint}"})
        return
    asyncio.run(_Host(source, kind, timeout, memory_mb, answers, cell).run(orders))


class _Host:
    """The live instances, and the orders that are being answered."""

    def __init__(
        self,
        source: EnvironmentSource,
        kind: type[Environment],
        timeout: float,
        memory_mb: int | None,
        answers: int,
        cell: int,
    ):
        self._source, self._kind, self._timeout, self._answers = source, kind, timeout, answers
        self._limit = f" (environment.memory_mb={memory_mb} is the limit)" if memory_mb else ""
        self._live: dict[Hashable, _Live] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._cell = mmap.mmap(cell, CELL)

    async def run(self, orders: BinaryIO) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_task_factory(self._task)

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._take, *_read(orders))
            except EOFError:
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        os._exit(0)  # what still waits is of no use to anybody

    def _take(self, number: int, content: Content) -> None:
        context = contextvars.copy_context()
        context.run(_ORDER.set, number)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._answer(number, *content), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        return asyncio.Task(_awaited(self._marked(coroutine)), loop=loop, **options)

    @types.coroutine
    def _marked(self, coroutine: Coroutine[object, object, T]) -> Generator[object, object, T]:
        """Runs a coroutine; while it does not wait, the cell has the number of its order."""
        go: Callable[..., object] = coroutine.send
        value: object = None
        while True:
            self._cell[:] = _ORDER.get(0).to_bytes(CELL, "little")
            try:
                waits_for = go(value)
            except StopIteration as end:
                return end.value
            finally:
                self._cell[:] = bytes(CELL)
            try:
                value = yield waits_for
                go = coroutine.send
            except BaseException as error:
                go, value = coroutine.throw, error

    async def _answer(self, number: int, kind: str, key: Hashable, *rest: Any) -> None:
        say = sayer(self._answers, number)
        try:
            if kind == "begin":
                (row,) = rest
                first, self._live[key] = await self._begun(say, row)
                say({"first": first})
            elif kind == "step":
                say({"answer": asdict(await self._step(say, key, *rest))})
            else:
                await self._end(say, key)
                say({"closed": True})
        except _Failed as failed:
            say({"failure": [failed.kind, short(str(failed), LONGEST_REASON)]})
        except TooLong as error:
            method = "reset" if kind == "begin" else "step"
            text = f"{self._source.text}: what `{method}` returned is {error}"
            say({"failure": ["exception", text]})

    async def _step(self, say: Say, key: Hashable, past: Session | None, text: str) -> Observation:
        if past is not None:
            self._live[key] = await self._again(say, past)
        return await self._stepped(say, self._live[key], text)

    async def _again(self, say: Say, past: Session) -> _Live:
        """The instance of an episode that another process had."""
        first, live = await self._begun(say, past.row)
        if past.first is not None and first != past.first:
            if past.strict:
                raise self._differs("its prompt", past.first, first)
            live.messages = _as_messages(past.first)
        for number, (text, before) in enumerate(past.turns):
            heard = len(live.messages)
            now = await self._stepped(say, live, text)
            if now == before:
                continue
            if past.strict:
                raise self._differs(f"turn {number + 1}", before, now)
            live.messages[heard + 1 :] = before.messages
        return live

    async def _begun(self, say: Say, row: JsonObject) -> tuple[Prompted, _Live]:
        environment = await self._call(say, partial(self._kind, **self._source.arguments))
        environment.row = row
        first = await self._call(say, environment.reset, row)
        if type(environment).reset is not Environment.reset:
            first = self._checked(first_messages, first)
        elif not isinstance(first, str):
            first = tuple(dict(message) for message in first)
        return first, _Live(environment, _as_messages(first))

    async def _stepped(self, say: Say, live: _Live, text: str) -> Observation:
        before = [dict(message) for message in live.messages]
        result = await self._call(say, live.environment.step, text, before)
        observation = self._checked(observed, result)
        live.messages += [{"role": "assistant", "content": text}, *observation.messages]
        return observation

    async def _end(self, say: Say, key: Hashable) -> None:
        """Closes an instance. The episode is over: what goes wrong is printed, and no failure."""
        live = self._live.pop(key, None)
        if live is not None:
            try:
                await self._call(say, live.environment.close)
            except _Failed as failed:
                traceback.print_exception(failed)

    async def _call(self, say: Say, function: Callable[..., object], *given: object) -> Any:
        say({"begin": True})
        limit = None
        try:
            with nullcontext() if inspect.iscoroutinefunction(function) else _without_loop():
                result = function(*given)
            if inspect.isawaitable(result):
                say({"awaits": True})
                async with asyncio.timeout(self._timeout) as limit:
                    result = await result
        except BaseException as error:
            if limit is not None and limit.expired():
                raise _Failed(
                    "timeout",
                    f"no answer after {self._timeout:g} s; the awaited call was cancelled",
                ) from None
            if isinstance(error, Unavailable):
                raise _Failed("exception", str(error)) from None
            hint = self._limit if isinstance(error, MemoryError) else ""
            raise _Failed("exception", traceback_below(error, __file__) + hint) from None
        return result

    def _checked(self, check: Callable[[object], T], result: object) -> T:
        try:
            return check(result)
        except UserError as error:
            raise _Failed("exception", f"{self._source.text}: {error}") from None
        except BaseException as error:  # of the user's classes, such as a generator of messages
            raise _Failed("exception", traceback_below(error, __file__)) from None

    def _differs(self, what: str, before: object, now: object) -> _Failed:
        return _Failed(
            "exception",
            f"{self._source.text} is not deterministic: its process was lost, and made again it"
            f" gave {what} as {shown(now)}, before that as {shown(before)}; let all random numbers"
            " come from a seed in the row",
        )


@contextmanager
def _without_loop() -> Iterator[None]:
    """For code that is not `async def`, which may call `asyncio.run`."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


async def _awaited(waits: Awaitable[T]) -> T:
    return await waits


def _as_messages(first: Prompted) -> list[Message]:
    return [{"role": "user", "content": first}] if isinstance(first, str) else list(first)
