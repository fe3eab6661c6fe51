"""From named tensors on disk to a sharded parameter tree: every device reads only its own slices.

One table says which Hugging Face tensor fills which parameter. A file format only has to say a
tensor's shape and read a box of it (`Tensors`); `hf.py` and `gguf.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Layout, Params, abstract_params
from jaxrl.models.rules import param_shardings, param_specs
from jaxrl.sharding.reshard import to_host

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
"""Rows that are transposed at once."""


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


def path_string(path: Any) -> str:
    """A jax key path as `layers/attn/q/kernel`."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in Hugging Face's orientation."""
    flat = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout="unstacked"))
    leaves = {path_string(path): leaf.shape for path, leaf in flat}
    order = ["embed/embedding"]
    order += [f"layers/{i}/{path}" for i in range(config.n_layers) for path in LAYER]
    order += ["norm/scale", "lm_head/kernel"]
    return {_tensor_name(p): _hf_shape(p, leaves[p]) for p in order if p in leaves}


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
    dtype: Any = jnp.float32,
    layout: Layout = "stacked",
) -> Params:
    """Parameters of a checkpoint, in `dtype`, sharded by the rules of `sharding/rules.py`.

    Host memory holds a few slices at a time, a slice being what one device gets of one parameter; a
    slice that several devices share is read once.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    check(tensors, tensor_shapes(config))
    abstract = abstract_params(config, jnp.dtype(dtype), layout)
    if mesh is None:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: _whole(tensors, config, path_string(path), leaf), abstract
        )
    shardings = param_shardings(config, mesh, layout)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, sharding: _sharded(tensors, config, path_string(path), leaf, sharding),
        abstract,
        shardings,
    )


def load_head(
    tensors: Tensors, config: DecoderConfig, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Only the LM head [V, D] (the embedding when tied), rows over `tensor` and D over `fsdp`."""
    path = "embed/embedding" if config.tie_embeddings else "lm_head/kernel"
    shape = (config.vocab_size, config.d_model)
    check(tensors, {_tensor_name(path): shape})
    leaf = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if mesh is None:
        return _whole(tensors, config, path, leaf)
    spec = param_specs(config, mesh.shape)["embed"]["embedding"]
    return _sharded(tensors, config, path, leaf, NamedSharding(mesh, spec))


def hf_tensors(params: Params) -> Callable[[str], np.ndarray]:
    """Reader of one tensor at a time, by Hugging Face name, of parameters in either layout.

    What it returns is on the host, in the parameters' dtype; one layer of a stacked parameter is
    fetched at a time. Processes that share the parameters' mesh must read in the same order.
    """
    flat = jax.tree_util.tree_leaves_with_path(params)
    leaves = {path_string(path): leaf for path, leaf in flat}
    stacked = not isinstance(params["layers"], list)
    where: dict[str, tuple[str, int | None]] = {}
    for path, leaf in leaves.items():
        if stacked and path.startswith("layers/"):
            for i in range(leaf.shape[0]):
                where[_tensor_name(f"layers/{i}/{path.removeprefix('layers/')}")] = (path, i)
        else:
            where[_tensor_name(path)] = (path, None)

    def read(name: str) -> np.ndarray:
        path, i = where[name]
        value = to_host(leaves[path] if i is None else leaves[path][i])
        return value.T if path.endswith("/kernel") and not path.startswith("lm_head") else value

    return read


def _tensor_name(path: str) -> str:
    """Tensor name of an unstacked parameter path."""
    if path in TOP:
        return TOP[path]
    _, layer, rest = path.split("/", 2)
    return f"model.layers.{layer}.{LAYER[rest]}"


def _transposed(path: str) -> bool:
    return path.endswith("/kernel") and path not in TOP


def _hf_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if _transposed(path) else shape


def _whole(
    tensors: Tensors, config: DecoderConfig, path: str, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    box = _read_box(tensors, config, path, leaf, tuple(slice(0, n) for n in leaf.shape))
    return jax.device_put(box, may_alias=False)


def _sharded(
    tensors: Tensors,
    config: DecoderConfig,
    path: str,
    leaf: jax.ShapeDtypeStruct,
    sharding: NamedSharding,
) -> jax.Array:
    """One parameter, box by box; devices that hold the same box share one read."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
        holders.setdefault(spans, []).append(device)
    pieces: list[jax.Array] = []
    for spans, devices in holders.items():
        box = _read_box(tensors, config, path, leaf, tuple(slice(*span) for span in spans))
        pieces += [jax.device_put(box, device, may_alias=False) for device in devices]
        jax.block_until_ready(pieces)
        del box
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)


def _read_box(
    tensors: Tensors,
    config: DecoderConfig,
    path: str,
    leaf: jax.ShapeDtypeStruct,
    index: Index,
) -> np.ndarray:
    """The box `index` of a parameter, cast to its dtype."""
    out = np.empty([s.stop - s.start for s in index], leaf.dtype)
    for target, tensor_path, box in _parts(config, path, out, index):
        if _transposed(tensor_path):
            _transpose_into(target, tensors.read(_tensor_name(tensor_path), box[::-1]))
        else:
            target[...] = tensors.read(_tensor_name(tensor_path), box)
    return out


def _transpose_into(target: np.ndarray, rows: np.ndarray) -> None:
    """target = rows.T, cast, in bands that stay in the cache: 4 times faster than in one copy."""
    for at in range(0, len(rows), BAND):
        target[:, at : at + BAND] = rows[at : at + BAND].astype(target.dtype).T


def _parts(
    config: DecoderConfig, path: str, out: np.ndarray, index: Index
) -> Iterator[tuple[np.ndarray, str, Index]]:
    """(view of `out`, unstacked path, box of that tensor): one a layer where `path` is stacked."""
    rest = path.removeprefix("layers/")
    if path in TOP or rest not in LAYER:
        yield out, path, index
        return
    for i in range(config.n_layers)[index[0]]:
        yield out[i - index[0].start], f"layers/{i}/{rest}", index[1:]
