"""The folder of a run: made, or taken up again where the run left off."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import Change, allows, change_of, changes, compare, key_within
from jaxrl.checkpoint.model_source import FINAL, chat_date_of
from jaxrl.checkpoint.store import Checkpoint
from jaxrl.checkpoint.writer import versions
from jaxrl.config import yaml_text
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.data.chat_template import today
from jaxrl.errors import RunError, UserError
from jaxrl.formats import hf, peft
from jaxrl.plan.table import PLAN_DATA_FILE, PLAN_FILE
from jaxrl.process import atomic_files
from jaxrl.process.json_types import JsonObject, parse_json, read_file
from jaxrl.run.record import BATCHES_FILE, STREAM_FILE
from jaxrl.telemetry.lines import LineFile, is_in_place, time_stamp
from jaxrl.telemetry.metrics import METRICS_FILE, SAMPLES_FILE, read_metrics
from jaxrl.telemetry.timeline import TIMELINE_FILE

SESSIONS_FILE = "sessions.jsonl"
"""A line for each start of the run whose steps are kept: the step that it began after, its mesh,
`provenance`, what had changed since and, where code of the user's ended it early, `stopped`: the
step, what raised StopTraining, and its message."""
LOCK = "lock"
ROWS = (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE, SESSIONS_FILE, BATCHES_FILE, STREAM_FILE)
"""What grows with the steps."""


@dataclass(frozen=True)
class RunDir:
    """The folder of a run that is about to start."""

    path: Path
    checkpoint: Checkpoint | None
    """What to resume from; None at the beginning."""
    notes: tuple[str, ...]
    """What was found there, for the reader."""
    depends: Mapping[str, str] = field(default_factory=dict)
    """What the run depends on -> its digest."""
    changed: tuple[Change, ...] = ()
    """What is not what it was at the checkpoint, keys of the config and versions too."""
    lock: Lock | None = None

    @property
    def step(self) -> int:
        """Batches trained already."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def write(self, name: str, text: str) -> None:
        """Writes a file in the folder: all of it is there then, or what was there before. Raises
        UserError."""
        try:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_files.put_file(
                self.path / name, lambda file: file.write_text(text, encoding="utf-8")
            )
        except OSError as error:
            raise UserError(f"cannot write {self.path / name}: {error.strerror}") from error

    def set_aside(self) -> list[str]:
        """Renames what a run that starts at the beginning would write over: the rows of one that
        wrote no checkpoint, and what was there before the first start. Returns what to tell."""
        if self.checkpoint is not None:
            return []
        files: list[Path] = []
        if not os.path.lexists(self.path / SESSIONS_FILE):
            files = [self.path / name for name in (CONFIG_FILE, PLAN_FILE, PLAN_DATA_FILE, *ROWS)]
        elif _has_lines(self.path / METRICS_FILE):
            files = [self.path / name for name in ROWS]
        found = [file for file in files if _has_lines(file)]
        return [
            f"{file} was there before: it is now {atomic_files.move_aside(file, 'before')}"
            for file in found
        ]

    def sessions_with(self, mesh: str) -> str:
        """Returns the text of `SESSIONS_FILE` that says what the steps from here on are trained
        on."""
        kept = [one for one in sessions(self.path) if one["step"] < self.step]
        begun = {"step": self.step, "mesh": mesh, **provenance()}
        if self.changed:
            begun["changed"] = [change.text for change in self.changed]
        return "".join(json.dumps(one) + "\n" for one in (*kept, begun))

    def note_stop(self, step: int, by: str, message: str) -> None:
        """Notes in `SESSIONS_FILE` that code of the user's has ended the run after `step` steps."""
        *before, last = sessions(self.path)
        last["stopped"] = {"step": step, "by": by, "message": message, "at": time_stamp()}
        self.write(SESSIONS_FILE, "".join(json.dumps(one) + "\n" for one in (*before, last)))

    def finished(self, steps: int) -> bool:
        """Returns whether the run has been trained to its end, and exported; a full disk may have
        refused the last checkpoint."""
        return self._has_final and steps in (self.step, self._exported)

    def clear_final(self, notify: Callable[[str], None]) -> None:
        """Removes the model that the run exported after fewer steps, before it trains on; one that
        no checkpoint has is kept under another name."""
        final = self.path / FINAL
        atomic_files.sweep(final, hf.is_model_file)
        exported = self._exported
        if not self._has_final or (exported is not None and exported <= self.step):
            hf.remove_model(final)
            return
        of = "an unknown step" if exported is None else f"step {exported}"
        aside = atomic_files.move_aside(final, "before")
        notify(
            f"{final} held the model of {of}, and the run goes on from step {self.step}: that model"
            f" is now {aside}"
        )

    @property
    def _has_final(self) -> bool:
        described = (self.path / FINAL / name for name in ("config.json", peft.CONFIG))
        return any(store.look(os.stat, file) for file in described)

    @property
    def _exported(self) -> int | None:
        """Returns the step of the model in `FINAL`: of the newest row, for no row is written beside
        an older model (`clear_final`). None where the rows cannot be read."""
        with suppress(UserError, IndexError):
            return int(read_metrics(self.path)[-1]["step"])
        return None


def provenance() -> dict[str, str]:
    """Returns the time, the host, the version of jaxrl, with the commit where it is a checkout, and
    the command of this process."""
    version, root = versions()["jaxrl"], Path(__file__).parents[2]
    about = [] if version == "unknown" else [version]
    if (root / ".git").exists():
        describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):  # no git, or a checkout of someone else
            commit = subprocess.check_output(
                describe, stderr=subprocess.DEVNULL, timeout=5, text=True
            )
            about.append(f"commit {commit.strip()}")
    program, *arguments = sys.orig_argv or ["python"]
    if arguments and Path(arguments[0]).name == "jaxrl":
        program, *arguments = arguments
    return {
        "at": time_stamp(),
        "host": socket.gethostname(),
        "version": ", ".join(about),
        "command": shlex.join([Path(program).name, *arguments]),
    }


def sessions(path: Path) -> list[JsonObject]:
    """Reads the sessions of the run in a folder, as far as its file can be read."""
    found = []
    with suppress(OSError):
        for line in read_file(path / SESSIONS_FILE).splitlines():
            with suppress(ValueError):
                found.append(parse_json(line))
    return [
        one
        for one in found
        if isinstance(one, dict)
        and type(one.get("step")) is int
        and isinstance(one.get("mesh"), str)
    ]


def stop_of(used: Sequence[JsonObject]) -> JsonObject | None:
    """Returns how code of the user's ended the newest session (`step`, `by`, `message`, `at`); None
    where it did not, or is not told so."""
    stopped = used[-1].get("stopped") if used else None
    if not isinstance(stopped, dict) or type(stopped.get("step")) is not int:
        return None
    return {"message": "", "at": "", "by": "", **stopped}


def stop_text(stopped: Mapping[str, object]) -> str:
    """Returns who ended a run early, and why: `by on_step: good enough`."""
    message = str(stopped["message"])
    return f"by {stopped['by']}{': ' if message else ''}{message}"


def changes_of(used: Sequence[JsonObject]) -> dict[int, list[str]]:
    """Maps the step after which a session began to what had changed since the one before."""
    found: dict[int, list[str]] = {}
    for one in used:
        changed = one.get("changed")
        if isinstance(changed, list) and changed:
            found[one["step"]] = [str(text) for text in changed]
    return found


def meshes(used: Sequence[JsonObject]) -> str:
    """Returns the meshes of sessions, one after the other: `A to step 300, then B`."""
    text, mesh = "", None
    for one in used:
        if one["mesh"] != mesh:
            text += f" to step {one['step']}, then {one['mesh']}" if text else str(one["mesh"])
            mesh = one["mesh"]
    return text


@contextmanager
def open_run_dir(config: Config, depends: Mapping[str, str]) -> Iterator[RunDir]:
    """Opens the folder of the run, made or taken up as `resume` says; no other process may use it
    meanwhile.

    Args:
        depends: what the run depends on -> its digest: of another state of it the run resumes only
            with `resume_changed`.

    Raises:
        UserError: it cannot be made or written, is in use, or holds another run.
    """
    path = check_run_dir(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={path} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"run_dir={path} cannot be written to: name another")
    with closing(Lock(path)) as lock:
        found = replace(find_run(path, config, depends), lock=lock)
        if lock.unlocked is not None:
            note = (
                f"{path} cannot be locked: {lock.unlocked}. Nothing keeps a second run out: start"
                " no other one there"
            )
            found = replace(found, notes=(note, *found.notes))
        yield found


def check_run_dir(config: Config) -> Path:
    """Returns the folder that the run would use; nothing is made or changed.

    Raises:
        UserError: `resume` does not allow what it holds, or something else is in its place, or in
            that of a checkpoint.
    """
    path = config.run_path
    there = next((place for place in (path, *path.parents) if os.path.lexists(place)), Path())
    if not there.is_dir():
        raise UserError(f"run_dir={path} cannot be made: {there} is no folder")
    atomic_files.check_replaceable(path / FINAL)
    held = _holds_run(path)
    if config.resume == "must" and not held:
        raise UserError(f"run_dir={path} holds no run to resume, and resume=must")
    if config.resume != "never" or not held:
        store.check_places(path, config.steps)
        return path
    if config.run_dir is not None:
        raise UserError(
            f"run_dir={path} holds a run already, and resume=never: name another, or move it away"
        )
    number = 2
    while _holds_run(path.with_name(f"{path.name}-{number}")):
        number += 1
    return path.with_name(f"{path.name}-{number}")


def _holds_run(path: Path) -> bool:
    """Returns whether there is anything to lose. Raises UserError where that cannot be told now."""
    return bool(store.folders(path)) or _has_lines(path / METRICS_FILE)


def _has_lines(file: Path) -> bool:
    try:
        found = os.stat(file)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # or a link to nothing
            return False
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


class Lock:
    """That a run directory is this process's. The lock is the kernel's: it ends with the process,
    however that ends.
    """

    def __init__(self, run_dir: Path):
        """Raises UserError where another process holds it, or it cannot be written."""
        self.path = run_dir / LOCK
        self.unlocked: str | None = None
        """Why the file system has no locks, where it has none: nothing keeps another run out."""
        # The file is cut below: one that a link leads to is not ours.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = open(os.open(self.path, flags, 0o666), "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"run_dir={run_dir} cannot be written to: {why}") from error
        try:
            self.unlocked = atomic_files.lock_file(self._file)
        except BlockingIOError as error:
            with self._file:
                self._file.seek(0)
                holder = self._file.read().strip() or "another process"
            if holder == f"pid {os.getpid()} on {socket.gethostname()}":
                holder += " (this process: `close()` ends a session)"
            raise UserError(f"run_dir={run_dir} is in use by {holder}: name another") from error
        with suppress(OSError):  # a full disk: the lock holds without a name in it
            self._file.truncate(0)
            self._file.write(f"pid {os.getpid()} on {socket.gethostname()}")
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def in_place(self) -> bool:
        """Returns whether the lock still has its name: without, the folder may be another run's."""
        return is_in_place(self.path, self._file)


def check_folder(folder: RunDir, files: Mapping[str, LineFile]) -> None:
    """Checks that the folder is still this run's, before it writes a checkpoint there.

    Raises:
        RunError: somebody removed or replaced its lock or one of these files.
    """
    gone = [name for name, file in files.items() if not file.in_place()]
    if folder.lock is not None and not folder.lock.in_place():
        gone.append(LOCK)
    if gone:
        raise RunError(
            f"files of {folder.path} were removed or replaced during the run: {', '.join(gone)}."
            " The run ends before it writes over what may be another one's; the same command goes"
            " on from the newest checkpoint that is left"
        )


def recorded_config(config: Config) -> JsonObject:
    """Returns the config of the run that this one would resume, as a mapping; empty if this one
    starts a run, or if that config cannot be read, which `find_run` reports."""
    if config.resume == "never" or not _holds_run(config.run_path):
        return {}
    with suppress(UserError):
        return _written_config(config.run_path) or {}
    return {}


def with_date(config: Config) -> Config:
    """Returns the config with the date that chat templates show: its own, that of the run that it
    resumes, or today's."""
    if config.data.chat_date is not None:
        return config
    recorded = recorded_config(config)
    day = chat_date_of(recorded) if recorded else today()
    return config.model_copy(update={"data": config.data.model_copy(update={"chat_date": day})})


def _written_config(path: Path) -> JsonObject | None:
    # The newest checkpoint's says what was trained; the folder's own may be of an attempt since.
    for folder in store.folders(path):
        with suppress(UserError):  # damaged, as `store.newest` will find
            store.verify(store.read(folder), only=store.CONFIG)
            return yaml_text.read_mapping(folder / store.CONFIG)
    written = path / CONFIG_FILE
    return yaml_text.read_mapping(written) if written.is_file() else None


def find_run(path: Path, config: Config, depends: Mapping[str, str]) -> RunDir:
    """Finds what the folder holds to resume from; no other process may use it meanwhile."""
    held = _holds_run(path)
    notes: list[str] = []
    changed: list[Change] = []
    written = _written_config(path) if held else None
    if written is not None:
        changed = compare(written, config, path)
    swept = store.sweep(path)
    if swept:
        notes.append(f"removed an unfinished checkpoint: {', '.join(p.name for p in swept)}")
    checkpoint = store.newest(path, notes.append)
    if checkpoint is None:
        found = f"{path} holds a run that wrote no checkpoint"
        if held and config.resume == "must":
            raise UserError(f"{found}, and resume=must")
        if hf.model_files(path / FINAL):
            raise UserError(
                f"run_dir={path} holds a trained model ({path / FINAL}) and no checkpoint to"
                " resume from; to start would delete it: name another run_dir, or move it away"
            )
        if held:
            notes.append(f"{found}: it starts over")
        return RunDir(path, None, tuple(notes), depends)
    manifest = checkpoint.manifest
    names = changes(manifest.digests, dict(depends))
    for decided in [change for change in changed if change.decides]:
        for name in [name for name in names if name.startswith(decided.decides)]:
            names.remove(name)
            notes.append(f"what {name} names is not compared: {decided.what} is another too")
    if refused := [name for name in names if not allows(config, name)]:
        keys = ",".join(sorted({key.path for name in refused if (key := key_within(name))}))
        raise UserError(
            f"run_dir={path}: what {' and '.join(refused)} names has changed since step"
            f" {checkpoint.step} of the run there; put it back, name another run_dir, or set"
            f" resume_changed=true (or [{keys}] alone) to resume with the present contents"
        )
    changed += [change_of(name) for name in names]
    here = versions()
    changed += [
        Change(name, f"{name} {manifest.versions[name]} there, {here[name]} now")
        for name in changes(manifest.versions, here)
    ]
    notes.append(f"resuming from step {checkpoint.step} of {config.steps} ({checkpoint.path})")
    notes += [f"changed since: {change.text}" for change in changed]
    return RunDir(path, checkpoint, tuple(notes), depends, tuple(changed))
