"""Accelerators by name: what their data sheets say, and the machines that `--target` and
`--compile` plan for. Without jax.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from jaxrl.errors import UserError, near
from jaxrl.process.gpu_memory import gpu_share

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
    """Of dense products of 16-bit floats that are summed in float32."""
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
"""Of a target: the description of more would only take long."""
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
    """Of products in bfloat16."""
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

    @property
    def count(self) -> int:
        """Returns the number of devices."""
        return math.prod(self.shape)

    @property
    def usable(self) -> int:
        """Returns the bytes of a device that a run may use."""
        return round(self.chip.memory * (gpu_share() if isinstance(self.chip, Gpu) else 1))

    @property
    def inside(self) -> float:
        """Returns the bytes per second at which a device sends to the others of its host, one
        direction."""
        return self.chip.link_gbs * 1e9

    @property
    def link(self) -> float:
        """Returns the same to any other device: over the slower links between hosts, where there
        are some. A TPU's are the same between the hosts of a slice."""
        slower = isinstance(self.chip, Gpu) and self.hosts > 1
        return min(self.inside, HOST_LINK_GBS * 1e9) if slower else self.inside

    @property
    def devices(self) -> tuple[DescribedDevice, ...]:
        """Returns the devices, host after host."""
        if isinstance(self.chip, Gpu):
            kind, platform = self.chip.kind, "gpu"
            capability = "{}.{}".format(*self.chip.capability)
        else:
            kind, platform, capability = self.chip.kinds[0], "tpu", None
        each = self.count // self.hosts
        return tuple(
            DescribedDevice(i, platform, i // each, kind, capability) for i in range(self.count)
        )


def block_shared_bytes(capability: tuple[int, int]) -> int:
    """Returns the bytes of shared memory that a block may have on GPUs of a compute capability: of
    one that no target has, those of the next lower one."""
    known = {gpu.capability: gpu.shared_kib for gpu in GPUS.values()}
    nearest = max((one for one in known if one <= capability), default=min(known))
    return (known[nearest] - 1) * 1024


def target_machine(name: str, option: str) -> TargetMachine:
    """Returns the machine of a target's name: `h200x8`, `h200x16` (two hosts), `tpu-v5e:2x4`.

    Args:
        option: that names it, for error messages.

    Raises:
        UserError: there is no such machine.
    """
    gpu = re.fullmatch(r"([a-z]\w*?)x(\d+)", name)
    tpu = re.fullmatch(r"tpu-(\w+?)(?::(\d+(?:x\d+)*))?", name)
    if gpu is not None and gpu[1] in GPUS and int(gpu[2]) > 0:
        return _gpus(name, option, int(gpu[2]), GPUS[gpu[1]])
    if tpu is not None and tpu[1] in TPUS:
        return _slice(name, option, tpu[1], tpu[2] or "1x1")
    slices = (f"tpu-{chip}:{'x'.join('NMK'[: len(tpu.largest)])}" for chip, tpu in TPUS.items())
    known = ", ".join([*(f"{gpu}xN" for gpu in GPUS), *slices])
    count = name.rpartition("x")[2]
    count = count if count.isdigit() and 0 < int(count) <= HOST_GPUS else "1"
    plain = re.sub(r"[-_ ]", "", name.lower())
    hint = near(plain, [*(f"{gpu}x{count}" for gpu in GPUS), *(f"tpu-{chip}" for chip in TPUS)])
    raise UserError(
        f"{option} {shlex.quote(name)}: no such target{hint}; allowed are {known}, as in h200x8,"
        " h200x16 (two hosts of 8) and tpu-v5e:2x4"
    )


def _gpus(name: str, option: str, count: int, chip: Gpu) -> TargetMachine:
    hosts = -(-count // HOST_GPUS)
    if hosts > 1 and (count % HOST_GPUS or count > MOST_GPUS):
        raise UserError(
            f"{option} {name}: {count} GPUs; allowed are 1 to {HOST_GPUS} on one host, and several"
            f" hosts of {HOST_GPUS}, that is multiples of {HOST_GPUS} up to {MOST_GPUS}"
        )
    return TargetMachine(name, chip, (count,), hosts)


def _slice(name: str, option: str, chip: str, shape: str) -> TargetMachine:
    tpu, sizes = TPUS[chip], [int(n) for n in shape.split("x")]
    sizes += [1] * (len(tpu.largest) - len(sizes))
    hosts_of = HOST_CHIPS[: len(tpu.largest)]
    part = math.prod(sizes) in (1, 2)  # of a host
    whole = len(sizes) == len(tpu.largest) and all(
        n % host == 0 and 0 < n <= most
        for n, host, most in zip(sizes, hosts_of, tpu.largest, strict=True)
    )
    if len(sizes) > len(tpu.largest) or not (part or whole):
        one, largest = ("x".join(map(str, shape)) for shape in (hosts_of, tpu.largest))
        raise UserError(
            f"{option} {name}: there is no such slice; a tpu-{chip} is 1 or 2 chips, or hosts of"
            f" {one} chips side by side, up to {largest} chips, as in tpu-{chip}:{one}"
        )
    hosts = 1 if part else math.prod(sizes) // math.prod(hosts_of)
    return TargetMachine(name, tpu, tuple(sizes), hosts)
