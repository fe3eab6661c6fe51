"""Hugging Face folders: what is written is what is read, by slices, and what is wrong is told."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from cases import and_slow
from jax.sharding import PartitionSpec
from references.tiny import batch
from tiny_models import NAMES, RAW_CONFIGS, Memory, make_mesh, tiny_config, tiny_model, tiny_tensors

from jaxrl.checkpoint.model_source import ModelSource, resolve_model
from jaxrl.errors import UserError
from jaxrl.formats import hf, weights
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import param_shardings

FAMILIES = (
    *("llama3_rope", "smollm", "qwen2", "qwen3", "olmo2", "phi3", "phi3_longrope"),
    *("mistral", "qwen2_sliding", "smollm3", "gemma3", "olmo3"),
    *("qwen3_moe", "gpt_oss", "qwen3_5", "qwen3_5_moe", "gemma4", "gemma4_shared", "gemma4_moe"),
)


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def write(folder: Path, name: str = "qwen2", tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A folder as transformers writes it, through the safetensors library."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(RAW_CONFIGS[name]))
    values = tiny_tensors(name) if tensors is None else tensors
    safetensors.numpy.save_file(values, folder / "model.safetensors")
    return folder


def load(folder: Path, **options: Any) -> Any:
    return weights.load_params(hf.SafetensorsFolder(folder), hf.read_config(folder), **options)


@pytest.mark.parametrize("name", NAMES)
def test_config_survives_our_writing(name: str) -> None:
    config = tiny_config(name)
    assert DecoderConfig.from_hf(json.loads(json.dumps(config.to_hf("float32")))) == config
    older = {k: v for k, v in config.to_hf("float32").items() if k != "rope_parameters"}
    if not config.family.startswith("gemma4"):  # which no older version of transformers has
        assert DecoderConfig.from_hf(older) == config


def test_heads_of_qwen3_5_that_rotate_as_a_whole_are_written_so() -> None:
    """What is left out, or null, is a quarter there."""
    config = replace(tiny_config("qwen3_5"), rotary_dims=None)
    written = config.to_hf("float32")
    assert DecoderConfig.from_hf(written) == config
    unsaid = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": None}
    left_out = written | {"rope_parameters": unsaid, "partial_rotary_factor": None}
    assert DecoderConfig.from_hf(left_out).rotary_dims == config.head_dim // 4


def test_rope_of_every_tiny_config_is_read() -> None:
    for name, raw in RAW_CONFIGS.items():
        config, rope = tiny_config(name), raw["rope_parameters"]
        rope = rope.get("full_attention", rope)
        assert config.rope_theta == rope["rope_theta"]
        assert (config.rope_scaling is None) == (rope["rope_type"] == "default")


def test_what_would_give_wrong_numbers_is_refused() -> None:
    raw = RAW_CONFIGS["qwen3"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"attention_bias": True}, "attention_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e6}}, "rope_type='axial'"),
        ({"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
    ]
    for change, message in changes:
        with pytest.raises(UserError, match=message):
            DecoderConfig.from_hf(raw | change)
    phi = RAW_CONFIGS["phi3"]
    assert DecoderConfig.from_hf(phi | {"sliding_window": 128}).windows == {128: 2}
    assert DecoderConfig.from_hf(phi | {"sliding_window": 256}) == tiny_config("phi3")
    with pytest.raises(UserError, match="partial_rotary_factor=1.5 must be a number above 0"):
        DecoderConfig.from_hf(phi | {"partial_rotary_factor": 1.5})


def test_a_missing_head_dim_is_the_familys() -> None:
    """Qwen3's is 128 in transformers, whatever the width; the others divide the width."""
    for name, head_dim in (("qwen3", 128), ("qwen2", 8), ("phi3", 8)):
        raw = {k: v for k, v in RAW_CONFIGS[name].items() if k != "head_dim"}
        assert DecoderConfig.from_hf(raw).head_dim == head_dim


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "silu"}, "supported: gelu_pytorch_tanh"),
        ("gemma3", {"layer_types": ["full_attention"]}, "a list of num_hidden_layers=7 is needed"),
        ("gemma3", {"rope_parameters": {"sliding_attention": 3}}, "an object of each kind"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_type='linear' of sliding_attention is not supported",
        ),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4", {"enable_moe_block": True}, "num_experts=null"),
        ("gemma4_moe", {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2"),
        ("gemma4_moe", {"top_k_experts": 7}, "top_k_experts=7 exceeds num_experts=6"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5"),
        (
            "gemma4_shared",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3, "per_layer_config": None},
            "not a multiple of n_kv_heads=3",
        ),
        (
            "gemma4",
            {"layer_types": ["sliding_attention"] * 6, "per_layer_config": None},
            "must be full_attention",
        ),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config"),
        ("gemma4_shared", {"vocab_size_per_layer_input": 8}, "must be vocab_size=64"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("mistral", {"sliding_window": -1}, "sliding_window=-1"),
        (
            "qwen2",
            {"max_window_layers": None, "use_sliding_window": True},
            "needs a sliding_window",
        ),
        ("llama", {"layer_types": ["sliding_attention"] * 2}, "each of full_attention"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        DecoderConfig.from_hf(RAW_CONFIGS[name] | change)


def test_windows_are_what_a_config_says_and_what_it_leaves_out() -> None:
    """As the config of each model in transformers has them."""
    raw = {k: v for k, v in RAW_CONFIGS["mistral"].items() if k != "sliding_window"}
    raw |= {"max_position_embeddings": 32768}
    assert DecoderConfig.from_hf(raw).windows == {4096: 2}
    assert DecoderConfig.from_hf(raw | {"sliding_window": None}).windows == {None: 2}
    wide = raw | {"sliding_window": 32, "max_position_embeddings": 32}  # sees all of a sequence,
    for rope, window in ((None, None), ("yarn", 32), ("dynamic", 32)):  # unless it is longer
        scaling = rope and {"rope_type": rope, "factor": 4.0}
        config = DecoderConfig.from_hf(wide | {"rope_parameters": None, "rope_scaling": scaling})
        assert config.windows == {window: 2}
        assert DecoderConfig.from_hf(config.to_hf("float32")) == config
    raw = {k: v for k, v in RAW_CONFIGS["qwen2_sliding"].items() if k != "layer_types"}
    assert DecoderConfig.from_hf(raw).windows == {None: 1, 6: 2}
    assert DecoderConfig.from_hf(raw | {"max_window_layers": 9}).windows == {None: 3}
    raw = {k: v for k, v in RAW_CONFIGS["smollm3"].items() if k != "no_rope_layers"}
    assert DecoderConfig.from_hf(raw) == tiny_config("smollm3")
    assert len(DecoderConfig.from_hf(raw | {"no_rope_layer_interval": 9}).kinds) == 1
    raw = {k: v for k, v in RAW_CONFIGS["olmo3"].items() if k != "layer_types"}
    raw |= {"rope_parameters": None, "rope_theta": 7e5, "num_hidden_layers": 8}
    config = DecoderConfig.from_hf(raw)
    assert config.windows == {5: 6, None: 2}
    assert {config.rope_theta, *(kind.rope_theta for kind in config.kinds)} == {7e5, None}


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_kept_are_written_and_read_or_refused(name: str) -> None:
    """Any layers: what cannot be written as a config.json is refused before anything is written."""
    config = tiny_config(name)
    n, shapes = config.n_layers, weights.tensor_shapes(config)
    kinds = config.kinds * (n // len(config.kinds))
    source = ModelSource(name, Path(name), config, Memory({}), None)
    for keep in [*itertools.combinations(range(n), 1), *itertools.combinations(range(n), 2)]:
        slides_last = config.family.startswith("gemma4") and kinds[keep[-1]].window is not None
        if config.lenders or all(kinds[i].recurs for i in keep) or slides_last:
            with pytest.raises(UserError):
                source.keep_layers(keep)
            continue
        kept = source.keep_layers(keep)
        assert DecoderConfig.from_hf(kept.config.to_hf("float32")) == kept.config
        assert isinstance(kept.tensors, weights.KeptLayers)
        for tensor, shape in weights.tensor_shapes(kept.config).items():
            assert shape == shapes[kept.tensors.stored_name(tensor)]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_model_of_images_too(prefix: str, tmp_path: Path) -> None:
    """Gemma 3 as its checkpoints of 4 billion parameters and more have it: the older form of the
    config, without what is the same for all of them."""
    raw = dict(RAW_CONFIGS["gemma3"])
    for key in ("eos_token_id", "rope_parameters", "layer_types", "tie_word_embeddings"):
        del raw[key]
    raw |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    whole = {"model_type": "gemma3", "eos_token_id": [1, 2], "text_config": raw}
    tensors = {prefix + k.removeprefix("model."): v for k, v in tiny_tensors("gemma3").items()}
    tensors["vision_tower.patches.weight"] = np.zeros((2, 3), np.float32)
    (tmp_path / "config.json").write_text(json.dumps(whole))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config, params = tiny_model("gemma3")
    assert hf.read_config(tmp_path) == replace(config, eos_ids=(1, 2))
    assert_same(load(tmp_path), params)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_shared", "gemma4_unified"])
def test_the_text_of_gemma4(name: str, tmp_path: Path) -> None:
    """As its checkpoints have it: the sizes of layers without a window beside the others; and what
    borrowing layers would have if they did not."""
    raw = dict(RAW_CONFIGS[name])
    full = next(iter(raw.pop("per_layer_config").values()))
    raw["global_head_dim"] = full["head_dim"]
    raw["num_global_key_value_heads"] = full.get("num_key_value_heads")
    kind = raw["model_type"].removesuffix("_text")
    whole = {"model_type": kind, "vision_config": {}, "text_config": raw}
    values = tiny_tensors(name)
    tensors = {k.replace("model.", "model.language_model."): v for k, v in values.items()}
    tensors["model.language_model.layers.5.self_attn.v_proj.weight"] = np.zeros((2, 3))
    (tmp_path / "config.json").write_text(json.dumps(whole))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config, params = tiny_model(name)
    assert hf.read_config(tmp_path) == config
    assert_same(load(tmp_path), params)
    if config.lenders:
        with pytest.raises(UserError, match="cannot be left out"):
            config.with_layers((0, 2))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_qwen3_5(name: str, tmp_path: Path) -> None:
    """As its checkpoints have it, beside what sees images and what predicts further tokens."""
    raw = dict(RAW_CONFIGS[name])
    raw |= {"full_attention_interval": 2, "mtp_num_hidden_layers": 1}
    raw["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    kinds = raw.pop("layer_types")
    whole = {"model_type": name, "tie_word_embeddings": False, "text_config": raw}
    values = tiny_tensors(name)
    tensors = {k.replace("model.", "model.language_model."): v for k, v in values.items()}
    tensors |= {"model.visual.x.weight": np.zeros((2, 3)), "mtp.norm.weight": np.zeros(3)}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    found = hf.read_config(tmp_path)
    assert [kind.recurs for kind in found.kinds] == [True, False] * 2
    raw["layer_types"] = kinds
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config, params = tiny_model(name)
    assert hf.read_config(tmp_path) == config
    assert_same(load(tmp_path), params)
    raw["layer_types"] = ["linear_attention"] * len(kinds)
    with pytest.raises(UserError, match="at least one needs attention"):
        DecoderConfig.from_hf(whole)


def in_other_form(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with those of experts stored by expert in place of together, or the reverse."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        block, _, rest = name.rpartition("experts.")
        if not block:
            found[name] = value
        elif rest in ("gate_up_proj", "down_proj"):
            parts = {"down": value} if rest == "down_proj" else {}
            if not parts:
                parts["gate"], parts["up"] = np.split(value, 2, axis=1)
            for part, all_of_them in parts.items():
                for e, own in enumerate(all_of_them):
                    found[f"{block}experts.{e}.{part}_proj.weight"] = np.ascontiguousarray(own)
        else:
            expert, part, _ = rest.split(".")
            into = "down_proj" if part == "down_proj" else "gate_up_proj"
            found.setdefault(f"{block}experts.{into}", {})[int(expert), part == "up_proj"] = value
    for name, parts in found.items():
        if isinstance(parts, dict):
            halves = [[v for (e, up), v in sorted(parts.items()) if up == h] for h in (False, True)]
            found[name] = np.concatenate([np.stack(half) for half in halves if half], axis=1)
    return found


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe", "gemma4_moe"])
def test_experts_are_read_whichever_way_they_are_stored(name: str, tmp_path: Path) -> None:
    """transformers 5 writes a model that it was given one by one, and one that was made in memory,
    in different ways."""
    values = in_other_form(tiny_tensors(name))
    assert values.keys() != tiny_tensors(name).keys()
    source = resolve_model(write(tmp_path / "other", name, values))
    config, params = tiny_model(name)
    assert_same(weights.load_params(source.tensors, config), params)
    mesh = make_mesh(1, 2, 1, expert=2)
    assert_same(weights.load_params(source.tensors, config, mesh), params)
    for wrong in ("missing", "shape", "beyond"):
        damaged = dict(values)
        apart = [n for n in values if re.search(r"experts\.\d+\.up", n)]
        key = apart[-1] if apart else next(n for n in values if n.endswith("experts.down_proj"))
        last = damaged.pop(key)
        if wrong == "shape":
            damaged[key] = np.ascontiguousarray(last[..., :-1])
        elif wrong == "beyond" and apart:
            damaged |= {key: last, re.sub(r"experts\.\d+", "experts.99", key): last}
        with pytest.raises(UserError, match=r"experts\.\S+ (of|has) shape|no place for .*99\.up"):
            resolve_model(write(tmp_path / wrong, name, damaged))


LAYOUTS = ("stacked", "unstacked")


@pytest.mark.parametrize(
    ("name", "layout"),
    and_slow(
        [(name, LAYOUTS[i % 2]) for i, name in enumerate(FAMILIES)],
        [(name, LAYOUTS[(i + 1) % 2]) for i, name in enumerate(FAMILIES)],
    ),
)
def test_saved_is_loaded_bit_by_bit(name: str, layout: str, tmp_path: Path) -> None:
    config, params = tiny_model(name, layout=layout)
    hf.save_hf(tmp_path / "out", config, params, dtype="float32")
    assert hf.read_config(tmp_path / "out") == config
    assert_same(load(tmp_path / "out", layout=layout), params)
    theirs = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert_same(theirs, tiny_tensors(name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_round_once(dtype: str, tmp_path: Path) -> None:
    config, params = tiny_model("llama")
    hf.save_hf(tmp_path / "out", config, params, dtype=dtype)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype), params)
    assert_same(load(tmp_path / "out", dtype=dtype), rounded)
    assert_same(load(tmp_path / "out"), jax.tree.map(lambda x: x.astype(np.float32), rounded))


def test_bfloat16_written_by_the_safetensors_library_is_read(tmp_path: Path) -> None:
    low = {k: v.astype(ml_dtypes.bfloat16) for k, v in tiny_tensors("qwen2").items()}
    _, expected = tiny_model("qwen2")
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), expected)
    assert_same(load(write(tmp_path, tensors=low)), expected)


def test_shards_and_their_index(tmp_path: Path) -> None:
    config, params = tiny_model("qwen3")
    read = weights.hf_tensors(config, params)
    folder = hf.write_folder(tmp_path / "out", config, read, dtype="float32", shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / hf.INDEX).read_text())
    assert len(files) > 2 and not (folder / hf.SINGLE).exists()
    assert {folder / f for f in index["weight_map"].values()} == set(files)
    assert all(file.stat().st_size < 20_000 + 3_000 for file in files)  # a header's size above
    assert_same(load(folder), params)
    files[1].unlink()
    with pytest.raises(UserError, match=f"{files[1].name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *(("qwen2", axes) for axes in ((1, 2, 4), (2, 2, 2), (8, 1, 1))),
        ("phi3", (2, 2, 2)),  # of tensors that parameters share, each reads its own rows
    ],
)
@pytest.mark.parametrize("layout", ["stacked", "unstacked"])
def test_every_element_is_read_once_and_only_by_its_devices(
    name: str, axes: tuple[int, int, int], layout: str
) -> None:
    mesh = make_mesh(*axes)
    config, whole = tiny_model(name, layout=layout)
    memory = Memory(tiny_tensors(name))
    params = weights.load_params(memory, config, mesh, layout=layout)
    assert_same(params, whole)
    shardings = param_shardings(config, mesh, layout)
    jax.tree.map(lambda x, s: x.sharding == s or pytest.fail(str(s)), params, shardings)
    for tensor, value in memory.values.items():
        assert sum(n for read, n in memory.reads if read == tensor) == value.size, tensor
    kernel = "model.layers.0.mlp.down_proj.weight"
    slices = {n for read, n in memory.reads if read == kernel}
    assert slices == {memory.values[kernel].size // (axes[1] * axes[2])}


def test_host_memory_holds_a_few_slices(tmp_path: Path) -> None:
    """Peak of numpy's allocations against the largest slice: jax lets go of a copied slice a slice
    or three late, and later still where the machine is loaded, but not in each of three loads."""
    config = replace(
        tiny_config("llama"), vocab_size=16384, d_model=256, d_ff=4096, n_layers=4, n_heads=8,
        n_kv_heads=8, head_dim=32,
    )  # fmt: skip
    shapes = weights.tensor_shapes(config)
    zeros = np.zeros(max(np.prod(s) for s in shapes.values()), np.float32)
    hf.write_folder(
        tmp_path / "out",
        config,
        lambda name: zeros[: np.prod(shapes[name])].reshape(shapes[name]),
        dtype="float32",
    )
    largest = 4 * max(16384 * 256, 4 * 256 * 4096) // 8
    peaks = []
    while len(peaks) < 3 and min(peaks, default=math.inf) >= 6 * largest:
        tracemalloc.start()
        params = load(tmp_path / "out", mesh=make_mesh(1, 2, 4))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(x.nbytes for x in jax.tree.leaves(params)) > 30 * largest
    assert largest <= min(peaks) < 6 * largest, (peaks, largest)


@pytest.mark.parametrize("name", ["smollm", "qwen3"])  # tied, untied
def test_the_head_alone(name: str, tmp_path: Path) -> None:
    config, params = tiny_model(name)
    folder = hf.save_hf(tmp_path / "out", config, params, dtype="float32")
    mesh = make_mesh(1, 2, 4)
    tensors = hf.SafetensorsFolder(folder)
    for head in (weights.load_head(tensors, config), weights.load_head(tensors, config, mesh)):
        assert_same(head, parameters.head(params))
    assert head.sharding.spec == PartitionSpec("tensor", "fsdp")
    memory = Memory(tiny_tensors(name))
    weights.load_head(memory, config, mesh)
    assert sum(n for _, n in memory.reads) == config.vocab_size * config.d_model


def test_what_the_model_does_not_need_is_ignored(tmp_path: Path) -> None:
    """An old checkpoint's inv_freq, and a copy of the tied embedding."""
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "lm_head.weight": tiny_tensors("qwen2")["model.embed_tokens.weight"],
        "steps": np.ones(1, np.int64),
    }
    _, params = tiny_model("qwen2")
    assert_same(load(write(tmp_path, tensors=tiny_tensors("qwen2") | extra)), params)


def test_generation_config_adds_eos_ids(tmp_path: Path) -> None:
    write(tmp_path)
    raw = {"eos_token_id": [5, 2, 7], "bos_token_id": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    config = hf.read_config(tmp_path)
    assert config.eos_ids == (2, 5, 7)
    assert config.bos_id == 1  # config.json's own


def test_generation_settings_go_along(tmp_path: Path) -> None:
    """What the model's authors recommend, but not the ids, which are those of the tokenizer."""
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    settings |= {"repetition_penalty": 1.05, "suppress_tokens": [3], "watermark": None}
    write(tmp_path / "a")
    file = "generation_config.json"
    raw = settings | {"eos_token_id": [5, 2], "_from_model_config": True}
    (tmp_path / "a" / file).write_text(json.dumps(raw))
    config, params = hf.read_config(tmp_path / "a"), load(tmp_path / "a")
    assert hash(config) == hash(replace(config, sampling={})) and config.sampling == settings
    hf.save_hf(tmp_path / "b", config, params, dtype="float32")
    hf.write_description(tmp_path / "c", hf.read_config(tmp_path / "b"), "float32")
    for name in "bc":
        written = json.loads((tmp_path / name / file).read_text())
        assert {key: written.get(key, "no") for key in settings} == settings
        assert written["eos_token_id"] == [2, 5] and "_from_model_config" not in written


def test_a_failed_save_leaves_what_stood_there(tmp_path: Path) -> None:
    config, params = tiny_model("llama")
    hf.save_hf(tmp_path / "out", config, params, dtype="float32")

    def fails(name: str) -> np.ndarray:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        hf.write_folder(tmp_path / "out", config, fails, dtype="float32")
    assert_same(load(tmp_path / "out"), params)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    config, params = tiny_model("llama")
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    (source / "notes.txt").write_text("mine")
    out = hf.save_hf(tmp_path / "out", config, params, tokenizer_from=source)
    assert (out / "chat_template.jinja").read_text() == "hello"
    assert hf.has_tokenizer(out) and not (out / "notes.txt").exists()


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_in_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def _missing(folder: Path) -> None:
    values = tiny_tensors("qwen2")
    del values["model.layers.1.self_attn.k_proj.bias"]
    write(folder, tensors=values)


def _wrong_shape(folder: Path) -> None:
    values = tiny_tensors("qwen2")
    values["model.norm.weight"] = np.ones(33, np.float32)
    write(folder, tensors=values)


def _wrong_dtype(folder: Path) -> None:
    values = tiny_tensors("qwen2")
    values["model.norm.weight"] = np.ones(32, np.int8)
    write(folder, tensors=values)


def _other_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(RAW_CONFIGS["qwen2"] | {"model_type": "gpt2"}))


def _not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "there is no such folder"),
        (_without_config, "no config.json"),
        (_only_pickles, "not read; save them as safetensors"),
        (_no_weights, "neither model.safetensors nor"),
        (_truncated, r"model.safetensors: truncated, .*file not fully covered.* has \d+ bytes"),
        (_cut_in_header, "truncated"),
        (_missing, r"tensor model.layers.1.self_attn.k_proj.bias of shape \[16\] is missing"),
        (_wrong_shape, r"tensor model.norm.weight has shape \[33\], .* asks for \[32\]"),
        (_wrong_dtype, "tensor model.norm.weight is stored as I8"),
        (_other_family, "config.json: model_type='gpt2' is not supported"),
        (_not_json, "config.json: not valid JSON"),
    ],
)
def test_what_is_wrong_is_named(spoil: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    spoil(folder)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch to run transformers' models")
    from transformers import AutoModelForCausalLM

    config, params = tiny_model(name)
    hf.save_hf(tmp_path / "out", config, params, dtype="float32")
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens, _ = batch(config.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    hidden = decoder.forward(config, params, tokens, np.ones_like(tokens, bool))
    np.testing.assert_allclose(
        decoder.token_logits(config, params, hidden), expected, rtol=0, atol=1e-4
    )
