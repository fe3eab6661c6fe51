"""Files that a run reads more than once: what was opened is kept, or the run ends."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.errors import UserError

PIECE_BYTES = 1 << 24
"""Of a tensor, each so many bytes in the order of its file have a checksum: the same ones, however
its devices slice it."""
THREADS = 2

Checksums = Mapping[str, Mapping[str, int]]
"""File -> piece of a tensor in it -> CRC-32."""


def has_changed(file: str | os.PathLike[str], why: object = "") -> UserError:
    """Returns the error for a file that is read again and is another one, or gone."""
    reason = f" ({why})" if why else ""
    return UserError(
        f"{os.fspath(file)} has changed since the run opened it{reason}: put it back as it was, and"
        " start again, which continues from the newest checkpoint; with resume_changed it continues"
        " with the file as it is now"
    )


def signature(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Reads what changes where a file is written, or another one put in its place."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class OpenedFile:
    """A file that stays open, and is not read again as a whole unless it may have changed."""

    def __init__(self, path: str, read: Callable[[str], Hashable]):
        """
        Args:
            read: returns a digest of the file.
        """
        self.path, self._read = path, read
        self._signature = signature(path)
        self.digest: Any = read(path)

    def check(self, place: str) -> None:
        """Raises UserError where the file at its path has other contents than it had. Of one that
        was moved away, what was opened is still there."""
        with suppress(FileNotFoundError):
            now = signature(self.path)
            if now != self._signature:
                if self._read(self.path) != self.digest:
                    raise has_changed(self.path, place)
                self._signature = now


class WeightsRead:
    """Checksums of the weights that a role reads, computed in threads of their own meanwhile."""

    def __init__(self) -> None:
        self.pieces: dict[tuple[str, str], Future[int]] = {}
        """By file, and piece of a tensor in it."""

    def note(self, file: Path, name: str, tensor: np.ndarray, rows: slice) -> None:
        """Takes what is being read.

        Args:
            tensor: all of it, mapped from the file.
            rows: which of its first dim are read.
        """
        data = tensor.reshape(-1).view(np.uint8)
        start, stop, _ = rows.indices(len(tensor) if tensor.ndim else 1)
        row_bytes = data.nbytes // (len(tensor) or 1) if tensor.ndim else data.nbytes
        for piece in range(start * row_bytes // PIECE_BYTES, -(-stop * row_bytes // PIECE_BYTES)):
            key = str(file), f"{name} {piece}"
            if key not in self.pieces:
                part = data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
                self.pieces[key] = _threads().submit(_checksum, part)

    def checksums(
        self, before: Checksums, may_change: Callable[[str], bool]
    ) -> tuple[dict[str, dict[str, int]], list[str]]:
        """Returns those of all that was read, now or before, and the names of what has changed.

        Raises:
            UserError: something that may not change is not what it was before.
        """
        found = {file: dict(was) for file, was in before.items() if not may_change(file)}
        changed: dict[str, None] = {}
        for (file, piece), future in self.pieces.items():
            checksum, tensor = future.result(), f"tensor {piece.rpartition(' ')[0]}"
            if before.get(file, {}).get(piece, checksum) != checksum:
                if not may_change(file):
                    raise has_changed(file, tensor)
                changed[f"{file}, {tensor}"] = None
            found.setdefault(file, {})[piece] = checksum
        return found, [*changed]


def _checksum(part: np.ndarray) -> int:
    """Returns the CRC-32 of bytes that are mapped from a file; has the disk read all of them at
    once, where page faults would ask for a few at a time."""
    mapped: Any = part
    while isinstance(mapped.base, np.ndarray):
        mapped = mapped.base
    if isinstance(mapped, np.memmap) and isinstance(mapped.base, mmap.mmap):
        at = part.ctypes.data - mapped.ctypes.data + mapped.offset % mmap.ALLOCATIONGRANULARITY
        start = at // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.base.madvise(mmap.MADV_WILLNEED, start, at - start + part.nbytes)
    return zlib.crc32(part)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="checksums")


_READING: ContextVar[WeightsRead | None] = ContextVar("reading", default=None)


@contextmanager
def reading() -> Iterator[WeightsRead]:
    """Notes the weights that this thread reads in the block."""
    token = _READING.set(read := WeightsRead())
    try:
        yield read
    finally:
        _READING.reset(token)
        wait(read.pieces.values())  # else they would read on in a file that may be cut then


def note_read(file: Path, name: str, tensor: np.ndarray, rows: slice) -> None:
    """Notes what is read of a tensor (`WeightsRead.note`), where that is asked for."""
    if (read := _READING.get()) is not None:
        read.note(file, name, tensor, rows)
