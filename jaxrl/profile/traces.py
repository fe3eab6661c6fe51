"""The profile of some steps of a run (`profile.steps`): a trace of JAX's profiler from every
process, and the table of what each stage took.

A trace begins in each worker between its calls of earlier steps and those of the first profiled
one, and ends after the weights of the last one are published. With a schedule that overlaps
batches, work on neighbouring ones is in it too, as it is in their time.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field, TypeAdapter

from jaxrl.algorithms.schedule import Action
from jaxrl.config.schema import Config
from jaxrl.data.stream import REFILL_OFFSET, PromptStream
from jaxrl.plan.simulate import Stage
from jaxrl.plan.table import Plan
from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.process.streams import table_lines
from jaxrl.profile.waits import Span, Window, pool_waits, stage_seconds
from jaxrl.profile.work import StepBatch, Work, step_work
from jaxrl.runtime.worker import Future, Times, Traced, WorkerGroup
from jaxrl.sharding.targets import Ceilings
from jaxrl.types import Row

PROFILE_DIR = "profile"
STAGES_FILE = "stages.json"
TEXTS = ("stage", "pool")
FIGURES = ("s", "share", "tokens/s", "GFLOP", "GB", "compute", "memory", "MB moved")
BEFORE = 64
"""Calls that are remembered while nothing is profiled: the last update is among them."""


@dataclass(frozen=True)
class StageRow:
    """One stage, per step. None: not counted for this stage."""

    stage: str
    """Role and method, as in the trace: `rollout.generate`."""
    pool: str
    seconds: float
    tokens_per_second: float | None = None
    """Completion tokens of a step over `seconds`."""
    flops: float | None = None
    bytes: float | None = None
    """To and from the memory of its devices."""
    compute: float | None = None
    """`flops` as a share of what its devices could do in `seconds`."""
    memory: float | None = None
    """`bytes` likewise."""
    bound: str | None = None
    """`compute` or `memory`: which of the two would take longer at its best."""
    moved: float | None = None
    """Bytes to the devices of another pool, and to the host and back (`offload`)."""


@dataclass(frozen=True)
class PoolShare:
    """The shares of a step in which a pool was busy, and in which it was idle."""

    pool: str
    busy: float
    idle: float


@dataclass(frozen=True)
class StageTable:
    """The profile of some steps; what `stages.json` holds."""

    steps: tuple[int, int]
    """First and last."""
    step_seconds: Annotated[float, Field(gt=0)]
    ceilings: Mapping[str, Ceilings]
    """Pool -> of one of its devices, where they are known."""
    stages: tuple[StageRow, ...]
    pools: tuple[PoolShare, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def read(text: str | bytes) -> JsonObject:
        """Reads the object that `to_json` wrote. Raises ValueError for any other text."""
        parse_json(text)  # which refuses what is no JSON, such as NaN
        table = TypeAdapter(StageTable).validate_json(text, strict=True)
        value: JsonObject = json.loads(table.to_json())
        return value

    def text(self) -> str:
        """Renders the table for the console and the log."""
        first, last = self.steps
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        title = f"profile of {steps}: {_number(self.step_seconds)} s a step"
        rows = []
        units = {"tokens_per_second": 1.0, "flops": 1e9, "bytes": 1e9, "moved": 1e6}
        for row in self.stages:
            tokens, flops, nbytes, moved = (
                "-" if (value := getattr(row, name)) is None else _number(value / unit)
                for name, unit in units.items()
            )
            shares = [
                "- " if share is None else f"{share:.1%}{'*' if row.bound == name else ' '}"
                for name, share in (("compute", row.compute), ("memory", row.memory))
            ]
            took = _number(row.seconds), f"{row.seconds / self.step_seconds:.0%}"
            rows.append((row.stage, row.pool, *took, tokens, flops, nbytes, *shares, moved))
        idle = ", ".join(f"{pool.pool} {pool.idle:.0%}" for pool in self.pools)
        lines = [*table_lines(title, (*TEXTS, *FIGURES), FIGURES, rows), f"idle: {idle}"]
        if self.ceilings:
            lines.append(
                "compute, memory: shares of what the devices of the pool can do; * bounds the stage"
            )
        for ceiling in dict.fromkeys(self.ceilings.values()):
            pools = ", ".join(pool for pool, other in self.ceilings.items() if other == ceiling)
            unit, name = (1e12, "TFLOP/s") if ceiling.flops >= 1e12 else (1e9, "GFLOP/s")
            lines.append(
                f"{pools}: {_number(ceiling.flops / unit)} {name} and"
                f" {_number(ceiling.bandwidth / 1e9)} GB/s"
                f" {'all devices together' if ceiling.shared else 'each'}"
                f" ({ceiling.device}, {'published' if ceiling.published else 'measured here'})"
            )
        return "\n".join(lines)


def stage_rows(
    seconds: Mapping[Stage, float],
    work: Mapping[Stage, Sequence[Work]],
    moved: Mapping[Stage, float],
    tokens: Mapping[str, float],
    pool_of: Mapping[str, str],
    devices: Mapping[str, int],
    ceilings: Mapping[str, Ceilings],
) -> tuple[StageRow, ...]:
    """Returns the rows of the stages, the longest stage first.

    Args:
        seconds, work, moved: of each stage, a step.
        tokens: completion tokens of a step, as each role has them.
        pool_of, devices: of each role.
        ceilings: pool -> what one of its devices reaches.
    """
    rows = []
    for stage, took in sorted(seconds.items(), key=lambda item: -item[1]):
        role, pool = stage[0], pool_of[stage[0]]
        row = StageRow(".".join(stage), pool, took, moved=moved.get(stage))
        if stage in work:
            flops = sum(part.flops for part in work[stage])
            nbytes = sum(part.bytes for part in work[stage])
            row = replace(row, tokens_per_second=tokens[role] / took, flops=flops, bytes=nbytes)
            if (ceiling := ceilings.get(pool)) is not None and devices[role]:
                n = 1 if ceiling.shared else devices[role]
                compute = flops / (took * n * ceiling.flops)
                memory = nbytes / (took * n * ceiling.bandwidth)
                bound = "compute" if compute > memory else "memory"
                row = replace(row, compute=compute, memory=memory, bound=bound)
        rows.append(row)
    return tuple(rows)


@dataclass
class Profile:
    """Waits for its steps, has them traced, and reports the table once."""

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

    def record(self, role: str, method: str, times: Times, given: Mapping[str, object]) -> None:
        """Remembers a call for the table."""
        if not given.get("aside") and not self._finished:
            step = given.get("step")
            self._calls.append((role, method, times, step if isinstance(step, int) else None))

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

    def _ask(self, folder: Path | None) -> Mapping[str, Future[Traced]]:
        config = self.plan.config
        dtype, deadline = config.actor.compute_dtype, config.deadlines.checkpoint
        return self.worker_group.profile(folder, dtype, deadline)

    def _finish(self) -> None:
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

        # The table of the steps that have a row.
        placement, rows = self.plan.placement, list(self._rows.values())
        pool_of = {role: placement.pool_of(role).name for role in self.plan.runs}
        steps, n = [row["step"] for row in rows], len(rows)
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
            attempts = range(int(row.get("policy/refills", 0)) + 1)
            given = [self.prompts.batch(row["step"] - 1 + i * REFILL_OFFSET) for i in attempts]
            asked = [prompt for batch in given for prompt in batch]
            prompts = tuple(len(prompt.tokens) for prompt in asked)
            theirs = tuple(len(prompt.teacher_tokens or prompt.tokens) for prompt in asked)
            mean, decoded = row["rollout/completion_tokens_mean"], row["rollout/decode_steps"]
            kinds = ("trained", "dropped", "masked")
            own = sum(row.get(f"completions/{kind}", 0) for kind in kinds)
            samples = round(own / len(given[0]))
            batches.append(StepBatch(prompts, samples, mean, decoded, theirs, len(given[0])))
        scored = fmean(batch.scored.tokens for batch in batches)
        tokens = dict.fromkeys(pool_of, scored)
        tokens["rollout"] = fmean(batch.tokens for batch in batches)

        # Bytes a step from one pool to another, of weights and of the teacher's signal; and those
        # to the host and back for a call.
        m, moved = self.plan.setting, defaultdict[Stage, float](float)
        if pool_of["actor"] != pool_of["rollout"]:
            moved["actor", "publish"] = sum(row.get("weights/sync_bytes", 0) for row in rows) / n
        sent = sum(row.get("weights/teacher_sync_bytes", 0) for row in rows)
        moved["actor", "publish_to_teacher"] = sent / n
        if "teacher" in m.axes and pool_of["teacher"] != pool_of["actor"]:
            moved["teacher", "score"] = m.signal_bytes * scored
        for role, method, times, _ in self._calls:
            if any(begin < (times.finished or 0.0) <= end for begin, end in windows):
                moved[role, method] += sum(move.nbytes for move in times.moves) / n
        stages = stage_rows(
            stage_seconds(spans, windows, len(steps)),
            step_work(self.plan.setting, batches),
            {stage: nbytes for stage, nbytes in moved.items() if nbytes},
            tokens,
            pool_of,
            {role: len(placement.roles[role].devices) for role in pool_of},
            ceilings,
        )
        table = StageTable(
            (steps[0], steps[-1]),
            sum(end - start for start, end in windows) / len(steps),
            ceilings,
            stages,
            tuple(
                PoolShare(x.pool, x.busy, x.idle)
                for x in pool_waits(spans, windows, len(steps), pool_of)
            ),
        )
        self.notify(f"{table.text()}\nprofile: {self.folder}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / STAGES_FILE).write_text(table.to_json(), encoding="utf-8")
        except OSError as error:  # a disk that refuses ends no run
            self.notify(f"cannot write {self.folder / STAGES_FILE}: {error.strerror}")

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


def _number(value: float) -> str:
    """Formats a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
