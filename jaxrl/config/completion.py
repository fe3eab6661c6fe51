"""Prints a script by which a shell completes jaxrl's commands, options, keys and their values.

The script holds all words, so that no Python is started when a word is completed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from jaxrl.config import cli

_FOLDER = Path(__file__).parent.parent / "assets" / "completion"
SCRIPTS = {path.suffix[1:]: path for path in _FOLDER.iterdir()}
"""Shell -> its script, with a line `# WORDS` where the words of the commands belong."""


def options_of(parser: cli.Parser) -> Iterator[str]:
    """Yields what may follow a command: `--option`, `--option=` where it takes a value and
    `--option=VALUE` for each that is known, likewise `key=`; last `/`, where files may."""
    files = False
    for action in parser.actions:
        for name in action.option_strings:
            yield name if action.nargs in (0, "*") else f"{name}="
            yield from (f"{name}={choice}" for choice in action.choices or ())
        if not action.option_strings:
            yield from map(str, action.choices or ())
            files |= not action.choices and action.metavar != cli.KEY_VALUE
    for key in parser.keys:
        yield f"{key.path}="
        yield from (f"{key.path}={choice}" for choice in key.choices)
    if files:
        yield "/"


def all_words() -> dict[str, list[str]]:
    """Maps each command to its words, and what comes before a command's last word to those."""
    found: dict[str, list[str]] = {"": ["--help", "--version"]}
    for name, (module, _) in cli.COMMANDS.items():
        *group, last = name.split()
        found[""].append(name.split()[0])
        if group:
            found.setdefault(" ".join(group), []).append(last)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                import_module(module).main(["--help"])
        except cli.HelpShown as shown:
            found[name] = list(options_of(shown.parser))
    return {name: list(dict.fromkeys(words)) for name, words in found.items()}


def completion_script(shell: str) -> str:
    """Returns the script of a shell of `SCRIPTS`."""
    begin, end = ("case '{}'", "") if shell == "fish" else ("'{}')", " ;;")
    arms = list[str]()
    for name, words in all_words().items():
        # Quotes may span lines in each of these shells; no word has a quote in it.
        quoted = "\n".join(words)
        arms.append(f"{begin.format(name)}\n            printf '%s\\n' '{quoted}'{end}")
    text = SCRIPTS[shell].read_text(encoding="utf-8")
    return text.replace("# WORDS", "\n        ".join(arms))


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.config.completion", __doc__ or "")
    parser.add_argument("shell", choices=sorted(SCRIPTS), help="the shell that reads the script")
    print(completion_script(parser.parse(argv).shell), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
