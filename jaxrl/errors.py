"""The error that is the user's to mend, and the help that it carries.

Commands turn a ``UserError`` into a few lines on stderr and exit code 2; every other exception is
ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RunError(RuntimeError):
    """A run that cannot go on: its text is the whole diagnosis, the exit code is 1."""


class UserError(ValueError):
    """Bad input: a key, a value, a path or an option that the user can change."""


def closest(name: str, choices: Iterable[str]) -> str | None:
    """The choice spelt most like ``name``, or None when none is close."""
    found = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def near(name: str, choices: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the choice closest to ``name``; empty when none is close."""
    choice = closest(name, choices)
    return "" if choice is None else f" (did you mean {choice}?)"


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """The error for a name outside a fixed set: names the near one, or else lists the set."""
    names = sorted(choices)
    hint = near(name, names) or f": one of {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}{hint}")


@contextmanager
def user_input(what: str = "") -> Iterator[None]:
    """A door: inside it a ``ValueError`` is about the user's input, and leaves as a ``UserError``.

    Only for parsing and checking: wrapped around computation it would hide our own mistakes.
    """
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{what}: {error}" if what else str(error)) from error
