"""The plan of a run: a table for people, and `plan.json`, which the report holds against what was
measured."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, get_args

from pydantic import BaseModel, Field

from jaxrl.config.schema import Config
from jaxrl.data.lengths import Lengths
from jaxrl.errors import counted
from jaxrl.plan.advice import relief
from jaxrl.plan.plan_inputs import (
    GB,
    MB,
    Account,
    Column,
    Entry,
    PlanInputs,
    PoolPeak,
    Setting,
    Size,
)
from jaxrl.process.json_types import JsonObject, parse_json
from jaxrl.process.streams import WIDTH, table_lines
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import DeviceFacts
from jaxrl.sharding.placement import Placement, device_list

PLAN_FILE = "plan.txt"
PLAN_DATA_FILE = "plan.json"
LINE = 18
"""Most characters of a worker's name on one line: a long one takes no room from the figures."""
TABLE_WIDTH = 90
"""Columns of a terminal from which on the plan is a table."""
HOLD = "\N{NO-BREAK SPACE}"
ROLE = 10
"""Characters of a role's name in a block, and of what its lines are indented by."""
TITLES = ("weights", "optim", "KV", "activ", "peak", "limit")
BRIEF_LINES = 10
"""Most lines that a run on a CPU prints of its plan."""
SLACK = 1.25
"""How much too high a plan is allowed to be before it refuses a run."""


@dataclass(frozen=True)
class Plan:
    """Where everything goes, what it takes, and what would help."""

    config: Config
    """Of the run, with the dtypes that these devices compute in."""
    setting: Setting
    """Where its roles are, with the mesh axes that the plan chose, and the models."""
    devices: tuple[DeviceFacts, ...]
    """What the numbers in `placement` count (`Visible.devices`); empty in a plan for another
    machine."""
    launcher: str
    """`local` or `ray`."""
    accounts: Mapping[str, Account]
    pools: tuple[PoolPeak, ...]
    notes: tuple[str, ...]
    verdict: tuple[str, ...]
    advice: tuple[str, ...]
    refusals: tuple[str, ...] = ()
    """What the run would refuse before it reads a weight; `dry_run` looks for it."""
    lengths: tuple[Lengths, ...] = ()
    """Of the data, by source, where they were measured."""
    fits_elsewhere: bool | None = None
    """Where no device is here that such a model is trained on, so that GPUs elsewhere decide and
    not this host: whether one of their usual sizes is large enough. None: this host decides."""

    @property
    def placement(self) -> Placement:
        return self.inputs.placement

    @property
    def inputs(self) -> PlanInputs:
        return self.setting.inputs

    @property
    def axes(self) -> Mapping[str, Axes]:
        """Returns the mesh axes of each role of the run."""
        return self.setting.axes

    @property
    def peaks(self) -> dict[str, int]:
        """Maps each role to the peak bytes of the fullest device that it is on, all roles there
        counted: what a device's own statistics would say."""
        return {r: p.bytes for p in self.pools for r in p.pool.roles if r in self.accounts}

    def relief(self, role: str) -> list[str]:
        """Returns keys to change where a role runs out of memory though the plan says otherwise."""
        return relief(self.setting.config, self.inputs, role)

    @property
    def runs(self) -> tuple[str, ...]:
        """Returns every role of the run, those without devices too."""
        placed = self.placement.roles.items()
        return tuple(r for r, where in placed if r in self.axes or not where.devices)

    @property
    def fits(self) -> bool:
        """Returns True where no device is known to be too small."""
        return all(pool.fits for pool in self.pools)

    @property
    def misfit(self) -> tuple[str, ...]:
        """Returns the verdict and what to change, where a device is known to be too small: of the
        target, of this host, or of the GPUs that a plan on a host without any is made for."""
        if self.fits if self.fits_elsewhere is None else self.fits_elsewhere:
            return ()
        verdict = self.verdict[0] if self.fits_elsewhere is None else self.verdict[-1]
        return (verdict, *(self.advice[:3] or ("see the table above",)))

    @property
    def hopeless(self) -> bool:
        """Returns True where it would not fit even if the figures were `SLACK` times too high."""
        sizes = [pool.bytes for pool in self.pools]
        if self.inputs.hosts:
            return any(host.needed(sizes) > SLACK * host.limit for host in self.inputs.hosts)
        return any(p.limit is not None and p.bytes > SLACK * p.limit for p in self.pools)

    def text(self, width: int = WIDTH) -> str:
        """Returns the table, notes, verdict and advice, for the console and for `plan.txt`.

        Args:
            width: columns; where they are too few for a table, each role has a block of lines.
        """
        refused = (f"the run would be refused: {line}" for line in self.refusals)
        lines = (*self.notes, *self.verdict, *self.advice, *refused)
        if self.fits_elsewhere is not None:  # the last word is about GPUs
            lines = (*self.notes, *self.verdict[:-1], *self.advice, *refused, self.verdict[-1])
        return "\n".join((*self._role_lines(width), *lines)) + "\n"

    def console_text(self, width: int = WIDTH) -> str:
        """Writes the plan for the console: all of it on accelerators. On a CPU the roles and
        the verdict, and notes up to `BRIEF_LINES`; `plan.txt` has the others."""
        if not self.inputs.on_cpu:
            return self.text(width)
        roles, verdict = self._role_lines(width, brief=True), self.verdict[0]
        notes = self.notes[: max(BRIEF_LINES - len(roles) - 1, 0)]
        if hidden := len(self.notes) - len(notes):
            verdict += f" ({counted(hidden, 'more note')} in plan.txt)"
        return "\n".join((*roles, *notes, verdict)) + "\n"

    def _role_lines(self, width: int, brief: bool = False) -> list[str]:
        """Returns the lines of a table with a row for each role, and one for each pool that several
        roles share; in fewer than `TABLE_WIDTH` columns, a block of lines for each.

        Args:
            brief: each row is one line, and none is below the titles.
        """
        rows, largest = list(self._rows()), max(pool.bytes for pool in self.pools)
        title = f"{self.placement.spec}: {'GB' if largest >= GB else 'MB'} on each device"
        if brief:
            rows = [[cell.partition("\n")[0] for cell in row] for row in rows]
        if width < TABLE_WIDTH:
            blocks = (line for row in rows for line in _block(row, width))
            return [*textwrap.wrap(title, width), *blocks]
        columns = ("pool", "worker", "role", "devices", "process", "mesh", *TITLES)
        options = {"collapse_padding": True, "pad_edge": False}
        lines = table_lines(title, columns, TITLES, rows, **options)
        return [*lines[:2], *lines[3:]] if brief else lines

    def _rows(self) -> Iterator[list[str]]:
        unit = GB if max(pool.bytes for pool in self.pools) >= GB else MB

        def show(n: int | None) -> str:
            if not n:
                return "?" if n is None else "-"
            return f"{n / unit:.2f}" if n < unit else f"{n / unit:.1f}"

        for index, memory in enumerate(self.pools):
            pool, name = memory.pool, memory.pool.name
            if len(name) > LINE:  # in lines that end with a `+`
                name = textwrap.fill(name.replace("+", "+ "), LINE).replace("+ ", "+")
            # Never below 0, as what others leave of a shared memory may be.
            limit = show(None if memory.limit is None else max(memory.limit, 0))
            for role in pool.roles:
                head = (str(index), name) if role == pool.roles[0] else ("", "")
                sizes, account = ["-"] * len(TITLES[:-1]), self.accounts.get(role)
                if account is not None:
                    columns = [account.column(column) for column in get_args(Column)]
                    sizes = [show(n) for n in (*columns, account.peak)]
                yield [*head, role, *self._where(role), *sizes, limit]
            if len(pool.roles) > 1:
                empty = [""] * len(TITLES[:-2])
                yield ["", "", "together", "", "", "", *empty, show(memory.bytes), limit]

    def _where(self, role: str) -> tuple[str, str, str]:
        """Returns the devices (platform, ids), processes and mesh of a role."""
        numbers = self.placement.roles[role].devices
        if not numbers:
            return "none", "-", "-"
        mesh = str(self.axes[role]) if role in self.axes else "not used"
        if not self.devices:
            return device_list(numbers), "?", mesh
        mine = [self.devices[i] for i in numbers]
        where = device_list({device.process_index for device in mine})
        hosts = dict.fromkeys(d.host for d in mine if isinstance(d, ClusterDevice))
        if hosts:
            where = f"{where} ({', '.join(hosts)})"
        return f"{mine[0].platform} {device_list(d.id for d in mine)}", where, mesh


def _block(row: list[str], width: int) -> list[str]:
    """Returns the cells of a row in lines: the role and where it runs, its peak and the limit, and
    what the peak is made of, cells without a figure left out."""
    role, devices, process, mesh = row[2:6]
    *parts, peak, limit = row[6:]
    where = ", ".join(filter(None, (devices, mesh, process and f"process {process}")))
    cells = [f"peak {peak} of {limit}"]
    cells += [f"{t} {x}" for t, x in zip(TITLES, parts, strict=False) if x not in ("", "-")]
    indent = " " * ROLE
    lines = [f"{role:{ROLE}}{where}".rstrip()] if where else []
    begin = indent if where else f"{role:{ROLE}}"
    text = ", ".join(cell.replace(" ", HOLD) for cell in cells)  # a name stays with its figure
    wrapped = textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent)
    return lines + [line.replace(HOLD, " ") for line in wrapped]


def plan_json(plan: Plan) -> str:
    """Writes one JSON object. All sizes are bytes on one device.

    `pools`: name, roles, devices (numbers of the placement), device (`gpu`, or null in a plan for
    another machine), peak, moment (role and phase then, as `actor: loss`), limit (null where nobody
    knows). `roles`: role, pool (index), devices, axes (null without a mesh), peak (null where
    nothing is counted), parts: column, name, bytes, phase (null: resident), away (moments at which
    a resident one is not there). `lengths`: `Lengths.to_json` of each source of the data.
    """
    pools = [
        {
            "name": peak.pool.name,
            "roles": peak.pool.roles,
            "devices": list(peak.pool.devices),
            "device": plan.devices[0].platform if plan.devices else None,
            "peak": peak.bytes,
            "moment": peak.moment,
            "limit": peak.limit,
        }
        for peak in plan.pools
    ]
    roles = []
    for role in plan.runs:
        where, account, axes = plan.placement.roles[role], plan.accounts.get(role), plan.axes
        entries = () if account is None else account.entries
        roles.append(
            {
                "role": role,
                "pool": where.pool,
                "devices": list(where.devices),
                "axes": axes[role]._asdict() if role in axes else None,
                "peak": None if account is None else account.peak,
                "parts": [{**asdict(e), "away": sorted(e.away)} for e in entries],
            }
        )
    whole = {"mesh": plan.placement.spec, "launcher": plan.launcher, "pools": pools, "roles": roles}
    whole |= {"lengths": [one.to_json() for one in plan.lengths]}
    return json.dumps(whole | {"notes": [*plan.notes, *plan.verdict]}, indent=1) + "\n"


class _Role(BaseModel):
    role: str
    pool: int
    devices: list[int]
    axes: dict[str, int] | None
    peak: Size | None
    parts: list[Entry]


class _Pool(BaseModel):
    name: str
    roles: list[str]
    devices: list[int]
    device: str | None
    peak: Size
    moment: str
    limit: Size | None


class _Record(BaseModel):
    mesh: str
    launcher: str
    pools: Annotated[list[_Pool], Field(min_length=1)]
    roles: list[_Role]
    notes: list[str]


def read_plan(text: str | bytes) -> JsonObject:
    """Reads the object that `plan_json` wrote. Raises ValueError for any other text."""
    value: JsonObject = parse_json(text)
    # Paths may have bytes that are no text, which pydantic does not read.
    readable = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    plan = _Record.model_validate_json(readable, strict=True)
    if any(not 0 <= role.pool < len(plan.pools) for role in plan.roles):
        raise ValueError("a role is in no pool")
    return value
