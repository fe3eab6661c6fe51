"""What columns of data mean in the field's libraries, and which of a run's data nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from jaxrl.data.rows import listed
from jaxrl.errors import closest

ROWS = Path(__file__).parent.parent / "assets" / "columns.yaml"


@dataclass(frozen=True)
class Column:
    """A column of the field, under each of its names."""

    names: tuple[str, ...]
    libraries: str
    meaning: str
    key: str | None
    """The key of `data` that reads such a column; None: there is none."""


COLUMNS = tuple(
    Column(tuple(names.split()), *rest)
    for names, *rest in yaml.safe_load(ROWS.read_text(encoding="utf-8"))
)
_LISTED = 8
"""Columns that the note on the others names."""
WORDS = {name: column for column in COLUMNS for name in column.names}


def unread_notes(
    label: str, columns: Iterable[str], read: Collection[str], passed_to: str
) -> list[str]:
    """Makes a note for each column that nothing reads and that has, or nearly has, the name of
    one of the field; and one that counts the others.

    Args:
        columns: of the data.
        read: those that a key reads, or that code or a template names.
        passed_to: who gets every column; "": nobody.
    """
    left = [name for name in columns if name not in read and "." not in name]
    notes, others = list[str](), list[str]()
    for name in left:
        column, hint = WORDS.get(name), closest(name, WORDS, cutoff=0.8)
        if column is not None:
            way = "nothing reads it" if column.key is None else f"set data.{column.key}={name}"
            notes.append(f"{label}: column `{name}`: {column.meaning} ({column.libraries}); {way}")
        elif hint:
            notes.append(f"{label}: column `{name}`: nothing reads it (did you mean {hint}?)")
        else:
            others.append(name)
    if others:
        who = f"passed to {passed_to} alone" if passed_to else "read by nothing"
        count = "1 other column is" if len(others) == 1 else f"{len(others)} other columns are"
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        notes.append(f"{label}: {count} {who}: {listed(others[:_LISTED])}{more}")
    return notes
