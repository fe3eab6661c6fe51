"""One block of a decoder, put together from its parts: which parameters it has, and what it does to
the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl.models.delta import delta_parameters, gated_delta
from jaxrl.models.experts import Routed, expert_parameters, mixture
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import Norms
from jaxrl.models.json_fields import DecoderLike
from jaxrl.models.layer_kind import LayerKind
from jaxrl.models.layers import (
    ACTIVATIONS,
    Arrays,
    Parameter,
    Parameters,
    Rope,
    attention,
    attention_parameters,
    by_rows,
    gated_mlp,
    kernel,
    linear,
    mlp_parameters,
    norm_scale,
    rms_norm,
)
from jaxrl.sharding.axes import AxisName
from jaxrl.types import Array

NORMS: dict[Norms, dict[str, str]] = {
    "before": {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attn_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "around": {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
"""Path of each norm of a block -> its tensor."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Their tensors."""


def block_parameters(c: DecoderLike) -> Parameters:
    """Returns the parameters of the layer of a model with one (`DecoderConfig.of`)."""
    norms = NORMS[c.block.norms]
    if c.layer_inputs:
        norms = norms | {"input_norm": "post_per_layer_input_norm"}
    found = {
        f"{name}/scale": norm_scale(c, c.d_model, f"{tensor}.weight")
        for name, tensor in norms.items()
    }
    found |= (delta_parameters if c.kinds[0].recurs else attention_parameters)(c)
    found |= mlp_parameters(c, c.d_ff) if c.experts is None else expert_parameters(c)
    if c.layer_inputs:
        d, p = c.d_model, c.layer_inputs
        into, out_of = ("embed", None), (None, "embed")
        found["input/gate/kernel"] = kernel(d, p, into, "per_layer_input_gate.weight")
        found["input/out/kernel"] = kernel(p, d, out_of, "per_layer_projection.weight")
    if c.block.scalar:
        found["block_scale"] = Parameter((1,), (None,), "layer_scalar")
    named = FAMILIES[c.family].tensors
    return {path: replace(p, tensor=named.get(path, p.tensor)) for path, p in found.items()}


def top_parameters(c: DecoderLike) -> Parameters:
    """Returns the parameters of a model that are of no layer, with the whole names of their
    tensors."""
    shape, axes = (c.vocab_size, c.d_model), ("vocab", "embed")

    def small(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape)

    def of_rows(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-1] ** 0.5

    found = {"embed/embedding": Parameter(shape, axes, EMBEDDING, small)}
    if c.layer_inputs:
        width, name = c.n_layers * c.layer_inputs, "model.embed_tokens_per_layer.weight"
        both = ("vocab", "layer_inputs")
        found["layer_inputs/embedding"] = Parameter((c.vocab_size, width), both, name, small)
        name = "model.per_layer_model_projection.weight"
        projection = Parameter((width, c.d_model), (None, "embed"), name, of_rows)
        found["layer_inputs/projection"] = projection
        name = "model.per_layer_projection_norm.weight"
        found["layer_inputs/norm/scale"] = norm_scale(c, c.layer_inputs, name)
    found["norm/scale"] = norm_scale(c, c.d_model, "model.norm.weight")
    if not c.tie_embeddings:
        found["lm_head/kernel"] = Parameter(shape, axes, HEAD, small)
    return found


def run_block(
    config: DecoderLike,
    kind: LayerKind,
    p: Arrays,
    x: jax.Array,
    rope: Rope,
    attend: Any,
    mesh: Mesh | None,
    *split: AxisName,
    own: Array = None,
    **routing: Any,
) -> tuple[jax.Array, Routed | None]:
    """Runs one block on the residual stream [B, T, D]: x + f(norm(x)) for attention, then for the
    MLP; or x + norm(f(x)), or x + norm(f(norm(x))), as `BlockKind.norms` says.

    Args:
        p: of this layer.
        attend: an `Attend`, or of a layer with a state a `Recur`.
        split: the axis of a stream's tokens.
        own: [B, T, P], where a layer reads more than the residual.
        routing: where there are experts, as of `experts.mix`.

    Returns:
        The stream, and what the router did, if there is one.
    """
    c, routed = config.of(kind.shape), None

    def mixed(x: jax.Array) -> jax.Array:
        if kind.recurs:
            return gated_delta(c, p["delta"], x, attend)
        return attention(c, p["attn"], x, rope, attend)

    def through_mlp(x: jax.Array, residual: jax.Array) -> jax.Array:
        nonlocal routed
        if c.experts is None:
            return gated_mlp(c, p["mlp"], x)
        out, routed = mixture(c, p["mlp"], x, residual, mesh, split=split, **routing)
        return out

    if c.block.norms == "after":
        x = x + rms_norm(c, p["attn_norm"], mixed(x))
        x = x + rms_norm(c, p["mlp_norm"], through_mlp(x, x))
    else:
        out = mixed(rms_norm(c, p["attn_norm"], x))
        x = x + (rms_norm(c, p["attn_post_norm"], out) if "attn_post_norm" in p else out)
        out = through_mlp(rms_norm(c, p["mlp_norm"], x), x)
        x = x + (rms_norm(c, p["mlp_post_norm"], out) if "mlp_post_norm" in p else out)
    if c.layer_inputs:
        gate = ACTIVATIONS[c.block.activation](linear(c, p["input"]["gate"], x))
        x = x + rms_norm(c, p["input_norm"], linear(c, p["input"]["out"], gate * own))
    if "block_scale" in p:
        scale = jax.lax.stop_gradient(p["block_scale"])
        x = x * scale.astype(x.dtype).reshape((1,) * x.ndim)
    return by_rows(x, mesh, *split), routed
