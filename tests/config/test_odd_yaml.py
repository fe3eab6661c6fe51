"""Config files that are odd YAML, and a working directory that is gone: a few lines each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import and_slow

import jaxrl
from jaxrl.config.schema import Config
from jaxrl.errors import UserError

TAGGED = [
    *("!!bool maybe", "!!timestamp foo", '!!int ""', "!!float x", "!!null x", "!!binary x"),
    *("!!python/object:os.system x", "!foo x", "! x", "!<x> y", "!!set {a}", "!!omap [a: b]"),
    *("!!pairs [a: b]", "!!seq {}", "!!map []", "!!str 1", "!!merge x", "!!value x", "!!int 1:9:x"),
    *("[!!timestamp foo]", "{a: !!bool b}", "{!!str a: b}", "[&a !!int x, *a]"),
]


@pytest.mark.parametrize("value", TAGGED)
def test_a_tag_is_refused_in_one_line(tmp_path: Path, value: str) -> None:
    """Whatever the library would do with it: its constructors raise any error."""
    file = tmp_path / "run.yaml"
    for text in (f"steps: {value}", f"sampling:\n  stop: {value}", f"- {value}", value):
        file.write_text(text)
        with pytest.raises(UserError, match="leave out the tag ") as error:
            Config.load(file)
        assert "\n" not in str(error.value) and f"{file}: line " in str(error.value)
    if value.startswith(("[", "{")):
        with pytest.raises(UserError, match="leave out the tag "):
            Config.load(None, [f"name={value}"])


ODD = [
    *("&a [*a]", "*x", "&a {b: *a}", "{<<: *x}", "<<: 1", "9" * 5000, "? [a]: b", "{[a]: b}", "["),
    *("%YAML 9.9", "--- a\n--- b", "\x00", "\x85", "@", "`x`", "- ", ": x", "a: b: c", "&", "*"),
    *("~: x", "{a: 1, a: 2}", "k" * 5000 + ": x", "[" * 60 + "]" * 60, "{a: " * 10_000, "\t\t: x"),
    *("- " * 3000 + "x", "[*a, *a, &a x]", "? ? ? x", "{a: *b, b: &b {c: *b}}", "\u2028", "!"),
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)
    ),
]


@pytest.mark.parametrize("text", ODD)
def test_no_text_is_more_than_some_lines_of_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    for content in (text, f"steps: {text}\n", f"optimizer:\n  b1: {text}\n", f"seed: 1\n{text}"):
        file.write_text(content)
        _refused_shortly(lambda: Config.load(file, []))
    for override in (text, f"steps={text}", f"name=[{text}]", f"{text}=1", f"optimizer={text}"):
        _refused_shortly(lambda override=override: Config.load(None, [override]))


def _refused_shortly(load: Callable[[], object]) -> None:
    try:
        load()
    except UserError as error:
        assert str(error).count("\n") < 7 and len(str(error)) < 1500


GONE = [["train", "--dry-run"], ["export", "a", "b"], ["train", "--config", "x.yaml"]]


@pytest.mark.parametrize("words", and_slow(GONE[:2], GONE[2:]), ids=str)
def test_a_working_directory_that_was_removed_is_one_line(words: list[str], tmp_path: Path) -> None:
    lines = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m jaxrl "$@"'
    command = ["sh", "-c", lines, sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": str(Path(jaxrl.__file__).parent.parent)}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr
    assert "working directory was removed" in done.stderr or words[1] != "--dry-run"
