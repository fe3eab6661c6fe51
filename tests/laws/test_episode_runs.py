"""Whole runs with an environment: what it said counts after kill -9, with both launchers."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from runs import AS_TRAINED, CONSTANT, SHORT, numbers, start, unlisted_files, wait_for, weights

from jaxrl import Config
from jaxrl.telemetry.metrics import read_metrics
from jaxrl.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")

DICE = '''
"""Draws random numbers; stops in the middle of an episode after step 2, once its checkpoint is
there."""
import asyncio
import random
import time
from pathlib import Path

import psutil

from jaxrl.environments import Answer, Environment


class Dice(Environment):
    turn = 0

    async def step(self, text, messages):
        await asyncio.sleep(random.random() * 0.02)
        self.turn += 1
        here = Path(__file__).parent
        trained = (here / "run" / "episodes").glob("train-[23].jsonl")
        if self.turn == 2 and any(trained) and not (here / "resumed").exists():
            while not (here / "run" / "checkpoints" / "2").exists():
                await asyncio.sleep(0.01)
            STOP
        if self.turn == 3:
            return Answer(reward=random.random(), done=True)
        return Answer(f"{random.randrange(100)}+", reward=random.random())
'''
WAITS = '(here / "stopped").touch(), time.sleep(100)'
KILLS = '(here / "resumed").touch(), psutil.Process().parents()[1].kill()'
"""The process that samples."""


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    (tmp_path / "dice.py").write_text(DICE.replace("STOP", WAITS))
    return [
        *("student.model=builtin:student", "teacher.model=null", "algorithm=grpo"),
        *(*SHORT, *AS_TRAINED, "steps=3", "batch_size=4", "checkpoint.every=2"),
        *("data.train=arithmetic", "data.eval=arithmetic", "eval.every=2", "eval.prompts=4"),
        "mesh=actor+rollout=1",
        *("max_new_tokens=48", "environment.turn_tokens=12", "environment.workers=1"),
        *(f"environment.name={tmp_path / 'dice.py'}:Dice", "environment.credit=turn"),
        *("environment.timeout=200", "logging.every=1", *CONSTANT),
        "optimizer.learning_rate=1e-4",  # at the quickstart's, random rewards can unlearn EOS
    ]


def recorded(run_dir: Path) -> dict[tuple[Any, ...], Any]:
    """What the environments said in each batch."""
    found = {}
    for file in (run_dir / "episodes").glob("train-*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            found[file.name, *row.pop("place")] = row
    return found


def trained(run_dir: Path) -> list[dict[str, Any]]:
    """What does not depend on when environments answer, nor on those of evaluations."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("eval/", "rollout/decode_steps"))}
        for row in numbers(read_metrics(run_dir))
    ]


def before_its_end(run_dir: Path) -> Path:
    """A copy of a run as it was at checkpoint 2, with all that its environments said."""
    again = run_dir.parent / "again"
    shutil.copytree(run_dir, again)
    shutil.rmtree(again / "checkpoints" / "3")
    shutil.rmtree(again / "final")
    return again


def test_a_killed_run_hears_the_same_again(given: list[str], tmp_path: Path) -> None:
    """Killed in the middle of a batch's episodes, the run goes on with what its random environments
    had said; and with all that they said it gives the same weights, bit for bit."""
    run_dir = tmp_path / "run"
    process = start(given, run_dir, *given)
    wait_for(tmp_path / "stopped", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = recorded(run_dir)
    assert any(turn == 0 for *_, turn in before), "some turns were answered"
    (tmp_path / "resumed").touch()

    def resume(folder: Path) -> None:
        train(Config.load("builtin:quickstart", [*given, f"run_dir={folder}"]))

    resume(run_dir)
    after = recorded(run_dir)
    assert {key: after[key] for key in before if key in after} == {
        key: before[key] for key in before if key in after
    }
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(4))
    assert unlisted_files(run_dir) == set()
    shown = [json.loads(line) for line in (run_dir / "samples.jsonl").open()]
    turns = [turn for one in shown if one["split"] == "train" for turn in one["turns"]]
    assert {turn["role"] for turn in turns} == {"assistant", "user"}
    for turn in turns:  # each has an advantage of its own (credit=turn)
        ours = turn["role"] == "assistant"
        assert turn["learned"] == ours and ("advantage" in turn) == ours
    again = before_its_end(run_dir)
    resume(again)
    assert weights(again) == weights(run_dir)
    assert trained(again) == trained(run_dir)


@pytest.mark.slow
@pytest.mark.ray
def test_a_rollout_that_is_killed_hears_the_same_again(given: list[str], tmp_path: Path) -> None:
    """Killed in the middle of a batch's episodes, a worker process comes back, and the run gives
    the weights that threads give with all that its random environments said, bit for bit. By
    default tests/laws/test_ray_train.py kills a worker that samples, and the test before this hears
    an environment again."""
    (tmp_path / "dice.py").write_text(DICE.replace("STOP", KILLS))
    run_dir = tmp_path / "run"
    given = [*given, "data.eval=null"]
    process = start(given, run_dir, *given, "mesh=actor=1,rollout=1", "launcher=ray")
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "worker rollout" in out and "is back after" in out, out
    again = before_its_end(run_dir)
    train(Config.load("builtin:quickstart", [*given, f"run_dir={again}"]))
    assert weights(again) == weights(run_dir)
