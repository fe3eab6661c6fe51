"""The section of a page that holds the plan's memory against what was measured."""

from __future__ import annotations

from typing import get_args

from jaxrl.plan.memory import Column
from jaxrl.report import memory
from jaxrl.report.read import RunFiles
from jaxrl.report.tables import bytes_text, missing, table, text

COLUMNS = get_args(Column)


def section(run: RunFiles) -> str:
    if run.plan is None:
        return missing("plan.json is not there: a run writes it when it starts")
    pools = memory.pools(run)
    scale = max(1, *(figure for pool in pools for figure in (pool.peak, pool.measured or 0)))
    kinds = "".join(f'<span class="chip"><i class="{c}"></i>{c}</span>' for c in COLUMNS)
    bars = "".join(_bars(pool, scale) for pool in pools)
    return f"""<p>{kinds}<span class="muted">bytes on the fullest device</span></p>
<div class="memory">{bars}</div>
{_roles(run)}"""


def _bars(pool: memory.PoolMemory, scale: float) -> str:
    """What was planned of a pool, in parts, and what was measured; `scale` bytes are the width."""
    limit = "" if pool.limit is None else f"; a device has {bytes_text(pool.limit)}"
    head = (
        f'<div class="pool"><b>{text(pool.name)}</b>, {text(pool.devices)}:'
        f' at its peak <i>{text(pool.moment)}</i><span class="muted">{limit}</span></div>'
    )
    pieces = "".join(_piece(part, scale) for part in pool.parts if part.bytes)
    if pool.limit is not None and pool.limit <= scale:
        pieces += f'<b style="left:{pool.limit / scale:.2%}" title="limit of the device"></b>'
    planned = f'<span>planned</span><div class="bar">{pieces}</div>{bytes_text(pool.peak)}'
    if pool.measured is None:
        told = '<span class="muted">nothing was measured</span><span></span>'
    else:
        against = f"{bytes_text(pool.measured)}, {pool.measured / pool.peak:.0%} of the plan"
        width = f"width:{pool.measured / scale:.2%}"
        told = f'<div class="bar"><i class="measured" style="{width}"></i></div>{against}'
    return f"{head}{planned}<span>measured</span>{told}"


def _piece(part: memory.Part, scale: float) -> str:
    told = f"{part.role}: {part.name}, {bytes_text(part.bytes)}"
    width = f"width:{part.bytes / scale:.3%}"
    return f'<i class="{text(part.column)}" style="{width}" title="{text(told)}"></i>'


def _roles(run: RunFiles) -> str:
    rows = [
        (
            text(role.role),
            text(role.axes),
            text(phase or "resident"),
            text(part.column),
            text(part.name),
            bytes_text(part.bytes),
        )
        for role in memory.roles(run)
        for phase, part in role.parts
    ]
    heads = ["role", "mesh", "when", "kind", "part", "bytes"]
    return f"<details><summary>All parts of the plan</summary>{table(heads, rows)}</details>"
