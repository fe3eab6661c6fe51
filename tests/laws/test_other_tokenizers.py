"""A teacher with another tokenizer teaches what it would teach in the student's tokens."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from byte_tokenizers import BYTES, WORDS
from cases import and_slow
from runs import SHORT
from safetensors.numpy import load_file, save_file
from tiny_models import random_params

from jaxrl import Config
from jaxrl.algorithms.methods import needed_roles
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.errors import UserError
from jaxrl.formats.hf import save_hf
from jaxrl.models.config import DecoderConfig
from jaxrl.plan import make_plan
from jaxrl.run.job import make_job
from jaxrl.score.score_data import prepare_scoring
from jaxrl.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

ALONE = "mesh=actor+rollout+teacher=1"
EMBEDDING = "model.embed_tokens.weight"
ORDER = np.random.default_rng(0).permutation(24)
"""The id of each of the built-in student's tokens in the copy that has the same tokens in another
order."""


def first_layer(name, folder):
    """A built-in model with the first of its layers alone: each is compiled by itself in a step
    that samples."""
    shutil.copytree(resolve_model(f"builtin:{name}").path, folder)
    weights = load_file(folder / "model.safetensors")
    kept = {key: x for key, x in weights.items() if ".layers." not in key or ".layers.0." in key}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A student and its teacher, and the student with other ids for its tokens: the same model,
    another tokenizer."""
    place = tmp_path_factory.mktemp("models")
    for name in ("student", "teacher"):
        first_layer(name, place / name)
    folder = place / "reordered"
    shutil.copytree(place / "student", folder)
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
    return {name: str(place / name) for name in ("student", "teacher", "reordered")}


def run(student, run_dir, *overrides):
    keys = [f"student.model={student}", "max_prompt_tokens=9", f"run_dir={run_dir}", "steps=2"]
    plain = ["actor.dtype=float32", "rollout.dtype=float32", "teacher.dtype=float32"]
    rest = ["optimizer.learning_rate=1e-3", "eval.prompts=8", "batch_size=8", *overrides]
    result = train(Config.load("builtin:quickstart", [*SHORT, *keys, *plain, ALONE, *rest]))
    return result, load_file(run_dir / "final" / "model.safetensors")


SAMPLED = ("distill.seq_kd=true", "eval.teacher=true", "distill.jsd_beta=0.5")
SAMPLED += ("eval.samples=2", "eval.temperature=1")  # by the program of the teacher's samples
SAMPLED += ("rollout.launch_tokens=8",)  # one launch: one program of it


@pytest.fixture(scope="module")
def plain_run(models, tmp_path_factory):
    """The run whose teacher is read in the student's tokens, and its weights, by how it learns."""
    folder, done = tmp_path_factory.mktemp("plain"), {}

    def get(*how):
        if how not in done:
            teacher = f"teacher.model={models['teacher']}"
            done[how] = run(models["student"], folder / str(len(done)), teacher, *how)
        return done[how]

    return get


@pytest.mark.parametrize(
    "how",
    and_slow(
        [SAMPLED],
        [
            (("data.eval=null", "distill.jsd_beta=0.5"),),
            (("data.eval=null", "distill.signal=topk", "distill.top_k=24"),),
        ],
    ),
    ids=["the teacher's samples", "hidden", "topk"],
)
def test_other_ids_for_the_same_tokens_change_nothing(models, plain_run, tmp_path, how):
    """The losses, the metrics and the weights after two updates; the teacher's samples too."""
    how = ["distill.on_policy_fraction=0", *how]
    plain, wanted = plain_run(*how)
    teacher = f"teacher.model={models['teacher']}", "teacher.tokenizer=own"
    own, found = run(models["reordered"], tmp_path / "own", *how, *teacher)
    for row, same in zip(own.metrics[1:], plain.metrics[1:], strict=True):
        for name in ("loss", "distill/divergence", "distill/top1_agreement", "actor/tokens"):
            assert row[name] == pytest.approx(same[name], rel=2e-4), name
        assert row["distill/aligned_bytes"] == row["distill/exact_bytes"] == 1
    assert own.metrics[0].get("teacher/accuracy") == plain.metrics[0].get("teacher/accuracy")
    found[EMBEDDING] = found[EMBEDDING][ORDER]
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=5e-5, err_msg=name)


def test_the_same_tokenizer_gives_the_same_bits(models, plain_run, tmp_path):
    """Also of the teacher's samples, which are not longer than the student's, as they would be in
    other tokens."""
    how = ["distill.on_policy_fraction=0", *SAMPLED]
    plain, wanted = plain_run(*how)
    teacher = f"teacher.model={models['teacher']}", "teacher.tokenizer=own"
    own, found = run(models["student"], tmp_path / "own", *how, *teacher)
    assert own.metrics[1]["actor/tokens"] > 0
    assert [row["loss"] for row in own.metrics[1:]] == [row["loss"] for row in plain.metrics[1:]]
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module")
def spellers(tmp_path_factory):
    """A student of words and a teacher of bytes, with random weights, and rows for both."""
    folder = tmp_path_factory.mktemp("spellers")
    for name, tokenizer, seed in (("words", WORDS, 0), ("bytes", BYTES, 1)):
        rows, end = len(tokenizer) + 3, (tokenizer.eos_token_id,)
        config = DecoderConfig("llama", rows, 32, 1, 4, 2, 8, 64, tie_embeddings=True, eos_ids=end)
        params = random_params(config, seed)
        params["embed"]["embedding"] *= 20
        save_hf(folder / name, config, params, dtype="float32")
        tokenizer.save_pretrained(folder / name)
    words = ["the year 1919", "the  the", "19 the 19"]
    rows = [{"prompt": f"{i} {words[i % 3]}", "answer": "1"} for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def of_bytes(spellers, tmp_path_factory):
    """A run whose teacher has bytes for the student's words, as it is cut."""

    def get(*overrides):
        model = [f"teacher.model={spellers / 'bytes'}", "teacher.tokenizer=own"]
        data = [f"data.train={spellers / 'rows.jsonl'}", "data.eval=null", "max_prompt_tokens=24"]
        keys = [*model, *data, "rollout.launch_tokens=8", *overrides]
        return run(spellers / "words", tmp_path_factory.mktemp("words"), *keys)

    return get


@pytest.fixture(scope="module")
def cut(of_bytes):
    """On two devices, in micro-batches and parts."""
    small = ["actor.micro_batch_tokens=48", "teacher.num_microbatches=2"]
    return of_bytes("mesh=actor+rollout+teacher=2", "rollout.devices=0:1", *small)


@pytest.mark.slow
def test_spans_of_several_tokens_are_learnt(spellers, cut):
    """In the default suite a run's spans have one token each; those of several are scored and
    learnt in test_aligned.py and test_token_spans.py."""
    result, found = cut
    for row in result.metrics[1:]:
        assert 0 < row["distill/exact_bytes"] < row["distill/aligned_bytes"] <= 1
        assert row["distill/divergence"] > 0 and row["distill/reverse_kl_k1"] > 0
    before = load_file(spellers / "words" / "model.safetensors")
    assert any((found[name] != value).any() for name, value in before.items())
    assert all(np.isfinite(value).all() for value in found.values())


@pytest.mark.slow
def test_devices_and_micro_batches_change_nothing(of_bytes, cut):
    """With spans of several tokens. In the default suite the loss by itself is compared so, and
    the signal of parts, in test_token_spans.py and test_aligned.py."""
    (plain, wanted), (other, found) = of_bytes(), cut
    for row, same in zip(other.metrics[1:], plain.metrics[1:], strict=True):
        for name in ("loss", "distill/divergence", "distill/reverse_kl_k1"):
            assert row[name] == pytest.approx(same[name], rel=2e-3), name
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=2e-3, err_msg=name)


def test_what_cannot_be_aligned_is_refused_before_anything_is_loaded(models):
    def refused(*overrides):
        keys = [f"student.model={models['reordered']}", "max_prompt_tokens=9", "max_new_tokens=10"]
        with pytest.raises(UserError) as error:
            make_job(Config.load("builtin:quickstart", [*keys, *overrides]))
        return str(error.value)

    own = "teacher.tokenizer=own"
    assert refused().endswith("; or set teacher.tokenizer=own")
    assert "common vocabulary: it has 24" in refused(own, "distill.signal=topk")
    assert "teacher.max_new_tokens=120 make 138 positions; teacher.model" in refused(
        own, "teacher.max_new_tokens=120"
    )
    assert "tokenizer=own" in refused("teacher.max_new_tokens=20")
    assert "set tokenizer=student" in refused(own, "teacher.model=policy")
    assert "set distill.signal=hidden or" in refused(own, "distill.signal=student_topk")
    assert "entropy_aware" in refused(own, "distill.entropy_aware=true")
    assert "set distill.lean=false or" in refused(own, "distill.lean=true")
    assert "at temperature 1" in refused(own, "sampling.temperature=0")
    assert "samples alone" in refused(
        own,
        "distill.signal=sampled",
        "distill.jsd_beta=1",
        "distill.on_policy_fraction=0.5",
        "distill.seq_kd=true",
    )


def test_scores_on_disk_are_of_the_student_s_tokens(tmp_path):
    config = Config.load("builtin:quickstart", ["teacher.tokenizer=own"])
    with pytest.raises(UserError, match="stored scores are for the student's tokens"):
        prepare_scoring(config, tmp_path, None)


def test_a_plan_that_splits_a_vocabulary_is_refused():
    keys = ["mesh=actor=2,rollout=1,teacher=1", "actor.parallel.tensor=2"]
    config = Config.load("builtin:quickstart", ["teacher.tokenizer=own", *keys])
    with pytest.raises(UserError, match="actor.parallel.tensor=2 splits the vocabulary"):
        make_plan(config, needed_roles(config), limit_gb=8)


def test_the_plan_counts_the_teacher_s_own_tokens(models):
    """Twice the widths by default, its own vocabulary, and what it sends beside hidden states."""

    def teacher(*overrides):
        keys = [f"student.model={models['reordered']}", "max_prompt_tokens=9", "max_new_tokens=10"]
        config = Config.load("builtin:quickstart", [*keys, *overrides])
        account = make_plan(config, needed_roles(config), limit_gb=8).accounts["teacher"]
        return sum(entry.bytes for entry in account.entries if entry.phase == "score")

    plain, own = teacher(), teacher("teacher.tokenizer=own")
    wide = teacher("teacher.tokenizer=own", "teacher.max_new_tokens=100")
    assert plain < own < wide
