"""Objects of the user's own modules, by `path/to/file.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pickle
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.errors import UserError, near, user_path
from jaxrl.process.child_python import look_in, working_directory_too

PYTHON = "python:"
"""Begins the name that a config has for an object of a Python program."""


def is_plugin(text: str) -> bool:
    """Returns whether `text` names an object of a module, and not an entry of a table."""
    return ":" in text


def anchored(text: str, folder: Path) -> str:
    """Returns `text` with a relative path of a file, which starts at `folder`, made absolute."""
    place, colon, name = text.rpartition(":")
    if not colon or not is_file(place):
        return text
    return f"{(folder / user_path(place)).resolve()}:{name}"


@dataclass(frozen=True)
class CodeSource:
    """Where code of the user's comes from, for a process that loads it."""

    text: str
    """As in the config."""
    name: str
    """Of the class or function."""
    place: str = ""
    """Absolute path of its file, or dotted name of its module."""
    digest: str = ""
    """sha256 of the file, in hex, when the run began: no process may run another one."""
    code: bytes = b""
    """The object itself, pickled by cloudpickle, where a Python program gave it."""


def locate(text: str, key: str, kind: str, given: Mapping[str, bytes], call: str) -> CodeSource:
    """Returns the source of what `path/to/file.py:NAME`, `package.module:NAME` or `python:NAME`
    names; no code runs.

    Args:
        key: of the config.
        kind: `Class` or `function`.
        given: what a Python program gave, pickled, by its entry in the config.
        call: the argument that gives it, as in `environment={}`.

    Raises:
        UserError: it names nothing.
    """
    if text.startswith(PYTHON):
        name = text.removeprefix(PYTHON).partition("@")[0]
        if text not in given:
            raise UserError(
                f"{key}: {text} is a {kind.lower()} of a Python program: give it from there, as in"
                f" train(config, {call.format(name)})"
            )
        return CodeSource(text, name, code=given[text])
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UserError(f"{key}: {text!r} must be path/to/file.py:{kind} or module:{kind}")
    if is_file(place):
        path = user_path(place).resolve()
        if not path.is_file():
            raise UserError(
                f"{key}: {text}: there is no file {path} (a relative path is one from the folder of"
                " the config file that names it, or from the working directory)"
            )
        return CodeSource(text, name, str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    if not all(part.isidentifier() for part in place.split(".")):
        raise UserError(f"{key}: {text}: {place!r} is neither a .py file nor the name of a module")
    return CodeSource(text, name, place)


def is_file(place: str) -> bool:
    """Returns whether `place` is the path of a file, and not the name of a module."""
    return place.endswith(".py") or "/" in place


@cache
def load_object(text: str, kind: str = "") -> Any:
    """Returns the object that `text` names; its module is imported once in a process.

    Args:
        kind: what it is, before its name in the message that there is none, as in "function ".

    Raises:
        UserError: there is no such file, module or name, or the module cannot be imported.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UserError(f"{text!r} must be path/to/file.py:NAME or package.module:NAME")
    try:
        module = _from_file(Path(place)) if is_file(place) else _by_name(place)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{text} cannot be imported: {type(error).__name__}: {error}"
            f" ({at.filename}, line {at.lineno})"
        ) from error
    if not hasattr(module, name):
        own = [word for word in vars(module) if not word.startswith("_")]
        hint = near(name, own) or f"; it has {', '.join(own) or 'none'}"
        raise UserError(f"{place} has no {kind}{name}{hint}")
    return getattr(module, name)


def load_source(source: CodeSource, key: str, kind: str) -> Any:
    """Returns the object that `locate` found, in a process of its own.

    Raises:
        UserError: its file has changed since, it cannot be unpickled, or as `load_object` raises.
    """
    place, digest = source.place, source.digest
    if source.code:
        try:
            return pickle.loads(source.code)
        except BaseException as error:
            raise UserError(
                f"{key}: {source.text} cannot be loaded in another process:"
                f" {type(error).__name__}: {error}; write it in a file, and name it path.py:{kind}"
            ) from error
    if digest and hashlib.sha256(Path(place).read_bytes()).hexdigest() != digest:
        raise UserError(
            f"{key}: {place} has changed since the run began: a part of the run would be with"
            f" another {kind.lower()}; start the run again"
        )
    try:
        return load_object(f"{place}:{source.name}", f"{kind.lower()} ")
    except UserError as error:
        raise UserError(f"{key}: {error}") from error.__cause__


def _by_name(name: str) -> ModuleType:
    working_directory_too()
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    name = f"jaxrl_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:  # several objects of one file share its module
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: its name must end with .py")
    look_in([str(path.parent)])  # for modules beside the file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
