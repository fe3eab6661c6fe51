"""Data sets by their names on a hub: configurations, splits, columns, and what goes wrong."""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath

import pytest
from cases import read_cases
from hub_data import add_data, gsm8k_rows, jsonl, math_rows, parquet
from hub_server import Hub
from huggingface_hub import constants

from jaxrl.data import source as sources
from jaxrl.data.rows import Keys
from jaxrl.data.source import Source, open_source
from jaxrl.errors import UserError
from jaxrl.formats import hub as hub_module

GSM8K = Keys(prompt="question")
MATH = Keys(prompt="problem", completion="solution")
CHAT = Keys(prompt="none")


@pytest.fixture
def sets(hub: Hub) -> Hub:
    add_data(hub)
    return hub


def rows(source: Source) -> list[tuple[object, str | None, str | None]]:
    examples = [source[i] for i in range(len(source))]
    return [(one.prompt, one.completion, one.answer) for one in examples]


def test_gsm8k_by_its_configuration_split_and_columns(sets: Hub) -> None:
    source = open_source("hf:openai/gsm8k:main:train", keys=GSM8K)
    assert rows(source) == [(r["question"], None, r["answer"]) for r in gsm8k_rows(0, 8)]
    assert source.name == "hf:openai/gsm8k:main:train"
    assert sorted(sets.fetched(".parquet")) == [
        "main/train-00000-of-00002.parquet",
        "main/train-00001-of-00002.parquet",
    ]
    held_out = open_source("hf:openai/gsm8k:main", split="eval", keys=GSM8K)
    assert rows(held_out) == [(r["question"], None, r["answer"]) for r in gsm8k_rows(100, 4)]


def test_math_by_its_columns(sets: Hub) -> None:
    (first, *_) = found = rows(open_source("hf:HuggingFaceH4/MATH-500", split="eval", keys=MATH))
    assert first == ("Compute 0 + 2.", "We get \\boxed{2}.", "2") and len(found) == 6


def test_ultrachat_by_its_chat_column_and_split(sets: Hub) -> None:
    name = "hf:HuggingFaceH4/ultrachat_200k"
    (first, *_) = found = rows(open_source(f"{name}::train_sft", keys=CHAT))
    messages, completion, _ = first
    assert len(found) == 6 and completion == "assistant 0.3"
    assert [one["role"] for one in messages] == ["user", "assistant", "user"]
    with pytest.raises(UserError, match="both `prompt` and `messages`"):
        open_source(f"{name}:default:test_sft")


@pytest.mark.parametrize("case", read_cases("splits.jsonl", "set"), ids=lambda case: case["name"])
def test_the_files_of_a_split(case: dict[str, str], hub: Hub) -> None:
    """`configs` of the README, files, what follows the data set's name, files of the split."""
    configs, files, rest, wanted = (case[key] for key in ("configs", "files", "asked", "taken"))
    content: dict[str, bytes | str] = {}
    for n, file in enumerate(files.split(), 1):
        rows = math_rows(n)
        as_csv = "\n".join(
            ",".join(map(str, row)) for row in (rows[0], *(r.values() for r in rows))
        )
        content[file] = {".parquet": parquet(rows), ".csv": as_csv}.get(
            Path(file).suffix, jsonl(rows)
        )
    if configs is not None:
        content["README.md"] = f"---\nconfigs:\n{configs}\n---\n"
    hub.add("datasets/org/set", content)
    source = open_source(f"hf:org/set{rest}", keys=MATH)
    numbers = [files.split().index(file) + 1 for file in wanted.split()]
    assert len(source) == sum(numbers)
    assert sorted(set(hub.fetched()) - {"README.md"}) == wanted.split()


@pytest.mark.parametrize("header", ["date: 2024-02-30", "a: " + "[" * 5000, "a: ]", "- a"])
def test_a_header_that_cannot_be_read_describes_nothing(hub: Hub, header: str) -> None:
    content = {"README.md": f"---\n{header}\n---\n", "train.jsonl": jsonl(math_rows(3))}
    hub.add("datasets/org/set", content)
    assert len(open_source("hf:org/set", keys=MATH)) == 3


@pytest.mark.parametrize("case", read_cases("splits.jsonl", "pattern"), ids=str)
def test_the_files_that_a_pattern_names(case: dict[str, str]) -> None:
    paths = ["b.jsonl", "a/.jsonl", "a/b.jsonl", "a/c/b.jsonl"]
    pattern = str(PurePosixPath(case["pattern"]))
    assert [path for path in paths if sources._fits(path, pattern)] == case["fits"].split()


def test_a_header_counts_whatever_the_rest_of_the_page_is_written_in(hub: Hub) -> None:
    header = "---\r\nconfigs: [{config_name: a, data_files: b.jsonl}]\r\n---\r\nt\xfcr".encode(
        "latin-1"
    )
    hub.add("datasets/org/set", {"README.md": header, "b.jsonl": jsonl(math_rows(3)), "x.csv": ""})
    assert len(open_source("hf:org/set:a", keys=MATH)) == 3


def test_many_stars_take_no_time() -> None:
    began = time.monotonic()
    for star in ("*", "**", "**/"):
        assert not sources._fits("a/" * 60 + "a" * 100, f"{star}a" * 12 + "b")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hf:openai/gsm9k:main", "hf:openai/gsm9k:main is not a data set on|openai/gsm8k?"),
        ("hf:openai/gsm8k", "configurations main, socratic|as in hf:openai/gsm8k:main"),
        ("hf:openai/gsm8k:mian", "no configuration 'mian'|did you mean main?"),
        ("hf:openai/gsm8k:train", "no configuration 'train'|hf:openai/gsm8k::train"),
        ("hf:openai/gsm8k:main:tset", "no split 'tset'|did you mean test?"),
        ("hf:openai/gsm8k@v2:main", "no revision 'v2'"),
        ("hf:HuggingFaceH4/ultrachat_200k", "no split train among train_sft, test_sft"),
        (
            "hf:org/text",
            "no .jsonl, .parquet, .json or .csv files|hf:org/text@refs/convert/parquet",
        ),
        ("hf:org/some", "splits train and others (x.jsonl)|with hf:ORG/NAME:CONFIG:SPLIT"),
        ("hf:openai/gsm8k:main:train", "neither `prompt` nor `messages`|`question`"),
        ("hf:a/b/c", "hf:ORG/NAME:CONFIG:SPLIT"),
    ],
)
def test_what_goes_wrong_is_one_line(sets: Hub, spec: str, words: str) -> None:
    sets.add("datasets/org/text", {"train.txt": "a,b"})
    sets.add("datasets/org/some", {"train.jsonl": "", "x.jsonl": ""})
    with pytest.raises(UserError) as caught:
        open_source(spec, label="data.train")
    text = str(caught.value)
    assert text.startswith("data.train: ") and "\n" not in text
    for word in words.split("|"):
        assert word in text


def test_the_hubs_own_conversion_is_a_branch(hub: Hub) -> None:
    hub.add("datasets/org/set", {"data.csv": "a,b"})
    converted = {"main/train/0000.parquet": parquet(math_rows(2))}
    commit = hub.add("datasets/org/set", converted, branch="refs/convert/parquet")
    for name in ("refs/convert/parquet", f"refs/convert/parquet@{commit}", commit):
        assert len(open_source(f"hf:org/set@{name}:main:train", keys=MATH)) == 2


def test_a_part_of_a_set_is_not_taken_for_the_whole(
    sets: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two files came before the connection was lost, and the next start is offline."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    sets.cut["main/train-00001-of-00002.parquet"] = 0
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        hub_module._snapshot.cache_clear()
        with pytest.raises(UserError, match="HF_HUB_OFFLINE" if offline else "broke off"):
            open_source("hf:openai/gsm8k:main:train", keys=GSM8K)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    sets.cut.clear()
    sets.asked.clear()
    assert len(open_source("hf:openai/gsm8k:main:train", keys=GSM8K)) == 8
    assert sets.fetched(".parquet") == ["main/train-00001-of-00002.parquet"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_module._snapshot.cache_clear()
    assert len(open_source("hf:openai/gsm8k:main:train", keys=GSM8K)) == 8


def test_the_rows_decide_the_fingerprint_and_not_the_place(sets: Hub, tmp_path: Path) -> None:
    for number, rows in enumerate((gsm8k_rows(0, 5), gsm8k_rows(5, 3))):
        (tmp_path / f"{number}.parquet").write_bytes(parquet(rows))
    here = open_source(f"{tmp_path}/*.parquet", keys=GSM8K)
    assert open_source("hf:openai/gsm8k:main:train", keys=GSM8K).digest() == here.digest()
