"""Laws of the order: shares, epochs, purity; and the fingerprint of what decides the prompts."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_tokenizer import tiny_tokenizer

from jaxrl.data.prompt_encoder import PromptEncoder, few_shot
from jaxrl.data.source import open_source
from jaxrl.data.stream import REFILL_OFFSET, PromptStream, apportion
from jaxrl.data.stream import mix_sources as mixture_of
from jaxrl.errors import UserError

datasets.disable_progress_bars()
PLAIN = tiny_tokenizer(template=None, eos="<|endoftext|>")
CHAT = tiny_tokenizer()


def write(path: Path, *prompts: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": prompt, "completion": "c", "note": "n"} for prompt in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def named(path: Path, name: str, count: int) -> str:
    return write(path / f"{name}.jsonl", *(f"{name}{i}" for i in range(count)))


def mixture(sizes: list[int], weights: list[float], seed: int = 0, shuffle: bool = True) -> Any:
    """Source k has the rows 1000 k, 1000 k + 1, ..."""
    rows = [1000 * number + np.arange(size) for number, size in enumerate(sizes)]
    return mixture_of(rows, weights, seed, shuffle)


def take(order: Any, count: int) -> list[int]:
    return [order(position) for position in range(count)]


# Shares


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1, 1], (1, 1)),
        ([0.7, 0.3], (7, 3)),
        ([2, 4, 6], (1, 2, 3)),
        ([0.25, 0.75], (1, 3)),
        ([5.0], (1,)),
        ([0.125, 0.5, 0.375], (1, 4, 3)),
        ([1e-3, 0.999], (1, 999)),
        ([0.33333, 0.66667], (333, 667)),
        ([1, 3333], None),
        ([1e-9, 1], None),
    ],
)
def test_apportioned_by_hand(weights, counts):
    if counts is None:
        with pytest.raises(UserError, match="weight .* of source 1 is too small"):
            apportion(weights)
    else:
        assert apportion(weights) == counts


def test_any_weights_are_apportioned_within_one_place():
    draw = random.Random(0)
    for _ in range(200):
        weights = [draw.uniform(0.01, 1) for _ in range(draw.randint(1, 6))]
        counts = apportion(weights)
        exact = [Fraction(str(weight)) for weight in weights]
        assert sum(counts) <= 1000
        for count, weight in zip(counts, exact, strict=True):
            assert abs(count - weight / sum(exact) * sum(counts)) < 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_exact_in_every_block(shuffle):
    rows = take(mixture([5, 70, 400], [0.5, 0.3, 0.2], shuffle=shuffle), 300)
    for start in range(0, 300, 10):
        assert Counter(row // 1000 for row in rows[start : start + 10]) == {0: 5, 1: 3, 2: 2}


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_source_gives_each_row_once_in_its_own_epoch(shuffle):
    sizes = [3, 7, 20]
    rows = take(mixture(sizes, [0.5, 0.3, 0.2], shuffle=shuffle), 400)
    for source, size in enumerate(sizes):
        mine = [row - 1000 * source for row in rows if row // 1000 == source]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
        assert len(epochs) >= 4
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        if not shuffle:
            assert all(epoch == list(range(size)) for epoch in epochs)
    if shuffle:  # 20 rows in the same order twice: once in 20!
        mine = [row for row in rows if row // 1000 == 2]
        assert len({tuple(mine[at : at + 20]) for at in (0, 20, 40, 60)}) == 4


def test_blocks_and_seeds_differ_and_no_order_is_another_sources():
    rows = take(mixture([50, 50], [1, 1], seed=1), 400)
    assert rows == take(mixture([50, 50], [1, 1], seed=1), 400)
    assert rows != take(mixture([50, 50], [1, 1], seed=2), 400)
    pattern = [row // 1000 for row in take(mixture([50, 50], [0.49, 0.51]), 400)]
    assert len({tuple(pattern[at : at + 100]) for at in range(0, 400, 100)}) == 4
    first, second = ([row % 1000 for row in rows if row // 1000 == s][:50] for s in (0, 1))
    assert first != second


def test_sources_are_spread_evenly_without_shuffle():
    rows = take(mixture([9, 9], [3, 1], shuffle=False), 8)
    assert [row // 1000 for row in rows] == [0, 0, 1, 0] * 2
    assert [row % 1000 for row in rows] == [0, 1, 0, 2, 3, 4, 1, 5]


# The stream


def stream(
    spec: Any, batch_size: int = 4, seed: int = 0, weights: Any = None, **more: Any
) -> PromptStream:
    encoder = PromptEncoder(PLAIN, more.pop("longest", 100), 8)
    return PromptStream(open_source(spec), encoder, batch_size, seed, weights=weights, **more)


def test_without_weights_the_order_is_one_permutation_of_all_rows_for_each_epoch(tmp_path):
    spec = [named(tmp_path, "a", 4), named(tmp_path, "b", 6)]
    expected = [
        [f"a{i}" for i in range(4)][i] if i < 4 else f"b{i - 4}"
        for epoch in range(3)
        for i in np.random.default_rng((7, epoch)).permutation(10)
    ]
    s = stream(spec, 5, seed=7)
    assert [prompt.text for i in range(6) for prompt in s.batch(i)] == expected


def test_a_batch_of_a_mixture_is_a_pure_function_of_seed_and_number(tmp_path):
    spec = [named(tmp_path, "a", 5), named(tmp_path, "b", 30), "arithmetic:size=50"]
    forwards, fresh = (stream(spec, 7, 3, (0.2, 0.5, 0.3)) for _ in range(2))
    expected = [forwards.batch(i) for i in range(20)]
    order = list(range(20))
    random.Random(1).shuffle(order)
    assert [fresh.batch(i) for i in order] == [expected[i] for i in order]
    flat = [prompt for batch in expected for prompt in batch]
    assert [prompt.id for prompt in flat] == list(range(140))
    kinds = [p.text[0] if p.text[0] in "ab" else "sum" for p in flat]
    assert Counter(kinds) == {"a": 28, "b": 70, "sum": 42}
    assert stream(spec, 7, 4, (0.2, 0.5, 0.3)).batch(0) != expected[0]


def test_what_is_too_long_does_not_count_in_a_mixture(tmp_path):
    long = write(tmp_path / "l.jsonl", "x" * 9, "ok", "y" * 9)
    s = stream([long, named(tmp_path, "b", 3)], 4, weights=[1, 1], longest=5)
    texts = [prompt.text for i in range(3) for prompt in s.batch(i)]
    assert (s.dropped, s.epoch_prompts) == (2, 4)
    assert Counter(texts) == {"ok": 6, "b0": 2, "b1": 2, "b2": 2}
    with pytest.raises(UserError, match=r"all 1 prompts of .*m\.jsonl are longer"):
        stream([write(tmp_path / "m.jsonl", "x" * 9), long], weights=[1, 1], longest=5)


def test_bad_weights_name_both_numbers(tmp_path):
    spec = [named(tmp_path, "a", 2), named(tmp_path, "b", 2)]
    for weights, words in (
        ([1], r"1 weights for the 2 sources"),
        ([1, 2, 3], r"3 weights for the 2 sources"),
        ([1, 0], r"\[1, 0\]: weights are numbers above 0"),
        ([1, float("nan")], "above 0"),
        ([1, float("inf")], "above 0"),
        ([1, 1e-5], r"weight 1e-05 of source 2 is too small"),
    ):
        with pytest.raises(UserError, match=r"^data\.weights: .*" + words):
            stream(spec, weights=weights)


# Fingerprint


def save(kind: str, folder: Path, columns: dict[str, list[Any]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"x.{kind}"
    if kind == "jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    elif kind == "shards":
        for i in range(2):
            save("jsonl", folder / "shards" / f"{i}", {k: v[i : i + 1] for k, v in columns.items()})
        return f"{folder}/shards/*/x.jsonl"
    else:
        datasets.Dataset.from_dict(columns).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "shards", "dataset"])
def test_the_fingerprint_follows_the_bytes_and_not_the_place(tmp_path, kind):
    columns = {"prompt": ["aa", "bb"], "note": ["n", "m"]}
    spec = save(kind, tmp_path / "one", columns)
    mark = stream(spec).fingerprint
    assert len(mark) == 64 and int(mark, 16) >= 0
    assert stream(spec).fingerprint == mark
    os.rename(tmp_path / "one", tmp_path / "two")
    moved = spec.replace("/one/", "/two/")
    for path in (tmp_path / "two").rglob("*"):
        os.utime(path, (1, 1))
    assert stream(moved).fingerprint == mark
    # Not even a prompt: another field of the last row.
    other = save(kind, tmp_path / "three", {**columns, "note": ["n", "k"]})
    assert stream(other).fingerprint != mark


def test_any_byte_of_a_jsonl_file_counts(tmp_path):
    path = Path(named(tmp_path, "a", 3))
    marks = {stream(str(path)).fingerprint}
    whole = path.read_bytes()
    for changed in (whole + b"\n", whole.replace(b'"n"}\n', b'"n" }\n', 1), whole[:-1]):
        path.write_bytes(changed)
        marks.add(stream(str(path)).fingerprint)
    assert len(marks) == 4


def test_whatever_decides_the_prompts_changes_the_fingerprint(tmp_path):
    a, b = named(tmp_path, "a", 9), named(tmp_path, "b", 9)
    shots = few_shot(open_source(a), 2)

    def mark(
        spec: Any = (a, b), tokenizer: Any = CHAT, limits: Any = (100, 8), order: Any = (), **more
    ) -> str:
        settings = {"batch_size": 4, "seed": 0, **dict(order)}
        encoder = PromptEncoder(tokenizer, *limits, **more)
        return PromptStream(open_source(spec, 5), encoder, **settings).fingerprint

    changes: list[dict[str, Any]] = [
        {},
        {"spec": (b, a)},
        {"spec": a},
        {"spec": (a, "arithmetic")},
        {"spec": (a, "arithmetic:digits=3")},
        {"spec": (a, "arithmetic:size=9")},
        {"tokenizer": PLAIN},
        {"tokenizer": tiny_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")},
        {"limits": (90, 8)},
        {"limits": (100, 9)},
        {"order": {"batch_size": 5}},
        {"order": {"seed": 1}},
        {"order": {"shuffle": False}},
        {"order": {"weights": (1.0, 1.0)}},
        {"order": {"weights": (1.0, 2.0)}},
        {"eos_ids": (3,)},
        {"system_prompt": "S"},
        {"system_prompt": "T"},
        {"chat": "raw"},
        {"few_shot": shots},
        {"few_shot": shots[:1]},
        {"long_prompts": "cut"},
    ]
    marks = [mark(**change) for change in changes]
    assert len(set(marks)) == len(changes)
    assert [mark(**change) for change in changes] == marks


def test_a_tasks_seed_counts():
    pytest.importorskip("reasoning_gym")
    specs = [
        (spec, seed)
        for spec in ("arithmetic", "reasoning_gym/chain_sum:max_terms=2", "reasoning_gym/chain_sum")
        for seed in (0, 1)
    ]
    marks = [open_source(spec, seed).parts[0].digest() for spec, seed in specs]
    assert len(set(marks)) == len(specs)
    assert [open_source(spec, seed).parts[0].digest() for spec, seed in specs] == marks


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("rows", "batch"), [(12, 6), (13, 6), (40, 6), (7, 3), (5, 6)])
def test_refills_have_rows_that_their_batch_lacks(tmp_path, rows, batch, shuffle):
    """As long as the data has others; each is a pure function of its number."""
    spec = [named(tmp_path, "a", rows)]
    prompts = stream(spec, batch_size=batch, shuffle=shuffle)
    for index in range(0, 60, 7):
        seen = {prompt.text for prompt in prompts.batch(index)}
        for refill in range(1, 5):
            number = index + refill * REFILL_OFFSET
            found = prompts.batch(number)
            texts = [prompt.text for prompt in found]
            assert len(texts) == len({prompt.id for prompt in found}) == batch
            new = set(texts) - seen
            assert len(new) == min(batch, rows - len(seen))
            assert len(set(texts)) == min(batch, rows)
            seen |= new
            fresh = stream(spec, batch_size=batch, shuffle=shuffle)
            assert [p.id for p in fresh.batch(number)] == [p.id for p in found]


def test_refills_of_a_mixture_and_of_a_task_repeat_nothing_either(tmp_path):
    spec = [named(tmp_path, "a", 40), named(tmp_path, "b", 200)]
    for prompts in (stream(spec, batch_size=8, weights=[0.3, 0.7]), stream(["arithmetic"], 8)):
        texts = [p.text for k in range(4) for p in prompts.batch(2 + k * REFILL_OFFSET)]
        assert len(set(texts)) >= len(texts) - 1  # two rows of a task may be one question
