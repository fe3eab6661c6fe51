"""A teacher on its devices, and the rows of a run's data that it scores.

The batches are the run's own, in its order: a row that the run meets in the same batch has the live
teacher's scores bit for bit. In the company of other rows a device may add in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algorithms.protocols import SamplingTeacherRole
from jaxrl.checkpoint.digest import digest_model
from jaxrl.checkpoint.model_source import ModelSource, resolve_model
from jaxrl.config.schema import Config
from jaxrl.config.settings import DistillConfig
from jaxrl.data.batch import data_rollout
from jaxrl.errors import UserError
from jaxrl.losses.layout import inverse, softcaps_of
from jaxrl.losses.vocabulary import VocabShard
from jaxrl.models.kernels import CPU, default_dtype, target_of
from jaxrl.plan.plan_inputs import PlanInputs
from jaxrl.process.compile_cache import enable_compile_cache
from jaxrl.run.check_inputs import longest_sequence
from jaxrl.run.job import Job, Setup, make_job
from jaxrl.run.names import fetch_models, with_commits
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import ensure_devices, role_meshes
from jaxrl.sharding.placement import check_visible, parse, place
from jaxrl.sharding.split_rows import join_parts
from jaxrl.teacher.cache import (
    FORMAT,
    ScoreCache,
    ScoredRow,
    ScoreManifest,
    StorageError,
    Stored,
    dequantised,
    in_storage,
)
from jaxrl.teacher.protocol import Options
from jaxrl.types import HiddenSignal, Rollout, TeacherSignal


@dataclass(frozen=True)
class Remaining:
    """What is still to be scored."""

    batches: tuple[int, ...]
    """Those of the run that hold something without scores."""
    keys: set[bytes]
    """Of what has no scores (`ScoreManifest.key`)."""
    rows: int
    """Completions to score, the teacher's own included."""
    tokens: int
    """Their tokens; of the teacher's own completions the most there can be."""
    stored: int
    """Completions that have scores already."""


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
        """Returns how many samples the teacher writes for each prompt; 0 means that the completions
        are the data's."""
        return self.config.group_size if self.config.distill.seq_kd else 0

    @cached_property
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
    def setup(self) -> Setup:
        """Returns what the teacher is made from."""
        return self.job.for_workers({"teacher": self.axes}, self.folder)

    @property
    def batches(self) -> Iterable[int]:
        """Batches that hold the rows: those of an epoch; of the run, where a task makes the
        rows."""
        return range(self.config.steps) if self.job.train.procedural else itertools.count()

    def remaining(self, cache: ScoreCache | None) -> Remaining:
        """
        Args:
            cache: what is there already.
        """
        batches: dict[int, None] = {}
        keys: set[bytes] = set()
        stored: set[bytes] = set()
        tokens, each = 0, self.samples or 1
        for index, prompt in self.job.train.rows(self.batches):
            prompt = prompt.to_sample if self.samples else prompt
            key = self.manifest.key(prompt.tokens, prompt.completion)
            if key in keys or key in stored:
                continue
            if cache is not None and cache.has([key])[0]:
                stored.add(key)
                continue
            keys.add(key)
            batches[index] = None
            longest = self.config.max_new_tokens
            tokens += each * longest if self.samples else len(prompt.completion or ())
        return Remaining(tuple(batches), keys, each * len(keys), tokens, each * len(stored))

    def scored(self, teacher: SamplingTeacherRole, index: int) -> tuple[Rollout, TeacherSignal]:
        """Scores a batch; returns its completions, and their scores on the host."""
        config, prompts = self.config, self.job.train.batch(index)
        if self.samples:
            rollout = teacher.generate([prompt.to_sample for prompt in prompts], index)
        else:
            packing = self.setup.packing(target_of(self.mesh.devices.flat))
            rollout = data_rollout(prompts, decode=lambda tokens: "", **packing)
        n = config.teacher.num_microbatches
        parts = [jax.device_get(teacher.score(rollout, part, n)) for part in range(n)]
        return rollout, join_parts(parts)

    def rows(self, rollout: Rollout, signal: TeacherSignal) -> Iterator[list[ScoredRow]]:
        """Yields the rows of a batch, those of a prompt together."""
        arrays, each = in_storage(signal, self.stored), self.samples or 1
        for first in range(0, len(rollout.completions), each):
            group = []
            for i in range(first, first + each):
                one, prompt = rollout.completions[i], rollout.prompts[i].tokens
                tensors = {name: x[i, : len(one.tokens)].copy() for name, x in arrays.items()}
                if self.samples:
                    tensors |= {"logprobs": one.logprobs, "sampler_logprobs": one.sampler_logprobs}
                    tensors["tokens"] = np.array(one.tokens, np.int32)
                group.append(ScoredRow(prompt, one.tokens, tensors, one.finish_reason == "stop"))
            yield group


def prepare(config: Config, folder: Path, dtype: Stored | None) -> tuple[Scoring, list[str]]:
    """Prepares the scoring, with every check that is possible before a weight is read, and messages
    about it."""
    if config.teacher.tokenizer == "own":
        raise UserError(
            "teacher.tokenizer=own: scores on disk are of the student's own tokens; set it to"
            " student, and score with a teacher that has them"
        )
    enable_compile_cache(config.compile_cache)
    config, on_hub = with_commits(config)
    fetch_models(config)
    assert config.teacher.model is not None, "the rules of a config with a teacher"
    source, student = resolve_model(config.teacher.model), resolve_model(config.student.model)
    source = source.for_length(longest_sequence(config, teacher=True))
    placed = parse(config.mesh).roles.get("teacher")
    asked = None if placed is None else len(placed.devices)
    seen = ensure_devices(asked or 1)
    n = asked or (1 if seen.emulated else len(seen.devices))
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
    return scoring, [*on_hub, about, *filter(None, [seen.note])]


def storage_error(
    hidden: np.ndarray,
    stored: Stored,
    head: np.ndarray,
    distill: DistillConfig,
    softcap: float | None = None,
) -> StorageError:
    """Returns the KL(P || P') of next-token distributions P of hidden states [n, D] and P' of what
    the disk holds of them, over the head [V, D], in nats.

    Args:
        softcap: `DecoderConfig.final_softcap` of the teacher.
    """
    arrays = in_storage(HiddenSignal(hidden), stored)
    kept = arrays["hidden"]
    back = dequantised(kept, arrays["scale"]) if stored == "int8" else kept
    back = back.astype(hidden.dtype)
    chunk = distill.chunk_tokens
    model = jnp.asarray(head), inverse(distill.distill_temperature), softcaps_of(softcap)
    each = [
        np.asarray(_kl(hidden[i : i + chunk], back[i : i + chunk], *model))
        for i in range(0, len(hidden), chunk)
    ]
    nats = np.concatenate(each).astype(np.float64)
    return StorageError(mean=float(nats.mean()), most=float(nats.max()), tokens=len(nats))


@jax.jit
def _kl(
    p: jax.Array,
    q: jax.Array,
    head: jax.Array,
    scale: jax.Array,
    softcaps: tuple[jax.Array | None, ...],
) -> jax.Array:
    """Computes the KL [n], nats, float32."""
    whole = VocabShard(0, len(head), len(head), padded=False)
    log_p, log_q = (jax.nn.log_softmax(whole.logits(x, head, scale, *softcaps)) for x in (p, q))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
