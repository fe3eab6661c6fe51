"""The kernel's lock of an open file, which ends with the process."""

from __future__ import annotations

import fcntl
from typing import IO


def lock_file(file: int | IO[str]) -> str | None:
    """Takes the lock of an open file or folder.

    Returns:
        None, or why its file system has none (Lustre without `-o flock`, some of FUSE).

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except PermissionError as error:  # the same, on some network file systems
        raise BlockingIOError(error.errno, error.strerror) from error
    except OSError as error:
        return error.strerror
    return None
