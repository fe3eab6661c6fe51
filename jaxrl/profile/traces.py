"""The profile of some steps of a run (`profile.steps`): a trace of JAX's profiler from every
process, and the table of what each stage took.

A trace begins in each worker between its calls of earlier steps and those of the first profiled
one, and ends after the weights of the last one are published. With a schedule that overlaps
batches, work on neighbouring ones is in it too, as it is in their time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from jaxrl.algorithms.schedule import Action
from jaxrl.config.schema import Config
from jaxrl.data.stream import PromptStream
from jaxrl.plan import Plan
from jaxrl.plan.plan_context import signal_bytes
from jaxrl.profile.stages import RunModels, StageTable, StepBatch, stage_rows, step_work
from jaxrl.profile.waits import Span, Stage, Window, pool_waits, stage_seconds
from jaxrl.runtime.worker import Future, Handle, Times, Traced, WorkerGroup
from jaxrl.telemetry.timeline import Watched, WatchedCall
from jaxrl.types import Row

PROFILE_DIR = "profile"
STAGES_FILE = "stages.json"
BEFORE = 64
"""Calls that are remembered while nothing is profiled: the last update is among them."""


@dataclass
class Profile:
    """Waits for its steps, has them traced, and reports the table once."""

    models: RunModels
    prompts: PromptStream
    plan: Plan
    worker_group: WorkerGroup
    folder: Path
    """Of the run's profile."""
    steps: range
    """As rows count them, from 1; those that this run still has to train."""
    notify: Callable[[str], None]
    _calls: deque[tuple[str, str, Times, int | None]] = field(
        default_factory=lambda: deque(maxlen=BEFORE)
    )
    """Role, method, times, which are filled in while the call runs, and step."""
    _begun: Mapping[str, Future[Traced]] = field(default_factory=dict)
    _ended: Mapping[str, Future[Traced]] = field(default_factory=dict)
    """Pool -> the `Traced` of its workers at the beginning and at the end of the trace."""
    _rows: dict[int, Row] = field(default_factory=dict)
    """Those of `steps`, so far."""
    _finished: bool = False

    def watch(self, role: str, handle: Handle) -> Handle:
        """Returns the handle, whose calls are remembered for the table."""
        return Watched(role, handle, self._remember) if self.steps else handle

    def row(self, row: Row) -> None:
        """Takes note of a row of `steps` that is written."""
        self._rows[row["step"]] = row

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Begins and ends the trace where that lies before or after an action of the loop."""
        if not self._begun and action.kind != "publish" and action.index + 1 in self.steps:
            self._begun = self._ask(self.folder)
            self._calls = deque(self._calls)  # from now on, all of them
        yield
        last = self.steps[-1] if self.steps else 0
        if self._begun and not self._ended and action.kind == "publish" and action.index >= last:
            self._ended = self._ask(None)
        if self._ended and last in self._rows:
            self._finish()

    def close(self) -> None:
        """Finishes what there is of the profile, at the end of a run that may have been
        interrupted."""
        if self._begun and not self._ended:
            self._ended = self._ask(None)
        if self._ended:
            self._finish()

    def _remember(self, call: WatchedCall) -> None:
        role, method, times, given = call
        if not given.get("aside") and not self._finished:
            step = given.get("step")
            self._calls.append((role, method, times, step if isinstance(step, int) else None))

    def _ask(self, folder: Path | None) -> Mapping[str, Future[Traced]]:
        config = self.models.config
        return self.worker_group.profile(
            folder, config.actor.compute_dtype, config.deadlines.checkpoint
        )

    def _finish(self) -> None:
        """Waits for the traces, then reports the table."""
        if self._finished:
            return
        self._finished = True
        begun = [future.result() for future in self._begun.values()]
        ended = {pool: future.result() for pool, future in self._ended.items()}
        for problem in dict.fromkeys(traced.problem for traced in (*begun, *ended.values())):
            if problem:
                self.notify(f"profile.steps: JAX's profiler wrote no trace: {problem}")
        if not self._rows:
            return
        table = self._table(ended)
        self.notify(f"{table.text()}\nprofile: {self.folder}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / STAGES_FILE).write_text(table.to_json(), encoding="utf-8")
        except OSError as error:  # a disk that refuses ends no run
            self.notify(f"cannot write {self.folder / STAGES_FILE}: {error.strerror}")

    def _table(self, ended: Mapping[str, Traced]) -> StageTable:
        """Builds the table of the steps that have a row."""
        placement, rows = self.plan.placement, list(self._rows.values())
        pool_of = {role: placement.pool_of(role).name for role in self.plan.runs}
        steps = [row["step"] for row in rows]
        spans = [
            Span(role, method, times.started, times.finished, step)
            for role, method, times, step in self._calls
            if times.started is not None and times.finished is not None
        ]
        windows = self._windows(spans, steps)
        known = {pool: traced.ceilings for pool, traced in ended.items() if traced.ceilings}
        first = next(iter(known.values()), None)  # of a process that several pools share
        ceilings = known if first is None else dict.fromkeys(ended, first) | known
        batches = []
        for row in rows:
            batch = self.prompts.batch(row["step"] - 1)
            prompts = tuple(len(prompt.tokens) for prompt in batch)
            theirs = tuple(len(prompt.teacher_tokens or prompt.tokens) for prompt in batch)
            mean = row["rollout/completion_tokens_mean"]
            samples = max(round(row["actor/tokens"] / mean / len(prompts)), 1)
            batches.append(StepBatch(prompts, samples, mean, row["rollout/decode_steps"], theirs))
        stages = stage_rows(
            stage_seconds(spans, windows, len(steps)),
            step_work(self.models, self.plan.axes, batches),
            self._moved(rows, windows),
            fmean(batch.tokens for batch in batches),
            pool_of,
            {role: len(placement.roles[role].devices) for role in pool_of},
            ceilings,
        )
        return StageTable(
            (steps[0], steps[-1]),
            sum(end - start for start, end in windows) / len(steps),
            ceilings,
            stages,
            tuple(pool_waits(spans, windows, len(steps), pool_of)),
        )

    def _windows(self, spans: Sequence[Span], steps: Sequence[int]) -> list[Window]:
        """Returns the windows from update to update, without the time in which the trace began."""
        ends = {span.step: span.end for span in spans if span.name == "update"}
        pause = max(
            (future.times for future in self._begun.values()), key=lambda t: t.finished or 0
        )
        assert pause.started is not None and pause.finished is not None, "it has begun"
        bounds = [ends.get(steps[0] - 2, pause.finished), *(ends[step - 1] for step in steps)]
        return [
            part
            for begin, end in pairwise(bounds)
            for part in ((begin, min(end, pause.started)), (max(begin, pause.finished), end))
            if part[0] < part[1]
        ]

    def _moved(self, rows: Sequence[Row], windows: Sequence[Window]) -> dict[Stage, float]:
        """Counts the bytes a step moves from one pool to another, of weights and of the teacher's
        signal; and those to the host and back for a call."""
        pool_of, teachers = self.plan.placement.pool_of, self.models.teachers
        found: dict[Stage, float] = defaultdict(float)
        if pool_of("actor") != pool_of("rollout"):
            sent = sum(row.get("weights/sync_bytes", 0) for row in rows)
            found["actor", "publish"] = sent / len(rows)
        sent = sum(row.get("weights/teacher_sync_bytes", 0) for row in rows)
        found["actor", "publish_to_teacher"] = sent / len(rows)
        if teachers and pool_of("teacher") != pool_of("actor"):
            each = signal_bytes(self.models.config, [model.d_model for model in teachers])
            found["teacher", "score"] = each * fmean(row["actor/tokens"] for row in rows)
        for role, method, times, _ in self._calls:
            if any(begin < (times.finished or 0.0) <= end for begin, end in windows):
                found[role, method] += sum(move.nbytes for move in times.moves) / len(rows)
        return {stage: nbytes for stage, nbytes in found.items() if nbytes}


def steps_to_profile(config: Config, trained: int, notify: Callable[[str], None]) -> range:
    """Returns those of the steps named in the config that a run still has to train; says so where
    it is too late for some.

    Args:
        trained: steps that the run has trained already.
    """
    asked = config.profile.range
    left = range(max(asked.start, trained + 1), asked.stop)
    if asked and len(left) < len(asked):
        rest = f"only {left.start}:{left.stop} is profiled" if left else "nothing is profiled"
        notify(
            f"profile.steps={config.profile.steps}: the run resumes after step {trained}; {rest}"
        )
    return left if left else range(0)
