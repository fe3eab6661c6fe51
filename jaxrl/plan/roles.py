"""The memory of each role on one of its devices, in bytes, computed before any weight is read.

The sizes of weights, optimizer state and KV cache are exact (`plan/memory.py`). Temporaries are
estimated by the analytic model of `models/activations.py`, which counts the arrays that are alive
at the same time in the programs as XLA schedules them.

A role's function in `ENTRIES` yields its `Entry`s: bytes that are resident, or that exist during
one phase, such as the backward pass of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxrl.config.schema import Config
from jaxrl.models.activations import F32, Pass, logits, split, whole_rows
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import GPU, TPU
from jaxrl.models.splash import LANES
from jaxrl.plan.frozen_memory import grouper_account, reward_account
from jaxrl.plan.inputs import PlanInputs, PoolPeak
from jaxrl.plan.memory import (
    ITEMSIZE,
    Account,
    Entry,
    layer_bytes,
    optimizer_bytes,
    optimizer_scratch,
    shards,
    trained_bytes,
    trained_shards,
    turned_bytes,
    weight_bytes,
)
from jaxrl.plan.sampling import EVALUATIONS, sampling_entries
from jaxrl.plan.setting import Setting

SCORE_ARRAYS = 3
"""Float32 arrays [chunk, V] alive at once in a loss."""
TILE_ARRAYS = 2
"""The same in the log-prob of one token, whose backward pass runs in tiles."""
CAPPED_ARRAYS = 1
"""Further ones there where the model caps its logits: a TPU has two, a GPU half of one."""
UNFUSED_ARRAYS = 4
"""Further ones of a divergence on a CPU, which fuses less."""
ENTROPY_ARRAYS = 2
"""Further ones with `distill.entropy_aware`."""
ALIGNED_ARRAYS = 5
"""Further ones with a teacher whose tokens are others, beside two of the teacher's vocabulary."""
EARLY_COPIES = ("TPU v5 lite", "TPU v5e")
"""TPUs for which XLA copies a table into whole lanes when an update starts; for later ones it does
so at the end, where there is room."""
TEMPLATE_TOKENS = 128
"""Tokens reserved for the reward model's chat template, and for its tokenizer needing more
tokens."""
BACKWARD, LOSS, STEP = "backward pass", "loss", "optimizer step"
ADDED = "gradients added up"
UPDATE_PHASES = (BACKWARD, LOSS, ADDED, STEP)
"""Phases of an update; `ADDED` after the layers."""
TURNED = "kernels transposed for gathers"
LANED = "embedding in whole lanes"
SHARED = "parameters, the rollout's too"
BASE = "frozen base weights"
UPDATE = {f"actor: {phase}" for phase in UPDATE_PHASES}
TO_TEACHER, AVERAGE = "publish to the teacher", "moving average"
PUBLISH = {"actor: publish", f"actor: {TO_TEACHER}"}


def micro_batches(m: Setting) -> tuple[int, int]:
    """(number of micro-batches of an update, rows of one micro-batch on a device)."""
    rows, budget = m.update_rows, m.budget
    allowed = rows if budget is None else max(1, budget // m.width)
    if m.shared_group > 1:  # whole groups
        groups = -(-rows // m.shared_group)
        together = m.prompt_tokens + m.shared_group * m.new_tokens
        allowed = groups if budget is None else max(1, budget // together)
        count = -(-groups // allowed)
        return count, -(-groups // count) * m.shared_group
    count = -(-rows // allowed)
    return count, -(-rows // count)


def actor(m: Setting) -> Iterable[Entry]:
    """Training: parameters, optimizer state, gradients, and temporaries of a layer or of the
    loss."""
    a, axes, platform = m.config.actor, m.axes["actor"], m.inputs.target.platform
    weights = trained_bytes(m.student, axes, a.param_dtype)
    computed = trained_bytes(m.student, axes, a.compute_dtype)
    mixed = a.compute_dtype != a.param_dtype
    count, rows = micro_batches(m)
    run = m.run("actor", m.student, rows, m.width, joined=m.shared_group > 1)
    if m.shared_group > 1:
        run = replace(run, shared=(m.shared_group, m.prompt_tokens))
    own = [s.size for s in trained_shards(m.student, axes) if s.path.startswith("layers")]
    layers = run.itemsize * sum(own)
    # Elements of the embedding while it is gathered.
    table = whole_rows(m.student.vocab_size, m.student.embedded, axes, 1)
    table = 0 if m.student.lora is not None else table
    # The embedding's gradient is summed in float32, whatever the dtype, once the layers are done.
    read = computed + table * (F32 - run.itemsize) // axes.weights
    # Of several micro-batches, the sum: in float32 from the first of them on.
    summed = trained_bytes(m.student, axes, "float32") if count > 1 else 0
    sent = m.signal_bytes + F32 * len(m.config.teachers)  # with the weights of several teachers
    signal = m.rows("actor", m.sequences) * m.new_tokens * sent
    taken = rows * m.new_tokens * sent
    saved, heads = run.saved(a.remat), _heads(m, run, rows)
    several = count > 1 and axes.size > 1 and platform in GPU
    turned = _turned(m, several=several)
    optimizer = m.config.optimizer
    state = optimizer_bytes(m.student, axes, optimizer, a.param_dtype, a.moment_dtype)
    # The gradient of one micro-batch is clipped in its own dtype: measured with adamw, unknown of
    # others.
    as_is = count == 1 and optimizer.name in ("adam", "adamw")
    clipped = a.compute_dtype if as_is else a.moment_dtype
    scratch = optimizer_scratch(m.student, axes, optimizer, clipped, a.moment_dtype)
    entries = [
        Entry("weights", "parameters", weights - m.shared_bytes("rollout")),
        Entry("weights", SHARED, m.shared_bytes("rollout")),
        Entry("weights", BASE, m.base_bytes("actor")),
        Entry("optimizer", "optimizer state", state),
        *(Entry("activations", "teacher's signal", signal, p) for p in UPDATE_PHASES),
        Entry("gradients", "gradients", summed + layers + heads.gradient, BACKWARD),
        Entry("activations", "kept by the layers", saved, BACKWARD),
        Entry("activations", "one layer", run.backward(a.remat), BACKWARD),
        Entry("gradients", "gradients", summed + layers * (heads.early and platform != TPU), LOSS),
        Entry("activations", "kept by the layers", saved, LOSS),
        Entry("activations", "heads at full width", heads.held, LOSS),
        # Logits and hidden states, a layer of the forward pass, or a gather of the heads.
        Entry("activations", "logits, or one layer", max(heads.work, run.first(a.remat)), LOSS),
        Entry("activations", "its rows of a micro-batch", taken, LOSS),
        *(Entry("activations", TURNED, turned, p) for p in (BACKWARD, LOSS, ADDED)),
        *(Entry("activations", LANED, _laned(m, state), p) for p in UPDATE_PHASES),
        Entry("gradients", "gradients", summed or read, STEP),
        Entry("activations", "scratch", scratch, STEP),
        Entry("activations", "copy for the rollout", _published(m, "rollout"), "publish"),
    ]
    # After the layers: the embedding's gradient, whole, which a TPU reduces into another array;
    # then the terms of the sum in float32, which fit where the others were only on a single GPU.
    whole = table * (1 + (platform == TPU)) if axes.weights > 1 else table
    scattered = layers + heads.gradient + F32 * whole
    terms = summed + computed * (platform == TPU or axes.weights > 1) if mixed else computed
    entries.append(Entry("gradients", "gradients", summed + max(scattered, terms), ADDED))
    if m.config.policy.router_replay and m.student.experts is not None:
        experts, each = m.student.experts, m.student.n_layers * m.width
        each *= experts.chosen * experts.id_dtype.itemsize
        recorded = m.rows("actor", m.sequences) * each
        entries += [Entry("activations", "recorded experts", recorded, p) for p in UPDATE_PHASES]
        entries.append(Entry("activations", "those of a micro-batch", 3 * rows * each, BACKWARD))
    if m.config.keeps_ema:
        average = weight_bytes(m.student, axes, "float32")
        entries.append(Entry("optimizer", AVERAGE, average))
    if m.config.teacher_follows:
        sent = _published(m, "teacher")
        entries.append(Entry("activations", "copy for the teacher", sent, TO_TEACHER))
    copies = layers * mixed
    if m.student.lora is not None and m.config.base_dtype != a.compute_dtype:
        copies += weight_bytes(m.student.base, axes, a.compute_dtype)
    copy = f"copy in {a.compute_dtype}"
    entries += [Entry("activations", copy, copies, phase) for phase in (BACKWARD, LOSS)]
    if m.teacher is not None and m.signal == "hidden":
        widths = sum(split(width, axes.weights) for width in m.teacher_widths)
        size = split(m.teacher_rows, axes.tensor) * widths
        size *= ITEMSIZE[m.config.teacher.compute_dtype]
        entries.append(Entry("weights", "teacher's LM head", size))
    return entries


def _laned(m: Setting, state: int) -> int:
    """Bytes of the copies of the embedding and of its part of the optimizer's `state` that a TPU
    makes in an update, where a device's columns of it are no whole lanes."""
    axes, columns = m.axes["actor"], split(m.student.embedded, m.axes["actor"].weights)
    if m.inputs.target.kind not in EARLY_COPIES or m.student.lora is not None:
        return 0
    table = [s for s in shards(m.student, axes) if s.path.startswith("embed/") and columns % LANES]
    own, dtype = sum(s.size for s in table), m.config.actor.param_dtype
    return ITEMSIZE[dtype] * own + state * own // sum(s.size for s in shards(m.student, axes))


class Heads(NamedTuple):
    """Bytes of the LM heads, and of what is computed with them, on a device of the actor."""

    held: int
    """During the loss: the heads at full width in the compute dtype, and the sum of the gradient of
    the student's."""
    work: int
    """Beside it: the logits of a chunk of tokens, or a copy of a head while it is gathered."""
    gradient: int
    """Of the student's head, until the layers are done."""
    early: bool
    """Whether the loss is a loop over chunks, before which XLA makes room for the gradients of the
    layers; not on a TPU."""


def _heads(m: Setting, run: Pass, rows: int) -> Heads:
    """Of the loss of `rows` sequences.

    A loss that sums the head's gradient while it goes forward holds the sum, and the product that
    is added to it. Any other goes backward in tiles.
    """
    axes, width, trained = run.axes, m.student.d_model, m.student.lora is None
    gathers, compute = axes.weights > 1, m.config.actor.compute_dtype
    own = whole_rows(m.vocab, width, axes, run.itemsize)
    theirs = 0
    if gathers and m.teacher is not None and m.signal == "hidden":
        item = ITEMSIZE[m.config.teacher.compute_dtype]
        theirs = sum(whole_rows(m.teacher_rows, one, axes, item) for one in m.teacher_widths)
    # A GPU casts the pieces of a whole head that the backward pass in tiles reads.
    cast = compute != (m.config.actor.param_dtype if trained else m.config.base_dtype)
    cast = cast and (m.loss_fused or m.inputs.target.platform not in GPU)
    held = theirs + own * (gathers or cast)
    gradient = own // axes.weights * trained
    copied = max(own, theirs) * gathers
    read = logits(m.chunk(rows), m.vocab, axes.tensor, loss_arrays(m)) + 2 * run.residual
    if not m.loss_fused:
        return Heads(held + gradient, max(read, copied), gradient, early=True)
    if m.one_chunk(rows):
        return Heads(held, max(read, copied), gradient, early=False)
    product = whole_rows(m.vocab, width, axes, F32) * trained
    last = logits(m.chunk(rows), m.vocab, axes.tensor, 0.5)  # the logits' gradient, for the product
    gradient = product if gathers else gradient  # it is split once the layers are done
    return Heads(held + product, max(max(read, product) + last, copied), gradient, early=True)


def _turned(m: Setting, several: bool) -> int:
    """Bytes of the kernels that a GPU transposes before the loop that gathers them over `fsdp`
    (`memory.turned_bytes`).

    Args:
        several: several micro-batches, before whose loop also those are transposed that are
            trained. In one pass over all rows that is part of their conversion.
    """
    axes, c = m.axes["actor"], m.config
    if m.inputs.target.platform not in GPU:
        return 0
    theirs = 0
    if several and m.signal == "hidden":
        heads = (
            whole_rows(m.teacher_rows, width, axes, ITEMSIZE[c.teacher.compute_dtype])
            for width in m.teacher_widths
        )
        theirs = sum(heads) // axes.weights if axes.weights > 1 else 0
    if m.student.lora is not None:
        return theirs + turned_bytes(m.student.base, axes, c.base_dtype, tables=True)
    if not several:
        return 0
    return theirs + turned_bytes(m.student, axes, c.actor.param_dtype, tables=True)


def _published(m: Setting, role: str) -> int:
    """Bytes of the temporary copy, on the actor's mesh, of the policy in a role's dtype and layout.
    0 if the role is on the same mesh, where the copy is the role's own weights. Arrays that need no
    conversion are not copied.
    """
    dtype = m.config.roles[role].compute_dtype
    same = dtype == m.published_dtype(role)
    if m.on_actors_mesh(role) or (same and m.stacked(role)):
        return 0
    if m.student.lora is not None:
        return trained_bytes(m.student, m.axes["actor"], dtype)
    size = layer_bytes if same else weight_bytes
    return size(m.student, m.axes["actor"], dtype)


def rollout(m: Setting) -> Iterable[Entry]:
    """Sampling: the policy in its compute dtype, the next version while it arrives, and the
    cache."""
    dtype = m.config.rollout.compute_dtype
    whole = trained_bytes(m.student, m.axes["rollout"], dtype)
    if m.config.rollout.merge:
        whole = weight_bytes(m.student.plain, m.axes["rollout"], dtype)
    apart = 0 if m.inputs.together("actor", "rollout") else whole
    entries = [
        Entry("weights", "parameters", whole - m.shared_bytes("rollout")),
        Entry("weights", BASE, m.base_bytes("rollout")),
        Entry("activations", "next version", apart, "weight sync"),
        Entry("activations", "kernels in float32", _merging(m), "weight sync"),
        *sampling_entries(m, "rollout"),
    ]
    if m.signal == "student_topk":
        rows = m.rows("rollout", m.sequences)
        run = replace(m.run("rollout", m.sampled("rollout"), rows, m.width), packed=True)
        work = _scoring(m, "rollout", run, m.chunk(rows), 2)  # only token ids are sent
        entries.append(Entry("activations", "top-k of the policy", work, "score"))
    return entries


def _merging(m: Setting) -> int:
    """Bytes while adapters are added to a copy of the weights: the largest kernel of all layers."""
    if not m.config.rollout.merge:
        return 0
    sizes = shards(m.student.plain, m.axes["rollout"])
    return F32 * max(s.size for s in sizes if s.path.endswith("kernel"))


def _scoring(m: Setting, role: str, run: Pass, tokens: int, arrays: int) -> int:
    """Bytes of a role's forward pass and of the logits computed from its hidden states.

    Args:
        tokens: completion tokens projected onto the vocabulary at once.
        arrays: float32 arrays [tokens, V] alive at once; 0 if the hidden states are the result.
    """
    axes, config, stacked = run.axes, run.config, m.stacked(role)
    work = run.forward(stacked)
    read = logits(tokens, config.vocab_size if m.aligned else m.vocab, axes.tensor, arrays)
    if axes.weights == 1:
        return max(work, read + run.residual)
    table = whole_rows(config.vocab_size, config.embedded, axes, run.itemsize)
    head = whole_rows(config.vocab_size, config.d_model, axes, run.itemsize) if arrays else 0
    if stacked and m.inputs.target.platform in GPU:  # which gathers the head after the layers
        shard = head // axes.weights
        turned = turned_bytes(config, axes, m.config.roles[role].compute_dtype)
        looked_up = table + table // axes.weights
        return shard + max(turned + max(work, looked_up), head + read)
    if stacked:  # the gathered embedding is freed after the look-up, each layer after it ran
        return head + max(work, read, table + table // axes.weights)
    return head + max(work, read, table + max(table // axes.weights, run.residual))


def teacher(m: Setting) -> Iterable[Entry]:
    """Scoring, and sampling if the run uses completions of the teacher."""
    c, config, axes = m.config, m.teacher, m.axes["teacher"]
    assert config is not None
    several, slices = m.inputs.several, c.teacher.num_microbatches
    run = m.scored("teacher", config, slices)
    signal = m.rows("teacher", m.sequences) * m.new_tokens * m.signal_bytes
    # A teacher with other tokens sends log-probs beside hidden states.
    arrays = {"hidden": 2 * m.aligned, "sampled": 2}.get(c.distill.signal, SCORE_ARRAYS)
    combines = several and c.mixture is not None and c.distill.signal != "hidden"
    chunk = m.chunk(run.rows, "teacher")
    work = _scoring(m, "teacher", run, chunk, 0 if combines else arrays)
    each = [weight_bytes(model, axes, c.teacher.compute_dtype) for model in m.inputs.teachers]
    weights = max(each) if c.offload.frozen and not combines else sum(each)
    # The next version arrives beside the old one where the actor is another worker's.
    arrives = c.teacher_follows and not m.inputs.together("actor", "teacher")
    entries = [
        Entry("weights", "parameters", weights - m.shared_bytes("teacher")),
        Entry("activations", "next version", weights * arrives, "weight sync"),
        Entry("activations", "signals in flight", m.in_flight),
        Entry("activations", "signal", signal, "score"),
        Entry("activations", "forward pass", work, "score"),
    ]
    if m.aligned:
        theirs = 2 * run.rows * m.completions("teacher") * m.signal_bytes
        entries.append(Entry("activations", "signal at the teacher's tokens", theirs, "score"))
    if slices > 1:
        entries.append(Entry("activations", "signal, put together", 2 * signal, "end of score"))
    if several:
        entries += _combining(m, run, arrays if combines else 0)
    if m.teacher_samples:
        entries += sampling_entries(m, "teacher")
    return entries


def _combining(m: Setting, run: Pass, arrays: int) -> Iterator[Entry]:
    """What several teachers sent becomes one signal.

    Args:
        arrays: float32 arrays [tokens, V] that a mixture's log-probs need beside each teacher's
            logits; 0 where none are computed.
    """
    part, name = run.rows * m.new_tokens, "signals of the teachers"
    one = part * m.signal_bytes
    if arrays:
        width = ITEMSIZE[m.config.teacher.compute_dtype] * sum(m.teacher_widths)
        arrays += len(m.teacher_widths)
        logs = logits(m.chunk(run.rows), m.vocab, m.axes["teacher"].tensor, arrays)
        yield Entry("activations", name, part * width, "score")
        yield Entry("activations", name, 2 * part * width, "combine")
        yield Entry("activations", "logits", logs, "combine")
    else:
        yield Entry("activations", name, 2 * one, "combine")


def reference(m: Setting) -> Iterable[Entry]:
    """Log-probs of the completions under the policy before training."""
    section = m.config.reference
    model = m.reference
    run = m.scored("reference", model, section.num_microbatches)
    work = _scoring(m, "reference", run, m.chunk(run.rows), 2)
    weights = weight_bytes(model, m.axes["reference"], section.compute_dtype)
    if m.student.lora is not None:
        weights = m.base_bytes("reference")
    entries = (
        Entry("weights", "parameters", weights),
        Entry("activations", "forward pass", work, "score"),
    )
    return entries


def reward(m: Setting) -> Iterable[Entry]:
    """The reward model, if there is one; reward functions use no device."""
    c, model = m.config, m.inputs.reward
    longest = c.max_prompt_tokens + c.max_new_tokens + TEMPLATE_TOKENS
    longest = c.reward.max_tokens or longest
    if model is None:
        return ()
    return reward_account(model, m.axes["reward"], c.reward, longest, m.inputs.target).entries


def grouper(m: Setting) -> Iterable[Entry]:
    """The text encoder of similarity groups."""
    c, model, target = m.config, m.inputs.grouper, m.inputs.target
    if model is None:
        return ()
    return grouper_account(model, m.axes["grouper"], c.grouper, c.max_new_tokens, target).entries


def loss_arrays(m: Setting) -> int:
    """Float32 arrays [chunk, V] alive at once in the actor's loss."""
    d = m.config.distill
    if m.signal in (None, "sampled"):
        return TILE_ARRAYS + CAPPED_ARRAYS * (m.student.final_softcap is not None)
    if m.signal != "hidden":
        return SCORE_ARRAYS
    arrays = SCORE_ARRAYS + UNFUSED_ARRAYS * m.inputs.on_cpu
    arrays += ENTROPY_ARRAYS if d.entropy_aware else 0
    arrays += len(m.config.teachers)  # the logits of each beside those of all together
    if m.aligned:
        arrays += ALIGNED_ARRAYS + -(-2 * m.teacher_rows // m.vocab)
    # The exponentials of both models stay alive in pieces.
    return arrays + (d.lean and m.axes["actor"].tensor > 1)


ENTRIES: dict[str, Callable[[Setting], Iterable[Entry]]] = {
    "actor": actor,
    "rollout": rollout,
    "teacher": teacher,
    "reference": reference,
    "reward": reward,
    "grouper": grouper,
}
"""Role -> the function that yields its entries; entries of 0 bytes are dropped."""


def role_accounts(inputs: PlanInputs, config: Config) -> dict[str, Account]:
    """Memory of each role of the run. Each entry says when it is offloaded or freed (`away`)."""
    found = _alone(inputs, config)
    if inputs.on_cpu and any(config.roles[role].dtype == "bfloat16" for role in found):
        found = dict(_upcast(inputs, config, found))
    return {
        role: Account(
            role,
            tuple(
                replace(entry, away=_away(role, entry, {*pool.roles} - {role}, config))
                for entry in found[role].entries
            ),
        )
        for pool in inputs.placement.pools
        for role in pool.roles
        if role in found
    }


def _alone(inputs: PlanInputs, config: Config) -> dict[str, Account]:
    """Memory of each role without offloading, in the dtypes of the config."""
    setting = Setting(config, inputs, inputs.axes(config))
    known = (role for role in inputs.roles if role in ENTRIES)
    found = {role: tuple(e for e in ENTRIES[role](setting) if e.bytes) for role in known}
    return {role: Account(role, entries) for role, entries in found.items() if entries}


def _upcast(
    inputs: PlanInputs, config: Config, found: Mapping[str, Account]
) -> Iterator[tuple[str, Account]]:
    """The accounts on a CPU, where XLA computes bfloat16 in float32 from copies of the weights.
    Each phase is the larger of its sizes in both dtypes, plus these copies.
    """
    narrow = {role: s for role, s in config.roles.items() if s.dtype == "bfloat16"}
    wide = {role: s.model_copy(update={"dtype": "float32"}) for role, s in narrow.items()}
    computed = _alone(inputs, config.model_copy(update=wide))
    for role, stored in found.items():
        if role not in narrow:
            yield role, stored
            continue
        entries = [entry for entry in stored.entries if entry.phase is None]
        larger, copies = computed[role].phases(), _copies(inputs, role, config)
        for phase, size in stored.phases().items():
            chosen = computed[role] if larger.get(phase, 0) > size else stored
            entries += [entry for entry in chosen.entries if entry.phase == phase]
            copied = copies.get(phase.removesuffix(EVALUATIONS))
            if copied is not None:
                entries.append(Entry("activations", "weights in float32", copied, phase))
        yield role, Account(role, tuple(entries))


def _copies(inputs: PlanInputs, role: str, config: Config) -> dict[str, int]:
    """Phase -> bytes of the float32 copies of a role's weights."""
    model, axes = inputs.model(role), inputs.axes(config)[role]
    if not isinstance(model, DecoderConfig) or role not in ("rollout", "teacher", "reference"):
        return {}
    layers = layer_bytes(model, axes, "float32")
    head = whole_rows(model.vocab_size, model.d_model, axes, F32)
    return {"prefill": layers, "decode": layers + head, "score": layers}


def _away(role: str, entry: Entry, others: set[str], config: Config) -> frozenset[str]:
    """Moments (`ROLE: PHASE`, as in `memory.peak`) or whole roles during which an entry is not on
    the device. It predicts what `sharding.ledger` does in a worker.

    Args:
        others: the other roles of the pool.
    """
    if entry.phase is not None or entry.column not in ("weights", "optimizer"):
        return frozenset()
    offload = config.offload
    if entry.name == BASE and role in ("actor", "rollout"):
        return frozenset(
            (others | (PUBLISH if role == "actor" else set())) if offload.params else ()
        )
    if role == "rollout" or (role == "teacher" and config.teacher_follows):
        stale = UPDATE if "actor" in others else set()
        asked = offload.params if role == "rollout" else config.offloads_follower
        return frozenset(stale | (others - {"actor"} if asked else set()))
    asked, gone = offload.frozen, others
    if role == "actor":
        gone = others | PUBLISH
        if entry.column == "optimizer":
            asked = offload.optimizer
            gone -= {f"actor: {TO_TEACHER}"} if entry.name == AVERAGE else set()
        elif entry.name == SHARED:
            asked, gone = offload.params, others - {"rollout"}
        elif entry.name == "parameters":
            asked, gone = offload.params, others
    return frozenset(gone if asked else ())


def pool_peaks(inputs: PlanInputs, config: Config) -> tuple[PoolPeak, ...]:
    """The fullest device of each pool."""
    return inputs.pools(role_accounts(inputs, config))
