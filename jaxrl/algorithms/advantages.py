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

TOLERANCE = 1e-6
"""A group whose rewards have a smaller standard deviation has no differences to learn from. Nor
does a sum of rewards that is smaller than this, relative to the sum of their absolute values."""


def group_advantages(
    rewards: Rewards, group_ids: Int[np.ndarray, " B"], *, scale_by_std: bool = True
) -> Float[np.ndarray, " B"]:
    """Computes A = (R - mean) / std within each group; without the division if not
    `scale_by_std`.

    The std has ddof = 1 (GRPO, arXiv 2402.03300; without std: Dr. GRPO, 2503.20783). 0 for a group
    of one, for a group whose std is below 1e-6, for a reward of None or NaN, and for padding.
    """
    values, ids = as_rewards(rewards), np.asarray(group_ids)
    return standardise_groups(values, ids, ids if scale_by_std else None)


def standardise_groups(
    values: Float[np.ndarray, " B"],
    ids: Int[np.ndarray, " B"],
    scale_ids: Int[np.ndarray, " B"] | None,
) -> Float[np.ndarray, " B"]:
    """Returns (R - mean over the rows of one id) / std over the rows of one scale id.

    Args:
        scale_ids: groups whose std divides; None: no division.

    Returns:
        0 where a row is left out, or where the std of either group is below 1e-6.
    """
    assert values.shape == ids.shape, f"{values.shape} rewards, {ids.shape} group ids"
    rows = np.flatnonzero((ids >= 0) & ~np.isnan(values))
    out = np.zeros(len(values))
    centred, std = _centre_groups(values[rows], ids[rows])
    differs = std >= TOLERANCE
    if scale_ids is not None:
        _, scale = _centre_groups(values[rows], scale_ids[rows])
        differs &= scale >= TOLERANCE
        centred = centred / np.maximum(scale, TOLERANCE)
    out[rows] = np.where(differs, centred, 0)
    return out


def _centre_groups(values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each value less the mean of its group, and the std of its group (0 for a group of
    one)."""
    _, group = np.unique(ids, return_inverse=True)
    size = np.bincount(group)
    mean = np.bincount(group, values) / size
    centred = values - mean[group]
    variance = np.bincount(group, centred**2) / np.maximum(size - 1, 1)
    return centred, np.sqrt(variance)[group]


def remove_rounding(
    values: Float[np.ndarray, " B"], ids: Int[np.ndarray, " B"], tolerance: float
) -> Float[np.ndarray, " B"]:
    """Returns the values; in a group whose std is below the tolerance, their mean."""
    centred, std = _centre_groups(values, ids)
    return values - np.where(std < tolerance, centred, 0)


def decoupled_rewards(
    rewards: Mapping[str, Rewards],
    weights: Mapping[str, float],
    totals: Rewards,
    group_ids: Int[np.ndarray, " B"],
    *,
    scale_by_std: bool = True,
) -> Float[np.ndarray, " B"]:
    """Normalises each reward by itself within its group, and returns their weighted sum.

    S_i = sum over k of w_k (r_ik - mean_k) / std_k, where mean and std (ddof = 1) are of reward k
    in the group of sample i (GDPO, arXiv 2601.05242); 0 where these terms cancel but for rounding.
    Combinations of rewards that have the same sum stay apart.

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
    total, size = np.zeros(len(ids)), np.zeros(len(ids))
    for name, weight in weights.items():
        values = np.where(left_out, np.nan, as_rewards(rewards[name]))
        term = weight * standardise_groups(values, ids, ids if scale_by_std else None)
        total, size = total + term, size + np.abs(term)
    total[np.abs(total) <= TOLERANCE * size] = 0
    return np.where(left_out, np.nan, total)


def normalise_batch(
    values: Float[np.ndarray, " B"], *, scale_by_std: bool = True
) -> Float[np.ndarray, " B"]:
    """Returns (S - mean) / std over the whole batch, so that the size of advantages does not grow
    with the number of rewards (GDPO, arXiv 2601.05242).

    Args:
        values: of `decoupled_rewards`, whose mean over each group is 0; NaN is left out, and
            becomes 0. A value of 0 stays 0.
    """
    rewarded = values[~np.isnan(values)]
    if not rewarded.any():
        return np.zeros(len(values))
    divisor = rewarded.std(ddof=1) if scale_by_std else 1.0
    # A group without differences stays at exactly 0: the mean is 0 up to rounding.
    moved = np.where(values == 0, 0, values - rewarded.mean())
    return np.where(np.isnan(values), 0, moved / divisor)


def turn_advantages(
    rewards: Sequence[Rewards],
    group_ids: Int[np.ndarray, " B"],
    *,
    penalties: Rewards = (),
    discount: float = 1.0,
    scale_by_std: bool = True,
) -> list[np.ndarray]:
    """Computes the advantages of the turns of episodes: process supervision of GRPO (arXiv
    2402.03300, section 4.1.3), with a discount.

    Each reward is centred and scaled with the mean and std of all turns of its group. A turn's
    advantage is the discounted sum of these normalised rewards, from that turn to the end: sum over
    k >= 0 of discount^k times the reward k turns later. If only the last turn of each episode has a
    reward and discount = 1, all turns of an episode get the `group_advantages` of its reward plus
    its penalty.

    Args:
        rewards: for each sample, one reward per turn. A turn without one (None or NaN) is left out
            of the statistics and adds nothing.
        penalties: one for each sample, added to its last turn after being centred among the samples
            of its group; so a turn without a reward is still compared with none. NaN adds nothing.

    Returns:
        For each sample a float64 array with one advantage per turn.
    """
    values, samples = [as_rewards(turns) for turns in rewards], np.asarray(group_ids)
    lengths = np.array([len(turns) for turns in values], int)
    ids, flat = np.repeat(samples, lengths), np.concatenate([*values, np.zeros(0)])
    normal, ends = standardise_groups(flat, ids, None), np.cumsum(lengths)
    if len(penalties):
        ended = lengths > 0
        normal[ends[ended] - 1] += standardise_groups(as_rewards(penalties), samples, None)[ended]
    if scale_by_std:
        _, group = np.unique(ids, return_inverse=True)
        rewarded = np.bincount(group, ~np.isnan(flat))
        std = np.sqrt(np.bincount(group, normal**2) / np.maximum(rewarded - 1, 1))[group]
        normal = np.where(std < TOLERANCE, 0, normal / np.maximum(std, TOLERANCE))
    out = []
    for part in np.split(normal, ends[:-1]):
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
    """Reason -> groups: unscored_groups (no reward at all), degenerate_groups (rewards, but no
    advantage other than 0)."""


def select_groups(
    rewards: Rewards,
    advantages: Float[np.ndarray, " B"] | Float[np.ndarray, "B C"],
    group_ids: Int[np.ndarray, " B"],
) -> Selection:
    """Drops the groups that teach nothing, in which every advantage is 0 (DAPO's dynamic sampling,
    arXiv 2503.14476).

    The rows stay where they are: index every array of the batch with `keep`, or mask by it.

    Args:
        rewards: one for each sample; None or NaN where there is none.
        advantages: of these rewards, without penalties.
    """
    ids = np.asarray(group_ids)
    real = ids >= 0
    scored = real & ~np.isnan(as_rewards(rewards))
    taught = real & (advantages.reshape(len(ids), -1) != 0).any(-1)
    every, known, kept = (len(np.unique(ids[rows])) for rows in (real, scored, taught))
    dropped = {"unscored_groups": every - known, "degenerate_groups": known - kept}
    return Selection(real & np.isin(ids, ids[taught]), dropped)


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
