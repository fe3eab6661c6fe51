"""What the plan said of each pool's memory, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxrl.process.plain import JsonObject
from jaxrl.report.read import RunFiles
from jaxrl.types import Row


@dataclass(frozen=True)
class PoolMemory:
    """The fullest device of a pool."""

    name: str
    devices: str
    peak: int
    """Planned bytes."""
    moment: str
    """When the peak is expected, as `actor: backward pass`."""
    limit: int | None
    parts: tuple[JsonObject, ...]
    """What is there then, as in `plan.json`, with its `role`; their `bytes` add up to the peak."""
    measured: float | None
    """Bytes; None where nothing was measured."""


def memory_pools(run: RunFiles) -> list[PoolMemory]:
    """The pools of the run's plan; none without a plan."""
    if run.plan is None:
        return []
    return [
        _pool(number, pool, run.plan, run.rows) for number, pool in enumerate(run.plan["pools"])
    ]


def _pool(number: int, pool: JsonObject, plan: JsonObject, rows: Iterable[Row]) -> PoolMemory:
    parts = [
        {"role": role["role"], **part}
        for role in plan["roles"]
        if role["pool"] == number
        for part in role["parts"]
        if _present(role["role"], part, pool["moment"])
    ]
    # The planned figure, which a row holds where a device tells none, is no measurement.
    peaks = [
        row.get(f"memory/{role}/peak_bytes")
        for row in rows
        for role in pool["roles"]
        if row.get(f"memory/{role}/planned") == 0
    ]
    devices = f"{len(pool['devices'])} {pool['device'] or 'device'}"
    return PoolMemory(
        name=pool["name"],
        devices=devices if pool["devices"] else "no device",
        peak=pool["peak"],
        moment=pool["moment"],
        limit=pool["limit"],
        parts=tuple(parts),
        measured=max((peak for peak in peaks if peak is not None), default=None),
    )


def _present(role: str, part: JsonObject, moment: str) -> bool:
    """Whether a part of a role is on the device at a moment."""
    if part["phase"] is not None:
        return f"{role}: {part['phase']}" == moment
    return not {moment, moment.partition(":")[0]} & set(part.get("away", ()))
