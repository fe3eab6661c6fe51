"""Qwen2 and Qwen2.5, whose q, k and v have biases (arXiv 2407.10671, 2412.15115), and Qwen3, which
norms each head of q and k instead (arXiv 2505.09388)."""

from __future__ import annotations

from jaxrl.errors import UserError
from jaxrl.models.family import (
    BlockKind,
    DecoderLike,
    Family,
    Raw,
    given,
    read_windows,
    size,
    written_windows,
)
from jaxrl.process.json_types import JsonObject

FULL_LAYERS = 28
"""The first layers, which have no window, where a `config.json` does not say it."""


def read(raw: Raw) -> JsonObject:
    """Windows, which `use_sliding_window` turns on."""
    window = None
    if raw.get("use_sliding_window"):
        if raw.get("sliding_window") is None:
            raise UserError("use_sliding_window=true needs a sliding_window")
        window = size(raw, "sliding_window")
    first = given(raw.get("max_window_layers"), FULL_LAYERS)
    if type(first) is not int or first < 0:
        raise UserError(f"max_window_layers={first!r} must be an integer of at least 0")
    return {"kinds": read_windows(raw, window, lambda i: i >= first)}


def write(config: DecoderLike) -> JsonObject:
    written = written_windows(config)
    if written["sliding_window"] is None:
        return {}
    return written | {"use_sliding_window": True}


QWEN2 = Family(
    "Qwen2ForCausalLM", BlockKind(attention_bias=True), gguf="qwen2", read=read, write=write
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    BlockKind(qk_norm="head"),
    head_dim=128,
    gguf="qwen3",
    read=read,
    write=write,
)
