"""Moves arrays from one mesh to another: any layout to any layout, values bit-equal.

On a GPU, pieces go device to device: each destination shard is put together from the boxes of the
source shards that overlap it, so nothing passes through the host and nothing blocks. On CPU plain
`device_put` is quicker. `device_put(donate=True)` across meshes crashes and is never used; drop the
source after the call instead.

A mesh may span processes that all make the same calls in the same order. Each then fills its own
devices from what it has on the host; only an array that lies on such a mesh already is moved by a
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import ArrayLike

from jaxrl.sharding.shards import Box, Shards, box_of, overlap
from jaxrl.types import Tree


@dataclass(frozen=True)
class Rows:
    """Arrays on one mesh whose rows (dim 0) follow one another; `reshard` makes one of them."""

    parts: tuple[jax.Array, ...]


def put(tree: Tree, shardings: Tree) -> Tree:
    """Host arrays, the same in every process, in `shardings` (of the same form, or one for all).

    No process waits for another.
    """
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(_put, tree, jax.tree.broadcast(shardings, tree))


def reshard(tree: Tree, shardings: Tree) -> Tree:
    """The arrays of `tree` in `shardings` (a tree of the same form, or one sharding for all).

    A leaf that has its sharding already is returned as it is, without a copy.

    Args:
        tree: of `jax.Array`, `Rows`, `Shards` or numpy arrays, the latter the same in every
            process.
    """
    return jax.tree.map(_move, tree, jax.tree.broadcast(shardings, tree))


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """All of `x` on the host of every process; those that share its mesh must ask together."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        x = _in(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return np.asarray(x)


def nbytes(tree: Tree) -> int:
    """Bytes of the arrays of `tree`, each counted once however it is replicated."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _move(x: jax.Array | Rows | Shards | np.ndarray, target: Sharding) -> jax.Array:
    if isinstance(x, Shards):
        return _from_boxes(x.shape, x.dtype, x.read, target)
    if isinstance(x, Rows):
        return _join_rows(x.parts, target)
    if not isinstance(x, jax.Array):
        return put(x, target)
    if x.sharding == target:
        return x
    if not (x.is_fully_addressable and target.is_fully_addressable):
        together = x.sharding.device_set == target.device_set
        return _in(target)(x) if together else put(to_host(x), target)
    devices: set[jax.Device] = target.device_set | x.sharding.device_set
    on_gpu = all(device.platform == "gpu" for device in devices)
    return put_pieces(x, target) if on_gpu else jax.device_put(x, target)


def _put(x: ArrayLike, target: Sharding) -> jax.Array:
    values = np.asarray(x)
    return _from_boxes(values.shape, values.dtype, lambda index: values[index], target)


def _from_boxes(
    shape: tuple[int, ...],
    dtype: np.dtype,
    read: Callable[[tuple[slice, ...]], np.ndarray],
    target: Sharding,
) -> jax.Array:
    """An array of the boxes that `read` gives; each is read once for all devices that hold it."""
    boxes: dict[Box, np.ndarray] = {}

    def box(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device here holds a shard"
        at = box_of(index, shape)
        if at not in boxes:
            boxes[at] = read(tuple(slice(*span) for span in at))
        return boxes[at]

    return jax.make_array_from_callback(shape, target, box, dtype=dtype)


def _join_rows(parts: Sequence[jax.Array], target: Sharding) -> jax.Array:
    if not all(part.is_fully_addressable for part in parts):
        return _move(_in(parts[0].sharding)(*parts), target)
    sources: dict[Box, list[jax.Array]] = {}
    rows = 0
    for part in parts:
        for ((start, stop), *rest), copies in _held(part).items():
            sources[(start + rows, stop + rows), *rest] = copies
        rows += part.shape[0]
    return _assemble(sources, (rows, *parts[0].shape[1:]), target)


@lru_cache(maxsize=256)
def _in(target: Sharding) -> Callable[..., jax.Array]:
    """Arrays over the devices of `target`, joined by rows, in `target`."""

    def join(*parts: jax.Array) -> jax.Array:
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    return jax.jit(join, out_shardings=target)


def put_pieces(x: jax.Array, target: Sharding) -> jax.Array:
    """`x` in `target`, through slices that go from device to device; asynchronous."""
    return _assemble(_held(x), x.shape, target)


def _held(x: jax.Array) -> dict[Box, list[jax.Array]]:
    """The shards of `x` by their boxes, with all copies of each."""
    held: dict[Box, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        held.setdefault(box_of(shard.index, x.shape), []).append(shard.data)
    return held


def _assemble(
    sources: dict[Box, list[jax.Array]], shape: tuple[int, ...], target: Sharding
) -> jax.Array:
    """An array of `shape` in `target` from the boxes that cover it, each with its copies."""
    out, turn = [], 0
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None, "every device here holds a shard"
        box = box_of(index, shape)
        pieces, offsets = [], []
        for source, copies in sources.items():
            shared = overlap(source, box)
            if shared is None:
                continue
            here = [c for c in copies if device in c.devices()]
            data = here[0] if here else copies[turn % len(copies)]  # replicas share the sending
            turn += 1
            starts = tuple(lo - a for (lo, _), (a, _) in zip(shared, source, strict=True))
            sizes = tuple(hi - lo for lo, hi in shared)
            piece = data if sizes == data.shape else _cut(starts, sizes)(data)
            pieces.append(jax.device_put(piece, device))
            offsets.append(tuple(lo - c for (lo, _), (c, _) in zip(shared, box, strict=True)))
        size = tuple(hi - lo for lo, hi in box)
        out.append(pieces[0] if pieces[0].shape == size else _join(tuple(offsets), size)(*pieces))
    return jax.make_array_from_single_device_arrays(shape, target, out)


@lru_cache(maxsize=4096)
def _cut(starts: tuple[int, ...], sizes: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    stops = tuple(a + n for a, n in zip(starts, sizes, strict=True))
    return jax.jit(lambda x: jax.lax.slice(x, starts, stops))


@lru_cache(maxsize=4096)
def _join(offsets: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    def join(*pieces: jax.Array) -> jax.Array:
        out = jnp.zeros(shape, pieces[0].dtype)
        for piece, offset in zip(pieces, offsets, strict=True):
            out = jax.lax.dynamic_update_slice(out, piece, offset)
        return out

    return jax.jit(join)
