"""Who did what when: ``timeline.json``, a Chrome trace that Perfetto and chrome://tracing open.

One track per role with a span for each call, one per worker with the states that it was in (idle,
waiting for arguments, a phase), and tracks of their own for what runs beside them. The file holds
one event a line; it is a whole JSON array after every flush, so a run may be killed at any moment.
A resumed run goes on in the same file, a second after its last event. A file that has grown to
``MOST_BYTES`` loses the older half of its events, so it always holds the latest part of the run.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from jaxrl.process.streams import to_stderr
from jaxrl.runtime.worker import Future, Handle, Times, WorkerState
from jaxrl.telemetry.lines import LineFile, clear_place

TIMELINE_FILE = "timeline.json"

OPEN, CLOSE = b"[\n", b"]\n"
BEGUN = ("start", "resume")
"""Names of the events with which a run begins, and goes on."""
PROCESS = 1
"""The trace's process; its threads are the tracks."""
GAP_US = 1_000_000
"""Microseconds between the last event of a killed run and the first of the one that goes on."""
END_BYTES = 1 << 20
"""Bytes at the end of the file that hold its latest event."""
MOST_BYTES = 32 << 20
"""Largest size of the file: about twenty thousand steps."""
CLOSE_S = 5.0
"""Longest wait for a look at the workers that is under way when the file is closed."""
STATES_EVERY_S = 0.25
"""Seconds between two looks at the workers' states."""

States = Callable[[], Sequence[WorkerState]]


class Timeline:
    """Records spans; ``flush`` writes those that have ended. Any thread may call it.

    It keeps the times of a call and never its future, so that no array lives longer for it.
    """

    def __init__(
        self,
        path: Path | None,
        after_resume: bool = False,
        told: Callable[[str], None] = to_stderr,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args:
            path: None: nothing is recorded.
            after_resume: go on in the file that is there.
            told: takes the one message of a disk that refuses.
            most_bytes: of the file; beyond it the older half of the events is removed.
        """
        self._lock = threading.Lock()
        self._most_bytes = most_bytes
        self._calls: list[_Call] = []
        self._lines: list[str] = []
        self._tracks: set[str] = set()
        self._file: LineFile | None = None
        self._samplers: list[_Sampler] = []
        if path is None:
            return
        clear_place(path, told)
        size, last_us = _kept(path) if after_resume else (0, None)
        self._file = LineFile(path, size, told, tail=CLOSE)
        now = time.monotonic()
        self._zero = now if last_us is None else now - (last_us + GAP_US) / 1e6
        """`time.monotonic` seconds at the trace's time 0."""
        if last_us is None:
            self._file.append(self._first_lines())
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        name = BEGUN[0] if last_us is None else BEGUN[1]
        told_in = {"at": started, "pid": os.getpid()}
        self._add({"ph": "i", "s": "g", "name": name, "ts": self._us(now), "args": told_in})
        self.flush()

    def watch(self, role: str, handle: Handle) -> Handle:
        """The handle, with a span on the track ``role`` for every call through it."""
        return handle if self._file is None else Watched(role, handle, self._watch)

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """What took from ``start`` to ``end`` (`time.monotonic` seconds); args: plain values."""
        if self._file is None:
            return
        # Each end is rounded by itself: what follows on each other never overlaps.
        begin_us, end_us = self._us(start), self._us(end)
        event = {"ph": "X", "name": name, "cat": track, "ts": begin_us, "dur": end_us - begin_us}
        with self._lock:
            self._add_to(track, event, args)

    def event(self, track: str, name: str, at: float, **args: Any) -> None:
        """What happened at one moment, such as the end of a worker (`time.monotonic` seconds)."""
        if self._file is None:
            return
        event = {"ph": "i", "s": "t", "name": name, "cat": track, "ts": self._us(at)}
        with self._lock:
            self._add_to(track, event, args)

    def state(self, worker: str, phase: str, start: float, end: float) -> None:
        """The worker was in this phase from ``start`` to ``end`` (`time.monotonic` seconds)."""
        self.span(worker_track(worker), phase, start, end)

    def watch_states(self, states: States, every_s: float = STATES_EVERY_S) -> None:
        """Draws what ``states`` tells, until the file is closed, by looking every ``every_s``
        seconds: what is shorter than that may be missed, and then belongs to the state before it.
        """
        if self._file is not None:
            spans = StateSpans(self.state, time.monotonic())
            self._samplers.append(_Sampler(spans, states, every_s))

    def flush(self) -> None:
        """Writes what has ended; a disk that refuses is told once and raises nothing."""
        if self._file is None:
            return
        with self._lock:
            calls, self._calls = self._calls, []
        pending = [call for call in calls if call.times.finished is None]
        for call in calls:
            started, finished = call.times.started, call.times.finished
            if started is not None and finished is not None:
                self.span(call.track, call.name, started, finished, **call.args)
            for move in call.times.moves:
                name = f"{move.name} to the {move.to}"
                track = f"offload {call.track}"
                self.span(track, name, move.started, move.finished, bytes=move.nbytes)
        with self._lock:
            self._calls += pending
            lines, self._lines = self._lines, []
            if lines:
                self._file.append(lines)
            if self._file.size > self._most_bytes:
                self._file.drop_oldest(_names)

    def restore(self) -> bool:
        """As `LineFile.restore`."""
        with self._lock:
            if self._file is None or not self._file.restore():
                return False
            if not self._file.size:
                self._tracks.clear()
                self._file.append(self._first_lines())
            return True

    def _first_lines(self) -> list[str]:
        name = {"ph": "M", "name": "process_name", "args": {"name": "jaxrl"}}
        return ["[", json.dumps({"pid": PROCESS, "tid": 0} | name)]

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.close()
        self._samplers.clear()
        self.flush()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _us(self, at: float) -> int:
        """Microseconds of the trace at ``at``, `time.monotonic` seconds."""
        return int((at - self._zero) * 1e6)

    def _add_to(self, track: str, event: Mapping[str, Any], args: Mapping[str, Any]) -> None:
        """An event on a track; its caller holds the lock."""
        number = {"tid": _number(track)}
        if track not in self._tracks:
            self._tracks.add(track)
            meta = {"ph": "M", "name": "thread_name", "args": {"name": track}}
            self._add(meta | number)
        self._add(dict(event) | number | {"args": args})

    def _add(self, event: Mapping[str, Any]) -> None:
        self._lines.append("," + json.dumps({"pid": PROCESS, "tid": 0} | dict(event)))

    def _watch(self, role: str, method: str, times: Times, args: Mapping[str, Any]) -> None:
        with self._lock:
            self._calls.append(_Call(role, method, times, args))


class StateSpans:
    """From looks at the workers to spans without gap or overlap. One thread at a time."""

    def __init__(self, draw: Callable[[str, str, float, float], None], begun: float) -> None:
        """
        Args:
            draw: takes worker, phase, start and end of each state that is over.
            begun: nothing is drawn before it, `time.monotonic` seconds.
        """
        self._draw = draw
        self._open: dict[str, _Open] = {}
        self._looked = begun

    def look(self, states: Sequence[WorkerState], now: float) -> None:
        """The states at ``now``; a worker that is not among them any more is drawn to its last."""
        for state in states:
            before = self._open.get(state.name)
            if before is None:
                began = max(state.since, self._looked)
                self._open[state.name] = _Open(state.phase, state.since, began)
            elif (before.phase, before.since) != (state.phase, state.since):
                # A phase inside another one ends without a new `since`: the outer one has its own
                # back. It ended after the last look then, at the latest now.
                began = state.since if state.since > self._looked else now
                self._draw(state.name, before.phase, before.start, began)
                self._open[state.name] = _Open(state.phase, state.since, began)
        for name in self._open.keys() - {state.name for state in states}:
            gone = self._open.pop(name)
            self._draw(name, gone.phase, gone.start, self._looked)
        self._looked = now

    def close(self, now: float) -> None:
        """Draws the states that last."""
        for name, last in self._open.items():
            self._draw(name, last.phase, last.start, now)
        self._open.clear()


@dataclass(frozen=True)
class _Open:
    """A state that is not over."""

    phase: str
    since: float
    """As the worker tells it."""
    start: float
    """Where its span begins."""


class _Sampler:
    """The thread that looks at the workers."""

    def __init__(self, spans: StateSpans, states: States, every_s: float) -> None:
        self._spans, self._states, self._every_s = spans, states, every_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._spans.close(time.monotonic())

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._spans.look(self._states(), time.monotonic())


@dataclass(frozen=True)
class _Call:
    track: str
    name: str
    times: Times
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Watched:
    """A handle whose calls are told to somebody."""

    role: str
    handle: Handle
    told: Callable[[str, str, Times, Mapping[str, Any]], None]
    """Takes role, method, times and the plain arguments that have a name."""

    def call(self, method: str, *args: Any, deadline: float, **kwargs: Any) -> Future:
        future = self.handle.call(method, *args, deadline=deadline, **kwargs)
        plain = {key: value for key, value in kwargs.items() if isinstance(value, int | str)}
        self.told(self.role, method, future.times, plain)
        return future


def worker_track(worker: str) -> str:
    """The track of a worker's states and of what happens to it."""
    return f"worker {worker}"


def _number(track: str) -> int:
    """The trace's thread of a track: the same in every process that goes on with the file."""
    return zlib.crc32(track.encode()) & 0x7FFFFFFF


def _names(line: bytes) -> bool:
    """Whether a line names a track or opens the array, and so is needed by the lines after it."""
    return line == OPEN or b'"ph": "M"' in line


def _kept(path: Path) -> tuple[int, int | None]:
    """Bytes of the file to go on after, and the microsecond of its last event.

    (0, None) where there is none: what a killed run left is cut to its last whole line, and what is
    no timeline begins anew.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            begins = file.read(len(OPEN)) == OPEN
            start = max(size - END_BYTES, 0)
            file.seek(start)
            end = file.read()
    except OSError:
        return 0, None
    whole = end[: end.rfind(b"\n") + 1].removesuffix(CLOSE)
    last = [_end_us(line) for line in whole.split(b"\n")]
    found = [us for us in last if us is not None]
    if not begins or not found:
        return 0, None
    return start + len(whole), max(found)


def _end_us(line: bytes) -> int | None:
    """The microsecond at which the event of a line ended; None where it is cut or timeless."""
    try:
        event = json.loads(line.removeprefix(b","))
        return int(event["ts"]) + int(event.get("dur", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
