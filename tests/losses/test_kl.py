"""The KL estimators, the loss term and the penalty: by hand, and by enumerating the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses.divergence import masked_sum
from jaxrl.losses.policy import (
    AGGREGATIONS,
    kl_estimates,
    kl_in_reward,
    kl_term,
    sequence_mean_token_mean,
    token_mean,
)

POLICY = jnp.array([0.3, -1.2, 0.8, 0.1])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.4, 0.2, 0.5, 1.1]))


def divergence(p, q):
    return (jnp.exp(p) * (p - q)).sum()


def expected_gradient(estimator):
    """Sum over tokens of pi(token) grad of the estimate(log pi(token))."""

    def total(logits):
        logprobs = jax.nn.log_softmax(logits)
        weights = jax.lax.stop_gradient(jnp.exp(logprobs))
        return (weights * kl_estimates(logprobs, REFERENCE)[estimator]).sum()

    return jax.grad(total)(POLICY)


def test_values_by_hand():
    """d = log 2."""
    logprobs, reference = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    np.testing.assert_allclose(kl_estimates(logprobs, reference)["k1"], [0.693147], rtol=1e-5)
    np.testing.assert_allclose(kl_estimates(logprobs, reference)["k2"], [0.240227], rtol=1e-5)
    np.testing.assert_allclose(
        kl_estimates(logprobs, reference)["k3"], [0.5 + 0.693147 - 1], rtol=1e-5
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    logprobs = jax.nn.log_softmax(POLICY)
    mean = (jnp.exp(logprobs) * kl_estimates(logprobs, REFERENCE)[estimator]).sum()
    np.testing.assert_allclose(mean, divergence(logprobs, REFERENCE), rtol=1e-5)


def test_k2_and_k3_are_never_negative():
    d = jnp.linspace(-20, 20, 401)
    assert (kl_estimates(d, jnp.zeros_like(d))["k2"] >= 0).all()
    assert (kl_estimates(d, jnp.zeros_like(d))["k3"] >= 0).all()


def test_expected_gradients():
    """k1: none. k2: that of KL(policy || reference). k3: that of KL(reference || policy)."""
    reverse = jax.grad(lambda z: divergence(jax.nn.log_softmax(z), REFERENCE))(POLICY)
    forward = jax.grad(lambda z: divergence(REFERENCE, jax.nn.log_softmax(z)))(POLICY)
    np.testing.assert_allclose(expected_gradient("k1"), 0, atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k2"), reverse, atol=1e-6)
    np.testing.assert_allclose(expected_gradient("k3"), forward, atol=1e-6)


def test_masked_helpers_ignore_what_is_masked():
    x = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
    mask = jnp.array([True, False, True, False])
    assert masked_sum(x, mask) == 4
    np.testing.assert_array_equal(jax.grad(masked_sum)(x, mask), [1, 0, 1, 0])


LOGPROBS = np.log(np.array([[0.5, 0.2, 0.9], [0.25, 0.5, 0.1], [0.1, 0.1, 0.1]]))
REF_LOGPROBS = np.log(np.array([[0.25, 0.4, 0.9], [0.5, 0.5, 0.5], [0.3, 0.3, 0.3]]))
MASK = np.array([[True, True, False], [True, False, False], [False, False, False]])
"""d = (log 2, -log 2), (-log 2), none."""


def test_term_by_hand_with_the_loss_s_aggregation():
    """k2 is log(2)^2 / 2 at all three tokens; k3 is 1/2 + log 2 - 1, then 2 - log 2 - 1 twice."""
    k2, up, down = np.log(2) ** 2 / 2, np.log(2) - 0.5, 1 - np.log(2)

    def term(estimator, aggregation):
        return kl_term(LOGPROBS, REF_LOGPROBS, MASK, estimator=estimator, aggregation=aggregation)

    total, count, metrics = term("k2", token_mean)
    np.testing.assert_allclose((total, count), (3 * k2, 3), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_k1"], (-np.log(2), 3), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_k2"], (3 * k2, 3), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_k3"], (up + 2 * down, 3), rtol=1e-5)
    total, count, _ = term("k3", sequence_mean_token_mean)
    np.testing.assert_allclose((total, count), ((up + down) / 2 + down, 2), rtol=1e-5)
    total, count, _ = term("k3", AGGREGATIONS["sum_over_constant"])
    np.testing.assert_allclose((total, count), (up + 2 * down, 2), rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_term_is_clamped_and_what_is_masked_never_matters(estimator):
    """|d| beyond 20: the value at 20, no gradient; the reference gets none anywhere."""
    lp, ref = np.float32(LOGPROBS), np.float32(REF_LOGPROBS)

    def term(lp, ref, mask=MASK):
        return kl_term(lp, ref, mask, estimator=estimator, aggregation=token_mean)[0]

    both = jax.value_and_grad(term, argnums=(0, 1))
    expected, (gradient, reference) = both(lp, ref)
    d = lp - ref
    slope = d if estimator == "k2" else 1 - np.exp(-d)
    np.testing.assert_allclose(gradient, np.where(MASK, slope, 0), rtol=1e-5)
    assert not reference.any()
    for junk in (np.nan, -np.inf, np.inf):
        got, (g, _) = both(np.where(MASK, lp, junk), np.where(MASK, ref, junk))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        np.testing.assert_allclose(g, gradient, rtol=1e-6)
    far = lp.copy()
    far[0, 0] = ref[0, 0] - 500
    at_limit = lp.copy()
    at_limit[0, 0] = ref[0, 0] - 20
    first = np.zeros_like(MASK)
    first[0, 0] = True
    np.testing.assert_allclose(term(far, ref, first), term(at_limit, ref, first), rtol=1e-5)
    assert not both(far, ref)[1][0][0, 0]
    assert term(lp, ref, np.zeros_like(MASK)) == 0


def test_term_pulls_the_policy_to_the_reference():
    """Descent lowers the log-prob of a token that the policy likes more than the reference."""
    for estimator in ("k2", "k3"):
        gradient = jax.grad(
            lambda lp, name=estimator: kl_term(
                lp, REF_LOGPROBS, MASK, estimator=name, aggregation=token_mean
            )[0]
        )(jnp.asarray(LOGPROBS))
        assert gradient[0, 0] > 0 > gradient[0, 1]


def test_penalty_of_a_sequence_is_its_summed_log_ratio():
    penalty = kl_in_reward(LOGPROBS, REF_LOGPROBS, MASK)
    np.testing.assert_allclose(penalty.sum(-1), [0, -np.log(2), 0], atol=1e-6)
    np.testing.assert_allclose(penalty[0, :2], [np.log(2), -np.log(2)], rtol=1e-5)
    k2 = kl_in_reward(LOGPROBS, REF_LOGPROBS, MASK, estimator="k2")
    np.testing.assert_allclose(k2.sum(-1), np.log(2) ** 2 / 2 * np.array([2, 1, 0]), rtol=1e-5)
    gradient = jax.grad(lambda lp: kl_in_reward(lp, REF_LOGPROBS, MASK).sum())(LOGPROBS)
    assert not gradient.any()


def test_k1_is_refused_as_a_loss():
    for estimator, message in (("k1", "k1 in the reward"), ("k4", "unknown KL estimator 'k4'")):
        with pytest.raises(ValueError, match=message):
            kl_term(LOGPROBS, REF_LOGPROBS, MASK, estimator=estimator, aggregation=token_mean)
    with pytest.raises(ValueError, match="k4"):
        kl_in_reward(LOGPROBS, REF_LOGPROBS, MASK, estimator="k4")
