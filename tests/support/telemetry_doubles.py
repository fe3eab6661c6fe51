"""A clock, a terminal and a full disk of the tests; rows and samples."""

from __future__ import annotations

import errno
import io

from jaxrl.telemetry import lines
from jaxrl.telemetry.metrics import (
    Sample,
)

SAMPLE = Sample(
    step=3,
    split="train",
    prompt="1+1=\n",
    completion="2 é",
    finish_reason="stop",
    tokens=2,
    policy_version=2,
    answer="2",
    score=1.0,
)


ROWS = [
    {"step": 0, "eval/accuracy": 0.05, "teacher/accuracy": 0.98},
    {"step": 1, "distill/divergence": 0.6931, "tokens/per_second": 1234.5, "time/step_s": 2.0},
    {"step": 2, "distill/divergence": 0.5, "eval/accuracy": 0.5, "time/step_s": 2.0},
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FullDisk:
    """Takes ``room`` bytes, then refuses until there is more."""

    def __init__(self, file: lines.LineFile, room: int) -> None:
        self.room = room
        self._inner = file._file
        file._file = self  # type: ignore[assignment]

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._inner.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)
