"""Profiles: which steps, what the traces hold, and the numbers of the table of stages."""

import gzip
import io
import json
import shutil
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from cases import needs_ray
from runs import CONSTANT, SHORT, save_pair, unlisted_files

from jaxrl.algorithms.schedule import SCHEDULES, Schedule
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import Lora
from jaxrl.profile.traces import Profile, stage_rows, steps_to_profile
from jaxrl.profile.waits import Span
from jaxrl.profile.work import (
    StepBatch,
    Work,
    adamw_work,
    block_params,
    step_work,
)
from jaxrl.runtime.worker import LocalWorkerGroup, Traced, Tracer, done_future
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.targets import Ceilings
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.train import train

MESH = "mesh=actor=1,rollout=1,teacher=1"
pytestmark = pytest.mark.usefixtures("shared_programs")
STAGES = {"rollout.generate", "teacher.score", "actor.update", "actor.publish", "rollout.load"}


@pytest.fixture(autouse=True, scope="module")
def ceilings_are_measured_shortly():
    """Each is of few calls: how close they come to what the machine does is another test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.sharding.targets.TRY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def run(folder, models, *overrides):
    plain = [*SHORT, *CONSTANT, "data.eval=null", MESH, f"run_dir={folder / 'run'}"]
    return train(Config.load("builtin:quickstart", [*models, *plain, *overrides])).run_dir


def stages(run_dir):
    return json.loads((run_dir / "profile" / "stages.json").read_text())


def named_events(folder):
    """(name, batch) of every call of a role in a trace, from both of its files."""
    (perfetto,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    with gzip.open(perfetto) as file:
        events = json.load(file)["traceEvents"]
    found = sorted(
        (event["name"], event.get("args", {}).get("step_num"))
        for event in events
        if event.get("name", "") in STAGES
    )
    (xplane,) = folder.glob("plugins/profile/*/*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(xplane)).planes
    names = (event.name for plane in planes for line in plane.lines for event in line.events)
    assert sorted(name for name in names if name in STAGES) == [name for name, _ in found]
    return found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("5", "'5' is not a range of steps: write first:stop, as in 3:5 for the steps 3 and 4"),
        ("3:", "'3:' is not a range of steps"),
        ("0:2", "'0:2' begins with step 0: the first step is 1"),
        ("3:3", "'3:3' holds no step: stop must exceed first"),
        (
            "2:5",
            "profile.steps=2:5 steps=2: it reaches beyond the last step: set a stop of at most 3",
        ),
    ],
)
def test_steps_that_cannot_be_are_refused(given, told):
    with pytest.raises(UserError) as error:
        Config.load("builtin:quickstart", ["steps=2", f"profile.steps={given}"])
    assert told in str(error.value) and "profile.steps" in str(error.value)


def test_steps_are_half_open_and_none_by_default(tmp_path):
    assert list(Config.load("builtin:quickstart", ["profile.steps=3:5"]).profile.range) == [3, 4]
    assert list(Config.load(None).profile.range) == []
    file = tmp_path / "run.yaml"  # not a number in base 60, as older YAML has it
    file.write_text(Config.load(None).dump().replace("  steps: null", "  steps: 3:5"))
    assert list(Config.load(file).profile.range) == [3, 4]


@pytest.mark.parametrize(
    ("trained", "left", "told"),
    [
        (0, [3, 4], None),
        (2, [3, 4], None),
        (3, [4], "profile.steps=3:5: the run resumes after step 3; only 4:5 is profiled"),
        (9, [], "profile.steps=3:5: the run resumes after step 9; nothing is profiled"),
    ],
)
def test_steps_that_are_trained_already_are_told(trained, left, told):
    said = []
    config = Config.load("builtin:quickstart", ["profile.steps=3:5"])
    assert list(steps_to_profile(config, trained, said.append)) == left
    assert said == ([] if told is None else [told])


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, models):
    """The folder of a run of 3 steps, of which the second is profiled, and what was printed."""
    folder, printed = tmp_path_factory.mktemp("profiled"), io.StringIO()
    with redirect_stdout(printed):
        run(folder, models, "steps=3", "profile.steps=2:3")
    return folder, printed.getvalue()


def test_a_run_leaves_a_trace_of_its_steps_and_a_table(profiled):
    run_dir = profiled[0] / "run"
    assert unlisted_files(run_dir) == set()
    events = named_events(run_dir / "profile")
    assert {name for name, _ in events} == STAGES
    batches = {batch for name, batch in events if name in ("rollout.generate", "actor.update")}
    assert batches == {"1"}, "step 2 trains batch 1"
    told = stages(run_dir)
    assert told["steps"] == [2, 2] and {row["stage"] for row in told["stages"]} == STAGES
    assert sum(row["seconds"] for row in told["stages"]) <= told["step_seconds"]
    assert {pool["pool"] for pool in told["pools"]} == {"actor", "rollout", "teacher"}
    for pool in told["pools"]:
        busy = sum(row["seconds"] for row in told["stages"] if row["pool"] == pool["pool"])
        assert 1 - pool["idle"] == pytest.approx(busy / told["step_seconds"])
    by_name = {row["stage"]: row for row in told["stages"]}
    for name in ("rollout.generate", "teacher.score", "actor.update"):
        row = by_name[name]
        assert row["flops"] > 0 and row["bytes"] > 0 and row["compute"] > 0
        assert row["bound"] == ("compute" if row["compute"] > row["memory"] else "memory")
    row = next(row for row in read_metrics(run_dir) if row["step"] == 2)
    assert by_name["actor.publish"]["moved"] == row["weights/sync_bytes"]
    assert by_name["teacher.score"]["moved"] == row["actor/tokens"] * 48 * 4, "hidden states"
    seconds = by_name["rollout.generate"]["seconds"]
    assert seconds == pytest.approx(row["time/rollout_s"], rel=1e-6)
    rate = by_name["rollout.generate"]["tokens_per_second"]
    assert rate == pytest.approx(row["tokens/generated"] / seconds)
    table = "profile of step 2:"
    assert table in profiled[1] and table in (run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_overlapping_batches_are_all_in_the_trace(tmp_path, models):
    """By default the trace lies around the actions of each schedule, below."""
    run_dir = run(tmp_path, models, "steps=5", "schedule=two_step_off", "profile.steps=3:6")
    events = named_events(run_dir / "profile")
    for name in ("rollout.generate", "actor.update"):
        assert {"2", "3", "4"} <= {batch for event, batch in events if event == name}
    told = stages(run_dir)
    assert told["steps"] == [3, 5]
    assert {"rollout.generate", "teacher.score", "actor.update"} <= {
        row["stage"] for row in told["stages"]
    }


def test_a_run_that_goes_on_profiles_what_is_left(profiled, tmp_path, models):
    shutil.copytree(profiled[0] / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "profile")
    pools = ("mesh=actor+rollout=1,teacher=1", "offload.optimizer=true")
    run_dir = run(tmp_path, models, "steps=4", "profile.steps=3:5", *pools)
    assert stages(run_dir)["steps"] == [4, 4]
    rows = {row["stage"]: row for row in stages(run_dir)["stages"]}
    last = next(row for row in read_metrics(run_dir) if row["step"] == 4)
    assert rows["actor.update"]["moved"] == last["offload/to_device_bytes"] > 0
    assert "only 4:5 is profiled" in (run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_learning_from_rewards_on_one_pool(tmp_path, models):
    """The numbers of its stages are among those below; other runs learn from rewards."""
    student, _ = models
    keys = "algorithm=gspo mesh=actor+rollout=1 reward.functions=[exact] policy.kl_coef=0.1"
    more = ("teacher.model=null", "offload.optimizer=true", "profile.steps=2:3", "steps=3")
    more += ("actor.minibatches=1",)  # no pass before the update
    run_dir = run(tmp_path, [student], *keys.split(), *more)
    rows = {row["stage"]: row for row in stages(run_dir)["stages"]}
    counted = {name for name, row in rows.items() if row["flops"] is not None}
    assert counted == {"rollout.generate", "reference.score", "actor.update"}
    assert rows["reward.score"]["compute"] is None
    told = next(row for row in read_metrics(run_dir) if row["step"] == 2)
    assert rows["actor.update"]["moved"] == told["offload/to_device_bytes"]
    assert rows["rollout.load"]["moved"] is None, "one pool"


@pytest.mark.slow
@pytest.mark.ray
def test_every_process_writes_its_own_trace(tmp_path, models):
    needs_ray()
    split = ("steps=3", "launcher=ray", "ray.devices_per_worker=1", "profile.steps=2:3")
    run_dir = run(tmp_path, models, "mesh=actor=2,rollout=1,teacher=1", *split)
    folder = run_dir / "profile"
    names = {path.name for path in folder.iterdir()}
    assert names == {"actor.0", "actor.1", "rollout", "teacher", "stages.json"}
    assert {name for name, _ in named_events(folder / "actor.1")} == {
        "actor.update",
        "actor.publish",
    }
    assert ("rollout.generate", "1") in named_events(folder / "rollout")
    assert set(stages(run_dir)["ceilings"]) == {"actor", "rollout", "teacher"}


# The tracer.


def test_a_trace_begins_and_ends_with_the_last_worker_of_the_process(tmp_path):
    worker_group = LocalWorkerGroup(stop_s=5)
    for name in ("actor", "rollout"):
        worker_group.start(name, (), {name: Gated}, deadline=60)[name].result()
    actor, rollout = worker_group.handle("actor"), worker_group.handle("rollout")
    gate = rollout.call("wait", deadline=60)
    begun = worker_group.profile(tmp_path, "float32", deadline=60)
    assert begun["actor"].result() == Traced()  # not yet: the rollout has still to come
    before = actor.call("update", step=0, deadline=60).result()
    Gated.gate.set()
    gate.result(), begun["rollout"].result()
    actor.call("update", step=1, deadline=60).result()
    for ended in worker_group.profile(None, "float32", deadline=60).values():
        ended.result()
    actor.call("update", step=2, deadline=60).result()
    worker_group.stop()
    assert before == 0 and named_events(tmp_path) == [("actor.update", "1")]


class Gated:
    """A role, and a call that waits."""

    gate = threading.Event()

    def wait(self):
        self.gate.wait(60)

    def update(self, step):
        return step


def test_a_profiler_that_refuses_is_told_and_the_worker_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    told = Tracer().arrive(tmp_path / "file", "float32", ())
    assert told.problem is not None and "file" in told.problem
    assert Tracer().arrive(None, "float32", ()) == Traced(), "nothing to end"


# The profile, as the loop sees it.


class Asked:
    """A crew that writes down when a trace is asked for."""

    def __init__(self, log):
        self.log = log

    def profile(self, folder, dtype, deadline):
        self.log.append("end" if folder is None else "begin")
        return {"actor": done_future(Traced())}


def profile(log, steps):
    config = Config.load("builtin:quickstart", ["steps=8"])
    plan = SimpleNamespace(config=config)
    return Profile(None, plan, Asked(log), Path("x"), steps, log.append)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_trace_lies_around_every_action_of_its_steps(schedule):
    log = []
    watched = profile(log, range(3, 5))
    for action in Schedule(8, SCHEDULES[schedule]):
        with watched.around(action):
            log.append((action.kind, action.index))
    inside = log[log.index("begin") : log.index("end")]
    wanted = {(kind, index) for kind in ("generate", "score", "train") for index in (2, 3)}
    assert wanted | {("publish", 3), ("publish", 4)} <= set(inside)
    assert log.count("begin") == log.count("end") == 1
    if schedule == "serial":
        assert set(inside[1:]) == wanted | {("publish", 3), ("publish", 4)}, "and no other"


def test_a_run_that_stops_inside_ends_its_trace():
    log = []
    watched = profile(log, range(2, 9))
    actions = Schedule(8, 0)
    for _ in range(8):
        with watched.around(actions.next()):
            pass
    watched.close()
    assert log == ["begin", "end"]
    idle = profile(log, range(0))
    for action in Schedule(8, 0):
        with idle.around(action):
            pass
    idle.close()
    assert log == ["begin", "end"]


def test_the_beginning_of_the_trace_is_no_part_of_a_step():
    watched = profile([], range(3, 5))
    begun = done_future(Traced())
    begun.times.started, begun.times.finished = 10.25, 10.5
    watched._begun = {"actor": begun}
    updates = [Span("actor", "update", end - 0.5, end, i) for i, end in enumerate((9, 10, 12, 15))]
    assert watched._windows(updates, [3, 4]) == [(10, 10.25), (10.5, 12), (12, 15)]
    assert watched._windows(updates[2:], [3, 4]) == [(10.5, 12), (12, 15)], "from the first step on"


# The numbers.


def test_shares_of_a_ceiling():
    """6 GFLOP and 1 GB in 0.5 s on two devices of 10 GFLOP/s and 4 GB/s: 60% and 25%."""
    ceiling = Ceilings("x", 10e9, 4e9, published=True, shared=False)
    given = {
        "seconds": {("actor", "update"): 0.5, ("reward", "score"): 0.1},
        "work": {("actor", "update"): [Work(4e9, 0.5e9), Work(2e9, 0.5e9)]},
        "moved": {("actor", "update"): 7.0},
        "tokens": {"actor": 100.0, "reward": 100.0},
        "pool_of": {"actor": "actor", "reward": "reward"},
        "devices": {"actor": 2, "reward": 0},
    }
    update, reward = stage_rows(**given, ceilings={"actor": ceiling})
    assert (update.stage, update.pool, update.seconds) == ("actor.update", "actor", 0.5)
    assert (update.flops, update.bytes, update.tokens_per_second) == (6e9, 1e9, 200)
    assert update.compute == pytest.approx(0.6) and update.memory == pytest.approx(0.25)
    assert (update.bound, update.moved) == ("compute", 7)
    assert reward.flops is None and reward.compute is None and reward.tokens_per_second is None
    shared = Ceilings("cpu", 10e9, 4e9, published=False, shared=True)
    assert stage_rows(**given, ceilings={"actor": shared})[0].compute == pytest.approx(1.2)
    assert stage_rows(**given, ceilings={})[0].compute is None


def test_the_work_of_a_step_follows_its_algorithm():
    """Passes multiply the products of an update, updates its optimizer; with several updates the
    old log-probs are computed first.
    """
    batch = StepBatch(prompts=(3, 5), samples=2, mean=4.0, decode_steps=4)
    assert batch.tokens == 16
    axes = {"actor": Axes(data=2, fsdp=1), "rollout": Axes(data=2)}
    c = MODEL

    def work(*overrides, model=c, **more):
        config = Config.load("builtin:quickstart", [*REWARDED, *overrides])
        setting = SimpleNamespace(config=config, student=model, axes=axes | more, vocab=264)
        return step_work(setting, [batch])

    one = work("actor.minibatches=1", "actor.epochs_per_batch=1")
    refilled = replace(batch, prompts=(3, 5, 7), in_batch=2)
    assert refilled.tokens == 24 and refilled.scored == batch
    setting = SimpleNamespace(
        config=Config.load("builtin:quickstart", [*REWARDED]), student=c, axes=axes, vocab=264
    )
    parts = [step_work(setting, [each]) for each in (batch, refilled)]
    assert parts[0]["actor", "update"] == parts[1]["actor", "update"]
    prefills = [part["rollout", "generate"][0].flops for part in parts]
    assert prefills[1] > prefills[0], "what was replaced was sampled too"
    forward, loss, backward, optimizer = one["actor", "update"]
    assert backward.flops == 2 * forward.flops
    adapted = replace(c, lora=Lora(2, 4.0))
    given = "actor.minibatches=1", "actor.epochs_per_batch=1"
    _, _, half, moments = work(*given, model=adapted)["actor", "update"]
    assert half.flops == forward.flops, "frozen weights have no gradient"
    assert moments.bytes == 2 * adamw_work(adapted.n_trained).bytes
    assert loss.flops == 3 * 2 * 264 * 32 * 16, "logits, and their gradients by both factors"
    assert optimizer.bytes == 2 * adamw_work(c.n_params).bytes, "each copy of the weights"
    twice = work("actor.minibatches=2", "actor.epochs_per_batch=2")["actor", "update"]
    assert [part.flops for part in twice[:3]] == [2 * f.flops for f in (forward, loss, backward)]
    assert twice[3].bytes == 4 * optimizer.bytes
    assert twice[4] == forward and twice[5].flops == 2 * 264 * 32 * 16
    assert ("reference", "score") not in one
    scored = work("reference.dtype=float32", reference=Axes(data=2))["reference", "score"]
    assert scored == twice[4:6], "the old log-probs are of the same products"
    prefill, decode = one["rollout", "generate"]
    assert prefill.bytes == 2 * block_params(c) * 4
    read = 4 / 2 + 2  # of the mean prompt, which two completions share, and half a completion
    keys = 16 * read * 2 * c.n_layers * c.n_kv_heads * c.head_dim
    assert decode.bytes == (2 * 4 * (block_params(c) + 264 * 32) + keys) * 4


MODEL = DecoderConfig("llama", 264, 32, 2, 4, 2, 8, 64)
REWARDED = (
    "algorithm=gspo",
    "group_size=2",
    "teacher.model=null",
    "reward.functions=[exact]",
    "actor.dtype=float32",
    "rollout.dtype=float32",
)
