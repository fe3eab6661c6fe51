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
from jaxrl.formats.peft import Pair, pairs_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import frozen_and_trained
from jaxrl.models.parameters import Params, abstract_params


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
        wanted = _on_host(abstract_params(self._config))
        params = load_arrays(self._folder / ACTOR, {"params": wanted})["params"]
        return weights.hf_tensors(self._config, params)


def saved_adapters(folder: Path, config: DecoderConfig) -> dict[str, Pair]:
    """Reads the adapters of a checkpoint to the host. `config` has its adapters."""
    _, adapters = frozen_and_trained(abstract_params(config))
    loaded = load_arrays(folder / ACTOR, {"params": _on_host(adapters)})
    return pairs_of(config, jax.tree.map(np.asarray, loaded["params"]))


def _on_host(tree: Params) -> Params:
    """Shapes with the sharding of an array on this host."""
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host), tree
    )
