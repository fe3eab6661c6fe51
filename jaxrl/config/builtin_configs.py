"""The configs that come with jaxrl: `builtin:NAME` wherever a config file is accepted.

They are in the folder `configs` of the source tree, and in the installed package. The comment at
the top of each file says what it trains, and ends with its commands in order: those that make its
data and models in `runs/`, and the one that runs it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jaxrl.errors import UserError, shown, unknown, user_path

FOLDER = Path(__file__).parent.parent.joinpath("configs").resolve()
PREFIX = "builtin:"


def builtin_configs() -> dict[str, str]:
    """Describes each built-in config in one line, by its name without `builtin:`."""
    comments = {path.stem: _comment(path).split() for path in sorted(FOLDER.glob("*.yaml"))}
    # The first clause of the comment at the top of the file.
    return {name: re.split(r"[.:;]\s", " ".join(w), maxsplit=1)[0] for name, w in comments.items()}


def listing() -> str:
    """Returns one line for each built-in config: its name and what it trains."""
    configs = builtin_configs()
    width = max(map(len, configs)) + len(PREFIX)
    return "\n".join(f"  {PREFIX + name:{width}}  {title}" for name, title in configs.items())


def config_file(name: str | os.PathLike[str]) -> Path:
    """Returns the file of a config: of `builtin:NAME` the one that comes with jaxrl, else the path.

    Raises:
        UserError: there is no built-in config of that name (`builtin:` alone lists them), or no
            file at a path whose last part is the name of a built-in config.
    """
    if not isinstance(name, str | os.PathLike):
        raise UserError(
            f"a config file is given by its path or {PREFIX}NAME, not {shown(name)};"
            " Config.of(...) takes the keys of a run as a mapping, too"
        )
    text = os.fspath(name)
    builtin = text.removeprefix(PREFIX)
    if text == PREFIX:
        raise UserError(f"config {PREFIX!r} lacks a name; there are\n{listing()}")
    if builtin != text:
        if builtin not in builtin_configs():
            error = unknown("built-in config", builtin, builtin_configs())
            raise UserError(f"{error}\n--config {PREFIX} lists them")
        return FOLDER / f"{builtin}.yaml"
    path = user_path(text)
    builtin = path.name.removesuffix(".yaml")
    if not path.exists() and builtin in builtin_configs():
        raise UserError(
            f"cannot read config {path}: No such file or directory (did you mean"
            f" {PREFIX}{builtin}, which comes with jaxrl?)"
        )
    return path


def commands(name: str) -> list[str]:
    """Returns the commands at the top of a built-in config, in order; the last one runs it."""
    top = _comment(FOLDER / f"{name}.yaml")
    return re.findall(r"^ {2,}(python -m jaxrl.*)$", top, re.MULTILINE)


def how_to_make(path: str | os.PathLike[str]) -> str:
    """Returns the end of an error about a missing file or model: the commands that make it, where
    a built-in config reads it from `runs/`; empty for any other."""
    text = os.fspath(path)
    for name in builtin_configs() if text.startswith("runs/") else ():
        keys = re.sub(r"#.*", "", FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
        if re.search(rf"(?<![\w/.]){re.escape(text)}(?![\w/.-])", keys):
            before = [line for line in commands(name) if PREFIX + name not in line.split()]
            return "\n".join(["; make it with", *(f"    {command}" for command in before)])
    return ""


def _comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line.removeprefix("#") for line in lines[:end])
