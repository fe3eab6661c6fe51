"""Losses on logits c tanh(z / c) are the dense ones, value and gradient, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_losses as dense
import pytest
from cases import and_slow
from numpy_losses import log_softmax
from tiny_models import make_mesh

from jaxrl.losses.distill import divergence_from_hidden, topk_divergence_from_hidden
from jaxrl.losses.head import (
    TeacherMixture,
    logprobs_and_entropy_from_hidden,
    logprobs_at,
    topk_from_hidden,
)

B, C, D, DT, V, K = 4, 5, 12, 10, 50, 6
"""V divides by neither 4 nor 8: a mesh pads it with columns that have no logit."""
CAP, THEIRS, T = 1.5, 4.0, 1.3


def rand(*shape, seed, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2, scale=0.6)
TEACHER, TEACHER_HEAD = rand(B, C, DT, seed=3), rand(V, DT, seed=4, scale=0.6)
OTHER, OTHER_HEAD = rand(B, C, D, seed=7), rand(V, D, seed=8, scale=0.6)
HALF = np.full((B, C, 2), 0.5, np.float32)
TOKENS = np.random.default_rng(5).integers(0, V, (B, C))
MASK = np.random.default_rng(6).random((B, C)) < 0.7


def capped(logits, cap):
    return logits if cap is None else cap * np.tanh(logits / cap)


def logits(hidden, head):
    return hidden.astype(np.float64) @ head.astype(np.float64).T


def dense_loss(name, z, theirs):
    """Of each token, from the student's logits."""
    student, teacher = log_softmax(capped(z, CAP), T), capped(logits(TEACHER, TEACHER_HEAD), theirs)
    teacher = log_softmax(teacher, T)
    if name == "topk":
        ids = np.argsort(-teacher, -1)[..., :K]
        return dense.jsd(dense.with_tail(student, ids), dense.with_tail(teacher, ids), 0.3)
    if name == "logprobs":
        own = np.take_along_axis(student, TOKENS[..., None], -1)[..., 0]
        return own - 0.3 * (np.exp(student) * student).sum(-1)
    if name == "mixture":
        other = log_softmax(logits(OTHER, OTHER_HEAD), T)
        teacher = np.logaddexp(other, teacher) + np.log(0.5)
    return dense.jsd(student, teacher, 0.3)


def loss(name, hidden, head, theirs, mesh):
    options = {"temperature": T, "chunk": 3, "mesh": mesh}
    if name == "topk":
        sent = topk_from_hidden(TEACHER, TEACHER_HEAD, K, softcap=theirs, **options)[:3]
        options |= {"softcap": CAP, "beta": 0.3}
        return topk_divergence_from_hidden(hidden, head, *sent, MASK, **options)[0]
    if name == "logprobs":
        options |= {"softcap": CAP, "mask": MASK}
        own, entropy = logprobs_and_entropy_from_hidden(hidden, head, TOKENS, **options)
        return jnp.where(MASK, own + 0.3 * entropy, 0).sum()
    options |= {"softcap": CAP, "teacher_softcap": theirs, "lean": name == "lean", "beta": 0.3}
    if name == "mixture":
        options |= {
            "teacher_softcap": (None, theirs),
            "mixture": TeacherMixture("arithmetic", HALF),
        }
        both = (OTHER, TEACHER), (OTHER_HEAD, TEACHER_HEAD)
        return divergence_from_hidden(hidden, head, *both, MASK, **options)[0]
    return divergence_from_hidden(hidden, head, TEACHER, TEACHER_HEAD, MASK, **options)[0]


def both(f):
    return jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(HIDDEN, HEAD)


def expected_of(name, theirs):
    return dense.value_and_gradients(lambda z: dense_loss(name, z, theirs), HIDDEN, HEAD, MASK)


MESH = (1, 2, 4)


@pytest.mark.parametrize(
    ("name", "theirs", "shape"),
    and_slow(
        [
            *(("fused", THEIRS, MESH), ("fused", None, None)),
            *(("lean", THEIRS, MESH), ("mixture", THEIRS, None)),
            *(("topk", THEIRS, MESH), ("logprobs", None, None)),
        ],
        [
            *(("fused", THEIRS, None), ("fused", None, MESH)),
            *(("lean", THEIRS, None), ("mixture", THEIRS, MESH)),
            *(("topk", THEIRS, None), ("logprobs", None, MESH)),
        ],
    ),
    ids=str,
)
def test_value_and_gradient_are_those_of_capped_logits(name, theirs, shape):
    mesh = None if shape is None else make_mesh(*shape)
    found, expected = both(lambda h, w: loss(name, h, w, theirs, mesh)), expected_of(name, theirs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_each_teacher_of_a_mixture_has_its_own_cap():
    """One of the two has none."""
    weights = np.tile(np.array([0.3, 0.7], np.float32), (B, C, 1))
    own = log_softmax(logits(HIDDEN, HEAD))
    theirs = log_softmax(capped(logits(TEACHER, TEACHER_HEAD), THEIRS))
    both = np.logaddexp(own + np.log(0.3), theirs + np.log(0.7))
    expected = np.take_along_axis(both, TOKENS[..., None], -1)
    models = (HIDDEN, TEACHER), (HEAD, TEACHER_HEAD), TOKENS[..., None]
    mixture = TeacherMixture("arithmetic", weights)
    found, _ = jax.jit(lambda: logprobs_at(*models, mixture=mixture, softcap=(None, THEIRS)))()
    np.testing.assert_allclose(found, expected, atol=1e-5)
