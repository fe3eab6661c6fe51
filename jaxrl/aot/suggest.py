"""`--suggest`: the placement and the keys whose step is predicted to be the shortest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.aot.costs import ASSUMED, Links, counted_bytes, stage_costs
from jaxrl.aot.machine import Machine
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import shown
from jaxrl.errors import UserError
from jaxrl.plan import Plan, services
from jaxrl.plan.advice import set_key
from jaxrl.plan.inputs import GB, PlanInputs
from jaxrl.plan.roles import pool_peaks
from jaxrl.profile.splits import predict, splits
from jaxrl.profile.waits import Stage
from jaxrl.sharding.ceilings import ceilings_of
from jaxrl.sharding.placement import place

ROUNDS = 2
"""How often each key of a candidate is tried again after the others have changed."""
SHOWN = 5
"""Candidates in the table."""
WORTH = 1.01
"""How many times faster a step must be for a key to change."""
AXES = ("data", "fsdp", "tensor")
REMATS = ("none", "dots", "full")

Change = tuple[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A way to run, and what is predicted of it."""

    config: Config
    inputs: PlanInputs
    changes: tuple[Change, ...]
    """Keys that differ from the run's own, the mesh first."""
    stages: Mapping[Stage, float]
    step: float
    """Seconds."""
    peaks: tuple[int, ...]
    """Bytes of the fullest device of each pool."""
    fits: bool

    @property
    def words(self) -> list[str]:
        """As they are written on a command line."""
        return [f"{key}={shown(value)}" for key, value in self.changes]


class Search:
    """Tries placements and keys on a machine."""

    def __init__(self, plan: Plan, machine: Machine, sent: Mapping[str, float]):
        """
        Args:
            sent: role -> bytes that its compiled programs send from a device in a step.
        """
        self.config, self.inputs = plan.config, plan.inputs
        counted = counted_bytes(plan.config, plan.inputs, plan.axes)
        self.scale = {role: sent[role] / n for role, n in counted.items() if n and sent.get(role)}
        self.ceilings = ceilings_of(machine.devices[0], "bfloat16")
        self.links = Links(machine.inside, machine.link)
        self.host_size = len(machine.devices) // machine.hosts
        self.now = self.judge(self.config, self.inputs)

    def judge(self, config: Config, inputs: PlanInputs) -> Candidate:
        """What is predicted of a config on a placement. Raises UserError where it cannot be."""
        axes = inputs.axes(config)
        machine = (self.ceilings, self.links, self.host_size)
        stages = stage_costs(config, inputs, axes, *machine, self.scale)
        names = {
            role: inputs.placement.pools[where.pool].name
            for role, where in inputs.placement.roles.items()
        }
        pools = pool_peaks(inputs, config)
        return Candidate(
            config,
            inputs,
            self._changes(config),
            stages,
            predict(stages, names, SCHEDULES[config.schedule]),
            tuple(pool.bytes for pool in pools),
            all(pool.fits for pool in pools),
        )

    def _changes(self, config: Config) -> tuple[Change, ...]:
        before, after = _flat(self.config.model_dump()), _flat(config.model_dump())
        return tuple((key, after[key]) for key in after if after[key] != before.get(key))

    def best(self) -> list[Candidate]:
        """The fastest of each placement that fits, the fastest first."""
        found = []
        for spec in (self.config.mesh, *splits(self.inputs.placement)):
            try:
                start = self._placed(spec)
            except UserError:
                continue
            found.append(self._improved(start))
        return sorted((each for each in found if each.fits), key=lambda each: each.step)

    def _placed(self, spec: str) -> Candidate:
        """The run on another mesh, with every choice of axes open again."""
        config = set_key(self.config, "mesh", spec)
        roles = [role for role in needed_roles(config) if role not in services(config)]
        slices = {role: section.devices for role, section in config.roles.items()}
        placement = place(spec, roles, slices)
        for role in self.inputs.roles:
            n = len(placement.roles[role].devices)
            config = _with_axes(config, role, next(_axes(n, role)))
        return self.judge(config, replace(self.inputs, placement=placement))

    def _improved(self, start: Candidate) -> Candidate:
        best = start
        for _ in range(ROUNDS):
            for options in _ladders(best, self.inputs.roles):
                for config in options:
                    try:
                        tried = self.judge(config, best.inputs)
                    except UserError:
                        continue
                    if _better(tried, best):
                        best = tried
        return best


def _better(tried: Candidate, best: Candidate) -> bool:
    if tried.fits != best.fits:
        return tried.fits
    if not tried.fits:
        return max(tried.peaks) < max(best.peaks)
    return tried.step * WORTH < best.step or (
        tried.step <= best.step and sum(tried.stages.values()) * WORTH < sum(best.stages.values())
    )


def _ladders(at: Candidate, roles: Sequence[str]) -> Iterator[list[Config]]:
    """For each key: the configs with its values."""
    config = at.config
    for role in roles:
        n = len(at.inputs.placement.roles[role].devices)
        if role in ("reward", "grouper") or n == 0:
            continue
        yield [_with_axes(config, role, axes) for axes in _axes(n, role)]
    width = sum(at.inputs.widths(config))
    yield [set_key(config, "actor.remat", remat) for remat in REMATS]
    yield [set_key(config, "actor.micro_batch_tokens", width * n) for n in (1, 2, 4, 8, 16)]
    rows = config.batch_size * config.group_size
    yield [set_key(config, "rollout.slots", -(-rows // n)) for n in (1, 2, 3, 4, 8)]
    if "teacher" in roles:
        yield [set_key(config, "teacher.num_microbatches", n) for n in (1, 2, 4, 8, 16, 32)]


def _axes(n: int, role: str) -> Iterator[dict[str, int]]:
    """Ways to use n devices: two axes at most, and no copies of what is trained."""
    other = "fsdp" if role == "actor" else "data"
    for tensor in (t for t in range(1, n + 1) if n % t == 0):
        sizes = {other: n // tensor, "tensor": tensor}
        yield {axis: size for axis, size in sizes.items() if size > 1} or {other: 1}
    if role != "actor" and n > 1:
        yield {"fsdp": n}


def _with_axes(config: Config, role: str, axes: Mapping[str, int]) -> Config:
    for axis in AXES:
        config = set_key(config, f"{role}.parallel.{axis}", axes.get(axis))
    return config


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found


def candidate_lines(now: Candidate, found: Sequence[Candidate]) -> list[str]:
    """Lines: the run as it is and the best candidates, with the seconds of each stage."""
    lines = [f"predicted seconds of a step ({ASSUMED})", _line("as it is", now)]
    for candidate in found[:SHOWN]:
        faster = now.step / candidate.step
        lines.append(_line(f"{faster:.2f}x", candidate))
        lines.append(f"      {' '.join(candidate.words) or 'as it is'}")
    return lines


def _line(title: str, candidate: Candidate) -> str:
    stages = ", ".join(
        f"{role} {method} {seconds:.2f}"
        for (role, method), seconds in candidate.stages.items()
        if seconds > 0
    )
    sizes = ", ".join(f"{size / GB:.1f}" for size in candidate.peaks)
    return f"  {title:>8}: {candidate.step:.2f} s ({stages}); GB of the pools: {sizes}"
