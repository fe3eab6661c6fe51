"""What the compilers of GPUs and TPUs make of the programs: laws that a CPU run cannot show.

Models of two layers and real widths. Each law names what it costs where it is broken.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxrl.aot.check import Report, check, plan_for
from jaxrl.aot.hlo import read
from jaxrl.aot.machine import compilers, machine, prepare
from jaxrl.aot.programs import RunPrograms, actor
from jaxrl.config.schema import Config
from jaxrl.models.kernels import compiling_for

MISSING = {"cuda", "tpu"} - compilers()
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(bool(MISSING), reason=f"no compiler for {sorted(MISSING)} (extra aot)"),
]
STUDENT = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
TEACHER = STUDENT | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
PROMPT, NEW, BATCH, GROUP = 448, 832, 16, 4
WIDTH = PROMPT + NEW
TEACHER_WIDTH = 3584


def config(tmp: Path, layers: int = 2, **keys: Any) -> Config:
    for name, model in (("student", STUDENT), ("teacher", TEACHER)):
        (tmp / name).mkdir(exist_ok=True)
        described = model | {"num_hidden_layers": layers}
        (tmp / name / "config.json").write_text(json.dumps(described))
    raw: dict[str, Any] = {
        "mesh": "actor=2,rollout=2,teacher=4",
        "batch_size": BATCH,
        "group_size": GROUP,
        "max_prompt_tokens": PROMPT,
        "max_new_tokens": NEW,
        "student": {"model": str(tmp / "student")},
        "teacher": {"model": str(tmp / "teacher")},
        "data": {"train": "arithmetic"},
        "run_dir": str(tmp / "run"),
        "actor": {"micro_batch_tokens": PROMPT + GROUP * NEW, "remat": "full"},
    }
    return Config.parse(raw | keys)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Any, Any, str]]:
    """(role, program) -> the program, what the compiler made of it for 8 x H200, and its text."""
    prepare()
    target = machine("h200x8")
    plan = plan_for(config(tmp_path_factory.mktemp("models")), target)
    found = {}
    with compiling_for(plan.inputs.target):
        for program in RunPrograms(plan.config, plan.inputs, plan.axes, target.devices):
            if program.name not in ("insert", "convert"):
                compiled = program.compile()
                found[program.role, program.name] = program, compiled, compiled.as_text()
    return found


def test_nothing_above_a_megabyte_is_gathered_in_the_body_of_a_decode_step(texts):
    """The logits of all slots would be 58 MB at every token."""
    _, _, text = texts["rollout", "decode"]
    inside = {k: v for k, v in read(text).largest_gather.items() if k != "ENTRY"}
    assert max(inside.values(), default=0) <= 1e6, inside


def test_the_update_holds_no_array_of_the_global_batch(texts):
    """The teacher's hidden states of the whole batch on each device: 2.8 GB in the preset."""
    _, _, text = texts["actor", "update"]
    rows = BATCH * GROUP
    whole = re.compile(rf"\[(?:\d+,)?{rows},{NEW},{TEACHER_WIDTH}\]")
    assert not whole.search(text)
    assert re.search(rf"\[{rows // 2},{NEW},{TEACHER_WIDTH}\]", text)  # a device's share is there


@pytest.mark.parametrize(
    "name", [("actor", "update"), ("teacher", "score"), ("rollout", "prefill")], ids=" ".join
)
def test_attention_is_cudnn_s_and_reads_no_dense_mask(texts, name):
    """A mask [B, T, T] is traffic, and without `causal` half of the products are for nothing."""
    _, _, text = texts[name]
    assert read(text).attention == "cuDNN's flash attention"
    widths = {str(n) for n in (PROMPT, NEW, WIDTH)}
    square = [
        found
        for found in re.findall(r"(?:pred|bf16|f32|s32)\[([\d,]+)\]", text)
        if len(dims := found.split(",")) >= 2 and dims[-1] in widths and dims[-2] in widths
    ]
    assert not square, set(square)


def test_gradients_are_scattered_not_reduced_whole(texts):
    found = read(texts["actor", "update"][2]).collectives
    assert found["reduce-scatter"].bytes > 100e6
    assert found["all-reduce"].bytes < 0.05 * found["reduce-scatter"].bytes


def test_the_state_is_updated_in_place(texts):
    """Every byte of parameters and optimizer state is donated: no second copy."""
    program, compiled, _ = texts["actor", "update"]
    state = program.args[0]
    from jaxrl.aot.programs import local_bytes

    assert compiled.memory_analysis().alias_size_in_bytes >= local_bytes(state)


def test_a_teacher_with_whole_copies_needs_no_collective(texts):
    found = read(texts["teacher", "score"][2]).collectives
    assert sum(each.bytes for each in found.values()) < 1e6, found


def test_the_layers_of_a_decode_step_are_one_cuda_graph(tmp_path):
    report = checked(
        tmp_path, "h200x1", "actor+rollout=1", algorithm="sft", teacher={"model": None}
    )
    decode = next(p for p in report.programs if p.name == "decode")
    assert decode.graphs is not None
    assert decode.graphs.graphs == 1
    assert decode.graphs.inside > 10 * 2  # of two layers
    assert decode.graphs.outside <= 10


WITHIN = 0.05
UPDATES = [(n, remat) for n in (1, 2, 4, 8) for remat in ("full", "dots", "none")]
ONE_PLAN = (4, "dots")


@pytest.mark.parametrize(
    ("devices", "remat"),
    [pytest.param(*case, marks=() if case == ONE_PLAN else pytest.mark.slow) for case in UPDATES],
)
def test_the_plan_of_an_update_is_what_the_compiler_takes(devices, remat, tmp_path):
    """Qwen2.5-7B teaches Qwen2.5-1.5B at full depth on H200."""
    prepare()
    target = machine("h200x8")
    run = config(
        tmp_path,
        layers=28,
        mesh=f"actor+rollout+teacher={devices}",
        batch_size=48,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        actor={"micro_batch_tokens": 12288, "remat": remat},
    )
    plan = plan_for(run, target)
    programs = RunPrograms(plan.config, plan.inputs, plan.axes, target.devices)
    with compiling_for(plan.inputs.target):  # the teacher's signal is traced too
        update = next(program for program in programs if program.name == "update")
        compiled = update.held(update.compile())
    assert update.planned(plan.accounts["actor"]) == pytest.approx(compiled, rel=WITHIN)


def test_the_update_compiles_for_tpus(tmp_path):
    """With the sums of several micro-batches sharded: XLA takes a reduction that is added to a
    carried sum out of the loop, and libtpu fails at it where a scatter (of the embedding) is there.
    """
    prepare()
    small = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 8192}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(STUDENT | small))
    target = machine("tpu-v5e:2x2")
    given = config(
        tmp_path,
        mesh="actor+rollout+teacher=4",
        student={"model": str(tmp_path / "small")},
        teacher={"model": str(tmp_path / "small")},
        actor={"micro_batch_tokens": 64 + GROUP * 64, "parallel": {"fsdp": 4}},
        max_prompt_tokens=64,
        max_new_tokens=64,
    )
    plan = plan_for(given, target)
    with compiling_for(plan.inputs.target):
        programs = actor(RunPrograms(plan.config, plan.inputs, plan.axes, target.devices))
        update = next(program for program in programs if program.name == "update")
        assert len(update.args[3]) > 1  # micro-batches
        update.compile()


def checked(tmp: Path, target: str, mesh: str, **keys: Any) -> Report:
    return check(config(tmp, mesh=mesh, **keys), target)


@pytest.mark.parametrize("target", ["t4x1", "tpu-v5e"])
def test_the_devices_of_colab_compile_the_notebooks_programs(target, tmp_path):
    """GSPO on one device, in the dtype that it has products for."""
    small = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 8192}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(STUDENT | small))
    rewarded = {"functions": ["exact"]}
    report = checked(
        tmp_path,
        target,
        "actor+rollout=1",
        algorithm="gspo",
        student={"model": str(tmp_path / "small")},
        teacher={"model": None},
        reward=rewarded,
        actor={},
        max_prompt_tokens=64,
        max_new_tokens=64,
    )
    assert not report.failures, report.failures
    expected = "float32" if target == "t4x1" else "bfloat16"
    assert report.plan.config.actor.compute_dtype == expected
