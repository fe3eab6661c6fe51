"""The training loop. It knows roles and futures; never devices, processes or the name of an
algorithm.

    for each action of the schedule:
        generate   rollouts = rollout.generate(prompts)
        score      signal   = teacher.score(rollouts)
        train      report   = actor.update(prepare(rollouts, signal))
        publish    rollout.load(actor.publish(version)), and evaluate when it is time

Calls return at once; each worker takes its own in order. The driver waits only for reports, one
batch late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl.algorithms import ALGORITHMS
from jaxrl.config import Config
from jaxrl.data.batch import data_rollout
from jaxrl.reporting import Reporter
from jaxrl.runtime.worker import Future, Handle
from jaxrl.schedule import SCHEDULES, Schedule
from jaxrl.types import Prompt, Rollout


class Checkpoints(Protocol):
    """Where the loop's state goes, as it needs it (`checkpoint.writer.CheckpointWriter`)."""

    def due(self, step: int) -> bool: ...

    def folder(self, step: int) -> Any: ...

    def begin(
        self, step: int, saving: Any, rollouts: Mapping[int, Any], schedule: dict[str, Any]
    ) -> None: ...


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    step: int
    """Batches trained, and told in a row each."""
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


class Loop:
    """One run over already started roles."""

    def __init__(
        self,
        config: Config,
        roles: Mapping[str, Handle],
        prompts: Any,
        held_out: Sequence[Prompt],
        reporter: Reporter,
        packing: Mapping[str, Any],
        value: Any,
        checkpoints: Checkpoints | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ):
        """
        Args:
            prompts: `batch(i)` -> the prompts of batch i; a pure function.
            packing: arguments of `data_rollout`: widths, pad id, row multiple, decoder.
            value: wraps something that is there already as a future (`done_future` of the
                launcher).
            checkpoints: None: none are written.
            asked_to_stop: looked at between actions; what is trained is saved then.
        """
        self.config, self.roles, self.reporter = config, roles, reporter
        self._stream, self._held_out, self._packing, self._value = prompts, held_out, packing, value
        self._checkpoints, self._asked_to_stop = checkpoints, asked_to_stop
        self._algorithm = ALGORITHMS[config.algorithm]
        self._futures: dict[tuple[str, int], Future | None] = {}
        self._reported = -1
        self._saved = 0

    def run(self, resumed: Resumed | None = None) -> int:
        """Trains up to `steps` batches; the last weights are evaluated too.

        Returns the batches trained: fewer than `steps` where the run was asked to stop.
        """
        self._schedule = self._begin() if resumed is None else self._go_on(resumed)
        while not self._asked_to_stop() and (action := self._schedule.next()) is not None:
            getattr(self, action.kind)(action.index)
        if self._saved < self._schedule.trained and not self.reporter.gave_up:
            self._save(self._schedule.trained)
        self._report(until=self._schedule.trained - 1)
        return self._reported

    def _begin(self) -> Schedule:
        self.publish(0)
        if self.config.eval.teacher and self._held_out and "teacher" in self.roles:
            self._futures["teacher", 0] = self._sample("teacher")
        return Schedule(self.config.steps, SCHEDULES[self.config.schedule])

    def _go_on(self, resumed: Resumed) -> Schedule:
        step, staleness = resumed.step, SCHEDULES[self.config.schedule]
        self._reported = self._saved = step
        self.publish(step, evaluate=not resumed.evaluated)
        self.reporter.amend(step, self._take(step))
        for index, rollout in resumed.rollouts.items():
            self._futures["rollout", index] = self._value(rollout)
        return Schedule.after(step, len(resumed.rollouts), self.config.steps, staleness)

    def generate(self, index: int) -> None:
        self._futures["rollout", index] = self._algorithm.completions(self, index)

    def score(self, index: int) -> None:
        self._futures["score", index] = self._algorithm.score(self, self._rollout(index))

    def train(self, index: int) -> None:
        signal = self._futures["score", index]
        signal = None if signal is None else signal.once()
        deadline = self.config.deadlines.update
        self._futures["update", index] = self.roles["actor"].call(
            "update", self._rollout(index), signal, step=index, deadline=deadline
        )
        if self._checkpoints is not None and self._checkpoints.due(index + 1):
            self._save(index + 1)
        self._report(until=index - 1)

    def publish(self, version: int, evaluate: bool = True) -> None:
        """New weights to the role that samples; skipped where nothing will be sampled with them."""
        due = evaluate and self._held_out and evaluates(self.config, version)
        sampled = self._algorithm.samples_policy(self.config) and version < self.config.steps
        if not due and not sampled:
            return
        deadline = self.config.deadlines.weight_sync
        dtype = self.config.rollout.dtype
        weights = self.roles["actor"].call(
            "publish", version=version, dtype=dtype, deadline=deadline
        )
        self._futures["sync", version] = self.roles["rollout"].call(
            "load", weights, deadline=deadline
        )
        if due:
            self._futures["eval", version] = self._sample("rollout")

    def _save(self, step: int) -> None:
        """Asks for a checkpoint of what the actor is after `step` batches; waits for nothing."""
        self._saved = step
        if self._checkpoints is None:
            return
        folder = self._checkpoints.folder(step)
        deadline = self.config.deadlines.checkpoint
        saving = self.roles["actor"].call("save", folder, step=step, deadline=deadline)
        generated = self._schedule.generated
        in_flight = {i: self._rollout(i) for i in range(step, generated)}
        schedule = {"name": self.config.schedule, "generated": generated, "trained": step}
        self._checkpoints.begin(step, saving, in_flight, schedule)

    # What an algorithm may call (`algorithms.Sources`).

    def prompts(self, index: int) -> Sequence[Prompt]:
        return self._stream.batch(index)

    def student_samples(self, index: int) -> Future:
        return self._generate("rollout", index)

    def teacher_samples(self, index: int) -> Future:
        return self._generate("teacher", index)

    def data_completions(self, index: int) -> Future:
        return self._value(data_rollout(self.prompts(index), **self._packing))

    def teacher_scores(self, rollout: Future) -> Future:
        return self.roles["teacher"].call("score", rollout, deadline=self.config.deadlines.score)

    def _generate(self, role: str, index: int) -> Future:
        deadline = self.config.deadlines.generate
        return self.roles[role].call("generate", self.prompts(index), step=index, deadline=deadline)

    def _sample(self, role: str) -> Future:
        deadline = self.config.deadlines.evaluate
        return self.roles[role].call("sample", self._held_out, deadline=deadline)

    def _rollout(self, index: int) -> Future:
        future = self._futures["rollout", index]
        assert future is not None
        return future

    def _report(self, until: int) -> None:
        """Waits for the batches up to `until` (-1: the evaluation before the first) and writes
        their rows.
        """
        while self._reported <= until and not self.reporter.gave_up:
            self.reporter.row(self._reported + 1, self._take(self._reported + 1))
            self._reported += 1

    def _take(self, step: int) -> dict[str, Future]:
        """The futures of one row: of the batch that made version `step`, and what followed."""
        batch = [(kind, step - 1) for kind in ("rollout", "score", "update")]
        keys = [*batch, ("sync", step), ("eval", step), ("teacher", step)]
        taken = {key[0]: self._futures.pop(key, None) for key in keys}
        return {kind: future for kind, future in taken.items() if future is not None}
