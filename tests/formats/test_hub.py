"""Models by their names on a hub: what is fetched and kept, and what goes wrong in one line."""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import write_model
from hub_server import Hub
from huggingface_hub import constants
from runs import save_model, save_reward_model
from tiny_models import tiny_model

from jaxrl.checkpoint.fingerprint import digest_model
from jaxrl.checkpoint.model_source import load_model, resolve_model
from jaxrl.errors import UserError
from jaxrl.formats import hf, weights
from jaxrl.formats import hub as hub_module
from jaxrl.formats.hub import HubName, data_name, model_name
from jaxrl.roles.grouper import embed
from jaxrl.roles.reward import score

REFERENCES = Path(__file__).parent.parent / "references"

DESCRIBED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("model") / "it", 32, 2, seed=0))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with an index."""
    config, params = tiny_model("qwen3")
    return hf.write_folder(
        tmp_path_factory.mktemp("sharded") / "it",
        config,
        weights.hf_tensors(config, params),
        dtype="float32",
        shard_bytes=30_000,
    )


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def forget() -> None:
    """As in a new process."""
    hub_module._snapshot.cache_clear()


# Names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-1.7B", HubName("model", "Qwen/Qwen3-1.7B")),
        ("Qwen/Qwen3-1.7B@v1.0", HubName("model", "Qwen/Qwen3-1.7B", "v1.0")),
        ("a/b@refs/pr/3", HubName("model", "a/b", "refs/pr/3")),
        (f"a/b@main@{'0' * 40}", HubName("model", "a/b", "main", "0" * 40)),
        ("a/b/c-q8_0.gguf@v1", HubName("model", "a/b", "v1", None, "/c-q8_0.gguf")),
        ("hf:openai/gsm8k:main:train", HubName("dataset", "openai/gsm8k", rest=":main:train")),
        ("hf:gsm8k", HubName("dataset", "gsm8k")),
        ("hf:a/b@v1:main", HubName("dataset", "a/b", "v1", None, ":main")),
        (f"hf:a/b@v1@{'a' * 40}::test", HubName("dataset", "a/b", "v1", "a" * 40, "::test")),
    ],
)
def test_a_name_and_its_text(text: str, name: HubName) -> None:
    assert (data_name if name.kind == "dataset" else model_name)(text) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        *("builtin:student", "package:a_b", "policy", "folder", "./a/b", "/a/b", "~/a", "a/b/c"),
        *("models/x.gguf", "runs/a/final", "a/b@", "../b", "a/b c", "arithmetic:digits=2"),
    ],
)
def test_other_texts_name_no_model_on_a_hub(text: str) -> None:
    assert model_name(text) is None and data_name(text) is None


def test_a_path_that_exists_stays_a_path(
    model: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "org/tiny")
    hub.add("org/tiny", {"config.json": "{}"})
    assert resolve_model("org/tiny").path == Path("org/tiny")
    assert hub.asked == []


# What is fetched


def test_only_what_describes_a_model_is_fetched_until_its_weights_are_used(
    model: Path, hub: Hub
) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    other = {
        "pytorch_model.bin": b"x",
        "modeling_tiny.py": "raise",
        "README.md": "",
        "a/b.json": "",
    }
    commit = hub.add("org/tiny", files | other)
    source = resolve_model("org/tiny")
    assert source.name == f"org/tiny@main@{commit}"
    assert source.config == resolve_model(model).config
    assert source.tokenizer_path == source.path
    assert set(hub.fetched()) >= DESCRIBED and not hub.fetched(".safetensors")
    loaded = source.load()
    assert hub.fetched(".safetensors") == ["model.safetensors"]
    for here, there in zip(*map(_leaves, (loaded, load_model(model).params)), strict=True):
        np.testing.assert_array_equal(here, there)
    assert not set(other) & set(hub.fetched())


def _leaves(params: Any) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def test_once_fetched_nothing_is_asked_for_again_and_the_hub_may_be_gone(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", model)
    name = load_model("org/tiny").source.name
    for gone in (False, True):
        hub.asked.clear()
        forget()
        if gone:
            offline(monkeypatch)
        assert load_model(name).source.name == name  # as a worker does
        assert hub.asked == []
    assert load_model("org/tiny").source.name == name


def test_a_branch_that_moves_moves_no_pinned_name(model: Path, hub: Hub) -> None:
    before = hub.add("org/tiny", model)
    source = resolve_model("org/tiny")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.add("org/tiny", files | {"model.safetensors": b"another"})
    source.load()  # of the commit that the config is of
    assert source.path.name == before == digest_model(source.path)
    assert resolve_model(f"org/tiny@{before}").path == source.path
    assert resolve_model("org/tiny").path != source.path


def test_a_model_in_several_files(sharded: Path, hub: Hub) -> None:
    hub.add("org/sharded", sharded)
    shards = {path.name for path in sharded.glob("*.safetensors")}
    assert len(shards) > 1
    resolve_model("org/sharded").load()
    assert set(hub.fetched(".safetensors")) == shards


def test_a_gguf_file_by_its_name(hub: Hub, tmp_path: Path) -> None:
    file = write_model(tmp_path / "tiny-q8_0.gguf", "llama")
    hub.add("org/tiny-GGUF", {"tiny-q8_0.gguf": file.read_bytes(), "other.gguf": b"x"})
    source = resolve_model("org/tiny-GGUF/tiny-q8_0.gguf")
    assert source.config == resolve_model(file).config
    assert hub.fetched() == ["tiny-q8_0.gguf"]


def test_a_worker_on_another_host_fetches_the_same_commit(
    model: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a cache of its own, and the branch has moved since the run began."""
    commit = hub.add("org/tiny", model)
    source = resolve_model("org/tiny")
    here = _leaves(source.load())
    sent = pickle.dumps(source)
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.add("org/tiny", files | {"model.safetensors": b"another"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "other"))
    hub.asked.clear()
    there = pickle.loads(sent)
    assert hub.fetched() and not hub.fetched(".safetensors")  # its roles may need no weights
    assert hub_module.hub_variables() == {"HF_ENDPOINT": hub.url}  # what Ray's processes get
    assert (there.path.parents[2], there.path.name) == (tmp_path / "other", commit)
    for one, other in zip(_leaves(there.load()), here, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_reward_model_and_an_encoder_by_their_names(hub: Hub, tmp_path: Path) -> None:
    reward = Path(save_reward_model(tmp_path))
    encoder = shutil.copytree(REFERENCES / "tiny_bge", tmp_path / "encoder")
    (encoder / "pytorch_model.bin").write_bytes(b"not fetched")
    hub.add("org/reward", reward)
    hub.add("org/encoder", encoder)
    texts = ["one", "another text"]
    np.testing.assert_array_equal(score("org/reward", texts), score(reward, texts))
    np.testing.assert_array_equal(embed("org/encoder", texts), embed(encoder, texts))
    assert not [file for file in hub.fetched() if "pytorch" in file]


# What goes wrong


def refused(name: str, *words: str) -> str:
    """What is said of a model that cannot be loaded: one line."""
    forget()
    with pytest.raises(UserError) as caught:
        load_model(name)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and text.startswith(name)
    for word in words:
        assert word in text, text
    return text


def test_a_name_that_is_not_there(model: Path, hub: Hub) -> None:
    hub.add("Qwen/Qwen3-1.7B", model)
    refused("Qwen/Qwen3-1.8B", "neither a file or folder here nor a model on", hub.url, "HF_TOKEN")
    refused("Qwen/Qwen3-1.8B", "did you mean Qwen/Qwen3-1.7B?")
    with pytest.raises(UserError, match="'runs/mine': there is no such file or folder"):
        load_model("runs/mine")  # where runs are written, so no hub is asked
    refused("Qwen/Qwen3-1.7B@v9", "no revision 'v9'")
    refused(f"Qwen/Qwen3-1.7B@{'0' * 40}", "no revision")
    refused("Qwen/Qwen3-1.7B/q8.gguf", "no file q8.gguf")


def test_a_gated_model_wants_a_token(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/gated", model, gated=True)
    refused("org/gated", "is gated", f"accept its terms at {hub.url}/org/gated", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", Hub.TOKEN)
    assert load_model("org/gated").config == resolve_model(model).config


def test_without_a_network_only_the_cache_counts(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/tiny", model)
    resolve_model("org/tiny")  # the config and the tokenizer, as a dry run does
    offline(monkeypatch)
    refused("org/tiny", "HF_HUB_OFFLINE is set", constants.HF_HUB_CACHE)
    refused("org/other", "no file or folder here", "HF_HUB_OFFLINE is set")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    load_model("org/tiny")
    offline(monkeypatch)
    forget()
    load_model("org/tiny")


def test_a_hub_that_does_not_answer(model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", model)
    hub.failing = 403
    refused("org/tiny", "status 403", "HF_TOKEN")
    hub.failing = 500
    refused("org/tiny", "status 500", "try again later")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused("org/tiny", "http://127.0.0.1:9 cannot be reached", "HF_ENDPOINT")


def test_a_hub_that_takes_connections_and_says_nothing(
    model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add("org/tiny", model)
    load_model("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        began = time.monotonic()
        refused("org/other", f"{url} cannot be reached", "timed out")
        refused(f"org/other@{'0' * 40}", f"{url} cannot be reached")
        assert time.monotonic() - began < 30
        forget()
        assert load_model("org/tiny").source.name == f"org/tiny@main@{commit}"  # of the cache


def test_a_repository_without_safetensors(model: Path, hub: Hub) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    pickled = {"pytorch_model.bin": files.pop("model.safetensors")}
    hub.add("org/pickled", files | pickled)
    refused("org/pickled", "no model.safetensors", "pickle")
    assert "pytorch_model.bin" not in hub.fetched()
    hub.add("org/empty", {"README.md": "nothing"})
    refused("org/empty", "no config.json", "ORG/NAME/FILE.gguf")


def test_a_download_that_breaks_off_loses_nothing_that_is_whole(
    sharded: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it writes at once
    hub.add("org/sharded", sharded)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    hub.cut[shards[1]] = 0
    refused("org/sharded", "broke off", "complete files stay", "the same command")
    assert not hub_has_half_files()
    hub.cut[shards[1]] = 10_000  # goes on behind what came each time
    hub.asked.clear()
    forget()
    load_model("org/sharded")
    assert set(hub.fetched(".safetensors")) == {shards[1]}
    starts = [where for _, _, where in hub.asked if where]
    assert starts[:2] == ["bytes=10000-", "bytes=20000-"]


def hub_has_half_files() -> list[Path]:
    return list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_a_full_disk_is_named(model: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/tiny", model)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    refused("org/tiny", constants.HF_HUB_CACHE, "No space left", "HF_HOME")


def test_a_half_written_file_is_fetched_again(
    sharded: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a copy of the cache that broke off leaves it: too short, under the right name."""
    hub.add("org/sharded", sharded)
    broken = load_model("org/sharded").source.path / "model-00002-of-00004.safetensors"
    for offline in (True, False):
        with broken.resolve().open("r+b") as file:
            file.truncate(1000)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        hub.asked.clear()
        if offline:
            refused("org/sharded", "HF_HUB_OFFLINE is set", broken.name)
    load_model("org/sharded")
    assert hub.fetched(".safetensors") == [broken.name]


@pytest.mark.parametrize("path", ["../../../precious", "{}/precious"])
def test_a_list_of_files_that_leads_out_of_the_cache_is_refused(
    model: Path, hub: Hub, tmp_path: Path, path: str
) -> None:
    precious = tmp_path / "hub_home" / "hub" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    path = path.format(precious.parent)
    files: dict[str, bytes | str] = {one.name: one.read_bytes() for one in model.iterdir()}
    hub.add("org/listed", files | {path: "x" * 100})
    refused("org/listed", "outside of its folder", path)
    del files["model.safetensors"]
    hub.add("org/indexed", files | {hf.INDEX: json.dumps({"weight_map": {"lm_head": path}})})
    with pytest.raises(UserError, match="outside of its folder"):
        load_model("org/indexed")
    assert precious.read_text() == "mine"


def test_a_link_out_of_the_cache_is_not_followed_to_remove_its_file(
    sharded: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.add("org/sharded", sharded)
    broken = load_model("org/sharded").source.path / "model-00002-of-00004.safetensors"
    broken.unlink()
    (tmp_path / "mine").write_text("mine")
    broken.symlink_to(tmp_path / "mine")
    forget()
    with contextlib.suppress(UserError):
        load_model("org/sharded")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("weight_map", [["model.safetensors"], "model.safetensors"])
def test_an_index_without_a_map_of_weights(
    model: Path, hub: Hub, weight_map: list[str] | str
) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    del files["model.safetensors"]
    hub.add("org/tiny", files | {hf.INDEX: json.dumps({"weight_map": weight_map}).encode()})
    with pytest.raises(UserError, match="`weight_map` names no file of weights"):
        load_model("org/tiny")


def test_a_whole_file_beside_an_index_of_an_earlier_save_is_what_is_fetched(
    model: Path, sharded: Path, hub: Hub
) -> None:
    """As a folder with the same files is read."""
    files = {file.name: file.read_bytes() for place in (sharded, model) for file in place.iterdir()}
    assert hf.INDEX in files
    hub.add("org/both", files)
    name = hub_module.pin(HubName("model", "org/both"))
    assert hub_module.size_of_weights(name) == len(files["model.safetensors"])
    place = hub_module.fetch_weights(name)
    assert hub.fetched(".safetensors") == ["model.safetensors"]
    assert hub_module.has_all_weights(name, place)
    assert hf.weight_files(place, hf.SINGLE, hf.INDEX)[0] == [place / "model.safetensors"]


FETCH = """
import sys
from jaxrl.formats import hub
hub.fetch_weights(hub.model_name(sys.argv[1]))
"""


def test_a_process_that_dies_while_it_fetches_leaves_no_half_file_behind_as_a_whole_one(
    sharded: Path, hub: Hub
) -> None:
    hub.add("org/sharded", sharded)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    hub.stalled.add(shards[0])
    process = subprocess.Popen([sys.executable, "-c", FETCH, "org/sharded"])
    assert hub.wait_for(shards[0], 60)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    hub.stalled.clear()
    load_model("org/sharded")
    assert hub.fetched(".safetensors").count(shards[0]) == 2


def test_two_processes_that_want_a_file_fetch_it_once(sharded: Path, hub: Hub) -> None:
    """This one asks while the other has half of it."""
    hub.add("org/sharded", sharded)
    shards = sorted(path.name for path in sharded.glob("*.safetensors"))
    hub.stalled.add(shards[0])
    command = [sys.executable, "-c", FETCH, "org/sharded"]
    other = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    assert hub.wait_for(shards[0], 60)
    threading.Timer(0.5, hub.stalled.clear).start()
    load_model("org/sharded")
    assert other.wait(60) == 0
    # The other asks for the half that it lacks: the hub has ended the connection.
    assert sorted(hub.fetched(".safetensors")) == sorted([*shards, shards[0]])


def test_ctrl_c_ends_a_download_at_once(model: Path, hub: Hub) -> None:
    hub.add("org/tiny", model)
    hub.stalled.add("model.safetensors")
    command = [sys.executable, "-m", "jaxrl.train", "student.model=org/tiny", "algorithm=sft"]
    process = subprocess.Popen(
        [*command, "data.train=arithmetic", "data.chat=raw", "max_prompt_tokens=32"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert hub.wait_for("model.safetensors", 60)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    assert "interrupted while org/tiny was fetched; complete files stay" in error
    assert "Traceback" not in error
