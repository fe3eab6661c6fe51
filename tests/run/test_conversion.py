"""Roles of one GGUF file on one host convert it once, to the same bits, whoever dies meanwhile."""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_models import write_model
from runs import SHORT
from tiny_models import make_mesh

from jaxrl import Config
from jaxrl.algorithms.methods import needed_roles
from jaxrl.checkpoint.source import ModelSource, resolve_model
from jaxrl.formats import converted
from jaxrl.formats.converted import Converted, NotConverted, Scratch
from jaxrl.formats.gguf import GgufFile
from jaxrl.formats.weights import tensor_shapes
from jaxrl.plan import make_plan
from jaxrl.run import conversion
from jaxrl.run.conversion import converted_once
from jaxrl.run.job import Setup
from jaxrl.run.launch import devices_for, start_roles
from jaxrl.runtime.cluster import ClusterDevice

WHOLE = (slice(None), slice(None))
CHILD = """
import sys
from pathlib import Path
from jaxrl.formats import converted
from jaxrl.formats.gguf import GgufFile

converted.BAND = 1
file, folder, last = sys.argv[1:]
scratch = converted.Scratch(Path(folder), "float32", 60.0)
names = sys.stdin.readline().split()
whole = (slice(None), slice(None))
for name in names:
    converted.Converted(GgufFile(file), scratch).read(name, whole)
read = GgufFile.read

def stops_after_a_band(self, name, index):
    if index[0].start:
        print("in the middle", flush=True)
        sys.stdin.readline()
    return read(self, name, index)

GgufFile.read = stops_after_a_band
converted.Converted(GgufFile(file), scratch).read(last, whole)
"""
"""Converts the tensors that it is told, and of the last one some rows, until it is killed."""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> ModelSource:
    folder = tmp_path_factory.mktemp("gguf")
    return resolve_model(write_model(folder / "tiny.gguf", "llama", "Q8_0"))


def quantised(source: ModelSource) -> dict[str, int]:
    """Name -> elements of each tensor that has to be dequantised."""
    shapes = tensor_shapes(source.config)
    found = {n: int(np.prod(s)) for n, s in shapes.items() if source.tensors.is_quantised(n)}
    assert found
    return found


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """Tensor -> elements that were dequantised."""
    counts: Counter[str] = Counter()
    read = GgufFile.read

    def counting(self: GgufFile, name: str, index) -> np.ndarray:
        box = read(self, name, index)
        if self.is_quantised(name):
            counts[name] += box.size
        return box

    monkeypatch.setattr(GgufFile, "read", counting)
    return counts


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_roles_in_threads_convert_a_model_once(source, counted, tmp_path, monkeypatch):
    overrides = [
        *(f"student.model={source.path}", f"teacher.model={source.path}"),
        *("actor.param_dtype=float32", "teacher.dtype=bfloat16", "teacher.lazy=false"),
        *("mesh=actor=2,rollout=1,teacher=2", f"run_dir={tmp_path / 'run'}"),
    ]
    config = Config.load("builtin:quickstart", [*SHORT, *overrides])
    plan = make_plan(config, needed_roles(config), devices_for(config))
    folders = []
    made = conversion._make
    monkeypatch.setattr(
        conversion, "_make", lambda root: folders.append(made(tmp_path)) or folders[-1]
    )
    setup = Setup(
        config=plan.config,
        student=source,
        teachers={"teacher": source},
        tokenizer=None,
        vocab_size=source.config.vocab_size,
        eos_ids=source.config.eos_ids,
        pad_id=0,
        teacher_samples=False,
        opening="",
        row_multiple=2,
        run_dir=tmp_path / "run",
    )
    told: list[str] = []
    worker_group = start_roles(setup, plan, told.append)
    try:
        roles = {name: role for one in worker_group.workers for name, role in one._roles.items()}
        trained, teacher = roles["actor"].state.params, roles["teacher"]._scorer.params
        assert counted == quantised(source)
        assert bits(trained) == bits(source.load(None, jnp.float32, "stacked"))
        stacked = "stacked" if not isinstance(teacher["layers"], list) else "unstacked"
        assert bits(teacher) == bits(source.load(None, jnp.bfloat16, stacked))
    finally:
        worker_group.stop()
    assert "loaded by actor and teacher; it is converted once" in told[0]
    assert len(folders) == 1 and not folders[0][0].exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shared_tensors_have_the_bits_of_unshared_ones(source, counted, tmp_path, dtype):
    shared = replace(source, scratch=Scratch(tmp_path, dtype, 60.0))
    mesh = make_mesh(1, 2, 2)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(shared.load, mesh, dtype, "stacked")
        second = threads.submit(shared.load, None, dtype, "unstacked")
    assert counted == quantised(source)
    assert bits(first.result()) == bits(source.load(mesh, dtype, "stacked"))
    assert bits(second.result()) == bits(source.load(None, dtype, "unstacked"))
    assert pickle.loads(pickle.dumps(shared)).scratch == shared.scratch


def test_a_tensor_of_all_experts_is_converted_whole(tmp_path, monkeypatch):
    source = resolve_model(write_model(tmp_path / "moe.gguf", "gemma4_moe", "Q8_0"))
    monkeypatch.setattr(converted, "BAND", 2 * 48 * 32)  # two of six experts
    shared = Converted(source.tensors, Scratch(tmp_path, "float32", 60.0))
    name, box = "model.layers.1.experts.gate_up_proj", (slice(1, 5), slice(7, 48), slice(3, 20))
    np.testing.assert_array_equal(shared.read(name, box), source.tensors.read(name, box))


def test_processes_share_and_what_dies_half_way_is_converted_by_another(source, counted, tmp_path):
    *before, last = quantised(source)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(source.path), str(tmp_path), last],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        child.stdin.write(" ".join(before) + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "in the middle\n"
        mine = Converted(source.tensors, Scratch(tmp_path, "float32", 60.0))
        theirs = {name: mine.read(name, WHOLE) for name in before}
        assert not counted
        found: list[np.ndarray] = []
        waiting = threading.Thread(target=lambda: found.append(mine.read(last, WHOLE)))
        waiting.start()
        waiting.join(5 * converted.POLL_S)
        assert not counted and not found
        assert (tmp_path / f"{last}.part").stat().st_size < 4 * quantised(source)[last]
    finally:
        child.kill()
        child.communicate()
    waiting.join(60)
    assert counted == {last: quantised(source)[last]}
    assert bits([*theirs.values(), *found]) == bits(
        [source.tensors.read(name, WHOLE) for name in (*before, last)]
    )


def test_a_wait_ends_with_who_converts(source, tmp_path):
    name = next(iter(quantised(source)))
    with (tmp_path / f"{name}.lock").open("w") as held:
        print(4711, end="", file=held, flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
        tensors = Converted(source.tensors, Scratch(tmp_path, "float32", 0.2))
        with pytest.raises(NotConverted, match=f"4711 has .* {name} .* deadlines.startup=0.2 s"):
            tensors.read(name, WHOLE)


def test_without_the_folder_each_converts(source, counted, tmp_path):
    gone = replace(source, scratch=Scratch(tmp_path / "gone", "float32", 60.0))
    assert bits(gone.load()) == bits(source.load())
    assert counted == {name: 2 * n for name, n in quantised(source).items()}


def plan_of(source: ModelSource, tmp_path: Path):
    mesh = "mesh=actor=1,rollout=1,teacher=1"
    models = [f"student.model={source.path}", f"teacher.model={source.path}"]
    config = Config.load("builtin:quickstart", [*SHORT, *models, mesh, f"run_dir={tmp_path}"])
    return make_plan(config, needed_roles(config), devices_for(config))


def test_what_is_kept_is_the_widest_dtype_and_only_where_it_is_shared(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(conversion, "_root", lambda size: tmp_path)
    left = tmp_path / f"{conversion.PREFIX}of_a_killed_run"
    left.mkdir()
    told: list[str] = []
    plan = plan_of(source, tmp_path)

    def shares(*dtypes: str, plan=plan):
        loads = [(r, source, d) for r, d in zip(("actor", "teacher"), dtypes, strict=False)]
        return converted_once(loads, plan, 60.0, told.append)

    with shares("float32") as found:
        assert not found and not told
    apart = [ClusterDevice(i, "cpu", i, f"host {i}", None) for i in range(3)]
    with shares("float32", "float32", plan=replace(plan, devices=tuple(apart))) as found:
        assert not found and not told
    with shares("float32", "bfloat16") as found:
        assert found[source.path.resolve()].dtype == "float32"
    assert not left.exists()
    with shares("bfloat16", "bfloat16") as found:
        other = found[source.path.resolve()]
        assert other.dtype == "bfloat16"
        with shares("bfloat16", "bfloat16"):
            assert other.folder.exists()  # another run removes only what nobody has
    monkeypatch.setattr(conversion, "_spare", lambda plan: 0)
    with shares("bfloat16", "bfloat16") as found:
        assert not found and "each converts it" in told[-1]
    assert not list(tmp_path.glob(f"{conversion.PREFIX}*"))
