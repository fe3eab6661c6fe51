"""Several teachers as one: equal to the dense formulas, by finite differences, on every mesh."""

import math
from functools import cache, partial

import jax
import numpy as np
import numpy_losses as dense
import pytest
from cases import and_slow

from jaxrl.losses.distill import divergence_from_hidden
from jaxrl.losses.divergence import EntropyAware
from jaxrl.losses.head import TeacherMixture, logprobs_at, topk_from_hidden
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

B, C, V, CHUNK = 4, 5, 50, 3
WIDTHS, ROWS = (10, 7, 12), (53, 50, 61)
KINDS = ("arithmetic", "geometric")
TERM = EntropyAware(coef=0.7, threshold=2.4, top_k=4)


def rand(*shape, seed):
    return np.random.default_rng(seed).normal(0, 0.6, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, 12, seed=1), rand(V, 12, seed=2)
TEACHERS = tuple(rand(B, C, width, seed=3 + k) for k, width in enumerate(WIDTHS))
HEADS = tuple(
    rand(rows, width, seed=7 + k) for k, (rows, width) in enumerate(zip(ROWS, WIDTHS, strict=True))
)
MASK = np.random.default_rng(11).random((B, C)) < 0.7
SHARES = np.random.default_rng(12).dirichlet(np.ones(3), (B, C)).astype(np.float32)
SHARES[0] = [0.25, 0.75, 0]  # a teacher without a share
IDS = np.argsort(rand(B, C, V, seed=13), -1)[..., :6].astype(np.int32)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def mixed_logprobs(kind, temperature=1.0, shares=SHARES):
    """[B, C, V], as float64 numpy has it."""
    total, log = 0.0, 0.0
    for k, (hidden, head) in enumerate(zip(TEACHERS, HEADS, strict=True)):
        z = np.einsum("bcd,vd->bcv", hidden, head[:V]).astype(np.float64) / temperature
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        total = total + shares[..., k, None] * p
        log = log + shares[..., k, None] * np.log(p)
    if kind == "arithmetic":
        return np.log(total)
    return log - np.log(np.exp(log).sum(-1, keepdims=True))


@cache
def program(kind, **settings):
    """Of the loss and its gradients at some settings: the shares are an argument."""

    def loss(hidden, head, shares):
        mixture = TeacherMixture(kind, shares)
        return divergence_from_hidden(
            *(hidden, head, TEACHERS, HEADS, MASK), chunk=CHUNK, mixture=mixture, **settings
        )[0]

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def loss_of(kind, *, shares=SHARES, lean=False, **settings):
    each = program(kind, lean=lean, **settings)
    return lambda hidden, head: jax.device_get(each(hidden, head, shares))


@pytest.mark.parametrize(
    ("beta", "kind", "term"),
    and_slow(
        [
            *((0.4, "arithmetic", TERM), (1.0, "geometric", None)),
        ],
        [
            *((0.0, "arithmetic", term) for term in (None, TERM)),
            *((0.4, "arithmetic", None), (1.0, "geometric", TERM)),
            *((0.4, "geometric", term) for term in (None, TERM)),
        ],
    ),
    ids=str,
)
def test_the_loss_is_the_divergence_from_the_dense_mixture(kind, beta, term):
    """Value and gradient; the same with `lean`, and with the entropy-aware term."""

    teacher = mixed_logprobs(kind, 1.3)

    def of_logits(z):
        student = dense.log_softmax(z, 1.3)
        more = 0 if term is None else dense.entropy_aware(student, teacher, term)
        return dense.jsd(student, teacher, beta) + more

    same = partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
    wanted = dense.value_and_gradients(of_logits, HIDDEN, HEAD, MASK)
    for lean in (False, True):
        settings = {"temperature": 1.3, "entropy_aware": term, "lean": lean}
        found = loss_of(kind, beta=beta, **settings)(HIDDEN, HEAD)
        jax.tree.map(same, found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_finite_differences(kind):
    value = loss_of(kind, beta=0.4)
    _, (d_hidden, d_head) = value(HIDDEN, HEAD)
    for seed in range(3):
        a, b = rand(*HIDDEN.shape, seed=20 + seed), rand(*HEAD.shape, seed=30 + seed)
        step = 1e-2
        up, _ = value(HIDDEN + step * a, HEAD + step * b)
        down, _ = value(HIDDEN - step * a, HEAD - step * b)
        slope = float((d_hidden * a).sum() + (d_head * b).sum())
        np.testing.assert_allclose((up - down) / (2 * step), slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("shape", "kind", "lean"),
    and_slow(
        [((1, 2, 4), "arithmetic", False), ((2, 2, 2), "geometric", True)],
        [
            *(((1, 2, 4), "arithmetic", True), ((2, 2, 2), "geometric", False)),
            *(((8, 1, 1), "arithmetic", lean) for lean in (False, True)),
            *(((1, 8, 1), "geometric", lean) for lean in (False, True)),
        ],
    ),
    ids=str,
)
def test_a_mesh_computes_what_one_device_does(shape, kind, lean):
    found = loss_of(kind, beta=0.4, lean=lean, mesh=mesh_of(shape))(HIDDEN, HEAD)
    expected = loss_of(kind, beta=0.4)(HIDDEN, HEAD)  # of one device, and not lean
    same = partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
    jax.tree.map(same, found, expected)


@pytest.mark.parametrize("lean", and_slow([False], [True]))
def test_a_weight_of_one_is_that_teacher(lean):
    """Bit for bit in the kind that routing uses, whatever the others' hidden states are."""
    shares = np.zeros((B, C, 3), np.float32)
    which = np.random.default_rng(14).integers(0, 3, (B, 1))
    np.put_along_axis(shares, np.repeat(which, C, 1)[..., None], 1, -1)
    found = loss_of("geometric", beta=0.4, shares=shares, lean=lean)(HIDDEN, HEAD)
    near = loss_of("arithmetic", beta=0.4, shares=shares, lean=lean)(HIDDEN, HEAD)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), near, found)
    for k, (hidden, head) in enumerate(zip(TEACHERS, HEADS, strict=True)):
        mask = MASK & (which == k)

        def alone(h, w, hidden=hidden, head=head, mask=mask):
            return divergence_from_hidden(
                h, w, hidden, head[:V], mask, beta=0.4, chunk=CHUNK, lean=lean
            )[0]

        _, (wanted, _) = jax.jit(jax.value_and_grad(alone, argnums=(0, 1)))(HIDDEN, HEAD)
        rows = which[:, 0] == k
        np.testing.assert_array_equal(found[1][0][rows], wanted[rows])


@pytest.mark.parametrize(
    ("kind", "shape"),
    and_slow(
        [("arithmetic", (1, 1, 1)), ("geometric", (1, 2, 4))],
        [("arithmetic", (1, 2, 4)), ("geometric", (1, 1, 1))],
    ),
    ids=str,
)
def test_what_a_mixture_sends_is_of_the_dense_one(kind, shape):
    """Log-probs at ids, of the best tokens and of all others, and the entropy."""
    mixture = TeacherMixture(kind, SHARES)
    settings = {"mesh": mesh_of(shape), "v": V, "mixture": mixture, "chunk": CHUNK}
    wanted = mixed_logprobs(kind, 0.8)

    @jax.jit
    def sent(teachers, heads):
        best = topk_from_hidden(teachers, heads, 6, temperature=0.8, **settings)
        return best, logprobs_at(teachers, heads, IDS, temperature=0.8, **settings)

    best, (logprobs, tail) = jax.device_get(sent(TEACHERS, HEADS))
    same = partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
    same(best.logprobs, -np.sort(-wanted, -1)[..., :6])
    same(best.logprobs, np.take_along_axis(wanted, best.ids, -1))
    same(best.tail_logprob, np.log(1 - np.exp(best.logprobs).sum(-1)))
    same(best.entropy, -(np.exp(wanted) * wanted).sum(-1))
    same(logprobs, np.take_along_axis(wanted, IDS, -1))
    same(tail, np.log(1 - np.exp(logprobs).sum(-1)))


def test_a_mixture_of_one_teacher_is_the_teacher():
    ones = np.ones((B, C, 1), np.float32)

    @jax.jit
    def sent(teachers, heads):
        settings = {"v": V, "chunk": CHUNK}
        mixtures = [TeacherMixture(kind, ones) for kind in KINDS]
        of_one = [topk_from_hidden(teachers, heads, 6, mixture=x, **settings) for x in mixtures]
        return topk_from_hidden(teachers[0], heads[0], 6, **settings), of_one

    plain, of_one = sent(TEACHERS[:1], HEADS[:1])
    for found in of_one:
        np.testing.assert_array_equal(found.ids, plain.ids)
        np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-5)
