"""Files that a run reads more than once: what was opened is kept, or the run ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from jaxrl.errors import UserError


def has_changed(file: str | os.PathLike[str], why: object = "") -> UserError:
    """Returns the error for a file that is read again and is another one, or gone."""
    reason = f" ({why})" if why else ""
    return UserError(
        f"{os.fspath(file)} has changed since the run opened it{reason}: put it back as it was, and"
        " start again, which continues from the newest checkpoint; with resume_changed it continues"
        " with the file as it is now"
    )


def signature(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Returns what changes where a file is written, or another one put in its place."""
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
