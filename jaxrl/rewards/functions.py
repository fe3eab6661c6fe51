"""Reward functions by their names: found and checked in the run, loaded and called in a process.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`, sync or async. It
gets keyword arguments: `prompts` and `completions`, lists of text, and of the columns those that
its signature names (`**columns` takes all), each as a list as long as `completions`. It returns a
number for each completion, None where it cannot judge. What a completion gets must not depend on
the others in its list.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import logging
import math
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from jaxrl.errors import UserError, near
from jaxrl.rewards.items import Item, Signature, Source
from jaxrl.rewards.verifiers import VERIFIERS

KEY = "reward.functions"
SHAPE = "f(prompts, completions, **columns)"
PLAIN = (*VERIFIERS, "format")
"""What is named by one word."""
FORMAT = re.compile(
    r"\s*(?:<think>)?(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*",
    re.DOTALL,
)
LONGEST_TRACEBACK = 4000
"""Characters of a traceback that are kept: its last ones."""

Say = Callable[[dict[str, Any]], None]
"""Sends a message about some items of a call to the run."""


def find(text: str, given: Mapping[str, bytes] = MappingProxyType({})) -> Source:
    """The source that one entry of `reward.functions` names; its code is not run.

    Args:
        given: functions from Python, pickled, by their entries.

    Raises:
        UserError: it names nothing.
    """
    if text in PLAIN:
        return Source(text, text, "format" if text == "format" else "verifier")
    place, colon, attribute = text.partition(":")
    if place == "regex" and colon:
        return _regex(text, attribute)
    if place == "python" and colon:
        return _given(text, attribute, given)
    place, colon, attribute = text.rpartition(":")
    if not colon:
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, PLAIN)}: it is path/to/file.py:function,"
            f" package.module:function, regex:PATTERN or one of {', '.join(sorted(PLAIN))}"
        )
    if not place or not attribute.isidentifier():
        raise UserError(f"{KEY}: {text!r} must be path/to/file.py:function or module:function")
    if place.endswith(".py") or "/" in place:
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise UserError(
                f"{KEY}: {text}: there is no file {path} (a relative path is one from the folder of"
                " the config file that names it, or from the working directory)"
            )
        return Source(text, attribute, "file", str(path), attribute, _digest(path))
    if not all(part.isidentifier() for part in place.split(".")):
        raise UserError(f"{KEY}: {text}: {place!r} is neither a .py file nor the name of a module")
    return Source(text, attribute, "module", place, attribute)


def _regex(text: str, pattern: str) -> Source:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"{KEY}: {text}: not a regular expression: {error}") from error
    return Source(text, "regex", "regex", pattern)


def _given(text: str, name: str, given: Mapping[str, bytes]) -> Source:
    if text not in given:
        raise UserError(
            f"{KEY}: {text} is a function of a Python program: give it from there, as in"
            f" train(config, rewards=[{name.partition('@')[0]}])"
        )
    name = name.partition("@")[0]
    return Source(text, name, "python", attribute=name, code=given[text])


def think_format(completion: str) -> float:
    """1 where the completion is `<think>...</think><answer>...</answer>` and nothing else.

    Each tag stands once, white space between and around them aside; `<think>` may be missing, for
    some chat templates end with it.
    """
    return float(FORMAT.fullmatch(completion) is not None)


class Function:
    """A loaded reward function."""

    def __init__(self, source: Source, memory_mb: int | None = None):
        """
        Args:
            memory_mb: the limit of this process, for messages.

        Raises:
            UserError: it cannot be imported, is not there, or cannot be called as one.
        """
        self.source = source
        self._limit = f" (reward.memory_mb={memory_mb} is the limit)" if memory_mb else ""
        if source.option in ("file", "module", "python"):
            self._call = _import(source)
            self.signature = _signature(source, self._call)
        else:
            self._judge = _judge_of(source)
            self.signature = Signature("each")

    def prepare(self, items: Sequence[Item]) -> None:
        """Imports what the first call would import: no completion's time is spent on it."""
        tasks = (str(item.columns.get("task", "")) for item in items)
        judges = self.source.text in ("auto", "reasoning_gym")
        if judges and any(task.startswith("reasoning_gym/") for task in tasks):
            importlib.import_module("reasoning_gym")

    def run(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        """Judges all items and tells of each, or of several at once.

        Args:
            timeout: seconds for each item of an async function. The others are watched from
                outside, for nothing in this process can end them.
        """
        run = {"each": self._run_each, "batch": self._run_batch, "async": self._run_async}
        run[self.signature.kind](items, timeout, say)

    def _run_each(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        for index, item in enumerate(items):
            try:
                value = self._judge(item.completion, item)
            except BaseException as error:
                say({"items": [index], **self._failure(error)})
            else:
                say({"items": [index], "values": [value]})

    def _run_batch(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        everyone = list(range(len(items)))
        try:
            result = self._call(**self._arguments(items))
        except BaseException as error:
            say({"items": everyone, **self._failure(error)})
        else:
            say({"items": everyone, "values": self._numbers(result, len(items))})

    def _run_async(self, items: Sequence[Item], timeout: float, say: Say) -> None:
        async def judge(index: int, item: Item) -> None:
            try:
                async with asyncio.timeout(timeout) as limit:
                    result = await self._call(**self._arguments([item]))
            except BaseException as error:
                late = {"late": "the awaited call was cancelled"} if limit.expired() else None
                say({"items": [index], **(late or self._failure(error))})
            else:
                say({"items": [index], "values": self._numbers(result, 1)})

        async def judge_all() -> None:
            await asyncio.gather(*(judge(index, item) for index, item in enumerate(items)))

        _runner().run(judge_all())

    def _failure(self, error: BaseException) -> dict[str, Any]:
        limit = self._limit if isinstance(error, MemoryError) else ""
        return told(error, limit)

    def _arguments(self, items: Sequence[Item]) -> dict[str, list[Any]]:
        """Keyword arguments; a column that a row lacks is None there."""
        known = [{**item.columns, "answer": item.answer} for item in items]
        s = self.signature
        there = dict.fromkeys(name for row in known for name in row)
        wanted = list(there) if s.takes_all else [name for name in s.takes if name in there]
        names = dict.fromkeys((*s.needs, *wanted))
        columns = {name: [row.get(name) for row in known] for name in names}
        given = {
            "prompts": [item.prompt for item in items],
            "completions": [item.completion for item in items],
        }
        asked = inspect.signature(self._call).parameters
        return columns | {k: v for k, v in given.items() if s.takes_all or k in asked}

    def _numbers(self, result: Any, n: int) -> list[float | None]:
        """The checked result of a call with `n` completions."""
        name = f"{KEY}: {self.source.text}"
        if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
            raise UserError(
                f"{name} returned {_shown(result)} for {n} completions: it must return a list with"
                " a number or None for each"
            )
        if len(result) != n:
            raise UserError(
                f"{name} returned {len(result)} numbers for {n} completions: it must return one"
                " number or None for each"
            )
        return [_number(name, value) for value in result]


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):  # an array of several numbers, or a huge whole
        number = math.nan
    if not math.isfinite(number):
        raise UserError(
            f"{name} returned {_shown(value)} for a completion: it must be a finite number, or None"
            " where the function cannot judge"
        )
    return number


def told(error: BaseException, hint: str = "") -> dict[str, Any]:
    """What is told of an exception: a user's mistake by its text, another with its traceback."""
    if isinstance(error, UserError):
        return {"error": str(error), "user": True}
    # The first frame is ours.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return {"error": text[-LONGEST_TRACEBACK:].rstrip() + hint, "user": False}


@cache
def _runner() -> asyncio.Runner:
    """One event loop for the life of the process: clients and locks that a function keeps stay
    usable from call to call."""
    return asyncio.Runner()


def _judge_of(source: Source) -> Callable[[str, Item], float | None]:
    if source.option == "format":
        return lambda completion, item: think_format(completion)
    if source.option == "regex":
        pattern = re.compile(source.place)
        return lambda completion, item: float(pattern.search(completion) is not None)
    if source.text == "math":
        # At every call it would warn that nobody limits its time.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        VERIFIERS["math"]("0", Item("", "", "0", {}))  # imports, or names what is missing
    return VERIFIERS[source.text]


def _import(source: Source) -> Callable[..., Any]:
    """The callable in a file or module, or that was pickled."""
    if source.option == "python":
        return _unpickled(source)
    try:
        module = _module(source)
    except UserError:
        raise
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{KEY}: {source.text} cannot be imported: {type(error).__name__}: {error}"
            f" ({at.filename}, line {at.lineno})"
        ) from error
    found = getattr(module, source.attribute, None)
    if found is None:
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        hint = near(source.attribute, own) or f"; it has {', '.join(own) or 'none'}"
        raise UserError(f"{KEY}: {source.text}: no function {source.attribute}{hint}")
    if inspect.isclass(found) or not callable(found):
        raise UserError(
            f"{KEY}: {source.text} is a {'class' if inspect.isclass(found) else type(found)},"
            f" it must be a function {SHAPE}"
        )
    return found


def _unpickled(source: Source) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = pickle.loads(source.code)
    except BaseException as error:
        raise UserError(
            f"{KEY}: {source.text} cannot be loaded in a process of its own:"
            f" {type(error).__name__}: {error}; write it in a file, and name it path.py:function"
        ) from error
    return found


def _module(source: Source) -> ModuleType:
    if source.option == "module":
        return importlib.import_module(source.place)
    path = Path(source.place)
    if _digest(path) != source.digest:
        raise UserError(
            f"{KEY}: {path} has changed since the run began: half of its rewards would be of"
            " another function; start the run again"
        )
    name = f"jaxrl_rewards_{path.stem}_{source.digest[:8]}"
    if name not in sys.modules:  # several functions of one file share its module
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        sys.path.append(str(path.parent))  # for modules beside the file
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _signature(source: Source, call: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise UserError(f"{KEY}: {source.text} has no signature: write {SHAPE}") from error
    kinds = inspect.Parameter
    fixed = [p.name for p in parameters.values() if p.kind == kinds.POSITIONAL_ONLY]
    if "completions" not in parameters or fixed:
        shown = f"{source.attribute}{inspect.signature(call)}"
        why = f"{fixed[0]} cannot be named" if fixed else "it has no parameter `completions`"
        raise UserError(f"{KEY}: {source.text}: {shown}: {why}; write {SHAPE}")
    columns = [
        p
        for name, p in parameters.items()
        if name not in ("prompts", "completions")
        and p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    waits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004 (an object that is called like a function)
    )
    return Signature(
        "async" if waits else "batch",
        needs=tuple(p.name for p in columns if p.default is kinds.empty),
        takes=tuple(p.name for p in columns if p.default is not kinds.empty),
        takes_all=any(p.kind == kinds.VAR_KEYWORD for p in parameters.values()),
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
