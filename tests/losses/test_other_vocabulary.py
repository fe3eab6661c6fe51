"""The losses from a teacher with another vocabulary: equal to the dense formulas over cells, by
finite differences, on every mesh."""

import itertools
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.losses import divergence as dense
from jaxrl.losses.cells import Cells
from jaxrl.losses.distill import divergence_from_hidden, topk_divergence_from_hidden
from jaxrl.losses.head import (
    logprobs_from_hidden,
    logprobs_in_cells_from_hidden,
    topk_from_hidden,
)
from jaxrl.losses.stretches import stretch_reverse_kl, stretch_sums
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

B, C, CHUNK = 4, 5, 3
V, VT, D, DT = 26, 37, 12, 10
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 1), (1, 2, 1, 2)]


def rand(*shape, seed):
    return np.random.default_rng(seed).normal(0, 0.6, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2)
THEIRS, THEIR_HEAD = rand(B, C, DT, seed=3), rand(VT, DT, seed=4)
MASK = np.random.default_rng(5).random((B, C)) < 0.7


def cells(with_others=True):
    """16 common tokens, and others in a cell of one of them or, if asked, in the last one."""
    draw = np.random.default_rng(7)
    common = draw.permutation(V)[:16]
    mine = draw.choice([*common, V] if with_others else common, V).astype(np.int32)
    mine[common] = common
    if with_others:
        mine[np.setdiff1d(np.arange(V), common)[:2]] = V
    theirs = draw.choice([*common, V if with_others else V + 1], VT).astype(np.int32)
    theirs[draw.permutation(VT)[:16]] = common
    return Cells(mine, theirs, V + 1)


CELLS = cells()
SAME = partial(np.testing.assert_allclose, atol=3e-5, rtol=3e-5)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def logprobs(hidden, head, temperature=1.3):
    return jax.nn.log_softmax(jnp.einsum("bcd,vd->bcv", hidden, head) / temperature, -1)


def in_cells(logp, cell_of, given=CELLS):
    """Log-probs of the cells that have a token; those left out have none."""
    numbers = np.unique(given.student)
    sums = [jax.nn.logsumexp(logp[..., cell_of == n], -1) for n in numbers]
    return jax.nn.log_softmax(jnp.stack(sums, -1), -1)


def loss_of(given=CELLS, *, beta, **settings):
    def loss(hidden, kernel):
        return divergence_from_hidden(
            hidden,
            kernel,
            THEIRS,
            THEIR_HEAD,
            MASK,
            beta=beta,
            temperature=1.3,
            chunk=CHUNK,
            cells=given,
            **settings,
        )[0]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def dense_loss(given=CELLS, *, beta):
    teacher = in_cells(logprobs(THEIRS, THEIR_HEAD), given.teacher, given)

    def loss(hidden, kernel):
        student = in_cells(logprobs(hidden, kernel), given.student, given)
        return dense.jsd(student, teacher, MASK, beta=beta)[0]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@cache
def on_one_device():
    return jax.device_get(loss_of(beta=0.4)(HIDDEN, HEAD))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("others", [True, False])
def test_the_loss_is_the_divergence_over_cells(beta, others):
    """Value and gradient; also where no token of the student is in the last cell."""
    given = cells(others)
    wanted = dense_loss(given, beta=beta)(HIDDEN, HEAD)
    jax.tree.map(SAME, loss_of(given, beta=beta)(HIDDEN, HEAD), wanted)


def test_with_a_cell_for_each_token_it_is_the_loss_of_one_vocabulary():
    order = np.random.default_rng(8).permutation(V)
    theirs = np.argsort(order)  # the teacher's token k is the student's theirs[k]
    given = Cells(np.arange(V), theirs, V + 1)

    def plain(hidden, kernel):
        head = THEIR_HEAD[:V][order]
        return divergence_from_hidden(hidden, kernel, THEIRS, head, MASK, beta=0.4)[0]

    def other(hidden, kernel):
        head = THEIR_HEAD[:V]
        settings = {"beta": 0.4, "cells": given}
        return divergence_from_hidden(hidden, kernel, THEIRS, head, MASK, **settings)[0]

    each = [jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(HIDDEN, HEAD) for f in (other, plain)]
    jax.tree.map(SAME, *each)


def test_the_spelling_of_a_text_is_left_to_the_student():
    """Tokens of a cell get the gradient by their shares in it: no share within a cell changes. A
    head that is the identity makes hidden states the logits."""
    given, logits = CELLS, rand(B, C, V, seed=9)

    @jax.jit
    @jax.grad
    def gradient(z):
        same = np.eye(V, dtype=np.float32)
        settings = {"beta": 0.4, "cells": given}
        return divergence_from_hidden(z, same, THEIRS, THEIR_HEAD, MASK, **settings)[0]

    slope, p = np.asarray(gradient(logits)), np.asarray(jax.jit(jax.nn.softmax)(logits))
    shared = [n for n in np.unique(given.student) if (given.student == n).sum() > 1]
    assert len(shared) > 1 and np.abs(slope[MASK]).max() > 1e-3
    for cell in shared:
        each = (slope / p)[MASK][:, given.student == cell]
        np.testing.assert_allclose(each, np.repeat(each[:, :1], each.shape[1], 1), atol=2e-5)


def test_the_gradient_is_that_of_finite_differences():
    value = loss_of(beta=0.4)
    _, (d_hidden, d_head) = value(HIDDEN, HEAD)
    for seed in range(3):
        a, b = rand(*HIDDEN.shape, seed=20 + seed), rand(*HEAD.shape, seed=30 + seed)
        up, _ = value(HIDDEN + 1e-2 * a, HEAD + 1e-2 * b)
        down, _ = value(HIDDEN - 1e-2 * a, HEAD - 1e-2 * b)
        slope = float((d_hidden * a).sum() + (d_head * b).sum())
        np.testing.assert_allclose((up - down) / 2e-2, slope, rtol=2e-2, atol=2e-2)


@cache
def in_all_cells():
    """The teacher's log-probs of all cells."""
    return jax.jit(lambda h, w: in_cells(logprobs(h, w), CELLS.teacher))(THEIRS, THEIR_HEAD)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_computes_what_one_device_does(shape):
    mesh = mesh_of(shape)
    jax.tree.map(SAME, loss_of(beta=0.4, mesh=mesh)(HIDDEN, HEAD), on_one_device())
    settings = {"cells": CELLS, "temperature": 1.3, "mesh": mesh}
    best = jax.jit(lambda h, w: topk_from_hidden(h, w, 4, **settings))(THEIRS, THEIR_HEAD)
    best, every = jax.device_get((best, in_all_cells()))
    SAME(best.logprobs, np.sort(every, -1)[..., ::-1][..., :4])
    SAME(
        np.take_along_axis(every, np.searchsorted(np.unique(CELLS.student), best.ids), -1),
        best.logprobs,
    )


def test_the_teacher_s_best_cells_and_a_tail_are_a_lower_bound():
    """Equal to the loss over all cells where all are sent."""
    count = len(np.unique(CELLS.student))

    def loss(hidden, k):
        best = topk_from_hidden(THEIRS, THEIR_HEAD, k, cells=CELLS, temperature=1.3)
        sent = best.ids, best.logprobs, best.tail_logprob
        return topk_divergence_from_hidden(
            hidden, HEAD, *sent, MASK, beta=0.4, temperature=1.3, cells=CELLS
        )[0]

    whole, (wanted, _) = on_one_device()
    each = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, slope = each(HIDDEN, count)
    SAME(value, whole)
    SAME(slope, wanted)
    assert each(HIDDEN, 3)[0] < whole


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_teacher_without_tokens_of_the_last_cell_leaves_the_loss_finite(beta):
    """Its probability there is 0, and the student's is not."""
    theirs = np.where(CELLS.teacher == V, CELLS.student[0], CELLS.teacher)
    value, slopes = loss_of(CELLS._replace(teacher=theirs), beta=beta)(HIDDEN, HEAD)
    assert np.isfinite(value) and value > 0
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 2, 1, 2)], ids=str)
def test_a_log_prob_within_a_cell_is_the_conditional_one(shape):
    """Value and gradient; the whole one where no cell is asked for."""
    draw = np.random.default_rng(10)
    tokens = draw.integers(0, V, (B, C))
    within = np.where(draw.random((B, C)) < 0.5, CELLS.student[tokens], -1)

    def found(hidden, head):
        given = {"mask": MASK, "temperature": 1.3, "chunk": CHUNK, "mesh": mesh_of(shape)}
        each = logprobs_in_cells_from_hidden(hidden, head, tokens, CELLS.student, within, **given)
        return jnp.where(MASK, each[0], 0).sum(), each

    def wanted(hidden, head):
        logp = logprobs(hidden, head)
        own = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
        members = (CELLS.student == within[..., None]) | (within < 0)[..., None]
        conditional = own - jax.nn.logsumexp(jnp.where(members, logp, -jnp.inf), -1)
        return jnp.where(MASK, conditional, 0).sum(), (conditional, own)

    compare = [
        jax.device_get(jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD))
        for f in (found, wanted)
    ]
    ((value, each), slopes), ((same, both), expected) = compare
    SAME(value, same)
    jax.tree.map(SAME, slopes, expected)
    for got, want in zip(each, both, strict=True):
        SAME(np.where(MASK, got, 0), np.where(MASK, want, 0))
    plain = jax.jit(partial(logprobs_from_hidden, temperature=1.3))(HIDDEN, HEAD, tokens)
    SAME(np.where(MASK, each[1], 0), np.where(MASK, plain, 0))


def test_what_needs_all_logits_at_once_is_refused():
    for settings in ({"lean": True}, {"mesh": mesh_of((1, 1, 2))}):
        with pytest.raises(ValueError, match="all logits"):
            loss_of(beta=0.4, **settings)(HIDDEN, HEAD)


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
    starts, zero = np.ones((B, C), bool), jnp.zeros((B, C))

    def by_stretch(student):
        own = student, jax.lax.stop_gradient(student)
        return stretch_reverse_kl(*own, teacher, sampler, starts, MASK, zero, ratio_cap=1.2)[0]

    def by_token(student):
        given = {"sampler_logprobs": sampler, "ratio_cap": 1.2}
        return dense.sampled_reverse_kl(student, teacher, MASK, **given)[0]

    each = [jax.jit(jax.value_and_grad(f))(student) for f in (by_stretch, by_token)]
    jax.tree.map(SAME, *each)


@pytest.mark.parametrize("baseline", [0.0, 1.7])
def test_the_estimate_is_unbiased(baseline):
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
        b = jnp.full((1, 2), baseline)

        def one(own, theirs):
            sums, sampler = jnp.full((1, 2), theirs), jax.lax.stop_gradient(own[None])
            return stretch_reverse_kl(own[None], sampler, sums, sampler, starts, mask, b)[0]

        return (share * jax.vmap(one)(own, theirs)).sum()

    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (expected, exact)]
    jax.tree.map(SAME, *(f(first, second) for f in both))
