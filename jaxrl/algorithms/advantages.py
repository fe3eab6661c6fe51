"""Advantages of samples that are compared within groups: explicit group ids, float64 on the host.

Rows are samples; rows with one id (0 or above) form a group, in any order and of any size; id -1 is
padding. A reward of None or NaN was not given: its row is left out of the group's statistics and
gets advantage 0, which is not the same as a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.losses.divergence import clamped_gap
from jaxrl.rewards.batch_rewards import Rewards, as_rewards
from jaxrl.types import Array

EPS = 1e-6
"""Added to a standard deviation before it divides."""
TOLERANCE = 1e-6
"""A group whose rewards have a smaller standard deviation has no differences to learn from."""


def group_advantages(
    rewards: Rewards, group_ids: Int[np.ndarray, " B"], *, scale_by_std: bool = True
) -> Float[np.ndarray, " B"]:
    """Computes A = (R - mean) / (std + 1e-6) within each group; without the division if not
    `scale_by_std`.

    The std has ddof = 1 (GRPO, arXiv 2402.03300; without std: Dr. GRPO, 2503.20783). 0 for a group
    of one, for a group whose std is below 1e-6, for a reward of None or NaN, and for padding.
    """
    values, ids = as_rewards(rewards), np.asarray(group_ids)
    return within(values, ids, ids if scale_by_std else None)


def within(
    values: Float[np.ndarray, " B"],
    ids: Int[np.ndarray, " B"],
    scale_ids: Int[np.ndarray, " B"] | None,
) -> Float[np.ndarray, " B"]:
    """Returns (R - mean over the rows of one id) / (std over the rows of one scale id + 1e-6).

    Args:
        scale_ids: groups whose std divides; None: no division.

    Returns:
        0 where a row is left out, or where the std of either group is below 1e-6.
    """
    assert values.shape == ids.shape, f"{values.shape} rewards, {ids.shape} group ids"
    rows = np.flatnonzero((ids >= 0) & ~np.isnan(values))
    out = np.zeros(len(values))
    centred, std = _centred(values[rows], ids[rows])
    differs = std >= TOLERANCE
    if scale_ids is not None:
        _, scale = _centred(values[rows], scale_ids[rows])
        differs &= scale >= TOLERANCE
        centred = centred / (scale + EPS)
    out[rows] = np.where(differs, centred, 0)
    return out


def _centred(values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each value less the mean of its group, and the std of its group (0 for a group of
    one)."""
    _, group = np.unique(ids, return_inverse=True)
    size = np.bincount(group)
    mean = np.bincount(group, values) / size
    centred = values - mean[group]
    variance = np.bincount(group, centred**2) / np.maximum(size - 1, 1)
    return centred, np.sqrt(variance)[group]


def decoupled_rewards(
    rewards: Mapping[str, Rewards],
    weights: Mapping[str, float],
    totals: Rewards,
    group_ids: Int[np.ndarray, " B"],
    *,
    scale_by_std: bool = True,
) -> Float[np.ndarray, " B"]:
    """Normalises each reward by itself within its group, and returns their weighted sum.

    S_i = sum over k of w_k (r_ik - mean_k) / (std_k + 1e-6), where mean and std (ddof = 1) are of
    reward k in the group of sample i (GDPO, arXiv 2601.05242). Combinations of rewards
    that have the same sum stay apart.

    Args:
        rewards: name -> one reward for each sample. One that is missing or the same in the whole
            group adds 0.
        weights: name -> weight, for names of `rewards`.
        totals: rewards as `combine_rewards` has them: NaN where a sample counts as unrewarded.

    Returns:
        NaN where a sample has no reward, and at padding.
    """
    ids = np.asarray(group_ids)
    left_out = np.isnan(as_rewards(totals)) | (ids < 0)
    total = np.zeros(len(ids))
    for name, weight in weights.items():
        values = np.where(left_out, np.nan, as_rewards(rewards[name]))
        total += weight * within(values, ids, ids if scale_by_std else None)
    return np.where(left_out, np.nan, total)


def batch_normalised(
    values: Float[np.ndarray, " B"], *, scale_by_std: bool = True
) -> Float[np.ndarray, " B"]:
    """Returns (S - mean) / (std + 1e-6) over the whole batch, so that the size of advantages does
    not grow with the number of rewards (GDPO, arXiv 2601.05242).

    Args:
        values: of `decoupled_rewards`, whose mean over each group is 0; NaN is left out, and
            becomes 0.
    """
    given = values[~np.isnan(values)]
    if len(given) < 2 or given.std(ddof=1) < TOLERANCE:
        return np.zeros(len(values))
    divisor = given.std(ddof=1) + EPS if scale_by_std else 1.0
    # A group without differences stays at exactly 0: the mean is 0 up to rounding.
    moved = np.where(values == 0, 0, values - given.mean())
    return np.where(np.isnan(values), 0, moved / divisor)


def turn_advantages(
    rewards: Sequence[Rewards],
    group_ids: Int[np.ndarray, " B"],
    *,
    discount: float = 1.0,
    scale_by_std: bool = True,
) -> list[np.ndarray]:
    """Computes the advantages of the turns of episodes: process supervision of GRPO (arXiv
    2402.03300, section 4.1.3), with a discount.

    Each reward is centred and scaled with the mean and std of all turns of its group. A turn's
    advantage is the discounted sum of these normalised rewards, from that turn to the end: sum over
    k >= 0 of discount^k times the reward k turns later. If only the last turn of each episode has a
    reward and discount = 1, all turns of an episode get its `group_advantages`.

    Args:
        rewards: for each sample, one reward per turn. A turn without one (None or NaN) is left out
            of the statistics and adds nothing.

    Returns:
        For each sample a float64 array with one advantage per turn.
    """
    values = [as_rewards(each) for each in rewards]
    lengths = [len(each) for each in values]
    ids = np.repeat(np.asarray(group_ids), lengths)
    flat = np.concatenate([*values, np.zeros(0)])
    parts = np.split(within(flat, ids, ids if scale_by_std else None), np.cumsum(lengths)[:-1])
    out = []
    for part in parts:
        total, sums = 0.0, np.zeros(len(part))
        for turn in reversed(range(len(part))):
            total = sums[turn] = part[turn] + discount * total
        out.append(sums)
    return out


@dataclass(frozen=True)
class Selection:
    """Which rows are left when whole groups are dropped, and why groups were."""

    keep: Bool[np.ndarray, " B"]
    """All rows of a group or none; False at padding."""
    dropped: Mapping[str, int]
    """Reason -> groups: unscored_groups (no reward at all), degenerate_groups (nothing to compare:
    fewer than two rewards, or a std below 1e-6)."""


def select_groups(rewards: Rewards, group_ids: Int[np.ndarray, " B"]) -> Selection:
    """Drops the groups that teach nothing (DAPO's dynamic sampling, arXiv 2503.14476).

    The rows stay where they are: index every array of the batch with `keep`, or mask by it.
    """
    values, ids = as_rewards(rewards), np.asarray(group_ids)
    real = ids >= 0
    every = np.unique(ids[real])
    scored = real & ~np.isnan(values)
    _, std = _centred(values[scored], ids[scored])
    differs = np.unique(ids[scored][std >= TOLERANCE])
    unscored = len(every) - len(np.unique(ids[scored]))
    dropped = {
        "unscored_groups": unscored,
        "degenerate_groups": len(every) - len(differs) - unscored,
    }
    return Selection(real & np.isin(ids, differs), dropped)


def opd_advantages(
    advantages: Float[Array, " B"] | Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    teacher_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    coef: float = 1.0,
) -> Float[Array, "B T"]:
    """Computes A_t = A - coef clamp(log Q(y_t) - log P(y_t), +-20): on-policy distillation as an
    advantage.

    With A = 0 and where nothing is clamped, the sampled reverse KL(student || teacher).
    The result is per token, so that of the losses with sequence ratios only gspo_token accepts it.
    0 where masked; no gradient.

    Args:
        advantages: of the task.
        logprobs: nats, log Q, of the student at the start of the batch.
        teacher_logprobs: nats, log P, of the same tokens.
    """
    mask = jnp.asarray(mask).astype(bool)
    task = jnp.asarray(advantages, jnp.float32)
    if task.ndim == 1:
        task = jnp.broadcast_to(task[:, None], mask.shape)
    gap, _ = clamped_gap(logprobs, teacher_logprobs, mask)
    return jax.lax.stop_gradient(jnp.where(mask, task, 0) - coef * gap)
