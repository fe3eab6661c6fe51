"""Several rewards of a sample become one, and long completions are penalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.errors import UserError

Rewards = Sequence[float | None] | np.ndarray


def as_rewards(rewards: Rewards) -> Float[np.ndarray, " B"]:
    """Returns float64, None as NaN; an infinite reward is refused."""
    values = np.array(rewards, np.float64)
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise UserError(
            f"the reward of sample {row} is {values[row]}; a reward is a finite number, or None "
            "where there is none"
        )
    return values


def combine_rewards(
    rewards: Mapping[str, Rewards],
    weights: Mapping[str, float],
    group_ids: Int[np.ndarray, " B"],
    failed: Mapping[str, Bool[np.ndarray, " B"]] | None = None,
) -> Float[np.ndarray, " B"]:
    """Computes the weighted sum of several rewards; NaN where a sample has none.

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
    """Computes the penalty of long completions, to be added to their rewards (DAPO, arXiv
    2503.14476, Eq. 13).

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
