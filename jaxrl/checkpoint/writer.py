"""Writes checkpoints beside training: the loop hands over futures, one thread does the rest.

The arrays of a role are written and read through Orbax; batches that were generated but not yet
trained on are files without pickle. Their prompts are not stored, for batch I of the data is a pure
function of I, but those that environments began are. Rows are padded for the mesh of the run that
resumes.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxrl.checkpoint import store
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import RunError, Stopped, UserError
from jaxrl.process.json_types import JsonObject
from jaxrl.types import Completion, Prompt, Rollout, Row, Tree, Turn

logging.getLogger("absl").setLevel(logging.CRITICAL)  # what Orbax logs, it raises as well


@dataclass(frozen=True)
class _QuietLateWrites:
    """Drops what TensorStore's threads print where a save has failed: each of its writes that ends
    after that finds the event loop of Orbax closed. `Saving.wait` raises why it failed."""

    before: Callable[[Any], object]
    """The hook that is asked about everything else."""

    def __call__(self, unraisable: Any) -> None:
        is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
        if not (is_foreign and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)


@dataclass(eq=False)
class Saving:
    """A save that is being written while its role works on. Any thread may wait, at any time."""

    finish: Callable[[], object] | None = None
    """Waits for the end of the writing; None once it was called."""
    failed: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def wait(self) -> None:
        """Waits until everything is on disk. Raises what went wrong."""
        with self._lock:
            finish, self.finish = self.finish, None
            if finish is not None:
                try:
                    finish()
                except Exception as error:
                    self.failed = error
        if self.failed is not None:
            raise self.failed


FAR_S = 10**9
"""Seconds, beyond any jump of a clock."""


def save_arrays(path: Path, items: Mapping[str, Tree]) -> Saving:
    """Writes named trees (of `jax.Array`, or of plain numbers) to the new folder `path`.

    Returns once the arrays have left the devices: they may be donated then. Raises nothing: a disk
    that refuses is no reason to stop training, so `Saving.wait` raises it. Processes that share the
    arrays' mesh must all call, with one folder that all of them see.
    """
    try:
        from orbax.checkpoint import v1 as orbax  # it takes seconds to import

        if not isinstance(sys.unraisablehook, _QuietLateWrites):
            sys.unraisablehook = _QuietLateWrites(sys.unraisablehook)
        path.parent.mkdir(parents=True, exist_ok=True)  # else Orbax leaves threads that wait
        # Orbax compares times of day, which may jump; `deadlines.checkpoint` bounds the wait.
        steady = orbax.options.AsyncOptions(
            timeout_secs=FAR_S, create_directories_asynchronously=False
        )
        with orbax.Context(async_options=steady):
            return Saving(orbax.save_checkpointables_async(path.resolve(), dict(items)).result)
    except Exception as error:
        return Saving(failed=error)


def load_arrays(path: Path, abstract: Mapping[str, Tree]) -> dict[str, Tree]:
    """Reads the named trees, each array with the shape, dtype and sharding that `abstract` asks.

    Args:
        abstract: trees of `jax.ShapeDtypeStruct` with shardings; None for plain numbers. Trees
            that are not named are not read.

    Raises:
        UserError: an array there has another shape, as the state of an optimizer that another
            version of jaxrl wrote.
    """
    from orbax.checkpoint import v1 as orbax

    try:
        return orbax.load_checkpointables(path.resolve(), dict(abstract))
    except Exception as error:
        message = f"{error} {error.__cause__ or error.__context__}"
        shapes = re.search(r"Requested shape: (\(.*?\)) .*? stored shape: (\(.*?\))", message)
        if shapes is None:
            raise
        raise UserError(
            f"{path}: an array of the checkpoint has the shape {shapes[2]}, this run needs"
            f" {shapes[1]}: another version of jaxrl kept the state of its optimizer in other"
            f" shapes; begin a run from its weights, with student.model={path.parent}"
        ) from error


class _Abandoned(Exception):
    """The writer of a checkpoint may not touch the folder any more."""


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


@dataclass(frozen=True)
class Written:
    """A checkpoint that was finished."""

    step: int
    nbytes: int
    started: float
    finished: float
    """`time.monotonic` seconds."""


def _worth(row: Row) -> float | None:
    """Returns the figure that ranks checkpoints: the accuracy of an evaluation, or its reward
    by an environment where nothing else judges; None without an evaluation."""
    return row.get("eval/accuracy", row.get("eval/environment_reward"))


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
        check: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            depends: what else the run depends on -> its digest.
            check: makes sure that the folder is this run's; raises RunError where it is not.
            describe: writes the config and the tokenizer of the policy into a folder.
        """
        self.run_dir, self.config = run_dir, config
        self._folders = run_dir / store.FOLDER
        self.newest: int | None = None
        """Step of the newest checkpoint that this process finished, or resumed from."""
        self._fingerprint, self._describe, self._notify = fingerprint, describe, notify
        self._depends, self._check = dict(depends or {}), check
        self._pending: dict[int, Pending] = {}
        self._row: Row = {}
        """The latest row that was written."""
        self.written: list[Written] = []
        """Those finished, until somebody takes them out."""
        self._acting, self._abandoned = threading.Lock(), False
        self._queue: queue.SimpleQueue[tuple[Pending, Row] | threading.Event | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint follows batch `step` - 1, which has just been trained."""
        every = self.config.checkpoint.every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def folder(self, step: int) -> Path:
        """Returns where a new checkpoint goes."""
        self._check()
        return self._folders / str(step)

    def begin(
        self,
        step: int,
        saved: PendingResult[str | None],
        rollouts: Mapping[int, PendingResult[Rollout]],
        schedule: JsonObject,
    ) -> None:
        """Notes that the actor has been asked to save what it is after `step` batches."""
        pending = Pending(step, time.monotonic(), saved, rollouts, schedule)
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
        elif row["step"] == self.newest and _worth(row) is not None:  # made up for after a resume
            try:
                store.judge(self._folders / str(row["step"]), _worth(row))
            except (OSError, UserError) as error:
                self._notify(
                    f"the accuracy of checkpoint {row['step']} could not be noted: {error}"
                )

    def finish(self, timeout: float) -> None:
        """Waits for the checkpoints that are due, for at most `timeout` seconds; takes more."""
        reached = threading.Event()
        self._queue.put(reached)
        end = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < end and not reached.wait(0.1):
            pass

    def stop(self) -> None:
        """Takes no more checkpoints; those under way are finished."""
        self._queue.put(None)

    def close(self, timeout: float) -> None:
        """Waits for the checkpoints under way, for at most `timeout` seconds."""
        self.stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._notify(f"a checkpoint is still unwritten after {timeout:g} s: it is abandoned")

    def abandon(self) -> None:
        """Ends whatever is under way: from here on nothing is written, removed or told, however
        late an answer comes, for the folder may be another run's."""
        with self._acting:
            self._abandoned = True
        self.stop()

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        """Keeps `abandon` waiting during this block, which is to be short. Raises _Abandoned after
        it."""
        with self._acting:
            if self._abandoned:
                raise _Abandoned
            yield

    def _run(self) -> None:
        with suppress(_Abandoned):
            while (job := self._queue.get()) is not None:
                if isinstance(job, threading.Event):
                    job.set()
                    continue
                pending, row = job
                try:
                    self._write(pending, row)
                except Exception as error:  # a deadline too: it has ended since, only late
                    if isinstance(error, RunError) and not isinstance(error, TimeoutError):
                        return  # a worker has failed: the run is about to end and says why
                    with self._allowed():
                        self._failed(pending.step, error)
                    continue
                with self._allowed():
                    self._prune()

    def _prune(self) -> None:
        c = self.config.checkpoint
        try:
            store.prune(self.run_dir, c.keep_last, c.keep_best)
        except (OSError, UserError) as error:
            self._notify(f"old checkpoints could not be removed: {error}")

    def _write(self, pending: Pending, row: Row) -> None:
        folder = self._folders / str(pending.step)
        if (problem := pending.saved.result()) is not None:
            raise OSError(problem)
        rollouts: dict[int, Rollout] = {}
        with suppress(Stopped):  # code of the user's ended the run before this batch was made
            for index, made in pending.rollouts.items():
                rollouts[index] = made.result()
        schedule = pending.schedule | {"generated": pending.step + len(rollouts)}
        with self._allowed():
            for index, rollout in rollouts.items():
                of_episodes = self.config.environment.name is not None
                save_rollout(folder / store.rollout_file(index), rollout, of_episodes)
            self._describe(folder / store.MODEL)
            (folder / store.CONFIG).write_text(self.config.dump(), encoding="utf-8")
            self._check()
        next_batch = schedule["generated"]
        manifest = store.Manifest(
            step=pending.step,
            optimizer_step=int(row["optimizer_step"]),
            in_flight=tuple(rollouts),
            schedule=schedule,
            data={
                "seed": self.config.seed,
                "next_batch": next_batch,
                "next_prompt": next_batch * self.config.batch_size,
                "epoch": row["data/epoch"],
                "fingerprint": self._fingerprint,
            },
            accuracy=_worth(row),
            versions=versions(),
            depends=self._depends,
        )
        nbytes = store.commit(folder, manifest, self._allowed()).manifest.nbytes
        self.newest = pending.step
        self.written.append(Written(pending.step, nbytes, pending.started, time.monotonic()))

    def _failed(self, step: int, error: Exception) -> None:
        store.discard(self._folders / str(step))
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


WORDS, COUNTS = (
    ("text", "opening", "finish_reason", "failure"),
    ("decode_steps", "sent_back", "read_again"),
)
"""Fields of completions and of a batch that are words and numbers in its file, and (`NUMBERS`)
those of each token, in one array of all completions."""
NUMBERS = {"tokens": np.int32, "logprobs": np.float32, "sampler_logprobs": np.float32}


def save_rollout(path: Path, rollout: Rollout, of_episodes: bool = False) -> None:
    """Writes the completions of a batch, in order, to an `.npz`.

    Args:
        of_episodes: whether they are episodes, which may not have had a turn yet.
    """
    completions = rollout.completions
    begun = None  # the prompts of episodes, as their environments began them
    if of_episodes or any(completion.turns for completion in completions):
        begun = [
            {
                "tokens": list(p.tokens),
                "text": p.text,
                "messages": p.columns.get("messages"),
                "conversational": p.conversational,
            }
            for p in {prompt.id: prompt for prompt in rollout.prompts}.values()
        ]
    words = {
        **{f"{name}s": [getattr(completion, name) for completion in completions] for name in WORDS},
        "turns": [[asdict(turn) for turn in completion.turns] for completion in completions],
        "versions": [completion.versions for completion in completions],
        "prompts": begun,
        **{name: getattr(rollout, name) for name in ("policy_version", *COUNTS)},
    }
    arrays = {
        name: np.concatenate([np.asarray(getattr(c, name), dtype) for c in completions])
        for name, dtype in NUMBERS.items()
    }
    arrays["lengths"] = np.array([len(c.tokens) for c in completions], np.int32)
    # Messages of the data may have what JSON has not, and no checkpoint is lost for it.
    arrays["words"] = np.frombuffer(json.dumps(words, default=repr).encode(), np.uint8)
    if rollout.student_topk is not None:
        arrays["student_topk"] = np.asarray(rollout.student_topk)[: len(completions)]
    if rollout.experts is not None:
        # Of a completion that was not begun, each is -1.
        pairs = zip(rollout.experts, rollout.sequences.mask, strict=True)
        recorded = [chosen[mask][:-1] for chosen, mask in pairs]
        arrays["experts"] = np.concatenate(recorded[: len(completions)])
    np.savez(path, allow_pickle=False, **arrays)


def load_rollout(path: Path, prompts: Sequence[Prompt], packing: Mapping[str, int]) -> Rollout:
    """Loads the batch of `prompts` that `save_rollout` wrote.

    Args:
        packing: `pad_id`, widths and `row_multiple` of `make_rollout`.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    words = json.loads(arrays["words"].tobytes())
    if words.get("prompts") is not None:
        pairs = zip(prompts, words["prompts"], strict=True)
        prompts = [
            replace(
                prompt,
                tokens=tuple(begun["tokens"]),
                text=begun["text"],
                columns={n: v for n, v in prompt.columns.items() if n != "messages"}
                | ({} if begun["messages"] is None else {"messages": begun["messages"]}),
                conversational=begun.get("conversational", prompt.conversational),
            )
            for prompt, begun in pairs
        ]
    ends = np.cumsum(arrays["lengths"])[:-1]
    pieces = [np.split(arrays[name], ends) for name in NUMBERS]
    group = len(arrays["lengths"]) // len(prompts)
    nothing = [None] * len(arrays["lengths"])  # what batches of older checkpoints say
    recorded: Sequence[np.ndarray | None] = nothing
    if "experts" in arrays:
        read = np.repeat([len(prompt.tokens) - 1 for prompt in prompts], group)
        recorded = np.split(arrays["experts"], np.cumsum(read + arrays["lengths"])[:-1])
    said = zip(*(words.get(f"{name}s", nothing) for name in WORDS), strict=True)
    completions = [
        Completion(
            tuple(tokens.tolist()),
            *logprobs,
            **dict(
                {name: word for name, word in zip(WORDS, of, strict=True) if word is not None},
                turns=tuple(Turn(**t | {"roles": (*t.get("roles", ()),)}) for t in turns or ()),
                versions=tuple((at, version) for at, version in versions or ()),
                experts=experts,
            ),
        )
        for tokens, *logprobs, of, turns, versions, experts in zip(
            *(*pieces, said, words.get("turns", nothing), words.get("versions", nothing), recorded),
            strict=True,
        )
    ]
    groups = [completions[i * group : (i + 1) * group] for i in range(len(prompts))]
    rollout = make_rollout(prompts, groups, policy_version=words["policy_version"], **packing)
    topk = arrays.get("student_topk")
    if topk is not None:
        extra = len(rollout.sequences.tokens) - len(topk)
        topk = np.pad(topk, ((0, extra), (0, 0), (0, 0)))
    return replace(rollout, **{name: words.get(name, 0) for name in COUNTS}, student_topk=topk)
