"""Lengths told before a run are those of the batches that the run makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from jaxrl.data import stream
from jaxrl.data.lengths import TOLERATED, Lengths, short_names
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.source import SUFFIXES, open_source
from jaxrl.data.stream import PromptStream, eval_set
from jaxrl.types import Prompt

CHAT = tiny_tokenizer()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here does not depend on how busy the machine is."""
    monkeypatch.setattr(stream, "SAMPLE_S", 1e6)


def file(folder: Path, name: str, *sizes: int) -> str:
    """Rows whose prompts and completions have so many letters."""
    rows = [{"prompt": "p" * size, "completion": "c" * (2 * size)} for size in sizes]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def encoder(prompt: int = 500, new: int = 500, **options: Any) -> PromptEncoder:
    """The template's tokens and a system prompt stand around each prompt."""
    return PromptEncoder(CHAT, prompt, new, system_prompt="be brief", **options)


def check(found: Lengths, lengths: list[int]) -> None:
    told = found.to_json()
    assert sorted(found.tokens.tolist()) == sorted(lengths)
    assert told["measured"] == len(lengths) and told["max"] == max(lengths)
    assert told["mean"] == pytest.approx(np.mean(lengths))
    assert told["p90"] == pytest.approx(np.percentile(lengths, 90))
    assert told["longer"] == np.mean(np.array(lengths) > told["limit"])


def of_source(prompts: list[Prompt], letters: range) -> list[Prompt]:
    return [prompt for prompt in prompts if len(prompt.text) in letters]


@pytest.mark.parametrize("weights", [None, [1, 1]])
def test_of_each_source_they_are_those_of_the_batches(
    tmp_path: Path, weights: list[float] | None
) -> None:
    short, long = range(1, 11), range(50, 80, 3)
    files = [file(tmp_path, "short", *short), file(tmp_path, "long", *long)]
    made = PromptStream(open_source(files), encoder(), 4, seed=3, weights=weights)
    prompts = [prompt for index in range(5) for prompt in made.batch(index)]  # an epoch
    found = made.measure_lengths(20, completions=True)
    assert [(one.source, one.of) for one in found] == [
        (f"data.train: {name}", of) for name in files for of in ("prompts", "completions")
    ]
    for which, asked, learned in ((short, *found[:2]), (long, *found[2:])):
        mine = of_source(prompts, range(which[0], which[-1] + 1))
        assert len(mine) == len(which) == asked.rows == learned.rows
        check(asked, [len(prompt.tokens) for prompt in mine])
        check(learned, [len(prompt.completion or ()) for prompt in mine])
    names = {len(prompt.text) in short: made.source_name(prompt.id) for prompt in prompts}
    assert names == {True: "short", False: "long"}


def test_of_a_task_they_are_those_of_the_run(tmp_path: Path) -> None:
    task = open_source("arithmetic:digits=2,terms=4")
    made = PromptStream(task, encoder(), 4, seed=0)
    prompts = [prompt for index in range(3) for prompt in made.batch(index)]
    asked, learned = made.measure_lengths(12, completions=True)
    check(asked, [len(prompt.tokens) for prompt in prompts])
    check(learned, [len(prompt.completion or ()) for prompt in prompts])
    assert asked.rows is None and "the first 12 in the run's order" in asked.notes()[0]
    assert made.source_name(0) == ""


def test_what_is_too_long_is_measured_whole_and_the_limit_that_helps_is_named(
    tmp_path: Path,
) -> None:
    sizes = [*[10] * 150, *range(100, 150)]
    data, whole = open_source(file(tmp_path, "a", *sizes)), encoder()
    lengths = [whole.length(data[row]) for row in range(len(data))]
    limit = lengths[0]
    for long_prompts, fate in (("drop", "left out"), ("cut", "cut")):
        tight = encoder(limit, 50, long_prompts=long_prompts)
        asked, learned = PromptStream(data, tight, 4, seed=0).measure_lengths(800, completions=True)
        check(asked, lengths)
        assert (
            asked.longer == 0.25
            and f"25.00% longer than max_prompt_tokens={limit}: {fate}" in (asked.notes()[0])
        )
        assert f"max_prompt_tokens={asked.sufficient} would keep 99%" in asked.notes()[1]
        assert np.mean(np.array(lengths) > asked.sufficient) <= TOLERATED
        assert np.mean(np.array(lengths) > asked.sufficient - 1) > TOLERATED
        assert learned.rows == (150 if long_prompts == "drop" else 200)
    fits = encoder(asked.sufficient)
    (asked,) = PromptStream(data, fits, 4, seed=0).measure_lengths(800, completions=False)
    assert 0 < asked.longer <= TOLERATED and len(asked.notes()) == 1


def test_a_sample_is_the_first_rows_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(file(tmp_path, "a", *range(1, 41)))
    made = PromptStream(source, encoder(), 4, seed=0)
    monkeypatch.setattr(stream, "SAMPLE_ROWS", 8)
    asked, learned = made.measure_lengths(4000, completions=True)
    assert len(asked.tokens) == 40 and "all 40" in asked.notes()[0]
    first = [*made.batch(0), *made.batch(1)]
    check(learned, [len(prompt.completion or ()) for prompt in first])
    assert "the first 8 of 40 in the run's order" in learned.notes()[0]
    monkeypatch.setattr(stream, "SAMPLE_S", -1.0)
    assert [one.of for one in made.measure_lengths(4000, completions=True)] == ["prompts"]


def test_held_out_sets_too(tmp_path: Path) -> None:
    source, whole = open_source(file(tmp_path, "a", 3, 100, 4, 5), 0, "eval"), encoder()
    limit = whole.length(source[3])
    held_out = eval_set(source, encoder(limit), 3)
    assert held_out.lengths is not None and held_out.dropped == 1
    check(held_out.lengths, [whole.length(source[row]) for row in range(4)])
    assert held_out.lengths.longer == 0.25


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a/x.jsonl", "b/y.parquet"], ["x", "y"]),
        (["a/x.jsonl", "b/x.jsonl"], ["a-x.jsonl", "b-x.jsonl"]),
        (
            ["arithmetic:digits=2", "hf:o/n:main:train"],
            ["arithmetic-digits-2", "hf-o-n-main-train"],
        ),
        (["arithmetic", "arithmetic"], ["arithmetic-1", "arithmetic-2"]),
        (["é", "ü"], ["data-1", "data-2"]),
    ],
)
def test_names_for_metrics_differ(names: list[str], short: list[str]) -> None:
    assert short_names(names, SUFFIXES) == short
