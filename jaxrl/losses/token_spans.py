"""The loss from a teacher with another tokenizer.

`data.token_alignment` cuts a text into *spans*: one or more tokens of each model that stand for the
same bytes. The student learns from

1. the teacher's distribution at the beginning of each span, where both predict what follows the
   same text: the generalised JSD over *outcomes*. Each token that both vocabularies have is an
   outcome; every other token belongs to that of the longest common token that it begins with.
   Where one model says "88" and the other "8" and then "8", both are in the outcome "8": the loss
   does not ask for the teacher's spelling, as one over common tokens and a bucket of all others
   would. (ULD, arXiv 2402.12030, compares sorted probabilities.) Tokens that begin with no common
   one are the last outcome. Within an outcome the student's tokens keep their shares.
2. each span of several tokens, as one action: KL(student || teacher) estimated by the sampled span,
   log Q - log P with the sums of its tokens' log-probs (`divergence.sampled_reverse_kl`), which
   over all spans are the log-prob of the text in either model's tokens. As 1. teaches the first
   token's outcome, its gradient is that of the span's log-prob given this outcome.

A span of one token that both have needs no sample. Where all spans are such and the outcomes are
the tokens, this is the ordinary loss. It is an approximation where a model has a longer token that
would continue the text before a border: after "8", a model that has a token "88" hardly says "8"
again, and the loss teaches the student so (docs/limits.md). The plan refuses tensor above 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses import distill
from jaxrl.losses.chunked import LogitOptions, PerToken, Term, TokenStats, VocabShard
from jaxrl.losses.divergence import (
    MIN,
    Divergence,
    GeneralisedJsd,
    LossSums,
    clamped_gap,
    masked_sum,
    sampled_reverse_kl,
)
from jaxrl.losses.head import TopKTerm, logprobs_from_hidden, term_values, token_values
from jaxrl.types import Aligned, AlignedSignal, Array, Sums, TokenAlignment

# Least log-prob of the last outcome: a teacher may have no token in it, and the divergence from a
# student that has some would be infinite.
LEAST = math.log(1e-8)
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
class OutcomeTerm(Term):
    """A term over outcomes: each one's logit is the logsumexp of the logits of its tokens, at the
    temperature, less the largest of all tokens."""

    term: Term
    count: int

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        return self.term.measure(*self._merge_outcomes(z, tokens, columns))

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        """Returns the outcome's gradient, in its tokens' shares of its probability."""
        merged, inner, every = self._merge_outcomes(z, tokens, columns)
        slope = self.term.gradient(merged, inner, saved, every)
        student, _ = tokens["outcomes"]
        return slope.T[student].T * jnp.exp(subtract_peak(z, columns) - merged.T[student].T)

    def _merge_outcomes(
        self, z: Array, tokens: PerToken, columns: VocabShard
    ) -> tuple[Array, PerToken, VocabShard]:
        """Returns the logits of outcomes [n, count], and the inner term's tokens and columns."""
        student, teacher = tokens["outcomes"]
        inner = {name: value for name, value in tokens.items() if name != "outcomes"}
        if "teacher_z" in inner:
            below = (subtract_peak(logits, columns) for logits in inner["teacher_z"])
            inner["teacher_z"] = tuple(self._sums(logits, teacher) for logits in below)
        every = VocabShard(0, self.count, self.count, padded=False)
        return self._sums(subtract_peak(z, columns), student), inner, every

    def _sums(
        self, below: Float[Array, "n size"], outcomes: Int[Array, " size"]
    ) -> Float[Array, "n count"]:
        # Outcomes are rows while they are summed up: each token adds a row of n numbers.
        sums = jnp.zeros((self.count, len(below)), below.dtype)
        sums = jnp.maximum(sums.at[outcomes].add(jnp.exp(below).T, mode="drop"), TINY)
        return jnp.log(sums).T.at[:, -1].max(jnp.log(sums.sum(0)) + LEAST)


def subtract_peak(z: Float[Array, "n size"], columns: VocabShard) -> Float[Array, "n size"]:
    """Computes logits at the temperature, less the largest of the row."""
    return columns.scale * (z - z.max(-1, keepdims=True))


@dataclass(frozen=True)
class TokenGivenOutcome(Term):
    """log pi(token), and the same given its outcome, or given nothing where that is -1: the score,
    to which the gradient flows."""

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        normaliser = columns.normaliser(jnp.where(self._members(tokens), z, MIN))
        normalisers = {"logprobs": columns.normaliser(z), "score": normaliser}
        ids = tokens["ids"][:, None]
        values = {k: columns.logprobs_at(z, x, ids)[:, 0] for k, x in normalisers.items()}
        return TokenStats(values, {"given": normaliser})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        slope = tokens["d_score"][:, None]
        logprobs = columns.logprobs(z, saved["given"])
        shares = jnp.where(self._members(tokens), jnp.exp(logprobs), 0)
        return columns.add(-slope * shares, tokens["ids"][:, None], slope)

    def _members(self, tokens: PerToken) -> Array:
        (outcomes,), outcome = tokens["outcomes"], tokens["given"][:, None]
        return (outcomes[None] == outcome) | (outcome < 0)


def span_sums(values: Float[Array, "B C"], starts: Bool[Array, "B C"]) -> Float[Array, "B C"]:
    """Computes at each token the sum over its span, which ends where the next one starts."""
    numbers = jnp.cumsum(starts, -1)
    segments = partial(jax.ops.segment_sum, num_segments=values.shape[1] + 1)
    return jnp.take_along_axis(jax.vmap(segments)(values, numbers), numbers, -1)


def aligned_signal(
    hidden: Float[Array, "B C Dt"],
    head: Float[Array, "Vt Dt"],
    tokens: Int[Array, "B C"],
    outcomes: Outcomes,
    *,
    signal: str,
    top_k: int,
    **options: Unpack[LogitOptions],
) -> AlignedSignal:
    """Computes what the teacher sends, at its own tokens (completions of `tokens`, which `hidden`
    predicts): their log-probs, each a span by itself, and for the signal `hidden` the hidden
    states, for `topk` the most probable outcomes.

    Raises:
        ValueError: top_k outside [1, V + 1].
    """
    logprobs = logprobs_from_hidden(hidden, head, tokens, **options)
    sent = AlignedSignal(span_logprobs=jax.lax.stop_gradient(logprobs))
    if signal == "hidden":
        return replace(sent, hidden=hidden)
    if signal == "sampled":
        return sent
    term = OutcomeTerm(TopKTerm(top_k), outcomes.size)
    best = term_values(term, hidden, head, {}, outcomes=(outcomes.teacher, None), **options)
    return replace(
        sent, topk_ids=best["ids"], topk_logprobs=best["logprobs"], tail_logprob=best["tail"]
    )


def align_to_student(sent: AlignedSignal, alignment: TokenAlignment) -> AlignedSignal:
    """Returns a signal at the student's tokens [B, C], of one at the teacher's [B, C']: what was
    sent at the beginning of a token's span, and the span's log-prob. It means nothing at a token
    that is not aligned."""
    sent = replace(sent, span_logprobs=span_sums(sent.span_logprobs, alignment.starts))

    def gather(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    gathered: AlignedSignal = jax.tree.map(gather, sent)
    return replace(gathered, kinds=alignment.kinds, sizes=alignment.sizes)


class SampledTokens(NamedTuple):
    """The tokens of completions."""

    ids: Int[Array, "B C"]
    mask: Bool[Array, "B C"]
    """True at those that train."""
    sampler_logprobs: Float[Array, "B C"]
    """Nats, under the policy that sampled."""


def span_loss(
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    sampled_tokens: SampledTokens,
    sent: AlignedSignal,
    outcomes: Outcomes,
    teacher_head: Float[Array, "Vt Dt"] | None = None,
    *,
    beta: float,
    ratio_cap: float,
    divergence: Divergence | None = None,
    own_metrics: distill.OwnMetrics = (),
    **options: Unpack[distill.PairOptions],
) -> LossSums:
    """Computes the loss of the student: the divergence over outcomes where spans begin, and the
    sampled reverse KL of the spans of several tokens. With the signal `sampled` it is the latter
    alone, over all spans.

    Args:
        hidden, head: of the student; the gradient flows here.
        teacher_head: for the signal `hidden`.
        beta, divergence, own_metrics: as in `distill.divergence_from_hidden`.
        ratio_cap: as in `sampled_reverse_kl`, for the whole span's ratio.

    Returns:
        (sum in nats, number of all tokens of `mask`, metrics of the divergence and of
        `sampled_reverse_kl` by spans, aligned_bytes and exact_bytes, shares of all bytes).
    """
    kinds, (tokens, mask, sampler_logprobs) = sent.kinds, sampled_tokens
    pair_options = distill.pair_softcaps(options, 0 if sent.hidden is None else 1)
    student_options = pair_options | {"softcap": options.get("softcap")}
    begins = (kinds != Aligned.INSIDE) & (kinds != Aligned.NOT)
    of_one_token, sampled = kinds == Aligned.EXACT, kinds == Aligned.START
    total, metrics, given_outcome = jnp.zeros(()), Sums(), jnp.full_like(tokens, -1)
    baseline = 0.0 if sent.baseline is None else sent.baseline
    if sent.hidden is None and sent.topk_ids is None:
        sampled, baseline = sampled | of_one_token, 0.0
    else:
        how = GeneralisedJsd(beta) if divergence is None else divergence
        term: Term = distill.FullDivergence(how, None, own_metrics=own_metrics)
        teachers, of_teacher, targets = [(sent.hidden, teacher_head)], outcomes.teacher, {}
        if sent.hidden is None:
            term, teachers, of_teacher = distill.TopKDivergence(how, own_metrics), [], None
            logprobs, tail = sent.topk_logprobs, sent.tail_logprob
            targets = {"ids": sent.topk_ids, "logprobs": logprobs, "tail": tail}
        total, _, metrics = distill.divergence_sums(
            OutcomeTerm(term, outcomes.size),
            [(hidden, head), *teachers],
            mask & begins,
            targets,
            (outcomes.student, of_teacher),
            **pair_options,
        )
        given_outcome = jnp.where(kinds == Aligned.START, outcomes.student[tokens], -1)
    inputs = hidden, head, {"ids": tokens, "given": given_outcome}, mask, (outcomes.student,)
    values = token_values(TokenGivenOutcome(), *inputs, **student_options)
    logprobs = jax.lax.stop_gradient(values["logprobs"] - values["score"]) + values["score"]
    of_span, sampler_of_span = (
        span_sums(jnp.where(mask, x, 0), kinds != Aligned.INSIDE)
        for x in (logprobs, sampler_logprobs)
    )
    settings = {"sampler_logprobs": sampler_of_span, "ratio_cap": ratio_cap, "baseline": baseline}
    reverse_kl, _, more = sampled_reverse_kl(
        of_span, sent.span_logprobs, mask & sampled, **settings
    )
    learnt = (kinds != Aligned.NOT) & (kinds != Aligned.START_ONLY)
    for name, part in (("aligned_bytes", learnt), ("exact_bytes", of_one_token)):
        metrics[name] = masked_sum(sent.sizes, mask & part), masked_sum(sent.sizes, mask)
    return total + reverse_kl, mask.astype(jnp.float32).sum(), metrics | more


@jax.jit
def span_baseline(
    kinds: Int[Array, "B C"],
    span_logprobs: Float[Array, "B C"],
    sampler_logprobs: Float[Array, "B C"],
    mask: Bool[Array, "B C"],
) -> Float[Array, "B C"]:
    """Computes the baseline of the spans of several tokens, nats: the mean of log Q - log P over
    the others of a batch, Q being the policy that sampled. Without it a student that is far from
    the teacher avoids such spans, whichever they are; single tokens have no such term."""
    several = (kinds == Aligned.START) & mask
    sums = span_sums(jnp.where(mask, sampler_logprobs, 0), kinds != Aligned.INSIDE)
    gaps, _ = clamped_gap(sums, span_logprobs, several)
    count = several.sum()
    return jnp.where(several & (count > 1), (gaps.sum() - gaps) / jnp.maximum(count - 1, 1), 0)
