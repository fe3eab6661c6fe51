"""The loss from a teacher with another tokenizer.

`data.token_alignment` cuts a text into *spans*: one or more tokens of each model that stand for the
same bytes. The student learns from

1. the teacher's distribution at the beginning of each span, where both predict what follows the
   same text: the generalised JSD over *outcomes*. Each token that both vocabularies have is an
   outcome; every other token belongs to that of the longest common token that it begins with.
   Where one model says "88" and the other "8" and then "8", both are in the outcome "8": the loss
   does not ask for the teacher's spelling, as one over common tokens and a bucket of all others
   would. (ULD, arXiv 2402.12030, compares sorted probabilities, GOLD of TRL those of common tokens
   and the others sorted.) Tokens that begin with no common one are the last outcome. Within an
   outcome the student's tokens keep their shares.
2. each span of several tokens, as one action: KL(student || teacher) estimated by the sampled span,
   log Q - log P with the sums of its tokens' log-probs (`divergence.sampled_reverse_kl`). These
   sums are conserved: over all spans they are the log-prob of the text in either model's tokens.

A span of one token that both have needs no sample. Where all spans are such and the outcomes are
the tokens, this is the ordinary loss. It is an approximation where a model has a longer token that
would continue the text before a border: after "8", a model that has a token "88" hardly says "8"
again, and the loss teaches the student so (docs/limits.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from jaxrl.losses.aggregation import LossSums
from jaxrl.losses.distill import FullDivergence, TopKDivergence, divergence_sums
from jaxrl.losses.divergence import sampled_reverse_kl
from jaxrl.losses.head import TopKTerm, logprobs_from_hidden, term_values
from jaxrl.losses.layout import (
    LogitOptions,
    PerToken,
    ShardOptions,
    Softcap,
    Term,
    TokenStats,
    shard_term,
)
from jaxrl.losses.masked import masked_count, masked_sum
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.types import Aligned, AlignedSignal, Array, Sums, TokenAlignment

LEAST = math.log(1e-8)
"""Least log-prob of the last outcome. A teacher may have no token in it; then the divergence from a
student that has some would be infinite."""
TINY = 1e-37  # the smallest normal float32, about


class Outcomes(NamedTuple):
    """The outcome of each token. Its number is the student's id of the common token, or V for those
    that begin with none; a teacher's tokens beyond V are left out."""

    student: Int[Array, " V"]
    teacher: Int[Array, " Vt"]

    @property
    def size(self) -> int:
        """Returns V + 1, the number of outcomes."""
        return len(self.student) + 1


@dataclass(frozen=True)
class OverOutcomes(Term):
    """A term over outcomes: each one's logit is the logsumexp of the logits of its tokens."""

    term: Term
    count: int

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        return self.term.measure(*self._merged(z, tokens))

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """Returns the outcome's gradient, in its tokens' shares of its probability."""
        merged, inner, every = self._merged(z, tokens)
        slope = self.term.gradient(merged, inner, saved, every)
        student, _ = tokens["outcomes"]
        return slope.T[student].T * jnp.exp(z - merged.T[student].T)

    def _merged(self, z: Array, tokens: PerToken) -> tuple[Array, PerToken, VocabShard]:
        """Returns the logits of outcomes [n, count], and the inner term's tokens and columns."""
        student, teacher = tokens["outcomes"]
        inner = {name: value for name, value in tokens.items() if name != "outcomes"}
        if "teacher_z" in inner:
            inner["teacher_z"] = tuple(self._sums(one, teacher) for one in inner["teacher_z"])
        every = VocabShard(0, self.count, self.count, padded=False)
        return self._sums(z, student), inner, every

    def _sums(
        self, z: Float[Array, "n size"], outcomes: Int[Array, " size"]
    ) -> Float[Array, "n count"]:
        # Outcomes are rows while they are summed up: each token adds a row of n numbers.
        peak = z.max(-1)
        sums = jnp.zeros((self.count, len(z)), z.dtype)
        sums = sums.at[outcomes].add(jnp.exp(z - peak[:, None]).T, mode="drop")
        logits = peak[:, None] + jnp.log(jnp.maximum(sums, TINY)).T
        least = jax.nn.logsumexp(logits, -1) + LEAST
        return logits.at[:, -1].max(least)


def _check_mesh(mesh: Mesh | None) -> None:
    """Raises ValueError for a mesh whose devices hold a part of a vocabulary only."""
    if mesh is not None and mesh.shape.get("tensor", 1) > 1:
        raise ValueError(
            "a loss over outcomes needs all logits of a token at once, and a mesh with"
            f" tensor={mesh.shape['tensor']} splits them: use tensor=1"
        )


def span_sums(values: Float[Array, "B C"], starts: Bool[Array, "B C"]) -> Float[Array, "B C"]:
    """Computes at each token the sum over its span, which ends where the next one starts."""
    numbers = jnp.cumsum(starts, -1)

    def sums(values: Array, numbers: Array) -> Array:
        return jax.ops.segment_sum(values, numbers, num_segments=len(values) + 1)[numbers]

    return jax.vmap(sums)(values, numbers)


def teacher_signal(
    hidden: Float[Array, "B C Dt"],
    head: Float[Array, "Vt Dt"],
    tokens: Int[Array, "B C"],
    outcomes: Outcomes,
    *,
    signal: str,
    top_k: int,
    **options: Unpack[LogitOptions],
) -> AlignedSignal:
    """Computes what the teacher sends, at its own tokens: their log-probs, each a span by itself,
    and for the signal `hidden` the hidden states, for `topk` the most probable outcomes.

    Args:
        hidden: the states that predict the tokens.
        tokens: completions in the teacher's tokens.

    Raises:
        ValueError: top_k outside [1, V + 1], or a mesh with tensor above 1.
    """
    logprobs = logprobs_from_hidden(hidden, head, tokens, **options)
    sent = AlignedSignal(span_logprobs=jax.lax.stop_gradient(logprobs))
    if signal == "hidden":
        return replace(sent, hidden=hidden)
    if signal == "sampled":
        return sent
    _check_mesh(options.get("mesh"))
    term = OverOutcomes(TopKTerm(top_k), outcomes.size)
    best = term_values(term, hidden, head, {}, outcomes=(outcomes.teacher, None), **options)
    return replace(
        sent, topk_ids=best["ids"], topk_logprobs=best["logprobs"], tail_logprob=best["tail"]
    )


def at_student_tokens(sent: AlignedSignal, alignment: TokenAlignment) -> AlignedSignal:
    """Returns a signal at the student's tokens [B, C], of one at the teacher's [B, C']: at each
    token what was sent at the beginning of its span, and the log-prob of the whole span. Where a
    token is not aligned it means nothing."""
    sent = replace(sent, span_logprobs=span_sums(sent.span_logprobs, alignment.starts))

    def gather(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    gathered: AlignedSignal = jax.tree.map(gather, sent)
    return replace(gathered, kinds=alignment.kinds, sizes=alignment.sizes)


def loss(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    mask: Bool[Array, "B C"],
    sent: AlignedSignal,
    sampler_logprobs: Float[Array, "B C"],
    outcomes: Outcomes,
    teacher_head: Float[Array, "Vt Dt"] | None = None,
    *,
    beta: float,
    ratio_cap: float,
    temperature: float | Array = 1.0,
    softcap: Softcap = None,
    teacher_softcap: Softcap = None,
    **options: Unpack[ShardOptions],
) -> LossSums:
    """Computes the loss of the student: the divergence over outcomes where spans begin, and the
    sampled reverse KL of the spans of several tokens. Of the signal `sampled` it is the latter
    alone, of all spans.

    Args:
        hidden, head: of the student; the gradient flows here.
        tokens, mask: of the completions, and those that train.
        sent: by the teacher (`at_student_tokens`).
        sampler_logprobs: nats, of the tokens under the policy that sampled.
        teacher_head: for the signal `hidden`.
        beta: of the generalised JSD.
        ratio_cap: as of `sampled_reverse_kl`, for the whole span's ratio.

    Returns:
        (sum in nats, number of all tokens of `mask`, metrics): those of the divergence and of
        `sampled_reverse_kl`, whose tokens are spans here, and aligned_bytes and exact_bytes, shares
        of the bytes of the completions.

    Raises:
        ValueError: a mesh with tensor above 1.
    """
    kinds = sent.kinds
    begins = (kinds != Aligned.INSIDE) & (kinds != Aligned.NOT)
    of_one_token, sampled = kinds == Aligned.EXACT, kinds == Aligned.START
    total, metrics = jnp.zeros(()), Sums()
    if sent.hidden is None and sent.topk_ids is None:
        sampled |= of_one_token
    else:
        term: Term = FullDivergence(beta, None)
        teachers: tuple[tuple[Array, Array], ...] = ((sent.hidden, teacher_head),)
        given: PerToken = {}
        if sent.hidden is None:
            term, teachers = TopKDivergence(beta), ()
            logprobs, tail = sent.topk_logprobs, sent.tail_logprob
            given = {"ids": sent.topk_ids, "logprobs": logprobs, "tail": tail}
        _check_mesh(options.get("mesh"))
        sharded = shard_term(OverOutcomes(term, outcomes.size), (hidden, head), **options)
        total, _, metrics = divergence_sums(
            sharded,
            hidden,
            head,
            mask & begins,
            given,
            temperature,
            (softcap, *[teacher_softcap] * len(teachers)),
            teachers,
            (outcomes.student, outcomes.teacher if teachers else None),
        )
    logprobs = logprobs_from_hidden(
        hidden, head, tokens, mask=mask, temperature=temperature, softcap=softcap, **options
    )
    of_span, sampler_of_span = (
        span_sums(jnp.where(mask, x, 0), kinds != Aligned.INSIDE)
        for x in (logprobs, sampler_logprobs)
    )
    reverse_kl, _, more = sampled_reverse_kl(
        of_span,
        sent.span_logprobs,
        mask & sampled,
        sampler_logprobs=sampler_of_span,
        ratio_cap=ratio_cap,
    )
    read = masked_sum(sent.sizes, mask)
    learnt = (kinds != Aligned.NOT) & (kinds != Aligned.START_ONLY)
    for name, part in (("aligned_bytes", learnt), ("exact_bytes", of_one_token)):
        metrics[name] = (masked_sum(sent.sizes, mask & part), read)
    return total + reverse_kl, masked_count(mask), metrics | more
