"""The timeline of a run, in the few numbers that the page draws."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jaxrl.report.idle import Gap, PoolUse, Span, Use
from jaxrl.report.thin import evenly

SPANS = 40_000
"""Most spans of all lanes together."""
GAPS = 1000
"""Most gaps of a pool that are drawn: the longest."""
STEPS = 20_000
"""Most steps whose ends are on the page; of more, some are told as `about step N`."""
SEVERAL = "several calls"


def lanes(use: Use) -> dict[str, Any]:
    """Lanes by pool for the page's script; all times are microseconds from the first.

    Each of the lists of a lane has one entry a span: start, length, and the number of its name in
    `names`. `merged_us`: spans that lie together within so many microseconds are one; 0: none is.
    """
    spans = {track: list(_lanes_of(track, own)) for track, own in use.spans.items()}
    drawn = {lane: own for of_track in spans.values() for lane, own in of_track}
    every = [span.start for own in drawn.values() for span in own]
    zero = min(every, default=0)
    merged_us = _resolution(drawn.values())
    names = _Names()
    table = {
        lane: _packed([_plain(span) for span in own], merged_us, zero, names)
        for lane, own in drawn.items()
    }

    def of(tracks: Iterable[str]) -> list[dict[str, Any]]:
        return [
            {"label": lane} | table[lane] for track in tracks for lane, _ in spans.get(track, ())
        ]

    return {
        "end": max((span.end for own in drawn.values() for span in own), default=zero) - zero,
        "merged_us": merged_us,
        "pools": [
            {
                "name": pool.name,
                "lanes": of(pool.tracks),
                "gaps": [_gap(gap, zero, names) for gap in _longest(pool)],
            }
            for pool in use.pools
        ],
        "others": of(use.others),
        "steps": [[at - zero, step] for at, step in _some_steps(use)],
        "every_step": len(use.steps) <= STEPS,
        "resumed": [at - zero for at in use.sessions[1:]],
        "names": names.list,
    }


class _Names:
    """Each text once."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.list)
            self.list.append(name)
        return self._numbers[name]


def _lanes_of(track: str, spans: Sequence[Span]) -> Iterable[tuple[str, list[Span]]]:
    """A track's calls, and those beside them in a lane of their own: they overlap."""
    for lane, aside in ((track, False), (f"{track}, beside", True)):
        own = [span for span in spans if span.aside is aside]
        if own:
            yield lane, own


def _plain(span: Span) -> Span:
    """With a name that is the same at every step: versions and counts of steps are dropped."""
    name = re.sub(r"[,:]? (version|step) -?\d+|(?<=^write) \d+$", "", span.name)
    return Span(span.track, name, span.start, span.end, span.args)


def _resolution(lanes: Iterable[Sequence[Span]]) -> int:
    """The least microseconds to merge within, so that `SPANS` are enough."""
    lanes, within = list(lanes), 0
    while sum(len(_merged(lane, within)) for lane in lanes) > SPANS:
        within = max(1000, 2 * within)
    return within


def _merged(spans: Sequence[Span], within: int) -> list[Span]:
    """Neighbours that lie together within so many microseconds as one span."""
    if not within:
        return list(spans)
    found: list[Span] = []
    for span in spans:
        if found and span.end - found[-1].start < within:
            last = found[-1]
            name = last.name if last.name == span.name else SEVERAL
            found[-1] = Span(last.track, name, last.start, max(last.end, span.end), {})
        else:
            found.append(span)
    return found


def _packed(spans: Sequence[Span], within: int, zero: int, names: _Names) -> dict[str, Any]:
    merged = _merged(spans, within)
    return {
        "start": [span.start - zero for span in merged],
        "length": [span.end - span.start for span in merged],
        "name": [names.number(span.name) for span in merged],
    }


def _longest(pool: PoolUse) -> list[Gap]:
    longest = sorted(pool.counted, key=lambda gap: -gap.length)[:GAPS]
    return sorted(longest, key=lambda gap: gap.start)


def _gap(gap: Gap, zero: int, names: _Names) -> list[int]:
    """Start, length, and the number of a text that tells of it."""
    return [gap.start - zero, gap.length, names.number(told(gap))]


def told(gap: Gap) -> str:
    """What a gap waited for most, and what came after it."""
    most = max(gap.waited, key=lambda call: gap.waited[call])
    part = gap.waited[most] / gap.length
    share = f" ({part:.0%})" if part < 0.995 else ""
    before = "the end" if gap.then is None else gap.then
    return f"waited for {most}{share} before {before}"


def _some_steps(use: Use) -> list[tuple[int, int]]:
    return [use.steps[i] for i in evenly(range(len(use.steps)), STEPS)]
