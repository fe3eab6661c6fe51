"""Writes checkpoints beside training: the loop hands over futures, one thread does the rest."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, TypeVar

from jaxrl.checkpoint import store
from jaxrl.checkpoint.rollouts import save_rollout
from jaxrl.config.schema import Config
from jaxrl.errors import RunError, UserError
from jaxrl.process.json_types import JsonObject
from jaxrl.types import Rollout, Row

T_co = TypeVar("T_co", covariant=True)
PACKAGES = (
    "jaxrl", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "tokenizers", "transformers"
)  # fmt: skip


class PendingResult(Protocol[T_co]):
    """A future, as far as it is needed here."""

    def result(self) -> T_co: ...


@dataclass(frozen=True)
class Pending:
    """A checkpoint under way."""

    step: int
    started: float
    """`time.monotonic` seconds."""
    saved: PendingResult[str | None]
    """Ends when the actor's arrays are on disk; what went wrong, or None."""
    rollouts: Mapping[int, PendingResult[Rollout]]
    """Batches not yet trained on."""
    schedule: JsonObject
    removed: int
    """How often files of the run had been found removed when it began."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that was finished."""

    step: int
    nbytes: int
    started: float
    finished: float
    """`time.monotonic` seconds."""


class CheckpointWriter:
    """The checkpoints of one run.

    `begin` when the actor's save is queued, `row` once the row of that step is in `metrics.jsonl`:
    only then may a run resume from the checkpoint. A failure to write is reported; training
    continues, and the next checkpoint is tried.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        fingerprint: str,
        describe: Callable[[Path], None],
        notify: Callable[[str], None],
        depends: Mapping[str, str] | None = None,
        check: Callable[[], int] = lambda: 0,
    ):
        """
        Args:
            fingerprint: of the training data.
            depends: what else the run depends on -> its digest.
            check: makes sure that the folder is this run's, and returns how often files of it were
                found removed; may raise.
            describe: writes the config and the tokenizer of the policy into a folder.
            notify: takes what the user should know.
        """
        self.run_dir, self.config = run_dir, config
        self.newest: int | None = None
        """Step of the newest checkpoint that this process finished, or resumed from."""
        self._fingerprint, self._describe, self._notify = fingerprint, describe, notify
        self._depends, self._check = dict(depends or {}), check
        self._removed = 0
        self._pending: dict[int, Pending] = {}
        self._row: Row = {}
        """The latest row that was written."""
        self._written: list[Written] = []
        self._queue: queue.SimpleQueue[tuple[Pending, Row] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint follows batch `step` - 1, which has just been trained."""
        every = self.config.checkpoint.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def folder(self, step: int) -> Path:
        """Returns where a new checkpoint goes."""
        self._removed = self._check()
        return self._folder(step)

    def _folder(self, step: int) -> Path:
        return self.run_dir / store.FOLDER / str(step)

    def begin(
        self,
        step: int,
        saved: PendingResult[str | None],
        rollouts: Mapping[int, PendingResult[Rollout]],
        schedule: JsonObject,
    ) -> None:
        """Notes that the actor has been asked to save what it is after `step` batches."""
        now = time.monotonic()
        pending = Pending(step, now, saved, rollouts, schedule, self._removed)
        if self._row.get("step") == step:  # a run that was asked to end: the row came first
            self._queue.put((pending, self._row))
        else:
            self._pending[step] = pending

    def row(self, row: Row) -> None:
        """Notes that the row of a step has been written."""
        self._row = row
        pending = self._pending.pop(row["step"], None)
        if pending is not None:
            self._queue.put((pending, row))
        elif row["step"] == self.newest and "eval/accuracy" in row:  # made up for after a resume
            try:
                store.judge(self._folder(row["step"]), row["eval/accuracy"])
            except (OSError, UserError) as error:
                self._notify(
                    f"the accuracy of checkpoint {row['step']} could not be noted: {error}"
                )

    def forget_removed(self) -> None:
        """Forgets the newest checkpoint if it was removed: there is none any more."""
        if self.newest is not None and not (self._folder(self.newest) / store.MANIFEST).exists():
            self.newest = None

    def written(self) -> list[Written]:
        """Returns the checkpoints finished since the last call."""
        return [self._written.pop(0) for _ in range(len(self._written))]

    def stop(self) -> None:
        """Takes no more checkpoints; those under way are finished beside what comes next."""
        self._queue.put(None)

    def close(self, timeout: float) -> None:
        """Waits for the checkpoints under way, for at most `timeout` seconds."""
        self.stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._notify(f"a checkpoint is still unwritten after {timeout:g} s: it is abandoned")

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            pending, row = job
            try:
                self._write(pending, row)
            except TimeoutError as error:  # a deadline: it has ended since, only late
                self._failed(pending.step, error)
                continue
            except RunError:
                return  # a worker has failed: the run is about to end and says why
            except Exception as error:
                self._failed(pending.step, error)
                continue
            try:
                c = self.config.checkpoint
                store.prune(self.run_dir, c.keep_last, c.keep_best)
            except OSError as error:
                self._notify(f"old checkpoints could not be removed: {error}")

    def _write(self, pending: Pending, row: Row) -> None:
        folder = self._folder(pending.step)
        problem = pending.saved.result()
        if problem is not None:
            raise OSError(problem)
        for index, rollout in pending.rollouts.items():
            save_rollout(folder / store.rollout_file(index), rollout.result())
        self._describe(folder / store.MODEL)
        (folder / store.CONFIG).write_text(self.config.dump(), encoding="utf-8")
        if self._check() != pending.removed:
            raise OSError("files of the run were removed while it was written")
        next_batch = pending.schedule["generated"]
        manifest = store.Manifest(
            step=pending.step,
            optimizer_step=int(row["optimizer_step"]),
            in_flight=tuple(pending.rollouts),
            schedule=pending.schedule,
            data={
                "seed": self.config.seed,
                "next_batch": next_batch,
                "next_prompt": next_batch * self.config.batch_size,
                "epoch": row["data/epoch"],
                "fingerprint": self._fingerprint,
            },
            accuracy=row.get("eval/accuracy"),
            versions=versions(),
            depends=self._depends,
        )
        nbytes = store.commit(folder, manifest).manifest.nbytes
        self.newest = pending.step
        self._written.append(Written(pending.step, nbytes, pending.started, time.monotonic()))

    def _failed(self, step: int, error: Exception) -> None:
        store.remove(self._folder(step))
        why = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        last = "there is none yet" if self.newest is None else f"the newest one is {self.newest}"
        self._notify(
            f"checkpoint {step} could not be written: {why} ({free_gb(self.run_dir):.1f} GB are"
            f" free there). Training continues, and so does saving; {last}"
        )


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which the numbers of a run depend."""
    installed = dict.fromkeys(PACKAGES, "unknown")  # such as jaxrl on the path, but not installed
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def free_gb(path: Path) -> float:
    """Returns the free space on the disk of `path`, in units of 1e9 bytes; `path` may have been
    removed."""
    path = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(path).free / 1e9
