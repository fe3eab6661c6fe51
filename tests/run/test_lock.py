"""Two runs never share a folder, whatever somebody removes from it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from jaxrl.config.schema import Config
from jaxrl.errors import RunError, UserError
from jaxrl.run.run_dir import LOCK, Lock, check_folder, open_run_dir
from jaxrl.telemetry.metrics import JsonLines


@pytest.mark.parametrize("removed", ["lock", "folder", "replaced"])
def test_who_finds_its_folder_removed_ends(tmp_path: Path, removed: str) -> None:
    path = tmp_path / "run"
    path.mkdir()
    with open_run_dir(Config.load(None, [f"run_dir={path}"]), {}) as folder:
        with closing(JsonLines(path / "m.jsonl")) as metrics:
            files = {"m.jsonl": metrics}
            check_folder(folder, files)
            if removed == "folder":
                shutil.rmtree(path)
            else:
                (path / (LOCK if removed == "lock" else "m.jsonl")).unlink()
            if removed == "replaced":
                (path / "m.jsonl").write_text("of somebody else")
            gone = {"lock": LOCK, "folder": f"m.jsonl, {LOCK}", "replaced": "m.jsonl"}[removed]
            with pytest.raises(RunError, match=f"removed or replaced during the run: {gone}"):
                check_folder(folder, files)
        if removed == "lock":
            with closing(Lock(path)) as second:
                assert second.in_place()


@pytest.mark.parametrize("name", ["ENOSYS", "ENOTSUP", "ENOLCK", "EWOULDBLOCK", "EACCES"])
def test_a_file_system_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    why = os.strerror(number := getattr(errno, name))

    def flock(*_: object) -> None:
        raise OSError(number, why)

    monkeypatch.setattr(fcntl, "flock", flock)
    if name in ("EWOULDBLOCK", "EACCES"):
        with pytest.raises(UserError, match="is in use by another process"):
            Lock(tmp_path)
        return
    with open_run_dir(Config.load(None, [f"run_dir={tmp_path}"]), {}) as folder:
        assert f"cannot be locked: {why}" in folder.notes[0]
        assert folder.lock is not None and folder.lock.in_place()
