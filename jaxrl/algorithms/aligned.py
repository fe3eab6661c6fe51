"""What a teacher with another tokenizer sends: its signal at the student's tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxrl.algorithms.signals import Projection, completion_hidden, completion_tokens
from jaxrl.losses.cells import Borders, Cells, opened
from jaxrl.losses.head import PathLogprobs, path_logprobs_from_hidden, topk_from_hidden
from jaxrl.losses.stretches import increments, stretch_sums
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Params, head
from jaxrl.models.packing import Packing, pack
from jaxrl.types import Array, Sequences, TeacherSignal, TokenAlignment


def aligned_score(
    p: Projection,
    model: DecoderConfig,
    params: Params,
    sequences: Sequences,
    alignment: TokenAlignment,
    cells: Cells,
) -> TeacherSignal:
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
    return signal_of_hidden(
        p, hidden, kernel, completion_tokens(sequences), alignment, cells, packing
    )


def signal_of_hidden(
    p: Projection,
    hidden: Float[Array, "X m D"],
    kernel: Float[Array, "V D"],
    tokens: Int[Array, "B C"],
    alignment: TokenAlignment,
    cells: Cells,
    packing: Packing,
) -> TeacherSignal:
    """`aligned_score`, from the hidden states of the packed completions."""
    options = p.options | {"v": p.vocab_size}
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
    fields = {"stretch_logprobs": stretch_sums(found, alignment.starts)}
    open = opened(path.extra, alignment.their_left_out)
    if p.distill.signal == "hidden":
        fields |= {"hidden": packing.unpack(hidden), "open": open}
    elif p.distill.signal == "topk":
        open = packing.pack(open)
        borders = Borders(known[-1], open, open)
        best = topk_from_hidden(
            hidden, kernel, p.distill.top_k, cells=cells, borders=borders, **options
        )
        fields["topk_ids"] = packing.unpack(best.ids)
        fields["topk_logprobs"] = packing.unpack(best.logprobs)
        fields["tail_logprob"] = packing.unpack(best.tail_logprob)

    def at_the_students(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    signal = TeacherSignal(**jax.tree.map(at_the_students, fields))
    of_student = {name: getattr(alignment, name) for name in OF_STUDENT}
    return replace(signal, **of_student)


OF_STUDENT = ("kinds", "sizes", "cells", "ends", "left_out")
"""What the student's loss reads of an alignment."""
