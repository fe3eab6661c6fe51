"""Objects of the user's own modules, by `path/to/file.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import pickletools
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl.errors import UserError, near, short, user_path
from jaxrl.process.child_python import look_in, working_directory_too

PYTHON = "python:"
"""Begins the name that a config has for an object of a Python program."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of packages, whose code is not the user's own."""
OURS = Path(__file__).parents[1]


def is_plugin(text: str) -> bool:
    """Returns whether `text` names an object of a module, and not an entry of a table."""
    return ":" in text


def anchor(text: str, folder: Path) -> str:
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
    files: tuple[tuple[str, str], ...] = ()
    """Its file and those of the user's that it imports, each with its sha256, in hex, when the run
    began: no process may run others (`code_files`)."""
    code: bytes = b""
    """The object itself, pickled by cloudpickle, where a Python program gave it."""

    @property
    def digest(self) -> str:
        """Returns a digest of the contents of the files, wherever they are; "" without files."""
        contents = [digest for _, digest in self.files]
        if len(contents) < 2:
            return "".join(contents)
        return hashlib.sha256(" ".join(contents).encode()).hexdigest()


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
        return CodeSource(text, name, files=_pickled_files(given[text]), code=given[text])
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
        return CodeSource(text, name, str(path), code_files(str(path)))
    if not all(part.isidentifier() for part in place.split(".")):
        raise UserError(f"{key}: {text}: {place!r} is neither a .py file nor the name of a module")
    return CodeSource(text, name, place, code_files(place))


def is_file(place: str) -> bool:
    """Returns whether `place` is the path of a file, and not the name of a module."""
    return place.endswith(".py") or "/" in place


def code_files(place: str) -> tuple[tuple[str, str], ...]:
    """Returns the file of `path/to/file.py` or of a module, and the files that it imports from the
    user's own folders, directly or not, each with its sha256 in hex. Nothing is run: it is what the
    import statements name, wherever they stand.
    """
    if is_file(place):
        return _with_imports([Path(place)], [str(Path(place).parent)])
    run = _files_of(place.split("."), own=False)
    return _with_imports(run[-1:] + [path for path in run[:-1] if _is_own(path)])


def _pickled_files(code: bytes) -> tuple[tuple[str, str], ...]:
    """Returns the same of the user's modules that an object is unpickled from."""
    words = {word for _, word, _ in pickletools.genops(code) if isinstance(word, str)}
    names = sorted(word for word in words if all(map(str.isidentifier, word.split("."))))
    return _with_imports([path for name in names for path in _files_of(name.split("."))])


def _with_imports(first: Sequence[Path], beside: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
    found: dict[Path, str] = {}
    left = list(first)
    for path in left:  # it grows
        if path in found:
            continue
        try:
            text = path.read_bytes()
        except OSError:  # the process that imports it says why
            continue
        found[path] = hashlib.sha256(text).hexdigest()
        for level, parts in _imports(text) if _is_own(path) else ():
            folder = path.parents[level - 1 : level] if level else ()
            left += _files_in(folder, parts) if level else _files_of(parts, beside)
    return tuple((str(path), digest) for path, digest in found.items())


@lru_cache(1024)
def _imports(text: bytes) -> list[tuple[int, list[str]]]:
    """Lists the imports of a file: how many folders up, and the words."""
    found = []
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found += [(0, name.name.split(".")) for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                package = node.module.split(".") if node.module else []
                found += [(node.level, [*package, name.name]) for name in node.names]
    return found


def _files_of(parts: Sequence[str], beside: Sequence[str] = (), own: bool = True) -> list[Path]:
    """Returns the files that are run to import a module, its packages' first; as far as they are
    there, and, with `own`, the user's."""
    spec = None
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(parts[0]) or PathFinder.find_spec(
            parts[0], [*beside, os.getcwd()]
        )
    if spec is None:
        return []
    files = [Path(spec.origin)] if spec.has_location and spec.origin else []
    files += _files_in([Path(one) for one in spec.submodule_search_locations or ()], parts[1:])
    return [path for path in files if path.suffix == ".py" and (_is_own(path) or not own)]


def _files_in(folders: Sequence[Path], parts: Sequence[str]) -> list[Path]:
    if not parts or not folders:
        return []
    files = []
    for folder in folders:
        for path in (folder / parts[0] / "__init__.py", folder / f"{parts[0]}.py"):
            files += [path] if path.is_file() else []
    return files + _files_in([folder / parts[0] for folder in folders], parts[1:])


def _is_own(path: Path) -> bool:
    """Returns whether code is the user's: not of Python, an installed package or jaxrl."""
    installed = (Path(sysconfig.get_path("stdlib")), OURS)
    return not (INSTALLED & {*path.parts} or any(path.is_relative_to(one) for one in installed))


_GIVEN: dict[str, bytes] = {}
"""What a Python program gave, pickled, by its entry in a config: known to `load_object`."""


def give_objects(code: Mapping[str, bytes]) -> None:
    """Has `load_object` know what a Python program gave, in this process."""
    _GIVEN.update(code)


@cache
def load_object(text: str, kind: str = "") -> Any:
    """Returns the object that `text` names; its module is imported once in a process.

    Args:
        kind: what it is, before its name in the message that there is none, as in "function ".

    Raises:
        UserError: there is no such file, module or name, or the module cannot be imported.
    """
    if text.startswith(PYTHON):
        if text in _GIVEN:
            return pickle.loads(_GIVEN[text])
        raise UserError(f"{text} is of a Python program: give it from there")
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise UserError(f"{text!r} must be path/to/file.py:NAME or package.module:NAME")
    try:
        if is_file(place):
            module = _from_file(Path(place))
        else:
            working_directory_too()
            module = importlib.import_module(place)
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
    for path, digest in source.files:
        now = None
        with suppress(OSError):
            now = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if now != digest:
            raise UserError(
                f"{key}: {path} has changed since the run began: a part of the run would be with"
                f" another {kind.lower()}; start the run again"
            )
    if source.code:
        try:
            return pickle.loads(source.code)
        except BaseException as error:
            raise UserError(
                f"{key}: {source.text} cannot be loaded in another process:"
                f" {type(error).__name__}: {error}; write it in a file, and name it path.py:{kind}"
            ) from error
    try:
        return load_object(f"{source.place}:{source.name}", f"{kind.lower()} ")
    except UserError as error:
        raise UserError(f"{key}: {error}") from error.__cause__


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


def user_error(what: str, error: Exception) -> UserError:
    """Makes the error of what code of the user's raised, with its last own file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename))] or frames
    first, hint = next(iter(str(error).splitlines()), ""), ""
    if type(error).__module__.startswith("jax") and "Tracer" in type(error).__name__:
        hint = "; jax traces this function: compute with jax.numpy, without `if` on values"
    return UserError(
        f"{what} ({own[-1].filename}, line {own[-1].lineno}):"
        f" {type(error).__name__}: {short(first, 300)}{hint}"
    )


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns what code of the user's raises inside into a UserError (`user_error`)."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise user_error(what, error) from error


@dataclass(frozen=True)
class BoundFunction:
    """A function or class of the user's with the arguments that a config gives it. Hashable.

    It asks for what it reads by the names of its parameters; its other parameters are arguments.
    """

    call: Callable[..., Any]
    what: str
    """For messages, as in `divergence`."""
    inputs: tuple[str, ...] = ()
    """What it asks for, in its own order."""
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, **known: Any) -> Any:
        """Calls it with those of `known` that it asks for.

        Raises:
            UserError: it raised; the text names its file and the line.
        """
        return self.run(**{name: known[name] for name in self.inputs})

    def run(self, *given: Any, **named: Any) -> Any:
        """Calls it with what is given and its arguments; raises as `__call__`."""
        with user_code(f"{self.what} {self.name}"):
            return self.call(*given, **named, **dict(self.arguments))

    @property
    def name(self) -> str:
        """Returns the name of the function."""
        return str(getattr(self.call, "__name__", type(self.call).__name__))

    def wrong(self, why: str) -> UserError:
        """Makes the error about what the function takes or returns, with its file and line."""
        code = getattr(inspect.unwrap(self.call), "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        return UserError(f"{self.what} {self.name}{place} {why}")


def bind_arguments(
    call: Callable[..., Any],
    what: str,
    required: Sequence[str],
    known: Sequence[str],
    arguments: Mapping[str, Any],
    taken: set[str],
) -> BoundFunction:
    """Binds those of the arguments that a function, or the making of a class, has parameters for.

    Args:
        required: the inputs that it must ask for.
        known: all inputs that it may ask for.
        taken: gets the names of all its arguments.

    Raises:
        UserError: its signature does not fit, or an argument is missing.
    """
    bound = BoundFunction(call, what)
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise bound.wrong(f"has no signature that can be read: {error}") from error
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    if lacks := [name for name in required if name not in named]:
        raise bound.wrong(
            f"takes ({', '.join(parameters)}): it must have the parameters"
            f" {', '.join(required)}; {' and '.join(lacks)} {'is' if len(lacks) == 1 else 'are'}"
            " missing"
        )
    inputs = tuple(name for name in named if name in known)
    own = {name: parameter for name, parameter in named.items() if name not in known}
    taken.update(own)
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in arguments:
            others = [one for one in known if one not in inputs]
            beside = f", or what it can ask for: {', '.join(others)}" if others else ""
            raise bound.wrong(
                f"needs the argument {name}: set algorithm.arguments={{{name}: VALUE}}{beside}"
            )
    given = ((name, _hashable(arguments[name])) for name in own if name in arguments)
    return BoundFunction(call, what, inputs, tuple(given))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
