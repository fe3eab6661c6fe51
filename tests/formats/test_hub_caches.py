"""Caches that any huggingface_hub filled are read where the hub is not asked or does not answer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from gguf_models import write_model
from huggingface_hub import constants
from runs import save_model, save_reward_model

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.source import open_source
from jaxrl.errors import UserError
from jaxrl.formats import hub as hub_module
from jaxrl.roles.grouper import embed
from jaxrl.roles.reward import score
from jaxrl.run.names import fetch_models, with_commits

REFERENCES = Path(__file__).parent.parent / "references"
COMMIT = "a1" * 20
README = "---\nconfigs:\n- data_files:\n  - split: train\n    path: %s\n---\n"
ROW = json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n"
SETS = {
    "datasets/org/rows": {"README.md": README % "train.jsonl", "train.jsonl": ROW},
    "datasets/org/parts": {
        f"data/train-0000{i}-of-00002.jsonl": ROW.replace("2", str(2 + i)) for i in (0, 1)
    },
    "datasets/org/bare": {"train.jsonl": ROW},
}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Repository -> path -> contents."""
    folder = tmp_path_factory.mktemp("repositories")
    (folder / "gguf").mkdir()
    write_model(folder / "gguf" / "tiny-q8_0.gguf", "llama")
    models = {
        "org/student": Path(save_model(folder / "student", 32, 1, seed=0)),
        "org/reward": Path(save_reward_model(folder)),
        "org/encoder": shutil.copytree(REFERENCES / "tiny_bge", folder / "encoder"),
        "org/gguf": folder / "gguf",
    }
    found = {
        repo: {p.relative_to(at).as_posix(): p.read_bytes() for p in at.rglob("*") if p.is_file()}
        for repo, at in models.items()
    }
    sets = {repo: {p: text.encode() for p, text in files.items()} for repo, files in SETS.items()}
    return found | sets


Layout = Callable[[Path, Mapping[str, bytes]], None]


def linked(place: Path, files: Mapping[str, bytes]) -> None:
    """As on Linux: contents by their hash, relative links to them."""
    for path, content in files.items():
        blob = place / "blobs" / hashlib.sha256(content).hexdigest()
        link = place / "snapshots" / COMMIT / path
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def noting_what_is_not_there(place: Path, files: Mapping[str, bytes]) -> None:
    """As from 0.14 on: an empty file for each that was looked for in vain; and locks."""
    linked(place, files)
    (place / ".no_exist" / COMMIT).mkdir(parents=True)
    (place / ".no_exist" / COMMIT / "adapter_config.json").touch()
    locks = place.parent / ".locks" / place.name
    locks.mkdir(parents=True)
    (locks / f"{'0' * 64}.lock").touch()


def broken_off(place: Path, files: Mapping[str, bytes]) -> None:
    """With the remains of another download, also those that newer libraries leave."""
    linked(place, files)
    (place / "blobs" / f"{'0' * 64}.incomplete").write_bytes(b"half")
    (place / "blobs" / f"{'0' * 64}.1a2b3c4d.incomplete").write_bytes(b"half")


def without_links(place: Path, files: Mapping[str, bytes]) -> None:
    """As where links are not possible, and as a copy that followed them."""
    for path, content in files.items():
        target = place / "snapshots" / COMMIT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT + "\n")  # by hand


def of_one_commit(place: Path, files: Mapping[str, bytes]) -> None:
    """As a download of one commit leaves it: without refs. Another commit has other files."""
    linked(place, files)
    shutil.rmtree(place / "refs")
    (place / "snapshots" / ("b2" * 20)).mkdir()


def with_an_unreadable_list(place: Path, files: Mapping[str, bytes]) -> None:
    """A list of another format than this library's."""
    linked(place, files)
    (place / "trees").mkdir()
    (place / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 99}))


LAYOUTS: list[Layout] = [
    *(linked, noting_what_is_not_there, broken_off, without_links, of_one_commit),
    with_an_unreadable_list,
]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    hub_module._snapshot.cache_clear()
    hub_module._AWAY.clear()
    return tmp_path / "hub"


def fill(cache: Path, repo: str, layout: Layout, files: Mapping[str, bytes]) -> None:
    kind, _, name = repo.rpartition("datasets/")
    place = (
        cache / f"{'datasets' if kind or repo != name else 'models'}--{'--'.join(name.split('/'))}"
    )
    place.mkdir(parents=True)
    layout(place, files)


def away(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
    url = "http://127.0.0.1:9"  # nobody listens there
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


def read_all(at: str) -> None:
    """Reads what the commands read of a hub: what a run and its plan name, data, and each model."""
    overrides = [
        *("algorithm=gspo", f"student.model=org/student{at}", f"reward.model=org/reward{at}"),
        *("policy.advantages=similarity", f"grouper.model=org/encoder{at}", "policy.kl_coef=0.1"),
        *("mesh=actor+rollout+reference+reward+grouper=1", "batch_size=8", "group_size=4"),
        f"data.train=[hf:org/rows{at}, hf:org/parts{at}, hf:org/bare{at}]",
    ]
    config, notes = with_commits(Config.load(None, overrides))
    assert len(notes) == 6 and not any("to fetch" in note for note in notes)
    assert fetch_models(config)
    for name, rows in (("rows", 1), ("parts", 2), ("bare", 1)):
        assert len(open_source(f"hf:org/{name}{at}")) == rows
    for name in (f"org/student{at}", f"org/gguf/tiny-q8_0.gguf{at}"):
        source = resolve_model(name)
        assert source.load() and source.tokenizer_path is not None
    assert len(embed(f"org/encoder{at}", ["a"])) == len(score(f"org/reward{at}", ["a"])) == 1


@pytest.mark.parametrize("how", ["offline", "unreachable"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_reader_reads_every_cache_without_the_hub(
    layout: Layout,
    how: str,
    repos: dict[str, dict[str, bytes]],
    caches: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for repo, files in repos.items():
        fill(caches, repo, layout, files)
    away(how, monkeypatch)
    read_all(f"@{COMMIT}" if layout is of_one_commit else "")
    if layout is of_one_commit:  # the branch is not known, but what is there is said
        with pytest.raises(UserError, match=f"name the commit, as in org/student@{COMMIT}"):
            resolve_model("org/student")


LACKING = [
    ("org/student", "config.json"),
    ("org/student", "model.safetensors"),
    ("org/student", "tokenizer.json"),
    ("org/gguf", "tiny-q8_0.gguf"),
    ("datasets/org/rows", "train.jsonl"),
    ("datasets/org/parts", "data/train-00000-of-00002.jsonl"),
    ("datasets/org/parts", "data/train-00001-of-00002.jsonl"),
    ("datasets/org/bare", "train.jsonl"),
]


@pytest.mark.parametrize("how", ["offline", "unreachable"])
@pytest.mark.parametrize("left", ["nothing", "a link"])
@pytest.mark.parametrize(("repo", "file"), LACKING)
def test_a_file_that_a_cache_lacks_is_named(
    repo: str,
    file: str,
    left: str,
    how: str,
    repos: dict[str, dict[str, bytes]],
    caches: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(caches, repo, linked, repos[repo])
    link = next(caches.glob(f"*/snapshots/*/{file}"))
    link.resolve().unlink()
    if left == "nothing":
        link.unlink()
    away(how, monkeypatch)
    with pytest.raises(UserError) as caught:
        if repo.startswith("datasets/"):
            open_source(f"hf:{repo.removeprefix('datasets/')}")
        else:
            resolve_model(f"{repo}/{file}" if file.endswith("gguf") else repo).load()
    text = str(caught.value)
    why = "HF_HUB_OFFLINE is set" if how == "offline" else "http://127.0.0.1:9 cannot be reached"
    assert "\n" not in text and why in text, text
    assert file in text or (repo.endswith("bare") and "may lack" in text), text
