"""The parameters of a decoder: a nested dict of arrays, in one of two layouts of
`params["layers"]`.

- stacked: one block whose leaves have a leading [L] dim, run under `lax.scan` (training: one block
  is compiled; sampling with the very arrays that are trained); where layers have parameters of
  other names or shapes than others, a tuple of as many blocks as there are until that repeats
  (`config.cycle`), each with the leading dim of its own layers;
- unstacked: a list of L blocks, run one after the other (sampling: nothing is copied at a token).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxrl.models.config import DecoderConfig
from jaxrl.models.kinds import LayerKind
from jaxrl.models.layers import Block, LayerInputs, RMSNorm
from jaxrl.models.quantised import SCALE
from jaxrl.types import Array

M = TypeVar("M")
Params = dict[str, Any]
Layout = Literal["stacked", "unstacked"]


def init_params(
    config: DecoderConfig, key: Array, dtype: DTypeLike = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """Random parameters: kernels normal / sqrt(fan-in), embeddings normal * 0.02, norms one."""
    return _init_params(config, key, jnp.dtype(dtype), layout)


@partial(jax.jit, static_argnums=(0, 2, 3))  # one program, not one for each operation
def _init_params(config: DecoderConfig, key: jax.Array, dtype: jnp.dtype, layout: Layout) -> Params:
    k_embed, k_layers, k_head = jax.random.split(key, 3)

    def block(k: jax.Array, kind: LayerKind) -> Params:
        return _plain(nnx.split(Block(config.of(kind), nnx.Rngs(params=k)))[1])

    shape, keys = (config.vocab_size, config.d_model), jax.random.split(k_layers, config.n_layers)
    cycle = config.cycle
    blocks = tuple(
        jax.vmap(partial(block, kind=kind.shape))(keys[i::cycle])
        for i, kind in enumerate(config.kinds[:cycle])
    )
    params: Params = {
        "embed": {"embedding": 0.02 * jax.random.normal(k_embed, shape)},
        "layers": blocks[0] if cycle == 1 else blocks,
        "norm": _plain(nnx.split(RMSNorm(config.d_model, config))[1]),
    }
    if config.layer_inputs:
        inputs = LayerInputs(config, nnx.Rngs(params=jax.random.fold_in(k_embed, 1)))
        params["layer_inputs"] = _plain(nnx.split(inputs)[1])
    if not config.tie_embeddings:
        params["lm_head"] = {"kernel": 0.02 * jax.random.normal(k_head, shape)}
    params = cast(params, dtype)
    return params if layout == "stacked" else unstack(params)


@lru_cache
def graph_of(
    make: Callable[[DecoderConfig, nnx.Rngs], M], config: DecoderConfig
) -> nnx.GraphDef[M]:
    """What `nnx.merge` makes a module of, with its parameters."""
    return nnx.split(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))))[0]


def _plain(state: nnx.State) -> Params:
    return nnx.to_pure_dict(state)


def abstract_params(
    config: DecoderConfig, dtype: DTypeLike = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """The tree of `jax.ShapeDtypeStruct` that `init_params` would fill.

    Starts no backend: it is asked for before the mesh says how many devices to emulate.
    """
    return jax.tree.map(
        lambda x: x, _abstract(config, jnp.dtype(dtype), layout)
    )  # the caller's own


@lru_cache
def _abstract(config: DecoderConfig, dtype: jnp.dtype, layout: Layout) -> Params:
    """Traced once: a run asks for the same tree about twenty times."""
    return jax.eval_shape(
        lambda: init_params(config, jax.random.key(0), dtype=dtype, layout=layout)
    )


def layout_of(params: Params) -> Layout:
    return "unstacked" if isinstance(params["layers"], list) else "stacked"


def unstack(params: Params) -> Params:
    """Stacked to unstacked layout; entries other than the layers may be missing."""
    blocks = blocks_of(params)
    n = jax.tree.leaves(blocks)[0].shape[0]
    of = [jax.tree.map(lambda x, i=i: x[i], block) for i in range(n) for block in blocks]
    return params | {"layers": of}


def stack(params: Params, cycle: int = 1) -> Params:
    """Unstacked to stacked layout.

    Args:
        cycle: as of the config.
    """
    layers = params["layers"]
    blocks = tuple(jax.tree.map(lambda *xs: jnp.stack(xs), *layers[i::cycle]) for i in range(cycle))
    return params | {"layers": blocks[0] if cycle == 1 else blocks}


def blocks_of(params: Params) -> tuple[Params, ...]:
    """The blocks of stacked parameters."""
    layers = params["layers"]
    return layers if isinstance(layers, tuple) else (layers,)


def at_blocks(config: DecoderConfig, params: Params, each: Array) -> list[Array]:
    """Of an array [L, ...] the part of each block of `params`: of stacked ones [L / cycle, ...], of
    the others [...]. Of None, None."""
    if layout_of(params) == "unstacked":
        return [None] * config.n_layers if each is None else list(each)
    return [None if each is None else each[i :: config.cycle] for i in range(config.cycle)]


def head(params: Params) -> Float[Array, "V D"]:
    """The LM head [V, D], the embedding when tied; logits are `hidden @ head.T`, but for the
    config's `final_softcap`."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Parameters in `dtype`, but for quantised kernels. Done before the layers are gathered: fsdp
    moves the smaller copy."""

    def one(path: KeyPath, x: Array) -> Array:
        quantised = jnp.issubdtype(x.dtype, jnp.integer) or getattr(path[-1], "key", "") == SCALE
        return x if quantised else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)
