"""Arguments for chat templates: where they come from and go; and columns that nothing reads."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from jaxrl.config.schema import Config
from jaxrl.data.columns import COLUMNS, WORDS, unread_notes
from jaxrl.data.example import Example, is_learned
from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import Keys, to_example
from jaxrl.data.tokenizer import TurnEncoder, encode_prompt
from jaxrl.errors import UserError
from jaxrl.run.generation import as_asked, read_prompts
from jaxrl.types import TemplateInputs

ASK = {"role": "user", "content": "2+2?"}
FOUR = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and (preserve_thinking or loop.last) %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
)
QWEN3 = TURNS + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""As Qwen3's and its successors'."""
GPT_OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{% if not model_identity %}{% set model_identity = 'You are ChatGPT' %}{% endif %}"
    "{{ model_identity }}\nReasoning: {{ reasoning_effort }}\n"
    "{% for t in builtin_tools or [] %}{{ t }}\n{% endfor %}" + CHATML
)
"""As gpt-oss's."""
SWITCHES: list[tuple[str, dict[str, Any], str]] = [
    (QWEN3, {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    (GPT_OSS, {"reasoning_effort": "high"}, "Reasoning: high"),
    (GPT_OSS, {"model_identity": "You are Ada"}, "You are Ada\n"),
    (GPT_OSS, {"builtin_tools": ["browser", "python"]}, "browser\npython\n"),
]


def text_of(tokenizer: Any, example: Example, **more: Any) -> tuple[str, PromptEncoder]:
    encoder = PromptEncoder(tokenizer, 2000, 100, **more)
    prompt = encoder.encode(example, 0)
    assert prompt is not None and prompt.inputs == encoder.inputs_of(example)
    return tokenizer.decode([*prompt.tokens, *(prompt.completion or ())]), encoder


@pytest.mark.parametrize(("template", "arguments", "shown"), SWITCHES)
def test_arguments_reach_the_template_from_the_config_and_from_rows(
    template: str, arguments: dict[str, Any], shown: str
) -> None:
    tokenizer = tiny_tokenizer(template)
    row = {"messages": [ASK]}
    own = {**row, "chat_template_kwargs": arguments}
    expected = tokenizer.apply_chat_template(
        [ASK], tokenize=False, add_generation_prompt=True, **arguments
    )
    plain, _ = text_of(tokenizer, to_example(row, Keys(), "row"))
    assert shown in expected and shown not in plain
    for given, more in ((own, {}), (row, {"arguments": arguments})):
        got, encoder = text_of(tokenizer, to_example(given, Keys(), "row"), **more)
        assert got == expected and not encoder.noted
    other = dict.fromkeys(arguments, "OTHER")  # a row's own win, name by name
    got, _ = text_of(tokenizer, to_example(own, Keys(), "row"), arguments=other)
    assert got == expected
    text, _ = text_of(tokenizer, Example("2+2?"), arguments=arguments)
    assert text == expected


def test_thoughts_of_earlier_turns_are_kept_where_the_template_is_asked_to() -> None:
    thought = {**FOUR, "reasoning_content": "hm"}
    chat = [ASK, thought, ASK, {**FOUR, "content": "5", "reasoning_content": "so"}]
    example = to_example({"messages": chat}, Keys(turns="all"), "row")
    for keep in (False, True):
        got, _ = text_of(tiny_tokenizer(QWEN3), example, arguments={"preserve_thinking": keep})
        assert ("<think>hm</think>" in got) == keep and "<think>so</think>5" in got


def test_an_argument_that_the_template_does_not_read_is_told() -> None:
    for template, name, hint in (
        (QWEN3, "enable_thinkin", "(did you mean enable_thinking?)"),
        (CHATML, "reasoning_effort", ""),
    ):
        for example, more in (
            (Example((ASK,)), {"arguments": {name: True}}),
            (Example((ASK,), inputs=TemplateInputs(arguments={name: True})), {}),
        ):
            _, encoder = text_of(tiny_tokenizer(template), example, **more)
            (note,) = encoder.noted.values()
            assert f"does not read its argument `{name}`" in note and hint in note


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_an_argument_that_a_rendering_sets_is_refused(name: str) -> None:
    keys = ["algorithm=sft", "student.model=x", "data.train=x.jsonl"]
    config = Config.load(None, [*keys, "data.chat_template_arguments.enable_thinking=false"])
    assert config.data.chat_template_arguments == {"enable_thinking": False}
    with pytest.raises(UserError, match=f"data.chat_template_arguments.*'{name}' is "):
        Config.load(None, [*keys, f"data.chat_template_arguments={{{name}: 1}}"])


def test_text_prompts_say_what_they_do_not_show() -> None:
    row = {"prompt": "q", "system": "S", "tools": [TOOL], "chat_template_kwargs": {"a": 1}}
    example = to_example(row, Keys(), "row")
    _, encoder = text_of(tiny_tokenizer(None), example)
    (note,) = encoder.noted.values()
    assert "shows no `tools` and no `system` and no `arguments`" in note
    shown, _ = text_of(tiny_tokenizer(CHATML), to_example(row, Keys(tools=None), "row"))
    assert shown.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nq<|im_end|>")


def test_a_marked_turn_is_context_between_learned_ones() -> None:
    """Prompt and completion spell the whole chat; the loss covers the other turns alone."""
    tokenizer = tiny_tokenizer(CHATML)
    words = ("one", "two", "three")
    for marked in range(3):
        turns = [{"role": "assistant", "content": word} for word in words]
        turns[marked]["train"] = False  # type: ignore[assignment]
        chat = [one for turn in turns for one in (ASK, turn)]
        example = to_example({"messages": chat}, Keys(turns="all"), "row")
        prompt = PromptEncoder(tokenizer, 2000, 500).encode(example, 0)
        assert prompt is not None and prompt.completion is not None
        at, learned, read = 0, "", tokenizer.decode(prompt.tokens)
        for turn in prompt.turns or ():
            part = tokenizer.decode(prompt.completion[at : at + turn.tokens])
            learned += part if turn.role == "assistant" else ""
            at, read = at + turn.tokens, read + part
        assert learned == "".join(f"{w}<|im_end|>" for w in words if w != words[marked])
        last = chat.index(turns[1 if marked == 2 else 2])
        whole = tokenizer.apply_chat_template(chat[: last + 1], tokenize=False)
        assert read == whole.rstrip("\n")
        assert all(turn.role != "environment" or is_learned(FOUR) for turn in prompt.turns)


def test_prompts_of_a_file_have_what_training_shows(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + QWEN3
    )
    own = {"system": "S", "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    rows = [{"messages": [ASK], **own}, {"prompt": "2+2?", **own}, {"prompt": "q"}]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared, trained = TemplateInputs(arguments={"enable_thinking": True}), []
    model = model_of(tokenizer)
    prompts, inputs = as_asked(model, read_prompts(["hi"], str(path)), True, shared)
    sampled = [encode_prompt(tokenizer, *pair) for pair in zip(prompts, inputs, strict=True)]
    encoder = PromptEncoder(tokenizer, 2000, 8, arguments={"enable_thinking": True})
    for row in [{"prompt": "hi"}, *rows]:
        trained.append(encoder.encode(to_example(row, Keys(), "row"), 0))
    assert sampled == [prompt.tokens for prompt in trained if prompt is not None]
    assert "[add]" in tokenizer.decode(sampled[1]) and "</think>" in tokenizer.decode(sampled[2])
    with pytest.raises(UserError, match="has no place for `tools`, `system`: --chat"):
        as_asked(model, read_prompts([], str(path)), False)
    with pytest.raises(UserError, match="no place for `chat template arguments`: --chat"):
        as_asked(model, read_prompts(["hi"], None), False, shared)


def model_of(tokenizer: Any, run: Path | None = None) -> Any:
    """A model that a run made, or none did, as far as prompts need it."""
    return SimpleNamespace(tokenizer=tokenizer, source=SimpleNamespace(name="m", run_config=run))


def test_a_model_of_a_run_is_asked_as_in_its_run(tmp_path: Path) -> None:
    """`generate` and the encoder of training make the same tokens of every prompt, whatever the
    run's keys; what is given comes before them."""
    tokenizer, off = tiny_tokenizer(QWEN3), {"enable_thinking": False}
    whole = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    asks = ["hi", whole, (ASK,), ({"role": "system", "content": "mine"}, ASK), "a<|im_end|>"]
    path = tmp_path / "config.yaml"
    for chat, rules, arguments in product(("auto", "raw"), (None, "S"), ({}, off)):
        keys = {"chat": chat, "system_prompt": rules, "chat_template_arguments": arguments}
        path.write_text(json.dumps({"data": {"train": "gone.jsonl", **keys}, "unknown": 1}))
        encoder = PromptEncoder(tokenizer, 2000, 8, (), rules, arguments, chat)
        trained = [encoder.encode(Example(prompt), 0) for prompt in asks]
        for given in (None, chat == "auto"):
            pairs = zip(*as_asked(model_of(tokenizer, path), asks, given), strict=True)
            assert [encode_prompt(tokenizer, *pair) for pair in pairs] == [
                prompt.tokens for prompt in trained if prompt is not None
            ]
    on = TemplateInputs(arguments={"enable_thinking": True})
    for chat, given in ((True, off), (True, {})):
        _, (read,) = as_asked(model_of(tokenizer, path), ["q"], chat, replace(on, arguments=given))
        assert read.arguments == off
    _, (read,) = as_asked(model_of(tokenizer, path), ["q"], True, on)
    assert read.arguments == on.arguments
    assert as_asked(model_of(tokenizer), ["q", [1, 2]])[0] == ["q", [1, 2]]
    with pytest.raises(UserError, match="the tokenizer of 'm' has no chat template"):
        as_asked(model_of(tiny_tokenizer(None)), ["q"], True)


def test_the_page_on_data_shows_the_table_of_columns() -> None:
    page = (Path(__file__).parent.parent.parent / "docs/data.md").read_text()
    lines = ["| column | in | means | key |", "|---|---|---|---|"]
    for column in COLUMNS:
        names = ", ".join(f"`{name}`" for name in column.names)
        key = "none" if column.key is None else f"`data.{column.key}`"
        lines.append(f"| {names} | {column.libraries} | {column.meaning} | {key} |")
    assert "\n".join(lines) in page
    fields = Config.model_fields["data"].annotation.model_fields  # type: ignore[union-attr]
    assert {column.key for column in COLUMNS if column.key} <= fields.keys()
    assert len(WORDS) == sum(len(column.names) for column in COLUMNS)


def test_columns_that_nothing_reads_are_named_or_counted() -> None:
    columns = ["prompt", "toolz", "sytem", "images", "solution", "level", "id", "source"]
    notes = unread_notes("data.train", columns, {"prompt", "level"}, "")
    assert len(notes) == 5
    for note, words in zip(
        notes,
        (
            "column `toolz`: nothing reads it (did you mean tools?)",
            "column `sytem`: nothing reads it (did you mean system?)",
            "column `images`: what is no text",
            "set data.answer_key=solution",
            "2 other columns are read by nothing: `id`, `source`",
        ),
        strict=True,
    ):
        assert words in note
    (note,) = unread_notes("data.train", ["id"], (), "reward functions")
    assert note == "data.train: 1 other column is passed to reward functions alone: `id`"
    assert not unread_notes("data.train", WORDS, WORDS, "")


def test_an_episode_goes_on_with_its_arguments() -> None:
    tokenizer = tiny_tokenizer(QWEN3)
    said, given = ({"role": "user", "content": "more"},), {"enable_thinking": False}
    plain, asked = (
        tokenizer.decode(
            TurnEncoder(tokenizer).after(said, eos=None, chat=True, inputs=TemplateInputs((), x))
        )
        for x in ({}, given)
    )
    assert asked == plain + "<think>\n\n</think>\n\n"
