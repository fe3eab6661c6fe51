"""What is printed of a plan: few lines on a CPU, blocks where a terminal is narrow, the verdict of
the machine that is asked about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases import and_slow

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import target_of
from jaxrl.plan import build, make_plan, target_plan
from jaxrl.plan.advice import with_choices
from jaxrl.plan.plan_inputs import GB, PlanInputs
from jaxrl.plan.table import BRIEF_LINES, TABLE_WIDTH, TITLES, Plan
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place
from jaxrl.sharding.targets import GPUS, TPUS, target_machine

TINY = DecoderConfig("qwen2", 264, 32, 2, 4, 2, 8, 64)
LARGE = DecoderConfig("qwen2", 152064, 3584, 28, 28, 4, 128, 18944)
ROLES = ("actor", "rollout", "teacher")
MESHES = (
    *("actor=2,rollout=2,teacher=4", "actor+rollout=1", "actor+rollout+teacher=8"),
    *("actor+rollout=2,teacher=1", "actor=1,rollout+teacher=3"),
)
FOUR = ("actor", "rollout", "teacher", "reference")
TOGETHER = "actor+rollout+teacher+reference=2"


def on_cpu(mesh: str, roles: tuple[str, ...] = ROLES, model: DecoderConfig = TINY) -> Plan:
    keys = {
        "mesh": mesh,
        "student": {"model": "student"},
        "teacher": {"model": "teacher", "dtype": "bfloat16"},
        "data": {"train": "arithmetic"},
    }
    placement = place(mesh, roles)
    devices = tuple(ClusterDevice(i, "cpu", 0, "a", 10**10) for i in range(placement.n_devices))
    seen = Visible(devices, "no accelerator: emulating CPU devices", "local", "asked for")
    return build(Config.parse(keys), roles, placement, model, model, seen, room=True)


WIDE = replace(LARGE, n_layers=2)


@pytest.mark.parametrize("model", [TINY, WIDE], ids=["tiny", "large"])
@pytest.mark.parametrize(("mesh", "roles"), [*((mesh, ROLES) for mesh in MESHES), (TOGETHER, FOUR)])
def test_a_run_on_a_cpu_prints_ten_lines_with_its_roles_and_verdict(mesh, roles, model):
    plan = on_cpu(mesh, roles, model)
    lines = plan.console_text().splitlines()
    assert len(lines) <= BRIEF_LINES == 10
    assert all(any(f" {role} " in line for line in lines) for role in roles)
    assert lines[-1].startswith(plan.verdict[0])
    assert not any("largest that fits" in line or "GPU" in line for line in lines)
    hidden = [note for note in plan.notes if note not in lines]
    assert f"({len(hidden)} more note" in lines[-1] if hidden else "plan.txt" not in lines[-1]
    whole = plan.text()
    assert all(note in whole for note in plan.notes)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_narrow_terminal_has_aligned_blocks_with_every_figure_of_the_table(mesh):
    plan = on_cpu(mesh)
    table = [line for line in plan.text().splitlines() if " cpu " in line or "together" in line]
    count = len(plan.accounts) + sum(len(pool.roles) > 1 for pool in plan.placement.pools)
    assert len(table) == count
    for width in (40, 60, 80, TABLE_WIDTH - 1):
        text = plan.text(width)
        blocks = text[: text.index(plan.notes[0])].splitlines()
        assert max(map(len, blocks)) <= width
        heads = [line for line in blocks[1:] if not line.startswith(" ")]
        rows = [line for line in heads if line.split()[0] in (*ROLES, "together")]
        assert len(rows) == count and {line[10] != " " for line in rows} == {True}
        assert not any(line.split()[-1] in TITLES for line in blocks[1:])  # a name has its figure
        joined = " ".join(" ".join(blocks).split())
        for row in table:
            figures = [word for word in row.split() if word.replace(".", "", 1).isdigit()][-2:]
            assert f"peak {figures[0]} of {figures[1]}" in joined
    assert plan.text(TABLE_WIDTH) == plan.text()


NAMES = [*(f"{gpu}x8" for gpu in GPUS), *(f"tpu-{t}:2x4" for t in TPUS)]
FEW = ["h100x8", "tpu-v5e:2x4"]


@pytest.mark.parametrize("name", and_slow(FEW, [name for name in NAMES if name not in FEW]))
def test_a_target_decides_by_what_a_run_may_use_of_its_devices(name, monkeypatch):
    """Models of all sizes: a verdict for each, first of it all or last."""
    if name == "tpu-v5p:2x4":
        name = "tpu-v5p:2x2x2"
    target = target_machine(name, "--target")
    read = {"tiny": TINY, "large": LARGE}
    monkeypatch.setattr("jaxrl.plan.model_config", lambda model: read[model])
    monkeypatch.setattr("jaxrl.plan.lora_of", lambda config: None)
    monkeypatch.setattr("jaxrl.sharding.mesh.host_available", lambda: 10**6)
    verdicts = []
    for model in read:
        keys = {"mesh": "actor=4,rollout=2,teacher=2", "data": {"train": "arithmetic"}}
        keys |= {role: {"model": model} for role in ("student", "teacher")}
        plan = target_plan(Config.parse(keys), ROLES, target)
        fits = all(pool.bytes <= target.usable for pool in plan.pools)
        verdicts.append(fits)
        words = "fits" if fits else "does not fit"
        (verdict,) = [line for line in plan.verdict if line.startswith("verdict: ")]
        assert verdict.startswith(f"verdict: {words} on {name}, of whose ")
        assert bool(plan.misfit) != fits and "this host" not in plan.text()
        if not fits:
            assert plan.misfit[0] == verdict and len(plan.misfit) > 1
    assert verdicts[0] and verdicts[1] == (target.usable > 60e9)


@pytest.mark.parametrize(
    ("target", "memory", "parallel", "axes"),
    and_slow(
        [
            ("h100x16", 1.0, {}, "data=2 fsdp=8"),
            ("h100x16", 0.12, {}, "fsdp=16"),  # a copy in each host does not fit
            ("tpu-v5e:4x4", 1.0, {}, "fsdp=16"),  # whose links are the same between hosts
        ],
        [
            ("h100x8", 1.0, {}, "fsdp=8"),
            ("h100x32", 1.0, {}, "data=4 fsdp=8"),
            ("h100x16", 1.0, {"fsdp": -1}, "fsdp=16"),
            ("h100x16", 1.0, {"tensor": 2}, "fsdp=8 tensor=2"),
        ],
    ),
)
def test_each_host_has_a_copy_of_the_weights_where_it_fits(
    target, memory, parallel, axes, monkeypatch
):
    monkeypatch.setattr("jaxrl.plan.model_config", lambda model: LARGE)
    monkeypatch.setattr("jaxrl.plan.lora_of", lambda config: None)
    machine = target_machine(target, "--target")
    cut = replace(machine, chip=replace(machine.chip, memory=round(memory * machine.chip.memory)))
    keys = {"mesh": f"actor+rollout={machine.count}", "data": {"train": "arithmetic"}}
    keys |= {"student": {"model": "large"}, "actor": {"parallel": parallel, "remat": "full"}}
    keys |= {"algorithm": "gspo", "group_size": 4, "reward": {"functions": ["exact"]}}
    keys |= {"batch_size": 64, "teacher": {"model": None}}
    plan = target_plan(Config.parse(keys), ("actor", "rollout"), cut)
    assert str(plan.axes["actor"]) == axes
    noted = [note for note in plan.notes if "each host" in note]
    assert len(noted) == (not parallel and machine.count > 8 and target.startswith("h"))


@pytest.mark.parametrize(
    ("target", "distill", "room", "chunk"),
    and_slow(
        [
            ("h100x8", {}, 0.5, 1024),
            ("h100x8", {"chunk_tokens": 256}, 1.0, 256),
            ("tpu-v5e:4x4", {}, 1.0, 512),
        ],
        [("h100x8", {}, 1.0, 2048), ("h100x8", {}, 0.0, 512)],
    ),
)
def test_gpus_read_the_head_less_often_where_a_larger_chunk_fits(
    target, distill, room, chunk, monkeypatch
):
    """`room`: of what the largest chunk takes beyond the usual one, how much a device has."""
    monkeypatch.setattr("jaxrl.plan.model_config", lambda model: replace(TINY, vocab_size=152064))
    monkeypatch.setattr("jaxrl.plan.lora_of", lambda config: None)
    machine = target_machine(target, "--target")
    keys = {"mesh": f"actor+rollout={machine.count}", "data": {"train": "arithmetic"}}
    keys |= {"student": {"model": "large"}, "algorithm": "gspo", "group_size": 4}
    keys |= {"batch_size": 256, "teacher": {"model": None}, "reward": {"functions": ["exact"]}}
    keys |= {"actor": {"remat": "full", "micro_batch_tokens": 4096}, "rollout": {"slots": 8}}

    def planned(of, limit):
        return make_plan(
            Config.parse(keys | {"distill": of}),
            ("actor", "rollout"),
            lambda needed: Visible(machine.devices, None),
            limit / GB,
            room=True,
        )

    peaks = [planned({"chunk_tokens": n}, 10**12).pools[0].bytes for n in (512, 2048)]
    limit = peaks[0] + room * (peaks[1] - peaks[0])
    assert peaks[1] > peaks[0]
    plan = planned(distill, limit)
    assert plan.config.distill.loss_chunk == chunk
    noted = [note for note in plan.notes if note.startswith(f"distill.chunk_tokens={chunk}:")]
    assert len(noted) == (not distill and chunk > 512)
    assert "largest that fits" in plan.text()


def test_no_copy_is_put_into_each_host_where_memory_is_not_known(monkeypatch):
    """Whether it fits could not be said."""
    placement = place("actor+rollout=16", ("actor", "rollout"))
    target = target_of(target_machine("h100x16", "--target").devices)
    hosts = (0,) * 8 + (1,) * 8
    keys = {"mesh": "actor+rollout=16", "data": {"train": "arithmetic"}, "algorithm": "gspo"}
    keys |= {"student": {"model": "large"}, "teacher": {"model": None}, "group_size": 4}
    config = Config.parse(keys | {"reward": {"functions": ["exact"]}}).with_dtypes("bfloat16")
    for limit, axes in ((None, "fsdp=16"), (10**12, "data=2 fsdp=8")):
        made = placement, ("actor", "rollout"), LARGE, None, target
        inputs = PlanInputs(*made, host_of=hosts, limits=(limit,))
        chosen, _ = with_choices(config, inputs)
        assert str(inputs.axes(chosen)["actor"]) == axes
