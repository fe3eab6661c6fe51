"""The parameters of a decoder: a nested dict of arrays, in one of two layouts of
`params["layers"]`.

- stacked: one block whose leaves have a leading [L] dim, run under `lax.scan` (training: one block
  is compiled; sampling with the very arrays that are trained); where layers have parameters of
  other names or shapes than others, a tuple of as many blocks as there are until that repeats
  (`config.cycle`), each with the leading dim of its own layers;
- unstacked: a list of L blocks, run one after the other (sampling: nothing is copied at a token).

Where each of them lives follows from the logical axes of its dims (`AXES`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxrl.models.config import DecoderConfig
from jaxrl.models.layers import Parameter
from jaxrl.models.lora import NAMES, SCALE, quantisation_block, quantise
from jaxrl.sharding.axes import EXPERTS, WEIGHTS, AxisName, dim_spec
from jaxrl.types import Array, Tree

Params = dict[str, Any]
Layout = Literal["stacked", "unstacked"]
AXES: dict[str, tuple[AxisName, ...]] = {
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "state_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": (EXPERTS,),
    "embed": WEIGHTS,
    "layer_inputs": WEIGHTS,
}
"""Logical axis of a dim -> the axes of the mesh that divide it."""


def init_params(
    config: DecoderConfig, key: Array, dtype: DTypeLike = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """Initialises random parameters: kernels normal / sqrt(fan-in), embeddings normal * 0.02, norms
    one."""
    return _init_params(config, key, jnp.dtype(dtype), layout)


@partial(jax.jit, static_argnums=(0, 2, 3))  # one program, not one for each operation
def _init_params(config: DecoderConfig, key: jax.Array, dtype: jnp.dtype, layout: Layout) -> Params:
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    keys, cycle = jax.random.split(k_layers, config.n_layers), config.cycle
    ones = (config.layer_of(kind.shape) for kind in config.kinds[:cycle])
    blocks = tuple(jax.vmap(partial(_init_layer, c))(keys[i::cycle]) for i, c in enumerate(ones))
    k_inputs = jax.random.fold_in(k_embed, 1)
    key_of = {
        "embed/embedding": k_embed,
        "lm_head/kernel": k_head,
        "layer_inputs/embedding": jax.random.fold_in(k_inputs, 0),
        "layer_inputs/projection": jax.random.fold_in(k_inputs, 1),
    }
    top = {
        path: _initial_value(p, partial(key_of.__getitem__, path)) for path, p in config.top.items()
    }
    params = unflatten_dict(top, sep="/") | {"layers": blocks[0] if cycle == 1 else blocks}
    params = cast(params, dtype)
    return params if layout == "stacked" else unstack(params)


def _init_layer(config: DecoderConfig, key: jax.Array) -> Params:
    """Makes the layer of a model with one, with its adapters and quantised kernels."""
    keys = (jax.random.fold_in(key, i) for i in count())
    flat: dict[str, jax.Array] = {}
    for path, parameter in config.parameters.items():
        flat[path] = _initial_value(parameter, lambda: next(keys))
        projection = path.removesuffix("/kernel")
        if projection not in config.quantisable:
            continue
        *experts, n_in, n_out = parameter.shape
        if config.quantised is not None:
            both = quantise(config.quantised, flat[path], quantisation_block(n_in))
            flat[path], flat[f"{projection}/{SCALE}"] = both
        lora = config.adapter(projection)
        if lora is not None and config.has_a(projection):
            flat[f"{projection}/lora_a"] = lora.first(next(keys), n_in, *experts)
        if lora is not None:
            flat[f"{projection}/lora_b"] = jnp.zeros((*experts, lora.rank, n_out))
    return unflatten_dict(flat, sep="/")


def _initial_value(parameter: Parameter, key: Callable[[], jax.Array]) -> jax.Array:
    if callable(parameter.first):
        return parameter.first(key(), parameter.shape)
    return jnp.full(parameter.shape, parameter.first)


def abstract_params(
    config: DecoderConfig, dtype: DTypeLike = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """Returns the tree of `jax.ShapeDtypeStruct` that `init_params` would fill.

    Starts no backend: it is asked for before the mesh says how many devices to emulate.
    """
    return jax.tree.map(
        lambda x: x, _trace_params(config, jnp.dtype(dtype), layout)
    )  # the caller's own


@lru_cache
def _trace_params(config: DecoderConfig, dtype: jnp.dtype, layout: Layout) -> Params:
    """Traces `init_params`, once: a run asks for the same tree about twenty times."""
    return jax.eval_shape(
        lambda: init_params(config, jax.random.key(0), dtype=dtype, layout=layout)
    )


def unstack(params: Params) -> Params:
    """Converts the stacked to the unstacked layout; entries other than the layers may be
    missing."""
    blocks = blocks_of(params)
    n = jax.tree.leaves(blocks)[0].shape[0]
    of = [jax.tree.map(lambda x, i=i: x[i], block) for i in range(n) for block in blocks]
    return params | {"layers": of}


def blocks_of(params: Params) -> tuple[Params, ...]:
    """Returns the blocks of stacked parameters."""
    layers = params["layers"]
    return layers if isinstance(layers, tuple) else (layers,)


def split_by_block(config: DecoderConfig, params: Params, by_layer: Array) -> list[Array]:
    """Splits an array [L, ...] into the part of each block of `params`: [L / cycle, ...] for
    stacked ones, [...] for the others. None gives None for each."""
    if isinstance(params["layers"], list):
        return [None] * config.n_layers if by_layer is None else list(by_layer)
    return [None if by_layer is None else by_layer[i :: config.cycle] for i in range(config.cycle)]


def head(params: Params) -> Float[Array, "V D"]:
    """Returns the LM head [V, D], the embedding when tied; logits are `hidden @ head.T`, but for
    the config's `final_softcap`."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Casts parameters to `dtype`, but for quantised kernels. Done before the layers are gathered:
    fsdp moves the smaller copy."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    converted = []
    for path, x in leaves:
        quantised = jnp.issubdtype(x.dtype, jnp.integer) or getattr(path[-1], "key", "") == SCALE
        converted.append(x if quantised else x.astype(dtype))
    return jax.tree.unflatten(tree, converted)


def param_specs(
    config: DecoderConfig, axis_sizes: Mapping[str, int], layout: Layout = "stacked"
) -> Tree:
    """Returns a `PartitionSpec` for each parameter.

    A dim that its mesh axes do not divide is kept whole, nor is a block of a quantised kernel
    divided; heads are split between heads only, so keys and values are replicated where `tensor`
    exceeds (or does not divide) the KV heads.

    Args:
        axis_sizes: mesh axis -> size, e.g. `mesh.shape`.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, layout=layout))
    specs = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layer = re.match(r"layers/(?:(\d+)/)?", name)
        kind = config.kinds[int(layer[1] or 0) % len(config.kinds)] if layer else config.kinds[0]
        layer_config, within = config.layer_of(kind), name[layer.end() :] if layer else name
        projection = re.sub(r"/(lora_[ab]|kernel(_scale)?)$", "", within)
        of = within if projection == within else f"{projection}/kernel"
        parameter = (layer_config.parameters if layer else config.top)[of]
        axes, units = list(parameter.axes), list(parameter.shape)
        heads = {"heads": layer_config.n_heads, "kv_heads": layer_config.n_kv_heads}
        heads |= {} if layer_config.delta is None else {"state_heads": layer_config.delta.k_heads}
        units = [heads.get(axis or "", size) for axis, size in zip(axes, units, strict=True)]
        if within.endswith(NAMES):
            axes[-1 if within.endswith("a") else -2] = None
        elif config.quantised is not None and projection in layer_config.quantisable:
            n_in = parameter.shape[-2]
            units[-2] = math.gcd(units[-2], n_in // quantisation_block(n_in))
        mesh_axes = [
            dim_spec(size, AXES[axis], axis_sizes) if axis else None
            for size, axis in zip(units, axes, strict=True)
        ]
        specs.append(PartitionSpec(*[None] * (len(leaf.shape) - len(axes)), *mesh_axes))
    return jax.tree.unflatten(tree, specs)


def param_shardings(
    config: DecoderConfig, mesh: Mesh | AbstractMesh, layout: Layout = "stacked"
) -> Params:
    """Returns `param_specs` on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        param_specs(config, mesh.shape, layout),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def head_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an LM head [V, D] by itself: its rows and its width over the axes of
    `AXES`, where these divide them."""
    vocab, width = (
        dim_spec(size, AXES[axis], mesh.shape)
        for size, axis in zip(shape, ("vocab", "embed"), strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(vocab, width))
