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
from jaxrl.run.run_dir import LOCK, Lock, open_run_dir


def test_a_removed_lock_is_taken_again(tmp_path: Path) -> None:
    with closing(Lock(tmp_path)) as lock:
        assert not lock.check()
        (tmp_path / LOCK).unlink()
        assert lock.check() and not lock.check()
        with pytest.raises(UserError, match="is in use by pid"):
            Lock(tmp_path)
    Lock(tmp_path).close()


def test_who_finds_another_run_in_its_folder_ends(tmp_path: Path) -> None:
    with closing(Lock(tmp_path)) as first:
        (tmp_path / LOCK).unlink()
        with closing(Lock(tmp_path)) as second:
            with pytest.raises(RunError, match="is in use by pid .* too: the lock of this run was"):
                first.check()
            assert not second.check()


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
        assert folder.lock is not None and not folder.lock.check()


def test_a_removed_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with closing(Lock(folder)) as lock:
        shutil.rmtree(folder)
        assert lock.check() and not lock.check()
        assert folder.is_dir()
