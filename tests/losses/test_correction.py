"""Off-policy correction: by hand, and the laws of its weights and diagnostics."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses.algorithm_table import ALGORITHMS
from jaxrl.losses.correction import (
    CORRECTIONS,
    LIMITS,
    correct,
    diagnostics,
    make_correction,
)
from jaxrl.losses.policy import make_objective, policy_loss

SHAPE = 4, 5
RNG = np.random.default_rng(0)
OLD = np.float32(-RNG.exponential(1.5, SHAPE))
SAMPLER = np.float32(OLD - RNG.normal(0, 0.5, SHAPE))
MASK = np.arange(5)[None, :] < np.array([5, 3, 0, 1])[:, None]


def weights_of(name, log_rho, **settings):
    """Weights of one sequence whose tokens have these log-ratios."""
    log_rho = np.asarray([log_rho], np.float32)
    found = correct(
        make_correction(name, **settings),
        log_rho - 3,
        log_rho * 0 - 3,
        np.ones(log_rho.shape, bool),
    )
    return found.weights[0], found


def test_weights_by_hand():
    """rho = (1/4, 1/2, 1, 3, 6): product 9/4, mean log-ratio log(9/4) / 5 = 0.162."""
    log_rho = np.log([0.25, 0.5, 1, 3, 6])
    expected = {
        "none": [1, 1, 1, 1, 1],
        "tis_token": [0.25, 0.5, 1, 2, 2],
        "tis_sequence": [2] * 5,
        "icepop": [0, 0.5, 1, 3, 0],
        "sequence_mask": [0] * 5,
        "sequence_geo_mask": [0] * 5,
    }
    assert set(expected) == set(CORRECTIONS)
    for name, values in expected.items():
        settings = {"low": 0.4999} if name == "icepop" else {}  # exp(log 0.5) may round below 0.5
        np.testing.assert_allclose(weights_of(name, log_rho, **settings)[0], values, rtol=1e-5)
    np.testing.assert_allclose(weights_of("tis_sequence", log_rho, cap=9.0)[0], 9 / 4, rtol=1e-5)
    np.testing.assert_allclose(weights_of("tis_token", log_rho, cap=4.0)[0][3:], [3, 4], rtol=1e-5)
    np.testing.assert_array_equal(weights_of("sequence_geo_mask", log_rho, threshold=0.17)[0], 1)
    np.testing.assert_array_equal(weights_of("sequence_geo_mask", -log_rho, threshold=0.16)[0], 0)


def test_a_sequence_mask_is_the_ratio_of_the_sequences_up_to_its_cap():
    """rho_seq = prod rho: 9/4 or 4/9 for the tokens above; not 1 where it trains, unlike geo's."""
    log_rho = np.log([0.25, 0.5, 1, 3, 6])
    for cap, sign, expected in ((2.3, 1, 9 / 4), (2.2, 1, 0), (2.2, -1, 4 / 9)):
        found = weights_of("sequence_mask", sign * log_rho, cap=cap)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    kept, truncated = (weights_of(n, -log_rho)[0] for n in ("sequence_mask", "tis_sequence"))
    np.testing.assert_allclose(kept, truncated, rtol=1e-5)


def test_token_tis_may_stand_beside_a_sequence_mask():
    """The product of both: sequences that disagree are left out, the others' tokens weighed."""
    log_rho = np.log([0.25, 0.5, 1, 3, 6])
    both = ("tis_token", "sequence_geo_mask")
    for threshold, kept in ((0.17, 1), (0.16, 0)):
        found = weights_of(both, log_rho, cap=4.0, threshold=threshold)[0]
        np.testing.assert_allclose(found, kept * np.array([0.25, 0.5, 1, 3, 4]), rtol=1e-5)


def test_a_mask_by_the_mean_keeps_long_sequences():
    """0.05 nats a token is a mismatch of 0.05, be it over 2 tokens or 500 (a sum would be 25)."""
    mask = np.arange(500)[None, :] < np.array([2, 500, 2, 500])[:, None]
    gap = np.float32([0.05, -0.05, 0.15, -0.15])[:, None] * mask
    found = correct(make_correction("sequence_geo_mask"), gap, np.zeros_like(gap), mask)
    np.testing.assert_array_equal(found.weights.any(-1), [True, True, False, False])


def test_diagnostics_by_hand():
    """rho = (2, 1/2): chi2 = (4 + 1/4) / 2 - 1, ESS = (5/2)^2 / (2 (4 + 1/4))."""
    found = weights_of("tis_token", np.log([2, 0.5]))[1]
    told = diagnostics(found.sums, found.maxima)
    expected = {
        "mismatch_k3": ((2 - 1 - np.log(2)) + (0.5 - 1 + np.log(2))) / 2,
        "mismatch_chi2": 4.25 / 2 - 1,
        "mismatch_ess": 6.25 / 8.5,
        "mismatch_max_log_ratio": np.log(2),
        "correction_weight": 1.25,
        "correction_dropped": 0,
    }
    assert told == pytest.approx(expected, rel=1e-5)


def test_diagnostics_are_divergences_in_expectation():
    """Over all tokens by mu: k3 is KL(mu || pi_old), rho^2 - 1 is chi^2(pi_old || mu)."""
    mu, old = (jax.nn.log_softmax(jnp.array(z)) for z in ([0.3, -1.2, 0.8], [0.0, 0.5, -0.4]))
    p, q = np.exp(mu), np.exp(old)
    one = np.ones((1, 1), bool)
    tokens = [
        correct(make_correction("none"), old[None, i : i + 1], mu[None, i : i + 1], one).sums
        for i in range(3)
    ]

    def mean(name):
        return sum(w * float(t[name][0]) for w, t in zip(p, tokens, strict=True))

    np.testing.assert_allclose(mean("mismatch_k3"), (p * (mu - old)).sum(), rtol=1e-5)
    np.testing.assert_allclose(
        mean("mismatch_rho_squared") - 1, ((q - p) ** 2 / p).sum(), rtol=1e-5
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_every_weight_is_one(name):
    found = correct(make_correction(name), OLD, OLD, MASK)
    np.testing.assert_array_equal(found.weights, MASK)
    told = diagnostics(found.sums, found.maxima)
    assert told.pop("correction_weight") == told.pop("mismatch_ess") == 1
    assert set(told.values()) == {0}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_masked_positions_and_the_split_into_micro_batches_never_matter(name):
    correction = make_correction(name)
    expected = correct(correction, OLD, SAMPLER, MASK)
    for junk in (np.nan, -np.inf, np.inf):
        holes = [np.where(MASK, x, junk) for x in (OLD, SAMPLER)]
        got = correct(correction, *holes, MASK)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, expected)
    parts = []
    for rows in ((0, 1), (2, 3)):
        mask = MASK & np.isin(np.arange(4), rows)[:, None]
        parts.append(correct(correction, OLD, SAMPLER, mask))
    sums = jax.tree.map(lambda a, b: a + b, parts[0].sums, parts[1].sums)
    maxima = jax.tree.map(jnp.maximum, parts[0].maxima, parts[1].maxima)
    np.testing.assert_array_equal(parts[0].weights + parts[1].weights, expected.weights)
    told = diagnostics(expected.sums, expected.maxima)
    assert diagnostics(sums, maxima) == pytest.approx(told, rel=1e-5)
    assert told["mismatch_max_log_ratio"] == pytest.approx(np.abs(OLD - SAMPLER)[MASK].max())


def test_extreme_ratios_make_no_nan_and_no_sample_no_row():
    lp = np.array([[-1.0, -1001, -np.inf, -1, -np.inf]])
    mu = np.array([[-1001.0, -1, -1, -np.inf, -np.inf]])
    for name in CORRECTIONS:
        found = correct(make_correction(name), lp, mu, np.ones_like(lp, bool))
        assert np.isfinite(found.weights).all()
        assert all(np.isfinite(pair).all() for pair in found.sums.values())
        nothing = correct(make_correction(name), lp, mu, np.zeros_like(lp, bool))
        assert not nothing.weights.any()
        assert all(pair == (0, 0) for pair in nothing.sums.values())
        assert all(np.isfinite(x) for x in diagnostics(nothing.sums, nothing.maxima).values())


def test_decoupled_on_policy_of_the_learner_is_bypass():
    """pi_theta = pi_old: rho * r is pi_theta / mu either way, up to the cap and the clip."""
    advantages, wide = np.float32([1.0, -0.5, 2.0, -1.0]), {"clip_low": 1.0, "clip_high": 1e9}
    weights = correct(make_correction("tis_token", cap=1e9), OLD, SAMPLER, MASK).weights
    objective = make_objective(ALGORITHMS["grpo"].loss, **wide)

    def decoupled(lp):
        return policy_loss(objective, lp, OLD, advantages, MASK, weights)[0]

    def bypass(lp):
        return policy_loss(objective, lp, SAMPLER, advantages, MASK)[0]

    expected = jax.value_and_grad(bypass)(OLD)
    got = jax.value_and_grad(decoupled)(OLD)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, expected)
    assert np.abs(expected[1]).max() > 0.1


def test_bad_settings_are_refused():
    for name, settings, message in (
        ("tis_tokn", {}, "did you mean tis_token"),
        ("none", {"cap": 2.0}, "cap is no setting of off-policy correction none: it has none"),
        ("icepop", {"cap": 2.0}, "it has low and high"),
        ("icepop", {"low": 2.0}, "low of the off-policy correction is 2.0"),
        ("icepop", {"high": 0.5}, "high of the off-policy correction is 0.5"),
        ("tis_sequence", {"cap": 0.0}, "above 0"),
        ("sequence_geo_mask", {"threshold": -1.0}, "0 or above"),
        ("sequence_mask", {"threshold": 0.1}, "threshold is no setting of .* it has cap"),
        ("sequence_mask", {"cap": 0.5}, "1 or above"),
        (
            ("tis_token", "icepop"),
            {},
            "use one of them, and optionally sequence_geo_mask",
        ),
        (("none", "tis_token"), {}, "would correct twice"),
        (("sequence_geo_mask",) * 2, {}, "would correct twice"),
        ((), {}, "no off-policy correction is named"),
    ):
        with pytest.raises(ValueError, match=message):
            make_correction(name, **settings)
    expected = correct(make_correction("tis_token", cap=2.0), OLD, SAMPLER, MASK).weights
    unset = correct(make_correction("tis_token", cap=None), OLD, SAMPLER, MASK).weights
    np.testing.assert_array_equal(unset, expected)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_limits_are_those_of_the_settings_that_there_are(name):
    """With defaults inside; what is beyond is refused, and what is no number too."""
    weights = CORRECTIONS[name]
    defaults = (
        {} if weights is None else dict(list(inspect.signature(weights).parameters.items())[2:])
    )
    assert LIMITS[name].keys() == defaults.keys()
    for key, (least, most, words) in LIMITS[name].items():
        assert least <= defaults[key].default <= most
        outside = {float("nan"), np.nextafter(least, -np.inf), np.nextafter(most, np.inf)}
        for value in outside - {np.inf}:
            with pytest.raises(ValueError, match=f"{key} .* must be {words}"):
                make_correction(name, **{key: float(value)})
