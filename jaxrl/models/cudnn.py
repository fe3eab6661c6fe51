"""Attention in cuDNN's kernel, over rows whose real tokens are the first ones: no mask is an array.

Uses what jax does not make public: a backward pass that is given the normaliser (`attend_groups`),
and the checks that ask this process for its GPUs (`pretend_gpu`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial, reduce

import jax
import jax.numpy as jnp

from jaxrl.process.json_types import Keywords
from jaxrl.types import Tree

try:
    from jax._src.cudnn import fused_attention_stablehlo as _private
except ImportError:  # another version of jax
    _private = None  # type: ignore[assignment]

EVEN = 2
"""jax refuses other widths where a gradient is wanted, as if there were a bias."""
BACKWARD = "_dot_product_attention_bwd_p_wrapper"
JOINS = all(
    hasattr(_private, name)
    for name in ("dot_product_attention", "MaskType", "AttentionLayout", BACKWARD)
)
"""Whether this jax has what `attend_groups` needs."""
VERSION = 91100
"""Version of cuDNN that `pretend_gpu` shows: 9.11 takes all GPUs that jax knows."""
Pair = tuple[jax.Array, jax.Array]
"""Keys and values, or results and their normalisers."""


def attend_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    causal: bool,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax attention of q [B,T,N,H] over k, v [B,T,KV,H] within rows of `lengths` [B]
    int32, which are at least 1; zeros beyond them.

    No scores or mask are kept, and what lies beyond a length, the diagonal or the `window` of a
    causal row (itself and the window - 1 tokens before it) is not computed.

    Args:
        sinks: [N], of causal rows.
    """
    width = q.shape[1]
    if width % EVEN:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    if sinks is not None:
        assert causal, "only decoders have sinks"
        return attend_groups(q, None, (k, v), None, lengths, sinks, window)[:, :width]
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out[:, :width]


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def attend_groups(
    q: jax.Array,
    shared: Pair | None,
    own: Pair,
    shared_lengths: jax.Array | None,
    lengths: jax.Array,
    sinks: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Computes softmax attention of B = P * G rows causally over their own keys, and over those of
    their group and the sinks of their heads where there are any; zeros beyond the lengths where
    only sinks are.

    Two calls, joined by their normalisers (FlashAttention-2, arXiv 2307.08691, section 3.1): with
    l = log(exp l_1 + exp l_2), the output is exp(l_1 - l) o_1 + exp(l_2 - l) o_2. The backward pass
    of either call is given l and the joined output, and so has its part of the whole gradient. (The
    public `return_residual` rounds l to bfloat16 and drops its gradient.)

    Args:
        q: [B,C,N,H].
        shared: keys and values [P,W,KV,H]; row b of q belongs to row b // G of them.
        own: keys and values [B,C,KV,H].
        shared_lengths: [P] int32, at least 1.
        lengths: [B] int32, at least 1.
        sinks: [N], whose exponentials l contains too.
        window: as in `attend_rows`, of rows without shared keys.
    """
    return _forward(q, shared, own, shared_lengths, lengths, sinks, window)[0]


def _forward(
    q: jax.Array,
    shared: Pair | None,
    own: Pair,
    shared_lengths: jax.Array | None,
    lengths: jax.Array,
    sinks: jax.Array | None,
    window: int | None,
) -> tuple[jax.Array, Tree]:
    terms: list[Pair] = []
    if shared is not None:
        assert shared_lengths is not None
        groups, group = len(shared[0]), len(q) // len(shared[0])
        together = q.reshape(groups, -1, *q.shape[2:])
        whole = jnp.full(groups, together.shape[1], jnp.int32)
        outer, outer_l = _block(together, *shared, whole, shared_lengths, causal=False)
        # [P,N,G*C] -> [P*G,N,C]
        by_row = outer_l.reshape(groups, q.shape[2], group, -1).swapaxes(1, 2)
        terms.append((outer.reshape(q.shape), by_row.reshape(len(q), q.shape[2], -1)))
    inner, inner_l = _block(q, *own, lengths, lengths, causal=True, window=window)
    real = jnp.arange(q.shape[1])[None] < lengths[:, None]
    inner_l = jnp.where(real[:, None], inner_l, -jnp.inf)
    terms.append((jnp.where(real[:, :, None, None], inner, 0), inner_l))
    joined = reduce(jnp.logaddexp, [part_l for _, part_l in terms])
    if sinks is not None:
        joined = jnp.logaddexp(joined, sinks.astype(jnp.float32)[None, :, None])

    def weighed(part: jax.Array, part_l: jax.Array) -> jax.Array:
        share = jnp.exp(part_l - joined).swapaxes(1, 2)[..., None]
        return share * part.astype(jnp.float32)

    out = reduce(jnp.add, [weighed(*term) for term in terms]).astype(q.dtype)
    return out, (q, shared, own, shared_lengths, lengths, sinks, out, joined)


def _backward(window: int | None, kept: Tree, d_out: jax.Array) -> tuple[Tree, ...]:
    q, shared, (k, v), shared_lengths, lengths, sinks, out, joined = kept
    results = joined, out, d_out
    how: Keywords = {"causal": True, "window": window}
    d_q, *d_own = _block_gradients(q, k, v, lengths, lengths, results, **how)
    d_shared = None
    if shared is not None:
        groups, group = len(shared[0]), len(q) // len(shared[0])
        q_all, out_all, d_all = (x.reshape(groups, -1, *q.shape[2:]) for x in (q, out, d_out))
        whole, (k, v) = jnp.full(groups, q_all.shape[1], jnp.int32), shared
        # [P*G,N,C] -> [P,N,G*C]
        ends = joined.reshape(groups, group, q.shape[2], -1).swapaxes(1, 2)
        ends = ends.reshape(groups, q.shape[2], -1)
        results = ends, out_all, d_all
        d_outer, *d_keys = _block_gradients(
            q_all, k, v, whole, shared_lengths, results, causal=False
        )
        d_q, d_shared = d_outer.reshape(q.shape) + d_q, tuple(d_keys)
    d_sinks = None
    if sinks is not None:
        # The gradient of a head's sink: the sum over real tokens of -exp(sink - l) (out . d_out).
        products = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        share = jnp.exp(sinks.astype(jnp.float32)[None, :, None] - joined)
        real = jnp.arange(out.shape[1])[None, None] < lengths[:, None, None]
        d_sinks = -jnp.where(real, share * products, 0).sum((0, 2)).astype(sinks.dtype)
    return d_q, d_shared, tuple(d_own), None, None, d_sinks


attend_groups.defvjp(_forward, _backward)


def _block(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the output [B,T,N,H] and the log-sum-exp of the scores [B,N,T] float32, of one
    call."""
    return _private.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=queries,
        kv_seqlen=keys,
        scale=q.shape[-1] ** -0.5,
        mask_type=_mask(causal),
        sliding_window_length=window,
        return_residual=True,
    )


def _block_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    results: tuple[jax.Array, ...],
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of q, k and v from the normaliser l [B,N,T], the output and its
    gradient, where each probability is exp(score - l)."""
    unused = jnp.zeros(0, q.dtype)
    offsets_and_pages = (unused,) * 4
    known = inspect.signature(_private._dot_product_attention_bwd_impl).parameters
    newer = {"score_mod": None} if "score_mod" in known else {}  # jax 0.12
    return getattr(_private, BACKWARD).bind(
        *(q, k, v, unused, queries, keys, *offsets_and_pages, *results),
        scale=q.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, and no gradient of it
        mask_type=_mask(causal),
        layout=_private.AttentionLayout.BTNH.value,
        sliding_window_length=window,
        **newer,
    )


def _mask(causal: bool) -> _private.MaskType:
    return _private.MaskType.PADDING_CAUSAL if causal else _private.MaskType.PADDING


@contextlib.contextmanager
def pretend_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Makes jax's checks, while the context is open, take this process to have a GPU of this
    compute capability."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers = {
        "check_cudnn_version": lambda: VERSION,
        "check_compute_capability": lambda wanted: capability >= numbers(wanted),
        "is_cuda_compute_capability_equal": lambda wanted: capability == numbers(wanted),
    }
    asked = {name: getattr(_private, name) for name in answers if hasattr(_private, name)}
    for name in asked:
        setattr(_private, name, answers[name])
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(_private, name, function)
