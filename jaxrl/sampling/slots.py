"""Which sample has which slot, with which pages where the cache is a pool of them
(PagedAttention, arXiv 2309.06180), which row of the cache of prompts its slot reads
(`models.shared_prompts`), and which samples wait.

The older a sample, in the order of prompts and samples, the less it waits: where the pages of a
device do not suffice for the next launch, the youngest sample there gives all of its own back, and
waits with its tokens. The oldest one always goes on, since a pool holds the longest completion.

There may be tens of thousands of slots. What is asked of all of them before and after each launch
is therefore in arrays with an entry for each slot; Python walks over those that change.

Each data shard has rows for the prompts of its own slots. A row is given back when no slot of its
shard reads it. There are at first as many rows as consecutive samples fill the slots from, which is
all that a batch needs whose samples have a slot each. Refilled slots may need more, as long
completions keep their prompts: rows double then, up to one for each slot, so that no sample waits
for a row. But for rounding, the keys and values in rows and slots are together no more than those
of slots with a copy of their prompt each.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import numpy as np

from jaxrl.models.batching import bucket
from jaxrl.models.shared_prompts import PAGE, Pages, Seats
from jaxrl.sampling import decode
from jaxrl.sampling.partial_completion import PartialCompletion
from jaxrl.sampling.sampler import first_key

N = TypeVar("N", int, np.ndarray)


def pages_of(positions: N) -> N:
    """Counts the pages that hold these positions of one slot, or of each of several."""
    return -(-positions // PAGE)


def pool_pages(cache_tokens: int, slots: int, longest: int) -> int:
    """Counts the pages of each data shard: no more than its slots can have."""
    return min(pages_of(cache_tokens), slots * pages_of(longest))


class PagePool:
    """The pages of the cache: each data shard has a pool for its own slots."""

    def __init__(self, shards: int, pages: int):
        """Starts with all pages free; `pages` is the number of pages of each shard."""
        self.pages = pages
        self.free = np.full(shards, pages)
        """[shards]: how many pages nobody has."""
        self._free = [list(range(pages))[::-1] for _ in range(shards)]
        self._held: dict[int, tuple[int, list[int]]] = {}
        """`PartialCompletion.index` -> shard, and pages in order."""

    def missing(self, sample: PartialCompletion, positions: int) -> int:
        """Counts the pages that the sample lacks for this many positions."""
        _, held = self._held.get(sample.index, (0, []))
        return max(pages_of(positions) - len(held), 0)

    def pages_of(self, sample: PartialCompletion) -> list[int]:
        """Returns the pages of a sample, counted among those of its shard."""
        return self._held[sample.index][1]

    def allocate(self, shard: int, sample: PartialCompletion, positions: int) -> None:
        """Gives the sample free pages, so that it has this many positions."""
        missing = self.missing(sample, positions)
        _, held = self._held.setdefault(sample.index, (shard, []))
        held += [self._free[shard].pop() for _ in range(missing)]
        self.free[shard] -= missing

    def release(self, sample: PartialCompletion) -> None:
        """Frees the pages of a sample."""
        shard, held = self._held.pop(sample.index)
        self._free[shard] += held
        self.free[shard] += len(held)

    def shrink(self, pages: int) -> np.ndarray:
        """Keeps fewer pages, all of those that samples have among them, which get new numbers.

        Args:
            pages: of each shard.

        Returns:
            [shards * pages] int32: the pages to keep, counted among those of their shard.
        """
        kept: list[list[int]] = [[] for _ in self._free]
        for shard, held in self._held.values():
            first = len(kept[shard])
            kept[shard] += held
            held[:] = range(first, len(kept[shard]))
        self._free = [list(range(len(old), pages))[::-1] for old in kept]
        self.free = np.array([len(free) for free in self._free])
        self.pages = pages
        return np.array([old + [0] * (pages - len(old)) for old in kept], np.int32).reshape(-1)

    def table(self, seated: Mapping[int, PartialCompletion], slots: int, width: int) -> Pages:
        """Makes the table of the pages of all slots.

        Args:
            slots: of each shard.
            width: most pages of a slot.
        """
        shards = len(self._free)
        owners = np.full(shards * self.pages, -1, np.int32)
        firsts = np.zeros(shards * self.pages, np.int32)
        table = np.full((shards * slots, width), -1, np.int32)
        held = [self._held[x.index][1] for x in seated.values()]
        counts = np.array([len(pages) for pages in held], int)
        pages = np.fromiter(chain.from_iterable(held), np.int32, counts.sum())
        slot = np.repeat(np.fromiter(seated, int, len(seated)), counts)
        # Each page's number among those of its slot.
        order = np.arange(len(pages)) - np.repeat(counts.cumsum() - counts, counts)
        at = slot // slots * self.pages + pages
        owners[at], firsts[at], table[slot, order] = slot % slots, PAGE * order, pages
        return Pages(owners, firsts, table)


AGE = attrgetter("index")


class Slots:
    """The slots of an engine. One that is free decodes nothing."""

    def __init__(
        self,
        slots: int,
        shards: int,
        launch_tokens: int,
        pool: PagePool | None,
        samples: Sequence[PartialCompletion] = (),
    ):
        """
        Args:
            slots: of all data shards.
            pool: None: every slot has its own cache.
            samples: these wait, the oldest first.
        """
        self.queue = deque(samples)
        self.seated: dict[int, PartialCompletion] = {}
        self.table = np.zeros((slots, decode.COLUMNS), np.int32)
        """As in `decode.launch`."""
        self.prompts = np.full(slots, -1, np.int64)
        """[slots]: the prompt of the sample in each slot (`PartialCompletion.prompt`); -1: it is
        free."""
        self._pages = np.zeros(slots, np.int32)
        """[slots]: how many pages its sample has."""
        self._shards, self._launch_tokens, self._pool = shards, launch_tokens, pool
        self.per_shard = slots // shards
        """Slots of each data shard."""
        self._list_vacant()

    @property
    def starts(self) -> np.ndarray:
        """Returns how many keys of its prompt each slot reads, [slots] int32."""
        return self.table[:, decode.POSITION] - self.table[:, decode.COUNT]

    def vacant_slot(self) -> int | None:
        """Returns a free slot for the first sample that waits, if there is one, where that sample
        would also have pages: the first such slot of the first such shard."""
        if not self.queue:
            return None
        fits = self._vacancies > 0
        if self._pool is not None:
            # A page to spare for each of the others, else the sample is preempted soon and all of
            # its tokens read again. With log-normal lengths and too few pages, a twentieth as many
            # are preempted as without, for 4% more launches.
            others = self.per_shard - self._vacancies
            first = self.queue[0]
            fits &= self._pool.missing(first, self._positions(first)) + others <= self._pool.free
        shard = int(fits.argmax())
        return self._vacant[shard][0] if fits[shard] else None

    def seat_next(self, slot: int) -> PartialCompletion:
        """Seats the first sample that waits in the slot that is `vacant_slot`."""
        sample, shard = self.queue.popleft(), slot // self.per_shard
        self._vacancies[shard] -= 1
        taken = heappop(self._vacant[shard])
        assert taken == slot
        prompt, count = sample.request.prompt, len(sample.tokens)
        token = sample.tokens[-1] if count else prompt[-1]
        key, position = sample.request.key, len(prompt) + count - 1
        sample.slot, self.seated[slot], self.prompts[slot] = slot, sample, sample.prompt
        limit = sample.turn_end if sample.reply is None else count
        self.table[slot, : decode.KEY] = (
            *(token, position, count, limit),
            *(key.prompt % 2**31, key.sample),
        )
        self.table[slot, decode.KEY :] = first_key(*key[:3]).view(np.int32)
        if self._pool is not None:
            self._allocate(shard, sample)
        return sample

    def append(
        self, drawn: np.ndarray, eos_ids: Collection[int]
    ) -> list[tuple[PartialCompletion, int, int, bool]]:
        """Appends the tokens of a launch to their samples, whose slots then continue after the last
        one, or decode nothing more where their turn is over.

        Args:
            drawn: [n, slots, 3] int32, as in `decode.launch`.
            eos_ids: tokens that end a turn.

        Returns:
            For each sample with new tokens: the sample, how many tokens it had, how many are new,
            and whether its turn is over.
        """
        counts = (drawn[:, :, 0] >= 0).sum(0)
        counts[self.prompts < 0] = 0  # freed while the launch was running
        rows = np.ascontiguousarray(drawn[: counts.max(initial=0)].swapaxes(0, 1))
        live = np.flatnonzero(counts)
        tokens = rows[live, counts[live] - 1, 0]
        before = self.table[live, decode.COUNT]
        after = before + counts[live]
        over = np.isin(tokens, list(eos_ids)) | (after == self.table[live, decode.LIMIT])
        self.table[live, decode.TOKEN] = tokens
        self.table[live, decode.POSITION] += after - before
        self.table[live, decode.COUNT] = after
        self.table[live[over], decode.LIMIT] = after[over]
        added = []
        columns = (live, before, counts[live], over)
        for slot, had, count, ended in zip(*(x.tolist() for x in columns), strict=True):
            sample = self.seated[slot]
            sample.drawn.append(rows[slot, :count])
            added.append((sample, had, count, ended))
        return added

    def free(self, sample: PartialCompletion) -> None:
        """Frees the slot of a sample, and its pages."""
        slot = sample.slot
        assert slot is not None
        self.table[slot], self.prompts[slot], self._pages[slot] = 0, -1, 0
        heappush(self._vacant[slot // self.per_shard], slot)
        self._vacancies[slot // self.per_shard] += 1
        del self.seated[slot]
        sample.slot = None
        if self._pool is not None:
            self._pool.release(sample)

    def send_back(self, sample: PartialCompletion) -> None:
        """Frees the slot of a sample, which waits with its tokens."""
        self.free(sample)
        insort(self.queue, sample, key=AGE)

    def _list_vacant(self) -> None:
        """Lists the free slots of each shard."""
        per_shard = self.prompts.reshape(self._shards, -1)
        self._vacancies = (per_shard < 0).sum(1)
        """[shards]: how many are free."""
        firsts = range(0, len(self.prompts), self.per_shard)
        self._vacant = [
            (np.flatnonzero(prompts < 0) + first).tolist()
            for prompts, first in zip(per_shard, firsts, strict=True)
        ]
        """Those of each shard, as a heap: the first one is used next."""

    def _positions(self, sample: PartialCompletion) -> int:
        """Counts its positions behind its prompt, up to the end of the next launch."""
        return min(sample.turn_end, len(sample.tokens) + self._launch_tokens)

    def _allocate(self, shard: int, sample: PartialCompletion) -> None:
        """Gives a seated sample the pages of its next launch, which are free."""
        assert self._pool is not None
        self._pool.allocate(shard, sample, self._positions(sample))
        self._pages[sample.slot] = len(self._pool.pages_of(sample))

    def _missing_pages(self) -> np.ndarray:
        """Counts the pages that each slot lacks for the next launch, [shards, slots of each]."""
        ahead = self.table[:, decode.COUNT] + self._launch_tokens
        needed = pages_of(np.minimum(self.table[:, decode.LIMIT], ahead))
        return np.maximum(needed - self._pages, 0).reshape(self._shards, -1)

    def is_short_of_pages(self) -> bool:
        """Returns whether there are too few pages for the next launch of all that are seated."""
        assert self._pool is not None
        return bool((self._missing_pages().sum(1) > self._pool.free).any())

    def allocate_pages(self) -> int:
        """Gives all that are seated the pages of their next launch.

        Returns:
            How many samples were preempted, because there were too few pages: they have lost their
            slots, and wait.
        """
        assert self._pool is not None
        preempted = 0
        for shard in np.flatnonzero(self._missing_pages().any(1)).tolist():
            first = shard * self.per_shard
            slots = np.flatnonzero(self.prompts[first : first + self.per_shard] >= 0) + first
            samples = deque(sorted((self.seated[slot] for slot in slots.tolist()), key=AGE))
            while samples:
                oldest = samples[0]
                missing = self._pool.missing(oldest, self._positions(oldest))
                if missing <= self._pool.free[shard]:
                    self._allocate(shard, samples.popleft())
                else:
                    self.send_back(samples.pop())
                    preempted += 1
        return preempted

    def most_pages(self) -> int:
        """Counts the pages of a data shard's samples if all become as long as they may."""
        pages = pages_of(self.table[:, decode.LIMIT])
        return int(pages.reshape(self._shards, -1).sum(1).max())

    def shrink(self, fewer: Callable[[int, int], int | None]) -> np.ndarray | None:
        """Renumbers the samples in fewer slots. No slot moves between devices.

        Args:
            fewer: (most slots in use of a device, its slots) -> those that it keeps; or None.

        Returns:
            [slots left] int32: for each device, the slots that it keeps, counted among its own.
            None if all slots stay.
        """
        shards, before = self._shards, self.per_shard
        left = fewer(before - int(self._vacancies.min()), before)
        if left is None:
            return None
        # Slots in use first, in their order; those behind them are free, and kept to fill up.
        kept = np.argsort(self.prompts.reshape(shards, -1) < 0, axis=1, kind="stable")[:, :left]
        old = (kept + before * np.arange(shards)[:, None]).reshape(-1)
        seated, self.seated = self.seated, {}
        for new in np.flatnonzero(self.prompts[old] >= 0).tolist():
            sample = self.seated[new] = seated[int(old[new])]
            sample.slot = new
        self.table, self.prompts, self._pages = (
            column[old] for column in (self.table, self.prompts, self._pages)
        )
        self.per_shard = left
        self._list_vacant()
        return kept.reshape(-1).astype(np.int32)


def rows_at_first(slots: int, samples: int, prompts: int) -> int:
    """Counts the rows of each shard with `slots` slots: the prompts of which as many consecutive
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


PROMPTS = 1 << 40
"""Above the number of every prompt: one of a shard is known as `shard * PROMPTS + prompt`."""


class PromptRows:
    """The rows of the cache of prompts.

    Slots are told by the number of the prompt of each, [slots] int64, and -1 where one is free
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
        self._most = min(slots, bucket(prompts))
        self._held = np.full((shards, self.count), -1)
        """[shards, rows]: a number for the shard and the prompt of each row; -1: it holds none."""

    def expect(self, samples: int, prompts: int) -> None:
        """Leaves room for as many, where there was less."""
        self.seats = max(self.seats, seats_of_row(self.slots, samples))
        self._most = max(self._most, min(self.slots, bucket(prompts)))

    def forget(self) -> None:
        """Drops the keys and values of all prompts."""
        self._held[:] = -1

    def admit(self, prompts: np.ndarray) -> dict[int, int]:
        """Takes back the rows that no slot reads, and gives one to each prompt that has none.

        Returns:
            Row, counted through all shards -> the prompt to copy there. `count` may have grown.
        """
        wanted = self._prompt_numbers(prompts)
        shards, held = len(self._held), np.isin(wanted, self._held)
        self._held[~np.isin(self._held, wanted)] = -1
        wanted = wanted[~held]
        shard, prompt = np.divmod(wanted, PROMPTS)
        needed = int(((self._held >= 0).sum(1) + np.bincount(shard, minlength=shards)).max())
        if needed > self.count:
            self.count = min(max(needed, 2 * self.count), self._most)
            more = self.count - self._held.shape[1]
            self._held = np.pad(self._held, ((0, 0), (0, more)), constant_values=-1)
        free = np.argsort(self._held >= 0, axis=1, kind="stable")  # free rows first, in order
        row = free[shard, _ranks(shard)]
        self._held[shard, row] = wanted
        return dict(zip((shard * self.count + row).tolist(), prompt.tolist(), strict=True))

    def shrink(self, prompts: np.ndarray, slots: int) -> np.ndarray:
        """Keeps what the samples of fewer slots may need: whichever are left, rows and seats follow
        from the number of slots, so that each of these sizes is one program.

        Returns:
            [rows left] int32: for each shard, the rows to keep, counted among its own.
        """
        self.slots = slots
        wanted = self._prompt_numbers(prompts)
        shard = wanted // PROMPTS
        rows, at = self._rows(wanted) % self.count, (shard, _ranks(shard))
        self.count, self.seats = min(self.count, slots), min(self.seats, slots)
        shape = len(self._held), self.count
        kept, self._held = np.zeros(shape, np.int32), np.full(shape, -1)
        kept[at], self._held[at] = rows, wanted
        return kept.reshape(-1)

    def row(self, slot: int, prompt: int) -> int:
        """Returns the row of the prompt of a slot, counted among those of its shard."""
        shard = slot // self.slots
        return int(np.flatnonzero(self._held[shard] == shard * PROMPTS + prompt)[0])

    def table(self, prompts: np.ndarray, lengths: np.ndarray) -> Seats:
        """Makes the seats of all slots.

        Args:
            lengths: [slots] int32: how many keys of its prompt each reads.
        """
        shards, taken = len(self._held), np.flatnonzero(prompts >= 0)
        shard, local = np.divmod(taken, self.slots)
        prompt = prompts[taken]
        row = self._rows(shard * PROMPTS + prompt)
        order = np.argsort(row, kind="stable")
        seat = np.empty_like(row)
        seat[order] = _ranks(row[order])
        slots = np.full((shards * self.count, self.seats), -1, np.int32)
        keys = np.zeros(shards * self.count, np.int32)
        places = np.zeros(shards * self.slots, np.int32)
        slots[row, seat], keys[row] = local, lengths[taken]
        places[taken] = row % self.count * self.seats + seat
        return Seats(slots, keys, places)

    def _prompt_numbers(self, prompts: np.ndarray) -> np.ndarray:
        """Returns the numbers (`_held`) of the prompts that slots read, in the order of slots."""
        taken = np.flatnonzero(prompts >= 0)
        keys, first = np.unique(taken // self.slots * PROMPTS + prompts[taken], return_index=True)
        return keys[np.argsort(first)]

    def _rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of such numbers, counted through all shards."""
        held = self._held.reshape(-1)
        order = np.argsort(held)
        return order[np.searchsorted(held, keys, sorter=order)]


def _ranks(groups: np.ndarray) -> np.ndarray:
    """Counts, for each entry of sorted numbers, those before it that are equal."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)
