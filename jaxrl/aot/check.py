"""`--dry-run --compile TARGET`: every program of a run, compiled by the compiler of a machine that
is not here, beside what the plan expects of it.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from jaxrl.algorithms.methods import needed_roles
from jaxrl.aot.hlo import Compiled, read
from jaxrl.aot.machine import Machine, machine, prepare
from jaxrl.aot.programs import Program, RunPrograms
from jaxrl.config.schema import Config
from jaxrl.models.kernels import compiling_for
from jaxrl.plan import WIDTH, Plan, jax_share, make_plan
from jaxrl.plan.inputs import GB
from jaxrl.process.quiet_import import silenced
from jaxrl.sharding.mesh import Visible

MB = 1e6
SHORT = {
    "all-gather": "gather",
    "all-reduce": "reduce",
    "reduce-scatter": "scatter",
    "collective-permute": "permute",
    "all-to-all": "all-to-all",
}
"""Collectives as the table names them."""


@dataclass(frozen=True)
class Checked:
    """A program after its compilation."""

    role: str
    name: str
    devices: int
    planned: int
    """Bytes on a device while it runs, as the plan has it: of its role alone."""
    compiled: int | None
    """The same from the compiled program; None where it does not compile."""
    seconds: float
    """That lowering and compiling took."""
    calls: float
    """In a step of training."""
    error: str | None = None
    """Why it does not compile."""
    found: Compiled | None = None


@dataclass(frozen=True)
class Report:
    """What a target's compiler says of a run."""

    target: Machine
    plan: Plan
    programs: tuple[Checked, ...]
    limit: int
    """Bytes of a device that a run may use."""

    @property
    def peaks(self) -> dict[str, int]:
        """Pool -> bytes of its fullest device: the plan's peak, corrected by the programs of its
        roles."""
        found = {}
        for pool in self.plan.pools:
            off = [
                program.compiled - program.planned
                for program in self.programs
                if program.role in pool.pool.roles and program.compiled is not None
            ]
            alone = [
                program.compiled
                for program in self.programs
                if program.role in pool.pool.roles and program.compiled is not None
            ]
            others = pool.bytes - max((self._planned(role) for role in pool.pool.roles), default=0)
            found[pool.pool.name] = max(alone, default=pool.bytes) + max(others, 0)
            if not off:
                found[pool.pool.name] = pool.bytes
        return found

    def _planned(self, role: str) -> int:
        account = self.plan.accounts.get(role)
        return 0 if account is None else account.peak

    @property
    def failures(self) -> list[str]:
        """What does not compile, and which pools do not fit, in words."""
        found = [
            f"{program.role}: {program.name} does not compile for {self.target.name}:"
            f" {program.error}"
            for program in self.programs
            if program.error is not None
        ]
        for name, size in self.peaks.items():
            if size > self.limit:
                found.append(
                    f"{name} needs {size / GB:.1f} GB of the {self.limit / GB:.1f} GB that a run"
                    f" may use of a {self.target.kind}: it does not fit"
                )
        return found

    def text(self, width: int = WIDTH) -> str:
        """The table and what is to be said of it."""
        out = io.StringIO()
        console = Console(
            file=out, width=width, color_system=None, highlight=False, force_jupyter=False
        )
        console.print(_table(self))
        lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
        lines += _notes(self)
        return "\n".join(lines) + "\n"

    def json(self) -> str:
        """One JSON object; sizes are bytes on one device."""
        programs = []
        for program in self.programs:
            found = program.found
            programs.append(
                {
                    "role": program.role,
                    "name": program.name,
                    "devices": program.devices,
                    "planned_bytes": program.planned,
                    "compiled_bytes": program.compiled,
                    "calls_a_step": program.calls,
                    "seconds_to_compile": round(program.seconds, 1),
                    "error": program.error,
                    "collectives": {}
                    if found is None
                    else {kind: asdict(c) for kind, c in found.collectives.items()},
                    "attention": None if found is None else found.attention,
                    "outside_graphs": None if found is None else found.outside_graphs,
                }
            )
        record = {
            "target": self.target.name,
            "device": self.target.kind,
            "hosts": self.target.hosts,
            "limit_bytes": self.limit,
            "fits": not self.failures,
            "failures": self.failures,
            "pools": self.peaks,
            "programs": programs,
        }
        return json.dumps(record, indent=1) + "\n"


def plan_for(config: Config, target: Machine) -> Plan:
    """The plan of a run on a machine that is not here."""
    visible = Visible(target.devices, None)
    limit = target.memory * (jax_share() if target.is_gpu else 1)
    return make_plan(config, needed_roles(config), lambda needed: visible, limit / GB)


def check(config: Config, name: str, progress: Callable[[str], None] = lambda line: None) -> Report:
    """Compiles the programs of a run for the machine of that name.

    Args:
        progress: called with a line before each program.

    Raises:
        UserError: no such machine, its compiler is not installed, or the mesh does not suit it.
    """
    prepare()
    with silenced():
        target = machine(name)
    plan = plan_for(config, target)
    checked = []
    with compiling_for(plan.inputs.target):
        for program in RunPrograms(plan.config, plan.inputs, plan.axes, target.devices):
            progress(f"compiling {program.role}: {program.name}")
            checked.append(_checked(program, plan))
    limit = plan.pools[0].limit
    assert limit is not None, "the machine has a size"
    return Report(target, plan, tuple(checked), limit)


def _checked(program: Program, plan: Plan) -> Checked:
    account = plan.accounts[program.role]
    more = account.phases()
    planned = account.resident + max(more.get(phase, 0) for phase in program.phases)
    devices = len(plan.placement.roles[program.role].devices)
    begin = time.monotonic()
    try:
        with silenced():
            compiled = program.compile()
    except Exception as error:  # of whatever the target's compiler does not take
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        seconds = time.monotonic() - begin
        return Checked(
            program.role, program.name, devices, planned, None, seconds, program.calls, reason
        )
    return Checked(
        program.role,
        program.name,
        devices,
        planned,
        program.held(compiled),
        time.monotonic() - begin,
        program.calls,
        None,
        read(compiled.as_text()),
    )


def _table(report: Report) -> Table:
    machine = report.target
    table = Table(
        box=box.SIMPLE,
        title=f"{report.plan.placement.spec}, compiled for {machine.name} ({machine.kind}):"
        " GB on each device",
        title_justify="left",
    )
    for title in ("role", "program"):
        table.add_column(title, no_wrap=True)
    for title in ("calls/step", "planned", "compiled", "off"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("MB of collectives a call (overlapped)", "attention"):
        table.add_column(title)
    for program in report.programs:
        if program.compiled is None:
            table.add_row(program.role, program.name, "", f"{program.planned / GB:.2f}", "fails")
            continue
        assert program.found is not None
        off = program.compiled / max(program.planned, 1) - 1
        table.add_row(
            program.role,
            program.name,
            f"{program.calls:.3g}",
            f"{program.planned / GB:.2f}",
            f"{program.compiled / GB:.2f}",
            f"{off:+.0%}",
            _collectives(program.found),
            program.found.attention or "",
        )
    return table


def _collectives(found: Compiled) -> str:
    parts = []
    for kind, each in found.collectives.items():
        if each.bytes < 1e5:
            continue
        share = f" ({each.overlapped / each.bytes:.0%})" if each.overlapped else ""
        parts.append(f"{SHORT[kind]} {each.bytes / MB:,.0f}{share}")
    return ", ".join(parts) or "-"


def _notes(report: Report) -> Iterator[str]:
    for program in report.programs:
        if program.found is not None and program.found.outside_graphs:
            yield (
                f"{program.role}: {program.name}: {program.found.outside_graphs} kernels of its"
                " loops stand outside CUDA graphs: the host launches each"
            )
    for name, size in report.peaks.items():
        yield (
            f"{name}: {size / GB:.1f} GB at its peak by the compiled programs, of"
            f" {report.limit / GB:.1f} GB that a run may use"
        )
    seconds = sum(program.seconds for program in report.programs)
    yield f"{len(report.programs)} programs compiled in {seconds:.0f} s"
    if not report.failures:
        yield f"verdict: compiles and fits on {report.target.name}"
