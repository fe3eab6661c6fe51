"""The timeline: whole JSON at any moment, true spans, nothing kept alive, one file over resumes."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from telemetry_doubles import FullDisk

from jaxrl.runtime.worker import Handle, LocalWorker, WorkerError
from jaxrl.telemetry.timeline import Timeline


class Role:
    def work(self, seconds: float, step: int = 0) -> np.ndarray:
        time.sleep(seconds)
        return np.zeros(8)

    def size(self, array: np.ndarray, version: int = 0, name: str = "") -> int:
        return int(array.size)

    def fail(self) -> None:
        raise ZeroDivisionError("here")


@pytest.fixture
def handles() -> Iterator[dict[str, Handle]]:
    workers = {name: LocalWorker(name) for name in ("actor", "rollout")}
    for name, worker in workers.items():
        worker.start_role(name, Role, deadline=5).result()
    yield {name: worker.handle(name) for name, worker in workers.items()}
    for worker in workers.values():
        assert worker.stop(5)


def called(
    timeline: Timeline, handles: dict[str, Handle], role: str, method: str, *args: Any, **given: Any
) -> Any:
    future = handles[role].call(method, *args, deadline=5, **given)
    timeline.record(role, method, future.times, given)
    return future


def read(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in read(path) if event["ph"] == "X"]


def tracks(path: Path) -> dict[int, str]:
    named = [event for event in read(path) if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in named}


def test_every_call_is_a_span_on_its_role_s_track(
    tmp_path: Path, handles: dict[str, Handle]
) -> None:
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline:
        call = partial(called, timeline, handles)
        begin = time.monotonic()
        arrays = [call("actor", "work", 0.02, step=i) for i in range(4)]
        sizes = [call("rollout", "size", a, version=i) for i, a in enumerate(arrays)]
        assert [size.result() for size in sizes] == [8] * 4
        took = time.monotonic() - begin
        timeline.span("checkpoints", "save", begin, begin + 0.5, step=2)
    found = {name: [s for s in spans(path) if s["cat"] == name] for name in ("actor", "rollout")}
    assert [s["name"] for s in found["actor"]] == ["work"] * 4
    assert [s["args"] for s in found["actor"]] == [{"step": i} for i in range(4)]
    assert [s["args"] for s in found["rollout"]] == [{"version": i} for i in range(4)]
    for sequence in found.values():
        ends = [s["ts"] + s["dur"] for s in sequence]
        assert all(end <= s["ts"] for end, s in zip(ends, sequence[1:], strict=False))
    assert all(20_000 <= s["dur"] <= took * 1e6 for s in found["actor"])
    for work, size in zip(found["actor"], found["rollout"], strict=True):
        assert size["ts"] >= work["ts"] + work["dur"]  # the wait for an argument is no work
    (save,) = [s for s in spans(path) if s["cat"] == "checkpoints"]
    assert save["dur"] == 500_000 and save["args"] == {"step": 2}
    assert {tracks(path)[s["tid"]] for s in spans(path)} == {"actor", "rollout", "checkpoints"}
    assert all(tracks(path)[s["tid"]] == s["cat"] for s in spans(path))


def test_it_keeps_no_value_alive(tmp_path: Path, handles: dict[str, Handle]) -> None:
    with Timeline(tmp_path / "t.json") as timeline:
        future = called(timeline, handles, "actor", "work", 0.0, step=3)
        value = weakref.ref(future.result())
        assert value() is not None
        del future
        called(
            timeline, handles, "actor", "size", np.zeros(1)
        ).result()  # lets go of the one before
        gc.collect()
        assert value() is None
    assert [s["args"] for s in spans(tmp_path / "t.json")] == [{"step": 3}, {}]


def test_a_call_that_fails_is_a_span_and_one_that_never_ran_is_none(
    tmp_path: Path, handles: dict[str, Handle]
) -> None:
    with Timeline(tmp_path / "t.json") as timeline:
        failed = called(timeline, handles, "actor", "fail")
        never = called(timeline, handles, "rollout", "size", failed)
        for future in (failed, never):
            with pytest.raises(WorkerError, match="here"):
                future.result()
    assert [s["name"] for s in spans(tmp_path / "t.json")] == ["fail"]


def test_a_call_in_progress_is_written_when_it_has_ended(
    tmp_path: Path, handles: dict[str, Handle]
) -> None:
    path = tmp_path / "t.json"
    with Timeline(path) as timeline:
        future = called(timeline, handles, "actor", "work", 0.1)
        timeline.flush()
        assert spans(path) == []
        future.result()
        timeline.flush()
        timeline.flush()
        assert [s["name"] for s in spans(path)] == ["work"]
    assert len(spans(path)) == 1


def test_a_resumed_run_continues_later_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for step in range(3):
        with Timeline(path, after_resume=step > 0) as timeline:
            now = time.monotonic()
            timeline.span("actor", "update", now, now + 7.0, step=step)
    found = spans(path)
    assert [s["args"]["step"] for s in found] == [0, 1, 2]
    for before, after in zip(found, found[1:], strict=False):
        assert after["ts"] >= before["ts"] + before["dur"] + 1_000_000
    assert len({s["tid"] for s in found}) == 1
    assert [e["name"] for e in read(path) if e["ph"] == "i"] == ["start", "resume", "resume"]
    with Timeline(path):
        pass
    assert spans(path) == []


@pytest.mark.parametrize("cut", [1, 2, 3, 9, 60])
def test_what_a_killed_run_left_is_mended(tmp_path: Path, cut: int) -> None:
    """Whatever is missing at its end: the bracket, or part of the last event."""
    path = tmp_path / "t.json"
    with Timeline(path) as timeline:
        timeline.span("actor", "update", 1.0, 2.0, step=0)
        timeline.flush()
        timeline.span("actor", "update", 2.0, 3.0, step=1)
    path.write_bytes(path.read_bytes()[:-cut])
    with Timeline(path, after_resume=True) as timeline:
        timeline.span("actor", "update", time.monotonic(), time.monotonic(), step=2)
    steps = [s["args"]["step"] for s in spans(path)]
    assert steps == ([0, 1, 2] if cut <= 2 else [0, 2])


@pytest.mark.parametrize("text", ["", "[", "[\n", "not a timeline\n", '{"a": 1}\n', "[\n3\n"])
def test_what_is_no_timeline_is_written_from_its_beginning(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with Timeline(path, after_resume=True) as timeline:
        timeline.span("actor", "update", 1.0, 2.0)
    assert len(spans(path)) == 1
    with Timeline(tmp_path / "absent.json", after_resume=True):
        pass
    assert read(tmp_path / "absent.json")


def test_a_process_that_is_killed_leaves_whole_json(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    program = f"""
        import time
        from pathlib import Path
        from jaxrl.telemetry.timeline import Timeline
        timeline = Timeline(Path({str(path)!r}))
        for step in range(10**9):
            timeline.span("actor", "update", time.monotonic(), time.monotonic(), step=step)
            timeline.flush()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [s["args"]["step"] for s in spans(path)]
    assert before == list(range(len(before))) and len(before) > 50
    with Timeline(path, after_resume=True) as timeline:
        timeline.span("actor", "update", 1.0, 2.0, step=-1)
    assert [s["args"]["step"] for s in spans(path)] == [*before, -1]


def test_a_full_disk_is_reported_once_and_raises_nothing(tmp_path: Path) -> None:
    path, messages = tmp_path / "t.json", []
    timeline = Timeline(path, notify=messages.append)
    assert timeline.file is not None
    disk = FullDisk(timeline.file, room=20)
    for step in range(3):
        timeline.span("actor", "update", step, step + 1.0, step=step)
        timeline.flush()
    assert len(messages) == 1 and "t.json" in messages[0] and "No space left" in messages[0]
    disk.room = 10_000
    timeline.close()
    assert [s["args"]["step"] for s in spans(path)] == [0, 1, 2] and len(messages) == 1


def test_a_long_run_keeps_the_latest_part_of_its_timeline(tmp_path: Path) -> None:
    """Whole JSON of a bounded size after every step, and resumed; the oldest calls are cut."""
    path, most, session = tmp_path / "t.json", 30_000, 500
    for begin in range(0, 3 * session, session):
        with Timeline(path, after_resume=begin > 0, most_bytes=most) as timeline:
            rare = time.monotonic()
            timeline.span("checkpoints", "write", rare, rare + 0.1, bytes=1)
            for step in range(begin, begin + session):
                now = time.monotonic()
                timeline.span("actor", "update", now, now + 1e-4, step=step)
                timeline.flush()
                assert path.stat().st_size < most + 1000
            kept = [s["args"]["step"] for s in spans(path) if s["name"] == "update"]
            assert kept == list(range(kept[0], begin + session))
            assert path.stat().st_size > most / 2 - 1000 and kept[0] > 0
    assert set(tracks(path).values()) == {"actor", "checkpoints"}
    assert {tracks(path)[s["tid"]] for s in spans(path)} == {"actor"}
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_disk_that_refuses_leaves_the_long_timeline_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "t.json"
    with Timeline(path, most_bytes=1000) as timeline:
        monkeypatch.setattr("jaxrl.telemetry.lines.shutil.copyfileobj", refuse)
        for step in range(30):
            timeline.span("actor", "update", step, step + 1.0, step=step)
            timeline.flush()
    assert [s["args"]["step"] for s in spans(path)] == list(range(30))
    assert sorted(tmp_path.iterdir()) == [path]


def test_without_a_path_nothing_is_recorded(tmp_path: Path, handles: dict[str, Handle]) -> None:
    with Timeline(None) as timeline:
        called(timeline, handles, "actor", "work", 0.0).result()
        timeline.span("actor", "update", 0.0, 1.0)
        timeline.flush()
    assert list(tmp_path.iterdir()) == []
