"""The next token of two vocabularies in common outcomes.

Both vocabularies are cut into the same *cells*. A token that both have is a cell; every other token
is in the cell of the longest common token that it begins with: where one model says "88" and the
other "8" and then "8", both are in the cell "8". So a cell stands for the beginning of the text,
whichever way it is spelt, and the divergence over cells does not ask the student for the teacher's
spelling, as one over common tokens and a bucket of all others would. Within a cell the student's
tokens keep their shares: the gradient by their logits is the cell's, in these shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl.losses.layout import PerToken, ShardedTerm, Term, TokenStats
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.types import Array

LEAST = math.log(1e-8)
"""Least log-prob of the cell of tokens that begin with no common one. A teacher may have no such
token; then a divergence from a student which has some would be infinite."""
_TINY = 1e-37


COMMON = -2
"""In place of a cell: the token that both have, where only the others of a cell are meant."""


class Cells(NamedTuple):
    """Cell of each token. The number of a cell is the student's id of the common token, or V where
    a token begins with none; the numbers of a teacher's tokens beyond V are left out."""

    student: Int[Array, " V"]
    teacher: Int[Array, " Vt"]
    size: int
    """V + 1."""


def check_cells(sharded: ShardedTerm) -> None:
    """Raises ValueError where a device has a part of a vocabulary only."""
    if sharded.lean or sharded.size("tensor") > 1:
        raise ValueError(
            "a loss over cells needs all logits of a token at once: neither lean nor a mesh with"
            f" tensor={sharded.size('tensor')}"
        )


@dataclass(frozen=True)
class InCells(Term):
    """A term over cells: its logits are the logsumexps of the logits of their tokens."""

    term: Term
    count: int

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        return self.term.measure(*self._cells(z, tokens))

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        cells, inner, all_cells = self._cells(z, tokens)
        slope = self.term.gradient(cells, inner, saved, all_cells)
        mine = tokens["cells"][0]
        return slope.T[mine].T * jnp.exp(z - cells.T[mine].T)

    def _cells(self, z: Array, tokens: PerToken) -> tuple[Array, PerToken, VocabShard]:
        """The arguments of the term in cells: logits, tokens and columns."""
        mine, theirs = tokens["cells"]
        inner = {name: value for name, value in tokens.items() if name != "cells"}
        if "teacher_z" in inner:
            inner["teacher_z"] = tuple(self._summed(one, theirs) for one in inner["teacher_z"])
        return self._summed(z, mine), inner, VocabShard(0, self.count, self.count, padded=False)

    def _summed(
        self, z: Float[Array, "n size"], cells: Int[Array, " size"]
    ) -> Float[Array, "n count"]:
        # Cells are rows while they are summed up: each token adds a row of n numbers.
        peak = z.max(-1)
        sums = jnp.zeros((self.count, len(z)), z.dtype)
        sums = sums.at[cells].add(jnp.exp(z - peak[:, None]).T, mode="drop")
        logits = peak[:, None] + jnp.log(jnp.maximum(sums, _TINY)).T
        least = jax.nn.logsumexp(logits, -1) + LEAST
        return logits.at[:, -1].max(least)
