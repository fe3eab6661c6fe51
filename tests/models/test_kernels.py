"""Which kernel computes attention is decided by one function, of the device that runs it."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_requests import sample_groups
from tiny_models import random_params

from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.models import cudnn, kernels, split_k
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import forward
from jaxrl.models.kernels import (
    CPU,
    UNKNOWN_GPU,
    Target,
    default_dtype,
    fuses,
    kernel_of,
    step_kernel_of,
    target_of,
    target_on,
    try_kernels,
    why_no_step_kernel,
    why_not_fused,
)
from jaxrl.models.parameters import unstack
from jaxrl.plan import build, peaks
from jaxrl.sampling.engine import Engine
from jaxrl.sampling.sampler import SamplingParams
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place
from jaxrl.sharding.targets import block_shared_bytes
from jaxrl.types import Completion, Prompt

H100 = Target("gpu", (9, 0))
HEAD_DIMS = (64, 80, 96, 100, 128, 160, 256)
HAS = {"7.5": (), "8.0": (64, 80, 96, 128), "9.0": (64, 80, 96, 128, 160, 256)}
"""Compute capability -> the head dims that cuDNN has."""


def gpu(capability: str | None, **more: Any) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability, **more)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", HAS)
def test_a_gpu_has_the_head_dims_that_cudnn_says(capability, head_dim):
    target = target_of([gpu(capability)])
    expected = "cudnn" if head_dim in HAS[capability] else None
    assert kernel_of(target, head_dim, "bfloat16") == expected
    assert fuses(target, head_dim, "bfloat16") == (expected is not None)
    assert kernel_of(target, head_dim, "float32") is None


@pytest.mark.parametrize(
    ("device", "head_dim", "dtype", "why"),
    [
        (gpu("8.0"), 64, "bfloat16", None),
        (gpu("9.0"), 128, "float16", None),
        (gpu("9.0"), 96, "bfloat16", "powers of two"),
        (gpu("9.0"), 8, "bfloat16", "powers of two"),
        (gpu("9.0"), 128, "float32", "does not compute in float32"),
        (gpu("7.5"), 64, "bfloat16", "needs compute capability 8.0"),
        (SimpleNamespace(platform="tpu"), 128, "bfloat16", None),
        (SimpleNamespace(platform="tpu"), 256, "float32", None),
        (SimpleNamespace(platform="tpu"), 64, "bfloat16", "multiples of 128"),
        (SimpleNamespace(platform="cpu"), 64, "bfloat16", "for a cpu"),
    ],
)
def test_a_decode_step_has_a_kernel_on_nvidia_s_gpus_and_on_tpus(device, head_dim, dtype, why):
    target = target_of([device])
    found = why_no_step_kernel(target, head_dim, dtype)
    assert (found is None) if why is None else (why in found)
    kernel = "flash-decode" if device.platform == "tpu" else "split-k"
    assert step_kernel_of(target, head_dim, dtype) == (kernel if why is None else None)


@pytest.mark.parametrize(("platform", "expected"), [("cpu", None), ("tpu", "splash")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_other_device_has_cudnn(platform, expected, dtype):
    assert kernel_of(target_of([SimpleNamespace(platform=platform)]), 64, dtype) == expected


def test_prompts_computed_once_need_a_backward_pass_that_jax_may_hide(monkeypatch):
    assert fuses(UNKNOWN_GPU, 64, "bfloat16", joined=True)  # the version that is installed
    monkeypatch.setattr(cudnn, "JOINS", False)
    assert not fuses(UNKNOWN_GPU, 64, "bfloat16", joined=True)
    assert fuses(UNKNOWN_GPU, 64, "bfloat16")


@pytest.mark.parametrize(
    ("capability", "dtype"), [("7.5", "float32"), ("8.0", "bfloat16"), ("9.0", "bfloat16")]
)
def test_a_gpu_without_tensor_cores_for_bfloat16_computes_in_float32(capability, dtype):
    assert default_dtype(target_of([gpu(capability)])) == dtype
    plan = planned(capability)
    assert {plan.config.roles[role].dtype for role in ("actor", "rollout")} == {dtype}
    assert [note for note in plan.notes if note.startswith(f"dtype={dtype} of actor, rollout")]


def test_devices_of_several_kinds_do_what_the_least_able_can():
    mixed = target_of([gpu("9.0"), gpu("7.5"), gpu("10.0")])
    assert mixed == Target("gpu", (7, 5), others=((9, 0), (10, 0)))
    for least, other in (("8.0", "8.9"), ("9.0", "12.0")):  # the other has less shared memory
        both = target_of([gpu(least), gpu(other)]).capabilities
        for head_dim in (128, 256, 512):
            rows, keys = split_k.tile_of(64, head_dim, both)
            for one in both:
                assert split_k.shared_by(rows, keys, head_dim, one) <= block_shared_bytes(one)
    assert target_of([gpu("10.3")]).capability > target_of([gpu("9.0")]).capability
    assert target_of([gpu("gfx942")]) == Target("gpu")  # AMD's
    assert target_of([gpu(None)]) == UNKNOWN_GPU
    assert target_of(jax.devices()) == CPU


def test_attention_asks_for_the_devices_of_its_mesh():
    """Not for those of the process that traces it."""
    for capability, expected in (("7.5", None), ("8.0", "cudnn")):
        mesh: Any = SimpleNamespace(devices=np.array([gpu(capability)], object))
        assert kernel_of(target_on(mesh), 64, "bfloat16") == expected
        assert kernel_of(target_on(mesh), 64, "float32") is None
    assert target_on(None) == CPU  # without a mesh: this process's own


def planned(capability: str, head_dim: int = 64, **changes: Any) -> Any:
    model = DecoderConfig("qwen2", 1000, 4 * head_dim, 2, 4, 2, head_dim, 512)
    config = Config.parse(
        {
            "student": {"model": "s"},
            "data": {"train": "arithmetic"},
            "mesh": "actor=1,rollout=1",
            "algorithm": "sft",
            "batch_size": 8,
            **changes,
        }
    )
    roles = ("actor", "rollout")
    stats = {"bytes_limit": 10**10}
    made = [gpu(capability, id=i, memory_stats=lambda: stats, process_index=0) for i in range(2)]
    placement = place(config.mesh, roles)
    return build(config, roles, placement, model, None, Visible(tuple(made), None))


def attention_notes(plan: Any) -> list[str]:
    """Without that of the largest arrays, which names the lines that make them."""
    return [note for note in plan.notes if "attention" in note and "largest arrays" not in note]


def test_the_plan_counts_the_scores_where_there_is_no_kernel_and_says_so():
    new, old = planned("8.0"), planned("7.5")
    assert not attention_notes(new)
    (note,) = attention_notes(old)
    assert "actor, rollout" in note and "needs compute capability 8.0" in note and "7.5" in note
    update = [plan.accounts["actor"].phases()["update"] for plan in (old, new)]
    assert update[0] > update[1]
    (note,) = attention_notes(planned("8.0", 100))
    assert "the model has 100" in note


def test_the_plan_says_why_a_decode_step_reads_the_whole_cache():
    whole = "reads the cache as far as its longest sequence"
    assert not [note for note in planned("8.0").notes if whole in note]
    (note,) = [note for note in planned("8.0", head_dim=96).notes if whole in note]
    assert note.startswith("sampling")
    assert "powers of two from 16 on, and the model has 96" in note


@pytest.mark.parametrize("gone", ["kernel", "package"])
def test_a_jax_without_the_kernel_of_a_decode_step_computes_products(gone, monkeypatch):
    """Pallas on Triton is deprecated: with the kernel its package may go."""
    module = "jaxrl.no_such_kernel" if gone == "kernel" else "no_such_package.kernel"
    monkeypatch.setattr(split_k, "MODULE", module)
    split_k.exists.cache_clear()
    try:
        assert "this version of jax" in why_no_step_kernel(UNKNOWN_GPU, 64, "bfloat16")
    finally:
        split_k.exists.cache_clear()


def test_the_plan_counts_widths_as_they_are_rounded():
    rounded, asked = planned("8.0", max_new_tokens=1023), planned("8.0", max_new_tokens=1024)
    actor = [plan.accounts["actor"] for plan in (rounded, asked)]
    assert actor[0] == actor[1]


@pytest.mark.parametrize(("platform", "multiple"), [("cpu", 2), ("gpu", 64), ("tpu", 64)])
@pytest.mark.parametrize("most", [5, 2047])
def test_odd_limits_make_widths_that_every_kernel_takes(platform, multiple, most):
    """The rest is padding: the tokens under the mask are the same."""
    prompt = Prompt(0, (3, 4, 5), "p")
    probs = np.zeros(5, np.float32)
    completion = Completion((6, 7, 8, 9, 1), probs, probs, "stop", "")
    packed = [
        make_rollout(
            [prompt],
            [[completion]],
            policy_version=0,
            pad_id=0,
            max_prompt_tokens=7,
            max_new_tokens=most,
            width_multiple=n,
        ).sequences
        for n in (Target(platform).width_multiple, 1)
    ]
    new = packed[0].loss_mask.shape[1]
    assert new % multiple == 0 and (packed[0].tokens.shape[1] - new) % multiple == 0
    rows = [s.tokens[s.mask].tolist() for s in packed]
    assert rows[0] == rows[1] == [3, 4, 5, 6, 7, 8, 9, 1]


@pytest.fixture
def pretending(monkeypatch):
    """The devices here take themselves for H100s; nothing is tried yet."""
    monkeypatch.setattr(kernels, "_TRIED", {})
    monkeypatch.setattr(kernels, "target_of", lambda devices: H100)


def working(monkeypatch, *, step: bool = True) -> list[str]:
    """Lets cuDNN's functions, and the kernel of a decode step, compute here; returns the calls."""
    calls: list[str] = []

    def fused(q, k, v, *more, **kwargs):
        calls.append("fused")
        return q * k.mean() * v.mean()

    def joined(q, shared, own, *more):
        calls.append("joined")
        return q * shared[0].mean() * own[1].mean()

    monkeypatch.setattr(cudnn, "attend_rows", fused)
    monkeypatch.setattr(cudnn, "attend_groups", joined)
    if step:
        monkeypatch.setattr(split_k, "attend_parts", partial(split_k.attend_parts, interpret=True))
    return calls


def test_a_kernel_that_works_is_used_and_tried_once(pretending, monkeypatch):
    calls = working(monkeypatch)
    for _ in range(2):
        assert try_kernels(jax.devices(), [(64, "bfloat16", True), (64, "bfloat16", False)]) == []
    assert calls == ["fused", "joined"]
    assert kernel_of(H100, 64, "bfloat16", joined=True) == "cudnn"
    assert step_kernel_of(H100, 64, "bfloat16") == "split-k"


@pytest.mark.parametrize("broken", ["attend_rows", "attend_groups", "nan", "step"])
def test_a_kernel_that_fails_is_used_no_more_and_a_note_says_why(broken, pretending, monkeypatch):
    working(monkeypatch)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("No valid engine configs for this graph\nsecond line")

    if broken == "nan":
        monkeypatch.setattr(cudnn, "attend_rows", lambda q, *_, **more: q * jnp.nan)
    elif broken == "step":
        monkeypatch.setattr(split_k, "attend_parts", fail)
    else:
        monkeypatch.setattr(cudnn, broken, fail)
    (note,) = try_kernels(jax.devices(), [(64, "bfloat16", True), (64, "float32", True)])
    name = "the split-K kernel of a decode step" if broken == "step" else "cuDNN's kernel"
    why = "results are not finite" if broken == "nan" else "No valid engine configs for this graph;"
    assert note.startswith(f"{name} failed when it was tried on cpu (heads of 64, bfloat16): ")
    assert why in note and note.endswith("matrix products are used, which are slower")
    assert "second line" not in note
    assert fuses(H100, 64, "bfloat16") == fuses(H100, 64, "bfloat16", joined=True)
    assert fuses(H100, 64, "bfloat16") == (broken == "step")
    assert step_kernel_of(H100, 64, "bfloat16") == (None if broken == "step" else "split-k")
    # Other widths and devices have theirs.
    assert fuses(H100, 128, "bfloat16") and fuses(UNKNOWN_GPU, 64, "bfloat16")
    assert try_kernels(jax.devices(), [(64, "bfloat16", True)]) == []  # said once


def test_a_run_whose_kernels_fail_computes_the_products(pretending):
    """Really: a CPU has neither of them. Its plan counts the scores, as one for a CPU does."""
    config = replace(CONFIG, head_dim=16)
    params = random_params(config)
    tokens = np.arange(64, dtype=np.int32)[None]
    mask = np.ones_like(tokens, bool)

    def logits() -> Any:
        return jax.jit(partial(forward, config, dtype=jnp.bfloat16))(params, tokens, mask)

    notes = try_kernels(jax.devices(), [(16, "bfloat16", True)])
    assert [note.partition(" failed")[0] for note in notes] == [
        "cuDNN's kernel",
        "the split-K kernel of a decode step",
    ]
    found = logits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "target_of", lambda devices: CPU)
        np.testing.assert_array_equal(found, logits())


def test_the_plan_of_this_host_counts_the_kernels_that_work_here(monkeypatch):
    """The same words whether a kernel is missing or failed."""
    monkeypatch.setattr(kernels, "_TRIED", {})
    before = planned("9.0")
    for kernel in ("cudnn", "split-k"):
        kernels._TRIED[H100, kernel, 64, "bfloat16"] = f"{kernel} failed"
    try:
        forget_walks()
        plan = planned("9.0")
    finally:
        forget_walks()
    assert "attention of actor, rollout: cudnn failed; matrix products are used" in " ".join(
        plan.notes
    )
    assert "sampling: split-k failed; each decode step reads the cache" in " ".join(plan.notes)
    updates = [each.accounts["actor"].phases()["update"] for each in (before, plan)]
    assert updates[0] < updates[1]


def forget_walks() -> None:
    """A run tries kernels before it plans: its programs have not been traced without them."""
    jax.clear_caches()
    peaks._walk.cache_clear()


def test_where_a_kernel_fails_in_one_process_none_uses_it(pretending, monkeypatch):
    working(monkeypatch)
    here, there = (SimpleNamespace(process_index=i, device_kind="H100") for i in (0, 1))
    monkeypatch.setattr(kernels.jax, "Device", SimpleNamespace)
    monkeypatch.setattr(kernels.jax, "default_device", lambda device: nullcontext())
    asked = []

    def gather(failed):
        asked.append(failed.tolist())
        return np.stack([failed, np.array([True, False])])

    monkeypatch.setattr(kernels.multihost_utils, "process_allgather", gather)
    (note,) = try_kernels([here, there], [(64, "bfloat16", True)])
    assert asked == [[False, False]] and "failed in another process" in note
    assert not fuses(H100, 64, "bfloat16") and step_kernel_of(H100, 64, "bfloat16") == "split-k"


def test_on_a_cpu_and_for_devices_elsewhere_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(kernels, "_TRIED", {})
    assert try_kernels(jax.devices(), [(64, "bfloat16", True)]) == []
    assert try_kernels([gpu("9.0")], [(64, "bfloat16", True)]) == []
    assert kernels._TRIED == {}


CONFIG = DecoderConfig("qwen2", 64, 32, 2, 4, 2, 8, 64)


def test_padding_to_an_even_width_changes_no_hidden_state():
    params = random_params(CONFIG)
    tokens = np.array([[5, 6, 7, 8, 9]], np.int32)
    mask = np.ones_like(tokens, bool)
    wide = [np.pad(x, ((0, 0), (3, 60))) for x in (tokens, mask)]
    run = jax.jit(forward, static_argnums=0)
    hidden, padded = run(CONFIG, params, tokens, mask), run(CONFIG, params, *wide)[:, 3:8]
    np.testing.assert_allclose(padded, hidden, rtol=1e-5, atol=1e-5)


def test_the_width_of_a_prefill_changes_no_sample():
    """It may be wider than the prompts' limit, and wider than the cache."""
    config = replace(CONFIG, n_layers=1)
    params = unstack(jax.device_get(random_params(config)))
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    found = []
    for multiple in (2, 64):
        engine = Engine(config, None, slots=2, max_prompt_tokens=5, max_new_tokens=7)
        engine.width_multiple = multiple
        sampled = sample_groups(engine, params, prompts, n=2, sampling=SamplingParams(7))
        found.append([[c.tokens for c in group] for group in sampled])
    assert found[0] == found[1]


def test_a_note_says_what_the_wrapper_would_refuse():
    assert why_not_fused(UNKNOWN_GPU, 128, "bfloat16") is None
    assert "up to 128" in str(why_not_fused(UNKNOWN_GPU, 256, "bfloat16"))
    assert "float32" in str(why_not_fused(UNKNOWN_GPU, 64, "float32"))
