"""Scalings of rotary positions: their constants, as a `config.json` has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jaxrl.errors import UserError
from jaxrl.models.fields import Raw, given, number, size
from jaxrl.process.plain import JsonObject


@dataclass(frozen=True)
class Llama3Rope:
    """RoPE scaling of Llama 3.1 (long context): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @classmethod
    def read(cls, raw: Raw) -> Llama3Rope:
        return cls(
            factor=number(raw, "factor"),
            low_freq_factor=number(raw, "low_freq_factor"),
            high_freq_factor=number(raw, "high_freq_factor"),
            original_max_positions=size(raw, "original_max_position_embeddings"),
        )

    def written(self) -> JsonObject:
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.original_max_positions,
        }


@dataclass(frozen=True)
class LinearRope:
    """RoPE with all positions divided by `factor`."""

    factor: float

    @classmethod
    def read(cls, raw: Raw) -> LinearRope:
        return cls(number(raw, "factor"))

    def written(self) -> JsonObject:
        return {"rope_type": "linear", "factor": self.factor}


@dataclass(frozen=True)
class DynamicRope:
    """RoPE whose base frequency grows with the longest sequence, once it is longer than
    `original_max_positions` (dynamic NTK). That is the file's `max_position_embeddings`; a model
    has `factor` times as many positions."""

    factor: float
    original_max_positions: int

    @classmethod
    def read(cls, raw: Raw) -> DynamicRope:
        return cls(number(raw, "factor"), size(raw, "max_position_embeddings"))

    def written(self) -> JsonObject:
        return {"rope_type": "dynamic", "factor": self.factor}


@dataclass(frozen=True)
class YarnRope:
    """RoPE of which frequencies that turn less than `beta_slow` times in the original context are
    divided by `factor`, those that turn more than `beta_fast` times are kept, and those between are
    a mixture (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    attention_factor: float
    """Cosines and sines are multiplied by it."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the mixture begins and ends at whole dims."""

    @classmethod
    def read(cls, raw: JsonObject) -> YarnRope:
        original = size(raw, "original_max_position_embeddings")
        stated = raw | {"factor": given(raw["factor"], raw["max_position_embeddings"] / original)}
        factor = number(stated, "factor")
        scale, over = raw.get("mscale"), raw.get("mscale_all_dim")
        if scale and over:
            attention = _mscale(factor, scale) / _mscale(factor, over)
        else:
            attention = _mscale(factor, 1.0)
        return cls(
            factor=factor,
            original_max_positions=original,
            attention_factor=number(raw, "attention_factor", attention),
            beta_fast=number(raw, "beta_fast", 32.0),
            beta_slow=number(raw, "beta_slow", 1.0),
            truncate=bool(given(raw.get("truncate"), True)),
        )

    def written(self) -> JsonObject:
        return {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_positions,
            "attention_factor": self.attention_factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        }


@dataclass(frozen=True)
class LongRope:
    """RoPE with a divisor for each frequency, other ones where the longest sequence is longer than
    `original_max_positions` (LongRoPE, arXiv 2402.13753)."""

    short_factors: tuple[float, ...]
    """[R / 2], of R rotated dims."""
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    """Cosines and sines are multiplied by it, of short sequences too."""

    @classmethod
    def read(cls, raw: Raw) -> LongRope:
        original = size(raw, "original_max_position_embeddings")
        factor = number(raw, "factor", size(raw, "max_position_embeddings") / original)
        return cls(
            short_factors=_numbers(raw, "short_factor"),
            long_factors=_numbers(raw, "long_factor"),
            original_max_positions=original,
            attention_factor=number(raw, "attention_factor", longrope_attention(factor, original)),
        )

    def written(self) -> JsonObject:
        return {
            "rope_type": "longrope",
            "short_factor": list(self.short_factors),
            "long_factor": list(self.long_factors),
            "original_max_position_embeddings": self.original_max_positions,
            "attention_factor": self.attention_factor,
        }


@dataclass(frozen=True)
class ProportionalRope:
    """RoPE of which only the first pairs of dims rotate, by the frequencies that they have where
    all do, divided by `factor`."""

    share: float
    """Of the pairs, those that rotate."""
    factor: float = 1.0

    @classmethod
    def read(cls, raw: Raw) -> ProportionalRope:
        share = number(raw, "partial_rotary_factor", 1.0)
        if share > 1:
            raise UserError(f"partial_rotary_factor={share!r} must be at most 1")
        return cls(share, number(raw, "factor", 1.0))

    def written(self) -> JsonObject:
        divided = {} if self.factor == 1 else {"factor": self.factor}
        return {"rope_type": "proportional", "partial_rotary_factor": self.share, **divided}


RopeScaling = Llama3Rope | LinearRope | ProportionalRope | DynamicRope | YarnRope | LongRope
KINDS: dict[str, Callable[[JsonObject], RopeScaling | None]] = {
    "default": lambda _: None,
    "linear": LinearRope.read,
    "llama3": Llama3Rope.read,
    "dynamic": DynamicRope.read,
    "yarn": YarnRope.read,
    "longrope": LongRope.read,
    "su": LongRope.read,
    "proportional": ProportionalRope.read,
}
"""`rope_type` -> how its constants are read. "su" is what the first Phi-3 call longrope."""


def read_rope(raw: Raw) -> tuple[float, RopeScaling | None]:
    """Base frequency and scaling, from `rope_parameters` (transformers 5) or the older fields."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(key) or {}, dict):
            raise UserError(f"{key}={raw[key]!r} must be an object, or null")
    params = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or params
    theta = number(raw, "rope_theta", number(params, "rope_theta", 10000.0))
    kind = given(scaling.get("rope_type"), given(scaling.get("type"), "default"))
    if kind not in KINDS:
        raise UserError(f"rope_type={kind!r} is not supported; supported: {', '.join(KINDS)}")
    positions = given(raw.get("max_position_embeddings"), 2048)
    original = given(scaling.get("original_max_position_embeddings"), positions)
    around = {
        "max_position_embeddings": positions,
        # beside the scaling it counts more, as in transformers
        "original_max_position_embeddings": given(
            raw.get("original_max_position_embeddings"), original
        ),
    }
    return theta, KINDS[kind](scaling | around)


def positions_of(scaling: RopeScaling | None, stated: int) -> int:
    """How many positions a model has whose `config.json` states so many.

    Those that YaRN and dynamic NTK were given to extend it often are not stated there.
    """
    if isinstance(scaling, DynamicRope | YarnRope):
        return max(stated, int(scaling.factor * scaling.original_max_positions))
    return stated


def written_rope(theta: float, scaling: RopeScaling | None, positions: int) -> JsonObject:
    """The fields of a `config.json` that `read_rope` and `positions_of` read."""
    described = {"rope_type": "default"} if scaling is None else scaling.written()
    fields = {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else described,
        "rope_parameters": {**described, "rope_theta": theta},
        "max_position_embeddings": positions,
    }
    if isinstance(scaling, DynamicRope):
        fields["max_position_embeddings"] = scaling.original_max_positions
    if isinstance(scaling, LongRope):
        fields["original_max_position_embeddings"] = scaling.original_max_positions
    return fields


def longrope_attention(factor: float, original_max_positions: int) -> float:
    """`LongRope.attention_factor` where it is not stated, of a context `factor` times as long."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _numbers(raw: Raw, key: str) -> tuple[float, ...]:
    values = raw[key]
    if not isinstance(values, list) or any(type(x) not in (int, float) or x <= 0 for x in values):
        raise UserError(f"{key}={values!r} must be a list of numbers above 0")
    return tuple(map(float, values))
