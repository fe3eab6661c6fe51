"""Machines that are not here: their devices as the compilers of XLA describe them.

`jax.experimental.topologies` gives the devices of a machine from its description alone; a program
that is lowered over them is compiled by the compiler of the target itself, without driver or device
(extra `aot`: the compilers of NVIDIA's GPUs, and libtpu).
"""

from __future__ import annotations

import os
from dataclasses import replace

import jax
from jax._src import xla_bridge  # no public function tells whether a backend runs

from jaxrl.errors import UserError
from jaxrl.process.json_types import Keywords
from jaxrl.process.xla_flags import add_flag
from jaxrl.sharding.targets import Gpu, TargetMachine, target_machine

OPTION = "--compile"
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


def machine(name: str) -> TargetMachine:
    """Returns the machine of a target's name, with the devices as its compiler has them.

    Raises:
        UserError: no such target; or its compiler is not installed, or jax has started.
    """
    from jax.experimental import topologies  # starts nothing, but takes time to import

    target, platform = target_machine(name, OPTION), "tpu"
    if isinstance(target.chip, Gpu):
        topology = f"1x{target.hosts}x{target.count // target.hosts}"  # slices, hosts, GPUs of each
        platform = "cuda"
        described: Keywords = {"target_config": _target_config(target.chip), "topology": topology}
    else:
        chip, shape = name.removeprefix("tpu-").partition(":")[0], "x".join(map(str, target.shape))
        described = {"topology_name": f"{chip}:{shape}"}
        if target.count < 4:  # of which libtpu takes whole hosts by default
            described["chips_per_host_bounds"] = (*target.shape, 1)[:3]
    try:
        devices = topologies.get_topology_desc(platform=platform, **described).devices
    except Exception as error:  # which one depends on the platform, and on what is missing
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        if platform not in compilers():
            reason = f"its compiler is not installed; the extra aot has it: {INSTALL}"
        raise UserError(f"{OPTION} {name}: {reason}") from error
    return replace(target, compiled=tuple(devices))


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
