"""The calls of a run, read back from its timeline: seconds of each stage, and who waited for whom.

Everything is counted over windows of time, each from the end of one update to the end of the next:
one step. What runs in a window counts for it, whatever batch it is of, so with a schedule that
overlaps batches the seconds of a stage are still those of a step.
"""

from __future__ import annotations

import json
import os
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from jaxrl.sharding.placement import ROLES
from jaxrl.telemetry.timeline import BEGUN

READ_BYTES = 1 << 20
"""Bytes at the end of a timeline that are read: about five hundred steps."""
WARM_UP = 2
"""Steps left out after a start: they compile."""
LONG = 1.5
"""A step that took so many times the median is left out: it compiled, evaluated or saved."""
TOUCH_S = 0.02
"""A call may begin so much before the end of what it needs, as told by another process's clock."""
ASIDE = "saved"
"""The call that waits for a disk beside the queue: no work of its role's devices."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "score": ("generate",),
    "update": ("generate", "score"),
    "load": ("publish",),
}
"""Method -> methods of other roles whose results it waits for."""

Window = tuple[float, float]
Stage = tuple[str, str]
"""Role and method."""


@dataclass(frozen=True)
class Call:
    """A call of a role that has ended, in seconds of the trace."""

    role: str
    method: str
    start: float
    end: float
    step: int | None = None
    """The batch, where the call was told it."""

    @property
    def stage(self) -> Stage:
        return self.role, self.method


@dataclass(frozen=True)
class PoolWait:
    """What a pool did in a step, in shares and seconds of it."""

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


OTHER = "the driver"
"""Who is waited for where no pool works: results on their way, and the loop itself."""


def read_calls(path: Path) -> list[Call]:
    """The calls of a timeline since its run last started or went on, in the order of their ends.

    None where there is no file; what is cut is left out.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - READ_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    calls: list[Call] = []
    for line in lines:
        try:
            event = json.loads(line.removeprefix(b","))
            if event["ph"] == "i" and event["name"] in BEGUN:
                calls = []
            elif event["ph"] == "X" and event["cat"] in ROLES and event["name"] != ASIDE:
                start, took = event["ts"] / 1e6, event["dur"] / 1e6
                step = event["args"].get("step")
                calls.append(Call(event["cat"], event["name"], start, start + took, step))
        except (ValueError, KeyError, TypeError):
            continue  # a bracket of the array, or a torn line
    return sorted(calls, key=lambda call: call.end)


def steady_steps(calls: Sequence[Call], staleness: int) -> list[Window]:
    """The steps without those that fill or drain the pipeline, or took much longer than most. The
    last one is left out too: only the calls after it tell what their pools waited for.

    Args:
        staleness: batches that the schedule generates ahead.
    """
    ends = [call.end for call in calls if call.stage == ("actor", "update")]
    windows = list(zip(ends, ends[1:], strict=False))
    windows = windows[WARM_UP - 1 + staleness : max(len(windows) - 1 - staleness, 0)]
    if not windows:
        return []
    median = statistics.median(end - start for start, end in windows)
    return [(start, end) for start, end in windows if end - start <= LONG * median]


def stage_seconds(
    calls: Sequence[Call], windows: Sequence[Window], steps: int
) -> dict[Stage, float]:
    """Seconds a step in which each stage ran; calls of a stage that overlap count once.

    Args:
        windows: all of the time that counts.
        steps: how many steps that is.
    """
    found: dict[Stage, list[Window]] = defaultdict(list)
    for call in calls:
        found[call.stage].append((call.start, call.end))
    each = {stage: _inside(_union(spans), windows) for stage, spans in found.items()}
    return {stage: seconds / steps for stage, seconds in each.items() if seconds > 0}


def pool_waits(
    calls: Sequence[Call], windows: Sequence[Window], steps: int, pool_of: Mapping[str, str]
) -> list[PoolWait]:
    """Of each pool, how busy it was and whom it waited for while it was not.

    A pool that waits for a call waits for the pool of that call while it runs and, before it does,
    for whatever that call waited for.

    Args:
        windows, steps: as in `stage_seconds`.
        pool_of: role -> name of its pool.
    """
    total = sum(end - start for start, end in windows)
    queues = _Queues(calls, pool_of)
    found = []
    for pool, queue in queues.of.items():
        busy = _inside(_union((call.start, call.end) for call in queue), windows)
        waited: dict[str, float] = defaultdict(float)
        since = queue[0].end if queue else 0.0
        for call in queue:
            if call.start > since:
                for culprit, start, end in queues.held_up(call, since):
                    waited[culprit] += _inside([(start, end)], windows) / steps
            since = max(since, call.end)
        waited = {name: seconds for name, seconds in waited.items() if seconds > 0}
        found.append(PoolWait(pool, busy / total, total / steps, waited))
    return found


class _Queues:
    """The calls of each pool, in the order of their ends."""

    def __init__(self, calls: Sequence[Call], pool_of: Mapping[str, str]):
        self._pool_of = pool_of
        self.of: dict[str, list[Call]] = {pool: [] for pool in pool_of.values()}
        for call in sorted(calls, key=lambda call: call.end):
            self.of[pool_of[call.role]].append(call)
        self._ends = {pool: [call.end for call in queue] for pool, queue in self.of.items()}

    def held_up(self, call: Call, since: float) -> list[tuple[str, float, float]]:
        """What went on from `since` until a call could begin, along the chain of what held it up:
        pool, start and end of each part.
        """
        found, at = [], call.start
        while at > since:
            before = self._last_before(call)
            end = since if before is None else max(min(before.end, at), since)
            if end < at:
                found.append((OTHER, end, at))
            if before is None or end <= since:
                break
            found.append((self._pool_of[before.role], max(before.start, since), end))
            call, at = before, before.start
        return found

    def _last_before(self, call: Call) -> Call | None:
        """What ended last of the call before it in its queue and those whose results it takes."""
        needed, mine = NEEDS.get(call.method, ()), self._pool_of[call.role]
        found = []
        for pool, queue in self.of.items():
            ended = bisect_right(self._ends[pool], call.start + TOUCH_S)
            fitting = (
                other
                for other in (queue[i] for i in range(ended - 1, -1, -1))
                if other.start < call.start and (pool == mine or other.method in needed)
            )
            found += list(islice(fitting, 1))
        return max(found, key=lambda other: other.end, default=None)


def _union(spans: Iterable[Window]) -> list[Window]:
    """The same stretches of time, without overlap."""
    merged: list[Window] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _inside(spans: Iterable[Window], windows: Sequence[Window]) -> float:
    """Seconds of the spans that lie in the windows, which rise and do not overlap."""
    ends = [end for _, end in windows]
    total = 0.0
    for start, end in spans:
        for begin, stop in islice(windows, bisect_right(ends, start), None):
            if begin >= end:
                break
            total += min(end, stop) - max(start, begin)
    return total
