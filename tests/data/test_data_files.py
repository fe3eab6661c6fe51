"""Files, folders and patterns as sources: parquet and saved datasets read as JSONL does, and each
way in which they can be bad is told with its place.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cases import read_cases

from jaxrl.data.example import Part
from jaxrl.data.rows import Keys
from jaxrl.data.source import SPLIT_RULES, Source, open_source, split_in_path
from jaxrl.data.tables import GroupCache, ParquetReader
from jaxrl.errors import UserError

datasets.disable_progress_bars()
USER = {"role": "user", "content": "hi"}
ROWS: list[dict[str, Any]] = [
    {"prompt": "2+2=", "completion": "4", "answer": "4", "level": 1, "messages": None},
    {"prompt": None, "messages": [USER, {"role": "assistant", "content": "yo"}], "level": 2},
    {"prompt": "ä 😀", "answer": "x", "level": None},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]], group: int = 2) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def save_dataset(path: Path, rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    datasets.Dataset.from_dict(columns).save_to_disk(path)
    return str(path)


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet, "dataset": save_dataset}


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> str:
    name = "saved" if kind == "dataset" else f"x.{kind}"
    return WRITERS[kind](folder / name, rows)


def prompts(source: Source | Part) -> list[Any]:
    return [source[i].prompt for i in range(len(source))]


def told(spec: str | list[str], **more: Any) -> str:
    with pytest.raises(UserError) as error:
        open_source(spec, **more)
    text = str(error.value)
    assert "\n" not in text and len(text) < 600
    return text


def few(*names: str) -> list[dict[str, Any]]:
    return [{"prompt": name} for name in names]


# What is read


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_reads_the_same_rows(tmp_path, kind):
    first, second, third = (open_source(write(kind, tmp_path, ROWS))[i] for i in range(3))
    assert (first.prompt, first.completion, first.answer) == ("2+2=", "4", "4")
    assert (second.prompt, second.completion, second.answer) == ((USER,), "yo", None)
    assert (third.prompt, third.completion, third.answer) == ("ä 😀", None, "x")
    assert [one.columns["level"] for one in (first, second, third)] == [1, 2, None]


@pytest.mark.parametrize("kind", WRITERS)
def test_fields_are_chosen_by_name(tmp_path, kind):
    rows = [{"question": "q", "gold": 7, "answer": "worked", "solution": "s"}]
    keys = Keys(prompt="question", answer="gold", completion="solution")
    example = open_source(write(kind, tmp_path, rows), keys=keys)[0]
    assert (example.prompt, example.completion, example.answer) == ("q", "s", "7")
    assert example.columns == {"answer": "worked"}


@pytest.mark.parametrize("kind", WRITERS)
def test_fields_that_only_other_messages_have_are_absent(tmp_path, kind):
    named = {**USER, "name": "Ada"}
    source = open_source(write(kind, tmp_path, [{"messages": [USER]}, {"messages": [named]}]))
    assert prompts(source) == [(USER,), (named,)]


def test_parquet_rows_are_found_in_any_order_whatever_is_kept(tmp_path):
    rows = few(*(f"p{i}" for i in range(23)))
    path = write_parquet(tmp_path / "x.parquet", rows, group=4)
    order = list(range(23)) * 2
    random.Random(0).shuffle(order)
    for limit in (0, 10**9):
        reader = ParquetReader(path, GroupCache(limit))
        assert [reader.row(i).to_pylist() for i in order] == [[rows[i]] for i in order]


def test_the_cache_holds_no_more_than_its_limit_and_the_newest():
    tables = [pa.table({"a": [i]}) for i in range(4)]
    size, read = tables[0].nbytes, []

    def get(cache: GroupCache, i: int) -> Any:
        return cache.get(("f", i), lambda: read.append(i) or tables[i])

    cache = GroupCache(2 * size)
    assert [get(cache, i) for i in (0, 1, 0, 2, 0, 1)] == [tables[i] for i in (0, 1, 0, 2, 0, 1)]
    assert read == [0, 1, 2, 1]  # 2 drives out 1, which was used before 0
    read.clear()
    tiny = GroupCache(0)
    assert [get(tiny, i) for i in (3, 3, 2)] == [tables[3], tables[3], tables[2]]
    assert read == [3, 2]


def test_undecodable_columns_that_nobody_asks_for_stay_bytes(tmp_path):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "picture": datasets.Image(decode=True)}
    )
    rows = {"prompt": ["a"], "picture": [{"bytes": b"not a picture", "path": None}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "d")
    assert open_source(str(tmp_path / "d"))[0].columns["picture"]["bytes"] == b"not a picture"


# Several files as one


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_pattern_and_a_folder_are_one_part_in_the_order_of_the_names(tmp_path, kind):
    for name, rows in (("b", few("b0")), ("a", few("a0", "a1"))):
        WRITERS[kind](tmp_path / f"{name}.{kind}", rows)
    for spec in (str(tmp_path), f"{tmp_path}/*.{kind}", f"{tmp_path}/[ab].{kind}"):
        source = open_source([spec, "arithmetic:size=3"])
        assert [len(part) for part in source.parts] == [3, 3]
        assert source.parts[0].name == spec
        assert prompts(source.parts[0]) == ["a0", "a1", "b0"]
    assert source.parts[0].where(2).startswith(f"{tmp_path / f'b.{kind}'}:")


def test_a_file_named_like_a_pattern_is_that_file(tmp_path):
    path = write_jsonl(tmp_path / "x[1].jsonl", few("a"))
    assert prompts(open_source(path)) == ["a"]


def test_patterns_below_folders(tmp_path):
    write_jsonl(tmp_path / "one" / "x.jsonl", few("a"))
    write_jsonl(tmp_path / "two" / "deep" / "y.jsonl", few("b"))
    assert prompts(open_source(f"{tmp_path}/**/*.jsonl")) == ["a", "b"]


@pytest.mark.parametrize("layout", ["saved", "shards", "files"])
def test_the_split_is_the_one_asked_for_or_named_like_the_use(tmp_path, layout):
    rows = {"train": few("t"), "validation": few("v"), "test": few("e")}
    folder = tmp_path / "d"
    if layout == "saved":
        made = {
            name: datasets.Dataset.from_dict({"prompt": [r["prompt"] for r in each]})
            for name, each in rows.items()
        }
        datasets.DatasetDict(made).save_to_disk(folder)
    for name, each in rows.items():
        if layout == "shards":
            write_parquet(folder / f"{name}-00000-of-00002.parquet", each)
            write_parquet(folder / f"{name}-00001-of-00002.parquet", each)
        elif layout == "files":
            write_jsonl(folder / f"{name}.jsonl", each)
    times = 2 if layout == "shards" else 1
    assert prompts(open_source(str(folder))) == ["t"] * times
    assert prompts(open_source(str(folder), split="eval")) == ["v"] * times
    assert prompts(open_source(f"{folder}:split=test", split="eval")) == ["e"] * times
    assert "no split 'tests' (did you mean test?)" in told(f"{folder}:split=tests")
    shutil.rmtree(folder / "train", ignore_errors=True)
    if layout != "saved":
        for path in folder.glob("train*"):
            path.unlink()
        assert "no split train among test, validation; choose one with :split=" in told(str(folder))


def test_the_name_of_a_file_or_a_folder_says_its_split():
    for _, example, split in SPLIT_RULES:
        assert split_in_path(PurePath(f"{example}.parquet")) == split
    for at in range(len(SPLIT_RULES)):  # the examples need their rules: the rules before do not fit
        before = (re.fullmatch(pattern, SPLIT_RULES[at][1]) for pattern, *_ in SPLIT_RULES[:at])
        assert not any(before)
    for case in read_cases("splits.jsonl", "name"):
        split = case["split"]
        for name in case["names"].split():
            assert split_in_path(PurePath(f"{name}.jsonl")) == split, name
            if "-of-" not in name:
                assert split_in_path(PurePath(f"data/{name}/part-00000-of-00001.csv")) == (
                    split or "part"
                )
                assert split_in_path(PurePath(f"{name}/x.jsonl")) == split


def test_a_folder_never_trains_on_what_its_names_hold_out(tmp_path):
    for number, names in enumerate(
        ("sums_train sums_test", "training testing", "train_a train_b test", "Train Dev")
    ):
        for name in names.split():
            write_jsonl(tmp_path / f"{number}" / f"{name}.jsonl", few(name))
        learned = prompts(open_source(f"{tmp_path}/{number}"))
        held_out = prompts(open_source(f"{tmp_path}/{number}", split="eval"))
        assert [*learned, *held_out] == names.split()
    for name in ("train_sft-00000-of-00001", "train_prefs-00000-of-00001"):
        write_jsonl(tmp_path / "shards" / f"{name}.jsonl", few(name))
    assert "no split train among train_prefs, train_sft" in told(f"{tmp_path}/shards")
    assert len(open_source(f"{tmp_path}/shards:split=train_sft")) == 1


# What is refused


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": None}, "`prompt` is null: the row has no prompt"),
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt": "x", "messages": [USER]}, "both `prompt` and `messages`"),
        ({"messages": [{"role": "user"}]}, "must have the texts `role` and `content`"),
        ({"messages": []}, "no message before the completion"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no message before"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}], "completion": "y"},
            "keep one",
        ),
    ],
)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_bad_row_is_named(tmp_path, kind, row, words):
    good = {"prompt": "fine"}
    spec = write(kind, tmp_path, [good, good, good, {"prompt": None, **row}])
    place = ":4: " if kind == "jsonl" else ": row 3: "
    text = told(spec)
    assert text.startswith(f"data.train: {spec}{place}") and words in text


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_rows_are_counted_beyond_what_is_checked_at_once(tmp_path, kind):
    rows = [*few(*(f"p{i}" for i in range(1500))), {"prompt": ""}]
    assert ": row 1500: `prompt` is empty" in told(write(kind, tmp_path, rows))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ({"prompt": [1, 2]}, "row 0: `prompt` must be text, it is a number"),
        ({"prompt": [b"a", b"b"]}, "row 0: `prompt` must be text, it is binary"),
        ({"messages": ["a", "b"]}, "row 0: `messages` must be a list of messages, it is text"),
        ({"messages": [["a"], ["b"]]}, "must have the texts `role` and `content`"),
        (
            {"prompt": ["a", "b"], "answer": [["x"], ["y"]]},
            "`answer` must be text or a number, it is a list",
        ),
        ({"prompt": ["a", "b"], "completion": [1, 2]}, "`completion` must be text"),
        ({"prompt": []}, "no rows"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_a_column_of_the_wrong_kind(tmp_path, kind, column, words):
    if kind == "parquet":
        spec = str(tmp_path / "x.parquet")
        pq.write_table(pa.table(column), spec)
    else:
        spec = str(tmp_path / "d")
        datasets.Dataset.from_dict(column).save_to_disk(spec)
    text = told(spec)
    assert text.startswith(f"data.train: {spec}: ") and words in text


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_column_names_the_file_those_there_and_the_near_one(tmp_path, kind):
    spec = write(kind, tmp_path, [{"question": "q", "gold": "g"}])
    text = told(spec)
    assert spec in text and "neither `prompt` nor `messages`" in text
    assert "has `question`, `gold`" in text and "data.prompt_key" in text
    assert "(did you mean question?)" in told(spec, keys=Keys(prompt="qestion"))
    keys = Keys(prompt="question", answer="golden")
    text = told(spec, keys=keys, split="eval")
    assert text.startswith("data.eval: ") and spec in text
    assert "no `golden` among `question`, `gold` (did you mean gold?) (data.answer_key)" in text
    assert len(open_source(spec, keys=keys)) == 1  # training asks for no answer
    text = told(spec, keys=Keys(prompt="question", tools="golds"))
    assert "no `golds` among `question`, `gold` (did you mean gold?) (data.tools_key)" in text


def test_one_file_of_several_with_the_answers_is_enough(tmp_path):
    with_gold = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "gold": 1}])
    without = write_jsonl(tmp_path / "b.jsonl", few("b"))
    assert len(open_source([with_gold, without], split="eval", keys=Keys(answer="gold"))) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda whole: b"", "size is 0 bytes"),
        (lambda whole: b"PAR1 and more that is no parquet", "not a parquet file"),
        (lambda whole: whole[: len(whole) // 2], "either the file is corrupted"),
        (lambda whole: whole[:4] + bytes(60) + whole[64:], "cannot be read"),
    ],
)
def test_broken_parquet(tmp_path, make, words):
    path = tmp_path / "x.parquet"
    write_parquet(path, few(*(f"prompt {i}" for i in range(50))), group=50)
    path.write_bytes(make(path.read_bytes()))
    text = told(str(path))
    assert text.startswith(f"data.train: {path}: cannot be read: ")
    assert words.lower() in text.lower()


def test_text_in_a_table_that_is_not_utf8(tmp_path):
    bad = pa.array([b"fine", b"fine", b"\xe4"]).cast(pa.string(), safe=False)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": bad}), path)
    text = told(str(path))
    assert text.startswith(f"data.train: {path}: row 2: cannot be read: ") and "utf-8" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "x", "completion": "\xe4"}', "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', r"\ud83d at character 0 is half of a surrogate pair"),
        (b'{"messages": [{"role": "user", "content": "a\\udc00"}]}', "character 1 is half"),
        (
            b'{"messages": [{"role": "user", "content": "a", "thinking": "b\\udc00"}]}',
            r"`thinking`: \udc00 at character 1 is half",
        ),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f",'
            b' "arguments": {"a": ["\\ud83d"]}}}]}]}',
            r"`a`: \ud83d at character 0 is half",
        ),
        (b'{"prompt": "x", "tools": [{"name": "f\\ud83d"}]}', "`tools`: `name`: "),
        (b"[" * 100_000, "cannot be read"),
        (b'{"prompt": "x", "answer": ' + b"1" * 5000 + b"}", "cannot be read"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path, line, words):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n' + line + b"\n")
    text = told(str(path), keys=Keys(tools="tools"))
    assert text.startswith(f"data.train: {path}:2: ") and words in text


def test_what_is_not_there_or_cannot_be_opened(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    (tmp_path / "loop.parquet").symlink_to(tmp_path / "loop.parquet")
    for spec, words in (
        ("none.jsonl", "No such file"),
        ("none.parquet", "No such file"),
        ("none.json", "No such file"),
        ("none.csv", "No such file"),
        ("loop.jsonl", "symbolic links"),
        ("loop.parquet", "symbolic links"),
        ("*.jsonl_", "no file matches"),
        ("*.txt", "x.txt, which is no .jsonl, .parquet, .json or .csv file"),
        ("x.txt", "no .jsonl, .parquet, .json or .csv file, by its name"),
        ("none", "neither a .jsonl, .parquet, .json or .csv file, a folder or pattern"),
        ("empty", "the folder holds no .jsonl, .parquet, .json or .csv file"),
        ("empty:split=train", "the folder holds no .jsonl, .parquet, .json or .csv file"),
    ):
        text = told(f"{tmp_path}/{spec}")
        assert text.startswith("data.train: ") and words in text, text
        assert f"{tmp_path}/{spec.split('_')[0]}" in text


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for kind in ("jsonl", "parquet"):
        spec = write(kind, tmp_path, few("a"))
        with monkeypatch.context() as patch:  # the tests may run as root, who may read everything
            patch.setattr("builtins.open", denied)
            patch.setattr(pq, "ParquetFile", denied)
            text = told(spec)
        assert spec in text and "Permission denied" in text


def test_options_and_mixed_folders(tmp_path):
    path = write_jsonl(tmp_path / "a" / "x.jsonl", few("a"))
    assert f"{path} takes no options (:split=train)" in told(f"{path}:split=train")
    assert "no option 'splt' (did you mean split?)" in told(f"{tmp_path}/a:splt=train")
    assert "'train' is not key=value" in told(f"{tmp_path}/a:train")
    assert "there is none" in told(f"{tmp_path}/a:split=train")
    write_jsonl(tmp_path / "a" / "train.jsonl", few("a"))
    text = told(f"{tmp_path}/a")
    assert "splits train and others (x.jsonl); choose one with :split=NAME" in text
    assert prompts(open_source(f"{tmp_path}/a:split=train")) == ["a"]
    write_parquet(tmp_path / "b" / "x.parquet", few("a"))
    write_jsonl(tmp_path / "b" / "x.jsonl", few("a"))
    assert "both .jsonl and .parquet" in told(f"{tmp_path}/b")
    (tmp_path / "b" / "x.parquet").unlink()
    for name in ("statistics.json", "dataset_info.json", "index.csv"):
        (tmp_path / "b" / name).write_text("{}")
    assert prompts(open_source(f"{tmp_path}/b")) == ["a"]  # beside other data they are none
    (tmp_path / "b" / "x.jsonl").unlink()
    assert "both .csv and .json" in told(f"{tmp_path}/b")
    colon = write_jsonl(tmp_path / "a:b=c.jsonl", few("kept"))
    assert prompts(open_source(colon)) == ["kept"]


def test_broken_datasets(tmp_path):
    def saved(name: str) -> tuple[Path, Path]:
        folder = Path(save_dataset(tmp_path / name, few(*(f"p{i}" for i in range(99)))))
        (arrow,) = folder.glob("*.arrow")
        return folder, arrow

    folder, arrow = saved("truncated")
    arrow.write_bytes(arrow.read_bytes()[:-900])
    assert told(str(folder)).startswith(f"data.train: {folder}: cannot be read: ")
    folder, arrow = saved("removed")
    arrow.unlink()
    assert "No such file" in told(str(folder))
    folder, arrow = saved("state")
    (folder / "state.json").write_text("{")
    assert told(str(folder)).startswith(f"data.train: {folder}/state.json: cannot be read: ")
    folder, arrow = saved("not_a_dict")
    (folder / "dataset_dict.json").write_text("[1]")
    assert "dataset_dict.json: cannot be read" in told(str(folder))
    folder, arrow = saved("one")
    assert "no split 'train'; there is none" in told(f"{folder}:split=train")
    assert len(open_source(str(folder))) == 99


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    parquet, saved = write("parquet", tmp_path, few("a")), write("dataset", tmp_path, few("a"))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for spec in (parquet, saved):
        text = told(spec)
        assert spec in text and "needs the extra `data`: pip install 'jaxrl[data]'" in text


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("how", ["itself", "link", "folder"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str, how: str) -> None:
    """Rows are read again in the run; a pipe gives them once, and one without a writer never."""
    pipe = tmp_path / "data" / f"train{suffix}"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    spec = pipe.parent if how == "folder" else pipe
    if how == "link":
        spec = tmp_path / f"link{suffix}"
        spec.symlink_to(pipe)
    with pytest.raises(UserError, match="this is a pipe or a device|holds no .jsonl"):
        open_source(str(spec))
