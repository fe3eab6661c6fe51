"""Users' mistakes: each ends with exit code 2 and a few lines that name what is wrong, its value
and what to do; nothing is written, and what was there stays as it was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cases import and_slow
from gguf_models import write_model
from runs import QUICK, SHORT, save_model
from safetensors.numpy import load_file, save_file
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl import Config, evaluate, export, generate, train
from jaxrl.checkpoint import store
from jaxrl.config import cli
from jaxrl.run.attempt import prepare_run
from jaxrl.run.run_dir import LOCK, Lock
from jaxrl.telemetry import plot

Command = Callable[[Sequence[str]], Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `student` and a `teacher` that fit together."""
    folder = tmp_path_factory.mktemp("pair")
    save_model(folder / "student", 32, 2, seed=0)
    save_model(folder / "teacher", 48, 1, seed=1, rows=272)
    return folder


class Desk:
    """What a user has in the current folder: nothing yet but the models elsewhere."""

    def __init__(self, pair: Path, here: Path, capsys: pytest.CaptureFixture[str]):
        self.pair, self.here, self._capsys = pair, here, capsys

    def argv(self, *overrides: str) -> list[str]:
        """A run that would do, but for the overrides."""
        models = [f"{role}.model={self.pair / role}" for role in ("student", "teacher")]
        return [*models, *SHORT, "run_dir=run", *overrides]

    def copy(self, role: str = "student") -> Path:
        """A copy of a model, to be damaged."""
        return Path(shutil.copytree(self.pair / role, self.here / role))

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.here / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def told(self) -> str:
        """What stands on stderr since the last look."""
        return self._capsys.readouterr().err

    def refused(self, argv: Sequence[str], *told: str, command: Command = train.main) -> str:
        """What the command says on its way out; nothing in the folder has changed."""
        if command is train.main and "--config" not in argv:
            argv = [*QUICK, *argv]
        before = tree(self.here)
        code = cli.run(command, argv)
        error = self.told()
        check(code, error, *told)
        assert tree(self.here) == before
        return error


def check(code: int, error: str, *told: str) -> None:
    assert code == cli.EXIT_BAD_INPUT, error
    assert error.startswith("error: ") and "Traceback" not in error
    assert len(error.splitlines()) <= 6 and len(error) < 900
    for word in told:
        assert word in error


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes, every folder; a lock holds nothing of a run."""
    found = [path for path in folder.rglob("*") if path.name != LOCK]
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


@pytest.fixture
def desk(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(pair, tmp_path, capsys)


# Keys and values


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("steps", "'steps'|key=value"),
        ("=3", "'=3'|key=value"),
        ("step=3", "unknown key step|did you mean steps?"),
        ("learning_rate=1", "learning_rate|optimizer.learning_rate"),
        ("optimiser.learning_rate=1", "optimiser.learning_rate|optimizer.learning_rate"),
        ("steps.more=1", "steps.more|steps is a value"),
        ("optimizer=adamw", "optimizer is a section|'adamw'|optimizer.KEY"),
        ("optimizer={b1: 0.5}", "optimizer.KEY=VALUE"),
        ("data.train=[a.jsonl", "data.train=[a.jsonl|not YAML"),
        ("data.train=[]", "data.train|empty"),
        ("data.train={a: b}", "data.train"),
        ("data.eval={}", "data.eval|empty"),
        ("data.eval={a/b: arithmetic}", "'a/b'"),
        ("data.weights=[1,2]", "2 numbers|1 sources"),
        ("data.weights=[0]", "data.weights|greater than 0"),
        ("steps=many", "steps|'many'|integer"),
        ("steps=2.5", "steps|2.5"),
        ("steps=" + "9" * 400, "steps|less than or equal to 2147483647"),
        ("steps=" + "9" * 9999, "steps|4300 digits"),
        ("optimizer.learning_rate=" + "9" * 400, "optimizer.learning_rate|valid number"),
        ("data.train=" + "[" * 20_000, "nested deeper than 50"),
        ("steps=-1", "steps|-1|greater than or equal to 1"),
        ("steps=true", "steps|True"),
        ("steps=null", "steps|None"),
        ("steps=", "steps|None"),
        ("seed=-1", "seed|-1"),
        ("batch_size=0", "batch_size|0"),
        ("data.shuffle=yes", "data.shuffle|'yes'|boolean"),
        ("data.shuffle=1", "data.shuffle|1|boolean"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate|nan|finite"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate|inf|finite"),
        ("optimizer.learning_rate=-1e-5", "optimizer.learning_rate|-1e-5"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate|True"),
        ("optimizer.b1=1", "optimizer.b1|less than 1"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm|0"),
        ("deadlines.update=0", "deadlines.update|0"),
        ("distill.jsd_beta=1.5", "distill.jsd_beta|1.5"),
        ("distill.signal=logits", "distill.signal|'hidden'|'logits'"),
        ("actor.dtype=fp16", "actor.dtype|'float32' or 'bfloat16'|'fp16'"),
        ("sampling.temperature=0", "group_size=2|sampling.temperature"),
        ("sampling.top_p=0", "sampling.top_p|0"),
        ("algorithm=ppo", "algorithm=ppo needs a critic|grpo, dapo and gspo"),
        ("algorithm=dpo", "algorithm=dpo learns from pairs|sft|reward.model"),
        ("algorithm=GSPO", "unknown algorithm 'GSPO'|write gspo"),
        ("algorithm=Dr-GRPO", "write dr_grpo"),
        ("algorithm=unheard", "unknown algorithm 'unheard'|gkd|sft|gspo"),
        ("algorithm=gsop", "algorithm: unknown algorithm 'gsop'|did you mean gspo"),
        ("algorithm=sft", "teacher.model=null"),
        ("schedule=async", "schedule|'one_step_off'|'async'"),
        ("resume=maybe", "resume|'auto'|'maybe'"),
        ("name=a/b", "name|'a/b'"),
        ("student.model=null", "student.model"),
        ("student.model=''", "student.model|at least 1 character|''"),
        ("run_dir=''", "run_dir|at least 1 character|''"),
        ("compile_cache=''", "compile_cache|at least 1 character|''"),
        ("student.model=builtin:techer", "builtin:techer|builtin:teacher"),
        ("student.model=package:nothing_of_the_kind", "nothing_of_the_kind is not installed"),
        ("student.model=package:../x", "package"),
        ("group_size=100000000", "does not fit|GB|--dry-run"),
        ("actor.minibatches=13", "actor.minibatches=13|12 sequences"),
        ("max_new_tokens=2048", "max_new_tokens=2048|student.model has 2048"),
        ("max_prompt_tokens=2041", "max_prompt_tokens=2041|2048"),
        ("eval.max_new_tokens=4096", "4096|2048"),
        ("distill.signal=topk distill.top_k=2000", "distill.top_k|1024"),
        ("distill.signal=topk distill.top_k=265", "distill.top_k=265|264 tokens"),
        ("data.train=", "data.train"),
        ("data.train=null", "data.train"),
        ("data.train=3", "data.train"),
        *(
            (f"{key}={value}", f"{key}|at least 1 character")
            for key in ("sampling.stop", "data.train", "data.few_shot", "reward.functions")
            for value in ("''", "['']", "[a,'']")
        ),
        ("data.verifier=nearly", "verifier|nearly|exact"),
        ("data.system_prompt=hello", "data.system_prompt|chat template"),
        ("data.train=arithmetic:digit=2", "digit|did you mean digits?"),
        ("data.train=arithmetic:digits=x", "digits='x'"),
        ("data.train=arithmetic:size=0", "size=0"),
        ("data.few_shot=none.jsonl", "data.few_shot|none.jsonl"),
        ("data.eval=none.jsonl", "data.eval|none.jsonl|No such file"),
        ("data.eval={hard: none.jsonl}", "data.eval.hard|none.jsonl"),
        (
            "max_prompt_tokens=2 data.eval=arithmetic:size=9",
            "data.eval|max_prompt_tokens=2|raise it",
        ),
    ],
)
def test_a_bad_override(desk: Desk, overrides: str, told: str) -> None:
    words = overrides.split(" ") if ": " not in overrides else [overrides]
    desk.refused(desk.argv(*words), *told.split("|"))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--resume", "maybe"], "--resume|'maybe'|auto"),
        (["--resume"], "--resume"),
        (["--confg", "x.yaml"], "--confg|did you mean --config?"),
        (["--config", "none.yaml"], "none.yaml|No such file"),
        (["--config", "."], ".|Is a directory"),
        (["--steps", "3"], "write steps=VALUE"),
        (["student.model"], "'student.model'|key=value"),
    ],
)
def test_a_bad_option(desk: Desk, argv: list[str], told: str) -> None:
    desk.refused([*desk.argv(), *argv], *told.split("|"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("- a\n- b\n", "run.yaml|list"),
        ("just words\n", "run.yaml|key: value"),
        ("steps: 3\nsteps: 4\n", "run.yaml|line 2|'steps'|twice"),
        ("data:\n\ttrain: x\n", "run.yaml|line 2"),
        ("data: {train: x\n", "run.yaml|not YAML"),
        ("optimizer.b1: 0.5\n", "optimizer.b1|nest it"),
        ("3: x\n", "run.yaml|line 1|keys are plain words"),
        (b"steps: \xff\n", "run.yaml|UTF-8"),
        (b"steps: \x00\n", "run.yaml|not YAML"),
        ("steps: !!python/object:os.system x\n", "run.yaml"),
        ("seed: 2026-01-01\n", "seed|'2026-01-01'|integer"),
        ("a: &a [*a]\n", "run.yaml|contains itself"),
        ("a: &a {b: *a}\n", "run.yaml|contains itself"),
        ("a: " + "[" * 20_000 + "]" * 20_000, "run.yaml|nested deeper than 50"),
        ("a: " + "[" * 200_000, "run.yaml|nested deeper than 50"),
        (
            "a: &a0 [x, x]\n"
            + "".join(f"b{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 45)),
            "run.yaml|more than 100000 values",
        ),
        (
            "optimizer: {warmup_steps: " + "9" * 400 + "}",
            "warmup_steps|less than or equal to 2147483647",
        ),
        ("steps: " + "9" * 9999, "run.yaml|4300 digits"),
        ("optimizer: [" + "x," * 9999 + "]", "optimizer|section"),
        ("optimizer: adamw\n", "optimizer|section"),
        ("optimizer: [1]\n", "optimizer|section"),
        ("seed: {a: 1}\n", "seed.a"),
        ("student: {modle: x}\n", "student.modle|student.model"),
    ],
)
def test_a_bad_config_file(desk: Desk, content: str | bytes, told: str) -> None:
    desk.write("run.yaml", content)
    desk.refused(["--config", "run.yaml", "data.train=arithmetic", *desk.argv()], *told.split("|"))


def test_an_empty_config_file_lacks_the_models(desk: Desk) -> None:
    path = desk.write("run.yaml", "")
    desk.refused(["--config", str(path)], "student.model is required", "data.train is required")


# The mesh


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ("", "mesh"),
        (" ", "mesh"),
        ("''", "the mesh is empty|actor=2"),
        ("actor", "'actor'|ROLE=DEVICES"),
        ("4", "'4'|ROLE=DEVICES"),
        ("actor=0", "actor=0|at least 1"),
        ("actor=-2", "actor=-2|at least 1"),
        ("actor=two", "actor=two|whole numbers"),
        ("actor=1.5", "actor=1.5|whole numbers"),
        ("actor=2,actor=2", "'actor'|twice"),
        ("actor+actor=2", "'actor'|twice"),
        ("actor=2,,rollout=2", "''|ROLE=DEVICES"),
        ("actor=2;rollout=2", "actor=2;rollout=2"),
        ("actor=2 rollout=2", "actor=2 rollout=2"),
        ("actr=2", "'actr'|did you mean actor?"),
        ("rollout=2", "places no actor|actor=DEVICES"),
        ("actor+=2", "role"),
        ("actor=9", "9 devices|8"),
        ("actor=99999999999999999999", "99999999999999999999"),
        ("actor=100000000", "100000000"),
        ("actor=3 actor.parallel.data=2", "actor.parallel.data=2|3 devices"),
        ("actor=2 actor.parallel.fsdp=0", "actor.parallel|fsdp=0|at least 1"),
        ("actor=2 actor.parallel.fsdp=-1 actor.parallel.data=-1", "both -1|one axis"),
        ("actor=8 rollout.parallel.tensor=8", "rollout.parallel.tensor=8|n_heads=4|1 or 2 or 4"),
        ("actor=2 rollout.devices=0:3", "rollout.devices=0:3|2 devices"),
        ("actor=2 rollout.devices=2:", "rollout.devices=2:|2 devices"),
        ("actor=2 rollout.devices=1:1", "rollout.devices|'1:1'|empty"),
        ("actor=2 rollout.devices=a", "rollout.devices|'a'|start:stop"),
        ("actor=2 rollout.devices=1", "rollout.devices|start:stop"),
        ("actor=2 reference.device=0:1", "reference.device|reference.devices"),
        ("actor=2 critic.devices=0:1", "critic"),
    ],
)
def test_a_bad_mesh(desk: Desk, mesh: str, told: str) -> None:
    spec, *keys = mesh.split(" ") if ".d" in mesh or ".p" in mesh else [mesh]
    desk.refused(desk.argv(f"mesh={spec}", *keys), *told.split("|"))


# Models


def cut(path: Path, size: int) -> None:
    """Keeps the first `size` bytes; of a negative size, all but the last."""
    path.write_bytes(path.read_bytes()[:size])


def edit(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None removes one."""
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Changes the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def index_with_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = load_file(folder / "model-1.safetensors")
    files = dict.fromkeys(names, "model-1.safetensors") | {
        "model.norm.weight": "model-2.safetensors"
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def index_without_files(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


def header(folder: Path, text: str) -> None:
    raw = text.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)


def move(folder: Path, name: str, start: int, stop: int) -> None:
    """Gives a tensor other data_offsets."""
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    tensors = json.loads(raw[8:end])
    tensors[name]["data_offsets"] = [start, stop]
    text = json.dumps(tensors).encode()
    content = len(text).to_bytes(8, "little") + text + raw[end:]
    (folder / "model.safetensors").write_bytes(content)


DEEP = '{"a":' + "[" * 200_000 + "]" * 200_000 + "}"
NORM = "model.norm.weight"
Q = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is empty": (lambda f: cut(f / "config.json", 0), "config.json|not valid JSON"),
    "config is cut": (lambda f: cut(f / "config.json", 90), "config.json|not valid JSON"),
    "config is binary": (
        lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"),
        "config.json|not valid JSON|utf-8",
    ),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json"),
    "config is null": (lambda f: (f / "config.json").write_text("null"), "config.json"),
    "no vocab_size": (
        lambda f: edit(f / "config.json", vocab_size=None),
        "config.json|vocab_size|missing",
    ),
    "no hidden_size": (
        lambda f: edit(f / "config.json", hidden_size=None),
        "config.json|hidden_size|missing",
    ),
    "hidden_size is text": (
        lambda f: edit(f / "config.json", hidden_size="wide"),
        "config.json|hidden_size|'wide'",
    ),
    "hidden_size is a list": (
        lambda f: edit(f / "config.json", hidden_size=[32]),
        "config.json|hidden_size|[32]",
    ),
    "hidden_size is negative": (
        lambda f: edit(f / "config.json", hidden_size=-32),
        "config.json|hidden_size|-32",
    ),
    "no heads": (
        lambda f: edit(f / "config.json", num_attention_heads=0),
        "config.json|num_attention_heads|0",
    ),
    "no layers": (
        lambda f: edit(f / "config.json", num_hidden_layers=0),
        "config.json|num_hidden_layers|0",
    ),
    "odd head_dim": (lambda f: edit(f / "config.json", head_dim=7), "config.json|head_dim|7"),
    "eos is text": (
        lambda f: edit(f / "config.json", eos_token_id="</s>"),
        "config.json|eos_token_id|'</s>'",
    ),
    "rope factor is missing": (
        lambda f: edit(f / "config.json", rope_scaling={"rope_type": "linear"}),
        "config.json|factor|missing",
    ),
    "rope of another kind": (
        lambda f: edit(f / "config.json", rope_scaling={"rope_type": "spiral"}),
        "config.json|'spiral'|linear",
    ),
    "yarn without its factor": (
        lambda f: edit(f / "config.json", rope_scaling={"rope_type": "yarn"}),
        "config.json|factor|missing",
    ),
    "rope is text": (lambda f: edit(f / "config.json", rope_scaling="x"), "config.json|rope"),
    "architecture is a list": (
        lambda f: edit(f / "config.json", model_type=["llama"]),
        "config.json|model_type=['llama']|llama, qwen2, qwen3",
    ),
    "layer types are a number": (
        lambda f: edit(f / "config.json", layer_types=3),
        "config.json|layer_types",
    ),
    "another architecture": (
        lambda f: edit(f / "config.json", model_type="mamba"),
        "config.json|'mamba'|llama, qwen2, qwen3",
    ),
    "heads do not divide": (
        lambda f: edit(f / "config.json", num_key_value_heads=3),
        "config.json|n_heads=4|n_kv_heads=3|num_key_value_heads",
    ),
    "generation config is no JSON": (
        lambda f: cut(f / "generation_config.json", 20),
        "generation_config.json|not valid JSON",
    ),
    "generation config is a list": (
        lambda f: (f / "generation_config.json").write_text("[]"),
        "generation_config.json",
    ),
    "generation eos is text": (
        lambda f: edit(f / "generation_config.json", eos_token_id="</s>"),
        "generation_config.json|eos_token_id|'</s>'",
    ),
    "eos beyond the vocabulary": (
        lambda f: [
            edit(f / n, eos_token_id=9999) for n in ("config.json", "generation_config.json")
        ],
        "9999",
    ),
    "the config is of a wider model": (
        lambda f: edit(f / "config.json", intermediate_size=80),
        "model.layers.0.mlp|[64, 32]|[80, 32]",
    ),
    "the config is of a deeper model": (
        lambda f: edit(f / "config.json", num_hidden_layers=3),
        "model.layers.2.|missing",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "model.safetensors"),
    "weights in a pickle": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        ".bin|safetensors",
    ),
    "weights of no bytes": (lambda f: cut(f / WEIGHTS, 0), "model.safetensors|truncated|0"),
    "weights cut in the header": (
        lambda f: cut(f / WEIGHTS, 100),
        "model.safetensors|truncated|100",
    ),
    "weights cut in the data": (lambda f: cut(f / WEIGHTS, -10), "model.safetensors|truncated"),
    "weights are text": (
        lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors",
    ),
    "header is no JSON": (lambda f: header(f, "{x"), "model.safetensors|invalid JSON"),
    "config is deep": (lambda f: (f / "config.json").write_text(DEEP), "config.json|recursion"),
    "header is deep": (lambda f: header(f, DEEP), "model.safetensors|invalid JSON|recursion"),
    "header is endless": (
        lambda f: (f / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little")),
        "model.safetensors|header of 1152921504606846976 bytes",
    ),
    "offsets before the data": (
        lambda f: move(f, NORM, -128, 0),
        "model.safetensors|`-128`|data_offsets",
    ),
    "offsets in the wrong order": (
        lambda f: move(f, NORM, 256, 128),
        f"model.safetensors|{NORM}|data_offsets",
    ),
    "tensors that overlap": (lambda f: move(f, NORM, 64, 192), f"{WEIGHTS}|{NORM}|overlap"),
    "tokenizer config is deep": (
        lambda f: (f / "tokenizer_config.json").write_text(DEEP),
        "tokenizer_config.json|not valid JSON",
    ),
    "header is a list": (lambda f: header(f, "[]"), "model.safetensors|header"),
    "header without offsets": (
        lambda f: header(f, '{"model.norm.weight": {"dtype": "F32", "shape": [32]}}'),
        "model.safetensors|missing field `data_offsets`",
    ),
    "index of a missing shard": (index_with_a_missing_shard, "model-2.safetensors is missing"),
    "index without files": (index_without_files, "model.safetensors.index.json"),
    "a tensor is missing": (
        lambda f: rewrite(f, lambda t: t.pop(Q)),
        f"model.safetensors|{Q}|missing",
    ),
    "a tensor of another shape": (
        lambda f: rewrite(f, lambda t: t.update({Q: t[Q][:16].copy()})),
        f"model.safetensors|{Q}|[16, 32]|[32, 32]",
    ),
    "a tensor of another dtype": (
        lambda f: rewrite(f, lambda t: t.update({Q: t[Q].astype(np.int8)})),
        f"model.safetensors|{Q}|I8|F32",
    ),
    "no tokenizer": (
        lambda f: [(f / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "tokenizer.json",
    ),
    "tokenizer is no JSON": (
        lambda f: cut(f / "tokenizer.json", 50),
        "tokenizer.json|not valid JSON",
    ),
    "tokenizer config is no JSON": (
        lambda f: cut(f / "tokenizer_config.json", 10),
        "tokenizer_config.json|not valid JSON",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model(desk: Desk, damage: str) -> None:
    change, told = DAMAGES[damage]
    folder = desk.copy()
    change(folder)
    desk.refused(desk.argv(f"student.model={folder}"), *told.split("|"))


def test_a_damaged_teacher(desk: Desk) -> None:
    folder = desk.copy("teacher")
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    desk.refused(desk.argv(f"teacher.model={folder}"), str(folder), "model.norm.weight", "missing")


def test_a_place_that_is_no_model(desk: Desk) -> None:
    desk.refused(desk.argv("student.model=nowhere/at/all"), "'nowhere/at/all'", "no such file")
    (desk.here / "empty").mkdir()
    desk.refused(desk.argv("student.model=empty"), "'empty'", "no config.json")
    desk.write("model.bin", b"x")
    desk.refused(desk.argv("student.model=model.bin"), "'model.bin'", ".gguf")


def test_a_gguf_file_that_is_none(desk: Desk) -> None:
    good = write_model(desk.here / "good.gguf", "llama").read_bytes()
    told = "truncated, or no GGUF file"
    sizes = (0, 3, 10, 24, 100, 500, 1000, 2000, len(good) // 2, len(good) - 1)
    for size in sizes:
        path = desk.write("x.gguf", good[:size])
        desk.refused(desk.argv(f"student.model={path}"), "x.gguf", told)
    desk.write("x.gguf", "version https://git-lfs.github.com/spec/v1\n" * 9)
    desk.refused(desk.argv("student.model=x.gguf"), "x.gguf", told)
    (desk.here / "folder.gguf").mkdir()
    desk.refused(desk.argv("student.model=folder.gguf"), "folder.gguf")
    desk.refused(desk.argv("student.model=good.gguf"), "good.gguf", "tokenizer")
    write_model(desk.here / "wide.gguf", "llama", d_ff=96)
    desk.refused(desk.argv("student.model=wide.gguf"), "wide.gguf", "gate_proj", "[96, 32]")


def test_a_gguf_file_that_announces_too_much(desk: Desk) -> None:
    """An array of 2^40 elements, 2^60 keys, a word of 2^60 bytes: within seconds, by size alone."""

    def number(n: int, size: int = 8) -> bytes:
        return n.to_bytes(size, "little")

    start = b"GGUF" + number(3, 4) + number(0)
    array = number(1) + b"x" + number(9, 4) + number(4, 4)
    deep = number(1) + b"x" + number(9, 4) + (number(9, 4) + number(1)) * 5000
    cases = {
        "1099511627776 elements": start + number(1) + array + number(1 << 40) + bytes(1 << 16),
        "truncated": start + number(1 << 60) + array + number(2) + bytes(8),
        "no GGUF": start + number(1) + number(1 << 60) + b"x",
        "truncated, or": start + number(1) + deep + bytes(64),
    }
    for told, content in cases.items():
        desk.write("x.gguf", content)
        desk.refused(desk.argv("student.model=x.gguf"), "x.gguf", told)


def test_a_chat_template_that_fails(desk: Desk) -> None:
    desk.write("chats.jsonl", '{"messages": [{"role": "user", "content": "1+1="}]}\n' * 2)
    wide = "{% for a in range(100001) %}{% endfor %}"  # jinja's sandbox takes 100,000
    itself = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    for template, told in ((wide, "Range too big"), (itself, "recursion"), ("{{ 1/0 }}", "zero")):
        folder = Path(shutil.copytree(desk.pair / "student", desk.here / "x", dirs_exist_ok=True))
        tiny_tokenizer(template).save_pretrained(folder)
        asked = ["data.train=chats.jsonl", "data.eval=null", "max_prompt_tokens=50"]
        desk.refused(desk.argv(f"student.model={folder}", *asked), "chat template", told)


# Two models


def test_models_that_do_not_speak_the_same_tokens(desk: Desk) -> None:
    other = desk.copy("teacher")
    asked = desk.argv(f"teacher.model={other}")
    tiny_tokenizer(template=None, merges=(("1", "2"),)).save_pretrained(other)
    desk.refused(asked, "vocabularies", "ids differ", "for the student", "for the teacher")
    tiny_tokenizer(template=None, eos="<|endoftext|>").save_pretrained(other)
    desk.refused(asked, "EOS", "student 258", "teacher 256", "eos_token")
    tiny_tokenizer(template=None).save_pretrained(other)
    for name in ("config.json", "generation_config.json"):
        edit(other / name, eos_token_id=[256, 258])
    desk.refused(asked, "EOS", "student [258]", "teacher [256, 258]", "generation_config.json")


def test_chat_templates_that_render_the_run_s_prompts_differently(desk: Desk) -> None:
    """What no prompt of the run goes through may differ."""
    desk.write("chats.jsonl", '{"messages": [{"role": "user", "content": "1+1="}]}\n' * 2)
    other = CHATML.replace("{% for m", "{{ 'Hi' }}{% for m")
    models = {"plain": None, "chatml": CHATML, "other": other, "same": "{# Mine. #}" + CHATML}
    for name, template in models.items():
        folder = Path(shutil.copytree(desk.pair / "student", desk.here / name))
        tiny_tokenizer(template).save_pretrained(folder)

    def prepare(student: str, teacher: str, *overrides: str) -> list[str]:
        sets = ["max_prompt_tokens=50", "data.train=chats.jsonl", "data.eval=null"]
        return desk.argv(f"student.model={student}", f"teacher.model={teacher}", *sets, *overrides)

    desk.refused(prepare("chatml", "other"), "chat template", "teacher 'Hi")
    desk.refused(prepare("chatml", "plain"), "teacher", "no chat template", "data.chat=raw")
    text = ["data.train=arithmetic", "data.eval=chats.jsonl"]
    desk.refused(prepare("chatml", "other", *text), "chat template")
    prepare_run(Config.load("builtin:quickstart", prepare("chatml", "same")))
    for teacher in ("other", "plain"):
        prepare_run(
            Config.load("builtin:quickstart", prepare("chatml", teacher, "data.train=arithmetic"))
        )


# Data


ROW = b'{"prompt": "1+1=", "completion": "2", "answer": "2"}\n'
ROWS: list[tuple[bytes, str]] = [
    (b"", "no rows"),
    (b"\n\n", "no rows"),
    (ROW + b"{'prompt': 1}\n", "d.jsonl:2|not JSON"),
    (ROW + b"1+1=\n", "d.jsonl:2"),
    (ROW + b'["1+1="]\n', "d.jsonl:2|a JSON object is needed|a list"),
    (ROW + b'{"prompt": "\xff"}\n', "d.jsonl:2|not UTF-8"),
    (ROW + b'{"promt": "x"}\n', "d.jsonl:2|`prompt`|`promt`|data.prompt_key"),
    (ROW + b'{"prompt": ""}\n', "d.jsonl:2|`prompt` is empty"),
    (ROW + b'{"prompt": null}\n', "d.jsonl:2|null"),
    (ROW + b'{"prompt": 7}\n', "d.jsonl:2|`prompt`|text|a number"),
    (ROW + b'{"prompt": ["x"]}\n', "d.jsonl:2|`prompt`|text|a list"),
    (ROW + b'{"prompt": "x", "completion": 3}\n', "d.jsonl:2|`completion`|text|a number"),
    (ROW + b'{"prompt": "x", "answer": [3]}\n', "d.jsonl:2|`answer`|text or a number|a list"),
    (ROW + b'{"prompt": "x", "messages": []}\n', "d.jsonl:2|both|`messages`"),
    (ROW + b'{"messages": "x"}\n', "d.jsonl:2|`messages`|list|text"),
    (ROW + b'{"messages": []}\n', "d.jsonl:2|`messages`"),
    (ROW + b'{"messages": [{"role": "user"}]}\n', "d.jsonl:2|`messages`[0]|`content`"),
    (ROW + b'{"messages": [{"role": "user", "content": 3}]}\n', "d.jsonl:2|`messages`[0]"),
    (ROW + b'{"messages": [["user", "x"]]}\n', "d.jsonl:2|`messages`[0]"),
    (ROW + b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "d.jsonl:2|before"),
    (ROW + b'{"messages": [{"role": "user", "content": "x"}]}\n', "d.jsonl:2|chat template"),
    (ROW + b'{"prompt": "\\ud83d"}\n', "d.jsonl:2|surrogate"),
    (ROW + b'{"prompt": "x"', "d.jsonl:2|not JSON"),
    (b'{"prompt": "0123456789012345678901234"}\n', "all 1 prompts|max_prompt_tokens=24|raise it"),
]


@pytest.mark.parametrize(("content", "told"), ROWS)
def test_a_bad_data_file(desk: Desk, content: bytes, told: str) -> None:
    desk.write("d.jsonl", content)
    desk.refused(desk.argv("data.train=d.jsonl"), "data.train", "d.jsonl", *told.split("|"))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.train=none.jsonl", "data.train: none.jsonl: No such file"),
        ("data.train=none/*.jsonl", "none/*.jsonl|no file matches"),
        ("data.train=rows.tsv", "rows.tsv|.jsonl, .parquet, .json or .csv"),
        ("data.train=empty", "empty|no .jsonl, .parquet, .json or .csv file"),
        ("data.train=d.jsonl:split=test", "d.jsonl takes no options"),
        ("data.train=arithmetic2", "'arithmetic2'|did you mean arithmetic?"),
        ("data.train=x.parquet", "x.parquet|parquet"),
        ("data.train=d.jsonl data.prompt_key=question", "d.jsonl:1|`question`|data.prompt_key"),
        ("data.eval=d.jsonl data.answer_key=solution", "data.eval|`solution`|data.answer_key"),
        ("data.train=d.jsonl distill.on_policy_fraction=0", "data.train|d.jsonl|completion"),
    ],
)
def test_bad_names_of_data(desk: Desk, override: str, told: str) -> None:
    desk.write("d.jsonl", b'{"prompt": "1+1="}\n')
    desk.write("rows.tsv", b"prompt\n1+1=\n")
    desk.write("x.parquet", b"not a table")
    (desk.here / "empty").mkdir()
    desk.refused(desk.argv(*override.split(" ")), *told.split("|"))


# The run directory


def run_of(desk: Desk, *overrides: str, steps: Sequence[int] = (1, 2)) -> Path:
    """A run directory as a run leaves it, with checkpoints of stand-ins for the weights."""
    folder = desk.here / "run"
    folder.mkdir()
    config = Config.load("builtin:quickstart", desk.argv(*overrides))
    (folder / "config.yaml").write_text(config.dump())
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    for step in steps:
        place = folder / store.FOLDER / str(step)
        (place / store.ACTOR).mkdir(parents=True)
        (place / store.ACTOR / "arrays").write_bytes(b"weights")
        manifest = store.Manifest(step, step, (), {}, {"fingerprint": "0"}, None, {})
        store.commit(place, manifest)
    return folder


def test_a_run_directory_that_cannot_be_one(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write("run", "in the way")
    desk.refused(desk.argv(), "run_dir=run", "cannot be made")
    desk.refused(desk.argv("run_dir=run/below"), "run_dir=run/below", "cannot be made")
    (desk.here / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda *_: False)
    desk.refused(desk.argv("run_dir=closed"), "run_dir=closed", "cannot be written to")


def test_nothing_to_go_on_with(desk: Desk) -> None:
    desk.refused([*desk.argv(), "--resume", "must"], "run_dir=run", "no run", "resume=must")


def test_a_run_that_must_not_be_lost(desk: Desk) -> None:
    run_of(desk)
    desk.refused(desk.argv("resume=never"), "run_dir=run", "holds a run already", "another")
    desk.refused(desk.argv("seed=3"), "run_dir=run", "seed: 0 there, 3 now", "another run_dir")
    desk.refused(desk.argv(), "what data.train names has changed", "put it back")
    desk.refused(desk.argv("student.model=nowhere"), "'nowhere'")


def test_a_run_in_use(desk: Desk) -> None:
    with closing(Lock(run_of(desk))):
        desk.refused(desk.argv(), "run_dir=run", f"in use by pid {os.getpid()}")


def test_a_run_whose_config_is_damaged(desk: Desk) -> None:
    folder = run_of(desk)
    (folder / "config.yaml").write_text("steps: [1\n")
    desk.refused(desk.argv(), "run/config.yaml", "not YAML")


@pytest.mark.parametrize("damage", and_slow(["changed", "manifest"], ["cut", "missing", "format"]))
def test_a_run_whose_checkpoints_are_all_damaged(desk: Desk, damage: str) -> None:
    """Of the arrays and of what describes them; tests/checkpoint/test_checkpoint.py has each."""
    for place in store.folders(run_of(desk)):
        arrays, manifest = place / store.ACTOR / "arrays", place / store.MANIFEST
        if damage == "cut":
            cut(arrays, 3)
        elif damage == "missing":
            arrays.unlink()
        elif damage == "changed":
            arrays.write_bytes(b"WEIGHTS")
        elif damage == "manifest":
            cut(manifest, 30)
        else:
            edit(manifest, format=99)
    told = "manifest.json" if damage == "manifest" else "2"
    for _ in range(2):  # the second time it is no new run
        desk.refused(desk.argv(), "run", "none of its 2 checkpoints can be used", told)
    words = ["run", "--prompt", "a"]
    desk.refused(words, str(Path("run", store.FOLDER, "2")), command=generate.main)


def test_a_compile_cache_that_cannot_be_is_told_and_done_without(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run is refused for it: only time is lost."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    desk.write("file", "in the way")
    prepare_run(Config.load("builtin:quickstart", desk.argv("compile_cache=file/below")))
    told = desk.told()
    assert "compile_cache=file/below is not used" in told and len(told.splitlines()) == 1
    assert jax.config.jax_compilation_cache_dir == before  # type: ignore[attr-defined]


# Other packages, other commands


def test_a_tracker_whose_package_is_missing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for name in ("wandb", "mlflow"):
        desk.refused(desk.argv(f"logging.{name}=x"), f"logging.{name}=x", f"'jaxrl[{name}]'")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("nowhere --prompt a", "'nowhere'|no such file"),
        ("MODEL", "no prompt|--prompts"),
        ("MODEL --prompts none.jsonl", "none.jsonl|No such file"),
        ("MODEL --prompt a --out nowhere/x.jsonl", "--out|nowhere"),
        ("MODEL --prompt a --out .", "--out|."),
        ("MODEL --prompt a --max-new-tokens 0", "max_new_tokens=0"),
        ("MODEL --prompt a --max-new-tokens 9999", "9999|2048 positions"),
        ("MODEL --prompt a --top-p 2", "top_p=2"),
        ("MODEL --prompt a --top-k -1", "top_k=-1"),
        ("MODEL --prompt a --temperature nan", "temperature=nan"),
        ("MODEL --prompt a --temperature hot", "--temperature|'hot'"),
        ("MODEL --prompt a --n 0", "n=0"),
        ("MODEL --prompt a --devices 0", "--devices 0"),
        ("MODEL --prompt a --devices -1", "--devices -1"),
        ("MODEL --prompt a --devices 99", "99 devices|8"),
        ("MODEL --prompt a --devices 8 --tensor 0", "--tensor 0|at least 1"),
        ("MODEL --prompt a --dtype int8", "--dtype|'int8'"),
        ("MODEL --prompt a --chat", "chat template"),
        ("MODEL --prompt a --seed x", "--seed|'x'"),
    ],
)
def test_generate(desk: Desk, argv: str, told: str) -> None:
    words = argv.replace("MODEL", str(desk.pair / "student")).split()
    desk.refused(words, *told.split("|"), command=generate.main)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("nowhere out", "'nowhere'|no such file"),
        ("MODEL", "DEST"),
        ("MODEL file", "file is a file"),
        ("MODEL file/below", "file"),
        ("MODEL full", "not empty"),
        ("MODEL out --layers 9", "--layers 9|2 layers"),
        ("MODEL out --keep 0,7", "[7]"),
        ("MODEL out --keep a", "--keep a|0,3,6"),
        ("MODEL out --dtype int4", "'int4'"),
        ("MODEL out --layers 2 --keep 0", "--layers|--keep"),
    ],
)
def test_export(desk: Desk, argv: str, told: str) -> None:
    desk.write("file", "in the way")
    (desk.here / "full").mkdir()
    desk.write("full/notes", "mine")
    words = argv.replace("MODEL", str(desk.pair / "student")).split()
    desk.refused(words, *told.split("|"), command=export.main)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("nowhere", "'nowhere'|no such file"),
        ("MODEL", "nothing to evaluate on|data.eval=SOURCE"),
        ("MODEL data.eval=none.jsonl", "data.eval|none.jsonl"),
        ("MODEL data.eval=arithmetic --config none.yaml", "none.yaml"),
        ("MODEL data.eval=arithmetic steps=3", "steps has no part in an evaluation"),
        ("MODEL data.eval=arithmetic eval.samples=4", "temperature"),
        ("MODEL data.eval=arithmetic max_new_tokens=9999", "9999|2048"),
        ("MODEL data.eval=arithmetic --mesh teacher=2", "rollout"),
        ("MODEL data.eval=arithmetic --mesh rollout=99", "99 devices|8"),
        ("MODEL data.eval=arithmetic --out nowhere/x.json", "--out|nowhere"),
        ("MODEL data.eval=arithmetic --samples .", "--samples|folder"),
    ],
)
def test_evaluate(desk: Desk, argv: str, told: str) -> None:
    words = argv.replace("MODEL", str(desk.pair / "student")).split()
    desk.refused(words, *told.split("|"), command=evaluate.main)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("nowhere -o x.png", "nowhere"),
        ("rows.jsonl", "-o"),
        ("rows.jsonl -o x.txt", "x.txt|.png"),
        ("rows.jsonl -o nowhere/x.png", "nowhere"),
        ("rows.jsonl -o x.png", "rows.jsonl, line 2|not JSON"),
        ("binary -o x.png", "binary"),
        ("empty.jsonl -o x.png", "nothing to draw"),
    ],
)
def test_plot(desk: Desk, argv: str, told: str) -> None:
    desk.write("rows.jsonl", '{"step": 1}\n{"st\n')
    desk.write("empty.jsonl", "")
    desk.write("binary", b"\xff\xfe\n")
    desk.refused(argv.split(), *told.split("|"), command=plot.main)


def test_through_the_shell(desk: Desk) -> None:
    words = ["mesh=actor=9999999", "run_dir=run"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl.train", *words],
        env=os.environ
        | {
            "PYTHONPATH": str(root),
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    check(done.returncode, done.stderr, "9999999 devices")
    assert done.stdout == "" and not tree(desk.here)
