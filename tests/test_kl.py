"""The KL estimators: by hand, and their expectations by enumerating the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses import kl
from jaxrl.masked import masked_count, masked_mean, masked_sum

POLICY = jnp.array([0.3, -1.2, 0.8, 0.1])
REFERENCE = jax.nn.log_softmax(jnp.array([-0.4, 0.2, 0.5, 1.1]))


def divergence(p, q):
    return (jnp.exp(p) * (p - q)).sum()


def expected_gradient(estimator):
    """Sum over tokens of pi(token) grad estimator(log pi(token))."""

    def total(logits):
        logprobs = jax.nn.log_softmax(logits)
        weights = jax.lax.stop_gradient(jnp.exp(logprobs))
        return (weights * estimator(logprobs, REFERENCE)).sum()

    return jax.grad(total)(POLICY)


def test_values_by_hand():
    """d = log 2."""
    logprobs, reference = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25]))
    np.testing.assert_allclose(kl.k1(logprobs, reference), [0.693147], rtol=1e-5)
    np.testing.assert_allclose(kl.k2(logprobs, reference), [0.240227], rtol=1e-5)
    np.testing.assert_allclose(kl.k3(logprobs, reference), [0.5 + 0.693147 - 1], rtol=1e-5)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_k1_and_k3_are_unbiased(estimator):
    logprobs = jax.nn.log_softmax(POLICY)
    mean = (jnp.exp(logprobs) * estimator(logprobs, REFERENCE)).sum()
    np.testing.assert_allclose(mean, divergence(logprobs, REFERENCE), rtol=1e-5)


def test_k2_and_k3_are_never_negative():
    d = jnp.linspace(-20, 20, 401)
    assert (kl.k2(d, jnp.zeros_like(d)) >= 0).all()
    assert (kl.k3(d, jnp.zeros_like(d)) >= 0).all()


def test_expected_gradients():
    """k1: none. k2: that of KL(policy || reference). k3: that of KL(reference || policy)."""
    reverse = jax.grad(lambda z: divergence(jax.nn.log_softmax(z), REFERENCE))(POLICY)
    forward = jax.grad(lambda z: divergence(REFERENCE, jax.nn.log_softmax(z)))(POLICY)
    np.testing.assert_allclose(expected_gradient(kl.k1), 0, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(kl.k2), reverse, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(kl.k3), forward, atol=1e-6)


def test_masked_helpers_ignore_what_is_masked():
    x = jnp.array([1.0, jnp.nan, 3.0, jnp.inf])
    mask = jnp.array([True, False, True, False])
    assert masked_sum(x, mask) == 4
    assert masked_count(mask) == 2
    assert masked_mean(x, mask) == 2
    assert masked_mean(x, jnp.zeros(4, bool)) == 0
    np.testing.assert_array_equal(jax.grad(masked_mean)(x, mask), [0.5, 0, 0.5, 0])
