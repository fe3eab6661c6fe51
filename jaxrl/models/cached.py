"""A decoder with a cache: prompts into keys and values, one token for each slot, and further tokens
of some. What the model has read of a prompt is a row of one cache; what follows is in a slot of
another one, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from jaxrl.models.attention import Attend, attender, attention, reached, step_kernel_on
from jaxrl.models.block import run_block
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Filters, Inputs, Recurrent, recur_rows
from jaxrl.models.experts import Routed
from jaxrl.models.kernels import StepKernel, target_on
from jaxrl.models.layer_kind import Layer, LayerKind
from jaxrl.models.layers import Rope, rms_norm
from jaxrl.models.parameters import Params, layout_of
from jaxrl.models.shared_prompts import Pages, Seats, shared_attender, write
from jaxrl.models.stack import (
    delta_of,
    embed,
    kernels_of,
    lending,
    mixing,
    report,
    through,
)
from jaxrl.sharding.targets import ridge
from jaxrl.types import Array

Pair = tuple[Float[Array, "... _ _ _ _"], Float[Array, "... _ _ _ _"]]
Cache = list[Pair | Recurrent | tuple[()]]
"""Per layer (k, v), each [B, KV, S, H]: the positions of a head lie next to each other, so that a
decode step reads them as a plain batched matmul, without a transposed copy; or a layer's state; or
nothing, of a layer that borrows."""


class Shared(NamedTuple):
    """The prompts that slots share, and what follows them in the cache of the slots."""

    cache: Cache
    """Of their rows: each array [R, KV, P, H]."""
    seats: Seats
    starts: Array
    """[B] int32: the position at which each slot's own cache begins: that of the last token of its
    prompt, which is the first one that it reads."""
    pages: Pages | None = None
    """Of that cache, where it is a pool of pages."""


def prefill(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B W"],
    mask: Bool[Array, "B W"],
    *,
    mesh: Mesh | None = None,
    routed: list[Routed] | None = None,
) -> tuple[Float[Array, "B W D"], Cache]:
    """Computes hidden states, and the keys and values, of right-padded prompts: a `Cache` of W
    positions, or the states at the last of the real tokens.

    Keys are stored rotated, at the index of their position.

    Args:
        params: unstacked.
        routed: gets what the routers of all layers did, each leaf [L, B, W, ...].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    mix = mixing(
        config,
        positions,
        kernels_of(config, params, mesh),
        lambda kernel, window: attender(kernel, mask, mesh, window=window),
    )
    run = partial(_run_layer, config, mix, dict.fromkeys(config.lenders), mesh)

    def keep(k: Array, v: Array) -> tuple[Any, Array, Array]:
        return (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)), k, v

    def recur(inputs: Inputs, filters: Filters) -> tuple[Array, Any]:
        return recur_rows(delta_of(config), mesh, mask, inputs, filters)

    def body(x: Array, layer: Layer, given: tuple[Params, Array]) -> tuple[Array, tuple[Any, Any]]:
        return run(x, layer, *given, keep, recur)

    x, inputs = embed(config, params, tokens, mesh)
    x, left = through(config, body, x, params, inputs)
    report(params, [one for _, one in left], routed)
    return rms_norm(config, params["norm"], x), [entry for entry, _ in left]


def keys_of(cache: Cache) -> Array:
    """Returns the keys of the first layer that has any."""
    return next(entry[0] for entry in cache if entry and not isinstance(entry, Recurrent))


def decode(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    shared: Shared,
    *,
    live: Bool[Array, " B"] | None = None,
    mesh: Mesh | None = None,
    routed: list[Routed] | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Runs one token of each slot: writes its keys and values and attends to its prompt and to the
    cache up to its position, or moves the states on.

    Args:
        params: unstacked: of stacked ones a loop over layers would copy weights and cache.
        cache: of what follows the prompts; donate it. All of it is read, and where a kernel does it
            (`kernels.step_kernel_of`), of each slot what its position reaches.
        tokens: the token at `positions`.
        positions: counted from the start of the prompts.
        live: the slots whose states read the token, which no later token can undo; None: all.
        routed: gets what the routers of all layers did, each leaf [L, B, 1, ...].

    Returns:
        The hidden state that predicts the next token, and the new cache.
    """
    assert layout_of(params) == "unstacked"
    cached = keys_of(cache).dtype
    kernels = {dim: step_kernel_on(mesh, dim, cached) for dim in config.head_dims}
    at = positions - shared.starts

    def attender_of(kernel: StepKernel | None, window: int | None) -> Attend:
        return shared_attender(kernel, positions, at, shared.seats, mesh, window, shared.pages)

    mix = mixing(config, positions[:, None], kernels, attender_of)
    run = partial(
        _run_layer,
        config,
        mix,
        dict.fromkeys(config.lenders),
        mesh,
        ridge=None if config.experts is None else ridge(target_on(mesh).kind),
    )
    reads = jnp.ones(tokens.shape, bool) if live is None else live

    def body(x: Array, layer: Layer, given: tuple[Params, Array, Any, Any]) -> tuple[Array, Any]:
        params, own, entry, prompt = given

        def keep(*new: Array) -> tuple[Any, Any, Any]:
            if shared.pages is not None:
                table = shared.pages.table
                pair = tuple(write(x, y, at, table, mesh) for x, y in zip(entry, new, strict=True))
            else:
                pair = tuple(_write(x, y, at) for x, y in zip(entry, new, strict=True))
            keys, values = zip(pair, prompt, strict=True)
            return pair, keys, values

        def recur(inputs: Inputs, filters: Filters) -> tuple[Array, Any]:
            return recur_rows(delta_of(config), mesh, reads[:, None], inputs, filters, entry)

        return run(x, layer, params, own, keep, recur)

    x, inputs = embed(config, params, tokens[:, None], mesh)
    x, left = through(config, body, x, params, inputs, cache, shared.cache)
    report(params, [one for _, one in left], routed)
    return rms_norm(config, params["norm"], x)[:, 0], [entry for entry, _ in left]


def extend(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    prompts: Cache,
    tokens: Int[Array, "B W"],
    positions: Int[Array, " B"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """Returns the cache with the keys and values of W further tokens of each slot, which attend to
    it and to their prompt.

    Args:
        params: unstacked.
        cache: of at least positions - starts + W positions.
        prompts: the row of each slot [B, ...].
        positions: of the first of the tokens; what the cache holds from there on is replaced. A
            state begins at `starts` with that of the prompt, and else is that of the token before.
        starts: as of `Shared`.
        lengths: how many of the tokens a state reads, the first ones.
    """
    at = positions - starts
    queries = positions[:, None] + jnp.arange(tokens.shape[1])[None]
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    of_prompt = jnp.arange(keys_of(prompts).shape[2])[None]
    of_prompt = jnp.where(of_prompt < starts[:, None], of_prompt, config.max_positions)  # no query
    own_keys = starts[:, None] + jnp.arange(keys_of(cache).shape[2])[None]
    keys = jnp.concatenate([of_prompt, own_keys], 1)

    def attender_of(_: None, window: int | None) -> Attend:
        allowed = reached(keys[:, None], queries[..., None], window)
        rows = partial(jnp.swapaxes, axis1=1, axis2=2)  # [B,KV,S,H] -> [B,S,KV,H]
        return lambda q, k, v, *sinks: attention(q, rows(k), rows(v), allowed, *sinks)

    mix = mixing(config, queries, {}, attender_of)
    run = partial(_run_layer, config, mix, dict.fromkeys(config.lenders), mesh)

    def body(x: Array, layer: Layer, given: tuple[Params, Array, Any, Any]) -> tuple[Array, Any]:
        params, own, entry, prompt = given

        def keep(k: Array, v: Array) -> tuple[Any, Array, Array]:
            new = _write(entry[0], k, at), _write(entry[1], v, at)
            whole = [jnp.concatenate(pair, 2) for pair in zip(prompt, new, strict=True)]
            return new, whole[0], whole[1]

        def recur(inputs: Inputs, filters: Filters) -> tuple[Array, Any]:
            goes_on = (at > 0)[:, None, None, None]
            start = jax.tree.map(partial(jnp.where, goes_on), entry, prompt)
            return recur_rows(delta_of(config), mesh, mask, inputs, filters, start)

        x, (kept, _) = run(x, layer, params, own, keep, recur)
        return x, kept

    x, inputs = embed(config, params, tokens, mesh)
    return through(config, body, x, params, inputs, cache, prompts)[1]


def _run_layer(
    config: DecoderConfig,
    mix: Callable[[Layer], tuple[Rope, Attend]],
    held: dict[LayerKind, Any],
    mesh: Mesh | None,
    x: Array,
    layer: Layer,
    params: Params,
    own: Array,
    keep: Callable[..., tuple[Any, Any, Any]],
    recur: Callable[..., tuple[Array, Any]],
    ridge: float | None = None,
) -> tuple[Array, tuple[Any, Routed | None]]:
    """Runs `run_block`; returns its output, its layer's entry of the cache, and what its router
    did.

    Args:
        held: as of `lending`.
        keep: (k, v) -> the entry, and the keys and values that queries attend to; called unless
            the layer borrows, whose entry is ().
        recur: a `Recur` that also returns the entry, of a layer with a state.
    """
    rope, attend_one = mix(layer)
    attend_one = lending(layer.kind, attend_one, held)
    written: list[Any] = []

    def attend(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
        entry, k, v = ((), k, v) if layer.kind.borrows else keep(k, v)
        written.append(entry)
        return attend_one(q, k, v, *sinks)

    def move(inputs: Inputs, filters: Filters) -> Array:
        out, end = recur(inputs, filters)
        written.append(end)
        return out

    mixer = move if layer.kind.recurs else attend
    x, one = run_block(config, layer.kind, params, x, rope, mixer, mesh, own=own, ridge=ridge)
    return x, (written[0], one)


def _write(cache: Array, new: Array, positions: Array) -> Array:
    """Writes new [B,W,KV,H] into cache [B,KV,S,H] from positions [B] on; in this form SPMD moves
    no cache, and XLA copies none."""
    new = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    update: Callable[..., Array] = jax.lax.dynamic_update_slice
    return jax.vmap(lambda c, n, i: update(c, n, (0, i, 0)))(cache, new, positions)
