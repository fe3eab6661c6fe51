"""Laws of the objective of what learns from rewards: term by term, and put together."""

from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from numpy_losses import log_softmax as exact_log_softmax
from objectives import config
from rounding import tolerance
from tiny_models import make_mesh, random_params

from jaxrl.algorithms.advantages import (
    decoupled_rewards,
    group_advantages,
    normalise_batch,
)
from jaxrl.algorithms.methods import (
    METHODS,
    Policy,
    method_of,
    needed_roles,
    objective_notes,
    objective_of,
    policy_objective,
)
from jaxrl.algorithms.sampled_batch import prepare_rewarded
from jaxrl.algorithms.signals import pack_completions
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import UserError
from jaxrl.losses.algorithm_table import ALGORITHMS
from jaxrl.losses.distill import entropy_aware_from_topk
from jaxrl.losses.divergence import EntropyAware
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.rewards.batch_rewards import RewardReport, cut_report
from jaxrl.roles.actor import Actor, join_values
from jaxrl.roles.reference import Reference
from jaxrl.types import (
    Completion,
    Embedded,
    HiddenSignal,
    Prompt,
    SampledSignal,
    Sequences,
    TokenValues,
    Totals,
    TrainBatch,
)

pytestmark = pytest.mark.usefixtures("shared_programs")

MODEL = DecoderConfig("llama", 48, 16, 1, 4, 2, 4, 24, tie_embeddings=True, eos_ids=(1,))
WIDTHS = {"max_prompt_tokens": 6, "max_new_tokens": 8}
GROUPS, G = 5, 3
TEACHER = ["teacher.model=a", "distill_weight=0.7"]
ALL_TERMS = [*TEACHER, "policy.kl_coef=0.3", "policy.entropy_coef=0.2"]
REWARDED = [name for name, spec in ALGORITHMS.items() if spec.learns_from == "rewards"]
DEGENERATE = 3
"""The prompt whose completions all have the same reward."""


# A batch of hidden states, so that no model is in the way.

B, C, D, V = 4, 5, 8, 24


def arrays():
    """hidden [B, C, D], head [V, D], what a micro-batch has, the teacher's head."""
    return drawn()[:-1]


def sampled_batch():
    """What a micro-batch has, with the teacher's log-probs in place of its hidden states."""
    return replace(drawn()[2], teacher=drawn()[-1])


def logprobs_of_tokens(hidden, kernel, tokens):
    logprobs = exact_log_softmax(hidden @ kernel.T).astype(np.float32)
    return np.take_along_axis(logprobs, tokens[:, 3:, None], -1)[..., 0]


def zeros_like(tree):
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), tree)


def minus(a, b, times=1.0):
    return jax.tree.map(lambda x, y: np.asarray(x) - times * np.asarray(y), a, b)


@cache
def drawn():
    draw = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (scale * draw.standard_normal(shape)).astype(np.float32)

    lengths = draw.integers(1, C + 1, B)
    mask = np.arange(C) < lengths[:, None]
    tokens = draw.integers(0, V, (B, 3 + C)).astype(np.int32)
    sequences = Sequences(tokens, np.ones((B, 3 + C), bool), mask)
    hidden, kernel = normal(B, C, D), normal(V, D, scale=0.5)
    logprobs = logprobs_of_tokens(hidden, kernel, tokens)
    states, told = normal(B, C, 6), logprobs + normal(B, C, scale=0.3)
    batch = TrainBatch(
        sequences,
        HiddenSignal(hidden=states),
        logprobs + normal(B, C, scale=0.05),
        normal(B),
        logprobs + normal(B, C, scale=0.2),
        logprobs + normal(B, C, scale=0.05),
    )
    return hidden, kernel, batch, normal(V, 6), SampledSignal(token_logprobs=told)


def mean_loss(cfg, hidden, kernel, batch, teacher_head):
    mesh = make_mesh(1, 1, 1)
    evaluate, packing = policy_objective(cfg, MODEL, mesh, V), pack_streams(batch.sequences, mesh)
    mask, policy = batch.sequences.loss_mask, batch.policy_mask
    counts = mask.sum(), policy.sum(), policy.any(-1).sum()
    totals = Totals(*(jnp.maximum(count.astype(jnp.float32), 1) for count in counts))  # as an actor
    frozen = {"teacher_head": teacher_head}
    given = batch, pack_completions(packing, batch), frozen, totals
    policy = Policy(packing, packing.completions.pack(hidden), kernel, *given)
    (total, count), sums, maxima = evaluate(policy)
    return total / jnp.maximum(count, 1), (sums, maxima)


@cache
def compiled(algorithm, *overrides):
    loss = partial(mean_loss, config(algorithm, *overrides))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def evaluated(algorithm, *overrides, batch=None, at=None):
    """The mean loss with its sums and maxima, and its gradient with respect to the hidden states
    and the head: `at` those, or at the batch's own."""
    *own, given, teacher_head = arrays()
    if "distill.signal=sampled" in overrides:
        given = sampled_batch()
    found = compiled(algorithm, *overrides)(*(at or own), batch or given, teacher_head)
    return jax.device_get(found)


def gradient(algorithm, *overrides, batch=None):
    return evaluated(algorithm, *overrides, batch=batch)[1]


def told_sums(algorithm, *overrides, batch=None):
    """What the loss sums, and its maxima, for metrics."""
    return evaluated(algorithm, *overrides, batch=batch)[0][1]


def assert_close(a, b, tolerance, scale=1.0):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, scale * np.asarray(y), rtol=0, atol=tolerance)


def differ(a, b, by):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs) > by


@pytest.mark.parametrize("algorithm", and_slow(["gspo"], ["dapo"]))
def test_the_gradient_of_all_terms_at_once_is_that_of_finite_differences(algorithm):
    """With a wide clip, for at its edge there is no derivative."""
    asked = [*ALL_TERMS, "policy.clip_low=0.9", "policy.clip_high=9.0"]
    hidden, kernel, *_ = arrays()
    slope = gradient(algorithm, *asked)
    draw = np.random.default_rng(7)
    for _ in range(4):
        step = [draw.standard_normal(x.shape).astype(np.float32) for x in (hidden, kernel)]
        ahead, behind = (
            float(evaluated(algorithm, *asked, at=moved)[0][0])
            for moved in (
                (hidden + sign * 5e-3 * step[0], kernel + sign * 5e-3 * step[1]) for sign in (1, -1)
            )
        )
        along = sum(float((np.asarray(s) * x).sum()) for s, x in zip(slope, step, strict=True))
        assert (ahead - behind) / 1e-2 == pytest.approx(along, rel=5e-3, abs=2e-3)


@pytest.mark.slow
def test_the_whole_is_the_sum_of_its_terms_each_with_its_weight():
    """In the default suite it is in value, of a whole update, and the gradient of the whole is
    that of finite differences."""
    terms = {
        (): 1.0,
        ("policy_weight=0", "teacher.model=a", "distill_weight=1"): 0.7,
        ("policy_weight=0", "policy.kl_coef=1"): 0.3,
        ("policy_weight=0", "policy.entropy_coef=1"): 0.2,
    }
    expected = zeros_like(arrays()[:2])
    for asked, weight in terms.items():
        term = gradient("gspo", *asked)
        assert differ(term, zeros_like(term), by=1e-3), asked
        expected = minus(expected, term, times=-weight)
    assert_close(gradient("gspo", *ALL_TERMS), expected, 1e-6)


def test_the_teacher_decides_the_joint_gradient():
    """And nothing of it where it has no weight."""
    hidden, _, batch, _ = arrays()
    other = replace(batch, teacher=HiddenSignal(hidden=batch.teacher.hidden[::-1]))
    joint = gradient("gspo", *ALL_TERMS), gradient("gspo", *ALL_TERMS, batch=other)
    assert differ(*joint, by=1e-3)
    assert_close(gradient("gspo"), gradient("gspo", batch=other), 0)


@pytest.mark.parametrize(
    "algorithm",
    and_slow(["gspo"], [name for name in REWARDED if name != "gspo"]),
)
def test_with_one_update_the_start_of_the_batch_is_the_policy_in_training(algorithm):
    """No log-probs before the batch, or the very same ones: one gradient, and every ratio is 1."""
    hidden, kernel, batch, _ = arrays()
    now = logprobs_of_tokens(hidden, kernel, batch.sequences.tokens)
    without = replace(batch, old_logprobs=None)
    asked = (algorithm, "actor.minibatches=1")
    both = (gradient(*asked, batch=each) for each in (without, replace(batch, old_logprobs=now)))
    assert_close(*both, 1e-6)
    sums, _ = told_sums(*asked, batch=without)
    total, count = sums["policy/ratio"]
    assert float(total) == float(count) and float(sums["policy/clip_fraction"][0]) == 0


def test_no_run_with_bypass_is_said_to_have_a_clip_that_never_acts():
    """Its ratio is to the policy that sampled, so that one update does not make it 1."""
    for asked in (["actor.minibatches=1"], ["actor.minibatches=5", "policy.clip_low=0.2"]):
        assert any("clip" in note for note in objective_notes(config("gspo", *asked)))
        told = objective_notes(config("gspo", *asked, "policy.bypass=true"))
        assert not any("clip" in note for note in told)


def test_bypass_takes_the_sampler_for_the_start_of_the_batch():
    *_, batch, _ = arrays()
    as_old = gradient("dapo", batch=replace(batch, old_logprobs=batch.sampler_logprobs))
    assert_close(gradient("dapo", "policy.bypass=true"), as_old, 0)
    assert differ(gradient("dapo"), as_old, by=1e-4)


def test_a_correction_weighs_tokens_and_its_mismatch_is_told_without_one():
    *_, batch, _ = arrays()
    told = {
        correction: METHODS["rewards"].finish(*told_sums("dapo", f"policy.correction={correction}"))
        for correction in ("none", "tis_token")
    }
    mask = np.asarray(batch.sequences.loss_mask)
    gap = np.asarray(batch.old_logprobs - batch.sampler_logprobs)[mask]
    for row in told.values():
        expected = float(np.mean(np.expm1(gap) - gap))
        assert row["policy/mismatch_k3"] == pytest.approx(expected, rel=1e-4)
        largest = float(np.abs(gap).max())
        assert row["policy/mismatch_max_log_ratio"] == pytest.approx(largest, rel=1e-5)
    assert told["none"]["policy/correction_weight"] == 1
    weight = float(np.minimum(np.exp(gap), 2).mean())
    assert told["tis_token"]["policy/correction_weight"] == pytest.approx(weight, rel=1e-5)
    assert differ(gradient("dapo"), gradient("dapo", "policy.correction=tis_token"), by=1e-4)


OPD = ["teacher.model=a", "distill.signal=sampled", "distill.jsd_beta=1", "policy.opd_coef=1"]


def test_opd_without_rewards_is_the_gradient_of_the_sampled_reverse_kl():
    """Token mean of (log Q - log P) grad log Q, and of the very loss that gkd has for it."""
    none = {"advantages": np.zeros(B, np.float32), "old_logprobs": None, "sampler_logprobs": None}
    batch = replace(sampled_batch(), **none)
    hidden, kernel, _, _ = arrays()
    mask, told = batch.sequences.loss_mask, batch.teacher.token_logprobs

    tokens, q = batch.sequences.tokens, np.exp(exact_log_softmax(hidden @ kernel.T))
    gap = logprobs_of_tokens(hidden, kernel, tokens) - told
    slope = np.where(mask, gap, 0)[..., None] * (np.eye(V)[tokens[:, 3:]] - q) / mask.sum()
    expected = slope @ kernel, np.einsum("bcv,bcd->vd", slope, hidden)
    sampler = replace(batch, sampler_logprobs=np.zeros((B, C), np.float32))
    assert_close(gradient("dapo", *OPD, batch=sampler), expected, 1e-6)
    assert differ(expected, zeros_like(expected), by=1e-2)


def test_a_token_that_the_teacher_calls_impossible_does_not_own_the_batch():
    """Its gap counts as 20 nats, whatever stands there, and is counted."""
    batch, told = sampled_batch(), []

    def with_first(theirs):
        logprobs = batch.teacher.token_logprobs.copy()
        logprobs[0, 0] = theirs
        return replace(batch, teacher=SampledSignal(token_logprobs=logprobs))

    for theirs in (-1e30, -np.inf, -9991.0):
        broken = with_first(theirs)
        (_, (sums, _)), slope = evaluated("dapo", *OPD, batch=broken)
        told.append(slope)
        total, count = sums["policy/opd_clamped"]
        assert total == 1 and count == batch.sequences.loss_mask.sum()
    at_20 = with_first(batch.old_logprobs[0, 0] - 20)
    for each in told:
        assert_close(each, gradient("dapo", *OPD, batch=at_20), 1e-6)
    assert told_sums("dapo", *OPD)[0]["policy/opd_clamped"][0] == 0


ENTROPY_AWARE = ["distill.entropy_aware=true", "distill.entropy_top_k=4"]


def with_uncertain_teacher():
    """`sampled_batch`, with what the entropy-aware term asks: uncertain at some tokens."""
    batch = sampled_batch()
    draw = np.random.default_rng(8)
    logprobs = exact_log_softmax(draw.standard_normal((B, C, V))).astype(np.float32)
    ids = np.argsort(-logprobs, -1)[..., :4].astype(np.int32)
    best = np.take_along_axis(logprobs, ids, -1)
    more = {"best_ids": ids, "best_logprobs": best}
    more["best_tail"] = np.log1p(-np.exp(best).sum(-1))
    more["entropy"] = draw.uniform(0, 1.6, (B, C)).astype(np.float32)
    return replace(batch, teacher=replace(batch.teacher, **more))


BESIDE = {
    "OPD": (["policy.opd_coef=0.4"], 0.5 * 0.4),
    "the divergence": (["policy.opd_coef=0", "distill_weight=0.3"], 0.3),
    "both": (["policy.opd_coef=0.4", "distill_weight=0.3"], 0.3),
}
"""Overrides, and the weight of the term."""


@cache
def entropy_aware_alone():
    """The gradient of the term by itself."""
    batch = with_uncertain_teacher()
    term = EntropyAware(threshold=0.8, top_k=4)

    def alone(hidden, kernel):
        given = hidden, kernel, batch.teacher, batch.sequences.loss_mask
        total, count, _ = entropy_aware_from_topk(*given, term=term)
        return total / count

    return jax.device_get(jax.jit(jax.grad(alone, argnums=(0, 1)))(*arrays()[:2]))


@pytest.mark.parametrize("beside", and_slow(["OPD", "both"], ["the divergence"]))
def test_the_entropy_aware_term_is_there_once_however_the_teacher_is_learnt_from(beside):
    """Beside the advantages of OPD, beside the divergence, and beside both: as it is by itself."""
    batch, expected = with_uncertain_teacher(), entropy_aware_alone()
    assert differ(expected, zeros_like(expected), by=1e-2)
    opd, weight = BESIDE[beside]
    asked = [*OPD, "policy_weight=0.5", *opd]
    # Without what the teacher shipped for it, the divergence has no such term.
    bare = gradient("gspo_token", *asked)
    both = gradient("gspo_token", *asked, *ENTROPY_AWARE, batch=batch)
    assert_close(minus(both, bare), expected, 1e-6, scale=weight)


STALE = "schedule=one_step_off"


def test_stale_samples_are_corrected_unless_asked_otherwise():
    """Weights of min(rho, 2) a token with any schedule that lags; the reader is told."""
    tis = gradient("dapo", "policy.correction=tis_token")
    none = gradient("dapo", "policy.correction=none")
    assert differ(tis, none, by=1e-4)
    drop = "policy.dynamic_sampling=drop"
    for schedule in (STALE, "schedule=two_step_off"):
        assert_close(gradient("dapo", drop, schedule), tis, 0)
        assert_close(gradient("dapo", drop, schedule, "policy.correction=none"), none, 0)
    assert_close(gradient("dapo"), none, 0)
    # With one update pi_theta / pi_old is 1: without weights nothing would be corrected at all.
    (*_, stated) = objective_notes(config("grpo", STALE))
    assert "multiplied by min(pi_old / mu, 2)" in stated and "policy.correction=none" in stated
    for asked in (["policy.correction=none", STALE], ["policy.bypass=true", STALE], []):
        assert not any("pi_old / mu" in note for note in objective_notes(config("gspo", *asked)))
        assert config("gspo", *asked).correction == ("none",)


@pytest.mark.parametrize("algorithm", REWARDED)
def test_to_set_what_an_algorithm_has_changes_nothing(algorithm):
    plain = config(algorithm)
    spec, objective = plain.spec, objective_of(plain)
    own = {"ratio": spec.loss.ratio, "aggregation": spec.loss.aggregation, **spec.loss.settings}
    own |= {"scale_by_std": spec.scale_by_std, "dynamic_sampling": plain.dynamic_sampling}
    own |= {"correction": list(plain.correction)}
    if own["aggregation"] == "sum_over_constant":
        own["constant"] = objective.aggregation.constant
    keys = {f"policy.{key}": value for key, value in own.items()}
    keys |= {"actor.minibatches": plain.minibatches}
    keys |= {"reward.overlong_buffer": plain.rewards.overlong_buffer}
    for asked in [{key: value} for key, value in keys.items()] + [keys]:
        found = Config.of(plain, asked)
        assert objective_of(found) == objective
        assert found.minibatches == plain.minibatches and found.rewards == plain.rewards
        assert (found.dynamic_sampling, found.correction) == (
            plain.dynamic_sampling,
            plain.correction,
        )


def test_kl_and_entropy_are_aggregated_as_the_policy_loss():
    """|y| times gspo's in every term of luspo, so that kl_coef weighs tokens alike in both."""
    hidden, kernel, batch, _ = arrays()
    now = replace(
        batch,
        sequences=replace(batch.sequences, loss_mask=np.ones((B, C), bool)),
        old_logprobs=logprobs_of_tokens(hidden, kernel, batch.sequences.tokens),
    )
    asked = "policy.kl_coef=1", "policy.entropy_coef=1"
    gspo, luspo = (gradient(name, *asked, batch=now) for name in ("gspo", "luspo"))
    assert_close(luspo, gspo, 1e-5, scale=C)
    assert differ(gspo, gradient("gspo", batch=now), by=1e-2)


def test_opd_of_whole_sequences_is_refused_before_the_start():
    with pytest.raises(ValueError, match=r"opd_coef=1 weighs single tokens.*gspo_token"):
        objective_of(config("gspo", *OPD))
    assert objective_of(config("gspo_token", *OPD)).ratio == "sequence_token"


# From rewards to a batch.


def completions(seed=0):
    """For each of the prompts its completions, of several lengths; some are cut."""
    draw = np.random.default_rng(seed)

    def one(tokens):
        values = draw.uniform(-3, -1, (2, len(tokens))).astype(np.float32)
        return Completion(tokens, values[0], values[1], draw.choice(["stop", "length"]))

    groups = []
    for _ in range(GROUPS):
        lengths = draw.integers(1, 8, G)
        groups.append([one(tuple(draw.integers(2, 48, n).tolist())) for n in lengths])
    prompts = [Prompt(i, tuple(draw.integers(2, 48, 4).tolist()), f"p{i}") for i in range(GROUPS)]
    return prompts, groups


@cache
def rollout():
    prompts, groups = completions()
    return make_rollout(prompts, groups, policy_version=0, pad_id=0, row_multiple=8, **WIDTHS)


@cache
def rewards():
    values = np.random.default_rng(3).integers(0, 4, (GROUPS, G)).astype(float)
    values[0] = (0, 1, 3)  # whatever was drawn, these differ
    values[DEGENERATE] = 2
    return np.concatenate([values.ravel(), np.full(rows() - GROUPS * G, np.nan)])


def rows():
    return len(rollout().sequences.tokens)


def scores(given=None, penalty=0.0, **more):
    task = rewards() if given is None else given
    report = RewardReport(task - penalty, task, {}, {}, ())
    return {"reward": [report], **more}


def prepared(algorithm, *overrides, given=None, penalty=0.0, **more):
    said = scores(given, penalty, **more)
    return prepare_rewarded(config(algorithm, *overrides))(rollout(), said)


def test_advantages_are_those_of_the_groups_and_padding_has_none():
    batch, told = prepared("grpo")
    expected = group_advantages(rewards(), rollout().group_ids)
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    assert (batch.advantages[GROUPS * G :] == 0).all() and told["policy/degenerate_groups"] == 1
    plain, _ = prepared("dr_grpo")
    by_hand = np.array([0, 1, 3]) - 4 / 3
    np.testing.assert_allclose(plain.advantages[:G], by_hand, atol=1e-6)
    same, _ = prepared("grpo", "policy.scale_by_std=false")
    np.testing.assert_array_equal(same.advantages, plain.advantages)


def test_rewards_that_are_normalised_each_by_itself():
    """The report's rewards with the config's weights, and the penalties as rewards of their own."""
    functions = ["reward.functions=[exact, math]", "reward.weights=[2, 1]"]
    asked = [*functions, "policy.reward_combination=normalize_then_sum"]
    draw, none = np.random.default_rng(8), np.isnan(rewards())
    each = {"exact": rewards(), "math": np.where(none, np.nan, draw.normal(size=rows()))}
    overlong = {"overlong": np.where(none, np.nan, draw.uniform(-1, 0, rows()))}
    task = 2 * each["exact"] + each["math"]

    def batch(total, per_reward, *overrides):
        report = RewardReport(total, task, per_reward, {}, (), weights=weights)
        made = prepare_rewarded(config("grpo", *asked, *overrides))
        return made(rollout(), {"reward": [report]})

    ids, weights = rollout().group_ids, {"exact": 2, "math": 1}
    got, told = batch(task, each)
    summed = decoupled_rewards(each, weights, task, ids)
    np.testing.assert_allclose(got.advantages, normalise_batch(summed), rtol=1e-5, atol=1e-6)
    assert told["policy/degenerate_groups"] == 0  # math differs where exact does not
    keys = ["reward.overlong_buffer=4", "reward.overlong_penalty=0.5"]
    longer, _ = batch(task + 0.5 * overlong["overlong"], each | overlong, *keys)
    summed = decoupled_rewards(each | overlong, weights | {"overlong": 0.5}, task, ids)
    np.testing.assert_allclose(longer.advantages, normalise_batch(summed), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        ["policy.advantages=similarity", "grouper.model=x"],
        ["environment.name=guess_number", "environment.credit=turn"],
    ],
)
def test_rewards_are_compared_in_one_way_only(other):
    with pytest.raises(UserError, match="normalize_then_sum .* both decide"):
        config("grpo", "policy.reward_combination=normalize_then_sum", *other)


def test_a_completion_without_a_reward_is_in_no_statistic():
    given = rewards().copy()
    given[1] = np.nan
    batch, _ = prepared("dr_grpo", given=given)
    np.testing.assert_allclose(batch.advantages[:G], [-1.5, 0, 1.5], atol=1e-6)


@pytest.mark.parametrize("how", ["off", "drop"])
def test_groups_are_selected_on_the_task_reward(how):
    """A group that differs only in its penalties teaches no task; a group whose penalties hide the
    differences of its task does."""
    task, penalty = rewards(), np.zeros(rows())
    penalty[DEGENERATE * G : DEGENERATE * G + G] = (0, 0.5, 1)
    penalty[:G] = task[:G]  # every total of the first group is 0
    asked = ["policy.reward_kl_coef=0.5", f"policy.dynamic_sampling={how}"]
    reference = np.random.default_rng(5).normal(-2, 1, rollout().logprobs.shape)
    said = {"penalty": penalty, "reference": [reference.astype(np.float32)]}
    batch, told = prepared("grpo", *asked, **said)
    plain, without = prepared("grpo", f"policy.dynamic_sampling={how}")
    np.testing.assert_array_equal(batch.sequences.loss_mask, plain.sequences.loss_mask)
    for name in ("policy/degenerate_groups", "policy/unscored_groups"):
        assert told[name] == without[name]
    assert told["policy/degenerate_groups"] == 1
    kept = np.asarray(batch.sequences.loss_mask).any(-1)
    assert kept[:G].all() and kept[DEGENERATE * G] == (how == "off")


def test_dropped_groups_train_nothing_and_the_others_as_before():
    off, _ = prepared("grpo")
    drop, told = prepared("grpo", "policy.dynamic_sampling=drop")
    np.testing.assert_array_equal(off.advantages, drop.advantages)
    for mask in (drop.sequences.loss_mask, drop.policy_mask):
        lost = np.flatnonzero(np.asarray(off.policy_mask).any(-1) & ~np.asarray(mask).any(-1))
        assert lost.tolist() == [*range(DEGENERATE * G, DEGENERATE * G + G)]
    assert told["policy/degenerate_groups"] == 1


def test_truncated_completions_are_compared_but_not_trained_on():
    kept, _ = prepared("grpo")
    masked, _ = prepared("grpo", "reward.truncated=mask")
    np.testing.assert_array_equal(kept.advantages, masked.advantages)
    cut = np.pad(
        [c.finish_reason == "length" for c in rollout().completions], (0, rows() - GROUPS * G)
    )
    assert cut.any() and not cut.all()
    whole = np.asarray(kept.policy_mask) & ~cut[:, None]
    for mask in (masked.sequences.loss_mask, masked.policy_mask):
        np.testing.assert_array_equal(mask, whole)


LEFT_OUT = ["policy.dynamic_sampling=drop", "reward.truncated=mask"]


@pytest.mark.parametrize("asked", LEFT_OUT)
def test_what_the_policy_loss_leaves_out_the_teacher_still_teaches(asked):
    """Two masks: that of the policy loss is as without a teacher, the other has every token."""
    alone, _ = prepared("grpo", asked)
    both, _ = prepared("grpo", asked, *TEACHER, teacher=[teacher_signal()])
    np.testing.assert_array_equal(both.policy_mask, alone.policy_mask)
    np.testing.assert_array_equal(both.sequences.loss_mask, rollout().sequences.loss_mask)
    assert np.asarray(both.policy_mask).sum() < np.asarray(both.sequences.loss_mask).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_of_a_completion_is_taken_off_its_reward(estimator):
    made = rollout()
    reference = made.logprobs + np.random.default_rng(5).normal(0, 0.3, made.logprobs.shape)
    reference = reference.astype(np.float32)
    asked = ["policy.reward_kl_coef=0.5", f"policy.reward_kl_estimator={estimator}"]
    batch, told = prepared("dr_grpo", *asked, reference=[reference])
    d = np.where(made.sequences.loss_mask, made.logprobs - reference, 0)
    penalty = (d if estimator == "k1" else np.expm1(-d) + d).sum(-1)
    expected = group_advantages(rewards() - 0.5 * penalty, made.group_ids, scale_by_std=False)
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-5)
    assert told["reward/kl"] == pytest.approx(penalty[: GROUPS * G].mean(), rel=1e-4)
    assert batch.ref_logprobs is None  # it is in the reward, not in the loss


@pytest.mark.parametrize("combined", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_a_kl_of_rounding_alone_teaches_nothing(combined, dtype, rounding):
    """Of a reference that is the policy, whose log-probs round otherwise."""
    made, same = rollout(), np.where(np.isnan(rewards()), np.nan, 0.0)
    asked = [f"policy.reward_combination={combined}", "policy.reward_kl_coef=0.1"]
    asked += [f"rollout.dtype={dtype}", "reference.dtype=float32"]
    draw = np.random.default_rng(6).normal(0, 1, made.logprobs.shape)
    for nats, taught in ((rounding, False), (0.3, True)):
        reference = (made.logprobs + nats * draw).astype(np.float32)
        report = RewardReport(same, same, {"exact": same}, {}, (), weights={"exact": 1})
        said = {"reward": [report], "reference": [reference]}
        batch, _ = prepare_rewarded(config("grpo", *asked))(made, said)
        assert batch.advantages.any() == taught


SIMILAR = ["policy.advantages=similarity", "grouper.model=a"]
ONE_CLUSTER = {"subgroup": 1, "blend": 1, "size_weight": 1, "distinct": 0.1, "smi": 1 / G, "mmr": 1}
"""What each use makes of the rewards of one cluster, given alpha 0 for size_weight and lambda 1 for
mmr."""


BY_DEFAULT = [*((name, "null") for name in REWARDED), ("grpo", "true"), ("grpo", "false")]


@pytest.mark.parametrize(
    ("algorithm", "scaled"),
    and_slow(
        BY_DEFAULT,
        [(name, x) for name in REWARDED for x in ("true", "false") if name != "grpo"],
    ),
)
def test_one_cluster_has_the_advantage_of_the_algorithm(algorithm, scaled):
    """Of rewards times a constant, for the uses that multiply them: it divides out where the
    algorithm divides by the std, and stays where it does not."""
    n, asked = GROUPS * G, [f"policy.scale_by_std={scaled}"]
    same = Embedded(np.eye(4, dtype=np.float32)[np.zeros(n, int)], ("x",) * n)
    settings = [*SIMILAR, *asked, "grouper.alpha=0", "grouper.mmr_lambda=1"]
    for use, factor in ONE_CLUSTER.items():
        group, _ = prepared(algorithm, *asked, given=rewards() * factor)
        for scope in ("cluster", "prompt"):
            more = [f"grouper.use={use}", f"grouper.std_scope={scope}"]
            batch, told = prepared(algorithm, *settings, *more, grouper=[same])
            np.testing.assert_allclose(batch.advantages, group.advantages, atol=1e-5)
            assert told["similarity/groups_per_prompt"] == 1 and batch.advantages.any()


def test_two_clusters_are_not_one_group():
    n, asked = GROUPS * G, SIMILAR
    group, _ = prepared("grpo")
    apart = np.zeros((n, 4), np.float32)
    apart[np.arange(n), np.arange(n) % 2] = 1
    batch, told = prepared("grpo", *asked, grouper=[Embedded(apart, ("x",) * n)])
    assert told["similarity/groups_per_prompt"] == 2
    assert differ(batch.advantages, group.advantages, by=0.1)


COMPARED = [
    *([f"policy.scale_by_std={scaled}"] for scaled in ("true", "false")),
    *(
        [*SIMILAR, f"grouper.use={use}", f"grouper.std_scope={scope}"]
        for use in ONE_CLUSTER
        for scope in ("cluster", "none")
    ),
    *(
        ["policy.reward_combination=normalize_then_sum", f"policy.scale_by_std={scaled}"]
        for scaled in ("true", "false")
    ),
]


@pytest.mark.parametrize("asked", COMPARED, ids=" ".join)
def test_dynamic_sampling_keeps_what_has_an_advantage(asked):
    """Of rewards that cancel when each is normalised (0), in sum (1) or not at all, and of clusters
    without differences inside (2)."""
    ids, n = rollout().group_ids, GROUPS * G
    first = np.array([[0, 0, 1], [0, 1, 3], [1, 1, 0], [2, 2, 2], [0, 0, 1]], float)
    second = np.array([[5, 5, 0], [3, 2, 0], [2, 2, 0], [2, 2, 2], [0, 1, 0]], float)
    each = {"exact": first.ravel(), "math": second.ravel()}
    each = {name: np.pad(x, (0, rows() - n), constant_values=np.nan) for name, x in each.items()}
    task = each["exact"] + each["math"]
    report = RewardReport(task, task, each, {}, (), weights=dict.fromkeys(each, 1))
    answers = np.tile([0, 0, 1], (GROUPS, 1))
    answers[DEGENERATE] = 0
    vectors = np.eye(2, dtype=np.float32)[answers.ravel()]
    embedded = Embedded(vectors, tuple("ab"[i] for i in answers.ravel()))
    said = {"reward": [report], "grouper": [embedded]}
    functions = ["reward.functions=[exact, math]", "policy.dynamic_sampling=drop"]
    batch, told = prepare_rewarded(config("grpo", *functions, *asked))(rollout(), said)
    taught = (batch.advantages[:n].reshape(GROUPS, G) != 0).any(-1)
    always = "grouper.use=mmr" in asked  # it rewards the one that it picks first
    assert taught.any() and taught.all() == always
    np.testing.assert_array_equal(batch.in_policy, np.isin(ids, np.flatnonzero(taught)))
    assert told["policy/degenerate_groups"] == GROUPS - taught.sum()


# Whole updates.


@cache
def start():
    return jax.device_get(random_params(MODEL))


def actor(cfg, mesh, tmp_path):
    head = 2 * np.random.default_rng(9).standard_normal((48, 24)).astype(np.float32)
    return Actor(
        cfg,
        MODEL,
        mesh,
        load=lambda dtype: jax.device_put(start(), param_shardings(MODEL, mesh)),
        vocab_size=48,
        frozen={"teacher_head": jax.device_put(head)},
        rollout_shardings=None,
        run_dir=tmp_path,
    )


@cache
def teacher_signal():
    hidden = np.random.default_rng(1).standard_normal((rows(), 8, 24)).astype(np.float32)
    return HiddenSignal(hidden=hidden)


@cache
def policy_logprobs():
    """Of the policy before training, as the reference tells them."""
    mesh = make_mesh(1, 1, 1)
    reference = Reference(config("grpo"), MODEL, jax.device_put(start()), mesh)
    return reference.score(rollout())


def everything(cfg):
    """What each role that the config needs says of the rollout."""
    said = {"teacher": [teacher_signal()], "reference": [policy_logprobs() + 0.1]}
    return scores() | {role: said[role] for role in said if role in needed_roles(cfg)}


def updated(tmp_path, cfg, shape=(1, 1, 1), given=None):
    one = actor(cfg, make_mesh(*shape), tmp_path)
    report = one.update(rollout(), given or everything(cfg), step=0).metrics
    return jax.device_get(one.state.params), report


def test_a_batch_in_parts_takes_the_steps_of_batches_of_these(tmp_path):
    """And reports what the whole batch would have."""
    plain = ["schedule=streaming", "reward.truncated=mask", "optimizer.lr_schedule=constant"]
    plain += ["policy.kl_coef=0.1", "policy.reward_kl_coef=0.1"]
    of_parts = config("gspo", *plain, f"batch_size={GROUPS}", f"actor.minibatches={GROUPS}")
    of_one = config("gspo", *plain, "batch_size=1", "actor.minibatches=1")
    assert (of_parts.parts, of_one.parts) == (GROUPS, 1)
    mesh = make_mesh(1, 1, 1)
    parts, ones = (actor(cfg, mesh, tmp_path) for cfg in (of_parts, of_one))
    prompts, groups = completions()
    (report,) = scores()["reward"]
    logprobs = policy_logprobs() + 0.1
    for i in range(GROUPS):
        own = prompts[i : i + 1], groups[i : i + 1]
        part = make_rollout(*own, policy_version=0, pad_id=0, row_multiple=8, **WIDTHS)
        rows, width = part.sequences.loss_mask.shape
        said = {
            "reward": [cut_report(report, i * G, (i + 1) * G, rows)],
            "reference": [np.pad(logprobs[i * G : (i + 1) * G, :width], ((0, rows - G), (0, 0)))],
        }
        whole = rollout() if i == GROUPS - 1 else None
        trained = parts.update(part, said, step=0, part=i, whole=whole)
        assert (trained is None) == (whole is None) and parts.version == (whole is not None)
        ones.update(part, said, step=i)
    state, expected = (jax.device_get(one.state) for one in (parts, ones))
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    batch, told = prepare_rewarded(of_parts)(rollout(), scores(reference=[logprobs]))
    assert told.items() <= trained.metrics.items()
    made = trained.metrics["optimizer_step"] + trained.metrics["actor/empty_updates"]
    assert made == GROUPS > trained.metrics["optimizer_step"]
    np.testing.assert_array_equal(trained.advantages, batch.advantages)
    np.testing.assert_array_equal(trained.learned, batch.sequences.loss_mask.sum(-1))


def test_parts_have_the_advantages_of_the_whole_batch():
    """Whatever is not said to need the whole batch: of every algorithm that learns from rewards."""
    prompts, groups = completions()
    (report,) = scores()["reward"]
    asked, checked = [f"batch_size={GROUPS}", f"actor.minibatches={GROUPS}"], 0
    for algorithm, more in product(ALGORITHMS, ([], *([key] for key in WHOLE_OR_NOT))):
        if ALGORITHMS[algorithm].learns_from != "rewards":
            continue
        cfg = config(algorithm, "schedule=streaming", *asked, *more)
        if cfg.parts == 1:
            assert cfg.waits_for_batch
            continue
        prepare, checked = prepare_rewarded(cfg), checked + 1
        whole = prepare(rollout(), scores())[0].advantages
        for i in range(GROUPS):
            own = prompts[i : i + 1], groups[i : i + 1]
            part = make_rollout(*own, policy_version=0, pad_id=0, row_multiple=8, **WIDTHS)
            cut = cut_report(report, i * G, (i + 1) * G, len(part.group_ids))
            found = prepare(part, {"reward": [cut]})[0].advantages
            np.testing.assert_array_equal(found[:G], whole[i * G : (i + 1) * G])
    assert checked > 10


WHOLE_OR_NOT = (
    "policy.scale_by_std=true",
    "policy.scale_by_std=false",
    "policy.reward_combination=normalize_then_sum",
    "policy.dynamic_sampling=drop",
    "reward.truncated=mask",
)


def test_what_parts_say_is_joined_whatever_their_widths():
    """Rows of padding are cut from each part, and follow the last one."""
    draw, whole = np.random.default_rng(0), rollout()
    rows, width = whole.sequences.loss_mask.shape
    values = draw.normal(size=(rows, width)).astype(np.float32)
    values[GROUPS * G :] = 0
    parts = []
    for i in range(GROUPS):
        own = values[i * G : (i + 1) * G].copy()
        own[:, width - i :] = values[i * G : (i + 1) * G, width - i :] = 0
        parts.append(np.pad(own[:, : width - i], ((0, i), (0, 0)), constant_values=9))
    joined = join_values([TokenValues(x, x, None) for x in parts], G, whole)
    np.testing.assert_array_equal(joined.logprobs, values)
    np.testing.assert_array_equal(joined.entropy, values)
    assert joined.divergence is None
    taught = join_values([TokenValues(x, x, x) for x in parts], G, whole)
    np.testing.assert_array_equal(taught.divergence, values)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("policy.dynamic_sampling=drop", "dynamic_sampling"),
        ("policy.reward_combination=normalize_then_sum", "reward_combination"),
        ("actor.epochs_per_batch=2", "epochs_per_batch"),
        ("batch_size=7", "do not divide"),
        ("schedule=serial", None),
    ],
)
def test_what_needs_the_whole_batch_waits_for_it(key, why):
    asked = ["schedule=streaming", "batch_size=8", "actor.minibatches=4"]
    assert config("gspo", *asked).parts == 4
    cfg = config("gspo", *asked, key)
    assert cfg.parts == 1
    assert why is None or why in cfg.waits_for_batch


CUT = [*ALL_TERMS, *LEFT_OUT, "optimizer.name=sgd", "optimizer.learning_rate=1"]
MORE_CUTS = [
    ("gspo", [(1, 8, 1, None), (1, 1, 1, 14)]),
    ("grpo", [(1, 1, 1, 14), (1, 1, 1, 56), (1, 2, 1, 28)]),
    ("dapo", [(1, 1, 1, 28), (2, 2, 2, 28)]),
]
"""Algorithm, and how its update is cut: the mesh, and the tokens of a micro-batch."""


@pytest.mark.parametrize(
    ("algorithm", "cuts"),
    and_slow([("both", [(1, 2, 1, 28)])], [("gspo", [(1, 2, 1, 28)]), *MORE_CUTS]),
)
def test_neither_micro_batches_nor_devices_change_an_update(algorithm, cuts, tmp_path):
    """Every term is divided by its own count over the whole update, wherever its rows are. The
    step is SGD's: Adam's divides a rounded gradient by one that may be as small as its error.

    By default of PARTS["both"], whose whole update others have, and in which completions share
    their prompt, as those of a micro-batch do not; by the name of an algorithm, of four updates
    after a pass that tells the log-probs before them.
    """
    asked = [algorithm, *CUT]
    if algorithm == "both":
        asked = ["grpo", *PARTS["both"]]
    whole, told = updated(tmp_path, config(*asked, "actor.micro_batch_tokens=null"))
    assert differ(whole, start(), by=1e-3)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), whole, start())
    tokens = rollout().sequences.tokens
    passed = 4 * MODEL.d_model + MODEL.d_ff + MODEL.vocab_size + tokens.shape[1]  # by one token
    limit = tolerance(jnp.float32, tokens.size + 2 * passed, max(jax.tree.leaves(moved)))
    for *shape, budget in cuts:
        size = "null" if budget is None else budget
        cfg = config(*asked, f"actor.micro_batch_tokens={size}")
        params, again = updated(tmp_path, cfg, shape)
        assert_close(params, whole, limit)
        for name in ("loss", "policy/kl_k3", "policy/entropy", "distill/divergence"):
            assert again[name] == pytest.approx(told[name], rel=2e-4, abs=1e-6), name


JOINT = [*LEFT_OUT, "policy.kl_coef=0.3", "policy.entropy_coef=0.2", "actor.minibatches=1"]
JOINT += ["policy.aggregation=token_mean", "policy.scale_by_std=false"]
JOINT += ["actor.micro_batch_tokens=null"]
PARTS = {
    "policy": JOINT,
    "teacher": [
        *(*JOINT, "policy_weight=0", "policy.kl_coef=0", "policy.entropy_coef=0", *TEACHER),
    ],
    "both": [*JOINT, *TEACHER],
}
"""A joint update, and each of its halves: one update, whose masks differ."""


@pytest.fixture(scope="module")
def part(tmp_path_factory):
    """Of one of PARTS, how far its update moves the parameters, and what it tells."""

    @cache
    def get(name):
        params, told = updated(tmp_path_factory.mktemp(name), config("grpo", *PARTS[name]))
        return minus(params, start()), told

    return get


def test_the_loss_of_a_row_is_the_sum_of_its_terms(part):
    """Each over its own mask, and divided by its own count. At one update, where a clipped
    objective's value is minus the mean advantage."""
    cfg, told = config("grpo", *PARTS["both"]), part("both")[1]
    batch, _ = prepare_rewarded(cfg)(rollout(), everything(cfg))
    mask = np.asarray(batch.policy_mask)
    policy = -(mask * batch.advantages[:, None]).sum() / mask.sum()
    assert abs(policy) > 1e-2 and mask.sum() < told["actor/tokens"]
    assert told["actor/tokens"] == rollout().sequences.loss_mask.sum()
    more = 0.7 * told["distill/divergence"] + 0.3 * told["policy/kl_k3"]
    assert told["loss"] == pytest.approx(policy + more - 0.2 * told["policy/entropy"], rel=1e-4)


def test_without_the_policy_loss_what_is_left_is_the_loss_of_gkd():
    hidden, kernel, batch, _ = arrays()
    (total, _), slopes = jax.device_get(value_and_gradient_of("gkd")(hidden, kernel, batch))
    (mean, _), found = evaluated("gspo", "policy_weight=0", *TEACHER)
    count = batch.sequences.loss_mask.sum()
    assert mean == pytest.approx(0.7 * total / count, rel=1e-6)
    assert_close(found, slopes, 1e-6, scale=0.7 / count)


@pytest.mark.slow
def test_without_the_policy_loss_what_is_left_is_distillation(part, tmp_path):
    alone = config("gkd", "teacher.model=a", "reward.functions=[]")
    params, report = updated(tmp_path, alone, given={"teacher": [teacher_signal()]})
    moved, told = part("teacher")
    assert_close(moved, minus(params, start()), 1e-6, scale=0.7)
    assert told["distill/divergence"] == pytest.approx(report["distill/divergence"], rel=1e-6)


def test_a_reference_that_is_the_policy_is_at_no_distance(tmp_path):
    """In the first update, on one mesh."""
    given = scores(reference=[policy_logprobs()], teacher=[teacher_signal()])
    _, told = updated(tmp_path, config("grpo", *PARTS["both"]), given=given)
    assert told["policy/kl_k1"] == pytest.approx(0, abs=1e-7)
    assert told["policy/kl_k3"] == pytest.approx(0, abs=1e-12)


def test_the_pass_before_the_batch_tells_the_policy_s_log_probs(tmp_path):
    """Whatever the order of its micro-batches; and with them the first of four ratios is 1."""
    cfg = config("gspo", *CUT, "actor.micro_batch_tokens=28")
    one = actor(cfg, make_mesh(1, 2, 1), tmp_path)
    batch, _ = one._prepare(rollout(), everything(cfg))
    mask = np.asarray(batch.policy_mask)
    lengths = np.where(mask.any(-1), np.asarray(batch.sequences.mask).sum(-1), 0)
    placed = jax.device_put(batch, one.programs.row_sharding)
    old = one._with_old_logprobs(placed, batch.sequences, lengths, GROUPS * G).old_logprobs
    expected = np.asarray(policy_logprobs())  # of a reference, on one device
    np.testing.assert_allclose(np.asarray(old)[mask], expected[mask], atol=1e-5)


def with_degenerate(count):
    """Rewards of which the first so many groups have no differences."""
    values = np.tile(np.arange(G, dtype=float), GROUPS)
    values[: count * G] = 1
    return np.concatenate([values, np.full(rows() - GROUPS * G, np.nan)])


ONE_UPDATE = ("actor.minibatches=1", "reward.overlong_buffer=0")


@pytest.mark.slow
def test_dropped_groups_change_the_denominator_only(tmp_path):
    """The sum of the gradients is the same; dapo counts tokens. In the default suite the updates of
    PARTS drop a group, and are compared with the mean over the tokens that are left."""
    steps = {}
    for asked in ("off", "drop"):
        cfg = config("dapo", f"policy.dynamic_sampling={asked}", *ONE_UPDATE)
        given = scores(with_degenerate(GROUPS - 1))
        params, told = updated(tmp_path, cfg, given=given)
        moved = minus(params, start())
        steps[asked] = moved, told["actor/tokens"]
    (off, all_tokens), (drop, fewer) = steps["off"], steps["drop"]
    assert fewer < all_tokens and differ(off, zeros_like(off), by=1e-3)
    assert_close(off, drop, 1e-6, scale=fewer / all_tokens)


@pytest.mark.slow
def test_each_loss_has_its_own_mask_and_its_own_count(part):
    """The move of a joint update is that of the policy loss without a teacher plus that of the
    teacher without a policy loss. In the default suite it is so in value."""
    parts = {name: part(name) for name in PARTS}
    moves = {name: moved for name, (moved, _) in parts.items()}
    tokens = rollout().sequences.loss_mask.sum()
    for name, (_, told) in parts.items():
        assert (told["actor/tokens"] == tokens) == (name != "policy")
    summed = jax.tree.map(np.add, moves["policy"], moves["teacher"])
    assert_close(moves["both"], summed, 1e-6)
    assert differ(moves["both"], moves["teacher"], by=1e-4)


def seen_by_updates(one):
    """The rows of each update of an actor, [n, b], -1 where there is none, and what else a program
    is compiled for. Nothing is computed: which rows are is decided before."""
    seen, nothing = [], SimpleNamespace(memory_analysis=lambda: None)

    def update(state, frozen, batch, index, *sizes):
        seen.append((np.asarray(index), sizes))
        last = {"finite": True, "trains": True, "grad_norm": 0.0}
        return state, ({"loss": (0.0, 1.0)}, {}, {}, last)

    def old(params, batch, *_):
        return jnp.zeros(batch.sequences.loss_mask.shape)

    for program in (update, old):
        program.lower = lambda *_: SimpleNamespace(compile=lambda: nothing)
    one.programs, one._finish = copy(one.programs), lambda *_: {}
    one.programs.update, one.programs.old = update, old
    return seen


def test_dropped_rows_are_not_computed_and_few_programs_are_compiled(tmp_path, monkeypatch):
    """15 rows of five groups, computed one by one: 12 and 9 of them are both padded to 12."""
    monkeypatch.setattr("jaxrl.roles.actor.shared_group", lambda *_: 1)
    one = actor(config("grpo", LEFT_OUT[0]), make_mesh(1, 1, 1), tmp_path)
    seen, programs = seen_by_updates(one), set()
    for step, dropped in enumerate((0, 1, 2, 1)):
        one.update(rollout(), scores(with_degenerate(dropped)), step=step)
        index, sizes = seen.pop()
        programs.add((index.shape, *sizes))
        assert not seen and index[index >= 0].tolist() == [*range(dropped * G, GROUPS * G)]
        assert index.size == (15, 12, 12)[dropped]
    assert len(programs) <= 3  # of two shapes, and of the room for their tokens


@pytest.mark.parametrize("teacher", and_slow([True], [False]))
def test_minibatches_have_equal_signal_whatever_is_dropped(teacher, tmp_path):
    """Rows of the policy loss, and rows in all; no row trains twice."""
    asked = [LEFT_OUT[0], "actor.minibatches=3", *(TEACHER if teacher else [])]
    cfg = config("gspo", *asked)
    one = actor(cfg, make_mesh(1, 1, 1), tmp_path)
    seen = seen_by_updates(one)
    given = scores(with_degenerate(2), teacher=[teacher_signal()])
    one.update(rollout(), given, step=0)
    parts = [index[index >= 0] for index, _ in seen]
    signal = [int((part >= 2 * G).sum()) for part in parts]
    assert signal == [3, 3, 3] and len({(index.shape, *sizes) for index, sizes in seen}) == 1
    assert [len(part) for part in parts] == ([5, 5, 5] if teacher else signal)
    first = 0 if teacher else 2 * G
    assert sorted(np.concatenate(parts).tolist()) == [*range(first, GROUPS * G)]


def test_a_batch_that_teaches_nothing_has_no_gradient():
    """All groups dropped: no token trains, no count is divided by."""
    same = np.where(np.isnan(rewards()), np.nan, 1.0)
    made, _ = prepared("dapo", "policy.dynamic_sampling=drop", given=same)
    assert not np.any(made.sequences.loss_mask) and not np.any(made.policy_mask)
    *_, batch, _ = arrays()
    none = np.zeros_like(batch.sequences.loss_mask)
    empty = replace(batch, sequences=replace(batch.sequences, loss_mask=none))
    for algorithm in ("dapo", "gspo"):
        (total, _), slopes = evaluated(algorithm, batch=empty)
        assert total == 0
        assert_close(slopes, zeros_like(slopes), 0)


@pytest.mark.slow
def test_a_batch_that_teaches_nothing_changes_nothing(tmp_path):
    """In the default suite an empty update is one of distillation, in test_actor.py."""
    cfg = config("dapo", "policy.dynamic_sampling=drop", *ONE_UPDATE)
    same = np.where(np.isnan(rewards()), np.nan, 1.0)
    params, told = updated(tmp_path, cfg, given=scores(same))
    assert_close(params, start(), 0)
    assert told["actor/tokens"] == 0 and told["loss"] == 0 and told["actor/skipped_updates"] == 0
    assert told["actor/empty_updates"] > 0 and told["optimizer_step"] == 0
    assert all(np.isfinite(value) for value in told.values())


# Which rows form an update.


def minibatches_of(one, given, monkeypatch):
    """The rows of each update of a batch, in the order of the updates; rows that share a prompt."""
    seen, groups, cut = [], set(), one.programs.micro_batches

    def spied(rows, lengths, sequences, group, *more):
        index = cut(rows, lengths, sequences, group, *more)
        seen.append(frozenset(index[index >= 0].tolist()))
        groups.add(group)
        return index

    monkeypatch.setattr(one.programs, "micro_batches", spied)
    report = one.update(*given, step=0)
    return seen[1:], groups, report.metrics  # the first is the pass before the batch


@cache
def two_widths():
    """The same 6 prompts with 4 completions each, with prompts of at most 64 and 512 tokens."""
    draw = np.random.default_rng(11)
    rows = [draw.integers(2, 48, n).tolist() for n in draw.integers(1, 8, 24)]
    logprobs = [draw.uniform(-3, -1, len(row)).astype(np.float32) for row in rows]
    done = [Completion(tuple(r), x, x, "stop") for r, x in zip(rows, logprobs, strict=True)]
    prompts = [Prompt(i, tuple(draw.integers(2, 48, 50).tolist()), "p") for i in range(6)]
    groups = [done[4 * i : 4 * i + 4] for i in range(6)]
    options = {"policy_version": 0, "pad_id": 0, "row_multiple": 8, "max_new_tokens": 8}
    narrow = make_rollout(prompts, groups, max_prompt_tokens=64, **options)
    extra = 448 - narrow.sequences.tokens.shape[1]
    padded = [
        np.pad(x, ((0, 0), (extra, 0))) for x in (narrow.sequences.tokens, narrow.sequences.mask)
    ]
    wide = replace(narrow, sequences=Sequences(*padded, narrow.sequences.loss_mask))
    given = np.random.default_rng(12).integers(0, 4, len(narrow.group_ids)).astype(float)
    given[narrow.group_ids < 0] = np.nan
    return narrow, wide, scores(given)


def updates_in_two_ways(minibatches, other, tmp_path, monkeypatch, computed):
    """Of the whole batch and of `other`: the rows of each update, the groups, the report, and the
    actor. Without `computed` the rows alone are told."""
    narrow, wide, given = two_widths()
    width = narrow.sequences.tokens.shape[1] - 8 + 4 * 8  # of a prompt with its completions
    cases = {"whole": (narrow, "null"), "fits": (narrow, width), "wide, cut": (wide, 447)}
    for name in ("whole", other):
        rollout, budget = cases[name]
        sizes = ("batch_size=6", "group_size=4", f"actor.minibatches={minibatches}")
        cfg = config("gspo", *sizes, "actor.dtype=float32", f"actor.micro_batch_tokens={budget}")
        one = actor(cfg, make_mesh(1, 1, 1), tmp_path)
        if not computed:
            seen_by_updates(one)
        yield *minibatches_of(one, (rollout, given), monkeypatch), one


@pytest.mark.parametrize("minibatches", [3, 4])
@pytest.mark.parametrize("other", ["fits", "wide, cut"])
def test_the_rows_of_an_update_depend_on_neither_memory_nor_width(
    minibatches, other, tmp_path, monkeypatch
):
    """Whether completions share their prompt's computation is a matter of memory and speed."""
    (rows, groups, *_), (again, others, *_) = updates_in_two_ways(
        minibatches, other, tmp_path, monkeypatch, computed=False
    )
    assert len(rows) == minibatches and sorted(i for part in rows for i in part) == [*range(24)]
    if minibatches == 3:  # of whole prompts, which may share
        assert all(len({i // 4 for i in part}) == 2 for part in rows)
        assert groups == {4} and (others == {4}) == (other == "fits")
    assert again == rows


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [3, 4])
@pytest.mark.parametrize("other", ["fits", "wide, cut"])
def test_updates_depend_on_neither_memory_nor_width(minibatches, other, tmp_path, monkeypatch):
    """In the default suite, of an update whose completions share their prompt and of one cut into
    micro-batches too small for that."""
    both = updates_in_two_ways(minibatches, other, tmp_path, monkeypatch, computed=True)
    (rows, _, told, whole), (again, _, metrics, cut) = both
    assert again == rows
    assert_close(*(jax.device_get(one.state.params) for one in (cut, whole)), 2e-6)
    assert metrics["loss"] == pytest.approx(told["loss"], rel=1e-4, abs=1e-6)


def test_roles_follow_the_config():
    assert needed_roles(config("grpo")) == ("actor", "rollout", "reward")
    asked = [*ALL_TERMS, "policy.advantages=similarity", "grouper.model=a"]
    expected = ("actor", "rollout", "teacher", "reference", "reward", "grouper")
    assert needed_roles(config("grpo", *asked)) == expected
    in_reward = config("grpo", "policy.reward_kl_coef=1")
    assert needed_roles(in_reward) == ("actor", "rollout", "reference", "reward")


SAMPLED = ["distill.signal=sampled", "distill.jsd_beta=1"]
POISONED = {
    "policy": ("gspo", *ALL_TERMS),
    "policy, by tokens": ("dapo", *TEACHER, *SAMPLED, "policy.opd_coef=0.5"),
    "gkd": ("gkd", "reward.functions=[]", "teacher.model=a"),
    "gkd, lean": ("gkd", "reward.functions=[]", "teacher.model=a", "distill.lean=true"),
    "gkd, sampled": ("gkd", "reward.functions=[]", "teacher.model=a", *SAMPLED),
    "sft": ("sft", "reward.functions=[]"),
}


@cache
def value_and_gradient_of(case):
    """Of a loss of POISONED: ((total, sums), gradients) of hidden states, head and micro-batch."""
    algorithm, *asked = POISONED[case]
    mask, teacher_head = arrays()[2].sequences.loss_mask, arrays()[-1]
    cfg = config(algorithm, *asked)
    loss = method_of(cfg).make_loss(cfg, MODEL, make_mesh(1, 1, 1), V)

    def mean(hidden, kernel, batch):
        tokens, sequences = (x.sum(dtype=jnp.float32) for x in (mask, mask.any(-1)))
        totals = Totals(tokens, tokens, sequences)
        params = {"lm_head": {"kernel": kernel}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "jaxrl.algorithms.signals.completion_hidden",
                lambda model, params, packing, *_, **__: packing.completions.pack(hidden),
            )
            (total, _), sums, _ = loss(params, {"teacher_head": teacher_head}, batch, totals)
        return total, sums

    return jax.jit(jax.value_and_grad(mean, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("case", POISONED)
def test_masked_positions_may_hold_anything(case):
    """Value and gradient are finite, and those of zeros there: of every array of that width."""
    hidden, kernel, batch, _ = arrays()
    batch = sampled_batch() if "distill.signal=sampled" in POISONED[case] else batch
    mask = batch.sequences.loss_mask
    assert not mask.all()

    def fill(x, value):
        wide = x.shape[:2] == mask.shape and x.dtype == jnp.float32
        if not wide:
            return x
        return np.where(np.reshape(mask, (*mask.shape, *[1] * (x.ndim - 2))), x, np.float32(value))

    value_and_grad = value_and_gradient_of(case)

    def filled(value):
        rows, rest = jax.tree.map(lambda x: fill(x, value), (hidden, batch))
        return value_and_grad(rows, kernel, rest)

    expected = filled(0.0)
    for junk in (np.nan, np.inf):
        found = filled(junk)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
        assert_close(found, expected, 0)
    assert differ(expected[1], zeros_like(expected[1]), by=1e-3)
