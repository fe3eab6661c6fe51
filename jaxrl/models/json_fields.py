"""Reads fields of a `config.json`, which say nothing, null, or a value that may be no number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError, short
from jaxrl.process.json_types import JsonObject

MOST = 2**31 - 1
"""Of any size: what an int32 holds."""
Raw = Mapping[str, Any]
"""A model's `config.json`, as it is parsed."""
DecoderLike = Any
"""A `DecoderConfig`, for modules that its own imports."""


def given(value: Any, default: Any) -> Any:
    """Returns the value, or the default where it is null."""
    return default if value is None else value


def filled(raw: Raw, defaults: Raw) -> JsonObject:
    """Returns `raw`, with the defaults where it has nothing or null."""
    return {**raw, **defaults, **{key: value for key, value in raw.items() if value is not None}}


def size(raw: Raw, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
    """Reads a whole number from `least` to `most`; where it is absent or null, the default if there
    is one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) is not int or not least <= value <= most:
        high = type(value) is int and value > most
        limit = f"at most {most}" if high else f"at least {least}"
        raise UserError(f"{key}={short(repr(value))} must be a whole number of {limit}")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """Reads a number above 0 that float32 holds; where it is absent or null, the default if there
    is one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) not in (int, float) or not 0 < value < 3e38:
        raise UserError(f"{key}={short(repr(value))} must be a number above 0")
    return float(value)


def flag(raw: Raw, key: str, default: bool) -> bool:
    """Reads true or false; where it is absent or null, the default."""
    value = given(raw.get(key), default)
    if type(value) is not bool:
        raise UserError(f"{key}={short(repr(value))} must be true or false")
    return value


def stated_once(raw: Raw, *keys: str) -> Any:
    """Returns what one of several keys with the same meaning says, or all of them alike; null where
    none does.

    Raises:
        UserError: two of them say different things.
    """
    values = {key: raw[key] for key in keys if raw.get(key) is not None}
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        both = " and ".join(f"{key}={short(repr(value))}" for key, value in values.items())
        raise UserError(f"{both} disagree: keep one of them, or write the same")
    return first
