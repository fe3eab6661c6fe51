"""`stream.jsonl`: what timing decided of a run whose `schedule` is `streaming`, a line for each
event: `["load", 3, 17]`, as in `types.StreamEvent`. Lines are written before the row or the
checkpoint that depends on them. A run that resumes follows those after its checkpoint, and a replay
all of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO

from jaxrl.errors import UserError
from jaxrl.process.json_types import read_file
from jaxrl.roles.stream_log import BEGUN
from jaxrl.telemetry.lines import LineFile
from jaxrl.types import StreamEvent, StreamEvents

STREAM_FILE = "stream.jsonl"
RESTART = "restart"
"""The event of a sampler that was lost with all that it had in flight."""


def read_record(path: Path) -> list[StreamEvent]:
    """Reads the record of the run in a folder. A line that was torn as the run was killed ends it.

    Raises:
        UserError: there is none.
    """
    try:
        text = read_file(path / STREAM_FILE)
    except OSError as error:
        raise UserError(f"{path / STREAM_FILE} cannot be read: {error.strerror}") from error
    return [event for event, _ in _lines(text)]


def _lines(content: bytes) -> list[tuple[StreamEvent, int]]:
    """Returns the events, and where the line of each one ends."""
    found, end = list[tuple[StreamEvent, int]](), 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        event = None
        with suppress(ValueError, TypeError):
            event = StreamEvent(*json.loads(line))
        types = None if event is None else tuple(map(type, event))
        if event is None or types != (str, int, int) or not line.endswith(b"\n"):
            break
        found.append((event, end))
    return found


class StreamRecord:
    """The record of a run, which any thread may add to."""

    def __init__(
        self, path: Path, step: int | None, notify: Callable[[str], None], follows: bool = True
    ):
        """
        Args:
            step: of the checkpoint that the run resumes from; None: it begins.
            follows: whether a run that resumes does again what the record has after it: its config
                and all it depends on are the same.
        """
        self.after: tuple[StreamEvent, ...] = ()
        """What the record had after that checkpoint: the events of steps that were lost."""
        self._lock = threading.Lock()
        self._sampler: str | None = None
        self._count = 0

        def keep(file: IO[bytes]) -> int:
            lines = _lines(file.read())
            saved = [i for i, (e, _) in enumerate(lines) if (e.call, e.number) == ("save", step)]
            # A checkpoint between batches has nothing in flight, and no event.
            if not saved:
                return lines[-1][1] if lines and step is not None else 0
            if follows:
                self.after = tuple(event for event, _ in lines[saved[-1] + 1 :])
            return lines[saved[-1]][1]

        self.file = LineFile(path / STREAM_FILE, notify, None if step is None else keep)

    def after_load(self, step: int) -> list[StreamEvent]:
        """Returns what a run that resumes from `step` follows: the load of its weights, and what
        the record had after that, up to a restart of the sampler."""
        load = StreamEvent("load", step, 0)
        after = [*takewhile(lambda event: event.call != RESTART, self.after)]
        return after if after[:1] == [load] else [load]

    def add(self, happened: StreamEvents) -> None:
        """Writes those of the events that are not written yet."""
        with self._lock:
            new: list[StreamEvent] = []
            if happened.sampler != self._sampler:
                if self._sampler is not None:
                    new.append(StreamEvent(RESTART, 0, 0))
                self._sampler, self._count = happened.sampler, 0
            new += happened.events[max(self._count - happened.first, 0) :]
            self._count = max(self._count, happened.first + len(happened.events))
            self.file.append([json.dumps(event) for event in new if event.call != BEGUN])
