"""What the compiler of GPUs makes of the programs: laws that a CPU run cannot show.

Models of real widths. Each law names what it costs where it is broken.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiled_runs import (
    BATCH,
    GROUP,
    NEEDS_COMPILERS,
    NEW,
    PROMPT,
    REWARDED,
    SMALL,
    TEACHER,
    UPDATES,
    config,
    distilled,
    programs,
    state_bytes,
)

from jaxrl.aot.check import compile_program
from jaxrl.aot.hlo import read

pytestmark = NEEDS_COMPILERS
WITHIN = 0.05
LAYERS = {28: ("update", "score"), 2: ("prefill", "decode")}
"""Depth of the models -> programs. Sampling compiles one layer after the other; the others scan."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """Program -> (its plan, itself, what the compiler made of it for 8 x H200, and its text)."""
    found = {}
    for layers, names in LAYERS.items():
        run = config(
            tmp_path_factory.mktemp("models"),
            {"num_hidden_layers": layers},
            actor={"micro_batch_tokens": PROMPT + GROUP * NEW, "remat": "dots"},
        )
        for plan, program in programs(run, "h200x8", *names):
            compiled = program.compile()
            found[program.name] = plan, program, compiled, compiled.as_text()
    return found


def test_nothing_above_a_megabyte_is_gathered_in_the_body_of_a_decode_step(made):
    """The logits of all slots would be 58 MB at every token."""
    *_, text = made["decode"]
    inside = {k: v for k, v in read(text).largest_gather.items() if k != "ENTRY"}
    assert max(inside.values(), default=0) <= 1e6, inside


def test_a_decode_step_reads_each_slot_s_own_keys(made):
    """In the kernel that stops at a slot's length, and without a copy of the cache for it."""
    *_, text = made["decode"]
    assert read(text).attention == "a Triton kernel"
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    assert not [shape for shape in copied if shape.count(",") == 3]


def test_the_update_holds_no_array_of_the_global_batch(made):
    """The teacher's hidden states of the whole batch on each device: 2.8 GB in the preset."""
    *_, text = made["update"]
    rows, width = BATCH * GROUP, TEACHER["hidden_size"]
    whole = re.compile(rf"\[(?:\d+,)?(?:{rows},{NEW}|{rows * NEW}),{width}\]")
    assert not whole.search(text)
    assert re.search(rf"\[{rows // 4},{NEW},{width}\]", text)  # a device's share is there


@pytest.mark.parametrize("name", ["update", "score", "prefill"])
def test_attention_is_cudnn_s_and_reads_no_dense_mask(made, name):
    """A mask [B, T, T] is traffic, and without `causal` half of the products are for nothing."""
    *_, text = made[name]
    assert read(text).attention == "cuDNN's flash attention"
    widths = {str(n) for n in (PROMPT, NEW, PROMPT + NEW)}
    square = [
        found
        for found in re.findall(r"(?:pred|bf16|f32|s32)\[([\d,]+)\]", text)
        if len(dims := found.split(",")) >= 2 and dims[-1] in widths and dims[-2] in widths
    ]
    assert not square, set(square)


def test_gradients_are_scattered_not_reduced_whole(made):
    *_, text = made["update"]
    found = read(text).collectives
    assert found["reduce-scatter"].bytes > 100e6
    assert found["all-reduce"].bytes < 0.05 * found["reduce-scatter"].bytes


def test_the_state_is_updated_in_place(made):
    """Every byte of parameters and optimizer state is donated: no second copy."""
    _, program, compiled, _ = made["update"]
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes(program)


def test_a_teacher_with_whole_copies_needs_no_collective(made):
    *_, text = made["score"]
    found = read(text).collectives
    assert sum(each.bytes for each in found.values()) < 1e6, found


@pytest.mark.parametrize("name", ["update", "score", "prefill"])
def test_the_plan_of_a_program_is_what_the_compiler_takes(made, name):
    plan, program, compiled, _ = made[name]
    planned = program.planned(plan.accounts[program.role])
    assert planned == pytest.approx(program.held(compiled), rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "remat"), UPDATES)
def test_the_plan_of_an_update_is_what_the_compiler_takes(devices, remat, tmp_path):
    """At the sizes of the preset."""
    for plan, update in programs(distilled(tmp_path, devices, remat), "h200x8", "update"):
        planned = update.planned(plan.accounts["actor"])
        assert planned == pytest.approx(update.held(update.compile()), rel=WITHIN)


def test_the_layers_of_a_decode_step_are_one_cuda_graph(tmp_path):
    alone = {"mesh": "actor+rollout=1", "algorithm": "sft", "teacher": {"model": None}}
    run = config(tmp_path, **alone)
    for plan, program in programs(run, "h200x1", "decode"):
        _, graphs, _ = compile_program(program, plan.inputs.target)
        assert graphs is not None
        assert graphs.graphs == 1
        assert graphs.inside > 10 * 2  # of two layers
        assert graphs.outside <= 10


def test_a_t4_compiles_the_notebook_s_programs(tmp_path):
    """In the dtype that it has products for."""
    names = []
    for plan, program in programs(config(tmp_path, SMALL, **REWARDED), "t4x1"):
        assert plan.config.actor.compute_dtype == "float32"
        assert read(program.compile().as_text()).attention is None
        names.append(program.name)
    assert names == ["update", "log-probs before", "convert", "prefill", "insert", "decode"]
