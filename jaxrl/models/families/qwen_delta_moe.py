"""The text of Qwen3.5's mixtures, such as Qwen3.5-35B-A3B: the layers of the dense Qwen3.5, with
experts and one more that all tokens share in place of each MLP."""

from __future__ import annotations

from dataclasses import replace

from jaxrl.errors import UserError
from jaxrl.models.experts import Experts, read_counts
from jaxrl.models.families import qwen_delta
from jaxrl.models.family import OMITTED, DecoderLike, Raw, filled, size, stated_once
from jaxrl.process.json_types import JsonObject

SHARED = "shared_expert_intermediate_size"
DEFAULTS: JsonObject = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    SHARED: 512,
}
"""What a `config.json` leaves out where it is this."""


def prepare(raw: Raw) -> Raw:
    if raw.get("mlp_only_layers"):
        raise UserError(
            f"mlp_only_layers={raw['mlp_only_layers']!r}: models that mix layers with and without"
            " experts are not supported; supported: []"
        )
    count = stated_once(raw, "num_experts", "num_local_experts")
    raw = filled({**raw, "num_experts": count}, DEFAULTS)
    return qwen_delta.prepare({**raw, "intermediate_size": raw["moe_intermediate_size"]})


def read(raw: Raw) -> JsonObject:
    count, chosen = read_counts(raw, "num_experts", "num_experts_per_tok")
    width = size(raw, SHARED)
    experts = Experts(count, chosen, normalised=True, dense_width=width, beside="gate")
    return qwen_delta.read(raw) | {"experts": experts, "d_ff": size(raw, "moe_intermediate_size")}


def write(config: DecoderLike) -> JsonObject:
    return qwen_delta.write(config) | {
        "intermediate_size": OMITTED,
        "moe_intermediate_size": config.d_ff,
        SHARED: config.experts.dense_width,
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
    }


QWEN3_5_MOE = replace(
    qwen_delta.QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    tensors={
        **{f"mlp/{i}/kernel": f"mlp.shared_expert.{i}_proj.weight" for i in ("gate", "up", "down")},
        "mlp/experts/gate/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/up/kernel": "mlp.experts.gate_up_proj",
        "mlp/experts/down/kernel": "mlp.experts.down_proj",
    },
    gguf=None,
    whole="qwen3_5_moe",
    prepare=prepare,
    read=read,
    write=write,
)
