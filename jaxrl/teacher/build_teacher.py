"""Builds the teacher of a run, and what the actor needs of it: the arrays that its loss reads, and
how to send the policy to a teacher that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.protocols import SamplingTeacherRole, TeacherRole
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.config.schema import Config
from jaxrl.data.feedback import with_feedback
from jaxrl.data.token_alignment import Aligner
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.losses.token_spans import Outcomes
from jaxrl.models.param_sharding import head_sharding, param_shardings
from jaxrl.models.parameters import Layout, Params
from jaxrl.roles.actor import SENT_TO_TEACHER, Receiver
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.update import first_rows_program
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import put
from jaxrl.teacher.cache import ScoreCache
from jaxrl.teacher.cached_teacher import CachedTeacher
from jaxrl.teacher.local_teacher import AddFeedback, LocalTeacher, Scorer
from jaxrl.teacher.protocol import Info
from jaxrl.teacher.remote import AnyInfo, RemoteTeachers, remote_head
from jaxrl.teacher.routed_teachers import RoutedTeachers
from jaxrl.types import Tree

MakeSampler = Callable[[ModelSource, Mesh, Params | None], Sampler]
"""(teacher, mesh, its weights or None where they come later) -> what samples with it."""


class TeacherSetup(Protocol):
    """What `run.job.Setup` says of the teachers of a run; its fields are explained there."""

    @property
    def config(self) -> Config: ...
    @property
    def student(self) -> ModelSource: ...
    @property
    def teachers(self) -> Mapping[str, ModelSource]: ...
    @property
    def served(self) -> Mapping[str, AnyInfo]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def teacher_samples(self) -> bool: ...
    @property
    def outcomes(self) -> Outcomes | None: ...
    def open_tokenizer(self) -> Tokenizer: ...
    def open_aligner(self) -> Aligner | None: ...


def make_teacher(setup: TeacherSetup, mesh: Mesh | None, make_sampler: MakeSampler) -> TeacherRole:
    """Makes the role `teacher`: models on devices of the run, scores on disk (and a model for
    samples of the policy, where there is one), or servers outside of the run.

    Args:
        mesh: of the models; None where there are none.
    """
    config, local = setup.config, None
    if setup.teachers:
        assert mesh is not None
        local = _make_local_teacher(setup, mesh, make_sampler)
    if config.teacher.cache is not None:
        return CachedTeacher(config, ScoreCache(config.teacher.cache), setup.vocab_size, local)
    return local or RemoteTeachers(config, setup.vocab_size, setup.served)


def _make_local_teacher(
    setup: TeacherSetup, mesh: Mesh, make_sampler: MakeSampler
) -> SamplingTeacherRole:
    config, layout, dtype = setup.config, _layout(setup), setup.config.teacher.compute_dtype
    limit, aligner = config.teacher_prompt_tokens, setup.open_aligner()
    projection = Projection.of(config, mesh, setup.vocab_size)
    if aligner is not None:
        projection = replace(projection, vocab_size=aligner.teacher.vocab_size)
    add_feedback: AddFeedback | None = None
    if config.teacher_gets_feedback:
        add_feedback = partial(with_feedback, tokenizer=setup.open_tokenizer(), max_tokens=limit)

    def load(source: ModelSource, sends: Projection) -> tuple[Scorer, Sampler | None]:
        params = None
        if not config.teacher_follows:
            params = source.load(mesh, jnp.dtype(dtype), layout)
            verify_arrays("teacher", params, mesh)
        scorer = Scorer(source.config, params, sends, limit, aligner, config.teacher_new_tokens)
        return scorer, make_sampler(source, mesh, params) if setup.teacher_samples else None

    if not config.teachers:
        scorer, sampler = load(setup.teachers["teacher"], projection)
        if config.teacher_follows:
            follows, offload = (layout, dtype), config.offloads_follower
            return LocalTeacher(
                scorer, sampler, offload, follows=follows, add_feedback=add_feedback
            )
        respell = None
        if aligner is not None:
            longest = config.max_new_tokens
            respell = partial(aligner.retokenize, max_new_tokens=longest)
        offload = config.offload.frozen
        return LocalTeacher(scorer, sampler, offload, add_feedback=add_feedback, respell=respell)
    sends = projection
    if projection.mixture is not None:  # is computed of the hidden states of all
        hidden = config.distill.model_copy(update={"signal": "hidden"})
        sends = replace(projection, distill=hidden)
    width = max(source.config.d_model for source in setup.teachers.values())
    several = RoutedTeachers(config, projection, width, add_feedback)
    for name, source in setup.teachers.items():
        current().enter("teacher.start")  # offloads the previous teacher first
        several.add(name, *load(source, sends))
    return several


def frozen_of_teacher(setup: TeacherSetup, mesh: Mesh) -> dict[str, Tree]:
    """Returns the arrays of the teachers that the actor's loss reads (`signals.distill_loss`), on
    the actor's mesh."""
    config, everywhere = setup.config, NamedSharding(mesh, PartitionSpec())
    frozen: dict[str, Tree] = {}
    if config.learns_from_teacher and config.distill.signal == "hidden":
        heads, caps = list[jax.Array](), [setup.student.config.final_softcap]
        if not config.teacher_follows:  # else the head is the actor's own
            caps.clear()
            for head, cap in _heads(setup, mesh):
                # Heads that are equal are one array; the comparison is False of other shapes.
                same = (other for other in heads if bool(jnp.array_equal(other, head)))
                heads.append(next(same, head))
                caps.append(cap)
            frozen["teacher_head"] = tuple(heads) if config.teachers else heads[0]
        if any(caps):
            placed = put([None if cap is None else np.float32(cap) for cap in caps], everywhere)
            frozen["teacher_softcap"] = tuple(placed) if config.teachers else placed[0]
    if setup.outcomes is not None:
        frozen["outcomes"] = put(setup.outcomes, everywhere)
    return frozen


def _heads(setup: TeacherSetup, mesh: Mesh) -> Iterator[tuple[jax.Array, float | None]]:
    """Yields the LM head [V, Dt] of each teacher on the actor's mesh, V being what all models
    share, and `DecoderConfig.final_softcap`: a service's, a cache's, or a local model's."""
    teacher, v = setup.config.teacher, setup.vocab_size

    def placed(head: np.ndarray) -> jax.Array:
        return put(head, head_sharding(head.shape, mesh))

    for name, info in setup.served.items():
        assert isinstance(info, Info), "`check_remote` refuses others"
        yield placed(remote_head(setup.config, v, info, name)), info.final_softcap
    if teacher.cache is not None and not setup.teachers:
        cache = ScoreCache(teacher.cache)
        stored = cache.head(v).astype(jnp.dtype(teacher.dtype))
        yield placed(stored), cache.config.final_softcap
    for source in setup.teachers.values():
        head = source.load_head(mesh, jnp.dtype(teacher.dtype))
        if setup.outcomes is None and head.shape[0] != v:
            # Drops the rows of tokens that the student lacks: once here, not at every step.
            head = first_rows_program(v, head.shape[1], mesh)(head)
        yield head, source.config.final_softcap


def receiver_of_teacher(setup: TeacherSetup, mesh: Mesh | None) -> Receiver | None:
    """Returns how a teacher that follows the policy takes its weights; None where no teacher does.

    Args:
        mesh: the teacher's; None where another process has it.
    """
    if not setup.config.teacher_follows:
        return None
    layout, dtype = _layout(setup), setup.config.teacher.compute_dtype
    shardings = None if mesh is None else param_shardings(setup.student.config, mesh, layout)
    return Receiver(layout, dtype, shardings, SENT_TO_TEACHER)


def _layout(setup: TeacherSetup) -> Layout:
    return "unstacked" if setup.teacher_samples else "stacked"
