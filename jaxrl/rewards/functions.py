"""Reward functions by their names: found and checked in the run, loaded and called in a process.

A reward function is `f(prompts, completions, **columns) -> list[float | None]`, sync or async. It
gets keyword arguments: `prompts` and `completions`, and of the columns those that its signature
names (`**columns` takes all), each as a list as long as `completions`. A prompt that the data has
as text is text, and so is its completion; one that it has as messages is a list of messages, and
its completion `[{"role": "assistant", "content": TEXT}]`, as TRL gives them. A parameter
`completion_texts` gets the texts in any case. It returns a number for each completion, None where
it cannot judge; or a pair of that and a message about the completion, for a teacher that gets
feedback. What a completion gets must not depend on the others in its list.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import cloudpickle

from jaxrl.data.tasks import ARITHMETIC, correction
from jaxrl.errors import UserError, near, shown
from jaxrl.process.json_types import JsonObject, finite
from jaxrl.process.plugin import is_plugin, load_source, locate
from jaxrl.process.user_process import Answerer, Call, CodeFailed, TooLong
from jaxrl.rewards.reward_pool import Item, ItemSource, Signature
from jaxrl.rewards.verifiers import BUILT_IN, VERIFIERS

KEY = "reward.functions"
SHAPE = "f(prompts, completions, **columns)"
TEXTS = "completion_texts"
OF_COMPLETIONS = ("prompts", "completions", TEXTS)
"""Parameters that say what was sampled: no column of the data may have such a name."""
_MISREAD = (AttributeError, IndexError, KeyError, TypeError)
"""What code raises that takes messages for text, or text for messages."""
PLAIN = (*VERIFIERS, "format")
"""What is named by one word."""
FORMAT = (
    r"(?s)\A\s*(?:<think>)?(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*\Z"
)
"""Completions that are `<think>...</think><answer>...</answer>` and nothing else: each tag stands
once, and `<think>` may be missing, for some chat templates end with it."""


def find(text: str, given: Mapping[str, bytes] = MappingProxyType({})) -> ItemSource:
    """Returns the source that one entry of `reward.functions` names; its code is not run.

    Raises:
        UserError: it names nothing.
    """
    if text == "format":
        return ItemSource(text, text, FORMAT, option="regex")
    if text in VERIFIERS:  # another process knows none that this program has added
        code = b"" if text in BUILT_IN else cloudpickle.dumps(VERIFIERS[text])
        return ItemSource(text, text, code=code, option="verifier")
    scheme, _, rest = text.partition(":")
    if scheme == "regex" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise UserError(f"{KEY}: {text}: not a regular expression: {error}") from error
        return ItemSource(text, "regex", rest, option="regex")
    if not is_plugin(text):
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, PLAIN)}: it is path/to/file.py:function,"
            f" package.module:function, regex:PATTERN or one of {', '.join(sorted(PLAIN))}"
        )
    return ItemSource(**vars(locate(text, KEY, "function", given, "rewards=[{}]")))


def load(sources: Sequence[ItemSource], first: bool, ready: Callable[[object], None]) -> Answerer:
    """Loads reward functions in a process of their own (`process.user_process.main`). The content
    of a call is the index of a function, and items: of one that is no `batch` a single one."""
    functions = [Function(source) for source in sources]
    ready([asdict(function.signature) for function in functions])

    async def answer(call: Call, index: int, items: Sequence[Item]) -> None:
        # No completion's time is spent on the import of reasoning_gym.
        tasks = (str(item.columns.get("task", "")) for item in items)
        judges = sources[index].text in ("auto", "reasoning_gym")
        asked = judges and any(task.startswith("reasoning_gym/") for task in tasks)
        if asked and "reasoning_gym" not in sys.modules:
            call.say({"imports": True})
            importlib.import_module("reasoning_gym")
        call.begin()
        await functions[index].run(items, call)

    return answer


class Function:
    """A loaded reward function."""

    def __init__(self, source: ItemSource):
        """Raises UserError where it cannot be imported, is not there, or cannot be called so."""
        self.source = source
        if source.option != "code":
            self._call, self.signature = _judge_of(source), Signature("each")
            return
        call = load_source(source, KEY, "function")
        if inspect.isclass(call) or not callable(call):
            raise UserError(
                f"{KEY}: {source.text} is a {'class' if inspect.isclass(call) else type(call)},"
                f" it must be a function {SHAPE}"
            )
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError) as error:
            raise UserError(f"{KEY}: {source.text} has no signature: write {SHAPE}") from error
        kinds, every = inspect.Parameter, signature.parameters.values()
        fixed = [p.name for p in every if p.kind == kinds.POSITIONAL_ONLY]
        if not {"completions", TEXTS} & signature.parameters.keys() or fixed:
            why = f"{fixed[0]} cannot be named" if fixed else "it has no parameter `completions`"
            raise UserError(f"{KEY}: {source.text}: {source.name}{signature}: {why}; write {SHAPE}")
        named = [p for p in every if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        takes = {*OF_COMPLETIONS, *(p.name for p in named if p.default is not kinds.empty)}
        waits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
            getattr(call, "__call__", None)  # noqa: B004 (an object that is called like a function)
        )
        self._call = call
        self.signature = Signature(
            "async" if waits else "batch",
            needs=[p.name for p in named if p.name not in takes],
            takes=[p.name for p in named if p.name in takes],
            takes_all=any(p.kind == kinds.VAR_KEYWORD for p in every),
        )

    async def run(self, items: Sequence[Item], call: Call) -> None:
        """Judges items together, or a single one, and says what it found.

        Raises:
            CodeFailed: the function has no answer.
            UserError: it returned what is no reward.
        """
        try:
            if self.signature.kind == "each":
                result: Any = [await call.run(self._call, items[0])]
            else:
                result = await call.run(self._call, **self._arguments(items))
            call.say(self._found(result, len(items)))
        except CodeFailed as failed:
            if isinstance(failed.error, UserError):
                raise CodeFailed("user", str(failed.error)) from None
            if not isinstance(failed.error, _MISREAD) or self.signature.kind == "each":
                raise
            chats = {item.conversational for item in items}
            form = "(`prompts` and `completions` were text, as the prompts are)"
            if True in chats:
                which = " of some rows" if False in chats else ""
                form = (
                    f"(`prompts` and `completions`{which} were lists of messages, as the prompts"
                    f" are; `{TEXTS}` has the completions as text)"
                )
            raise CodeFailed(failed.kind, f"{failed}\n{form}") from None
        except TooLong as error:
            text = f"{self.source.text} returned {error}: let its messages be shorter"
            raise CodeFailed("exception", text) from None

    def _arguments(self, items: Sequence[Item]) -> dict[str, list[object]]:
        """Returns keyword arguments; a column that a row lacks is None there."""
        s, rows = self.signature, list[dict[str, object]]()
        for item in items:  # prompt and completion are in the form that the data has the prompt in
            prompt: object = item.prompt
            completion: object = item.completion
            if item.conversational:
                messages = item.columns["messages"]
                assert isinstance(messages, Sequence)
                prompt = [dict(message) for message in messages]
                completion = [{"role": "assistant", "content": item.completion}]
            given = zip(OF_COMPLETIONS, (prompt, completion, item.completion), strict=True)
            rows.append({"answer": item.answer, **item.columns, **dict(given)})
        present = dict.fromkeys(name for row in rows for name in row)
        unasked = present.keys() - {TEXTS} if s.takes_all else set[str]()
        names = dict.fromkeys([*s.needs, *(n for n in present if n in s.takes or n in unasked)])
        return {name: [row.get(name) for row in rows] for name in names}

    def _found(self, result: Any, n: int) -> JsonObject:
        """Returns the checked result of a call with `n` completions: numbers, perhaps messages."""
        text = isinstance(result, str | bytes | dict) or not hasattr(result, "__len__")
        if text or len(result) != n:
            raise UserError(
                f"{KEY}: {self.source.text} returned"
                f" {shown(result) if text else f'{len(result)} numbers'} for {n} completions: it"
                " must return a list with a number or None for each"
            )
        values, messages = list[float | None](), list[str]()
        for value in result:
            pair = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], str)
            score, message = value if pair else (value, "")
            if score is not None and finite(score) is None:
                raise UserError(
                    f"{KEY}: {self.source.text} returned {shown(score)} for a completion: it must"
                    " be a finite number, or None where the function cannot judge"
                )
            values.append(None if score is None else finite(score))
            messages.append(message)
        return {"values": values} | ({"messages": messages} if any(messages) else {})


def _judge_of(source: ItemSource) -> Callable[[Item], object]:
    """Loads a judge that comes with jaxrl; that of sums also says what is wrong."""
    if source.option == "regex":
        pattern = re.compile(source.place)
        return lambda item: float(pattern.search(item.completion) is not None)
    if source.text == "math":
        VERIFIERS["math"]("0", Item("", "", "0", {}))  # imports, or names what is missing
    verifier = load_source(source, KEY, "verifier") if source.code else VERIFIERS[source.text]

    def judged(item: Item) -> object:
        score = verifier(item.opening + item.completion, item)
        is_sum = source.text == "auto" and item.columns.get("task") == ARITHMETIC
        if source.text != "arithmetic" and not is_sum:
            return score
        return score, correction(item.prompt, item.completion)

    return judged
