"""Signals: what a teacher sends for each completion token (`teacher_signal`), and the loss that the
student computes from it (`distill_loss`); of several teachers, which share of each has the rows of
a batch (`teacher_weights`).

| `distill.signal` | sent per token | loss |
|---|---|---|
| hidden | `HiddenSignal`: last hidden state | exact generalised JSD |
| topk | `TopKSignal`: its K best ids | JSD of K + 1 outcomes: a lower bound |
| student_topk | `TopKSignal` at the student's K best ids | as topk, on the student's support |
| sampled | `SampledSignal`: log-prob of the token | unbiased estimate of KL(student || teacher) |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.data.rows import find_value, listed
from jaxrl.errors import UserError, near
from jaxrl.losses import token_spans
from jaxrl.losses.algorithm_table import OWN, PAIR, MixtureKind, SignalSpec
from jaxrl.losses.chunked import Softcap
from jaxrl.losses.distill import (
    Measures,
    OwnLoss,
    OwnMetrics,
    OwnSent,
    divergence_from_hidden,
    divergence_sums,
    entropy_aware_from_topk,
    topk_divergence_from_hidden,
)
from jaxrl.losses.divergence import (
    Divergence,
    EntropyAware,
    LossSums,
    SummedDivergence,
    make_divergence,
    sampled_reverse_kl,
)
from jaxrl.losses.head import (
    TeacherMixture,
    logprobs_at,
    logprobs_from_hidden,
    term_values,
    topk_from_hidden,
)
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import forward_packed
from jaxrl.models.packing import Packing, pack_streams
from jaxrl.models.parameters import Params, head
from jaxrl.process.json_types import Keywords
from jaxrl.process.plugin import BoundFunction
from jaxrl.types import (
    AlignedSignal,
    Array,
    Frozen,
    HiddenSignal,
    OwnSignal,
    Prompt,
    Rollout,
    SampledSignal,
    Sequences,
    TeacherSignal,
    TokenAlignment,
    TopKSignal,
    TrainBatch,
    Uncertainty,
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
    by_row: bool = False
    """Whether rows differ in their teachers, whose metrics are then reported apart."""
    softcap: float | None = None
    """`DecoderConfig.final_softcap` of the student."""
    temperature: Float[Array, ""] | None = None
    """Replaces `distill.distill_temperature` where it is an argument of the program."""
    divergence: Divergence | None = None
    """The algorithm's own; None: the generalised JSD."""
    own_signal: SignalSpec | None = None
    """The algorithm's own."""
    own_metrics: OwnMetrics = ()
    """The algorithm's own that are measured as a divergence is."""

    @classmethod
    def from_config(
        cls, config: Config, mesh: Mesh, vocab_size: int, student: DecoderConfig | None = None
    ) -> Projection:
        """
        Args:
            student: for a projection of its hidden states.
        """
        by_row, names = config.data.teacher_key is not None, tuple(config.teachers)
        cap = None if student is None else student.final_softcap
        divergence = None
        if isinstance(config.spec.divergence, BoundFunction):
            divergence = make_divergence(config.spec.divergence)
        measured = tuple(
            (f"{OWN}/{name}", SummedDivergence(function))
            for name, function in config.spec.metrics_asking(PAIR).items()
        )
        made = cls(config.distill, mesh, vocab_size, names, config.mixture, by_row, cap)
        own = config.spec.signal
        if own is not None and mesh.shape.get("tensor", 1) > 1:
            raise UserError(
                "an algorithm's own signal needs all of the vocabulary on one device: set"
                " actor.parallel.tensor=1 and teacher.parallel.tensor=1"
            )
        return replace(made, divergence=divergence, own_metrics=measured, own_signal=own)

    @property
    def options(self) -> Keywords:
        """Returns the options of the functions of `losses`, with the student's softcap."""
        d = self.distill
        temperature = d.distill_temperature if self.temperature is None else self.temperature
        options: Keywords = {"chunk": d.loss_chunk, "mesh": self.mesh, "v": self.vocab_size}
        return options | {"temperature": temperature, "softcap": self.softcap, "lean": d.lean}

    @property
    def measures(self) -> Measures:
        return {
            "beta": self.distill.jsd_beta,
            "divergence": self.divergence,
            "own_metrics": self.own_metrics,
        }

    @property
    def term(self) -> EntropyAware:
        d = self.distill
        return EntropyAware(threshold=d.entropy_threshold, top_k=d.entropy_top_k)


def signal_tensors(
    distill: DistillConfig, dtype: str, width: int, own: SignalSpec | None = None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Lists the tensors of a signal: name -> dtype, and the shape for each token.

    Args:
        dtype, width: of hidden states.
        own: of an algorithm that has one.
    """
    if own is not None:
        return dict(own.tensors)
    if distill.signal == "hidden":
        return {"hidden": (dtype, (width,))}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_logprobs": ("float32", ())}
    if distill.signal != "sampled":
        tensors = _best_tensors("topk_ids", "topk_logprobs", "tail_logprob", distill.top_k)
    if distill.entropy_aware:
        tensors |= _best_tensors("best_ids", "best_logprobs", "best_tail", distill.entropy_top_k)
        tensors["entropy"] = ("float32", ())
    return tensors


def _best_tensors(
    ids: str, logprobs: str, tail: str, k: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {ids: ("int32", (k,)), logprobs: ("float32", (k,)), tail: ("float32", ())}


def completion_hidden(
    model: DecoderConfig, params: Params, packing: Packing, mesh: Mesh, **options: Any
) -> Float[Array, "X m D"]:
    """Computes the hidden states that predict the tokens of the completions. This is the only place
    that shifts by one token. The options are those of `forward_packed`."""
    hidden = forward_packed(model, params, packing, mesh=mesh, **options)
    return packing.select_predictors(hidden, mesh)


def completion_logprobs(
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    mesh: Mesh,
    *,
    temperature: float,
    chunk: int,
) -> Float[Array, "B C"]:
    """Computes the log-prob of each completion token in float32, in nats, at the temperature of
    sampling."""
    packing = pack_streams(sequences, mesh)
    hidden = completion_hidden(model, params, packing, mesh)
    tokens = packing.completions.pack(completion_tokens(sequences))
    options: Keywords = {"chunk": chunk, "mesh": mesh, "softcap": model.final_softcap}
    logprobs = logprobs_from_hidden(
        hidden, head(params), tokens, temperature=temperature, **options
    )
    return packing.completions.unpack(logprobs)


def completion_tokens(sequences: Sequences) -> Int[Array, "B C"]:
    """Returns the tokens of the completions."""
    return sequences.tokens[:, sequences.tokens.shape[1] - sequences.loss_mask.shape[1] :]


def pack_completions(packing: Packing, batch: TrainBatch) -> TrainBatch:
    """Packs a batch for the losses of single tokens into streams [X, m, ...], without prompts."""
    tokens, trained = completion_tokens(batch.sequences), batch.sequences.loss_mask
    return TrainBatch(
        Sequences(*map(packing.completions.pack, (tokens, trained, trained))),
        jax.tree.map(packing.completions.pack, batch.teacher),
        jax.tree.map(packing.completions.pack, batch.sampler_logprobs),
        teacher_weights=jax.tree.map(packing.completions.pack, batch.teacher_weights),
    )


def score_completions(
    projection: Projection,
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
    packing = pack_streams(sequences, projection.mesh)
    hidden, kernel = completion_hidden(model, params, packing, projection.mesh), head(params)
    if alignment is not None and outcomes is not None:
        d, options = projection.distill, projection.options | {"softcap": model.final_softcap}
        sent = token_spans.aligned_signal(
            hidden,
            kernel,
            packing.completions.pack(completion_tokens(sequences)),
            outcomes,
            signal=d.signal,
            top_k=d.top_k,
            **options,
        )
        sent = jax.tree.map(packing.completions.unpack, sent)
        return token_spans.align_to_student(sent, alignment)
    return _unpack_signal(
        projection, packing, hidden, kernel, sequences, ids, None, model.final_softcap
    )


def mixture_signal(
    projection: Projection,
    hidden: Sequence[Float[Array, "B C _"]],
    kernels: Sequence[Float[Array, "_ _"]] | None,
    softcaps: Sequence[Softcap],
    weights: Float[Array, "B K"],
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
) -> TeacherSignal:
    """Computes what `distill.signal` asks of a mixture of teachers, from the hidden states of each
    at the completions; zeros at their padding.

    Args:
        kernels: the LM head of each; None for the signal `hidden`.
    """
    if projection.distill.signal == "hidden":
        return HiddenSignal(jnp.concatenate(hidden, -1))
    assert projection.mixture is not None and kernels is not None
    packing = pack_streams(sequences, projection.mesh)
    shares = jnp.repeat(weights[:, None], sequences.loss_mask.shape[1], 1)
    streams, shares = jax.tree.map(packing.completions.pack, (tuple(hidden), shares))
    mixture = TeacherMixture(projection.mixture, shares)
    teachers = streams, tuple(kernels)
    return _unpack_signal(projection, packing, *teachers, sequences, ids, mixture, softcaps)


def merge_signal(
    so_far: TeacherSignal | None, signal: TeacherSignal, rows: Bool[Array, " B"], width: int
) -> TeacherSignal:
    """Puts the signal of one of several teachers in its rows of the signal so far.

    Args:
        width: of the widest teacher's hidden states; narrower ones get zeros at their end.
    """
    if isinstance(signal, HiddenSignal):
        more = [(0, 0), (0, 0), (0, width - signal.hidden.shape[-1])]
        signal = HiddenSignal(jnp.pad(signal.hidden, more))
    if so_far is None:
        return signal

    def choose(old: Array, new: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    merged: TeacherSignal = jax.tree.map(choose, so_far, signal)
    return merged


def _unpack_signal(
    projection: Projection,
    packing: Packing,
    hidden: Float[Array, "X m Dt"] | Sequence[Array],
    kernel: Float[Array, "Vt Dt"] | Sequence[Array],
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
    mixture: TeacherMixture | None,
    softcap: Softcap | Sequence[Softcap],
) -> TeacherSignal:
    completions = pack_completions(packing, TrainBatch(sequences)).sequences
    asked = jax.tree.map(packing.completions.pack, ids)
    streams = teacher_signal(projection, hidden, kernel, completions, asked, mixture, softcap)
    signal: TeacherSignal = jax.tree.map(packing.completions.unpack, streams)
    if projection.distill.signal == "student_topk":  # the ids asked for, at padding too
        assert isinstance(signal, TopKSignal)
        return replace(signal, topk_ids=ids)
    return signal


def teacher_signal(
    projection: Projection,
    hidden: Float[Array, "B C Dt"] | Sequence[Array],
    kernel: Float[Array, "Vt Dt"] | Sequence[Array],
    sequences: Sequences,
    ids: Int[Array, "B C K"] | None,
    mixture: TeacherMixture | None = None,
    softcap: Softcap | Sequence[Softcap] = None,
) -> TeacherSignal:
    """Computes what `distill.signal` asks for, of hidden states and a head. Arguments as in
    `score_completions`; of a mixture, hidden states, head and softcap of each teacher."""
    if projection.distill.signal == "hidden":
        return HiddenSignal(hidden)
    teachers = hidden, kernel
    if projection.own_signal is not None:
        send = projection.own_signal.send
        assert isinstance(send, BoundFunction)
        ids = completion_tokens(sequences)
        options = projection.options | {"softcap": softcap}
        return OwnSignal(term_values(OwnSent(send), *teachers, {"ids": ids}, **options))
    options = projection.options | {"softcap": softcap}
    mixed = options | {"mixture": mixture}
    uncertainty: dict[str, Array] = {}
    if projection.distill.entropy_aware:
        best = topk_from_hidden(*teachers, projection.distill.entropy_top_k, **mixed)
        uncertainty = {"best_ids": best.ids, "best_logprobs": best.logprobs}
        uncertainty |= {"best_tail": best.tail_logprob, "entropy": best.entropy}
    if projection.distill.signal == "topk":
        best = topk_from_hidden(*teachers, projection.distill.top_k, **mixed)
        return TopKSignal(best.ids, best.logprobs, best.tail_logprob, **uncertainty)
    if projection.distill.signal == "student_topk":
        logprobs, tail = logprobs_at(*teachers, ids, **mixed)
        return TopKSignal(ids, logprobs, tail, **uncertainty)
    tokens = completion_tokens(sequences)
    if mixture is None:
        logprobs = logprobs_from_hidden(hidden, kernel, tokens, **options)
    else:
        logprobs = logprobs_at(*teachers, tokens[..., None], **mixed)[0][..., 0]
    return SampledSignal(logprobs, **uncertainty)


def distill_loss(
    projection: Projection,
    hidden: Float[Array, "B C D"],
    kernel: Float[Array, "V D"],
    batch: TrainBatch,
    frozen: Frozen,
) -> LossSums:
    """Computes the divergence that the batch's signal allows, with the entropy-aware term where it
    is on.

    Args:
        hidden, kernel: the student's hidden states at the completions, and its LM head.
        frozen: `teacher_head` [V, Dt] for the signal `hidden`, and `teacher_softcap` [] where its
            logits have one; one for each of several teachers.
            `outcomes` (`losses.token_spans`), of a teacher with another tokenizer.
    """
    d, signal, mask = projection.distill, batch.teacher, batch.sequences.loss_mask
    if isinstance(signal, AlignedSignal):
        tokens = completion_tokens(batch.sequences)
        return token_spans.span_loss(
            *(hidden, kernel),
            token_spans.SampledTokens(tokens, mask, batch.sampler_logprobs),
            signal,
            *(frozen["outcomes"], frozen.get("teacher_head")),
            teacher_softcap=frozen.get("teacher_softcap"),
            ratio_cap=d.ratio_cap,
            **projection.measures,
            **projection.options,
        )
    if isinstance(signal, OwnSignal):
        assert projection.own_signal is not None
        own = projection.own_signal.loss
        assert isinstance(own, BoundFunction)
        given = signal.tensors | {"ids": completion_tokens(batch.sequences)}
        return divergence_sums(OwnLoss(own), [(hidden, kernel)], mask, given, **projection.options)
    if isinstance(signal, HiddenSignal):
        heads, teachers, mixture = frozen["teacher_head"], signal.hidden, None
        if projection.teachers:
            widths = [head.shape[1] for head in heads]
            # Without a mixture a row has the states of its own teacher alone, from the first on.
            teachers = [signal.hidden[..., :width] for width in widths]
            if projection.mixture is not None:
                teachers = jnp.split(signal.hidden, np.cumsum(widths)[:-1], axis=-1)
            # Where each row has one teacher, a weight of 1 leaves that teacher's logits as they
            # are.
            mixture = TeacherMixture(projection.mixture or "geometric", batch.teacher_weights)
        total, count, metrics = divergence_from_hidden(
            *(hidden, kernel, teachers, heads, mask),
            mixture=mixture,
            teacher_softcap=frozen.get("teacher_softcap"),
            entropy_aware=projection.term if d.entropy_aware else None,
            **projection.measures,
            **projection.options,
        )
    elif isinstance(signal, TopKSignal):
        sent = signal.topk_ids, signal.topk_logprobs, signal.tail_logprob
        total, count, metrics = topk_divergence_from_hidden(
            hidden, kernel, *sent, mask, **projection.measures, **projection.options
        )
    else:
        assert isinstance(signal, SampledSignal)
        tokens = completion_tokens(batch.sequences)
        total, count, metrics = sampled_reverse_kl(
            logprobs_from_hidden(hidden, kernel, tokens, mask=mask, **projection.options),
            signal.token_logprobs,
            mask,
            sampler_logprobs=batch.sampler_logprobs,
            ratio_cap=d.ratio_cap,
        )
    if projection.by_row:
        # At the tokens of each teacher; a token of several counts by their weights.
        sums, counts = metrics.get("divergence") or metrics["reverse_kl_k1"]
        for k, name in enumerate(projection.teachers):
            share = batch.teacher_weights[..., k]
            metrics[f"{name}/divergence"] = ((share * sums).sum(), (share * counts).sum())
    if isinstance(signal, HiddenSignal) or signal.best_ids is None:
        return total, count, metrics
    extra, _, more = entropy_aware_loss(projection, hidden, kernel, batch)
    return total + extra, count, metrics | more


def entropy_aware_loss(
    projection: Projection,
    hidden: Float[Array, "B C D"],
    kernel: Float[Array, "V D"],
    batch: TrainBatch,
) -> LossSums:
    """Computes the entropy-aware term alone, from what the teacher sends for it."""
    signal = batch.teacher
    assert isinstance(signal, Uncertainty)
    mask = batch.sequences.loss_mask
    term, options = projection.term, projection.options
    return entropy_aware_from_topk(hidden, kernel, signal, mask, term=term, **options)


def policy_topk(
    projection: Projection, model: DecoderConfig, params: Params, sequences: Sequences
) -> Int[Array, "B C K"]:
    """Returns the policy's most probable tokens, for which the signal `student_topk` sends
    log-probs."""
    packing = pack_streams(sequences, projection.mesh)
    hidden = completion_hidden(model, params, packing, projection.mesh)
    options = projection.options | {"softcap": model.final_softcap}
    best = topk_from_hidden(hidden, head(params), projection.distill.top_k, **options)
    return packing.completions.unpack(best.ids)


def teacher_weights(config: Config, rollout: Rollout) -> np.ndarray | None:
    """Returns [B, K] float32: the share of each of `config.teachers` in the distribution from which
    a row learns. Rows sum to 1; padding rows are 0. None where there is one teacher."""
    if not config.teachers:
        return None
    weights = np.zeros((len(rollout.group_ids), len(config.teachers)), np.float32)
    for row, prompt in enumerate(rollout.prompts):
        weights[row] = prompt_weights(config, prompt)
    return weights


def add_teacher_weights(
    config: Config, rollout: Rollout, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns the training batch of a rollout with the weights of several teachers, and the tokens
    that learn from each."""
    weights = teacher_weights(config, rollout)
    assert weights is not None, "there are several teachers"
    mask = np.asarray(batch.sequences.loss_mask)
    tokens = mask.sum(-1) @ weights.astype(np.float64)
    pairs = zip(config.teachers, tokens, strict=True)
    metrics = {f"distill/{name}/tokens": float(count) for name, count in pairs}
    shares = np.repeat(weights[:, None], mask.shape[1], 1)
    return replace(batch, teacher_weights=shares), metrics


def row_weights(config: Config, columns: Mapping[str, object], where: str) -> tuple[float, ...]:
    """Returns the share of each of `config.teachers` for one row of data.

    Args:
        columns: of the row.
        where: the row, for the error.

    Raises:
        UserError: `data.teacher_key` does not say from which teacher the row learns.
    """
    key, names = config.data.teacher_key, tuple(config.teachers)
    if key is None:
        fixed = [teacher.weight or 1.0 for teacher in config.teachers.values()]
        return tuple(weight / sum(fixed) for weight in fixed)
    stated = find_value(columns, key)
    if isinstance(stated, str) and stated in names:
        return tuple(float(name == stated) for name in names)
    if config.mixture is None or not isinstance(stated, Mapping):
        hint = near(stated, names) if isinstance(stated, str) else ""
        problem = f"has {stated!r} there" if key in columns else "has no such field"
        raise UserError(
            f"data.teacher_key={key}: {where} {problem}; it must name one of the teachers"
            f" {listed(names)}{hint}"
        )
    # A table of rows with different names has null for those that a row leaves out.
    weights = {name: weight for name, weight in stated.items() if weight is not None}
    wrong = any(
        name not in names or not isinstance(weight, Real) or not 0 <= float(weight) < np.inf
        for name, weight in weights.items()
    )
    if wrong or not any(weights.values()):
        raise UserError(
            f"data.teacher_key={key}: {where} has the weights {weights}; they must be numbers of at"
            f" least 0, not all of them 0, by the teachers {listed(names)}"
        )
    shares = [float(weights.get(name, 0.0)) for name in names]
    return tuple(share / sum(shares) for share in shares)


def prompts_by_teacher(config: Config, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Returns name -> positions of the prompts that learn from this teacher alone."""
    names = tuple(config.teachers)
    chosen = [names[int(np.argmax(prompt_weights(config, prompt)))] for prompt in prompts]
    return {name: [i for i, c in enumerate(chosen) if c == name] for name in names}


def prompt_weights(config: Config, prompt: Prompt) -> tuple[float, ...]:
    """Returns the shares of one prompt. Raises UserError if its row does not give any."""
    return row_weights(config, prompt.columns, f"the row {prompt.text[:60]!r}")
