"""Linear attention by the gated delta rule (Gated Delta Networks, arXiv 2412.06464), of whole rows:
in chunks where they have several tokens, as one step of the recurrence where they have one.

The state S [V, K] of a head forgets by a factor exp(g) in (0, 1], and what a key k (of length 1)
reads of it is moved towards its value v by a rate b in (0, 1) (the same, eq. 10):

    S_t = exp(g_t) S_{t-1} + b_t (v_t - exp(g_t) S_{t-1} k_t) k_t^T        o_t = S_t q_t

A position that is no token has b = 0 and g = 0: the state passes it unchanged. Shapes as in
`types`, and: N key heads of width K, each of which serves G value heads of width V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.models.family import DecoderLike
from jaxrl.models.layers import Arrays, Parameter, Parameters, kernel, linear, low_rank, rms_norm
from jaxrl.models.packing import Packing, run_by_heads
from jaxrl.sharding.axes import HEADS, ROWS, dim_spec

CHUNK = 64
"""Tokens of a chunk."""
EPS = 1e-6
"""Added to the squared length of a query or key that it is divided by."""


@dataclass(frozen=True)
class Delta:
    """The sizes of layers with the gated delta rule."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int = 4
    """Tokens that the convolution of queries, keys and values sees: the token and those before."""

    def __post_init__(self) -> None:
        if self.v_heads % self.k_heads:
            raise UserError(
                f"linear_num_value_heads={self.v_heads} is not a multiple of"
                f" linear_num_key_heads={self.k_heads}"
            )
        if self.conv < 2:
            raise UserError(f"linear_conv_kernel_dim={self.conv} must be at least 2")

    @property
    def k_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    def parts(self, devices: int) -> int:
        """Returns how many of the devices divide the heads: all, or one where they cannot."""
        return devices if self.k_heads % devices == 0 else 1

    def state_bytes(self, itemsize: int, parts: int = 1) -> int:
        """Returns the bytes of a layer's `Recurrent` of one row on each of `parts` devices, which
        divide the heads where they can; for inputs in a dtype of `itemsize` bytes."""
        inputs = (self.conv - 1) * (2 * self.k_width + self.v_width) * itemsize
        return (4 * self.v_heads * self.k_dim * self.v_dim + inputs) // self.parts(parts)


class Recurrent(NamedTuple):
    """What a layer keeps of the tokens that rows have read. Stacked, all have a leading [L]."""

    state: jax.Array
    """[B, N*G, V, K] float32."""
    q: jax.Array
    """[B, N, conv - 1, K]: the last inputs of the convolution, zeros where there were none."""
    k: jax.Array
    v: jax.Array
    """[B, N*G, conv - 1, V]."""


class Inputs(NamedTuple):
    """What a layer makes of tokens [B, T], or of streams of them."""

    q: jax.Array
    """[B, T, N, K]; queries, keys and values are those before the convolution."""
    k: jax.Array
    v: jax.Array
    """[B, T, N*G, V]."""
    g: jax.Array
    """[B, T, N*G] float32: the log of the factor that the state forgets by, at most 0."""
    rate: jax.Array
    """[B, T, N*G] float32."""


class Filters(NamedTuple):
    """Filters of the convolutions over tokens, one for each channel; the last entry is that of the
    token itself."""

    q: jax.Array
    """[N*K, 1, conv]."""
    k: jax.Array
    v: jax.Array
    """[N*G*V, 1, conv]."""


Recur = Callable[[Inputs, Filters], tuple[jax.Array, Any]]
"""What a layer reads of the state at each token, [B, T, N*G, V], and the state after the last."""


def delta_parameters(c: DecoderLike) -> Parameters:
    """Returns the parameters of a layer with the gated delta rule."""
    d, delta, name = c.d_model, c.delta, "linear_attn."
    k, v, heads = delta.k_width, delta.v_width, delta.v_heads
    axes, both = ("embed", "state_heads"), f"{name}in_proj_qkv.weight"
    table = {
        f"delta/{x}/kernel": kernel(d, n, axes, both) for x, n in zip("qkv", (k, k, v), strict=True)
    }
    for x, n in zip("zba", (v, heads, heads), strict=True):
        table[f"delta/{x}/kernel"] = kernel(d, n, axes, f"{name}in_proj_{x}.weight")
    table["delta/o/kernel"] = kernel(v, d, axes[::-1], f"{name}out_proj.weight")

    def filters(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-1] ** 0.5

    def decay(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))

    for x, n in zip("qkv", (k, k, v), strict=True):
        shape, by_head = (n, 1, delta.conv), ("state_heads", None, None)
        table[f"delta/conv/{x}"] = Parameter(shape, by_head, f"{name}conv1d.weight", filters)
    per_head = (heads,), ("state_heads",)
    table["delta/log_decay"] = Parameter(*per_head, f"{name}A_log", decay)
    table["delta/bias"] = Parameter(*per_head, f"{name}dt_bias", 1.0)
    table["delta/norm/scale"] = Parameter((delta.v_dim,), (None,), f"{name}norm.weight", 1.0)
    return table


def gated_delta(c: DecoderLike, p: Arrays, x: jax.Array, recur: Recur) -> tuple[jax.Array, Any]:
    """Computes linear attention by the gated delta rule; what its heads read is normed, and
    multiplied by a gate (arXiv 2412.06464, figure 1). Also returns the state that is left."""
    by_head, low = (*x.shape[:2], -1), low_rank(c, p["q"], x, p["k"])
    widths = {"q": c.delta.k_dim, "k": c.delta.k_dim, "v": c.delta.v_dim}
    q, k, v = (linear(c, p[i], x, low).reshape(*by_head, n) for i, n in widths.items())
    log_decay, bias = (p[i].astype(jnp.float32)[None, None] for i in ("log_decay", "bias"))
    g = -jnp.exp(log_decay) * jax.nn.softplus(linear(c, p["a"], x).astype(jnp.float32) + bias)
    rate = jax.nn.sigmoid(linear(c, p["b"], x)).astype(jnp.float32)
    read, state = recur(Inputs(q, k, v, g, rate), Filters(**p["conv"]))
    out = rms_norm(c, p["norm"], read, around_one=False, in_float32=False)
    gate = jax.nn.silu(linear(c, p["z"], x).astype(jnp.float32)).reshape(out.shape)
    return linear(c, p["o"], (out * gate).astype(x.dtype).reshape(by_head)), state


def initial_state(delta: Delta | None, rows: int, dtype: jnp.dtype) -> Recurrent:
    """Returns the state of rows that begin."""
    assert delta is not None
    n, m, before = delta.k_heads, delta.v_heads, delta.conv - 1
    return Recurrent(
        jnp.zeros((rows, m, delta.v_dim, delta.k_dim), jnp.float32),
        jnp.zeros((rows, n, before, delta.k_dim), dtype),
        jnp.zeros((rows, n, before, delta.k_dim), dtype),
        jnp.zeros((rows, m, before, delta.v_dim), dtype),
    )


def recur_rows(
    delta: Delta | None,
    mesh: Mesh | None,
    mask: jax.Array,
    inputs: Inputs,
    filters: Filters,
    start: Recurrent | None = None,
) -> tuple[jax.Array, Recurrent]:
    """Runs rows one token after the other: returns what they read [B, T, N*G, V] in the dtype of
    the values, and what is kept at their ends. Each device computes its own rows and heads, over
    whole rows.

    Args:
        mask: [B, T] bool: the real tokens, which are the first ones.
        start: at the first token; None: the rows begin.
    """
    assert delta is not None
    if start is None:
        start = initial_state(delta, len(mask), inputs.v.dtype)
    run = partial(_recur, delta)
    if mesh is None or mesh.size == 1:
        return run(mask, inputs, filters, start)
    heads = dim_spec(delta.k_heads, HEADS, mesh.shape)
    by_token, kept = PartitionSpec(ROWS, None, heads), PartitionSpec(ROWS, heads)
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(PartitionSpec(ROWS), by_token, PartitionSpec(heads), kept),
        out_specs=(by_token, kept),
        check_vma=False,
    )(mask, inputs, filters, start)


def recur_packed(delta: Delta, mesh: Mesh | None, packing: Packing) -> Recur:
    """Returns `Recur` of streams: each row runs by itself, and completions whose prompt is a row of
    its own run from the end of that; no state is returned."""

    def recur(inputs: Inputs, filters: Filters) -> jax.Array:
        outputs, end = [], None
        for rows in packing.rows:
            if end is not None:
                end = jax.tree.map(lambda x: jnp.repeat(x, packing.group, 0), end)
            row_inputs = jax.tree.map(rows.unpack, inputs)
            read, end = recur_rows(delta, mesh, rows.mask, row_inputs, filters, end)
            outputs.append(rows.pack(read))
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]

    run = run_by_heads(recur, mesh, lambda _: delta.k_heads)
    return lambda inputs, filters: (run(inputs, filters), None)


def _recur(
    delta: Delta, mask: jax.Array, inputs: Inputs, filters: Filters, start: Recurrent
) -> tuple[jax.Array, Recurrent]:
    """Runs `recur_rows` on one device, which may have some of the heads."""
    lengths = mask.sum(-1, dtype=jnp.int32)
    before = start.q, start.k, start.v
    operands = zip(inputs[:3], filters, before, strict=True)
    (q, q_end), (k, k_end), (v, v_end) = (_convolve(*operand, lengths) for operand in operands)
    b, t, n, _ = q.shape
    per_key = v.shape[2] // n
    q, k = _normalise(q) * delta.k_dim**-0.5, _normalise(k)
    v = v.reshape(b, t, n, per_key, -1)
    g, rate = (
        jnp.where(mask[:, :, None], x, 0.0).reshape(b, t, n, per_key)
        for x in (inputs.g, inputs.rate)
    )
    state = start.state.reshape(b, n, per_key, *start.state.shape[2:])
    if t == 1:
        out, state = _step(state, *(x[:, 0] for x in (q, k, v, g, rate)))
        out = out[:, None]
    else:
        out, state = _run_chunks(q, k, v, g, rate, state)
    kept = Recurrent(state.reshape(start.state.shape), q_end, k_end, v_end)
    return out.reshape(b, t, n * per_key, -1).astype(inputs.v.dtype), kept


def _convolve(
    x: jax.Array, filters: jax.Array, before: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes silu of the convolution of x [B, T, heads, H] over tokens, in float32, and the last
    of its inputs [B, heads, conv - 1, H] of rows that have `lengths` tokens."""
    reach = before.shape[2]
    whole = jnp.concatenate([jnp.swapaxes(before, 1, 2).astype(x.dtype), x], 1)
    taps = filters.reshape(1, 1, *x.shape[2:], reach + 1).astype(jnp.float32)
    summed = sum(whole[:, i : i + x.shape[1]] * taps[..., i] for i in range(reach + 1))
    at = (lengths[:, None] + jnp.arange(reach)[None])[..., None, None]
    end = jnp.take_along_axis(whole, at, 1, mode="promise_in_bounds")
    out = jax.nn.silu(summed).astype(x.dtype)  # rounded as its input is
    return out.astype(jnp.float32), jnp.swapaxes(end, 1, 2).astype(before.dtype)


def _normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


def _step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, rate: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes one token (arXiv 2412.06464, eq. 10): returns what it reads [B, N, G, V], and the
    state after it.

    Args:
        state: [B, N, G, V, K] before it.
        q, k: [B, N, K].
        v: [B, N, G, V].
        g, rate: [B, N, G].
    """
    # Sums over what lies next to each other, no matrix products: for other ones a GPU turns and
    # copies the states of all layers.
    q, k = (x[:, :, None, None] for x in (q, k))
    state = state * jnp.exp(g)[..., None, None]
    change = (v - jnp.sum(state * k, -1)) * rate[..., None]
    state = state + change[..., None] * k
    return jnp.sum(state * q, -1), state


def _run_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, rate: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs `_step` over T tokens [B, T, ...], one chunk of C after the other, all tokens of a chunk
    at once (arXiv 2406.06484, eq. 8 to 11, with the decays of arXiv 2412.06464, section 3.3).

    With c the sum of g from the start of the chunk on and D_ij = exp(c_i - c_j) for j <= i, the
    changes U - W S^T that a chunk makes to its first state S are by the UT transform

        T = (I + tril(diag(b) (K K^T * D), -1))^-1,   U = T diag(b) V,   W = T diag(b exp(c)) K

        O = diag(exp(c)) Q S^T + (Q K^T * D) (U - W S^T)
        S' = exp(c_C) S + (U - W S^T)^T diag(exp(c_C - c)) K

    The inverse is applied by forward substitution: a product of powers would lose all digits where
    keys are alike. The backward pass computes a chunk again. Products have the backend's default
    precision of float32: on GPUs and TPUs states differ from those of single steps by its rounding
    (1e-3 of a state with TF32), which `policy/mismatch_k3` shows.
    """
    b, t, n, per_key = g.shape
    size = min(CHUNK, t)
    qs, ks = (jnp.moveaxis(_split_chunks(x, size), 2, 3) for x in (q, k))
    vs = jnp.moveaxis(_split_chunks(v, size), 2, 4)
    gs, rates = (jnp.moveaxis(_split_chunks(x, size), 2, 4) for x in (g, rate))
    lower = jnp.tril(jnp.ones((size, size), bool))

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(state: jax.Array, tokens: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, rate = tokens  # [B,N,C,K] twice, [B,N,G,C,V], [B,N,G,C] twice
        c = jnp.cumsum(g, -1)
        decay = jnp.exp(jnp.where(lower, c[..., :, None] - c[..., None, :], -jnp.inf))
        grown, rate = jnp.exp(c)[..., None], rate[..., None]
        system = rate * jnp.einsum("bnik,bnjk->bnij", k, k)[:, :, None] * decay
        keys = k[:, :, None]
        both = jnp.concatenate([rate * v, rate * grown * keys], -1)
        solved = jax.lax.linalg.triangular_solve(
            system, both, left_side=True, lower=True, unit_diagonal=True
        )
        u, w = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
        change = u - jnp.einsum("bngck,bngvk->bngcv", w, state)
        within = jnp.einsum("bnik,bnjk->bnij", q, k)[:, :, None] * decay
        out = jnp.einsum("bngck,bngvk->bngcv", grown * q[:, :, None], state)
        out = out + jnp.einsum("bngij,bngjv->bngiv", within, change)
        left = jnp.exp(c[..., -1:] - c)[..., None] * keys
        state = state * jnp.exp(c[..., -1])[..., None, None]
        return state + jnp.einsum("bngcv,bngck->bngvk", change, left), out

    state, out = jax.lax.scan(chunk, state, (qs, ks, vs, gs, rates))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, chunks, C, N, G, V]
    return out.reshape(b, -1, *out.shape[3:])[:, :t], state


def _split_chunks(x: jax.Array, size: int) -> jax.Array:
    """Splits x [B, T, ...] into [chunks, B, C, ...], with zeros behind the last token."""
    pad = [(0, 0)] * x.ndim
    pad[1] = (0, -x.shape[1] % size)
    padded = jnp.pad(x, pad)
    return jnp.moveaxis(padded.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)
