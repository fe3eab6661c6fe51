"""Losses of distillation from logits [B, T, V], which `jaxrl.losses.distill` never holds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.losses.divergence import (
    MIN,
    EntropyAware,
    generalised_jsd,
    masked_sum,
)


def log_softmax(
    logits: Float[Array, "*rows V"], temperature: float = 1.0
) -> Float[Array, "*rows V"]:
    """Computes log-probs in float32, nats, at `temperature`; logits of -inf become `MIN`."""
    return jnp.maximum(jax.nn.log_softmax(logits.astype(jnp.float32) / temperature), MIN)


def jsd(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes the generalised Jensen-Shannon divergence of `generalised_jsd`, summed over the
    tokens of `mask`.

    Args:
        student_logits, teacher_logits: aligned (no shift inside), over the same V tokens. No
            gradient flows to the teacher.
        mask: True at the positions that train.
        beta: 0 KL(P||Q), 1 KL(Q||P), between: the mixture's weight of the teacher.
        temperature: divides both logit sets.

    Returns:
        (sum in nats, number of tokens).
    """
    # 0 * NaN is NaN: a gradient of 0 is not enough to keep masked values out of the way.
    student, teacher = (
        log_softmax(jnp.where(mask[..., None], x, 0), temperature)
        for x in (student_logits, jax.lax.stop_gradient(teacher_logits))
    )
    value, _ = generalised_jsd(student, teacher, beta)
    return masked_sum(value, mask), mask.astype(jnp.float32).sum()


def kept(logits: Array, mask: Array) -> Array:
    return jnp.where(mask[..., None], logits, 0)


def with_tail(
    logprobs: Float[Array, "*rows V"], ids: Int[Array, "*rows K"]
) -> Float[Array, "*rows K+1"]:
    """Log-probs of the K ids, and, last, the log of the probability of all the other tokens.

    The tail is a logsumexp over the others: log(1 - sum p) cancels in float32.
    """
    chosen = jnp.take_along_axis(logprobs, ids, -1)
    others = jnp.put_along_axis(logprobs, ids, MIN, -1, inplace=False)
    tail = jnp.maximum(jax.nn.logsumexp(others, -1, keepdims=True), MIN)
    return jnp.concatenate([chosen, tail], -1)


def topk_divergence(
    student_logits: Float[Array, "B T V"],
    ids: Int[Array, "B T K"],
    teacher_logprobs: Float[Array, "B T K"],
    teacher_tail: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float,
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`jsd` over K + 1 outcomes: the K ids, and the tail of all the others. The teacher's log-probs
    are at `temperature` already."""
    student = with_tail(log_softmax(kept(student_logits, mask), temperature), ids)
    teacher = jnp.concatenate([teacher_logprobs, teacher_tail[..., None]], -1)
    teacher = jax.lax.stop_gradient(jnp.maximum(teacher, MIN))
    value, _ = generalised_jsd(student, teacher, beta)
    return masked_sum(value, mask), mask.astype(jnp.float32).sum()


def entropy_aware(
    student_logits: Float[Array, "B T V"],
    teacher_logits: Float[Array, "B T V"],
    mask: Bool[Array, "B T"],
    *,
    term: EntropyAware,
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`EntropyAware`'s term over the tokens of `mask`; they all count, gated or not."""
    teacher = jax.lax.stop_gradient(log_softmax(kept(teacher_logits, mask), temperature))
    entropy = -jnp.where(teacher > MIN, jnp.exp(teacher) * teacher, 0).sum(-1)
    _, ids = jax.lax.top_k(teacher, term.top_k)
    student = with_tail(log_softmax(kept(student_logits, mask), temperature), ids)
    value, _ = generalised_jsd(student, with_tail(teacher, ids), beta=0)
    gate = entropy >= term.threshold
    return term.coef * masked_sum(value, mask & gate), mask.astype(jnp.float32).sum()
