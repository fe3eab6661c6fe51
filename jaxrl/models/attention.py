"""Attention of a batch of rows: matrix products and a softmax, or an accelerator's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.models import cudnn, splash
from jaxrl.models.kernels import Kernel
from jaxrl.models.packing import Packing, run_by_heads
from jaxrl.sharding.axes import HEADS, ROWS, TOKENS, dim_spec

Attend = Callable[..., jax.Array]
"""(q [B,T,N,H], k [B,T,KV,H], v [B,T,KV,H]) -> [B,T,N,H]; training, prefill and decode differ only
here. Heads that have sinks pass them as a fourth array [N]: a score of each head that takes part in
its softmax, and has no value (arXiv 2508.10925)."""
Pair = tuple[jax.Array, jax.Array]
"""Keys and values [B,S,KV,H]."""
MASKED = -1e30
"""Score of a masked key: finite, so that a row with no valid key gives numbers, not NaN."""
BLOCK, MOST_BLOCKS = 512, 16
"""Queries that attend at once without a kernel, and into how many blocks longer rows are cut at
most."""


def attender(
    kernel: Kernel | None,
    keys: jax.Array,
    mesh: Mesh | None,
    *,
    queries: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
) -> Attend:
    """Returns the function by which rows attend to themselves, or to keys that end with their own.

    Args:
        keys: [B,S] bool, True at real tokens; padding is never attended to. For cuDNN they are the
            first ones of each row (`roll_rows`).
        queries: [B,T] bool, the last T of the keys; all of them where None, as cuDNN takes them.
        causal: no token attends to one behind it.
        window: a token attends to itself and the window - 1 before it, of causal rows whose real
            tokens are next to each other; None: to all before it.
    """
    queries = keys if queries is None else queries
    width, behind = queries.shape[1], keys.shape[1] - queries.shape[1]
    window = None if window is None or window >= keys.shape[1] else window
    assert causal or window is None, "a window of what lies before a token"
    if kernel == "cudnn":
        assert behind == 0, "cuDNN's causal mask starts at the first key"
        run, lengths = (partial(cudnn.attend_rows, causal=causal, window=window), row_lengths(keys))
        return lambda q, k, v, *sinks: on_shards(run, mesh, q, k, v, lengths, sinks=sinks)
    if kernel == "splash":
        run = partial(splash.attend_tiles, causal=causal, window=window)
        return lambda q, k, v, *sinks: on_shards(run, mesh, q, k, v, queries, keys, sinks=sinks)
    run = partial(attention_by_blocks, causal=causal, window=window)
    if mesh is not None and mesh.shape[TOKENS] > 1:  # XLA divides KV heads only
        return lambda q, k, v, *sinks: on_shards(run, mesh, q, k, v, keys, sinks=sinks)
    if width > BLOCK:
        return lambda q, k, v, *sinks: run(q, k, v, keys, *sinks)
    allowed = jnp.broadcast_to(keys[:, None], (len(keys), width, keys.shape[1]))
    if causal:
        allowed &= jnp.tril(jnp.ones(allowed.shape[1:], bool), behind)[None]
    if window is not None:
        allowed &= jnp.triu(jnp.ones(allowed.shape[1:], bool), behind - window + 1)[None]
    return lambda q, k, v, *sinks: attention(q, k, v, allowed, *sinks)


def attend_packed(
    kernel: Kernel | None, packing: Packing, mesh: Mesh | None, window: int | None = None
) -> Attend:
    """Returns the function by which the tokens of streams [X,n] attend: each row to itself, and
    completions whose prompt is a row of its own to that too. `window` is as in `attender`, counted
    over prompt and completion.

    Where the axis `context` divides a stream, attention has whole rows of some heads
    (`packing.run_by_heads`).
    """
    if len(packing.rows) == 1:
        (rows,) = packing.rows
        attend_rows = attender(kernel, rows.mask, mesh, window=window)

        def attend(streams: tuple[jax.Array, ...], *sinks: jax.Array) -> jax.Array:
            return rows.pack(attend_rows(*map(rows.unpack, streams), *sinks))
    else:
        prompts, completions = packing.rows
        mask_p, mask_c = prompts.mask, completions.mask
        window = None if window is None or window >= prompts.width + completions.width else window
        attend_p = attender(kernel, mask_p, mesh, window=window)
        attend_c = _attend_completions(kernel, mask_p, mask_c, packing.group, mesh, window)

        def attend(streams: tuple[jax.Array, ...], *sinks: jax.Array) -> jax.Array:
            (q_p, k_p, v_p), (q_c, k_c, v_c) = (map(r.unpack, streams) for r in packing.rows)
            out = attend_c((q_p, q_c), (k_p, k_c), (v_p, v_c), *sinks)
            return prompts.pack(attend_p(q_p, k_p, v_p, *sinks)) + completions.pack(out)

    run = run_by_heads(attend, mesh, lambda x: x.shape[2])
    return lambda q, k, v, *sinks: run((q, k, v), *sinks)


def _attend_completions(
    kernel: Kernel | None,
    mask_p: jax.Array,
    mask_c: jax.Array,
    group: int,
    mesh: Mesh | None,
    window: int | None,
) -> Callable[..., jax.Array]:
    """Returns the function by which completions attend to the prompts that they share, and to
    themselves: queries, keys and values, each of prompts [P,W,*,H] and of completions [B,C,*,H],
    and any sinks -> [B,C,N,H]."""
    if kernel == "cudnn" and window is None:
        lengths = row_lengths(mask_p), row_lengths(mask_c)

        def run(q: jax.Array, *arrays: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            return cudnn.attend_groups(q, arrays[0:2], arrays[2:4], *arrays[4:], sinks)

        def joined(q: Pair, k: Pair, v: Pair, *sinks: jax.Array) -> jax.Array:
            pairs = zip(k, v, strict=True)
            return on_shards(run, mesh, q[1], *chain(*pairs), *lengths, sinks=sinks)

        return joined
    # The end of a prompt next to its completions: a window then counts positions.
    width, prompt_lengths = mask_p.shape[1], mask_p.sum(-1, dtype=jnp.int32)
    left = prompt_lengths - width if window is not None else None

    def rows(both: Pair) -> jax.Array:
        before = both[0] if left is None else roll_rows(both[0], left)
        return jnp.concatenate([jnp.repeat(before, group, 0), both[1]], 1)

    keys = rows((mask_p, mask_c))
    if kernel != "cudnn":
        attend = attender(kernel, keys, mesh, queries=mask_c, window=window)
        return lambda q, k, v, *sinks: attend(q[1], rows(k), rows(v), *sinks)
    first = jnp.repeat(width - prompt_lengths, group, 0)
    attend_whole = attender(kernel, roll_rows(keys, first), mesh, window=window)

    def whole(q: Pair, k: Pair, v: Pair, *sinks: jax.Array) -> jax.Array:
        """Computes the rows of the prompt's queries too: cuDNN's window has as many queries as
        keys."""
        out = attend_whole(*(roll_rows(rows(x), first) for x in (q, k, v)), *sinks)
        return roll_rows(out, -first)[:, width:]

    return whole


def row_lengths(mask: jax.Array) -> jax.Array:
    """Returns the row lengths [B] int32 of mask [B,T], at least 1: a row without a key would have
    no softmax."""
    return jnp.maximum(mask.sum(-1, dtype=jnp.int32), 1)


@jax.custom_vjp
def roll_rows(x: jax.Array, by: jax.Array) -> jax.Array:
    """Moves each row of x [B,T,...] to the left by `by` [B] positions; what leaves it enters at its
    other end. The gradient is rolled back: nothing is added up."""
    width = x.shape[1]
    index = (jnp.arange(width)[None] + by[:, None]) % width
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")


roll_rows.defvjp(lambda x, by: (roll_rows(x, by), by), lambda by, d: (roll_rows(d, -by), None))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, sinks: jax.Array | None = None
) -> jax.Array:
    """Computes softmax attention of q [B,T,N,H] over k, v [B,S,KV,H] where mask [B,T,S]; softmax in
    float32.

    Query heads are grouped over the KV heads. `sinks` [N] as in `Attend`.
    """
    b, t, n, h = q.shape
    kv = k.shape[2]
    q = q.reshape(b, t, kv, n // kv, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * h**-0.5, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, -1)
    else:
        sinks = sinks.reshape(1, kv, n // kv, 1, 1).astype(jnp.float32)
        top = jnp.maximum(jax.lax.stop_gradient(scores).max(-1, keepdims=True), sinks)
        top = jax.lax.stop_gradient(top)
        raised = jnp.exp(scores - top)
        weights = raised / (raised.sum(-1, keepdims=True) + jnp.exp(sinks - top))
    return jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v).reshape(b, t, n, h)


def query_block(width: int) -> int:
    """Returns the number of queries in a block of `attention_by_blocks`, for rows of `width`
    queries."""
    blocks = min(MOST_BLOCKS, -(-width // BLOCK))
    return -(-width // blocks)


def attention_by_blocks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    sinks: jax.Array | None = None,
    *,
    causal: bool,
    window: int | None = None,
) -> jax.Array:
    """Computes `attention` of q [B,T,N,H] over k, v [B,S,KV,H], one block of queries after the
    other: scores [B,N,T,S] never exist. The backward pass computes the scores of a block again.

    Args:
        keys: [B,S] bool, True at real tokens.
        causal: query i attends to the keys up to i + S - T.
        window: and to no more than this many; a block reads only the keys that its queries reach.
    """
    b, width, n, h = q.shape
    size, behind = query_block(width), k.shape[1] - width
    span = k.shape[1] if window is None else min(k.shape[1], size + window - 1)

    @jax.checkpoint
    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, first = block
        last = behind + first + jnp.arange(size)
        start = jnp.clip(last[0] + size - span, 0, k.shape[1] - span)
        k_, v_, keys_ = (
            x if span == x.shape[1] else jax.lax.dynamic_slice_in_dim(x, start, span, 1)
            for x in (k, v, keys)
        )
        allowed = jnp.broadcast_to(keys_[:, None], (b, size, span))
        at = jnp.arange(span) + start
        if causal:
            allowed &= reach_mask(at[None], last[:, None], window)[None]
        return attention(q, k_, v_, allowed, sinks)

    padded = jnp.pad(q, ((0, 0), (0, -width % size), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(b, -1, size, n, h), 1, 0)
    out = jax.lax.map(attend, (blocks, jnp.arange(0, width, size)))
    return jnp.moveaxis(out, 0, 1).reshape(padded.shape)[:, :width]


def reach_mask(keys: jax.Array, queries: jax.Array, window: int | None) -> jax.Array:
    """Returns whether queries at some positions attend to keys at others: to themselves and to
    those before them, or to the last `window` of these."""
    allowed = keys <= queries
    return allowed if window is None else allowed & (keys > queries - window)


def on_shards(
    run: Callable[..., jax.Array],
    mesh: Mesh | None,
    *arrays: jax.Array,
    kv_dim: int = 2,
    sinks: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Runs `run` on each device's rows and heads, which XLA cannot divide for a kernel.

    Args:
        arrays: queries [B,T,N,H], then keys and values [*,S,KV,H], then what has no heads. KV heads
            that the mesh does not divide are whole on each device, which picks its own.
        kv_dim: the dim of the KV heads; 1 of a cache [B,KV,S,H].
        sinks: one array [N], which `run` takes by its name, or none.
    """
    if sinks:
        run, arrays = partial(_with_sinks, run), (*arrays, *sinks)
    if mesh is None or mesh.size == 1:
        return run(*arrays)
    heads, kv_heads = arrays[0].shape[2], arrays[1].shape[kv_dim]
    axis, kv_axis = (dim_spec(n, HEADS, mesh.shape) for n in (heads, kv_heads))
    split = PartitionSpec(ROWS, None, axis)
    kv_split = PartitionSpec(ROWS, *[None] * (kv_dim - 1), kv_axis)
    specs = [kv_split if x.ndim == 4 else PartitionSpec(ROWS) for x in arrays]
    specs[0] = split
    if sinks:
        specs[-1] = PartitionSpec(axis)

    def local(q: jax.Array, *rest: jax.Array) -> jax.Array:
        if axis == kv_axis:
            return run(q, *rest)
        first, group = jax.lax.axis_index(HEADS) * q.shape[2], heads // kv_heads
        if group % q.shape[2] == 0:  # its heads read one KV head

            def pick(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice_in_dim(x, first // group, 1, kv_dim)
        else:

            def pick(x: jax.Array) -> jax.Array:
                return jnp.take(x, (first + jnp.arange(q.shape[2])) // group, kv_dim)

        return run(q, *(pick(x) if x.ndim == 4 else x for x in rest))

    return jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=split, check_vma=False)(
        *arrays
    )


def _with_sinks(run: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    return run(*arrays[:-1], sinks=arrays[-1])
