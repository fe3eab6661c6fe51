"""What a run shows while it works: a live display on a terminal and in a notebook, plain lines
anywhere else.

One lock stands around every output: messages from worker threads never mix with the display. A
thread keeps the workers' states on the display fresh; where there is none it prints them when no
step has come for long, and at once which programs they compile.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Self, cast

from rich.columns import Columns
from rich.console import Console as RichConsole
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.config.settings import LoggingConfig
from jaxrl.process.json_types import JsonObject
from jaxrl.process.streams import Output, readable
from jaxrl.runtime.worker import WorkerState
from jaxrl.telemetry.metrics import Sample, held_out_reward
from jaxrl.telemetry.timeline import States, Ticker
from jaxrl.types import Row

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

ETA_WINDOW = 20
"""Steps whose mean duration predicts the time left."""
SAMPLE_WIDTH = 60
"""Characters of a prompt or completion in a plain line."""
LEAST_WIDTH = 18
"""Characters that a prompt and a completion have in the table of samples: where the screen is
narrower, other columns are left out."""
CELL_WIDTH = 100
"""Characters of the display in a notebook."""
TICK_S = 1.0
"""Seconds between two looks at the workers."""
SILENT_S = 60.0
"""Seconds without a step or a line after which plain mode prints what the workers do."""
DEAF_S = 10.0
"""Seconds without an answer of a worker from which on that is shown."""
CELL_EVERY_S = 0.2
"""Shortest time between two drawings: each is sent to the browser whole."""

_SHOWN: dict[str, tuple[str, str]] = {
    "distill/divergence": ("divergence", ".4f"),
    "distill/reverse_kl_k1": ("reverse KL (k1)", ".4f"),
    "distill/top1_agreement": ("agreement", ".1%"),
    "sft/loss": ("loss", ".4f"),
    "reward/mean": ("reward", ".3f"),
    "policy/kl_k3": ("KL", ".4f"),
    "policy/entropy": ("entropy", ".3f"),
    "eval/accuracy": ("accuracy", ".1%"),
    "eval/environment_reward": ("held-out reward", ".3f"),
    "teacher/accuracy": ("teacher", ".1%"),
    "tokens/per_second": ("tok/s", ",.0f"),
    "time/step_s": ("s/step", ".2f"),
    "staleness": ("staleness", ".0f"),
    "actor/skipped_updates": ("skipped updates", ".0f"),
}
"""Label and format of the metrics that are shown, in this order."""
_SHOWN_WHEN_POSITIVE = {"staleness", "actor/skipped_updates"}
_OF_EVALUATIONS = ("eval/accuracy", "eval/environment_reward", "teacher/accuracy")


def _shown(row: Row, evaluated: int | None = None) -> list[tuple[str, str]]:
    """Returns the label and text of each shown metric that ``row`` has.

    Args:
        evaluated: the step whose evaluation the row has; None: its own.
    """
    shown = []
    for name, (label, form) in _SHOWN.items():
        if name not in row or (name in _SHOWN_WHEN_POSITIVE and not row[name]):
            continue
        if name == "eval/environment_reward" and held_out_reward(row) is None:
            continue
        value, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
        text = "not finite" if value is None else format(value, form)
        if value is not None and low is not None and high is not None:
            text += f" ±{50 * (high - low):.1f}"  # half the 95% interval, in points
        if name in _OF_EVALUATIONS and evaluated not in (None, row["step"]):
            label += f" of step {evaluated}"
        shown.append((label, text))
    return shown


def format_seconds(seconds: float) -> str:
    """Returns ``m:ss``, or ``h:mm:ss`` from one hour on."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Eta:
    """Time left, from the mean duration of the latest steps; none until two steps have ended.

    The first step compiles, so its own duration never enters the mean.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._ends: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW + 1)

    def step(self, step: int) -> float | None:
        """Marks the end of ``step``; returns the seconds left, or None where that is unknown."""
        if self._ends and step <= self._ends[-1][0]:  # the run went back to a checkpoint
            self._ends.clear()
        if step > 0:
            self._ends.append((step, self._clock()))
        if len(self._ends) < 2:
            return None
        (first, start), (last, end) = self._ends[0], self._ends[-1]
        return (end - start) / (last - first) * (self._steps - last)


class Console:
    """Shows messages, steps and samples; use as a context manager around the run."""

    def __init__(
        self,
        logging: LoggingConfig,
        *,
        steps: int,
        start: int = 0,
        out: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            start: batches trained by an earlier process.
            clock: seconds, in the time of the workers' states.
        """
        notebook = out is None and RichConsole().is_jupyter  # also Colab's
        self.out = Output(sys.stdout if out is None else out)
        self.mode = logging.console
        if self.mode == "auto":
            self.mode = "rich" if notebook or self.out.isatty() else "plain"
        self._screen: Cell | Terminal | None = None
        """Where the display is drawn; None where lines are printed."""
        if self.mode == "rich":
            self._screen = Cell(self.out) if notebook else Terminal(self.out)
        self._every, self._steps, self._clock = logging.every, steps, clock
        self._eta = Eta(steps, clock)
        self._lock = threading.Lock()
        self._states: States | None = None
        self._ticker: Ticker | None = None
        self._closed = False
        # Plain lines.
        self._ends = (start + 1 if start else 0, steps)
        """The first row that comes (0 is the one before training), and the last."""
        self._latest = f"step {start}/{steps}" if start else "the start"
        self._due = True
        self._printed_at = self._stepped_at = clock()
        self._compiling: set[str] = set()
        """Lines about what was compiled at the last look."""
        self._said: set[str] = set()
        """Those that were printed."""
        # The display: step and time left, the latest numbers, samples and workers.
        self._done, self._time_left = start, "-:--"
        self._row: JsonObject = {}
        self._evaluated: int | None = None
        self._samples: Sequence[Sample] = ()
        self._workers: Table | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self, states: States) -> None:
        """Shows what the workers do: `states` is quick, from any thread, in the time of `clock`."""
        self._states = states
        if self.mode != "quiet" and self._ticker is None:
            self._ticker = Ticker("console", TICK_S, self.tick)

    def tick(self) -> None:
        """Takes a look at the workers: the display, or a plain line about a program that compiles
        longer than from one look to the next, and one after a long silence."""
        if self._states is None:
            return
        # Asked for outside the lock: who answers may hold a lock of its own and want to write
        # something here.
        states, now = self._states(), self._clock()
        with self._lock:
            if self._closed:
                return
            if self._screen is not None:
                self._workers = _worker_table(states, now)
                self._draw(self._screen)
                return
            before = self._compiling
            self._compiling = {_compiling(state) for state in states if state.compiling}
            for line in sorted(before & self._compiling - self._said):
                self._said.add(line)
                self._show(line)
            self._said &= self._compiling  # what compiles again is said again
            if now - max(self._printed_at, self._stepped_at) >= SILENT_S:
                since = f"{format_seconds(now - self._stepped_at)} since {self._latest}"
                self._show("; ".join([since, *(worker_line(state, now) for state in states)]))

    def message(self, text: str) -> None:
        """Shows one thing worth knowing, such as what start-up is doing."""
        with self._lock:
            self._show(text)

    def step(self, row: Row) -> None:
        """Shows a row of ``metrics.jsonl``; plain: one in ``every``, evaluations, both ends."""
        if self.mode == "quiet":
            return
        with self._lock:
            step, eta = row["step"], self._eta.step(row["step"])
            if self._screen is not None:
                # Evaluations are rare: their last values stay on the screen between them.
                rare = self._row.items()
                lasting = {name: v for name, v in rare if name.startswith(_OF_EVALUATIONS)}
                if any(map(row.__contains__, _OF_EVALUATIONS)):
                    self._evaluated = row["step"]
                self._row = lasting | dict(row)
                self._done, self._time_left = step, "-:--" if eta is None else format_seconds(eta)
                self._draw(self._screen)
                return
            self._latest, self._stepped_at = f"step {step}/{self._steps}", self._clock()
            self._due = (
                step % self._every == 0
                or step in self._ends
                or any(map(row.__contains__, _OF_EVALUATIONS))
            )
            if self._due:
                parts = [f"step {step:>{len(str(self._steps))}}/{self._steps}"]
                parts += [f"{label} {text}" for label, text in _shown(row)]
                parts += [f"eta {format_seconds(eta)}"] if eta else []
                self._show("  ".join(parts))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Shows completions of the step just shown: in a table, or one plain line each."""
        if self.mode == "quiet":
            return
        with self._lock:
            if self._screen is not None:
                self._samples = tuple(samples)
                self._draw(self._screen)
                return
            for sample in samples if self._due else ():
                prompt = _cut(sample.prompt, SAMPLE_WIDTH, keep_end=True)
                completion = _cut(sample.completion, SAMPLE_WIDTH)
                self._show(f"  {sample.split} '{prompt}' -> '{completion}' ({sample.summary})")

    def close(self) -> None:
        """Leaves the last state of the live display on the screen; later messages come below."""
        if self._closed:
            return
        self._closed = True
        if self._ticker is not None:
            self._ticker.close()
        with self._lock:
            if self._screen is not None:
                if self._workers is not None:
                    self._workers = None  # what they did last is no news
                    self._draw(self._screen)
                self._screen.close()

    def _show(self, text: str) -> None:
        """Shows a message; the lock is held."""
        if self._screen is not None:
            self._screen.message(text)
        elif self.mode == "plain":
            self.out.line(text)
            self._printed_at = self._clock()

    def _draw(self, screen: Cell | Terminal) -> None:
        progress = Table.grid(*[""] * 4, padding=(0, 1), expand=True)
        progress.columns[2].ratio = 1
        bar = ProgressBar(total=self._steps, completed=self._done)
        progress.add_row("step", f"{self._done}/{self._steps}", bar, f"eta {self._time_left}")
        numbers = [
            Text.assemble((f"{label} ", "dim"), (value, "bold"))
            for label, value in _shown(self._row, self._evaluated)
        ]
        display = Table.grid(expand=True)
        display.add_row(progress)
        display.add_row(Columns(numbers, padding=(0, 3)))
        if self._workers is not None:
            display.add_row(self._workers)
        if self._samples:
            display.add_row(_sample_table(self._samples, screen.width))
        screen.show(display)


class Terminal:
    """Messages scroll by above the display, and below it once it is closed."""

    def __init__(self, out: Output) -> None:
        file = cast(IO[str], out)
        self._console = RichConsole(
            file=file, force_terminal=True, force_jupyter=False, highlight=False
        )
        # Drawn when something changed: no refresh thread of rich's.
        self._live = Live(console=self._console, auto_refresh=False)

    @property
    def width(self) -> int:
        """Returns its columns."""
        return self._console.width

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def show(self, display: Table) -> None:
        """Draws a display in place of what it showed last."""
        self._live.start()
        self._live.update(display, refresh=True)

    def close(self) -> None:
        """Leaves what is shown last."""
        self._live.stop()


class Cell:
    """Messages are printed; the display stays where it was first shown."""

    width = CELL_WIDTH

    def __init__(self, out: Output) -> None:
        self._out = out
        self._handle: DisplayHandle | None = None
        self._undrawn: Table | None = None
        self._drawn_at = -CELL_EVERY_S

    def message(self, text: str) -> None:
        self._out.line(text)

    def show(self, display: Table) -> None:
        """Draws a display in place of what it showed last."""
        self._undrawn = display
        if time.monotonic() - self._drawn_at >= CELL_EVERY_S:
            self._draw()

    def close(self) -> None:
        """Leaves what is shown last."""
        self._draw()

    def _draw(self) -> None:
        import IPython.display

        if self._undrawn is None:
            return
        if self._handle is None:
            self._handle = IPython.display.display(self._undrawn, display_id=True)
        else:
            self._handle.update(self._undrawn)
        self._undrawn, self._drawn_at = None, time.monotonic()


def worker_line(state: WorkerState, now: float) -> str:
    """Says what a worker does, since when, and what is odd: ``rollout: idle for 0:07``."""
    detail = f" ({state.detail})" if state.detail else ""
    does = f"{worker_name(state)}: {state.phase} for {format_seconds(now - state.since)}{detail}"
    return ", ".join([does, *_oddities(state, now)])


def worker_name(state: WorkerState) -> str:
    """Returns a worker's name, with host and pid where it is another process than this one."""
    here = state.pid == os.getpid() and state.host == socket.gethostname()
    return state.name if here else f"{state.name} ({state.host}:{state.pid})"


def _compiling(state: WorkerState) -> str:
    """Returns a line about the program that a worker compiles, and the call that needs it: the same
    for all processes of a pool, which compile it together."""
    call, pool = state.phase.partition(":")[0], re.sub(r"\.\d+$", "", state.name)
    return f"{pool}: compiling {state.compiling} for {call} (later calls reuse it)"


def _oddities(state: WorkerState, now: float) -> list[str]:
    found = [f"compiling {state.compiling}"] if state.compiling else []
    if now - state.heard > DEAF_S:
        found.append(f"no answer for {now - state.heard:.0f} s")
    if state.restarts:
        found.append(f"restarted {state.restarts}x")
    return found


def _cut(text: str, width: int, keep_end: bool = False) -> str:
    """Returns ``text`` on one line of at most ``width`` characters."""
    text = readable(text)
    if len(text) <= width:
        return text
    return "..." + text[3 - width :] if keep_end else text[: width - 3] + "..."


def _worker_table(states: Sequence[WorkerState], now: float) -> Table:
    table = Table(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
    table.add_column(no_wrap=True, justify="right")
    for state in states:
        odd = "".join(f"{oddity}  " for oddity in _oddities(state, now))
        does = Text.assemble((odd, "yellow"), state.phase, (f"  {state.detail}", "dim"))
        table.add_row(Text(worker_name(state)), does, format_seconds(now - state.since))
    return table


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2g}"


def _sample_table(samples: Sequence[Sample], width: int) -> Table:
    """Draws samples on a screen of ``width`` characters: prompt, completion, and as many of the
    other columns, the most needed first, as leave them room."""
    columns = [
        ("judged", [sample.judged for sample in samples]),
        ("advantage", [_signed(sample.advantage) for sample in samples]),
        ("tokens", [str(sample.tokens) for sample in samples]),
        ("answer", [_cut(sample.answer or "", SAMPLE_WIDTH) for sample in samples]),
        ("ended by", [sample.finish_reason for sample in samples]),
    ]
    columns = [(heading, cells) for heading, cells in columns if any(cells)]
    sizes = [3 + max(map(len, (heading, *cells))) for heading, cells in columns]
    while columns and width - 1 - sum(sizes) < 2 * (LEAST_WIDTH + 3):
        columns.pop(), sizes.pop()
    title = f"samples of step {samples[0].step}" + (
        ", from the data" if samples[0].split == "data" else ""
    )
    table = Table(expand=True, title=title, title_justify="left")
    for heading in ("prompt", "completion"):
        table.add_column(heading, ratio=1, overflow="ellipsis")
    for heading, _ in columns:
        table.add_column(heading, no_wrap=True)
    for i, sample in enumerate(samples):
        table.add_row(
            Text(_cut(sample.prompt, 2 * SAMPLE_WIDTH, keep_end=True)),
            Text(_cut(sample.completion, 2 * SAMPLE_WIDTH)),
            *(Text(cells[i]) for _, cells in columns),
        )
    return table
