"""A frozen process finds no call late that had no time to end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from jaxrl.process.awake_clock import GAP_S, TICK_S, AwakeClock
from jaxrl.process.user_process import Call, CodeFailed
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item, RewardPool
from jaxrl.runtime.worker import DeadlineExceeded, LocalFuture, LocalWorker
from jaxrl.teacher.remote import Endpoint


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def tick(watch: AwakeClock, clock: Clock, seconds: float) -> None:
    """The process is awake for so long."""
    for _ in range(round(seconds / TICK_S)):
        clock.now += TICK_S
        watch.look()


def test_time_asleep_does_not_count_wherever_it_lies() -> None:
    clock = Clock()
    watch = AwakeClock(clock)
    tick(watch, clock, 10)
    assert watch.awake_since(1000) == pytest.approx(10)
    began = watch.awake()
    clock.now += 500  # frozen
    assert watch.awake() - began == pytest.approx(TICK_S)
    assert watch.awake_since(1000) == pytest.approx(10 + TICK_S)
    assert 0 <= watch.awake_since(1400) <= TICK_S  # what began in the middle of it
    tick(watch, clock, 7)
    assert watch.awake_since(1000) == pytest.approx(17 + TICK_S)
    assert watch.awake_since(clock.now - 5) == pytest.approx(5)


def test_a_busy_machine_is_awake() -> None:
    clock = Clock()
    watch = AwakeClock(clock)
    for _ in range(10):
        clock.now += GAP_S
        watch.look()
    assert watch.awake_since(1000) == pytest.approx(10 * GAP_S)


def test_a_call_is_late_by_the_time_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = AwakeClock(clock)
    monkeypatch.setattr("jaxrl.process.awake_clock._awake_clock", watch)
    worker = LocalWorker("actor")
    call = LocalFuture("actor", "update", (), {}, 600, False, False, worker)
    worker.running, call.times.started = call, clock.now
    clock.now += 3600
    call.check()
    tick(watch, clock, 590)
    call.check()
    tick(watch, clock, 20)
    with pytest.raises(DeadlineExceeded, match=r"has run for 610\.5 s"):
        call.check()
    assert worker.stop(5)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of deadlines stands still until its `now` is changed."""
    clock = Clock()
    monkeypatch.setattr("jaxrl.process.awake_clock._awake_clock", AwakeClock(clock))
    return clock


def test_code_of_the_user_is_late_by_the_time_awake(frozen: Clock, tmp_path: Path) -> None:
    """Its answer counts, though the event loop has found its time over."""
    path = tmp_path / "slow.py"
    text = "def f(completions): return [time.sleep(float(c)) or 1.0 for c in completions]"
    path.write_text(f"import time\n{text}\n")
    with RewardPool([find(f"{path}:f")], workers=1, timeout=0.1, startup=0.1) as pool:
        assert pool.judge(0, [Item("p", "0.4", "5", {})]).result(60).values == [1.0]
        asked = pool.judge(0, [Item("p", "60", "5", {})])
        while not asked.done():
            frozen.now += 0.01
            time.sleep(0.01)
        assert asked.result().failures[0].kind == "timeout"


def test_what_is_awaited_is_late_by_the_time_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the user's code that blocks the process is none of the time asleep."""
    clock = Clock()
    monkeypatch.setattr("jaxrl.process.user_process.clock", watch := AwakeClock(clock))

    def runs(seconds: float) -> object:
        with open(os.devnull, "wb") as nobody:
            call = Call(1, nobody.fileno(), timeout=0.1)
            return asyncio.run(call.run(asyncio.sleep, seconds, 7))

    assert runs(0.3) == 7
    clock.now += 10 * GAP_S
    watch.look(busy=True)
    assert watch.awake_since(1000) == pytest.approx(10 * GAP_S)
    monkeypatch.setattr("jaxrl.process.user_process.clock", AwakeClock())
    with pytest.raises(CodeFailed, match="awaited call was cancelled"):
        runs(60)


def test_a_question_is_asked_again_that_was_cut_off_asleep(frozen: Clock) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            kept = listener.accept()[0]  # has no answer before the socket's own timeout
            with listener.accept()[0] as wire, kept:
                wire.recv(1 << 16)
                wire.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 0.3)
        assert endpoint.ask("GET", "/v1/info", json.loads) == 7
        thread.join(5)
