"""Code of the user's ends a run early: it is saved and exported, says by whom it was stopped, and
goes on as if it had never been stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cases import and_slow
from runs import (
    ALONE,
    AS_TRAINED,
    CONSTANT,
    GSPO,
    QUICK,
    SHORT,
    WARMED,
    numbers,
    save_model,
    weights,
)

from jaxrl import Config, Result, StopTraining, train
from jaxrl.checkpoint import store
from jaxrl.config import cli
from jaxrl.environments.environment_pool import EnvironmentPool
from jaxrl.environments.environment_process import find as find_environment
from jaxrl.errors import UserError
from jaxrl.report.html_page import facts
from jaxrl.report.read import read_run
from jaxrl.report.timeline_lanes import understand
from jaxrl.rewards.functions import find as find_reward
from jaxrl.rewards.reward_pool import Item, RewardPool
from jaxrl.run.run_dir import sessions
from jaxrl.train import main

pytestmark = pytest.mark.usefixtures("shared_programs")
STEPS = 5
CODE = '''
import json
from pathlib import Path

import jaxrl
from jaxrl.environments import Answer, Environment

HERE = Path(__file__).parent
CALLS = HERE / "calls"


def asked(where):
    """Raises once, where the file `stop` says so: [in which place, at which call]."""
    with open(CALLS, "a") as file:
        file.write(where + "\\n")
    place, number = json.loads((HERE / "stop").read_text())
    if place == where and CALLS.read_text().split().count(where) >= number:
        (HERE / "stop").write_text('["", 0]')
        raise jaxrl.StopTraining("enough, \\u00e9nough")


def length(completions, prompts):
    asked("reward")
    return [float(len(c)) for c in completions]


async def waited(completions):
    try:
        asked("async")
    except Exception:
        return [0.0]
    return [float(len(c)) for c in completions]


class Steps(Environment):
    def __init__(self):
        asked("__init__")

    def reset(self, row):
        asked("reset")
        return row["prompt"]

    def step(self, text, messages):
        asked("step")
        return Answer("and", reward=float(len(text)), done=len(messages) > 2)

    def close(self):
        asked("close")
'''


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "student", 32, 1, seed=0)


def keys(student, run_dir, *overrides):
    """Of a run that learns from the functions of the file beside its folder."""
    code = Path(run_dir).parent / "code.py"
    code.write_text(CODE)
    if not (code.parent / "stop").exists():
        (code.parent / "stop").write_text('["", 0]')
    plain = [f"student.model={student}", f"steps={STEPS}", f"run_dir={run_dir}"]
    plain += ["checkpoint.every=0", "eval.every=0", f"reward.functions=[{code}:length]"]
    return [*SHORT, ALONE, *AS_TRAINED, *GSPO, *WARMED, *plain, *overrides]


def run(student, run_dir, *overrides, on_step=None):
    words = keys(student, run_dir, *overrides)
    return train(Config.load("builtin:quickstart", words), on_step)


@pytest.fixture(scope="module")
def whole(student, tmp_path_factory):
    """The run that nobody stops, by its schedule."""
    done = {}

    def get(schedule, *overrides):
        if (schedule, overrides) not in done:
            folder = tmp_path_factory.mktemp("whole")
            asked = f"schedule={schedule}"
            done[schedule, overrides] = run(student, folder / "run", asked, *overrides)
        return done[schedule, overrides]

    return get


def stop_at(tmp_path, place, number):
    (tmp_path / "stop").write_text(json.dumps([place, number]))


def plain_numbers(result):
    """What depends neither on when the run ended, which is when it is evaluated, nor on when
    environments answer."""
    left_out = ("eval/", "rollout/decode_steps")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in numbers(result)]


def check(tmp_path, result, by, in_flight):
    """A run that was stopped has said so, and left all that a finished one does."""
    folder = tmp_path / "run"
    stopped, checkpoint = result.stopped, store.newest(folder, print)
    assert stopped is not None and stopped["message"] == "enough, énough"
    assert by in stopped["by"] and 0 < stopped["step"] < STEPS
    assert stopped == sessions(folder)[-1]["stopped"]
    assert stopped["step"] == checkpoint.step == result.metrics[-1]["step"]
    assert len(checkpoint.manifest.in_flight) == in_flight
    assert checkpoint.manifest.schedule["generated"] == checkpoint.step + in_flight
    assert (folder / "final" / "config.json").exists()
    told = f"stopped at step {stopped['step']} of {STEPS} by {stopped['by']}: enough, énough"
    assert told in (folder / "log.txt").read_text()
    files = read_run(folder)
    assert facts(files, understand(files.events))["state"] == told


@pytest.mark.parametrize(
    ("schedule", "place"),
    and_slow(
        [("serial", "reward"), ("one_step_off", "reward"), ("one_step_off", "on_step")],
        [("serial", "on_step"), ("two_step_off", "reward"), ("two_step_off", "on_step")],
    ),
)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(student, tmp_path, whole, schedule, place):
    """No completion of the batch whose reward raised has lost its reward: the batch is scored
    again."""
    seen = []

    def on_step(row):
        seen.append(row["step"])
        if row["step"] == 2:
            raise StopTraining("enough, énough")

    stop_at(tmp_path, place, 6)  # the batches have 24 completions, a call up to 16 of them
    asked = [f"schedule={schedule}"]
    hears = on_step if place == "on_step" else None
    if hears:
        result = run(student, tmp_path / "run", *asked, on_step=hears)
    else:
        command = [*QUICK, *keys(student, tmp_path / "run", *asked)]
        assert cli.run(main, command) == 0
        result = Result(tmp_path / "run")
    assert seen in ([], [0, 1, 2])
    ahead = min({"serial": 0, "one_step_off": 1}.get(schedule, 2), STEPS - result.stopped["step"])
    by = "on_step" if hears else "reward.functions: "
    check(tmp_path, result, by, ahead)
    if place == "reward":
        assert result.stopped["by"].endswith("code.py:length")
        # two_step_off scores the third batch before the second update begins, if not as it does.
        assert result.stopped["step"] in ((1, 2) if schedule == "two_step_off" else (2,))
    again = run(student, tmp_path / "run", *asked)
    assert again.stopped is None and "stopped" in sessions(tmp_path / "run")[0]
    undisturbed = whole(schedule)
    assert plain_numbers(again) == plain_numbers(undisturbed)
    assert weights(again.run_dir) == weights(undisturbed.run_dir)


def test_a_run_that_is_stopped_before_its_first_update_leaves_no_model(student, tmp_path, capsys):
    """And starts over."""
    stop_at(tmp_path, "async", 1)
    words = keys(student, tmp_path / "run", "steps=2")
    words.append(f"reward.functions=[{tmp_path / 'code.py'}:waited]")
    assert cli.run(main, [*QUICK, *words]) == 0
    assert "nothing was trained" in capsys.readouterr().out
    result = Result(tmp_path / "run")
    assert result.stopped["step"] == 0
    assert not (tmp_path / "run" / "final").exists() and not store.folders(tmp_path / "run")
    again = train(Config.load("builtin:quickstart", words))
    assert again.stopped is None and again.metrics[-1]["step"] == 2


def episodes(folder, schedule):
    """Of runs whose model ends turns with EOS."""
    words = ["student.model=builtin:student", "batch_size=4", "max_new_tokens=48"]
    words += ["environment.turn_tokens=12", "environment.workers=1", "environment.max_turns=3"]
    words += [f"environment.name={folder / 'code.py'}:Steps", f"schedule={schedule}"]
    return [*words, "optimizer.learning_rate=1e-4", "reward.functions=[]", *CONSTANT]


@pytest.mark.parametrize(
    ("schedule", "place", "number"),
    and_slow(
        [("one_step_off", "step", 100)],
        [("serial", "step", 100), ("serial", "reset", 50), ("serial", "close", 40)],
    ),
)
def test_an_environment_stops_a_run(student, tmp_path, schedule, place, number):
    """All roles have one device here, so that the batch that it stopped is generated again with
    the weights that it was generated with."""
    (tmp_path / "whole").mkdir()
    once = run(student, tmp_path / "whole" / "run", *episodes(tmp_path / "whole", schedule))
    stop_at(tmp_path, place, number)
    result = run(student, tmp_path / "run", *episodes(tmp_path, schedule))
    check(tmp_path, result, "environment.name: ", 1 if schedule == "one_step_off" else 0)
    again = run(student, tmp_path / "run", *episodes(tmp_path, schedule))
    assert plain_numbers(again) == plain_numbers(once)
    assert weights(again.run_dir) == weights(once.run_dir)


@pytest.mark.slow
@pytest.mark.ray
def test_a_worker_of_a_cluster_stops_a_run(student, tmp_path, whole):
    stop_at(tmp_path, "reward", 6)
    result = run(student, tmp_path / "run", "schedule=one_step_off", "launcher=ray")
    check(tmp_path, result, "reward.functions: ", 1)
    assert result.stopped["step"] == 2
    again = run(student, tmp_path / "run", "schedule=one_step_off", "launcher=ray")
    assert weights(again.run_dir) == weights(whole("one_step_off").run_dir)


def test_functions_and_environments_raise_it_through_their_processes(tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    source = find_reward(f"{tmp_path / 'code.py'}:waited")
    stop_at(tmp_path, "async", 3)
    limits = {"workers": 2, "timeout": 20, "startup": 60}
    with RewardPool([source], **limits) as pool:
        items = [Item("p", text, None, {}) for text in ("a", "bb", "ccc", "dddd")]
        with pytest.raises(StopTraining, match="enough") as stop:
            pool.judge(0, items).result()
        assert stop.value.by == f"reward.functions: {source.text}"
        with pytest.raises(StopTraining):  # also whatever is asked afterwards
            pool.judge(0, items[:1]).result()
    stop_at(tmp_path, "__init__", 1)
    source = find_environment(f"{tmp_path / 'code.py'}:Steps")
    told = pytest.raises(UserError, match="StopTraining while loaded: enough")
    with EnvironmentPool(source, **limits) as pool, told:
        pool.facts()
