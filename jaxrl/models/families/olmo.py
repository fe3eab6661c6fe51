"""OLMo 2, which norms the output of attention and of the MLP, and all heads of q and k at once
(arXiv 2501.00656)."""

from __future__ import annotations

from jaxrl.models.family import BlockKind, Family

OLMO2 = Family(
    "Olmo2ForCausalLM",
    BlockKind(qk_norm="width", norms="after", norm_in_float32=True),
    rms_norm_eps=1e-5,
    tensors={
        "attn_norm/scale": "post_attention_layernorm.weight",
        "mlp_norm/scale": "post_feedforward_layernorm.weight",
    },
    gguf="olmo2",
)
