"""What goes between a run and the processes that run its reward functions."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

LENGTH = 8
"""Bytes that tell how long an order is."""

Kind = Literal["each", "batch", "async"]
"""How a function is called: for one completion after the other (what comes with jaxrl), for a list
of them, or for many at the same time, each in a list of its own (`async def`)."""
Option = Literal["verifier", "regex", "format", "file", "module"]


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


def start_order(sources: Sequence[Source], timeout: float) -> bytes:
    """The first order to a process: functions to load, and the seconds for an awaited call."""
    return _framed((list(sources), timeout))


def judge_order(function: int, items: Sequence[Item]) -> bytes:
    """An order to judge items with one of those functions."""
    return _framed((function, list(items)))


def next_order(orders: BinaryIO) -> Any:
    """What the next order says; None when there will be none."""
    head = orders.read(LENGTH)
    if len(head) < LENGTH:
        return None
    return pickle.loads(orders.read(int.from_bytes(head, "big")))


def _framed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(LENGTH, "big") + data
