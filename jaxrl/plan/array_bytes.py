"""Computes the bytes of arrays on one device, without a compiler.

Weights, optimizer state and KV cache are exact, from each leaf's shard
(`models/parameters.py`); the optimizer's scratch is not. The temporaries of a pass over a
decoder are an estimate. It adds up what the layers keep for the backward pass (by `actor.remat`),
the working set of the widest block, one chunk of logits and the weights that are gathered, and errs
on the safe side: over the programs of `benchmarks/plan_compared.py` a role's estimate is between 3%
below and 25% above the bytes that the compilers of GPUs and TPUs report. The compiler's own bytes
come from `--dry-run --compile` and from the start of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.config.section import DType
from jaxrl.config.settings import OptimizerConfig
from jaxrl.models.attention import BLOCK, query_block
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Remat
from jaxrl.models.experts import AT_ONCE, Experts, block_rows, more_blocks, step_rows
from jaxrl.models.lora import NAMES
from jaxrl.models.parameters import abstract_params, param_shardings
from jaxrl.sharding.axes import AXIS_NAMES, Axes

F32 = 4
MUON_ARRAYS = 8
"""Arrays of the size of one layer's kernel that are alive while it is orthogonalised, at most."""
ITEMSIZE: dict[DType, int] = {"float32": 4, "bfloat16": 2}


def split(size: int, parts: int) -> int:
    """Returns a dim's size on one device: what does not divide stays whole."""
    return size // parts if size % parts == 0 else size


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
    """Returns every parameter's piece on one device of a mesh with these axes."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout=layout))
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    shardings = jax.tree.leaves(param_shardings(config, mesh, layout))
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
    """Returns the bytes of the model's parameters on one device."""
    return sum(shard.bytes(dtype) for shard in shards(config, axes))


@lru_cache(maxsize=256)
def trained_shards(config: DecoderConfig, axes: Axes) -> tuple[Shard, ...]:
    """Returns those of `shards` that the actor trains: the adapters, where the model has any."""
    every = shards(config, axes)
    adapters = tuple(shard for shard in every if shard.path.endswith(NAMES))
    return adapters or every


def trained_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Returns the bytes of the parameters that the actor trains on one device."""
    return ITEMSIZE[dtype] * sum(shard.size for shard in trained_shards(config, axes))


@lru_cache(maxsize=256)
def layer_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Returns `weight_bytes` without embedding, final norm and head."""
    return sum(s.bytes(dtype) for s in shards(config, axes) if s.path.startswith("layers"))


def cache_bytes(config: DecoderConfig, axes: Axes, rows: int, positions: int, dtype: DType) -> int:
    """Returns the bytes of keys and values of `rows` sequences on one device, all layers, and of
    states."""
    item = ITEMSIZE[dtype]
    state = 0 if config.delta is None else config.delta.state_bytes(item, axes.tensor)
    token = item * sum(
        2 * n * split(one.n_kv_heads, axes.tensor) * one.head_dim
        for one, n in config.shapes.items()
        if one.kinds[0].keeps
    )
    return rows * (positions * token + config.n_recurrent * state)


@lru_cache(maxsize=64)
def optimizer_scratch(model: DecoderConfig, axes: Axes, optimizer: OptimizerConfig) -> int:
    """Returns the bytes that an optimizer step writes out beside the gradient and its state, on one
    device: the clipped gradient or the update in float32 (adafactor: both), and of muon one layer's
    largest kernel while it is orthogonalised: gathered, with the products of a step of Newton and
    Schulz (Jordan et al. 2024).
    """
    whole = trained_bytes(model, axes, "float32")
    if optimizer.name != "muon":
        return whole * (2 if optimizer.name == "adafactor" else 1)
    kernels = (
        shard.size // shard.local[0]
        for shard in trained_shards(model, axes.gathered)
        if shard.path.endswith(("kernel", *NAMES)) and len(shard.shape) >= 3
    )
    return whole + MUON_ARRAYS * max(kernels) * F32


class Arrays(NamedTuple):
    """Sizes of one block's activations in bytes, or how many of each are alive."""

    x: float = 0
    """[tokens, d_model]."""
    f: float = 0
    """[tokens, d_ff]."""
    q: float = 0
    """[tokens, heads, head_dim]."""
    kv: float = 0
    """Keys and values, [2, tokens, kv_heads, head_dim]."""
    s: float = 0
    """Attention scores in float32, where no kernel computes attention."""

    def times(self, counts: Arrays) -> int:
        """Returns the bytes of so many of each array."""
        return round(sum(size * count for size, count in zip(self, counts, strict=True)))


SAVED: dict[Remat, Arrays] = {
    "full": Arrays(x=1),
    "dots": Arrays(x=2, f=2, q=1, kv=1),
    "none": Arrays(x=9, f=6, q=2, kv=1, s=2.25),
}
"""Kept by each layer for the backward pass. full: its input; dots: also the results of its matrix
products; none: everything."""
BACKWARD = Arrays(x=8, f=5, q=2, kv=1, s=2.5)
"""Alive while one block is differentiated, beyond what was saved."""
FORWARD = Arrays(x=2.5, f=2)
"""Alive in the MLP of one block without a backward pass: the residual, its norm, gate and up."""
ATTENTION = Arrays(x=1, q=2, kv=2, s=3)
"""The same in attention without a kernel, or with whole rows beside shared prompts."""
RECURRENT = Arrays(x=2, s=1.6)
"""The same in a layer with a recurrent state, whose chunks are in float32."""
NORMED = Arrays(q=2, kv=1)
"""More where queries and keys are normalised in float32."""


@dataclass(frozen=True)
class Pass:
    """One pass of a decoder over rows of tokens, as one device sees it."""

    config: DecoderConfig
    axes: Axes
    rows: int
    """Sequences on this device."""
    width: int
    """Tokens of each."""
    dtype: DType
    """That it computes in."""
    fused_attention: bool = False
    shared: tuple[int, int] | None = None
    """(G, P) where the first P tokens are computed once for G rows."""

    @property
    def itemsize(self) -> int:
        """Returns the bytes of a number in the compute dtype."""
        return ITEMSIZE[self.dtype]

    @property
    def tokens(self) -> int:
        """Counts the tokens that this device computes."""
        tokens = self.rows * self.width
        if self.shared is not None:
            group, prompt = self.shared
            tokens = self.rows * (self.width - prompt) + -(-self.rows // group) * prompt
        return -(-tokens // self.axes.context)

    @property
    def residual(self) -> int:
        """Returns the bytes of [tokens, d_model], which each device of `tensor` has whole."""
        return self.tokens * self.config.d_model * self.itemsize

    @property
    def scores(self) -> int:
        """Returns the bytes of the scores that exist at once, in float32: those of a block of
        queries where rows are long; 0 where a kernel computes attention."""
        c = self.config
        if self.fused_attention or not c.windows:
            return 0
        # The scores of a prompt that a group shares are gone before those of its completions.
        computed = self.width - (self.shared[1] if self.shared is not None else 0)
        queries = computed if computed <= BLOCK else query_block(computed)
        keys = self.width
        if queries < computed and None not in c.windows:
            keys = min(keys, queries + max(window for window in c.windows if window) - 1)
        return split(c.n_heads, self.axes.heads) * self.rows * queries * keys * F32

    @property
    def arrays(self) -> Arrays:
        """Returns the sizes of a block's activations, of the layers that have most."""
        c, tensor, unit = self.config, self.axes.tensor, self.tokens * self.itemsize
        q = max(split(one.n_heads, tensor) * one.head_dim for one in c.shapes)
        kv = max(2 * split(one.n_kv_heads, tensor) * one.head_dim for one in c.shapes)
        f = max(split(one.mlp_width, tensor) for one in c.shapes)
        s = self.scores
        if c.delta is not None:  # queries, keys, values and results of a state are in float32
            wide = (c.delta.k_width + c.delta.v_width) // c.delta.parts(tensor)
            s = max(s, self.tokens * 2 * wide * F32)
        return Arrays(self.residual, f * unit, q * unit, kv * unit, s)

    @property
    def whole_rows(self) -> bool:
        """Returns whether attention with a window reads whole sequences, each with its own
        prompt."""
        return self.shared is not None and any(w is not None for w in self.config.windows)

    def layer(self, one: DecoderConfig) -> int:
        """Returns the bytes of the gathered weights of a layer, of a model with one kind of them,
        in the compute dtype."""
        return layer_bytes(one, self.axes.gathered, self.dtype) // one.n_layers

    @property
    def widest(self) -> int:
        """Returns the bytes of the widest layer's weights, gathered, in the compute dtype."""
        return max(map(self.layer, self.config.shapes))

    @property
    def gathered(self) -> int:
        """Returns the bytes of the weights of one turn of the loop over layers: copied by the
        loop, and gathered where they are split. Recurrent layers wait for the ones before them,
        and their copies with them."""
        c = self.config
        if self.axes.weights == 1 and c.delta is None:
            return self.widest
        return sum(self.layer(c.of(kind)) for kind in c.kinds[: c.cycle])

    @property
    def beside(self) -> int:
        """Returns the bytes of what all layers read: rotary angles, the mask, their own inputs,
        and keys and values that layers borrow."""
        c = self.config
        lent = sum(
            2 * split(one.n_kv_heads, self.axes.tensor) * one.head_dim
            for one in map(c.of, c.lenders)
        )
        mask = 0 if self.fused_attention else self.scores // F32
        inputs = (c.n_layers * c.layer_inputs + lent) * self.itemsize
        return self.tokens * (sum(c.head_dims) * F32 + inputs) + mask

    def _experts(self, experts: Experts) -> tuple[int, int, int]:
        """Returns how many experts are on a device, their width there, and its tokens with those
        that come from the other devices of `expert`."""
        own = split(experts.count, self.axes.expert)
        wide = split(self.config.d_ff, self.axes.tensor)
        return own, wide, self.tokens * (experts.count // own)

    def mixture(self, differentiated: bool = False) -> int:
        """Returns the bytes alive while the experts of a layer compute: the results of all rows,
        and the input, products and kernels of the rows that are computed at a time; where it is
        differentiated, the gradients of the kernels in float32 too. 0 without experts."""
        c, d, item = self.config, self.config.d_model, self.itemsize
        if c.experts is None:
            return 0
        own, wide, tokens = self._experts(c.experts)
        size = block_rows(tokens * c.experts.chosen, c.experts.count)
        blocks = tokens * c.experts.chosen // size + own
        at_once = min(max(AT_ONCE // size, 1), blocks)
        results = (-(-blocks // at_once) * at_once * size + 2 * tokens) * d * item
        kernels, rows = at_once * d * wide * item, at_once * size * item
        if not differentiated:  # kernels that are gathered are transposed too
            gathered = 3 * own * d * wide * item * (self.axes.weights > 1)
            return results + rows * (d + 2 * wide) + 2 * kernels + gathered
        trained, products = d * wide, 7
        if c.lora is not None:  # whose gradients are summed in place of the kernels'
            trained, products = c.lora.rank * (d + wide), 3
        summed = 3 * own * trained * F32
        return results + rows * (3 * d + 6 * wide) + products * kernels + summed

    def step_blocks(self, ridge: float) -> tuple[int, int]:
        """Returns the rows of all blocks of experts that a layer computes in a decode step of
        `tokens` slots, on a device with this `targets.ridge`, and the experts whose kernels it
        gathers. No rows without experts."""
        c = self.config
        if c.experts is None:
            return 0, 0
        own, wide, tokens = self._experts(c.experts)
        size = step_rows(tokens, c.experts.chosen, own, c.d_model, wide, ridge)
        more = more_blocks(tokens, c.experts.chosen, own, size)
        return (own + more) * size, more

    def step_experts(self, ridge: float) -> int:
        """Returns the bytes while a decode step computes the experts of a layer, as in
        `step_blocks`."""
        c, d = self.config, self.config.d_model
        if c.experts is None:
            return 0
        own, wide, _ = self._experts(c.experts)
        rows, gathered = self.step_blocks(ridge)
        further = rows * gathered // (own + gathered)
        summed = gathered > 0 or c.lora is not None  # beside the products, not by the last of them
        computed = rows * (3 * wide + d * summed) + own * d * wide * (c.quantised is not None)
        return max(computed, 3 * gathered * d * wide + further * (d + 2 * wide)) * self.itemsize

    def saved(self, remat: Remat) -> int:
        """Returns the bytes that the forward pass leaves for the backward pass."""
        total = self.beside
        for one, n in self.config.shapes.items():
            arrays = replace(self, config=one).arrays
            if self.width > BLOCK:  # whose scores are computed again
                arrays = arrays._replace(s=0)
            kept = arrays.times(SAVED[remat])
            if remat == "none" and one.block.qk_norm and one.lora is None and self.axes.size > 1:
                kept += arrays.times(Arrays(q=3, kv=1.5))
            if remat != "full" and one.delta is not None:
                kept += arrays.times(Arrays(q=1, s=0.5))  # products of a state, and of its gate
            total += n * kept
        return total

    def backward(self) -> int:
        """Returns the bytes alive while one block is differentiated, its weights and their
        gradients included."""
        c, arrays = self.config, self.arrays
        work = arrays.times(BACKWARD)
        if self.whole_rows:  # queries, keys, values, results and their gradients of whole rows
            work += round((arrays.q + arrays.kv) * 4 * self.rows * self.width / self.tokens)
        if any(one.block.qk_norm for one in c.shapes):
            work += arrays.times(NORMED)
        work = max(work, 3 * self.residual + self.mixture(differentiated=True))
        # Blocks of a cycle without a neighbour of their shape are no scan: XLA may begin all.
        runs = [len(list(same)) for _, same in groupby(kind.shape for kind in c.kinds[: c.cycle])]
        weights = 2 * self.gathered if c.cycle == 1 or self.axes.weights > 1 else self.widest
        if c.lora is not None:  # weights under adapters have no gradients
            weights = self.gathered
        if c.cycle > 1:  # layers of one shape are stacked to be differentiated
            weights += 2 * max(runs) * self.widest
        return work * max(sum(n == 1 for n in runs), 1) + weights + self.beside

    def forward(self) -> int:
        """Returns the bytes alive while one block runs without a backward pass."""
        c, arrays = self.config, self.arrays
        work = max(arrays.times(FORWARD), 2 * self.residual + self.mixture())
        if arrays.s and c.delta is None or self.whole_rows:
            scale = self.rows * self.width / self.tokens if self.whole_rows else 1
            work = max(work, round(scale * arrays.times(ATTENTION)))
        if c.delta is not None:
            work = max(work, arrays.times(RECURRENT), arrays.times(ATTENTION) * (self.scores > 0))
        if any(one.block.qk_norm == "head" for one in c.shapes):
            work += arrays.times(NORMED) * (self.scores > 0)
        return work + self.gathered + self.beside


def logits(tokens: int, vocab: int, tensor: int, arrays: float) -> int:
    """Returns the bytes of so many float32 arrays [tokens, vocab]."""
    return round(arrays * F32 * tokens * -(-vocab // tensor))


def table_bytes(vocab: int, width: int, axes: Axes, itemsize: int) -> int:
    """Returns the bytes of an embedding's or LM head's rows on this device, at full width."""
    return -(-vocab // axes.tensor) * width * itemsize
