"""The configs that come with jaxrl: their names, and the commands that make what they read."""

import re
import shlex

import pytest

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config import cli
from jaxrl.config.builtin_configs import (
    FOLDER,
    PREFIX,
    builtin_configs,
    commands,
    how_to_make,
    listing,
)
from jaxrl.config.schema import Config
from jaxrl.data.source import open_source
from jaxrl.errors import UserError
from jaxrl.run.evaluation import prepare_evaluation
from jaxrl.train import main

NAMES = sorted(builtin_configs())


def made_in_runs(name):
    """What a built-in config reads from `runs/`."""
    text = re.sub(r"#.*", "", (FOLDER / f"{name}.yaml").read_text())
    return re.findall(r"runs/[\w/.-]*\w", text)


READ = [(name, path) for name in NAMES for path in made_in_runs(name)]


def written(command):
    """The file or folder that a command at the top of a config writes, from the working folder."""
    python, m, module, *words = shlex.split(command)
    assert (python, m) == ("python", "-m")
    if module == "jaxrl.train":
        config = None
        if words[:1] == ["--config"]:
            config, words = words[1], words[2:]
        return str(Config.load(config, [word for word in words if word[0] != "-"]).run_path)
    assert (FOLDER.parent / "scripts" / f"{module.removeprefix('jaxrl.scripts.')}.py").is_file()
    return words[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_top_of_a_config_says_what_it_is_and_how_it_is_run(name):
    assert 15 <= len(builtin_configs()[name]) <= 110
    *_, last = commands(name)
    assert last.startswith(f"python -m jaxrl.train --config {PREFIX}{name}")
    assert Config.load(PREFIX + name) == Config.load(FOLDER / f"{name}.yaml")


@pytest.mark.parametrize(("name", "path"), READ)
def test_what_a_config_reads_from_runs_is_made_by_the_commands_before_it(
    name, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = [line for line in commands(name) if PREFIX + name not in line.split()]
    assert any(f"{path}/".startswith(f"{written(line)}/") for line in before)
    assert how_to_make(path).splitlines()[1:] == [f"    {line}" for line in before]
    reads = open_source if path.endswith(".jsonl") else resolve_model
    with pytest.raises(UserError, match=f"(?s){path}.*o such file.*; make it with\n    python -m"):
        reads(path)


def test_only_what_commands_of_ours_make_is_explained():
    assert len(READ) > 8
    assert not [path for path in ("runs/other", "runs", "data/x.jsonl", "") if how_to_make(path)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtin:quickstart_gpso", r"unknown built-in config .*did you mean quickstart_gspo\?"),
        ("builtin:zzz", "unknown built-in config 'zzz': one of gpt_oss.*two_teachers"),
        ("builtin:", f"(?s)lacks a name.*{re.escape(listing())}"),
        ("configs/quickstart_gspo.yaml", r"(?s)No such file.*did you mean builtin:quickstart_gspo"),
    ],
)
def test_a_wrong_name_of_a_config_is_refused_wherever_one_is_accepted(
    name, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.run(main, ["--config", name]) == 2
    assert re.search(message, capsys.readouterr().err)
    for load in (
        Config.of,
        lambda name: prepare_evaluation(resolve_model("builtin:student"), name, (), None),
    ):
        with pytest.raises(UserError, match=message):
            load(name)
