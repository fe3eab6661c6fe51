"""Gives pages of the device's pools to the samples that need them (`models.pages`): each data shard
has a pool for its own slots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl.models.pages import PAGE, Pages
from jaxrl.sampling.unfinished import Unfinished


def pages_of(positions: int) -> int:
    """That hold so many positions of one slot."""
    return -(-positions // PAGE)


class PagePool:
    """The pages of one call of `Engine.generate`."""

    def __init__(self, shards: int, pages: int):
        """`pages` are those of each shard."""
        self.pages = pages
        self._free = [list(range(pages))[::-1] for _ in range(shards)]
        self._held: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """(prompt, sample) -> shard, and pages in order."""

    def missing(self, sample: Unfinished, positions: int) -> int:
        """Pages that the sample needs to have so many positions, beyond those that it has."""
        _, held = self._held.get((sample.prompt, sample.sample_id), (0, []))
        return max(pages_of(positions) - len(held), 0)

    def free(self, shard: int) -> int:
        """Pages that nobody has."""
        return len(self._free[shard])

    def give(self, shard: int, sample: Unfinished, positions: int) -> list[int]:
        """Lets the sample have so many positions, of pages that are free.

        Returns:
            All of its pages, counted through those of all shards.
        """
        missing = self.missing(sample, positions)
        _, held = self._held.setdefault((sample.prompt, sample.sample_id), (shard, []))
        held += [self._free[shard].pop() for _ in range(missing)]
        return [shard * self.pages + page for page in held]

    def take_back(self, sample: Unfinished) -> None:
        """The sample needs its pages no longer."""
        shard, held = self._held.pop((sample.prompt, sample.sample_id), (0, []))
        self._free[shard] += held

    def table(self, seated: Mapping[int, Unfinished], slots: int, width: int) -> Pages:
        """The pages of all slots.

        Args:
            slots: of each shard.
            width: most pages of a slot.
        """
        shards = len(self._free)
        owners, firsts = (
            np.full((shards, self.pages), -1, np.int32),
            np.zeros((shards, self.pages), np.int32),
        )
        table = np.full((shards * slots, width), -1, np.int32)
        for slot, sample in seated.items():
            shard, held = self._held[sample.prompt, sample.sample_id]
            owners[shard, held] = slot % slots
            firsts[shard, held] = PAGE * np.arange(len(held), dtype=np.int32)
            table[slot, : len(held)] = held
        return Pages(owners.reshape(-1), firsts.reshape(-1), table)
