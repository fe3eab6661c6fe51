"""What a run directory holds, as far as it can be read.

A report is asked for while a run is going on, after it was killed, or of what is left of an old
one: a file that is not there and a line that is cut make it shorter, and it says so.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.config import yaml_text
from jaxrl.config.schema import CONFIG_FILE
from jaxrl.errors import UserError
from jaxrl.plan.record import PLAN_DATA_FILE
from jaxrl.profile.traces import PROFILE_DIR, STAGES_FILE
from jaxrl.run.run_dir import LOCK, sessions
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE
from jaxrl.telemetry.timeline import TIMELINE_FILE

Row = Mapping[str, Any]
"""The metrics of a step, and its number under `step`; None is a value that was not finite."""


@dataclass(frozen=True)
class RunFiles:
    """A run directory, read."""

    name: str
    path: Path
    config: Mapping[str, Any]
    """Dotted key -> value; empty where there is no config."""
    rows: tuple[Row, ...]
    samples: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    """Of the timeline, as in its file."""
    plan: Mapping[str, Any] | None
    """As `plan.record.plan_json` describes it."""
    stages: Any | None
    """What a profiled run measured of its stages."""
    sessions: tuple[Mapping[str, Any], ...]
    """The starts of the run, as `run.run_dir.sessions` tells them."""
    running: bool
    """Whether a process holds the run's lock."""
    notes: tuple[str, ...]
    """What was left out of files that are there."""

    @property
    def steps(self) -> int:
        """Batches trained, as far as the rows tell."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def wanted(self) -> int | None:
        """Batches that the config asks for."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None


def read_run(path: Path) -> RunFiles:
    """Raises UserError where the folder holds no run."""
    if not path.is_dir():
        told = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {told}: give the directory of a run, as in runs/quickstart")
    if not any((path / name).is_file() for name in (CONFIG_FILE, METRICS_FILE)):
        raise UserError(
            f"{path} holds no run: neither {CONFIG_FILE} nor {METRICS_FILE} is in it;"
            " give the directory of a run, as in runs/quickstart"
        )
    notes: list[str] = []
    return RunFiles(
        name=path.resolve().name,
        path=path,
        config=_config(path / CONFIG_FILE, notes),
        rows=tuple(map(_numbers, _with_step(_lines(path / METRICS_FILE, notes)))),
        samples=tuple(_with_step(_lines(path / SAMPLES_FILE, notes))),
        events=tuple(_lines(path / TIMELINE_FILE, notes)),
        plan=_document(path / PLAN_DATA_FILE, notes),
        stages=_document(path / PROFILE_DIR / STAGES_FILE, notes),
        sessions=tuple(sessions(path)),
        running=_locked(path / LOCK),
        notes=tuple(notes),
    )


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested sections, dotted."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(flat(yaml_text.read_mapping(path)))
    except UserError as error:
        notes.append(str(error))
        return {}


def _text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        notes.append(f"cannot read {path}: {error.strerror}")
        return ""


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The objects of a file with one a line, as they are written to it: every whole line ends with
    a newline, and in the timeline begins with a comma, between lines of brackets.
    """
    found, broken = [], 0
    for line in _text(path, notes).split("\n")[:-1]:
        text = line.removeprefix(",").strip()
        if text in ("", "[", "]"):
            continue
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} lines are no JSON objects, and left out")
    return found


def _document(path: Path, notes: list[str]) -> Any | None:
    text = _text(path, notes)
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        notes.append(f"{path.name}: no JSON, and left out")
        return None


def _with_step(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (each for each in objects if isinstance(each.get("step"), int))


def _numbers(row: Row) -> Row:
    """What can be drawn of a row."""
    return {k: v for k, v in row.items() if v is None or isinstance(v, int | float)}


def _locked(path: Path) -> bool:
    """Whether another process holds the lock; it is taken and given back at once."""
    try:
        with open(path, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
