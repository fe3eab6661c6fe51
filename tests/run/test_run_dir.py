"""What a run finds in its folder is taken up, moved aside or refused: nothing of it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl.checkpoint import store
from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.run.run_dir import RunDir, check_run_dir, find_run


def test_rows_of_a_run_without_a_checkpoint_are_moved_aside(tmp_path: Path) -> None:
    names = ("metrics.jsonl", "samples.jsonl", "sessions.jsonl")
    for name in names:
        (tmp_path / name).write_text("mine\n")
    folder = find_run(tmp_path, Config.load(None, [f"run_dir={tmp_path}"]), {})
    assert folder.checkpoint is None and "starts over" in folder.notes[-1]
    notes = folder.set_aside()
    for name, note in zip(names, notes, strict=True):
        assert note.endswith(f"it is now {tmp_path / name}.before")
        assert not (tmp_path / name).exists()
        assert (tmp_path / f"{name}.before").read_text() == "mine\n"


def test_what_was_there_before_the_first_start_is_moved_aside(tmp_path: Path) -> None:
    """Such as the file that `--config` names; the run writes its own of that name."""
    for name in ("config.yaml", "plan.txt", "timeline.json"):
        (tmp_path / name).write_text("steps: 3")
    config = Config.load(None, [f"run_dir={tmp_path}"])
    folder = find_run(tmp_path, config, {})
    assert len(folder.set_aside()) == 3
    assert (tmp_path / "config.yaml.before").read_text() == "steps: 3"
    for name in ("config.yaml", "sessions.jsonl", "timeline.json"):
        folder.write(name, "its own")
    assert RunDir(tmp_path, None, ()).set_aside() == []  # killed before its first row


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / store.FOLDER).symlink_to(tmp_path / "unmounted" / "run")
    config = Config.load(None, [f"run_dir={tmp_path}"])
    for ask in (lambda: check_run_dir(config), lambda: find_run(tmp_path, config, {})):
        with pytest.raises(UserError, match=r"is a link to .*unmounted/run, which is not there"):
            ask()
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "unmounted")
    with pytest.raises(UserError, match="is no folder"):
        check_run_dir(Config.load(None, [f"run_dir={run}"]))


def test_a_model_that_a_start_would_delete_is_refused_and_other_files_are_not(
    tmp_path: Path,
) -> None:
    config = Config.load(None, [f"run_dir={tmp_path}"])
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert find_run(tmp_path, config, {}).checkpoint is None
    (tmp_path / "final" / "config.json").write_text("{}")
    for rows in ("{}\n", ""):
        (tmp_path / "metrics.jsonl").write_text(rows)
        with pytest.raises(UserError, match="holds a trained model"):
            find_run(tmp_path, config, {})


def test_a_leftover_that_is_removed_is_told_and_a_foreign_one_refused_early(tmp_path: Path) -> None:
    config = Config.load(None, [f"run_dir={tmp_path}"])
    (tmp_path / store.FOLDER / "2" / "actor").mkdir(parents=True)
    assert find_run(tmp_path, config, {}).notes == ("removed an unfinished checkpoint: 2",)
    (tmp_path / store.FOLDER / "2" / "actors").mkdir(parents=True)
    with pytest.raises(UserError, match="holds actors, which no run wrote"):
        check_run_dir(config)
