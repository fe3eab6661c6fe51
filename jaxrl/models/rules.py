"""Where each parameter lives: path -> logical axes -> mesh axes. The only such table."""

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
from jaxrl.models.quantised import SCALE, block_size
from jaxrl.sharding.axes import EXPERTS, WEIGHTS, AxisName, divided
from jaxrl.types import Tree

PATHS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed/embedding$", ("vocab", "embed")),
    (r"lm_head/kernel$", ("vocab", "embed")),
    (r"attn/q/kernel$", ("embed", "heads")),
    (r"attn/[kv]/kernel$", ("embed", "kv_heads")),
    (r"attn/q/bias$", ("heads",)),
    (r"attn/[kv]/bias$", ("kv_heads",)),
    (r"attn/o/kernel$", ("heads", "embed")),
    (r"attn/o/bias$", (None,)),
    (r"attn/sinks$", ("heads",)),
    (r"layer_inputs/embedding$", ("vocab", "layer_inputs")),
    (r"layer_inputs/projection$", (None, "embed")),
    (r"input/gate/kernel$", ("embed", None)),
    (r"input/out/kernel$", (None, "embed")),
    (r"mlp/(gate|up)/kernel$", ("embed", "mlp")),
    (r"mlp/down/kernel$", ("mlp", "embed")),
    (r"mlp/router/kernel$", ("embed", None)),
    (r"mlp/router/bias$", (None,)),
    (r"mlp/experts/(gate|up)/kernel$", ("expert", "embed", "mlp")),
    (r"mlp/experts/down/kernel$", ("expert", "mlp", "embed")),
    (r"mlp/experts/(gate|up)/bias$", ("expert", "mlp")),
    (r"mlp/experts/down/bias$", ("expert", None)),
    (r"delta/[qkvzba]/kernel$", ("embed", "state_heads")),
    (r"delta/o/kernel$", ("state_heads", "embed")),
    (r"delta/conv/[qkv]$", ("state_heads", None, None)),
    (r"delta/(log_decay|bias)$", ("state_heads",)),
    (r"(norm/scale|(block|router|expert)_scale)$", (None,)),
)
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
    """A `PartitionSpec` for each parameter.

    A dim that its mesh axes do not divide is kept whole, nor is a block of a quantised kernel
    divided; heads are split between heads only, so
    keys and values are replicated where `tensor` exceeds (or does not divide) the KV heads.

    Args:
        axis_sizes: mesh axis -> size, e.g. `mesh.shape`.
    """

    def spec(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        name = "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
        layer = re.match(r"layers/(\d+)/", name)
        one = config.of(config.kinds[int(layer[1]) % len(config.kinds) if layer else 0])
        units = {
            "vocab": one.vocab_size,
            "heads": one.n_heads,
            "kv_heads": one.n_kv_heads,
            "state_heads": 1 if one.delta is None else one.delta.k_heads,
            "mlp": one.d_ff if "/experts/" in name else one.mlp_width,
            "expert": 1 if one.experts is None else one.experts.count,
            "embed": one.d_model,
            "layer_inputs": config.n_layers * config.layer_inputs,
        }
        logical = _logical(name)
        sizes = [units[axis] if axis else 1 for axis in logical]
        path_in_block = re.sub(r"^layers/(\d+/)?|/kernel(_scale)?$", "", name)
        quantisable = one.quantisable
        if config.quantised and name.endswith(("kernel", SCALE)) and path_in_block in quantisable:
            n_in, _ = quantisable[path_in_block]
            sizes[-2] = math.gcd(sizes[-2], n_in // block_size(n_in))
        mesh_axes = [
            divided(size, AXES[axis], axis_sizes) if axis else None
            for size, axis in zip(sizes, logical, strict=True)
        ]
        return PartitionSpec(*[None] * (len(leaf.shape) - len(logical)), *mesh_axes)

    return jax.tree_util.tree_map_with_path(spec, abstract_params(config, layout=layout))


def _logical(path: str) -> tuple[str | None, ...]:
    """Logical axes of a parameter; of an adapter, those of its kernel where it has its size; of a
    kernel's scales, its own."""
    kernel = re.sub(r"/(lora_[ab]|kernel_scale)$", "/kernel", path)
    axes = next(axes for pattern, axes in PATHS if re.search(pattern, kernel))
    if not path.endswith(NAMES):
        return axes
    *experts, n_in, n_out = axes
    return (*experts, n_in, None) if path.endswith("a") else (*experts, None, n_out)


def param_shardings(config: DecoderConfig, mesh: Mesh, layout: Layout = "stacked") -> Params:
    """`param_specs` on `mesh`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        param_specs(config, mesh.shape, layout),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def head_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Of an LM head [V, D] by itself: its rows and its width over the axes of `AXES`, where these
    divide them."""
    vocab, width = (
        divided(size, AXES[axis], mesh.shape)
        for size, axis in zip(shape, ("vocab", "embed"), strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(vocab, width))
