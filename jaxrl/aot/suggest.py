"""`--suggest`: the placement and the keys whose step is predicted to be the shortest that fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.aot.costs import ASSUMED, Links, Traffic, stage_costs
from jaxrl.aot.machine import Machine
from jaxrl.config.keys import mappings
from jaxrl.config.roles import LongParallelConfig
from jaxrl.config.schema import Config
from jaxrl.config.yaml_text import assignments, shown
from jaxrl.errors import UserError
from jaxrl.plan import Plan, services
from jaxrl.plan.accounts import pool_peaks
from jaxrl.plan.advice import REMATS, Change, set_key, with_choices
from jaxrl.plan.plan_inputs import GB, PlanInputs
from jaxrl.profile.splits import predict, splits
from jaxrl.profile.waits import Stage
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.device_peaks import ceilings_of
from jaxrl.sharding.placement import place

ROUNDS = 4
"""How often at most each key of a candidate is tried, as the others have changed meanwhile."""
SHOWN = 5
"""Candidates in the table."""
WORTH = 1.01
"""How many times faster a step must be for a key to change."""
LONG = 8192
"""Tokens of sequences that the axis `context` is tried for."""


@dataclass(frozen=True)
class Candidate:
    """A placement and keys of a run, and what is predicted for them."""

    config: Config
    inputs: PlanInputs
    stages: Mapping[Stage, float]
    """Seconds a step of each stage."""
    step: float
    """Seconds of a step once the pipeline is full."""
    peaks: Mapping[str, int]
    """Pool -> bytes of its fullest device."""
    excess: int
    """Bytes above the limits, added up over the pools."""
    changes: tuple[Change, ...] = ()
    """Keys that differ from the run as configured, the mesh first: of what `Search.best` finds."""

    @property
    def fits(self) -> bool:
        return self.excess == 0

    @property
    def words(self) -> list[str]:
        """Writes the changes as on a command line."""
        return [f"{key}={shown(value)}" for key, value in self.changes]


class Search:
    """Tries placements and keys on a machine: for each placement it improves one key after the
    other, which finds a good choice, not always the best."""

    def __init__(self, plan: Plan, machine: Machine, compiled: Mapping[str, Traffic]):
        """
        Args:
            plan: of the run as configured, on that machine.
            compiled: role -> what its compiled programs say of its collectives.
        """
        self.config, self.inputs, self.compiled = plan.config, plan.inputs, compiled
        self.ceilings = ceilings_of(machine.devices[0], "bfloat16")
        target = machine.target
        self.links = Links(target.inside, target.link)
        self.host_size = target.count // target.hosts
        self.now = self.judge(self.config, self.inputs)

    def judge(self, config: Config, inputs: PlanInputs) -> Candidate:
        """Predicts a step of a config on a placement; the plan chooses axes that are not set.

        Raises:
            UserError: axes that do not divide a role's devices or its model's heads.
        """
        whole, _ = with_choices(config, inputs)
        machine = (self.ceilings, self.links, self.host_size)
        stages = stage_costs(whole, inputs, inputs.axes(whole), *machine, self.compiled)
        names = {role: inputs.placement.pool_of(role).name for role in inputs.placement.roles}
        pools = pool_peaks(inputs, whole)
        return Candidate(
            config,
            inputs,
            stages,
            predict(stages, names, SCHEDULES[config.schedule]),
            {pool.pool.name: pool.bytes for pool in pools if pool.pool.devices},
            sum(max(pool.bytes - pool.limit, 0) for pool in pools if pool.limit is not None),
        )

    def _changes(self, config: Config) -> tuple[Change, ...]:
        whole = mappings(Config)
        before, after = (dict(assignments(c.model_dump(), whole)) for c in (self.config, config))
        return tuple((key, after[key]) for key in after if after[key] != before.get(key))

    def best(self) -> list[Candidate]:
        """Returns the fastest found for each placement that fits, the fastest first."""
        found = [self._improved(self.now)]
        for spec in splits(self.inputs.placement):
            try:
                start = self._placed(spec)
            except UserError:
                continue
            found.append(self._improved(start))
        fitting = sorted((each for each in found if each.fits), key=lambda each: each.step)
        return [self._as_configured(each) for each in fitting]

    def _as_configured(self, found: Candidate) -> Candidate:
        """Returns the same with the axes as the run's config has them, or leaves them to the plan,
        where these are the same axes."""
        config, inputs = found.config, found.inputs
        for role in self.inputs.roles:
            own = _with_axes(config, role, self.config.roles[role].parallel.model_dump())
            with suppress(UserError):
                now, then = (inputs.axes(with_choices(each, inputs)[0]) for each in (config, own))
                config = own if now == then else config
        return replace(found, config=config, changes=self._changes(config))

    def _placed(self, spec: str) -> Candidate:
        """Returns the run on another mesh, each role with the first choice of `_axes`.

        Raises:
            UserError: the mesh suits the models or the hosts badly.
        """
        config = set_key(self.config, "mesh", spec)
        roles = [role for role in needed_roles(config) if role not in services(config)]
        slices = {role: section.devices for role, section in config.roles.items()}
        placement = place(spec, roles, slices)
        if any(_straddles(pool.devices, self.host_size) for pool in placement.pools):
            raise UserError(f"{spec}: a cluster would not split a pool that one host can hold")
        inputs = replace(self.inputs, placement=placement)
        for role in inputs.roles:
            axes = next(_axes(config, inputs, role), None)
            if axes is None:
                raise UserError(f"{spec}: the devices of {role} do not divide its model")
            config = _with_axes(config, role, axes)
        return self.judge(config, inputs)

    def _improved(self, start: Candidate) -> Candidate:
        best = start
        for _ in range(ROUNDS):
            before = best
            for options in _ladders(best, self.inputs.roles):
                for config in options:
                    try:
                        tried = self.judge(config, best.inputs)
                    except UserError:
                        continue
                    if _better(tried, best):
                        best = tried
            if best is before:
                break
        return best


def _better(tried: Candidate, best: Candidate) -> bool:
    if not (tried.fits and best.fits):
        return tried.excess < best.excess
    return tried.step * WORTH < best.step or (
        tried.step <= best.step and sum(tried.stages.values()) * WORTH < sum(best.stages.values())
    )


def _ladders(at: Candidate, roles: Sequence[str]) -> Iterator[list[Config]]:
    """Yields, for each key, the configs with its values."""
    config = at.config
    for role in roles:
        if role not in ("reward", "grouper"):  # their seconds are not predicted
            yield [_with_axes(config, role, axes) for axes in _axes(config, at.inputs, role)]
    width = -(-sum(at.inputs.widths(config)) // at.inputs.axes(config)["actor"].context)
    yield [set_key(config, "actor.remat", remat) for remat in REMATS]
    tokens = [*(width * n for n in (1, 2, 4, 8, 16)), None]
    yield [set_key(config, "actor.micro_batch_tokens", n) for n in tokens]
    rows = config.batch_size * config.group_size
    yield [set_key(config, "rollout.slots", -(-rows // n)) for n in (1, 2, 3, 4, 8)]
    if config.trains_adapters and config.quantised is None:
        yield [set_key(config, "rollout.merge", merged) for merged in (True, False)]
    for role in [role for role in ("teacher", "reference") if role in roles]:
        yield [set_key(config, f"{role}.num_microbatches", n) for n in (1, 2, 4, 8, 16, 32)]


def _axes(config: Config, inputs: PlanInputs, role: str) -> Iterator[dict[str, int]]:
    """Ways to use the devices of a role: of the axes `data`, `fsdp` and `tensor` two at most, and
    copies of what is trained in each of several hosts alone. What does not divide the model's
    widths or heads is left out: those weights would be whole on each device."""
    n, model = len(inputs.placement.roles[role].devices), inputs.model(role)
    long = isinstance(config.roles[role].parallel, LongParallelConfig)
    long = long and sum(inputs.widths(config)) >= LONG
    splits = [c for c in (1, 2, 4, 8) if n % c == 0 and (c == 1 or long)]
    for context, tensor in product(splits, range(1, n + 1)):
        if n % (tensor * context):
            continue
        rest = n // (tensor * context)
        found = [Axes(fsdp=rest, tensor=tensor, context=context)]
        hosts = inputs.spanned(role)
        if role == "actor" and rest % hosts == 0 and 1 < hosts < rest:
            found.append(found[0]._replace(data=hosts, fsdp=rest // hosts))
        if role != "actor":
            found = [Axes(data=rest, tensor=tensor, context=context)] + found * (tensor == 1 < rest)
        for axes in found:
            divided = model.d_model % axes.weights == 0 and model.d_ff % axes.tensor == 0
            if divided and model.n_heads % axes.heads == 0:
                above = {axis: size for axis, size in axes._asdict().items() if size > 1}
                yield above or {"fsdp" if role == "actor" else "data": 1}


def _straddles(devices: Sequence[int], host_size: int) -> bool:
    """Returns whether a pool's devices, numbered host after host, are on more hosts than it
    needs."""
    return len({i // host_size for i in devices}) > -(-len(devices) // host_size)


def _with_axes(config: Config, role: str, axes: Mapping[str, int | None]) -> Config:
    return set_key(config, f"{role}.parallel", type(config.roles[role].parallel)(**axes))


def candidate_lines(now: Candidate, found: Sequence[Candidate]) -> list[str]:
    """Returns lines: the run as it is and the best candidates, with the seconds of each stage."""
    lines = ["predicted seconds of a step", *(f"  {line}" for line in ASSUMED)]
    lines.append(_line("as it is", now))
    for candidate in found[:SHOWN]:
        lines.append(_line(f"{now.step / candidate.step:.2f}x", candidate))
        lines.append(f"    {' '.join(candidate.words)}")
    return lines


def _line(title: str, candidate: Candidate) -> str:
    stages = ", ".join(
        f"{role} {method} {seconds:.2f}"
        for (role, method), seconds in candidate.stages.items()
        if seconds >= 0.005
    )
    sizes = ", ".join(f"{pool} {size / GB:.1f}" for pool, size in candidate.peaks.items())
    misfit = "" if candidate.fits else ": does not fit"
    return f"  {title:>9}: {candidate.step:.2f} s ({stages}); peak GB by the plan: {sizes}{misfit}"
