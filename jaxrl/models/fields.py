"""Reads fields of a `config.json`, which say nothing, null, or a value that may be no number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError

Raw = Mapping[str, Any]
"""A model's `config.json`, as it is parsed."""
DecoderLike = Any
"""A `DecoderConfig`, for modules that its own imports."""


def given(value: Any, default: Any) -> Any:
    """The value, or the default where it is null."""
    return default if value is None else value


def size(raw: Raw, key: str, default: int | None = None) -> int:
    """A whole number of at least 1; where it is absent or null, the default if there is one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) is not int or value < 1:
        raise UserError(f"{key}={value!r} must be a whole number of at least 1")
    return value


def number(raw: Raw, key: str, default: float | None = None) -> float:
    """A number above 0; where it is absent or null, the default if there is one."""
    value = raw[key] if default is None else given(raw.get(key), default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{key}={value!r} must be a number above 0")
    return float(value)
