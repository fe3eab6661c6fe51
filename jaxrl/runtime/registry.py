"""Which runs work on this host, and what a cluster has: what `python -m jaxrl.devices` tells.

A run writes a small file into a folder of its user while it works, and removes it at its end; what
a killed one left is removed by the next reader.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter

from jaxrl.errors import UserError
from jaxrl.process.streams import to_stderr
from jaxrl.runtime.worker import WorkerState


@dataclass(frozen=True)
class Member:
    """A worker of a run, as registered."""

    name: str
    host: str
    pid: int
    roles: tuple[str, ...]
    devices: tuple[str, ...]
    """As `cpu:0`, `gpu:3`."""


@dataclass(frozen=True)
class Run:
    """A run in progress."""

    run_dir: str
    command: str
    host: str
    pid: int
    born: str
    """What tells the process from a later one with the same pid; "" where the system does not."""
    started: str
    """Local time, ISO."""
    visible: str | None
    """Its CUDA_VISIBLE_DEVICES: where set, `gpu:0` is the first device that it names."""
    workers: tuple[Member, ...]


class Registration:
    """The file of this process's run."""

    def __init__(self, run: Run, told: Callable[[str], None]) -> None:
        self._run, self._told = run, told
        self._path: Path | None = None
        self._refused = False

    def update(self, states: Sequence[WorkerState]) -> None:
        """Writes the workers as they are now, where that is news: after one was made anew, say."""
        workers = tuple(Member(s.name, s.host, s.pid, s.roles, s.devices) for s in states)
        if self._path is not None and workers == self._run.workers:
            return
        self._run = replace(self._run, workers=workers)
        try:
            folder = own_folder(_homes()[0])
            partial = folder / f".{self._run.pid}.partial"
            partial.write_bytes(_RUN.dump_json(self._run))
            self._path = partial.replace(folder / f"{self._run.pid}.json")
        except (OSError, UserError) as error:
            if not self._refused:
                self._told(f"python -m jaxrl.devices will not list this run: {error}")
            self._refused = True

    def remove(self) -> None:
        if self._path is not None:
            with suppress(OSError):  # whoever reads it next finds the process gone
                self._path.unlink(missing_ok=True)


@contextmanager
def registered(
    run_dir: str | Path, states: Sequence[WorkerState], told: Callable[[str], None] = to_stderr
) -> Iterator[Registration]:
    """The run of this process is listed on this host meanwhile.

    Args:
        told: takes the one message of a disk that refuses; it raises nothing.
    """
    run = Run(
        str(Path(run_dir).absolute()),
        shlex.join(sys.orig_argv),
        socket.gethostname(),
        os.getpid(),
        _born(os.getpid()) or "",
        datetime.now().astimezone().isoformat(timespec="seconds"),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        (),
    )
    registration = Registration(run, told)
    registration.update(states)
    try:
        yield registration
    finally:
        registration.remove()


def running(told: Callable[[str], None] = to_stderr) -> list[Run]:
    """The runs of this user on this host, the oldest first; removes what ended ones left.

    Args:
        told: takes what keeps a folder from being read.
    """
    found = []
    for home in _homes():
        try:
            folder = own_folder(home) if os.path.lexists(_folder(home)) else None
        except (OSError, UserError) as error:
            told(f"runs in {_folder(home)} are not known: {error}")
            continue
        for path in [] if folder is None else folder.glob("*.json"):
            try:
                run = _RUN.validate_json(path.read_bytes())
            except (OSError, ValueError):  # gone meanwhile, or of another version
                continue
            if run.host != socket.gethostname():  # a folder that hosts share
                continue
            if _born(run.pid) == run.born:
                found.append(run)
            else:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
    return sorted(found, key=lambda run: run.started)


def own_folder(home: Path) -> Path:
    """The user's folder in `home`, made where there is none, readable by nobody else.

    Raises:
        UserError: what is there is no folder, or belongs to someone else.
    """
    folder = _folder(home)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # A link would let its owner choose what is read and written.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(
            f"{folder} is not a folder of this user (uid {os.getuid()}): remove it, or set"
            " XDG_RUNTIME_DIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _folder(home: Path) -> Path:
    return home / f"jaxrl-{os.getuid()}"


def _homes() -> list[Path]:
    """Where the folder may be: the first is written, all are read.

    A run and the shell that asks for it need not agree on XDG_RUNTIME_DIR.
    """
    told, usual = os.environ.get("XDG_RUNTIME_DIR"), Path(f"/run/user/{os.getuid()}")
    homes = [Path(told)] if told and Path(told).is_dir() else []
    homes.append(Path(tempfile.gettempdir()))
    if usual.is_dir():
        homes.append(usual)
    return list(dict.fromkeys(homes))


def _born(pid: int) -> str | None:
    """The clock ticks after boot at which a process began; None where there is none any more."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _alive(pid)
    # The second field, the program's name in parentheses, may hold anything (man 5 proc).
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


def _alive(pid: int) -> str | None:
    """Without /proc: "" for a process that is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


_RUN = TypeAdapter(Run)
