"""The config of a run: one frozen class per section, a docstring under each key, and where the keys
of a run come from: a file, the quickstart or the plain defaults.

The keys of models and their devices are in `config.roles`, all others in `config.settings` and
`config.run_config`, with the conditions on several sections. The class defaults suit models of one
to several billion parameters on accelerators; the built-in quickstart (``configs/quickstart.yaml``)
sets its own. ``student.model``, ``data.train`` and, where the algorithm learns from a teacher,
``teacher.model`` have no default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from jaxrl.config import keys as config_keys
from jaxrl.config import paths as config_paths
from jaxrl.config import yaml_text
from jaxrl.config.builtin_configs import config_file
from jaxrl.config.run_config import RunConfig
from jaxrl.config.section import Section
from jaxrl.config.section import show_value as written
from jaxrl.errors import UserError, counted, shown
from jaxrl.process.json_types import JsonObject

CONFIG_FILE = "config.yaml"
"""Name of the config in a run directory."""
BUILTIN = "builtin:quickstart"
QUICKSTART = config_file(BUILTIN)
OWN = ("student.model", "data.train")
"""Keys with which a run without a file is no longer the quickstart."""

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
            if self.own and config_keys.MISSING in str(error):
                raise UserError(
                    f"{error}\nwith {' and '.join(self.own)} set and no --config the other keys"
                    f" have their defaults; --config {BUILTIN} takes the quickstart's"
                ) from error
            unset = {key: written(value) for key, value in self.unset.items()}
            named = []
            for key, value in unset.items():
                text = f"{key.rpartition('.')[2]}={value}"
                if re.search(rf"(?<!\w){re.escape(text)}(?![\w.])", str(error)) is not None:
                    named.append(f"{key}={value}")
            if not named:
                raise
            raise UserError(
                f"{error}\nfrom the built-in quickstart, because there is no --config:"
                f" {', '.join(named)}"
            ) from error


def read_keys(path: Path) -> JsonObject:
    """Returns the mapping in a YAML file; paths that exist beside the file are absolute."""
    return config_paths.beside(yaml_text.read_mapping(path), path.absolute().parent)


class _Parsed(type(Section)):  # type: ignore[misc]
    """Makes `Config(...)` raise the same errors as `Config.load`."""

    def __call__(cls, **mapping: object) -> Any:
        try:
            return cls.parse(mapping)
        except UserError as error:
            raise UserError(
                f"{error}\nConfig(...) takes every section as a mapping; Config.load(FILE,"
                ' overrides={"steps": 2}) takes a file or the quickstart, and sets some keys'
            ) from None


class Config(RunConfig, metaclass=_Parsed):
    """A run: what is trained, on what, where and how."""

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """Returns the config of a YAML file, with some keys overridden.

        Args:
            path: the file. None: the built-in quickstart or, where `student.model` or `data.train`
                is among the overrides, the defaults. `builtin:NAME`: one that comes with jaxrl
                (`config.builtin_configs`).
            overrides: `["steps=10", "optimizer.learning_rate=1e-5"]`, or `{"steps": 10,
                "optimizer.learning_rate": 1e-5}`.

        Raises:
            UserError: for any mistake that the user can correct; a few lines at most.
        """
        return cls.load_base(path, overrides)[0]

    @classmethod
    def of(
        cls,
        given: Self | str | Path | Mapping[str, object] | None,
        overrides: Overrides = (),
        change: Callable[[JsonObject], JsonObject] = lambda mapping: mapping,
    ) -> Self:
        """Returns a config as it is, and loads any other: a file, the keys of a run as on its
        command line (dotted or nested), or None for the quickstart.

        Args:
            overrides: keys that are set otherwise, as in `load`.
            change: what else becomes of the mapping of all keys.

        Raises:
            UserError: bad input.
        """
        overrides = dict(yaml_text.assignments(overrides, config_keys.mappings(cls)))
        if isinstance(given, cls):
            mapping, here = given.model_dump(mode="json"), config_paths.working_directory()
            changed = change(yaml_text.assign(mapping, overrides))
            changed = config_paths.beside(changed, here, config_paths.CODE)
            return given if changed == mapping else cls.parse(changed)
        if given is None or isinstance(given, Mapping):
            flat = yaml_text.assignments(given or {}, config_keys.mappings(cls))
            return cls.load_base(None, {**dict(flat), **overrides}, change)[0]
        if isinstance(given, str | Path):
            return cls.load_base(given, overrides, change)[0]
        raise UserError(
            f"a run is given by a Config, a YAML file or a mapping of keys, not {shown(given)}"
        )

    @classmethod
    def load_base(
        cls,
        path: str | Path | None = None,
        overrides: Overrides = (),
        change: Callable[[JsonObject], JsonObject] = lambda mapping: mapping,
    ) -> tuple[Self, Base]:
        """Does what `load` does, and also returns where the keys come from."""
        if isinstance(overrides, str):
            raise UserError(
                f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
            )
        given = dict(yaml_text.assignments(overrides, config_keys.mappings(cls)))
        own = tuple(key for key in OWN if key in given) if path is None else ()
        start: JsonObject = {}
        if own:
            note = f"no file and {' and '.join(own)} set, so the defaults"
        elif path is None or str(path) == BUILTIN:
            start, note = read_keys(QUICKSTART), "the built-in quickstart"
        else:
            start, note = read_keys(config_file(path)), str(path)
        if given:
            note += f", with {counted(len(given), 'key')} set otherwise"
        quickstart = dict(yaml_text.assignments(start)) if path is None else {}
        unset = {key: value for key, value in quickstart.items() if key not in given}
        base = Base(f"config: {note}", yaml_text.assign(start, given), unset, own)
        with base.explained():
            # So that a run can be resumed from any folder.
            here = config_paths.working_directory()
            mapping = config_paths.beside(base.mapping, here, config_paths.CODE)
            return cls.parse(change(mapping)), base

    @classmethod
    def parse(cls, mapping: JsonObject) -> Self:
        """Returns the config that nested dicts describe; raises ``UserError`` naming the key."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise UserError(config_keys.explain(cls, error)) from None
        except UnicodeEncodeError as error:  # a validator of pydantic's reads texts as UTF-8
            half = ascii(error.object[error.start])[1:-1]
            raise UserError(
                f"{ascii(error.object)[:80]}: {half} is half of a surrogate pair, not text"
            ) from None

    def dump(self) -> str:
        """Returns YAML of every key with its value; ``load`` reads it back to an equal config."""
        return yaml_text.dump_mapping(self.model_dump(mode="json"))
