"""Who did what when: ``timeline.json``, a Chrome trace that Perfetto and chrome://tracing open.

One track per role with a span for each call, one per worker with the states that it was in (idle,
waiting for arguments, a phase), and tracks of their own for what runs beside them. The file holds
one event a line; it is a whole JSON array after every flush, so a run may be killed at any moment.
A resumed run continues in the same file, a second after its last event. A file that has grown to
``MOST_BYTES`` loses the older half of its events, so it always holds the latest part of the run.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from jaxrl.process.json_types import parse_json
from jaxrl.process.streams import to_stderr
from jaxrl.runtime.worker import Times, WorkerState
from jaxrl.telemetry.lines import LineFile, time_stamp

TIMELINE_FILE = "timeline.json"

OPEN, CLOSE = b"[\n", b"]\n"
BEGUN = ("start", "resume")
"""Names of the events that mark where a run starts and where it resumes."""
PROCESS = 1
"""The trace's process; its threads are the tracks."""
FIRST_LINES = (
    "[",
    json.dumps(
        {"pid": PROCESS, "tid": 0, "ph": "M", "name": "process_name", "args": {"name": "jaxrl"}}
    ),
)
GAP_US = 1_000_000
"""Microseconds between the last event of a killed run and the first of the one that resumes it."""
END_BYTES = 1 << 20
"""Bytes at the end of the file that hold its latest event."""
MOST_BYTES = 32 << 20
"""Largest size of the file: about twenty thousand steps."""
STATES_EVERY_S = 0.25
"""Seconds between two looks at the workers' states."""
CLOSE_S = 5.0
"""Longest wait for a call that is under way when a ticker is closed."""

States = Callable[[], Sequence[WorkerState]]


class Timeline:
    """Records spans, from any thread; ``flush``, from one, writes those that have ended.

    It keeps the times of a call and never its future, so that no array lives longer for it.
    """

    def __init__(
        self,
        path: Path | None,
        after_resume: bool = False,
        notify: Callable[[str], None] = to_stderr,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args:
            path: None: nothing is recorded.
            after_resume: continue in the file that is there.
            notify: takes the one message of a disk that refuses.
            most_bytes: of the file; beyond it the older half of the events is removed.
        """
        self._lock = threading.Lock()
        self._most_bytes = most_bytes
        self._calls: deque[tuple[str, str, Times, Mapping[str, object]]] = deque()
        """Those that have not ended."""
        self._lines: list[str] = []
        self._tracks: set[str] = set()
        self.file: LineFile | None = None
        """What it is written to; None: nothing is recorded."""
        self._ticker: Ticker | None = None
        self._states: dict[str, tuple[WorkerState, float]] = {}
        """The workers' states that are not over, and where the span of each begins."""
        self._zero = self._looked = now = time.monotonic()
        """`time.monotonic` seconds at the trace's time 0, and at the last look at the states."""
        if path is None:
            return
        self.file = LineFile(path, notify, self._keep if after_resume else None, tail=CLOSE)
        if not self.file.size:
            self.file.append(FIRST_LINES)
        started = time_stamp()
        args = {"at": started, "pid": os.getpid()}
        ts = int((now - self._zero) * 1e6)
        self._add("i", BEGUN[self._zero < now], 0, s="g", ts=ts, args=args)
        self.flush()

    def record(self, role: str, method: str, times: Times, given: Mapping[str, object]) -> None:
        """Draws a call on the track of its role when it has ended, with those of its arguments that
        are plain."""
        if self.file is not None:
            plain = {key: value for key, value in given.items() if isinstance(value, int | str)}
            self._calls.append((role, method, times, plain))

    def span(self, track: str, name: str, start: float, end: float, **args: object) -> None:
        """Draws what took from ``start`` to ``end`` (`time.monotonic` seconds), with plain args."""
        if self.file is None:
            return
        # Each end is rounded by itself: spans that follow one another never overlap.
        begin_us, end_us = (int((at - self._zero) * 1e6) for at in (start, end))
        # The trace's thread of a track: the same number in every process that uses the file.
        number = zlib.crc32(track.encode()) & 0x7FFFFFFF
        times = {"cat": track, "ts": begin_us, "dur": end_us - begin_us}
        with self._lock:
            if track not in self._tracks:
                self._tracks.add(track)
                self._add("M", "thread_name", number, args={"name": track})
            self._add("X", name, number, **times, args=args)

    def watch_states(self, states: States, every_s: float = STATES_EVERY_S) -> None:
        """Draws what ``states`` returns, until the file is closed, by looking every ``every_s``
        seconds: what is shorter than that may be missed, and then belongs to the state before it.
        """
        if self.file is not None:
            self._looked = time.monotonic()
            self._ticker = Ticker(
                "timeline", every_s, lambda: self.look(states(), time.monotonic())
            )

    def look(self, states: Sequence[WorkerState], now: float) -> None:
        """Takes the workers' states at ``now``, in one thread; draws spans without gap or overlap.
        A worker that is gone is drawn to the last look."""
        for state in states:
            if state.name not in self._states:
                self._states[state.name] = state, max(state.since, self._looked)
                continue
            before, start = self._states[state.name]
            if (before.phase, before.since) != (state.phase, state.since):
                # A phase inside another one ends without a new `since`: the outer one has its own
                # back. It ended after the last look then, at the latest now.
                began = state.since if state.since > self._looked else now
                self.span(f"worker {state.name}", before.phase, start, began)
                self._states[state.name] = state, began
        self._end_states(self._states.keys() - {state.name for state in states}, self._looked)
        self._looked = now

    def _end_states(self, names: Collection[str], end: float) -> None:
        for name in names:
            last, start = self._states.pop(name)
            self.span(f"worker {name}", last.phase, start, end)

    def flush(self) -> None:
        """Writes what has ended; a disk that refuses is reported once and raises nothing."""
        if self.file is None:
            return
        for _ in range(len(self._calls)):
            role, method, times, args = call = self._calls.popleft()
            if times.finished is None:
                self._calls.append(call)
                continue
            if times.started is not None:
                self.span(role, method, times.started, times.finished, **args)
            for move in times.moves:
                name = f"{move.name} to the {move.to}"
                self.span(f"offload {role}", name, move.started, move.finished, bytes=move.nbytes)
        with self._lock:
            lines, self._lines = self._lines, []
            if lines:
                self.file.append(lines)
            if self.file.size > self._most_bytes:
                # The lines after them need those that name a track or open the array.
                self.file.drop_oldest(lambda line: line == OPEN or b'"ph": "M"' in line)

    def close(self) -> None:
        """Draws the states that last, and writes everything that has ended."""
        if self._ticker is not None and self._ticker.close():
            self._end_states(list(self._states), time.monotonic())
        self._ticker = None
        self.flush()
        if self.file is not None:
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, file: IO[bytes]) -> int:
        """Returns the bytes up to the last whole event of the file that is there, after which the
        trace's time continues. 0: it is no timeline, and is written from its beginning."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        begins = file.read(len(OPEN)) == OPEN
        start = file.seek(max(size - END_BYTES, 0))
        end = file.read()
        whole = end[: end.rfind(b"\n") + 1].removesuffix(CLOSE)
        ended_us: list[int] = []
        for line in whole.split(b"\n"):  # other lines have no time
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                event = parse_json(line.removeprefix(b","))
                ended_us.append(int(event["ts"]) + int(event.get("dur", 0)))
        if not begins or not ended_us:
            return 0
        self._zero -= (max(ended_us) + GAP_US) / 1e6
        return start + len(whole)

    def _add(self, kind: str, name: str, thread: int, **fields: object) -> None:
        event = {"pid": PROCESS, "tid": thread, "ph": kind, "name": name} | fields
        self._lines.append("," + json.dumps(event))


class Ticker:
    """Calls ``tick`` every ``every_s`` seconds, in a daemon thread, until it is closed."""

    def __init__(self, name: str, every_s: float, tick: Callable[[], None]) -> None:
        self._every_s, self._tick = every_s, tick
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Returns whether the thread has ended; a call that hangs is left behind."""
        self._ending.set()
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            self._tick()
