"""Which runs work on this host, for `python -m jaxrl.devices`.

A run keeps a small file in a folder of its user while it works; the next reader removes what a
killed run left.
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

import psutil
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
    """Tells the process from a later one with the same pid; "" where the system does not say."""
    started: str
    """Local time, ISO."""
    visible: str | None
    """Its CUDA_VISIBLE_DEVICES: where set, `gpu:0` is the first device that it names."""
    workers: tuple[Member, ...]


class Registration:
    """The file of this process's run."""

    def __init__(self, run_dir: str | Path, notify: Callable[[str], None]) -> None:
        self._run = Run(
            run_dir=str(Path(run_dir).absolute()),
            command=shlex.join(sys.orig_argv),
            host=socket.gethostname(),
            pid=os.getpid(),
            born=_born(os.getpid()) or "",
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            workers=(),
        )
        self._notify: Callable[[str], None] | None = notify
        self.path: Path | None = None
        """None until the file is written."""

    def update(self, states: Sequence[WorkerState]) -> None:
        """Writes the workers as they are now, if they changed, as after a restart."""
        workers = tuple(Member(s.name, s.host, s.pid, s.roles, s.devices) for s in states)
        if self.path is not None and workers == self._run.workers:
            return
        self._run = replace(self._run, workers=workers)
        try:
            folder = own_folder(_homes()[0])
            partial = folder / f".{self._run.pid}.partial"
            partial.write_bytes(_RUN.dump_json(self._run))
            self.path = partial.replace(folder / f"{self._run.pid}.json")
        except (OSError, UserError) as error:
            if self._notify is not None:
                self._notify(f"python -m jaxrl.devices will not list this run: {error}")
            self._notify = None  # once is enough


@contextmanager
def registered(
    run_dir: str | Path, states: Sequence[WorkerState], notify: Callable[[str], None] = to_stderr
) -> Iterator[Registration]:
    """Lists the run of this process on this host while the block runs.

    Args:
        notify: receives one message if the file cannot be written; nothing is raised.
    """
    registration = Registration(run_dir, notify)
    registration.update(states)
    try:
        yield registration
    finally:
        if registration.path is not None:
            _remove(registration.path)


def running(notify: Callable[[str], None] = to_stderr) -> list[Run]:
    """The runs of this user on this host, the oldest first; removes the files of ended ones.

    Args:
        notify: receives why a folder cannot be read.
    """
    found = []
    for home in _homes():
        folder = _folder(home)
        try:
            paths = own_folder(home).glob("*.json") if os.path.lexists(folder) else ()
        except (OSError, UserError) as error:
            notify(f"runs in {folder} are not known: {error}")
            continue
        for path in paths:
            try:
                run = _RUN.validate_json(path.read_bytes())
            except (OSError, ValueError):  # removed meanwhile, or of another version
                continue
            if run.host != socket.gethostname():  # several hosts share the folder
                continue
            if _born(run.pid) == run.born:
                found.append(run)
            else:
                _remove(path)
    return sorted(found, key=lambda run: run.started)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the next reader finds the process gone
        path.unlink(missing_ok=True)


def own_folder(home: Path) -> Path:
    """The user's folder in `home`, created if missing, readable by nobody else.

    Raises:
        UserError: it is not a folder, or belongs to someone else.
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
    """Where the folder may be: the first is written, all are read, because a run and the shell
    that asks for it need not agree on XDG_RUNTIME_DIR.
    """
    session, usual = os.environ.get("XDG_RUNTIME_DIR"), Path(f"/run/user/{os.getuid()}")
    homes = [Path(session)] if session and Path(session).is_dir() else []
    homes.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys([*homes, usual] if usual.is_dir() else homes))


def _born(pid: int) -> str | None:
    """The clock ticks after boot at which a process began; None where there is no such process.

    Not psutil's `create_time`, which moves when the system's clock is set.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        has_proc = Path("/proc/self/stat").exists()
        return "" if not has_proc and psutil.pid_exists(pid) else None
    # The second field, the program's name in parentheses, may hold anything (man 5 proc).
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else rest[18]


_RUN = TypeAdapter(Run)
