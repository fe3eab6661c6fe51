"""Attention of one token of each slot to its keys, on TPUs, in a kernel of our own (pallas).

A step of the kernel's grid takes some keys of one slot, of all its heads, and keeps the softmax's
running maximum and sum (Flash-Decoding). Keys beyond a slot's length, or before its window, are
neither computed nor read: the grid's steps there ask for a block that they have or need next.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.splash import LANES
from jaxrl.models.split_k import LOWEST, PartialAttention

BLOCK_BYTES = 1 << 20
"""Bytes of keys and values in a step of the grid: enough to hide what a step costs besides."""
MOST_ROWS = 32
"""Rows in a step of the grid, whose code has some lines for each."""


def grid_keys(positions: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Returns the number of keys of a slot that a step of the grid takes, in a cache of the given
    number of positions: a multiple of `LANES`, or all that there are."""
    key_bytes = 2 * kv_heads * head_dim * itemsize
    return min(max(BLOCK_BYTES // key_bytes // LANES, 1) * LANES, positions)


def grid_rows(rows: int, positions: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Returns the number of rows of a cache of few positions, such as one of pages, that a step of
    the grid takes: a step costs about as much time as reading `BLOCK_BYTES`, however little it
    reads."""
    row_bytes = 2 * kv_heads * head_dim * itemsize * positions
    return min(max(BLOCK_BYTES // row_bytes, 1), MOST_ROWS, rows)


def attend_cache(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> PartialAttention:
    """Computes the term of q [R,KV,M,H] over the first `lengths` [R] int32 positions of a cache k,
    v [R,KV,S,H].

    Args:
        lengths: where 0, what is read is 0, and the log-sum-exp `LOWEST`.
        window: only the last `window` of those; blocks that end before are not read.
        interpret: runs anywhere, slowly.
    """
    from jax.experimental import pallas as pl  # 0.3 s, on TPUs only
    from jax.experimental.pallas import tpu as pltpu

    (r, kv, m, h), s = q.shape, k.shape[2]
    rows = grid_rows(r, s, kv, h, k.dtype.itemsize)
    if rows > 1 and window is None:
        return _attend_together(q, k, v, lengths, rows, interpret)
    keys = grid_keys(s, kv, h, k.dtype.itemsize)

    def last(slot: Any, lengths: Any) -> Any:
        """Returns the last block that a slot reaches."""
        return jax.lax.div(jnp.maximum(lengths[slot] - 1, 0), jnp.int32(keys))

    def first(slot: Any, lengths: Any) -> Any:
        """Returns the first block that a slot needs."""
        if window is None:
            return jnp.int32(0)
        return jax.lax.div(jnp.maximum(lengths[slot] - window, 0), jnp.int32(keys))

    def cached(slot: Any, step: Any, lengths: Any) -> tuple[Any, ...]:
        needed = jnp.minimum(jnp.maximum(step, first(slot, lengths)), last(slot, lengths))
        return slot, 0, needed, 0

    def whole(slot: Any, step: Any, lengths: Any) -> tuple[Any, ...]:
        return slot, 0, 0, 0

    def body(lengths: Any, q: Any, k: Any, v: Any, *results: Any) -> None:
        out, total, top, mass, sums = results
        slot, step = pl.program_id(0), pl.program_id(1)

        @pl.when(step == 0)
        def _start() -> None:
            top[...] = jnp.full_like(top, LOWEST)
            mass[...] = jnp.zeros_like(mass)
            sums[...] = jnp.zeros_like(sums)

        @pl.when((step >= first(slot, lengths)) & (step <= last(slot, lengths)))
        def _add() -> None:
            left = lengths[slot] - step * keys
            scores = jax.lax.dot_general(
                q[0], k[0], (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
            )
            at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 2)
            seen = at < left if window is None else (at < left) & (at >= left - window)
            scores = jnp.where(seen, scores * h**-0.5, LOWEST)
            highest = jnp.maximum(top[...], scores.max(-1, keepdims=True))
            kept, weights = jnp.exp(top[...] - highest), jnp.exp(scores - highest)
            real = jax.lax.broadcasted_iota(jnp.int32, v.shape[1:], 1) < left
            values = jnp.where(real, v[0], 0)  # behind the cache's end there is anything, NaN too
            read = jax.lax.dot_general(
                weights.astype(values.dtype),
                values,
                (((2,), (1,)), ((0,), (0,))),
                preferred_element_type=jnp.float32,
            )
            top[...] = highest
            mass[...] = mass[...] * kept + weights.sum(-1, keepdims=True)
            sums[...] = sums[...] * kept + read

        @pl.when(step == pl.num_programs(1) - 1)
        def _end() -> None:
            out[0] = sums[...] / mass[...]
            total[0] = jnp.log(mass[...]) + top[...]

    queries, scalars = (kv, m, h), (kv, m, 1)
    run = pl.pallas_call(
        body,
        [
            jax.ShapeDtypeStruct((r, *queries), jnp.float32),
            jax.ShapeDtypeStruct((r, *scalars), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(r, -(-s // keys)),
            in_specs=[
                pl.BlockSpec((1, *queries), whole),
                pl.BlockSpec((1, kv, keys, h), cached),
                pl.BlockSpec((1, kv, keys, h), cached),
            ],
            out_specs=[pl.BlockSpec((1, *queries), whole), pl.BlockSpec((1, *scalars), whole)],
            scratch_shapes=[
                pltpu.VMEM(scalars, jnp.float32),
                pltpu.VMEM(scalars, jnp.float32),
                pltpu.VMEM(queries, jnp.float32),
            ],
        ),
        interpret=interpret,
    )
    out, total = run(lengths, q, k, v)
    return out, total[..., 0]


def _attend_together(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, rows: int, interpret: bool
) -> PartialAttention:
    """Computes `attend_cache` for `rows` rows at a time; keys beyond a length are read too."""
    from jax.experimental import pallas as pl  # 0.3 s, on TPUs only
    from jax.experimental.pallas import tpu as pltpu

    r, kv, m, h = q.shape

    def some(step: Any, lengths: Any) -> tuple[Any, ...]:
        return step, 0, 0, 0

    def body(lengths: Any, q: Any, k: Any, v: Any, out: Any, total: Any) -> None:
        first = pl.program_id(0) * rows

        def seen(shape: tuple[int, ...], at: int) -> jax.Array:
            """Returns which positions, along dim `at`, are below the lengths of the rows' heads."""
            row, ends = jax.lax.broadcasted_iota(jnp.int32, shape, 0), jnp.zeros(shape, jnp.int32)
            for i in range(rows):
                end = lengths[jnp.minimum(first + i, r - 1)]
                ends = jnp.where((row >= i * kv) & (row < (i + 1) * kv), end, ends)
            return jax.lax.broadcasted_iota(jnp.int32, shape, at) < ends

        queries, keys, values = (x[...].reshape(rows * kv, *x.shape[2:]) for x in (q, k, v))
        scores = jax.lax.dot_general(
            queries, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        scores = jnp.where(seen(scores.shape, 2), scores * h**-0.5, LOWEST)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        mass = weights.sum(-1, keepdims=True)
        values = jnp.where(seen(values.shape, 1), values, 0)  # beyond is anything, NaN too
        read = jax.lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((2,), (1,)), ((0,), (0,))),
            preferred_element_type=jnp.float32,
        )
        out[...] = (read / mass).reshape(out.shape)
        total[...] = (jnp.log(mass) + top).reshape(total.shape)

    run = pl.pallas_call(
        body,
        [
            jax.ShapeDtypeStruct((r, kv, m, h), jnp.float32),
            jax.ShapeDtypeStruct((r, kv, m, 1), jnp.float32),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-r // rows),),
            in_specs=[pl.BlockSpec((rows, *x.shape[1:]), some) for x in (q, k, v)],
            out_specs=[pl.BlockSpec((rows, kv, m, n), some) for n in (h, 1)],
        ),
        interpret=interpret,
    )
    out, total = run(lengths, q, k, v)
    return out, total[..., 0]
