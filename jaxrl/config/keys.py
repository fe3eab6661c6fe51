"""The keys of a config class: listed for ``--help``, and named in full when one is wrong."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from jaxrl.config.section import LARGEST, OnResume, Section, show_value
from jaxrl.config.settings import EVALUATED, NOT_EVALUATED
from jaxrl.errors import UserError, closest, near, short

ALL = " (--help all lists them)"
SHOWN_ERRORS = 4
"""Lines in one error message; what is beyond is counted."""

MISSING = "is required and not set"
"""How the error about a key without a value and without a default ends."""
WITH_ARGUMENTS = ("algorithm",)
"""Keys for a name that also take a mapping of `name` and `arguments`."""
ALSO_MAPPINGS = ("mesh", *WITH_ARGUMENTS, *(f"{key}.arguments" for key in WITH_ARGUMENTS))
"""Keys for text that also take a mapping."""
BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
"""Name of a bound in JSON schema -> words for it."""
MAPPING = "mapping of NAME"
"""How the type of a key that takes a mapping begins."""
_PLAIN = {
    "tuple_type": "input should be a string or a list of strings",
    "too_short": "it should not be empty",
}
"""Wording for the error types whose own names Python types or internals."""


OTHER_LIBRARIES = Path(__file__).parent.parent / "assets" / "other_libraries.yaml"
"""What the keys of TRL, verl and others are called here, or that they are not here."""


@dataclass(frozen=True)
class Key:
    """One settable key."""

    path: str
    """Dotted, as in an override."""
    type: str
    """For a reader: `int`, `gkd|sft`, `str or null`."""
    default: object
    """Its default value."""
    required: bool
    """True when there is no default."""
    choices: tuple[str, ...]
    """Its values, where these are some words; empty where they are any text, numbers, ..."""
    doc: str
    """The docstring under the field, on one line."""
    on_resume: OnResume
    """What a change does to a run that resumes."""

    @property
    def default_text(self) -> str:
        """Returns the default as an override is written; `required` where there is none."""
        return "required" if self.required else show_value(self.default)


class Group(NamedTuple):
    """The keys of one section."""

    path: str
    """Dotted; empty for the keys of no section."""
    model: type[Section]
    keys: tuple[Key, ...]

    @property
    def doc(self) -> str:
        """Returns the docstring of the section, on one line."""
        return " ".join((self.model.__doc__ or "").split())


def groups(model: type[Section], prefix: str = "") -> Iterator[Group]:
    """Yields the keys of ``model`` and then of each section in it, in the order of definition."""
    fields = model.model_fields.items()
    below: dict[str, type[Section]] = {
        name: field.annotation
        for name, field in fields
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    own = (
        Key(
            path=prefix + name,
            type=_type_name(field.annotation),
            default=None if field.is_required() else field.default,
            required=field.is_required(),
            choices=_choices(field.annotation),
            doc=" ".join((field.description or "").split()),
            on_resume=next((m for m in field.metadata if isinstance(m, OnResume)), model.on_resume),
        )
        for name, field in fields
        if name not in below
    )
    yield Group(prefix.rstrip("."), model, tuple(own))
    for name, section in below.items():
        yield from groups(section, f"{prefix}{name}.")


def keys(model: type[Section]) -> Iterator[Key]:
    """Yields every key under ``model``, in the order of ``groups``."""
    return (key for group in groups(model) for key in group.keys)


def under(path: str, prefixes: Sequence[str]) -> bool:
    """Returns whether a key is one of some keys, or in one of some sections."""
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


def read_by_evaluations(path: str) -> bool:
    """Returns whether an evaluation without a run reads the key."""
    return under(path, EVALUATED) and not under(path, NOT_EVALUATED)


def mappings(model: type[Section]) -> list[str]:
    """Returns every key under ``model`` whose value may be a mapping with the user's names."""
    return [*(key.path for key in keys(model) if MAPPING in key.type), *ALSO_MAPPINGS]


def allowed(group: Group) -> dict[str, str]:
    """Maps each key of a group to its type and the bounds of its numbers, as in `int, at least
    1`."""
    fields = group.model.model_json_schema()["properties"]
    found = {}
    for key in group.keys:
        schema, found[key.path] = fields[key.path.rpartition(".")[2]], key.type
        for branch in (schema, *schema.get("anyOf", ())):
            for name, words in BOUNDS.items():
                if name in branch and branch[name] != LARGEST:  # the bound of all integers
                    found[key.path] += f", {words} {branch[name]:g}"
    return found


_BRANCH = re.compile(r".*\[|constrained-(int|float|str)$")


def explain(model: type[Section], error: ValidationError) -> str:
    """Returns a validation error in a few lines: the dotted key, what is wrong, the value.

    Unknown keys come alone: what else is wrong may follow from them.
    """
    lines, types_of = list[str](), {key.path: key.type for key in keys(model)}
    for item in error.errors(include_url=False):
        # pydantic adds to a location what names a branch of a union, such as `constrained-int`.
        parts = (part for part in item["loc"] if not _BRANCH.match(str(part)))
        path, message = ".".join(map(str, parts)), item["msg"].removeprefix("Value error, ")
        got = short(repr(item["input"]))
        if item["type"] == "missing":
            lines.append(f"{path} {MISSING}")
        elif item["type"] in ("model_type", "model_attributes_type"):
            lines.append(f"{path} is a section, not a value (got {got}): set {path}.KEY")
        elif item["type"] == "value_error":  # a line for each broken rule of a section
            lines += (f"{path}: {line}" if path else line for line in message.splitlines())
        else:
            message = _PLAIN.get(item["type"], message[:1].lower() + message[1:])
            if item["type"] == "tuple_type" and "list of float" in types_of.get(path, ""):
                message = "it should be a list of numbers, as in [1, 0.5]"
            lines.append(f"{path}: {message}, got {got}")
            word = item["input"]
            if item["type"] in ("string_type", "tuple_type") and isinstance(word, bool | None):
                lines[-1] += f" (as a word it is written in quotes: '{show_value(word)}')"
    return _unknown(model, error) or _shorten(list(dict.fromkeys(lines)))


def refuse_unknown(model: type[Section], mapping: Mapping[str, object]) -> None:
    """Raises ``UserError`` naming each key that no class defines; values are not judged."""
    # Without texts, so that no algorithm of the user's is loaded.
    names = {
        key: None if isinstance(value, str) or key in WITH_ARGUMENTS else value
        for key, value in mapping.items()
    }
    try:
        model.model_validate(names)
    except ValidationError as error:
        if text := _unknown(model, error):
            raise UserError(text) from None


def _unknown(model: type[Section], error: ValidationError) -> str:
    known, paths = [key.path for key in keys(model)], list[str]()
    for item in error.errors(include_url=False):
        # Every key in what was given to no key at all, or in a mapping given to a plain key.
        given, where = item["input"], item["loc"]
        plain = item["type"] not in ("missing", "value_error", "too_short")
        named = all(isinstance(part, str) for part in where)  # not an entry of a list
        if item["type"] == "extra_forbidden" or (plain and named and isinstance(given, dict)):
            words = (str(part) for part in where if not str(part).startswith("["))  # `[mapping]`
            paths += leaf_paths(".".join(words), given)
    return _shorten([f"unknown key {path}{near_key(path, known)}" for path in map(short, paths)])


def _shorten(lines: list[str]) -> str:
    hidden = len(lines) - SHOWN_ERRORS
    shown = lines[:SHOWN_ERRORS] + ([f"and {hidden} more"] if hidden > 0 else [])
    return "\n".join(shown)


def leaf_paths(path: str, value: object) -> Iterator[str]:
    """Yields the dotted keys of a mapping, of its inner ones too, below a path."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for name, below in value.items():
        yield from leaf_paths(f"{path}.{name}", below)


def near_key(path: str, known: list[str]) -> str:
    """Returns a hint at the key meant: in the same section, else the same word, else any.

    A guess from another section must be the same word, or one that differs by a letter or two:
    sections share many words, and a far-fetched guess costs more than none.
    """
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
    sibling = closest(word, siblings, cutoff=0.65)
    if sibling is not None:
        return f" (did you mean {siblings[sibling]}?)"
    words = path.split(".")
    tails = [".".join(words[i:]) for i in range(1, len(words) - 1)]
    if ours := [tail for tail in tails if tail in known]:  # under other first words
        return f" (did you mean {ours[0]}?)"
    alias = alias_hint(path)
    if alias:
        return alias
    spelled = closest(word, {key.rpartition(".")[2] for key in known}, cutoff=0.85)
    similar = [key for key in known if key.rpartition(".")[2] == spelled]
    return near(path, similar) or ALL


def alias_hint(path: str, whole: bool = False) -> str:
    """Returns `` (here it is X)`` for a key of another library; empty for any other.

    Args:
        whole: only where the whole path is known, not where its last or first words are.
    """
    aliases, absent, trees = other_libraries()
    words = path.split(".")
    if words[0] in absent:
        return f" ({absent[words[0]]})"
    for end in [path] if whole else [".".join(words[i:]) for i in range(len(words))]:
        if end in aliases:
            return f" (here it is {' or '.join(aliases[end])})"
        if end in absent:
            return f" ({absent[end]})"
    beginnings = (".".join(words[:i]) for i in range(len(words) - 1, 0, -1))
    tree = None if whole else next((trees[start] for start in beginnings if start in trees), None)
    return "" if tree is None else f" ({tree})"


@cache
def other_libraries() -> tuple[dict[str, list[str]], dict[str, str], dict[str, str]]:
    """Reads `OTHER_LIBRARIES`: a name there -> our keys, a name of what is absent -> what there is
    instead, and a first word -> the page about its keys."""
    table = yaml.safe_load(OTHER_LIBRARIES.read_text(encoding="utf-8"))
    aliases: dict[str, list[str]] = {}
    for key, names in table["here"].items():
        for name in names.split():
            aliases.setdefault(name, []).append(key)
    absent = {name: why for why, names in table["absent"].items() for name in names.split()}
    return aliases, absent, table["trees"]


def _choices(annotation: Any) -> tuple[str, ...]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return "true", "false"
    if origin is Literal:
        return tuple(map(str, arguments))
    if hasattr(annotation, "__metadata__") or origin is tuple:
        return _choices(arguments[0])
    if origin in (Union, types.UnionType):
        found = tuple(choice for argument in arguments for choice in _choices(argument))
        return (*found, "null") if found and type(None) in arguments else found
    return ()


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"{MAPPING} to {_type_name(arguments[1])}"
    if hasattr(annotation, "__metadata__"):
        return _type_name(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    return "null" if annotation is type(None) else annotation.__name__
