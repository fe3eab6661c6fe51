"""Draws the curves of runs: divergence, loss or reward, accuracy and the teacher's, speed.

Accuracies have their 95% interval as a band; named held-out sets and pass@k have panels too.

    python -m jaxrl.telemetry.plot RUN [RUN ...] -o curves.png

A RUN is a run directory or a metrics.jsonl. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl.config import cli
from jaxrl.errors import UserError, user_path
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


def series(rows: Rows, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows where ``name`` was measured and finite."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def draw(runs: Mapping[str, Rows]) -> Figure:
    """Draws a figure with a line per run in each panel, and a dashed one of the teacher."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'jaxrl[plot]'") from error
    names = {name for rows in runs.values() for row in rows for name in row}
    more = sorted(name for name in names if MORE.fullmatch(name))
    panels = [n for n in (*PANELS, *more) if any(series(rows, n)[0] for rows in runs.values())]
    if not panels:
        raise UserError(f"nothing to draw: no run has any of {', '.join(PANELS)}")
    columns = min(len(panels), COLUMNS)
    lines = math.ceil(len(panels) / columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, name in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(lines, columns, number), name, runs)
    return figure


def _draw_panel(axes: Axes, name: str, runs: Mapping[str, Rows]) -> None:
    metric = find_metric(name)
    assert metric is not None, f"{name} stands in no table"
    axes.set_title(f"{name} ({metric.unit})", fontsize=11)
    axes.set_xlabel("step", fontsize=10)
    axes.tick_params(labelsize=10)
    axes.grid(alpha=0.3)
    drawn: list[float] = []
    for index, (label, rows) in enumerate(runs.items()):
        color, marker = f"C{index}", "o" if name.startswith("eval/") else ""
        steps, values = series(rows, name)
        drawn += values
        axes.plot(steps, values, color=color, label=label, marker=marker, markersize=3)
        (at, low), (also_at, high) = (series(rows, f"{name}_{end}") for end in ("low", "high"))
        if at and at == also_at:
            axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
            drawn += low + high
        _, teacher = series(rows, "teacher/accuracy")
        if name == "eval/accuracy" and teacher:
            axes.axhline(teacher[0], color=color, linestyle="--", label=f"{label}: teacher")
            drawn += teacher[:1]
    if len(runs) > 1 or name == "eval/accuracy":
        axes.legend(fontsize=9)
    _fit(axes, drawn, may_be_log=metric.unit != "fraction")


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


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.telemetry.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory or metrics.jsonl")
    parser.add_argument("-o", "--output", required=True, help="file to write: .png, .svg or .pdf")
    arguments = parser.parse(argv)
    output = cli.check_writable("-o", arguments.output)
    if output.suffix not in SUFFIXES:
        raise UserError(f"-o {output}: the suffix must be one of {', '.join(SUFFIXES)}")
    paths = list(dict.fromkeys(arguments.runs))
    runs = dict(zip(labels(paths), map(read_metrics, paths), strict=True))
    draw(runs).savefig(output, dpi=DPI)
    print(output)


if __name__ == "__main__":
    sys.exit(cli.run(main))
