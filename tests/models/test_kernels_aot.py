"""What the accelerators' own compilers make of a model's attention, where there are none."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import and_slow
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.aot.machine import compilers, machine, prepare
from jaxrl.models import decoder, parameters, split_k
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Clamp, Experts
from jaxrl.models.family import LayerKind
from jaxrl.models.kernels import compiling_for, target_of
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.models.shared_prompts import Seats
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.targets import GPUS
from jaxrl.types import Sequences

MODEL = DecoderConfig("qwen2", 256, 512, 2, 4, 2, 128, 384)
"""Two layers with the head dim of Qwen2.5, 4 heads and 2 KV heads."""
NARROW = DecoderConfig("qwen2", 64, 128, 2, 2, 1, 128, 128)
"""What the code that libtpu generates grows with."""
WINDOWS = (LayerKind(window=50), LayerKind())
SINKS = DecoderConfig(
    *("gpt_oss", 256, 256, 2, 4, 2, 128, 128),
    kinds=WINDOWS,
    experts=Experts(4, 2, True, 128, Clamp(1.702, 7.0)),
)
SHAPES = DecoderConfig(
    *("gemma4_text", 256, 256, 2, 4, 2, 256, 128),
    kinds=(LayerKind(window=50), LayerKind(head_dim=512, n_kv_heads=1, keys_as_values=True)),
    score_dim=1,
)
"""Gemma 4's heads: 256 dims with a window, 512 without."""
W, C, G, P = 136, 200, 2, 2
OPTIONS: dict[str, Any] = {"gpu": {"xla_gpu_autotune_level": 0}, "tpu": {}}
"""No kernel can be tried out."""

MISSING = {"cuda", "tpu"} - compilers()
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(MISSING), reason=f"no compiler for {sorted(MISSING)} (extra aot)"),
]


def described(target: str, sizes: tuple[int, ...]) -> Mesh:
    """A mesh of devices that are not here."""
    prepare()
    return role_mesh(machine(target).compiled[: math.prod(sizes)], Axes(*sizes))


def compiled(
    mesh: Mesh,
    platform: str,
    dtype: str,
    *,
    shared: bool,
    model: DecoderConfig = MODEL,
    prompts: int = P,
) -> str:
    """The program of a model's hidden states and their gradient, and of a prefill."""
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shapes, shardings = parameters.abstract_params(model), param_shardings(model, mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )

    def loss(params: Any, given: Sequences) -> jax.Array:
        packing = pack_streams(given, mesh)
        options: Any = {"mesh": mesh, "dtype": dtype, "remat": "full"}
        found = decoder.forward_packed(model, params, packing, **options)
        return found.astype(jnp.float32).sum()

    def program(params: Any, given: Sequences) -> Any:
        heads = given.tokens[:, :W], given.mask[:, :W]
        filled = decoder.prefill(model, parameters.cast(params, dtype), *heads, mesh=mesh)
        return jax.grad(loss)(params, given), filled

    def array(width: int, kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((prompts * G, width), kind, sharding=rows)

    given = Sequences(
        array(W + C, jnp.int32), array(W + C, bool), array(C, bool), G if shared else 1
    )
    with compiling_for(target_of(mesh.devices.flat)):
        lowered = jax.jit(program).lower(params, given)
    return lowered.compile(compiler_options=OPTIONS[platform]).as_text()


def squares(text: str) -> set[str]:
    """Arrays of queries by keys: masks, or scores."""
    widths = (W, C, W + C)
    pairs = "|".join(f"{a},{b}" for a in widths for b in widths)
    return set(re.findall(rf"\w+\[(?:\d+,)+(?:{pairs})\]", text))


@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 1, 2, 2)], ids=str)
def test_an_h200_runs_cudnns_kernel_without_a_mask(sizes: tuple[int, ...]) -> None:
    """Two KV heads are divided among two devices, and whole on each of four."""
    text = compiled(described("h200x4", sizes), "gpu", "bfloat16", shared=True)
    calls = re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)
    each = 3  # of the prompts; of the completions to the prompts, to themselves
    assert calls.count("__cudnn$fmhaSoftmaxBackward") == each
    assert calls.count("__cudnn$fmhaSoftmax") == 2 * each + 1  # and again backward; the prefill
    assert len(calls) == 3 * each + 1  # none with a bias
    assert not squares(text)


@pytest.mark.parametrize(
    ("shared", "model"),
    [(False, replace(MODEL, kinds=WINDOWS)), (True, replace(SINKS, experts=None))],
    ids=["rows", "groups, sinks"],
)
def test_an_h200s_kernel_has_the_window_of_a_layer(shared: bool, model: DecoderConfig) -> None:
    """Of two layers one has a window: its calls are of whole sequences, shared prompts or not. And
    sinks need no other calls."""
    sizes = (1, 2, 2) if shared else (1, 1, 1)
    text = compiled(described("h200x4", sizes), "gpu", "bfloat16", shared=shared, model=model)
    calls = re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)
    whole, window = (3, 2) if shared else (1, 1)  # of the prompts, of the completions
    assert len(calls) == 3 * (whole + window) + 2
    windows = re.findall(r'"sliding_window_length":\s*(\d+)', text)
    assert windows.count("50") == 3 * window + 1 and set(windows) <= {"0", "50"}
    assert not squares(text)


def test_layers_whose_heads_are_too_wide_for_cudnn_are_products_beside_those_in_its_kernel() -> (
    None
):
    """Of heads of 256 and of 512 dims."""
    mesh = described("h200x4", (1, 2, 2))
    text = compiled(mesh, "gpu", "bfloat16", shared=True, model=SHAPES)
    calls = re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)
    assert len(calls) == 3 * 2 + 1 and squares(text)
    windows = re.findall(r'"sliding_window_length":\s*(\d+)', text)
    assert windows.count("50") == 3 * 2 + 1


def test_a_tpu_runs_splash_attention() -> None:
    """Of prompts and of completions forward, again in the backward pass, and that pass's two
    kernels; and a prefill. Of each of two kinds of layers, with sinks."""
    mesh = described("tpu-v5e:2x2", (1, 1, 1))
    model = replace(SINKS, vocab_size=64, d_model=128, n_heads=2, n_kv_heads=1, experts=None)
    text = compiled(mesh, "tpu", "bfloat16", shared=True, model=model, prompts=1)
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * (2 * 4 + 1)
    assert not squares(text)


ONE = replace(NARROW, n_heads=4, n_kv_heads=2)
FULL_SINKS = replace(SINKS, kinds=(LayerKind(),))


@pytest.mark.parametrize(
    ("target", "model"),
    [
        *(("tpu-v5e:2x2", model) for model in (replace(ONE, kinds=WINDOWS), SINKS)),
        *((target, ONE) for target in ("tpu-v5e:2x2", "h200x1", "h100x1")),
        ("tpu-v5e:2x2", FULL_SINKS),
    ],
    ids=["windows", "sinks of windows", "tpu", "h200", "h100", "sinks"],
)
def test_a_decode_step_runs_in_a_kernel_that_reads_the_cache_where_it_is(
    target: str, model: DecoderConfig
) -> None:
    """A call in each layer for what follows the prompts, and one for the prompts where no window
    differs among those that read one. Neither the cache, which is donated, nor the prompts are
    copied. They are larger than the 128 MiB of a TPU's VMEM, where XLA would hold a smaller cache
    while it computes."""
    mesh, slots, positions, rows = described(target, (1, 1, 1)), 8, 32768, 16
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=whole)

    def cache(n: int) -> list[Any]:
        pair = array((n, 2, positions, 128), jnp.bfloat16)
        return [(pair, pair)] * model.n_layers

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32)

    params = jax.tree.map(
        lambda x: array(x.shape, jnp.bfloat16),
        parameters.abstract_params(model, layout="unstacked"),
    )
    prompts = decoder.Shared(
        cache(rows), Seats(ints(rows, 4), ints(rows), ints(slots)), ints(slots)
    )
    given = (params, cache(slots), decoder.SlotTokens(ints(slots), ints(slots)), prompts)
    step = partial(decoder.decode_step, model, mesh=mesh)
    with compiling_for(target_of(mesh.devices.flat)):
        lowered = jax.jit(step, donate_argnums=1).lower(*given)
    on_gpu = target.startswith("h")
    compiled = lowered.compile(OPTIONS["gpu" if on_gpu else "tpu"])
    text, memory = compiled.as_text(), compiled.memory_analysis()
    call = "__gpu$xla.gpu.triton" if on_gpu else "tpu_custom_call"
    calls = model.n_layers + model.windows.get(None, 0)
    assert text.count(f'custom_call_target="{call}"') == calls
    held = 2 * model.n_layers * slots * 2 * positions * 128 * 2
    assert memory.alias_size_in_bytes == held and memory.temp_size_in_bytes < held / 8


@pytest.mark.parametrize(
    ("target", "queries", "head_dim", "keys"),
    and_slow(
        [("l4", 64, 128, 64), ("l4", 64, 256, 32), ("l4", 64, 512, 16), ("h100", 64, 256, 64)],
        [
            *(("l4", 8, 512, 32), ("h100", 64, 512, 32), ("h100", 8, 1024, 32)),
            *(("a100", 64, 512, 32), ("b200", 64, 512, 32), ("rtx5090", 64, 512, 16)),
        ],
    ),
)
def test_a_gpu_has_the_shared_memory_of_a_decode_step(
    target: str, queries: int, head_dim: int, keys: int
) -> None:
    """On each kind of GPU the kernel reads as many keys at a time as there is shared memory for,
    and Triton takes as much of it as is said here; 64 queries are those of a prompt that slots
    share."""
    tile = split_k.tile_of(queries, head_dim, [GPUS[target].capability])
    assert tile is not None and tile[1] == keys
    assert "triton" in split_k_for(target, queries, head_dim)


@pytest.mark.parametrize(
    ("target", "queries"),
    and_slow(
        [("l4", 64), ("h100", 64)],
        [("a100", 64), ("b200", 64), ("rtx5090", 64)]
        + [(target, 16) for target in ("l4", "a100", "h100", "b200", "rtx5090")],
    ),
)
def test_what_triton_takes_of_shared_memory_is_what_tiles_count(
    target: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that has next to none, whose compiler says how much it lacks."""
    gpu = GPUS[target]
    rows, keys = split_k.tile_of(queries, 256, [gpu.capability]) or (0, 0)
    monkeypatch.setitem(GPUS, target, replace(gpu, shared_kib=2))
    monkeypatch.setattr(split_k, "tile_of", lambda *_: (rows, keys))
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        split_k_for(target, queries, 256)
    taken = re.search(r"requested (\d+)", str(error.value))
    expected = split_k.shared_by(rows, keys, 256, gpu.capability)
    assert taken is not None and 0 <= expected - int(taken[1]) <= split_k.BARRIERS


def split_k_for(target: str, queries: int, head_dim: int) -> str:
    """The split-K kernel's program, of four KV heads of slots."""
    mesh = described(f"{target}x1", (1, 1, 1))
    whole = NamedSharding(mesh, PartitionSpec())
    query, cache = (
        jax.ShapeDtypeStruct((4, 1, n, head_dim), jnp.bfloat16, sharding=whole)
        for n in (queries, 512)
    )
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=whole)
    gpu = target_of(mesh.devices.flat)
    attend = jax.jit(partial(split_k.attend_parts, capabilities=gpu.capabilities))
    with compiling_for(gpu):
        lowered = attend.lower(query, cache, cache, lengths)
    return str(lowered.compile(OPTIONS["gpu"]).as_text())


def test_a_t4_computes_attention_in_matrix_products() -> None:
    text = compiled(described("t4x1", (1, 1, 1)), "gpu", "float32", shared=False)
    assert "fmha" not in text and squares(text)
