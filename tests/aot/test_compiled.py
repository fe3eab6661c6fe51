"""What the compiler of GPUs makes of the programs: laws that a CPU run cannot show.

Models of real widths. Each law names what it costs where it is broken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cases import and_slow
from compiled_runs import (
    BATCH,
    GROUP,
    LEAST,
    MOST,
    NEEDS_COMPILERS,
    NEW,
    PROMPT,
    STUDENT,
    TEACHER,
    UPDATES,
    Compiling,
    compiling,
    config,
    distilled,
    notebook_run,
    programs,
    state_bytes,
)

from jaxrl.aot.abstract import local_bytes
from jaxrl.aot.hlo import read

pytestmark = NEEDS_COMPILERS
LAYERS = {28: ("update", "score"), 2: ("prefill", "decode")}
"""Depth of the models -> programs. Sampling compiles one layer after the other; the others scan."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(scope="module")
def made(
    pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiling]:
    """Program -> what the compiler makes of it for 8 x H200."""
    found = {}
    for layers, names in LAYERS.items():
        run = config(
            tmp_path_factory.mktemp("models"),
            {"num_hidden_layers": layers},
            actor={"micro_batch_tokens": PROMPT + GROUP * NEW, "remat": "dots"},
        )
        found |= {each.program.name: each for each in compiling(pool, run, "h200x8", *names)}
    return found


@pytest.fixture(scope="module")
def on_a_t4(
    pool: ThreadPoolExecutor, made: object, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Compiling]]:
    """Notebook -> the same for its run on its GPU: begun with the others, which leave a core
    free."""
    folder = tmp_path_factory.mktemp("notebooks")
    return {
        name: list(compiling(pool, notebook_run(name, folder), "t4x1", *names))
        for name, names in COMPILED.items()
    }


@pytest.mark.usefixtures("on_a_t4")
def test_nothing_above_a_megabyte_is_gathered_in_the_body_of_a_decode_step(made):
    """The logits of all slots would be 58 MB at every token."""
    inside = {k: v for k, v in read(made["decode"].text).largest_gather.items() if k != "ENTRY"}
    assert max(inside.values(), default=0) <= 1e6, inside


def test_a_decode_step_reads_each_slot_s_own_keys(made):
    """In the kernel that stops at a slot's length, and without a copy of the cache for it."""
    text = made["decode"].text
    assert read(text).attention == "a Triton kernel"
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    assert not [shape for shape in copied if shape.count(",") == 3]


def test_the_plan_counts_prompts_that_slots_share_once(made):
    program = made["decode"].program
    entries = made["decode"].plan.accounts["rollout"].entries
    found = {entry.name: entry.bytes for entry in entries if entry.phase == "decode"}
    cache, (rows, seats) = program.args[3], program.args[7]
    assert found["KV cache"] == local_bytes(cache)
    assert found["prompts that slots share"] == local_bytes(rows)
    assert seats.slots.size == seats.places.size  # each prompt has a row, each sample a slot


@pytest.mark.parametrize(("reduced", "dtype"), [(None, "bf16"), ("float32", "f32")])
def test_layer_gradients_are_scattered_in_the_dtype_that_is_asked_for(
    pool: ThreadPoolExecutor, tmp_path: Any, reduced: str | None, dtype: str
) -> None:
    """The MLP's kernels [1536, 8960], of which each of four devices gets a quarter. What is
    gathered stays in bfloat16."""
    actor = {"micro_batch_tokens": PROMPT + GROUP * NEW, "reduce_dtype": reduced}
    (update,) = compiling(pool, config(tmp_path, actor=actor), "h100x8", "update")
    scattered = re.findall(r"= (.*) reduce-scatter-done\(", update.text)
    kernels = set(re.findall(r"(\w+)\[384,8960\]", " ".join(scattered)))
    assert kernels == {dtype}
    assert not re.findall(r"f32\[1536,8960\]\S* all-gather", update.text)


@pytest.fixture(scope="module")
def paged(
    pool: ThreadPoolExecutor, made: object, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiling]:
    """Programs of a rollout on one H200 whose cache is a pool, of half of what its slots could
    take."""
    run = config(
        tmp_path_factory.mktemp("paged"),
        mesh="actor=1,rollout=1,teacher=1",
        rollout={"slots": BATCH * GROUP, "cache_tokens": BATCH * GROUP * NEW // 2},
    )
    names = ("decode", "read again", "insert again")
    return {each.program.name: each for each in compiling(pool, run, "h200x4", *names)}


def test_a_cache_in_pages_is_neither_copied_nor_gathered(made, paged):
    """Each page is attended to where it is, written to in place, and by one CUDA graph."""
    text, args = paged["decode"].text, paged["decode"].program.args
    owners = args[8].owners.size
    assert local_bytes(args[3]) == pytest.approx(
        local_bytes(made["decode"].program.args[3]), rel=0.1
    )
    assert read(text).attention == "a Triton kernel"
    inside = {k: v for k, v in read(text).largest_gather.items() if k != "ENTRY"}
    assert max(inside.values(), default=0) <= 1e6, inside
    assert not re.findall(rf"= \w+\[{owners},[\d,]*\]\S* (?:copy|transpose)\(", text)
    graphs = paged["decode"].graphs
    assert graphs is not None and graphs.graphs == 1 and graphs.outside <= 10


@pytest.mark.parametrize("name", ["decode", "read again"])
def test_the_plan_of_a_cache_in_pages_is_what_the_compiler_takes(paged, name):
    program = paged[name].program
    planned = program.planned(paged[name].plan.accounts["rollout"])
    assert LEAST <= planned / program.held(paged[name].compiled) <= MOST


def test_pages_are_filled_again_in_place(paged):
    """Pool and prompts are donated, and no other array is as large as a tenth of them."""
    found, program = paged["insert again"].compiled.memory_analysis(), paged["insert again"].program
    caches = local_bytes((program.args[2], program.args[3]))
    assert found.alias_size_in_bytes == caches and found.temp_size_in_bytes < caches / 10


def test_the_update_holds_no_array_of_the_global_batch(made):
    """The teacher's hidden states of the whole batch on each device: 2.8 GB in the preset."""
    text = made["update"].text
    rows, width = BATCH * GROUP, TEACHER["hidden_size"]
    whole = re.compile(rf"\[(?:\d+,)?(?:{rows},{NEW}|{rows * NEW}),{width}\]")
    assert not whole.search(text)
    assert re.search(rf"\[{rows // 4},{NEW},{width}\]", text)  # a device's share is there


@pytest.mark.parametrize("name", ["update", "score", "prefill"])
def test_attention_is_cudnn_s_and_reads_no_dense_mask(made, name):
    """A mask [B, T, T] is traffic, and without `causal` half of the products are for nothing."""
    text = made[name].text
    assert read(text).attention == "cuDNN's flash attention"
    widths = {str(n) for n in (PROMPT, NEW, PROMPT + NEW)}
    square = [
        found
        for found in re.findall(r"(?:pred|bf16|f32|s32)\[([\d,]+)\]", text)
        if len(dims := found.split(",")) >= 2 and dims[-1] in widths and dims[-2] in widths
    ]
    assert not square, set(square)


def test_gradients_are_scattered_not_reduced_whole(made):
    found = read(made["update"].text).collectives
    assert found["reduce-scatter"].bytes > 100e6
    assert found["all-reduce"].bytes < 0.05 * found["reduce-scatter"].bytes


def test_the_state_is_updated_in_place(made):
    """Every byte of parameters and optimizer state is donated: no second copy."""
    update = made["update"]
    donated = update.compiled.memory_analysis().alias_size_in_bytes
    assert donated >= state_bytes(update.program)


def test_a_teacher_with_whole_copies_needs_no_collective(made):
    found = read(made["score"].text).collectives
    assert sum(each.bytes for each in found.values()) < 1e6, found


@pytest.mark.parametrize("name", ["update", "score", "prefill"])
def test_the_plan_of_a_program_is_what_the_compiler_takes(made, name):
    program = made[name].program
    planned = program.planned(made[name].plan.accounts[program.role])
    assert LEAST <= planned / program.held(made[name].compiled) <= MOST


QK_NORM = {"model_type": "qwen3", "head_dim": 128}
CASES = [*((n, remat, {}) for n, remat in UPDATES), (2, "none", QK_NORM)]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "remat", "model"), CASES)
def test_the_plan_of_an_update_is_what_the_compiler_takes(devices, remat, model, tmp_path):
    """At the sizes of the preset."""
    for plan, update in programs(distilled(tmp_path, devices, remat, model), "h200x8", "update"):
        planned = update.planned(plan.accounts["actor"])
        assert LEAST <= planned / update.held(update.compile()) <= MOST


REWARDED = {
    "algorithm": "gspo",
    "teacher": {"model": None},
    "reward": {"functions": ["exact"]},
    "policy": {"kl_coef": 0.1},
}
MIXTURE = QK_NORM | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
UNDER_ADAPTERS = {"lora": {"rank": 8}}
BY_REWARDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "adapters": ({}, UNDER_ADAPTERS, "full"),
    "adapters, no remat": (QK_NORM, UNDER_ADAPTERS, "none"),
    "nf4": ({}, UNDER_ADAPTERS | {"base_dtype": "nf4"}, "dots"),
    "untied": ({"tie_word_embeddings": False}, {}, "full"),
    "tied": ({}, {}, "dots"),
    "experts": (MIXTURE, {}, "full"),
}
"""Name -> changes of the model, the section `student`, `actor.remat`."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow][: name != "adapters"]) for name in BY_REWARDS],
)
def test_the_plan_of_an_update_by_rewards_is_what_the_compiler_takes(name, pool, tmp_path):
    """Beside it the score of a reference, which gathers its LM head after the layers."""
    model, student, remat = BY_REWARDS[name]
    run = config(
        tmp_path,
        {"num_hidden_layers": 28} | model,
        mesh="actor+rollout=4,reference=4",
        batch_size=48,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        student={"model": str(tmp_path / "student")} | student,
        actor={"micro_batch_tokens": 12288, "remat": remat},
        reference={"parallel": {"fsdp": 4}},
        **REWARDED,
    )
    ratios = {}
    for each in list(compiling(pool, run, "h200x8", "update", "score")):
        planned = each.program.planned(each.plan.accounts[each.program.role])
        ratios[each.program.role] = planned / each.program.held(each.compiled)
    assert ratios.keys() == {"actor", "reference"}
    assert all(LEAST <= ratio <= MOST for ratio in ratios.values()), ratios


DIVIDED = [("teacher", "score"), ("rollout", "prefill"), ("rollout", "decode")]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"tensor": 2, "fsdp": 2}], ids=str)
@pytest.mark.parametrize(("role", "name"), DIVIDED)
def test_the_plan_of_weights_divided_over_fsdp_is_what_the_compiler_takes(
    role, name, axes, tmp_path
):
    """Not stacked, as a teacher that samples has them too, and gathered layer after layer."""
    divided = {"parallel": axes}
    run = config(
        tmp_path,
        {"num_hidden_layers": 28},
        mesh="actor=1,rollout=4,teacher=4",
        batch_size=48,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        schedule="one_step_off",
        data={"train": "arithmetic", "eval": "arithmetic"},
        rollout={"slots": 192} | divided,
        teacher={"model": str(tmp_path / "teacher"), "num_microbatches": 8} | divided,
    )
    for plan, program in programs(run, "h200x16", name):
        if program.role == role:
            planned = program.planned(plan.accounts[role])
            assert LEAST <= planned / program.held(program.compile()) <= MOST


def test_the_layers_of_a_decode_step_are_one_cuda_graph(made):
    graphs = made["decode"].graphs
    assert graphs is not None
    assert graphs.graphs == 1
    assert graphs.inside > 10 * 2  # of two layers
    assert graphs.outside <= 10


def test_a_graph_holds_the_collectives_of_a_tensor_parallel_rollout(pool, tmp_path):
    run = config(
        tmp_path,
        mesh="actor+rollout+teacher=2",
        rollout={"parallel": {"tensor": 2}},
        batch_size=2 * BATCH,
    )
    (decode,) = compiling(pool, run, "h200x2", "decode")
    assert "all-reduce" in decode.text
    assert decode.graphs.graphs == 1 and decode.graphs.outside <= 10


def test_a_graph_holds_what_drops_improbable_tokens(pool, tmp_path):
    """The search for the smallest probability that is kept would be 248 launches a token."""
    run = config(
        tmp_path,
        mesh="actor+rollout+teacher=1",
        sampling={"top_p": 0.95, "top_k": 50},
        batch_size=2 * BATCH,
    )
    (decode,) = compiling(pool, run, "h200x1", "decode")
    assert decode.graphs.graphs == 1 and decode.graphs.outside <= 10


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 16384,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B, of two layers and fewer tokens."""
WIDE = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Qwen3-8B."""
SLOTS = 64


@pytest.fixture(scope="module")
def mixture(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Programs of GSPO whose experts are divided among eight H200, 16 on each."""
    run = config(
        tmp_path_factory.mktemp("mixture"),
        MIXTURE,
        mesh="actor+rollout=8",
        algorithm="gspo",
        batch_size=4 * BATCH,
        group_size=2 * GROUP,
        actor={"micro_batch_tokens": None, "remat": "full", "parallel": {"expert": 8}},
        rollout={"slots": SLOTS, "parallel": {"expert": 8}},
        policy={"router_replay": True},
        teacher={"model": None},
        reward={"functions": ["exact"]},
    )
    made = compiling(pool, run, "h200x8", "update", "decode")
    return {each.program.name: each for each in made}


def test_tokens_travel_to_their_experts_and_back(mixture):
    """In each of two layers three times to them (forward, again for the backward pass, and the
    gradients of what they return) and twice back. No gradient of an expert travels, of which the
    layers have 4.8 GB in float32; those of the other weights do, and the choices of the routers."""
    found = read(mixture["update"].text)
    tokens = 8 * (PROMPT + 2 * GROUP * NEW)  # of four minibatches each, a group on each device
    moved = tokens * MIXTURE["hidden_size"] * 2
    assert max(found.largest_gather.values()) == moved
    assert 6 <= found.collectives["all-gather"].bytes / moved < 6.1
    assert 4 <= found.collectives["reduce-scatter"].bytes / moved < 4.1
    attention = 2048 * (2 * 32 + 2 * 4) * 128 + 2048 * 128
    others = 2 * 2 * attention + 4 * 2 * 16384 * 2048  # embedding and head in float32
    assert found.collectives["all-reduce"].bytes == pytest.approx(others, rel=0.05)
    assert not re.search(r"\[128,(2048,768|768,2048)\]", mixture["update"].text)


def test_a_decode_step_moves_its_tokens_not_the_experts(mixture):
    found = read(mixture["decode"].text).collectives
    moved = 2 * SLOTS * MIXTURE["hidden_size"] * 2  # of both layers
    steps = mixture["decode"].plan.config.rollout.launch_tokens
    print(steps, {kind: each.bytes / moved for kind, each in found.items()})
    assert found["reduce-scatter"].bytes <= moved * steps
    assert sum(each.bytes for each in found.values()) < 3 * moved * steps


@pytest.mark.parametrize("name", ["update", "decode"])
def test_the_plan_of_divided_experts_is_what_the_compiler_takes(mixture, name):
    program = mixture[name].program
    planned = program.planned(mixture[name].plan.accounts[program.role])
    assert LEAST <= planned / program.held(mixture[name].compiled) <= MOST


ADAPTED = {
    "LoRA, 80 GB": ({"num_hidden_layers": 4} | WIDE, "bfloat16", "h100x1"),
    "QLoRA, 24 GB": ({"num_hidden_layers": 4} | WIDE, "nf4", "l4x1"),
    "QLoRA of experts": (MIXTURE, "nf4", "h100x1"),
}


@pytest.mark.parametrize("case", and_slow(["QLoRA of experts"], ["LoRA, 80 GB", "QLoRA, 24 GB"]))
def test_the_plan_of_adapters_is_what_the_compiler_takes(case, tmp_path):
    """Of Qwen3-8B's widths and of Qwen3-30B-A3B's: weights under adapters have no gradients, and
    in 4 bits no copy of all layers."""
    model, held, target = ADAPTED[case]
    run = config(
        tmp_path,
        model,
        mesh="actor+rollout=1",
        algorithm="gspo",
        student={
            "model": str(tmp_path / "student"),
            "lora": {"rank": 16},
            "base_dtype": held,
        },
        actor={"micro_batch_tokens": PROMPT + GROUP * NEW, "remat": "full"},
        rollout={"slots": 16},
        teacher={"model": None},
        reward={"functions": ["exact"]},
    )
    for plan, update in programs(run, target, "update"):
        planned, found = update.planned(plan.accounts["actor"]), update.held(update.compile())
        print(planned / found)
        assert LEAST <= planned / found <= MOST


SAMPLING = ["new cache", "fewer slots", "prefill", "insert", "decode"]
SAMPLED = [("rollout", name) for name in (*SAMPLING, "decode for evaluations")]
COMPILED: dict[str, tuple[str, ...]] = {"quickstart": ("update", "score"), "gspo": ()}
"""Notebook -> names of programs, all where there are none: both sample with the same ones."""
NOTEBOOKS = {
    "quickstart": [("actor", "update"), ("teacher", "score")],
    "gspo": [
        *(("actor", name) for name in ("optimizer state", "update", "log-probs before", "convert")),
        *SAMPLED,
    ],
}
"""Notebook -> role and name of its run's programs."""


def test_a_decode_step_concatenates_no_weights_without_triton(pool, tmp_path):
    """XLA would join the kernels of q, k and v, and of gate and up, once a token."""
    run = config(tmp_path, mesh="actor+rollout+teacher=1", batch_size=2 * BATCH)
    (decode,) = compiling(pool, run, "t4x1", "decode")
    joined = re.findall(r"= \w+\[([\d,]+)\]\S* concatenate\(", decode.text)
    width = STUDENT["hidden_size"] * STUDENT["intermediate_size"]
    assert all(math.prod(map(int, shape.split(","))) < width for shape in joined)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_t4_compiles_the_notebook_s_programs(on_a_t4, name):
    """In the dtype that it has products for."""
    for each in on_a_t4[name]:
        assert each.plan.config.actor.compute_dtype == "float32"
        assert read(each.text).attention is None
    made = [(each.program.role, each.program.name) for each in on_a_t4[name]]
    assert sorted(made) == sorted(NOTEBOOKS[name])
