"""Packing keeps every token, and where it ends up depends on its own row only."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.data.batch import data_rollout, make_rollout, pack_sequences, padded_width
from jaxrl.errors import UserError
from jaxrl.types import Completion, Prompt, Sequences

PAD = 9


def prompt(i: int, tokens: tuple[int, ...], completion: tuple[int, ...] | None = None) -> Prompt:
    return Prompt(i, tokens, f"prompt {i}", completion)


def completion(*tokens: int) -> Completion:
    scores = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Completion(tokens, scores, 2 * scores, "stop")


def unpack(sequences: Sequences) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The (prompt, completion) tokens of every row that has any: given to `pack_sequences`."""
    split = sequences.tokens.shape[1] - sequences.loss_mask.shape[1]
    return [
        (tuple(row[:split][real[:split]].tolist()), tuple(row[split:][real[split:]].tolist()))
        for row, real in zip(sequences.tokens, sequences.mask, strict=True)
        if real.any()
    ]


def test_bucket_is_the_smallest_width_that_holds():
    widths = sorted({padded_width(n, 1000) for n in range(1001)})
    assert widths == [32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000]
    for n in range(1001):
        assert padded_width(n, 1000) == min(w for w in widths if w >= n)
    assert padded_width(3, 16) == 16
    assert (
        padded_width(3, 15) == 16 and padded_width(3, 15, 64) == 64
    )  # what is allowed is rounded up too
    with pytest.raises(ValueError, match="17 tokens do not fit a width of at most 16"):
        padded_width(17, 16)


def test_layout_by_hand():
    s = pack_sequences([[1, 2], [3]], [[4], [5, 6]], prompt_width=3, completion_width=2, pad_id=PAD)
    assert s.tokens.tolist() == [[PAD, 1, 2, 4, PAD], [PAD, PAD, 3, 5, 6]]
    assert s.mask.astype(int).tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert s.loss_mask.astype(int).tolist() == [[1, 0], [1, 1]]
    assert (s.tokens.dtype, s.mask.dtype, s.loss_mask.dtype) == (np.int32, bool, bool)


def test_unpacking_gives_back_what_was_packed():
    rng = np.random.default_rng(0)
    rows = [
        tuple(tuple(rng.integers(0, 12, rng.integers(low, 8)).tolist()) for low in (1, 0))
        for _ in range(50)
    ]
    for multiple in (1, 8):
        packed = pack_sequences(
            [p for p, _ in rows],
            [c for _, c in rows],
            prompt_width=8,
            completion_width=9,
            pad_id=0,  # a real id too: the mask alone says what is padding
            row_multiple=multiple,
        )
        assert unpack(packed) == rows
        assert len(packed.tokens) % multiple == 0
        assert not packed.mask[50:].any() and not packed.loss_mask[50:].any()


def test_a_row_does_not_depend_on_the_others():
    prompts, completions = [[1, 2], [3], [4, 5, 6]], [[7], [8, 8], [7, 8, 7]]
    widths = {"prompt_width": 4, "completion_width": 3, "pad_id": PAD}
    together = pack_sequences(prompts, completions, **widths)
    for row in range(3):
        alone = pack_sequences([prompts[row]], [completions[row]], **widths)
        assert np.array_equal(alone.tokens[0], together.tokens[row])
        assert np.array_equal(alone.mask[0], together.mask[row])


def test_nothing_is_cut_in_silence():
    with pytest.raises(ValueError, match="could not broadcast"):
        pack_sequences([[1, 2, 3]], [[1]], prompt_width=2, completion_width=2, pad_id=PAD)
    with pytest.raises(ValueError, match="zip"):
        pack_sequences([[1]], [], prompt_width=2, completion_width=2, pad_id=PAD)


def test_rollout_rows_groups_and_logprobs():
    prompts = [prompt(10, (1, 2)), prompt(11, (3,))]
    samples = [[completion(4, 5), completion(6)], [completion(7), completion(8, 8)]]
    r = make_rollout(
        prompts,
        samples,
        policy_version=3,
        pad_id=PAD,
        max_prompt_tokens=3,
        max_new_tokens=2,
        row_multiple=6,
    )
    assert unpack(r.sequences) == [((1, 2), (4, 5)), ((1, 2), (6,)), ((3,), (7,)), ((3,), (8, 8))]
    assert [p.id for p in r.prompts] == [10, 10, 11, 11]
    assert [c.tokens for c in r.completions] == [(4, 5), (6,), (7,), (8, 8)]
    assert r.group_ids.tolist() == [0, 0, 1, 1, -1, -1]
    assert r.logprobs.tolist() == [[-1, -2], [-1, 0], [-1, 0], [-1, -2], [0, 0], [0, 0]]
    assert np.array_equal(r.sampler_logprobs, 2 * r.logprobs)
    assert (r.policy_version, r.sequences.tokens.shape) == (3, (6, 6))  # even widths


def test_rollout_widths_are_buckets_of_what_is_there():
    long = completion(*([1] * 40))
    r = make_rollout(
        [prompt(0, (1,)), prompt(1, (1,) * 70)],
        [[completion(1)], [long]],
        policy_version=0,
        pad_id=PAD,
        max_prompt_tokens=90,
        max_new_tokens=512,
    )
    assert r.sequences.tokens.shape[1] - r.logprobs.shape[1] == 90  # 96 is above the limit
    assert r.logprobs.shape == r.sequences.loss_mask.shape == (2, 48)


def test_data_rollout():
    prompts = [prompt(0, (1, 2), (3, 4, 5, 6)), prompt(1, (2,), (3, 8))]
    limits = {"pad_id": PAD, "max_prompt_tokens": 4, "max_new_tokens": 4, "decode": str}
    r = data_rollout(prompts, **limits, row_multiple=4)
    assert unpack(r.sequences) == [((1, 2), (3, 4, 5, 6)), ((2,), (3, 8))]
    assert r.policy_version == -1 and r.group_ids.tolist() == [0, 1, -1, -1]
    assert [c.finish_reason for c in r.completions] == ["length", "stop"]
    assert [c.text for c in r.completions] == ["(3, 4, 5, 6)", "(3, 8)"]
    assert not r.logprobs.any()
    with pytest.raises(UserError, match="no completion for 'prompt 2'"):
        data_rollout([prompt(2, (1,))], **limits)
