"""The config of a run: one frozen class per section, a docstring under each key.

The keys of models and their devices are in `config.roles`, all others in `config.settings` and
`config.run_config`; conditions on several sections are in `config.rules`. The class defaults suit
models of one to several billion parameters on accelerators; the built-in quickstart
(``jaxrl/assets/quickstart.yaml``) sets its own. ``student.model``, ``data.train`` and, where the
algorithm learns from a teacher, ``teacher.model`` have no default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from jaxrl.config import keys as config_keys
from jaxrl.config import paths as config_paths
from jaxrl.config import yaml_text
from jaxrl.config.base import Base, Overrides, base_of
from jaxrl.config.rules import rules
from jaxrl.config.run_config import RunConfig
from jaxrl.config.section import Section
from jaxrl.errors import UserError, shown
from jaxrl.process.json_types import JsonObject

CONFIG_FILE = "config.yaml"
"""Name of the config in a run directory."""


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

    def _rules(self) -> Iterator[str]:
        return rules(self)

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Overrides = ()) -> Self:
        """The config of a YAML file, with some keys overridden.

        Args:
            path: the file. None: the built-in quickstart or, where `student.model` or `data.train`
                is among the overrides, the defaults. `builtin:quickstart`: the quickstart in any
                case.
            overrides: `["steps=10", "optimizer.learning_rate=1e-5"]`, or `{"steps": 10,
                "optimizer.learning_rate": 1e-5}`.

        Raises:
            UserError: for any mistake that the user can correct; a few lines at most.
        """
        return cls.load_base(path, overrides)[0]

    @classmethod
    def of(cls, given: Self | str | Path | Mapping[str, object]) -> Self:
        """Returns a config as it is, and loads any other: a file, or the keys of a run as on its
        command line (dotted or nested).

        Raises:
            UserError: bad input.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls.load(overrides=given)
        if isinstance(given, str | Path):
            return cls.load(given)
        raise UserError(
            f"a run is given by a Config, a YAML file or a mapping of keys, not {shown(given)}"
        )

    @classmethod
    def load_base(
        cls, path: str | Path | None = None, overrides: Overrides = ()
    ) -> tuple[Self, Base]:
        """`load`, and the source of the keys that nobody set."""
        if isinstance(overrides, str):
            raise UserError(
                f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
            )
        base = base_of(path, overrides, config_keys.mappings(cls))
        with base.explained():
            # So that a run can be resumed from any folder.
            here = config_paths.working_directory()
            mapping = config_paths.beside(base.mapping, here, config_paths.CODE)
            return cls.parse(mapping), base

    @classmethod
    def parse(cls, mapping: JsonObject) -> Self:
        """The config that nested dicts describe; raises ``UserError`` naming the key."""
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
        """YAML of every key with its value; ``load`` reads it back to an equal config."""
        return yaml_text.dump_mapping(self.model_dump(mode="json"))
