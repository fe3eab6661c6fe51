"""Torch's `.bin` files (a zip archive with a pickle inside), read without torch and without running
anything that they hold.

Only the names that tensors need can be called while the pickle is read; any other is refused. The
numbers themselves stay on disk: a read maps the storage and takes a box of it.
"""

from __future__ import annotations

import collections
import math
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from jaxrl.errors import UserError, short
from jaxrl.formats import hf
from jaxrl.formats.hf import SafetensorsFolder, weight_files
from jaxrl.formats.weights import Index

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
STORAGES: dict[str, np.dtype] = {
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.ByteStorage": np.dtype("u1"),
    "torch.BoolStorage": np.dtype("?"),
}
PYTHON_UNPICKLER: Any = pickle._Unpickler
"""The one of Python; that of C hashes keys before anybody can look at them."""
SETS = (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
"""Opcodes of sets, which no file of tensors has."""
MOST_RANK, MOST_SIZE, MOST_MEMBERS = 32, 2**63 - 1, 1 << 16
"""Dims of a tensor, numbers in one of them, and members of an archive: what numpy can have, and far
more storages than a model has."""
LOCAL_HEADER, LENGTHS_AT = 30, 26
"""Bytes of a zip member's local header before its name, and where in it the lengths stand."""


class TorchBinFolder:
    """The tensors of a folder's `pytorch_model.bin`, or of the files that its index names."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._tensors: dict[str, _Tensor] = {}
        self._files, file_of = weight_files(self.path, SINGLE, INDEX)
        for file in self._files:
            found = _read_file(file)
            self._tensors |= {k: found[k] for k in found if file_of.get(k, file) == file}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.shape

    def file(self, name: str) -> Path:
        if name in self._tensors:
            return self._tensors[name].storage.file
        return self._files[0] if len(self._files) == 1 else self.path

    def read(self, name: str, index: Index) -> np.ndarray:
        tensor = self._tensors[name]
        storage, dtype = tensor.storage, tensor.storage.dtype
        if tensor.span == 0:
            return np.empty(tensor.shape, dtype)[index]
        start = storage.at + tensor.offset * dtype.itemsize
        flat = np.memmap(storage.file, dtype, "r", start, (tensor.span,))
        strides = tuple(n * dtype.itemsize for n in tensor.strides)
        whole = np.lib.stride_tricks.as_strided(flat, tensor.shape, strides, writeable=False)
        return whole[index]


def open_weights(folder: str | os.PathLike[str]) -> SafetensorsFolder | TorchBinFolder:
    """The tensors of a model folder: of its safetensors, or else of its `.bin` files."""
    place = Path(folder)
    if any((place / name).is_file() for name in (hf.SINGLE, hf.INDEX)):
        return SafetensorsFolder(place)
    if (place / SINGLE).is_file() or (place / INDEX).is_file():
        return TorchBinFolder(place)
    raise UserError(f"{place}: no weights here: neither model.safetensors nor {SINGLE} is there")


@dataclass(frozen=True)
class _Storage:
    """A run of numbers in a file."""

    file: Path
    at: int
    """Byte of the first."""
    dtype: np.dtype
    size: int
    """Numbers."""


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In numbers, not bytes."""

    @property
    def span(self) -> int:
        """Numbers from the first to the last."""
        if math.prod(self.shape) == 0:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((n - 1) * stride for n, stride in steps)


def _tensor(storage: object, offset: object, shape: object, strides: object, *_: object) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    sizes, steps = _whole_numbers(shape), _whole_numbers(strides)
    (start,) = _whole_numbers((offset,))
    if len(sizes) != len(steps):
        raise pickle.UnpicklingError(f"a tensor of shape {sizes} with strides {steps}")
    tensor = _Tensor(storage, start, sizes, steps)
    if start + tensor.span > storage.size:
        raise pickle.UnpicklingError(
            f"a tensor of shape {sizes} goes beyond its storage of {storage.size} numbers"
        )
    return tensor


def _parameter(tensor: object, *_: object) -> object:
    """A tensor that has a gradient."""
    return tensor


def _ordered_dict(*content: object) -> collections.OrderedDict[object, object]:
    """An empty one: torch puts the items in afterwards."""
    if content:
        raise pickle.UnpicklingError("an OrderedDict with arguments")
    return collections.OrderedDict()


CALLED: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "collections.OrderedDict": _ordered_dict,
}
"""What a pickle may call, of which it only ever holds the name."""


class _Unpickler(PYTHON_UNPICKLER):
    """Makes tensors and containers of them, and nothing else.

    A key is a plain word or number: one of tuples within tuples takes twice as long to hash with
    each level.
    """

    dispatch = {
        code: load for code, load in PYTHON_UNPICKLER.dispatch.items() if bytes([code]) not in SETS
    }

    def __init__(self, stream: IO[bytes], file: Path, places: Mapping[str, tuple[int, int]]):
        super().__init__(stream, encoding="utf-8")
        self._file, self._places = file, places

    def find_class(self, module: str, name: str) -> str:
        full = f"{module}.{name}"
        if full not in CALLED and full not in STORAGES:
            raise UserError(
                f"{self._file}: asks for {short(full, 200)}, which no tensor needs; nothing of it"
                " was run. Only files of plain tensors are read: save the weights as safetensors"
            )
        return full

    def load_reduce(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        _check_keys([name])
        self.stack.append(CALLED[name](*args))

    def load_build(self) -> None:
        """Sets no attribute: those of torch's mappings, versions of modules, are of no use."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise pickle.UnpicklingError("attributes of something that is no mapping")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key = pid[:3]
        plain = isinstance(storage, str) and isinstance(key, str)
        if kind != "storage" or not plain or storage not in STORAGES:
            raise pickle.UnpicklingError("a reference to something that is no storage")
        if key not in self._places:
            raise pickle.UnpicklingError(f"storage {short(repr(key))} is not in the archive")
        at, size = self._places[key]
        dtype = STORAGES[storage]
        return _Storage(self._file, at, dtype, size // dtype.itemsize)

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])  # what stands since the mark: key, value, key, value
        super().load_setitems()

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        super().load_dict()

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


def _check_keys(keys: Sequence[object]) -> None:
    if any(type(key) not in (str, int) for key in keys):
        raise pickle.UnpicklingError("a key that is neither a word nor a number")


def _read_file(file: Path) -> dict[str, _Tensor]:
    """Name -> tensor, of the mapping that the file holds."""
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            return _read_archive(file, archive, stream)
    except UserError:
        raise
    except zipfile.BadZipFile:
        raise UserError(
            f"{file}: not in torch's zip format: damaged, or written by torch before 1.6. Where it"
            " is whole, write it again: torch.save(torch.load(FILE, weights_only=True), FILE)"
        ) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged archive raises whatever its fields stumble on
        raise UserError(f"{file}: cannot be read: {short(str(error), 200)}") from error


def _read_archive(file: Path, archive: zipfile.ZipFile, stream: IO[bytes]) -> dict[str, _Tensor]:
    members = {member.filename: member for member in archive.infolist()}
    if len(members) > MOST_MEMBERS:
        raise UserError(f"{file}: an archive of {len(members)} files; at most {MOST_MEMBERS}")
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise UserError(f"{file}: a zip archive, but no file of torch: it has no single data.pkl")
    root = roots[0]
    size, order = file.stat().st_size, b"little"
    if f"{root}byteorder" in members:
        at, length = _place(file, stream, size, members[f"{root}byteorder"])
        stream.seek(at)
        order = stream.read(min(length, len(order) + 1))
    if order != b"little":
        raise UserError(f"{file}: its numbers are {order.decode(errors='replace')}-endian")
    head = f"{root}data/"
    places = {
        name.removeprefix(head): _place(file, stream, size, member)
        for name, member in members.items()
        if name.startswith(head)
    }
    # refuses a compressed one: it could be endless
    _place(file, stream, size, members[f"{root}data.pkl"])
    try:
        with archive.open(f"{root}data.pkl") as pickled:
            values = _Unpickler(pickled, file, places).load()
    except UserError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its opcodes stumble on
        reason = short(str(error), 200)
        raise UserError(f"{file}: its pickle cannot be read: {reason}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds no names with tensors, but {type(values).__name__}")
    return {str(name): value for name, value in values.items() if isinstance(value, _Tensor)}


def _place(file: Path, stream: IO[bytes], size: int, member: zipfile.ZipInfo) -> tuple[int, int]:
    """Byte where the member's contents begin, and how many there are.

    Args:
        stream: the file, of `size` bytes.
    """
    name = short(member.filename, 200)
    if member.compress_type != zipfile.ZIP_STORED:
        raise UserError(f"{file}: {name} is compressed; torch stores numbers as they are")
    if not 0 <= member.header_offset <= size:
        raise UserError(f"{file}: damaged: {name} begins outside of the file")
    stream.seek(member.header_offset + LENGTHS_AT)
    before, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
    at = member.header_offset + LOCAL_HEADER + before + extra
    if at + member.file_size > size:
        raise UserError(f"{file}: truncated: {name} ends beyond the file")
    return at, member.file_size


def _whole_numbers(values: object) -> tuple[int, ...]:
    """Sizes, strides or offsets: whole numbers that are not negative."""
    if not isinstance(values, tuple) or any(type(n) is not int or n < 0 for n in values):
        raise pickle.UnpicklingError("something else where whole numbers are needed")
    if len(values) > MOST_RANK or any(n > MOST_SIZE for n in values):
        raise pickle.UnpicklingError("more dims, or larger numbers, than a tensor can have")
    return values
