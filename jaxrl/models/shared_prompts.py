"""Attention of a decode step to prompts that several slots share, and to what follows them.

The keys and values of a prompt are held once for each data shard, and read once for all of its
slots there (Hydragen, arXiv 2402.05099): a prompt is a row of a cache of its own, also where one
slot alone reads it. A slot's cache begins behind its prompt. What a token reads of both are two
terms of one softmax: the log-sum-exp of the scores of each says how much it counts.

What follows the prompts may be in pages of a pool, so that memory follows the tokens that exist and
not slots times the longest. A page belongs to one slot. That makes pages rows like those of shared
prompts: each is attended to by the queries of its slot, in any kernel. Keys and values are neither
gathered nor looked up. The kernels of paged attention in `jax.experimental.pallas.ops`
(`gpu.paged_attention`, `tpu.ragged_paged_attention`) are not used: they return no log-sum-exp to
merge with that of a prompt, so that prompts would be in the pages too and be read once for each
sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.models import flash_decode, split_k
from jaxrl.models.attention import Attend, on_shards
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import StepKernel, Target, step_kernel_of, target_on
from jaxrl.models.split_k import LOWEST, PartialAttention, join_terms
from jaxrl.sharding.axes import ROWS, dim_spec
from jaxrl.types import Array

PAGE = 64
"""Positions of a page: what the split-K kernel of GPUs reads at a time."""


class Pages(NamedTuple):
    """Which page belongs to which slot, both counted among those of their device."""

    owners: Array
    """[Q] int32: the slot of each page; -1 of a free page."""
    firsts: Array
    """[Q] int32: the position of its first key, behind the prompt."""
    table: Array
    """[B, n] int32: the pages of each slot in order; -1 behind the last."""


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
    """Returns why what follows the prompts cannot be in pages; None where it can.

    Args:
        dtype: of the cache.
        episodes: environments answer, whose tokens are read into slots.
    """
    if episodes:
        return "answers of environments are read into slots with their prompts"
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

    def on_device(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        prompt_k: jax.Array,
        prompt_v: jax.Array,
        *known: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        positions, at, slots, lengths, places, *paged = known
        queries = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])  # [B,KV,M,H]
        (_, kv, group, h), (rows, n) = queries.shape, slots.shape
        asked = jnp.take(queries, jnp.maximum(slots, 0), 0)  # [R,n,KV,M,H]
        asked = jnp.moveaxis(asked, 1, 2).reshape(rows, kv, n * group, h)
        asking, last, first, seen = queries, at, jnp.zeros_like(at), at + 1
        if paged:
            page_owners, first, table = paged
            owners = jnp.maximum(page_owners, 0)
            asking, last = jnp.take(queries, owners, 0), jnp.take(at, owners)
            seen = jnp.clip(last + 1 - first, 0, k.shape[2])  # keys of each page
            seen = jnp.where(page_owners >= 0, seen, 0)
        term: Callable[..., PartialAttention] = flash_decode.attend_cache
        if kernel == "split-k":
            term = partial(split_k.attend_parts, capabilities=target_on(mesh).capabilities)
        if kernel is not None and window is None:
            of_prompts = term(asked, prompt_k, prompt_v, lengths)
        else:  # the queries of one prompt have different windows, which no kernel has
            prompt_keys = jnp.arange(prompt_k.shape[2])[None]
            prompt_mask = (prompt_keys < lengths[:, None])[:, None]
            if window is not None:
                end = jnp.repeat(jnp.take(positions, jnp.maximum(slots, 0)), group, 1)
                prompt_mask = prompt_mask & (prompt_keys[None] > end[..., None] - window)
            of_prompts = attend_by_products(asked, prompt_k, prompt_v, prompt_mask)
        if kernel is not None:
            within = None if window is None or window >= k.shape[2] else window
            of_slots = term(asking, k, v, seen, window=within)
        else:
            keys = jnp.arange(k.shape[2])[None]
            mask = keys < seen[:, None]
            if window is not None:
                mask &= keys + first[:, None] > last[:, None] - window
            of_slots = attend_by_products(asking, k, v, mask[:, None])
        if paged:  # one term of each slot [B,...] of those of its pages [Q,...]
            numbers, owned = jnp.maximum(table, 0), table >= 0
            read, total = (jnp.take(x, numbers, 0) for x in of_slots)  # [B,n,KV,M,...]
            of_slots = join_terms((read, jnp.where(owned[:, :, None, None], total, LOWEST)), 1)

        # What a slot reads of its prompt, [R,KV,n*M,...] -> [B,KV,M,...], and of its own keys: two
        # terms of one softmax, in which sinks count once.
        prompt_terms = []
        for x in of_prompts:
            x = jnp.moveaxis(x.reshape(rows, kv, n, group, *x.shape[3:]), 2, 1)
            prompt_terms.append(jnp.take(x.reshape(rows * n, *x.shape[2:]), places, 0))
        (prompt_read, prompt_total), (read, total) = prompt_terms, of_slots
        totals = [prompt_total, total]
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(kv, group)
            totals.append(jnp.broadcast_to(sink, total.shape))
        prompt_share, share, *_ = jax.nn.softmax(jnp.stack(totals), 0)
        merged = prompt_share[..., None] * prompt_read + share[..., None] * read
        return merged.astype(q.dtype).reshape(q.shape)

    def attend(
        q: jax.Array, k: Sequence[jax.Array], v: Sequence[jax.Array], *sinks: jax.Array
    ) -> jax.Array:
        arrays = (k[0], v[0], k[1], v[1], positions, at, *seats, *(pages or ()))
        return on_shards(on_device, mesh, q, *arrays, kv_dim=1, sinks=sinks)

    return attend


def attend_by_products(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> PartialAttention:
    """Computes the term of q [R,KV,M,H] over k, v [R,KV,S,H] where mask [R,M,S] or [R,1,S]."""
    scores = jnp.einsum("rkmh,rksh->rkms", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores * q.shape[-1] ** -0.5, LOWEST)
    top = scores.max(-1)
    raised = jnp.exp(scores - top[..., None])
    mass = raised.sum(-1)
    read = jnp.einsum(
        "rkms,rksh->rkmh", raised.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return read / mass[..., None], jnp.log(mass) + top


def write_pages(
    pool: jax.Array, new: jax.Array, at: jax.Array, table: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """Writes new [B,1,KV,H] into the pool [Q,KV,P,H] at the positions `at` [B] of each slot, and
    nothing of a slot that has no page there."""

    def local(pool: jax.Array, new: jax.Array, at: jax.Array, table: jax.Array) -> jax.Array:
        size = pool.shape[2]
        number = at // size
        page = jnp.take_along_axis(table, number[:, None], 1, mode="fill", fill_value=-1)[:, 0]
        beyond = pool.shape[0] + jnp.arange(len(page), dtype=page.dtype)  # dropped
        page = jnp.where(page >= 0, page, beyond)
        zero = jnp.zeros_like(page)
        places = jnp.stack([page, zero, at % size, zero], 1)
        updates = jnp.swapaxes(new, 1, 2).astype(pool.dtype)
        # In this form, with an index for each dim, a TPU turns the pool into no other layout.
        dims = jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1, 2, 3),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0, 1, 2, 3),
        )
        return jax.lax.scatter(pool, places, updates, dims, unique_indices=True, mode="drop")

    if mesh is None or mesh.size == 1:
        return local(pool, new, at, table)
    heads = dim_spec(pool.shape[1], ("tensor",), mesh.shape)
    of_pool, rows = PartitionSpec(ROWS, heads), PartitionSpec(ROWS)
    specs = (of_pool, PartitionSpec(ROWS, None, heads), rows, rows)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=of_pool, check_vma=False)
    return run(pool, new, at, table)
