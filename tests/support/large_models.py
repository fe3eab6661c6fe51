"""Configs of models that are too large for the tests: only their numbers are read."""

from __future__ import annotations

from typing import Any

QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}


LARGE = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}


HUGE = {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
}


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}


def qwen3(d_model: int, layers: int, heads: int, d_ff: int) -> dict[str, Any]:
    sizes = {"hidden_size": d_model, "num_hidden_layers": layers}
    return QWEN3 | sizes | {"num_attention_heads": heads, "intermediate_size": d_ff}
