"""Draws the curves of runs: divergence, loss or reward, accuracy and the teacher's, speed; or the
metrics asked for. Runs that differ in nothing but the seed are one curve, their mean.

The band is from the lowest to the highest of these runs, and of a run alone the 95% interval of an
accuracy; named held-out sets and pass@k have panels too.

    python -m jaxrl.telemetry.plot RUN [RUN ...] -o curves.png --metrics reward/mean,eval/accuracy

A RUN is a run directory or a metrics.jsonl. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import filter as fitting
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.config import cli, yaml_text
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.errors import UserError, near, user_path
from jaxrl.process.json_types import JsonObject
from jaxrl.process.streams import to_stderr
from jaxrl.telemetry.metrics import METRICS_FILE, find_metric, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxrl.types import Row

    Rows = Sequence[Row]

PANELS = (
    "distill/divergence",
    "distill/reverse_kl_k1",
    "sft/loss",
    "distill/top1_agreement",
    "reward/mean",
    "policy/entropy",
    "policy/clip_fraction",
    "eval/accuracy",
    "tokens/per_second",
)
"""One panel each, in this order; a metric that no run has gets none."""
MORE = re.compile(r"eval/([^/]+/accuracy|pass@\d+)")
"""Further panels, after those: named held-out sets, and pass@k."""
COLUMNS = 2
"""Most panels side by side: a page shows a picture about 800 pixels wide, in which more would have
letters too small to read."""
PANEL_INCHES = (4.2, 2.7)
"""Width and height of a panel, with letters of 10 points."""
DPI = 200
DECADES = 20.0
"""Ratio of the 98th to the 2nd percentile from which positive values, but no fractions, have a log
scale."""
MARGIN = 0.06
"""Room above and below the values, as a share of their range."""
SUFFIXES = (".png", ".svg", ".pdf")
AXES = {"step": "step", "tokens": "total/trained_tokens", "seconds": "total/wall_s"}
"""What a horizontal axis shows -> its metric."""
PLACES = ("run_dir", "name", "resume")
"""Keys that say where a run is, not what it is."""
NEAREST = 3
"""Names of metrics that the error about an unknown one lists."""


def series(rows: Rows, name: str, x: str = "step") -> tuple[list[float], list[float]]:
    """Values of the metric ``x``, and of ``name``, in the rows where both are known and finite."""
    known = [row for row in rows if row.get(name) is not None and row.get(x) is not None]
    return [row[x] for row in known], [row[name] for row in known]


def align(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], by_step: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Brings curves to the same points, so that they can be averaged.

    Args:
        curves: x and y of each, x rising.
        by_step: takes the points that all curves have. False, or where there are none: all points
            of the range that all curves cover, with lines between a curve's own.

    Returns x, [n], and the values of each curve there, [curves, n].
    """
    shared = set.intersection(*(set(x) for x, _ in curves)) if by_step else set()
    if not shared:
        begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
        shared = {at for x, _ in curves for at in x if begin <= at <= end}
    points = np.array(sorted(shared), np.float64)
    return points, np.array([np.interp(points, *curve) for curve in curves])


def group_runs(configs: Mapping[str, JsonObject], by: str = "auto") -> dict[str, list[str]]:
    """Maps the label of each curve to the names of its runs.

    Args:
        configs: name -> dotted key -> value; empty where nothing is known of the run.
        by: `auto`: runs that differ in nothing but the seed and where they are; `none`: each run
            alone; else keys, with commas: runs with the same values of these.

    Raises:
        UserError: no run has such a key.
    """
    known = {key for config in configs.values() for key in config}
    keys = by.split(",")
    if by not in ("auto", "none") and (unknown := [key for key in keys if key not in known]):
        raise UserError(
            f"--group {by}: no config of these runs has the key {unknown[0]!r}"
            f"{near(unknown[0], known)}; auto and none group without one"
        )
    groups: dict[str, list[str]] = {}
    for name, config in configs.items():
        own = {key: value for key, value in config.items() if key not in (*PLACES, "seed")}
        label = repr(sorted(own.items())) if by == "auto" and config else name
        if by not in ("auto", "none"):
            label = ", ".join(f"{key}={config.get(key)}" for key in keys)
        groups.setdefault(label, []).append(name)
    if by != "auto":
        return groups
    many = "{} (mean of {} runs)"
    return {n[0] if len(n) == 1 else many.format(n[0], len(n)): n for n in groups.values()}


def choose_metrics(
    runs: Mapping[str, Rows], patterns: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the metrics that names or patterns such as `reward/*` ask for, and notes that name
    the runs without one of them.

    Raises:
        UserError: no run has such a metric; names the nearest that they have.
    """
    has = {
        run: {n for row in rows for n in row if row[n] is not None} for run, rows in runs.items()
    }
    there = sorted(set().union(*has.values()) - {"step"})
    ends = {f"{name}_{end}" for name in there for end in ("low", "high")}
    chosen, notes = list[str](), list[str]()
    for pattern in patterns:
        found = [name for name in fitting(there, pattern) if name == pattern or name not in ends]
        if not found:
            nearest = get_close_matches(pattern, there, NEAREST, 0.0)
            hint = f"the nearest that they have: {', '.join(nearest)}" if nearest else "it is empty"
            raise UserError(f"{pattern}: no metric of {', '.join(runs)}; {hint}")
        chosen += (name for name in found if name not in chosen)
    for name in chosen:
        if without := [run for run, names in has.items() if name not in names]:
            notes.append(f"without {name}: {', '.join(without)}")
    return chosen, notes


def draw(
    runs: Mapping[str, Rows],
    metrics: Sequence[str] = (),
    groups: Mapping[str, Sequence[str]] | None = None,
    x: str = "step",
) -> Figure:
    """Draws a figure with a line per group of runs in each panel, and a dashed one of the teacher.

    Args:
        metrics: a panel each; (): `PANELS` and `MORE`, those that a run has.
        groups: as `group_runs` makes them; None: each run alone.
        x: the horizontal axis, of `AXES`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'jaxrl[plot]'") from error
    names = {name for rows in runs.values() for row in rows for name in row}
    more = sorted(name for name in names if MORE.fullmatch(name))
    wanted = metrics or (*PANELS, *more)
    panels = [n for n in wanted if any(series(rows, n, AXES[x])[0] for rows in runs.values())]
    if not panels:
        over = "" if x == "step" else f" with {AXES[x]}"
        raise UserError(f"nothing to draw: no run has any of {', '.join(wanted)}{over}")
    grouped = {
        label: [runs[name] for name in members]
        for label, members in (groups or {name: [name] for name in runs}).items()
    }
    columns = min(len(panels), COLUMNS)
    lines = math.ceil(len(panels) / columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, name in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(lines, columns, number), name, grouped, x)
    return figure


def _draw_panel(axes: Axes, name: str, groups: Mapping[str, Sequence[Rows]], x: str) -> None:
    metric = find_metric(name)
    unit = None if metric is None else metric.unit
    axes.set_title(name if unit is None else f"{name} ({unit})", fontsize=11)
    axes.set_xlabel({"tokens": "tokens trained on"}.get(x, x), fontsize=10)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.3)
    drawn: list[float] = []
    for index, (label, runs) in enumerate(groups.items()):
        color, marker = f"C{index}", "o" if name.startswith("eval/") else ""
        curves = [curve for rows in runs if (curve := series(rows, name, AXES[x]))[0]]
        if not curves:
            continue
        points, values = align(curves, by_step=x == "step")
        mean = values.mean(0)
        drawn += mean.tolist()
        axes.plot(points, mean, color=color, label=label, marker=marker, markersize=3)
        (at, low), (also_at, high) = (
            series(runs[0], f"{name}_{end}", AXES[x]) if len(runs) == 1 else ([], [])
            for end in ("low", "high")
        )
        if len(curves) > 1:
            at = also_at = points.tolist()
            low, high = values.min(0).tolist(), values.max(0).tolist()
        if at and at == also_at:
            axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
            drawn += low + high
        _, teacher = series([row for rows in runs for row in rows], "teacher/accuracy")
        if name == "eval/accuracy" and teacher:
            axes.axhline(np.mean(teacher), color=color, linestyle="--", label=f"{label}: teacher")
            drawn.append(float(np.mean(teacher)))
    if len(groups) > 1 or name == "eval/accuracy":
        axes.legend(fontsize=9)
    if drawn:
        _fit(axes, drawn, may_be_log=unit != "fraction")


def _fit(axes: Axes, values: Sequence[float], may_be_log: bool) -> None:
    """Sets the range of a panel: all of its values but single ones far away from the others, such
    as the speed of the step that compiles."""
    least, largest = min(values), max(values)
    few, most = np.percentile(values, (2, 98), method="nearest")
    if may_be_log and least > 0 and most / few >= DECADES:
        axes.set_yscale("log")
        return
    far = 3 * (most - few)
    low = few if far and least < few - far else least
    high = most if far and largest > most + far else largest
    room = MARGIN * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - room, high + room)


def labels(paths: Sequence[str]) -> list[str]:
    """Returns the folder names of the runs, or whole paths where two names are the same."""
    resolved = [user_path(path).resolve() for path in paths]
    names = [path.parent.name if path.name == METRICS_FILE else path.name for path in resolved]
    return names if len(set(names)) == len(names) else list(paths)


def read_config(run: str) -> JsonObject:
    """Reads the config of a run, by dotted key; empty where there is none beside its rows."""
    folder = user_path(run)
    file = (folder if folder.is_dir() else folder.parent) / CONFIG_FILE
    return dict(yaml_text.assignments(yaml_text.read_mapping(file))) if file.is_file() else {}


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.telemetry.plot", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directory or metrics.jsonl")
    add("-o", "--output", required=True, help="file to write: .png, .svg or .pdf")
    words = "what to draw, as reward/mean,tokens/generated or 'reward/*' (docs/metrics.md)"
    add("--metrics", metavar="NAME,...", default="", help=words)
    add("--x", choices=AXES, default="step", help="horizontal axis (default: step)")
    words = (
        "one curve for runs that differ in their seed alone (auto, the default), or that have the"
        " same values of config keys; none: one for each run"
    )
    add("--group", metavar="auto|none|KEY,...", default="auto", help=words)
    arguments = parser.parse(argv)
    output = cli.check_writable("-o", arguments.output)
    if output.suffix not in SUFFIXES:
        raise UserError(f"-o {output}: the suffix must be one of {', '.join(SUFFIXES)}")
    paths = list(dict.fromkeys(arguments.runs))
    names = labels(paths)
    runs = dict(zip(names, map(read_metrics, paths), strict=True))
    patterns = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
    _, notes = choose_metrics(runs, [] if arguments.x == "step" else [AXES[arguments.x]])
    chosen, without = choose_metrics(runs, patterns)
    configs = dict(zip(names, map(read_config, paths), strict=True))
    groups = group_runs(configs, arguments.group)
    figure = draw(runs, chosen, groups, arguments.x)
    for note in notes + without:
        to_stderr(note)
    figure.savefig(output, dpi=DPI)
    print(output)


if __name__ == "__main__":
    sys.exit(cli.run(main))
