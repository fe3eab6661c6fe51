"""All commands under one name: `jaxrl train` is `python -m jaxrl.train`, and so on.

Only the module of the command asked for is imported: `jaxrl --help` answers without jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from jaxrl import __version__
from jaxrl.config import cli
from jaxrl.config.cli import COMMANDS
from jaxrl.errors import UserError, near

USAGE = """usage: jaxrl COMMAND [--help] ... | jaxrl --version

Post-training of language models in JAX. Commands:

{commands}

jaxrl train without anything else trains a small model in a few minutes."""


def main(argv: Sequence[str]) -> int | None:
    name, *rest = argv or ["--help"]
    if rest and f"{name} {rest[0]}" in COMMANDS:
        name, *rest = f"{name} {rest[0]}", *rest[1:]
    if name in ("-h", "--help"):
        for words in (1, 2):
            if (asked := " ".join(rest[:words])) in COMMANDS:
                return main([*asked.split(), "--help", *rest[words:]])
        commands = "\n".join(f"  {name:13}  {what}" for name, (_, what) in COMMANDS.items())
        print(USAGE.format(commands=commands))
        return None
    if name == "--version" or rest == ["--version"]:
        print(f"jaxrl {__version__}")
        return None
    if name not in COMMANDS:
        begun = [command for command in COMMANDS if command.startswith(name)]
        known = near(begun[0] if len(begun) == 1 else name, COMMANDS)
        known = known or f": one of {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}{known}\njaxrl --help says what each does")
    return import_module(COMMANDS[name][0]).main(rest)


def script() -> NoReturn:
    """Runs the command `jaxrl`."""
    cli.exit_process(cli.run(main))


if __name__ == "__main__":
    script()
