"""The real tokens of a batch next to each other, without its padding.

A device's rows become one stream of n tokens. Whatever a layer computes token by token (products,
norms, the LM head) is computed on the stream, so that its cost follows the tokens; attention gets
rows of its own, whose kernels skip what lies beyond a row's length. Completions that share a prompt
have it once in the stream. The tokens that the completions are scored at are a second, shorter
stream of m tokens.

Shapes as in `types`, and: X devices that share the rows, S rows on each, n and m tokens of a
device's streams (`Sequences.capacity`). A row of the stream that is not filled holds zeros, which
no loss and no key sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.models.batching import bucket, round_up
from jaxrl.models.kernels import target_of
from jaxrl.sharding.axes import HEADS, ROWS, TOKENS, AxisName, dim_spec, row_shards
from jaxrl.types import Array, Sequences

LEAST, STEPS = 128, 4
"""The sizes of streams: the least, where rows have so many tokens, and how many there are in a
doubling, so that at most a fifth of a longer stream is padding."""


@jax.custom_vjp
def move(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Moves x [X, a, ...] to [X, b, ...]: entry i is x[:, index[:, i]], or 0 where the index is a.

    Its gradient is moved by `back`, where every entry comes from one place: nothing is added up.

    Args:
        index: [X, b] int32, in [0, a]; no number below a twice.
        back: [X, a] int32: the inverse, in [0, b].
    """
    flat = x.reshape(*x.shape[:2], -1)  # rows of a matrix: a TPU copies only those asked for
    entries = _entries(flat, jnp.minimum(index, x.shape[1] - 1)[..., None])
    moved = jnp.where((index < x.shape[1])[..., None], entries, jnp.zeros_like(entries))
    return moved.reshape(*index.shape, *x.shape[2:])


def _entries(x: Array, index: Array) -> Array:
    """Does `take_along_axis` on axis 1 for indices that are in bounds, with a fifth of the
    operations."""
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")


move.defvjp(
    lambda x, index, back: (move(x, index, back), (back, index)),
    lambda indices, d: (move(d, *indices), None, None),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Where rows [X * S, T] are in a stream [X, n]. Their real tokens are the first ones."""

    starts: Array
    """[X, S] int32: of each row in the stream; a row begins where the one before it ends."""
    lengths: Array
    """[X, S] int32."""
    place: Array
    """[X, S * T] int32: where each position of the rows is in the stream; n where it is padding."""
    source: Array
    """[X, n] int32: which position of the rows is at each place of the stream; S * T where the
    stream is of other rows."""
    at: tuple[Array, Array, Array]
    """Each [X, n]: the row at each place of the stream (int32), its index there (int32), and
    whether there is one (bool), else both mean nothing."""
    width: int = field(metadata={"static": True})
    """T."""

    @property
    def mask(self) -> Array:
        """Returns [X * S, T] bool: True at real tokens."""
        return jnp.arange(self.width)[None] < self.lengths.reshape(-1, 1)

    def unpack(self, x: Array) -> Array:
        """Unpacks the rows [X * S, T, ...] of a stream [X, n, ...], with zeros at the padding."""
        rows = move(x, self.place, self.source)
        return rows.reshape(-1, self.width, *x.shape[2:])

    def pack(self, x: Array) -> Array:
        """Packs rows [X * S, T, ...] into the stream [X, n, ...], with zeros where it belongs to
        other rows."""
        flat = x.reshape(len(self.lengths), -1, *x.shape[2:])
        return move(flat, self.source, self.place)


def _place_rows(lengths: Array, width: int, size: int, behind: Array = 0) -> PackedRows:
    """Makes rows [X, S] of these lengths, one after the other in streams of `size` tokens.

    Args:
        behind: [X, 1] int32: the tokens of the stream before the first of them.
    """
    starts = behind + jnp.cumsum(lengths, -1, dtype=jnp.int32) - lengths
    index = jnp.arange(width)[None, None]
    place = jnp.where(index < lengths[..., None], starts[..., None] + index, size)
    count, ends = lengths.shape[1], starts + lengths
    row = (jnp.arange(size)[None, :, None] >= ends[:, None, :]).sum(-1, dtype=jnp.int32)
    inside = jnp.minimum(row, count - 1)
    index = jnp.arange(size)[None] - _entries(starts, inside)
    real = (row < count) & (index >= 0)
    source = jnp.where(real, inside * width + index, count * width)
    at = inside, index, real
    return PackedRows(starts, lengths, place.reshape(len(place), -1), source, at, width)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """The streams of a batch of prompts and completions."""

    tokens: Array
    """[X, n] int32."""
    positions: Array
    """[X, n] int32: the index of each token in its own sequence."""
    rows: tuple[PackedRows, ...]
    """What attends to itself: the sequences; or, with shared prompts, prompts and completions."""
    completions: PackedRows
    """Rows of the completions in the stream [X, m] of scored tokens."""
    prompts: Array
    """[X, S] int32: length of each row's prompt."""
    trained: Array
    """[X, S] bool: whether a row has a token that trains."""
    experts: Array = None
    """[X, n, L, k]: of `Sequences.experts`; -1 where there is no token."""

    @property
    def real(self) -> Array:
        """Returns [X, n] bool: True at tokens."""
        masks = [rows.at[2] for rows in self.rows]
        return masks[0] if len(masks) == 1 else masks[0] | masks[1]

    @property
    def copies(self) -> Array:
        """Returns for each token, [X, n] float32, how many sequences that train it belongs to, 0 at
        padding: the same for a batch whether or not its prompts are shared."""
        sequences = self.trained.astype(jnp.float32)
        prompts = sequences.reshape(len(sequences), -1, self.group).sum(-1)
        counts = (sequences,) if len(self.rows) == 1 else (prompts, sequences)
        summands = [
            jnp.where(rows.at[2], _entries(count, rows.at[0]), 0)
            for rows, count in zip(self.rows, counts, strict=True)
        ]
        return reduce(jnp.add, summands)

    @property
    def group(self) -> int:
        """Returns the number of completions of a prompt in the stream."""
        return self.completions.lengths.shape[1] // self.rows[0].lengths.shape[1]

    def select_predictors(self, hidden: Array, mesh: Mesh | None = None) -> Array:
        """Selects from the hidden states [X, n, D] those that predict the tokens of the
        completions, [X, m, D]; NaN where a stream is too short for its tokens. Both lie over the
        axes of streams."""
        last, completions = self.rows[-1], self.completions
        n, m = last.source.shape[1], completions.source.shape[1]
        split = None if mesh is None or mesh.shape[TOKENS] == 1 else mesh
        if split is not None:  # gathered over `context`: once, not in each layer
            whole = NamedSharding(split, PartitionSpec(ROWS, None, None))
            hidden = jax.lax.with_sharding_constraint(hidden, whole)
        shared = len(self.rows) > 1
        lead = (jnp.zeros_like(self.prompts) if shared else self.prompts) - 1
        row, index, real = completions.at  # what predicts token i of a row is its entry lead + i
        at = _entries(last.starts + lead, row) + index
        known = real & (_entries(lead, row) + index >= 0)
        row, index, real = last.at
        token = index - _entries(lead, row)
        scored = (token >= 0) & (token < _entries(completions.lengths, row))
        place = _entries(completions.starts, row) + token
        back = jnp.where(real & scored, place, m)
        out = move(hidden, jnp.where(known, at, n), back)
        if shared:  # the first token of each completion is predicted by the end of its prompt
            prompts, count = self.rows[0], completions.starts.shape[1]
            ends = prompts.starts + prompts.lengths - 1
            ends = jnp.where(prompts.lengths > 0, ends, n)
            row, index, real = prompts.at
            is_end = real & (index == _entries(prompts.lengths, row) - 1)
            of_prompts = move(hidden, ends, jnp.where(is_end, row, prompts.starts.shape[1]))
            of_rows = jnp.repeat(of_prompts, self.group, 1)
            row, index, real = completions.at
            place = jnp.where(completions.lengths > 0, completions.starts, m)
            out = out + move(of_rows, jnp.where(real & (index == 0), row, count), place)
        # Where a stream has no room for all tokens, some are lost: no loss may be computed of it.
        fits = [
            (rows.starts + rows.lengths).max(-1) <= rows.source.shape[1]
            for rows in (*self.rows, completions)
        ]
        out = jnp.where(jnp.stack(fits).all(0)[:, None, None], out, jnp.nan)
        if split is not None:
            by_token = NamedSharding(split, PartitionSpec(ROWS, TOKENS, None))
            out = jax.lax.with_sharding_constraint(out, by_token)
        return out


def pack_streams(sequences: Sequences, mesh: Mesh | None = None) -> Packing:
    """Packs the given sequences into streams, each device's from its own rows.

    Args:
        sequences: `capacity` must hold what every device has (`capacity_of`); None holds all.
        mesh: rows are divided among the devices of the axes `ROWS`.
    """
    shards, parts = (1, 1) if mesh is None else (row_shards(mesh.shape), mesh.shape[TOKENS])
    (b, t), c, group = sequences.tokens.shape, sequences.loss_mask.shape[1], sequences.group
    w, s = t - c, b // shards
    assert b == shards * s and s % group == 0, f"{b} rows for {shards} devices, groups of {group}"
    full = (s * t, s * c) if group == 1 else (s // group * w + s * c, s * c)
    n, m = sequences.capacity or tuple(round_up(size, parts) for size in full)

    tokens, mask = (x.reshape(shards, s, t) for x in (sequences.tokens, sequences.mask))
    lengths = mask[:, :, w:].sum(-1, dtype=jnp.int32)
    prompts = mask[:, :, :w].sum(-1, dtype=jnp.int32)
    completions = _place_rows(lengths, c, m)
    chosen = sequences.experts
    if chosen is not None:  # so that 0 is no choice
        chosen = chosen.reshape(shards, s, t, *chosen.shape[2:]) + 1
    boxes: list[tuple[PackedRows, Any, Array | None]]  # rows, where their tokens are, offsets
    if group == 1:
        whole = _place_rows(prompts + lengths, t, n)
        boxes = [(whole, np.s_[:, :], None)]
    else:
        of_prompts = prompts[:, ::group]
        before = _place_rows(of_prompts, w, n)
        after = _place_rows(lengths, c, n, behind=of_prompts.sum(-1, keepdims=True))
        boxes = [(before, np.s_[:, ::group, :w], None), (after, np.s_[:, :, w:], prompts)]
    # Each box has zeros where the stream belongs to other rows.
    summands = [_pack_integers(rows, tokens[box], mask[box]) for rows, box, _ in boxes]
    stream = reduce(jnp.add, summands)
    summands = []
    for rows, _, offset in boxes:
        row, index, real = rows.at
        index = index if offset is None else index + _entries(offset, row)
        summands.append(jnp.where(real, index, 0))
    positions = reduce(jnp.add, summands)
    if chosen is not None:
        summands = [_pack_integers(rows, chosen[box], mask[box]) for rows, box, _ in boxes]
        chosen = reduce(jnp.add, summands) - 1
    trained = sequences.loss_mask.reshape(shards, s, c).any(-1)
    streams = tuple(rows for rows, _, _ in boxes)
    return Packing(stream, positions, streams, completions, prompts, trained, chosen)


def run_by_heads(
    run: Callable[..., Array], mesh: Mesh | None, heads: Callable[[Array], int]
) -> Callable[..., Array]:
    """Returns `run` for streams [X, n, heads, ...], with whole streams of some heads on each
    device.

    Where the axis `context` divides a stream, an all-to-all brings the first argument of `run`, a
    tree of streams, there, and another one the result back (DeepSpeed Ulysses, arXiv:2309.14509).
    Heads that the mesh does not divide are gathered whole instead.

    Args:
        heads: how many there are of a stream, to be divided.
    """
    if mesh is None or mesh.shape[TOKENS] == 1:
        return run

    def lay_out(x: Array, tokens: AxisName | None, among: tuple[AxisName, ...]) -> Array:
        over = dim_spec(heads(x), among, mesh.shape)
        spec = PartitionSpec(ROWS, tokens, over, *[None] * (x.ndim - 3))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def run_heads(streams: Any, *more: Any) -> Array:
        # By tokens first: else XLA divides the products before by heads, and gathers their input.
        streams = jax.tree.map(lambda x: lay_out(x, TOKENS, ("tensor",)), streams)
        streams = jax.tree.map(lambda x: lay_out(x, None, HEADS), streams)
        return lay_out(lay_out(run(streams, *more), None, HEADS), TOKENS, ("tensor",))

    return run_heads


def _pack_integers(rows: PackedRows, x: Array, mask: Array) -> Array:
    """Returns the stream [X, n, ...] of integers x [X, S, T, ...] of tokens that may be padded on
    both sides; zeros where the stream belongs to other rows."""
    row, index, real = rows.at
    first = _entries(jnp.argmax(mask, -1), row)
    at = jnp.where(real, row * x.shape[2] + first + index, 0)
    flat = x.reshape(len(x), x.shape[1] * x.shape[2], -1)
    entries = _entries(flat, at[..., None])
    return jnp.where(real[..., None], entries, 0).reshape(*at.shape, *x.shape[3:])


@dataclass(frozen=True)
class RowDevices:
    """The devices of a role among which the rows of a batch are divided."""

    count: int
    multiple: int
    """Widths that suit them are multiples of it: their kernels' (`models.kernels`) and those that
    the axis `context` divides."""


def row_devices(mesh: Mesh) -> RowDevices:
    """Returns `RowDevices` of a mesh."""
    multiple = target_of(mesh.devices.flat).width_multiple
    return RowDevices(row_shards(mesh.shape), math.lcm(multiple, mesh.shape[TOKENS]))


def count_tokens(
    sequences: Sequences, devices: RowDevices, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the real tokens of each device in each of n micro-batches, [n, devices]: all that it
    computes, and those of completions. A shared prompt counts once.

    Args:
        sequences: numpy arrays, with their `group`.
        rows: [n, b] row numbers, -1 where there is none; None: one micro-batch of all rows.
    """
    mask = np.asarray(sequences.mask)
    rows = np.arange(len(mask))[None] if rows is None else rows
    width = mask.shape[1] - np.asarray(sequences.loss_mask).shape[1]
    held = rows.reshape(len(rows), devices.count, -1)
    prompts, completions = (
        np.where(held >= 0, part.sum(-1)[np.maximum(held, 0)], 0)
        for part in (mask[:, :width], mask[:, width:])
    )
    completed = completions.sum(-1)
    return prompts[..., :: sequences.group].sum(-1) + completed, completed


def capacity_of(
    sequences: Sequences, devices: RowDevices, rows: np.ndarray | None = None
) -> tuple[int, int]:
    """Returns `Sequences.capacity` for micro-batches: what the fullest device has, rounded up to
    one of few sizes. Arguments as in `count_tokens`."""
    c = np.asarray(sequences.loss_mask).shape[1]
    held = (len(sequences.mask) if rows is None else rows.shape[1]) // devices.count
    prompts = held // sequences.group * (np.asarray(sequences.mask).shape[1] - c)
    most = prompts + held * c, held * c
    fullest = (int(tokens.max()) for tokens in count_tokens(sequences, devices, rows))
    n, m = (
        bucket(tokens, smallest=LEAST, steps=STEPS, multiple=devices.multiple, most=full)
        for tokens, full in zip(fullest, most, strict=True)
    )
    return n, m
