"""The axis `context` divides the tokens of long sequences, and nothing else changes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import CONSTANT, GSPO, SHORT, save_model
from tiny_models import make_mesh, random_params

from jaxrl import Config, load_model
from jaxrl.algorithms.signals import completion_logprobs
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import param_shardings
from jaxrl.train import train
from jaxrl.types import Sequences

MODEL = DecoderConfig("llama", 48, 32, 2, 4, 2, 8, 64, tie_embeddings=True, eos_ids=(1,))
PROMPT, COMPLETION = 96, 928
TOKENS = PROMPT + COMPLETION


def sequences() -> Sequences:
    """One row of 1024 tokens."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, TOKENS))
    real = np.ones((1, TOKENS), bool)
    return Sequences(tokens.astype(np.int32), real, real[:, PROMPT:])


@cache
def compiled(shape):
    """A program and its arguments: the log-probs of a long row, and their gradient."""
    mesh, given = make_mesh(*shape), sequences()
    params = jax.device_put(random_params(MODEL), param_shardings(MODEL, mesh))

    def loss(params):
        logprobs = completion_logprobs(MODEL, params, given, mesh, temperature=1.0, chunk=256)
        return jnp.sum(logprobs * jnp.cos(jnp.arange(COMPLETION))[None]), logprobs

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return run.lower(params).compile(), params


def test_four_devices_compute_what_one_does_of_a_long_row_in_a_third_of_the_memory():
    (one, params), (four, shared) = compiled((1, 1, 1)), compiled((1, 1, 1, 4))
    (_, expected), grads = jax.device_get(one(params))
    (_, found), theirs = jax.device_get(four(shared))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(b, a, atol=5e-6 * float(np.abs(a).max()))
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (one, four)]
    assert sizes[1] < sizes[0] / 3


def test_a_layer_exchanges_heads_and_no_device_has_all_tokens_of_its_products():
    """All-to-alls in each pass over the layers; outside of attention no product of all rows."""
    text = compiled((1, 1, 1, 4))[0].as_text()
    assert re.search(r" all-to-all\(", text)
    products = re.findall(r"f32\[([\d,]+)\]\S* dot\(", text)
    widths = "|".join({str(MODEL.d_model), str(MODEL.d_ff), "16"})  # 16: of keys and values
    whole, quarter = (
        [x for x in products if re.fullmatch(rf"(1,)?{n},({widths})", x)]
        for n in (TOKENS, TOKENS // 4)
    )
    assert quarter and not whole


def leaves_of(folder) -> list[np.ndarray]:
    return jax.tree.leaves(jax.device_get(load_model(folder).params))


TAUGHT = (
    ["group_size=2", "eval.samples=2"],
    "actor+rollout+teacher=1",
    ["mesh=rollout=1,actor=2,teacher=2"],
    "distill/student_entropy",
)
REWARDED = (
    [*GSPO, "distill_weight=1", "policy.kl_coef=0.1", "eval.samples=4"],
    "actor+rollout+teacher+reference=1",
    [
        "mesh=rollout=1,actor=4,teacher+reference=2",
        "actor.parallel.tensor=2",
        "reference.parallel.context=2",
    ],
    "policy/entropy",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "one", "many", "entropy"), [TAUGHT, REWARDED], ids=["taught", "rewarded"]
)
def test_a_run_learns_what_it_would_learn_without(tmp_path: Path, method, one, many, entropy):
    """Every role that has the axis, prompts that a group shares, samples of the teacher, and
    rewards beside what the teacher says: the metrics of an update, and the weights after it. In the
    default suite: the update in test_actor.py, and the teacher's scores in
    test_self_distillation.py."""
    models = {role: save_model(tmp_path / role, 32, 1, seed) for seed, role in enumerate("st")}
    given = [f"student.model={models['s']}", *method, f"teacher.model={models['t']}"]
    given += ["steps=1", "actor.minibatches=1", "eval.prompts=6", "eval.temperature=1"]
    given += ["optimizer.name=sgd", "optimizer.learning_rate=0.1", *CONSTANT]  # a step as exact
    divided = [*many, "actor.parallel.context=2", "teacher.parallel.context=2", "eval.teacher=true"]
    found, trained = [], []
    for name, more in {"without": [f"mesh={one}", "data.eval=null"], "with": divided}.items():
        keys = [*SHORT, *given, *more, f"run_dir={tmp_path / name}"]
        result = train(Config.load("builtin:quickstart", keys))
        learnt = ("actor/grad_norm", entropy, "distill/divergence")
        found.append([result.metrics[1][key] for key in learnt])
        trained.append(leaves_of(result.run_dir))
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert found[0][0] > 0
    start = leaves_of(models["s"])
    for a, b, before in zip(*trained, start, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-3 * float(np.abs(a - before).max()))


@pytest.mark.parametrize("role", ["rollout", "reward", "grouper"])
def test_roles_that_sample_or_read_short_texts_have_no_such_axis(role):
    with pytest.raises(UserError, match=f"{role}.parallel.context"):
        Config.load("builtin:quickstart", [f"{role}.parallel.context=2"])
