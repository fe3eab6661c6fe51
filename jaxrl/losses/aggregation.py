"""How the terms of single tokens become one loss: a sum and a count, to be divided once.

Micro-batches add up sums and counts; the caller divides by the global count. A row with no
trained token adds 0 to both. The terms that go with a loss (KL to a reference, entropy) use its
aggregation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrl.losses.divergence import MIN
from jaxrl.types import Array, Sums

SumCount = tuple[Float[Array, ""], Float[Array, ""]]
LossSums = tuple[Float[Array, ""], Float[Array, ""], Sums]
"""(sum to minimise, count, metrics)."""
Aggregation = Callable[[Array, Array], SumCount]
"""(values [B, T], mask [B, T]) -> (sum, count)."""


def kept(x: Array, mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns `x` where the mask holds, else 0, in float32 or wider.

    Finite also where x is -inf. Selecting before any arithmetic is what keeps gradients finite: 0
    times the derivative of something infinite would be NaN.
    """
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.maximum(jnp.where(mask, x, 0), MIN)


def token_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
    """Sums over all tokens; counts tokens. Long sequences weigh more."""
    return jnp.where(mask, values, 0).sum(), mask.astype(values.dtype).sum()


def sequence_mean_token_mean(values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
    """Sums over sequences the mean over their tokens; counts sequences."""
    return mean_over_tokens(values, mask).sum(), mask.any(-1).astype(values.dtype).sum()


@dataclass(frozen=True)
class SumOverConstant:
    """Sum over all tokens / constant; counts sequences: sum over tokens / (constant * sequences).

    The constant is the same for all sequences, whatever their lengths, so that a token weighs the
    same in a short one and in a long one. It divides the sum, not the count: so micro-batches add
    up. With 1 it is the mean over sequences of the sum over tokens.
    """

    constant: float = 1.0
    """Tokens; usually the longest completion allowed."""

    def __post_init__(self) -> None:
        if not self.constant > 0:
            raise ValueError(
                f"constant is {self.constant}; it divides a sum over tokens and must be above 0 "
                "(usually max_new_tokens)"
            )

    def __call__(self, values: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> SumCount:
        total, _ = token_mean(values, mask)
        return total / self.constant, mask.any(-1).astype(values.dtype).sum()


AGGREGATIONS: Mapping[str, Aggregation] = {
    "sequence_mean_token_mean": sequence_mean_token_mean,
    "token_mean": token_mean,
    "sum_over_constant": SumOverConstant(),
}


def mean_over_tokens(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, " B"]:
    """Returns the mean of each row over its kept tokens; 0 for a row that has none."""
    return jnp.where(mask, x, 0).sum(-1) / jnp.maximum(mask.sum(-1), 1)


def token_metric(x: Array, mask: Bool[Array, "B T"]) -> SumCount:
    """Returns (sum, tokens) of a value that carries no gradient."""
    return token_mean(jax.lax.stop_gradient(x).astype(jnp.float32), mask)
