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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import jax

from jaxrl.algorithms.methods import needed_roles
from jaxrl.aot.hlo import Collective, Graphs, read_program, read_thunks, read_total
from jaxrl.aot.machine import machine, prepare
from jaxrl.aot.subprocess_compile import Died, apart
from jaxrl.aot.suggest import PREDICTED, SHOWN, WORTH, Search, Traffic, candidate_lines, sent_bytes
from jaxrl.config.schema import Config
from jaxrl.config.section import show_value
from jaxrl.errors import UserError
from jaxrl.models.kernels import GPU, TPU, Target, compiling_for
from jaxrl.plan import target_plan
from jaxrl.plan.declarations import RunPrograms
from jaxrl.plan.live_arrays import Array
from jaxrl.plan.peaks import largest_line, planned_bytes, size_text, walk
from jaxrl.plan.plan_inputs import GB, MB
from jaxrl.plan.search import Candidate, Change
from jaxrl.plan.table import Plan
from jaxrl.process.streams import silence_stderr, table_lines
from jaxrl.roles.declared import Program
from jaxrl.run.names import with_commits
from jaxrl.sampling.decode import NO_MERGING
from jaxrl.sharding.targets import TargetMachine
from jaxrl.teacher.kinds import kind_of

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
    " the compiler\ncalls a step: eval where only evaluations call it, waits where a sample has to"
    " wait for pages"
)


@dataclass(frozen=True)
class Checked:
    """A program after its compilation. Bytes are those that its role holds on a device while it
    runs."""

    role: str
    name: str
    devices: int
    planned_bytes: int
    """By the plan."""
    calls_a_step: int
    """0 if no training step calls it."""
    otherwise: str = "eval"
    """`Program.otherwise`."""
    others: int = 0
    """Bytes that other roles hold on the same device meanwhile."""
    compiled_bytes: int | None = None
    """By the compiler; None if the program does not compile."""
    error: str | None = None
    """Why it does not compile."""
    seconds_to_compile: float = 0.0
    """And to lower it."""
    largest: tuple[Array, ...] = ()
    """The largest arrays that it makes and holds at its peak, by the walk over its equations."""
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    attention: str | None = None
    """The kernel (`hlo.Compiled.attention`)."""
    graphs: Graphs | None = None
    """CUDA graphs of a decode launch; None for other programs and platforms."""


@dataclass(frozen=True)
class Report:
    """The result of compiling a run for a target machine."""

    target: TargetMachine
    plan: Plan
    programs: tuple[Checked, ...]
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
        for pool in (pool for pool in self.plan.pools if pool.pool.devices):
            sizes = [
                program.compiled_bytes + program.others
                for program in self.programs
                if program.role in pool.pool.roles and program.compiled_bytes is not None
            ]
            found[pool.pool.name] = max(sizes, default=pool.bytes)
        return found

    @property
    def failures(self) -> list[str]:
        """Returns a message for each program that does not compile, and for each pool that does not
        fit."""
        limit = self.target.usable
        found = [
            f"{one.role}: {one.name} does not compile for {self.target.name}: {one.error}"
            for one in self.programs
            if one.error is not None
        ]
        return found + [
            f"{name} needs {size / GB:.1f} GB of the {limit / GB:.1f} GB that a run may use of each"
            f" {self.target.kind}: it does not fit"
            for name, size in self.peaks.items()
            if size > limit
        ]

    def text(self) -> str:
        """Returns the plan, the table of programs and the notes below it, as they are printed."""
        target = self.target
        largest = max((p.compiled_bytes or p.planned_bytes for p in self.programs), default=0)
        unit, unit_name = (GB, "GB") if largest >= GB else (MB, "MB")
        title = f"{self.plan.placement.spec}, compiled for {target.name} ({target.kind}):"
        title += f" {unit_name} on each device"
        rows, sent, graphs = [], [], []
        for one in self.programs:
            planned, compiled, off = one.planned_bytes, one.compiled_bytes, "-"
            if compiled is not None:
                off = f"{planned / compiled - 1:+.0%}"
            sizes = (
                "fails" if size is None else f"{size / unit:.2f}" for size in (planned, compiled)
            )
            calls = str(one.calls_a_step or one.otherwise)
            rows.append((one.role, one.name, calls, *sizes, off, one.attention or ""))
            # As in `all-gather 165.9 GB (94%), all-reduce 7.1 MB`, without those below 0.1 MB.
            parts = []
            for kind, each in one.collectives.items():
                if each.bytes >= MB / 10:
                    share = f" ({each.overlapped / each.bytes:.0%})" if each.overlapped else ""
                    parts.append(f"{kind} {size_text(each.bytes)}{share}")
            if parts:
                sent.append(f"  {one.role} {one.name}: {', '.join(parts)}")
            if one.graphs is not None:
                inside, outside = one.graphs.inside, one.graphs.outside
                graphs.append(
                    f"{one.role} {one.name}: CUDA graphs hold {inside} of the {inside + outside}"
                    f" kernels in its loops; the host launches the other {outside} one by one"
                )
        figures = "calls a step", "planned", "compiled", "plan off by"
        columns = ("role", "program", *figures, "attention")
        lines = [*table_lines(title, columns, figures, rows), LEGEND]
        if sent:
            beside = "share that runs in parallel with computation"
            lines += [f"collectives of a call, each device ({beside}):", *sent]
        lines += graphs
        lines += [
            f"{name}: {size_text(size)} at its peak by the compiled programs, of"
            f" {size_text(target.usable)} that a run may use"
            for name, size in self.peaks.items()
        ]
        lines += self._largest_lines()
        seconds = f"{sum(one.seconds_to_compile for one in self.programs):.0f} s of compiling"
        lines.append(f"{len(self.programs)} programs, {seconds}, {PROCESSES} at a time")
        failures = [f"  {failure}" for failure in self.failures]
        verdict = f"would not run on {target.name}:" if failures else "compiles and fits on"
        lines += [f"verdict: {verdict}{'' if failures else f' {target.name}'}", *failures]
        if self.search:
            result = "suggested: the run as configured"
            if self.suggested is not None:
                words = (f"{key}={show_value(value)}" for key, value in self.suggested.changes)
                result = f"suggested, and compiled below: {' '.join(words)}"
            elif failures:
                result = "suggested: nothing; no candidate compiles and fits"
            lines += ["", *candidate_lines(self.search[0], self.search[1:]), "", result]
        parts = [self.plan.text(), "\n".join(lines) + "\n"]
        return "\n".join(parts + ([self.suggested.text()] if self.suggested else []))

    def _largest_lines(self) -> list[str]:
        """Returns, for the fullest program of each role, what fills the device beside its
        arguments, and the lines of jaxrl that make it."""
        fullest: dict[str, Checked] = {}
        for one in sorted(self.programs, key=lambda one: one.compiled_bytes or one.planned_bytes):
            fullest[one.role] = one
        lines = (largest_line(one.role, one.name, one.largest) for one in fullest.values())
        return list(chain(*lines))

    def json(self) -> str:
        """Returns one JSON object (docs/accelerators.md lists its keys); sizes are bytes on one
        device."""
        programs = [
            {key: value for key, value in asdict(program).items() if not key.startswith("other")}
            for program in self.programs
        ]
        candidates = [
            {
                "keys": dict(candidate.changes),
                "step_seconds": candidate.step,
                "stages": {".".join(stage): s for stage, s in candidate.stages.items()},
                "pools": candidate.peaks,
                "fits": candidate.fits,
            }
            for candidate in self.search
        ]
        record = {
            "target": self.target.name,
            "mesh": self.plan.placement.spec,
            "keys": dict(self.changes),
            "device": self.target.kind,
            "hosts": self.target.hosts,
            "limit_bytes": self.target.usable,
            "fits": not self.failures,
            "failures": self.failures,
            "pools": self.peaks,
            "programs": programs,
            "candidates": candidates,
            "suggested": self.suggested and json.loads(self.suggested.json()),
        }
        return json.dumps(record, indent=1) + "\n"


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
    if (unknown := kind_of(config).unknown_model(config)) and "teacher" in needed_roles(config):
        raise UserError(
            f"--compile {name}: the actor's programs depend on the teacher's model, and {unknown}"
        )
    prepare()
    with silence_stderr():
        target = machine(name)
    config, on_hub = with_commits(config, dry=True)
    for note in on_hub:
        progress(note)
    report = _compiled(config, target, progress)
    if not suggest:
        return report
    search = Search(report.plan, target, traffic(report))
    slowest = math.inf if report.failures else search.now.step / WORTH
    found = [each for each in search.best() if each.changes and each.step < slowest]
    report = replace(report, search=(search.now, *found))
    for candidate in found[:SHOWN]:
        progress(f"candidate: {' '.join(candidate.words)}")
        best = _compiled(candidate.config, target, progress)
        if not best.failures:
            return replace(report, suggested=replace(best, changes=candidate.changes))
    return report


def traffic(report: Report) -> dict[str, Traffic]:
    """Maps each role to what its updates or scores send from a device in a step; those of a launch
    of decode steps are in a loop whose length only the run knows."""
    sent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    hidden: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in report.programs:
        if one.role in PREDICTED and one.name in ("update", "score"):
            for kind, each in one.collectives.items():
                size = one.calls_a_step * each.sent(kind, one.devices)
                sent[one.role][kind] += size
                hidden[one.role][kind] += size * each.overlapped / max(each.bytes, 1)
    found = {}
    for role, sizes in sent.items():
        counted = sent_bytes(report.plan.setting, role).total
        if counted and (total := sum(sizes.values())):
            shares = {kind: hidden[role][kind] / size for kind, size in sizes.items() if size}
            found[role] = Traffic(total / counted, shares)
    return found


def _compiled(config: Config, target: TargetMachine, progress: Callable[[str], None]) -> Report:
    """Plans a run for a machine and compiles its programs."""
    plan = target_plan(config, needed_roles(config), target, room=True)
    ended = threading.Event()
    given = (config, target.name, progress, ended)
    with ThreadPoolExecutor(PROCESSES) as pool:
        jobs = [pool.submit(_rows, *given, turn) for turn in range(PROCESSES)]
        try:
            rows = list(chain(*(job.result() for job in jobs)))
        finally:
            ended.set()
    roles = list(plan.accounts)
    return Report(target, plan, tuple(sorted(rows, key=lambda row: roles.index(row.role))))


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
            took = round(time.monotonic() - begin, 1)
            rows.append(replace(begun, seconds_to_compile=took, error=str(error)))


def compiled_programs(config: Config, target: str, turn: int, done: int) -> Iterator[Checked]:
    """Yields, in turn 0, the longest programs of a run, in turn 1 the others, but for those that
    are done; each twice: before its compilation, with what the plan says of it, and after."""
    prepare()
    there = machine(target)
    plan = target_plan(config, needed_roles(config), there)
    where = plan.placement.roles
    with compiling_for(plan.inputs.target):
        programs = RunPrograms(plan.setting, there.compiled)
        mine = (program for program in programs if (program.name not in LONGEST) == turn)
        for program in islice(mine, done, None):
            role, devices = program.role, where[program.role].devices
            beside = [r for r in plan.accounts if r != role]
            beside = [r for r in beside if not {*where[r].devices}.isdisjoint(devices)]
            others = programs.held_by(beside, program.stage)
            planned = planned_bytes(program, plan.inputs.target)
            row = Checked(role, program.name, len(devices), planned, program.calls)
            largest = walk(program, plan.inputs.target).arrays
            row = replace(row, otherwise=program.otherwise, others=others, largest=largest)
            yield row
            begin = time.monotonic()
            try:
                compiled, graphs, held = compile_program(program, plan.inputs.target)
            except Exception as error:  # of whatever the target's compiler does not take
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                row = replace(row, error=reason)
            else:
                found = read_program(compiled.as_text())
                row = replace(
                    row,
                    compiled_bytes=held,
                    collectives=found.collectives,
                    attention=found.attention,
                    graphs=graphs,
                )
            yield replace(row, seconds_to_compile=round(time.monotonic() - begin, 1))


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
