"""Writes sums with a hint in brackets before them, one JSON object a line.

    python scripts/make_hints.py runs/hints.jsonl             # the whole solution
    python scripts/make_hints.py runs/feedback.jsonl feedback # the correction of a wrong step

A model that is fine-tuned on them learns to use a hint that it is given; the hint for a sum is then
all that it needs to teach itself (configs/self_distill.yaml, configs/self_distill_feedback.yaml).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrl.data.arithmetic import Arithmetic, correction
from jaxrl.data.example import Example

FIRST, COUNT = 1_000_000, 20_000
"""The first sum, none of which the built-in models were trained on, and how many."""
KNOWN = 9_000
"""Sums that the built-in student was trained on; without feedback, as after a right attempt."""


def solutions() -> Iterator[tuple[str, Example]]:
    """Hints with their sums."""
    for example in map(Arithmetic().example, range(FIRST, FIRST + COUNT)):
        yield str(example.completion), example


def feedback() -> Iterator[tuple[str, Example]]:
    """What the verifier says of solutions with a wrong digit, and of right ones."""
    draw = random.Random(0)
    for example in map(Arithmetic().example, range(FIRST, FIRST + COUNT)):
        yield correction(str(example.prompt), misspelt(str(example.completion), draw)), example
    for example in map(Arithmetic().example, range(KNOWN)):
        yield "", example


def misspelt(text: str, draw: random.Random) -> str:
    """The text with one of its digits replaced by another."""
    at = draw.choice([i for i, letter in enumerate(text) if letter.isdigit()])
    return text[:at] + draw.choice("0123456789".replace(text[at], "")) + text[at + 1 :]


def main(path: Path, hints: Iterator[tuple[str, Example]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for hint, example in hints:
            row = {"prompt": f"({hint}){example.prompt}", "completion": example.completion}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), feedback() if sys.argv[2:] == ["feedback"] else solutions())
