"""Which attention kernel a device runs, and the widths of arrays that suit it.

Decided from the device that will run the program, which is that of a mesh, or one that a plan is
made for: what is planned is what is computed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxrl.models import cudnn, flash_decode, splash, split_k
from jaxrl.models.splash import LANES
from jaxrl.sharding.mesh import DeviceFacts
from jaxrl.sharding.targets import block_shared_bytes

Kernel = Literal["cudnn", "splash"]
"""cuDNN's fused attention, of NVIDIA's GPUs; pallas's splash attention, of TPUs."""
StepKernel = Literal["split-k", "flash-decode"]
"""Kernels of a decode step: pallas's split-K attention, of NVIDIA's GPUs (`models.split_k`); our
own, of TPUs (`models.flash_decode`)."""
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
NAMES: dict[Kernel | StepKernel, str] = {
    "cudnn": "cuDNN's kernel",
    "splash": "the splash kernel",
    "split-k": "the split-K kernel of a decode step",
    "flash-decode": "the kernel of a decode step",
}
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
    others: tuple[tuple[int, int], ...] = ()
    """Higher capabilities of other GPUs that the program is made for too."""

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """Returns the capabilities of all GPUs that the program is made for."""
        return () if self.capability is None else (self.capability, *self.others)

    @property
    def width_multiple(self) -> int:
        """Returns the number that the widths of prompts and completions are rounded up to a
        multiple of."""
        return EVEN if self.platform == "cpu" else TILE


CPU = Target("cpu")
UNKNOWN_GPU = Target("gpu", OLDEST)


def target_of(devices: Iterable[DeviceFacts]) -> Target:
    """Returns `Target` for what all of `devices` can do."""
    targets = []
    for device in devices:
        kind = getattr(device, "device_kind", "") if device.platform in (TPU, *GPU) else ""
        if device.platform not in GPU:
            targets.append(Target(device.platform, kind=kind))
            continue
        reported = getattr(device, "compute_capability", None)
        numbers = re.fullmatch(r"(\d+)\.(\d+)", str(reported))  # AMD's are of another form
        capability = (int(numbers[1]), int(numbers[2])) if numbers else None
        targets.append(Target("gpu", OLDEST if reported is None else capability, kind))
    least = min(targets, key=lambda target: target.capability or (0, 0))
    higher = {target.capability for target in targets if target.capability != least.capability}
    return replace(least, others=tuple(sorted(x for x in higher if x is not None)))


def target_on(mesh: Mesh | None) -> Target:
    """Returns `target_of` the devices of a mesh, or of the first one here."""
    return target_of(jax.devices()[:1] if mesh is None else mesh.devices.flat)


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
    kernel: Kernel = "splash"
    if target.platform != TPU:
        kernel = "cudnn"
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
                f"cuDNN's kernel takes head dims that are multiples of {HEAD_DIM_MULTIPLE}, at"
                f" compute capability {has} up to {most}, and the model has {head_dim}"
            )
        if joined and not cudnn.JOINS:
            return "this version of jax hides the backward pass that prompts computed once need"
    return _TRIED.get((target, kernel, head_dim, dtype))


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
    what = "the kernel of a decode step"
    if target.platform == TPU:
        if head_dim % LANES:
            return (
                f"{what} would pad a TPU's cache to head dims that are multiples of {LANES}, and"
                f" the model has {head_dim}"
            )
        return _TRIED.get((target, "flash-decode", head_dim, dtype))
    if target.platform not in GPU or target.capability is None:
        return f"there is no kernel of a decode step for a {target.platform}"
    if target.capability < OLDEST:
        has = "{}.{}".format(*target.capability)
        return f"{what} needs compute capability 8.0, and this GPU has {has}"
    if dtype not in ("bfloat16", "float16"):
        return f"{what} does not compute in {dtype}"
    if head_dim < STEP_HEAD_DIM or head_dim & (head_dim - 1):
        return (
            f"{what} takes head dims that are powers of two from {STEP_HEAD_DIM} on, and the model"
            f" has {head_dim}"
        )
    if split_k.tile_of(1, head_dim, target.capabilities) is None:
        return (
            f"{what} has no shared memory for head_dim={head_dim} (at most"
            f" {min(map(block_shared_bytes, target.capabilities))} bytes of a block)"
        )
    if not split_k.exists():
        return "this version of jax has no kernel of a decode step"
    return _TRIED.get((target, "split-k", head_dim, dtype))


Use = tuple[int, str, bool]
"""What a kernel is chosen for: a head dim, the dtype of the computation, whether it samples."""
_TRIED: dict[tuple[Target, Kernel | StepKernel, int, str], str | None] = {}
"""(device, kernel, head dim, dtype) that this process has tried -> why it is not used there; None
where it works."""


def try_kernels(devices: Iterable[DeviceFacts], uses: Iterable[Use]) -> list[str]:
    """Calls each kernel that a run would use once, for little, before large programs are compiled
    with it: what cuDNN or pallas refuses of a new device or driver shows only there. From
    then on this process computes without those that fail; on CPUs, and for devices that are not
    this process's, nothing is tried.

    The processes of a mesh call this together, with equal arguments: where a kernel fails in one of
    them, none uses it.

    Returns:
        For each kernel that failed, what failed and what is slower for it.
    """
    real = [device for device in devices if isinstance(device, jax.Device)]
    mine = [device for device in real if device.process_index == jax.process_index()]
    if not mine:
        return []
    target = target_of(real)
    trials: dict[tuple[Kernel | StepKernel, int, str], Callable[[], object]] = {}
    for head_dim, dtype, samples in uses:
        fused = kernel_of(target, head_dim, dtype)
        step = step_kernel_of(target, head_dim, dtype) if samples else None
        if fused is not None:
            trials[fused, head_dim, dtype] = partial(_try_fused, fused, head_dim, dtype)
        if step is not None:
            trials[step, head_dim, dtype] = partial(_try_step, step, target, head_dim, dtype)
    trials = {key: trial for key, trial in trials.items() if (target, *key) not in _TRIED}
    with jax.default_device(mine[0]):
        reasons = {key: _why_it_fails(trial) for key, trial in trials.items()}
    if trials and len({device.process_index for device in real}) > 1:
        failed = np.array([reason is not None for reason in reasons.values()])
        failed = np.asarray(multihost_utils.process_allgather(failed)).any(0)
        for key in (key for key, fails in zip(reasons, failed, strict=True) if fails):
            reasons[key] = reasons[key] or "it failed in another process"
    notes = []
    for (kernel, head_dim, dtype), reason in reasons.items():
        if reason is not None:
            reason = (
                f"{NAMES[kernel]} failed when it was tried on {mine[0].device_kind} (heads of"
                f" {head_dim}, {dtype}): {reason}"
            )
            notes.append(f"{reason}; matrix products are used, which are slower")
        _TRIED[target, kernel, head_dim, dtype] = reason
    return notes


def _why_it_fails(trial: Callable[[], object]) -> str | None:
    """Returns the first line of what ends a trial; None where its results are numbers, or where
    another program has the device's memory, which says nothing about the kernel."""
    try:
        results = jax.block_until_ready(trial())
    except Exception as error:  # of any library: XLA's, cuDNN's, Triton's, pallas's
        lines = str(error).strip().splitlines()
        if "out of memory" in str(error).lower():
            return None
        return lines[0] if lines else type(error).__name__
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(results))
    return None if finite else "its results are not finite"


def _try_fused(kernel: Kernel, head_dim: int, dtype: str) -> object:
    """Computes attention of two rows, of two that share a prompt too, and its gradients."""
    q, k = (jnp.ones((2, TILE, heads, head_dim), dtype) for heads in (2, 1))
    lengths, real = jnp.full(2, TILE, jnp.int32), jnp.ones((2, TILE), bool)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if kernel == "splash":
            return splash.attend_tiles(q, k, v, real, real, causal=True).sum(dtype=jnp.float32)
        out = cudnn.attend_rows(q, k, v, lengths, causal=True)
        if cudnn.JOINS:
            out += cudnn.attend_groups(q, (k[:1], v[:1]), (k, v), lengths[:1], lengths)
        return out.sum(dtype=jnp.float32)

    return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, k)


def _try_step(kernel: StepKernel, target: Target, head_dim: int, dtype: str) -> object:
    """Computes attention of tokens that share two prompts: so many that a block has most of its
    shared memory."""
    q, k = (jnp.ones((2, 1, n, head_dim), dtype) for n in (split_k.MOST_QUERIES, 2 * TILE))
    attend = flash_decode.attend_cache
    if kernel == "split-k":
        attend = partial(split_k.attend_parts, capabilities=target.capabilities)
    return jax.jit(attend)(q, k, k, jnp.full(2, TILE, jnp.int32))


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
    with cudnn.pretend_gpu(target.capability), split_k.pretend_triton_gpu(target.capability):
        yield
