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
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jaxrl.config import key_help
from jaxrl.config import keys as config_keys
from jaxrl.config.paths import working_directory
from jaxrl.config.roles import read_family
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import assignments
from jaxrl.errors import RunError, StopTraining, UserError, near, short, user_path, with_addresses
from jaxrl.process.interrupt import left_behind
from jaxrl.process.json_types import JsonObject
from jaxrl.process.streams import fill_missing, flush_streams, has_reader, to_stderr

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DOES_NOT_FIT = 3
"""Of a dry run whose plan needs more memory than there is."""
EXIT_INTERRUPTED = 130

EXAMPLES = (
    "steps=50",
    "student.model=Qwen/Qwen3-0.6B teacher.model=Qwen/Qwen3-4B data.train=rows.jsonl",
    "--config run.yaml --dry-run --target h100x8",
)
"""Of training."""

ARGUMENTS = {
    "data.train": "data",
    "data.eval": "eval_data",
    "environment.name": "environment",
    "reward.functions": "rewards",
    "student.model": "model",
}
"""Key -> the argument of the Python functions that stands for it."""

KEY_VALUE = "key=value"
"""What help calls positional words that are keys alone."""

COMMANDS = {
    "train": ("jaxrl.train", "train a policy: distillation, rewards, or the data's completions"),
    "evaluate": ("jaxrl.evaluate", "accuracy and pass@k of any checkpoint"),
    "generate": ("jaxrl.generate", "sample from any checkpoint"),
    "export": ("jaxrl.export", "write a Hugging Face folder"),
    "report": ("jaxrl.report.__main__", "one HTML page of a run, or of several"),
    "plot": ("jaxrl.telemetry.plot", "the curves of runs as a picture"),
    "replay": ("jaxrl.run.replay", "do a run or a step of it again, and compare: same bits?"),
    "devices": ("jaxrl.devices", "who has which device, here and in a cluster"),
    "data show": ("jaxrl.run.show_data", "rows of data as a run learns them: text, tokens, mask"),
    "score": ("jaxrl.score.__main__", "store a teacher's scores of data, to train without it"),
    "serve-teacher": ("jaxrl.serve_teacher", "serve a teacher to one run or several"),
    "completion": (
        "jaxrl.config.completion",
        "a script by which bash, zsh or fish completes all this",
    ),
}
"""Name -> its module, and what it does."""

Command = Callable[[Sequence[str]], int | None]


def keys_and_options(overrides: Sequence[str], options: JsonObject) -> JsonObject:
    """Returns the keys of a command line: its overrides, and the values of options that stand for
    keys; None: not given.

    Raises:
        UserError: an override cannot be read, or an option and a key differ.
    """
    given = dict(assignments(overrides, config_keys.mappings(Config)))
    for key, value in options.items():
        if value is None or [found := given.setdefault(key, value)] == value:
            continue
        if found != value:
            raise UserError(f"an option asks for {key}={value}, and a key for {found}: keep one")
    return given


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``UserError``, which names the most similar option."""

    def __init__(
        self,
        module: str,
        description: str,
        keys: Sequence[str] | None = (),
        examples: Sequence[str] = (),
    ) -> None:
        """
        Args:
            module: of the command, as in `jaxrl.train`.
            keys: config keys and sections that the command reads; None: all.
            examples: the words after the command in some calls of it.
        """
        super().__init__(
            prog=called_as(module),
            description=textwrap.dedent(description).strip().split("\n\n")[0],
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        version = import_module("jaxrl").__version__
        self.add_argument(
            "--version", action="version", version=f"jaxrl {version}", help="print it and exit"
        )
        self._keys, self._examples = keys, examples
        self._reads_keys = keys is None or bool(keys)
        self.add_argument(
            *("-h", "--help"),
            action=_Help,
            nargs="*" if self._reads_keys else 0,
            metavar="KEY",
            default=argparse.SUPPRESS,
            help="this, or about some config keys" if self._reads_keys else "show this",
        )

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """Returns the options and positional words."""
        return self._actions

    @property
    def keys(self) -> list[config_keys.Key]:
        """Returns the config keys that the command reads."""
        return [key for group in key_help.taken(self._keys) for key in group.keys]

    def help_about(self, words: Sequence[str]) -> str:
        """Returns the text of `--help`, or of `--help WORD`.

        Raises:
            UserError: a word is no key or section, nor `all`.
        """
        width = shutil.get_terminal_size().columns
        topics = [word.partition("=")[0] for word in words]
        if self._reads_keys and topics:
            texts = (key_help.describe_keys(topic, width, self._keys) for topic in topics)
            return with_addresses("\n\n".join(texts) + "\n")
        parts = [super().format_help().rstrip()]
        if self._reads_keys:
            parts.append(key_help.common(self._keys))
            parts.append(
                "--help KEY or SECTION: type, range, default, meaning; --help all: every key"
            )
        if self._examples:
            parts.append("\n".join(["examples:", *(f"  {self.prog} {x}" for x in self._examples)]))
        return with_addresses("\n\n".join(parts) + "\n")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}\n{self.prog} --help lists the options")

    def add_family(self) -> None:
        """Adds the option that names a model family of the user's own."""
        self.add_argument(
            "--family",
            metavar="FILE.py:NAME",
            help="a model family of your own (the folder of a run keeps its own)",
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses options and positional words in any order."""
        arguments, extra = self.parse_known_intermixed_args(list(argv))
        if extra:
            kind = "option" if extra[0].startswith("-") else "argument"
            self.error(f"unknown {kind} {extra[0]}{self._hint(extra[0])}")
        if (family := vars(arguments).get("family")) is not None:
            read_family(family)
        return arguments

    def _hint(self, word: str) -> str:
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        known = [key.path for key in self.keys]
        if name in known:
            return f" (write {name}={value if equals else 'VALUE'}, without dashes)"
        written = "; keys are written key=VALUE, without dashes"
        if self._reads_keys and (hint := config_keys.alias_hint(name, whole=True)):
            return hint + written
        if (hint := near(option, self._option_string_actions)) or not self._reads_keys:
            return hint
        return config_keys.near_key(name, known) + written


class _Help(argparse.Action):
    """Prints the help and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.help_about(list(values or ())), end="")
        raise HelpShown(parser)


class HelpShown(SystemExit):
    """Ends a command whose help was asked for; has the command's parser."""

    def __init__(self, parser: Parser) -> None:
        super().__init__(0)
        self.parser = parser


def called_as(module: str) -> str:
    """Returns how this command was called: `jaxrl train`, or `python -m` with a module."""
    main = sys.modules["__main__"]
    started = main.__spec__.name if main.__spec__ is not None else ""
    named = (name for name, (of, _) in COMMANDS.items() if of.removesuffix(".__main__") == module)
    command = next(named, module.rpartition(".")[2].replace("_", "-"))
    if started == "jaxrl.__main__":
        return f"python -m jaxrl {command}"
    if not started and Path(sys.argv[0]).name == "jaxrl":
        return f"jaxrl {command}"
    return f"python -m {module}"


def parse_run(argv: Sequence[str], *, module: str, description: str) -> argparse.Namespace:
    """Parses ``--config FILE.yaml --mesh SPEC --dry-run key=value ...`` in any order.

    Returns:
        The options by their names; `config` is the `Config` of the file's keys with the overrides
        applied, `base` (a `schema.Base`) says where the keys that nobody set come from.

    Raises:
        UserError: an option and an override give one key two values, or a key is wrong.
    """
    parser = Parser(module, description, None, EXAMPLES)
    parser.usage = f"{parser.prog} [OPTION ...] [key=value ...]"
    file = "YAML keys, or builtin:NAME (builtin: lists them); default: the quickstart, unless a"
    for option, metavar, words, *choices in (
        ("config", "FILE.yaml", f"{file} model or data is set"),
        ("mesh", "SPEC", "devices of each role, as in actor=2,teacher=4"),
        ("resume", "HOW", "{} (default), {} or {}: the key resume", "auto", "never", "must"),
        ("launcher", "KIND", "{} (default), {} or {}: the key launcher", "auto", "local", "ray"),
        ("dry-run", "", "check and plan the run, and exit: 3 if it does not fit"),
        ("target", "TARGET", "with --dry-run: plan for h100x8, tpu-v5e:2x4, ..."),
        ("compile", "TARGET", "the same, by that machine's own compiler (extra aot)"),
        ("suggest", "", "with --compile: search for the fastest mesh and keys"),
        ("show", "N", "with --dry-run: print N rows as they are learned"),
        ("json", "", "with --dry-run: print one JSON object"),
        ("quiet", "", "no output but errors: the key logging.console=quiet"),
    ):
        values = {"metavar": metavar, "choices": choices or None}
        kind: Any = values if metavar else {"action": "store_true"}
        parser.add_argument(f"--{option}", help=words.format(*choices), **kind)
    words = "set a key, as in steps=10; last one wins"
    parser.add_argument("overrides", nargs="*", metavar=KEY_VALUE, help=words)
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
    if arguments.quiet:
        overrides.append("logging.console=quiet")
    arguments.config, arguments.base = Config.load_base(arguments.config, overrides)
    for option, does in (("target", "plans for a machine"), ("compile", "compiles the programs")):
        value = getattr(arguments, option)
        if value is not None and not arguments.dry_run:
            raise UserError(f"--{option} {value} needs --dry-run too: it {does} and trains nothing")
    if None not in (both := (arguments.target, arguments.compile)) and len(set(both)) > 1:
        raise UserError(
            f"--target {both[0]} and --compile {both[1]} name two machines: --compile plans for its"
            " own, so leave --target out"
        )
    if arguments.suggest and arguments.compile is None:
        why = ": it needs the compiled programs" if arguments.target else ""
        raise UserError(f"--suggest needs --dry-run --compile TARGET{why}")
    if arguments.show is not None:
        if not arguments.dry_run or arguments.compile is not None:
            raise UserError("--show N needs --dry-run, without --compile: it shows N rows of data")
        if not arguments.show.isdecimal() or arguments.show == "0":
            raise UserError(f"--show {arguments.show}: a number of rows from 1 is needed")
        arguments.show = int(arguments.show)
    if arguments.json and not arguments.dry_run:
        raise UserError("--json needs --dry-run: it prints the plan as one JSON object")
    return arguments


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
        to_stderr(f"error: {with_addresses(str(error))}")
        return EXIT_FAILED if isinstance(error, RunError) else EXIT_BAD_INPUT
    except StopTraining as stop:
        to_stderr(f"error: {stop.by or 'code'} raised StopTraining, and nothing trains: {stop}")
        return EXIT_FAILED
    except KeyboardInterrupt as error:
        to_stderr(str(error) or "interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if has_reader(sys.stdout):
            raise
        return EXIT_FAILED  # as of any program before `| head`: nobody is left to be told
    return 0 if code is None else code


def check_writable(option: str, path: str | os.PathLike[str]) -> Path:
    """Returns the place of a file to write; refuses one that cannot be written, before any work is
    done."""
    place = user_path(path)
    if place.is_dir():
        raise UserError(f"{option} {place} is a folder: name a file")
    if not place.parent.is_dir():
        raise UserError(f"{option} {place}: there is no folder {place.parent}")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise UserError(f"{option} {place} cannot be written to: name another file")
    return place


def exit_process(code: int, patience: float = 5.0) -> NoReturn:
    """Ends the process; threads that wait for a disk or a server that does not answer are left
    behind after `patience` seconds, and workers that still compute at once."""
    end = time.monotonic() + patience
    waiting = []
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(end - time.monotonic(), 0.0))
            waiting.append(thread)
    flush_streams()
    if any(thread.is_alive() for thread in (*waiting, *left_behind)):
        # Python would wait for ever, or end a thread inside XLA, which aborts the process.
        os._exit(code)
    sys.exit(code)


def make_callable(name: str, function: Callable[..., object]) -> None:
    """Makes the module of a command call its public function, and show its signature and docstring.

    `from jaxrl import train` gives the function or the module `jaxrl.train`, depending on what was
    imported before; so both are right, and `python -m jaxrl.train` runs the module.
    """

    signature = inspect.signature(function)

    class CallableModule(ModuleType):
        def __call__(self, *args: object, **kwargs: object) -> object:
            for word in kwargs.keys() - signature.parameters.keys():
                hint = config_keys.alias_hint(word)
                for key, argument in ARGUMENTS.items():
                    if argument in signature.parameters:
                        hint = hint.replace(key, f"{argument}=")
                if word in Config.model_fields:
                    hint = f" ({word} is a key of the config)"
                raise UserError(
                    f"{function.__name__}() has no argument {word}{hint}; it has "
                    + ", ".join(signature.parameters)
                )
            return function(*args, **kwargs)

    if name in sys.modules:
        module: Any = sys.modules[name]
        module.__class__ = CallableModule
        module.__signature__ = signature
        module.__doc__ = function.__doc__
