"""Writes sums with their solution in brackets before them, one JSON object a line.

    python scripts/make_hints.py runs/hints.jsonl

A model that is fine-tuned on them learns to use a solution that it is given; the solution of a sum
is then all that it needs to teach itself (configs/self_distill.yaml).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxrl.data.arithmetic import Arithmetic

FIRST, COUNT = 1_000_000, 20_000
"""The first example, none of which the built-in models were trained on, and how many."""


def main(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for example in Arithmetic().examples(COUNT, start=FIRST):
            hinted = f"({example.completion}){example.prompt}"
            file.write(json.dumps({"prompt": hinted, "completion": example.completion}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
