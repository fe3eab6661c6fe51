"""Builds the teacher of a run, and what the actor needs of it: the arrays that its loss reads, and
how to send the policy to a teacher that follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.protocols import SamplingTeacherRole, TeacherRole
from jaxrl.algorithms.signals import Projection
from jaxrl.checkpoint.model_source import ModelSource
from jaxrl.data.feedback import with_feedback
from jaxrl.models.parameters import Layout, Params, head_sharding, param_shardings
from jaxrl.roles.actor import SENT_TO_TEACHER, Receiver
from jaxrl.roles.rollout import Sampler
from jaxrl.roles.update import first_rows_program
from jaxrl.run.job import Setup
from jaxrl.sharding.ledger import current
from jaxrl.sharding.mesh import verify_arrays
from jaxrl.sharding.reshard import put
from jaxrl.teacher.cache import CachedTeacher, ScoreCache
from jaxrl.teacher.local_teacher import AddFeedback, LocalTeacher, RoutedTeachers, Scorer
from jaxrl.teacher.protocol import Info
from jaxrl.teacher.remote import RemoteTeachers, remote_head
from jaxrl.types import Tree

MakeSampler = Callable[[ModelSource, Mesh, Params | None], Sampler]
"""(teacher, mesh, its weights or None where they come later) -> what samples with it."""


def make_teacher(setup: Setup, mesh: Mesh | None, make_sampler: MakeSampler) -> TeacherRole:
    """Makes the role `teacher`: models on devices of the run, scores on disk (and a model for
    samples of the policy, where there is one), or servers outside of the run.

    Args:
        mesh: of the models; None where there are none.
    """
    config, layout, dtype = setup.config, _layout(setup), setup.config.teacher.compute_dtype
    cache = None if config.teacher.cache is None else ScoreCache(config.teacher.cache)
    if not setup.teachers:
        if cache is not None:
            return CachedTeacher(config, cache, setup.vocab_size)
        return RemoteTeachers(config, setup.vocab_size, setup.served)
    assert mesh is not None
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

    local: SamplingTeacherRole
    if config.teachers:
        sends = projection
        if projection.mixture is not None:  # is computed of the hidden states of all
            hidden = config.distill.model_copy(update={"signal": "hidden"})
            sends = replace(projection, distill=hidden)
        width = max(source.config.d_model for source in setup.teachers.values())
        local = several = RoutedTeachers(config, projection, width, add_feedback)
        for name, source in setup.teachers.items():
            current().enter("teacher.start")  # offloads the previous teacher first
            several.add(name, *load(source, sends))
    else:
        follows = (layout, dtype) if config.teacher_follows else None
        respell = None
        if aligner is not None:
            respell = partial(aligner.retokenize, max_new_tokens=config.max_new_tokens)
        local = LocalTeacher(
            *load(setup.teachers["teacher"], projection),
            config.offloads_follower if follows else config.offload.frozen,
            follows=follows,
            add_feedback=add_feedback,
            respell=respell,
        )
    return local if cache is None else CachedTeacher(config, cache, setup.vocab_size, local)


def frozen_of_teacher(setup: Setup, mesh: Mesh) -> dict[str, Tree]:
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


def _heads(setup: Setup, mesh: Mesh) -> Iterator[tuple[jax.Array, float | None]]:
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


def receiver_of_teacher(setup: Setup, mesh: Mesh | None) -> Receiver | None:
    """Returns how a teacher that follows the policy takes its weights; None where no teacher does.

    Args:
        mesh: the teacher's; None where another process has it.
    """
    if not setup.config.teacher_follows:
        return None
    layout, dtype = _layout(setup), setup.config.teacher.compute_dtype
    shardings = None if mesh is None else param_shardings(setup.student.config, mesh, layout)
    return Receiver(layout, dtype, shardings, SENT_TO_TEACHER)


def _layout(setup: Setup) -> Layout:
    return "unstacked" if setup.teacher_samples else "stacked"
