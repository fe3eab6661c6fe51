"""Folders of adapters: against peft (committed arrays), and what is refused of them."""

import json
import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
import safetensors.numpy
from cases import and_slow
from references.tiny import ADAPTED, BASE, batch, random_tensors
from tiny_models import (
    NAMES,
    REFERENCES,
    Memory,
    loss_and_logits,
    make_mesh,
    random_adapters,
    tiny_config,
)

from jaxrl import load_model
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.errors import UserError
from jaxrl.export import export
from jaxrl.formats import peft, weights
from jaxrl.formats.hf import write_folder
from jaxrl.models.config import DecoderConfig
from jaxrl.models.lora import TARGETS, Lora, join_adapters

computed = jax.jit(loss_and_logits, static_argnums=0)
RAW = {"model_type": "llama", "rope_theta": 1e4, **BASE, **ADAPTED}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base model, and the adapters that peft wrote for it."""
    place = tmp_path_factory.mktemp("adapters")
    config = DecoderConfig.from_hf(RAW)
    tensors = Memory(random_tensors(weights.tensor_shapes(config), seed=50))

    def read(name):
        return tensors.values[name]

    base = write_folder(place / "base", config, read, dtype="float32")
    shutil.copytree(REFERENCES / "adapters", place / "adapters")
    change(place / "adapters", base_model_name_or_path=str(base))
    return base, place / "adapters"


def change(folder, **settings):
    file = folder / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_logits_are_those_of_peft(folders):
    """Adapters beside the weights, merged into them, and merged by the reader of the folder."""
    tokens, mask = batch(BASE["vocab_size"])
    theirs = np.load(REFERENCES / "adapters" / "logits.npy")
    plain, model = load_model(folders[0]), load_model(folders[1])
    ours = np.asarray(model.logits(tokens, mask))
    np.testing.assert_allclose(ours[mask], theirs[mask], rtol=0, atol=1e-4)
    assert np.abs(np.asarray(plain.logits(tokens, mask)) - theirs)[mask].max() > 0.1
    source = resolve_model(folders[1])
    lora = source.adapter.lora
    assert lora.targets == ("q_proj", "v_proj", "down_proj")
    assert lora.scale == pytest.approx(6 / np.sqrt(2))  # of use_rslora
    trained = source.with_lora(lora)
    beside = join_adapters(trained.load(), trained.load_adapters(None, np.float32, 0))
    _, found = computed(trained.config, beside, tokens, mask)
    np.testing.assert_allclose(found[mask], theirs[mask], rtol=0, atol=1e-4)


def test_what_is_written_is_read_again(folders, tmp_path):
    source = resolve_model(folders[1])
    again = resolve_model(export(source, tmp_path / "again", adapters=True))
    assert again.adapter.lora.targets == source.adapter.lora.targets
    assert again.adapter.lora.scale == pytest.approx(source.adapter.lora.scale)
    for name, pair in source.adapter.pairs().items():
        for a, b in zip(pair, again.adapter.pairs()[name], strict=True):
            assert (a == b).all()
    tokens, mask = batch(BASE["vocab_size"])
    whole = load_model(export(source, tmp_path / "whole", dtype="float32"))
    same = load_model(folders[1])
    np.testing.assert_allclose(whole.logits(tokens, mask), same.logits(tokens, mask), atol=1e-6)
    with pytest.raises(UserError, match="has no adapters: leave out --format peft"):
        export(resolve_model(folders[0]), tmp_path / "none", adapters=True)


@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_an_export_says_what_rounding_takes_from_adapters(folders, tmp_path, capfd, scale):
    """By hand: of entries that change, those that are the base's again in bfloat16."""
    source = resolve_model(folders[0]).with_lora(Lora(2, 4.0, ("q_proj",), "default"))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda x: scale * rng.normal(size=x.shape).astype(np.float32),
        source.load_adapters(None, np.float32, 0),
    )
    pairs = peft.pairs_of(source.config, drawn)
    peft.write_adapters(tmp_path / "own", source.config, source.base_name, pairs)
    changed = lost = 0
    for name, (a, b) in pairs.items():
        base = np.asarray(source.tensors.read(name, (slice(None), slice(None))), np.float32)
        delta = 2 * (a @ b).T
        same = (base + delta).astype("bfloat16") == base.astype("bfloat16")
        changed, lost = changed + (delta != 0).sum(), lost + (same & (delta != 0)).sum()
    export(tmp_path / "own", tmp_path / "out")
    told = capfd.readouterr().err
    assert bool(lost > 0.9 * changed) is (scale < 1)
    if scale < 1:
        assert f"{lost / changed:.0%} are the base model's again, rounded to bfloat16" in told
    else:
        assert "base model's again" not in told
    export(tmp_path / "own", tmp_path / "whole", dtype="float32")
    assert "base model's again" not in capfd.readouterr().err


@pytest.mark.parametrize("family", and_slow(["phi3", "qwen3_moe"], ["llama"]))
def test_peft_loads_what_is_written(folders, fused, mixture, tmp_path, family):
    """As a run writes its final folder; where peft is installed, as no extra of ours asks for."""
    torch = pytest.importorskip("torch", reason="needs torch and peft to load adapters there")
    loader = pytest.importorskip("peft", reason="needs torch and peft to load adapters there")
    from transformers import AutoModelForCausalLM

    trained = resolve_model(folders[0]).with_lora(Lora(2, 6.0, ("q_proj", "up_proj"), "gaussian"))
    first = trained.load_adapters(make_mesh(1, 2, 1), np.float32, 5)
    moved = jax.tree.map(lambda x: x + 0.1, first)
    peft.save(tmp_path / "final", trained.config, trained.base_name, moved)
    name, final = folders[0], tmp_path / "final"
    if family == "phi3":
        name, _, _, final = fused
    if family == "qwen3_moe":
        name, _, _, final = mixture
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    theirs = loader.PeftModel.from_pretrained(base, final).eval()
    tokens, _ = batch(BASE["vocab_size"])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    ours = load_model(final).logits(tokens, np.ones_like(tokens, bool))
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_a_base_that_peft_cannot_load_is_said_with_what_to_do(folders, tmp_path, capfd):
    """Of a folder, as peft's own, nothing is said."""
    export(folders[1], tmp_path / "loads", adapters=True)
    assert "base model" not in capfd.readouterr().err
    source = resolve_model("builtin:student").with_lora(Lora(2, 4.0, ("q_proj",), "default"))
    pairs = peft.pairs_of(source.config, source.load_adapters(None, np.float32, 0))
    peft.write_adapters(tmp_path / "own", source.config, source.base_name, pairs)
    export(tmp_path / "own", tmp_path / "out", adapters=True)
    told = capfd.readouterr().err
    assert "its base model builtin:student is none that PEFT can load" in told
    assert "jaxrl export builtin:student BASE" in told and "base_model_name_or_path" in told


@pytest.mark.slow
def test_devices_read_the_same_adapters(folders):
    """By default those of a Phi-3 and of a mixture are read on other meshes than they are of."""
    source = resolve_model(folders[1])
    trained = source.with_lora(source.adapter.lora)
    one = trained.load_adapters(None, np.float32, 0)
    many = trained.load_adapters(make_mesh(1, 2, 2), np.float32, 0)
    first = resolve_model(folders[0]).with_lora(Lora(4, 8.0))
    for a, b in (
        (one, many),
        (
            first.load_adapters(None, np.float32, 3),
            first.load_adapters(make_mesh(2, 2, 1), np.float32, 3),
        ),
    ):
        for group in a["layers"]:
            for name, pair in a["layers"][group].items():
                for key, value in pair.items():
                    assert (np.asarray(value) == b["layers"][group][name][key]).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; supported: LORA"),
        ({"use_dora": True}, "use_dora=True is not supported; supported: False"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"kasa_config": {"x": 1}}, "kasa_config={'x': 1} is not supported; supported: None"),
        ({"lora_alpha": 0}, "lora_alpha=0 must be a number above 0"),
        ({"r": 0}, "r=0 must be an integer of at least 1"),
        ({"base_model_name_or_path": ""}, "base_model_name_or_path='' must name the model"),
        ({"exclude_modules": ["v_proj"]}, "tensors of v_proj, which exclude_modules in"),
        ({"target_modules": ["q_proj"]}, "which target_modules in adapter_config.json leaves out"),
        ({"r": 3}, r"has shape \[2, 32\], the config asks for \[3, 32\]"),
    ],
)
def test_other_adapters_are_refused_in_one_line(folders, tmp_path, settings, message):
    shutil.copytree(folders[1], tmp_path / "other")
    change(tmp_path / "other", **settings)
    with pytest.raises(UserError, match=message):
        resolve_model(tmp_path / "other")


def test_a_base_model_on_the_hub_has_a_name_and_a_revision(folders, tmp_path):
    sha = "0123456789" * 4
    config = resolve_model(folders[1]).with_lora(resolve_model(folders[1]).adapter.lora).config
    peft.write_settings(tmp_path, config, f"Qwen/Qwen3-8B@main@{sha}")
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert settings["base_model_name_or_path"] == "Qwen/Qwen3-8B" and settings["revision"] == sha
    assert peft.read_settings(tmp_path)[1] == f"Qwen/Qwen3-8B@{sha}"
    place = tmp_path / "itself"
    shutil.copytree(folders[1], place)
    change(place, base_model_name_or_path=str(place))
    with pytest.raises(UserError, match="has adapters itself"):
        resolve_model(place)


def test_adapters_and_their_base_by_their_names_on_a_hub(folders, hub, tmp_path):
    """Of the adapters the weights are fetched with what describes them, of the base once it is
    loaded."""
    base, adapters = folders
    place = tmp_path / "named"
    shutil.copytree(adapters, place)
    change(place, base_model_name_or_path="org/base")
    hub.add("org/base", base)
    commit = hub.add("org/adapters", place)
    source = resolve_model("org/adapters")
    assert source.name == f"org/adapters@main@{commit}" and source.adapter.base == "org/base"
    assert hub.fetched(".safetensors") == [peft.WEIGHTS]
    tokens, mask = batch(BASE["vocab_size"])
    ours = load_model("org/adapters").logits(tokens, mask)
    assert hub.fetched(".safetensors") == [peft.WEIGHTS, "model.safetensors"]
    assert (ours == load_model(adapters).logits(tokens, mask)).all()
    hub.add("org/none", {peft.CONFIG: (place / peft.CONFIG).read_bytes()})
    with pytest.raises(UserError, match=f"org/none: .* on the hub has no {peft.WEIGHTS}"):
        resolve_model("org/none")


def test_tensors_that_nothing_reads_or_that_are_missing_are_named(folders, tmp_path):
    place = tmp_path / "adapters"
    shutil.copytree(folders[1], place)
    tensors = safetensors.numpy.load_file(place / peft.WEIGHTS)
    prefix = "base_model.model.model.layers"
    more = tensors | {f"{prefix}.0.self_attn.qkv_proj.lora_A.weight": np.zeros((2, 32), "f")}
    safetensors.numpy.save_file(more, place / peft.WEIGHTS)
    with pytest.raises(UserError, match="1 tensors belong to no projection .*qkv_proj.lora_A"):
        resolve_model(place)
    del tensors[f"{prefix}.1.mlp.down_proj.lora_B.weight"]
    safetensors.numpy.save_file(tensors, place / peft.WEIGHTS)
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.lora_B.weight .* is missing"):
        resolve_model(place)
    (place / peft.WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"adapter_model.safetensors is missing"):
        resolve_model(place)


def test_other_adapters_than_asked_for_are_refused(folders):
    source = resolve_model(folders[1])
    with pytest.raises(UserError, match=r"has adapters of rank 2.*asks for rank 4"):
        source.with_lora(Lora(4, 8.0))
    with pytest.raises(
        UserError, match=r"llama has no qkv_proj that adapters could be for, but q_"
    ):
        source.with_lora(Lora(4, 8.0, ("qkv_proj", "o_proj")))


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A Phi-3 and adapters of all its projections, whose q, k and v are rows of one tensor."""
    place = tmp_path_factory.mktemp("fused")
    raw = {"model_type": "phi3", **BASE, "max_position_embeddings": 64}
    config = DecoderConfig.from_hf(raw)
    tensors = Memory(random_tensors(weights.tensor_shapes(config), seed=1))
    base = write_folder(place / "base", config, tensors.values.__getitem__, dtype="float32")
    trained = resolve_model(base).with_lora(Lora(2, 6.0))
    first = trained.load_adapters(make_mesh(1, 2, 1), np.float32, 5)
    moved = jax.tree.map(lambda x: x + np.linspace(0, 0.1, x.size).reshape(x.shape), first)
    peft.save(place / "final", trained.config, trained.base_name, moved)
    return base, trained, moved, place / "final"


def test_projections_that_share_a_tensor_share_an_adapter(fused):
    """One pair for each tensor, with one A: what a reader of the folder adds to the tensor is what
    the model computes, and the adapters that it loads are those that were written."""
    _, trained, moved, folder = fused
    pairs = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    prefix = "base_model.model.model.layers.1.self_attn.qkv_proj"
    heads = BASE["num_attention_heads"] + 2 * BASE["num_key_value_heads"]
    width = heads * trained.config.head_dim
    assert pairs[f"{prefix}.lora_A.weight"].shape == (2, BASE["hidden_size"])
    assert pairs[f"{prefix}.lora_B.weight"].shape == (width, 2)
    assert sum(x.size for x in pairs.values()) == trained.config.n_trained
    settings = json.loads((folder / peft.CONFIG).read_text())
    assert settings["target_modules"] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    again = resolve_model(folder)
    further = again.with_lora(Lora(2, 6.0))
    loaded = further.load_adapters(make_mesh(1, 2, 2), np.float32, 0)
    assert jax.tree.structure(loaded) == jax.tree.structure(moved)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(moved)))
    tokens, mask = batch(BASE["vocab_size"])
    _, beside = computed(trained.config, join_adapters(trained.load(), moved), tokens, mask)
    read = np.asarray(load_model(folder).logits(tokens, mask))
    np.testing.assert_allclose(read[mask], beside[mask], rtol=0, atol=5e-4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A Qwen3-MoE and adapters of attention and of all experts."""
    place = tmp_path_factory.mktemp("mixture")
    config = tiny_config("qwen3_moe")
    tensors = Memory(random_tensors(weights.tensor_shapes(config), seed=1))
    base = write_folder(place / "base", config, tensors.values.__getitem__, dtype="float32")
    trained = resolve_model(base).with_lora(Lora(2, 6.0))
    first = trained.load_adapters(make_mesh(1, 1, 1, 1, 2), np.float32, 5)
    moved = jax.tree.map(lambda x: x + np.linspace(0, 0.1, x.size).reshape(x.shape), first)
    peft.save(place / "final", trained.config, trained.base_name, moved)
    return base, trained, moved, place / "final"


def test_each_expert_has_a_pair_in_the_file(mixture):
    """As peft's own of a model whose experts are modules: what a reader adds to their tensors is
    what the model computes, on any mesh."""
    _, trained, moved, folder = mixture
    config = trained.config
    pairs = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    one = "base_model.model.model.layers.1.mlp.experts.3.down_proj"
    assert pairs[f"{one}.lora_A.weight"].shape == (2, config.d_ff)
    assert pairs[f"{one}.lora_B.weight"].shape == (config.d_model, 2)
    assert sum(x.size for x in pairs.values()) == config.n_trained
    further = resolve_model(folder).with_lora(Lora(2, 6.0))
    loaded = further.load_adapters(make_mesh(1, 2, 1, 1, 2), np.float32, 0)
    assert jax.tree.structure(loaded) == jax.tree.structure(moved)
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(moved)))
    tokens, mask = batch(config.vocab_size)
    _, beside = computed(config, join_adapters(trained.load(), moved), tokens, mask)
    read = np.asarray(load_model(folder).logits(tokens, mask))
    np.testing.assert_allclose(read[mask], beside[mask], rtol=0, atol=5e-4)


@pytest.mark.parametrize("targets", and_slow([("q_proj", "in_proj_qkv")], [(TARGETS,)]), ids=len)
def test_layers_of_two_kinds_have_each_their_adapters(targets):
    """What is written of blocks that hold other projections each is what is loaded of it."""
    config = replace(tiny_config("qwen3_5"), lora=Lora(2, 6.0, tuple(targets)))
    first = jax.tree.map(np.asarray, peft.load_adapters(config, None, None, np.float32, 5))
    moved = jax.tree.map(
        lambda x: x + np.linspace(0, 1, x.size, dtype="f4").reshape(x.shape), first
    )
    pairs = peft.pairs_of(config, moved)
    assert sum(x.size for pair in pairs.values() for x in pair) == config.n_trained
    again = peft.load_adapters(config, pairs, None, np.float32, 0)
    assert jax.tree.structure(again) == jax.tree.structure(moved)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(moved)))
    names = {name.split(".")[2] + "." + name.split(".")[-2] for name in pairs}
    assert "0.q_proj" in names and "1.in_proj_qkv" in names and "1.q_proj" not in names


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_family_is_read_as_it_was_written(tmp_path, name):
    """Also where a projection has other shapes in some layers than in others."""
    config = replace(tiny_config(name), lora=Lora(2, 6.0))
    pairs = peft.pairs_of(config, jax.tree.map(np.asarray, random_adapters(config)))
    folder = peft.write_adapters(tmp_path / "final", config, "org/base", pairs)
    lora, again = peft.read_pairs(folder, config.base, config.lora)
    assert lora == config.lora
    assert set(peft.read_settings(folder)[0].targets) == set(lora.targets)
    assert again.keys() == pairs.keys()
    assert all((again[name][i] == pairs[name][i]).all() for name in pairs for i in (0, 1))


@pytest.mark.parametrize(
    ("name", "kind", "start"),
    [
        ("gemma3", "gemma3", "model.language_model.layers."),
        ("gemma4_shared", "gemma4", "model.language_model.layers."),
        ("gemma3", "gemma3_text", "model.layers."),
        ("qwen3_5", "qwen3_5", "model.layers."),
    ],
)
def test_names_are_those_of_the_model_that_peft_makes_of_the_base(tmp_path, name, kind, start):
    """Of models of images and text: the whole, whose other parts are not adapted, or the text."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = replace(tiny_config(name), lora=Lora(2, 6.0, ("q_proj", "o_proj")))
    pairs = peft.pairs_of(config, jax.tree.map(np.asarray, random_adapters(config)))
    folder = peft.write_adapters(tmp_path / "final", config, str(tmp_path), pairs)
    stored = safetensors.numpy.load_file(folder / peft.WEIGHTS)
    modules = {one.removeprefix("base_model.model.").rpartition(".lora_")[0] for one in stored}
    assert all(module.startswith(start) for module in modules)
    targets = json.loads((folder / peft.CONFIG).read_text())["target_modules"]
    if start == "model.layers.":
        assert set(targets) == {"q_proj", "o_proj"}
    else:
        assert all(re.fullmatch(targets, module) for module in modules)
        assert not re.fullmatch(targets, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    lora, again = peft.read_pairs(folder, config.base, config.lora)
    assert lora == config.lora and again.keys() == pairs.keys()
