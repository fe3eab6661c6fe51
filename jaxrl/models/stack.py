"""What a decoder's first block reads, and the blocks one after the other, in either layout of their
parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl.models.attention import Attend, kernel_on
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Routed
from jaxrl.models.families import FAMILIES
from jaxrl.models.kernels import Kernel
from jaxrl.models.layer_kind import Layer, LayerKind
from jaxrl.models.layers import Rope, by_rows, layer_angles, product_of, rms_norm
from jaxrl.models.parameters import Params, at_blocks, blocks_of, layout_of
from jaxrl.sharding.axes import ROWS, WEIGHTS, AxisName
from jaxrl.types import Array, Tree

X = TypeVar("X")
T = TypeVar("T")


def embed(
    config: DecoderConfig,
    params: Params,
    tokens: Array,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    *split: AxisName,
) -> tuple[Array, list[Array]]:
    """Looks up rows of the embedding in `dtype`, its own where None, scaled where the family does
    so; its D is gathered first: a lookup split both ways is replicated. Also returns what each
    block reads beside them (`at_blocks`).

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
    if FAMILIES[config.family].scaled_embedding:
        x = x * jnp.asarray(math.sqrt(config.d_model), x.dtype)
    inputs = None
    if config.layer_inputs:
        given, width = params["layer_inputs"], config.layer_inputs
        rows = by_rows(_look_up(given["embedding"], tokens, *how), mesh, *split)
        by_layer = (*x.shape[:2], config.n_layers, width)
        read = product_of(config, x.reshape(-1, config.d_model), given["projection"].T)
        read = read * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        rows = rows * jnp.asarray(math.sqrt(width), x.dtype)
        both = rms_norm(config, given["norm"], read.reshape(by_layer)) + rows.reshape(by_layer)
        inputs = jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)
    return x, at_blocks(config, params, inputs)


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


def _look_up_forward(
    table: Array, tokens: Array, *how: Hashable
) -> tuple[Array, tuple[Array, Array]]:
    return _look_up(table, tokens, *how), (table, tokens)  # of the table: its shape


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


_look_up.defvjp(_look_up_forward, _look_up_backward)


def mixing(
    config: DecoderConfig,
    positions: Array,
    kernels: Mapping[int, str | None],
    attend: Callable[..., Attend],
) -> Callable[[Layer], tuple[Rope, Attend]]:
    """Returns how each layer of one call rotates and attends.

    Args:
        positions: [B,T] int32.
        kernels: of each head dim.
        attend: makes an `Attend` of a kernel and a window.
    """
    kinds = [LayerKind(None, x.rope_theta, x.rotates, head_dim=x.head_dim) for x in config.kinds]
    windows = [(kind.window, config.of(kind).head_dim) for kind in config.kinds]
    rope_of = _by_layer(
        kinds,
        lambda kind: layer_angles(config, kind, positions),
        lambda i, ropes: jax.tree.map(lambda *xs: jax.lax.select_n(i, *xs), *ropes),
    )
    attend_of = _by_layer(
        windows,
        lambda key: attend(kernels.get(key[1]), key[0]),
        lambda i, attends: lambda *given: jax.lax.switch(i, attends, *given),
    )
    return lambda layer: (rope_of(layer.number), attend_of(layer.number))


def _by_layer(
    keys: Sequence[Hashable],
    make: Callable[..., T],
    among: Callable[[Array, tuple[T, ...]], T],
) -> Callable[[int | Array], T]:
    """Makes `make(keys[i])` for layer i, once for all with the same key (a single key is that of
    all layers), and returns number of a layer -> it; where the number is an array, `among` chooses
    by an index [] int32."""
    distinct = tuple(dict.fromkeys(keys))
    values = tuple(make(key) for key in distinct)
    which = tuple(distinct.index(key) for key in keys)

    def choose(number: int | Array) -> T:
        if len(values) == 1:
            return values[0]
        if isinstance(number, int):
            return values[which[number]]
        return among(jnp.array(which, jnp.int32)[number], values)

    return choose


def kernels_of(
    config: DecoderConfig,
    params: Params,
    mesh: Mesh | None,
    dtype: DTypeLike | None = None,
    joined: bool = False,
) -> dict[int, Kernel | None]:
    """Returns what attention of each head dim runs in, in `dtype`, or that of the parameters where
    None."""
    dtype = params["embed"]["embedding"].dtype if dtype is None else dtype
    return {dim: kernel_on(mesh, dim, dtype, joined) for dim in config.head_dims}


def through(
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
    if layout_of(params) == "unstacked":
        for i, given in enumerate(zip(params["layers"], *more, strict=True)):
            x, one = body(x, Layer(config.kinds[i % len(config.kinds)], i), given)
            left.append(one)
        return x, left
    at, n, indices = [], config.cycle, jnp.arange(config.n_layers)
    for i, kind in enumerate(config.kinds[:n]):  # the layers at each place of a cycle
        kinds = {config.kinds[j % len(config.kinds)] for j in range(i, config.n_layers, n)}
        at.append(Layer(kind, i) if len(kinds) == 1 else Layer(kind.shape, indices[i::n]))
    numbers = [None if isinstance(layer.number, int) else layer.number for layer in at]

    def alike(layer: Layer) -> tuple[LayerKind, bool]:
        return layer.kind, isinstance(layer.number, int)

    def one_of(layers: tuple[Layer, ...], given: Tree, x: X, place: Array) -> tuple[X, Tree]:
        return body(x, layers, given, place)

    def bodies(x: X, given: Tree) -> tuple[X, list[Tree]]:
        found: list[Tree] = []
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

    return jax.lax.scan(bodies, x, (numbers, list(zip(blocks_of(params), *more, strict=True))))


def lending(kind: LayerKind, attend: Attend, held: dict[LayerKind, tuple[Array, Array]]) -> Attend:
    """Returns `attend` for a layer that borrows its keys and values from `held`, where each of
    `DecoderConfig.lenders` keeps its own."""

    def run(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
        if kind.borrows:
            k, v = held[kind.lender]
        elif kind in held:
            held[kind] = k, v
        return attend(q, k, v, *sinks)

    return run


def report(params: Params, found: list[Tree], routed: list[Routed] | None) -> None:
    """Appends what the routers of all layers did, as `through` found it."""
    if routed is None or not jax.tree.leaves(found):
        return
    if layout_of(params) == "unstacked":
        routed.append(jax.tree.map(lambda *xs: jnp.stack(xs), *found))
    else:  # the layers of each block
        routed.append(
            jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *found)
        )


def delta_of(config: DecoderConfig) -> Delta:
    assert config.delta is not None
    return config.delta
