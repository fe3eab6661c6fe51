"""Tiny random checkpoints, the same for the references (torch) and for the tests (numpy only)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""With heads of 16 dims and theta 5e5 the wavelengths (6, 32, 168, ...) meet all three of its
regimes."""


GEMMA4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 5,
    "final_logit_softcapping": 3.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""Of all cases of Gemma 4. Their norms have small scales: scores are not divided, and would amplify
rounding."""
LONG_FACTORS = [1.5, 2.5, 4.0, 6.0, 9.0, 12.0]
ROPES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, (8,)),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, (8,)),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        (8, 256, 257, 500),
    ),
    "yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        (8, 200),
    ),
    "yarn_mscale": (
        "qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
        (8,),
    ),
    "yarn_factor": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.25,
            },
        },
        (8,),
    ),
    "longrope": (
        "phi3",
        {
            "num_attention_heads": 2,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.0, 1.25, 1.5, 2.0, 3.0],
                "long_factor": LONG_FACTORS,
                "partial_rotary_factor": 0.75,
            },
        },
        (64, 65),
    ),
    "longrope_factor": (
        "llama",
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": LONG_FACTORS,
                "original_max_position_embeddings": 32,
                "factor": 16.0,
            },
        },
        (8, 33),
    ),
}
"""Name -> (`model_type`, what its config adds to BASE, lengths of the longest sequence)."""


class Case(NamedTuple):
    seed: int
    """Of the tensors; of each case another one."""
    kind: str
    """The `model_type`."""
    extra: dict[str, Any]
    """What its config adds to BASE."""
    norm: float = 1.0
    """Mean of the scales of its norms."""


OWN_CASES = {
    "granite": Case(
        32,
        "granite",
        {
            "head_dim": 8,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
}
"""Of families that jaxrl has not, and a user's file may have."""
CASES = {
    "llama": Case(0, "llama", {"tie_word_embeddings": False}),
    "llama3_rope": Case(
        1,
        "llama",
        {"head_dim": 16, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
    ),
    "llama_linear_rope": Case(
        2,
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "smollm": Case(
        3,
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        },
    ),
    "qwen2": Case(
        4,
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3": Case(
        5,
        "qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3_moe": Case(
        25,
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt_oss": Case(
        26,
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 1.5,  # of gates and products within some units
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3_5": Case(
        26,
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "rms_norm_eps": 1e-2,  # else rounding is amplified where a state is nearly empty
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        },
        norm=0.0,
    ),
    "qwen3_5_moe": Case(
        31,
        "qwen3_5_moe_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "rms_norm_eps": 1e-2,  # as of qwen3_5
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
            },
        },
        norm=0.0,
    ),
    "mistral": Case(20, "mistral", {"sliding_window": 5}),
    "qwen2_sliding": Case(
        21,
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        },
    ),
    "gemma3": Case(
        23,
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 8,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 6,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        norm=0.0,
    ),
    "gemma4": Case(
        27,
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        norm=0.5,
    ),
    "gemma4_unified": Case(
        30,
        "gemma4_unified_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        norm=0.5,
    ),
    "gemma4_shared": Case(
        28,
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
        norm=0.5,
    ),
    "gemma4_moe": Case(
        29,
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        norm=0.5,
    ),
    "olmo3": Case(
        24,
        "olmo3",
        {
            "num_hidden_layers": 5,
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "smollm3": Case(
        22,
        "smollm3",
        {
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        },
    ),
    "olmo2": Case(10, "olmo2", {"head_dim": 16}),
    "phi3": Case(
        11,
        "phi3",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3_longrope": Case(
        12,
        "phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 16,  # fewer than the batch has
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 6,
                "long_factor": LONG_FACTORS,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
}
"""By the name of their reference files in `decoders/`."""

PACKED = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4}
"""What the model of `mxfp4.npz` changes in "gpt_oss", whose widths are no multiples of 32."""

ADAPTED = {"tie_word_embeddings": False, "head_dim": 8}
"""What the base model of `adapters/` adds to BASE."""


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int, norm: float = 1.0
) -> dict[str, np.ndarray]:
    """float32 values by name, for shapes in sorted order of their names; the stream of RandomState
    is frozen.

    Scales are chosen so that attention is far from uniform and norms and biases matter.
    """
    random = np.random.RandomState(seed)
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(shapes):
        values = random.standard_normal(shapes[name]).astype(np.float32)
        if "norm" in name:
            values = norm + 0.3 * values
        elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            values = 1 + 0.3 * values
        elif name.endswith(("bias", "sinks", "A_log")):
            values = 0.5 * values
        elif "embed_tokens" in name or "lm_head" in name:
            values = 0.3 * values
        else:
            inputs = shapes[name][-1 if "conv1d" in name else 1]
            values = values * np.float32(1.5 / np.sqrt(inputs))
        tensors[name] = values.astype(np.float32)
    return tensors


def packed_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """`random_tensors` of a checkpoint of gpt-oss whose experts are in MXFP4, as random bytes: the
    values of a block within 6 times 2^-7 to 2^-4."""
    random = np.random.RandomState(seed)
    kernels = [name for name in sorted(shapes) if name.endswith(("gate_up_proj", "down_proj"))]
    rest = {name: shape for name, shape in shapes.items() if name not in kernels}
    tensors = random_tensors(rest, seed)
    for name in kernels:
        experts, n_in, n_out = shapes[name]
        packed = experts, n_out, n_in // 32
        tensors[f"{name}_blocks"] = random.randint(0, 256, (*packed, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = random.randint(120, 124, packed).astype(np.uint8)
    return tensors


def batch(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens [3, 20] and mask: a full row, a left-padded one and a right-padded one."""
    random = np.random.RandomState(7)
    tokens = random.randint(3, vocab_size, (3, 20)).astype(np.int32)
    mask = np.ones((3, 20), bool)
    mask[1, :6] = False
    mask[2, 13:] = False
    return np.where(mask, tokens, 0).astype(np.int32), mask
