"""Machines that are not here: their devices as the compilers of XLA describe them.

`jax.experimental.topologies` gives the devices of a machine from its description alone; a program
that is lowered over them is compiled by the compiler of the target itself, without driver or device
(extra `aot`: the compilers of NVIDIA's GPUs, and libtpu).
"""

from __future__ import annotations

import math
import os
import re
import shlex
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import xla_bridge  # no public function tells whether a backend runs

from jaxrl.errors import UserError
from jaxrl.process.json_types import Keywords
from jaxrl.process.xla_flags import add_flag

GIB = 2**30
INSTALL = "pip install 'jaxrl[aot]'"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""The process itself computes on the CPU, asks no cloud which TPU it has, and does not keep others
from loading libtpu, as it uses no chip."""
NO_AUTOTUNING = "--xla_gpu_autotune_level=0"
"""The fastest of several kernels cannot be found by running them."""


@dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks about a GPU, from NVIDIA's data sheets."""

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
    bandwidth_gbs: int
    memory: int
    """Bytes that CUDA reports."""
    link_gbs: float
    """GB/s at which a device sends to the others of its host, one direction."""


GPUS = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1024, 64, 4, 1.59, 320, 15_835_660_288, 12),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100, 48, 2.04, 300, 23_580_639_232, 25),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 40, 1.41, 2039, 85_095_874_560, 300
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 50, 1.98, 3350, 84_942_979_072, 450
    ),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 2048, 228, 50, 1.98, 4800, 150_754_820_096, 450),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 228, 126, 1.97, 8000, 191_500_000_000, 900),
}
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
    """What is not in libtpu's own description of a TPU."""

    memory: int
    """Bytes of a chip that a program may use."""
    link_gbs: float
    """GB/s at which a chip sends over all its links, one direction."""
    largest: tuple[int, ...]
    """Chips of a whole pod along each of its dimensions."""


TPUS = {
    "v5e": Tpu(round(15.75 * GIB), 200, (16, 16)),
    "v5p": Tpu(round(95.74 * GIB), 600, (16, 20, 28)),
    "v6e": Tpu(round(31.25 * GIB), 448, (16, 16)),
}


@dataclass(frozen=True)
class Machine:
    """The devices of a target."""

    name: str
    devices: tuple[jax.Device, ...]
    memory: int
    """Bytes of one device."""
    inside: float
    """Bytes per second at which a device sends to the others of its host, one direction."""
    link: float
    """The same to any other device: over the slower links between hosts, where there are some."""
    hosts: int

    @property
    def kind(self) -> str:
        return str(self.devices[0].device_kind)

    @property
    def is_gpu(self) -> bool:
        return self.devices[0].platform != "tpu"


def machine(name: str) -> Machine:
    """Returns the machine of a target's name: `h200x8`, `h200x16` (two hosts), `tpu-v5e:2x4`.

    Raises:
        UserError: no such target; or its compiler is not installed, or jax has started.
    """
    gpu = re.fullmatch(r"([a-z]\w*?)x(\d+)", name)
    tpu = re.fullmatch(r"tpu-(\w+?)(?::(\d+(?:x\d+)*))?", name)
    if gpu is not None and gpu[1] in GPUS and int(gpu[2]) > 0:
        return _gpus(name, GPUS[gpu[1]], int(gpu[2]))
    if tpu is not None and tpu[1] in TPUS:
        return _tpus(name, tpu[1], tpu[2] or "1x1")
    slices = (f"tpu-{chip}:{'x'.join('NMK'[: len(tpu.largest)])}" for chip, tpu in TPUS.items())
    known = ", ".join([*(f"{gpu}xN" for gpu in GPUS), *slices])
    raise UserError(
        f"--compile {shlex.quote(name)}: no such target; allowed are {known}, as in h200x8, h200x16"
        " (two hosts of 8) and tpu-v5e:2x4"
    )


def _gpus(name: str, chip: Gpu, count: int) -> Machine:
    hosts = -(-count // HOST_GPUS)
    if hosts > 1 and (count % HOST_GPUS or count > MOST_GPUS):
        raise UserError(
            f"--compile {name}: {count} GPUs; allowed are 1 to {HOST_GPUS} on one host, and several"
            f" hosts of {HOST_GPUS}, that is multiples of {HOST_GPUS} up to {MOST_GPUS}"
        )
    topology = f"1x{hosts}x{count // hosts}"  # slices, hosts, GPUs of each
    devices = _described(name, "cuda", target_config=_target_config(chip), topology=topology)
    link = chip.link_gbs if hosts == 1 else min(chip.link_gbs, HOST_LINK_GBS)
    return Machine(name, devices, chip.memory, chip.link_gbs * 1e9, link * 1e9, hosts)


def _target_config(chip: Gpu) -> str:
    """Returns XLA's `GpuTargetConfigProto`. Without a driver's version no command buffers (CUDA
    graphs) are made."""
    major, minor = chip.capability
    feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_kib * 1024}
  threads_per_core_limit: {chip.threads}
  core_count: {chip.cores}
  fpus_per_core: {chip.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.bandwidth_gbs * 10**9}
  l2_cache_size: {chip.l2_mib * 2**20}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {chip.memory}
  shared_memory_per_block_optin: {(chip.shared_kib - (major >= 8)) * 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{chip.kind}"
"""


def _tpus(name: str, chip: str, shape: str) -> Machine:
    tpu, sizes = TPUS[chip], [int(n) for n in shape.split("x")]
    sizes += [1] * (len(tpu.largest) - len(sizes))
    hosts_of = HOST_CHIPS[: len(tpu.largest)]
    part = math.prod(sizes) in (1, 2)  # of a host; libtpu takes whole hosts by default
    whole = len(sizes) == len(tpu.largest) and all(
        n % host == 0 and 0 < n <= most
        for n, host, most in zip(sizes, hosts_of, tpu.largest, strict=True)
    )
    if len(sizes) > len(tpu.largest) or not (part or whole):
        one, largest = ("x".join(map(str, shape)) for shape in (hosts_of, tpu.largest))
        raise UserError(
            f"--compile {name}: there is no such slice; a tpu-{chip} is 1 or 2 chips, or hosts of"
            f" {one} chips side by side, up to {largest} chips, as in tpu-{chip}:{one}"
        )
    more: Keywords = {"chips_per_host_bounds": (*sizes, 1)[:3]} if part else {}
    devices = _described(name, "tpu", topology_name=f"{chip}:{'x'.join(map(str, sizes))}", **more)
    hosts = len({device.process_index for device in devices})
    link = tpu.link_gbs * 1e9  # the same between hosts of a slice
    return Machine(name, devices, tpu.memory, link, link, hosts)


def _described(name: str, platform: str, **description: Any) -> tuple[jax.Device, ...]:
    from jax.experimental import topologies  # starts nothing, but takes time to import

    try:
        found = topologies.get_topology_desc(platform=platform, **description).devices
    except Exception as error:  # which one depends on the platform, and on what is missing
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        missing = platform not in compilers()
        wanted = (
            f"its compiler is not installed; the extra aot has it: {INSTALL}" if missing else reason
        )
        raise UserError(f"--compile {name}: {wanted}") from error
    return tuple(found)


def compilers() -> set[str]:
    """Platforms whose compiler is installed."""
    from importlib.util import find_spec

    found = set()
    if find_spec("libtpu") is not None:
        found.add("tpu")
    if any(find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13) if find_spec("jax_plugins")):
        found.add("cuda")
    return found


def prepare() -> None:
    """Makes this process ready to compile for machines that are not here: before jax starts.

    Raises:
        UserError: jax runs already, on something else than the CPU.
    """
    if xla_bridge.backends_are_initialized() and jax.default_backend() != "cpu":
        raise UserError(
            "--compile comes too late: jax has started on an accelerator in this process, and the"
            " compilers of other machines want it on the CPU. Use a new process"
        )
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    jax.config.update("jax_platforms", "cpu")
    add_flag(NO_AUTOTUNING)
