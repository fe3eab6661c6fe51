"""The timeline of a run, in the few numbers that the page draws."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxrl.process.json_types import JsonObject
from jaxrl.profile.waits import Gap, Span
from jaxrl.report.curves import evenly
from jaxrl.report.idle import Activity, waited

SPANS = 40_000
"""Most spans of all lanes together."""
GAPS = 1000
"""Most gaps of a pool that are drawn: the longest."""
STEPS = 20_000
"""Most steps whose ends are on the page; where there are more, the page says `about step N`."""


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

    def lanes_of(tracks: Iterable[str]) -> list[JsonObject]:
        return [
            lane(f"{track}, beside" if aside else track, _merged(drawn[track, aside], merged_us))
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
                "lanes": lanes_of(pool.tracks),
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
