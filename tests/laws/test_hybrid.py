"""Roles that take turns on one pool: what they share is one array; offloading changes no number."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import jax
import pytest
from cases import and_slow, needs_ray
from runs import ALONE, AS_TRAINED, CONSTANT, GSPO, SHORT, save_pair, weights

from jaxrl import Config
from jaxrl.algorithms.methods import needed_roles
from jaxrl.config.settings import OffloadConfig
from jaxrl.plan import make_plan
from jaxrl.run.job import make_job
from jaxrl.run.launch import devices_for, start_roles
from jaxrl.sharding.ledger import buffer
from jaxrl.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")
OFFLOAD = [f"offload.{name}=true" for name in OffloadConfig.model_fields]
FLOAT32 = ["rollout.dtype=float32", "actor.param_dtype=float32", "actor.dtype=float32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("models"), layers=1)


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    """A loop over one layer is no loop, and needs less than the plan counts."""
    return save_pair(tmp_path_factory.mktemp("deeper"), layers=2)


def config(models, run_dir, *overrides):
    given = [*models, *SHORT, *AS_TRAINED, *CONSTANT, *FLOAT32, f"run_dir={run_dir}", *overrides]
    return Config.load("builtin:quickstart", given)


def crew_of(made):
    """Started roles of a run."""
    plan = make_plan(made, needed_roles(made), devices_for(made))
    job = make_job(plan.config)
    return start_roles(job.for_workers(plan.axes, made.run_path), plan, print)


@pytest.mark.parametrize(
    ("axes", "shared"),
    [
        (["rollout.parallel.fsdp=2", "rollout.parallel.data=1"], ("embed", "norm", "lm_head")),
        (["rollout.parallel.data=2"], ("norm",)),  # the others are sharded over fsdp
    ],
)
def test_what_has_one_layout_dtype_and_sharding_is_one_array(models, tmp_path, axes, shared):
    made = config(models, tmp_path / "run", "mesh=actor+rollout+teacher=2", *axes)
    worker_group = crew_of(made)
    try:
        sent = worker_group.handle("actor").call("publish", version=0, dtype="float32", deadline=60)
        worker_group.handle("rollout").call("load", sent, deadline=60).result()
        roles = worker_group.workers[0]._roles
        trained, sampled = roles["actor"].state.params, roles["rollout"].params
        mine = {buffer(leaf) for leaf in jax.tree.leaves(trained)}
        found = {
            jax.tree_util.keystr(path): buffer(leaf) in mine
            for path, leaf in jax.tree_util.tree_leaves_with_path(sampled)
        }
        assert found == {name: name.startswith(tuple(f"['{x}']" for x in shared)) for name in found}
        copied = sum(leaf.nbytes for leaf in jax.tree.leaves(sampled) if buffer(leaf) not in mine)
        assert sent.result().nbytes == copied
        assert copied > 0
    finally:
        worker_group.stop()


def rows_of(result):
    """What must not change: every number but times and memory."""
    left_out = (
        *("time/", "memory/", "compile/", "offload/", "total/"),
        *("tokens/per_second", "weights/sync"),
    )
    return [
        {key: value for key, value in row.items() if not key.startswith(left_out)}
        for row in result.metrics
    ]


KINDS = {
    "gkd": [ALONE],
    "of two devices": ["mesh=actor+rollout+teacher=2", "eval.teacher=true"],
    "gspo": [*GSPO, "mesh=actor+rollout+reference=2", "policy.kl_coef=0.1"],
    "one_step_off": ["mesh=actor+rollout+teacher=2", "schedule=one_step_off", "steps=5"],
    "in parts": ["mesh=actor+rollout=2,teacher=2", "teacher.num_microbatches=2"],
    "one sharding": [
        "mesh=actor+rollout+teacher=2",
        "rollout.parallel.fsdp=2",
        "rollout.parallel.data=1",
    ],
}


@pytest.mark.parametrize(
    "kind",
    and_slow(["gkd"], [kind for kind in KINDS if kind != "gkd"]),
)
def test_offloading_changes_no_number(models, tmp_path, kind):
    plain = train(config(models, tmp_path / "plain", *KINDS[kind]))
    moved = train(config(models, tmp_path / "moved", *KINDS[kind], *OFFLOAD))
    assert rows_of(plain) == rows_of(moved)
    assert weights(plain.run_dir) == weights(moved.run_dir)
    assert not any("offload/to_host_bytes" in row for row in plain.metrics)
    for row in moved.metrics[1:]:
        assert row["offload/to_host_bytes"] > 0 and row["offload/to_device_bytes"] > 0
    names = Counter(
        event["name"]
        for event in json.loads((moved.run_dir / "timeline.json").read_text())
        if event.get("cat", "").startswith("offload ")
    )
    assert names["actor.optimizer to the host"] and names["actor.optimizer to the device"]
    peaks = [r.metrics[-1]["memory/actor/peak_bytes"] for r in (plain, moved)]
    assert peaks[1] <= peaks[0]
    if "+teacher" in KINDS[kind][0]:  # which is away when the pool is fullest, at the update
        assert peaks[1] < peaks[0]


@pytest.mark.parametrize("offload", [[], OFFLOAD], ids=["stays", "offloaded"])
def test_the_plan_foresees_the_ledgers_peak(deeper, tmp_path, offload):
    """A vocabulary of 264 and 2 layers: what is counted is small, and all of it is arrays."""
    made = config(deeper, tmp_path / "run", ALONE, *offload)
    result = train(made)
    planned = json.loads((result.run_dir / "plan.json").read_text())["pools"][0]["peak"]
    # Never below it; above it by the margin of a CPU, by what its compiler fuses and the walk does
    # not, and by the longest sequences that the config allows.
    assert 1 <= planned / result.metrics[-1]["memory/actor/peak_bytes"] < 1.5
    line = (
        r"peak memory of the first step \(arrays and compiled programs\): actor\+rollout\+teacher"
    )
    told = re.findall(
        line + r" ([\d.]+) MB, planned ([\d.]+)$", (made.run_path / "log.txt").read_text(), re.M
    )
    peaks = result.metrics[1]["memory/actor/peak_bytes"], planned
    assert told == [tuple(f"{size / 1e6:.1f}" for size in peaks)]
    assert result.metrics[-1]["memory/actor/planned"] == 0


def test_a_lazy_role_is_made_when_it_is_first_asked(models, tmp_path, capsys):
    result = train(config(models, tmp_path / "run", ALONE, "teacher.lazy=true"))
    log = (result.run_dir / "log.txt").read_text()
    assert "teacher: ready" not in log
    assert log.count("teacher: made on its first use, in ") == 1
    eager = train(config(models, tmp_path / "eager", ALONE))
    assert "teacher: ready" in (eager.run_dir / "log.txt").read_text()
    assert rows_of(result) == rows_of(eager)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("processes", [[], ["ray.devices_per_worker=1"]], ids=["one", "two"])
def test_turns_in_processes_are_those_of_threads_and_ray_warns_of_nothing(
    models, tmp_path, processes
):
    needs_ray()
    asked = ["mesh=actor+rollout+teacher=2", "teacher.lazy=true", *OFFLOAD]
    here = train(config(models, tmp_path / "here", *asked))
    there = config(models, tmp_path / "there", *asked, *processes)
    file = tmp_path / "run.yaml"
    file.write_text(there.dump())
    command = [sys.executable, "-m", "jaxrl.train", "--launcher", "ray", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = (done.stdout + done.stderr).lower()
    assert not [word for word in ("warning", "infeasible", "autoscaler") if word in told], told
    assert weights(there.run_path) == weights(here.run_dir)
    rows = [json.loads(line) for line in (there.run_path / "metrics.jsonl").open()]
    assert rows[-1]["offload/to_device_bytes"] > 0
    assert rows[-1]["memory/actor/peak_bytes"] > 0 and rows[-1]["memory/actor/planned"] == 0
