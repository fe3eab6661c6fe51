"""The text of Gemma 3 (arXiv 2503.19786): norms before and after attention and MLP, and five layers
with a window, whose positions rotate by frequencies of their own, to one without.

That of Gemma 4: layers without a window have heads of their own width and number, whose values may
be their keys, and rotate a part of their dims. In the small models layers read more of a token than
the residual, and the last ones borrow keys and values."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl.errors import UserError
from jaxrl.models import family
from jaxrl.models.experts import Experts, read_counts
from jaxrl.models.rope import ProportionalRope
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
"""Every so many layers one has no window, where there are no `layer_types`."""


def _prepare(raw: family.Raw) -> family.Raw:
    key = "attn_logit_softcapping"
    if raw.get(key) is not None:
        raise UserError(f"{key}={raw[key]!r} is not supported; supported: null")
    if raw.get("use_bidirectional_attention"):
        raise UserError("use_bidirectional_attention=true is not supported; causal only")
    return DEFAULTS | family.read_ropes(raw, LOCAL)


def _read(raw: family.Raw) -> JsonObject:
    period = family.size(raw, "sliding_window_pattern", PERIOD)
    window, local = family.window_of(raw), family.positive_number(raw, LOCAL)
    kinds = family.read_windows(raw, window, lambda i: (i + 1) % period != 0, local)
    score_dim = family.size(raw, "query_pre_attn_scalar")
    return {"kinds": kinds, "score_dim": score_dim, "final_softcap": read_softcap(raw)}


def read_softcap(raw: family.Raw) -> float | None:
    """Reads `DecoderConfig.final_softcap`."""
    return None if raw.get(SOFTCAP) is None else family.positive_number(raw, SOFTCAP)


def _write(config: family.DecoderLike) -> JsonObject:
    written = family.write_windows(config) | family.write_ropes(config)
    return written | {
        LOCAL: written["rope_parameters"][family.SLIDING]["rope_theta"],
        "hidden_activation": config.block.activation,
        "query_pre_attn_scalar": config.score_dim,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        SOFTCAP: config.final_softcap,
    }


def from_gguf(raw: family.Raw, file: family.GgufFacts) -> JsonObject:
    """Returns `query_pre_attn_scalar` as llama.cpp has it: by the heads' own width in the largest
    model, which has 62 layers."""
    largest, of_width = raw["num_hidden_layers"] == 62, family.size(raw, "hidden_size")
    of_width //= family.size(raw, "num_attention_heads")
    return {"query_pre_attn_scalar": of_width if largest else raw["head_dim"]}


def _scale_embedding(config: family.DecoderLike, x: jax.Array) -> jax.Array:
    """Multiplies rows by sqrt(D), rounded to the compute dtype."""
    return x * jnp.asarray(math.sqrt(config.d_model), x.dtype)


GEMMA3 = family.Family(
    "Gemma3ForCausalLM",
    family.BlockKind(
        qk_norm="head",
        norms="around",
        norm_in_float32=True,
        norm_around_one=True,
        activation="gelu_pytorch_tanh",
    ),
    embed=_scale_embedding,
    gguf="gemma3",
    from_gguf=from_gguf,
    whole="gemma3",
    within="model.language_model.",
    prepare=_prepare,
    read=_read,
    write=_write,
)

GEMMA4_DEFAULTS: JsonObject = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "rope_parameters": {
        family.FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        family.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
"""What a `config.json` leaves out where it is this."""
BY_LAYER = "per_layer_config"
"""Where newer versions of transformers keep what differs from layer to layer."""


def prepare_gemma4(raw: family.Raw) -> family.Raw:
    if raw.get("use_bidirectional_attention") == "all":
        raise UserError("use_bidirectional_attention=all is not supported; causal only")
    return family.read_ropes(family.fill_defaults(raw, GEMMA4_DEFAULTS), LOCAL)


def read_gemma4(raw: family.Raw) -> JsonObject:
    window, local = family.size(raw, "sliding_window"), family.positive_number(raw, LOCAL)
    kinds = family.read_windows(raw, window, lambda i: (i + 1) % PERIOD != 0, local, _full(raw))
    if kinds[-1].window is not None:
        raise UserError(f"layer_types={raw['layer_types']!r}: the last layer must be {family.FULL}")
    key, vocab = "hidden_size_per_layer_input", family.size(raw, "vocab_size")
    inputs = family.size(raw, key) if family.value_or(raw[key], 0) else 0
    if inputs and family.size(raw, "vocab_size_per_layer_input") != vocab:
        raise UserError(
            f"vocab_size_per_layer_input={raw['vocab_size_per_layer_input']!r} must be"
            f" vocab_size={vocab}"
        )
    return {
        "kinds": _borrowing(raw, kinds),
        "score_dim": 1,
        "layer_inputs": inputs,
        "final_softcap": read_softcap(raw),
        **_experts(raw),
    }


def _experts(raw: family.Raw) -> JsonObject:
    if not raw.get("enable_moe_block"):
        return {}
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if raw.get(key) is None:
            raise UserError(f"{key}=null: enable_moe_block=true needs a number")
    count, chosen = read_counts(raw, "num_experts", "top_k_experts")
    width = family.size(raw, "intermediate_size")
    experts = Experts(count, chosen, normalised=True, dense_width=width, beside="norms")
    return {"experts": experts, "d_ff": family.size(raw, "moe_intermediate_size")}


def _borrowing(
    raw: family.Raw, kinds: tuple[family.LayerKind, ...]
) -> tuple[family.LayerKind, ...]:
    """Returns the kinds of all layers, of which the last ones borrow keys and values."""
    shared = family.value_or(raw.get("num_kv_shared_layers"), 0)
    if not shared:
        return kinds
    if raw.get("enable_moe_block"):
        raise UserError(
            f"num_kv_shared_layers={shared} is not supported together with enable_moe_block=true"
        )
    n = len(kinds) - family.size(raw, "num_kv_shared_layers")
    if n < 1 or set(kinds[n:]) - set(kinds[:n]):
        raise UserError(
            f"num_kv_shared_layers={shared} of num_hidden_layers={len(kinds)}: of each kind that"
            " reads keys and values of other layers, one before these must have its own"
        )
    wide = 2 * family.size(raw, "intermediate_size") if raw.get("use_double_wide_mlp") else None
    return kinds[:n] + tuple(replace(kind, borrows=True, d_ff=wide) for kind in kinds[n:])


def _full(raw: family.Raw) -> family.LayerKind:
    """Returns the kind of the layers without a window."""
    same = bool(raw.get("attention_k_eq_v"))
    sizes = {
        "head_dim": family.size(raw, "global_head_dim"),
        "num_key_value_heads": raw.get("num_global_key_value_heads") if same else None,
    }
    types, by_layer = raw.get("layer_types"), family.value_or(raw.get(BY_LAYER), {})
    if by_layer:
        full = {str(i) for i, kind in enumerate(family.value_or(types, [])) if kind == family.FULL}
        stated = [by_layer[i] for i in by_layer]
        known = all(layer == stated[0] and layer.keys() <= sizes.keys() for layer in stated)
        if not known or by_layer.keys() != full:
            raise UserError(
                f"{BY_LAYER}={by_layer!r} is not supported: of the layers without a window, all"
                " alike, head_dim and num_key_value_heads may be others"
            )
        sizes = dict.fromkeys(sizes) | stated[0]
    dim, heads = (None if sizes[key] is None else family.size(sizes, key) for key in sizes)
    return family.LayerKind(head_dim=dim, n_kv_heads=heads, keys_as_values=same)


def write_gemma4(config: family.DecoderLike) -> JsonObject:
    last = config.kinds[-1]
    full = next((kind for kind in config.kinds if kind.window is None), last)
    layer = config.layer_of(full)
    written = family.write_windows(config) | family.write_ropes(config)
    return written | {
        "rope_scaling": family.OMITTED,  # transformers would have it in place of the others
        "global_head_dim": layer.head_dim,
        "num_global_key_value_heads": layer.n_kv_heads if full.keys_as_values else None,
        "attention_k_eq_v": full.keys_as_values,
        "num_kv_shared_layers": sum(kind.borrows for kind in config.kinds),
        "use_double_wide_mlp": last.d_ff is not None,
        "hidden_size_per_layer_input": config.layer_inputs,
        "vocab_size_per_layer_input": config.vocab_size,
        **_written(config),
        SOFTCAP: config.final_softcap,
        "hidden_activation": config.block.activation,
        "attention_bias": False,
    }


def _written(config: family.DecoderLike) -> JsonObject:
    if config.experts is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": config.experts.count,
        "top_k_experts": config.experts.chosen,
        "moe_intermediate_size": config.d_ff,
        "intermediate_size": config.experts.dense_width,
    }


def from_gguf_gemma4(raw: family.Raw, file: family.GgufFacts) -> JsonObject:
    """Reads the metadata as llama.cpp's converter writes it: the keys with `_swa` are for the
    layers with a window, the others for those without. Layers that borrow keys and values may still
    have tensors for them."""
    pattern, n = file.stated("attention.sliding_window_pattern"), raw["num_hidden_layers"]
    if not isinstance(pattern, list) or len(pattern) != n or all(pattern):
        raise UserError(
            f"attention.sliding_window_pattern={pattern!r} is not supported: it must say of each of"
            f" {n} layers whether it has a window, and one must have none"
        )
    keys = ("attention.key_length", "attention.key_length_swa", "rope.freq_base_swa")
    missing = [key for key in keys if file.stated(key) is None]
    scaling = raw["rope_scaling"]
    if missing or scaling is None or scaling["rope_type"] != ProportionalRope.rope_type:
        raise UserError(f"a Gemma 4 needs {', '.join(missing) or 'the tensor rope_freqs.weight'}")
    dims = {end: file.stated(f"attention.key_length{end}") for end in ("", "_swa")}
    for end, dim in dims.items():
        for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if family.value_or(file.stated(key), dim) != dim:
                raise UserError(
                    f"{key}={file.stated(key)} is not supported with"
                    f" attention.key_length{end}={dim}: they must be the same"
                )
    kind = family.value_or(file.stated("rope.scaling.type"), "none")
    if kind != "none":
        raise UserError(
            f"rope.scaling.type={kind!r} of a Gemma 4 is not supported; supported: none"
        )
    full, heads = pattern.index(False), file.stated("attention.head_count_kv")
    widths, experts = file.stated("feed_forward_length"), file.stated("expert_count")
    windowed = {"rope_theta": file.stated("rope.freq_base_swa")}
    return {
        "global_head_dim": int(dims[""]),
        "num_global_key_value_heads": heads[full] if isinstance(heads, list) else None,
        "attention_k_eq_v": file.shape(f"model.layers.{full}.self_attn.v_proj.weight") is None,
        "num_kv_shared_layers": file.stated("attention.shared_kv_layers"),
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] != raw["intermediate_size"],
        "hidden_size_per_layer_input": family.value_or(
            file.stated("embedding_length_per_layer_input"), 0
        ),
        "vocab_size_per_layer_input": raw["vocab_size"],
        "enable_moe_block": bool(experts),
        "top_k_experts": file.stated("expert_used_count"),
        "rope_parameters": {
            family.FULL: {**scaling, "rope_theta": raw["rope_theta"]},
            family.SLIDING: windowed,
        },
        "rope_scaling": None,
    }


GEMMA4 = family.Family(
    "Gemma4ForCausalLM",
    family.BlockKind(
        qk_norm="head",
        norms="around",
        norm_in_float32=True,
        activation="gelu_pytorch_tanh",
        value_norm=True,
        scalar=True,
    ),
    embed=_scale_embedding,
    tensors={
        "mlp/router/kernel": "router.proj.weight",
        "mlp/experts/gate/kernel": "experts.gate_up_proj",
        "mlp/experts/up/kernel": "experts.gate_up_proj",
        "mlp/experts/down/kernel": "experts.down_proj",
    },
    gguf="gemma4",
    from_gguf=from_gguf_gemma4,
    whole="gemma4",
    within="model.language_model.",
    prepare=prepare_gemma4,
    read=read_gemma4,
    write=write_gemma4,
)
UNIFIED: JsonObject = {
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "hidden_size_per_layer_input": 0,
}
"""What a `config.json` of the model whose images pass no encoder leaves out where it is this."""
WITHOUT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
"""What it does not have."""


def prepare_unified(raw: family.Raw) -> family.Raw:
    stated = {key: value for key, value in raw.items() if value is not None}
    return prepare_gemma4({**UNIFIED, **stated})


def write_unified(config: family.DecoderLike) -> JsonObject:
    return {key: value for key, value in write_gemma4(config).items() if key not in WITHOUT}


GEMMA4_UNIFIED = replace(
    GEMMA4,
    architecture="Gemma4UnifiedForCausalLM",
    gguf=None,  # they are as those of the other models, whose text is the same
    whole="gemma4_unified",
    prepare=prepare_unified,
    write=write_unified,
)
