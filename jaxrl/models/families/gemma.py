"""The text of Gemma 3 (arXiv 2503.19786): norms before and after attention and MLP, and five layers
with a window, whose positions rotate by frequencies of their own, to one without."""

from __future__ import annotations

from jaxrl.errors import UserError
from jaxrl.models.family import (
    SLIDING,
    BlockKind,
    DecoderLike,
    Family,
    GgufFacts,
    Raw,
    number,
    read_ropes,
    read_windows,
    size,
    written_ropes,
    written_windows,
)
from jaxrl.process.json_types import JsonObject

LOCAL = "rope_local_base_freq"
"""The base frequency of layers with a window."""
DEFAULTS: JsonObject = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    LOCAL: 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
"""What a `config.json` of Gemma 3 leaves out where it is this."""
SOFTCAP = "final_logit_softcapping"
PERIOD = 6
"""Of so many layers the last one has no window, where there are no `layer_types`."""


def prepare(raw: Raw) -> Raw:
    key = "attn_logit_softcapping"
    if raw.get(key) is not None:
        raise UserError(f"{key}={raw[key]!r} is not supported; supported: null")
    if raw.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention=true is not supported; causal only")
    return DEFAULTS | read_ropes(raw, LOCAL)


def read(raw: Raw) -> JsonObject:
    period = size(raw, "sliding_window_pattern", PERIOD)
    window, local = size(raw, "sliding_window"), number(raw, LOCAL)
    kinds = read_windows(raw, window, lambda i: (i + 1) % period != 0, local)
    score_dim = size(raw, "query_pre_attn_scalar")
    return {"kinds": kinds, "score_dim": score_dim, "final_softcap": read_softcap(raw)}


def read_softcap(raw: Raw) -> float | None:
    """Reads `DecoderConfig.final_softcap`."""
    return None if raw.get(SOFTCAP) is None else number(raw, SOFTCAP)


def write(config: DecoderLike) -> JsonObject:
    written = written_windows(config) | written_ropes(config)
    return written | {
        LOCAL: written["rope_parameters"][SLIDING]["rope_theta"],
        "hidden_activation": config.block.activation,
        "query_pre_attn_scalar": config.score_dim,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        SOFTCAP: config.final_softcap,
    }


def from_gguf(config: DecoderLike, file: GgufFacts) -> JsonObject:
    """Returns `query_pre_attn_scalar` as llama.cpp has it: by the heads' own width in the largest
    model, which has 62 layers."""
    of_width = config.n_layers == 62
    return {
        "query_pre_attn_scalar": config.d_model // config.n_heads if of_width else config.head_dim
    }


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    BlockKind(
        qk_norm="head",
        norms="around",
        norm_in_float32=True,
        norm_around_one=True,
        activation="gelu_pytorch_tanh",
    ),
    scaled_embedding=True,
    gguf="gemma3",
    from_gguf=from_gguf,
    whole="gemma3",
    prepare=prepare,
    read=read,
    write=write,
)
