"""Says what is waited for: a wait of more than 5 s for something that this process does not compute
itself gets a line then, at 10, 20, 40 s and so on, and one when it is over.

`with waiting("the teacher at HOST", most=600.0):` around each such wait. Waits for the same thing
at once count as one, as old as the oldest of them, so that many threads say it once. The lines go
to stderr, or where `to_say` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from jaxrl.process.streams import to_stderr

FIRST_S = 5.0
"""How long a wait is not worth a line."""
LOOK_S = 0.5
"""Seconds between two looks at the waits."""
ROWS_COUNTED = 1000
"""Rows between two numbers of them."""
T = TypeVar("T")


@dataclass(frozen=True)
class Waited:
    """A wait, as other processes hear of it."""

    what: str
    seconds: float
    """So far."""
    most: float | None
    """Seconds after which it is given up; None: unknown here."""
    why: str


@dataclass(eq=False)
class OpenWait:
    """One that goes on."""

    what: str
    since: float
    most: float | None
    why: str = ""
    """What is known of its cause; whoever waits may set it."""


class Waits:
    """The waits of a process. Any thread may call."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self._clock = say, clock
        self._lock = threading.Lock()
        self._open: list[OpenWait] = []
        self._told: dict[str, tuple[float, float]] = {}
        """What a line was written about -> how old its oldest wait is when the next is due, and was
        at the latest look."""
        self._mirrored: dict[str, dict[str, OpenWait]] = {}
        """Process -> what it waits for; one thread writes it."""

    def begin(self, what: str, most: float | None = None, ago: float = 0.0) -> OpenWait:
        """Notes that one is waiting, since `ago` seconds."""
        wait = OpenWait(what, self._clock() - ago, most)
        with self._lock:
            self._open.append(wait)
        return wait

    def end(self, wait: OpenWait) -> None:
        """Notes that this wait is over."""
        with self._lock:
            self._open.remove(wait)
        self.look()

    def look(self) -> None:
        """Writes the lines that are due."""
        lines = []
        with self._lock:
            ages = {wait.what: (age, wait) for age, wait in self._oldest()}
            for what, (_, before) in [*self._told.items()]:
                if (age := ages[what][0] if what in ages else 0.0) < FIRST_S:
                    lines.append(f"{what}: waited for {max(before, age):.0f} s, and it is over")
                    del self._told[what]
            for what, (age, wait) in ages.items():
                due, _ = self._told.get(what, (FIRST_S, 0.0))
                if age >= due:
                    most = "" if wait.most is None else f" of at most {wait.most:.0f} s"
                    why = f" ({wait.why})" if wait.why else ""
                    lines.append(f"waiting for {what}: {age:.0f} s{most}{why}")
                while due <= age:
                    due *= 2
                if age >= FIRST_S:
                    self._told[what] = due, age
        for line in lines:  # outside of the lock: it may take a while
            self.say(line)

    def going_on(self) -> tuple[Waited, ...]:
        """Returns the waits that are, or may soon be, worth a line."""
        with self._lock:
            oldest = self._oldest()
        return tuple(Waited(w.what, s, w.most, w.why) for s, w in oldest if s >= FIRST_S / 2)

    def mirror(self, name: str, waited: Sequence[Waited]) -> None:
        """Takes over what another process waits for now, in place of what it did before.

        Args:
            name: of the process.
        """
        watch()
        before, now = self._mirrored.get(name, {}), dict[str, OpenWait]()
        for wait in waited:
            same = before.pop(wait.what, None)
            now[wait.what] = same or self.begin(wait.what, wait.most, ago=wait.seconds)
            now[wait.what].why = wait.why
        self._mirrored[name] = now
        for over in before.values():
            self.end(over)

    def _oldest(self) -> list[tuple[float, OpenWait]]:
        """Returns for each thing the oldest wait, with its age in seconds."""
        now, oldest = self._clock(), dict[str, OpenWait]()
        for wait in sorted(self._open, key=lambda wait: wait.since):
            oldest.setdefault(wait.what, wait)
        return [(now - wait.since, wait) for wait in oldest.values()]


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        waits.look()


waits = Waits(to_stderr)


@contextmanager
def waiting(what: str, most: float | None = None) -> Iterator[OpenWait]:
    """Has the lines about this block written while it waits.

    Args:
        what: behind "waiting for".
        most: seconds after which it is given up, where that is known.
    """
    watch()
    wait = waits.begin(what, most)
    try:
        yield wait
    finally:
        waits.end(wait)


def count_rows(rows: Iterable[T], name: str) -> Iterator[T]:
    """Yields rows that are read; lines about a reading of more than 5 s have their number so far.

    Args:
        name: of the file or the source.
    """
    with waiting(f"the rows of {name} to be read") as wait:
        for number, row in enumerate(rows, start=1):
            if number % ROWS_COUNTED == 0:
                wait.why = f"{number:,} so far"
            yield row


@cache
def watch() -> None:
    """Has a thread look at the waits, from the first call on."""
    threading.Thread(target=_watch, name="waits", daemon=True).start()


@contextmanager
def to_say(say: Callable[[str], None]) -> Iterator[None]:
    """Has lines about waits go there in this block."""
    before, waits.say = waits.say, say
    try:
        yield
    finally:
        waits.say = before
