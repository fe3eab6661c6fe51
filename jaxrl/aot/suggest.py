"""`--suggest`: the seconds that each stage of a step takes on a machine, predicted before it is
rented, and the placement and the keys whose step is predicted to be the shortest that fits.

Work is counted as in `profile.work`, of rows as long as the config allows, and divided by a stated
share of what the data sheet promises. The bytes of collectives are counted from the mesh axes, and
multiplied by the ratio that the compiled programs of the run as configured have to their own count;
these programs also say which share of them travels while something is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from jaxrl.algorithms.methods import needed_roles, sampled_share
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.keys import mappings
from jaxrl.config.roles import LongParallelConfig
from jaxrl.config.schema import Config
from jaxrl.config.section import shown
from jaxrl.config.yaml_text import assignments
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import MOVES
from jaxrl.plan import services
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.advice import REMATS, Change, set_key, with_axes, with_choices
from jaxrl.plan.array_bytes import ITEMSIZE, layer_bytes, split, trained_bytes
from jaxrl.plan.plan_inputs import GB, PlanInputs, Setting
from jaxrl.plan.table import Plan
from jaxrl.profile.waits import Stage, predict, splits
from jaxrl.profile.work import StepBatch, Work, step_work
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.placement import place
from jaxrl.sharding.targets import Ceilings, TargetMachine, ceilings_of, ridge

PRODUCTS, MEMORY, LINKS = 0.5, 0.65, 0.7
"""Shares of the published ceilings that programs are assumed to reach: matrix products, reads and
writes of the device's memory, links between devices."""
RECOMPUTED = {"none": 0.0, "dots": 0.15, "full": 1.0}
"""Of a forward pass, what the backward pass computes again, by `actor.remat`."""
LAUNCH_S = 1.5e-6
"""Seconds from one kernel of a CUDA graph to the next."""
KERNELS, OF_EXPERTS = 21, 10
"""Kernels of a layer in a decode step, as compiled for an H200, and those that experts add."""
ADAPTER_KERNELS = 26
"""Further ones of adapters that are applied beside the weights, as compiled for a T4."""
LATENCY_S = 10e-6
"""Seconds that a collective takes beside its bytes."""
GATHER, SCATTER = "all-gather", "reduce-scatter"
HIDDEN = {GATHER: 0.79, SCATTER: 0.66}
"""Share of the bytes of `fsdp` that travels while something is computed, where the run as it is
sends none: that of an update of Qwen2.5-1.5B as compiled for two H200 with jax 0.12, remat full
(`compiled_runs.distilled` of the tests). Some gradients of a layer are scattered when nothing of
its backward pass is left to compute."""
ASSUMED = (
    f"assumed: matrix products reach {PRODUCTS:.0%} of the data sheet's figure for 16-bit floats,"
    f" memory {MEMORY:.0%}, links {LINKS:.0%};",
    "every prompt and completion is as long as the config allows;",
    "of what fsdp gathers and scatters the share travels while layers compute that does so in the"
    " compiled",
    "programs of the run as configured; nothing of what tensor and context send;",
    "reward models, encoders and samples of the teacher are not counted",
)
"""Lines: what `stage_costs` takes for granted."""
ROUNDS = 4
"""How often at most each key of a candidate is tried, as the others have changed meanwhile."""
SHOWN = 5
"""Candidates in the table."""
WORTH = 1.01
"""How many times faster a step must be for a key to change."""
LONG = 8192
"""Tokens of sequences that the axis `context` is tried for."""


OTHERS, REPLICAS = "others", "replicas"
"""Kinds of bytes that a device sends, beside those of `HIDDEN`: what it waits for; and the same, to
the other copies of the weights (`data`)."""


@dataclass(frozen=True)
class Traffic:
    """What the compiled programs of a role say of its collectives."""

    scale: float = 1.0
    """Bytes that they send over those that are counted here."""
    hidden: Mapping[str, float] = field(default_factory=dict)
    """Kind -> share of its bytes that travels while something is computed; `HIDDEN` where it is
    missing."""


def stage_costs(
    m: Setting,
    ceilings: Ceilings,
    target: TargetMachine,
    compiled: Mapping[str, Traffic] = MappingProxyType({}),
) -> dict[Stage, float]:
    """Predicts (role, method) -> seconds a step, of the roles whose model is known.

    Args:
        m: of a config with dtypes.
        ceilings: of a device.
        target: has the links between devices.
        compiled: role -> what the compiled programs say of its collectives.
    """
    config, axes, c = m.config, m.axes, m.student
    slots = min(config.slots, m.sequences)
    steps = m.new_tokens * -(-m.sequences // slots)
    own, theirs = ((m.prompts(role),) * config.batch_size for role in ("actor", "teacher"))
    batch = StepBatch(own, m.sequences // config.batch_size, m.new_tokens, steps, theirs)
    work = step_work(m, [batch])
    forward = work["actor", "update"][0]
    work["actor", "update"].append(forward * RECOMPUTED[config.actor.remat])
    if c.experts is not None:
        # What decode steps compute and move for their experts beside `decode_work`: rows that no
        # token chose, kernels that are gathered, and what goes in and out of each product.
        run, sampler = m.run("rollout", c, m.slots("rollout").slots, 1), axes["rollout"]
        rows, gathered = run.step_blocks(ridge(m.inputs.target.kind))
        wide, times = split(c.d_ff, sampler.tensor), sampler.size * c.n_layers * steps
        chosen = c.n_layers * c.d_ff * c.experts.chosen * batch.tokens
        moved = rows * 6 * wide
        if gathered:
            moved += rows * 4 * c.d_model + MOVES * gathered * 3 * c.d_model * wide
        prefill, decode = work["rollout", "generate"]
        flops = decode.flops + max(6 * c.d_model * (times * wide * rows - chosen), 0)
        decode = Work(flops, decode.bytes + times * moved * run.itemsize)
        work["rollout", "generate"] = [prefill, decode]
    # The rollout's pass that chooses the tokens.
    if config.distill.signal == "student_topk" and "teacher" in axes:
        work["rollout", "generate"].append(forward * (1 / config.actor.epochs_per_batch))

    roles = m.inputs.placement.roles
    found: dict[Stage, float] = {}
    for (role, method), parts in work.items():
        where = roles[role].devices
        n, block = len(where), len(where) // axes[role].data
        # `data` is the outermost axis: the devices of one copy of the weights are consecutive.
        link = min(target.link(where[i : i + block]) for i in range(0, n, block)) * LINKS
        sent, seen = _sent(m, role), compiled.get(role, Traffic())
        hidden = sum(sent[kind] * seen.hidden.get(kind, share) for kind, share in HIDDEN.items())
        replicas = sent.get(REPLICAS, 0.0)
        waited = (sum(sent.values()) - hidden - replicas) / link
        waited += replicas / (target.link(where) * LINKS)
        computed = sum(part_seconds(part, n, ceilings) for part in parts)
        found[role, method] = max(computed, seen.scale * hidden / link) + seen.scale * waited
    found["rollout", "generate"] += launch_seconds(m.sampled("rollout"), axes["rollout"], steps)
    found["rollout", "generate"] *= sampled_share(config)
    for (sender, receiver), size in m.sent.items():
        stored = m.store_seconds(sender, receiver)
        if sender == "teacher":  # from device to device its signal takes next to nothing
            found["teacher", "score"] += stored or 0.0
            continue
        name = "publish" if receiver == "rollout" else "publish_to_teacher"
        both = (*roles["actor"].devices, *roles[receiver].devices)
        speed = target.link(both) * LINKS * axes["actor"].size
        found["actor", name] = size / speed if stored is None else stored
        found[receiver, "load"] = 0.0  # in its queue: what it does next waits for the weights
    return found


def counted_bytes(m: Setting) -> dict[str, float]:
    """Counts, for each role, the bytes that its collectives send from a device in a step."""
    roles = ("actor", "rollout", "teacher", "reference")
    return {role: sum(_sent(m, role).values()) for role in roles if role in m.axes}


def part_seconds(work: Work, n: int, ceilings: Ceilings) -> float:
    """Returns the seconds of one part of the work, on `n` devices."""
    products = work.flops / (n * ceilings.flops * PRODUCTS)
    return max(products, work.bytes / (n * ceilings.bandwidth * MEMORY))


def launch_seconds(model: DecoderConfig, axes: Axes, steps: int) -> float:
    """Returns the seconds that so many decode steps spend between kernels, and in the latency of
    `tensor`'s collectives."""
    kernels = KERNELS + OF_EXPERTS * (model.experts is not None)
    kernels += ADAPTER_KERNELS * (model.lora is not None)
    return steps * model.n_layers * (kernels * LAUNCH_S + 2 * LATENCY_S * (axes.tensor > 1))


def exchanged(m: Setting, role: str, model: DecoderConfig, tokens: int) -> tuple[float, float]:
    """Returns the bytes that a device sends in a forward pass over its tokens: what `tensor` sums,
    and what `context` and `expert` exchange. Of `context`: queries and results each to one other
    device, and so keys and values where it divides them."""
    axes, item = m.axes[role], ITEMSIZE[m.config.roles[role].compute_dtype]
    width = model.n_layers * tokens * 2 * model.d_model * item
    # Of `expert` the other devices' tokens come, and what this device's experts add to them goes.
    moved = width * (axes.expert - 1.0)
    for one, n in model.shapes.items():
        once = 2 * split(one.n_heads, axes.tensor)
        kv = 2 * split(one.n_kv_heads, axes.tensor)
        if one.n_kv_heads % axes.heads == 0:
            once, kv = once + kv, 0
        heads = once / axes.context + kv
        moved += n * tokens * heads * one.head_dim * item * (axes.context - 1)
    return width * 2 * (axes.tensor - 1) / axes.tensor, moved


def _sent(m: Setting, role: str) -> Mapping[str, float]:
    """Returns the bytes that a device of a role sends in a step, by kind: those of `HIDDEN`, of
    `fsdp`; and `OTHERS` and `REPLICAS`."""
    axes, c, student = m.axes[role], m.config, m.student
    if role == "rollout":
        prompts = c.batch_size * m.prompt_tokens // axes.rows
        tokens = prompts + m.rows(role, m.sequences) * m.new_tokens
        return {GATHER: 0.0, SCATTER: 0.0, OTHERS: sum(exchanged(m, role, student, tokens))}
    dtype, others = c.roles[role].compute_dtype, (axes.weights - 1) / axes.weights
    if role != "actor":
        models = m.inputs.teachers if role == "teacher" else (student,)
        section: Any = c.roles[role]
        tokens = m.rows(role, m.sequences) * (m.prompts(role) + m.new_tokens) // axes.context
        whole = sum(layer_bytes(model, axes.gathered, dtype) for model in models)
        share = 1 / len(models) if c.mixture is None else 1.0
        waited = share * sum(sum(exchanged(m, role, model, tokens)) for model in models)
        return {GATHER: section.num_microbatches * whole * others, SCATTER: 0.0, OTHERS: waited}
    count, rows = m.micro_batches()
    passes = count * c.minibatches * c.actor.epochs_per_batch
    over = 3 if c.actor.remat == "full" else 2  # passes over the layers
    counted = layer_bytes if student.lora is None else trained_bytes
    grads = counted(student, axes.gathered, c.actor.reduce_dtype or dtype)
    summed, moved = exchanged(m, role, student, rows * m.width // axes.context)
    exchanges = 2 if c.actor.remat == "none" else 3  # dots keeps no exchanged heads either
    return {
        GATHER: passes * over * layer_bytes(student, axes.gathered, dtype) * others,
        SCATTER: passes * grads * others,
        OTHERS: passes * (over * summed + exchanges * moved),
        REPLICAS: passes * grads / axes.weights * 2 * (axes.data - 1) / axes.data,
    }


@dataclass(frozen=True)
class Candidate:
    """A placement and keys of a run, and what is predicted for them."""

    config: Config
    inputs: PlanInputs
    stages: Mapping[Stage, float]
    """Seconds a step."""
    step: float
    """Seconds of a step once the pipeline is full."""
    peaks: Mapping[str, int]
    """Pool -> bytes of its fullest device."""
    excess: int
    """Bytes above the limits, added up over the pools."""
    changes: tuple[Change, ...] = ()
    """Keys that differ from the run as configured, the mesh first: of what `Search.best` finds."""

    @property
    def fits(self) -> bool:
        return self.excess == 0

    @property
    def words(self) -> list[str]:
        """Writes the changes as on a command line."""
        return [f"{key}={shown(value)}" for key, value in self.changes]


class Search:
    """Tries placements and keys on a machine: for each placement it improves one key after the
    other, which finds a good choice, not always the best."""

    def __init__(self, plan: Plan, target: TargetMachine, compiled: Mapping[str, Traffic]):
        """
        Args:
            plan: of the run as configured, on that machine.
            compiled: role -> what its compiled programs say of its collectives.
        """
        self.config, self.inputs, self.compiled = plan.config, plan.inputs, compiled
        self.ceilings = ceilings_of(target.devices[0], "bfloat16")
        self.target = target
        self.now = self.judge(self.config, self.inputs)

    def judge(self, config: Config, inputs: PlanInputs) -> Candidate:
        """Predicts a step of a config on a placement; the plan chooses axes that are not set.

        Raises:
            UserError: axes that do not divide a role's devices or its model's heads.
        """
        whole, _ = with_choices(config, inputs)
        stages = stage_costs(Setting(whole, inputs), self.ceilings, self.target, self.compiled)
        names = {role: inputs.placement.pool_of(role).name for role in inputs.placement.roles}
        pools = pool_peaks(inputs, whole)
        return Candidate(
            config,
            inputs,
            stages,
            predict(stages, names, SCHEDULES[config.schedule]),
            {pool.pool.name: pool.bytes for pool in pools if pool.pool.devices},
            sum(max(pool.bytes - pool.limit, 0) for pool in pools if pool.limit is not None),
        )

    def best(self) -> list[Candidate]:
        """Returns the fastest found for each placement that fits, the fastest first, each with the
        axes as the run's config has them, or leaves them to the plan, where these are the same."""
        found = [self._improved(self.now)]
        for spec in splits(self.inputs.placement):
            with suppress(UserError):
                found.append(self._improved(self._placed(spec)))
        fitting = []
        for candidate in sorted((x for x in found if x.fits), key=lambda x: x.step):
            config, inputs = candidate.config, candidate.inputs
            for role in self.inputs.roles:
                own = with_axes(config, role, **self.config.roles[role].parallel.model_dump())
                with suppress(UserError):
                    now, then = (inputs.axes(with_choices(c, inputs)[0]) for c in (config, own))
                    config = own if now == then else config
            keys = mappings(Config)
            before, after = (dict(assignments(c.model_dump(), keys)) for c in (self.config, config))
            changes = [(key, after[key]) for key in after if after[key] != before.get(key)]
            fitting.append(replace(candidate, config=config, changes=tuple(changes)))
        return fitting

    def _placed(self, spec: str) -> Candidate:
        """Returns the run on another mesh, each role with the first choice of `_axes`.

        Raises:
            UserError: the mesh suits the models or the hosts badly.
        """
        config = set_key(self.config, "mesh", spec)
        roles = [role for role in needed_roles(config) if role not in services(config)]
        slices = {role: section.devices for role, section in config.roles.items()}
        placement = place(spec, roles, slices)
        size = self.target.host_size
        for pool in placement.pools:
            hosts = {device // size for device in pool.devices}
            if len(hosts) > -(-len(pool.devices) // size):
                raise UserError(f"{spec}: a cluster would not split a pool that one host can hold")
        inputs = replace(self.inputs, placement=placement)
        for role in inputs.roles:
            axes = next(_axes(config, inputs, role), None)
            if axes is None:
                raise UserError(f"{spec}: the devices of {role} do not divide its model")
            config = with_axes(config, role, **axes)
        return self.judge(config, inputs)

    def _improved(self, start: Candidate) -> Candidate:
        best = start
        for _ in range(ROUNDS):
            before = best
            for options in _ladders(best, self.inputs.roles):
                for config in options:
                    with suppress(UserError):
                        tried = self.judge(config, best.inputs)
                        if tried.fits and best.fits:
                            worked, now = (sum(x.stages.values()) for x in (tried, best))
                            quicker = tried.step <= best.step and worked * WORTH < now
                            better = quicker or tried.step * WORTH < best.step
                        else:
                            better = tried.excess < best.excess
                        best = tried if better else best
            if best is before:
                break
        return best


def _ladders(at: Candidate, roles: Sequence[str]) -> Iterator[list[Config]]:
    """Yields, for each key, the configs with its values."""
    config = at.config
    for role in roles:
        if role not in ("reward", "grouper"):  # their seconds are not predicted
            yield [with_axes(config, role, **axes) for axes in _axes(config, at.inputs, role)]
    width = -(-sum(at.inputs.widths(config)) // at.inputs.axes(config)["actor"].context)
    yield [set_key(config, "actor.remat", remat) for remat in REMATS]
    tokens = [*(width * n for n in (1, 2, 4, 8, 16)), None]
    yield [set_key(config, "actor.micro_batch_tokens", n) for n in tokens]
    rows = config.batch_size * config.group_size
    yield [set_key(config, "rollout.slots", -(-rows // n)) for n in (1, 2, 3, 4, 8)]
    if config.trains_adapters and config.quantised is None:
        yield [set_key(config, "rollout.merge", merged) for merged in (True, False)]
    for role in [role for role in ("teacher", "reference") if role in roles]:
        yield [set_key(config, f"{role}.num_microbatches", n) for n in (1, 2, 4, 8, 16, 32)]


def _axes(config: Config, inputs: PlanInputs, role: str) -> Iterator[dict[str, int]]:
    """Ways to use the devices of a role: of the axes `data`, `fsdp` and `tensor` two at most, and
    copies of what is trained in each of several hosts alone. What does not divide the model's
    widths or heads is left out: those weights would be whole on each device."""
    n, model = len(inputs.placement.roles[role].devices), inputs.model(role)
    long = isinstance(config.roles[role].parallel, LongParallelConfig)
    long = long and sum(inputs.widths(config)) >= LONG
    splits = [c for c in (1, 2, 4, 8) if n % c == 0 and (c == 1 or long)]
    for context, tensor in product(splits, range(1, n + 1)):
        if n % (tensor * context):
            continue
        rest = n // (tensor * context)
        found = [Axes(fsdp=rest, tensor=tensor, context=context)]
        hosts = inputs.spanned(role)
        if role == "actor" and rest % hosts == 0 and 1 < hosts < rest:
            found.append(found[0]._replace(data=hosts, fsdp=rest // hosts))
        if role != "actor":
            found = [Axes(data=rest, tensor=tensor, context=context)] + found * (tensor == 1 < rest)
        for axes in found:
            divided = model.d_model % axes.weights == 0 and model.d_ff % axes.tensor == 0
            if divided and model.n_heads % axes.heads == 0:
                above = {axis: size for axis, size in axes._asdict().items() if size > 1}
                yield above or {"fsdp" if role == "actor" else "data": 1}


def candidate_lines(now: Candidate, found: Sequence[Candidate]) -> list[str]:
    """Returns lines: the run as it is and the best candidates, with the seconds of each stage."""
    lines = ["predicted seconds of a step", *(f"  {line}" for line in ASSUMED)]
    for candidate in (now, *found[:SHOWN]):
        title = "as it is" if candidate is now else f"{now.step / candidate.step:.2f}x"
        stages = ", ".join(
            f"{role} {method} {seconds:.2f}"
            for (role, method), seconds in candidate.stages.items()
            if seconds >= 0.005
        )
        sizes = ", ".join(f"{pool} {size / GB:.1f}" for pool, size in candidate.peaks.items())
        misfit = "" if candidate.fits else ": does not fit"
        step = f"{title:>9}: {candidate.step:.2f} s ({stages})"
        lines.append(f"  {step}; peak GB by the plan: {sizes}{misfit}")
        if candidate is not now:
            lines.append(f"    {' '.join(candidate.words)}")
    return lines
