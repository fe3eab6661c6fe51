"""Says what is waited for: a wait of more than 5 s for something that this process does not compute
itself gets a line then, at 10, 20, 40 s and so on, and one when it is over.

`with waiting("the teacher at HOST", most=600.0):` around each such wait. Waits for the same thing
at once count as one, as old as the oldest of them, so that many threads say it once. The lines go
to stderr, or where `to_say` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxrl.process.streams import to_stderr

FIRST_S = 5.0
"""How long a wait is not worth a line."""
LOOK_S = 0.5
"""Seconds between two looks at the waits."""


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

    since: float
    most: float | None
    why: str = ""
    """What is known of its cause; whoever waits may set it."""


@dataclass
class _Thing:
    """What is waited for, once or by several at once."""

    waits: list[OpenWait] = field(default_factory=list)
    next: float = FIRST_S
    """How old the oldest wait is when the next line is due."""
    said_at: float = 0.0
    """How old it was at the latest look; 0 where no line was written."""


class Waits:
    """The waits of a process. Any thread may call."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self._clock = say, clock
        self._lock = threading.Lock()
        self._things: dict[str, _Thing] = {}
        self._mirrored: dict[str, dict[str, OpenWait]] = {}
        """Process -> what it waits for; one thread writes it."""

    def begin(self, what: str, most: float | None = None, ago: float = 0.0) -> OpenWait:
        """Notes that one is waiting, since `ago` seconds."""
        wait = OpenWait(self._clock() - ago, most)
        with self._lock:
            self._things.setdefault(what, _Thing()).waits.append(wait)
        return wait

    def end(self, what: str, wait: OpenWait) -> None:
        """Notes that this wait is over."""
        with self._lock:
            thing = self._things[what]
            thing.waits.remove(wait)
        self._look_at(what)

    def look(self) -> None:
        """Writes the lines that are due."""
        with self._lock:
            names = list(self._things)
        for what in names:
            self._look_at(what)

    def going_on(self) -> tuple[Waited, ...]:
        """Returns the waits that are, or may soon be, worth a line."""
        now = self._clock()
        with self._lock:
            oldest = [(what, _oldest(x)) for what, x in self._things.items() if x.waits]
        ages = ((what, now - wait.since, wait) for what, wait in oldest)
        return tuple(Waited(what, s, w.most, w.why) for what, s, w in ages if s >= FIRST_S / 2)

    def mirror(self, name: str, waited: Sequence[Waited]) -> None:
        """Takes over what another process waits for now, in place of what it did before.

        Args:
            name: of the process.
        """
        watch()
        going_on = {one.what: one for one in waited}
        before = self._mirrored.get(name, {})
        for what in [what for what in before if what not in going_on]:
            self.end(what, before.pop(what))
        for what, one in going_on.items():
            if what not in before:
                before[what] = self.begin(what, one.most, ago=one.seconds)
            before[what].why = one.why
        self._mirrored[name] = before

    def _look_at(self, what: str) -> None:
        line, now = None, self._clock()
        with self._lock:
            thing = self._things.get(what)
            if thing is None:
                return
            oldest = _oldest(thing) if thing.waits else None
            age = 0.0 if oldest is None else now - oldest.since
            if age < FIRST_S:
                if thing.said_at:
                    line = f"{what}: waited for {max(thing.said_at, age):.0f} s, and it is over"
                    thing.next, thing.said_at = FIRST_S, 0.0
                if oldest is None:
                    del self._things[what]
            elif oldest is not None:
                thing.said_at = thing.said_at and age
                if age >= thing.next:
                    thing.said_at = age
                    while thing.next <= age:
                        thing.next *= 2
                    most = "" if oldest.most is None else f" of at most {oldest.most:.0f} s"
                    why = f" ({oldest.why})" if oldest.why else ""
                    line = f"waiting for {what}: {age:.0f} s{most}{why}"
        if line is not None:  # outside of the lock: it may take a while
            self.say(line)


def _oldest(thing: _Thing) -> OpenWait:
    return min(thing.waits, key=lambda wait: wait.since)


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        waits.look()


waits = Waits(to_stderr)
_starting = threading.Lock()
_watching = False


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
        waits.end(what, wait)


def watch() -> None:
    """Has a thread look at the waits, from the first call on."""
    global _watching
    with _starting:
        if not _watching:
            _watching = True
            threading.Thread(target=_watch, name="waits", daemon=True).start()


@contextmanager
def to_say(say: Callable[[str], None]) -> Iterator[None]:
    """Has lines about waits go there in this block."""
    before, waits.say = waits.say, say
    try:
        yield
    finally:
        waits.say = before
