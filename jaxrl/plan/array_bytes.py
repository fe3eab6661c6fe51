"""Computes the bytes of arrays on one device: weights, optimizer state and KV cache. All are exact,
from each leaf's shard (`models/parameters.py`); the optimizer's scratch is not."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.config.section import DType
from jaxrl.config.settings import OptimizerConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import NAMES, frozen_and_trained
from jaxrl.models.parameters import abstract_params, param_shardings
from jaxrl.roles.optimizer import make_optimizer, state_shardings
from jaxrl.sharding.axes import AXIS_NAMES, Axes

F32 = 4
MUON_ARRAYS = 8
"""Arrays of the size of one layer's kernel that are alive while it is orthogonalised, at most."""
ITEMSIZE: dict[DType, int] = {"float32": 4, "bfloat16": 2}


def split(size: int, parts: int) -> int:
    """Returns a dim's size on one device: what does not divide stays whole."""
    return size // parts if size % parts == 0 else size


class Shard(NamedTuple):
    """One parameter and the piece of it that a device holds."""

    path: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    """Shape of the piece."""
    itemsize: int | None = None
    """Of a quantised kernel and its scales; None: as the dtype of the weights has it."""

    @property
    def size(self) -> int:
        return math.prod(self.local)

    def bytes(self, dtype: DType) -> int:
        return self.size * (self.itemsize or ITEMSIZE[dtype])


@lru_cache(maxsize=256)
def shards(
    config: DecoderConfig, axes: Axes, layout: Literal["stacked", "unstacked"] = "stacked"
) -> tuple[Shard, ...]:
    """Returns every parameter's piece on one device of a mesh with these axes."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout=layout))
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    shardings = jax.tree.leaves(param_shardings(config, mesh, layout))  # type: ignore[arg-type]
    return tuple(
        Shard(
            jax.tree_util.keystr(path, simple=True, separator="/"),
            leaf.shape,
            sharding.shard_shape(leaf.shape),
            None if leaf.dtype == jnp.float32 else leaf.dtype.itemsize,
        )
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
    )


@lru_cache(maxsize=256)
def weight_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Returns the bytes of the model's parameters on one device."""
    return sum(shard.bytes(dtype) for shard in shards(config, axes))


@lru_cache(maxsize=256)
def trained_shards(config: DecoderConfig, axes: Axes) -> tuple[Shard, ...]:
    """Returns those of `shards` that the actor trains: the adapters, where the model has any."""
    every = shards(config, axes)
    adapters = tuple(shard for shard in every if shard.path.endswith(NAMES))
    return adapters or every


def trained_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Returns the bytes of the parameters that the actor trains on one device."""
    return ITEMSIZE[dtype] * sum(shard.size for shard in trained_shards(config, axes))


@lru_cache(maxsize=256)
def layer_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Returns `weight_bytes` without embedding, final norm and head."""
    return sum(s.bytes(dtype) for s in shards(config, axes) if s.path.startswith("layers"))


def cache_bytes(config: DecoderConfig, axes: Axes, rows: int, positions: int, dtype: DType) -> int:
    """Returns the bytes of keys and values of `rows` sequences on one device, all layers, and of
    states."""
    item = ITEMSIZE[dtype]
    state = 0 if config.delta is None else config.delta.state_bytes(item, axes.tensor)
    token = item * sum(
        2 * n * split(one.n_kv_heads, axes.tensor) * one.head_dim
        for one, n in config.shapes.items()
        if one.kinds[0].keeps
    )
    return rows * (positions * token + config.n_recurrent * state)


@lru_cache(maxsize=64)
def optimizer_bytes(
    model: DecoderConfig,
    axes: Axes,
    optimizer: OptimizerConfig,
    param_dtype: str,
    moment_dtype: str,
) -> int:
    """Returns the bytes of the optimizer's state on one device of the actor; exact."""
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    _, params = frozen_and_trained(abstract_params(model, jnp.dtype(param_dtype)))
    maker = make_optimizer(optimizer, 1, jnp.dtype(moment_dtype))
    _, placed = frozen_and_trained(param_shardings(model, mesh))  # type: ignore[arg-type]
    shardings = state_shardings(maker, params, placed, mesh)  # type: ignore[arg-type]
    leaves = jax.tree.leaves(jax.eval_shape(maker.init, params))
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    )


@lru_cache(maxsize=64)
def optimizer_scratch(model: DecoderConfig, axes: Axes, optimizer: OptimizerConfig) -> int:
    """Returns the bytes that an optimizer step writes out beside the gradient and its state, on one
    device: the clipped gradient or the update in float32 (adafactor: both), and of muon one layer's
    largest kernel while it is orthogonalised: gathered, with the products of a step of Newton and
    Schulz (Jordan et al. 2024).
    """
    whole = trained_bytes(model, axes, "float32")
    if optimizer.name != "muon":
        return whole * (2 if optimizer.name == "adafactor" else 1)
    kernels = (
        shard.size // shard.local[0]
        for shard in trained_shards(model, axes.gathered)
        if shard.path.endswith(("kernel", *NAMES)) and len(shard.shape) >= 3
    )
    return whole + MUON_ARRAYS * max(kernels) * F32
