"""Laws of slots and pages: no page has two owners, all are given back, and the oldest sample never
waits. A model of decoding stands in for the device."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.models.shared_prompts import PAGE
from jaxrl.sampling.partial_completion import PartialCompletion
from jaxrl.sampling.slots import PagePool, Slots, pages_of

LONGEST = 5 * PAGE


def check(seating: Slots, pool: PagePool, shards: int, reach: int) -> None:
    """Every seated sample has pages for its next launch, which nobody else has."""
    width = pages_of(LONGEST)
    owners, firsts, table = pool.table(seating.seated, seating.per_shard, width)
    assert (
        (table >= 0).sum()
        == (owners >= 0).sum()
        == shards * pool.pages - sum(pool.free(shard) for shard in range(shards))
    )
    for slot, sample in seating.seated.items():
        shard, own = divmod(slot, seating.per_shard)
        pages = table[slot][table[slot] >= 0]
        needed = min(sample.turn_end, len(sample.tokens) + reach)
        assert len(pages) >= pages_of(needed) and len(set(pages)) == len(pages)
        here = slice(shard * pool.pages, (shard + 1) * pool.pages)
        assert (owners[here][pages] == own).all()
        assert firsts[here][pages].tolist() == [PAGE * i for i in range(len(pages))]


@pytest.mark.parametrize("seed", range(40))
def test_pages_have_one_owner_and_all_samples_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shards, slots = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    pages, reach = int(rng.integers(5, 21)), int(rng.choice([8, 32, 100]))
    samples = [
        PartialCompletion(prompt, prompt, k, int(limit), int(limit))
        for prompt in range(6)
        for k, limit in enumerate(rng.integers(1, LONGEST + 1, 3))
    ]
    ends = {id(x): int(rng.integers(1, x.limit + 1)) for x in samples}
    pool = PagePool(shards, pages)
    seating, launches = Slots(samples, slots * shards, shards, reach, pool), 0
    while seating.queue or seating.seated:
        before = set(map(id, seating.seated.values()))
        short = seating.is_short_of_pages()
        assert (seating.give_pages() > 0) == short
        while (slot := seating.vacant()) is not None:
            assert slot not in seating.seated
            seating.seat_next(slot, [1, 2, 3])
        ages = [(x.prompt, x.sample_id) for x in seating.queue]
        assert ages == sorted(ages)
        check(seating, pool, shards, reach)
        seated = sorted(seating.seated.values(), key=lambda x: (x.prompt, x.sample_id))
        oldest = next(x for x in samples if len(x.tokens) < ends[id(x)])
        assert oldest in seated and (id(oldest) in before or not before or not oldest.tokens)
        if not seating.queue and seating.most_pages() <= pool.pages and rng.random() < 0.3:
            kept = seating.shrink(lambda taken, slots: taken if taken < slots else None)
            if kept is not None:
                most = seating.most_pages()
                if most < pool.pages:
                    had = {id(x): pool.of(x).copy() for x in seating.seated.values()}
                    moved = pool.shrink(most).reshape(shards, -1)
                    for slot, x in seating.seated.items():
                        assert moved[slot // seating.per_shard][pool.of(x)].tolist() == had[id(x)]
            check(seating, pool, shards, reach)
        for sample in seated:
            new = min(reach, ends[id(sample)] - len(sample.tokens))
            sample.tokens += [0] * new
            if len(sample.tokens) == ends[id(sample)]:
                seating.free(sample)
        launches += 1
        assert launches < 2000
    assert all(len(x.tokens) == ends[id(x)] for x in samples)
    assert all(pool.free(shard) == pool.pages for shard in range(shards))


def test_the_youngest_sample_waits_with_its_tokens() -> None:
    """Two pages each now, of four; the next launch needs three each."""
    samples = [PartialCompletion(0, 0, k, LONGEST, LONGEST) for k in range(3)]
    pool = PagePool(1, 6)
    seating = Slots(samples, 3, 1, PAGE, pool)
    while (slot := seating.vacant()) is not None:
        seating.seat_next(slot, [4, 5])
    assert len(seating.seated) == 3 and pool.free(0) == 3
    for launch in range(1, 3):
        for sample in seating.seated.values():
            sample.tokens += [9] * PAGE
        assert seating.is_short_of_pages() == (launch == 2)
        sent = seating.give_pages()
    assert sent == 1 and list(seating.queue) == [samples[2]] and pool.free(0) == 0
    assert seating.vacant() is None
    seating.free(samples[1])
    assert seating.vacant() is None  # three pages, of which the other one may soon need one
    seating.free(samples[0])
    assert seating.vacant() == 0
    seating.seat_next(0, [4, 5])
    assert seating.table[0].tolist() == [9, 1 + 2 * PAGE, 2 * PAGE, LONGEST, 0, 2]
    assert len(pool.of(samples[2])) == 3
