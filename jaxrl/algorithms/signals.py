"""Signals: what a teacher sends for each completion token, and the loss that the student computes
from it. Both sides are in this file.

| signal | sent per token | loss |
|---|---|---|
| hidden | last hidden state (the actor holds the teacher's LM head) | exact generalised JSD |
| topk | its K best ids, their log-probs, the tail's | JSD of K + 1 outcomes: a lower bound |
| student_topk | the same at the student's K best ids | as topk, on the student's support |
| sampled | log-prob of the sampled token | unbiased estimate of KL(student || teacher) |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.losses import token_spans
from jaxrl.losses.aggregation import LossSums
from jaxrl.losses.algorithm_table import MixtureKind
from jaxrl.losses.distill import (
    divergence_from_hidden,
    entropy_aware_from_topk,
    topk_divergence_from_hidden,
)
from jaxrl.losses.divergence import EntropyAware, sampled_reverse_kl
from jaxrl.losses.head import (
    logprobs_at,
    logprobs_from_hidden,
    topk_from_hidden,
)
from jaxrl.losses.layout import Softcap
from jaxrl.losses.mixture import TeacherMixture
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import forward_packed
from jaxrl.models.packing import Packing, pack
from jaxrl.models.parameters import Params, head
from jaxrl.process.json_types import Keywords
from jaxrl.types import (
    AlignedSignal,
    Array,
    Frozen,
    Sequences,
    Sums,
    TeacherSignal,
    TokenAlignment,
    TrainBatch,
)


@dataclass(frozen=True)
class Projection:
    """Options for the step from hidden states to log-probs, the same for teacher and student."""

    distill: DistillConfig
    mesh: Mesh
    vocab_size: int
    """Tokens that student and teachers share: the smallest number of rows of their heads."""
    teachers: tuple[str, ...] = ()
    """Names of several teachers; () where there is one."""
    mixture: MixtureKind | None = None
    """How several are one; None: each row has a teacher of its own."""
    keyed: bool = False
    """Whether rows differ in their teachers, whose metrics are then reported apart."""
    softcap: float | None = None
    """`DecoderConfig.final_softcap` of the student."""
    temperature: Float[Array, ""] | None = None
    """In the place of `distill.distill_temperature`, where it is an argument of the program."""

    @classmethod
    def of(
        cls, config: Config, mesh: Mesh, vocab_size: int, student: DecoderConfig | None = None
    ) -> Projection:
        """
        Args:
            student: for a projection of its hidden states.
        """
        keyed, names = config.data.teacher_key is not None, tuple(config.teachers)
        cap = None if student is None else student.final_softcap
        return cls(config.distill, mesh, vocab_size, names, config.mixture, keyed, cap)

    @property
    def options(self) -> Keywords:
        d = self.distill
        temperature = d.distill_temperature if self.temperature is None else self.temperature
        return {"chunk": d.chunk_tokens, "mesh": self.mesh, "temperature": temperature}

    @property
    def of_student(self) -> Keywords:
        """`options` with what is the student's own."""
        return self.options | {"softcap": self.softcap}

    @property
    def term(self) -> EntropyAware:
        d = self.distill
        return EntropyAware(threshold=d.entropy_threshold, top_k=d.entropy_top_k)


def completion_hidden(
    model: DecoderConfig,
    params: Params,
    packing: Packing,
    mesh: Mesh,
    **options: Any,
) -> Float[Array, "X m D"]:
    """The hidden states that predict the tokens of the completions. This is the only place that
    shifts by one token. Options as of `forward_packed`."""
    hidden = forward_packed(model, params, packing, mesh=mesh, **options)
    return packing.predicting(hidden, mesh)


def completion_logprobs(
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    mesh: Mesh,
    *,
    temperature: float,
    chunk: int,
) -> Float[Array, "B C"]:
    """float32, nats: of each completion token, at the temperature of sampling."""
    packing = pack(sequences, mesh)
    hidden = completion_hidden(model, params, packing, mesh)
    tokens = packing.pack(completion_tokens(sequences))
    options: Keywords = {"chunk": chunk, "mesh": mesh, "softcap": model.final_softcap}
    logprobs = logprobs_from_hidden(
        hidden, head(params), tokens, temperature=temperature, **options
    )
    return packing.unpack(logprobs)


def completion_tokens(sequences: Sequences) -> Int[Array, "B C"]:
    """The tokens of the completions."""
    return sequences.tokens[:, sequences.tokens.shape[1] - sequences.loss_mask.shape[1] :]


def packed(packing: Packing, batch: TrainBatch) -> TrainBatch:
    """What the losses of single tokens read of a batch, as streams [X, m, ...]."""
    return TrainBatch(
        packed_completions(packing, batch.sequences),
        jax.tree.map(packing.pack, batch.teacher),
        jax.tree.map(packing.pack, batch.sampler_logprobs),
    )


def packed_completions(packing: Packing, sequences: Sequences) -> Sequences:
    """The completions as streams [X, m], without their prompts."""
    trained = packing.pack(sequences.loss_mask)
    return Sequences(packing.pack(completion_tokens(sequences)), trained, trained)


# The teacher's side: (projection, (hidden [B, C, Dt], head [V, Dt]) or a sequence of both for a
# mixture, sequences, ids [B, C, K], further options) -> fields of TeacherSignal.

Fields = dict[str, Array]
HiddenAndHead = tuple[Array | Sequence[Array], Array | Sequence[Array]]
"""Hidden states and LM head, or one of both for each teacher of a mixture."""


def _ship_hidden(
    p: Projection, teachers: HiddenAndHead, sequences: Sequences, ids: Array, options: Keywords
) -> Fields:
    hidden, _ = teachers
    return {"hidden": hidden}


def _ship_topk(
    p: Projection, teachers: HiddenAndHead, sequences: Sequences, ids: Array, options: Keywords
) -> Fields:
    best = topk_from_hidden(*teachers, p.distill.top_k, **options)
    return {
        "topk_ids": best.ids,
        "topk_logprobs": best.logprobs,
        "tail_logprob": best.tail_logprob,
    }


def _ship_student_topk(
    p: Projection, teachers: HiddenAndHead, sequences: Sequences, ids: Array, options: Keywords
) -> Fields:
    logprobs, tail = logprobs_at(*teachers, ids, **options)
    return {"topk_ids": ids, "topk_logprobs": logprobs, "tail_logprob": tail}


def _ship_sampled(
    p: Projection, teachers: HiddenAndHead, sequences: Sequences, ids: Array, options: Keywords
) -> Fields:
    tokens = completion_tokens(sequences)
    if options["mixture"] is not None:
        logprobs, _ = logprobs_at(*teachers, tokens[..., None], **options)
        return {"token_logprobs": logprobs[..., 0]}
    plain = {name: value for name, value in options.items() if name != "mixture"}
    return {"token_logprobs": logprobs_from_hidden(*teachers, tokens, **plain)}


TEACHER_SIGNALS: dict[str, Callable[..., Fields]] = {
    "hidden": _ship_hidden,
    "topk": _ship_topk,
    "student_topk": _ship_student_topk,
    "sampled": _ship_sampled,
}


def score(
    p: Projection,
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
    alignment: TokenAlignment | None = None,
    outcomes: token_spans.Outcomes | None = None,
) -> TeacherSignal:
    """Computes what `distill.signal` asks of the teacher about the completions; zeros at their
    padding.

    Args:
        ids: the student's most probable tokens; only for `student_topk`.
        alignment, outcomes: of a teacher with another tokenizer, whose tokens `sequences` are; the
            signal is then at the student's (`losses.token_spans`).
    """
    packing = pack(sequences, p.mesh)
    hidden = completion_hidden(model, params, packing, p.mesh)
    completions, asked = packed_completions(packing, sequences), jax.tree.map(packing.pack, ids)
    cap = model.final_softcap
    if alignment is not None and outcomes is not None:
        d, options = p.distill, p.options | {"v": p.vocab_size, "softcap": cap}
        sent = token_spans.teacher_signal(
            hidden,
            head(params),
            completions.tokens,
            outcomes,
            signal=d.signal,
            top_k=d.top_k,
            **options,
        )
        return token_spans.at_student_tokens(jax.tree.map(packing.unpack, sent), alignment)
    signal = teacher_signal(p, hidden, head(params), completions, asked, softcap=cap)
    found: TeacherSignal = jax.tree.map(packing.unpack, signal)
    return replace(found, topk_ids=ids) if p.distill.signal == "student_topk" else found


def teacher_signal(
    p: Projection,
    hidden: Float[Array, "B C Dt"] | Sequence[Array],
    kernel: Float[Array, "Vt Dt"] | Sequence[Array],
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
    mixture: TeacherMixture | None = None,
    softcap: Softcap | Sequence[Softcap] = None,
) -> TeacherSignal:
    """The fields that `distill.signal` asks for, of hidden states and a head. Arguments as of
    `score`; of a mixture, hidden states, head and softcap of each teacher."""
    teachers = hidden, kernel
    options = p.options | {"v": p.vocab_size, "mixture": mixture, "softcap": softcap}
    fields = TEACHER_SIGNALS[p.distill.signal](p, teachers, sequences, ids, options)
    if p.distill.entropy_aware and p.distill.signal != "hidden":
        best = topk_from_hidden(*teachers, p.distill.entropy_top_k, **options)
        fields["best_ids"], fields["best_logprobs"] = best.ids, best.logprobs
        fields["best_tail"], fields["entropy"] = best.tail_logprob, best.entropy
    return TeacherSignal(**fields)


def mixture_signal(
    p: Projection,
    hidden: Sequence[Float[Array, "B C _"]],
    kernels: Sequence[Float[Array, "_ _"]],
    softcaps: Sequence[Softcap],
    weights: Float[Array, "B K"],
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
) -> TeacherSignal:
    """What `distill.signal` asks of a mixture of teachers, from the hidden states of each at the
    completions; zeros at their padding."""
    assert p.mixture is not None
    packing = pack(sequences, p.mesh)
    rows, width = sequences.loss_mask.shape
    shares = jnp.broadcast_to(weights[:, None], (rows, width, weights.shape[-1]))
    given, mixture = jax.tree.map(packing.pack, (tuple(hidden), shares)), p.mixture
    completions, asked = packed_completions(packing, sequences), jax.tree.map(packing.pack, ids)
    combined = TeacherMixture(mixture, given[1])
    signal = teacher_signal(p, given[0], tuple(kernels), completions, asked, combined, softcaps)
    found: TeacherSignal = jax.tree.map(packing.unpack, signal)
    return replace(found, topk_ids=ids) if p.distill.signal == "student_topk" else found


# The student's side: (projection, hidden [B, C, D], head [V, D], batch, frozen arrays) -> (sum,
# count, metrics).


def _learn_hidden(
    p: Projection,
    hidden: Array,
    kernel: Array,
    batch: TrainBatch,
    frozen: Frozen,
) -> LossSums:
    signal, heads = _signal(batch), frozen["teacher_head"]
    teachers, mixture = signal.hidden, None
    if p.teachers:
        teachers = _of_each(p, signal.hidden, heads)
        # Where each row has one teacher, a weight of 1 leaves that teacher's logits as they are.
        mixture = TeacherMixture(p.mixture or "geometric", signal.weights)
    return divergence_from_hidden(
        hidden,
        kernel,
        teachers,
        heads,
        batch.sequences.loss_mask,
        mixture=mixture,
        teacher_softcap=frozen.get("teacher_softcap"),
        beta=p.distill.jsd_beta,
        lean=p.distill.lean,
        entropy_aware=p.term if p.distill.entropy_aware else None,
        **p.of_student,
    )


def _of_each(p: Projection, hidden: Array, heads: Sequence[Array]) -> list[Array]:
    """Each teacher's part of the hidden states [..., D] that were sent. Without a mixture a row has
    those of its own teacher, from the first on: another teacher's weight there is 0."""
    widths = [head.shape[1] for head in heads]
    if p.mixture is None:
        return [hidden[..., :width] for width in widths]
    return jnp.split(hidden, np.cumsum(widths)[:-1], axis=-1)


def _learn_topk(
    p: Projection,
    hidden: Array,
    kernel: Array,
    batch: TrainBatch,
    frozen: Frozen,
) -> LossSums:
    signal = _signal(batch)
    return topk_divergence_from_hidden(
        hidden,
        kernel,
        signal.topk_ids,
        signal.topk_logprobs,
        signal.tail_logprob,
        batch.sequences.loss_mask,
        beta=p.distill.jsd_beta,
        lean=p.distill.lean,
        v=p.vocab_size,
        **p.of_student,
    )


def _learn_sampled(
    p: Projection, hidden: Array, kernel: Array, batch: TrainBatch, frozen: Frozen
) -> LossSums:
    tokens, mask = completion_tokens(batch.sequences), batch.sequences.loss_mask
    options = p.of_student | {"mask": mask, "v": p.vocab_size}
    logprobs = logprobs_from_hidden(hidden, kernel, tokens, **options)
    return sampled_reverse_kl(
        logprobs,
        _signal(batch).token_logprobs,
        mask,
        sampler_logprobs=batch.sampler_logprobs,
        ratio_cap=p.distill.ratio_cap,
    )


DISTILL_LOSSES: dict[str, Callable[..., LossSums]] = {
    "hidden": _learn_hidden,
    "topk": _learn_topk,
    "student_topk": _learn_topk,
    "sampled": _learn_sampled,
}


def distill_loss(
    p: Projection,
    hidden: Float[Array, "B C D"],
    kernel: Float[Array, "V D"],
    batch: TrainBatch,
    frozen: Frozen,
) -> LossSums:
    """The divergence that `distill.signal` allows, with the entropy-aware term where it is on.

    Args:
        frozen: `teacher_head` [V, Dt] for the signal `hidden`, and `teacher_softcap` [] where its
            logits have one; one for each of several teachers.
            `outcomes` (`losses.token_spans`), of a teacher with another tokenizer.
    """
    if isinstance(batch.teacher, AlignedSignal):
        return token_spans.loss(
            hidden,
            kernel,
            completion_tokens(batch.sequences),
            batch.sequences.loss_mask,
            batch.teacher,
            batch.sampler_logprobs,
            frozen["outcomes"],
            frozen.get("teacher_head"),
            teacher_softcap=frozen.get("teacher_softcap"),
            beta=p.distill.jsd_beta,
            ratio_cap=p.distill.ratio_cap,
            v=p.vocab_size,
            **p.of_student,
        )
    total, count, metrics = DISTILL_LOSSES[p.distill.signal](p, hidden, kernel, batch, frozen)
    if p.keyed:
        metrics |= _by_teacher(p, metrics, _signal(batch).weights)
    if _signal(batch).best_ids is None:
        return total, count, metrics
    extra, _, more = entropy_aware_loss(p, hidden, kernel, batch)
    return total + extra, count, metrics | more


def _by_teacher(p: Projection, metrics: Sums, weights: Float[Array, "B C K"]) -> Sums:
    """The divergence at the tokens of each teacher; a token of several counts by their weights."""
    total, count = metrics.get("divergence") or metrics["reverse_kl_k1"]
    return {
        f"{name}/divergence": ((weights[..., k] * total).sum(), (weights[..., k] * count).sum())
        for k, name in enumerate(p.teachers)
    }


def entropy_aware_loss(
    p: Projection, hidden: Float[Array, "B C D"], kernel: Float[Array, "V D"], batch: TrainBatch
) -> LossSums:
    """The entropy-aware term alone, from the part of the signal that the teacher sends for it."""
    signal = _signal(batch)
    return entropy_aware_from_topk(
        hidden,
        kernel,
        signal.best_ids,
        signal.best_logprobs,
        signal.entropy,
        batch.sequences.loss_mask,
        term=p.term,
        teacher_tail=signal.best_tail,
        lean=p.distill.lean,
        v=p.vocab_size,
        **p.of_student,
    )


def _signal(batch: TrainBatch) -> TeacherSignal:
    assert batch.teacher is not None
    return batch.teacher


def policy_topk(
    p: Projection, model: DecoderConfig, params: Params, sequences: Sequences
) -> Int[Array, "B C K"]:
    """The policy's most probable tokens, for which the signal `student_topk` sends log-probs."""
    packing = pack(sequences, p.mesh)
    hidden = completion_hidden(model, params, packing, p.mesh)
    options = p.options | {"v": p.vocab_size, "softcap": model.final_softcap}
    best = topk_from_hidden(hidden, head(params), p.distill.top_k, **options)
    return packing.unpack(best.ids)
