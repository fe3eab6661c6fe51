"""Phi-3, Phi-3.5 and Phi-4, whose q, k and v are one tensor, and whose gate and up are another
(arXiv 2404.14219, 2412.08905, 2503.01743)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl.errors import UserError
from jaxrl.models.family import Family


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    window, positions = raw.get("sliding_window"), raw.get("max_position_embeddings", 4096)
    if window is not None and window < positions:
        raise UserError(
            f"sliding_window={window} is below max_position_embeddings={positions}, which is not"
            " supported; full attention only"
        )
    return {}


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
    write=lambda _: {"sliding_window": None},
)
