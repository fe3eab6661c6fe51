"""Prompts and completions as rectangular arrays, on the host.

A row is a left-padded prompt followed by a right-padded completion: [B, T] with T = prompt width +
C. Widths come from a few buckets, so that few programs are compiled; which bucket is taken changes
padding only. Rows added to make B a multiple have an all-False mask and train nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import DTypeLike

from jaxrl.data.stream import NEEDS_COMPLETIONS
from jaxrl.errors import UserError
from jaxrl.models.batching import bucket
from jaxrl.types import Completion, FinishReason, Prompt, Rollout, Sequences

NARROWEST = 32
"""Smallest width of prompts or completions, tokens."""
DATA = -1
"""`policy_version` of completions that no policy sampled, and group id of padding rows."""


def padded_width(n: int, limit: int, multiple: int = 2) -> int:
    """Returns the smallest width among 32, 48, 64, 96, 128, 192, ... that holds n, rounded up to
    `multiple`.

    Args:
        limit: most tokens there may be; rounded up, itself a width, and the largest.
        multiple: what suits the devices (`models.kernels`); never odd, which some kernels refuse.
    """
    if not 0 <= n <= limit:
        raise ValueError(f"{n} tokens do not fit a width of at most {limit}")
    return bucket(n, smallest=NARROWEST, steps=2, multiple=multiple, most=limit)


def pack_sequences(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    prompt_width: int,
    completion_width: int,
    pad_id: int,
    row_multiple: int = 1,
) -> Sequences:
    """Packs token lists into numpy arrays.

    Args:
        prompt_width, completion_width: T - C and C, in tokens.
        row_multiple: masked rows are added until this divides B.

    Returns:
        tokens [B, T] int32, mask [B, T] bool, loss_mask [B, C] bool (the whole completion trains).
    """
    rows = len(prompts) + -len(prompts) % row_multiple
    tokens = np.full((rows, prompt_width + completion_width), pad_id, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = prompt_width - len(prompt), prompt_width + len(completion)
        tokens[row, start:end] = (*prompt, *completion)
        mask[row, start:end] = True
    return Sequences(tokens, mask, mask[:, prompt_width:].copy())


def make_rollout(
    prompts: Sequence[Prompt],
    completions: Sequence[Sequence[Completion]],
    *,
    policy_version: int,
    pad_id: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    row_multiple: int = 1,
    width_multiple: int = 2,
) -> Rollout:
    """Packs sampled completions; row p * G + g is sample g of prompt p, and its group id is p.
    What an environment said in an episode does not train.

    Args:
        completions: for each prompt its samples.
        policy_version: batches trained into the weights that sampled.
        max_prompt_tokens, max_new_tokens: limits of the two widths, each a bucket.
        row_multiple: masked rows (group id -1, no prompt) are added until this divides B.
        width_multiple: the two widths are rounded up to a multiple of it.
    """
    pairs = zip(prompts, completions, strict=True)
    row_prompts = tuple(prompt for prompt, samples in pairs for _ in samples)
    row_completions = tuple(chain(*completions))
    prompt_tokens = [prompt.tokens for prompt in row_prompts]
    tokens = [completion.tokens for completion in row_completions]
    longest_prompt = max(map(len, prompt_tokens), default=0)
    longest = max(map(len, tokens), default=0)
    sequences = pack_sequences(
        prompt_tokens,
        tokens,
        prompt_width=padded_width(longest_prompt, max_prompt_tokens, width_multiple),
        completion_width=padded_width(longest, max_new_tokens, width_multiple),
        pad_id=pad_id,
        row_multiple=row_multiple,
    )
    for trains, completion in zip(sequences.loss_mask, row_completions, strict=False):
        trains[: len(completion.tokens)] = completion.sampled
    shape = sequences.loss_mask.shape
    group_ids = np.full(len(sequences.tokens), DATA, np.int32)
    sizes = np.array([*map(len, completions)], int)
    group_ids[: len(row_prompts)] = np.repeat(np.arange(len(prompts)), sizes)
    experts = None  # [B, T, L, k]: those that the completions recorded, -1 elsewhere
    for row, completion in enumerate(row_completions):
        if (own := completion.experts) is not None:
            if experts is None:
                experts = np.full((*sequences.tokens.shape, *own.shape[1:]), -1, own.dtype)
            start = int(np.argmax(sequences.mask[row]))
            experts[row, start : start + len(own)] = own
    return Rollout(
        sequences=sequences,
        prompts=row_prompts,
        completions=row_completions,
        group_ids=group_ids,
        logprobs=right_padded([c.logprobs for c in row_completions], shape, np.float32),
        sampler_logprobs=right_padded(
            [c.sampler_logprobs for c in row_completions], shape, np.float32
        ),
        policy_version=policy_version,
        experts=experts,
    )


def as_the_teacher_reads(
    rollout: Rollout, max_prompt_tokens: int, width_multiple: int = 2
) -> Rollout:
    """Returns the rollout with the teacher's prompts before the same completions; unchanged where
    the teacher reads the student's prompts.

    Args:
        max_prompt_tokens: limit of the teacher's prompts, whose width is a bucket of it.
        width_multiple: that width is rounded up to a multiple of it.
    """
    given = [prompt.teacher_tokens for prompt in rollout.prompts]
    theirs = [tokens for tokens in given if tokens is not None]
    if not theirs:
        return rollout
    assert len(theirs) == len(given), "one template makes the teacher's prompts of all rows"
    own, c = rollout.sequences, rollout.sequences.loss_mask.shape[1]
    prompts = pack_sequences(
        theirs,
        [()] * len(theirs),
        prompt_width=padded_width(max(map(len, theirs)), max_prompt_tokens, width_multiple),
        completion_width=0,
        pad_id=0,  # the mask leaves padding out
        row_multiple=len(own.tokens),
    )
    tokens = np.concatenate([prompts.tokens, own.tokens[:, -c:]], 1)
    mask = np.concatenate([prompts.mask, own.mask[:, -c:]], 1)
    return replace(rollout, sequences=Sequences(tokens, mask, own.loss_mask))


def data_completion(
    prompt: Prompt, max_new_tokens: int, decode: Callable[[Sequence[int]], str]
) -> Completion:
    """Returns the data set's own completion of a prompt, as a batch holds it.

    No policy sampled it: its log-probs are 0 and mean nothing. One that fills `max_new_tokens` has
    the finish reason `length`, because it may have been cut.

    Args:
        decode: tokens -> text, as samples are shown.
    """
    if prompt.completion is None:
        raise UserError(
            f"the data have no completion for {prompt.text[:60]!r}; {NEEDS_COMPLETIONS}"
        )
    tokens = prompt.completion
    unknown = np.zeros(len(tokens), np.float32)
    reason: FinishReason = "length" if len(tokens) >= max_new_tokens else "stop"
    said = [turn.text for turn in prompt.turns if turn.role == "assistant"]
    text = said[-1] if said else decode(tokens)
    return Completion(tokens, unknown, unknown, reason, text, prompt.turns)


def data_rollout(
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    decode: Callable[[Sequence[int]], str],
    **packing: int,
) -> Rollout:
    """Packs the data set's own completions (`data_completion`), one for each prompt; policy_version
    -1."""
    packing["max_new_tokens"] = max_new_tokens
    completions = [[data_completion(prompt, max_new_tokens, decode)] for prompt in prompts]
    return make_rollout(prompts, completions, policy_version=DATA, **packing)


def right_padded(
    values: Sequence[np.ndarray], shape: tuple[int, int], dtype: DTypeLike, fill: int = 0
) -> np.ndarray:
    """Returns [rows, width, ...], with `fill` where there is no value."""
    rest = values[0].shape[1:] if values else ()
    padded = np.full((*shape, *rest), fill, dtype)
    for row, value in zip(padded, values, strict=False):
        row[: len(value)] = value
    return padded
