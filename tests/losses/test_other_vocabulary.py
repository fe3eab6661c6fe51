"""The losses from a teacher with another vocabulary: equal to the dense formulas over the tokens
that both have and one outcome more, by finite differences, on every mesh."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses import divergence as dense
from jaxrl.losses.distill import SharedVocabulary, divergence_from_hidden
from jaxrl.losses.head import logprob_outside, topk_from_hidden
from jaxrl.losses.stretches import stretch_reverse_kl, stretch_sums
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

B, C, CHUNK = 4, 5, 3
V, VT, D, DT = 26, 37, 12, 10
MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]


def rand(*shape, seed):
    return np.random.default_rng(seed).normal(0, 0.6, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2)
THEIRS, THEIR_HEAD = rand(B, C, DT, seed=3), rand(VT, DT, seed=4)
MASK = np.random.default_rng(5).random((B, C)) < 0.7
TO_TEACHER = np.random.default_rng(6).permutation(VT)[:V]
TO_TEACHER[::4] = -1
SAME = partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def logprobs(hidden, head, temperature=1.3):
    return jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", hidden, head) / temperature, -1)


def outcomes(logp, ids):
    """Log-probs of these tokens, and of all others together."""
    others = np.setdiff1d(np.arange(logp.shape[-1]), ids)
    tail = jax.nn.logsumexp(logp[..., others], -1, keepdims=True) if len(others) else None
    return logp[..., ids] if tail is None else jnp.concatenate([logp[..., ids], tail], -1)


def loss_of(to_teacher, *, beta, **settings):
    known = to_teacher >= 0
    theirs = np.zeros(VT, bool)
    theirs[to_teacher[known]] = True
    outside = logprob_outside(THEIRS, THEIR_HEAD, theirs, temperature=1.3, chunk=CHUNK)
    head = np.where(known[:, None], THEIR_HEAD[to_teacher], 0)
    shared = SharedVocabulary(known, outside)

    def loss(hidden, kernel):
        total, _, _ = divergence_from_hidden(
            hidden,
            kernel,
            THEIRS,
            head,
            MASK,
            beta=beta,
            temperature=1.3,
            chunk=CHUNK,
            shared=shared,
            **settings,
        )
        return total

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def dense_loss(to_teacher, beta):
    ids = np.flatnonzero(to_teacher >= 0)
    teacher = outcomes(logprobs(THEIRS, THEIR_HEAD), to_teacher[ids])
    if len(ids) == V:  # the student has no other token: the teacher's choice among the shared ones
        teacher = jax.nn.log_softmax(teacher[..., :V], -1)

    def loss(hidden, kernel):
        student = outcomes(logprobs(hidden, kernel), ids)
        return dense.jsd(student, teacher, MASK, beta=beta)[0]

    return jax.value_and_grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("every", [False, True])
def test_the_loss_is_that_of_the_shared_tokens_and_one_outcome(beta, lean, every):
    """Value and gradient; `every` token of the student is one of the teacher's too, or not."""
    to_teacher = np.random.default_rng(7).permutation(VT)[:V] if every else TO_TEACHER
    wanted = dense_loss(to_teacher, beta)(HIDDEN, HEAD)
    found = loss_of(to_teacher, beta=beta, lean=lean)(HIDDEN, HEAD)
    jax.tree.map(SAME, found, wanted)


def test_the_gradient_is_that_of_finite_differences():
    value = loss_of(TO_TEACHER, beta=0.4)
    _, (d_hidden, d_head) = value(HIDDEN, HEAD)
    for seed in range(3):
        a, b = rand(*HIDDEN.shape, seed=20 + seed), rand(*HEAD.shape, seed=30 + seed)
        up, _ = value(HIDDEN + 1e-2 * a, HEAD + 1e-2 * b)
        down, _ = value(HIDDEN - 1e-2 * a, HEAD - 1e-2 * b)
        slope = float((d_hidden * a).sum() + (d_head * b).sum())
        np.testing.assert_allclose((up - down) / 2e-2, slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("lean", [False, True])
def test_a_mesh_computes_what_one_device_does(shape, lean):
    """Also where the mesh pads the vocabulary of the student, 26, or of the teacher, 37."""
    mesh = mesh_of(shape)
    wanted = loss_of(TO_TEACHER, beta=0.4, lean=lean)(HIDDEN, HEAD)
    found = loss_of(TO_TEACHER, beta=0.4, lean=lean, mesh=mesh)(HIDDEN, HEAD)
    jax.tree.map(SAME, found, wanted)
    known = np.arange(VT) % 3 > 0
    outside = [logprob_outside(THEIRS, THEIR_HEAD, known, mesh=m) for m in (None, mesh)]
    SAME(outside[1], outside[0])
    best = topk_from_hidden(THEIRS, THEIR_HEAD, 4, shared=known, mesh=mesh)
    dense_best = outcomes(logprobs(THEIRS, THEIR_HEAD, 1.0), np.flatnonzero(known))[..., :-1]
    SAME(best.logprobs, np.sort(dense_best, -1)[..., ::-1][..., :4])
    assert known[np.asarray(best.ids)].all()


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_teacher_that_shares_all_its_tokens_leaves_the_loss_finite(beta):
    """Its probability of any other token is 0, and the student's is not."""
    to_teacher = np.full(V, -1)
    to_teacher[:20] = np.arange(20)
    known = np.zeros(V, bool)
    known[:20] = True
    nothing = jnp.full((B, C), -1e30)

    def loss(hidden):
        given = SharedVocabulary(known, nothing)
        head = np.pad(THEIR_HEAD[:20], ((0, 6), (0, 0)))
        return divergence_from_hidden(hidden, HEAD, THEIRS, head, MASK, beta=beta, shared=given)[0]

    value, slope = jax.value_and_grad(loss)(HIDDEN)
    assert np.isfinite(value) and np.isfinite(slope).all() and value > 0


def test_a_stretch_has_the_sum_of_its_tokens():
    values = jnp.asarray(rand(2, 6, seed=8))
    starts = np.array([[1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1]], bool)
    found = stretch_sums(values, starts)
    for row, ends in enumerate([(0, 3, 4, 6), (0, 1, 5, 6)]):
        for first, last in itertools.pairwise(ends):
            SAME(found[row, first:last], np.full(last - first, values[row, first:last].sum()))
    # Every token's log-prob is in one stretch: the sum over all is conserved.
    SAME((found * starts).sum(-1)[0], values.sum(-1)[0])


def test_stretches_of_one_token_are_the_sampled_reverse_kl():
    student, teacher, sampler = (jnp.asarray(-abs(rand(B, C, seed=k))) for k in (9, 10, 11))
    starts = np.ones((B, C), bool)

    def by_stretch(student):
        return stretch_reverse_kl(student, teacher, sampler, starts, MASK, ratio_cap=1.2)[0]

    def by_token(student):
        given = {"sampler_logprobs": sampler, "ratio_cap": 1.2}
        return dense.sampled_reverse_kl(student, teacher, MASK, **given)[0]

    wanted = jax.value_and_grad(by_token)(student)
    jax.tree.map(SAME, jax.value_and_grad(by_stretch)(student), wanted)


def test_the_estimate_is_unbiased():
    """Its expectation over all stretches of two tokens, each drawn with its probability under the
    student, has the value and the gradient of KL(student || teacher) of the stretch."""
    first, second = jnp.asarray(rand(3, seed=12)), jnp.asarray(rand(3, 3, seed=13))
    theirs = jax.nn.log_softmax(jnp.asarray(rand(9, seed=14)))  # spelt in tokens of its own

    def tokens(first, second):
        """[9, 2] log-probs of the two tokens of each stretch."""
        each = jax.nn.log_softmax(first)[:, None], jax.nn.log_softmax(second, -1)
        return jnp.stack([jnp.broadcast_to(x, (3, 3)).reshape(9) for x in each], -1)

    def exact(first, second):
        student = tokens(first, second).sum(-1)
        return (jnp.exp(student) * (student - theirs)).sum()

    def expected(first, second):
        own = tokens(first, second)
        share = jax.lax.stop_gradient(jnp.exp(own.sum(-1)))
        starts, mask = np.array([[True, False]]), np.ones((1, 2), bool)

        def one(own, theirs):
            sums, sampler = jnp.full((1, 2), theirs), jax.lax.stop_gradient(own[None])
            return stretch_reverse_kl(own[None], sums, sampler, starts, mask)[0]

        return (share * jax.vmap(one)(own, theirs)).sum()

    wanted = jax.value_and_grad(exact, argnums=(0, 1))(first, second)
    jax.tree.map(SAME, jax.value_and_grad(expected, argnums=(0, 1))(first, second), wanted)
