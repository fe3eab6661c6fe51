"""Which sample has which slot, with how many pages where the cache is a pool of them
(`sampling.page_pool`), and which samples wait.

The older a sample, in the order of prompts and samples, the less it waits: where the pages of a
device do not suffice for the next launch, the youngest sample there gives all of its own back, and
waits with its tokens. The oldest one always goes on, since a pool holds the longest completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.sampling import decode
from jaxrl.sampling.caches import Unread
from jaxrl.sampling.page_pool import PagePool, pages_of
from jaxrl.sampling.unfinished import Unfinished


def _age(sample: Unfinished) -> tuple[int, int]:
    """Less of an older sample."""
    return sample.prompt, sample.sample_id


class Seating:
    """Of one call of `Engine.generate`. A slot that is free decodes nothing."""

    def __init__(
        self,
        samples: Sequence[Unfinished],
        slots: int,
        shards: int,
        launch_tokens: int,
        pool: PagePool | None,
    ):
        """All samples wait, the oldest first.

        Args:
            slots: of all data shards.
            pool: None: every slot has its own cache.
        """
        self.queue = deque(samples)
        self.seated: dict[int, Unfinished] = {}
        self.table = np.zeros((slots, 6), np.int32)
        """As of `decode.launch`."""
        self._shards, self._launch_tokens, self._pool = shards, launch_tokens, pool

    @property
    def slots(self) -> int:
        """Of each data shard."""
        return len(self.table) // self._shards

    def decoding(self) -> np.ndarray:
        """[slots] bool: those that the next launch decodes."""
        counts: np.ndarray = self.table[:, decode.COUNT]
        return counts < self.table[:, decode.LIMIT]

    def vacant(self) -> int | None:
        """A free slot for the first sample that waits, if there is one, where that sample would
        also have pages."""
        if not self.queue or len(self.seated) == len(self.table):
            return None
        for shard in range(self._shards):
            own = range(shard * self.slots, (shard + 1) * self.slots)
            slot = next((slot for slot in own if slot not in self.seated), None)
            if slot is not None and self._has_pages(shard, self.queue[0]):
                return slot
        return None

    def _has_pages(self, shard: int, sample: Unfinished) -> bool:
        """For its next launch, and one to spare for each of the others, lest it be sent back soon
        and all of its tokens read again. With log-normal lengths and too few pages, a twentieth as
        many are sent back as without, for 4% more launches."""
        if self._pool is None:
            return True
        others = sum(slot // self.slots == shard for slot in self.seated)
        return self._missing(sample) + others <= self._pool.free(shard)

    def _of(self, shard: int) -> list[Unfinished]:
        """The samples in the slots of a data shard, the oldest first."""
        found = (x for slot, x in self.seated.items() if slot // self.slots == shard)
        return sorted(found, key=_age)

    def sit_next(self, slot: int, prompt: Sequence[int]) -> Unfinished:
        """Seats the first sample that waits, of this prompt, in a slot that is `vacant`."""
        sample = self.queue.popleft()
        count = len(sample.tokens)
        token = sample.tokens[-1] if sample.tokens else prompt[-1]
        at = len(prompt) + count - 1
        ids = sample.prompt_id, sample.sample_id
        self._sit(sample, slot, (token, at, count, sample.turn_end, *ids))
        if self._pool is not None:
            self._pool.give(slot // self.slots, sample, self._positions(sample))
        return sample

    def _sit(self, sample: Unfinished, slot: int, row: Sequence[int] | np.ndarray) -> None:
        sample.slot, self.seated[slot], self.table[slot] = slot, sample, row

    def free(self, sample: Unfinished) -> None:
        """Takes the slot of a sample, and its pages."""
        assert sample.slot is not None
        self.table[sample.slot] = 0
        del self.seated[sample.slot]
        sample.slot = None
        if self._pool is not None:
            self._pool.take_back(sample)

    def _positions(self, sample: Unfinished) -> int:
        """Behind its prompt, up to the end of the next launch."""
        return min(sample.turn_end, len(sample.tokens) + self._launch_tokens)

    def _missing(self, sample: Unfinished) -> int:
        assert self._pool is not None
        return self._pool.missing(sample, self._positions(sample))

    def is_short_of_pages(self) -> bool:
        """Whether the pool has too few pages for the next launch of all that are seated."""
        if self._pool is None:
            return False
        needed = [sum(map(self._missing, self._of(shard))) for shard in range(self._shards)]
        return any(n > self._pool.free(shard) for shard, n in enumerate(needed))

    def give_pages(self) -> int:
        """Gives all that are seated the pages of their next launch.

        Returns:
            How many samples have lost their slots, because there were too few pages. They wait.
        """
        sent = 0
        for shard in range(0 if self._pool is None else self._shards):
            assert self._pool is not None
            left = deque(self._of(shard))
            while left:
                if self._missing(left[0]) <= self._pool.free(shard):
                    sample = left.popleft()
                    self._pool.give(shard, sample, self._positions(sample))
                else:
                    sample = left.pop()
                    self.free(sample)
                    self.queue = deque(sorted([sample, *self.queue], key=_age))
                    sent += 1
        return sent

    def unread(
        self,
        begun: Sequence[Unfinished],
        prompts: Sequence[Sequence[int]],
        width: int,
        rows: dict[tuple[int, int], int],
    ) -> tuple[Unread, list[Unfinished]]:
        """What is to be read of samples that had to wait and are seated again: one of each data
        shard; and the others.

        Args:
            width: of the arrays, at least the longest of them.
            rows: (shard, prompt) -> the row there that does not hold it yet. What will is taken
                out.
        """
        assert self._pool is not None
        tokens = np.zeros((self._shards, width), np.int32)
        lengths = np.ones(self._shards, np.int32)
        where, starts = np.full(self._shards, -1, np.int32), np.zeros(self._shards, np.int32)
        pages = np.full((self._shards, pages_of(width)), -1, np.int32)
        taken: set[int] = set()
        others: list[Unfinished] = []
        for sample in begun:
            assert sample.slot is not None
            shard, prompt = sample.slot // self.slots, prompts[sample.prompt]
            if shard in taken:
                others.append(sample)
                continue
            taken.add(shard)
            read = [*prompt, *sample.tokens[:-1]]
            tokens[shard, : len(read)], lengths[shard] = read, len(read)
            starts[shard] = len(prompt) - 1
            own = self._pool.of(sample)[: pages_of(len(sample.tokens))]
            pages[shard, : len(own)] = own
            where[shard] = rows.pop((shard, sample.prompt), -1)
        return Unread(tokens, lengths, where, starts, pages), others

    def most_pages(self) -> int:
        """That the samples of a data shard take, if all become as long as they may."""
        each = (sum(pages_of(x.turn_end) for x in self._of(k)) for k in range(self._shards))
        return max(each)

    def shrink(self, fewer: Callable[[int, int], int | None]) -> np.ndarray | None:
        """Renumbers the samples in fewer slots. No slot moves between devices.

        Args:
            fewer: (most slots in use of a device, its slots) -> those that it keeps; or None.

        Returns:
            [slots left] int32: for each device, the slots that it keeps, counted among its own.
            None if all slots stay.
        """
        shards, held = self._shards, self.slots
        taken = [[s for s in sorted(self.seated) if s // held == k] for k in range(shards)]
        left = fewer(max(map(len, taken)), held)
        if left is None:
            return None
        kept, old = np.zeros((shards, left), np.int32), self.table
        self.table = np.zeros((shards * left, old.shape[1]), np.int32)
        for k, slots in enumerate(taken):
            for at, slot in enumerate(slots):
                kept[k, at] = slot - k * held
                self._sit(self.seated.pop(slot), k * left + at, old[slot])
        return kept.reshape(-1)
