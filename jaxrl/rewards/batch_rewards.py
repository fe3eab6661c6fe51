"""The rewards of a batch of completions: every function's, their weighted sum, the metrics."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrl.config.roles import RewardConfig
from jaxrl.config.settings import EnvironmentConfig
from jaxrl.errors import UserError, near
from jaxrl.process.waiting import waiting
from jaxrl.rewards.functions import KEY, OF_COMPLETIONS, TEXTS, find
from jaxrl.rewards.reward_pool import Item, ItemSource, RewardPool, Scores
from jaxrl.rewards.verifiers import why_unjudged
from jaxrl.types import Completion, Prompt, Rollout

MODEL = "model"
"""Name of the reward model's score among the rewards."""
MOST_WORKERS = 8
"""Processes where `reward.workers` is null, on a machine with many cores."""
ENVIRONMENT = "environment"
"""Name of the sum of an environment's rewards in an episode."""
OVERLONG = "overlong"
"""Name of the soft penalty of long completions."""
KL = "kl"
"""Name of the KL penalty."""
PENALTIES = (OVERLONG, KL)
OF_THE_RUN = (MODEL, ENVIRONMENT, *PENALTIES)
"""Names of rewards and penalties that no function may have."""
MANY_MISSING = 0.1
"""Share of a batch's completions without a reward of one function, above which the console says
so."""
ADDED = ("answer", "finish_reason", "n_tokens", "turns")
"""Columns that the run adds to those of a row; `turns` of episodes only."""
MISSING_MEANS = {
    "ignore": "the sum of their other rewards counts",
    "drop": "they have no reward, unless it is None for all completions of their prompt",
}
"""Value of `reward.missing` -> what becomes of a completion for which a function returns None."""


@dataclass(frozen=True)
class RewardReport:
    """The rewards of one rollout."""

    rewards: np.ndarray
    """[B] float64, task reward plus penalties; NaN at padding, and where a completion has no task
    reward."""
    task: np.ndarray
    """[B] float64, weighted sum of the functions and the reward model, before any penalty: what
    groups are selected on. NaN where `rewards` is."""
    per_reward: Mapping[str, np.ndarray]
    """Name -> [B] float64, unweighted; NaN where that reward was not given."""
    metrics: Mapping[str, float]
    """`reward/...` and `time/reward_s`."""
    notes: tuple[str, ...]
    """What a reader should know: failures with the first traceback, slow functions."""
    messages: tuple[str, ...] = ()
    """What the functions say of each completion, a line each; "" where they say nothing."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Name -> weight of each reward that counts; penalties are none."""
    advantages: np.ndarray | None = None
    """[B] or, of the tokens, [B, C] float32: set by hand, in place of those that follow from the
    rewards (`run.batch_by_hand`)."""


class RewardFunctions:
    """The functions of `reward.functions`, loaded in processes of their own.

    The processes start at once, so that their start-up overlaps with the run's.
    """

    def __init__(
        self,
        config: RewardConfig,
        max_new_tokens: int,
        startup: float,
        given: Mapping[str, bytes] | None = None,
        environment: EnvironmentConfig | None = None,
    ):
        """
        Args:
            startup: seconds for a process to import what it needs (`deadlines.startup`).
            given: functions from Python, pickled, by their entries in `reward.functions`.
            environment: what the completions are episodes of; None: of nothing.

        Raises:
            UserError: a function that cannot be found; `check` finds out whether it can be loaded.
        """
        self.config, self.max_new_tokens = config, max_new_tokens
        self.environment = environment
        self.sources = tuple(find(text, given or {}) for text in config.functions)
        self.names = names_of(self.sources)
        self._weights = dict(zip(self.names, config.weights_of_functions, strict=True))
        self._reported: set[str] = set()
        workers = config.workers or min(max((os.cpu_count() or 1) // 2, 1), MOST_WORKERS)
        self.pool = RewardPool(
            self.sources,
            workers=workers if self.sources else 0,
            timeout=config.timeout,
            startup=startup,
            memory_mb=config.memory_mb,
            max_processes=config.max_processes,
        )

    def named_columns(self) -> tuple[set[str], bool]:
        """Returns the columns that the functions' signatures name, and whether one takes all."""
        facts = self.pool.facts()
        named = {name for one in facts for name in (*one.needs, *one.takes)}
        return named, any(one.takes_all for one in facts)

    def check(
        self, prompts: Sequence[Prompt], begun: bool = False, hidden: Collection[str] = ()
    ) -> list[str]:
        """Checks that every function can be loaded and called with what the data has.

        Args:
            prompts: some, for their columns.
            begun: an environment begins episodes with prompts of its own, perhaps as messages.
            hidden: columns of the data in whose place prompts have others of the run.

        Returns:
            Which functions get messages; for each verifier that cannot judge some of the prompts,
            how many and why.

        Raises:
            UserError: a function cannot be imported or called; the rows lack a column that it
                needs; a verifier can judge none of the prompts.
        """
        if not self.sources:
            return []
        columns = {name for prompt in prompts for name in prompt.columns}
        added = set(ADDED if self.environment else ADDED[:-1])
        twice = columns & {*OF_COMPLETIONS, *added, *hidden}
        if all(prompt.answer is None for prompt in prompts):  # a column that no key reads
            twice -= {"answer"}
        columns |= added
        notes, get_messages = [], []
        for source, signature in zip(self.sources, self.pool.facts(), strict=True):
            asked = twice if signature.takes_all else twice & {*signature.needs, *signature.takes}
            for name in sorted(asked):
                raise UserError(
                    f"{KEY}: the data has a column `{name}`, which {source.text} gets from the run:"
                    f" rename the column{', or set data.answer_key=answer' * (name == 'answer')}"
                )
            for needed in signature.needs:
                if needed not in columns:
                    known = ", ".join(f"`{name}`" for name in sorted(columns))
                    raise UserError(
                        f"{KEY}: {source.text} asks for the column"
                        f" `{needed}`{near(needed, columns)}; the data has {known} (a parameter"
                        " with a default value may be missing)"
                    )
            if signature.kind != "each" and TEXTS not in signature.takes:
                get_messages.append(source.text)
        if get_messages and (begun or any(prompt.conversational for prompt in prompts)):
            which = "the environment's prompts" if begun else "prompts of the data"
            notes.append(
                f"{KEY}: {', '.join(get_messages)}: `prompts` and `completions` are lists of"
                f" messages where {which} are messages; `{TEXTS}` has the completions as text"
            )
        # Each verifier judges an empty completion for each prompt, before hours of sampling.
        empty = Completion((), np.zeros(0), np.zeros(0), "stop")
        items = [_item(prompt, empty) for prompt in prompts]
        for i, source in enumerate(self.sources):
            if source.option != "verifier":
                continue
            with waiting(f"{source.text}, which judges {len(items)} empty completions"):
                scores = self.pool.judge(i, items).result()
            if scores.failures and len(scores.failures) == len(items):
                first = next(iter(scores.failures.values()))
                raise UserError(f"{KEY}: {source.text}: {first.text}")
            unjudged = [p for p, v in zip(prompts, scores.values, strict=True) if v is None]
            if unjudged:
                text = (
                    f"{KEY}: {source.text} cannot judge {len(unjudged)} of the {len(items)}"
                    f" prompts checked: {why_unjudged(unjudged)}"
                )
                if len(unjudged) == len(items):
                    raise UserError(text)
                notes.append(text)
        return notes

    def submit(self, rollout: Rollout, of: int = 0) -> list[Future[Scores]]:
        """Starts every function on a rollout; returns at once.

        Args:
            of: completions of the batch that it is a part of, whose share may fail.
        """
        prompts = rollout.prompts[: len(rollout.completions)]
        pairs = zip(prompts, rollout.completions, strict=True)
        items = [_item(prompt, completion) for prompt, completion in pairs]
        limit = self.config.max_failures * max(len(items), of)
        return [self.pool.judge(i, items, limit) for i in range(len(self.sources))]

    def report(
        self,
        rollout: Rollout,
        futures: Sequence[Future[Scores]],
        model_scores: np.ndarray | None = None,
    ) -> RewardReport:
        """Waits for the functions and puts all rewards together.

        Args:
            futures: of `submit(rollout)`.
            model_scores: [B], of the reward model.

        Raises:
            RunError, UserError: a function fails too often, or returned what is no reward.
        """
        config, n, rows = self.config, len(rollout.completions), len(rollout.group_ids)
        with waiting(f"the rewards of {n} completions, by {', '.join(self.names)}"):
            results = [f.result() for f in futures]
        scores = dict(zip(self.names, results, strict=True))
        values = {name: _padded(one.values, rows) for name, one in scores.items()}
        failed = {
            name: np.isin(np.arange(rows), [i for i in s.failures if s.values[i] is None])
            for name, s in scores.items()
        }
        weights = dict(self._weights)
        if model_scores is not None:
            values[MODEL] = _padded(model_scores[:n], rows)
            failed[MODEL] = np.isnan(values[MODEL])
            weights[MODEL] = config.model_weight
        if self.environment is not None:
            discount = self.environment.discount
            values[ENVIRONMENT] = _padded(episode_rewards(rollout.completions, discount), rows)
            broken = [c.failure is not None for c in rollout.completions]
            failed[ENVIRONMENT] = np.pad(broken, (0, rows - n))
            weights[ENVIRONMENT] = self.environment.weight
        weights = {name: weight for name, weight in weights.items() if weight != 0}
        used = {name: values[name] for name in weights}
        drop = config.missing == "drop"
        task = total = combine_rewards(used, weights, rollout.group_ids, failed, drop=drop)
        if config.overlong_buffer:
            lengths = np.array([len(c.tokens) for c in rollout.completions])
            penalty = soft_overlong(lengths, self.max_new_tokens, config.overlong_buffer)
            values[OVERLONG] = _padded(penalty, rows)
            total = task + config.overlong_penalty * values[OVERLONG]
        metrics = reward_stats(total[:n], {name: v[:n] for name, v in values.items()})
        metrics["time/reward_s"] = max((one.seconds for one in scores.values()), default=0.0)
        unrewarded, notes = np.isnan(task[:n]), list[str]()
        for name, one in scores.items():
            late = sum(failure.kind == "timeout" for failure in one.failures.values())
            none = {i for i, value in enumerate(one.values) if value is None}
            metrics[f"reward/{name}/timeouts"] = float(late)
            metrics[f"reward/{name}/failures"] = float(len(one.failures) - late)
            unjudged = len(none - one.failures.keys())
            metrics[f"reward/{name}/unjudged"] = float(unjudged)
            many = name in weights and unjudged > MANY_MISSING * n and not unrewarded.all()
            if many and name not in self._reported:
                self._reported.add(name)
                notes.append(
                    f"rewards: {name} returned None for {unjudged} of {n} completions"
                    f" ({unjudged / n:.0%}): {MISSING_MEANS[config.missing]}"
                    f" (reward.missing={config.missing}); reward/{name}/missing has the share of"
                    " each step"
                )
            if one.failures:
                first = next(iter(one.failures.values()))
                notes.append(
                    f"rewards: {name} failed on {len(one.failures)} of {n} completions, which have"
                    f" no reward; the first, {first.kind}: {first.text}"
                )
            if one.slow_calls:
                notes.append(
                    f"rewards: {one.slow_calls} calls of {name} with several completions took"
                    f" longer than reward.timeout={config.timeout:g} s; those without an answer"
                    " were judged again"
                )
        lost = unrewarded & ~np.any([failed[name][:n] for name in weights], axis=0)
        if lost.any() and not unrewarded.all() and "" not in self._reported:
            self._reported.add("")
            notes.append(
                f"rewards: {lost.sum()} of {n} completions have no reward, since functions returned"
                " None: nothing is learned from them; reward/none has their number in each step"
            )
        if n and unrewarded.all():
            lacking = ", ".join(f"{name}: {np.isnan(v[:n]).sum()}" for name, v in used.items())
            notes.append(
                f"rewards: none of the {n} completions has a reward, so nothing is learned from"
                f" them; without one of {lacking}"
            )
        turns = [turn for completion in rollout.completions for turn in completion.turns]
        if list(weights) == [ENVIRONMENT] and all(turn.reward is None for turn in turns):
            notes.append(
                f"rewards: the environment gave no turn of {n} episodes a reward, and nothing else"
                " rewards them, so nothing is learned from them"
            )
        said = [[s.messages.get(i, "") for s in scores.values()] for i in range(n)]
        messages = tuple("\n".join(filter(None, lines)) for lines in said)
        return RewardReport(total, task, values, metrics, tuple(notes), messages, weights)

    def close(self) -> None:
        self.pool.close()


def names_of(sources: Sequence[ItemSource]) -> tuple[str, ...]:
    """Returns a name for each: the function's; the second of a name gets `_2`, and so on."""
    seen = Counter[str]()
    names = []
    for source in sources:
        seen[source.name] += 1
        names.append(source.name + (f"_{seen[source.name]}" if seen[source.name] > 1 else ""))
    for name, count in Counter((*names, *OF_THE_RUN)).items():
        if count > 1:
            raise UserError(f"{KEY}: two rewards would be called {name!r}: rename the function")
    return tuple(names)


def episode_rewards(completions: Sequence[Completion], discount: float) -> np.ndarray:
    """Computes [n] float64: of each episode the sum of its turns' rewards, each times the discount
    for every turn before it. 0 where no turn has one, NaN where its environment failed."""
    rewards = [
        [turn.reward for turn in completion.turns if turn.role == "assistant"]
        for completion in completions
    ]
    sums = [sum(discount**k * (x or 0.0) for k, x in enumerate(turns)) for turns in rewards]
    return np.where([c.failure is not None for c in completions], np.nan, sums)


def _item(prompt: Prompt, completion: Completion) -> Item:
    run = {"finish_reason": completion.finish_reason, "n_tokens": len(completion.tokens)}
    turns = {"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}
    answer = {} if prompt.answer_value is None else {"answer": prompt.answer_value}
    columns, chat = {**prompt.columns, **answer, **run, **turns}, prompt.conversational
    said = completion.text, prompt.answer, columns, completion.opening
    return Item(prompt.text, *said, chat)


def _padded(values: Sequence[float | None] | np.ndarray, rows: int) -> np.ndarray:
    """Returns [B] float64, NaN where there is none."""
    known = np.array(values, np.float64)
    return np.pad(known, (0, rows - len(known)), constant_values=np.nan)


def reward_stats(total: np.ndarray, values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Computes `reward/none`, `reward/mean` and `reward/std` of completions, and each reward's own
    mean and the share of completions without it.

    Args:
        total: [n] the weighted sums; NaN where a completion has no reward.
        values: name -> [n], unweighted; NaN where that reward was not given.
    """
    row = {"reward/none": float(np.isnan(total).sum())}
    known = total[~np.isnan(total)]
    if len(known):
        row |= {"reward/mean": float(known.mean()), "reward/std": float(known.std())}
    for name, given in values.items():
        if not np.isnan(given).all():
            row[f"reward/{name}/mean"] = float(np.nanmean(given))
        if len(given) and name not in PENALTIES:
            row[f"reward/{name}/missing"] = float(np.isnan(given).mean())
    return row


def join_reports(
    reports: Sequence[RewardReport], counts: Sequence[int], rows: int | None = None
) -> RewardReport:
    """Returns the rewards of several rollouts as those of one that holds them all, in their order.
    Failures and seconds are added up, other metrics are those of all completions.

    Args:
        counts: completions of each.
        rows: B of the whole, with its padding; None: no padding.
    """

    def joined(of: Callable[[RewardReport], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(x)[:n] for x, n in zip(reports, counts, strict=True)])

    def padded(of: Callable[[RewardReport], np.ndarray]) -> np.ndarray:
        values = joined(of)
        return values if rows is None else _padded(values, rows)

    first, each = reports[0], dict[str, np.ndarray]()
    for name in first.per_reward:
        each[name] = padded(lambda report, name=name: report.per_reward[name])  # type: ignore[misc]
    rewards, n = padded(lambda report: report.rewards), sum(counts)
    metrics = reward_stats(rewards[:n], {name: values[:n] for name, values in each.items()})
    added = [name for name in first.metrics if name not in metrics]
    metrics |= {name: sum(report.metrics.get(name, 0.0) for report in reports) for name in added}
    return RewardReport(
        rewards,
        padded(lambda report: report.task),
        each,
        metrics,
        tuple(note for report in reports for note in report.notes),
        tuple(line for report in reports for line in report.messages),
        first.weights,
    )


def cut_report(report: RewardReport, begin: int, end: int, rows: int) -> RewardReport:
    """Returns the rewards of the completions from `begin` to `end` as those of a rollout of so many
    rows; the first have the metrics of all."""

    def cut(values: np.ndarray) -> np.ndarray:
        return _padded(values[begin:end], rows)

    each = {name: cut(values) for name, values in report.per_reward.items()}
    metrics = report.metrics if begin == 0 else {}
    totals = cut(report.rewards), cut(report.task)
    return RewardReport(*totals, each, metrics, (), weights=report.weights)


def with_rewards(
    config: RewardConfig,
    report: RewardReport,
    changed: Mapping[str, np.ndarray],
    group_ids: np.ndarray,
) -> RewardReport:
    """Returns the report with other rewards: sums and metrics follow from them. Prompts of which no
    reward changes keep their sums.

    Args:
        changed: name -> [B] float64, NaN where a completion has none of it.
    """
    values = {**report.per_reward, **changed}
    used = {name: values[name] for name in report.weights}
    drop = config.missing == "drop"
    combined = combine_rewards(used, report.weights, group_ids, {}, drop=drop)
    same = [
        np.equal(values[n], x) | (np.isnan(values[n]) & np.isnan(x))
        for n, x in report.per_reward.items()
    ]
    touched = np.isin(group_ids, group_ids[~np.all(same, axis=0)])
    task = np.where(touched, combined, report.task)
    total = task + config.overlong_penalty * values[OVERLONG] if OVERLONG in values else task
    total = np.where(touched, total, report.rewards)
    n = int((group_ids >= 0).sum())
    stats = reward_stats(total[:n], {name: v[:n] for name, v in values.items()})
    metrics = {**report.metrics, **stats}
    return replace(report, rewards=total, task=task, per_reward=values, metrics=metrics)


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
    failed: Mapping[str, Bool[np.ndarray, " B"]],
    *,
    drop: bool = False,
) -> Float[np.ndarray, " B"]:
    """Computes the weighted sum of several rewards; NaN where a sample has none.

    A reward that is missing adds nothing: its weight is 0 for that sample, as with the `nansum` of
    TRL. A reward that is missing because its function failed leaves the sample without any: it is
    unknown whether the reward applies, and the others do not stand in for it.

    Args:
        rewards: name -> one reward for each sample.
        weights: name -> weight, for the same names.
        failed: name -> True where a reward is missing because its function failed (exception,
            timeout); names left out never failed.
        drop: a reward that only some samples of a group lack leaves those without any, since
            nothing would be compared with what the others of the group have for it. One that the
            whole group lacks does not apply to its prompt and adds nothing.
    """
    ids = np.asarray(group_ids)
    _, group = np.unique(ids, return_inverse=True)
    total, parts, missing = np.zeros(len(ids)), np.zeros(len(ids), int), np.zeros(len(ids), bool)
    for name, given in rewards.items():
        values = as_rewards(given)
        scored = ~np.isnan(values)
        applies = (np.bincount(group, scored) > 0)[group]
        total += weights[name] * np.where(scored, values, 0)
        parts += scored
        missing |= drop & applies & ~scored | failed.get(name, False)
    return np.where(missing | (parts == 0) | (ids < 0), np.nan, total)


def soft_overlong(
    lengths: Int[np.ndarray, " B"], max_tokens: int, cache_tokens: int
) -> Float[np.ndarray, " B"]:
    """Computes the penalty of long completions, to be added to their rewards (DAPO, arXiv
    2503.14476, Eq. 13): 0 up to max_tokens - cache_tokens, then falling in a straight line to -1 at
    max_tokens.

    Args:
        lengths: tokens of each completion.
        cache_tokens: between 1 and max_tokens.
    """
    free = max_tokens - cache_tokens
    return -np.clip((np.asarray(lengths, np.float64) - free) / cache_tokens, 0, 1)
