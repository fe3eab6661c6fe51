"""The Python processes that this package starts. None of them runs a file of the working directory
because it has the name of a library (`json.py`, `random.py`): these are looked for where this
process has libraries, and the user's own modules afterwards."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PACKAGE_HOME = str(Path(__file__).parent.parent.parent)
"""The folder that has this package."""
SAFE = {"PYTHONSAFEPATH": "jaxrl"}
"""Variable of a process of ours, for those that libraries start from it. The value tells it from
the user's own, since what the user's code starts is not to have it."""


def python_command(code: str, *arguments: str) -> list[str]:
    """Returns the command of a Python process that runs `code`, with these `sys.argv[1:]`."""
    with_paths = f"import sys; sys.path[:] = {library_paths()!r}\n{code}"
    return [sys.executable, "-P", "-c", with_paths, *arguments]


def library_paths() -> list[str]:
    """Returns where this process looks for modules, without its working directory; where that has
    this package, it comes last."""
    here = _working_directory()
    paths = [path for path in program_paths() if path != here]
    return paths if PACKAGE_HOME in paths else [*paths, PACKAGE_HOME]


def program_paths() -> list[str]:
    """Returns where the user's program looks for modules, as absolute paths."""
    here = _working_directory()
    return [os.path.abspath(path) if path else here for path in map(str, sys.path) if path or here]


def look_in(folders: Iterable[str]) -> None:
    """Lets this process look for modules in further folders too, after all others."""
    sys.path += [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def working_directory_too() -> None:
    """Lets this process look for the user's modules in its working directory, after all others."""
    look_in(filter(None, [_working_directory()]))


def users_environment() -> Mapping[str, str]:
    """Returns the environment variables that the user's code gets."""
    return {name: value for name, value in os.environ.items() if SAFE.get(name) != value}


def _working_directory() -> str:
    with suppress(FileNotFoundError):  # it may have been removed
        return os.getcwd()
    return ""
