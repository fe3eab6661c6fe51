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
from jaxrl.config.schema import Config
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
from jaxrl.plan.plan_inputs import Account, PlanInputs, Setting, asked, evaluated, generates
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
from jaxrl.sharding.axes import ROWS, Axes
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


def shaped(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


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

    def __init__(
        self,
        config: Config,
        inputs: PlanInputs,
        axes: Mapping[str, Axes],
        devices: Sequence[Any],
    ):
        """
        Args:
            config: with the dtypes for that machine filled in (`Config.with_dtypes`).
            inputs, axes: models, placement and mesh axes of the plan.
            devices: of the machine; the placement refers to them by index.
        """
        self.config, self.student = config, inputs.student
        self.setting = Setting(config, inputs, axes)
        where = inputs.placement.roles
        self.meshes: dict[str, Mesh] = {
            role: role_mesh([devices[i] for i in where[role].devices], sizes)
            for role, sizes in axes.items()
        }
        names = (config.teachers or ("",)) if inputs.teachers else ()
        self.teachers = list(zip(names, inputs.teachers, strict=True))
        """Name and model of each."""
        self.teacher_bytes = {
            name: local_bytes(self.params("teacher", model))
            for name, model in self.teachers
            if "teacher" in axes
        }
        """Name of each -> bytes of its weights on one device."""

    def __iter__(self) -> Iterator[Program]:
        for role in self.meshes:
            for program in MAKERS[role](self):
                more = self.setting.in_flight if role == "teacher" else 0
                more -= self.setting.counted_as_the_actors(role)
                yield replace(program, beside=program.beside + more)

    def rows(self, role: str) -> NamedSharding:
        """Returns the sharding of the rows of a batch over the axes `data` and `fsdp` of a role's
        mesh."""
        return NamedSharding(self.meshes[role], PartitionSpec(ROWS))

    def everywhere(self, role: str) -> NamedSharding:
        return NamedSharding(self.meshes[role], PartitionSpec())

    def params(
        self, role: str, model: DecoderConfig, dtype: Any = None, layout: Layout | None = None
    ) -> Params:
        """Returns the weights of a model, in the dtype and layout of the role unless others are
        given."""
        dtype = self.config.roles[role].compute_dtype if dtype is None else dtype
        layout = layout or self.setting.layout(role)
        abstract = abstract_params(model, jnp.dtype(dtype), layout)
        shardings = param_shardings(model, self.meshes[role], layout)
        return jax.tree.map(lambda x, s: shaped(x.shape, x.dtype, s), abstract, shardings)

    def sequences(self, role: str, rows: int, group: int = 1) -> Sequences:
        m, at = self.setting, self.rows(role)
        width = m.prompts(role) + m.completions(role)
        return Sequences(
            shaped((rows, width), jnp.int32, at),
            shaped((rows, width), bool, at),
            shaped((rows, m.completions(role)), bool, at),
            group,
        )

    def signal(self, role: str, rows: int) -> TeacherSignal:
        """Returns the teacher's signal for so many rows, as abstract arrays on the mesh of a
        role."""
        c, m, at = self.config, self.setting, self.rows(role)
        if "teacher" not in self.meshes:  # the signal is read from disk
            width = 0 if m.teacher is None else m.teacher.d_model
            shapes = Options.of(c.distill, m.vocab).tensors(c.teacher.compute_dtype, width)
            arrays = {
                name: shaped((rows, m.new_tokens, *dims), jnp.dtype(dtype), at)
                for name, (dtype, dims) in shapes.items()
            }
            return signal_of(arrays)
        jitted, args = self.score(rows, self.teachers[-1])
        out = jax.eval_shape(jitted, *args)
        if m.aligned and role == "actor":
            out = replace(out, baseline=jax.ShapeDtypeStruct((rows, m.new_tokens), jnp.float32))
        if m.signal == "hidden":  # of several teachers: those of the widest, or of all
            width = max(m.teacher_widths) if c.mixture is None else sum(m.teacher_widths)
            shape = (rows, m.new_tokens, width)
            out = replace(out, hidden=jax.ShapeDtypeStruct(shape, out.hidden.dtype))
        signal: TeacherSignal = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), out)
        return signal

    def outcomes(self, role: str) -> Outcomes:
        """Returns those of the student's and the teacher's tokens, where these are others."""
        (_, teacher), *_ = self.teachers
        counts, at = (self.student.vocab_size, teacher.vocab_size), self.everywhere(role)
        return Outcomes(*(shaped((n,), jnp.int32, at) for n in counts))

    def scored(self, role: str, model: DecoderConfig, parts: int) -> tuple[int, int]:
        """Returns the rows of one of `parts` slices of the batch over all devices of a role, and
        the number of rows that share a prompt."""
        run, axes = self.setting.scored(role, model, parts), self.setting.axes[role]
        return run.rows * axes.rows, 1 if run.shared is None else run.shared[0]

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
        ids, at = None, self.rows(role)
        aligned: tuple[Any, ...] = ()
        if m.aligned:
            mine, theirs = (rows, m.new_tokens), (rows, m.completions(role))
            one, starts = shaped(mine, jnp.int32, at), shaped(theirs, bool, at)
            aligned = (TokenAlignment(one, one, one, starts), self.outcomes(role))
        if sends:
            distill = c.distill.model_copy(update={"signal": "hidden"})
            projection = replace(projection, distill=distill)
        elif c.distill.signal == "student_topk":
            ids = shaped((rows, m.new_tokens, c.distill.top_k), jnp.int32, self.rows(role))
        given = (self.params("teacher", model), self.sequences(role, rows, group), ids, *aligned)
        return score_program(model, projection), given


def actor(run: RunPrograms) -> Iterator[Program]:
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
    own = local_bytes((state, frozen))

    def one(name: str, jitted: Any, *given: Any, start: bool = False) -> Program:
        if start:
            return Program("actor", name, jitted, given, calls=0, otherwise="start")
        return Program("actor", name, jitted, given, beside=own - local_bytes(given))

    # At the start of a run, and of a batch before its first update.
    yield one("optimizer state", programs.start, state.params, start=True)
    if state.ema is not None:
        yield one("moving average", programs.initial_ema, state.params, start=True)
    dtype = c.teacher.compute_dtype
    if m.signal == "hidden" and c.teacher_follows:
        yield one("copy of the head", programs.copy_head, state.ema or state.params)
    elif m.signal == "hidden" and not m.aligned:
        for model in {model.vocab_size: model for _, model in run.teachers}.values():
            if model.vocab_size != m.vocab:
                jitted = first_rows_program(m.vocab, model.d_model, mesh)
                whole = (model.vocab_size, model.d_model)
                at = shaped(whole, dtype, head_sharding(whole, mesh))
                yield one("rows of the head", jitted, at, start=True)
    if signal is not None and "teacher" in run.meshes:  # a batch's signal comes from there
        parts, sent = c.teacher.num_microbatches, []
        size = max(run.scored("teacher", model, parts)[0] for _, model in run.teachers)
        part = replace(signal, baseline=None) if isinstance(signal, AlignedSignal) else signal
        for leaf in jax.tree.leaves(part):
            counts = [min(size, len(leaf) - start) for start in range(0, len(leaf), size)]
            pieces = [shaped((k, *leaf.shape[1:]), leaf.dtype, run.rows("teacher")) for k in counts]
            sent.append(Rows(tuple(pieces)) if len(pieces) > 1 else pieces[0])
        held = sum(run.teacher_bytes.values()), own
        yield from _moves(run, "signal", ("teacher", "actor"), sent, [rows] * len(sent), held)
    if isinstance(signal, AlignedSignal):
        sampled = shaped(signal.kinds.shape, jnp.float32, signal.kinds.sharding)
        mask = shaped(signal.kinds.shape, bool, signal.kinds.sharding)
        yield one("baseline", span_baseline, signal.kinds, signal.span_logprobs, sampled, mask)
    passes = c.actor.epochs_per_batch * c.minibatches
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
        beside = local_bytes((state.opt_state, state.ema, frozen, batch))
        beside -= local_bytes((sequences, base))
        yield Program("actor", "log-probs before", programs.old, given, beside=beside)
    yield from _published(run, programs, state.params, "rollout", own)
    if c.teacher_follows:
        yield from _published(run, programs, state.ema or state.params, "teacher", own)


def _published(
    run: RunPrograms, programs: ActorPrograms, given: Params, role: str, own: int
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
            title = f"{name}: {verb}"
            yield Program(role, title, jitted, (pieces,), beside=beside, calls=len(mine))


def _sampling(run: RunPrograms, role: str, model: DecoderConfig, share: float) -> Iterator[Program]:
    """Makes the programs of a role's sampling engine: those of training or, of a role that samples
    for evaluations alone, of these; and the decode steps of evaluations, where these are another
    program.

    Args:
        share: fraction of the training batches that this role samples.
    """
    c, m = run.config, run.setting
    most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
    engine = Engine(
        model,
        run.meshes[role],
        slots=c.rollout.slots or m.sequences,
        max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
        max_new_tokens=max(most, c.eval.max_new_tokens or 0),
        launch_tokens=c.rollout.launch_tokens,
        cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
        episodes=role == "rollout" and c.environment.name is not None,
    )
    asks = asked(c, role)
    ways = [(sampling_params(c, "train", most), asks[0])] if share > 0 else []
    if evaluated(c, role):
        ways.append((sampling_params(c, "eval", most), asks[-1]))
    kinds = set()
    for i, (sampling, (prompts, samples)) in enumerate(ways):
        for program in engine_programs(
            *(role, engine, run.params(role, model), sampling, prompts, samples),
            prefilled=m.prefill_rows(role),
            width=m.prompts(role),
            record=c.policy.router_replay and not i and role != "teacher",
        ):
            name, calls = program.name, program.calls
            if i and name != "decode":
                continue
            if name == "decode":
                if (kind := jax.tree.structure(program.args[6])) in kinds:
                    continue
                kinds.add(kind)
                name += " for evaluations" * bool(i)
            if name == "answers of environments":
                calls *= c.environment.max_turns - 1
            yield replace(program, name=name, calls=0 if i else math.ceil(share * calls))


def rollout(run: RunPrograms) -> Iterator[Program]:
    c, model = run.config, run.setting.sampled("rollout")
    base = run.setting.base_bytes("rollout") if c.rollout.merge else 0  # nothing else reads it
    for program in _sampling(run, "rollout", model, sampled_share(c)):
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


def teacher(run: RunPrograms) -> Iterator[Program]:
    """Yields scoring by each teacher, what makes one signal of several, and sampling."""
    c, m, at = run.config, run.setting, run.rows("teacher")
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
    n, held = max(rows for rows, _ in each), sum(weights.values())
    projection = Projection.of(c, run.meshes["teacher"], m.vocab)
    if c.teachers and c.mixture is None:  # a teacher's rows go among those of the ones before it
        jitted, signal = merge_program(projection, max(m.teacher_widths)), run.signal("teacher", n)
        given = (signal, signal, shaped((n,), bool, at))
        calls = parts * len(run.teachers)
        yield Program("teacher", "merge", jitted, given, beside=held, calls=calls)
    elif c.teachers:  # one signal of the hidden states of all
        dtype, models = c.teacher.compute_dtype, [model for _, model in run.teachers]
        hidden = tuple(shaped((n, m.new_tokens, one.d_model), dtype, at) for one in models)
        heads: tuple[Any, ...] | None = None
        if combines:
            heads = tuple(head(run.params("teacher", model)) for model in models)
        ids = None
        if c.distill.signal == "student_topk":
            ids = shaped((n, m.new_tokens, c.distill.top_k), jnp.int32, at)
        shares = shaped((n, len(models)), jnp.float32, at)
        given = (hidden, heads, shares, run.sequences("teacher", n), ids)
        held -= local_bytes(heads)
        jitted = mixture_program(projection, [model.final_softcap for model in models])
        yield Program("teacher", "mixture", jitted, given, ("combine",), beside=held, calls=parts)
    if generates(c, "teacher"):
        share = 1 - c.distill.on_policy_fraction if c.distill.seq_kd else 0.0
        for name, model in run.teachers:
            for program in _sampling(run, "teacher", model, share / len(run.teachers)):
                yield replace(program, name=f"{program.name} by {name}" if name else program.name)


def reference(run: RunPrograms) -> Iterator[Program]:
    c = run.config
    parts = c.reference.num_microbatches
    model = run.setting.reference
    jitted = reference_program(
        model, run.meshes["reference"], c.sampling.temperature, c.distill.loss_chunk
    )
    rows = run.scored("reference", model, parts)
    given = (run.params("reference", model), run.sequences("reference", *rows))
    yield Program("reference", "score", jitted, given, calls=parts)


def reward(run: RunPrograms) -> Iterator[Program]:
    """Yields the reward model, if there is one, on a full batch of the longest sequences."""
    c, model = run.config.rewards, run.setting.inputs.reward
    if model is None:
        return
    longest = c.max_tokens or run.setting.width + TEMPLATE_TOKENS
    params = run.params("reward", model)
    head = shaped((model.d_model,), jnp.float32, run.everywhere("reward"))
    batch = _batch(run, "reward", min(longest, model.max_positions), c.batch_tokens)
    given = (model, run.meshes["reward"], params, head, *batch)
    yield Program("reward", "score", score_batch, given)


def grouper(run: RunPrograms) -> Iterator[Program]:
    """Yields the encoder of similarity groups on a full batch of the longest texts."""
    c, model, mesh = run.config.grouper, run.setting.inputs.grouper, run.meshes["grouper"]
    if model is None:
        return
    dtype, shardings = jnp.dtype(c.compute_dtype), bert.param_shardings(model, mesh)
    shapes = {path: jax.ShapeDtypeStruct(s, dtype) for path, s in bert.shapes(model).items()}
    params = jax.tree.map(lambda x, s: shaped(x.shape, dtype, s), bert.tree(shapes), shardings)
    longest = min(run.setting.new_tokens, model.max_tokens)
    batch = _batch(run, "grouper", longest, c.batch_tokens)
    yield Program("grouper", "embed", encode_batch, (model, mesh, params, *batch))


def _batch(
    run: RunPrograms, role: str, longest: int, batch_tokens: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the abstract tokens and mask of a full batch of the longest texts."""
    axes, at = run.setting.axes[role], run.rows(role)
    width = width_of(longest, longest)
    shape = (rows_of(width, batch_tokens) * axes.rows, width)
    return shaped(shape, jnp.int32, at), shaped(shape, bool, at)


MAKERS: dict[str, Callable[[RunPrograms], Iterator[Program]]] = {
    "actor": actor,
    "rollout": rollout,
    "teacher": teacher,
    "reference": reference,
    "reward": reward,
    "grouper": grouper,
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
    """Makes the programs of one `Engine.generate` that samples `samples` completions of each of
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
        name: str, jitted: Any, *arrays: Any, beside: Any, calls: int, **static: Any
    ) -> Program:
        otherwise = "waits" if name.endswith("again") else "eval"
        given = (config, mesh, *arrays), (name,), static, local_bytes(beside), calls, otherwise
        return Program(role, name, jitted, *given)

    # The caches of prefilled prompts, of rows that slots share, and of slots or pages.
    count = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
    size = (engine.slots, engine.length) if engine.pages is None else (engine.pages * shards, PAGE)
    shared, slots = cache(count, width), cache(*size)

    # The first filling, and a refill each time that so many slots are free.
    refills = -(-max(prompts * samples - engine.slots, 0) // engine.min_free)
    fills = max(-(-prompts // (prefilled * shards)), 1 + refills)
    prompt = whole(prefilled * shards, width), whole(prefilled * shards)
    beside: Any = shared, slots
    yield program(
        "prefill", decode.prefill, params, *prompt, beside=beside, calls=fills, record=record
    )
    copies: Any = shared, cache(prefilled * shards, width), whole(count)
    yield program("insert", decode.insert, *copies, beside=(params, slots), calls=fills)

    # The start of the cache, and its largest layer as it grows and as slots are given up.
    layers = [entry for entry in slots if entry]
    pairs = [entry for entry in layers if not isinstance(entry, Recurrent)]
    keys, values = largest = max(pairs, key=lambda pair: pair[0].size)
    start, beside = (size[0], size[1], dtype), (params, shared)
    yield program("new cache", decode.new_cache, *start, beside=beside, calls=1)
    others = *beside, [layer for layer in slots if layer is not largest]
    lengths = sorted({engine.cache_length(n, engine.slots) for n in range(1, engine.length + 1)})
    if engine.pages is None and len(lengths) > 1:
        shape = (*keys.shape[:-2], lengths[-2], keys.shape[-1])
        shorter = [tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=keys.sharding) for _ in "kv")]
        calls = len(pairs) * (len(lengths) - 1)
        layer: Any = shorter, size[1], None
        yield program("longer cache", decode.resize, *layer, beside=others, calls=calls)
    each = engine.slots // shards
    fewer = {left for n in range(1, each) if (left := engine.fewer_slots(n, each)) is not None}
    if engine.pages is not None:
        fewer = {n for n in map(engine.pages_for_slots, fewer) if n < engine.pages}
    if fewer and not engine.episodes:
        name = "fewer slots" if engine.pages is None else "fewer pages"
        layer = [(keys, values)], size[1], rows(max(fewer) * shards)
        calls = len(layers) * len(fewer)
        yield program(name, decode.resize, *layer, beside=others, calls=calls)

    if engine.episodes:
        arrays: Any
        answers, calls = ANSWER_ROWS * shards, -(-prompts * samples // ANSWER_ROWS)
        arrays = whole(answers, ANSWER_TOKENS[1]), *[whole(answers)] * 5
        arrays = params, slots, shared, *arrays
        yield program("answers of environments", decode.extend, *arrays, beside=(), calls=calls)
    if engine.pages is not None:
        new = engine.max_new_tokens
        longest = engine.prompt_width(engine.max_prompt_tokens + new, beyond=new)
        arrays, beside = (whole(shards, longest), whole(shards)), (shared, slots)
        yield program("read again", decode.prefill, params, *arrays, beside=beside, calls=0)
        copies, beside = (slots, shared, cache(shards, longest)), params
        targets = whole(shards), whole(shards), whole(shards, pages_of(longest))
        name = "insert again"
        yield program(name, decode.insert_again, *copies, *targets, beside=beside, calls=0)

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
        beside=(),
        calls=launches * -(-prompts * samples // engine.slots),
        n_tokens=engine.launch_tokens,
        check_every=engine.check_every,
        record=record,
    )
