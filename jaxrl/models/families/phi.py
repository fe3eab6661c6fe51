"""Phi-3, Phi-3.5 and Phi-4, whose q, k and v are one tensor, and whose gate and up are another
(arXiv 2404.14219, 2412.08905, 2503.01743)."""

from __future__ import annotations

from jaxrl.errors import UserError
from jaxrl.models.family import DecoderLike, Family, Raw, read_window
from jaxrl.models.rope import LongRope, longrope_attention, read_rope
from jaxrl.process.json_types import JsonObject


def _read(raw: Raw) -> JsonObject:
    _, rope = read_rope(raw)
    if not isinstance(rope, LongRope | None):
        raise UserError(f"rope_type={rope.written()['rope_type']!r} is none of Phi-3: longrope is")
    return {"kinds": read_window(raw)}


def _write(config: DecoderLike) -> JsonObject:
    """Writes `rope_scaling` as transformers 4 wants it: these keys and no others, from which it
    computes the attention factor."""
    written: JsonObject = {"sliding_window": config.kinds[0].window}
    rope = config.rope_scaling
    if isinstance(rope, LongRope):
        short, long = list(rope.short_factors), list(rope.long_factors)
        scaling: JsonObject = {"type": "longrope"}
        scaling |= {"short_factor": short, "long_factor": long}
        factor = config.max_positions / rope.original_max_positions
        if rope.attention_factor != longrope_attention(factor, rope.original_max_positions):
            scaling["attention_factor"] = rope.attention_factor
        written["rope_scaling"] = scaling
    return written


PHI3 = Family(
    "Phi3ForCausalLM",
    rms_norm_eps=1e-5,
    partial_rotary=True,
    tensors={
        "attn/q/kernel": "self_attn.qkv_proj.weight",
        "attn/k/kernel": "self_attn.qkv_proj.weight",
        "attn/v/kernel": "self_attn.qkv_proj.weight",
        "mlp/gate/kernel": "mlp.gate_up_proj.weight",
        "mlp/up/kernel": "mlp.gate_up_proj.weight",
    },
    gguf="phi3",
    read=_read,
    write=_write,
)
