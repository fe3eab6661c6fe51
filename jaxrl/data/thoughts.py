"""A model's thoughts in its text: the tags that families put round them, and what follows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

THOUGHTS = {
    **{f"<{word}>": f"</{word}>" for word in ("think", "thinking", "thought", "reasoning")},
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
}
"""What opens thoughts -> what closes them. gpt-oss has messages of their own for them."""
OPENS = re.compile("|".join(map(re.escape, THOUGHTS)))
CLOSES = re.compile("|".join(map(re.escape, THOUGHTS.values())))
_OPENING_TOKENS = 32
"""At the end of a prompt, in which a tag and line breaks are looked for."""


def opened_thoughts(prompt: str) -> str:
    """Returns what opens thoughts at the very end of a prompt, so that the turn begins in them;
    else ""."""
    opens = next(reversed(list(OPENS.finditer(prompt))), None)
    return "" if opens is None or prompt[opens.end() :].strip() else prompt[opens.start() :]


def opening_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns `opened_thoughts` of the text of a prompt's tokens, special ones included."""
    end = list(tokens[-_OPENING_TOKENS:])
    return opened_thoughts(tokenizer.decode(end, skip_special_tokens=False))


def after_thoughts(turn: str) -> str | None:
    """Returns the text behind the last thoughts of a turn, or all of it without any; stripped.

    None where the thoughts are not closed: there is no answer.

    Args:
        turn: with what its prompt has opened (`opened_thoughts`) in front.
    """
    closes = next(reversed(list(CLOSES.finditer(turn))), None)
    answer = turn if closes is None else turn[closes.end() :]
    return None if OPENS.search(answer) else answer.strip()
