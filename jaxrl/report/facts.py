"""What a reader wants to know of a run first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from statistics import fmean, median
from typing import Any

from jaxrl.config.keys import keys
from jaxrl.config.schema import Config
from jaxrl.report.idle import Activity
from jaxrl.report.read import RunFiles
from jaxrl.run.run_dir import meshes

ENDS = 5
"""Steps whose mean stands for the beginning and for the end of a noisy metric."""
RATES = ("eval/accuracy", "distill/top1_agreement")
"""Shown as per cent, as the console does."""
NOISY = ("reward/mean", "distill/divergence", "distill/top1_agreement", "sft/loss")
PLACES = ("run_dir", "name", "resume")
"""Keys that say where a run is, and not what it is."""


def facts(run: RunFiles, use: Activity) -> dict[str, str]:
    """Heading -> text; what the run has not told is left out."""
    told = {"state": state(run), "wall time": wall_time(run, use)}
    told |= {name: str(run.config.get(name, "")) for name in ("algorithm", "schedule", "mesh")}
    told["mesh"] = meshes(run.sessions) or told["mesh"]
    told |= {"models": _models(run), "data": _data(run), "batch": _batch(run)}
    told["held-out accuracy"] = _accuracy(run.rows)
    for name in NOISY:
        told[name] = _first_and_last(run.rows, name)
    told["speed"] = _speed(run.rows)
    return {heading: text for heading, text in told.items() if text}


def state(run: RunFiles) -> str:
    """Whether it has ended, is going on, or was cut."""
    of = "" if run.wanted is None else f" of {run.wanted}"
    if run.running:
        return f"going on: step {run.steps}{of} at {datetime.now():%Y-%m-%d %H:%M}"
    if not run.rows:
        return "no step was told"
    if run.steps == run.wanted:
        return f"ended: all of its {run.steps} steps"
    return f"cut at step {run.steps}{of}"


def wall_time(run: RunFiles, use: Activity) -> str:
    """From the first call to the last, by the timeline; else the steps alone."""
    if use.pools:
        told = clock(use.pools[0].window / 1e6)
        return told if len(use.sessions) < 2 else f"{told} in {len(use.sessions)} sessions"
    steps = _values(run.rows, "time/step_s")
    return f"{clock(sum(steps))} of steps" if steps else ""


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _models(run: RunFiles) -> str:
    """The student's, and those of the other roles that the plan places."""
    placed = [role["role"] for role in run.plan["roles"]] if run.plan else []
    found = {role: run.config.get(f"{role}.model") for role in ("student", *placed)}
    if found.get("teacher") is None and "teacher" in placed:
        found["teacher"] = run.config.get("teacher.address")
    return ", ".join(f"{role} {model}" for role, model in found.items() if model)


def _data(run: RunFiles) -> str:
    named = run.config.get("data.train")
    return ", ".join(map(str, named)) if isinstance(named, list) else str(named or "")


def _batch(run: RunFiles) -> str:
    size = [run.config.get(key) for key in ("batch_size", "group_size", "max_new_tokens")]
    if None in size:
        return ""
    return f"{size[0]} prompts x {size[1]}, up to {size[2]} new tokens"


def _accuracy(rows: Sequence[Any]) -> str:
    """The first and the last, with their 95% intervals."""
    told = [row for row in rows if row.get("eval/accuracy") is not None]
    teacher = next(iter(_values(rows, "teacher/accuracy")), None)
    texts = [
        f"{row['eval/accuracy']:.1%}{_interval(row)} at step {row['step']}"
        for row in (told[:1] + told[-1:] if len(told) > 1 else told)
    ]
    return " → ".join(texts) + ("" if teacher is None else f"; the teacher {teacher:.1%}")


def _interval(row: Any) -> str:
    low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
    return "" if low is None or high is None else f" ({low:.1%} to {high:.1%})"


def _first_and_last(rows: Sequence[Any], name: str) -> str:
    values = _values(rows, name)
    if len(values) < 2 * ENDS:
        return " → ".join(_number(name, v) for v in dict.fromkeys(values[:1] + values[-1:]))
    first, last = fmean(values[:ENDS]), fmean(values[-ENDS:])
    ends = f"{_number(name, first)} → {_number(name, last)}"
    return f"{ends}, means of the first and last {ENDS} steps"


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if name in RATES else f"{value:.4g}"


def _speed(rows: Sequence[Any]) -> str:
    steps, tokens = _values(rows, "time/step_s"), _values(rows, "tokens/per_second")
    if not steps or not tokens:
        return ""
    return (
        f"{median(tokens):,.0f} tokens/s, {median(steps):.3g} s a step (medians);"
        f" the first step {steps[0]:.3g} s"
    )


def _values(rows: Sequence[Any], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def changed_keys(run: RunFiles) -> dict[str, tuple[Any, Any]]:
    """Key -> (the run's value, the default), where they differ; None where no key has that name."""
    defaults = {key.path: _plain(key.default) for key in keys(Config)}
    found = {}
    for key, value in run.config.items():
        if key not in PLACES and value != defaults.get(key):
            found[key] = (value, defaults.get(key))
    return found


def differing_keys(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Key -> the value of each run, where they differ."""
    names = dict.fromkeys(key for run in runs for key in run.config if key not in PLACES)
    values = {name: [run.config.get(name) for run in runs] for name in names}
    return {
        name: found for name, found in values.items() if any(value != found[0] for value in found)
    }


def _plain(default: Any) -> Any:
    """As it is read back from YAML."""
    return list(default) if isinstance(default, tuple) else default
