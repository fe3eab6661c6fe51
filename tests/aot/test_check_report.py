"""What is printed of compiled programs, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.aot.compile_report import Checked, Report
from jaxrl.aot.hlo import Collective, Graphs
from jaxrl.plan.live_arrays import Array

DOCS = Path(__file__).parent.parent.parent / "docs"
GB = 10**9
SENT = {"all-gather": Collective(2, 3 * GB, 0)}
UPDATE = Checked(
    *("actor", "update", 2, 5 * GB, 1),
    compiled_bytes=4 * GB,
    collectives=SENT,
    attention="cuDNN's flash attention",
    largest=(Array(GB, "float32[8,1024]", "losses/head.py:7"),),
)
DECODE = Checked(
    *("actor", "decode", 2, 2 * GB, 0),
    others=3 * GB,
    compiled_bytes=2 * GB,
    graphs=Graphs(1, 9, 2),
)
BROKEN = Checked("actor", "score", 2, GB, 1, error="no kernel")


def report(*programs: Checked, limit: int = 6 * GB) -> Report:
    pool = SimpleNamespace(name="actor", roles=("actor",), devices=(0, 1))
    plan: Any = SimpleNamespace(
        text=lambda: "the plan\n",
        placement=SimpleNamespace(spec="actor=2"),
        pools=(SimpleNamespace(pool=pool, bytes=7),),
    )
    target: Any = SimpleNamespace(name="h200x2", kind="NVIDIA H200", hosts=1, usable=limit)
    return Report(target, plan, programs)


def test_the_peak_of_a_pool_counts_what_other_roles_hold():
    assert report(UPDATE, DECODE).peaks == {"actor": 5 * GB}


@pytest.mark.parametrize(
    ("programs", "limit", "reason"),
    [
        ((UPDATE, BROKEN), 6 * GB, "actor: score does not compile for h200x2: no kernel"),
        ((UPDATE,), 3 * GB, "actor needs 4.0 GB of the 3.0 GB that a run may use"),
    ],
    ids=["compiler", "memory"],
)
def test_why_a_run_fails_is_in_the_text_and_in_the_json(programs, limit, reason):
    failing = report(*programs, limit=limit)
    verdict = failing.text().partition("verdict: ")[2]
    assert verdict.startswith("would not run on h200x2") and reason in verdict
    record = json.loads(failing.json())
    assert not record["fits"] and record["failures"][0].startswith(reason)


def test_the_largest_arrays_of_a_roles_fullest_program_are_named():
    text = report(UPDATE, DECODE).text()
    assert "actor update: its largest arrays are 1.0 GB float32[8,1024] (losses/head.py:7)" in text
    assert "actor decode: its largest" not in text


def test_every_key_of_the_json_is_documented():
    text = (DOCS / "accelerators.md").read_text()
    suggested = report(UPDATE)
    record = json.loads(Report(**vars(report(UPDATE, DECODE)) | {"suggested": suggested}).json())
    assert record["fits"] and record["suggested"]["fits"]
    programs = record["programs"]
    parts = [record, *programs, programs[1]["graphs"], programs[0]["collectives"]["all-gather"]]
    parts += programs[0]["largest"]
    keys = {key for part in parts for key in part}
    assert not [key for key in keys if f"`{key}`" not in text]
