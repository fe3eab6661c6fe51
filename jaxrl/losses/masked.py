"""Sums of what a mask keeps; the rest never matters, NaN included."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Float, Shaped

from jaxrl.types import Array


def masked_count(mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Counts the kept positions, float32."""
    return mask.astype(jnp.float32).sum()


def masked_sum(x: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Sums `x` where `mask`, float32."""
    return jnp.where(mask, x, 0).astype(jnp.float32).sum()
