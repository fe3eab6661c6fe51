"""What a teacher with another tokenizer sends: its signal at the student's tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl.algorithms.signals import Projection, completion_hidden, completion_tokens
from jaxrl.losses.cells import LEFT_OUT, Borders, Cells, opened
from jaxrl.losses.divergence import clamped_gap
from jaxrl.losses.head import PathLogprobs, path_logprobs_from_hidden, topk_from_hidden
from jaxrl.losses.layout import Softcap
from jaxrl.losses.stretches import increments, stretch_sums
from jaxrl.models.config import DecoderConfig
from jaxrl.models.packing import Packing, pack
from jaxrl.models.parameters import Params, head
from jaxrl.types import (
    Aligned,
    AlignedSignal,
    Array,
    HiddenSignal,
    Sequences,
    TokenAlignment,
    TopKSignal,
    TrainBatch,
    Tree,
)


def aligned_score(
    p: Projection,
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    alignment: TokenAlignment,
    cells: Cells,
) -> AlignedSignal:
    """The signal at the student's tokens [B, C], of completions in the teacher's tokens [B, C'].

    At the beginning of a stretch it is about the distribution of its first cell: hidden states, or
    the most probable cells. At every token of a stretch it has the log-prob of the stretch.
    Elsewhere it means nothing.

    Args:
        p: with the teacher's number of tokens.
        sequences: of the teacher's tokens.
    """
    packing = pack(sequences, p.mesh)
    hidden, kernel = completion_hidden(model, params, packing, p.mesh), head(params)
    tokens, softcap = completion_tokens(sequences), model.final_softcap
    return signal_of_hidden(p, hidden, kernel, tokens, alignment, cells, packing, softcap)


def signal_of_hidden(
    p: Projection,
    hidden: Float[Array, "X m D"],
    kernel: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    alignment: TokenAlignment,
    cells: Cells,
    packing: Packing,
    softcap: Softcap = None,
) -> AlignedSignal:
    """`aligned_score`, from the hidden states of the packed completions."""
    options = p.options | {"v": p.vocab_size, "softcap": softcap}
    first = alignment.their_cells
    if p.distill.signal == "sampled":
        first = jnp.full_like(first, -1)
    given = tokens, first, first, alignment.their_ends, alignment.their_left_out
    tokens, *known = map(packing.pack, given)
    path = path_logprobs_from_hidden(
        hidden, kernel, tokens, cells.teacher, cells.bits, *known, **options
    )
    path = PathLogprobs(*map(packing.unpack, path))
    found = increments(path, first, alignment.their_left_out)
    fields: dict[str, Tree] = {
        "stretch_logprobs": stretch_sums(found, alignment.starts),
        "path_logprobs": stretch_sums(path.whole, alignment.starts),
    }
    open = opened(path.extra, alignment.their_left_out)
    if p.distill.signal == "hidden":
        fields |= {"at_borders": HiddenSignal(packing.unpack(hidden)), "open": open}
    elif p.distill.signal == "topk":
        open = packing.pack(open)
        borders = Borders(cells, known[-1], open, open)
        best = topk_from_hidden(hidden, kernel, p.distill.top_k, borders=borders, **options)
        outcomes = TopKSignal(best.ids, best.logprobs, best.tail_logprob)
        fields["at_borders"] = jax.tree.map(packing.unpack, outcomes)

    def at_the_students(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    of_student = {name: getattr(alignment, name) for name in OF_STUDENT}
    return AlignedSignal(**jax.tree.map(at_the_students, fields), **of_student)


OF_STUDENT = ("kinds", "sizes", "cells", "ends", "left_out")
"""What the student's loss reads of an alignment."""


def with_baseline(batch: TrainBatch, signal: str) -> TrainBatch:
    """Returns a training batch on the actor's mesh with `stretch_baseline`, where a teacher with
    another tokenizer sent its signal; 0 for the signal `sampled`. It is of the whole batch, however
    that is cut into micro-batches."""
    sent = batch.teacher
    if not isinstance(sent, AlignedSignal):
        return batch
    mask = batch.sequences.loss_mask & (signal != "sampled")
    given = sent.kinds, sent.cells, sent.path_logprobs, batch.sampler_logprobs, mask
    baseline = jax.device_put(stretch_baseline(*given), sent.kinds.sharding)
    return replace(batch, teacher=replace(sent, baseline=baseline))


@jax.jit
def stretch_baseline(
    kinds: Array, cells: Array, theirs: Array, sampler_logprobs: Array, mask: Array
) -> Array:
    """Computes [B, C] float32, nats: at the tokens that are known to be one of a set
    (`losses.stretches`) the mean over the other stretches of the batch of log Q - log P of their
    tokens, Q being the policy that sampled; 0 where there is no other. A stretch's own difference
    is left out: its baseline would depend on what it sampled, and take part of its gradient away.
    Differences are kept within +-20 nats. Arguments are [B, C].
    """
    begins = kinds != Aligned.INSIDE
    chosen = (cells <= LEFT_OUT) & mask & (kinds != Aligned.NOT)
    own = stretch_sums(jnp.where(mask, sampler_logprobs, 0), begins)
    some = stretch_sums(chosen.astype(jnp.float32), begins) > 0
    counted = (kinds == Aligned.START) & some & mask
    gaps, _ = clamped_gap(own, theirs, counted)
    gap, one = stretch_sums(gaps, begins), stretch_sums(counted.astype(jnp.float32), begins)
    others = (gaps.sum() - gap) / jnp.maximum(counted.sum() - one, 1)
    return jnp.where(chosen & (counted.sum() > one), others, 0)
