"""Bytes of a decoder's temporaries on one device: which arrays exist at the fullest moments.

Counted in arrays of one block: x [t, D], f [t, F] (inside the MLP), q [t, N*H] and kv [t, 2*KV*H]
with t = rows * width tokens of this device, and the attention scores s [rows, N, T, T] in float32,
of long rows those of a block of queries (`attention_by_blocks`). The counts were read from the live
ranges that XLA assigns to the real programs, those of scores on a CPU in float32, all others on
GPUs and TPUs. `benchmarks/plan_compared.py` and `tests/aot` hold them against the compilers' own
accounts, `tests/plan/test_plan_true.py` against that of a CPU, which fuses less. Fused attention
(`kernels.fuses`) holds no scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from jaxrl.models.attention import BLOCK, block_size
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Remat
from jaxrl.models.experts import AT_ONCE, block_rows
from jaxrl.models.quantised import packed
from jaxrl.sharding.axes import Axes

F32 = 4
SAMPLER_ARRAYS = 2
"""Float32 arrays [slots, V] alive at once in the sampler."""


class Blocks(NamedTuple):
    """Bytes of one block's arrays, or how many of each there are."""

    x: float = 0
    f: float = 0
    q: float = 0
    kv: float = 0
    s: float = 0

    def times(self, counts: Blocks) -> int:
        return round(sum(a * b for a, b in zip(self, counts, strict=True)))


SAVED: dict[Remat, Blocks] = {
    "full": Blocks(x=1),
    "dots": Blocks(x=2, f=2, q=1, kv=1),
    "none": Blocks(x=9, f=6, q=2, kv=1, s=2.25),
}
"""Kept by each layer for the backward pass. Full: its input. Dots: also its matrix products. None:
everything, the attention mask spread over the heads included."""
FROZEN_NORMS, FROZEN_QK_NORM = Blocks(x=2), Blocks(q=1, kv=0.5)
"""Fewer where the norms are not trained, under adapters: what they scale is kept for the gradients
of their scales only."""
SAVED_QK_NORM = Blocks(q=3, kv=1.5)
"""And without remat on several devices where queries and keys are normalised: both as they were
before, and in the float32 that their norms compute in."""
BACKWARD: dict[Remat, tuple[Blocks, ...]] = {
    "full": (Blocks(x=7, f=6, q=2, kv=1, s=2),),
    "dots": (Blocks(x=11, f=1, q=1, kv=1, s=2.5), Blocks(x=7, f=4, q=1, kv=1, s=1)),
    "none": (Blocks(x=10, f=3, q=2, kv=1, s=2),),
}
"""Alive while one layer is differentiated, beyond what was saved: the fullest moments, where which
of them is fuller depends on the shape (attention, MLP)."""
FUSED = Blocks(f=1.5)
"""Fewer of these on a GPU with remat full, which fuses more: the difference to the compiled bytes
of seven updates, from 9k to 32k tokens in a micro-batch."""
FORWARD: dict[Remat, tuple[Blocks, ...]] = {
    "full": (Blocks(x=1, q=1, kv=0.5, s=3),),
    "dots": (Blocks(x=1, q=1, kv=0.5, s=3),),
    "none": (Blocks(x=1, f=4, s=1),),
}
"""Alive while one layer runs in a program that will differentiate it."""
MLP = Blocks(x=1.5, f=2)
"""The same where nothing will be differentiated, in the MLP, whose products are fused with what
follows them. This and the next three were read from the compiled programs."""
STREAMS = Blocks(x=2, f=2)
"""The same of streams (`models.packing`): the residual and its norm, or the next one, and both
products that are multiplied."""
STATES = Blocks(x=2, s=1.6)
"""In a layer with a state, of rows or streams: what goes into the scan over chunks, what comes out
of it and what is turned for it, in float32, beside the residual and its norm. Read from the score
of a model of Qwen3.5-9B's widths, compiled for a GPU; a TPU takes less."""
SUMMED = Blocks(x=0.5)
"""More on a GPU where `tensor` sums the results of the MLP; of streams twice as much."""
WHOLE_ROWS = Blocks(x=2, q=2, kv=1)
"""In layers with a window, of a GPU's kernel and prompts that are shared: queries, results, keys
and values of whole sequences, each with its prompt. Read from compiled programs, as the next."""
WHOLE_ROWS_BACKWARD = Blocks(x=8, q=5, kv=3)
"""The same where they are differentiated, beside another kind of layers; 20% fewer where all have
the window."""
PREFETCHED = 1
"""Layers, not stacked, whose weights a GPU has gathered over `fsdp` at once, where the products of
a layer take longer than its gathers: from some thousand tokens on a device on."""
SCORES, PACKED_SCORES = Blocks(x=1, q=1, kv=1, s=3), Blocks(x=1, q=2, kv=2, s=3)
"""In attention without a kernel: of rows; of streams, whose queries, keys and values exist as
streams and as rows."""
QK_NORM = Blocks(q=2, kv=1)
"""More in the backward pass, and in attention over streams, where queries and keys are
normalised."""


@dataclass(frozen=True)
class Pass:
    """One run of a decoder over rows of tokens, as one device sees it."""

    config: DecoderConfig
    axes: Axes
    rows: int
    """Sequences on this device."""
    width: int
    """T, tokens of each."""
    itemsize: int
    """Bytes of the compute dtype."""
    fused_attention: bool = False
    shared: tuple[int, int] | None = None
    """(G, P) where the first P tokens are computed once for G rows."""
    packed: bool = False
    """Whether it runs over streams."""
    platform: str = "cpu"
    """As `models.kernels.Target.platform`."""

    @property
    def tokens(self) -> int:
        tokens = self.rows * self.width
        if self.shared is not None:
            group, prompt = self.shared
            tokens = self.rows * (self.width - prompt) + -(-self.rows // group) * prompt
        return -(-tokens // self.axes.context)

    @property
    def pairs(self) -> int:
        """Of a token and one that it might attend to, whose scores exist at once."""
        if self.shared is None:
            return self.rows * self._scored(self.width, self.width)
        group, prompt = self.shared
        of_prompts = -(-self.rows // group) * self._scored(prompt, prompt)
        return self.rows * self._scored(self.width - prompt, self.width) + of_prompts

    def _scored(self, queries: int, keys: int) -> int:
        """`pairs` of a row, in the layers that have most: a block of queries reads no keys that its
        window does not reach."""
        size, windows = at_once(queries), self.config.windows
        if not windows:  # of layers that have a state
            return 0
        if size == queries or None in windows:
            return size * keys
        return size * min(keys, size + max(window for window in windows if window) - 1)

    def _whole_rows(self, counts: Blocks) -> int:
        """Bytes of whole sequences in attention, where cuDNN's window needs them."""
        needed = self.fused_attention and self.platform == "gpu" and self.shared is not None
        if not needed or self.config.windows.keys() <= {None}:
            return 0
        unit = self.rows * self.width * self.itemsize
        q, kv = (n * unit for n in self._heads(self.axes.heads))
        return Blocks(x=self.residual, q=q, kv=kv).times(counts)

    def _heads(self, parts: int) -> tuple[int, int]:
        """Dims of a token's queries, and of its keys and values, where `parts` divide the heads: in
        the layers that have most."""
        each = self.config.shapes
        q = max(split(one.n_heads, parts) * one.head_dim for one in each)
        return q, max(2 * split(one.n_kv_heads, parts) * one.head_dim for one in each)

    @property
    def _wide(self) -> int:
        """Width of the MLP on this device, in the layers that have most."""
        return max(split(one.mlp_width, self.axes.tensor) for one in self.config.shapes)

    @property
    def residual(self) -> int:
        """Bytes of [t, D]; whole on each device of `tensor`."""
        return self.tokens * self.config.d_model * self.itemsize

    @property
    def blocks(self) -> Blocks:
        c, tensor, unit = self.config, self.axes.tensor, self.tokens * self.itemsize
        s = 0 if self.fused_attention else split(c.n_heads, self.axes.heads) * self.pairs * F32
        if c.delta is not None:  # queries, keys, values and results of a state are in float32
            parts = c.delta.parts(tensor)
            s = max(s, self.tokens * 2 * (c.delta.k_width + c.delta.v_width) // parts * F32)
        q, kv = (n * unit for n in self._heads(tensor))
        return Blocks(x=self.residual, f=self._wide * unit, q=q, kv=kv, s=s)

    @property
    def alone(self) -> Blocks:
        """`blocks` with the scores of the completions only: those of the prompts that they share
        are gone before."""
        if self.shared is None:
            return self.blocks
        completions = self.rows * self._scored(self.width - self.shared[1], self.width)
        return self.blocks._replace(s=round(self.blocks.s * completions / self.pairs))

    @property
    def mask(self) -> int:
        """Bytes of who may attend to whom, which fused attention computes, and of the rotary
        angles."""
        angles = self.tokens * sum(self.config.head_dims) * F32
        return angles if self.fused_attention else self.pairs + angles

    @property
    def layer(self) -> int:
        """Bytes of one layer's weights, gathered over `fsdp`, in the compute dtype: of the layers
        that have most; of quantised experts, which are dequantised a few at a time, their codes."""
        return max(map(self._weights, self.config.shapes))

    def _weights(self, one: DecoderConfig) -> int:
        """`layer` of a model with one."""
        c, tensor = one, self.axes.tensor
        queries = (2 + c.block.output_gate) * split(c.n_heads, tensor)
        width = (queries + 2 * split(c.n_kv_heads, tensor)) * c.head_dim
        if c.delta is not None:
            parts = c.delta.parts(tensor)
            width = max(width, (2 * c.delta.k_width + 3 * c.delta.v_width) // parts)
        weights = split(c.mlp_width, tensor)
        if c.experts is not None:
            experts = split(c.experts.count, self.axes.expert) * split(c.d_ff, tensor)
            if c.quantised is not None:
                experts = experts // packed(c.quantised) // self.itemsize
            weights += experts
        return c.d_model * (width + 3 * weights) * self.itemsize

    @property
    def cycles(self) -> int:
        """Turns of the scan over stacked layers."""
        return self.config.n_layers // self.config.cycle

    @property
    def gathered(self) -> int:
        """The same of all layers of a cycle, which `fsdp` gathers at once."""
        if self.axes.weights == 1:
            return self.layer
        c = self.config
        return sum(self._weights(c.of(kind)) for kind in c.kinds[: c.cycle])

    @property
    def differentiated(self) -> int:
        """Bytes of weights and their gradients while a layer of a cycle is differentiated, or all
        that `fsdp` gathered; layers of one kind are stacked for that (`stack.through`)."""
        if self.config.cycle == 1:
            return self.layer
        c = self.config
        shapes = groupby(kind.shape for kind in c.kinds[: c.cycle])
        run = max(len(list(same)) * self._weights(c.of(shape)) for shape, same in shapes)
        return self.gathered * (2 if self.axes.weights > 1 else 1) + 2 * run

    @property
    def _abreast(self) -> int:
        """How many blocks of a cycle may be differentiated at once: those that are no scan, since
        no neighbour has their shape, of which XLA begins all as soon as it can."""
        c = self.config
        shapes = groupby(kind.shape for kind in c.kinds[: c.cycle])
        return max(sum(len(list(same)) == 1 for _, same in shapes), 1)

    def mixture(self, differentiated: bool = False) -> int:
        """Bytes alive while the experts of a layer compute (`models.experts.chosen_experts`): the
        results of all rows, which may all be of this device's experts; and of the rows that are
        computed at a time, their input, the products and their experts' kernels. Where it is
        differentiated, also the gradients of the kernels, or of their adapters, in float32. 0
        without experts."""
        c, item = self.config, self.itemsize
        if c.experts is None:
            return 0
        d, wide = c.d_model, split(c.d_ff, self.axes.tensor)
        own = split(c.experts.count, self.axes.expert)
        tokens = self.tokens * (c.experts.count // own)
        size = block_rows(tokens * c.experts.chosen, c.experts.count)
        blocks = tokens * c.experts.chosen // size + own
        at_once = min(max(AT_ONCE // size, 1), blocks)
        blocks = -(-blocks // at_once) * at_once
        shared = 2 * tokens * d * item * (own < c.experts.count)
        results = blocks * size * d * item
        kernels, rows = at_once * d * wide, at_once * size
        if not differentiated:
            return shared + results + (rows * (d + 2 * wide) + 2 * kernels) * item
        products = (rows * (3 * d + 6 * wide) + 3 * kernels) * item
        if c.lora is None:
            summed, products = 3 * own * d * wide * F32, products + 2 * kernels * F32
        else:
            summed = 3 * own * c.lora.rank * (d + wide) * F32
        return shared + results + summed + products

    @property
    def every_expert(self) -> int:
        """The same in a decode step of `tokens` slots (`models.experts.every_expert`)."""
        c = self.config
        if c.experts is None:
            return 0
        own = split(c.experts.count, self.axes.expert)
        tokens = self.tokens * (c.experts.count // own)
        wide = split(c.d_ff, self.axes.tensor)
        rows = own * tokens * (c.d_model + 3 * wide)
        return (rows + own * c.d_model * wide * (c.quantised is not None)) * self.itemsize

    @property
    def beside(self) -> int:
        """Bytes of what all layers read of tokens beside the residual, and of keys and values that
        layers borrow."""
        c = self.config
        lent = sum(
            2 * split(one.n_kv_heads, self.axes.tensor) * one.head_dim
            for one in map(c.of, c.lenders)
        )
        return self.tokens * (c.n_layers * c.layer_inputs + lent) * self.itemsize

    def saved(self, remat: Remat) -> int:
        """Bytes that the forward pass leaves for the backward pass."""
        each = self.config.shapes.items()
        layers = sum(n * replace(self, config=one)._saved_by_layer(remat) for one, n in each)
        layers += self.beside
        return layers + (self._kept_by_states if remat != "full" else 0)

    def _saved_by_layer(self, remat: Remat) -> int:
        by_blocks = self.width > BLOCK  # whose scores are computed again
        kept = self.blocks._replace(s=0) if by_blocks else self.blocks
        per_layer = kept.times(SAVED[remat])
        if remat == "none" and self.axes.size > 1:
            normed = self.config.block.qk_norm
            per_layer += bool(normed) * self.blocks.times(SAVED_QK_NORM)
            if self.config.lora is not None:
                per_layer -= self.blocks.times(FROZEN_NORMS)
                per_layer -= bool(normed) * self.blocks.times(FROZEN_QK_NORM)
        return per_layer

    @property
    def _kept_by_states(self) -> int:
        """Bytes of the products of layers with a state beyond those of layers with attention, whose
        output has a gate. 0 without states."""
        c, tensor, unit = self.config, self.axes.tensor, self.tokens * self.itemsize
        if c.delta is None:
            return 0
        parts = c.delta.parts(tensor)
        gate = split(c.n_heads, tensor) * c.head_dim
        attention = gate + 2 * split(c.n_kv_heads, tensor) * c.head_dim
        more = max(2 * (c.delta.k_width + c.delta.v_width) // parts - attention, 0)
        return (c.n_recurrent * more + c.n_attention * gate) * unit

    def backward(self, remat: Remat) -> int:
        """Bytes alive while one block is differentiated, its weights or its gradient included."""
        normed = self.blocks.times(QK_NORM) if self.config.block.qk_norm else 0
        fused = self.fused_attention and self.platform == "gpu" and remat == "full"
        # What adapters add comes between the products where kernels are gathered.
        fused = fused and (self.config.lora is None or self.axes.weights == 1)
        work = self._fullest(BACKWARD[remat]) - fused * self.blocks.times(FUSED)
        work = max(work, 3 * self.residual + self.mixture(differentiated=True))
        work = max(work, self._whole_rows(WHOLE_ROWS_BACKWARD)) * self._abreast
        return work + normed + self.differentiated + self.mask + self.beside

    def first(self, remat: Remat) -> int:
        """Bytes alive while one block runs that will be differentiated."""
        work = max(self._fullest(FORWARD[remat]), self._whole_rows(WHOLE_ROWS))
        work = max(work, 2 * self.residual + self.mixture())
        return work + self.gathered + self.mask + self.beside

    def forward(self, stacked: bool) -> int:
        """Bytes alive while one block runs without a backward pass.

        A scan over stacked layers copies each layer's weights (of the MLP's three one is left where
        it needs most), and `fsdp` gathers them; layer after layer they are read in place. Kernels
        that a GPU transposes before that scan are counted apart (`plan.memory.turned_bytes`).
        """
        counts = STREAMS if self.packed else MLP
        work = max(self.alone.times(counts), self._whole_rows(WHOLE_ROWS))
        work = max(work, 2 * self.residual + self.mixture())
        if self.config.delta is not None:
            work = max(work, self.blocks.times(STATES))
        if not self.fused_attention:
            normed = self.packed and self.config.block.qk_norm == "head"  # over all heads: fused
            scores = self.alone.times(PACKED_SCORES if self.packed else SCORES)
            work = max(work, scores + normed * self.blocks.times(QK_NORM))
        if self.platform == "gpu":
            work += self.blocks.times(SUMMED) * (1 + self.packed) * (self.axes.tensor > 1)
            if self.packed and not stacked:
                work += self.residual  # of the next layer
        if self.axes.weights > 1 and self.platform != "tpu":
            work += self.gathered if stacked else PREFETCHED * self.layer
        elif stacked and self.cycles > 1:  # however many layers a turn has
            work += self.layer // 3
        return work + self.mask + self.beside

    def _fullest(self, moments: tuple[Blocks, ...]) -> int:
        return max(self.blocks.times(counts) for counts in moments)


def at_once(queries: int) -> int:
    """Of a row's queries, those that attend at once without a kernel."""
    return queries if queries <= BLOCK else block_size(queries)


def split(size: int, parts: int) -> int:
    """A dim's size on one device: what does not divide stays whole (as in `rules.py`)."""
    return size // parts if size % parts == 0 else size


def logits(tokens: int, vocab: int, tensor: int, arrays: float) -> int:
    """Bytes of the float32 logits and their companions for `tokens` tokens at once."""
    return round(arrays * F32 * tokens * -(-vocab // tensor))


def whole_rows(vocab: int, width: int, axes: Axes, itemsize: int) -> int:
    """Bytes of an LM head's or an embedding's rows on this device, at full width."""
    return -(-vocab // axes.tensor) * width * itemsize
