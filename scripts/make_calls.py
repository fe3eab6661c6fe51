"""Writes sums that are solved by a call of the calculator, and sums that are solved alone, one JSON
object a line.

    python -m jaxrl.scripts.make_calls runs/calls.jsonl

A model that is fine-tuned on them knows how to call the calculator and how to read its answer, and
seldom does unless a sum begins with `?` (configs/tools_warmup.yaml); that it should, it learns from
rewards (configs/tools_gspo.yaml).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from jaxrl.config import cli
from jaxrl.data.tasks import Arithmetic
from jaxrl.errors import user_path

FIRST, COUNT = 1_000_000, 20_000
"""The first sum, none of which the built-in models were trained on, and how many."""
CALLS = 0.1
"""Share of the sums without `?` that are solved by a call."""
END = "</s>"
"""What ends a turn of the built-in models."""


def rows() -> Iterator[dict[str, str]]:
    """Yields `prompt` and `completion` of each row."""
    draw = random.Random(0)
    for example in map(Arithmetic(digits=4, terms=2).example, range(FIRST, FIRST + COUNT)):
        asked, answer = str(example.prompt), str(example.answer)
        call = f"({asked.rstrip('=')})"
        yield {"prompt": f"?{asked}", "completion": call}
        yield {"prompt": asked, "completion": call if draw.random() < CALLS else answer}
        yield {"prompt": f"{asked}{call}{END}{answer}", "completion": answer}


def main(argv: Sequence[str]) -> None:
    parser = cli.Parser("jaxrl.scripts.make_calls", __doc__ or "")
    parser.add_argument("file", metavar="FILE.jsonl", help="written, as in runs/calls.jsonl")
    path = user_path(parser.parse(argv).file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows():
            file.write(json.dumps(row) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    cli.leave(cli.run(main))
