"""Scalings of rotary positions: their constants, as a `config.json` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import UserError
from jaxrl.models.fields import given, number, size


@dataclass(frozen=True)
class Llama3Rope:
    """RoPE scaling of Llama 3.1 (long context): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Llama3Rope:
        return cls(
            factor=number(raw, "factor"),
            low_freq_factor=number(raw, "low_freq_factor"),
            high_freq_factor=number(raw, "high_freq_factor"),
            original_max_positions=size(raw, "original_max_position_embeddings"),
        )

    def written(self) -> dict[str, Any]:
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
    def read(cls, raw: Mapping[str, Any]) -> LinearRope:
        return cls(number(raw, "factor"))

    def written(self) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": self.factor}


RopeScaling = Llama3Rope | LinearRope
KINDS: dict[str, Callable[[Mapping[str, Any]], RopeScaling | None]] = {
    "default": lambda _: None,
    "linear": LinearRope.read,
    "llama3": Llama3Rope.read,
}
"""`rope_type` -> how its constants are read."""


def read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
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
    return theta, KINDS[kind](scaling)
