"""Files and folders that are there as a whole or not at all: written beside their place, put on the
disk, renamed; and what a killed process left of them removed."""

from __future__ import annotations

import fcntl
import glob
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from jaxrl.errors import UserError
from jaxrl.process.streams import to_stderr

PARTIAL = ".{}.partial"
"""Name of a file that `put_file` has not finished, by the name that it will have."""


def put_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file: all of it, on the disk when this returns, or what was there before."""
    begun = path.with_name(PARTIAL.format(path.name))
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


def remove(place: Path) -> None:
    """Removes a file or a folder; of a link the link alone, not what it leads to."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def move_aside(path: Path, why: str = "damaged") -> Path:
    """Renames what is there to `NAME.damaged`, or `NAME.damaged-2` and so on; returns the name."""
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.{why}{end}") for end in ends)
    aside = next(name for name in names if not os.path.lexists(name))
    try:
        return path.rename(aside)
    except OSError as error:
        raise UserError(f"{path} cannot be renamed to {aside.name}: {error.strerror}") from error


@contextmanager
def replaced_folder(path: str | os.PathLike[str], ours: Callable[[str], bool]) -> Iterator[Path]:
    """Yields a folder to write into, which is renamed to `path` once the block ends.

    Of a folder that stands there only what is `ours` goes, by its name: other files are kept in the
    new one. Nothing is written or removed behind a link, unless it leads to an empty folder
    or to none: it is renamed to `NAME.before`, and so is a file. What a killed process left is
    removed, or put back where the killed one had removed the old folder.

    Raises:
        UserError: `path` cannot be replaced (`check_replaceable`).
    """
    check_replaceable(path)
    final = _behind_link(Path(os.path.abspath(path)))
    final.parent.mkdir(parents=True, exist_ok=True)
    sweep(final, ours)
    number = os.getpid()  # another host, or a killed process without locks, may have had it too
    while any(map(os.path.lexists, names := _begun_names(final, number))):
        number += 1
    partial, old = names
    partial.mkdir()
    lock, _ = lock_folder(partial)
    try:
        yield partial
        if final.is_dir() and not final.is_symlink():
            os.rename(final, old)
        elif os.path.lexists(final):
            to_stderr(f"{final} was not a separate folder: it is now {move_aside(final, 'before')}")
        os.rename(partial, final)
        _merge(old, final, ours)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _begun_names(final: Path, number: int) -> tuple[Path, Path]:
    return (
        final.with_name(f".{final.name}.partial-{number}"),
        final.with_name(f".{final.name}.old-{number}"),
    )


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises UserError where no folder can be put in the place of `path`: a disk is mounted there,
    or it is a device or a pipe. A run asks before it trains."""
    final = _behind_link(Path(os.path.abspath(path)))
    if not final.is_symlink() and final.exists() and not (final.is_file() or final.is_dir()):
        raise UserError(f"{path} is neither a folder nor a file: name a folder to write")
    if os.path.ismount(final):
        raise UserError(
            f"{path} is where a disk is mounted, and a folder is put in place by its name:"
            " name a folder on that disk"
        )


def lock_file(file: int | IO[str]) -> str | None:
    """Takes the lock of an open file or folder.

    Returns:
        None, or why its file system has none (Lustre without `-o flock`, some of FUSE).

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except PermissionError as error:  # the same, on some network file systems
        raise BlockingIOError(error.errno, error.strerror) from error
    except OSError as error:
        return error.strerror
    return None


def lock_folder(folder: Path) -> tuple[int, str | None]:
    """Takes the lock of a folder, which ends with the process: what a killed one left is told from
    what a living one uses. Returns its descriptor, and what `lock_file` does. Raises OSError where
    a process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return descriptor, lock_file(descriptor)
    except OSError:
        os.close(descriptor)
        raise


def sweep(final: Path, ours: Callable[[str], bool]) -> None:
    """Removes what killed processes left of a folder that they were writing to `final`."""
    for left in final.parent.glob(f".{glob.escape(final.name)}.*-*"):
        kind = re.fullmatch(r"(partial|old)-\d+", left.name[len(final.name) + 2 :])
        if kind is None:
            continue
        with suppress(OSError):  # of a process that lives
            lock, unlocked = lock_folder(left)
            try:
                if unlocked is not None:  # it may be of a process that lives
                    continue
                if kind[1] == "partial":
                    shutil.rmtree(left)
                elif os.path.lexists(final):
                    _merge(left, final, ours)
                else:
                    os.rename(left, final)
            finally:
                os.close(lock)


def _behind_link(path: Path) -> Path:
    """Returns where the folder goes: a link to an empty folder, or to a name in one, says where."""
    if not path.is_symlink():
        return path
    with suppress(OSError, RuntimeError):  # a link to itself
        target = path.resolve()
        if target.is_dir() and not any(target.iterdir()):
            return target
        if not os.path.lexists(target) and target.parent.is_dir():
            return target
    return path


def _merge(old: Path, new: Path, ours: Callable[[str], bool]) -> None:
    """Moves the files of an old folder that are not ours into the new one; removes the others."""
    if not old.is_dir():
        return
    for file in list(old.iterdir()):
        if ours(file.name) or os.path.lexists(new / file.name):
            remove(file)
        else:
            os.rename(file, new / file.name)
    old.rmdir()
