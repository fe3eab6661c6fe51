"""What workers do, on the console and in the timeline; and the log of what a run said."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from telemetry_doubles import ROWS, Clock, FullDisk, Terminal

from jaxrl.config.settings import LoggingConfig
from jaxrl.errors import UserError
from jaxrl.runtime.worker import LocalWorker, WorkerState
from jaxrl.telemetry import console as console_module
from jaxrl.telemetry import timeline as timeline_module
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import RunLog, time_stamp
from jaxrl.telemetry.timeline import Timeline

ACTOR = WorkerState(
    "actor", socket.gethostname(), os.getpid(), ("actor",), ("cpu:0",), "idle", "", 0.0, 0.0, 0
)
TEACHER = replace(ACTOR, name="teacher", host="far", pid=7, phase="teacher.score", detail="2 of 8")


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests look themselves."""
    monkeypatch.setattr(console_module, "TICK_S", 1e6)


# The console.


@pytest.mark.usefixtures("no_thread")
def test_a_long_silence_is_broken_once_a_minute_with_what_each_worker_does() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(LoggingConfig(), steps=9, out=out, clock=clock)
    console.attach(lambda: [replace(ACTOR, heard=clock.now), replace(TEACHER, restarts=2)])
    for clock.now in range(60):
        console.tick()
    assert out.getvalue() == ""
    for clock.now in range(60, 181):
        console.tick()
    lines = out.getvalue().splitlines()
    assert [line.split(";")[0] for line in lines] == [f"{m}:00 since the start" for m in (1, 2, 3)]
    assert lines[0].split("; ")[1:] == [
        "actor: idle for 1:00",
        "teacher (far:7): teacher.score for 1:00 (2 of 8), no answer for 60 s, restarted 2x",
    ]
    console.close()


@pytest.mark.usefixtures("no_thread")
def test_steps_and_messages_end_a_silence_even_where_no_line_is_due() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(LoggingConfig(every=100), steps=9, start=3, out=out, clock=clock)
    console.attach(lambda: [ACTOR])
    clock.now = 50.0
    console.message("loading")
    clock.now = 109.0
    console.tick()
    console.step({"step": 4})
    clock.now = 168.0
    console.tick()
    console.step({"step": 5})  # every=100: not shown
    clock.now = 227.0
    console.tick()
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["loading", "step"]
    clock.now = 228.0
    console.tick()
    assert out.getvalue().splitlines()[-1].startswith("1:00 since step 5/9; actor: idle")
    console.close()


@pytest.mark.usefixtures("no_thread")
def test_a_resumed_run_is_silent_since_the_step_it_resumes_from() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(LoggingConfig(), steps=9, start=3, out=out, clock=clock) as console:
        clock.now = 100.0
        console.tick()
        assert out.getvalue() == ""  # nobody to ask
        console.attach(lambda: [ACTOR])
        console.tick()
    assert out.getvalue().startswith("1:40 since step 3/9; ")


@pytest.mark.usefixtures("no_thread")
def test_ten_seconds_without_an_answer_are_no_news() -> None:
    assert console_module.worker_line(replace(ACTOR, heard=90.0), 100.0) == "actor: idle for 1:40"
    assert "no answer for 11 s" in console_module.worker_line(replace(ACTOR, heard=89.0), 100.0)


@pytest.mark.usefixtures("no_thread")
def test_the_processes_of_a_pool_compile_together_and_what_compiles_again_is_named_again() -> None:
    out, clock = io.StringIO(), Clock()
    one = replace(TEACHER, compiling="score_rows")
    pool = [one, *(replace(one, name=f"teacher.{n}", pid=n) for n in (1, 2, 3))]
    with Console(LoggingConfig(), steps=9, out=out, clock=clock) as console:
        for states in (pool, pool, pool, [TEACHER], pool, pool):
            console.attach(lambda states=states: states)
            console.tick()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and set(lines) == {lines[0]}
    assert lines[0].startswith("teacher: compiling score_rows")


@pytest.mark.usefixtures("no_thread")
def test_a_program_that_compiles_is_named_at_once_and_once() -> None:
    """In both looks, a second apart: what compiles faster is no news."""
    out, clock = io.StringIO(), Clock()
    here = replace(ACTOR, heard=63.0)
    states = [here, replace(TEACHER, compiling="score_rows")]
    with Console(LoggingConfig(), steps=9, out=out, clock=clock) as console:
        console.attach(lambda: states)
        console.tick()
        states[0] = replace(here, compiling="quick")
        for clock.now in (1, 2, 3, 50, 63):
            console.tick()
            states[0] = here
    line, silence = out.getvalue().splitlines()
    assert line == ("teacher: compiling score_rows for teacher.score (later calls reuse it)")
    assert silence.startswith("1:03 since the start; actor: idle for 1:03; teacher (far:7): ")
    assert "compiling score_rows" in silence
    live = Terminal()
    with Console(LoggingConfig(), steps=2, out=live, clock=clock) as console:
        console.attach(lambda: [replace(ACTOR, compiling="update")])
        console.tick()
        assert "compiling update" in live.getvalue()


def test_a_worker_says_what_it_compiles_and_nothing_when_it_runs() -> None:
    worker = LocalWorker("actor")
    seen: list[str] = []

    class Role:
        @staticmethod
        @jax.jit
        def program(x: Any) -> Any:
            return 2 * x + 1

        def update(self) -> float:
            return float(self.program(np.float32(1)))

    def look(event: str, value: float, **_: object) -> None:
        seen.append(worker.state().compiling)

    jax.monitoring.register_scalar_listener(look)
    try:
        handle = worker.handle("actor")
        worker.start_role("actor", Role, deadline=60).result()
        call = handle.call("update", deadline=60)
        assert call.result() == 3
        assert "program" in seen and worker.state().compiling == ""
        assert "compiling" not in worker.diagnosis(call)
        seen.clear()
        assert handle.call("update", deadline=60).result() == 3
        assert seen == []
    finally:
        jax.monitoring.unregister_scalar_listener(look)
        worker.stop(10)


def test_another_process_is_named_by_host_and_pid() -> None:
    name = console_module.worker_name
    assert name(ACTOR) == "actor"
    assert name(replace(ACTOR, pid=1)) == f"actor ({ACTOR.host}:1)"
    assert name(replace(ACTOR, host="far")) == f"actor (far:{os.getpid()})"


@pytest.mark.usefixtures("no_thread")
def test_the_display_shows_every_worker_and_leaves_none_behind() -> None:
    out, clock = Terminal(), Clock()
    clock.now = 75.0
    states = [replace(ACTOR, phase="actor.update [a]", heard=75.0, since=70.0), TEACHER]
    with Console(LoggingConfig(), steps=2, out=out, clock=clock) as console:
        console.attach(lambda: states)
        console.step(ROWS[1])
        assert "actor" not in out.getvalue()
        console.tick()
        text = out.getvalue()
        for word in ("actor.update [a]", "0:05", "teacher (far:7)", "2 of 8", "1:15", "75 s"):
            assert word in text
        out.truncate(0)
        console.step(ROWS[2])
        assert "teacher.score" in out.getvalue()  # between two looks too
        out.truncate(0)
    left = re.split(r"\x1b\[\d*A", out.getvalue())[-1]
    assert "0.5000" in left and "teacher.score" not in left


def test_a_thread_looks_until_the_console_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "TICK_S", 0.01)
    monkeypatch.setattr(console_module, "SILENT_S", 0.1)
    out, looks = io.StringIO(), list[float]()

    def states() -> Sequence[WorkerState]:
        console.message(f"look {len(looks)}") if not looks else None  # who answers may speak
        looks.append(time.monotonic())
        return [ACTOR]

    console = Console(LoggingConfig(), steps=9, out=out)
    console.attach(states)
    end = time.monotonic() + 20
    while "since the start; actor" not in out.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
    console.close()
    assert "look 0" in out.getvalue() and "since the start; actor" in out.getvalue()
    after = len(looks)
    time.sleep(0.05)
    assert len(looks) == after


def test_quiet_asks_nobody() -> None:
    out, before = io.StringIO(), threading.active_count()
    asked: list[int] = []
    logging = LoggingConfig(console="quiet")
    with Console(logging, steps=2, out=out) as console:
        console.attach(lambda: asked.append(1) or [])  # type: ignore[func-returns-value]
        assert threading.active_count() == before and not asked
    assert out.getvalue() == ""


# The timeline.


def read(path: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == kind]


class Drawing(Timeline):
    def __init__(self, begun: float) -> None:
        super().__init__(None)
        self._looked, self.drawn = begun, list[tuple[str, str, float, float]]()

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        self.drawn.append((track.removeprefix("worker "), name, start, end))


def test_states_become_spans_without_gap_or_overlap() -> None:
    timeline = Drawing(begun=10.0)
    seen = [  # phase, since, and when it was looked at
        ("idle", 3.0, 11.0),
        ("idle", 3.0, 12.0),
        ("a: waiting for arguments", 12.5, 13.0),
        ("a", 13.5, 14.0),
        ("a: inner", 14.2, 15.0),
        ("a", 13.5, 16.0),  # the outer phase continues: it has its own beginning back
        ("idle", 16.5, 17.0),
        ("idle", 17.5, 18.0),  # something short was in between
    ]
    for phase, since, now in seen:
        timeline.look([replace(ACTOR, phase=phase, since=since)], now)
    timeline.look([], 20.0)
    assert timeline.drawn == [
        ("actor", "idle", 10.0, 12.5),
        ("actor", "a: waiting for arguments", 12.5, 13.5),
        ("actor", "a", 13.5, 14.2),
        ("actor", "a: inner", 14.2, 16.0),
        ("actor", "a", 16.0, 16.5),
        ("actor", "idle", 16.5, 17.5),
        ("actor", "idle", 17.5, 18.0),
    ]


def test_a_worker_that_is_gone_is_drawn_to_when_it_was_seen_last() -> None:
    timeline = Drawing(begun=0.0)
    timeline.look([replace(ACTOR, since=1.0), replace(TEACHER, since=1.0)], 2.0)
    timeline.look([replace(ACTOR, since=1.0)], 3.0)
    timeline.look([replace(ACTOR, since=1.0), replace(TEACHER, since=3.5)], 4.0)
    timeline.look([], 5.0)
    teacher = [(start, end) for name, _, start, end in timeline.drawn if name == "teacher"]
    assert teacher == [(1.0, 2.0), (3.5, 4.0)]
    actor = [(start, end) for name, _, start, end in timeline.drawn if name == "actor"]
    assert actor == [(1.0, 4.0)]


def test_a_worker_s_idle_and_waits_are_in_the_file(tmp_path: Path) -> None:
    class Role:
        def work(self, seconds: float, after: object = None) -> None:
            time.sleep(seconds)

    path = tmp_path / "t.json"
    worker_group: list[LocalWorker] = []
    slow, fast = LocalWorker("slow", (), worker_group), LocalWorker("fast", (), worker_group)
    try:
        for worker in worker_group:
            worker.start_role(worker.name, Role, deadline=5).result()
        with Timeline(path) as timeline:
            timeline.watch_states(lambda: [worker.state() for worker in worker_group], every_s=0.01)
            first = slow.handle("slow").call("work", 0.3, deadline=5)
            fast.handle("fast").call("work", 0.3, after=first, deadline=5).result()
        assert not [t for t in threading.enumerate() if t.name == "timeline"]
    finally:
        for worker in worker_group:
            worker.stop(5)
    longest: dict[str, str] = {}
    for name in ("slow", "fast"):
        found = [span for span in read(path) if span["cat"] == f"worker {name}"]
        ends = [span["ts"] + span["dur"] for span in found]
        assert ends[:-1] == [span["ts"] for span in found[1:]]
        longest[name] = ", ".join(span["name"] for span in found if span["dur"] > 150_000)
    assert "slow.work, idle" in longest["slow"]
    assert "fast.work: waiting for arguments, fast.work" in longest["fast"]


def test_the_file_is_whole_after_every_flush_with_states(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for resumed in (False, True):
        with Timeline(path, after_resume=resumed) as timeline:
            now = time.monotonic()
            timeline.span("worker teacher", "idle", now, now + 1.0)
            assert [span["name"] for span in read(path)] == ["idle"] * resumed
            timeline.flush()
            (*_, begun) = read(path, "i")
            assert begun["name"] == ("resume" if resumed else "start") and begun["s"] == "g"
    first, second = read(path)
    assert first["tid"] == second["tid"] and first["dur"] == second["dur"] == 1_000_000
    assert second["ts"] >= first["ts"] + first["dur"] + 1_000_000
    named = [e["args"]["name"] for e in read(path, "M") if e["name"] == "thread_name"]
    assert named == ["worker teacher"] * 2


def test_without_a_path_no_state_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "Ticker", None)
    with Timeline(None) as timeline:
        timeline.watch_states(lambda: [ACTOR])
        timeline.span("worker actor", "idle", 0.0, 1.0)
        timeline.flush()


# The log.


def test_each_message_has_its_local_time_and_its_lines_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with RunLog(path) as log:
        before = datetime.now().astimezone().replace(microsecond=0)
        log.write("plan\n  actor  2\n\nfits")
        log.write("")
        text = path.read_text("utf-8")  # on the disk before the log is closed
    first, second, blank, third, empty = text.splitlines()
    stamp, word = first.split(" ")
    assert before <= datetime.fromisoformat(stamp) <= datetime.now().astimezone()
    assert len(stamp) == len("2025-01-01T00:00:00+00:00") and word == "plan"
    margin = " " * (len(stamp) + 1)
    assert (second, blank, third) == (f"{margin}  actor  2", "", f"{margin}fits")
    assert datetime.fromisoformat(empty)


@pytest.mark.parametrize("zone", ["X+25", "X-30:30", "AAA-99", ":/nowhere", "Asia/Kathmandu", ""])
def test_any_time_zone_has_time_stamps(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    """An offset of a day ended a run with Python's ValueError."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        now = datetime.fromisoformat(time_stamp())
    finally:
        monkeypatch.undo()
        time.tzset()
    assert abs((datetime.now(UTC) - now).total_seconds()) < 5


def test_a_resumed_run_adds_to_the_log_even_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for word in ("one", "two"):
        with RunLog(path) as log:
            log.write(word)
    path.write_text(path.read_text() + "2025-01-01T00:00:00+00:00 thr")
    with RunLog(path) as log:
        log.write("four")
    assert [line.split(" ")[1] for line in path.read_text().splitlines()] == [
        "one",
        "two",
        "thr",
        "four",
    ]


def test_messages_of_many_threads_never_mix(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "log.txt")

    def talk(name: str) -> None:
        for _ in range(50):
            log.write(f"{name * 9}\n{name * 9}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    pairs = list(zip(lines[::2], lines[1::2], strict=True))
    assert len(pairs) == 200
    assert all(head.split(" ")[1] == rest.strip() for head, rest in pairs)


def test_a_full_disk_is_reported_once_by_who_writes_to_the_log_itself(tmp_path: Path) -> None:
    path, messages = tmp_path / "log.txt", list[str]()

    def notify(text: str) -> None:
        messages.append(text)
        log.write(text)

    log = RunLog(path, notify)
    disk = FullDisk(log, room=10)
    for word in ("one", "two", "three"):
        log.write(word)
    assert len(messages) == 1 and "log.txt" in messages[0] and "No space left" in messages[0]
    disk.room = 10_000
    log.write("four")
    log.close()
    log.write("late")
    log.close()
    words = [line.split(" ")[1] for line in path.read_text().splitlines()]
    assert words == ["one", "cannot", "two", "three", "four"] and len(messages) == 1


def test_what_is_no_text_is_written_as_it_can_be(tmp_path: Path) -> None:
    with RunLog(tmp_path / "log.txt") as log:
        log.write("file \udce9.txt é")
    assert (tmp_path / "log.txt").read_text("utf-8").rstrip().endswith(r"file \udce9.txt é")


def test_a_log_that_cannot_be_opened_is_the_user_s_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="log.txt: No such file or directory"):
        RunLog(tmp_path / "missing" / "log.txt")
