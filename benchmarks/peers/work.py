"""The work that every library is given, and how it is reported. Standard library only.

distill  one on-policy step: BATCH prompts, left-padded to at most WIDTH tokens, NEW sampled tokens
         each at temperature 1 (no completion may stop early: the token count is checked), teacher
         and student forward over prompt and completion, generalised JSD on the completion, AdamW.
sampler  SAMPLER_BATCH prompts left-padded to WIDTH, NEW tokens each, temperature 1, no truncation.
heavy    HEAVY_COUNT prompts whose completions have log-normal lengths, cut at HEAVY_MAX. A library
         that refills slots may; one that does not runs batches of SAMPLER_BATCH, each until its
         longest completion has ended. Tokens are those of the lengths, in both.
gspo     one step of learning from rewards: GSPO[0] prompts with GSPO[1] completions each, NEW
         tokens at temperature 1 (again checked); reward `digits`; GSPO, which with one update for a
         batch clips nothing; no reference; AdamW.
distill-tail, gspo-tail
         the same steps with completions of `tail_lengths`: most are short, the mean is 30% of the
         longest, TAIL_MAX. A library that pads, and so computes every completion up to the longest,
         draws TAIL_MAX tokens of each: that is the work it does.
jsd      JSD[0] tokens, both heads of JSD[2] x JSD[1]: logits, loss, gradients by the student's
         hidden states and head.

float32, BETA. Prompts: a JSON Lines file; each row has `messages`, `text` (with the chat template
applied) and `ids` (its tokens, at most WIDTH).
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, WIDTH, NEW = 8, 64, 64
SAMPLER_BATCH = 16
HEAVY_COUNT, HEAVY_MAX = 64, 192
TAIL_MAX, TAIL_MEAN = 128, 0.3
JSD = 1024, 576, 49152
GSPO = 4, 4
GSPO_CLIP = 3e-4, 4e-4
BETA = 0.5


def prompts(file: str | Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    wrong = [len(row["ids"]) for row in rows if not 0 < len(row["ids"]) <= WIDTH]
    if wrong:
        raise SystemExit(f"{file}: prompts of {wrong} tokens; allowed: 1 to {WIDTH}")
    return rows


def batch(rows: list[Any], index: int, size: int) -> list[Any]:
    """Batch `index`; the rows begin anew at their end."""
    return [rows[(index * size + j) % len(rows)] for j in range(size)]


def heavy_lengths() -> list[int]:
    """Tokens of each completion; mean about a quarter of the longest."""
    draw = random.Random(0)
    mean = math.log(HEAVY_MAX) - 1.6
    return [min(max(int(draw.lognormvariate(mean, 0.8)), 4), HEAVY_MAX) for _ in range(HEAVY_COUNT)]


def heavy_batches() -> list[int]:
    """Steps of each batch of a library without refill: its longest completion."""
    lengths = heavy_lengths()
    return [max(lengths[i : i + SAMPLER_BATCH]) for i in range(0, len(lengths), SAMPLER_BATCH)]


def new_tokens(what: str) -> int:
    """Of the longest completion of a step."""
    return TAIL_MAX if what.endswith("-tail") else NEW


def trained_tokens(what: str) -> int:
    """Of all completions of a step."""
    size = BATCH if what.startswith("distill") else math.prod(GSPO)
    return sum(tail_lengths(0, size)) if what.endswith("-tail") else size * NEW


def drawn_of(what: str, drawn: int) -> int:
    """Tokens to report of a step in which a library that pads drew so many: all of them, or with a
    tail those of the lengths, where each completion has TAIL_MAX."""
    size = BATCH if what.startswith("distill") else math.prod(GSPO)
    return trained_tokens(what) if drawn == size * new_tokens(what) else drawn


def tail_lengths(index: int, size: int) -> list[int]:
    """Tokens of each completion of step `index`: the quantiles of TAIL_MAX u^k for uniform u, whose
    mean is TAIL_MEAN, in an order of the step's own; the last one is TAIL_MAX."""
    power = 1 / TAIL_MEAN - 1
    lengths = [round(TAIL_MAX * ((i + 0.5) / size) ** power) for i in range(size - 1)]
    lengths = [max(1, n) for n in lengths] + [TAIL_MAX]
    random.Random(index).shuffle(lengths)
    return lengths


def digits(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within a group: how many digits there are, ten at most, over ten.

    Args:
        completions: texts, or chats of which the last message counts.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [min(len(re.findall(r"\d", text)), 10) / 10 for text in texts]


def timed(run: Callable[[int], int], repeats: int, warm: int = 1) -> dict[str, list[Any]]:
    """Seconds and tokens of run(0), run(1), ...; the first `warm` are left out."""
    seconds, tokens = [], []
    for i in range(warm + repeats):
        begin = time.perf_counter()
        tokens.append(run(i))
        seconds.append(time.perf_counter() - begin)
    return {"seconds": seconds[warm:], "tokens": tokens[warm:]}


def line(library: str, what: str, **more: Any) -> str:
    told = {
        "library": library,
        "what": what,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }
    return json.dumps(told | more, default=str)
