"""One rendering of a chat: prompt and completion spell the template's own text of the whole, as
transformers renders it, with the chat templates of the model families."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cases import and_slow
from real_templates import CHATS, TOOL, templates, tokenizer_of
from transformers.utils.chat_template_utils import render_jinja_template

from jaxrl.data.prompt_encoder import PromptEncoder, TeacherPrompt
from jaxrl.data.rows import Keys, to_example
from jaxrl.data.thoughts import CLOSES, OPENS
from jaxrl.errors import UserError
from jaxrl.types import Prompt

Chat = Sequence[Mapping[str, Any]]
pytestmark = pytest.mark.skipif(not templates(), reason="the package trl, whose templates are read")


def in_form(chat: Chat, text: bool) -> list[dict[str, Any]]:
    """The chat with the arguments of its calls as objects, or as text."""
    changed: list[dict[str, Any]] = json.loads(json.dumps(chat))
    for message in changed:
        for one in message.get("tool_calls", ()):
            given = one["function"].get("arguments") or {}
            if text:
                given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            else:
                given = json.loads(given) if isinstance(given, str) else given
            one["function"]["arguments"] = given
    return changed


def whole(tokenizer: Any, chat: Chat, tools: Any, **more: Any) -> list[str]:
    """transformers' text of the chat with arguments as objects and as text, where the template
    takes them so and does not print an object as Python does."""
    found = []
    for text in (False, True):
        try:
            one = tokenizer.apply_chat_template(
                in_form(chat, text), tools=tools, tokenize=False, **more
            )
        except Exception:  # whatever a template raises
            continue
        if "{'city'" not in one and "{'t'" not in one and one not in found:
            found.append(one)
    return found


def spelt(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def encoded(tokenizer: Any, chat: Chat, tools: Any, turns: Any) -> Prompt:
    row = {"messages": chat, "tools": tools}
    example = to_example(row, Keys(tools="tools", turns=turns), "row")
    same = TeacherPrompt("{prompt}", 100_000)
    encoder = PromptEncoder(tokenizer, 100_000, 100_000, teacher=same)
    prompt = encoder.encode(example, 0)
    assert prompt is not None and prompt.teacher_generation_tokens is None
    for read in (prompt, prompt.to_sample):
        assert read.teacher_tokens == read.tokens, "the teacher reads another prompt"
    assert "turn by turn" not in encoder.noted, encoder.noted
    return prompt


def shown(tokenizer: Any, chat: Chat, tools: Any) -> list[str]:
    """The template's texts of a chat; none where it refuses the chat or leaves out its calls."""
    texts = whole(tokenizer, chat, tools)
    bare = [{k: v for k, v in one.items() if k != "tool_calls"} for one in chat]
    calls = any("tool_calls" in message for message in chat)
    return [] if calls and set(texts) & set(whole(tokenizer, bare, tools)) else texts


def learned_text(tokenizer: Any, prompt: Prompt) -> list[tuple[bool, str]]:
    """(learned, text) of each part of the completion."""
    if not prompt.turns:
        return [(True, spelt(tokenizer, prompt.completion or ()))]
    parts, at = [], 0
    for turn in prompt.turns:
        text = spelt(tokenizer, (prompt.completion or ())[at : at + turn.tokens])
        parts.append((turn.role == "assistant", text))
        at += turn.tokens
    assert at == len(prompt.completion or ())
    return parts


def check(name: str, chat: Chat, tools: Any, turns: Any) -> bool:
    """Holds a rendering against transformers'; returns False where the template has none."""
    tokenizer = tokenizer_of(name)
    texts, end = shown(tokenizer, chat, tools), tokenizer.eos_token
    if not texts:
        return False
    prompt = encoded(tokenizer, chat, tools, turns)
    parts = learned_text(tokenizer, prompt)
    begin = spelt(tokenizer, prompt.tokens)
    joined = begin + "".join(text for _, text in parts)
    text = next((one for one in texts if f"{one}{end}".startswith(joined)), None)
    assert text is not None, f"another text: {joined!r}, not of {texts}"
    behind = text[len(joined) :]
    for token in tokenizer.get_added_vocab():
        behind = behind.replace(token, "")
    assert not behind.strip(), f"cut: {behind!r}"
    assert joined.endswith(end) and parts[-1][0]
    # The tokens of the prompt are those that sampling begins with.
    first = [m["role"] for m in chat].index("assistant") if turns == "all" else len(chat) - 1
    heads = whole(tokenizer, chat[:first], tools, add_generation_prompt=True)
    sampled = spelt(tokenizer, prompt.to_sample.tokens)
    assert sampled in heads
    assert list(prompt.to_sample.tokens) == tokenizer(sampled, add_special_tokens=False).input_ids
    if text.startswith(sampled):
        assert prompt.tokens == prompt.to_sample.tokens
    elif chat[first - 1]["role"] != "assistant":  # some continue a turn without another header
        check_header(sampled, whole(tokenizer, chat[:first], tools), begin, joined[len(begin) :])
    # What is learned is what the assistant says, and nothing of what it hears.
    learned = "".join(one for trains, one in parts if trains)
    for message in chat[first:]:
        content = message["content"].rpartition("</think>")[2].strip()
        if message["role"] != "assistant":
            assert content not in learned, f"learns {content!r}"
        elif content and content in text[len(begin) :]:
            assert content in learned, f"does not learn {content!r}"
    if turns == "all" and "{% generation %}" in tokenizer.chat_template.replace("{%-", "{%"):
        check_marks(tokenizer, chat, tools, text, begin, parts)
    return True


def check_header(sampled: str, before: list[str], begin: str, rest: str) -> None:
    """The completion begins where the generation prompt ends: the prompt ends with the text that it
    has beyond the messages before it, or with the header of that, and the completion has neither
    the rest of that text nor of the header."""
    shared = max(len(os.path.commonprefix([sampled, one])) for one in before) if before else 0
    tail = sampled[shared:]
    if not tail or begin.endswith(tail):
        return
    header = re.match(r".*?(assistant|model|CHATBOT_TOKEN)(\|?>|<[^<>]*>)?", tail, re.S | re.I)
    assert header and header[0] in begin[-len(tail) :], f"{begin[-80:]!r} without {tail!r}"
    behind = begin[begin.rindex(header[0]) :]
    assert tail.startswith(behind), f"{behind!r} is more than {tail!r}"
    first = re.match(r"\s*(<[^<>]*>|\w+|\S)", tail[len(behind) :])
    learned = first is not None and rest.startswith(first[0])
    # A prompt may close the thoughts that it opens: those that a turn has are all its own.
    thinks = OPENS.match(rest) and CLOSES.search(tail)
    assert not learned or thinks, f"{tail!r} goes on in {rest[:80]!r}"


def check_marks(
    tokenizer: Any, chat: Chat, tools: Any, text: str, begin: str, parts: list[tuple[bool, str]]
) -> None:
    """What is learned is what the template marks, but for generation prompts, which the model never
    writes, and for what a template puts behind the token that ends a turn."""
    for as_text in (False, True):
        (again,), (marks,) = render_jinja_template(
            conversations=[in_form(chat, as_text)],
            tools=tools,
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        if again == text:
            break
    else:
        raise AssertionError("another text with marks")
    marked = {i for start, stop in marks for i in range(start, stop)}
    learned, at = set[int](), len(begin)
    for trains, part in parts:
        if trains:
            learned |= set(range(at, at + len(part)))
        at += len(part)
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)

    def bare(indices: set[int]) -> str:
        found = "".join(text[i] for i in sorted(indices) if i < len(text))
        for token in added:
            found = found.replace(token, "")
        return found.strip()

    assert not bare(learned - marked), "more than the marks but for end tokens"
    # Some templates mark the role's name in the header, which is of the generation prompt.
    headers = bare(marked - learned).replace("assistant", "").replace("model", "")
    assert not headers.strip(), f"marked, and not learned: {headers!r}"


REPORTED = list(CHATS)[:14]
"""The chats that have been reported; the usual ones are these and some of the others."""
USUAL = [*REPORTED, "call as other text", "same", "think in both", "calls and thoughts"]
USUAL += ["rounds", "rounds then more", "round, more, round"]
OTHERS = [name for name in CHATS if name not in USUAL]
SHARES = 9


@pytest.mark.parametrize("turns", ["last", "all"])
@pytest.mark.parametrize("share", and_slow([0], [*range(1, SHARES), None]))
def test_prompt_and_completion_spell_the_templates_text(turns: str, share: int | None) -> None:
    """The default suite renders a share of the usual chats with a template, those between with the
    next ones; None: the other chats."""
    counts: Counter[str] = Counter()
    for number, name in enumerate(templates()):
        for what in OTHERS if share is None else USUAL[(number + share) % SHARES :: SHARES]:
            chat, tools = CHATS[what]
            if turns == "all" and sum(one["role"] == "assistant" for one in chat) < 2:
                continue
            try:
                held = check(name, chat, [TOOL] if tools else None, turns)
                counts["right" if held else "not shown"] += 1
            except (UserError, AssertionError) as error:
                counts[f"{turns} {name} {what}: {type(error).__name__}: {error}"[:600]] += 1
    right, none = counts.pop("right"), counts.pop("not shown")
    print(f"completion_turns={turns}: {right} right, {none} chats that a template does not show")
    assert not counts, "\n".join(counts)
    assert right > (300 if share is None else 40)
