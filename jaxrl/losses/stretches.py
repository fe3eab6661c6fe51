"""Reverse KL from stretches of tokens that two tokenizers spell differently.

A stretch (`data.alignment`) is one action of the student: it has the sum of its tokens' log-probs
under either model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl.losses.divergence import Sums
from jaxrl.losses.masked import masked_count, masked_sum
from jaxrl.types import Array


def stretch_sums(values: Float[Array, "B C"], starts: Bool[Array, "B C"]) -> Float[Array, "B C"]:
    """At each token the sum over its stretch, which ends where the next one begins."""
    number = jnp.cumsum(starts, -1)

    def total(values: Array, number: Array) -> Array:
        return jax.ops.segment_sum(values, number, num_segments=len(values) + 1)[number]

    return jax.vmap(total)(values, number)


def stretch_reverse_kl(
    student_logprobs: Float[Array, "B C"],
    whole_logprobs: Float[Array, "B C"],
    teacher_sums: Float[Array, "B C"],
    sampler_logprobs: Float[Array, "B C"],
    starts: Bool[Array, "B C"],
    mask: Bool[Array, "B C"],
    baseline: Float[Array, "B C"],
    *,
    ratio_cap: float = 2.0,
) -> tuple[Float[Array, ""], Sums]:
    """KL(student || teacher) from sampled stretches: `divergence.sampled_reverse_kl` with a stretch
    in place of a token. Its gradient is w (log Q - log P - b) grad log Q, log Q and log P being
    those of the stretch or of what is left of it after its first cell, and w = sg(min(Q / mu,
    ratio_cap)) with the whole log-prob of the stretch. The expectation of grad log Q is 0, so that
    b changes the variance only.

    Args:
        student_logprobs: nats, of the sampled tokens, as far as they count; the gradient flows
            here.
        whole_logprobs: nats, of the sampled tokens.
        teacher_sums: nats, at each token that of its stretch.
        sampler_logprobs: nats, of the tokens under the policy that sampled.
        starts: where a stretch begins.
        mask: the tokens that count, whole stretches.
        baseline: b, nats, at each token that of its stretch.

    Returns:
        The sum, and the metrics reverse_kl_k1 (nats a token) and ratio_capped (share of the
        tokens), of these tokens.
    """

    def summed(x: Array) -> Array:
        return stretch_sums(jnp.where(mask, x, 0), starts)

    fixed = jax.lax.stop_gradient(student_logprobs)
    student = summed(fixed)
    drawn = jax.lax.stop_gradient(whole_logprobs - sampler_logprobs)
    ratio = jnp.exp(summed(drawn))
    weight = jnp.minimum(ratio, ratio_cap)
    gap = student - jax.lax.stop_gradient(teacher_sums)
    # 0 with the gradient of the token's log-prob: the value is that of each stretch, once.
    slope = weight * (gap - baseline) * (student_logprobs - fixed)
    value = jnp.where(starts, weight * gap, 0) + slope
    count = masked_count(mask)
    metrics = {
        "reverse_kl_k1": (masked_sum(jnp.where(starts, gap, 0), mask), count),
        "ratio_capped": (masked_sum((ratio > ratio_cap).astype(jnp.float32), mask), count),
    }
    return masked_sum(value, mask), metrics
