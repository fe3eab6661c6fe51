"""What a teacher with another tokenizer sends: its signal at the student's tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jaxrl.algorithms.signals import Projection, completion_hidden, completion_tokens
from jaxrl.losses.cells import COMMON, Cells
from jaxrl.losses.head import (
    logprobs_from_hidden,
    logprobs_in_cells_from_hidden,
    topk_from_hidden,
)
from jaxrl.losses.stretches import stretch_sums
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Params, head
from jaxrl.models.packing import pack
from jaxrl.types import Aligned, Array, Sequences, TeacherSignal, TokenAlignment, TrainBatch


def aligned_score(
    p: Projection,
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    alignment: TokenAlignment,
    cells: Cells,
    rest: Int[Array, " Vt"],
) -> TeacherSignal:
    """The signal at the student's tokens [B, C], of completions in the teacher's tokens [B, C'].

    At the beginning of a stretch it is about the distribution of its first cell: hidden states, or
    the most probable cells. At every token of a stretch it has the log-prob of the stretch.
    Elsewhere it means nothing.

    Args:
        p: with the teacher's number of tokens.
        sequences: of the teacher's tokens.
        rest: `data.alignment.Aligner.rest`.
    """
    packing = pack(sequences, p.mesh)
    hidden, kernel = completion_hidden(model, params, packing, p.mesh), head(params)
    options = p.options | {"v": p.vocab_size}
    tokens, fields = packing.pack(completion_tokens(sequences)), {}
    if p.distill.signal == "sampled":
        logprobs = logprobs_from_hidden(hidden, kernel, tokens, **options)
    else:
        within = packing.pack(alignment.within)
        logprobs, _ = logprobs_in_cells_from_hidden(hidden, kernel, tokens, rest, within, **options)
        logprobs = jnp.where(within == COMMON, 0, logprobs)
    if p.distill.signal == "hidden":
        fields["hidden"] = packing.unpack(hidden)
    elif p.distill.signal == "topk":
        best = topk_from_hidden(hidden, kernel, p.distill.top_k, cells=cells, **options)
        fields["topk_ids"] = packing.unpack(best.ids)
        fields["topk_logprobs"] = packing.unpack(best.logprobs)
        fields["tail_logprob"] = packing.unpack(best.tail_logprob)
    fields["stretch_logprobs"] = stretch_sums(packing.unpack(logprobs), alignment.starts)

    def at_the_students(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    found = TeacherSignal(**jax.tree.map(at_the_students, fields))
    return replace(found, kinds=alignment.kinds, sizes=alignment.sizes, cells=alignment.cells)


def with_baseline(batch: TrainBatch, signal: str) -> TrainBatch:
    """A training batch on the actor's mesh with the mean over its stretches of log Q - log P, where
    a teacher with another tokenizer sent it the rests of stretches; Q is the policy that sampled.
    It is the same for every row, however the batch is cut into micro-batches. The share of a first
    token within its cell is left out of Q: the policy that sampled did not tell it.

    Args:
        signal: `distill.signal`. For sampled the baseline is 0, as without another tokenizer.
    """
    sent = batch.teacher
    if sent is None or sent.kinds is None:
        return batch
    given = sent.kinds, sent.cells, sent.stretch_logprobs, batch.sampler_logprobs
    baseline = stretch_baseline(*given, batch.sequences.loss_mask & (signal != "sampled"))
    baseline = jax.device_put(baseline, sent.kinds.sharding)
    return replace(batch, teacher=replace(sent, baseline=baseline))


@jax.jit
def stretch_baseline(
    kinds: Array, cells: Array, theirs: Array, sampler_logprobs: Array, mask: Array
) -> Array:
    """[B, C] float32, nats: the mean of `with_baseline`, everywhere. Arguments are [B, C]."""
    starts = (kinds == Aligned.START) & mask
    rest = (starts & (cells < 0)) | ((kinds == Aligned.INSIDE) & mask)
    own = stretch_sums(jnp.where(rest, sampler_logprobs, 0), kinds != Aligned.INSIDE)
    mean = jnp.where(starts, own - theirs, 0).sum() / jnp.maximum(starts.sum(), 1)
    return jnp.broadcast_to(mean, kinds.shape)
