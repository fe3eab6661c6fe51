"""What the plan said of each pool's memory, beside what was measured."""

from __future__ import annotations

from jaxrl.process.json_types import JsonObject
from jaxrl.report.read import RunFiles


def memory_pools(run: RunFiles) -> list[JsonObject]:
    """Returns the pools of the run's plan as in `plan.json`, none without a plan. Each also has:
    `device_text`; `parts`, those of its roles at its peak, with their `role`, whose `bytes` add up
    to `peak`; `measured`, bytes of its fullest device, None where nothing was measured."""
    if run.plan is None:
        return []
    return [
        pool
        | {
            "device_text": _device_text(pool),
            "parts": _parts(run.plan, number, pool["moment"]),
            "measured": _measured(run, pool["roles"]) if pool["peak"] else None,
        }
        for number, pool in enumerate(run.plan["pools"])
    ]


def _device_text(pool: JsonObject) -> str:
    devices = f"{len(pool['devices'])} {pool['device'] or 'device'}"
    return devices if pool["devices"] else "no device"


def _parts(plan: JsonObject, pool: int, moment: str) -> list[JsonObject]:
    return [
        {"role": role["role"], **part}
        for role in plan["roles"]
        if role["pool"] == pool
        for part in role["parts"]
        if _present(role["role"], part, moment)
    ]


def _measured(run: RunFiles, roles: list[str]) -> float | None:
    # The planned figure, which a row holds where a device tells none, is no measurement.
    peaks = [
        row.get(f"memory/{role}/peak_bytes")
        for row in run.rows
        for role in roles
        if row.get(f"memory/{role}/planned") == 0
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def _present(role: str, part: JsonObject, moment: str) -> bool:
    """Returns whether a part of a role is on the device at a moment."""
    if part["phase"] is not None:
        return f"{role}: {part['phase']}" == moment
    return not {moment, moment.partition(":")[0]} & set(part.get("away", ()))
