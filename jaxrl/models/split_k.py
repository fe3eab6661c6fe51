"""Attention of one token of each slot to its keys, in pallas's split-K kernel for NVIDIA's GPUs.

The keys of a slot are divided among several blocks of the GPU, and none reads keys beyond the
slot's own length: a step costs what the slots hold, not what the longest of them could (Flash-
Decoding; `jax.experimental.pallas.ops.gpu.decode_attention`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.batching import bucket
from jaxrl.sharding.targets import block_shared_bytes

PartialAttention = tuple[jax.Array, jax.Array]
"""What queries [R,KV,M,H] read of some keys, [R,KV,M,H] float32, and the log-sum-exp of their
scores [R,KV,M] float32, which is `LOWEST` or near it where there was no key."""
LOWEST = -1e30
"""Score of a masked key: finite, so that no difference of two is NaN."""
KEYS = 64
"""Most keys that a block reads at a time; lengths of the cache are multiples of it
(`kernels.Target.width_multiple`)."""
BLOCKS, MOST_PARTS = 528, 16
"""Blocks that the keys of all slots are divided into, four for each multiprocessor of an H100, and
the most parts of one slot's keys: results of parts cost bytes too."""
FEWEST_QUERIES, MOST_QUERIES = 16, 64
"""Queries of one KV head in a block; where there are more, several blocks read its keys."""
BARRIERS = 32
"""Bytes of shared memory in which a block waits for its loads."""
WARPS = 4
MODULE = "jax.experimental.pallas.ops.gpu.decode_attention"


@cache
def exists() -> bool:
    """Returns whether this jax has the kernel: pallas on Triton is to be removed from it one
    day."""
    try:
        return find_spec(MODULE) is not None
    except ImportError:  # nor the package that it was in
        return False


def parts_of(positions: int, rows: int) -> int:
    """Returns how many blocks share the keys of one of `rows` KV heads of slots, in a cache of the
    given number of positions."""
    tiles, most = positions // KEYS, min(MOST_PARTS, -(-BLOCKS // rows))
    return max(n for n in range(1, most + 1) if tiles % n == 0)


def tile_of(
    queries: int, head_dim: int, capabilities: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Returns how many queries a block has, of so many, and how many keys it reads at a time, so
    that both fit in the shared memory of each GPU (`shared_by`). None where not even the smallest
    fit."""

    def fits(rows: int, keys: int, gpu: tuple[int, int]) -> bool:
        return shared_by(rows, keys, head_dim, gpu) <= block_shared_bytes(gpu)

    rows = bucket(queries, smallest=FEWEST_QUERIES, most=MOST_QUERIES)
    while rows >= FEWEST_QUERIES:
        for keys in (KEYS, KEYS // 2, KEYS // 4):
            if all(fits(rows, keys, gpu) for gpu in capabilities):
                return rows, keys
        rows //= 2
    return None


def shared_by(rows: int, keys: int, head_dim: int, capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that Triton takes for a block of so many queries, which
    reads so many keys at a time, of 2 bytes a number. Tensor cores that read both factors of a
    product from shared memory (wgmma, tcgen05) are used from 64 rows on; keys and values are then
    loaded one step ahead."""
    if rows >= 64 and 9 <= capability[0] < 12:
        return 2 * (4 * keys + rows) * head_dim + BARRIERS
    return 2 * ((2 * keys + rows) * head_dim + rows * keys)


def attend_parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    capabilities: Sequence[tuple[int, int]],
    window: int | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """Computes the term of q [R,KV,M,H] over the first `lengths` [R] int32 positions of a cache k,
    v [R,KV,S,H].

    The kernel gets each part of the keys as a row, and `join_terms` adds the parts in float32: its
    own way of doing so rounds the sum of the weights to q's dtype, 0.4% of a head's result in
    bfloat16.

    Args:
        lengths: where 0, what is read is 0, and the log-sum-exp near `LOWEST`.
        capabilities: compute capabilities of the GPUs; none where the kernel is interpreted.
        window: only the last `window` of those; parts of the keys that end before are not read.
        interpret: runs anywhere, slowly.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 0.12 on
        decode_attention: Any = import_module(MODULE)  # on GPUs only

    (r, kv, m, h), s = q.shape, k.shape[2]
    tile = tile_of(m, h, capabilities)
    assert tile is not None, "`kernels.why_no_step_kernel` says where there is no kernel"
    n = parts_of(s, r * kv)
    size = s // n
    by_part = r * kv, n, m

    def within_parts(positions: jax.Array) -> jax.Array:
        """Counts the positions of a part that are before `positions` [R]; [R*KV*n]."""
        before = jnp.clip(positions[:, None] - size * jnp.arange(n, dtype=jnp.int32)[None], 0, size)
        return jnp.repeat(before, kv, 0).reshape(-1)

    out, (mass, top) = decode_attention.mqa(
        jnp.broadcast_to(q.reshape(r * kv, 1, m, h), (*by_part, h)).reshape(-1, m, h),
        k.reshape(-1, size, h),  # the layout of the cache stays as it is
        v.reshape(-1, size, h),
        start_idx=None if window is None else within_parts(jnp.maximum(lengths - window, 0)),
        kv_seq_len=within_parts(lengths),
        block_h=tile[0],
        block_k=tile[1],
        k_splits=1,
        num_warps=WARPS,
        return_residuals=True,
        normalize_output=False,
        interpret=interpret,
    )
    divisor = jnp.where(mass > 0, mass, 1)
    read = out.astype(jnp.float32) / divisor[..., None]
    total = jnp.where(mass > 0, jnp.log(divisor) + top, LOWEST)
    read, total = join_terms((read.reshape(*by_part, h), total.reshape(by_part)), 1)
    return read.reshape(q.shape), total.reshape(r, kv, m)


def join_terms(terms: PartialAttention, axis: int) -> PartialAttention:
    """Joins the terms along an axis to one."""
    read, total = terms
    top = total.max(axis, keepdims=True)
    shares = jnp.exp(total - top)
    mass = shares.sum(axis)
    joined = (shares[..., None] * read).sum(axis) / mass[..., None]
    return joined, jnp.log(mass) + top.squeeze(axis)


@contextlib.contextmanager
def pretend_triton_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Lets the kernel be lowered for a GPU of this compute capability, where there is none: from
    0.12 on, jax asks this process's own."""
    try:
        asked: Any = import_module("jax._src.pallas.triton.gpu_info")
    except ImportError:  # an earlier version
        yield
        return
    name, before = "{}.{}".format(*capability), asked.get_gpu_info
    info = asked.GpuInfo(
        gpu_version=None, arch_name=name, compute_capability=int(name.replace(".", ""))
    )
    asked.get_gpu_info = lambda: info
    try:
        yield
    finally:
        asked.get_gpu_info = before
