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


QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 12288,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "eos_token_id": 248044,
}


SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
}


BGE_M3 = {
    "model_type": "xlm-roberta",
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "hidden_act": "gelu",
}


MINILM = BGE_M3 | {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


def qwen3(d_model: int, layers: int, heads: int, d_ff: int) -> dict[str, Any]:
    sizes = {"hidden_size": d_model, "num_hidden_layers": layers}
    return QWEN3 | sizes | {"num_attention_heads": heads, "intermediate_size": d_ff}


GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


REWARD = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
NAMED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN
    | {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"intermediate_size": 4864},
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN,
    "Qwen/Qwen2.5-7B-Instruct": QWEN | LARGE,
    "Qwen/Qwen2.5-32B-Instruct": QWEN | LARGE | HUGE,
    "Qwen/Qwen3-1.7B": qwen3(2048, 28, 16, 6144),
    "Qwen/Qwen3-4B": qwen3(2560, 36, 32, 9728),
    "Qwen/Qwen3-8B": qwen3(4096, 36, 32, 12288) | {"tie_word_embeddings": False},
    "Qwen/Qwen3.5-9B": {"model_type": "qwen3_5", "text_config": QWEN3_5},
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": qwen3(1024, 28, 16, 3072) | REWARD,
    "Skywork/Skywork-Reward-V2-Qwen3-1.7B": qwen3(2048, 28, 16, 6144) | REWARD,
    "openai/gpt-oss-20b": GPT_OSS,
    "BAAI/bge-m3-unsupervised": BGE_M3,
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
    "HuggingFaceTB/SmolLM2-360M-Instruct": SMOLLM2
    | {"hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15}
    | {"num_key_value_heads": 5, "intermediate_size": 2560},
    "sentence-transformers/all-MiniLM-L6-v2": MINILM,
}
"""Name on the hub -> what its config.json says of the model's size."""
