"""Tools that a model may call: functions, or whatever brings a JSON schema."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from jaxrl.data.example import JsonObject

Arguments = Mapping[str, Any]
"""Of a call of a tool, by their names."""
Tool = Callable[..., Any]


class SchemaTool:
    """A tool that brings a JSON schema of its own, where a function's signature would give it."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: JsonObject,
        call: Callable[[str, Arguments], object],
    ):
        """
        Args:
            parameters: the JSON schema of an object, whose properties are the arguments.
            call: gets the name and the arguments of a call, and returns what a tool does.
        """
        self.__name__, self._call = name, call
        self.schema = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": dict(parameters)},
        }
        required = parameters.get("required", ())
        names = [name for name in parameters.get("properties", ()) if name.isidentifier()]
        each = [
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if name in required else None,
            )
            for name in sorted(names, key=lambda name: name not in required)
            if not keyword.iskeyword(name)
        ]
        self.__signature__ = inspect.Signature(each)

    def __call__(self, /, **arguments: object) -> object:
        return self._call(self.__name__, arguments)


def types_of(tool: Tool, parameter: str) -> set[str] | None:
    """The JSON types that a parameter of a tool may have, as in {"integer", "null"}; None where
    its schema or type hint does not say."""
    if isinstance(tool, SchemaTool):
        properties = tool.schema["function"]["parameters"].get("properties", {})
        return _types(properties.get(parameter))
    try:
        hint = inspect.signature(tool, eval_str=True).parameters[parameter].annotation
        return None if hint is inspect.Parameter.empty else _types(TypeAdapter(hint).json_schema())
    except Exception:  # no such parameter, or a hint that is no type of JSON
        return None


def _types(schema: object) -> set[str] | None:
    if not isinstance(schema, Mapping):
        return None
    if "type" in schema:
        named = schema["type"]
        return {named} if isinstance(named, str) else set(named)
    options = schema.get("anyOf", schema.get("oneOf"))
    found = [_types(option) for option in options or ()]
    return set().union(*(types or () for types in found)) if found and all(found) else None
