"""Which samples of a run are on its page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from jaxrl.process.json_types import JsonObject
from jaxrl.report.curves import evenly, short
from jaxrl.report.read import RunFiles

SAMPLES = 600
"""Most samples on a page."""
TEXT = 2000
"""Most characters of a prompt or a completion: its beginning and its end."""
FIELDS = ("step", "prompt", "completion", "answer", "score", "reward", "tokens", "finish_reason")


def samples(run: RunFiles) -> list[JsonObject]:
    """Returns the samples of the first step, of the last, and of as many steps evenly between them
    as there is room for.

    `agreement` is the sample's own, or that of all completions of its step (`of_step`).
    """
    ordered = sorted(run.samples, key=lambda sample: sample["step"])
    by_step = {step: list(own) for step, own in groupby(ordered, lambda sample: sample["step"])}
    most = max(map(len, by_step.values()), default=1)
    of_step = {row["step"]: row.get("distill/top1_agreement") for row in run.rows}
    kept = evenly(list(by_step), max(2, SAMPLES // most))
    return [_shown(sample, of_step.get(step)) for step in kept for sample in by_step[step]]


def _shown(sample: JsonObject, of_step: float | None) -> JsonObject:
    own = sample.get("agreement")
    (agreement,) = short([of_step if own is None else own])
    texts = {name: cut(str(sample.get(name) or "")) for name in ("prompt", "completion")}
    shown = {name: sample.get(name) for name in FIELDS} | texts
    return shown | {"agreement": agreement, "of_step": own is None}


def cut(text: str) -> str:
    """Cuts the middle out of a long text."""
    left_out = len(text) - TEXT
    if left_out <= 0:
        return text
    return f"{text[: TEXT // 2]}\n[... {left_out} characters ...]\n{text[-TEXT // 2 :]}"


def chosen(run: RunFiles, shown: Sequence[JsonObject]) -> str:
    """Says how many samples there are, and which of them are on the page."""
    if len(shown) == len(run.samples):
        return f"{len(shown)} samples"
    steps = len({sample["step"] for sample in shown})
    return f"{len(shown)} of {len(run.samples)} samples: those of {steps} steps, evenly chosen"
