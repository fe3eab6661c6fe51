"""The jitted programs that a run would call, with abstract arguments, for compilation ahead of
time.

Every argument is a `jax.ShapeDtypeStruct` with a sharding over the devices of the target machine.
Nothing is allocated, and no weight is read. The functions below mirror how `roles` and `sampling`
build and call their programs.
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

from jaxrl.algorithms.aligned import stretch_baseline
from jaxrl.algorithms.methods import method_of, sampled_share
from jaxrl.algorithms.signals import Projection
from jaxrl.config.schema import Config
from jaxrl.losses.cells import WORDS, Cells, Side
from jaxrl.models import bert
from jaxrl.models.batching import rows_of, width_of
from jaxrl.models.cached import Cache, keys_of
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Recurrent
from jaxrl.models.lora import frozen_and_trained, join
from jaxrl.models.pages import PAGE, Pages
from jaxrl.models.parameters import Layout, Params, abstract_params, head
from jaxrl.models.rules import head_sharding, param_shardings
from jaxrl.models.shared_prompts import Seats
from jaxrl.plan.inputs import PlanInputs
from jaxrl.plan.memory import Account
from jaxrl.plan.roles import (
    TEMPLATE_TOKENS,
    TO_TEACHER,
    UPDATE_PHASES,
)
from jaxrl.plan.sampling import EVALUATIONS, asked, prefill_rows
from jaxrl.plan.setting import Setting
from jaxrl.roles.encoder import encode_batch
from jaxrl.roles.reference import reference_program
from jaxrl.roles.reward_model import score_batch
from jaxrl.roles.rollout import (
    evaluation_sampling,
    merge_adapters_program,
    topk_program,
    training_sampling,
)
from jaxrl.roles.scorer import score_program
from jaxrl.roles.teachers import merge_program, mixture_program
from jaxrl.roles.update import BASE, ActorPrograms, first_rows_program
from jaxrl.sampling import decode
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS, Engine
from jaxrl.sampling.page_pool import pages_of
from jaxrl.sampling.prompt_rows import rows_at_most
from jaxrl.sampling.sampler import sampling_arrays
from jaxrl.sharding.axes import ROWS, Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.reshard import Rows, piece_programs
from jaxrl.teacher.protocol import Options
from jaxrl.types import Sequences, TeacherSignal, TokenAlignment, TrainBatch


@dataclass(frozen=True)
class Program:
    """A jitted function of a role, with the abstract arguments of its largest call in a run."""

    role: str
    name: str
    jitted: Any
    args: tuple[Any, ...]
    phases: tuple[str, ...]
    """Phases of the role in the plan (`plan.memory.Account`) that this program covers. () if the
    plan has no figure of its own for it."""
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
        """Bytes of its role on one device while it runs, as the plan has them; None where the plan
        does not count it apart, because a larger program of the role covers it.
        """
        more = [size for phase, size in account.phases().items() if phase in self.phases]
        return account.resident + max(more) if more else None

    def held(self, compiled: Any, total: int | None = None) -> int:
        """Bytes that its role holds on one device while the compiled program runs.

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
    """Bytes on one device of a pytree of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    )


class RunPrograms:
    """Iterates over the programs of a run as planned for a machine."""

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

    def __iter__(self) -> Iterator[Program]:
        for role in self.meshes:
            for program in MAKERS[role](self) if role in MAKERS else ():
                more = self.setting.in_flight if role == "teacher" else 0
                more -= self.setting.counted_as_the_actors(role)
                yield replace(program, beside=program.beside + more)

    def apart(self, *roles: str) -> bool:
        """Whether roles are in several processes, so that what one sends goes through the host."""
        if self.setting.inputs.together(*roles):
            return False
        devices = [d for role in roles for d in self.meshes[role].devices.flat]
        return self.config.launcher == "ray" or len({d.process_index for d in devices}) > 1

    def rows(self, role: str) -> NamedSharding:
        """Sharding of the rows of a batch over the axes `data` and `fsdp` of a role's mesh."""
        return NamedSharding(self.meshes[role], PartitionSpec(ROWS))

    def everywhere(self, role: str) -> NamedSharding:
        return NamedSharding(self.meshes[role], PartitionSpec())

    def params(self, role: str, model: DecoderConfig, dtype: Any, layout: Layout) -> Params:
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
        """The teacher's signal for so many rows, as abstract arrays on the mesh of a role."""
        c, m, at = self.config, self.setting, self.rows(role)
        if "teacher" not in self.meshes:  # the signal is read from disk
            shapes = Options.of(c.distill, m.vocab).fields
            if m.signal == "hidden" and m.teacher is not None:
                shapes = {"hidden": (c.teacher.compute_dtype, (m.teacher.d_model,))}
            arrays = {
                name: shaped((rows, m.new_tokens, *dims), jnp.dtype(dtype), at)
                for name, (dtype, dims) in shapes.items()
            }
            return TeacherSignal(**arrays)
        jitted, args = self.score(rows, self.teachers[-1])
        out = jax.eval_shape(jitted, *args)
        if m.aligned and role == "actor":
            out = replace(out, baseline=jax.ShapeDtypeStruct((rows, m.new_tokens), jnp.float32))
        if m.signal == "hidden":  # of several teachers: those of the widest, or of all
            width = max(m.teacher_widths) if c.mixture is None else sum(m.teacher_widths)
            shape = (rows, m.new_tokens, width)
            out = replace(out, hidden=jax.ShapeDtypeStruct(shape, out.hidden.dtype))
        found: TeacherSignal = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), out)
        if role != "actor" or not c.teachers:
            return found
        weights = (rows, m.new_tokens, len(c.teachers))
        return replace(found, weights=shaped(weights, jnp.float32, at))

    def cells(self, role: str) -> Cells:
        """Of the student's and the teacher's tokens, where these are others."""
        (_, teacher), *_ = self.teachers

        def each(n: int) -> jax.ShapeDtypeStruct:
            return shaped((n,), jnp.int32, self.everywhere(role))

        counts = self.student.vocab_size, teacher.vocab_size
        mine, theirs = (Side(*[each(n)] * 4) for n in counts)
        return Cells(mine, theirs, each(self.student.vocab_size + 2))

    def scored(self, role: str, model: DecoderConfig, parts: int) -> tuple[int, int]:
        """(rows of one of `parts` slices of the batch over all devices of a role, number of rows
        that share a prompt)."""
        run, axes = self.setting.scored(role, model, parts), self.setting.axes[role]
        return run.rows * axes.rows, 1 if run.shared is None else run.shared[0]

    @property
    def teachers(self) -> list[tuple[str, DecoderConfig]]:
        """Name and model of each teacher."""
        models = self.setting.inputs.teachers
        return list(zip(self.config.teachers or ("",), models, strict=True))

    def score(
        self, rows: int, teacher: tuple[str, DecoderConfig], group: int = 1, *, sends: bool = False
    ) -> tuple[Any, tuple[Any, ...]]:
        """A teacher's program and its arguments.

        Args:
            sends: it sends hidden states, of which a mixture is made.
        """
        c, m, role = self.config, self.setting, "teacher"
        _, model = teacher
        layout: Layout = "unstacked" if m.teacher_samples else "stacked"
        params = self.params(role, model, c.teacher.compute_dtype, layout)
        vocab = model.vocab_size if m.aligned else m.vocab
        projection = Projection.of(c, self.meshes[role], vocab)
        ids, at = None, self.rows(role)
        aligned: tuple[Any, ...] = ()
        if m.aligned:
            mine, theirs = (rows, m.new_tokens), (rows, m.completions(role))
            one, its = (shaped(shape, jnp.int32, at) for shape in (mine, theirs))
            bits, its_bits = (shaped((*s, WORDS), jnp.int32, at) for s in (mine, theirs))
            starts = shaped(theirs, bool, at)
            each = (*[one] * 5, bits, starts, its, its, its_bits)
            aligned = (TokenAlignment(*each), self.cells(role))
        if sends:
            distill = c.distill.model_copy(update={"signal": "hidden"})
            projection = replace(projection, distill=distill)
        elif c.distill.signal == "student_topk":
            ids = shaped((rows, m.new_tokens, c.distill.top_k), jnp.int32, self.rows(role))
        given = (params, self.sequences(role, rows, group), ids, *aligned)
        return score_program(model, projection), given


def actor(run: RunPrograms) -> Iterator[Program]:
    """The update, the log-probs before it, and the weights for the rollout."""
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
            frozen["cells"] = run.cells("actor")
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
        (state, frozen, batch, place, group),
        UPDATE_PHASES,
        calls=passes,
    )
    if batch.old_logprobs is not None:
        policy = join(base, state.params)
        given = (policy, TrainBatch(sequences), place, group)
        held = local_bytes((state.opt_state, state.ema, frozen, batch))
        held -= local_bytes((sequences, base))
        yield Program("actor", "log-probs before", programs.old, given, (), beside=held)
    yield from _published(run, programs, state.params, "rollout", own)
    if c.teacher_follows:
        yield from _published(run, programs, state.ema or state.params, "teacher", own)


def _before_updates(
    run: RunPrograms, programs: ActorPrograms, signal: TeacherSignal | None, own: int
) -> Iterator[Program]:
    """What the actor computes at the start of a run, and of a batch before its first update.

    Args:
        own: bytes of its state and of what its loss reads.
    """
    c, m, state = run.config, run.setting, programs.abstract_state()

    def one(name: str, jitted: Any, *given: Any, start: bool = False) -> Program:
        if start:
            return Program("actor", name, jitted, given, (), calls=0, otherwise="start")
        return Program("actor", name, jitted, given, (), beside=own - local_bytes(given))

    yield one("optimizer state", programs.start, state.params, start=True)
    if state.ema is not None:
        yield one("moving average", programs.average, state.params, start=True)
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
    if signal.kinds is not None:
        sampled = shaped(signal.kinds.shape, jnp.float32, signal.kinds.sharding)
        mask = shaped(signal.kinds.shape, bool, signal.kinds.sharding)
        fields = signal.kinds, signal.cells, signal.path_logprobs, sampled, mask
        yield one("baseline", stretch_baseline, *fields)


def _signal_moves(run: RunPrograms, signal: TeacherSignal, own: int) -> Iterator[Program]:
    """How a batch's signal comes from the teacher to the actor."""
    section, at = run.config.teacher, run.rows("teacher")
    parts = section.num_microbatches
    size = max(run.scored("teacher", model, parts)[0] for _, model in run.teachers)

    def sent(leaf: jax.ShapeDtypeStruct) -> Any:
        rows = [min(size, len(leaf) - start) for start in range(0, len(leaf), size)]
        each = [shaped((n, *leaf.shape[1:]), leaf.dtype, at) for n in rows]
        return Rows(tuple(each)) if len(each) > 1 else each[0]

    xs = [sent(leaf) for leaf in jax.tree.leaves(replace(signal, baseline=None, weights=None))]
    models = (run.params("teacher", m, section.compute_dtype, "stacked") for _, m in run.teachers)
    targets = [run.rows("actor")] * len(xs)
    yield from _moves(
        run, "signal", ("teacher", "actor"), xs, targets, (sum(map(local_bytes, models)), own)
    )


def _published(
    run: RunPrograms, programs: ActorPrograms, given: Params, role: str, own: int
) -> Iterator[Program]:
    """How weights of the actor come to another role: their conversion, and their way."""
    c, samples = run.config, role == "rollout" or run.setting.teacher_samples
    dtype = jnp.dtype(c.roles[role].compute_dtype)
    layout = c.rollout.layout if role == "rollout" else "unstacked" if samples else "stacked"
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
    """The programs by which arrays go from a role to another of the same process; of several that
    cut, or join, the one with the largest pieces.

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
            yield Program(role, title, jitted, (pieces,), (), beside=beside, calls=len(mine))


def rollout(run: RunPrograms) -> Iterator[Program]:
    c = run.config
    dtype, layout = c.rollout.compute_dtype, c.rollout.layout
    model = run.setting.sampled
    base = run.setting.base_bytes("rollout") if c.rollout.merge else 0  # nothing else reads it
    for program in _sampling(
        run, "rollout", model, dtype, layout, sampled_share(c), c.data.eval is not None
    ):
        yield replace(program, beside=program.beside + base)
    if c.rollout.merge:
        under, _ = frozen_and_trained(run.params("rollout", run.student, dtype, "stacked"))
        _, adapters = frozen_and_trained(run.params("rollout", run.student, dtype, layout))
        jitted = merge_adapters_program(run.student, run.meshes["rollout"], layout)
        shared = local_bytes(under) - base
        given = (under, adapters)
        yield Program("rollout", "merge", jitted, given, ("weight sync",), beside=-shared)
    if c.distill.signal == "student_topk" and run.setting.signal is not None:
        projection = Projection.of(c, run.meshes["rollout"], run.setting.vocab)
        jitted = topk_program(projection, model)
        params = run.params("rollout", model, dtype, layout)
        given = (params, run.sequences("rollout", run.setting.padded_rows))
        yield Program("rollout", "top-k of the policy", jitted, given, ("score",))


def _sampling(
    run: RunPrograms,
    role: str,
    model: DecoderConfig,
    dtype: Any,
    layout: Layout,
    share: float,
    evaluates: bool,
) -> Iterator[Program]:
    """The programs of the sampling engine: prefill of a batch of prompts, the copy of their keys
    and values into slots, launches of decode steps, and changes of the cache's size.

    Args:
        share: fraction of the training batches that this role samples.
        evaluates: whether it samples for evaluations.
    """
    c, m, mesh, at = run.config, run.setting, run.meshes[role], run.everywhere(role)
    most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
    longest = max(most, c.eval.max_new_tokens or 0)
    engine = Engine(
        model,
        mesh,
        slots=c.rollout.slots or m.sequences,
        max_prompt_tokens=c.teacher_prompt_tokens if role == "teacher" else c.max_prompt_tokens,
        max_new_tokens=longest,
        launch_tokens=c.rollout.launch_tokens,
        cache_tokens=c.rollout.cache_tokens if role == "rollout" else None,
        episodes=role == "rollout" and c.environment.name is not None,
    )
    params, width = run.params(role, model, dtype, layout), m.prompts(role)
    prompts = prefill_rows(c, role, width, m.axes[role])

    def caches_of(count: int, samples: int) -> tuple[Cache, Cache]:
        return _slots_and_rows(engine, dtype, layout, count, samples, width)

    held = _cache(engine, dtype, layout, prompts, width, None)
    first, *_ = each_asked = asked(c, role)
    slots, rows = caches = caches_of(*first)
    yield from _resized(
        run, role, engine, params, layout, slots, local_bytes((params, held, rows)), share
    )
    tokens = shaped((prompts, width), jnp.int32, at)
    lengths = shaped((prompts,), jnp.int32, at)
    fills = math.ceil(share * c.batch_size / prompts)
    yield Program(
        role,
        "prefill",
        decode.prefill,
        (model, mesh, params, tokens, lengths),
        ("prefill",),
        beside=local_bytes(caches),
        calls=fills,
    )
    filled, unfilled = (rows, slots) if rows else (slots, rows)
    where = shaped((keys_of(filled).shape[decode.BATCH],), jnp.int32, at)
    number = shaped((), jnp.int32, at)
    yield Program(
        role,
        "insert",
        decode.insert,
        (model, mesh, filled, held, where),
        (),
        beside=local_bytes((params, unfilled)),
        calls=fills,
    )
    if engine.pages is not None:
        yield from _read_again(run, role, engine, params, slots, rows, local_bytes(held))
    if engine.episodes:
        answers = ANSWER_ROWS * engine.row_shards
        tokens = shaped((answers, ANSWER_TOKENS[1]), jnp.int32, at)
        of_each = shaped((answers,), jnp.int32, at)
        yield Program(
            role,
            "answers of environments",
            decode.extend,
            (model, mesh, params, slots, tokens, of_each, of_each, of_each),
            ("answers",),
            beside=local_bytes(held),
            calls=math.ceil(share * m.sequences / ANSWER_ROWS) * (c.environment.max_turns - 1),
        )
    ways = [(training_sampling(c, most), first)] * (share > 0)
    ways += [(evaluation_sampling(c, most), each) for each in each_asked[len(ways) :] if evaluates]
    found: dict[Any, Any] = {}
    for way, (count, samples) in ways:
        knobs = jax.tree.map(lambda x: shaped(x.shape, x.dtype, at), sampling_arrays(way, 0, 0))
        own, shared = caches_of(count, samples)
        kind = jax.tree.structure(knobs), bool(shared)
        given = _shared_by(engine, shared, samples), _pages(engine, longest)
        found.setdefault(kind, (own, knobs, *given))
    table = shaped((engine.slots, 6), jnp.int32, at)
    sizes = {"n_tokens": engine.launch_tokens, "check_every": engine.check_every}
    launches = -(-m.sequences // engine.slots) * -(-c.max_new_tokens // engine.launch_tokens)
    for i, (own, knobs, *given) in enumerate(found.values()):
        name = "decode" + EVALUATIONS * bool(i)
        yield Program(
            role,
            name,
            decode.launch,
            (model, mesh, params, own, table, number, knobs, *given),
            (name,),
            sizes | {"record": c.policy.router_replay and not i and role != "teacher"},
            beside=local_bytes(held),
            calls=0 if i else math.ceil(share * launches),
        )


def _cache(
    engine: Engine, dtype: Any, layout: Layout, rows: int, length: int, split: Any = ROWS
) -> Cache:
    """Abstract arrays of a cache, its rows over the axes `split`."""
    model, mesh = engine.config, engine.mesh
    assert mesh is not None
    whole = jax.eval_shape(
        lambda: decode.new_cache(model, None, rows, length, jnp.dtype(dtype), layout)
    )
    specs = decode.cache_specs(model, mesh, split, whole)
    return jax.tree.map(lambda x, s: shaped(x.shape, x.dtype, NamedSharding(mesh, s)), whole, specs)


def _slots_and_rows(
    engine: Engine, dtype: Any, layout: Layout, prompts: int, samples: int, width: int
) -> tuple[Cache, Cache]:
    """The largest cache of all slots, and that of the prompts that they share, if any: of `samples`
    of each of so many prompts."""
    if engine.why_not_shared(samples, dtype, layout) is not None:
        return _cache(engine, dtype, layout, engine.slots, engine.length), []
    shards = engine.row_shards
    rows = shards * rows_at_most(engine.slots // shards, shards, samples, prompts)
    own = engine.slots, engine.own_length
    if engine.pages is not None:
        own = engine.pages * shards, PAGE
    return _cache(engine, dtype, layout, *own), _cache(engine, dtype, layout, rows, width)


def _shared_by(engine: Engine, rows: Cache, samples: int) -> tuple[Cache, Seats] | None:
    """What a launch reads of shared prompts, if there are any."""
    if not rows:
        return None
    assert engine.mesh is not None
    count, each = keys_of(rows).shape[decode.BATCH], NamedSharding(engine.mesh, PartitionSpec(ROWS))
    sizes = (count, min(samples, engine.slots // engine.row_shards)), (count,), (engine.slots,)
    return rows, Seats(*(shaped(size, jnp.int32, each) for size in sizes))


def _pages(engine: Engine, longest: int) -> Pages | None:
    """What a launch reads of the pages of slots with completions as long as they may be."""
    if engine.pages is None:
        return None
    assert engine.mesh is not None
    each, count = NamedSharding(engine.mesh, PartitionSpec(ROWS)), engine.pages * engine.row_shards
    width = pages_of(engine.cache_length(longest, engine.slots, own=True))
    sizes = (count,), (count,), (engine.slots, width)
    return Pages(*(shaped(size, jnp.int32, each) for size in sizes))


def _read_again(
    run: RunPrograms,
    role: str,
    engine: Engine,
    params: Params,
    pool: Cache,
    prompts: Cache,
    beside: int,
) -> Iterator[Program]:
    """The programs by which samples that had to wait for pages are read again; what a run needs
    none of where its pages suffice.

    Args:
        beside: bytes of the prompts that were prefilled last.
    """
    model, mesh, at, shards = engine.config, engine.mesh, run.everywhere(role), engine.row_shards
    assert mesh is not None
    width = engine.read_again_width(engine.max_prompt_tokens + engine.max_new_tokens)
    tokens, each = shaped((shards, width), jnp.int32, at), shaped((shards,), jnp.int32, at)
    yield Program(
        role,
        "read again",
        decode.prefill,
        (model, mesh, params, tokens, each),
        ("read again",),
        {"apart": True},
        beside=beside + local_bytes((pool, prompts)),
        calls=0,
        otherwise="waits",
    )
    read = _cache(engine, params["norm"]["scale"].dtype, "unstacked", shards, width)
    pages = shaped((shards, pages_of(width)), jnp.int32, at)
    yield Program(
        role,
        "insert again",
        decode.insert_again,
        (model, mesh, pool, prompts, read, each, each, pages),
        (),
        beside=beside + local_bytes(params),
        calls=0,
        otherwise="waits",
    )


def _resized(
    run: RunPrograms,
    role: str,
    engine: Engine,
    params: Params,
    layout: Layout,
    cache: Cache,
    beside: int,
    share: float,
) -> Iterator[Program]:
    """The cache at its start, as it grows, and as slots are given up.

    Args:
        cache: at its largest.
        beside: bytes of weights and prompts.
    """
    model, mesh, dtype = engine.config, engine.mesh, params["norm"]["scale"].dtype
    assert mesh is not None
    batches = math.ceil(share)
    with_keys = [entry for entry in cache if entry and not isinstance(entry, Recurrent)]
    k = max((entry[0] for entry in with_keys), key=lambda x: x.size)  # the largest of all layers
    longest = k.shape[decode.POSITIONS]
    own = longest == engine.own_length  # behind prompts that slots share
    shape = (model, mesh, k.shape[decode.BATCH], longest, dtype, layout)
    yield Program(role, "new cache", decode.new_cache, shape, (), beside=beside, calls=batches)
    lengths = sorted({engine.cache_length(n, engine.slots, own) for n in range(1, longest + 1)})
    if engine.pages is not None:
        lengths = [PAGE]
    rows = NamedSharding(mesh, PartitionSpec(ROWS))

    def layer(length: int) -> Cache:
        one = shaped((*k.shape[:-2], length, k.shape[-1]), k.dtype, k.sharding)
        return [(one, one)]

    others = beside + local_bytes(cache) - local_bytes((k, k))
    if len(lengths) > 1:
        given: tuple[Any, ...] = (model, mesh, layer(lengths[-2]), longest, None)
        calls = batches * len(with_keys) * (len(lengths) - 1)
        yield Program(
            role,
            "longer cache",
            decode.resize,
            given,
            ("longer cache",),
            beside=others,
            calls=calls,
        )
    held = engine.slots // engine.row_shards
    kept = [left for n in range(1, held) if (left := engine.fewer_slots(n, held)) is not None]
    if engine.pages is not None:
        kept = [n for n in map(engine.pages_of, kept) if n < engine.pages]
    if kept and not engine.episodes:
        chosen = shaped((max(kept) * engine.row_shards,), jnp.int32, rows)
        given = (model, mesh, layer(longest), longest, chosen)
        calls = batches * sum(map(bool, cache)) * len(set(kept))
        name = "fewer slots" if engine.pages is None else "fewer pages"
        yield Program(role, name, decode.resize, given, (), beside=others, calls=calls)


def teacher(run: RunPrograms) -> Iterator[Program]:
    """Scoring by each teacher, what makes one signal of several, and sampling."""
    c, m = run.config, run.setting
    parts = c.teacher.num_microbatches
    combines = bool(c.teachers) and c.mixture is not None and c.distill.signal != "hidden"
    weights = {
        name: local_bytes(run.params("teacher", model, c.teacher.compute_dtype, "stacked"))
        for name, model in run.teachers
    }
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
            share_of_one = share / len(run.teachers)
            evaluates = c.eval.teacher and c.data.eval is not None
            for program in _sampling(
                run, "teacher", model, c.teacher.compute_dtype, "unstacked", share_of_one, evaluates
            ):
                yield replace(program, name=f"{program.name} by {name}" if name else program.name)


def _merging(run: RunPrograms, rows: int, parts: int) -> Program:
    """What puts a teacher's rows among those of the teachers before it."""
    signal, models = run.signal("teacher", rows), [model for _, model in run.teachers]
    dtype = run.config.teacher.compute_dtype
    weights = sum(local_bytes(run.params("teacher", m, dtype, "stacked")) for m in models)
    mine = shaped((rows,), bool, run.rows("teacher"))
    width = max(model.d_model for model in models)
    jitted = merge_program(
        Projection.of(run.config, run.meshes["teacher"], run.setting.vocab), width
    )
    calls = parts * len(models)
    return Program(
        "teacher", "merge", jitted, (signal, signal, mine), (), beside=weights, calls=calls
    )


def _mixture(run: RunPrograms, rows: int, parts: int) -> Program:
    """What makes the signal of a mixture from the hidden states of each teacher."""
    c, m, mesh, at = run.config, run.setting, run.meshes["teacher"], run.rows("teacher")
    dtype, models = c.teacher.compute_dtype, [model for _, model in run.teachers]
    shape = (rows, m.new_tokens)
    hidden = tuple(shaped((*shape, model.d_model), dtype, at) for model in models)
    layout: Layout = "unstacked" if m.teacher_samples else "stacked"
    heads: tuple[Any, ...] | None = None
    if c.distill.signal != "hidden":
        heads = tuple(head(run.params("teacher", model, dtype, layout)) for model in models)
    ids = None
    if c.distill.signal == "student_topk":
        ids = shaped((*shape, c.distill.top_k), jnp.int32, at)
    weights = shaped((rows, len(models)), jnp.float32, at)
    given = (hidden, heads, weights, run.sequences("teacher", rows), ids)
    params = (run.params("teacher", model, dtype, layout) for model in models)
    beside = sum(map(local_bytes, params)) - local_bytes(heads)
    softcaps = [model.final_softcap for model in models]
    jitted = mixture_program(Projection.of(c, mesh, m.vocab), softcaps)
    return Program("teacher", "mixture", jitted, given, ("combine",), beside=beside, calls=parts)


def reference(run: RunPrograms) -> Iterator[Program]:
    c = run.config
    parts = c.reference.num_microbatches
    model = run.setting.reference
    params = run.params("reference", model, c.reference.compute_dtype, "stacked")
    jitted = reference_program(
        model, run.meshes["reference"], c.sampling.temperature, c.distill.chunk_tokens
    )
    rows = run.scored("reference", model, parts)
    given = (params, run.sequences("reference", *rows))
    yield Program("reference", "score", jitted, given, ("score",), calls=parts)


def reward(run: RunPrograms) -> Iterator[Program]:
    """The reward model, if there is one, on a full batch of the longest sequences."""
    c, model = run.config.rewards, run.setting.inputs.reward
    if model is None:
        return
    longest = c.max_tokens or run.setting.width + TEMPLATE_TOKENS
    params = run.params("reward", model, c.compute_dtype, "stacked")
    head = shaped((model.d_model,), jnp.float32, run.everywhere("reward"))
    batch = _batch(run, "reward", min(longest, model.max_positions), c.batch_tokens)
    given = (model, run.meshes["reward"], params, head, *batch)
    yield Program("reward", "score", score_batch, given, ("score",))


def grouper(run: RunPrograms) -> Iterator[Program]:
    """The encoder of similarity groups on a full batch of the longest texts."""
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
    run: RunPrograms, role: str, longest: int, batch_tokens: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Abstract tokens and mask of a full batch of the longest texts."""
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
