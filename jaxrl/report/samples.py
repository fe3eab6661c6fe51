"""Which samples of a run are on its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.report.curves import short
from jaxrl.report.read import RunFiles
from jaxrl.report.thin import evenly

SAMPLES = 600
"""Most samples on a page."""
TEXT = 2000
"""Most characters of a prompt or a completion: its beginning and its end."""
AGREEMENT = "distill/top1_agreement"
FIELDS = ("step", "prompt", "completion", "answer", "score", "reward", "tokens", "finish_reason")


def samples(run: RunFiles) -> list[dict[str, Any]]:
    """Those of the first step, the last, and of as many evenly between them as there is room for.

    `agreement` is the sample's own, or that of all completions of its step (`of_step`).
    """
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        by_step.setdefault(sample["step"], []).append(sample)
    most = max(map(len, by_step.values()), default=1)
    of_step = {row["step"]: row.get(AGREEMENT) for row in run.rows}
    kept = evenly(sorted(by_step), max(2, SAMPLES // most))
    return [_shown(sample, of_step.get(step)) for step in kept for sample in by_step[step]]


def _shown(sample: Mapping[str, Any], of_step: float | None) -> dict[str, Any]:
    shown = {name: sample.get(name) for name in FIELDS}
    shown |= {name: cut(str(shown[name] or "")) for name in ("prompt", "completion")}
    own = sample.get("agreement")
    (agreement,) = short([of_step if own is None else own])
    return shown | {"agreement": agreement, "of_step": own is None}


def cut(text: str) -> str:
    """A long text without its middle."""
    left_out = len(text) - TEXT
    if left_out <= 0:
        return text
    return f"{text[: TEXT // 2]}\n[... {left_out} characters ...]\n{text[-TEXT // 2 :]}"


def told(run: RunFiles, shown: Sequence[Mapping[str, Any]]) -> str:
    """How many there are, and which of them are on the page."""
    if len(shown) == len(run.samples):
        return f"{len(shown)} samples"
    steps = len({sample["step"] for sample in shown})
    return f"{len(shown)} of {len(run.samples)} samples: those of {steps} steps, evenly chosen"
