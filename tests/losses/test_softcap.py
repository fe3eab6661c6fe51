"""Losses on logits c tanh(z / c) are the dense ones, value and gradient, on any mesh."""

from functools import cache

import dense_losses as dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from dense_losses import log_softmax
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
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2, scale=0.6)
TEACHER, TEACHER_HEAD = rand(B, C, DT, seed=3), rand(V, DT, seed=4, scale=0.6)
OTHER, OTHER_HEAD = rand(B, C, D, seed=7), rand(V, D, seed=8, scale=0.6)
HALF = jnp.full((B, C, 2), 0.5)
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, V, (B, C)))
MASK = jnp.asarray(np.random.default_rng(6).random((B, C)) < 0.7)


def capped(hidden, head, cap):
    z = jnp.einsum("bcd,vd->bcv", hidden, head)
    return z if cap is None else cap * jnp.tanh(z / cap)


def dense_loss(name, hidden, head, theirs):
    student, teacher = capped(hidden, head, CAP), capped(TEACHER, TEACHER_HEAD, theirs)
    if name == "topk":
        ids = jax.lax.top_k(teacher, K)[1]
        sent = jnp.take_along_axis(log_softmax(teacher, T), ids, -1)
        tail = jnp.log(1 - jnp.exp(sent).sum(-1))
        return dense.topk_divergence(student, ids, sent, tail, MASK, beta=0.3, temperature=T)[0]
    if name == "logprobs":
        logprobs = log_softmax(student, T)
        own = jnp.take_along_axis(logprobs, TOKENS[..., None], -1)[..., 0]
        return jnp.where(MASK, own - 0.3 * (jnp.exp(logprobs) * logprobs).sum(-1), 0).sum()
    if name == "mixture":
        each = capped(OTHER, OTHER_HEAD, None), teacher
        teacher = T * jnp.logaddexp(*(log_softmax(z, T) + jnp.log(0.5) for z in each))
    return dense.jsd(student, teacher, MASK, beta=0.3, temperature=T)[0]


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


@cache
def expected_of(name, theirs):
    return both(lambda h, w: dense_loss(name, h, w, theirs))


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
    weights = jnp.broadcast_to(jnp.array([0.3, 0.7]), (B, C, 2))
    own, theirs = log_softmax(capped(HIDDEN, HEAD, None)), capped(TEACHER, TEACHER_HEAD, THEIRS)
    both = jnp.logaddexp(own + jnp.log(0.3), log_softmax(theirs) + jnp.log(0.7))
    expected = jnp.take_along_axis(both, TOKENS[..., None], -1)
    models = (HIDDEN, TEACHER), (HEAD, TEACHER_HEAD), TOKENS[..., None]
    mixture = TeacherMixture("arithmetic", weights)
    found, _ = logprobs_at(*models, mixture=mixture, softcap=(None, THEIRS))
    np.testing.assert_allclose(found, expected, atol=1e-5)
