"""Makes the training batch of algorithms that learn from rewards, from a rollout and its scores:
rewards, groups, advantages (on the host, in float64). Dynamic sampling fills it (`refill_batch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.advantages import (
    Selection,
    decoupled_rewards,
    group_advantages,
    normalise_batch,
    remove_rounding,
    select_groups,
    turn_advantages,
)
from jaxrl.algorithms.protocols import RewardRole, Sources
from jaxrl.algorithms.similarity import similarity_advantages
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import shown
from jaxrl.losses.algorithm_table import INPUTS, OWN, AlgorithmSpec
from jaxrl.losses.policy import kl_in_reward
from jaxrl.process.json_types import Keywords
from jaxrl.process.plugin import BoundFunction
from jaxrl.rewards.batch_rewards import (
    ENVIRONMENT,
    KL,
    OVERLONG,
    RewardReport,
    as_rewards,
    join_reports,
)
from jaxrl.runtime.worker import Future, done_future
from jaxrl.sharding.reshard import join_parts
from jaxrl.types import Embedded, Prepare, RoleScores, Rollout, SampleCounts, TrainBatch

Penalties = dict[str, tuple[float, np.ndarray]]
"""Name -> (weight, [B] before the weight): what is added to the task reward."""
ROUNDING = {"float32": 5e-6, "bfloat16": 0.03}
"""Dtype -> nats by which a log-prob of a token may differ between two programs that compute in
it."""


def prepare_rewarded(config: Config) -> Prepare:
    """Returns the function that makes a training batch of a batch of rewarded completions.

    A completion without a reward is in no statistic and has advantage 0. A truncated one may be
    left out, as `reward.truncated` says: its reward still counts for the others of its prompt. What
    is left out, by that or by dynamic sampling, is left out of the policy loss only.
    """
    selects = config.dynamic_sampling != "off"

    def prepare(rollout: Rollout, scores: RoleScores) -> tuple[TrainBatch, dict[str, float]]:
        report = scores["reward"][0]
        rewards = np.array(report.rewards, np.float64)
        reference = join_parts(scores["reference"]) if "reference" in scores else None
        embedded: Embedded | None = scores["grouper"][0] if "grouper" in scores else None
        metrics: dict[str, float] = {}
        penalties: Penalties = {}
        if OVERLONG in report.per_reward:
            penalties[OVERLONG] = config.rewards.overlong_penalty, report.per_reward[OVERLONG]
        if config.policy.reward_kl_coef > 0:
            assert reference is not None
            penalty = _kl_of_completions(config, rollout, reference)
            penalties[KL] = -config.policy.reward_kl_coef, penalty
            rewards = rewards - config.policy.reward_kl_coef * penalty
            metrics["reward/kl"] = float(penalty[: len(rollout.completions)].mean())
        advantages, reported = _advantages(config, rollout, report, rewards, penalties, embedded)
        for name, metric in config.spec.metrics_asking(INPUTS).items():
            reported[f"{OWN}/{name}"] = _own_metric(metric, _own_inputs(rollout, report, rewards))
        selection = select_groups(report.task, advantages, rollout.group_ids)
        if penalties:
            selection = select_learnable(config, rollout, report, embedded)
        metrics |= reported
        for name, n in selection.dropped.items():
            metrics[f"policy/{name}"] = float(n + getattr(rollout.replaced, name))
        real = rollout.group_ids >= 0
        teaches = np.ones(len(real), bool)
        if selects:
            teaches = selection.keep
        cut = np.zeros(len(real), bool)
        if config.reward.truncated == "mask":
            reasons = [completion.finish_reason for completion in rollout.completions]
            cut[: len(reasons)] = np.array(reasons) == "length"
        keep = teaches & ~cut
        tokens = np.asarray(rollout.sequences.loss_mask).sum(-1)
        metrics["completions/trained"] = float((real & keep).sum())
        metrics["completions/replaced"] = float(rollout.replaced.completions)
        metrics["tokens/replaced"] = float(rollout.replaced.generated)
        for name, rows in (("dropped", real & ~teaches), ("masked", real & teaches & cut)):
            metrics[f"completions/{name}"] = float(rows.sum())
            learned = config.distill_weight != 0  # by the divergence
            metrics[f"tokens/{name}"] = 0.0 if learned else float(tokens[rows].sum())
        trained = rewards[keep & np.isfinite(rewards)]
        if len(trained):
            metrics["reward/trained_mean"] = float(trained.mean())
        sequences = replace(rollout.sequences, experts=rollout.experts)
        if config.distill_weight == 0:  # else the divergence includes every completion
            loss_mask = np.asarray(sequences.loss_mask) & keep[:, None]
            sequences = replace(sequences, loss_mask=loss_mask)
        batch = TrainBatch(
            sequences,
            join_parts(scores["teacher"]) if "teacher" in scores else None,
            rollout.sampler_logprobs,
            advantages.astype(np.float32),
            reference if config.loss_reads_reference else None,
            in_policy=keep,
        )
        return batch, metrics

    return prepare


def _advantages(
    config: Config,
    rollout: Rollout,
    report: RewardReport,
    rewards: np.ndarray,
    penalties: Penalties,
    embedded: Embedded | None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Computes the advantages of the completions, [B] or, of their tokens, [B, C]; and metrics.

    Args:
        rewards: [B] of completions: the report's task rewards plus the penalties.
        embedded: None: not known yet; then similarity groups are not, and whole prompts compared.
    """
    ids, policy = rollout.group_ids, config.policy
    if report.advantages is not None:
        return report.advantages, {}
    if config.spec.advantages is not None:
        return own_advantages(config.spec, rollout, report, rewards), {}
    scaled = config.spec.scale_by_std if policy.scale_by_std is None else policy.scale_by_std
    if credits_turns(config):
        of_turns = turn_advantages(
            _turn_rewards(config, rollout, report),
            ids,
            penalties=rewards - report.task,
            discount=config.environment.discount,
            scale_by_std=scaled,
        )
        advantages = np.zeros(rollout.sequences.loss_mask.shape)
        for row, completion in enumerate(rollout.completions):
            values, end = iter(of_turns[row]), 0
            for turn in completion.turns:
                begin, end = end, end + turn.tokens
                if turn.role == "assistant":
                    advantages[row, begin:end] = next(values)
        return advantages, {}
    if policy.reward_combination == "normalize_then_sum":
        weights = {**report.weights} | {name: w for name, (w, _) in penalties.items()}
        parts = {**report.per_reward, **{name: values for name, (_, values) in penalties.items()}}
        summed = decoupled_rewards(parts, weights, rewards, ids, scale_by_std=scaled)
        return normalise_batch(summed, scale_by_std=scaled), {}
    if policy.advantages == "group" or embedded is None:
        return group_advantages(rewards, ids, scale_by_std=scaled), {}
    extra = len(rewards) - len(embedded.texts)
    options = config.grouper
    if not scaled:  # then nothing is divided here either
        options = options.model_copy(update={"std_scope": "none"})
    grouped = similarity_advantages(
        rewards,
        np.pad(np.asarray(embedded.vectors), ((0, extra), (0, 0))),
        ids,
        options=options,
        texts=(*embedded.texts, *[None] * extra),
        task=report.task,
    )
    return grouped.advantages, {
        f"similarity/{name}": float(total) / max(float(count), 1)
        for name, (total, count) in grouped.metrics.items()
    }


def own_advantages(
    spec: AlgorithmSpec, rollout: Rollout, report: RewardReport, rewards: np.ndarray
) -> np.ndarray:
    """Computes the advantages of an algorithm that has its own, [B] or [B, C]: 0 at padding, and
    where there is no reward.

    Raises:
        UserError: they have another shape, or are not finite.
    """
    function, inputs = spec.advantages, _own_inputs(rollout, report, rewards)
    assert isinstance(function, BoundFunction)
    shape: tuple[int, ...] = inputs["rewards"].shape
    if spec.token_advantages:
        shape = *shape, int(inputs["lengths"].max(initial=0))
    values = as_floats(function, function(**inputs), shape)
    everywhere = rollout.sequences.loss_mask.shape[: len(shape)]
    advantages, rows = np.zeros(everywhere), _rewarded_rows(rollout, rewards)
    if spec.token_advantages:
        advantages[rows, : shape[1]] = values
    else:
        advantages[rows] = values
    return advantages


def as_floats(function: BoundFunction, values: object, shape: tuple[int, ...]) -> np.ndarray:
    """Returns what a function of the user's returned, float64; raises UserError where it is of
    another shape, or not finite."""
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise function.wrong(f"returns {shown(values)}, which are no numbers") from error
    if array.shape != shape:
        raise function.wrong(f"returns an array of shape {array.shape}: it must be {shape}")
    if not np.isfinite(array).all():
        first = float(array[~np.isfinite(array)][0])
        raise function.wrong(f"returns {first}: it must return finite numbers")
    return array


def _own_metric(function: BoundFunction, inputs: Mapping[str, Any]) -> float:
    return as_floats(function, function(**inputs), ()).item()


def _rewarded_rows(rollout: Rollout, rewards: np.ndarray) -> np.ndarray:
    return np.flatnonzero((rollout.group_ids >= 0) & ~np.isnan(rewards))


def _own_inputs(rollout: Rollout, report: RewardReport, rewards: np.ndarray) -> dict[str, Any]:
    """Returns what functions of an algorithm may ask for (`algorithm_table.INPUTS`)."""
    rows = _rewarded_rows(rollout, rewards)
    completions = [rollout.completions[row] for row in rows]
    return {
        "rewards": rewards[rows],
        "group_ids": rollout.group_ids[rows],
        "lengths": np.array([len(completion.tokens) for completion in completions], int),
        "truncated": np.array([one.finish_reason == "length" for one in completions], bool),
        "per_reward": {name: values[rows] for name, values in report.per_reward.items()},
        "completions": completions,
        "prompts": [rollout.prompts[row] for row in rows],
    }


def select_learnable(
    config: Config, rollout: Rollout, report: RewardReport, embedded: Embedded | None = None
) -> Selection:
    """Selects the groups that teach something, for dynamic sampling of either kind and for the
    metrics: those that would have an advantage if there were no penalties for length and KL."""
    advantages, _ = _advantages(config, rollout, report, report.task, {}, embedded)
    return select_groups(report.task, advantages, rollout.group_ids)


def _kl_of_completions(config: Config, rollout: Rollout, reference: np.ndarray) -> np.ndarray:
    """Returns [B] float64, the KL penalty of each completion in nats, before its coefficient. Where
    those of a prompt differ by no more than the rounding of log-probs, each is their mean."""
    policy, mask = config.policy, rollout.sequences.loss_mask
    options: Keywords = {"estimator": policy.reward_kl_estimator}
    logprobs = jnp.asarray(rollout.logprobs), jnp.asarray(reference)
    penalty = np.asarray(kl_in_reward(*logprobs, mask, **options), np.float64).sum(-1)
    dtypes = config.rollout.dtype, config.reference.dtype
    wrong = jnp.full((1, 1), max(ROUNDING[dtype or "float32"] for dtype in dtypes))
    token_error = kl_in_reward(wrong, jnp.zeros((1, 1)), jnp.ones((1, 1), bool), **options)
    # The errors of tokens are independent: their sum grows with the root of their number.
    tolerance = float(token_error.item() * np.sqrt(mask.sum(-1).max()))
    return remove_rounding(penalty, rollout.group_ids, tolerance)


def credits_turns(config: Config) -> bool:
    """Returns whether each turn of an episode has advantages of its own."""
    return config.environment.name is not None and config.environment.credit == "turn"


def _turn_rewards(config: Config, rollout: Rollout, report: RewardReport) -> list[np.ndarray]:
    """Computes the reward of each turn of the model before penalties, NaN where it has none:
    float64 arrays, one for each row, empty at padding. What the functions and the reward model give
    an episode belongs to its last turn."""
    weight, per_reward = config.environment.weight, report.per_reward
    beside = report.task - weight * np.nan_to_num(per_reward[ENVIRONMENT])
    judged = np.zeros(len(beside), bool)
    for name in report.weights.keys() - {ENVIRONMENT}:
        judged |= ~np.isnan(per_reward[name])
    turns: list[np.ndarray] = [np.zeros(0)] * len(beside)
    for row, completion in enumerate(rollout.completions):
        rewards = [turn.reward for turn in completion.turns if turn.role == "assistant"]
        weighted = weight * as_rewards(rewards)
        if weight == 0 or np.isnan(beside[row]):
            weighted[:] = np.nan
        if not np.isnan(beside[row]) and (judged[row] or np.isnan(weighted).all()):
            weighted[-1] = np.nan_to_num(weighted[-1]) + beside[row]
        turns[row] = weighted
    return turns


@dataclass(frozen=True)
class _Group:
    """The completions of one prompt, with the rollout and the rewards that they come from."""

    rollout: Rollout
    report: RewardReport
    rows: np.ndarray
    """[G] of the rollout."""
    teaches: bool
    """Whether it has an advantage other than 0, penalties left out."""

    @property
    def scored(self) -> bool:
        """Returns whether any of its completions has a reward."""
        return not np.isnan(self.report.task[self.rows]).all()


def refill_batch(sources: Sources, index: int) -> tuple[Future[Rollout], Future[RewardReport]]:
    """Returns the batch and its rewards; waits for both. Dynamic sampling (DAPO, arXiv 2503.14476,
    section 3.2): prompts whose completions have all the same task reward teach nothing, so others
    are sampled in their place, until the batch is full. The driver reads the rewards before the
    batch is complete, and assembles it.

    Sampled at most `policy.max_refills` times more than once; what is still missing then is filled
    with prompts that teach nothing, the first ones of the batch.
    """
    config = sources.config
    kept: list[_Group] = []
    spare: list[_Group] = []
    reports, rollouts, times = [], [], []
    for attempt in range(config.policy.max_refills + 1):
        sampling = sources.student_samples(index, attempt)
        judging = sources.call("reward", RewardRole.score, sampling)
        rollout, report = sources.wait(sampling), sources.wait(judging)
        learnable, useless = _groups(config, rollout, report)
        kept += learnable
        spare += useless
        reports.append(report)
        rollouts.append(rollout)
        times.append((sampling.times, judging.times))
        if len(kept) >= config.batch_size:
            break
    sampled = kept + spare
    groups, others = sampled[: config.batch_size], sampled[config.batch_size :]
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
        student_topk = _pad_rows(np.concatenate(wide), b, 0)
    batch = replace(
        batch,
        decode_steps=sum(rollout.decode_steps for rollout in rollouts),
        sent_back=sum(rollout.sent_back for rollout in rollouts),
        read_again=sum(rollout.read_again for rollout in rollouts),
        waited_s=sum(rollout.waited_s for rollout in rollouts),
        notes=tuple(note for rollout in rollouts for note in rollout.notes),
        replaced=SampleCounts.count(
            len(others),
            [group.rollout.completions[row] for group in others for row in group.rows],
            unscored_groups=sum(not group.scored for group in others),
            degenerate_groups=sum(group.scored and not group.teaches for group in others),
            prompt_tokens=sum(len(g.rollout.prompts[g.rows[0]].tokens) for g in others),
        ),
        student_topk=student_topk,
    )
    # Metrics of all that was sampled, also of what was replaced.
    everything = join_reports(reports, [len(rollout.completions) for rollout in rollouts])
    metrics = dict(everything.metrics)
    metrics |= {"policy/refills": len(reports) - 1.0, "policy/prompts_replaced": float(len(others))}
    b = len(batch.group_ids)
    merged = RewardReport(
        _pad_rows(_join_groups(groups, lambda report: report.rewards), b, np.nan),
        _pad_rows(_join_groups(groups, lambda report: report.task), b, np.nan),
        {name: _pad_rows(values, b, np.nan) for name, values in _each_reward(groups).items()},
        metrics,
        everything.notes,
        tuple(g.report.messages[row] for g in groups for row in g.rows if g.report.messages),
        reports[0].weights,
    )
    futures = done_future(batch), done_future(merged)
    for i, future in enumerate(futures):
        future.times.started, future.times.finished = times[0][i].started, times[-1][i].finished
    return futures


def _groups(
    config: Config, rollout: Rollout, report: RewardReport
) -> tuple[list[_Group], list[_Group]]:
    """Splits the groups into those that teach something and the others."""
    keep = select_learnable(config, rollout, report).keep
    sides: tuple[list[_Group], list[_Group]] = ([], [])
    ids = rollout.group_ids[: len(rollout.completions)]
    for group in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == group)
        teaches = bool(keep[rows].any())
        sides[0 if teaches else 1].append(_Group(rollout, report, rows, teaches))
    return sides


def _each_reward(groups: Sequence[_Group]) -> dict[str, np.ndarray]:
    """Maps the name of each reward to that reward of all completions."""
    return {
        name: _join_groups(groups, lambda report, name=name: report.per_reward[name])  # type: ignore[misc]
        for name in groups[0].report.per_reward
    }


def _join_groups(groups: Sequence[_Group], of: Callable[[RewardReport], np.ndarray]) -> np.ndarray:
    """Returns [n], the array that `of` takes from a report, joined over all completions of the
    groups."""
    return np.concatenate([of(group.report)[group.rows] for group in groups])


def _pad_rows(values: np.ndarray, rows: int, fill: float) -> np.ndarray:
    """Returns the values of the completions, followed by those of the padding rows."""
    extra = [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1)
    return np.pad(values, extra, constant_values=fill)
