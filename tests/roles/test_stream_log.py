"""A sampler that follows a record is called after the same launches again, whatever takes how long;
random schedules of calls to a real worker."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cases import and_slow

from jaxrl.errors import RunError
from jaxrl.roles.stream_log import ANSWERS, StreamLog
from jaxrl.runtime.worker import Later, LocalWorker
from jaxrl.types import StreamEvent

DEADLINE = 30.0


class Streams:
    """Stands for the sampler: a batch takes launches, which all that are in flight share, and some
    answers of environments, each between launches of its own."""

    def __init__(self, seed: int, slow: np.random.Generator):
        self.log, self.left, self.slow = StreamLog(DEADLINE), dict[int, int](), slow
        self.sizes = np.random.default_rng(seed)
        self.turns = dict[int, int]()
        self.asked: list[tuple[int, float]] = []  # of which batch, and when the answer is there

    def follow(self, expected: Sequence[StreamEvent], exact: bool) -> None:
        self.log.follow(expected, exact)

    def load(self, version: int) -> int:
        self.log.note("load", version)
        return version

    def sample(self, version: int) -> None:
        if self.log.has("sample", version):
            self.log.note("sample", version)

    def unfinished(self, saved: int) -> dict[int, int]:
        self.log.note("save", saved)
        return dict(self.left)

    def generate(self, step: int) -> Any:
        self.left[step], self.turns[step] = map(int, self.sizes.integers((1, 0), (9, 3)))
        self.log.note("generate", step)

        def work() -> None:
            time.sleep(self.slow.uniform(0, 0.001))
            works = [step for step, left in self.left.items() if left]
            there = [time.monotonic() > at for _, at in self.asked]
            taken = self.log.answers(there, bool(works)) if works or there else None
            if taken is None:
                return
            for (batch, _), came in zip(self.asked, taken, strict=True):
                self.left[batch] += 2 * came
            self.asked = [x for x, came in zip(self.asked, taken, strict=True) if not came]
            if not (works or any(taken)):
                return
            first = min(step for step, left in self.left.items() if left)
            self.left[first] -= 1
            if not self.left[first] and self.turns[first]:
                self.turns[first] -= 1
                self.asked.append((first, time.monotonic() + self.slow.uniform(0, 0.004)))
            self.log.launched()

        def value() -> str | None:
            if self.left[step] or step in [batch for batch, _ in self.asked]:
                return None
            del self.left[step]
            return f"batch {step}"

        return Later(work, value, self.log.left)


def stream(
    seed: int, delays: int, record: Sequence[StreamEvent] = (), exact: bool = True
) -> tuple[StreamEvent, ...]:
    """Runs a schedule of calls; returns the events."""
    draw, slow = np.random.default_rng(seed), np.random.default_rng(delays)
    worker, role = LocalWorker("rollout"), Streams(seed, slow)
    try:
        worker.start_role("rollout", lambda: role, DEADLINE).result()
        rollout = worker.handle("rollout")

        calls = []

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            calls.append(rollout.call(method, *args, deadline=DEADLINE, **kwargs))
            return calls[-1]

        if record:
            call("follow", record, exact)
        ahead, steps = int(draw.integers(1, 4)), 6
        saves, samples = draw.random((2, steps + 1)) < 0.4
        call("load", 0)
        made = {step: call("generate", step=step) for step in range(ahead + 1)}
        for step in range(steps):
            assert made[step].result() == f"batch {step}"
            time.sleep(slow.choice([0.0, 0.002, 0.01]))
            if saves[step]:
                call("unfinished", step + 1)
                time.sleep(slow.choice([0.0, 0.004]))
            call("load", step + 1)
            if samples[step]:
                call("sample", step + 1)
            if step + ahead + 1 < steps + ahead:
                made[step + ahead + 1] = call("generate", step=step + ahead + 1)
        call("load", steps + 1)
        for each in calls:
            each.result()
        return role.log.since(0).events
    finally:
        worker.stop(DEADLINE)


@pytest.mark.parametrize("seed", and_slow([*range(25)], [*range(25, 500)]))
def test_a_record_is_repeated(seed: int) -> None:
    first = stream(seed, seed)
    assert stream(seed, seed + 1000, first) == first
    # Of a cut record, what is there; what comes then takes its time, and nothing is waited for.
    part = first[: len(first) // 2]
    assert stream(seed, seed + 2000, part, exact=False)[: len(part)] == part


def test_a_save_and_the_load_after_it_have_no_launch_between_them() -> None:
    for seed in range(25):
        events = stream(seed, seed + 3000)
        for save, load in zip(events, events[1:], strict=False):
            assert save.call != "save" or (load.call, load.launches) == ("load", 0)


def test_a_record_that_does_not_fit_is_an_error_and_not_a_wait() -> None:
    first = stream(1, 1)
    load = next(i for i, event in enumerate(first) if event.call == "load" and event.number)
    answers = [event.call for event in first].index(ANSWERS)
    cases: list[tuple[int, dict[str, Any]]] = [
        (load, {"call": "generate"}),
        (load, {"number": 99}),
        (load, {"launches": 999}),
        (answers, {"number": 1 << 70}),
        (answers, {"launches": 999}),
    ]
    for at, changes in cases:
        wrong = [*first[:at], first[at]._replace(**changes), *first[at + 1 :]]
        with pytest.raises(RunError, match="the record has"):
            stream(1, 2, wrong)
        assert stream(1, 2, wrong, exact=False)[:at] == first[:at]


def test_a_line_of_the_record_stays_short() -> None:
    """Whatever number of episodes waits."""
    log = StreamLog()
    taken = log.answers([True] * 20_000, True)
    assert taken is not None and 0 < sum(taken) < 20_000
    assert len(json.dumps(log.since(0).events)) < 2_000
