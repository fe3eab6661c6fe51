"""GGUF files of tiny models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import tiny_config, tiny_tensors

from jaxrl.formats.gguf import gguf_name
from jaxrl.models.delta import Delta
from jaxrl.models.families import FAMILIES
from jaxrl.models.rope import LinearRope, Llama3Rope, LongRope, ProportionalRope, YarnRope

TYPES = gguf.GGMLQuantizationType


class Writer:
    """A GGUF file in the making."""

    def __init__(self, path: Path, architecture: str):
        self.path = path
        self.writer = gguf.GGUFWriter(path, architecture)

    def add(self, name: str, values: np.ndarray, kind: str = "F32") -> None:
        self.writer.add_tensor(name, values, raw_dtype=TYPES[kind])

    def close(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def write_model(
    path: Path,
    name: str,
    kind: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    nextn: int = 0,
    **changes: Any,
) -> Path:
    """A tiny checkpoint as llama.cpp's converter writes it: q and k of llama with rows reordered,
    value heads of a state by `tiled`; with `nextn` layers more, which are for further tokens.
    `tensors` in place of the case's, where the changes are of shapes."""
    config = replace(tiny_config(name), **changes)
    out = Writer(path, FAMILIES[config.family].gguf)
    w = out.writer
    w.add_block_count(config.n_layers + nextn)
    if nextn:
        w.add_nextn_predict_layers(nextn)
    w.add_context_length(config.max_positions)
    w.add_embedding_length(config.d_model)
    if config.experts is not None:
        w.add_expert_feed_forward_length(config.d_ff)
        w.add_expert_count(config.experts.count)
        w.add_expert_used_count(config.experts.chosen)
    w.add_head_count(config.n_heads)
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    w.add_rope_freq_base(config.rope_theta)
    if config.rotary_dims is not None:
        w.add_rope_dimension_count(config.rotary_dims)
    if config.delta is not None:
        w.add_ssm_conv_kernel(config.delta.conv)
        w.add_ssm_state_size(config.delta.k_dim)
        w.add_ssm_group_count(config.delta.k_heads)
        w.add_ssm_time_step_rank(config.delta.v_heads)
        w.add_ssm_inner_size(config.delta.v_width)
        w.add_full_attention_interval([kind.recurs for kind in config.kinds].index(False) + 1)
    if FAMILIES[config.family].gguf == "gemma4":
        add_gemma4(w, config)
    else:
        dense_width = config.d_ff if config.experts is None else config.experts.dense_width
        w.add_feed_forward_length(dense_width)
        w.add_head_count_kv(config.n_kv_heads)
        w.add_key_length(config.head_dim)
    windows = [kind.window for kind in config.kinds]
    if any(windows):
        w.add_sliding_window(max(window or 0 for window in windows))
    if config.family in ("olmo3", "gemma4_text"):  # of others the pattern is known
        w.add_sliding_window_pattern([window is not None for window in windows])
    if config.final_softcap is not None:
        w.add_final_logit_softcapping(config.final_softcap)
    w.add_bos_token_id(config.bos_id)
    w.add_eos_token_id(config.eos_ids[0])
    w.add_pad_token_id(config.pad_id)
    for hf_name, value in stacked(config, tensors or tiny_tensors(name)).items():
        if FAMILIES[config.family].gguf_interleaved and hf_name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            heads = value.shape[0] // config.head_dim
            halves = value.reshape(heads, 2, config.head_dim // 2, value.shape[1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if config.block.norm_around_one and hf_name.endswith("norm.weight"):
            value = value if hf_name.endswith("linear_attn.norm.weight") else value + 1
        if config.delta is not None:
            value = of_state(config.delta, hf_name, value)
        whole_blocks = value.shape[-1] % gguf.GGML_QUANT_SIZES[TYPES[kind]][0] == 0
        stored = kind if value.ndim > 1 and whole_blocks else "F32"
        raw = gguf.quants.quantize(np.ascontiguousarray(value), TYPES[stored])
        out.add(gguf_name(config.family, hf_name), raw, stored)
    if nextn:
        joined = np.ones((config.d_model, 2 * config.d_model), np.float32)
        out.add(f"blk.{config.n_layers}.nextn.eh_proj.weight", joined)
    match config.rope_scaling:
        case ProportionalRope() as rope:
            half = config.layer_of(config.kinds[-1]).head_dim // 2
            n = int(half * rope.share)
            out.add("rope_freqs.weight", np.array([1.0] * n + [1e30] * (half - n), np.float32))
        case Llama3Rope() as rope:
            out.add("rope_freqs.weight", llama3_divisors(rope, config))
        case LinearRope() as rope:
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(rope.factor)
        case YarnRope() as rope:
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            w.add_rope_scaling_factor(rope.factor)
            w.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
            w.add_rope_scaling_yarn_attn_factor(rope.attention_factor)
        case LongRope() as rope:
            w.add_rope_scaling_orig_ctx_len(rope.original_max_positions)
            w.add_rope_scaling_attn_factors(rope.attention_factor)
            for length, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
                out.add(f"rope_factors_{length}.weight", np.array(factors, np.float32))
    return out.close()


def of_state(delta: Delta, name: str, value: np.ndarray) -> np.ndarray:
    """A tensor of a layer that keeps a state as the converter writes it; others as they are."""
    match name.partition(".linear_attn.")[2]:
        case "A_log":
            return tiled(delta, -np.exp(value), 1)
        case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return tiled(delta, value, 1)
        case "in_proj_z.weight":
            return tiled(delta, value, delta.v_dim)
        case "out_proj.weight":
            return tiled(delta, value.T, delta.v_dim).T
        case "in_proj_qkv.weight" | "conv1d.weight":
            value = value[:, 0] if value.ndim == 3 else value
            before = 2 * delta.k_width
            return np.concatenate([value[:before], tiled(delta, value[before:], delta.v_dim)])
    return value


def tiled(delta: Delta, value: np.ndarray, width: int) -> np.ndarray:
    """Rows of value heads, one head after another: the first of each key head, then the second."""
    each = delta.v_heads // delta.k_heads
    heads = np.split(value, range(width, len(value), width))
    return np.concatenate([heads[k * each + i] for i in range(each) for k in range(delta.k_heads)])


def add_gemma4(w: gguf.GGUFWriter, config: Any) -> None:
    """What its layers differ in. As in the files that were looked at, numbers of heads are a list
    only where layers without a window have one of their own, and widths where some are double."""
    layers = [config.layer_of(kind) for kind in config.kinds]
    window = layers[[kind.window is not None for kind in config.kinds].index(True)]
    for of, suffix in ((layers[-1], ""), (window, "_swa")):
        getattr(w, f"add_key_length{suffix}")(of.head_dim)
        getattr(w, f"add_value_length{suffix}")(of.head_dim)
        getattr(w, f"add_rope_dimension_count{suffix}")(of.head_dim)
    heads, widths = [one.n_kv_heads for one in layers], [one.mlp_width for one in layers]
    w.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    w.add_feed_forward_length(widths if len(set(widths)) > 1 else widths[0])
    w.add_shared_kv_layers(sum(kind.borrows for kind in config.kinds))
    w.add_embedding_length_per_layer_input(config.layer_inputs)
    w.add_rope_freq_base_swa(next(kind.rope_theta for kind in config.kinds if kind.window))


def stacked(config: Any, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one tensor [E, out, in] for those of all experts, under the name of the first."""
    if config.experts is None:
        return tensors
    each = re.compile(r"\.experts\.\d+\.")
    several = {name: value for name, value in tensors.items() if each.search(name)}
    found = {name: value for name, value in tensors.items() if name not in several}
    for first in [name for name in several if ".experts.0." in name]:
        names = (
            first.replace(".experts.0.", f".experts.{e}.") for e in range(config.experts.count)
        )
        found[first] = np.stack([several[name] for name in names])
    return found


def llama3_divisors(rope: Llama3Rope, config: Any) -> np.ndarray:
    """What the converter stores: by how much each frequency is divided."""
    half = config.head_dim // 2
    divisors = []
    for i in range(half):
        wavelength = 2 * np.pi * config.rope_theta ** (i / half)
        if wavelength < rope.original_max_positions / rope.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > rope.original_max_positions / rope.low_freq_factor:
            divisors.append(rope.factor)
        else:
            turns = rope.original_max_positions / wavelength
            span = rope.high_freq_factor - rope.low_freq_factor
            smooth = (turns - rope.low_freq_factor) / span
            divisors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(divisors, np.float32)
