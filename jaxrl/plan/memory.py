"""Memory of a role on one of its devices: its entries and their peak, and the sizes that are exact
(weights, optimizer state, KV cache: each leaf's shard under the rules of `models/rules.py`).

An entry is resident or belongs to a phase. A worker does one thing at a time, so the peak of a
device is the largest over the phases of all roles there: what is resident and not away then, and
the phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.config.section import DType
from jaxrl.config.settings import OptimizerConfig
from jaxrl.models.activations import F32, split
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import NAMES, frozen_and_trained
from jaxrl.models.parameters import abstract_params
from jaxrl.models.rules import param_shardings
from jaxrl.roles.optimizer import average_dtype, make_optimizer, state_shardings
from jaxrl.sharding.axes import AXIS_NAMES, Axes

ITEMSIZE: dict[DType, int] = {"float32": 4, "bfloat16": 2}
Column = Literal["weights", "gradients", "optimizer", "cache", "activations"]

GATHERED_BY_MUON = 7
"""Arrays of the largest kernel's size, whole in `fsdp`, that are alive while muon has its kernels
gathered; 6 to 8, as XLA schedules them."""


class Shard(NamedTuple):
    """One parameter and the piece of it that a device holds."""

    path: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    """Shape of the piece."""
    itemsize: int | None = None
    """Of a quantised kernel and its scales; None: as the dtype of the weights has it."""

    @property
    def size(self) -> int:
        return math.prod(self.local)

    def bytes(self, dtype: DType) -> int:
        return self.size * (self.itemsize or ITEMSIZE[dtype])


@lru_cache(maxsize=256)
def shards(
    config: DecoderConfig, axes: Axes, layout: Literal["stacked", "unstacked"] = "stacked"
) -> tuple[Shard, ...]:
    """Every parameter's piece on one device of a mesh with these axes."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout=layout))
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    shardings = jax.tree.leaves(param_shardings(config, mesh, layout))  # type: ignore[arg-type]
    return tuple(
        Shard(
            jax.tree_util.keystr(path, simple=True, separator="/"),
            leaf.shape,
            sharding.shard_shape(leaf.shape),
            None if leaf.dtype == jnp.float32 else leaf.dtype.itemsize,
        )
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
    )


@lru_cache(maxsize=256)
def weight_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Bytes of the model's parameters on one device."""
    return sum(shard.bytes(dtype) for shard in shards(config, axes))


@lru_cache(maxsize=256)
def trained_shards(config: DecoderConfig, axes: Axes) -> tuple[Shard, ...]:
    """Those of `shards` that the actor trains: the adapters, where the model has any."""
    every = shards(config, axes)
    adapters = tuple(shard for shard in every if shard.path.endswith(NAMES))
    return adapters or every


def trained_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Bytes of the parameters that the actor trains on one device."""
    return ITEMSIZE[dtype] * sum(shard.size for shard in trained_shards(config, axes))


@lru_cache(maxsize=256)
def layer_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """`weight_bytes` without embedding, final norm and head."""
    return sum(s.bytes(dtype) for s in shards(config, axes) if s.path.startswith("layers"))


@lru_cache(maxsize=256)
def turned_bytes(config: DecoderConfig, axes: Axes, dtype: DType, *, tables: bool = False) -> int:
    """Bytes on one device of the layers' kernels that `fsdp` does not split along their first dim.

    A GPU transposes these, all layers at once, before the loop over layers in which they are
    gathered. In a program with a loop over micro-batches it does so before that loop.

    Args:
        tables: also of the embedding and the LM head.
    """
    total = 0
    gathered = shards(config, axes.gathered)
    for mine, whole in zip(shards(config, axes), gathered, strict=True):
        stacked = mine.path.startswith("layers")
        first = 2 if stacked else 1
        if (stacked or tables) and mine.local[first:] != whole.local[first:]:
            total += mine.bytes(dtype)
    return total


def cache_bytes(config: DecoderConfig, axes: Axes, rows: int, positions: int, dtype: DType) -> int:
    """Bytes of keys and values of `rows` sequences on one device, all layers, and of states."""
    item = ITEMSIZE[dtype]
    state = 0 if config.delta is None else config.delta.state_bytes(item, axes.tensor)
    token = item * sum(
        2 * n * split(one.n_kv_heads, axes.tensor) * one.head_dim
        for one, n in config.shapes.items()
        if one.kinds[0].keeps
    )
    return rows * (positions * token + config.n_recurrent * state)


@dataclass(frozen=True)
class Entry:
    """Some bytes of a role on one device."""

    column: Column
    """Temporary copies of weights count as activations."""
    name: str
    bytes: int
    phase: str | None = None
    """The phase that it exists in; None: it is resident."""
    away: frozenset[str] = frozenset()
    """Of a resident entry, the moments (`actor: publish`) and roles while which it is freed, or on
    the host."""

    def there(self, moment: str) -> bool:
        """Whether a resident entry is on the device at `ROLE: PHASE`."""
        return not self.away & {moment, moment.partition(":")[0]}


@dataclass(frozen=True)
class Account:
    """Everything that one role holds on one of its devices."""

    role: str
    entries: tuple[Entry, ...]

    @property
    def resident(self) -> int:
        return sum(p.bytes for p in self.entries if p.phase is None)

    def phases(self) -> dict[str, int]:
        """Phase -> bytes beyond what is resident."""
        found: dict[str, int] = {}
        for entry in self.entries:
            if entry.phase is not None:
                found[entry.phase] = found.get(entry.phase, 0) + entry.bytes
        return found

    def column(self, column: Column) -> int:
        """What is resident of a column, and the most that one phase adds to it."""
        mine = Account(self.role, tuple(e for e in self.entries if e.column == column))
        return mine.peak

    @property
    def peak(self) -> int:
        return peak((self,))[0]


def peak(accounts: Iterable[Account]) -> tuple[int, str]:
    """Peak bytes of a device that holds these roles, and the moment of it (`actor: update`)."""
    accounts = tuple(accounts)
    moments = {f"{a.role}: {name}": size for a in accounts for name, size in a.phases().items()}
    resident = [entry for a in accounts for entry in a.entries if entry.phase is None]

    def total(moment: str) -> int:
        there = sum(entry.bytes for entry in resident if entry.there(moment))
        return there + moments.get(moment, 0)

    moment = max(moments, key=total, default="")
    return total(moment), moment


@lru_cache(maxsize=64)
def optimizer_bytes(
    model: DecoderConfig,
    axes: Axes,
    optimizer: OptimizerConfig,
    param_dtype: str,
    moment_dtype: str,
) -> int:
    """Bytes of the optimizer's state on one device of the actor; exact."""
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    _, params = frozen_and_trained(abstract_params(model, jnp.dtype(param_dtype)))
    maker = make_optimizer(optimizer, 1, jnp.dtype(moment_dtype))
    _, placed = frozen_and_trained(param_shardings(model, mesh))  # type: ignore[arg-type]
    shardings = state_shardings(maker, params, placed, mesh)  # type: ignore[arg-type]
    leaves = jax.tree.leaves(jax.eval_shape(maker.init, params))
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    )


@lru_cache(maxsize=64)
def optimizer_scratch(
    model: DecoderConfig,
    axes: Axes,
    optimizer: OptimizerConfig,
    clipped: DType,
    moment_dtype: DType,
) -> int:
    """Bytes that an optimizer step writes out beside the gradient and its state, on one device.

    An optimizer that reads the gradient in two places has its clipped form written out, lion and
    adafactor their update, in float32; the rest is fused, but for one leaf at a time. An average
    of gradients in bfloat16 is written beside the old one, because the update reads it in float32.
    What muon writes out is in `_muon_scratch`.

    Args:
        clipped: dtype of the clipped gradient.
    """
    item = F32 if optimizer.name in ("lion", "adafactor", "muon") else ITEMSIZE[clipped]
    sizes = [shard.size for shard in trained_shards(model, axes)]
    weights, leaf = item * sum(sizes), item * max(sizes)
    if optimizer.name == "muon":
        return max(weights, _muon_scratch(model, axes))
    average = 0
    if optimizer.name != "adafactor" and moment_dtype != "float32":
        kept = average_dtype(optimizer, moment_dtype)
        average = 0 if kept == jnp.float32 else kept.itemsize * sum(sizes)
    copies = {"lion": 1, "adafactor": 1}.get(optimizer.name, 0)
    if optimizer.clip_norm is not None:
        copies = {"sgd": 0, "adafactor": 2}.get(optimizer.name, 1)
    last = 0 if optimizer.name == "adafactor" or (copies and optimizer.name != "lion") else leaf
    return copies * weights + last + average


def _muon_scratch(model: DecoderConfig, axes: Axes) -> int:
    """Bytes on one device while muon orthogonalises the kernels of the blocks.

    Their update is there twice. A step of Newton and Schulz takes products X @ X.T, and squares of
    these: on one device XLA computes all kernels side by side, two such arrays each; on several one
    after the other, with a third array. `fsdp` has kernels gathered, several at once.
    """
    kernels = trained_shards(model, axes.gathered)
    kernels = tuple(s for s in kernels if s.path.endswith(("kernel", *NAMES)))
    kernels = tuple(s for s in kernels if len(s.shape) >= 3)
    squares = [math.prod(s.shape[:-2]) * min(s.shape[-2:]) ** 2 * F32 for s in kernels]
    if axes.weights > 1:
        work = GATHERED_BY_MUON * max(s.size for s in kernels) * F32
    else:
        work = 2 * sum(squares) if axes.size == 1 else 3 * max(squares)
    if model.lora is not None:
        return 2 * trained_bytes(model, axes, "float32") + work
    return 2 * layer_bytes(model, axes, "float32") + work
