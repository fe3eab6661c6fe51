"""Whole runs that train adapters."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from runs import AS_TRAINED, CONSTANT, GSPO, SHORT, losses, numbers, save_pair

from jaxrl import Config
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.errors import UserError
from jaxrl.export import export
from jaxrl.formats import peft
from jaxrl.models.lora import dequantise, quantise
from jaxrl.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

LORA = ["student.lora.rank=4", "optimizer.learning_rate=0.02", *CONSTANT]
ALONE = ["mesh=actor+rollout+teacher=1", "data.eval=null"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def run(models, run_dir, *overrides):
    given = [*models, *SHORT, *LORA, *ALONE, f"run_dir={run_dir}", *overrides]
    return train(Config.load("builtin:quickstart", given))


def adapters(run_dir):
    return (run_dir / "final" / peft.WEIGHTS).read_bytes()


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return run(models, folder / "whole", "steps=4", "checkpoint.every=2")


def test_a_run_resumes_bit_for_bit_and_not_with_other_adapters(models, whole, tmp_path):
    left = tmp_path / "left"
    shutil.copytree(whole.run_dir, left)
    shutil.rmtree(left / "final")
    shutil.rmtree(left / "checkpoints" / "4")
    given = [models, left, "steps=4", "checkpoint.every=2"]
    with pytest.raises(UserError, match=r"student\.lora\.rank: 4 there, 8 now"):
        run(*given, "student.lora.rank=8")
    resumed = run(*given)
    assert numbers(resumed) == numbers(whole)
    assert adapters(resumed.run_dir) == adapters(whole.run_dir)
    assert losses(whole)[-1] != losses(whole)[0]


def test_what_was_trained_is_a_model_by_every_name(models, whole):
    """The run, its last checkpoint and its final folder are the same model; the base is untouched,
    and only adapters are stored and sent."""
    run_dir, student = whole.run_dir, resolve_model(models[0].partition("=")[2])
    final, saved = resolve_model(run_dir), resolve_model(run_dir / "checkpoints" / "4")
    assert final.path == run_dir / "final" and final.base_name == str(student.path)
    name = "model.layers.0.mlp.down_proj.weight"
    every = tuple(slice(0, n) for n in student.tensors.shape(name))
    ours = final.tensors.read(name, every)
    assert (ours == saved.tensors.read(name, every)).all()
    change = np.abs(ours - student.tensors.read(name, every)).max()
    assert 1e-4 < change < 1
    embedding = "model.embed_tokens.weight"
    box = (slice(0, 9), slice(0, 9))
    assert (final.tensors.read(embedding, box) == student.tensors.read(embedding, box)).all()
    settings = json.loads((run_dir / "final" / peft.CONFIG).read_text())
    assert settings["r"] == 4 and settings["lora_alpha"] == 8
    folder = run_dir / "checkpoints" / "4"
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size < student.config.n_params * 12 / 2


def test_training_goes_on_from_adapters(models, whole, tmp_path):
    """From the final folder of a run: its own adapters where they are trained further, merged where
    all weights are."""
    start = f"student.model={whole.run_dir / 'final'}"
    further = run([start, models[1]], tmp_path / "further", "steps=1")
    full = ["student.lora.rank=null", "optimizer.learning_rate=3e-3"]  # as other files' runs
    merged = run([start, models[1]], tmp_path / "merged", "steps=1", *full)
    assert (merged.run_dir / "final" / "model.safetensors").is_file()
    assert losses(further)[0] == pytest.approx(losses(merged)[0], rel=1e-4)
    assert losses(further)[0] != pytest.approx(losses(whole)[0], rel=1e-2)
    with pytest.raises(UserError, match="has adapters of rank 4.*asks for rank 2"):
        run([start, models[1]], tmp_path / "other", "student.lora.rank=2")


@pytest.mark.parametrize(
    "other",
    [
        ["rollout.merge=true", "offload.params=true", "data.eval=arithmetic", *AS_TRAINED],
        ["offload.params=true", "offload.optimizer=true"],
    ],
    ids=["merged", "offloaded"],
)
def test_how_the_rollout_holds_the_weights_changes_nothing(models, whole, tmp_path, other):
    found = run(models, tmp_path / "run", "steps=2", *other)
    assert losses(found) == pytest.approx(losses(whole)[:2], rel=1e-5)


def test_the_weights_under_adapters_may_be_held_in_bfloat16(models, whole, tmp_path):
    """They are rounded, and computed with in the actor's dtype."""
    found = run(models, tmp_path / "run", "steps=1", "student.base_dtype=bfloat16")
    assert losses(found)[0] != losses(whole)[0]
    assert losses(found)[0] == pytest.approx(losses(whole)[0], rel=0.02)


QLORA = ["mesh=actor+rollout+reference=1", "policy.kl_coef=0.1", "student.base_dtype=nf4"]
QLORA += ["actor.minibatches=1", "offload.frozen=true"]


@pytest.fixture(scope="module")
def quantised(models, tmp_path_factory):
    place = tmp_path_factory.mktemp("quantised")
    return run(models[:1], place / "run", *GSPO, *QLORA, "steps=2", "checkpoint.every=1")


def test_a_quantised_base_is_the_base_everywhere(quantised):
    """The rollout samples from what is trained, and the reference is its start. What the actor
    keeps is not offloaded with the reference."""
    kl = [row["policy/kl_k3"] for row in quantised.metrics[1:]]
    assert abs(kl[0]) < 1e-6 < abs(kl[-1])
    assert max(row["policy/mismatch_k3"] for row in quantised.metrics[1:]) < 1e-6


@pytest.mark.slow
def test_a_quantised_base_is_the_same_on_other_devices(models, quantised, tmp_path):
    """With each role elsewhere, and the rollout's copy merged. In the default suite the mixtures'
    adapters over experts in 4 bits are divided and merged so."""
    apart = "mesh=actor=2,rollout=1,reference=1"
    two = run(models[:1], tmp_path / "two", *GSPO, *QLORA, apart, "rollout.merge=true", "steps=2")
    for name in ("policy/kl_k3", "policy/entropy", "reward/mean"):
        ours, theirs = ([row[name] for row in found.metrics[1:]] for found in (quantised, two))
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-7), name


def test_a_run_over_a_quantised_base_resumes_bit_for_bit(models, quantised, tmp_path):
    left = tmp_path / "left"
    shutil.copytree(quantised.run_dir, left)
    shutil.rmtree(left / "final")
    shutil.rmtree(left / "checkpoints" / "2")
    given = [*GSPO, *QLORA, "steps=2", "checkpoint.every=1"]
    with pytest.raises(UserError, match=r"student\.base_dtype: nf4 there, int8 now"):
        run(models[:1], left, *given, "student.base_dtype=int8")
    resumed = run(models[:1], left, *given)
    assert numbers(resumed) == numbers(quantised)
    assert adapters(resumed.run_dir) == adapters(quantised.run_dir)


def test_what_was_trained_over_a_quantised_base_is_read_over_it(models, quantised, tmp_path):
    """A run, its checkpoint and its folder are the dequantised weights and the adapters; other
    devices and cuts of the tensors read the same."""
    run_dir, student = quantised.run_dir, resolve_model(models[0].partition("=")[2])
    settings = json.loads((run_dir / "final" / peft.CONFIG).read_text())
    assert settings["jaxrl_base_dtype"] == "nf4"
    assert settings["base_model_name_or_path"] == str(student.path)
    final, saved = resolve_model(run_dir), resolve_model(run_dir / "checkpoints" / "2")
    name = "model.layers.0.mlp.down_proj.weight"
    every = tuple(slice(0, n) for n in student.tensors.shape(name))
    plain = student.tensors.read(name, every)
    rounded = jax.jit(lambda x: dequantise(*quantise("nf4", x, 64), np.float32))
    under = np.asarray(rounded(plain.T)).T
    a, b = final.adapter.pairs()[name]
    ours = final.tensors.read(name, every)
    np.testing.assert_allclose(ours, under + 2 * (a @ b).T, atol=1e-7)
    assert (ours == saved.tensors.read(name, every)).all()
    assert np.abs(plain - under).max() > 0.01
    part = (slice(3, 9), slice(5, 30))
    assert (final.tensors.read(name, part) == ours[part]).all()
    whole = resolve_model(export(final, tmp_path / "whole", dtype="float32"))
    assert (whole.tensors.read(name, every) == ours).all()
    again = resolve_model(export(final, tmp_path / "adapters", adapters=True))
    assert again.adapter.quantised == "nf4"
    on = run([f"student.model={again.path}"], tmp_path / "on", *GSPO, *QLORA, "steps=1")
    assert abs(on.metrics[1]["policy/kl_k3"]) < 1e-6  # of the reference, which has merged weights


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [["offload.frozen=true"], []], ids=["offloaded", ""])
def test_the_reference_is_the_base_without_another_copy(models, tmp_path, offloaded):
    """GSPO with a penalty: the policy starts at the reference, and moves away from it. What the
    actor keeps is not offloaded with the reference. The default suite has it of a quantised base.
    """
    more = ["mesh=actor+rollout+reference=1", "policy.kl_coef=0.1"]
    more.append("actor.minibatches=1")
    found = run(models[:1], tmp_path / "run", *GSPO, *more, *offloaded, "steps=2")
    kl = [row["policy/kl_k3"] for row in found.metrics[1:]]
    assert abs(kl[0]) < 1e-6 < abs(kl[-1])
    assert max(row["policy/mismatch_k3"] for row in found.metrics[1:]) < 1e-6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["student.lora.rank=0"], "student.lora.rank"),
        (["student.lora.targets=[q_proj,query]"], "student.lora.targets"),
        (["student.lora.rank=null", "rollout.merge=true"], "rollout.merge=true .* no adapters"),
        (
            ["student.lora.rank=null", "student.base_dtype=bfloat16"],
            "base_dtype=bfloat16 lora.rank=null: it is for",
        ),
        (
            ["student.lora.rank=null", "student.lora.alpha=8"],
            "rank=null alpha=8: there are no adapters",
        ),
        (["student.lora.rank=null", "student.lora.targets=q_proj"], "there are no adapters"),
        (["teacher.model=policy"], "adapters are trained: set teacher.ema=1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(models, tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        run(models, tmp_path / "run", *given)
