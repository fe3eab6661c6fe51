"""Several teachers: which share of each has the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from jaxrl.config.schema import Config
from jaxrl.data.rows import find, listed
from jaxrl.errors import UserError, near
from jaxrl.types import Prompt, Rollout, TrainBatch


def teacher_weights(config: Config, rollout: Rollout) -> np.ndarray | None:
    """Returns [B, K] float32: the share of each of `config.teachers` in the distribution from which
    a row learns. Rows sum to 1; padding rows are 0. None where there is one teacher."""
    if not config.teachers:
        return None
    weights = np.zeros((len(rollout.group_ids), len(config.teachers)), np.float32)
    for row, prompt in enumerate(rollout.prompts):
        weights[row] = _prompt_weights(config, prompt)
    return weights


def with_weights(
    config: Config, rollout: Rollout, batch: TrainBatch
) -> tuple[TrainBatch, dict[str, float]]:
    """Returns the training batch of a rollout with the weights of several teachers, and the tokens
    that learn from each."""
    weights = teacher_weights(config, rollout)
    if weights is None or batch.teacher is None:
        return batch, {}
    mask = np.asarray(batch.sequences.loss_mask)
    tokens = mask.sum(-1) @ weights.astype(np.float64)
    each = zip(config.teachers, tokens, strict=True)
    metrics = {f"distill/{name}/tokens": float(count) for name, count in each}
    shares = np.repeat(weights[:, None], mask.shape[1], 1)
    return replace(batch, teacher_weights=shares), metrics


def row_weights(config: Config, columns: Mapping[str, object], where: str) -> tuple[float, ...]:
    """Returns the share of each of `config.teachers` for one row of data.

    Args:
        columns: of the row.
        where: the row, for the error.

    Raises:
        UserError: `data.teacher_key` does not say from which teacher the row learns.
    """
    key, names = config.data.teacher_key, tuple(config.teachers)
    if key is None:
        return _shares([one.weight or 1.0 for one in config.teachers.values()])
    given = find(columns, key)
    if isinstance(given, str) and given in names:
        return tuple(float(name == given) for name in names)
    if config.mixture is None or not isinstance(given, Mapping):
        hint = near(given, names) if isinstance(given, str) else ""
        found = f"has {given!r} there" if key in columns else "has no such field"
        raise UserError(
            f"data.teacher_key={key}: {where} {found}; it must name one of the teachers"
            f" {listed(names)}{hint}"
        )
    # A table of rows with different names has null for those that a row leaves out.
    weights = {name: weight for name, weight in given.items() if weight is not None}
    wrong = any(
        name not in names or not isinstance(weight, Real) or not 0 <= float(weight) < np.inf
        for name, weight in weights.items()
    )
    if wrong or not any(weights.values()):
        raise UserError(
            f"data.teacher_key={key}: {where} has the weights {weights}; they must be numbers of at"
            f" least 0, not all of them 0, by the teachers {listed(names)}"
        )
    return _shares([float(weights.get(name, 0.0)) for name in names])


def by_teacher(config: Config, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Returns name -> positions of the prompts that learn from this teacher alone."""
    names = tuple(config.teachers)
    chosen = [names[int(np.argmax(_prompt_weights(config, prompt)))] for prompt in prompts]
    return {name: [i for i, c in enumerate(chosen) if c == name] for name in names}


def check_teachers(config: Config, prompts: Iterable[Prompt]) -> None:
    """Raises UserError for a prompt whose row does not say from which teacher it learns."""
    for prompt in prompts:
        _prompt_weights(config, prompt)


def _prompt_weights(config: Config, prompt: Prompt) -> tuple[float, ...]:
    return row_weights(config, prompt.columns, f"the row {prompt.text[:60]!r}")


def _shares(weights: Sequence[float]) -> tuple[float, ...]:
    total = sum(weights)
    return tuple(weight / total for weight in weights)
