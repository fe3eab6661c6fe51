"""What each stage of some steps took, against what its devices can do: the table of a profile.

Work is counted from the models' configs and the steps' own tokens (`profile.work`): the least
that has to be done. A share of a ceiling is therefore never flattered by padding or recomputation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated

import jax.numpy as jnp
from pydantic import BaseModel, Field
from rich import box
from rich.table import Table

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.process.streams import table_lines
from jaxrl.profile.waits import PoolWait, Stage
from jaxrl.profile.work import (
    Work,
    adamw_work,
    decode_work,
    divergence_work,
    forward_work,
    head_work,
)
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.device_peaks import Ceilings

TEXTS = ("stage", "pool")
COLUMNS = (*TEXTS, "s", "share", "tokens/s", "GFLOP", "GB", "compute", "memory", "MB moved")


@dataclass(frozen=True)
class RunModels:
    """The models of a run, as far as its work depends on them."""

    config: Config
    student: DecoderConfig
    teachers: Sequence[DecoderConfig]
    """Those that score in the run."""
    vocab_size: int
    """Tokens that the losses are over."""


@dataclass(frozen=True)
class StepBatch:
    """The real sizes of the batch of a step."""

    prompts: tuple[int, ...]
    """Tokens of each prompt."""
    samples: int
    """Completions of each."""
    mean: float
    """Tokens of a completion."""
    decode_steps: int
    teacher_prompts: tuple[int, ...] | None = None
    """Tokens of each prompt that the teacher reads; None: the same."""

    @property
    def tokens(self) -> float:
        """Returns the number of tokens of all completions."""
        return len(self.prompts) * self.samples * self.mean


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


class _Pool(BaseModel):
    pool: str
    busy: float
    idle: float


class _Record(BaseModel):
    steps: Annotated[list[int], Field(min_length=2, max_length=2)]
    step_seconds: Annotated[float, Field(gt=0)]
    ceilings: dict[str, Ceilings]
    stages: list[StageRow]
    pools: list[_Pool]


@dataclass(frozen=True)
class StageTable:
    """The profile of some steps; what `stages.json` holds."""

    steps: tuple[int, int]
    """First and last."""
    step_seconds: float
    ceilings: Mapping[str, Ceilings]
    """Pool -> of one of its devices, where they are known."""
    stages: tuple[StageRow, ...]
    pools: tuple[PoolWait, ...]

    def to_json(self) -> str:
        """Returns one object: for each pool its name and the shares of the step in which it was
        `busy` and `idle`; the rest as here."""
        pools = [{"pool": p.pool, "busy": p.busy, "idle": p.idle} for p in self.pools]
        return json.dumps(asdict(self) | {"pools": pools}, indent=1) + "\n"

    @staticmethod
    def read(text: str | bytes) -> JsonObject:
        """Reads the object that `to_json` wrote. Raises ValueError for any other text."""
        parse_json(text)  # which refuses what is no JSON, such as NaN
        return _Record.model_validate_json(text, strict=True).model_dump(mode="json")

    def text(self) -> str:
        """Renders the table for the console and the log."""
        first, last = self.steps
        steps = f"step {first}" if first == last else f"steps {first}-{last}"
        title = f"profile of {steps}: {_number(self.step_seconds)} s a step"
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for name in COLUMNS:
            table.add_column(name, no_wrap=True, justify="left" if name in TEXTS else "right")
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
            table.add_row(row.stage, row.pool, *took, tokens, flops, nbytes, *shares, moved)
        idle = ", ".join(f"{pool.pool} {pool.idle:.0%}" for pool in self.pools)
        lines = [*table_lines(table), f"idle: {idle}"]
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
    tokens: float,
    pool_of: Mapping[str, str],
    devices: Mapping[str, int],
    ceilings: Mapping[str, Ceilings],
) -> tuple[StageRow, ...]:
    """Returns the rows of the stages, the longest stage first.

    Args:
        seconds, work, moved: of each stage, a step.
        tokens: completion tokens of a step.
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
            row = replace(row, tokens_per_second=tokens / took, flops=flops, bytes=nbytes)
            if (ceiling := ceilings.get(pool)) is not None and devices[role]:
                n = 1 if ceiling.shared else devices[role]
                compute = flops / (took * n * ceiling.flops)
                memory = nbytes / (took * n * ceiling.bandwidth)
                bound = "compute" if compute > memory else "memory"
                row = replace(row, compute=compute, memory=memory, bound=bound)
        rows.append(row)
    return tuple(rows)


def step_work(
    models: RunModels, axes: Mapping[str, Axes], batches: Sequence[StepBatch]
) -> dict[Stage, list[Work]]:
    """Computes the work of each stage whose model is known here, the mean over some steps."""
    each = [_batch_work(models, axes, batch) for batch in batches]
    return {
        stage: [
            Work(fmean(part.flops for part in same), fmean(part.bytes for part in same))
            for same in zip(*(work[stage] for work in each), strict=True)
        ]
        for stage in each[0]
    }


def _batch_work(
    models: RunModels, axes: Mapping[str, Axes], batch: StepBatch
) -> dict[Stage, list[Work]]:
    config, student, teachers = models.config, models.student, models.teachers
    # Role -> bytes of a weight, and how often the weights are read.
    reads = {
        role: (jnp.dtype(config.roles[role].dtype).itemsize, sizes.rows)
        for role, sizes in axes.items()
    }
    hidden = config.distill.signal == "hidden"
    found: dict[Stage, list[Work]] = {}
    if batch.decode_steps:
        prompt, own = fmean(batch.prompts), batch.mean / 2
        given = prompt + own, batch.tokens, batch.decode_steps, *reads["rollout"]
        read = prompt / batch.samples + own  # a prompt's keys once for all of its completions
        found["rollout", "generate"] = [
            forward_work(student, batch.prompts, *reads["rollout"]),
            decode_work(student, *given, read=read),
        ]
    # Where each row has one of several teachers, each is counted as scoring its share of them.
    share = 1 / len(teachers) if teachers and config.mixture is None else 1.0
    if teachers:
        vocab = None if hidden else models.vocab_size
        theirs = replace(batch, prompts=batch.teacher_prompts or batch.prompts)
        found["teacher", "score"] = [
            work * share
            for teacher in teachers
            for work in _scoring(teacher, vocab, theirs, reads["teacher"])
        ]
    if "reference" in axes:
        vocab = student.vocab_size
        found["reference", "score"] = _scoring(student, vocab, batch, reads["reference"])
    width = sum(teacher.d_model for teacher in teachers) if hidden else 0
    found["actor", "update"] = _update(models, width, batch, reads["actor"], axes["actor"].data)
    return found


def _scoring(
    c: DecoderConfig, vocab: int | None, batch: StepBatch, reads: tuple[int, int]
) -> list[Work]:
    """Returns the work of one pass over the batch and, with a vocabulary, of the logits of its
    completions."""
    forward = forward_work(c, batch.prompts, *reads, samples=batch.samples, mean=batch.mean)
    return [forward, *([head_work(vocab, c.d_model, batch.tokens, *reads)] if vocab else [])]


def _update(
    models: RunModels, teacher_width: int, batch: StepBatch, reads: tuple[int, int], replicas: int
) -> list[Work]:
    """Returns the work of the forward and backward of each pass over the batch, and of the
    optimizer at each update."""
    config, c = models.config, models.student
    passes = config.actor.epochs_per_batch
    (forward,) = _scoring(c, None, batch, reads)
    loss = divergence_work(models.vocab_size, c.d_model, teacher_width, batch.tokens, *reads)
    optimizer = adamw_work(c.n_trained) * (config.updates_per_batch * replicas)
    backward = 2 if c.lora is None else 1  # frozen weights have no gradient
    parts = [forward * passes, loss * passes, forward * (backward * passes), optimizer]
    if config.learns_from_rewards and config.updates_per_batch > 1:  # log-probs before the batch
        parts += _scoring(c, c.vocab_size, batch, reads)
    return parts


def _number(value: float) -> str:
    """Formats a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
