"""Llama-like decoders as functions of a parameter pytree.

Parameters are a nested dict of arrays, in one of two layouts of `params["layers"]`:

- stacked: one block whose leaves have a leading [L] dim, run under `lax.scan` (training: one block
  is compiled; sampling with the very arrays that are trained); where layers have parameters of
  other names or shapes than others, a tuple of as many blocks as there are until that repeats
  (`config.cycle`), each with the leading dim of its own layers;
- unstacked: a list of L blocks, run one after the other (sampling: nothing is copied at a token).

The NNX modules of `layers.py` are merged with their parameters inside the traced function, so that
a call of a jitted function flattens a dict, not a module graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxrl.models.attention import (
    Attend,
    attend_packed,
    attender,
    chunk_attender,
    kernel_on,
    roll_rows,
    step_attender,
    step_kernel_on,
)
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta, Filters, Inputs, Recur, Recurrent, recur_packed, recur_rows
from jaxrl.models.experts import ExpertKernels, Mix, Routed, mix
from jaxrl.models.families import FAMILIES
from jaxrl.models.kernels import Kernel, StepKernel
from jaxrl.models.kinds import ByLayer, Layer, LayerKind, selected, switched
from jaxrl.models.layers import (
    ACTIVATIONS,
    PROJECTED,
    Block,
    LayerInputs,
    RMSNorm,
    Rope,
    layer_angles,
)
from jaxrl.models.packing import Packing
from jaxrl.models.quantised import SCALE
from jaxrl.sharding.axes import ROWS, TOKENS, AxisName
from jaxrl.types import Array

Params = dict[str, Any]
Layout = Literal["stacked", "unstacked"]
Remat = Literal["none", "dots", "full"]
Pair = tuple[Float[Array, "... B _ S _"], Float[Array, "... B _ S _"]]
Cache = list[Pair | Recurrent | tuple[()]]
"""Per layer (k, v), each [B, KV, S, H]: the positions of a head lie next to each other, so that a
decode step reads them as a plain batched matmul, without a transposed copy; or a layer's state; or
nothing, of a layer that borrows. Of stacked parameters one pair [L, B, KV, S, H], or one entry for
each block of the cycle."""

REMAT_POLICIES: dict[Remat, Any] = {
    # By name: the two products of an adapter would be kept beside that of the kernel.
    "dots": jax.checkpoint_policies.save_only_these_names(PROJECTED),
    "full": None,
}


@lru_cache
def _block_graph(config: DecoderConfig) -> Any:
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0)))
    return nnx.split(block)[0]


@lru_cache
def _inputs_graph(config: DecoderConfig) -> Any:
    inputs = nnx.eval_shape(lambda: LayerInputs(config, nnx.Rngs(0)))
    return nnx.split(inputs)[0]


@lru_cache
def _norm_graph(config: DecoderConfig) -> Any:
    norm = nnx.eval_shape(lambda: RMSNorm(config.d_model, config))
    return nnx.split(norm)[0]


def init_params(
    config: DecoderConfig, key: jax.Array, dtype: Any = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """Random parameters: kernels normal / sqrt(fan-in), embeddings normal * 0.02, norms one."""
    return _init_params(config, key, jnp.dtype(dtype), layout)


@partial(jax.jit, static_argnums=(0, 2, 3))  # one program, not one for each operation
def _init_params(config: DecoderConfig, key: jax.Array, dtype: Any, layout: Layout) -> Params:
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


def abstract_params(
    config: DecoderConfig, dtype: Any = jnp.float32, layout: Layout = "stacked"
) -> Params:
    """The tree of `jax.ShapeDtypeStruct` that `init_params` would fill.

    Starts no backend: it is asked for before the mesh says how many devices to emulate.
    """
    found: Params = jax.tree.map(lambda x: x, _abstract(config, jnp.dtype(dtype), layout))
    return found  # the caller's own


@lru_cache
def _abstract(config: DecoderConfig, dtype: Any, layout: Layout) -> Params:
    """Traced once: a run asks for the same tree about twenty times."""
    return jax.eval_shape(
        lambda: init_params(config, jax.random.key(0), dtype=dtype, layout=layout)
    )


def layout_of(params: Params) -> Layout:
    return "unstacked" if isinstance(params["layers"], list) else "stacked"


def unstack(params: Params) -> Params:
    """Stacked to unstacked layout; entries other than the layers may be missing."""
    blocks = _blocks(params)
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


def _blocks(params: Params) -> tuple[Params, ...]:
    """The blocks of stacked parameters."""
    layers = params["layers"]
    return layers if isinstance(layers, tuple) else (layers,)


def head(params: Params) -> Float[Array, "V D"]:
    """The LM head [V, D], the embedding when tied; logits are `hidden @ head.T`, but for the
    config's `final_softcap`."""
    return params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]["embedding"]


def logits(
    config: DecoderConfig, params: Params, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """float32 logits of hidden states."""
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
    dtype: Any = None,
) -> Float[Array, "B T D"]:
    """Hidden states after the final norm, for tokens with padding on either side.

    Args:
        mask: True at real tokens; positions count them, padding is never attended to.
        remat: what the backward pass recomputes of each block: nothing, all but the matmuls, all.
        mesh: where given, the residual stream is kept sharded by rows over (data, fsdp).
        dtype: compute dtype; the parameters' own where None. To be given in place of parameters
            that are cast beforehand: the embedding's gradient then is a sum in float32.

    Returns:
        In the compute dtype; meaningless where mask is False.
    """
    kernels, first = _kernels(config, params, mesh, dtype), jnp.argmax(mask, -1)
    # for rows that begin at their start
    rolled = "cudnn" in kernels.values() or config.n_recurrent > 0
    if rolled:
        tokens, mask = roll_rows(tokens, first), roll_rows(mask, first)
    x, inputs = _embed(config, params, tokens, mesh, dtype)
    params = params if dtype is None else cast(params, dtype)
    positions = jnp.maximum(jnp.cumsum(mask, -1) - 1, 0)
    mixing = _Mixing(
        config,
        positions,
        kernels,
        lambda kernel, window: attender(kernel, mask, mesh, window=window),
    )

    def recur(inputs: Inputs, filters: Filters) -> Array:
        return recur_rows(_delta(config), mesh, mask, inputs, filters)[0]

    x = _layers(config, params, x, inputs, mixing, recur, remat, mesh)
    return roll_rows(x, -first) if rolled else x


def forward_packed(
    config: DecoderConfig,
    params: Params,
    packing: Packing,
    *,
    remat: Remat = "none",
    mesh: Mesh | None = None,
    dtype: Any = None,
    routed: list[Routed] | None = None,
) -> Float[Array, "X n D"]:
    """`forward` of streams of tokens: the same hidden states, without the padding. A mixture takes
    the experts that `packing` records, if it does.

    Args:
        routed: gets what the routers of all layers did, each leaf [L, X, n, ...], and
            `Routed.mass` [L, E].
    """
    kernels = _kernels(config, params, mesh, dtype, joined=packing.group > 1)
    x, inputs = _embed(config, params, packing.tokens, mesh, dtype, TOKENS)
    params = params if dtype is None else cast(params, dtype)
    mixing = _Mixing(
        config,
        packing.positions,
        kernels,
        lambda kernel, window: attend_packed(kernel, packing, mesh, window),
    )
    recur = recur_packed(config.delta, mesh, packing) if config.delta is not None else None
    given = config, params, x, inputs, mixing, recur, remat, mesh
    real = None if routed is None else packing.real
    return _layers(*given, TOKENS, recorded=packing.experts, routed=routed, real=real)


class _Mixing:
    """How the layers of one call rotate and attend.

    Args:
        positions: [B,T] int32.
        kernels: of each head dim.
        attend: makes an `Attend` of a kernel and a window.
    """

    def __init__(
        self,
        config: DecoderConfig,
        positions: Array,
        kernels: Mapping[int, Any],
        attend: Callable[..., Attend],
    ):
        self._ropes = ByLayer(
            [LayerKind(None, x.rope_theta, x.rotates, head_dim=x.head_dim) for x in config.kinds],
            lambda kind: layer_angles(config, kind, positions),
        )
        self._attends = ByLayer(
            [(kind.window, config.of(kind).head_dim) for kind in config.kinds],
            lambda key: attend(kernels.get(key[1]), key[0]),
        )

    def of(self, layer: Layer) -> tuple[Rope, Attend]:
        number = layer.number
        return self._ropes.choose(number, selected), self._attends.choose(number, switched)


def _at_places(config: DecoderConfig) -> list[Layer]:
    """The layers at each place of a cycle, as a scan has them."""
    cycle, found = config.cycle, []
    numbers = jnp.arange(config.n_layers)
    for i in range(cycle):
        kinds = {config.kinds[j % len(config.kinds)] for j in range(i, config.n_layers, cycle)}
        kind = config.kinds[i]
        alike = len(kinds) == 1
        found.append(Layer(kind, i) if alike else Layer(kind.shape, numbers[i::cycle]))
    return found


def _through(
    config: DecoderConfig,
    body: Callable[..., tuple[Any, Any]],
    x: Any,
    params: Params,
    *more: Any,
    in_turn: bool = False,
) -> tuple[Any, list[Any]]:
    """x through all layers, and what they leave: one entry for each layer or, of stacked
    parameters, for each block, stacked.

    Args:
        body: (x, layer, (parameters, ...)) -> (x, what it leaves); with `in_turn` also (x, layers,
            a list of such tuples, place), of the layer at that place of both.
        more: what `body` gets beside the parameters, in the form of what they leave.
        in_turn: layers of one kind that follow each other in a cycle are a scan too. XLA would else
            compute all blocks of a cycle again for the backward pass before it needs them, which
            took three times the memory of one.
    """
    left = []
    if layout_of(params) == "unstacked":
        for i, given in enumerate(zip(params["layers"], *more, strict=True)):
            x, one = body(x, Layer(config.kinds[i % len(config.kinds)], i), given)
            left.append(one)
        return x, left
    at = _at_places(config)
    numbers = [None if isinstance(layer.number, int) else layer.number for layer in at]

    def alike(layer: Layer) -> Any:
        return layer.kind, isinstance(layer.number, int)

    def one_of(layers: Any, given: Any, x: Any, place: Array) -> tuple[Any, Any]:
        return body(x, layers, given, place)

    def bodies(x: Any, given: Any) -> tuple[Any, Any]:
        found: list[Any] = []
        numbers, each = given
        layers = [
            layer if number is None else Layer(layer.kind, number)
            for layer, number in zip(at, numbers, strict=True)
        ]
        if in_turn and len(layers) > 1:
            for _, run in groupby(zip(layers, each, strict=True), lambda one: alike(one[0])):
                same, of = zip(*run, strict=True)
                x, own = jax.lax.scan(partial(one_of, same, of), x, jnp.arange(len(same)))
                found += [jax.tree.map(lambda leaf, i=i: leaf[i], own) for i in range(len(same))]
            return x, found
        for layer, one in zip(layers, each, strict=True):
            x, own = body(x, layer, one)
            found.append(own)
        return x, found

    return jax.lax.scan(bodies, x, (numbers, list(zip(_blocks(params), *more, strict=True))))


def _layers(
    config: DecoderConfig,
    params: Params,
    x: Array,
    inputs: list[Array],
    mixing: _Mixing,
    recur: Recur | None,
    remat: Remat,
    mesh: Mesh | None,
    *split: AxisName,
    recorded: Array = None,
    routed: list[Routed] | None = None,
    real: Array = None,
) -> Array:
    """All blocks and the final norm, of x [B, T, D].

    Args:
        inputs: as of `_embed`.
        recur: of layers that have a state.
        split: the axis of a stream's tokens.
        recorded: [B, T, L, k] integers (`experts.mix`).
        routed: gets what the routers did.
        real: [B, T] bool, True at tokens (`experts.mix`).
    """
    chosen = None if recorded is None else jnp.moveaxis(recorded, 2, 0)

    def block(
        layer: Layer, carried: tuple[Array, Lent], params: Params, own: Array, chosen: Array
    ) -> tuple[tuple[Array, Lent], Any]:
        x, held = carried[0], dict(zip(config.lenders, carried[1], strict=True))
        rope, attend = mixing.of(layer)
        mixer = recur if layer.kind.recurs else _lending(layer.kind, attend, held)
        options = {"own": own, "recorded": chosen, "real": real}
        x, one = _run(config, layer.kind, params, x, rope, mixer, mesh, *split, **options)
        return (x, tuple(held.values())), one

    def chosen_of(
        layers: Sequence[Layer], place: Array, carried: tuple[Array, Lent], *alike: Any
    ) -> tuple[tuple[Array, Lent], Any]:
        # Chosen where the backward pass computes it again: parameters that were stacked or chosen
        # outside would be kept for it, a second copy of the weights of all layers.
        given = jax.tree.map(lambda *xs: jax.lax.select_n(place, *xs), *alike)
        layer, numbers = layers[0], [layer.number for layer in layers]
        if not isinstance(layer.number, int):
            layer = Layer(layer.kind, jax.lax.select_n(place, *numbers))
        return block(layer, carried, *given)

    def body(
        carried: tuple[Array, Lent], layers: Any, given: Any, place: Array = None
    ) -> tuple[tuple[Array, Lent], Any]:
        run: Callable[..., Any] = partial(block, layers)
        if place is not None:
            run = partial(chosen_of, layers, place)
        if remat != "none":
            run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=False)
        return run(carried, *given)

    given = inputs, _at_blocks(config, params, chosen)
    carried = x, _nothing_lent(config, x)
    (x, _), found = _through(config, body, carried, params, *given, in_turn=remat != "none")
    _report(params, found, routed)
    normed: Array = _norm(config, params)(x)
    return normed


def _at_blocks(config: DecoderConfig, params: Params, each: Array) -> list[Array]:
    """Of an array [L, ...] the part of each block of `params`: of stacked ones [L / cycle, ...], of
    the others [...]. Of None, None."""
    if layout_of(params) == "unstacked":
        return [None] * config.n_layers if each is None else list(each)
    return [None if each is None else each[i :: config.cycle] for i in range(config.cycle)]


Lent = tuple[tuple[Array, Array], ...]
"""Keys and values [B, T, KV, H], of each of `DecoderConfig.lenders` those of the last layer."""


def _nothing_lent(config: DecoderConfig, x: Array) -> Lent:
    of = (config.of(kind) for kind in config.lenders)
    shapes = [(*x.shape[:2], one.n_kv_heads, one.head_dim) for one in of]
    return tuple((jnp.zeros(shape, x.dtype), jnp.zeros(shape, x.dtype)) for shape in shapes)


def _lending(kind: LayerKind, attend: Attend, held: dict[LayerKind, Any]) -> Attend:
    """`attend` of a layer that borrows its keys and values from `held`, where each of
    `DecoderConfig.lenders` keeps its own."""

    def run(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
        if kind.borrows:
            k, v = held[kind.lender]
        elif kind in held:
            held[kind] = k, v
        return attend(q, k, v, *sinks)

    return run


def _run(
    config: DecoderConfig,
    kind: LayerKind,
    layer: Params,
    x: Array,
    rope: Rope,
    attend: Attend | Recur | None,
    mesh: Mesh | None,
    *split: AxisName,
    own: Array = None,
    recorded: Array = None,
    every: bool = False,
    real: Array = None,
) -> tuple[Array, Routed | None]:
    """One block, and what its router did; `attend` and `own` as of `Block`, the last three
    arguments as of `experts.mix`."""
    found: list[Routed] = []

    def through(x: Array, kernels: ExpertKernels, *asked: Array) -> Array:
        assert config.experts is not None
        activate = config.experts.gated(ACTIVATIONS[config.block.activation])
        options = {"recorded": recorded, "every": every, "split": split, "real": real}
        options["frozen"] = config.lora is not None
        out, one = mix(config.experts, activate, mesh, x, kernels, *asked, **options)
        found.append(one)
        return out

    mixes: tuple[Mix, ...] = () if config.experts is None else (through,)
    block = _block(config.of(kind.shape), layer)
    x = _rows(block(x, rope, attend, *mixes, own=own), mesh, *split)
    return x, found[0] if found else None


def _report(params: Params, found: list[Any], routed: list[Routed] | None) -> None:
    """Appends what the routers of all layers did, as `_through` found it."""
    if routed is None or not jax.tree.leaves(found):
        return
    if layout_of(params) == "unstacked":
        routed.append(jax.tree.map(lambda *xs: jnp.stack(xs), *found))
    else:  # the layers of each block
        routed.append(
            jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *found)
        )


def _delta(config: DecoderConfig) -> Delta:
    assert config.delta is not None
    return config.delta


def prefill(
    config: DecoderConfig,
    params: Params,
    tokens: Int[Array, "B W"],
    mask: Bool[Array, "B W"],
    *,
    mesh: Mesh | None = None,
    routed: list[Routed] | None = None,
) -> tuple[Float[Array, "B W D"], Cache]:
    """Hidden states, and the keys and values, of right-padded prompts: a `Cache` of W positions in
    the layout of the parameters, or the states at the last of the real tokens.

    Keys are stored rotated, at the index of their position.

    Args:
        routed: gets what the routers of all layers did, each leaf [L, B, W, ...].
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    mixing = _Mixing(
        config,
        positions,
        _kernels(config, params, mesh),
        lambda kernel, window: attender(kernel, mask, mesh, window=window),
    )
    held: dict[LayerKind, Any] = dict.fromkeys(config.lenders)

    def body(x: Array, layer: Layer, given: tuple[Params, Array]) -> tuple[Array, tuple[Any, Any]]:
        params, own = given
        rope, attend_one = mixing.of(layer)
        attend_one = _lending(layer.kind, attend_one, held)
        written: list[Any] = []

        def attend(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            own = () if layer.kind.borrows else (k, v)
            written.append(tuple(jnp.swapaxes(x, 1, 2) for x in own))
            return attend_one(q, k, v, *sinks)

        def recur(inputs: Inputs, filters: Filters) -> Array:
            out, end = recur_rows(_delta(config), mesh, mask, inputs, filters)
            written.append(end)
            return out

        mixer = recur if layer.kind.recurs else attend
        x, one = _run(config, layer.kind, params, x, rope, mixer, mesh, own=own)
        return x, (written[0], one)

    x, inputs = _embed(config, params, tokens, mesh)
    x, left = _through(config, body, x, params, inputs)
    _report(params, [one for _, one in left], routed)
    return _norm(config, params)(x), [entry for entry, _ in left]


def keys_of(cache: Cache) -> Array:
    """The keys of the first layer that has any."""
    return next(entry[0] for entry in cache if entry and not isinstance(entry, Recurrent))


def decode(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    *,
    used: int,
    live: Bool[Array, " B"] | None = None,
    mesh: Mesh | None = None,
    routed: list[Routed] | None = None,
) -> tuple[Float[Array, "B D"], Cache]:
    """One token for each slot: writes its keys and values, attends to the cache up to its position;
    or moves the states on.

    Args:
        cache: in the layout of the parameters; donate it.
        tokens: the token at `positions`.
        positions: in [0, used).
        used: static bound on positions + 1: only this much of the cache is read, and where a
            kernel does it (`kernels.step_kernel_of`), of each slot what its position reaches.
        live: the slots whose states read the token, which no later token can undo; None: all.
        routed: gets what the routers of all layers did, each leaf [L, B, 1, ...].

    Returns:
        The hidden state that predicts the next token, and the new cache.
    """
    kernels: dict[int, StepKernel | None] = {}
    if layout_of(params) == "unstacked":  # a kernel cannot read a slice of a stacked cache in place
        cached = keys_of(cache).dtype
        kernels = {dim: step_kernel_on(mesh, dim, cached) for dim in config.head_dims}
    mixing = _Mixing(
        config,
        positions[:, None],
        kernels,
        lambda kernel, window: step_attender(kernel, positions, used, mesh, window=window),
    )
    held: dict[LayerKind, Any] = dict.fromkeys(config.lenders)
    reads = jnp.ones(tokens.shape, bool) if live is None else live

    def step(
        x: Array, layer: Layer, params: Params, own: Array, entry: Any, index: Array = None
    ) -> tuple[Array, Any, Any]:
        """A block; its entry of the cache is at an index where that holds several layers."""
        rope, attend_one = mixing.of(layer)
        attend_one = _lending(layer.kind, attend_one, held)
        written: list[Any] = []

        def attend(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            if layer.kind.borrows:
                written.append(())
                return attend_one(q, k, v, *sinks)
            keys = _write(entry[0], k, positions, index)
            values = _write(entry[1], v, positions, index)
            written.append((keys, values))
            return attend_one(q, _layer(keys, index), _layer(values, index), *sinks)

        def recur(inputs: Inputs, filters: Filters) -> Array:
            start = jax.tree.map(lambda x: _layer(x, index), entry)
            out, end = recur_rows(_delta(config), mesh, reads[:, None], inputs, filters, start)
            if index is not None:
                put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
                end = jax.tree.map(put, entry, end)
            written.append(end)
            return out

        mixer = recur if layer.kind.recurs else attend
        x, one = _run(config, layer.kind, params, x, rope, mixer, mesh, own=own, every=True)
        return x, written[0], one

    x, inputs = _embed(config, params, tokens[:, None], mesh)
    if layout_of(params) == "unstacked":

        def body(x: Array, layer: Layer, given: Any) -> tuple[Array, tuple[Any, Any]]:
            x, entry, one = step(x, layer, *given)
            return x, (entry, one)

        x, left = _through(config, body, x, params, inputs, cache)
        updated: Cache = [entry for entry, _ in left]
        found = [one for _, one in left]
    else:
        blocks, at = _blocks(params), _at_places(config)

        def bodies(carry: Any, given: Any) -> tuple[Any, Any]:
            (x, cache), (index, blocks), found = carry, given, []
            updated = []
            for i, (layer, of, entry) in enumerate(zip(at, blocks, cache, strict=True)):
                block, own = of
                if not isinstance(layer.number, int):
                    layer = Layer(layer.kind, index * len(blocks) + i)
                x, entry, one = step(x, layer, block, own, entry, index)
                updated.append(entry)
                found.append(one)
            return (x, updated), found

        indices = jnp.arange(config.n_layers // len(blocks))
        each = indices, list(zip(blocks, inputs, strict=True))
        (x, updated), found = jax.lax.scan(bodies, (x, list(cache)), each)
    _report(params, found, routed)
    return _norm(config, params)(x)[:, 0], updated


def extend(
    config: DecoderConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "B W"],
    positions: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """The cache with the keys and values of W further tokens of each slot, which attend to it.

    Args:
        cache: of at least positions + W positions, in the layout of the parameters.
        positions: of the first of the tokens; what the cache holds from there on is replaced. A
            state begins again at 0, and else is that of the token before.
        lengths: how many of the tokens a state reads, the first ones.
    """
    at = positions[:, None] + jnp.arange(tokens.shape[1])[None]
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    mixing = _Mixing(config, at, {}, lambda _, window: chunk_attender(at, window))
    held: dict[LayerKind, Any] = dict.fromkeys(config.lenders)

    def body(x: Array, layer: Layer, given: tuple[Params, Array, Any]) -> tuple[Array, Any]:
        params, own, entry = given
        rope, attend_one = mixing.of(layer)
        attend_one = _lending(layer.kind, attend_one, held)
        written: list[Any] = []

        def attend(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            if layer.kind.borrows:
                written.append(())
                return attend_one(q, k, v, *sinks)
            new = _write(entry[0], k, positions, None), _write(entry[1], v, positions, None)
            written.append(new)
            return attend_one(q, *new, *sinks)

        def recur(inputs: Inputs, filters: Filters) -> Array:
            goes_on = (positions > 0)[:, None, None, None]
            start = jax.tree.map(lambda x: jnp.where(goes_on, x, jnp.zeros_like(x)), entry)
            out, end = recur_rows(_delta(config), mesh, mask, inputs, filters, start)
            written.append(end)
            return out

        mixer = recur if layer.kind.recurs else attend
        x, _ = _run(config, layer.kind, params, x, rope, mixer, mesh, own=own)
        return x, written[0]

    x, inputs = _embed(config, params, tokens, mesh)
    return _through(config, body, x, params, inputs, cache)[1]


def cast(params: Params, dtype: Any) -> Params:
    """Parameters in `dtype`, but for quantised kernels. Done before the layers are gathered: fsdp
    moves the smaller copy."""

    def one(path: Any, x: Array) -> Array:
        quantised = jnp.issubdtype(x.dtype, jnp.integer) or getattr(path[-1], "key", "") == SCALE
        return x if quantised else x.astype(dtype)

    found: Params = jax.tree_util.tree_map_with_path(one, params)
    return found


def _write(cache: Array, new: Array, positions: Array, index: Array | None) -> Array:
    """cache [(L,) B,KV,S,H] with new [B,W,KV,H] from positions [B] on, of layer `index`, where W is
    1; in these forms SPMD moves no cache, and XLA copies none.
    """
    new = jnp.swapaxes(new, 1, 2).astype(cache.dtype)
    if index is None:
        update: Callable[..., Array] = jax.lax.dynamic_update_slice
        return jax.vmap(lambda c, n, i: update(c, n, (0, i, 0)))(cache, new, positions)
    places = jnp.stack([jnp.broadcast_to(index, positions.shape), positions], 1)
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2),
        inserted_window_dims=(0, 3),
        scatter_dims_to_operand_dims=(0, 3),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(cache, places, new[:, :, 0], dims, unique_indices=True, mode="clip")


def _layer(cache: Array, index: Array | None) -> Array:
    """Keys or values [B, KV, S, H] of one layer."""
    return cache if index is None else jax.lax.dynamic_index_in_dim(cache, index, keepdims=False)


def _kernels(
    config: DecoderConfig,
    params: Params,
    mesh: Mesh | None,
    dtype: Any = None,
    joined: bool = False,
) -> dict[int, Kernel | None]:
    """What attention of each head dim runs in, in `dtype`, that of the parameters where None."""
    dtype = params["embed"]["embedding"].dtype if dtype is None else dtype
    return {dim: kernel_on(mesh, dim, dtype, joined) for dim in config.head_dims}


def _block(config: DecoderConfig, layer: Params) -> Callable[..., Array]:
    return nnx.merge(_block_graph(config), layer)


def _norm(config: DecoderConfig, params: Params) -> Callable[[Array], Array]:
    return nnx.merge(_norm_graph(config), params["norm"])


def _embed(
    config: DecoderConfig,
    params: Params,
    tokens: Array,
    mesh: Mesh | None,
    dtype: Any = None,
    *split: AxisName,
) -> tuple[Array, list[Array]]:
    """Rows of the embedding in `dtype`, its own where None, and scaled where the family does; its
    D is gathered first: a lookup split both ways is replicated. And what each block reads beside
    them (`_at_blocks`).

    Args:
        split: the axis of a stream's tokens.
    """
    table: Array = params["embed"]["embedding"]
    sharding: NamedSharding | None = None
    if mesh is not None:
        vocab = "tensor" if config.vocab_size % mesh.shape["tensor"] == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(vocab, None))
    dtype = table.dtype if dtype is None else jnp.dtype(dtype)
    x = _rows(_look_up(table, tokens, dtype, sharding), mesh, *split)
    if FAMILIES[config.family].scaled_embedding:
        x = x * jnp.asarray(math.sqrt(config.d_model), x.dtype)
    inputs = None
    if config.layer_inputs:
        given = params["layer_inputs"]
        rows = _rows(_look_up(given["embedding"], tokens, dtype, sharding), mesh, *split)
        inputs = nnx.merge(_inputs_graph(config), given)(rows, x)
    return x, _at_blocks(config, params, inputs)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _look_up(table: Array, tokens: Array, dtype: Any, sharding: NamedSharding | None) -> Array:
    """table[tokens] in `dtype`, cast before the table is gathered. Whatever the dtype, the gradient
    is summed in float32: in bfloat16 the sum of a frequent token stops at 256 times a term.
    """
    return _laid_out(table.astype(dtype), sharding)[tokens]


def _look_up_forward(
    table: Array, tokens: Array, dtype: Any, sharding: NamedSharding | None
) -> tuple[Array, Any]:
    return _look_up(table, tokens, dtype, sharding), (table, tokens)  # of the table: its shape


def _look_up_backward(
    dtype: Any, sharding: NamedSharding | None, kept: Any, d_rows: Array
) -> tuple[Array, None]:
    table, tokens = kept
    zeros = jnp.zeros(table.shape, jnp.float32)
    summed = _laid_out(zeros.at[tokens].add(d_rows.astype(jnp.float32)), sharding)
    return summed.astype(table.dtype), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _laid_out(x: Array, sharding: NamedSharding | None) -> Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def _rows(x: Array, mesh: Mesh | None, *tokens: AxisName) -> Array:
    """Keeps the rows of x sharded over (data, fsdp), of a stream its tokens over an axis too: left
    alone, XLA picks odd layouts."""
    if mesh is None:
        return x
    spec = PartitionSpec(ROWS, *tokens, *([None] * (x.ndim - 1 - len(tokens))))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _plain(state: Any) -> Params:
    return nnx.to_pure_dict(state)
