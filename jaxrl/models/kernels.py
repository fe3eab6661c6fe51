"""Which attention kernel a device runs, and the widths of arrays that suit it.

Decided from the device that will run the program, which is that of a mesh, or one that a plan is
made for: what is planned is what is computed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import jax
from jax.sharding import Mesh

from jaxrl.models import cudnn, split_k
from jaxrl.models.splash import LANES
from jaxrl.sharding.mesh import DeviceFacts

Kernel = Literal["cudnn", "splash"]
"""cuDNN's fused attention, of NVIDIA's GPUs; pallas's splash attention, of TPUs."""
StepKernel = Literal["split-k", "flash-decode"]
"""Of a decode step: pallas's split-K attention, of NVIDIA's GPUs (`models.split_k`); our own, of
TPUs (`models.flash_decode`)."""
TPU = "tpu"
GPU = ("gpu", "cuda")
"""`platform` of a GPU here, and of one that a program is compiled for elsewhere."""
OLDEST = (8, 0)
"""Compute capability from which cuDNN's wrapper takes a GPU; assumed of one that is not known."""
HEAD_DIMS = {(8, 0): 128, (9, 0): 256}
"""Compute capability -> the largest head dim that cuDNN's kernel has from there on."""
HEAD_DIM_MULTIPLE = 8
STEP_HEAD_DIM = 16
"""The smallest head dim of a decode step's kernel on a GPU."""
EVEN, TILE = 2, 64
"""Widths of arrays are multiples of these: on a CPU, and on accelerators."""


@dataclass(frozen=True)
class Target:
    """The device that a program is made for."""

    platform: str
    """As `jax.Device.platform`."""
    capability: tuple[int, int] | None = None
    """Compute capability of an NVIDIA GPU; None for anything else."""
    kind: str = ""
    """`jax.Device.device_kind` of an accelerator, where it is known."""

    @property
    def width_multiple(self) -> int:
        """Returns the number that the widths of prompts and completions are rounded up to a
        multiple of."""
        return EVEN if self.platform == "cpu" else TILE


CPU = Target("cpu")
UNKNOWN_GPU = Target("gpu", OLDEST)


def target_of(devices: Iterable[DeviceFacts]) -> Target:
    """Returns `Target` for what all of `devices` can do."""
    return min(map(_target, devices), key=lambda target: target.capability or (0, 0))


def target_on(mesh: Mesh | None) -> Target:
    """Returns `target_of` the devices of a mesh, or of the first one here."""
    return target_of(jax.devices()[:1] if mesh is None else mesh.devices.flat)


def _target(device: DeviceFacts) -> Target:
    kind = getattr(device, "device_kind", "") if device.platform in (TPU, *GPU) else ""
    if device.platform not in GPU:
        return Target(device.platform, kind=kind)
    reported = getattr(device, "compute_capability", None)
    if reported is None:
        return replace(UNKNOWN_GPU, kind=kind)
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(reported))  # AMD's are of another form
    return Target("gpu", numbers and (int(numbers[1]), int(numbers[2])), kind)


def default_dtype(target: Target) -> Literal["float32", "bfloat16"]:
    """Returns the dtype in which the matrix products of a device are fast: bfloat16 needs the
    tensor cores of compute capability 8.0, or the units of other accelerators."""
    old = target.capability is not None and target.capability < OLDEST
    return "float32" if old or target.platform == "cpu" else "bfloat16"


def kernel_of(target: Target, head_dim: int, dtype: str, joined: bool = False) -> Kernel | None:
    """Returns the kernel that attention runs in, which keeps no scores in memory; None where there
    is none (`why_not_fused`)."""
    if why_not_fused(target, head_dim, dtype, joined) is not None:
        return None
    return "splash" if target.platform == TPU else "cudnn"


def fuses(target: Target, head_dim: int, dtype: str, joined: bool = False) -> bool:
    """Returns whether attention runs in a kernel."""
    return kernel_of(target, head_dim, dtype, joined) is not None


def why_not_fused(target: Target, head_dim: int, dtype: str, joined: bool = False) -> str | None:
    """Explains why attention is computed as matrix products and a softmax; None where a kernel is
    used.

    Args:
        dtype: of queries, keys and values.
        joined: rows share a prompt, and attend to its keys and to their own.
    """
    if target.platform == TPU:
        return None
    if target.platform not in GPU or target.capability is None:
        return f"there is no kernel for a {target.platform} (cuDNN is for NVIDIA's GPUs)"
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
    if joined and not cudnn.JOINS:
        return "this version of jax hides the backward pass that prompts computed once need"
    return None


def step_kernel_of(target: Target, head_dim: int, dtype: str) -> StepKernel | None:
    """Returns the kernel that attention of a decode step runs in, which reads each slot's own keys;
    None where there is none (`why_no_step_kernel`)."""
    if why_no_step_kernel(target, head_dim, dtype) is not None:
        return None
    return "flash-decode" if target.platform == TPU else "split-k"


def why_no_step_kernel(target: Target, head_dim: int, dtype: str) -> str | None:
    """Explains why a decode step reads the whole cache, up to the bucket of the longest sequence;
    None where a kernel is used.

    Args:
        dtype: of the cache.
    """
    if target.platform == TPU:
        if head_dim % LANES == 0:
            return None
        return (
            "the kernel of a decode step would pad a TPU's cache to head dims that are multiples of"
            f" {LANES}, and the model has {head_dim}"
        )
    if target.platform not in GPU or target.capability is None:
        return f"there is no kernel of a decode step for a {target.platform}"
    if target.capability < OLDEST:
        has = "{}.{}".format(*target.capability)
        return f"the kernel of a decode step needs compute capability 8.0, and this GPU has {has}"
    if dtype not in ("bfloat16", "float16"):
        return f"the kernel of a decode step does not compute in {dtype}"
    if head_dim < STEP_HEAD_DIM or head_dim & (head_dim - 1):
        return (
            f"the kernel of a decode step takes head dims that are powers of two from"
            f" {STEP_HEAD_DIM} on, and the model has {head_dim}"
        )
    if split_k.tile_of(1, head_dim) is None:
        return (
            f"the kernel of a decode step has no shared memory for head_dim={head_dim} (at most"
            f" {split_k.SHARED_BYTES} bytes of a block)"
        )
    if not split_k.exists():
        return "this version of jax has no kernel of a decode step"
    return None


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Lets programs for `target` be traced where there is no such device.

    What kernel a program gets follows from the devices of its mesh. But jax checks cuDNN's limits,
    and lowers Triton's kernels, by this process's own GPU: while this is open, it takes `target`
    for that. All threads see it; nothing is left of it afterwards.
    """
    if target.capability is None:
        yield
        return
    with cudnn.pretend(target.capability), split_k.pretend(target.capability):
        yield
