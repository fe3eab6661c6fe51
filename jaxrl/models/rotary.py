"""Frequencies of rotary positions, and their scalings (`models/rope.py` has the constants)."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.models.config import DecoderConfig
from jaxrl.models.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    YarnRope,
)
from jaxrl.types import Array

Length = int | jax.Array
"""Tokens of the longest sequence."""


def frequencies(config: DecoderConfig, length: Length) -> jax.Array:
    """[R / 2] float32 angles per position, of R rotated dims (Su et al. 2021, arXiv 2104.09864).

    Args:
        length: of the longest sequence, on which longrope and dynamic NTK depend.
    """
    freq = _powers(config.rope_theta, config.n_rotated)
    scaling = config.rope_scaling
    return freq if scaling is None else SCALED[type(scaling)](scaling, freq, config, length)


def _powers(theta: float | jax.Array, dims: int) -> jax.Array:
    half = dims // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def _linear(rope: LinearRope, freq: jax.Array, *_: object) -> jax.Array:
    return freq / rope.factor


def _proportional(rope: ProportionalRope, freq: jax.Array, *_: object) -> jax.Array:
    rotate = int(rope.share * len(freq))
    return jnp.where(jnp.arange(len(freq)) < rotate, freq / rope.factor, 0.0)


def llama3(rope: Llama3Rope, freq: Array, *_: object) -> Array:
    """Of a jax or a numpy array."""
    wavelength = 2 * math.pi / freq
    turns = rope.original_max_positions / wavelength
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = ((turns - rope.low_freq_factor) / span).clip(0.0, 1.0)
    return freq * (smooth + (1 - smooth) / rope.factor)


def _dynamic(
    rope: DynamicRope, freq: jax.Array, config: DecoderConfig, length: Length
) -> jax.Array:
    dims, original = config.n_rotated, rope.original_max_positions
    seen = jnp.maximum(length, original).astype(jnp.float32)
    grown = rope.factor * seen / original - (rope.factor - 1)
    return _powers(config.rope_theta * grown ** (dims / (dims - 2)), dims)


def _yarn(rope: YarnRope, freq: jax.Array, config: DecoderConfig, _: Length) -> jax.Array:
    """Peng et al. 2023, arXiv 2309.00071, section 3.2."""
    dims = config.n_rotated

    def dim_of(turns: float) -> float:
        """The dim that turns so often in the original context."""
        whole = rope.original_max_positions / (turns * 2 * math.pi)
        return dims * math.log(whole) / (2 * math.log(config.rope_theta))

    first, last = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    width = last - first if last != first else 0.001
    slow = jnp.clip((jnp.arange(dims // 2, dtype=jnp.float32) - first) / width, 0.0, 1.0)
    return freq / rope.factor * slow + freq * (1 - slow)


def _longrope(rope: LongRope, freq: jax.Array, _: DecoderConfig, length: Length) -> jax.Array:
    """Ding et al. 2024, arXiv 2402.13753."""
    short, long = (jnp.array(f, jnp.float32) for f in (rope.short_factors, rope.long_factors))
    return freq / jnp.where(length > rope.original_max_positions, long, short)


SCALED: dict[type, Callable[..., jax.Array]] = {
    LinearRope: _linear,
    Llama3Rope: llama3,
    DynamicRope: _dynamic,
    YarnRope: _yarn,
    LongRope: _longrope,
    ProportionalRope: _proportional,
}
