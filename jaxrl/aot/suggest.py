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
from types import MappingProxyType

import jax.numpy as jnp

from jaxrl.algorithms.methods import sampled_share
from jaxrl.config.keys import mappings
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import assignments
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import MOVES, more_blocks, step_rows
from jaxrl.models.lora import frozen_and_trained
from jaxrl.plan.advice import with_axes, with_choices
from jaxrl.plan.plan_inputs import GB, Setting
from jaxrl.plan.search import Candidate, set_key, splits
from jaxrl.plan.simulate import Stage
from jaxrl.plan.table import Plan
from jaxrl.profile.work import Work, longest_batch, step_work
from jaxrl.roles.declared import local_bytes
from jaxrl.roles.run_shapes import placed_params
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import abstract_mesh
from jaxrl.sharding.targets import Ceilings, TargetMachine, ceilings_of, ridge

PRODUCTS, MEMORY, LINKS = 0.5, 0.65, 0.7
"""Shares of the published ceilings that programs are assumed to reach: matrix products, reads and
writes of the device's memory, links between devices."""
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
PREDICTED = ("actor", "rollout", "teacher", "reference")
"""Roles whose seconds are predicted."""
ROUNDS = 4
"""How often at most each key of a candidate is tried, as the others have changed meanwhile."""
SHOWN = 5
"""Candidates in the table."""
WORTH = 1.01
"""How many times faster a step must be for a key to change."""


@dataclass(frozen=True)
class Traffic:
    """What the compiled programs of a role say of its collectives."""

    scale: float = 1.0
    """Bytes that they send over those that are counted here."""
    hidden: Mapping[str, float] = field(default_factory=dict)
    """Kind -> share of its bytes that travels while something is computed; `HIDDEN` where it is
    missing."""


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a device of a role sends in a step."""

    gathered: float = 0.0
    """Weights, by `fsdp` and `context`."""
    scattered: float = 0.0
    """Their gradients."""
    others: float = 0.0
    """By the other axes; the device waits for them."""
    replicas: float = 0.0
    """Gradients, to the other copies of the weights (`data`); it waits for them too."""

    @property
    def total(self) -> float:
        return self.gathered + self.scattered + self.others + self.replicas


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
    axes, roles, generate = m.axes, m.inputs.placement.roles, ("rollout", "generate")
    work = step_work(m, [longest_batch(m)])
    update = work["actor", "update"]
    update.append(update[0] * (m.passes("actor").recomputed / m.passes("actor").epochs))
    if m.student.experts is not None:
        prefill, decode, *more = work[generate]
        work[generate] = [prefill, decode + _blocks_of_experts(m), *more]
    found: dict[Stage, float] = {}
    for (role, method), parts in work.items():
        where = roles[role].devices
        n, block = len(where), len(where) // axes[role].data
        # `data` is the outermost axis: the devices of one copy of the weights are consecutive.
        link = min(target.link(where[i : i + block]) for i in range(0, n, block)) * LINKS
        sent, seen = sent_bytes(m, role), compiled.get(role, Traffic())
        share = HIDDEN | dict(seen.hidden)
        hidden = sent.gathered * share[GATHER] + sent.scattered * share[SCATTER]
        waited = (sent.gathered + sent.scattered - hidden + sent.others) / link
        waited += sent.replicas / (target.link(where) * LINKS)
        computed = sum(part_seconds(part, n, ceilings) for part in parts)
        found[role, method] = max(computed, seen.scale * hidden / link) + seen.scale * waited
    found[generate] += launch_seconds(m.sampled("rollout"), axes["rollout"], m.decode_steps)
    found[generate] *= sampled_share(m.config)
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
    axes, item = m.axes[role], _itemsize(m, role)
    width = model.n_layers * tokens * 2 * model.d_model * item
    # Of `expert` the other devices' tokens come, and what this device's experts add to them goes.
    moved = width * (axes.expert - 1.0)
    for one, n in model.shapes.items():
        once, kv = (2 * _split(heads, axes.tensor) for heads in (one.n_heads, one.n_kv_heads))
        if one.n_kv_heads % axes.heads == 0:
            once, kv = once + kv, 0
        heads = once / axes.context + kv
        moved += n * tokens * heads * one.head_dim * item * (axes.context - 1)
    return width * 2 * (axes.tensor - 1) / axes.tensor, moved


def sent_bytes(m: Setting, role: str) -> SentBytes:
    """Counts the bytes that the collectives of a role send from a device in a step."""
    axes, dtype, passes = m.axes[role], m.config.roles[role].compute_dtype, m.passes(role)
    if role == "rollout":
        prompts = m.prompt_rows * m.prompt_tokens // axes.rows
        tokens = prompts + m.rows(role, m.sequences) * m.new_tokens
        return SentBytes(others=sum(exchanged(m, role, m.student, tokens)))
    models = [x for x in m.inputs.models(role) if isinstance(x, DecoderConfig)]
    elsewhere = (axes.weights - 1) / axes.weights
    gathered = passes.calls * sum(_gathered(model, axes, dtype) for model in models) * elsewhere
    if role != "actor":
        tokens = m.rows(role, m.sequences) * (m.prompts(role) + m.new_tokens) // axes.context
        others = sum(sum(exchanged(m, role, model, tokens)) for model in models)
        return SentBytes(gathered, others=others * m.scored_share(role))
    adapters = m.student.lora is not None
    grads = passes.calls * _gathered(m.student, axes, m.gradient_dtype, trained=adapters)
    summed, moved = exchanged(m, role, m.student, passes.rows * m.width // axes.context)
    return SentBytes(
        gathered * passes.layers,
        grads * elsewhere,
        passes.calls * (passes.layers * summed + passes.heads * moved),
        grads / axes.weights * 2 * (axes.data - 1) / axes.data,
    )


def _gathered(model: DecoderConfig, axes: Axes, dtype: str, *, trained: bool = False) -> int:
    """Returns the bytes of a model's layers on one device, gathered; or of what is `trained`."""
    params = placed_params(model, abstract_mesh(axes.gathered), jnp.dtype(dtype))
    return local_bytes(frozen_and_trained(params)[1] if trained else params["layers"])


def _blocks_of_experts(m: Setting) -> Work:
    """Counts the work of the decode steps for experts beside `decode_work`: rows that no token
    chose, kernels that are gathered, and what goes in and out of each product."""
    c, axes, steps = m.student, m.axes["rollout"], m.decode_steps
    assert c.experts is not None
    held, wide = _split(c.experts.count, axes.expert), _split(c.d_ff, axes.tensor)
    tokens = m.sampling_slots("rollout") * (c.experts.count // held)
    sizes = tokens, c.experts.chosen, held
    block = step_rows(*sizes, c.d_model, wide, ridge(m.inputs.target.kind))
    gathered = more_blocks(*sizes, block)
    rows, times = (held + gathered) * block, axes.size * c.n_layers * steps
    chosen = c.n_layers * c.d_ff * c.experts.chosen * m.sequences * m.new_tokens
    moved = rows * 6 * wide
    if gathered:
        moved += rows * 4 * c.d_model + MOVES * gathered * 3 * c.d_model * wide
    flops = max(6 * c.d_model * (times * wide * rows - chosen), 0)
    return Work(flops, times * moved * _itemsize(m, "rollout"))


def _itemsize(m: Setting, role: str) -> int:
    return jnp.dtype(m.config.roles[role].compute_dtype).itemsize


def _split(size: int, parts: int) -> int:
    """Returns a dim's size on one device: what does not divide stays whole."""
    return size // parts if size % parts == 0 else size


class Search:
    """Tries placements and keys on a machine: for each placement it improves one key after the
    other, which finds a good choice, not always the best. Seconds take no time to predict, and
    bytes do: they are asked of what is fast enough alone."""

    def __init__(self, plan: Plan, target: TargetMachine, compiled: Mapping[str, Traffic]):
        """
        Args:
            plan: of the run as configured, on that machine.
            compiled: role -> what its compiled programs say of its collectives.
        """
        self.config, self.inputs, self.target = plan.config, plan.inputs, target
        ceilings = ceilings_of(target.devices[0], "bfloat16")
        self.now = Candidate(
            plan.config,
            plan.inputs,
            completed=lambda config, inputs: with_choices(config, inputs)[0],
            seconds=lambda setting: stage_costs(setting, ceilings, target, compiled),
        )

    def best(self) -> list[Candidate]:
        """Returns the fastest found for the placement of the run and for others that fit, the
        fastest first, each with the axes as the run's config has them, or leaves them to the plan,
        where these are the same. Placements that cannot be among the first of the table are left
        out."""
        config = self.now.config
        for role, present in self.now.setting.axes.items():
            config = _with_axes(config, role, present)
        found = [self._improve(replace(self.now, config=config))]
        fastest = list[Candidate]()
        for mesh in splits(self.inputs.placement):
            with suppress(UserError):
                fastest.append(self._improve(_unlimited(self._move(mesh)), unlimited=True))
        for candidate in sorted(fastest, key=lambda x: x.step):
            shown = sorted(x.step for x in found if x.fits)[:SHOWN]
            if len(shown) == SHOWN and shown[-1] <= candidate.step:
                break
            with suppress(UserError):
                start = replace(candidate, completed=self.now.completed)
                found.append(self._improve(start))
        fitting = []
        for candidate in sorted((x for x in found if x.fits), key=lambda x: x.step):
            config, axes = candidate.config, candidate.setting.axes
            for role in self.inputs.roles:
                parallel = self.config.roles[role].parallel
                with suppress(UserError):
                    own = replace(candidate, config=set_key(config, f"{role}.parallel", parallel))
                    config = own.config if own.setting.axes == axes else config
            keys = mappings(Config)
            before, after = (dict(assignments(c.model_dump(), keys)) for c in (self.config, config))
            changes = [(key, after[key]) for key in after if after[key] != before.get(key)]
            fitting.append(replace(candidate, config=config, changes=tuple(changes)))
        return fitting

    def _move(self, mesh: str) -> Candidate:
        """Returns the run on another mesh, each role with the first of its possible axes.

        Raises:
            UserError: the mesh suits the models or the hosts badly.
        """
        candidate, size = self.now.move(mesh), self.target.host_size
        for pool in candidate.inputs.placement.pools:
            hosts = {device // size for device in pool.devices}
            if len(hosts) > -(-len(pool.devices) // size):
                raise UserError(f"{mesh}: a cluster would not split a pool that one host can hold")
        for role in self.inputs.roles:
            axes = next(_axes(candidate, role), None)
            if axes is None:
                raise UserError(f"{mesh}: the devices of {role} do not divide its model")
            candidate = replace(candidate, config=axes)
        return candidate

    def _improve(self, start: Candidate, *, unlimited: bool = False) -> Candidate:
        """Returns the run with the keys that make it fit and then faster, or with `unlimited` with
        those that make it faster as if everything fitted."""
        best, better = start, _faster if unlimited else _better
        roles = [role for role in self.inputs.roles if role in PREDICTED]
        keys = [(role, "") for role in roles]
        keys += [(role, x.key) for role in roles for x in start.remedies(role) if x.timed]
        for _ in range(ROUNDS):
            before = best
            for role, key in keys:
                fits = unlimited or best.fits
                if not fits and best.pool(best.inputs.placement.roles[role].pool).fits:
                    continue  # another pool has to become smaller
                for config in list(_values(best, role, key, fits)):
                    tried, was = replace(best, config=config), best
                    with suppress(UserError):
                        best = tried if better(tried, best) else best
                    if key and not fits and best is was:
                        break  # what takes still less memory does not help either
            if best is before:
                break
        return best


def _values(at: Candidate, role: str, key: str, fits: bool) -> Iterator[Config]:
    """Yields the config with each value of a key, or with each of the possible axes of a role for
    an empty key: of a run that does not fit, only values that take less memory."""
    if not key:
        yield from _axes(at, role)
    for remedy in at.remedies(role) if key else ():
        if remedy.key == key:
            for value in (*(remedy.faster if fits else ()), *remedy.smaller):
                yield set_key(at.config, key, value)


def _unlimited(candidate: Candidate) -> Candidate:
    """Returns it with what is the fastest where the config is silent, as if everything fitted."""
    return replace(candidate, completed=lambda config, inputs: config)


def _better(tried: Candidate, best: Candidate) -> bool:
    """Returns whether a candidate is to be preferred: one that fits, or comes nearer to it, and of
    two that fit the faster."""
    if not best.fits:
        return tried.exceeds_less(best)
    return _faster(_unlimited(tried), best) and _faster(tried, best) and tried.fits


def _faster(tried: Candidate, best: Candidate) -> bool:
    """Returns whether a candidate's step is shorter, or no longer and its stages take less work."""
    worked, now = (sum(x.stages.values()) for x in (tried, best))
    quicker = tried.step <= best.step and worked * WORTH < now
    return quicker or tried.step * WORTH < best.step


def _axes(at: Candidate, role: str) -> Iterator[Config]:
    """Yields the config with each of the possible axes of a role."""
    for axes in at.inputs.possible_axes(at.config, role):
        yield _with_axes(at.config, role, axes)


def _with_axes(config: Config, role: str, axes: Axes) -> Config:
    above = {axis: size for axis, size in axes._asdict().items() if size > 1}
    return with_axes(config, role, **above or {"fsdp" if role == "actor" else "data": 1})


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
