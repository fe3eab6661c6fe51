"""What a run shows while it works: a live display on a terminal, plain lines anywhere else.

One lock stands around every output: messages from worker threads never mix with the display.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Literal, Self

import rich.console
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from jaxrl.config import LoggingConfig
from jaxrl.telemetry.metrics import Sample

Mode = Literal["auto", "rich", "plain", "quiet"]
Row = Mapping[str, Any]

ETA_WINDOW = 20
"""Steps whose mean duration predicts the time left."""
SAMPLE_WIDTH = 60
"""Characters of a prompt or completion in a plain line."""

_SHOWN: dict[str, tuple[str, str]] = {
    "distill/divergence": ("divergence", ".4f"),
    "distill/reverse_kl_k1": ("reverse KL (k1)", ".4f"),
    "distill/top1_agreement": ("agreement", ".1%"),
    "sft/loss": ("loss", ".4f"),
    "eval/accuracy": ("accuracy", ".1%"),
    "teacher/accuracy": ("teacher", ".1%"),
    "tokens/per_second": ("tok/s", ",.0f"),
    "time/step_s": ("s/step", ".2f"),
    "staleness": ("staleness", ".0f"),
    "actor/skipped_updates": ("skipped updates", ".0f"),
}
"""Label and format of the metrics that are shown, in this order."""
_SHOWN_WHEN_POSITIVE = {"staleness", "actor/skipped_updates"}


def describe(row: Row) -> list[tuple[str, str]]:
    """Label and text of each shown metric that ``row`` has."""
    shown = []
    for name, (label, form) in _SHOWN.items():
        if name not in row or (name in _SHOWN_WHEN_POSITIVE and not row[name]):
            continue
        value = row[name]
        text = "not finite" if value is None else format(value, form) + _interval(row, name)
        shown.append((label, text))
    return shown


def _interval(row: Row, name: str) -> str:
    """Half the width of the fraction's 95% interval, in points, where the row has one."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return "" if low is None or high is None else f" ±{50 * (high - low):.1f}"


def format_seconds(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from one hour on."""
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
        """
        self._out = sys.stdout if out is None else out
        self._steps = steps
        self._first = start + 1 if start else 0
        """The first row that comes; 0 is the one before training."""
        self._every = logging.every
        self.mode: Mode = logging.console
        if self.mode == "auto":
            self.mode = "rich" if self._out.isatty() else "plain"
        self._lock = threading.Lock()
        self._eta = Eta(steps, clock)
        self._display = _Display(start, steps, self._out) if self.mode == "rich" else None
        self._due = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def message(self, text: str) -> None:
        """One thing worth knowing, such as what start-up is doing."""
        with self._lock:
            if self._display is not None:
                self._display.message(text)
            elif self.mode == "plain":
                self._print(text)

    def step(self, row: Row) -> None:
        """A row of ``metrics.jsonl``; plain: one in ``every``, evaluations, both ends."""
        with self._lock:
            step = row["step"]
            eta = self._eta.step(step)
            if self._display is not None:
                self._display.step(row, eta)
                return
            ends = (self._first, self._steps)
            self._due = step % self._every == 0 or step in ends or "eval/accuracy" in row
            if self.mode == "plain" and self._due:
                self._print(_plain_line(row, self._steps, eta))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Completions of the step just shown: the live display's table, or one plain line each."""
        with self._lock:
            if self._display is not None:
                self._display.samples(samples)
            elif self.mode == "plain" and self._due:
                for sample in samples:
                    self._print(_sample_line(sample))

    def close(self) -> None:
        """Leaves the last state of the live display on the screen."""
        with self._lock:
            if self._display is not None:
                self._display.close()

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _plain_line(row: Row, steps: int, eta: float | None) -> str:
    width = len(str(steps))
    parts = [f"step {row['step']:>{width}}/{steps}"]
    parts += [f"{label} {text}" for label, text in describe(row)]
    if eta is not None and eta > 0:
        parts.append(f"eta {format_seconds(eta)}")
    return "  ".join(parts)


def _score(sample: Sample) -> str:
    return "" if sample.score is None else f"{sample.score:.2g}"


def _cut(text: str, width: int, keep_end: bool = False) -> str:
    """``text`` on one line of at most ``width`` characters."""
    text = text.replace("\n", "\\n")
    if len(text) <= width:
        return text
    return "..." + text[3 - width :] if keep_end else text[: width - 3] + "..."


def _sample_line(sample: Sample) -> str:
    prompt = _cut(sample.prompt, SAMPLE_WIDTH, keep_end=True)
    completion = _cut(sample.completion, SAMPLE_WIDTH)
    score = "" if sample.score is None else f", score {_score(sample)}"
    return f"  {sample.split} {prompt!r} -> {completion!r} ({sample.finish_reason}{score})"


class _Display:
    """The live display: progress bar, latest numbers, latest samples. Its caller holds the lock."""

    def __init__(self, start: int, steps: int, out: IO[str]) -> None:
        self._console = rich.console.Console(file=out, force_terminal=True, highlight=False)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[eta]}"),
            console=self._console,
            expand=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=steps, completed=start, eta="eta -:--")
        self._latest: dict[str, Any] = {}
        self._samples: Sequence[Sample] = ()
        self._live: Live | None = None

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def step(self, row: Row, eta: float | None) -> None:
        # Evaluations are rare: their last values stay on the screen between them.
        lasting = {name: self._latest[name] for name in _EVALUATION if name in self._latest}
        self._latest = lasting | dict(row)
        text = "eta -:--" if eta is None else f"eta {format_seconds(eta)}"
        self._progress.update(self._task, completed=row["step"], eta=text)
        self._refresh()

    def samples(self, samples: Sequence[Sample]) -> None:
        self._samples = tuple(samples)
        self._refresh()

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _refresh(self) -> None:
        if self._live is None:
            # Drawn only when something changed: no refresh thread.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(self._render(), refresh=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress, self._numbers()]
        if self._samples:
            parts.append(_sample_table(self._samples))
        return Group(*parts)

    def _numbers(self) -> RenderableType:
        numbers = [
            Text.assemble((f"{label} ", "dim"), (value, "bold"))
            for label, value in describe(self._latest)
        ]
        return Columns(numbers, padding=(0, 3))


_EVALUATION = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "teacher/accuracy")


def _sample_table(samples: Sequence[Sample]) -> Table:
    table = Table(expand=True, title=f"samples of step {samples[0].step}", title_justify="left")
    for heading in ("prompt", "completion"):
        table.add_column(heading, ratio=1, overflow="ellipsis")
    for heading in ("answer", "score", "tokens", "ended by"):
        table.add_column(heading, no_wrap=True)
    for sample in samples:
        table.add_row(
            Text(_cut(sample.prompt, 2 * SAMPLE_WIDTH, keep_end=True)),
            Text(_cut(sample.completion, 2 * SAMPLE_WIDTH)),
            Text(_cut(sample.answer or "", SAMPLE_WIDTH)),
            _score(sample),
            str(sample.tokens),
            sample.finish_reason,
        )
    return table
