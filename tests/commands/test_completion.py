"""Completion: what a TAB offers is what the commands' help lists, without a Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from jaxrl.__main__ import main as command_main
from jaxrl.config.cli import COMMANDS
from jaxrl.config.completion import SCRIPTS, completion_script
from jaxrl.config.keys import keys
from jaxrl.config.schema import Config

TYPED = """
PATH=/nowhere  # nothing is started when a word is completed
while read -r COMP_POINT && IFS= read -r COMP_LINE && IFS=$'\\t' read -ra COMP_WORDS; do
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    [[ $COMP_LINE == *' ' ]] && (( COMP_CWORD += 1 ))
    _jaxrl
    IFS=$'\\t'; printf '%s\\n' "${COMPREPLY[*]}"; unset IFS
done
"""
KEYS = list(keys(Config))
SECTIONS = sorted({key.path.partition(".")[0] for key in KEYS})


@cache
def bash() -> str:
    return completion_script("bash")


def complete(lines: Sequence[str], folder: Path) -> list[list[str]]:
    """Returns the lines that a TAB at the end of each leads to, by bash itself: it splits a line at
    `=` and `:` too, and puts the reply in place of the last part."""
    parts = [re.findall(r"[=:]+|[^\s=:]+", line) for line in lines]
    told = "".join(
        f"{len(line)}\n{line}\n{chr(9).join(words)}\n"
        for line, words in zip(lines, parts, strict=True)
    )
    source = f"compopt() {{ :; }}\n{bash()}\n{TYPED}"
    (folder / "typed.bash").write_text(source)
    done = subprocess.run(
        ["bash", "--norc", folder / "typed.bash"],
        input=told,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        check=True,
    )
    assert not done.stderr
    found = []
    for line, words, replies in zip(lines, parts, done.stdout.splitlines(), strict=True):
        last = "" if line[-1] in " =:" else words[-1]
        begun = line.removesuffix(last)
        found.append([begun + reply for reply in replies.split("\t") if reply])
    return found


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit):
        command_main(argv)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_tab_offers_what_help_lists(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, their choices, and keys by their sections with `=`; file names elsewhere."""
    typed = f"jaxrl {command}"
    text = helped(capsys, *command.split(), "--help")
    reads_keys = "--help all" in text
    options = set(re.findall(r"(?:^  |^  -\w.*?, )(--[\w-]+)", text, re.MULTILINE))
    options |= set(re.findall(r", (--no-[\w-]+)", text))
    words = f"{typed} --"
    offered, empty = complete([words, f"{typed} --no-such "], tmp_path)
    assert set(offered) == {f"{typed} {option}" for option in options}
    every = helped(capsys, *command.split(), "--help", "all") if reads_keys else ""
    listed = re.findall(r"^  ([a-z_.0-9]+)  \S", every, re.MULTILINE)
    assert (len(listed) > 40) == reads_keys
    assert {f"{typed} --no-such {key}=" for key in listed} <= set(empty)
    begun = [f"{typed} {section}" for section in SECTIONS]
    for line, found in zip(begun, complete(begun, tmp_path), strict=True):
        wanted = {f"{typed} {key}=" for key in listed}
        assert set(found) == {key for key in wanted if key.startswith(line)}


def test_values_are_completed_behind_an_equals_sign(tmp_path: Path) -> None:
    """Of keys with some words for values, these and no others; of others nothing is offered, and
    bash completes a file name."""
    lines = [f"jaxrl train steps=3 {key.path}=" for key in KEYS]
    for key, line, found in zip(KEYS, lines, complete(lines, tmp_path), strict=True):
        named = [word for kind in key.type.split(" or ") for word in kind.split("|")]
        words = [w.removeprefix("list of ") for w in named if "mapping" not in key.type]
        wanted = set(words) - {"str", "int", "float", "bool", "null"}
        wanted |= {"true", "false"} if "bool" in named else set()
        wanted |= {"null"} if wanted and "null" in named else set()
        wanted = set() if "{" in key.type else wanted
        assert set(found) == {f"{line}{word}" for word in wanted}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("jaxrl da", ["jaxrl data"]),
        ("jaxrl data ", ["jaxrl data show"]),
        ("jaxrl data show --st", ["jaxrl data show --student"]),
        ("jaxrl train --resume ", [f"jaxrl train --resume {x}" for x in ("auto", "never", "must")]),
        ("jaxrl train --resume=n", ["jaxrl train --resume=never"]),
        ("jaxrl train --resume must data.chat=r", ["jaxrl train --resume must data.chat=raw"]),
        ("jaxrl train data.chat=raw --dry", ["jaxrl train data.chat=raw --dry-run"]),
        ("jaxrl train --config builtin:quick", []),
        ("jaxrl train --config ", []),
        ("jaxrl train mesh=actor=2,ro", []),
        ("jaxrl generate ru", []),
        ("jaxrl no-such ", []),
        ("jaxrl evaluate dat", ["jaxrl evaluate data.eval=", "jaxrl evaluate data/"]),
        ("jaxrl completion z", ["jaxrl completion zsh"]),
    ],
)
def test_words_are_completed_where_they_may_stand(
    line: str, offered: list[str], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (found,) = complete([line], tmp_path)
    assert set(offered) <= set(found) and bool(found) == bool(offered)
    assert len(found) == len(offered) or "evaluate" in line


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shells_can_read_the_scripts(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(completion_script(shell))
    subprocess.run([shell, "-n", tmp_path / "script"], check=True, timeout=60)
