"""Values that are written as JSON or YAML, or handed on by name."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from jaxrl.errors import UserError

JsonObject = dict[str, Any]
"""An object of JSON or a mapping of YAML, as it is parsed or written."""
Keywords = dict[str, Any]
"""Keyword arguments of a function that is called later, or in several places."""


MOST_DIGITS = 18
"""Of a whole number in a file that jaxrl writes."""


def parse_json(text: str | bytes) -> Any:
    """Returns a value of JSON as jaxrl writes it. Raises ValueError for any other text: numbers
    that are not finite or have too many digits, nesting that is too deep."""
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_float=_finite_float, parse_int=_small_int
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no finite number")


def _finite_float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _small_int(text: str) -> int:
    return int(text) if len(text) <= MOST_DIGITS + text.startswith("-") else _no_number(text)


def read_file(path: Path) -> bytes:
    """Reads a file. Raises OSError, also for a path that is no file: a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return path.read_bytes()


@contextmanager
def name_file_in_errors(file: Path) -> Iterator[None]:
    """Puts the file before the errors that are raised inside."""
    try:
        yield
    except KeyError as missing:
        raise UserError(f"{file}: the field {missing} is missing") from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def read_json(file: Path, kind: type = dict) -> Any:
    """Reads the contents of a JSON file, an object or what `kind` says."""
    if file.exists() and not file.is_file():  # a pipe never ends
        raise UserError(f"{file}: cannot be read: it is not a file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deep
        raise UserError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "a list"
        raise UserError(f"{file}: {wanted} is needed, this is {json.dumps(value)[:80]}")
    return value


def finite(value: object) -> float | None:
    """Converts the result of a user's function to a float; None if it is no finite number: a text,
    an array of several numbers, a whole number that no float holds, infinity."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
