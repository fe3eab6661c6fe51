"""From a config to started roles: find the models, check that they fit together, place them, start
the workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms import ALGORITHMS, learns_from_data, prepare
from jaxrl.config import Config
from jaxrl.data.source import open_source
from jaxrl.data.stream import EvalSet, PromptStream
from jaxrl.data.tokenizer import check_same_prompts, check_same_vocabulary
from jaxrl.errors import UserError
from jaxrl.inputs import encoder, end_ids, held_out_sets, keys, pad_id, tokenizer_of
from jaxrl.model import ModelSource, resolve_model
from jaxrl.models.decoder import Layout
from jaxrl.rewards.verifiers import Verifier, verifier
from jaxrl.roles.actor import Actor
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.scorer import Scorer
from jaxrl.roles.teacher import Teacher
from jaxrl.runtime.local import LocalHandle, LocalWorker, stop_all
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.placement import Placement, device_list
from jaxrl.sharding.rules import param_shardings
from jaxrl.signals import Projection
from jaxrl.types import Prompt

Log = Callable[[str], None]
STOP_S = 10.0
"""Longest wait for the workers at the end of a run."""


@dataclass(frozen=True)
class Job:
    """What a run is about, before any weight is read: models, tokenizers, data. Everything in it
    fits together.
    """

    config: Config
    student: ModelSource
    teacher: ModelSource | None
    tokenizer: Any
    vocab_size: int
    """Tokens that student and teacher share."""
    train: PromptStream
    held_out: tuple[EvalSet, ...]
    judge: Verifier
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def held_out_prompts(self) -> tuple[Prompt, ...]:
        """Those of all sets, one after the other."""
        return tuple(prompt for one in self.held_out for prompt in one.prompts)

    def packing(self, row_multiple: int) -> dict[str, Any]:
        """How prompts and completions become arrays: arguments of `make_rollout`."""
        return {
            "pad_id": self.pad_id,
            "max_prompt_tokens": self.config.max_prompt_tokens,
            "max_new_tokens": self.config.max_new_tokens,
            "row_multiple": row_multiple,
        }

    @property
    def teacher_samples(self) -> bool:
        """Whether the teacher generates, for the student to learn from or for its own accuracy."""
        asked = self.config.distill.seq_kd or (self.config.eval.teacher and bool(self.held_out))
        return self.teacher is not None and asked


def make_job(config: Config) -> Job:
    """Reads configs, tokenizers and data. Raises UserError for what does not fit together."""
    student = resolve_model(config.student.model)
    teacher = None if config.teacher.model is None else resolve_model(config.teacher.model)
    tokenizer = tokenizer_of(student)
    vocab_size = student.config.vocab_size
    theirs = None
    if teacher is not None:
        theirs = tokenizer_of(teacher)
        vocab_size = check_same_vocabulary(
            tokenizer,
            theirs,
            student.config.vocab_size,
            teacher.config.vocab_size,
            student.config.eos_ids,
            teacher.config.eos_ids,
        )
    _check_sizes(config, student, teacher, vocab_size)
    eos_ids = end_ids(student, tokenizer)
    train, held_out = _data(config, tokenizer, eos_ids)
    if theirs is not None:
        prompts = [*train.batch(0), *(prompt for one in held_out for prompt in one.prompts)]
        check_same_prompts(tokenizer, theirs, prompts)
    return Job(
        config,
        student,
        teacher,
        tokenizer,
        vocab_size,
        train,
        held_out,
        verifier(config.data.verifier),
        eos_ids,
        pad_id(student, eos_ids),
    )


def _check_sizes(
    config: Config, student: ModelSource, teacher: ModelSource | None, vocab_size: int
) -> None:
    """Widths against the models' positions, and top-k against their vocabulary."""
    longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
    width = config.max_prompt_tokens + longest
    for role, source in (("student", student), ("teacher", teacher)):
        if source is not None and width > source.config.max_positions:
            raise UserError(
                f"max_prompt_tokens={config.max_prompt_tokens} and max_new_tokens={longest} make"
                f" {width} positions; {role}.model has {source.config.max_positions}"
            )
    d = config.distill
    asked = {"distill.top_k": d.top_k} if d.signal in ("topk", "student_topk") else {}
    if d.entropy_aware:
        asked["distill.entropy_top_k"] = d.entropy_top_k
    for key, k in asked.items():
        if teacher is not None and k > vocab_size:
            raise UserError(f"{key}={k} exceeds the vocabulary: it has {vocab_size} tokens")


def _data(
    config: Config, tokenizer: Any, eos_ids: tuple[int, ...]
) -> tuple[PromptStream, tuple[EvalSet, ...]]:
    d = config.data
    encode = encoder(config, tokenizer, eos_ids)
    source = open_source(d.train, config.seed, "train", keys(config))
    stream = PromptStream(
        source, encode, config.batch_size, config.seed, d.shuffle, weights=d.weights
    )
    if learns_from_data(config):
        stream.check_completions()
    return stream, held_out_sets(config, encode)


@dataclass
class Roles:
    """Started roles, and the workers that hold them."""

    handles: Mapping[str, LocalHandle]
    workers: list[LocalWorker]
    row_multiple: int
    """Rows of a batch are a multiple of this: every mesh divides them."""

    def stop(self) -> None:
        """Ends the workers; one that is stuck is left behind."""
        stop_all(self.workers, STOP_S)


def start_roles(
    job: Job,
    placement: Placement,
    meshes: Mapping[str, Mesh],
    run_dir: Path,
    log: Log,
    restore: Path | None = None,
) -> Roles:
    """One worker for each pool; roles of different pools load and build side by side.

    Args:
        restore: the checkpoint that the actor goes on from.
    """
    rows = math.lcm(*(m.shape["data"] * m.shape["fsdp"] for m in meshes.values()))
    makers: dict[str, Callable[[], Any]] = {
        "actor": partial(make_actor, job, meshes["actor"], meshes["rollout"], run_dir, restore),
        "rollout": partial(make_rollout_role, job, meshes["rollout"], rows),
    }
    if job.teacher is not None:
        makers["teacher"] = partial(make_teacher, job, meshes["teacher"], rows)
    workers: list[LocalWorker] = []
    try:
        handles = _start(job, placement, meshes, makers, workers, log)
    except BaseException:
        stop_all(workers, STOP_S)
        raise
    return Roles(handles, workers, rows)


def _start(
    job: Job,
    placement: Placement,
    meshes: Mapping[str, Mesh],
    makers: Mapping[str, Callable[[], Any]],
    workers: list[LocalWorker],
    log: Log,
) -> dict[str, LocalHandle]:
    """Fills `workers` as it goes: whoever catches an error can stop them."""
    handles, starting = {}, []
    for pool in placement.pools:
        devices = tuple(
            d for role in pool.roles if role in meshes for d in meshes[role].devices.flat
        )
        worker = LocalWorker(pool.name, tuple(dict.fromkeys(devices)), crew=workers)
        for role in pool.roles:
            if role in makers:
                deadline = job.config.deadlines.startup
                starting.append((role, worker.start_role(role, makers[role], deadline)))
                handles[role] = worker.handle(role)
    for role, started in starting:
        started.result()
        mine = device_list(device.id for device in meshes[role].devices.flat)
        log(f"{role}: ready in {started.times.seconds:.1f} s, on devices {mine}")
    return handles


def make_actor(job: Job, mesh: Mesh, receiver: Mesh, run_dir: Path, restore: Path | None) -> Actor:
    config = job.config
    algorithm = ALGORITHMS[config.algorithm]
    frozen: dict[str, Any] = {}
    if job.teacher is not None and config.distill.signal == "hidden":
        head = job.teacher.load_head(mesh, jnp.dtype(config.teacher.dtype))
        frozen["teacher_head"] = _first_rows(head, job.vocab_size, mesh)
    actor = Actor(
        config,
        job.student.config,
        mesh,
        load=lambda dtype: job.student.load(mesh, dtype, "stacked"),
        prepare=prepare,
        loss=algorithm.make_loss(config, job.student.config, mesh, job.vocab_size),
        frozen=frozen,
        receiver=param_shardings(job.student.config, receiver, "unstacked"),
        run_dir=run_dir,
        restore=restore,
    )
    verify_arrays("actor", (actor.state, frozen), mesh)
    return actor


def make_rollout_role(job: Job, mesh: Mesh, row_multiple: int) -> Sampler:
    return _sampler(job, job.student, mesh, row_multiple, params=None)


def make_teacher(job: Job, mesh: Mesh, row_multiple: int) -> Teacher:
    config, source = job.config, job.teacher
    assert source is not None
    layout: Layout = "unstacked" if job.teacher_samples else "stacked"
    params = source.load(mesh, jnp.dtype(config.teacher.dtype), layout)
    verify_arrays("teacher", params, mesh)
    projection = Projection(config.distill, mesh, job.vocab_size)
    scorer = Scorer(source.config, params, projection, config.teacher.num_microbatches)
    sampler = None
    if job.teacher_samples:
        sampler = _sampler(job, source, mesh, row_multiple, params=params)
    return Teacher(scorer, sampler)


def _sampler(job: Job, source: ModelSource, mesh: Mesh, rows: int, params: Any) -> Sampler:
    config = job.config
    return Sampler(
        config,
        source.config,
        mesh,
        slots=config.rollout.slots or config.batch_size * config.group_size,
        tokenizer=job.tokenizer,
        pad_id=job.pad_id,
        eos_ids=job.eos_ids,
        row_multiple=rows,
        vocab_size=job.vocab_size,
        params=params,
    )


def _first_rows(head: jax.Array, rows: int, mesh: Mesh) -> jax.Array:
    """The head without the rows that the other model has not; cut once, not at every step."""
    if head.shape[0] == rows:
        return head
    vocab = "tensor" if rows % mesh.shape["tensor"] == 0 else None
    width = "fsdp" if head.shape[1] % mesh.shape["fsdp"] == 0 else None
    return jax.device_put(head[:rows], NamedSharding(mesh, PartitionSpec(vocab, width)))
