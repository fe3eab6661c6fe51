"""The weights of a checkpoint as named tensors, as any model on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrl.checkpoint.arrays import load_arrays
from jaxrl.checkpoint.store import ACTOR
from jaxrl.formats import weights
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import abstract_params


class SavedTensors:
    """Implements `weights.Tensors`: all parameters come to the host, in float32, when the first of
    them is read. The optimizer's state is not read.
    """

    def __init__(self, folder: Path, config: DecoderConfig):
        self._folder, self._config = folder, config
        self._shapes = weights.tensor_shapes(config)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read(self, name: str, index: weights.Index) -> np.ndarray:
        return self._read(name)[index]

    def file(self, name: str) -> Path:
        return self._folder / ACTOR

    @cached_property
    def _read(self) -> Callable[[str], np.ndarray]:
        host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host),
            abstract_params(self._config),
        )
        params = load_arrays(self._folder / ACTOR, {"params": wanted})["params"]
        return weights.hf_tensors(self._config, params)
