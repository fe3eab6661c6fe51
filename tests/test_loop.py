"""The loop's order of calls, seen from roles that only write down what they are asked. No model."""

from types import SimpleNamespace

import pytest

from jaxrl.algorithms import needed_roles
from jaxrl.config import Config
from jaxrl.loop import Loop
from jaxrl.runtime.local import LocalWorker, done_future
from jaxrl.schedule import SCHEDULES


class Recorder:
    """Every role in one: keeps the order of its calls and the version of the weights it holds."""

    def __init__(self, name, log):
        self.name, self.log, self.version = name, log, None

    def publish(self, version, dtype):
        self.log.append(("publish", version))
        return version

    def load(self, version):
        self.version = version
        return {}

    def generate(self, prompts, step, attempt=0):
        self.log.append((f"{self.name}.generate", step, self.version, tuple(prompts)))
        return step

    def score(self, rollout, part=0, parts=1):
        self.log.append((f"{self.name}.score", rollout, part, parts))
        return f"{self.name} of {rollout}, part {part}"

    def update(self, rollout, scores, step):
        self.log.append(("update", rollout, step, scores))
        return {}

    def save(self, folder, step):
        self.log.append(("save", folder, step))
        return step

    def saved(self, step):
        return None

    def sample(self, prompts):
        self.log.append((f"{self.name}.sample", self.version, tuple(prompts)))
        return []


class Rows:
    """Stands for the reporter: waits for the futures of each row."""

    gave_up = False

    def __init__(self):
        self.rows = []

    def row(self, step, futures):
        self.rows.append((step, {kind: future.result() for kind, future in futures.items()}))


class Saves:
    """Stands for the checkpoint writer: one is due every `every` steps."""

    def __init__(self, every):
        self.every, self.begun = every, []

    def due(self, step):
        return step % self.every == 0

    def folder(self, step):
        return f"folder {step}"

    def begin(self, step, saved, rollouts, schedule):
        in_flight = {index: future.result() for index, future in rollouts.items()}
        self.begun.append((step, saved.result(), in_flight, schedule))


def run(*overrides, held_out=("q",), checkpoints=None):
    config = Config.load(None, ["steps=5", "eval.every=2", *overrides])
    log, rows, workers = [], Rows(), []
    for name in needed_roles(config):
        workers.append(LocalWorker(name))
        role = Recorder(name, log)
        workers[-1].start_role(name, lambda role=role: role, deadline=5).result()
    handles = {worker.name: worker.handle(worker.name) for worker in workers}
    stream = SimpleNamespace(batch=lambda i: [f"p{i}"])
    given = {"packing": {}, "value": done_future, "checkpoints": checkpoints}
    Loop(config, handles, stream, held_out, rows, **given).run()
    for worker in workers:
        assert worker.stop(5)
    return log, rows.rows


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_that_generate_are_those_of_the_bound(schedule):
    log, rows = run(f"schedule={schedule}")
    generated = [entry[1:] for entry in log if entry[0] == "rollout.generate"]
    staleness = SCHEDULES[schedule]
    assert generated == [(i, max(0, i - staleness), (f"p{i}",)) for i in range(5)]
    updates = [entry[1:] for entry in log if entry[0] == "update"]
    assert updates == [(i, i, {"teacher": [f"teacher of {i}, part 0"]}) for i in range(5)]
    assert [step for step, _ in rows] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluations_see_exactly_their_version(schedule):
    log, rows = run(f"schedule={schedule}")
    assert [e[1] for e in log if e[0] == "rollout.sample"] == [0, 2, 4, 5]
    assert [step for step, futures in rows if "eval" in futures] == [0, 2, 4, 5]
    assert len([e for e in log if e[0] == "teacher.sample"]) == 1
    assert "teacher" in rows[0][1]


def test_without_held_out_prompts_nothing_is_evaluated():
    log, _ = run(held_out=())
    assert not [e for e in log if e[0].endswith("sample")]


def test_off_policy_batches_by_the_seeded_coin():
    overrides = ("distill.on_policy_fraction=0.5", "distill.seq_kd=true", "steps=12")
    log, _ = run(*overrides)
    sources = [e[0] for e in sorted((e for e in log if "generate" in e[0]), key=lambda e: e[1])]
    assert {"rollout.generate", "teacher.generate"} == set(sources)
    again, _ = run(*overrides)
    assert sources == [
        e[0] for e in sorted((e for e in again if "generate" in e[0]), key=lambda e: e[1])
    ]


def test_the_prompts_of_refills_share_no_random_numbers():
    """Of a batch of 512 prompts: the engine takes ids modulo 2^31."""
    config, calls = Config.load(None, ["batch_size=512"]), []
    rollout = SimpleNamespace(call=lambda method, *args, **given: calls.append((args, given)))
    stream = SimpleNamespace(batch=lambda i: range(512 * i, 512 * (i + 1)))
    loop = Loop(
        config,
        {"rollout": rollout},
        stream,
        (),
        Rows(),
        packing={},
        value=done_future,
        checkpoints=None,
    )
    for attempt in range(5):
        loop.student_samples(3, attempt)
    keys = {
        (given["step"], given["attempt"], prompt % 2**31)
        for (prompts,), given in calls
        for prompt in prompts
    }
    assert len(keys) == 5 * 512 and {(step, attempt) for step, attempt, _ in keys} == {
        (3, attempt) for attempt in range(5)
    }
    assert len({prompt for (prompts,), _ in calls for prompt in prompts}) == 5 * 512


def test_every_scorer_is_asked_in_its_own_parts_and_the_actor_gets_them_in_order():
    joint = "algorithm=gspo group_size=2 reward.functions=[auto] policy.kl_coef=0.1"
    parts = "distill_weight=1 reference.num_microbatches=2 teacher.num_microbatches=3 steps=2"
    log, rows = run(*joint.split(), *parts.split())
    told = {
        "teacher": [f"teacher of 1, part {i}" for i in range(3)],
        "reference": [f"reference of 1, part {i}" for i in range(2)],
        "reward": ["reward of 1, part 0"],
    }
    assert [entry[3] for entry in log if entry[0] == "update"][1] == told
    assert [e[1:] for e in log if e[0] == "reference.score"] == [
        (batch, part, 2) for batch in range(2) for part in range(2)
    ]
    last = {f"score.{role}": parts[-1] for role, parts in told.items()}
    last |= {f"score.reference.{i}": part for i, part in enumerate(told["reference"][:-1])}
    # The teacher's hidden states are dropped once the actor has them.
    last |= dict.fromkeys(("score.teacher", "score.teacher.0", "score.teacher.1"))
    assert {k: v for k, v in rows[2][1].items() if k.startswith("score.")} == last


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_holds_what_is_generated_and_not_yet_trained_on(schedule):
    saves = Saves(every=2)
    log, _ = run(f"schedule={schedule}", checkpoints=saves)
    assert [entry[1:] for entry in log if entry[0] == "save"] == [
        (f"folder {step}", step) for step in (2, 4, 5)
    ]
    ahead = SCHEDULES[schedule]
    for step, saved, in_flight, told in saves.begun:
        generated = min(5, step + ahead)
        assert saved is None and in_flight == {i: i for i in range(step, generated)}
        assert told == {"name": schedule, "generated": generated, "trained": step}
