"""The ready-made configs for GPUs, planned from `config.json` alone: no weights, no GPU."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from large_models import HUGE, LARGE, QWEN, qwen3

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.plan import Plan, build, make_plan
from jaxrl.plan.roles import BACKWARD, LOSS, STEP
from jaxrl.process.gpu_memory import SHARE
from jaxrl.rewards.functions import find
from jaxrl.runtime.cluster import Host, process_slots
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place
from jaxrl.train import main

CONFIGS = Path(__file__).parent.parent.parent / "configs"


SIZES = {
    "Qwen2.5-1.5B-Instruct": QWEN,
    "Qwen3-1.7B": qwen3(2048, 28, 16, 6144),
    "Qwen3-4B": qwen3(2560, 36, 32, 9728),
    "Skywork-Reward-V2-Qwen3-0.6B": qwen3(1024, 28, 16, 3072),
    "Skywork-Reward-V2-Qwen3-1.7B": qwen3(2048, 28, 16, 6144),
    "bge-m3": {
        "model_type": "xlm-roberta",
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "hidden_act": "gelu",
    },
}
"""Folder in the configs that learn from rewards -> what its config.json says."""
CHIPS = (24, 40, 80, 141)
LONGEST_S = 60
"""Of a dry run; it takes about 4 on a free laptop, and may take 20."""


HERE = ["data.train=arithmetic", "data.eval=arithmetic"]
"""Data that are there, in place of the configs' own."""


@pytest.fixture
def large_host(monkeypatch):
    """A host on whose emulated devices everything fits: it says nothing about GPUs."""
    monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: 10**13)


def models(folder: Path) -> list[str]:
    """Overrides that name a student and a teacher of which there is only the config.json."""
    found = []
    for role, raw in (("student", QWEN), ("teacher", QWEN | LARGE)):
        (folder / role).mkdir()
        (folder / role / "config.json").write_text(json.dumps(raw))
        found.append(f"{role}.model={folder / role}")
    return found


@pytest.mark.parametrize("split", ["2-2-4", "1-3-4"])
def test_eight_gpu_configs_are_planned_from_config_json_alone(split, large_host, tmp_path, capsys):
    config = str(CONFIGS / f"qwen2.5_7b_to_1.5b_{split}.yaml")
    assert cli.run(main, ["--config", config, "--dry-run", *models(tmp_path), *HERE]) == 0
    printed = capsys.readouterr().out
    actor, rollout, teacher = split.split("-")
    assert f"actor={actor},rollout={rollout},teacher={teacher}" in printed
    assert "on GPUs of 80 GB, of which jax takes 92%: fits" in printed
    assert "teacher.model: no weights here, only a config.json" in printed


def test_the_config_for_two_hosts_is_planned_from_config_json_alone(tmp_path):
    """Both hosts are full, no pool needs both, and the teacher is split no further than it must."""
    config = CONFIGS / "qwen2.5_32b_to_7b_two_hosts.yaml"
    asked = []
    for role, raw in (("student", QWEN | LARGE), ("teacher", QWEN | LARGE | HUGE)):
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text(json.dumps(raw))
        asked.append(f"{role}.model={tmp_path / role}")
    command = [sys.executable, "-m", "jaxrl.train", "--config", str(config), "--dry-run", *asked]
    done = subprocess.run([*command, *HERE], capture_output=True, text=True, cwd=tmp_path)
    fits = "on GPUs of 80 GB, of which jax takes 92%: fits (teacher: data=2 tensor=4)"
    assert fits in done.stdout, done.stderr
    hosts = [Host(name, name, name, 64, 64, 8, 8, 1, 1) for name in ("first", "second")]
    placement = place(Config.load(config).mesh, ("actor", "rollout", "teacher"))
    slots = process_slots(placement, hosts, "GPU", None)
    where = [(slot.host.name, slot.devices) for slot in slots]
    assert where == [("first", 4), ("first", 4), ("second", 8)]


def test_a_plan_that_does_not_fit_ends_with_2_after_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: 8 * 10**9)
    config = str(CONFIGS / "qwen2.5_7b_to_1.5b_2-2-4.yaml")
    assert cli.run(main, ["--config", config, "--dry-run", *models(tmp_path), *HERE]) == 2
    printed = capsys.readouterr()
    assert re.search(r"^ .* teacher .* cpu 4-7", printed.out, re.MULTILINE)
    assert "does not fit" in printed.err and "=" in printed.err
    assert "the run would be refused" not in printed.err


def model_folder(folder: Path, name: str) -> str:
    """A folder that has a config.json and nothing else."""
    place, raw = folder / name, dict(SIZES[name])
    place.mkdir()
    if "Reward" in name:
        raw |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (place / "config.json").write_text(json.dumps(raw))
    return str(place)


def described(config: Config, folder: Path) -> list[str]:
    """Overrides that name models of which there is only the config.json."""
    keys = {
        "student.model": config.student.model,
        "reward.model": config.reward.model,
        "grouper.model": config.grouper.model,
    }
    return [f"{key}={model_folder(folder, Path(path).name)}" for key, path in keys.items() if path]


REWARDED = sorted(path.stem for path in CONFIGS.glob("qwen*_gspo_*.yaml"))
REWARDED += sorted(path.stem for path in CONFIGS.glob("qwen*_similarity_*.yaml"))


@pytest.mark.parametrize("name", REWARDED)
def test_configs_that_learn_from_rewards_are_planned_and_fit(name, large_host, tmp_path, capsys):
    """Every role with its devices and bytes, those on a slice and those that take turns too."""
    config = Config.load(CONFIGS / f"{name}.yaml")
    assert config.name == name
    asked = described(config, tmp_path)
    path = str(CONFIGS / f"{name}.yaml")
    assert cli.run(main, ["--config", path, "--dry-run", *asked, *HERE]) == 0
    printed = capsys.readouterr().out
    assert "on GPUs of 80 GB, of which jax takes 92%: fits" in printed
    for role in needed_roles(config):
        assert re.search(rf"^ .* {role} .* (cpu|gpu) \d", printed, re.MULTILINE), role


@pytest.mark.parametrize("name", REWARDED)
def test_configs_that_learn_from_rewards_use_the_memory_that_there_is(name, tmp_path):
    """Of 80 GB: with a tenth kept free, no more slots and no less recomputation would fit."""
    path = CONFIGS / f"{name}.yaml"
    config = Config.load(path, overrides=described(Config.load(path), tmp_path))
    plan = make_plan(config, needed_roles(config), limit_gb=0.9 * SHARE * 80)
    assert plan.fits
    room = [line for line in plan.verdict if line.endswith(" GB")]
    assert not [line for line in room if "rollout.slots" in line or "actor.remat" in line], room


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_names_the_same_files_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    there = Config.load(path.relative_to(CONFIGS.parent))
    monkeypatch.chdir(tmp_path)
    assert Config.load(path) == there
    assert all(find(text) for text in there.reward.functions)
    ours = [Path(text) for text in there.data.train if text.endswith(".jsonl")]
    beside = [text for text in path.read_text().split() if text.startswith("data/prompts")]
    assert [place for place in ours if place.is_absolute()] == [CONFIGS / text for text in beside]


def test_the_rewarded_quickstart_is_planned_from_another_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "quickstart_gspo.yaml")
    asked = ["--config", config, "--dry-run", "batch_size=8", "mesh=actor+rollout=1"]
    assert cli.run(main, asked) == 0
    assert "actor" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_fits_which_gpus_and_soon(tmp_path):
    config = str(CONFIGS / "qwen2.5_7b_to_1.5b_1-3-4.yaml")
    command = [sys.executable, "-m", "jaxrl.train", "--config", config, "--dry-run"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *models(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert time.monotonic() - started < LONGEST_S
    assert done.returncode == 2, done.stderr  # its data are not here
    assert "the run would be refused: data.train: data/train.jsonl" in done.stderr
    lines = done.stdout.splitlines()
    (needed,) = [line for line in lines if line.startswith("each GPU needs: ")]
    need = {name: float(gb) for name, gb in re.findall(r"(\w+) ([\d.]+) GB", needed)}
    assert set(need) == {"actor", "rollout", "teacher"}
    for size in CHIPS:
        (verdict,) = [line for line in lines if line.startswith(f"on GPUs of {size} GB")]
        small = [name for name, gb in need.items() if gb > SHARE * size]
        if "teacher: data" in verdict or "teacher: tensor" in verdict:
            small = [name for name in small if name != "teacher"]  # split so that it fits
        assert ("does not fit" in verdict) == bool(small)
        for name in small:  # by how much, and what to do
            said = re.search(rf"{name} needs {need[name]} GB .*?, ([\d.]+) too much", verdict)
            assert said and float(said[1]) == pytest.approx(need[name] - SHARE * size, abs=0.11)
            advice = [line for line in lines if line.startswith(f"for {size} GB: {name}: ")]
            assert any(f"{name}." in line and "=" in line for line in advice)
            assert any("which fits" in line or "more than its" in line for line in advice)


def account(roles: str, **changes: object) -> Plan:
    """Of the small Qwen in bfloat16, with bfloat16 Adam."""
    raw = {
        "mesh": roles,
        "batch_size": 2,
        "group_size": 1,
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"train": "arithmetic"},
        "actor": {"param_dtype": "bfloat16", "moment_dtype": "bfloat16"},
        "optimizer": {"clip_norm": None},
        "distill": {"signal": "topk", "chunk_tokens": 128, "lean": True},
        "rollout": {"slots": 80},
    }
    config = Config.parse(raw | changes)
    student, teacher = (DecoderConfig.from_hf(raw) for raw in (QWEN, QWEN | LARGE))
    names = ("actor", "rollout", "teacher")
    return build(config, names, place(roles, names), student, teacher, Visible((), None))


def test_the_sources_account_of_qwen_1_5b():
    """Actor 12-13 GB: 3 parameters, 3 gradients, 6 Adam, 1-2 KV and activations. Rollout 5-6 GB: 3
    parameters, 2-3 KV (bf16, one GPU each, 1024 positions)."""
    found = account("actor=1,rollout=1,teacher=1")
    actor, rollout = found.accounts["actor"], found.accounts["rollout"]
    n = DecoderConfig.from_hf(QWEN).n_params
    assert n == 1_543_714_304  # 1.54 billion: as Qwen says
    assert actor.column("weights") == 2 * n
    assert actor.column("gradients") == 2 * n
    assert actor.column("optimizer") == pytest.approx(4 * n, abs=64)  # and counters
    assert round(actor.peak / 1e9) in (12, 13)
    for phase, size in actor.phases().items():
        if phase in (BACKWARD, STEP):  # the gradients, and activations or what the step writes out
            assert 0.3e9 < size - 2 * n < 1e9, phase
    assert actor.phases()[LOSS] < 1e9  # before there is a gradient
    assert rollout.column("weights") == 2 * n
    assert rollout.column("cache") == pytest.approx(80 * 1024 * 28 * 2 * 2 * 128 * 2, rel=0.2)
    assert 2e9 < rollout.column("cache") < 3e9
    assert 5e9 < rollout.resident + rollout.column("cache") < 6e9


def test_planning_starts_no_backend(tmp_path):
    """In a process that has emulated no device yet: the README's first command."""
    command = [sys.executable, "-m", "jaxrl.train", "--mesh", "actor=2,rollout=2,teacher=4"]
    done = subprocess.run(
        [*command, "--dry-run", f"run_dir={tmp_path / 'run'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "emulating 8 CPU devices" in done.stdout
