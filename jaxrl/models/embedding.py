"""What a decoder's first block reads: rows of the embedding, and what the blocks read beside
them."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl.models.config import DecoderConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.layers import by_rows, rms_norm
from jaxrl.models.parameters import Params, at_blocks
from jaxrl.sharding.axes import AxisName
from jaxrl.types import Array


def embed(
    config: DecoderConfig,
    params: Params,
    tokens: Array,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    *split: AxisName,
) -> tuple[Array, list[Array]]:
    """Looks up rows of the embedding in `dtype`, its own where None, scaled where the family does
    so; its D is gathered first: a lookup split both ways is replicated. Also returns what each
    block reads beside them (`at_blocks`).

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
        given, width = params["layer_inputs"], config.layer_inputs
        rows = by_rows(_look_up(given["embedding"], tokens, dtype, sharding), mesh, *split)
        by_layer = (*x.shape[:2], config.n_layers, width)
        read = jnp.einsum("btd,ed->bte", x, given["projection"].astype(x.dtype))
        read = read * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        rows = rows * jnp.asarray(math.sqrt(width), x.dtype)
        both = rms_norm(config, given["norm"], read.reshape(by_layer)) + rows.reshape(by_layer)
        inputs = jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)
    return x, at_blocks(config, params, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table: Array, tokens: Array, dtype: np.dtype, sharding: NamedSharding | None) -> Array:
    """Computes table[tokens] in `dtype`, cast before the table is gathered. Whatever the dtype, the
    gradient is summed in float32: in bfloat16 the sum of a frequent token stops at 256 times a
    term."""
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
