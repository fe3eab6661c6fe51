"""The loop's order of calls, seen from roles that only write down what they are asked. No model."""

import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.protocols import Sources
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import Stopped, StopTraining
from jaxrl.run.attempt import _summary
from jaxrl.run.loop import Calls, Loop
from jaxrl.run.reporting import Run
from jaxrl.run.run_dir import RunDir
from jaxrl.runtime.worker import LocalWorkerGroup, done_future
from jaxrl.types import Completion, Prompt


class Recorder:
    """Every role in one: keeps the order of its calls and the version of the weights it holds."""

    def __init__(self, name, log):
        self.name, self.log, self.version = name, log, None

    def publish(self, version):
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

    stream = None

    def __init__(self):
        self.rows = []

    def row(self, step, futures):
        told = {}
        for kind, future in futures.items():
            try:
                told[kind] = self.wait(future)
            except Stopped:
                if kind.partition(".")[0] not in ("publish", "load", "eval"):  # what a row may lack
                    raise
        self.rows.append((step, told))


class Saves:
    """Stands for the checkpoint writer: one is due every `every` steps."""

    def __init__(self, every):
        self.every, self._asked = every, []

    def due(self, step):
        return step % self.every == 0

    def folder(self, step):
        return f"folder {step}"

    def begin(self, step, saved, rollouts, schedule):
        self._asked.append((step, saved, rollouts, schedule))

    @property
    def begun(self):
        """Those that were not cancelled."""
        found = []
        for step, saved, rollouts, schedule in self._asked:
            with suppress(Stopped):
                in_flight = {index: future.result() for index, future in rollouts.items()}
                found.append((step, saved.result(), in_flight, schedule))
        return found


class Follower(Recorder):
    """Its scores say with which version."""

    def publish_to_teacher(self, version):
        return version

    def score(self, rollout, part=0, parts=1):
        self.log.append((f"{self.name}.score", rollout, self.version))
        return ""


def run(
    *overrides,
    held_out=("q",),
    checkpoints=None,
    stop=None,
    recorder=Recorder,
    shared=False,
    beside=(),
):
    """`stop`: where the run is asked to end, a `Stop`; `shared`: all roles are on one worker;
    `beside`: the roles on the actor's."""
    config = Config.load(None, ["steps=5", "eval.every=2", *overrides]).with_dtypes("cpu")
    log, rows, group = [], Rows(), LocalWorkerGroup(5)
    names = needed_roles(config)
    beside = names if shared else ["actor", *beside]
    for pool in [beside, *([name] for name in names if name not in beside)]:
        made = [recorder(n, log) if stop is None else Stopping(n, log, stop) for n in pool]
        makers = {role.name: lambda role=role: role for role in made}
        for started in group.start("+".join(pool), (), makers, 5).values():
            started.result()
    handles = {name: group.handle(name) for name in names}
    checkpoints = checkpoints or Saves(every=10**9)

    def asked():
        if asks := stop.asked.is_set() if stop else group.stop_asked is not None:
            group.settle()
        return asks

    calls = Calls(config, handles, asked)
    sources = Sources(
        config,
        lambda i: [f"p{i}"],
        {},
        calls.call,
        calls.wait,
        held_out,
        beside_actor=beside,
        evaluated=("teacher",) if held_out and config.eval.teacher else (),
    )
    trained = Loop(sources, calls, rows, checkpoints).run()
    assert checkpoints.begun is not None  # waits for those that were not cancelled
    if stop is not None:
        assert trained == stop.trained
        stop.over.set()
    for worker in group.workers:
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
@pytest.mark.parametrize("sampled", [1, 0])
def test_a_teacher_that_follows_scores_batch_i_with_version_i(schedule, sampled, monkeypatch):
    """Whatever the schedule, and where the rollout gets no version because nothing is sampled."""
    monkeypatch.setattr(Sources, "data_completions", lambda self, index: done_future(index))
    follows = ["teacher.model=policy", f"schedule={schedule}"]
    log, rows = run(*follows, f"distill.on_policy_fraction={sampled}", recorder=Follower)
    scored = [entry[1:] for entry in log if entry[0] == "teacher.score"]
    assert [version for _, version in scored] == list(range(5))
    assert [step for step, futures in rows if "load.teacher" in futures] == list(range(5))
    frozen, _ = run(*follows, "teacher.ema=1", recorder=Follower)
    assert {entry[2] for entry in frozen if entry[0] == "teacher.score"} == {None}


@pytest.mark.parametrize("beside", [(), ("teacher",)])
def test_no_update_waits_for_a_score_of_a_batch_that_is_still_sampled(beside):
    """A worker takes calls in order: a teacher beside the actor scores each batch after the update
    on the one before it, another one before that."""
    log, _ = run("schedule=two_step_off", beside=beside)
    order = [entry[:2] for entry in log if entry[0] in ("update", "teacher.score")]
    if beside:
        assert order == [(name, i) for i in range(5) for name in ("teacher.score", "update")]
    else:
        assert sorted(order) == sorted(
            (n, i) for i in range(5) for n in ("teacher.score", "update")
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluations_see_exactly_their_version(schedule):
    log, rows = run(f"schedule={schedule}")
    assert [e[1] for e in log if e[0] == "rollout.sample"] == [0, 2, 4, 5]
    assert [step for step, futures in rows if "eval.rollout" in futures] == [0, 2, 4, 5]
    assert len([e for e in log if e[0] == "teacher.sample"]) == 1
    assert "eval.teacher" in rows[0][1]


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

    def call(role, method, *args, **given):
        calls.append((args, given))

    def prompts(i):
        return range(512 * i, 512 * (i + 1))

    sources = Sources(config, prompts, {}, call, wait=None)
    for attempt in range(5):
        sources.student_samples(3, attempt)
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


class Stop:
    """Asks a run to end while `method` works on batch `index`."""

    def __init__(self, method, index, trained):
        self.method, self.index, self.trained = method, index, trained
        self.asked, self.over = threading.Event(), threading.Event()


class Stopping(Recorder):
    def __init__(self, name, log, stop):
        super().__init__(name, log)
        self.stop = stop

    def generate(self, prompts, step, attempt=0):
        self._slow("generate", step)
        return super().generate(prompts, step, attempt)

    def update(self, rollout, scores, step):
        super().update(rollout, scores, step)
        self._slow("update", step)
        return {}

    def sample(self, prompts):
        self._slow("sample", self.version)
        return super().sample(prompts)

    def _slow(self, method, index):
        if (method, index) == (self.stop.method, self.stop.index):
            self.stop.asked.set()
            # An update ends in its own time; what the run does not need, after the run has ended.
            self.stop.over.wait(1.0 if method == "update" else 60.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asked_to_end_a_run_saves_right_after_the_update_that_runs(schedule):
    """No other update begins, and no batch is generated that the checkpoint does not hold."""
    saves = Saves(every=9)
    stop = Stop("update", 2, trained=3)
    log, rows = run(f"schedule={schedule}", "eval.every=0", checkpoints=saves, stop=stop)
    actor = [entry[:2] for entry in log if entry[0] in ("update", "save")]
    assert actor == [("update", 0), ("update", 1), ("update", 2), ("save", "folder 3")]
    assert [step for step, _ in rows] == [0, 1, 2, 3]
    ahead = min(5, 3 + SCHEDULES[schedule])
    generated = [entry[1:3] for entry in log if entry[0] == "rollout.generate"]
    assert generated == [(i, max(0, i - SCHEDULES[schedule])) for i in range(ahead)]
    assert saves.begun == [
        (
            3,
            None,
            {i: i for i in range(3, ahead)},
            {"name": schedule, "generated": ahead, "trained": 3},
        )
    ]


class Raising(Recorder):
    """Its method `raises` asks the run to end, on one batch."""

    raises = None

    def __init__(self, name, log):
        super().__init__(name, log)
        self.made = 0

    def _raise(self, method, index):
        if (f"{self.name}.{method}", index) == Raising.raises:
            raise StopTraining("enough")

    def generate(self, prompts, step, attempt=0):
        self._raise("generate", step)
        return super().generate(prompts, step, attempt)

    def score(self, rollout, part=0, parts=1):
        self._raise("score", rollout)
        return super().score(rollout, part, parts)

    def sample(self, prompts):
        self._raise("sample", self.version)
        return super().sample(prompts)

    def update(self, rollout, scores, step):
        self.made += 1
        return super().update(rollout, scores, step)

    def publish(self, version):
        assert version == self.made, "as the actor"
        return super().publish(version)

    def save(self, folder, step):
        assert step == self.made, "as the actor"
        return super().save(folder, step)


class AsWritten(Saves):
    """Keeps of the batches in flight what `CheckpointWriter` does."""

    def begin(self, step, saved, rollouts, schedule):
        kept = {}
        with suppress(Stopped):
            for index, rollout in rollouts.items():
                kept[index] = done_future(rollout.result())
        super().begin(step, saved, kept, schedule)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("role", "index"), [("teacher.score", 3), ("rollout.generate", 3), ("rollout.sample", 2)]
)
def test_code_of_the_user_s_ends_a_run_before_its_batch_is_trained_on(
    schedule, role, index, shared, monkeypatch
):
    """And before nothing else: what was in flight is kept, and the rows of what is trained are
    written. On a worker for each role, and on one for all."""
    monkeypatch.setattr(Raising, "raises", (role, index))
    saves, staleness = AsWritten(every=9), SCHEDULES[schedule]
    log, rows = run(f"schedule={schedule}", checkpoints=saves, recorder=Raising, shared=shared)
    updates = [entry[1] for entry in log if entry[0] == "update"]
    (step, saved, in_flight, _) = saves.begun[-1]
    assert updates == list(range(step)) and [row for row, _ in rows] == list(range(step + 1))
    if role == "teacher.score":
        assert step == index or (shared and step == index - max(0, staleness - 1))
        assert list(in_flight) == list(range(step, min(5, step + staleness)))
    elif role == "rollout.generate":  # with the weights after `index` - staleness batches
        assert index - staleness <= step <= index
        assert list(in_flight) == list(range(step, index))
    else:
        assert index <= step <= index + staleness and "eval.rollout" not in rows[index][1]
    assert saved is None


@pytest.mark.parametrize("every", [1, 3, 9])
def test_a_generation_that_the_checkpoint_does_not_hold_is_not_waited_for(every):
    """Whether the checkpoint at the end was due anyway or is made for it, there is one."""
    saves = Saves(every)
    begun = time.monotonic()
    log, rows = run("eval.every=0", checkpoints=saves, stop=Stop("generate", 3, trained=3))
    assert time.monotonic() - begun < 50
    assert [entry[1] for entry in log if entry[0] == "save"].count("folder 3") == 1
    assert rows[-1][0] == 3 and saves.begun[-1][0] == 3


def test_an_evaluation_is_not_waited_for_and_its_row_is_written():
    saves = Saves(every=9)
    _, rows = run("eval.every=2", checkpoints=saves, stop=Stop("sample", 2, trained=2))
    assert [step for step, _ in rows] == [0, 1, 2] and "eval.rollout" not in rows[-1][1]
    assert saves.begun[-1][0] == 2


def test_asked_to_end_before_anything_is_trained_nothing_is_saved():
    saves = Saves(every=1)
    _, rows = run(checkpoints=saves, stop=Stop("generate", 0, trained=0))
    assert saves.begun == [] and all(step == 0 for step, _ in rows)


@pytest.mark.parametrize(("start", "expected"), [(0, "done: 8 steps"), (4, "done: 4 steps")])
def test_the_last_lines_count_from_the_start_of_the_process(tmp_path, start, expected):
    """Its last attempt began at step 6, from a checkpoint that it had made."""

    def at(step):
        return RunDir(tmp_path, SimpleNamespace(step=step) if step else None, ())

    run = Run(None, None, at(start), None, print, None, None, time.monotonic() - 60)
    run.first_step_at = run.started + 5
    run.folder = at(6)
    run.metrics = SimpleNamespace(first={"step": 0}, last={"step": 8})
    line = _summary(run)[0]
    rest = "; 8 steps in all" if start else ""
    assert line == f"{expected} in 60 s, the first after 5 s{rest}"


def test_notes_on_a_batch_are_told_also_without_an_environment():
    none, told = np.zeros(1, np.float32), []
    sample = Completion((1,), none, none, "stop")
    widths = {"pad_id": 0, "max_prompt_tokens": 8, "max_new_tokens": 8}
    rollout = make_rollout([Prompt(0, (1,), "")], [[sample]], policy_version=-1, **widths)
    timed = SimpleNamespace(times=SimpleNamespace(seconds=1.0))
    train = SimpleNamespace(source_name=lambda position: "")
    job = SimpleNamespace(config=Config.load("builtin:quickstart"), train=train)
    reporter = SimpleNamespace(job=job, scorers={}, notify=told.append)
    futures = {"rollout": timed, "update": timed}
    Run._batch(reporter, replace(rollout, notes=("a note",)), False, None, futures)
    assert told == ["a note"]
