"""What every command line shares: options, overrides, ``--help`` with all keys, and exit codes.

A command is a function of ``argv`` (without the program's name) that returns nothing, or its
exit code::

    def main(argv: Sequence[str]) -> None:
        run = cli.parse_run(argv, module="jaxrl.train", description=__doc__)
        ...

    if __name__ == "__main__":
        sys.exit(cli.run(main))
"""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jaxrl.config import keys as config_keys
from jaxrl.config import yaml_text
from jaxrl.config.paths import working_directory
from jaxrl.config.schema import Base, Config
from jaxrl.errors import RunError, UserError, near, short, user_path
from jaxrl.process.interrupt import left_behind
from jaxrl.process.streams import fill_missing, has_reader, settle, to_stderr

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3
"""Of a dry run whose plan needs more memory than there is."""
EXIT_INTERRUPTED = 130

Command = Callable[[Sequence[str]], int | None]


@dataclass(frozen=True)
class RunArguments:
    """A run as the command line asks for it."""

    config: Config
    """The file's keys with the overrides applied."""
    base: Base
    """Where the keys that nobody set come from."""
    dry_run: bool
    """Print the plan and stop."""
    target: str | None = None
    """The machine to plan for; None: this one."""
    compile: str | None = None
    """The machine to plan and compile for; None: nothing is compiled."""
    suggest: bool = False
    """Search for the placement and keys with the shortest step on that machine."""
    json: bool = False
    """Print the report of the compiler as JSON."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UserError``, which names the most similar option."""

    def __init__(self, module: str, description: str) -> None:
        """
        Args:
            module: of the command, as in `jaxrl.train`.
        """
        super().__init__(
            prog=called_as(module),
            description=textwrap.dedent(description).strip().split("\n\n")[0],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.prog} --help lists the options")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses options and positional words in any order."""
        arguments, extra = self.parse_known_intermixed_args(list(argv))
        if extra:
            self.error(f"unknown option {extra[0]}{self._hint(extra[0])}")
        return arguments

    def _hint(self, word: str) -> str:
        option, equals, value = word.partition("=")
        name = option.lstrip("-")
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        if takes_keys and name in {key.path for key in config_keys.keys(Config)}:
            return f" (write {name}={value if equals else 'VALUE'}, without dashes)"
        return near(option, self._option_string_actions)


def called_as(module: str) -> str:
    """Returns how this command was called: `jaxrl train`, or `python -m` with a module."""
    main = sys.modules["__main__"]
    started = main.__spec__.name if main.__spec__ is not None else ""
    command = module.rpartition(".")[2].replace("_", "-")
    if started == "jaxrl.__main__":
        return f"python -m jaxrl {command}"
    if not started and Path(sys.argv[0]).name == "jaxrl":
        return f"jaxrl {command}"
    return f"python -m {module}"


def parse_run(argv: Sequence[str], *, module: str, description: str) -> RunArguments:
    """Parses ``--config FILE.yaml --mesh SPEC --dry-run key=value ...`` in any order.

    Raises:
        UserError: an option and an override give one key two values, or a key is wrong.
    """
    parser = Parser(module, description)
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="config file of the run (without it: the built-in quickstart or, if student.model or"
        " data.train is set, the defaults)",
    )
    parser.add_argument(
        "--mesh", metavar="SPEC", help="devices of each role, as in actor=2,rollout=2,teacher=4"
    )
    parser.add_argument(
        "--resume",
        choices=("auto", "never", "must"),
        help="whether to resume the run in the run directory (default auto; the key resume)",
    )
    parser.add_argument(
        "--launcher",
        choices=("auto", "local", "ray"),
        help="workers as threads, or as Ray processes (default auto; the key launcher)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check what would stop the run at its start (exit code 2), print the plan (exit code 3"
        " if it does not fit), and exit",
    )
    parser.add_argument(
        "--target",
        metavar="TARGET",
        help="with --dry-run: plan for a machine that is not present: h100x8, h200x16 (two hosts),"
        " t4x1, rtx4090x1, tpu-v5e:2x4",
    )
    parser.add_argument(
        "--compile",
        metavar="TARGET",
        help="the same, and compile every program of the run with that machine's compiler (needs"
        " the extra aot)",
    )
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="with --compile: predict the seconds of each stage on that machine, search for the"
        " mesh and keys with the shortest step that fits, and compile these too",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --compile: print one JSON object instead of text"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="set a key, as in steps=10; last one wins"
    )
    parser.epilog = keys_help(shutil.get_terminal_size().columns)
    arguments = parser.parse(argv)
    overrides = list(arguments.overrides)
    for key in ("mesh", "resume", "launcher"):
        value = getattr(arguments, key)
        if value is None:
            continue
        for override in overrides:
            name, _, other = override.partition("=")
            if name.strip() == key and other.strip() != value:
                raise UserError(
                    f"--{key} {value} and {override} set the key {key} to two values: leave one out"
                )
        overrides.append(f"{key}={value}")
    config, base = Config.load_base(arguments.config, overrides)
    for option, does in (("target", "plans for a machine"), ("compile", "compiles the programs")):
        value = getattr(arguments, option)
        if value is not None and not arguments.dry_run:
            raise UserError(f"--{option} {value} needs --dry-run too: it {does} and trains nothing")
    if None not in (both := (arguments.target, arguments.compile)) and len(set(both)) > 1:
        raise UserError(
            f"--target {both[0]} and --compile {both[1]} name two machines: --compile plans for its"
            " own, so leave --target out"
        )
    for option in ("suggest", "json"):
        if getattr(arguments, option) and arguments.compile is None:
            why = ": it needs the compiled programs" if arguments.target else ""
            raise UserError(f"--{option} needs --dry-run --compile TARGET{why}")
    options = ("dry_run", "target", "compile", "suggest", "json")
    asked = (getattr(arguments, option) for option in options)
    return RunArguments(config, base, *asked)


def run(command: Command, argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; only the user's errors lose their traceback."""
    fill_missing()
    try:
        try:
            code = command(sys.argv[1:] if argv is None else argv)
        except FileNotFoundError:  # the working directory may have been removed
            working_directory()
            raise
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise UserError(f"{short(str(error.filename))}: {error.strerror}") from error
        except ValueError as error:
            if not re.search("embedded null (byte|character)", str(error)):
                raise
            raise UserError("a path has a character of code 0 in it") from error
    except (UserError, RunError) as error:
        to_stderr(f"error: {error}")
        return EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED
    except KeyboardInterrupt as error:
        to_stderr(str(error) or "interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if has_reader(sys.stdout):
            raise
        return EXIT_FAILED  # as of any program before `| head`: nobody is left to be told
    return 0 if code is None else code


def check_writable(option: str, path: str | os.PathLike[str] | None) -> None:
    """Refuses a path that cannot be written, before any work is done."""
    if path is None:
        return
    place = user_path(path)
    if place.is_dir():
        raise UserError(f"{option} {place} is a folder: name a file")
    if not place.parent.is_dir():
        raise UserError(f"{option} {place}: there is no folder {place.parent}")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise UserError(f"{option} {place} cannot be written to: name another file")


def leave(code: int, patience: float = 5.0) -> NoReturn:
    """Ends the process; threads that wait for a disk or a server that does not answer are left
    behind after `patience` seconds, and workers that still compute at once.
    """
    end = time.monotonic() + patience
    waiting = []
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(end - time.monotonic(), 0.0))
            waiting.append(thread)
    settle()
    if any(thread.is_alive() for thread in (*waiting, *left_behind)):
        # Python would wait for ever, or end a thread inside XLA, which aborts the process.
        os._exit(code)
    sys.exit(code)


def keys_help(width: int) -> str:
    """Returns every config key with its type, default and docstring, grouped by section."""
    width = max(60, min(width, 120))
    lines = ["config keys (in the file, or as key=value):"]
    for group in config_keys.groups(Config):
        heading = f"{group.path}: {group.doc}" if group.path else ""
        lines += ["", *_wrap(heading, width, "  ", "      ")] if heading else []
        for key in group.keys:
            default = "required" if key.required else f"default {yaml_text.shown(key.default)}"
            lines.append(f"  {key.path}  {key.type}  [{default}]")
            lines += _wrap(key.doc, width, "      ", "      ")
    return "\n".join(lines)


def _wrap(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def make_callable(name: str, function: Callable[..., object]) -> None:
    """Makes the module of a command call its public function, and show its signature and docstring.

    `from jaxrl import train` gives the function or the module `jaxrl.train`, depending on what was
    imported before; so both are right, and `python -m jaxrl.train` runs the module.
    """

    class CallableModule(ModuleType):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return function(*args, **kwargs)

    if name in sys.modules:
        module: Any = sys.modules[name]
        module.__class__ = CallableModule
        module.__signature__ = inspect.signature(function)
        module.__doc__ = function.__doc__
