"""Llama-like decoders as functions of a parameter pytree: hidden states of whole sequences or of
streams of them, the logits of hidden states, and decoding with a cache: prompts into keys and
values, one token for each slot, and further tokens of some. What the model has read of a prompt is
a row of one cache; what follows is in a slot of another one, or in pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jaxrl.models import delta
from jaxrl.models.attention import Attend, attend_packed, attender, attention, reach_mask, roll_rows
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import NO_ROUTING, Routed, Routing, mixture_block
from jaxrl.models.families import FAMILIES
from jaxrl.models.family import LayerKind
from jaxrl.models.kernels import Kernel, kernel_of, step_kernel_of, target_on
from jaxrl.models.layers import (
    ACTIVATIONS,
    PROJECTED,
    Rope,
    by_rows,
    gated_mlp,
    grouped_attention,
    linear,
    product_of,
    rms_norm,
    rope_angles,
)
from jaxrl.models.packing import Packing
from jaxrl.models.parameters import Params, blocks_of, cast, head, split_by_block
from jaxrl.models.shared_prompts import Pages, Seats, shared_attender, write_pages
from jaxrl.sharding.axes import ROWS, TOKENS, WEIGHTS, AxisName
from jaxrl.sharding.targets import ridge
from jaxrl.types import Array, Tree

Remat = Literal["none", "dots", "full"]
Pair = tuple[Float[Array, "... _ _ _ _"], Float[Array, "... _ _ _ _"]]
Cache = list[Pair | delta.Recurrent | tuple[()]]
"""Per layer (k, v), each [B, KV, S, H]: the positions of a head lie next to each other, so that a
decode step reads them as a plain batched matmul, without a transposed copy; or a layer's state; or
nothing, of a layer that borrows."""
Lent = tuple[tuple[Array, Array], ...]
"""Keys and values [B, T, KV, H], of each of `DecoderConfig.lenders` those of the last layer."""
X = TypeVar("X")

REMAT_POLICIES: dict[Remat, Callable[..., bool] | None] = {
    # By name: the two products of an adapter would be kept beside that of the kernel.
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED),
    "full": None,
}


class Layer(NamedTuple):
    """One layer, or those that take one place in a scan."""

    kind: LayerKind
    """For the layers of a scan that differ, what they have in common (`LayerKind.shape`)."""
    number: int | jax.Array
    """Index of the layer; for the layers of a scan that differ an array [] int32, for those that
    are alike one of their indices."""


Mix = Callable[[Layer], tuple[Rope, Attend]]
"""How a layer of one call rotates and attends."""


class Blocks(NamedTuple):
    """What all blocks of one call have in common."""

    config: DecoderConfig
    mix: Mix
    mesh: Mesh | None
    split: tuple[AxisName, ...] = ()
    """The axis of a stream's tokens."""


class SlotTokens(NamedTuple):
    """The next tokens of slots: one of each, or W."""

    ids: Int[Array, " B"] | Int[Array, "B W"]
    positions: Int[Array, " B"]
    """Position of the first of them, counted from the start of the prompts."""
    read: Array | None = None
    """[B]: how many of them a state reads, the first ones; of one token, whether: no later token
    can undo it. None: all."""


class Shared(NamedTuple):
    """The prompts that slots share, and what follows them in the cache of the slots."""

    cache: Cache
    """The cache of the prompts' rows: each array [R, KV, P, H]."""
    seats: Seats
    starts: Array
    """[B] int32: the position at which each slot's own cache begins: that of the last token of its
    prompt, which is the first one that it reads."""
    pages: Pages | None = None
    """The pages of the slots' cache, where it is a pool."""


def token_logits(
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
    embedded = embed_tokens(config, params, tokens, mesh, dtype)
    params = params if dtype is None else cast(params, dtype)
    positions = jnp.maximum(jnp.cumsum(mask, -1) - 1, 0)
    mix = make_mix(config, positions, kernels, partial(attender, keys=mask, mesh=mesh))
    recur = partial(delta.recur_rows, config.delta, mesh, mask)
    x = _layers(Blocks(config, mix, mesh), params, embedded, recur, remat)
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
    embedded = embed_tokens(config, params, packing.tokens, mesh, dtype, TOKENS)
    params = params if dtype is None else cast(params, dtype)
    attend = partial(attend_packed, packing=packing, mesh=mesh)
    mix = make_mix(config, packing.positions, kernels, attend)
    recur = None if config.delta is None else delta.recur_packed(config.delta, mesh, packing)
    copies = None if routed is None else packing.copies
    blocks, routing = Blocks(config, mix, mesh, (TOKENS,)), Routing(packing.experts, copies)
    return _layers(blocks, params, embedded, recur, remat, routing, routed)


def _layers(
    blocks: Blocks,
    params: Params,
    embedded: tuple[Array, list[Array]],
    recur: delta.Recur | None,
    remat: Remat,
    routing: Routing = NO_ROUTING,
    routed: list[Routed] | None = None,
) -> Array:
    """Applies all blocks and the final norm to what `embed_tokens` gives; experts that `routing`
    has recorded are of all layers, [B, T, L, k]."""
    config, (x, inputs) = blocks.config, embedded
    chosen = None if routing.recorded is None else jnp.moveaxis(routing.recorded, 2, 0)

    def block(
        layer: Layer, carried: tuple[Array, Lent], params: Params, inputs: Array, chosen: Array
    ) -> tuple[tuple[Array, Lent], Tree]:
        x, held = carried[0], dict(zip(config.lenders, carried[1], strict=True))
        asked = routing._replace(recorded=chosen)
        weights = params, inputs
        x, _, route = run_block(blocks, layer, held, weights, x, recur=recur, routing=asked)
        return (x, tuple(held.values())), route

    def chosen_of(
        layers: Sequence[Layer], place: Array, carried: tuple[Array, Lent], *alike: Tree
    ) -> tuple[tuple[Array, Lent], Tree]:
        # Chosen where the backward pass computes it again: parameters that were stacked or chosen
        # outside would be kept for it, a second copy of the weights of all layers.
        weights = jax.tree.map(lambda *xs: jax.lax.select_n(place, *xs), *alike)
        layer, numbers = layers[0], [layer.number for layer in layers]
        if not isinstance(layer.number, int):
            layer = Layer(layer.kind, jax.lax.select_n(place, *numbers))
        return block(layer, carried, *weights)

    def body(
        carried: tuple[Array, Lent], layers: Any, weights: tuple[Tree, ...], place: Array = None
    ) -> tuple[tuple[Array, Lent], Tree]:
        run: Callable[..., tuple[tuple[Array, Lent], Tree]] = partial(block, layers)
        if place is not None:
            run = partial(chosen_of, layers, place)
        if remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=False)
        return run(carried, *weights)

    operands = inputs, split_by_block(config, params, chosen)
    lenders = (config.layer_of(kind) for kind in config.lenders)
    shapes = [(*x.shape[:2], lender.n_kv_heads, lender.head_dim) for lender in lenders]
    carried = x, tuple((jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype)) for shape in shapes)
    (x, _), left = run_layers(config, body, carried, params, *operands, in_turn=remat != "none")
    report_routing(params, left, routed)
    return _last_hidden(config, params, x)


def _last_hidden(config: DecoderConfig, params: Params, x: Array) -> Array:
    """Computes what the LM head reads, of the residual stream after all layers."""
    family, x = FAMILIES[config.family], rms_norm(config, params["norm"], x)
    return x if family.final is None else family.final(config, x)


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
    kernels = kernels_of(config, params, mesh)
    mix = make_mix(config, positions, kernels, partial(attender, keys=mask, mesh=mesh))
    blocks, held = Blocks(config, mix, mesh), dict.fromkeys(config.lenders)
    recur = partial(delta.recur_rows, config.delta, mesh, mask)

    def body(x: Array, layer: Layer, operands: tuple[Params, Array]) -> tuple[Array, Any]:
        x, entry, route = run_block(blocks, layer, held, operands, x, recur=recur)
        if not isinstance(entry, delta.Recurrent):  # [B,W,KV,H] -> [B,KV,W,H]
            entry = tuple(jnp.swapaxes(new, 1, 2) for new in entry)
        return x, (entry, route)

    x, inputs = embed_tokens(config, params, tokens, mesh)
    x, left = run_layers(config, body, x, params, inputs)
    report_routing(params, [route for _, route in left], routed)
    return _last_hidden(config, params, x), [entry for entry, _ in left]


def keys_of(cache: Cache) -> Array:
    """Returns the keys of the first layer that has any."""
    return next(entry[0] for entry in cache if entry and not isinstance(entry, delta.Recurrent))


def decode_step(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: SlotTokens,
    shared: Shared,
    *,
    mesh: Mesh | None = None,
    routed: list[Routed] | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """Runs one token of each slot: writes its keys and values and attends to its prompt and to the
    cache up to its position, or moves the states on.

    Args:
        params: unstacked: of stacked ones a loop over layers would copy weights and cache.
        cache: of what follows the prompts; donate it. All of it is read, and where a kernel does it
            (`kernels.step_kernel_of`), of each slot what its position reaches.
        routed: gets what the routers of all layers did, each leaf [L, B, 1, ...].

    Returns:
        The hidden state that predicts the next token, and the new cache.
    """
    assert isinstance(params["layers"], list), "unstacked"
    ids, positions, read = tokens
    reads = jnp.ones(ids.shape, bool) if read is None else read
    target, dtype, at = target_on(mesh), keys_of(cache).dtype.name, positions - shared.starts
    kernels = {dim: step_kernel_of(target, dim, dtype) for dim in config.head_dims}
    seats, pages = shared.seats, shared.pages
    known = {"positions": positions, "at": at, "seats": seats, "mesh": mesh, "pages": pages}
    mix = make_mix(config, positions[:, None], kernels, partial(shared_attender, **known))
    blocks, held = Blocks(config, mix, mesh), dict.fromkeys(config.lenders)
    routing = Routing(ridge=None if config.experts is None else ridge(target.kind))

    def body(x: Array, layer: Layer, operands: tuple[Params, Array, Any, Any]) -> tuple[Array, Any]:
        *weights, entry, prompt = operands

        def keep(*new: Array) -> tuple[Any, Any, Any]:
            if pages is not None:
                both = zip(entry, new, strict=True)
                pair = tuple(write_pages(x, y, at, pages.table, mesh) for x, y in both)
            else:
                pair = tuple(_write(x, y, at) for x, y in zip(entry, new, strict=True))
            keys, values = zip(pair, prompt, strict=True)
            return pair, keys, values

        recur = partial(delta.recur_rows, config.delta, mesh, reads[:, None], start=entry)
        x, kept, route = run_block(
            blocks, layer, held, weights, x, recur=recur, keep=keep, routing=routing
        )
        return x, (kept, route)

    x, inputs = embed_tokens(config, params, ids[:, None], mesh)
    x, left = run_layers(config, body, x, params, inputs, cache, shared.cache)
    report_routing(params, [route for _, route in left], routed)
    return _last_hidden(config, params, x)[:, 0], [entry for entry, _ in left]


def extend(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    prompts: Cache,
    tokens: SlotTokens,
    starts: Int[Array, " B"],
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """Returns the cache with the keys and values of W further tokens of each slot, which attend to
    it and to their prompt.

    Args:
        params: unstacked.
        cache: of at least positions - starts + W positions; what it holds from the first of the
            tokens on is replaced. A state begins at `starts` with that of the prompt, and else is
            that of the token before.
        prompts: the row of each slot [B, ...].
        starts: as in `Shared`.
    """
    ids, positions, lengths = tokens
    assert lengths is not None
    at, numbers = positions - starts, jnp.arange(ids.shape[1])[None]
    queries, mask = positions[:, None] + numbers, numbers < lengths[:, None]
    of_prompt = jnp.arange(keys_of(prompts).shape[2])[None]
    of_prompt = jnp.where(of_prompt < starts[:, None], of_prompt, config.max_positions)  # no query
    own_keys = starts[:, None] + jnp.arange(keys_of(cache).shape[2])[None]
    keys = jnp.concatenate([of_prompt, own_keys], 1)

    def attender_of(_: None, window: int | None) -> Attend:
        allowed = reach_mask(keys[:, None], queries[..., None], window)
        rows = partial(jnp.swapaxes, axis1=1, axis2=2)  # [B,KV,S,H] -> [B,S,KV,H]
        return lambda q, k, v, *sinks: attention(q, rows(k), rows(v), allowed, *sinks)

    blocks = Blocks(config, make_mix(config, queries, {}, attender_of), mesh)
    held: dict[LayerKind, Any] = dict.fromkeys(config.lenders)

    def body(x: Array, layer: Layer, operands: tuple[Params, Array, Any, Any]) -> tuple[Array, Any]:
        *weights, entry, prompt = operands

        def keep(k: Array, v: Array) -> tuple[Any, Array, Array]:
            new = _write(entry[0], k, at), _write(entry[1], v, at)
            whole = [jnp.concatenate(pair, 2) for pair in zip(prompt, new, strict=True)]
            return new, whole[0], whole[1]

        def recur(inputs: delta.Inputs, filters: delta.Filters) -> tuple[Array, Any]:
            goes_on = (at > 0)[:, None, None, None]
            start = jax.tree.map(partial(jnp.where, goes_on), entry, prompt)
            return delta.recur_rows(config.delta, mesh, mask, inputs, filters, start)

        x, kept, _ = run_block(blocks, layer, held, weights, x, recur=recur, keep=keep)
        return x, kept

    x, inputs = embed_tokens(config, params, ids, mesh)
    return run_layers(config, body, x, params, inputs, cache, prompts)[1]


def _write(cache: Array, new: Array, positions: Array) -> Array:
    """Writes new [B,W,KV,H] into cache [B,KV,S,H] from positions [B] on; in this form SPMD moves
    no cache, and XLA copies none."""
    new = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    update: Callable[..., Array] = jax.lax.dynamic_update_slice
    return jax.vmap(lambda c, n, i: update(c, n, (0, i, 0)))(cache, new, positions)


def embed_tokens(
    config: DecoderConfig,
    params: Params,
    tokens: Array,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    *split: AxisName,
) -> tuple[Array, list[Array]]:
    """Looks up rows of the embedding in `dtype`, its own where None, scaled where the family does
    so; its D is gathered first: a lookup split both ways is replicated. Also returns what each
    block reads beside them (`split_by_block`).

    Args:
        split: the axis of a stream's tokens.
    """
    table: Array = params["embed"]["embedding"]
    vocab: AxisName | None = None
    if mesh is not None and config.vocab_size % mesh.shape["tensor"] == 0:
        vocab = "tensor"
    dtype = table.dtype if dtype is None else jnp.dtype(dtype)
    how = dtype, mesh, vocab, split
    x = by_rows(_look_up(table, tokens, *how), mesh, *split)
    family = FAMILIES[config.family]
    x = x if family.embed is None else family.embed(config, x)
    inputs = None
    if config.layer_inputs:
        weights, width = params["layer_inputs"], config.layer_inputs
        rows = by_rows(_look_up(weights["embedding"], tokens, *how), mesh, *split)
        by_layer = (*x.shape[:2], config.n_layers, width)
        read = product_of(config, x.reshape(-1, config.d_model), weights["projection"].T)
        read = read * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        rows = rows * jnp.asarray(math.sqrt(width), x.dtype)
        both = rms_norm(config, weights["norm"], read.reshape(by_layer)) + rows.reshape(by_layer)
        inputs = jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)
    return x, split_by_block(config, params, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _look_up(
    table: Array,
    tokens: Array,
    dtype: np.dtype,
    mesh: Mesh | None,
    vocab: AxisName | None,
    split: tuple[AxisName, ...],
) -> Array:
    """Computes table[tokens] in `dtype`, cast before the table is gathered.

    Whatever the dtype, the gradient is summed in float32: in bfloat16 the sum of a frequent token
    stops at 256 times a term. Each device sums its own tokens, and gets the sum of all of them for
    the columns that it holds of the table: left to XLA, every device would get all columns where
    `data` or `expert` divides the tokens.

    Args:
        vocab: the axis that divides the rows of the table.
        split: the axis of a stream's tokens.
    """
    table = table.astype(dtype)
    if mesh is not None:
        sharding = NamedSharding(mesh, PartitionSpec(vocab, None))
        table = jax.lax.with_sharding_constraint(table, sharding)
    return table[tokens]


def _look_up_backward(
    dtype: np.dtype,
    mesh: Mesh | None,
    vocab: AxisName | None,
    split: tuple[AxisName, ...],
    kept: tuple[Array, Array],
    d_rows: Array,
) -> tuple[Array, None]:
    (table, tokens), (n, width) = kept, kept[0].shape
    # The sum is as large as the table in float32: XLA may not write its zeros before the loss,
    # while what the layers keep is there.
    zero, d_rows = jax.lax.optimization_barrier((jnp.float32(0), d_rows.astype(jnp.float32)))
    if mesh is None or mesh.size == 1:
        summed = jnp.broadcast_to(zero, table.shape).at[tokens].add(d_rows)
        return summed.astype(table.dtype), None
    over = *ROWS, *split
    columns = tuple(axis for axis in WEIGHTS if axis in over)
    columns = columns if width % math.prod(mesh.shape[axis] for axis in columns) == 0 else ()
    others = tuple(axis for axis in over if axis not in columns)

    def local(zero: Array, tokens: Array, d_rows: Array) -> Array:
        rows = n if vocab is None else n // mesh.shape[vocab]
        at = tokens if vocab is None else tokens - rows * jax.lax.axis_index(vocab)
        at = jnp.where((at < 0) | (at >= rows), rows, at)  # another device's
        summed = jnp.broadcast_to(zero, (rows, width)).at[at].add(d_rows, mode="drop")
        if columns:
            summed = jax.lax.psum_scatter(summed, columns, scatter_dimension=1, tiled=True)
        return jax.lax.psum(summed, others)

    by_token = PartitionSpec(ROWS, *split or (None,))
    summed = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_token, PartitionSpec(*by_token, None)),
        out_specs=PartitionSpec(vocab, columns or None),
        check_vma=False,
    )(zero, tokens, d_rows)
    return summed.astype(table.dtype), None


_look_up.defvjp(  # the table is kept for its shape
    lambda table, tokens, *how: (_look_up(table, tokens, *how), (table, tokens)), _look_up_backward
)


def make_mix(
    config: DecoderConfig,
    positions: Array,
    kernels: Mapping[int, str | None],
    attend: Callable[..., Attend],
) -> Mix:
    """Returns how each layer of one call rotates and attends, made once for all layers that do so
    alike.

    Args:
        positions: [B,T] int32.
        kernels: of each head dim.
        attend: makes an `Attend` of a kernel and a `window`.
    """
    kinds = [LayerKind(None, x.rope_theta, x.rotates, head_dim=x.head_dim) for x in config.kinds]
    ropes = {kind: rope_angles(config, positions, kind) for kind in dict.fromkeys(kinds)}
    windows = [(config.layer_of(kind).head_dim, kind.window) for kind in config.kinds]
    attends = {
        (dim, window): attend(kernels.get(dim), window=window)
        for dim, window in dict.fromkeys(windows)
    }

    def mix(layer: Layer) -> tuple[Rope, Attend]:
        number = layer.number
        if isinstance(number, int):
            number %= len(kinds)
            return ropes[kinds[number]], attends[windows[number]]
        rope, attend_one = ropes[kinds[0]], attends[windows[0]]
        if len(ropes) > 1:
            which = jnp.array([list(ropes).index(kind) for kind in kinds], jnp.int32)[number]
            rope = jax.tree.map(lambda *xs: jax.lax.select_n(which, *xs), *ropes.values())
        if len(attends) > 1:
            which = jnp.array([list(attends).index(key) for key in windows], jnp.int32)[number]
            attend_one = partial(jax.lax.switch, which, tuple(attends.values()))
        return rope, attend_one

    return mix


def kernels_of(
    config: DecoderConfig,
    params: Params,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    joined: bool = False,
) -> dict[int, Kernel | None]:
    """Chooses the kernel of attention for each head dim, in `dtype` or that of the parameters.

    Args:
        joined: rows share a prompt (`kernels.why_not_fused`).
    """
    dtype = params["embed"]["embedding"].dtype if dtype is None else dtype
    target, name = target_on(mesh), jnp.dtype(dtype).name
    return {dim: kernel_of(target, dim, name, joined) for dim in config.head_dims}


_WATCHED: ContextVar[list[Array] | None] = ContextVar("watched", default=None)


@contextmanager
def watch_layers(outputs: list[Array]) -> Iterator[None]:
    """Has what goes into the first of unstacked layers, and comes out of each, added to a list."""
    token = _WATCHED.set(outputs)
    try:
        yield
    finally:
        _WATCHED.reset(token)


def _with_layer(body: Callable[..., tuple[X, Tree]], layer: Layer) -> Callable[..., Any]:
    return lambda x, given: body(x, layer, given)


def run_layers(
    config: DecoderConfig,
    body: Callable[..., tuple[X, Tree]],
    x: X,
    params: Params,
    *more: Tree,
    in_turn: bool = False,
) -> tuple[X, list[Tree]]:
    """Runs x through all layers; returns it, and what they leave: one entry for each layer or, with
    stacked parameters, for each block, stacked.

    Args:
        body: (x, layer, (parameters, ...)) -> (x, what it leaves); with `in_turn` also (x, layers,
            a list of such tuples, place), of the layer at that place of both.
        more: what `body` gets beside the parameters, in the form of what they leave.
        in_turn: layers of one kind that follow each other in a cycle are a scan too. XLA would else
            compute all blocks of a cycle again for the backward pass before it needs them, which
            took three times the memory of one.
    """
    left = []
    if isinstance(params["layers"], list):
        watched = _WATCHED.get()
        if watched is not None:
            watched.append(x)
        traced: dict[LayerKind, Callable[[X, Tree], tuple[X, Tree]]] = {}
        for i, operands in enumerate(zip(params["layers"], *more, strict=True)):
            layer = Layer(config.kinds[i % len(config.kinds)], i)
            run = _with_layer(body, layer)
            if not config.lenders:  # else it also leaves keys and values for the layers above
                run = traced.setdefault(layer.kind, jax.jit(run, inline=True))
            x, entry = run(x, operands)
            left.append(entry)
            if watched is not None:
                watched.append(x)
        return x, left
    at, n, indices = [], config.cycle, jnp.arange(config.n_layers)
    for i, kind in enumerate(config.kinds[:n]):  # the layers at each place of a cycle
        kinds = {config.kinds[j % len(config.kinds)] for j in range(i, config.n_layers, n)}
        at.append(Layer(kind, i) if len(kinds) == 1 else Layer(kind.shape, indices[i::n]))
    numbers = [None if isinstance(layer.number, int) else layer.number for layer in at]

    def alike(layer: Layer) -> tuple[LayerKind, bool]:
        return layer.kind, isinstance(layer.number, int)

    def one_of(layers: tuple[Layer, ...], operands: Tree, x: X, place: Array) -> tuple[X, Tree]:
        return body(x, layers, operands, place)

    def bodies(x: X, operands: Tree) -> tuple[X, list[Tree]]:
        entries: list[Tree] = []
        numbers, by_place = operands
        layers = [
            layer if number is None else Layer(layer.kind, number)
            for layer, number in zip(at, numbers, strict=True)
        ]
        if in_turn and len(layers) > 1:
            for _, run in groupby(zip(layers, by_place, strict=True), lambda pair: alike(pair[0])):
                same, of = zip(*run, strict=True)
                x, entry = jax.lax.scan(partial(one_of, same, of), x, jnp.arange(len(same)))
                entries += [jax.tree.map(lambda x, i=i: x[i], entry) for i in range(len(same))]
            return x, entries
        for layer, parts in zip(layers, by_place, strict=True):
            x, entry = body(x, layer, parts)
            entries.append(entry)
        return x, entries

    return jax.lax.scan(bodies, x, (numbers, list(zip(blocks_of(params), *more, strict=True))))


def run_block(
    blocks: Blocks,
    layer: Layer,
    held: dict[LayerKind, Any],
    operands: Sequence[Any],
    x: Array,
    *,
    recur: delta.Recur | None = None,
    keep: Callable[..., tuple[Tree, Any, Any]] | None = None,
    routing: Routing = NO_ROUTING,
) -> tuple[Array, Tree, Routed | None]:
    """Runs one block on the residual stream [B, T, D]: x + f(norm(x)) for attention, then for the
    MLP; or x + norm(f(x)), or x + norm(f(norm(x))), as `BlockKind.norms` says.

    Args:
        held: the keys and values of `DecoderConfig.lenders`, which layers that borrow read; a
            lender puts its own there.
        operands: the layer's parameters, and [B, T, P] where it reads more than the residual.
        recur: of a layer with a state.
        keep: (k, v) -> the layer's entry of a cache, and the keys and values that queries attend
            to; None: they are all (k, v). Called unless the layer borrows, whose entry is ().

    Returns:
        The stream, the layer's entry of a cache, and what the router did, if there is one.
    """
    (config, mix, mesh, split), (p, layer_input) = blocks, operands
    c, kind = config.layer_of(layer.kind), layer.kind
    after = c.block.norms == "after"
    entry: Tree = ()
    routed = None

    read = x if after else rms_norm(c, p["attn_norm"], x)
    if kind.recurs:
        assert recur is not None
        out, entry = delta.gated_delta(c, p["delta"], read, recur)
    else:
        rope, attend = mix(layer)

        def attend_held(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            nonlocal entry
            if kind.borrows:
                return attend(q, *held[kind.lender], *sinks)
            entry, k, v = ((k, v), k, v) if keep is None else keep(k, v)
            if kind in held:
                held[kind] = k, v
            return attend(q, k, v, *sinks)

        out = grouped_attention(c, p["attn"], read, rope, attend_held)
    if after or "attn_post_norm" in p:
        out = rms_norm(c, p["attn_norm" if after else "attn_post_norm"], out)
    add = FAMILIES[config.family].add
    x = x + (out if add is None else add(config, out))

    read = x if after else rms_norm(c, p["mlp_norm"], x)
    if c.experts is None:
        out = gated_mlp(c, p["mlp"], read)
    else:
        out, routed = mixture_block(c, p["mlp"], read, x, mesh, routing._replace(split=split))
    if after or "mlp_post_norm" in p:
        out = rms_norm(c, p["mlp_norm" if after else "mlp_post_norm"], out)
    x = x + (out if add is None else add(config, out))

    if c.layer_inputs:
        gate = ACTIVATIONS[c.block.activation](linear(c, p["input"]["gate"], x))
        x = x + rms_norm(c, p["input_norm"], linear(c, p["input"]["out"], gate * layer_input))
    if "block_scale" in p:
        scale = jax.lax.stop_gradient(p["block_scale"])
        x = x * scale.astype(x.dtype).reshape((1,) * x.ndim)
    return by_rows(x, mesh, *split), entry, routed


def report_routing(params: Params, routes: list[Tree], routed: list[Routed] | None) -> None:
    """Appends what the routers of all layers did, as `run_layers` found it."""
    if routed is None or not jax.tree.leaves(routes):
        return
    if isinstance(params["layers"], list):
        routed.append(jax.tree.map(lambda *xs: jnp.stack(xs), *routes))
    else:  # the layers of each block
        routed.append(
            jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *routes)
        )
