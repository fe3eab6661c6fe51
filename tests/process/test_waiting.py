"""What is waited for is said, once for all who wait for it, and no more than it takes."""

from __future__ import annotations

import threading
import time

import pytest

from jaxrl.process import waiting as module
from jaxrl.process.waiting import Waited, Waits, to_say, waiting, waits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(told: list[str], clock: Clock, waits: Waits, seconds: float) -> list[str]:
    """The lines of so many seconds in which somebody looks."""
    before = len(told)
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        waits.look()
    return told[before:]


def test_lines_come_at_5_10_20_and_40_seconds_and_at_the_end() -> None:
    told, clock = list[str](), Clock()
    waits = Waits(told.append, clock)
    wait = waits.begin("the teacher at X", most=600)
    assert run(told, clock, waits, 4.5) == []
    assert run(told, clock, waits, 0.5) == ["waiting for the teacher at X: 5 s of at most 600 s"]
    wait.why = "Connection refused"
    lines = run(told, clock, waits, 70)
    assert lines == [
        f"waiting for the teacher at X: {s} s of at most 600 s (Connection refused)"
        for s in (10, 20, 40)
    ]
    waits.end(wait)
    assert told[-1] == "the teacher at X: waited for 75 s, and it is over"
    assert run(told, clock, waits, 60) == [] and not waits.going_on()


def test_short_waits_are_not_said_however_many() -> None:
    told, clock = list[str](), Clock()
    waits = Waits(told.append, clock)
    for _ in range(20):
        wait = waits.begin("a reward")
        run(told, clock, waits, 4.5)
        waits.end(wait)
    assert told == []


def test_many_that_wait_for_the_same_say_it_once() -> None:
    told, clock = list[str](), Clock()
    waits = Waits(told.append, clock)
    several = [waits.begin("the teacher") for _ in range(64)]
    assert len(run(told, clock, waits, 12)) == 2
    for wait in several:
        waits.end(wait)
    assert len(told) == 3  # over, once
    again = waits.begin("the teacher")  # later waits are said anew
    assert len(run(told, clock, waits, 6)) == 1
    waits.end(again)
    assert len(told) == 5


def test_the_waits_of_another_process_are_said_here() -> None:
    told, clock = list[str](), Clock()
    waits, there = Waits(told.append, clock), Waits(lambda text: None, clock)
    wait = there.begin("the teacher", most=60)
    clock.now += 3
    (waited,) = there.going_on()
    assert waited == Waited("the teacher", 3.0, 60, "")
    waits.mirror("teacher", [waited])
    wait.why = "refused"
    waits.mirror("teacher", there.going_on())
    assert run(told, clock, waits, 2) == ["waiting for the teacher: 5 s of at most 60 s (refused)"]
    there.end(wait)
    waits.mirror("teacher", there.going_on())
    assert told[-1] == "the teacher: waited for 5 s, and it is over"


def test_a_block_is_said_where_the_program_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(waits, "_clock", lambda: 100 * time.monotonic())
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    module.watch()
    with to_say(told.append), waiting("Ray", most=9):
        said = threading.Event()
        end = time.monotonic() + 10
        while not told and time.monotonic() < end:
            said.wait(0.02)
    assert told[0].startswith("waiting for Ray: ") and "is over" in told[-1]
    assert waits.say is not told.append


def test_a_long_reading_says_how_many_rows_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    told, clock = list[str](), Clock()
    counted = Waits(told.append, clock)
    monkeypatch.setattr(module, "waits", counted)
    rows = []
    for row in module.count_rows(range(2500), "big.jsonl"):
        rows.append(row)
        clock.now += 0.005
        counted.look()
    assert rows == list(range(2500))
    assert told == [
        "waiting for the rows of big.jsonl to be read: 5 s (1,000 so far)",
        "waiting for the rows of big.jsonl to be read: 10 s (2,000 so far)",
        "the rows of big.jsonl to be read: waited for 12 s, and it is over",
    ]
