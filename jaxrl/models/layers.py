"""The blocks of a decoder in Flax NNX. Modules hold parameters; how to attend is passed in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.attention import Attend
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Filters, Inputs, Recur
from jaxrl.models.experts import ExpertKernel, ExpertKernels, Mix
from jaxrl.models.family import Activation
from jaxrl.models.fields import given
from jaxrl.models.kinds import LayerKind
from jaxrl.models.quantised import block_size, product, quantise
from jaxrl.models.rope import Length, frequencies

PROJECTED = "projected"
"""What rematerialisation calls the outputs of `Linear`."""
Rope = tuple[jax.Array, jax.Array]
"""cos and sin of the angles, each [B, T, 1, R / 2] float32, of R rotated dims."""

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,  # by its approximation with tanh
}


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(
        self,
        width: int,
        config: DecoderConfig,
        around_one: bool | None = None,
        in_float32: bool | None = None,
        scaled: bool = True,
    ):
        """
        Args:
            around_one, in_float32: as of `BlockKind`, where it differs from the others.
            scaled: else there is no scale.
        """
        self.around_one = given(around_one, config.block.norm_around_one)
        first = jnp.zeros((width,)) if self.around_one else jnp.ones((width,))
        self.scale = nnx.Param(first) if scaled else None
        self.eps = config.rms_norm_eps
        self.in_float32 = given(in_float32, config.block.norm_in_float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + self.eps)
        normed = x32 if self.in_float32 else x32.astype(x.dtype)
        if self.scale is None:
            return normed.astype(x.dtype)
        scale = self.scale[...].astype(normed.dtype)
        scale = 1 + scale if self.around_one else scale
        return (normed * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel + bias, and what an adapter adds, in the dtype of x."""

    def __init__(self, config: DecoderConfig, path: str, rngs: nnx.Rngs, *, bias: bool = False):
        """
        Args:
            path: within a block, one of `DecoderConfig.projections`.
        """
        n_in, n_out = config.projections[path]
        lora = config.adapter(path)
        scale = 1.0 / math.sqrt(n_in)
        kernel, kernel_scale = scale * jax.random.normal(rngs.params(), (n_in, n_out)), None
        if config.quantised is not None and path in config.quantisable:
            kernel, kernel_scale = quantise(config.quantised, kernel, block_size(n_in))
        self.kernel = nnx.Param(kernel)
        self.kernel_scale = None if kernel_scale is None else nnx.Param(kernel_scale)
        self.bias = nnx.Param(jnp.zeros((n_out,))) if bias else None
        own = lora if config.has_a(path) else None
        self.lora_a = nnx.Param(own.first(rngs.params(), n_in)) if own else None
        self.lora_b = nnx.Param(jnp.zeros((lora.rank, n_out))) if lora else None
        self.scale = lora.scale if lora else 0.0

    def low(self, x: jax.Array) -> jax.Array | None:
        """What A makes of x, [n, rank]; None without an adapter."""
        if self.lora_a is None:
            return None
        return self.scale * (x.reshape(-1, x.shape[-1]) @ self.lora_a[...].astype(x.dtype))

    def __call__(self, x: jax.Array, low: jax.Array | None = None) -> jax.Array:
        """
        Args:
            low: of another projection, whose A this one reads.
        """
        rows = x.reshape(-1, x.shape[-1])  # on CPU the backward of a 3-D product is twice as slow
        if self.kernel_scale is None:
            y = rows @ self.kernel[...].astype(x.dtype)
        else:
            y = product(rows, self.kernel[...], self.kernel_scale[...])
        low = self.low(x) if low is None else low
        if low is not None and self.lora_b is not None:
            y = y + low @ self.lora_b[...].astype(x.dtype)
        y = y.reshape(*x.shape[:-1], -1)
        if self.bias is not None:
            bias = self.bias[...].astype(x.dtype)
            y = y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)
        return checkpoint_name(y, PROJECTED)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; optional biases, sinks and norms of q, k and
    v."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        bias = c.block.attention_bias
        self.q = Linear(c, "attn/q", rngs, bias=bias)
        self.k = Linear(c, "attn/k", rngs, bias=bias) if "attn/k" in c.projections else None
        self.v = Linear(c, "attn/v", rngs, bias=bias) if "attn/v" in c.projections else None
        self.o = Linear(c, "attn/o", rngs, bias=c.block.output_bias)
        self.sinks = nnx.Param(jnp.zeros((c.n_heads,))) if c.block.sinks else None
        q_width, k_width = c.qk_norm_widths
        self.q_norm = RMSNorm(q_width, c) if q_width else None
        self.k_norm = RMSNorm(k_width, c) if k_width else None
        self.v_norm = RMSNorm(c.head_dim, c, scaled=False) if c.block.value_norm else None
        self.norm_by_head = c.block.qk_norm == "head"
        self.head_dim = c.head_dim
        self.output_gate = c.block.output_gate
        self.q_scale = math.sqrt(c.head_dim / given(c.score_dim, c.head_dim))

    def __call__(self, x: jax.Array, rope: Rope, attend: Attend) -> jax.Array:
        low = self.q.low(x) if self.k is not None and _reads_another(self.k) else None
        q, gate, k, v = self.q(x, low), None, None, None
        if self.k is not None:
            k = self.k(x, low)
            v = self._by_head(k if self.v is None else self.v(x, low))
            v = v if self.v_norm is None else self.v_norm(v)
            k = rotate(self._normed(self.k_norm, k), rope)
        if self.output_gate:
            q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * self.head_dim), 2, -1)
        q = self._normed(self.q_norm, q)
        q = q if self.q_scale == 1 else q * jnp.asarray(self.q_scale, q.dtype)
        sinks = () if self.sinks is None else (self.sinks[...],)
        out = attend(rotate(q, rope), k, v, *sinks)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return self.o(out.reshape(*x.shape[:2], -1))

    def _by_head(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def _normed(self, norm: RMSNorm | None, x: jax.Array) -> jax.Array:
        """Queries or keys, by head."""
        if norm is None:
            return self._by_head(x)
        return norm(self._by_head(x)) if self.norm_by_head else self._by_head(norm(x))


def _reads_another(projection: Linear) -> bool:
    """Whether its adapter reads what the A of another one makes."""
    return projection.lora_b is not None and projection.lora_a is None


class Convolution(nnx.Module):
    """The filters of `models.delta`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d = config.delta
        assert d is not None

        def filters(width: int) -> nnx.Param[jax.Array]:
            return nnx.Param(jax.random.normal(rngs.params(), (width, 1, d.conv)) / d.conv**0.5)

        self.q, self.k, self.v = filters(d.k_width), filters(d.k_width), filters(d.v_width)


class GatedDelta(nnx.Module):
    """Linear attention by the gated delta rule (`models.delta`); what its heads read is normed, and
    multiplied by a gate (arXiv 2412.06464, figure 1)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d = config.delta
        assert d is not None
        self.q = Linear(config, "delta/q", rngs)
        self.k = Linear(config, "delta/k", rngs)
        self.v = Linear(config, "delta/v", rngs)
        self.z = Linear(config, "delta/z", rngs)
        self.b = Linear(config, "delta/b", rngs)
        self.a = Linear(config, "delta/a", rngs)
        self.o = Linear(config, "delta/o", rngs)
        self.conv = Convolution(config, rngs)
        decay = jax.random.uniform(rngs.params(), (d.v_heads,), minval=0.01, maxval=16.0)
        self.log_decay = nnx.Param(jnp.log(decay))
        self.bias = nnx.Param(jnp.ones((d.v_heads,)))
        self.norm = RMSNorm(d.v_dim, config, around_one=False, in_float32=False)
        self.k_dim, self.v_dim = d.k_dim, d.v_dim

    def __call__(self, x: jax.Array, recur: Recur) -> jax.Array:
        low = self.q.low(x) if _reads_another(self.k) else None
        by_head = (*x.shape[:2], -1)
        q, k = (part(x, low).reshape(*by_head, self.k_dim) for part in (self.q, self.k))
        v = self.v(x, low).reshape(*by_head, self.v_dim)
        log_decay, bias = (
            part[...].astype(jnp.float32)[None, None] for part in (self.log_decay, self.bias)
        )
        g = -jnp.exp(log_decay) * jax.nn.softplus(self.a(x).astype(jnp.float32) + bias)
        rate = jax.nn.sigmoid(self.b(x)).astype(jnp.float32)
        filters = Filters(self.conv.q[...], self.conv.k[...], self.conv.v[...])
        out = self.norm(recur(Inputs(q, k, v, g, rate), filters))
        gate = jax.nn.silu(self.z(x).astype(jnp.float32)).reshape(out.shape)
        return self.o((out * gate).astype(x.dtype).reshape(by_head))


class GatedMLP(nnx.Module):
    """down(act(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Linear(config, "mlp/gate", rngs)
        self.up = Linear(config, "mlp/up", rngs)
        self.down = Linear(config, "mlp/down", rngs)
        self.activation = config.block.activation

    def __call__(self, x: jax.Array, *_: object) -> jax.Array:
        low = self.gate.low(x) if _reads_another(self.up) else None
        return self.down(ACTIVATIONS[self.activation](self.gate(x, low)) * self.up(x, low))


class Kernels(nnx.Module):
    """One projection of all experts (`experts.ExpertKernel`)."""

    def __init__(self, config: DecoderConfig, path: str, rngs: nnx.Rngs):
        """
        Args:
            path: within a block, one of `DecoderConfig.expert_projections`.
        """
        assert config.experts is not None
        (n_in, n_out), count = config.expert_projections[path], config.experts.count
        kernel, kernel_scale = jax.random.normal(rngs.params(), (count, n_in, n_out)), None
        kernel = kernel / math.sqrt(n_in)
        if config.quantised is not None:
            kernel, kernel_scale = quantise(config.quantised, kernel, block_size(n_in))
        self.kernel = nnx.Param(kernel)
        self.kernel_scale = None if kernel_scale is None else nnx.Param(kernel_scale)
        bias = config.block.expert_bias
        self.bias = nnx.Param(jnp.zeros((count, n_out))) if bias else None
        lora = config.adapter(path)
        self.lora_a = nnx.Param(lora.first(rngs.params(), n_in, count)) if lora else None
        self.lora_b = nnx.Param(jnp.zeros((count, lora.rank, n_out))) if lora else None
        self.scale = lora.scale if lora else 0.0

    @property
    def held(self) -> ExpertKernel:
        held = (self.kernel, self.kernel_scale, self.bias, self.lora_a, self.lora_b)
        found = ExpertKernel(*(None if part is None else part[...] for part in held))
        if found.lora_a is None:
            return found
        return found._replace(lora_a=self.scale * found.lora_a)


class ExpertMLPs(nnx.Module):
    """The `GatedMLP`s of all experts."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Kernels(config, "mlp/experts/gate", rngs)
        self.up = Kernels(config, "mlp/experts/up", rngs)
        self.down = Kernels(config, "mlp/experts/down", rngs)

    @property
    def held(self) -> tuple[ExpertKernel, ExpertKernel, ExpertKernel]:
        return self.gate.held, self.up.held, self.down.held


class MixtureMLP(nnx.Module):
    """A router and its experts; how tokens pass them is passed in (`models.experts`)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.router = Linear(config, "mlp/router", rngs, bias=config.block.expert_bias)
        self.experts = ExpertMLPs(config, rngs)

    def __call__(self, x: jax.Array, mix: Mix) -> jax.Array:
        bias = None if self.router.bias is None else self.router.bias[...]
        return mix(x, ExpertKernels(self.router.kernel[...], *self.experts.held, bias))


class MLPBesideExperts(GatedMLP):
    """norm(mlp(x)) + norm(experts(norm(r))), of x and of the residual r that x was made of; the
    router reads r / rms(r) times a scale of each dim (Gemma 4)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        assert config.experts is not None
        self.router = Linear(config, "mlp/router", rngs)
        self.experts = ExpertMLPs(config, rngs)
        self.router_norm = RMSNorm(config.d_model, config, scaled=False)
        self.router_scale = nnx.Param(jnp.ones((config.d_model,)))
        self.expert_scale = nnx.Param(jnp.ones((config.experts.count,)))
        self.out_norm = RMSNorm(config.d_model, config)
        self.experts_norm = RMSNorm(config.d_model, config)
        self.experts_out_norm = RMSNorm(config.d_model, config)

    def __call__(self, x: jax.Array, *given: Any) -> jax.Array:
        mix, residual = given
        asked = self.router_norm(residual) * self.router_scale[...].astype(x.dtype)[None, None]
        asked = asked * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        held, scale = self.experts.held, self.expert_scale[...]
        kernels = ExpertKernels(self.router.kernel[...], *held, scale=scale)
        out = mix(self.experts_norm(residual), kernels, asked)
        return self.out_norm(super().__call__(x)) + self.experts_out_norm(out)


class LayerInput(nnx.Module):
    """out(act(gate(x)) * p), of what a layer reads p [B, T, P] beside the residual x."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Linear(config, "input/gate", rngs)
        self.out = Linear(config, "input/out", rngs)
        self.activation = config.block.activation

    def __call__(self, x: jax.Array, p: jax.Array) -> jax.Array:
        return self.out(ACTIVATIONS[self.activation](self.gate(x)) * p)


class LayerInputs(nnx.Module):
    """What all layers read of tokens beside the residual: of each token, and of its embedding."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        n, width = config.layer_inputs, config.n_layers * config.layer_inputs
        of_tokens, of_rows = (config.vocab_size, width), (width, config.d_model)
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), of_tokens))
        rows = jax.random.normal(rngs.params(), of_rows)
        self.projection = nnx.Param(rows / math.sqrt(config.d_model))
        self.norm = RMSNorm(n, config)
        self.shape = (config.n_layers, n)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """[L, B, T, P].

        Args:
            tokens: [B, T, L * P], their rows of `embedding`.
            x: [B, T, D], the (scaled) embedding.
        """
        by_layer = (*x.shape[:2], *self.shape)
        read = jnp.einsum("btd,ed->bte", x, self.projection[...].astype(x.dtype))
        read = read * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        tokens = tokens * jnp.asarray(math.sqrt(self.shape[1]), x.dtype)
        both = self.norm(read.reshape(by_layer)) + tokens.reshape(by_layer)
        return jnp.moveaxis(both * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class Block(nnx.Module):
    """One transformer block on the residual stream [B, T, D]: x + f(norm(x)) for attention, then
    for the MLP; or x + norm(f(x)), or x + norm(f(norm(x))), as `BlockKind.norms` says."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        """
        Args:
            config: of a model with one layer (`DecoderConfig.of`).
        """
        recurs = config.kinds[0].recurs
        self.attn_norm = RMSNorm(config.d_model, config)
        self.attn = None if recurs else Attention(config, rngs)
        self.delta = GatedDelta(config, rngs) if recurs else None
        self.mlp_norm = RMSNorm(config.d_model, config)
        self.mlp = _mlp(config)(config, rngs)
        self.norms = config.block.norms
        around = self.norms == "around"
        self.attn_post_norm = RMSNorm(config.d_model, config) if around else None
        self.mlp_post_norm = RMSNorm(config.d_model, config) if around else None
        inputs = config.layer_inputs > 0
        self.input = LayerInput(config, rngs) if inputs else None
        self.input_norm = RMSNorm(config.d_model, config) if inputs else None
        self.block_scale = nnx.Param(jnp.ones((1,))) if config.block.scalar else None

    def __call__(
        self, x: jax.Array, rope: Rope, attend: Attend, *mix: Mix, own: jax.Array | None = None
    ) -> jax.Array:
        """`mix` where there are experts.

        Args:
            attend: an `Attend`, or with a state a `Recur`.
            own: [B, T, P], where a layer reads more than the residual (`LayerInput`).
        """

        def attended(x: jax.Array) -> jax.Array:
            if self.attn is not None:
                return self.attn(x, rope, attend)
            assert self.delta is not None
            return self.delta(x, attend)

        if self.norms == "after":
            x = x + self.attn_norm(attended(x))
            return x + self.mlp_norm(self.mlp(x, *mix))
        out = attended(self.attn_norm(x))
        x = x + (out if self.attn_post_norm is None else self.attn_post_norm(out))
        beside = (x,) if isinstance(self.mlp, MLPBesideExperts) else ()
        out = self.mlp(self.mlp_norm(x), *mix, *beside)
        x = x + (out if self.mlp_post_norm is None else self.mlp_post_norm(out))
        if self.input is not None and self.input_norm is not None:
            assert own is not None
            x = x + self.input_norm(self.input(x, own))
        if self.block_scale is not None:
            scale = jax.lax.stop_gradient(self.block_scale[...])
            x = x * scale.astype(x.dtype).reshape((1,) * x.ndim)
        return x


def _mlp(config: DecoderConfig) -> type[GatedMLP | MixtureMLP]:
    if config.experts is None:
        return GatedMLP
    return MLPBesideExperts if config.experts.beside else MixtureMLP


def layer_angles(config: DecoderConfig, kind: LayerKind, positions: jax.Array) -> Rope:
    """`rope_angles` of a kind of layers: the model's, their own without scaling, or no rotation."""
    config = config.of(kind)
    if kind.rope_theta is not None:
        config = replace(config, rope_theta=kind.rope_theta, rope_scaling=None)
    cos, sin = rope_angles(config, positions)
    return (cos, sin) if kind.rotates else (jnp.ones_like(cos), jnp.zeros_like(sin))


def rope_angles(config: DecoderConfig, positions: jax.Array) -> Rope:
    """cos and sin of the angles of the model's own rope, of integer `positions` [B, T]."""
    length: Length = given(config.sequence_length, 0)
    if config.depends_on_length and config.sequence_length is None:
        length = jnp.max(positions) + 1
    freq = frequencies(config, length)
    angle = positions.astype(jnp.float32)[..., None, None] * freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if config.attention_factor == 1:
        return cos, sin
    return cos * config.attention_factor, sin * config.attention_factor


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + R/2) of each head of x [B, T, heads, H], as Hugging Face does, with
    cos and sin [B, T, 1, R / 2] (Su et al. 2021, arXiv 2104.09864); dims from R on stay as they
    are."""
    cos, sin = rope
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :rotated], rope), x[..., rotated:]], -1)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
