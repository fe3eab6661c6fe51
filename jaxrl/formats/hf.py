"""Hugging Face folders: `config.json`, and weights as safetensors, read by slices and written as a
stream; also torch's `.bin` files, which are read only."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl.errors import UserError, short
from jaxrl.formats import weights
from jaxrl.formats.opened import note_read
from jaxrl.models.config import DecoderConfig, check_special_ids, special_ids
from jaxrl.models.parameters import Params
from jaxrl.process import atomic_files
from jaxrl.process.json_types import JsonObject, name_file_in_errors, read_json
from jaxrl.sharding.mesh import is_primary

STORED: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes of a safetensors header that can be read, and written."""
WRITTEN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Name of a dtype -> its name in the header."""


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PEFT = "base_model.model."
"""How names of tensors of adapters begin."""
SHARD_BYTES = 5_000_000_000
"""Largest safetensors file that is written, unless one tensor is larger."""
MOST_HEADER = 1 << 24
"""Bytes of a safetensors header; those of the largest mixtures in one file have 11 MB. The library
takes seconds for what it would read at most, 100 MB, and hears no Ctrl-C in them."""
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
TOKENIZER_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
    *TEMPLATE_FILES,
)
"""Patterns of the files of a tokenizer and its chat templates: the default one, and those of other
names, as `tool_use` for chats with tools."""
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""What the names of both tensors add to that of the one that they stand for."""
MXFP4_BLOCK = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Of the lower three bits; the fourth is the sign."""
_LEVELS = np.concatenate([E2M1, -E2M1])
_PAIRS = _LEVELS[np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1)].view(np.uint64)[:, 0]
"""[256]: both numbers of each byte, as one: four times as fast to look up."""
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


@dataclass(frozen=True)
class _Entry:
    file: Path
    stored: str
    """Dtype, by the name that the header gives it."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""


class SafetensorsFolder:
    """The tensors of a folder's `*.safetensors`; a read maps only the tensor it is about. One that
    is stored in MXFP4 (`read_mxfp4`) is there under the name of what it stands for.

    The library checks the headers. Its own slices hold the interpreter's lock while they are
    copied from disk, a second for 0.5 GB, in which no other role of the process would move.
    """

    def __init__(self, path: str | os.PathLike[str], files: Sequence[Path] = ()):
        """
        Args:
            files: of the folder; those of a model where none are named.
        """
        self.path = Path(path)
        self._files, self._file_of = list(files), dict[str, Path]()
        if not files:
            if not any((self.path / name).is_file() for name in (SINGLE, INDEX)):
                if not self.path.is_dir():
                    raise UserError(f"model {str(self.path)!r}: there is no such folder")
                why = f"neither {SINGLE} nor {INDEX} is there"
                if any(file.suffix in (".bin", ".pth") for file in self.path.iterdir()):
                    why = (
                        "weights are in .bin or .pth files (pickles), which are not read; save them"
                        " as safetensors first"
                    )
                raise UserError(f"{self.path}: {why}")
            self._files, self._file_of = weight_files(self.path, SINGLE, INDEX)
        self._entries: dict[str, _Entry] = {}
        for file in self._files:
            for name, entry in _read_header(file).items():
                if self._file_of.get(name, file) == file:  # of two, the one that the index names
                    # models of images and text too put a prefix to it, and PEFT one before
                    name = re.sub(rf"^({PEFT})?language_model\.(model|lm_head)\.", r"\1\2.", name)
                    name = re.sub(rf"^({PEFT})?model\.language_model\.", r"\1model.", name)
                    self._entries[name] = entry

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...] | None:
        if self._is_packed(name):
            blocks, scales = self._packed(name)
            shape = mxfp4_shape(blocks.shape, scales.shape)
            if shape is None:
                raise UserError(
                    f"{blocks.file}: {name}{MXFP4_BLOCKS} has shape {list(blocks.shape)} and its"
                    f" scales {list(scales.shape)}; MXFP4 needs [experts, out, groups, 16] and"
                    " [experts, out, groups]"
                )
            return shape
        entry = self._entries.get(name)
        if entry is not None and entry.stored not in STORED:
            raise UserError(
                f"{entry.file}: tensor {name} is stored as {entry.stored},"
                f" which is not read; supported: {', '.join(STORED)}"
            )
        return None if entry is None else entry.shape

    def file(self, name: str) -> Path:
        name += MXFP4_BLOCKS * self._is_packed(name)
        if name in self._entries:
            return self._entries[name].file
        return self._file_of.get(name, self._files[0] if len(self._files) == 1 else self.path)

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        if self._is_packed(name):
            blocks, scales = (_mapped(part, np.dtype(np.uint8)) for part in self._packed(name))
            note_read(self.file(name), f"{name}{MXFP4_BLOCKS}", blocks, index[0])
            note_read(self.file(name), f"{name}{MXFP4_SCALES}", scales, index[0])
            return read_mxfp4(blocks, scales, index)
        entry = self._entries[name]
        tensor = _mapped(entry, STORED[entry.stored])
        note_read(entry.file, name, tensor, index[0] if index else slice(None))
        return tensor[index]

    def _is_packed(self, name: str) -> bool:
        return name not in self._entries and f"{name}{MXFP4_BLOCKS}" in self._entries

    def _packed(self, name: str) -> tuple[_Entry, _Entry]:
        blocks, scales = (self._entries.get(f"{name}{end}") for end in (MXFP4_BLOCKS, MXFP4_SCALES))
        assert blocks is not None
        if scales is None:
            raise UserError(f"{blocks.file}: tensor {name}{MXFP4_SCALES} is missing")
        for entry in (blocks, scales):
            if entry.stored != "U8":
                raise UserError(
                    f"{entry.file}: {name} is stored in MXFP4 of {entry.stored}; supported: U8"
                )
        return blocks, scales


def _mapped(entry: _Entry, dtype: np.dtype) -> np.ndarray:
    return np.memmap(entry.file, dtype, "r", entry.offset, entry.shape)


_NO_SAMPLING = frozenset(
    ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
)
"""Keys of `generation_config.json` that do not say how to sample."""


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
    """Returns `config.json`, merged with what `generation_config.json` says: more eos ids, bos and
    pad, and how to sample."""
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        why = "no config.json in this folder; it is no model folder"
        there = why if folder.exists() else "there is no such folder"
        raise UserError(f"model {str(path)!r}: {there}")
    raw = read_json(file)
    with name_file_in_errors(file):
        config = DecoderConfig.from_hf(raw)
        check_special_ids(config)
    file = folder / "generation_config.json"
    if file.is_file():
        raw = read_json(file)
        with name_file_in_errors(file):
            more = special_ids(raw)
            config = replace(
                config,
                eos_ids=tuple(dict.fromkeys((*config.eos_ids, *more["eos_ids"]))),
                bos_id=more["bos_id"] if config.bos_id is None else config.bos_id,
                pad_id=more["pad_id"] if config.pad_id is None else config.pad_id,
                sampling={key: value for key, value in raw.items() if key not in _NO_SAMPLING},
            )
            check_special_ids(config)
    return config


def save_hf(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    params: Params,
    *,
    dtype: str = "bfloat16",
    tokenizer_from: TokenizerFrom | None = None,
) -> Path:
    """Writes a folder that transformers loads; one that stands there is replaced, in one rename.

    Where several processes share the parameters' mesh, all must call and the first one writes.

    Args:
        params: in either layout, on any mesh; one tensor at a time visits the host.
        dtype: float32, float16 or bfloat16, of the stored weights.
        tokenizer_from: a folder whose tokenizer files are copied, or a GGUF file whose tokenizer is
            written, or these as they were read before.
    """
    read = weights.hf_tensors(config, params)
    unread = dict.fromkeys(weights.tensor_shapes(config))

    def take(name: str) -> np.ndarray:
        del unread[name]
        return read(name)

    devices = jax.tree.leaves(params)[0].sharding.device_set
    try:
        if is_primary(devices):
            write_folder(path, config, take, dtype=dtype, tokenizer_from=tokenizer_from)
    finally:
        if any(device.process_index != jax.process_index() for device in devices):
            for name in unread:  # all processes gather all tensors, also where the disk refuses
                read(name)
    return Path(path).resolve()


def write_folder(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    read: Callable[[str], np.ndarray],
    *,
    dtype: str,
    tokenizer_from: TokenizerFrom | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Does what `save_hf` does, for anything that gives tensors by Hugging Face name: writes one
    file, or several with an index once they would exceed `shard_bytes`."""
    if dtype not in WRITTEN:
        raise UserError(f"dtype={dtype!r} cannot be written; choose one of {', '.join(WRITTEN)}")
    with replaced_folder(path) as folder:
        write_description(folder, config, dtype, tokenizer_from)
        shapes, itemsize = weights.tensor_shapes(config), STORED[WRITTEN[dtype]].itemsize
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        filled = 0
        for name, shape in shapes.items():
            size = math.prod(shape) * itemsize
            if shards[-1] and filled + size > shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = shape
            filled += size
        n, weight_map = len(shards), dict[str, str]()
        for i, shard in enumerate(shards):
            file = SINGLE if n == 1 else f"model-{i + 1:05}-of-{n:05}.safetensors"
            write_safetensors(folder / file, shard, read, dtype)
            weight_map |= dict.fromkeys(shard, file)
        if n > 1:
            total = sum(math.prod(shape) for shape in shapes.values()) * itemsize
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(folder / INDEX, index)
    return Path(path).resolve()


def write_description(
    folder: Path, config: DecoderConfig, dtype: str, tokenizer_from: TokenizerFrom | None = None
) -> None:
    """Writes all of a model folder but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config.to_hf(dtype)
    write_json(folder / "config.json", raw)
    ids = {f"{key}_token_id": raw[f"{key}_token_id"] for key in ("bos", "eos", "pad")}
    ids = {key: value for key, value in ids.items() if value is not None}
    settings = dict(config.sampling) or {"_from_model_config": True}
    write_json(folder / "generation_config.json", settings | ids)
    if tokenizer_from is not None:
        save_tokenizer(tokenizer_from, folder)


def has_tokenizer(folder: Path) -> bool:
    """Returns whether the folder holds something that a tokenizer can be made of.

    Raises:
        UserError: what has the name of one of its files is none, as a pipe that never ends.
    """
    for file in chain(*map(folder.glob, TOKENIZER_FILES)):
        if not file.is_file():
            raise UserError(f"tokenizer: {file} is no file")
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return any((folder / name).is_file() for name in names)


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer and its chat templates as they were when they were read."""

    contents: Mapping[str, bytes] = field(repr=False)
    """By the path in their folder."""

    @staticmethod
    def read(source: str | os.PathLike[str]) -> TokenizerFiles:
        """Reads those of a folder, or makes those of a GGUF file.

        They are such that transformers 4 and 5 read `tokenizer.json` as it is: the class that they
        would choose depends on the model, of which a folder of adapters says nothing.
        """
        if Path(source).is_file():
            from jaxrl.formats import gguf

            with tempfile.TemporaryDirectory() as made:
                gguf.read_tokenizer(source).save_pretrained(made)
                return TokenizerFiles.read(made)
        folder, contents = Path(source), dict[str, bytes]()
        for file in filter(Path.is_file, chain(*map(folder.glob, TOKENIZER_FILES))):
            contents[str(file.relative_to(folder))] = file.read_bytes()
        if TOKENIZER in contents:
            raw = read_json(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in contents else {}
            for key in ("backend", "is_local", "local_files_only"):  # of transformers 5 alone
                raw.pop(key, None)
            raw["tokenizer_class"] = "PreTrainedTokenizerFast"
            contents[TOKENIZER_CONFIG] = json_text(raw).encode()
        return TokenizerFiles(contents)

    def with_template(self, template: str) -> TokenizerFiles:
        """Returns these files with one chat template, in place of all of theirs."""
        kept = dict(self.contents)
        for pattern in TEMPLATE_FILES:
            for name in fnmatch.filter(self.contents, pattern):
                del kept[name]
        if TOKENIZER_CONFIG in kept:
            raw = json.loads(kept[TOKENIZER_CONFIG])
            raw.pop("chat_template", None)
            kept[TOKENIZER_CONFIG] = json_text(raw).encode()
        return TokenizerFiles({**kept, TEMPLATE_FILES[0]: template.encode()})


TokenizerFrom = str | os.PathLike[str] | TokenizerFiles
"""A folder, a GGUF file, or what was read of either."""


def save_tokenizer(source: TokenizerFrom, folder: Path) -> None:
    """Writes the files of a tokenizer and its chat templates into a folder."""
    read = source if isinstance(source, TokenizerFiles) else TokenizerFiles.read(source)
    for name, contents in read.contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(contents)


def weight_files(folder: Path, single: str, index: str) -> tuple[list[Path], dict[str, Path]]:
    """Returns the files of the weights in a folder and, where they are those of an index, which of
    them it says should hold each tensor.

    Raises:
        UserError: an index that names no file, one that is missing, or one outside of the folder.
    """
    if in_one_file([file for file in (single, index) if (folder / file).is_file()], single, index):
        return [folder / single], {}
    file_of = read_index(folder / index)
    for file in sorted(set(file_of.values())):
        if not os.path.isfile(folder / file):  # also of names that no file can have
            raise UserError(f"{short(str(folder / file), 300)} is missing, but {index} names it")
    places = {name: folder / file for name, file in file_of.items()}
    return sorted(set(places.values())), places


def in_one_file(there: Collection[str], single: str = SINGLE, index: str = INDEX) -> bool:
    """Returns whether weights are in a single file, of the names of the files of a model. It counts
    more than an index, which may be that of an earlier save; in transformers too."""
    return single in there or index not in there


def read_index(index: Path) -> dict[str, str]:
    """Returns name of a tensor -> the file that an index says should hold it. Raises UserError for
    an index that names no file, or one outside of its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: `weight_map` names no file of weights")
    file_of = {name: str(file) for name, file in weight_map.items()}
    check_inside(str(index), [*file_of.values()])
    return file_of


def check_inside(place: str, paths: Sequence[str]) -> None:
    """Raises UserError for a path that leads out of the folder that it is in."""
    for path in paths:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise UserError(f"{place}: it names a file outside of its folder: {short(path, 200)}")


def _read_header(file: Path) -> dict[str, _Entry]:
    """Returns the tensors of a file; the library refuses what cannot be."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if MOST_HEADER < length < size:
            raise UserError(
                f"{file}: a header of {length} bytes; at most {MOST_HEADER} are read: save the"
                " model in several files"
            )
        try:
            with safe_open(file, "numpy"):
                header = json.loads(stream.read(length))
        except SafetensorError as error:
            raise UserError(
                f"{file}: truncated, damaged (such as data_offsets that overlap), or no safetensors"
                f" file: {error}. It has {size} bytes and announces a header of {length} bytes"
            ) from None
    header.pop("__metadata__", None)
    found = {}
    for name, info in header.items():
        offset = 8 + length + info["data_offsets"][0]
        found[name] = _Entry(file, info["dtype"], tuple(info["shape"]), offset)
    return found


def safetensors_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: JsonObject | None = None
) -> bytes:
    """Makes what stands in a file before the tensors, each given as name, dtype by the name that
    it has there, shape and bytes."""
    header, at = dict(metadata or {}), 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    dtype: str,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes the header from the shapes alone, then one tensor after the other."""
    stored, name_of = STORED[WRITTEN[dtype]], WRITTEN[dtype]
    tensors = ((n, name_of, s, math.prod(s) * stored.itemsize) for n, s in shapes.items())
    with file.open("wb") as stream:
        stream.write(safetensors_header(tensors, {"__metadata__": {"format": "pt", **metadata}}))
        for name, shape in shapes.items():
            value = read(name)
            assert value.shape == shape, (name, value.shape, shape)
            stream.write(np.ascontiguousarray(value, stored).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def replaced_folder(path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """Yields a folder to write a model into, which then replaces the model at `path`
    (`atomic_files.replaced_folder`)."""
    return atomic_files.replaced_folder(path, is_model_file)


def model_files(folder: Path) -> list[Path]:
    """Lists the files that `remove_model` would remove."""
    if not folder.is_dir() or folder.is_symlink():
        return []
    return [file for file in folder.iterdir() if is_model_file(file.name)]


def remove_model(folder: Path) -> None:
    """Removes the files of a model, and the folder where nothing else is in it. A link stays, and
    so does what it leads to."""
    for file in model_files(folder):
        atomic_files.remove(file)
    if not folder.is_symlink():
        with suppress(OSError):
            folder.rmdir()


def is_model_file(name: str) -> bool:
    """Returns whether jaxrl writes files of that name into a model's folder."""
    named = (*TOKENIZER_FILES, "config.json", "generation_config.json", "additional_chat_templates")
    weights_of = r"(model(-\d+-of-\d+)?|adapter_model)\.safetensors(\.index\.json)?"
    return name in (*named, "adapter_config.json") or bool(re.fullmatch(weights_of, name))


def write_json(file: Path, value: JsonObject) -> None:
    """Writes a value as the files of a model folder have it."""
    file.write_text(json_text(value), encoding="utf-8")


def json_text(value: JsonObject) -> str:
    return json.dumps(value, indent=2) + "\n"


class TorchBinFolder:
    """The tensors of a folder's `pytorch_model.bin`, or of the files that its index names: plain
    ones only, which torch reads (extra `torch`) with `weights_only=True`, so that nothing that a
    file holds is run. The numbers stay on disk until a box of them is read."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._tensors: dict[str, tuple[Path, Any]] = {}
        self._files, file_of = weight_files(self.path, TORCH_SINGLE, TORCH_INDEX)
        for file in self._files:
            for name, tensor in _load_torch(file).items():
                if file_of.get(name, file) == file:
                    self._tensors[name] = file, tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name][1].shape) if name in self._tensors else None

    def file(self, name: str) -> Path:
        alone = self._files[0] if len(self._files) == 1 else self.path
        return self._tensors[name][0] if name in self._tensors else alone

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        import torch

        file, tensor = self._tensors[name]
        try:
            if tensor.dtype == torch.bfloat16:  # which numpy does not know
                whole = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            else:
                whole = tensor.numpy()
            note_read(file, name, np.ascontiguousarray(whole), index[0] if index else slice(None))
            return whole[index]
        except TypeError as error:
            raise UserError(
                f"{file}: tensor {short(name)} is stored as {tensor.dtype}, which is not read"
                f" ({error}); save the weights as safetensors in float32, float16 or bfloat16"
            ) from None


def open_weights(folder: str | os.PathLike[str]) -> SafetensorsFolder | TorchBinFolder:
    """Opens the weights of a model folder: its safetensors, or else its `.bin` files."""
    folder = Path(folder)
    if any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return SafetensorsFolder(folder)
    if (folder / TORCH_SINGLE).is_file() or (folder / TORCH_INDEX).is_file():
        return TorchBinFolder(folder)
    raise UserError(f"{folder}: no weights here: neither {SINGLE} nor {TORCH_SINGLE} is there")


def _load_torch(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{file}: weights of torch need the extra `torch`: pip install 'jaxrl[torch]'; or save"
            " them as safetensors: model.save_pretrained(FOLDER) of transformers does"
        ) from None
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch raises nearly every kind
        # the text of an UnpicklingError advises to run what the file holds; its context does not
        cause = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
        reason = " ".join(str(cause or error).split()).split(". ")[0].rstrip(".")
        raise UserError(
            f"{file}: torch reads no plain tensors here, and ran nothing of it"
            f" ({short(reason, 200)}); fetch the file again, or save the weights as safetensors"
        ) from error
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds no names with tensors, but {type(state).__name__}")
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {str(name): value.detach() for name, value in tensors.items()}


def mxfp4_shape(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the tensor that bytes of these shapes stand for, or None."""
    if len(blocks) != 4 or blocks[:3] != scales or blocks[3] != MXFP4_BLOCK // 2:
        return None
    experts, n_out, groups, _ = blocks
    return experts, groups * MXFP4_BLOCK, n_out


def read_mxfp4(blocks: np.ndarray, scales: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
    """Returns the box `index` of a tensor [E, in, out] in bfloat16, which has all its values.

    In MXFP4 the experts of gpt-oss are published: 32 numbers of 4 bits share a scale (OCP
    Microscaling Formats v1.0, arXiv 2310.10537). A number is its e2m1 value times 2^(scale - 127).
    Beside the result the host holds one expert's part of it, in float32.

    Args:
        blocks: [E, out, in / 32, 16] bytes, of which each has an even number of a block in its
            lower half and the odd one after it in its upper half.
        scales: [E, out, in / 32] bytes.
    """
    experts, rows, columns = index
    start, stop, _ = rows.indices(blocks.shape[2] * MXFP4_BLOCK)
    first = start // MXFP4_BLOCK
    groups = slice(first, -(-stop // MXFP4_BLOCK))
    blocks, scales = (part[experts, columns, groups] for part in (blocks, scales))
    inside = slice(start - first * MXFP4_BLOCK, stop - first * MXFP4_BLOCK)
    out = np.empty((len(blocks), stop - start, blocks.shape[1]), ml_dtypes.bfloat16)
    for target, codes, powers in zip(out, blocks, scales, strict=True):
        values = _PAIRS[codes].view(np.float32)
        values *= _POWERS[powers][..., None]
        target[...] = values.reshape(len(values), -1)[:, inside].astype(target.dtype).T
    return out
