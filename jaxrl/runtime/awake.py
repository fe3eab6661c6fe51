"""Time in which this process was awake: deadlines do not run while it is frozen.

Ctrl-Z, a debugger, or a paused virtual machine stop the watcher, with its workers or without them.
When it wakes up the clock says that every running call is late, though nobody could have heard of
its end. A thread looks at the clock every `TICK_S`; where two looks lie much further apart, the
time between them counts for no deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

TICK_S = 0.5
"""Seconds between two looks at the clock."""
GAP_S = 3.0
"""Seconds between two looks from which on the process was not awake."""
MOST_GAPS = 1000


class Watch:
    """The stretches of time in which nobody looked at a clock. Any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last = clock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MOST_GAPS)
        """End and seconds of each."""

    def look(self) -> float:
        """Notes how long nobody has looked; the time now."""
        with self._lock:
            now = self._clock()
            if now - self._last > GAP_S:
                self._gaps.append((now, now - self._last - TICK_S))
            self._last = now
            return now

    def awake_since(self, at: float) -> float:
        """Seconds since `at` in which the process was awake."""
        now = self.look()
        with self._lock:
            asleep = sum(min(gap, end - at) for end, gap in self._gaps if end > at)
        return now - at - asleep


_starting = threading.Lock()
_watch: Watch | None = None


def awake_since(at: float) -> float:
    """Seconds since `at` (`time.monotonic` seconds) in which this process was awake."""
    return _started().awake_since(at)


def _started() -> Watch:
    """The watch of this process, which looks at the clock from the first question on."""
    global _watch
    with _starting:
        if _watch is None:
            _watch = Watch()
            threading.Thread(target=_tick, args=(_watch,), name="awake", daemon=True).start()
        return _watch


def _tick(watch: Watch) -> None:
    while True:
        time.sleep(TICK_S)
        watch.look()
