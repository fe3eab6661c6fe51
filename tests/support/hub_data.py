"""Small data sets in the layouts and with the columns of well-known ones, for a hub."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hub_server import Hub

GSM8K = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Grade school math
"""
ULTRACHAT = """---
configs:
- config_name: default
  data_files:
  - split: train_sft
    path: data/train_sft-*
  - split: test_sft
    path: data/test_sft-*
---
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


def gsm8k_rows(first: int, n: int) -> list[dict[str, str]]:
    each = range(first, first + n)
    return [
        {"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in each
    ]


def math_rows(n: int) -> list[dict[str, Any]]:
    return [
        {
            "problem": f"Compute {i} + 2.",
            "solution": f"We get \\boxed{{{i + 2}}}.",
            "answer": str(i + 2),
            "level": 1,
        }
        for i in range(n)
    ]


def chat_rows(n: int) -> list[dict[str, Any]]:
    """With a column `prompt` beside the chat, as UltraChat has it."""
    turns = ("user", "assistant", "user", "assistant")
    return [
        {
            "prompt": f"hello {i}",
            "prompt_id": str(i),
            "messages": [
                {"content": f"{role} {i}.{j}", "role": role} for j, role in enumerate(turns)
            ],
        }
        for i in range(n)
    ]


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def add_data(hub: Hub) -> None:
    """`openai/gsm8k`, `HuggingFaceH4/MATH-500`, `DigitalLearningGmbH/MATH-lighteval` and
    `HuggingFaceH4/ultrachat_200k`, in little."""
    hub.add(
        "datasets/openai/gsm8k",
        {
            "README.md": GSM8K,
            "main/train-00000-of-00002.parquet": parquet(gsm8k_rows(0, 5)),
            "main/train-00001-of-00002.parquet": parquet(gsm8k_rows(5, 3)),
            "main/test-00000-of-00001.parquet": parquet(gsm8k_rows(100, 4)),
            "socratic/train-00000-of-00001.parquet": parquet(gsm8k_rows(200, 2)),
        },
    )
    hub.add("datasets/HuggingFaceH4/MATH-500", {"test.jsonl": jsonl(math_rows(6))})
    shard = "data/train-00000-of-00001.parquet"
    hub.add("datasets/DigitalLearningGmbH/MATH-lighteval", {shard: parquet(math_rows(7))})
    hub.add(
        "datasets/HuggingFaceH4/ultrachat_200k",
        {
            "README.md": ULTRACHAT,
            "data/train_sft-00000-of-00001.parquet": parquet(chat_rows(6)),
            "data/test_sft-00000-of-00001.parquet": parquet(chat_rows(4)),
        },
    )
