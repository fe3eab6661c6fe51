"""The sections of a page, as HTML: all but the memory's bars. Curves, timeline and samples are
places for what the page's script draws, with what is said in words beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.report import facts, samples, timeline
from jaxrl.report.idle import Use
from jaxrl.report.read import RunFiles
from jaxrl.report.tables import definitions, missing, table, text

LONGEST_GAPS = 5
"""Gaps of each pool in the table."""
LEGEND_KEYS = 4
"""Keys beside a run's name, of those that differ."""
MOST_WAITED = 3
"""Calls that a pool waited for, in the table."""
OPEN = ("main", "eval")
"""Groups of curves that are open at first."""
SAMPLE_COLUMNS = (
    "step",
    "prompt",
    "completion",
    "answer",
    "score",
    "reward",
    "agreement",
    "tokens",
)


def summary_section(
    names: Sequence[str], runs: Sequence[RunFiles], uses: Sequence[Use], advice: Sequence[str]
) -> str:
    found = [facts.facts(run, use) for run, use in zip(runs, uses, strict=True)]
    headings = list(dict.fromkeys(heading for each in found for heading in each))
    rows = [(heading, *(text(each.get(heading, "–")) for each in found)) for heading in headings]
    parts = []
    if len(runs) == 1:
        parts.append(definitions(rows))
    else:
        heads = ["", *map(_legend, range(len(names)), names)]
        differing = facts.differing_keys(runs).items()
        keys = [(f"<code>{text(key)}</code>", *map(_value, values)) for key, values in differing]
        parts.append(table(heads, rows, "facts"))
        parts.append(f"<h3>Keys that differ</h3>{table(heads, keys, 'facts')}")
    if advice:
        lines = "".join(f"<li>{text(line)}</li>" for line in advice)
        parts.append(f"<h3>Advice</h3><ul>{lines}</ul>")
    notes = [f"{run.path}: {note}" for run in runs for note in run.notes]
    parts += [f'<p class="muted">{text(note)}</p>' for note in notes]
    return "\n".join(parts)


def _legend(number: int, name: str) -> str:
    return f'<span class="swatch run{number % 8}"></span>{text(name)}'


def _legends(names: Sequence[str], runs: Sequence[RunFiles]) -> str:
    """Each run with its values of the first keys that differ."""
    keys = list(facts.differing_keys(runs).items())[:LEGEND_KEYS]
    lines = []
    for number, name in enumerate(names):
        told = " ".join(f"{key}={values[number]}" for key, values in keys)
        lines.append(f'{_legend(number, name)} <span class="muted">{text(told)}</span>')
    return "".join(f'<p class="legend">{line}</p>' for line in lines)


def _value(value: Any) -> str:
    return f"<code>{text(json.dumps(value, ensure_ascii=False))}</code>"


def curves_section(
    names: Sequence[str], groups: Sequence[Mapping[str, Any]], runs: Sequence[RunFiles]
) -> str:
    if not groups:
        return missing("metrics.jsonl holds no row: the first comes when a step has ended")
    thinned = any("mx" in each for g in groups for chart in g["charts"] for each in chart["series"])
    rows = max(len(run.rows) for run in runs)
    note = (
        f"Of {rows:,} rows each curve shows the first, the last, and of every stretch the lowest"
        " and the highest value; the smoothed line is of the means of all."
        if thinned
        else "Every row is shown."
    )
    parts = [
        _legends(names, runs) if len(names) > 1 else "",
        f'<p class="muted">{note} Ticks at the foot of a chart: evaluations; red ones: a value that'
        " was not finite. Drag to see some steps only, double-click for all; arrow keys move the"
        " cursor of a chart that has the focus.</p>",
        CURVE_CONTROLS,
    ]
    for index, group in enumerate(groups):
        opened = " open" if group["title"] in OPEN else ""
        count = len(group["charts"]) + len(group["constants"])
        parts.append(
            f'<details class="group" data-group="{index}"{opened}>'
            f'<summary>{text(group["title"])} <span class="muted">{count}</span></summary>'
            f'<div class="charts"></div>{_constants(group["constants"], names)}</details>'
        )
    return "\n".join(parts)


CURVE_CONTROLS = """<div class="controls">
<label>metric <input type="search" name="metric" placeholder="name or meaning"></label>
<label>smoothing <input type="range" name="smooth" min="0" max="0" value="0" step="1">
<output id="smooth-told">off</output></label>
<label><input type="checkbox" name="log"> logarithmic</label>
<label>steps <input type="number" name="from" placeholder="first"></label>
<label>to <input type="number" name="to" placeholder="last"></label>
</div>"""


def _constants(constants: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """A table of what did not change."""
    if not constants:
        return ""
    rows = [
        (
            text(each["name"]),
            *("–" if v is None else f"{v:,.6g}" for v in each["values"]),
            text(each["unit"]),
            f'<span class="muted">{text(each["meaning"])}</span>',
        )
        for each in constants
    ]
    heads = map(text, names) if len(names) > 1 else ["value"]
    return table(["the same at every step", *heads, "unit", ""], rows, "constants")


def timeline_section(use: Use, drawn: Mapping[str, Any]) -> str:
    if not use.spans:
        return missing("timeline.json holds no call: logging.timeline=false, or no call has ended")
    merged = drawn["merged_us"]
    note = (
        f"What lies together within {merged / 1e6:.3g} s is drawn as one; the figures are of all."
        if merged
        else "Every call is drawn."
    )
    rows = [
        (
            text(pool.name),
            f"{pool.idle_share:.1%}",
            f"{len(pool.counted):,}",
            _seconds(sum(gap.length for gap in pool.gaps)),
            text(_waits(pool.waited())),
        )
        for pool in use.pools
    ]
    zero = min(span.start for spans in use.spans.values() for span in spans)
    gaps = [
        (
            text(pool.name),
            f'<button type="button" data-start="{gap.start - zero}" data-length="{gap.length}">'
            f"{(gap.start - zero) / 1e6:.3f} s</button>",
            "–" if gap.then is None else _step_at(use, gap.end),
            _seconds(gap.length),
            text(timeline.told(gap)),
        )
        for pool in use.pools
        for gap in sorted(pool.counted, key=lambda gap: -gap.length)[:LONGEST_GAPS]
    ]
    return f"""<p class="muted">{note} A pool is busy while a call of one of its roles runs; the
time is from the first call to the last, compilation included. Drag to move, Ctrl and the wheel or a
double-click to zoom; with the focus: arrow keys, +, -, Home.</p>
<div id="timeline-view">
<div class="controls">
<span><button type="button" name="zoom-in" title="closer">+</button>
<button type="button" name="zoom-out" title="farther">−</button>
<button type="button" name="zoom-all">all</button></span>
<label>steps <input type="number" name="step-from" min="1" placeholder="first"></label>
<label>to <input type="number" name="step-to" min="1" placeholder="last"></label>
</div>
<div class="legend"></div>
<p class="readout" aria-live="polite"></p>
<div class="lanes"><div class="labels"></div>
<canvas tabindex="0" role="img" aria-label="Timeline of the pools; the tables below tell its idle \
gaps"></canvas></div>
</div>
<h3>Idle</h3>
{table(["pool", "idle", "gaps of 1 ms or more", "idle in all", "waited for"], rows, "idle")}
<h3>The longest gaps</h3>
{table(["pool", "at", "in step", "idle", ""], gaps, "gaps")}
"""


def _waits(waited: Mapping[str, int]) -> str:
    most = list(waited.items())[:MOST_WAITED]
    return ", ".join(f"{call} {_seconds(length)}" for call, length in most)


def _seconds(us: float) -> str:
    return f"{us / 1e6:.3f} s" if us < 1e7 else f"{us / 1e6:,.1f} s"


def _step_at(use: Use, at: int) -> str:
    """The step whose update ended first after that."""
    return next((str(step) for end, step in use.steps if end >= at), "–")


def samples_section(run: RunFiles, shown: Sequence[Mapping[str, Any]]) -> str:
    if not shown:
        return missing("samples.jsonl holds none: logging.samples=0, or no step has ended")
    heads = "".join(map(_sample_head, SAMPLE_COLUMNS))
    of_step = "; in grey, that of all completions of the step"
    return f"""<p class="muted">{text(samples.told(run, shown))}. Score: the verifier's, 0 to 1.
Agreement: share of tokens where student and teacher have the same most probable token\
{of_step if any(each["of_step"] for each in shown) else ""}.</p>
<div id="samples-view">
<div class="controls">
<label>step <select name="sample-step"><option value="">all</option></select></label>
<label>text <input type="search" name="sample-text" placeholder="in any of the texts"></label>
<span class="count muted" aria-live="polite"></span>
</div>
<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody></tbody></table></div>
<p><button type="button" name="more">more</button></p>
</div>
"""


def _sample_head(name: str) -> str:
    """Columns of numbers can be sorted by."""
    if name in ("prompt", "completion", "answer"):
        return f'<th scope="col" data-column="{name}">{name}</th>'
    button = f'<button type="button">{name}</button>'
    return f'<th scope="col" class="number" data-column="{name}">{button}</th>'


def config_section(run: RunFiles) -> str:
    if not run.config:
        return missing("config.yaml is not there")
    changed = [
        (
            f"<code>{text(key)}</code>",
            _value(value),
            f'<span class="muted">{_value(default)}</span>',
        )
        for key, (value, default) in facts.changed_keys(run).items()
    ]
    every = [(f"<code>{text(key)}</code>", _value(value)) for key, value in run.config.items()]
    return (
        f"<p>{len(changed)} keys differ from their defaults.</p>"
        f"{table(['key', 'value', 'default'], changed)}"
        f"<details><summary>All {len(every)} keys</summary>"
        f"{table(['key', 'value'], every)}</details>"
    )
