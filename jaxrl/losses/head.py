"""Log-probs from hidden states: of given tokens, of the top k, at given ids; never [B, C, V].
The states are those of one model, or of several teachers that are combined.

Everywhere: hidden [B, C, D] is the state that predicts the token (shifted by the caller), head [V,
D] the LM head or the tied embedding, logits = hidden @ head.T / temperature in float32; with a
softcap c they are c tanh(hidden @ head.T / c) / temperature. `options` are `LogitOptions`;
`losses/chunked.py` says what a mesh splits.

The next-token distributions P_k of several teachers are combined by weights of each token:

| kind | combined distribution P, for weights w_k that sum to 1 |
|---|---|
| arithmetic | sum_k w_k P_k: a mixture, as if one of the teachers were drawn |
| geometric | proportional to prod_k P_k ** w_k: their logits averaged |

Where one weight is 1, either kind gives that teacher; geometric gives its log-probs bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.losses.chunked import (
    FrozenInputs,
    LogitOptions,
    PerToken,
    ShardedTerm,
    Term,
    TokenStats,
    VocabShard,
    add_tail,
    shard_inputs,
    tiled_gradients,
    token_stats,
)
from jaxrl.losses.divergence import MIN
from jaxrl.losses.normaliser import Normaliser
from jaxrl.types import Array, Tree

Logits = tuple[Float[Array, "n size"], ...]
"""One array for each teacher."""


class TeacherMixture(NamedTuple):
    """How the teachers of each token are combined."""

    kind: MixtureKind
    weights: Float[Array, "B C K"]
    """float32, at least 0; they sum to 1 at each token that counts."""


def normalisers(kind: MixtureKind, logits: Logits, columns: VocabShard) -> Normaliser:
    """Computes the normalisers [n, K] of teachers' logits over the whole vocabulary; of the kind
    geometric, to which constants do not matter, with a log_sum of 0."""
    if kind == "arithmetic":
        by_teacher = [columns.normaliser(z) for z in logits]
    else:
        peaks = [columns.peak(z) for z in logits]
        by_teacher = [Normaliser(peak, jnp.zeros_like(peak)) for peak in peaks]
    return Normaliser(*(jnp.stack(parts, -1) for parts in zip(*by_teacher, strict=True)))


def mixture_logits(
    kind: MixtureKind,
    logits: Logits,
    weights: Float[Array, "n K"],
    normaliser: Normaliser,
    columns: VocabShard,
) -> tuple[Float[Array, "n size"], VocabShard]:
    """Returns logits of the combined distribution, up to a constant for each token, and their
    columns: they are at the temperature. A teacher whose weight is 0 does not matter, whatever its
    logits.

    Args:
        normaliser: from `normalisers`, over the whole vocabulary; the logits may be a tile of it.
    """
    shares, logprobs = [], []
    for k, z in enumerate(logits):
        shares.append(weights[:, k, None])
        teacher = Normaliser(normaliser.peak[:, k], normaliser.log_sum[:, k])
        logprobs.append(columns.logprobs(z, teacher))
    if kind == "arithmetic":
        both = log_mixture(logprobs, shares)
    else:
        pairs = zip(shares, logprobs, strict=True)
        both = reduce(jnp.add, [jnp.where(w > 0, w * x, 0.0) for w, x in pairs])
    return both, replace(columns, scale=1.0)


def log_mixture(
    logprobs: Sequence[Float[Array, "*shape"]], weights: Sequence[Array]
) -> Float[Array, "*shape"]:
    """Computes log sum_k w_k P_k, nats, of jax or numpy arrays; about `MIN` where no weight is
    above 0.

    Args:
        logprobs: log P_k, nats.
        weights: w_k, of shapes that broadcast to those.
    """
    xp: Any = np if isinstance(logprobs[0], np.ndarray) else jnp
    with np.errstate(divide="ignore"):
        terms = [
            xp.where(w > 0, x + xp.log(w), MIN) for x, w in zip(logprobs, weights, strict=True)
        ]
    return reduce(xp.logaddexp, terms)


@dataclass(frozen=True)
class MixtureTerm(Term):
    """A term, without a gradient, on the logits of a mixture. The first teacher's logits are `z`,
    the others' are "teacher_z", and the weights are among the tokens as "weights"."""

    term: Term
    kind: MixtureKind

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        logits = (z, *tokens.get("teacher_z", ()))
        normaliser = normalisers(self.kind, logits, columns)
        both, columns = mixture_logits(self.kind, logits, tokens["weights"], normaliser, columns)
        return self.term.measure(both, tokens, columns)


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
    term = _TokenLogprob(entropy=True)
    values = token_values(term, hidden, head, {"ids": tokens}, mask, **options)
    return values["logprobs"], values["entropy"]


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

    The teacher's answer to the student's top k (`student_topk`). Arguments as in
    `topk_from_hidden`.
    """
    values = term_values(_AtIds(), hidden, head, {"ids": ids}, mixture, **options)
    return values["logprobs"], values["tail"]


@dataclass(frozen=True)
class _TokenLogprob(Term):
    """Log-prob of one token of each position, and the entropy where asked (else 0)."""

    entropy: bool

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        normaliser = columns.normaliser(z)
        logprobs = columns.logprobs_at(z, normaliser, tokens["ids"][:, None])[:, 0]
        entropy = columns.entropy(z, normaliser) if self.entropy else jnp.zeros_like(logprobs)
        values = {"logprobs": logprobs, "entropy": entropy}
        return TokenStats(values, {"normaliser": normaliser, "entropy": entropy})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """Computes g (1[token] - pi) for the log-prob, -g pi (log pi + H) for the entropy."""
        logprobs = columns.logprobs(z, saved["normaliser"])
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
        normaliser = columns.normaliser(z)
        _, ids = columns.topk(z, self.k)
        outcomes, _ = add_tail(z, normaliser, ids, columns)
        values = {"ids": ids, "logprobs": outcomes[:, :-1], "tail": outcomes[:, -1]}
        return TokenStats(values | {"entropy": columns.entropy(z, normaliser)}, {})


@dataclass(frozen=True)
class _AtIds(Term):
    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        outcomes, _ = add_tail(z, columns.normaliser(z), tokens["ids"], columns)
        return TokenStats({"logprobs": outcomes[:, :-1], "tail": outcomes[:, -1]}, {})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_values(
    sharded: ShardedTerm, hidden: Array, head: Array, frozen: FrozenInputs
) -> PerToken:
    return token_stats(sharded, hidden, head, frozen).values


def _token_forward(
    sharded: ShardedTerm, hidden: Array, head: Array, frozen: FrozenInputs
) -> tuple[PerToken, Tree]:
    values, saved = token_stats(sharded, hidden, head, frozen)
    return values, (hidden, head, frozen, saved)


def _token_backward(
    sharded: ShardedTerm, kept: Tree, cotangents: PerToken
) -> tuple[Array, Array, None]:
    hidden, head, frozen, saved = kept
    tokens = frozen.tokens | {f"d_{name}": value for name, value in cotangents.items()}
    return *tiled_gradients(sharded, hidden, head, frozen._replace(tokens=tokens), saved), None


_token_values.defvjp(_token_forward, _token_backward)


def token_values(
    term: Term,
    hidden: Array,
    head: Array,
    tokens: PerToken,
    mask: Array | None,
    outcomes: tuple[Array, ...] | None = None,
    **options: Unpack[LogitOptions],
) -> PerToken:
    """Returns the term's values, differentiable.

    Args:
        tokens: what the term knows of each token: its id under "ids", and more.
        outcomes: as in `FrozenInputs`.
    """
    b, c = tokens["ids"].shape
    inputs = shard_inputs(term, [(hidden, head)], mask, tokens, outcomes, **options)
    values = _token_values(*inputs)
    return jax.tree.map(lambda x: x[:b, :c], values)


def term_values(
    term: Term,
    hidden: Array | Sequence[Array],
    head: Array | Sequence[Array],
    tokens: PerToken,
    mixture: TeacherMixture | None = None,
    outcomes: tuple[Array | None, ...] | None = None,
    **options: Unpack[LogitOptions],
) -> PerToken:
    """Computes the term's values on one model's logits, or on those of a mixture. No gradient.

    Args:
        outcomes: as in `FrozenInputs`.
    """
    models: list[tuple[Array, Array]] = [(hidden, head)]
    if isinstance(hidden, Sequence):
        models = list(zip(hidden, head, strict=True))
    models = jax.lax.stop_gradient(models)
    if mixture is not None:
        term, tokens = MixtureTerm(term, mixture.kind), tokens | {"weights": mixture.weights}
    values = token_stats(*shard_inputs(term, models, None, tokens, outcomes, **options)).values
    b, c = models[0][0].shape[:2]
    return jax.tree.map(lambda x: x[:b, :c], values)
