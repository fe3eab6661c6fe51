"""Writes the prompts of `work.py`: short reasoning-gym questions in the model's chat template.

    python benchmarks/peers/prompts.py --model SmolLM2 --out prompts.jsonl

A row has `messages`, `text` (with the template applied) and `ids` (24 to 64 tokens).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.data.source import open_source
from jaxrl.data.tokenizer import as_messages, encode_prompt, load_tokenizer

TASKS = [f"reasoning_gym/{name}" for name in ("chain_sum", "basic_arithmetic", "gcd")]
SHORTEST, LONGEST = 24, 64


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("--model", required=True)
    told.add_argument("--out", type=Path, required=True)
    told.add_argument("--count", type=int, default=128)
    arguments = told.parse_args()
    tokenizer = load_tokenizer(resolve_model(arguments.model).tokenizer_path)
    source = open_source(TASKS)
    parts, rows, index = source.parts, [], 0
    while len(rows) < arguments.count:
        prompt = parts[index % len(parts)][index // len(parts)].prompt
        index += 1
        asked = as_messages(prompt) or ({"role": "user", "content": prompt},)
        messages = [{"role": "system", "content": "Answer briefly."}, *asked]
        ids = encode_prompt(tokenizer, tuple(messages))
        if SHORTEST <= len(ids) <= LONGEST:
            text = tokenizer.decode(list(ids), skip_special_tokens=False)
            rows.append({"messages": messages, "text": text, "ids": list(ids)})
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {arguments.out}: {len(rows)} prompts of {SHORTEST} to {LONGEST} tokens")


if __name__ == "__main__":
    main()
