"""The seed of an episode, by the row that it begins with."""

from __future__ import annotations

import hashlib

from jaxrl.data.example import Columns
from jaxrl.environments.environment import Unavailable

MOST = 2**31


def seed_of(row: Columns, column: str) -> int:
    """Returns the number in a row's column; in a row without it, one that the prompt chooses.

    Raises:
        Unavailable: the column has something else.
    """
    value = row.get(column)
    if value is None:
        digest = hashlib.sha256(str(row["prompt"]).encode()).digest()
        return int.from_bytes(digest[:8], "little") % MOST
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unavailable(f"the row's {column}={value!r} must be a whole number, 0 or more")
    return value
