"""Writes sums with their solution in brackets before them, one JSON object a line.

    python scripts/make_hints.py 20000 > runs/hints.jsonl

A model that is fine-tuned on them learns to use a solution that it is given; the solution of a sum
is then all that it needs to teach itself (configs/self_distill.yaml).
"""

from __future__ import annotations

import json
import sys

from jaxrl.data.arithmetic import Arithmetic

FIRST = 1_000_000
"""Examples from here on: others than those that the built-in models were trained on."""


def main(count: int) -> None:
    for example in Arithmetic().examples(count, start=FIRST):
        row = {
            "prompt": f"({example.completion}){example.prompt}",
            "completion": example.completion,
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main(int(sys.argv[1]))
