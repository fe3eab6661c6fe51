"""The ready-made configs for GPUs, planned from `config.json` alone: no weights, no GPU."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cases import and_slow
from hub_data import add_data
from hub_server import Hub
from large_models import HUGE, LARGE, NAMED, QWEN
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config import cli
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.plan import GPU_SIZES, build, make_plan
from jaxrl.plan.search import Candidate
from jaxrl.plan.table import Plan
from jaxrl.process.gpu_memory import SHARE
from jaxrl.rewards.functions import find
from jaxrl.runtime.cluster import Host, Resource, process_slots
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place
from jaxrl.train import dry_run, main

CONFIGS = Path(__file__).parent.parent.parent / "configs"


LONGEST_S = 60
"""Of a dry run, without Python's imports; it takes about 1 on a free laptop, and may take 20."""


HERE = ["data.train=arithmetic", "data.eval=arithmetic"]
"""Data that are there, in place of the configs' own."""


@pytest.fixture
def large_host(monkeypatch):
    """A host on whose emulated devices everything fits: it says nothing about GPUs."""
    monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: 10**13)


def models(folder: Path, **changes: int) -> list[str]:
    """Overrides that name a student and a teacher of which there is only the config.json."""
    found = []
    for role, raw in (("student", QWEN), ("teacher", QWEN | LARGE)):
        (folder / role).mkdir(parents=True)
        (folder / role / "config.json").write_text(json.dumps(raw | changes))
        found.append(f"{role}.model={folder / role}")
    return found


@pytest.mark.parametrize("split", and_slow(["1-3-4"], ["2-2-4"]))
def test_eight_gpu_configs_are_planned_from_config_json_alone(split, large_host, tmp_path, capsys):
    config = str(CONFIGS / f"qwen2.5_7b_to_1.5b_{split}.yaml")
    assert cli.run(main, ["--config", config, "--dry-run", *models(tmp_path), *HERE]) == 0
    printed = capsys.readouterr().out
    actor, rollout, teacher = split.split("-")
    assert f"actor={actor},rollout={rollout},teacher={teacher}" in printed
    assert "on GPUs of 80 GB, of which jax takes 92%: fits" in printed
    assert "teacher.model: no weights here, only a config.json" in printed


@pytest.mark.slow  # 64 layers: half a minute of traces
def test_the_config_for_two_hosts_is_planned_from_config_json_alone(tmp_path):
    """Both hosts are full, no pool needs both, and the teacher is split no further than it must.
    In a process that has emulated no device yet."""
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
    assert "emulating 16 CPU devices" in done.stdout  # and no backend had started before
    has: dict[Resource, int] = {"CPU": 64, "GPU": 8, "TPU": 0, "memory": 1}
    hosts = [Host(name, name, name, has, has) for name in ("first", "second")]
    placement = place(Config.load(config).mesh, ("actor", "rollout", "teacher"))
    slots = process_slots(placement, hosts, "GPU", None)
    where = [(slot.host.name, slot.devices) for slot in slots]
    assert where == [("first", 4), ("first", 4), ("second", 8)]


TARGETS = "t4x8 rtx4090x8 l40sx8 h100x8 b300x8 h200x16 tpu-v5e:2x4"


@pytest.mark.slow  # 28 layers for each target; the dry run below is like it
@pytest.mark.parametrize("targets", ["rtx4090x8", TARGETS])
def test_gpus_or_the_target_decide_where_the_host_has_no_accelerator(
    targets, tmp_path, capsys, monkeypatch
):
    """Whatever memory the host has, which the plan only mentions; what is said on stderr is about
    the machine that is too small."""
    monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: 8 * 10**9)
    config = str(CONFIGS / "qwen2.5_7b_to_1.5b_2-2-4.yaml")
    asked = ["--config", config, "--dry-run", *models(tmp_path), *HERE]
    assert cli.run(main, asked) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^ .* teacher .* cpu 4-7", out, re.MULTILINE) and err == ""
    assert "which has no accelerator: does not fit" in out
    lines = [line for line in out.splitlines() if not line.startswith("data.")]
    assert lines[-1].startswith("verdict: fits on GPUs of 40 GB and more")
    for target in targets.split():
        code = cli.run(main, [*asked, "--target", target])
        out, err = capsys.readouterr()
        assert f" on {target}, of whose " in out and "this host" not in out + err
        if code:
            assert code == cli.EXIT_DOES_NOT_FIT and "verdict: fits" not in out
            assert err.startswith(f"verdict: does not fit on {target}") and "for 24 GB" not in err
        assert (code == 0) == (target in ("l40sx8", "h100x8", "b300x8", "h200x16"))
    for target, code in ((targets.split()[0], cli.EXIT_DOES_NOT_FIT), ("h100x8", 0)):
        assert cli.run(main, [*asked, "--target", target, "--json"]) == code
        answer = json.loads(capsys.readouterr().out)
        assert (answer["target"], answer["fits"]) == (target, code == 0)
        assert [pool["name"] for pool in answer["pools"]] == ["actor", "rollout", "teacher"]
        asked_data = [*asked, "--target", target, "--json", "data.train=nothere.jsonl"]
        assert cli.run(main, asked_data) == code
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert "data.train: nothere.jsonl: not here, so not checked" in notes
    assert cli.run(main, [*asked, "--target", "h100x4"]) == 2
    assert "needs 8 devices, and h100x4 has 4" in capsys.readouterr().err


def test_no_gpu_may_be_large_enough(tmp_path, capsys):
    config = str(CONFIGS / "qwen2.5_7b_to_1.5b_2-2-4.yaml")
    two_layers = models(tmp_path, num_hidden_layers=2)
    asked = ["--config", config, "--dry-run", *two_layers, *HERE, "batch_size=4800"]
    asked += ["actor.micro_batch_tokens=null", "rollout.slots=19200"]
    assert cli.run(main, asked) == cli.EXIT_DOES_NOT_FIT
    out, err = capsys.readouterr()
    assert "verdict: does not fit on GPUs of up to 141 GB" in out.splitlines()[-3:][0] + err
    assert "for 141 GB: " in err


def model_folder(folder: Path, name: str) -> str:
    """A folder that has a config.json and nothing else."""
    place = folder / Path(name).name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(NAMED[name]))
    return str(place)


def described(config: Config, folder: Path) -> list[str]:
    """Overrides that name models of which there is only the config.json."""
    keys = {
        "student.model": config.student.model,
        "reward.model": config.reward.model,
        "grouper.model": config.grouper.model,
    }
    return [f"{key}={model_folder(folder, path)}" for key, path in keys.items() if path]


SMALLER = {"qwen3_8b_qlora_gspo_1": 24}
"""GB of the GPUs of configs for other ones."""
REWARDED = sorted(path.stem for path in CONFIGS.glob("qwen*_gspo_*.yaml"))
REWARDED += sorted(path.stem for path in CONFIGS.glob("gpt_oss_*.yaml"))
REWARDED += sorted(path.stem for path in CONFIGS.glob("qwen*_similarity_*.yaml"))


@pytest.mark.parametrize("name", and_slow(REWARDED[:2], REWARDED[2:]))
def test_configs_that_learn_from_rewards_use_the_memory_that_there_is(name, tmp_path):
    """Of 80 GB, or of 24: with a tenth kept free, no more slots and no less recomputation would
    fit. What the plan counts has a margin of its own, so the config itself may take the tenth."""
    path = CONFIGS / f"{name}.yaml"
    config = Config.load(path, overrides=described(Config.load(path), tmp_path))
    plan = make_plan(config, needed_roles(config), limit_gb=SHARE * SMALLER.get(name, 80))
    assert plan.fits
    limits = tuple(round(0.9 * limit) for limit in plan.inputs.limits)
    now = Candidate(plan.config, replace(plan.inputs, limits=limits))
    for key in ("rollout.slots", "actor.remat"):
        role = key.partition(".")[0]
        (remedy,) = [each for each in now.remedies(role) if each.key == key]
        assert not [value for value in remedy.faster if now.change(key, value).fits], key


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


TOKENIZER = {
    "tokenizer.json": tiny_tokenizer().backend_tokenizer.to_str(),
    "tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    ),
    "chat_template.jinja": CHATML,
}


@pytest.fixture
def public(hub: Hub) -> Hub:
    """What the configs name, without weights: they would be asked for in vain."""
    for name, raw in NAMED.items():
        hub.add(name, TOKENIZER | {"config.json": json.dumps(raw), "model.safetensors": b"weights"})
    add_data(hub)
    return hub


HERE_ALONE = {
    "self_distill_warmup": ["data.train=arithmetic"],  # a script makes its other data
    "tools_warmup": ["data.train=arithmetic"],
    "qwen2.5_32b_to_7b_two_hosts": ["mesh=actor=2,rollout=2,teacher=4"],  # this process has 8
    "smollm2_gspo": ["max_prompt_tokens=400"],  # a token for each byte
    "smollm2_similarity": ["max_prompt_tokens=400"],
}
FIRST = {
    "other_tokenizer",
    "quickstart_gspo_distilled",
    "self_distill",
    "self_distill_feedback",
    "tools_gspo",
    "two_teachers",
}
"""Configs that continue another run of ours, as the first lines of their files say."""


LIKE_OTHERS = {"qwen2.5_1.5b_gspo_2-1", "qwen3_1.7b_gspo_2", "qwen3_8b_lora_gspo_1"}
LIKE_OTHERS |= {"qwen3_4b_similarity_8", "smollm2_gspo"}
LIKE_OTHERS |= {"qwen3_8b_qlora_gspo_1", "qwen3.5_9b_lora_gspo_1"}
"""Configs whose data are of the same kinds as those of others, and their models too, or those are
planned above."""
DEEP = {"gpt_oss_20b_gspo_8", "qwen2.5_32b_to_7b_two_hosts", "qwen2.5_7b_to_1.5b_2-2-4"}
DEEP |= {"qwen2.5_7b_to_1.5b_1-3-4", "smollm2_135m", "smollm2_similarity"}
"""Of many layers, whose programs take long to trace; and of the same kinds as others."""
LIKE_OTHERS |= DEEP
OTHERS = {path.stem for path in CONFIGS.glob("*.yaml")} - FIRST - LIKE_OTHERS


@pytest.mark.parametrize("name", and_slow(sorted(OTHERS), sorted(LIKE_OTHERS)))
def test_a_config_is_planned_from_a_hub_alone(
    name, public, large_host, tmp_path, capsys, monkeypatch
):
    """In an empty folder, as a fresh clone is: only configs and tokenizers are fetched."""
    monkeypatch.chdir(tmp_path)
    path = str(CONFIGS / f"{name}.yaml")
    asked = ["eval.prompts=4", *HERE_ALONE.get(name, [])]
    code = cli.run(main, ["--config", path, "--dry-run", *asked])
    printed, error = capsys.readouterr()
    assert code == 0, error
    config = Config.load(path)
    if name in REWARDED:  # every role with its devices and bytes, those that take turns too
        assert config.name == name and "on GPUs of 80 GB, of which jax takes 92%: fits" in printed
        scored = () if config.reward.model else ("reward",)  # by functions, without devices
        for role in set(needed_roles(config)).difference(scored):
            assert re.search(rf"^ .* {role} .* (cpu|gpu) \d", printed, re.MULTILINE), role
    for model in config.teacher_models.values():
        assert model.startswith("builtin:") or f"teacher.model: {model} is commit" in printed
    suffixes = {Path(file).suffix for file in public.fetched()}
    assert suffixes <= {".json", ".jinja", ".md"}
    assert [path.name for path in tmp_path.iterdir() if path.name != "hub_home"] == []


@pytest.mark.parametrize("name", sorted(FIRST))
def test_a_config_that_continues_another_run_names_what_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.load(CONFIGS / f"{name}.yaml")
    missing = [config.student.model, *config.teacher_models.values()]
    assert any(model.startswith("runs/") for model in missing)
    with pytest.raises(UserError, match="runs/.*(no file or folder here|no such file or folder)"):
        dry_run(config)


def test_the_rewarded_quickstart_is_planned_from_another_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "quickstart_gspo.yaml")
    asked = ["--config", config, "--dry-run", "batch_size=8", "mesh=actor+rollout=1"]
    assert cli.run(main, asked) == 0
    assert "actor" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_fits_which_gpus_and_soon(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "qwen2.5_7b_to_1.5b_1-3-4.yaml")
    started = time.monotonic()
    code = cli.run(main, ["--config", config, "--dry-run", *models(tmp_path)])
    assert time.monotonic() - started < LONGEST_S
    printed = capsys.readouterr()
    assert code == 2, printed.err  # its data are not here
    assert "error: data.train: hf:openai/gsm8k:main:train" in printed.err and not printed.out
    assert cli.run(main, ["--config", config, "--dry-run", *models(tmp_path / "b"), *HERE]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    (needed,) = [line for line in lines if line.startswith("each GPU needs: ")]
    need = {name: float(gb) for name, gb in re.findall(r"(\w+) ([\d.]+) GB", needed)}
    assert set(need) == {"actor", "rollout", "teacher"}
    (far,) = re.findall(
        r"^on GPUs of ([\d, ]+) GB: does not fit: less than half", printed.out, re.M
    )
    far_too_small = [int(size) for size in far.split(", ")]
    assert far_too_small == [size for size in GPU_SIZES if 2 * SHARE * size < max(need.values())]
    for size in GPU_SIZES[len(far_too_small) :]:
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
    """Actor 12-13 GB: 3 parameters, 3 gradients, 6 Adam, 1-2 KV and activations; here 3 more for
    second moments, which bfloat16 cannot hold, and 3 while the average of gradients is written; for
    a moment one more, after the layers: the embedding's gradient in float32. The walk counts up to
    7 more, float32 changes of whole layers, where XLA for an H100 takes 16.8 in all. Rollout 5-6
    GB: 3 parameters, 2-3 KV (bf16, one GPU each, 1024 positions); here half of the KV, since slots
    hold completions alone and the two prompts of the batch have rows of their own."""
    found = account("actor=1,rollout=1,teacher=1")
    actor, rollout = found.accounts["actor"], found.accounts["rollout"]
    n = DecoderConfig.from_hf(QWEN).n_params
    assert n == 1_543_714_304  # 1.54 billion: as Qwen says
    assert actor.column("weights") == 2 * n
    assert actor.column("optimizer") == pytest.approx(6 * n, abs=64)  # and counters
    assert 16.8e9 < actor.peak < 24.5e9
    update = actor.phases()["update"]
    assert 2 * n < update < 2 * n + 4 * n + 2.5e9
    assert rollout.column("weights") == 2 * n
    assert rollout.column("cache") == pytest.approx(80 * 512 * 28 * 2 * 2 * 128 * 2, rel=0.1)
    assert 1e9 < rollout.column("cache") < 2e9
    assert 4e9 < rollout.resident + rollout.column("cache") < 5e9


@pytest.mark.slow
def test_planning_starts_no_backend(tmp_path):
    """In a process that has emulated no device yet: the README's first command. In the default
    suite the config for two hosts is planned so."""
    command = [sys.executable, "-m", "jaxrl.train", "--mesh", "actor=2,rollout=2,teacher=4"]
    done = subprocess.run(
        [*command, "--dry-run", f"run_dir={tmp_path / 'run'}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "emulating 8 CPU devices" in done.stdout
