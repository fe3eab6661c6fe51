"""What the plan chooses where the config is silent: mesh axes of roles that only run forward, and
the slots of the rollout.

A whole copy of the weights on each device needs no collective, so it comes first: for the rollout,
and for the frozen roles, whose `fsdp` or `tensor` would gather or sum in every layer. Where a copy
does not fit with its work, `tensor` splits it over the fewest devices that do. One slot for each
sequence of a batch reads the weights least often; where so many caches do not fit, there are as
many slots as do, and each takes the next sequence when its own has ended.
"""

from __future__ import annotations

from jaxrl.config.schema import Config
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.advice import fractions, set_key
from jaxrl.plan.plan_inputs import GB, PlanInputs
from jaxrl.sharding.axes import Axes

FROZEN = ("teacher", "reference", "reward", "grouper")


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
    if "rollout" in inputs.roles and config.rollout.slots is None:
        config = _with_slots(config, inputs, notes)
    return config, tuple(notes)


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
