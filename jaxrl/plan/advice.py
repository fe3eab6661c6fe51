"""Chooses mesh axes and slots where the config is silent, and says what would help where a plan
does not fit, and what there is room for where it does: keys to change, each tried before it is
named."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl.config.roles import LongParallelConfig
from jaxrl.config.schema import Config
from jaxrl.config.section import shown
from jaxrl.errors import UserError, counted
from jaxrl.models.kernels import GPU
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.plan_inputs import GB, PlanInputs, Setting
from jaxrl.roles.optimizer import average_dtype
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.placement import Pool

FROZEN = ("teacher", "reference", "reward", "grouper")
"""Roles that only run forward, beside the rollout."""
LINES = 4
"""Keys named for each pool."""
WORTH = 0.02
"""A key is named where it saves at least this fraction of the peak."""
REMATS = ("none", "dots", "full")
"""The fastest first."""
MOST = 1 << 16
"""Where the search for the largest batch ends."""
SMALL_CHUNK = 128
"""Tokens; with fewer, the loss's matrix products get slow."""
GPU_CHUNKS = (2048, 1024)
"""Tokens: for each chunk the LM head is read again, which takes a GPU as long as the products of a
few hundred tokens."""

Change = tuple[str, Any]
"""A dotted key and its new value."""


def advise(config: Config, inputs: PlanInputs) -> list[str]:
    """Returns the lines for each pool that does not fit: keys, and the peak that each leads to."""
    lines = []
    for index, peak in enumerate(pool_peaks(inputs, config)):
        if peak.limit is None or peak.fits:
            continue
        name, helpful = peak.pool.name, _helpful(config, inputs, index, peak.bytes, peak.limit)
        for (key, value), size in helpful[:LINES]:
            fits = ", which fits" if size <= peak.limit else ""
            lines.append(f"{name}: {key}={shown(value)} takes {size / 1e9:.1f} GB{fits}")
        if any(size <= peak.limit for _, size in helpful):
            continue
        more = f"give {name} more than its {counted(len(peak.pool.devices), 'device')} in the mesh"
        together = _peak(config, inputs, index, [change for change, _ in helpful])
        if not helpful or together is None or inputs.limits[index] is None:
            lines.append(f"{name}: {more}")
        elif together <= peak.limit:
            lines.append(f"{name}: all of them together take {together / 1e9:.1f} GB, which fits")
        else:
            takes = f"even all of them together take {together / 1e9:.1f} GB"
            lines.append(f"{name}: {takes}: {more}")
    return lines


def room(config: Config, inputs: PlanInputs) -> str | None:
    """Returns the largest sizes of a batch that fit, one size changed at a time; None where no
    limit is known or the run does not fit as it is."""
    known = inputs.hosts or any(limit is not None for limit in inputs.limits)
    if not known or not _fits(config, inputs):
        return None
    positions = inputs.student.max_positions - config.max_prompt_tokens
    longest = min(MOST, positions, config.rollout.cache_tokens or MOST)
    most = {"batch_size": MOST, "group_size": MOST, "max_new_tokens": longest}
    if config.only_data:
        del most["group_size"]
    if not inputs.on_cpu:  # the plan would choose so many for a larger batch too
        config = set_key(config, "rollout.slots", config.slots)
    found = []
    for key, limit in most.items():
        largest = now = getattr(config, key)  # doubled, then by bisection exact up to 5%
        high = min(2 * now, limit)
        while largest < limit and _fits(set_key(config, key, high), inputs):
            largest, high = high, min(2 * high, limit)
        while high - largest > max(1, largest // 20):
            middle = (largest + high) // 2
            fits = _fits(set_key(config, key, middle), inputs)
            largest, high = (middle, high) if fits else (largest, middle)
        more = " or more" if largest == MOST else ""
        found.append(f"{key}={largest}{more} (now {now})")
    return f"largest that fits, one changed at a time: {', or '.join(found)}"


def faster(config: Config, inputs: PlanInputs) -> list[str]:
    """Returns the keys that make the run faster, each alone at the fastest of its values that fit,
    with what its pool takes then; empty where no limit is known or the run does not fit as it is.
    """
    if not any(inputs.limits) or not _fits(config, inputs):
        return []
    m = Setting(config, inputs)
    slots, count = config.slots, m.micro_batches()[0]
    budgets: list[int | None] = [None] * (count > 1)  # that cut an update in fewer; null in one
    for fewer in range(2, count):
        groups = -(-m.update_rows // (fewer * m.shared_group))
        tokens = groups * (m.prompt_tokens + m.shared_group * m.new_tokens)  # its prompt once
        budgets.append(-(-tokens // m.axes["actor"].context))
    merges = config.trains_adapters and config.quantised is None and not config.rollout.merge
    whole = config.batch_size * config.group_size
    every = (whole, *fractions(whole))
    # Keys of roles, and their values that are faster than the present one, the fastest first.
    keys: dict[str, Sequence[int | str | bool | None]] = {
        "rollout.slots": [n for n in every if n > slots],
        "rollout.merge": [True] * merges,
        "actor.remat": REMATS[: REMATS.index(config.actor.remat)],
        "actor.micro_batch_tokens": budgets,
        "teacher.num_microbatches": range(1, config.teacher.num_microbatches),
    }
    lines = []
    for key, values in keys.items():
        role, _, name = key.partition(".")
        now = getattr(getattr(config, role), name)
        for value in values if role in inputs.roles else ():
            choice = with_loss_chunk(set_key(config, key, value), inputs)
            pools = pool_peaks(inputs, choice)
            if all(pool.fits for pool in pools):
                mine = pools[inputs.placement.roles[role].pool]
                limit = "" if mine.limit is None else f" of {mine.limit / 1e9:.1f}"
                lines.append(
                    f"faster: {key}={shown(value)} (now {shown(now)}) fits:"
                    f" {mine.pool.name} then takes {mine.bytes / 1e9:.1f}{limit} GB"
                )
                break
    return lines


def _fits(config: Config, inputs: PlanInputs) -> bool:
    return all(pool.fits for pool in pool_peaks(inputs, config))


def relief(config: Config, inputs: PlanInputs, role: str) -> list[str]:
    """Returns the keys that make the pool of a role smaller, for one that ran out of memory all the
    same."""
    index = inputs.placement.roles[role].pool
    now = pool_peaks(inputs, config)[index].bytes
    return [
        f"{key}={shown(value)} takes {size / 1e9:.2f} GB in place of {now / 1e9:.2f}"
        for (key, value), size in _helpful(config, inputs, index, now, now // 2)[:LINES]
    ]


def _helpful(
    config: Config, inputs: PlanInputs, index: int, now: int, limit: int
) -> list[tuple[Change, int]]:
    """Returns changes that save something, with the pool's peak after each; what fits comes first.

    Args:
        now, limit: bytes that the pool takes, and that it is to take at most.
    """
    found = []
    for key, values in _ladders(config, inputs, inputs.placement.pools[index]):
        tried = [((key, value), _peak(config, inputs, index, [(key, value)])) for value in values]
        known = [(change, size) for change, size in tried if size is not None]
        # The first that fits, or else the smallest.
        smallest = min((size for _, size in known), default=0)
        best = next((x for x in known if x[1] <= max(limit, smallest)), None)
        if best is not None and best[1] < (1 - WORTH) * now:
            found.append(best)
    return sorted(found, key=lambda item: (item[1] > limit, item[1]))


def _peak(config: Config, inputs: PlanInputs, index: int, changes: list[Change]) -> int | None:
    """Returns the pool's peak under the changes; None where the mesh does not allow them."""
    try:
        for key, value in changes:
            config = set_key(config, key, value)
        return pool_peaks(inputs, config)[index].bytes
    except UserError:
        return None


def _ladders(config: Config, inputs: PlanInputs, pool: Pool) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields keys that may help the pool, each with values to try, the mildest first."""
    m = Setting(config, inputs)
    roles = [role for role in pool.roles if role in inputs.roles]
    if "actor" in roles:
        width, (_, rows) = -(-m.width // m.axes["actor"].context), m.micro_batches()
        fewer = sorted({max(1, rows // n) for n in (2, 4, 8, 16, 32)} - {rows}, reverse=True)
        yield "actor.micro_batch_tokens", [width * n for n in fewer]
        yield "actor.remat", ["full"]
        yield "distill.chunk_tokens", [SMALL_CHUNK] * (config.distill.loss_chunk > SMALL_CHUNK)
        yield "distill.lean", [True]
        kept = average_dtype(config.optimizer, "bfloat16")
        if kept != "float32" and config.optimizer.name != "adafactor":  # else nothing is smaller
            yield "actor.moment_dtype", ["bfloat16"]
        yield "actor.param_dtype", ["bfloat16"]
        yield "actor.dtype", ["bfloat16"] * (not inputs.on_cpu)
    if "rollout" in roles:
        slots = config.slots
        longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
        each = longest * (slots // m.axes["rollout"].rows)
        if config.rollout.cache_tokens is None:
            yield "rollout.cache_tokens", [each // n for n in (2, 4) if each // n >= longest]
        yield "rollout.slots", [slots // n for n in (2, 4, 8, 16) if slots >= n]
    if "teacher" in roles:
        parts = config.teacher.num_microbatches
        yield "teacher.num_microbatches", [parts * n for n in (2, 4, 8, 16)]
    for key, on in config.offload.model_dump().items():
        yield f"offload.{key}", [True] * (len(roles) > 1 and not on)
    for role in roles:
        now, given = m.axes[role], config.roles[role].parallel
        whole_vocabulary = config.teacher.tokenizer == "own" and role in ("actor", "teacher")
        if given.tensor is None and not whole_vocabulary:
            sizes = [t for t in (2, 4, 8) if t > now.tensor and now.size % t == 0]
            yield f"{role}.parallel.tensor", sizes
        if isinstance(given, LongParallelConfig) and given.context is None:
            # Where one sequence is all that a device computes at once: fewer cannot help.
            at_once = m.micro_batches()[1]
            if role != "actor":
                section = config.teacher if role == "teacher" else config.reference
                at_once = -(-m.rows(role, m.sequences) // section.num_microbatches)
            sizes = [c for c in (2, 4, 8) if now.size % (now.tensor * c) == 0 and at_once == 1]
            yield f"{role}.parallel.context", sizes
        if role != "actor":
            yield f"{role}.dtype", ["bfloat16"] * (not inputs.on_cpu)


def fractions(sequences: int) -> list[int]:
    """Returns the numbers of slots below `sequences`, the most first: by eighths, and below one by
    halves."""
    eighths = {sequences * part // 8 for part in range(1, 8)}
    halves = {sequences >> n for n in range(4, sequences.bit_length())}
    return sorted((eighths | halves) - {0}, reverse=True)


def set_key(config: Config, key: str, value: object) -> Config:
    """Returns the `config` with one dotted key changed."""
    section, _, name = key.rpartition(".")
    if section:
        owner = functools.reduce(getattr, section.split("."), config)
        return set_key(config, section, owner.model_copy(update={name: value}))
    return config.model_copy(update={name: value})


# A whole copy of the weights on each device needs no collective, so it comes first: for the
# rollout, and for the frozen roles, whose `fsdp` or `tensor` would gather or sum in every layer.
# Where a copy does not fit with its work, `tensor` splits it over the fewest devices that do. One
# slot for each sequence of a batch reads the weights least often; where so many caches do not fit,
# there are as many slots as do, and each takes the next sequence when its own has ended.


def with_choices(config: Config, inputs: PlanInputs) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with the axes of these roles, one role after the other, then with the
    rollout's slots, and what to say of it. A role keeps the axes that it is given, and its usual
    ones where its device's limit is unknown; `rollout.slots` stays null where all sequences fit, or
    where fewer slots alone do not make the rollout fit."""
    notes: list[str] = []
    where = inputs.placement.roles
    for role in (r for r in ("rollout", *FROZEN) if r in inputs.roles and not _given(config, r)):
        pool, before = where[role].pool, inputs.axes(config)[role]
        limit, n = inputs.limits[pool], before.size
        if limit is None or n == 1:
            continue
        heads, tried = inputs.model(role).n_heads, []
        whole_vocabulary = config.teacher.tokenizer == "own" and role == "teacher"
        # Whole copies first, then ever smaller pieces.
        for tensor in range(1, 2 if whole_vocabulary else n + 1):
            if n % tensor == 0 and heads % tensor == 0:
                axes = Axes(n // tensor, 1, tensor)
                choice = with_axes(config, role, data=axes.data, tensor=tensor)
                tried.append((pool_peaks(inputs, choice)[pool].bytes, axes, choice))
        fitting = [item for item in tried if item[0] <= limit]
        if not fitting and role in FROZEN:  # as it is, and the advice names what would help
            continue
        size, axes, choice = fitting[0] if fitting else min(tried, key=lambda item: item[0])
        if axes.tensor > 1:
            notes.append(
                f"{role}.parallel.tensor={axes.tensor}: with a copy of the weights on each device"
                f" its pool would take {tried[0][0] / GB:.1f} GB"
            )
        elif axes != before:
            notes.append(
                f"{role}.parallel.data={axes.data}: a copy of the weights fits on each device, so"
                f" that it runs without collectives; its pool takes {size / GB:.1f} GB"
            )
        config = choice if axes != before else config

    # The actor's weights are divided among the GPUs of each host, and copied across hosts, where
    # that fits (hybrid sharding): gradients travel between hosts then, and no weights. On one host,
    # and on TPUs, whose links are as fast between hosts, `fsdp` divides them among all devices; so
    # it does where it is not known whether a copy fits.
    chooses = "actor" in inputs.roles and inputs.target.platform in GPU
    hosts = inputs.spanned("actor") if chooses and not _given(config, "actor") else 1
    n = len(where["actor"].devices) if chooses else 1
    if 1 < hosts != n and inputs.limits[where["actor"].pool] is not None:
        choice = with_axes(config, "actor", data=hosts, fsdp=n // hosts)
        peak = pool_peaks(inputs, choice)[where["actor"].pool]
        takes = f"its pool takes {peak.bytes / GB:.1f} GB"
        if peak.fits:
            config = choice
            notes.append(
                f"actor.parallel.data={hosts} fsdp={n // hosts}: each host has a copy of the"
                f" weights, so that only gradients travel between hosts; {takes}"
            )
        else:
            notes.append(
                f"actor.parallel.fsdp={n} divides the weights among all hosts: with a copy in each"
                f" host {takes}"
            )

    if "rollout" not in inputs.roles or config.rollout.slots is not None:
        return config, tuple(notes)
    pool, sequences = where["rollout"].pool, config.slots
    whole = pool_peaks(inputs, config)[pool]
    for slots in () if whole.fits else fractions(sequences):
        choice = set_key(config, "rollout.slots", slots)
        if pool_peaks(inputs, choice)[pool].fits:
            notes.append(
                f"rollout.slots={slots}: with all {sequences} sequences of a batch at once"
                f" {whole.pool.name} would take {whole.bytes / GB:.1f} GB; a slot whose sequence"
                " has ended takes the next one"
            )
            return choice, tuple(notes)
    return config, tuple(notes)


def with_axes(config: Config, role: str, **sizes: int | None) -> Config:
    """Sets the mesh axes of a role: these sizes, null for the others."""
    return set_key(config, f"{role}.parallel", type(config.roles[role].parallel)(**sizes))


def _given(config: Config, role: str) -> bool:
    """Returns whether the config sets axes of a role."""
    return bool(config.roles[role].parallel.model_dump(exclude_none=True))


def with_loss_chunk(config: Config, inputs: PlanInputs) -> Config:
    """Sets `distill.chunk_tokens`, where it is null, to the first of `GPU_CHUNKS` that is known to
    fit. Last of all choices: whether a run fits is decided with the smallest chunk."""
    null = config.distill.chunk_tokens is None
    if not null or inputs.target.platform not in GPU or not all(inputs.limits):
        return config
    choices = (set_key(config, "distill.chunk_tokens", chunk) for chunk in GPU_CHUNKS)
    return next((choice for choice in choices if _fits(choice, inputs)), config)
