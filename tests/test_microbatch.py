"""Rows are neither lost nor doubled, and shards hold about as many tokens each."""

import numpy as np
import pytest

from jaxrl.roles.microbatch import minibatch_rows, split_rows


def lengths(n, seed=0):
    drawn = np.random.default_rng(seed).lognormal(4, 1, n).astype(int) + 1
    drawn[::7] = 0  # padding rows
    return drawn


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_minibatches_partition_the_real_rows(count):
    n = lengths(41)
    parts = minibatch_rows(n, count, (0, 1, 2))
    assert sorted(np.concatenate(parts)) == list(np.flatnonzero(n > 0))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_order_is_drawn_from_the_seed_alone():
    n = lengths(41)
    a, b, c = (minibatch_rows(n, 4, (0, step, 0)) for step in (3, 3, 4))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


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
