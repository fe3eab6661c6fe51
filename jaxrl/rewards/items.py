"""What a run and the processes that run its reward functions send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Item:
    """A completion to judge, with all that is known of its prompt."""

    prompt: str
    completion: str
    answer: str | None
    columns: Mapping[str, object]
    """The other columns of its row, and what the run adds: `messages`, `finish_reason`,
    `n_tokens`."""
    opening: str = ""
    """What opened thoughts at the end of the prompt, so that the completion begins in them."""


@dataclass(frozen=True)
class ItemSource:
    """Where a reward function comes from."""

    text: str
    """As in `reward.functions`."""
    name: str
    """As in the metrics `reward/NAME/...`: the function's in its file or module."""
    option: Literal["verifier", "regex", "format", "file", "module", "python"]
    place: str = ""
    """Absolute path of a file, dotted name of a module, or regular expression."""
    digest: str = ""
    """sha256 of the file, in hex, when the run began: a new process must not run another one."""
    code: bytes = b""
    """The function itself, pickled by cloudpickle, where a Python program gave it."""


@dataclass(frozen=True)
class Signature:
    """What a loaded function asks for."""

    kind: Literal["each", "batch", "async"]
    """How it is called: for one completion after the other (what comes with jaxrl), for a list of
    them, or for many at the same time, each in a list of its own (`async def`)."""
    needs: Sequence[str] = ()
    """Columns without which it cannot be called."""
    takes: Sequence[str] = ()
    """Parameters that it may be called without: those with defaults; `prompts`, `completions`."""
    takes_all: bool = False
    """Whether it takes every column (`**columns`)."""
