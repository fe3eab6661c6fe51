"""Where each parameter lives: the logical axes of its dims -> mesh axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import NAMES
from jaxrl.models.parameters import Layout, Params, abstract_params
from jaxrl.models.quantised import block_size
from jaxrl.sharding.axes import EXPERTS, WEIGHTS, AxisName, divided
from jaxrl.types import Tree

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


def param_specs(
    config: DecoderConfig, axis_sizes: Mapping[str, int], layout: Layout = "stacked"
) -> Tree:
    """Returns a `PartitionSpec` for each parameter.

    A dim that its mesh axes do not divide is kept whole, nor is a block of a quantised kernel
    divided; heads are split between heads only, so
    keys and values are replicated where `tensor` exceeds (or does not divide) the KV heads.

    Args:
        axis_sizes: mesh axis -> size, e.g. `mesh.shape`.
    """

    def spec(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layer = re.match(r"layers/(?:(\d+)/)?", name)
        kind = config.kinds[int(layer[1] or 0) % len(config.kinds)] if layer else config.kinds[0]
        one, within = config.of(kind), name[layer.end() :] if layer else name
        projection = re.sub(r"/(lora_[ab]|kernel(_scale)?)$", "", within)
        of = within if projection == within else f"{projection}/kernel"
        parameter = (one.parameters if layer else config.top)[of]
        axes, units = list(parameter.axes), list(parameter.shape)
        heads = {"heads": one.n_heads, "kv_heads": one.n_kv_heads}
        heads |= {} if one.delta is None else {"state_heads": one.delta.k_heads}
        units = [heads.get(axis or "", size) for axis, size in zip(axes, units, strict=True)]
        if within.endswith(NAMES):
            axes[-1 if within.endswith("a") else -2] = None
        elif config.quantised is not None and projection in one.quantisable:
            n_in = parameter.shape[-2]
            units[-2] = math.gcd(units[-2], n_in // block_size(n_in))
        mesh_axes = [
            divided(size, AXES[axis], axis_sizes) if axis else None
            for size, axis in zip(units, axes, strict=True)
        ]
        return PartitionSpec(*[None] * (len(leaf.shape) - len(axes)), *mesh_axes)

    return jax.tree_util.tree_map_with_path(spec, abstract_params(config, layout=layout))


def param_shardings(config: DecoderConfig, mesh: Mesh, layout: Layout = "stacked") -> Params:
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
        divided(size, AXES[axis], mesh.shape)
        for size, axis in zip(shape, ("vocab", "embed"), strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(vocab, width))
