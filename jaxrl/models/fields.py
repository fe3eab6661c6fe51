"""Reads fields of a `config.json`, which say nothing, null, or a value that may be no number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.process.plain import JsonObject

Raw = Mapping[str, Any]
"""A model's `config.json`, as it is parsed."""
DecoderLike = Any
"""A `DecoderConfig`, for modules that its own imports."""


def given(value: Any, default: Any) -> Any:
    """The value, or the default where it is null."""
    return default if value is None else value


def filled(raw: Raw, defaults: Raw) -> JsonObject:
    """`raw`, with the defaults where it has nothing or null."""
    return {**raw, **defaults, **{key: value for key, value in raw.items() if value is not None}}


def size(raw: Raw, key: str, default: int | None = None, least: int = 1) -> int:
    """A whole number of at least `least`; where it is absent or null, the default if there is
    one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) is not int or value < least:
        raise UserError(f"{key}={value!r} must be a whole number of at least {least}")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """A number above 0; where it is absent or null, the default if there is one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{key}={value!r} must be a number above 0")
    return float(value)
