"""KL(policy || reference) from sampled tokens (Schulman 2020): estimators, loss term and penalty.

With d = logprobs - ref_logprobs and tokens sampled from the policy, k1 and k3 are unbiased and k2
is not. Their gradients differ from their values: on-policy, the expected gradient of k1 is zero
(use it in a reward, never as a loss), that of k2 is the gradient of KL(policy || reference), that
of k3 the gradient of KL(reference || policy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl.errors import unknown
from jaxrl.losses.aggregation import Aggregation, LossSums, kept, token_metric
from jaxrl.losses.divergence import MAX_GAP
from jaxrl.types import Array


def k1(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns d. Unbiased, signed.

    Args:
        logprobs: nats, of the sampled tokens under the policy.
        ref_logprobs: nats, of the same tokens under the reference.
    """
    return logprobs - ref_logprobs


def k2(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns d^2 / 2. Biased, never negative; arguments as in `k1`."""
    return jnp.square(logprobs - ref_logprobs) / 2


def k3(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns exp(-d) + d - 1. Unbiased, never negative; arguments as in `k1`."""
    d = logprobs - ref_logprobs
    return jnp.expm1(-d) + d


ESTIMATORS: Mapping[str, Callable[[Array, Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_term(
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: str,
    aggregation: Aggregation,
) -> LossSums:
    """Computes a KL to the reference, to be minimised alongside a policy loss, with d kept within
    +-20 nats.

    Args:
        logprobs: nats; the gradient flows here. Beyond +-20 there is none.
        ref_logprobs: nats, fixed.
        estimator: k2 or k3.
        aggregation: the policy loss's own.

    Returns:
        (sum, count, metrics kl_k1, kl_k2, kl_k3: nats a token).
    """
    if estimator == "k1":
        raise ValueError(
            "k1 as a loss has no expected gradient on-policy: use k2 or k3, or k1 in the reward"
        )
    if estimator not in ESTIMATORS:
        raise unknown("KL estimator", estimator, ("k2", "k3"))
    d, mask = _gap(logprobs, ref_logprobs, mask)
    values = {name: f(d, jnp.zeros_like(d)) for name, f in ESTIMATORS.items()}
    total, count = aggregation(values[estimator], mask)
    return total, count, {f"kl_{name}": token_metric(x, mask) for name, x in values.items()}


def kl_in_reward(
    logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    estimator: str = "k1",
) -> Float[Array, "B T"]:
    """Returns what is to be subtracted from the reward of each token, before its coefficient; 0
    where masked.

    Its sum over a row is the penalty of a sequence, to be taken off the reward before the group
    statistics; times a coefficient and taken off an advantage it acts token by token. No gradient.

    Args:
        logprobs: nats, under the policy that sampled or the one at the start of the batch.
        estimator: k1, k2 or k3.
    """
    if estimator not in ESTIMATORS:
        raise unknown("KL estimator", estimator, ESTIMATORS)
    d, _ = _gap(logprobs, ref_logprobs, mask)
    return jax.lax.stop_gradient(ESTIMATORS[estimator](d, jnp.zeros_like(d)))


def _gap(logprobs: Array, ref_logprobs: Array, mask: Array) -> tuple[Array, Array]:
    """Returns d within +-MAX_GAP, so that exp(-d) stays finite, and 0 where masked; and the
    mask."""
    mask = jnp.asarray(mask).astype(bool)
    d = kept(logprobs, mask) - jax.lax.stop_gradient(kept(ref_logprobs, mask))
    return jnp.clip(d, -MAX_GAP, MAX_GAP), mask
