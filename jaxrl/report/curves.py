"""From the rows of runs to charts: which there are, in which order, and with what beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxrl.report.read import Row, RunFiles
from jaxrl.report.thin import evenly, thin
from jaxrl.telemetry.metrics import Metric, describe

FIRST = (
    "distill/divergence",
    "distill/reverse_kl_k1",
    "sft/loss",
    "reward/mean",
    "distill/top1_agreement",
    "eval/accuracy",
    "policy/entropy",
    "policy/kl_k3",
    "policy/clip_fraction",
    "policy/mismatch_k3",
    "rollout/completion_tokens_mean",
    "actor/grad_norm",
    "tokens/per_second",
    "time/step_s",
)
"""What a reader looks at first; a run has those of them that its algorithm measures."""
GROUPS = (
    "eval",
    "distill",
    "sft",
    "reward",
    "policy",
    "similarity",
    "actor",
    "rollout",
    "tokens",
    "time",
    "weights",
    "memory",
    "offload",
    "checkpoint",
    "data",
)
"""Prefixes in the order of the page; others follow."""
POINTS = 800
"""Most points of a curve, where one run is drawn; several share them."""
FEWEST_POINTS = 200
MARKS = 100
"""Most steps at which a value that was not finite is marked."""
UNKNOWN = Metric("", "not in the table of metrics")


def charts(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Groups of charts for the page's script, most important first.

    A metric that has one value in each run is no chart: it stands in the group's `constants`.
    """
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    shown = [name for name in names if name != "step" and _interval_of(name) not in names]
    groups: dict[str, list[str]] = {"main": []}
    groups |= {title: [] for title in (*GROUPS, "run")}
    for name in shown:
        title = name.partition("/")[0] if "/" in name else "run"
        groups.setdefault("main" if name in FIRST else title, []).append(name)
    groups["main"].sort(key=FIRST.index)
    return [_group(title, members, runs) for title, members in groups.items() if members]


def _interval_of(name: str) -> str | None:
    """The metric of whose interval this is an end."""
    base, _, end = name.rpartition("_")
    return base if end in ("low", "high") else None


def _group(title: str, names: Sequence[str], runs: Sequence[RunFiles]) -> dict[str, Any]:
    constants = [name for name in names if _is_constant(name, runs)]
    return {
        "title": title,
        "charts": [_chart(name, runs) for name in names if name not in constants],
        "constants": [
            _told(name) | {"values": [_only(name, run) for run in runs]} for name in constants
        ],
    }


def _is_constant(name: str, runs: Sequence[RunFiles]) -> bool:
    return all(len({row[name] for row in run.rows if name in row}) <= 1 for run in runs)


def _only(name: str, run: RunFiles) -> float | None:
    return next((row[name] for row in run.rows if name in row), None)


def _told(name: str) -> dict[str, str]:
    metric = describe(name) or UNKNOWN
    return {"name": name, "unit": metric.unit, "meaning": metric.meaning}


def _chart(name: str, runs: Sequence[RunFiles]) -> dict[str, Any]:
    limit = max(FEWEST_POINTS, POINTS // len(runs))
    series = [_series(name, number, run.rows, limit) for number, run in enumerate(runs)]
    chart: dict[str, Any] = _told(name)
    chart["series"] = [each for each in series if each["x"] or each["lost"]]
    if name == "eval/accuracy":
        told = [(number, _only("teacher/accuracy", run)) for number, run in enumerate(runs)]
        chart["levels"] = [
            {"run": number, "y": value, "label": "teacher"}
            for number, value in told
            if value is not None
        ]
    return chart


def _series(name: str, number: int, rows: Sequence[Row], limit: int) -> dict[str, Any]:
    """x, y: points; mx, my: means to smooth, where they are others; low, high: 95% interval; lost:
    steps without a finite value.
    """
    steps = [row["step"] for row in rows if row.get(name) is not None]
    values = [value for row in rows if (value := row.get(name)) is not None]
    lost = [row["step"] for row in rows if name in row and row[name] is None]
    told: dict[str, Any] = {"run": number, "lost": evenly(lost, MARKS)}
    if name.startswith("eval/"):
        kept = set(evenly(range(len(steps)), limit))
        at = [i for i in range(len(steps)) if i in kept]
        told |= {"x": [steps[i] for i in at], "y": short([values[i] for i in at])}
        ends = {row["step"]: (row.get(f"{name}_low"), row.get(f"{name}_high")) for row in rows}
        told["low"] = short([ends[x][0] for x in told["x"]])
        told["high"] = short([ends[x][1] for x in told["x"]])
        return told
    curve = thin(steps, values, limit)
    told |= {"x": curve.steps, "y": short(curve.values)}
    if len(curve.steps) < len(steps):
        told |= {"mx": short(curve.mean_steps), "my": short(curve.means)}
    return told


def short(values: Sequence[float | None]) -> list[float | None]:
    """Six digits of each: more than a screen shows, in half the bytes."""
    return [None if v is None else v if isinstance(v, int) else float(f"{v:.6g}") for v in values]


def evaluated_steps(rows: Sequence[Row]) -> list[int]:
    """Steps whose rows have an evaluation."""
    steps = [row["step"] for row in rows if any(k.startswith("eval/") for k in row)]
    return evenly(steps, POINTS)
