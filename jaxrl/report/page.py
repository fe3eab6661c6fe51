"""The page of a run, or of several: one HTML file that needs nothing else.

What comes from a run is escaped, or travels as data that the page's script only ever shows as text.
The page's own policy forbids every connection and every script but the one whose hash it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jaxrl.report import memory_bars, samples, sections, timeline
from jaxrl.report.curves import charts, evaluated_steps
from jaxrl.report.idle import understand
from jaxrl.report.profile import profile_section
from jaxrl.report.read import RunFiles
from jaxrl.report.tables import text

SCRIPTS = ("base.js", "curves.js", "timeline.js", "samples.js", "start.js")


def page(runs: Sequence[RunFiles], advice: Sequence[str] = ()) -> str:
    """The whole file. Timeline, memory and samples are shown where there is one run.

    Args:
        advice: lines about the run's split of devices.
    """
    uses = [understand(run.events) for run in runs]
    groups = charts(runs)
    names = unique_names(runs)
    data: dict[str, Any] = {
        "runs": names,
        "groups": groups,
        "evaluated": [evaluated_steps(run.rows) for run in runs],
    }
    parts = {"Summary": sections.summary_section(names, runs, uses, advice)}
    parts["Curves"] = sections.curves_section(names, groups, runs)
    if len(runs) == 1:
        (run,), (use,) = runs, uses
        data |= {"timeline": timeline.lanes(use), "samples": samples.samples(run)}
        parts["Timeline"] = sections.timeline_section(use, data["timeline"])
        if run.stages is not None:
            parts["Profile"] = profile_section(run.stages)
        parts["Memory"] = memory_bars.section(run)
        parts["Samples"] = sections.samples_section(run, data["samples"])
        parts["Config"] = sections.config_section(run)
    return _document(", ".join(names), parts, data)


def unique_names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the folders; whole paths where two are the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


@cache
def _asset(name: str) -> str:
    return (resources.files("jaxrl.report") / "assets" / name).read_text(encoding="utf-8")


def _document(title: str, parts: Mapping[str, str], data: Mapping[str, Any]) -> str:
    script = "\n" + "\n".join(map(_asset, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name in parts)
    body = "\n".join(
        f'<section id="{name.lower()}"><h2>{name}</h2>\n{content}</section>'
        for name, content in parts.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)} · jaxrl</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<h1>{text(title)}</h1>
<nav>{links}</nav>
<noscript><p>Curves, timeline and samples are drawn by a script, which is off.</p></noscript>
<main>
{body}
</main>
<script type="application/json" id="data">{_embedded(data)}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON in which nothing ends the element that it stands in."""
    packed = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c")
