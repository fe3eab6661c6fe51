"""A row means the same in whichever form it comes, and in whichever of the usual shapes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl.data.example import Example, is_learned
from jaxrl.data.rows import LEARNED, Keys, to_example
from jaxrl.data.source import open_source, source_of
from jaxrl.errors import UserError
from jaxrl.types import NO_INPUTS

pandas: Any = pytest.importorskip("pandas")
datasets.disable_progress_bars()
HAS_JSON = hasattr(datasets, "Json")
"""Whether this version of `datasets` can load objects that are too unlike for a struct."""
Row = dict[str, Any]
KEYS = Keys(
    prompt="chat", completion="end", answer="reward_model.ground_truth", tools="tools", turns="all"
)


def tool(name: str, **properties: Any) -> Row:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def call(name: str, **arguments: Any) -> Row:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


def said(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer", "minimum": 1}),
    tool("add", a={"type": "number"}, terms={"type": "array", "items": {"type": "integer"}}),
    tool("now"),
]
CALLS = [
    call("weather", city="Oslo", days=3),
    call("add", a=1.5, terms=[1, 2], deep={"of": [{"x": 1}, {"y": "z"}]}),
    call("now"),
]


def made_rows(seed: int, unlike: bool = False) -> list[Row]:
    """Rows that a table can hold as structs; with `unlike`, some that it cannot."""
    draw = random.Random(seed)

    def messages() -> list[Row]:
        head = [said("system", "S")] if draw.random() < 0.3 else []
        extra = {"name": "Ada"} if draw.random() < 0.3 else {}
        asked = said("user", draw.choice(["2+2?", "ä 😀\n", "{", '["not json"']), **extra)
        middle = [draw.choice(CALLS), said("tool", "rain", tool_call_id="1"), said("user", "?")]
        return [*head, asked, *(middle if draw.random() < 0.5 else [])]

    rows = []
    for number in range(12):
        end = said("assistant", "4", **draw.choice([{}, {"reasoning_content": "two and two"}]))
        gold: Any = [str(number), "\\frac{1}{2}", None, ""][number % 4]
        row: Row = {
            "chat": messages(),
            "end": [*draw.choice([[], [draw.choice(CALLS), said("tool", "5")]]), end],
            "tools": draw.sample(TOOLS, draw.randrange(4)),
            "reward_model": {"style": "rule", "ground_truth": gold},
            "extra_info": draw.choice([{"index": number}, {"split": "test", "parts": [{"n": 1}]}]),
            "level": draw.choice([number, None]),
            "big": 2**62 + number,
            "share": draw.choice([0.1, 1e-9, None]),
            "hard": draw.choice([True, False, None]),
            "tags": draw.choice([["a", "b"], [], None]),
            "made": "2024-02-29",
        }
        if unlike and number % 3 == 0:
            row["chat"].insert(-1, call("add", a="one", terms={"of": None}))
            row["tools"] = [*row["tools"], tool("any", a={"type": ["string", "null"]})]
            row["extra_info"] = {"index": "zero"}
        rows.append({k: v for k, v in row.items() if v is not None or draw.random() < 0.5})
    return rows


def jsonl(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def filled(rows: list[Row]) -> list[Row]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def loaded(folder: Path, rows: list[Row]) -> datasets.Dataset:
    """As `load_dataset` reads JSONL: with columns of the type Json where objects are unlike."""
    file = jsonl(folder / "loaded.jsonl", rows)
    cache = str(folder / "cache")
    return datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)


def to_parquet(folder: Path, rows: list[Row]) -> str:
    pq.write_table(pa.Table.from_pylist(filled(rows)), folder / "x.parquet", row_group_size=5)
    return str(folder / "x.parquet")


def without_metadata(folder: Path, rows: list[Row]) -> str:
    """`dataset_info.json` alone knows which columns are JSON."""
    loaded(folder, rows).save_to_disk(folder / "saved")
    (file,) = (folder / "saved").glob("*.arrow")
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    table = pa.table({name: as_text(table[name].combine_chunks()) for name in table.column_names})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return str(folder / "saved")


def as_text(array: Any) -> Any:
    """An array whose JSON is text, as older Arrow and other programs have it."""
    if isinstance(array, pa.ExtensionArray):
        return array.storage
    if pa.types.is_list(array.type):
        return pa.ListArray.from_arrays(array.offsets, as_text(array.values), mask=array.is_null())
    if pa.types.is_struct(array.type):
        fields = [as_text(array.field(i)) for i in range(array.type.num_fields)]
        names = [field.name for field in array.type]
        return pa.StructArray.from_arrays(fields, names, mask=array.is_null())
    return array


def saved(dataset: datasets.Dataset, folder: Path) -> str:
    dataset.save_to_disk(folder / "saved")
    return str(folder / "saved")


def written(dataset: datasets.Dataset, folder: Path) -> str:
    dataset.to_parquet(folder / "d.parquet")
    return str(folder / "d.parquet")


def array(folder: Path, rows: list[Row]) -> str:
    (folder / "array.json").write_text("\ufeff \n" + json.dumps(rows, indent=1))
    return str(folder / "array.json")


FILES: dict[str, Callable[[Path, list[Row]], str]] = {
    "array": array,
    "lines in .json": lambda folder, rows: jsonl(folder / "x.json", rows),
    "loaded, parquet": lambda folder, rows: written(loaded(folder, rows), folder),
    "loaded, saved": lambda folder, rows: saved(loaded(folder, rows), folder),
    "loaded, no metadata": without_metadata,
}
STRUCTS: dict[str, Callable[[Path, list[Row]], str]] = {
    "parquet": to_parquet,
    "dataset, parquet": lambda f, rows: written(datasets.Dataset.from_list(filled(rows)), f),
    "dataset, saved": lambda f, rows: saved(datasets.Dataset.from_list(filled(rows)), f),
}
OBJECTS: dict[str, Callable[[Path, list[Row]], Any]] = {
    "list": lambda folder, rows: rows,
    "DataFrame": lambda folder, rows: pandas.DataFrame(rows),
    "loaded": loaded,
}
STRUCT_OBJECTS: dict[str, Callable[[Path, list[Row]], Any]] = {
    "Table": lambda folder, rows: pa.Table.from_pylist(filled(rows)),
    "Dataset": lambda folder, rows: datasets.Dataset.from_list(filled(rows)),
}


def examples(source: Any) -> list[Example]:
    return [source[index] for index in range(len(source))]


CASES = [
    *((form, False) for form in (*FILES, *STRUCTS, *OBJECTS, *STRUCT_OBJECTS)),
    *((form, True) for form in (*FILES, *OBJECTS) if HAS_JSON or "loaded" not in form),
]


@pytest.mark.parametrize(("form", "unlike"), CASES)
def test_a_row_is_the_same_in_every_form(tmp_path: Path, form: str, unlike: bool) -> None:
    rows = made_rows(len(form), unlike)
    expected = examples(open_source(jsonl(tmp_path / "x.jsonl", rows), keys=KEYS))
    if form in FILES or form in STRUCTS:
        source = open_source({**FILES, **STRUCTS}[form](tmp_path, rows), keys=KEYS)
    else:
        source = source_of({**OBJECTS, **STRUCT_OBJECTS}[form](tmp_path, rows), KEYS)
    for got, example in zip(examples(source), expected, strict=True):
        assert got == example
        assert spelt(got) == spelt(example)
    assert {example.answer for example in expected} > {None, "\\frac{1}{2}"}


def spelt(example: Example) -> str:
    """What templates and prompts would show, in which 1 and 1.0 and true differ."""
    tools = (example.inputs or NO_INPUTS).tools
    return json.dumps([example.prompt, example.turns, tools], sort_keys=True)


def tools_in(row: Any) -> Any:
    return (to_example(row, Keys(tools="tools"), "row").inputs or NO_INPUTS).tools


# Missing values and numbers


MISSING = [None, float("nan"), "", "  \n", np.nan, np.float32("nan"), pandas.NA, pandas.NaT]


@pytest.mark.parametrize("value", [*MISSING, Decimal("NaN")], ids=repr)
def test_a_missing_answer_is_none(value: Any) -> None:
    example = source_of([{"prompt": "x", "answer": value, "level": value}])[0]
    assert example.answer is None
    assert example.columns["level"] is None or isinstance(value, str)
    assert to_example({"prompt": "x"}, Keys(), "row").answer is None


@pytest.mark.parametrize(
    ("column", "answers"),
    [
        (pa.array([42, None]), ["42", None]),
        (pa.array([42.0, float("nan"), None]), ["42", None, None]),
        (pa.array([0.1, 2.5], pa.float32()), ["0.1", "2.5"]),
        (pa.array([2**63 - 1, -(2**63)]), [str(2**63 - 1), str(-(2**63))]),
        (pa.array([Decimal("42.00"), Decimal("1.50")]), ["42", "1.50"]),
        (pa.array([1e300, -0.0]), ["1e+300", "0"]),
        (pa.array(["007", "42.0", "nan"]), ["007", "42.0", "nan"]),
        (pa.array([date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([datetime(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([datetime(2024, 2, 29, 12, 30)]), ["2024-02-29T12:30:00"]),
    ],
    ids=str,
)
def test_answers_of_a_table_are_the_text_that_was_meant(
    tmp_path: Path, column: Any, answers: list[str | None]
) -> None:
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"prompt": ["a"] * len(column), "answer": column}), path)
    assert [example.answer for example in examples(open_source(path))] == answers
    frame = pandas.DataFrame({"prompt": ["a"] * len(column), "answer": column.to_pandas()})
    if column.type != pa.float32():
        got = [example.answer for example in examples(source_of(frame))]
        assert got == answers


def test_a_column_of_whole_numbers_with_gaps_is_the_same_from_pandas(tmp_path: Path) -> None:
    frame = pandas.DataFrame([{"prompt": "a", "answer": 42}, {"prompt": "b"}])
    frame.to_parquet(tmp_path / "x.parquet")
    assert pq.read_schema(tmp_path / "x.parquet").field("answer").type == pa.float64()
    assert [e.answer for e in examples(open_source(str(tmp_path / "x.parquet")))] == ["42", None]
    assert [e.answer for e in examples(source_of(frame))] == ["42", None]
    nullable = source_of(frame.convert_dtypes())
    assert [e.answer for e in examples(nullable)] == ["42", None]


@pytest.mark.parametrize("kind", ["list_", "large_list", "list_view", "large_list_view"])
def test_lists_and_text_of_every_arrow_type(kind: str) -> None:
    turn = pa.struct({"role": pa.large_string(), "content": pa.string_view(), "name": pa.string()})
    chats = pa.array([[USER, {**ANSWER, "name": "Ada"}]], getattr(pa, kind)(turn))
    table = pa.table({"messages": chats, "level": pa.array(["a"]).dictionary_encode()})
    (example,) = examples(source_of(table))
    assert (example.prompt, example.columns) == ((USER,), {"level": "a"})


def test_bytes_maps_and_arrays_of_columns() -> None:
    table = pa.table(
        {
            "prompt": ["a"],
            "picture": [b"\x00\xff"],
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
            "matrix": [[[1.0, float("nan")]]],
        }
    )
    columns = source_of(table)[0].columns
    expected = {"picture": b"\x00\xff", "map": {"k": 1}, "matrix": [[1.0, None]]}
    assert columns == expected
    arrays = {"prompt": "a", "picture": b"\x00\xff", "map": {"k": np.int64(1)}}
    arrays["matrix"] = np.array([[1.0, np.nan]], np.float32)
    assert source_of([arrays])[0].columns == expected


@pytest.mark.skipif(not HAS_JSON, reason="this version of datasets has no type Json")
def test_nulls_that_somebody_wrote_into_arguments_stay(tmp_path: Path) -> None:
    """In JSON and in columns of the type Json; a struct cannot tell them from absent fields."""
    asked = [said("user", "q"), call("f", x=None, y=[None]), said("user", "?")]
    other = [said("user", "q"), call("f", x="a", y={"z": 1}), said("user", "?")]
    rows = [{"messages": asked}, {"messages": other}]
    file = jsonl(tmp_path / "x.jsonl", rows)
    for source in (open_source(file), source_of(loaded(tmp_path, rows)), source_of(rows)):
        turn: Any = source[0].prompt[1]
        function = turn["tool_calls"][0]["function"]
        assert function["arguments"] == {"x": None, "y": [None]}


@pytest.mark.parametrize("tools", [None, "", " ", "null", "[]", []])
def test_tools_that_are_none(tools: Any) -> None:
    assert tools_in({"prompt": "a", "tools": tools}) == ()


def test_a_greeting_that_begins_a_chat_is_prompt() -> None:
    """Whichever turns are learned; behind a system message it is a turn like all others."""
    hello, system = {"role": "assistant", "content": "Hello!"}, {"role": "system", "content": "s"}
    for turns in ("last", "all"):
        example = to_example({"messages": [hello, USER, ANSWER]}, Keys(turns=turns), "row")
        assert example.prompt == (hello, USER) and example.turns == (ANSWER,)
    example = to_example({"messages": [system, hello, USER, ANSWER]}, Keys(turns="all"), "row")
    assert example.prompt == (system,) and example.turns == (hello, USER, ANSWER)


def test_tools_that_a_table_wrote_as_json_have_no_nulls_of_others(tmp_path: Path) -> None:
    tools = [*TOOLS, tool("d", x={"type": "string", "default": None})]
    row = {"prompt": "a", "tools": tools}
    leaked = pa.Table.from_pylist([row]).to_pylist()
    assert leaked[0]["tools"][0]["function"]["parameters"]["properties"]["a"] is None
    assert tools_in(leaked[0])[:3] == tuple(TOOLS)
    assert tools_in(row) == tuple(tools)


# Shapes of a row


def said_in(row: Row, keys: Keys = Keys()) -> tuple[Any, str | None]:  # noqa: B008
    """The prompt and the text of the completion."""
    example = to_example(row, keys, "row")
    return example.prompt, example.completion


USER, ANSWER = said("user", "q"), said("assistant", "yo")
LONG = [said("user", "q"), said("assistant", "a"), said("user", "r")]


@pytest.mark.parametrize(
    ("row", "prompt", "completion"),
    [
        ({"prompt": "q", "completion": "yo"}, "q", "yo"),
        ({"prompt": [USER]}, [USER], None),
        ({"prompt": USER}, [USER], None),
        ({"prompt": LONG}, LONG, None),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER], "yo"),
        ({"prompt": [USER], "completion": ANSWER}, [USER], "yo"),
        ({"prompt": [USER], "completion": "yo"}, [USER], "yo"),
        ({"prompt": "q", "completion": [ANSWER]}, "q", "yo"),
        ({"messages": [USER, ANSWER]}, [USER], "yo"),
        ({"messages": [USER], "completion": [ANSWER]}, [USER], "yo"),
        ({"messages": json.dumps([USER, ANSWER])}, [USER], "yo"),
        ({"messages": [json.dumps(USER), json.dumps(ANSWER)]}, [USER], "yo"),
    ],
)
def test_prompts_and_completions_as_text_or_messages(
    row: Row, prompt: Any, completion: str | None
) -> None:
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    assert said_in(row) == (prompt, completion)
    names = {"prompt": "p.q", "messages": "m", "completion": "c"}
    keys = Keys(prompt="p.q", messages="m", completion="c")
    renamed = {names[name]: value for name, value in row.items()}
    assert said_in(renamed, keys) == (prompt, completion)
    if "prompt" in row:
        nested = {"p": {"q": row["prompt"]}, "c": row.get("completion")}
        assert said_in(nested, keys) == (prompt, completion)


def test_one_column_may_hold_prompts_and_chats() -> None:
    keys = Keys(prompt="x", messages="x")
    assert said_in({"x": "q"}, keys) == ("q", None)
    assert said_in({"x": [USER, ANSWER]}, keys) == ((USER,), "yo")
    assert said_in({"prompt": [USER, ANSWER]}, Keys(None, "prompt")) == ((USER,), "yo")
    both = {"prompt": "title", "messages": [USER, ANSWER]}
    assert said_in(both, Keys(prompt=None)) == ((USER,), "yo")
    assert to_example(both, Keys(prompt=None), "row").columns == {"prompt": "title"}


def test_completions_of_several_messages() -> None:
    begun = call("weather", city="Oslo")
    turns = [begun, said("tool", "rain"), said("assistant", "wet", reasoning_content="hm")]
    row = {"prompt": LONG, "completion": turns}
    every = to_example(row, Keys(turns="all"), "row")
    assert (every.prompt, every.turns, every.completion) == (tuple(LONG), tuple(turns), "")
    last = to_example(row, Keys(), "row")
    assert last.prompt == (*LONG, *turns[:2]) and last.turns == (turns[2],)
    assert last == to_example({"messages": [*LONG, *turns]}, Keys(), "row")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}], "a b"),
        (["a", {"text": "b"}], "ab"),
        ([{"type": "text", "text": "a", "image_url": None}], "a"),
        ([{"type": "input_text", "text": "a"}], "a"),
        ([], ""),
    ],
)
def test_content_as_parts_of_text(content: Any, text: str) -> None:
    chat = [said("system", content), said("user", content), said("assistant", content)]
    assert said_in({"messages": chat}) == ((said("system", text), said("user", text)), text)


def test_calls_that_are_none_and_contents_beside_calls() -> None:
    nones: list[Any] = [[], None, "[]"]
    for none in nones:
        chat = [USER, {**ANSWER, "tool_calls": none}]
        assert said_in({"messages": chat}) == ((USER,), "yo")
        assert all(
            "tool_calls" not in turn for turn in to_example({"messages": chat}, Keys(), "row").turns
        )
    contents: list[Row] = [{"content": None}, {"content": ""}, {"content": []}, {}]
    for content in contents:
        begun = {**call("f", x=1)}
        del begun["content"]
        for calls in (begun["tool_calls"], json.dumps(begun["tool_calls"])):
            turn = {**begun, **content, "tool_calls": calls}
            example = to_example({"messages": [USER, turn]}, Keys(), "row")
            assert example.turns == (call("f", x=1),) and example.completion == ""


def test_every_field_of_a_message_is_kept() -> None:
    fields = {"reasoning_content": "hm", "name": "Ada", "x": {"y": [1, None]}}
    chat = [said("user", "q", **fields), said("assistant", "yo", **fields, weight=1)]
    example = to_example({"messages": chat}, Keys(), "row")
    del chat[1]["weight"]
    assert (example.prompt, example.turns) == ((chat[0],), (chat[1],))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [said("user", ["a", {"type": "image", "image": "x.png"}])]},
            "row: `messages`[0]: `content`[1] is of type 'image': only text can be read",
        ),
        ({"prompt": [said("user", [{"type": "text"}])]}, "`prompt`[0]: `content`[0] is null"),
        ({"prompt": [USER, {"role": "user"}]}, "row: `prompt`[1] must have the texts"),
        ({"prompt": ["x"]}, "row: `prompt`[0] of a list of messages must have the texts"),
        ({"prompt": [USER, ANSWER]}, "`prompt` ends with a message of the assistant"),
        ({"prompt": []}, "`prompt` has no message"),
        ({"prompt": [USER], "completion": [USER]}, "last message of `completion` must be"),
        ({"prompt": [USER], "completion": []}, "last message of `completion` must be"),
        ({"prompt": "q", "completion": [ANSWER, USER, ANSWER]}, "give the prompt as messages too"),
        ({"messages": [USER, ANSWER], "completion": [ANSWER]}, "data.completion_key=null"),
        ({"prompt": "q", "messages": [USER]}, "both `prompt` and `messages`"),
        ({"messages": [{**ANSWER, "tool_calls": "f()"}]}, "`tool_calls` must be a list of calls"),
        ({"messages": [{**ANSWER, "tool_calls": ["f()"]}]}, "must be a list of objects: ['f()']"),
        ({"prompt": "x", "answer": ["y"]}, "it is a list (data.answer_key=answer.0 names its"),
        ({"prompt": 3}, "row: `prompt` must be text, it is a number"),
        ({"prompt": "x", "answer": True}, 'a truth value (write it as a text, such as "yes", or'),
        ({"prompt": "x", "answer": False}, 'such as "no", or set data.answer_key=null)'),
        ({"prompt": "x", "answer": {"gold": 3}}, "(data.answer_key=answer.gold names a value"),
        ({"prompt": "x", "answer": {}}, "an object (data.answer_key=null leaves it out)"),
        ({"prompt": ["a", "b"], "answer": ["1", "2"]}, "several rows, write a list of rows: [{"),
        ({"prompt": {"0": "a", "1": "b"}}, "several rows, write a list of rows: [{"),
        ({"conversations": [USER]}, "data.messages_key=conversations reads the chats of ShareGPT"),
        ({"messages": [said("human", "x")]}, "[0]: rename the role 'human' to 'user'"),
        ({"messages": [USER, said("gpt", "x")]}, "[1]: rename the role 'gpt' to 'assistant'"),
        ({"messages": [USER, said("model", "x")]}, "rename the role 'model' to 'assistant'"),
        ({"messages": [said("function", "x")]}, "rename the role 'function' to 'tool'"),
        ({"prompt": [USER], "completion": [said("Assistant", "x")]}, "'Assistant' to 'assistant'"),
        ({"messages": [said("human ", "x")]}, "rename the role 'human ' to 'user'"),
        ({"prompt": [said("gpt4", "x")]}, "role 'gpt4' is none of system, developer, user, assist"),
        (
            {"messages": [USER, {**ANSWER, "content": None, "function_call": {"name": "f"}}]},
            "[1]: `function_call` is the old form of a call: write it as `tool_calls`",
        ),
        ({"messages": [{"from": "narrator", "value": "x"}]}, "`from` is 'narrator'"),
    ],
)
def test_what_cannot_be_read_is_named(row: Row, words: str) -> None:
    with pytest.raises(UserError) as error:
        to_example(row, Keys(), "row")
    assert words in str(error.value) and str(error.value).startswith("row: ")


@pytest.mark.parametrize("form", ["csv", "jsonl", "json", "objects", "parquet"])
@pytest.mark.parametrize("separate", [True, False])
def test_messages_as_json_text_are_read_in_every_column(
    tmp_path: Path, form: str, separate: bool
) -> None:
    """`prompt` and `completion`, and one column of both kinds of prompts."""
    cells = {"prompt": json.dumps([USER, ANSWER, USER]), "completion": json.dumps([ANSWER])}
    rows: list[Row] = [cells, {**cells, "completion": json.dumps(ANSWER, indent=1)}]
    if form == "csv":
        pandas.DataFrame(rows).to_csv(tmp_path / "x.csv", index=False)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    elif form == "jsonl":
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    elif form == "json":
        (tmp_path / "x.json").write_text(json.dumps(rows))
    keys = Keys() if separate else Keys(messages="prompt")
    path = str(tmp_path / f"x.{form}")
    source = source_of(rows, keys) if form == "objects" else open_source(path, keys=keys)
    for example in examples(source):
        assert example.prompt == (USER, ANSWER, USER) and example.completion == "yo"


@pytest.mark.parametrize("key", ["prompt", "completion"])
@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[]",
        "{}",
        '{"name": "Bo"}',
        '[{"name": "Bo"}]',
        '[{"role": "admin"}]',
        '[{"role": 3, "content": "x"}]',
        '[{"role": "user", "content": "x"}, 3]',
        '{"role": "admin", "content": "x"}',
        '{"from": "bot", "value": "hello"}',
        '[{"from": "USD", "to": "EUR", "value": 100}]',
        '[{"role": "user", "content": "x"}] Who speaks?',
        '[{"role": "user", "content": "x"}',
    ],
)
def test_a_text_that_looks_like_json_stays_text(key: str, text: str) -> None:
    for keys in (Keys(), Keys(messages="prompt")):
        example = to_example({"prompt": "q", "completion": "c", key: text}, keys, "row")
        assert getattr(example, key) == text and not example.turns


def test_chats_of_sharegpt_are_read(tmp_path: Path) -> None:
    chat = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": "tool", "value": "t"},
        {"from": "gpt", "value": "c", "weight": 1},
    ]
    example = to_example({"conversations": chat}, Keys(messages="conversations"), "row")
    roles = [(turn["role"], turn["content"]) for turn in example.prompt]  # type: ignore[index]
    assert roles == [("system", "s"), ("user", "a"), ("assistant", "b"), ("tool", "t")]
    assert example.completion == "c"


FALSE = [False, 0, 0.0, "0", "false", " False "]
TRUE = [True, 1, 1.0, "1", "true", "True", None, ""]
LABELLED = [
    USER,
    said("assistant", "a"),
    USER,
    said("assistant", "b"),
    USER,
    said("assistant", "c"),
]


@pytest.mark.parametrize("flag", LEARNED)
def test_a_turn_that_the_data_mark_is_read_and_not_learned(flag: str) -> None:
    """Which turns are learned, for each way of marking three: those that are marked or not said of,
    in every spelling; the last mode learns the last of them."""
    for number, marks in enumerate(itertools.product((True, False), repeat=3)):
        chat = [dict(turn) for turn in LABELLED]
        for turn, mark in zip(chat[1::2], marks, strict=True):
            values = TRUE if mark else FALSE
            turn[flag] = values[number % len(values)]
        expected = [turn["content"] for turn, m in zip(chat[1::2], marks, strict=True) if m]
        for row in ({"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}):
            if not expected:
                with pytest.raises(UserError, match="row: no message of the assistant in `"):
                    to_example(row, Keys(), "row")
                continue
            for turns in ("last", "all"):
                got = to_example(row, Keys(turns=turns), "row")
                learned = [turn["content"] for turn in got.turns if is_learned(turn)]
                assert learned == (expected if turns == "all" else expected[-1:])
                assert is_learned(got.turns[0]) and is_learned(got.turns[-1])
                whole = [turn["content"] for turn in (*got.prompt, *got.turns)]  # type: ignore[misc]
                said_before = [turn["content"] for turn in LABELLED]
                assert whole == said_before[: said_before.index(expected[-1]) + 1]
                assert not any(flag in turn for turn in got.turns if is_learned(turn))


@pytest.mark.parametrize("flag", LEARNED)
@pytest.mark.parametrize("value", [0.5, 2, -1, "no", "half", [0], {"a": 1}, float("inf")])
def test_a_mark_that_is_neither_is_refused(flag: str, value: Any) -> None:
    row = {"messages": [USER, {**ANSWER, flag: value}]}
    with pytest.raises(UserError, match=rf"row: `messages`\[1\]: `{flag}` is .*false or 0"):
        to_example(row, Keys(), "row")


@pytest.mark.parametrize("turns", ["last", "all"])
@pytest.mark.parametrize("row", [{"prompt": "q"}, {"prompt": [USER]}])
def test_a_completion_that_is_not_learned_is_refused(turns: Any, row: Row) -> None:
    row = {**row, "completion": [{**ANSWER, "weight": 0}]}
    with pytest.raises(UserError, match="in `completion` is to be learned"):
        to_example(row, Keys(turns=turns), "row")


def test_a_column_has_the_system_message_of_a_prompt_without_one() -> None:
    rules = said("system", "rules")
    for chat in ({"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": "yo"}):
        example = to_example({**chat, "system": "rules"}, Keys(), "row")
        assert example.prompt == (rules, USER) and example.system is None
        assert example.columns["system"] == "rules"
        for empty in (None, "", " "):
            assert to_example({**chat, "system": empty}, Keys(), "row").prompt == (USER,)
    for role in ("system", "developer"):  # the chat's own is the system message
        own = [said(role, "own"), USER, ANSWER]
        example = to_example({"messages": own, "system": "rules"}, Keys(), "row")
        assert example.prompt == (*own[:2],)
    text = to_example({"prompt": "q", "system": "rules"}, Keys(), "row")
    assert (text.prompt, text.system) == ("q", "rules")
    assert to_example({"prompt": "q", "system": 3}, Keys(system=None), "row").system is None
    with pytest.raises(UserError, match="`system` must be text, it is a number .*system_key=null"):
        to_example({"prompt": "q", "system": 3}, Keys(), "row")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_column_has_the_arguments_of_the_chat_template(as_text: bool) -> None:
    given: Any = {"enable_thinking": False, "tags": ["a"], "absent": None}
    given = json.dumps(given) if as_text else given
    example = to_example({"prompt": "q", "chat_template_kwargs": given}, Keys(), "row")
    assert example.inputs is not None
    assert example.inputs.arguments == {"enable_thinking": False, "tags": ["a"]}
    for empty in (None, "", "null", {}, "{}"):
        row = {"prompt": "q", "chat_template_kwargs": empty}
        assert to_example(row, Keys(), "row").inputs is None
    for wrong, words in (
        ([1], "must be an object of names and values, or its JSON text; it is a list"),
        ("on", "it is text"),
        ({"messages": []}, "'messages' is what each rendering of a chat sets by itself"),
        ({"tools": []}, "'tools' is what"),
        ({"add_generation_prompt": True}, "'add_generation_prompt' is what"),
        ({"chat_template": "x"}, "'chat_template' is an option of transformers'"),
    ):
        with pytest.raises(UserError, match=f"row: `chat_template_kwargs`.*{words}"):
            to_example({"prompt": "q", "chat_template_kwargs": wrong}, Keys(), "row")


@pytest.mark.parametrize("value", [42, -3, 2.5, 42.0, 2**70])
def test_code_of_users_gets_an_answer_as_it_is(value: Any) -> None:
    example = to_example({"prompt": "q", "answer": value}, Keys(), "row")
    assert type(example.answer_value) is type(value) and example.answer_value == value
    assert example.answer == str(int(value) if value % 1 == 0 else value)
    text = to_example({"prompt": "q", "answer": str(value)}, Keys(), "row")
    assert (text.answer, text.answer_value) == (str(value), None)


def test_an_object_over_several_lines_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"prompt": "a", "answer": 3}, indent=2))
    assert examples(open_source(str(tmp_path / "x.json"))) == [
        Example("a", answer="3", answer_value=3)
    ]


# Names with dots


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"answer": "48+24=72", "index": 0},
}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "list"])
def test_rows_of_verl_train_with_the_two_keys(tmp_path: Path, form: str) -> None:
    keys = Keys(answer="reward_model.ground_truth", completion="extra_info.answer")
    if form == "list":
        source = source_of([VERL], keys)
    else:
        write = {"jsonl": lambda f, rows: jsonl(f / "x.jsonl", rows), "parquet": to_parquet}[form]
        source = open_source(write(tmp_path, [VERL]), split="eval", keys=keys)
    example = source[0]
    assert (example.prompt, example.completion, example.answer) == ((USER,), "48+24=72", "72")
    assert example.columns == {name: VERL[name] for name in VERL if name != "prompt"}
    for write_as in (lambda f, rows: jsonl(f / "y.jsonl", rows), to_parquet):
        with pytest.raises(UserError) as error:
            spec = write_as(tmp_path, [VERL])
            open_source(spec, split="eval", keys=Keys(answer="reward_model.ground_thruth"))
        assert "(did you mean reward_model.ground_truth?) (data.answer_key)" in str(error.value)


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"a.b": "literal", "a": {"b": "nested"}}, "literal"),
        ({"a.b": None, "a": {"b": "nested"}}, None),
        ({"a": {"b": "nested"}}, "nested"),
        ({"a": '{"b": "as JSON"}'}, "as JSON"),
        ({"a": {"c": 1}}, None),
        ({"a": None}, None),
        ({"a": "text"}, None),
        ({"a": [{"b": "no index"}]}, None),
        ({}, None),
    ],
)
def test_where_a_name_with_a_dot_leads(row: Row, answer: str | None) -> None:
    assert to_example({"prompt": "x", **row}, Keys(answer="a.b"), "row").answer == answer


def test_names_lead_through_lists_and_names_with_dots() -> None:
    row = {"prompt": "x", "answers": {"text": ["one", "two"]}, "v1.0": {"gold": 3}}
    for name, answer in (("answers.text.1", "two"), ("answers.text.7", None), ("v1.0.gold", "3")):
        assert to_example(row, Keys(answer=name), "row").answer == answer


# JSON arrays and CSV


def test_a_csv_file_is_text_and_what_is_empty_is_missing(tmp_path: Path) -> None:
    long = "x" * 200_000
    text = f'\ufeffprompt,answer,level\r\n"a, ""b""\nä",007,\r\n{long},,3\r\n\r\n'
    (tmp_path / "x.csv").write_text(text, newline="")
    first, second = examples(open_source(str(tmp_path / "x.csv")))
    assert first == Example('a, "b"\nä', answer="007", columns={"level": None})
    assert second == Example(long, columns={"level": "3"})
    chat = json.dumps([USER, ANSWER])
    frame = pandas.DataFrame({"messages": [chat], "more": ['{"gold": 3}']})
    frame.to_csv(tmp_path / "y.csv", index=False)
    (example,) = examples(open_source(str(tmp_path / "y.csv"), keys=Keys(answer="more.gold")))
    assert (example.prompt, example.completion, example.answer) == ((USER,), "yo", "3")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.csv", b"", "x.csv: no rows"),
        ("x.csv", b"prompt,answer\n", "x.csv: no rows"),
        ("x.csv", b"prompt,answer\na,1\nb\n", "x.csv:3: 1 values for the 2 fields"),
        ("x.csv", b"prompt,answer\na,1,2\n", "x.csv:2: 3 values for the 2 fields"),
        ("x.csv", b"prompt,prompt\na,1\n", "x.csv:1: two fields have one name"),
        ("x.csv", b'prompt\n"a\n', "x.csv:2: not CSV"),
        ("x.csv", b"prompt\n\xe4\n", "x.csv: not UTF-8"),
        ("x.csv", b'prompt,answer\n"a\nb",1\n,2\n', "x.csv:4: `prompt` is null"),
        ("x.csv", b"question;answer\na;1\n", "the row has `question;answer`"),
        ("x.csv", b"prompt;answer\na, b;1\n", "the separator must be a comma, not ';'"),
        ("x.csv", b"prompt\tanswer\na\t1\n", "the separator must be a comma, not '\\t'"),
        ("x.json", b"[]", "x.json: no rows"),
        ("x.json", b"", "x.json: no rows"),
        ("x.json", b'[{"prompt": "a"},\n 3]', "x.json: row 1: a JSON object is needed"),
        ("x.json", b'[{"prompt": "a"},\n {"prompt": ""}]', "x.json: row 1: `prompt` is empty"),
        ("x.json", b'[{"prompt": "a"},\n {"prompt" "b"}]', "x.json:2: not JSON"),
        ("x.json", b'[{"prompt": "\xe4"}]', "x.json: cannot be read: "),
        ("x.json", b"[" * 100_000, "x.json: cannot be read: "),
        ("x.json", b'{"prompt": ["a", "b"],\n "answer": ["1", "2"]}', "write a list of rows: [{"),
        ("x.json", b'{"prompt": ["a", "b"], "answer": ["1", "2"]}', "write a list of rows: [{"),
        ("x.json", b'{"data":\n [{"prompt": "a"}]}', "x.json: row 0: neither `prompt` nor"),
        ("x.json", b'{"data": [{"prompt": "a"}]}', "x.json:1: neither `prompt` nor `messages`"),
    ],
)
def test_bad_json_and_csv_files(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        open_source(str(tmp_path / name), split="eval")
    assert words in str(error.value)
    assert str(error.value).startswith(f"data.eval: {tmp_path / name}")
    assert len(str(error.value)) < 400


def test_files_of_all_kinds_have_a_digest_of_their_bytes(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    frame = pandas.DataFrame(rows)
    frame.to_csv(tmp_path / "x.csv", index=False)
    sources = [open_source(array(tmp_path, rows)), open_source(str(tmp_path / "x.csv"))]
    sources += [source_of(rows), source_of(frame), source_of(datasets.Dataset.from_list(rows))]
    before = [source.digest() for source in sources]
    frame.loc[1, "prompt"] = rows[1]["prompt"] = "c"
    frame.to_csv(tmp_path / "x.csv", index=False)
    after = [open_source(array(tmp_path, rows)), open_source(str(tmp_path / "x.csv"))]
    after += [source_of(rows), source_of(frame), source_of(datasets.Dataset.from_list(rows))]
    assert all(one.digest() != old for one, old in zip(after, before, strict=True))
    assert [one.digest() for one in after] == [one.digest() for one in after]


# Objects of a Python program


def test_a_dataset_s_own_order_and_rows_are_used() -> None:
    rows = [{"prompt": f"p{number}", "answer": number} for number in range(2000)]
    dataset = datasets.Dataset.from_list(rows).shuffle(seed=1).select(range(1500))
    source = source_of(dataset)
    assert [example.prompt for example in examples(source)] == dataset["prompt"][:]
    assert source.where(7) == "Dataset: row 7"
    with pytest.raises(UserError, match="data.eval: Dataset: row 1400: `prompt` is empty"):
        source_of(
            dataset.map(lambda row, i: {"prompt": row["prompt"] * (i != 1400)}, with_indices=True),
            label="data.eval",
        )


def test_a_dataset_is_what_it_yields() -> None:
    """Not the columns under a transform, nor those that its format leaves out."""
    plain = datasets.Dataset.from_list([{"prompt": "1", "answer": "2"}])
    for dataset in (
        plain.with_transform(lambda batch: {"prompt": [f"{x}+1" for x in batch["prompt"]]}),
        plain.with_format(columns=["prompt"]),
        plain.with_format("numpy", columns=["prompt"]),
        plain.with_format("numpy", columns=["prompt"], output_all_columns=True),
    ):
        (example,), (row,) = examples(source_of(dataset)), dataset
        assert (example.prompt, example.answer) == (row["prompt"], row.get("answer"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "list: no rows"),
        ([3], "list: row 0: a JSON object is needed, this is a number"),
        (pandas.DataFrame([["a"]]), "DataFrame: row 0: fields are named by text, this row has [0]"),
        (pandas.Series(["a"]), "Series: row 0: a JSON object is needed, this is text"),
        ("train.jsonl", "is needed, this is text"),
        (3, "is needed, this is a number"),
        (iter([]), "list_iterator: no rows"),
        (
            {"prompt": ["a"], "answer": ["b"]},
            "make rows of its columns, as datasets.Dataset.from_d",
        ),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list([])}), "take one of `train`"),
        (datasets.Dataset.from_list([{"q": "x"}]), "Dataset: neither `prompt` nor `messages`"),
        ([{"prompt": "a"}, {"promt": "b"}], "list: row 1: neither `prompt` nor `messages`"),
        (pandas.DataFrame([["a", "b"]], columns=["prompt"] * 2), "two columns have one name: `p"),
        (pa.table([["a"], ["b"]], names=["prompt"] * 2), "two columns have one name: `prompt`"),
    ],
)
def test_objects_that_are_no_rows(rows: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        source_of(rows)
    assert str(error.value).startswith("data.train: ") and words in str(error.value)
