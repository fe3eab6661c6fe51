"""The plan as data: `plan.json`, which the report of a run holds against what was measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, Field

from jaxrl.plan import Plan
from jaxrl.process.json_types import JsonObject, parse_json

PLAN_FILE = "plan.txt"
PLAN_DATA_FILE = "plan.json"
Size = Annotated[int, Field(ge=0)]


def plan_json(plan: Plan) -> str:
    """Writes one JSON object. All sizes are bytes on one device.

    `pools`: name, roles, devices (numbers of the placement), device (`gpu`, or null in a plan for
    another machine), peak, moment (role and phase then, as `actor: loss`), limit (null where nobody
    knows). `roles`: role, pool (index), devices, axes (null without a mesh), peak (null where
    nothing is counted), parts: column, name, bytes, phase (null: resident), away (moments and
    roles at which a resident one is not there).
    """
    platform = plan.devices[0].platform if plan.devices else None
    record = {
        "mesh": plan.placement.spec,
        "launcher": plan.launcher,
        "pools": [
            {
                "name": peak.pool.name,
                "roles": peak.pool.roles,
                "devices": list(peak.pool.devices),
                "device": platform,
                "peak": peak.bytes,
                "moment": peak.moment,
                "limit": peak.limit,
            }
            for peak in plan.pools
        ],
        "roles": [_role(plan, role) for role in plan.runs],
        "notes": [*plan.notes, *plan.verdict],
    }
    return json.dumps(record, indent=1) + "\n"


class _Entry(BaseModel):
    column: str
    name: str
    bytes: Size
    phase: str | None
    away: list[str] = []


class _Role(BaseModel):
    role: str
    pool: int
    devices: list[int]
    axes: dict[str, int] | None
    peak: Size | None
    parts: list[_Entry]


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
    plan = _Record.model_validate(value, strict=True)
    if any(not 0 <= role.pool < len(plan.pools) for role in plan.roles):
        raise ValueError("a role is in no pool")
    return value


def _role(plan: Plan, role: str) -> JsonObject:
    where = plan.placement.roles[role]
    account, axes = plan.accounts.get(role), plan.axes.get(role)
    entries = () if account is None else account.entries
    return {
        "role": role,
        "pool": where.pool,
        "devices": list(where.devices),
        "axes": None if axes is None else axes._asdict(),
        "peak": None if account is None else account.peak,
        "parts": [{**asdict(e), "away": sorted(e.away)} for e in entries],
    }
