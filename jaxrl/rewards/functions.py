"""Reward functions by their names: found and checked in the run, loaded and called in a process.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`, sync or async. It
gets keyword arguments: `prompts` and `completions`, lists of text, and of the columns those that
its signature names (`**columns` takes all), each as a list as long as `completions`. It returns a
number for each completion, None where it cannot judge; or a pair of that and a message about the
completion, for a teacher that gets feedback. What a completion gets must not depend on the others
in its list.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from types import MappingProxyType
from typing import Any, BinaryIO, Literal, TypeGuard

from jaxrl.data import arithmetic
from jaxrl.errors import UserError, near, shown
from jaxrl.process.guard import Say, TooLong, limit_memory, sayer
from jaxrl.process.plain import JsonObject, finite
from jaxrl.process.plugin import is_plugin, load_located, locate, traceback_below
from jaxrl.rewards.items import Item, ItemSource, Signature
from jaxrl.rewards.verifiers import VERIFIERS

_read = pickle.load  # whatever the user's code puts in its place
KEY = "reward.functions"
SHAPE = "f(prompts, completions, **columns)"
PLAIN = (*VERIFIERS, "format")
"""What is named by one word."""
FORMAT = re.compile(
    r"\s*(?:<think>)?(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)


def find(text: str, given: Mapping[str, bytes] = MappingProxyType({})) -> ItemSource:
    """The source that one entry of `reward.functions` names; its code is not run.

    Args:
        given: functions from Python, pickled, by their entries.

    Raises:
        UserError: it names nothing.
    """
    if text in PLAIN:
        return ItemSource(text, text, "format" if text == "format" else "verifier")
    scheme, _, rest = text.partition(":")
    if scheme == "regex" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise UserError(f"{KEY}: {text}: not a regular expression: {error}") from error
        return ItemSource(text, "regex", "regex", rest)
    if scheme == "python" and rest:
        name = rest.partition("@")[0]
        if text not in given:
            raise UserError(
                f"{KEY}: {text} is a function of a Python program: give it from there, as in"
                f" train(config, rewards=[{name}])"
            )
        return ItemSource(text, name, "python", code=given[text])
    if not is_plugin(text):
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, PLAIN)}: it is path/to/file.py:function,"
            f" package.module:function, regex:PATTERN or one of {', '.join(sorted(PLAIN))}"
        )
    place, name, digest = locate(text, KEY, "function")
    option: Literal["file", "module"] = "file" if digest else "module"
    return ItemSource(text, name, option, place, digest)


def think_format(completion: str) -> float:
    """1 where the completion is `<think>...</think><answer>...</answer>` and nothing else.

    Each tag stands once, white space between and around them aside; `<think>` may be missing, for
    some chat templates end with it.
    """
    return float(FORMAT.fullmatch(completion) is not None)


def serve(orders: BinaryIO, answers: int) -> None:
    """What a process that runs reward functions does, under `process.guard`: answers orders until
    there are no more (EOFError).

    The content of the first is (sources, seconds for an awaited call, megabytes of memory or None),
    that of each other one (index of the function, items).
    """
    number, (sources, timeout, memory_mb) = _read(orders)
    say = sayer(answers, number)
    limit_memory(memory_mb)
    try:
        functions = [Function(source, memory_mb) for source in sources]
    except UserError as error:
        say({"refused": str(error)})
        return
    say({"ready": os.getpid(), "signatures": [asdict(f.signature) for f in functions]})
    while True:
        number, (index, items) = _read(orders)
        # An awaited call that outlives its order must not speak for the next one.
        say = sayer(answers, number)
        try:
            if functions[index].imports(items):
                say({"imports": True})
                importlib.import_module("reasoning_gym")
            say({"begin": True})
            functions[index].run(items, timeout, say)
        except UserError as error:  # a result that is none
            say({"refused": str(error)})


class Function:
    """A loaded reward function."""

    def __init__(self, source: ItemSource, memory_mb: int | None = None):
        """
        Args:
            memory_mb: the limit of this process, for messages.

        Raises:
            UserError: it cannot be imported, is not there, or cannot be called as one.
        """
        self.source = source
        self._limit = f" (reward.memory_mb={memory_mb} is the limit)" if memory_mb else ""
        if source.option in ("file", "module", "python"):
            call = _load(source)
            self.signature = _signature(source, call)
            self._call = lambda items: call(**self._arguments(items))
        else:
            judge = _judge_of(source)
            self.signature = Signature("each")
            self._call = lambda items: [judge(item) for item in items]

    def imports(self, items: Sequence[Item]) -> bool:
        """Whether judging them would import reasoning_gym first: no completion's time is spent on
        that."""
        tasks = (str(item.columns.get("task", "")) for item in items)
        judges = self.source.text in ("auto", "reasoning_gym")
        asked = judges and any(task.startswith("reasoning_gym/") for task in tasks)
        return asked and "reasoning_gym" not in sys.modules

    def run(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        """Judges all items and sends what it found of each, or of several at once.

        Args:
            timeout: seconds for each item of an async function. The others are watched from
                outside, for nothing in this process can end them.

        Raises:
            UserError: a function returned what is no reward.
        """
        if self.signature.kind == "async":
            _runner().run(self._await_all(items, timeout, say))
            return
        size = 1 if self.signature.kind == "each" else max(len(items), 1)
        for start in range(0, len(items), size):
            part = items[start : start + size]
            indices = list(range(start, start + len(part)))
            try:
                result = self._call(part)
            except BaseException as error:
                say({"items": indices, **self._failure(error)})
            else:
                self._say_found(say, indices, result)

    async def _await_all(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        async def judge(index: int, item: Item) -> None:
            try:
                async with asyncio.timeout(timeout) as limit:
                    result = await self._call([item])
            except BaseException as error:
                say({"items": [index], **self._failure(error, late=limit.expired())})
            else:
                self._say_found(say, [index], result)

        await asyncio.gather(*(judge(index, item) for index, item in enumerate(items)))

    def _say_found(self, say: Say, indices: list[int], result: object) -> None:
        try:
            say({"items": indices, **self._found(result, len(indices))})
        except TooLong as error:
            text = f"{self.source.text} returned {error}: let its messages be shorter"
            say({"items": indices, "failure": ("exception", text)})

    def _failure(self, error: BaseException, late: bool = False) -> JsonObject:
        """A user's mistake by its text, any other exception with its traceback."""
        if late:
            return {"failure": ("timeout", "the awaited call was cancelled")}
        if isinstance(error, UserError):
            return {"failure": ("user", str(error))}
        hint = self._limit if isinstance(error, MemoryError) else ""
        return {"failure": ("exception", traceback_below(error, __file__) + hint)}

    def _arguments(self, items: Sequence[Item]) -> dict[str, list[object]]:
        """Keyword arguments; a column that a row lacks is None there."""
        rows = [
            {**i.columns, "answer": i.answer, "prompts": i.prompt, "completions": i.completion}
            for i in items
        ]
        s = self.signature
        present = dict.fromkeys(name for row in rows for name in row)
        names = dict.fromkeys([*s.needs, *(n for n in present if s.takes_all or n in s.takes)])
        return {name: [row.get(name) for row in rows] for name in names}

    def _found(self, result: Any, n: int) -> JsonObject:
        """The checked result of a call with `n` completions: numbers and, where there are any,
        messages."""
        name = f"{KEY}: {self.source.text}"
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
            raise UserError(
                f"{name} returned {shown(result)} for {n} completions: it must return a list with"
                " a number or None for each"
            )
        if len(result) != n:
            raise UserError(
                f"{name} returned {len(result)} numbers for {n} completions: it must return one"
                " number or None for each"
            )
        pairs = [value if _is_pair(value) else (value, "") for value in result]
        found: JsonObject = {"values": [_number(name, value) for value, _ in pairs]}
        messages = [message for _, message in pairs]
        return found | ({"messages": messages} if any(messages) else {})


def _is_pair(value: object) -> TypeGuard[tuple[object, str]]:
    """Whether this is a score with a message."""
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str)


def _number(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = finite(value)
    if number is None:
        raise UserError(
            f"{name} returned {shown(value)} for a completion: it must be a finite number, or None"
            " where the function cannot judge"
        )
    return number


@cache
def _runner() -> asyncio.Runner:
    """One event loop for the life of the process: clients and locks that a function keeps stay
    usable from call to call."""
    return asyncio.Runner()


def _judge_of(source: ItemSource) -> Callable[[Item], object]:
    """What comes with jaxrl; of sums it also says what is wrong."""
    if source.option == "format":
        return lambda item: think_format(item.completion)
    if source.option == "regex":
        pattern = re.compile(source.place)
        return lambda item: float(pattern.search(item.completion) is not None)
    if source.text == "math":
        VERIFIERS["math"]("0", Item("", "", "0", {}))  # imports, or names what is missing
    verifier = VERIFIERS[source.text]

    def judged(item: Item) -> object:
        score = verifier(item.opening + item.completion, item)
        task = item.columns.get("task") if source.text == "auto" else source.text
        if task != "arithmetic":
            return score
        return score, arithmetic.correction(item.prompt, item.completion)

    return judged


def _load(source: ItemSource) -> Callable[..., Any]:
    """The callable in a file or module, or that was pickled."""
    if source.option == "python":
        try:
            return pickle.loads(source.code)
        except BaseException as error:
            raise UserError(
                f"{KEY}: {source.text} cannot be loaded in a process of its own:"
                f" {type(error).__name__}: {error}; write it in a file, and name it"
                " path.py:function"
            ) from error
    found = load_located(KEY, source.place, source.name, source.digest, "function")
    if inspect.isclass(found) or not callable(found):
        raise UserError(
            f"{KEY}: {source.text} is a {'class' if inspect.isclass(found) else type(found)},"
            f" it must be a function {SHAPE}"
        )
    return found


def _signature(source: ItemSource, call: Callable[..., object]) -> Signature:
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError) as error:
        raise UserError(f"{KEY}: {source.text} has no signature: write {SHAPE}") from error
    kinds, every = inspect.Parameter, signature.parameters.values()
    fixed = [p.name for p in every if p.kind == kinds.POSITIONAL_ONLY]
    if "completions" not in signature.parameters or fixed:
        why = f"{fixed[0]} cannot be named" if fixed else "it has no parameter `completions`"
        raise UserError(f"{KEY}: {source.text}: {source.name}{signature}: {why}; write {SHAPE}")
    named = [p for p in every if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    takes = {"prompts", "completions", *(p.name for p in named if p.default is not kinds.empty)}
    waits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 (an object that is called like a function)
    )
    return Signature(
        "async" if waits else "batch",
        needs=[p.name for p in named if p.name not in takes],
        takes=[p.name for p in named if p.name in takes],
        takes_all=any(p.kind == kinds.VAR_KEYWORD for p in every),
    )
