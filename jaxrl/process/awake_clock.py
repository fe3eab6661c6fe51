"""The clock of deadlines, and when a server wants to be asked again."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

TICK_S = 0.5
"""Seconds between two looks at the clock."""
GAP_S = 3.0
"""Seconds between two looks from which on the process was not awake."""
TEMPORARY = (408, 429, 502, 503, 504)
"""Statuses that say nothing about the request: the network stalled, or the server is busy."""


def retry_after(status: int, headers: Any) -> float | None:
    """Returns the seconds after which a server with a `TEMPORARY` status wants to be asked again;
    None where it does not say so. `headers` are a mapping that ignores case."""
    if status not in TEMPORARY:
        return None
    asked, limits = (str(headers.get(name, "")) for name in ("Retry-After", "RateLimit"))
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,9})\b", limits)
    if limit and status == 429:
        return float(limit[1])
    if re.fullmatch("[0-9]{1,9}", asked.strip()):
        return float(asked)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    return None


class AwakeClock:
    """A clock by which deadlines do not run while this process is frozen: by Ctrl-Z, a debugger or
    a paused virtual machine. When it goes on, every running call would be late, though its end
    could not have been heard of. A thread looks at the clock every `TICK_S`; where two looks lie
    much further apart, the time between them counts for no deadline. Any thread may ask.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._last = clock()
        self._gaps: list[tuple[float, float]] = []
        """End and seconds of each."""

    def look(self, busy: bool = False) -> float:
        """Notes how long nobody has looked; returns the time now. `busy`: the one who looks could
        not, so that this time was none asleep."""
        with self._lock:
            now = self._clock()
            if now - self._last > GAP_S and not busy:
                self._gaps.append((now, now - self._last - TICK_S))
            self._last = now
            return now

    def awake(self) -> float:
        """Returns the seconds in which the process was awake, since some moment: what deadlines are
        counted by from their start on."""
        return self.awake_since(self._began)

    def awake_since(self, at: float) -> float:
        """Returns the seconds since `at` in which the process was awake."""
        now = self.look()
        with self._lock:
            asleep = sum(min(gap, end - at) for end, gap in self._gaps if end > at)
        return now - at - asleep

    def watch(self) -> None:
        """Looks for ever."""
        while True:
            time.sleep(TICK_S)
            self.look()


_starting = threading.Lock()
_awake_clock: AwakeClock | None = None


def awake_clock() -> AwakeClock:
    """Returns the clock of this process, which a thread looks at from the first question on."""
    global _awake_clock
    with _starting:
        if _awake_clock is None:
            _awake_clock = AwakeClock()
            threading.Thread(target=_awake_clock.watch, name="awake_clock", daemon=True).start()
        return _awake_clock
