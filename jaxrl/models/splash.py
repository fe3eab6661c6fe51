"""Attention in the TPU's splash kernel (`jax.experimental.pallas`): masks are computed in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.process.json_types import Keywords

LANES = 128
"""Rows are padded to multiples of it."""
BLOCKS = (512, 384, 256, LANES)
"""Tokens of a tile: the largest of these that divides the width."""


def attend_tiles(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    causal: bool,
    window: int | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes softmax attention of q [B,T,N,H] over k, v [B,S,KV,H]; meaningless, but finite,
    where `queries` is False.

    Args:
        queries: [B,T] bool, True at real tokens.
        keys: [B,S] bool. Real tokens attend to real ones only.
        causal: query i attends to the keys up to i + S - T.
        window: and to no more than this many; None: to all of them. Tiles outside are skipped.
        sinks: [N].
        interpret: runs anywhere, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # 0.6 s, on TPUs only

    width, behind = q.shape[1], k.shape[1] - q.shape[1]
    scaled = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    q, k, v = (_pad_lanes(x).swapaxes(1, 2) for x in (scaled, k, v))
    sizes = q.shape[2], k.shape[2]
    mask: splash.Mask = (
        splash.CausalMask(sizes, offset=behind) if causal else splash.FullMask(sizes)
    )
    if window is not None:
        mask = splash.LocalMask(sizes, (window - 1, 0), offset=behind)
    tiles = {"q": sizes[0], "kv": sizes[1]}  # of the forward pass, and of the two of the backward
    tiles = {name: next(n for n in BLOCKS if size % n == 0) for name, size in tiles.items()}
    blocks: Keywords = {f"block_{x}{of}": n for x, n in tiles.items() for of in ("", "_dkv", "_dq")}
    run = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * q.shape[1]),
        block_sizes=splash.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    ids = splash.SegmentIds(*(_pad_lanes(x).astype(jnp.int32) for x in (queries, keys)))
    if sinks is not None:
        sinks = sinks.astype(q.dtype)  # of which the kernel's gradient is
    return jax.vmap(run, (0, 0, 0, 0, None))(q, k, v, ids, sinks).swapaxes(1, 2)[:, :width]


def _pad_lanes(x: jax.Array) -> jax.Array:
    """Pads x [B,T,...] to a multiple of `LANES` positions."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % LANES)] + [(0, 0)] * (x.ndim - 2))
