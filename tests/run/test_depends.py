"""What a run depends on: a change is noticed by its digest, and refused or reported on resume."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxrl.checkpoint import store
from jaxrl.checkpoint.fingerprint import (
    WHOLE_BYTES,
    change_of,
    changes,
    digest_file,
    digest_model,
)
from jaxrl.checkpoint.store import Manifest
from jaxrl.checkpoint.writer import versions
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.run import attempt
from jaxrl.run.run_dir import RunDir, find_run


def test_small_files_are_digested_whole(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(completion): return 1.0\n" * 1000)
    before = digest_file(file)
    file.write_text(file.read_text()[:-5] + "2.0 \n")
    assert digest_file(file) != before


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf", ".bin"])
def test_other_weights_of_the_same_size_are_noticed(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    rng = np.random.default_rng(0)
    one, two = (rng.bytes(WHOLE_BYTES * 2) for _ in range(2))
    file.write_bytes(one)
    before = digest_file(file)
    assert digest_file(file) == before
    for other in (two, one[: len(one) // 2] + two[len(one) // 2 :], one[:-1], one + b"x"):
        file.write_bytes(other)
        assert digest_file(file) != before


def test_a_renamed_tensor_is_noticed(tmp_path: Path) -> None:
    array = np.zeros((2 * WHOLE_BYTES,), np.uint8)
    digests = []
    for name in ("a", "b"):
        save_file({name: array}, tmp_path / "model.safetensors")
        digests.append(digest_file(tmp_path / "model.safetensors"))
    assert digests[0] != digests[1]


def test_a_folder_is_what_is_read_from_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    whole, described = digest_model(tmp_path), digest_model(tmp_path, weights=False)
    (tmp_path / "README.md").write_text("no part of the model")
    assert (digest_model(tmp_path), digest_model(tmp_path, False)) == (whole, described)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert digest_model(tmp_path) != whole and digest_model(tmp_path, False) == described
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert digest_model(tmp_path, False) != described


def test_a_folder_named_like_a_commit_is_one_in_the_hub_s_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "models--org--x" / "snapshots" / ("0" * 40)
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    before = digest_model(place)
    (place / "config.json").write_text('{"a": 1}')
    assert digest_model(place) != before
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert digest_model(place) == place.name


def test_what_only_one_side_knows_is_no_change() -> None:
    assert changes({"a": "1", "b": "1"}, {"a": "2", "b": "1", "c": "1"}) == ["a"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a checkpoint that depends on a teacher of other versions of packages."""
    config = Config.load(None, [f"run_dir={tmp_path}"])
    folder = tmp_path / store.FOLDER / "3"
    folder.mkdir(parents=True)
    (folder / store.CONFIG).write_text(config.dump())
    known = versions() | {"jax": "0.1"}
    depends = {"teacher.model=t": "1"}
    manifest = Manifest(3, 3, (), {}, {"fingerprint": "f"}, None, known, depends)
    store.commit(folder, manifest)
    return tmp_path


def test_what_has_changed_is_refused_by_name_and_versions_are_reported(run: Path) -> None:
    config = Config.load(None, [f"run_dir={run}"])
    same = find_run(run, config, {"data.train": "f", "teacher.model=t": "1"})
    assert same.step == 3
    (note,) = (note for note in same.notes if "changed since" in note)
    assert note.startswith("changed since: jax 0.1 there, ")
    other = {"data.train": "g", "teacher.model=t": "2"}
    with pytest.raises(UserError, match="resume_changed=true") as error:
        find_run(run, config, other)
    assert "what data.train and teacher.model=t names has changed since step 3" in str(error.value)
    (alone,) = re.findall(r"resume_changed=true \(or (\[.*\]) alone\)", str(error.value))
    for allows in ("true", alone):
        allowed = Config.load(None, [f"run_dir={run}", f"resume_changed={allows}"])
        notes = find_run(run, allowed, other).notes
        assert "changed since: what teacher.model=t names" in notes


def test_a_checkpoint_of_an_older_jaxrl_is_resumed(run: Path) -> None:
    path = run / store.FOLDER / "3" / store.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["depends"], manifest["checksum"]
    path.write_text(json.dumps(manifest))
    config = Config.load(None, [f"run_dir={run}"])
    assert find_run(run, config, {"data.train": "f", "teacher.model=t": "2"}).step == 3


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("name", "judges"),
    [
        ("data.train", False),
        ("student.model=m", False),
        ("environment.name=e", False),
        ("data.eval", True),
        ("reward.functions=f", True),
    ],
)
def test_batches_made_ahead_are_kept_only_where_what_made_them_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, judges: bool, kept: bool
) -> None:
    depends = {"data.train": "a", name: "a"}
    data = {"fingerprint": depends["data.train"]}
    manifest = Manifest(3, 3, (3, 9), {}, data, None, {}, depends)
    now = depends if kept else depends | {name: "b"}
    notes: list[str] = []
    run = SimpleNamespace(
        folder=SimpleNamespace(
            checkpoint=store.Checkpoint(tmp_path, manifest),
            step=3,
            changed=[change_of(name) for name in changes(manifest.digests, now)],
        ),
        job=SimpleNamespace(
            config=Config.load("builtin:quickstart", ["steps=9"]),
            train=SimpleNamespace(batch=lambda index: []),
            held_out=(),
        ),
        notify=notes.append,
    )
    monkeypatch.setattr(attempt, "load_rollout", lambda path, *_: path.name)
    ahead = attempt._generated_ahead(run, {})  # type: ignore[arg-type]
    expected = {3: store.rollout_file(3)} if kept or judges else {}
    assert ahead == expected and len(notes) == (not expected)
    assert not notes or ("batches 3)" in notes[0] and name in notes[0])


@pytest.mark.parametrize(
    ("rows", "checkpoint", "done", "left"),
    [
        ((0, 2, 4), 4, True, None),
        ((0, 2, 4), 2, True, "final.before"),  # the last checkpoint could not be written
        ((), 2, False, "final.before"),
    ],
)
def test_an_exported_model_goes_only_where_a_checkpoint_has_it(
    tmp_path: Path, rows: tuple[int, ...], checkpoint: int, done: bool, left: str | None
) -> None:
    """More steps make the run train on; the same number leaves the model where it is."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {row}}}\n' for row in rows))
    manifest = Manifest(checkpoint, 1, (), {}, {"fingerprint": ""}, None, {})
    folder = RunDir(tmp_path, store.Checkpoint(tmp_path / "checkpoints", manifest), ())
    assert (folder.finished(4), folder.finished(8)) == (done, False)
    notes: list[str] = []
    folder.clear_final(notes.append)
    assert [p.name for p in tmp_path.glob("final*")] == ([] if left is None else [left])
    assert len(notes) == (left is not None)


def test_only_what_is_listed_may_change(run: Path) -> None:
    other = {"data.train": "g", "teacher.model=t": "2"}
    for listed in ("[data.train]", "[teacher.model]", "[]"):
        config = Config.load(None, [f"run_dir={run}", f"resume_changed={listed}"])
        with pytest.raises(UserError) as error:
            find_run(run, config, other)
        assert ("data.train" in str(error.value)) != ("data.train" in listed)
    config = Config.load(None, [f"run_dir={run}", "resume_changed=[data.train,teacher.model]"])
    found = find_run(run, config, other)
    asked = [change for change in found.changed if change.asked]
    assert [change.what for change in asked] == ["data.train", "teacher.model=t"]
    noted = json.loads(found.sessions_with("m").splitlines()[-1])["changed"]
    assert noted[:2] == ["what data.train names", "what teacher.model=t names"]
    assert noted[2].startswith("jax 0.1 there") and len(noted) == 3


def test_what_a_changed_key_decides_too_is_not_compared(run: Path) -> None:
    manifest = store.newest(run, print)
    assert manifest is not None
    depends = {"data.train": "g", "teacher.model=t": "1"}
    words = [f"run_dir={run}", "max_new_tokens=64", "resume_changed=[max_new_tokens]"]
    found = find_run(run, Config.load(None, words), depends)
    note = "what data.train names is not compared: max_new_tokens is another too"
    assert note in found.notes
    (change,) = (change for change in found.changed if change.asked)
    assert change.what == "max_new_tokens" and change.remakes
    with pytest.raises(UserError, match="what data.train names has changed"):
        find_run(run, Config.load(None, [*words[:1], words[2]]), depends)
