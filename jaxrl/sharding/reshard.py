"""Moves arrays from one mesh and sharding to any other, with bit-equal values.

On accelerators, pieces are copied from device to device: each destination shard is assembled from
the boxes (index ranges) of the source shards that overlap it. Nothing passes through the host, and
nothing blocks. On CPU, plain `device_put` is faster. Both ways move many arrays in few dispatches.
`device_put(donate=True)` across meshes crashes and is never used; delete the source after the call
instead.

A mesh may span several processes, which must make the same calls in the same order. Each then fills
its own devices from arrays on its host. Only an array that is already on such a mesh is moved by a
collective. Between workers an array travels in pieces (`Shards`): the sender cuts it into the boxes
that its devices hold, and the receiver reads the boxes that its own devices need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Abstract
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from jaxrl.types import Array, Tree

Box = tuple[tuple[int, int], ...]
"""Half-open range of each dim."""
Held = dict[Box, list[Array]]
"""Box of an array -> the copies of it on devices."""
Wanted = tuple[Held, tuple[int, ...]]
"""The boxes of an array, and its shape."""
Pieces = Callable[..., list[Array]]
"""A jitted function of a list."""
Calls = dict[Pieces, list[Array]]
"""What would run on devices that are not here, and what each is called with."""
Offsets = tuple[tuple[int, ...], ...]
TOGETHER = 2**28
"""Bytes of arrays that move at once on an accelerator, where their slices need memory too."""


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
            inside: Any = (..., *_slices_within(shared, piece.box))  # a view, also of 0 dims
            values = piece.fetch()[inside]
            if values.shape == sizes:
                return values
            out = np.empty(sizes, self.dtype) if out is None else out
            out[_slices_within(shared, wanted)] = values
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
    """Intersects two boxes; None if they share nothing."""
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


def local_pieces(x: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Returns the boxes of `x` that this process answers for, on their devices: together the
    processes of its mesh give each box once."""
    return [
        (box_of(shard.index, x.shape), shard.data)
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]


def _slices_within(shared: Box, box: Box) -> tuple[slice, ...]:
    """Returns `shared` as slices of an array that fills `box`."""
    return tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(shared, box, strict=True))


@dataclass(frozen=True)
class Rows:
    """Consecutive slices of rows (dim 0) of one array; `reshard` concatenates them."""

    parts: tuple[Array, ...]
    """`jax.Array`s; for `piece_programs` abstract ones."""


def join_parts(scores: Tree) -> Tree:
    """Joins a list or tuple of trees with the same leaves into one tree; anything else is returned
    as it is.

    What lies on devices or in another worker stays there, as `Rows` or `Shards`: `reshard` fetches
    it.

    Args:
        scores: None among them is a part without rows.
    """
    if not isinstance(scores, list | tuple):
        return scores
    filled = [part for part in scores if part is not None]
    assert filled, "no part has a row"
    kinds: Sequence[tuple[type, Callable[..., Rows | Shards | np.ndarray]]] = (
        (Shards, concat_rows),
        (jax.Array, Rows),
        (np.ndarray, np.concatenate),
    )

    def join(*leaves: object) -> Rows | Shards | np.ndarray:
        for kind, joined in kinds:
            if all(isinstance(leaf, kind) for leaf in leaves):
                return joined(leaves)
        raise TypeError(f"parts of several kinds: {[type(leaf).__name__ for leaf in leaves]}")

    return filled[0] if len(filled) == 1 else jax.tree.map(join, *filled)


def put(tree: Tree, shardings: Tree) -> Tree:
    """Puts host arrays, which are the same in every process, on devices.

    No process waits for another.

    Args:
        shardings: a tree of the same form, or one sharding for all.
    """
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)

    def placed(x: ArrayLike, target: Sharding) -> jax.Array:
        values = np.asarray(x)
        return _from_boxes(values.shape, values.dtype, lambda index: values[index], target)

    return jax.tree.map(placed, tree, jax.tree.broadcast(shardings, tree))


def reshard(tree: Tree, shardings: Tree) -> Tree:
    """Moves the arrays of `tree` into `shardings` (a tree of the same form, or one sharding for
    all).

    A leaf that has its sharding already is returned as it is, without a copy.

    Args:
        tree: of `jax.Array`, `Rows`, `Shards` or numpy arrays, the latter the same in every
            process.
    """
    leaves, form = jax.tree.flatten(tree)
    targets = jax.tree.leaves(jax.tree.broadcast(shardings, tree))
    out = list(leaves)
    here = [
        i
        for i, (x, target) in enumerate(zip(leaves, targets, strict=True))
        if isinstance(x, jax.Array)
        and x.sharding != target
        and x.is_fully_addressable
        and target.is_fully_addressable
    ]
    if here:
        moved = _move_together([leaves[i] for i in here], [targets[i] for i in here])
        for i, x in zip(here, moved, strict=True):
            out[i] = x
    return jax.tree.unflatten(form, map(_move, out, targets))


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """Copies the whole of `x` to the host of every process. All processes of its mesh must call it
    together."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        assert isinstance(x.sharding, NamedSharding)
        x = _gather_program(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return np.asarray(x)


def checksums(arrays: Sequence[jax.Array]) -> list[int]:
    """Computes a checksum of each array on its devices, which is the same in any sharding: the sum
    modulo 2^32 of a hash of each element's bits and place. All processes of their mesh must call it
    together."""
    return [int(x) for x in jax.device_get([_checksum(x) for x in arrays])]


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    mixed = jnp.zeros_like(place)
    for word in (place, bits.astype(jnp.uint32)):
        mixed = mix_bits(mixed ^ word)
    return jnp.sum(mixed, dtype=jnp.uint32)


def mix_bits(x: jax.Array) -> jax.Array:
    """Applies the finaliser of MurmurHash3 to uint32 numbers: a bijection that changes half of the
    bits for each bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _move(x: jax.Array | Rows | Shards | np.ndarray, target: Sharding) -> jax.Array:
    """Moves `x` into the target sharding; an array on devices comes here only if the devices belong
    to several processes: `reshard` moves the others."""
    if isinstance(x, Shards):
        return _from_boxes(x.shape, x.dtype, x.read, target)
    if isinstance(x, Rows):
        if not all(part.is_fully_addressable for part in x.parts):
            return _move(_gather_program(x.parts[0].sharding)(*x.parts), target)
        return _assemble_arrays([_row_shards_by_box(x)], [target])[0]
    if not isinstance(x, jax.Array):
        return put(x, target)
    if x.sharding == target:
        return x
    together = x.sharding.device_set == target.device_set
    return _gather_program(target)(x) if together else put(to_host(x), target)


def _move_together(xs: Sequence[jax.Array], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Moves arrays with few dispatches, however many arrays there are."""
    devices: set[jax.Device] = set().union(
        *(s.device_set for s in (*targets, *(x.sharding for x in xs)))
    )
    if any(device.platform == "cpu" for device in devices):
        return jax.device_put(list(xs), list(targets))
    moved: list[jax.Array] = []
    for part in _parts([x.nbytes for x in xs]):
        moved += put_pieces(xs[part], targets[part])
    return moved


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Yields slices of consecutive items of at most `TOGETHER` bytes in all, or of one item that is
    larger."""
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and held + size > TOGETHER:
            yield slice(start, i)
            start, held = i, 0
        held += size
    if sizes:
        yield slice(start, len(sizes))


def _from_boxes(
    shape: tuple[int, ...],
    dtype: np.dtype,
    read: Callable[[tuple[slice, ...]], np.ndarray],
    target: Sharding,
) -> jax.Array:
    """Builds an array from the boxes that `read` gives; each is read once for all devices that hold
    it."""
    boxes: dict[Box, np.ndarray] = {}

    def box(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device here holds a shard"
        at = box_of(index, shape)
        if at not in boxes:
            boxes[at] = read(tuple(slice(*span) for span in at))
        return boxes[at]

    return jax.make_array_from_callback(shape, target, box, dtype=dtype)


@lru_cache(maxsize=256)
def _gather_program(target: Sharding) -> Callable[..., jax.Array]:
    """Returns the program that joins arrays over the devices of `target` by rows, in `target`."""

    def join(*parts: jax.Array) -> jax.Array:
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    return jax.jit(join, out_shardings=target)


def put_pieces(xs: Sequence[jax.Array], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Moves arrays into `targets`, through slices that go from device to device; asynchronous. Each
    device cuts and joins the slices of all arrays in one program."""
    return _assemble_arrays([(_shards_by_box(x), x.shape) for x in xs], targets)


def piece_programs(
    xs: Sequence[Abstract | Rows], targets: Sequence[Sharding]
) -> list[tuple[Pieces, list[Array]]]:
    """Lists the programs of `reshard` on accelerators that are not present: functions that cut
    slices out of arrays, and functions that join them at their destinations. Where several
    devices do the same, only one is listed.

    Args:
        xs: arrays with shardings, or `Rows` of such.
    """
    calls: Calls = {}
    pairs = list(zip(xs, targets, strict=True))
    for x, target in pairs:
        if isinstance(x, Rows):
            _assemble([_row_shards_by_box(x)], [target], calls)
    moving = [(x, at) for x, at in pairs if not isinstance(x, Rows) and x.sharding != at]
    for part in _parts([x.size * x.dtype.itemsize for x, _ in moving]):
        arrays = [(_shards_by_box(x), x.shape) for x, _ in moving[part]]
        _assemble(arrays, [at for _, at in moving[part]], calls)
    return list(calls.items())


def _run(program: Pieces, xs: list[Array], calls: Calls | None) -> list[Array]:
    if calls is None:
        return program(xs)
    calls[program] = xs
    device = _device(jax.tree.leaves(xs)[0])
    return _send(jax.eval_shape(program, xs), [device] * len(xs), calls)


def _send(xs: list[Array], devices: list[jax.Device], calls: Calls | None) -> list[Array]:
    if calls is None:
        return jax.device_put(xs, devices)
    return [_abstract(x.shape, x.dtype, at) for x, at in zip(xs, devices, strict=True)]


def _abstract(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> Abstract:
    return Abstract(shape, dtype, sharding=SingleDeviceSharding(device))


def _device(x: jax.Array | Abstract) -> jax.Device:
    """Returns the device of an array that lies on one device."""
    return next(iter(x.sharding.device_set))


def _shards_by_box(x: jax.Array | Abstract) -> Held:
    """Returns the shards of `x` by their boxes, with all copies of each."""
    held: Held = {}
    if isinstance(x, Abstract):
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            box = box_of(index, x.shape)
            size = tuple(hi - lo for lo, hi in box)
            held.setdefault(box, []).append(_abstract(size, x.dtype, device))
        return held
    for shard in x.addressable_shards:
        held.setdefault(box_of(shard.index, x.shape), []).append(shard.data)
    return held


def _row_shards_by_box(x: Rows) -> tuple[Held, tuple[int, ...]]:
    """Returns the shards of all parts, and the shape of the whole."""
    sources: Held = {}
    rows = 0
    for part in x.parts:
        for ((start, stop), *rest), copies in _shards_by_box(part).items():
            sources[(start + rows, stop + rows), *rest] = copies
        rows += part.shape[0]
    return sources, (rows, *x.parts[0].shape[1:])


def _assemble_arrays(wanted: Sequence[Wanted], targets: Sequence[Sharding]) -> list[jax.Array]:
    """Assembles for each the array of its shape in its sharding."""
    triples = zip(_assemble(wanted, targets), wanted, targets, strict=True)
    return [
        jax.make_array_from_single_device_arrays(shape, target, shards)
        for shards, (_, shape), target in triples
    ]


def _assemble(
    wanted: Sequence[Wanted], targets: Sequence[Sharding], calls: Calls | None = None
) -> list[list[Array]]:
    """Assembles for each array its shards in its sharding, from the boxes that cover it; or, of
    devices that are not here, computes shapes and enters in `calls` what would run."""
    cuts: dict[jax.Device, list[tuple[Array, Box]]] = {}
    """By source device: what is cut out of a shard."""
    pieces: list[tuple[jax.Device, int]] = []
    """Where each piece is: the source device and the place among its cuts."""
    joins: dict[jax.Device, list[tuple[list[int], Offsets, tuple[int, ...]]]] = {}
    """By destination: for each shard its pieces, their offsets in it, and its shape."""
    turn = 0
    places = [
        at.addressable_devices_indices_map(shape)
        if calls is None
        else at.devices_indices_map(shape)
        for (_, shape), at in zip(wanted, targets, strict=True)
    ]
    for (sources, shape), devices in zip(wanted, places, strict=True):
        for device, index in devices.items():
            assert index is not None, "every device here holds a shard"
            box = box_of(index, shape)
            numbers, offsets = [], []
            for source, copies in sources.items():
                shared = overlap(source, box)
                if shared is None:
                    continue
                local = [c for c in copies if _device(c) == device]
                # Replicas share the sending.
                data = local[0] if local else copies[turn % len(copies)]
                turn += 1
                within = tuple(
                    (lo - a, hi - a) for (lo, hi), (a, _) in zip(shared, source, strict=True)
                )
                held = cuts.setdefault(_device(data), [])
                numbers.append(len(pieces))
                pieces.append((_device(data), len(held)))
                held.append((data, within))
                offsets.append(tuple(lo - c for (lo, _), (c, _) in zip(shared, box, strict=True)))
            size = tuple(hi - lo for lo, hi in box)
            joins.setdefault(device, []).append((numbers, tuple(offsets), size))
    cut: dict[jax.Device, list[Array]] = {}
    for device, held in cuts.items():  # a shard that is cut whole is itself
        out = cut[device] = [data for data, _ in held]
        partial = [i for i, (x, box) in enumerate(held) if tuple(b - a for a, b in box) != x.shape]
        if partial:
            program = _cut(tuple(held[i][1] for i in partial))
            for i, piece in zip(
                partial, _run(program, [out[i] for i in partial], calls), strict=True
            ):
                out[i] = piece
    receivers = {
        i: device for device, parts in joins.items() for numbers, *_ in parts for i in numbers
    }
    to = [receivers[i] for i in range(len(pieces))]
    sent = _send([cut[device][at] for device, at in pieces], to, calls)
    shards: dict[jax.Device, Iterator[Array]] = {}
    for device, parts in joins.items():  # a shard of a single piece is the piece
        out = [sent[numbers[0]] for numbers, _, _ in parts]
        partial = [i for i, (_, _, size) in enumerate(parts) if out[i].shape != size]
        if partial:
            program = _join(tuple(parts[i][1:] for i in partial))
            inputs = [[sent[piece] for piece in parts[i][0]] for i in partial]
            for i, shard in zip(partial, _run(program, inputs, calls), strict=True):
                out[i] = shard
        shards[device] = iter(out)
    return [[next(shards[device]) for device in devices] for devices in places]


@lru_cache(maxsize=256)
def _cut(boxes: tuple[Box, ...]) -> Callable[..., list[jax.Array]]:
    def cut(xs: list[jax.Array]) -> list[jax.Array]:
        spans = [tuple(zip(*box, strict=True)) for box in boxes]
        return [jax.lax.slice(x, *span) for x, span in zip(xs, spans, strict=True)]

    return jax.jit(cut)


@lru_cache(maxsize=256)
def _join(shards: tuple[tuple[Offsets, tuple[int, ...]], ...]) -> Callable[..., list[jax.Array]]:
    def join(pieces_of_shards: list[list[jax.Array]]) -> list[jax.Array]:
        out = []
        for pieces, (offsets, shape) in zip(pieces_of_shards, shards, strict=True):
            shard = jnp.zeros(shape, pieces[0].dtype)
            for piece, offset in zip(pieces, offsets, strict=True):
                shard = jax.lax.dynamic_update_slice(shard, piece, offset)
            out.append(shard)
        return out

    return jax.jit(join)
