"""The result of an evaluation: mean@k and pass@k on held-out prompts, with intervals.

A set's value is the mean over its prompts of a per-prompt value in [0, 1]; the value of several
sets is the mean over the sets. Prompts are the independent units: the samples of one prompt are
alike, so more of them narrow nothing by themselves. All intervals are two-sided, of 95%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jaxrl.data.stream import EvalSet
from jaxrl.rewards.batch_rewards import episode_rewards
from jaxrl.types import Completion, Prompt

Judge = Callable[[str, Prompt], float | None]
"""(completion text, its prompt) -> score in [0, 1]; None where it cannot be judged."""
Scores = Sequence[Sequence[float | None]]
"""For each prompt, the scores of its samples."""
T = TypeVar("T")

Z = 1.959963984540054
"""The normal distribution's 97.5% point."""


@dataclass(frozen=True)
class Estimate:
    """A value in [0, 1] with its interval, which holds it and is never of zero width."""

    value: float
    low: float
    high: float


def evaluation_row(
    sets: Sequence[EvalSet], groups: Sequence[Sequence[Completion]], judge: Judge
) -> dict[str, float]:
    """Computes the metrics `eval/...` of one evaluation; those of each named set as
    `eval/NAME/...`.

    What cannot be judged is left out of every mean and counted in `eval/unjudged`; where nothing
    can be, there is no accuracy.

    Args:
        groups: the samples of each prompt, the prompts of all sets one after the other.
    """
    return row_of_scores(sets, groups, judged(sets, groups, judge))


def judged(
    sets: Sequence[EvalSet], groups: Sequence[Sequence[Completion]], judge: Judge
) -> list[list[float | None]]:
    """Judges each prompt's samples; returns their scores in the order of `groups`."""
    prompts = [prompt for held_out in sets for prompt in held_out.prompts]
    return [
        [None if one.failure else judge(one.text, prompt) for one in group]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def row_of_scores(
    sets: Sequence[EvalSet], groups: Sequence[Sequence[Completion]], scores: Scores
) -> dict[str, float]:
    """Computes `evaluation_row` for completions that have already been judged."""
    by_set = [estimates(part) for part in split(sets, scores)]
    row = _named("eval", _means(by_set), groups, scores)
    parts = zip(sets, by_set, split(sets, groups), split(sets, scores), strict=True)
    for held_out, values, completions, marks in parts:
        if held_out.name:
            row |= _named(f"eval/{held_out.name}", values, completions, marks)
    return row


def estimates(scores: Scores) -> dict[str, Estimate]:
    """Computes `accuracy` (mean@k) of one set and, if k > 1, `pass@2`, `pass@4`, ..., `pass@k`.

    pass@K is over the prompts whose samples are all judged, the same for each K, so that it never
    falls with K; a value that no prompt is left for is absent.
    """
    known = [[score for score in row if score is not None] for row in scores]
    assert all(0 <= score <= 1 for row in known for score in row), "scores lie in [0, 1]"
    values = {"accuracy": [float(np.mean(row)) for row in known if row]}
    samples = max(map(len, scores), default=0)
    whole = [row for row in known if len(row) == samples]
    for k in pass_ks(samples):
        values[f"pass@{k}"] = [
            pass_at_k(samples, sum(score >= 1 for score in row), k) for row in whole
        ]
    return {name: wilson(float(np.mean(v)), len(v)) for name, v in values.items() if v}


def pass_ks(n: int) -> tuple[int, ...]:
    """Returns the powers of two from 2 up to n samples, and n itself; none for a single sample."""
    powers = [2**i for i in range(1, n.bit_length()) if 2**i < n]
    return (*powers, n) if n > 1 else ()


def pass_at_k(n: int, c: int, k: int) -> float:
    """Computes the probability that at least one of k samples passes, unbiased, from n samples of
    which c do.

    1 - C(n - c, k) / C(n, k), as a product of factors in [0, 1] (Chen et al. 2021, arXiv
    2107.03374, eq. 1).
    """
    assert 0 <= c <= n and 1 <= k <= n
    if c > n - k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(n - c + 1, n + 1)))


def wilson(mean: float, n: int) -> Estimate:
    """Computes Wilson's score interval of the mean of n independent values in [0, 1].

    Exact in form for values 0 and 1; for others conservative, since no values in [0, 1] of this
    mean vary more (Wilson 1927).
    """
    assert 0 <= mean <= 1 and n >= 1
    shrink = 1 + Z**2 / n
    centre = (mean + Z**2 / (2 * n)) / shrink
    half = Z / shrink * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """Computes the mean of independent estimates, and its interval from theirs.

    low = mean - sqrt(sum (value_s - low_s)^2) / S, high alike: each side's distances stand for
    standard errors (Newcombe 1998; MOVER of Zou and Donner 2008). One part is itself.
    """
    value = float(np.mean([part.value for part in parts]))
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Estimate(value, max(0.0, value - below), min(1.0, value + above))


def _means(by_set: Sequence[Mapping[str, Estimate]]) -> dict[str, Estimate]:
    """Computes for each name the mean over the sets that have it."""
    names = dict.fromkeys(name for values in by_set for name in values)
    return {name: mean_of([v[name] for v in by_set if name in v]) for name in names}


def _named(
    prefix: str,
    values: Mapping[str, Estimate],
    groups: Sequence[Sequence[Completion]],
    scores: Scores,
) -> dict[str, float]:
    completions = [completion for group in groups for completion in group]
    row = {}
    for name, estimate in values.items():
        row[f"{prefix}/{name}"] = estimate.value
        row[f"{prefix}/{name}_low"] = estimate.low
        row[f"{prefix}/{name}_high"] = estimate.high
    row[f"{prefix}/unjudged"] = float(sum(score is None for several in scores for score in several))
    row[f"{prefix}/mean_completion_tokens"] = float(np.mean([len(c.tokens) for c in completions]))
    row[f"{prefix}/truncated_fraction"] = float(
        np.mean([c.finish_reason == "length" for c in completions])
    )
    if any(completion.turns for completion in completions):
        rewards = episode_rewards(completions, 1.0)
        if not np.isnan(rewards).all():
            row[f"{prefix}/environment_reward"] = float(np.nanmean(rewards))
        failed = sum(completion.failure is not None for completion in completions)
        row[f"{prefix}/environment_failures"] = float(failed)
    return row


def split(sets: Sequence[EvalSet], flat: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the items of each set's prompts."""
    start = 0
    for held_out in sets:
        yield flat[start : start + len(held_out.prompts)]
        start += len(held_out.prompts)
    assert start == len(flat), "one item for each prompt of all sets"
