"""Rows are neither lost nor doubled, and shards hold about as many tokens each."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.packing import LEAST, RowDevices, capacity_of, count_tokens
from jaxrl.roles.microbatch import (
    ROOMS,
    cut_minibatches,
    micro_batch,
    padded_count,
    rows_of_groups,
    split_rows,
    tokens_of,
    unit_rows,
)
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import HiddenSignal, Sequences, TrainBatch

ALIKE = np.ones(41, int)
"""Each row has the same signal."""


def lengths(n, seed=0):
    drawn = np.random.default_rng(seed).lognormal(4, 1, n).astype(int) + 1
    drawn[::7] = 0  # padding rows
    return drawn


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_minibatches_partition_the_real_rows(count):
    n = lengths(41)
    parts = cut_minibatches(n, ALIKE, 1, 1, count, (0, 1, 2))
    assert sorted(np.concatenate(parts)) == list(np.flatnonzero(n > 0))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_order_is_drawn_from_the_seed_alone():
    n = lengths(41)
    a, b, c = (cut_minibatches(n, ALIKE, 1, 1, 4, (0, step, 0)) for step in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_minibatches_have_equal_signal(count):
    """Rows of one signal are dealt as evenly as all of them."""
    n = lengths(41)
    signal = np.random.default_rng(1).integers(0, 3, 41)
    parts = cut_minibatches(n, signal, 1, 1, count, (0, 1, 2))
    assert sorted(np.concatenate(parts)) == list(np.flatnonzero(n > 0))
    for held in ([len(part) for part in parts], *_counts(parts, signal)):
        assert max(held) - min(held) <= 1


def _counts(parts, signal):
    return [[int((signal[part] == value).sum()) for part in parts] for value in range(3)]


@pytest.mark.parametrize("count", [1, 4])
def test_where_nothing_trains_there_is_one_empty_minibatch(count):
    nothing = np.zeros(8, int)
    (part,) = cut_minibatches(nothing, nothing, 1, 1, count, (0, 1, 2))
    assert part.size == 0
    split = split_rows(part, np.zeros(8, int), 2, 2, padded=2)
    assert (split == -1).all() and split.shape == (1, 2)


@pytest.mark.parametrize("most", [1, 3, 7, 64])
def test_a_minibatch_is_padded_to_one_of_few_sizes(most):
    sizes = [padded_count(rows, most) for rows in range(most + 1)]
    assert len(set(sizes)) <= ROOMS and sizes[-1] == most and min(sizes) >= 1
    extra = [size - max(rows, 1) for rows, size in enumerate(sizes)]
    assert min(extra) >= 0 and max(extra) <= most / ROOMS


@pytest.mark.parametrize(("size", "shards"), [(4, 1), (8, 2), (3, 2)])
def test_the_shape_of_micro_batches_follows_from_the_room_alone(size, shards):
    n = lengths(53, seed=1)
    rows, shapes = np.flatnonzero(n > 0), set()
    for left in (17, 20, 24):
        split = split_rows(rows[:left], n, size, shards, padded=24)
        assert sorted(split[split >= 0].tolist()) == rows[:left].tolist()
        shapes.add(split.shape)
    assert len(shapes) == 1


@pytest.mark.parametrize(("size", "shards"), [(4, 1), (8, 2), (16, 4), (64, 8), (3, 2)])
def test_split_keeps_every_row_once_in_shards_of_equal_shape(size, shards):
    n = lengths(53, seed=1)
    rows = np.flatnonzero(n > 0)
    split = split_rows(rows, n, size, shards)
    assert sorted(split[split >= 0].tolist()) == rows.tolist()
    assert split.shape[1] % shards == 0
    assert split.shape[1] <= -(-size // shards) * shards


def test_shards_hold_about_as_many_tokens_each():
    n = lengths(64, seed=2)
    rows = np.flatnonzero(n > 0)
    split = split_rows(rows, n, 16, 4).reshape(-1, 4, 4)
    tokens = np.where(split >= 0, n[split], 0).sum(-1)
    in_order = np.resize(n[rows], 64).reshape(-1, 4).sum(-1)
    assert tokens.max() - tokens.min() <= n.max()
    assert tokens.std() < in_order.std() / 2


def test_prompts_are_the_units_of_minibatches_where_these_are_equal():
    ids = np.repeat(np.arange(6), 3)
    padded = np.append(ids, [-1, -1])
    for count in (1, 2, 3, 6):
        assert unit_rows(ids, count) == unit_rows(padded, count) == 3
    for count in (4, 5, 12):  # prompts would be split unequally: single rows are not
        assert unit_rows(ids, count) == 1
    assert unit_rows(np.arange(6), 2) == 1  # one completion each
    assert unit_rows(np.array([0, 1, 0, 1]), 1) == 1  # not after each other
    assert unit_rows(np.array([0, 0, 0, 1]), 1) == 1  # not equally many
    assert unit_rows(np.full(4, -1), 2) == 1


def test_tokens_of_groups():
    assert tokens_of(np.array([1, 2, 3, 4, 5, 0, 0]), 3).tolist() == [6, 9, 0]
    assert tokens_of(np.array([1, 2]), 1).tolist() == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_minibatches_of_prompts_are_the_same_however_they_are_computed(count):
    """In groups that share a prompt or row by row; rows that train nothing are left out there."""
    tokens = np.arange(1, 25)
    tokens[[3, 9, 10, 11]] = 0  # one completion of the second prompt, all of the fourth
    policy = tokens % 5 > 0
    shared, single = (cut_minibatches(tokens, policy, 3, group, count, (0, 1)) for group in (3, 1))
    assert len(shared) == len(single) == count
    for groups, rows in zip(shared, single, strict=True):
        assert set(rows // 3) == set(groups.tolist())
        assert len(rows) == (tokens.reshape(8, 3)[groups] > 0).sum()
    assert sorted(np.concatenate(single)) == np.flatnonzero(tokens).tolist()


@pytest.mark.parametrize("axes", [Axes(1, 1, 2), Axes(1, 3, 1), Axes(2, 2, 2)], ids=str)
def test_a_micro_batch_has_its_rows_bit_for_bit_in_any_order_on_any_mesh(axes):
    """Signed zeros and infinities too (a CPU has one NaN in bfloat16); -1 trains nothing."""
    rng, mesh = np.random.default_rng(0), role_mesh(jax.devices()[: axes.size], axes)
    bits = rng.integers(0, 2**16, (24, 5, 3), np.uint16)
    hidden = np.where(bits & 0x7F80 == 0x7F80, bits & 0xFF80, bits).view(jax.numpy.bfloat16)
    tokens, mask = rng.integers(-(2**31), 2**31, (24, 9), np.int64), rng.random((24, 9)) < 0.5
    sequences = Sequences(tokens.astype(np.int32), mask, mask[:, :5])
    batch = TrainBatch(sequences, HiddenSignal(hidden=hidden), in_policy=mask[:, 0])
    rows = rng.permutation(24)[:12].astype(np.int32)
    rows[[2, 7]] = -1
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    take = jax.jit(lambda batch, rows: micro_batch(batch, rows, mesh, 3, (8, 4)))
    micro = take(jax.device_put(batch, split), rows)
    assert micro.sequences.group == 3 and micro.sequences.capacity == (8, 4)
    for x, whole in zip(jax.tree.leaves(micro), jax.tree.leaves(batch), strict=True):
        assert x.sharding.is_equivalent_to(split, x.ndim) and x.dtype == whole.dtype
        assert np.asarray(x)[rows >= 0].tobytes() == whole[rows[rows >= 0]].tobytes()
    for kept in (micro.sequences.mask, micro.sequences.loss_mask):
        assert not np.asarray(kept)[rows < 0].any()


@pytest.mark.parametrize("group", [1, 3])
def test_the_room_of_micro_batches_holds_what_each_device_has_and_little_more(group):
    rng, devices = np.random.default_rng(3), RowDevices(2, 4)
    prompts = np.repeat(np.arange(20) >= rng.integers(0, 20, (8, 1)), 3, 0)
    completions = np.arange(32) < rng.integers(1, 33, (24, 1))
    mask = np.concatenate([prompts, completions], 1)
    given = Sequences(np.zeros(mask.shape, np.int32), mask, completions, group)
    index = rows_of_groups(np.array([[5, 0, 3, -1], [7, 1, -1, 2]]), 3)
    each = mask[:, :20].sum(-1), completions.sum(-1)
    held = [
        sum(
            each[0][row] * (at % group == 0) + each[1][row]
            for at, row in enumerate(rows)
            if row >= 0
        )
        for rows in index.reshape(4, 6).tolist()
    ]
    all_tokens, scored = count_tokens(given, devices, index)
    assert all_tokens.ravel().tolist() == held
    for size, tokens in zip(capacity_of(given, devices, index), (all_tokens, scored), strict=True):
        assert size % 4 == 0 and tokens.max() <= size <= max(1.25 * tokens.max() + 4, LEAST)
    assert capacity_of(given, devices)[0] <= 12 // group * 20 + 12 * 32
