"""Laws of checkpoints: what is read is what was written, whole or not at all, on any mesh."""

import errno
import itertools
import json
import math
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import and_slow
from tiny_models import random_params

from jaxrl.checkpoint import store
from jaxrl.checkpoint.store import Damaged, Manifest
from jaxrl.checkpoint.writer import (
    CheckpointWriter,
    Saving,
    load_arrays,
    load_rollout,
    save_arrays,
    save_rollout,
)
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.errors import RunError, UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import param_shardings
from jaxrl.process import atomic_files
from jaxrl.roles.actor import Actor
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("shared_programs")
MODEL = DecoderConfig("llama", 48, 16, 2, 4, 2, 4, 24, tie_embeddings=True, eos_ids=(1,))


def mesh(*shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def actor(m, tmp_path, restore=None, *overrides, seed=0):
    plain = ["algorithm=sft", "teacher.model=null", "optimizer.warmup_steps=0", "steps=9"]
    config = Config.load(None, [*plain, "optimizer.learning_rate=1e-2", *overrides])
    start = random_params(MODEL, seed)
    return Actor(
        config,
        MODEL,
        m,
        load=lambda dtype: jax.device_put(
            jax.tree.map(lambda x: x.astype(dtype), start), param_shardings(MODEL, m)
        ),
        vocab_size=48,
        frozen={},
        rollout_shardings=param_shardings(MODEL, m, "unstacked"),
        run_dir=tmp_path,
        restore=restore,
    )


def rollout(seed=0, row_multiple=8, n=2):
    draw = np.random.default_rng(seed)

    def completion():
        tokens = tuple(draw.integers(2, 48, draw.integers(1, 8)).tolist())
        values = draw.standard_normal((2, len(tokens))).astype(np.float32)
        reason = "stop" if draw.random() < 0.5 else "length"
        return Completion(tokens, values[0], values[1], reason, f"text {draw.random()} é\n")

    prompts = [Prompt(i, tuple(draw.integers(2, 48, 4).tolist()), f"p{i}") for i in range(5)]
    groups = [[completion() for _ in range(n)] for _ in prompts]
    packing = {"pad_id": 0, "max_prompt_tokens": 6, "max_new_tokens": 8}
    made = make_rollout(prompts, groups, policy_version=3, row_multiple=row_multiple, **packing)
    return made, prompts, packing


def state(one):
    return jax.device_get((one.state.params, one.state.opt_state, one.state.updates))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """An actor after two updates, saved after the first; and what it was at both times."""
    folder = tmp_path_factory.mktemp("saved")
    one = actor(mesh(1, 2, 1), folder)
    one.update(rollout(0)[0], {}, step=0)
    before = state(one)
    assert one.save(folder / "1", step=1) == 1
    one.update(rollout(1)[0], {}, step=1)  # donates what is being written
    assert one.saved(1) is None
    return folder / "1", before, state(one)


def test_a_save_is_the_state_at_its_call_though_training_goes_on(saved, tmp_path):
    path, before, after = saved
    again = actor(mesh(1, 2, 1), tmp_path, path, seed=5)
    assert_equal(state(again), before)
    again.update(rollout(1)[0], {}, step=1)
    assert_equal(state(again), after)


@pytest.mark.parametrize(
    "shape", and_slow([(1, 1, 1), (2, 2, 2)], [((1, 8, 1),), ((1, 1, 2),)]), ids=str
)
def test_restores_onto_any_mesh_and_back(saved, tmp_path, shape):
    path, before, _ = saved
    other = actor(mesh(*shape), tmp_path, path)
    assert_equal(state(other), before)
    assert other.version == 1
    other.save(tmp_path / "back", step=1)
    assert other.saved(1) is None
    assert_equal(state(actor(mesh(1, 2, 1), tmp_path, tmp_path / "back")), before)


HALF = ("actor.param_dtype=bfloat16", "actor.moment_dtype=bfloat16")
"""Tests of the one or the other take both, whose programs are the same."""
on_meshes = pytest.mark.parametrize("shape", and_slow([(1, 1, 1)], [((1, 2, 1),)]), ids=str)
"""Weights and moments of half the width are on one device, in slow tests on two."""


@on_meshes
@pytest.mark.parametrize("keys", and_slow([HALF], [(HALF[:1],), (HALF[1:],)]), ids=len)
def test_restores_from_float32_to_bfloat16(saved, tmp_path, keys, shape):
    path, before, _ = saved
    half = actor(mesh(*shape), tmp_path, path, *keys)
    for held, full, key in zip(state(half), before, HALF, strict=False):
        pairs = list(zip(jax.tree.leaves(held), jax.tree.leaves(full), strict=True))
        assert any(x.dtype == jax.numpy.bfloat16 for x, _ in pairs) == (key in keys)
        for x, y in pairs:
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y).astype(x.dtype))
    report = half.update(rollout(1)[0], {}, step=1).metrics
    assert np.isfinite(report["loss"]) and report["optimizer_step"] == 2


@on_meshes
def test_moments_of_older_checkpoints_are_read_whatever_their_dtype(tmp_path, shape):
    """Second moments were once kept in bfloat16 too."""
    one = actor(mesh(*shape), tmp_path, None, *HALF)
    one.update(rollout(0)[0], {}, step=0)
    older = jax.tree.map(lambda x: x.astype("bfloat16") if x.ndim else x, one.state.opt_state)
    one.state = replace(one.state, opt_state=older)
    one.save(tmp_path / "older", step=1)
    assert one.saved(1) is None
    before = state(one)[1]
    again = actor(mesh(*shape), tmp_path, tmp_path / "older", *HALF)
    after = state(again)[1]
    assert {str(x.dtype) for x in jax.tree.leaves(after)} == {"float32", "bfloat16", "int32"}
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x.astype(np.float32), y.astype(np.float32))
    assert again.update(rollout(1)[0], {}, step=1).metrics["optimizer_step"] == 2


@on_meshes
def test_bfloat16_weights_resume_to_the_bit(tmp_path, shape):
    """Their rounding at random depends on the updates done, which a checkpoint holds."""
    one = actor(mesh(*shape), tmp_path, None, *HALF)
    one.update(rollout(0)[0], {}, step=0)
    one.save(tmp_path / "half", step=1)
    assert one.saved(1) is None
    again = actor(mesh(*shape), tmp_path, tmp_path / "half", *HALF, seed=5)
    for each in (one, again):
        each.update(rollout(1)[0], {}, step=1)
    assert_equal(state(again), state(one))


def test_a_restore_takes_no_second_copy(saved, tmp_path):
    """Neither initial weights nor an initial optimizer state are made first."""
    path, _, _ = saved

    def never(dtype):
        raise AssertionError("loaded the initial weights")

    one = actor(mesh(1, 2, 1), tmp_path)
    made = {"vocab_size": 48, "frozen": {}}
    rollout_shardings = param_shardings(MODEL, one.mesh, "unstacked")
    places = {"rollout_shardings": rollout_shardings, "run_dir": tmp_path, "restore": path}
    Actor(one.config, MODEL, one.mesh, load=never, **made, **places)


def test_what_went_wrong_with_a_save_is_told_by_its_own_step(tmp_path, monkeypatch):
    one = actor(mesh(1, 2, 1), tmp_path)
    assert "no save of step 3 was begun" in one.saved(3)
    with pytest.raises(RuntimeError, match="asked to save step 3, the actor holds 0"):
        one.save(tmp_path / "3", step=3)
    one.save(tmp_path / "0", step=0)
    one.update(rollout(0)[0], {}, step=0)
    full = Saving(failed=OSError("no space left"))
    monkeypatch.setattr("jaxrl.roles.actor.save_arrays", lambda *_: full)
    assert one.save(tmp_path / "1", step=1) == 1  # a disk that refuses stops no training
    assert one.saved(1) == "no space left" and one.saved(0) is None


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_a_rollout_comes_back_padded_for_any_mesh(tmp_path, row_multiple):
    made, prompts, packing = rollout()
    topk = np.random.default_rng(0).integers(0, 48, (16, 8, 4)).astype(np.int32)
    topk[10:] = 0
    object.__setattr__(made, "student_topk", topk)
    object.__setattr__(made, "decode_steps", 17)
    save_rollout(tmp_path / "r.npz", made)
    back = load_rollout(tmp_path / "r.npz", prompts, packing | {"row_multiple": row_multiple})
    assert back.completions[3].text == made.completions[3].text
    assert [c.finish_reason for c in back.completions] == [
        c.finish_reason for c in made.completions
    ]
    assert (back.policy_version, back.decode_steps, back.prompts) == (3, 17, made.prompts)
    for name in ("logprobs", "sampler_logprobs", "group_ids", "student_topk"):
        np.testing.assert_array_equal(getattr(back, name)[:10], getattr(made, name)[:10])
    rows = 16 if row_multiple == 8 else 10
    assert len(back.sequences.tokens) == len(back.student_topk) == rows
    for name in ("tokens", "mask", "loss_mask"):
        whole = getattr(made.sequences, name)
        np.testing.assert_array_equal(getattr(back.sequences, name), whole[:rows])


def manifest(step, accuracy=None):
    return Manifest(step, step, (), {"name": "serial"}, {"fingerprint": "f"}, accuracy, {})


def make(run_dir, step, accuracy=None):
    folder = run_dir / store.FOLDER / str(step)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "data").write_bytes(bytes(range(256)) * step)
    return store.commit(folder, manifest(step, accuracy))


def test_what_is_committed_reads_back(tmp_path):
    made = make(tmp_path, 3, 0.5)
    assert store.read(made.path) == made and made.manifest.nbytes == 768
    store.verify(made)
    assert store.newest(tmp_path, print) == made


def damage_cut(folder):
    (folder / "actor" / "data").write_bytes(b"short")


def damage_flip(folder):
    data = bytearray((folder / "actor" / "data").read_bytes())
    data[100] ^= 1
    (folder / "actor" / "data").write_bytes(data)


def damage_missing(folder):
    (folder / "actor" / "data").unlink()


def damage_manifest(folder):
    (folder / store.MANIFEST).write_text('{"step": 3')


def damage_manifest_keys(folder):
    (folder / store.MANIFEST).write_text(json.dumps({"format": 1, "files": {}, "in_flight": []}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_cut, "has 5 bytes, 1024 were written"),
        (damage_flip, "another checksum"),
        (damage_missing, "No such file"),
        (damage_manifest, "cannot be understood"),
        (damage_manifest_keys, "cannot be understood"),
    ],
)
def test_a_damaged_newest_is_told_and_the_one_before_used(tmp_path, damage, told):
    make(tmp_path, 3)
    damage(make(tmp_path, 4).path)
    lines = []
    assert store.newest(tmp_path, lines.append).step == 3
    assert len(lines) == 1 and told in lines[0] and "checkpoint 4" in lines[0]
    assert (tmp_path / store.FOLDER / "4.damaged").is_dir()
    make(tmp_path, 4)  # written again when the run gets there
    assert not (tmp_path / store.FOLDER / "4.damaged").exists()


WRONG = [None, True, -1, 4.0, "4", [], {}, [4], {"4": 4}, float("nan")]
FITS = {
    "accuracy": [None, -1, 4.0],
    "schedule": [{}, {"4": 4}],
    "in_flight": [[], [4]],
    "versions": [{}],
    "depends": [{}],
    "files": [{}],
}
"""Of these, what has the kind that a key asks for; a batch in flight needs its file."""


def test_no_damage_of_a_manifest_is_believed(tmp_path):
    """Every bit, every cut, and every value of a wrong kind, also where an older jaxrl wrote no
    checksum."""
    make(tmp_path, 3)
    path = make(tmp_path, 4).path
    file = path / store.MANIFEST
    whole = file.read_bytes()
    same = store.read(path)

    def check(text):
        file.write_bytes(text)
        try:
            assert store.read(path) == same, text  # such as white space
        except Damaged:
            return
        assert json.loads(text) == json.loads(whole), text

    for at in range(len(whole)):
        check(whole[:at])
        check(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
    unsigned = json.loads(whole)
    del unsigned["checksum"]
    for key in unsigned:
        for value in WRONG:
            if any(value == one and type(value) is type(one) for one in FITS.get(key, ())):
                continue
            file.write_text(json.dumps(unsigned | {key: value}))
            with pytest.raises(Damaged):
                store.read(path)
    for change in ({"in_flight": [4]}, {"in_flight": [3]}, {"step": 5}, {"data": {}}, {"more": 1}):
        file.write_text(json.dumps(unsigned | change))
        with pytest.raises(Damaged):
            store.read(path)
    for text in (b"", b"[]", b"4", b"null", b"[" * 10**5, whole + whole, b"\xff" * 9):
        file.write_bytes(text)
        with pytest.raises(Damaged):
            store.read(path)
    lines = []
    assert store.newest(tmp_path, lines.append).step == 3 and "checkpoint 4" in lines[0]


def test_when_all_are_damaged_nothing_begins_anew(tmp_path):
    damage_cut(make(tmp_path, 3).path)
    with pytest.raises(UserError, match="none of its 1 checkpoints can be used"):
        store.newest(tmp_path, print)


def test_a_format_of_another_version_is_told(tmp_path):
    folder = make(tmp_path, 3).path
    text = (folder / store.MANIFEST).read_text().replace('"format": 1', '"format": 99')
    (folder / store.MANIFEST).write_text(text)
    with pytest.raises(Damaged, match="format 99"):
        store.read(folder)


def test_leftovers_of_killed_saves_are_swept(tmp_path):
    make(tmp_path, 3)
    left = tmp_path / store.FOLDER / "4" / "actor.orbax-checkpoint-tmp"
    left.mkdir(parents=True)
    (left.parent / f".{store.MANIFEST}.partial").write_text("{")
    assert [path.name for path in store.folders(tmp_path)] == ["3"]
    assert store.sweep(tmp_path) == [left.parent] and not left.parent.exists()
    assert store.newest(tmp_path, print).step == 3


@pytest.mark.parametrize(
    "part", ["model.pt", "model", "actor", "rollout_notes/x", "optimizer.pt", ""]
)
def test_what_no_save_wrote_is_neither_removed_nor_taken_for_a_checkpoint(tmp_path, part):
    """Such as the checkpoint of another tool: with or without a save beside it."""
    folder = tmp_path / store.FOLDER / "7"
    foreign = folder / part
    foreign.parent.mkdir(parents=True)
    foreign.write_text("theirs")
    refused = "no folder" if not part else f"holds {Path(part).parts[0]}"
    assert store.sweep(tmp_path) == []
    store.check_places(tmp_path, 6)
    with pytest.raises(UserError, match=f"{refused}, which no run wrote"):
        store.check_places(tmp_path, 7)
    if part:
        (folder / store.CONFIG).write_text("ours")
        with pytest.raises(UserError, match=refused):
            store.commit(folder, manifest(7))
    store.discard(folder)
    assert foreign.read_text() == "theirs" and store.folders(tmp_path) == []


@pytest.mark.parametrize(
    ("last", "best", "kept"),
    [(1, 0, [5]), (2, 0, [4, 5]), (1, 1, [3, 5]), (2, 2, [2, 3, 4, 5]), (9, 0, [1, 2, 3, 4, 5])],
)
def test_newest_and_best_are_kept(tmp_path, last, best, kept):
    """Of equally good ones the newer is the better."""
    accuracies = {1: 0.7, 2: 0.8, 3: 0.8, 4: None, 5: 0.1}
    for step, accuracy in accuracies.items():
        make(tmp_path, step, accuracy)
    store.prune(tmp_path, last, best)
    assert sorted(int(path.name) for path in store.folders(tmp_path)) == kept
    assert sorted(p.name for p in (tmp_path / store.FOLDER).iterdir()) == [str(k) for k in kept]


def test_the_best_are_kept_beside_the_newest_though_a_newest_is_better(tmp_path):
    for step in (2, 4, 6):
        make(tmp_path, step, step / 20)
    store.prune(tmp_path, 1, 1)
    assert [path.name for path in store.folders(tmp_path)] == ["6", "4"]


def test_a_removal_that_is_killed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    make(tmp_path, 1)
    make(tmp_path, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before it began
    store.prune(tmp_path, 1, 0)
    assert [path.name for path in store.folders(tmp_path)] == ["2"]


def test_what_cannot_be_read_is_left_alone_and_stops_no_removal(tmp_path):
    """A manifest that is a folder: an error of the disk, not a checkpoint that is damaged."""
    unreadable = tmp_path / store.FOLDER / "9"
    (unreadable / store.MANIFEST).mkdir(parents=True)
    for step in (1, 2):
        make(tmp_path, step)
    store.prune(tmp_path, 1, 0)
    assert [path.name for path in store.folders(tmp_path)] == ["9", "2"]
    with pytest.raises(UserError, match="move its folder away") as error:
        store.newest(tmp_path, print)
    assert not isinstance(error.value, Damaged)


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/3", "checkpoints/3/actor", "listing"])
def test_a_disk_that_does_not_answer_is_no_folder_without_checkpoints(tmp_path, monkeypatch, gone):
    """Such as one that a link leads to, and that is not mounted: a run that began anew would write
    over its rows."""
    run = tmp_path / "run"
    make(run, 3)
    if gone == "listing":
        stale = OSError(errno.ESTALE, "Stale file handle")
        monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(stale))
    else:
        (run / gone).rename(tmp_path / "disk")
        (run / gone).symlink_to(tmp_path / "disk")
        assert store.newest(run, print).step == 3
        (tmp_path / "disk").rename(tmp_path / "unmounted")
    with pytest.raises(UserError, match="start again when it"):
        store.newest(run, print)
    if gone in ("checkpoints", "listing"):
        with pytest.raises(UserError, match="start again when it"):
            store.sweep(run)


def test_an_accuracy_that_cannot_be_noted_is_told(tmp_path):
    lines = []
    config = Config.load(None, ["steps=9"])
    writer = CheckpointWriter(tmp_path, config, "f", lambda folder: None, lines.append)
    made = make(tmp_path, 3)
    writer.newest = 3
    writer.row({"step": 3, "eval/accuracy": 0.5})
    assert store.read(made.path).manifest.accuracy == 0.5 and not lines
    shutil.rmtree(made.path)
    writer.row({"step": 3, "eval/accuracy": 0.5})
    assert len(lines) == 1 and "could not be noted" in lines[0]
    writer.close(5)
    assert len(lines) == 1


def test_a_save_during_which_files_were_removed_is_no_checkpoint(tmp_path):
    """Its arrays may be among them. The writer writes no other: the run ends, and says why."""
    lines, removed = [], []

    def describe(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")

    def harm():
        shutil.rmtree(tmp_path / "run")
        removed.append(3)

    def check():
        if removed:
            raise RunError("files of the run were removed")

    config = Config.load(None, ["steps=9"])
    run = tmp_path / "run"
    writer = CheckpointWriter(run, config, "f", describe, lines.append, check=check)
    writer.folder(3).mkdir(parents=True)
    writer.begin(3, SimpleNamespace(result=harm), {}, {"generated": 3})
    writer.row({"step": 3, "optimizer_step": 3, "data/epoch": 0.0})
    writer.close(30)
    assert removed and not lines
    assert not list(store.folders(run)) and writer.newest is None and not writer.written
    with pytest.raises(RunError, match="were removed"):
        writer.folder(6)


def test_a_save_that_is_asked_for_after_its_row_is_written_all_the_same(tmp_path):
    """As where a run is asked to end, and the update that follows is cancelled."""
    lines = []
    config = Config.load(None, ["steps=9"])
    writer = CheckpointWriter(
        tmp_path, config, "f", lambda folder: folder.mkdir(parents=True), lines.append
    )
    writer.row({"step": 2, "optimizer_step": 2, "data/epoch": 0.0})
    folder = writer.folder(2)
    folder.mkdir(parents=True)
    writer.begin(2, SimpleNamespace(result=lambda: None), {}, {"generated": 2})
    writer.close(30)
    assert writer.newest == 2 and not lines


@pytest.mark.parametrize("problem", [None, "no space left"])
@pytest.mark.parametrize("late", ["result", "describe", "commit"])
def test_a_writer_that_was_abandoned_touches_and_tells_nothing(
    tmp_path, monkeypatch, problem, late
):
    """The next run of the process has a whole checkpoint in the same place."""
    lines, reached, go_on = [], threading.Event(), threading.Event()

    def wait(*_):
        reached.set()
        assert go_on.wait(30)

    def checked():
        assert not go_on.is_set(), "its lock is closed"

    def result():
        if late == "result":
            wait()
        return problem if late == "result" else None

    settle = atomic_files.settle
    monkeypatch.setattr(atomic_files, "settle", wait if late == "commit" else settle)
    config = Config.load(None, ["steps=9", "checkpoint.keep_last=1"])
    describe = wait if late == "describe" else lambda folder: None
    writer = CheckpointWriter(tmp_path, config, "f", describe, lines.append, check=checked)
    folder = writer.folder(6)
    folder.mkdir(parents=True)
    writer.begin(6, SimpleNamespace(result=result), {}, {"generated": 6})
    writer.row({"step": 6, "optimizer_step": 6, "data/epoch": 0.0})
    assert reached.wait(30)
    if late == "describe":  # it is acting: whoever abandons it waits
        threading.Timer(0.1, go_on.set).start()
        monkeypatch.setattr(writer, "_check", lambda: None)
    writer.abandon()
    monkeypatch.setattr(atomic_files, "settle", settle)
    shutil.rmtree(folder)
    make(tmp_path, 3)
    theirs = make(tmp_path, 6)
    go_on.set()
    writer._thread.join(30)
    assert not writer._thread.is_alive() and not lines and writer.newest is None
    assert [store.read(path).step for path in store.folders(tmp_path)] == [6, 3]
    store.verify(theirs)


def test_a_state_of_other_shapes_is_refused_with_both(tmp_path: Path) -> None:
    """As of an optimizer that an earlier version kept in other shapes."""
    whole = jax.device_put(np.ones((4, 3), np.float32), jax.devices()[0])
    save_arrays(tmp_path / "3" / "actor", {"opt_state": {"v": whole}}).wait()
    wanted = jax.ShapeDtypeStruct((1,), np.float32, sharding=whole.sharding)
    with pytest.raises(UserError, match=r"has the shape \(4, 3\), this run needs \(1,\)"):
        load_arrays(tmp_path / "3" / "actor", {"opt_state": {"v": wanted}})


def test_a_clock_that_jumps_by_ten_years_loses_no_checkpoint(tmp_path, monkeypatch):
    """Orbax compares times of day, and gave up a save that seemed to take twenty years."""
    real, jump = time.time, itertools.cycle([0.0, 10.0, -10.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jump) * 365.25 * 86400)
    tree = {"a": jax.device_put(np.arange(1000.0, dtype=np.float32), jax.devices()[0])}
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    abstract = {"tree": kept}
    for number in range(3):
        save_arrays(tmp_path / str(number), {"tree": tree}).wait()
        read = load_arrays(tmp_path / str(number), abstract)["tree"]
        assert (np.asarray(read["a"]) == np.arange(1000)).all()
