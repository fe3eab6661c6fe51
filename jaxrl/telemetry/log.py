"""``log.txt``: everything that a run said, each message with its time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Self

from jaxrl.errors import UserError
from jaxrl.process.streams import to_stderr
from jaxrl.telemetry.lines import LineFile, clear_place

LOG_FILE = "log.txt"


class RunLog:
    """Appends messages; a run that goes on adds to what is there. Any thread may write.

    A message is on the disk when `write` returns. A disk that refuses is told once and raises
    nothing; what it refused follows when there is room.
    """

    def __init__(self, path: str | Path, told: Callable[[str], None] = to_stderr) -> None:
        """
        Args:
            told: takes the one message of a disk that refuses. It may write to this log.
        """
        self._told, self._to_tell = told, list[str]()
        self._lock = threading.Lock()
        self._closed = False
        clear_place(path, self._to_tell.append)
        size, torn = _kept(path)
        self._file = LineFile(path, size, self._to_tell.append)
        if torn:  # a killed run's last line stays, and ends here
            self._file.append([""])
        self._tell()

    def write(self, text: str) -> None:
        """One message; its lines after the first are indented. Dropped when the log is closed."""
        stamp = datetime.now().astimezone().isoformat(timespec="seconds")
        first, *rest = text.splitlines() or [""]
        lines = [f"{stamp} {first}", *(f"{'':{len(stamp)}} {line}" for line in rest)]
        with self._lock:
            if not self._closed:
                # Paths and completions may hold what is no UTF-8; it is no reason to end a run.
                self._file.append([_encodable(line).rstrip() for line in lines])
        self._tell()

    def restore(self) -> bool:
        """As `LineFile.restore`."""
        with self._lock:
            return not self._closed and self._file.restore()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()
        self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self) -> None:
        """Outside the lock: whoever is told may well write it to this log."""
        with self._lock:
            texts, self._to_tell[:] = list(self._to_tell), []
        for text in texts:
            self._told(text)


def _encodable(line: str) -> str:
    return line.encode("utf-8", "backslashreplace").decode("utf-8")


def _kept(path: str | Path) -> tuple[int, bool]:
    """Bytes of the file that is there, and whether its last line has no end."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return size, file.read() not in (b"", b"\n")
    except FileNotFoundError:
        return 0, False
    except OSError as error:
        raise UserError(f"cannot go on with {path}: {error.strerror}") from error
