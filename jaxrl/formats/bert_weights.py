"""The weights of a BERT-like encoder, from the tensors of its checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl.formats import weights
from jaxrl.formats.weights import Place
from jaxrl.models import bert
from jaxrl.models.encoder_config import FAMILIES, EncoderConfig
from jaxrl.models.parameters import Params


def load(
    tensors: weights.Tensors,
    config: EncoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """Returns parameters of a checkpoint in `dtype`; on a mesh each device reads its slices.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    places = _places(tensors, config)
    weights.check(tensors, weights.stored_shapes(places.values()))
    layouts = {} if mesh is None else bert.specs(config, mesh.shape)
    values = {}
    for path, place in places.items():
        sharding = None if mesh is None else NamedSharding(mesh, layouts[path])
        leaf = jax.ShapeDtypeStruct(place.shape, dtype, sharding=sharding)
        values[path] = weights.read_parameter(tensors, place, leaf)
    return bert.tree(values)


def _places(tensors: weights.Tensors, config: EncoderConfig) -> dict[str, Place]:
    """Returns path -> where the parameter is; checkpoints with a head put a prefix to names."""
    prefix, shapes = FAMILIES[config.family].prefix, bert.shapes(config)
    if tensors.shape(f"{prefix}{bert.TOP['embed/word'][0]}") is None:
        prefix = ""
    places = {p: Place(shapes[p], (f"{prefix}{name}",)) for p, (name, _) in bert.TOP.items()}
    for rest, (name, _) in bert.LAYER.items():
        path, transposed = f"layers/{rest}", rest.endswith("/kernel")
        names = tuple(f"{prefix}encoder.layer.{i}.{name}" for i in range(config.n_layers))
        places[path] = Place(shapes[path], names, len(names), transposed=transposed)
    return places
