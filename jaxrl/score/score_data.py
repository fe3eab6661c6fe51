"""Scores the data of a run once, by a teacher on its devices, and stores the scores.

The batches are the run's own, in its order: a row that the run meets in the same batch has the live
teacher's scores bit for bit. In the company of other rows a device may add in another order.
"""

from __future__ import annotations

import itertools
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms.protocols import SamplingTeacherRole
from jaxrl.checkpoint.fingerprint import digest_model
from jaxrl.checkpoint.model_source import ModelSource, longest_sequence, resolve_model
from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.data.batch import data_rollout
from jaxrl.errors import RunError, UserError, user_path
from jaxrl.losses.chunked import VocabShard
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import CPU, default_dtype, target_of, try_kernels
from jaxrl.process import atomic_files
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.process.streams import Output
from jaxrl.roles.run_shapes import RunInputs
from jaxrl.run.job import Job, Setup, make_job
from jaxrl.run.launch import make_teacher
from jaxrl.run.names import fetch_models, with_commits
from jaxrl.run.run_dir import LOCK, Lock
from jaxrl.sharding.mesh import ensure_devices, role_meshes
from jaxrl.sharding.placement import check_visible, parse, place
from jaxrl.sharding.reshard import join_parts
from jaxrl.teacher import cache as scores
from jaxrl.teacher.protocol import Options
from jaxrl.telemetry.console import format_seconds
from jaxrl.types import Array, HiddenSignal, Rollout, TeacherSignal

EVERY_S = 10.0
"""Seconds between two lines of progress."""
MEASURED, MEASURED_TOKENS = 4, 4096
"""Most batches, and most tokens of them, on which the error of storage is measured."""
GB = 1e9


@dataclass(frozen=True)
class Scoring:
    """A teacher on its devices, and the data that it scores."""

    config: Config
    job: Job
    setup: Setup
    """What the teacher is made from."""
    source: ModelSource
    mesh: Mesh
    manifest: scores.ScoreManifest

    def scored(self, teacher: SamplingTeacherRole, index: int) -> tuple[Rollout, TeacherSignal]:
        """Scores a batch; returns its completions, and their scores on the host."""
        config, prompts = self.config, self.job.train.batch(index)
        if self.manifest.samples:
            rollout = teacher.generate([prompt.to_sample for prompt in prompts], index)
        else:
            packing = self.setup.packing(target_of(self.mesh.devices.flat))
            rollout = data_rollout(prompts, decode=lambda tokens: "", **packing)
        n = config.teacher.num_microbatches
        parts = [jax.device_get(teacher.score(rollout, part, n)) for part in range(n)]
        return rollout, join_parts(parts)

    def rows(self, rollout: Rollout, signal: TeacherSignal) -> list[list[scores.ScoredRow]]:
        """Returns the rows of a batch, those of a prompt together."""
        arrays, samples = scores.in_storage(signal, self.manifest.stored), self.manifest.samples
        rows = []
        for i, completion in enumerate(rollout.completions):
            tokens = completion.tokens
            tensors = {name: x[i, : len(tokens)].copy() for name, x in arrays.items()}
            if samples:
                tensors |= {name: getattr(completion, name) for name in scores.SAMPLED}
                tensors["tokens"] = np.array(tokens, np.int32)
            stopped = completion.finish_reason == "stop"
            rows.append(scores.ScoredRow(rollout.prompts[i].tokens, tokens, tensors, stopped))
        together = samples or 1
        return [rows[i : i + together] for i in range(0, len(rows), together)]


def prepare_scoring(
    config: Config, folder: Path, dtype: scores.Stored | None
) -> tuple[Scoring, list[str]]:
    """Prepares the scoring, with every check that is possible before a weight is read, and messages
    about it."""
    if config.teacher.tokenizer == "own":
        raise UserError(
            "teacher.tokenizer=own: stored scores are for the student's tokens; set it to student,"
            " and score with a teacher that has the same tokens"
        )
    enable_compile_cache(config.compile_cache)
    config, on_hub = with_commits(config)
    fetch_models(config)
    assert config.teacher.model is not None, "the rules of a config with a teacher"
    source, student = resolve_model(config.teacher.model), resolve_model(config.student.model)
    longest = longest_sequence(config, teacher=True)
    source = source.for_length(longest)
    placed = parse(config.mesh).roles.get("teacher")
    asked = None if placed is None else len(placed.devices)
    seen = ensure_devices(asked or 1)
    n = asked or (1 if seen.emulated else len(seen.devices))
    placement = check_visible(place(f"teacher={n}", ("teacher",)), len(seen.devices))
    inputs = RunInputs(placement, ("teacher",), student.config, source.config, CPU)
    axes = inputs.axes(config)
    mesh = role_meshes(seen.devices, placement, axes)["teacher"]
    config = config.with_dtypes(default_dtype(target_of(mesh.devices.flat)))
    own, distill, job = config.teacher.compute_dtype, config.distill, make_job(config)
    manifest = scores.ScoreManifest(
        format=scores.FORMAT,
        model=source.name,
        digest=digest_model(source.path),
        dtype=own,
        stored=dtype or own if distill.signal == "hidden" else "float32",
        options=Options.of(distill, job.vocab_size),
        samples=config.group_size if distill.seq_kd else 0,
        longest=longest,
        sampling=scores.sampling_of(config, job.eos_ids),
    )
    scoring = Scoring(config, job, job.for_workers(axes, folder), source, mesh, manifest)
    uses = [(dim, own, distill.seq_kd) for dim in source.config.head_dims]
    failed = try_kernels(mesh.devices.flat, uses)
    about = f"{source.name}: {source.config.n_params:,} parameters, {own}, on {axes['teacher']}"
    return scoring, [*on_hub, about, *filter(None, [seen.note]), *failed]


def storage_error(
    hidden: np.ndarray,
    stored: scores.Stored,
    head: np.ndarray,
    distill: DistillConfig,
    softcap: float | None = None,
) -> scores.StorageError:
    """Returns the KL(P || P') of next-token distributions P of hidden states [n, D] and P' of what
    the disk holds of them, over the head [V, D], in nats.

    Args:
        softcap: `DecoderConfig.final_softcap` of the teacher.
    """
    arrays = scores.in_storage(HiddenSignal(hidden), stored)
    kept = arrays["hidden"]
    back = scores.dequantised(kept, arrays["scale"]) if stored == "int8" else kept
    back, chunk = back.astype(hidden.dtype), distill.loss_chunk
    scale = 1 / jnp.asarray(distill.distill_temperature, jnp.float32)
    model = jnp.asarray(head), scale, None if softcap is None else jnp.float32(softcap)
    each = [
        np.asarray(_kl(hidden[i : i + chunk], back[i : i + chunk], *model))
        for i in range(0, len(hidden), chunk)
    ]
    nats = np.concatenate(each).astype(np.float64)
    return scores.StorageError(mean=float(nats.mean()), most=float(nats.max()), tokens=len(nats))


@jax.jit
def _kl(p: Array, q: Array, head: Array, scale: Array, softcap: Array | None) -> Array:
    """Computes the KL [n], nats, float32."""
    whole = VocabShard(0, len(head), len(head), padded=False, scale=scale)
    logits = [whole.logits(x, head, softcap) for x in (p, q)]
    log_p, log_q = (whole.logprobs(z, whole.normaliser(z)) for z in logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def store_scores(
    config: Config, out: str | Path, dtype: scores.Stored | None = None
) -> scores.ScoreCache:
    """Scores the data of a config, and stores what is not in the folder yet.

    Args:
        config: `teacher.model`, `data.*`, `distill.*`, `batch_size` and lengths count.
        out: the folder; one that holds a part of the same scores is continued.
        dtype: of stored hidden states; None: that of the teacher.

    Raises:
        UserError: bad input, or a folder that holds something else; nothing is scored then.
        RunError: the disk refuses; what was stored stays, and the same call resumes.
    """
    log, began, folder = Output(sys.stdout).line, time.monotonic(), user_path(out)
    scoring, notes = prepare_scoring(config, folder, dtype)
    manifest, train = scoring.manifest, scoring.job.train
    for note in (*notes, *scoring.job.data_notes()):
        log(note)
    open_folder(folder, manifest, scoring.source.config)
    try:
        lock = Lock(folder)
    except UserError as error:
        raise UserError(str(error).replace("run_dir=", "--out ", 1)) from None
    with closing(lock):
        cache = scores.ScoreCache(folder) if (folder / scores.MANIFEST).exists() else None
        # What has no scores in the folder, of an epoch; where a task makes the rows, of the run.
        each = manifest.samples or 1
        indices = range(scoring.config.steps) if train.procedural else itertools.count()
        batches, left, stored, tokens = dict[int, None](), set[bytes](), set[bytes](), 0
        for index, prompt in train.rows(indices):
            prompt = prompt.to_sample if manifest.samples else prompt
            key = manifest.key(prompt.tokens, prompt.completion)
            if key in left or key in stored:
                continue
            if cache is not None and cache.has(key):
                stored.add(key)
                continue
            left.add(key)
            batches[index] = None
            longest = scoring.config.max_new_tokens
            tokens += each * longest if manifest.samples else len(prompt.completion or ())

        d, model = scoring.config.distill, scoring.source.config
        free = shutil.disk_usage(folder).free
        shapes = scores.shapes_of(manifest, model.d_model).values()
        token_bytes = sum(jnp.dtype(dtype).itemsize * math.prod(dims) for dtype, dims in shapes)
        size = tokens * token_bytes
        if cache is None and d.signal == "hidden":
            size += model.vocab_size * model.d_model * jnp.dtype(manifest.dtype).itemsize
        most = "at most " if manifest.samples else ""
        text = (
            f"{each * len(left)} rows to score, {each * len(stored)} stored already;"
            f" {most}{tokens:,} tokens of {token_bytes:,} bytes, {most}{size / GB:.3g} GB to write,"
            f" {free / GB:.3g} GB free"
        )
        if size > free and not manifest.samples:
            smaller = "--dtype int8 or --signal topk" if d.signal == "hidden" else "a smaller top_k"
            raise UserError(
                f"--out {folder}: {text}: make room, name a folder on another disk, or take"
                f" {smaller}"
            )
        log(text)
        if left:
            try:
                _score_all(scoring, folder, [*batches], left, each * len(stored), cache is None)
            except OSError as error:
                free = shutil.disk_usage(folder).free
                raise RunError(
                    f"--out {folder} cannot be written to: {error.strerror or error}"
                    f" ({free / GB:.3g} GB are free there); the rows of complete shards are stored,"
                    " and the same command resumes once there is space"
                ) from error
        done = scores.ScoreCache(folder)
    log(f"{len(done)} rows in {folder}, after {format_seconds(time.monotonic() - began)}")
    return done


def _score_all(
    scoring: Scoring, folder: Path, batches: Sequence[int], left: set[bytes], stored: int, new: bool
) -> None:
    """Scores what is `left` of the batches, by its keys; `new`: the folder is empty yet."""
    teacher = cast(SamplingTeacherRole, make_teacher(scoring.setup, {"teacher": scoring.mesh}))
    config, manifest, log = scoring.config, scoring.manifest, Output(sys.stdout).line
    if new:
        head = None
        if config.distill.signal == "hidden":
            head = np.asarray(scoring.source.load_head(None, jnp.dtype(manifest.dtype)))
        if head is not None and manifest.stored not in (manifest.dtype, "float32"):
            parts = []
            for index in batches[:MEASURED]:
                rollout, signal = scoring.scored(teacher, index)
                assert isinstance(signal, HiddenSignal)
                parts.append(np.asarray(signal.hidden)[np.asarray(rollout.sequences.loss_mask)])
            hidden = np.concatenate(parts)[:MEASURED_TOKENS]
            shared = head[: scoring.job.vocab_size]
            cap = scoring.source.config.final_softcap
            error = storage_error(hidden, manifest.stored, shared, config.distill, cap)
            log(f"hidden states in {manifest.stored}: {error}")
            manifest = manifest.model_copy(update={"error": error})
        tokenizer = scoring.source.tokenizer_path
        assert tokenizer is not None, "make_job has compared its tokens"
        scores.write_manifest(folder, manifest, scoring.source.config, tokenizer, head)
    writer, rows, done = scores.ScoreWriter(folder), (manifest.samples or 1) * len(left), 0
    began = last = time.monotonic()
    try:
        for index in batches:
            for group in scoring.rows(*scoring.scored(teacher, index)):
                key = manifest.key(group[0].prompt, group[0].completion)
                if key in left:
                    writer.add(group)
                    left.remove(key)
                    done += len(group)
            if (now := time.monotonic()) - last >= EVERY_S and done:
                last, seconds = now, (now - began) / done * (rows - done)
                log(f"{done}/{rows} rows ({done / rows:.0%}), {format_seconds(seconds)} left")
        writer.flush()
    except KeyboardInterrupt:
        writer.flush()
        raise KeyboardInterrupt(
            f"interrupted: {stored + done} of {stored + rows} rows are stored in {folder}; the same"
            " command resumes"
        ) from None


def open_folder(folder: Path, manifest: scores.ScoreManifest, model: DecoderConfig) -> None:
    """Makes the folder. Raises UserError where it holds anything but a part of these scores, which
    are the model's."""
    if (folder / scores.MANIFEST).exists():
        there, holds = (
            scores.read_manifest(folder, f"--out {folder}"),
            f"--out {folder} holds scores",
        )
        if there.digest != manifest.digest:
            raise UserError(
                f"{holds} of {there.model}, whose files are not those of {manifest.model}: name"
                " another folder"
            )
        pairs: dict[str, tuple[object, object]] = {
            "teacher.dtype": (there.dtype, manifest.dtype),
            "--dtype": (there.stored, manifest.stored),
            "--samples": (there.samples, manifest.samples),
        }
        before, asked = there.options.decisive, manifest.options.decisive
        pairs |= {f"distill.{key}": (before[key], asked.get(key)) for key in before}
        if "distill.vocab_size" in pairs:
            pairs["tokens of student and teacher"] = pairs.pop("distill.vocab_size")
        sampling = there.sampling  # an older jaxrl did not note it
        pairs |= {key: (sampling.get(key, "?"), new) for key, new in manifest.sampling.items()}
        longest = there.longest or manifest.longest
        if longest and manifest.longest and not model.same_for_length(longest, manifest.longest):
            pairs["longest sequence"] = longest, manifest.longest
        for key, (old, new) in pairs.items():
            if old != new:
                raise UserError(f"{holds} with {key}={old}, not {new}: name another folder")
        return
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder")
    # By a command that was killed before it wrote the manifest.
    files = scores.HEAD, scores.CHECKSUMS
    left = (
        LOCK,
        scores.TEACHER,
        *files,
        *map(atomic_files.PARTIAL.format, (*files, scores.MANIFEST)),
    )
    other = [path.name for path in folder.glob("*") if path.name not in left]
    if other:
        raise UserError(
            f"--out {folder} holds {other[0]} and no {scores.MANIFEST}: name a new folder, or one"
            " that this command wrote"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be made: {error.strerror}") from error
