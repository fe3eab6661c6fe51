"""A user's own divergence, advantages, term and metrics: they have the bits of what is built in
where they compute the same, and what does not fit is said before a run begins."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import CONSTANT, SHORT, numbers, save_model, weights

import jaxrl
from jaxrl import Config, UserError, types
from jaxrl.algorithms import signals
from jaxrl.algorithms.advantages import group_advantages
from jaxrl.algorithms.sampled_batch import own_advantages
from jaxrl.algorithms.trial_calls import check_own_parts
from jaxrl.losses.algorithm_table import ALGORITHMS, AlgorithmSpec, find_algorithm
from jaxrl.losses.distill import divergence_from_hidden, topk_divergence_from_hidden
from jaxrl.losses.divergence import GeneralisedJsd, generalised_jsd, make_divergence
from jaxrl.losses.policy import make_objective, policy_loss
from jaxrl.rewards.batch_rewards import RewardReport
from jaxrl.run.job import _code_digests
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

OWN = Path(__file__).parents[1] / "support" / "own_parts.py"
DRAW = np.random.default_rng(5)
MASK = np.array([[True, True, False, True], [True, False, False, False]])
STUDENT, TEACHER, HEAD, THEIRS = (
    DRAW.normal(size=shape).astype(np.float32) for shape in ((2, 4, 6), (2, 4, 5), (16, 6), (16, 5))
)
REWARDS = ["teacher.model=null", "reward.functions=[auto]", "group_size=2"]


def divergence(name, **arguments):
    own = find_algorithm(f"{OWN}:{name}", arguments).divergence
    return make_divergence(own)


def loss(hidden, head, mesh=None, lean=False, **how):
    """A sum and the metrics; of the hidden states and the head, gradients flow."""
    options = {"mesh": mesh, "lean": lean, "chunk": 2, "beta": 0.3} | how
    return divergence_from_hidden(hidden, head, TEACHER, THEIRS, MASK, **options)[0]


def graded(function):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(STUDENT, HEAD)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_divergence_class_of_the_same_formulas_has_the_bits_of_the_built_in_one(beta):
    own = divergence("jsd", beta=beta)
    assert type(own) is not GeneralisedJsd
    plain = graded(lambda h, w: loss(h, w, divergence=GeneralisedJsd(beta)))
    jax.tree.map(np.testing.assert_array_equal, graded(partial(loss, divergence=own)), plain)


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_a_function_is_differentiated_whatever_the_devices_and_tiles(alpha):
    """Its sum over the vocabulary, and the gradient of that, are those of the dense formula."""
    own = divergence("skewed", alpha=alpha)

    def dense(hidden, head):
        student = jax.nn.log_softmax(hidden @ head.T)
        teacher = jax.nn.log_softmax(jnp.asarray(TEACHER @ THEIRS.T))
        p, mixture = jnp.exp(teacher), alpha * jnp.exp(teacher) + (1 - alpha) * jnp.exp(student)
        return jnp.where(MASK, (p * (teacher - jnp.log(mixture))).sum(-1), 0).sum()

    expected = graded(dense)
    for mesh, lean in ((None, False), (role_mesh(jax.devices()[:4], Axes(1, 2, 2)), True)):
        found = graded(partial(loss, divergence=own, mesh=mesh, lean=lean))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), found, expected)


def test_a_function_of_the_reverse_kl_has_the_value_of_the_built_in_one_also_over_top_tokens():
    own, ids = divergence("reverse"), np.broadcast_to(np.arange(3), (2, 4, 3))
    teacher = jax.nn.log_softmax(jnp.asarray(TEACHER @ THEIRS.T))
    tail = jnp.log(jnp.exp(teacher[..., 3:]).sum(-1))
    sent = ids, teacher[..., :3], tail

    def topk(hidden, head, **how):
        return topk_divergence_from_hidden(hidden, head, *sent, MASK, beta=1.0, **how)[0]

    found, expected = graded(partial(topk, divergence=own)), graded(topk)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)
    student = jax.nn.log_softmax(jnp.asarray(STUDENT @ HEAD.T))
    value, _ = own.value(student, teacher, lambda x: x.sum(-1))
    np.testing.assert_array_equal(value, generalised_jsd(student, teacher, 1.0)[0])


def batch(rewards, ids):
    """A rollout, as far as advantages read it, of completions of 1, 2, ... tokens."""
    tokens = np.zeros((len(ids), 8), bool)
    completions = tuple(
        types.Completion((1,) * n, (0.0,) * n, (0.0,) * n, "stop") for n in range(1, len(ids))
    )
    sequences = types.Sequences(tokens, tokens, tokens)
    rollout = types.Rollout(
        *(sequences, (None,) * (len(ids) - 1), completions, np.array(ids, np.int32)),
        *(tokens, tokens, 0),
    )
    values = np.array(rewards, float)
    return rollout, RewardReport(values, values, {"r": values}, {}, ()), values


def test_own_advantages_see_rewarded_completions_and_are_0_elsewhere():
    rollout, report, values = batch([1, 0, 0, np.nan, 0, np.nan], [0, 0, 0, 1, 1, -1])
    spec = find_algorithm(f"{OWN}:maximum_likelihood")
    # By hand: of a group with one success in three the mean is 1/3; (1 - 1/3) / (1/3) = 2.
    expected = [2, -1, -1, 0, 0, 0]
    np.testing.assert_allclose(own_advantages(spec, rollout, report, values), expected)
    spec = AlgorithmSpec("rewards", ALGORITHMS["grpo"].loss, advantages=group_advantages).bind({})
    found = own_advantages(spec, rollout, report, values)
    np.testing.assert_array_equal(found, group_advantages(values, rollout.group_ids))
    of_tokens = find_algorithm(f"{OWN}:first_tokens")
    found = own_advantages(of_tokens, rollout, report, values)
    assert found.shape == (6, 8) and found[0, 0] == 1 and not found[0, 1:].any()


def test_a_term_sees_entropy_and_the_reference():
    spec = find_algorithm(f"{OWN}:watchful", {"entropy_coef": 0.5, "pull": 2.0})
    objective = make_objective(spec.loss)
    logprobs, old, entropy, reference = DRAW.normal(-1, 0.2, (4, 2, 4))
    advantages = np.array([1.0, -2.0])
    seen = {"entropy": entropy, "ref_logprobs": reference}
    given = logprobs, old, advantages, MASK
    total, _, metrics = policy_loss(
        objective, *given, own_metrics=spec.metrics_asking(("tokens",)), **seen
    )
    value = np.exp(logprobs - old) * advantages[:, None] + 0.5 * entropy
    value -= 2.0 * (logprobs - reference)
    mean = sum(row[kept].mean() for row, kept in zip(value, MASK, strict=True))
    np.testing.assert_allclose(total, -mean, rtol=1e-6)
    found = [float(x) for x in metrics["algorithm/surprise"]]
    np.testing.assert_allclose(found, [-logprobs[MASK].sum(), MASK.sum()], rtol=1e-6)


BAD = {
    "one_parameter": r"divergence one_parameter .*line \d+\) takes \(student\).*teacher is missing",
    "summed": r"divergence summed .*\(3,\).*must return what each token of the vocabulary adds",
    "mixing": r"returns for a token of the vocabulary what depends on others",
    "not_jax": r"divergence on_host .*own_parts.py, line \d+\): Tracer.*compute with jax.numpy",
    "not_finite": r"divergence divides .*returns (nan|inf): it must return finite numbers",
    "wrong_gradient": r"has a gradient that differs by .* from that of its value",
    "no_advantage": r"advantages nothing_to_compare .*returns nan: it must return finite numbers",
    "short": r"advantages too_few .*shape \(1,\): it must be \(6,\)",
    "raises": r"advantages raising .*own_parts.py, line \d+\): KeyError: 'length'",
    "bare_term": r"term bare .*returns .*: it must return a TermOutput",
    "needs_alpha": r"divergence needs_alpha .*needs the argument alpha: set algorithm.arguments",
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_said_before_the_run_with_its_file_and_line(name):
    with pytest.raises(UserError, match=BAD[name]):
        spec = find_algorithm(f"{OWN}:{name}")
        more = REWARDS if spec.learns_from == "rewards" else ["distill.jsd_beta=0.5"]
        check_own_parts(Config.load("builtin:quickstart", [f"algorithm={OWN}:{name}", *more]))


def test_arguments_come_from_the_command_line():
    given = [f"algorithm={OWN}:skewed", "distill.jsd_beta=0.5"]
    config = Config.load("builtin:quickstart", ["algorithm.arguments={alpha: 0.25}", *given])
    assert config.spec.divergence.arguments == (("alpha", 0.25),)
    one_by_one = Config.load("builtin:quickstart", [*given, "algorithm.arguments.alpha=0.25"])
    assert one_by_one == config and Config.parse(config.model_dump(mode="json")) == config
    with pytest.raises(UserError, match=r"no function takes 'alhpa' \(did you mean alpha\?\)"):
        Config.load("builtin:quickstart", [*given, "algorithm.arguments={alhpa: 0.25}"])
    with pytest.raises(UserError, match="algorithm=grpo has no functions of yours"):
        Config.load("builtin:quickstart", ["algorithm=grpo", "algorithm.arguments={alpha: 1}"])
    with pytest.raises(UserError, match="it has its own divergence: set distill.jsd_beta=0.5"):
        Config.load("builtin:quickstart", [*given, "distill.jsd_beta=0.2"])


@pytest.mark.usefixtures("shared_programs")
def test_a_run_with_own_group_advantages_has_the_bits_of_grpo(tmp_path):
    """Given by Python; and a run resumes with the same functions alone."""
    student = save_model(tmp_path / "student", 32, 1, 0)
    keys = [
        *SHORT,
        *CONSTANT,
        *REWARDS[:2],
        "algorithm=grpo",
        "mesh=actor+rollout=1",
        "data.eval=null",
    ]
    grpo = replace(ALGORITHMS["grpo"], advantages=group_advantages, metrics={"longest": longest})
    runs = []
    for name, spec in (("built-in", "grpo"), ("own", grpo)):
        config = Config.load("builtin:quickstart", [*keys, f"run_dir={tmp_path / name}"])
        runs.append(jaxrl.train(config, algorithm=spec, model=student))
    plain, own = (numbers(run) for run in runs)
    assert weights(runs[0].run_dir) == weights(runs[1].run_dir)
    assert all(1 <= row.pop("algorithm/longest") <= 8 for row in own[1:])
    assert own == plain
    changed = replace(grpo, scale_by_std=False)
    with pytest.raises(UserError, match="algorithm: python:algorithm@"):
        jaxrl.train(config, algorithm=changed, model=student)


def longest(lengths):
    return lengths.max()


def test_a_checkpoint_knows_the_files_of_an_algorithm(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.read_text())
    before = _code_digests("algorithm", f"{file}:skewed")
    file.write_text(re.sub("0.1", "0.2", OWN.read_text()))
    after = _code_digests("algorithm", f"{file}:skewed")
    assert before.keys() == after.keys() == {f"algorithm={file}:skewed"} and before != after
    assert _code_digests("algorithm", "grpo") == {}


def test_an_own_signal_gives_the_loss_of_its_formula(tmp_path):
    """As one would write it with all logits."""
    given = ["distill.jsd_beta=0.5", "distill.signal=own", f"algorithm={OWN}:imitation"]
    config = Config.load("builtin:quickstart", [*given, "algorithm.arguments={floor: 0.3}"])
    check_own_parts(config)
    mesh = role_mesh(jax.devices()[:1], Axes())
    projection = signals.Projection.from_config(config, mesh, 16)
    tokens = np.ones((2, 4), np.int32)
    sequences = types.Sequences(tokens, MASK, MASK)
    sent = signals.teacher_signal(projection, jnp.asarray(TEACHER), THEIRS, sequences, None)
    made = types.TrainBatch(sequences, sent)

    def found(hidden, head):
        return signals.distill_loss(projection, hidden, head, made, {})[0]

    def expected(hidden, head):
        student, teacher = (jax.nn.log_softmax(x) for x in (hidden @ head.T, TEACHER @ THEIRS.T))
        best, sure = jnp.argmax(teacher, -1), jnp.exp(teacher.max(-1))
        chosen = jnp.take_along_axis(student, best[..., None], -1)[..., 0]
        return jnp.where(MASK, -jnp.maximum(sure, 0.3) * chosen, 0).sum()

    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, graded(found), graded(expected))
    with pytest.raises(UserError, match="the algorithm has its own signal: set distill.signal=own"):
        Config.load("builtin:quickstart", ["distill.jsd_beta=0.5", given[2]])
    with pytest.raises(UserError, match="the algorithm has no `signal`"):
        Config.load("builtin:quickstart", ["distill.signal=own"])
    wrong = [*given[:2], f"algorithm={OWN}:other_shape"]
    with pytest.raises(UserError, match=r"send best_token .*returns .*`tensors` of the signal are"):
        check_own_parts(Config.load("builtin:quickstart", wrong))
