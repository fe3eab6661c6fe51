"""What `jaxrl.run.diagnosis` finds in runs that were kept, good ones and bad ones, and in made-up
ones: by `scripts/diagnosed_runs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl import Config
from jaxrl.run.diagnosis import FEWEST, findings

KEPT = json.loads((Path(__file__).parents[1] / "cases" / "diagnosis.json").read_text())
RUNS: dict[str, Any] = KEPT["runs"]
FOUND = {
    "lr_high": ["entropy of the policy is"],
    "tiny": ["was ever clipped"],
    "constant": [],  # its rewards are not kept: below
    "long": ["stop ending"],
    "entropy": ["reward was", "stop ending", "rose from"],
    "stale": ["samples and the one that learns", "stop ending", "reward was", "entropy of"],
    "bad_gkd": ["divergence from the teacher"],
}
"""Run -> what is said of it, and nothing else."""


def rows_of(name: str) -> list[dict[str, float]]:
    return [
        {metric: x for metric, x in zip(KEPT["metrics"], row, strict=True) if x is not None}
        for row in RUNS[name]["rows"]
    ]


def config_of(name: str) -> Config:
    run = RUNS[name]
    keys = [key for key in run["keys"] if "FOLDER" not in key]
    return Config.load(run["config"], keys)


def found_in(rows: list[dict[str, float]], name: str = "good", **batches: Any) -> list[str]:
    return list(findings(rows, batches.get("batches", {}), config_of(name), "runs/a"))


@pytest.mark.parametrize("name", RUNS)
def test_kept_runs_are_judged_rightly(name: str) -> None:
    found = found_in(rows_of(name), name)
    wanted = [] if name.startswith("good") else FOUND[name]
    assert len(found) == len(wanted) + bool(wanted), found
    for words in wanted:
        assert any(words in line for line in found), (words, found)
    if found:
        *lines, command = found
        steps = [int(line.split(":")[0].removeprefix("step ")) for line in lines]
        assert steps == sorted(steps) and f"jaxrl replay runs/a --step {steps[0]} " in command


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_said_of_a_few_steps(name: str) -> None:
    assert found_in(rows_of(name)[:FEWEST], name) == []


@pytest.mark.parametrize("name", ["lr_high", "entropy", "stale", "bad_gkd"])
def test_a_run_that_recovers_is_no_longer_named_for_how_it_ends(name: str) -> None:
    """What a bad run does is followed by a good one of twice its length."""
    bad, good = rows_of(name), rows_of("good_gkd" if "gkd" in name else "good")
    rows = [
        row | {"step": i} for i, row in enumerate([*good[:25], *bad[25:40], *good[25:], *good[25:]])
    ]
    found = found_in(rows, name)
    assert not any(word in line for line in found for word in ("stop ending", "is the same for"))


def test_a_reward_that_does_not_differ_within_groups() -> None:
    """For all completions of each prompt; others may have none."""
    config = config_of("good")
    draw = np.random.default_rng(0)
    groups, n = 8, config.group_size

    def batch(step: int, alike: bool) -> dict[str, Any]:
        each = draw.random((groups, 1 if alike else n))
        values = np.broadcast_to(each, (groups, n)).reshape(-1).tolist()
        values[0] = None
        return {"step": step, "functions": {"f": values}, "weights": {"f": 1.0}}

    for since in (1, 20, 50, None):
        batches = {step: batch(step, since is not None and step >= since) for step in range(1, 81)}
        found = found_in([], batches=batches)
        assert bool(found) == (since is not None)
        if since is not None:
            assert "the reward f is the same" in found[0]
            assert abs(int(found[0].split(":")[0].removeprefix("step ")) - since) <= 9


def test_skipped_updates() -> None:
    rows = rows_of("good")
    rows[33]["actor/skipped_updates"] = 1
    assert "step 33: updates of 1 step were skipped" in found_in(rows)[0]
