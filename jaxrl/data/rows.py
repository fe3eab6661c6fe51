"""A row of a file as an example: which of its fields are what.

A row means the same in whichever form it comes. So a null is as good as absent, values that JSON
does not have become those that it has (`as_json`), and lists and objects may stand as their JSON
text. Nulls that tables put into objects (fields that only other rows have) are gone when a row
comes here (`tables.row_decoder`); the arguments of tool calls keep the nulls that JSON has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from numbers import Number
from typing import Any

import numpy as np

from jaxrl.config.settings import check_arguments
from jaxrl.data.example import CompletionTurns, Example, JsonObject, Message, is_learned
from jaxrl.errors import UserError, about, near, short
from jaxrl.types import TemplateInputs


@dataclass(frozen=True)
class Keys:
    """Names of the fields of a row, which are the columns of a table. A dot leads into an object or
    a list, as in `reward_model.ground_truth`; None: rows have no such field."""

    prompt: str | None = "prompt"
    """A text prompt, or the messages of one."""
    messages: str | None = "messages"
    """Chat turns; a last one of the assistant is the completion."""
    completion: str | None = "completion"
    """Text, or messages of which the first and the last are the assistant's."""
    answer: str | None = "answer"
    tools: str | None = "tools"
    system: str | None = "system"
    arguments: str | None = "chat_template_kwargs"
    text: str | None = "text"
    """A completion without a prompt, in rows that have neither prompt nor messages."""
    turns: CompletionTurns = "last"
    """Which of the assistant's turns in a chat that ends with one are the completion."""

    @property
    def fields(self) -> Iterator[tuple[str, str]]:
        """Yields the name of each field that becomes one of an example, and of the latter."""
        for of in ("prompt", "messages", "completion", "answer"):
            if (name := getattr(self, of)) is not None:
                yield name, of

    @property
    def named(self) -> tuple[str, ...]:
        names = [name for name, _ in self.fields]
        return (*names, *(name for of in OPTIONAL if (name := getattr(self, of)) is not None))


KEYS = Keys()
OPTIONAL = {
    "tools": "data.tools_key",
    "system": "data.system_key",
    "arguments": "data.chat_template_arguments_key",
}
"""Fields of `Keys` that rows need not have -> the config key."""
MAY_BE_NULL = ("default", "const")
"""Fields of a JSON schema for which null is a value. Any other null was put there by a table, be it
before the rows were written as JSON."""
_AS_IT_IS = frozenset({str, int, bool, bytes, type(None)})
_TEXTS = (None, "text", "input_text", "output_text")
"""Types of the parts of a message's content that are text."""
LEARNED = {
    "weight": "OpenAI",
    "train": "axolotl",
    "training": "axolotl",
    "trainable": "verl",
    "loss": "ms-swift",
}
"""Fields of the assistant's messages that say whether one is learned -> whose word it is."""
_FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_COLUMNS = " (where these are the prompts of several rows, write a list of rows: [{...}, {...}])"
ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model", "ai", "bot", "chatbot"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
}
"""Who speaks, in data sets of several kinds -> the role. In `from` of a message with `value` it is
read; in `role` it is what to write."""


def to_example(row: Mapping[str, object], keys: Keys, where: str) -> Example:
    """Converts a row, made of values that JSON has (`as_json`), to an example; `where` begins error
    messages."""
    plain = _plain_text(row, keys, where)
    prompt: str | tuple[Message, ...] = ""
    text, turns = plain, tuple[Message, ...]()
    if plain is None:
        prompt, turns = _prompt(row, keys, where)
        text = turns[0]["content"] if turns else _field(row, keys.completion, where)
    system = _field(row, keys.system, where, "data.system_key=null leaves it out")
    system = None if not system or system.isspace() else system
    if system and not isinstance(prompt, str) and prompt[0]["role"] not in ("system", "developer"):
        prompt = ({"role": "system", "content": system}, *prompt)
    tools, arguments = _tools(row, keys, where), _arguments(row, keys, where)
    answer = _answer(row, keys, where)
    known = {*dict(keys.fields), *([keys.text] if plain is not None else [])}
    return Example(
        prompt=prompt,
        completion=text,
        system=system if isinstance(prompt, str) else None,
        inputs=TemplateInputs(tools, arguments) if tools or arguments else None,
        turns=turns,
        document=plain is not None,
        answer=None if answer is None else answer if isinstance(answer, str) else _digits(answer),
        answer_value=None if isinstance(answer, str) else answer,
        columns={name: _without_nulls(value) for name, value in row.items() if name not in known},
    )


def _plain_text(row: Mapping[str, object], keys: Keys, where: str) -> str | None:
    """Returns the text of a row that is a completion without a prompt; None if it has a prompt."""
    if any(find_value(row, name) is not None for name in (keys.prompt, keys.messages)):
        return None
    text = _field(row, keys.text, where)
    if text is not None and find_value(row, keys.completion) is not None:
        raise UserError(
            f"{where}: both `{keys.text}` and `{keys.completion}`, and no prompt: if the first is"
            f" the prompt, set data.prompt_key={keys.text}; else keep one"
        )
    if text is not None and not text.strip():
        raise UserError(f"{where}: `{keys.text}` is empty")
    return text


def find_value(row: Mapping[str, object], name: str | None) -> Any:
    """Finds the value that a name has in a row: that of the field of this name, or else the one
    found by following its dots through objects and lists (or their JSON text), as in
    `answers.0.text`. Returns None where there is none."""
    if name is None or name in row:
        return None if name is None else row[name]
    for at in range(len(name) - 1, 0, -1):
        if name[at] == "." and name[:at] in row:
            inside = _parsed(row[name[:at]])
            if isinstance(inside, list):
                inside = {str(number): value for number, value in enumerate(inside)}
            value = find_value(inside, name[at + 1 :]) if isinstance(inside, dict) else None
            if value is not None:
                return value
    return None


def names_in(row: Mapping[str, object], keys: Keys) -> Iterator[str]:
    """Yields the names of the fields of a row, and of those next to one that a name with dots leads
    to."""
    yield from row
    for key in keys.named:
        parent = key.rpartition(".")[0]
        inside = _parsed(find_value(row, parent)) if parent and key not in row else None
        if isinstance(inside, dict | list):
            names = inside if isinstance(inside, dict) else range(len(inside))
            yield from (f"{parent}.{name}" for name in names)


def column_of(name: str | None, columns: Iterable[str]) -> str | None:
    """Returns the column in which `find_value` looks for a name first."""
    there = set(columns)
    while name and name not in there:
        name = name.rpartition(".")[0]
    return name or None


def check_column_names(columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    twice = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
    if twice:
        raise UserError(f"{where}: two columns have one name: {listed(map(str, twice))}")


def no_prompt(names: Iterable[str], keys: Keys, where: str, what: str) -> UserError:
    """Returns the error for a row or a file (`what`) that has neither kind of prompt."""
    names = list(names)
    asked = [name for name in (keys.prompt, keys.messages) if name is not None]
    hint = next(filter(None, (near(name, names) for name in asked)), "")
    if "conversations" in names:
        hint = " (data.messages_key=conversations reads the chats of ShareGPT)"
    neither = f"neither `{asked[0]}` nor `{asked[-1]}`" if len(asked) > 1 else f"no `{asked[0]}`"
    return UserError(
        f"{where}: {neither}; {what} has {listed(names)}{hint} (set data.prompt_key or"
        " data.messages_key)"
    )


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "no field"


def kind(value: object) -> str:
    """Describes a value for error messages, as in "a list"."""
    kinds: dict[type, str] = {
        dict: "an object",
        list: "a list",
        tuple: "a list",
        str: "text",
        bytes: "binary",
    }
    kinds |= {bool: "a truth value", type(None): "null"}
    fallback = "a number" if isinstance(value, Number) else f"a {type(value).__name__}"
    return kinds.get(type(value), fallback)


def as_json(value: Any) -> Any:
    """Converts a value of a table or of Python, such as a row, to what JSON would have.

    NaN and what pandas has for a missing value are None. Dates and times are their ISO text, a
    timestamp at midnight that of its date (which `datasets` makes of a column of dates). Arrays
    are lists. What JSON cannot have at all, such as bytes, stays.
    """
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, float | Decimal):
        return None if math.isnan(value) else float(value) if isinstance(value, float) else value
    if isinstance(value, Mapping):
        return {
            name: one if type(one) in _AS_IT_IS else as_json(one) for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [one if type(one) in _AS_IT_IS else as_json(one) for one in value]
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, datetime) and value.time() == time() and value.tzinfo is None:
        return value.date().isoformat()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, np.floating):
        return as_json(float(str(value)))  # the digits that its own width has
    if isinstance(value, np.generic | np.ndarray):
        return as_json(value.tolist())
    return value


def parse_row_json(text: str) -> Any:
    """Parses the value of a JSON text; NaN, which JSON does not have, becomes null."""
    return json.loads(text, parse_constant=lambda name: None if name == "NaN" else float(name))


def _without_nulls(value: Any, but: tuple[str, ...] = ()) -> Any:
    """Returns a value without its objects' null fields, which a table cannot tell from absent ones,
    but for those of these names."""
    if isinstance(value, dict):
        there = ((name, one) for name, one in value.items() if one is not None or name in but)
        return {
            name: _without_nulls(one, but) if type(one) in (dict, list) else one
            for name, one in there
        }
    if isinstance(value, list):
        return [_without_nulls(one, but) if type(one) in (dict, list) else one for one in value]
    return value


def _parsed(value: Any) -> Any:
    """Parses a text that is the JSON of a list or an object; returns any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            return parse_row_json(value)
    return value


def _chat(value: Any) -> Any:
    """Parses a text that is the JSON of messages of known speakers, or of a single one; returns any
    other value as it is, such as an answer in JSON."""
    parsed = _parsed(value)
    turns = parsed if isinstance(parsed, list) else [parsed]
    is_chat = bool(turns) and all(
        isinstance(turn, dict)
        and str(turn.get("role")).strip().lower() in _SPEAKERS
        and turn.keys() & {"content", "tool_calls", "function_call"}
        for turn in turns
    )
    return parsed if is_chat else value


def _prompt(
    row: Mapping[str, object], keys: Keys, where: str
) -> tuple[str | tuple[Message, ...], tuple[Message, ...]]:
    """Returns the prompt, and the turns of the completion where the row has it as messages."""
    given, chat = _chat(find_value(row, keys.prompt)), _parsed(find_value(row, keys.messages))
    if keys.prompt == keys.messages and given is not None:
        given, chat = (given, None) if isinstance(given, str) else (None, given)
    if given is not None and chat is not None:
        raise UserError(
            f"{where}: both `{keys.prompt}` and `{keys.messages}`; choose with data.prompt_key and "
            "data.messages_key (null switches one off)"
        )
    if given is None and chat is None:
        empty = [name for name in (keys.prompt, keys.messages) if name in row]
        if empty:
            raise UserError(f"{where}: {listed(map(str, empty))} is null: the row has no prompt")
        raise no_prompt(row, keys, where, "the row")
    end = _chat(find_value(row, keys.completion))
    turns = _messages(end, keys.completion, where) if isinstance(end, list | dict) else ()
    roles = [turn["role"] for turn in turns]
    if isinstance(end, list | dict) and not (roles and roles[0] == roles[-1] == "assistant"):
        raise UserError(
            f"{where}: the first and the last message of `{keys.completion}` must be the"
            " assistant's"
        )
    if chat is None and not isinstance(given, list | dict):
        text = _field(row, keys.prompt, where)
        if not text:
            raise UserError(f"{where}: `{keys.prompt}` is empty")
        if turns and not is_learned(turns[0]):
            raise _nothing_learned(keys.completion, where)
        if len(turns) > 1:
            raise UserError(
                f"{where}: `{keys.completion}` has several messages and `{keys.prompt}` is text:"
                " give the prompt as messages too"
            )
        return text, turns
    name = keys.prompt if chat is None else keys.messages
    before = _messages(given if chat is None else chat, name, where)
    if before and before[-1]["role"] == "assistant":
        if chat is None:
            raise UserError(
                f"{where}: `{name}` ends with a message of the assistant, which a completion cannot"
                f" continue: if it is the completion, set data.messages_key={name}"
                " data.prompt_key=null"
            )
        if end is not None:
            raise UserError(
                f"{where}: `{name}` ends with an assistant message and there is a"
                f" `{keys.completion}` too; keep one (data.completion_key=null leaves the second"
                " out)"
            )
        chat, start = before, min(1, len(before) - 1)  # a greeting that begins the chat is prompt
    else:
        chat, start = (*before, *turns), len(before)
    if start < len(chat):
        learned = [at for at in range(start, len(chat)) if is_learned(chat[at])]
        if not learned:
            raise _nothing_learned(keys.completion if turns else name, where)
        first = learned[0 if keys.turns == "all" else -1]
        before, turns = chat[:first], chat[first : learned[-1] + 1]
    if not before:
        raise UserError(f"{where}: `{name}` has no message before the completion")
    return before, turns


def _nothing_learned(name: str | None, where: str) -> UserError:
    return UserError(
        f"{where}: no message of the assistant in `{name}` is to be learned: each is marked by"
        f" {listed(LEARNED)}; leave the row out, or the mark"
    )


def _messages(chat: object, name: str | None, where: str) -> tuple[Message, ...]:
    chat = [chat] if isinstance(chat, dict) else chat
    if not isinstance(chat, list):
        raise UserError(f"{where}: `{name}` must be a list of messages, it is {kind(chat)}")
    return tuple(_message(one, f"{where}: `{name}`[{n}]") for n, one in enumerate(chat))


def _message(given: object, place: str) -> Message:
    """Returns a message with all its fields that are not null; its content is text."""
    parsed = _parsed(given)
    message = _fields(parsed) if isinstance(parsed, dict) else {}
    if "role" not in message and {"from", "value"} <= message.keys():
        speaker = message.pop("from")
        if speaker not in _SPEAKERS:
            raise UserError(
                f"{place}: `from` is {speaker!r}: write a `role` and `content`"
                f" (read are {', '.join(_SPEAKERS)})"
            )
        message = {"role": _SPEAKERS[speaker], "content": message.pop("value"), **message}
    if isinstance(role := message.get("role"), str):
        check_role(role, place)
    if message.get("function_call"):
        raise UserError(
            f"{place}: `function_call` is the old form of a call: write it as `tool_calls`:"
            ' [{"type": "function", "function": {"name": ..., "arguments": ...}}]'
        )
    calls = _parsed(message.pop("tool_calls", None)) or []
    if not isinstance(calls, list):
        raise UserError(f"{place}: `tool_calls` must be a list of calls, it is {kind(calls)}")
    calls = [_parsed(call) for call in calls]
    if not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{place}: `tool_calls` must be a list of objects: {str(calls)[:80]}")
    if calls:
        message["tool_calls"] = [_fields(call) for call in calls]
        message.setdefault("content", "")
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], place)
    if not all(isinstance(message.get(name), str) for name in ("role", "content")):
        shape = "" if isinstance(parsed, dict) else " of a list of messages"
        raise UserError(
            f"{place}{shape} must have the texts `role` and `content`: "
            f"{json.dumps(given, ensure_ascii=False, default=str)[:80]}"
            f"{'' if message.keys() & {'role', 'content'} else _COLUMNS}"
        )
    if message["role"] == "assistant":
        flags = {name: message.pop(name) for name in LEARNED if name in message}
        said = [_flag(value, f"{place}: `{name}`") for name, value in flags.items()]
        if not all(said):
            message["weight"] = 0
    _check_text(message, place)
    return message


def _flag(value: object, place: str) -> bool:
    """Reads a field of LEARNED; blank text is as good as none."""
    flag = True if isinstance(value, str) and not value.strip() else None
    if isinstance(value, str | bool | int | float):
        flag = _FLAGS.get(str(value).strip().lower(), flag)
    if flag is None:
        raise UserError(
            f"{place} is {short(repr(value))}: a message of the assistant is learned in full (true"
            " or 1) or read and not learned (false or 0)"
        )
    return flag


def check_role(role: str, place: str) -> None:
    """Refuses a role that is not among `ROLES`: a template may render any word, and whoever looks
    for the assistant's turns would pass over this one."""
    if role in ROLES:
        return
    meant = _SPEAKERS.get(role.strip().lower())
    if meant is not None:
        raise UserError(f"{place}: rename the role {role!r} to {meant!r}")
    raise UserError(f"{place}: the role {short(repr(role))} is none of {', '.join(ROLES)}")


def _fields(value: Any) -> Any:
    """Returns the fields of a message or a call that are not null, also within its `function`."""
    if not isinstance(value, dict):
        return value
    kept = {name: one for name, one in value.items() if one is not None}
    return kept | {"function": _fields(kept["function"])} if "function" in kept else kept


def _joined(parts: list[Any], place: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        of = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else part
        if of not in _TEXTS or not isinstance(text, str):
            what = f"of type {of!r}" if of not in _TEXTS else kind(text)
            raise UserError(
                f"{place}: `content`[{number}] is {what}: only text can be read, as in"
                ' {"type": "text", "text": "..."}'
            )
        texts.append(text)
    return "".join(texts)


def _given(row: Mapping[str, object], name: str | None) -> Any:
    given = _parsed(find_value(row, name))  # null is as good as none, as text too
    return None if isinstance(given, str) and given.strip() in ("", "null") else given


def _tools(row: Mapping[str, object], keys: Keys, where: str) -> tuple[JsonObject, ...]:
    """Returns the JSON schemas of a row, given as a list or its text."""
    given = _given(row, keys.tools)
    if given is None:
        return ()
    tools = [_parsed(tool) for tool in given] if isinstance(given, list) else [None]
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where}: `{keys.tools}` must be a list of JSON schemas, or the text of one; it is"
            f" {kind(given)} (data.tools_key=null leaves it out)"
        )
    _check_text(tools, f"{where}: `{keys.tools}`")
    return tuple(_without_nulls(tool, MAY_BE_NULL) for tool in tools)


def _arguments(row: Mapping[str, object], keys: Keys, where: str) -> Mapping[str, object]:
    place, given = f"{where}: `{keys.arguments}`", _given(row, keys.arguments)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UserError(
            f"{place} must be an object of names and values, or its JSON text; it is {kind(given)}"
            f" (data.chat_template_arguments_key=null leaves it out)"
        )
    _check_text(given, place)
    with about(place):
        return check_arguments(_without_nulls(given))


def _field(
    row: Mapping[str, object], name: str | None, where: str, way: str = "messages are read too"
) -> str | None:
    value = find_value(row, name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: `{name}` must be text, it is {kind(value)} ({way})")
    if value is not None:
        _check_text(value, f"{where}: `{name}`")
    return value


def _digits(value: object) -> str:
    """Returns the text of a number. A whole one is written without a decimal point, for a table may
    have made it a float for the sake of other rows."""
    if isinstance(value, float | Decimal) and -(2**53) < value < 2**53 and value % 1 == 0:
        value = int(value)
    return str(value)


def _answer(row: Mapping[str, object], keys: Keys, where: str) -> object:
    """Returns the reference answer, a text or a number; blank text is as good as none."""
    value = find_value(row, keys.answer)
    if isinstance(value, Number) and not isinstance(value, bool):
        return value
    if value is not None and not isinstance(value, str):
        remedy = "data.answer_key=null leaves it out"
        if isinstance(value, list):
            remedy = f"data.answer_key={keys.answer}.0 names its first value"
        elif isinstance(value, dict) and value:
            remedy = f"data.answer_key={keys.answer}.{next(iter(value))} names a value in it"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
            remedy = f'write it as a text, such as "{text}", or set data.answer_key=null'
        raise UserError(
            f"{where}: `{keys.answer}` must be text or a number, it is {kind(value)} ({remedy})"
        )
    if not value or value.isspace():
        return None
    _check_text(value, f"{where}: `{keys.answer}`")
    return value


def _check_text(value: Any, where: str) -> None:
    """Checks that a text, or each text in a value of JSON, has no half of a character (`\\ud83d`),
    which JSON can spell and no tokenizer takes."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            _check_text(name, where)
            _check_text(one, where if name == "content" else f"{where}: `{name}`")
    elif isinstance(value, list):
        for one in value:
            _check_text(one, where)
    if not isinstance(value, str) or value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise UserError(
            f"{where}: {half} at character {error.start} is half of a surrogate pair, not text"
        ) from error
