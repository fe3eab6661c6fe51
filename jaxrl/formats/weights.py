"""From named tensors on disk to a sharded parameter tree: every device reads only its own slices.

One table says which Hugging Face tensor fills which parameter. A file format only has to say a
tensor's shape and read a box of it (`Tensors`); `hf.py` and `gguf.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Layout, Params, abstract_params
from jaxrl.models.rules import param_shardings, param_specs
from jaxrl.sharding.reshard import to_host
from jaxrl.sharding.shards import Box, box_of

Index = tuple[slice, ...]

TOP: dict[str, str] = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
}
LAYER: dict[str, str] = {
    "attn_norm/scale": "input_layernorm.weight",
    "attn/q/kernel": "self_attn.q_proj.weight",
    "attn/k/kernel": "self_attn.k_proj.weight",
    "attn/v/kernel": "self_attn.v_proj.weight",
    "attn/o/kernel": "self_attn.o_proj.weight",
    "attn/q/bias": "self_attn.q_proj.bias",
    "attn/k/bias": "self_attn.k_proj.bias",
    "attn/v/bias": "self_attn.v_proj.bias",
    "attn/q_norm/scale": "self_attn.q_norm.weight",
    "attn/k_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
}
"""Parameter path within a block -> tensor name within `model.layers.N.`; kernels are stored
transposed."""

BAND = 64
"""Rows that are transposed at once; bands stay in the cache, 4 times as fast as one copy."""


class Tensors(Protocol):
    """Named tensors on disk, under Hugging Face's names and orientation (kernels [out, in])."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None where there is none of this name."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """A box of a tensor, in the dtype of the file; read-only, it may still lie on disk."""

    def file(self, name: str) -> Path:
        """The file that holds (or should hold) the tensor."""


@dataclass(frozen=True)
class KeptLayers:
    """The tensors of a model of which only some layers are kept, renumbered from 0."""

    tensors: Tensors
    keep: tuple[int, ...]

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.tensors.shape(self._name(name))

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.tensors.read(self._name(name), index)

    def file(self, name: str) -> Path:
        return self.tensors.file(self._name(name))

    def _name(self, name: str) -> str:
        if not name.startswith("model.layers."):
            return name
        _, _, layer, rest = name.split(".", 3)
        return f"model.layers.{self.keep[int(layer)]}.{rest}"


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps one parameter."""

    names: tuple[str, ...]
    """Its tensor or, of a stacked parameter, the tensors of its layers."""
    stacked: bool = False
    transposed: bool = False
    """Checkpoints store the kernels of layers as [out, in]; parameters are [in, out]."""

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of each of the tensors, of a parameter of this shape."""
        one = shape[1:] if self.stacked else shape
        return one[::-1] if self.transposed else one

    def read(self, tensors: Tensors, index: Index, dtype: DTypeLike) -> np.ndarray:
        """The box `index` of the parameter, in `dtype`."""
        out = np.empty([s.stop - s.start for s in index], dtype)
        names, targets, box = self.names, [out], index
        if self.stacked:
            names, targets, box = names[index[0]], list(out), index[1:]
        for target, name in zip(targets, names, strict=True):
            if self.transposed:
                rows = tensors.read(name, box[::-1])
                for at in range(0, len(rows), BAND):
                    target[:, at : at + BAND] = rows[at : at + BAND].astype(dtype).T
            else:
                target[...] = tensors.read(name, box)
        return out


def place_of(path: str, n_layers: int) -> Place:
    """Where a parameter of the decoder is, by its path in either layout."""
    if path in TOP:
        return Place((TOP[path],))
    rest, layers = path.removeprefix("layers/"), range(n_layers)
    stacked = rest in LAYER
    if not stacked:
        layer, rest = rest.split("/", 1)
        layers = range(int(layer), int(layer) + 1)
    names = tuple(f"model.layers.{i}.{LAYER[rest]}" for i in layers)
    return Place(names, stacked, rest.endswith("/kernel"))


def path_string(path: KeyPath) -> str:
    """A jax key path as `layers/attn/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in Hugging Face's orientation."""
    flat = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout="unstacked"))
    leaves = {path_string(path): leaf.shape for path, leaf in flat}
    order = ["embed/embedding"]
    order += [f"layers/{i}/{path}" for i in range(config.n_layers) for path in LAYER]
    order += ["norm/scale", "lm_head/kernel"]
    return stored_shapes((place_of(p, 0), leaves[p]) for p in order if p in leaves)


def stored_shapes(
    parameters: Iterable[tuple[Place, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that hold parameters of these places and shapes."""
    return {name: place.stored(shape) for place, shape in parameters for name in place.names}


def check(tensors: Tensors, expected: dict[str, tuple[int, ...]]) -> None:
    """Raises a UserError for the first tensor that is missing or of another shape."""
    for name, shape in expected.items():
        found = tensors.shape(name)
        if found is None:
            raise UserError(
                f"{tensors.file(name)}: tensor {name} of shape {list(shape)} is missing;"
                " the weights do not belong to the config"
            )
        if found != shape:
            raise UserError(
                f"{tensors.file(name)}: tensor {name} has shape {list(found)},"
                f" the config asks for {list(shape)}"
            )


def load(
    tensors: Tensors,
    config: DecoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    layout: Layout = "stacked",
) -> Params:
    """Parameters of a checkpoint, in `dtype`, sharded by the rules of `models/rules.py`.

    Host memory holds a few slices at a time, a slice being what one device gets of one parameter; a
    slice that several devices share is read once.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    check(tensors, tensor_shapes(config))
    abstract = abstract_params(config, jnp.dtype(dtype), layout)
    if mesh is not None:
        shardings = param_shardings(config, mesh, layout)
        abstract = jax.tree.map(
            lambda leaf, sharding: leaf.update(sharding=sharding), abstract, shardings
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: read_parameter(
            tensors, place_of(path_string(path), config.n_layers), leaf
        ),
        abstract,
    )


def load_head(
    tensors: Tensors,
    config: DecoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Only the LM head [V, D] (the embedding when tied), rows over `tensor` and D over `fsdp`."""
    place = place_of("embed/embedding" if config.tie_embeddings else "lm_head/kernel", 0)
    sharding = None
    if mesh is not None:
        sharding = NamedSharding(mesh, param_specs(config, mesh.shape)["embed"]["embedding"])
    shape = (config.vocab_size, config.d_model)
    check(tensors, stored_shapes([(place, shape)]))
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    return read_parameter(tensors, place, leaf)


def read_parameter(tensors: Tensors, place: Place, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """One parameter, in the dtype and the sharding of `leaf`, box by box.

    Devices that hold the same box share one read. Without a sharding it is one box, on the default
    device.
    """
    if leaf.sharding is None:
        whole = tuple(slice(0, n) for n in leaf.shape)
        return jax.device_put(place.read(tensors, whole, leaf.dtype), may_alias=False)
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        holders.setdefault(box_of(index, leaf.shape), []).append(device)
    pieces: list[jax.Array] = []
    for spans, devices in holders.items():
        box = place.read(tensors, tuple(slice(*span) for span in spans), leaf.dtype)
        pieces += [jax.device_put(box, device, may_alias=False) for device in devices]
        jax.block_until_ready(pieces)
        del box
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def hf_tensors(params: Params) -> Callable[[str], np.ndarray]:
    """Reader of one tensor at a time, by Hugging Face name, of parameters in either layout.

    What it returns is on the host, in the parameters' dtype; one layer of a stacked parameter is
    fetched at a time. Processes that share the parameters' mesh must read in the same order.
    """
    where: dict[str, tuple[Place, jax.Array, int]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        place = place_of(path_string(path), leaf.shape[0])
        where |= {name: (place, leaf, i) for i, name in enumerate(place.names)}

    def read(name: str) -> np.ndarray:
        place, leaf, i = where[name]
        value = to_host(leaf[i] if place.stacked else leaf)
        return value.T if place.transposed else value

    return read
