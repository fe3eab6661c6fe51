"""Chooses mesh axes and keys where the config is silent, and says what would help where a plan does
not fit, and what there is room for where it does; each change is tried before it is named."""

from __future__ import annotations

from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.section import show_value
from jaxrl.errors import counted
from jaxrl.models.kernels import GPU
from jaxrl.plan.plan_inputs import GB, PlanInputs
from jaxrl.plan.search import Candidate, first_fitting, get_key, set_key

FROZEN = ("teacher", "reference", "reward", "grouper")
"""Roles that only run forward, beside the rollout."""
LINES = 4
"""Keys named for each pool."""
MOST = 1 << 16
"""Where the search for the largest batch ends."""


def advise(config: Config, inputs: PlanInputs) -> list[str]:
    """Returns the lines for each pool that does not fit: keys, and the peak that each leads to."""
    lines, now = [], Candidate(config, inputs)
    for index, peak in enumerate(now.pools):
        if peak.limit is None or peak.fits:
            continue
        name, helpful = peak.pool.name, now.smaller(index, peak.limit)
        for candidate in helpful[:LINES]:
            fits = ", which fits" if candidate.pool(index).bytes <= peak.limit else ""
            size = candidate.pool(index).bytes / GB
            lines.append(f"{name}: {candidate.words[0]} takes {size:.1f} GB{fits}")
        if any(candidate.pool(index).bytes <= peak.limit for candidate in helpful):
            continue
        more = f"give {name} more than its {counted(len(peak.pool.devices), 'device')} in the mesh"
        everything = now
        for candidate in helpful:
            everything = everything.change(*candidate.changes[0])
        together = everything.size(index)
        if not helpful or not everything.possible or inputs.limits[index] is None:
            lines.append(f"{name}: {more}")
        elif together <= peak.limit:
            lines.append(f"{name}: all of them together take {together / GB:.1f} GB, which fits")
        else:
            takes = f"even all of them together take {together / GB:.1f} GB"
            lines.append(f"{name}: {takes}: {more}")
    return lines


def largest_batch(config: Config, inputs: PlanInputs) -> str | None:
    """Returns the largest sizes of a batch that fit on accelerators, one size changed at a time;
    None where no limit is known or the run does not fit as it is."""
    now = Candidate(config, inputs)
    if not any(inputs.limits) or not now.fits:
        return None
    # The plan would choose the same for a larger batch too.
    for remedy in [x for role in inputs.roles for x in now.remedies(role) if x.choices]:
        if get_key(config, remedy.key) is None:
            now = now.change(remedy.key, remedy.null)
    found = []
    for key, limit in now.setting.batch_limits(MOST).items():
        value, largest = get_key(config, key), now.largest(key, limit)
        more = " or more" if largest == MOST else ""
        found.append(f"{key}={largest}{more} (now {value})")
    return f"largest that fits, one changed at a time: {', or '.join(found)}"


def faster_keys(config: Config, inputs: PlanInputs) -> list[str]:
    """Returns the keys that make the run faster, each alone at the fastest of its values that fit,
    with what its pool takes then; empty where no limit is known or the run does not fit as it is.

    Args:
        config: with the keys that the plan sets.
    """
    now, lines = Candidate(config, inputs), list[str]()
    if not any(inputs.limits) or not now.fits:
        return []
    for role in inputs.roles:
        for remedy in now.remedies(role):
            tried = [now.change(remedy.key, value) for value in remedy.faster]
            if (best := first_fitting(tried, lambda each: each.fits)) is None:
                continue
            mine = best.pool(inputs.placement.roles[role].pool)
            limit = "" if mine.limit is None else f" of {mine.limit / GB:.1f}"
            value = get_key(config, remedy.key)
            lines.append(
                f"faster: {best.words[0]} (now {show_value(value)}) fits:"
                f" {mine.pool.name} then takes {mine.bytes / GB:.1f}{limit} GB"
            )
    return lines


def relief(config: Config, inputs: PlanInputs, role: str) -> list[str]:
    """Returns the keys that make the pool of a role smaller, for one that ran out of memory all the
    same."""
    index, plan = inputs.placement.roles[role].pool, Candidate(config, inputs)
    now = plan.pool(index).bytes
    return [
        f"{each.words[0]} takes {each.pool(index).bytes / GB:.2f} GB in place of {now / GB:.2f}"
        for each in plan.smaller(index, now // 2)[:LINES]
    ]


# A whole copy of the weights on each device needs no collective, so it comes first: for the
# rollout, and for the frozen roles, whose `fsdp` or `tensor` would gather or sum in every layer.
# Where a copy does not fit with its work, `tensor` splits it over the fewest devices that do. One
# slot for each sequence of a batch reads the weights least often; where so many caches do not fit,
# there are as many slots as do, and each takes the next sequence when its own has ended.


def with_choices(config: Config, inputs: PlanInputs) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with the axes of these roles, one role after the other, then with the
    keys of the rollout that are left to the plan, and what to say of it. A role keeps the axes that
    it is given, and its usual ones where its device's limit is unknown; a key stays null where no
    value of it alone makes the rollout fit."""
    notes: list[str] = []
    where, silent = inputs.placement.roles, [r for r in inputs.roles if not _given(config, r)]
    for role in (r for r in ("rollout", *FROZEN) if r in silent):
        pool, before = where[role].pool, inputs.axes(config)[role]
        limit = inputs.limits[pool]
        if limit is None or before.size == 1:
            continue
        # Whole copies first, then ever smaller pieces.
        tried = []
        for axes in inputs.possible_axes(config, role):
            if axes.fsdp == axes.context == 1:
                choice = with_axes(config, role, data=axes.data, tensor=axes.tensor)
                tried.append((Candidate(choice, inputs).pool(pool).bytes, axes, choice))
                if tried[-1][0] <= limit:
                    break
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
    chooses = "actor" in silent and inputs.target.platform in GPU
    hosts, n = (inputs.spanned("actor"), len(where["actor"].devices)) if chooses else (1, 1)
    if 1 < hosts != n and inputs.limits[where["actor"].pool] is not None:
        choice = with_axes(config, "actor", data=hosts, fsdp=n // hosts)
        peak = Candidate(choice, inputs).pool(where["actor"].pool)
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
    config, more = _with_keys(config, inputs, "rollout")
    return config, (*notes, *more)


def with_loss_chunk(config: Config, inputs: PlanInputs) -> tuple[Config, list[str]]:
    """Sets the keys of the actor that are left to the plan, where the run fits, and says why. Last
    of all choices: whether it fits is decided with the smallest chunk."""
    fits = all(inputs.limits) and Candidate(config, inputs).fits
    return _with_keys(config, inputs, "actor") if fits else (config, [])


def _with_keys(config: Config, inputs: PlanInputs, role: str) -> tuple[Config, list[str]]:
    """Sets the keys of a role that are left to the plan, each to the first choice with which its
    pool fits, and says why."""
    where, notes = inputs.placement.roles[role], list[str]()
    if role not in inputs.roles or inputs.limits[where.pool] is None:
        return config, notes
    now = Candidate(config, inputs)
    for remedy in now.remedies(role):
        if not remedy.choices or get_key(config, remedy.key) is not None:
            continue
        tried = [now.change(remedy.key, value) for value in remedy.choices]
        best = first_fitting(tried, lambda each: each.left([where.pool]) >= 0) or now
        if get_key(best.config, remedy.key) is not None:
            first = tried[0].pool(where.pool)
            why = remedy.note.format(pool=first.pool.name, size=first.bytes / GB)
            notes.append(f"{best.words[-1]}: {why}")
            now = best
    return now.config, notes


def chosen_keys(config: Config, inputs: PlanInputs) -> dict[str, Any]:
    """Maps the keys that the plan sets where they are null to their values."""
    now = Candidate(config, inputs)
    declared = (remedy for role in inputs.roles for remedy in now.remedies(role))
    return {x.key: get_key(config, x.key) for x in declared if x.choices}


def with_axes(config: Config, role: str, **sizes: int | None) -> Config:
    """Sets the mesh axes of a role: these sizes, null for the others."""
    return set_key(config, f"{role}.parallel", type(config.roles[role].parallel)(**sizes))


def _given(config: Config, role: str) -> bool:
    """Returns whether the config sets axes of a role."""
    return bool(config.roles[role].parallel.model_dump(exclude_none=True))
