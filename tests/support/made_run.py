"""A made-up run directory whose every figure is known, written by the run's own writers."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.plan import make_plan
from jaxrl.plan.table import PLAN_DATA_FILE, plan_json
from jaxrl.process.json_types import JsonObject
from jaxrl.run.run_dir import SESSIONS_FILE
from jaxrl.telemetry.metrics import (
    METRICS_FILE,
    SAMPLES_FILE,
    JsonLines,
    MetricsWriter,
    Sample,
    write_samples,
)
from jaxrl.telemetry.timeline import TIMELINE_FILE, Timeline

STEPS, EVERY = 41, 10
"""Steps, and those from one evaluation to the next."""
GENERATE, SCORE, UPDATE, PUBLISH, LOAD = 0.100, 0.050, 0.150, 0.010, 0.005
"""Seconds of the calls of a step, one after the other."""
PAUSE, PAUSED = 2.0, 20
"""Seconds in which no pool works, before this step is generated."""
LOST = 7
"""The step whose gradient norm is not finite."""
PEAK = 50_000_000
"""Measured bytes of the actor at the end; the other roles' peaks are the plan's."""
HARMFUL = '</script><script>window.harmed = 1</script><img src="x:y" onerror="window.harmed = 1">'
"""The completion of the second sample of each step."""


def make_run(path: Path, *overrides: str) -> Path:
    """Distillation in three pools, with everything that a run writes."""
    path.mkdir()
    config = Config.load(None, [f"steps={STEPS}", "mesh=actor=2,rollout=2,teacher=4", *overrides])
    (path / CONFIG_FILE).write_text(config.dump(), encoding="utf-8")
    plan = make_plan(config, needed_roles(config), limit_gb=2.0)
    (path / PLAN_DATA_FILE).write_text(plan_json(plan), encoding="utf-8")
    write_metrics(path / METRICS_FILE)
    write_made_samples(path / SAMPLES_FILE)
    write_timeline(path / TIMELINE_FILE)
    about = {"at": "2026-01-02T03:04:05+00:00", "host": "host", "version": "1.2"}
    sessions = [
        {"step": step, "mesh": config.mesh, "command": "jaxrl train", **about} for step in (0, 20)
    ]
    (path / SESSIONS_FILE).write_text("".join(json.dumps(one) + "\n" for one in sessions))
    return path


def divergence(step: int) -> float:
    return 1 / step


def accuracy(step: int) -> float:
    return 0.1 + 0.02 * step


def write_metrics(path: Path) -> None:
    with MetricsWriter(path) as writer:
        writer.write(0, evaluation(0) | {"teacher/accuracy": 0.99})
        for step in range(1, STEPS + 1):
            row = {
                "distill/divergence": divergence(step),
                "distill/top1_agreement": 0.5 + step / 100,
                "actor/grad_norm": float("nan") if step == LOST else 2.0 + step % 5,
                "actor/learning_rate": 1e-3,
                "actor/tokens": 100,
                "memory/actor/peak_bytes": PEAK - STEPS + step,
                "memory/actor/planned": 0,
                "memory/rollout/peak_bytes": 1e6,
                "memory/rollout/planned": 1,
                "time/step_s": 0.315,
                "tokens/per_second": 1000.0 + step,
            }
            writer.write(step, row | (evaluation(step) if step % EVERY == 0 else {}))


def evaluation(step: int) -> dict[str, float]:
    at = accuracy(step)
    ends = {"eval/accuracy_low": at - 0.03, "eval/accuracy_high": at + 0.05}
    return {"eval/accuracy": at, **ends, "eval/unjudged": 0}


def write_made_samples(path: Path) -> None:
    with JsonLines(path) as file:
        for step in range(1, STEPS + 1):
            write_samples(file, [sample(step, number) for number in range(2)])


TOLD = 9
"""Step whose first completion has turns."""
TURNS: tuple[JsonObject, ...] = (
    {"role": "assistant", "content": "<tool_call>", "learned": True, "advantage": -0.5},
    {"role": "tool", "content": "<b>sunny</b>", "learned": False, "reward": None},
    {"role": "assistant", "content": f"completion {TOLD}", "learned": True, "reward": 1.0},
)


def sample(step: int, number: int) -> Sample:
    return Sample(
        step=step,
        split="train",
        prompt=f"prompt {step}.{number} <b>&amp;",
        completion=HARMFUL if number else f"completion {step}",
        finish_reason="length" if number else "stop",
        tokens=5 + number,
        policy_version=step - 1,
        answer="42",
        score=float(1 - number),
        reward=step + 0.5 * number,
        agreement=None if number else 0.75,
        turns=TURNS if (step, number) == (TOLD, 0) else None,
        learned=0 if number else 5,
        rewards={"exact": step, "a_reward_of_a_long_name": 0.5 * number},
        advantage=0.5 - number,
    )


def write_timeline(path: Path) -> None:
    with Timeline(path) as timeline:
        at = time.monotonic()

        def call(role: str, method: str, seconds: float, **args: int) -> None:
            nonlocal at
            timeline.span(role, method, at, at + seconds, **args)
            timeline.span(f"worker {role}", f"{role}.{method}", at, at + seconds)
            at += seconds

        call("actor", "publish", PUBLISH, version=0)
        call("rollout", "load", LOAD)
        for index in range(STEPS):
            at += PAUSE if index + 1 == PAUSED else 0
            call("rollout", "generate", GENERATE, step=index)
            call("teacher", "score", SCORE, part=0)
            call("actor", "update", UPDATE, step=index)
            call("actor", "publish", PUBLISH, version=index + 1)
            call("rollout", "load", LOAD)


def event(name: str, start: int, end: int, **args: Any) -> dict[str, Any]:
    role, _, method = name.partition(".")
    return {
        "ph": "X", "cat": role, "name": method, "ts": start, "dur": end - start, "args": args
    }  # fmt: skip


def make_long_run(path: Path, steps: int) -> None:
    path.mkdir()
    noise = random.Random(1)
    names = ["distill/divergence", *(f"reward/r{i}/mean" for i in range(20))]
    with open(path / METRICS_FILE, "w") as metrics, open(path / TIMELINE_FILE, "w") as trace:
        trace.write("[\n")
        for step in range(1, steps + 1):
            row = {"step": step} | {name: noise.gauss(0, 1) for name in names}
            metrics.write(json.dumps(row) + "\n")
            calls = (
                "rollout.generate",
                "teacher.score",
                "actor.update",
                "actor.publish",
                "rollout.load",
            )
            for place, name in enumerate(calls):
                start = step * 1_000_000 + place * 200_000
                told = event(name, start, start + 190_000, step=step - 1)
                trace.write("," + json.dumps(told) + "\n")
        trace.write("]\n")
