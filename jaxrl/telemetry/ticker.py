"""A thread that does something every few seconds, such as a look at the workers."""

from __future__ import annotations

import threading
from collections.abc import Callable

CLOSE_S = 5.0
"""Longest wait for a call that is under way when the ticker is closed."""


class Ticker:
    """Calls ``tick`` every ``every_s`` seconds, in a daemon thread, until it is closed."""

    def __init__(self, name: str, every_s: float, tick: Callable[[], None]) -> None:
        self._every_s, self._tick = every_s, tick
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Returns whether the thread has ended; a call that hangs is left behind."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._tick()
