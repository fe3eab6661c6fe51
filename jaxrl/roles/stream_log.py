"""What timing decides of a sampler whose batches are streamed: the launch after which each call
came. Everything else follows from data, seeds and weights, so that a sampler which follows such a
record samples the same again."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence

from jaxrl.errors import RunError
from jaxrl.types import StreamEvent, StreamEvents

BEGUN = "begun"
"""The event of a sampler that goes on with what a checkpoint has of a batch. No record has it: the
run before had the batch in flight."""
METHODS = {
    "load": "load",
    "sample": "sample",
    "generate": "generate",
    BEGUN: "generate",
    "save": "unfinished",
}
"""Event -> the method of the role whose call it is."""


class StreamLog:
    """Counts the launches between calls or, where it follows a record, says when they come."""

    def __init__(self, most_s: float = float("inf")) -> None:
        """
        Args:
            most_s: longest wait, in seconds, for a call that a record has: without it one that does
                not fit would be waited for for ever.
        """
        self._most_s = most_s
        self._held_since: float | None = None
        self._sampler = uuid.uuid4().hex
        self._events: list[StreamEvent] = []
        self._expected: deque[StreamEvent] = deque()
        self._exact = self._saved = False
        self._launches = 0

    @property
    def count(self) -> int:
        """Returns how many events there were."""
        return len(self._events)

    def follow(self, expected: Sequence[StreamEvent], exact: bool) -> None:
        """Has the next events be these, with their launches.

        Args:
            exact: another one raises RunError, and none comes after the last before all that is in
                flight has ended; else what is expected is forgotten with another one.
        """
        self._expected, self._exact = deque(expected), exact

    def launched(self) -> None:
        self._launches += 1

    def note(self, call: str, number: int) -> None:
        """Notes a call. Raises RunError where an exact record has another one."""
        event = StreamEvent(call, number, self._launches)
        self._launches, self._saved, self._held_since = 0, call == "save", None
        if self._expected and (expected := self._expected.popleft()) != event:
            if self._exact:
                raise RunError(
                    f"the record has {_text(expected)} here, and this run {_text(event)}: model,"
                    " data, devices or versions differ from those of the run"
                )
            self._expected.clear()
        self._events.append(event)

    def has(self, call: str, number: int) -> bool:
        """Returns whether a call has its place in the record, if an exact one is followed. The run
        may have made an evaluation in what was lost before it went on from a checkpoint."""
        expected = self._expected[0] if self._exact and self._expected else None
        return expected is None or expected[:2] == (call, number)

    def left(self, method: str | None) -> int | None:
        """Returns how many launches come before the next call; None: as many as there is time for.
        None comes between a save and the load after it, so that a run which resumes has missed
        none.

        Args:
            method: of the next call, None where it has not come yet. One that changes nothing waits
                for nothing, nor does another one than is expected, which `note` then finds.
        """
        if method is not None and method not in METHODS.values():
            return 0
        expected = StreamEvent("load", 0, 0) if self._saved else None
        if self._expected:
            expected = self._expected[0]
        if expected is None:  # what a run had in flight at the end of its record ended there
            return 1 if self._exact else None
        if method is not None and method != METHODS.get(expected.call):
            return None
        left = max(expected.launches - self._launches, 0)
        if left:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = time.monotonic()
        elif time.monotonic() - self._held_since > self._most_s:  # `note` says what came instead
            return None
        return left

    def since(self, first: int) -> StreamEvents:
        """Returns the events but the first ones."""
        return StreamEvents(self._sampler, first, tuple(self._events[first:]))


def _text(event: StreamEvent) -> str:
    return f"{event.call} {event.number} after {event.launches} launches"
