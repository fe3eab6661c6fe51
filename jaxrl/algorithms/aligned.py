"""What a teacher with another tokenizer sends: its signal at the student's tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl.algorithms.signals import Projection, completion_hidden, completion_tokens
from jaxrl.losses.cells import Cells
from jaxrl.losses.head import (
    logprobs_from_hidden,
    logprobs_in_cells_from_hidden,
    topk_from_hidden,
)
from jaxrl.losses.stretches import stretch_sums
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Params, head
from jaxrl.models.packing import pack
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
    options = p.options | {"v": p.vocab_size}
    tokens, fields = packing.pack(completion_tokens(sequences)), {}
    if p.distill.signal == "sampled":
        logprobs = logprobs_from_hidden(hidden, kernel, tokens, **options)
    else:
        within = packing.pack(alignment.within)
        logprobs, _ = logprobs_in_cells_from_hidden(
            hidden, kernel, tokens, cells.teacher, within, **options
        )
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
