"""Chats in which a word stands wherever a message has text, and what becomes of them as tokens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.data.prompt_encoder import PromptEncoder
from jaxrl.data.rows import Keys, to_example
from jaxrl.errors import UserError

WORD = "plainword"
"""What stands in for the spelling of a token; no template writes it."""
FORMS = ("{}", "{} b", "a {}", "a {} b", "a{}b", "{0}{0}", "a\n{}\nb", "{0} a {0}")
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


def chats(text: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields a place and a chat that has the text there."""
    ask, says = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}

    def call(arguments: object) -> dict[str, Any]:
        function = {"name": "look", "arguments": arguments}
        calls = [{"type": "function", "id": "call00001", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    hears = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "rain"}
    yield "user", [{**ask, "content": text}, says]
    yield "system", [{"role": "system", "content": text}, ask, says]
    yield "assistant", [ask, {**says, "content": text}]
    yield "earlier turn", [ask, {**says, "content": text}, ask, says]
    yield "thoughts", [ask, {**says, "reasoning_content": text}]
    yield "thoughts in content", [ask, {**says, "content": f"<think>\n{text}\n</think>\n\nfour"}]
    yield "arguments", [ask, call({"q": text}), hears, says]
    yield "last arguments", [ask, call({"q": text})]
    yield "arguments as text", [ask, call(json.dumps({"q": text}, ensure_ascii=False)), hears, says]
    yield "answer of a tool", [ask, call({"q": "x"}), {**hears, "content": text}, says]


def spelt(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def encoded(
    tokenizer: Any, chat: Sequence[Mapping[str, Any]], names: Sequence[str], turns: Any = "all"
) -> tuple[list[tuple[str, str]], Counter[int]]:
    """Returns the prompt's text and (role, text) of each turn, and how often each of the named
    tokens stands in them."""
    row = {"messages": chat, "tools": [LOOK] if any("tool_calls" in m for m in chat) else None}
    example = to_example(row, Keys(tools="tools", turns=turns), "row")
    prompt = PromptEncoder(tokenizer, 100_000, 100_000).encode(example, 0)
    assert prompt is not None and prompt.completion is not None
    parts, at = [("prompt", spelt(tokenizer, prompt.tokens))], 0
    for role, length in [(t.role, t.tokens) for t in prompt.turns] or [("assistant", None)]:
        end = len(prompt.completion) if length is None else at + length
        parts.append((role, spelt(tokenizer, prompt.completion[at:end])))
        at = end
    ids = set(tokenizer.convert_tokens_to_ids(list(names)))
    whole = (*prompt.tokens, *prompt.completion, -1, *prompt.to_sample.tokens)
    return parts, Counter(token for token in whole if token in ids)


def faults(
    tokenizer: Any, names: Sequence[str], forms: Sequence[str], spellings: Sequence[str]
) -> Iterator[str]:
    """Yields each place where a text that spells some of the tokens of the turns does not stay
    text: there are other tokens of the turns than with a plain word in its place, it is not given
    back, or other parts are learned."""
    for form in forms:
        plain = dict(chats(form.format(WORD)))
        for place, chat in plain.items():
            try:
                parts, count = encoded(tokenizer, chat, names)
            except UserError:
                continue  # the template has no such messages
            for name in spellings:
                spelling = dict(chats(form.format(name)))[place]
                wanted = [(role, text.replace(WORD, name)) for role, text in parts]
                try:
                    got, found = encoded(tokenizer, spelling, names)
                except UserError as error:
                    yield f"{place} {form!r} {name}: {error}"
                    continue
                if found != count:
                    yield f"{place} {form!r} {name}: {found - count} more, {count - found} fewer"
                elif got != wanted:
                    yield f"{place} {form!r} {name}: {got}, not {wanted}"
