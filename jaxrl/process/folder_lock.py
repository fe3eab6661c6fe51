"""A lock on a folder that ends with its process: what a killed process left is told from what a
living one uses."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_folder(folder: Path) -> int:
    """Takes the lock of a folder; returns the descriptor that holds it. Raises OSError where a
    process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
