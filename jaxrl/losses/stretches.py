"""Reverse KL from stretches of tokens that two tokenizers spell differently.

A stretch (`data.alignment`) is one action of the student. What it is worth is how much more
probable it makes the text so far under either model: it has the increment of log F (`losses.cells`)
from its beginning to its end. The increments of a text add up to its log-prob; the sum of its
tokens' log-probs would do so too, but credit a stretch with what a model's token says of the text
after it. Where the divergence over cells has its first cell, the increment is given that cell.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.cells import LEFT_OUT, opened
from jaxrl.losses.divergence import clamped_gap
from jaxrl.losses.head import PathLogprobs
from jaxrl.losses.masked import masked_count, masked_sum
from jaxrl.types import Array, Sums


def stretch_sums(values: Float[Array, "B C"], starts: Bool[Array, "B C"]) -> Float[Array, "B C"]:
    """At each token the sum over its stretch, which ends where the next one begins."""
    number = jnp.cumsum(starts, -1)

    def total(values: Array, number: Array) -> Array:
        return jax.ops.segment_sum(values, number, num_segments=len(values) + 1)[number]

    return jax.vmap(total)(values, number)


def increments(
    path: PathLogprobs, given: Int[Array, "B C"], left_out: Int[Array, "B C W"]
) -> Float[Array, "B C"]:
    """Of each token its part in the increment of log F, nats, given the first cell of its stretch;
    no gradient. F is the probability that a text begins so (arXiv 2410.09303), along one path.

    Args:
        given, left_out: as the path was computed with.
    """
    path = jax.lax.stop_gradient(path)
    before = opened(path.extra, left_out)
    # All cells that are left out have 1 - (1 - p) exp(-open) of the texts; p, of the path's.
    others = jnp.log(jnp.maximum(jnp.expm1(before) + jnp.exp(path.known), 1e-37))
    known = jnp.where(given == LEFT_OUT, others, jnp.where(given == -1, before, path.known))
    return path.whole + path.extra - known


def stretch_reverse_kl(
    scores: Float[Array, "B C"],
    student_increments: Float[Array, "B C"],
    teacher_sums: Float[Array, "B C"],
    student_logprobs: Float[Array, "B C"],
    sampler_logprobs: Float[Array, "B C"],
    starts: Bool[Array, "B C"],
    mask: Bool[Array, "B C"],
    baseline: Float[Array, "B C"],
    *,
    ratio_cap: float = 2.0,
) -> tuple[Float[Array, ""], Sums]:
    """KL(student || teacher) from sampled stretches: `divergence.sampled_reverse_kl` with a stretch
    in place of a token. Its gradient is w (log Q - log P - b) grad S, log Q and log P being
    the increments of the stretch, whose difference is kept within +-20 nats, S the log-prob of what
    was chosen in it, and w = sg(min(Q / mu, ratio_cap)) with the whole log-prob of the stretch. The
    expectation of grad S is 0 for a token that is known to be one of a set, so that there a b of
    other stretches changes the variance only.

    Args:
        scores: nats, of the sampled tokens; those of a stretch make up S. The gradient flows here.
        student_increments: nats (`increments`).
        teacher_sums: nats, the teacher's increments, at each token that of its stretch.
        student_logprobs: nats, of the sampled tokens.
        sampler_logprobs: nats, of the tokens under the policy that sampled.
        starts: where a stretch begins.
        mask: the tokens that count, whole stretches.
        baseline: b, nats; 0 at all tokens of which no set is known.

    Returns:
        The sum, and the metrics reverse_kl_k1 (nats a token), ratio_capped and gap_clamped (shares
        of the tokens), of these tokens.
    """

    def summed(x: Array) -> Array:
        return stretch_sums(jnp.where(mask, x, 0), starts)

    drawn = jax.lax.stop_gradient(student_logprobs - sampler_logprobs)
    ratio = jnp.exp(summed(drawn))
    weight = jnp.minimum(ratio, ratio_cap)
    gap, clamped = clamped_gap(summed(student_increments), teacher_sums, mask)
    # 0 with the gradient of the scores: the value is that of each stretch, once.
    slope = weight * (gap - baseline) * (scores - jax.lax.stop_gradient(scores))
    value = jnp.where(starts, weight * gap, 0) + slope
    count = masked_count(mask)
    metrics = {
        "reverse_kl_k1": (masked_sum(jnp.where(starts, gap, 0), mask), count),
        "ratio_capped": (masked_sum((ratio > ratio_cap).astype(jnp.float32), mask), count),
        "gap_clamped": (masked_count(clamped), count),
    }
    return masked_sum(value, mask), metrics
