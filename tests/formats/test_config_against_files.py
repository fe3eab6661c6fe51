"""What a model's config says is held against what its files have."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf_models import write_model
from hub_server import Hub
from references.tiny import batch
from tiny_models import NAMES, RAW_CONFIGS, tiny_tensors

from jaxrl import load_model
from jaxrl.checkpoint.source import resolve_model
from jaxrl.errors import UserError
from jaxrl.export import export
from jaxrl.formats import hf, peft, weights
from jaxrl.models.lora import Lora

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A model folder, written by the safetensors library."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def with_head(name: str, head: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The tensors of a tiny model with a head of its own, a random one where none is given."""
    tensors = tiny_tensors(name)
    shape = tensors[EMBEDDING].shape
    random = np.random.default_rng(9).normal(0, 0.2, shape).astype(np.float32)
    return tensors | {HEAD: random if head is None else head}


# A head of its own under a tied config


@pytest.mark.parametrize("name", NAMES)
def test_a_head_that_is_not_the_embedding_is_used_whatever_the_config_says(
    name: str, tmp_path: Path
) -> None:
    tensors = with_head(name)
    folder = write(tmp_path / "tied", RAW_CONFIGS[name] | {"tie_word_embeddings": True}, tensors)
    source = resolve_model(folder)
    assert not source.config.tie_embeddings
    np.testing.assert_array_equal(source.load_head(), tensors[HEAD])
    np.testing.assert_array_equal(source.load()["lm_head"]["kernel"], tensors[HEAD])
    exported = export(source, tmp_path / "out", dtype="float32")
    assert json.loads((exported / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(resolve_model(exported).load_head(), tensors[HEAD])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_head_that_is_the_embedding_stays_tied(dtype: Any, tmp_path: Path) -> None:
    tensors = tiny_tensors("smollm")
    tensors[EMBEDDING] = tensors[EMBEDDING].astype(ml_dtypes.bfloat16)
    tensors[HEAD] = tensors[EMBEDDING].astype(dtype)
    source = resolve_model(write(tmp_path, RAW_CONFIGS["smollm"], tensors))
    assert source.config.tie_embeddings and "lm_head" not in source.load()
    assert HEAD not in weights.tensor_shapes(source.config)


def test_one_row_of_a_head_makes_it_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "COMPARED", 5)
    tensors = tiny_tensors("smollm")
    tensors[HEAD] = tensors[EMBEDDING].copy()
    tensors[HEAD][-1, -1] += 1
    assert not resolve_model(write(tmp_path, RAW_CONFIGS["smollm"], tensors)).config.tie_embeddings


def test_adapters_and_cuts_of_such_a_model_have_its_head(tmp_path: Path) -> None:
    tensors = with_head("smollm")
    base = write(tmp_path / "base", RAW_CONFIGS["smollm"], tensors)
    config = resolve_model(base).config
    lora = Lora(2, 4.0, ("q_proj",))
    adapters = tmp_path / "adapters"
    names = peft.kernels(config, "attn/q")
    shapes = weights.tensor_shapes(config)
    pairs = {
        n: (np.ones((shapes[n][1], 2), np.float32), np.zeros((2, shapes[n][0]), np.float32))
        for n in names
    }
    peft.write(adapters, replace(config, lora=lora), str(base), pairs)
    for source in (resolve_model(adapters), resolve_model(base).keep_layers((0,))):
        assert not source.config.tie_embeddings
        np.testing.assert_array_equal(source.load_head(), tensors[HEAD])


def test_the_head_of_a_gguf_file_is_used(tmp_path: Path) -> None:
    tensors = with_head("smollm")
    file = write_model(tmp_path / "m.gguf", "smollm", tensors=tensors, tie_embeddings=False)
    tokens, mask = batch(64)
    folder = write(tmp_path / "hf", RAW_CONFIGS["smollm"], tensors)
    ours, theirs = (load_model(place).logits(tokens, mask) for place in (file, folder))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_head_of_another_size_or_none_is_refused(tmp_path: Path) -> None:
    raw, tensors = RAW_CONFIGS["smollm"], tiny_tensors("smollm")
    longer = np.zeros((tensors[EMBEDDING].shape[0] + 1, tensors[EMBEDDING].shape[1]), np.float32)
    write(tmp_path / "longer", raw, tensors | {HEAD: longer})
    with pytest.raises(UserError, match=r"lm_head.weight has shape"):
        resolve_model(tmp_path / "longer")
    write(tmp_path / "untied", raw | {"tie_word_embeddings": False}, tensors)
    with pytest.raises(UserError, match=r"lm_head.weight .* set tie_word_embeddings=true"):
        resolve_model(tmp_path / "untied")


def test_a_model_on_a_hub_is_held_against_its_weights_once_they_are_here(
    hub: Hub, tmp_path: Path
) -> None:
    tensors = with_head("smollm")
    folder = write(tmp_path / "it", RAW_CONFIGS["smollm"], tensors)
    hub.add("org/tiny", {path.name: path.read_bytes() for path in folder.iterdir()})
    described = resolve_model("org/tiny")
    assert described.config.tie_embeddings and not hub.fetched(".safetensors")
    with pytest.raises(UserError, match="start again, and its own head is used"):
        described.load()
    assert not described.with_weights().config.tie_embeddings
    np.testing.assert_array_equal(load_model("org/tiny").params["lm_head"]["kernel"], tensors[HEAD])


# Several files


def sharded(folder: Path, files: list[dict[str, np.ndarray]], names: dict[str, str]) -> Path:
    """A folder of these files, which are a.safetensors, b.safetensors, ..., and an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RAW_CONFIGS["smollm"]))
    for letter, tensors in zip("abcdef", files, strict=False):
        safetensors.numpy.save_file(tensors, folder / f"{letter}.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_whole_file_counts_more_than_an_index(tmp_path: Path) -> None:
    """As transformers has it: the index may be that of an earlier save, whose files are gone or
    still there."""
    new, old = tiny_tensors("smollm"), tiny_tensors("smollm", seed=99)
    for number, files in enumerate(([], [old])):
        folder = sharded(tmp_path / f"{number}", files, dict.fromkeys(new, "a.safetensors"))
        safetensors.numpy.save_file(new, folder / "model.safetensors")
        source = resolve_model(folder)
        shape = source.tensors.shape(EMBEDDING)
        assert shape is not None
        read = source.tensors.read(EMBEDDING, tuple(slice(0, n) for n in shape))
        np.testing.assert_array_equal(read, new[EMBEDDING])


@pytest.mark.parametrize("first", ["a.safetensors", "b.safetensors"])
def test_of_a_tensor_in_two_files_the_one_that_the_index_names_is_read(
    first: str, tmp_path: Path
) -> None:
    both = [tiny_tensors("smollm"), tiny_tensors("smollm", seed=99)]
    names = dict.fromkeys(both[0], first)
    folder = sharded(
        tmp_path / "model", both, names | {"unused": "b.safetensors", "x": "a.safetensors"}
    )
    source, right = resolve_model(folder), both["ab".index(first[0])]
    for name, tensor in right.items():
        np.testing.assert_array_equal(
            source.tensors.read(name, tuple(slice(0, n) for n in tensor.shape)), tensor
        )
        assert source.tensors.file(name).name == first


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/etc/passwd", "names a file outside of its folder: /etc/passwd"),
        ("../a.safetensors", "names a file outside of its folder"),
        ("x/../../a.safetensors", "names a file outside of its folder"),
        ("a" * 5000, "is missing, but"),
        ("a\0b", "is missing, but"),
        ("", "is missing, but"),
        (None, "is missing, but"),
        ("model.fifo", "is missing, but"),
    ],
)
def test_an_index_names_files_of_its_folder(name: Any, told: str, tmp_path: Path) -> None:
    tensors = tiny_tensors("smollm")
    folder = sharded(tmp_path / "model", [tensors], dict.fromkeys(tensors, name))
    os.mkfifo(folder / "model.fifo")
    with pytest.raises(UserError, match=told) as error:
        resolve_model(folder)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize("name", ["a" * 5000, "a" * 300 + "/b", "a/" * 3000, "~nobody-here/m"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_model(name)
    assert len(str(error.value)) < 400


def test_a_link_within_the_cache_of_a_hub_is_followed(tmp_path: Path) -> None:
    tensors = tiny_tensors("smollm")
    folder = sharded(tmp_path / "model", [tensors], dict.fromkeys(tensors, "a.safetensors"))
    (tmp_path / "blobs").mkdir()
    (folder / "a.safetensors").rename(tmp_path / "blobs" / "0")
    (folder / "a.safetensors").symlink_to("../blobs/0")
    assert resolve_model(folder).tensors.shape(EMBEDDING) is not None


def test_a_header_of_too_many_tensors_is_refused_at_once(tmp_path: Path) -> None:
    folder = write(tmp_path, RAW_CONFIGS["smollm"], {"x": np.zeros(1)})
    length = hf.MOST_HEADER + 8
    with (folder / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        file.truncate(2 * length)
    with pytest.raises(UserError, match=f"a header of {length} bytes; at most"):
        resolve_model(folder)
