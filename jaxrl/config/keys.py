"""The keys of a config class: listed for ``--help``, and named in full when one is wrong."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from jaxrl.config.aliases import alias_hint
from jaxrl.config.base import MISSING
from jaxrl.errors import UserError, closest, near

SHOWN_ERRORS = 4
"""Lines in one error message; what is beyond is counted."""

_PLAIN = {
    "tuple_type": "input should be a string or a list of strings",
    "too_short": "the list should not be empty",
}
"""Wording for the error types whose own names Python types or internals."""


@dataclass(frozen=True)
class Key:
    """One settable key."""

    path: str
    """Dotted, as in an override."""
    type: str
    """For a reader: `int`, `gkd|sft`, `str or null`."""
    default: Any
    """Its default value."""
    required: bool
    """True when there is no default."""
    doc: str
    """The docstring under the field, on one line."""


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key under ``model`` in the order of definition, a section's keys after the others."""
    for name, field in model.model_fields.items():
        if _section(field.annotation) is None:
            yield Key(
                path=prefix + name,
                type=_type_name(field.annotation),
                default=None if field.is_required() else field.default,
                required=field.is_required(),
                doc=" ".join((field.description or "").split()),
            )
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from keys(section, f"{prefix}{name}.")


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of every section under ``model``."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield prefix + name, " ".join((section.__doc__ or "").split())
            yield from sections(section, f"{prefix}{name}.")


def mappings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key under ``model`` whose value may be a mapping with names of the user's choice."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from mappings(section, f"{prefix}{name}.")
        elif _takes_mapping(field.annotation):
            yield prefix + name


def fill_sections(model: type[BaseModel], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """``mapping`` with every section that is absent, or left empty, as an empty dict."""
    result = dict(mapping)
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        given = mapping.get(name)
        if section is not None and (given is None or isinstance(given, dict)):
            result[name] = fill_sections(section, {} if given is None else given)
    return result


def refuse_unknown(model: type[BaseModel], mapping: Mapping[str, Any]) -> None:
    """Raises ``UserError`` naming each key that no class defines, with the near one."""
    known = [key.path for key in keys(model)]
    lines = [
        f"unknown key {path}{_near_path(path, known)}" for path in _unknown_paths(model, mapping)
    ]
    if lines:
        raise UserError(_shorten(lines))


def explain(error: ValidationError) -> str:
    """A validation error in a few lines: the dotted key, what is wrong, the value."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        line = _explain_one(item)
        if line not in lines:
            lines.append(line)
    return _shorten(lines)


def _explain_one(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
    if item["type"] == "missing":
        return f"{path} {MISSING}"
    if item["type"] in ("model_type", "model_attributes_type"):
        return f"{path} is a section, not a value (got {_short(item['input'])}): set {path}.KEY"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{path}: {message}" if path else message
    message = _PLAIN.get(item["type"], message[:1].lower() + message[1:])
    return f"{path}: {message}, got {_short(item['input'])}"


def _is_union_branch(part: int | str) -> bool:
    """True for what pydantic adds to a location for a union, such as ``constrained-int``."""
    return isinstance(part, str) and not part.isidentifier()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _shorten(lines: list[str]) -> str:
    hidden = len(lines) - SHOWN_ERRORS
    shown = lines[:SHOWN_ERRORS] + ([f"and {hidden} more"] if hidden > 0 else [])
    return "\n".join(shown)


def _unknown_paths(
    model: type[BaseModel], mapping: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for name, value in mapping.items():
        field = model.model_fields.get(name)
        if field is None:
            yield from _leaves(prefix + name, value)
            continue
        section = _section(field.annotation)
        if section is not None and isinstance(value, dict):
            yield from _unknown_paths(section, value, f"{prefix}{name}.")
        elif section is None and isinstance(value, dict) and not _takes_mapping(field.annotation):
            yield from _leaves(prefix + name, value)


def _leaves(path: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, below in value.items():
        yield from _leaves(f"{path}.{name}", below)


def _near_path(path: str, known: list[str]) -> str:
    """A hint at the key that was meant: in the same section, else the same word, else any."""
    if path in known:
        return ": in a file, nest it (a section's name, then the key indented below)"
    exact = alias_hint(path, whole=True)
    if exact:
        return exact
    section, _, word = path.rpartition(".")
    same_word = [key for key in known if key.rpartition(".")[2] == word]
    if same_word and not section:
        return f" (did you mean {' or '.join(same_word[:3])}?)"
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    sibling = closest(word, siblings)
    if sibling is not None:
        return f" (did you mean {siblings[sibling]}?)"
    alias = alias_hint(path)
    if alias:
        return alias
    return near(path, same_word) or near(path, known) or " (--help lists them all)"


def _section(annotation: Any) -> type[BaseModel] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_section else None


def _takes_mapping(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_takes_mapping(argument) for argument in get_args(annotation))
    if hasattr(annotation, "__metadata__"):
        return _takes_mapping(get_args(annotation)[0])
    return get_origin(annotation) is dict


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of NAME to {_type_name(arguments[1])}"
    if hasattr(annotation, "__metadata__"):
        return _type_name(arguments[0])
    return "null" if annotation is type(None) else annotation.__name__
