"""Log-probs from hidden states: of given tokens, of the top k, at given ids; never [B, C, V].

Everywhere: hidden [B, C, D] is the state that predicts the token (shifted by the caller), head [V,
D] the LM head or the tied embedding, logits = hidden @ head.T / temperature in float32; with a
softcap c they are c tanh(hidden @ head.T / c) / temperature. `options` are `LogitOptions`. On a
mesh rows are split over (data, fsdp), their tokens over context and the vocabulary over tensor;
sizes that the mesh does not divide are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.cells import (
    LEFT_OUT,
    LONGER,
    Borders,
    InCells,
    Side,
    check_cells,
    is_left_out,
)
from jaxrl.losses.chunked import measure, tiled
from jaxrl.losses.divergence import MIN
from jaxrl.losses.layout import (
    FrozenInputs,
    LogitOptions,
    OneOrMore,
    PerToken,
    ShardedTerm,
    ShardOptions,
    Softcap,
    Term,
    TokenStats,
    fit_head,
    fit_rows,
    frozen_inputs,
    masked_rows,
    models_of,
    shard_term,
)
from jaxrl.losses.mixture import OfMixture, TeacherMixture
from jaxrl.losses.vocabulary import VocabShard, with_tail
from jaxrl.types import Array, Continues, Tree


class TopK(NamedTuple):
    """The K most probable tokens of each position, the most probable first."""

    ids: Int[Array, "B C K"]
    logprobs: Float[Array, "B C K"]
    """Nats."""
    tail_logprob: Float[Array, "B C"]
    """Nats: log of the probability of all other tokens; -1e30 where there are none."""
    entropy: Float[Array, "B C"]
    """Nats, of the full distribution."""


def logprobs_from_hidden(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    *,
    mask: Bool[Array, "B C"] | None = None,
    **options: Unpack[LogitOptions],
) -> Float[Array, "B C"]:
    """log pi(token), nats; -1e30 for a token that has no row.

    Differentiable with respect to hidden and head. Its backward computes the logits again, a tile
    of the vocabulary at a time, so nothing of size V is kept for it.

    Args:
        mask: where False, hidden may hold anything, NaN included: the values there mean nothing,
            and no gradient comes from them.
    """
    term, each = _TokenLogprob(entropy=False), {"ids": tokens}
    return _of_tokens(term, hidden, head, each, mask, **options)["logprobs"]


def logprobs_and_entropy_from_hidden(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    *,
    mask: Bool[Array, "B C"] | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """`logprobs_from_hidden`, and the entropy of each position in nats; both differentiable."""
    term, each = _TokenLogprob(entropy=True), {"ids": tokens}
    found = _of_tokens(term, hidden, head, each, mask, **options)
    return found["logprobs"], found["entropy"]


class PathLogprobs(NamedTuple):
    """Log-probs of tokens on the path that a text was cut into, nats."""

    conditional: Float[Array, "B C"]
    """log pi(token | first), where the token is one of a set that is known already."""
    extra: Float[Array, "B C"]
    """log of what all tokens that begin with it have, minus log pi(token); at least 0."""
    whole: Float[Array, "B C"]
    """log pi(token). No gradient."""
    known: Float[Array, "B C"]
    """log pi(given). No gradient."""


def path_logprobs_from_hidden(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    side: Side,
    bits: Int[Array, " cells"],
    first: Int[Array, "B C"],
    given: Int[Array, "B C"],
    ends: Int[Array, "B C"],
    left_out: Int[Array, "B C W"],
    *,
    mask: Bool[Array, "B C"] | None = None,
    **options: Unpack[LogitOptions],
) -> PathLogprobs:
    """What `losses.stretches` needs of a model's log-probs. Differentiable.

    Args:
        side, bits: of this model's tokens (`losses.cells`).
        first: the cell that a token is known to be of, `LEFT_OUT` or `LONGER` less a cell; -1 where
            nothing is known.
        given: the same, for `known`.
        ends: `Continues`; where it is `Continues.NONE`, `extra` is 0.
        left_out: bits of cells.
        mask: as of `logprobs_from_hidden`.
    """
    side, bits = jax.tree.map(jnp.asarray, (side, bits))
    last = jnp.where(ends == Continues.NONE, side.rank[tokens], side.last[tokens])
    each = {
        "ids": tokens,
        "first": first,
        "given": given,
        "low": side.rank[tokens],
        "high": last,
        "of": jnp.where(ends == Continues.OF_A_CELL, side.cells[tokens], -1),
        "left_out": left_out,
    }
    columns = side.cells, side.rank, side.common, bits[jnp.minimum(side.cells, len(bits) - 1)]
    values = _of_tokens(_PathLogprobs(), hidden, head, each, mask, columns, **options)
    found = PathLogprobs(**values)
    whole, known = jax.lax.stop_gradient((found.whole, found.known))
    return found._replace(whole=whole, known=known)


def topk_from_hidden(
    hidden: Float[Array, "B C D"] | Sequence[Array],
    head: Float[Array, "V D"] | Sequence[Array],
    k: int,
    *,
    mixture: TeacherMixture | None = None,
    borders: Borders | None = None,
    **options: Unpack[LogitOptions],
) -> TopK:
    """What a teacher ships for the `topk` signal, or a student for `student_topk`. No gradient.

    Args:
        hidden, head: of several teachers, one for each.
        mixture: combines several teachers.
        borders: of a teacher with another vocabulary: ids and probabilities are then of cells.
            `teacher` has the `open` of this model, and `student` is not read.
    """
    if borders is None:
        values = _measured(_TopK(k), hidden, head, {}, mixture, **options)
    else:
        cells, term = borders.cells, InCells(_TopK(k), borders.cells.size)
        tokens = {"left_out": borders.left_out, "open": borders.teacher}
        columns = jnp.asarray(cells.teacher.cells), None, jnp.asarray(cells.bits)
        values = _measured(term, hidden, head, tokens, mixture, columns, **options)
    return TopK(values["ids"], values["logprobs"], values["tail"], values["entropy"])


def logprobs_at(
    hidden: Float[Array, "B C D"] | Sequence[Array],
    head: Float[Array, "V D"] | Sequence[Array],
    ids: Int[Array, "B C K"],
    *,
    mixture: TeacherMixture | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Float[Array, "B C K"], Float[Array, "B C"]]:
    """Log-probs of K distinct ids, and of all other tokens together, in nats. No gradient.

    The teacher's answer to the student's top k (`student_topk`). Arguments as of
    `topk_from_hidden`.
    """
    values = _measured(_AtIds(), hidden, head, {"ids": ids}, mixture, **options)
    return values["logprobs"], values["tail"]


def full_entropy(
    z: Float[Array, "n size"], lse: Float[Array, " n"], columns: VocabShard
) -> Float[Array, " n"]:
    """Entropy of softmax(z), nats."""
    logprobs = z - lse[:, None]
    return -columns.total(jnp.exp(logprobs) * logprobs)


@dataclass(frozen=True)
class _TokenLogprob(Term):
    """Log-prob of one token of each position, and the entropy where asked (else 0)."""

    entropy: bool

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        lse = columns.logsumexp(z)
        logprobs = columns.at(z, tokens["ids"][:, None])[:, 0] - lse
        entropy = full_entropy(z, lse, columns) if self.entropy else jnp.zeros_like(lse)
        values = {"logprobs": logprobs, "entropy": entropy}
        return TokenStats(values, {"lse": lse, "entropy": entropy})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """g (1[token] - pi) for the log-prob, -g pi (log pi + H) for the entropy."""
        logprobs = z - saved["lse"][:, None]
        factor = tokens["d_logprobs"][:, None]
        if self.entropy:
            factor = factor + tokens["d_entropy"][:, None] * (logprobs + saved["entropy"][:, None])
        dz = -jnp.exp(logprobs) * factor
        return columns.add(dz, tokens["ids"][:, None], tokens["d_logprobs"][:, None])


@dataclass(frozen=True)
class _PathLogprobs(Term):
    """The three values of `PathLogprobs`."""

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        own = columns.at(z, tokens["ids"][:, None])[:, 0]
        first, given, ends = (_members(tokens, name) for name in ("first", "given", "ends"))
        chosen = columns.logsumexp(jnp.where(first, z, MIN))
        more, every = columns.logsumexp(jnp.where(ends, z, MIN)), columns.logsumexp(z)
        known = columns.logsumexp(jnp.where(given, z, MIN))
        values = {"conditional": own - chosen, "extra": more - own}
        values |= {"whole": own - every, "known": known - every}
        return TokenStats(values, {"chosen": chosen, "more": more})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """g (1[token] - pi(. | first)) for the first, g (pi(. | ends) - 1[token]) for the
        second."""

        def shares(name: str, total: str) -> Array:
            return jnp.where(_members(tokens, name), jnp.exp(z - saved[total][:, None]), 0)

        given, added = tokens["d_conditional"], tokens["d_extra"]
        dz = added[:, None] * shares("ends", "more") - given[:, None] * shares("first", "chosen")
        return columns.add(dz, tokens["ids"][:, None], (given - added)[:, None])


def _members(tokens: PerToken, name: str) -> Array:
    """[n, size] bool: the tokens of one of the sets of `PathLogprobs`."""
    cells, rank, common, bits = tokens["cells"]
    if name == "ends":
        of = tokens["of"][:, None]
        begin = (rank[None] >= tokens["low"][:, None]) & (rank[None] <= tokens["high"][:, None])
        return begin & ((cells[None] == of) | (of < 0))
    code = tokens[name][:, None]
    longer = code <= LONGER
    known = cells[None] == jnp.where(longer, LONGER - code, code)
    known &= ~longer | (common == 0)[None]
    return jnp.where(code == LEFT_OUT, is_left_out(tokens["left_out"], bits), known | (code == -1))


@dataclass(frozen=True)
class _TopK(Term):
    k: int

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        if not 0 < self.k <= columns.vocab:
            raise ValueError(
                f"top-k is {self.k}; the vocabulary has {columns.vocab} tokens: 1 to"
                f" {columns.vocab}"
            )
        lse = columns.logsumexp(z)
        _, ids = columns.topk(z, self.k)
        outcomes, _ = with_tail(z, lse, ids, columns)
        values = {"ids": ids, "logprobs": outcomes[:, :-1], "tail": outcomes[:, -1]}
        return TokenStats(values | {"entropy": full_entropy(z, lse, columns)}, {})


@dataclass(frozen=True)
class _AtIds(Term):
    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        outcomes, _ = with_tail(z, columns.logsumexp(z), tokens["ids"], columns)
        return TokenStats({"logprobs": outcomes[:, :-1], "tail": outcomes[:, -1]}, {})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_values(
    sharded: ShardedTerm, hidden: Array, head: Array, given: FrozenInputs
) -> PerToken:
    return measure(sharded, hidden, head, given).values


def _token_forward(
    sharded: ShardedTerm, hidden: Array, head: Array, given: FrozenInputs
) -> tuple[PerToken, Tree]:
    values, saved = measure(sharded, hidden, head, given)
    return values, (hidden, head, given, saved)


def _token_backward(
    sharded: ShardedTerm, kept: Tree, cotangents: PerToken
) -> tuple[Array, Array, None]:
    hidden, head, given, saved = kept
    tokens = given.tokens | {f"d_{name}": value for name, value in cotangents.items()}
    return *tiled(sharded, hidden, head, given._replace(tokens=tokens), saved), None


_token_values.defvjp(_token_forward, _token_backward)


def _of_tokens(
    term: Term,
    hidden: Array,
    head: Array,
    tokens: PerToken,
    mask: Array | None,
    columns: tuple[Array, ...] | None = None,
    *,
    temperature: float | Array = 1.0,
    softcap: Softcap = None,
    **options: Unpack[ShardOptions],
) -> PerToken:
    """The term's values, differentiable.

    Args:
        tokens: what the term knows of each token: its id under "ids", and more.
        columns: what it knows of each token of the vocabulary.
    """
    sharded = shard_term(term, (hidden, head), **options)
    b, c = tokens["ids"].shape
    mask = jnp.ones((b, c), bool) if mask is None else mask
    hidden = fit_rows(sharded, masked_rows(hidden, mask))
    cells = columns and tuple(fit_head(sharded, x) for x in columns)
    given = frozen_inputs(sharded, mask, tokens, temperature, (softcap,), cells=cells)
    values = _token_values(sharded, hidden, fit_head(sharded, head), given)
    return jax.tree.map(lambda x: x[:b, :c], values)


def _measured(
    term: Term,
    hidden: OneOrMore,
    head: OneOrMore,
    tokens: PerToken,
    mixture: TeacherMixture | None,
    columns: tuple[Array | None, ...] | None = None,
    *,
    temperature: float | Array = 1.0,
    softcap: Softcap | Sequence[Softcap] = None,
    **options: Unpack[ShardOptions],
) -> PerToken:
    """The term's values on one model's logits, or on those of a mixture. No gradient.

    Args:
        columns: what the term knows of each token of the vocabulary.
    """
    models = jax.lax.stop_gradient(models_of(hidden, head))
    sharded = shard_term(term, *models, **options)
    if columns is not None:
        check_cells(sharded)
    if mixture is not None:
        sharded = replace(sharded, term=OfMixture(term, mixture.kind))
        tokens = tokens | {"weights": mixture.weights}
    (first, kernel), *others = models
    b, c = first.shape[:2]
    caps = softcap if isinstance(softcap, Sequence) else (softcap,)
    mask = jnp.ones((b, c), bool)
    given = frozen_inputs(sharded, mask, tokens, temperature, caps, others, columns)
    values = measure(sharded, fit_rows(sharded, first), fit_head(sharded, kernel), given).values
    return jax.tree.map(lambda x: x[:b, :c], values)
