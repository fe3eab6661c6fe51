"""From a timeline to what each pool did: its calls, its idle gaps, and what those waited for.

A pool is busy while a call of one of its roles runs, its wait for arguments excluded; calls beside
the others (the wait for a disk) do not count. It is looked at from the first call of any pool to
the last; where a run was resumed, each life by itself.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from jaxrl.profile.waits import OTHER
from jaxrl.sharding.placement import ROLES

LEAST_GAP_US = 1000
"""Shorter gaps count in the idle share, and are not counted one by one."""
SLOP_US = 1000
"""A call that ends so late after a gap may still be what the gap waited for: the clocks of two
workers, and the way of a result."""
WORKER = "worker "


@dataclass(frozen=True)
class Span:
    """What happened on a track; microseconds of the trace."""

    track: str
    name: str
    start: int
    end: int
    args: Mapping[str, Any]

    @property
    def aside(self) -> bool:
        """Beside the calls that the worker takes in order."""
        return bool(self.args.get("aside"))

    @property
    def call(self) -> str:
        return f"{self.track}.{self.name}"


@dataclass(frozen=True)
class Gap:
    """A time in which a pool did nothing."""

    start: int
    end: int
    then: str | None
    """The call that it ended with; None at the end of the run."""
    waited: Mapping[str, int]
    """The calls of other pools that it waited for, one after the other -> microseconds."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class PoolUse:
    """One pool over the whole timeline."""

    name: str
    roles: tuple[str, ...]
    workers: tuple[str, ...]
    """Its tracks of states."""
    window: int
    """Microseconds looked at."""
    busy: int
    gaps: tuple[Gap, ...]
    """In order of time."""

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.window if self.window else 0.0

    @property
    def counted(self) -> list[Gap]:
        """The gaps that are worth counting."""
        return [gap for gap in self.gaps if gap.length >= LEAST_GAP_US]

    @property
    def tracks(self) -> tuple[str, ...]:
        """All that may be told of it: its workers' states, its roles' calls and what is moved to
        the host and back for those.
        """
        calls = (track for role in self.roles for track in (role, f"offload {role}"))
        return (*self.workers, *calls)

    def waited(self) -> dict[str, int]:
        """Microseconds of all gaps by what they waited for, most first."""
        total: dict[str, int] = {}
        for gap in self.gaps:
            for call, length in gap.waited.items():
                total[call] = total.get(call, 0) + length
        return dict(sorted(total.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Use:
    """A timeline, understood."""

    spans: Mapping[str, list[Span]]
    """Track -> its spans, in order of time."""
    pools: tuple[PoolUse, ...]
    others: tuple[str, ...]
    """Tracks that belong to no pool."""
    steps: tuple[tuple[int, int], ...]
    """(microseconds, step) of the end of each update."""
    sessions: tuple[int, ...]
    """Where the run began, and where it was resumed."""


def understand(events: Iterable[Mapping[str, Any]]) -> Use:
    """The events of a `timeline.json`; those that are not complete are left out."""
    spans: dict[str, list[Span]] = {}
    sessions: list[int] = []
    for event in events:
        if event.get("ph") == "i" and event.get("name") in ("start", "resume"):
            sessions.append(int(event.get("ts", 0)))
        elif event.get("ph") == "X" and {"cat", "name", "ts", "dur"} <= event.keys():
            start, track = int(event["ts"]), str(event["cat"])
            end = start + int(event["dur"])
            span = Span(track, str(event["name"]), start, end, event.get("args") or {})
            spans.setdefault(track, []).append(span)
    for own in spans.values():
        own.sort(key=attrgetter("start"))
    updates = [span for span in spans.get("actor", []) if span.name == "update"]
    numbered = ((span.end, span.args.get("step")) for span in updates)
    steps = tuple((end, step + 1) for end, step in numbered if isinstance(step, int))
    pools = _use(_pools(spans), spans, sorted(sessions) or [0])
    mine = {track for pool in pools for track in pool.tracks}
    return Use(
        spans=spans,
        pools=pools,
        others=tuple(track for track in spans if track not in mine),
        steps=steps,
        sessions=tuple(sorted(sessions)),
    )


Named = tuple[str, tuple[str, ...], tuple[str, ...]]
"""A pool: name, tracks of its roles, tracks of its workers."""


def _pools(spans: Mapping[str, Any]) -> list[Named]:
    """The pools as the tracks of the workers name them, `worker actor+rollout.1` the second process
    of one; a role without such a track is a pool by itself.
    """
    workers: dict[str, list[str]] = {}
    for track in sorted(spans):
        if track.startswith(WORKER):
            name = re.sub(r"\.\d+$", "", track.removeprefix(WORKER))
            workers.setdefault(name, []).append(track)
    found: list[Named] = []
    for name, tracks in workers.items():
        found.append((name, tuple(r for r in name.split("+") if r in spans), tuple(tracks)))
    placed = {role for _, roles, _ in found for role in roles}
    found += [(role, (role,), ()) for role in ROLES if role in spans and role not in placed]
    order = {role: place for place, role in enumerate(ROLES)}
    return sorted(found, key=lambda pool: order.get(pool[0].split("+")[0], len(order)))


def _use(
    pools: Sequence[Named], spans: Mapping[str, list[Span]], sessions: Sequence[int]
) -> tuple[PoolUse, ...]:
    calls = [
        sorted(
            (span for role in roles for span in spans[role] if not span.aside),
            key=attrgetter("start"),
        )
        for _, roles, _ in pools
    ]
    windows = _windows([span for own in calls for span in own], sessions)
    return tuple(
        PoolUse(
            name=name,
            roles=roles,
            workers=workers,
            window=sum(end - start for start, end in windows),
            busy=sum(end - start for start, end in _union(own)),
            gaps=tuple(
                _gaps(own, [s for other in calls if other is not own for s in other], windows)
            ),
        )
        for (name, roles, workers), own in zip(pools, calls, strict=True)
    )


def _windows(calls: Sequence[Span], sessions: Sequence[int]) -> list[tuple[int, int]]:
    """Each life of the run, from its first call to the end of its last."""
    lives: dict[int, list[Span]] = {}
    for call in calls:
        lives.setdefault(bisect_right(sessions, call.start), []).append(call)
    return [
        (min(call.start for call in life), max(call.end for call in life))
        for _, life in sorted(lives.items())
    ]


def _union(calls: Sequence[Span]) -> list[tuple[int, int]]:
    """The times in which one of the calls runs; they are in order of their starts."""
    found: list[tuple[int, int]] = []
    for call in calls:
        if found and call.start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], call.end)
        else:
            found.append((call.start, call.end))
    return found


def _gaps(
    own: Sequence[Span], others: Sequence[Span], windows: Sequence[tuple[int, int]]
) -> Iterable[Gap]:
    others = sorted(others, key=attrgetter("end"))
    ends = [span.end for span in others]
    starts = {span.start: span.call for span in reversed(own)}
    busy = _union(own)
    for first, last in windows:
        inside = [time for time in busy if first <= time[0] < last]
        edges = [first, *(edge for time in inside for edge in time), last]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end > start:
                yield Gap(start, end, starts.get(end), _waited(start, end, others, ends))


def _waited(start: int, end: int, others: Sequence[Span], ends: Sequence[int]) -> dict[str, int]:
    """Back from the end of a gap: the call that ended last before it, then the one that ended last
    before that began, and so on; what lies between is nobody's.
    """
    found: dict[str, int] = {}

    def add(name: str, length: int) -> None:
        if length > 0:
            found[name] = found.get(name, 0) + length

    at = end
    while at > start:
        number = bisect_right(ends, at + SLOP_US) - 1
        # Calls that began after `at` end within the slop, and are nothing that it waited for.
        while number >= 0 and others[number].start >= at:
            number -= 1
        if number < 0 or ends[number] <= start:
            break
        call = others[number]
        add(OTHER, at - min(call.end, at))
        add(call.call, min(call.end, at) - max(call.start, start))
        at = max(call.start, start)
    add(OTHER, at - start)
    return found
