"""Scores the data of a run once, and stores the scores."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl.algorithms.protocols import SamplingTeacherRole
from jaxrl.config.schema import Config
from jaxrl.errors import RunError, UserError, user_path
from jaxrl.process.streams import Output
from jaxrl.run.launch import make_teacher
from jaxrl.run.run_dir import LOCK, Lock
from jaxrl.score.score_data import Remaining, Scoring, prepare, storage_error
from jaxrl.teacher.cache import (
    HEAD,
    MANIFEST,
    TEACHER,
    ScoreCache,
    ScoreManifest,
    ScoreWriter,
    Stored,
    read_manifest,
    shapes_of,
    token_bytes,
    write_manifest,
)
from jaxrl.telemetry.console import format_seconds
from jaxrl.types import HiddenSignal

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
    teacher = cast(SamplingTeacherRole, make_teacher(scoring.setup, {"teacher": scoring.mesh}))
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


def _begin(
    scoring: Scoring, teacher: SamplingTeacherRole, batches: Sequence[int], log: Log
) -> None:
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


def _hidden(scoring: Scoring, teacher: SamplingTeacherRole, batches: Sequence[int]) -> np.ndarray:
    """Computes the teacher's hidden states [n, Dt] of the completions of some batches."""
    found = []
    for index in batches:
        rollout, signal = scoring.scored(teacher, index)
        assert isinstance(signal, HiddenSignal)
        found.append(np.asarray(signal.hidden)[np.asarray(rollout.sequences.loss_mask)])
    return np.concatenate(found)[:MEASURED_TOKENS]


@contextmanager
def _progress(rows: int, log: Log) -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, else a line every few seconds; yields a function to be called with
    the number of rows scored."""
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


GB = 1e9


def open_folder(folder: Path, manifest: ScoreManifest) -> None:
    """Makes the folder. Raises UserError where it holds anything but a part of these scores."""
    if (folder / MANIFEST).exists():
        there = read_manifest(folder, f"--out {folder}")
        _check_same(folder, there, manifest)
        return
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder")
    left = (LOCK, TEACHER, HEAD)  # by a command that was killed before it wrote the manifest
    other = [path.name for path in folder.glob("*") if path.name not in left]
    if other:
        raise UserError(
            f"--out {folder} holds {other[0]} and no {MANIFEST}: name a new folder, or one that"
            " this command wrote"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}") from error


def _check_same(folder: Path, there: ScoreManifest, now: ScoreManifest) -> None:
    holds = f"--out {folder} holds scores"
    if there.digest != now.digest:
        raise UserError(
            f"{holds} of {there.model}, whose files are not those of {now.model}: name another"
            " folder"
        )
    pairs: dict[str, tuple[object, object]] = {
        "teacher.dtype": (there.dtype, now.dtype),
        "--dtype": (there.stored, now.stored),
        "--samples": (there.samples, now.samples),
    }
    before, asked = there.options.decisive, now.options.decisive
    pairs |= {f"distill.{key}": (before[key], asked.get(key)) for key in before}
    for key, (old, new) in pairs.items():
        if old == new:
            continue
        if key == "distill.vocab_size":
            raise UserError(
                f"{holds} over {old} tokens, and student and teacher share {new}: name another"
                " folder"
            )
        raise UserError(f"{holds} with {key}={old}, not {new}: name another folder")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock: no other process writes scores there meanwhile. Raises UserError
    where one does."""
    try:
        lock = Lock(folder)
    except UserError as error:
        raise UserError(str(error).replace("run_dir=", "--out ", 1)) from None
    with closing(lock):
        yield


def size_of(scoring: Scoring, remaining: Remaining, first: bool) -> str:
    """Says how much is about to be written.

    Args:
        first: the teacher's LM head is still to be written too.

    Raises:
        UserError: the disk has less room than that.
    """
    config, d = scoring.source.config, scoring.config.distill
    each = token_bytes(shapes_of(scoring.manifest, config.d_model))
    size = remaining.tokens * each
    if first and d.signal == "hidden":
        itemsize = jnp.dtype(scoring.config.teacher.compute_dtype).itemsize
        size += config.vocab_size * config.d_model * itemsize
    free = shutil.disk_usage(scoring.folder).free
    most = "at most " if scoring.samples else ""
    text = (
        f"{remaining.rows} rows to score, {remaining.stored} stored already;"
        f" {most}{remaining.tokens:,} tokens of {each:,} bytes, {most}{size / GB:.3g} GB to write,"
        f" {free / GB:.3g} GB free"
    )
    if size > free and not scoring.samples:
        smaller = "--dtype int8 or --signal topk" if d.signal == "hidden" else "a smaller top_k"
        raise UserError(
            f"--out {scoring.folder}: {text}: make room, name a folder on another disk, or take"
            f" {smaller}"
        )
    return text


@contextmanager
def reported(folder: Path) -> Iterator[None]:
    """Ends the command where a disk refuses; whole shards stay."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise RunError(
            f"--out {folder} cannot be written to: {error.strerror or error} ({free / GB:.3g} GB"
            " are free there); the rows of whole shards are stored, and the same command resumes"
            " once there is room"
        ) from error
