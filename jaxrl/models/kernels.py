"""Which attention kernel a device runs, and the widths of arrays that suit it.

Decided from the device that will run the program, which is that of a mesh, or one that a plan is
made for: what is planned is what is computed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

GPU = ("gpu", "cuda")
"""`platform` of a GPU here, and of one that a program is compiled for elsewhere."""
OLDEST = (8, 0)
"""Compute capability from which cuDNN's wrapper takes a GPU; assumed of one that is not known."""
HEAD_DIMS = {(8, 0): 128, (9, 0): 256}
"""Compute capability -> the largest head dim that cuDNN's kernel has from there on."""
HEAD_DIM_MULTIPLE = 8
EVEN, TILE = 2, 64
"""Widths of arrays are multiples of these: on a CPU, and on accelerators."""


@dataclass(frozen=True)
class Target:
    """The device that a program is made for."""

    platform: str
    """As `jax.Device.platform`."""
    capability: tuple[int, int] | None = None
    """Compute capability of an NVIDIA GPU; None for anything else."""

    @property
    def width_multiple(self) -> int:
        """What the widths of prompts and completions are rounded up to a multiple of."""
        return EVEN if self.platform == "cpu" else TILE


CPU = Target("cpu")
UNKNOWN_GPU = Target("gpu", OLDEST)


def target_of(devices: Iterable[Any]) -> Target:
    """What all of `devices` can do: `jax.Device`s, or what a cluster tells of its own."""
    return min(map(_target, devices), key=lambda target: target.capability or (0, 0))


def _target(device: Any) -> Target:
    if device.platform not in GPU:
        return Target(device.platform)
    reported = getattr(device, "compute_capability", None)
    if reported is None:
        return UNKNOWN_GPU
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(reported))  # AMD's are of another form
    return Target("gpu", numbers and (int(numbers[1]), int(numbers[2])))


def fuses(target: Target, head_dim: int, dtype: str, queries: int, keys: int) -> bool:
    """Whether attention runs in cuDNN's kernel, which keeps no scores in memory."""
    return why_not_fused(target, head_dim, dtype, queries, keys) is None


def why_not_fused(target: Target, head_dim: int, dtype: str, queries: int, keys: int) -> str | None:
    """Why attention is computed as matrix products and a softmax, or None where cuDNN's kernel is.

    Args:
        dtype: of queries, keys and values.
        queries, keys: T and S, tokens of each sequence.
    """
    if target.platform not in GPU or target.capability is None:
        return "cuDNN is for NVIDIA's GPUs"
    if dtype not in ("bfloat16", "float16"):
        return f"cuDNN's kernel does not compute in {dtype}"
    has = "{}.{}".format(*target.capability)
    if target.capability < OLDEST:
        return f"cuDNN's kernel needs compute capability 8.0, and this GPU has {has}"
    most = max(dim for since, dim in HEAD_DIMS.items() if since <= target.capability)
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > most:
        return (
            f"cuDNN's kernel takes head dims that are multiples of {HEAD_DIM_MULTIPLE}, at compute"
            f" capability {has} up to {most}, and the model has {head_dim}"
        )
    if queries % EVEN or keys % EVEN:
        return f"cuDNN's kernel takes even lengths under a mask, not {queries} and {keys}"
    return None


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Within it, jax's wrapper of cuDNN believes that the target is here."""
    if target.platform not in GPU or target.capability is None:
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as fused

    has = target.capability
    asked = {
        "check_cudnn_version": lambda: 91000,
        "check_compute_capability": lambda wanted: has >= _numbers(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: has == _numbers(wanted),
    }
    kept = {name: getattr(fused, name) for name in asked}
    try:
        for name, answer in asked.items():
            setattr(fused, name, answer)
        yield
    finally:
        for name, own in kept.items():
            setattr(fused, name, own)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(n) for n in capability.split("."))
