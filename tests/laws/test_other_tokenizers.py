"""A teacher with another tokenizer teaches what it would teach in the student's tokens."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from runs import SHORT
from safetensors.numpy import load_file, save_file

from jaxrl import Config
from jaxrl.checkpoint.source import resolve_model
from jaxrl.train import train

MESH = "mesh=actor=2,rollout=1,teacher=2"
EMBEDDING = "model.embed_tokens.weight"
ORDER = np.random.default_rng(0).permutation(24)
"""The id of each of the built-in student's tokens in the copy that has the same tokens in another
order."""


@pytest.fixture(scope="module")
def reordered(tmp_path_factory):
    """The built-in student with other ids for its tokens: the same model, another tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "reordered"
    shutil.copytree(resolve_model("builtin:student").path, folder)
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING][np.argsort(ORDER)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["id"] = int(ORDER[token["id"]])
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {token: int(ORDER[i]) for token, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        ids = {key: int(ORDER[i]) for key, i in config.items() if key.endswith("_token_id")}
        (folder / name).write_text(json.dumps(config | ids))
    return str(folder)


def run(student, run_dir, *overrides):
    keys = [f"student.model={student}", "max_prompt_tokens=9", f"run_dir={run_dir}", "steps=3"]
    plain = ["actor.dtype=float32", "rollout.dtype=float32", "teacher.dtype=float32"]
    rest = ["optimizer.learning_rate=1e-3", "eval.prompts=8", "batch_size=8", *overrides]
    result = train(Config.load("builtin:quickstart", [*SHORT, *keys, *plain, MESH, *rest]))
    return result, load_file(run_dir / "final" / "model.safetensors")


@pytest.mark.parametrize(
    "how",
    [
        ["distill.on_policy_fraction=0", "distill.jsd_beta=0.5"],
        ["sampling.temperature=0", "group_size=1", "distill.signal=topk", "distill.top_k=24"],
        ["distill.on_policy_fraction=0", "distill.seq_kd=true", "eval.teacher=true"],
    ],
    ids=["data", "own samples", "the teacher's samples"],
)
def test_other_ids_for_the_same_tokens_change_nothing(reordered, tmp_path, how):
    """The losses, the metrics and the weights after three updates; the teacher's samples too."""
    plain, wanted = run("builtin:student", tmp_path / "plain", *how)
    own, found = run(reordered, tmp_path / "own", *how, "teacher.tokenizer=own")
    for row, same in zip(own.metrics[1:], plain.metrics[1:], strict=True):
        for name in ("loss", "distill/divergence", "distill/top1_agreement", "actor/tokens"):
            assert row[name] == pytest.approx(same[name], rel=2e-4), name
        assert row["distill/aligned_bytes"] == row["distill/exact_bytes"] == 1
    assert own.metrics[0].get("teacher/accuracy") == plain.metrics[0].get("teacher/accuracy")
    found[EMBEDDING] = found[EMBEDDING][ORDER]
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=5e-5, err_msg=name)


def test_the_same_tokenizer_gives_the_same_bits(tmp_path):
    plain, wanted = run("builtin:student", tmp_path / "plain")
    own, found = run("builtin:student", tmp_path / "own", "teacher.tokenizer=own")
    assert [row["loss"] for row in own.metrics[1:]] == [row["loss"] for row in plain.metrics[1:]]
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
