"""Runs whose models are named by their ids on a hub: which commit they use, now and on resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_data import add_data
from hub_server import Hub
from huggingface_hub import constants
from runs import CONFIGS, CONSTANT, LENGTH, SHORT, save_model, save_reward_model

from jaxrl import Config, train
from jaxrl.config import cli, yaml_text
from jaxrl.errors import UserError
from jaxrl.formats import hub as hub_module
from jaxrl.process.json_types import JsonObject
from jaxrl.run.attempt import prepare_run
from jaxrl.run.names import fetch_models, with_commits
from jaxrl.train import dry_run, main

pytestmark = pytest.mark.usefixtures("shared_programs")
SFT = [
    *SHORT,
    *CONSTANT,
    *("student.model=org/student", "algorithm=sft", "data.train=arithmetic", "data.chat=raw"),
    *("mesh=actor+rollout=1", "eval.every=0", "checkpoint.every=1", "schedule=serial"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "encoder").mkdir()
    (folder / "encoder" / "config.json").write_text(json.dumps(CONFIGS["bert"]))
    shutil.copy(save_reward_model(folder) + "/tokenizer.json", folder / "encoder")
    return {
        "org/student": Path(save_model(folder / "student", 32, 1, seed=0)),
        "org/teacher": Path(save_model(folder / "teacher", 48, 1, seed=1, rows=272)),
        "org/reward": folder / "reward_model",
        "org/encoder": folder / "encoder",
    }


@pytest.fixture
def full(hub: Hub, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)
    for repo, folder in models.items():
        hub.add(repo, folder)
    return hub


def test_a_dry_run_fetches_configs_and_tokenizers_only(full: Hub, tmp_path: Path) -> None:
    add_data(full)
    given = ["teacher.model=org/teacher", "data.eval=hf:openai/gsm8k:main", "distill_weight=1"]
    given += ["data.train=[arithmetic, hf:openai/gsm8k:main:train]", "data.prompt_key=question"]
    given += ["algorithm=gspo", LENGTH, "reward.model=org/reward", "group_size=4"]
    given += ["policy.advantages=similarity", "grouper.model=org/encoder", "policy.kl_coef=0.1"]
    plan = dry_run(Config.load(None, [*SFT, *given]))
    assert plan.refusals == ()
    fetched = full.fetched()
    assert fetched and {Path(file).suffix for file in fetched} == {".json", ".jinja", ".md"}
    commit = full.repos["org/teacher"].refs["main"]
    assert f"teacher.model: org/teacher is commit {commit[:12]}; 0.1 MB to fetch" in plan.text()
    commit = full.repos["datasets/openai/gsm8k"].refs["main"]
    assert f"data.train: hf:openai/gsm8k:main:train is commit {commit[:12]}; 0.0 MB" in plan.text()
    assert plan.config.data.eval == (f"hf:openai/gsm8k@main@{commit}:main",)
    assert plan.config.reward.model == f"org/reward@main@{full.repos['org/reward'].refs['main']}"
    assert not [path for path in tmp_path.iterdir() if path.name != "hub_home"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("student.model=org/studnet", "student.model: org/studnet|did you mean org/student?"),
        ("teacher.model=org/gated", "teacher.model: org/gated is gated|HF_TOKEN"),
        ("teachers={a: org/teacher, b: org/none}", "teachers: org/none|neither a file or folder"),
        ("student.model=org/student@v1", "student.model: org/student@v1|no revision 'v1'"),
        ("data.train=hf:openai/gsm8k:mian", "data.train: hf:openai/gsm8k:mian|did you mean main?"),
        ("data.eval=hf:openai/gsm8k:socratic", "data.eval: hf:openai/gsm8k:socratic|no split eval"),
        ("data.train=hf:openai/gsm8k:main", "data.train: |`prompt`|`question`"),
        ("student.model=org/bin", "student.model: org/bin|no model.safetensors"),
    ],
)
def test_a_run_is_refused_in_a_line_that_names_the_key(
    full: Hub,
    models: dict[str, Path],
    override: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_data(full)
    full.add("org/gated", models["org/teacher"], gated=True)
    files = {path.name: path.read_bytes() for path in models["org/student"].iterdir()}
    full.add("org/bin", {name: x for name, x in files.items() if name != "model.safetensors"})
    if "teacher" in override:
        override += "\talgorithm=gkd"
    assert cli.run(main, [*SFT, *override.split("\t")]) == cli.EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error.split("error: ")[1].splitlines()) == 1
    for word in words.split("|"):
        assert word in error
    assert not (tmp_path / "runs").exists()


def test_a_run_resumes_with_its_commit_though_the_branch_has_moved(
    full: Hub, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_data(full)
    before = full.repos["org/student"].refs["main"]
    of_data = full.repos["datasets/openai/gsm8k"].refs["main"]
    data = ["data.train=hf:openai/gsm8k:main:train", "data.prompt_key=question"]
    data += ["data.completion_key=answer", "data.answer_key=none"]

    def run(*overrides: str) -> JsonObject:
        hub_module._snapshot.cache_clear()
        train(Config.load(None, [*SFT, *data, "run_dir=run", *overrides]))
        return yaml_text.read_mapping(tmp_path / "run" / "config.yaml")

    assert run("steps=1")["student"]["model"] == f"org/student@main@{before}"
    files = {path.name: path.read_bytes() for path in models["org/student"].iterdir()}
    files["model.safetensors"] = files["model.safetensors"][:-1] + b"\1"
    after = full.add("org/student", files)
    full.add("datasets/openai/gsm8k", {"main/train.jsonl": '{"question": "?", "answer": "!"}'})
    full.asked.clear()
    resumed = run("steps=2")
    assert resumed["student"]["model"] == f"org/student@main@{before}"
    assert resumed["data"]["train"] == [f"hf:openai/gsm8k@main@{of_data}:main:train"]
    assert full.fetched() == []
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count(f"student.model: org/student is commit {before[:12]}") == 2
    with pytest.raises(UserError, match="student.model: org/student@"):
        run("steps=3", f"student.model=org/student@{after}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for asked in (Config.load(None, [*SFT, "run_dir=run"]), Config.load("run/config.yaml")):
        config, _ = with_commits(asked)
        assert config.student.model == f"org/student@main@{before}"


def test_a_name_that_a_teacher_s_server_knows_is_none_on_the_hub(full: Hub) -> None:
    served = "{address: 'http://localhost:1/v1', api: openai, api_model: org/%s}"
    teachers = f"teachers={{a: {served % 'teacher'}, b: {served % 'none'}}}"
    asked = Config.load(None, [*SFT, "algorithm=gkd", teachers])
    config, notes = with_commits(asked)
    assert config.teachers == asked.teachers
    assert [note.split(":")[0] for note in notes] == ["student.model"]
    fetch_models(config)
    assert set(full.fetched(".safetensors")) == {"model.safetensors"}


def test_a_commit_that_is_named_is_kept_whatever_stands_beside_it(
    full: Hub, models: dict[str, Path], tmp_path: Path
) -> None:
    first = full.repos["org/student"].refs["main"]
    files = {path.name: path.read_bytes() for path in models["org/student"].iterdir()}
    second = full.add("org/student", files | {"README.md": "second"})

    def pinned(student: str, teacher: str) -> list[str | None]:
        models = [f"student.model=org/student{student}", f"teacher.model=org/student{teacher}"]
        config, _ = with_commits(Config.load(None, [*SFT, "algorithm=gkd", *models, *of_run]))
        return [config.student.model, config.teacher.model]

    def names(*commits: str) -> list[str]:
        return [f"org/student@main@{commit}" for commit in commits]

    of_run: list[str] = []
    for one, other in ((first, second), (second, first)):
        assert pinned(f"@main@{one}", f"@main@{other}") == names(one, other)
    assert pinned("", f"@main@{first}") == names(second, first)
    assert pinned(f"@main@{first}", "@main") == names(first, second)
    assert pinned("", f"@{first}") == [*names(second), f"org/student@{first}"]

    # Of a run there, each key has its own commit, and one that is named still wins.
    of_run += ["run_dir=run", "resume=auto"]
    recorded = {"student": {"model": names(first)[0]}, "teacher": {"model": names(second)[0]}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(recorded))
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    third = full.add("org/student", files | {"README.md": "third"})
    assert pinned("", "") == pinned("@main", "@main") == names(first, second)
    assert pinned(f"@main@{third}", "") == names(third, second)


def test_two_teachers_of_one_name_resume_with_a_commit_each(
    full: Hub, models: dict[str, Path], tmp_path: Path
) -> None:
    first = full.repos["org/teacher"].refs["main"]
    files = {path.name: path.read_bytes() for path in models["org/teacher"].iterdir()}
    second = full.add("org/teacher", files | {"README.md": "second"})
    given = f"teachers={{a: org/teacher, b: org/teacher@main@{first}}}"
    asked = Config.load(None, [*SFT, "algorithm=gkd", given, "run_dir=run", "resume=auto"])
    begun, _ = with_commits(asked)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(begun.dump())
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    full.add("org/teacher", files | {"README.md": "third"})
    resumed, _ = with_commits(asked)
    assert [one.model for one in resumed.teachers.values()] == [
        f"org/teacher@main@{commit}" for commit in (second, first)
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train=none.jsonl", "none.jsonl"),
        ("resume=must", "holds no run to resume"),
        ("max_prompt_tokens=1", "max_prompt_tokens=1"),
    ],
)
def test_no_weight_is_fetched_for_a_run_that_is_refused(
    full: Hub, override: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        prepare_run(Config.load(None, [*SFT, override]))
    assert not full.fetched(".safetensors")


def test_fetched_weights_that_do_not_fit_their_config_are_refused_before_the_run(
    full: Hub, models: dict[str, Path]
) -> None:
    files = {path.name: path.read_bytes() for path in models["org/student"].iterdir()}
    files["model.safetensors"] = (models["org/teacher"] / "model.safetensors").read_bytes()
    full.add("org/student", files)
    with pytest.raises(UserError, match="shape"):
        prepare_run(Config.load(None, SFT))
    assert full.fetched(".safetensors") == ["model.safetensors"]
