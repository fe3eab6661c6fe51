"""Accounts for the memory of each role on one of its devices, before any weight is read.

By `plan/array_bytes.py` the arrays that a role keeps are exact, and what a program needs besides is
an estimate. An entry is resident or belongs to a phase. A worker does one thing at a time, so the
peak of a device is the largest over the phases of all roles there: what is resident and not away
then, and the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import GPU, TPU, fuses, step_kernel_of
from jaxrl.plan.array_bytes import (
    F32,
    ITEMSIZE,
    Pass,
    cache_bytes,
    layer_bytes,
    logits,
    optimizer_scratch,
    shards,
    split,
    table_bytes,
    trained_bytes,
    trained_shards,
    weight_bytes,
)
from jaxrl.plan.declarations import kept_arrays
from jaxrl.plan.plan_inputs import Account, Entry, PlanInputs, PoolPeak, Setting
from jaxrl.roles.actor import STEP, TO_TEACHER, UPDATE, moment_bytes
from jaxrl.roles.grouper import grouper_batches
from jaxrl.roles.reward import reward_batches
from jaxrl.roles.run_shapes import asked, generates
from jaxrl.sampling.engine import ANSWER_ROWS, ANSWER_TOKENS
from jaxrl.sharding.targets import ridge
from jaxrl.teacher.local_teacher import COMBINE

LOSS_ARRAYS = 3
"""Float32 arrays [chunk, V] alive at once in a loss over the whole vocabulary, and in a score that
chooses tokens; of the log-prob of one token, which goes backward in tiles, `TILE_ARRAYS`."""
TILE_ARRAYS = 2
SUMMED_ARRAYS = 1
"""The same of the log-prob of one token without a gradient: its sums are fused."""
ENTROPY_ARRAYS = 2
"""Further ones with `distill.entropy_aware`."""
ALIGNED_ARRAYS = 5
"""Further ones with a teacher whose tokens are others, beside two of the teacher's vocabulary."""
UNFUSED_ARRAYS = 4
"""Further ones on a CPU, which fuses less."""
SAMPLER_ARRAYS = 3
"""Float32 arrays [slots, V] alive at once in the sampler; on a TPU `TPU_SAMPLER_ARRAYS`."""
TPU_SAMPLER_ARRAYS = 4
LANES = 128
"""Columns to which a TPU pads the rows of an array."""
SAFETY = 1.1
"""Factor on what exists in one phase only: the estimate is to err on the safe side."""
SAVED = "saved for the backward pass"


def actor(m: Setting) -> Iterable[Entry]:
    """Yields what training keeps and needs: parameters, optimizer state, gradients, what the layers
    save, and the fuller of a block's backward pass and the loss."""
    c, a, axes, student = m.config, m.config.actor, m.axes["actor"], m.student
    lora, gathers = student.lora is not None, axes.weights > 1
    count, rows = m.micro_batches()
    run = m.run("actor", student, rows, m.width, m.shared_group)
    computed = trained_bytes(student, axes, a.compute_dtype)
    layers = computed if lora else layer_bytes(student, axes, a.compute_dtype)
    # The sum over micro-batches is in float32, beside the gradient of one in the compute dtype.
    summed = trained_bytes(student, axes, "float32") if count > 1 else 0
    copies = layers if a.compute_dtype != a.param_dtype else 0
    if lora and c.base_dtype != a.compute_dtype:
        copies += weight_bytes(student.base, axes, a.compute_dtype)
    if lora and gathers and m.inputs.target.platform in GPU:
        # Kernels that are split along their last dim are transposed before they are gathered.
        copies += layer_bytes(student.base, axes, c.base_dtype) // 2
    if student.experts is not None and not lora and gathers and m.inputs.target.platform in GPU:
        # Of two of the experts' three kernels, the sum is transposed to be added to.
        experts = sum(
            shard.size for shard in trained_shards(student, axes) if "experts" in shard.path
        )
        copies += 2 * experts * F32 // 3 * (count > 1)
    head = table_bytes(m.vocab, student.d_model, axes, run.itemsize)
    theirs = 0
    if m.signal == "hidden":
        item = ITEMSIZE[c.teacher.compute_dtype]
        theirs = sum(table_bytes(m.teacher_rows, width, axes, item) for width in m.teacher_widths)
    sent = m.rows("actor", m.sequences) * m.new_tokens * (m.signal_bytes + F32 * len(c.teachers))
    taken = sent * rows // max(m.rows("actor", m.sequences), 1)
    d, softcap = c.distill, student.final_softcap is not None
    arrays, head_gradient = TILE_ARRAYS + 2 * softcap, 0  # float32 [chunk, V], alive in the loss
    if m.signal not in (None, "sampled"):
        arrays = LOSS_ARRAYS + softcap
        if not d.lean and not lora:  # which sums the head's gradient as it goes forward, in float32
            head_gradient = head * F32 // run.itemsize
    if m.signal == "hidden":
        arrays += UNFUSED_ARRAYS * m.inputs.on_cpu + len(c.teachers)
        arrays += ENTROPY_ARRAYS * d.entropy_aware + (d.lean and axes.tensor > 1)
        arrays += (ALIGNED_ARRAYS + -(-2 * m.teacher_rows // m.vocab)) * m.aligned
    loss = logits(m.chunk(rows), m.vocab, axes.tensor, arrays) + 2 * run.residual
    loss += head + theirs * gathers + head_gradient + taken
    block = run.backward() + computed - layers
    # After the layers: the whole gradient of the embedding where it is reduced, then the sum.
    table = 0 if lora else table_bytes(student.vocab_size, student.embedded, axes, F32)
    added = max(computed + table * (2 if gathers else 1), summed + computed)
    scratch = optimizer_scratch(student, axes, c.optimizer)
    # A TPU copies the embedding and its optimizer state into whole lanes where a device's columns
    # are none.
    padded, columns = 0, student.embedded // axes.weights
    if m.inputs.target.platform == TPU and not lora and columns % LANES:
        share = table_bytes(student.vocab_size, -(-columns // LANES) * LANES, axes, 1)
        each = moment_bytes(c, student, axes) // sum(s.size for s in shards(student, axes))
        padded = share * (ITEMSIZE[a.param_dtype] + each)
    for phase in (UPDATE, STEP):
        yield Entry("activations", "teacher's signal", sent, phase)
        yield Entry("gradients", "summed gradients", summed, phase)
        yield Entry("activations", "embedding in whole lanes", padded, phase)
    yield Entry("gradients", "gradients", layers, UPDATE)
    yield Entry("activations", "copies of weights", copies, UPDATE)
    yield Entry("activations", SAVED, run.saved(a.remat), UPDATE)
    yield Entry("activations", "a block backward, or the loss", max(block, loss), UPDATE)
    yield Entry("gradients", "gradients, or scratch", max(added, scratch), STEP)
    yield Entry("activations", "copy for the rollout", _published(m, "rollout"), "publish")
    if m.recorded is not None:
        each = m.width * m.recorded.size * m.recorded.dtype.itemsize
        recorded = (m.rows("actor", m.sequences) + 3 * rows) * each
        yield Entry("activations", "recorded experts", recorded, UPDATE)
    if c.teacher_follows:
        yield Entry("activations", "copy for the teacher", _published(m, "teacher"), TO_TEACHER)


def _published(m: Setting, role: str) -> int:
    """Returns the bytes of the temporary copy, on the actor's mesh, of the policy in a role's dtype
    and layout: 0 on the same mesh, where the copy is the role's own weights. Arrays that need no
    conversion are not copied."""
    dtype = m.config.roles[role].compute_dtype
    averaged = role == "teacher" and m.config.keeps_ema
    same = dtype == ("float32" if averaged else m.config.actor.param_dtype)
    if m.on_actors_mesh(role) or (same and m.layout(role) == "stacked"):
        return 0
    if m.student.lora is not None:
        return trained_bytes(m.student, m.axes["actor"], dtype)
    if same:
        return layer_bytes(m.student, m.axes["actor"], dtype)
    lanes = 1.5 if m.inputs.target.platform == TPU else 1  # which pads what it converts
    return round(lanes * weight_bytes(m.student, m.axes["actor"], dtype))


def rollout(m: Setting) -> Iterable[Entry]:
    """Yields what sampling keeps and needs: the policy in its compute dtype, the next version while
    it arrives, and the cache."""
    c, axes = m.config, m.axes["rollout"]
    merging = 0
    if m.sampled("rollout") != m.student:  # adapters are added to one kernel after the other
        kernels = (s.size for s in shards(m.student.plain, axes) if s.path.endswith("kernel"))
        merging = F32 * max(kernels)
    yield Entry("activations", "kernels in float32", merging, "weight sync")
    if asked(c, "rollout"):
        yield from sampling(m, "rollout")
    if m.signal == "student_topk":
        rows = m.rows("rollout", m.sequences)
        run = m.run("rollout", m.sampled("rollout"), rows, m.width)
        sorts = m.inputs.target.platform != TPU  # a copy; only token ids are sent
        work = _scoring(m, "rollout", run, rows, SUMMED_ARRAYS + sorts)
        yield Entry("activations", "top-k of the policy", work, "score")


def sampling(m: Setting, role: str) -> Iterator[Entry]:
    """Yields the cache of the sampling engine of a role, and what its programs need besides."""
    axes, dtype = m.axes[role], m.config.roles[role].compute_dtype
    model, width, of = m.sampled(role), m.prompts(role), m.cache_sizes(role)
    prompts = m.prefill_rows(role)
    cache = cache_bytes(model, axes, *of.own, dtype)
    shared = cache_bytes(model, axes, of.rows, width, dtype)
    held = cache_bytes(model, axes, prompts, width, dtype)
    run = m.run(role, model, prompts, width)
    heads, seats = split(model.n_heads, axes.tensor), of.rows * of.seats
    scores = 2 * heads * (of.sequences * of.positions + seats * width) * F32
    kernels = (step_kernel_of(m.inputs.target, dim, dtype) for dim in model.head_dims)
    if all(kernels):  # a part of each row at a time
        windows = any(kind.window is not None for kind in model.kinds)
        scores = 2 * heads * seats * width * F32 * windows  # the prompts' keys, by products
        scores += 2 * heads * (of.sequences + seats) * max(model.head_dims) * F32 * 8
    tpu = m.inputs.target.platform == TPU
    arrays = TPU_SAMPLER_ARRAYS if tpu else SAMPLER_ARRAYS
    drawn = logits(of.sequences, model.vocab_size, axes.tensor, arrays)
    table = table_bytes(model.vocab_size, model.embedded, axes, run.itemsize)
    gathered = 0
    if axes.weights > 1:  # a CPU gathers all layers first, a GPU some layers ahead
        layers = layer_bytes(model, axes.gathered, dtype)
        gathered = table + layers // (5 if m.inputs.target.platform in GPU else 1)
    if m.inputs.on_cpu and model.quantised is not None:  # which dequantises all layers at once
        floats = (s for s in shards(model.plain, axes) if s.path.startswith("layers"))
        gathered += sum(s.bytes(dtype) for s in floats if "experts/" not in s.path)
    step = m.run(role, model, of.sequences, 1).step_experts(ridge(m.inputs.target.kind))
    work = {
        "prefill": run.forward() + gathered,
        "decode": max(scores, step) + drawn + gathered,
    }
    if of.episodes:
        answers = m.run(role, model, ANSWER_ROWS, ANSWER_TOKENS[1])
        picked = 2 * cache // of.sequences * min(of.sequences, ANSWER_ROWS)
        scored = heads * ANSWER_ROWS * ANSWER_TOKENS[1] * of.positions
        work["answers of environments"] = picked + max(answers.forward(), 2 * F32 * scored)
    elif of.pages:  # the pool does not grow
        read = cache_bytes(model, axes, 1, of.whole, dtype)
        work["read again"] = read + m.run(role, model, 1, of.whole).forward() + gathered
    else:
        grown = (cache_bytes(one, axes, of.sequences, of.positions, dtype) for one in model.shapes)
        work["longer cache"] = max(grown)
    yield Entry("cache", "keys and values of prompts", held, "prefill")
    for phase, size in work.items():
        yield Entry("cache", "KV cache", cache, phase)
        yield Entry("cache", "prompts that slots share", shared, phase)
        yield Entry("activations", phase, size, phase)


def _scoring(m: Setting, role: str, run: Pass, rows: int, arrays: int) -> int:
    """Returns the bytes of a role's forward pass over `rows` sequences, or of the logits of one
    chunk of its hidden states.

    Args:
        arrays: float32 arrays [chunk, V] alive at once; 0 if the hidden states are the result.
    """
    axes, model = run.axes, run.config
    vocab = model.vocab_size if m.aligned else m.vocab
    work = max(
        run.forward(), logits(m.chunk(rows, role), vocab, axes.tensor, arrays) + run.residual
    )
    if axes.weights == 1:
        return work
    table = table_bytes(model.vocab_size, model.embedded, axes, run.itemsize)  # gathered first
    head = table_bytes(model.vocab_size, model.d_model, axes, run.itemsize) if arrays else 0
    return head + max(work, table + table // axes.weights)


def teacher(m: Setting) -> Iterable[Entry]:
    """Yields what scoring by the teachers needs, and sampling where the run uses completions of the
    teacher."""
    c, model, axes = m.config, m.teacher, m.axes["teacher"]
    assert model is not None
    run, parts = m.scored("teacher", model), m.passes("teacher").calls
    signal = m.rows("teacher", m.sequences) * m.new_tokens * m.signal_bytes
    # Of a mixture of other signals than hidden states, these are sent, and combined.
    combines = bool(m.inputs.several) and c.mixture is not None and c.distill.signal != "hidden"
    arrays = {"hidden": 2 * m.aligned, "sampled": SUMMED_ARRAYS}.get(c.distill.signal, LOSS_ARRAYS)
    gathers = m.inputs.target.platform == TPU and axes.tensor > 1  # the parts of the vocabulary
    if c.distill.signal in ("topk", "student_topk"):
        sorts = m.inputs.target.platform in GPU and c.distill.signal == "topk"  # a copy
        arrays += sorts + gathers
    work = _scoring(m, "teacher", run, run.rows, 0 if combines else arrays)
    yield Entry("activations", "signals in flight", m.in_flight)
    if m.aligned:
        work += 2 * run.rows * m.completions("teacher") * m.signal_bytes
    if combines:
        width = ITEMSIZE[c.teacher.compute_dtype] * sum(m.teacher_widths)
        work += run.rows * m.new_tokens * width
        logs = LOSS_ARRAYS + len(m.teacher_widths) + gathers
        combined = logits(m.chunk(run.rows), m.vocab, axes.tensor, logs)
        combined += 2 * run.rows * m.new_tokens * width
        yield Entry("activations", "signals of the teachers", combined, "combine")
    elif m.inputs.several:
        one = run.rows * m.new_tokens * m.signal_bytes
        yield Entry("activations", "signals of the teachers", 2 * one, "combine")
    yield Entry("activations", "signal", signal * (2 if parts > 1 else 1), "score")
    yield Entry("activations", "forward pass", work, "score")
    if generates(c, "teacher"):
        yield from sampling(m, "teacher")


def reference(m: Setting) -> Iterable[Entry]:
    """Yields what the log-probs under the policy before training need."""
    run = m.scored("reference", m.reference)
    work = _scoring(m, "reference", run, run.rows, SUMMED_ARRAYS)
    yield Entry("activations", "forward pass", work, "score")


def reward(m: Setting) -> Iterable[Entry]:
    """Yields what the reward model needs, if there is one; reward functions use no device."""
    c, model = m.config, m.inputs.reward
    if model is None:
        return
    axes, dtype = m.axes["reward"], c.reward.compute_dtype
    work = 0
    for width, rows in reward_batches(c, model):
        work = max(work, m.run("reward", model, rows, width).forward())
    if axes.weights > 1:
        work += table_bytes(model.vocab_size, model.embedded, axes, ITEMSIZE[dtype])
    yield Entry("activations", "forward pass", work, "score")


def grouper(m: Setting) -> Iterable[Entry]:
    """Yields what the text encoder of similarity groups needs."""
    c, model = m.config.grouper, m.inputs.grouper
    if model is None:
        return
    axes, dtype, target = m.axes["grouper"], c.compute_dtype, m.inputs.target
    item, wide = ITEMSIZE[dtype], split(model.d_ff, axes.tensor)
    heads, work = split(model.n_heads, axes.tensor), 0
    for width, rows in grouper_batches(m.config, model):
        tokens = rows * width
        scores = (
            0 if fuses(target, model.head_dim, dtype) else tokens * width * (3 * heads * F32 + 1)
        )
        mlp = tokens * (2 * model.d_model + 2 * wide) * item
        work = max(work, mlp, tokens * 5 * model.d_model * item + scores)
    layer = model.d_model * (4 * model.d_model + 2 * model.d_ff) * item // axes.tensor
    if axes.fsdp > 1:
        if target.platform in GPU:  # transposes second kernels of all layers, then gathers them
            layer += layer * model.n_layers // axes.fsdp
        layer += table_bytes(model.vocab_size, model.d_model, axes, item)
    yield Entry("activations", "forward pass", work + layer, "embed")


ACCOUNTS: dict[str, Callable[[Setting], Iterable[Entry]]] = {
    entries.__name__: entries for entries in (actor, rollout, teacher, reference, reward, grouper)
}
"""Role -> the function that yields its entries."""


def role_accounts(inputs: PlanInputs, config: Config) -> dict[str, Account]:
    """Returns the account of each role of the run: what it keeps, as it declares that, and what its
    programs need besides; each entry says when it is offloaded or freed (`away`)."""
    setting, accounts = Setting(config, inputs), {}
    kept = list(kept_arrays(setting))
    arrive = {x.resident.role: x.resident.stages[0] for x in kept if x.resident.passing and x.bytes}
    for pool in inputs.placement.pools:
        roles = [r for r in pool.roles if r in inputs.roles and r in ACCOUNTS]
        phases = {role: list(_phase_entries(setting, role)) for role in roles}
        # Moment -> stage, of everything that a worker of the pool does.
        stages = {
            f"{role}: {entry.phase}": _stage(setting, role, entry.phase)
            for role, entries in phases.items()
            for entry in entries
            if entry.phase is not None
        }
        stages |= {f"{r}: weight sync": arrive[r] for r in roles if r in arrive}
        for role, entries in phases.items():
            for x in (x for x in kept if x.resident.role == role and x.bytes):
                if x.resident.passing:
                    entries.append(Entry(x.resident.column, x.title, x.bytes, "weight sync"))
                    continue
                away = frozenset(moment for moment, stage in stages.items() if x.away(stage))
                column = x.resident.column
                entries.insert(0, Entry(column, x.title, x.bytes, away=away))
            if entries:
                accounts[role] = Account(role, tuple(entries))
    return accounts


def _phase_entries(setting: Setting, role: str) -> Iterator[Entry]:
    """Yields what the programs of a role need beside what it keeps."""
    inputs, config = setting.inputs, setting.config
    entries = []
    for e in (e for e in ACCOUNTS[role](setting) if e.bytes):
        # Caches and weights on their way are exact; nearly what the layers save.
        exact = e.phase in (None, "weight sync", "publish", TO_TEACHER) or e.name == SAVED
        if not exact and e.column != "cache":
            e = replace(e, bytes=round(SAFETY * e.bytes))
        entries.append(e)
    yield from entries
    if inputs.on_cpu and config.roles[role].dtype == "bfloat16":
        # A CPU computes it in float32 copies: of the weights of the layers, the head and the
        # activations.
        model, axes, weights = inputs.model(role), setting.axes[role], 0
        if isinstance(model, DecoderConfig) and role != "actor":
            weights = layer_bytes(model, axes, "float32")
            weights += table_bytes(model.vocab_size, model.d_model, axes, F32)
        for phase in dict.fromkeys(e.phase for e in entries if e.phase is not None):
            mine = (e for e in entries if e.phase == phase and e.column == "activations")
            size = weights + sum(e.bytes for e in mine)
            yield Entry("activations", "computed in float32", size, phase)


METHODS = {
    ("actor", UPDATE): "update",
    ("actor", STEP): "update",
    ("actor", "publish"): "publish",
    ("actor", TO_TEACHER): "publish_to_teacher",
    ("teacher", "score"): "score",
    ("teacher", "combine"): "score",
    ("reference", "score"): "score",
    ("reward", "score"): "score",
    ("grouper", "embed"): "score",
}
"""Role and phase -> the role's method; "load" of a weight sync, "generate" of all others."""


def _stage(setting: Setting, role: str, phase: str) -> str:
    """Returns the stage of the ledger that a phase is in."""
    method = METHODS.get((role, phase), "load" if phase == "weight sync" else "generate")
    if role != "teacher" or not setting.config.teachers or method == "load":
        return f"{role}.{method}"
    if phase == "combine" and setting.config.mixture is not None:
        return f"teacher.score.{COMBINE}"
    models = setting.inputs.teachers  # the largest takes its turn
    largest = max(range(len(models)), key=lambda i: models[i].n_params)
    return f"{role}.{method}.{list(setting.config.teachers)[largest]}"


def pool_peaks(inputs: PlanInputs, config: Config) -> tuple[PoolPeak, ...]:
    """Returns the fullest device of each pool."""
    return inputs.pools(role_accounts(inputs, config))
