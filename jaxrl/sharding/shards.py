"""An array that lies in pieces elsewhere: what travels between workers in place of a `jax.Array`.

The sender cuts an array into the boxes that its devices hold; the receiver reads the boxes that its
own devices need. Any mesh to any mesh, of any number of processes on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

Box = tuple[tuple[int, int], ...]
"""Half-open range of each dim."""


@dataclass(frozen=True)
class Piece:
    """The part of an array inside one box."""

    box: Box
    fetch: Callable[[], np.ndarray]
    """Gets it, with the box's shape; may raise what its transport raises."""


@dataclass(frozen=True)
class Shards:
    """A global array as pieces that cover it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """numpy dtype; bfloat16 is `ml_dtypes`'."""
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads the values at `index` (slices of step 1), put together from the pieces that overlap
        it.

        Where one piece covers it all, its own memory, without a copy.
        """
        wanted = box_of(index, self.shape)
        sizes = tuple(hi - lo for lo, hi in wanted)
        out: np.ndarray | None = None
        filled = 0
        for piece in self.pieces:
            shared = overlap(piece.box, wanted)
            if shared is None:
                continue
            inside: Any = (..., *_within(shared, piece.box))  # a view, also of 0 dims
            values = piece.fetch()[inside]
            if values.shape == sizes:
                return values
            out = np.empty(sizes, self.dtype) if out is None else out
            out[_within(shared, wanted)] = values
            filled += values.size
        if filled != int(np.prod(sizes, dtype=np.int64)):
            raise RuntimeError(f"the pieces of an array of {self.shape} do not cover {wanted}")
        assert out is not None or 0 in sizes
        return np.empty(sizes, self.dtype) if out is None else out

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(tuple(slice(0, n) for n in self.shape))
        return whole if dtype is None else whole.astype(dtype)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the ranges that slices of step 1 stand for."""
    return tuple((s.indices(n)[0], s.indices(n)[1]) for s, n in zip(index, shape, strict=True))


def overlap(a: Box, b: Box) -> Box | None:
    """Returns what two boxes share, or None if that is nothing."""
    shared = tuple((max(i, k), min(j, m)) for (i, j), (k, m) in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in shared) else shared


def concat_rows(parts: Sequence[Shards]) -> Shards:
    """Concatenates the rows (dim 0) of all parts to one array, one part after the other; nothing is
    moved."""
    first, start = parts[0], 0
    pieces: list[Piece] = []
    for part in parts:
        assert part.shape[1:] == first.shape[1:] and part.dtype == first.dtype
        for piece in part.pieces:
            (lo, hi), *rest = piece.box
            pieces.append(replace(piece, box=((lo + start, hi + start), *rest)))
        start += part.shape[0]
    return Shards((start, *first.shape[1:]), first.dtype, tuple(pieces))


def held_pieces(x: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Returns the boxes of `x` that this process answers for, on their devices: together the
    processes of its mesh give each box once."""
    return [
        (box_of(shard.index, x.shape), shard.data)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def _within(shared: Box, box: Box) -> tuple[slice, ...]:
    """Returns `shared` as slices of an array that fills `box`."""
    return tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(shared, box, strict=True))
