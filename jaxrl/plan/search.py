"""Runs that differ from the configured one in keys or mesh, and one judge of all of them: does it
fit, and what does a step take, by seconds that were measured or predicted. The plan's choices and
advice, `--suggest` and the advice at the end of a run choose among them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any

from jaxrl.algorithms.schedule import Schedule
from jaxrl.config.schema import Config
from jaxrl.config.section import show_value
from jaxrl.errors import UserError
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.plan_inputs import PlanInputs, PoolPeak, Setting
from jaxrl.roles.actor import actor_remedies
from jaxrl.roles.declared import Remedy
from jaxrl.roles.rollout import rollout_remedies
from jaxrl.roles.run_shapes import RunShapes, common_remedies
from jaxrl.sharding.placement import Placement, place, place_without_devices

Change = tuple[str, Any]
"""A dotted key and its new value."""
Stage = tuple[str, str]
"""Role and method."""
REMEDIES: dict[str, Callable[[RunShapes], Iterator[Remedy]]] = {
    "actor": actor_remedies,
    "rollout": rollout_remedies,
}
"""Role -> the function of its module that yields its remedies; others have the common ones."""
WORTH = 0.02
"""A key is named where it saves at least this fraction of the peak."""
SPLITS = 600
"""Splits that are tried; where there are more, devices are moved by twos, or threes, ..."""
REPLAYED = 12
"""Steps of a replay; the last half of them are measured: whole periods of up to three batches."""


@dataclass(frozen=True)
class Candidate:
    """A run with some keys changed, judged when it is asked."""

    config: Config
    inputs: PlanInputs
    changes: tuple[Change, ...] = ()
    """What differs from the run as configured."""
    completed: Callable[[Config, PlanInputs], Config] = lambda config, inputs: config
    """Adds what the plan would choose where the config is silent."""
    seconds: Callable[[Setting], Mapping[Stage, float]] | None = None
    """Maps a setting to the seconds a step of each stage, measured or predicted."""

    def change(self, key: str, value: Any) -> Candidate:
        """Returns the run with one key changed too."""
        changes = (*self.changes, (key, value))
        return replace(self, config=set_key(self.config, key, value), changes=changes)

    def move(self, mesh: str) -> Candidate:
        """Returns the run on another mesh.

        Raises:
            UserError: a mesh that cannot be.
        """
        there, where = self.change("mesh", mesh), self.inputs.placement.roles
        slices = {role: section.devices for role, section in self.config.roles.items()}
        placement = place(mesh, [role for role in where if where[role].devices], slices)
        for role in (role for role in where if not where[role].devices):
            placement = place_without_devices(placement, role)
        return replace(there, inputs=replace(self.inputs, placement=placement))

    @cached_property
    def setting(self) -> Setting:
        """Raises UserError: axes that do not divide a role's devices or its model's heads."""
        return Setting(self.completed(self.config, self.inputs), self.inputs)

    @cached_property
    def pools(self) -> tuple[PoolPeak, ...]:
        return pool_peaks(self.inputs, self.setting.config)

    @property
    def fits(self) -> bool:
        return all(pool.fits for pool in self.pools)

    @property
    def excess(self) -> int:
        """Returns the bytes above the limits, added up over the pools."""
        pools = ((pool.bytes, pool.limit) for pool in self.pools)
        return sum(max(size - limit, 0) for size, limit in pools if limit is not None)

    @property
    def peaks(self) -> dict[str, int]:
        """Maps each pool to the bytes of its fullest device."""
        return {pool.pool.name: pool.bytes for pool in self.pools if pool.pool.devices}

    @property
    def words(self) -> list[str]:
        """Writes the changes as on a command line."""
        return [f"{key}={show_value(value)}" for key, value in self.changes]

    @cached_property
    def stages(self) -> Mapping[Stage, float]:
        assert self.seconds is not None
        return self.seconds(self.setting)

    @cached_property
    def step(self) -> float:
        """Returns the seconds of a step once the pipeline is full."""
        placement = self.inputs.placement
        names = {role: placement.pool_of(role).name for role in placement.roles}
        return predict(self.stages, names, self.setting.staleness)

    def remedies(self, role: str) -> Iterator[Remedy]:
        """Yields what the role declares, without the present values."""
        declared = REMEDIES.get(role, functools.partial(common_remedies, role=role))
        for remedy in declared(self.setting):
            now = get_key(self.config, remedy.key)
            faster, smaller = (
                [value for value in values if value != now]
                for values in (remedy.faster, remedy.smaller)
            )
            yield replace(remedy, faster=faster, smaller=smaller)

    def peak(self, pool: int) -> int | None:
        """Returns the bytes of a pool; None where the mesh does not allow the changes."""
        with suppress(UserError):
            return self.pools[pool].bytes
        return None

    def smaller(self, pool: int, limit: int) -> list[Candidate]:
        """Returns the run with each key that makes a pool smaller, one at a time: with the first
        value that fits into `limit` bytes, or else the one that takes the least. What fits comes
        first, then what takes less."""
        found: dict[str, tuple[int, Candidate]] = {}
        for role in self.inputs.placement.pools[pool].roles:
            for remedy in self.remedies(role) if role in self.inputs.roles else ():
                if remedy.key in found:
                    continue
                tried = [self.change(remedy.key, value) for value in remedy.smaller]
                known = [(size, c) for c in tried if (size := c.peak(pool)) is not None]
                least = min((size for size, _ in known), default=0)
                best = next((x for x in known if x[0] <= max(limit, least)), None)
                if best is not None and best[0] < (1 - WORTH) * self.pools[pool].bytes:
                    found[remedy.key] = best
        order = sorted(found.values(), key=lambda item: (item[0] > limit, item[0]))
        return [candidate for _, candidate in order]


def get_key(config: Config, key: str) -> Any:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def set_key(config: Config, key: str, value: object) -> Config:
    """Returns the `config` with one dotted key changed."""
    section, _, name = key.rpartition(".")
    if section:
        owner = get_key(config, section)
        return set_key(config, section, owner.model_copy(update={name: value}))
    return config.model_copy(update={name: value})


def splits(placement: Placement) -> Iterator[str]:
    """Yields every other `--mesh` with the same pools over as many devices, or `SPLITS` of them."""
    n, pools = placement.n_devices, [pool for pool in placement.pools if pool.devices]
    units = (unit for unit in range(1, n + 1) if n % unit == 0)
    unit = next(unit for unit in units if comb(n // unit - 1, len(pools) - 1) <= SPLITS)
    present = [len(pool.devices) for pool in pools]
    for cuts in combinations(range(unit, n, unit), len(pools) - 1):
        sizes = [b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True)]
        if sizes != present:
            pairs = zip(pools, sizes, strict=True)
            yield ",".join(f"{pool.name}={size}" for pool, size in pairs)


def predict(stages: Mapping[Stage, float], pool_of: Mapping[str, str], staleness: int) -> float:
    """Predicts the seconds of a step once the pipeline is full.

    Args:
        stages: seconds a step of each stage.
        pool_of: role -> its pool.
        staleness: batches that the schedule generates ahead.
    """
    free: dict[str, float] = defaultdict(float)
    generated: dict[int, float] = {}
    scored: dict[int, float] = {}
    updates: list[float] = []

    def run(role: str, method: str, ready: float) -> float:
        """Returns the time at which a call ends that is queued now and has its arguments at
        `ready`."""
        if (role, method) not in stages:
            return ready
        pool = pool_of[role]
        free[pool] = max(free[pool], ready) + stages[role, method]
        return free[pool]

    scorers = [role for role, method in stages if method == "score"]
    follows = ("actor", "publish_to_teacher") in stages
    for action in Schedule(REPLAYED, staleness, scores_ahead=not follows):
        i = action.index
        if action.kind == "generate":
            generated[i] = run("teacher", "generate", run("rollout", "generate", 0.0))
        elif action.kind == "score":
            scored[i] = max((run(role, "score", generated[i]) for role in scorers), default=0.0)
        elif action.kind == "train":
            updates.append(run("actor", "update", max(generated[i], scored[i])))
        else:
            run("rollout", "load", run("actor", "publish", 0.0))
            run("teacher", "load", run("actor", "publish_to_teacher", 0.0))
    half = REPLAYED // 2
    return (updates[-1] - updates[-1 - half]) / half
