"""What a decoder's first block reads: rows of the embedding, and what the blocks read beside
them."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.layers import LayerInputs
from jaxrl.models.parameters import Params, at_blocks, graph_of
from jaxrl.sharding.axes import ROWS, AxisName
from jaxrl.types import Array


def embed(
    config: DecoderConfig,
    params: Params,
    tokens: Array,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    *split: AxisName,
) -> tuple[Array, list[Array]]:
    """Rows of the embedding in `dtype`, its own where None, and scaled where the family does; its
    D is gathered first: a lookup split both ways is replicated. And what each block reads beside
    them (`at_blocks`).

    Args:
        split: the axis of a stream's tokens.
    """
    table: Array = params["embed"]["embedding"]
    sharding: NamedSharding | None = None
    if mesh is not None:
        vocab = "tensor" if config.vocab_size % mesh.shape["tensor"] == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(vocab, None))
    dtype = table.dtype if dtype is None else jnp.dtype(dtype)
    x = by_rows(_look_up(table, tokens, dtype, sharding), mesh, *split)
    if FAMILIES[config.family].scaled_embedding:
        x = x * jnp.asarray(math.sqrt(config.d_model), x.dtype)
    inputs = None
    if config.layer_inputs:
        given = params["layer_inputs"]
        rows = by_rows(_look_up(given["embedding"], tokens, dtype, sharding), mesh, *split)
        inputs = nnx.merge(graph_of(LayerInputs, config), given)(rows, x)
    return x, at_blocks(config, params, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table: Array, tokens: Array, dtype: np.dtype, sharding: NamedSharding | None) -> Array:
    """table[tokens] in `dtype`, cast before the table is gathered. Whatever the dtype, the gradient
    is summed in float32: in bfloat16 the sum of a frequent token stops at 256 times a term.
    """
    return _laid_out(table.astype(dtype), sharding)[tokens]


def _look_up_forward(
    table: Array, tokens: Array, dtype: np.dtype, sharding: NamedSharding | None
) -> tuple[Array, tuple[Array, Array]]:
    return _look_up(table, tokens, dtype, sharding), (table, tokens)  # of the table: its shape


def _look_up_backward(
    dtype: np.dtype, sharding: NamedSharding | None, kept: tuple[Array, Array], d_rows: Array
) -> tuple[Array, None]:
    table, tokens = kept
    # The sum is as large as the table in float32: XLA may not write its zeros before the loss,
    # while what the layers keep is there.
    zero, d_rows = jax.lax.optimization_barrier((jnp.float32(0), d_rows.astype(jnp.float32)))
    zeros = jnp.broadcast_to(zero, table.shape)
    summed = _laid_out(zeros.at[tokens].add(d_rows), sharding)
    return summed.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _laid_out(x: Array, sharding: NamedSharding | None) -> Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def by_rows(x: Array, mesh: Mesh | None, *tokens: AxisName) -> Array:
    """Keeps the rows of x sharded over (data, fsdp), of a stream its tokens over an axis too: left
    alone, XLA picks odd layouts."""
    if mesh is None:
        return x
    spec = PartitionSpec(ROWS, *tokens, *([None] * (x.ndim - 1 - len(tokens))))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
