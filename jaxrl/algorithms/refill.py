"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose completions have all
the same task reward teach nothing, so others are sampled in their place, until the batch is full.

This runs in the driver, which reads the rewards before the batch is complete, and assembles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl.algorithms.sampled_batch import selected
from jaxrl.algorithms.sources import Sources
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.rewards.batch_rewards import RewardReport, reward_stats
from jaxrl.runtime.local import done_future
from jaxrl.runtime.worker import Future
from jaxrl.types import Rollout


@dataclass(frozen=True)
class _Group:
    """The completions of one prompt, with the rollout and the rewards that they come from."""

    rollout: Rollout
    report: RewardReport
    rows: np.ndarray
    """[G] of the rollout."""


def refilled(sources: Sources, index: int) -> tuple[Future[Rollout], Future[RewardReport]]:
    """Returns the batch and its rewards; waits for both.

    Sampled at most `policy.max_refills` times more than once; what is still missing then is filled
    with prompts that teach nothing, the first ones of the batch.
    """
    config = sources.config
    kept: list[_Group] = []
    spare: list[_Group] = []
    reports, rollouts, times = [], [], []
    for attempt in range(config.policy.max_refills + 1):
        sampling = sources.student_samples(index, attempt)
        judging = sources.rewards(sampling)
        rollout, report = sources.wait(sampling), sources.wait(judging)
        found, useless = _groups(config, rollout, report)
        kept += found
        spare += useless
        reports.append(report)
        rollouts.append(rollout)
        times.append((sampling.times, judging.times))
        if len(kept) >= config.batch_size:
            break
    groups = (kept + spare)[: config.batch_size]
    batch = make_rollout(
        [group.rollout.prompts[group.rows[0]] for group in groups],
        [[group.rollout.completions[row] for row in group.rows] for group in groups],
        policy_version=rollouts[0].policy_version,
        **sources.packing,
    )
    student_topk = None
    if groups[0].rollout.student_topk is not None:
        b, c = batch.sequences.loss_mask.shape
        narrow = [np.asarray(g.rollout.student_topk)[g.rows, :c] for g in groups]  # then padding
        wide = [np.pad(x, ((0, 0), (0, c - x.shape[1]), (0, 0))) for x in narrow]
        student_topk = _padded(np.concatenate(wide), b, 0)
    batch = replace(
        batch,
        decode_steps=sum(rollout.decode_steps for rollout in rollouts),
        sent_back=sum(rollout.sent_back for rollout in rollouts),
        waited_s=sum(rollout.waited_s for rollout in rollouts),
        notes=tuple(note for rollout in rollouts for note in rollout.notes),
        student_topk=student_topk,
    )
    # Of all that was sampled, including what was replaced; failures and seconds are added up.
    sampled = kept + spare
    metrics = reward_stats(_joined(sampled, lambda report: report.rewards), _each_reward(sampled))
    added = [name for name in reports[0].metrics if name not in metrics]
    metrics |= {name: sum(report.metrics[name] for report in reports) for name in added}
    metrics |= {"policy/refills": len(reports) - 1.0, "policy/prompts_replaced": float(len(spare))}
    b = len(batch.group_ids)
    merged = RewardReport(
        _padded(_joined(groups, lambda report: report.rewards), b, np.nan),
        _padded(_joined(groups, lambda report: report.task), b, np.nan),
        {name: _padded(values, b, np.nan) for name, values in _each_reward(groups).items()},
        metrics,
        tuple(note for report in reports for note in report.notes),
        tuple(g.report.messages[row] for g in groups for row in g.rows if g.report.messages),
    )
    futures = done_future(batch), done_future(merged)
    for i, future in enumerate(futures):
        future.times.started, future.times.finished = times[0][i].started, times[-1][i].finished
    return futures


def _groups(
    config: Config, rollout: Rollout, report: RewardReport
) -> tuple[list[_Group], list[_Group]]:
    """Splits the groups into those that teach something and the others."""
    keep = selected(config, rollout, report).keep
    sides: tuple[list[_Group], list[_Group]] = ([], [])
    ids = rollout.group_ids[: len(rollout.completions)]
    for group in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == group)
        sides[0 if keep[rows].any() else 1].append(_Group(rollout, report, rows))
    return sides


def _each_reward(groups: Sequence[_Group]) -> dict[str, np.ndarray]:
    """Maps the name of each reward to that reward of all completions."""
    return {
        name: _joined(groups, lambda report, name=name: report.per_reward[name])  # type: ignore[misc]
        for name in groups[0].report.per_reward
    }


def _joined(groups: Sequence[_Group], of: Callable[[RewardReport], np.ndarray]) -> np.ndarray:
    """Returns [n], the array that `of` takes from a report, joined over all completions of the
    groups."""
    return np.concatenate([of(group.report)[group.rows] for group in groups])


def _padded(values: np.ndarray, rows: int, fill: float) -> np.ndarray:
    """Returns the values of the completions, followed by those of the padding rows."""
    extra = [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, extra, constant_values=fill)
