"""Advice from a run's own times: which pool waited for which, and which other split of the same
devices, or which schedule, would be faster.

The prediction replays the schedule with the measured seconds of each stage, every pool a queue of
calls. On more or fewer devices a stage takes its seconds times old over new devices; weight syncs,
roles without devices and the driver keep theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from math import comb
from pathlib import Path

from jaxrl.algorithms.methods import needed_roles
from jaxrl.algorithms.schedule import SCHEDULES, Schedule
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.errors import UserError
from jaxrl.plan import make_plan
from jaxrl.plan.plan_inputs import GB
from jaxrl.plan.record import PLAN_DATA_FILE, read_plan
from jaxrl.process.json_types import read_file
from jaxrl.profile.waits import (
    PoolWait,
    Span,
    Stage,
    pool_waits,
    read_calls,
    stage_seconds,
    steady_steps,
)
from jaxrl.sharding.placement import Placement, parse, place
from jaxrl.telemetry.timeline import TIMELINE_FILE

ENOUGH = 4
"""Steady steps without which nothing is said."""
WORTH = 1.05
"""How many times faster something must be to be named."""
MOST = 600
"""Splits that are replayed; where there are more, devices are moved by twos, or threes, ..."""
PLANNED = 32
"""Splits that are planned, the fastest first, until one can be had."""
REPLAYED = 12
"""Steps of a replay; the last half of them are measured: whole periods of up to three batches."""
FIXED = ("publish", "publish_to_teacher", "load")
"""Methods that more devices make no faster: the weight sync."""


@dataclass(frozen=True)
class StepTimes:
    """What a run took, in seconds a step."""

    stages: Mapping[Stage, float]
    step: float
    unexplained: float
    """Of the step, beyond its replay: evaluations, checkpoints, the driver."""
    pools: tuple[PoolWait, ...]


@dataclass(frozen=True)
class RunSetup:
    """Where a run's roles were."""

    config: Config
    pool_of: Mapping[str, str]
    """Role -> name of its pool, roles without devices too."""
    devices: Mapping[str, int]
    """Role -> how many it had."""
    emulated: bool
    limit: int | None
    """Bytes of the smallest device; None where nobody knows."""

    @property
    def staleness(self) -> int:
        return SCHEDULES[self.config.schedule]


@dataclass(frozen=True)
class Advice:
    """What the times of a run say, in lines; empty where there is nothing to say."""

    faster: tuple[str, ...] = ()
    """Splits and schedules that would be faster, the fastest first."""
    waits: tuple[str, ...] = ()
    """What each pool did in a step, and which pool it waited for."""
    emulated: bool = False
    """Whether `faster` is about devices of their own, which this run did not have."""

    @property
    def headings(self) -> dict[str, tuple[str, ...]]:
        """Returns heading -> lines, for what there is to say."""
        only = " on real devices (emulated ones share the cores of this host)"
        faster = f"What would be faster{only if self.emulated else ''}"
        found = {faster: self.faster, "Where the time of a step went": self.waits}
        return {heading: lines for heading, lines in found.items() if lines}


def run_advice(run_dir: Path) -> Advice:
    """Returns what the times of a run say, from its `config.yaml`, `plan.json` and
    `timeline.json`."""
    found = measured_run(run_dir)
    if found is None or len(found[1].pools) < 2:
        return Advice()
    setup, measured = found
    waits = []  # such as `actor: busy 0.40 s of 1.52 s a step; waited 1.00 s for rollout`
    for pool in measured.pools:
        longest = sorted(pool.waited.items(), key=lambda item: -item[1])
        waited = ", ".join(f"{s:.2f} s for {name}" for name, s in longest if s >= 0.005)
        busy = f"{pool.pool}: busy {pool.busy * pool.seconds:.2f} s of {pool.seconds:.2f} s a step"
        waits.append(f"{busy}; waited {waited}" if waited else busy)
    lines: list[
        tuple[float, str]
    ] = []  # the best split under the run's schedule, and what another schedule would do
    top = max(measured.pools, key=lambda pool: pool.busy)
    split, best = best_split(setup, measured, setup.staleness)
    if split is not None:
        part = f"{top.pool} is {top.busy:.0%} of the step"
        lines.append((best, f"{part}; {split} would be {best:.1f}x faster"))
    for name, staleness in SCHEDULES.items():
        if staleness <= setup.staleness or setup.config.dynamic_sampling == "refill":
            continue
        now = speedup(setup, measured, setup.devices, staleness)
        split, faster = best_split(setup, measured, staleness)
        if max(now, faster) < WORTH * best:
            continue
        best = max(now, faster)
        if split is not None and now < WORTH:
            lines.append((best, f"schedule={name} with {split} would be {faster:.1f}x faster"))
        else:
            more = "" if split is None else f", and with {split} {faster:.1f}x"
            lines.append((best, f"schedule={name} would be {now:.1f}x faster{more}"))
    fastest_first = (line for _, line in sorted(lines, key=lambda pair: -pair[0]))
    return Advice(tuple(fastest_first), tuple(waits), setup.emulated)


def predict(stages: Mapping[Stage, float], pool_of: Mapping[str, str], staleness: int) -> float:
    """Predicts the seconds of a step once the pipeline is full.

    Args:
        stages: seconds a step of each stage.
        pool_of: role -> its pool.
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


def scaled(
    stages: Mapping[Stage, float], before: Mapping[str, int], after: Mapping[str, int]
) -> dict[Stage, float]:
    """Scales the seconds of the stages to another number of devices.

    Args:
        before, after: role -> devices; 0 where it has none.
    """
    return {
        (role, method): seconds
        if method in FIXED or not before[role]
        else seconds * before[role] / after[role]
        for (role, method), seconds in stages.items()
    }


def splits(placement: Placement) -> Iterator[str]:
    """Yields every other `--mesh` with the same pools over as many devices, or `MOST` of them."""
    n, pools = placement.n_devices, placement.pools
    units = (unit for unit in range(1, n + 1) if n % unit == 0)
    unit = next(unit for unit in units if comb(n // unit - 1, len(pools) - 1) <= MOST)
    present = [len(pool.devices) for pool in pools]
    for cuts in combinations(range(unit, n, unit), len(pools) - 1):
        sizes = [b - a for a, b in zip((0, *cuts), (*cuts, n), strict=True)]
        if sizes != present:
            pairs = zip(pools, sizes, strict=True)
            yield ",".join(f"{pool.name}={size}" for pool, size in pairs)


def best_split(setup: RunSetup, measured: StepTimes, staleness: int) -> tuple[str | None, float]:
    """Finds the fastest other `--mesh` that can be had, and how many times faster it is than the
    run; None, and 1, where none is worth it."""
    kept = speedup(setup, measured, setup.devices, staleness)
    found = []
    slices = {role: section.devices for role, section in setup.config.roles.items()}
    for spec in splits(parse(setup.config.mesh)):
        with suppress(UserError):  # a role's slice of its pool is impossible
            roles = place(spec, [role for role, n in setup.devices.items() if n], slices).roles
            devices = {r: len(roles[r].devices) if n else 0 for r, n in setup.devices.items()}
            found.append((speedup(setup, measured, devices, staleness), spec))
    worth = sorted((each for each in found if each[0] >= WORTH * kept), reverse=True)
    limit = None if setup.limit is None else setup.limit / GB
    for faster, spec in worth[:PLANNED]:
        config = setup.config.model_copy(update={"mesh": spec})
        with suppress(UserError):  # the axes do not divide
            if make_plan(config, needed_roles(config), None, limit).fits:
                return spec, faster
    return None, 1.0


def speedup(
    setup: RunSetup, measured: StepTimes, devices: Mapping[str, int], staleness: int
) -> float:
    """Returns how many times faster than the run the step would be; what the run's replay does not
    explain stays as it is."""
    stages = scaled(measured.stages, setup.devices, devices)
    return measured.step / (measured.unexplained + predict(stages, setup.pool_of, staleness))


def measured_run(run_dir: Path) -> tuple[RunSetup, StepTimes] | None:
    """Reads the setup and the step times of a run; None where the config or the plan of the run
    cannot be read, or it has too few steps."""
    try:
        if not (run_dir / CONFIG_FILE).is_file():  # a pipe would be waited for
            return None
        config = Config.load(run_dir / CONFIG_FILE)
        plan = read_plan(read_file(run_dir / PLAN_DATA_FILE))
        pools, roles = plan["pools"], plan["roles"]
        emulated = any(pool["device"] == "cpu" for pool in pools)
        limits = [pool["limit"] for pool in pools if pool["limit"] is not None]
        setup = RunSetup(
            config,
            {role["role"]: pools[role["pool"]]["name"] for role in roles},
            {role["role"]: len(role["devices"]) for role in roles},
            emulated,
            None if emulated else min(limits, default=None),
        )
    except (OSError, ValueError):  # a UserError too
        return None
    measured = measure(read_calls(run_dir / TIMELINE_FILE), setup.pool_of, setup.staleness)
    return None if measured is None else (setup, measured)


def measure(calls: Sequence[Span], pool_of: Mapping[str, str], staleness: int) -> StepTimes | None:
    """Measures what the steady steps among these calls took; None where they are too few."""
    windows = steady_steps(calls, staleness)
    if len(windows) < ENOUGH:
        return None
    n = len(windows)
    step = sum(end - start for start, end in windows) / n
    stages = stage_seconds(calls, windows, n)
    unexplained = max(step - predict(stages, pool_of, staleness), 0.0)
    return StepTimes(stages, step, unexplained, tuple(pool_waits(calls, windows, n, pool_of)))
