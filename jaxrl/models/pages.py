"""A cache in pages: the keys and values of each slot, behind its prompt, are in pages of a pool, so
that memory follows the tokens that exist and not slots times the longest.

A page belongs to one slot. That makes pages rows like those of shared prompts: each is attended to
by the queries of its slot, in any kernel, and what a slot reads of its pages are terms of one
softmax (`models.partial_softmax`). Keys and values are neither gathered nor looked up. The kernels
of paged attention in `jax.experimental.pallas.ops` (`gpu.paged_attention`,
`tpu.ragged_paged_attention`) are not used: they return no log-sum-exp to merge with that of a
prompt, so that prompts would be in the pages too and be read once for each sample; and each has a
layout of its own, of which a TPU's joins keys and values in one array.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.models.partial_softmax import LOWEST, Term
from jaxrl.sharding.axes import ROWS, divided
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


def lengths_of(pages: Pages, at: jax.Array, size: int) -> jax.Array:
    """Counts the keys of each page [Q] int32 that the tokens `at` [B] see."""
    last = jnp.take(at, jnp.maximum(pages.owners, 0))
    return jnp.where(pages.owners >= 0, jnp.clip(last + 1 - pages.firsts, 0, size), 0)


def of_slots(term: Term, table: jax.Array) -> Term:
    """Merges the terms of pages [Q,...] to one of each slot [B,...]."""
    found, there = jnp.maximum(table, 0), table >= 0
    read, total = (jnp.take(x, found, 0) for x in term)  # [B,n,KV,M,...]
    total = jnp.where(there[:, :, None, None], total, LOWEST)
    top = total.max(1)
    shares = jnp.exp(total - top[:, None])
    mass = shares.sum(1)
    return (shares[..., None] * read).sum(1) / mass[..., None], jnp.log(mass) + top


def write(
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
    heads = divided(pool.shape[1], ("tensor",), mesh.shape)
    of_pool, rows = PartitionSpec(ROWS, heads), PartitionSpec(ROWS)
    specs = (of_pool, PartitionSpec(ROWS, None, heads), rows, rows)
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=of_pool, check_vma=False)
    return run(pool, new, at, table)
