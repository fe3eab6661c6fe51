"""What the C library does with freed memory, where the host's memory is the device's."""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Freed memory stays with this process, for the next program that asks.

    glibc hands large blocks back to the kernel when they are freed, so that a jitted program on a
    CPU gets its temporaries as fresh pages, each zeroed at the first touch: a third of the time of
    a training step of a small model. False where there is no glibc: nothing has changed then.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1))
    taken = [bool(libc.mallopt(what, value)) for what, value in settings]
    return all(taken)
