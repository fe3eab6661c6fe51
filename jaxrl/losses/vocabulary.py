"""Logits of a slice of the vocabulary: what one device, or one tile of one device, sees.

Columns of a logits array stand for consecutive token ids. The rest of the vocabulary may lie on
other devices (mesh axis `tensor`): sums, maxima and look-ups by id then reduce over that axis. An
id of another slice is never looked up on, or added to, a row of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.losses.divergence import MIN


@dataclass(frozen=True)
class VocabShard:
    """The token ids `start` ... `start + size - 1`, as columns of a logits array."""

    start: Array | int
    size: int
    vocab: int
    """V: columns of ids from V on are padding and hold `MIN`."""
    padded: bool
    """Whether there may be such columns."""
    axes: tuple[str, ...] = ()
    """Mesh axes over which the other slices are spread."""

    def logits(
        self,
        hidden: Float[Array, "n D"],
        rows: Float[Array, "size D"],
        scale: Float[Array, ""],
        softcap: Float[Array, ""] | None = None,
    ) -> Float[Array, "n size"]:
        """Computes hidden @ rows.T * scale, accumulated in float32 whatever the dtype of the
        operands.

        Args:
            softcap: c > 0: the product z is replaced by c tanh(z / c) before it is scaled
                (Gemma 2, arXiv 2408.00118, section 2).
        """
        z = jax.lax.dot_general(
            hidden, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        if softcap is not None:
            z = softcap * jnp.tanh(z / softcap)
        z = scale * z
        if not self.padded:
            return z
        return jnp.where((self.start + jnp.arange(self.size) < self.vocab)[None, :], z, MIN)

    def total(self, x: Float[Array, "n size"]) -> Float[Array, " n"]:
        return jax.lax.psum(x.sum(-1), self.axes)

    def peak(self, x: Float[Array, "n size"]) -> Float[Array, " n"]:
        return jax.lax.pmax(x.max(-1), self.axes)

    def logsumexp(self, z: Float[Array, "n size"]) -> Float[Array, " n"]:
        peak = self.peak(z)
        return peak + jnp.log(self.total(jnp.exp(z - peak[:, None])))

    def at(self, z: Float[Array, "n size"], ids: Int[Array, "n K"]) -> Float[Array, "n K"]:
        """Returns the values at token ids; `MIN` for an id that no slice has."""
        local = self._local(ids)
        found = jnp.take_along_axis(z, jnp.minimum(local, self.size - 1), -1)
        return jax.lax.pmax(jnp.where(local < self.size, found, MIN), self.axes)

    def without(self, z: Float[Array, "n size"], ids: Int[Array, "n K"]) -> Float[Array, "n size"]:
        """Returns `z` with `MIN` at the token ids."""
        return z.at[jnp.arange(z.shape[0])[:, None], self._local(ids)].set(MIN, mode="drop")

    def add(
        self, z: Float[Array, "n size"], ids: Int[Array, "n K"], values: Float[Array, "n K"]
    ) -> Float[Array, "n size"]:
        """Returns `z` with `values` added at the token ids."""
        return z.at[jnp.arange(z.shape[0])[:, None], self._local(ids)].add(values, mode="drop")

    def topk(self, z: Float[Array, "n size"], k: int) -> tuple[Array, Array]:
        """Finds the k largest values and their token ids, largest first, and the smaller id first
        among equals."""
        values, ids = jax.lax.top_k(z, min(k, self.size))
        ids = ids + self.start
        if not self.axes:
            return values, ids
        values = jax.lax.all_gather(values, self.axes, axis=1, tiled=True)
        ids = jax.lax.all_gather(ids, self.axes, axis=1, tiled=True)
        values, winners = jax.lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, winners, -1)

    def _local(self, ids: Int[Array, "n K"]) -> Int[Array, "n K"]:
        """Returns the column of each id; `size`, which is out of bounds, for the ids of other
        slices."""
        local = ids - self.start
        return jnp.where((local >= 0) & (local < self.size), local, self.size)


def with_tail(
    z: Float[Array, "n size"], lse: Float[Array, " n"], ids: Int[Array, "n K"], columns: VocabShard
) -> tuple[Float[Array, "n K+1"], Float[Array, " n"]]:
    """Computes the log-probs of the K ids and, last, of all others together; and the logsumexp of
    the others."""
    others = columns.logsumexp(columns.without(z, ids))
    tail = jnp.maximum(others - lse, MIN)
    return jnp.concatenate([columns.at(z, ids) - lse[:, None], tail[:, None]], -1), others


def spread_tail(
    z: Float[Array, "n size"],
    ids: Int[Array, "n K"],
    gradient: Float[Array, "n K+1"],
    others: Float[Array, " n"],
    columns: VocabShard,
) -> Float[Array, "n size"]:
    """Computes the gradient with respect to the logits from `gradient`, the one with respect to the
    logits of `with_tail`'s outcomes.

    A listed token takes its own; the others share the tail's by their probability within the tail.
    """
    share = jnp.exp(columns.without(z, ids) - others[:, None])
    return columns.add(share * gradient[:, -1:], ids, gradient[:, :-1])
