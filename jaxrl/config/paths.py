"""Relative paths in a config file: beside that file first, then in the working directory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl.errors import UserError
from jaxrl.process.json_types import JsonObject

FUNCTIONS = "reward.functions"
ARGUMENTS = "environment.arguments"
CODE = ("algorithm", "student.family", FUNCTIONS, "environment.name", ARGUMENTS)
"""Keys that name the user's code."""
TEACHERS = "teachers"
MODELS = ("student.model", "teacher.model", TEACHERS, "reward.model", "grouper.model")
"""Keys that name models; of several teachers the model of each is meant, not where it is served."""
DATA = ("data.train", "data.eval", "data.few_shot")
"""Keys that name data."""
TEMPLATES = ("student.chat_template", "teacher.chat_template")
"""Keys that name chat templates."""
KEYS = ("teacher.cache", "teacher.ca_file", *MODELS, *TEMPLATES, *DATA, *CODE)
"""Keys whose values may be paths of what a run reads."""


def working_directory() -> Path:
    """Returns the folder that relative paths start at. Raises UserError where it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed: change to one that exists") from None


def beside(mapping: JsonObject, folder: Path, keys: Sequence[str] = KEYS) -> JsonObject:
    """Returns a config's mapping, in which paths that exist in the folder are absolute."""
    for key in keys:
        mapping = changed(mapping, key, lambda text: _absolute(text, folder))
    return mapping


def without_folders(value: object) -> object:
    """Returns a value of a key in `CODE` with the names of its files alone."""

    def named(text: str) -> str:
        if text.endswith(".py") or (Path(text).is_absolute() and ".py:" not in text):
            return Path(text).name
        path, colon, name = text.rpartition(":")
        return f"{Path(path).name}:{name}" if colon and path.endswith(".py") else text

    return _changed(value, [], named)


def changed(mapping: JsonObject, key: str, change: Callable[[str], str]) -> JsonObject:
    """Returns a mapping with each text under a key changed; under `teachers`, each model."""
    if key == TEACHERS and isinstance(teachers := mapping.get(key), dict):
        return mapping | {  # a teacher is a model, or a section with one
            key: {
                name: change(one) if isinstance(one, str) else _changed(one, ["model"], change)
                for name, one in teachers.items()
            }
        }
    return _changed(mapping, key.split("."), change)


def _changed(value: Any, path: list[str], change: Callable[[str], str]) -> Any:
    """Returns a value with each text under the path changed; lists and mappings are copied."""
    if path and isinstance(value, dict) and path[0] in value:
        return value | {path[0]: _changed(value[path[0]], path[1:], change)}
    if path:
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_changed(each, [], change) for each in value]
    if isinstance(value, dict):
        return {key: _changed(each, [], change) for key, each in value.items()}
    return value


def _absolute(text: str, folder: Path) -> str:
    """Returns a text with its path absolute; options or a function's name may follow it."""
    before, colon, after = text.rpartition(":")
    for path, rest in ((text, ""), (before, colon + after)):
        looks = "\0" not in path and ("/" in path or os.path.splitext(path)[1])
        if not looks or path.startswith(("/", "~")):
            continue
        pattern = os.path.join(glob.escape(str(folder)), path)
        matches = any(letter in path for letter in "*?[") and any(glob.iglob(pattern))
        if matches or os.path.exists(folder / path):
            return os.path.abspath(folder / path) + rest
    return text
