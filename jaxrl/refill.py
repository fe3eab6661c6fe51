"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose completions have all
the same reward teach nothing, so others are sampled in their place, until the batch is full.

The driver takes part: it looks at the rewards before the batch is complete, and puts it together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from jaxrl.advantages import select_groups
from jaxrl.config import Config
from jaxrl.data.batch import make_rollout
from jaxrl.rewards.scoring import RewardReport
from jaxrl.runtime.worker import Future
from jaxrl.types import Completion, Prompt, Rollout


class Source(Protocol):
    """What a batch is put together from."""

    config: Config
    packing: Mapping[str, Any]

    def student_samples(self, index: int, attempt: int = 0) -> Future: ...

    def scores(self, role: str, rollout: Future) -> list[Future]: ...

    def value(self, value: Any) -> Future: ...


@dataclass
class _Group:
    prompt: Prompt
    completions: list[Completion]
    rewards: dict[str, np.ndarray]
    """`total`, and each reward by its name."""


def refilled(source: Source, index: int) -> tuple[Future, Future]:
    """The batch, and its rewards; waits for both.

    Sampled at most `policy.max_refills` times more than once; what is still missing then is filled
    with prompts that teach nothing, the first ones of the batch.
    """
    config = source.config
    kept: list[_Group] = []
    spare: list[_Group] = []
    reports, rollouts, times, dropped = [], [], [], 0
    for attempt in range(config.policy.max_refills + 1):
        sampling = source.student_samples(index, attempt)
        judging = source.scores("reward", sampling)[0]
        rollout, report = sampling.result(), judging.result()
        found, useless = _groups(rollout, report)
        kept += found
        spare += useless
        dropped += len(useless)
        reports.append(report)
        rollouts.append(rollout)
        times.append((sampling.times, judging.times))
        if len(kept) >= config.batch_size:
            break
    groups = (kept + spare)[: config.batch_size]
    batch = make_rollout(
        [group.prompt for group in groups],
        [group.completions for group in groups],
        policy_version=rollouts[0].policy_version,
        **source.packing,
    )
    batch = replace(batch, decode_steps=sum(rollout.decode_steps for rollout in rollouts))
    futures = source.value(batch), source.value(_merged(groups, reports, batch, dropped))
    for i, future in enumerate(futures):
        future.times.started, future.times.finished = times[0][i].started, times[-1][i].finished
    return futures


def _groups(rollout: Rollout, report: RewardReport) -> tuple[list[_Group], list[_Group]]:
    """Those that teach something, and the others."""
    keep = select_groups(report.rewards, rollout.group_ids).keep
    sides: tuple[list[_Group], list[_Group]] = ([], [])
    values = {"total": report.rewards, **report.per_reward}
    n = len(rollout.completions)
    for group in dict.fromkeys(rollout.group_ids[:n].tolist()):
        rows = np.flatnonzero(rollout.group_ids[:n] == group)
        made = _Group(
            rollout.prompts[rows[0]],
            [rollout.completions[i] for i in rows],
            {name: np.asarray(value)[rows] for name, value in values.items()},
        )
        sides[0 if keep[rows].any() else 1].append(made)
    return sides


def _merged(
    groups: Sequence[_Group], reports: Sequence[RewardReport], batch: Rollout, dropped: int
) -> RewardReport:
    """The rewards of the batch; metrics are means over all that was sampled, counts are sums."""
    extra = len(batch.group_ids) - sum(len(group.completions) for group in groups)
    rewards = {
        name: np.concatenate([*(group.rewards[name] for group in groups), np.full(extra, np.nan)])
        for name in groups[0].rewards
    }
    metrics: dict[str, float] = {}
    for name in reports[0].metrics:
        values = [report.metrics[name] for report in reports if name in report.metrics]
        counted = name.endswith(("/none", "/failures", "/timeouts", "_s", "_cut"))
        metrics[name] = float(np.sum(values) if counted else np.mean(values))
    metrics |= {"policy/refills": len(reports) - 1.0, "policy/prompts_replaced": float(dropped)}
    notes = tuple(note for report in reports for note in report.notes)
    return RewardReport(rewards.pop("total"), rewards, metrics, notes)
