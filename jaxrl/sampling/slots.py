"""Which sample has which slot, with which pages where the cache is a pool of them
(PagedAttention, arXiv 2309.06180), and which samples wait.

The older a sample, in the order of prompts and samples, the less it waits: where the pages of a
device do not suffice for the next launch, the youngest sample there gives all of its own back, and
waits with its tokens. The oldest one always goes on, since a pool holds the longest completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl.models.shared_prompts import PAGE, Pages
from jaxrl.sampling import decode
from jaxrl.sampling.partial_completion import PartialCompletion


def pages_of(positions: int) -> int:
    """Counts the pages that hold so many positions of one slot."""
    return -(-positions // PAGE)


def pool_pages(cache_tokens: int, slots: int, longest: int) -> int:
    """Counts the pages of each data shard: no more than its slots can have."""
    return min(pages_of(cache_tokens), slots * pages_of(longest))


class PagePool:
    """The pages of one call of `Engine.generate`: each data shard has a pool for its own slots."""

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


def _age(sample: PartialCompletion) -> tuple[int, int]:
    """Returns what is less of an older sample."""
    return sample.prompt, sample.sample_id


class Slots:
    """The slots of one call of `Engine.generate`. One that is free decodes nothing."""

    def __init__(
        self,
        samples: Sequence[PartialCompletion],
        slots: int,
        shards: int,
        launch_tokens: int,
        pool: PagePool | None,
    ):
        """Queues all samples, the oldest first.

        Args:
            slots: of all data shards.
            pool: None: every slot has its own cache.
        """
        self.queue = deque(samples)
        self.seated: dict[int, PartialCompletion] = {}
        self.table = np.zeros((slots, 6), np.int32)
        """As of `decode.launch`."""
        self._shards, self._launch_tokens, self._pool = shards, launch_tokens, pool

    @property
    def per_shard(self) -> int:
        """Returns the number of slots of each data shard."""
        return len(self.table) // self._shards

    def decoding(self) -> np.ndarray:
        """Returns which slots the next launch decodes, [slots] bool."""
        counts: np.ndarray = self.table[:, decode.COUNT]
        return counts < self.table[:, decode.LIMIT]

    def vacant(self) -> int | None:
        """Returns a free slot for the first sample that waits, if there is one, where that sample
        would also have pages."""
        if not self.queue or len(self.seated) == len(self.table):
            return None
        for shard in range(self._shards):
            slots = range(shard * self.per_shard, (shard + 1) * self.per_shard)
            slot = next((slot for slot in slots if slot not in self.seated), None)
            if slot is None:
                continue
            if self._pool is None:
                return slot
            # A page to spare for each of the others, lest the sample be preempted soon and all of
            # its tokens read again. With log-normal lengths and too few pages, a twentieth as many
            # are preempted as without, for 4% more launches.
            others = sum(slot in self.seated for slot in slots)
            if self._missing(self.queue[0]) + others <= self._pool.free(shard):
                return slot
        return None

    def seat_next(self, slot: int, prompt: Sequence[int]) -> PartialCompletion:
        """Seats the first sample that waits, of this prompt, in a slot that is `vacant`."""
        sample = self.queue.popleft()
        count = len(sample.tokens)
        token = sample.tokens[-1] if sample.tokens else prompt[-1]
        row = token, len(prompt) + count - 1, count, sample.turn_end
        sample.slot, self.seated[slot] = slot, sample
        self.table[slot] = (*row, sample.prompt_id, sample.sample_id)
        if self._pool is not None:
            self._pool.give(slot // self.per_shard, sample, self._positions(sample))
        return sample

    def free(self, sample: PartialCompletion) -> None:
        """Frees the slot of a sample, and its pages."""
        assert sample.slot is not None
        self.table[sample.slot] = 0
        del self.seated[sample.slot]
        sample.slot = None
        if self._pool is not None:
            self._pool.take_back(sample)

    def _in_shard(self, shard: int) -> list[PartialCompletion]:
        """Returns the samples in the slots of a data shard, the oldest first."""
        samples = (x for slot, x in self.seated.items() if slot // self.per_shard == shard)
        return sorted(samples, key=_age)

    def _positions(self, sample: PartialCompletion) -> int:
        """Counts its positions behind its prompt, up to the end of the next launch."""
        return min(sample.turn_end, len(sample.tokens) + self._launch_tokens)

    def _missing(self, sample: PartialCompletion) -> int:
        assert self._pool is not None
        return self._pool.missing(sample, self._positions(sample))

    def is_short_of_pages(self) -> bool:
        """Returns whether there are too few pages for the next launch of all that are seated."""
        assert self._pool is not None
        needed = [sum(map(self._missing, self._in_shard(shard))) for shard in range(self._shards)]
        return any(n > self._pool.free(shard) for shard, n in enumerate(needed))

    def give_pages(self) -> int:
        """Gives all that are seated the pages of their next launch.

        Returns:
            How many samples were preempted, because there were too few pages: they have lost their
            slots, and wait.
        """
        assert self._pool is not None
        preempted = 0
        for shard in range(self._shards):
            samples = deque(self._in_shard(shard))
            while samples:
                if self._missing(samples[0]) <= self._pool.free(shard):
                    sample = samples.popleft()
                    self._pool.give(shard, sample, self._positions(sample))
                else:
                    sample = samples.pop()
                    self.free(sample)
                    self.queue = deque(sorted([sample, *self.queue], key=_age))
                    preempted += 1
        return preempted

    def most_pages(self) -> int:
        """Counts the pages of a data shard's samples if all become as long as they may."""
        shards = map(self._in_shard, range(self._shards))
        return max(sum(pages_of(x.turn_end) for x in samples) for samples in shards)

    def shrink(self, fewer: Callable[[int, int], int | None]) -> np.ndarray | None:
        """Renumbers the samples in fewer slots. No slot moves between devices.

        Args:
            fewer: (most slots in use of a device, its slots) -> those that it keeps; or None.

        Returns:
            [slots left] int32: for each device, the slots that it keeps, counted among its own.
            None if all slots stay.
        """
        shards, before = self._shards, self.per_shard
        taken = [[s for s in sorted(self.seated) if s // before == k] for k in range(shards)]
        left = fewer(max(map(len, taken)), before)
        if left is None:
            return None
        kept, table = np.zeros((shards, left), np.int32), self.table
        self.table = np.zeros((shards * left, table.shape[1]), np.int32)
        for shard, slots in enumerate(taken):
            for i, slot in enumerate(slots):
                kept[shard, i] = slot - shard * before
                sample, new = self.seated.pop(slot), shard * left + i
                sample.slot, self.seated[new], self.table[new] = new, sample, table[slot]
        return kept.reshape(-1)
