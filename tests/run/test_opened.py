"""What a run has opened stays what it was, or the run ends with the name of what has changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
from runs import save_model
from safetensors.numpy import save_file

import jaxrl
from jaxrl import export
from jaxrl.checkpoint.fingerprint import digest_weights
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.source import open_source
from jaxrl.errors import UserError
from jaxrl.formats import opened, peft
from jaxrl.formats.hf import SafetensorsFolder, TokenizerFiles
from jaxrl.models.lora import Lora
from jaxrl.process.plugin import code_files
from jaxrl.run import job as job_module
from jaxrl.run import launch
from jaxrl.run.job import check_inputs, dependencies, make_job

ROWS = [{"prompt": f"question {i}", "completion": "a"} for i in range(9)]


def lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


FORMATS: dict[str, Callable[[Path, list[dict[str, str]]], object]] = {
    "x.jsonl": lines,
    "x.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "lines.json": lines,
    "x.csv": lambda path, rows: pandas.DataFrame(rows).to_csv(path, index=False),
    "x.parquet": lambda path, rows: pandas.DataFrame(rows).to_parquet(path, row_group_size=2),
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(path),
}
OTHERS = [{"prompt": f"QUESTION {i}", "completion": "b"} for i in range(9)]


@pytest.mark.parametrize("how", ["in place", "replaced", "shorter", "removed", "touched"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("link", [False, True])
def test_rows_are_those_that_were_opened_or_the_file_is_named(
    tmp_path: Path, name: str, how: str, link: bool
) -> None:
    (tmp_path / "own").mkdir()
    path = named = tmp_path / "own" / name
    FORMATS[name](path, ROWS)
    if link:  # as in the cache of a hub
        (named := tmp_path / name).symlink_to(path)
    source = open_source(str(named))
    rows = [source[i] for i in range(len(source))]
    if how == "touched":
        files = [*path.iterdir()] if path.is_dir() else [path]
        for file in files:
            os.utime(file, (1, 1))
    elif how == "removed":
        path.rename(path.with_name("away"))
    elif how == "in place" and path.suffix in (".jsonl", ".json", ".csv"):
        made = path.with_name(f"made{path.suffix}")
        FORMATS[name](made, OTHERS)
        path.write_bytes(made.read_bytes())
    else:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        FORMATS[name](path, OTHERS[:1] if how == "shorter" else OTHERS)
    for i, row in enumerate(rows):
        try:
            assert source[i] == row
        except UserError as error:
            assert how != "touched"
            assert "has changed since" in str(error) and name in str(error)
            assert how == "removed" or "resume_changed" in str(error)


def test_code_is_digested_with_all_that_it_imports_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "rew.py": "import numpy, jaxrl, absent\nfrom helper import g\ndef f(**_):\n import late",
        "helper.py": "import rew\nfrom pack.inner import thing\nfrom pack import other",
        "late.py": "def broken(:",
        "pack/__init__.py": "from . import top",
        "pack/top.py": "",
        "pack/inner/__init__.py": "from ..sibling import x\nfrom .deep import y",
        "pack/inner/deep.py": "",
        "pack/sibling.py": "",
        "pack/other.py": "",
        "unrelated.py": "",
        "pack/unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    run = {str(tmp_path / name) for name in files if "unrelated" not in name}
    by_file = code_files(str(tmp_path / "rew.py"))
    assert {path for path, _ in by_file} == run and by_file[0][0].endswith("rew.py")
    monkeypatch.chdir(tmp_path)  # where modules are found last
    assert code_files("rew") == by_file
    monkeypatch.chdir("/")
    monkeypatch.syspath_prepend(tmp_path)
    assert code_files("rew") == by_file
    assert code_files("pack.inner.deep")[0][0].endswith("deep.py")
    assert [Path(path).name for path, _ in code_files("numpy.linalg")] == ["__init__.py"]
    assert code_files("absent.module") == ()
    for path in run:
        before = code_files("rew")
        Path(path).write_text(Path(path).read_text() + "\n")
        assert len(set(before) ^ set(code_files("rew"))) == 2


def test_workers_and_saves_have_what_the_run_began_with(tmp_path: Path) -> None:
    assets = Path(jaxrl.__file__).parent / "assets"
    shutil.copytree(assets / "student", tmp_path / "student")
    (tmp_path / "rew.py").write_text("import helper\ndef f(completions, **_): return [1.0]")
    (tmp_path / "helper.py").write_text("# helps")
    data = tmp_path / "d.jsonl"
    lines(data, [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(32)])
    config = Config.load(
        "builtin:quickstart",
        [
            "algorithm=gspo",
            "teacher.model=null",
            "group_size=2",
            "mesh=actor+rollout+reference+reward=1",
            f"reward.functions={tmp_path / 'rew.py'}:f",
            f"student.model={tmp_path / 'student'}",
            f"data.train={data}",
            "data.eval=null",
            "eval.every=0",
            "student.lora.rank=2",
        ],
    )
    job = make_job(config)
    depends = dependencies(job)
    setup = replace(job, opened=depends)
    kept = TokenizerFiles.read(tmp_path / "student").contents
    changes = {
        "student/model.safetensors": ("actor", "rollout", "reference"),
        "rew.py": ("reward",),
        "helper.py": ("reward",),
    }
    for name, roles in changes.items():
        for role in roles:
            check_inputs(setup, role)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-2] + b" " + whole[-1:])
        for role in roles:
            with pytest.raises(UserError, match="has changed since"):
                check_inputs(setup, role)
        check_inputs(setup, "grouper")
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "student").rename(tmp_path / "moved")
    job.describe_policy(tmp_path / "saved")
    for name, contents in kept.items():
        assert (tmp_path / "saved" / name).read_bytes() == contents


def test_weights_that_a_worker_reads_again_are_those_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any byte of what was read, however it is sliced; a resumed run too, unless that may have
    others."""
    monkeypatch.setattr(opened, "PIECE_BYTES", 64)
    monkeypatch.setattr(launch.job, "check_inputs", lambda *_: None)
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "linked").symlink_to(folder)
    file = folder / "model.safetensors"
    random = np.random.default_rng(0)
    tensors = {"a": random.normal(size=(12, 10)), "b": random.normal(size=7), "c": np.ones(())}
    save_file({name: x.astype(np.float32) for name, x in tensors.items()}, file)
    whole = file.read_bytes()
    boxes: dict[str, list[tuple[str, tuple[slice, ...]]]] = {
        "whole": [("a", (slice(0, 12), slice(0, 10))), ("b", (slice(0, 7),)), ("c", ())],
        "columns": [("a", (slice(0, 12), slice(i, i + 5))) for i in (0, 5)],
        "rows": [("a", (slice(4, 8), slice(0, 10)))],
    }

    def make(
        how: str, session: str, resumes: bool = False, allowed: bool | tuple[str, ...] = False
    ) -> None:
        def maker(*_: object) -> None:
            source = SafetensorsFolder(folder)
            for name, box in boxes[how]:
                source.read(name, box)

        monkeypatch.setitem(launch.MAKERS, "actor", maker)
        setup = SimpleNamespace(
            run_dir=tmp_path / "run",
            session=session,
            restore=tmp_path if resumes else None,
            config=SimpleNamespace(resume_changed=allowed),
        )
        models = [
            ("teacher.model", "teacher.model=x", folder, str),
            ("student.model", "student.model=x", tmp_path / "linked", str),
            ("student.model", "student.model, weights under it", folder, str),
            ("reward.model", "reward.model=x", folder, str),
        ]
        monkeypatch.setattr(job_module, "_models", lambda setup: models)
        launch.build_role("actor", setup, {})  # type: ignore[arg-type]

    make("whole", "first")
    noted = json.loads((tmp_path / "run" / "opened" / "actor-0.json").read_text())["weights"]
    assert len(noted[str(file)]) == 8 + 1 + 1
    start = len(whole) - 4 * (120 + 7 + 1)
    for at in range(start, len(whole), 29):
        changed = bytearray(whole)
        changed[at] ^= 1
        file.write_bytes(changed)
        for session, resumes in (("first", False), ("second", True)):
            with pytest.raises(UserError, match=r"model\.safetensors has changed since .*tensor"):
                make("whole", session, resumes)
    for how in ("columns", "rows", "whole"):  # another mesh
        file.write_bytes(whole)
        make(how, "second", resumes=True)
    changed = bytearray(whole)
    changed[start + 4 * 45] ^= 1  # in the rows
    file.write_bytes(changed)
    for how in ("columns", "rows"):
        with pytest.raises(UserError, match="tensor a"):
            make(how, "second")
    make("whole", "third")  # a run that starts over
    file.write_bytes(whole)
    for listed in ((), ("data.train",), ("reward.model",), ("student.model", "reward.model")):
        with pytest.raises(UserError, match="has changed since"):
            make("whole", "fourth", resumes=True, allowed=listed)
    now: bool | tuple[str, ...]
    for i, now in enumerate((True, ("student.model", "teacher.model"))):
        changed[start] ^= 1 + i
        file.write_bytes(changed)
        make("columns", f"fourth{i}", resumes=True, allowed=now)
        assert f"actor: changed since: {file}, tensor a\n" in capfd.readouterr().err
        record = json.loads((tmp_path / "run" / "opened" / "actor-0.json").read_text())
        assert record["changed"] == [f"{file}, tensor a"]
        make("whole", f"fourth{i}", resumes=True, allowed=now)  # a worker that is started again
        changed[start + 4 * 45] ^= 1
        file.write_bytes(changed)
        with pytest.raises(UserError, match="has changed since"):
            make("whole", f"fourth{i}", resumes=True, allowed=now)


def test_adapters_are_applied_to_the_weights_that_they_were_trained_on(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", 32, 1, seed=0)
    student = resolve_model(base).with_lora(Lora(2, 4.0, ("q_proj",)))
    adapters = student.load_adapters(None, np.float32, 0)
    digest = digest_weights(student.base_path)
    final = tmp_path / "final"
    peft.save(final, student.config, student.base_name, adapters, None, digest)
    resolve_model(final)
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")  # has no part in it
    resolve_model(final)
    export(final, tmp_path / "again", adapters=True)
    save_model(tmp_path / "base", 32, 1, seed=1)
    for place in (final, tmp_path / "again"):
        with pytest.raises(UserError, match=r"base.* has changed since"):
            resolve_model(place)
    save_model(tmp_path / "base", 32, 1, seed=0)
    resolve_model(final)
    peft.save(final, student.config, student.base_name, adapters)  # as an older jaxrl did
    save_model(tmp_path / "base", 32, 1, seed=1)
    resolve_model(final)
