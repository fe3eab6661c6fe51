"""Tiny random encoders and reward models, the same for the references (torch) and for the tests
(numpy only)."""

from __future__ import annotations

from typing import Any

import numpy as np

ENCODER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 48,
    "max_position_embeddings": 40,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"pad_token_id": 0, "type_vocab_size": 2, "layer_norm_eps": 1e-12}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
}
"""Name -> (model_type, what its config adds to ENCODER)."""
REWARD: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_labels": 1,
}
REWARDS: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}}
"""model_type -> what its config adds to REWARD."""
LENGTHS = (17, 3, 9, 12)
"""Of the sequences; no token is one that pads."""
WORDS = "the a man girl is eating carrying food bread baby two men pushed carts through woods"
SENTENCES = (
    "a man is eating food",
    "the man is eating bread",
    "the girl is carrying a baby",
    "two men pushed carts through the woods " * 5,
    "food",
)
"""The fourth is longer than the tiny encoder reads."""
REAL = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "  Two men pushed carts through the woods.  ",
    "x^2 + 3x - 7 = 0, so x = (-3 + sqrt(37)) / 2; caf\u00e9, \u4f60\u597d",
    "The answer follows from the sum of the first terms. " * 40,
    "",
)
"""For a real encoder; the sixth is longer than it reads."""


def sequences(vocab_size: int) -> list[list[int]]:
    """Token ids from 3 on; each ends with 2, which some models call EOS and pad with."""
    random = np.random.RandomState(11)
    return [[*random.randint(3, vocab_size, n - 1).tolist(), 2] for n in LENGTHS]


def encoder_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """float32 values by name, for shapes in sorted order of their names.

    Scales are chosen so that attention is far from uniform and norms and biases matter.
    """
    random = np.random.RandomState(seed)
    tensors: dict[str, np.ndarray] = {}
    for name in sorted(shapes):
        values = random.standard_normal(shapes[name]).astype(np.float32)
        if name.endswith(".bias"):
            values = 0.2 * values
        elif "LayerNorm" in name:
            values = 1 + 0.3 * values
        elif "embeddings" not in name:
            sharp = "query" in name or "key" in name
            values = values * np.float32((3 if sharp else 1) / np.sqrt(shapes[name][1]))
        tensors[name] = values.astype(np.float32)
    return tensors
