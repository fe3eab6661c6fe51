"""Softmax attention in terms: each is over some of the keys, and the log-sum-exp of its scores says
how much it counts (Flash-Decoding; Hydragen, arXiv 2402.05099, for prompts that samples share)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Term = tuple[jax.Array, jax.Array]
"""Of queries [R,KV,M,H]: what they read [R,KV,M,H] float32, and the log-sum-exp of their scores
[R,KV,M] float32, which is `LOWEST` or near it where there was no key."""
LOWEST = -1e30
"""Score of a masked key: finite, so that no difference of two is NaN."""


def by_products(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> Term:
    """Computes the term of q [R,KV,M,H] over k, v [R,KV,S,H] where mask [R,M,S] or [R,1,S]."""
    scores = jnp.einsum("rkmh,rksh->rkms", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None], scores * q.shape[-1] ** -0.5, LOWEST)
    top = scores.max(-1)
    raised = jnp.exp(scores - top[..., None])
    mass = raised.sum(-1)
    read = jnp.einsum(
        "rkms,rksh->rkmh", raised.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return read / mass[..., None], jnp.log(mass) + top


def merge(terms: Sequence[Term], sinks: jax.Array | None = None) -> jax.Array:
    """Merges terms to attention [R,KV,M,H] float32 over the keys of all.

    Args:
        sinks: [KV*M], as of `attention.Attend`: counted once, beside the keys of all terms.
    """
    each = [of for _, of in terms]
    if sinks is not None:
        _, heads, queries = each[0].shape
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(heads, queries), each[0].shape)
        each.append(sink)
    shares = jax.nn.softmax(jnp.stack(each), 0)
    reads = [share[..., None] * read for share, (read, _) in zip(shares, terms, strict=False)]
    return sum(reads[1:], reads[0])
