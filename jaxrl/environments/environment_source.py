"""Environments by their names: found in the run, loaded in a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxrl.data.example import JsonObject
from jaxrl.environments.environment import Environment
from jaxrl.environments.tools import SchemaTool
from jaxrl.errors import UserError, near, shown
from jaxrl.process.plugin import PYTHON, is_plugin, load_located, load_pickled, locate

KEY, ARGUMENTS = "environment.name", "environment.arguments"
PACKAGES = {
    "gymnasium": "jaxrl.environments.packages.gymnasium:Gymnasium",
    "mcp": "jaxrl.environments.packages.mcp:McpTools",
    "openenv": "jaxrl.environments.packages.openenv:OpenEnv",
    "verifiers": "jaxrl.environments.packages.verifiers_v1:Verifiers",
}
"""Name -> where it is, of those for environments of other packages; also the name of the extra that
installs the package."""
BUILT_IN = {
    "calculator": "jaxrl.environments.built_in:Calculator",
    "guess_number": "jaxrl.environments.built_in:GuessNumber",
    "text_world": "jaxrl.environments.built_in:TextWorld",
    **PACKAGES,
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
    arguments: JsonObject = field(default_factory=dict)
    """Keyword arguments for the class."""
    code: bytes = b""
    """The class, or a function that makes an instance, pickled by cloudpickle, where a Python
    program gave it."""


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the run must know of a loaded environment."""

    resets: bool
    """Whether it makes prompts of its own (`reset` is not the one of the base class)."""
    tools: Sequence[JsonObject] = ()
    """JSON schemas of its tools."""


def find(
    text: str,
    arguments: JsonObject | None = None,
    given: Mapping[str, bytes] = MappingProxyType({}),
) -> EnvironmentSource:
    """Returns the source that `environment.name` names; its code is not run.

    Args:
        arguments: `environment.arguments`; None: there are none.
        given: what a Python program gave, pickled, by its entry in the config.

    Raises:
        UserError: it names nothing.
    """
    if text.startswith(PYTHON):
        name = text.removeprefix(PYTHON).partition("@")[0]
        if text not in given:
            raise UserError(
                f"{KEY}: {text} is an environment of a Python program: give it from there, as in"
                f" train(config, environment={name})"
            )
        return EnvironmentSource(text, "", name, arguments=arguments or {}, code=given[text])
    if not is_plugin(text) and text not in BUILT_IN:
        raise UserError(
            f"unknown {KEY} {text!r}{near(text, BUILT_IN)}: it is path/to/file.py:Class,"
            f" package.module:Class or one of {', '.join(BUILT_IN)}"
        )
    place = locate(BUILT_IN.get(text, text), KEY, "Class")
    return EnvironmentSource(text, *place, arguments or {})


def load(source: EnvironmentSource) -> Callable[..., Environment]:
    """Loads and returns the class, or the function that makes an instance.

    Raises:
        UserError: it cannot be imported, is not there, or is no environment; or its file has
            changed since the run began.
    """
    if source.code:
        made: Callable[..., Environment] = load_pickled(KEY, source.text, source.code, "Class")
        return made
    try:
        found = load_located(KEY, source.place, source.attribute, source.digest, "class")
    except UserError as error:
        if source.text in PACKAGES and isinstance(error.__cause__, ImportError):
            raise UserError(
                f"{KEY}: {source.text} needs the extra `{source.text}`: pip install"
                f" 'jaxrl[{source.text}]' ({error.__cause__})"
            ) from error.__cause__
        raise
    if not inspect.isclass(found) or not issubclass(found, Environment):
        what = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise UserError(
            f"{KEY}: {source.text} is {what}, it must be a subclass of"
            " jaxrl.environments.Environment"
        )
    return found


def facts_of(
    source: EnvironmentSource, kind: Callable[..., Environment], describe: bool
) -> EnvironmentFacts:
    """Looks at an instance; what is asked of a server once in a process is then known.

    Args:
        describe: whether the schemas of its tools are wanted, which take seconds.

    Raises:
        UserError: it cannot be made, or has neither `step` nor tools, or a tool without a schema.
    """
    given = (
        f"with {ARGUMENTS}={dict(source.arguments)}" if source.arguments else "without arguments"
    )
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError) as error:  # such as a partial with arguments that it lacks
        raise UserError(f"{KEY}: {source.text} cannot be made {given}: {error}") from error
    try:
        signature.bind(**source.arguments)
    except TypeError as error:
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        takes = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise UserError(
            f"{KEY}: {source.text} cannot be made {given}: {error}; {ARGUMENTS} must be those of"
            f" {source.attribute}{takes}"
        ) from error
    try:
        made = kind(**source.arguments)
        if not isinstance(made, Environment):
            raise UserError(
                f"it makes {shown(made)}, which is no instance of jaxrl.environments.Environment"
            )
        tools = list(made.tools)
    except UserError as error:
        raise UserError(f"{KEY}: {source.text}: {error}") from error
    except Exception as error:
        raise UserError(
            f"{KEY}: {source.text} cannot be made {given}: {type(error).__name__}: {error}"
        ) from error
    if not tools and type(made).step is Environment.step:
        raise UserError(f"{KEY}: {source.text} has neither a method `step` nor `tools`")
    schemas = []
    for tool in tools if describe else ():
        if isinstance(tool, SchemaTool):
            schemas.append(tool.schema)
            continue
        from transformers.utils import get_json_schema  # takes seconds

        try:
            schema = get_json_schema(tool)
        except Exception as error:  # whatever transformers raises
            name = getattr(tool, "__name__", repr(tool))
            raise UserError(
                f"{KEY}: {source.text}: the tool {name} has no schema: "
                f"{' '.join(str(error).split())}; give its arguments type hints, and its docstring"
                " a section `Args:` with a line for each"
            ) from error
        schema["function"].pop("return", None)
        schemas.append(schema)
    if not inspect.iscoroutinefunction(made.close):
        made.close()
    return EnvironmentFacts(type(made).reset is not Environment.reset, schemas)
