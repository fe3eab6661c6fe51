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
from typing import Any, Protocol

from jaxrl.algorithms.methods import method_of
from jaxrl.algorithms.schedule import SCHEDULES, Action, Schedule
from jaxrl.config.schema import Config
from jaxrl.data.batch import data_rollout
from jaxrl.run.reporting import Reporter
from jaxrl.runtime.worker import Future, Handle, Stopped
from jaxrl.types import Prompt, Rollout

REFILL_OFFSET = 1 << 20
"""A refill draws its prompts this many batches past the batch that it fills, so that no batch of
the run has them."""


POLL_S = 0.5
"""How often a wait looks whether the run was asked to end."""


class Checkpoints(Protocol):
    """Where the loop's state goes, as it needs it (`checkpoint.writer.CheckpointWriter`)."""

    def due(self, step: int) -> bool: ...

    def folder(self, step: int) -> Any: ...

    def begin(
        self, step: int, saved: Any, rollouts: Mapping[int, Any], schedule: dict[str, Any]
    ) -> None: ...


@dataclass(frozen=True)
class Asked:
    """A call that the loop asked for."""

    kind: str
    """`generate`, `score`, `train` or `publish`, as the action that asked for it, or `save`."""
    row: int
    """The row of the metrics that it belongs to: of the batch that makes this version, or of what
    follows on that.
    """
    future: Future


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


def scoring_parts(config: Config, role: str) -> tuple[int | None, bool]:
    """Micro-batches in which a role scores a rollout, None where it takes it whole; and whether it
    takes several at once.
    """
    if role == "teacher":
        return config.teacher.num_microbatches, config.teacher.address is not None
    return (config.reference.num_microbatches if role == "reference" else None), False


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
        value: Callable[[Any], Future],
        decode: Callable[[Sequence[int]], str] = str,
        checkpoints: Checkpoints | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        around: Callable[[Action], AbstractContextManager[None]] = lambda action: nullcontext(),
    ):
        """
        Args:
            prompts: `batch(i)` -> the prompts of batch i; a pure function.
            packing: arguments of `make_rollout`: widths, pad id, row multiple.
            value: wraps something that is there already as a future (`Crew.value`).
            decode: the text of tokens, for the data's own completions.
            checkpoints: None: none are written.
            asked_to_stop: looked at between actions; what is trained is saved then.
            around: entered before each action and left after it (`Profile.around`).
        """
        self.config, self.roles, self.reporter = config, roles, reporter
        self._stream, self._held_out, self.packing, self.value = prompts, held_out, packing, value
        self._checkpoints, self._asked_to_stop = checkpoints, asked_to_stop
        self._decode, self._around = decode, around
        self._algorithm = method_of(config)
        self._futures: dict[tuple[str, int], Future] = {}
        self._scores: dict[int, dict[str, list[Future]]] = {}
        self._known: dict[int, dict[str, list[Future]]] = {}
        self._reported = -1
        self._submitted = 0
        """Batches that the actor was asked to train."""
        self._saves = {0}
        """Steps after which a save was asked for; there is nothing to save before the first."""
        self._asked: list[Asked] = []
        """Those that may not have ended."""
        self._now = ("publish", 0)
        """Kind and row of what is asked for now."""
        self._end: int | None = None
        """Batches after which the run ends, once it was asked to."""
        reporter.wait = self.wait

    def run(self, resumed: Resumed | None = None) -> int:
        """Trains up to `steps` batches; the last weights are evaluated too.

        Returns the batches trained: fewer than `steps` where the run was asked to stop.
        """
        try:
            self._schedule = self._begin() if resumed is None else self._go_on(resumed)
            while not self._asked_to_stop() and (action := self._schedule.next()) is not None:
                # A version belongs to the row of the batch that made it.
                self._now = action.kind, action.index + (action.kind != "publish")
                with self._around(action):
                    getattr(self, action.kind)(action.index)
            if not self._asked_to_stop():
                self._close(self._schedule.trained)
        except Stopped:
            if self._end is None:
                raise
        if self._asked_to_stop():
            self._close(self._stop())
        return max(self._reported, 0)

    def _close(self, end: int) -> None:
        """Saves what is unsaved, and reports it."""
        if end not in self._saves:
            self._save(end)
        if end:
            self._report(until=end - 1)

    def wait(self, future: Future) -> Any:
        """The value of a call. When the run is asked to end meanwhile, what has not begun is
        cancelled; raises Stopped where this call is not needed any more.
        """
        while not future.wait(POLL_S):
            future.check()
            if self._asked_to_stop():
                end = self._stop()
                calls = [asked for asked in self._asked if asked.future is future]
                if not all(self._needs(asked.kind, asked.row, end) for asked in calls):
                    raise Stopped("the run was asked to end, and does not need this call")
        return future.result()

    def _stop(self) -> int:
        """Cancels every update that has not begun, and all that only it or what follows would need.

        Returns the batches that are trained then, of which the last may be running.
        """
        if self._end is not None:
            return self._end
        updates = [asked for asked in self._asked if asked.kind == "train"]
        left = [asked.row for asked in reversed(updates) if asked.future.cancel()]
        self._end = min(left) - 1 if left else self._submitted
        for asked in reversed(self._asked):  # who takes a result before who makes it
            if not self._needs(asked.kind, asked.row, self._end):
                asked.future.cancel()
        return self._end

    def _needs(self, kind: str, row: int, end: int) -> bool:
        """Whether a run that is asked to end after `end` batches needs a call: it needs those of
        its rows, and the batches that its schedule has generated by then. What follows on the last
        batch, such as its evaluation, is left to the run that resumes.
        """
        if end == 0:
            return False
        ahead = SCHEDULES[self.config.schedule]
        most = {"publish": end - 1, "generate": end + ahead}.get(kind, end)
        return row <= most

    def _call(self, role: str, method: str, *args: Any, deadline: float, **kwargs: Any) -> Future:
        if self._end is not None and not self._needs(*self._now, self._end):
            raise Stopped("the run was asked to end")
        future = self.roles[role].call(method, *args, deadline=deadline, **kwargs)
        self._asked.append(Asked(*self._now, future))
        return future

    def _begin(self) -> Schedule:
        self.publish(0)
        samples = "teacher" in self.roles and self.config.teacher.address is None
        if self.config.eval.teacher and self._held_out and samples:
            self._futures["teacher", 0] = self._sample("teacher")
        return Schedule(self.config.steps, SCHEDULES[self.config.schedule])

    def _go_on(self, resumed: Resumed) -> Schedule:
        step, staleness = resumed.step, SCHEDULES[self.config.schedule]
        self._reported = self._submitted = step
        self._saves = {step}
        self._now = "publish", step
        self.publish(step, evaluate=not resumed.evaluated)
        self.reporter.amend(step, self._take(step))
        for index, rollout in resumed.rollouts.items():
            self._futures["rollout", index] = self.value(rollout)
        return Schedule.after(step, len(resumed.rollouts), self.config.steps, staleness)

    def generate(self, index: int) -> None:
        self._futures["rollout", index] = self._algorithm.completions(self, index)

    def score(self, index: int) -> None:
        rollout = self._rollout(index)
        asked = self._algorithm.scorers(self.config)
        known = self._known.pop(index, {})
        self._scores[index] = {
            role: known.get(role) or self.scores(role, rollout) for role in asked
        }

    def train(self, index: int) -> None:
        scores = {
            role: [part.once() for part in parts] if role == "teacher" else parts
            for role, parts in self._scores[index].items()
        }
        deadline = self.config.deadlines.update
        self._futures["update", index] = self._call(
            "actor", "update", self._rollout(index), scores, step=index, deadline=deadline
        )
        self._submitted = index + 1
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
        weights = self._futures["publish", version] = self._call(
            "actor", "publish", version=version, dtype=dtype, deadline=deadline
        )
        self._futures["sync", version] = self._call("rollout", "load", weights, deadline=deadline)
        if due:
            self._futures["eval", version] = self._sample("rollout")

    def _save(self, step: int) -> None:
        """Asks for a checkpoint of what the actor is after `step` batches; waits for nothing."""
        self._saves.add(step)
        if self._checkpoints is None:
            return
        self._now = "save", step
        folder = self._checkpoints.folder(step)
        deadline = self.config.deadlines.checkpoint
        asked = self._call("actor", "save", folder, step=step, deadline=deadline)
        saved = self._call("actor", "saved", asked, deadline=deadline, aside=True)
        generated = min(self._schedule.generated, step + SCHEDULES[self.config.schedule])
        in_flight = {i: self._rollout(i) for i in range(step, generated)}
        schedule = {"name": self.config.schedule, "generated": generated, "trained": step}
        self._checkpoints.begin(step, saved, in_flight, schedule)

    # What an algorithm may call (`algorithms.methods.Sources`).

    def prompts(self, index: int) -> Sequence[Prompt]:
        return self._stream.batch(index)

    def student_samples(self, index: int, attempt: int = 0) -> Future:
        """Of batch `index`; a further attempt samples prompts that no batch of the run has, with
        random numbers of its own.
        """
        batch = index + attempt * REFILL_OFFSET
        return self._generate("rollout", index, batch, attempt=attempt)

    def teacher_samples(self, index: int) -> Future:
        return self._generate("teacher", index, index)

    def data_completions(self, index: int) -> Future:
        rollout = data_rollout(self.prompts(index), decode=self._decode, **self.packing)
        return self.value(rollout)

    def scores(self, role: str, rollout: Future) -> list[Future]:
        """What a role says of a rollout, in the micro-batches that its section asks for."""
        parts, aside = scoring_parts(self.config, role)
        deadline = self._patience(role, self.config.deadlines.score)
        if parts is None:
            return [self._call(role, "score", rollout, deadline=deadline, aside=aside)]
        return [
            self._call(
                role, "score", rollout, part=part, parts=parts, deadline=deadline, aside=aside
            )
            for part in range(parts)
        ]

    def known(self, role: str, index: int, scores: Future) -> None:
        self._known.setdefault(index, {})[role] = [scores]

    def _generate(self, role: str, index: int, batch: int, **options: int) -> Future:
        deadline = self._patience(role, self.config.deadlines.generate)
        prompts = self.prompts(batch)
        return self._call(role, "generate", prompts, step=index, deadline=deadline, **options)

    def _sample(self, role: str) -> Future:
        deadline = self._patience(role, self.config.deadlines.evaluate)
        return self._call(role, "sample", self._held_out, deadline=deadline)

    def _patience(self, role: str, seconds: float) -> float:
        """A deadline; the first call of a lazy role may have to make it."""
        d = self.config.deadlines
        return seconds + (d.startup if role in self.config.lazy else 0.0)

    def _rollout(self, index: int) -> Future:
        return self._futures["rollout", index]

    def _report(self, until: int) -> None:
        """Waits for the batches up to `until` (-1: the evaluation before the first) and writes
        their rows.
        """
        while self._reported <= until:
            step = self._reported + 1
            taken = self._take(step)
            try:
                self.reporter.row(step, taken)
            except Stopped:
                if "rollout" in taken:  # it may be saved
                    self._futures["rollout", step - 1] = taken["rollout"]
                raise
            self._reported = step
        self._saves = {step for step in self._saves if step >= self._reported}
        self._asked = [asked for asked in self._asked if not asked.future.done()]

    def _take(self, step: int) -> dict[str, Future]:
        """The futures of one row: of the batch that made version `step`, and what followed; of each
        role's scores the last part as `score.ROLE`, those before as `score.ROLE.0` and so on.
        """
        batch = [(kind, step - 1) for kind in ("rollout", "update")]
        keys = [*batch, ("publish", step), ("sync", step), ("eval", step), ("teacher", step)]
        taken = {key[0]: self._futures.pop(key) for key in keys if key in self._futures}
        scores = self._scores.pop(step - 1, {})
        for role, parts in scores.items():
            taken |= {f"score.{role}.{i}": part for i, part in enumerate(parts[:-1])}
            taken[f"score.{role}"] = parts[-1]
        return taken
