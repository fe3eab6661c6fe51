"""What a role declares is in the plan, in the ledger and in the report, and told nowhere else."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

import jaxrl
from jaxrl.checkpoint.model_source import lora_of
from jaxrl.config import keys as config_keys
from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.plan import build
from jaxrl.plan.declarations import RESIDENTS
from jaxrl.plan.peaks import margin_of
from jaxrl.plan.search import REMEDIES, Candidate, get_key, set_key
from jaxrl.plan.table import Plan, plan_json, read_plan
from jaxrl.roles.actor import actor_residents
from jaxrl.roles.declared import Remedy, Resident
from jaxrl.sharding.ledger import Ledger, use
from jaxrl.sharding.mesh import Visible
from jaxrl.sharding.placement import place

ROLES = ("actor", "rollout", "teacher")
MODEL = DecoderConfig("qwen2", 96, 48, 3, 4, 2, 16, 64)
COPY = "second copy of the weights"


def planned(mesh: str, **keys: object) -> Plan:
    raw = {
        "mesh": mesh,
        "student": {"model": "student"},
        "teacher": {"model": "teacher"},
        "data": {"train": "arithmetic"},
    }
    config = Config.parse(raw | keys)
    student = replace(MODEL, lora=lora_of(config))
    given = config, ROLES, place(mesh, ROLES), student, MODEL, Visible((), None), 40
    return build(*given, room=True)


def test_a_resident_that_a_role_declares_is_in_plan_ledger_and_report(monkeypatch) -> None:
    def more(config: Config) -> tuple[Resident, ...]:
        params, *others = actor_residents(config)
        copy = Resident("actor.copy", COPY, params.arrays, ("actor.update",), "copy", offload=True)
        return (params, *others, copy)

    mesh = "actor+teacher=2,rollout=1"
    before = planned(mesh)
    monkeypatch.setitem(RESIDENTS, "actor", more)
    plan = planned(mesh)
    kept = {entry.name: entry for entry in plan.accounts["actor"].kept}
    assert kept[COPY].bytes == kept["parameters"].bytes > 0
    more_bytes = (1 + margin_of(plan.inputs.target)) * kept[COPY].bytes
    assert plan.pools[0].bytes == pytest.approx(before.pools[0].bytes + more_bytes, abs=1)
    assert "teacher: score" in kept[COPY].away and "actor: update" not in kept[COPY].away
    # The report reads the parts of plan.json.
    (actor,) = (x for x in read_plan(plan_json(plan))["roles"] if x["role"] == "actor")
    (part,) = (part for part in actor["parts"] if part["name"] == COPY)
    assert (part["bytes"], part["column"]) == (kept[COPY].bytes, "weights")

    ledger = Ledger()
    use(ledger)
    role = SimpleNamespace(copy={"kernel": jnp.zeros(64)})
    more(plan.config)[-1].keep(role)
    assert ledger.peak == 256
    ledger.enter("teacher.score")
    assert role.copy["kernel"].sharding.memory_kind == "pinned_host"
    ledger.enter("actor.update")
    assert role.copy["kernel"].sharding.memory_kind == "device"
    use(Ledger())


def test_a_key_that_a_role_declares_is_tried_and_named(monkeypatch) -> None:
    mesh, line = "actor+rollout=2,teacher=2", "faster: rollout.launch_tokens=7 (now "
    assert not any(each.startswith(line) for each in planned(mesh).verdict)
    remedy = Remedy("rollout.launch_tokens", faster=[7])
    monkeypatch.setitem(REMEDIES, "rollout", lambda run: [remedy])
    assert sum(each.startswith(line) for each in planned(mesh).verdict) == 1


def test_declared_values_are_valid_and_others_than_the_present_ones() -> None:
    config = {"student": {"model": "student", "lora": {"rank": 4}}, "rollout": {"slots": 4}}
    config |= {"actor": {"remat": "dots"}, "teacher": {"model": "t", "num_microbatches": 4}}
    plan, keys = planned("actor+rollout=2,teacher=2", **config), set()
    for role in ROLES:
        for remedy in Candidate(plan.config, plan.inputs).remedies(role):
            for value in (*remedy.faster, *remedy.smaller):
                assert value != get_key(plan.config, remedy.key)
                changed = set_key(plan.config, remedy.key, value).model_dump()
                assert get_key(Config.parse(changed), remedy.key) == value
                keys.add(remedy.key)
    assert keys >= {"actor.remat", "rollout.slots", "rollout.merge", "teacher.num_microbatches"}


def test_arrays_that_two_roles_hold_are_counted_once() -> None:
    """Those of one dtype and layout on the same devices: of the rollout all but the layers, which
    the actor has stacked."""
    alone, together = (
        planned(mesh, actor={"dtype": "bfloat16", "param_dtype": "bfloat16"})
        for mesh in ("actor=1,rollout=1,teacher=1", "actor+rollout=1,teacher=1")
    )
    rollout = {entry.name: entry.bytes for entry in together.accounts["rollout"].kept}
    actor = {entry.name: entry for entry in together.accounts["actor"].kept}
    shared = actor["parameters, the rollout's too"]
    whole = alone.accounts["rollout"].resident
    assert rollout["parameters"] + shared.bytes == whole
    assert shared.bytes == 2 * (2 * 96 * 48 + 48)
    assert json.loads(plan_json(together))["roles"][0]["parts"]


def test_a_key_that_only_the_rollout_reads_stands_in_no_file_of_plan_or_aot() -> None:
    """The role says what follows from it: its notes, its arrays and the sizes of its caches."""
    sections = defaultdict(set)
    for key in config_keys.keys(Config):
        section, _, name = key.path.rpartition(".")
        sections[name].add(section)
    own = {name for name, where in sections.items() if where == {"rollout"}}
    assert own >= {"slots", "launch_tokens", "cache_tokens", "merge"}
    rooms = (Path(jaxrl.__file__).parent / room for room in ("plan", "aot"))
    files = [path for room in rooms for path in room.rglob("*.py")]
    assert len(files) > 10
    for path in files:
        text = path.read_text()
        nodes = ast.walk(ast.parse(text))
        read = own & {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not read, f"{path}: {read}"
        assert not [name for name in own if f"rollout.{name}" in text], path
