"""The calls of a run, read back from its timeline: seconds of each stage, and who waited for whom.

The seconds of a step are counted over windows of time, each from the end of one update to the end
of the next. What runs in a window counts for it, whatever batch it is of, so with a schedule that
overlaps batches the seconds of a stage are still those of a step.
"""

from __future__ import annotations

import os
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.sharding.placement import ROLES
from jaxrl.telemetry.timeline import BEGUN

READ_BYTES = 1 << 20
"""Bytes at the end of a timeline that are read: about five hundred steps."""
WARM_UP = 2
"""Steps left out after a start: they compile."""
LONG = 1.5
"""A step that took so many times the median is left out: it compiled, evaluated or saved."""
TOUCH_S = 0.02
"""A call may begin so much before the end of what it needs: their workers' clocks differ."""
OTHER = "the driver"
"""Who is waited for where no pool works: results on their way, and the loop itself."""

Window = tuple[float, float]
Stage = tuple[str, str]
"""Role and method."""


@dataclass(frozen=True)
class Span:
    """A call of a role, or the state of a worker, in seconds or microseconds of the trace."""

    track: str
    """The role; `worker actor` for the states of a worker."""
    name: str
    """The method, or the state."""
    start: float
    end: float
    step: int | None = None
    """The batch, where the call names it."""
    aside: bool = False
    """Whether it is a wait beside the queue of its worker, for a disk: no work of the devices."""

    @property
    def stage(self) -> Stage:
        return self.track, self.name


@dataclass(frozen=True)
class Gap:
    """A time in which a pool did nothing."""

    start: float
    end: float
    then: Span | None
    """The call that ended it; None at the end of the run."""
    causes: tuple[tuple[Span | None, float, float], ...]
    """What the pool waited for, the latest first: a call of another pool (None: no pool worked),
    and the part of the gap that it took. The parts add up to the gap.
    """

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class PoolWait:
    """What a pool did in a step."""

    pool: str
    busy: float
    """Share of the step in which a call of it ran."""
    seconds: float
    """Of the whole step."""
    waited: Mapping[str, float]
    """Pool -> seconds a step that this one waited for it; under `OTHER` those of no pool."""

    @property
    def idle(self) -> float:
        return 1 - self.busy


def span_of(event: JsonObject) -> Span | None:
    """Reads the span of a trace event, in microseconds; None for all other events."""
    if event.get("ph") != "X" or not {"cat", "name", "ts", "dur"} <= event.keys():
        return None
    args = event.get("args") or {}
    if not (is_time(event["ts"]) and is_time(event["dur"]) and isinstance(args, dict)):
        return None
    start, step = int(event["ts"]), args.get("step")
    return Span(
        track=str(event["cat"]),
        name=str(event["name"]),
        start=start,
        end=start + int(event["dur"]),
        step=step if isinstance(step, int) else None,
        aside=bool(args.get("aside")),
    )


def is_time(value: object) -> bool:
    """Returns whether a value in a trace event can be its microseconds."""
    return isinstance(value, int | float) and abs(value) < 1e18


def begins_run(event: JsonObject) -> bool:
    """Returns whether a trace event marks that a run was started or resumed."""
    return event.get("ph") == "i" and event.get("name") in BEGUN and is_time(event.get("ts"))


def read_calls(path: Path) -> list[Span]:
    """Reads the calls of a timeline since its run was last started or resumed, in the order of
    their ends, in seconds; none if there is no file. Lines that are cut are left out."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return []
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - READ_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    calls: list[Span] = []
    for line in lines:
        try:
            event = parse_json(line.removeprefix(b","))
            if begins_run(event):
                calls = []
            elif (span := span_of(event)) and span.track in ROLES and not span.aside:
                start, took = span.start / 1e6, (span.end - span.start) / 1e6
                calls.append(replace(span, start=start, end=start + took))
        except (ValueError, TypeError, AttributeError):
            continue  # a bracket of the array, or a torn line
    return sorted(calls, key=lambda call: call.end)


def steady_steps(calls: Sequence[Span], staleness: int) -> list[Window]:
    """Returns the steps without those that fill or drain the pipeline, or took much longer than
    most. The last one is left out too: only the calls after it show what their pools waited for.

    Args:
        staleness: batches that the schedule generates ahead.
    """
    windows = list(pairwise(call.end for call in calls if call.stage == ("actor", "update")))
    windows = windows[WARM_UP - 1 + staleness : max(len(windows) - 1 - staleness, 0)]
    if not windows:
        return []
    # Batches ahead make long and short steps take turns: each is compared with its own kind's.
    turns = [windows[i :: staleness + 1] for i in range(min(staleness + 1, len(windows)))]
    longest = max(statistics.median_low(end - start for start, end in each) for each in turns)
    return [(start, end) for start, end in windows if end - start <= LONG * longest]


def stage_seconds(
    calls: Sequence[Span], windows: Sequence[Window], steps: int
) -> dict[Stage, float]:
    """Seconds a step in which each stage ran; calls of a stage that overlap count once.

    Args:
        windows: all of the time that counts.
        steps: how many steps that is.
    """
    found: dict[Stage, list[Window]] = defaultdict(list)
    for call in calls:
        found[call.stage].append((call.start, call.end))
    each = {stage: _inside(union(spans), windows) for stage, spans in found.items()}
    return {stage: seconds / steps for stage, seconds in each.items() if seconds > 0}


def pool_waits(
    calls: Sequence[Span], windows: Sequence[Window], steps: int, pool_of: Mapping[str, str]
) -> list[PoolWait]:
    """Returns how busy each pool was, and whom it waited for while it was not.

    Args:
        windows, steps: as in `stage_seconds`.
        pool_of: role -> name of its pool.
    """
    total = sum(end - start for start, end in windows)
    whole = [(min(call.start for call in calls), max(call.end for call in calls))] if calls else []
    found = []
    for pool in dict.fromkeys(pool_of.values()):
        own = [call for call in calls if pool_of[call.track] == pool]
        others = [call for call in calls if pool_of[call.track] != pool]
        waited: dict[str, float] = defaultdict(float)
        for gap in gaps(own, others, whole):
            for cause, start, end in gap.causes:
                name = OTHER if cause is None else pool_of[cause.track]
                waited[name] += _inside([(start, end)], windows) / steps
        waited = {name: seconds for name, seconds in waited.items() if seconds > 0}
        busy = _inside(union((call.start, call.end) for call in own), windows)
        found.append(PoolWait(pool, busy / total, total / steps, waited))
    return found


def gaps(
    own: Iterable[Span], others: Iterable[Span], lives: Iterable[Window], touch: float = TOUCH_S
) -> Iterator[Gap]:
    """Yields the times in which a pool did nothing, and what it waited for.

    A gap is followed back from its end: the call of another pool that ended last before it, then
    the one that ended last before that one began, and so on to the beginning of the gap.

    Args:
        own, others: the calls of the pool, and of all other pools.
        lives: the times to look at, from the first call after a start of the run to the last.
        touch: `TOUCH_S` in the unit of the spans.
    """
    own, others = list(own), sorted(others, key=lambda call: call.end)
    ends = [call.end for call in others]
    begun = {call.start: call for call in own}
    busy = union((call.start, call.end) for call in own)
    for first, last in lives:
        inside = [time for time in busy if first <= time[0] < last]
        edges = [first, *(edge for time in inside for edge in time), last]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if start < end:
                causes = tuple(_causes(start, end, others, ends, touch))
                yield Gap(start, end, begun.get(end), causes)


def _causes(
    start: float, end: float, others: Sequence[Span], ends: Sequence[float], touch: float
) -> Iterator[tuple[Span | None, float, float]]:
    """Yields causes as in `Gap.causes`; `others` and their `ends` are in the order of the ends."""
    at = end
    while at > start:
        # The call whose end is nearest, of those that began before it and ended at most `touch`
        # after it.
        cause: Span | None = None
        for i in range(bisect_right(ends, at + touch) - 1, -1, -1):
            call = others[i]
            if call.start >= at:
                continue
            if cause is None or abs(at - call.end) < cause.end - at:
                cause = call
            if call.end <= at:
                break
        ended = start if cause is None else max(min(cause.end, at), start)
        if ended < at:
            yield None, ended, at
        if cause is None or ended == start:
            return
        at = max(cause.start, start)
        yield cause, at, ended


def union(spans: Iterable[Window]) -> list[Window]:
    """Merges spans into the same stretches of time, without overlap."""
    merged: list[Window] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _inside(spans: Iterable[Window], windows: Sequence[Window]) -> float:
    """Sums the seconds of the spans that lie in the windows, which rise and do not overlap."""
    ends = [end for _, end in windows]
    total = 0.0
    for start, end in spans:
        for begin, stop in islice(windows, bisect_right(ends, start), None):
            if begin >= end:
                break
            total += min(end, stop) - max(start, begin)
    return total
