"""What the plan said of each pool's memory, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.report.read import Row, RunFiles


@dataclass(frozen=True)
class Part:
    """Some bytes on one device."""

    role: str
    column: str
    name: str
    bytes: int


@dataclass(frozen=True)
class PoolMemory:
    """The fullest device of a pool."""

    name: str
    devices: str
    peak: int
    """Planned bytes."""
    moment: str
    limit: int | None
    parts: tuple[Part, ...]
    """What is there at the moment; their bytes add up to the peak."""
    measured: float | None
    """Bytes; None where nothing was measured."""


@dataclass(frozen=True)
class RoleMemory:
    """What the plan counts for one role on one of its devices."""

    role: str
    axes: str
    peak: int | None
    parts: tuple[tuple[str | None, Part], ...]
    """Each with its phase; None: it is resident."""


def pools(run: RunFiles) -> list[PoolMemory]:
    """Needs the run's plan."""
    assert run.plan is not None
    return [_pool(number, pool, run) for number, pool in enumerate(run.plan["pools"])]


def roles(run: RunFiles) -> list[RoleMemory]:
    """Needs the run's plan."""
    assert run.plan is not None
    return [
        RoleMemory(
            role["role"],
            _axes(role["axes"]),
            role["peak"],
            tuple((part["phase"], _part(role["role"], part)) for part in role["parts"]),
        )
        for role in run.plan["roles"]
    ]


def _pool(number: int, pool: Mapping[str, Any], run: RunFiles) -> PoolMemory:
    assert run.plan is not None
    then = pool["moment"]
    parts = [
        _part(role["role"], part)
        for role in run.plan["roles"]
        if role["pool"] == number
        for part in role["parts"]
        if _there(role["role"], part, then)
    ]
    devices = f"{len(pool['devices'])} {pool['device'] or 'device'}"
    return PoolMemory(
        name=pool["name"],
        devices=devices if pool["devices"] else "no device",
        peak=pool["peak"],
        moment=then,
        limit=pool["limit"],
        parts=tuple(parts),
        measured=_measured(pool["roles"], run.rows),
    )


def _there(role: str, part: Mapping[str, Any], moment: str) -> bool:
    """Whether a part of a role is on the device at a moment, as `actor: backward pass`."""
    if part["phase"] is not None:
        return f"{role}: {part['phase']}" == moment
    return not {moment, moment.partition(":")[0]} & set(part.get("away", ()))


def _part(role: str, part: Mapping[str, Any]) -> Part:
    return Part(role, part["column"], part["name"], part["bytes"])


def _axes(axes: Mapping[str, int] | None) -> str:
    if axes is None:
        return "none"
    return " ".join(f"{name}={size}" for name, size in axes.items() if size > 1) or "1 device"


def _measured(roles: Sequence[str], rows: Sequence[Row]) -> float | None:
    """The largest peak that was told of a role, all roles on its devices together, and is not the
    plan's own figure.
    """
    told = [
        row.get(f"memory/{role}/peak_bytes")
        for row in rows
        for role in roles
        if row.get(f"memory/{role}/planned") == 0
    ]
    return max((value for value in told if value is not None), default=None)
