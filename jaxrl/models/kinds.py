"""What differs from layer to layer: how far a token attends, and how positions rotate.

The layers of a scan share one program, in which the number of a layer chooses: by a `lax.switch`
around attention, whose masks and kernels are compiled for their window, and by a selection of the
angles. Parameters stay as they are stacked. (A scan over periods of layers, with a period's blocks
one after the other in its body, took 2 to 5 times the time to compile and up to 5 times the memory:
it copies the stacked parameters where the layers end within a period.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
Layer = int | jax.Array | None
"""A layer's number: of a scan an array [] int32, or None where all layers are alike."""


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends."""

    window: int | None = None
    """A token attends to itself and the window - 1 before it; None: to all before it."""
    rope_theta: float | None = None
    """Base frequency of its rotary positions, which are not scaled; None: those of the model."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions at all."""


class ByLayer(Generic[T]):
    """What layers have, made once for all that have the same."""

    def __init__(self, keys: Sequence[Hashable], make: Callable[..., T]):
        """Of layer i it is `make(keys[i])`; one key is that of all layers."""
        distinct = tuple(dict.fromkeys(keys))
        self.values = tuple(make(key) for key in distinct)
        self._which = tuple(distinct.index(key) for key in keys)

    def choose(self, layer: Layer, among: Callable[[jax.Array, tuple[T, ...]], T]) -> T:
        """Of one layer; of a scan's, `among` chooses by an index [] int32."""
        if len(self.values) == 1:
            return self.values[0]
        assert layer is not None
        if isinstance(layer, int):
            return self.values[self._which[layer]]
        return among(jnp.array(self._which, jnp.int32)[layer], self.values)


def switched(
    index: jax.Array, functions: tuple[Callable[..., jax.Array], ...]
) -> Callable[..., jax.Array]:
    """The function of that index."""
    return lambda *given: jax.lax.switch(index, functions, *given)


def selected(index: jax.Array, trees: tuple[T, ...]) -> T:
    """The tree of that index, of trees with arrays of the same shapes."""
    found: T = jax.tree.map(lambda *xs: jax.lax.select_n(index, *xs), *trees)
    return found
