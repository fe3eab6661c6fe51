"""Scores the data of a run once, and stores the scores."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl.algorithms.protocols import TeacherRole
from jaxrl.config.schema import Config
from jaxrl.errors import user_path
from jaxrl.process.streams import Output
from jaxrl.run.launch import make_teacher
from jaxrl.score.error import storage_error
from jaxrl.score.folder import locked, open_folder, reported, size_of
from jaxrl.score.scoring import Remaining, Scoring, prepare
from jaxrl.teacher.cache import MANIFEST, ScoreCache, ScoreWriter, Stored, write_manifest
from jaxrl.telemetry.console import format_seconds

EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""
MEASURED, MEASURED_TOKENS = 4, 4096
"""Most batches, and most tokens of them, on which the error of storage is measured."""
Log = Callable[[str], None]


def score(config: Config, out: str | Path, dtype: Stored | None = None) -> ScoreCache:
    """Scores the data of a config, and stores what is not in the folder yet.

    Args:
        config: `teacher.model`, `data.*`, `distill.*`, `batch_size` and lengths count.
        out: the folder; one that holds a part of the same scores is continued.
        dtype: of stored hidden states; None: that of the teacher.

    Raises:
        UserError: bad input, or a folder that holds something else; nothing is scored then.
        RunError: the disk refuses; what was stored stays, and the same call resumes.
    """
    output, began = Output(sys.stdout), time.monotonic()
    log = output.line
    scoring, notes = prepare(config, user_path(out), dtype)
    folder = scoring.folder
    for note in (*notes, *scoring.job.data_notes()):
        log(note)
    open_folder(folder, scoring.manifest)
    with locked(folder):
        cache = ScoreCache(folder) if (folder / MANIFEST).exists() else None
        remaining = scoring.remaining(cache)
        log(size_of(scoring, remaining, cache is None))
        if remaining.keys:
            with reported(folder):
                _score_all(scoring, remaining, cache is None, log)
        done = ScoreCache(folder)
    log(f"{len(done)} rows in {folder}, after {format_seconds(time.monotonic() - began)}")
    return done


def _score_all(scoring: Scoring, remaining: Remaining, first: bool, log: Log) -> None:
    teacher = cast(TeacherRole, make_teacher(scoring.setup, {"teacher": scoring.mesh}))
    if first:
        _begin(scoring, teacher, remaining.batches[:MEASURED], log)
    writer, left = ScoreWriter(scoring.folder), set(remaining.keys)
    try:
        with _progress(remaining.rows, log) as advance:
            for index in remaining.batches:
                for group in scoring.rows(*scoring.scored(teacher, index)):
                    key = scoring.manifest.key(group[0].prompt, group[0].completion)
                    if key in left:
                        writer.add(group)
                        left.remove(key)
                        advance(len(group))
        writer.flush()
    except KeyboardInterrupt:
        writer.flush()
        rows = remaining.stored + remaining.rows
        done = rows - len(left) * (scoring.samples or 1)
        raise KeyboardInterrupt(
            f"interrupted: {done} of {rows} rows are stored in {scoring.folder}; the same command"
            " resumes"
        ) from None


def _begin(scoring: Scoring, teacher: TeacherRole, batches: Sequence[int], log: Log) -> None:
    """Writes all but the rows: head, description of the teacher, and the error of storage, which is
    measured on some of the batches."""
    config, manifest, head = scoring.config, scoring.manifest, None
    if config.distill.signal == "hidden":
        head = np.asarray(scoring.source.load_head(None, jnp.dtype(manifest.dtype)))
        if scoring.stored not in (manifest.dtype, "float32"):
            hidden = _hidden(scoring, teacher, batches)
            shared = head[: scoring.job.vocab_size]
            cap = scoring.source.config.final_softcap
            error = storage_error(hidden, scoring.stored, shared, config.distill, cap)
            log(f"hidden states in {scoring.stored}: {error}")
            manifest = manifest.model_copy(update={"error": error})
    tokenizer = scoring.source.tokenizer_path
    assert tokenizer is not None, "make_job has compared its tokens"
    write_manifest(scoring.folder, manifest, scoring.source.config, tokenizer, head)


def _hidden(scoring: Scoring, teacher: TeacherRole, batches: Sequence[int]) -> np.ndarray:
    """[n, Dt] of the completions of some batches."""
    found = []
    for index in batches:
        rollout, signal = scoring.scored(teacher, index)
        found.append(np.asarray(signal.hidden)[np.asarray(rollout.sequences.loss_mask)])
    return np.concatenate(found)[:MEASURED_TOKENS]


@contextmanager
def _progress(rows: int, log: Log) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line every few seconds; to be called with the rows scored."""
    terminal = Console(stderr=True, force_jupyter=False, force_terminal=sys.stderr.isatty())
    if terminal.is_terminal:
        columns = TextColumn("{task.completed}/{task.total} rows"), BarColumn()
        with Progress(*columns, TimeRemainingColumn(), console=terminal) as bar:
            task = bar.add_task("", total=rows)
            yield partial(bar.advance, task)
        return
    done, began = 0, time.monotonic()
    last = began

    def advance(n: int) -> None:
        nonlocal done, last
        done, now = done + n, time.monotonic()
        if now - last >= EVERY_S:
            last = now
            left = (now - began) / done * (rows - done)
            log(f"{done}/{rows} rows ({done / rows:.0%}), {format_seconds(left)} left")

    yield advance
