"""The next token of two vocabularies in common outcomes.

Both vocabularies are cut into the same *cells*. A token that both have is a cell; every other token
is in the cell of the longest common token that it begins with: where one model says "88" and the
other "8" and then "8", both are in the cell "8". So a cell stands for the beginning of the text,
whichever way it is spelt, and the divergence over cells does not ask the student for the teacher's
spelling, as one over common tokens and a bucket of all others would. Within a cell the student's
tokens keep their shares: the gradient by their logits is the cell's, in these shares.

After a token "8", a model that has a token "88" hardly says "8" again: it would have said "88". Its
next token is distributed as what follows a text "8" that it has not continued in the same token.
Of a text x that was cut into the tokens t_1 ... t_n, the model's probability that a text begins
with x is (`data.alignment` chooses x such that no other path has a share)

    F(x) = p(t_1) ... p(t_{n-1}) sum of p(u) over all tokens u that begin with t_n,

and log F(x) - log p(t_1 ... t_n) = `open` >= 0 is by how much more probable it is than its path. A
cell c that no such u would have reached follows x with the probability F(xc) / F(x) = p(c) /
exp(open). The cells that some u of either model may have reached are *left out*: they are one
outcome, which has all the rest, as joined tokens or after t_n. These are the same events of the
text for both models, and where both spell the same distribution of texts the divergence is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.layout import PerToken, ShardedTerm, Term, TokenStats
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.types import Array

LEAST = math.log(1e-8)
"""Least log-prob of the cell of tokens that begin with no common one. A teacher may have no such
token; then a divergence from a student which has some would be infinite."""
_TINY = 1e-37
_LARGEST = 60.0
"""Largest `open`, and largest gap of two log-probs, nats: e^60 is still a float32."""

OTHERS, NEVER, WORDS = 256, 257, 9
"""Cells are left out by the first byte of their tokens: the number of the cell of tokens that begin
with no common one, of those that are no text, and of 32-bit words that have a bit for each."""


LEFT_OUT, LONGER = -2, -3
"""In place of a cell: one of those that are left out, whichever; and `LONGER - c`: a token of the
cell c that is not c itself."""


class Side(NamedTuple):
    """The tokens of one vocabulary."""

    cells: Int[Array, " V"]
    """Cell of each."""
    rank: Int[Array, " V"]
    """Its place among all in the order of their bytes."""
    last: Int[Array, " V"]
    """Rank of the last token that begins with it."""
    common: Int[Array, " V"]
    """1 for the tokens that cells are named by, else 0."""


class Cells(NamedTuple):
    """The number of a cell is the student's id of the common token, or V where a token begins with
    none; the tokens of a teacher in cells beyond V are left out."""

    student: Side
    teacher: Side
    bits: Int[Array, " V+2"]
    """For each cell its bit in what is left out."""

    @property
    def size(self) -> int:
        """V + 1."""
        return len(self.bits) - 1


class Borders(NamedTuple):
    """The cells, and what is known of the texts before the tokens of a batch."""

    cells: Cells
    left_out: Int[Array, "B C W"]
    """int32: bits of the cells that are left out."""
    student: Float[Array, "B C"]
    """Nats: `open` of the student; a gradient flows here."""
    teacher: Float[Array, "B C"] | None = None
    """Of the teacher, where its hidden states are sent."""


def check_cells(sharded: ShardedTerm) -> None:
    """Raises ValueError where a device has a part of a vocabulary only."""
    if sharded.lean or sharded.size("tensor") > 1:
        raise ValueError(
            "a loss over cells needs all logits of a token at once: neither lean nor a mesh with"
            f" tensor={sharded.size('tensor')}"
        )


def is_left_out(left_out: Int[Array, "n W"], bits: Int[Array, " size"]) -> Bool[Array, "n size"]:
    """Whether what has these bits is left out at each of n tokens."""
    return (left_out[:, bits >> 5] >> (bits & 31)[None]) & 1 == 1


def opened(extra: Float[Array, "B C"], left_out: Int[Array, "B C W"]) -> Float[Array, "B C"]:
    """`open` before each token, from that after each, of completions one after the other."""
    before = jnp.roll(extra, 1, -1)
    return jnp.where((left_out != 0).any(-1), jnp.minimum(before, _LARGEST), 0)


@dataclass(frozen=True)
class InCells(Term):
    """A term over cells: its logits are the logsumexps of the logits of their tokens; the last one
    is that of the outcome of all cells left out. Its value "open" is the slope of a loss by the
    student's `open`."""

    term: Term
    count: int

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        cells, _, inner, every = self._cells(z, tokens)
        found = self.term.measure(cells, inner, every)
        if "loss" not in found.values:
            return found
        slope = self.term.gradient(cells, inner, found.saved, every)[:, -1]
        # Where nothing is left out the last one's probability is 1e-37, and what is open stays 0.
        over = jnp.minimum(jax.nn.logsumexp(cells, -1) - cells[:, -1], _LARGEST)
        return TokenStats(found.values | {"open": slope * jnp.exp(over)}, found.saved)

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        cells, out, inner, every = self._cells(z, tokens)
        slope = self.term.gradient(cells, inner, saved, every)
        mine = tokens["cells"][0]
        left_out = out.T[mine].T
        own = jnp.where(left_out, 0, slope.T[mine].T * jnp.exp(z - cells.T[mine].T))
        joined = jnp.expm1(tokens["open"])[:, None]
        return own + slope[:, -1:] * jnp.exp(z - cells[:, -1:]) * (left_out + joined)

    def _cells(self, z: Array, tokens: PerToken) -> tuple[Array, Array, PerToken, VocabShard]:
        """Logits of cells [n, count + 1], which cells [n, count] are left out, and the term's
        tokens and columns."""
        mine, theirs, bits = tokens["cells"]
        out = is_left_out(tokens["left_out"], bits[: self.count])
        given = {"cells", "left_out", "open", "their_open"}
        inner = {name: value for name, value in tokens.items() if name not in given}
        if "teacher_z" in inner:
            inner["teacher_z"] = tuple(
                self._summed(one, theirs, out, tokens["their_open"]) for one in inner["teacher_z"]
            )
        size = self.count + 1
        every = VocabShard(0, size, size, padded=False)
        return self._summed(z, mine, out, tokens["open"]), out, inner, every

    def _summed(
        self,
        z: Float[Array, "n size"],
        cells: Int[Array, " size"],
        out: Bool[Array, "n count"],
        open: Float[Array, " n"],
    ) -> Float[Array, "n count+1"]:
        # Cells are rows while they are summed up: each token adds a row of n numbers.
        peak = z.max(-1)
        sums = jnp.zeros((self.count, len(z)), z.dtype)
        sums = sums.at[cells].add(jnp.exp(z - peak[:, None]).T, mode="drop")
        rest = jnp.where(out.T, sums, 0).sum(0) + sums.sum(0) * jnp.expm1(open)
        sums = jnp.concatenate([jnp.where(out.T, 0, sums), rest[None]])
        logits = peak[:, None] + jnp.log(jnp.maximum(sums, _TINY)).T
        least = jax.nn.logsumexp(logits, -1) + LEAST
        return logits.at[:, -2].max(least)
