"""The weights of a BERT-like encoder, from the tensors of its checkpoint."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.formats import weights
from jaxrl.models import bert
from jaxrl.models.decoder import Params
from jaxrl.models.encoder_config import FAMILIES, EncoderConfig


def check(tensors: weights.Tensors, config: EncoderConfig) -> None:
    """Raises a UserError for the first tensor that is missing or of another shape."""
    prefix = _prefix(tensors, config)
    found = bert.shapes(config)
    expected = {f"{prefix}{name}": found[path] for path, (name, _) in bert.TOP.items()}
    for i in range(config.n_layers):
        for path, (name, _) in bert.LAYER.items():
            shape = found[f"layers/{path}"][1:]
            expected[f"{prefix}encoder.layer.{i}.{name}"] = shape[::-1]
    weights.check(tensors, expected)


def load(
    tensors: weights.Tensors,
    config: EncoderConfig,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
) -> Params:
    """Parameters of a checkpoint in `dtype`; where there is a mesh, each device reads its slices.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    check(tensors, config)
    prefix = _prefix(tensors, config)
    values = {}
    layouts = {} if mesh is None else bert.specs(config, mesh.shape)
    for path, shape in bert.shapes(config).items():
        if mesh is None:
            whole = tuple(slice(0, n) for n in shape)
            values[path] = jnp.asarray(_read(tensors, prefix, path, whole, dtype))
        else:
            values[path] = _sharded(
                tensors, prefix, path, shape, NamedSharding(mesh, layouts[path]), dtype
            )
    return bert.tree(values)


def _prefix(tensors: weights.Tensors, config: EncoderConfig) -> str:
    """What stands before every tensor's name: checkpoints with a head name the encoder."""
    prefix = FAMILIES[config.family].prefix
    return prefix if tensors.shape(f"{prefix}{bert.TOP['embed/word'][0]}") is not None else ""


def _read(
    tensors: weights.Tensors, prefix: str, path: str, index: weights.Index, dtype: Any
) -> np.ndarray:
    """The box `index` of a parameter, in `dtype`."""
    if path in bert.TOP:
        return np.asarray(tensors.read(prefix + bert.TOP[path][0], index)).astype(dtype)
    name = bert.LAYER[path.removeprefix("layers/")][0]
    layers, *box = index
    out = np.empty([s.stop - s.start for s in index], dtype)
    for i in range(layers.start, layers.stop):
        values = tensors.read(f"{prefix}encoder.layer.{i}.{name}", tuple(box[::-1]))
        out[i - layers.start] = values.T
    return out


def _sharded(
    tensors: weights.Tensors,
    prefix: str,
    path: str,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    dtype: Any,
) -> jax.Array:
    """One parameter, box by box; a box that several devices hold is read once."""
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def box(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device here holds a box"
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        if spans not in read:
            slices = tuple(slice(*span) for span in spans)
            read[spans] = _read(tensors, prefix, path, slices, dtype)
        return read[spans]

    return jax.make_array_from_callback(shape, sharding, box)
