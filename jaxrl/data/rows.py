"""A row of a file as an example: which of its fields are what."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Number

from jaxrl.data.example import CompletionTurns, Example, JsonObject, Message
from jaxrl.errors import UserError, near


@dataclass(frozen=True)
class Keys:
    """Names of the fields of a row, which are the columns of a table."""

    prompt: str = "prompt"
    """A text prompt."""
    messages: str = "messages"
    """Chat turns; a last one of the assistant is the completion."""
    completion: str = "completion"
    answer: str = "answer"
    tools: str | None = None
    """None: rows have no tools."""
    turns: CompletionTurns = "last"
    """Which of the assistant's turns in a chat that ends with one are the completion."""


KEYS = Keys()


def to_example(row: Mapping[str, object], keys: Keys, where: str) -> Example:
    """A row as an example; `where` begins the error messages."""
    prompt, turns = _prompt(row, keys, where)
    completion = turns[0]["content"] if turns else None
    given = _field(row, keys.completion, where)
    if given is not None and completion is not None:
        raise UserError(
            f"{where}: `{keys.messages}` ends with an assistant message and there is a "
            f"`{keys.completion}` too; keep one (data.completion_key may name a field that no row "
            "has)"
        )
    known = {keys.prompt, keys.messages, keys.completion, keys.answer}
    return Example(
        prompt=prompt,
        completion=completion if given is None else given,
        tools=_tools(row, keys, where),
        turns=turns,
        answer=_field(row, keys.answer, where, numbers=True),
        columns={key: value for key, value in row.items() if key not in known},
    )


def no_prompt(names: Iterable[str], keys: Keys, where: str, what: str) -> UserError:
    """The error about a row or a file (`what`) that has neither kind of prompt."""
    names = list(names)
    hint = near(keys.prompt, names) or near(keys.messages, names)
    return UserError(
        f"{where}: neither `{keys.prompt}` nor `{keys.messages}`; {what} has {listed(names)}{hint} "
        "(set data.prompt_key or data.messages_key)"
    )


def listed(names: Iterable[str]) -> str:
    """`` `a`, `b` ``."""
    return ", ".join(f"`{name}`" for name in names) or "no field"


def kind(value: object) -> str:
    """What a value is, for error messages."""
    kinds = {
        dict: "an object",
        list: "a list",
        tuple: "a list",
        str: "text",
        bytes: "binary",
        bool: "a truth value",
        type(None): "null",
    }
    fallback = "a number" if isinstance(value, Number) else f"a {type(value).__name__}"
    return kinds.get(type(value), fallback)


def _prompt(
    row: Mapping[str, object], keys: Keys, where: str
) -> tuple[str | tuple[Message, ...], tuple[Message, ...]]:
    """The prompt and, where the chat ends with a turn of the assistant, the completion's turns."""
    text, chat = _field(row, keys.prompt, where), row.get(keys.messages)
    if text is not None and chat is not None:
        raise UserError(
            f"{where}: both `{keys.prompt}` and `{keys.messages}`; choose with data.prompt_key and "
            "data.messages_key (a name that no row has switches one off)"
        )
    if chat is not None:
        return _split_chat(chat, keys, where)
    if text is None:
        empty = [key for key in (keys.prompt, keys.messages) if key in row]
        if empty:
            raise UserError(f"{where}: {listed(empty)} is null: the row has no prompt")
        raise no_prompt(row, keys, where, "the row")
    if not text:
        raise UserError(f"{where}: `{keys.prompt}` is empty")
    return text, ()


def _split_chat(
    chat: object, keys: Keys, where: str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    key = keys.messages
    if not isinstance(chat, list):
        raise UserError(f"{where}: `{key}` must be a list of messages, it is {kind(chat)}")
    for number, message in enumerate(chat):
        fields = message if isinstance(message, dict) else {}
        if fields.get("content") is None and isinstance(fields.get("tool_calls"), list):
            fields = {**fields, "content": ""}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise UserError(
                f"{where}: `{key}`[{number}] must have the texts `role` and `content`: "
                f"{json.dumps(message, ensure_ascii=False, default=str)[:80]}"
            )
        _check_text(fields["content"], f"{where}: `{key}`[{number}]")
    turns = tuple(_turn(message) for message in chat)
    end = len(turns)
    if turns and turns[-1]["role"] == "assistant":
        roles = [turn["role"] for turn in turns]
        end = roles.index("assistant") if keys.turns == "all" else len(turns) - 1
    if not end:
        raise UserError(f"{where}: `{key}` has no message before the completion")
    return turns[:end], turns[end:]


def _tools(row: Mapping[str, object], keys: Keys, where: str) -> tuple[JsonObject, ...]:
    """The JSON schemas of a row, a list or its text; null is as good as none."""
    given = None if keys.tools is None else row.get(keys.tools)
    if isinstance(given, str):
        with suppress(ValueError):
            given = json.loads(given)
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise UserError(
            f"{where}: `{keys.tools}` must be a list of JSON schemas, or the text of one; it is"
            f" {kind(given)}"
        )
    return tuple(given)


def _turn(message: JsonObject) -> Message:
    """A message as chat templates take it."""
    # In a table every message has the fields of all: a null is as good as absent.
    turn = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in turn:
        turn.setdefault("content", "")
        if not turn["tool_calls"]:  # exports of OpenAI's API have the empty list in each message
            del turn["tool_calls"]
    return turn


def _field(row: Mapping[str, object], key: str, where: str, numbers: bool = False) -> str | None:
    """A text field; null is as good as absent. With `numbers`, a number stands for its text."""
    value = row.get(key)
    if isinstance(value, str):
        _check_text(value, f"{where}: `{key}`")
    if value is None or isinstance(value, str):
        return value
    if numbers and isinstance(value, Number) and not isinstance(value, bool):
        return str(value)
    kinds = "text or a number" if numbers else "text"
    raise UserError(f"{where}: `{key}` must be {kinds}, it is {kind(value)}")


def _check_text(text: str, where: str) -> None:
    """JSON can spell half of a character (`\\ud83d`), which no tokenizer takes."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise UserError(
            f"{where}: {half} at character {error.start} is half of a surrogate pair, not text"
        ) from error
