"""The parts that all decoders have: linear maps, norms, attention and the gated MLP.

Each part is a table of its parameters (`Parameter`: shape, axes, tensor name, first values) and a
function of the arrays that stand at these paths; how to attend is passed in. `models.config` joins
the tables, and `decoder.run_block` the functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.models.attention import Attend
from jaxrl.models.family import Activation, DecoderLike, LayerKind
from jaxrl.models.lora import SCALE, quantised_product
from jaxrl.models.rope import Length
from jaxrl.sharding.axes import ROWS, AxisName

PROJECTED = "projected"
"""What rematerialisation calls the outputs of `linear`."""
Rope = tuple[jax.Array, jax.Array]
"""cos and sin of the angles, each [B, T, 1, R / 2] float32, of R rotated dims."""
Arrays = Mapping[str, Any]
"""Nested parameters, such as those of one projection."""
First = float | Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""The values of a parameter before training: one number, or a function of a key and a shape."""

ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": jax.nn.gelu,  # by its approximation with tanh
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a decoder, whatever its dtype."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis (`parameters.AXES`) of each dim."""
    tensor: str
    """Its tensor in Hugging Face's files, within a layer where it is of one; kernels are stored
    transposed. Parameters that have one tensor in common are rows of it, in the table's order."""
    first: First = 1.0
    fixed: bool = False
    """Whether its kernel is never quantised and has no adapter."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Parameters = dict[str, Parameter]
"""Path -> parameter, in the order in which they are drawn and written."""


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws a kernel [in, out], normal / sqrt(in)."""
    return (1.0 / math.sqrt(shape[-2])) * jax.random.normal(key, shape)


def kernel(n_in: int, n_out: int, axes: tuple[str | None, str | None], tensor: str) -> Parameter:
    """Returns the kernel of a projection."""
    return Parameter((n_in, n_out), axes, tensor, normal)


def norm_scale(c: DecoderLike, width: int, tensor: str) -> Parameter:
    """Returns the scale of a norm that multiplies by it, or by 1 + it."""
    return Parameter((width,), (None,), tensor, 0.0 if c.block.norm_around_one else 1.0)


def rms_norm(
    c: DecoderLike,
    p: Arrays,
    x: jax.Array,
    around_one: bool | None = None,
    in_float32: bool | None = None,
) -> jax.Array:
    """Computes x / rms(x) * scale, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467).

    Args:
        p: its `scale`; empty where there is none.
        around_one, in_float32: as in `BlockKind`, where it differs from the others.
    """
    in_float32 = c.block.norm_in_float32 if in_float32 is None else in_float32
    around_one = c.block.norm_around_one if around_one is None else around_one
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + c.rms_norm_eps)
    normed = x32 if in_float32 else x32.astype(x.dtype)
    if "scale" not in p:
        return normed.astype(x.dtype)
    scale = p["scale"].astype(normed.dtype)
    return multiply_vector(normed, 1 + scale if around_one else scale).astype(x.dtype)


def linear(c: DecoderLike, p: Arrays, x: jax.Array, low: jax.Array | None = None) -> jax.Array:
    """Computes x @ kernel + bias, and what an adapter adds, in the dtype of x.

    Args:
        low: `low_rank` of another projection, whose A this one reads.
    """
    rows = x.reshape(-1, x.shape[-1])  # on CPU the backward of a 3-D product is twice as slow
    if SCALE in p:
        y = quantised_product(rows, p["kernel"], p[SCALE])
    else:
        y = product_of(c, rows, p["kernel"])
    low = low_rank(c, p, x) if low is None else low
    if low is not None and "lora_b" in p:
        y = y + product_of(c, low, p["lora_b"])
    y = y.reshape(*x.shape[:-1], -1)
    y = add_vector(y, p["bias"].astype(x.dtype)) if "bias" in p else y
    return checkpoint_name(y, PROJECTED)


def product_of(c: DecoderLike, rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes rows [n, in] @ kernel [in, out] in the dtype of the rows."""
    kernel = kernel.astype(rows.dtype)
    return _reducing_product(rows, kernel) if c.reduce_in_float32 else rows @ kernel


@jax.custom_vjp
def _reducing_product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes rows @ kernel. The kernel's gradient is a product with a float32 result, so that
    devices add their parts of it in float32, and is rounded to the kernel's dtype after that."""
    return rows @ kernel


def _product_backward(
    kept: tuple[jax.Array, jax.Array], d_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    rows, kernel = kept
    # Without a transposed kernel, which XLA would gather beside the one that it recomputes with.
    d_rows = jax.lax.dot_general(d_y, kernel, (((1,), (1,)), ((), ())))
    over_rows = ((0,), (0,)), ((), ())
    d_kernel = jax.lax.dot_general(rows, d_y, over_rows, preferred_element_type=jnp.float32)
    return d_rows, d_kernel.astype(kernel.dtype)


_reducing_product.defvjp(lambda rows, kernel: (rows @ kernel, (rows, kernel)), _product_backward)


@jax.custom_vjp
def multiply_vector(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes x [..., D] * scale [D] in one dtype. The gradient of the scale is summed over all
    tokens in float32: in bfloat16 a GPU loses 2 to 3% of it, and terms smaller than 1/256 of the
    sum so far."""
    return x * scale.reshape(*[1] * (x.ndim - 1), -1)


def _times_backward(
    kept: tuple[jax.Array, jax.Array], d_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, scale = kept
    d_x = multiply_vector(d_y, scale)
    d_scale = (d_y.astype(jnp.float32) * x).sum(range(x.ndim - 1), dtype=jnp.float32)
    return d_x, d_scale.astype(scale.dtype)


@jax.custom_vjp
def add_vector(x: jax.Array, bias: jax.Array) -> jax.Array:
    """Computes x [..., D] + bias [D] in one dtype, with the gradient of the bias summed in
    float32."""
    return x + bias.reshape(*[1] * (x.ndim - 1), -1)


multiply_vector.defvjp(lambda x, scale: (multiply_vector(x, scale), (x, scale)), _times_backward)
add_vector.defvjp(
    lambda x, bias: (add_vector(x, bias), bias),
    lambda bias, d: (d, d.sum(range(d.ndim - 1), dtype=jnp.float32).astype(bias.dtype)),
)


def low_rank(
    c: DecoderLike, p: Arrays, x: jax.Array, reader: Arrays | None = None
) -> jax.Array | None:
    """Computes scale * (x A) of an adapter, [n, rank]; None without one.

    Args:
        reader: a projection; None too unless it reads this A, having none of its own.
    """
    if reader is not None and ("lora_b" not in reader or "lora_a" in reader):
        return None
    if "lora_a" not in p:
        return None
    return c.lora.scale * product_of(c, x.reshape(-1, x.shape[-1]), p["lora_a"])


def attention_parameters(c: DecoderLike) -> Parameters:
    """Returns the parameters of grouped-query attention, of a model with one layer."""
    (kind,), b, d = c.kinds, c.block, c.d_model
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    wide = 2 * q if b.output_gate else q  # a gate's rows follow those of the query
    table = {"attn/q/kernel": kernel(d, wide, ("embed", "heads"), "self_attn.q_proj.weight")}
    biases: dict[str, tuple[int, str | None]] = {"q": (wide, "heads")} if b.attention_bias else {}
    for name in "" if kind.borrows else "k" if kind.keys_as_values else "kv":
        axes, tensor = ("embed", "kv_heads"), f"self_attn.{name}_proj.weight"
        table[f"attn/{name}/kernel"] = kernel(d, kv, axes, tensor)
        biases |= {name: (kv, "kv_heads")} if b.attention_bias else {}
    table["attn/o/kernel"] = kernel(q, d, ("heads", "embed"), "self_attn.o_proj.weight")
    biases |= {"o": (d, None)} if b.output_bias else {}
    for name, (width, axis) in biases.items():
        tensor = f"self_attn.{name}_proj.bias"
        table[f"attn/{name}/bias"] = Parameter((width,), (axis,), tensor, 0.0)
    if b.sinks:
        table["attn/sinks"] = Parameter((c.n_heads,), ("heads",), "self_attn.sinks", 0.0)
    if b.qk_norm is not None:
        by_head = b.qk_norm == "head"
        widths = {"q": c.head_dim if by_head else q}
        widths |= {} if kind.borrows else {"k": c.head_dim if by_head else kv}
        for name, width in widths.items():
            tensor = f"self_attn.{name}_norm.weight"
            table[f"attn/{name}_norm/scale"] = norm_scale(c, width, tensor)
    return table


def grouped_attention(
    c: DecoderLike, p: Arrays, x: jax.Array, rope: Rope, attend: Attend
) -> jax.Array:
    """Computes grouped-query attention with rotary positions; optional biases, sinks, norms of q,
    k and v, and a gate of what is read."""
    by_head = (*x.shape[:2], -1, c.head_dim)
    low = low_rank(c, p["q"], x, p["k"]) if "k" in p else None
    q, gate, k, v = linear(c, p["q"], x, low), None, None, None
    normed_by_head = c.block.qk_norm != "width"
    if "k" in p:
        k = linear(c, p["k"], x, low)
        v = (linear(c, p["v"], x, low) if "v" in p else k).reshape(by_head)
        v = rms_norm(c, {}, v) if c.block.value_norm else v
        k = k.reshape(by_head) if normed_by_head else k
        k = rms_norm(c, p["k_norm"], k) if "k_norm" in p else k
        k = rotate(k.reshape(by_head), rope)
    if c.block.output_gate:
        q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * c.head_dim), 2, -1)
    q = q.reshape(by_head) if normed_by_head else q
    q = rms_norm(c, p["q_norm"], q) if "q_norm" in p else q
    q = q.reshape(by_head)
    if c.score_dim not in (None, c.head_dim):
        q = q * jnp.asarray(math.sqrt(c.head_dim / c.score_dim), q.dtype)
    sinks = (p["sinks"],) if "sinks" in p else ()
    out = attend(rotate(q, rope), k, v, *sinks)
    out = out if gate is None else out * jax.nn.sigmoid(gate)
    return linear(c, p["o"], out.reshape(*x.shape[:2], -1))


def mlp_parameters(c: DecoderLike, width: int) -> Parameters:
    """Returns the parameters of a gated MLP with `width` gates."""
    d, into, out_of = c.d_model, ("embed", "mlp"), ("mlp", "embed")
    return {
        "mlp/gate/kernel": kernel(d, width, into, "mlp.gate_proj.weight"),
        "mlp/up/kernel": kernel(d, width, into, "mlp.up_proj.weight"),
        "mlp/down/kernel": kernel(width, d, out_of, "mlp.down_proj.weight"),
    }


def gated_mlp(c: DecoderLike, p: Arrays, x: jax.Array) -> jax.Array:
    """Computes down(act(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer 2020, arXiv 2002.05202)."""
    low = low_rank(c, p["gate"], x, p["up"])
    gate = ACTIVATIONS[c.block.activation](linear(c, p["gate"], x, low))
    return linear(c, p["down"], gate * linear(c, p["up"], x, low))


def rope_angles(config: DecoderLike, positions: jax.Array, kind: LayerKind) -> Rope:
    """Computes cos and sin of the angles of integer `positions` [B, T] for a kind of layers: of the
    model's base frequency and scaling, of their own frequency without one, or of no rotation (Su et
    al. 2021, arXiv 2104.09864)."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if kind.rope_theta is not None:
        theta, scaling = kind.rope_theta, None
    head_dim = config.head_dim if kind.head_dim is None else kind.head_dim
    half = (head_dim if config.rotary_dims is None else config.rotary_dims) // 2
    freq = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        length: Length = 0 if config.sequence_length is None else config.sequence_length
        if config.depends_on_length and config.sequence_length is None:
            length = jnp.max(positions) + 1
        freq = scaling.scaled(freq, theta, length)
    angle = positions.astype(jnp.float32)[..., None, None] * freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return (cos, sin) if kind.rotates else (jnp.ones_like(cos), jnp.zeros_like(sin))


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


def by_rows(x: jax.Array, mesh: Mesh | None, *tokens: AxisName) -> jax.Array:
    """Keeps the rows of x sharded over (data, fsdp), of a stream its tokens over an axis too: left
    alone, XLA picks odd layouts."""
    if mesh is None:
        return x
    spec = PartitionSpec(ROWS, *tokens, *([None] * (x.ndim - 1 - len(tokens))))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
