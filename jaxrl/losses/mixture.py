"""Several teachers as one: their next-token distributions P_k, combined by weights of each token.

| kind | combined distribution P, for weights w_k that sum to 1 |
|---|---|
| arithmetic | sum_k w_k P_k: a mixture, as if one of the teachers were drawn |
| geometric | proportional to prod_k P_k ** w_k: their logits averaged |

Where one weight is 1, either kind gives that teacher; geometric gives its logits bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.losses.divergence import MIN
from jaxrl.losses.layout import PerToken, Term, TokenStats
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.types import Array

Logits = tuple[Float[Array, "n size"], ...]
"""Of each teacher."""


class TeacherMixture(NamedTuple):
    """How the teachers of each token are combined."""

    kind: MixtureKind
    weights: Float[Array, "B C K"]
    """float32, at least 0; they sum to 1 at each token that counts."""


def normalisers(kind: MixtureKind, logits: Logits, columns: VocabShard) -> PerToken:
    """Returns what `mixed` needs to know of the whole vocabulary: for the kind arithmetic `lses`
    [n, K], the logsumexp of each teacher's logits."""
    if kind == "geometric":
        return {}
    return {"lses": jnp.stack([columns.logsumexp(z) for z in logits], -1)}


def mixed(
    kind: MixtureKind, logits: Logits, weights: Float[Array, "n K"], normalised: PerToken
) -> Float[Array, "n size"]:
    """Returns logits of the combined distribution, up to a constant for each token. A teacher whose
    weight is 0 does not matter, whatever its logits.

    Args:
        normalised: from `normalisers`, over the whole vocabulary; the logits may be a tile of it.
    """
    each = [weights[:, k, None] for k in range(len(logits))]
    if kind == "geometric":
        products = [jnp.where(w > 0, w * z, 0.0) for w, z in zip(each, logits, strict=True)]
        return reduce(jnp.add, products)
    lses = normalised["lses"]
    return log_mixture([z - lses[:, k, None] for k, z in enumerate(logits)], each)


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
class OfMixture(Term):
    """A term, without a gradient, on the logits of a mixture. The first teacher's logits are `z`,
    the others' are "teacher_z", and the weights are among the tokens as "weights"."""

    term: Term
    kind: MixtureKind

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        logits = (z, *tokens.get("teacher_z", ()))
        normalised = normalisers(self.kind, logits, columns)
        both = mixed(self.kind, logits, tokens["weights"], normalised)
        return self.term.measure(both, tokens, columns)
