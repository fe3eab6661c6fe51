"""A hub that lies, damages, dawdles or wants to be left alone: it writes nothing outside of the
cache, no wrong byte is believed, nothing lasts for ever, and an honest hub is believed after it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import and_slow
from hub_server import Hub, git_hash
from huggingface_hub import close_session, constants
from runs import save_model

from jaxrl.checkpoint.model_source import load_model
from jaxrl.errors import UserError
from jaxrl.formats import hub as hub_module
from jaxrl.formats.hub import HubName, data_name, model_name

SHARED = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = Path(save_model(tmp_path_factory.mktemp("model") / "it", 32, 2, seed=0))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def two(files: dict[str, bytes]) -> dict[str, bytes]:
    """What a model has at least: for laws of any file."""
    return {name: files[name] for name in ("config.json", SHARED)}


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library waits for a second before it tries again."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    yield
    close_session()


def forget() -> None:
    """As in a new process."""
    from huggingface_hub import _tree_cache

    hub_module._snapshot.cache_clear()
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()


def refused(name: str, *words: str) -> str:
    forget()
    with pytest.raises(UserError) as caught:
        load_model(name)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600, text
    for word in words:
        assert word in text, text
    return text


def pinned(name: str) -> HubName:
    found = model_name(name)
    assert found is not None
    return hub_module.pin(found)


def weights(name: str) -> list[np.ndarray]:
    import jax

    forget()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_model(name).params)]


def everything(folder: Path, *without: Path) -> set[str]:
    return {
        str(path)
        for path in folder.rglob("*")
        if not any(path == one or one in path.parents for one in without)
    }


PATHS = [
    *("{out}/ESCAPED", "../../../../ESCAPED", "../ESCAPED", "a/../../../../../ESCAPED", ".."),
    *("~/ESCAPED", "..\\..\\ESCAPED", "/", "", ".", "%2e%2e%2fESCAPED", "a/b", "\tx"),
    *("e" * 5000, "x\x01y", "{out}", "C:\\x", "e\u00e9".encode().decode("latin-1"), "a b"),
]
NAMING = ("ETag", "X-Linked-Etag", "X-Repo-Commit", "X-Xet-Hash", "Location", "Content-Disposition")


@pytest.mark.parametrize("header", NAMING)
@pytest.mark.parametrize("whole", and_slow([False], [True]), ids=["a form each", "all forms"])
def test_no_header_of_a_hub_names_a_file_outside_of_the_cache(
    two: dict[str, bytes], hub: Hub, tmp_path: Path, header: str, whole: bool
) -> None:
    """The default suite sends the paths that lead out, and every fourth of the others, each in one
    of the forms that an ETag may have, in turn."""
    cache, out = Path(constants.HF_HUB_CACHE), tmp_path / "out"
    out.mkdir()
    before = everything(tmp_path, cache, cache.parent)
    for i, path in enumerate(PATHS):
        if not whole and i > 1 and (i + NAMING.index(header)) % 4:
            continue
        name, lie = f"org/m{i}", path.format(out=out)
        hub.lies.clear()
        hub.add(name, two)
        forms = (
            [lie] if header in ("X-Repo-Commit", "Location") else [lie, f'"{lie}"', f'W/"{lie}"']
        )
        for form in forms if whole else [forms[i % len(forms)]]:
            hub.lies = {header: form}
            if header == "X-Xet-Hash":
                hub.lies["X-Xet-Refresh-Route"] = hub.url
            if header == "Location":
                hub.lies["Location"] = f"file://{form}"
            forget()
            try:
                hub_module.fetch_weights(pinned(name))
            except UserError as error:
                assert "\n" not in str(error), str(error)
            assert everything(tmp_path, cache, cache.parent) == before, (header, form)
            assert not list(cache.rglob("*ESCAPED*"))


@pytest.mark.parametrize(
    "etag", ['"{out}/ESCAPED"', '"../../../../ESCAPED"', 'W/"../x"', "..", '"' + "e" * 5000 + '"']
)
def test_an_etag_that_is_no_name_is_said(
    two: dict[str, bytes], hub: Hub, tmp_path: Path, etag: str
) -> None:
    hub.add("org/tiny", two)
    hub.lies = {"ETag": etag.format(out=tmp_path)}
    refused("org/tiny", "org/tiny: ", hub.url, "ETag that is no plain name")
    assert not list(tmp_path.rglob("*ESCAPED*"))
    hub.lies = {}
    load_model("org/tiny")


def test_a_client_that_the_library_opens_anew_checks_too(two: dict[str, bytes], hub: Hub) -> None:
    hub.add("org/tiny", two)
    for _ in range(2):
        close_session()
        hub.lies = {"ETag": '"../x"'}
        refused("org/tiny", "no plain name")


SHAS: list[Any] = ["../../../../ESCAPED", "/tmp/ESCAPED", "", "main", "0" * 39, 5, None, [], "\0"]


@pytest.mark.parametrize("sha", SHAS)
def test_a_commit_that_is_none_becomes_no_path(
    two: dict[str, bytes], hub: Hub, tmp_path: Path, sha: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    hub.add("org/tiny", two)
    api = HfApi.repo_info

    def lying(*args: Any, **options: Any) -> Any:
        info = api(*args, **options)
        info.sha = sha
        return info

    monkeypatch.setattr(HfApi, "repo_info", lying)
    refused("org/tiny")
    assert not list(tmp_path.rglob("*ESCAPED*"))
    assert not hub.fetched()


@pytest.mark.parametrize("revision", ["../../../x", "/tmp/x", "a/../../../../x"])
def test_a_revision_that_leads_out_names_nothing_on_a_hub(revision: str) -> None:
    assert model_name(f"org/tiny@{revision}") is None
    assert data_name(f"hf:org/tiny@{revision}:a:b") is None
    assert model_name("org/tiny@refs/pr/1") is not None


LISTED = [
    *(
        "../../../ESCAPED/config.json",
        "/tmp/ESCAPED/config.json",
        "1_/../../../../ESCAPED/config.json",
    ),
    *("1_\\..\\config.json", "", ".", "a\0b", "1_/" + "d" * 5000 + "/config.json"),
]


@pytest.mark.parametrize("path", LISTED)
def test_a_list_of_files_names_none_outside_and_does_not_last(
    two: dict[str, bytes], hub: Hub, tmp_path: Path, path: str
) -> None:
    commit = hub.add("org/tiny", two)
    honest = [_entry(name, content) for name, content in two.items()]
    hub.tree = [*honest, _entry(path, b"{}")]
    hub.repos["org/tiny"].commits[commit][path] = b"{}"
    forget()
    try:
        load_model("org/tiny")
    except UserError as error:
        assert "\n" not in str(error)
    assert not list(tmp_path.rglob("*ESCAPED*"))
    hub.tree = None
    del hub.repos["org/tiny"].commits[commit][path]
    weights("org/tiny")


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": path,
        "oid": git_hash(content),
        "size": len(content),
    }
    if path == SHARED:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
    return entry


def _sizes(change: Callable[[int], Any]) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda tree: [{**entry, "size": change(entry["size"])} for entry in tree]


TREES: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "sizes as text": _sizes(str),
    "sizes with a point": _sizes(float),
    "negative sizes": _sizes(lambda size: -size),
    "sizes of none": _sizes(lambda size: None),
    "other sizes": _sizes(lambda size: size + 1),
    "no files": lambda tree: [],
    "no weights": lambda tree: [entry for entry in tree if entry["path"] != SHARED],
    "an object": lambda tree: {"a": tree},
    "a text": lambda tree: "x",
    "a number": lambda tree: 7,
    "texts": lambda tree: [entry["path"] for entry in tree],
    "no type": lambda tree: [{**entry, "type": 3} for entry in tree],
    "paths as numbers": lambda tree: [{**entry, "path": 3} for entry in tree],
    "hashes as lists": lambda tree: [{**entry, "lfs": {"oid": [], "size": {}}} for entry in tree],
    "other hashes": lambda tree: [
        {**entry, "lfs": {"oid": "0" * 64, "size": entry["size"], "pointerSize": 1}}
        for entry in tree
    ],
    "xet hashes": lambda tree: [{**entry, "xetHash": "../../x"} for entry in tree],
}


@pytest.mark.parametrize("kind", TREES)
def test_a_list_of_files_that_was_wrong_once_does_not_last(
    two: dict[str, bytes], hub: Hub, kind: str
) -> None:
    hub.add("org/tiny", two)
    hub.tree = TREES[kind]([_entry(name, content) for name, content in two.items()])
    forget()
    try:
        load_model("org/tiny")
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    hub.tree = None
    weights("org/tiny")


def _flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": _flipped,
    "zeros": lambda content: bytes(len(content)),
    "no header": lambda content: bytes(100) + content[100:],
    "the halves exchanged": lambda content: (
        content[len(content) // 2 :] + content[: len(content) // 2]
    ),
}


SMALL_FILES = ("config.json", "tokenizer.json")
"""Whose hash is another one: which damage it is makes no difference."""


@pytest.mark.parametrize(
    ("file", "damage"),
    and_slow(
        [*((SHARED, damage) for damage in DAMAGES), *((file, "zeros") for file in SMALL_FILES)],
        [(file, damage) for file in SMALL_FILES for damage in DAMAGES if damage != "zeros"],
    ),
)
def test_a_file_of_the_right_size_with_other_contents_is_refused_and_does_not_stay(
    files: dict[str, bytes], hub: Hub, damage: str, file: str
) -> None:
    hub.add("org/tiny", files)
    right = weights("org/tiny")
    hub.add("org/other", files)
    hub.bodies = {file: DAMAGES[damage](files[file])}
    refused("org/other", hub.url, file, "other contents than it says", "removed")
    hub.bodies = {}
    for one, other in zip(weights("org/other"), right, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_killed_process_fetched_is_compared(files: dict[str, bytes], hub: Hub) -> None:
    """It was on the disk, and not compared yet."""
    hub.add("org/tiny", files)
    weights("org/tiny")
    name = model_name("org/tiny")
    assert name is not None
    place = hub_module.folder(name)
    blob = (place / SHARED).resolve()
    whole = blob.read_bytes()
    blob.write_bytes(DAMAGES["a flipped bit"](whole))
    (place.parents[1] / f".fetched-{place.name}").touch()
    refused("org/tiny", hub.url, SHARED, "other contents than it says", "removed")
    weights("org/tiny")
    assert blob.read_bytes() == whole and not [*place.parents[1].glob(".fetched-*")]


def test_a_mirror_that_names_small_files_by_their_sha1_is_believed(
    two: dict[str, bytes], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", two)
    monkeypatch.setattr("hub_server.git_hash", lambda content: hashlib.sha1(content).hexdigest())
    weights("org/tiny")


# Waiting


def test_a_hub_that_is_asked_too_often_is_asked_again_when_it_says(
    two: dict[str, bytes], hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    for i, seconds in enumerate(("0", "Wed, 21 Oct 2015 07:28:00 GMT")):
        for status in (429, 503):
            hub.add(f"org/tiny{status}-{i}", two)
            hub.limited = [(status, {"Retry-After": seconds})] * 3
            forget()
            load_model(f"org/tiny{status}-{i}")
            said = capfd.readouterr().err
            assert said.count(f"{hub.url} answers with status {status}: asking again in 0 s") == 3
            assert not hub.limited


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "86400"}, {"RateLimit": '"api";r=0;t=86400'}, {"Retry-After": "9" * 9}],
)
def test_a_hub_that_wants_to_be_left_alone_for_long_is_not_waited_for(
    two: dict[str, bytes], hub: Hub, headers: dict[str, str]
) -> None:
    hub.add("org/tiny", two)
    hub.limited = [(429, headers)] * 50
    refused("org/tiny", "status 429", "asks to be left alone for", "try again")
    hub.limited = []
    forget()
    hub_module.folder(pinned("org/tiny"))
    hub.limited = [(429, headers)] * 50  # of the weights
    refused("org/tiny", "status 429")


def test_a_hub_that_is_busy_for_ever_is_given_up(
    two: dict[str, bytes], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "LONGEST_WAIT_S", 0.5)
    hub.add("org/tiny", two)
    hub.limited = [(429, {"Retry-After": "0"})] * 1_000_000
    began = time.monotonic()
    refused("org/tiny", "status 429")
    assert time.monotonic() - began < 10


LISTS: dict[str, Callable[[int], str]] = {
    "one after the other": lambda page: f"cursor={page + 1}",
    "itself": lambda page: f"cursor={page}",
    "the first": lambda page: "cursor=0" if page == 3 else f"cursor={page + 1}",
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_list_of_files_ends(
    two: dict[str, bytes], hub: Hub, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(hub_module, "MOST_PAGES", 6)
    hub.add("org/tiny", two)
    hub.next_page = LISTS[kind]
    hub.tree = []
    told = "before" if kind != "one after the other" else "6 pages"
    for _ in range(2):
        refused("org/tiny", f"the answer of {hub.url}/api/models/org/tiny/tree/", told)
        assert sum("/tree/" in path for _, path, _ in hub.asked) <= 8
        hub.asked.clear()
    hub.next_page = hub.tree = None
    weights("org/tiny")


def test_a_list_whose_pages_take_long_ends(
    two: dict[str, bytes], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "LONGEST_LIST_S", 0.2)
    hub.add("org/tiny", two)
    hub.next_page = lambda page: f"cursor={page + 1}"
    refused("org/tiny", "does not end")


@pytest.mark.parametrize(("limit", "most"), [("LONGEST_LIST_S", 0.2), ("MOST_PAGE_BYTES", 5000)])
def test_a_page_without_an_end_is_left(
    two: dict[str, bytes], hub: Hub, monkeypatch: pytest.MonkeyPatch, limit: str, most: float
) -> None:
    hub.add("org/tiny", two)
    hub.endless = True
    with monkeypatch.context() as patched:
        patched.setattr(hub_module, limit, most)
        refused("org/tiny", "does not end", "bytes in", "HF_ENDPOINT")
    hub.endless = False
    weights("org/tiny")


def test_a_list_of_several_pages_is_read(two: dict[str, bytes], hub: Hub) -> None:
    hub.add("org/tiny", two)
    pages = {page: f"cursor={page + 1}" for page in range(5)}
    hub.next_page = pages.get
    weights("org/tiny")
    assert sum("cursor=5" in path for _, path, _ in hub.asked) >= 1


@pytest.mark.parametrize(
    "variable",
    and_slow(["HF_ENDPOINT=http://["], ["HF_HUB_ETAG_TIMEOUT=abc", "HF_HUB_DOWNLOAD_TIMEOUT=x"]),
)
def test_variables_that_the_library_refuses_are_named(variable: str, tmp_path: Path) -> None:
    name, _, value = variable.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl", "export", "org/tiny", "out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(hub_module.__file__).parents[2]), name: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and name in done.stderr
