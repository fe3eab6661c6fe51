"""MXFP4, as the experts of gpt-oss are released: the numbers are transformers', read by slices."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from references.tiny import PACKED, batch, packed_tensors
from tiny_models import RAW_CONFIGS, REFERENCES, Memory, make_mesh

from jaxrl.errors import UserError
from jaxrl.formats import hf, weights
from jaxrl.models import decoder, parameters
from jaxrl.models.config import DecoderConfig

RAW = RAW_CONFIGS["gpt_oss"] | PACKED
QUANTISED = {"quantization_config": {"quant_method": "mxfp4"}}
DOWN = "model.layers.1.mlp.experts.down_proj"


def released(folder: Path, **changes: Any) -> Path:
    """A checkpoint in MXFP4; None takes a tensor out."""
    tensors = packed_tensors(weights.tensor_shapes(DecoderConfig.from_hf(RAW)), seed=1) | changes
    tensors = {name: value for name, value in tensors.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(RAW | QUANTISED))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def test_bytes_are_the_numbers_that_transformers_reads() -> None:
    """And a box of them is that box, whatever blocks it cuts."""
    given = np.load(REFERENCES / "mxfp4.npz")
    whole = (slice(0, 2), slice(0, 96), slice(0, 5))
    found = hf.read_mxfp4(given["blocks"], given["scales"], whole)
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.astype(np.float32), given["values"])
    for box in ((1, 2), (0, 96), (1, 5, 2)), ((0, 2), (31, 65), (0, 4, 2)), ((0, 1), (7, 9), (4,)):
        index = tuple(slice(*span) for span in box)
        np.testing.assert_array_equal(
            hf.read_mxfp4(given["blocks"], given["scales"], index), found[index]
        )


def test_a_released_checkpoint_computes_what_transformers_does(tmp_path: Path) -> None:
    """And is exported as floats, which are the same weights."""
    config = hf.read_config(released(tmp_path))
    params = weights.load_params(hf.SafetensorsFolder(tmp_path), config)
    tokens, mask = batch(config.vocab_size)
    hidden = jax.jit(decoder.forward, static_argnums=0)(config, params, tokens, mask)
    logits = np.asarray(decoder.token_logits(config, params, hidden))
    expected = np.load(REFERENCES / "mxfp4.npz")["logits"]
    np.testing.assert_allclose(logits[mask], expected[mask], rtol=0, atol=1e-4)

    out = hf.save_hf(tmp_path / "out", config, params, dtype="float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    stored = safetensors.numpy.load_file(out / "model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == weights.tensor_shapes(config)
    again = weights.load_params(hf.SafetensorsFolder(out), config)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("layout", ["stacked", "unstacked"])
def test_each_device_reads_its_own_part(layout: parameters.Layout, tmp_path: Path) -> None:
    """Parameters that alternate by columns are read by columns, and none twice."""
    tensors = hf.SafetensorsFolder(released(tmp_path))
    config, mesh = hf.read_config(tmp_path), make_mesh(1, 2, 2, 1, 2)
    expected = weights.load_params(tensors, config, layout=layout)
    sharded = weights.load_params(tensors, config, mesh, layout=layout)
    jax.tree.map(np.testing.assert_array_equal, sharded, expected)
    index = {name: tuple(map(slice, s)) for name, s in weights.tensor_shapes(config).items()}
    memory = Memory({name: tensors.read(name, whole) for name, whole in index.items()})
    weights.load_params(memory, config, mesh, layout=layout)
    for name, value in memory.values.items():
        assert sum(n for read, n in memory.reads if read == name) == value.size, name
    parts = {n for read, n in memory.reads if read == DOWN}
    assert parts == {memory.values[DOWN].size // 8}


def test_the_host_holds_one_expert_in_float32() -> None:
    experts, n_out, groups = 16, 256, 16
    blocks = np.ones((experts, n_out, groups, 16), np.uint8)
    scales = np.full((experts, n_out, groups), 127, np.uint8)
    shape = hf.mxfp4_shape(blocks.shape, scales.shape)
    assert shape == (experts, groups * 32, n_out)
    tracemalloc.start()
    found = hf.read_mxfp4(blocks, scales, tuple(map(slice, shape)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = 4 * found[0].size
    assert found.nbytes < peak < found.nbytes + 4 * one


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}_scales": None}, f"tensor {DOWN}_scales is missing"),
        ({f"{DOWN}_blocks": None}, rf"tensor {DOWN} of shape \[4, 32, 64\] is missing"),
        (
            {f"{DOWN}_scales": np.zeros((4, 64, 2), np.uint8)},
            r"_blocks has shape \[4, 64, 1, 16\] and its scales \[4, 64, 2\]",
        ),
        ({f"{DOWN}_scales": np.zeros((4, 64, 1), np.float32)}, "MXFP4 of F32; supported: U8"),
    ],
    ids=["no scales", "no blocks", "other scales", "floats"],
)
def test_what_is_no_mxfp4_is_named(changes: Any, message: str, tmp_path: Path) -> None:
    folder = released(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        weights.load_params(hf.SafetensorsFolder(folder), hf.read_config(folder))
