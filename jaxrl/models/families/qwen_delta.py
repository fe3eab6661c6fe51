"""The text of Qwen3.5, dense: layers with a state that forgets (`models.delta`), and after every
third of them one with attention, whose output has a gate and whose heads rotate in part."""

from __future__ import annotations

from jaxrl.errors import UserError, short
from jaxrl.models.delta import Delta
from jaxrl.models.family import FULL, BlockKind, DecoderLike, Family, LayerKind, Raw, filled, size
from jaxrl.process.json_types import JsonObject

RECURRENT = "linear_attention"
PERIOD = 4
"""Of so many layers the last one has attention, where there are no `layer_types`."""
PARTIAL = "partial_rotary_factor"
DEFAULTS: JsonObject = {"head_dim": 256, "num_key_value_heads": 4}
"""What a `config.json` leaves out where it is this."""


def prepare(raw: Raw) -> Raw:
    if raw.get("attn_output_gate") is False:
        raise UserError("attn_output_gate=false is not supported for this family")
    ropes = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    rotates = any(isinstance(rope, dict) and rope.get(PARTIAL) is not None for rope in ropes)
    return filled(raw, DEFAULTS if rotates else DEFAULTS | {PARTIAL: 0.25})


def read(raw: Raw) -> JsonObject:
    n, period = size(raw, "num_hidden_layers"), size(raw, "full_attention_interval", PERIOD)
    types = raw.get("layer_types")
    if types is None:
        types = [RECURRENT if (i + 1) % period else FULL for i in range(n)]
    if not isinstance(types, list) or len(types) != n or set(types) - {RECURRENT, FULL}:
        raise UserError(
            f"layer_types={short(repr(types))} is not supported: a list of num_hidden_layers={n} is"
            f" needed, each of {RECURRENT}, {FULL}"
        )
    delta = Delta(
        k_heads=size(raw, "linear_num_key_heads", 16),
        v_heads=size(raw, "linear_num_value_heads", 32),
        k_dim=size(raw, "linear_key_head_dim", 128),
        v_dim=size(raw, "linear_value_head_dim", 128),
        conv=size(raw, "linear_conv_kernel_dim", 4),
    )
    return {"kinds": tuple(LayerKind(recurs=kind == RECURRENT) for kind in types), "delta": delta}


def write(config: DecoderLike) -> JsonObject:
    kinds = config.kinds * (config.n_layers // len(config.kinds))
    delta = config.delta
    return {
        "layer_types": [RECURRENT if kind.recurs else FULL for kind in kinds],
        "linear_num_key_heads": delta.k_heads,
        "linear_num_value_heads": delta.v_heads,
        "linear_key_head_dim": delta.k_dim,
        "linear_value_head_dim": delta.v_dim,
        "linear_conv_kernel_dim": delta.conv,
        "attention_bias": False,
    }


QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    BlockKind(qk_norm="head", norm_in_float32=True, norm_around_one=True, output_gate=True),
    head_dim=256,
    partial_rotary=True,
    recurs=True,
    gguf="qwen35",
    whole="qwen3_5",
    prepare=prepare,
    read=read,
    write=write,
)
