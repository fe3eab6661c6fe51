"""Predicted seconds of the stages on a machine, and the search over placements and keys.

No compiler is needed: devices are described by what the plan asks of them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import and_slow
from sleeping_run import sleeping_run

from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.aot.compile_report import Checked, traffic
from jaxrl.aot.hlo import Collective
from jaxrl.aot.suggest import (
    LINKS,
    Search,
    Traffic,
    candidate_lines,
    exchanged,
    sent_bytes,
    stage_costs,
)
from jaxrl.checkpoint.model_source import lora_of
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import target_of
from jaxrl.plan import transfer_notes
from jaxrl.plan.advice import with_axes, with_choices
from jaxrl.plan.plan_inputs import STORE, PlanInputs, Setting
from jaxrl.plan.search import Candidate
from jaxrl.profile.waits import RunSetup, StepTimes, measure_steps, speedup
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.placement import place
from jaxrl.sharding.targets import GPUS, TargetMachine, ceilings_of

STUDENT = DecoderConfig("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, max_positions=32768)
TEACHER = DecoderConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, max_positions=32768)
ROLES = ("actor", "rollout", "teacher")
LIMIT = 130_000_000_000


def machine(n: int, hosts: int = 1, link: float = 450e9) -> TargetMachine:
    chip = replace(GPUS["h200"], link_gbs=link / 1e9)
    return TargetMachine(f"h200x{n}", chip, (n,), hosts)


def run_of(
    mesh: str, limit: int | None = LIMIT, layers: int = 28, **keys
) -> tuple[Config, PlanInputs]:
    raw = {
        "mesh": mesh,
        "batch_size": 48,
        "group_size": 4,
        "max_prompt_tokens": 1024,
        "max_new_tokens": 2048,
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"train": "arithmetic"},
        "schedule": "one_step_off",
        "actor": {"micro_batch_tokens": 12288, "remat": "full"},
        "rollout": {"slots": 96},
    } | keys
    config = Config.parse(raw).with_dtypes("bfloat16")
    placement = place(mesh, ROLES)
    limits = (limit,) * len(placement.pools)
    target = target_of(machine(1).devices)
    student = replace(STUDENT, lora=lora_of(config), n_layers=layers)
    teacher = replace(TEACHER, n_layers=layers)
    return config, PlanInputs(placement, ROLES, student, teacher, target, limits=limits)


def search(
    mesh: str, limit: int | None = LIMIT, hosts: int = 1, compiled=None, layers: int = 2, **keys
) -> Search:
    """Of models of two layers, whose programs are traced in less time; without a limit none is."""
    config, inputs = run_of(mesh, limit, layers, **keys)
    plan = SimpleNamespace(config=config, inputs=inputs)
    return Search(plan, machine(inputs.placement.n_devices, hosts), compiled or {})


def costs(mesh: str, link: float = 450e9, **keys) -> dict:
    config, inputs = run_of(mesh, **keys)
    ceilings = ceilings_of(machine(1).devices[0], "bfloat16")
    return stage_costs(Setting(config, inputs), ceilings, machine(8, link=link))


def test_a_stage_never_takes_less_than_its_products_at_the_data_sheet():
    """Teacher: 2 FLOPs for each of its 6.5 G block weights and 590k tokens, on 4 x 989 TFLOP/s."""
    floor = 2 * 6.5e9 * 48 * (1024 + 4 * 2048) / (4 * 989e12)
    assert floor < costs("actor=2,rollout=2,teacher=4")["teacher", "score"] < 6 * floor


@pytest.mark.parametrize("role", ROLES)
def test_more_devices_never_make_a_stage_slower(role):
    stage = {"actor": "update", "rollout": "generate", "teacher": "score"}[role]
    sizes = dict.fromkeys(ROLES, 1)
    times = []
    for n in (1, 2, 4):
        mesh = ",".join(f"{name}={n if name == role else sizes[name]}" for name in ROLES)
        parallel = {"parallel": {"fsdp" if role == "actor" else "data": n}}
        keys = {"actor": {"micro_batch_tokens": 12288}, "rollout": {"slots": 96}, "teacher": {}}
        keys["teacher"] = {"model": "teacher"}
        keys[role] = keys[role] | parallel
        times.append(costs(mesh, **keys)[role, stage])
    assert times[0] > times[1] > times[2]


def test_a_slow_link_costs_what_tensor_sends():
    tensor = {"teacher": {"model": "teacher", "parallel": {"tensor": 4}}}
    copies = {"teacher": {"model": "teacher", "parallel": {"data": 4}}}
    mesh, stage = "actor=2,rollout=2,teacher=4", ("teacher", "score")
    assert costs(mesh, 50e9, **tensor)[stage] > 2 * costs(mesh, 450e9, **tensor)[stage]
    assert costs(mesh, 50e9, **copies)[stage] == costs(mesh, 450e9, **copies)[stage]


def test_a_prompt_that_samples_share_is_read_once():
    """16 samples of each of 2 prompts, and 32 prompts with one: as many slots and tokens. Fewer
    prompts are prefilled too, which the cost of the prompts alone does not explain."""
    mesh, sizes = "actor=2,rollout=2,teacher=4", {"max_new_tokens": 2048, "rollout": {"slots": 32}}
    shared = costs(mesh, batch_size=2, group_size=16, **sizes)["rollout", "generate"]
    alone = costs(mesh, batch_size=32, group_size=1, **sizes)["rollout", "generate"]
    once = costs(mesh, batch_size=32, group_size=1, **sizes | {"max_new_tokens": 1})
    assert shared < alone - once["rollout", "generate"]


def test_context_sends_the_heads_of_a_device_s_tokens():
    """Compiled for four H200, an update of four rows of 32k tokens with remat=dots exchanges 16.9
    GB, of which three quarters leave the device."""
    sizes = []
    for n_kv_heads in (STUDENT.n_kv_heads, 4):  # gathered whole; exchanged as the queries are
        config, inputs = run_of("actor=4,rollout=2,teacher=2", actor={"parallel": {"context": 4}})
        model = replace(STUDENT, n_kv_heads=n_kv_heads)
        setting = Setting(config, inputs)
        assert setting.axes["actor"].context == 4
        _, moved = exchanged(setting, "actor", model, 8192)
        sizes.append(moved)
    layers = STUDENT.n_layers * 8192 * 128 * 2
    queries, kv = layers * 2 * 12 * 3 / 4, layers * 2 * 3
    assert sizes == pytest.approx([queries + 2 * kv, queries + 4 * kv / 4])
    assert 4 * 3 * queries == pytest.approx(16.9e9 * 3 / 4, rel=0.01)


def test_context_is_tried_for_long_sequences_only():
    for new, tried in ((31744, True), (2048, False)):
        config, inputs = run_of("actor=4,rollout=4,teacher=4", max_new_tokens=new)
        for role, expected in (("actor", tried), ("teacher", tried), ("rollout", False)):
            found = list(inputs.possible_axes(config, role))
            assert any(axes.context > 1 for axes in found) == expected
            for axes in found:
                sizes = {axis: n for axis, n in axes._asdict().items() if n > 1}
                inputs.axes(with_axes(config, role, **sizes))  # refuses what cannot be


def test_one_device_has_no_collectives():
    """But for the weights, which are sent to the rollout."""
    slow, fast = (costs("actor=1,rollout=1,teacher=1", link) for link in (1e6, 1e15))
    assert slow.pop(("actor", "publish")) > fast.pop(("actor", "publish"))
    assert slow == fast


@pytest.mark.parametrize("signal", ["hidden", "topk", "sampled"])
def test_what_crosses_hosts_takes_its_seconds_and_the_plan_says_them(signal):
    """7B teaches 1.5B on two hosts: weights and the signal go through the object store, between
    roles of one pool nothing does."""
    distill = {"signal": signal, "jsd_beta": 1.0 if signal == "sampled" else 0.5}
    token = {"hidden": 3584 * 2, "topk": 8 * 64 + 4, "sampled": 4}[signal]
    seconds = {
        "teacher": 48 * 4 * 2048 * token / STORE,
        "actor": STUDENT.n_params * 2 / STORE,
    }
    stages = {"teacher": ("teacher", "score"), "actor": ("actor", "publish")}
    ceilings, target = ceilings_of(machine(1).devices[0], "bfloat16"), machine(16, hosts=2)
    for mesh, apart in (
        ("actor=8,rollout=4,teacher=4", {"teacher", "actor"}),
        ("actor+rollout=8,teacher=8", {"teacher"}),
        ("actor+rollout+teacher=16", set()),
    ):
        config, inputs = run_of(mesh, distill=distill)
        two = replace(inputs, host_of=(0,) * 8 + (1,) * 8)
        settings = [Setting(config, each) for each in (inputs, two)]
        one, both = (stage_costs(setting, ceilings, target) for setting in settings)
        none, notes = (list(transfer_notes(setting)) for setting in settings)
        assert len(notes) == len(apart) and not none
        for sender, stage in stages.items():
            expected = seconds[sender] if sender in apart else 0.0
            # From device to device the weights take a fiftieth of that at most.
            assert both[stage] - one[stage] == pytest.approx(expected, rel=0.02, abs=1e-9)
            assert not expected or any(f"about {expected:.1f} s" in note for note in notes)


def test_the_compiled_programs_say_what_collectives_send():
    """Twice the counted bytes take twice the time of what is waited for."""
    tensor = {"teacher": {"model": "teacher", "parallel": {"tensor": 4}}}
    mesh, stage = "actor=2,rollout=2,teacher=4", ("teacher", "score")
    config, inputs = run_of(mesh, **tensor)
    counted = sent_bytes(Setting(config, inputs), "teacher").total
    as_counted, twice = (
        search(mesh, None, compiled={"teacher": Traffic(float(n))}, layers=28, **tensor)
        for n in (1, 2)
    )
    waited = counted / (450e9 * LINKS)
    more = twice.now.stages[stage] - as_counted.now.stages[stage]
    assert more == pytest.approx(waited)


@pytest.mark.parametrize("reduced", [None, "float32"])
def test_what_the_compiled_update_does_not_hide_takes_time(reduced):
    """Twelve scattered gradients of 1.3 G block weights, in the compute dtype or in float32, half
    of each to the other device."""
    mesh, stage = "actor=2,rollout=2,teacher=4", ("actor", "update")
    actor = {"micro_batch_tokens": 12288, "remat": "full", "reduce_dtype": reduced}
    shares = [{"all-gather": 1.0, "reduce-scatter": share} for share in (1.0, 0.25)]
    compiled = [{"actor": Traffic(1.0, each)} for each in shares]
    hidden, seen = (search(mesh, None, compiled=each, layers=28, actor=actor) for each in compiled)
    config, inputs = run_of(mesh, actor=actor)
    count, _ = Setting(config, inputs).micro_batches()
    dtype = reduced or "bfloat16"
    size = {"bfloat16": 2, "float32": 4}[dtype]
    weights = STUDENT.n_params - 151936 * 1536 * (1 if STUDENT.tie_embeddings else 2) - 1536
    waited = 0.75 * count * weights * size / 2 / (450e9 * LINKS)
    more = seen.now.stages[stage] - hidden.now.stages[stage]
    assert waited > 0.1 * size / 4 and more == pytest.approx(waited)


def test_the_shares_are_those_of_the_compiled_programs():
    """Of two programs by their bytes, as often as a step calls them; of all kinds the bytes that
    leave a device."""
    config, inputs = run_of("actor=2,rollout=2,teacher=4")
    setting = Setting(config, inputs)
    plan = SimpleNamespace(setting=setting)

    def program(calls: int, kind: str, size: int, overlapped: int) -> Checked:
        sent = {kind: Collective(1, size, overlapped)}
        return Checked("actor", "update", 2, None, calls, compiled_bytes=1, collectives=sent)

    gathered, scattered = "all-gather", "reduce-scatter"
    programs = (program(1, gathered, 100, 50), program(3, gathered, 100, 90))
    programs += (program(1, scattered, 40, 10),)
    found = traffic(SimpleNamespace(plan=plan, programs=programs))["actor"]
    assert found.hidden == pytest.approx({gathered: 0.8, scattered: 0.25})
    assert found.scale == pytest.approx((400 + 40) / 2 / sent_bytes(setting, "actor").total)


def test_the_best_fits_is_faster_and_says_what_to_change():
    tried = search("actor=2,rollout=1,teacher=1")
    found = tried.best()
    assert found and all(each.fits for each in found)
    assert found[0].step < tried.now.step
    again = search(found[0].inputs.placement.spec)
    assert replace(again.now, config=found[0].config).step == found[0].step
    lines = candidate_lines(tried.now, found)
    assert "assumed" in lines[1] and "mesh=" in "".join(lines)


def test_adapters_are_merged_where_the_search_finds_room():
    """Kernels beside the weights make each decode step longer."""
    lora = {"student": {"model": "student", "lora": {"rank": 16}}}
    mesh = "actor=1,rollout=1,teacher=2"
    (beside, merged) = (
        costs(mesh, **lora, rollout={"slots": 96, "merge": merge})["rollout", "generate"]
        for merge in (False, True)
    )
    plain = costs(mesh)["rollout", "generate"]
    assert merged == pytest.approx(plain) and beside > 1.1 * plain
    assert "rollout.merge=true" in search(mesh, **lora).best()[0].words


def test_the_run_as_configured_is_judged_with_the_axes_of_its_plan():
    """Where the config is silent the plan gives the teacher whole copies; `fsdp`, which it would
    have without a plan, gathers every layer."""
    tried = search("actor=2,rollout=2,teacher=4")
    chosen, _ = with_choices(tried.config, tried.inputs)
    assert chosen.teacher.parallel.data == 4 and tried.config.teacher.parallel.data is None
    again = replace(tried.now, config=chosen)
    assert (tried.now.peaks, tried.now.stages) == (again.peaks, again.stages)


def test_axes_that_the_plan_would_choose_are_not_named():
    (found,) = search("actor+rollout+teacher=1").best()
    assert not [key for key, _ in found.changes if "parallel" in key]


def test_a_pool_is_not_split_between_hosts_without_need():
    tried = search("actor=4,rollout=4,teacher=8", hosts=2)
    tried._move("actor=2,rollout=6,teacher=8")
    with pytest.raises(UserError, match="one host can hold"):
        tried._move("actor=6,rollout=4,teacher=6")


def test_a_copy_of_the_weights_in_each_host_is_tried_and_is_faster():
    """Gathers and scatters then stay on the links inside a host; gradients of one sixteenth of the
    weights cross, not of all."""
    config, inputs = run_of("actor+rollout+teacher=16")
    inputs = replace(inputs, host_of=(0,) * 8 + (1,) * 8)
    tried = list(inputs.possible_axes(config, "actor"))
    assert Axes(data=2, fsdp=8) in tried and Axes(fsdp=16) in tried
    ceilings = ceilings_of(machine(1).devices[0], "bfloat16")

    def update(axes: dict[str, int], host_size: int) -> float:
        chosen = with_axes(config, "actor", **axes)
        target = machine(16, hosts=16 // host_size)
        return stage_costs(Setting(chosen, inputs), ceilings, target)["actor", "update"]

    assert update({"data": 2, "fsdp": 8}, 8) < 0.95 * update({"fsdp": 16}, 8)
    assert update({"data": 2, "fsdp": 8}, 16) == pytest.approx(update({"fsdp": 16}, 16), rel=0.1)


def test_only_batches_that_the_rollout_samples_take_its_time():
    stage, mesh = ("rollout", "generate"), "actor=2,rollout=2,teacher=4"
    always = costs(mesh)[stage]
    half = costs(mesh, distill={"on_policy_fraction": 0.5, "seq_kd": True})
    assert half[stage] == pytest.approx(always / 2)
    never = costs(mesh, distill={"on_policy_fraction": 0.0, "seq_kd": True})
    assert never[stage] == 0 and ("actor", "publish") not in never


def test_the_pass_that_chooses_the_tokens_of_student_topk_takes_time():
    stage, mesh = ("rollout", "generate"), "actor=2,rollout=2,teacher=4"
    assert costs(mesh, distill={"signal": "student_topk"})[stage] > costs(mesh)[stage]


SMALL = 2_400_000_000
"""Bytes of devices of which none can hold the teacher whole, of five layers and few words."""
FEW = {"vocab_size": 16384, "n_layers": 5}


@cache
def searched_on_small_devices() -> tuple[Candidate, list[Candidate]]:
    sizes = {"batch_size": 16, "max_prompt_tokens": 256, "max_new_tokens": 256}
    keys = {"actor": {"remat": "none"}, "rollout": {"slots": 64}}
    config, inputs = run_of("actor=1,rollout=1,teacher=2", SMALL, **sizes, **keys)
    models = {
        "student": replace(STUDENT, **FEW | {"n_layers": 1}),
        "teacher": replace(TEACHER, **FEW),
    }
    plan = SimpleNamespace(config=config, inputs=replace(inputs, **models))
    tried = Search(plan, machine(4), {})
    return tried.now, tried.best()


def test_where_the_run_does_not_fit_a_slower_one_that_does_is_found():
    now, (best, *_) = searched_on_small_devices()
    assert not now.fits and best.fits and best.changes


def test_what_does_not_fit_is_not_proposed():
    """The teacher is split, whatever that costs."""
    _, found = searched_on_small_devices()
    assert found
    for each in found:
        assert each.inputs.axes(each.config)["teacher"].size > 1
        assert max(each.peaks.values()) <= SMALL


FASTEST_S = 0.2
"""Seconds of the fastest emulated step."""
FURTHER = 1.25
"""How many times slower a split must be predicted to be for its rank to count."""


def emulated(candidates: Sequence[Candidate], unit: float, folder: Path) -> list[StepTimes]:
    """What runs take whose roles sleep as long as is predicted of their stages, times `unit`, in
    the loop and the workers of real runs; side by side, as they only sleep."""

    def one(numbered: tuple[int, Candidate]) -> StepTimes:
        number, candidate = numbered
        config = candidate.config.model_copy(update={"steps": 12})
        stages = {stage: unit * seconds for stage, seconds in candidate.stages.items()}
        calls = sleeping_run(config, stages, folder / str(number))
        found = measure_steps(calls, pools_of(candidate), SCHEDULES[config.schedule])
        assert found is not None
        return found

    with ThreadPoolExecutor(len(candidates)) as threads:
        return list(threads.map(one, enumerate(candidates)))


def pools_of(candidate: Candidate) -> dict[str, str]:
    placement = candidate.inputs.placement
    return {role: placement.pools[w.pool].name for role, w in placement.roles.items()}


def ranked_alike(one: Sequence[float], other: Sequence[float], further: float) -> bool:
    """Whether what is so many times slower by the first is slower by the second."""
    pairs = combinations(zip(one, other, strict=True), 2)
    return all(
        (a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs if not 1 / further < a[0] / b[0] < further
    )


@pytest.mark.parametrize("schedule", and_slow(["one_step_off"], ["serial"]))
def test_the_ranking_is_that_of_emulated_runs_and_of_their_advice(schedule, tmp_path):
    """Nine splits, and what the search finds on them. The advice is that at the end of one of the
    emulated runs, from its own times."""
    keys = {
        "rollout": {"slots": None, "parallel": {"data": -1}},
        "teacher": {"model": "teacher", "parallel": {"data": -1}},
        "actor": {"micro_batch_tokens": 12288, "parallel": {"fsdp": -1}},
    }
    meshes = [f"actor={a},rollout={r},teacher={8 - a - r}" for a in (1, 2, 3) for r in (2, 3, 4)]
    searches = [search(mesh, None, layers=28, schedule=schedule, **keys) for mesh in meshes]
    splits, best = [each.now for each in searches], searches[4].best()[:3]
    unit = FASTEST_S / min(each.step for each in (*splits, *best))
    runs = emulated((*splits, *best), unit, tmp_path)
    predicted = [unit * each.step for each in (*splits, *best)]
    took = [run.step for run in runs]
    assert took == pytest.approx(predicted, rel=FURTHER - 1)
    assert ranked_alike(predicted, took, FURTHER)
    assert took[len(splits)] <= FURTHER * min(took)  # the first that the search names

    here, staleness = splits[4], SCHEDULES[schedule]
    devices = [{r: len(w.devices) for r, w in place(m, ROLES).roles.items()} for m in meshes]
    setup = RunSetup(here.config, pools_of(here), devices[4], True, None)
    advised = [took[4] / speedup(setup, runs[4], each, staleness) for each in devices]
    # The advice takes every stage to scale; decoding reads all weights on each device.
    assert ranked_alike(advised, took[: len(meshes)], 1.5)
    assert took[advised.index(min(advised))] <= 1.15 * min(took[: len(meshes)])


def test_a_ranking_that_differs_is_seen():
    assert ranked_alike([1.0, 1.1, 3.0], [2.0, 1.9, 4.0], 1.15)
    assert not ranked_alike([1.0, 1.1, 3.0], [2.0, 1.9, 1.95], 1.15)
