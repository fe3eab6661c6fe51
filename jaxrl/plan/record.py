"""The plan as data: `plan.json`, which the report of a run holds against what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from jaxrl.plan import Plan
from jaxrl.plan.memory import Part

PLAN_FILE = "plan.txt"
PLAN_DATA_FILE = "plan.json"


def plan_json(plan: Plan) -> str:
    """One JSON object. All sizes are bytes on one device.

    `pools`: name, roles, devices (numbers of the placement), device (`gpu`, or null in a plan for
    another machine), peak, moment (what goes on then, as `actor: update`), limit (null where nobody
    knows). `roles`: role, pool (index), devices, axes (null without a mesh), peak (null where
    nothing is counted), parts of it: column, name, bytes, phase (null: resident), away (moments and
    roles at which a resident part is not there).
    """
    record = {
        "mesh": plan.placement.spec,
        "launcher": plan.launcher,
        "pools": _pools(plan),
        "roles": [_role(plan, role) for role in plan.runs],
        "notes": [*plan.notes, *plan.verdict],
    }
    return json.dumps(record, indent=1) + "\n"


def _pools(plan: Plan) -> list[dict[str, Any]]:
    platform = plan.devices[0].platform if plan.devices else None
    return [
        {
            "name": pool.name,
            "roles": pool.roles,
            "devices": list(pool.devices),
            "device": platform,
            "peak": memory.bytes,
            "moment": memory.moment,
            "limit": memory.limit,
        }
        for pool, memory in zip(plan.placement.pools, plan.pools, strict=True)
    ]


def _role(plan: Plan, role: str) -> dict[str, Any]:
    where = plan.placement.roles[role]
    account, axes = plan.accounts.get(role), plan.axes.get(role)
    return {
        "role": role,
        "pool": where.pool,
        "devices": list(where.devices),
        "axes": None if axes is None else axes._asdict(),
        "peak": None if account is None else account.peak,
        "parts": [] if account is None else [_part(part) for part in account.parts],
    }


def _part(part: Part) -> dict[str, Any]:
    return {**asdict(part), "away": sorted(part.away)}
