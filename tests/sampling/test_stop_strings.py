"""Laws of stop strings: the same cut whatever the launches, in text with and without specials."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from jaxrl.data.tokenizer import decode_text
from jaxrl.sampling.partial_completion import find_stop, until_stop

TOKENIZER = tiny_tokenizer()
SPECIAL = 256


def in_launches(tokens: list[int], size: int, stop: tuple[str, ...]) -> tuple[int, str] | None:
    for end in range(size, len(tokens) + size, size):
        found = find_stop(TOKENIZER, tokens[:end], end - size, stop)
        if found is not None:
            return found
    return None


def by_brute_force(tokens: list[int], stop: tuple[str, ...]) -> tuple[int, str] | None:
    for end in range(1, len(tokens) + 1):
        text, whole = (decode_text(TOKENIZER, tokens[:end], special) for special in (False, True))
        if any(s in text or s in whole for s in stop):
            found = [text.index(s) for s in stop if s in text]
            return end, text[: min(found, default=len(text))]
    return None


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_the_cut_does_not_depend_on_the_launches(size: int, seed: int) -> None:
    # One to four bytes a character, special tokens in between: most tokens end no character.
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for _ in range(40):
        tokens += TOKENIZER(str(rng.choice(["a", "é", "漢", "🙂"])))["input_ids"]
        tokens += [SPECIAL] * int(rng.integers(0, 8) * (rng.random() < 0.3))
    for stop in (("aé漢",), ("🙂🙂", "漢漢a"), ("éa", "<|endoftext|>a"), ("<|endoftext|>🙂",)):
        assert in_launches(tokens, size, stop) == by_brute_force(tokens, stop)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("<answer>4</answer>", "<answer>4</answer>"),
        ("<answer>4</answer> or", "<answer>4</answer>"),
        ("4</answer>", "4"),
        ("<answer>4\nQ:</answer>", "<answer>4"),
    ],
)
def test_a_stop_string_that_closes_a_tag_belongs_to_the_text(said: str, text: str) -> None:
    assert until_stop(said, ("\nQ:", "</answer>")) == text


def test_a_stop_string_may_end_inside_a_token() -> None:
    tokenizer = tiny_tokenizer(merges=(("x", "y"), ("xy", "z")))
    tokens = tokenizer("abxyz")["input_ids"]
    assert len(tokens) == 3
    assert find_stop(tokenizer, tokens, 2, ("bx",)) == (3, "a")
    assert find_stop(tokenizer, tokens, 2, ("q",)) is None
