"""Writes sums that are solved by a call of the calculator, and sums that are solved alone, one JSON
object a line.

    python scripts/make_calls.py runs/calls.jsonl

A model that is fine-tuned on them knows how to call the calculator and how to read its answer, and
seldom does unless a sum begins with `?` (configs/tools_warmup.yaml); that it should, it learns from
rewards (configs/tools_gspo.yaml).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxrl.data.arithmetic import Arithmetic

FIRST, COUNT = 1_000_000, 20_000
"""The first sum, none of which the built-in models were trained on, and how many."""
CALLS = 0.1
"""Share of the sums without `?` that are solved by a call."""
END = "</s>"
"""What ends a turn of the built-in models."""


def rows() -> Iterator[dict[str, str]]:
    draw = random.Random(0)
    for example in map(Arithmetic(digits=4, terms=2).example, range(FIRST, FIRST + COUNT)):
        asked, answer = str(example.prompt), str(example.answer)
        call = f"({asked.rstrip('=')})"
        yield {"prompt": f"?{asked}", "completion": call}
        yield {"prompt": asked, "completion": call if draw.random() < CALLS else answer}
        yield {"prompt": f"{asked}{call}{END}{answer}", "completion": answer}


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows():
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
