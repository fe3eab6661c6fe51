"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): prompts whose completions have all
the same task reward teach nothing, so others are sampled in their place, until the batch is full.

This runs in the driver, which reads the rewards before the batch is complete, and assembles it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrl.algorithms.sampled_batch import selected
from jaxrl.algorithms.sources import Sources
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.rewards.batch_rewards import RewardReport, reward_stats
from jaxrl.runtime.local import done_future
from jaxrl.runtime.worker import Future
from jaxrl.types import Completion, Prompt, Rollout


@dataclass(frozen=True)
class _Group:
    """The completions of one prompt, with the rollout and the rewards that they come from."""

    rollout: Rollout
    report: RewardReport
    rows: np.ndarray
    """[G] of the rollout."""

    @property
    def prompt(self) -> Prompt:
        return self.rollout.prompts[self.rows[0]]

    @property
    def completions(self) -> list[Completion]:
        return [self.rollout.completions[row] for row in self.rows]


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
        [group.prompt for group in groups],
        [group.completions for group in groups],
        policy_version=rollouts[0].policy_version,
        **sources.packing,
    )
    batch = replace(
        batch,
        decode_steps=sum(rollout.decode_steps for rollout in rollouts),
        sent_back=sum(rollout.sent_back for rollout in rollouts),
        waited_s=sum(rollout.waited_s for rollout in rollouts),
        notes=tuple(note for rollout in rollouts for note in rollout.notes),
        student_topk=_student_topk(groups, batch),
    )
    metrics = _metrics(kept + spare, reports) | {"policy/prompts_replaced": float(len(spare))}
    futures = done_future(batch), done_future(_merged(groups, reports, batch, metrics))
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


def _student_topk(groups: Sequence[_Group], batch: Rollout) -> np.ndarray | None:
    """Returns [B, C, K], the tokens that the policy ranked highest, at the width of the batch; None
    where the teacher's signal does not ask for them."""
    found = [(group.rollout.student_topk, group.rows) for group in groups]
    if found[0][0] is None:
        return None
    b, c = batch.sequences.loss_mask.shape
    narrow = [np.asarray(topk)[rows, :c] for topk, rows in found]  # beyond c is padding only
    wide = [np.pad(x, ((0, 0), (0, c - x.shape[1]), (0, 0))) for x in narrow]
    return _padded(np.concatenate(wide), b, 0)


def _metrics(sampled: Sequence[_Group], reports: Sequence[RewardReport]) -> dict[str, float]:
    """Computes the metrics of all that was sampled, including what was replaced; failures and
    seconds are added up."""
    stats = reward_stats(_joined(sampled, lambda report: report.rewards), _each_reward(sampled))
    added = [name for name in reports[0].metrics if name not in stats]
    sums = {name: sum(report.metrics[name] for report in reports) for name in added}
    return stats | sums | {"policy/refills": len(reports) - 1.0}


def _merged(
    groups: Sequence[_Group],
    reports: Sequence[RewardReport],
    batch: Rollout,
    metrics: Mapping[str, float],
) -> RewardReport:
    """Merges the rewards of the batch into one report."""
    b = len(batch.group_ids)
    return RewardReport(
        _padded(_joined(groups, lambda report: report.rewards), b, np.nan),
        _padded(_joined(groups, lambda report: report.task), b, np.nan),
        {name: _padded(values, b, np.nan) for name, values in _each_reward(groups).items()},
        metrics,
        tuple(note for report in reports for note in report.notes),
        tuple(g.report.messages[row] for g in groups for row in g.rows if g.report.messages),
    )


def _each_reward(groups: Sequence[_Group]) -> dict[str, np.ndarray]:
    """Returns a mapping from the name of each reward to that reward of all completions."""

    def one(name: str) -> np.ndarray:
        return _joined(groups, lambda report: report.per_reward[name])

    return {name: one(name) for name in groups[0].report.per_reward}


def _joined(groups: Sequence[_Group], of: Callable[[RewardReport], np.ndarray]) -> np.ndarray:
    """Returns [n], the array that `of` takes from a report, joined over all completions of the
    groups."""
    return np.concatenate([of(group.report)[group.rows] for group in groups])


def _padded(values: np.ndarray, rows: int, fill: float) -> np.ndarray:
    """Returns the values of the completions, followed by those of the padding rows."""
    extra = [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, extra, constant_values=fill)
