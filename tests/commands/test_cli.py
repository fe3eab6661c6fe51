"""Command lines: options in any order, bad input in a few lines, help with every key."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from cases import and_slow

import jaxrl
from jaxrl.__main__ import main as command_main
from jaxrl.config import cli
from jaxrl.config import keys as config_keys
from jaxrl.config.cli import COMMANDS
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.errors import UserError, near, unknown, user_input
from jaxrl.export import main as export
from jaxrl.generate import main as generate
from jaxrl.report import __main__ as report
from jaxrl.telemetry import plot
from jaxrl.telemetry.metrics import METRICS_FILE

MODULE = "jaxrl.train"
ROOT = Path(__file__).parent.parent.parent


def topics(path: str) -> list[str]:
    """A key, its section, the section of that, and its last word."""
    words = path.split(".")
    return [*(".".join(words[:n]) for n in range(1, len(words) + 1)), words[-1]]


def parse(*argv: str) -> argparse.Namespace:
    return cli.parse_run(argv, module=MODULE, description="Trains.")


def test_options_and_overrides_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(Config.load(None, ["steps=9"]).dump(), encoding="utf-8")
    run = parse("seed=1", "--mesh", "actor=2", "batch_size=3", "--config", str(path), "--dry-run")
    config = run.config
    assert (config.steps, config.seed, config.batch_size, config.mesh) == (9, 1, 3, "actor=2")
    assert run.dry_run


def test_no_arguments_is_the_quickstart() -> None:
    run = parse()
    assert run.config == Config.load()
    assert not run.dry_run


def test_the_mesh_option_is_the_mesh_key() -> None:
    assert parse("--mesh", "actor=4").config == parse("mesh=actor=4").config
    assert parse("--mesh=actor=4", "mesh=actor=4").config.mesh == "actor=4"


@pytest.mark.parametrize(
    ("option", "value", "other"),
    [("mesh", "actor=4", "actor=2"), ("resume", "must", "auto"), ("launcher", "local", "ray")],
)
@pytest.mark.parametrize("first", [True, False])
def test_an_option_and_an_override_of_one_key_agree(
    option: str, value: str, other: str, first: bool
) -> None:
    words = [f"--{option}={value}"]
    with pytest.raises(UserError) as error:
        parse(*(words if first else []), f"{option}={other}", *([] if first else words))
    assert f"--{option} {value}" in str(error.value) and f"{option}={other}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        ([], "config: the built-in quickstart"),
        (["steps=3"], "config: the built-in quickstart, with 1 key set otherwise"),
        (
            ["student.model=a", "data.train=b.jsonl", "teacher.model=c"],
            "config: no file and student.model and data.train set, so the defaults, with 3 keys set"
            " otherwise",
        ),
        (["--config", "builtin:quickstart"], "config: the built-in quickstart"),
    ],
)
def test_it_is_said_where_the_other_keys_come_from(argv: list[str], note: str) -> None:
    assert parse(*argv).base.note == note


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mehs", "x"], ["--mehs", "did you mean --mesh?"]),
        (["--conf=x"], ["--conf=x", "--config"]),
        (["--steps=3"], ["write steps=3"]),
        (["--optimizer.b1", "3"], ["write optimizer.b1=VALUE"]),
        (["--mesh"], ["--mesh", "expected one argument"]),
        (["nonsense"], ["'nonsense'", "key=value"]),
        (["distill.jsd_bet=1"], ["distill.jsd_beta"]),
        (["--config", "absent.yaml"], ["absent.yaml", "No such file"]),
    ],
)
def test_bad_input_is_a_few_lines_and_exit_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: Sequence[str]) -> None:
        parse(*argv)

    assert cli.run(command, argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 3
    for word in words:
        assert word in err


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: Sequence[str]) -> None:
        raise KeyboardInterrupt

    def broken(argv: Sequence[str]) -> None:
        raise ValueError("ours")

    assert cli.run(lambda argv: None, []) == 0
    assert cli.run(lambda argv: 130, []) == 130
    assert cli.run(interrupted, []) == 130
    # A mistake of ours keeps its traceback: Python ends with exit code 1.
    with pytest.raises(ValueError, match="ours"):
        cli.run(broken, [])


def helped(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        command_main(argv)
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_all_lists_every_key_with_type_range_default_and_docstring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = " ".join(helped(capsys, "train", "--help", "all").split())
    for key in config_keys.keys(Config):
        assert f" {key.path} {key.type}" in words
        assert key.doc in words
    assert "student.model str [required]" in words
    assert "optimizer.learning_rate float, at least 0 [default 1e-05]" in words
    assert "data.shuffle bool [default true]" in words
    assert "algorithm str [default gkd] gkd: distil a teacher" in words
    assert "grpo, dr_grpo, dapo, gspo, gspo_token, cispo, sapo, gmpo, luspo: learn" in words
    assert "actor.micro_batch_tokens int or null, at least 1 [default 16384]" in words


@pytest.mark.parametrize("columns", and_slow([80], [100, 140]))
@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_fits_a_screen_and_names_what_a_first_call_needs(
    command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = helped(capsys, command, "--help")
    assert text == helped(capsys, "--help", command)
    assert len(text.splitlines()) <= 48 + 10 * (command == "score")  # its options besides
    if command in ("train", "evaluate", "score"):
        common = re.findall(r"^  ([a-z._]+)(?:=\S+)?  ", text.split("common keys")[1], re.MULTILINE)
        assert set(common) <= {key.path for key in config_keys.keys(Config)} and len(common) > 3
        assert "--help KEY" in text and "--help all" in text
    if command == "train":
        *runs, planned = cli.EXAMPLES
        assert all(line in text for line in cli.EXAMPLES)
        assert all(parse(*words.split()) for words in runs)
        assert re.findall(r"--\w[\w-]*", planned) == ["--config", "--dry-run", "--target"]


KEYS = config_keys.keys(Config)
WORDS_OF_KEYS = sorted({part for key in KEYS for part in topics(key.path)})
SECTIONS = [w for w in WORDS_OF_KEYS if any(key.path.startswith(f"{w}.") for key in KEYS)]
TOPICS = [word for word in WORDS_OF_KEYS if word not in SECTIONS]


@pytest.mark.parametrize(
    "word", and_slow([*SECTIONS, *TOPICS[::5]], [w for i, w in enumerate(TOPICS) if i % 5])
)
def test_help_tells_about_any_section_key_or_last_word_of_a_key(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(capsys, "train", "--help", word)
    shown = re.findall(r"^  ([a-z][\w.]*)  \S", text, re.MULTILINE)
    assert shown and all(f".{word}." in f".{path}." for path in shown)
    keys = {key.path for key in config_keys.keys(Config)}
    sections = {path for path in keys if path.startswith(f"{word}.")}
    assert set(shown) <= keys and sections <= set(shown)
    assert len(text.splitlines()) < 250


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["train", "--help", "optimzer"], "did you mean optimizer?"),
        (["train", "--help", "learning_rat"], "did you mean optimizer.learning_rate?"),
        (["train", "--help", "lr"], "here it is optimizer.learning_rate"),
        (["evaluate", "--help", "optimizer"], "sections are student, data, sampling, rollout"),
    ],
)
def test_help_about_no_key_names_the_near_one(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(command_main, argv) == 2
    out, err = capsys.readouterr()
    assert told in err and not out


WORDS = {name: here for name, here in config_keys.other_libraries()[0].items() if "." not in name}


@pytest.mark.parametrize(
    "name", and_slow(sorted(WORDS)[::4], [w for i, w in enumerate(sorted(WORDS)) if i % 4])
)
def test_an_option_that_is_a_key_elsewhere_names_ours(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--model_name_or_path X`, `--learning_rate=1e-5`: with dashes and underscores."""
    for words in ([f"--{name}", "1"], [f"--{name.replace('_', '-')}=1"]):
        code = cli.run(lambda argv: parse(*argv) and None, words)
        err = capsys.readouterr().err
        assert code == 2 and "error: unknown option --" in err
        assert any(key in err for key in WORDS[name]), err


def test_without_jax() -> None:
    """Help and errors answer at once: parsing must not load jax."""
    code = "import sys; import jaxrl.config.cli; print(int('jax' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


def test_near_names_a_close_choice_only() -> None:
    assert near("actr", ["actor", "teacher"]) == " (did you mean actor?)"
    assert near("xyz", ["actor", "teacher"]) == ""
    assert str(unknown("role", "xyz", ["b", "a"])) == "unknown role 'xyz': one of a, b"


def test_user_input_turns_value_errors_into_the_users() -> None:
    with pytest.raises(UserError, match=r"^--n: bad$"), user_input("--n"):
        raise ValueError("bad")
    with pytest.raises(TypeError), user_input():
        raise TypeError


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_the_command_lists_all_commands_without_jax(argv: list[str]) -> None:
    code = "import sys; from jaxrl.__main__ import main; main(sys.argv[1:])"
    code += "; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("train", "evaluate", "generate", "export", "report", "plot", "devices"):
        assert f"  {name} " in done.stdout
    assert "  serve-teacher " in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_its_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same arguments; `--help` of both differs only in how it says it was called."""
    module = COMMANDS[name][0]
    shown = []
    for argv0, main in (("jaxrl", lambda: command_main([name, "--help"])), ("x", None)):
        monkeypatch.setattr(sys, "argv", [f"/usr/bin/{argv0}"])
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
        asked = main or (lambda: importlib.import_module(module).main(["--help"]))
        with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
            asked()
        assert end.value.code == 0
        shown.append(" ".join(out.getvalue().split()))
    assert shown[0].startswith(f"usage: jaxrl {name} [")
    called = f"python -m {module.removesuffix('.__main__')} "
    head, examples, tail = shown[0].partition("examples:")
    head, tail = (part.replace(f"jaxrl {name} ", called, n) for part, n in ((head, 1), (tail, -1)))
    assert head + examples + tail == shown[1]


def test_an_unknown_command_is_refused_with_the_near_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(command_main, ["trian"]) == 2
    assert "unknown command 'trian' (did you mean train?)" in capsys.readouterr().err


def test_the_installed_command_and_the_package_are_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["jaxrl"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    command = [sys.executable, "-m", "jaxrl", "plot"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "python -m jaxrl plot --help" in done.stderr


@pytest.mark.parametrize("words", [["--version"], ["train", "--version"], ["report", "--version"]])
def test_the_version_is_the_packages(words, capsys):
    assert command_main(words) is None
    assert capsys.readouterr().out == f"jaxrl {jaxrl.__version__}\n"


def test_a_folder_of_the_same_name_hides_nothing(tmp_path):
    """Above a clone: that folder has no __init__.py, and an install by a path comes before it."""
    (tmp_path / "jaxrl" / "docs").mkdir(parents=True)
    run = [sys.executable, "-m", "jaxrl", "--version"]
    shown = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert shown.stdout == f"jaxrl {jaxrl.__version__}\n", shown.stderr
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["package-dir"] == {"": "."}  # pip install -e adds a path


def test_quiet_is_a_key():
    given = cli.parse_run(["--quiet", "steps=2"], module=MODULE, description="")
    assert given.config.logging.console == "quiet"


def test_the_beginning_of_a_command_names_it():
    with pytest.raises(UserError, match="did you mean serve-teacher"):
        command_main(["serve"])


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"]])
def test_a_reader_that_ends_early_is_no_error(words: list[str]) -> None:
    """As in `jaxrl train --help | head -1`."""
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time, sys; time.sleep(0.5)\nfrom jaxrl.__main__ import script; script()",
            *words,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.stderr.read() == ""
    assert run.wait(60) in (0, 1)


def test_a_word_too_many_is_called_an_argument() -> None:
    with pytest.raises(UserError, match=r"^unknown argument 12\+3="):
        command_main(["generate", "runs/x", "12+3="])


def test_a_tilde_is_the_home_folder_wherever_a_path_may_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run, here = tmp_path / "home", tmp_path / "home" / "run", tmp_path / "here"
    run.mkdir(parents=True), here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    config = Config.load(None, ["run_dir=~/run"])
    assert config.run_path == run
    (run / CONFIG_FILE).write_text(config.dump(), encoding="utf-8")
    (run / METRICS_FILE).write_text('{"step": 0, "sft/loss": 1.0}\n', encoding="utf-8")
    assert cli.run(report.main, ["~/run", "-o", "~/x.html"]) == 0
    if importlib.util.find_spec("matplotlib"):
        assert cli.run(plot.main, ["~/run", "-o", "~/x.svg"]) == 0
        assert (home / "x.svg").is_file()
    assert cli.run(export, ["builtin:student", "~/model"]) == 0
    (home / "p.jsonl").write_text('{"prompt": "1+1="}\n', encoding="utf-8")
    words = ["--prompts", "~/p.jsonl", "--max-new-tokens", "1", "--out", "~/out.jsonl"]
    assert cli.run(generate, ["~/model", *words]) == 0
    for name in ("x.html", "model/config.json", "out.jsonl"):
        assert (home / name).is_file()
    assert not list(here.iterdir())
