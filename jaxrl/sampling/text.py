"""Text of completions, and where a stop string ends one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class TextTokenizer(Protocol):
    """What sampling needs of a tokenizer."""

    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...


def decode(tokenizer: TextTokenizer | None, tokens: Sequence[int], special: bool = False) -> str:
    """Returns the text of tokens, special ones left out unless asked for; empty without a
    tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode(list(tokens), skip_special_tokens=not special)


def find_stop(
    tokenizer: TextTokenizer | None, tokens: Sequence[int], before: int, stop: Sequence[str]
) -> tuple[int, str] | None:
    """Finds where one of the tokens from `before` on completes a stop string.

    A stop string counts in the text with special tokens and in the text without them.

    Args:
        tokens: of the completion, without EOS.
        before: tokens that were searched already.

    Returns:
        How many tokens the completion keeps, the last of which completes the stop string, and its
        text before the stop string; None where there is none.
    """
    if not stop:
        return None
    start = _tail(tokenizer, tokens[:before], max(map(len, stop)))

    def holds(end: int) -> bool:
        tails = (decode(tokenizer, tokens[start:end], special) for special in (False, True))
        return any(s in tail for tail in tails for s in stop)

    if not holds(len(tokens)):
        return None
    end = next(end for end in range(before + 1, len(tokens) + 1) if holds(end))
    return end, before_stop(decode(tokenizer, tokens[:end]), stop)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Returns the text before the first stop string; all of it where it has none."""
    starts = [start for start in (text.find(s) for s in stop) if start >= 0]
    return text[: min(starts, default=None)]


def _tail(tokenizer: TextTokenizer | None, tokens: Sequence[int], length: int) -> int:
    """Finds the start of a tail of tokens whose text is at least `length` characters long.

    Four more, since up to three at its left edge may be the halves of one that was split.
    """
    width = length + 4
    while width < len(tokens):
        if len(decode(tokenizer, tokens[len(tokens) - width :])) >= length + 4:
            return len(tokens) - width
        width *= 2
    return 0
