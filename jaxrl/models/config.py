"""What a decoder is made of, and how a Hugging Face `config.json` says it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from jaxrl.errors import UserError
from jaxrl.models.kinds import LayerKind


@dataclass(frozen=True)
class Llama3Rope:
    """RoPE scaling of Llama 3.1 (long context): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class LinearRope:
    """RoPE with all positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Family:
    """What distinguishes the families that share the decoder."""

    architecture: str
    """Class name in `config.json` and in the exported folder."""
    attention_bias: bool
    """Whether q, k and v have a bias."""
    qk_norm: bool
    """Whether q and k pass an RMSNorm over each head."""
    head_dim: int | None = None
    """Where `config.json` does not say it; None is hidden_size / num_attention_heads."""


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", attention_bias=False, qk_norm=False),
    "qwen2": Family("Qwen2ForCausalLM", attention_bias=True, qk_norm=False),
    "qwen3": Family("Qwen3ForCausalLM", attention_bias=False, qk_norm=True, head_dim=128),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of one decoder-only language model."""

    family: str
    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | LinearRope | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 2048
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    """Of each layer; one where all layers are alike."""

    def __post_init__(self) -> None:
        if len(set(self.kinds)) == 1:
            object.__setattr__(self, "kinds", self.kinds[:1])
        elif len(self.kinds) != self.n_layers:
            raise UserError(f"{len(self.kinds)} kinds of layers for n_layers={self.n_layers}")
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}"
                " (num_attention_heads, num_key_value_heads)"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd: dims are rotated in pairs")

    @property
    def windows(self) -> dict[int | None, int]:
        """How many layers there are of each window (`LayerKind.window`)."""
        each = self.n_layers // len(self.kinds)
        found: dict[int | None, int] = {}
        for kind in self.kinds:
            found[kind.window] = found.get(kind.window, 0) + each
        return found

    def with_layers(self, keep: Sequence[int]) -> DecoderConfig:
        """The config of a model that has only these of its layers."""
        kinds = tuple(self.kinds[i % len(self.kinds)] for i in keep)
        return replace(self, n_layers=len(keep), kinds=kinds)

    @property
    def n_params(self) -> int:
        """Number of parameters; tied embeddings count once."""
        qkv = self.d_model * self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        if self.attention_bias:
            qkv += self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        block = qkv + self.n_heads * self.head_dim * self.d_model
        block += 3 * self.d_model * self.d_ff + norms
        vocab = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return self.n_layers * block + vocab + self.d_model

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Reads the fields of a `config.json`.

        Raises:
            UserError: a family or a variant (sliding window, rope type, ...) that is not supported.
        """
        family = raw.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            raise UserError(
                f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}"
            )
        _refuse_variants(raw)
        heads = _size(raw, "num_attention_heads")
        d_model = _size(raw, "hidden_size")
        theta, scaling = _rope(raw)
        return cls(
            family=family,
            vocab_size=_size(raw, "vocab_size"),
            d_model=d_model,
            n_layers=_size(raw, "num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=_size(raw, "num_key_value_heads", heads),
            head_dim=_size(raw, "head_dim", _or(FAMILIES[family].head_dim, d_model // heads)),
            d_ff=_size(raw, "intermediate_size"),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            tie_embeddings=bool(_or(raw.get("tie_word_embeddings"), False)),
            attention_bias=FAMILIES[family].attention_bias,
            qk_norm=FAMILIES[family].qk_norm,
            max_positions=_size(raw, "max_position_embeddings", 2048),
            **special_ids(raw),
        )

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The `config.json` of this model; read by transformers 4 and 5."""
        scaling: dict[str, Any] = {"rope_type": "default"}
        if isinstance(self.rope_scaling, Llama3Rope):
            scaling = {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_positions,
            }
        elif isinstance(self.rope_scaling, LinearRope):
            scaling = {"rope_type": "linear", "factor": self.rope_scaling.factor}
        eos: int | list[int] | None = list(self.eos_ids)
        if len(self.eos_ids) < 2:
            eos = self.eos_ids[0] if self.eos_ids else None
        raw = {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "eos_token_id": eos,
            "bos_token_id": self.bos_id,
            "pad_token_id": self.pad_id,
            "torch_dtype": dtype,
        }
        if self.family == "llama":
            raw |= {"attention_bias": False, "mlp_bias": False}
        return raw


class SpecialIds(TypedDict):
    """Those fields of `DecoderConfig`."""

    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None


def special_ids(raw: Mapping[str, Any]) -> SpecialIds:
    """The tokens that a `config.json` or a `generation_config.json` names."""
    eos = raw.get("eos_token_id")
    several = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for key, ids in (
        ("eos_token_id", several),
        ("bos_token_id", [_or(raw.get("bos_token_id"), 0)]),
        ("pad_token_id", [_or(raw.get("pad_token_id"), 0)]),
    ):
        if not all(type(i) is int for i in ids):
            raise UserError(f"{key}={raw[key]!r} is no token id: a whole number is needed, or null")
    return {
        "eos_ids": tuple(several),
        "bos_id": raw.get("bos_token_id"),
        "pad_id": raw.get("pad_token_id"),
    }


def check_special_ids(config: DecoderConfig) -> None:
    """Refuses an end or padding token that has no row in the embedding."""
    for key, ids in (("eos_token_id", config.eos_ids), ("pad_token_id", (config.pad_id,))):
        for i in ids:
            if i is not None and not 0 <= i < config.vocab_size:
                raise UserError(
                    f"{key}={i} is no token of a vocabulary of {config.vocab_size} (vocab_size):"
                    " set it to one that is, or to null"
                )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1; where it is absent or null, the default if there is one."""
    value = raw[key] if default is None else _or(raw.get(key), default)
    if type(value) is not int or value < 1:
        raise UserError(f"{key}={value!r} must be a whole number of at least 1")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A number above 0; where it is absent or null, the default if there is one."""
    value = raw[key] if default is None else _or(raw.get(key), default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"{key}={value!r} must be a number above 0")
    return float(value)


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    """Refuses settings that would give silently wrong numbers."""
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("use_sliding_window"):
        raise UserError("use_sliding_window=true is not supported; full attention only")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UserError("layer_types other than full_attention are not supported")
    rope = raw.get("rope_parameters")
    rotated = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    if raw.get("partial_rotary_factor", rotated) not in (1.0, None):
        raise UserError("partial_rotary_factor below 1 is not supported; all dims are rotated")
    if raw.get("mlp_bias") or (raw["model_type"] != "qwen2" and raw.get("attention_bias")):
        raise UserError("attention_bias / mlp_bias = true is not supported for this family")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | LinearRope | None]:
    """Base frequency and scaling, from `rope_parameters` (transformers 5) or the older fields."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise UserError(f"{key}={raw[key]!r} must be an object, or null")
    params = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or params
    theta = _number(raw, "rope_theta", _number(params, "rope_theta", 10000.0))
    kind = _or(scaling.get("rope_type"), _or(scaling.get("type"), "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(_number(scaling, "factor"))
    if kind == "llama3":
        return theta, Llama3Rope(
            factor=_number(scaling, "factor"),
            low_freq_factor=_number(scaling, "low_freq_factor"),
            high_freq_factor=_number(scaling, "high_freq_factor"),
            original_max_positions=_size(scaling, "original_max_position_embeddings"),
        )
    raise UserError(f"rope_type={kind!r} is not supported; supported: default, linear, llama3")
