"""Which row of the device's cache of prompts holds which prompt, and which slots read it
(`models.shared_prompts`).

Each data shard has rows for the prompts of its own slots. A row is given back when no slot of its
shard reads it. There are at first as many rows as consecutive samples fill the slots from, which is
all that a batch needs whose samples have a slot each. Refilled slots may need more, as long
completions keep their prompts: rows double then, up to one for each slot, so that no sample waits
for a row. But for rounding, the keys and values in rows and slots are together no more than those
of slots with a copy of their prompt each.
"""

from __future__ import annotations

import numpy as np

from jaxrl.models.buckets import bucket
from jaxrl.models.shared_prompts import Seats


def rows_at_first(slots: int, samples: int, prompts: int) -> int:
    """Counts the rows of each shard with so many slots: the prompts of which as many consecutive
    samples can be, of `prompts` prompts of `samples` each."""
    straddle = slots // samples if slots % samples == 0 else (slots - 1) // samples + 2
    return min(straddle, slots, bucket(prompts))  # like numbers of prompts share a program


def rows_at_most(slots: int, shards: int, samples: int, prompts: int) -> int:
    """Counts the rows that each shard may need: the prompts of its slots, after any refill."""
    if slots * shards >= samples * prompts:  # no slot is refilled
        return rows_at_first(slots, samples, prompts)
    return min(slots, bucket(prompts))


def seats_of_row(slots: int, samples: int) -> int:
    """Counts the slots that may read one row, rounded up to a bucket: like numbers of samples
    share a program."""
    return min(bucket(samples), slots)


class PromptRows:
    """The rows of one call of `Engine.generate`.

    Slots are told by the index of the prompt of each, [slots] int32, and -1 where one is free
    (`Slots.prompts`).
    """

    def __init__(self, shards: int, slots: int, samples: int, prompts: int, *, fixed: bool = False):
        """Makes the rows for `prompts` prompts of `samples` samples each; `slots` is the number of
        slots of each shard.

        Args:
            fixed: all rows that may be needed are there from the start, so that no shape depends on
                when a slot is free.
        """
        self.slots = slots
        most = rows_at_most(slots, shards, samples, prompts)
        self.count = most if fixed else rows_at_first(slots, samples, prompts)
        """Rows of each shard."""
        self.seats = seats_of_row(slots, samples)
        """Most slots that read one row."""
        self._most, self._prompts = min(slots, bucket(prompts)), prompts
        self._held = np.full((shards, self.count), -1)
        """The prompt in each row; -1: none."""

    def admit(self, prompts: np.ndarray) -> dict[int, int]:
        """Takes back the rows that no slot reads, and gives one to each prompt that has none.

        Returns:
            Row, counted through all shards -> the prompt to copy there. `count` may have grown.
        """
        wanted = self._wanted(prompts)
        shards, keys = len(self._held), self._keys()
        self._held[~np.isin(keys, wanted)] = -1
        wanted = wanted[~np.isin(wanted, keys)]
        shard, prompt = np.divmod(wanted, self._prompts)
        needed = int(((self._held >= 0).sum(1) + np.bincount(shard, minlength=shards)).max())
        if needed > self.count:
            self.count = min(max(needed, 2 * self.count), self._most)
            more = self.count - self._held.shape[1]
            self._held = np.pad(self._held, ((0, 0), (0, more)), constant_values=-1)
        free = np.argsort(self._held >= 0, axis=1, kind="stable")  # free rows first, in order
        row = free[shard, _ranks(shard)]
        self._held[shard, row] = prompt
        return dict(zip((shard * self.count + row).tolist(), prompt.tolist(), strict=True))

    def shrink(self, prompts: np.ndarray, slots: int) -> np.ndarray:
        """Keeps what the samples of fewer slots may need: whichever are left, rows and seats follow
        from the number of slots, so that each of these sizes is one program.

        Returns:
            [rows left] int32: for each shard, the rows to keep, counted among its own.
        """
        self.slots = slots
        wanted = self._wanted(prompts)
        shard, prompt = np.divmod(wanted, self._prompts)
        rows, at = self._rows(wanted) % self.count, (shard, _ranks(shard))
        self.count, self.seats = min(self.count, slots), min(self.seats, slots)
        shape = len(self._held), self.count
        kept, self._held = np.zeros(shape, np.int32), np.full(shape, -1)
        kept[at], self._held[at] = rows, prompt
        return kept.reshape(-1)

    def row(self, slot: int, prompt: int) -> int:
        """Returns the row of the prompt of a slot, counted among those of its shard."""
        return int(np.flatnonzero(self._held[slot // self.slots] == prompt)[0])

    def table(self, prompts: np.ndarray, lengths: np.ndarray) -> Seats:
        """Makes the seats of all slots.

        Args:
            lengths: [all prompts] int32: their keys.
        """
        shards, taken = len(self._held), np.flatnonzero(prompts >= 0)
        shard, own = np.divmod(taken, self.slots)
        prompt = prompts[taken]
        row = self._rows(shard * self._prompts + prompt)
        order = np.argsort(row, kind="stable")
        seat = np.empty_like(row)
        seat[order] = _ranks(row[order])
        slots = np.full((shards * self.count, self.seats), -1, np.int32)
        keys = np.zeros(shards * self.count, np.int32)
        places = np.zeros(shards * self.slots, np.int32)
        slots[row, seat], keys[row] = own, lengths[prompt]
        places[taken] = row % self.count * self.seats + seat
        return Seats(slots, keys, places)

    def _keys(self) -> np.ndarray:
        """Returns a number for shard and prompt of each row, [shards, rows]; -1: it holds none."""
        shards = np.arange(len(self._held))[:, None]
        return np.where(self._held >= 0, shards * self._prompts + self._held, -1)

    def _wanted(self, prompts: np.ndarray) -> np.ndarray:
        """Returns these numbers of the prompts that slots read, in the order of slots."""
        taken = np.flatnonzero(prompts >= 0)
        keys, first = np.unique(
            taken // self.slots * self._prompts + prompts[taken], return_index=True
        )
        return keys[np.argsort(first)]

    def _rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of such numbers, counted through all shards."""
        held = self._keys().reshape(-1)
        order = np.argsort(held)
        return order[np.searchsorted(held, keys, sorter=order)]


def _ranks(groups: np.ndarray) -> np.ndarray:
    """Counts, for each entry of sorted numbers, those before it that are equal."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)
