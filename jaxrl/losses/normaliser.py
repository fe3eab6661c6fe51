"""What turns logits into log-probs, as two numbers for each row: the largest logit, and the log of
the sum of exponentials of what the others are below it.

As one number, the log-sum-exp, it would be rounded at the size of the logits: near 100, log-probs
would be off by 4e-6, and the gradients of confident tokens by several percent. With the largest
logit subtracted first they have an error of the size of their own rounding, and a constant that is
added to all logits does not matter. The temperature divides the differences, for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrl.types import Array

Scale = Float[Array, ""] | float
"""1 / temperature, above 0."""


class Normaliser(NamedTuple):
    """The normalisers of rows of logits."""

    peak: Float[Array, "*rows"]
    """The largest logit."""
    log_sum: Float[Array, "*rows"]
    """log sum exp(scale (z - peak)), nats: from 0 to log V."""

    def logprobs(self, z: Float[Array, "*rows n"], scale: Scale) -> Float[Array, "*rows n"]:
        """Computes log-probs, nats, of logits."""
        return scale * (z - self.peak[..., None]) - self.log_sum[..., None]


def peaks_and_sums(
    z: Float[Array, "*rows V"], scale: Scale
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Computes the largest logit of each row, and the sum of exp(scale (z - largest)) (online
    softmax, arXiv 1805.02867, section 3.1).

    A program for a GPU reads the logits once for both. Elsewhere they are two reductions: on a TPU
    the product that makes the logits finds their largest too, and on a CPU a reduction of several
    arrays is not vectorised. Not differentiable.
    """
    scale = jnp.asarray(scale, z.dtype)
    both = {"cuda": _in_one_read, "rocm": _in_one_read, "default": _in_two_reads}
    peak, total = jax.lax.platform_dependent(z, scale, **both)
    return peak, total


def _in_two_reads(z: Array, scale: Array) -> tuple[Array, Array]:
    # Where all logits are -inf their sum is 0.
    peak = jnp.maximum(z.max(-1), jnp.finfo(z.dtype).min)
    total = jnp.exp(scale * (z - peak[..., None])).sum(-1)
    # Else XLA stores z - peak for those that subtract it again.
    return jax.lax.optimization_barrier(peak), total


def _in_one_read(z: Array, scale: Array) -> tuple[Array, Array]:
    def join(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        (peak, total, scale), (other_peak, other_total, other_scale) = a, b
        # A reduction knows its operands alone: the scale is one of them, and 0 where it starts.
        scale = jnp.maximum(scale, other_scale)
        share = jnp.exp(-scale * jnp.abs(peak - other_peak))  # of the part with the lower peak
        higher = peak >= other_peak
        joined = jnp.where(higher, total + other_total * share, total * share + other_total)
        return jnp.maximum(peak, other_peak), joined, scale

    starts = jnp.finfo(z.dtype).min, jnp.zeros((), z.dtype), jnp.zeros((), z.dtype)
    ones = jnp.where(z < jnp.inf, 1, jnp.nan).astype(z.dtype)  # exp(z - z)
    values = z, ones, jnp.broadcast_to(scale, z.shape)
    peak, total, _ = jax.lax.reduce(
        values, tuple(jnp.asarray(x, z.dtype) for x in starts), join, (z.ndim - 1,)
    )
    return peak, total
