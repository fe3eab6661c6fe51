"""The losses of distillation: divergences of student and teacher from hidden states, chunked.

The formulas are those of `losses/divergence.py`, the machinery is `losses/chunked.py`. All inputs
are aligned: the hidden state at [b, c] predicts the token that `mask` [b, c] is about. Each loss
returns (sum in nats, number of tokens, metrics as name -> (sum, count)); the caller divides
once, by the global count. Sums and counts are scalars, except those of divergence and
top1_agreement, which are [B, C], one for each token. Gradients flow to the student's hidden states
and head; metrics carry none. Masked positions never affect a result, not even if they hold NaN.

Common arguments:
    beta: static; as of `divergence.generalised_jsd`.
    lean: False computes the gradients in the forward pass (4 products with a head), which needs a
        float32 accumulator of the head's size; True keeps nothing between forward and backward and
        computes the logits again, by tiles of the vocabulary (6 products).
    options: `ShardOptions` or `LogitOptions`; `losses/chunked.py` says what the mesh splits. Two
        heads with different numbers of rows are cut to the first V = min(rows), which moves rows
        between devices at every call: cut a frozen head beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.losses.chunked import (
    LogitOptions,
    PerToken,
    ShardOptions,
    Softcap,
    Term,
    TokenStats,
    VocabShard,
    add_tail,
    loss_values,
    shard_inputs,
    spread_tail,
)
from jaxrl.losses.divergence import (
    MIN,
    EntropyAware,
    LossSums,
    generalised_jsd,
    logits_gradient,
    masked_sum,
)
from jaxrl.losses.head import TeacherMixture, mixture_logits, normalisers
from jaxrl.types import Array


def divergence_from_hidden(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    teacher_hidden: Float[Array, "B C Dt"] | Sequence[Array],
    teacher_head: Float[Array, "Vt Dt"] | Sequence[Array],
    mask: Bool[Array, "B C"],
    *,
    beta: float,
    temperature: float | Array = 1.0,
    softcap: Softcap = None,
    teacher_softcap: Softcap | Sequence[Softcap] = None,
    lean: bool = False,
    entropy_aware: EntropyAware | None = None,
    mixture: TeacherMixture | None = None,
    **options: Unpack[ShardOptions],
) -> LossSums:
    """Computes the JSD (`divergence.generalised_jsd`) over the full vocabulary, plus the
    entropy-aware term (`divergence.EntropyAware`) if `entropy_aware` is given.

    Args:
        teacher_hidden, teacher_head: of several teachers, one array for each.
        mixture: combines several teachers; each one's distribution is taken at `temperature`.

    Returns:
        (sum in nats, number of tokens, metrics). Metrics: divergence (without the entropy-aware
        term), top1_agreement (fraction of tokens where the most probable token of both models is
        the same), student_entropy and teacher_entropy (nats, at `temperature`); with
        `entropy_aware` also entropy_aware (nats, times its coefficient) and entropy_gate (fraction
        of tokens where the term acts).

    Raises:
        ValueError: beta outside [0, 1], or top_k outside [1, V].
    """
    teachers = [(teacher_hidden, teacher_head)]
    if isinstance(teacher_hidden, Sequence):
        teachers = list(zip(teacher_hidden, teacher_head, strict=True))
    caps = [teacher_softcap] * len(teachers)
    if isinstance(teacher_softcap, Sequence):
        caps = list(teacher_softcap)
    return divergence_sums(
        FullDivergence(beta, entropy_aware, None if mixture is None else mixture.kind),
        [(student_hidden, student_head), *teachers],
        mask,
        {} if mixture is None else {"weights": mixture.weights},
        temperature=temperature,
        softcap=[softcap, *caps],
        lean=lean,
        **options,
    )


def topk_divergence_from_hidden(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    ids: Int[Array, "B C K"],
    teacher_logprobs: Float[Array, "B C K"],
    teacher_tail: Float[Array, "B C"],
    mask: Bool[Array, "B C"],
    *,
    beta: float,
    lean: bool = False,
    **options: Unpack[LogitOptions],
) -> LossSums:
    """Computes the generalised JSD over K + 1 outcomes: the K ids, and the tail bucket of all the
    others.

    Merging outcomes never raises a divergence, so this is a lower bound of the full one (equal to
    it at K = V), and it is stationary at Q = P, which a renormalised or a dropped tail is not.

    For the `topk` signal (ids are the teacher's) and for `student_topk` (the student's). The
    teacher's log-probs must be at the same `temperature` already, and over the same first V rows:
    `v` cuts the student's head to them.

    Metrics: divergence, teacher_tail_mass and student_tail_mass (probability outside of the ids),
    student_entropy (nats, full), top1_agreement (the student's most probable token is the teacher's
    most probable one *of the ids*; exact for `topk`, an upper bound for `student_topk`).
    """
    tokens = {"ids": ids, "logprobs": teacher_logprobs, "tail": teacher_tail}
    models = [(student_hidden, student_head)]
    return divergence_sums(TopKDivergence(beta), models, mask, tokens, lean=lean, **options)


def entropy_aware_from_topk(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    ids: Int[Array, "B C K"],
    teacher_logprobs: Float[Array, "B C K"],
    teacher_entropy: Float[Array, "B C"],
    mask: Bool[Array, "B C"],
    *,
    term: EntropyAware,
    teacher_tail: Float[Array, "B C"],
    lean: bool = False,
    **options: Unpack[LogitOptions],
) -> LossSums:
    """Computes the entropy-aware term alone, from what a teacher shipped: add it to any signal's
    loss.

    Args:
        ids, teacher_logprobs: the teacher's K >= term.top_k most probable tokens, the most probable
            first; what comes after the first top_k is merged into the tail.
        teacher_tail: nats, log of the probability outside of the K ids.
        teacher_entropy: nats, of the full distribution.

    Returns:
        The term's sum, the number of *all* tokens of `mask`, and the metrics entropy_aware and
        entropy_gate.
    """
    if ids.shape[-1] < term.top_k:
        raise ValueError(
            f"the entropy-aware term needs the teacher's top {term.top_k} and {ids.shape[-1]} were "
            "sent: raise the teacher's top-k, or lower the term's top_k"
        )
    k = term.top_k
    rest = [teacher_logprobs[..., k:], jnp.maximum(teacher_tail, MIN)[..., None]]
    tail = jax.nn.logsumexp(jnp.concatenate(rest, -1), -1)
    gate = mask & (teacher_entropy >= term.threshold)
    total, _, _ = topk_divergence_from_hidden(
        student_hidden,
        student_head,
        ids[..., :k],
        teacher_logprobs[..., :k],
        tail,
        gate,
        beta=0.0,
        lean=lean,
        **options,
    )
    total, count = term.coef * total, mask.astype(jnp.float32).sum()
    metrics = {
        "entropy_aware": (jax.lax.stop_gradient(total), count),
        "entropy_gate": (gate.astype(jnp.float32).sum(), count),
    }
    return total, count, metrics


def divergence_sums(
    term: Term,
    models: Sequence[tuple[Array, Array]],
    mask: Array,
    tokens: PerToken,
    outcomes: Sequence[Array | None] | None = None,
    *,
    lean: bool = False,
    **options: Unpack[LogitOptions],
) -> LossSums:
    """Computes a divergence chunk by chunk and sums it over `mask`. Arguments as of
    `chunked.shard_inputs`: the student is the first of the models."""
    inputs = shard_inputs(term, models, mask, tokens, outcomes, lean=lean, **options)
    total, values = loss_values(*inputs)
    given = inputs[-1]
    values = jax.lax.stop_gradient({k: x for k, x in values.items() if k != "loss"})
    count = mask.astype(jnp.float32).sum()
    metrics = {k: (masked_sum(x, given.mask), count) for k, x in values.items()}
    ones, real = mask.astype(count.dtype), (slice(mask.shape[0]), slice(mask.shape[1]))
    for name in ("divergence", "top1_agreement"):
        metrics[name] = (jnp.where(mask, values[name][real], 0).astype(count.dtype), ones)
    return total, count, metrics


@dataclass(frozen=True)
class FullDivergence(Term):
    """Divergence over the full vocabulary, from z [n, V] and the teachers' `teacher_z` [n, V]."""

    beta: float
    entropy_aware: EntropyAware | None
    mixture: MixtureKind | None = None

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        saved: PerToken = {}
        if self.mixture is not None:
            saved["teachers"] = normalisers(self.mixture, tokens["teacher_z"], columns)
        teacher_z, theirs = self._teacher(tokens, saved, columns)
        normaliser, teacher_normaliser = columns.normaliser(z), theirs.normaliser(teacher_z)
        student = columns.logprobs(z, normaliser)
        teacher = theirs.logprobs(teacher_z, teacher_normaliser)
        divergence, centre = generalised_jsd(student, teacher, self.beta, columns.total)
        teacher_at_best = jnp.where(z == normaliser.peak[:, None], teacher_z, MIN)
        values = {
            "loss": divergence,
            "divergence": divergence,
            "top1_agreement": columns.peak(teacher_at_best) == teacher_normaliser.peak,
            "student_entropy": columns.entropy(z, normaliser),
            "teacher_entropy": theirs.entropy(teacher_z, teacher_normaliser),
        }
        saved |= {"student": normaliser, "teacher": teacher_normaliser, "centre": centre}
        term = self.entropy_aware
        if term is None:
            return TokenStats(values, saved)
        if not 0 < term.top_k <= columns.vocab:
            raise ValueError(
                f"the entropy-aware term's top_k is {term.top_k}; "
                f"the vocabulary has {columns.vocab} tokens: 1 to {columns.vocab}"
            )
        _, ids = columns.topk(teacher_z, term.top_k)
        listed, others = add_tail(z, normaliser, ids, columns)
        wanted, _ = add_tail(teacher_z, teacher_normaliser, ids, theirs)
        divergence, centre = generalised_jsd(listed, wanted, beta=0)
        gate = values["teacher_entropy"] >= term.threshold
        weight = jnp.where(gate, term.coef, 0.0)
        extra = weight * divergence
        values |= {"loss": values["loss"] + extra, "entropy_aware": extra, "entropy_gate": gate}
        gradient = weight[:, None] * logits_gradient(listed, wanted, centre, beta=0)
        return TokenStats(values, saved | {"ids": ids, "gradient": gradient, "others": others})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        student = columns.logprobs(z, saved["student"])
        teacher_z, theirs = self._teacher(tokens, saved, columns)
        teacher = theirs.logprobs(teacher_z, saved["teacher"])
        dz = logits_gradient(student, teacher, saved["centre"], self.beta)
        if self.entropy_aware is None:
            return dz
        return dz + spread_tail(z, saved["ids"], saved["gradient"], saved["others"], columns)

    def _teacher(
        self, tokens: PerToken, saved: PerToken, columns: VocabShard
    ) -> tuple[Array, VocabShard]:
        """Returns the teacher's logits [n, size], and their columns."""
        if self.mixture is None:
            return tokens["teacher_z"][0], columns
        given = tokens["teacher_z"], tokens["weights"], saved["teachers"]
        return mixture_logits(self.mixture, *given, columns)


@dataclass(frozen=True)
class TopKDivergence(Term):
    """Divergence over K + 1 outcomes. `tokens` has ids [n, K], logprobs [n, K] and tail [n], in
    nats, of the teacher."""

    beta: float

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        ids, normaliser = tokens["ids"], columns.normaliser(z)
        student, others = add_tail(z, normaliser, ids, columns)
        teacher = jnp.concatenate([tokens["logprobs"], tokens["tail"][:, None]], -1)
        teacher = jnp.maximum(teacher.astype(jnp.float32), MIN)
        divergence, centre = generalised_jsd(student, teacher, self.beta)
        best = jnp.argmax(teacher[:, :-1], -1, keepdims=True)
        values = {
            "loss": divergence,
            "divergence": divergence,
            "teacher_tail_mass": jnp.exp(teacher[:, -1]),
            "student_tail_mass": jnp.exp(student[:, -1]),
            "student_entropy": columns.entropy(z, normaliser),
            "top1_agreement": columns.at(z, jnp.take_along_axis(ids, best, -1))[:, 0]
            == normaliser.peak,
        }
        gradient = logits_gradient(student, teacher, centre, self.beta)
        return TokenStats(values, {"gradient": gradient, "others": others})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        return spread_tail(z, tokens["ids"], saved["gradient"], saved["others"], columns)
