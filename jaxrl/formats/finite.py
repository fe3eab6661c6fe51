"""What is said where a model computes numbers that are not finite: the weight that holds them, or
the layer whose output does first. Nothing here runs before such numbers were seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import NotFinite
from jaxrl.formats.weights import leaves_by_path, places
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import Params
from jaxrl.sharding.axes import row_shards
from jaxrl.sharding.reshard import to_host
from jaxrl.types import Array, Tree

SHOWN = 3
"""Names of arrays in a message."""


def broken_rows(output: Tree) -> Array:
    """Finds the rows of arrays [B, ...] that are not finite, as [B] bool. Log-probs may be minus
    infinity; states may not.

    Args:
        output: a teacher's signal or the like, of jax or numpy, with any values but NaN at padding.
    """
    broken = False
    for path, x in leaves_by_path(output).items():
        if jnp.issubdtype(x.dtype, jnp.inexact):
            numpy = np if isinstance(x, np.ndarray) else jnp
            wrong = ~numpy.isfinite(x) if path.endswith("hidden") else numpy.isnan(x)
            broken = broken | wrong.reshape(len(x), -1).any(-1)
    return broken


def not_finite(
    what: str,
    params: Params | None,
    config: DecoderConfig | None = None,
    tokens: Sequence[int] | np.ndarray = (),
    mesh: Mesh | None = None,
) -> NotFinite:
    """Makes the error about a model whose output is not finite.

    Args:
        what: the output, as in "the logits of prompt 3".
        config: of a decoder; its weights are named as in a checkpoint, and its layers are tried.
        tokens: a sequence of which the output is not finite.
    """
    assert params is not None, "they have just been used"
    try:
        where = _broken_weights(params, config, mesh)
        if not where and config is not None and len(tokens):
            where = _first_layer(params, config, tokens, mesh)
    except Exception as error:  # as where there is no memory for it: the error itself says enough
        where = f"where they begin could not be found ({type(error).__name__})"
    return NotFinite(
        f"{what} are not finite (NaN or infinity): {where or 'all weights are finite'}"
    )


def check_finite(what: str, params: Params, config: DecoderConfig, mesh: Mesh | None) -> None:
    """Raises NotFinite where a decoder's weights are not finite; reads all of them."""
    if _broken_weights(params, config, mesh):
        raise not_finite(what, params, config, mesh=mesh)


def _broken_weights(params: Params, config: DecoderConfig | None, mesh: Mesh | None) -> str:
    """Says which arrays hold such numbers; "" where none does."""
    leaves = leaves_by_path(params)
    leaves = {path: x for path, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    layout: Any = "unstacked" if isinstance(params.get("layers"), list) else "stacked"
    places_of = {} if config is None else places(config, layout)

    def is_finite(path: str, x: Array) -> Array:
        several = len(places_of[path].several) if path in places_of else 0
        return jnp.isfinite(x).all(tuple(range(several, x.ndim))).ravel()

    def flags(leaves: dict[str, Array]) -> dict[str, Array]:
        return {path: is_finite(path, x) for path, x in leaves.items()}

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    found = jax.jit(flags, out_shardings=everywhere)(leaves)
    broken = []
    for path, finite in found.items():
        names = places_of[path].names if path in places_of else (path,)
        broken += [names[i] for i in np.flatnonzero(~np.asarray(to_host(finite)))]
    broken = list(dict.fromkeys(broken))
    if not broken:
        return ""
    more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
    return f"the weights hold such numbers, in {', '.join(broken[:SHOWN])}{more}"


def _first_layer(
    params: Params, config: DecoderConfig, tokens: Sequence[int] | np.ndarray, mesh: Mesh | None
) -> str:
    """Says after which layer they begin in a sequence, which is run once more."""
    rows = 1 if mesh is None else row_shards(mesh.shape)
    given = np.tile(np.asarray(tokens, np.int32), (rows, 1))

    def run(params: Params, tokens: Array, mask: Array) -> list[Array]:
        if not isinstance(params["layers"], list):
            params = parameters.unstack(params)
        outputs: list[Array] = []
        with decoder.watch_layers(outputs):
            hidden, _ = decoder.prefill(config, params, tokens, mask, mesh=mesh)
        outputs += [hidden, decoder.token_logits(config, params, hidden)]
        return [jnp.isfinite(x).all() for x in outputs]

    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    finite = jax.jit(run, out_shardings=everywhere)(params, given, np.ones_like(given, bool))
    names = ["the embedding", *(f"layer {i}" for i in range(config.n_layers))]
    names += ["the final norm", "the LM head"]
    for name, fine in zip(names, finite, strict=True):
        if not bool(to_host(fine)):
            dtype = params["norm"]["scale"].dtype.name
            return (
                f"the weights are finite, and the output of {name} (of {config.n_layers} layers,"
                f" from 0) is the first that is not, in {dtype}"
            )
    return "the weights are finite, and so is every layer's output for the same tokens at once"
