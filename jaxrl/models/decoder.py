"""Llama-like decoders as functions of a parameter pytree: hidden states of whole sequences, and the
logits of hidden states. `cached` has the functions that leave or read keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jaxrl.models.attention import Attend, attend_packed, attender, roll_rows
from jaxrl.models.block import run_block
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Filters, Inputs, Recur, recur_packed, recur_rows
from jaxrl.models.experts import Routed
from jaxrl.models.layer_kind import Layer
from jaxrl.models.layers import PROJECTED, Rope, rms_norm
from jaxrl.models.packing import Packing
from jaxrl.models.parameters import Params, at_blocks, cast, head
from jaxrl.models.stack import (
    delta_of,
    embed,
    kernels_of,
    lending,
    mixing,
    report,
    through,
)
from jaxrl.sharding.axes import TOKENS, AxisName
from jaxrl.types import Array, Tree

Remat = Literal["none", "dots", "full"]
Lent = tuple[tuple[Array, Array], ...]
"""Keys and values [B, T, KV, H], of each of `DecoderConfig.lenders` those of the last layer."""

REMAT_POLICIES: dict[Remat, Callable[..., bool] | None] = {
    # By name: the two products of an adapter would be kept beside that of the kernel.
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED),
    "full": None,
}


def logits(
    config: DecoderConfig, params: Params, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Computes float32 logits of hidden states."""
    kernel, cap = head(params).astype(hidden.dtype), config.final_softcap
    z = jnp.einsum("...d,vd->...v", hidden, kernel, preferred_element_type=jnp.float32)
    return z if cap is None else cap * jnp.tanh(z / cap)


def forward(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
) -> Float[Array, "B T D"]:
    """Computes the hidden states after the final norm, for tokens with padding on either side.

    Args:
        mask: True at real tokens; positions count them, padding is never attended to.
        remat: what the backward pass recomputes of each block: nothing, all but the matmuls, all.
        mesh: where given, the residual stream is kept sharded by rows over (data, fsdp).
        dtype: compute dtype; the parameters' own where None. To be given in place of parameters
            that are cast beforehand: the embedding's gradient then is a sum in float32.

    Returns:
        In the compute dtype; meaningless where mask is False.
    """
    kernels, first = kernels_of(config, params, mesh, dtype), jnp.argmax(mask, -1)
    # for rows that begin at their start
    rolled = "cudnn" in kernels.values() or config.n_recurrent > 0
    if rolled:
        tokens, mask = roll_rows(tokens, first), roll_rows(mask, first)
    x, inputs = embed(config, params, tokens, mesh, dtype)
    params = params if dtype is None else cast(params, dtype)
    positions = jnp.maximum(jnp.cumsum(mask, -1) - 1, 0)
    mix = mixing(
        config,
        positions,
        kernels,
        lambda kernel, window: attender(kernel, mask, mesh, window=window),
    )

    def recur(inputs: Inputs, filters: Filters) -> Array:
        return recur_rows(delta_of(config), mesh, mask, inputs, filters)[0]

    x = _layers(config, params, x, inputs, mix, recur, remat, mesh)
    return roll_rows(x, -first) if rolled else x


def forward_packed(
    config: DecoderConfig,
    params: Params,
    packing: Packing,
    *,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    routed: list[Routed] | None = None,
) -> Float[Array, "X n D"]:
    """Runs `forward` on streams of tokens: the same hidden states, without the padding. A mixture
    takes the experts that `packing` records, if it does.

    Args:
        routed: gets what the routers of all layers did, each leaf [L, X, n, ...], and
            `Routed.mass` [L, E].
    """
    kernels = kernels_of(config, params, mesh, dtype, joined=packing.group > 1)
    x, inputs = embed(config, params, packing.tokens, mesh, dtype, TOKENS)
    params = params if dtype is None else cast(params, dtype)
    mix = mixing(
        config,
        packing.positions,
        kernels,
        lambda kernel, window: attend_packed(kernel, packing, mesh, window),
    )
    recur = recur_packed(config.delta, mesh, packing) if config.delta is not None else None
    given = config, params, x, inputs, mix, recur, remat, mesh
    copies = None if routed is None else packing.copies
    return _layers(*given, TOKENS, recorded=packing.experts, routed=routed, copies=copies)


def _layers(
    config: DecoderConfig,
    params: Params,
    x: Array,
    inputs: list[Array],
    mix: Callable[[Layer], tuple[Rope, Attend]],
    recur: Recur | None,
    remat: Remat,
    mesh: Mesh | None,
    *split: AxisName,
    recorded: Array = None,
    routed: list[Routed] | None = None,
    copies: Array = None,
) -> Array:
    """Applies all blocks and the final norm to x [B, T, D].

    Args:
        inputs: as of `embed`.
        recur: of layers that have a state.
        split: the axis of a stream's tokens.
        recorded: [B, T, L, k] integers (`experts.mix`).
        routed: gets what the routers did.
        copies: [B, T] (`experts.mix`).
    """
    chosen = None if recorded is None else jnp.moveaxis(recorded, 2, 0)

    def block(
        layer: Layer, carried: tuple[Array, Lent], params: Params, own: Array, chosen: Array
    ) -> tuple[tuple[Array, Lent], Tree]:
        x, held = carried[0], dict(zip(config.lenders, carried[1], strict=True))
        rope, attend = mix(layer)
        mixer = recur if layer.kind.recurs else lending(layer.kind, attend, held)
        options = {"own": own, "recorded": chosen, "copies": copies}
        x, one = run_block(config, layer.kind, params, x, rope, mixer, mesh, *split, **options)
        return (x, tuple(held.values())), one

    def chosen_of(
        layers: Sequence[Layer], place: Array, carried: tuple[Array, Lent], *alike: Tree
    ) -> tuple[tuple[Array, Lent], Tree]:
        # Chosen where the backward pass computes it again: parameters that were stacked or chosen
        # outside would be kept for it, a second copy of the weights of all layers.
        given = jax.tree.map(lambda *xs: jax.lax.select_n(place, *xs), *alike)
        layer, numbers = layers[0], [layer.number for layer in layers]
        if not isinstance(layer.number, int):
            layer = Layer(layer.kind, jax.lax.select_n(place, *numbers))
        return block(layer, carried, *given)

    def body(
        carried: tuple[Array, Lent], layers: Any, given: tuple[Tree, ...], place: Array = None
    ) -> tuple[tuple[Array, Lent], Tree]:
        run: Callable[..., tuple[tuple[Array, Lent], Tree]] = partial(block, layers)
        if place is not None:
            run = partial(chosen_of, layers, place)
        if remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=False)
        return run(carried, *given)

    given = inputs, at_blocks(config, params, chosen)
    one_of = (config.of(kind) for kind in config.lenders)
    shapes = [(*x.shape[:2], one.n_kv_heads, one.head_dim) for one in one_of]
    carried = x, tuple((jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype)) for shape in shapes)
    (x, _), found = through(config, body, carried, params, *given, in_turn=remat != "none")
    report(params, found, routed)
    return rms_norm(config, params["norm"], x)
