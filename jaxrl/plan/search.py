"""Runs that differ from the configured one in keys or mesh, and one judge of all of them: does it
fit, and what does a step take, by seconds that were measured or predicted. The plan's choices and
advice, `--suggest` and the advice at the end of a run choose among them.
"""

from __future__ import annotations

import functools
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import comb
from typing import Any

from jaxrl.config.schema import Config
from jaxrl.config.section import show_value
from jaxrl.errors import UserError
from jaxrl.plan.peaks import pool_peak, pool_peaks
from jaxrl.plan.plan_inputs import PlanInputs, PoolPeak, Setting
from jaxrl.plan.simulate import Stage, predict
from jaxrl.roles.actor import actor_remedies
from jaxrl.roles.declared import Remedy
from jaxrl.roles.rollout import rollout_remedies
from jaxrl.roles.run_shapes import RunShapes, common_remedies
from jaxrl.sharding.placement import Placement, place, place_without_devices

Change = tuple[str, Any]
"""A dotted key and its new value."""
REMEDIES: dict[str, Callable[[RunShapes], Iterator[Remedy]]] = {
    "actor": actor_remedies,
    "rollout": rollout_remedies,
}
"""Role -> the function of its module that yields its remedies; others have the common ones."""
WORTH = 0.02
"""A key is named where it saves at least this fraction of the peak."""
STEPS = 20
"""The largest value that fits is exact up to one part in so many."""
FURTHER = 4
"""Times a value that fits, at which the next one is tried."""
SPLITS = 600
"""Splits that are tried; where there are more, devices are moved by twos, or threes, ..."""


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
        if self.inputs.hosts:
            return pool_peaks(self.setting)
        return tuple(map(self.pool, range(len(self.inputs.placement.pools))))

    @cached_property
    def _pools(self) -> dict[int, PoolPeak]:
        return {}

    def pool(self, index: int) -> PoolPeak:
        """Returns the fullest device of one pool, of which alone the programs are walked."""
        if self.inputs.hosts:  # whose pools leave each other what they do not take
            return self.pools[index]
        if index not in self._pools:
            self._pools[index] = pool_peak(self.setting, index)
        return self._pools[index]

    def size(self, index: int) -> int:
        """Returns the bytes of the fullest device of a pool; more than any has where an array would
        have more numbers than jax can index, or the mesh does not allow the changes."""
        with suppress(UserError):
            return self.pool(index).bytes
        return sys.maxsize

    @property
    def fits(self) -> bool:
        return self.possible and self.left(range(len(self.inputs.placement.pools))) >= 0

    def left(self, pools: Iterable[int]) -> float:
        """Returns the share of its limit that the fullest of some pools has left; negative where it
        does not fit, 1 where no limit is known."""
        if self.inputs.hosts:
            found = [(pool.bytes, pool.limit) for pool in self.pools]
        else:  # a pool whose limit nobody knows is not walked
            limits = [(i, self.inputs.limits[i]) for i in pools]
            found = [(self.size(i), limit) for i, limit in limits if limit is not None]
        known = ((size, limit) for size, limit in found if limit is not None)
        return min(((limit - size) / max(limit, 1) for size, limit in known), default=1.0)

    def largest(self, key: str, most: int) -> int:
        """Returns the largest value of a key, at most `most` and exact up to 5%, with which the run
        fits, as it does now: by the fullest pool, and by others where they do not fit then."""
        every = range(len(self.inputs.placement.pools))
        decisive = {min(every, key=lambda i: self.left([i]))}
        while True:
            value = self._largest(key, most, decisive)
            there = self.change(key, value)
            over = {i for i in every if there.left([i]) < 0}
            if not over or value == get_key(self.config, key):
                return value
            decisive, most = decisive | over, value

    def _largest(self, key: str, most: int, pools: Iterable[int]) -> int:
        # Bytes are nearly linear in a size, from some value on: few are tried.
        low: int = get_key(self.config, key)
        high, before, left = most + 1, low, {low: self.left(pools)}
        while high - low > max(1, low // STEPS):
            grown = left[before] - left[low]
            outer = high if grown <= 0 else low + (low - before) * left[low] / grown
            if before < low and outer <= low + low / STEPS:
                break
            further = FURTHER if before == low else FURTHER**3
            guess = outer
            if high in left:  # it does not fit, and the line through both ends crosses the limit
                inner = low + (high - low) * left[low] / (left[low] - left[high])
                guess = inner if before == low else math.sqrt(inner * min(outer, high))
            guess = min(further * low, guess * (1 - 1 / (2 * STEPS)))  # rather one that fits
            tried = min(max(round(guess), low + max(1, low // STEPS)), high - 1)
            left[tried] = self.change(key, tried).left(pools)
            if left[tried] >= 0:
                before, low = low, tried
            else:
                high = tried
        return low

    def _excess(self, index: int) -> int:
        """Returns the bytes of a pool above its limit."""
        pool = self.pool(index)
        return 0 if pool.limit is None else max(pool.bytes - pool.limit, 0)

    def exceeds_less(self, other: Candidate) -> bool:
        """Returns whether its pools are nearer to their limits than those of another run of the
        same pools; asks first the pool that is farthest above in the other."""
        theirs = [other._excess(i) for i in range(len(self.inputs.placement.pools))]
        most, above = sum(theirs), 0
        for index in sorted(range(len(theirs)), key=theirs.__getitem__, reverse=True):
            above += self._excess(index)
            if above >= most:
                return False
        return True

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

    @property
    def possible(self) -> bool:
        """Whether the mesh and the models allow the changes."""
        with suppress(UserError):
            return bool(self.setting.axes)
        return False

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
                possible = [each for each in tried if each.possible]
                if not possible:
                    continue
                best = possible[-1]  # asked first: most keys alone do not make a run fit
                if best.size(pool) <= limit:
                    best = first_fitting(possible, lambda each: each.size(pool) <= limit) or best
                if (size := best.size(pool)) < (1 - WORTH) * self.size(pool):
                    found[remedy.key] = size, best
        order = sorted(found.values(), key=lambda item: (item[0] > limit, item[0]))
        return [candidate for _, candidate in order]


def first_fitting(
    tried: Sequence[Candidate], fits: Callable[[Candidate], bool]
) -> Candidate | None:
    """Returns the first that fits of candidates of which each takes less than the one before it;
    None where none does."""
    if not tried or fits(tried[0]):
        return next(iter(tried), None)
    if not fits(tried[-1]):
        return None
    return tried[bisect_left(tried, True, lo=1, hi=len(tried) - 1, key=fits)]


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
