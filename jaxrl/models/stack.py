"""The blocks of a decoder, one after the other, in either layout of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl.models.attention import Attend, kernel_on
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Routed
from jaxrl.models.kernels import Kernel
from jaxrl.models.layer_kind import ByLayer, Layer, LayerKind, selected, switched
from jaxrl.models.layers import Rope, layer_angles
from jaxrl.models.parameters import Params, blocks_of, layout_of
from jaxrl.types import Array, Tree

X = TypeVar("X")


class Mixing:
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
        kernels: Mapping[int, str | None],
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
    at = at_places(config)
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


def at_places(config: DecoderConfig) -> list[Layer]:
    """Returns the layers at each place of a cycle, as a scan has them."""
    cycle, found = config.cycle, []
    numbers = jnp.arange(config.n_layers)
    for i in range(cycle):
        kinds = {config.kinds[j % len(config.kinds)] for j in range(i, config.n_layers, cycle)}
        kind = config.kinds[i]
        alike = len(kinds) == 1
        found.append(Layer(kind, i) if alike else Layer(kind.shape, numbers[i::cycle]))
    return found


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
