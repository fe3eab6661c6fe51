"""Values on their way to another process: arrays in pieces, the rest pickled.

A worker of one pool packs what a call returned; every process of the pool packs its own part. Who
receives it unpacks the parts of all of them into one value, in which `Shards` stand for the arrays:
each device of the receiver then reads the boxes that it needs. bfloat16 travels as uint16, which
shared memory takes without a copy.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.sharding.reshard import Box, Piece, Shards, local_pieces

BUCKET_BYTES = 64 << 20
"""Pieces travel together up to this size, so that a receiver fetches little that it does not need
and a small array costs no message of its own."""

Store = Callable[[list[np.ndarray]], object]
"""Puts a bucket of arrays where others can get it, and tells its address."""
Fetch = Callable[[object], Sequence[np.ndarray]]
"""Gets the arrays at an address."""


@dataclass(frozen=True)
class Sent:
    """The pieces of one array that one process holds."""

    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[tuple[Box, int, int], ...]
    """Box, bucket, position in the bucket."""


@dataclass(frozen=True)
class Parcel:
    """What one process of a pool packed."""

    pickled: bytes
    buffers: tuple[np.ndarray, ...]
    """Memory of the numpy arrays inside."""
    arrays: tuple[Sent, ...]
    """The `jax.Array`s inside, in the order of the pickle."""
    buckets: tuple[Any, ...]
    """Addresses, or the arrays themselves where nothing was stored."""


def pack(value: object, store: Store | None = None) -> Parcel:
    """Copies the arrays of `value` off their devices; those may be donated afterwards.

    Args:
        store: where the pieces go; None: into the parcel itself.
    """
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    pickler = _Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.arrays, pickler.left_out = [], {}
    pickler.dump(value)
    held = [local_pieces(array) for array in pickler.arrays]
    waiting = deque(piece for pieces in held for _, piece in pieces)
    sent: list[Sent] = []
    buckets: list[object] = []
    bucket: list[np.ndarray] = []
    filled, ahead = 0, 0
    for array, pieces in zip(pickler.arrays, held, strict=True):
        places = []
        for box, piece in pieces:
            if bucket and filled + piece.nbytes > BUCKET_BYTES:
                buckets.append(bucket if store is None else store(bucket))
                bucket, filled = [], 0
            # The copies of the next bucket are on their way while this one is stored.
            while waiting and ahead <= 2 * BUCKET_BYTES:
                ahead += waiting[0].nbytes
                waiting.popleft().copy_to_host_async()
            places.append((box, len(buckets), len(bucket)))
            bucket.append(_plain(np.asarray(piece)))
            filled += piece.nbytes
            ahead -= piece.nbytes
        sent.append(Sent(array.shape, array.dtype, tuple(places)))
    if bucket:
        buckets.append(bucket if store is None else store(bucket))
    memory = tuple(np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers)
    return Parcel(file.getvalue(), memory, tuple(sent), tuple(buckets))


def unpack(parcels: Sequence[Parcel], fetch: Fetch | None = None) -> Any:
    """Returns the value that the processes of a pool packed: the first one's, with everyone's
    pieces."""
    first = parcels[0]
    arrays = []
    for i, sent in enumerate(first.arrays):
        pieces: list[Piece] = []
        for parcel in parcels:
            mine = parcel.arrays[i]
            assert (mine.shape, mine.dtype) == (sent.shape, sent.dtype), "the processes disagree"
            for box, bucket, position in mine.places:
                get = partial(_piece, parcel.buckets[bucket], position, sent.dtype, fetch)
                pieces.append(Piece(box, get))
        arrays.append(Shards(sent.shape, sent.dtype, tuple(pieces)))
    unpickler = _Unpickler(io.BytesIO(first.pickled), buffers=first.buffers)
    unpickler.arrays = arrays
    return unpickler.load()


def _piece(bucket: Any, position: int, dtype: np.dtype, fetch: Fetch | None) -> np.ndarray:
    values: np.ndarray = (bucket if fetch is None else fetch(bucket))[position]
    return values.view(dtype)


class _Pickler(pickle.Pickler):
    """Leaves `jax.Array`s out, and lists them."""

    arrays: list[jax.Array]
    left_out: dict[type, bool]
    """By type: whether it is one. To ask jax takes longer than all else of a small object."""

    def persistent_id(self, value: Any) -> int | None:
        left_out = self.left_out.get(type(value))
        if left_out is None:
            left_out = self.left_out[type(value)] = isinstance(value, jax.Array)
        if not left_out:
            return None
        self.arrays.append(value)
        return len(self.arrays) - 1

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == jnp.bfloat16:
            return _view, (value.view(np.uint16), value.dtype)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    arrays: list[Shards]

    def persistent_load(self, index: int) -> Shards:
        return self.arrays[index]


def _view(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return values.view(dtype)


def _plain(values: np.ndarray) -> np.ndarray:
    """Returns values in a dtype that numpy itself knows."""
    values = np.asarray(values, order="C")
    return values.view(np.uint16) if str(values.dtype) == "bfloat16" else values
