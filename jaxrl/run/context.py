"""What all attempts of a run share: its job and plan, its notifier, and the request to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from jaxrl.plan import Plan
from jaxrl.process.interrupt import Interrupt
from jaxrl.process.json_types import JsonObject
from jaxrl.run.job import Job
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import RunLog
from jaxrl.types import Row


class Notifier:
    """Prints to the console and to `log.txt`. Text printed before the log is open is written
    later."""

    def __init__(self, console: Console):
        self._console = console
        self._log: RunLog | None = None
        self._kept: list[str] = []
        console.on_lost(self.to_log)

    def __call__(self, text: str) -> None:
        self._console.message(text)
        self.to_log(text)

    def to_log(self, text: str) -> None:
        """Writes a message to the log alone."""
        if self._log is None:
            self._kept.append(text)
        else:
            self._log.write(text)

    @contextmanager
    def into(self, log: RunLog) -> Iterator[RunLog]:
        """Opens the log for this block, and closes it at the end."""
        with log:
            for text in self._kept:
                log.write(text)
            self._kept, self._log = [], log
            try:
                yield log
            finally:
                self._log = None


class OnStep:
    """The caller's function for each row. If it raises, the error is kept and the run ends."""

    def __init__(self, function: Callable[[JsonObject], object] | None = None):
        self._function = function
        self.error: Exception | None = None

    def __call__(self, row: Row) -> None:
        if self._function is None or self.error is not None:
            return
        try:
            self._function(dict(row))
        except Exception as error:
            self.error = error


@dataclass(frozen=True)
class RunContext:
    """State shared by all attempts of a run."""

    job: Job
    plan: Plan
    console: Console
    notify: Notifier
    interrupt: Interrupt
    on_step: OnStep
    started: float
    """`time.monotonic` seconds."""
