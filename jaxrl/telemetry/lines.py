"""A file of lines that grows, and that a full disk makes incomplete but never ends a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxrl.errors import UserError

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
            self._file = open(path, "r+b" if size else "wb", buffering=0)  # noqa: SIM115
            # Cutting the end in place needs no room and is done or not done, whatever happens.
            self._file.truncate(size)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error

    def append(self, lines: Sequence[str]) -> None:
        """Writes the lines (none of which holds a line break), and all that was refused before."""
        self._lost += max(0, len(self._held) + len(lines) - HELD)
        self._held += [line.encode() + b"\n" for line in lines]
        data = b"".join(self._held)
        try:
            if self._torn:
                self._file.truncate(self._size)
            self._file.seek(self._size)
            self._write(data + self._tail)
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

    def restore(self, lines: Sequence[str]) -> None:
        """Begins a new file with these lines where the old one was removed."""
        try:
            new = open(self._path, "wb", buffering=0)  # noqa: SIM115
        except OSError:  # the old one stays open, so that nothing else has to know
            return
        self._file.close()
        self._file, self._size, self._torn = new, 0, False
        self.append(lines)

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

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
