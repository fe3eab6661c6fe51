"""The training loop. It sees roles and futures, but no devices, processes or names of algorithms.

    for each action of the schedule:
        generate   rollouts = rollout.generate(prompts)
        score      scores   = teacher, reference, reward, grouper .score(rollouts)
        train      report   = actor.update(rollouts, scores)
        publish    role.load(actor.publish(version)) of each role that takes the policy's weights,
                   and an evaluation when one is due

Calls return futures at once, and each worker executes its calls in order. The loop waits only for
the results of the previous batch, from which it writes that batch's row of metrics. The exception
is `policy.dynamic_sampling=refill`, where generating a batch waits for its samples and rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from jaxrl.algorithms.methods import method_of
from jaxrl.algorithms.protocols import ActorRole, ReceivingRole, RoleCalls, role_calls
from jaxrl.algorithms.schedule import SCHEDULES, Action, Schedule
from jaxrl.algorithms.sources import Sources
from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.config.schema import Config
from jaxrl.run.reporting import Futures, Reporter
from jaxrl.run.role_calls import Calls
from jaxrl.runtime.local import done_future
from jaxrl.runtime.worker import Future, Stopped
from jaxrl.types import Rollout


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes."""

    step: int
    """Number of batches trained on; each has its row of metrics."""
    rollouts: Mapping[int, Rollout]
    """Batches generated but not yet trained on."""
    evaluated: bool
    """Whether the row of `step` already contains its evaluation, if one was due."""


def evaluates(config: Config, version: int) -> bool:
    """Returns whether an evaluation of the weights after `version` batches is due. The caller
    checks that there are held-out prompts."""
    every = config.eval.every
    return version in (0, config.steps) or (every > 0 and version % every == 0)


class PendingRows:
    """The futures of a run, each kept until the row of metrics that it belongs to is written."""

    def __init__(self, reporter: Reporter, roles: Mapping[str, RoleCalls]):
        self.futures: dict[tuple[str, int], Future[Any]] = {}
        """Keys: (`rollout` or `update`, batch), or (`publish.ROLE`, `load.ROLE` or `eval.ROLE`,
        version)."""
        self.scores: dict[int, dict[str, Sequence[Future[object]]]] = {}
        """Batch -> role -> one future for each part of its scores."""
        self.reported = -1
        """The newest step whose row is written; -1 before the first."""
        self._reporter, self._roles = reporter, roles

    def scores_to_train_on(self, batch: int) -> dict[str, list[Future[object]]]:
        """Maps each role to its scores. The teacher's, the largest, are freed once the actor has
        them."""
        return {
            role: [part.consume() if self._roles[role].consumed else part for part in parts]
            for role, parts in self.scores[batch].items()
        }

    def report(self, until: int) -> None:
        """Waits for all batches up to batch `until` and writes their rows, up to row `until` + 1.
        -1: row 0 only, the evaluation before the first batch.
        """
        while self.reported <= until:
            step = self.reported + 1
            taken = self._take(step)
            try:
                self._reporter.row(step, taken)
            except Stopped:
                if "rollout" in taken:  # a checkpoint may need it
                    self.futures["rollout", step - 1] = taken["rollout"]
                raise
            self.reported = step

    def amend(self, step: int) -> None:
        """Adds what is missing to the row of `step`, which was written before the interruption."""
        self.reported = step
        self._reporter.amend(step, self._take(step))

    def _take(self, step: int) -> Futures:
        """Removes and returns the futures of one row: those of the batch that made version `step`,
        and those of what followed on that version (publishing, evaluation). The last part of each
        role's scores is `score.ROLE`, the earlier parts are `score.ROLE.0` and so on.
        """
        of_batch = {kind: (kind, step - 1) for kind in ("rollout", "update")}
        of_version = {
            name: (name, step)
            for role in self._roles
            for name in (f"publish.{role}", f"load.{role}", f"eval.{role}")
        }
        keys = of_batch | of_version
        taken = {name: self.futures.pop(key) for name, key in keys.items() if key in self.futures}
        for role, parts in self.scores.pop(step - 1, {}).items():
            taken |= {f"score.{role}.{i}": part for i, part in enumerate(parts[:-1])}
            taken[f"score.{role}"] = parts[-1]
        return taken


@dataclass
class Loop:
    """One run, once its roles have started."""

    sources: Sources
    calls: Calls
    reporter: Reporter
    checkpoints: CheckpointWriter
    around: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext()
    """A context manager around each action; profiling uses it (`Profile.around`)."""

    def __post_init__(self) -> None:
        self.config, self._method = self.sources.config, method_of(self.sources.config)
        self.reporter.wait = self.calls.wait  # waits then end when the run is asked to stop
        self._roles = role_calls(self.config)
        self._scorers = self._method.scorers(self.config)
        self._rows = PendingRows(self.reporter, self._roles)
        self._futures = self._rows.futures
        self._saved = 0  # a step that needs no further save: 0, the one resumed from, or the last

    def run(self, resumed: Resumed | None = None) -> int:
        """Trains on `steps` batches, and evaluates the last weights.

        Returns the number of batches trained on, fewer than `steps` if the run was asked to stop.
        """
        calls = self.calls
        actions: dict[str, Callable[[int], None]] = {"generate": self._generate}
        actions |= {"score": self._score, "train": self._train, "publish": self._publish}
        try:
            self._schedule = self._start() if resumed is None else self._resume(resumed)
            while not calls.asked_to_stop() and (action := self._schedule.next()) is not None:
                # Row i + 1 is of batch i; publishing version i + 1 belongs to that row as well.
                calls.belong_to(action.kind, action.index + (action.kind != "publish"))
                with self.around(action):
                    actions[action.kind](action.index)
            if not calls.asked_to_stop():
                self._close(self._schedule.trained)
        except Stopped:
            if calls.end is None:
                raise
        if calls.asked_to_stop():
            self._close(calls.stop())
        return max(self._rows.reported, 0)

    def _start(self) -> Schedule:
        self._publish(0)
        for role in self.sources.evaluated:
            self._futures[f"eval.{role}", 0] = self.sources.held_out_samples(role)
        staleness = SCHEDULES[self.config.schedule]
        return Schedule(self.config.steps, staleness, scores_ahead=not self._followers)

    @property
    def _followers(self) -> list[str]:
        """Roles that score each batch with the weights that train on it."""
        return [role for role in self._scorers if self._roles[role].publish is not None]

    def _resume(self, resumed: Resumed) -> Schedule:
        step, staleness = resumed.step, SCHEDULES[self.config.schedule]
        self._saved = self.calls.submitted = step
        self.calls.belong_to("publish", step)
        self._publish(step, evaluate=not resumed.evaluated)
        self._rows.amend(step)
        for index, rollout in resumed.rollouts.items():
            self._futures["rollout", index] = done_future(rollout)
        in_flight, ahead = len(resumed.rollouts), not self._followers
        return Schedule.after(step, in_flight, self.config.steps, staleness, ahead)

    def _generate(self, index: int) -> None:
        self._futures["rollout", index] = self._method.completions(self.sources, index)

    def _score(self, index: int) -> None:
        rollout, scores = self._futures["rollout", index], self.sources.early_scores.pop(index, {})
        # A role that needs the scores of others is called after them: a worker that they share
        # takes calls in order, and would wait for ever.
        for role in sorted(self._scorers, key=lambda role: len(self._roles[role].needs)):
            if role not in scores:
                scores[role] = self.sources.scores(role, rollout, scores)
        self._rows.scores[index] = {role: scores[role] for role in self._scorers}

    def _train(self, index: int) -> None:
        rollout, scores = self._futures["rollout", index], self._rows.scores_to_train_on(index)
        self._futures["update", index] = self.calls.call(
            "actor", ActorRole.update, rollout, scores, step=index
        )
        if self.checkpoints.due(index + 1):
            self._save(index + 1)
        self._rows.report(until=index - 1)

    def _publish(self, version: int, evaluate: bool = True) -> None:
        """Sends new weights to the rollout, unless it will sample nothing with them, and to the
        scorers that follow the policy, unless no batch is left to score."""
        due = evaluate and bool(self.sources.held_out) and evaluates(self.config, version)
        left = version < self.config.steps
        if due or (left and self._method.samples_policy(self.config)):
            self._send_weights("rollout", version)
        if due:
            self._futures["eval.rollout", version] = self.sources.held_out_samples("rollout")
        for role in self._followers if left else ():
            self._send_weights(role, version)

    def _send_weights(self, role: str, version: int) -> None:
        """Has the actor send its weights to a role that takes them."""
        publish = self._roles[role].publish
        assert publish is not None
        weights = self.calls.call("actor", publish, version=version)
        self._futures[f"publish.{role}", version] = weights
        loaded = self.calls.call(role, ReceivingRole.load, weights)
        self._futures[f"load.{role}", version] = loaded

    def _save(self, step: int) -> None:
        """Requests a checkpoint of the state after `step` batches, without waiting for it."""
        self.calls.belong_to("save", step)
        folder = self.checkpoints.folder(step)
        asked = self.calls.call("actor", ActorRole.save, folder, step=step)
        saved = self.calls.call("actor", ActorRole.saved, asked)
        generated = min(self._schedule.generated, step + self._schedule.staleness)
        in_flight = {i: self._futures["rollout", i] for i in range(step, generated)}
        schedule = {"name": self.config.schedule, "generated": generated, "trained": step}
        self.checkpoints.begin(step, saved, in_flight, schedule)

    def _close(self, end: int) -> None:
        """Saves the state after `end` batches, unless that is done or due, and writes the rows up
        to that of batch `end` - 1."""
        if end != self._saved and not self.checkpoints.due(end):
            self._save(end)
            self._saved = end
        if end:
            self._rows.report(until=end - 1)
