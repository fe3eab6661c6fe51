"""Tools that a model may call: functions, or whatever brings a JSON schema."""

from __future__ import annotations

import inspect
import itertools
import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from pydantic import TypeAdapter

from jaxrl.data.example import JsonObject
from jaxrl.errors import short

_ANY: TypeAdapter[Any] = TypeAdapter(Any, config={"ser_json_inf_nan": "constants"})
Arguments = Mapping[str, Any]
"""Of a call of a tool, by their names."""
Tool = Callable[..., Any]
LONGEST = 100_000
"""Characters of what an environment answers to a turn; what is more is left out."""
CUT_WORDS = 80
"""Room for the words about what is left out."""
LONGEST_ERROR = 2000
"""Characters of an exception's text."""
MOST_VALUES = 10_000
"""Values of a generator, or of an array that is shown as a whole."""


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
        self.schema: JsonObject = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": dict(parameters)},
        }
        required = parameters.get("required") or ()
        names = [name for name in parameters.get("properties") or () if name.isidentifier()]
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
    """Returns the JSON types that a parameter of a tool may have, as in {"integer", "null"}; None
    where its schema or type hint does not say."""
    if isinstance(tool, SchemaTool):
        properties = tool.schema["function"]["parameters"].get("properties") or {}
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


def as_text(result: object) -> str:
    """Returns what a tool returned, for the model: text as it is, bytes as UTF-8, an exception by
    its text, anything else as JSON; values that JSON does not have as Python shows them, a table or
    a long array without quotes. The end of what is longer than LONGEST is left out. Raises what a
    generator raises."""
    if isinstance(result, Iterator):
        result = list(itertools.islice(result, MOST_VALUES))
    try:
        text = _text(result)
    except Exception as error:
        what = f"a value of the type {type(result).__name__} that cannot be shown"
        text = f"Error: {what} ({type(error).__name__})"
    return cut_text(text, LONGEST).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_text(text: str, most: int) -> str:
    """Cuts a text to at most `most` characters, adding words about those that are left out; returns
    these words alone where there is no room for more."""
    if len(text) <= most:
        return text
    kept = max(most - CUT_WORDS, 0)
    return f"{text[:kept]}... ({len(text) - kept} of {len(text)} characters are left out)"


def _text(result: object) -> str:
    if isinstance(result, str):
        return str(result)
    if isinstance(result, BaseException):
        return f"Error: {type(result).__name__}: {short(str(result), LONGEST_ERROR)}"
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode(errors="backslashreplace")
    if isinstance(result, Set):  # its order is another one in each process
        result = sorted(result, key=repr)
    try:
        value = _ANY.dump_python(result, mode="json", fallback=_plain)
        if isinstance(value, str) and ("\n" in value or hasattr(result, "__array__")):
            return value
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # in a circle, bytes that are no text
        return _without_address(result)


def _plain(value: Any) -> object:
    """Converts a value that JSON does not have: an array to lists, anything else to what Python
    shows of it."""
    if hasattr(value, "tolist") and value.size <= MOST_VALUES:
        return value.tolist()
    return _text(value) if isinstance(value, BaseException) else _without_address(value)


def _without_address(value: object) -> str:
    """Returns what Python shows of a value, without the memory address, which changes nothing."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(value))
