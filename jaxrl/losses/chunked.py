"""Losses on logits = hidden @ head.T, computed with their gradients for one chunk of tokens at a
time, so that no array [B, C, V] ever exists.

A `Term` (`losses.layout`) computes a loss on the logits of some tokens, and the gradient of that
loss with respect to these logits. This file runs a term over all tokens, on one device or a mesh:

- `measure` runs forward only. On a mesh the head is gathered once, before the loop.
- `fused` computes values and gradients in one scan over chunks of tokens: a matrix product with
  each head, and two for the gradients. It sums the head's gradient in a float32 array of the head's
  size.
- `tiled` computes gradients only, from what `measure` saved, in one loop over tiles of the
  *vocabulary*, each with all tokens. It computes the logits a second time, but each tile of the
  head's gradient is complete when it is written, so that it needs no float32 accumulator.

`loss_values` is the differentiable function: it uses `fused` or, if the `ShardedTerm` is `lean`,
`measure` and `tiled`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl.losses.layout import (
    FrozenInputs,
    PerToken,
    ShardedTerm,
    TokenStats,
    reduce_head,
)
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.sharding.axes import WEIGHTS
from jaxrl.types import Tree


def measure(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    given: FrozenInputs,
) -> TokenStats:
    """Computes the term's values, and what its gradient needs; leaves are [B, C, ...]."""

    def body(hidden: Array, head: Array, given: FrozenInputs) -> TokenStats:
        rows = _gather(sharded, hidden, head, given)
        columns = sharded.columns(head.shape[0])

        def step(_: None, chunk: tuple[Array, FrozenInputs]) -> tuple[None, TokenStats]:
            hidden, given = chunk
            z, tokens = _logits(hidden, rows, given, columns)
            return None, sharded.term.measure(z, tokens, columns)

        _, measured = jax.lax.scan(step, None, _chunks(sharded, hidden, given))
        return _unchunk(measured, hidden.shape[:2])

    specs = sharded.token_spec(), sharded.head_spec(head), sharded.given_spec(given)
    return sharded.on_mesh(body, specs, sharded.token_spec())(hidden, head, given)


def fused(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    given: FrozenInputs,
) -> tuple[PerToken, Float[Array, "B C D"], Float[Array, "V D"]]:
    """Computes the term's values, and the gradients of the loss's masked sum with respect to hidden
    and head."""

    def body(hidden: Array, head: Array, given: FrozenInputs) -> tuple[PerToken, Array, Array]:
        rows = _gather(sharded, hidden, head, given)
        columns = sharded.columns(head.shape[0])

        def step(
            d_rows: Array, chunk: tuple[Array, FrozenInputs]
        ) -> tuple[Array, tuple[PerToken, Array]]:
            hidden, given = chunk
            z, tokens = _logits(hidden, rows, given, columns)
            values, saved = sharded.term.measure(z, tokens, columns)
            dz = _kept(sharded.term.gradient(z, tokens, saved, columns), z, given)
            dz = dz.astype(hidden.dtype)
            return d_rows + _product(dz, hidden, 0), (values, _product(dz, rows[0], 1))

        start = jnp.zeros(rows[0].shape, jnp.float32)
        d_rows, per_chunk = jax.lax.scan(step, start, _chunks(sharded, hidden, given))
        values, d_hidden = _unchunk(per_chunk, hidden.shape[:2])
        d_hidden = jax.lax.psum(d_hidden, sharded.axes("tensor"))
        d_head = reduce_head(sharded, d_rows, head.shape[1])
        return values, d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)

    in_specs = sharded.token_spec(), sharded.head_spec(head), sharded.given_spec(given)
    out_specs = sharded.token_spec(), sharded.token_spec(), sharded.head_spec(head)
    return sharded.on_mesh(body, in_specs, out_specs)(hidden, head, given)


def tiled(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    given: FrozenInputs,
    saved: PerToken,
) -> tuple[Float[Array, "B C D"], Float[Array, "V D"]]:
    """Computes the gradients of the loss's masked sum with respect to hidden and head, from what
    `measure` saved ([B, C, ...])."""

    def body(
        hidden: Array, head: Array, given: FrozenInputs, saved: PerToken
    ) -> tuple[Array, Array]:
        heads = _gather(sharded, hidden, head, given)
        columns = sharded.columns(head.shape[0])
        scale, softcaps = given.scale, given.softcaps
        flat, given, saved = _flat((hidden, _per_token(given), saved))
        given = given._replace(scale=scale, softcaps=softcaps)
        tiles = -(-flat.shape[0] // sharded.chunk)
        size = -(-columns.size // tiles)

        def step(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_head = carry
            # Without the barrier XLA on CPU makes a float32 copy of bfloat16 heads before the loop.
            here, i = jax.lax.optimization_barrier((heads, i))
            # The last tile starts early if the tiles do not divide the vocabulary; the columns that
            # it repeats get gradient 0.
            first = jnp.minimum(i * size, columns.size - size)
            rows: _Heads = jax.tree.map(
                partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size), here
            )
            tile = VocabShard(columns.start + first, size, sharded.vocab, columns.padded)
            z, tokens = _logits(flat, rows, given, tile)
            dz = _kept(sharded.term.gradient(z, tokens, saved, tile), z, given)
            dz = jnp.where((first + jnp.arange(size) >= i * size)[None, :], dz, 0)
            dz = dz.astype(flat.dtype)
            d_tile = reduce_head(sharded, _product(dz, flat, 0), head.shape[1]).astype(head.dtype)
            d_tile += jax.lax.bitcast_convert_type(
                jax.lax.dynamic_slice_in_dim(d_head, first, size), head.dtype
            )
            d_head = jax.lax.dynamic_update_slice_in_dim(d_head, _bits(d_tile), first, 0)
            return d_hidden + _product(dz, rows[0], 1), d_head

        start = jnp.zeros(flat.shape, jnp.float32), _bits(jnp.zeros_like(head))
        d_hidden, d_head = jax.lax.fori_loop(0, tiles, step, start)
        d_hidden = jax.lax.psum(d_hidden, sharded.axes("tensor")).reshape(hidden.shape)
        return d_hidden.astype(hidden.dtype), jax.lax.bitcast_convert_type(d_head, head.dtype)

    token, head_spec = sharded.token_spec(), sharded.head_spec(head)
    in_specs = token, head_spec, sharded.given_spec(given), dict.fromkeys(saved, token)
    return sharded.on_mesh(body, in_specs, (token, head_spec))(hidden, head, given, saved)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss_values(
    sharded: ShardedTerm,
    hidden: Float[Array, "B C D"],
    head: Float[Array, "V D"],
    given: FrozenInputs,
) -> tuple[Float[Array, ""], PerToken]:
    """Returns (masked sum of the loss, values per token [B, C, ...]). Only the sum is
    differentiable."""
    values = measure(sharded, hidden, head, given).values
    return jnp.where(given.mask, values["loss"], 0).sum(), values


def _loss_forward(
    sharded: ShardedTerm, hidden: Array, head: Array, given: FrozenInputs
) -> tuple[tuple[Array, PerToken], Tree]:
    kept: Tree
    if sharded.lean:
        values, saved = measure(sharded, hidden, head, given)
        kept = hidden, head, given, saved
    else:
        values, *kept = fused(sharded, hidden, head, given)
    return (jnp.where(given.mask, values["loss"], 0).sum(), values), kept


def _loss_backward(
    sharded: ShardedTerm, kept: Tree, cotangents: tuple[Array, PerToken]
) -> tuple[Array, Array, None]:
    gradients = tiled(sharded, *kept) if sharded.lean else kept
    d_hidden, d_head = ((x.astype(jnp.float32) * cotangents[0]).astype(x.dtype) for x in gradients)
    return d_hidden, d_head, None


loss_values.defvjp(_loss_forward, _loss_backward)


_Heads = tuple[Array, tuple[Array, ...], tuple[Array | None, ...] | None]
"""The student's head, each teacher's, `FrozenInputs.outcomes`: a device's rows, at full width."""


def _gather(sharded: ShardedTerm, hidden: Array, head: Array, given: FrozenInputs) -> _Heads:
    """Gathers this device's rows at full width, in the dtype of the hidden states they meet."""

    def gathered(head: Float[Array, "rows Dshard"], hidden: Array) -> Float[Array, "rows D"]:
        head = head.astype(hidden.dtype)
        if head.shape[1] == hidden.shape[-1]:
            return head
        return jax.lax.all_gather(head, sharded.axes(*WEIGHTS), axis=1, tiled=True)

    heads = tuple(map(gathered, given.teacher_head, given.teacher_hidden))
    return gathered(head, hidden), heads, given.outcomes


def _logits(
    hidden: Array, rows: _Heads, given: FrozenInputs, columns: VocabShard
) -> tuple[Array, PerToken]:
    own, theirs, outcomes = rows
    cap, *their_caps = given.softcaps or (None,) * (1 + len(theirs))
    z = columns.logits(hidden, own, given.scale, cap)
    tokens = given.tokens if outcomes is None else given.tokens | {"outcomes": outcomes}
    if not theirs:
        return z, tokens
    teacher_z = tuple(
        columns.logits(hidden, head, given.scale, cap)
        for hidden, head, cap in zip(given.teacher_hidden, theirs, their_caps, strict=True)
    )
    return z, tokens | {"teacher_z": teacher_z}


def _kept(
    dz: Float[Array, "n size"], z: Float[Array, "n size"], given: FrozenInputs
) -> Float[Array, "n size"]:
    """Converts the gradient with respect to the scaled logits `z` to the one with respect to hidden
    @ head.T; 0 where masked, even if the gradient there is NaN."""
    dz = dz * given.scale
    if given.softcaps and given.softcaps[0] is not None:
        tanh = jnp.clip(z / (given.scale * given.softcaps[0]), -1, 1)  # columns of MIN: -1
        dz = dz * (1 - tanh**2)
    return jnp.where(given.mask[:, None], dz, 0)


def _product(dz: Float[Array, "n size"], x: Float[Array, "_ D"], axis: int) -> Float[Array, "_ D"]:
    """Contracts `axis` of dz with the rows of x, in float32: 0 for the head's gradient, 1 for that
    of hidden."""
    dims = (((axis,), (0,)), ((), ()))
    return jax.lax.dot_general(dz, x, dims, preferred_element_type=jnp.float32)


def _bits(x: Array) -> Array:
    """Views bfloat16 as integers. To update a slice of a bfloat16 array, XLA on CPU would convert
    the whole array to float32."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _per_token(given: FrozenInputs) -> FrozenInputs:
    """Keeps the leaves [B, C, ...] alone."""
    return given._replace(scale=None, softcaps=(), teacher_head=(), outcomes=None)


def _flat(tree: Tree) -> Tree:
    """Reshapes [b, C, ...] to [b * C, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _chunks(sharded: ShardedTerm, hidden: Array, given: FrozenInputs) -> tuple[Array, FrozenInputs]:
    """Splits every leaf [b, C, ...] into [chunks, chunk, ...]; the end is padded with masked
    tokens."""
    tokens = hidden.shape[0] * hidden.shape[1]
    chunk = min(sharded.chunk, tokens)
    count = -(-tokens // chunk)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, count * chunk - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(count, chunk, *x.shape[1:])

    hidden, chunks = jax.tree.map(split, _flat((hidden, _per_token(given))))
    scale, softcaps = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (count,)), (given.scale, given.softcaps)
    )
    return hidden, chunks._replace(scale=scale, softcaps=softcaps)


def _unchunk(tree: Tree, rows: tuple[int, ...]) -> Tree:
    """Joins [chunks, chunk, ...] into [b, C, ...]."""
    return jax.tree.map(lambda x: x[: rows[0] * rows[1]].reshape(*rows, *x.shape[1:]), _flat(tree))
