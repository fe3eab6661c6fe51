"""Memory of the frozen models that read texts, the grouper and the reward model, in bytes on one
device; computed before any weight is read.

Weights are exact. Temporaries are counted in arrays of one block, as in `models/activations.py`,
read from the live ranges that XLA assigns to the real programs (CPU, float32; the encoder's also
from those of a GPU in bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

from jaxrl.config.roles import GrouperConfig, RewardConfig
from jaxrl.config.section import DType
from jaxrl.models import bert
from jaxrl.models.activations import F32, Pass, at_once, split, whole_rows
from jaxrl.models.batching import rows_of, width_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.encoder_config import EncoderConfig
from jaxrl.models.kernels import GPU, Target, fuses
from jaxrl.plan.memory import ITEMSIZE, Account, Entry, turned_bytes, weight_bytes
from jaxrl.sharding.axes import AXIS_NAMES, Axes


def grouper_account(
    model: EncoderConfig, axes: Axes, section: GrouperConfig, longest: int, target: Target
) -> Account:
    """The grouper, as large as it is once it has been loaded, on its first use.

    Args:
        longest: tokens of the longest text, in the encoder's own; what its limit cuts may be more.
    """
    dtype = section.compute_dtype
    work = partial(encoder_work, model, axes, dtype=dtype, target=target)
    most = _fullest(work, section.batch_tokens, min(longest, model.max_tokens))
    return _account("grouper", encoder_bytes(model, axes, dtype), most, "embed")


def reward_account(
    model: DecoderConfig, axes: Axes, section: RewardConfig, longest: int, target: Target
) -> Account:
    """The reward model.

    Args:
        model: of its `RewardSource`: without an LM head.
        longest: tokens of the longest sequence, in the model's own.
    """
    dtype = section.compute_dtype
    work = partial(reward_work, model, axes, dtype=dtype, target=target)
    most = _fullest(work, section.batch_tokens, min(longest, model.max_positions))
    weights = weight_bytes(model, axes, dtype) + model.d_model * F32
    return _account("reward", weights, most, "score")


def _account(role: str, weights: int, work: int, phase: str) -> Account:
    resident = Entry("weights", "parameters", weights)
    return Account(role, (resident, Entry("activations", "forward pass", work, phase)))


def encoder_bytes(config: EncoderConfig, axes: Axes, dtype: DType) -> int:
    """Bytes of the encoder's parameters on one device."""
    sizes: dict[str, int] = dict(zip(AXIS_NAMES, axes, strict=True))
    specs, total = bert.specs(config, sizes), 0
    for path, shape in bert.shapes(config).items():
        parts = math.prod(sizes[axis] for axis in specs[path] if axis is not None)
        total += math.prod(shape) // parts
    return ITEMSIZE[dtype] * total


def encoder_work(
    config: EncoderConfig, axes: Axes, rows: int, width: int, dtype: DType, target: Target
) -> int:
    """Bytes of the temporaries while a device embeds `rows` texts of `width` tokens.

    One layer's weights (copied by the scan, gathered over `fsdp`), and in the MLP its input and its
    wide array, in attention the scores three times; or the words' table while it is gathered.

    A GPU with a kernel for attention copies one weight of the MLP only, whose wide array it holds
    twice: before and after its activation. It transposes what `fsdp` splits along the last dim, the
    second kernels of attention and MLP, of all layers before the first.
    """
    item, tensor = ITEMSIZE[dtype], axes.tensor
    fused = fuses(target, config.head_dim, dtype)
    tokens, wide = rows * width, split(config.d_ff, tensor)
    heads = split(config.n_heads, tensor)
    attended = heads * config.d_model // config.n_heads
    residual = tokens * config.d_model * item
    table = _gather(config, axes, item)
    if fused and target.platform in GPU:
        one = config.d_model * wide * item
        second = config.n_layers * config.d_model * (attended + wide) * item // axes.fsdp
        turned = second if axes.fsdp > 1 else 0
        return turned + max(residual + 2 * tokens * wide * item + one, table)
    layer = config.d_model * (4 * attended + 2 * wide) * item
    slices = config.d_model * wide * item // axes.fsdp if axes.fsdp > 1 else 0
    mlp = tokens * wide * item + slices
    scores_and_mask = tokens * at_once(width) * (3 * heads * F32 + 1)
    attention = 4 * tokens * attended * item if fused else scores_and_mask
    return max(layer + residual + max(mlp, attention), table)


def reward_work(
    config: DecoderConfig, axes: Axes, rows: int, width: int, dtype: DType, target: Target
) -> int:
    """Bytes of the temporaries while a device scores `rows` sequences of `width` tokens.

    As `Pass.forward` over stacked layers, with the counts of streams.
    """
    fused = all(fuses(target, dim, dtype) for dim in config.head_dims)
    platform = target.platform
    item = ITEMSIZE[dtype]
    run = Pass(config, axes, rows, width, item, fused, packed=True, platform=platform)
    table = _gather(config, axes, item)
    turned = turned_bytes(config, axes, dtype) if platform in GPU else 0
    return turned + max(run.forward(stacked=True), table + run.mask)


def _gather(config: EncoderConfig | DecoderConfig, axes: Axes, itemsize: int) -> int:
    """Bytes of the embedding at full width, beside the piece that stays, while it is read."""
    width = config.embedded if isinstance(config, DecoderConfig) else config.d_model
    table = whole_rows(config.vocab_size, width, axes, itemsize)
    return table + table // axes.fsdp if axes.fsdp > 1 else 0


def _fullest(work: Callable[[int, int], int], batch_tokens: int, longest: int) -> int:
    """The most that a batch of any width takes."""
    return max(work(rows_of(width, batch_tokens), width) for width in _widths(longest))


@cache
def _widths(longest: int) -> frozenset[int]:
    """Of all batches whose longest sequence has at most so many tokens."""
    return frozenset(width_of(n, longest) for n in range(1, longest + 1))
