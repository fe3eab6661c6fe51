"""Log-probs from hidden states: of given tokens, of the top k, at given ids; never [B, C, V].

Everywhere: hidden [B, C, D] is the state that predicts the token (shifted by the caller), head [V,
D] the LM head or the tied embedding, logits = hidden @ head.T / temperature in float32; with a
softcap c they are c tanh(hidden @ head.T / c) / temperature. `options` are `LogitOptions`;
`losses/layout.py` says what a mesh splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.chunked import measure, tiled
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
    models_of,
    shard_term,
)
from jaxrl.losses.mixture import OfMixture, TeacherMixture
from jaxrl.losses.vocabulary import VocabShard, with_tail
from jaxrl.types import Array, Tree


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
    """Computes log pi(token), nats; -1e30 for a token that has no row.

    Differentiable with respect to hidden and head. Its backward computes the logits again, a tile
    of the vocabulary at a time, so nothing of size V is kept for it.

    Args:
        mask: where False, hidden may hold anything, NaN included: the values there mean nothing,
            and no gradient comes from them.
    """
    term = _TokenLogprob(entropy=False)
    return token_values(term, hidden, head, {"ids": tokens}, mask, **options)["logprobs"]


def logprobs_and_entropy_from_hidden(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    *,
    mask: Bool[Array, "B C"] | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Float[Array, "B C"], Float[Array, "B C"]]:
    """Computes `logprobs_from_hidden`, and the entropy of each position in nats; both
    differentiable."""
    term, each = _TokenLogprob(entropy=True), {"ids": tokens}
    found = token_values(term, hidden, head, each, mask, **options)
    return found["logprobs"], found["entropy"]


def topk_from_hidden(
    hidden: Float[Array, "B C D"] | Sequence[Array],
    head: Float[Array, "V D"] | Sequence[Array],
    k: int,
    *,
    mixture: TeacherMixture | None = None,
    **options: Unpack[LogitOptions],
) -> TopK:
    """Computes what a teacher ships for the `topk` signal, or a student for `student_topk`. No
    gradient.

    Args:
        hidden, head: of several teachers, one for each.
        mixture: combines several teachers.
    """
    values = term_values(TopKTerm(k), hidden, head, {}, mixture, **options)
    return TopK(values["ids"], values["logprobs"], values["tail"], values["entropy"])


def logprobs_at(
    hidden: Float[Array, "B C D"] | Sequence[Array],
    head: Float[Array, "V D"] | Sequence[Array],
    ids: Int[Array, "B C K"],
    *,
    mixture: TeacherMixture | None = None,
    **options: Unpack[LogitOptions],
) -> tuple[Float[Array, "B C K"], Float[Array, "B C"]]:
    """Computes the log-probs of K distinct ids, and of all other tokens together, in nats. No
    gradient.

    The teacher's answer to the student's top k (`student_topk`). Arguments as of
    `topk_from_hidden`.
    """
    values = term_values(_AtIds(), hidden, head, {"ids": ids}, mixture, **options)
    return values["logprobs"], values["tail"]


def full_entropy(
    z: Float[Array, "n size"], lse: Float[Array, " n"], columns: VocabShard
) -> Float[Array, " n"]:
    """Computes the entropy of softmax(z), nats."""
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
        """Computes g (1[token] - pi) for the log-prob, -g pi (log pi + H) for the entropy."""
        logprobs = z - saved["lse"][:, None]
        factor = tokens["d_logprobs"][:, None]
        if self.entropy:
            factor = factor + tokens["d_entropy"][:, None] * (logprobs + saved["entropy"][:, None])
        dz = -jnp.exp(logprobs) * factor
        return columns.add(dz, tokens["ids"][:, None], tokens["d_logprobs"][:, None])


@dataclass(frozen=True)
class TopKTerm(Term):
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


def token_values(
    term: Term,
    hidden: Array,
    head: Array,
    tokens: PerToken,
    mask: Array | None,
    outcomes: tuple[Array, ...] | None = None,
    *,
    temperature: float | Array = 1.0,
    softcap: Softcap = None,
    **options: Unpack[ShardOptions],
) -> PerToken:
    """Returns the term's values, differentiable.

    Args:
        tokens: what the term knows of each token: its id under "ids", and more.
        outcomes: as of `FrozenInputs`.
    """
    sharded = shard_term(term, (hidden, head), **options)
    b, c = tokens["ids"].shape
    mask = jnp.ones((b, c), bool) if mask is None else mask
    # 0 * NaN is NaN: what stands where masked must not reach the head's gradient.
    hidden = fit_rows(sharded, jnp.where(mask[..., None], hidden, 0))
    outcomes = outcomes and tuple(fit_head(sharded, jnp.asarray(x)) for x in outcomes)
    given = frozen_inputs(sharded, mask, tokens, temperature, (softcap,), outcomes=outcomes)
    values = _token_values(sharded, hidden, fit_head(sharded, head), given)
    return jax.tree.map(lambda x: x[:b, :c], values)


def term_values(
    term: Term,
    hidden: OneOrMore,
    head: OneOrMore,
    tokens: PerToken,
    mixture: TeacherMixture | None = None,
    outcomes: tuple[Array | None, ...] | None = None,
    *,
    temperature: float | Array = 1.0,
    softcap: Softcap | Sequence[Softcap] = None,
    **options: Unpack[ShardOptions],
) -> PerToken:
    """Computes the term's values on one model's logits, or on those of a mixture. No gradient.

    Args:
        outcomes: as of `FrozenInputs`.
    """
    models = jax.lax.stop_gradient(models_of(hidden, head))
    sharded = shard_term(term, *models, **options)
    if mixture is not None:
        sharded = replace(sharded, term=OfMixture(term, mixture.kind))
        tokens = tokens | {"weights": mixture.weights}
    (first, kernel), *others = models
    b, c = first.shape[:2]
    caps = softcap if isinstance(softcap, Sequence) else (softcap,)
    mask = jnp.ones((b, c), bool)
    given = frozen_inputs(sharded, mask, tokens, temperature, caps, others, outcomes)
    values = measure(sharded, fit_rows(sharded, first), fit_head(sharded, kernel), given).values
    return jax.tree.map(lambda x: x[:b, :c], values)
