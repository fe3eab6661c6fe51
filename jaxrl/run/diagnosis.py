"""Finds what goes wrong in a run whose every number is finite: entropy that collapses, answers that
stop ending, a reward that no longer differs, a sampler that is no longer the learner's.

Thresholds are such that the runs in tests/cases/diagnosis.json are judged rightly: good runs, and
runs that were made to go wrong (scripts/diagnosed_runs.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.errors import UserError, counted
from jaxrl.process.json_types import JsonObject
from jaxrl.run.record import BatchLines
from jaxrl.telemetry.metrics import read_metrics

HEADING = "look at this run"
FEWEST = 20
"""Steps below which nothing is said."""
FAR = 0.2
"""Nats a token between sampler and learner; a correction then leaves less than half of a batch."""
SURE = 3.0
"""Standard errors by which two windows differ."""


@dataclass(frozen=True)
class Finding:
    """Something that goes wrong."""

    step: int
    """Where it began."""
    text: str


@dataclass(frozen=True)
class Series:
    """A metric over the steps that have it: medians of windows, and how sure they are."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def window(self) -> int:
        return max(5, min(20, len(self.values) // 5))

    @property
    def smooth(self) -> np.ndarray:
        """Returns the median of the window that ends with each step, [n - window + 1]."""
        return np.median(np.lib.stride_tricks.sliding_window_view(self.values, self.window), -1)

    @property
    def error(self) -> float:
        """Returns the standard error of a window's mean, from the median difference of neighbouring
        steps: a trend, or a jump, counts little in it."""
        noise = 1.4826 * np.median(np.abs(np.diff(self.values))) / np.sqrt(2)
        return float(noise / np.sqrt(self.window))

    @property
    def first(self) -> float:
        return float(self.smooth[0])

    @property
    def last(self) -> float:
        return float(self.smooth[-1])

    def since(self, holds: np.ndarray) -> int | None:
        """Returns the first step from which on something of each window holds to the end; None
        where it does not hold there.

        Args:
            holds: [n - window + 1] bool.
        """
        if not holds[-1]:
            return None
        begun = int(np.flatnonzero(~holds)[-1]) + 1 if not holds.all() else 0
        return int(self.steps[begun + self.window - 1])

    def rises(self, by: float = 0.0) -> bool:
        """Returns whether the end exceeds the beginning by more than noise, and by so much."""
        return self.last - self.first > max(SURE * self.error, by)


class RunRows:
    """The rows of a run, as its rules ask for them."""

    def __init__(self, rows: Sequence[JsonObject], config: Config):
        self.rows, self.config = [row for row in rows if row["step"]], config

    def series(self, name: str) -> Series | None:
        """Returns a metric; None where too few steps have it."""
        found = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        if len(found) < FEWEST:
            return None
        steps, values = np.array(found, np.float64).T
        return Series(steps.astype(int), values)


def _entropy(run: RunRows) -> Iterator[Finding]:
    entropy, reward = run.series("policy/entropy"), run.series("reward/mean")
    if entropy is None or reward is None:
        return
    begun = entropy.since(entropy.smooth < 0.2 * entropy.first)
    best = float(reward.smooth.max())
    lost = best - reward.last > SURE * reward.error
    if begun is not None and (lost or not reward.rises()):
        yield Finding(
            begun,
            f"the entropy of the policy is {entropy.last:.2g} nats a token, {entropy.first:.2g} at"
            f" the beginning, and the reward is no better for it ({reward.first:.3g} then,"
            f" {reward.last:.3g} now): all samples of a prompt are alike. A lower"
            " optimizer.learning_rate, or policy.entropy_coef, keeps them apart",
        )
    spread = entropy.since(entropy.smooth > 1.5 * entropy.first)
    if spread is not None and not reward.rises():
        yield Finding(
            spread,
            f"the entropy of the policy rose from {entropy.first:.2g} to {entropy.last:.2g} nats a"
            " token without a better reward: it forgets how to answer. A lower"
            " optimizer.learning_rate or policy.entropy_coef keeps it",
        )


def _reward_falls(run: RunRows) -> Iterator[Finding]:
    reward = run.series("reward/mean")
    if reward is None:
        return
    best = int(reward.smooth.argmax())
    fall = float(reward.smooth[best]) - reward.last
    scale = float(np.ptp(reward.smooth))
    if fall > 2 * SURE * reward.error and fall > 0.3 * scale:
        step = int(reward.steps[best + reward.window - 1])
        yield Finding(
            step,
            f"the reward was {reward.smooth[best]:.3g} around here, and fell to {reward.last:.3g}",
        )


CUT = "rollout/truncated_fraction"


def _lengths(run: RunRows) -> Iterator[Finding]:
    length, cut = run.series("rollout/completion_tokens_mean"), run.series(CUT)
    reward = run.series("reward/mean")
    if cut is not None:
        begun = cut.since(cut.smooth > max(cut.first + 0.2, 0.3))
        if begun is not None and cut.rises():
            yield Finding(
                begun,
                f"{cut.last:.0%} of the completions reach max_new_tokens="
                f"{run.config.max_new_tokens}, {cut.first:.0%} did at the beginning: answers stop"
                " ending",
            )
            return
    if length is None or reward is None or reward.rises():
        return
    begun = length.since(length.smooth > 1.5 * length.first)
    if begun is not None:
        yield Finding(
            begun,
            f"completions have {length.last:.0f} tokens, {length.first:.0f} at the beginning, and"
            f" no better reward ({reward.first:.3g} then, {reward.last:.3g} now)",
        )


def _mismatch(run: RunRows) -> Iterator[Finding]:
    gap, age = run.series("policy/mismatch_k3"), run.series("stream/age")
    if gap is None:
        return
    if gap.smooth.max() > FAR:
        begun = int(gap.steps[gap.smooth.argmax() + gap.window - 1])
        old = "" if age is None else f"; tokens are {age.last:.1f} batches old in the mean"
        yield Finding(
            begun,
            f"the policy that samples and the one that learns differ by {gap.smooth.max():.2g} nats"
            f" a token around here (policy/mismatch_k3), {gap.first:.2g} at the beginning"
            f"{old}. A smaller staleness, a lower optimizer.learning_rate or"
            " policy.correction=tis_token bounds what that does",
        )


def _clip(run: RunRows) -> Iterator[Finding]:
    clipped, norm = run.series("policy/clip_fraction"), run.series("actor/grad_norm")
    if clipped is None or norm is None or clipped.values.any() or not norm.values.all():
        return
    last = run.rows[-1]
    if last.get("optimizer_step", 0) > last["step"]:
        yield Finding(
            int(clipped.steps[0]),
            f"no token's ratio was ever clipped in {len(clipped.steps)} steps, though each batch"
            " makes several updates: they change the policy too little"
            f" (optimizer.learning_rate={run.config.optimizer.learning_rate:g}), or"
            " policy.clip_low and policy.clip_high are too wide",
        )


def _skipped(run: RunRows) -> Iterator[Finding]:
    bad = [int(row["step"]) for row in run.rows if row.get("actor/skipped_updates")]
    if bad:
        yield Finding(
            bad[0],
            f"updates of {counted(len(bad), 'step')} were skipped, because their gradient was not"
            " finite; nonfinite/ has their batches",
        )


def _divergence(run: RunRows) -> Iterator[Finding]:
    found = run.series("distill/divergence")
    if found is None:
        return
    least = int(found.smooth.argmin())
    lowest, step = float(found.smooth[least]), int(found.steps[least + found.window - 1])
    error = found.error
    if (begun := float(found.values[0])) < lowest:  # it rose within the first window
        lowest, step, error = begun, int(found.steps[0]), error * np.sqrt(found.window)
    if found.last > 1.2 * lowest and found.last - lowest > 2 * SURE * error:
        yield Finding(
            step,
            f"the divergence from the teacher was {lowest:.3g} nats a token around here, and rose"
            f" to {found.last:.3g}. A lower optimizer.learning_rate is the first thing to"
            " try",
        )


RULES: tuple[Callable[[RunRows], Iterator[Finding]], ...] = (
    *(_skipped, _reward_falls, _divergence, _entropy, _lengths, _mismatch, _clip),
)


def _constant(batches: Mapping[int, JsonObject], config: Config) -> Iterator[Finding]:
    """A reward that is the same for all completions of a prompt: advantages do not see it."""
    found: dict[str, list[tuple[int, bool]]] = {}
    for step in sorted(batches):
        line = batches.get(step, {})  # a damaged one is not there
        for name in line.get("weights", ()):
            values = np.array(line["functions"].get(name, ()), np.float64)
            groups = values[: len(values) // config.group_size * config.group_size]
            groups = groups.reshape(-1, config.group_size)
            groups = groups[~np.isnan(groups).any(-1)]
            alike = len(groups) == 0 or bool((np.ptp(groups, -1) == 0).mean() > 0.98)
            found.setdefault(name, []).append((step, alike))
    for name, flags in found.items():
        if len(flags) < FEWEST:
            continue
        steps, values = np.array(flags).T
        holds = Series(steps, values.astype(float))
        begun = holds.since(holds.smooth == 1)
        if begun is not None:
            first = int(steps[max(0, list(steps).index(begun) - holds.window + 1)])
            yield Finding(
                first,
                f"from here on the reward {name} is the same for all completions of a prompt:"
                " nothing is learned from it",
            )


def diagnose(run: Path, config: Config | None = None) -> tuple[str, ...]:
    """Reads the rows of a run and returns what `findings` says of them; nothing where they cannot
    be read.

    Args:
        config: of the run; None: read from its folder.
    """
    try:
        config = config or Config.load(run / CONFIG_FILE)
        return findings(read_metrics(run), BatchLines(run), config, str(run))
    except UserError:
        return ()


def findings(
    rows: Sequence[JsonObject], batches: Mapping[int, JsonObject], config: Config, run: str
) -> tuple[str, ...]:
    """Returns what goes wrong, a line each, the earliest first, and the command that looks at the
    step where it began; nothing where nothing is found, or there are too few steps to say it."""
    known = RunRows(rows, config)
    found = [finding for rule in RULES for finding in rule(known)]
    if config.group_size > 1:
        found += _constant(batches, config)
    if not found:
        return ()
    found.sort(key=lambda finding: finding.step)
    lines = [f"step {one.step}: {one.text}" for one in found]
    command = f"jaxrl replay {shlex.quote(run)} --step {found[0].step}"
    return (*lines, f"{command} does that step again")
