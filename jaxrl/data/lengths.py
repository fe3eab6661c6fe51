"""How long prompts and completions of data are, and how many of them a limit cuts, before a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import numpy as np

from jaxrl.process.json_types import JsonObject

SAMPLE_ROWS = 1000
"""Most rows of a source whose lengths are measured where all would have to be made or rendered."""
SAMPLE_S = 2.0
"""Seconds after which that ends, with however many rows it has."""
TOLERATED = 0.01
"""Share of texts above the limit from which on a line warns; the limit that it names leaves as much
above it."""
KEYS = {"prompts": "max_prompt_tokens", "completions": "max_new_tokens"}


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of the prompts, or of the data's completions, of one source."""

    source: str
    """As in `data.train: sums.jsonl`, `data.eval.math`."""
    of: Literal["prompts", "completions"]
    tokens: np.ndarray
    """[n] int, n > 0: whatever the limit; of prompts with all that stands before them, of
    completions with what ends them."""
    limit: int
    rows: int | None
    """That the source has; more than n where a sample in the run's order was measured. None: it
    makes them on demand."""
    left_out: bool = False
    """Longer ones are left out, not cut."""

    @property
    def longer(self) -> float:
        """Returns the share above the limit."""
        return float(np.mean(self.tokens > self.limit))

    @property
    def sufficient(self) -> int:
        """Returns the smallest limit that all but `TOLERATED` are within."""
        return int(np.quantile(self.tokens, 1 - TOLERATED, method="inverted_cdf"))

    def to_json(self) -> JsonObject:
        """Returns what `--dry-run --json` and `plan.json` hold; `longer` is a share, all lengths
        are tokens."""
        return {
            "source": self.source,
            "of": self.of,
            "measured": len(self.tokens),
            "rows": self.rows,
            "mean": float(np.mean(self.tokens)),
            "p90": float(np.percentile(self.tokens, 90)),
            "max": int(np.max(self.tokens)),
            "limit": self.limit,
            "longer": self.longer,
            "limit_for_99_percent": self.sufficient,
        }

    def notes(self) -> list[str]:
        """Returns a line of figures and, where more than `TOLERATED` are too long, a warning."""
        n, key, found = len(self.tokens), KEYS[self.of], self.to_json()
        fate = "left out" if self.left_out else "cut"
        of = "" if self.rows is None else f" of {self.rows:,}"
        which = f"all {n:,}" if n == self.rows else f"the first {n:,}{of} in the run's order"
        line = (
            f"{self.source}: tokens of {self.of}: mean {found['mean']:,.1f},"
            f" p90 {found['p90']:,.0f}, max {found['max']:,} ({which});"
        )
        if not self.longer:
            return [f"{line} {key}={self.limit} cuts none"]
        lines = [f"{line} {self.longer:.2%} longer than {key}={self.limit}: {fate}"]
        if self.longer > TOLERATED:
            lines.append(
                f"warning: {self.source}: {self.longer:.0%} of the {self.of} are {fate}, more than"
                f" {TOLERATED:.0%}; {key}={self.sufficient} would keep {1 - TOLERATED:.0%}"
            )
        return lines


def short_names(names: Sequence[str], suffixes: Sequence[str] = ()) -> list[str]:
    """Makes a name for metrics of each source's name, all different: of a file its own name without
    suffix; all of the path, or a number behind it, where two would have the same."""
    stems = [PurePath(name).stem if name.endswith(tuple(suffixes)) else name for name in names]
    for chosen in (stems, names):
        found = [re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "data" for name in chosen]
        if len(set(found)) == len(found):
            return found
    return [f"{name}-{number}" for number, name in enumerate(found, start=1)]
