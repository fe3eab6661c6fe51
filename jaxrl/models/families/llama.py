"""Llama 2 and 3, and what has their blocks (arXiv 2302.13971, 2407.21783)."""

from __future__ import annotations

from jaxrl.models.family import Family

LLAMA = Family(
    "LlamaForCausalLM",
    gguf="llama",
    gguf_interleaved=True,
    write=lambda _: {"attention_bias": False, "mlp_bias": False},
)
