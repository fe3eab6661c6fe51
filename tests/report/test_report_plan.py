"""`plan.json`: the plan as data says what the plan's table says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.schema import Config
from jaxrl.plan import make_plan
from jaxrl.plan.table import Plan, plan_json, read_plan


def planned(*overrides: str) -> tuple[Plan, dict[str, Any]]:
    config = Config.load(None, list(overrides))
    plan = make_plan(config, needed_roles(config), limit_gb=2.0)
    return plan, json.loads(plan_json(plan))


@pytest.mark.parametrize(
    "mesh", ["actor=2,rollout=2,teacher=4", "actor+rollout+teacher=1", "actor+rollout=6,teacher=2"]
)
def test_the_parts_of_a_pool_add_up_to_its_peak(mesh: str) -> None:
    """What is resident of each of its roles and not away, and the phase that its moment names."""
    _, record = planned(f"mesh={mesh}")
    for index, pool in enumerate(record["pools"]):
        role_then, phase_then = pool["moment"].split(": ")
        roles = [role for role in record["roles"] if role["pool"] == index]
        parts = [(role["role"], part) for role in roles for part in role["parts"]]
        resident = sum(
            part["bytes"]
            for _, part in parts
            if part["phase"] is None and not {role_then, pool["moment"]} & set(part["away"])
        )
        phase = sum(
            part["bytes"]
            for role, part in parts
            if role == role_then and part["phase"] == phase_then
        )
        assert resident > 0 and phase > 0 and resident + phase == pool["peak"]


def test_devices_axes_and_limits_are_the_plans() -> None:
    plan, record = planned("mesh=actor=2,rollout=2,teacher=4", "actor.parallel.tensor=2")
    assert record["mesh"] == "actor=2,rollout=2,teacher=4" and record["launcher"] == plan.launcher
    assert [pool["devices"] for pool in record["pools"]] == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert [pool["limit"] for pool in record["pools"]] == [2_000_000_000] * 3
    actor = next(role for role in record["roles"] if role["role"] == "actor")
    assert actor["axes"] == {"data": 1, "fsdp": 1, "tensor": 2, "context": 1, "expert": 1}
    assert actor["devices"] == [0, 1]
    assert actor["peak"] == plan.accounts["actor"].peak


def test_a_role_without_devices_is_there_and_holds_nothing() -> None:
    plan, record = planned("teacher.model=null", "teacher.address=localhost:8765", "mesh=actor=2")
    teacher = next(role for role in record["roles"] if role["role"] == "teacher")
    assert (teacher["devices"], teacher["axes"], teacher["parts"]) == ([], None, [])
    assert teacher["peak"] is None and plan.accounts.keys() == {"actor", "rollout"}


def test_a_path_that_is_no_text_loses_no_plan() -> None:
    """A folder's name may have any byte, which JSON holds as half of a surrogate pair."""
    _, record = planned("mesh=actor+rollout+teacher=1")
    record["notes"] = ["the disk of /runs/caf\udce9 has 1 GB free"]
    assert read_plan(json.dumps(record)) == record
