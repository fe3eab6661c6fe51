"""docs/chat-templates.md shows texts as the code makes them.

`python -m pytest tests/data/test_chat_templates_page.py` says how the page differs; the texts of
`texts()` are what it should have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chat_shapes import (
    ASK,
    ENDS,
    FORMS,
    MARKS,
    NO_THOUGHTS,
    OPENS,
    THINKS,
    called,
    encoded,
    spelt,
    tokenizer_of,
)
from tiny_tokenizer import CHATML

PAGE = Path(__file__).parents[2] / "docs" / "chat-templates.md"
FOUR = {"role": "assistant", "content": "4"}
SO = {**FOUR, "reasoning_content": "two and two"}
MORE = {"role": "user", "content": "and 3+3?"}
SIX = {"role": "assistant", "content": "6", "reasoning_content": "three and three"}


def marked(template: str, *chat: dict[str, Any], turns: str = "last") -> str:
    """The text of a chat with what is learned between brackets."""
    tokenizer = tokenizer_of(template)
    prompt = encoded(tokenizer, {"messages": list(chat)}, turns=turns)
    text, at = spelt(tokenizer, prompt.tokens), 0
    tokens = prompt.completion or ()
    parts = [(turn.role == "assistant", turn.tokens) for turn in prompt.turns]
    for learned, length in parts or [(True, len(tokens))]:
        part = spelt(tokenizer, tokens[at : at + length])
        text, at = text + (f"⟦{part}⟧" if learned else part), at + length
    return text


def texts() -> dict[str, str]:
    breaks = {**FOUR, "content": "\n4\n"}
    return {
        "plain": marked(CHATML, ASK, FOUR),
        "line breaks": marked(CHATML, ASK, breaks),
        "thoughts": marked(THINKS, ASK, SO),
        "no thoughts": marked(THINKS, ASK, FOUR),
        "opened": marked(OPENS, ASK, FOUR),
        "parted": marked(NO_THOUGHTS, ASK, FOUR),
        "last": marked(THINKS, ASK, SO, MORE, SIX),
        "all": marked(ENDS, ASK, FOUR, MORE, SIX, turns="all"),
        "marks": marked(MARKS, ASK, FOUR, MORE, SIX, turns="all"),
        "spelled": marked(CHATML, ASK, {**FOUR, "content": "It ends with <|im_end|> here."}),
    }


def arguments() -> list[str]:
    """Rows of the page's table."""
    kinds = {
        "objects": "takes objects (most families)",
        "both": "takes both (Qwen3)",
        "texts": "joins texts (DeepSeek R1)",
        "printed": "prints what it gets",
    }
    rows = []
    for form, kind in kinds.items():
        for given in ('{"t":1.50}', {"t": 1.5}, None):
            tokenizer = tokenizer_of(THINKS, FORMS[form])
            prompt = encoded(tokenizer, {"messages": [ASK, called(given)]})
            found = re.search("<tool_call>w (.*)</tool_call>", spelt(tokenizer, prompt.completion))
            assert found is not None
            has = f"the text `{given}`" if isinstance(given, str) else f"`{given}`"
            has = has.replace("'", '"').replace("None", "null")
            rows.append(f"| {kind} | {has} | `{found[1]}` |")
    return rows


def page() -> str:
    """The page with the texts that the code makes."""
    text = PAGE.read_text(encoding="utf-8")
    for name, shown in texts().items():
        block = rf"(<!-- {name} -->\n```text\n).*?(```\n)"
        found = re.search(block, text, re.DOTALL)
        assert found is not None, name
        text = text.replace(found[0], f"{found[1]}{shown}\n{found[2]}")
    table = r"(\|---\|---\|---\|\n)(?:\|.*\n)*(<!-- arguments -->)"
    rows = "".join(f"{row}\n" for row in arguments())
    return re.sub(table, lambda m: m[1] + rows + m[2], text)


def test_the_page_shows_what_is_learned() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("name", ["plain", "opened", "all"])
def test_the_texts_have_prompt_and_completion(name: str) -> None:
    before, open_, after = texts()[name].partition("⟦")
    assert open_ and before.startswith("<|im_start|>user") and "⟧" in after
