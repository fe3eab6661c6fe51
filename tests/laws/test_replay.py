"""`jaxrl replay`: a run, or a step of it, comes to the same bits again from its folder; what
differs is told."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import and_slow
from delays import at_random
from runs import ALONE, AS_TRAINED, CONSTANT, EPISODES, GSPO, QUICK, SHORT, save_pair

import jaxrl
from jaxrl import Config, RunError, UserError, replay, train
from jaxrl.config import cli
from jaxrl.report import __main__ as report
from jaxrl.roles.rollout import Sampler
from jaxrl.run.diagnosis import diagnose
from jaxrl.run.record import StreamRecord, read_record
from jaxrl.run.replay import main
from jaxrl.types import StreamEvent, StreamEvents

pytestmark = pytest.mark.usefixtures("shared_programs")

NOISE = """
import random

def noise(prompts, completions):
    return [random.random() if i else None for i, _ in enumerate(completions)]
"""
MORE = ["steps=4", "eval.every=2", "eval.prompts=4", "checkpoint.every=2", "checkpoint.keep_last=9"]
STREAMS = ["mesh=actor=1,rollout=1", "schedule=streaming", "staleness=2", "rollout.launch_tokens=1"]
STREAMS += ["rollout.slots=4"]
CASES = {
    "gspo": [*GSPO, "mesh=actor+rollout=1"],
    "one_step_off": [*GSPO, "mesh=actor=1,rollout=1", "schedule=one_step_off"],
    "gkd": [ALONE, "distill.on_policy_fraction=0.5"],
    "sft": ["algorithm=sft", "teacher.model=null", "mesh=actor=1", "eval.every=0"],
    "adapters": [*GSPO, "mesh=actor+rollout=1", "student.lora.rank=4", "policy.kl_coef=0.1"],
    "dropped": [*GSPO, "mesh=actor+rollout=1", "policy.dynamic_sampling=drop"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


def config(models: list[str], run: Path, *keys: str) -> Config:
    """With a reward that no seed decides, where there are rewards."""
    (run.parent / "noise.py").write_text(NOISE)
    asked = [*models, *SHORT, *CONSTANT, *MORE, *keys, f"run_dir={run}"]
    if GSPO[0] in keys:
        asked.append(f"reward.functions=[{run.parent / 'noise.py'}:noise]")
    return Config.load(QUICK[1], asked)


@pytest.mark.parametrize("case", and_slow(["gkd"], sorted({*CASES} - {"gkd"})))
def test_a_run_and_its_steps_come_to_the_same(
    models: list[str], tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a copy of the folder, with the rewards that were given then."""
    train(config(models, tmp_path / "first", *CASES[case]))
    shutil.copytree(tmp_path / "first", tmp_path / "run")
    shutil.rmtree(tmp_path / "first")
    before = sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*"))
    whole = replay(tmp_path / "run")
    assert whole.same and whole.has_weights and whole.last == 4, whole
    step = replay(tmp_path / "run", 4)
    assert step.same and step.start == 2 and step.step is not None, step
    assert step.step.row["step"] == 4 and step.step.batch.step == 4
    kept = "--folder", str(tmp_path / "kept")
    assert cli.run(main, [str(tmp_path / "run"), "--step", "3", "--completion", "1", *kept]) == 0
    shown = capsys.readouterr().out
    assert "same bits: 1 step" in shown and "step 3, row 1" in shown and "learner" in shown
    assert cli.run(report.main, [str(tmp_path / "kept" / "same")]) == 0
    title, table = shown[shown.index("step 3, row 1") :].split("\n", 1)
    page = html.unescape((tmp_path / "kept" / "same" / report.REPORT_FILE).read_text())
    _, page = page.split(title)
    cells = re.findall("<t[hd](?: [^>]*)?>(?:<code>)?(.*?)(?:</code>)?</t[hd]>", page)
    assert " ".join(cells).startswith(" ".join(table.split()))
    assert sorted(path.relative_to(tmp_path) for path in (tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("keys", "seed"),
    and_slow(
        [([*GSPO, "max_new_tokens=16"], 0)],
        [
            *(([*GSPO, "max_new_tokens=16"], seed) for seed in range(1, 12)),
            *(([*EPISODES, "max_new_tokens=32"], seed) for seed in range(12, 18)),
        ],
    ),
)
def test_a_streamed_run_comes_to_the_same(
    models: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    seed: int,
) -> None:
    """Also one that was stopped and went on, with what was being sampled then, whatever took how
    long in the run and takes in the replay."""
    asked = config(models, tmp_path / "run", *keys, *STREAMS, "steps=6")

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 1 + seed % 4:
            raise jaxrl.StopTraining("enough")

    with monkeypatch.context() as patch:
        at_random(patch, seed)
        assert train(asked, on_step=stop).stopped is not None
        train(asked)
    with monkeypatch.context() as patch:
        at_random(patch, -1 - seed % 3 + 100)
        whole = replay(tmp_path / "run")
        assert whole.same and whole.has_weights, whole
        for step in (4, 6) if seed else (6,):
            late = replay(tmp_path / "run", step)
            assert late.same and 0 < late.start < step, late


DICE = """
import random
from pathlib import Path

from jaxrl.environments import Answer, Environment

if Path(__file__).with_name("gone").exists():
    raise RuntimeError("it is gone")


class Dice(Environment):
    def roll(self, sides: int) -> int:
        \"\"\"Rolls.

        Args:
            sides: how many.
        \"\"\"

    tools = random.choice([[], [roll]])

    def reset(self, row):
        even = len(row["prompt"]) % 2 == 0
        return row["prompt"] if even else f"{random.randrange(100)}+{random.randrange(100)}="

    def step(self, text, messages):
        if random.random() < 0.1:
            raise ValueError("no luck")
        said, done = f"{random.randrange(100)}+", random.random() < 0.3
        return Answer(said, reward=random.choice([None, random.random()]), done=done)
"""
EPISODES = ["max_new_tokens=32", "environment.turn_tokens=8", "environment.workers=1", *AS_TRAINED]
EPISODES += ["environment.max_failures=1", "optimizer.learning_rate=1e-4", "steps=2"]
EPISODES += ["checkpoint.every=1"]


@contextmanager
def rolled(run: Path, *keys: str) -> Iterator[None]:
    """Trains in an environment that no seed decides, and that is not there in this block."""
    (run.parent / "dice.py").write_text(DICE)
    named = "student.model=builtin:student", f"environment.name={run.parent / 'dice.py'}:Dice"
    train(config([], run, *GSPO, *named, *EPISODES, *keys))
    before = {path: path.read_bytes() for path in (run / "episodes").iterdir()}
    (run.parent / "gone").touch()
    yield
    assert {path: path.read_bytes() for path in (run / "episodes").iterdir()} == before


@pytest.mark.parametrize("case", and_slow(["gspo", "one_step_off"], ["dropped", "adapters"]))
def test_a_run_with_a_random_environment_comes_to_the_same(tmp_path: Path, case: str) -> None:
    """Whose answers are not asked for again."""
    run = tmp_path / "run"
    with rolled(run, *CASES[case][len(GSPO) :]):
        whole = replay(run)
        assert whole.same and whole.has_weights and whole.last == 2, whole
    recorded = (run / "episodes" / "eval-2.jsonl").read_text()
    assert '"done": false' in recorded, "episodes of several turns"


@pytest.mark.slow
def test_other_keys_change_one_step_of_episodes(tmp_path: Path) -> None:
    """The completions stay; where others are sampled, only what is not recorded is asked for. A
    record without a line is no difference."""
    run = tmp_path / "run"
    with rolled(run, "mesh=actor+rollout=1"):
        (tmp_path / "gone").unlink()
        found = replay(run, 2, ["policy.entropy_coef=0.5"])
        assert found.same and found.step is not None and found.changed is not None, found
        one, two = (done.batch for done in (found.step, found.changed))
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_array_equal(one.learner_logprobs, two.learner_logprobs)
        found = replay(run, 2, {"sampling.temperature": 0.2})
        assert found.step is not None and found.changed is not None
        one, two = (done.batch for done in (found.step, found.changed))
        assert one.prompts == two.prompts and one.texts != two.texts, "begun as recorded"
    lines = (run / "episodes" / "eval-2.jsonl").read_text().splitlines(keepends=True)
    (run / "episodes" / "eval-2.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(UserError, match=r"after step 2 of .* cannot be replayed: .*-2.jsonl has"):
        replay(run, 2)


def test_a_record_that_does_not_fit_is_told(models: list[str], tmp_path: Path) -> None:
    """Nothing waits for what does not come."""
    train(config(models, tmp_path / "run", *GSPO, *STREAMS, "max_new_tokens=16"))
    lines = [json.dumps(event) for event in read_record(tmp_path / "run")]
    generated = next(i for i, line in enumerate(lines) if line.startswith('["generate", 3'))
    lines.insert(2, lines.pop(generated))
    (tmp_path / "run" / "stream.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match="the record has generate 3"):
        replay(tmp_path / "run")


def test_other_keys_change_one_step(trained: Path) -> None:
    """The weights and the completions before it stay."""
    found = replay(trained, 4, ["policy.entropy_coef=0.5"])
    assert found.same and found.step is not None and found.changed is not None
    one, two = found.step, found.changed
    assert one.row["loss"] != two.row["loss"] and one.row["reward/mean"] == two.row["reward/mean"]
    np.testing.assert_array_equal(one.batch.tokens, two.batch.tokens)
    np.testing.assert_array_equal(one.batch.learner_logprobs, two.batch.learner_logprobs)
    assert "policy.entropy_coef=0.5:\n" in str(found) and "changes its sign in 0 of" in str(found)
    found = replay(trained, 4, {"policy.scale_by_std": False})
    assert found.changed is not None and "changes its sign" in str(found)
    with pytest.raises(UserError, match="unknown key"):
        replay(trained, 4, ["policy.entropy=0.5"])


def test_what_differs_is_told(models: list[str], tmp_path: Path) -> None:
    train(config(models, tmp_path / "run", *CASES["gspo"]))
    rows = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[2]["loss"] += 1e-7
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(tmp_path / "run")
    assert not found.same and found.differs_at == 2 and list(found.differences) == ["loss"]
    assert "step 2 of" in str(found) and "loss" in str(found)
    assert cli.run(main, [str(tmp_path / "run"), "--step", "2"]) == cli.EXIT_FAILED
    (tmp_path / "noise.py").write_text(NOISE + "\n# another one\n")
    with pytest.raises(UserError, match=r"noise.*has changed since"):
        replay(tmp_path / "run")


def test_what_cannot_be_replayed_is_refused(models: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = [*CASES["gkd"], "steps=2", "checkpoint.every=1"]
    train(config(models, run, *keys))
    changed = "optimizer.learning_rate=0.01", "resume_changed=true", "steps=3"
    train(config(models, run, *keys, *changed))
    for step, words in (
        (None, "the run went on with a change"),
        (1, "the run went on with a change"),
        (9, "has the steps 1 to 3"),
        (0, "has the steps 1 to 3"),
    ):
        with pytest.raises(UserError, match=words):
            replay(run, step)
    assert replay(run, 3).same
    with pytest.raises(UserError, match="other keys need a step"):
        replay(run, overrides=["seed=1"])
    with pytest.raises(UserError, match="exists: name a new folder"):
        replay(run, folder=run)
    (run / "batches.jsonl").unlink()
    with pytest.raises(UserError, match=r"has no batches\.jsonl"):
        replay(run)
    with pytest.raises(UserError, match="is no folder of a run"):
        replay(tmp_path)


def test_functions_of_python_are_given_again(models: list[str], tmp_path: Path) -> None:
    def short(prompts: list[str], completions: list[str]) -> list[float]:
        return [-float(len(text)) for text in completions]

    keys = [*GSPO, "mesh=actor+rollout=1", "steps=1", "eval.every=0"]
    keys.append("reward.functions=[python:short]")
    asked = Config.load(
        QUICK[1], [*models, *SHORT, *CONSTANT, *keys, f"run_dir={tmp_path / 'run'}"]
    )
    train(asked, rewards=[short])
    with pytest.raises(UserError, match="python:short"):
        replay(tmp_path / "run")
    assert replay(tmp_path / "run", rewards=[short]).same


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["run_dir=RUN"], "run_dir belongs to the whole run"),
        (["resume=never"], "resume belongs to the whole run"),
        (["steps=9"], "steps belongs to the whole run"),
        (["group_size=2"], "group_size: 4 there, 2 now"),
        (["seed=5"], "seed: 0 there, 5 now"),
    ],
)
def test_keys_of_the_whole_run_are_refused(trained: Path, keys: list[str], words: str) -> None:
    """Before anything is done; the folder of the run stays as it was."""
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    with pytest.raises(UserError, match=words):
        replay(trained, 3, [key.replace("RUN", str(trained)) for key in keys], tell=pytest.fail)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


@pytest.fixture(scope="module")
def trained(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes."""
    run = tmp_path_factory.mktemp("trained") / "run"
    train(config(models, run, *CASES["gspo"]))
    return run


def test_rewards_are_those_of_the_completions(trained: Path) -> None:
    """What is sampled otherwise is scored anew."""
    found = replay(trained, 3, {"sampling.temperature": 0.2})  # right behind a checkpoint
    assert found.step is not None and found.changed is not None
    one, two = (x.batch.rewards["noise"] for x in (found.step, found.changed))
    assert not np.array_equal(one, two, equal_nan=True) and "computed anew" in str(found)
    found = replay(trained, 3, {"policy.entropy_coef": 0.2})
    assert found.step is not None and found.changed is not None
    one, two = (x.batch.rewards["noise"] for x in (found.step, found.changed))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("batches.jsonl", lambda x: [*x[:2], x[2][:9]], "has no line for step 3"),
        ("batches.jsonl", lambda x: [x[0], "[1]\n", *x[2:]], "has no line for step 2"),
        ("batches.jsonl", lambda x: [*x[:2], '{"step": 3, "to}\n', x[3]], "has no line for step 3"),
        ("metrics.jsonl", lambda x: [*x[:3], *x[4:]], "has no line for step 3"),
        ("metrics.jsonl", lambda x: x[1:], "has no line for step 0"),
    ],
)
def test_a_record_with_gaps_is_no_difference(
    trained: Path, tmp_path: Path, name: str, change: Any, words: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    lines = (tmp_path / "run" / name).read_text().splitlines(keepends=True)
    (tmp_path / "run" / name).write_text("".join(change(lines)))
    with pytest.raises(UserError, match=words):
        replay(tmp_path / "run")
    assert diagnose(tmp_path / "run") == ()  # what a finished run asks must not end it


def test_a_replay_that_ends_early_says_so(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Sampler.generate

    def stops(self: Sampler, *args: Any, **kwargs: Any) -> Any:
        if kwargs["step"] == 2:
            raise jaxrl.StopTraining("no more")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Sampler, "generate", stops)
    with pytest.raises(RunError, match=r"ended after step 2 of 4: .* raised StopTraining"):
        replay(trained)


def test_the_step_that_differs_before_the_one_asked_for(trained: Path, tmp_path: Path) -> None:
    """Is told, and no step is shown that is not the one."""
    shutil.copytree(trained, tmp_path / "run")
    rows = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[3]["loss"] += 1e-7
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay(tmp_path / "run", 4, ["policy.entropy_coef=0.5"])
    assert found.differs_at == 3 and found.step is None and found.changed is None


def test_events_of_a_lost_sampler_that_come_late_are_left_out(tmp_path: Path) -> None:
    record = StreamRecord(tmp_path, None, print)

    def add(sampler: str, first: int, *numbers: int) -> None:
        events = tuple(StreamEvent("load", number, 1) for number in numbers)
        record.add(StreamEvents(sampler, first, events))

    add("a", 0, 0, 1)
    add("b", 0, 2)
    add("a", 1, 1, 9)
    add("b", 2, 4)  # waits for the one before it
    add("b", 0, 2, 3)
    calls = [(event.call, event.number) for event in read_record(tmp_path)]
    assert calls == [
        *[("load", 0), ("load", 1), ("restart", 0)],
        *[("load", 2), ("load", 3), ("load", 4)],
    ]
    assert record.lines == 6
