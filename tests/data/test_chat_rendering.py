"""What is learned of a chat is cut out of the template's own text of the whole."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from byte_tokenizers import sentencepiece
from cases import read_cases
from chat_shapes import (
    ASK,
    ENDS,
    FORMS,
    MARKS,
    NO_THOUGHTS,
    OPENS,
    THINKS,
    TOOL,
    called,
    encoded,
    spelt,
    tokenizer_of,
)
from tiny_tokenizer import CHATML, tiny_tokenizer
from tokenizers import Regex, normalizers, pre_tokenizers

from jaxrl.config.schema import Config
from jaxrl.data import chat_template
from jaxrl.data.batch import data_rollout
from jaxrl.data.chat_template import dated, program, render_text
from jaxrl.data.jsonl import JsonlFile
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import Keys
from jaxrl.data.source import Source, source_of
from jaxrl.data.stream import PromptStream
from jaxrl.data.token_alignment import ModelTokenizer, TokenBytes
from jaxrl.data.tokenizer import TurnEncoder, encode_prompt, load_tokenizer
from jaxrl.environments.environment_process import observed
from jaxrl.errors import UserError
from jaxrl.process import waiting
from jaxrl.roles.rollout import Sampler
from jaxrl.sampling.sampler import SamplingParams

TEMPLATES = {"CHATML": CHATML, "THINKS": THINKS, "OPENS": OPENS, "NO_THOUGHTS": NO_THOUGHTS}
"""Those that rows of tests/cases/chat_templates.jsonl name."""


@pytest.mark.parametrize(
    "case", read_cases("chat_templates.jsonl", "answer"), ids=lambda case: case["name"]
)
def test_a_completion_is_the_rest_of_the_templates_text(case: Mapping[str, Any]) -> None:
    message, expected = case["message"], case["text"]
    tokenizer = tokenizer_of(TEMPLATES[case["template"]])
    chat = [ASK, {"role": "assistant", **message}]
    prompt = encoded(tokenizer, {"messages": chat})
    assert spelt(tokenizer, prompt.completion) == expected
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert f"{spelt(tokenizer, prompt.tokens)}{expected}\n" == whole
    assert prompt.to_sample.tokens == encode_prompt(tokenizer, [ASK])
    begins_alike = case["name"] != "no thoughts"
    assert (prompt.tokens == prompt.to_sample.tokens) is begins_alike


def test_samples_begin_with_the_generation_prompt_and_data_do_not() -> None:
    """Where the two part, a batch of samples and one of the data's completions of the same row have
    different prompts."""
    tokenizer = tokenizer_of(NO_THOUGHTS)
    row = {"messages": [ASK, {"role": "assistant", "content": "4"}]}
    prompt = encoded(tokenizer, row)
    engine = SimpleNamespace(generate=lambda weights, requests, **_: requests)
    sampler: Any = SimpleNamespace(
        **{"params": 1, "version": 0, "_weights": 1, "_episodes": None, "_teacher": False},
        **{"_most": 8, "_sampling": {"train": SamplingParams(8)}, "_streams": False},
        engine=engine,
        config=Config.load("builtin:quickstart"),
    )
    sampler._requests = partial(Sampler._requests, sampler)
    (sampled,), ((asked, *_),) = Sampler._sample(sampler, [prompt], "train")
    tokens = asked.prompt
    sampler._teacher = True
    for own, read in (((7,), (7,)), (None, (6,))):  # the teacher's generation prompt, if it differs
        teachers = replace(
            prompt, teacher_generation_tokens=own, teacher_tokens=(5,), teacher_sampling_tokens=(6,)
        )
        ((asked, *_),) = Sampler._sample(sampler, [teachers], "train")[1]
        assert asked.prompt == read
    assert sampled.tokens == tokens and spelt(tokenizer, tokens).endswith("assistant\n<think>\n")
    rollout = data_rollout([prompt], decode=str, max_prompt_tokens=64, max_new_tokens=8, pad_id=0)
    assert spelt(tokenizer, rollout.prompts[0].tokens).endswith("<|im_start|>assistant\n")
    assert rollout.sequences.mask[0].sum() == len(prompt.tokens) + len(prompt.completion or ())


def test_a_completion_that_is_a_text_is_a_turn() -> None:
    tokenizer = tokenizer_of(OPENS)
    rows = (
        {"prompt": "2+2?", "completion": "4"},
        {"messages": [ASK, {"role": "assistant", "content": "4"}]},
    )
    first, second = (encoded(tokenizer, row) for row in rows)
    assert (first.tokens, first.completion) == (second.tokens, second.completion)
    assert spelt(tokenizer, first.completion) == "\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("case", read_cases("chat_templates.jsonl", "arguments"), ids=str)
def test_arguments_are_given_as_the_template_takes_them(case: Mapping[str, Any]) -> None:
    given, expected = case["arguments"], case["text"]
    tokenizer = tokenizer_of(THINKS, FORMS[case["form"]])
    for chat in ([ASK, called(given)], [ASK, called(given), {"role": "tool", "content": "r"}, ASK]):
        prompt = encoded(tokenizer, {"messages": chat})
        text = spelt(tokenizer, prompt.tokens) + spelt(tokenizer, prompt.completion)
        assert f"<tool_call>w {expected}</tool_call>" in text


def test_an_argument_that_is_absent_is_none() -> None:
    chat: list[dict[str, Any]] = [ASK, called(...)]
    del chat[1]["tool_calls"][0]["function"]["arguments"]
    tokenizer = tokenizer_of(THINKS)
    assert "w {}" in spelt(tokenizer, encoded(tokenizer, {"messages": chat}).completion)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ENDS, ["\n\na<|endoftext|>", "a<|endoftext|>", "b<|im_end|>"]),
        (MARKS, ["\n\na<|im_end|>", "a<|im_end|>", "b<|im_end|>"]),
        (OPENS, ["\n\na<|im_end|>", "a<|im_end|>", "\n</think>\n\nb<|im_end|>"]),
        (NO_THOUGHTS, ["\n\na<|im_end|>", "a<|im_end|>", "b<|im_end|>"]),
    ],
)
def test_every_turn_is_learned_with_the_end_that_it_has_in_the_whole_chat(
    template: str, expected: list[str]
) -> None:
    tokenizer = tokenizer_of(template)
    says = [{"role": "assistant", "content": text} for text in ("\n\na", "a", "b")]
    chat = [ASK, says[0], ASK, says[1], {**ASK, "name": "x"}, says[2]]
    prompt = encoded(tokenizer, {"messages": chat}, turns="all")
    parts, at = [], 0
    for turn in prompt.turns:
        parts.append((turn.role, spelt(tokenizer, prompt.completion[at : at + turn.tokens])))
        at += turn.tokens
    assert [text for role, text in parts if role == "assistant"] == expected
    joined = spelt(tokenizer, prompt.tokens) + "".join(text for _, text in parts)
    assert joined == tokenizer.apply_chat_template(chat, tokenize=False).rstrip("\n")
    assert [t.text for t in prompt.turns if t.role == "environment"] == ["2+2?", "2+2?"]


SAID = {"role": "assistant", "content": "4"}
SPELLINGS = (
    [{"prompt": [ASK], "completion": [SAID]}, {"prompt": [ASK]}],
    [{"prompt": [ASK], "completion": "4"}, {"prompt": ASK}],
    [{"messages": [ASK, SAID]}, {"messages": [ASK]}],
    [{"messages": [ASK], "completion": [SAID]}, {"messages": json.dumps([ASK])}],
    [{"prompt": ASK["content"], "completion": [SAID]}, {"prompt": ASK["content"]}],
)
"""Of a chat and of one without a completion: TRL's, ours, and text, which is another form."""


@pytest.mark.parametrize("template", [CHATML, THINKS, OPENS], ids=["chatml", "thinks", "opens"])
def test_every_spelling_of_a_row_makes_the_same_batch(template: str) -> None:
    """Without further keys; only whether the prompts are messages is the form of the data."""
    encoder = PromptEncoder(tokenizer_of(template), 500, 500)
    streams = [PromptStream(source_of(rows), encoder, 4, 3) for rows in SPELLINGS]
    first, *others = (stream.batch(0) for stream in streams)
    *chats, text = others
    assert {len(prompt.completion or ()) > 1 for prompt in first} == {False, True}
    assert all(prompt.conversational for prompt in first) and all(batch == first for batch in chats)
    assert [replace(prompt, conversational=True) for prompt in text] == first


def noted(
    tokenizer: Any, tmp_path: Any, *rows: Mapping[str, Any], turns: Any = "last"
) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Source([JsonlFile(str(path), keys=Keys(tools="tools", turns=turns))])
    stream = PromptStream(source, PromptEncoder(tokenizer, 500, 500), 2, 0, shuffle=False)
    stream.batch(0)
    return list(stream.noted.values())


@pytest.mark.parametrize("case", read_cases("chat_templates.jsonl", "note"), ids=str)
def test_what_a_template_does_not_show_is_said_once_with_the_row(
    tmp_path: Any, case: Mapping[str, Any]
) -> None:
    template = TEMPLATES[case["template"]].replace(*case.get("replace", ("", "")))
    tools = [TOOL] if case["tools"] else None
    plain = {"messages": [ASK]}
    chat = [ASK, *case.get("before", ()), {"role": "assistant", **case["message"]}]
    rows = plain, *[{"messages": chat, "tools": tools}] * 3
    if case.get("refused"):
        with pytest.raises(UserError, match=f"rows.jsonl:2: .*{re.escape(case['note'])}"):
            noted(tokenizer_of(template), tmp_path, *rows)
        return
    notes = noted(tokenizer_of(template), tmp_path, *rows)
    if case["note"]:
        (note,) = notes
        assert case["note"] in note and note.startswith(f"data.train: {tmp_path}/rows.jsonl:2: ")
    else:
        assert not notes


def test_each_thing_that_a_template_may_not_show_has_a_case() -> None:
    cases = read_cases("chat_templates.jsonl", "note")
    assert {case["unseen"] for case in cases if "unseen" in case} == chat_template.UNSEEN.keys()


DROPS = (
    "{% for m in messages %}{% set ns = namespace(later=false) %}"
    "{% for x in messages[loop.index:] %}{% if x.role == 'assistant' %}"
    "{% set ns.later = true %}{% endif %}{% endfor %}{{ '<|im_start|>' + m.role }}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content and not ns.later %}"
    "{{ '[think]' + m.reasoning_content + '[/think]' }}{% endif %}{{ '[final]' }}{% endif %}"
    "{{ '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""It writes the thoughts of a turn only while no other turn follows, as gpt-oss does, and a header
that goes on behind the generation prompt."""


@pytest.mark.parametrize("turns", ["last", "all"])
@pytest.mark.parametrize(
    ("thoughts", "expected"), [({}, ""), ({"reasoning_content": "so"}, "[think]so[/think]")]
)
def test_a_turn_begins_behind_its_generation_prompt_where_earlier_turns_differ(
    tmp_path: Any, turns: str, thoughts: Mapping[str, str], expected: str
) -> None:
    says = [{"role": "assistant", "content": text} for text in ("4", "5")]
    chat = [ASK, {**says[0], "reasoning_content": "hm"}, ASK, {**says[1], **thoughts}]
    tokenizer = tokenizer_of(DROPS)
    prompt = encoded(tokenizer, {"messages": chat}, turns=turns)
    joined = spelt(tokenizer, prompt.tokens) + spelt(tokenizer, prompt.completion)
    assert f"{joined}\n" == tokenizer.apply_chat_template(chat, tokenize=False)
    assert spelt(tokenizer, prompt.tokens).endswith("<|im_start|>assistant")
    last = spelt(tokenizer, prompt.completion[-prompt.turns[-1].tokens if prompt.turns else 0 :])
    assert last == f"{expected}[final]\n5<|im_end|>"
    (note,) = noted(tokenizer, tmp_path, {"messages": chat})
    assert "message 3: the chat template writes the messages before this turn differently" in note
    assert "'think]hm[/think][final]" in note and "'final]\\n4" in note


@pytest.mark.parametrize("calls", ["</tool_call>", "<|call_end|>"])
def test_a_turn_is_learned_with_its_end_behind_any_other_special_token(calls: str) -> None:
    template = THINKS.replace("'</tool_call>'", f"'{calls}'")
    template = template.replace("'<|im_end|>\n'", "'' if loop.last else '<|im_end|>\n'")
    tokenizer = tokenizer_of(template)
    tokenizer.add_tokens([calls], special_tokens=True)
    chat = [
        ASK,
        called({}),
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "b"},
    ]
    prompt = encoded(tokenizer, {"messages": chat}, turns="all")
    first = prompt.completion[: prompt.turns[0].tokens]
    assert spelt(tokenizer, first) == f"<tool_call>w {{}}{calls}<|im_end|>"


def test_turns_end_with_the_token_that_begins_what_they_hear() -> None:
    """GLM's models stop at the role that speaks next."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + '</tool_call>' }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer = tokenizer_of(template)
    ends = ["<|user|>", "<|tool|>"]
    tokenizer.add_tokens([*ends, "<|assistant|>", "</tool_call>"], special_tokens=True)
    answer = {"role": "assistant", "content": "wet"}
    chat = [ASK, called({}), {"role": "tool", "content": "rain"}, answer, ASK, answer]
    ids = tuple(tokenizer.convert_tokens_to_ids([*ends, "<|im_end|>"]))
    prompt = encoded(tokenizer, {"messages": chat}, turns="all", eos_ids=ids)
    parts, at = list[str](), 0
    for turn in prompt.turns:
        parts.append(spelt(tokenizer, prompt.completion[at : at + turn.tokens]))
        at += turn.tokens
    assert parts == [
        "<tool_call>w</tool_call><|tool|>",
        "rain<|assistant|>",
        "wet<|user|>",
        "2+2?<|assistant|>",
        "wet<|im_end|>",
    ]


def test_a_chat_that_is_rendered_turn_by_turn_is_noted_with_its_row(tmp_path: Any) -> None:
    one_round = "{% if messages | length > 3 %}{{ raise_exception('one round') }}{% endif %}"
    answer = {"role": "assistant", "content": "4"}
    row = {"messages": [ASK, answer, ASK, answer]}
    (note,) = noted(
        tokenizer_of(one_round + CHATML), tmp_path, {"messages": [ASK]}, row, row, turns="all"
    )
    assert note.startswith(f"data.train: {tmp_path}/rows.jsonl:2: the chat template refuses")
    assert "one round" in note and "rendered on its own" in note


def test_turns_that_cannot_be_found_in_the_text_are_refused() -> None:
    backwards = CHATML.replace("in messages", "in messages | reverse")
    answers = [{"role": "assistant", "content": text} for text in ("4", "5")]
    with pytest.raises(UserError, match="message 1: where this turn of the assistant begins"):
        encoded(
            tokenizer_of(backwards), {"messages": [ASK, answers[0], ASK, answers[1]]}, turns="all"
        )


def test_an_empty_turn_whose_content_is_marked_is_learned_with_its_end() -> None:
    tokenizer = tokenizer_of(MARKS.replace("{{ 'note\n' }}", ""))
    chat = [ASK, {"role": "assistant", "content": ""}, ASK, {"role": "assistant", "content": "5"}]
    prompt = encoded(tokenizer, {"messages": chat}, turns="all")
    learned, at = [], 0
    for turn in prompt.turns:
        if turn.role == "assistant":
            learned.append(spelt(tokenizer, prompt.completion[at : at + turn.tokens]))
        at += turn.tokens
    assert learned == ["<|im_end|>", "5<|im_end|>"]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("empty", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_those_of_the_field_that_has_some(name: str, empty: str) -> None:
    for template in (THINKS, THINKS.replace("m.reasoning_content", "m.thinking")):
        tokenizer = tokenizer_of(template)
        message: dict[str, Any] = {"role": "assistant", "content": "4", empty: "", name: "hm"}
        prompt = encoded(tokenizer, {"messages": [ASK, message]})
        assert spelt(tokenizer, prompt.completion) == "<think>\nhm\n</think>\n\n4<|im_end|>"


def test_calls_that_are_not_rendered_are_refused_with_the_row(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:1: message 1: .*does not render `tool_calls`"):
        noted(tokenizer_of(CHATML), tmp_path, {"messages": [ASK, called({})]}, {"messages": [ASK]})


def test_a_row_that_cannot_be_rendered_is_refused_before_the_first_batch(tmp_path: Any) -> None:
    """Wherever it stands: each combination of fields is tried once when the data are opened."""
    one_call = CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if (m.tool_calls or []) | length > 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}",
        1,
    )
    assert one_call != CHATML
    plain = {"messages": [ASK, {"role": "assistant", "content": "4"}]}
    twice = called({})
    twice["tool_calls"] = twice["tool_calls"] * 2
    for template, row, why in (
        (CHATML, {"messages": [ASK, called({})]}, "does not render `tool_calls`"),
        (
            one_call.replace("m['content'] +", "m['content'] + (m.tool_calls or '') | string +"),
            {"messages": [ASK, twice]},
            "one call at once",
        ),
    ):
        path = tmp_path / "rows.jsonl"
        rows = [plain] * 40 + [row] + [plain] * 20
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = JsonlFile(str(path), label="data.train")
        encoder = PromptEncoder(tokenizer_of(template), 500, 500)
        with pytest.raises(UserError, match=f"rows.jsonl:41: .*{why}"):
            PromptStream(Source([file]), encoder, 4, seed=0)


def test_an_answer_that_the_template_leaves_out_is_refused() -> None:
    first_only = tokenizer_of("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match="message 1: the chat template does not render the answer"):
        encoded(first_only, {"messages": [ASK, {"role": "assistant", "content": "4"}]})
    nothing = encoded(first_only, {"messages": [ASK, {"role": "assistant", "content": ""}]})
    assert spelt(first_only, nothing.completion) == "<|im_end|>"


def test_fields_of_messages_reach_the_template_between_turns() -> None:
    shows = CHATML.replace(
        "m['content'] +", "m['content'] + (m.name or '') + (m.tool_call_id or '') +"
    )
    tokenizer = tokenizer_of(shows)
    message = {"role": "tool", "content": "rain", "name": "look", "tool_call_id": "c1", "x": [1]}
    (heard,) = observed({"messages": [message]}).messages
    assert heard == message
    tokens = TurnEncoder(tokenizer).after([heard], eos=tokenizer.eos_token_id, chat=True)
    assert "rainlookc1<|im_end|>" in spelt(tokenizer, tokens)
    chat = [
        ASK,
        {"role": "assistant", "content": "a"},
        message,
        {"role": "assistant", "content": "b"},
    ]
    for turns in ("last", "all"):
        prompt = encoded(tokenizer, {"messages": chat}, turns=turns)
        assert "rainlookc1<|im_end|>" in spelt(
            tokenizer, (*prompt.tokens, *(prompt.completion or ()))
        )
    with pytest.raises(UserError, match="must be JSON"):
        observed({"messages": [{**message, "x": object()}]})


def test_a_text_that_has_its_bos_gets_no_other() -> None:
    tokenizer = tiny_tokenizer("{{ '<|endoftext|>' }}" + CHATML, bos=True)
    tokenizer.bos_token = "<|endoftext|>"
    text = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    prompt = encoded(tokenizer, {"prompt": text, "completion": "yo"}, chat="raw")
    assert spelt(tokenizer, prompt.tokens) == text
    plain = encoded(tokenizer, {"prompt": "hi", "completion": "yo"}, chat="raw")
    assert spelt(tokenizer, plain.tokens) == "<|endoftext|>hi"


@pytest.mark.parametrize("text", ["46", " 46", "the", "\n46", " \n46", "  46", "ä", ""])
def test_a_text_that_continues_gets_no_space_that_nobody_wrote(text: str) -> None:
    tokenizer = sentencepiece("th", "the", "46")
    token_bytes = TokenBytes(ModelTokenizer(tokenizer, len(tokenizer), ()), "student")
    messages = [{"role": "user", "content": text}]
    tokens = TurnEncoder(tokenizer).after(messages, eos=None, chat=False)
    assert token_bytes.join(tokens) == text.encode()
    (tokens_again,) = token_bytes.encode([text])
    assert token_bytes.join(tokens_again) == text.encode()


def test_the_date_of_a_template_is_the_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of("{{ strftime_now('%d %b %Y %H:%M') + '\n' }}" + CHATML)
    monkeypatch.setattr(chat_template, "today", lambda: "2027-12-31")
    assert render_text(tokenizer, [ASK]).startswith("31 Dec 2027 00:00\n")
    dated(tokenizer, "2026-02-03")
    monkeypatch.setattr(chat_template, "today", lambda: "2028-01-01")
    assert render_text(tokenizer, [ASK]).startswith("03 Feb 2026 00:00\n")


OUTSIDE = {
    "the sandbox": "{{ messages.__class__.__mro__ }}",
    "what it may change": "{{ messages.append(1) }}",
    "range": "{% for x in range(10**6) %}{% endfor %}",
    "its own depth": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_template_that_leaves_jinjas_sandbox_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="the chat template refuses messages of user: .{10}"):
        render_text(tiny_tokenizer(OUTSIDE[name]), [ASK])


def test_a_template_that_works_for_long_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(waiting.waits, "_clock", lambda: 100 * time.monotonic())
    long = "{% for a in range(1000) %}{% for b in range(8000) %}{% endfor %}{% endfor %}"
    with waiting.to_say(said.append):
        render_text(tiny_tokenizer(long), [ASK])
    assert said[0].startswith("waiting for the chat template, which renders one chat: ")
    assert said[-1].endswith("and it is over")


def test_memory_that_a_template_does_not_get_is_named() -> None:
    class Template:
        environment = program(CHATML).environment

        def generate(self, **_: object) -> Any:
            raise MemoryError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="user: MemoryError"):
        patch.setattr(chat_template, "program", lambda text: Template())
        render_text(tiny_tokenizer(), [ASK])


def test_a_normalizer_that_doubles_is_refused(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    steps = [normalizers.Replace("1", "11") for _ in range(40)]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"its normalizer makes a text up to 1\.1e\+12 times"):
        load_tokenizer(tmp_path)
    usual = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    for normalizer in (normalizers.Sequence(usual), normalizers.NFC()):
        tokenizer.backend_tokenizer.normalizer = normalizer
        tokenizer.save_pretrained(tmp_path)
        assert load_tokenizer(tmp_path) is not None


@pytest.mark.parametrize("number", [2**24, 2**31, 10**30])
@pytest.mark.parametrize("file", ["vocab", "added", "config", "vocab.json", "added_tokens.json"])
def test_ids_beyond_any_vocabulary_are_refused(tmp_path: Any, file: str, number: int) -> None:
    """transformers would make lists of so many tokens, deaf to Ctrl-C."""
    tiny_tokenizer().save_pretrained(tmp_path)
    whole, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    raw, settings = json.loads(whole.read_text()), json.loads(config.read_text())
    if file == "vocab":
        raw["model"]["vocab"]["strange"] = number
    elif file == "added":
        raw["added_tokens"].append(raw["added_tokens"][0] | {"content": "strange", "id": number})
    elif file == "config":
        settings["added_tokens_decoder"] = {str(number): {"content": "strange"}}
    else:
        (tmp_path / file).write_text(json.dumps({"strange": number}))
    whole.write_text(json.dumps(raw)), config.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"'?strange.* has the id {number}; ids are from 0 to"):
        load_tokenizer(tmp_path)


def test_a_regular_expression_that_backtracks_is_a_clear_error(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="the tokenizer cannot split 'a"):
        encode_prompt(loaded, "a" * 40 + "b")
