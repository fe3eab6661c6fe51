"""Cuts a batch into minibatches, minibatches into micro-batches, and a rollout into the parts that
are scored at once.

A minibatch makes one optimizer update; which rows it has depends only on the batch and its seed. A
micro-batch is a part of a minibatch that is computed at once, to limit memory. If it consists of
whole groups and this saves enough, it computes each prompt once for its G completions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.models.packing import RowDevices, capacity_of, count_tokens
from jaxrl.sharding.axes import ROWS, row_shards
from jaxrl.types import Array, Rollout, Sequences, TokenAlignment, TrainBatch

ROOMS = 4
"""Number of padded sizes of a minibatch, and so of compiled programs: see `padded_count`."""
WORTH = 0.1
"""Prompts are shared if that saves at least this fraction of the tokens."""


def unit_rows(group_ids: np.ndarray, minibatches: int) -> int:
    """Returns the number of consecutive rows that must be in the same minibatch: all completions of
    a prompt if the minibatches divide the number of prompts, else 1.

    Args:
        group_ids: [B], equal for rows of one prompt; -1 at padding rows, which are the last ones.
    """
    ids = group_ids[group_ids >= 0]
    groups = len(np.unique(ids))
    if groups == 0 or groups % minibatches or len(ids) % groups:
        return 1
    size = len(ids) // groups
    by_group = ids.reshape(groups, size)
    return size if (by_group == by_group[:, :1]).all() else 1


def shared_group(sequences: Sequences, group: int, budget: int | None) -> int:
    """Returns the number of consecutive rows for which a prompt is computed once: `group`, or 1 if
    their prompts differ or sharing saves too little (`saves_by_sharing`).

    Args:
        sequences: on the host; padding rows are the last ones.
        group: rows that are in one minibatch together (`unit_rows`).
        budget: most tokens of a micro-batch on one device.
    """
    tokens, mask = np.asarray(sequences.tokens), np.asarray(sequences.mask)
    completion = np.asarray(sequences.loss_mask).shape[1]
    prompt = tokens.shape[1] - completion
    if not saves_by_sharing(group, prompt, completion, budget):
        return 1
    live = int(mask.any(-1).sum())
    if live % group:
        return 1
    for x in (tokens, mask):
        by_group = x[:live, :prompt].reshape(live // group, group, prompt)
        if not (by_group == by_group[:, :1]).all():
            return 1
    return group


def saves_by_sharing(group: int, prompt: int, completion: int, budget: int | None) -> bool:
    """Returns whether sharing prompts of these widths saves enough, and a group fits into a
    micro-batch."""
    together = prompt + group * completion
    return (
        group > 1
        and together <= (1 - WORTH) * group * (prompt + completion)
        and (budget is None or together <= budget)
    )


def part_rows(n: int, part: int, parts: int, unit: int) -> slice | None:
    """Returns the rows of the `part`-th of `parts` slices of n, of a size that is a multiple of
    `unit`; if there are few rows the last slices are empty: None."""
    assert 0 <= part < parts, (part, parts)
    size = -(-n // (parts * unit)) * unit
    start, stop = part * size, min((part + 1) * size, n)
    return None if start >= stop else slice(start, stop)


@dataclass(frozen=True)
class ScoredPart:
    """Rows of a batch that are scored at once."""

    rows: slice
    """Which they are."""
    sequences: Sequences
    """numpy arrays of these rows, followed by empty rows if whole groups need padding."""
    ids: Array
    """[rows, C, K] of `Rollout.student_topk`, or None; padded like the sequences."""
    alignment: TokenAlignment | None
    """These rows of `Rollout.alignment`, padded likewise."""
    live: int
    """Number of rows without the padding."""

    def tokens_of(self, row: int) -> np.ndarray:
        """Returns the tokens of a row, without its padding."""
        tokens, mask = self.sequences.tokens[row], self.sequences.mask[row]
        return np.asarray(tokens)[np.asarray(mask)]


def scored_part(rollout: Rollout, part: int, parts: int, devices: RowDevices) -> ScoredPart | None:
    """Returns the `part`-th of `parts` slices of a rollout, for a role to score, or None if no row
    is left.

    A prompt is computed once for its group where that is worth it (`shared_group`) and each device
    has a group in each part.
    """
    n, shards = len(rollout.group_ids), devices.count
    group = shared_group(rollout.sequences, unit_rows(rollout.group_ids, 1), None)
    group = scored_group(n, parts, shards, group)
    unit = shards * group
    slices = (part_rows(n, k, parts, unit) for k in range(parts))
    indices = [np.arange(rows.start, rows.stop) for rows in slices if rows is not None]
    # The last part may be smaller, and few rows make fewer parts.
    cuts = [np.pad(rows, (0, -len(rows) % unit), constant_values=-1) for rows in indices]
    whole = replace(rollout.sequences, group=group)
    if part >= len(cuts):
        return None
    index = cuts[part]
    rows = indices[part]
    live, more = slice(int(rows[0]), int(rows[-1]) + 1), len(index) - len(rows)
    alike = np.stack([cut for cut in cuts if len(cut) == len(index)])  # one room, one program
    capacity = capacity_of(whole, devices, alike)
    sequences, ids, alignment = jax.tree.map(
        lambda x: np.pad(x[live], [(0, more)] + [(0, 0)] * (x.ndim - 1)) if more else x[live],
        (rollout.sequences, rollout.student_topk, rollout.alignment),
    )
    sequences = replace(sequences, group=whole.group, capacity=capacity)
    return ScoredPart(live, sequences, ids, alignment, len(rows))


def parts_by_teacher(
    part: ScoredPart, weights: np.ndarray, devices: RowDevices, mixed: bool
) -> dict[int, ScoredPart]:
    """Maps the number of each teacher to what it computes of a part: the tokens of the rows in
    which it has a share, which are whole groups where these share a prompt.

    Args:
        weights: [rows, K] shares of each of several teachers, of the part without its padding; 0 in
            rows without a prompt.
        mixed: every teacher runs, even without such a row. Otherwise those with a row do, and the
            first where nobody has one.
    """
    sequences, shares = part.sequences, weights > 0
    more = len(sequences.tokens) - len(shares)

    def only(mine: np.ndarray) -> ScoredPart:
        kept = np.pad(mine, (0, more))[:, None]
        mask, loss_mask = sequences.mask & kept, sequences.loss_mask & kept
        masked = replace(sequences, mask=mask, loss_mask=loss_mask, capacity=None)
        return replace(part, sequences=replace(masked, capacity=capacity_of(masked, devices)))

    with_rows = np.flatnonzero(shares.any(0)).tolist()
    chosen = range(shares.shape[1]) if mixed else with_rows or [0]
    return {k: only(shares[:, k]) for k in chosen}


def scored_padding(
    rollout: Rollout,
    parts: int,
    devices: RowDevices,
    weights: np.ndarray | None = None,
    mixed: bool = False,
) -> float:
    """Computes the fraction of padding among the tokens that a role computes to score a rollout.

    Args:
        weights: [B, K] shares of several teachers, each of which computes its own rows; None where
            one model computes all.
        mixed: as in `parts_by_teacher`.
    """
    real = computed = 0
    for part in range(parts):
        scored = scored_part(rollout, part, parts, devices)
        if scored is None:
            continue
        pieces = [scored]
        if weights is not None:
            pieces = list(parts_by_teacher(scored, weights[scored.rows], devices, mixed).values())
        for sequences in (piece.sequences for piece in pieces):
            assert sequences.capacity is not None, "a part has one"
            real += int(count_tokens(sequences, devices)[0].sum())
            computed += devices.count * sequences.capacity[0]
    return 1 - real / computed


def scored_group(rows: int, parts: int, shards: int, group: int) -> int:
    """Returns `group`, or 1 if a part of these rows would have less than a group for each
    device."""
    return group if rows >= parts * shards * group else 1


def tokens_of(lengths: np.ndarray, group: int) -> np.ndarray:
    """Sums the [B] tokens of rows over every `group` consecutive rows; the last sum may be over
    fewer."""
    return np.pad(lengths, (0, -len(lengths) % group)).reshape(-1, group).sum(-1)


def rows_of_groups(groups: np.ndarray, group: int) -> np.ndarray:
    """Converts [..., b] group numbers, -1 where there is none, to [..., b * group] row numbers."""
    rows = groups[..., None] * group + np.arange(group, dtype=groups.dtype)
    rows = np.where(groups[..., None] < 0, -1, rows)
    return rows.reshape(*groups.shape[:-1], -1)


def padded_count(rows: int, most: int) -> int:
    """Returns the number of rows to which a minibatch of `rows` is padded: a quarter, half, three
    quarters or all of `most`, so that few programs are compiled however many rows are left out of a
    batch."""
    sizes = [max(1, -(-most * k // ROOMS)) for k in range(1, ROOMS + 1)]
    return next(size for size in sizes if size >= rows)


def cut_minibatches(
    lengths: np.ndarray,
    signal: np.ndarray,
    unit: int,
    group: int,
    count: int,
    seed: tuple[int, ...],
) -> list[np.ndarray]:
    """Partitions the rows that train into `count` minibatches of whole units, in an order drawn
    from `seed`; each is given as the numbers of the groups that are computed for it.

    One minibatch holds all units in their own order. Sizes differ by at most one unit, and so does
    the number of units of each amount of signal. Where nothing trains, there is one empty
    minibatch.

    Args:
        lengths: [B] tokens of each row; a row of 0 tokens trains nothing and is in no minibatch.
        signal: [B] how much of the policy loss each row has.
        unit: rows that are in one minibatch together (`unit_rows`).
        group: rows that are computed with one prompt (`shared_group`): `unit`, or 1.
    """
    units = np.flatnonzero(tokens_of(lengths, unit) > 0)
    parts = [units]
    if count > 1:
        units = np.random.default_rng(seed).permutation(units)
        units = units[np.argsort(tokens_of(signal, unit)[units], kind="stable")]
        dealt = [units[k::count] for k in range(count)]
        parts = [part for part in dealt if len(part)] or [units]
    computed = tokens_of(lengths, group)
    groups = [rows_of_groups(part, unit // group) for part in parts]
    return [part[computed[part] > 0] for part in groups]


def micro_batch_shape(size: int, shards: int, padded: int) -> tuple[int, int]:
    """Returns how many micro-batches of at most `size` rows have room for `padded` ones, and the
    rows of each on one of the devices that share them."""
    n = -(-padded // size)
    return n, -(-padded // (n * shards))


def split_rows(
    rows: np.ndarray, lengths: np.ndarray, size: int, shards: int, padded: int | None = None
) -> np.ndarray:
    """Cuts a minibatch into micro-batches of equal shape: longest rows first, each goes to the
    emptiest shard that has room, so that no device waits long for another.

    Args:
        rows: row numbers of the minibatch.
        lengths: [B] tokens of each row of the batch.
        size: most rows in one micro-batch.
        shards: devices that share a micro-batch's rows.
        padded: rows to make room for; None: as many as there are.

    Returns:
        [n, b] int32 row numbers, -1 where there is none; b a multiple of `shards`, b <= size
        rounded up to one.
    """
    padded = max(1, len(rows)) if padded is None else padded
    n, per_shard = micro_batch_shape(size, shards, padded)
    bins: list[list[int]] = [[] for _ in range(n * shards)]
    tokens = np.zeros(n * shards, np.int64)
    for row in sorted(rows.tolist(), key=lambda r: (-int(lengths[r]), r)):
        open_bins = [k for k, held in enumerate(bins) if len(held) < per_shard]
        target = min(open_bins, key=lambda k: (tokens[k], k))
        bins[target].append(row)
        tokens[target] += lengths[row]
    out = np.full((n * shards, per_shard), -1, np.int32)
    for k, held in enumerate(bins):
        out[k, : len(held)] = sorted(held)
    return out.reshape(n, shards * per_shard)


def micro_batch(
    batch: TrainBatch, rows: jax.Array, mesh: Mesh, group: int, capacity: tuple[int, int] | None
) -> TrainBatch:
    """Takes some rows of a batch, inside a program; batch and result are sharded over (data, fsdp).

    The shares are passed around the ring of devices, and each fills in the rows that it holds.

    Args:
        rows: [b] int32, in any order, b a multiple of the devices that share the rows; row -1
            trains nothing, and has no token.
        group: number of consecutive rows that share a prompt.
        capacity: `Sequences.capacity` of the result.
    """
    ring = row_shards(mesh.shape)
    forward = [(i, (i + 1) % ring) for i in range(ring)]

    def take_rows(batch: TrainBatch, index: jax.Array) -> TrainBatch:
        mine, held = jax.lax.axis_index(ROWS), len(batch.sequences.tokens)
        index = index.reshape(ring, -1) - mine * held

        def fill(turn: jax.Array, shares: TrainBatch) -> TrainBatch:
            wanted = index[(mine - 1 - turn) % ring]  # those of the last turn stay here
            here = (wanted >= 0) & (wanted < held)

            def put(x: jax.Array, share: jax.Array) -> jax.Array:
                mask = here.reshape(-1, *[1] * (x.ndim - 1))
                return jnp.where(mask, _rows(x, jnp.clip(wanted, 0, held - 1)), share)

            return jax.tree.map(put, batch, shares)

        def pass_on(turn: jax.Array, shares: TrainBatch) -> TrainBatch:
            return fill(turn, jax.lax.ppermute(shares, ROWS, forward))

        empty = jax.tree.map(lambda x: jnp.zeros((index.shape[1], *x.shape[1:]), x.dtype), batch)
        return jax.lax.fori_loop(1, ring, pass_on, fill(jnp.int32(0), empty))

    index = jnp.maximum(rows, 0)
    if ring == 1:
        micro = jax.tree.map(lambda x: _rows(x, index), batch)
    else:
        whole, split = PartitionSpec(), PartitionSpec(ROWS)
        micro = jax.shard_map(take_rows, mesh=mesh, in_specs=(split, whole), out_specs=split)(
            batch, index
        )
    s, real = micro.sequences, (rows >= 0)[:, None]
    return replace(
        micro,
        sequences=replace(
            s, mask=s.mask & real, loss_mask=s.loss_mask & real, group=group, capacity=capacity
        ),
    )


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index] for row numbers [b] that are in range. For an array of three dims a TPU
    would first copy all rows, in slices of columns; from the rows of a matrix it copies only those
    asked for."""
    if x.ndim < 3:
        return x[index]
    flat = index[:, None] * x.shape[1] + jnp.arange(x.shape[1], dtype=index.dtype)[None]
    return x.reshape(-1, *x.shape[2:])[flat]
