"""The page of a run, or of several: one HTML file that needs nothing else.

The template escapes what comes from a run, or embeds it as data that the page's script shows as
text only. The page's own policy forbids every connection and every script but the one whose hash
it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from importlib import resources
from itertools import groupby
from math import ceil
from statistics import fmean, median
from types import MappingProxyType
from typing import NamedTuple, get_args

from jinja2 import Environment, PackageLoader, StrictUndefined

from jaxrl.config.keys import keys
from jaxrl.config.schema import Config
from jaxrl.errors import counted
from jaxrl.losses.algorithm_table import ALGORITHMS
from jaxrl.plan.plan_inputs import Column
from jaxrl.process.json_types import JsonObject
from jaxrl.report.read import RunFiles
from jaxrl.report.timeline_lanes import Activity, evenly, lanes, reason, understand, waited
from jaxrl.run.run_dir import changes_of, meshes, stop_of, stop_text
from jaxrl.telemetry.metrics import Metric, find_metric, held_out_reward
from jaxrl.telemetry.plot import PLACES, labels
from jaxrl.telemetry.totals import describe_totals
from jaxrl.types import Row

SCRIPTS = ("base.js", "curves.js", "timeline.js", "samples.js", "start.js")
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
ENDS = 5
"""Steps whose mean stands for the beginning and for the end of a noisy metric."""
RATES = ("eval/accuracy", "distill/top1_agreement")
"""Metrics shown as per cent, as the console does."""
NOISY = ("reward/mean", "distill/divergence", "distill/top1_agreement", "sft/loss")
SAMPLES = 600
"""Most samples on a page."""
TEXT = 2000
"""Most characters of a prompt or a completion: its beginning and its end."""
HEADLINED = ("state", "wall time", "held-out accuracy", "device-seconds")
"""Facts that the headline of a run has."""
FIELDS = (
    *("step", "prompt", "completion", "answer", "score", "reward", "tokens", "finish_reason"),
    "learned",
)
TURN_TEXT = 200
"""Least characters of a turn, where a completion has many."""
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
    *("tokens", "time", "total", "weights", "memory", "offload", "checkpoint", "data", "run"),
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


def page(
    runs: Sequence[RunFiles], advice: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """Renders the whole file. Timeline, memory and samples are shown where there is one run.

    Args:
        advice: heading -> lines about the run's split of devices (`waits.run_advice`).
    """
    activities = [understand(run.events) for run in runs]
    found = [facts(run, activity) for run, activity in zip(runs, activities, strict=True)]
    evaluated = [
        [row["step"] for row in run.rows if any(name.startswith("eval/") for name in row)]
        for run in runs
    ]
    data: JsonObject = {
        "runs": labels([str(run.path) for run in runs]),
        "groups": charts(runs),
        "evaluated": [evenly(steps, POINTS) for steps in evaluated],
        "changed": [list(changes_of(run.sessions)) for run in runs],
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
            "about": session_facts(run),
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
    return templates().get_template("page.html").render(values).lstrip()


@cache
def templates() -> Environment:
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


class Figure(NamedTuple):
    """One of the numbers that a reader wants first."""

    label: str
    value: str
    note: str
    alarm: bool = False
    """Whether the note is about something that went wrong."""


def session_facts(run: RunFiles) -> tuple[list[str], str]:
    """Returns when and where the run began, with which jaxrl, and how often it was resumed, without
    what its files do not tell; and the newest command, or an empty text."""
    first, newest = (run.sessions[0], run.sessions[-1]) if run.sessions else ({}, {})
    at, host, version, command = (
        str(one[key]) if isinstance(one.get(key), str) else ""
        for one, key in ((first, "at"), *((newest, key) for key in ("host", "version", "command")))
    )
    resumed = len(run.sessions) - 1
    times = f"resumed {counted(resumed, 'time')}" if resumed > 0 else ""
    texts = at[:16].replace("T", " "), host, f"jaxrl {version}" if version else "", times
    return [text for text in texts if text], command


def headline(run: RunFiles, activity: Activity) -> list[Figure]:
    """Lists the figures of what the run reached, what it was trained on, and its time."""
    figures = []
    teacher = [f"the teacher has {v:.1%}" for v in _values(run.rows, "teacher/accuracy")[:1]]
    judged = any(held_out_reward(row) is not None for row in run.rows)
    for name, label, form, before in (
        ("eval/accuracy", "accuracy on held-out prompts", ".1%", teacher),
        ("eval/environment_reward", "environment's reward on held-out prompts", ".3f", []),
    ):
        ends = _ends(run.rows, name) if judged or name == "eval/accuracy" else []
        if ends:
            value = " → ".join(format(row[name], form) for row in ends)
            intervals = " and ".join(filter(None, (_interval(row, name) for row in ends)))
            after = [f"95% interval {intervals}"] if intervals else []
            at = f"step {' and '.join(str(row['step']) for row in ends)}"
            figures.append(Figure(label, value, "; ".join((*before, at, *after))))
    if not figures:
        measured = next((name for name in NOISY if _values(run.rows, name)), None)
        if measured is not None:
            value, _, note = _first_and_last(run.rows, measured).partition(", ")
            figures.append(Figure(measured, value, note))
    if tokens := _values(run.rows, "actor/tokens"):
        rates = _values(run.rows, "tokens/per_second")
        speed = f"{median(rates):,.0f} a second (median)" if rates else ""
        figures.append(Figure("tokens trained on", f"{sum(tokens):,.0f}", speed))
    if held := _values(run.rows, "total/device_s"):
        note = describe_totals(run.rows[-1]).get("device-seconds", "")
        figures.append(Figure("device-hours", f"{held[-1] / 3600:,.3g}", note))
    state = _state(run)
    cut = not run.running and (not run.rows or run.wanted not in (None, run.steps))
    return [*figures, Figure("time", _wall_time(run, activity) or "–", state, alarm=cut)]


def _wall_time(run: RunFiles, activity: Activity) -> str:
    """Returns the time from the first call to the last, by the timeline; else of the steps
    alone."""
    if activity.pools:
        parts = len(activity.sessions)
        return _clock(activity.pools[0].window / 1e6) + (
            "" if parts < 2 else f" in {parts} sessions"
        )
    steps = _values(run.rows, "time/step_s")
    return f"{_clock(sum(steps))} of steps" if steps else ""


def facts(run: RunFiles, activity: Activity) -> dict[str, str]:
    """Maps headings to text; what nothing is known of is left out."""
    config = run.config
    sources = config.get("data.train")
    batch = tuple(map(config.get, ("batch_size", "group_size", "max_new_tokens")))
    algorithm = config.get("algorithm", config.get("algorithm.name"))
    distill = ("on_policy_fraction", "seq_kd")
    spec = ALGORITHMS.get(str(algorithm))
    size = "{} prompts x {}, up to {} new tokens"
    if spec is not None and spec.only_data(*(config.get(f"distill.{key}") for key in distill)):
        size = "{0} prompts with the data's completions, up to {2} tokens"
    steps, tokens = (_values(run.rows, name) for name in ("time/step_s", "tokens/per_second"))
    texts = {
        "state": _state(run),
        "wall time": _wall_time(run, activity),
        "algorithm": algorithm,
        "schedule": config.get("schedule"),
        "mesh": meshes(run.sessions) or config.get("mesh"),
        "changed": "; ".join(
            f"after step {step}: {', '.join(texts)}"
            for step, texts in changes_of(run.sessions).items()
        ),
        "models": _models(run),
        "data": ", ".join(map(str, sources)) if isinstance(sources, list) else sources,
        "environment": config.get("environment.name"),
        "batch": "" if None in batch else size.format(*batch),
        "held-out accuracy": _accuracy(run.rows),
        **{name: _first_and_last(run.rows, name) for name in NOISY},
        "speed": f"{median(tokens):,.0f} tokens/s, {median(steps):.3g} s a step (medians);"
        f" the first step {steps[0]:.3g} s"
        if steps and tokens
        else "",
        **(describe_totals(run.rows[-1]) if run.rows else {}),
    }
    return {heading: str(text) for heading, text in texts.items() if text}


def _state(run: RunFiles) -> str:
    """Says whether the run has ended, is going on, or was cut."""
    of = "" if run.wanted is None else f" of {run.wanted}"
    if run.running:
        return f"going on: step {run.steps}{of} at {datetime.now():%Y-%m-%d %H:%M}"
    if not run.rows:
        return "no step was recorded"
    if run.steps == run.wanted:
        return f"ended: all of its {run.steps} steps"
    stopped = stop_of(run.sessions)
    if stopped is not None and stopped["step"] == run.steps:
        return f"stopped at step {run.steps}{of} {stop_text(stopped)}"
    if run.wanted is None:
        return f"ends at step {run.steps}"
    return f"cut at step {run.steps}{of}"


def _clock(seconds: float) -> str:
    """Formats seconds as `12.3 s` or `1:02:03`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _models(run: RunFiles) -> str:
    """Lists the student's model, and those of the other roles that the plan places."""
    placed = [role["role"] for role in run.plan["roles"]] if run.plan else []
    models = {role: run.config.get(f"{role}.model") for role in ("student", *placed)}
    models |= {
        key.removeprefix("teachers.").rpartition(".")[0]: model
        for key, model in run.config.items()
        if model is not None and re.fullmatch(r"teachers\..+\.(model|address)", key)
    }
    if models.get("teacher") is None and "teacher" in placed:
        models["teacher"] = run.config.get("teacher.address") or run.config.get("teacher.cache")
    return ", ".join(f"{role} {model}" for role, model in models.items() if model)


def _accuracy(rows: Sequence[Row]) -> str:
    texts = []
    for row in _ends(rows, "eval/accuracy"):
        interval = f" ({text})" if (text := _interval(row, "eval/accuracy")) else ""
        texts.append(f"{row['eval/accuracy']:.1%}{interval} at step {row['step']}")
    teacher = "".join(f"; the teacher {v:.1%}" for v in _values(rows, "teacher/accuracy")[:1])
    return " → ".join(texts) + teacher


def _ends(rows: Sequence[Row], name: str) -> list[Row]:
    having = [row for row in rows if row.get(name) is not None]
    return having[:1] + having[1:][-1:]


def _interval(row: Row, name: str) -> str:
    """Returns the 95% interval of a rate, `7.0% to 15.0%`; "" where it has none."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "" if low is None or high is None else f"{low:.1%} to {high:.1%}"


def _first_and_last(rows: Sequence[Row], name: str) -> str:
    values = _values(rows, name)
    if len(values) < 2 * ENDS:
        ends, means = list(dict.fromkeys(values[:1] + values[-1:])), ""
    else:
        ends = [fmean(values[:ENDS]), fmean(values[-ENDS:])]
        means = f", means of the first and last {ENDS} steps"
    return " → ".join(f"{v:.1%}" if name in RATES else f"{v:.4g}" for v in ends) + means


def _values(rows: Sequence[Row], name: str) -> list[float]:
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
    if "mesh" in values:  # a resumed run's config has the last one only
        last = values["mesh"]
        values["mesh"] = [meshes(run.sessions) or last[i] for i, run in enumerate(runs)]
    return {name: each for name, each in values.items() if any(v != each[0] for v in each)}


def memory_pools(run: RunFiles) -> list[JsonObject]:
    """Returns the pools of the run's plan as in `plan.json`, none without a plan. Each also has:
    `device_text`; `parts`, those of its roles at its peak, with their `role`, whose `bytes` add up
    to `peak`; `measured`, bytes of its fullest device, None where nothing was measured."""
    if run.plan is None:
        return []
    pools = []
    for number, pool in enumerate(run.plan["pools"]):
        devices = f"{len(pool['devices'])} {pool['device'] or 'device'}"
        moment, parts = pool["moment"], []
        for role in run.plan["roles"]:
            for part in role["parts"] if role["pool"] == number else ():
                # On the device in its phase alone or, without one, but for where it is away.
                if part["phase"] is None:
                    there = not {moment, moment.partition(":")[0]} & set(part.get("away", ()))
                else:
                    there = f"{role['role']}: {part['phase']}" == moment
                if there:
                    parts.append({"role": role["role"], **part})
        # The planned figure, which a row holds where a device tells none, is no measurement.
        peaks = [
            row.get(f"memory/{role}/peak_bytes")
            for row in run.rows
            for role in pool["roles"]
            if pool["peak"] and row.get(f"memory/{role}/planned") == 0
        ]
        pools.append(
            pool
            | {
                "device_text": devices if pool["devices"] else "no device",
                "parts": parts,
                "measured": max((peak for peak in peaks if peak is not None), default=None),
            }
        )
    return pools


def samples(run: RunFiles) -> list[JsonObject]:
    """Returns the samples of the first step, of the last, and of as many steps evenly between them
    as there is room for.

    `agreement` is the sample's own, or that of all completions of its step (`of_step`).
    """
    ordered = sorted(run.samples, key=lambda sample: sample["step"])
    by_step = {step: list(same) for step, same in groupby(ordered, lambda sample: sample["step"])}
    most = max(map(len, by_step.values()), default=1)
    of_step = {row["step"]: row.get("distill/top1_agreement") for row in run.rows}
    shown = []
    for step in evenly(list(by_step), max(2, SAMPLES // most)):
        for sample in by_step[step]:
            agreement = sample.get("agreement")
            (rounded,) = round_values([of_step.get(step) if agreement is None else agreement])
            fields = {name: sample.get(name) for name in FIELDS}
            turns, rewards = sample.get("turns") or (), sample.get("rewards") or {}
            for name in ("prompt", "completion"):
                fields[name] = _ends_of(str(sample.get(name) or ""), TEXT)
            if turns:  # which have its text
                room = max(TURN_TEXT, TEXT // len(turns))
                fields["completion"] = ""
                fields["turns"] = [
                    turn | {"content": _ends_of(str(turn.get("content") or ""), room)}
                    for turn in turns
                ]
            each = zip(rewards, round_values([*rewards.values()]), strict=True)
            (advantage,) = round_values([sample.get("advantage")])
            fields |= {"rewards": dict(each), "advantage": advantage}
            shown.append(fields | {"agreement": rounded, "of_step": agreement is None})
    return shown


def _ends_of(text: str, most: int) -> str:
    """Returns a text of at most so many characters of its beginning and its end."""
    if (left_out := len(text) - most) <= 0:
        return text
    return f"{text[: most // 2]}\n[... {left_out} characters ...]\n{text[-most // 2 :]}"


def sample_columns(run: RunFiles) -> list[str]:
    """Returns the columns of the table of samples: those in which any sample has something."""
    of_step = any(row.get("distill/top1_agreement") is not None for row in run.rows)
    optional = [
        name
        for name in ("answer", "score", "reward", "advantage", "agreement")
        if any(sample.get(name) is not None for sample in run.samples)
        or (name == "agreement" and of_step)
    ]
    return ["step", "prompt", "completion", *optional, "tokens"]


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
    limit, found = max(FEWEST_POINTS, POINTS // len(runs)), list[JsonObject]()
    for title, members in groups.items():
        charts, constants = list[JsonObject](), list[JsonObject]()
        for name in members:
            metric = find_metric(name) or UNKNOWN
            described = {"name": name, "unit": metric.unit, "meaning": metric.meaning}
            each = [{row[name] for row in run.rows if name in row} for run in runs]
            if all(len(values) <= 1 for values in each):
                values = [next(iter(values), None) for values in each]
                constants.append(described | {"values": values})
                continue
            lines = [_series(name, number, run.rows, limit) for number, run in enumerate(runs)]
            chart = described | {"series": [line for line in lines if line["x"] or line["lost"]]}
            if name == "eval/accuracy":
                teachers = [_values(run.rows, "teacher/accuracy")[:1] for run in runs]
                chart["levels"] = [
                    {"run": number, "y": value, "label": "teacher"}
                    for number, values in enumerate(teachers)
                    for value in values
                ]
            charts.append(chart)
        if members:
            found.append({"title": title, "charts": charts, "constants": constants})
    return found


def _series(name: str, number: int, rows: Sequence[Row], limit: int) -> JsonObject:
    """Returns a series: x, y are points; mx, my are means to smooth, where they differ; low, high
    are the 95% interval; lost are steps without a finite value."""
    known = [row for row in rows if row.get(name) is not None]
    lost = [row["step"] for row in rows if name in row and row[name] is None]
    series: JsonObject = {"run": number, "lost": evenly(lost, MARKS)}
    if name.startswith("eval/"):
        kept = evenly(known, limit)
        series["x"] = [row["step"] for row in kept]
        ends = (("y", name), ("low", f"{name}_low"), ("high", f"{name}_high"))
        return series | {key: round_values([row.get(end) for row in kept]) for key, end in ends}
    return series | thin([row["step"] for row in known], [row[name] for row in known], limit)


def round_values(values: Sequence[float | None]) -> list[float | None]:
    """Rounds each value to six digits: more than a screen shows, in half the bytes."""
    return [None if v is None else v if isinstance(v, int) else float(f"{v:.6g}") for v in values]


def thin(steps: Sequence[int], values: Sequence[float], limit: int) -> JsonObject:
    """Thins values over steps to at most `limit` (4 at the least), x and y: the first, the last,
    and the lowest and the highest of each stretch of equally many values. Where that leaves some
    out, mx and my have the means of each stretch."""
    n = len(steps)
    if n <= limit:
        return {"x": list(steps), "y": round_values(values)}
    size = ceil(n / max(1, (limit - 2) // 2))
    stretches = [range(start, min(start + size, n)) for start in range(0, n, size)]
    extremes = {pick(here, key=values.__getitem__) for here in stretches for pick in (min, max)}
    kept = sorted({0, n - 1} | extremes)
    return {
        "x": [steps[i] for i in kept],
        "y": round_values([values[i] for i in kept]),
        "mx": round_values([fmean(steps[i] for i in here) for here in stretches]),
        "my": round_values([fmean(values[i] for i in here) for here in stretches]),
    }
