"""Environments by their names: found in the run, loaded in a process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.environments.environment import Environment
from jaxrl.errors import UserError, near
from jaxrl.process.plugin import digest_of, is_plugin, load_object, locate

KEY = "environment.name"
BUILT_IN = {
    "calculator": "jaxrl.environments.calculator:Calculator",
    "guess_number": "jaxrl.environments.guess_number:GuessNumber",
    "text_world": "jaxrl.environments.text_world:TextWorld",
}
"""Name -> where it is."""


@dataclass(frozen=True)
class EnvironmentSource:
    """Where an environment comes from."""

    text: str
    """As in `environment.name`."""
    place: str
    """Absolute path of a file, or dotted name of a module."""
    attribute: str
    """Name of the class there."""
    digest: str = ""
    """sha256 of the file, in hex, when the run began; "" of a module."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the run must know of a loaded environment."""

    resets: bool
    """Whether it makes prompts of its own (`reset` is not the one of the base class)."""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of its tools."""


def find(text: str) -> EnvironmentSource:
    """The source that `environment.name` names; its code is not run.

    Raises:
        UserError: it names nothing.
    """
    if not is_plugin(text) and text not in BUILT_IN:
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, BUILT_IN)}: it is path/to/file.py:Class,"
            f" package.module:Class or one of {', '.join(BUILT_IN)}"
        )
    return EnvironmentSource(text, *locate(BUILT_IN.get(text, text), KEY, "Class"))


def load(source: EnvironmentSource) -> type[Environment]:
    """The class.

    Raises:
        UserError: it cannot be imported, is not there, or is no environment; or its file has
            changed since the run began.
    """
    if source.digest and digest_of(Path(source.place)) != source.digest:
        raise UserError(
            f"{KEY}: {source.place} has changed since the run began: some of its episodes would be"
            " of another environment; start the run again"
        )
    try:
        found = load_object(f"{source.place}:{source.attribute}", "class ")
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from error.__cause__
    if not inspect.isclass(found) or not issubclass(found, Environment):
        what = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise UserError(
            f"{KEY}: {source.text} is {what}, it must be a subclass of"
            " jaxrl.environments.Environment"
        )
    return found


def facts_of(source: EnvironmentSource, kind: type[Environment]) -> EnvironmentFacts:
    """Looks at an instance.

    Raises:
        UserError: it cannot be made, or has neither `step` nor tools, or a tool without a schema.
    """
    try:
        made = kind()
    except Exception as error:
        raise UserError(
            f"{KEY}: {source.text} cannot be made without arguments: {type(error).__name__}:"
            f" {error}"
        ) from error
    if not made.tools and kind.step is Environment.step:
        raise UserError(f"{KEY}: {source.text} has neither a method `step` nor `tools`")
    schemas = [_schema(source, tool) for tool in made.tools]
    if not inspect.iscoroutinefunction(made.close):
        made.close()
    return EnvironmentFacts(kind.reset is not Environment.reset, schemas)


def _schema(source: EnvironmentSource, tool: Any) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # takes seconds

    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # whatever transformers raises
        name = getattr(tool, "__name__", repr(tool))
        reason = " ".join(str(error).split())
        raise UserError(
            f"{KEY}: {source.text}: the tool {name} has no schema: {reason}; give its arguments"
            " type hints, and its docstring a section `Args:` with a line for each"
        ) from error
    schema["function"].pop("return", None)
    return schema
