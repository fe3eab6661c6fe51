"""Curves of many steps in few points, so that no spike is lost and no mean is shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Curve:
    """Values over steps, as they are drawn."""

    steps: list[int]
    values: list[float]
    mean_steps: list[float]
    """Where the means belong: the middle of the steps that each is over."""
    means: list[float]
    """What is smoothed; the values themselves where nothing was thinned."""


def thin(steps: Sequence[int], values: Sequence[float], limit: int) -> Curve:
    """At most `limit` values (4 at the least): the first, the last, and of each stretch of equally
    many the lowest and the highest; of each stretch also the mean.
    """
    n = len(steps)
    if n <= limit:
        return Curve(list(steps), list(values), [float(s) for s in steps], list(values))
    size = ceil(n / max(1, (limit - 2) // 2))
    stretches = [range(start, min(start + size, n)) for start in range(0, n, size)]
    extremes = {pick(here, key=values.__getitem__) for here in stretches for pick in (min, max)}
    kept = sorted({0, n - 1} | extremes)
    return Curve(
        [steps[i] for i in kept],
        [values[i] for i in kept],
        [fmean(steps[i] for i in here) for here in stretches],
        [fmean(values[i] for i in here) for here in stretches],
    )


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` (2 at the least) of the items: the first, the last, and those that lie as
    evenly between them as they can.
    """
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]
