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
from jaxrl.rewards.scoring import RewardReport, reward_stats
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
    reports, rollouts, times = [], [], []
    for attempt in range(config.policy.max_refills + 1):
        sampling = source.student_samples(index, attempt)
        judging = source.scores("reward", sampling)[0]
        rollout, report = sampling.result(), judging.result()
        found, useless = _groups(rollout, report)
        kept += found
        spare += useless
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
    metrics = _told(kept + spare, reports) | {"policy/prompts_replaced": float(len(spare))}
    futures = source.value(batch), source.value(_merged(groups, reports, batch, metrics))
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


def _told(sampled: Sequence[_Group], reports: Sequence[RewardReport]) -> dict[str, float]:
    """Of all that was sampled, what is replaced included; failures and seconds are added up."""
    rewards = _joined(sampled)
    stats = reward_stats(rewards.pop("total"), rewards)
    added = [name for name in reports[0].metrics if name not in stats]
    sums = {name: sum(report.metrics[name] for report in reports) for name in added}
    return stats | sums | {"policy/refills": len(reports) - 1.0}


def _merged(
    groups: Sequence[_Group],
    reports: Sequence[RewardReport],
    batch: Rollout,
    metrics: Mapping[str, float],
) -> RewardReport:
    """The rewards of the batch."""
    extra = len(batch.group_ids) - len(batch.completions)
    rewards = {
        name: np.pad(values, (0, extra), constant_values=np.nan)
        for name, values in _joined(groups).items()
    }
    notes = tuple(note for report in reports for note in report.notes)
    return RewardReport(rewards.pop("total"), rewards, metrics, notes)


def _joined(groups: Sequence[_Group]) -> dict[str, np.ndarray]:
    """Name -> the rewards of all completions."""
    names = groups[0].rewards
    return {name: np.concatenate([group.rewards[name] for group in groups]) for name in names}
