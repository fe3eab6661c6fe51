"""Errors of a run, helpers for their messages, and paths that users name.

Commands turn a ``UserError`` into a few lines on stderr and exit code 2. Every other exception
except ``RunError`` is a bug of jaxrl and keeps its traceback.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Self

FILES = re.compile(r"(?<![\w/.])(?:docs|notebooks|scripts)/[\w-]+\.(?:md|ipynb|py|sbatch)\b")
"""Files of the source tree that messages and docstrings name; an installed package lacks them."""
DOCUMENTATION = "Documentation"
"""The entry of `project.urls` in pyproject.toml that has the address of the source tree."""


class RunError(RuntimeError):
    """A run that cannot continue. Its text is the whole diagnosis, and the exit code is 1."""


class Stopped(RunError):
    """The run is ending and has dropped this call; raised where its value is asked for."""


class StopTraining(BaseException):
    """Raised by code of the user's (a reward function, an environment, a verifier, `on_step`): the
    run ends early, as a run that has done all of its steps.

    It saves what is trained and what is in flight, and exports the model; its exit code is 0, and
    the same command goes on from there. A batch for which it was raised before its update is not
    trained on: the run that resumes samples or scores it again.

        raise jaxrl.StopTraining("the budget of the judge is spent")

    It is no `Exception`, so that the `except Exception` of a function that bears with its own
    failures lets it pass.
    """

    by = ""
    """What raised it, as in `reward.functions: judge.py:score`; set on its way to the run."""

    def from_code(self, by: str) -> Self:
        """Returns it with what raised it, unless that is known."""
        self.by = self.by or by
        return self


class UserError(ValueError):
    """Bad input: a key, a value, a path or an option that the user can change."""


class Refused(ValueError):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class NotFinite(RunError, UserError):
    """A model's output holds NaN or infinity; the text says where they begin. The exit code is that
    of a run that cannot continue, though the model is the user's."""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the choice spelt most like ``name``, or None when none is close.

    Args:
        cutoff: least similarity, from 0 to 1 (`difflib`'s ratio).
    """
    similar = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return similar[0] if similar else None


def near(name: str, choices: Iterable[str]) -> str:
    """Returns `` (did you mean X?)`` for the choice closest to ``name``; empty when none is
    close."""
    choice = closest(name, choices)
    return "" if choice is None else f" (did you mean {choice}?)"


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """Returns the error for a name outside a fixed set. Names the most similar one, or else lists
    the set."""
    names = sorted(choices)
    hint = near(name, names) or f": one of {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}{hint}")


def short(text: str, most: int = 80) -> str:
    """Cuts a text of the user's to at most `most` characters, for a message."""
    return text if len(text) <= most else text[: most - 3] + "..."


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, as in `1 device`, `2 devices`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """Returns a value of the user's for a message, with its type."""
    return f"{short(repr(value))} ({type(value).__name__})"


def with_addresses(text: str) -> str:
    """Returns a text in which each file of the source tree that it names, as docs/limits.md, has
    its address; without an address in the package's metadata the text is unchanged."""
    if FILES.search(text) is None:
        return text
    try:
        urls = metadata.metadata("jaxrl").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return text
    address = dict(url.split(", ", 1) for url in urls).get(DOCUMENTATION)
    return text if address is None else FILES.sub(rf"{address.rstrip('/')}/\g<0>", text)


@contextmanager
def user_input(what: str = "") -> Iterator[None]:
    """Turns a ``ValueError`` inside the block into a ``UserError``.

    Only for parsing and checking the user's input: around computation it would hide bugs.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}: {error}" if what else str(error)) from error


@contextmanager
def about(place: object) -> Iterator[None]:
    """Puts a place, such as a key or a file, before the messages of user errors in the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def user_path(text: str | os.PathLike[str]) -> Path:
    """Returns the path that a text of the user's names, `~` expanded, whether it is there or not.

    Raises:
        UserError: nothing can have that name, what has it cannot be looked at, or it is no name.
    """
    if not isinstance(text, str | os.PathLike):
        raise UserError(f"a path is a text or a pathlib.Path, not {shown(text)}")
    name = os.fspath(text)
    try:
        path = Path(name).expanduser()
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: `~` of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{short(name)!r} cannot be a path: {reason}") from None
    return path
