"""Laws of slots and pages: no page has two owners, all are given back, and the oldest sample never
waits. A model of decoding stands in for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
from engine_requests import waiting_samples

from jaxrl.models.shared_prompts import PAGE
from jaxrl.sampling import decode
from jaxrl.sampling.decode import IDLE
from jaxrl.sampling.partial_completion import PartialCompletion
from jaxrl.sampling.sampler import first_key
from jaxrl.sampling.slots import PagePool, PromptRows, Slots, pages_of

LONGEST = 5 * PAGE


def check(seating: Slots, pool: PagePool, shards: int, reach: int) -> None:
    """Every seated sample has pages for its next launch, which nobody else has."""
    width = pages_of(LONGEST)
    owners, firsts, table = pool.table(seating.seated, seating.per_shard, width)
    assert (table >= 0).sum() == (owners >= 0).sum() == shards * pool.pages - pool.free.sum()
    for slot, sample in seating.seated.items():
        shard, own = divmod(slot, seating.per_shard)
        pages = table[slot][table[slot] >= 0]
        needed = min(sample.turn_end, len(sample.tokens) + reach)
        assert len(pages) >= pages_of(needed) and len(set(pages)) == len(pages)
        here = slice(shard * pool.pages, (shard + 1) * pool.pages)
        assert (owners[here][pages] == own).all()
        assert firsts[here][pages].tolist() == [PAGE * i for i in range(len(pages))]


def decode_tokens(
    seating: Slots, reach: int, tokens: Callable[[PartialCompletion], int], token: int = 0
) -> None:
    """Plays a launch in which each seated sample gets so many tokens, at most `reach`."""
    drawn = np.full((reach, len(seating.table), 3), IDLE, np.int32)
    for slot, sample in seating.seated.items():
        drawn[: tokens(sample), slot] = token
    seating.append(drawn, ())


@pytest.mark.parametrize("seed", range(40))
def test_pages_have_one_owner_and_all_samples_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards, slots = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    pages, reach = int(rng.integers(5, 21)), int(rng.choice([8, 32, 100]))
    samples = waiting_samples([rng.integers(1, LONGEST + 1, 3) for _ in range(6)])
    ends = {id(x): int(rng.integers(1, x.request.max_tokens + 1)) for x in samples}
    pool = PagePool(shards, pages)
    seating, launches = Slots(slots * shards, shards, reach, pool, samples), 0
    while seating.queue or seating.seated:
        before = set(map(id, seating.seated.values()))
        short = seating.is_short_of_pages()
        assert (seating.allocate_pages() > 0) == short
        while (slot := seating.vacant_slot()) is not None:
            assert slot not in seating.seated
            seating.seat_next(slot)
        ages = [x.index for x in seating.queue]
        assert ages == sorted(ages)
        check(seating, pool, shards, reach)
        seated = sorted(seating.seated.values(), key=lambda x: x.index)
        oldest = next(x for x in samples if len(x.tokens) < ends[id(x)])
        assert oldest in seated and (id(oldest) in before or not before or not oldest.tokens)
        if not seating.queue and seating.most_pages() <= pool.pages and rng.random() < 0.3:
            kept = seating.shrink(lambda taken, slots: taken if taken < slots else None)
            if kept is not None:
                most = seating.most_pages()
                if most < pool.pages:
                    had = {id(x): pool.pages_of(x).copy() for x in seating.seated.values()}
                    moved = pool.shrink(most).reshape(shards, -1)
                    for slot, x in seating.seated.items():
                        pages = moved[slot // seating.per_shard][pool.pages_of(x)]
                        assert pages.tolist() == had[id(x)]
            check(seating, pool, shards, reach)
        decode_tokens(seating, reach, lambda x: ends[id(x)] - len(x.tokens))
        for sample in seated:
            if len(sample.tokens) == ends[id(sample)]:
                seating.free(sample)
        launches += 1
        assert launches < 2000
    assert all(len(x.tokens) == ends[id(x)] for x in samples)
    assert (pool.free == pool.pages).all()


def test_the_youngest_sample_waits_with_its_tokens() -> None:
    """Two pages each now, of four; the next launch needs three each."""
    samples = waiting_samples([[LONGEST] * 3], prompt=[4, 5])
    pool = PagePool(1, 6)
    seating = Slots(3, 1, PAGE, pool, samples)
    while (slot := seating.vacant_slot()) is not None:
        seating.seat_next(slot)
    assert len(seating.seated) == 3 and pool.free[0] == 3
    for launch in range(1, 3):
        decode_tokens(seating, PAGE, lambda _: PAGE, token=9)
        assert seating.is_short_of_pages() == (launch == 2)
        sent = seating.allocate_pages()
    assert sent == 1 and list(seating.queue) == [samples[2]] and pool.free[0] == 0
    assert seating.vacant_slot() is None
    seating.free(samples[1])
    assert seating.vacant_slot() is None  # three pages, of which the other one may soon need one
    seating.free(samples[0])
    assert seating.vacant_slot() == 0
    seating.seat_next(0)
    assert seating.table[0, : decode.KEY].tolist() == [9, 1 + 2 * PAGE, 2 * PAGE, LONGEST, 0, 2]
    assert len(pool.pages_of(samples[2])) == 3


class Plain:
    """The rule of seating written down plainly: who sits where, with how many pages."""

    def __init__(self, slots: int, shards: int, reach: int, pages: int | None):
        self.per_shard, self.shards, self.reach, self.pages = slots // shards, shards, reach, pages
        self.seated: dict[int, PartialCompletion] = {}
        self.held: dict[int, int] = {}

    def needed(self, sample: PartialCompletion) -> int:
        return pages_of(min(sample.turn_end, len(sample.tokens) + self.reach))

    def free(self, shard: int) -> int:
        assert self.pages is not None
        return self.pages - sum(n for s, n in self.held.items() if s // self.per_shard == shard)

    def vacant(self, sample: PartialCompletion) -> int | None:
        for slot in range(self.per_shard * self.shards):
            shard = slot // self.per_shard
            others = sum(s // self.per_shard == shard for s in self.seated)
            if slot not in self.seated and (
                self.pages is None or self.needed(sample) + others <= self.free(shard)
            ):
                return slot
        return None

    def allocate_pages(self) -> set[int]:
        """The slots whose samples lose them."""
        lost = set()
        for shard in range(self.shards):
            here = [s for s in self.seated if s // self.per_shard == shard]
            here.sort(key=lambda s: self.seated[s].index)
            while here:
                missing = self.needed(self.seated[here[0]]) - self.held[here[0]]
                if missing <= self.free(shard):
                    self.held[here.pop(0)] += max(missing, 0)
                else:
                    slot = here.pop()
                    lost.add(slot)
                    del self.seated[slot], self.held[slot]
        return lost

    def shrink(self, left: int) -> None:
        """Those of each shard move together, in their order."""
        seats: dict[int, int] = {}
        for shard in range(self.shards):
            here = sorted(s for s in self.seated if s // self.per_shard == shard)
            seats |= {slot: shard * left + i for i, slot in enumerate(here)}
        self.seated = {seats[slot]: sample for slot, sample in self.seated.items()}
        self.held = {seats[slot]: count for slot, count in self.held.items()}
        self.per_shard = left


@pytest.mark.parametrize("seed", range(30))
def test_seats_are_those_of_the_plain_rule(seed: int) -> None:
    """Whatever ends when, with pages and without: the same slots, tables, queue and moves."""
    rng = np.random.default_rng(seed)
    shards, slots, reach = int(rng.integers(1, 5)), int(rng.integers(1, 7)), PAGE // 2
    pages = int(rng.integers(5, 9)) if seed % 2 else None
    samples = waiting_samples([rng.integers(1, LONGEST + 1, 4) for _ in range(8)], first_id=7)
    pool = None if pages is None else PagePool(shards, pages)
    seating = Slots(slots * shards, shards, reach, pool, samples)
    plain = Plain(slots * shards, shards, reach, pages)
    texts: dict[int, list[int]] = {id(x): [] for x in samples}
    waiting, lost_slots = list(samples), 0

    def check() -> None:
        assert seating.seated == plain.seated and list(seating.queue) == waiting
        expected = np.zeros_like(seating.table)
        for slot, x in plain.seated.items():
            count = len(texts[id(x)])
            last = texts[id(x)][-1] if count else 5
            key = x.request.key
            row = last, 2 + count, count, x.request.max_tokens, key.prompt, key.sample
            expected[slot] = *row, *first_key(0, 0).view(np.int32)
            assert x.slot == slot and x.tokens.tolist() == texts[id(x)]
            assert pool is None or len(pool.pages_of(x)) == plain.held[slot]
        np.testing.assert_array_equal(seating.table, expected)
        of = {slot: int(x) for slot, x in enumerate(seating.prompts) if x >= 0}
        assert of == {slot: x.prompt for slot, x in plain.seated.items()}

    while waiting or plain.seated:
        if pool is not None:
            missing = [plain.needed(x) - plain.held[s] for s, x in plain.seated.items()]
            before = dict(plain.seated)
            lost = plain.allocate_pages()
            assert seating.is_short_of_pages() == bool(lost)
            assert seating.allocate_pages() == len(lost) <= len(missing)
            waiting = sorted([*waiting, *(before[s] for s in lost)], key=samples.index)
            lost_slots += len(lost)
        while True:
            slot = plain.vacant(waiting[0]) if waiting else None
            assert seating.vacant_slot() == slot
            if slot is None:
                break
            sample = waiting.pop(0)
            assert seating.seat_next(slot) is sample
            plain.seated[slot], plain.held[slot] = sample, plain.needed(sample)
        check()
        if not waiting and rng.random() < 0.3:
            most = max(
                sum(s // plain.per_shard == shard for s in plain.seated) for shard in range(shards)
            )
            left = most if 0 < most < plain.per_shard else None
            answers = {(most, plain.per_shard): left}
            kept = seating.shrink(lambda *sizes, answers=answers: answers[sizes])
            assert (kept is None) == (left is None)
            if kept is not None and left is not None:
                moved = np.arange(shards).repeat(left) * plain.per_shard + kept
                old = dict(plain.seated)
                plain.shrink(left)
                for slot, x in plain.seated.items():
                    assert old[int(moved[slot])] is x
            check()
        counts = {id(x): int(rng.integers(0, reach + 1)) for x in plain.seated.values()}
        drawn = np.full((reach, len(seating.table), 3), IDLE, np.int32)
        for slot, x in plain.seated.items():
            count = min(counts[id(x)], x.request.max_tokens - len(texts[id(x)]))
            new = rng.choice([3, 4, 8, 9], count, p=[0.004, 0.332, 0.332, 0.332]).tolist()
            new = new[: new.index(3) + 1] if 3 in new else new
            drawn[: len(new), slot] = np.array(new, np.int32)[:, None]
            counts[id(x)] = len(new)
            texts[id(x)] += new
        added = seating.append(drawn, (3,))
        assert {id(x): count for x, _, count, _ in added} == {
            key: count for key, count in counts.items() if count
        }
        for x, had, count, over in added:
            text = texts[id(x)]
            assert had + count == len(text)
            assert over == (text[-1] == 3 or len(text) == x.request.max_tokens)
            if over:
                assert x.slot is not None
                del plain.seated[x.slot], plain.held[x.slot]
                seating.free(x)
        check()
    assert lost_slots or pages is None or slots < 3


@pytest.mark.parametrize("paged", [False, True])
def test_the_work_of_the_host_grows_with_the_slots(paged: bool) -> None:
    """Calls of functions, theirs and those of C, while all slots are filled and one launch is
    read: four times the slots, over four times the shards, take about four times as many. A look at
    whether slots can be given up takes none for each slot."""

    def calls(shards: int) -> tuple[int, int]:
        slots = 16 * shards
        samples = waiting_samples([[256] * 8] * (slots // 8))
        pool = PagePool(shards, 16 * 4) if paged else None
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            seating = Slots(slots, shards, PAGE, pool, samples)
            rows = PromptRows(shards, 16, 8, slots // 8)
            while (slot := seating.vacant_slot()) is not None:
                seating.seat_next(slot)
            rows.admit(seating.prompts)
            rows.table(seating.prompts, seating.starts)
            for sample, *_ in seating.append(np.full((PAGE, slots, 3), 9, np.int32), ()):
                assert len(sample.drawn) == 2
            if pool is not None:
                assert seating.allocate_pages() == 0
                pool.table(seating.seated, 16, 4)
            filled = count
            seating.shrink(lambda taken, held: None)
            return filled, count - filled
        finally:
            sys.setprofile(before)

    (few, look), (many, later_look) = calls(16), calls(64)
    assert 3 * few < many < 5 * few
    assert later_look == look < 30
