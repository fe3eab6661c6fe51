"""What a teacher with another tokenizer sends: its signal at the student's tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jaxrl.algorithms.signals import Projection, completion_hidden, completion_tokens
from jaxrl.losses.head import logprob_outside, logprobs_from_hidden, topk_from_hidden
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
    to_student: Int[Array, " Vt"],
) -> TeacherSignal:
    """The signal at the student's tokens [B, C], of completions in the teacher's tokens [B, C'].

    At an exact token it is about the distribution that predicts it: hidden states or the most
    probable tokens of those that both models have, with the probability of all others. At the
    tokens of every stretch it has the log-prob of the stretch. Elsewhere it means nothing.

    Args:
        p: with the teacher's number of tokens.
        sequences: of the teacher's tokens.
        to_student: the student's id of each of the teacher's tokens, -1 where it has none.
    """
    packing = pack(sequences, p.mesh)
    hidden, kernel = completion_hidden(model, params, packing, p.mesh), head(params)
    options = p.options | {"v": p.vocab_size}
    known = to_student >= 0
    tokens = packing.pack(completion_tokens(sequences))
    logprobs = packing.unpack(logprobs_from_hidden(hidden, kernel, tokens, **options))
    found = TeacherSignal(stretch_logprobs=stretch_sums(logprobs, alignment.starts))
    fields: dict[str, Array] = {}
    if p.distill.signal == "hidden":
        tail = logprob_outside(hidden, kernel, known, **options)
        fields = {"hidden": hidden, "tail_logprob": tail}
    elif p.distill.signal == "topk":
        best = topk_from_hidden(hidden, kernel, p.distill.top_k, shared=known, **options)
        fields = {"topk_ids": to_student[best.ids], "topk_logprobs": best.logprobs}
        fields["tail_logprob"] = best.tail_logprob
    found = replace(found, **jax.tree.map(packing.unpack, fields))

    def at_the_students(x: Array) -> Array:
        index = alignment.index.reshape(*alignment.index.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, 1)

    there = jax.tree.map(at_the_students, found)
    return replace(there, kinds=alignment.kinds, sizes=alignment.sizes)
