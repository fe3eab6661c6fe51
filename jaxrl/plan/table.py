"""The plan as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from rich import box
from rich.table import Table

from jaxrl.plan.plan_inputs import GB, Account, Column, PoolPeak
from jaxrl.process.streams import table_lines
from jaxrl.runtime.cluster import ClusterDevice
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import DeviceFacts
from jaxrl.sharding.placement import Placement, device_list

MB = 1e6
LINE = 18
"""Most characters of a worker's name on one line: a long one takes no room from the figures."""
TABLE_WIDTH = 90
"""Columns of a terminal from which on the plan is a table."""
HOLD = "\N{NO-BREAK SPACE}"
ROLE = 10
"""Characters of a role's name in a block, and of what its lines are indented by."""
TITLES = ("weights", "grads", "optim", "KV", "activ", "peak", "limit")

Show = Callable[[int | None], str]


def role_lines(
    placement: Placement,
    axes: Mapping[str, Axes],
    devices: Sequence[DeviceFacts],
    accounts: Mapping[str, Account],
    pools: Sequence[PoolPeak],
    width: int,
    brief: bool = False,
) -> list[str]:
    """Returns the lines of a table with a row for each role, and one for each pool that several
    roles share; in fewer than `TABLE_WIDTH` columns, a block of lines for each.

    Args:
        brief: each row is one line, and none is below the titles.
    """
    largest = max(pool.bytes for pool in pools)
    unit, name = (GB, "GB") if largest >= GB else (MB, "MB")

    def show(n: int | None) -> str:
        if not n:
            return "?" if n is None else "-"
        return f"{n / unit:.2f}" if n < unit else f"{n / unit:.1f}"

    title = f"{placement.spec}: {name} on each device"
    rows = list(_rows(placement, axes, devices, accounts, pools, show))
    if brief:
        rows = [[cell.partition("\n")[0] for cell in row] for row in rows]
    if width < TABLE_WIDTH:
        return [
            *textwrap.wrap(title, width),
            *(line for row in rows for line in _block(row, width)),
        ]
    table = Table(
        box=box.SIMPLE,
        title=title,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    for title in ("pool", "worker", "role", "devices", "process", "mesh"):
        table.add_column(title, no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    lines = table_lines(table)
    return [*lines[:2], *lines[3:]] if brief else lines


def _rows(
    placement: Placement,
    axes: Mapping[str, Axes],
    devices: Sequence[DeviceFacts],
    accounts: Mapping[str, Account],
    pools: Sequence[PoolPeak],
    show: Show,
) -> Iterator[list[str]]:
    """Yields the cells of each row."""
    for index, memory in enumerate(pools):
        pool = memory.pool
        for role in pool.roles:
            head = (str(index), _folded(pool.name)) if role == pool.roles[0] else ("", "")
            where = _where(role, placement, axes, devices)
            yield [*head, *where, *_sizes(accounts.get(role), memory, show)]
        if len(pool.roles) > 1:
            sizes = [""] * 5 + [show(memory.bytes), show(_limit(memory))]
            yield ["", "", "together", "", "", "", *sizes]


def _block(row: Sequence[str], width: int) -> list[str]:
    """Returns the cells of a row in lines: the role and where it runs, its peak and the limit, and
    what the peak is made of, cells without a figure left out."""
    role, devices, process, mesh = row[2:6]
    *parts, peak, limit = row[6:]
    where = ", ".join(filter(None, (devices, mesh, process and f"process {process}")))
    cells = [f"peak {peak} of {limit}"]
    cells += [f"{t} {x}" for t, x in zip(TITLES, parts, strict=False) if x not in ("", "-")]
    indent = " " * ROLE
    first = f"{role:{ROLE}}{where}".rstrip()
    lines = [first] if where else []
    begin = indent if where else f"{role:{ROLE}}"
    text = ", ".join(cell.replace(" ", HOLD) for cell in cells)  # a name stays with its figure
    wrapped = textwrap.wrap(text, width, initial_indent=begin, subsequent_indent=indent)
    return lines + [line.replace(HOLD, " ") for line in wrapped]


def _limit(memory: PoolPeak) -> int | None:
    """Returns the limit, never below 0, as what others leave of a shared memory may be."""
    return None if memory.limit is None else max(memory.limit, 0)


def _folded(name: str) -> str:
    """Returns the name of a pool; a long one in lines that end with a `+`."""
    if len(name) <= LINE:
        return name
    return textwrap.fill(name.replace("+", "+ "), LINE).replace("+ ", "+")


def _where(
    role: str, placement: Placement, axes: Mapping[str, Axes], devices: Sequence[DeviceFacts]
) -> tuple[str, str, str, str]:
    """Returns role, devices (platform, ids), processes and mesh."""
    numbers = placement.roles[role].devices
    if not numbers:
        return role, "none", "-", "-"
    mesh = str(axes[role]) if role in axes else "not used"
    if not devices:
        return role, device_list(numbers), "?", mesh
    mine = [devices[i] for i in numbers]
    processes = device_list({device.process_index for device in mine})
    hosts = dict.fromkeys(d.host for d in mine if isinstance(d, ClusterDevice))
    where = f"{processes} ({', '.join(hosts)})" if hosts else processes
    return role, f"{mine[0].platform} {device_list(d.id for d in mine)}", where, mesh


def _sizes(account: Account | None, memory: PoolPeak, show: Show) -> list[str]:
    if account is None:
        return ["-"] * 6 + [show(_limit(memory))]
    columns = [account.column(column) for column in get_args(Column)]
    return [show(n) for n in (*columns, account.peak, _limit(memory))]
