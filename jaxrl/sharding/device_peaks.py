"""What a device reaches at best: matrix products and memory, as published or as measured there.

The published figures are those of dense products of 16-bit floats, without the sparsity that data
sheets like to count in. A device that the table does not have is measured: the best of a few tries,
since a busy machine only ever lowers it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxrl.sharding.targets import GPUS, TPUS

_OTHERS: dict[str, tuple[float, float]] = {
    "NVIDIA A100-PCIE-40GB": (312, 1555),
    "NVIDIA A100-SXM4-40GB": (312, 1555),
    "NVIDIA A100 80GB PCIe": (312, 1935),
    "Tesla V100-PCIE-16GB": (112, 900),
    "Tesla V100-PCIE-32GB": (112, 900),
    "Tesla V100-SXM2-16GB": (125, 900),
    "Tesla V100-SXM2-32GB": (125, 900),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (503, 1597),
    "TPU v4": (275, 1228),
}
"""Devices that are no target."""
PUBLISHED: dict[str, tuple[float, float]] = {
    **_OTHERS,
    **{gpu.kind: (gpu.tflops, gpu.bandwidth_gbs) for gpu in GPUS.values()},
    **{kind: (chip.tflops, chip.bandwidth_gbs) for chip in TPUS.values() for kind in chip.kinds},
}
"""`jax.Device.device_kind` -> TFLOP/s in bfloat16 (float16 where a device has none)
and GB/s of its memory."""
SIZE, CPU_SIZE = 8192, 512
"""Rows, inner width and columns of the product that is measured, on an accelerator and on a CPU."""
READ, CPU_READ = 2**30, 2**26
"""Bytes of the array that is read for the bandwidth."""
TRIES, TRY_S = 6, 0.3
"""Least number of calls of which the shortest counts, and seconds that they take at least: of many
short ones a busy machine leaves some alone."""


@dataclass(frozen=True)
class Ceilings:
    """What one device reaches at best."""

    device: str
    flops: float
    """Per second; a multiply and an add are two."""
    bandwidth: float
    """Bytes per second."""
    published: bool
    """False where it was measured."""
    shared: bool
    """Emulated devices: all of them together reach this."""


def ridge(kind: str) -> float:
    """Returns the FLOPs that a device computes while its memory moves a byte, as published for its
    `device_kind`: with fewer products for each byte, reads and writes take longer. Infinite where
    nothing is published."""
    tflops, gbytes = PUBLISHED.get(kind, (math.inf, 1.0))
    return tflops * 1e3 / gbytes


def ceilings_of(device: jax.Device, dtype: str) -> Ceilings:
    """Returns what a device reaches, with products of `dtype` where it has to be measured."""
    kind, shared = device.device_kind, device.platform == "cpu"
    if kind in PUBLISHED:
        tflops, gbytes = PUBLISHED[kind]
        return Ceilings(kind, tflops * 1e12, gbytes * 1e9, published=True, shared=shared)
    size, nbytes = (CPU_SIZE, CPU_READ) if shared else (SIZE, READ)
    with jax.default_device(device):
        flops = product_flops(size, size, size, jnp.dtype(dtype))
        bandwidth = read_bandwidth(nbytes)
    return Ceilings(kind, flops, bandwidth, published=False, shared=shared)


def product_flops(rows: int, inner: int, columns: int, dtype: DTypeLike) -> float:
    """Measures the FLOPs per second of one XLA product [rows, inner] @ [inner, columns]."""
    a, b = jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype)
    run = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * rows * inner * columns / best_seconds(lambda: run(a, b))


def read_bandwidth(nbytes: int) -> float:
    """Measures the bytes per second at which an array of `nbytes`, far more than any cache holds,
    is read: the best of a sum in XLA and, on a CPU, of the threads of numpy."""
    x = jnp.ones(nbytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    seconds = best_seconds(lambda: total(x))
    if next(iter(x.devices())).platform == "cpu":
        parts = np.array_split(np.asarray(x), os.cpu_count() or 1)
        with ThreadPoolExecutor(len(parts)) as pool:
            seconds = min(seconds, best_seconds(lambda: list(pool.map(np.max, parts))))
    return nbytes / seconds


def best_seconds(run: Callable[[], object]) -> float:
    """Measures how long the shortest of some calls takes, after one to warm up."""
    jax.block_until_ready(run())
    found: list[float] = []
    while len(found) < TRIES or sum(found) < TRY_S:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begin)
    return min(found)
