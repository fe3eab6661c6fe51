"""A batch of a session, as texts and arrays that a notebook can show (`run.session`).

Shapes: B completions, T tokens of a prompt with its completion; prompts are left-padded and
completions right-padded, so that all completions begin at the same column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jaxrl.algorithms.methods import method_of, objective_of
from jaxrl.config.schema import Config
from jaxrl.errors import UserError, counted, short, shown, unknown
from jaxrl.rewards.batch_rewards import RewardReport, as_rewards, with_rewards
from jaxrl.runtime.worker import Future, done_future
from jaxrl.types import Prompt, Rollout, TokenValues, TrainBatch

ROWS, WIDTH = 8, 28
"""Rows that a table shows of a batch, and characters of a text in it."""
Scores = Mapping[str, Sequence[Future[Any]]]
"""Role -> the parts of its scores."""


class Table(str):
    """Text that a notebook shows as it is."""

    heading = ""
    columns: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Name -> its cells, which are below each other in the text."""

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def of(cls, title: str, columns: Mapping[str, Sequence[object]]) -> Table:
        """Lays columns out under their names: texts to the left, numbers to the right."""
        lines = [""] * (1 + max(map(len, columns.values())))
        texts = {name: [_cell(value) for value in values] for name, values in columns.items()}
        for name, values in columns.items():
            cells = [name, *texts[name]]
            width = max(map(len, cells))
            text = any(isinstance(value, str) for value in values)
            lines = [
                f"{line}  {cell.ljust(width) if text else cell.rjust(width)}"
                for line, cell in zip(lines, cells, strict=True)
            ]
        made = cls("\n".join([title, *(line.rstrip() for line in lines)]))
        made.heading, made.columns = title, texts
        return made


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float | np.floating):
        return "-" if np.isnan(value) else f"{value:.4g}"
    return str(value)


def _quoted(text: str) -> str:
    return short(repr(text), WIDTH)


@dataclass(frozen=True, repr=False)
class Prompts(Sequence[Prompt]):
    """The prompts of one step."""

    step: int
    """The step that trains on them, from 1: that of the row in `metrics.jsonl`."""
    prompts: tuple[Prompt, ...]

    @property
    def texts(self) -> list[str]:
        """Returns the text of each: of a chat, that of its last message."""
        return [prompt.text for prompt in self.prompts]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: Any) -> Any:
        return self.prompts[index]

    def __repr__(self) -> str:
        rows = self.prompts[:ROWS]
        columns: dict[str, Sequence[object]] = {
            "prompt": [_quoted(prompt.text) for prompt in rows],
            "answer": [_quoted(prompt.answer or "") for prompt in rows],
            "tokens": [len(prompt.tokens) for prompt in rows],
        }
        return Table.of(f"step {self.step}: {counted(len(self), 'prompt')}", columns)


class Owner(Protocol):
    """The session, as its batches see it."""

    @property
    def step(self) -> int: ...
    @property
    def config(self) -> Config: ...
    def decode(self, token: int) -> str: ...
    def inspect(self, batch: BatchByHand) -> TokenValues: ...


@dataclass(eq=False, repr=False)
class BatchByHand:
    """The completions of one step and, once they are scored, rewards and advantages.

    `sample` and `score` of a session return one each. Arrays are of numpy, [B] or [B, T], and
    cannot be written in place: assign `rewards` or `advantages` to change what is learned.
    """

    step: int
    """The step that trains on it, from 1: that of the row in `metrics.jsonl`."""
    owner: Owner
    sampled: Future[Rollout]
    early: Scores
    """Scores that were made while it was sampled (`policy.dynamic_sampling=refill`)."""
    early_functions: tuple[str, ...]
    """The run's `reward.functions` then."""
    scored: Scores | None = None
    """None before `score`."""
    _report: RewardReport | None = None
    """With the rewards and advantages as they are now, where they were assigned."""
    _values: dict[int, TokenValues] = field(default_factory=dict)
    """Step -> what the policy after it makes of the batch, where that was asked for."""

    # What was sampled.

    @cached_property
    def rollout(self) -> Rollout:
        """Returns the completions as the roles pass them on."""
        return self.sampled.result()

    @property
    def prompts(self) -> list[str]:
        """Returns the text of each completion's prompt, [B]."""
        return [prompt.text for prompt in self.rollout.prompts]

    @property
    def texts(self) -> list[str]:
        """Returns the text of each completion, [B]; of an episode, that of its last turn."""
        return [completion.text for completion in self.rollout.completions]

    @property
    def finish_reasons(self) -> list[str]:
        """Returns why each completion ended, [B]: `stop` or `length`."""
        return [completion.finish_reason for completion in self.rollout.completions]

    @property
    def group_ids(self) -> np.ndarray:
        """Returns [B] int32: completions of one prompt have the same number."""
        return self._show(self.rollout.group_ids)

    @property
    def tokens(self) -> np.ndarray:
        """Returns [B, T] int32: prompts and completions."""
        return self._show(self.rollout.sequences.tokens)

    @property
    def mask(self) -> np.ndarray:
        """Returns [B, T] bool: True at tokens, False at padding."""
        return self._show(self.rollout.sequences.mask)

    @property
    def loss_mask(self) -> np.ndarray:
        """Returns [B, T] bool: True at the tokens that train. Once the batch is scored, completions
        that dynamic sampling or `reward.truncated` leave out have none."""
        if self._rewarded is None:
            return self._wide(self.rollout.sequences.loss_mask)
        return self._wide(self._rewarded.policy_mask)

    @property
    def logprobs(self) -> np.ndarray:
        """Returns [B, T] float32, nats: log-probs of the completion tokens under the policy that
        sampled them, at the sampling temperature; 0 elsewhere."""
        return self._wide(self.rollout.logprobs)

    @property
    def sampler_logprobs(self) -> np.ndarray:
        """Returns [B, T] float32, nats: the same under the distribution that was sampled from,
        after truncation (top-k, top-p, min-p)."""
        return self._wide(self.rollout.sampler_logprobs)

    # What is learned.

    @property
    def rewards(self) -> Mapping[str, np.ndarray]:
        """Returns name -> [B] float64, unweighted, NaN where a completion has none of it; empty
        where the algorithm does not learn from rewards.

        Assign a mapping of some of the names to arrays [B] (None or NaN: no reward): the sum, the
        advantages and the row's `reward/...` follow from it; advantages that were assigned are
        forgotten.
        """
        report = self._rewards_now
        each = {} if report is None else report.per_reward
        return MappingProxyType({name: self._show(values) for name, values in each.items()})

    @rewards.setter
    def rewards(self, given: Mapping[str, Any]) -> None:
        report = self._changeable("rewards")
        if not isinstance(given, Mapping):
            raise UserError(f"batch.rewards: a mapping of names to arrays is needed, got {given!r}")
        changed = {}
        for name, values in given.items():
            if name not in report.per_reward:
                raise unknown("reward", name, report.per_reward)
            array = self._array(f"batch.rewards[{name!r}]", values, (self._shape[:1],))
            changed[name] = self._padded(as_rewards(array), np.nan)
        ids = self.rollout.group_ids
        report = with_rewards(self.owner.config.rewards, report, changed, ids)
        self._set(replace(report, advantages=None))

    @property
    def reward_total(self) -> np.ndarray | None:
        """Returns [B] float64: the weighted sum with penalties, NaN where a completion has no
        reward; None where the algorithm does not learn from rewards."""
        report = self._rewards_now
        return None if report is None else self._show(report.rewards)

    @property
    def advantages(self) -> np.ndarray | None:
        """Returns [B] float32 or, with `environment.credit=turn` or where they were assigned so,
        [B, T]; None where the algorithm does not learn from rewards.

        Assign an array to train on it in place of what follows from the rewards: [B] or, where the
        algorithm's ratio is of single tokens, [B, T].
        """
        if self._rewarded is None:
            self._check_scored()
            return None
        found = np.asarray(self._rewarded.advantages)
        return self._show(found) if found.ndim == 1 else self._wide(found)

    @advantages.setter
    def advantages(self, given: Any) -> None:
        report, (rows, width) = self._changeable("advantages"), self._shape
        by_token = objective_of(self.owner.config).ratio != "sequence"
        shapes = ((rows,), (rows, width)) if by_token else ((rows,),)
        array = self._array("batch.advantages", given, shapes)
        if not np.isfinite(array).all():
            raise UserError("batch.advantages has a number that is not finite")
        c = self.rollout.sequences.loss_mask.shape[1]
        if array.ndim == 2:
            array = array[:, width - c :]
        elif self.owner.config.token_advantages:
            array = np.repeat(array[:, None], c, 1)
        self._set(replace(report, advantages=self._padded(array, 0.0)))

    @property
    def ref_logprobs(self) -> np.ndarray | None:
        """Returns [B, T] float32, nats: log-probs under the reference; None without
        `policy.kl_coef`."""
        self._check_scored()
        found = None if self._rewarded is None else self._rewarded.ref_logprobs
        return None if found is None else self._wide(found)

    # What the policy in training makes of it.

    @property
    def divergence(self) -> np.ndarray | None:
        """Returns [B, T] float32, nats: the divergence from the teacher at each token that trains,
        whose mean is `distill/divergence`; None without a teacher.

        It is that of the policy before the update, computed when first read, which must be before
        the update: that frees the teacher's scores.
        """
        self._check_scored()
        found = self._values_after(self.step - 1, "divergence").divergence
        return None if found is None else self._wide(found)

    @property
    def entropy(self) -> np.ndarray:
        """Returns [B, T] float32, nats: the entropy of the policy before the update at each token
        that trains, at the sampling temperature. Computed when first read, as `divergence`."""
        return self._wide(self._values_after(self.step - 1, "entropy").entropy)

    @property
    def learner_logprobs(self) -> np.ndarray:
        """Returns [B, T] float32, nats: log-probs of the completion tokens under the policy in
        training as it is now, at the sampling temperature. Computed when first read, and again when
        read after an update."""
        return self._wide(self._values_after(self.owner.step, "learner_logprobs").logprobs)

    @property
    def ratio(self) -> np.ndarray | None:
        """Returns [B, T] float32: exp(learner_logprobs - logprobs), 1 where nothing trains. Before
        the update the weights are the same, and it tells how far the arithmetic of learner and
        sampler differs; after it, how far the update has moved each token. None where no policy
        sampled the batch: it is of the data, or the teacher's."""
        if self.rollout.policy_version < 0:
            return None
        mask = self._wide(self.rollout.sequences.loss_mask)
        with np.errstate(over="ignore"):
            return np.where(mask, np.exp(self.learner_logprobs - self.logprobs), np.float32(1))

    # Tables.

    def __repr__(self) -> str:
        made = self.rollout
        by = f"sampled after step {made.policy_version}"
        if made.policy_version < 0:
            by = "of the data" if not made.decode_steps else "of the teacher"
        state = "trained" if self.step <= self.owner.step else "scored"
        if self.scored is None:
            state = "not scored"
        n, prompts = len(made.completions), len(np.unique(self.group_ids))
        title = f"step {self.step}: {n} completions of {counted(prompts, 'prompt')}, {by}, {state}"
        shown_rows = f"; the first {ROWS}" if n > ROWS else ""
        rows = range(min(n, ROWS))
        columns: dict[str, Sequence[object]] = {
            "row": list(rows),
            "prompt": [_quoted(made.prompts[i].text) for i in rows],
            "completion": [_quoted(made.completions[i].text) for i in rows],
            "tokens": [len(made.completions[i].tokens) for i in rows],
            "end": [made.completions[i].finish_reason for i in rows],
        }
        if made.policy_version >= 0:
            columns["logprob"] = list(self.logprobs.sum(-1)[: len(rows)])
        if self.scored is not None:
            columns |= {name: list(values[: len(rows)]) for name, values in self.rewards.items()}
            if (advantages := self.advantages) is not None:
                if advantages.ndim == 2:  # their mean
                    n_trained = self.loss_mask.sum(-1).clip(1)
                    advantages = (advantages * self.loss_mask).sum(-1) / n_trained
                columns["advantage"] = list(advantages[: len(rows)])
        return Table.of(title + shown_rows, columns)

    def row(self, row: int) -> Table:
        """Returns a table of the tokens of one completion: log-probs of sampler and learner, ratio,
        advantage, divergence and entropy, as far as they are known. Computes what was not read."""
        made = self.rollout
        if not -len(made.completions) <= row < len(made.completions):
            raise UserError(f"row {row}: the batch has {counted(len(made.completions), 'row')}")
        row %= len(made.completions)
        completion, at = made.completions[row], made.sequences.loss_mask.shape[1]
        place = slice(self._shape[1] - at, self._shape[1] - at + len(completion.tokens))
        columns: dict[str, Sequence[object]] = {
            "token": [repr(self.owner.decode(int(token))) for token in completion.tokens]
        }
        if len(completion.versions) > 1:
            columns["version"] = completion.token_versions.tolist()
        arrays: dict[str, np.ndarray | None] = {}
        if made.policy_version >= 0:
            arrays["logprob"] = self.logprobs
        arrays |= {"learner": self.learner_logprobs, "ratio": self.ratio}
        if self.scored is not None and (advantages := self.advantages) is not None:
            wide = advantages[:, None] if advantages.ndim == 1 else advantages
            arrays["advantage"] = np.broadcast_to(wide, self._shape)
        if self.step - 1 in (self.owner.step, *self._values):
            if self.scored is not None:
                arrays["divergence"] = self.divergence
            arrays["entropy"] = self.entropy
        columns |= {name: list(x[row, place]) for name, x in arrays.items() if x is not None}
        columns["trains"] = ["yes" if x else "no" for x in self.loss_mask[row, place]]
        title = f"step {self.step}, row {row}: {short(repr(made.prompts[row].text), 60)}"
        return Table.of(title, columns)

    # For the session.

    @property
    def scores(self) -> Scores:
        """Returns the scores as they are now, with rewards and advantages that were assigned."""
        scored = self._check_scored()
        if self._report is None:
            return scored
        future: Future[Any] = done_future(self._report)
        future.times = scored["reward"][0].times
        return {**scored, "reward": [future]}

    @property
    def _rewards_now(self) -> RewardReport | None:
        parts = self.scores.get("reward")
        return None if parts is None else parts[0].result()

    @cached_property
    def _rewarded(self) -> TrainBatch | None:
        """What the actor trains on, without the teacher's part; None where there are no rewards, or
        none yet."""
        if self.scored is None or "reward" not in self.scored:
            return None
        config = self.owner.config
        own = config.spec.method is not None  # which may read whatever it likes
        found = {
            role: [part.result() for part in parts]
            for role, parts in self.scores.items()
            if own or role != "teacher"
        }
        return method_of(config).prepare(config)(self.rollout, found)[0]

    def _set(self, report: RewardReport) -> None:
        self._report = report
        self.__dict__.pop("_rewarded", None)

    def _changeable(self, name: str) -> RewardReport:
        report = self._rewards_now
        if report is None:
            algorithm = self.owner.config.algorithm
            raise UserError(f"batch.{name}: algorithm={algorithm} does not learn from rewards")
        if self.step <= self.owner.step:
            raise UserError(f"batch.{name}: step {self.step} is trained already")
        return report

    def _check_scored(self) -> Scores:
        if self.scored is None:
            raise UserError(
                f"the batch of step {self.step} is not scored yet: batch = s.score(batch)"
            )
        return self.scored

    def _values_after(self, step: int, name: str) -> TokenValues:
        if step not in self._values:
            if step != self.owner.step:
                raise UserError(
                    f"batch.{name} is that of the policy before the update, and step {self.step} is"
                    " trained already: read it before s.update(batch)"
                )
            self._values[step] = self.owner.inspect(self)
        return self._values[step]

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.rollout.completions), self.rollout.sequences.tokens.shape[1]

    def _show(self, array: Any) -> np.ndarray:
        """Returns the rows of completions, which cannot be written."""
        view = np.asarray(array)[: self._shape[0]]
        view.flags.writeable = False
        return view

    def _wide(self, array: Any) -> np.ndarray:
        """Returns [B, T] of [B, C], 0 at prompts."""
        rows, width = self._shape
        x = np.asarray(array)[:rows]
        return self._show(np.pad(x, ((0, 0), (width - x.shape[1], 0))))

    def _padded(self, array: np.ndarray, fill: float) -> np.ndarray:
        more = len(self.rollout.group_ids) - len(array)
        return np.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1), constant_values=fill)

    def _array(self, name: str, values: Any, shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
        try:
            array = np.array(values, np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{name}: {shown(values)} is no array of numbers") from None
        if array.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise UserError(f"{name} has the shape {list(array.shape)}; it must be {wanted}")
        return array
