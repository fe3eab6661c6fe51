"""A frozen process finds no call late that had no time to end."""

from __future__ import annotations

import pytest

from jaxrl.runtime.worker import (
    GAP_S,
    TICK_S,
    DeadlineExceeded,
    LocalFuture,
    LocalWorker,
    WallClock,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tick(watch: WallClock, clock: Clock, seconds: float) -> None:
    """The process is awake for so long."""
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        watch.look()


def test_time_asleep_does_not_count_wherever_it_lies() -> None:
    clock = Clock()
    watch = WallClock(clock)
    tick(watch, clock, 10)
    assert watch.awake_since(1000) == pytest.approx(10)
    clock.now += 500  # frozen
    assert watch.awake_since(1000) == pytest.approx(10 + TICK_S)
    assert 0 <= watch.awake_since(1400) <= TICK_S  # what began in the middle of it
    tick(watch, clock, 7)
    assert watch.awake_since(1000) == pytest.approx(17 + TICK_S)
    assert watch.awake_since(clock.now - 5) == pytest.approx(5)


def test_a_busy_machine_is_awake() -> None:
    clock = Clock()
    watch = WallClock(clock)
    for _ in range(10):
        clock.now += GAP_S
        watch.look()
    assert watch.awake_since(1000) == pytest.approx(10 * GAP_S)


def test_a_call_is_late_by_the_time_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = WallClock(clock)
    monkeypatch.setattr("jaxrl.runtime.worker._wall_clock", watch)
    worker = LocalWorker("actor")
    call = LocalFuture("actor", "update", (), {}, 600, False, worker)
    call.times.started = clock.now
    clock.now += 3600
    call.check()
    tick(watch, clock, 590)
    call.check()
    tick(watch, clock, 20)
    with pytest.raises(DeadlineExceeded, match=r"has run for 610\.5 s"):
        call.check()
    assert worker.stop(5)
