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
from cases import and_slow
from gguf_models import write_model
from hub_server import Hub
from references.tiny import batch
from tiny_models import NAMES, RAW_CONFIGS, Memory, tiny_tensors

from jaxrl import load_model
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.errors import UserError
from jaxrl.export import export
from jaxrl.formats import hf, peft, weights
from jaxrl.models.config import DecoderConfig
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


@pytest.mark.parametrize("name", and_slow(NAMES[::6], [n for i, n in enumerate(NAMES) if i % 6]))
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
    peft.write_adapters(adapters, replace(config, lora=lora), str(base), pairs)
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


# Numbers and names of a config


def fields_of(raw: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of the numbers in a config, those of its objects too."""
    paths: list[tuple[str, ...]] = []
    for key, value in raw.items():
        if isinstance(value, dict):
            paths += [(key, *rest) for rest in fields_of(value)]
        elif type(value) in (int, float):
            paths.append((key,))
    return paths


def changed(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return raw | {key: changed(raw[key], tuple(rest), value) if rest else value}


def at(raw: dict[str, Any], path: tuple[str, ...]) -> Any:
    return at(raw[path[0]], path[1:]) if len(path) > 1 else raw[path[0]]


FAST = ("phi3",)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_number_of_a_config_that_changes_is_refused_or_means_what_it_means_to_transformers(
    name: str, tmp_path: Path
) -> None:
    """Whatever passes has tensors of the same names and shapes, and is for transformers' own config
    the same model; absurd numbers are refused at once."""
    transformers = pytest.importorskip("transformers")
    raw, tensors = RAW_CONFIGS[name], tiny_tensors(name)
    folder = write(tmp_path / "model", raw, tensors)
    config = resolve_model(folder).config
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    family = transformers.CONFIG_MAPPING[raw["model_type"]]
    refused = passed = 0
    for path in fields_of(raw):
        old = at(raw, path)
        for new in (old + 1, old * 2, old // 2, old / 2, 0, -1, 10**7, 10**12, 10**30, "7", 1e999):
            if new == old and type(new) is type(old):
                continue
            edited = changed(raw, path, new)
            (folder / "config.json").write_text(json.dumps(edited))
            try:
                found = resolve_model(folder).config
            except UserError as error:
                refused += 1
                assert len(str(error)) < 700 and "\n" not in str(error)
                continue
            passed += 1
            assert found.n_layers == config.n_layers and found.vocab_size == config.vocab_size
            lent = found.lenders  # layers that borrow may have keys and values of their own too
            assert lent or weights.tensor_shapes(found) == shapes, (path, new)
            try:
                theirs = family.from_dict(json.loads(json.dumps(edited))).to_dict()
            except Exception:  # it refuses what has no meaning here either
                continue
            assert DecoderConfig.from_hf(theirs) == found, (path, new)
    assert refused > 50 and passed > 10


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("llama", {"num_hidden_layers": 10**7}, "num_hidden_layers=10000000 must be .* at most"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000 must be"),
        ("llama", {"vocab_size": 10**12}, "vocab_size=1000000000000 must be .* at most"),
        ("llama", {"hidden_size": 2**30, "intermediate_size": 2**30}, "parameters; at most"),
        ("llama", {"head_dim": 2**30, "num_attention_heads": 2**20}, "parameters; at most"),
        (
            "qwen3_moe",
            {"num_local_experts": 10**6, "num_hidden_layers": 100},
            "100,000,000 experts; at most",
        ),
        ("qwen2", {"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000"),
        ("llama", {"rms_norm_eps": 1e300}, "rms_norm_eps=1e.300 must be a number above 0"),
        ("gpt_oss", {"max_position_embeddings": "7"}, "max_position_embeddings='7' must be"),
        (
            "qwen3_5",
            {"linear_num_value_heads": 2**30, "linear_value_head_dim": 2**30},
            "parameters; at most",
        ),
        ("smollm3", {"no_rope_layers": [2] * 10**5}, "no_rope_layers=.*must be a list"),
        ("qwen2", {"layer_types": ["x"] * 10**5}, "layer_types=.* is not supported"),
        ("llama", {"model_type": "x" * 10**5}, "model_type="),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' must be true or false"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(
    name: str, change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was made of them")

    monkeypatch.setattr(weights, "places", never)
    with pytest.raises(UserError, match=told) as error:
        DecoderConfig.from_hf(RAW_CONFIGS[name] | change)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_a_config_leaves_out_is_what_transformers_takes(name: str) -> None:
    """But for the ids of special tokens, and numbers of heads, which the shapes say."""
    transformers = pytest.importorskip("transformers")
    raw = RAW_CONFIGS[name]
    family = transformers.CONFIG_MAPPING[raw["model_type"]]
    apart = {"model_type", "bos_token_id", "eos_token_id", "pad_token_id", "num_key_value_heads"}
    apart |= {"max_position_embeddings", "original_max_position_embeddings"}  # said elsewhere too
    for key in raw.keys() - apart:
        rest = {k: value for k, value in raw.items() if k != key}
        try:
            ours = DecoderConfig.from_hf(rest)
            theirs = family.from_dict(json.loads(json.dumps(rest))).to_dict()
        except (UserError, KeyError):  # ours is refused
            continue
        assert DecoderConfig.from_hf(theirs) == ours, key


ROPE = {"rope_type": "default", "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("llama", {"rope_theta": 5e5, "rope_parameters": ROPE}, None),
        ("llama", {"rope_theta": 5e5, "rope_parameters": None}, None),
        ("llama", {"rope_theta": 500000, "rope_parameters": ROPE}, None),
        ("llama", {"rope_theta": 1e4, "rope_parameters": ROPE}, "rope_theta=10000.0 and rope_par"),
        ("llama", {"rope_theta": 5e5, "rope_scaling": YARN, "rope_parameters": None}, None),
        (
            "llama",
            {"rope_scaling": YARN | ROPE | YARN, "rope_parameters": YARN | ROPE | YARN},
            None,
        ),
        ("llama", {"rope_scaling": YARN, "rope_parameters": ROPE}, "rope_type='default' and"),
        (
            "llama",
            {"rope_scaling": YARN, "rope_parameters": ROPE | YARN | {"factor": 2.0}},
            "rope_parameters.factor=2.0 and rope_scaling.factor=4.0",
        ),
        ("llama", {"rope_scaling": YARN | {"type": "linear"}}, "type='linear'"),
        ("phi3", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25 and"),
        ("gemma3", {"rope_theta": 7.0}, "rope_theta=7.0 and rope_parameters.rope_theta="),
        ("gemma3", {"rope_local_base_freq": 7.0}, "rope_local_base_freq=7.0 and sliding_attention"),
        ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}, None),
        ("olmo3", {"rope_theta": 7.0}, "rope_theta=7.0 and"),
        ("gpt_oss", {"experts_per_token": 3}, "num_experts_per_tok=2 and experts_per_token=3"),
        ("qwen3_moe", {"num_experts": 3}, "num_experts=3 and num_local_experts=6"),
    ],
)
def test_what_is_said_twice_is_said_alike(
    name: str, fields: dict[str, Any], told: str | None
) -> None:
    raw = RAW_CONFIGS[name] | fields
    if told is not None:
        with pytest.raises(UserError, match=told):
            DecoderConfig.from_hf(raw)
        return
    transformers = pytest.importorskip("transformers")
    family = transformers.CONFIG_MAPPING[raw["model_type"]]
    theirs = family.from_dict(json.loads(json.dumps(raw))).to_dict()
    assert DecoderConfig.from_hf(theirs) == DecoderConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("top", "ends"),
    [(None, (1,)), (1, (1,)), (106, (1, 106)), ([1, 106], (1, 106))],
)
def test_end_tokens_within_and_around_a_text_config_count_together(
    top: Any, ends: tuple[int, ...]
) -> None:
    text = RAW_CONFIGS["gemma3"] | {"eos_token_id": 1, "vocab_size": 256}
    raw = {"model_type": "gemma3", "text_config": text, "eos_token_id": top}
    assert DecoderConfig.from_hf(raw).eos_ids == ends


@pytest.mark.parametrize("within", [7.0, None])
def test_rope_around_a_text_config_must_be_that_within(within: float | None) -> None:
    text = {k: v for k, v in RAW_CONFIGS["gemma3"].items() if k != "rope_parameters"}
    text["rope_theta"] = within
    raw = {"model_type": "gemma3", "text_config": text, "rope_theta": 8.0}
    with pytest.raises(UserError, match="rope_theta=8.0, and text_config has"):
        DecoderConfig.from_hf(raw)
    assert DecoderConfig.from_hf(raw | {"rope_theta": within}).family == "gemma3_text"


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight"),
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.x.mlp.up_proj.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.900.up_proj.weight"),
    ],
)
def test_a_weight_that_the_config_has_no_place_for_is_named(
    name: str, extra: str, tmp_path: Path
) -> None:
    tensors = tiny_tensors(name) | {extra: np.ones(4, np.float32)}
    folder = write(tmp_path, RAW_CONFIGS[name], tensors)
    with pytest.raises(UserError, match=f"no place for tensor {extra}"):
        resolve_model(folder)


def test_fewer_layers_than_the_file_has_are_refused(tmp_path: Path) -> None:
    raw = RAW_CONFIGS["llama"] | {"num_hidden_layers": 1}
    with pytest.raises(UserError, match="no place for tensor .*num_hidden_layers=1"):
        resolve_model(write(tmp_path / "hf", raw, tiny_tensors("llama")))
    config = resolve_model(write(tmp_path / "right", RAW_CONFIGS["llama"], tiny_tensors("llama")))
    assert config.config.n_layers == 2
    file = write_model(tmp_path / "m.gguf", "llama", n_layers=1, tensors=tiny_tensors("llama"))
    with pytest.raises(UserError, match="no place for tensor .*block_count=1"):
        resolve_model(file)


@pytest.mark.parametrize("shape", [(64,), (), (64, 16, 1), (63, 16)])
def test_a_head_of_another_shape_than_the_embedding_is_the_file_s_own(
    shape: tuple[int, ...],
) -> None:
    """Which the check of all shapes then refuses by its name."""
    config = DecoderConfig("llama", 64, 16, 1, 2, 1, 8, 24, tie_embeddings=True)
    tensors = Memory({weights.EMBEDDING: np.ones((64, 16)), weights.HEAD: np.ones(shape)})
    assert not weights.held_against(config, tensors).tie_embeddings
