"""JSONL files of prompts or chats.

Every line is read and checked once, when the file is opened, so that a bad row is told before a
model is loaded. Only line numbers and byte offsets stay in memory; a row is read again when it is
needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.data.example import Example, Message
from jaxrl.errors import UserError

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Keys:
    """Names of the fields of a row."""

    prompt: str = "prompt"
    """A text prompt."""
    messages: str = "messages"
    """Chat turns; a last one of the assistant is the completion."""
    completion: str = "completion"
    answer: str = "answer"


KEYS = Keys()


class JsonlFile:
    """The rows of one JSONL file, blank lines skipped."""

    procedural = False

    def __init__(self, path: str | Path, keys: Keys = KEYS, label: str = "data.train"):
        """
        Args:
            path: a UTF-8 file, with or without a byte order mark, with either line ending.
            keys: the names of the fields.
            label: the config key, for error messages.
        """
        self.name = str(path)
        self._keys = keys
        self._label = label
        self._lines, self._offsets = self._check()

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name}: row {index} of {len(self)}")
        with open(self.name, "rb") as file:
            file.seek(self._offsets[index])
            return self._parse(file.readline(), self._lines[index])

    def _check(self) -> tuple[np.ndarray, np.ndarray]:
        """Line numbers (from 1) and byte offsets of the rows, each of them parsed once."""
        lines, offsets, offset = [], [], 0
        try:
            with open(self.name, "rb") as file:
                for line, raw in enumerate(file, start=1):
                    if raw.removeprefix(BOM).strip():
                        self._parse(raw, line)
                        lines.append(line)
                        offsets.append(offset)
                    offset += len(raw)
        except OSError as error:
            raise UserError(f"{self._label}: {self.name}: {error.strerror}") from error
        if not lines:
            raise UserError(f"{self._label}: {self.name}: no rows; each line is one JSON object")
        return np.array(lines, np.int64), np.array(offsets, np.int64)

    def _parse(self, raw: bytes, line: int) -> Example:
        where = f"{self._label}: {self.name}:{line}"
        try:
            row = json.loads(raw.removeprefix(BOM).decode())
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON object is needed, this is {_kind(row)}")
        return to_example(row, self._keys, where)


def to_example(row: Mapping[str, Any], keys: Keys, where: str) -> Example:
    """A row as an example; `where` begins the error messages."""
    prompt, completion = _prompt(row, keys, where)
    given = _field(row, keys.completion, where)
    if given is not None and completion is not None:
        raise UserError(
            f"{where}: `{keys.messages}` ends with an assistant message and there is a "
            f"`{keys.completion}` too; keep one"
        )
    known = {keys.prompt, keys.messages, keys.completion, keys.answer}
    return Example(
        prompt=prompt,
        completion=completion if given is None else given,
        answer=_field(row, keys.answer, where, numbers=True),
        columns={key: value for key, value in row.items() if key not in known},
    )


def _prompt(
    row: Mapping[str, Any], keys: Keys, where: str
) -> tuple[str | tuple[Message, ...], str | None]:
    """The prompt and, where the chat ends with one, the assistant's completion."""
    text, chat = _field(row, keys.prompt, where), row.get(keys.messages)
    if text is not None and chat is not None:
        raise UserError(
            f"{where}: both `{keys.prompt}` and `{keys.messages}`; choose with data.prompt_key and "
            "data.messages_key (a name that no row has switches one off)"
        )
    if chat is not None:
        return _split_chat(chat, keys.messages, where)
    if text is None:
        there = ", ".join(f"`{key}`" for key in row) or "no field"
        raise UserError(
            f"{where}: neither `{keys.prompt}` nor `{keys.messages}`; the row has {there} "
            "(set data.prompt_key or data.messages_key)"
        )
    if not text:
        raise UserError(f"{where}: `{keys.prompt}` is empty")
    return text, None


def _split_chat(chat: Any, key: str, where: str) -> tuple[tuple[Message, ...], str | None]:
    if not isinstance(chat, list):
        raise UserError(f"{where}: `{key}` must be a list of messages, it is {_kind(chat)}")
    for number, message in enumerate(chat):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise UserError(
                f"{where}: `{key}`[{number}] must have the texts `role` and `content`: "
                f"{json.dumps(message, ensure_ascii=False)[:80]}"
            )
    completion = chat[-1]["content"] if chat and chat[-1]["role"] == "assistant" else None
    turns = tuple(chat if completion is None else chat[:-1])
    if not turns:
        raise UserError(f"{where}: `{key}` has no message before the completion")
    return turns, completion


def _field(row: Mapping[str, Any], key: str, where: str, numbers: bool = False) -> str | None:
    """A text field; null is as good as absent. With `numbers`, a number stands for its text."""
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    kinds = "text or a number" if numbers else "text"
    raise UserError(f"{where}: `{key}` must be {kinds}, it is {_kind(value)}")


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "a truth value",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")
