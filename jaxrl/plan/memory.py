"""The memory of each role on one of its devices, in bytes, computed before any weight is read.

Weights, gradients and optimizer state are exact: each leaf's shard under the rules of `rules.py`.
The KV cache is exact for the slots and positions asked for. Temporaries are the analytic model of
`activations.py`.

A part is resident or belongs to a phase. A worker does one thing at a time, so the peak of a device
is the largest over the phases of all roles there: what is resident and not away then, and the
phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import jax

from jaxrl.models.activations import (
    F32,
    SAMPLER_ARRAYS,
    Pass,
    logits,
    split,
    whole_rows,
)
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import Remat, abstract_params
from jaxrl.models.kernels import Target, fuses
from jaxrl.models.rules import param_specs
from jaxrl.sharding.placement import AXIS_NAMES, Axes

DType = Literal["float32", "bfloat16"]
ITEMSIZE: dict[DType, int] = {"float32": 4, "bfloat16": 2}
Column = Literal["weights", "gradients", "optimizer", "cache", "activations"]


class Shard(NamedTuple):
    """One parameter and the piece of it that a device holds."""

    path: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    """Shape of the piece."""

    @property
    def size(self) -> int:
        return math.prod(self.local)


@lru_cache(maxsize=256)
def shards(
    config: DecoderConfig, axes: Axes, layout: Literal["stacked", "unstacked"] = "stacked"
) -> tuple[Shard, ...]:
    """Every parameter's piece on one device of a mesh with these axes."""
    sizes: dict[str, int] = dict(zip(AXIS_NAMES, axes, strict=True))
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config, layout=layout))
    specs = jax.tree.leaves(
        param_specs(config, sizes, layout), is_leaf=lambda x: isinstance(x, tuple)
    )
    found = []
    for (path, leaf), spec in zip(leaves, specs, strict=True):
        dims = (*spec, *[None] * (len(leaf.shape) - len(spec)))
        local = tuple(n // sizes[a] if a else n for n, a in zip(leaf.shape, dims, strict=True))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found.append(Shard(name, tuple(leaf.shape), local))
    return tuple(found)


def weight_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """Bytes of the model's parameters on one device."""
    return ITEMSIZE[dtype] * sum(shard.size for shard in shards(config, axes))


def layer_bytes(config: DecoderConfig, axes: Axes, dtype: DType) -> int:
    """`weight_bytes` without embedding, final norm and head."""
    sizes = (s.size for s in shards(config, axes) if s.path.startswith("layers"))
    return ITEMSIZE[dtype] * sum(sizes)


def cache_bytes(config: DecoderConfig, axes: Axes, rows: int, positions: int, dtype: DType) -> int:
    """Bytes of keys and values of `rows` sequences on one device, all layers."""
    heads = split(config.n_kv_heads, axes.tensor)
    return 2 * config.n_layers * rows * positions * heads * config.head_dim * ITEMSIZE[dtype]


@dataclass(frozen=True)
class Part:
    """Some bytes of a role on one device."""

    column: Column
    """Temporary copies of weights count as activations."""
    name: str
    bytes: int
    phase: str | None = None
    """The phase that it exists in; None: it is resident."""
    away: frozenset[str] = frozenset()
    """Of a resident part, the moments (`actor: publish`) and roles while which it is freed, or on
    the host."""

    def there(self, moment: str) -> bool:
        """Whether a resident part is on the device at `ROLE: PHASE`."""
        return not self.away & {moment, moment.partition(":")[0]}


@dataclass(frozen=True)
class Account:
    """All parts of one role on one of its devices."""

    role: str
    parts: tuple[Part, ...]

    @property
    def resident(self) -> int:
        return sum(p.bytes for p in self.parts if p.phase is None)

    def phases(self) -> dict[str, int]:
        """Phase -> bytes beyond what is resident."""
        found: dict[str, int] = {}
        for part in self.parts:
            if part.phase is not None:
                found[part.phase] = found.get(part.phase, 0) + part.bytes
        return found

    def column(self, column: Column) -> int:
        """What is resident of a column, and the most that one phase adds to it."""
        mine = Account(self.role, tuple(p for p in self.parts if p.column == column))
        return mine.peak

    @property
    def peak(self) -> int:
        return peak((self,))[0]


def peak(accounts: Iterable[Account]) -> tuple[int, str]:
    """Peak bytes of a device that holds these roles, and the moment of it (`actor: update`)."""
    accounts = tuple(accounts)
    moments = {f"{a.role}: {name}": size for a in accounts for name, size in a.phases().items()}
    resident = [part for a in accounts for part in a.parts if part.phase is None]

    def total(moment: str) -> int:
        there = sum(part.bytes for part in resident if part.there(moment))
        return there + moments.get(moment, 0)

    moment = max(moments, key=total, default="")
    return total(moment), moment


def upcast(stored: Account, computed: Account, copies: Mapping[str, int]) -> Account:
    """What a role holds as `stored` and computes as `computed`, in a wider dtype.

    Args:
        copies: phase -> bytes of weights that are there in the wider dtype too.
    """
    narrow, wide = stored.phases(), computed.phases()
    parts = [part for part in stored.parts if part.phase is None]
    for phase in narrow:
        larger = computed if wide.get(phase, 0) > narrow[phase] else stored
        parts += [part for part in larger.parts if part.phase == phase]
        if copies.get(phase):
            parts.append(Part("activations", "weights in float32", copies[phase], phase))
    return Account(stored.role, tuple(parts))


@dataclass(frozen=True)
class MemoryInputs:
    """Everything that the account depends on."""

    student: DecoderConfig
    teacher: DecoderConfig | None
    axes: Mapping[str, Axes]
    sequences: int
    """B: rows of a batch."""
    prompt_tokens: int
    new_tokens: int
    sample_tokens: int
    """Longest completion that is ever sampled; evaluations included."""
    slots: int
    prefill_rows: Mapping[str, int]
    """Role -> prompts of its largest prefill, over the whole mesh."""
    remat: Remat
    minibatches: int
    micro_batch_tokens: int | None
    chunk_tokens: int
    loss_arrays: int
    """Float32 arrays [chunk, V] alive at once in the loss."""
    loss_fused: bool
    """The loss sums its head's gradient while it runs forward, in float32."""
    score_arrays: int
    """As `loss_arrays`, of what the teacher sends; 0 where that is its hidden states."""
    actor_dtype: DType
    param_dtype: DType
    rollout_dtype: DType
    teacher_dtype: DType
    optimizer_bytes: int
    """Of the optimizer's state on one device of the actor."""
    optimizer_scratch: int
    """Of the temporaries of its step beside the gradient."""
    signal_bytes: int
    """Of what the teacher sends, per completion token; 0 without a teacher."""
    student_topk: bool
    """The rollout runs its policy over the finished batch."""
    teacher_microbatches: int
    teacher_samples: bool
    signals_in_flight: int
    """Batches whose signal stays on the teacher's devices while something else runs there."""
    head_on_actor: bool
    """The actor holds the teacher's LM head."""
    rollout_layout: Literal["stacked", "unstacked"]
    one_mesh: bool
    """Actor and rollout have the same axes on the same devices."""
    one_pool: bool
    """They share a worker: old weights are freed before an update, new ones sent after it."""
    target: Target
    """The devices that all roles run on."""
    shared_group: int = 1
    """Completions of a prompt that the actor computes it once for."""
    reference_dtype: DType = "bfloat16"
    reference_microbatches: int = 1

    @property
    def shared_bytes(self) -> int:
        """Of the policy on one device, what actor and rollout hold as one array."""
        if not self.one_mesh or self.rollout_dtype != self.param_dtype:
            return 0
        axes, dtype = self.axes["actor"], self.param_dtype
        whole = weight_bytes(self.student, axes, dtype)
        own = layer_bytes(self.student, axes, dtype) if self.rollout_layout == "unstacked" else 0
        return whole - own

    @property
    def width(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def vocab(self) -> int:
        """V of the losses: the rows that both heads have."""
        sizes = [m.vocab_size for m in (self.student, self.teacher) if m is not None]
        return min(sizes)

    def rows(self, role: str, sequences: int) -> int:
        """Sequences on one device of a role."""
        axes = self.axes[role]
        return -(-sequences // (axes.data * axes.fsdp))

    def run(self, role: str, config: DecoderConfig, rows: int, width: int, dtype: DType) -> Pass:
        fused = fuses(self.target, config.head_dim, dtype, width, width)
        return Pass(config, self.axes[role], rows, width, ITEMSIZE[dtype], fused)

    def chunk(self, rows: int) -> int:
        """Tokens projected on the vocabulary at once, of the completions of `rows` sequences."""
        return min(self.chunk_tokens, rows * self.new_tokens)

    def one_chunk(self, rows: int) -> bool:
        """Whether these are all at once: XLA dissolves a loop over one chunk."""
        return self.chunk_tokens >= rows * self.new_tokens


def micro_batches(m: MemoryInputs) -> tuple[int, int]:
    """How many micro-batches an update has, and rows of one on a device."""
    rows = m.rows("actor", -(-m.sequences // m.minibatches))
    budget = m.micro_batch_tokens
    allowed = rows if budget is None else max(1, budget // m.width)
    if m.shared_group > 1:  # whole groups
        groups = -(-rows // m.shared_group)
        together = m.prompt_tokens + m.shared_group * m.new_tokens
        allowed = groups if budget is None else max(1, budget // together)
        count = -(-groups // allowed)
        return count, -(-groups // count) * m.shared_group
    count = -(-rows // allowed)
    return count, -(-rows // count)


BACKWARD, LOSS, STEP = "backward pass", "loss", "optimizer step"
"""Phases of an update."""
SHARED = "parameters, the rollout's too"


def actor(m: MemoryInputs) -> Account:
    """Training: parameters, optimizer, gradients; temporaries of a block or of the loss."""
    axes = m.axes["actor"]
    weights = weight_bytes(m.student, axes, m.param_dtype)
    computed = weight_bytes(m.student, axes, m.actor_dtype)
    mixed = m.actor_dtype != m.param_dtype
    count, rows = micro_batches(m)
    run = m.run("actor", m.student, rows, m.width, m.actor_dtype)
    if m.shared_group > 1:
        run = replace(run, shared=(m.shared_group, m.prompt_tokens))
    gradients = weights + (computed if mixed else 0)
    if count > 1:  # a float32 sum, and the gradient that is added to it
        table = sum(s.size for s in shards(m.student, axes) if s.path.startswith("embed"))
        wider = table * (F32 - ITEMSIZE[m.actor_dtype])  # the embedding's is float32 as it comes
        gradients = weight_bytes(m.student, axes, "float32") + computed + wider
    signal = m.rows("actor", m.sequences) * m.new_tokens * m.signal_bytes
    taken = min(m.rows("actor", -(-m.sequences // m.minibatches)), count * rows)
    taken_bytes = taken * m.new_tokens * m.signal_bytes
    summed = weight_bytes(m.student, axes, "float32") if count > 1 else weights
    heads = _heads(m, rows, count)
    arrays = m.loss_arrays - (m.loss_fused and m.one_chunk(rows))
    loss = 2 * run.residual + logits(m.chunk(rows), m.vocab, axes.tensor, arrays)
    parts = [
        Part("weights", "parameters", weights - m.shared_bytes),
        Part("weights", SHARED, m.shared_bytes),
        Part("optimizer", "optimizer state", m.optimizer_bytes),
        *(Part("activations", "teacher's signal", signal, p) for p in (BACKWARD, LOSS, STEP)),
        Part("gradients", "gradients", gradients, BACKWARD),
        Part("activations", "kept by the layers", run.saved(m.remat), BACKWARD),
        Part("activations", "embedding's gradient at full width", heads.embedding, BACKWARD),
        Part("activations", "one layer", run.backward(m.remat), BACKWARD),
        Part("activations", "its micro-batches", taken_bytes * (count > 1), BACKWARD),
        Part("gradients", "gradients", gradients - heads.later, LOSS),
        Part("activations", "kept by the layers", run.saved(m.remat), LOSS),
        Part("activations", "heads at full width", heads.forward, LOSS),
        Part("activations", "logits, or one layer", _fullest(m, run, loss, heads), LOSS),
        Part("activations", "its micro-batches", taken_bytes, LOSS),
        Part("gradients", "gradients", summed, STEP),
        Part("activations", "scratch", m.optimizer_scratch, STEP),
        Part("activations", "copy for the rollout", _published(m), "publish"),
    ]
    if mixed:
        copy = f"copy in {m.actor_dtype}"
        parts += [Part("activations", copy, computed, phase) for phase in (BACKWARD, LOSS)]
    if m.head_on_actor and m.teacher is not None:
        parts.append(Part("weights", "teacher's LM head", _teacher_head(m, m.teacher)))
    return Account("actor", tuple(p for p in parts if p.bytes))


def _published(m: MemoryInputs) -> int:
    """The policy as the rollout wants it, on the actor's mesh, where it does not stay there as the
    rollout's own; only what changes is copied.
    """
    axes, same = m.axes["actor"], m.rollout_dtype == m.param_dtype
    if m.one_mesh or (same and m.rollout_layout == "stacked"):
        return 0
    size = layer_bytes if same else weight_bytes
    return size(m.student, axes, m.rollout_dtype)


def _teacher_head(m: MemoryInputs, teacher: DecoderConfig) -> int:
    axes = m.axes["actor"]
    rows = split(m.vocab, axes.tensor)
    return rows * split(teacher.d_model, axes.fsdp) * ITEMSIZE[m.teacher_dtype]


class Heads(NamedTuple):
    """Arrays of an LM head's or the embedding's size beyond parameters and their gradients."""

    embedding: int
    """What the embedding's gradient, a float32 sum, takes before it is split over `fsdp` again."""
    forward: int
    """The embedding and the heads gathered, and the sum of the student's head gradient. XLA gathers
    them before the first layer runs."""
    copied: int
    """What comes and goes while they are gathered."""
    later: int
    """Of the gradients, what is not there before the loss is done: with one chunk nothing is summed
    up."""


def _heads(m: MemoryInputs, rows: int, count: int) -> Heads:
    axes, width, compute = m.axes["actor"], m.student.d_model, ITEMSIZE[m.actor_dtype]
    tied, one_chunk = m.student.tie_embeddings, m.one_chunk(rows)
    own = whole_rows(m.vocab, width, axes, compute)
    summed = whole_rows(m.vocab, width, axes, F32)
    later = own // axes.fsdp if one_chunk and m.loss_fused else 0
    if axes.fsdp == 1:
        apart = m.loss_fused and m.actor_dtype != "float32" and not one_chunk
        return Heads(0, summed if apart else 0, 0, later)
    table = whole_rows(m.student.vocab_size, width, axes, F32)  # whatever the compute dtype
    embedding = table - (0 if tied else table // axes.fsdp)
    looked_up = embedding * compute // F32
    theirs = 0
    if m.head_on_actor and m.teacher is not None:
        theirs = whole_rows(m.vocab, m.teacher.d_model, axes, ITEMSIZE[m.teacher_dtype])
    hole = 0 if m.loss_fused else own // 4  # between what XLA packs: nothing on one mesh, own / 2
    if one_chunk:  # on another. The heads are read once, and gone when the logits fill up
        return Heads(embedding, looked_up + own, own + hole + theirs + theirs // axes.fsdp, later)
    kept = summed - own // axes.fsdp if m.loss_fused else 0
    copied = max(2 * own if tied else own, theirs) + hole
    twice = 0
    if count == 2:  # XLA dissolves the loop over the one that is left, and gathers for both at once
        twice = whole_rows(m.student.vocab_size, width, axes, compute) + own
    return Heads(embedding, looked_up + own + theirs + kept + twice, copied, later)


def _fullest(m: MemoryInputs, run: Pass, loss: int, heads: Heads) -> int:
    """Beside the heads: logits and hidden states, a layer of the forward pass, or a gather."""
    return max(loss, run.first(m.remat), heads.copied)


def rollout(m: MemoryInputs) -> Account:
    """Sampling: the policy in its compute dtype, its next version as it arrives, and the cache."""
    axes, dtype = m.axes["rollout"], m.rollout_dtype
    whole = weight_bytes(m.student, axes, dtype)
    parts = [
        Part("weights", "parameters", whole - m.shared_bytes),
        Part("activations", "next version", 0 if m.one_pool else whole, "weight sync"),
        *_sampling(m, "rollout", m.student, dtype, stacked=m.rollout_layout == "stacked"),
    ]
    if m.student_topk:
        rows, stacked = m.rows("rollout", m.sequences), m.rollout_layout == "stacked"
        run = m.run("rollout", m.student, rows, m.width, dtype)
        work = _scoring(m, run, m.chunk(rows), 2, stacked=stacked)  # the ids alone
        parts.append(Part("activations", "top-k of the policy", work, "score"))
    return Account("rollout", tuple(p for p in parts if p.bytes))


def _sampling(
    m: MemoryInputs, role: str, config: DecoderConfig, dtype: DType, *, stacked: bool = False
) -> list[Part]:
    """What the engine allocates while it generates."""
    axes = m.axes[role]
    row_shards = axes.data * axes.fsdp
    slots = -(-m.slots // axes.size) * axes.size // row_shards
    prompts = m.prefill_rows[role]
    run = m.run(role, config, -(-prompts // row_shards), m.prompt_tokens, dtype)
    positions = m.prompt_tokens + m.sample_tokens
    cache = cache_bytes(config, axes, slots, positions, dtype)
    held = cache_bytes(config, axes, prompts, m.prompt_tokens, dtype)
    scores = 2 * slots * split(config.n_heads, axes.tensor) * positions * F32
    drawn = logits(slots, config.vocab_size, axes.tensor, SAMPLER_ARRAYS)
    table = whole_rows(config.vocab_size, config.d_model, axes, ITEMSIZE[dtype])
    shard = table // axes.fsdp if axes.fsdp > 1 else 0
    copy = table if axes.fsdp > 1 else 0
    one = cache // config.n_layers
    work = {
        "prefill": max(run.forward(stacked=False), shard),
        "decode": max(scores, drawn, copy),
        "longer cache": one,
    }
    if stacked:  # a layer's cache and weights are cut out of the whole; fsdp gathers a layer
        layer = layer_bytes(config, axes, dtype) // config.n_layers
        layer += layer_bytes(config, axes._replace(fsdp=1), dtype) // config.n_layers
        work = {
            "prefill": max(run.forward(stacked=True), shard) + copy,
            "decode": max(scores + 2 * one, drawn) + layer + 2 * copy,
            "longer cache": cache,
        }
    parts = []
    for phase, size in work.items():
        parts += [
            Part("cache", "KV cache", cache, phase),
            Part("cache", "keys and values of prompts", held, phase),
            Part("activations", phase, size, phase),
        ]
    if axes.fsdp > 1 and not stacked:  # each program gathers all it needs before its first layer
        size = weight_bytes(config, axes._replace(fsdp=1), dtype)
        name = "weights gathered over fsdp"
        unused = (0 if config.tie_embeddings else table) + run.layer  # nearly all of the last layer
        parts.append(Part("activations", name, size - unused, "prefill"))
        parts.append(Part("activations", name, size, "decode"))
    return parts


def _scoring(m: MemoryInputs, run: Pass, tokens: int, arrays: int, *, stacked: bool) -> int:
    """Bytes of a forward pass, and of what is told of its hidden states; 0 `arrays`: themselves."""
    axes, config = run.axes, run.config
    work = run.forward(stacked, told=arrays > 0)
    told = logits(tokens, m.vocab, axes.tensor, arrays)
    if axes.fsdp == 1:
        return max(work, told + run.residual)
    table = whole_rows(config.vocab_size, config.d_model, axes, run.itemsize)
    head = table if arrays else 0
    if stacked:  # the embedding is dropped after the look-up, a layer's weights after the layer
        return head + max(work, told, table + table // axes.fsdp)
    layers = config.n_layers * run.layer
    return layers + head + max(work, told, table + max(table // axes.fsdp, run.residual))


def teacher(m: MemoryInputs) -> Account:
    """Scoring, and sampling where the teacher's own completions are wanted."""
    config, axes, dtype = m.teacher, m.axes["teacher"], m.teacher_dtype
    assert config is not None
    all_rows = m.rows("teacher", m.sequences)
    rows = -(-all_rows // m.teacher_microbatches)
    run = m.run("teacher", config, rows, m.width, dtype)
    signal = all_rows * m.new_tokens * m.signal_bytes
    work = _scoring(m, run, m.chunk(rows), m.score_arrays, stacked=not m.teacher_samples)
    parts = [
        Part("weights", "parameters", weight_bytes(config, axes, dtype)),
        Part("activations", "signals in flight", signal * m.signals_in_flight),
        Part("activations", "signal", signal, "score"),
        Part("activations", "forward pass", work, "score"),
    ]
    if m.teacher_microbatches > 1:
        parts.append(Part("activations", "signal, put together", 2 * signal, "end of score"))
    if m.teacher_samples:
        parts += _sampling(m, "teacher", config, dtype)
    return Account("teacher", tuple(p for p in parts if p.bytes))


def reference(m: MemoryInputs) -> Account:
    """Log-probs of the completions under the policy as it was."""
    axes, dtype = m.axes["reference"], m.reference_dtype
    rows = -(-m.rows("reference", m.sequences) // m.reference_microbatches)
    run = m.run("reference", m.student, rows, m.width, dtype)
    work = _scoring(m, run, m.chunk(rows), 2, stacked=True)
    parts = [
        Part("weights", "parameters", weight_bytes(m.student, axes, dtype)),
        Part("activations", "forward pass", work, "score"),
    ]
    return Account("reference", tuple(p for p in parts if p.bytes))


ACCOUNTS: dict[str, Callable[[MemoryInputs], Account]] = {
    "actor": actor,
    "rollout": rollout,
    "teacher": teacher,
    "reference": reference,
}
"""Role -> its account; a role that is not here loads nothing."""
