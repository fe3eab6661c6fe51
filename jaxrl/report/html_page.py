"""The page of a run, or of several: one HTML file that needs nothing else.

The template escapes what comes from a run, or embeds it as data that the page's script shows as
text only. The page's own policy forbids every connection and every script but the one whose hash
it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import resources
from types import MappingProxyType
from typing import get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from jaxrl.plan.plan_inputs import Column
from jaxrl.process.json_types import JsonObject
from jaxrl.report.curves import charts, evaluated_steps
from jaxrl.report.read import RunFiles
from jaxrl.report.summary import (
    HEADLINED,
    about,
    changed_keys,
    differing_keys,
    facts,
    headline,
    memory_pools,
    sample_columns,
    samples,
)
from jaxrl.report.timeline_lanes import lanes, reason, understand, waited
from jaxrl.telemetry.plot import labels

SCRIPTS = ("base.js", "curves.js", "timeline.js", "samples.js", "start.js")
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def page(
    runs: Sequence[RunFiles], advice: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """Renders the whole file. Timeline, memory and samples are shown where there is one run.

    Args:
        advice: heading -> lines about the run's split of devices (`Advice.headings`).
    """
    activities = [understand(run.events) for run in runs]
    found = [facts(run, activity) for run, activity in zip(runs, activities, strict=True)]
    data: JsonObject = {
        "runs": labels([str(run.path) for run in runs]),
        "groups": charts(runs),
        "evaluated": [evaluated_steps(run.rows) for run in runs],
    }
    series = (line for g in data["groups"] for chart in g["charts"] for line in chart["series"])
    script = "\n" + "\n".join(map(_asset, SCRIPTS))
    values: JsonObject = {
        "runs": runs,
        "names": data["runs"],
        "data": data,
        "facts": found,
        "headings": list(dict.fromkeys(heading for each in found for heading in each)),
        "differing": differing_keys(runs),
        "advice": advice,
        "thinned": any("mx" in line for line in series),
        "most_rows": max(len(run.rows) for run in runs),
        "style": _asset("page.css"),
        "script": script,
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    if len(runs) == 1:
        run, activity = runs[0], activities[0]
        data |= {"timeline": lanes(activity), "samples": samples(run)}
        starts = (span.start for spans in activity.spans.values() for span in spans)
        values |= {
            "activity": activity,
            "zero": min(starts, default=0),
            # The step whose update ended first after that time.
            "step_at": lambda at: next((str(n) for end, n in activity.steps if end >= at), "–"),
            "columns": get_args(Column),
            "pools": memory_pools(run),
            "about": about(run),
            "figures": headline(run, activity),
            "headlined": HEADLINED,
            "sample_columns": sample_columns(run),
            "changed": changed_keys(run),
        }
        n, shown = len(run.samples), data["samples"]
        values["chosen"] = f"{n} samples"
        if len(shown) < n:
            steps = len({sample["step"] for sample in shown})
            values["chosen"] = f"{len(shown)} of {n} samples: those of {steps} steps, evenly chosen"
    return environment().get_template("page.html").render(values).lstrip()


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("jaxrl.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    made.filters |= {
        "axes": _axes,
        "bytes": bytes_text,
        "figure": _figure,
        "json": partial(json.dumps, ensure_ascii=False),
        "reason": reason,
        "seconds": _seconds,
        "waited": waited,
        "share": lambda value: "–" if value is None else f"{value:.1%}",
    }
    return made


@cache
def _asset(name: str) -> str:
    return (resources.files("jaxrl.report") / "assets" / name).read_text(encoding="utf-8")


def bytes_text(n: float | None) -> str:
    """Formats bytes with three digits, in the largest unit that the number fills; a dash for
    None."""
    if n is None:
        return "–"
    for unit, size in UNITS:
        if n >= size:
            return f"{n / size:.3g} {unit}" if n < 100 * size else f"{n / size:.0f} {unit}"
    return f"{n:.0f} bytes"


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _seconds(us: float) -> str:
    return f"{us / 1e6:.3f} s" if us < 1e7 else f"{us / 1e6:,.1f} s"


def _axes(axes: Mapping[str, int] | None) -> str:
    if axes is None:
        return "none"
    return " ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "1 device"
