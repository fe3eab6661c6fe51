"""Values that are written as JSON or YAML, or handed on by name."""

from __future__ import annotations

import math
from typing import Any

JsonObject = dict[str, Any]
"""An object of JSON or a mapping of YAML, as it is parsed or written."""
Keywords = dict[str, Any]
"""Keyword arguments of a function that is called later, or in several places."""


def finite(value: object) -> float | None:
    """What a user's function returned, as a float; None if it is no finite number: a text, an array
    of several numbers, a whole number that no float holds, infinity."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
