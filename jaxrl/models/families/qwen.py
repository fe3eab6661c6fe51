"""Qwen2 and Qwen2.5, whose q, k and v have biases (arXiv 2407.10671, 2412.15115); Qwen3, which
norms each head of q and k instead, and its mixtures, with experts in place of every MLP (arXiv
2505.09388); and the text of Qwen3.5: layers with a state that forgets (`models.delta`), and after
every third of them one with attention, whose output has a gate and whose heads rotate in part. Its
mixtures have, in place of each MLP, experts and one more that all tokens share.
"""

from __future__ import annotations

from dataclasses import replace

from jaxrl.errors import UserError, short
from jaxrl.models import family
from jaxrl.models.delta import Delta
from jaxrl.models.experts import Experts, read_counts
from jaxrl.process.json_types import JsonObject

FULL_LAYERS = 28
"""The first layers, which have no window, where a `config.json` does not say it."""
RECURRENT = "linear_attention"
PERIOD = 4
"""Every so many layers one has attention, where there are no `layer_types`."""
PARTIAL = "partial_rotary_factor"
SHARED = "shared_expert_intermediate_size"
QWEN3_MOE_DEFAULTS: JsonObject = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""What a `config.json` leaves out where it is this; likewise the others."""
QWEN3_5_DEFAULTS: JsonObject = {"head_dim": 256, "num_key_value_heads": 4}
QWEN3_5_MOE_DEFAULTS: JsonObject = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    SHARED: 512,
}


def read_windowed(raw: family.Raw) -> JsonObject:
    """Reads windows, which `use_sliding_window` turns on."""
    window = None
    if raw.get("use_sliding_window"):
        if raw.get("sliding_window") is None:
            raise UserError("use_sliding_window=true needs a sliding_window")
        window = family.size(raw, "sliding_window")
    first = family.value_or(raw.get("max_window_layers"), FULL_LAYERS)
    if type(first) is not int or first < 0:
        raise UserError(f"max_window_layers={first!r} must be an integer of at least 0")
    return {"kinds": family.read_windows(raw, window, lambda i: i >= first)}


def write_windowed(config: family.DecoderLike) -> JsonObject:
    written = family.write_windows(config)
    if written["sliding_window"] is None:
        return {}
    return written | {"use_sliding_window": True}


QWEN2 = family.Family(
    "Qwen2ForCausalLM",
    family.BlockKind(attention_bias=True),
    gguf="qwen2",
    read=read_windowed,
    write=write_windowed,
)
QWEN3 = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    block=family.BlockKind(qk_norm="head"),
    head_dim=128,
    gguf="qwen3",
)


def fill_expert_defaults(raw: family.Raw, defaults: JsonObject) -> JsonObject:
    """Fills in the defaults of a mixture, and the number of experts, which transformers 5 writes
    under another name."""
    if family.size(raw, "decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        keys = ("decoder_sparse_step", "mlp_only_layers")
        stated = ", ".join(f"{key}={raw[key]!r}" for key in keys if key in raw)
        raise UserError(
            f"{stated}: models that mix layers with and without experts are not supported;"
            " supported: decoder_sparse_step=1 and mlp_only_layers=[]"
        )
    count = family.stated_once(raw, "num_experts", "num_local_experts")
    return family.fill_defaults({**raw, "num_experts": count}, defaults)


def write_experts(config: family.DecoderLike) -> JsonObject:
    return {
        "moe_intermediate_size": config.d_ff,
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
    }


def read_qwen3_moe(raw: family.Raw) -> JsonObject:
    if raw.get("use_sliding_window"):
        raise UserError("use_sliding_window=true is not supported for this family")
    count, chosen = read_counts(raw, "num_experts", "num_experts_per_tok")
    normalised = bool(family.value_or(raw.get("norm_topk_prob"), False))
    experts = Experts(count, chosen, normalised, dense_width=family.size(raw, "intermediate_size"))
    return {"experts": experts, "d_ff": family.size(raw, "moe_intermediate_size")}


def write_qwen3_moe(config: family.DecoderLike) -> JsonObject:
    return write_experts(config) | {
        "intermediate_size": config.experts.dense_width,
        "norm_topk_prob": config.experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = family.Family(
    "Qwen3MoeForCausalLM",
    family.BlockKind(qk_norm="head"),
    gguf="qwen3moe",
    from_gguf=lambda *_: {"norm_topk_prob": True},  # as llama.cpp computes all of them
    prepare=lambda raw: fill_expert_defaults(raw, QWEN3_MOE_DEFAULTS),
    read=read_qwen3_moe,
    write=write_qwen3_moe,
)


def prepare_qwen3_5(raw: family.Raw) -> family.Raw:
    if raw.get("attn_output_gate") is False:
        raise UserError("attn_output_gate=false is not supported for this family")
    ropes = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    rotates = any(isinstance(rope, dict) and rope.get(PARTIAL) is not None for rope in ropes)
    return family.fill_defaults(
        raw, QWEN3_5_DEFAULTS if rotates else QWEN3_5_DEFAULTS | {PARTIAL: 0.25}
    )


def read_qwen3_5(raw: family.Raw) -> JsonObject:
    n, period = (
        family.size(raw, "num_hidden_layers"),
        family.size(raw, "full_attention_interval", PERIOD),
    )
    types = raw.get("layer_types")
    if types is None:
        types = [RECURRENT if (i + 1) % period else family.FULL for i in range(n)]
    if not isinstance(types, list) or len(types) != n or set(types) - {RECURRENT, family.FULL}:
        raise UserError(
            f"layer_types={short(repr(types))} is not supported: a list of num_hidden_layers={n} is"
            f" needed, each of {RECURRENT}, {family.FULL}"
        )
    delta = Delta(
        k_heads=family.size(raw, "linear_num_key_heads", 16),
        v_heads=family.size(raw, "linear_num_value_heads", 32),
        k_dim=family.size(raw, "linear_key_head_dim", 128),
        v_dim=family.size(raw, "linear_value_head_dim", 128),
        conv=family.size(raw, "linear_conv_kernel_dim", 4),
    )
    return {
        "kinds": tuple(family.LayerKind(recurs=kind == RECURRENT) for kind in types),
        "delta": delta,
    }


def write_qwen3_5(config: family.DecoderLike) -> JsonObject:
    kinds = config.kinds * (config.n_layers // len(config.kinds))
    delta = config.delta
    return {
        "layer_types": [RECURRENT if kind.recurs else family.FULL for kind in kinds],
        "linear_num_key_heads": delta.k_heads,
        "linear_num_value_heads": delta.v_heads,
        "linear_key_head_dim": delta.k_dim,
        "linear_value_head_dim": delta.v_dim,
        "linear_conv_kernel_dim": delta.conv,
        "attention_bias": False,
    }


QWEN3_5 = family.Family(
    "Qwen3_5ForCausalLM",
    family.BlockKind(qk_norm="head", norm_in_float32=True, norm_around_one=True, output_gate=True),
    head_dim=256,
    partial_rotary=True,
    recurs=True,
    gguf="qwen35",
    whole="qwen3_5",
    prepare=prepare_qwen3_5,
    read=read_qwen3_5,
    write=write_qwen3_5,
)


def prepare_qwen3_5_moe(raw: family.Raw) -> family.Raw:
    raw = {key: value for key, value in raw.items() if key != "decoder_sparse_step"}  # has no part
    raw = fill_expert_defaults(raw, QWEN3_5_MOE_DEFAULTS)
    return prepare_qwen3_5({**raw, "intermediate_size": raw["moe_intermediate_size"]})


def read_qwen3_5_moe(raw: family.Raw) -> JsonObject:
    count, chosen = read_counts(raw, "num_experts", "num_experts_per_tok")
    width = family.size(raw, SHARED)
    experts = Experts(count, chosen, normalised=True, dense_width=width, beside="gate")
    return read_qwen3_5(raw) | {
        "experts": experts,
        "d_ff": family.size(raw, "moe_intermediate_size"),
    }


def write_qwen3_5_moe(config: family.DecoderLike) -> JsonObject:
    fields = {"intermediate_size": family.OMITTED, SHARED: config.experts.dense_width}
    return write_qwen3_5(config) | write_experts(config) | fields


QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    tensors={
        **{f"mlp/{i}/kernel": f"mlp.shared_expert.{i}_proj.weight" for i in ("gate", "up", "down")},
        "mlp/experts/gate/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/up/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/down/kernel": "mlp.experts.down_proj",
    },
    gguf=None,
    whole="qwen3_5_moe",
    prepare=prepare_qwen3_5_moe,
    read=read_qwen3_5_moe,
    write=write_qwen3_5_moe,
)
