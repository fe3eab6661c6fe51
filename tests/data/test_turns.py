"""What stands between the turns of a model: taken from chat templates, and encoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.data.batch import data_rollout
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import Keys, to_example
from jaxrl.data.tokenizer import TurnEncoder, check_same_prompts, encode_prompt, render_chat
from jaxrl.errors import UserError
from jaxrl.types import Prompt, TemplateInputs

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{{ (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
"""It names the role of tools otherwise, and gives their results as JSON."""
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% elif m.role == 'tool' %}"
    "{% set content = '<tool_response>\n' + m.content + '\n</tool_response>' %}{% endif %}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""It leaves out the thoughts of earlier turns, and opens those of the next."""
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""It has two roles, which must take turns."""
SILENT = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
"""It has no place for tools, and does not say so."""
MERGES = (("a", "b"), ("n", "<"), ("Ċ", "Ċ"), ("ab", "c"))
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "chatml": (CHATML, "<|im_end|>", ()),
    "llama3": (
        LLAMA3,
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "qwen3": (QWEN3, "<|im_end|>", ()),
    "gemma": (GEMMA, "<end_of_turn>", ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "silent": (SILENT, "<|im_end|>", ()),
}
NEXT = {
    "chatml": "\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen3": "\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "gemma": "\n<start_of_turn>{}\n{}<end_of_turn>\n<start_of_turn>model\n",
    "silent": "\n<|im_start|>{}\n{}<|im_end|>\n<|im_start|>assistant\n",
}
"""After a turn that ended with the EOS."""


class Counted:
    """A tokenizer that keeps the texts which it is given to encode."""

    def __init__(self, inner: Any):
        self.inner, self.texts = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **given: Any) -> Any:
        self.texts.append(text)
        return self.inner(text, **given)


def tokenizer_of(family: str) -> Any:
    template, eos, extra = FAMILIES[family]
    return tiny_tokenizer(template, MERGES, eos, extra=extra)


def spelt(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
    return text


def said(role: str, *contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_turn(family: str) -> None:
    tokenizer = tokenizer_of(family)
    eos, text = FAMILIES[family][1], NEXT[family].format("user", "no abc")
    turns = TurnEncoder(tokenizer)
    ended = turns.after(said("user", "no abc"), eos=tokenizer.eos_token_id, chat=True)
    assert spelt(tokenizer, ended) == text
    assert ended == tuple(tokenizer(text)["input_ids"])
    cut = turns.after(said("user", "no abc"), eos=None, chat=True)
    assert spelt(tokenizer, cut) == eos + text
    other = turns.after(
        said("user", "no abc"), eos=tokenizer.get_vocab()["<|endoftext|>"], chat=True
    )
    assert other == cut, "another EOS than the template's"


@pytest.mark.parametrize(
    ("family", "role", "expected", "note"),
    [
        ("chatml", "tool", "7", None),
        ("llama3", "ipython", '"7"', None),
        ("qwen3", "user", "<tool_response>\n7\n</tool_response>", None),
        ("gemma", "user", "7", "no place for messages of tool after"),
        ("silent", "user", "7", "no place for messages of tool after"),
    ],
)
def test_what_a_tool_returned(family: str, role: str, expected: str, note: str | None) -> None:
    tokenizer, notes = tokenizer_of(family), list[str]()
    turns = TurnEncoder(tokenizer, notes.append)
    for _ in range(2):
        tokens = turns.after(said("tool", "7"), eos=tokenizer.eos_token_id, chat=True)
        assert spelt(tokenizer, tokens) == NEXT[family].format(role, expected)
    turns.after(said("tool", "8"), eos=tokenizer.eos_token_id, chat=True)
    assert len(notes) == (note is not None) and all(str(note) in one for one in notes)


def test_several_messages_become_one_where_the_roles_must_alternate() -> None:
    tokenizer = tokenizer_of("gemma")
    turns = TurnEncoder(tokenizer)
    for role in ("tool", "user"):
        tokens = turns.after(said(role, "1", "2"), eos=tokenizer.eos_token_id, chat=True)
        assert spelt(tokenizer, tokens) == NEXT["gemma"].format("user", "1\n2")


def test_a_template_without_any_place_is_refused() -> None:
    only_users = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    tokenizer = tiny_tokenizer(only_users)
    turns = TurnEncoder(tokenizer)
    with pytest.raises(UserError, match=r"tool after a turn.*leaves out messages of tool"):
        turns.after(said("tool", "7"), eos=tokenizer.eos_token_id, chat=True)


def test_what_looks_like_the_mark_or_like_special_tokens() -> None:
    tokenizer = tokenizer_of("chatml")
    turns = TurnEncoder(tokenizer)
    text = "ASSISTANT_TURN OBSERVATION0"
    tokens = turns.after(said("user", text), eos=tokenizer.eos_token_id, chat=True)
    assert spelt(tokenizer, tokens) == NEXT["chatml"].format("user", text)


@pytest.mark.parametrize("template", [None, CHATML])
def test_texts_follow_as_they_are(template: str | None) -> None:
    tokenizer = tiny_tokenizer(template, bos=True)
    turns = TurnEncoder(tokenizer)
    tokens = turns.after(said("user", " 7", "8"), eos=tokenizer.eos_token_id, chat=template is None)
    assert spelt(tokenizer, tokens) == " 78", "no BOS before it, no EOS after it"


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_encoded_twice_and_the_models_ids_stay(family: str) -> None:
    """The model writes `a`, `b` and `c` by themselves, which its tokenizer would merge, and thinks;
    the template gives other ids of the whole chat."""
    tokenizer = Counted(tokenizer_of(family))
    turns = TurnEncoder(tokenizer)
    turns.after(said("user", "?"), eos=tokenizer.eos_token_id, chat=True)
    tokenizer.texts.clear()
    chat = said("user", "q")
    ids = list(encode_prompt(tokenizer.inner, chat))
    prompt, sampled, heard = len(ids), list[int](), 0
    letters = [tokenizer.inner(letter)["input_ids"][0] for letter in "abc"]
    thought = "<think>\nhm\n</think>\n\n"
    for number in range(4):
        turn = [*tokenizer.inner(thought)["input_ids"], *letters, tokenizer.eos_token_id]
        sampled += turn
        observation = said("user", f"abc {number}")
        after = turns.after(observation, eos=tokenizer.eos_token_id, chat=True)
        heard += len(after)
        ids += [*turn, *after]
        chat += [*said("assistant", f"{thought}abc"), *observation]
    assert len(ids) == prompt + len(sampled) + heard
    encoded = [tokenizer.inner(text)["input_ids"] for text in tokenizer.texts]
    assert sum(map(len, encoded)) == heard, "each observation once, no turn of the model"
    again = render_chat(tokenizer.inner, chat, add_generation_prompt=True)
    assert len(ids) > len(again), "merged; in Qwen's, without thoughts"
    if family != "qwen3":
        assert spelt(tokenizer, ids) == spelt(tokenizer, again)
    else:
        assert spelt(tokenizer, ids).count("hm") == 4 and "hm" not in spelt(tokenizer, again)


TRACE = [
    *said("user", "2+3?"),
    *said("assistant", "abc"),
    *said("tool", "5", "6"),
    *said("assistant", "it is ab"),
    *said("assistant", "c"),
]


def encoded(tokenizer: Any, turns: Any, most: int = 500) -> Prompt:
    example = to_example({"messages": TRACE, "n": 1}, Keys(turns=turns), "row")
    prompt = PromptEncoder(tokenizer, 500, most).encode(example, 0)
    assert prompt is not None
    return prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_is_learned_turn_by_turn(family: str) -> None:
    tokenizer = tokenizer_of(family)
    prompt = encoded(tokenizer, "all")
    # Qwen's generation prompts open thoughts that none of these turns has in the whole chat.
    opened = "<think>\n" if family == "qwen3" else ""
    assert prompt.to_sample.tokens == encode_prompt(tokenizer, TRACE[:1]) and prompt.text == "2+3?"
    assert spelt(tokenizer, prompt.tokens) + opened == spelt(tokenizer, prompt.to_sample.tokens)
    assert [turn.role for turn in prompt.turns] == ["assistant", "environment"] * 2 + ["assistant"]
    rollout = data_rollout(
        [prompt], decode=str, max_prompt_tokens=500, max_new_tokens=500, pad_id=0
    )
    (completion,) = rollout.completions
    assert completion.text == "c" and completion.finish_reason == "stop"
    tokens = np.array(prompt.completion)
    learned = rollout.sequences.loss_mask[0, : len(tokens)]
    eos = FAMILIES[family][1]
    assert spelt(tokenizer, tokens[learned]) == f"abc{eos}it is ab{eos}c{eos}"
    turns = TurnEncoder(tokenizer)
    between = turns.after(TRACE[2:4], eos=tokenizer.eos_token_id, chat=True)
    again = turns.after([], eos=tokenizer.eos_token_id, chat=True)
    if opened:
        heard = spelt(tokenizer, [*between, *again]).replace(opened, "")
        assert spelt(tokenizer, tokens[~learned]) == heard
    else:
        assert tuple(tokens[~learned]) == (*between, *again)


def test_the_last_turn_alone_is_as_before() -> None:
    tokenizer = tokenizer_of("chatml")
    prompt = encoded(tokenizer, "last")
    assert prompt.turns == () and prompt.tokens == encode_prompt(tokenizer, TRACE[:-1])
    assert spelt(tokenizer, prompt.completion or ()) == "c<|im_end|>"
    one = to_example({"messages": TRACE[:2]}, Keys(turns="all"), "row")
    assert one == to_example({"messages": TRACE[:2]}, Keys(), "row")


def test_a_trace_is_cut_where_completions_are() -> None:
    tokenizer = tokenizer_of("chatml")
    whole = encoded(tokenizer, "all")
    for most in (1, 2, 30, len(whole.completion or ()) - 1):
        prompt = encoded(tokenizer, "all", most)
        assert prompt.completion == (whole.completion or ())[:most]
        assert sum(turn.tokens for turn in prompt.turns) == most
        assert all(turn.tokens > 0 for turn in prompt.turns)


def test_calls_of_tools_are_learned_as_the_template_writes_them() -> None:
    calls = "{% for c in m.tool_calls or [] %}[{{ c.function.arguments | tojson }}]{% endfor %}"
    begins = "{{ '<|im_start|>' + m['role']"
    template = CHATML.replace(begins, "{% set calls %}" + calls + "{% endset %}" + begins)
    tokenizer = tiny_tokenizer(template.replace("m['content'] +", "m['content'] + calls +"))
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    chat = [*said("user", "q"), call, *said("tool", "5"), *said("assistant", "ab")]
    for turns, expected in (("all", '[{"x": 1}]<|im_end|>ab<|im_end|>'), ("last", "ab<|im_end|>")):
        example = to_example({"messages": chat}, Keys(turns=turns), "row")
        prompt = PromptEncoder(tokenizer, 500, 500).encode(example, 0)
        assert prompt is not None and prompt.completion is not None
        own = [np.full(turn.tokens, turn.role == "assistant") for turn in prompt.turns]
        learned = np.concatenate(own) if own else np.ones(len(prompt.completion), bool)
        assert spelt(tokenizer, np.array(prompt.completion)[learned]) == expected
    example = to_example({"messages": chat[:2]}, Keys(), "row")
    prompt = PromptEncoder(tokenizer, 500, 500).encode(example, 0)
    assert prompt is not None and spelt(tokenizer, prompt.completion or ()).startswith('[{"x": 1}]')
    with pytest.raises(UserError, match="does not render `tool_calls`"):
        PromptEncoder(tiny_tokenizer(), 500, 500).encode(example, 0)


@pytest.mark.parametrize("given", [[{"name": "f"}], '[{"name": "f"}]', None])
def test_tools_of_a_row_are_shown_by_the_template(given: object) -> None:
    shows = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}"
    tokenizer = tiny_tokenizer(shows + CHATML)
    row = {"messages": TRACE, "functions": given}
    example = to_example(row, Keys(tools="functions", turns="all"), "row")
    prompt = PromptEncoder(tokenizer, 500, 500).encode(example, 0)
    plain = encoded(tiny_tokenizer(), "all")
    assert prompt is not None and prompt.completion == plain.completion
    head = "" if given is None else "[f]"
    assert spelt(tokenizer, prompt.tokens) == head + spelt(tokenizer, plain.tokens)
    check_same_prompts(tokenizer, tokenizer, [prompt])
    other = tiny_tokenizer(shows.replace("}[", "}<") + CHATML)
    if given is not None:
        with pytest.raises(UserError, match="make different prompts"):
            check_same_prompts(tokenizer, other, [prompt])


@pytest.mark.parametrize("given", ["f", 3, [1]])
def test_tools_that_are_none_are_refused(given: object) -> None:
    with pytest.raises(UserError, match="row: `tools` must be a list of JSON schemas"):
        to_example({"prompt": "x", "tools": given}, Keys(tools="tools"), "row")


def test_what_follows_a_turn_is_of_the_template_that_rendered_the_prompt() -> None:
    """A tokenizer may have another template for chats with tools (Command R+)."""
    uses = "{% for t in tools %}{{ 'TOOL ' + t.name + '\\n' }}{% endfor %}" + CHATML.replace(
        "m['content']", "('<r>' + m['content'] + '</r>' if m['role'] == 'tool' else m['content'])"
    )
    tokenizer = tiny_tokenizer(CHATML)
    uses = uses.replace("start|>ass", "end|>ass")
    tokenizer.chat_template = {"default": CHATML, "tool_use": uses}
    turns, eos = TurnEncoder(tokenizer), tokenizer.eos_token_id
    plain = turns.after(said("tool", "7"), eos=eos, chat=True)
    assert spelt(tokenizer, plain) == NEXT["chatml"].format("tool", "7")
    inputs = TemplateInputs(({"name": "f"},), {"x": 1})
    used = turns.after(said("tool", "7"), eos=eos, chat=True, inputs=inputs)
    assert spelt(tokenizer, used) == "\n<|im_start|>tool\n<r>7</r><|im_end|>\n<|im_end|>assistant\n"
