"""The processes below one process: to count them, and to kill them."""

from __future__ import annotations

import contextlib
import os
import signal


def kill_family(guard: int) -> None:
    """Kills a guard and all processes below it, those that have left its group too."""
    for pid in family(guard):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) != guard:
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """The ids of all processes that run below one; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as f:
            state, parent = f.read().rpartition(b") ")[2].split()[:2]
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(pid, ()))
    for each in found:  # grows
        found += children.get(each, ())
    return found
