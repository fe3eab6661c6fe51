"""Gives pages of the device's pools to the samples that need them (`models.pages`; PagedAttention,
arXiv 2309.06180): each data shard has a pool for its own slots."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrl.models.pages import PAGE, Pages
from jaxrl.sampling.partial_completion import PartialCompletion


def pages_of(positions: int) -> int:
    """Counts the pages that hold so many positions of one slot."""
    return -(-positions // PAGE)


def pool_pages(cache_tokens: int, slots: int, longest: int) -> int:
    """Counts the pages of each data shard: no more than its slots can have."""
    return min(pages_of(cache_tokens), slots * pages_of(longest))


class PagePool:
    """The pages of one call of `Engine.generate`."""

    def __init__(self, shards: int, pages: int):
        """Starts with all pages free; `pages` is the number of pages of each shard."""
        self.pages = pages
        self._free = [list(range(pages))[::-1] for _ in range(shards)]
        self._held: dict[tuple[int, int], tuple[int, list[int]]] = {}
        """(prompt, sample) -> shard, and pages in order."""

    def missing(self, sample: PartialCompletion, positions: int) -> int:
        """Counts the pages that the sample lacks to have so many positions."""
        _, held = self._held.get((sample.prompt, sample.sample_id), (0, []))
        return max(pages_of(positions) - len(held), 0)

    def free(self, shard: int) -> int:
        """Counts the pages that nobody has."""
        return len(self._free[shard])

    def of(self, sample: PartialCompletion) -> list[int]:
        """Returns the pages of a sample, counted among those of its shard."""
        return self._held[sample.prompt, sample.sample_id][1]

    def give(self, shard: int, sample: PartialCompletion, positions: int) -> None:
        """Lets the sample have so many positions, of pages that are free."""
        missing = self.missing(sample, positions)
        _, held = self._held.setdefault((sample.prompt, sample.sample_id), (shard, []))
        held += [self._free[shard].pop() for _ in range(missing)]

    def take_back(self, sample: PartialCompletion) -> None:
        """Frees the pages of a sample."""
        shard, held = self._held.pop((sample.prompt, sample.sample_id))
        self._free[shard] += held

    def shrink(self, pages: int) -> np.ndarray:
        """Keeps fewer pages, all of those that samples have among them, which get new numbers.

        Args:
            pages: of each shard.

        Returns:
            [shards * pages] int32: the pages to keep, counted among those of their shard.
        """
        kept = [
            [page for k, held in self._held.values() if k == shard for page in held]
            for shard in range(len(self._free))
        ]
        for shard, old in enumerate(kept):
            new = iter(range(len(old)))
            for k, held in self._held.values():
                if k == shard:
                    held[:] = [next(new) for _ in held]
            self._free[shard] = list(range(len(old), pages))[::-1]
        self.pages = pages
        return np.array([old + [0] * (pages - len(old)) for old in kept], np.int32).reshape(-1)

    def table(self, seated: Mapping[int, PartialCompletion], slots: int, width: int) -> Pages:
        """Makes the table of the pages of all slots.

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
