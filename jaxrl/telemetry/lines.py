"""A file of lines that grows, and that a full disk makes incomplete but never ends a run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import IO

from jaxrl.errors import UserError

COPIED = 1 << 20
"""Bytes of a file that are in memory at once while it is copied."""
HELD = 10_000
"""Lines kept for a disk that takes none; beyond them the oldest are lost."""


def move_aside(path: Path) -> Path:
    """Renames what is there to `NAME.damaged`, or `NAME.damaged-2` and so on; returns the name."""
    number, aside = 1, path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(f"{path} is damaged and cannot be renamed: {error.strerror}") from error
    return aside


def clear_place(path: str | Path, told: Callable[[str], None]) -> None:
    """Moves a folder aside that has the name of a file to write."""
    if Path(path).is_dir():
        told(f"{path} is a folder, no file of a run; it is now {move_aside(Path(path))}")


class LineFile:
    """Appends lines, each on the disk at once; what the disk refuses goes out with a later append.

    One thread at a time.
    """

    def __init__(
        self, path: str | Path, size: int, told: Callable[[str], None], tail: bytes = b""
    ) -> None:
        """
        Args:
            size: bytes of the file to go on after; the rest is cut. 0: a new file.
            told: takes the one message of a disk that refuses.
            tail: ends the file after every append, and is overwritten by the next.
        """
        self._path, self._size, self._told, self._tail = Path(path), size, told, tail
        self._held: deque[bytes] = deque(maxlen=HELD)
        self._refused = False
        self._torn = False
        """Whether something may follow the lines that count."""
        self._lost = 0
        try:
            self._file = open(path, "r+b" if size else "w+b", buffering=0)  # noqa: SIM115
            # Cutting the end in place needs no room and is done or not done, whatever happens.
            self._file.truncate(size)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error

    @property
    def size(self) -> int:
        """Bytes of the lines that the disk has."""
        return self._size

    def append(self, lines: Sequence[str]) -> None:
        """Writes the lines (none of which holds a line break), and all that was refused before."""
        self._lost += max(0, len(self._held) + len(lines) - HELD)
        self._held += [line.encode() + b"\n" for line in lines]
        data = b"".join(self._held)
        try:
            if self._torn:
                self._file.truncate(self._size)
            self._file.seek(self._size)
            _write_all(self._file, data + self._tail)
        except OSError as error:
            if not self._refused:
                self._told(f"cannot write {self._path}: {error.strerror}; the run goes on")
            self._refused = self._torn = True
            return
        self._torn = False
        self._size += len(data)
        self._held.clear()

    def replace_last(self, old: str, new: str) -> None:
        """Writes ``new`` in place of the line that was appended last."""
        if self._held:
            self._held.pop()
        else:
            self._size -= len(old.encode()) + 1
            self._torn = True
        self.append([new])

    def restore(self) -> bool:
        """Writes the file once more where it was removed, or another one has its name; returns
        whether that was so.

        The lines come from the removed file, which exists as long as it is open here.
        """
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return False
        except FileNotFoundError:
            pass
        except OSError:  # a disk that does not answer: the next write says so
            return False
        try:
            new = open(self._path, "w+b", buffering=0)  # noqa: SIM115
        except OSError:  # the old one stays open, so that nothing else has to know
            return False
        try:
            copied = _copy(self._file, new, 0, self._size)
        except OSError:  # no room: the next restore tries again
            new.close()
            return False
        if copied < self._size:
            copied = 0
            self._told(f"{self._path} was removed and cannot be read back: its lines are lost")
        self._file.close()
        self._file, self._size, self._torn = new, copied, True
        self.append([])
        return True

    def drop_oldest(self, keep: Callable[[bytes], bool]) -> None:
        """Puts a file without the older half of the lines in the place of this one. A disk that
        refuses leaves it as it is.

        Args:
            keep: of a line in the older half, whether it stays; once, where it is repeated.
        """
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            new = open(partial, "w+b", buffering=0)  # noqa: SIM115
        except OSError:
            return
        try:
            size = self._write_newer_half(new, keep)
            partial.replace(self._path)
        except OSError:
            new.close()
            partial.unlink(missing_ok=True)
            return
        self._file.close()
        self._file, self._size, self._torn = new, size, False

    def _write_newer_half(self, new: FileIO, keep: Callable[[bytes], bool]) -> int:
        """Bytes of the lines in the new file, after which its tail stands."""
        kept: dict[bytes, None] = {}
        with open(self._path, "rb") as old:
            while old.tell() < self._size // 2 and (line := old.readline()):
                kept |= {line: None} if keep(line) else {}
            _write_all(new, b"".join(kept))
            size = sum(map(len, kept)) + _copy(old, new, old.tell(), self._size)
        _write_all(new, self._tail)
        return size

    def close(self) -> None:
        """A last attempt at what was refused; tells what never went out."""
        if self._held:
            self.append([])
        missing = self._lost + len(self._held)
        if missing:
            self._told(f"{self._path} lacks {missing} lines: they could not be written")
        try:
            self._file.close()
        except OSError as error:
            self._told(f"cannot close {self._path}: {error.strerror}")


def _copy(old: IO[bytes], new: FileIO, start: int, end: int) -> int:
    """Writes these bytes of a file to a new one; returns how many: fewer where the old one cannot
    be read any more, as on some network file systems.
    """
    at = start
    while at < end:
        try:
            part = os.pread(old.fileno(), min(COPIED, end - at), at)
        except OSError:
            part = b""
        if not part:
            break
        _write_all(new, part)
        at += len(part)
    return at - start


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
