"""The folder that scores are written to: whether it may be, and whether the disk has room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import jax.numpy as jnp

from jaxrl.errors import RunError, UserError
from jaxrl.run.run_dir import LOCK, Lock
from jaxrl.score.scoring import Remaining, Scoring
from jaxrl.teacher.cache import (
    HEAD,
    MANIFEST,
    TEACHER,
    ScoreManifest,
    read_manifest,
    shapes_of,
    token_bytes,
)

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
    """No other process writes scores there meanwhile. Raises UserError where one does."""
    try:
        lock = Lock(folder)
    except UserError as error:
        raise UserError(str(error).replace("run_dir=", "--out ", 1)) from None
    with closing(lock):
        yield


def size_of(scoring: Scoring, remaining: Remaining, first: bool) -> str:
    """What is about to be written, in words.

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
    """What a disk refuses ends the command; whole shards stay."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(folder).free
        raise RunError(
            f"--out {folder} cannot be written to: {error.strerror or error} ({free / GB:.3g} GB"
            " are free there); the rows of whole shards are stored, and the same command resumes"
            " once there is room"
        ) from error
