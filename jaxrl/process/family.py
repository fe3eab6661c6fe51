"""The processes below one process: to count them, and to kill them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil


def kill_family(guard: int) -> None:
    """Kills a guard and all processes below it, those that have left its group too."""
    for process in family(guard):
        with suppress(psutil.Error):
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)


def family(pid: int) -> list[psutil.Process]:
    """All processes that run below one; those that have ended and are not reaped do not count."""

    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        return False

    with suppress(psutil.Error):
        return [each for each in psutil.Process(pid).children(recursive=True) if runs(each)]
    return []
