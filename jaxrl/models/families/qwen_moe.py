"""Qwen3-MoE (arXiv 2505.09388), such as Qwen3-30B-A3B: Qwen3's attention, and experts in place of
the MLP of every layer."""

from __future__ import annotations

from jaxrl.errors import UserError
from jaxrl.models.experts import Experts, read_counts
from jaxrl.models.family import (
    BlockKind,
    DecoderLike,
    Family,
    Raw,
    filled,
    given,
    size,
    stated_once,
)
from jaxrl.process.json_types import JsonObject

DEFAULTS: JsonObject = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""What a `config.json` leaves out where it is this."""


def prepare(raw: Raw) -> Raw:
    """Fills in the number of experts, which transformers 5 writes under another name."""
    count = stated_once(raw, "num_experts", "num_local_experts")
    return filled({**raw, "num_experts": count}, DEFAULTS)


def read(raw: Raw) -> JsonObject:
    if raw.get("use_sliding_window"):
        raise UserError("use_sliding_window=true is not supported for this family")
    if size(raw, "decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise UserError(
            f"decoder_sparse_step={raw.get('decoder_sparse_step')!r},"
            f" mlp_only_layers={raw.get('mlp_only_layers')!r}: models that mix layers with and"
            " without experts are not supported; supported: 1 and []"
        )
    count, chosen = read_counts(raw, "num_experts", "num_experts_per_tok")
    normalised = bool(given(raw.get("norm_topk_prob"), False))
    experts = Experts(count, chosen, normalised, dense_width=size(raw, "intermediate_size"))
    return {"experts": experts, "d_ff": size(raw, "moe_intermediate_size")}


def write(config: DecoderLike) -> JsonObject:
    return {
        "intermediate_size": config.experts.dense_width,
        "moe_intermediate_size": config.d_ff,
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.chosen,
        "norm_topk_prob": config.experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    BlockKind(qk_norm="head"),
    gguf="qwen3moe",
    from_gguf=lambda *_: {"norm_topk_prob": True},  # as llama.cpp computes all of them
    prepare=prepare,
    read=read,
    write=write,
)
