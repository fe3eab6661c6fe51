"""Bytes of a decoder's temporaries on one device: an analytic model with measured coefficients.

Counted in arrays of one block: x [t, D], f [t, F] (inside the MLP), q [t, N*H] and kv [t, 2*KV*H]
with t = rows * width tokens of this device, and the attention scores s [rows, N, T, T] in float32.
The coefficients are fits to `compiled.memory_analysis()` of the float32 forward and backward pass
on CPU over 17 shapes; a whole update is within 12 % on one to four devices. Fused attention, which
a GPU takes in bfloat16, holds no scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Remat
from jaxrl.sharding.placement import Axes

F32 = 4
FUSED_ARRAYS, LEAN_ARRAYS, SAMPLER_ARRAYS = 6, 4, 5
"""Float32 arrays [tokens, V] alive at once: in a loss that keeps its gradients, in one that does
not, in the sampler."""


class Blocks(NamedTuple):
    """Bytes of one block's arrays, or how many of each there are."""

    x: float
    f: float
    q: float
    kv: float
    s: float

    def times(self, counts: Blocks) -> int:
        return round(sum(a * b for a, b in zip(self, counts, strict=True)))


SAVED: dict[Remat, Blocks] = {
    "full": Blocks(x=1, f=0, q=0, kv=0, s=0),
    "dots": Blocks(x=2, f=2, q=1, kv=1, s=0),
    "none": Blocks(x=7, f=6.6, q=2.3, kv=1.1, s=1.5),
}
"""Kept by each layer for the backward pass. Full: its input. Dots: also its matrix products."""
BACKWARD: dict[Remat, Blocks] = {
    "full": Blocks(x=7, f=8.3, q=2, kv=2, s=3),
    "dots": Blocks(x=0, f=4.6, q=0, kv=0, s=3),
    "none": Blocks(x=0, f=0, q=0, kv=0, s=6.4),
}
"""Alive while one layer is differentiated, beyond what was saved."""


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

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    @property
    def residual(self) -> int:
        """Bytes of [t, D]; whole on each device of `tensor`."""
        return self.tokens * self.config.d_model * self.itemsize

    @property
    def blocks(self) -> Blocks:
        c, tensor, unit = self.config, self.axes.tensor, self.tokens * self.itemsize
        heads = split(c.n_heads, tensor)
        return Blocks(
            x=self.residual,
            f=split(c.d_ff, tensor) * unit,
            q=heads * c.head_dim * unit,
            kv=2 * split(c.n_kv_heads, tensor) * c.head_dim * unit,
            s=0 if self.fused_attention else heads * self.tokens * self.width * F32,
        )

    @property
    def mask(self) -> int:
        """Bytes of who may attend to whom; fused attention wants it in the compute dtype too."""
        return self.tokens * self.width * (1 + self.itemsize * self.fused_attention)

    @property
    def layer(self) -> int:
        """Bytes of one layer's weights, gathered over `fsdp`, in the compute dtype."""
        c, tensor = self.config, self.axes.tensor
        heads = 2 * split(c.n_heads, tensor) + 2 * split(c.n_kv_heads, tensor)
        return c.d_model * (heads * c.head_dim + 3 * split(c.d_ff, tensor)) * self.itemsize

    def saved(self, remat: Remat) -> int:
        """Bytes that the forward pass leaves for the backward pass."""
        return self.config.n_layers * self.blocks.times(SAVED[remat])

    def backward(self, remat: Remat) -> int:
        """Bytes alive while one block is differentiated, its weights or its gradient included."""
        return self.blocks.times(BACKWARD[remat]) + self.layer + self.mask

    def forward(self, stacked: bool) -> int:
        """Bytes alive while one block runs without a backward pass.

        A scan over stacked layers copies each layer's weights; `fsdp` gathers them.
        """
        b = self.blocks
        if stacked:
            work = max(3 * b.s, 2 * b.f + 1.5 * b.x)
        else:
            work = max(2.1 * b.s + 2 * b.x + b.kv, 3.5 * b.f + b.x)
        copy = self.layer if stacked or self.axes.fsdp > 1 else 0
        return round(max(work, 2 * b.q + b.kv + b.x)) + copy + self.mask


def split(size: int, parts: int) -> int:
    """A dim's size on one device: what does not divide stays whole (as in `rules.py`)."""
    return size // parts if size % parts == 0 else size


def logits(tokens: int, vocab: int, tensor: int, arrays: float) -> int:
    """Bytes of the float32 logits and their companions for `tokens` tokens at once."""
    return round(arrays * F32 * tokens * -(-vocab // tensor))


def gathered_head(vocab: int, width: int, axes: Axes, itemsize: int) -> int:
    """Bytes of an LM head's rows at full width, where they are not that already."""
    return -(-vocab // axes.tensor) * width * itemsize if axes.fsdp > 1 else 0
