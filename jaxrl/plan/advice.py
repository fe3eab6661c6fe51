"""Chooses mesh axes and slots where the config is silent, and says what would help where a plan
does not fit, and what there is room for where it does: keys to change, each tried before it is
named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from jaxrl.config.roles import LongParallelConfig
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import shown
from jaxrl.errors import UserError, counted
from jaxrl.models.kernels import GPU
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.plan_context import Setting
from jaxrl.plan.plan_inputs import GB, PlanInputs
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
        helpful = _helpful(config, inputs, index)
        for (key, value), size in helpful[:LINES]:
            fits = ", which fits" if size <= peak.limit else ""
            lines.append(f"{peak.pool.name}: {key}={shown(value)} takes {size / 1e9:.1f} GB{fits}")
        if not any(size <= peak.limit for _, size in helpful):
            lines.append(_all_of_them(config, inputs, index, [change for change, _ in helpful]))
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
    if not inputs.on_cpu:  # the plan would choose so many for a larger batch too
        slots = config.rollout.slots or config.batch_size * config.group_size
        config = set_key(config, "rollout.slots", slots)
    found = []
    for key, limit in most.items():
        now: int = getattr(config, key)
        largest = _largest(config, inputs, key, now, limit)
        more = " or more" if largest == MOST else ""
        found.append(f"{key}={largest}{more} (now {now})")
    return f"largest that fits, one changed at a time: {', or '.join(found)}"


def faster(config: Config, inputs: PlanInputs) -> list[str]:
    """Returns the keys that make the run faster, each alone at the fastest of its values that fit,
    with what its pool takes then; empty where no limit is known or the run does not fit as it is.
    """
    if not any(inputs.limits) or not _fits(config, inputs):
        return []
    lines = []
    for role, key, values in _quickest_first(config, inputs):
        section, _, name = key.partition(".")
        now = getattr(getattr(config, section), name)
        for value in values:
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


def _quickest_first(
    config: Config, inputs: PlanInputs
) -> Iterator[tuple[str, str, Iterator[int | str | bool | None]]]:
    """Yields a role, a key, and the values of the key that are faster than its own, the fastest
    first."""
    setting = Setting(config, inputs, inputs.axes(config))
    if "rollout" in inputs.roles:
        slots = config.rollout.slots or setting.sequences
        more = (setting.sequences, *fractions(setting.sequences))
        yield "rollout", "rollout.slots", (n for n in more if n > slots)
        if config.trains_adapters and config.quantised is None and not config.rollout.merge:
            yield "rollout", "rollout.merge", iter([True])
    if "actor" in inputs.roles:
        remat = config.actor.remat
        yield "actor", "actor.remat", iter(REMATS[: REMATS.index(remat)])
        yield "actor", "actor.micro_batch_tokens", _larger_micro_batches(setting)
    if "teacher" in inputs.roles:
        yield "teacher", "teacher.num_microbatches", iter(range(1, config.teacher.num_microbatches))


def _larger_micro_batches(m: Setting) -> Iterator[int | None]:
    """Budgets that cut an update in fewer micro-batches; null for one."""
    count, _ = m.micro_batches()
    if count > 1:
        yield None
    for fewer in range(2, count):
        rows = -(-m.update_rows // fewer)
        rows = -(-rows // m.shared_group) * m.shared_group
        apart = rows // m.shared_group * (m.shared_group - 1) * m.prompt_tokens
        # A group has its prompt once, and devices of `context` share the tokens.
        yield -(-(rows * m.width - apart) // m.axes["actor"].context)


def _fits(config: Config, inputs: PlanInputs) -> bool:
    return all(pool.fits for pool in pool_peaks(inputs, config))


def _largest(config: Config, inputs: PlanInputs, key: str, low: int, most: int) -> int:
    """Finds the largest value of a key, from `low`, which fits, to `most`, that fits; exact up to
    5%."""

    def fits(n: int) -> bool:
        return _fits(set_key(config, key, n), inputs)

    high = low
    while high < most and fits(min(2 * high, most)):
        high = min(2 * high, most)
    low, high = high, min(2 * high, most)
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def relief(config: Config, inputs: PlanInputs, role: str) -> list[str]:
    """Returns the keys that make the pool of a role smaller, for one that ran out of memory all the
    same."""
    index = inputs.placement.roles[role].pool
    now = pool_peaks(inputs, config)[index].bytes
    limits = list(inputs.limits)
    limits[index] = now // 2
    tight = replace(inputs, limits=tuple(limits), hosts=())
    return [
        f"{key}={shown(value)} takes {size / 1e9:.2f} GB in place of {now / 1e9:.2f}"
        for (key, value), size in _helpful(config, tight, index)[:LINES]
    ]


def _helpful(config: Config, inputs: PlanInputs, index: int) -> list[tuple[Change, int]]:
    """Changes that save something, with the pool's peak after each; what fits comes first."""
    now = pool_peaks(inputs, config)[index]
    limit = now.limit
    assert limit is not None
    found = []
    for steps in _ladders(config, inputs, inputs.placement.pools[index]):
        tried = [(change, _peak(config, inputs, index, [change])) for change in steps]
        known = [(change, size) for change, size in tried if size is not None]
        if not known:
            continue
        enough = [item for item in known if item[1] <= limit]
        best = enough[0] if enough else min(known, key=lambda item: item[1])
        if best[1] < (1 - WORTH) * now.bytes:
            found.append(best)
    return sorted(found, key=lambda item: (item[1] > limit, item[1]))


def _all_of_them(config: Config, inputs: PlanInputs, index: int, changes: list[Change]) -> str:
    pool, limit = inputs.placement.pools[index], inputs.limits[index]
    size = _peak(config, inputs, index, changes) if changes else None
    n = len(pool.devices)
    more = f"give {pool.name} more than its {counted(n, 'device')} in the mesh"
    if size is None or limit is None:
        return f"{pool.name}: {more}"
    if size <= limit:
        return f"{pool.name}: all of them together take {size / 1e9:.1f} GB, which fits"
    return f"{pool.name}: even all of them together take {size / 1e9:.1f} GB: {more}"


def _peak(config: Config, inputs: PlanInputs, index: int, changes: list[Change]) -> int | None:
    """Returns the pool's peak under the changes; None where the mesh does not allow them."""
    try:
        for key, value in changes:
            config = set_key(config, key, value)
        return pool_peaks(inputs, config)[index].bytes
    except UserError:
        return None


def _ladders(config: Config, inputs: PlanInputs, pool: Pool) -> Iterator[list[Change]]:
    """Yields, for each key that may help the pool, values to try, the mildest first."""
    roles = [role for role in pool.roles if role in inputs.roles]
    if "actor" in roles:
        yield from _actor_ladders(config, inputs)
    if "rollout" in roles:
        slots = config.rollout.slots or config.batch_size * config.group_size
        longest = max(config.max_new_tokens, config.eval.max_new_tokens or 0)
        each = longest * (slots // inputs.axes(config)["rollout"].rows)
        if config.rollout.cache_tokens is None:
            pools = (each // n for n in (2, 4))
            yield [("rollout.cache_tokens", tokens) for tokens in pools if tokens >= longest]
        yield [("rollout.slots", slots // n) for n in (2, 4, 8, 16) if slots >= n]
    if "teacher" in roles:
        n = config.teacher.num_microbatches
        yield [("teacher.num_microbatches", n * k) for k in (2, 4, 8, 16)]
    if len(roles) > 1:
        asked = config.offload.model_dump()
        yield from ([(f"offload.{key}", True)] for key, on in asked.items() if not on)
    for role in roles:
        now, given = inputs.axes(config)[role], config.roles[role].parallel
        whole_vocabulary = config.teacher.tokenizer == "own" and role in ("actor", "teacher")
        if given.tensor is None and not whole_vocabulary:
            sizes = [t for t in (2, 4, 8) if t > now.tensor and now.size % t == 0]
            yield [(f"{role}.parallel.tensor", t) for t in sizes]
        if isinstance(given, LongParallelConfig) and given.context is None:
            sizes = [c for c in (2, 4, 8) if now.size % (now.tensor * c) == 0]
            yield [(f"{role}.parallel.context", c) for c in sizes if _is_long(config, inputs, role)]
        if role != "actor" and not inputs.on_cpu:
            yield [(f"{role}.dtype", "bfloat16")]


def _is_long(config: Config, inputs: PlanInputs, role: str) -> bool:
    """Returns whether one sequence is all that a device computes at once: fewer of them cannot
    help."""
    setting = Setting(config, inputs, inputs.axes(config))
    if role == "actor":
        return setting.micro_batches()[1] == 1
    section = config.teacher if role == "teacher" else config.reference
    parts = section.num_microbatches
    return -(-setting.rows(role, setting.sequences) // parts) == 1


def _actor_ladders(config: Config, inputs: PlanInputs) -> Iterator[list[Change]]:
    setting = Setting(config, inputs, inputs.axes(config))
    width, (_, rows) = -(-setting.width // setting.axes["actor"].context), setting.micro_batches()
    fewer = sorted({max(1, rows // n) for n in (2, 4, 8, 16, 32)} - {rows}, reverse=True)
    yield [("actor.micro_batch_tokens", width * n) for n in fewer]
    yield [("actor.remat", "full")]
    yield (
        [("distill.chunk_tokens", SMALL_CHUNK)] if config.distill.loss_chunk > SMALL_CHUNK else []
    )
    yield [("distill.lean", True)]
    kept = average_dtype(config.optimizer, "bfloat16")
    if kept != "float32" and config.optimizer.name != "adafactor":  # else nothing is smaller
        yield [("actor.moment_dtype", "bfloat16")]
    yield [("actor.param_dtype", "bfloat16")]
    if not inputs.on_cpu:
        yield [("actor.dtype", "bfloat16")]


def fractions(sequences: int) -> list[int]:
    """Returns the numbers of slots below `sequences`, the most first: by eighths, and below one by
    halves."""
    eighths = {sequences * part // 8 for part in range(1, 8)}
    halves = {sequences >> n for n in range(4, sequences.bit_length())}
    return sorted((eighths | halves) - {0}, reverse=True)


def set_key(config: Config, key: str, value: object) -> Config:
    """Returns the `config` with one dotted key changed."""
    *sections, name = key.split(".")
    owners: list[BaseModel] = [config]
    for section in sections:
        owners.append(getattr(owners[-1], section))
    for owner, field in zip(reversed(owners), (name, *reversed(sections)), strict=True):
        value = owner.model_copy(update={field: value})
    assert isinstance(value, Config)
    return value


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
    for role in ("rollout", *FROZEN):
        given = config.roles[role].parallel.model_dump(exclude_none=True)
        if role in inputs.roles and inputs.placement.roles[role].devices and not given:
            config = _with_own_axes(config, inputs, role, notes)
    config = _with_copy_in_each_host(config, inputs, notes)
    if "rollout" in inputs.roles and config.rollout.slots is None:
        config = _with_slots(config, inputs, notes)
    return config, tuple(notes)


def with_loss_chunk(config: Config, inputs: PlanInputs) -> Config:
    """Sets `distill.chunk_tokens`, where it is null, to the first of `GPU_CHUNKS` that is known to
    fit. Last of all choices: whether a run fits is decided with the smallest chunk."""
    null = config.distill.chunk_tokens is None
    if not null or inputs.target.platform not in GPU or not all(inputs.limits):
        return config
    choices = (set_key(config, "distill.chunk_tokens", chunk) for chunk in GPU_CHUNKS)
    return next((choice for choice in choices if _fits(choice, inputs)), config)


def _with_copy_in_each_host(config: Config, inputs: PlanInputs, notes: list[str]) -> Config:
    """Divides the actor's weights among the GPUs of each host, and copies them across hosts, where
    that fits (hybrid sharding): gradients travel between hosts then, and no weights. On one host,
    and on TPUs, whose links are as fast between hosts, `fsdp` divides them among all devices."""
    axes = inputs.axes(config).get("actor")
    given = config.actor.parallel.model_dump(exclude_none=True)
    hosts = inputs.spanned("actor") if axes is not None else 1
    if axes is None or given or hosts in (1, axes.size) or inputs.target.platform not in GPU:
        return config
    pool = inputs.placement.roles["actor"].pool
    if inputs.limits[pool] is None:  # whether a copy fits is not known
        return config
    choice = set_key(config, "actor.parallel.data", hosts)
    choice = set_key(choice, "actor.parallel.fsdp", axes.size // hosts)
    peak = pool_peaks(inputs, choice)[pool]
    takes = f"its pool takes {peak.bytes / GB:.1f} GB"
    if not peak.fits:
        notes.append(
            f"actor.parallel.fsdp={axes.fsdp} divides the weights among all hosts: with a copy in"
            f" each host {takes}"
        )
        return config
    notes.append(
        f"actor.parallel.data={hosts} fsdp={axes.size // hosts}: each host has a copy of the"
        f" weights, so that only gradients travel between hosts; {takes}"
    )
    return choice


def _with_own_axes(config: Config, inputs: PlanInputs, role: str, notes: list[str]) -> Config:
    pool = inputs.placement.roles[role].pool
    limit, before = inputs.limits[pool], inputs.axes(config)[role]
    if limit is None or before.size == 1:
        return config
    n, heads, tried = before.size, inputs.model(role).n_heads, []
    whole_vocabulary = config.teacher.tokenizer == "own" and role == "teacher"
    # Whole copies first, then ever smaller pieces.
    for tensor in range(1, 2 if whole_vocabulary else n + 1):
        if n % tensor == 0 and heads % tensor == 0:
            choice = set_key(config, f"{role}.parallel.data", n // tensor)
            choice = set_key(choice, f"{role}.parallel.tensor", tensor)
            size = pool_peaks(inputs, choice)[pool].bytes
            tried.append((size, Axes(n // tensor, 1, tensor), choice))
    whole = tried[0][0]
    fitting = [item for item in tried if item[0] <= limit]
    if not fitting and role in FROZEN:  # as it is, and the advice names what would help
        return config
    size, axes, choice = fitting[0] if fitting else min(tried, key=lambda item: item[0])
    if axes.tensor > 1:
        notes.append(
            f"{role}.parallel.tensor={axes.tensor}: with a copy of the weights on each device"
            f" its pool would take {whole / GB:.1f} GB"
        )
    elif axes != before:
        notes.append(
            f"{role}.parallel.data={axes.data}: a copy of the weights fits on each device, so that"
            f" it runs without collectives; its pool takes {size / GB:.1f} GB"
        )
    return choice if axes != before else config


def _with_slots(config: Config, inputs: PlanInputs, notes: list[str]) -> Config:
    pool = inputs.placement.roles["rollout"].pool
    whole = pool_peaks(inputs, config)[pool]
    if whole.fits:
        return config
    sequences = config.batch_size * config.group_size
    for slots in fractions(sequences):
        choice = set_key(config, "rollout.slots", slots)
        if pool_peaks(inputs, choice)[pool].fits:
            notes.append(
                f"rollout.slots={slots}: with all {sequences} sequences of a batch at once"
                f" {whole.pool.name} would take {whole.bytes / GB:.1f} GB; a slot whose sequence"
                " has ended takes the next one"
            )
            return choice
    return config
