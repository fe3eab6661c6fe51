"""gpt-oss (arXiv 2508.10925): attention with sinks, biases everywhere, and a window in every other
layer; experts with biases and clamped gates in place of the MLP of every layer."""

from __future__ import annotations

from jaxrl.errors import UserError
from jaxrl.models import family
from jaxrl.models.experts import Clamp, Experts, read_counts
from jaxrl.process.json_types import JsonObject

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS: JsonObject = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "attention_bias": True,
}
"""What a `config.json` leaves out where it is this."""


def _prepare(raw: family.Raw) -> family.Raw:
    family.stated_once(raw, "num_experts_per_tok", "experts_per_token")
    fields = family.fill_defaults(raw, DEFAULTS)
    if raw.get("rope_parameters") is None and raw.get("rope_scaling") is None:
        fields["rope_scaling"] = ROPE
    return fields


def _read(raw: family.Raw) -> JsonObject:
    if not raw["attention_bias"]:
        raise UserError("attention_bias=false is not supported for gpt_oss, whose q, k, v, o have")
    count, chosen = read_counts(raw, "num_local_experts", "num_experts_per_tok")
    clamp = Clamp(
        family.positive_number(raw, "swiglu_alpha"), family.positive_number(raw, "swiglu_limit")
    )
    width = family.size(raw, "intermediate_size")
    experts = Experts(count, chosen, normalised=True, dense_width=width, clamp=clamp)
    window = family.size(raw, "sliding_window")
    return {"experts": experts, "kinds": family.read_windows(raw, window, lambda i: i % 2 == 0)}


def _write(config: family.DecoderLike) -> JsonObject:
    experts = config.experts
    return {
        **family.write_windows(config),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "swiglu_alpha": experts.clamp.alpha,
        "swiglu_limit": experts.clamp.limit,
        "attention_bias": True,
    }


GPT_OSS = family.Family(
    "GptOssForCausalLM",
    family.BlockKind(
        attention_bias=True, output_bias=True, sinks=True, expert_bias=True, norm_in_float32=True
    ),
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    tensors={
        "mlp/router/kernel": "mlp.router.weight",
        "mlp/experts/gate/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/up/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/down/kernel": "mlp.experts.down_proj",
        "mlp/experts/gate/bias": "mlp.experts.gate_up_proj_bias",
        "mlp/experts/up/bias": "mlp.experts.gate_up_proj_bias",
    },
    alternating=True,
    prepare=_prepare,
    read=_read,
    write=_write,
)
