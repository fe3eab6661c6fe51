"""Attention of a decode step to prompts that several slots share: their keys and values are held
once for each data shard, and read once for all of its slots there (Hydragen, arXiv 2402.05099).

A prompt is a row of a cache of its own, also where one slot alone reads it. A slot's cache begins
behind its prompt. What a token reads of both are two terms of one softmax
(`models.partial_softmax`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.models.attention import Attend, by_kv_head, on_shards, term_in
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import StepKernel, Target, step_kernel_of
from jaxrl.models.pages import Pages, lengths_of, of_slots
from jaxrl.models.partial_softmax import by_products, merge
from jaxrl.types import Array


class Seats(NamedTuple):
    """Which slots read which prompts. Slots, prompts and seats are counted among those of their
    device."""

    slots: Array
    """[R, n] int32: the slots at each prompt; -1 where a seat is free."""
    lengths: Array
    """[R] int32: keys of each prompt; 0 of a row that holds none."""
    places: Array
    """[B] int32: the seat of each slot, counted through all rows of `slots`; that of a free slot is
    any."""


def why_not_paged(
    config: DecoderConfig, target: Target, dtype: str, *, episodes: bool = False
) -> str | None:
    """Returns why what follows the prompts cannot be in pages (`models.pages`); None where it can.

    Args:
        dtype: of the cache.
        episodes: environments answer, whose tokens are read into slots.
    """
    if episodes:
        return "the answers of environments are read into whole slots"
    if config.n_recurrent:
        return "the state of a layer has no positions"
    windows = any(kind.window is not None for kind in config.kinds)
    if windows and any(step_kernel_of(target, dim, dtype) for dim in config.head_dims):
        return "the kernel of a decode step has one window for all pages of a slot"
    return None


def shared_attender(
    kernel: StepKernel | None,
    positions: jax.Array,
    at: jax.Array,
    seats: Seats,
    mesh: Mesh | None,
    window: int | None = None,
    pages: Pages | None = None,
) -> Attend:
    """Returns how the tokens of a decode step, q [B,1,N,H] at `positions` [B], attend to their
    prompts and to what follows: keys and values are each a pair of [B,KV,S,H], in which the tokens
    are `at` [B], and [R,KV,P,H]; with a `window`, to so many of the last ones. With `pages`, the
    former are those of a pool [Q,KV,P,H]."""
    assert pages is None or kernel is None or window is None, "a kernel has one window for a slot"

    def attend(
        q: jax.Array, k: Sequence[jax.Array], v: Sequence[jax.Array], *sinks: jax.Array
    ) -> jax.Array:
        run = partial(_attend, kernel, window)
        given = (k[0], v[0], k[1], v[1], positions, at, *seats, *(pages or ()))
        return on_shards(run, mesh, q, *given, kv_dim=1, sinks=sinks)

    return attend


def _attend(
    kernel: StepKernel | None,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    positions: jax.Array,
    at: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
    places: jax.Array,
    *pages: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Runs `shared_attender` on one device."""
    own, (rows, n) = by_kv_head(q, k.shape[1]), slots.shape
    _, kv, group, h = own.shape
    asked = jnp.take(own, jnp.maximum(slots, 0), 0)  # [R,n,KV,M,H]
    asked = jnp.moveaxis(asked, 1, 2).reshape(rows, kv, n * group, h)
    asking, last, first, seen = own, at, jnp.zeros_like(at), at + 1
    if pages:
        of = Pages(*pages)
        owners = jnp.maximum(of.owners, 0)
        asking, last, first = jnp.take(own, owners, 0), jnp.take(at, owners), of.firsts
        seen = lengths_of(of, at, k.shape[2])
    if kernel is not None and window is None:
        theirs = term_in(kernel)(asked, prompt_k, prompt_v, lengths)
    else:  # the queries of one prompt have different windows, which no kernel has
        prompt_keys = jnp.arange(prompt_k.shape[2])[None]
        prompt_mask = (prompt_keys < lengths[:, None])[:, None]
        if window is not None:
            end = jnp.repeat(jnp.take(positions, jnp.maximum(slots, 0)), group, 1)
            prompt_mask = prompt_mask & (prompt_keys[None] > end[..., None] - window)
        theirs = by_products(asked, prompt_k, prompt_v, prompt_mask)
    if kernel is not None:
        within = None if window is None or window >= k.shape[2] else window
        ours = term_in(kernel)(asking, k, v, seen, window=within)
    else:
        keys = jnp.arange(k.shape[2])[None]
        mask = keys < seen[:, None]
        if window is not None:
            mask &= keys + first[:, None] > last[:, None] - window
        ours = by_products(asking, k, v, mask[:, None])
    if pages:
        ours = of_slots(ours, Pages(*pages).table)

    def at_slots(x: jax.Array) -> jax.Array:
        """Rearranges [R,KV,n*M,...] into [B,KV,M,...]."""
        x = x.reshape(rows, kv, n, group, *x.shape[3:])
        return jnp.take(jnp.moveaxis(x, 2, 1).reshape(rows * n, kv, *x.shape[3:]), places, 0)

    read, total = theirs
    merged = merge([(at_slots(read), at_slots(total)), ours], sinks)
    return merged.astype(q.dtype).reshape(q.shape)
