"""What goes between a run and the processes that run its reward functions."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

LENGTH = 8
"""Bytes that hold the length of an order."""

Kind = Literal["each", "batch", "async"]
"""How a function is called: for one completion after the other (what comes with jaxrl), for a list
of them, or for many at the same time, each in a list of its own (`async def`)."""
Option = Literal["verifier", "regex", "format", "file", "module", "python"]


@dataclass(frozen=True)
class Item:
    """A completion to judge, with all that is known of its prompt."""

    prompt: str
    completion: str
    answer: str | None
    columns: Mapping[str, Any]
    """The other columns of its row, and what the run adds: `messages`, `finish_reason`,
    `n_tokens`."""


@dataclass(frozen=True)
class Source:
    """Where a reward function comes from."""

    text: str
    """As in `reward.functions`."""
    name: str
    """As in the metrics `reward/NAME/...`."""
    option: Option
    place: str = ""
    """Absolute path of a file, dotted name of a module, or regular expression."""
    attribute: str = ""
    """Name of the function in that file or module."""
    digest: str = ""
    """Hex hash of the file when the run began: a replaced process must not run another."""
    code: bytes = b""
    """The function itself, pickled by cloudpickle, where a Python program gave it."""


@dataclass(frozen=True)
class Signature:
    """What a loaded function asks for."""

    kind: Kind
    needs: tuple[str, ...] = ()
    """Columns without which it cannot be called."""
    takes: tuple[str, ...] = ()
    """Columns that it takes where there are any (parameters with defaults)."""
    takes_all: bool = False
    """Whether it takes every column (`**columns`)."""


def write_order(number: int, content: Any) -> bytes:
    """An order to a process. The first one's content is (sources, seconds for an awaited call,
    megabytes of memory or None), each other one's (index of the function, items)."""
    data = pickle.dumps((number, content))
    return len(data).to_bytes(LENGTH, "big") + data


def next_order(orders: BinaryIO) -> Any:
    """The next order's number and content; None when there will be none."""
    head = orders.read(LENGTH)
    if len(head) < LENGTH:
        return None
    return pickle.loads(orders.read(int.from_bytes(head, "big")))


def read_answer(line: bytes, number: int) -> dict[str, Any]:
    """The message in a line, if it answers the order of that number or reports how the process
    ended; empty for anything else, which a function may have written."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(message, dict):
        return {}
    ended = isinstance(message.get("ended"), int | str)
    return message if message.get("order") == number or ended else {}
