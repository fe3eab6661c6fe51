"""Policy losses: by hand, against torch in float64, and the laws that tie them together."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.losses.algorithm_table import ALGORITHMS, PolicyLoss
from jaxrl.losses.policy import (
    AGGREGATIONS,
    RATIOS,
    Clipped,
    Objective,
    SumOverConstant,
    TermOutput,
    entropy_term,
    make_objective,
    policy_loss,
    ratio_notes,
    sequence_mean_token_mean,
    token_mean,
)

REFERENCES = np.load(Path(__file__).parent.parent / "references" / "policy.npz")
SETTINGS = {"dr_grpo": {"constant": 6.0}, "cispo": {"ratio_cap": 1.2}}
"""Those of the references that are no defaults."""
OWN = {name: spec.loss for name, spec in ALGORITHMS.items() if spec.loss is not None}


def loss_named(name, *batch, weights=None, **settings):
    """The policy loss of an algorithm, with some of its own settings changed."""
    return policy_loss(make_objective(OWN[name], **settings), *batch, weights)


LOSSES = {name: partial(loss_named, name) for name in OWN}
SEQUENCE_ONLY = {name for name, loss in OWN.items() if loss.ratio == "sequence"}


def case(name="far", loss="grpo"):
    """logprobs, old_logprobs, advantages, mask, in float64."""
    which = "token_advantages" if loss == "gspo_token" else "advantages"
    return [REFERENCES[f"{name}/{key}"] for key in ("logprobs", "old_logprobs", which, "mask")]


def value_and_gradient(loss, logprobs, *rest, **settings):
    def total(lp):
        value, count, metrics = loss(lp, *rest, **settings)
        return value, (count, metrics)

    (value, (count, metrics)), gradient = jax.value_and_grad(total, has_aux=True)(
        jnp.asarray(logprobs)
    )
    return value, count, gradient, metrics


def on_canvas(x, shape=(7, 6), left=0, fill=0.0):
    """The rows at the top of a larger array, `left` columns from its edge; the rest is `fill`.

    Tests with few tokens use the shape of the references, so that little is compiled.
    """
    x = np.asarray(x)
    widths = [(0, shape[0] - x.shape[0])]
    if x.ndim == 2:
        widths.append((left, shape[1] - left - x.shape[1]))
    return np.pad(x, widths, constant_values=fill)


def by_hand(name, log_ratios, advantages, **settings):
    """Value, count, gradient [rows, tokens], metrics, where all log-probs are -1."""
    log_ratios = np.asarray(log_ratios, np.float32)
    lp = np.full(log_ratios.shape, -1.0, np.float32)
    x = on_canvas(lp), on_canvas(lp - log_ratios), on_canvas(np.asarray(advantages, np.float32))
    mask = on_canvas(np.ones(log_ratios.shape, bool), fill=False)
    value, count, gradient, metrics = value_and_gradient(LOSSES[name], *x, mask, **settings)
    rows, width = log_ratios.shape
    return value, count, gradient[:rows, :width], metrics


def one_token(log_ratio, advantage, name, **settings):
    """Value, gradient and metrics of a single token."""
    value, _, gradient, metrics = by_hand(name, [[log_ratio]], [advantage], **settings)
    return float(value), float(gradient[0, 0]), metrics


@pytest.mark.parametrize(
    ("spread", "weighted"),
    and_slow([("far", "weighted"), ("near", "plain")], [("far", "plain"), ("near", "weighted")]),
)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_torch_in_float64(name, spread, weighted):
    key = f"{spread}/{name}/{weighted}"
    expected, count = REFERENCES[f"{key}/value"]
    settings = SETTINGS.get(name, {})
    if weighted == "weighted":
        settings = settings | {"weights": REFERENCES[f"{spread}/weights"]}
    with jax.enable_x64(True):
        value, n, gradient, _ = value_and_gradient(LOSSES[name], *case(spread, name), **settings)
        assert n == count
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, REFERENCES[f"{key}/gradient"], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("name", ["grpo", "sapo", "cispo", "gmpo"])
def test_float32_is_enough(name):
    x = [np.asarray(a, np.float32 if a.dtype == np.float64 else None) for a in case("far", name)]
    value, _, gradient, _ = value_and_gradient(LOSSES[name], *x, **SETTINGS.get(name, {}))
    key = f"far/{name}/plain"
    assert value.dtype == gradient.dtype == jnp.float32
    np.testing.assert_allclose(value, REFERENCES[f"{key}/value"][0], rtol=1e-5)
    np.testing.assert_allclose(gradient, REFERENCES[f"{key}/gradient"], atol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value", "gradient"),
    [
        # log 1.5 is above both bounds, log 0.5 below both.
        (np.log(1.5), 2.0, -2 * 1.2, 0),  # A > 0, r above: held at 1.2, no gradient
        (np.log(0.5), -2.0, 2 * 0.8, 0),  # A < 0, r below: held at 0.8, no gradient
        (np.log(1.5), -2.0, 2 * 1.5, 2 * 1.5),  # A < 0, r above: pushed back
        (np.log(0.5), 2.0, -2 * 0.5, -2 * 0.5),  # A > 0, r below: pushed back
        (np.log(1.1), 2.0, -2 * 1.1, -2 * 1.1),  # inside
    ],
)
def test_clip_directions_by_hand(log_ratio, advantage, value, gradient):
    """Descent raises the log-prob where A > 0 and lowers it where A < 0, or stays."""
    got = one_token(log_ratio, advantage, "grpo")
    np.testing.assert_allclose(got[:2], (value, gradient), rtol=1e-5)
    assert got[2]["clip_fraction"] == (float(gradient == 0), 1)


def test_clip_higher_by_hand():
    """DAPO: r = 1.25 is inside [0.8, 1.28] and outside [0.8, 1.2]."""
    assert one_token(np.log(1.25), 1.0, "grpo")[1] == 0
    np.testing.assert_allclose(one_token(np.log(1.25), 1.0, "dapo")[:2], -1.25, rtol=1e-5)
    np.testing.assert_allclose(one_token(np.log(1.3), 1.0, "dapo")[:2], (-1.28, 0), rtol=1e-5)


def test_gspo_by_hand():
    """Log-ratios (0.1, -0.04): s = exp(0.03), above 1 + 0.02 and inside 1 + 0.04."""
    s, ratios = np.exp(0.03), [[0.1, -0.04]]
    value, count, gradient, metrics = by_hand("gspo", ratios, [1], clip_low=0.02, clip_high=0.04)
    np.testing.assert_allclose(value, -s, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-s / 2, -s / 2]], rtol=1e-6)
    assert count == 1 and metrics["clip_fraction"] == (0, 2)
    value, _, gradient, metrics = by_hand("gspo", ratios, [1], clip_low=0.02, clip_high=0.02)
    np.testing.assert_allclose(value, -1.02, rtol=1e-6)
    np.testing.assert_array_equal(gradient, 0)
    assert metrics["clip_fraction"] == (2, 2) and metrics["clip_fraction_sequences"] == (1, 1)
    np.testing.assert_allclose(by_hand("gspo", ratios, [-1])[0], s, rtol=1e-6)  # not from above


def test_cispo_by_hand():
    """The cap is on r itself, takes no gradient away, and its weight carries none."""
    for log_ratio, weight in ((np.log(8.0), 5.0), (np.log(3.0), 3.0), (-20.0, np.exp(-20.0))):
        for advantage in (1.5, -1.5):
            value, gradient, _ = one_token(log_ratio, advantage, "cispo")
            np.testing.assert_allclose(gradient, -weight * advantage, rtol=1e-5)
            np.testing.assert_allclose(value, weight * advantage, rtol=1e-5)  # log pi is -1
    assert one_token(np.log(8.0), 1.0, "cispo")[2]["clip_high_fraction"] == (1, 1)
    np.testing.assert_allclose(one_token(np.log(8.0), 1.0, "cispo", ratio_cap=2.0)[1], -2, 1e-5)


def test_sapo_by_hand():
    """r = 2: sigmoid(1) 4 A where A > 0; sigmoid(1.05) (4 / 1.05) A elsewhere."""
    sigmoid = 1 / (1 + np.exp(-np.array([1.0, 1.05])))
    np.testing.assert_allclose(one_token(np.log(2.0), 3.0, "sapo")[0], -12 * sigmoid[0], rtol=1e-5)
    value, gradient, _ = one_token(np.log(2.0), -3.0, "sapo")
    np.testing.assert_allclose(value, 12 / 1.05 * sigmoid[1], rtol=1e-5)
    slope = sigmoid[1] * (1 - sigmoid[1]) * 4 * 2  # d sigmoid(tau (r-1)) / d log r
    np.testing.assert_allclose(gradient, 3 * slope, rtol=1e-5)


def test_gmpo_by_hand():
    """Log-ratios (1, -1), clipped at 0.4: the first where A > 0, the second where A < 0."""
    value, _, gradient, metrics = by_hand("gmpo", [[1, -1]], [2])
    np.testing.assert_allclose(value, -2 * np.exp((0.4 - 1) / 2), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0, -np.exp(-0.3)]], rtol=1e-6)
    assert metrics["clip_high_fraction"] == (1, 2) and metrics["clip_low_fraction"] == (0, 2)
    value, _, gradient, metrics = by_hand("gmpo", [[1, -1]], [-2])
    np.testing.assert_allclose(value, 2 * np.exp((1 - 0.4) / 2), rtol=1e-6)
    np.testing.assert_allclose(gradient, [[np.exp(0.3), 0]], rtol=1e-6)
    assert metrics["clip_low_fraction"] == (1, 2)


def test_aggregations_by_hand():
    """Rows of one and of three tokens, and one that trains nothing."""
    values = jnp.array([[4.0, 9, 9], [1, 2, 6], [9, 9, 9]])
    mask = jnp.array([[True, False, False], [True, True, True], [False, False, False]])
    assert token_mean(values, mask) == (13, 4)
    assert sequence_mean_token_mean(values, mask) == (4 + 3, 2)
    assert SumOverConstant(10)(values, mask) == (pytest.approx(1.3), 2)
    assert SumOverConstant()(values, mask) == (13, 2)
    assert entropy_term(values, mask, aggregation=token_mean) == (-13, 4)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "sapo", "gmpo", "luspo"])
def test_gradient_is_the_slope_of_the_value(name):
    """Finite differences in float64; no clip boundary lies within a step."""
    spread = "near" if name in ("gspo", "luspo") else "far"
    with jax.enable_x64(True):
        lp, *rest = case(spread, name)
        _, _, gradient, _ = value_and_gradient(LOSSES[name], lp, *rest)
        loss = jax.jit(lambda x: LOSSES[name](x, *rest)[0])
        step = 1e-7
        for i, t in zip(*np.nonzero(rest[-1]), strict=True):
            nudge = np.zeros_like(lp)
            nudge[i, t] = step
            slope = (loss(lp + nudge) - loss(lp - nudge)) / (2 * step)
            np.testing.assert_allclose(gradient[i, t], slope, atol=2e-8)


def test_gradients_with_a_fixed_ratio_are_the_slope_at_that_ratio():
    """CISPO's ratio and GSPO-token's s are constants for the gradient: hold them by moving old."""
    with jax.enable_x64(True):
        lp, old, advantages, mask = case("far", "cispo")
        _, _, gradient, _ = value_and_gradient(LOSSES["cispo"], lp, old, advantages, mask)

        def cispo(x):
            return LOSSES["cispo"](x, old + (x - lp), advantages, mask)[0]

        lp2, old2, per_token, _ = case("near", "gspo_token")
        _, _, by_token, _ = value_and_gradient(LOSSES["gspo_token"], lp2, old2, per_token, mask)
        lengths = np.maximum(mask.sum(-1, keepdims=True), 1)
        log_s = np.where(mask, lp2 - old2, 0).sum(-1, keepdims=True) / lengths
        clip = {"clip_low": 3e-4, "clip_high": 4e-4}

        def gspo_token(x):  # r_t = s pi_t / sg(pi_t)
            return LOSSES["grpo"](x, lp2 - log_s, per_token, mask, **clip)[0]

        for f, x, expected in ((cispo, lp, gradient), (gspo_token, lp2, by_token)):
            f, step = jax.jit(f), 1e-7
            for i, t in zip(*np.nonzero(mask), strict=True):
                nudge = np.zeros_like(x)
                nudge[i, t] = step
                slope = (f(x + nudge) - f(x - nudge)) / (2 * step)
                np.testing.assert_allclose(expected[i, t], slope, atol=2e-8)


def test_gspo_is_grpo_for_completions_of_one_token():
    lp, old, advantages, _ = case("near")
    mask = np.zeros(lp.shape, bool)
    mask[:, 2] = True
    clip = {"clip_low": 3e-4, "clip_high": 4e-4}
    expected = value_and_gradient(LOSSES["grpo"], lp, old, advantages, mask, **clip)
    assert 0 < expected[3]["clip_fraction"][0] < len(lp)
    for name in ("gspo", "gspo_token", "luspo"):
        got = value_and_gradient(LOSSES[name], lp, old, advantages, mask, **clip)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, expected)


def test_gspo_token_is_gspo_where_all_tokens_have_one_advantage():
    x = case("near")
    expected = value_and_gradient(LOSSES["gspo"], *x)
    got = value_and_gradient(LOSSES["gspo_token"], *x)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, expected)


def test_luspo_is_gspo_times_length():
    x, clip = case("near"), {"clip_low": 2e-3, "clip_high": 2.5e-3}
    for i in (0, 2, 4):
        row = [on_canvas(a[i : i + 1]) for a in x]
        gspo, _, _ = LOSSES["gspo"](*row, **clip)
        luspo, count, _ = LOSSES["luspo"](*row)
        np.testing.assert_allclose(luspo, gspo * row[-1].sum(), rtol=1e-6)
        assert count == 1


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_that_of_reinforce_with_a_baseline(name):
    """r = 1: grad = -A grad log pi, weighted as the aggregation does; nothing is clipped."""
    _, old, advantages, mask = case()
    _, count, gradient, metrics = value_and_gradient(
        LOSSES[name], old, old, advantages, mask, **SETTINGS.get(name, {})
    )
    lengths = np.maximum(mask.sum(-1, keepdims=True), 1)
    by_sequence = {"dr_grpo": 6.0, "luspo": 1.0, "dapo": 1.0, "cispo": 1.0}.get(name, lengths)
    expected = np.where(mask, -advantages[:, None] / by_sequence, 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert metrics["clip_fraction"][0] == 0 and metrics["old_kl_k3"][0] == 0
    assert metrics["ratio"] == (mask.sum(), mask.sum())
    assert count == (mask.sum() if name in ("dapo", "cispo") else mask.any(-1).sum())


def test_on_policy_weights_of_tokens_tell_ratios_of_sequences_from_those_of_tokens():
    """So that with a correction not all losses have one gradient, even in a single update."""
    _, old, advantages, mask = case()
    weights = np.where(mask, np.random.default_rng(2).uniform(0.5, 2, mask.shape), 0)
    lengths = np.maximum(mask.sum(-1, keepdims=True), 1)
    means = np.broadcast_to(weights.sum(-1, keepdims=True) / lengths, mask.shape)
    of_tokens, of_sequences = ("grpo", "gspo_token", "sapo"), ("gspo", "gmpo")
    for names, own in ((of_tokens, weights), (of_sequences, means)):
        expected = np.where(mask, -own * advantages[:, None] / lengths, 0)
        for name in names:
            _, _, gradient, _ = value_and_gradient(
                LOSSES[name], old, old, advantages, mask, weights=weights
            )
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "gspo_token", "gmpo"])
def test_on_policy_value_is_minus_the_mean_advantage(name):
    _, old, advantages, mask = case()
    value, count, _ = LOSSES[name](old, old, advantages, mask)
    weights = mask.sum(-1) if name == "dapo" else mask.any(-1)
    np.testing.assert_allclose(
        value / count, -(weights * advantages).sum() / weights.sum(), rtol=1e-5
    )


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_masked_never_matters(name):
    """Nor padding on either side or in rows, nor the order of rows, nor micro-batches."""
    spread = "near" if "spo" in name else "far"
    x = [np.asarray(a, np.float32 if a.dtype == np.float64 else None) for a in case(spread, name)]
    x.append(np.asarray(REFERENCES[f"{spread}/weights"], np.float32))

    def loss(*a):
        settings = SETTINGS.get(name, {})
        return value_and_gradient(LOSSES[name], *a[:4], weights=a[4], **settings)

    expected = loss(*x)
    rows, width = x[0].shape

    def same(got, gradient):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
            (got[0], got[1], gradient, got[3]),
            tuple(expected),
        )

    mask, dead = x[3], ~x[3].any(-1)
    for junk in (np.nan, -np.inf, np.inf):
        holes = [np.where(~dead if a.ndim == 1 else mask, a, junk) for a in x]
        got = loss(*holes[:3], mask, holes[4])
        same(got, got[2])

    for left in (0, 3):
        fills = (-np.inf, np.nan, np.inf, False, np.nan)
        wide = [on_canvas(a, (9, 9), left, fill) for a, fill in zip(x, fills, strict=True)]
        got = loss(*wide)
        same(got, got[2][:rows, left : left + width])
        assert not got[2][rows:].any()

    order = np.array([3, 6, 0, 2, 5, 1, 4])
    got = loss(*(a[order] for a in x))
    same(got, got[2][np.argsort(order)])

    parts = []
    for part in (slice(0, 2), slice(2, 4), slice(4, 7)):
        parts.append(loss(*(on_canvas(a[part]) for a in x)))
    total = jax.tree.map(lambda *p: sum(p), *[(p[0], p[1], p[3]) for p in parts])
    gradients = [p[2][:n, :width] for p, n in zip(parts, (2, 2, 3), strict=True)]
    same((total[0], total[1], None, total[2]), np.concatenate(gradients))

    nothing = loss(*x[:3], np.zeros_like(mask), x[4])
    assert nothing[:2] == (0, 0) and not nothing[2].any()
    assert all(pair == (0, 0) for pair in nothing[3].values())


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_make_no_nan(name):
    """Log-ratios of +-1000 and of -inf at trained tokens, advantages of both signs and 0."""
    lp = np.array([[-1.0, -1001], [-1, -1001], [-np.inf, -1], [-1, -1], [-1001, -1]])
    old = np.array([[-1001.0, -1001], [-1001, -1], [-1, -1], [-np.inf, -1], [-1, -1]])
    lp, old, mask = (on_canvas(a) for a in (np.float32(lp), np.float32(old), lp < 0))
    for advantage in (1.0, -1.0, 0.0):
        value, _, gradient, metrics = value_and_gradient(
            LOSSES[name], lp, old, np.full(len(lp), advantage, np.float32), mask
        )
        assert jnp.isfinite(value) and jnp.isfinite(gradient).all()
        assert all(np.isfinite(pair).all() for pair in metrics.values())


def test_gradient_flows_to_the_policy_alone():
    lp, old, advantages, mask = (jnp.asarray(a) for a in case())
    weights = jnp.ones(lp.shape)

    def loss(*floats):
        lp, old, advantages, weights = floats
        return policy_loss(make_objective(OWN["grpo"]), lp, old, advantages, mask, weights)[0]

    grads = jax.grad(loss, argnums=(0, 1, 2, 3))(lp, old, advantages, weights)
    assert jnp.abs(grads[0]).max() > 0.01
    assert not any(g.any() for g in grads[1:])


def test_weights_multiply_after_the_clip():
    """A weight of 3 on a clipped token: 3 * 1.2 A, not clip(3 r) A; per sequence or per token."""
    weight = np.full(7, 3.0)
    np.testing.assert_allclose(
        one_token(np.log(1.5), 1.0, "grpo", weights=weight)[:2], (-3.6, 0), rtol=1e-5
    )
    lp, old, advantages, mask = case()
    w = np.arange(len(lp)) / 4
    by_row, _, _ = LOSSES["grpo"](lp, old, advantages, mask, weights=w)
    by_token, _, _ = LOSSES["grpo"](
        lp, old, advantages, mask, weights=np.broadcast_to(w[:, None], lp.shape)
    )
    rows = [LOSSES["grpo"](*(on_canvas(a[i : i + 1]) for a in case()))[0] for i in range(len(lp))]
    np.testing.assert_allclose(by_row, np.dot(w, rows), rtol=1e-5)
    np.testing.assert_allclose(by_token, by_row, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - SEQUENCE_ONLY))
def test_equal_advantages_of_all_tokens_are_one_advantage(name):
    lp, old, advantages, mask = case()
    expected = value_and_gradient(LOSSES[name], lp, old, advantages, mask)
    wide = np.broadcast_to(advantages[:, None], lp.shape)
    got = value_and_gradient(LOSSES[name], lp, old, wide, mask)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, expected)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo_token", "luspo"])
def test_eight_devices_are_one(name):
    """Eight rows over eight devices: the same sums, counts, metrics and gradients."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x = [np.asarray(np.concatenate([a, a[:1]]), a.dtype) for a in case("near", name)]
    loss = jax.jit(partial(value_and_gradient, LOSSES[name]))
    split = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("data"))) for a in x]
    assert len(split[0].addressable_shards) == 8
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), loss(*split), loss(*x))


def test_ratio_level_and_aggregation_are_independent_choices():
    """Every combination runs; GSPO's ratio with DAPO's aggregation is a mean over tokens of s A."""
    lp, old, advantages, mask = case("near")
    wide = Clipped(1.0, 1e9)
    s = np.exp(np.where(mask, lp - old, 0).sum(-1) / np.maximum(mask.sum(-1), 1))
    for ratio in RATIOS:
        values = {
            name: policy_loss(Objective(wide, ratio, f), lp, old, advantages, mask)[:2]
            for name, f in AGGREGATIONS.items()
        }
        r = np.exp(lp - old) if ratio == "token" else np.broadcast_to(s[:, None], lp.shape)
        terms = np.where(mask, -r * advantages[:, None], 0)
        lengths = np.maximum(mask.sum(-1), 1)
        expected = {
            "token_mean": (terms.sum(), mask.sum()),
            "sequence_mean_token_mean": ((terms.sum(-1) / lengths).sum(), mask.any(-1).sum()),
            "sum_over_constant": (terms.sum(), mask.any(-1).sum()),
        }
        for name in AGGREGATIONS:
            np.testing.assert_allclose(values[name], expected[name], rtol=1e-5)


def test_an_objective_is_a_loss_with_changes():
    gspo, grpo = OWN["gspo"], OWN["grpo"]
    plain = Objective(Clipped(3e-4, 4e-4), "sequence", sequence_mean_token_mean)
    assert make_objective(gspo) == plain
    assert make_objective(grpo, clip_low=3e-4, clip_high=4e-4, ratio="sequence") == plain
    assert make_objective(OWN["dr_grpo"], clip_high=None, constant=64.0) == Objective(
        Clipped(0.2, 0.2), "token", SumOverConstant(64.0)
    )
    assert make_objective(grpo, aggregation="token_mean", clip_high=0.28) == make_objective(
        OWN["dapo"]
    )


def test_bad_settings_are_refused():
    lp, old, advantages, mask = case()
    wide = np.broadcast_to(advantages[:, None], lp.shape)
    for name in SEQUENCE_ONLY:
        with pytest.raises(ValueError, match="gspo_token"):
            LOSSES[name](lp, old, wide, mask)
    for settings, message in (
        ({"ratio_cap": 5.0}, "ratio_cap is no setting of this policy loss: it has clip_low"),
        ({"constant": 5.0}, "set aggregation=sum_over_constant"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"clip_dual": 1.0}, "clip_dual is 1.0; it must be above 1"),
        ({"ratio": "sentence"}, "unknown ratio level 'sentence'"),
        ({"aggregation": "token_maen"}, "did you mean token_mean"),
        ({"aggregation": "sum_over_constant", "constant": 0.0}, "constant is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make_objective(OWN["grpo"], **settings)
    with pytest.raises(ValueError, match="did you mean clipped"):
        make_objective(PolicyLoss("", "cliped", {}))


def test_the_dual_clip_by_hand():
    """A = -1 and a log-ratio of 6: the term is -e^6 = -403 without it, -3 with c = 3."""
    old = np.zeros((7, 6), np.float32)
    lp, mask = old.copy(), np.zeros(old.shape, bool)
    lp[:4, 0], mask[:4, 0] = (6, 1, -1, 6), True
    for advantage, without, with_dual in (
        # e^6 is far; e is beyond the clip only; 1/e is below it; then e^6 again
        (-1.0, [np.exp(6), np.e, 0.8, np.exp(6)], [3, np.e, 0.8, 3]),
        (1.0, [-1.2, -1.2, -np.exp(-1), -1.2], [-1.2, -1.2, -np.exp(-1), -1.2]),
    ):
        for settings, terms in (({}, without), ({"clip_dual": 3.0}, with_dual)):
            value, count, gradient, metrics = value_and_gradient(
                LOSSES["grpo"], lp, old, np.full(7, advantage, np.float32), mask, **settings
            )
            np.testing.assert_allclose((value, count), (np.sum(terms), 4), rtol=1e-5)
            held = np.isin(np.float32(np.abs(terms)), np.float32([3.0, 0.8, 1.2]))
            np.testing.assert_allclose(gradient[:4, 0], np.where(held, 0, terms), rtol=1e-5)
            assert metrics["clip_fraction"][0] == held.sum()


def test_the_gradient_under_a_dual_clip_is_that_of_finite_differences():
    lp, old, advantages, mask = case("far")
    for name in ("grpo", "gspo", "dapo"):

        def loss(x, name=name):
            return LOSSES[name](x, old, advantages, mask, clip_dual=1.3)[0]

        with jax.enable_x64(True):
            slope = jax.grad(loss)(jnp.asarray(lp, jnp.float64))
            step = np.random.default_rng(3).standard_normal(lp.shape)
            ahead, behind = (float(loss(jnp.asarray(lp + s * 1e-6 * step))) for s in (1, -1))
        along = float((np.asarray(slope) * step)[mask].sum())
        assert (ahead - behind) / 2e-6 == pytest.approx(along, rel=1e-4, abs=1e-6)


def test_a_ratio_that_is_always_1_is_stated_for_every_loss():
    for loss in OWN.values():
        objective = make_objective(loss)
        (note,) = ratio_notes(objective, 1, bypass=False)
        assert "every ratio pi_theta / pi_old is 1" in note
        assert ratio_notes(objective, 1, bypass=True) == []  # the ratio to the sampler may differ
        assert ratio_notes(objective, 2, bypass=False) == []


def test_a_clip_that_never_acts_is_stated():
    for loss, clip in ((OWN["gspo"], {"clip_low": 0.2}), (OWN["gspo_token"], {"clip_high": 0.05})):
        wide = make_objective(loss, **clip)
        (note,) = ratio_notes(wide, 4, bypass=False)
        assert "the clip never acts; 3e-4 and 4e-4 are usual" in note
        assert ratio_notes(wide, 4, bypass=True) == []


def test_a_term_of_ones_own():
    """Called with its settings, it takes the place of a term of the table."""

    class Plain:
        def __init__(self, scale: float):
            self.scale = scale

        def __call__(self, tokens, level):
            nowhere = jnp.zeros_like(tokens.mask)
            ratio = jnp.exp(level(tokens.log_ratio, tokens))
            return TermOutput(self.scale * ratio * tokens.advantages, ratio, nowhere, nowhere)

    lp, old, advantages, mask = case("near")
    own = make_objective(PolicyLoss("3 r A", Plain, {"scale": 3.0}))
    plain = Objective(Clipped(1.0, 1e9), "token", sequence_mean_token_mean)
    total, count, _ = policy_loss(own, lp, old, advantages, mask)
    expected, same, _ = policy_loss(plain, lp, old, advantages, mask)
    np.testing.assert_allclose(total, 3 * expected, rtol=1e-5)
    assert count == same
