"""`--dry-run --compile TARGET`: compiles every program of a run for a machine that is not present,
and compares the compiler's memory figures with the plan's.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table

from jaxrl.algorithms.methods import needed_roles
from jaxrl.aot.hlo import Compiled, Graphs, read, read_thunks, read_total
from jaxrl.aot.machine import Machine, machine, prepare
from jaxrl.aot.programs import Program, RunPrograms
from jaxrl.aot.subprocess_compile import Died, apart
from jaxrl.aot.suggest import (
    SHOWN,
    WORTH,
    Candidate,
    Search,
    Traffic,
    candidate_lines,
    counted_bytes,
)
from jaxrl.config.schema import Config
from jaxrl.config.section import shown
from jaxrl.errors import UserError
from jaxrl.models.kernels import GPU, TPU, Target, compiling_for
from jaxrl.plan import target_plan
from jaxrl.plan.advice import Change
from jaxrl.plan.plan_inputs import GB
from jaxrl.plan.table import MB, Plan
from jaxrl.process.streams import silenced, table_lines
from jaxrl.run.names import with_commits
from jaxrl.sampling.decode import NO_MERGING

PROCESSES = 2
"""Number of processes that compile side by side. Each takes 1 to 4 GB of memory, and one core."""
LONGEST = ("update", "decode")
"""Programs that take as long to compile as all others: they have a process of their own."""
THUNKS = "*thunk_sequence_after_thunk_passes*"
"""Files in XLA's dump that list the kernels and CUDA graphs which a GPU program launches."""
MEMORY = "*memory-usage-report.txt"
"""The file in XLA's dump that has the memory of a TPU program."""
NO_TILES = "Couldn't find output tile sizes"
WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False} | NO_MERGING
"""Compiler options for a second try: without autotuning, XLA finds no tiles for some of Triton's
matrix products (of heads of 36, for example), where the autotuner would have chosen cuBLAS."""
LEGEND = (
    "planned, compiled: what a device holds of the role while the program runs, by the plan and by"
    " the compiler\nplanned is - where a larger program of the role determines the peak; calls a"
    " step: eval where only evaluations call it, waits where a sample has to wait for pages"
)


@dataclass(frozen=True)
class Checked:
    """A program after its compilation."""

    role: str
    name: str
    devices: int
    planned: int | None
    """The plan's estimate of the bytes that its role holds on a device while it runs. None if the
    plan has no estimate, because a larger program of the role determines the peak."""
    compiled: int | None
    """The same as the compiler reports it; None if the program does not compile."""
    others: int
    """Bytes that other roles hold on the same device meanwhile."""
    seconds: float
    """Seconds for lowering and compiling."""
    calls: int
    """Calls in a training step; 0 if none calls it."""
    error: str | None = None
    """Why it does not compile."""
    found: Compiled | None = None
    otherwise: str = "eval"
    """`Program.otherwise`."""
    graphs: Graphs | None = None
    """CUDA graphs of a decode launch; None for other programs and platforms."""


@dataclass(frozen=True)
class Report:
    """The result of compiling a run for a target machine."""

    target: Machine
    plan: Plan
    programs: tuple[Checked, ...]
    limit: int
    """Bytes of a device's memory that a run may use."""
    search: tuple[Candidate, ...] = ()
    """With `--suggest`: the run as configured, then the placements and keys that are predicted to
    be faster, or to fit where the run does not; the fastest first."""
    suggested: Report | None = None
    """The report of the fastest candidate that compiles and fits; None if none of them does, or if
    the run as configured does and is the fastest."""
    changes: tuple[Change, ...] = ()
    """Of a suggested run: the keys that differ from the run as configured, and their values."""

    @property
    def peaks(self) -> dict[str, int]:
        """Maps each pool to the peak bytes of its fullest device: the maximum over its compiled
        programs, each with the bytes that other roles hold there meanwhile. The plan's peak if
        nothing was compiled."""
        found = {}
        for pool in self.plan.pools:
            if not pool.pool.devices:
                continue
            sizes = [
                program.compiled + program.others
                for program in self.programs
                if program.role in pool.pool.roles and program.compiled is not None
            ]
            found[pool.pool.name] = max(sizes, default=pool.bytes)
        return found

    @property
    def failures(self) -> list[str]:
        """Returns a message for each program that does not compile, and for each pool that does not
        fit."""
        found = [
            f"{one.role}: {one.name} does not compile for {self.target.name}: {one.error}"
            for one in self.programs
            if one.error is not None
        ]
        for name, size in self.peaks.items():
            if size > self.limit:
                found.append(
                    f"{name} needs {size / GB:.1f} GB of the {self.limit / GB:.1f} GB that a run"
                    f" may use of each {self.target.kind}: it does not fit"
                )
        return found

    def text(self) -> str:
        """Returns the plan, the table of programs and the notes below it, as they are printed."""
        machine, sizes = self.target, [p.compiled or p.planned or 0 for p in self.programs]
        largest = max(sizes, default=0)
        unit, unit_name = (GB, "GB") if largest >= GB else (MB, "MB")

        def show(size: int | None) -> str:
            return "-" if size is None else f"{size / unit:.2f}"

        title = f"{self.plan.placement.spec}, compiled for {machine.name} ({machine.kind}):"
        title += f" {unit_name} on each device"
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for name in ("role", "program"):
            table.add_column(name, no_wrap=True)
        for name in ("calls a step", "planned", "compiled", "plan off by"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("attention")
        sent, graphs = [], []
        for one in self.programs:
            found, off, name = one.found, "-", f"{one.role} {one.name}"
            if one.compiled is not None and one.planned:
                off = f"{one.planned / one.compiled - 1:+.0%}"
            takes = "fails" if found is None else show(one.compiled)
            attention = "" if found is None else found.attention or ""
            calls = str(one.calls or one.otherwise)
            table.add_row(one.role, one.name, calls, show(one.planned), takes, off, attention)
            # As in `all-gather 165.9 GB (94%), all-reduce 7.1 MB`, without those below 0.1 MB.
            parts = []
            for kind, each in (found.collectives if found else {}).items():
                if each.bytes >= MB / 10:
                    share = f" ({each.overlapped / each.bytes:.0%})" if each.overlapped else ""
                    parts.append(f"{kind} {_size(each.bytes)}{share}")
            if parts:
                sent.append(f"  {name}: {', '.join(parts)}")
            if one.graphs is not None:
                inside, outside = one.graphs.inside, one.graphs.outside
                graphs.append(
                    f"{name}: CUDA graphs hold {inside} of the {inside + outside} kernels in its"
                    f" loops; the host launches the other {outside} one by one"
                )
        lines = [*table_lines(table), LEGEND]
        if sent:
            beside = "share that runs in parallel with computation"
            lines += [f"collectives of a call, each device ({beside}):", *sent]
        lines += graphs
        for name, size in self.peaks.items():
            lines.append(
                f"{name}: {_size(size)} at its peak by the compiled programs, of"
                f" {_size(self.limit)} that a run may use"
            )
        seconds = f"{sum(one.seconds for one in self.programs):.0f} s of compiling"
        lines.append(f"{len(self.programs)} programs, {seconds}, {PROCESSES} at a time")
        if self.failures:
            lines.append(f"verdict: would not run on {machine.name}:")
            lines += [f"  {failure}" for failure in self.failures]
        else:
            lines.append(f"verdict: compiles and fits on {machine.name}")
        if self.search:
            if self.suggested is not None:
                words = (f"{key}={shown(value)}" for key, value in self.suggested.changes)
                result = f"suggested, and compiled below: {' '.join(words)}"
            else:
                nothing = "suggested: nothing; no candidate compiles and fits"
                result = nothing if self.failures else "suggested: the run as configured"
            lines += ["", *candidate_lines(self.search[0], self.search[1:]), "", result]
        parts = [self.plan.text(), "\n".join(lines) + "\n"]
        if self.suggested is not None:
            parts.append(self.suggested.text())
        return "\n".join(parts)

    def json(self) -> str:
        """Returns one JSON object (docs/accelerators.md lists its keys); sizes are bytes on one
        device."""
        programs = [
            {
                "role": program.role,
                "name": program.name,
                "devices": program.devices,
                "planned_bytes": program.planned,
                "compiled_bytes": program.compiled,
                "calls_a_step": program.calls,
                "seconds_to_compile": round(program.seconds, 1),
                "error": program.error,
                "collectives": program.found and asdict(program.found)["collectives"] or {},
                "attention": program.found and program.found.attention,
                "graphs": program.graphs and asdict(program.graphs),
            }
            for program in self.programs
        ]
        record = {
            "target": self.target.name,
            "mesh": self.plan.placement.spec,
            "keys": dict(self.changes),
            "device": self.target.kind,
            "hosts": self.target.hosts,
            "limit_bytes": self.limit,
            "fits": not self.failures,
            "failures": self.failures,
            "pools": self.peaks,
            "programs": programs,
            "candidates": [
                {
                    "keys": dict(candidate.changes),
                    "step_seconds": candidate.step,
                    "stages": {".".join(stage): s for stage, s in candidate.stages.items()},
                    "pools": candidate.peaks,
                    "fits": candidate.fits,
                }
                for candidate in self.search
            ],
            "suggested": self.suggested and json.loads(self.suggested.json()),
        }
        return json.dumps(record, indent=1) + "\n"


def plan_for(config: Config, target: Machine) -> Plan:
    """Returns the plan of a run on a machine that is not present.

    Raises:
        UserError: the mesh needs more devices than the machine has, or does not suit the models.
    """
    return target_plan(config, needed_roles(config), target.target)


def check(
    config: Config,
    name: str,
    suggest: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Compiles the programs of a run for the machine of that name.

    Args:
        suggest: search for faster placements and keys, and compile the fastest that fits too.
        progress: called with a line before each program.

    Raises:
        UserError: no such machine, its compiler is not installed, the mesh does not suit it, or
            the teacher answers at an address, so that its model is unknown.
    """
    if config.served and "teacher" in needed_roles(config):
        served, one = next(iter(config.served.items()))
        raise UserError(
            f"--compile {name}: the actor's programs depend on the teacher's model, and"
            f" {config.teacher_key(served, 'address')}={one.address} is not asked for it: set it to"
            f" null and {config.teacher_key(served)} to a folder with that model's config.json"
        )
    prepare()
    with silenced():
        target = machine(name)
    config, on_hub = with_commits(config, dry=True)
    for note in on_hub:
        progress(note)
    report = compiled_report(config, target, progress)
    if not suggest:
        return report
    search = Search(report.plan, target, traffic(report))
    slowest = math.inf if report.failures else search.now.step / WORTH
    found = [each for each in search.best() if each.changes and each.step < slowest]
    report = replace(report, search=(search.now, *found))
    for candidate in found[:SHOWN]:
        progress(f"candidate: {' '.join(candidate.words)}")
        best = compiled_report(candidate.config, target, progress)
        if not best.failures:
            return replace(report, suggested=replace(best, changes=candidate.changes))
    return report


def traffic(report: Report) -> dict[str, Traffic]:
    """Maps each role to what its updates or scores send from a device in a step; those of a launch
    of decode steps are in a loop whose length only the run knows."""
    counted = counted_bytes(report.plan.config, report.plan.inputs, report.plan.axes)
    found = {}
    for role, count in counted.items():
        sent: dict[str, float] = defaultdict(float)
        hidden: dict[str, float] = defaultdict(float)
        for one in report.programs:
            if one.role == role and one.name in ("update", "score") and one.found is not None:
                for kind, each in one.found.collectives.items():
                    size = one.calls * each.sent(kind, one.devices)
                    sent[kind] += size
                    hidden[kind] += size * each.overlapped / max(each.bytes, 1)
        if count and (total := sum(sent.values())):
            shares = {kind: hidden[kind] / size for kind, size in sent.items() if size}
            found[role] = Traffic(total / count, shares)
    return found


def compiled_report(config: Config, target: Machine, progress: Callable[[str], None]) -> Report:
    """Plans a run for a machine and compiles its programs."""
    plan = plan_for(config, target)
    ended = threading.Event()
    given = (config, target.name, progress, ended)
    with ThreadPoolExecutor(PROCESSES) as pool:
        jobs = [pool.submit(_rows, *given, turn) for turn in range(PROCESSES)]
        try:
            parts = [job.result() for job in jobs]
        finally:
            ended.set()
    roles = list(plan.accounts)
    rows = sorted(chain(*parts), key=lambda row: roles.index(row.role))
    return Report(target, plan, tuple(rows), target.target.usable)


def _rows(
    config: Config, target: str, progress: Callable[[str], None], ended: threading.Event, turn: int
) -> list[Checked]:
    """Compiles the programs of a turn (`compiled_programs`) in another process; if that crashes, a
    new one compiles the rest. Once `ended` is set, the process is killed."""
    rows: list[Checked] = []
    while True:
        begun, begin = None, 0.0
        try:
            for row in apart(ended, compiled_programs, config, target, turn, len(rows)):
                if begun is not None:
                    rows.append(row)
                    begun = None
                else:
                    progress(f"compiling {row.role}: {row.name}")
                    begun, begin = row, time.monotonic()
            return rows
        except Died as error:
            if begun is None or ended.is_set():
                raise
            rows.append(replace(begun, seconds=time.monotonic() - begin, error=str(error)))


def compiled_programs(config: Config, target: str, turn: int, done: int) -> Iterator[Checked]:
    """Yields, in turn 0, the longest programs of a run, in turn 1 the others, but for those that
    are done; each twice: before its compilation, with what the plan says of it, and after."""
    prepare()
    there = machine(target)
    plan = plan_for(config, there)
    where = plan.placement.roles
    with compiling_for(plan.inputs.target):
        programs = RunPrograms(plan.config, plan.inputs, plan.axes, there.devices)
        mine = (program for program in programs if (program.name not in LONGEST) == turn)
        for program in islice(mine, done, None):
            name, devices = program.role, where[program.role].devices
            moment = f"{name}: {(*(program.phases or ()), program.name)[0]}"
            others = sum(
                entry.bytes
                for role, other in plan.accounts.items()
                if role != name and not set(where[role].devices).isdisjoint(devices)
                for entry in other.entries
                if entry.phase is None and entry.there(moment)
            )
            planned, calls = program.planned(plan.accounts[name]), program.calls
            row = Checked(name, program.name, len(devices), planned, None, others, 0.0, calls)
            row = replace(row, otherwise=program.otherwise)
            yield row
            begin = time.monotonic()
            try:
                compiled, graphs, held = compile_program(program, plan.inputs.target)
            except Exception as error:  # of whatever the target's compiler does not take
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                row = replace(row, error=reason)
            else:
                found = read(compiled.as_text())
                row = replace(row, compiled=held, found=found, graphs=graphs)
            yield replace(row, seconds=time.monotonic() - begin)


def compile_program(program: Program, target: Target) -> tuple[Any, Graphs | None, int]:
    """Returns the compiled program, what a decode launch on a GPU launches in its loops, and the
    bytes that the role holds on one device while the program runs.

    Raises whatever the compiler of the target does.
    """
    looks = target.platform == TPU or (program.name == "decode" and target.platform in GPU)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if looks else {}
        try:
            compiled = program.compile(options)
        except jax.errors.JaxRuntimeError as error:
            if NO_TILES not in str(error):
                raise
            compiled = program.compile(options | WITHOUT_TRITON)
        thunks = [path.read_text() for path in Path(folder).glob(THUNKS)]
        totals = [read_total(path.read_text()) for path in Path(folder).glob(MEMORY)]
    held = program.held(compiled, max(totals, default=None))
    return compiled, read_thunks(thunks[0]) if thunks else None, held


def _size(n: int) -> str:
    return f"{n / GB:,.1f} GB" if n >= GB else f"{n / MB:.1f} MB"
