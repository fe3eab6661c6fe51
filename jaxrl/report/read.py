"""What a run directory holds, as far as it can be read.

A report is asked for while a run is going on, after it was killed, or of what is left of an old
one: a file that is not there and a line that is cut make it shorter, and it says so.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from jaxrl.config import yaml_text
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.errors import UserError
from jaxrl.plan.table import PLAN_DATA_FILE, read_plan
from jaxrl.process.json_types import JsonObject, parse_json, read_file
from jaxrl.profile.traces import PROFILE_DIR, STAGES_FILE, StageTable
from jaxrl.run.record import TOKENS_FILE
from jaxrl.run.run_dir import LOCK, sessions
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE
from jaxrl.telemetry.timeline import TIMELINE_FILE
from jaxrl.types import Row

LARGEST = 1e100
"""Of a value in a row: sums of larger ones are not finite."""


@dataclass(frozen=True)
class RunFiles:
    """A run directory, read."""

    path: Path
    config: JsonObject
    """Dotted key -> value; empty where there is no config."""
    rows: tuple[Row, ...]
    samples: tuple[JsonObject, ...]
    events: tuple[JsonObject, ...]
    """Of the timeline, as in its file."""
    plan: JsonObject | None
    """As `plan.table.plan_json` describes it."""
    stages: JsonObject | None
    """What a profiled run measured of its stages, as `StageTable.to_json` makes it."""
    tokens: JsonObject | None
    """Of a replay: the `title`, `heads` and `rows` of the tokens of one completion."""
    sessions: tuple[JsonObject, ...]
    """The starts of the run, as `run.run_dir.sessions` returns them."""
    running: bool
    """Whether a process holds the run's lock."""
    notes: tuple[str, ...]
    """What was left out of files that are there."""

    @property
    def steps(self) -> int:
        """Batches trained, by the last row."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def wanted(self) -> int | None:
        """Batches that the config asks for."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None


def read_run(path: Path) -> RunFiles:
    """Raises UserError where the folder holds no run."""
    usage = "give the directory of a run, as in runs/quickstart"
    if not path.is_dir():
        raise UserError(f"{path} {'is a file' if path.exists() else 'does not exist'}: {usage}")
    if not any((path / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise UserError(
            f"{path} holds no run: neither {CONFIG_FILE} nor {METRICS_FILE} is in it; {usage}"
        )
    notes: list[str] = []
    config: JsonObject = {}
    try:
        if (path / CONFIG_FILE).is_file():
            config = dict(yaml_text.assignments(yaml_text.read_mapping(path / CONFIG_FILE)))
    except UserError as error:
        notes.append(str(error))
    return RunFiles(
        path=path,
        config=config,
        rows=tuple(_lines(path / METRICS_FILE, notes, _row)),
        samples=tuple(_lines(path / SAMPLES_FILE, notes, _Sample.checked)),
        events=tuple(_lines(path / TIMELINE_FILE, notes, lambda event: event)),
        plan=_document(path / PLAN_DATA_FILE, notes, read_plan),
        stages=_document(path / PROFILE_DIR / STAGES_FILE, notes, StageTable.read),
        tokens=_document(path / TOKENS_FILE, notes, _Tokens.read),
        sessions=tuple(sessions(path)),
        running=_locked(path / LOCK),
        notes=tuple(notes),
    )


def _text(path: Path, notes: list[str]) -> str:
    try:
        return read_file(path).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return ""


def _lines(
    path: Path, notes: list[str], checked: Callable[[JsonObject], JsonObject]
) -> list[JsonObject]:
    """Reads the objects of a file with one per line. Every whole line ends with a newline; those of
    the timeline begin with a comma, between lines of brackets.

    Args:
        checked: gives what is used of an object; raises ValueError for one that nobody wrote so.
    """
    found, broken = [], 0
    for line in _text(path, notes).split("\n")[:-1]:
        text = line.removeprefix(",").strip()
        if text in ("", "[", "]"):
            continue
        with suppress(ValueError):
            if isinstance(value := parse_json(text), dict):
                found.append(checked(value))
                continue
        broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} lines are not as a run writes them, and left out")
    return found


def _row(row: JsonObject) -> JsonObject:
    kept = {k: v for k, v in row.items() if v is None or isinstance(v, int | float)}
    if type(row.get("step")) is not int or any(abs(v or 0) > LARGEST for v in kept.values()):
        raise ValueError("no row of a run")
    return kept


class _Turn(BaseModel):
    """What the page shows of a turn."""

    role: str
    content: str | None = None
    learned: bool | None = None
    reward: float | None = None
    advantage: float | None = None


class _Sample(BaseModel):
    """What the page shows of a sample."""

    step: int
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None
    score: float | None = None
    reward: float | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    agreement: float | None = None
    learned: int | None = None
    advantage: float | None = None
    rewards: dict[str, float | None] | None = None
    turns: list[_Turn] | None = None

    @classmethod
    def checked(cls, sample: JsonObject) -> JsonObject:
        """Returns the sample; raises ValueError for one that nobody wrote so."""
        cls.model_validate(sample, strict=True)
        return sample


class _Tokens(BaseModel):
    """What a replay writes of the tokens of one completion."""

    title: str
    columns: dict[str, list[str]]

    @classmethod
    def read(cls, text: str) -> JsonObject:
        found = cls.model_validate_json(text, strict=True)
        rows = [*zip(*found.columns.values(), strict=True)]
        return {"title": found.title, "heads": [*found.columns], "rows": rows}


def _document(path: Path, notes: list[str], read: Callable[[str], JsonObject]) -> JsonObject | None:
    """Reads the value of a JSON file; None where there is none."""
    text = _text(path, notes)
    try:
        return read(text) if text else None
    except ValueError:
        notes.append(f"{path.name}: not as a run writes it, and left out")
        return None


def _locked(path: Path) -> bool:
    """Returns whether another process holds the lock; it is taken and given back at once."""
    if not path.is_file():
        return False
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
