"""Laws of the rows that hold prompts: each seated sample reads its own, and none is held twice."""

from __future__ import annotations

import numpy as np
import pytest
from engine_requests import waiting_samples

from jaxrl.sampling.partial_completion import PartialCompletion
from jaxrl.sampling.slots import PromptRows, rows_at_first, rows_at_most


@pytest.mark.parametrize(("shards", "slots", "n"), [(1, 8, 2), (1, 7, 3), (3, 4, 6), (2, 6, 8)])
def test_each_sample_reads_the_row_of_its_prompt(shards: int, slots: int, n: int) -> None:
    """Samples come in the order of their prompts and end in any: a model of the cache says what
    each row holds. In the end the slots that are left move together."""
    rng, prompts = np.random.default_rng(0), 12
    queue = waiting_samples([[1] * n] * prompts)
    rows = PromptRows(shards, slots, n, prompts)
    assert rows.count == rows_at_first(slots, n, prompts)
    held = np.full((shards, rows.count), -1)
    seated: dict[int, PartialCompletion] = {}

    def columns() -> np.ndarray:
        of = np.full(shards * slots, -1)
        of[list(seated)] = [sample.prompt for sample in seated.values()]
        return of

    def check() -> None:
        seats = rows.table(columns(), 100 + columns())
        of = seats.slots.reshape(shards, rows.count, rows.seats)
        assert sorted(of[of >= 0].tolist()) == sorted(slot % rows.slots for slot in seated)
        for slot, sample in seated.items():
            shard, own = divmod(slot, rows.slots)
            row, seat = divmod(int(seats.places[slot]), rows.seats)
            assert of[shard, row, seat] == own and held[shard, row] == sample.prompt
            assert seats.lengths.reshape(shards, -1)[shard, row] == 100 + sample.prompt
        lengths = seats.lengths.reshape(shards, -1)
        assert ((lengths > 0) == (of >= 0).any(-1)).all()
        for shard in lengths:
            live = shard[shard > 0].tolist()
            assert len(set(live)) == len(live)  # no prompt twice

    while queue:
        for slot in range(shards * slots):
            if slot not in seated and queue:
                seated[slot] = queue.pop(0)
        new = rows.admit(columns())
        held = np.pad(held, ((0, 0), (0, rows.count - held.shape[1])), constant_values=-1)
        for row, prompt in new.items():
            held[divmod(row, rows.count)] = prompt
        check()
        for slot in rng.permutation(list(seated))[: 1 + len(seated) // 3]:
            del seated[int(slot)]
    assert rows.count <= rows_at_most(slots, shards, n, prompts)
    left = dict(list(seated.items())[:2])
    seated = {}
    for slot, sample in left.items():  # each shard keeps its own
        shard = slot // slots
        seated[2 * shard + sum(s // 2 == shard for s in seated)] = sample
    before = rows.count, rows.seats
    slots = 2
    kept = rows.shrink(columns(), slots).reshape(shards, -1)
    assert (kept.shape[1], rows.count, rows.seats) == (
        min(before[0], 2),
        *(min(n, 2) for n in before),
    )
    held = np.take_along_axis(held, kept, 1)
    check()


def test_the_sizes_of_fewer_slots_do_not_depend_on_who_is_left() -> None:
    """Of 8 prompts with 4 samples each: a sample of each, or two prompts with all of theirs."""
    sizes = set()
    for left in ([(prompt, 0) for prompt in range(8)], [(p, s) for p in (3, 5) for s in range(4)]):
        rows = PromptRows(1, 32, 4, 8)
        rows.admit(np.repeat(np.arange(8, dtype=np.int32), 4))
        seated = np.array([prompt for prompt, _ in left], np.int32)
        rows.shrink(seated, 8)
        sizes.add(tuple(x.shape for x in rows.table(seated, np.full(8, 100, np.int32))))
    assert sizes == {((8, 4), (8,), (8,))}


@pytest.mark.parametrize(
    ("slots", "shards", "n", "prompts", "first", "most"),
    [
        (8, 1, 4, 2, 2, 2),  # a slot for each sample
        (8, 1, 4, 100, 2, 8),  # refilled
        (8, 2, 4, 4, 2, 2),
        (6, 1, 4, 100, 3, 6),  # three prompts may meet: 1 + 4 + 1
        (4, 2, 6, 2, 2, 2),
        (3, 1, 8, 1, 1, 1),
    ],
)
def test_rows_are_those_of_the_prompts_that_can_meet(
    slots: int, shards: int, n: int, prompts: int, first: int, most: int
) -> None:
    assert rows_at_first(slots, n, prompts) == first
    assert rows_at_most(slots, shards, n, prompts) == most
