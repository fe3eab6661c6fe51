"""What a reader wants to know of a run first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from statistics import fmean, median

from jaxrl.config.keys import keys
from jaxrl.config.schema import Config
from jaxrl.report.idle import Activity
from jaxrl.report.read import RunFiles
from jaxrl.run.run_dir import meshes
from jaxrl.types import Row

Rows = Sequence[Row]

ENDS = 5
"""Steps whose mean stands for the beginning and for the end of a noisy metric."""
RATES = ("eval/accuracy", "distill/top1_agreement")
"""Metrics shown as per cent, as the console does."""
NOISY = ("reward/mean", "distill/divergence", "distill/top1_agreement", "sft/loss")
PLACES = ("run_dir", "name", "resume")
"""Keys that say where a run is, not what it is."""


def facts(run: RunFiles, activity: Activity) -> dict[str, str]:
    """Maps headings to text; what nothing is known of is left out."""
    config = run.config
    found = {
        "state": state(run),
        "wall time": wall_time(run, activity),
        "algorithm": config.get("algorithm"),
        "schedule": config.get("schedule"),
        "mesh": meshes(run.sessions) or config.get("mesh"),
        "models": _models(run),
        "data": _data(config.get("data.train")),
        "batch": _batch(*map(config.get, ("batch_size", "group_size", "max_new_tokens"))),
        "held-out accuracy": _accuracy(run.rows),
        **{name: _first_and_last(run.rows, name) for name in NOISY},
        "speed": _speed(run.rows),
    }
    return {heading: str(text) for heading, text in found.items() if text}


def state(run: RunFiles) -> str:
    """Says whether the run has ended, is going on, or was cut."""
    of = "" if run.wanted is None else f" of {run.wanted}"
    if run.running:
        return f"going on: step {run.steps}{of} at {datetime.now():%Y-%m-%d %H:%M}"
    if not run.rows:
        return "no step was recorded"
    if run.steps == run.wanted:
        return f"ended: all of its {run.steps} steps"
    return f"cut at step {run.steps}{of}"


def wall_time(run: RunFiles, activity: Activity) -> str:
    """Returns the time from the first call to the last, by the timeline; else that of the steps
    alone."""
    if activity.pools:
        time, parts = clock(activity.pools[0].window / 1e6), len(activity.sessions)
        return time if parts < 2 else f"{time} in {parts} sessions"
    steps = _values(run.rows, "time/step_s")
    return f"{clock(sum(steps))} of steps" if steps else ""


def clock(seconds: float) -> str:
    """Formats seconds as `12.3 s` or `1:02:03`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _models(run: RunFiles) -> str:
    """Lists the student's model, and those of the other roles that the plan places."""
    placed = [role["role"] for role in run.plan["roles"]] if run.plan else []
    found = {role: run.config.get(f"{role}.model") for role in ("student", *placed)}
    found |= {
        key.removeprefix("teachers.").rpartition(".")[0]: model
        for key, model in run.config.items()
        if model is not None and re.fullmatch(r"teachers\..+\.(model|address)", key)
    }
    if found.get("teacher") is None and "teacher" in placed:
        found["teacher"] = run.config.get("teacher.address") or run.config.get("teacher.cache")
    return ", ".join(f"{role} {model}" for role, model in found.items() if model)


def _data(sources: object) -> str:
    return ", ".join(map(str, sources)) if isinstance(sources, list) else str(sources or "")


def _batch(prompts: int | None, group: int | None, tokens: int | None) -> str:
    if None in (prompts, group, tokens):
        return ""
    return f"{prompts} prompts x {group}, up to {tokens} new tokens"


def _accuracy(rows: Rows) -> str:
    """Returns the first and the last accuracy, with their 95% intervals."""
    found = [row for row in rows if row.get("eval/accuracy") is not None]
    teacher = next(iter(_values(rows, "teacher/accuracy")), None)
    texts = [
        f"{row['eval/accuracy']:.1%}{_interval(row)} at step {row['step']}"
        for row in (found[:1] + found[-1:] if len(found) > 1 else found)
    ]
    return " → ".join(texts) + ("" if teacher is None else f"; the teacher {teacher:.1%}")


def _interval(row: Row) -> str:
    low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
    return "" if low is None or high is None else f" ({low:.1%} to {high:.1%})"


def _first_and_last(rows: Rows, name: str) -> str:
    values = _values(rows, name)
    if len(values) < 2 * ENDS:
        ends, means = list(dict.fromkeys(values[:1] + values[-1:])), ""
    else:
        ends = [fmean(values[:ENDS]), fmean(values[-ENDS:])]
        means = f", means of the first and last {ENDS} steps"
    return " → ".join(f"{v:.1%}" if name in RATES else f"{v:.4g}" for v in ends) + means


def _speed(rows: Rows) -> str:
    steps, tokens = _values(rows, "time/step_s"), _values(rows, "tokens/per_second")
    if not steps or not tokens:
        return ""
    return (
        f"{median(tokens):,.0f} tokens/s, {median(steps):.3g} s a step (medians);"
        f" the first step {steps[0]:.3g} s"
    )


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def changed_keys(run: RunFiles) -> dict[str, tuple[object, object]]:
    """Maps each key to (the run's value, the default), where they differ; the default is None where
    no key has that name."""
    # As a default is read back from YAML.
    defaults = {
        key.path: list(key.default) if isinstance(key.default, tuple) else key.default
        for key in keys(Config)
    }
    return {
        key: (value, defaults.get(key))
        for key, value in run.config.items()
        if key not in PLACES and value != defaults.get(key)
    }


def differing_keys(runs: Sequence[RunFiles]) -> dict[str, list[object]]:
    """Maps each key to the value of each run, where they differ."""
    names = dict.fromkeys(key for run in runs for key in run.config if key not in PLACES)
    values = {name: [run.config.get(name) for run in runs] for name in names}
    return {
        name: found for name, found in values.items() if any(value != found[0] for value in found)
    }
