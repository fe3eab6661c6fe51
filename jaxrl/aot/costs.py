"""Seconds that each stage of a step takes on a machine, predicted before it is rented.

Work is counted as in `profile.work`, of rows as long as the config allows, and divided by a stated
share of what the data sheet promises. The bytes of collectives are counted from the mesh axes, and
multiplied by the ratio that the compiled programs of the run as configured have to their own count;
these programs also say which share of them travels while something is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxrl.algorithms.methods import sampled_share
from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import MOVES
from jaxrl.plan.array_bytes import ITEMSIZE, layer_bytes, split, trained_bytes
from jaxrl.plan.plan_context import Setting
from jaxrl.plan.plan_inputs import PlanInputs
from jaxrl.profile.stages import RunModels, StepBatch, step_work
from jaxrl.profile.waits import Stage
from jaxrl.profile.work import Work
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.device_peaks import Ceilings, ridge

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


OTHERS, REPLICAS = "others", "replicas"
Sent = Mapping[str, float]
"""Bytes that a device sends, by kind: those of `HIDDEN`; `OTHERS`, which it waits for; and
`REPLICAS`, the same, to the other copies of the weights (`data`)."""


@dataclass(frozen=True)
class Traffic:
    """What the compiled programs of a role say of its collectives."""

    scale: float = 1.0
    """Bytes that they send over those that are counted here."""
    hidden: Mapping[str, float] = field(default_factory=dict)
    """Kind -> share of its bytes that travels while something is computed; `HIDDEN` where it is
    missing."""


@dataclass(frozen=True)
class Links:
    """Bytes per second at which a device sends to others, one direction."""

    inside: float
    """Of its host."""
    between: float
    """Hosts."""

    def of(self, devices: Iterable[int], host_size: int) -> float:
        """Returns the slowest link among these devices, which are numbered host after host."""
        hosts = {device // host_size for device in devices}
        return self.inside if len(hosts) == 1 else self.between


def stage_costs(
    config: Config,
    inputs: PlanInputs,
    axes: Mapping[str, Axes],
    ceilings: Ceilings,
    links: Links,
    host_size: int,
    compiled: Mapping[str, Traffic] = MappingProxyType({}),
) -> dict[Stage, float]:
    """Predicts (role, method) -> seconds a step, of the roles whose model is known.

    Args:
        config: with dtypes.
        host_size: devices of a host.
        compiled: role -> what the compiled programs say of its collectives.
    """
    m = Setting(config, inputs, axes)
    known = inputs.teachers if "teacher" in axes else ()
    slots = min(config.rollout.slots or m.sequences, m.sequences)
    steps = m.new_tokens * -(-m.sequences // slots)
    own, theirs = ((m.prompts(role),) * config.batch_size for role in ("actor", "teacher"))
    batch = StepBatch(own, config.group_size, m.new_tokens, steps, theirs)
    work = step_work(RunModels(config, m.student, known, m.vocab), axes, [batch])
    forward = work["actor", "update"][0]
    work["actor", "update"].append(forward * RECOMPUTED[config.actor.remat])
    prefill, decode = work["rollout", "generate"]
    more = _step_experts(m, batch.tokens, steps)
    decode = Work(decode.flops + more.flops, decode.bytes + more.bytes)
    work["rollout", "generate"] = [prefill, decode]
    if config.distill.signal == "student_topk" and known:
        once = forward * (1 / config.actor.epochs_per_batch)
        work["rollout", "generate"].append(once)  # the rollout's pass that chooses the tokens
    found: dict[Stage, float] = {}
    for (role, method), parts in work.items():
        where = inputs.placement.roles[role].devices
        n, block = len(where), len(where) // axes[role].data
        # `data` is the outermost axis: the devices of one copy of the weights are consecutive.
        copies = [where[i : i + block] for i in range(0, n, block)]
        link = min(links.of(copy, host_size) for copy in copies) * LINKS
        across = links.of(where, host_size) * LINKS
        computed = sum(part_seconds(part, n, ceilings) for part in parts)
        sent, seen = _COLLECTIVES[role](m), compiled.get(role, Traffic())
        hidden = sum(sent[kind] * seen.hidden.get(kind, share) for kind, share in HIDDEN.items())
        replicas = sent.get(REPLICAS, 0.0)
        waited = (sum(sent.values()) - hidden - replicas) / link + replicas / across
        found[role, method] = max(computed, seen.scale * hidden / link) + seen.scale * waited
    found["rollout", "generate"] += launch_seconds(m.sampled("rollout"), m.axes["rollout"], steps)
    found["rollout", "generate"] *= sampled_share(config)
    for sender, receiver in m.sent:
        stored = m.store_seconds(sender, receiver)
        if sender == "teacher":  # from device to device its signal takes next to nothing
            found["teacher", "score"] += stored or 0.0
            continue
        name = "publish" if receiver == "rollout" else "publish_to_teacher"
        linked = _weight_sync(m, receiver, links, host_size)
        found["actor", name] = linked if stored is None else stored
        found[receiver, "load"] = 0.0  # in its queue: what it does next waits for the weights
    return found


def counted_bytes(config: Config, inputs: PlanInputs, axes: Mapping[str, Axes]) -> dict[str, float]:
    """Counts, for each role, the bytes that its collectives send from a device in a step."""
    m = Setting(config, inputs, axes)
    return {role: sum(_COLLECTIVES[role](m).values()) for role in axes if role in _COLLECTIVES}


def part_seconds(work: Work, n: int, ceilings: Ceilings) -> float:
    """Returns the seconds of one part of the work, on `n` devices."""
    products = work.flops / (n * ceilings.flops * PRODUCTS)
    return max(products, work.bytes / (n * ceilings.bandwidth * MEMORY))


def launch_seconds(model: DecoderConfig, axes: Axes, steps: int) -> float:
    """Returns the seconds that so many decode steps spend between kernels, and in the latency of
    `tensor`'s collectives."""
    layers, kernels = model.n_layers, KERNELS + (OF_EXPERTS if model.experts is not None else 0)
    if model.lora is not None:
        kernels += ADAPTER_KERNELS
    latency = 2 * layers * LATENCY_S if axes.tensor > 1 else 0.0
    return steps * (layers * kernels * LAUNCH_S + latency)


def _step_experts(m: Setting, tokens: float, steps: int) -> Work:
    """Returns what `steps` decode steps, of `tokens` in all, compute and move for their experts
    beside `decode_work`: rows that no token chose, kernels that are gathered, and what goes in and
    out of each product."""
    c, axes = m.student, m.axes["rollout"]
    if c.experts is None:
        return Work(0, 0)
    run = m.run("rollout", c, m.slots("rollout").slots, 1)
    rows, gathered = run.step_blocks(ridge(m.inputs.target.kind))
    wide, times = split(c.d_ff, axes.tensor), axes.size * c.n_layers * steps
    flops = 6 * c.d_model * (times * wide * rows - c.n_layers * c.d_ff * c.experts.chosen * tokens)
    moved = rows * 6 * wide
    if gathered:
        moved += rows * 4 * c.d_model + MOVES * gathered * 3 * c.d_model * wide
    return Work(max(flops, 0), times * moved * run.itemsize)


def _weight_sync(m: Setting, role: str, links: Links, host_size: int) -> float:
    """Returns the seconds of sending the weights from the actor's devices to a role's."""
    roles = m.inputs.placement.roles
    link = links.of((*roles["actor"].devices, *roles[role].devices), host_size)
    return m.sent["actor", role] / (link * LINKS * m.axes["actor"].size)


def _reduced(m: Setting, role: str, model: DecoderConfig, tokens: int) -> float:
    """Returns the bytes that `tensor` sends on a device in a forward pass over the tokens of that
    device."""
    tensor = m.axes[role].tensor
    size = tokens * model.d_model * ITEMSIZE[m.config.roles[role].compute_dtype]
    return 2 * model.n_layers * size * 2 * (tensor - 1) / tensor


def _exchanged(m: Setting, role: str, model: DecoderConfig, tokens: int) -> float:
    """Returns the bytes that `context` and `expert` send from a device in a forward pass over the
    tokens of that device. Of `context`: queries and results each to one other device, and so keys
    and values where it divides them."""
    axes, item = m.axes[role], ITEMSIZE[m.config.roles[role].compute_dtype]
    moved = 0.0
    for one, n in model.shapes.items():
        once = 2 * split(one.n_heads, axes.tensor)
        kv = 2 * split(one.n_kv_heads, axes.tensor)
        if one.n_kv_heads % axes.heads == 0:
            once, kv = once + kv, 0
        heads = once / axes.context + kv
        moved += n * tokens * heads * one.head_dim * item * (axes.context - 1)
    # And `expert`: the other devices' tokens come, and what this device's experts add to them goes.
    return moved + model.n_layers * tokens * 2 * model.d_model * item * (axes.expert - 1)


def _gathered(m: Setting, role: str, model: DecoderConfig) -> float:
    """Returns the bytes that `fsdp` brings to a device in one pass over the layers."""
    axes = m.axes[role]
    whole = layer_bytes(model, axes.gathered, m.config.roles[role].compute_dtype)
    return whole * (axes.weights - 1) / axes.weights


def _update(m: Setting) -> Sent:
    axes, c = m.axes["actor"], m.config
    count, rows = m.micro_batches()
    passes = count * c.minibatches * c.actor.epochs_per_batch
    forward = 2 if c.actor.remat == "full" else 1
    gathers = (forward + 1) * _gathered(m, "actor", m.student)
    reduced = c.actor.reduce_dtype or c.actor.compute_dtype
    grads = trained_bytes(m.student, axes.gathered, reduced)
    if m.student.lora is None:
        grads = layer_bytes(m.student, axes.gathered, reduced)
    scattered = grads * (axes.weights - 1) / axes.weights
    tokens = rows * m.width // axes.context
    moved = (forward + 1) * _reduced(m, "actor", m.student, tokens)
    exchanges = 2 if c.actor.remat == "none" else 3  # dots keeps no exchanged heads either
    moved += exchanges * _exchanged(m, "actor", m.student, tokens)
    replicas = grads / axes.weights * 2 * (axes.data - 1) / axes.data
    return {
        GATHER: passes * gathers,
        SCATTER: passes * scattered,
        OTHERS: passes * moved,
        REPLICAS: passes * replicas,
    }


def _generate(m: Setting) -> Sent:
    axes = m.axes["rollout"]
    prompts = m.config.batch_size * m.prompt_tokens // axes.rows
    drawn = m.rows("rollout", m.sequences) * m.new_tokens
    waited = _reduced(m, "rollout", m.student, prompts + drawn)
    waited += _exchanged(m, "rollout", m.student, prompts + drawn)
    return {GATHER: 0.0, SCATTER: 0.0, OTHERS: waited}


def _score(role: str, m: Setting) -> Sent:
    models = m.inputs.teachers if role == "teacher" else (m.student,)
    section: Any = m.config.roles[role]
    width = m.prompts(role) + m.new_tokens
    tokens = m.rows(role, m.sequences) * width // m.axes[role].context
    gathered = section.num_microbatches * sum(_gathered(m, role, model) for model in models)
    share = 1 / len(models) if m.config.mixture is None else 1.0
    each = (_reduced(m, role, x, tokens) + _exchanged(m, role, x, tokens) for x in models)
    return {GATHER: gathered, SCATTER: 0.0, OTHERS: share * sum(each)}


_COLLECTIVES: dict[str, Callable[[Setting], Sent]] = {
    "actor": _update,
    "rollout": _generate,
    "teacher": partial(_score, "teacher"),
    "reference": partial(_score, "reference"),
}
"""Role -> the bytes that a device sends in a step."""
