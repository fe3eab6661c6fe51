"""What sections of the config are made of: a frozen class, and the types of its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jaxrl.errors import short
from jaxrl.process.json_types import JsonObject
from jaxrl.teacher.key_rules import Rule


@dataclass(frozen=True)
class OnResume:
    """What a change of a key does to a run that resumes: part of the key's type, or of its section
    for all keys there that say nothing (`Section.on_resume`)."""

    how: Literal["free", "reported", "asked", "refused"]
    """free: it changes where and how a run works, never what it computes. reported: numbers differ
    from then on, if by rounding alone, or there are more steps. asked: `resume_changed` has to
    allow it, as another content of the files that the key names. refused: never; a run with the
    other value is another one."""
    why: str = ""
    """Why it is refused."""
    remakes: bool = False
    """Whether completions that were generated ahead are generated again, after a change of the
    value or of the files that it names: they were made with it."""
    unless: Callable[[Any, Any, JsonObject], str] = lambda before, now, config: ""
    """(value before, value now, config now as a mapping) -> why a change that is allowed otherwise
    is refused, "" where it is not."""
    decides: str = ""
    """Begins the names of what a run depends on whose digests the value changes too."""


FREE, REPORTED, ASKED = OnResume("free"), OnResume("reported"), OnResume("asked")
SAMPLED = replace(ASKED, remakes=True)
"""Decides what completions are."""


def refused(why: str) -> OnResume:
    return OnResume("refused", why, remakes=True)


def unless_between(value: object, why: str) -> Callable[[Any, Any, JsonObject], str]:
    """Refuses changes from and to a value."""
    return lambda before, now, _: why if value in (before, now) else ""


LARGEST = 2**31 - 1
"""The largest int32, the type of counters on devices; no key needs more."""
ROLES = ("actor", "rollout", "teacher", "reference", "reward", "grouper")

Positive = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1)]
DType = Literal["float32", "bfloat16"]
Quantisation = Literal["int8", "nf4"]
Api = Literal["jaxrl", "openai"]
NAMED = re.compile(r"[A-Za-z0-9_-]+([.][A-Za-z0-9_-]+)*")
"""Names of the user's choice that become parts of metric names."""
T = TypeVar("T")


class Spelt:
    """A number of YAML that remembers how it was written, which is what a key for text takes:
    `1.10` as a name is not `1.1`. A key for numbers takes the number alone."""

    text: str

    def __repr__(self) -> str:
        return self.text


class SpeltInt(Spelt, int):
    """A whole number as it was written."""


class SpeltFloat(Spelt, float):
    """Any other number as it was written."""


def numbers(value: Any) -> Any:
    """Returns a value of YAML whose numbers no longer know how they were written."""
    if isinstance(value, dict):
        return {name: numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return value.real if isinstance(value, SpeltInt | SpeltFloat) else value


OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str | Spelt) else value)
Words = Annotated[tuple[Name, ...], OneOrMore]
"""A list of strings that are not empty; a single string stands for a list of one."""


def check_user_names(value: T) -> T:
    """Returns the value; raises ValueError for a mapping with a name that is not `NAMED`."""
    for name in value if isinstance(value, dict) else ():
        if not isinstance(name, str) or NAMED.fullmatch(name) is None:
            raise ValueError(
                f"the name {name!r} may have letters, digits, `_`, `-` and, between them, `.` only"
            )
    return value


def show_value(value: object) -> str:
    """Returns a value as an override is written; of a mapping of sections, its names."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and any(isinstance(one, BaseModel) for one in value.values()):
        return ", ".join(value)
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=repr)


def value_and_default(section: BaseModel, path: str) -> tuple[Any, Any]:
    """Returns the value and the default of the key with this dotted name below the section."""
    above, _, last = path.rpartition(".")
    owner: Any = section
    while above:
        if isinstance(owner, dict):  # a name of the user's, which may have dots
            owner, above = owner[above], ""
        else:
            name, _, above = above.partition(".")
            owner = getattr(owner, name)
    return getattr(owner, last), type(owner).model_fields[last].default


def unread(
    section: BaseModel, keys: Iterable[str], also: str, why: str, way: str
) -> Iterator[Rule]:
    """Yields the rule that each key, which nothing reads, is at its default.

    Args:
        keys: their dotted names below the section.
        also: a key that decides so, if it is another.
        way: what else than its default may be set.
    """
    for key in keys:
        value, default = value_and_default(section, key)
        if value != default and key != also:
            yield True, f"{also} {key}", why, f"{key}={show_value(default)}, or {way}"


def conflict(section: BaseModel, keys: str, why: str, way: str = "") -> str:
    """Returns the message about keys that do not go together: each with its value, why, and what to
    set instead; by itself, one of those that are not at their defaults to its default.

    Args:
        keys: their dotted names below the section, separated by spaces.
    """
    given, defaults = [], []
    for path in keys.split():
        value, default = value_and_default(section, path)
        text = show_value(value)
        given.append(f"{path}={text if text.isprintable() else short(repr(text))}")
        if value != default and not way:
            defaults.append(f"{path}={show_value(default)}")
    return f"{' '.join(given)}: {why}: set {way or ' or '.join(defaults)}"


class Section(BaseModel):
    """A frozen group of keys; an unknown key is an error."""

    on_resume: ClassVar[OnResume] = refused("nothing says what a change does")
    """Of the keys of the section whose types have none."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        coerce_numbers_to_str=True,  # by `str`, which of `Spelt` is the text
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Yields the keys that differ from their defaults: all of a run would fill a screen."""
        for name, value in super().__repr_args__():
            key = type(self).model_fields.get(name or "")
            if key is None or key.is_required() or value != key.get_default():
                yield name, value

    # What is computed of the keys (`cached_property`) is no part of a section: not of its items, of
    # copies with other keys (`model_copy`), or of what another process gets.

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        """Yields the keys with their values."""
        yield from ((name, getattr(self, name)) for name in type(self).model_fields)

    def __copy__(self) -> Self:
        """Copies the keys alone."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def __getstate__(self) -> JsonObject:
        """Returns the keys alone."""
        return super(Section, self.__copy__()).__getstate__()

    def _rules(self) -> Iterator[Rule]:
        """Yields the conditions on several keys; what is broken is raised together."""
        return iter(())

    def messages(self, rules: Iterable[Rule]) -> list[str]:
        """Returns the message of each rule that is broken."""
        broken = (rule[1:] for rule in rules if rule[0])
        return [rule[0] if len(rule) == 1 else conflict(self, *rule) for rule in broken]

    @model_validator(mode="before")
    @classmethod
    def _check_given(cls, given: object) -> object:
        return {} if given is None else given  # a section left empty in a file

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if messages := list(dict.fromkeys(self.messages(self._rules()))):
            raise ValueError("\n".join(messages))
        return self
