"""The jitted programs that a run would call, with abstract arguments, for compilation ahead of
time. The functions mirror how `jaxrl.roles` builds and calls its programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.algorithms.methods import method_of, sampled_share
from jaxrl.algorithms.signals import Projection
from jaxrl.aot.abstract import AbstractRun, Program, local_bytes, shaped
from jaxrl.losses.token_spans import span_baseline
from jaxrl.models import bert
from jaxrl.models.batching import rows_of, width_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import frozen_and_trained, join
from jaxrl.models.parameters import Params, head, head_sharding
from jaxrl.plan.accounts import STEP, TEMPLATE_TOKENS, TO_TEACHER, UPDATE
from jaxrl.plan.plan_context import asked, evaluated
from jaxrl.roles.grouper import encode_batch
from jaxrl.roles.reference import reference_program
from jaxrl.roles.reward_model import score_batch
from jaxrl.roles.rollout import (
    evaluation_sampling,
    merge_adapters_program,
    topk_program,
    training_sampling,
)
from jaxrl.roles.update import BASE, PLANNED, ActorPrograms, first_rows_program
from jaxrl.sampling.abstract_programs import abstract_programs
from jaxrl.sampling.engine import Engine
from jaxrl.sharding.reshard import Rows, piece_programs
from jaxrl.teacher.local_teacher import merge_program, mixture_program
from jaxrl.types import AlignedSignal, TeacherSignal, TrainBatch

PHASES = {
    "prefill": "prefill",
    "decode": "decode",
    "longer cache": "longer cache",
    "answers of environments": "answers",
    "read again": "read again",
}
"""Program -> the phase of the plan that covers it."""


def actor(run: AbstractRun) -> Iterator[Program]:
    """Yields the update, the log-probs before it, and the weights for the rollout."""
    c, m, mesh = run.config, run.setting, run.meshes["actor"]
    loss = method_of(c).make_loss(c, run.student, mesh, m.vocab)
    programs = ActorPrograms(c, run.student, mesh, loss)
    rows, everywhere = run.rows("actor"), run.everywhere("actor")
    sequences = run.sequences("actor", m.padded_rows)
    if c.policy.router_replay:
        assert run.student.experts is not None, "`plan.inputs` refuses it"
        each = run.student.n_layers, run.student.experts.chosen
        recorded = shaped((*sequences.tokens.shape, *each), run.student.experts.id_dtype, rows)
        sequences = replace(sequences, experts=recorded)
    n = m.padded_rows
    number = shaped((n, m.new_tokens), jnp.float32, rows)
    signal = None
    frozen: dict[str, Any] = {}
    if m.signal is not None:
        signal = run.signal("actor", n)
        if m.signal == "hidden":
            shapes = [(m.teacher_rows, width) for width in m.teacher_widths]
            heads = tuple(
                shaped(shape, c.teacher.compute_dtype, head_sharding(shape, mesh))
                for shape in shapes
            )
            frozen["teacher_head"] = heads if c.teachers else heads[0]
            softcaps = (model.final_softcap for model in m.inputs.teachers)
            caps = tuple(cap and shaped((), jnp.float32, everywhere) for cap in softcaps)
            if any(cap is not None for cap in caps):
                frozen["teacher_softcap"] = caps if c.teachers else caps[0]
        if m.aligned:
            frozen["outcomes"] = run.outcomes("actor")
    rewarded = c.learns_from_rewards
    by_turn = c.environment.name is not None and c.environment.credit == "turn"
    batch = TrainBatch(
        sequences,
        signal,
        number,
        advantages=(number if by_turn else shaped((n,), jnp.float32, rows)) if rewarded else None,
        ref_logprobs=number if rewarded and c.policy.kl_coef > 0 else None,
        old_logprobs=number if rewarded and c.updates_per_batch > 1 else None,
        in_policy=shaped((n,), bool, rows) if rewarded else None,
        teacher_weights=shaped((n, m.new_tokens, len(c.teachers)), jnp.float32, rows)
        if signal is not None and c.teachers
        else None,
    )
    group = m.shared_group
    units = n // group
    chosen = np.arange(units // c.minibatches)
    length = np.full(units, m.width)
    abstract = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), sequences)
    index = programs.micro_batches(chosen, length, abstract, group, len(chosen))
    place = shaped(index.shape, index.dtype, everywhere)
    state, base = programs.abstract_state(), programs.abstract_base()
    if base:
        frozen[BASE] = base
    passes = c.actor.epochs_per_batch * c.minibatches
    own = local_bytes((state, frozen))
    yield from _before_updates(run, programs, signal, own)
    yield Program(
        "actor",
        "update",
        programs.update,
        (state, frozen | {PLANNED: shaped((), jnp.int32, everywhere)}, batch, place, group),
        (UPDATE, STEP),
        calls=passes,
    )
    if batch.old_logprobs is not None:
        policy = join(base, state.params)
        given = (policy, TrainBatch(sequences), place, group)
        held = local_bytes((state.opt_state, state.ema, frozen, batch))
        held -= local_bytes((sequences, base))
        yield Program("actor", "log-probs before", programs.old, given, beside=held)
    yield from _published(run, programs, state.params, "rollout", own)
    if c.teacher_follows:
        yield from _published(run, programs, state.ema or state.params, "teacher", own)


def _before_updates(
    run: AbstractRun, programs: ActorPrograms, signal: TeacherSignal | None, own: int
) -> Iterator[Program]:
    """Yields what the actor computes at the start of a run, and of a batch before its first update.

    Args:
        own: bytes of its state and of what its loss reads.
    """
    c, m, state = run.config, run.setting, programs.abstract_state()

    def one(name: str, jitted: Any, *given: Any, start: bool = False) -> Program:
        if start:
            return Program("actor", name, jitted, given, calls=0, otherwise="start")
        return Program("actor", name, jitted, given, beside=own - local_bytes(given))

    yield one("optimizer state", programs.start, state.params, start=True)
    if state.ema is not None:
        yield one("moving average", programs.initial_ema, state.params, start=True)
    if signal is None:
        return
    dtype = c.teacher.compute_dtype
    if m.signal == "hidden" and c.teacher_follows:
        yield one("copy of the head", programs.copy_head, state.ema or state.params)
    elif m.signal == "hidden" and not m.aligned:
        for model in {model.vocab_size: model for _, model in run.teachers}.values():
            if model.vocab_size != m.vocab:
                jitted = first_rows_program(m.vocab, model.d_model, run.meshes["actor"])
                whole = (model.vocab_size, model.d_model)
                at = head_sharding(whole, run.meshes["actor"])
                yield one("rows of the head", jitted, shaped(whole, dtype, at), start=True)
    if "teacher" in run.meshes:
        yield from _signal_moves(run, signal, own)
    if isinstance(signal, AlignedSignal):
        sampled = shaped(signal.kinds.shape, jnp.float32, signal.kinds.sharding)
        mask = shaped(signal.kinds.shape, bool, signal.kinds.sharding)
        yield one("baseline", span_baseline, signal.kinds, signal.span_logprobs, sampled, mask)


def _signal_moves(run: AbstractRun, signal: TeacherSignal, own: int) -> Iterator[Program]:
    """Yields the programs that bring a batch's signal from the teacher to the actor."""
    section, at = run.config.teacher, run.rows("teacher")
    parts = section.num_microbatches
    size = max(run.scored("teacher", model, parts)[0] for _, model in run.teachers)

    def sent(leaf: jax.ShapeDtypeStruct) -> Any:
        rows = [min(size, len(leaf) - start) for start in range(0, len(leaf), size)]
        each = [shaped((n, *leaf.shape[1:]), leaf.dtype, at) for n in rows]
        return Rows(tuple(each)) if len(each) > 1 else each[0]

    if isinstance(signal, AlignedSignal):
        signal = replace(signal, baseline=None)
    xs = [sent(leaf) for leaf in jax.tree.leaves(signal)]
    targets, held = [run.rows("actor")] * len(xs), sum(run.teacher_bytes.values())
    yield from _moves(run, "signal", ("teacher", "actor"), xs, targets, (held, own))


def _published(
    run: AbstractRun, programs: ActorPrograms, given: Params, role: str, own: int
) -> Iterator[Program]:
    """Yields the programs that bring weights of the actor to another role: conversion and
    transfer."""
    dtype, layout = jnp.dtype(run.config.roles[role].compute_dtype), run.setting.layout(role)
    phase, name = (
        ("publish", "convert") if role == "rollout" else (TO_TEACHER, "convert for the teacher")
    )
    if differs := programs.differing(given, dtype, layout):
        beside = own - local_bytes(differs)
        arguments = (differs, dtype, layout)
        yield Program("actor", name, programs.convert, arguments, (phase,), beside=beside)
    here, there = (
        frozen_and_trained(run.params(each, run.student, dtype, layout))[1]
        for each in ("actor", role)
    )
    shardings = [leaf.sharding for leaf in jax.tree.leaves(there)]
    yield from _moves(run, "weights", ("actor", role), jax.tree.leaves(here), shardings, (own, 0))


def _moves(
    run: AbstractRun,
    name: str,
    roles: tuple[str, str],
    xs: Sequence[Any],
    targets: Sequence[NamedSharding],
    held: tuple[int, int],
) -> Iterator[Program]:
    """Yields the programs by which arrays go from a role to another of the same process; of several
    that cut, or join, the one with the largest pieces.

    Args:
        held: bytes on a device of each of the roles beside these arrays.
    """
    if run.apart(*roles):
        return
    calls = piece_programs(xs, targets)
    for verb, role, beside in zip(("cut", "join"), roles, held, strict=True):
        mine = [call for call in calls if call[0].__name__ == verb]
        if mine:
            jitted, pieces = max(mine, key=lambda call: local_bytes(call[1]))
            title = f"{name}: {verb}"
            yield Program(role, title, jitted, (pieces,), beside=beside, calls=len(mine))


class Sampling:
    """The sampling engine of a role, and its programs: prefill of a batch of prompts, the copy of
    their keys and values into rows, launches of decode steps, and changes of the cache's size."""

    def __init__(self, run: AbstractRun, role: str, model: DecoderConfig):
        c = run.config
        self.run, self.role = run, role
        self.most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
        self.engine = Engine(
            model,
            run.meshes[role],
            slots=c.rollout.slots or run.setting.sequences,
            max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
            max_new_tokens=max(self.most, c.eval.max_new_tokens or 0),
            launch_tokens=c.rollout.launch_tokens,
            cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
            episodes=role == "rollout" and c.environment.name is not None,
        )
        self.params = run.params(role, model)

    def programs(self, share: float) -> Iterator[Program]:
        """Makes all programs: those of training or, of a role that samples for evaluations alone,
        of these; and the decode steps of evaluations, where these are another program.

        Args:
            share: fraction of the training batches that this role samples.
        """
        c, width = self.run.config, self.run.setting.prompts(self.role)
        asks = asked(c, self.role)
        ways = [(training_sampling(c, self.most), asks[0])] if share > 0 else []
        if evaluated(c, self.role):
            ways.append((evaluation_sampling(c, self.most), asks[-1]))
        kinds = set()
        for i, (sampling, (prompts, samples)) in enumerate(ways):
            for name, jitted, arguments, static, beside, calls in abstract_programs(
                *(self.engine, self.params, sampling),
                prompts=prompts,
                samples=samples,
                prefilled=self.run.setting.prefill_rows(self.role),
                width=width,
                record=c.policy.router_replay and not i and self.role != "teacher",
            ):
                if i and name != "decode":
                    continue
                phases = (PHASES[name],) if name in PHASES else ()
                if name == "decode":
                    if (kind := jax.tree.structure(arguments[6])) in kinds:
                        continue
                    kinds.add(kind)
                    name += " for evaluations" * bool(i)
                if name == "answers of environments":
                    calls *= c.environment.max_turns - 1
                yield Program(
                    *(self.role, name, jitted, arguments, phases, static, local_bytes(beside)),
                    calls=0 if i else math.ceil(share * calls),
                    otherwise="waits" if name.endswith("again") else "eval",
                )


def rollout(run: AbstractRun) -> Iterator[Program]:
    c, model = run.config, run.setting.sampled("rollout")
    base = run.setting.base_bytes("rollout") if c.rollout.merge else 0  # nothing else reads it
    for program in Sampling(run, "rollout", model).programs(sampled_share(c)):
        yield replace(program, beside=program.beside + base)
    if c.rollout.merge:
        under, _ = frozen_and_trained(run.params("rollout", run.student, layout="stacked"))
        _, adapters = frozen_and_trained(run.params("rollout", run.student))
        jitted = merge_adapters_program(run.student, run.meshes["rollout"])
        shared = local_bytes(under) - base
        given = (under, adapters)
        yield Program("rollout", "merge", jitted, given, ("weight sync",), beside=-shared)
    if c.distill.signal == "student_topk" and run.setting.signal is not None:
        projection = Projection.of(c, run.meshes["rollout"], run.setting.vocab)
        jitted = topk_program(projection, model)
        sequences = run.sequences("rollout", run.setting.padded_rows)
        given = (run.params("rollout", model), sequences)
        yield Program("rollout", "top-k of the policy", jitted, given, ("score",))


def teacher(run: AbstractRun) -> Iterator[Program]:
    """Yields scoring by each teacher, what makes one signal of several, and sampling."""
    c, m = run.config, run.setting
    parts = c.teacher.num_microbatches
    combines = bool(c.teachers) and c.mixture is not None and c.distill.signal != "hidden"
    weights = run.teacher_bytes
    each = [run.scored("teacher", model, parts) for _, model in run.teachers]
    for one, (rows, group) in zip(run.teachers, each, strict=True):
        name, _ = one
        jitted, given = run.score(rows, one, group, sends=combines)
        beside = (parts - 1) * local_bytes(run.signal("teacher", rows))
        if not c.offload.frozen:
            beside += sum(weights.values()) - weights[name]
        title = f"score by {name}" if name else "score"
        phases = ("score",) if weights[name] == max(weights.values()) else ()
        yield Program("teacher", title, jitted, given, phases, beside=beside, calls=parts)
    if c.teachers:
        several = _merging if c.mixture is None else _mixture
        yield several(run, max(rows for rows, _ in each), parts)
    if m.teacher_samples:
        share = 1 - c.distill.on_policy_fraction if c.distill.seq_kd else 0.0
        for name, model in run.teachers:
            sampling = Sampling(run, "teacher", model)
            for program in sampling.programs(share / len(run.teachers)):
                yield replace(program, name=f"{program.name} by {name}" if name else program.name)


def _merging(run: AbstractRun, rows: int, parts: int) -> Program:
    """Returns the program that puts a teacher's rows among those of the teachers before it."""
    signal, mine = run.signal("teacher", rows), shaped((rows,), bool, run.rows("teacher"))
    projection = Projection.of(run.config, run.meshes["teacher"], run.setting.vocab)
    jitted = merge_program(projection, max(run.setting.teacher_widths))
    beside, calls = sum(run.teacher_bytes.values()), parts * len(run.teachers)
    given = (signal, signal, mine)
    return Program("teacher", "merge", jitted, given, beside=beside, calls=calls)


def _mixture(run: AbstractRun, rows: int, parts: int) -> Program:
    """Returns the program that makes the signal of a mixture from the hidden states of each
    teacher."""
    c, m, mesh, at = run.config, run.setting, run.meshes["teacher"], run.rows("teacher")
    dtype, models = c.teacher.compute_dtype, [model for _, model in run.teachers]
    shape = (rows, m.new_tokens)
    hidden = tuple(shaped((*shape, model.d_model), dtype, at) for model in models)
    heads: tuple[Any, ...] | None = None
    if c.distill.signal != "hidden":
        heads = tuple(head(run.params("teacher", model)) for model in models)
    ids = None
    if c.distill.signal == "student_topk":
        ids = shaped((*shape, c.distill.top_k), jnp.int32, at)
    weights = shaped((rows, len(models)), jnp.float32, at)
    given = (hidden, heads, weights, run.sequences("teacher", rows), ids)
    beside = sum(run.teacher_bytes.values()) - local_bytes(heads)
    softcaps = [model.final_softcap for model in models]
    jitted = mixture_program(Projection.of(c, mesh, m.vocab), softcaps)
    return Program("teacher", "mixture", jitted, given, ("combine",), beside=beside, calls=parts)


def reference(run: AbstractRun) -> Iterator[Program]:
    c = run.config
    parts = c.reference.num_microbatches
    model = run.setting.reference
    jitted = reference_program(
        model, run.meshes["reference"], c.sampling.temperature, c.distill.loss_chunk
    )
    rows = run.scored("reference", model, parts)
    given = (run.params("reference", model), run.sequences("reference", *rows))
    yield Program("reference", "score", jitted, given, ("score",), calls=parts)


def reward(run: AbstractRun) -> Iterator[Program]:
    """Yields the reward model, if there is one, on a full batch of the longest sequences."""
    c, model = run.config.rewards, run.setting.inputs.reward
    if model is None:
        return
    longest = c.max_tokens or run.setting.width + TEMPLATE_TOKENS
    params = run.params("reward", model)
    head = shaped((model.d_model,), jnp.float32, run.everywhere("reward"))
    batch = _batch(run, "reward", min(longest, model.max_positions), c.batch_tokens)
    given = (model, run.meshes["reward"], params, head, *batch)
    yield Program("reward", "score", score_batch, given, ("score",))


def grouper(run: AbstractRun) -> Iterator[Program]:
    """Yields the encoder of similarity groups on a full batch of the longest texts."""
    c, model, mesh = run.config.grouper, run.setting.inputs.grouper, run.meshes["grouper"]
    if model is None:
        return
    dtype, shardings = jnp.dtype(c.compute_dtype), bert.param_shardings(model, mesh)
    shapes = {path: jax.ShapeDtypeStruct(s, dtype) for path, s in bert.shapes(model).items()}
    params = jax.tree.map(lambda x, s: shaped(x.shape, dtype, s), bert.tree(shapes), shardings)
    longest = min(run.setting.new_tokens, model.max_tokens)
    batch = _batch(run, "grouper", longest, c.batch_tokens)
    yield Program("grouper", "embed", encode_batch, (model, mesh, params, *batch), ("embed",))


def _batch(
    run: AbstractRun, role: str, longest: int, batch_tokens: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the abstract tokens and mask of a full batch of the longest texts."""
    axes, at = run.setting.axes[role], run.rows(role)
    width = width_of(longest, longest)
    shape = (rows_of(width, batch_tokens) * axes.rows, width)
    return shaped(shape, jnp.int32, at), shaped(shape, bool, at)


MAKERS: dict[str, Callable[[AbstractRun], Iterator[Program]]] = {
    "actor": actor,
    "rollout": rollout,
    "teacher": teacher,
    "reference": reference,
    "reward": reward,
    "grouper": grouper,
}


class RunPrograms(AbstractRun):
    """Iterates over the programs of the run."""

    def __iter__(self) -> Iterator[Program]:
        for role in self.meshes:
            for program in MAKERS[role](self):
                more = self.setting.in_flight if role == "teacher" else 0
                more -= self.setting.counted_as_the_actors(role)
                yield replace(program, beside=program.beside + more)
