"""Moves arrays from one mesh to another: any layout to any layout, values bit-equal.

On a GPU, pieces go device to device: each destination shard is put together from the boxes of the
source shards that overlap it, so nothing passes through the host and nothing blocks. On CPU plain
`device_put` is quicker. `device_put(donate=True)` across meshes crashes and is never used; drop the
source after the call instead.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

Box = tuple[tuple[int, int], ...]
"""Half-open range of each dim."""


def reshard(tree: Any, shardings: Any) -> Any:
    """The arrays of `tree` in `shardings` (a tree of the same form, or one sharding for all).

    A leaf that has its sharding already is returned as it is, without a copy.
    """
    if isinstance(shardings, Sharding):
        sharding = shardings
        shardings = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(_move, tree, shardings)


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of `tree`, each counted once however it is replicated."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _move(x: Any, target: Sharding) -> jax.Array:
    if not isinstance(x, jax.Array):
        return jax.device_put(x, target)
    if x.sharding == target:
        return x
    devices: set[Any] = target.device_set | x.sharding.device_set
    on_gpu = all(device.platform == "gpu" for device in devices)
    return put_pieces(x, target) if on_gpu else jax.device_put(x, target)


def put_pieces(x: jax.Array, target: Sharding) -> jax.Array:
    """`x` in `target`, through slices that go from device to device; asynchronous."""
    sources: dict[Box, list[jax.Array]] = {}
    for shard in x.addressable_shards:
        sources.setdefault(_box(shard.index, x.shape), []).append(shard.data)
    out, turn = [], 0
    for device, index in target.addressable_devices_indices_map(x.shape).items():
        assert index is not None, "every device here holds a shard"
        box = _box(index, x.shape)
        pieces, offsets = [], []
        for source, copies in sources.items():
            overlap = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, box, strict=True)
            )
            if any(lo >= hi for lo, hi in overlap):
                continue
            here = [c for c in copies if device in c.devices()]
            data = here[0] if here else copies[turn % len(copies)]  # replicas share the sending
            turn += 1
            starts = tuple(lo - a for (lo, _), (a, _) in zip(overlap, source, strict=True))
            sizes = tuple(hi - lo for lo, hi in overlap)
            piece = data if sizes == data.shape else _cut(starts, sizes)(data)
            pieces.append(jax.device_put(piece, device))
            offsets.append(tuple(lo - c for (lo, _), (c, _) in zip(overlap, box, strict=True)))
        shape = tuple(hi - lo for lo, hi in box)
        out.append(pieces[0] if pieces[0].shape == shape else _join(tuple(offsets), shape)(*pieces))
    return jax.make_array_from_single_device_arrays(x.shape, target, out)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


@lru_cache(maxsize=4096)
def _cut(starts: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    stops = tuple(a + n for a, n in zip(starts, sizes, strict=True))
    return jax.jit(lambda x: jax.lax.slice(x, starts, stops))


@lru_cache(maxsize=4096)
def _join(offsets: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> Any:
    def join(*pieces: jax.Array) -> jax.Array:
        out = jnp.zeros(shape, pieces[0].dtype)
        for piece, offset in zip(pieces, offsets, strict=True):
            out = jax.lax.dynamic_update_slice(out, piece, offset)
        return out

    return jax.jit(join)
