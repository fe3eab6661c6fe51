"""Prompts of a teacher that tell it about an attempt: the completion itself, and what the reward
functions said of it (self-distillation with feedback, SDPO, arXiv 2601.20802)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxrl.data.tokenizer import PromptLike, Tokenizer, as_messages, encode_prompt
from jaxrl.types import Prompt, Rollout

LATE = ("feedback", "attempt")
"""Names in `teacher.prompt` that are known once a completion is judged."""
PLACES = {name: f"\0{name}\0" for name in LATE}
"""Name -> what stands for it in `Prompt.teacher_prompt`."""
_PLACE = re.compile(f"\0({'|'.join(LATE)})\0")


def with_feedback(
    rollout: Rollout, messages: Sequence[str], tokenizer: Tokenizer, max_tokens: int
) -> tuple[Rollout, int]:
    """Returns the rollout with a teacher's prompt for each completion, and how many of these
    prompts were cut.

    Args:
        messages: of the reward functions, one for each completion.
        max_tokens: longest prompt of the teacher; feedback and attempt lose their ends, the longer
            one first, where it would be longer.
    """
    prompts, cut = [], 0
    rows = zip(rollout.prompts, rollout.completions, messages, strict=True)
    for prompt, completion, message in rows:
        texts = {"feedback": message, "attempt": completion.text}
        tokens, whole = _fitted(prompt, texts, tokenizer, max_tokens)
        prompts.append(replace(prompt, teacher_tokens=tokens))
        cut += not whole
    return replace(rollout, prompts=tuple(prompts)), cut


def filled(prompt: PromptLike, texts: Mapping[str, str]) -> PromptLike:
    """Fills a prompt with texts in place of `PLACES`."""
    chat = as_messages(prompt)
    if chat is not None:
        return tuple({**turn, "content": _replaced(turn["content"], texts)} for turn in chat)
    assert isinstance(prompt, str)
    return _replaced(prompt, texts)


def _replaced(text: str, texts: Mapping[str, str]) -> str:
    """Replaces the places in one pass, so that nothing within a text is replaced."""
    return _PLACE.sub(lambda place: texts[place[1]], text)


def _fitted(
    prompt: Prompt, texts: Mapping[str, str], tokenizer: Tokenizer, max_tokens: int
) -> tuple[tuple[int, ...], bool]:
    """Returns the tokens, and whether they hold all of the texts. The longest texts keep equally
    many characters, as many as fit."""
    assert prompt.teacher_prompt is not None

    def tokens(most: int) -> tuple[int, ...]:
        short = {name: text[:most] for name, text in texts.items()}
        return encode_prompt(tokenizer, filled(prompt.teacher_prompt or "", short))

    most = max(map(len, texts.values()))
    found = tokens(most)
    if len(found) <= max_tokens:
        return found, True
    fits = 0  # without feedback and attempt it fits: else the row was left out
    while most - fits > 1:
        middle = (fits + most) // 2
        if len(tokens(middle)) <= max_tokens:
            fits = middle
        else:
            most = middle
    return tokens(fits), False
