"""Files of lines that grow, and that a full disk makes incomplete but never ends a run; `log.txt`:
everything that a run said, each message with its time."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Self

from jaxrl.errors import UserError
from jaxrl.process import atomic_files
from jaxrl.process.streams import to_stderr

LOG_FILE = "log.txt"
HELD = 10_000
"""Lines kept for a disk that takes none; beyond them the oldest are lost."""


class LineFile:
    """Appends lines, each on the disk at once; what the disk refuses is written by a later append.

    Any thread may call it. Once it is closed, nothing is written any more.
    """

    def __init__(
        self,
        path: str | Path,
        notify: Callable[[str], None],
        keep: Callable[[IO[bytes]], int] | None = None,
        tail: bytes = b"",
    ) -> None:
        """
        Args:
            notify: takes the one message of a disk that refuses; it may write to this file.
            keep: reads the file that is there and returns how many of its bytes stay; the rest is
                cut. None: a new file.
            tail: ends the file after every append, and is overwritten by the next.

        Raises:
            UserError: the file cannot be opened.
        """
        self._path, self._notify, self._tail = Path(path), notify, tail
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._held: deque[bytes] = deque(maxlen=HELD)
        self._lost = 0
        self._refused = self._closed = False
        self._torn = False
        """Whether something may follow the lines that count."""
        self.size = 0
        """Bytes of the lines that the disk has."""
        if _is_no_file(self._path):
            notify(
                f"{path} is not a file of a run; it is now {atomic_files.move_aside(self._path)}"
            )
        try:
            if keep is not None:
                with suppress(FileNotFoundError), open(path, "rb") as file:
                    self.size = keep(file)
            self._file = open(path, "r+b" if self.size else "w+b", buffering=0)  # noqa: SIM115
            # Cutting the end in place needs no room and is done or not done, whatever happens.
            self._file.truncate(self.size)
        except OSError as error:
            raise UserError(f"cannot open {path}: {error.strerror}") from error

    def append(self, lines: Sequence[str]) -> None:
        """Writes the lines (none of which holds a line break), and all that was refused before."""
        with self._locked():
            if not self._closed:
                self._append(lines)

    def replace_last(self, old: str, new: str) -> None:
        """Writes ``new`` in place of the line that was appended last."""
        with self._locked():
            if self._held:
                self._held.pop()
            else:
                self.size -= len(f"{old}\n".encode("utf-8", "backslashreplace"))
                self._torn = True
            self._append([new])

    def in_place(self) -> bool:
        """Returns whether the file still has its name: nobody removed or replaced it."""
        with self._locked():
            return self._closed or is_in_place(self._path, self._file)

    def drop_oldest(self, keep: Callable[[bytes], bool]) -> None:
        """Puts a file without the older half of the lines in the place of this one. A disk that
        refuses leaves it as it is.

        Args:
            keep: of a line in the older half, whether it stays; once, where it is repeated.
        """
        size = 0

        def write(place: Path) -> None:
            nonlocal size
            kept: dict[bytes, None] = {}
            with open(self._path, "rb") as old, open(place, "wb") as new:
                while old.tell() < self.size // 2 and (line := old.readline()):
                    kept |= {line: None} if keep(line) else {}
                new.writelines(kept)
                size = new.tell() + self.size - old.tell()
                shutil.copyfileobj(old, new)
                new.truncate(size)
                new.seek(size)
                new.write(self._tail)

        with self._locked(), suppress(OSError):
            atomic_files.put_file(self._path, write)
            new = open(self._path, "r+b", buffering=0)  # noqa: SIM115
            self._file.close()
            self._file, self.size, self._torn = new, size, False

    def close(self) -> None:
        """Makes a last attempt at what was refused; reports what was never written."""
        with self._locked():
            if self._closed:
                return
            if self._held:
                self._append([])
            self._closed = True
            missing = self._lost + len(self._held)
            if missing:
                self._messages.append(
                    f"{self._path} lacks {missing} lines: they could not be written"
                )
            try:
                self._file.close()
            except OSError as error:
                self._messages.append(f"cannot close {self._path}: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock. Messages go out after it, for who takes them may write to this file."""
        with self._lock:
            yield
            messages, self._messages = self._messages, []
        for message in messages:
            self._notify(message)

    def _append(self, lines: Sequence[str]) -> None:
        self._lost += max(0, len(self._held) + len(lines) - HELD)
        # Paths and completions may hold what is no UTF-8; it is no reason to end a run.
        self._held += [f"{line}\n".encode("utf-8", "backslashreplace") for line in lines]
        data = b"".join(self._held)
        try:
            if self._torn:
                self._file.truncate(self.size)
            self._file.seek(self.size)
            rest = memoryview(data + self._tail)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if not self._refused:
                self._messages.append(
                    f"cannot write {self._path}: {error.strerror}; the run continues"
                )
            self._refused = self._torn = True
            return
        self._torn = False
        self.size += len(data)
        self._held.clear()


def is_in_place(path: Path, file: IO[Any]) -> bool:
    """Returns whether an open file has this path; True where the disk does not answer, which the
    next write reports."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def time_stamp() -> str:
    """Formats the local time with its offset from UTC; UTC where TZ has an offset of a day or more,
    with which Python does not compute."""
    now = datetime.now(UTC)
    with suppress(ValueError):
        now = now.astimezone()
    return now.isoformat(timespec="seconds")


class RunLog(LineFile):
    """Appends messages; a resumed run adds to what is there."""

    def __init__(self, path: str | Path, notify: Callable[[str], None] = to_stderr) -> None:
        super().__init__(path, notify, keep=lambda file: file.seek(0, os.SEEK_END))
        if self.size and os.pread(self._file.fileno(), 1, self.size - 1) != b"\n":
            self.append([""])  # a killed run's last line stays, and ends here

    def write(self, text: str) -> None:
        """Writes one message, lines after the first indented; drops it if the log is closed."""
        stamp = time_stamp()
        first, *rest = text.splitlines() or [""]
        lines = [f"{stamp} {first}", *(f"{'':{len(stamp)}} {line}" for line in rest)]
        self.append([line.rstrip() for line in lines])


def _is_no_file(path: Path) -> bool:
    """Returns whether there is something in the place of a file: a folder, a pipe, which would be
    waited for, or a link that leads nowhere."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink() and not Path(os.path.realpath(path)).parent.is_dir()
    except PermissionError:
        return False
    except OSError:  # a link to itself
        return True
