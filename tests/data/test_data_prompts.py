"""Prompts that are cut, few-shot rows before them, held-out sets by name, and their config keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_shapes import NO_THOUGHTS, OPENS, THINKS, TOOL, tokenizer_of
from tiny_tokenizer import CHATML, tiny_tokenizer
from words import Words

from jaxrl.config import keys as config_keys
from jaxrl.config.key_help import describe_keys
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.data.example import Example
from jaxrl.data.prompt_encoder import (
    PLACES,
    PromptEncoder,
    TeacherPrompt,
    few_shot,
    hidden_columns,
    with_feedback,
)
from jaxrl.data.rows import Keys
from jaxrl.data.source import Source, open_source
from jaxrl.data.stream import PromptStream, eval_sets
from jaxrl.data.thoughts import opening_of
from jaxrl.errors import UserError
from jaxrl.types import Completion, Rollout, TemplateInputs

CHAT = tiny_tokenizer()
PLAIN = tiny_tokenizer(template=None, eos="<|endoftext|>")
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
START = "<|im_start|>assistant\n"
EMPTY_CHAT = len(CHAT(TURN.format("user", "") + START)["input_ids"])


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def shown(tokenizer: Any, encoder: PromptEncoder, example: Example) -> str:
    prompt = encoder.encode(example, 0)
    assert prompt is not None and len(prompt.tokens) <= encoder.max_prompt_tokens
    return tokenizer.decode(prompt.tokens)


# Cut


def test_a_text_prompt_keeps_its_end_and_its_bos():
    with_bos = tiny_tokenizer(template=None, bos=True)
    for tokenizer, before, kept in ((PLAIN, "", "456789"), (with_bos, "<|endoftext|>", "56789")):
        encoder = PromptEncoder(tokenizer, 6, 8, long_prompts="cut")
        assert shown(tokenizer, encoder, Example("0123456789")) == before + kept
        assert encoder.encode(Example("0123456789"), 0).text == kept
        assert shown(tokenizer, encoder, Example("89")) == before + "89"
        assert shown(tokenizer, encoder, Example("x" + kept)) == before + kept


def test_cut_at_characters_not_at_their_bytes():
    # Each ä is two tokens: of five, two fit into five.
    encoder = PromptEncoder(PLAIN, 5, 8, long_prompts="cut")
    assert shown(PLAIN, encoder, Example("äääää")) == "ää"


def test_the_least_is_cut_whatever_the_merges():
    merging = tiny_tokenizer(template=None, merges=(("a", "b"), ("ab", "ab")))
    text = "abab" * 3 + "xab" * 5 + "ba" * 4
    for limit in range(1, 24):
        kept = PromptEncoder(merging, limit, 8, long_prompts="cut").encode(Example(text), 0).text
        assert text.endswith(kept)
        longer = text[len(text) - len(kept) - 1 :]
        assert len(merging(kept)["input_ids"]) <= limit
        assert kept == text or len(merging(longer)["input_ids"]) > limit


def test_a_chat_loses_the_beginning_of_its_longest_user_message():
    turns = (user("short"), {"role": "assistant", "content": "A" * 50}, user("0123456789"))
    example = Example((*turns, user("end")), completion="done")
    whole = "".join(TURN.format(t["role"], t["content"]) for t in example.prompt) + START
    limit = len(CHAT(whole)["input_ids"]) - 4
    encoder = PromptEncoder(CHAT, limit, 8, long_prompts="cut")
    assert shown(CHAT, encoder, example) == whole.replace("0123456789", "456789")
    prompt = encoder.encode(example, 3)
    assert prompt.columns["messages"][2] == user("456789")
    assert (prompt.text, CHAT.decode(prompt.completion)) == ("end", "done<|im_end|>")
    assert PromptEncoder(CHAT, limit, 8).encode(example, 0) is None
    assert encoder.encode(example, 0, may_cut=False) is None


def test_system_prompt_and_few_shot_rows_stay_whole():
    shots = (Example("1+1=", "2"),)
    encoder = PromptEncoder(CHAT, 100, 8, system_prompt="S", few_shot=shots, long_prompts="cut")
    before = TURN.format("system", "S") + TURN.format("user", "1+1=") + TURN.format("assistant", 2)
    room = 100 - len(CHAT(before)["input_ids"]) - EMPTY_CHAT
    text = "".join(chr(97 + i % 26) for i in range(200))
    assert shown(CHAT, encoder, Example(text)) == (
        before + TURN.format("user", text[-room:]) + START
    )
    plain = PromptEncoder(PLAIN, 20, 8, few_shot=shots, long_prompts="cut")
    assert shown(PLAIN, plain, Example(text)) == "1+1=2\n\n" + text[-13:]


def test_what_no_cut_can_mend_is_left_out_and_both_are_counted(tmp_path):
    rows = [
        {"prompt": "fits"},
        {"prompt": "x" * 99},
        {"messages": [{"role": "system", "content": "S" * 99}, user("a")]},
        {"messages": [{"role": "tool", "content": "T" * 99}]},
        {"messages": [user(" " * 99)]},
        {"messages": [user("y" * 30 + "\n"), user("z")]},
    ]
    source = open_source(write(tmp_path / "x.jsonl", *rows))
    counts = {}
    for way in ("drop", "cut"):
        encoder = PromptEncoder(CHAT, EMPTY_CHAT + 20, 8, long_prompts=way)
        s = PromptStream(source, encoder, 1, 0, shuffle=False)
        counts[way] = (s.epoch_prompts, s.dropped, s.cut)
        assert len({s.batch(i)[0].tokens for i in range(s.epoch_prompts)}) == s.epoch_prompts
    assert counts == {"drop": (1, 5, 0), "cut": (3, 3, 2)}


def test_prompts_of_tasks_are_never_cut(tmp_path):
    encoder = PromptEncoder(PLAIN, 3, 8, long_prompts="cut")
    s = PromptStream(Source([Words("aaaaaa", "b")]), encoder, 2, 0, shuffle=False)
    assert [prompt.text for prompt in s.batch(0)] == ["b", "b"]
    assert (s.dropped, s.cut) == (0, 0)
    file = open_source(write(tmp_path / "x.jsonl", {"prompt": "cccccc"}), split="eval").parts[0]
    (held_out,) = eval_sets(["x"], lambda *_: Source([Words("aaaa", "b"), file]), encoder, 9)
    assert [prompt.text for prompt in held_out.prompts] == ["ccc", "b"]
    assert (held_out.dropped, held_out.cut) == (1, 1)


# Few-shot


def shots_of(path: Path, *rows: object, take: int | None = None) -> tuple[Example, ...]:
    return few_shot(open_source(write(path, *rows)), len(rows) if take is None else take)


def test_few_shot_rows_are_turns_after_the_system_message(tmp_path):
    own_system = {"role": "system", "content": "left out"}
    shots = shots_of(
        tmp_path / "s.jsonl",
        {"prompt": "q1", "completion": "a1"},
        {"messages": [own_system, user("q2"), {"role": "assistant", "content": "a2"}]},
        {"prompt": "q3", "completion": "a3"},
        take=2,
    )
    encoder = PromptEncoder(CHAT, 400, 8, system_prompt="P", few_shot=shots)
    pairs = (("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"))
    before = "".join(TURN.format(*pair) for pair in pairs)
    end = TURN.format("user", "q") + START
    assert shown(CHAT, encoder, Example("q")) == TURN.format("system", "P") + before + end
    own = Example(({"role": "system", "content": "own"}, user("q")), completion="a")
    assert shown(CHAT, encoder, own) == TURN.format("system", "own") + before + end
    prompt = encoder.encode(own, 0)
    assert prompt.text == "q" and len(prompt.columns["messages"]) == 6
    assert CHAT.decode(prompt.completion) == "a<|im_end|>"


def test_few_shot_text_is_prompt_completion_blank_line(tmp_path):
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "1+2=", "completion": "3"}]
    shots = shots_of(tmp_path / "s.jsonl", *rows)
    example = Example("5+1=", completion="6")
    for tokenizer, more in ((PLAIN, {}), (CHAT, {"chat": "raw"})):
        encoder = PromptEncoder(tokenizer, 100, 8, few_shot=shots, **more)
        assert shown(tokenizer, encoder, example) == "2+2=4\n\n1+2=3\n\n5+1="
        prompt = encoder.encode(example, 0)
        assert prompt.text == "5+1=" and prompt.completion[0] == PLAIN("6")["input_ids"][0]
    document = Example("5+1=", document=True)
    encoder = PromptEncoder(CHAT, 100, 8, few_shot=shots)
    assert shown(CHAT, encoder, document) == "2+2=4\n\n1+2=3\n\n5+1="


CALL = {"type": "function", "function": {"name": "w", "arguments": {}}}


@pytest.mark.parametrize(("tokenizer", "chat"), [(CHAT, "raw"), (PLAIN, "auto")])
def test_calls_before_a_text_are_refused_and_thoughts_are_a_line(tmp_path, tokenizer, chat):
    """Of a row that is learned, and of a few-shot row, which every prompt has."""

    def row(**more: Any) -> dict[str, Any]:
        return {"prompt": "q", "completion": {"role": "assistant", "content": "4", **more}}

    def encoded(**more: Any) -> tuple[PromptEncoder, str]:
        encoder = PromptEncoder(tokenizer, 100, 8, chat=chat, **more)
        return encoder, shown(tokenizer, encoder, learned)

    (learned,) = shots_of(tmp_path / "s.jsonl", row(reasoning_content="two"))
    (called,) = shots_of(tmp_path / "s.jsonl", row(tool_calls=[CALL]))
    encoder, text = encoded()
    assert text == "q" and "`reasoning_content`" in encoder.noted["thoughts of texts"]
    encoder, text = encoded(few_shot=(replace(learned, prompt="r"),), completions=False)
    assert text == "r4\n\nq" and list(encoder.noted) == ["thoughts of texts"]
    with pytest.raises(UserError, match=r"^the completion has `tool_calls`, and a text"):
        PromptEncoder(tokenizer, 100, 8, chat=chat).encode(called, 0)
    with pytest.raises(UserError, match=r"^data\.few_shot: the completion has `tool_calls`"):
        encoded(few_shot=(called,))
    assert not encoded(completions=False)[0].noted


def test_a_text_that_the_tokenizer_does_not_take_is_the_user_s_error():
    encoder = PromptEncoder(CHAT, 100, 8, system_prompt="half \ud83d")
    with pytest.raises(UserError, match=r"^the tokenizer cannot split .*half \\ud83d"):
        encoder.encode(Example("q"), 0)


LONGER = CHAT.chat_template.replace("m['content']", "m['content'] + ('' if loop.last else '!!!!')")


@pytest.mark.parametrize("way", ["drop", "cut"])
def test_a_prompt_is_measured_as_it_is_learned(tmp_path, way):
    """A template that writes more once the chat goes on: no row takes its neighbour's place."""
    answer = {"role": "assistant", "content": "a"}
    path = write(
        tmp_path / "x.jsonl", *({"messages": [user(text), answer]} for text in ("a", "bbb", "c"))
    )
    tokenizer = tiny_tokenizer(LONGER)
    limit = len(tokenizer(TURN.format("user", "x!!!!") + START)["input_ids"])
    encoder = PromptEncoder(tokenizer, limit, 8, long_prompts=way)
    stream = PromptStream(open_source(path), encoder, 3, 0, shuffle=False)
    assert (stream.dropped, stream.cut) == ((1, 0) if way == "drop" else (0, 1))
    texts = [prompt.text for prompt in stream.batch(0)]
    assert texts == (["a", "c", "a"] if way == "drop" else ["a", "b", "c"])
    much = tiny_tokenizer(LONGER.replace("'!!!!'", "'!' * 99"))
    encoder = PromptEncoder(much, limit + 40, 8)
    far = PromptStream(open_source(path), encoder, 3, 0, shuffle=False)
    assert "another row is learned in its place" in far.noted["longer prompt"]
    unread = PromptEncoder(tokenizer, limit, 8, completions=False)
    assert not PromptStream(open_source(path), unread, 3, 0).dropped


def test_columns_in_whose_place_the_run_has_its_own_are_known(tmp_path):
    own = {"messages": [user("x")], "tools": [{"name": "f"}]}
    keys = Keys(messages=None)
    for prompt, tokenizer, hidden in (
        ("q", CHAT, {"messages"}),
        ([user("q")], CHAT, {"messages"}),
        ("q", PLAIN, set()),
    ):
        path = write(tmp_path / "s.jsonl", {"prompt": prompt, "completion": "a", **own})
        example = open_source(path, keys=keys)[0]
        made = PromptEncoder(tokenizer, 100, 8).encode(example, 0)
        assert hidden_columns([made], own) == hidden and not hidden_columns([made], ())
        kept = own.keys() - hidden
        assert {name: made.columns[name] for name in kept} == {name: own[name] for name in kept}


def test_few_shot_from_a_task_and_before_held_out_prompts(tmp_path):
    sums = few_shot(open_source("arithmetic:digits=1,terms=2"), 2)
    encoder = PromptEncoder(PLAIN, 100, 8, few_shot=sums)
    source = open_source(write(tmp_path / "x.jsonl", {"prompt": "q"}))
    (held_out,) = eval_sets(["x"], lambda *_: source, encoder, 1)
    before = "".join(f"{s.prompt}{s.completion}\n\n" for s in sums)
    assert PLAIN.decode(held_out.prompts[0].tokens) == before + "q"


def test_a_row_is_none_of_its_own_few_shot_rows(tmp_path):
    """Whatever spaces, form of an accent, kind of prompt or system message it is written with."""
    path, answer = tmp_path / "s.jsonl", {"role": "assistant", "content": "no"}
    shots = shots_of(path, {"prompt": "Un café ?", "completion": "no"}, *[
        {"messages": [user(text), answer]} for text in ("q", "q q")
    ])  # fmt: skip
    system = {"role": "system", "content": "S"}
    chat = PromptEncoder(CHAT, 400, 8, few_shot=shots)
    for prompt, others in (
        ("Un café ?", "q|q q"),
        (" Un cafe\u0301 ?\n", "q|q q"),
        ((system, user("Un café ?")), "q|q q"),
        ("q", "Un café ?|q q"),
        ("Q", "Un café ?|q|q q"),
        ((user("q"), answer, user("q")), "Un café ?|q|q q"),
    ):
        turns = chat.prompt_of(Example(prompt))
        own = 1 if isinstance(prompt, str) else len(prompt)
        before = [turn["content"] for turn in turns if turn["role"] == "user"]
        assert before[: others.count("|") + 1] == others.split("|"), prompt
        assert len(turns) == 2 * (others.count("|") + 1) + own
    plain = PromptEncoder(PLAIN, 99, 8, few_shot=shots[:1])
    assert plain.prompt_of(Example("Un café ?")) == "Un café ?"
    assert plain.prompt_of(Example("Un thé ?")) == "Un café ?no\n\nUn thé ?"


def test_few_shot_refusals(tmp_path):
    path = tmp_path / "s.jsonl"
    with pytest.raises(UserError, match=r"^data\.few_shot: .*s\.jsonl:2: .* need a completion"):
        shots_of(path, {"prompt": "q", "completion": "a"}, {"prompt": "q"})
    with pytest.raises(UserError, match=r"s\.jsonl:1: .* need a completion"):
        shots_of(path, {"messages": [user("q")]})
    with pytest.raises(UserError, match=r"has 1 rows, data\.few_shot_rows asks for 2"):
        shots_of(path, {"prompt": "q", "completion": "a"}, take=2)
    shots = shots_of(path, {"prompt": "q" * 30, "completion": "a" * 8})
    # 30 + 8 characters and the two of the blank line: 40 tokens.
    with pytest.raises(UserError, match="1 rows take 40 tokens, .*max_prompt_tokens=40.*lower"):
        PromptEncoder(PLAIN, 40, 8, few_shot=shots)
    PromptEncoder(PLAIN, 41, 8, few_shot=shots)
    turns = TURN.format("user", "q" * 30) + TURN.format("assistant", "a" * 8)
    taken = len(CHAT(turns)["input_ids"]) + EMPTY_CHAT
    with pytest.raises(UserError, match=f"1 rows take {taken} tokens"):
        PromptEncoder(CHAT, taken, 8, few_shot=shots)
    chats = shots_of(path, {"messages": [user("q"), {"role": "assistant", "content": "a"}]})
    with pytest.raises(UserError, match="chats, which cannot precede a text prompt"):
        PromptEncoder(PLAIN, 99, 8, few_shot=chats)
    mixed = PromptEncoder(CHAT, 99, 8, few_shot=chats)
    with pytest.raises(UserError, match=r"arithmetic, row \d+: data\.few_shot has chats"):
        PromptStream(open_source("arithmetic"), mixed, 1, 0).batch(0)


# Completions that are missing


def test_missing_completions_name_the_fields_there_are(tmp_path):
    source = open_source(write(tmp_path / "x.jsonl", {"prompt": "q", "solution": "a"}))
    with pytest.raises(UserError, match=r"1 of 1 rows .* among `prompt`, `solution` \(data\.compl"):
        PromptStream(source, PromptEncoder(PLAIN, 9, 9), 1, 0).check_completions()


# Held-out sets


def test_named_sets_number_their_prompts_on(tmp_path):
    files = {
        name: write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(size)))
        for name, size in (("a", 3), ("b", 2), ("c", 4))
    }
    asked = []

    def opened(sources: Any, label: str) -> Source:
        asked.append(label)
        return open_source(sources, 0, "eval", Keys(), label)

    encoder = PromptEncoder(PLAIN, 99, 8)
    spec = {"first": [files["a"]], "both": [files["b"], files["c"]]}
    first, both = eval_sets(spec, opened, encoder, 5)
    assert [(p.id, p.text) for p in first.prompts] == [(0, "a0"), (1, "a1"), (2, "a2")]
    texts = ["b0", "c0", "b1", "c1", "c2"]
    assert [(p.id, p.text) for p in both.prompts] == list(zip(range(3, 8), texts, strict=True))
    assert (first.name, both.name) == ("first", "both")
    assert asked == ["data.eval.first", "data.eval.both"]
    (alone,) = eval_sets([files["a"]], opened, encoder, 5)
    assert (alone.name, alone.prompts) == ("", first.prompts)
    assert asked[-1] == "data.eval"
    with pytest.raises(UserError, match=r"^data\.eval\.x: .*none\.jsonl: No such file"):
        eval_sets({"x": [f"{tmp_path}/none.jsonl"]}, opened, encoder, 5)


# Config keys


def load(tmp_path: Path, data: str, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text(f"student: {{model: a}}\nteacher: {{model: b}}\ndata: {data}\n")
    return Config.load(path, list(overrides)).data


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        Config.load("builtin:quickstart", list(overrides))
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "overrides", "sets"),
    [
        ("{train: t, eval: x.jsonl}", (), ("x.jsonl",)),
        ("{train: t, eval: [x.jsonl, y.jsonl]}", (), ("x.jsonl", "y.jsonl")),
        ("{train: t, eval: {a: x, b: [y, z]}}", (), {"a": ("x",), "b": ("y", "z")}),
        ("{train: t}", ("data.eval={a: x, b-1.2_c: y}",), {"a": ("x",), "b-1.2_c": ("y",)}),
        ("{train: t, eval: {a: x}}", ("data.eval={b: y}",), {"b": ("y",)}),
        ("{train: t, eval: {a: x}}", ("data.eval.b=y",), {"a": ("x",), "b": ("y",)}),
        ("{train: t}", ("data.eval.a=[x, y]",), {"a": ("x", "y")}),
        ("{train: t, eval: {a: x}}", ("data.eval=y",), ("y",)),
        ("{train: t, eval: {a: x}}", ("data.eval=null",), None),
    ],
)
def test_held_out_sets_in_files_and_overrides(tmp_path, data, overrides, sets):
    made = load(tmp_path, data, *overrides)
    assert made.eval == sets
    if isinstance(sets, dict):
        assert list(made.eval) == list(sets)
    again = tmp_path / "again.yaml"
    again.write_text(Config.load(tmp_path / "run.yaml", list(overrides)).dump())
    assert Config.load(again).data == made


def test_bad_held_out_sets_are_refused_in_one_line():
    for override, words in (
        ("data.eval={}", "data.eval: it should not be empty"),
        ("data.eval={a b: x}", "'a b' may have letters, digits"),
        ("data.eval={a/b: x}", "'a/b'"),
        (
            "data.eval={a: null}",
            "data.eval.a: input should be a string or a list of strings, got None",
        ),
        ("data.eval={a: []}", "data.eval.a: it should not be empty, got []"),
        ("data.eval={a: {b: x}}", "data.eval.a"),
        ("data.eval={1: x}", "keys are plain words"),
        ("data.eval={a: x, a: y}", "'a' is given twice"),
        ("data.eval=[]", "data.eval: it should not be empty"),
        ("data.eval=[[x]]", "data.eval"),
        ("data.train={a: x}", "one by one"),
        ("data.eval.a=x", "data.eval is a value, not a section"),
    ):
        assert words in refused(override), override


def test_a_mapping_where_none_belongs_names_the_unknown_keys(tmp_path):
    with pytest.raises(UserError, match=r"unknown key data\.train\.a"):
        load(tmp_path, "{train: {a: x}}")
    known = [
        *("teachers", "data.eval", "data.chat_template_arguments", "environment.arguments"),
        *("mesh", "algorithm", "algorithm.arguments"),
    ]
    assert list(config_keys.mappings(Config)) == known
    text = describe_keys("all", 100)
    assert "data.eval  list of str or mapping of NAME to list of str or null" in text
    assert "data.weights  list of float or null" in text


def test_weights_are_as_many_as_the_sources():
    two = "data.train=[arithmetic, x.jsonl]"
    assert Config.load("builtin:quickstart", [two, "data.weights=[1, 0.5]"]).data.weights == (
        1.0,
        0.5,
    )
    for override, words in (
        ("data.weights=[1]", "weights has 1 numbers for the 2 sources of train"),
        ("data.weights=[1, 2, 3]", "weights has 3 numbers for the 2 sources"),
        ("data.weights=[1, 0]", "greater than 0, got 0"),
        ("data.weights=[1, -1]", "greater than 0, got -1"),
        ("data.weights=[1, x]", "got 'x'"),
        ("data.weights=[1, .inf]", "finite"),
    ):
        assert words in refused(two, override)


# The teacher's prompts


def taught(encoder: PromptEncoder, tokenizer: Any, example: Example) -> str:
    prompt = encoder.encode(example, 0)
    assert prompt is not None and prompt.teacher_tokens is not None
    return tokenizer.decode(prompt.teacher_tokens)


def test_a_template_takes_the_place_of_the_rows_text_and_nothing_else():
    shots = (Example("q", "a"),)
    row = Example("2+2=", "4", "four", {"hint": ["even", 1], "n": 3})
    template = "{answer}|{completion}|{hint}|{n}|{{{prompt}}}"
    filled = 'four|4|["even", 1]|3|{2+2=}'
    own = TeacherPrompt(template, 400)
    plain = PromptEncoder(PLAIN, 400, 8, few_shot=shots, teacher=own)
    assert taught(plain, PLAIN, row) == "qa\n\n" + filled
    chat = PromptEncoder(CHAT, 400, 8, system_prompt="S", few_shot=shots, teacher=own)
    before = TURN.format("system", "S") + TURN.format("user", "q") + TURN.format("assistant", "a")
    assert taught(chat, CHAT, row) == before + TURN.format("user", filled) + START
    assert chat.encode(row, 0).text == "2+2="


def test_in_a_chat_it_replaces_the_last_message_or_all_of_them():
    turns = ({"role": "system", "content": "S"}, user("one"), user("two"))
    row = Example(turns, answer="3")
    last = PromptEncoder(CHAT, 400, 8, teacher=TeacherPrompt("{prompt} ({answer})", 400))
    kept = TURN.format("system", "S") + TURN.format("user", "one")
    assert taught(last, CHAT, row) == kept + TURN.format("user", "two (3)") + START
    whole = PromptEncoder(CHAT, 400, 8, teacher=TeacherPrompt("{messages}\n\n{answer}", 400))
    text = "system: S\n\nuser: one\n\nuser: two\n\n3"
    assert taught(whole, CHAT, row) == TURN.format("user", text) + START


TEMPLATES = {"plain": CHATML, "thinks": THINKS, "opens": OPENS, "opens alone": NO_THOUGHTS}
ROWS = [
    Example("2+2="),
    Example("2+2=", "4", inputs=TemplateInputs((TOOL,))),
    Example((user("a"), {"role": "assistant", "content": "b"}, user("2+2=")), "4"),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("row", ROWS)
def test_the_template_of_the_prompt_alone_is_the_students_prompt(template, row):
    """Before samples and before the data's completions."""
    own, tokenizer = TeacherPrompt("{prompt}", 400), tokenizer_of(TEMPLATES[template])
    prompt = PromptEncoder(tokenizer, 400, 8, system_prompt="S", teacher=own).encode(row, 0)
    for read in (prompt, prompt.to_sample):
        assert read.teacher_tokens == read.tokens and read.teacher_generation_tokens is None
    assert bool(prompt.sampling_tokens) is (template == "opens alone" and bool(row.completion))


@pytest.mark.parametrize("teacher", TEMPLATES)
@pytest.mark.parametrize("student", TEMPLATES)
@pytest.mark.parametrize("row", ROWS)
def test_a_teacher_with_another_template_reads_a_completion_after_the_same_opening(
    student, teacher, row
):
    """It samples after its own generation prompt."""
    ours = tokenizer_of(TEMPLATES[student])
    theirs = tiny_tokenizer(TEMPLATES[teacher], (("t", "h"), ("Ċ", "Ċ")), extra=("<think>",))
    own = TeacherPrompt(None, 400, tokenizer=theirs)
    prompt = PromptEncoder(ours, 400, 8, teacher=own).encode(row, 0)
    generation = PromptEncoder(theirs, 400, 8).encode(row, 0).to_sample.tokens
    bare = theirs.decode(generation).removesuffix("<think>\n")
    for read in (prompt, prompt.to_sample):
        expected = bare + opening_of(ours, read.tokens)
        assert theirs.decode(read.teacher_tokens) == expected
        assert read.teacher_tokens == tuple(theirs(expected)["input_ids"])
    sampled = prompt.to_sample
    assert (sampled.teacher_generation_tokens or sampled.teacher_tokens) == generation
    longest = max(len(generation), len(prompt.teacher_tokens), len(sampled.teacher_tokens))
    for most in (longest, longest - 1):
        encoder = PromptEncoder(ours, 400, 8, teacher=replace(own, max_tokens=most))
        assert (encoder.encode(row, 0) is None) is (most < longest)


def test_a_row_that_lacks_a_field_is_named_with_those_that_it_has(tmp_path):
    rows = ({"prompt": "a", "answer": "1", "hint": "h"}, {"prompt": "b", "answer": None})
    source = open_source([write(tmp_path / "x.jsonl", *rows)])
    for template, error in (
        ("{hnit}", r"x\.jsonl:1: teacher\.prompt names \{hnit\} \(did you mean hint\?\)"),
        ("{answer}", r"x\.jsonl:2: teacher\.prompt names \{answer\}; the row has `prompt`"),
        ("{messages}", r"names \{messages\}; the row has `hint`, `answer`, `prompt`"),
    ):
        encoder = PromptEncoder(PLAIN, 99, 8, teacher=TeacherPrompt(template, 99))
        with pytest.raises(UserError, match=error):
            PromptStream(source, encoder, 1, seed=0)


def test_a_template_names_the_fields_that_the_rows_have(tmp_path):
    chat = [user("a"), user("b")]
    keys = Keys("question", "talk", "solution", "truth.value")
    rows = (
        {"question": "2+2?", "solution": "four", "truth": {"value": "4"}},
        {"talk": chat, "solution": "four", "truth": {"value": "4"}},
    )
    text, talk = open_source([write(tmp_path / "x.jsonl", *rows)], keys=keys).parts[0]

    def made(template: str, row: Example) -> object:
        return TeacherPrompt(template, 99, keys=keys).of(row).prompt

    assert made("{question}{solution}{truth.value}{truth}", text) == '2+2?four4{"value": "4"}'
    assert made("{question}", talk) == made("{prompt}", talk) == talk.prompt
    assert made("{talk}", talk) == made("{messages}", talk) == (user("user: a\n\nuser: b"),)
    one = replace(keys, prompt="talk")  # one field has texts and chats
    assert TeacherPrompt("{talk}", 99, keys=one).of(text).prompt == "2+2?"


def test_a_teachers_prompt_that_is_too_long_drops_the_row_also_one_that_is_cut(tmp_path):
    texts = ("ab", "abcd", "abcdefghij")
    source = open_source([write(tmp_path / "x.jsonl", *({"prompt": text} for text in texts))])
    for ways, limit, kept, cut in (("drop", 3, 1, 0), ("cut", 5, 3, 1), ("cut", 4, 1, 0)):
        own = TeacherPrompt("{prompt}!", limit)
        encoder = PromptEncoder(PLAIN, 4, 8, long_prompts=ways, teacher=own)
        stream = PromptStream(source, encoder, 1, seed=0)
        assert (stream.epoch_prompts, stream.dropped, stream.cut) == (kept, 3 - kept, cut)
        for prompt in (p for i in range(kept) for p in stream.batch(i)):
            assert PLAIN.decode(prompt.teacher_tokens) == f"{prompt.text}!"


def test_another_template_makes_other_training_data():
    def fingerprint(teacher: TeacherPrompt | None) -> str:
        encoder = PromptEncoder(PLAIN, 99, 8, teacher=teacher)
        return PromptStream(Source([Words("a", "b")]), encoder, 1, 0).fingerprint

    given = (None, TeacherPrompt("{prompt}", 99), TeacherPrompt("{prompt} ", 99))
    assert len({fingerprint(teacher) for teacher in given}) == 3


def attempts(prompts: list[Any], *texts: str) -> Rollout:
    none = np.zeros(0, np.float32)
    each = [Completion((1,), none, none, "stop", text) for text in texts]
    groups = [each[i :: len(prompts)] for i in range(len(prompts))]
    widths = {"max_prompt_tokens": 99, "max_new_tokens": 9}
    return make_rollout(prompts, groups, policy_version=0, pad_id=0, **widths)


@pytest.mark.parametrize("tokenizer", [PLAIN, CHAT])
def test_feedback_and_attempt_are_those_of_each_completion(tokenizer):
    template = TeacherPrompt("{prompt}?{attempt}!{feedback}.{hint}", 99, PLACES)
    encoder = PromptEncoder(tokenizer, 99, 8, teacher=template)
    prompt = encoder.encode(Example("q", columns={"hint": "{attempt}"}), 0)
    assert prompt.teacher_tokens is None
    rollout = attempts([prompt], "one", "{feedback}\0feedback\0")
    seen, cut = with_feedback(rollout, ["bad", ""], tokenizer, 99)
    texts = ["q?one!bad.{attempt}", "q?{feedback}\0feedback\0!.{attempt}"]
    if tokenizer is CHAT:
        texts = [TURN.format("user", text) + START for text in texts]
    assert [tokenizer.decode(p.teacher_tokens) for p in seen.prompts] == texts
    assert cut == 0 and seen.sequences is rollout.sequences


def test_feedback_that_is_too_long_loses_its_end_and_no_row_is_lost():
    template = TeacherPrompt("{prompt}?{attempt}!{feedback}.", 13, PLACES)
    encoder = PromptEncoder(PLAIN, 99, 8, teacher=template)
    prompts = [encoder.encode(Example("q"), 0)]
    assert encoder.encode(Example("q" * 11), 0) is None  # without both it has 14 tokens
    rollout = attempts(prompts, "ab", "abcdefgh")
    seen, cut = with_feedback(rollout, ["123456789", "12"], PLAIN, 13)
    texts = [PLAIN.decode(p.teacher_tokens) for p in seen.prompts]
    assert texts == ["q?ab!1234567.", "q?abcdefg!12."] and cut == 2
    assert max(len(p.teacher_tokens) for p in seen.prompts) <= 13


def test_the_prompt_of_a_teacher_with_feedback_shows_the_rows_tools():
    tokenizer, template = tokenizer_of(THINKS), TeacherPrompt("{prompt}{feedback}", 400, PLACES)
    encoder = PromptEncoder(tokenizer, 400, 8, teacher=template)
    prompt = encoder.encode(Example("q", inputs=TemplateInputs((TOOL,))), 0)
    assert "TOOL" in tokenizer.decode(prompt.tokens)
    seen, _ = with_feedback(attempts([prompt], "one"), [""], tokenizer, 400)
    assert seen.prompts[0].teacher_tokens == prompt.tokens


def test_without_rewards_feedback_is_a_column_like_any_other():
    encoder = PromptEncoder(PLAIN, 99, 8, teacher=TeacherPrompt("{feedback}{prompt}", 99))
    assert taught(encoder, PLAIN, Example("q", columns={"feedback": "f"})) == "fq"
    with pytest.raises(UserError, match=r"names \{feedback\}; the row has `prompt`"):
        encoder.encode(Example("q"), 0)
