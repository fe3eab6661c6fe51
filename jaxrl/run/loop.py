"""The training loop. It knows roles and futures; never devices, processes or the name of an
algorithm.

    for each action of the schedule:
        generate   rollouts = rollout.generate(prompts)
        score      scores   = teacher, reference, reward, grouper .score(rollouts)
        train      report   = actor.update(rollouts, scores)
        publish    rollout.load(actor.publish(version)), and evaluate when it is time

Calls return at once; each worker takes its own in order. The driver waits only for reports, one
batch late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from jaxrl.algorithms.methods import method_of
from jaxrl.algorithms.protocols import ActorRole, RolloutRole
from jaxrl.algorithms.schedule import SCHEDULES, Action, Schedule
from jaxrl.algorithms.sources import Sources
from jaxrl.checkpoint.writer import CheckpointWriter
from jaxrl.config.schema import Config
from jaxrl.run.calls import Calls
from jaxrl.run.reporting import Reporter
from jaxrl.runtime.local import done_future
from jaxrl.runtime.worker import Future, Stopped
from jaxrl.types import Rollout


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes."""

    step: int
    """Batches that are trained and have a row each."""
    rollouts: Mapping[int, Rollout]
    """Batches generated but not yet trained on."""
    evaluated: bool
    """Whether the row of `step` has its evaluation."""


def evaluates(config: Config, version: int) -> bool:
    """Whether the weights after `version` batches are evaluated, where there is anything to
    evaluate on.
    """
    every = config.eval.every
    return version in (0, config.steps) or (every > 0 and version % every == 0)


class PendingRows:
    """The futures of a run, until the row that they belong to is written."""

    def __init__(self, reporter: Reporter):
        self.futures: dict[tuple[str, int], Future[Any]] = {}
        """(`rollout` or `update`, batch) or (`publish`, `sync`, `eval` or `teacher`, version)."""
        self.scores: dict[int, dict[str, Sequence[Future[object]]]] = {}
        """Batch -> role -> its scores."""
        self.reported = -1
        """The newest step that has its row."""
        self._reporter = reporter

    def scores_to_train_on(self, batch: int) -> dict[str, list[Future[object]]]:
        """Role -> its scores. The teacher's are the largest: dropped once the actor has them."""
        return {
            role: [part.consume() if role == "teacher" else part for part in parts]
            for role, parts in self.scores[batch].items()
        }

    def report(self, until: int) -> None:
        """Waits for the batches up to `until` (-1: the evaluation before the first) and writes
        their rows.
        """
        while self.reported <= until:
            step = self.reported + 1
            taken = self._take(step)
            try:
                self._reporter.row(step, taken)
            except Stopped:
                if "rollout" in taken:  # it may be saved
                    self.futures["rollout", step - 1] = taken["rollout"]
                raise
            self.reported = step

    def amend(self, step: int) -> None:
        """Completes the row of `step`, which a run before this one wrote."""
        self.reported = step
        self._reporter.amend(step, self._take(step))

    def _take(self, step: int) -> dict[str, Future[Any]]:
        """The futures of one row: of the batch that made version `step`, and what followed; of each
        role's scores the last part as `score.ROLE`, those before as `score.ROLE.0` and so on.
        """
        batch = [(kind, step - 1) for kind in ("rollout", "update")]
        keys = [*batch, ("publish", step), ("sync", step), ("eval", step), ("teacher", step)]
        taken = {key[0]: self.futures.pop(key) for key in keys if key in self.futures}
        for role, parts in self.scores.pop(step - 1, {}).items():
            taken |= {f"score.{role}.{i}": part for i, part in enumerate(parts[:-1])}
            taken[f"score.{role}"] = parts[-1]
        return taken


@dataclass
class Loop:
    """One run over started roles."""

    sources: Sources
    calls: Calls
    reporter: Reporter
    checkpoints: CheckpointWriter
    around: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext()
    """Entered before each action and left after it (`Profile.around`)."""

    def __post_init__(self) -> None:
        self.config, self._method = self.sources.config, method_of(self.sources.config)
        self._rows, self.reporter.wait = PendingRows(self.reporter), self.calls.wait
        self._futures = self._rows.futures
        self._saved = 0  # a step that was saved without being due; nothing is before the first

    def run(self, resumed: Resumed | None = None) -> int:
        """Trains up to `steps` batches; the last weights are evaluated too.

        Returns the batches trained: fewer than `steps` where the run was asked to stop.
        """
        calls = self.calls
        actions: dict[str, Callable[[int], None]] = {"generate": self._generate}
        actions |= {"score": self._score, "train": self._train, "publish": self._publish}
        try:
            self._schedule = self._start() if resumed is None else self._resume(resumed)
            while not calls.asked_to_stop() and (action := self._schedule.next()) is not None:
                # A version belongs to the row of the batch that made it.
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
        samples = "teacher" in self.calls.roles and self.config.teacher.address is None
        if self.config.eval.teacher and self.sources.held_out and samples:
            self._futures["teacher", 0] = self.sources.held_out_samples("teacher")
        return Schedule(self.config.steps, SCHEDULES[self.config.schedule])

    def _resume(self, resumed: Resumed) -> Schedule:
        step, staleness = resumed.step, SCHEDULES[self.config.schedule]
        self._saved = self.calls.submitted = step
        self.calls.belong_to("publish", step)
        self._publish(step, evaluate=not resumed.evaluated)
        self._rows.amend(step)
        for index, rollout in resumed.rollouts.items():
            self._futures["rollout", index] = done_future(rollout)
        return Schedule.after(step, len(resumed.rollouts), self.config.steps, staleness)

    def _generate(self, index: int) -> None:
        self._futures["rollout", index] = self._method.completions(self.sources, index)

    def _score(self, index: int) -> None:
        early = self.sources.early_scores.pop(index, {})
        self._rows.scores[index] = {
            role: early.get(role) or self.sources.scores(role, self._futures["rollout", index])
            for role in self._method.scorers(self.config)
        }

    def _train(self, index: int) -> None:
        rollout, scores = self._futures["rollout", index], self._rows.scores_to_train_on(index)
        self._futures["update", index] = self.calls.call(
            "actor", ActorRole.update, rollout, scores, step=index
        )
        if self.checkpoints.due(index + 1):
            self._save(index + 1)
        self._rows.report(until=index - 1)

    def _publish(self, version: int, evaluate: bool = True) -> None:
        """New weights to the role that samples; skipped where nothing will be sampled with them."""
        due = evaluate and self.sources.held_out and evaluates(self.config, version)
        sampled = self._method.samples_policy(self.config) and version < self.config.steps
        if not due and not sampled:
            return
        call, dtype = self.calls.call, self.config.rollout.compute_dtype
        weights = call("actor", ActorRole.publish, version=version, dtype=dtype)
        self._futures["publish", version] = weights
        self._futures["sync", version] = call("rollout", RolloutRole.load, weights)
        if due:
            self._futures["eval", version] = self.sources.held_out_samples("rollout")

    def _save(self, step: int) -> None:
        """Asks for a checkpoint of what the actor is after `step` batches; waits for nothing."""
        self.calls.belong_to("save", step)
        folder = self.checkpoints.folder(step)
        asked = self.calls.call("actor", ActorRole.save, folder, step=step)
        saved = self.calls.call("actor", ActorRole.saved, asked)
        generated = min(self._schedule.generated, step + self._schedule.staleness)
        in_flight = {i: self._futures["rollout", i] for i in range(step, generated)}
        schedule = {"name": self.config.schedule, "generated": generated, "trained": step}
        self.checkpoints.begin(step, saved, in_flight, schedule)

    def _close(self, end: int) -> None:
        """Saves what is unsaved after the last batch, and writes its row."""
        if end != self._saved and not self.checkpoints.due(end):
            self._save(end)
            self._saved = end
        if end:
            self._rows.report(until=end - 1)
