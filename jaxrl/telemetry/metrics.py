"""The numbers of a run: the one table of their names, and the writers of its two JSON files.

``metrics.jsonl`` holds one JSON object a step. The row of ``step: 0`` carries the first evaluation.
A value that is not finite is written as null, for JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self, SupportsFloat

from jaxrl.errors import UserError, near

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True)
class Metric:
    """What a name in ``metrics.jsonl`` means."""

    unit: str
    meaning: str


_ROLES = ("actor", "rollout", "teacher")

METRICS: dict[str, Metric] = {
    "step": Metric("batches", "batches trained so far; 0 is the row before training"),
    "policy_version": Metric("batches", "batches trained into the weights that sampled this one"),
    "optimizer_step": Metric("updates", "optimizer updates so far, skipped ones not counted"),
    "staleness": Metric("batches", "batches between the weights that sample and those that train"),
    "loss": Metric("nats/token", "what the optimizer minimises: all terms of the objective"),
    "distill/divergence": Metric("nats/token", "mean divergence of student and teacher"),
    "distill/top1_agreement": Metric("fraction", "tokens where both models' top-1 is the same"),
    "distill/student_entropy": Metric("nats/token", "mean entropy of the student's next token"),
    "distill/teacher_entropy": Metric("nats/token", "mean entropy of the teacher's next token"),
    "distill/teacher_tail_mass": Metric("fraction", "teacher's probability outside the top k sent"),
    "distill/student_tail_mass": Metric("fraction", "student's probability outside the top k sent"),
    "distill/reverse_kl_k1": Metric("nats/token", "log student - log teacher at sampled tokens"),
    "distill/ratio_capped": Metric("fraction", "tokens whose importance ratio was capped"),
    "distill/entropy_aware": Metric("nats/token", "the entropy-aware term, as it enters the loss"),
    "distill/entropy_gate": Metric("fraction", "tokens where the entropy-aware term acts"),
    "sft/loss": Metric("nats/token", "mean negative log-likelihood of the data's completions"),
    "actor/grad_norm": Metric("norm", "gradient norm before clipping, mean over updates"),
    "actor/learning_rate": Metric("1", "learning rate of the last update"),
    "actor/skipped_updates": Metric("updates", "skipped in this step: gradient not finite"),
    "actor/tokens": Metric("tokens", "completion tokens trained in one pass over the batch"),
    "rollout/completion_tokens_mean": Metric("tokens", "mean length of a completion, EOS included"),
    "rollout/truncated_fraction": Metric("fraction", "completions cut at max_new_tokens"),
    "rollout/decode_steps": Metric("steps", "decode steps that the batch took"),
    "tokens/generated": Metric("tokens", "completion tokens sampled for this batch"),
    "tokens/per_second": Metric("tokens/s", "actor/tokens over time/step_s"),
    "time/step_s": Metric("s", "end of the update before to the end of this one"),
    "time/rollout_s": Metric("s", "generation"),
    "time/score_s": Metric("s", "teacher's scoring"),
    "time/update_s": Metric("s", "forward, backward and optimizer, all updates of the batch"),
    "time/weight_sync_s": Metric("s", "new weights into the rollout role"),
    "time/evaluate_s": Metric("s", "evaluation"),
    "weights/sync_bytes": Metric("bytes", "moved in the weight sync, shared leaves left out"),
    "weights/sync_gbps": Metric("GB/s", "sync_bytes over time/weight_sync_s, GB = 1e9 bytes"),
    "eval/accuracy": Metric("fraction", "mean verifier score on the held-out prompts"),
    "eval/mean_completion_tokens": Metric("tokens", "mean completion length in the evaluation"),
    "eval/truncated_fraction": Metric("fraction", "evaluation completions cut at their limit"),
    "teacher/accuracy": Metric("fraction", "the teacher's accuracy on the same prompts, step 0"),
    "data/epoch": Metric("passes", "passes over the training data, with a fraction"),
    **{
        f"memory/{role}/peak_bytes": Metric("bytes", f"peak in use on a device of {role} so far")
        for role in _ROLES
    },
}
"""Every name that may stand in a row."""

_WHOLE = ("batches", "updates", "steps", "bytes")
"""Units that are counts: written without a decimal point."""

Value = SupportsFloat | None


def _plain(name: str, value: Value) -> int | float | None:
    """A Python number; null where it is not finite. Accepts jax and numpy scalars."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        number = float(value)
    except TypeError as error:
        raise TypeError(f"metric {name} must be one number, got {type(value).__name__}") from error
    if not math.isfinite(number):
        return None
    return int(number) if METRICS[name].unit in _WHOLE and number.is_integer() else number


class MetricsWriter:
    """Appends rows to ``metrics.jsonl``, flushing each; steps rise, names stand in ``METRICS``."""

    def __init__(self, path: str | Path) -> None:
        self.rows: list[dict[str, int | float | None]] = []
        """Every row written, as in the file."""
        self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()
        self._last_step = -1

    def write(self, step: int, metrics: Mapping[str, Value]) -> dict[str, int | float | None]:
        """Writes and returns the row of one step."""
        unknown = [name for name in metrics if name not in METRICS]
        if unknown:
            hint = near(unknown[0], METRICS)
            raise ValueError(f"metric {unknown[0]!r} is not documented in METRICS{hint}")
        if metrics.get("step", step) != step:
            raise ValueError(f"row of step {step} carries step={metrics['step']}")
        row = {"step": step} | {name: _plain(name, value) for name, value in metrics.items()}
        with self._lock:
            if step <= self._last_step:
                raise ValueError(f"step {step} after step {self._last_step}: steps must rise")
            self._last_step = step
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            self.rows.append(row)
        return row

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Rows of a run directory or of its ``metrics.jsonl``; a torn last line is left out."""
    path = Path(run)
    path = path / METRICS_FILE if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    # Every whole line ends with a newline, so what follows the last one is torn (or empty).
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON: {error.msg}") from error
    return rows


@dataclass(frozen=True)
class Sample:
    """One completion as ``samples.jsonl`` and the console show it."""

    step: int
    """Batches trained when it was shown; 0 is before training."""
    split: Literal["train", "eval"]
    prompt: str
    completion: str
    finish_reason: str
    """`stop` or `length`."""
    tokens: int
    """Length of the completion, EOS included."""
    policy_version: int
    """Batches trained into the weights that sampled it; -1: from the data or the teacher."""
    answer: str | None = None
    """What the verifier compares with."""
    score: float | None = None
    """The verifier's score in [0, 1]; null where nothing judged it."""


class SamplesWriter:
    """Appends completions to ``samples.jsonl``, one JSON object a line, flushing each batch."""

    def __init__(self, path: str | Path) -> None:
        self._file: IO[str] = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()

    def write(self, samples: Sequence[Sample]) -> None:
        text = "".join(
            json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples
        )
        with self._lock:
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
