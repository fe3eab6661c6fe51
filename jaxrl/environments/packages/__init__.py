"""Environments of other packages; each module needs the extra of its own name."""

from __future__ import annotations

import hashlib
import re

from jaxrl.data.example import Columns
from jaxrl.environments.environment import Unavailable


def seed_of(row: Columns, column: str) -> int:
    """Returns the whole number in a row's column, which a table may have made a float and a CSV
    file a text; in a row without it, one that the prompt chooses.

    Raises:
        Unavailable: the column has something else.
    """
    value = row.get(column)
    if value is None:
        digest = hashlib.sha256(str(row["prompt"]).encode()).digest()
        return int.from_bytes(digest[:8], "little") % 2**31
    number = re.fullmatch(r"([0-9]+)(\.0*)?", str(value))
    if number is None:
        raise Unavailable(f"the row's {column}={value!r} must be an integer, 0 or more")
    return int(number[1])
