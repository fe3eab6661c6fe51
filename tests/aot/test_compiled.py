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
from decode_step import passes, step
from divergence import compiled as compiled_loss

from jaxrl.aot.hlo import computations, read_program
from jaxrl.plan.peaks import planned_bytes
from jaxrl.roles.declared import local_bytes

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
    return {
        name: list(compiling(pool, notebook_run(name), "t4x1", *names))
        for name, names in COMPILED.items()
    }


@pytest.mark.usefixtures("on_a_t4")
def test_nothing_above_a_megabyte_is_gathered_in_the_body_of_a_decode_step(made):
    """The logits of all slots would be 58 MB at every token."""
    inside = {
        k: v for k, v in read_program(made["decode"].text).largest_gather.items() if k != "ENTRY"
    }
    assert max(inside.values(), default=0) <= 1e6, inside


def test_a_decode_step_reads_each_slot_s_own_keys(made):
    """In the kernel that stops at a slot's length, and without a copy of the cache for it."""
    text = made["decode"].text
    assert read_program(text).attention == "a Triton kernel"
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", text)
    assert not [shape for shape in copied if shape.count(",") == 3]


def test_the_plan_counts_prompts_that_slots_share_once(made):
    program = made["decode"].program
    entries = made["decode"].plan.accounts["rollout"].entries
    found = {entry.name: entry.bytes for entry in entries if entry.phase == "decode"}
    cache, (rows, seats) = program.args[3], program.args[7]
    assert found["keys and values"] == local_bytes((cache, rows))
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
    assert read_program(text).attention == "a Triton kernel"
    inside = {k: v for k, v in read_program(text).largest_gather.items() if k != "ENTRY"}
    assert max(inside.values(), default=0) <= 1e6, inside
    assert not re.findall(rf"= \w+\[{owners},[\d,]*\]\S* (?:copy|transpose)\(", text)
    graphs = paged["decode"].graphs
    assert graphs is not None and graphs.graphs == 1 and graphs.outside <= 10


@pytest.mark.parametrize("name", ["decode", "read again"])
def test_the_plan_of_a_cache_in_pages_is_what_the_compiler_takes(paged, name):
    program = paged[name].program
    planned = paged[name].planned
    assert LEAST <= planned / program.held(paged[name].compiled) <= MOST


def test_pages_are_filled_again_in_place(paged):
    """Pool and prompts are donated, and no other array is as large as a tenth of them."""
    found, program = paged["insert again"].compiled.memory_analysis(), paged["insert again"].program
    caches = local_bytes((program.args[2], program.args[3]))
    assert found.alias_size_in_bytes == caches and found.temp_size_in_bytes < caches / 10


def test_each_data_shard_prefills_its_own_prompts(made):
    """Of two: it computes and keeps the keys and values of half of them, and gets no others."""
    prefill = made["prefill"]
    tokens = prefill.program.args[3].size
    kept = 2 * 2 * tokens // 2 * STUDENT["num_key_value_heads"] * 128 * 2  # of two layers
    assert read_program(prefill.text).collectives == {}
    assert kept <= prefill.compiled.memory_analysis().output_size_in_bytes < 1.01 * kept


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
    assert read_program(text).attention == "cuDNN's flash attention"
    widths = {str(n) for n in (PROMPT, NEW, PROMPT + NEW)}
    square = [
        found
        for found in re.findall(r"(?:pred|bf16|f32|s32)\[([\d,]+)\]", text)
        if len(dims := found.split(",")) >= 2 and dims[-1] in widths and dims[-2] in widths
    ]
    assert not square, set(square)


def test_the_head_is_read_once_for_2048_tokens_of_a_loss(made):
    """The largest chunk, for which an H200 has room: in chunks of 512 it is read four times."""
    logits = re.findall(rf"f32\[(\d+),{STUDENT['vocab_size']}\]", made["update"].text)
    assert max(map(int, logits)) == 2048


def test_a_divergence_writes_out_its_logits_and_their_gradient_alone(made):
    """What the gradient shares with the values is computed twice: written out, it is read twice
    more, 4 more passes over arrays of this size."""
    chunk = (2048, STUDENT["vocab_size"])
    assert [shape for _, shape in written_in_loops(made["update"].text)].count(chunk) == 3
    assert sum(passes(made["update"].text, *chunk)) <= 9.5


@pytest.mark.parametrize(
    ("name", "most"),
    [("divergence, fused", 9.5), ("log-probs", 2), ("log-probs and entropies", 3)],
)
def test_logits_are_read_once_for_their_largest_and_their_sum(name, most):
    """By a loss, and by scores; twice, a divergence makes 11.5 passes over them, and log-probs 3.
    Their number depends neither on the chunk nor on the vocabulary."""
    shape = 512, 4096
    text = compiled_loss("h100x1", name, shape[0], (192, 320), shape[1])
    assert most - 0.01 < sum(passes(text, *shape)) < most + 0.01


def test_gradients_are_scattered_not_reduced_whole(made):
    found = read_program(made["update"].text).collectives
    assert found["reduce-scatter"].bytes > 100e6
    assert found["all-reduce"].bytes < 0.05 * found["reduce-scatter"].bytes
    hidden = {kind: each.overlapped / each.bytes for kind, each in found.items()}
    assert hidden["all-gather"] > 0.6 and hidden["reduce-scatter"] > 0.35


def test_the_state_is_updated_in_place(made):
    """Every byte of parameters and optimizer state is donated: no second copy."""
    update = made["update"]
    donated = update.compiled.memory_analysis().alias_size_in_bytes
    assert donated >= state_bytes(update.program)


def test_a_teacher_with_whole_copies_needs_no_collective(made):
    found = read_program(made["score"].text).collectives
    assert sum(each.bytes for each in found.values()) < 1e6, found


@pytest.mark.parametrize("name", ["update", "score", "prefill"])
def test_the_plan_of_a_program_is_what_the_compiler_takes(made, name):
    program = made[name].program
    planned = made[name].planned
    assert LEAST <= planned / program.held(made[name].compiled) <= MOST


QK_NORM = {"model_type": "qwen3", "head_dim": 128}
CASES = [*((n, remat, {}) for n, remat in UPDATES), (2, "none", QK_NORM)]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "remat", "model"), CASES)
def test_the_plan_of_an_update_is_what_the_compiler_takes(devices, remat, model, tmp_path):
    """At the sizes of the preset."""
    for plan, update in programs(distilled(tmp_path, devices, remat, model), "h200x8", "update"):
        planned = planned_bytes(update, plan.inputs.target)
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
        planned = each.planned
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
    """Not stacked, as a teacher that samples has them too, and gathered layer after layer. An
    evaluation, for which the plan counts more prompts than training's programs have beside them,
    is only the teacher's."""
    divided = {"parallel": axes}
    held_out = {"eval": "arithmetic"} if role == "teacher" else {}
    run = config(
        tmp_path,
        {"num_hidden_layers": 28},
        mesh="actor=1,rollout=4,teacher=4",
        batch_size=48,
        max_prompt_tokens=1024,
        max_new_tokens=2048,
        schedule="one_step_off",
        data={"train": "arithmetic"} | held_out,
        rollout={"slots": 192} | divided,
        teacher={"model": str(tmp_path / "teacher"), "num_microbatches": 8} | divided,
    )
    for plan, program in programs(run, "h200x16", name):
        if program.role == role:
            planned = planned_bytes(program, plan.inputs.target)
            assert LEAST <= planned / program.held(program.compile()) <= MOST


def test_the_layers_of_a_decode_step_are_one_cuda_graph(made):
    graphs = made["decode"].graphs
    assert graphs is not None
    assert graphs.graphs == 1
    assert 2 * 10 < graphs.inside <= 2 * 21 + 25  # of two layers, and around them
    assert graphs.outside <= 10


ONE_GPU = {"mesh": "actor+rollout+teacher=1"}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("t4x1", ONE_GPU),
    "top-p": ("h100x1", ONE_GPU | {"sampling": {"top_p": 0.95, "top_k": 50}}),
    "greedy": ("h100x1", ONE_GPU | {"sampling": {"temperature": 0.0}, "group_size": 1}),
    "tensor": (
        "h100x2",
        {"mesh": "actor+rollout+teacher=2", "rollout": {"parallel": {"tensor": 2}}},
    ),
}
"""Decode step -> its machine, and what its run asks for."""


@pytest.fixture(scope="module")
def steps(
    pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Compiling]:
    found = {}
    for name, (target, keys) in STEPS.items():
        run = config(tmp_path_factory.mktemp("steps"), batch_size=2 * BATCH, **keys)
        (found[name],) = compiling(pool, run, target, "decode")
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_decode_step_is_one_cuda_graph(name, steps):
    """With the collectives of `tensor`, which XLA leaves out by default, and with the search for
    the smallest probability that is kept, which would be 248 launches a token."""
    graphs = steps[name].graphs
    assert graphs is not None and graphs.graphs == 1 and graphs.outside <= 10
    assert ("all-reduce" in steps[name].text) == (name == "tensor")


@pytest.mark.parametrize("name", STEPS)
def test_a_decode_step_makes_no_array_of_a_weight_s_size(name, steps):
    """It reads weights where they are. Without Triton XLA would join the kernels of q, k and v, and
    of gate and up, once a token, which is a third of what a T4 reads."""
    made = written_in_loops(steps[name].text)
    assert made
    assert not [(kind, shape) for kind, shape in made if min(shape) >= 256 and len(shape) == 2]


def test_a_decode_step_moves_little_beside_weights_and_keys(steps):
    """On a T4, of two layers beside which the logits are large."""
    args = steps["plain"].program.args
    params, cache, (prompts, _) = args[2], args[3], args[7]
    _, moved = step(steps["plain"].text)
    assert 1 < moved / local_bytes((params, cache, prompts)) < 1.25


@pytest.mark.parametrize(("name", "reads"), [("plain", 1), ("top-p", 3), ("greedy", 1)])
def test_the_logits_are_written_once_and_read_in_few_passes(name, reads, steps):
    """For the largest and the sum of each block of ids: all that a draw and its log-probs need.
    Top-k and top-p need sums of what is left; what they read of candidates is little. No weights
    are stored."""
    slots = steps[name].program.args[4].shape[0]
    read, wrote = passes(steps[name].text, slots, STUDENT["vocab_size"])
    assert reads <= read < reads + 0.15 and wrote == 1


def written_in_loops(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns kind and shape of each array that an instruction in a loop's body writes."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found = []
    for name, lines in computations(text).items():
        for line in lines if name in bodies else ():
            if line.kind not in ("parameter", "get-tuple-element", "bitcast", "tuple", "while"):
                shapes = re.findall(r"\w+\[([\d,]+)\]", line.result)
                found += [(line.kind, tuple(map(int, shape.split(",")))) for shape in shapes]
    return found


@pytest.fixture(scope="module")
def across_hosts(pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory) -> Compiling:
    """The update of an actor whose weights are divided in each of two hosts."""
    run = config(
        tmp_path_factory.mktemp("hosts"),
        mesh="actor+rollout=16",
        algorithm="gspo",
        batch_size=2 * BATCH,
        actor={
            "micro_batch_tokens": PROMPT + GROUP * NEW,
            "remat": "full",
            "parallel": {"data": 2, "fsdp": 8},
        },
        teacher={"model": None},
        reward={"functions": ["exact"]},
    )
    (update,) = compiling(pool, run, "h100x16", "update")
    return update


def test_the_embedding_s_gradient_crosses_hosts_in_shares(across_hosts):
    """Scattered in a host first: the whole table in float32 is 933 MB."""
    table = STUDENT["vocab_size"] * STUDENT["hidden_size"]
    found = read_program(across_hosts.text).collectives
    assert found["reduce-scatter"].bytes >= 4 * table
    sums = [math.prod(shape) for kind, shape in reduced(across_hosts.text) if kind == "f32"]
    assert table // 8 <= max(sums) < table // 4


def test_weights_are_gathered_and_gradients_scattered_within_a_host(across_hosts):
    """Between the two hosts go sums of what the devices of each have scattered."""
    groups = r"(all-gather|reduce-scatter|all-reduce)(?:-start)?\(.*?mesh\[(.*?)\] \{(.*?)\}"
    found = re.findall(groups, across_hosts.text)
    assert {kind for kind, _, _ in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    between = {k for k, mesh, over in found if any(f"{x}=2" in mesh for x in over.split(","))}
    assert between == {"all-reduce"}


@pytest.mark.parametrize("programs", ["made", "across_hosts"])
def test_the_gradients_of_norms_and_biases_are_summed_in_float32(programs, request):
    """Over the tokens of a device, and over devices, where only kernels are summed in bfloat16. In
    bfloat16 norms and biases had 2 to 3% of noise."""
    made = request.getfixturevalue(programs)
    text = (made if programs == "across_hosts" else made["update"]).text
    d, f = STUDENT["hidden_size"], STUDENT["intermediate_size"]
    kernels = 2 * d * d + 2 * d * 256 + 3 * d * f  # of a layer
    sizes = {math.prod(shape) for kind, shape in reduced(text) if kind == "bf16"}
    assert sizes == ({kernels // 8} if programs == "across_hosts" else set())
    assert summed_over_tokens(text, {d, 256}) == {"f32"}


def summed_over_tokens(text: str, widths: set[int]) -> set[str]:
    """Returns the dtypes of sums [n, width] -> [width] of many rows."""
    found = set()
    for lines in computations(text).values():
        shapes = {line.name: re.findall(r"\[([\d,]*)\]", line.result) for line in lines}
        for line in lines:
            vector = re.match(r"(\w+)\[(\d+)\]", line.result)
            if line.kind == "reduce" and vector is not None and int(vector[2]) in widths:
                summed = re.match(r"%?([\w.\-]+)", line.rest)
                dims = shapes[summed[1]][0] if summed is not None else ""
                if math.prod(map(int, dims.split(","))) >= 64 * int(vector[2]):
                    found.add(vector[1])
    return found


def reduced(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array that an all-reduce sums."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", " ".join(results))
    return [(kind, tuple(int(n) for n in shape.split(",") if n)) for kind, shape in arrays]


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
    found = read_program(mixture["update"].text)
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
    found = read_program(mixture["decode"].text).collectives
    moved = 2 * SLOTS * MIXTURE["hidden_size"] * 2  # of both layers
    steps = mixture["decode"].plan.config.rollout.launch_tokens
    print(steps, {kind: each.bytes / moved for kind, each in found.items()})
    assert found["reduce-scatter"].bytes <= moved * steps
    assert sum(each.bytes for each in found.values()) < 3 * moved * steps


@pytest.mark.parametrize("name", ["update", "decode"])
def test_the_plan_of_divided_experts_is_what_the_compiler_takes(mixture, name):
    program = mixture[name].program
    planned = mixture[name].planned
    assert LEAST <= planned / program.held(mixture[name].compiled) <= MOST


def test_a_decode_step_above_the_ridge_computes_the_chosen_experts(pool, tmp_path):
    """In one CUDA graph: of 1,024 tokens that pass 8 of 128 experts, at most a third of the rows
    that every expert would have, and in no more memory than the plan says."""
    rows, wide = 1024, MIXTURE["moe_intermediate_size"]
    run = config(
        tmp_path,
        MIXTURE | {"num_hidden_layers": 1},
        mesh="actor+rollout=1",
        algorithm="gspo",
        batch_size=rows // 16,
        group_size=16,
        max_prompt_tokens=128,
        max_new_tokens=128,
        teacher={"model": None},
        reward={"functions": ["exact"]},
    )
    (decode,) = compiling(pool, run, "h100x1", "decode")
    shapes = {shape for _, shape in written_in_loops(decode.text) if shape[-1] == wide}
    assert (128, rows, wide) not in shapes
    blocks = {shape for shape in shapes if len(shape) == 3 and shape[1] < wide}  # [M, n, wide]
    assert max(blocks)[0] == 128
    assert sum(math.prod(shape[:2]) for shape in blocks) <= 128 * rows / 3
    assert decode.graphs.graphs == 1 and decode.graphs.outside <= 10
    planned = decode.planned
    assert LEAST <= planned / decode.program.held(decode.compiled) <= MOST


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
        planned, found = planned_bytes(update, plan.inputs.target), update.held(update.compile())
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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_t4_compiles_the_notebook_s_programs(on_a_t4, name):
    """In the dtype that it has products for."""
    for each in on_a_t4[name]:
        assert each.plan.config.actor.compute_dtype == "float32"
        assert read_program(each.text).attention is None
    made = [(each.program.role, each.program.name) for each in on_a_t4[name]]
    assert sorted(made) == sorted(NOTEBOOKS[name])
