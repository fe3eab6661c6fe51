"""From the rows of runs to charts: which there are, in which order, and with what beside them.

Curves of many steps are drawn in few points, so that no spike is lost and no mean is shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import TypeVar

from jaxrl.process.json_types import JsonObject
from jaxrl.report.read import RunFiles
from jaxrl.telemetry.metrics import Metric, describe
from jaxrl.types import Row

T = TypeVar("T")
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
    *("main", "eval", "distill", "sft", "reward", "policy", "similarity", "actor", "rollout"),
    *("tokens", "time", "weights", "memory", "offload", "checkpoint", "data", "run"),
)
"""Titles in the order of the page, prefixes of metrics' names but for the first and the last;
others follow.
"""
POINTS = 800
"""Most points of a curve, where one run is drawn; several share them."""
FEWEST_POINTS = 200
MARKS = 100
"""Most steps at which a value that was not finite is marked."""
UNKNOWN = Metric("", "not in the table of metrics")


def charts(runs: Sequence[RunFiles]) -> list[JsonObject]:
    """Returns groups of charts for the page's script, most important first.

    A metric that has one value in each run is no chart: it stands in the group's `constants`.
    """
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    groups: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in names:
        base, _, end = name.rpartition("_")
        if name == "step" or (end in ("low", "high") and base in names):  # end of an interval
            continue
        title = name.partition("/")[0] if "/" in name else "run"
        groups.setdefault("main" if name in FIRST else title, []).append(name)
    groups["main"].sort(key=FIRST.index)
    return [_group(title, members, runs) for title, members in groups.items() if members]


def _group(title: str, names: Sequence[str], runs: Sequence[RunFiles]) -> JsonObject:
    group: JsonObject = {"title": title, "charts": [], "constants": []}
    for name in names:
        metric = describe(name) or UNKNOWN
        described = {"name": name, "unit": metric.unit, "meaning": metric.meaning}
        each = [{row[name] for row in run.rows if name in row} for run in runs]
        if all(len(values) <= 1 for values in each):
            values = [next(iter(values), None) for values in each]
            group["constants"].append(described | {"values": values})
        else:
            limit = max(FEWEST_POINTS, POINTS // len(runs))
            series = [_series(name, number, run.rows, limit) for number, run in enumerate(runs)]
            chart = described | {"series": [line for line in series if line["x"] or line["lost"]]}
            if name == "eval/accuracy":
                chart["levels"] = [
                    {"run": number, "y": row["teacher/accuracy"], "label": "teacher"}
                    for number, run in enumerate(runs)
                    for row in [row for row in run.rows if "teacher/accuracy" in row][:1]
                    if row["teacher/accuracy"] is not None
                ]
            group["charts"].append(chart)
    return group


def _series(name: str, number: int, rows: Sequence[Row], limit: int) -> JsonObject:
    """Returns a series: x, y are points; mx, my are means to smooth, where they differ; low, high
    are the 95% interval; lost are steps without a finite value."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    lost = [row["step"] for row in rows if name in row and row[name] is None]
    series: JsonObject = {"run": number, "lost": evenly(lost, MARKS)}
    if name.startswith("eval/"):
        kept = evenly(found, limit)
        ends = {row["step"]: [row.get(f"{name}_{end}") for end in ("low", "high")] for row in rows}
        series |= {"x": [x for x, _ in kept], "y": short([y for _, y in kept])}
        return series | {
            end: short([ends[x][i] for x, _ in kept]) for i, end in enumerate(("low", "high"))
        }
    curve = thin([step for step, _ in found], [value for _, value in found], limit)
    series |= {"x": curve.steps, "y": short(curve.values)}
    if len(curve.steps) < len(found):
        series |= {"mx": short(curve.mean_steps), "my": short(curve.means)}
    return series


def short(values: Sequence[float | None]) -> list[float | None]:
    """Rounds each value to six digits: more than a screen shows, in half the bytes."""
    return [None if v is None else v if isinstance(v, int) else float(f"{v:.6g}") for v in values]


def evaluated_steps(rows: Sequence[Row]) -> list[int]:
    """Steps whose rows have an evaluation."""
    steps = [row["step"] for row in rows if any(name.startswith("eval/") for name in row)]
    return evenly(steps, POINTS)


@dataclass(frozen=True)
class Curve:
    """Values over steps, as they are drawn."""

    steps: list[int]
    values: list[float]
    mean_steps: list[float]
    """Where the means belong: the middle of the steps that each is over."""
    means: list[float]
    """What is smoothed; the values themselves where nothing was thinned."""


def thin(steps: Sequence[int], values: Sequence[float], limit: int) -> Curve:
    """Thins values to at most `limit` (4 at the least): the first, the last, and the lowest and the
    highest of each stretch of equally many values; also returns the mean of each stretch."""
    n = len(steps)
    if n <= limit:
        return Curve(list(steps), list(values), [float(s) for s in steps], list(values))
    size = ceil(n / max(1, (limit - 2) // 2))
    stretches = [range(start, min(start + size, n)) for start in range(0, n, size)]
    extremes = {pick(here, key=values.__getitem__) for here in stretches for pick in (min, max)}
    kept = sorted({0, n - 1} | extremes)
    return Curve(
        [steps[i] for i in kept],
        [values[i] for i in kept],
        [fmean(steps[i] for i in here) for here in stretches],
        [fmean(values[i] for i in here) for here in stretches],
    )


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Picks at most `limit` (2 at the least) of the items: the first, the last, and those that lie
    as evenly between them as possible."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]
