"""The folder of a run's checkpoints: which are whole, which to use, which to keep."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from jaxrl.errors import UserError
from jaxrl.process.json_types import JsonObject, parse_json, read_file

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
ACTOR = "actor"
MODEL = "model"
CONFIG = "config.yaml"
FORMAT = 1
_READ = 1 << 24
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PART = re.compile(rf"{ACTOR}|{MODEL}|{CONFIG}|rollout_|{MANIFEST}|\.")
"""Begins the names of what a checkpoint is made of."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says."""

    step: int
    """Batches trained."""
    optimizer_step: int
    """Optimizer updates."""
    in_flight: tuple[int, ...]
    """Batches generated but not yet trained on; each has a file."""
    schedule: JsonObject
    """Its name, batches generated, batches trained; what is scored is scored again."""
    data: JsonObject
    """Seed, next batch, next prompt, epoch, and the fingerprint of the training data."""
    accuracy: float | None
    """`eval/accuracy` of these weights, where they were evaluated; `eval/environment_reward` where
    only the environment judges."""
    versions: dict[str, str]
    """Of the libraries that wrote it."""
    depends: dict[str, str] = field(default_factory=dict)
    """What the run depends on -> its digest (`run.job.dependencies`)."""
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path in the folder -> (bytes, CRC-32)."""
    format: int = FORMAT

    @property
    def digests(self) -> dict[str, str]:
        """Returns the digests of what the run depends on, its training data included."""
        return {"data.train": self.data["fingerprint"]} | self.depends

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


class Damaged(UserError):
    """A checkpoint that cannot be used; the message says why."""


def rollout_file(index: int) -> str:
    return f"rollout_{index}.npz"


def read(path: Path) -> Checkpoint:
    """Reads the checkpoint in the folder `path`, without looking at its files yet. Raises
    Damaged."""
    try:
        raw = parse_json(read_file(path / MANIFEST))
        if raw["format"] != FORMAT:
            raise Damaged(f"{path}: written by another jaxrl (format {raw['format']})")
        raw["files"] = {name: (size, crc) for name, (size, crc) in raw["files"].items()}
        raw["in_flight"] = tuple(raw["in_flight"])
        return Checkpoint(path, Manifest(**raw))
    except OSError as error:
        raise _unread(path / MANIFEST, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path / MANIFEST} cannot be understood: {error}") from error


def verify(checkpoint: Checkpoint) -> None:
    """Raises Damaged for the first file that is missing, cut or changed."""
    for name, (size, crc) in checkpoint.manifest.files.items():
        file = checkpoint.path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise Damaged(f"{file} has {found} bytes, {size} were written")
            if _checksum(file) != crc:
                raise Damaged(f"{file} differs from what was written (another checksum)")
        except OSError as error:
            raise _unread(file, error) from error


def folders(run_dir: Path) -> list[Path]:
    """Folders with a manifest, the newest first."""
    whole = [path for path in _steps(run_dir) if (path / MANIFEST).exists()]
    return sorted(whole, key=lambda path: int(path.name), reverse=True)


def _steps(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / FOLDER).glob("*") if _STEP.fullmatch(path.name)]


def newest(run_dir: Path, notify: Callable[[str], None]) -> Checkpoint | None:
    """Finds the newest usable checkpoint; None where the run has not written any.

    Where it is damaged the one before is looked at; if that is usable, the damaged one is reported
    and moved aside as `STEP.damaged`.

    Raises:
        UserError: there are checkpoints, and none is usable. They stay where they are: the next
            attempt must not take the folder for one without any.
    """
    damaged: dict[Path, Damaged] = {}
    for path in folders(run_dir):
        try:
            checkpoint = read(path)
            verify(checkpoint)
        except Damaged as error:
            damaged[path] = error
            continue
        for bad, why in damaged.items():
            aside = bad.with_name(f"{bad.name}.damaged")
            remove(aside)
            bad.rename(aside)
            notify(f"checkpoint {bad.name} cannot be used: {why}; it is now {aside}")
        return checkpoint
    if damaged:
        raise UserError(
            f"{run_dir}: none of its {len(damaged)} checkpoints can be used; of the newest:"
            f" {next(iter(damaged.values()))}. To start over, name another run_dir"
        )
    return None


def sweep(run_dir: Path) -> list[Path]:
    """Removes what killed saves and removals left, and returns it. Folders with anything else in
    them are left alone."""
    begun = [p for p in _steps(run_dir) if p.is_dir() and not (p / MANIFEST).exists()]
    left = [path for path in begun if all(_PART.match(part.name) for part in path.iterdir())]
    for path in left:
        remove(path)
    return left


def remove(folder: Path) -> None:
    """Removes a folder; of a link the link alone, not what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def commit(
    path: Path, manifest: Manifest, last: AbstractContextManager[object] | None = None
) -> Checkpoint:
    """Makes the folder `path`, whose files are written, a checkpoint: all of it or nothing.

    Args:
        last: the manifest is written inside it; what it raises leaves the folder as it is.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        settle(file)
    listed = {str(f.relative_to(path)): (f.stat().st_size, _checksum(f)) for f in files}
    whole = replace(manifest, files=listed)
    with nullcontext() if last is None else last:
        _write(path, whole)
        remove(path.with_name(f"{path.name}.damaged"))
    return Checkpoint(path, whole)


def judge(path: Path, accuracy: float | None) -> None:
    """Notes the accuracy of a checkpoint that was evaluated after it was written."""
    _write(path, replace(read(path).manifest, accuracy=accuracy))


def _write(path: Path, manifest: Manifest) -> None:
    text = json.dumps(asdict(manifest), indent=1)
    put_file(path / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))


def put_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file: all of it, on the disk when this returns, or what was there before."""
    begun = path.with_name(f".{path.name}.partial")
    try:
        begun.unlink(missing_ok=True)  # a link would be written through
        write(begun)
        settle(begun)
        begun.replace(path)
        settle(path.parent)
    finally:
        begun.unlink(missing_ok=True)


def settle(path: Path) -> None:
    """Waits until a file, or the names in a folder, would outlive a power failure."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def prune(run_dir: Path, keep_last: int, keep_best: int) -> None:
    """Removes all but the newest `keep_last` and the `keep_best` of the highest accuracy.

    Of equally good ones the newer stays; what cannot be read is left alone.
    """
    readable = []
    for path in folders(run_dir):
        with suppress(UserError):
            readable.append(read(path))
    best = [c for c in readable if c.manifest.accuracy is not None]
    best.sort(key=lambda c: c.manifest.accuracy or 0.0, reverse=True)
    for checkpoint in readable:
        if checkpoint not in readable[:keep_last] + best[:keep_best]:
            if not checkpoint.path.is_symlink():
                (checkpoint.path / MANIFEST).unlink()  # first: half removed, it is a leftover
            remove(checkpoint.path)


def _unread(file: Path, error: OSError) -> UserError:
    """Returns the error for a file that cannot be read: one that is not there is damage; a disk
    that does not answer now may answer later."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Damaged(f"{file}: {error.strerror}")
    return UserError(f"{file} cannot be read: {error.strerror}; move its folder away to do without")


def _checksum(file: Path) -> int:
    crc = 0
    with open(file, "rb") as data:
        while block := data.read(_READ):
            crc = zlib.crc32(block, crc)
    return crc
