"""The losses of distillation: divergences of student and teacher from hidden states, chunked.

The formulas are those of `losses/divergence.py`, the machinery is `losses/chunked.py`. All inputs
are aligned: the hidden state at [b, c] predicts the token that `mask` [b, c] is about. Each loss
returns (sum in nats, number of tokens, metrics as name -> (sum, count)); the caller divides
once, by the global count. Sums and counts are scalars, except those of divergence and
top1_agreement, which are [B, C], one for each token. Gradients flow to the student's hidden states
and head; metrics carry none. Masked positions never affect a result, not even if they hold NaN.

Common arguments:
    beta: static; as in `divergence.generalised_jsd`.
    divergence: static and hashable, in place of the generalised JSD, with metrics of the same kind.
    options: `LogitOptions`; `losses/chunked.py` says what the mesh splits. Two heads with different
        numbers of rows are cut to the first V = min(rows), which moves rows between devices at
        every call: cut a frozen head beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.losses.chunked import (
    LogitOptions,
    PerToken,
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
    Divergence,
    EntropyAware,
    GeneralisedJsd,
    LossSums,
    SummedDivergence,
    generalised_jsd,
    logits_gradient,
    masked_sum,
)
from jaxrl.losses.head import TeacherMixture, mixture_logits, normalisers
from jaxrl.process.plugin import BoundFunction
from jaxrl.types import Array, Uncertainty

OwnMetrics = tuple[tuple[str, SummedDivergence], ...]
"""Name -> what is measured as a divergence is, and has no gradient."""


class Measures(TypedDict):
    """What is measured between a student and a teacher."""

    beta: float
    divergence: Divergence | None
    own_metrics: OwnMetrics


class PairOptions(LogitOptions, total=False):
    """Options of what takes a student and its teachers."""

    teacher_softcap: Softcap | Sequence[Softcap]
    """As `softcap`, which is then the student's own; one for each of several teachers."""


def divergence_from_hidden(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    teacher_hidden: Float[Array, "B C Dt"] | Sequence[Array],
    teacher_head: Float[Array, "Vt Dt"] | Sequence[Array],
    mask: Bool[Array, "B C"],
    *,
    beta: float,
    divergence: Divergence | None = None,
    own_metrics: OwnMetrics = (),
    entropy_aware: EntropyAware | None = None,
    mixture: TeacherMixture | None = None,
    **options: Unpack[PairOptions],
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
    kind = None if mixture is None else mixture.kind
    how = GeneralisedJsd(beta) if divergence is None else divergence
    return divergence_sums(
        FullDivergence(how, entropy_aware, kind, own_metrics),
        [(student_hidden, student_head), *teachers],
        mask,
        {} if mixture is None else {"weights": mixture.weights},
        **pair_softcaps(options, len(teachers)),
    )


def pair_softcaps(options: PairOptions, teachers: int) -> LogitOptions:
    """Makes one list of the softcaps of the student and of its teachers."""
    cap = options.get("teacher_softcap")
    caps = cap if isinstance(cap, Sequence) else [cap] * teachers
    common = {name: value for name, value in options.items() if name != "teacher_softcap"}
    return cast(LogitOptions, common | {"softcap": [options.get("softcap"), *caps]})


def topk_divergence_from_hidden(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    ids: Int[Array, "B C K"],
    teacher_logprobs: Float[Array, "B C K"],
    teacher_tail: Float[Array, "B C"],
    mask: Bool[Array, "B C"],
    *,
    beta: float,
    divergence: Divergence | None = None,
    own_metrics: OwnMetrics = (),
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
    how = GeneralisedJsd(beta) if divergence is None else divergence
    return divergence_sums(TopKDivergence(how, own_metrics), models, mask, tokens, **options)


def entropy_aware_from_topk(
    student_hidden: Float[Array, "B C D"],
    student_head: Float[Array, "V D"],
    best: Uncertainty,
    mask: Bool[Array, "B C"],
    *,
    term: EntropyAware,
    **options: Unpack[LogitOptions],
) -> LossSums:
    """Computes the entropy-aware term alone, from what a teacher shipped: add it to any signal's
    loss.

    Args:
        best: the teacher's K >= term.top_k most probable tokens; what comes after the first top_k
            is merged into the tail.

    Returns:
        The term's sum, the number of *all* tokens of `mask`, and the metrics entropy_aware and
        entropy_gate.
    """
    k, sent = term.top_k, best.best_ids.shape[-1]
    if sent < k:
        raise ValueError(
            f"the entropy-aware term needs the teacher's top {k} and {sent} were "
            "sent: raise the teacher's top-k, or lower the term's top_k"
        )
    rest = [best.best_logprobs[..., k:], jnp.maximum(best.best_tail, MIN)[..., None]]
    tail = jax.nn.logsumexp(jnp.concatenate(rest, -1), -1)
    gate = mask & (best.entropy >= term.threshold)
    total, _, _ = topk_divergence_from_hidden(
        *(student_hidden, student_head, best.best_ids[..., :k], best.best_logprobs[..., :k]),
        tail,
        gate,
        beta=0.0,
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
    outcomes: tuple[Array | None, ...] | None = None,
    **options: Unpack[LogitOptions],
) -> LossSums:
    """Computes a divergence chunk by chunk and sums it over `mask`. Arguments as in
    `chunked.shard_inputs`: the student is the first of the models."""
    inputs = shard_inputs(term, models, mask, tokens, outcomes, **options)
    total, values = loss_values(*inputs)
    frozen = inputs[-1]
    values = jax.lax.stop_gradient({k: x for k, x in values.items() if k != "loss"})
    count = mask.astype(jnp.float32).sum()
    metrics = {k: (masked_sum(x, frozen.mask), count) for k, x in values.items()}
    ones, real = mask.astype(count.dtype), (slice(mask.shape[0]), slice(mask.shape[1]))
    for name in {"divergence", "top1_agreement"} & values.keys():
        metrics[name] = (jnp.where(mask, values[name][real], 0).astype(count.dtype), ones)
    return total, count, metrics


@dataclass(frozen=True)
class FullDivergence(Term):
    """Divergence over the full vocabulary, from z [n, V] and the teachers' `teacher_z` [n, V]."""

    divergence: Divergence
    entropy_aware: EntropyAware | None
    mixture: MixtureKind | None = None
    own_metrics: OwnMetrics = ()

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        saved: PerToken = {}
        if self.mixture is not None:
            saved["teachers"] = normalisers(self.mixture, tokens["teacher_z"], columns)
        teacher_z, teacher_columns = self._teacher(tokens, saved, columns)
        normaliser = columns.normaliser(z)
        teacher_normaliser = teacher_columns.normaliser(teacher_z)
        student = columns.logprobs(z, normaliser)
        teacher = teacher_columns.logprobs(teacher_z, teacher_normaliser)
        divergence, centre = self.divergence.value(student, teacher, columns.total)
        teacher_at_best = jnp.where(z == normaliser.peak[:, None], teacher_z, MIN)
        values = {
            "loss": divergence,
            "divergence": divergence,
            "top1_agreement": columns.peak(teacher_at_best) == teacher_normaliser.peak,
            "student_entropy": columns.entropy(z, normaliser),
            "teacher_entropy": teacher_columns.entropy(teacher_z, teacher_normaliser),
        }
        for name, metric in self.own_metrics:
            values[name] = metric.value(student, teacher, columns.total)[0]
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
        wanted, _ = add_tail(teacher_z, teacher_normaliser, ids, teacher_columns)
        divergence, centre = generalised_jsd(listed, wanted, beta=0)
        gate = values["teacher_entropy"] >= term.threshold
        weight = jnp.where(gate, term.coef, 0.0)
        extra = weight * divergence
        values |= {"loss": values["loss"] + extra, "entropy_aware": extra, "entropy_gate": gate}
        gradient = weight[:, None] * logits_gradient(listed, wanted, centre, beta=0)
        return TokenStats(values, saved | {"ids": ids, "gradient": gradient, "others": others})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        student = columns.logprobs(z, saved["student"])
        teacher_z, teacher_columns = self._teacher(tokens, saved, columns)
        teacher = teacher_columns.logprobs(teacher_z, saved["teacher"])
        dz = self.divergence.gradient(student, teacher, saved["centre"])
        if self.entropy_aware is None:
            return dz
        return dz + spread_tail(z, saved["ids"], saved["gradient"], saved["others"], columns)

    def _teacher(
        self, tokens: PerToken, saved: PerToken, columns: VocabShard
    ) -> tuple[Array, VocabShard]:
        """Returns the teacher's logits [n, size], and their columns."""
        if self.mixture is None:
            return tokens["teacher_z"][0], columns
        z, weights = tokens["teacher_z"], tokens["weights"]
        return mixture_logits(self.mixture, z, weights, saved["teachers"], columns)


@dataclass(frozen=True)
class OwnSent(Term):
    """What a teacher sends of a token by a user's function; without a gradient."""

    send: BoundFunction

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        logprobs = columns.logprobs(z, columns.normaliser(z))
        return TokenStats(self.send(logprobs=logprobs, tokens=tokens["ids"]), {})


@dataclass(frozen=True)
class OwnLoss(Term):
    """A user's function of the student's log-probs [n, V] and of what the teacher sent. All of the
    vocabulary must be on one device."""

    function: BoundFunction

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        normaliser = columns.normaliser(z)
        loss = self._loss(columns.logprobs(z, normaliser), tokens)
        return TokenStats({"loss": loss, "divergence": loss}, {"student": normaliser})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        student = columns.logprobs(z, saved["student"])
        loss, pull = jax.vjp(lambda x: self._loss(x, tokens), student)
        slope = pull(jnp.ones_like(loss))[0]
        return slope - jnp.exp(student) * slope.sum(-1, keepdims=True)

    def _loss(self, logprobs: Array, tokens: PerToken) -> Array:
        sent = {name: value for name, value in tokens.items() if name != "ids"}
        loss = self.function(logprobs=logprobs, tokens=tokens["ids"], sent=sent)
        if loss.shape != logprobs.shape[:1]:
            raise self.function.wrong(
                f"returns an array of shape {loss.shape} for {len(logprobs)} tokens: one loss of"
                " each is needed"
            )
        return loss


def _over_outcomes(x: Array) -> Array:
    return x.sum(-1)


@dataclass(frozen=True)
class TopKDivergence(Term):
    """Divergence over K + 1 outcomes. `tokens` has ids [n, K], logprobs [n, K] and tail [n], in
    nats, of the teacher."""

    divergence: Divergence
    own_metrics: OwnMetrics = ()

    def measure(self, z: Array, tokens: PerToken, columns: VocabShard) -> TokenStats:
        ids, normaliser = tokens["ids"], columns.normaliser(z)
        student, others = add_tail(z, normaliser, ids, columns)
        teacher = jnp.concatenate([tokens["logprobs"], tokens["tail"][:, None]], -1)
        teacher = jnp.maximum(teacher.astype(jnp.float32), MIN)
        divergence, centre = self.divergence.value(student, teacher, _over_outcomes)
        best = jnp.argmax(teacher[:, :-1], -1, keepdims=True)
        values = {
            "loss": divergence,
            "divergence": divergence,
            "teacher_tail_mass": jnp.exp(teacher[:, -1]),
            "student_tail_mass": jnp.exp(student[:, -1]),
            "student_entropy": columns.entropy(z, normaliser),
            "top1_agreement": columns.values_at(z, jnp.take_along_axis(ids, best, -1))[:, 0]
            == normaliser.peak,
        }
        for name, metric in self.own_metrics:
            values[name] = metric.value(student, teacher, _over_outcomes)[0]
        gradient = self.divergence.gradient(student, teacher, centre)
        return TokenStats(values, {"gradient": gradient, "others": others})

    def gradient(self, z: Array, tokens: PerToken, saved: PerToken, columns: VocabShard) -> Array:
        return spread_tail(z, tokens["ids"], saved["gradient"], saved["others"], columns)
