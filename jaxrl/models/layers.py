"""The blocks of a decoder in Flax NNX. Modules hold parameters; how to attend is passed in."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.attention import Attend
from jaxrl.models.config import DecoderConfig, LinearRope, Llama3Rope
from jaxrl.models.kinds import LayerKind

Rope = tuple[jax.Array, jax.Array]
"""cos and sin of the angles, each [B, T, 1, H / 2] float32."""


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones((width,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(x.dtype)
        return x32.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


class Linear(nnx.Module):
    """x @ kernel + bias, in the dtype of x."""

    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs, *, bias: bool = False):
        scale = 1.0 / math.sqrt(n_in)
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (n_in, n_out)))
        self.bias = nnx.Param(jnp.zeros((n_out,))) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])  # on CPU the backward of a 3-D product is twice as slow
        y = (rows @ self.kernel[...].astype(x.dtype)).reshape(*x.shape[:-1], -1)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(x.dtype)
        return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional bias (Qwen2) and qk-norm (Qwen3)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        bias = c.attention_bias
        self.q = Linear(c.d_model, c.n_heads * c.head_dim, rngs, bias=bias)
        self.k = Linear(c.d_model, c.n_kv_heads * c.head_dim, rngs, bias=bias)
        self.v = Linear(c.d_model, c.n_kv_heads * c.head_dim, rngs, bias=bias)
        self.o = Linear(c.n_heads * c.head_dim, c.d_model, rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.head_dim = c.head_dim

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> jax.Array:
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).reshape(shape) for layer in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(rotate(q, rope), rotate(k, rope), v)
        return self.o(out.reshape(*x.shape[:2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Linear(config.d_model, config.d_ff, rngs)
        self.up = Linear(config.d_model, config.d_ff, rngs)
        self.down = Linear(config.d_ff, config.d_model, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One pre-norm transformer block on the residual stream [B, T, D]."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.attn = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.rms_norm_eps)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> jax.Array:
        x = x + self.attn(self.attn_norm(x), rope, attend)
        return x + self.mlp(self.mlp_norm(x))


def rope_frequencies(config: DecoderConfig) -> jax.Array:
    """[H / 2] float32 angles per position (Su et al. 2021, arXiv 2104.09864; llama3 scaling)."""
    half = config.head_dim // 2
    freq = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRope):
        return freq / scaling.factor
    if isinstance(scaling, Llama3Rope):
        wavelength = 2 * math.pi / freq
        turns = scaling.original_max_positions / wavelength
        span = scaling.high_freq_factor - scaling.low_freq_factor
        smooth = jnp.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
        return freq * (smooth + (1 - smooth) / scaling.factor)
    return freq


def layer_angles(config: DecoderConfig, kind: LayerKind, positions: jax.Array) -> Rope:
    """`rope_angles` of a kind of layers: the model's, their own without scaling, or no rotation."""
    if not kind.rotates:
        shape = (*positions.shape, 1, config.head_dim // 2)
        return jnp.ones(shape), jnp.zeros(shape)
    if kind.rope_theta is not None:
        config = replace(config, rope_theta=kind.rope_theta, rope_scaling=None)
    return rope_angles(config, positions)


def rope_angles(config: DecoderConfig, positions: jax.Array) -> Rope:
    """cos and sin of the angles of the model's own rope, of integer `positions` [B, T]."""
    freq = rope_frequencies(config)
    angle = positions.astype(jnp.float32)[..., None, None] * freq[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head of x [B, T, heads, H], as Hugging Face does."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
