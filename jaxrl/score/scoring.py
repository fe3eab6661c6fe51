"""Scores the rows of a run's data once, batch by batch as the run would, and stores what it finds.

The batches are the run's own, in its order: where a batch of the run is scored here in the same
company, its scores are the live teacher's bit for bit.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl.algorithms.protocols import TeacherRole
from jaxrl.checkpoint.digest import digest_model
from jaxrl.checkpoint.source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.batch import data_rollout
from jaxrl.errors import RunError, UserError
from jaxrl.models.kernels import CPU, default_dtype, target_of
from jaxrl.plan.inputs import PlanInputs
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.streams import Output
from jaxrl.run.job import Job, make_job
from jaxrl.run.launch import make_teacher
from jaxrl.run.run_dir import LOCK, Lock
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import ensure_devices, role_meshes
from jaxrl.sharding.parts import join_parts
from jaxrl.sharding.placement import check_visible, parse, place
from jaxrl.teacher.cache import (
    FORMAT,
    HEAD,
    MANIFEST,
    TEACHER,
    ScoreCache,
    ScoredRow,
    ScoreManifest,
    ScoreWriter,
    StorageError,
    Stored,
    dequantised,
    in_storage,
    key_of,
    read_manifest,
    shapes_of,
    token_bytes,
    write_manifest,
)
from jaxrl.teacher.protocol import Options
from jaxrl.telemetry.console import format_seconds
from jaxrl.types import Rollout, TeacherSignal

GB = 1e9
EVERY_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""
MEASURED = 4096
"""Tokens of the sample on which the error of storage is measured, at most."""
Log = Callable[[str], None]


@dataclass(frozen=True)
class Remaining:
    """What is still to be scored."""

    batches: tuple[int, ...]
    """Those of the run that hold a row without scores."""
    rows: int
    """Such rows; of prompts with samples each sample is one."""
    tokens: int
    """Their tokens; of samples that are still to be made, the most there can be."""
    stored: int
    """Rows that have scores already."""


@dataclass(frozen=True)
class Scoring:
    """A teacher on its devices, and the data that it scores."""

    config: Config
    job: Job
    source: ModelSource
    mesh: Mesh
    axes: Axes
    folder: Path
    stored: Stored

    @property
    def samples(self) -> int:
        """The teacher's samples of each prompt; 0: the completions are the data's."""
        return self.config.group_size if self.config.distill.seq_kd else 0

    @property
    def manifest(self) -> ScoreManifest:
        return ScoreManifest(
            format=FORMAT,
            model=self.source.name,
            digest=digest_model(self.source.path),
            dtype=self.config.teacher.compute_dtype,
            stored=self.stored,
            options=Options.of(self.config.distill, self.job.vocab_size),
            samples=self.samples,
        )

    @property
    def batches(self) -> Iterable[int]:
        """Batches that hold the rows: those of an epoch; of the run, where a task makes the
        rows."""
        return range(self.config.steps) if self.job.train.procedural else itertools.count()

    def work(self, cache: ScoreCache | None) -> Remaining:
        """
        Args:
            cache: what is there already.
        """
        batches: dict[int, None] = {}
        seen: set[bytes] = set()
        rows = tokens = stored = 0
        for index, prompt in self.job.train.rows(self.batches):
            completion = () if self.samples else prompt.completion or ()
            key = key_of(prompt.tokens, completion)
            if key in seen:
                continue
            seen.add(key)
            n = self.samples or 1
            if cache is not None and _there(cache, prompt.tokens, completion, self.samples):
                stored += n
                continue
            batches[index] = None
            rows += n
            tokens += n * (self.config.max_new_tokens if self.samples else len(completion))
        return Remaining(tuple(batches), rows, tokens, stored)

    def scored(self, teacher: TeacherRole, index: int) -> tuple[Rollout, TeacherSignal]:
        """The completions of a batch, and their scores on the host."""
        config, prompts = self.config, self.job.train.batch(index)
        if self.samples:
            rollout = teacher.generate(prompts, index)
        else:
            setup = self.job.for_workers({"teacher": self.axes}, self.folder)
            packing = setup.packing(target_of(self.mesh.devices.flat))
            rollout = data_rollout(prompts, decode=lambda tokens: "", **packing)
        n = config.teacher.num_microbatches
        parts = [jax.device_get(teacher.score(rollout, part, n)) for part in range(n)]
        return rollout, join_parts(parts)

    def rows(self, rollout: Rollout, signal: TeacherSignal) -> Iterator[list[ScoredRow]]:
        """The rows of a batch, those of a prompt together."""
        arrays = in_storage(signal, self.stored)
        for _, members in itertools.groupby(
            range(len(rollout.completions)), lambda i: rollout.group_ids[i]
        ):
            group = []
            for i in members:
                completion = rollout.completions[i]
                n = len(completion.tokens)
                tensors = {name: x[i, :n].copy() for name, x in arrays.items()}
                if self.samples:
                    tensors["tokens"] = np.array(completion.tokens, np.int32)
                    tensors["logprobs"] = np.asarray(completion.logprobs, np.float32)
                    tensors["sampler_logprobs"] = np.asarray(
                        completion.sampler_logprobs, np.float32
                    )
                stopped = completion.finish_reason == "stop"
                group.append(
                    ScoredRow(rollout.prompts[i].tokens, completion.tokens, tensors, stopped)
                )
            yield group


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
    scoring, notes = prepare(config, Path(out).expanduser(), dtype)
    folder = scoring.folder
    for note in (*notes, *scoring.job.data_notes()):
        log(note)
    check_folder(folder, scoring.manifest, make=True)
    with closing(Lock(folder, "--out ")):
        cache = ScoreCache(folder) if (folder / MANIFEST).exists() else None
        work = scoring.work(cache)
        shapes = shapes_of(scoring.manifest, scoring.source.config.d_model)
        log(size_of(work, token_bytes(shapes), scoring, cache is None))
        if work.batches:
            with _disk(folder):
                _score_all(scoring, work, cache, log)
        done = ScoreCache(folder)
    log(f"{len(done)} rows in {folder}, after {format_seconds(time.monotonic() - began)}")
    return done


def prepare(config: Config, folder: Path, dtype: Stored | None) -> tuple[Scoring, list[str]]:
    """All that can be checked before a weight is read, and messages about it."""
    enable_compile_cache(config.compile_cache)
    assert config.teacher.model is not None, "the rules of a config with a teacher"
    source, student = resolve_model(config.teacher.model), resolve_model(config.student.model)
    known = parse(config.mesh).roles
    seen = ensure_devices(len(known["teacher"].devices) if "teacher" in known else 1)
    n = 1 if seen.emulated else len(seen.devices)
    if "teacher" in known:
        n = len(known["teacher"].devices)
    placement = check_visible(place(f"teacher={n}", ("teacher",)), len(seen.devices))
    inputs = PlanInputs(
        placement, ("teacher",), student.config, source.config, (None,) * len(placement.pools), CPU
    )
    axes = inputs.axes(config)
    mesh = role_meshes(seen.devices, placement, axes)["teacher"]
    config = config.with_dtypes(default_dtype(target_of(mesh.devices.flat)))
    own = config.teacher.compute_dtype
    stored = dtype or own if config.distill.signal == "hidden" else "float32"
    scoring = Scoring(config, make_job(config), source, mesh, axes["teacher"], folder, stored)
    about = f"{source.name}: {source.config.n_params:,} parameters, {own}, on {axes['teacher']}"
    return scoring, [about, *filter(None, [seen.note])]


def check_folder(folder: Path, manifest: ScoreManifest, make: bool = False) -> None:
    """Refuses a folder that holds anything but a part of these scores."""
    if (folder / MANIFEST).exists():
        there = read_manifest(folder, f"--out {folder}")
        for name in ("digest", "dtype", "stored", "samples"):
            _same(folder, name, there.model_dump()[name], manifest.model_dump()[name], there.model)
        before, now = there.options.model_dump(), manifest.options.model_dump()
        for name in before:
            if name != "chunk_tokens":
                _same(folder, f"distill.{name}", before[name], now[name], there.model)
        return
    own = (LOCK, TEACHER, HEAD)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder")
    other = [path.name for path in folder.glob("*") if path.name not in own]
    if other:
        raise UserError(
            f"--out {folder} holds {other[0]} and no {MANIFEST}: name a new folder, or one that"
            " this command wrote"
        )
    if make:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder} cannot be made: {error.strerror}") from error


def _same(folder: Path, name: str, there: object, now: object, model: str) -> None:
    if there == now:
        return
    if name == "digest":
        raise UserError(
            f"--out {folder} holds scores of {model}, whose files are not those of this teacher:"
            " name another folder"
        )
    raise UserError(
        f"--out {folder} holds scores with {name}={there}, now {name}={now} is asked for: name"
        f" another folder, or set {name}={there}"
    )


def size_of(work: Remaining, each: int, scoring: Scoring, first: bool) -> str:
    """What is about to be written, in words.

    Args:
        each: bytes of a token on disk.
        first: the teacher's LM head is still to be written too.

    Raises:
        UserError: the disk has less room than that.
    """
    config, d = scoring.source.config, scoring.config.distill
    size = work.tokens * each
    if first and d.signal == "hidden":
        itemsize = jnp.dtype(scoring.config.teacher.compute_dtype).itemsize
        size += config.vocab_size * config.d_model * itemsize
    free = shutil.disk_usage(scoring.folder).free
    most = "at most " if scoring.samples else ""
    text = (
        f"{work.rows} rows to score, {work.stored} stored already; {most}{work.tokens:,} tokens of"
        f" {each:,} bytes, {most}{size / GB:.3g} GB to write, {free / GB:.3g} GB free"
    )
    if size > free and not scoring.samples:
        smaller = "--dtype int8 or --signal topk" if d.signal == "hidden" else "a smaller top_k"
        raise UserError(
            f"--out {scoring.folder}: {text}: make room, name a folder on another disk, or take"
            f" {smaller}"
        )
    return text


def _score_all(scoring: Scoring, work: Remaining, cache: ScoreCache | None, log: Log) -> None:
    setup = scoring.job.for_workers({"teacher": scoring.axes}, scoring.folder)
    teacher = cast(TeacherRole, make_teacher(setup, {"teacher": scoring.mesh}))
    if cache is None:
        _begin(scoring, teacher, work.batches[0], log)
    writer = ScoreWriter(scoring.folder)
    seen: set[bytes] = set()
    scored = 0
    try:
        with _progress(work.rows, log) as advance:
            for index in work.batches:
                rollout, signal = scoring.scored(teacher, index)
                for group in scoring.rows(rollout, signal):
                    prompt, completion = group[0].prompt, group[0].completion
                    key = key_of(prompt, () if scoring.samples else completion)
                    there = cache is not None and _there(cache, prompt, completion, scoring.samples)
                    if key in seen or there:
                        continue
                    seen.add(key)
                    writer.add(group)
                    scored += len(group)
                    advance(len(group))
        writer.flush()
    except KeyboardInterrupt:
        writer.flush()
        raise KeyboardInterrupt(
            f"interrupted: {work.stored + scored} of {work.stored + work.rows} rows are stored in"
            f" {scoring.folder}; the same command resumes"
        ) from None


def _there(
    cache: ScoreCache, prompt: tuple[int, ...], completion: tuple[int, ...], samples: int
) -> bool:
    if samples:
        return bool(cache.has_samples([prompt])[0])
    return bool(cache.has([(prompt, completion)])[0])


def _begin(scoring: Scoring, teacher: TeacherRole, first: int, log: Log) -> None:
    """Writes all but the rows: head, description of the teacher, and the error of storage, which is
    measured on a batch."""
    config, manifest, head = scoring.config, scoring.manifest, None
    if config.distill.signal == "hidden":
        head = np.asarray(scoring.source.load_head(None, jnp.dtype(manifest.dtype)))
        if scoring.stored not in (manifest.dtype, "float32"):
            rollout, signal = scoring.scored(teacher, first)
            real = np.asarray(rollout.sequences.loss_mask)
            hidden = np.asarray(signal.hidden)[real][:MEASURED]
            error = storage_error(hidden, scoring.stored, head[: scoring.job.vocab_size], config)
            log(f"hidden states in {scoring.stored}: {error}")
            manifest = manifest.model_copy(update={"error": error})
    tokenizer = scoring.source.tokenizer_path
    assert tokenizer is not None, "make_job has compared its tokens"
    write_manifest(scoring.folder, manifest, scoring.source.config, tokenizer, head)


def storage_error(
    hidden: np.ndarray, stored: Stored, head: np.ndarray, config: Config
) -> StorageError:
    """KL(P || P') of next-token distributions P of hidden states [n, D] and P' of what the disk
    holds of them, over the head [V, D], in nats."""
    arrays = in_storage(TeacherSignal(hidden=hidden), stored)
    kept = arrays["hidden"]
    back = dequantised(kept, arrays["scale"]) if stored == "int8" else kept
    back = back.astype(hidden.dtype)
    temperature, chunk = config.distill.distill_temperature, config.distill.chunk_tokens
    weights = jnp.asarray(head)
    each = [
        np.asarray(_kl(hidden[i : i + chunk], back[i : i + chunk], weights, temperature))
        for i in range(0, len(hidden), chunk)
    ]
    nats = np.concatenate(each).astype(np.float64)
    return StorageError(mean=float(nats.mean()), most=float(nats.max()), tokens=len(nats))


@jax.jit
def _kl(p: jax.Array, q: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
    """[n] nats, float32."""
    logits = partial(jnp.matmul, preferred_element_type=jnp.float32)
    log_p, log_q = (jax.nn.log_softmax(logits(x, head.T) / temperature) for x in (p, q))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
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


@contextmanager
def _progress(rows: int, log: Log) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line every few seconds; to be called with the rows scored."""
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
