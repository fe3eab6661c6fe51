"""The advice: its predictions against runs of roles that only take time, and its laws."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, product

import pytest
from sleeping_run import sleeping_run

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.schema import Config
from jaxrl.plan import make_plan, search
from jaxrl.plan.table import plan_json
from jaxrl.profile import waits
from jaxrl.profile.waits import (
    OTHER,
    Span,
    gaps,
    pool_waits,
    stage_seconds,
    steady_steps,
)
from jaxrl.sharding.placement import parse
from jaxrl.telemetry.timeline import Timeline

COSTS = {"generate": 0.6, "score": 0.2, "update": 0.2}
"""Seconds on one device."""
SYNC_S = 0.003
HERE, BEST = "actor=2,rollout=2,teacher=4", "actor=2,rollout=4,teacher=2"
MESHES = (HERE, BEST, "actor=1,rollout=5,teacher=2")
STEPS = 12


def facts(mesh=HERE, schedule="serial", **more):
    given = [f"mesh={mesh}", f"schedule={schedule}", f"steps={STEPS}"]
    config = Config.load(None, given).with_dtypes("cpu")
    placement = parse(mesh)
    pool_of = {role: placement.pool_of(role).name for role in placement.roles}
    devices = {role: len(where.devices) for role, where in placement.roles.items()}
    return waits.RunSetup(config, pool_of, devices, **({"emulated": False, "limit": None} | more))


def simulate(path, mesh, schedule):
    """A run of sleeping roles, as its timeline tells it."""
    run = facts(mesh, schedule)
    works = {("rollout", "generate"), ("teacher", "score"), ("actor", "update")}
    stages = {(role, method): COSTS[method] / run.devices[role] for role, method in works}
    stages |= {("actor", "publish"): SYNC_S, ("rollout", "load"): SYNC_S}
    return waits.measure_steps(sleeping_run(run.config, stages, path), run.pool_of, run.staleness)


def test_predictions_are_true_of_runs_and_the_best_split_is_the_fastest(tmp_path):
    """Measured once, on one split and the serial schedule; the runs only sleep, so all of them run
    at the same time.
    """
    runs = list(product(MESHES, SCHEDULES))
    with ThreadPoolExecutor(len(runs)) as threads:
        started = [threads.submit(simulate, tmp_path / " ".join(r), *r) for r in runs]
        found = {run: told.result() for run, told in zip(runs, started, strict=True)}
    here, measured = facts(), found[HERE, "serial"]
    for (mesh, schedule), there in found.items():
        devices, staleness = facts(mesh).devices, SCHEDULES[schedule]
        predicted = measured.step / waits.speedup(here, measured, devices, staleness)
        assert predicted == pytest.approx(there.step, rel=0.1), (mesh, schedule)
    for schedule, staleness in SCHEDULES.items():
        took = {mesh: found[mesh, schedule].step for mesh in MESHES}
        best, faster = waits.best_split(here, measured, staleness)
        assert best == BEST == min(took, key=took.get)
        assert faster == pytest.approx(measured.step / took[best], rel=0.1)


def test_a_pool_waits_for_whoever_holds_up_what_it_needs():
    """One serial step of 10 s, four times: 6 s of sampling, 1 of scoring, 2 of training, 0.4 of
    weight sync, and 0.6 in which nobody works.
    """
    calls = []
    for i in range(4):
        t = 10 * i
        calls += [
            Span("rollout", "generate", t, t + 6, i),
            Span("teacher", "score", t + 6, t + 7),
            Span("actor", "update", t + 7, t + 9, i),
            Span("actor", "publish", t + 9, t + 9.3),
            Span("rollout", "load", t + 9.3, t + 9.4),
        ]
    windows = [(9, 19), (19, 29)]
    names = {"actor": "actor", "rollout": "rollout", "teacher": "teacher"}
    found = {told.pool: told for told in pool_waits(calls, windows, 2, names)}
    assert found["actor"].busy == pytest.approx(0.23)
    assert found["actor"].waited == pytest.approx({"rollout": 6.1, "teacher": 1, OTHER: 0.6})
    assert found["rollout"].waited == pytest.approx({"actor": 2.3, "teacher": 1, OTHER: 0.6})
    assert found["teacher"].waited == pytest.approx({"actor": 2.3, "rollout": 6.1, OTHER: 0.6})
    for told in found.values():
        assert told.seconds == 10
        assert sum(told.waited.values()) == pytest.approx(told.idle * told.seconds)
    assert stage_seconds(calls, windows, 2)["rollout", "generate"] == pytest.approx(6)


@pytest.mark.parametrize("later", [9.0, 10.004])
def test_a_gap_waited_for_what_ended_nearest_by_clocks_that_differ(later):
    """Sampling ends 10 ms after its scoring began, and scoring 5 ms after the update began. A call
    that ends a little nearer, or runs on, changes that only where it is the nearest.
    """
    own = [Span("actor", "publish", -1, 0), Span("actor", "update", 10, 12)]
    score, generate = Span("teacher", "score", 6, 10.005), Span("rollout", "generate", 0, 6.01)
    ahead = Span("rollout", "generate", 6.5, 10.018)
    (gap,) = gaps(own, [ahead, score, generate], [(-1, 12)])
    assert (gap.start, gap.end, gap.then) == (0, 10, own[1])
    assert gap.causes == ((score, 6, 10), (generate, 0, 6))
    other = Span("reward", "score", 8, later)
    (gap,) = gaps(own, [ahead, score, generate, other], [(-1, 12)])
    assert gap.causes[0][0] == (score if later == 9.0 else other)


def test_calls_that_overlap_count_once():
    """Parts that a teacher elsewhere scores side by side."""
    calls = [Span("teacher", "score", 0, 2), Span("teacher", "score", 1, 3)]
    assert stage_seconds(calls, [(0, 4)], 1) == {("teacher", "score"): 3}


def test_steady_steps_leave_out_the_first_the_last_and_the_long():
    ends = [0, 50, 60, 61, 62, 63, 66, 67, 68]
    calls = [Span("actor", "update", end - 0.5, end) for end in ends]
    assert steady_steps(calls, 0) == [(60, 61), (61, 62), (62, 63), (66, 67)]
    assert steady_steps(calls, 1) == [(60, 61), (61, 62), (62, 63)]
    assert steady_steps(calls[:2], 0) == steady_steps([], 0) == []
    numbered = [replace(call, step=i) for i, call in enumerate(calls)]
    parts = [replace(call, start=call.end - 0.2, end=call.end - 0.1) for call in numbered]
    both = [call for pair in zip(parts, numbered, strict=True) for call in pair]
    assert steady_steps(both, 0) == steady_steps(calls, 0)  # the last part ends a step


def test_steps_that_are_long_in_turn_are_all_steady():
    """As one_step_off makes them where sampling takes longer than an update: without the long ones
    the step would be measured as 1 s."""
    ends = list(accumulate([0, 1, 2, 1, 2, 1, 2, 1, 20, 1, 2, 1]))
    calls = [Span("actor", "update", end - 0.5, end) for end in ends]
    found = [end - start for start, end in steady_steps(calls, 1)]
    assert found == [1, 2, 1, 2, 1, 1]


def test_the_weight_sync_and_roles_without_devices_keep_their_seconds():
    stages = {("actor", "update"): 1.0, ("actor", "publish"): 0.5, ("reward", "score"): 0.25}
    before, after = {"actor": 2, "reward": 0}, {"actor": 4, "reward": 0}
    assert waits.scaled(stages, before, after) == stages | {("actor", "update"): 0.5}


def test_every_other_split_is_tried_once():
    found = list(search.splits(parse("actor=1,rollout+teacher=3")))
    assert found == ["actor=2,rollout+teacher=2", "actor=3,rollout+teacher=1"]
    assert len(list(search.splits(parse(HERE)))) == 20  # 7 choose 2, less the present one
    large = list(search.splits(parse("actor=64,rollout=64,teacher=128")))
    assert len(large) <= search.SPLITS and "actor=64,rollout=128,teacher=64" in large
    assert list(search.splits(parse("actor=2,rollout=2,teacher=1009"))) == [], "1013 is prime"


def measured(**seconds):
    """Of serial steps whose stages follow on each other."""
    named = {"rollout": "generate", "teacher": "score", "actor": "update"}
    calls, t = [], 0.0
    for i in range(12):
        for role, method in named.items():
            calls.append(Span(role, method, t, t + seconds[role], i))
            t += seconds[role]
        calls.append(Span("actor", "publish", t, t + 0.001))
        calls.append(Span("rollout", "load", t + 0.001, t + 0.002))
        t += 0.002
    return calls


def write_run(folder, calls, *overrides, limit=None):
    """What a run directory holds that the advice reads."""
    config = Config.load(None, [f"mesh={HERE}", *overrides])
    (folder / "config.yaml").write_text(config.dump())
    plan = json.loads(plan_json(make_plan(config, needed_roles(config))))
    for pool in plan["pools"]:
        pool |= {"device": "gpu", "limit": limit}
    (folder / "plan.json").write_text(json.dumps(plan))
    with Timeline(folder / "timeline.json") as timeline:
        for call in calls:
            step = {} if call.step is None else {"step": call.step}
            timeline.span(call.track, call.name, call.start, call.end, **step)
    return folder


def test_the_advice_of_a_run_in_words(tmp_path):
    """0.71 s of sampling, 0.1 of scoring, 0.19 of training, on 2, 4 and 2 devices."""
    calls = measured(rollout=0.71, teacher=0.1, actor=0.19)
    faster, went = waits.run_advice(write_run(tmp_path, calls)).values()
    assert went == (
        "actor: busy 0.19 s of 1.00 s a step; waited 0.71 s for rollout, 0.10 s for teacher",
        "rollout: busy 0.71 s of 1.00 s a step; waited 0.19 s for actor, 0.10 s for teacher",
        "teacher: busy 0.10 s of 1.00 s a step; waited 0.71 s for rollout, 0.19 s for actor",
    )
    # actor 0.19, rollout 0.71 / 2 and teacher 0.1 * 2 make 0.745 s; one step off, rollout alone is
    # as long as a step, and with this split half the way of a batch through all three: 0.3725 s
    split = "actor=2,rollout=4,teacher=2"
    assert faster == (  # the fastest first
        f"schedule=one_step_off would be 1.4x faster, and with {split} 2.7x",
        f"rollout is 71% of the step; {split} would be 1.3x faster",
    )
    _, measured_run = waits.measured_run(tmp_path)
    idle = {wait.pool: wait.idle for wait in measured_run.pools}
    assert idle == pytest.approx({"actor": 0.81, "rollout": 0.29, "teacher": 0.9}, abs=1e-3)


def test_a_split_that_cannot_be_had_is_not_named(tmp_path):
    calls = measured(rollout=0.5, teacher=0.1, actor=0.4)

    def faster(*overrides, limit=None):
        told = waits.run_advice(write_run(tmp_path, calls, *overrides, limit=limit))
        return told.get(waits.FASTER, ())

    assert any("rollout=3," in line for line in faster())
    fixed = ("rollout.parallel.data=2", "rollout.parallel.tensor=1")
    assert any("rollout=2," in line for line in faster(*fixed))
    assert not any("rollout=3," in line for line in faster(*fixed))
    assert not any("rollout=" in line for line in faster(limit=1000))  # bytes


def test_a_role_without_devices_keeps_its_seconds(tmp_path):
    """Of 1.2 s: 0.75 of sampling and 0.25 of training, both on 4 devices, 0.2 of reward functions.
    On 6 and 2 devices 0.5 + 0.5 would be no faster; on 5 and 3, 0.6 + 0.333 is 1.06 times.
    """
    calls, t = [], 0.0
    for i in range(12):
        for role, method, took in (
            ("rollout", "generate", 0.75),
            ("reward", "score", 0.2),
            ("actor", "update", 0.25),
            ("actor", "publish", 0.001),
            ("rollout", "load", 0.001),
        ):
            calls.append(Span(role, method, t, t + took, i if method == "update" else None))
            t += took
    keys = "mesh=actor=4,rollout=4 algorithm=gspo group_size=2 teacher.model=null"
    run = write_run(tmp_path, calls, *keys.split(), "reward.functions=[exact]")
    told = waits.run_advice(run)
    line = told[waits.WENT][-1]
    assert line.startswith("reward: busy 0.20 s of 1.20 s a step; waited 0.75 s for rollout")
    assert (
        told[waits.FASTER][-1]
        == "rollout is 62% of the step; actor=3,rollout=5 would be 1.1x faster"
    )


def test_nothing_is_said_without_steps_or_need(tmp_path):
    calls = measured(rollout=0.5, teacher=0.5, actor=0.5)
    assert waits.run_advice(tmp_path) == {} and waits.measured_run(tmp_path) is None
    few = write_run(tmp_path, calls[:12])  # four steps, two to warm up
    assert waits.run_advice(few) == {}
    even = waits.run_advice(write_run(tmp_path, calls, "mesh=actor+rollout+teacher=1"))
    assert even == {}  # one pool: nothing to split


def test_emulated_devices_are_told(tmp_path):
    calls = measured(rollout=0.71, teacher=0.1, actor=0.19)
    write_run(tmp_path, calls)
    plan = json.loads((tmp_path / "plan.json").read_text())
    for pool in plan["pools"]:
        pool["device"] = "cpu"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    heading, *_ = waits.run_advice(tmp_path)
    assert "emulated ones share the cores" in heading
