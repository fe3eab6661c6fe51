"""The jitted programs that a run would call, with abstract arguments, to compile ahead of time:
each is made and called as the roles make and call it, at its largest. An abstract array is a
`jax.ShapeDtypeStruct` with a sharding over the devices of the target machine. Nothing is allocated,
and no weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.algorithms.methods import method_of, sampled_share
from jaxrl.algorithms.signals import Projection
from jaxrl.losses.token_spans import Outcomes, span_baseline
from jaxrl.models import bert
from jaxrl.models.batching import rows_of, width_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Cache
from jaxrl.models.delta import Recurrent
from jaxrl.models.lora import frozen_and_trained, join
from jaxrl.models.parameters import (
    Layout,
    Params,
    abstract_params,
    head,
    head_sharding,
    param_shardings,
)
from jaxrl.models.shared_prompts import PAGE, Pages, Seats
from jaxrl.plan.accounts import STEP, TEMPLATE_TOKENS, TO_TEACHER, UPDATE
from jaxrl.plan.plan_inputs import Account, Setting, asked, evaluated, generates
from jaxrl.roles.grouper import encode_batch
from jaxrl.roles.reference import reference_program
from jaxrl.roles.reward import score_batch
from jaxrl.roles.rollout import (
    merge_adapters_program,
    sampling_params,
    topk_program,
)
from jaxrl.roles.update import BASE, PLANNED, ActorPrograms, first_rows_program
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine
from jaxrl.sampling.sampler import SamplingParams, sampling_arrays
from jaxrl.sampling.slots import pages_of, rows_at_most, seats_of_row
from jaxrl.sharding.axes import ROWS
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.reshard import Rows, piece_programs
from jaxrl.teacher.local_teacher import merge_program, mixture_program, score_program
from jaxrl.teacher.protocol import Options
from jaxrl.types import (
    AlignedSignal,
    Sequences,
    TeacherSignal,
    TokenAlignment,
    TrainBatch,
    signal_of,
)


@dataclass(frozen=True)
class Program:
    """A jitted function of a role, with the abstract arguments of its largest call in a run."""

    role: str
    name: str
    jitted: Any
    args: tuple[Any, ...]
    phases: tuple[str, ...] | None = None
    """Phases of the role in the plan (`plan_inputs.Account`) that this program covers. None: the
    one of its name, if there is one. (): the plan has no figure of its own for it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    beside: int = 0
    """Bytes that the role holds on a device meanwhile, apart from the arguments; without those of
    the arguments that the plan counts as the actor's."""
    calls: int = 1
    """Calls in a training step; 0 if none calls it."""
    otherwise: str = "eval"
    """What calls it where no step does: `eval`, evaluations; `start`, the start of a run; `waits`,
    a sample that waits for pages of the cache."""

    def lower(self) -> Any:
        """Traces it; returns a `jax.stages.Lowered`."""
        return self.jitted.lower(*self.args, **self.kwargs)

    def compile(self, options: Mapping[str, Any] | None = None) -> Any:
        """Compiles it for the target machine; returns a `jax.stages.Compiled`."""
        return self.lower().compile(compiler_options=options)

    def planned(self, account: Account) -> int | None:
        """Returns the bytes of its role on one device while it runs, as the plan has them; None
        where the plan does not count it apart, because a larger program of the role covers it."""
        phases = (self.name,) if self.phases is None else self.phases
        more = [size for phase, size in account.phases().items() if phase in phases]
        return account.resident + max(more) if more else None

    def held(self, compiled: Any, total: int | None = None) -> int:
        """Returns the bytes that its role holds on one device while the compiled program runs.

        Args:
            total: arguments, results and temporaries as the compiler of a TPU reports them
                (`hlo.read_total`); its `memory_analysis` exceeds them where there are loops.
        """
        sizes = compiled.memory_analysis()
        # XLA does not count arguments that the program never reads, but they stay on the device.
        unread = max(0, local_bytes((self.args, self.kwargs)) - sizes.argument_size_in_bytes)
        if total is None:
            results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + results
        return int(total + unread + self.beside)


def local_bytes(tree: Any) -> int:
    """Returns the bytes on one device of a pytree of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape)
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )


class RunPrograms:
    """A run as planned for a machine: its meshes, and its programs, over which it iterates."""

    def __init__(self, setting: Setting, devices: Sequence[Any]):
        """
        Args:
            setting: of the plan for that machine.
            devices: of the machine; the placement refers to them by index.
        """
        self.setting, self.config, self.student = setting, setting.config, setting.student
        where = setting.inputs.placement.roles
        self.meshes: dict[str, Mesh] = {
            role: role_mesh([devices[i] for i in where[role].devices], sizes)
            for role, sizes in setting.axes.items()
        }
        models = setting.inputs.teachers
        names = list(self.config.teachers or [""])[: len(models)]
        self.teachers = list(zip(names, models, strict=True))
        """Name and model of each."""
        self.teacher_bytes = {
            name: local_bytes(self.params("teacher", model))
            for name, model in self.teachers
            if "teacher" in self.meshes
        }
        """Name of each -> bytes of its weights on one device."""

    def __iter__(self) -> Iterator[Program]:
        for role in self.meshes:
            more = self.setting.in_flight if role == "teacher" else 0
            more -= self.setting.counted_as_the_actors(role)
            for program in MAKERS[role](self):
                yield replace(program, beside=program.beside + more)

    def array(
        self, role: str, dtype: Any, *shape: int, whole: bool = False
    ) -> jax.ShapeDtypeStruct:
        """Returns an abstract array on the mesh of a role, with its rows divided or `whole`."""
        spec = PartitionSpec() if whole else PartitionSpec(ROWS)
        sharding = NamedSharding(self.meshes[role], spec)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def params(
        self, role: str, model: DecoderConfig, dtype: Any = None, layout: Layout | None = None
    ) -> Params:
        """Returns the weights of a model, in the dtype and layout of the role unless others are
        given."""
        dtype = self.config.roles[role].compute_dtype if dtype is None else dtype
        layout = layout or self.setting.layout(role)
        abstract = abstract_params(model, jnp.dtype(dtype), layout)
        return _placed(abstract, param_shardings(model, self.meshes[role], layout))

    def sequences(self, role: str, rows: int, group: int = 1) -> Sequences:
        completions = self.setting.completions(role)
        width = self.setting.prompts(role) + completions
        tokens, mask = (self.array(role, dtype, rows, width) for dtype in (jnp.int32, bool))
        return Sequences(tokens, mask, self.array(role, bool, rows, completions), group)

    def signal(self, role: str, rows: int) -> TeacherSignal:
        """Returns the teacher's signal for so many rows, as abstract arrays on the mesh of a
        role."""
        c, m = self.config, self.setting
        if "teacher" not in self.meshes:  # the signal is read from disk
            width = 0 if m.teacher is None else m.teacher.d_model
            shapes = Options.of(c.distill, m.vocab).tensors(c.teacher.compute_dtype, width)
            return signal_of(
                {
                    name: self.array(role, dtype, rows, m.new_tokens, *dims)
                    for name, (dtype, dims) in shapes.items()
                }
            )
        jitted, args = self.score(rows, self.teachers[-1])
        out = jax.eval_shape(jitted, *args)
        if m.aligned and role == "actor":
            out = replace(out, baseline=jax.ShapeDtypeStruct((rows, m.new_tokens), jnp.float32))
        if m.signal == "hidden":  # of several teachers: those of the widest, or of all
            width = max(m.teacher_widths) if c.mixture is None else sum(m.teacher_widths)
            shape = (rows, m.new_tokens, width)
            out = replace(out, hidden=jax.ShapeDtypeStruct(shape, out.hidden.dtype))
        signal: TeacherSignal = jax.tree.map(lambda x: self.array(role, x.dtype, *x.shape), out)
        return signal

    def outcomes(self, role: str) -> Outcomes:
        """Returns those of the student's and the teacher's tokens, where these are others."""
        (_, teacher), *_ = self.teachers
        counts = self.student.vocab_size, teacher.vocab_size
        return Outcomes(*(self.array(role, jnp.int32, n, whole=True) for n in counts))

    def scored(self, role: str, model: DecoderConfig, parts: int) -> tuple[int, int]:
        """Returns the rows of one of `parts` slices of the batch over all devices of a role, and
        the number of rows that share a prompt."""
        run = self.setting.scored(role, model, parts)
        return run.rows * run.axes.rows, 1 if run.shared is None else run.shared[0]

    def score(
        self, rows: int, teacher: tuple[str, DecoderConfig], group: int = 1, *, sends: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns a teacher's program and its arguments.

        Args:
            sends: it sends hidden states, of which a mixture is made.
        """
        c, m, role = self.config, self.setting, "teacher"
        _, model = teacher
        vocab = model.vocab_size if m.aligned else m.vocab
        projection = Projection.of(c, self.meshes[role], vocab)
        ids, aligned = None, tuple[Any, ...]()
        if m.aligned:
            one = self.array(role, jnp.int32, rows, m.new_tokens)
            starts = self.array(role, bool, rows, m.completions(role))
            aligned = (TokenAlignment(one, one, one, starts), self.outcomes(role))
        if sends:
            distill = c.distill.model_copy(update={"signal": "hidden"})
            projection = replace(projection, distill=distill)
        elif c.distill.signal == "student_topk":
            ids = self.array(role, jnp.int32, rows, m.new_tokens, c.distill.top_k)
        given = (self.params("teacher", model), self.sequences(role, rows, group), ids, *aligned)
        return score_program(model, projection), given


def _placed(abstract: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )


def actor(run: RunPrograms) -> Iterator[Program]:
    """Yields the update, the log-probs before it, and the weights for the rollout."""
    c, m, mesh, role = run.config, run.setting, run.meshes["actor"], "actor"
    loss = method_of(c).make_loss(c, run.student, mesh, m.vocab)
    programs = ActorPrograms(c, run.student, mesh, loss)
    n = m.padded_rows
    sequences = run.sequences(role, n)
    if c.policy.router_replay:
        experts = run.student.experts
        assert experts is not None, "`PlanInputs.axes` refuses it"
        each = *sequences.tokens.shape, run.student.n_layers, experts.chosen
        sequences = replace(sequences, experts=run.array(role, experts.id_dtype, *each))
    number, per_row = run.array(role, jnp.float32, n, m.new_tokens), (role, jnp.float32, n)
    signal, dtype = None, c.teacher.compute_dtype
    frozen: dict[str, Any] = {}
    if m.signal is not None:
        signal = run.signal(role, n)
        if m.signal == "hidden":
            heads = [_head(m.teacher_rows, width, dtype, mesh) for width in m.teacher_widths]
            frozen["teacher_head"] = tuple(heads) if c.teachers else heads[0]
            cap = run.array(role, jnp.float32, whole=True)
            caps = tuple(model.final_softcap and cap for model in m.inputs.teachers)
            if any(cap is not None for cap in caps):
                frozen["teacher_softcap"] = caps if c.teachers else caps[0]
        if m.aligned:
            frozen["outcomes"] = run.outcomes(role)
    rewarded, taught = c.learns_from_rewards, signal is not None and bool(c.teachers)
    by_turn = c.environment.name is not None and c.environment.credit == "turn"
    batch = TrainBatch(
        sequences,
        signal,
        number,
        advantages=(number if by_turn else run.array(*per_row)) if rewarded else None,
        ref_logprobs=number if rewarded and c.policy.kl_coef > 0 else None,
        old_logprobs=number if rewarded and c.updates_per_batch > 1 else None,
        in_policy=run.array(role, bool, n) if rewarded else None,
        teacher_weights=run.array(*per_row, m.new_tokens, len(c.teachers)) if taught else None,
    )
    group = m.shared_group
    units = n // group
    chosen, lengths = np.arange(units // c.minibatches), np.full(units, m.width)
    index = programs.micro_batches(chosen, lengths, sequences, group, len(chosen))
    place = run.array(role, index.dtype, *index.shape, whole=True)
    state, base = programs.abstract_state(), programs.abstract_base()
    if base:
        frozen[BASE] = base
    own = local_bytes((state, frozen))

    def one(name: str, jitted: Any, *given: Any, **more: Any) -> Program:
        return Program(role, name, jitted, given, beside=own - local_bytes(given), **more)

    def at_start(name: str, jitted: Any, argument: Any) -> Program:
        return Program(role, name, jitted, (argument,), calls=0, otherwise="start")

    yield at_start("optimizer state", programs.start, state.params)
    if state.ema is not None:
        yield at_start("moving average", programs.initial_ema, state.params)
    if m.signal == "hidden" and c.teacher_follows:
        # Before the first update of a batch.
        yield one("copy of the head", programs.copy_head, state.ema or state.params)
    elif m.signal == "hidden" and not m.aligned:
        for model in {model.vocab_size: model for _, model in run.teachers}.values():
            if model.vocab_size != m.vocab:
                jitted = first_rows_program(m.vocab, model.d_model, mesh)
                whole = _head(model.vocab_size, model.d_model, dtype, mesh)
                yield at_start("rows of the head", jitted, whole)
    if signal is not None and "teacher" in run.meshes:  # a batch's signal comes from there
        parts, sent = c.teacher.num_microbatches, []
        size = max(run.scored("teacher", model, parts)[0] for _, model in run.teachers)
        part = replace(signal, baseline=None) if isinstance(signal, AlignedSignal) else signal
        for leaf in jax.tree.leaves(part):
            counts = [min(size, len(leaf) - start) for start in range(0, len(leaf), size)]
            pieces = [run.array("teacher", leaf.dtype, k, *leaf.shape[1:]) for k in counts]
            sent.append(Rows(tuple(pieces)) if len(pieces) > 1 else pieces[0])
        held = sum(run.teacher_bytes.values()), own
        rows = [number.sharding] * len(sent)
        yield from _moves(run, "signal", ("teacher", role), sent, rows, held)
    if isinstance(signal, AlignedSignal):
        sampled, mask = (
            run.array(role, dtype, *signal.kinds.shape) for dtype in (jnp.float32, bool)
        )
        yield one("baseline", span_baseline, signal.kinds, signal.span_logprobs, sampled, mask)
    planned = run.array(role, jnp.int32, whole=True)
    given: Any = state, frozen | {PLANNED: planned}, batch, place, group
    calls = c.actor.epochs_per_batch * c.minibatches
    yield Program(role, "update", programs.update, given, (UPDATE, STEP), calls=calls)
    if batch.old_logprobs is not None:
        given = join(base, state.params), TrainBatch(sequences), place, group
        beside = local_bytes((state.opt_state, state.ema, frozen, batch))
        beside -= local_bytes((sequences, base))
        yield Program(role, "log-probs before", programs.old, given, beside=beside)

    # The weights for other roles: conversion and transfer.
    receivers = [("rollout", "publish", "convert", state.params)]
    if c.teacher_follows:
        average = state.ema or state.params
        receivers.append(("teacher", TO_TEACHER, "convert for the teacher", average))
    for receiver, phase, name, params in receivers:
        to, layout = jnp.dtype(c.roles[receiver].compute_dtype), m.layout(receiver)
        if differs := programs.differing(params, to, layout):
            yield one(name, programs.convert, differs, to, layout, phases=(phase,))
        here, there = (
            jax.tree.leaves(frozen_and_trained(run.params(at, run.student, to, layout))[1])
            for at in (role, receiver)
        )
        shardings = [leaf.sharding for leaf in there]
        yield from _moves(run, "weights", (role, receiver), here, shardings, (own, 0))


def _head(rows: int, width: int, dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    shape = (rows, width)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=head_sharding(shape, mesh))


def _moves(
    run: RunPrograms,
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
    if not run.setting.inputs.together(*roles):
        devices = [d for role in roles for d in run.meshes[role].devices.flat]
        if run.config.launcher == "ray" or len({d.process_index for d in devices}) > 1:
            return  # what one sends goes through the host
    calls = piece_programs(xs, targets)
    for verb, role, beside in zip(("cut", "join"), roles, held, strict=True):
        mine = [call for call in calls if call[0].__name__ == verb]
        if mine:
            jitted, pieces = max(mine, key=lambda call: local_bytes(call[1]))
            given, calls_a_step = (pieces,), len(mine)
            yield Program(role, f"{name}: {verb}", jitted, given, beside=beside, calls=calls_a_step)


def _sampling(run: RunPrograms, role: str, model: DecoderConfig, share: float) -> Iterator[Program]:
    """Yields the programs of a role's sampling engine: those of training or, of a role that samples
    for evaluations alone, of these; and the decode steps of evaluations, where these are another
    program.

    Args:
        share: fraction of the training batches that this role samples.
    """
    c, m, teaches = run.config, run.setting, role == "teacher"
    most = c.teacher_new_tokens if teaches else c.max_new_tokens
    engine = Engine(
        model,
        run.meshes[role],
        slots=c.rollout.slots or m.sequences,
        max_prompt_tokens=c.teacher_prompt_tokens if teaches else c.max_prompt_tokens,
        max_new_tokens=max(most, c.eval.max_new_tokens or 0),
        launch_tokens=c.rollout.launch_tokens,
        cache_tokens=None if teaches else c.rollout.cache_tokens,
        episodes=not teaches and c.environment.name is not None,
    )
    asks, params = asked(c, role), run.params(role, model)
    ways = [(sampling_params(c, "train", most), asks[0])] if share > 0 else []
    if evaluated(c, role):
        ways.append((sampling_params(c, "eval", most), asks[-1]))
    kinds = set()
    for i, (sampling, (prompts, samples)) in enumerate(ways):
        for program in engine_programs(
            *(role, engine, params, sampling, prompts, samples),
            prefilled=m.prefill_rows(role),
            width=m.prompts(role),
            record=c.policy.router_replay and not i and not teaches,
        ):
            name, calls = program.name, program.calls
            if name == "decode":
                if (kind := jax.tree.structure(program.args[6])) in kinds:
                    continue
                kinds.add(kind)
                name += " for evaluations" * bool(i)
            elif i:
                continue
            elif name == "answers of environments":
                calls *= c.environment.max_turns - 1
            yield replace(program, name=name, calls=0 if i else math.ceil(share * calls))


def rollout(run: RunPrograms) -> Iterator[Program]:
    c, m, model, role = run.config, run.setting, run.setting.sampled("rollout"), "rollout"
    base = m.base_bytes(role) if c.rollout.merge else 0  # nothing else reads it
    for program in _sampling(run, role, model, sampled_share(c)):
        yield replace(program, beside=program.beside + base)
    if c.rollout.merge:
        under, _ = frozen_and_trained(run.params(role, run.student, layout="stacked"))
        _, adapters = frozen_and_trained(run.params(role, run.student))
        jitted = merge_adapters_program(run.student, run.meshes[role])
        given, shared = (under, adapters), local_bytes(under) - base
        yield Program(role, "merge", jitted, given, ("weight sync",), beside=-shared)
    if c.distill.signal == "student_topk" and m.signal is not None:
        jitted = topk_program(Projection.of(c, run.meshes[role], m.vocab), model)
        given = run.params(role, model), run.sequences(role, m.padded_rows)
        yield Program(role, "top-k of the policy", jitted, given, ("score",))


def teacher(run: RunPrograms) -> Iterator[Program]:
    """Yields scoring by each teacher, what makes one signal of several, and sampling."""
    c, m, role = run.config, run.setting, "teacher"
    parts = c.teacher.num_microbatches
    combines = bool(c.teachers) and c.mixture is not None and c.distill.signal != "hidden"
    weights, held = run.teacher_bytes, sum(run.teacher_bytes.values())
    each = [run.scored(role, model, parts) for _, model in run.teachers]
    for (name, model), (rows, group) in zip(run.teachers, each, strict=True):
        jitted, given = run.score(rows, (name, model), group, sends=combines)
        beside = (parts - 1) * local_bytes(run.signal(role, rows))
        beside += 0 if c.offload.frozen else held - weights[name]
        title = f"score by {name}" if name else "score"
        phases = ("score",) if weights[name] == max(weights.values()) else ()
        yield Program(role, title, jitted, given, phases, beside=beside, calls=parts)
    n = max(rows for rows, _ in each)
    projection = Projection.of(c, run.meshes[role], m.vocab)
    if c.teachers and c.mixture is None:  # a teacher's rows go among those of the ones before it
        jitted, signal = merge_program(projection, max(m.teacher_widths)), run.signal(role, n)
        given, calls = (signal, signal, run.array(role, bool, n)), parts * len(run.teachers)
        yield Program(role, "merge", jitted, given, beside=held, calls=calls)
    elif c.teachers:  # one signal of the hidden states of all
        models, dtype = m.inputs.teachers, c.teacher.compute_dtype
        hidden = tuple(run.array(role, dtype, n, m.new_tokens, one.d_model) for one in models)
        heads = tuple(head(run.params(role, one)) for one in models) if combines else None
        ids = None
        if c.distill.signal == "student_topk":
            ids = run.array(role, jnp.int32, n, m.new_tokens, c.distill.top_k)
        shares = run.array(role, jnp.float32, n, len(models))
        given = (hidden, heads, shares, run.sequences(role, n), ids)
        jitted = mixture_program(projection, [model.final_softcap for model in models])
        beside = held - local_bytes(heads)
        yield Program(role, "mixture", jitted, given, ("combine",), beside=beside, calls=parts)
    if generates(c, role):
        share = 1 - c.distill.on_policy_fraction if c.distill.seq_kd else 0.0
        for name, model in run.teachers:
            for program in _sampling(run, role, model, share / len(run.teachers)):
                yield replace(program, name=f"{program.name} by {name}" if name else program.name)


def reference(run: RunPrograms) -> Iterator[Program]:
    c, model, role = run.config, run.setting.reference, "reference"
    temperature, chunk = c.sampling.temperature, c.distill.loss_chunk
    jitted = reference_program(model, run.meshes[role], temperature, chunk)
    rows = run.scored(role, model, c.reference.num_microbatches)
    given = (run.params(role, model), run.sequences(role, *rows))
    yield Program(role, "score", jitted, given, calls=c.reference.num_microbatches)


def reward(run: RunPrograms) -> Iterator[Program]:
    """Yields the reward model, if there is one, on a full batch of the longest sequences."""
    c, model, role = run.config.rewards, run.setting.inputs.reward, "reward"
    if model is not None:
        longest = c.max_tokens or run.setting.width + TEMPLATE_TOKENS
        weights = run.array(role, jnp.float32, model.d_model, whole=True)
        given = (model, run.meshes[role], run.params(role, model), weights)
        batch = _batch(run, role, min(longest, model.max_positions), c.batch_tokens)
        yield Program(role, "score", score_batch, (*given, *batch))


def grouper(run: RunPrograms) -> Iterator[Program]:
    """Yields the encoder of similarity groups on a full batch of the longest texts."""
    c, model, role = run.config.grouper, run.setting.inputs.grouper, "grouper"
    if model is not None:
        mesh, dtype = run.meshes[role], jnp.dtype(c.compute_dtype)
        shapes = {path: jax.ShapeDtypeStruct(s, dtype) for path, s in bert.shapes(model).items()}
        params = _placed(bert.tree(shapes), bert.param_shardings(model, mesh))
        batch = _batch(run, role, min(run.setting.new_tokens, model.max_tokens), c.batch_tokens)
        yield Program(role, "embed", encode_batch, (model, mesh, params, *batch))


def _batch(
    run: RunPrograms, role: str, longest: int, batch_tokens: int
) -> Iterator[jax.ShapeDtypeStruct]:
    """Returns the abstract tokens and mask of a full batch of the longest texts."""
    width = width_of(longest, longest)
    rows = rows_of(width, batch_tokens) * run.setting.axes[role].rows
    return (run.array(role, dtype, rows, width) for dtype in (jnp.int32, bool))


MAKERS: dict[str, Callable[[RunPrograms], Iterator[Program]]] = {
    maker.__name__: maker for maker in (actor, rollout, teacher, reference, reward, grouper)
}


def engine_programs(
    role: str,
    engine: Engine,
    params: Params,
    sampling: SamplingParams,
    prompts: int,
    samples: int,
    *,
    prefilled: int,
    width: int,
    record: bool = False,
) -> Iterator[Program]:
    """Yields the programs of one `Engine.generate` that samples `samples` completions of each of
    `prompts` prompts: prefill, the copy of keys and values into rows, launches of decode steps, and
    changes of the cache's size. Their `calls` are about as many as one `generate` makes: of
    `extend`, in each turn.

    Args:
        params: abstract, unstacked, with their shardings.
        prefilled: prompts of each data shard in one prefill.
        width: of the arrays of prompts.
    """
    config, mesh, shards = engine.config, engine.mesh, engine.row_shards
    dtype = params["norm"]["scale"].dtype

    def array(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec())

    def rows(*shape: int) -> jax.ShapeDtypeStruct:
        return array(shape, jnp.int32, PartitionSpec(ROWS))

    def cache(n: int, length: int) -> Cache:
        made = jax.eval_shape(lambda: decode.new_cache(config, None, n, length, dtype))
        if mesh is None:
            return made
        specs = decode.cache_specs(mesh, made)
        return jax.tree.map(lambda x, spec: array(x.shape, x.dtype, spec), made, specs)

    def program(
        name: str, jitted: Any, *arrays: Any, calls: int, beside: Any = (), **static: Any
    ) -> Program:
        otherwise = "waits" if name.endswith("again") else "eval"
        given = (config, mesh, *arrays), (name,), static, local_bytes(beside), calls, otherwise
        return Program(role, name, jitted, *given)

    # The caches of prefilled prompts, of rows that slots share, and of slots or pages.
    paged, each = engine.pages is not None, engine.slots // shards
    count = shards * rows_at_most(each, shards, samples, prompts)
    size = (engine.pages * shards, PAGE) if engine.pages else (engine.slots, engine.length)
    shared, slots = cache(count, width), cache(*size)

    # The first filling, and a refill each time that so many slots are free.
    refills = -(-max(prompts * samples - engine.slots, 0) // engine.min_free)
    fills = max(-(-prompts // (prefilled * shards)), 1 + refills)
    prompt = params, whole(prefilled * shards, width), whole(prefilled * shards)
    held: Any = shared, slots
    yield program("prefill", decode.prefill, *prompt, beside=held, calls=fills, record=record)
    copies: Any = shared, cache(prefilled * shards, width), whole(count)
    yield program("insert", decode.insert, *copies, beside=(params, slots), calls=fills)

    # The start of the cache, and its largest layer as it grows and as slots are given up.
    layers = [entry for entry in slots if entry]
    pairs = [entry for entry in layers if not isinstance(entry, Recurrent)]
    keys, values = largest = max(pairs, key=lambda pair: pair[0].size)
    held = params, shared
    yield program("new cache", decode.new_cache, *size, dtype, beside=held, calls=1)
    held = *held, [layer for layer in slots if layer is not largest]
    lengths = sorted({engine.cache_length(n, engine.slots) for n in range(1, engine.length + 1)})
    if not paged and len(lengths) > 1:
        shape = (*keys.shape[:-2], lengths[-2], keys.shape[-1])
        shorter = (jax.ShapeDtypeStruct(shape, dtype, sharding=keys.sharding),) * 2
        calls, given = len(pairs) * (len(lengths) - 1), ([shorter], size[1], None)
        yield program("longer cache", decode.resize, *given, beside=held, calls=calls)
    fewer = {left for n in range(1, each) if (left := engine.fewer_slots(n, each)) is not None}
    if engine.pages is not None:
        fewer = {n for n in map(engine.pages_for_slots, fewer) if n < engine.pages}
    if fewer and not engine.episodes:
        name = "fewer pages" if paged else "fewer slots"
        layer: Any = [(keys, values)], size[1], rows(max(fewer) * shards)
        calls = len(layers) * len(fewer)
        yield program(name, decode.resize, *layer, beside=held, calls=calls)

    if engine.episodes:
        answers, calls = ANSWER_ROWS * shards, -(-prompts * samples // ANSWER_ROWS)
        texts = whole(answers, ANSWER_TOKENS[1]), *[whole(answers)] * 5
        arrays: Any = params, slots, shared, *texts
        yield program("answers of environments", decode.extend, *arrays, calls=calls)
    if paged:
        new = engine.max_new_tokens
        longest = engine.prompt_width(engine.max_prompt_tokens + new, beyond=new)
        arrays, held = (params, whole(shards, longest), whole(shards)), (shared, slots)
        yield program("read again", decode.prefill, *arrays, beside=held, calls=0)
        copies = slots, shared, cache(shards, longest)
        targets = whole(shards), whole(shards), whole(shards, pages_of(longest))
        arrays = *copies, *targets
        yield program("insert again", decode.insert_again, *arrays, beside=params, calls=0)

    knobs = sampling_arrays(sampling, 0, 0)
    knobs = jax.tree.map(lambda x: array(x.shape, x.dtype, PartitionSpec()), knobs)
    seats = Seats(rows(count, seats_of_row(each, samples)), rows(count), rows(engine.slots))
    pages = None
    if engine.pages is not None:
        owners = rows(engine.pages * shards)
        most = pages_of(engine.cache_length(engine.max_new_tokens, engine.slots))
        pages = Pages(owners, owners, rows(engine.slots, most))
    launches = -(-sampling.max_new_tokens // engine.launch_tokens)
    yield program(
        "decode",
        decode.launch_on(engine.target, mesh),
        *(params, slots, whole(engine.slots, 6), whole(), knobs, (shared, seats), pages),
        calls=launches * -(-prompts * samples // engine.slots),
        n_tokens=engine.launch_tokens,
        check_every=engine.check_every,
        record=record,
    )
