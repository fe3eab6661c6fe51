"""What stands where a model is written: only a model's files go, nothing behind a link is touched,
and nothing of a killed export is left."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl.checkpoint import store
from jaxrl.errors import UserError
from jaxrl.formats import hf
from jaxrl.process import atomic_files

OLD = {"config.json": "old", "model-00001-of-00002.safetensors": "old", hf.INDEX: "old"}
FOREIGN = {"notes.txt": "mine", "model.safetensors.bak": "mine", "runs/x.log": "mine"}
NEW = {"config.json": "new", "model.safetensors": "new", "tokenizer.json": "new"}


def fill(folder: Path, *files: dict[str, str]) -> Path:
    for name, text in [pair for some in files for pair in some.items()]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file.read_text()
        for file in folder.rglob("*")
        if file.is_file()
    }


def write(path: Path) -> None:
    with hf.replaced_folder(path) as partial:
        fill(partial, NEW)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fill(tmp_path / "run", {"lock": ""})


def test_of_a_folder_only_the_files_of_a_model_go(run: Path) -> None:
    fill(run / "final", OLD, FOREIGN)
    (run / "final/link").symlink_to(run / "lock")
    write(run / "final")
    assert contents(run / "final") == NEW | FOREIGN | {"link": ""}
    assert sorted(os.listdir(run)) == ["final", "lock"]


LINKS: dict[str, Callable[[Path], object]] = {
    "a folder of somebody's": lambda place: fill(place, FOREIGN),
    "another model": lambda place: fill(place, OLD),
    "a model and more": lambda place: fill(place, OLD, FOREIGN),
    "a file": lambda place: place.write_text("mine"),
    "a link to a folder": lambda place: place.symlink_to(fill(place.with_name("far"), OLD)),
    "a link to itself": lambda place: place.symlink_to(place),
    "a missing folder": lambda place: None,
}


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("removed_before", [False, True])
def test_nothing_is_written_or_removed_behind_a_link(
    run: Path, tmp_path: Path, kind: str, removed_before: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    LINKS[kind](elsewhere / "precious" if kind != "a missing folder" else elsewhere)
    target = elsewhere / ("precious" if kind != "a missing folder" else "a/b")
    (run / "final").symlink_to(target)
    before = contents(elsewhere)
    if removed_before:
        hf.remove_model(run / "final")
        assert (run / "final").is_symlink()
    write(run / "final")
    assert contents(elsewhere) == before
    assert contents(run / "final") == NEW and not (run / "final").is_symlink()
    assert os.readlink(run / "final.before") == str(target)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_link_to_an_empty_place_is_where_the_model_goes(
    run: Path, tmp_path: Path, is_made: bool
) -> None:
    place = tmp_path / "other disk" / "model"
    place.parent.mkdir()
    if is_made:
        place.mkdir()
    (run / "final").symlink_to(place)
    write(run / "final")
    assert (run / "final").is_symlink() and contents(place) == NEW
    assert os.listdir(place.parent) == ["model"]
    write(run / "final")  # the model there may be anybody's by now
    assert contents(place) == NEW and not (run / "final").is_symlink()


def test_a_file_is_kept_under_another_name(run: Path) -> None:
    for i, text in enumerate(("one", "two")):
        hf.remove_model(run / "final")
        fill(run, {"final": text})
        write(run / "final")
        assert (run / f"final.before{'-2' * i}").read_text() == text
    assert contents(run / "final") == NEW


def test_where_a_disk_is_mounted_the_user_is_told_before(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(run / "final", OLD)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == run / "final")
    with pytest.raises(UserError, match="where a disk is mounted"):
        write(run / "final")
    assert contents(run / "final") == OLD


def test_a_device_or_a_pipe_is_refused(run: Path) -> None:
    os.mkfifo(run / "final")
    for path in (run / "final", Path("/dev/tty")):
        with pytest.raises(UserError, match="neither a folder nor a file"):
            atomic_files.check_replaceable(path)
    with pytest.raises(UserError, match="neither a folder nor a file"):
        write(run / "final")
    assert sorted(os.listdir(run)) == ["final", "lock"]


def test_a_failed_write_changes_nothing(run: Path) -> None:
    fill(run / "final", OLD, FOREIGN)
    with pytest.raises(OSError, match="full"), hf.replaced_folder(run / "final") as partial:
        fill(partial, NEW)
        raise OSError("full")
    assert contents(run / "final") == OLD | FOREIGN
    assert sorted(os.listdir(run)) == ["final", "lock"]


def test_what_killed_exports_left_is_removed(run: Path) -> None:
    """And what is of a living one, or of nobody's, stays."""
    for pid in (3, 99999999):
        fill(run / f".final.partial-{pid}", NEW)
    fill(run / ".final.partial-mine", FOREIGN)
    fill(run / ".finally.partial-3", FOREIGN)
    with hf.replaced_folder(run / "final") as partial:
        fill(partial, NEW)
        atomic_files.sweep(run / "final", hf.is_model_file)
        assert contents(partial) == NEW
    left = {"final", "lock", ".final.partial-mine", ".finally.partial-3"}
    assert set(os.listdir(run)) == left
    atomic_files.sweep(run / "final", hf.is_model_file)
    assert set(os.listdir(run)) == left


def test_a_model_that_a_killed_export_had_moved_away_is_put_back(run: Path) -> None:
    fill(run / ".final.old-3", OLD, FOREIGN)
    atomic_files.sweep(run / "final", hf.is_model_file)
    assert contents(run / "final") == OLD | FOREIGN
    fill(run / ".final.old-3", OLD, {"other.txt": "mine"})
    atomic_files.sweep(run / "final", hf.is_model_file)
    assert contents(run / "final") == OLD | FOREIGN | {"other.txt": "mine"}
    assert sorted(os.listdir(run)) == ["final", "lock"]


EXPORT = """
import sys, time
from pathlib import Path
from jaxrl.formats import hf
with hf.replaced_folder(sys.argv[1]) as partial:
    (partial / "model.safetensors").write_bytes(bytes(1000))
    print("begun", flush=True)
    time.sleep(600)
"""


def test_a_killed_export_leaves_nothing_to_the_next(run: Path) -> None:
    command = [sys.executable, "-c", EXPORT, str(run / "final")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    write(run / "final")  # beside one that lives
    assert (run / f".final.partial-{process.pid}").is_dir()
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 30
    while (run / f".final.partial-{process.pid}").is_dir() and time.monotonic() < end:
        write(run / "final")
    assert sorted(os.listdir(run)) == ["final", "lock"]


def test_a_file_system_without_locks_takes_a_model(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others are writing, or killed ones left, stays: none is told from the other."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    left = fill(run / f".final.partial-{os.getpid()}", {"model.safetensors": "theirs"})
    write(run / "final")
    assert (run / "final").is_dir() and contents(left) == {"model.safetensors": "theirs"}


# Checkpoints


def test_no_checkpoint_behind_a_link_is_removed(run: Path, tmp_path: Path) -> None:
    place = fill(tmp_path / "elsewhere", {"manifest.json": "{}", "actor/x": "mine"})
    bare = fill(tmp_path / "bare", {"actor/x": "mine"})
    steps = run / store.FOLDER
    steps.mkdir()
    (steps / "4").symlink_to(bare)
    (steps / "8").symlink_to(place)
    (steps / "8.damaged").symlink_to(place)
    before = contents(tmp_path)
    store.sweep(run)
    atomic_files.remove(steps / "8")
    atomic_files.remove(steps / "8.damaged")
    assert not list(steps.iterdir())
    assert {k: v for k, v in before.items() if not k.startswith("run/ch")} == contents(tmp_path)


@pytest.mark.parametrize("name", ["2024", "007", "\u00b2", "\uff12", "5"])
def test_folders_that_are_no_checkpoints_stay(run: Path, name: str) -> None:
    fill(run / store.FOLDER / name, {"mine.txt": "mine"})
    fill(run / store.FOLDER / "3", {"actor/x": "", "config.yaml": "", ".manifest.json.partial": ""})
    fill(run / store.FOLDER, {"6": "a file"})
    assert [path.name for path in store.sweep(run)] == ["3"]
    assert store.folders(run) == []
    assert contents(run / store.FOLDER) == {f"{name}/mine.txt": "mine", "6": "a file"}
