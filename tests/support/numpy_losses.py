"""Losses from logits in float64 by numpy, and their gradients, so that nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def log_softmax(logits: Array, temperature: float = 1.0) -> Array:
    """Log-probs in float64 of logits of any dtype, or complex ones of complex logits."""
    given = np.asarray(logits)
    scaled = given.astype(np.result_type(given, np.float64)) / temperature
    scaled = scaled - scaled.real.max(-1, keepdims=True)
    return scaled - log_sum(scaled)


def log_sum(logs: Array) -> Array:
    """The log of the sum of exponentials along the last dim, [..., 1]."""
    peak = logs.real.max(-1, keepdims=True)
    return peak + np.log(np.exp(logs - peak).sum(-1, keepdims=True))


def jsd(student: Array, teacher: Array, beta: float) -> Array:
    """The divergence of each row of log-probs by its definition: M = beta P + (1 - beta) Q."""
    p, q = np.exp(teacher), np.exp(student)
    if beta == 0:
        return (p * (teacher - student)).sum(-1)
    if beta == 1:
        return (q * (student - teacher)).sum(-1)
    m = log_sum(np.stack([teacher + np.log(beta), student + np.log(1 - beta)], -1))[..., 0]
    return beta * (p * (teacher - m)).sum(-1) + (1 - beta) * (q * (student - m)).sum(-1)


def with_tail(logprobs: Array, ids: Array) -> Array:
    """Log-probs of the ids, and, last, the log of the probability of all the other tokens."""
    others = logprobs.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    chosen = np.take_along_axis(logprobs, ids, -1)
    return np.concatenate([chosen, log_sum(others)], -1)


def entropy_aware(student: Array, teacher: Array, term: Any) -> Array:
    """The value of `EntropyAware`'s term for each row of log-probs."""
    ids = np.argsort(-teacher, -1)[..., : term.top_k]
    value = jsd(with_tail(student, ids), with_tail(teacher, ids), 0)
    gate = -(np.exp(teacher) * teacher).sum(-1) >= term.threshold
    return term.coef * np.where(gate, value, 0)


def value_and_gradients(
    of_logits: Callable[[Array], Array], hidden: Array, head: Array, mask: Array
) -> tuple[float, tuple[Array, Array]]:
    """The sum of a loss over the tokens of `mask`, and its gradients with respect to hidden states
    and head.

    Args:
        of_logits: the loss of each token [B, C] from logits [B, C, V], a token's from its own: it
            is analytic, and an imaginary step in one direction tells its slope there, exactly.
    """
    hidden, head = (np.asarray(x, np.float64) for x in (hidden, head))
    logits, step = hidden @ head.T, 1e-30
    slope = np.zeros_like(logits)
    for v in range(logits.shape[-1]):
        moved = logits.astype(complex)
        moved[..., v] += 1j * step
        slope[..., v] = np.where(mask, of_logits(moved).imag / step, 0)
    value = float(of_logits(logits)[mask].sum())
    return value, (slope @ head, np.einsum("bcv,bcd->vd", slope, hidden))
