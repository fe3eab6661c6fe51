"""Accelerators by name: what their data sheets say, the machines that `--target` and `--compile`
plan for, and what a device reaches at best: matrix products and memory, as published or as measured
there. jax is imported where something is measured: `--help` and refusals load without it.

The published figures are those of dense products of 16-bit floats, without the sparsity that data
sheets like to count in. A device that the table does not have is measured: the best of a few tries,
since a busy machine only ever lowers it.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.errors import UserError, near
from jaxrl.process.gpu_memory import gpu_share

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """What its data sheet says of a GPU, and what XLA's compiler asks about it."""

    kind: str
    """`jax.Device.device_kind`."""
    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    lanes: int
    """Float32 lanes of each."""
    threads: int
    """Most threads of each."""
    shared_kib: int
    """Shared memory of each; a block may have 1 KiB less from compute capability 8.0 on."""
    l2_mib: int
    clock_ghz: float
    tflops: int
    """Rate of dense products of 16-bit floats that are summed in float32."""
    bandwidth_gbs: int
    memory: int
    """Bytes that CUDA reports."""
    link_gbs: float
    """GB/s at which a device sends to the others of its host, one direction."""


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1024, 64, 4, 1.59, 65, 320, 15_835_660_288, 12),
    "a10g": Gpu("NVIDIA A10G", (8, 6), 80, 128, 1536, 100, 6, 1.71, 70, 600, 23_827_000_000, 25),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100, 48, 2.04, 121, 300, 23_580_639_232, 25),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 142, 128, 1536, 100, 96, 2.52, 362, 864, 47_674_000_000, 25),
    "rtx4090": Gpu(
        *("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100, 72, 2.52),
        *(165, 1008, 25_383_000_000, 25),
    ),
    "rtx5090": Gpu(
        *("NVIDIA GeForce RTX 5090", (12, 0), 170, 128, 1536, 100, 96, 2.41),
        *(209, 1792, 33_670_000_000, 50),
    ),
    "rtxpro6000": Gpu(
        *("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 128, 1536, 100, 128),
        *(2.6, 503, 1792, 101_970_000_000, 50),
    ),
    "a100": Gpu(
        *("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 40, 1.41),
        *(312, 2039, 85_095_874_560, 300),
    ),
    "h100": Gpu(
        *("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 50, 1.98),
        *(989, 3350, 84_942_979_072, 450),
    ),
    "h100pcie": Gpu(
        *("NVIDIA H100 PCIe", (9, 0), 114, 128, 2048, 228, 50, 1.755),
        *(756, 2000, 84_942_979_072, 50),
    ),
    "h100nvl": Gpu(
        *("NVIDIA H100 NVL", (9, 0), 132, 128, 2048, 228, 50, 1.785),
        *(835, 3938, 99_990_000_000, 50),
    ),
    "h200": Gpu(
        "NVIDIA H200", (9, 0), 132, 128, 2048, 228, 50, 1.98, 989, 4800, 150_754_820_096, 450
    ),
    "b200": Gpu(
        "NVIDIA B200", (10, 0), 148, 128, 2048, 228, 126, 1.97, 2250, 8000, 191_500_000_000, 900
    ),
    "b300": Gpu(
        *("NVIDIA B300 SXM6 AC", (10, 3), 148, 128, 2048, 228, 126, 1.92),
        *(2250, 8000, 270_000_000_000, 900),
    ),
}
"""Name of a target -> its GPU. Links of those without NVLink are those of their PCIe slot; bridges
that join pairs of H100 are not counted."""
HOST_GPUS = 8
"""GPUs of one host; a target with more has several hosts."""
MOST_GPUS = 4096
"""Most GPUs of a target: the description of more would only take long."""
HOST_CHIPS = (2, 2, 1)
"""TPU chips of one host, along each dimension."""
HOST_LINK_GBS = 50.0
"""GB/s of each GPU to another host: one adapter of 400 Gbit/s for each."""


@dataclass(frozen=True)
class Tpu:
    """What its data sheet says of a TPU, and what is not in libtpu's own description of it."""

    kinds: tuple[str, ...]
    """`jax.Device.device_kind`, by libtpu and by other clients."""
    tflops: int
    """Rate of products in bfloat16."""
    bandwidth_gbs: int
    memory: int
    """Bytes of a chip that a program may use."""
    link_gbs: float
    """GB/s at which a chip sends over all its links, one direction."""
    largest: tuple[int, ...]
    """Chips of a whole pod along each of its dimensions."""


TPUS = {
    "v5e": Tpu(("TPU v5 lite", "TPU v5e"), 197, 819, round(15.75 * GIB), 200, (16, 16)),
    "v5p": Tpu(("TPU v5", "TPU v5p"), 459, 2765, round(95.74 * GIB), 600, (16, 20, 28)),
    "v6e": Tpu(("TPU v6 lite", "TPU v6e"), 918, 1640, round(31.25 * GIB), 448, (16, 16)),
}
"""Name of a target -> its chip."""


@dataclass(frozen=True)
class DescribedDevice:
    """A device of a machine that is not here, as a plan sees it."""

    id: int
    platform: str
    process_index: int
    device_kind: str
    compute_capability: str | None = None

    def memory_stats(self) -> Mapping[str, int] | None:
        return None


@dataclass(frozen=True)
class TargetMachine:
    """The machine that a target's name describes."""

    name: str
    chip: Gpu | Tpu
    shape: tuple[int, ...]
    """GPUs, or TPU chips along each dimension of the slice."""
    hosts: int
    compiled: tuple[jax.Device, ...] = ()
    """The devices as the compiler of XLA describes them, where it was asked (`aot.machine`)."""

    @property
    def count(self) -> int:
        """Returns the number of devices."""
        return math.prod(self.shape)

    @property
    def kind(self) -> str:
        """Returns the `jax.Device.device_kind` of its devices."""
        return self.chip.kind if isinstance(self.chip, Gpu) else self.chip.kinds[0]

    @property
    def devices(self) -> tuple[DescribedDevice, ...]:
        """Returns the devices, host after host, as a plan sees them."""
        if isinstance(self.chip, Gpu):
            platform, capability = "gpu", "{}.{}".format(*self.chip.capability)
        else:
            platform, capability = "tpu", None
        return tuple(
            DescribedDevice(i, platform, i // self.host_size, self.kind, capability)
            for i in range(self.count)
        )

    @property
    def usable(self) -> int:
        """Returns the bytes of a device that a run may use."""
        return round(self.chip.memory * (gpu_share() if isinstance(self.chip, Gpu) else 1))

    @property
    def host_size(self) -> int:
        """Returns the number of devices of a host; they are numbered host after host."""
        return self.count // self.hosts

    def link(self, devices: Iterable[int]) -> float:
        """Returns the bytes per second at which one of these devices sends to the others, one
        direction: over the slower links between hosts, where they are on several. A TPU's are the
        same between the hosts of a slice."""
        inside = self.chip.link_gbs * 1e9
        apart = len({device // self.host_size for device in devices}) > 1
        return min(inside, HOST_LINK_GBS * 1e9) if apart and isinstance(self.chip, Gpu) else inside


def block_shared_bytes(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a block may have on GPUs of a compute capability: of
    one that no target has, those of the next lower one."""
    known = {gpu.capability: gpu.shared_kib for gpu in GPUS.values()}
    nearest = max((x for x in known if x <= capability), default=min(known))
    return (known[nearest] - 1) * 1024


def target_machine(name: str, option: str) -> TargetMachine:
    """Returns the machine of a target's name: `h200x8`, `h200x16` (two hosts), `tpu-v5e:2x4`.

    Args:
        option: that names it, for error messages.

    Raises:
        UserError: there is no such machine.
    """
    gpu = re.fullmatch(r"([a-z]\w*?)x(\d+)", name)
    if gpu is not None and gpu[1] in GPUS and int(gpu[2]) > 0:
        count = int(gpu[2])
        hosts = -(-count // HOST_GPUS)
        if hosts > 1 and (count % HOST_GPUS or count > MOST_GPUS):
            raise UserError(
                f"{option} {name}: {count} GPUs; allowed are 1 to {HOST_GPUS} on one host, and"
                f" several hosts of {HOST_GPUS}, that is multiples of {HOST_GPUS} up to {MOST_GPUS}"
            )
        return TargetMachine(name, GPUS[gpu[1]], (count,), hosts)

    tpu = re.fullmatch(r"tpu-(\w+?)(?::(\d+(?:x\d+)*))?", name)
    if tpu is not None and tpu[1] in TPUS:
        chip, sizes = TPUS[tpu[1]], [int(n) for n in (tpu[2] or "1x1").split("x")]
        dims = len(chip.largest)
        sizes += [1] * (dims - len(sizes))
        hosts_of = HOST_CHIPS[:dims]
        part = math.prod(sizes) in (1, 2)  # of a host
        whole = len(sizes) == dims and all(
            n % host == 0 and 0 < n <= most
            for n, host, most in zip(sizes, hosts_of, chip.largest, strict=True)
        )
        if len(sizes) > dims or not (part or whole):
            one, largest = ("x".join(map(str, shape)) for shape in (hosts_of, chip.largest))
            raise UserError(
                f"{option} {name}: there is no such slice; a tpu-{tpu[1]} is 1 or 2 chips, or hosts"
                f" of {one} chips side by side, up to {largest} chips, as in tpu-{tpu[1]}:{one}"
            )
        hosts = 1 if part else math.prod(sizes) // math.prod(hosts_of)
        return TargetMachine(name, chip, tuple(sizes), hosts)

    slices = (f"tpu-{chip}:{'x'.join('NMK'[: len(tpu.largest)])}" for chip, tpu in TPUS.items())
    known = ", ".join([*(f"{gpu}xN" for gpu in GPUS), *slices])
    digits = name.rpartition("x")[2]
    digits = digits if digits.isdigit() and 0 < int(digits) <= HOST_GPUS else "1"
    plain = re.sub(r"[-_ ]", "", name.lower())
    hint = near(plain, [*(f"{gpu}x{digits}" for gpu in GPUS), *(f"tpu-{chip}" for chip in TPUS)])
    raise UserError(
        f"{option} {shlex.quote(name)}: no such target{hint}; allowed are {known}, as in h200x8,"
        " h200x16 (two hosts of 8) and tpu-v5e:2x4"
    )


PUBLISHED: dict[str, tuple[float, float]] = {
    "NVIDIA A100-PCIE-40GB": (312, 1555),
    "NVIDIA A100-SXM4-40GB": (312, 1555),
    "NVIDIA A100 80GB PCIe": (312, 1935),
    "Tesla V100-PCIE-16GB": (112, 900),
    "Tesla V100-PCIE-32GB": (112, 900),
    "Tesla V100-SXM2-16GB": (125, 900),
    "Tesla V100-SXM2-32GB": (125, 900),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (503, 1597),
    "TPU v4": (275, 1228),
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
    """Finds the ceilings of a device, by products of `dtype` where it has to be measured."""
    kind, shared = device.device_kind, device.platform == "cpu"
    if kind in PUBLISHED:
        tflops, gbytes = PUBLISHED[kind]
        return Ceilings(kind, tflops * 1e12, gbytes * 1e9, published=True, shared=shared)
    import jax

    size, nbytes = (CPU_SIZE, CPU_READ) if shared else (SIZE, READ)
    with jax.default_device(device):
        flops = product_flops(size, size, size, dtype)
        bandwidth = read_bandwidth(nbytes)
    return Ceilings(kind, flops, bandwidth, published=False, shared=shared)


def product_flops(rows: int, inner: int, columns: int, dtype: DTypeLike) -> float:
    """Measures the FLOPs per second of one XLA product [rows, inner] @ [inner, columns]."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((rows, inner), dtype), jnp.ones((inner, columns), dtype)
    run = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    return 2 * rows * inner * columns / best_seconds(lambda: run(a, b))


def read_bandwidth(nbytes: int) -> float:
    """Measures the bytes per second at which an array of `nbytes`, far more than any cache holds,
    is read: the best of a sum in XLA and, on a CPU, of the threads of numpy."""
    import jax
    import jax.numpy as jnp

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
    import jax

    jax.block_until_ready(run())
    seconds: list[float] = []
    while len(seconds) < TRIES or sum(seconds) < TRY_S:
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
