"""From named tensors on disk to a sharded parameter tree: every device reads only its own slices.

The entry of a model's family says which Hugging Face tensor fills which parameter. A file format
only has to say a tensor's shape and read a box of it (`Tensors`); `hf.py` and `gguf.py` do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxrl.errors import UserError, short
from jaxrl.models import bert, lora, parameters
from jaxrl.models.config import EMBEDDING, HEAD, DecoderConfig
from jaxrl.models.families import FAMILIES
from jaxrl.models.parameters import Layout, Params
from jaxrl.sharding.reshard import Box, box_of, to_host
from jaxrl.types import Tree

Index = tuple[slice, ...]

LAYERS = "model.layers."
"""How names of tensors of layers begin."""
_OF_LAYER = re.compile(r"(?:model\.layers|blk)\.([^.]*)\.(.+)\.(?:weight|bias)")
"""A weight of a layer: no frequencies, as old checkpoints have, or scales of quantised caches."""
BAND = 64
"""Rows that are transposed at once; bands stay in the cache, 4 times as fast as one copy."""
COMPARED = 4096
"""Rows of an embedding and a head that are compared at once."""


_GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<n>\d{5})\.gguf")


class Tensors(Protocol):
    """Named tensors on disk, under Hugging Face's names and orientation (kernels [out, in])."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns shape of a tensor; None where there is none of this name."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns a box of a tensor in the file's dtype; read-only, it may still lie on disk."""

    def file(self, name: str) -> Path:
        """Returns the file that holds (or should hold) the tensor."""


class Derived:
    """Tensors that are those of a file, or are computed from them."""

    tensors: Tensors

    def stored_name(self, name: str) -> str:
        return name

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.tensors.shape(self.stored_name(name))

    def read(self, name: str, index: Index) -> np.ndarray:
        return self.tensors.read(self.stored_name(name), index)

    def file(self, name: str) -> Path:
        return self.tensors.file(self.stored_name(name))


_APART = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TOGETHER = re.compile(r"(.*experts)\.(gate_up|down)_proj")


@dataclass(frozen=True)
class ExpertTensors(Derived):
    """The tensors of a mixture of experts by its family's names, where they are stored the other
    way: one for each projection of an expert [out, in], or one for all experts [E, out, in] with
    the rows of `up` behind those of `gate`. transformers 5 writes models of a family in both
    ways."""

    tensors: Tensors
    count: int
    """Experts of a layer."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        if (stored := self.tensors.shape(name)) is not None:
            return stored
        if match := _TOGETHER.fullmatch(name):
            shapes = [
                self.tensors.shape(part) for e in range(self.count) for part in _parts(match, e)
            ]
            if None in shapes or len(set(shapes)) > 1:
                return None  # the first that is missing is told under the name of all
            rows, columns = shapes[0] or ()
            return self.count, rows * len(shapes) // self.count, columns
        if match := _APART.fullmatch(name):
            whole, share = _whole(match)
            of_all = self.tensors.shape(whole) or ()
            if len(of_all) == 3 and int(match[2]) < of_all[0]:
                return of_all[1] // share, of_all[2]
        return None

    def read(self, name: str, index: Index) -> np.ndarray:
        if self.tensors.shape(name) is not None:
            return self.tensors.read(name, index)
        if match := _TOGETHER.fullmatch(name):
            experts, rows, columns = index
            read = partial(self._rows, rows=rows, columns=columns)
            return np.stack([read(_parts(match, e)) for e in range(experts.start, experts.stop)])
        match = _APART.fullmatch(name)
        assert match is not None and self.tensors.shape(name) is None
        rows, columns = index
        whole, _ = _whole(match)
        expert, shape = int(match[2]), self.shape(name)
        assert shape is not None
        first = shape[0] * (match[3] == "up")
        box = slice(expert, expert + 1), slice(rows.start + first, rows.stop + first), columns
        return self.tensors.read(whole, box)[0]

    def _rows(self, parts: Sequence[str], rows: slice, columns: slice) -> np.ndarray:
        """Reads rows of tensors that lie one behind the other."""
        found, start = [], 0
        for part in parts:
            shape = self.tensors.shape(part)
            assert shape is not None
            first, last = max(rows.start - start, 0), min(rows.stop - start, shape[0])
            if first < last:
                found.append(self.tensors.read(part, (slice(first, last), columns)))
            start += shape[0]
        return np.concatenate(found)

    def file(self, name: str) -> Path:
        match = _TOGETHER.fullmatch(name)
        if self.tensors.shape(name) is None and match is not None:
            name = _parts(match, 0)[0]
        return self.tensors.file(name)


def _parts(match: re.Match[str], expert: int) -> list[str]:
    return [f"{match[1]}.{expert}.{part}_proj.weight" for part in match[2].split("_")]


def _whole(match: re.Match[str]) -> tuple[str, int]:
    """Returns the tensor of all experts that holds one of an expert, and how many such it holds of
    each expert."""
    name, share = ("down", 1) if match[3] == "down" else ("gate_up", 2)
    return f"{match[1]}.{name}_proj", share


@dataclass(frozen=True)
class KeptLayers(Derived):
    """The tensors of a model of which only some layers are kept, renumbered from 0."""

    tensors: Tensors
    keep: tuple[int, ...]

    def stored_name(self, name: str) -> str:
        if not name.startswith(LAYERS):
            return name
        layer, _, rest = name.removeprefix(LAYERS).partition(".")
        return f"{LAYERS}{self.keep[int(layer)]}.{rest}"


def rounded(tensors: Tensors, kind: lora.Quantisation, name: str, index: Index) -> np.ndarray:
    """Returns a box of a kernel with the values that it stands for once it is quantised, in
    float32."""
    rows, columns = index
    shape = tensors.shape(name)
    assert shape is not None
    block = lora.quantisation_block(shape[1])
    first = columns.start // block * block
    box = tensors.read(name, (rows, slice(first, -(-columns.stop // block) * block)))
    with _on_cpu():
        whole = _round_trip(kind, np.asarray(box, np.float32).T, block)
    return np.asarray(whole).T[:, columns.start - first : columns.stop - first]


@dataclass(frozen=True)
class Place:
    """Where a checkpoint keeps one parameter."""

    shape: tuple[int, ...]
    """Of the parameter."""
    names: tuple[str, ...]
    """Its tensor or, of a parameter of several layers or experts, the tensors of these: those of a
    layer next to each other."""
    layers: int = 0
    """Its first dim where it is stacked, else 0."""
    experts: int = 0
    """The dim after that where it is of experts, else 0."""
    transposed: bool = False
    """Checkpoints store the kernels of layers as [out, in]; parameters are [in, out]."""
    first: int = 0
    """The row of its tensors that the parameter begins at, where other parameters share them; the
    column, where they alternate."""
    step: int = 1
    """How many parameters alternate by columns."""

    @property
    def several(self) -> tuple[int, ...]:
        """Returns its first dims, of which each combination is a tensor."""
        return tuple(n for n in (self.layers, self.experts) if n)

    @property
    def stored(self) -> tuple[int, ...]:
        """Returns shape of its part of each of the tensors."""
        one = self.shape[len(self.several) :]
        one = (*one[:-2], one[-1], one[-2]) if self.transposed else one
        return (*one[:-1], one[-1] * self.step)

    @property
    def rows(self) -> int:
        """Returns which dim of its tensors `first` counts."""
        return -2 if self.transposed else 0

    @property
    def end(self) -> int:
        """Returns the row of its tensors behind its own."""
        return self.first + self.stored[self.rows]

    def read(self, tensors: Tensors, index: Index, dtype: DTypeLike) -> np.ndarray:
        """Returns the box `index` of the parameter, in `dtype`."""
        out = np.empty([s.stop - s.start for s in index], dtype)
        leading, box = index[: len(self.several)], index[len(self.several) :]
        names = np.reshape(self.names, self.several)[leading].reshape(-1)
        targets = out.reshape(len(names), *[s.stop - s.start for s in box])
        box = (*box[:-2], box[-1], box[-2]) if self.transposed else box
        moved = list(box)
        if self.step > 1:
            start, stop = (n * self.step + self.first for n in (box[-1].start, box[-1].stop))
            moved[-1] = slice(start, stop - self.step + 1, self.step)
        else:
            at = box[self.rows]
            moved[self.rows] = slice(at.start + self.first, at.stop + self.first)
        box = tuple(moved)
        for target, name in zip(targets, names, strict=True):
            if self.transposed:
                whole = tensors.read(str(name), box)
                kernels = [(target, whole)] if whole.ndim == 2 else zip(target, whole, strict=True)
                for own, rows in kernels:
                    for row in range(0, len(rows), BAND):
                        own[:, row : row + BAND] = rows[row : row + BAND].astype(dtype).T
            else:
                target[...] = tensors.read(str(name), box)
        return out


def gguf_parts(name: str) -> list[str]:
    """Returns the names of all files of a GGUF model of which one is named: itself, or those of
    `NAME-00001-of-00003.gguf`, whose number of files is bounded by what a name can say."""
    match = _GGUF_PART.fullmatch(name)
    if match is None or not 1 <= int(match["part"]) <= int(match["n"]):
        return [name]
    n = match["n"]
    return [f"{match['stem']}-{part:05}-of-{n}.gguf" for part in range(1, int(n) + 1)]


def places(config: DecoderConfig, layout: Layout = "unstacked") -> dict[str, Place]:
    """Returns parameter path -> where it is, in the order in which parameters are written; adapters
    have a format of their own, and files of quantised kernels are not read."""
    abstract = leaves_by_path(parameters.abstract_params(config.plain, layout=layout))
    shapes = {path: leaf.shape for path, leaf in abstract.items()}
    stacked, n = layout == "stacked", config.n_layers
    blocks = block_layers(config) if stacked else {f"layers/{i}": range(i, i + 1) for i in range(n)}
    alternating = FAMILIES[config.family].alternating
    experts = 0 if config.experts is None else config.experts.count
    top = {path: Place(p.shape, (p.tensor,)) for path, p in config.top.items()}
    found = {"embed/embedding": top["embed/embedding"]}
    for prefix, numbers in blocks.items():
        rows: dict[str, int] = {}
        table = config.layer_of(config.kinds[numbers[0] % len(config.kinds)]).parameters
        for rest, parameter in table.items():
            path, name = f"{prefix}/{rest}", parameter.tensor
            by_expert = "{expert}" in name  # else one tensor of all experts
            each = [name.format(expert=e) for e in range(experts)] if by_expert else [name]
            names = tuple(f"model.layers.{i}.{one}" for i in numbers for one in each)
            dims = len(numbers) * stacked, len(each) * by_expert
            alternates = alternating and "/experts/" in rest and not by_expert
            transposed = rest.endswith("/kernel") and not alternates
            first, step = rows.get(name, 0), 1
            if alternates:
                sharing = [own for own, other in table.items() if other.tensor == name]
                first, step = sharing.index(rest), len(sharing)
            found[path] = Place(shapes[path], names, *dims, transposed, first, step)
            rows[name] = found[path].end
    found |= top
    assert found.keys() == shapes.keys()
    return found


def block_layers(config: DecoderConfig) -> dict[str, range]:
    """Returns path of each block of stacked parameters -> the layers that it holds."""
    n, cycle = config.n_layers, config.cycle
    if cycle == 1:
        return {"layers": range(n)}
    return {f"layers/{i}": range(i, n, cycle) for i in range(cycle)}


def leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Returns path, such as `layers/attn/q/kernel` -> leaf."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of every tensor of the checkpoint, in Hugging Face's orientation."""
    return stored_shapes(places(config).values())


def stored_shapes(places: Iterable[Place]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the tensors that hold parameters of these places; those that share a
    tensor come in the order of its rows."""
    found: dict[str, tuple[int, ...]] = {}
    for place in places:
        dims = list(place.stored)
        if place.step == 1:
            dims[place.rows] = place.end
        found |= dict.fromkeys(place.names, tuple(dims))
    return found


def held_against(config: DecoderConfig, tensors: Tensors) -> DecoderConfig:
    """Returns the config as the tensors have it: untied where they have a head that is not the
    embedding, whatever the config says; transformers does the same.

    A head that differs does so in the first rows; one that is equal is read as a whole.
    """
    shape = tensors.shape(HEAD)
    if not config.tie_embeddings or shape is None:
        return config
    if shape != tensors.shape(EMBEDDING) or len(shape) != 2:
        return replace(config, tie_embeddings=False)
    count, width = shape

    def same(rows: slice) -> bool:
        a, b = (tensors.read(name, (rows, slice(0, width))) for name in (EMBEDDING, HEAD))
        kind = np.dtype(f"u{a.dtype.itemsize}")  # of one dtype, the same bits
        if a.dtype == b.dtype:
            return np.array_equal(a.view(kind), b.view(kind))
        return np.array_equal(a.astype(np.float32), b.astype(np.float32))

    bands = (slice(at, at + COMPARED) for at in range(0, count, COMPARED))
    return config if all(map(same, bands)) else replace(config, tie_embeddings=False)


def name_experts(tensors: Tensors, config: DecoderConfig) -> Tensors:
    """Returns the tensors of files under the names that the config's family has."""
    names = (name for name in tensor_shapes(config) if "experts." in name)
    as_named = all(tensors.shape(name) is not None for name in names)
    if config.experts is None or as_named or FAMILIES[config.family].alternating:
        return tensors
    return ExpertTensors(tensors, config.experts.count)


def check_shapes(tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a UserError for the first tensor that is missing or of another shape."""
    for name, shape in expected.items():
        found = tensors.shape(name)
        if found is None:
            untied = name == HEAD
            way_out = "; if its head is the embedding, set tie_word_embeddings=true" * untied
            raise UserError(
                f"{tensors.file(name)}: tensor {name} of shape {list(shape)} is missing;"
                f" the weights do not belong to the config{way_out}"
            )
        if found != shape:
            raise UserError(
                f"{tensors.file(name)}: tensor {name} has shape {list(found)},"
                f" the config asks for {list(shape)}"
            )


def check_all_read(names: Iterable[str], config: DecoderConfig, tensors: Tensors) -> None:
    """Raises a UserError for the first of these names of tensors that is a weight or bias of a
    layer, and that the config has no place for: without it the model would compute something else
    than what was saved."""
    expected = tensor_shapes(config)
    if isinstance(tensors, ExpertTensors):
        apart = filter(None, map(_APART.fullmatch, names := [*names]))
        wanted = (m for m in apart if _whole(m)[0] in expected and int(m[2]) < tensors.count)
        expected |= {match[0]: () for match in wanted}
    name = first_unread((name for name in names if name not in expected), config)
    if name is not None:
        raise UserError(
            f"{tensors.file(name)}: the config has no place for tensor {short(name, 200)}: is"
            f" model_type={config.family!r} right, and num_hidden_layers={config.n_layers}?"
        )


def first_unread(names: Iterable[str], config: DecoderConfig, further: int = 0) -> str | None:
    """Finds the first name of a weight or bias of a layer, of a GGUF file or another, but for keys
    and values of a layer that borrows them, and all of so many `further` layers; None if none."""
    n, kinds = config.n_layers, config.kinds * (config.n_layers // len(config.kinds))
    for match in filter(None, map(_OF_LAYER.fullmatch, names)):
        layer = int(match[1]) if match[1].isdecimal() else n + further
        attends = match[2].startswith(("self_attn.", "attn_"))
        if not (layer < n and kinds[layer].borrows and attends or n <= layer < n + further):
            return match[0]
    return None


def load_params(
    tensors: Tensors,
    config: DecoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
    layout: Layout = "stacked",
) -> Params:
    """Returns parameters of a checkpoint, in `dtype`, sharded as `models/parameters.py` says.
    What the config has quantised is quantised on the host, layer by layer.

    Host memory holds a few slices at a time, a slice being what one device gets of one parameter; a
    slice that several devices share is read once.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    check_shapes(tensors, tensor_shapes(config))
    abstract = parameters.abstract_params(config, jnp.dtype(dtype), layout)
    if mesh is not None:
        shardings = parameters.param_shardings(config, mesh, layout)
        abstract = jax.tree.map(lambda leaf, own: leaf.update(sharding=own), abstract, shardings)
    each = leaves_by_path(abstract)
    found: dict[str, jax.Array] = {}
    for path, place in places(config, layout).items():
        if f"{path}_scale" in each:
            assert config.quantised is not None
            pair = (each[path], each[f"{path}_scale"])
            codes, scale = _read_quantised(tensors, place, config.quantised, *pair)
            found |= {path: codes, f"{path}_scale": scale}
        else:
            found[path] = read_parameter(tensors, place, each[path])
    return jax.tree.unflatten(jax.tree.structure(abstract), [found[path] for path in each])


def load_head(
    tensors: Tensors,
    config: DecoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the LM head [V, D] (the embedding when tied), V over `tensor`, D over `fsdp`."""
    name, sharding = EMBEDDING if config.tie_embeddings else HEAD, None
    place = Place((config.vocab_size, config.d_model), (name,))
    if mesh is not None:
        sharding = NamedSharding(
            mesh, parameters.param_specs(config, mesh.shape)["embed"]["embedding"]
        )
    check_shapes(tensors, stored_shapes([place]))
    leaf = jax.ShapeDtypeStruct(place.shape, jnp.dtype(dtype), sharding=sharding)
    return read_parameter(tensors, place, leaf)


def read_parameter(tensors: Tensors, place: Place, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns one parameter, in the dtype and the sharding of `leaf`, box by box."""
    (read,) = _by_box((leaf,), lambda index: (place.read(tensors, index, leaf.dtype),))
    return read


def _by_box(
    leaves: Sequence[jax.ShapeDtypeStruct], read: Callable[[Index], Sequence[np.ndarray]]
) -> tuple[jax.Array, ...]:
    """Returns arrays of which each device reads its own boxes at once; devices that hold the same
    box share one read. Without a sharding it is one box, on the default device.

    Args:
        read: a box of the first array -> the boxes of all arrays that a device has with it.
    """
    first = leaves[0]
    if first.sharding is None:
        boxes = read(tuple(slice(0, n) for n in first.shape))
        return tuple(jax.device_put(box, may_alias=False) for box in boxes)
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in first.sharding.addressable_devices_indices_map(first.shape).items():
        holders.setdefault(box_of(index, first.shape), []).append(device)
    pieces: list[list[jax.Array]] = [[] for _ in leaves]
    for spans, devices in holders.items():
        boxes = read(tuple(slice(*span) for span in spans))
        for own, box in zip(pieces, boxes, strict=True):
            own += [jax.device_put(box, device, may_alias=False) for device in devices]
        jax.block_until_ready(pieces)
        del boxes, box
    return tuple(
        jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, own)
        for leaf, own in zip(leaves, pieces, strict=True)
    )


def _read_quantised(
    tensors: Tensors,
    place: Place,
    kind: lora.Quantisation,
    codes: jax.ShapeDtypeStruct,
    scale: jax.ShapeDtypeStruct,
) -> tuple[jax.Array, ...]:
    """Returns the codes and the scales of a kernel, which is read and quantised one layer's, or one
    expert's, at a time."""
    each = lora.numbers_per_code(kind)
    block = codes.shape[-2] * each // scale.shape[-2]

    def read(index: Index) -> tuple[np.ndarray, ...]:
        *leading, rows, columns = index
        rows = slice(rows.start * each, rows.stop * each)
        dims = [s.stop - s.start for s in leading]
        found = []
        for at in np.ndindex(*dims):
            one = [slice(s.start + i, s.start + i + 1) for s, i in zip(leading, at, strict=True)]
            box = place.read(tensors, (*one, rows, columns), np.float32)
            with _on_cpu():
                found.append([np.asarray(x) for x in _quantise(kind, box, block)])
        whole, scales = (np.stack(parts) for parts in zip(*found, strict=True))
        return tuple(x.reshape(*dims, *x.shape[-2:]) for x in (whole, scales))

    return _by_box((codes, scale), read)


_quantise = jax.jit(lora.quantise, static_argnums=(0, 2))
_layer = jax.jit(jax.lax.dynamic_index_in_dim, static_argnames="keepdims")
"""One program for all layers of a shape, where indexing eagerly takes two."""


@partial(jax.jit, static_argnums=(0, 2))
def _round_trip(kind: lora.Quantisation, kernel: jax.Array, block: int) -> jax.Array:
    return lora.dequantise(*lora.quantise(kind, kernel, block), jnp.float32)


def _on_cpu() -> AbstractContextManager[object]:
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def hf_tensors(config: DecoderConfig, params: Params) -> Callable[[str], np.ndarray]:
    """Returns a reader of one tensor at a time, by Hugging Face name, in either layout.

    What it returns is on the host, in the parameters' dtype; one layer of a stacked parameter is
    fetched at a time, with all of its experts. Processes that share the parameters' mesh must read
    in the same order.
    """
    parts: dict[str, list[tuple[str, Place, int]]] = {}
    leaf_of = leaves_by_path(params)
    layout: Layout = "unstacked" if isinstance(params["layers"], list) else "stacked"
    for path, place in places(config, layout).items():
        for i, name in enumerate(place.names):
            parts.setdefault(name, []).append((path, place, i))
    held: dict[tuple[str, int], np.ndarray] = {}

    def fetch(path: str, place: Place, i: int) -> np.ndarray:
        layer, expert = divmod(i, place.experts or 1)
        if (path, layer) not in held:
            held.clear()  # one at a time
            leaf = leaf_of[path]
            if place.layers:
                leaf = _layer(leaf, np.int32(layer), keepdims=False)
            held[path, layer] = to_host(leaf)
        value = held[path, layer]
        value = value[expert] if place.experts else value
        return np.swapaxes(value, -1, -2) if place.transposed else value

    def read(name: str) -> np.ndarray:
        values = [fetch(*part) for part in parts[name]]
        if len(values) == 1:
            return values[0]
        if parts[name][0][1].step > 1:
            return np.stack(values, -1).reshape(*values[0].shape[:-1], -1)
        return np.concatenate(values, parts[name][0][1].rows)

    return read


def load_encoder(
    tensors: Tensors,
    config: bert.EncoderConfig,
    mesh: Mesh | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """Returns parameters of a BERT-like encoder's checkpoint in `dtype`; on a mesh each device
    reads its slices. Checkpoints with a head put a prefix to names.

    Raises:
        UserError: a tensor is missing or has another shape than `config` asks for.
    """
    prefix, shapes = bert.FAMILIES[config.family].prefix, bert.shapes(config)
    if tensors.shape(f"{prefix}{bert.TOP['embed/word'][0]}") is None:
        prefix = ""
    places = {p: Place(shapes[p], (f"{prefix}{name}",)) for p, (name, _) in bert.TOP.items()}
    for rest, (name, _) in bert.LAYER.items():
        path, transposed = f"layers/{rest}", rest.endswith("/kernel")
        names = tuple(f"{prefix}encoder.layer.{i}.{name}" for i in range(config.n_layers))
        places[path] = Place(shapes[path], names, len(names), transposed=transposed)
    check_shapes(tensors, stored_shapes(places.values()))
    layouts, values = {} if mesh is None else bert.specs(config, mesh.shape), {}
    for path, place in places.items():
        sharding = None if mesh is None else NamedSharding(mesh, layouts[path])
        leaf = jax.ShapeDtypeStruct(place.shape, dtype, sharding=sharding)
        values[path] = read_parameter(tensors, place, leaf)
    return bert.tree(values)
