"""The numbers of a run: the one table of their names (`assets/metrics.json`), and the writers of
its two JSON files.

    python -m jaxrl.telemetry.metrics > docs/metrics.md

``metrics.jsonl`` holds one JSON object a step. The row of ``step: 0`` carries the first evaluation.
A value that is not finite is written as null, for JSON has no NaN.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self, SupportsFloat

import numpy as np

from jaxrl.config import cli
from jaxrl.errors import UserError, near, user_path
from jaxrl.process import atomic_files
from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.process.streams import to_stderr
from jaxrl.telemetry.lines import LineFile

if TYPE_CHECKING:
    from jaxrl.types import Completion, Prompt

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SCORED = {"teacher": "score", "reference": "reference", "reward": "reward", "grouper": "embed"}
"""Role -> the name of its time in a row."""
ASSETS = Path(__file__).parent.parent / "assets"


@dataclass(frozen=True)
class Metric:
    """What a name in ``metrics.jsonl`` means."""

    unit: str
    meaning: str


PLACEHOLDERS = {
    "reward": r"\w+",
    "metric": r"\w+",
    "role": "actor|rollout|teacher|reference|reward|grouper",
    "k": "[1-9][0-9]*",
    "set": "[A-Za-z0-9_.-]+",
    "teacher": "[A-Za-z0-9_.-]+",
    "source": "[A-Za-z0-9_.-]+",
}
"""What may stand for the variable part of a name in ``METRICS``."""


_TABLE: dict[str, list[str]] = json.loads((ASSETS / "metrics.json").read_bytes())
METRICS = {name: Metric(unit, meaning) for name, (unit, meaning) in _TABLE.items()}
"""Every name that may stand in a row; ``{...}`` stands for what ``PLACEHOLDERS`` says."""
_PATTERNS = tuple(
    (
        re.compile(re.sub(r"\\{(\w+)\\}", lambda m: f"({PLACEHOLDERS[m[1]]})", re.escape(name))),
        metric,
    )
    for name, metric in METRICS.items()
    if "{" in name
)

_WHOLE = ("programs", "batches", "updates", "steps", "bytes", "completions", "changes", "flag")
"""Units that are counts: written without a decimal point."""

Value = SupportsFloat | None
Row = dict[str, int | float | None]


def find_metric(name: str) -> Metric | None:
    """Finds a name in the table; None where it is not there."""
    if name in METRICS and "{" not in name:
        return METRICS[name]
    matches = (metric for pattern, metric in _PATTERNS if pattern.fullmatch(name))
    return next(matches, None)


def _row(step: int, metrics: Mapping[str, Value]) -> Row:
    """Returns a row of Python numbers, of jax and numpy scalars too; null where not finite."""
    if metrics.get("step", step) != step:
        raise ValueError(f"row of step {step} carries step={metrics['step']}")
    row: Row = {"step": step}
    for name, value in metrics.items():
        metric = find_metric(name)
        if metric is None:
            hint = near(name, METRICS)
            raise ValueError(f"metric {name!r} is not documented in METRICS{hint}")
        number = math.nan if value is None else float(value)
        whole = isinstance(value, int) or (metric.unit in _WHOLE and number.is_integer())
        number = value if isinstance(value, int) else number  # which float32 may not hold
        row[name] = int(number) if whole else number if math.isfinite(number) else None
    return row


class JsonLines(LineFile):
    """A file of JSON objects, one a line, each with a ``step`` that never falls."""

    def __init__(
        self, path: str | Path, after: int | None = None, notify: Callable[[str], None] = to_stderr
    ) -> None:
        """
        Args:
            after: continue after the file's rows up to this step; later ones and a torn last line
                are cut, and a damaged file is moved aside. None: a new file.
            notify: takes what a user should know of the file.
        """
        self.first: Row | None = None
        """The first row of the run, as in the file; None where there is none yet."""
        self.last: Row | None = None
        self._step = -1 if after is None else after
        """The step that the next row of metrics must exceed."""
        super().__init__(path, notify, None if after is None else self._keep)

    def _keep(self, file: IO[bytes]) -> int:
        """Returns the bytes of the rows to keep; one line at a time is in memory.

        A file with damage among them is moved aside whole; the rows before it are copied back.
        """
        size, last = 0, -1
        for number, line in enumerate(file, start=1):
            try:
                row = _parse(self._path, number, line)
            except UserError as error:
                killed = line.startswith(b"{") and not line.endswith(b"\n")  # while it was written
                if last < self._step and not killed:
                    aside = atomic_files.move_aside(self._path)
                    shutil.copyfile(aside, self._path)
                    self._notify(
                        f"{error}; that file is now {aside}, and {self._path.name} has the"
                        f" {number - 1} rows before"
                    )
                break
            if row["step"] > self._step or not line.endswith(b"\n"):
                break
            self.first, self.last, last = self.first or row, row, row["step"]
            size += len(line)
        return size


def held_out_reward(row: Mapping[str, Any], prefix: str = "eval/") -> float | None:
    """Returns the reward that an environment gave held-out episodes, where it says something: it is
    not 0, as it is of an environment without rewards, or nothing else judges them."""
    reward: float | None = row.get(f"{prefix}environment_reward")
    return reward if reward or f"{prefix}accuracy" not in row else None


class MetricsWriter(JsonLines):
    """Appends rows to ``metrics.jsonl``, each at once; steps rise, names stand in ``METRICS``. Of
    the rows only the first and the last stay in memory. One thread writes."""

    def write(self, step: int, metrics: Mapping[str, Value]) -> Row:
        """Writes and returns the row of one step."""
        row = _row(step, metrics)
        if step <= self._step:
            raise ValueError(f"step {step} after step {self._step}: steps must rise")
        self._step = step
        self.first, self.last = self.first or row, row
        self.append([json.dumps(row, allow_nan=False)])
        return row

    def amend(self, step: int, metrics: Mapping[str, Value]) -> Row:
        """Adds to the newest row, which must be of ``step``; returns all of it."""
        old = self.last
        assert old is not None and old["step"] == step, f"the newest row is not of step {step}"
        self.last = old | _row(step, metrics)
        if self.first is old:
            self.first = self.last
        self.replace_last(*(json.dumps(row, allow_nan=False) for row in (old, self.last)))
        return self.last


def _parse(path: Path, number: int, line: str | bytes) -> JsonObject:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise UserError(f"{path}, line {number}: no object with a step")
    return row


def read_metrics(run: str | Path) -> list[JsonObject]:
    """Returns the rows of a run, but for a torn last line.

    Args:
        run: a run directory or its ``metrics.jsonl``.
    """
    path = user_path(run)
    path = path / METRICS_FILE if path.is_dir() else path
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file")
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            # Every whole line ends with a newline; what follows the last one is torn (or empty).
            whole = (line for line in file if line.endswith("\n"))
            return [_parse(path, number, line) for number, line in enumerate(whole, start=1)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: no {METRICS_FILE} of a run") from error


@dataclass(frozen=True)
class Training:
    """What one completion was trained with; None where it has nothing of the kind."""

    learned: int | None = None
    """Tokens that trained."""
    reward: float | None = None
    """With the penalties."""
    rewards: Mapping[str, float | None] | None = None
    """Name -> reward of each function, the reward model or the environment, without its weight."""
    advantage: np.ndarray | float | None = None
    """Of the completion or, as an array, of each of its tokens."""
    agreement: float | None = None


@dataclass(frozen=True)
class Sample:
    """One completion as ``samples.jsonl`` and the console show it."""

    step: int
    """Batches trained when it was shown; 0 is before training."""
    split: Literal["train", "data", "eval"]
    """`data`: trained on as the data or a store of samples has it; the policy or a teacher sampled
    it nowhere in this run."""
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
    reward: float | None = None
    """What the completion was rewarded with, where the algorithm learns from rewards; else, of an
    episode, the sum of its turns' rewards."""
    agreement: float | None = None
    """Share of its tokens where student and teacher had the same most probable token when it was
    trained on; null where nobody counted."""
    turns: tuple[JsonObject, ...] | None = None
    """Of several turns each one's role (`assistant`, or who answers: `tool`, `user`), content with
    its calls, number of tokens, whether these are learned, reward and advantage; null for a
    completion of one turn."""
    failure: str | None = None
    """Why an episode's environment could not go on."""
    learned: int | None = None
    """How many of its tokens trained, EOS included: 0 where it was left out; null where nothing
    was trained."""
    rewards: JsonObject | None = None
    """Each reward by its name, without its weight; null where there is none."""
    advantage: float | None = None
    """What its reward is worth against the others of its prompt; null where turns have their
    own."""

    @property
    def judged(self) -> str:
        """Returns the reward that it was trained with, else the verifier's score, or ''."""
        if self.reward is not None:
            return f"reward {self.reward:.2g}"
        return "" if self.score is None else f"score {self.score:.2g}"

    @property
    def summary(self) -> str:
        """Returns how it ended, what it was rewarded with and by whom, its advantage, and whether
        nothing of it was learned."""
        parts = [self.finish_reason, self.judged]
        if self.rewards and len(self.rewards) > 1:
            each = ("-" if x is None else f"{x:.2g}" for x in self.rewards.values())
            parts[1] += f" ({', '.join(map(' '.join, zip(self.rewards, each, strict=True)))})"
        if self.advantage is not None:
            parts.append(f"advantage {self.advantage:+.2g}")
        parts.append("not learned" if self.learned == 0 else "")
        return ", ".join(filter(None, parts))

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        completion: Completion,
        *,
        step: int,
        split: Literal["train", "data", "eval"],
        policy_version: int,
        score: float | None = None,
        training: Training = Training(),
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> Self:
        """Describes a completion.

        Args:
            decode: tokens -> text, for turns of the assistant, whose calls data have beside their
                content; None: `Turn.text` is shown.
        """
        whole, turns, shown, end = training.advantage, completion.turns, list[JsonObject](), 0
        for turn in turns:
            begin, end = end, end + turn.tokens
            ours, content = turn.role == "assistant", turn.text
            if ours and decode is not None:
                content = decode(completion.tokens[begin:end])
            part: JsonObject = {"role": turn.speaker, "content": content, "reward": turn.reward}
            part |= {"tokens": turn.tokens, "learned": ours and bool(training.learned)}
            if isinstance(whole, np.ndarray) and ours and turn.tokens:
                part["advantage"] = float(whole[begin])
            shown.append(part)
        given = [turn.reward for turn in turns if turn.reward is not None]
        return cls(
            step=step,
            split=split,
            prompt=prompt.text,
            completion="\n".join(f"[{turn['role']}] {turn['content']}" for turn in shown)
            or completion.text,
            finish_reason=completion.finish_reason,
            tokens=len(completion.tokens),
            policy_version=policy_version,
            answer=prompt.answer,
            score=score,
            reward=sum(given) if training.reward is None and given else training.reward,
            agreement=training.agreement,
            turns=tuple(shown) or None,
            failure=completion.failure,
            learned=training.learned,
            rewards=None if training.rewards is None else dict(training.rewards),
            advantage=None if isinstance(whole, np.ndarray) else whole,
        )


def write_samples(file: JsonLines, samples: Sequence[Sample]) -> None:
    """Appends completions to ``samples.jsonl``, a line each, all of them at once."""
    rows = [dataclasses.asdict(sample) for sample in samples]
    for row in rows:  # null, as in metrics
        row |= {n: None for n, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    file.append([json.dumps(row, ensure_ascii=False) for row in rows])


def metrics_page() -> str:
    """Returns the page docs/metrics.md."""
    head = (ASSETS / "metrics_page.md").read_text(encoding="utf-8")
    rows = (
        f"| `{name}` | {metric.unit} | {metric.meaning} |\n" for name, metric in METRICS.items()
    )
    return head + "".join(rows)


def main(argv: Sequence[str]) -> None:
    cli.Parser("jaxrl.telemetry.metrics", "Prints the page docs/metrics.md.").parse(argv)
    print(metrics_page(), end="")


if __name__ == "__main__":
    sys.exit(cli.run(main))
