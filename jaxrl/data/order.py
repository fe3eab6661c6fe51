"""Which row stands at a position of the prompt stream: pure functions of (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm

import numpy as np

from jaxrl.errors import UserError

LONGEST_BLOCK = 1000
"""Positions over which a mixture's shares hold exactly; finer shares are rounded to 1/1000."""
_BLOCKS, _SOURCES = 1, 2
"""First of the seeds' second words. Never 0: numpy takes trailing zeros of a seed for nothing."""


class Passes:
    """All rows once in each pass, each pass in an order of its own."""

    def __init__(self, rows: np.ndarray, seed: tuple[int, ...], shuffle: bool):
        """
        Args:
            rows: what to give, in the order that shuffle=False takes.
        """
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._pass = lru_cache(maxsize=2)(self._order_of_pass)

    def row(self, position: int) -> int:
        number, place = divmod(position, len(self._rows))
        return int(self._rows[self._pass(number)[place]])

    def _order_of_pass(self, number: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self._rows))
        return np.random.default_rng((*self._seed, number)).permutation(len(self._rows))


class Mixture:
    """Several sources in fixed shares, each with passes of its own.

    Positions come in blocks. Every block holds the same number of each source, so that the draws
    of a source before a position are counted, not remembered: draw d of a source that has c places
    in a block is place d % c of block d // c.
    """

    def __init__(
        self, rows: Sequence[np.ndarray], weights: Sequence[float], seed: int, shuffle: bool
    ):
        """
        Args:
            rows: of each source.
            weights: of each source: its share of the positions is its part of their sum.
            shuffle: False spreads the sources evenly within a block, rows as they stand.
        """
        self._counts = apportion(weights)
        self._seed, self._shuffle = seed, shuffle
        self._passes = [
            Passes(each, (seed, _SOURCES + number), shuffle) for number, each in enumerate(rows)
        ]
        self._block = lru_cache(maxsize=2)(self._sources_and_draws)

    def row(self, position: int) -> int:
        block, place = divmod(position, sum(self._counts))
        sources, draws = self._block(block)
        source = int(sources[place])
        return self._passes[source].row(block * self._counts[source] + int(draws[place]))

    def _sources_and_draws(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source of each place of a block, and how many draws of that source come
        before."""
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        if self._shuffle:
            order = np.random.default_rng((self._seed, _BLOCKS, block)).permutation(len(sources))
        else:
            even = np.concatenate([(np.arange(count) + 0.5) / count for count in self._counts])
            order = np.argsort(even, kind="stable")
        sources = sources[order]
        draws = np.zeros(len(sources), np.int64)
        for source, count in enumerate(self._counts):
            draws[sources == source] = np.arange(count)
        return sources, draws


def apportion(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of places of each source in a block: exact in the shortest block, if 1000
    places are enough; else out of 1000, rounded by largest remainders."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    block = min(lcm(*(share.denominator for share in shares)), LONGEST_BLOCK)
    quotas = [share * block for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(counts)), key=lambda i: counts[i] - quotas[i])
    for source in by_remainder[: block - sum(counts)]:
        counts[source] += 1
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True), start=1):
        if not count:
            raise UserError(
                f"weight {weight:g} of source {number} is too small: its share of "
                f"{float(shares[number - 1]):.2g} is under one prompt in {LONGEST_BLOCK}; leave "
                "the source out or raise its weight"
            )
    return tuple(counts)
