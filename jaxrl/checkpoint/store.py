"""The folder of a run's checkpoints: which are whole, which to use, which to keep."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from jaxrl.errors import UserError
from jaxrl.process import atomic_files
from jaxrl.process.json_types import JsonObject, parse_json, read_file

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
ACTOR = "actor"
MODEL = "model"
CONFIG = "config.yaml"
FORMAT = 1
_READ = 1 << 24
_MOST_MANIFEST = 1 << 26
"""Bytes of a manifest that is read; those of the largest models have a megabyte."""
_STEP = re.compile("0|[1-9][0-9]{0,17}")
T = TypeVar("T")
_FOLDERS = re.compile(rf"{ACTOR}(\.orbax-checkpoint-tmp.*)?|{MODEL}|\..*")
_FILES = re.compile(rf"{CONFIG}|rollout_\d+\.npz|{MANIFEST}|\..*")
"""Names of what a checkpoint is made of."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says, beside a checksum of it all (`_checksum_of`)."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    step: NonNegativeInt
    """Batches trained."""
    optimizer_step: NonNegativeInt
    """Optimizer updates."""
    in_flight: tuple[NonNegativeInt, ...]
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
    files: dict[str, tuple[NonNegativeInt, NonNegativeInt]] = field(default_factory=dict)
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


_MANIFEST = TypeAdapter(Manifest)


def read(path: Path) -> Checkpoint:
    """Reads the checkpoint in the folder `path`, without looking at its files yet. Raises
    Damaged."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > _MOST_MANIFEST:
            raise Damaged(f"{file} has more than {_MOST_MANIFEST} bytes")
        raw = parse_json(read_file(file))
        if raw["format"] != FORMAT:
            raise Damaged(f"{path}: written by another jaxrl (format {raw['format']})")
        written = raw.pop("checksum", None)  # an older jaxrl wrote none
        if written is not None and written != _checksum_of(raw):
            raise Damaged(f"{file} differs from what was written (another checksum)")
        manifest = _MANIFEST.validate_json(json.dumps(raw))
    except OSError as error:
        raise _unread(file, error) from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise Damaged(f"{file} cannot be understood: {key}: {first['msg']}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{file} cannot be understood: {error}") from error
    if problem := _contradiction(path, manifest):
        raise Damaged(f"{file} cannot be right: {problem}")
    return Checkpoint(path, manifest)


def _checksum_of(manifest: JsonObject) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def _contradiction(path: Path, manifest: Manifest) -> str | None:
    """Finds a field of a manifest that contradicts its folder or another field."""
    if (
        path.parent.name == FOLDER
        and _STEP.fullmatch(path.name)
        and path.name != str(manifest.step)
    ):
        return f"it is of step {manifest.step}, in folder {path.name}"
    if not isinstance(manifest.data.get("fingerprint"), str):
        return f"data.fingerprint is {manifest.data.get('fingerprint')!r}"
    for index in manifest.in_flight:
        if index < manifest.step or manifest.in_flight.count(index) > 1:
            return f"batch {index} is in flight at step {manifest.step}"
        if manifest.files and rollout_file(index) not in manifest.files:
            return f"batch {index} is in flight, and there is no {rollout_file(index)}"
    outside = [name for name in manifest.files if name.startswith("/") or ".." in Path(name).parts]
    return f"{outside[0]} is no file of the folder" if outside else None


def verify(checkpoint: Checkpoint, only: str | None = None) -> None:
    """Raises Damaged for the first file that is missing, cut or changed.

    Args:
        only: the file to look at; None: all.
    """
    for name, (size, crc) in checkpoint.manifest.files.items():
        if only not in (None, name):
            continue
        file = checkpoint.path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise Damaged(f"{file} has {found} bytes, {size} were written")
            if _checksum(file) != crc:
                raise Damaged(f"{file} differs from what was written (another checksum)")
        except OSError as error:
            raise _unread(file, error) from error


def look(ask: Callable[[Path], T], path: Path) -> T | None:
    """Calls `ask` on a path; returns None where there is nothing.

    Raises:
        UserError: that cannot be told now, as of a disk that does not answer or is not mounted.
    """
    try:
        return ask(path)
    except OSError as error:
        problem = _unread(path, error)
        if isinstance(problem, Damaged):
            return None
        raise problem from error


def folders(run_dir: Path) -> list[Path]:
    """Returns the folders with a manifest, the newest first. Raises UserError where that cannot be
    told now (`look`)."""
    whole = [path for path in _steps(run_dir) if look(os.stat, path / MANIFEST)]
    return sorted(whole, key=lambda path: int(path.name), reverse=True)


def _steps(run_dir: Path) -> list[Path]:
    names = look(os.listdir, run_dir / FOLDER) or []
    return [run_dir / FOLDER / name for name in names if _STEP.fullmatch(name)]


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
            atomic_files.remove(aside)
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
    left = [path for path in _unfinished(run_dir) if not look(_foreign, path)]
    for path in left:
        atomic_files.remove(path)
    return left


def check_places(run_dir: Path, steps: int) -> None:
    """Raises UserError where something that no save wrote is in the place of a checkpoint of a run
    of so many steps."""
    for path in _unfinished(run_dir):
        if int(path.name) <= steps:
            _refuse_foreign(path)


def _unfinished(run_dir: Path) -> list[Path]:
    return [path for path in _steps(run_dir) if not look(os.stat, path / MANIFEST)]


def _foreign(path: Path) -> str:
    """Says what is wrong with a path in the place of a checkpoint that no save wrote."""
    if not path.is_dir():
        return "is no folder" if os.path.lexists(path) else ""
    with os.scandir(path) as parts:
        named = [(part.name, _FOLDERS if part.is_dir() else _FILES) for part in parts]
    others = sorted(name for name, ours in named if not ours.fullmatch(name))
    return f"holds {', '.join(others[:3])}" if others else ""


def _refuse_foreign(path: Path) -> None:
    if foreign := look(_foreign, path):
        raise UserError(
            f"{path} {foreign}, which no run wrote, and is where checkpoint {path.name} goes: move"
            " it away, or name another run_dir"
        )


def discard(folder: Path) -> None:
    """Removes a folder if all of it is what a save writes."""
    with suppress(OSError):
        if not _foreign(folder):
            atomic_files.remove(folder)


def commit(
    path: Path, manifest: Manifest, last: AbstractContextManager[object] | None = None
) -> Checkpoint:
    """Makes the folder `path`, whose files are written, a checkpoint: all of it or nothing.

    Args:
        last: the manifest is written inside it; what it raises leaves the folder as it is.

    Raises:
        UserError: it holds something else, which would be removed with the checkpoint.
    """
    _refuse_foreign(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        atomic_files.settle(file)
    listed = {str(f.relative_to(path)): (f.stat().st_size, _checksum(f)) for f in files}
    whole = replace(manifest, files=listed)
    with nullcontext() if last is None else last:
        _write(path, whole)
        discard(path.with_name(f"{path.name}.damaged"))
    return Checkpoint(path, whole)


def judge(path: Path, accuracy: float | None) -> None:
    """Notes the accuracy of a checkpoint that was evaluated after it was written."""
    _write(path, replace(read(path).manifest, accuracy=accuracy))


def _write(path: Path, manifest: Manifest) -> None:
    raw = json.loads(json.dumps(asdict(manifest)))
    text = json.dumps(raw | {"checksum": _checksum_of(raw)}, indent=1)
    atomic_files.put_file(path / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))


def prune(run_dir: Path, keep_last: int, keep_best: int) -> None:
    """Removes all but the newest `keep_last` and, of the others, the `keep_best` of the highest
    accuracy.

    Of equally good ones the newer stays; what cannot be read is left alone.
    """
    readable = []
    for path in folders(run_dir):
        with suppress(UserError):
            readable.append(read(path))
    older = readable[keep_last:]
    best = [c for c in older if c.manifest.accuracy is not None]
    best.sort(key=lambda c: c.manifest.accuracy or 0.0, reverse=True)
    for checkpoint in older:
        if checkpoint not in best[:keep_best]:
            if not checkpoint.path.is_symlink():
                (checkpoint.path / MANIFEST).unlink()  # first: half removed, it is a leftover
            atomic_files.remove(checkpoint.path)


def _unread(file: Path, error: OSError) -> UserError:
    """Returns the error for a file that cannot be read: one that is not there is damage; a disk
    that does not answer now, or that a link leads to and that is not mounted, may answer later."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return UserError(
            f"{file} cannot be read: {error.strerror}; start again when it can be, or move its"
            " folder away to do without"
        )
    for place in (file, *file.parents):
        if place.is_symlink() and not place.exists():
            return UserError(
                f"{place} is a link to {os.readlink(place)}, which is not there: start again when"
                " it is, or move the link away to do without"
            )
    return Damaged(f"{file}: {error.strerror}")


def _checksum(file: Path) -> int:
    crc = 0
    with open(file, "rb") as data:
        while block := data.read(_READ):
            crc = zlib.crc32(block, crc)
    return crc
