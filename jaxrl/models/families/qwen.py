"""Qwen2 and Qwen2.5, whose q, k and v have biases (arXiv 2407.10671, 2412.15115), and Qwen3, which
norms each head of q and k instead (arXiv 2505.09388)."""

from __future__ import annotations

from jaxrl.models.family import BlockKind, Family

QWEN2 = Family("Qwen2ForCausalLM", BlockKind(attention_bias=True), gguf="qwen2")
QWEN3 = Family("Qwen3ForCausalLM", BlockKind(qk_norm="head"), head_dim=128, gguf="qwen3")
