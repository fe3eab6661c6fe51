"""Scalings of the frequencies of rotary positions, as a `config.json` has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl.errors import UserError, short
from jaxrl.models.family import Raw, positive_number, size, stated_once, value_or
from jaxrl.process.json_types import JsonObject
from jaxrl.types import Array

Length = int | jax.Array
"""Tokens of the longest sequence."""
KEYS = {
    "original_max_positions": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "share": "partial_rotary_factor",
}
"""Field of a scaling -> its key in a `config.json`, where that is another."""


class RopeScaling:
    """What the scalings of rotary positions share."""

    rope_type: ClassVar[str]
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""

    def scaled(self, freq: jax.Array, theta: float, length: Length) -> jax.Array:
        """Returns the frequencies [R / 2] in place of `freq`, those of the base frequency
        `theta`."""
        raise NotImplementedError

    def regime(self, length: int) -> int:
        """Returns a number that differs between lengths with different frequencies."""
        return 0

    def written(self) -> JsonObject:
        """Returns all fields, as a `config.json` has them."""
        fields = {KEYS.get(name, name): value for name, value in vars(self).items()}
        lists = {key: list(x) if isinstance(x, tuple) else x for key, x in fields.items()}
        return {"rope_type": self.rope_type, **lists}


@dataclass(frozen=True)
class Llama3Rope(RopeScaling):
    """RoPE scaling of Llama 3.1 (long context): low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    rope_type = "llama3"

    @classmethod
    def read(cls, raw: Raw) -> Llama3Rope:
        return cls(
            factor=positive_number(raw, "factor"),
            low_freq_factor=positive_number(raw, "low_freq_factor"),
            high_freq_factor=positive_number(raw, "high_freq_factor"),
            original_max_positions=size(raw, "original_max_position_embeddings"),
        )

    def scaled(self, freq: Array, theta: float, length: Length) -> Array:
        """Scales the frequencies of a jax or a numpy array."""
        wavelength = 2 * math.pi / freq
        turns = self.original_max_positions / wavelength
        span = self.high_freq_factor - self.low_freq_factor
        smooth = ((turns - self.low_freq_factor) / span).clip(0.0, 1.0)
        return freq * (smooth + (1 - smooth) / self.factor)


@dataclass(frozen=True)
class LinearRope(RopeScaling):
    """RoPE with all positions divided by `factor`."""

    factor: float
    rope_type = "linear"

    @classmethod
    def read(cls, raw: Raw) -> LinearRope:
        return cls(positive_number(raw, "factor"))

    def scaled(self, freq: jax.Array, theta: float, length: Length) -> jax.Array:
        return freq / self.factor


@dataclass(frozen=True)
class DynamicRope(RopeScaling):
    """RoPE whose base frequency grows with the longest sequence, once it is longer than
    `original_max_positions` (dynamic NTK). That is the file's `max_position_embeddings`; a model
    has `factor` times as many positions."""

    factor: float
    original_max_positions: int
    rope_type = "dynamic"

    @classmethod
    def read(cls, raw: Raw) -> DynamicRope:
        return cls(positive_number(raw, "factor"), size(raw, "max_position_embeddings"))

    def regime(self, length: int) -> int:
        return max(length, self.original_max_positions)

    def written(self) -> JsonObject:
        return {"rope_type": self.rope_type, "factor": self.factor}

    def scaled(self, freq: jax.Array, theta: Any, length: Length) -> jax.Array:
        dims, original = 2 * len(freq), self.original_max_positions
        seen = jnp.maximum(length, original).astype(jnp.float32)
        grown = self.factor * seen / original - (self.factor - 1)
        theta = theta * grown ** (dims / (dims - 2))
        return theta ** (-jnp.arange(len(freq), dtype=jnp.float32) / len(freq))


@dataclass(frozen=True)
class YarnRope(RopeScaling):
    """RoPE of which frequencies that turn less than `beta_slow` times in the original context are
    divided by `factor`, those that turn more than `beta_fast` times are kept, and those between are
    a mixture (YaRN, arXiv 2309.00071)."""

    factor: float
    original_max_positions: int
    attention_factor: float = field()  # required: the 1 of the others is no default
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the mixture begins and ends at whole dims."""
    rope_type = "yarn"

    @classmethod
    def read(cls, raw: JsonObject) -> YarnRope:
        original = size(raw, "original_max_position_embeddings")
        stated = raw | {
            "factor": value_or(raw["factor"], raw["max_position_embeddings"] / original)
        }
        factor = positive_number(stated, "factor")
        if raw.get("mscale") and raw.get("mscale_all_dim"):
            scale, over = positive_number(raw, "mscale"), positive_number(raw, "mscale_all_dim")
            attention = _mscale(factor, scale) / _mscale(factor, over)
        else:
            attention = _mscale(factor, 1.0)
        return cls(
            factor=factor,
            original_max_positions=original,
            attention_factor=positive_number(raw, "attention_factor", attention),
            beta_fast=positive_number(raw, "beta_fast", 32.0),
            beta_slow=positive_number(raw, "beta_slow", 1.0),
            truncate=bool(value_or(raw.get("truncate"), True)),
        )

    def scaled(self, freq: jax.Array, theta: float, length: Length) -> jax.Array:
        """Scales the frequencies as in section 3.2."""
        dims = 2 * len(freq)

        def dim_of(turns: float) -> float:
            """Returns the dim that turns the given number of times in the original context."""
            whole = self.original_max_positions / (turns * 2 * math.pi)
            return dims * math.log(whole) / (2 * math.log(theta))

        first, last = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dims - 1)
        width = last - first if last != first else 0.001
        slow = jnp.clip((jnp.arange(dims // 2, dtype=jnp.float32) - first) / width, 0.0, 1.0)
        return freq / self.factor * slow + freq * (1 - slow)


@dataclass(frozen=True)
class LongRope(RopeScaling):
    """RoPE with a divisor for each frequency, other ones where the longest sequence is longer than
    `original_max_positions` (LongRoPE, arXiv 2402.13753)."""

    short_factors: tuple[float, ...]
    """[R / 2], of R rotated dims."""
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float = field()  # required: the 1 of the others is no default
    """Multiplies the cosines and sines of short sequences too."""
    rope_type = "longrope"

    @classmethod
    def read(cls, raw: Raw) -> LongRope:
        original = size(raw, "original_max_position_embeddings")
        factor = positive_number(raw, "factor", size(raw, "max_position_embeddings") / original)
        return cls(
            short_factors=_numbers(raw, "short_factor"),
            long_factors=_numbers(raw, "long_factor"),
            original_max_positions=original,
            attention_factor=positive_number(
                raw, "attention_factor", longrope_attention(factor, original)
            ),
        )

    def regime(self, length: int) -> int:
        return length > self.original_max_positions

    def scaled(self, freq: jax.Array, theta: float, length: Length) -> jax.Array:
        short, long = (jnp.array(f, jnp.float32) for f in (self.short_factors, self.long_factors))
        return freq / jnp.where(length > self.original_max_positions, long, short)


@dataclass(frozen=True)
class ProportionalRope(RopeScaling):
    """RoPE of which only the first pairs of dims rotate, by the frequencies that they have where
    all do, divided by `factor`."""

    share: float
    """Pairs of dims that rotate."""
    factor: float = 1.0
    rope_type = "proportional"

    @classmethod
    def read(cls, raw: Raw) -> ProportionalRope:
        share = positive_number(raw, "partial_rotary_factor", 1.0)
        if share > 1:
            raise UserError(f"partial_rotary_factor={share!r} must be at most 1")
        return cls(share, positive_number(raw, "factor", 1.0))

    def written(self) -> JsonObject:
        written = super().written()
        return {key: x for key, x in written.items() if (key, x) != ("factor", 1)}

    def scaled(self, freq: jax.Array, theta: float, length: Length) -> jax.Array:
        rotate = int(self.share * len(freq))
        return jnp.where(jnp.arange(len(freq)) < rotate, freq / self.factor, 0.0)


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


def check_ropes(raw: Raw, full: str, sliding: str, local: str) -> None:
    """Refuses a `config.json` that says two things of its rotary positions: older versions of
    transformers have `rope_theta` and `rope_scaling` where newer ones have `rope_parameters`, and
    which of them counts is not the same everywhere.

    Args:
        full, sliding: keys of a `rope_parameters` that has those of each kind of layers.
        local: key of the base frequency of layers with a window.
    """
    params, scaling = (value_or(raw.get(key), {}) for key in ("rope_parameters", "rope_scaling"))
    if isinstance(params, dict) and {full, sliding} & params.keys():
        params, windowed = (value_or(params.get(key), {}) for key in (full, sliding))
        if isinstance(windowed, dict):
            of_windows = {
                local: raw.get(local),
                f"{sliding}.rope_theta": windowed.get("rope_theta"),
            }
            stated_once(of_windows, *of_windows)
    if not isinstance(params, dict) or not isinstance(scaling, dict):
        return  # refused where they are read
    thetas = {
        "rope_theta": raw.get("rope_theta"),
        "rope_parameters.rope_theta": params.get("rope_theta"),
        "rope_scaling.rope_theta": scaling.get("rope_theta"),
    }
    stated_once(thetas, *thetas)
    newer, older = _merge_spellings(params), _merge_spellings(scaling)
    for key in newer.keys() & older.keys() if params and scaling else ():
        both = {f"rope_parameters.{key}": newer[key], f"rope_scaling.{key}": older[key]}
        stated_once(both, *both)


def _merge_spellings(params: Raw) -> JsonObject:
    """Returns the constants of a scaling, with its type at one key."""
    kinds = {key: params.get(key) for key in ("rope_type", "type")}
    kinds = {key: "longrope" if kind == "su" else kind for key, kind in kinds.items()}
    apart = ("type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in params.items() if key not in apart}
    return rest | {"rope_type": value_or(stated_once(kinds, *kinds), "default")}


def _object(raw: Raw, key: str) -> JsonObject:
    value = value_or(raw.get(key), {})
    if not isinstance(value, dict):
        raise UserError(f"{key}={short(repr(value))} must be an object, or null")
    return value


def read_rope(raw: Raw, default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Reads the base frequency and scaling, from `rope_parameters` (transformers 5) or the older
    fields.

    Args:
        default_theta: the base frequency where none of them has one.
    """
    scaling = {**_object(raw, "rope_parameters"), **_object(raw, "rope_scaling")}
    theta = positive_number(
        scaling, "rope_theta", positive_number(raw, "rope_theta", default_theta)
    )
    kind = value_or(scaling.get("rope_type"), value_or(scaling.get("type"), "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"rope_type={kind!r} is not supported; supported: {', '.join(KINDS)}")
    positions = size(raw, "max_position_embeddings", 2048)
    original = value_or(scaling.get("original_max_position_embeddings"), positions)
    around = {
        "max_position_embeddings": positions,
        # beside the scaling it counts more, as in transformers
        "original_max_position_embeddings": value_or(
            raw.get("original_max_position_embeddings"), original
        ),
    }
    return theta, KINDS[kind](scaling | around)


def positions_of(scaling: RopeScaling | None, stated: int) -> int:
    """Returns how many positions a model has whose `config.json` states `stated`.

    Those that YaRN and dynamic NTK were given to extend it often are not stated there.
    """
    if isinstance(scaling, DynamicRope | YarnRope):
        return max(stated, int(scaling.factor * scaling.original_max_positions))
    return stated


def write_rope(theta: float, scaling: RopeScaling | None, positions: int) -> JsonObject:
    """Returns the fields of a `config.json` that `read_rope` and `positions_of` read."""
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
    """Returns `LongRope.attention_factor` where it is not stated, for a context `factor` times as
    long."""
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
