"""Strict YAML: what a config file and a ``key=value`` override mean.

PyYAML follows YAML 1.1, where ``1:2`` is the number 62, ``1e-4`` a string, ``no`` false, and a key
given twice silently keeps its last value. Here scalars follow the YAML 1.2 core schema, a repeated
key is refused, and a number remembers how it was written.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from jaxrl.config.keys import WITH_ARGUMENTS, alias_hint
from jaxrl.config.section import SpeltFloat, SpeltInt
from jaxrl.errors import UserError, short
from jaxrl.process.json_types import JsonObject

DEEPEST, MOST_NODES = 50, 100_000
"""Limits of a config file: levels of nesting, and values where each alias stands for what it
names."""
TEMPLATES = ("teacher.prompt",)
"""Keys whose text may begin with a brace, which no YAML would take."""
TOO_DEEP = f"nested deeper than {DEEPEST} levels, or a value that contains itself"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        if tag is not None:  # the library's constructors raise anything at what does not fit one
            where = f"line {event.start_mark.line + 1}"
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            raise UserError(f"{where}: leave out the tag {short(tag)} (values need none)")
        return super().compose_node(parent, index)

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            where = f"line {key_node.start_mark.line + 1}"
            if key_node.tag != "tag:yaml.org,2002:str":
                raise UserError(f"{where}: keys are plain words, got {short(repr(key_node.value))}")
            if key_node.value in seen:
                raise UserError(f"{where}: key {short(repr(key_node.value))} is given twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)

    def _spelt_int(self, node: yaml.ScalarNode) -> SpeltInt:
        number = SpeltInt(self.construct_yaml_int(node))
        number.text = node.value
        return number

    def _spelt_float(self, node: yaml.ScalarNode) -> SpeltFloat:
        number = SpeltFloat(self.construct_yaml_float(node))
        number.text = node.value
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader._spelt_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader._spelt_float)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


for _tag, _pattern, _first_letters in (
    ("null", r"^(?:null|~|)$", ["n", "~", ""]),
    ("bool", r"^(?:true|false)$", list("tf")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first_letters)


def _parse(text: str) -> object:
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        _count_nodes(node, 0, 0)
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise UserError(TOO_DEEP) from None
    except yaml.YAMLError as error:
        where = re.sub(r"\s+", " ", str(error)).strip()
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
            where = f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
        raise UserError(f"not YAML: {where}") from error


def _count_nodes(node: yaml.Node | None, depth: int, count: int) -> int:
    """Returns `count` and the nodes of a tree in which an alias repeats what it names.

    Raises:
        UserError: the tree is too deep or too large to be a config.
    """
    if depth > DEEPEST:
        raise UserError(TOO_DEEP)
    if count >= MOST_NODES:
        raise UserError(f"more than {MOST_NODES} values, aliases written out: use fewer")
    count += 1
    below = node.value if isinstance(node, yaml.CollectionNode) else []
    for child in below:
        for one in child if isinstance(child, tuple) else (child,):
            count = _count_nodes(one, depth + 1, count)
    return count


def read_mapping(path: Path) -> JsonObject:
    """Returns the mapping that a YAML file holds; an empty file is an empty mapping."""
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text") from error
    except ValueError as error:  # a UserError, or thousands of digits
        raise UserError(f"{path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        what = "a list" if isinstance(content, list) else "a single value"
        raise UserError(f"{path}: holds {what}, not `key: value` lines")
    return content


def dump_mapping(mapping: JsonObject) -> str:
    """Returns YAML text that ``read_mapping`` reads back to an equal mapping, keys in order."""
    return yaml.dump(mapping, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse_value(text: str) -> object:
    """Returns the value of an override: a quoted string or ``[list]`` in YAML, else one scalar.

    Whole: ``data.system_prompt=Answer: yes # or no`` needs no second layer of quotes.
    """
    if text.startswith(("[", "{", '"', "'")):
        return _parse(text)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, text))


def assignments(
    overrides: Sequence[str] | Mapping[str, object], mappings: Collection[str] = ()
) -> Iterator[tuple[str, object]]:
    """Yields dotted key and value of each override: of ``a.b.c=value`` strings, or of a mapping
    whose keys are dotted or nested.

    ``mappings`` are the keys whose value may be a whole mapping; every other one is a section, of
    which an override sets one key.
    """
    if isinstance(overrides, Mapping):
        yield from _flat(overrides, mappings)
        return
    if not isinstance(overrides, Iterable):
        raise UserError(
            f"overrides is a list of key=value strings, or a mapping, got {overrides!r}"
        )
    for override in overrides:
        if not isinstance(override, str):
            raise UserError(f"bad override {override!r}: write 'key=value', as in 'steps=10'")
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise UserError(
                f"bad override {short(repr(override))}: write key=value, as in steps=10"
            )
        try:
            template = key in TEMPLATES and text.strip().startswith(("{", "["))
            value = text.strip() if template else parse_value(text.strip())
        except ValueError as error:  # a UserError, or thousands of digits
            raise UserError(f"override {short(override)!r}: {error}") from error
        if isinstance(value, dict) and key not in mappings:
            raise UserError(
                f"override {short(repr(override))}: set its keys one by one, as {key}.KEY=VALUE"
                + alias_hint(key)
            )
        yield key, value


def _flat(
    overrides: Mapping[str, object], mappings: Collection[str], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for name, value in overrides.items():
        if not isinstance(name, str) or not all(name.split(".")):
            raise UserError(f"bad override {prefix}{name!r}: a key is a name, as in 'steps'")
        if isinstance(value, Mapping) and prefix + name not in mappings:
            yield from _flat(value, mappings, f"{prefix}{name}.")
        else:
            yield prefix + name, os.fspath(value) if isinstance(value, os.PathLike) else value


def assign(mapping: JsonObject, values: Mapping[str, object]) -> JsonObject:
    """Returns ``mapping`` with the value of each dotted key set."""
    result = copy.deepcopy(mapping)
    for key, value in sorted(values.items(), key=lambda item: item[0] not in WITH_ARGUMENTS):
        section, (*names, last) = result, key.split(".")
        for depth, name in enumerate(names):
            if section.setdefault(name, {}) is None:
                section[name] = {}
            if name in WITH_ARGUMENTS and depth == 0 and isinstance(section[name], str):
                section[name] = {"name": section[name]}
            section = section[name]
            if not isinstance(section, dict):
                path = ".".join(names[: depth + 1])
                raise UserError(
                    f"cannot set {key}: {path} is a value, not a section{alias_hint(key)}"
                )
        section[last] = value
    return result
