"""``log.txt``: everything that a run said, each message with its time."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from jaxrl.process.streams import to_stderr
from jaxrl.telemetry.lines import LineFile

LOG_FILE = "log.txt"


class RunLog(LineFile):
    """Appends messages; a resumed run adds to what is there. Any thread may write.

    A message is on the disk when `write` returns. A disk that refuses is reported once and raises
    nothing; what it refused is written when there is room.
    """

    def __init__(self, path: str | Path, notify: Callable[[str], None] = to_stderr) -> None:
        """
        Args:
            notify: takes the one message of a disk that refuses. It may write to this log.
        """
        super().__init__(path, notify, keep=lambda file: file.seek(0, os.SEEK_END))
        if self.size and os.pread(self._file.fileno(), 1, self.size - 1) != b"\n":
            self.append([""])  # a killed run's last line stays, and ends here

    def write(self, text: str) -> None:
        """One message; its lines after the first are indented. Dropped when the log is closed."""
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        first, *rest = text.splitlines() or [""]
        lines = [f"{stamp} {first}", *(f"{'':{len(stamp)}} {line}" for line in rest)]
        self.append([line.rstrip() for line in lines])
