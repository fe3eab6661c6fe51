"""Torch's `.bin` files, which torch itself reads (extra `torch`): only plain tensors, with
`weights_only=True`, so that nothing that such a file holds is run. The numbers stay on disk until
a box of them is read.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl.errors import UserError, short
from jaxrl.formats import hf
from jaxrl.formats.hf import SafetensorsFolder, weight_files
from jaxrl.formats.weights import Index

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


class TorchBinFolder:
    """The tensors of a folder's `pytorch_model.bin`, or of the files that its index names."""

    def __init__(self, path: str | os.PathLike[str]):
        """
        Raises:
            UserError: torch is not installed, or a file holds something else than plain tensors.
        """
        self.path = Path(path)
        self._tensors: dict[str, tuple[Path, Any]] = {}
        self._files, file_of = weight_files(self.path, SINGLE, INDEX)
        for file in self._files:
            tensors = _load(file)
            self._tensors |= {
                name: (file, tensor)
                for name, tensor in tensors.items()
                if file_of.get(name, file) == file
            }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name][1].shape) if name in self._tensors else None

    def file(self, name: str) -> Path:
        if name in self._tensors:
            return self._tensors[name][0]
        return self._files[0] if len(self._files) == 1 else self.path

    def read(self, name: str, index: Index) -> np.ndarray:
        import torch

        file, tensor = self._tensors[name]
        try:
            if tensor.dtype == torch.bfloat16:  # which numpy does not know
                return tensor.view(torch.int16).numpy()[index].view(ml_dtypes.bfloat16)
            return tensor.numpy()[index]
        except TypeError as error:
            raise UserError(
                f"{file}: tensor {short(name)} is stored as {tensor.dtype}, which is not read"
                f" ({error}); save the weights as safetensors in float32, float16 or bfloat16"
            ) from None


def open_weights(folder: str | os.PathLike[str]) -> SafetensorsFolder | TorchBinFolder:
    """Opens the weights of a model folder: its safetensors, or else its `.bin` files."""
    folder = Path(folder)
    if any((folder / name).is_file() for name in (hf.SINGLE, hf.INDEX)):
        return SafetensorsFolder(folder)
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return TorchBinFolder(folder)
    raise UserError(f"{folder}: no weights here: neither model.safetensors nor {SINGLE} is there")


def _load(file: Path) -> dict[str, Any]:
    """Returns name -> torch tensor, mapped from the file."""
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
    return {
        str(name): value.detach()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
