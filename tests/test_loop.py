"""The loop's order of calls, seen from roles that only write down what they are asked. No model."""

from types import SimpleNamespace

import pytest

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

    def generate(self, prompts, step):
        self.log.append((f"{self.name}.generate", step, self.version, tuple(prompts)))
        return step

    def score(self, rollout):
        self.log.append(("score", rollout))
        return f"signal {rollout}"

    def update(self, rollout, signal, step):
        assert signal == (None if signal is None else f"signal {rollout}")
        self.log.append(("update", rollout, step, signal))
        return {}

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


def run(*overrides, held_out=("q",)):
    config = Config.load(None, ["steps=5", "eval.every=2", *overrides])
    log, rows, workers = [], Rows(), []
    for name in ("actor", "rollout", "teacher"):
        workers.append(LocalWorker(name))
        role = Recorder(name, log)
        workers[-1].start_role(name, lambda role=role: role, deadline=5).result()
    handles = {worker.name: worker.handle(worker.name) for worker in workers}
    stream = SimpleNamespace(batch=lambda i: [f"p{i}"])
    Loop(config, handles, stream, held_out, rows, packing={}, value=done_future).run()
    for worker in workers:
        assert worker.stop(5)
    return log, rows.rows


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_that_generate_are_those_of_the_bound(schedule):
    log, rows = run(f"schedule={schedule}")
    generated = [entry[1:] for entry in log if entry[0] == "rollout.generate"]
    staleness = SCHEDULES[schedule]
    assert generated == [(i, max(0, i - staleness), (f"p{i}",)) for i in range(5)]
    assert [e[1:] for e in log if e[0] == "update"] == [(i, i, f"signal {i}") for i in range(5)]
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
