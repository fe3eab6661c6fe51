"""The timeline of a run: what each pool did, its idle gaps, and what those waited for, in the few
numbers that the page draws.

A pool is busy while a call of one of its roles runs, its wait for arguments excluded; calls beside
the others (the wait for a disk) do not count. It is looked at from the first call of any pool to
the last; where a run was resumed, each life by itself. All times are microseconds of the trace.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from jaxrl.process.json_types import JsonObject
from jaxrl.profile.waits import (
    OTHER,
    TOUCH_S,
    Gap,
    Span,
    begins_run,
    gaps,
    last_updates,
    span_of,
    union,
)
from jaxrl.sharding.placement import ROLES

SPANS = 40_000
"""Most spans of all lanes together."""
GAPS = 1000
"""Most gaps of a pool that are drawn: the longest."""
STEPS = 20_000
"""Most steps whose ends are on the page; where there are more, the page says `about step N`."""
LEAST_GAP_US = 1000
"""Shorter gaps count in the idle share, and are not counted one by one."""
WORKER = "worker "
T = TypeVar("T")


@dataclass(frozen=True)
class PoolUse:
    """One pool over the whole timeline."""

    name: str
    roles: tuple[str, ...]
    workers: tuple[str, ...]
    """Tracks with the states of its workers."""
    window: float
    """Microseconds looked at."""
    busy: float
    gaps: tuple[Gap, ...]
    """In order of time."""

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.window if self.window else 0.0

    @property
    def counted(self) -> list[Gap]:
        """Returns the gaps that are worth counting, the longest first."""
        return sorted((g for g in self.gaps if g.length >= LEAST_GAP_US), key=lambda g: -g.length)

    @property
    def tracks(self) -> tuple[str, ...]:
        """Returns the tracks of its workers' states, its roles' calls and what those moved to the
        host and back."""
        calls = (track for role in self.roles for track in (role, f"offload {role}"))
        return (*self.workers, *calls)


@dataclass(frozen=True)
class Activity:
    """What the pools of a run did."""

    spans: Mapping[str, list[Span]]
    """Track -> its spans, in order of time."""
    pools: tuple[PoolUse, ...]
    others: tuple[str, ...]
    """Tracks that belong to no pool."""
    steps: tuple[tuple[float, int], ...]
    """(microseconds, step) of the end of each update."""
    sessions: tuple[int, ...]
    """Where the run began, and where it was resumed."""


def waited(idle: Iterable[Gap]) -> dict[str, float]:
    """Maps what gaps waited for, as `rollout.generate`, to microseconds, most first."""
    total: dict[str, float] = defaultdict(float)
    for gap in idle:
        for cause, start, end in gap.causes:
            total[OTHER if cause is None else ".".join(cause.stage)] += end - start
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def understand(events: Iterable[JsonObject]) -> Activity:
    """Parses the events of a `timeline.json`; those that are not complete are left out."""
    events = list(events)
    spans: dict[str, list[Span]] = {}
    for span in filter(None, map(span_of, events)):
        spans.setdefault(span.track, []).append(span)
    for own in spans.values():
        own.sort(key=lambda span: span.start)
    sessions = sorted(int(event["ts"]) for event in events if begins_run(event))
    updates = last_updates(spans.get("actor", ()))
    named = _pools(spans)
    calls = {
        name: [span for role in roles for span in spans[role] if not span.aside]
        for name, (roles, _) in named.items()
    }
    # Each life of the run, from its first call to the end of its last.
    by_life: dict[int, list[Span]] = {}
    for call in sorted(chain(*calls.values()), key=lambda call: call.start):
        by_life.setdefault(bisect_right(sessions, call.start), []).append(call)
    lives = [(life[0].start, max(call.end for call in life)) for life in by_life.values()]
    window, pools = sum(end - start for start, end in lives), list[PoolUse]()
    for name, (roles, workers) in named.items():
        busy = sum(end - start for start, end in union((c.start, c.end) for c in calls[name]))
        others = chain(*(theirs for other, theirs in calls.items() if other != name))
        idle = tuple(gaps(calls[name], others, lives, TOUCH_S * 1e6))
        pools.append(PoolUse(name, roles, workers, window, busy, idle))
    mine = {track for pool in pools for track in pool.tracks}
    return Activity(
        spans=spans,
        pools=tuple(pools),
        others=tuple(track for track in spans if track not in mine),
        steps=tuple((span.end, span.step + 1) for span in updates if span.step is not None),
        sessions=tuple(sessions),
    )


def _pools(spans: Iterable[str]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Maps each pool to the tracks of its roles, and of its workers. Workers are named after their
    pool, the second process of one `worker actor+rollout.1`; a role that no worker's name holds is
    a pool by itself."""
    tracks = sorted(spans)
    workers: dict[str, list[str]] = {}
    for track in tracks:
        if track.startswith(WORKER):
            name = re.sub(r"\.\d+$", "", track.removeprefix(WORKER))
            workers.setdefault(name, []).append(track)
    placed = {role for name in workers for role in name.split("+")}
    workers |= {role: [] for role in ROLES if role in tracks and role not in placed}
    order = {role: place for place, role in enumerate(ROLES)}
    names = sorted(workers, key=lambda name: order.get(name.split("+")[0], len(order)))
    return {
        name: (tuple(role for role in name.split("+") if role in tracks), tuple(workers[name]))
        for name in names
    }


def lanes(activity: Activity) -> JsonObject:
    """Lanes by pool for the page's script; all times are microseconds from the first.

    Each of the lists of a lane has one entry a span: start, length, and the number of its name in
    `names`. `merged_us`: spans that lie together within so many microseconds are one; 0: none is.
    """
    # Calls beside those of a track overlap them, and have a lane of their own.
    drawn: dict[tuple[str, bool], list[Span]] = {}
    for track, own in activity.spans.items():
        for span in own:
            drawn.setdefault((track, span.aside), []).append(_plain(span))
    every = [span for own in drawn.values() for span in own]
    zero = min((span.start for span in every), default=0)
    merged_us = 0
    while sum(len(_merged(own, merged_us)) for own in drawn.values()) > SPANS:
        merged_us = max(1000, 2 * merged_us)
    names: dict[str, int] = {}

    def lane(label: str, spans: Sequence[Span]) -> JsonObject:
        return {
            "label": label,
            "start": [span.start - zero for span in spans],
            "length": [span.end - span.start for span in spans],
            "name": [names.setdefault(span.name, len(names)) for span in spans],
        }

    def lanes_of(tracks: Iterable[str], pool: str = "") -> list[JsonObject]:
        return [
            lane(_label(track, aside, pool), _merged(drawn[track, aside], merged_us))
            | {"phases": track.startswith(WORKER)}
            for track in tracks
            for aside in (False, True)
            if (track, aside) in drawn
        ]

    def gap(gap: Gap) -> list[float]:
        return [gap.start - zero, gap.length, names.setdefault(reason(gap), len(names))]

    return {
        "end": max((span.end for span in every), default=zero) - zero,
        "merged_us": merged_us,
        "pools": [
            {
                "name": pool.name,
                "lanes": lanes_of(pool.tracks, pool.name),
                "gaps": sorted(map(gap, pool.counted[:GAPS])),
            }
            for pool in activity.pools
        ],
        "others": lanes_of(activity.others),
        "steps": [[at - zero, step] for at, step in evenly(activity.steps, STEPS)],
        "every_step": len(activity.steps) <= STEPS,
        "resumed": [at - zero for at in activity.sessions[1:]],
        "names": list(names),
    }


def _label(track: str, aside: bool, pool: str) -> str:
    """Names a lane, under the name of its pool: `calls`, `phases`, `in background`;
    with the role where the pool has several, and the number of a process after the first."""
    if track.startswith(WORKER):
        process = track.removeprefix(WORKER + pool).removeprefix(".")
        return f"phases, process {process}" if process else "phases"
    if not pool:
        return track
    role, offload = track.removeprefix("offload "), track.startswith("offload ")
    kind = "host transfers" if offload else "in background" if aside else "calls"
    return kind if role == pool else f"{role}: {kind}"


def _plain(span: Span) -> Span:
    """Returns the span with a name that is the same at every step: versions and counts of steps are
    dropped."""
    name = re.sub(r"[,:]? (version|step) -?\d+|(?<=^write) \d+$", "", span.name)
    return replace(span, name=name)


def _merged(spans: Sequence[Span], within: int) -> Sequence[Span]:
    """Neighbours that lie together within so many microseconds as one span."""
    if not within:
        return spans
    found: list[Span] = []
    for span in spans:
        if found and span.end - found[-1].start < within:
            last = found[-1]
            name = last.name if last.name == span.name else "several calls"
            found[-1] = replace(last, name=name, end=max(last.end, span.end))
        else:
            found.append(span)
    return found


def reason(gap: Gap) -> str:
    """Says what a gap waited for most, and what came after it."""
    most, length = next(iter(waited([gap]).items()))
    part = length / gap.length
    share = f" ({part:.0%})" if part < 0.995 else ""
    before = "the end" if gap.then is None else ".".join(gap.then.stage)
    return f"waited for {most}{share} before {before}"


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Picks at most `limit` (2 at the least) of the items: the first, the last, and those that lie
    as evenly between them as possible."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]
