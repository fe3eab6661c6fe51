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

from jaxrl.errors import UserError
from jaxrl.types import Array

EPS = 1e-6
"""Added to a standard deviation before it divides."""
MAX_OPD_GAP = 20.0
"""Nats: the gap of student and teacher at one token counts up to this in `opd_advantages`."""
TOLERANCE = 1e-6
"""A group whose rewards have a smaller standard deviation has no differences to learn from."""

Rewards = Sequence[float | None] | np.ndarray


def as_rewards(rewards: Rewards) -> Float[np.ndarray, " B"]:
    """Float64, None as NaN; an infinite reward is refused."""
    values = np.array(rewards, np.float64)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise UserError(
            f"the reward of sample {row} is {values[row]}; a reward is a finite number, or None "
            "where there is none"
        )
    return values


def group_advantages(
    rewards: Rewards, group_ids: Int[np.ndarray, " B"], *, scale_by_std: bool = True
) -> Float[np.ndarray, " B"]:
    """A = (R - mean) / (std + 1e-6) within each group; without the division if not `scale_by_std`.

    The std has ddof = 1 (GRPO, arXiv 2402.03300; without std: Dr. GRPO, 2503.20783). 0 for a group
    of one, for a group whose std is below 1e-6, for a reward of None or NaN, and for padding.

    Args:
        rewards: one for each sample.
        group_ids: which samples belong together; -1 at padding.
    """
    values, ids = as_rewards(rewards), np.asarray(group_ids)
    return within(values, ids, ids if scale_by_std else None)


def within(
    values: Float[np.ndarray, " B"],
    ids: Int[np.ndarray, " B"],
    scale_ids: Int[np.ndarray, " B"] | None,
) -> Float[np.ndarray, " B"]:
    """(R - mean over the rows of one id) / (std over the rows of one scale id + 1e-6).

    Args:
        values: rewards, NaN where there is none.
        ids: -1 is left out.
        scale_ids: groups whose std divides; None divides by nothing. 0 where either std is below
            1e-6.
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
    """Each value less the mean of its group, and the std of its group (0 for a group of one)."""
    _, group = np.unique(ids, return_inverse=True)
    size = np.bincount(group)
    mean = np.bincount(group, values) / size
    centred = values - mean[group]
    variance = np.bincount(group, centred**2) / np.maximum(size - 1, 1)
    return centred, np.sqrt(variance)[group]


@dataclass(frozen=True)
class Selection:
    """Which rows are left when whole groups are dropped, and why groups were."""

    keep: Bool[np.ndarray, " B"]
    """All rows of a group or none; False at padding."""
    groups: int
    """Before anything was dropped."""
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
    return Selection(real & np.isin(ids, differs), len(every), dropped)


def combine_rewards(
    rewards: Mapping[str, Rewards],
    weights: Mapping[str, float],
    group_ids: Int[np.ndarray, " B"],
    failed: Mapping[str, Bool[np.ndarray, " B"]] | None = None,
) -> Float[np.ndarray, " B"]:
    """Weighted sum of several rewards; NaN where a sample has none.

    A reward that a whole group lacks does not apply to its prompt and is left out there. A reward
    that only some of a group's samples lack leaves those samples without any: its absence would
    otherwise count as 0 against samples that have it. So does a failure, even if the whole group
    failed: nobody knows whether the reward applies, and the other rewards do not stand in for it.

    Args:
        rewards: name -> one reward for each sample.
        weights: name -> weight, for the same names.
        failed: name -> True where a reward is missing because its function failed (exception,
            timeout); names left out never failed.
    """
    if set(weights) != set(rewards):
        raise UserError(
            f"weights are given for {sorted(weights)}, rewards for {sorted(rewards)}: "
            "each reward needs one weight"
        )
    ids = np.asarray(group_ids)
    _, group = np.unique(ids, return_inverse=True)
    total, parts, missing = np.zeros(len(ids)), np.zeros(len(ids), int), np.zeros(len(ids), bool)
    for name, given in rewards.items():
        values = as_rewards(given)
        scored = ~np.isnan(values)
        applies = (np.bincount(group, scored) > 0)[group]
        total += weights[name] * np.where(scored, values, 0)
        parts += applies
        missing |= applies & ~scored
        if failed is not None and name in failed:
            missing |= failed[name]
    return np.where(missing | (parts == 0) | (ids < 0), np.nan, total)


def soft_overlong(
    lengths: Int[np.ndarray, " B"], *, max_tokens: int, cache_tokens: int
) -> Float[np.ndarray, " B"]:
    """Penalty of long completions, to be added to their rewards (DAPO, arXiv 2503.14476, Eq. 13).

    0 up to max_tokens - cache_tokens, then falling in a straight line to -1 at max_tokens.

    Args:
        lengths: tokens of each completion.
        max_tokens: the length from which on the penalty is -1; usually max_new_tokens.
        cache_tokens: how long before that it begins.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise UserError(
            f"cache_tokens is {cache_tokens}; it must lie between 1 and max_tokens={max_tokens}"
        )
    free = max_tokens - cache_tokens
    return -np.clip((np.asarray(lengths, np.float64) - free) / cache_tokens, 0, 1)


def opd_gap(
    logprobs: Float[Array, "B T"],
    teacher_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """log Q(y_t) - log P(y_t), nats, unbounded; 0 where masked. No gradient.

    A token beyond the teacher's vocabulary, or one that a remote teacher reports as impossible, has
    a gap of thousands of nats or more: `opd_advantages` clamps it.
    """
    gap = jnp.asarray(logprobs) - jnp.asarray(teacher_logprobs)
    return jax.lax.stop_gradient(jnp.where(jnp.asarray(mask).astype(bool), gap, 0))


def opd_advantages(
    advantages: Float[Array, " B"] | Float[Array, "B T"],
    logprobs: Float[Array, "B T"],
    teacher_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    coef: float = 1.0,
) -> Float[Array, "B T"]:
    """A_t = A - coef clamp(log Q(y_t) - log P(y_t), +-20): on-policy distillation as an advantage.

    With A = 0 and where nothing is clamped, the sampled reverse KL(student || teacher). The clamp
    keeps a single token, impossible under the teacher, from being the whole gradient of a batch.
    Per token: of the sequence losses, only gspo_token takes it. 0 where masked; no gradient.

    Args:
        advantages: one for each sequence or one for each token, of the task.
        logprobs: nats, log Q, of the student at the start of the batch.
        teacher_logprobs: nats, log P, of the same tokens.
        coef: 1 weighs a nat as an advantage of 1.
    """
    mask = jnp.asarray(mask).astype(bool)
    task = jnp.asarray(advantages, jnp.float32)
    if task.ndim == 1:
        task = jnp.broadcast_to(task[:, None], mask.shape)
    gap = jnp.clip(opd_gap(logprobs, teacher_logprobs, mask), -MAX_OPD_GAP, MAX_OPD_GAP)
    return jax.lax.stop_gradient(jnp.where(mask, task, 0) - coef * gap)
