"""Writes sums with a hint in brackets before them, one JSON object a line.

    python -m jaxrl.scripts.make_hints runs/hints.jsonl  # the whole solution
    python -m jaxrl.scripts.make_hints runs/feedback.jsonl feedback  # corrections of wrong steps

A model that is fine-tuned on them learns to use a hint that it is given; the hint for a sum is then
all that it needs to teach itself (configs/self_distill.yaml, configs/self_distill_feedback.yaml).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from jaxrl.config import cli
from jaxrl.data.example import Example
from jaxrl.data.tasks import Arithmetic, correction
from jaxrl.errors import user_path

FIRST, COUNT = 1_000_000, 20_000
"""The first sum, none of which the built-in models were trained on, and how many."""
KNOWN = 9_000
"""Sums that the built-in student was trained on; without feedback, as after a right attempt."""


def solutions() -> Iterator[tuple[str, Example]]:
    """Yields solutions as hints, with their sums."""
    for example in map(Arithmetic().example, range(FIRST, FIRST + COUNT)):
        yield str(example.completion), example


def feedback() -> Iterator[tuple[str, Example]]:
    """Yields what the verifier says of solutions with a wrong digit, and of right ones."""
    draw = random.Random(0)
    for example in map(Arithmetic().example, range(FIRST, FIRST + COUNT)):
        yield correction(str(example.prompt), misspelt(str(example.completion), draw)), example
    for example in map(Arithmetic().example, range(KNOWN)):
        yield "", example


def misspelt(text: str, draw: random.Random) -> str:
    """Returns the text with one of its digits replaced by another."""
    at = draw.choice([i for i, letter in enumerate(text) if letter.isdigit()])
    return text[:at] + draw.choice("0123456789".replace(text[at], "")) + text[at + 1 :]


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_hints", __doc__ or "")
    parser.add_argument("file", metavar="FILE.jsonl", help="written, as in runs/hints.jsonl")
    parser.add_argument(
        "hint",
        nargs="?",
        choices=("solution", "feedback"),
        default="solution",
        help="the whole solution of a sum (the default), or the correction of a wrong step",
    )
    arguments = parser.parse(argv)
    path = user_path(arguments.file)
    hints = feedback() if arguments.hint == "feedback" else solutions()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for hint, example in hints:
            row = {"prompt": f"({hint}){example.prompt}", "completion": example.completion}
            file.write(json.dumps(row) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.leave(cli.run(main))
