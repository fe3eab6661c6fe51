"""What timing decides of a sampler whose batches are streamed: the launch after which each call
came, and each answer of an environment. Everything else follows from data, seeds, weights and what
environments say, so that a sampler which follows such a record samples the same again."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Sequence

from jaxrl.errors import RunError, counted
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
ANSWERS = "answers"
"""The event of answers that the next launch takes. Its number has a bit for each episode that waits
in a slot, in the order of their requests from the lowest on: whether its answer is taken."""
MADE = "made"
"""The event of a batch whose completions have all ended: no call that came later can change it, in
a run that follows the record to its end either."""
MOST_ANSWERS = 4096
"""Episodes that one such event tells of; the answers to the others are taken later."""


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
        self._dropped = 0
        self._expected: deque[StreamEvent] = deque()
        self._exact = self._saved = False
        self._launches = 0

    @property
    def count(self) -> int:
        """Returns how many events there were."""
        return self._dropped + len(self._events)

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
        if self._expected:
            if self._expected[0] != event:
                self._forget(_text(event))
            else:
                self._expected.popleft()
        self._events.append(event)

    def made(self, step: int) -> None:
        """Notes the end of a batch. One that ends with the save of a checkpoint is whole there, and
        ends in no run that resumes from it."""
        if not self._saved:
            self.note(MADE, step)

    def _forget(self, found: str) -> None:
        """Follows no record that has something else here. Raises RunError where it is exact."""
        if self._exact:
            raise RunError(
                f"the record has {_text(self._expected[0])} here, and this run {found}: model,"
                " data, devices, versions or environments differ from those of the run"
            )
        self._expected.clear()

    def answers(self, there: Sequence[bool], working: bool) -> Sequence[bool] | None:
        """Chooses the answers of environments that a launch takes, as `engine.ChooseAnswers`: those
        of the record, or else all that are there."""
        there = [*there[:MOST_ANSWERS], *[False] * len(there[MOST_ANSWERS:])]
        if self._expected:
            call, number, launches = self._expected[0]
            due = call == ANSWERS and launches <= self._launches
            chosen = [bool(number >> i & 1) for i in range(len(there))]
            if due and number < 1 << len(there):
                if any(wanted and not here for wanted, here in zip(chosen, there, strict=True)):
                    return None
                there = chosen
            elif due or (there and not working):
                self._forget(f"{counted(len(there), 'episode')} waiting for environments")
            else:
                return [False] * len(there)
        if any(there):
            self.note(ANSWERS, sum(1 << i for i, taken in enumerate(there) if taken))
        return there

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
        launches = 0
        for event in self._expected:
            launches += event.launches
            if event.call in METHODS:
                expected = event
                break
        if expected is None:  # what a run had in flight at the end of its record ended there
            return 1 if self._exact or self._expected else None
        if method is not None and method != METHODS.get(expected.call):
            return None
        left = max(launches - self._launches, 0)
        if left:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = time.monotonic()
        elif time.monotonic() - self._held_since > self._most_s:  # `note` says what came instead
            return None
        return left

    def since(self, first: int) -> StreamEvents:
        """Returns the events but the first ones."""
        return StreamEvents(self._sampler, first, tuple(self._events[first - self._dropped :]))

    def drop(self, first: int) -> None:
        """Drops the first events, so that a long run holds no more than a short one."""
        del self._events[: first - self._dropped]
        self._dropped = first


def _text(event: StreamEvent) -> str:
    return f"{event.call} {event.number} after {event.launches} launches"
