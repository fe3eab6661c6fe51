"""What the accelerators' own compilers make of a model's attention, where there are none."""

from __future__ import annotations

import math
import os
import re
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import compiling_for, target_of
from jaxrl.models.rules import param_shardings

MODEL = DecoderConfig("qwen2", 256, 512, 2, 4, 2, 128, 384)
"""Two layers with the head dim of Qwen2.5, 4 heads and 2 KV heads."""
W, C, G, P = 136, 200, 2, 4
GPU_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ {capability} }}
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
device_description_str: "{kind}"
"""
GPUS: dict[str, dict[str, Any]] = {
    "h200": {
        "shared": 228 << 10,
        "optin": 227 << 10,
        "threads": 2048,
        "cores": 132,
        "lanes": 128,
        "bandwidth": 4_800_000_000_000,
        "l2": 50 << 20,
        "clock": 1.98,
        "memory": 141 << 30,
        "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
        "kind": "NVIDIA H200",
    },
    "t4": {
        "shared": 64 << 10,
        "optin": 64 << 10,
        "threads": 1024,
        "cores": 40,
        "lanes": 64,
        "bandwidth": 320_000_000_000,
        "l2": 4 << 20,
        "clock": 1.59,
        "memory": 15 << 30,
        "capability": "major: 7 minor: 5",
        "kind": "Tesla T4",
    },
}
"""From NVIDIA's data sheets."""
WHEELS = {"gpu": "jax_cuda12_plugin", "tpu": "libtpu"}
OPTIONS: dict[str, Any] = {"gpu": {"xla_gpu_autotune_level": 0}, "tpu": {}}
"""No kernel can be tried out."""

pytestmark = pytest.mark.aot


def described(name: str, platform: str, sizes: tuple[int, int, int]) -> Mesh:
    """A mesh of devices that are not here."""
    from jax.experimental import topologies

    if find_spec(WHEELS[platform]) is None:
        pytest.skip(f"{WHEELS[platform]} is not installed: pip install 'jaxrl[aot]'")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    n = math.prod(sizes)
    if platform == "tpu":
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    else:
        text = GPU_TEXT.format(**GPUS[name])
        found = topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=f"1x1x{n}"
        )
    devices = np.array(found.devices[:n], object).reshape(sizes)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def compiled(mesh: Mesh, platform: str, dtype: str, *, shared: bool) -> str:
    """The program of a model's hidden states and their gradient, and of a prefill."""
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shapes, shardings = decoder.abstract_params(MODEL), param_shardings(MODEL, mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )

    def both(n: int, width: int) -> tuple[Any, Any]:
        return tuple(
            jax.ShapeDtypeStruct((n, width), kind, sharding=rows) for kind in (jnp.int32, bool)
        )

    def loss(params: Any, *given: Any) -> jax.Array:
        options: Any = {"mesh": mesh, "dtype": dtype, "remat": "full"}
        if shared:
            found = decoder.forward_groups(MODEL, params, *given, **options)
        else:
            found = (decoder.forward(MODEL, params, *given[0], **options),)
        return sum(x.astype(jnp.float32).sum() for x in found)

    def program(params: Any, *given: Any) -> Any:
        filled = decoder.prefill(MODEL, decoder.cast(params, dtype), *given[0], mesh=mesh)
        return jax.grad(loss)(params, *given), filled

    given = [both(P, W), both(P * G, C)] if shared else [both(P * G, W + C)]
    with compiling_for(target_of(mesh.devices.flat)):
        lowered = jax.jit(program).lower(params, *given)
    return lowered.compile(compiler_options=OPTIONS[platform]).as_text()


def squares(text: str) -> set[str]:
    """Arrays of queries by keys: masks, or scores."""
    widths = (W, C, W + C)
    pairs = "|".join(f"{a},{b}" for a in widths for b in widths)
    return set(re.findall(rf"\w+\[(?:\d+,)+(?:{pairs})\]", text))


@pytest.mark.parametrize(
    ("sizes", "shared"),
    [((1, 1, 1), False), ((1, 2, 2), True), ((1, 1, 4), True)],
    ids=str,
)
def test_an_h200_runs_cudnns_kernel_without_a_mask(
    sizes: tuple[int, int, int], shared: bool
) -> None:
    """Two KV heads are divided among two devices, and whole on each of four."""
    text = compiled(described("h200", "gpu", sizes), "gpu", "bfloat16", shared=shared)
    calls = re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)
    each = 3 if shared else 1  # of the prompts; of the completions to the prompts, to themselves
    assert calls.count("__cudnn$fmhaSoftmaxBackward") == each
    assert calls.count("__cudnn$fmhaSoftmax") == 2 * each + 1  # and again backward; the prefill
    assert len(calls) == 3 * each + 1  # none with a bias
    assert not squares(text)


def test_a_tpu_runs_splash_attention() -> None:
    """Of prompts and of completions forward, again in the backward pass, and that pass's two
    kernels; and a prefill."""
    text = compiled(described("v5e:2x2", "tpu", (1, 1, 1)), "tpu", "bfloat16", shared=True)
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * 4 + 1
    assert not squares(text)


def test_a_t4_computes_attention_in_matrix_products() -> None:
    text = compiled(described("t4", "gpu", (1, 1, 1)), "gpu", "float32", shared=True)
    assert "fmha" not in text and squares(text)
