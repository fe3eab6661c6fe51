"""Per-token estimators of KL(policy || reference) from sampled tokens (Schulman 2020).

With d = logprobs - ref_logprobs and tokens sampled from the policy, k1 and k3 are unbiased and k2
is not. Their gradients differ from their values: on-policy, the expected gradient of k1 is zero
(use it in a reward, never as a loss), that of k2 is the gradient of KL(policy || reference), that
of k3 the gradient of KL(reference || policy).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def k1(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """d. Unbiased, signed.

    Args:
        logprobs: nats, of the sampled tokens under the policy.
        ref_logprobs: nats, of the same tokens under the reference.
    """
    return logprobs - ref_logprobs


def k2(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """d^2 / 2. Biased, never negative; arguments as `k1`."""
    return jnp.square(logprobs - ref_logprobs) / 2


def k3(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """exp(-d) + d - 1. Unbiased, never negative; arguments as `k1`."""
    d = logprobs - ref_logprobs
    return jnp.expm1(-d) + d
