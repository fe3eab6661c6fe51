"""The calls of a run, read back from its timeline: seconds of each stage, who waited for whom, and
which other split of the same devices, or which schedule, would be faster.

The seconds of a step are counted over windows of time, each from the end of one update to the end
of the next. What runs in a window counts for it, whatever batch it is of, so with a schedule that
overlaps batches the seconds of a stage are still those of a step.

A prediction replays the schedule with the seconds of each stage, every pool a queue of calls. On
more or fewer devices a stage takes its seconds times old over new devices; weight syncs, roles
without devices and the driver keep theirs.
"""

from __future__ import annotations

import os
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

from jaxrl.algorithms.schedule import SCHEDULES, staleness_of
from jaxrl.config.schema import CONFIG_FILE, Config
from jaxrl.errors import UserError
from jaxrl.plan import planned_run
from jaxrl.plan.search import Candidate, splits
from jaxrl.plan.simulate import Stage, predict
from jaxrl.plan.table import PLAN_DATA_FILE, read_plan
from jaxrl.process.json_types import JsonObject, parse_json, read_file
from jaxrl.sharding.placement import ROLES, parse, place
from jaxrl.telemetry.timeline import BEGUN, TIMELINE_FILE

READ_BYTES = 1 << 20
"""Bytes at the end of a timeline that are read: about five hundred steps."""
WARM_UP = 2
"""Steps left out after a start: they compile."""
LONG = 1.5
"""A step that took so many times the median is left out: it compiled, evaluated or saved."""
TOUCH_S = 0.02
"""A call may begin so much before the end of what it needs: their workers' clocks differ."""
OTHER = "the driver"
"""Who is waited for where no pool works: results on their way, and the loop itself."""
ENOUGH = 4
"""Steady steps without which nothing is said."""
WORTH = 1.05
"""How many times faster something must be to be named."""
PLANNED = 32
"""Splits that are planned, the fastest first, until one can be had."""
FIXED = ("publish", "publish_to_teacher", "load")
"""Methods that more devices make no faster: the weight sync."""

FASTER, WENT = "What would be faster", "Where the time of a step went"
"""Headings of `run_advice`."""
EMULATED = " on real devices (emulated ones share the cores of this host)"

Window = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """A call of a role, or the state of a worker, in seconds or microseconds of the trace."""

    track: str
    """The role; `worker actor` for the states of a worker."""
    name: str
    """The method, or the state."""
    start: float
    end: float
    step: int | None = None
    """The batch, where the call names it."""
    aside: bool = False
    """Whether it is a wait beside the queue of its worker, for a disk: no work of the devices."""

    @property
    def stage(self) -> Stage:
        """Returns role and method; a part of a batch that is sampled is generated."""
        return self.track, "generate" if self.name == "part" else self.name


@dataclass(frozen=True)
class Gap:
    """A time in which a pool did nothing."""

    start: float
    end: float
    then: Span | None
    """The call that ended it; None at the end of the run."""
    causes: tuple[tuple[Span | None, float, float], ...]
    """What the pool waited for, the latest first: a call of another pool (None: no pool worked),
    and the part of the gap that it took. The parts add up to the gap.
    """

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class PoolWait:
    """What a pool did in a step."""

    pool: str
    busy: float
    """Share of the step in which a call of it ran."""
    seconds: float
    """Of the whole step."""
    waited: Mapping[str, float]
    """Pool -> seconds a step that this one waited for it; under `OTHER` those of no pool."""

    @property
    def idle(self) -> float:
        return 1 - self.busy


def span_of(event: JsonObject) -> Span | None:
    """Reads the span of a trace event, in microseconds; None for all other events."""
    if event.get("ph") != "X" or not {"cat", "name", "ts", "dur"} <= event.keys():
        return None
    args = event.get("args") or {}
    if not (is_time(event["ts"]) and is_time(event["dur"]) and isinstance(args, dict)):
        return None
    start, step = int(event["ts"]), args.get("step")
    return Span(
        track=str(event["cat"]),
        name=str(event["name"]),
        start=start,
        end=start + int(event["dur"]),
        step=step if isinstance(step, int) else None,
        aside=bool(args.get("aside")),
    )


def is_time(value: object) -> bool:
    """Returns whether a value in a trace event can be its microseconds."""
    return isinstance(value, int | float) and abs(value) < 1e18


def begins_run(event: JsonObject) -> bool:
    """Returns whether a trace event marks that a run was started or resumed."""
    return event.get("ph") == "i" and event.get("name") in BEGUN and is_time(event.get("ts"))


def read_calls(path: Path) -> list[Span]:
    """Reads the calls of a timeline since its run was last started or resumed, in the order of
    their ends, in seconds; none if there is no file. Lines that are cut are left out."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return []
        with open(path, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - READ_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    calls: list[Span] = []
    for line in lines:
        try:
            event = parse_json(line.removeprefix(b","))
            if begins_run(event):
                calls = []
            elif (span := span_of(event)) and span.track in ROLES and not span.aside:
                start, took = span.start / 1e6, (span.end - span.start) / 1e6
                calls.append(replace(span, start=start, end=start + took))
        except (ValueError, TypeError, AttributeError):
            continue  # a bracket of the array, or a torn line
    return sorted(calls, key=lambda call: call.end)


def last_updates(calls: Iterable[Span]) -> list[Span]:
    """Returns the updates that end a step: the last one of a batch that is trained in parts."""
    updates = [call for call in calls if call.stage == ("actor", "update")]
    following: list[Span | None] = [*updates[1:], None]
    followed = zip(updates, following, strict=False)  # of no update there is no end
    return [x for x, y in followed if y is None or x.step is None or x.step != y.step]


def steady_steps(calls: Sequence[Span], staleness: int) -> list[Window]:
    """Returns the steps without those that fill or drain the pipeline, or took much longer than
    most. The last one is left out too: only the calls after it show what their pools waited for.

    Args:
        staleness: batches that the schedule generates ahead.
    """
    windows = list(pairwise(update.end for update in last_updates(calls)))
    windows = windows[WARM_UP - 1 + staleness : max(len(windows) - 1 - staleness, 0)]
    if not windows:
        return []
    # Batches ahead make long and short steps take turns: each is compared with its own kind's.
    turns = [windows[i :: staleness + 1] for i in range(min(staleness + 1, len(windows)))]
    longest = max(statistics.median_low(end - start for start, end in each) for each in turns)
    return [(start, end) for start, end in windows if end - start <= LONG * longest]


def stage_seconds(
    calls: Sequence[Span], windows: Sequence[Window], steps: int
) -> dict[Stage, float]:
    """Seconds a step in which each stage ran; calls of a stage that overlap count once.

    Args:
        windows: all of the time that counts.
        steps: how many steps that is.
    """
    found: dict[Stage, list[Window]] = defaultdict(list)
    for call in calls:
        found[call.stage].append((call.start, call.end))
    each = {stage: _inside(union(spans), windows) for stage, spans in found.items()}
    return {stage: seconds / steps for stage, seconds in each.items() if seconds > 0}


def pool_waits(
    calls: Sequence[Span], windows: Sequence[Window], steps: int, pool_of: Mapping[str, str]
) -> list[PoolWait]:
    """Returns how busy each pool was, and whom it waited for while it was not.

    Args:
        windows, steps: as in `stage_seconds`.
        pool_of: role -> name of its pool.
    """
    total = sum(end - start for start, end in windows)
    whole = [(min(call.start for call in calls), max(call.end for call in calls))] if calls else []
    found = []
    for pool in dict.fromkeys(pool_of.values()):
        own = [call for call in calls if pool_of[call.track] == pool]
        others = [call for call in calls if pool_of[call.track] != pool]
        spans: dict[str, list[Window]] = defaultdict(list)
        for cause, start, end in chain(*(gap.causes for gap in gaps(own, others, whole))):
            spans[OTHER if cause is None else pool_of[cause.track]].append((start, end))
        seconds = {name: _inside(each, windows) / steps for name, each in spans.items()}
        waited = {name: s for name, s in seconds.items() if s > 0}
        busy = _inside(union((call.start, call.end) for call in own), windows)
        found.append(PoolWait(pool, busy / total, total / steps, waited))
    return found


def gaps(
    own: Iterable[Span], others: Iterable[Span], lives: Iterable[Window], touch: float = TOUCH_S
) -> Iterator[Gap]:
    """Yields the times in which a pool did nothing, and what it waited for.

    A gap is followed back from its end: the call of another pool that ended last before it, then
    the one that ended last before that one began, and so on to the beginning of the gap.

    Args:
        own, others: the calls of the pool, and of all other pools.
        lives: the times to look at, from the first call after a start of the run to the last.
        touch: `TOUCH_S` in the unit of the spans.
    """
    own, others = list(own), sorted(others, key=lambda call: call.end)
    ends = [call.end for call in others]
    begun = {call.start: call for call in own}
    busy = union((call.start, call.end) for call in own)
    for first, last in lives:
        inside = [time for time in busy if first <= time[0] < last]
        edges = [first, *(edge for time in inside for edge in time), last]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if start < end:
                causes = tuple(_causes(start, end, others, ends, touch))
                yield Gap(start, end, begun.get(end), causes)


def _causes(
    start: float, end: float, others: Sequence[Span], ends: Sequence[float], touch: float
) -> Iterator[tuple[Span | None, float, float]]:
    """Yields causes as in `Gap.causes`; `others` and their `ends` are in the order of the ends."""
    at = end
    while at > start:
        # The call whose end is nearest, of those that began before it and ended at most `touch`
        # after it.
        cause: Span | None = None
        for i in range(bisect_right(ends, at + touch) - 1, -1, -1):
            call = others[i]
            if call.start >= at:
                continue
            if cause is None or abs(at - call.end) < cause.end - at:
                cause = call
            if call.end <= at:
                break
        ended = start if cause is None else max(min(cause.end, at), start)
        if ended < at:
            yield None, ended, at
        if cause is None or ended == start:
            return
        at = max(cause.start, start)
        yield cause, at, ended


def union(spans: Iterable[Window]) -> list[Window]:
    """Merges spans into the same stretches of time, without overlap."""
    merged: list[Window] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _inside(spans: Iterable[Window], windows: Iterable[Window]) -> float:
    stretches = union(windows)
    return sum(
        max(min(end, stop) - max(start, begin), 0.0)
        for start, end in spans
        for begin, stop in stretches
    )


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
        return staleness_of(self.config)

    @cached_property
    def planned(self) -> Candidate | None:
        """Returns the plan of the run; None where its models cannot be read any more."""
        with suppress(UserError):
            return planned_run(self.config, self.limit)
        return None


def run_advice(run_dir: Path, config: Config | None = None) -> dict[str, tuple[str, ...]]:
    """Reads the times of a run from its `plan.json` and `timeline.json`, and returns heading ->
    lines; empty where there is nothing to say. `FASTER`: splits and schedules that would be faster,
    the fastest first; of a run on emulated devices, on devices of their own. `WENT`: what each pool
    did in a step, and which pool it waited for.

    Args:
        config: of the run; None: read from its `config.yaml`.
    """
    found = measured_run(run_dir, config)
    if found is None or len(found[1].pools) < 2:
        return {}
    setup, measured = found
    waits = []  # such as `actor: busy 0.40 s of 1.52 s a step; waited 1.00 s for rollout`
    for pool in measured.pools:
        longest = sorted(pool.waited.items(), key=lambda item: -item[1])
        waited = ", ".join(f"{s:.2f} s for {name}" for name, s in longest if s >= 0.005)
        busy = f"{pool.pool}: busy {pool.busy * pool.seconds:.2f} s of {pool.seconds:.2f} s a step"
        waits.append(f"{busy}; waited {waited}" if waited else busy)

    # The best split under the run's schedule, and what another schedule would do.
    lines: list[tuple[float, str]] = []
    top = max(measured.pools, key=lambda pool: pool.busy)
    split, best = best_split(setup, measured, setup.staleness)
    if split is not None:
        part = f"{top.pool} is {top.busy:.0%} of the step"
        lines.append((best, f"{part}; {split} would be {best:.1f}x faster"))
    refills = setup.config.dynamic_sampling == "refill"
    for name, staleness in () if refills else SCHEDULES.items():
        if staleness <= setup.staleness:
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
    fastest_first = tuple(line for _, line in sorted(lines, key=lambda pair: -pair[0]))
    heading = f"{FASTER}{EMULATED}" if setup.emulated else FASTER
    return ({heading: fastest_first} if lines else {}) | {WENT: tuple(waits)}


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


def best_split(setup: RunSetup, measured: StepTimes, staleness: int) -> tuple[str | None, float]:
    """Finds the fastest other `--mesh` that can be had, and how many times faster it is than the
    run; None, and 1, where none is worth it."""
    kept = speedup(setup, measured, setup.devices, staleness)
    found = []
    slices = {role: section.devices for role, section in setup.config.roles.items()}
    for mesh in splits(parse(setup.config.mesh)):
        with suppress(UserError):  # a role's slice of its pool is impossible
            roles = place(mesh, [role for role, n in setup.devices.items() if n], slices).roles
            devices = {r: len(roles[r].devices) if n else 0 for r, n in setup.devices.items()}
            found.append((speedup(setup, measured, devices, staleness), mesh))
    worth = sorted((item for item in found if item[0] >= WORTH * kept), reverse=True)
    for faster, mesh in worth[:PLANNED]:
        with suppress(UserError):  # the axes do not divide
            if setup.planned is not None and setup.planned.move(mesh).fits:
                return mesh, faster
    return None, 1.0


def speedup(
    setup: RunSetup, measured: StepTimes, devices: Mapping[str, int], staleness: int
) -> float:
    """Returns how many times faster than the run the step would be; what the run's replay does not
    explain stays as it is."""
    stages = scaled(measured.stages, setup.devices, devices)
    return measured.step / (measured.unexplained + predict(stages, setup.pool_of, staleness))


def measured_run(run_dir: Path, config: Config | None = None) -> tuple[RunSetup, StepTimes] | None:
    """Reads the setup and the step times of a run; None where the config or the plan of the run
    cannot be read, it has too few steps, or a single pool, whose roles take turns."""
    try:
        if config is None and not (run_dir / CONFIG_FILE).is_file():  # a pipe would be waited for
            return None
        config = config or Config.load(run_dir / CONFIG_FILE)
        plan = read_plan(read_file(run_dir / PLAN_DATA_FILE))
        pools, roles = plan["pools"], plan["roles"]
        if len(pools) < 2:
            return None
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
    measured = measure_steps(read_calls(run_dir / TIMELINE_FILE), setup.pool_of, setup.staleness)
    return None if measured is None else (setup, measured)


def measure_steps(
    calls: Sequence[Span], pool_of: Mapping[str, str], staleness: int
) -> StepTimes | None:
    """Measures what the steady steps among these calls took; None where they are too few."""
    windows = steady_steps(calls, staleness)
    if len(windows) < ENOUGH:
        return None
    n = len(windows)
    step = sum(end - start for start, end in windows) / n
    stages = stage_seconds(calls, windows, n)
    unexplained = max(step - predict(stages, pool_of, staleness), 0.0)
    return StepTimes(stages, step, unexplained, tuple(pool_waits(calls, windows, n, pool_of)))
