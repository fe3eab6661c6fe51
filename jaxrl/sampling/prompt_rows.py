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

from collections.abc import Mapping

import numpy as np

from jaxrl.models.buckets import bucket
from jaxrl.models.shared_prompts import Seats
from jaxrl.sampling.partial_completion import PartialCompletion


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
    """The rows of one call of `Engine.generate`."""

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
        self._most = min(slots, bucket(prompts))
        self._rows: list[dict[int, int]] = [{} for _ in range(shards)]
        """Of each shard: prompt -> row."""

    def admit(self, seated: Mapping[int, PartialCompletion]) -> dict[int, int]:
        """Takes back the rows that no slot reads, and gives one to each prompt that has none.

        Returns:
            Row, counted through all shards -> the prompt to copy there. `count` may have grown.
        """
        wanted = self._wanted(seated)
        for rows, prompts in zip(self._rows, wanted, strict=True):
            for gone in rows.keys() - prompts.keys():
                del rows[gone]
        needed = max(map(len, wanted))
        if needed > self.count:
            self.count = min(max(needed, 2 * self.count), self._most)
        new = {}
        for shard, (rows, prompts) in enumerate(zip(self._rows, wanted, strict=True)):
            free = sorted(set(range(self.count)) - set(rows.values()), reverse=True)
            for prompt in prompts:
                if prompt not in rows:
                    rows[prompt] = free.pop()
                    new[shard * self.count + rows[prompt]] = prompt
        return new

    def shrink(self, seated: Mapping[int, PartialCompletion], slots: int) -> np.ndarray:
        """Keeps what the samples of fewer slots may need: whichever are left, rows and seats follow
        from the number of slots, so that each of these sizes is one program.

        Returns:
            [rows left] int32: for each shard, the rows to keep, counted among its own.
        """
        self.slots = slots
        wanted = self._wanted(seated)
        self.count, self.seats = min(self.count, slots), min(self.seats, slots)
        kept = np.zeros((len(wanted), self.count), np.int32)
        for shard, prompts in enumerate(wanted):
            kept[shard, : len(prompts)] = [self._rows[shard][prompt] for prompt in prompts]
            self._rows[shard] = {prompt: row for row, prompt in enumerate(prompts)}
        return kept.reshape(-1)

    def row(self, slot: int, sample: PartialCompletion) -> int:
        """Returns the row of a seated sample, counted among those of its shard."""
        return self._rows[slot // self.slots][sample.prompt]

    def table(self, seated: Mapping[int, PartialCompletion], lengths: Mapping[int, int]) -> Seats:
        """Makes the seats of all slots.

        Args:
            lengths: prompt -> its keys.
        """
        shards = len(self._rows)
        slots = np.full((shards, self.count, self.seats), -1, np.int32)
        keys = np.zeros((shards, self.count), np.int32)
        places = np.zeros(shards * self.slots, np.int32)
        taken = np.zeros((shards, self.count), np.int32)
        for slot, sample in seated.items():
            shard, own = divmod(slot, self.slots)
            row = self._rows[shard][sample.prompt]
            seat = taken[shard, row]
            taken[shard, row] += 1
            slots[shard, row, seat], keys[shard, row] = own, lengths[sample.prompt]
            places[slot] = row * self.seats + seat
        return Seats(slots.reshape(-1, self.seats), keys.reshape(-1), places)

    def _wanted(self, seated: Mapping[int, PartialCompletion]) -> list[dict[int, int]]:
        """Counts, for each shard, prompt -> its samples there."""
        found: list[dict[int, int]] = [{} for _ in self._rows]
        for slot, sample in sorted(seated.items()):
            of = found[slot // self.slots]
            of[sample.prompt] = of.get(sample.prompt, 0) + 1
        return found
