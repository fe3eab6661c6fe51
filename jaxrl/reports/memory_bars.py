"""The section of a page that holds the plan's memory against what was measured."""

from __future__ import annotations

from jaxrl.reports import memory
from jaxrl.reports.read import RunFiles
from jaxrl.reports.tables import bytes_text, missing, table, text


def section(run: RunFiles) -> str:
    if run.plan is None:
        return missing("plan.json is not there: a run writes it when it starts")
    return "\n".join((_pools(run), _roles(run), _other_memory(run)))


def _pools(run: RunFiles) -> str:
    """Bars of the fullest device of each pool, all to one scale."""
    found = memory.pools(run)
    figures = [pool.peak for pool in found] + [m.bytes for pool in found for m in pool.measured]
    scale = max(figures, default=1) or 1
    parts = []
    for pool in found:
        limit = "" if pool.limit is None else f"; a device has {bytes_text(pool.limit)}"
        parts.append(
            f'<div class="pool"><b>{text(pool.name)}</b>, {text(pool.devices)}:'
            f' at its peak <i>{text(pool.moment)}</i><span class="muted">{limit}</span></div>'
        )
        pieces = "".join(_piece(part, scale) for part in pool.parts if part.bytes)
        mark = ""
        if pool.limit is not None and pool.limit <= scale:
            mark = f'<b style="left:{pool.limit / scale:.2%}" title="limit"></b>'
        planned = bytes_text(pool.peak)
        parts.append(f'<span>planned</span><div class="bar">{pieces}{mark}</div>{_right(planned)}')
        for told in pool.measured:
            width = f"width:{told.bytes / scale:.2%}"
            against = f"{bytes_text(told.bytes)}, {told.bytes / pool.peak:.0%} of the plan"
            parts.append(
                f'<span>measured</span><div class="bar"><i class="measured" style="{width}"'
                f' title="{text(told.name)}"></i></div>{_right(against)}'
            )
        if not pool.measured:
            parts.append(
                '<span>measured</span><span class="muted">not told by this platform</span>'
            )
            parts.append("<span></span>")
    kinds = "".join(
        f'<span class="chip"><i class="{kind}"></i>{kind}</span>'
        for kind in ("weights", "gradients", "optimizer", "cache", "activations")
    )
    return f'<p>{kinds}<span class="muted">bytes on the fullest device</span></p>' + (
        f'<div class="memory">{"".join(parts)}</div>'
    )


def _piece(part: memory.Part, scale: float) -> str:
    told = f"{part.role}: {part.name}, {bytes_text(part.bytes)}"
    width = f"width:{part.bytes / scale:.3%}"
    return f'<i class="{text(part.column)}" style="{width}" title="{text(told)}"></i>'


def _right(words: str) -> str:
    return f"<span>{text(words)}</span>"


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


def _other_memory(run: RunFiles) -> str:
    rows = [
        (text(name), bytes_text(value)) for name, value in memory.other_metrics(run.rows).items()
    ]
    return table(["measured", "largest"], rows) if rows else ""
