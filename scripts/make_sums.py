"""Writes sums for the configs that train on tools and on hints, one JSON object a line.

    python -m jaxrl.scripts.make_sums runs/calls.jsonl calls
    python -m jaxrl.scripts.make_sums runs/hints.jsonl hints
    python -m jaxrl.scripts.make_sums runs/feedback.jsonl feedback

`calls`: sums that are solved by a call of the calculator, and sums that are solved alone. A model
that is fine-tuned on them knows how to call the calculator and how to read its answer, and seldom
does unless a sum begins with `?` (configs/tools_warmup.yaml); that it should, it learns from
rewards (configs/tools_gspo.yaml).

`hints`, `feedback`: sums with a hint in brackets before them, the whole solution or corrections of
wrong steps. A model that is fine-tuned on them learns to use a hint that it is given; the hint for
a sum is then all that it needs to teach itself (configs/self_distill.yaml,
configs/self_distill_feedback.yaml).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from jaxrl.config import cli
from jaxrl.data.tasks import Arithmetic, correction
from jaxrl.errors import UserError, user_path

NUMBERS = range(1_000_000, 1_020_000)
"""Of sums that the built-in models were not trained on."""
KNOWN = 9_000
"""Sums that the built-in student was trained on; without feedback, as after a right attempt."""
CALLS = 0.1
"""Share of the sums without `?` that are solved by a call."""
END = "</s>"
"""What ends a turn of the built-in models."""
Pairs = Iterator[tuple[str, str]]
"""Prompts and their completions."""


def calls() -> Pairs:
    """Yields sums to solve by a call, sums without one, and answers of the calculator to read."""
    draw = random.Random(0)
    for example in map(Arithmetic(digits=4, terms=2).example, NUMBERS):
        asked, answer = str(example.prompt), str(example.answer)
        call = f"({asked.rstrip('=')})"
        yield f"?{asked}", call
        yield asked, call if draw.random() < CALLS else answer
        yield f"{asked}{call}{END}{answer}", answer


def hints() -> Pairs:
    """Yields sums behind their solutions."""
    for example in map(Arithmetic().example, NUMBERS):
        yield f"({example.completion}){example.prompt}", str(example.completion)


def feedback() -> Pairs:
    """Yields sums behind what the verifier says of solutions with a wrong digit, and of right
    ones."""
    draw = random.Random(0)
    for example in map(Arithmetic().example, NUMBERS):
        text = str(example.completion)
        at = draw.choice([i for i, letter in enumerate(text) if letter.isdigit()])
        wrong = text[:at] + draw.choice("0123456789".replace(text[at], "")) + text[at + 1 :]
        yield f"({correction(str(example.prompt), wrong)}){example.prompt}", text
    for example in map(Arithmetic().example, range(KNOWN)):
        yield f"(){example.prompt}", str(example.completion)


KINDS = {"calls": calls, "hints": hints, "feedback": feedback}


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_sums", __doc__ or "")
    parser.add_argument("file", metavar="FILE.jsonl", help="written, as in runs/calls.jsonl")
    parser.add_argument("kind", choices=KINDS, help="which sums")
    arguments = parser.parse(argv)
    path = user_path(arguments.file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for prompt, completion in KINDS[arguments.kind]():
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.exit_process(cli.run(main))
