"""`benchmarks/gpu.py` on one CPU device: what it measures is what a run calls, and all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import described
import gpu
import gpu_sections
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from described import MODELS, SIZES, arguments, describe, filled, measure
from gpu_sections import SECTIONS, Bench

from jaxrl.config.schema import Config
from jaxrl.plan.peaks import planned_bytes
from jaxrl.roles.declared import local_bytes
from jaxrl.sampling import decode

TINY = SIZES["tiny"]


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """In each model: programs of decode steps unroll them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (TINY.student, TINY.teacher):
            patch.setitem(MODELS, name, replace(MODELS[name], n_layers=1))
        yield


def made_here(shape, dtype, sharding, below):
    """`described._maker` without a program for each shape."""

    def make(seed):
        rng = np.random.default_rng(int(seed))
        if jnp.issubdtype(dtype, jnp.floating):
            made = rng.uniform(-0.035, 0.035, shape)
        else:
            made = rng.integers(0, below, shape)
        return jax.device_put(made.astype(dtype), sharding)

    return make


def zeros_here(tree):
    """`described.zeros`, the same."""
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), tree)


def pretended_run(command, table, limit):
    """What `gpu_sections._until` reads of a run with this config, which is one of `jaxrl.train`."""
    config = Config.load(command[command.index("--config") + 1])
    assert config.profile.range and table.is_relative_to(config.run_dir)
    Path(config.run_dir).mkdir()
    row = {"time/step_s": 1.0, "tokens/generated": 64.0}
    stages = [{"stage": stage, "seconds": 0.1} for stage in sorted(STAGES)]
    return [row] * config.steps, {"stages": stages}


STAGES = {"actor.update", "teacher.score", "rollout.generate"}


@pytest.fixture(scope="module", params=and_slow(["pretended"], ["run"]))
def rows(request):
    """Of every section; of the updates the variant alone, and of the whole step one schedule, which
    is run where that is asked for."""
    bench = Bench(replace(TINY, batches=(4,)), jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
        patch.setattr(described, "_maker", made_here)
        patch.setattr(described, "zeros", zeros_here)
        patch.setattr(gpu_sections, "REMATS", ())
        patch.setattr(gpu_sections, "SCHEDULES", ("one_step_off",))
        if request.param == "pretended":
            patch.setattr(gpu_sections, "_until", pretended_run)
        patch.setattr("jaxrl.sharding.targets.TRY_S", 0.0)  # how close they come is not asked
        return [row for section in SECTIONS.values() for row in section(bench)]


def test_every_section_has_numbers(rows):
    for section in SECTIONS:
        mine = [row for row in rows if row["section"] == section]
        failed = [row for row in mine if "error" in row]
        if section == "torch" and failed:
            assert "is not measured" in failed[0]["error"]
            continue
        assert mine and not failed, failed
        assert all(row["value"] > 0 for row in mine)
    # the program that converts weights is planned too, but its seconds are not predicted
    programs = [row for row in rows if row.get("planned") and row["section"] != "moves"]
    assert all(row["predicted"]["measured"] > 0 for row in programs)
    steps = [row for row in rows if row["section"] == "step"]
    stages = {s["stage"] for row in steps for s in row["stages"]}
    assert stages >= STAGES


def test_a_run_is_read_until_its_table_is_there(tmp_path):
    table = tmp_path / "profile" / "stages.json"
    table.parent.mkdir()
    text = '{"step": 0}\n{"step": 1, "time/step_s": 2.0}\n{"step": 2, "ti'
    (tmp_path / "metrics.jsonl").write_text(text)
    code = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2]); time.sleep(60)"
    command = [sys.executable, "-S", "-c", code, str(table), '{"stages": []}']
    found = gpu_sections._until(command, table, float("inf"))
    assert found == ([{"step": 1, "time/step_s": 2.0}], {"stages": []})
    table.unlink()
    with pytest.raises(RuntimeError, match="error: no weights"):
        refused = [sys.executable, "-S", "-c", "raise SystemExit('error: no weights')"]
        gpu_sections._until(refused, table, float("inf"))
    with pytest.raises(TimeoutError):
        gpu_sections._until([sys.executable, "-S", "-c", "input()"], table, 0.0)


PROGRAMS = {
    f"update of tiny, remat {remat}": ("actor", "update", {"actor": {"remat": remat}})
    for remat in ("none", "full")
}
MEASURED = {  # by default
    "score by tiny teacher": ("teacher", "score", {}),
    "update, chunk_tokens=512": ("actor", "update", {"distill": {"chunk_tokens": 512}}),
}


@pytest.mark.parametrize("name", and_slow(MEASURED, PROGRAMS))
def test_the_bytes_are_those_of_the_run_s_own_program(rows, name):
    role, program_name, sections = (MEASURED | PROGRAMS)[name]
    run = describe(TINY, jax.devices()[:1], **sections)
    program = run.program(role, program_name)
    if not any(row["name"] == name for row in rows):
        bench = Bench(TINY, jax.devices()[:1])
        rows = [*gpu_sections.ceilings(bench), *gpu_sections.update(bench)]
    row = next(row for row in rows if row["name"] == name)
    assert row["compiled"] == program.held(program.compile())
    assert row["planned"] == planned_bytes(program, run.inputs.target)


def test_arrays_stand_where_the_abstract_ones_say():
    """On several devices: shapes, dtypes and shardings; spread as weights are, tokens below V."""
    run = describe(TINY, jax.devices()[:2])
    params, sequences, _ = run.program("teacher", "score").args
    found = filled((params, sequences), below=512)
    for array, abstract in zip(
        jax.tree.leaves(found), jax.tree.leaves((params, sequences)), strict=True
    ):
        assert (array.shape, array.dtype) == (abstract.shape, abstract.dtype)
        assert array.sharding == abstract.sharding
    embedding = np.asarray(found[0]["embed"]["embedding"])
    assert np.std(embedding) == pytest.approx(0.02, rel=0.05)
    assert abs(np.mean(embedding)) < 0.001
    tokens = np.asarray(found[1].tokens)
    assert tokens.max() < 512 and len(np.unique(tokens)) > 32
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(found))
    assert held == local_bytes((params, sequences))


def test_a_measured_launch_runs_all_its_steps_in_every_slot():
    run = describe(TINY, jax.devices()[:1], rollout={"slots": 4})
    program = run.program("rollout", "decode")
    _, out, _ = program.compile()(*arguments(run, program))
    assert out.shape[:2] == (TINY.launch, 4)
    assert (np.asarray(out)[:, :, 0] > decode.IDLE).all()


def test_a_measured_update_changes_the_weights():
    """A step that is not finite would be left out, and with it the optimizer's work."""
    run = describe(TINY, jax.devices()[:1])
    program = run.program("actor", "update")
    _, (sums, _, _, last) = program.compile()(*arguments(run, program))
    assert last["finite"] and last["trains"]
    assert sums["loss"][1] == TINY.rows * TINY.new


def test_what_fails_is_a_row(rows):
    def find():
        raise RuntimeError("RESOURCE_EXHAUSTED: no room\nmore words")

    bench = Bench(TINY, jax.devices()[:1])
    failed = bench.row("decode", "large", find)
    assert failed["error"] == "RuntimeError: RESOURCE_EXHAUSTED: no room"
    run = describe(TINY, jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("described.arguments", lambda *_: find())
        find_bytes = partial(measure, run, run.program("teacher", "score"), 0.0)
        assert bench.row("update", "large", find_bytes)["error"].startswith(
            "the plan counts 0.0 GB; "
        )
    late = Bench(TINY, jax.devices()[:1], limit=0.0).row("decode", "late", find)
    assert "budget" in late["error"]
    text = "\n".join(gpu.table({}, [*rows, failed, late], "out"))
    assert "no room" in text and "budget" in text


def test_the_table_fits(rows):
    for many in (rows, rows * 3):
        lines = gpu.table({}, many, "out")
        assert len(lines) <= 40 and max(map(len, lines)) <= 120
    assert "rows more" in "\n".join(lines)


def test_without_time_nothing_begins(tmp_path, capsys):
    out = tmp_path / "gpu.jsonl"
    gpu.main(["--size", "tiny", "--budget", "0", "--only", "decode", "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["section"] for row in rows] == ["ceilings", "decode"]
    assert capsys.readouterr().out.count("the time budget is spent") == 2


def test_the_command_of_one_section(tmp_path, capfd):
    out = tmp_path / "gpu.jsonl"
    gpu.main(["--size", "tiny", "--devices", "1", "--only", "ceilings", "--out", str(out)])
    head, *rows = (json.loads(line) for line in out.read_text().splitlines())
    assert head["device"] == "cpu" and head["versions"]["jax"] == jax.__version__
    assert {row["section"] for row in rows} == {"ceilings"}
    best = max(row["value"] for row in rows if row.get("unit") == "GB/s")
    assert rows[-1]["ceilings"]["bandwidth"] == pytest.approx(best * 1e9)
    assert "GB/s" in capfd.readouterr().out


def test_nothing_is_imported_that_a_borrowed_machine_may_lack():
    code = "import sys, gpu; print([name for name in sys.argv[1:] if name in sys.modules])"
    names = ["ray", "orbax", "tensorstore", "tensorboardX", "transformers", "tokenizers", "torch"]
    path = os.pathsep.join(filter(None, (str(gpu.HERE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
