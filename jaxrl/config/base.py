"""Where the keys of a run come from: a file, the quickstart or the plain defaults."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxrl.config import paths as config_paths
from jaxrl.config import yaml_text
from jaxrl.errors import UserError, user_path
from jaxrl.process.json_types import JsonObject

QUICKSTART = Path(__file__).parent.parent / "assets" / "quickstart.yaml"
BUILTIN = "builtin:quickstart"
"""The name of that file, where a config is asked for."""
OWN = ("student.model", "data.train")
"""Keys with which a run without a file is no longer the quickstart."""

MISSING = "is required and not set"
"""How the error about a key without a value and without a default ends."""

Overrides = Sequence[str] | Mapping[str, object]
"""`key=value` strings, or a mapping of keys (dotted, or nested) to values."""


@dataclass(frozen=True)
class Base:
    """Where the keys of a run come from."""

    note: str
    """For the reader of a run."""
    mapping: JsonObject
    """All keys: those of the file, the quickstart or none, and those that were set."""
    unset: Mapping[str, object]
    """The quickstart's keys that were not set, with their values; empty for another base."""
    own: tuple[str, ...] = ()
    """The keys for which a run without a file is not the quickstart."""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors inside also say which of the values that they name nobody has set."""
        try:
            yield
        except UserError as error:
            why = self._why(str(error))
            if not why:
                raise
            raise UserError(f"{error}\n{why}") from error

    def _why(self, error: str) -> str:
        if self.own and MISSING in error:
            return (
                f"with {' and '.join(self.own)} set and no --config the other keys have their"
                f" defaults; --config {BUILTIN} takes the quickstart's"
            )
        named = [
            f"{key}={yaml_text.shown(value)}"
            for key, value in self.unset.items()
            if _names(error, f"{key.rpartition('.')[2]}={yaml_text.shown(value)}")
        ]
        if not named:
            return ""
        return f"from the built-in quickstart, for there is no --config: {', '.join(named)}"


def base_of(path: str | Path | None, overrides: Overrides, mappings: Collection[str] = ()) -> Base:
    """The keys of a run.

    Args:
        path: a YAML file, or `builtin:quickstart`. None: the plain defaults where one of `OWN` is
            set, else the quickstart.
        mappings: keys whose value may be a whole mapping.

    Raises:
        UserError: the file cannot be read, or an override is none.
    """
    given = dict(yaml_text.assignments(overrides, mappings))
    own = tuple(key for key in OWN if key in given) if path is None else ()
    start: JsonObject = {}
    if own:
        note = f"no file and {' and '.join(own)} set, so the defaults"
    elif path is None or str(path) == BUILTIN:
        start, note = read(QUICKSTART), "the built-in quickstart"
    else:
        start, note = read(user_path(path)), str(path)
    if given:
        note += f", with {len(given)} key{'s' if len(given) > 1 else ''} set otherwise"
    known = dict(yaml_text.assignments(start)) if path is None else {}
    unset = {key: value for key, value in known.items() if key not in given}
    return Base(f"config: {note}", yaml_text.assign(start, given), unset, own)


def read(path: Path) -> JsonObject:
    """The mapping in a YAML file, in which paths that exist beside the file are absolute."""
    return config_paths.beside(yaml_text.read_mapping(path), path.absolute().parent)


def _names(error: str, value: str) -> bool:
    """Whether an error names `word=value`."""
    return re.search(rf"(?<!\w){re.escape(value)}(?![\w.])", error) is not None
