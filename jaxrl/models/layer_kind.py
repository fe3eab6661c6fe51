"""What differs from layer to layer: how far a token attends, how positions rotate, and the shapes
of parameters.

Layers of other shapes are stacks of their own. The layers of a stack share one program, in which
the number of a layer chooses where they differ: by a `lax.switch` around attention, whose masks and
kernels are compiled for their window, and by a selection of the angles. Parameters stay as they are
stacked. (A scan over periods of layers, with a period's blocks one after the other in its body,
took 2 to 5 times the time to compile and up to 5 times the memory: it copies the stacked parameters
where the layers end within a period.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax

from jaxrl.errors import UserError, short
from jaxrl.models.json_fields import DecoderLike, Raw, given, size
from jaxrl.process.json_types import JsonObject


@dataclass(frozen=True)
class LayerKind:
    """How a layer attends, and what it has that the model's other layers have otherwise."""

    window: int | None = None
    """A token attends to itself and the window - 1 before it; None: to all before it."""
    rope_theta: float | None = None
    """Base frequency of its rotary positions, which are not scaled; None: those of the model."""
    rotates: bool = True
    """Whether queries and keys are rotated by their positions at all."""
    recurs: bool = False
    """Whether it has a state (`models.delta`) in place of keys and values."""
    head_dim: int | None = None
    """Of its heads; None: the model's."""
    n_kv_heads: int | None = None
    """None: the model's."""
    d_ff: int | None = None
    """None: the model's."""
    keys_as_values: bool = False
    """Whether it has no projection of values: they are its keys before their norm and rotation."""
    borrows: bool = False
    """Whether it has no keys and values of its own, but reads those of the last layer before it
    that attends as it does and has its own."""

    @property
    def keeps(self) -> bool:
        """Returns whether the layer has keys and values of its own."""
        return not self.recurs and not self.borrows

    @property
    def shape(self) -> LayerKind:
        """Returns one kind for all kinds whose layers have parameters of the same names and
        shapes."""
        return replace(self, window=None, rope_theta=None, rotates=True)

    @property
    def lender(self) -> LayerKind:
        """Returns the kind of the layers whose keys and values this one reads where it borrows."""
        return replace(self, borrows=False, d_ff=None)


class Layer(NamedTuple):
    """One layer, or those that take one place in a scan."""

    kind: LayerKind
    """Of those of a scan, what they have in common (`LayerKind.shape`) where they differ."""
    number: int | jax.Array
    """Of those of a scan that differ an array [] int32; where all are alike, one of them."""


SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(
    raw: Raw,
    window: int | None,
    slides: Callable[[int], bool] = bool,
    rope_theta: float | None = None,
    full: LayerKind | None = None,
) -> tuple[LayerKind, ...]:
    """Reads the kinds of the layers of a `config.json` in which some attend to a window.

    Args:
        window: of those layers; None: there are none.
        slides: whether layer i is one of them, where there are no `layer_types`.
        rope_theta: of those layers, where they have their own.
        full: the others.
    """
    n = size(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if window is not None and slides(i) else FULL for i in range(n)]
    known = (FULL,) if window is None else (FULL, SLIDING)
    if not isinstance(types, list) or len(types) != n or any(kind not in known for kind in types):
        raise UserError(
            f"layer_types={short(repr(types))} is not supported with sliding_window={window}: a"
            f" list of num_hidden_layers={n} is needed, each of {', '.join(known)}"
        )
    sliding = LayerKind(window, rope_theta)
    return tuple(sliding if kind == SLIDING else given(full, LayerKind()) for kind in types)


def read_window(raw: Raw, default: int | None = None) -> tuple[LayerKind, ...]:
    """Reads the kind of layers that all have the `sliding_window` of a `config.json`; null means
    none, and so does one that no sequence is longer than."""
    if raw.get("sliding_window", default) is None:
        return (LayerKind(),)
    window, positions = size(raw, "sliding_window", default), raw.get("max_position_embeddings")
    return (LayerKind(None if positions is not None and window >= positions else window),)


def written_windows(config: DecoderLike) -> JsonObject:
    """Returns `sliding_window` and `layer_types` of a `config.json`."""
    windows = [kind.window for kind in config.kinds] * (config.n_layers // len(config.kinds))
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def read_ropes(raw: Raw, local: str) -> JsonObject:
    """Reads a `config.json` whose `rope_parameters` may be those of each kind of layers: those of
    layers without a window are put where all families have theirs, and the base frequency of the
    others at the key `local`."""
    params = raw.get("rope_parameters")
    if not isinstance(params, dict) or not {FULL, SLIDING} & params.keys():
        return dict(raw)
    full, sliding = (given(params.get(kind), {}) for kind in (FULL, SLIDING))
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise UserError(f"rope_parameters={params!r} must have an object of each kind of layers")
    if given(sliding.get("rope_type"), "default") != "default":
        raise UserError(
            f"rope_type={sliding['rope_type']!r} of {SLIDING} is not supported; supported: default"
        )
    thetas = {"rope_theta": full.get("rope_theta"), local: sliding.get("rope_theta")}
    known = {key: theta for key, theta in thetas.items() if theta is not None}
    return {**raw, "rope_parameters": full, **known}


def written_ropes(config: DecoderLike) -> JsonObject:
    """Returns `rope_parameters` of each kind of layers of a `DecoderConfig`."""
    scaling = {} if config.rope_scaling is None else config.rope_scaling.written()
    local = next((x.rope_theta for x in config.kinds if x.rope_theta), config.rope_theta)
    default = {"rope_type": "default"}
    full = default | scaling | {"rope_theta": config.rope_theta}
    return {"rope_parameters": {FULL: full, SLIDING: default | {"rope_theta": local}}}
