"""What opens and closes the thoughts of a turn, in every family's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

THOUGHTS = {
    **{f"<{word}>": f"</{word}>" for word in ("think", "thinking", "thought", "reasoning")},
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
"""What opens thoughts -> what closes them. gpt-oss has CHANNELS for them."""
CHANNELS = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
"""What messages of thoughts and, after them, of the answer begin with in gpt-oss."""
OPENS = re.compile("|".join(map(re.escape, THOUGHTS)))
CLOSES = re.compile("|".join(map(re.escape, THOUGHTS.values())))
_OPENING_TOKENS = 32
"""At the end of a prompt, in which a tag and line breaks are looked for."""


def opened_thoughts(prompt: str) -> str:
    """Finds what opens thoughts at the very end of a prompt, so that the turn begins in them;
    else ""."""
    opens = next(reversed(list(OPENS.finditer(prompt))), None)
    return "" if opens is None or prompt[opens.end() :].strip() else prompt[opens.start() :]


def opening_of(tokenizer: Any, tokens: Sequence[int] | np.ndarray) -> str:
    """Returns `opened_thoughts` of the text of a prompt's tokens, special ones included; "" without
    a tokenizer."""
    if tokenizer is None:
        return ""
    end = list(map(int, tokens[-_OPENING_TOKENS:]))
    return opened_thoughts(tokenizer.decode(end, skip_special_tokens=False))


def between_openings(
    tokenizer: Any, tokens: Sequence[int], opening: str, other: str
) -> tuple[str, Sequence[int]]:
    """Returns a completion as it stands behind another prompt: a text, and the tokens after it.

    Args:
        opening: of thoughts (`opening_of`), at the end of the prompt before the tokens.
        other: at the end of the other prompt. Where the completion has no thoughts, it closes
            them, as templates write empty ones.
    """

    def begins(length: int) -> str:
        return str(tokenizer.decode(list(tokens[:length]), skip_special_tokens=False))

    if opening == other:
        return "", tokens
    whole = opening + begins(_OPENING_TOKENS)
    tag = other if whole.startswith(other) else other.rstrip()
    if not whole.startswith(tag):
        space = other.removeprefix(tag)
        return f"{space}{THOUGHTS[tag]}{2 * space}{opening}", tokens
    if opening.startswith(tag):
        return opening.removeprefix(tag), tokens
    tag, at = tag.removeprefix(opening), 0
    while not begins(at).startswith(tag):
        at += 1
    return begins(at).removeprefix(tag), tokens[at:]


THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its thoughts, under the names that data and templates use."""
OTHER_THOUGHTS = ("thought", "thoughts", "reasoning_text", "reasoning_details")
"""Fields that some data have for thoughts, which only a template that names them renders."""
