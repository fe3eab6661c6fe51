"""Laws of the divergences; numbers by hand, and a float64 reference in numpy."""

from functools import partial

import dense_losses as dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from numpy_losses import log_softmax as exact_log_softmax

from jaxrl.losses.divergence import MIN, EntropyAware, sampled_reverse_kl

# One program each in place of one for each of their operations.
jsd = jax.jit(dense.jsd, static_argnames=("beta", "temperature"))
topk_divergence = jax.jit(dense.topk_divergence, static_argnames=("beta", "temperature"))
entropy_aware = jax.jit(dense.entropy_aware, static_argnames=("term", "temperature"))
log_softmax, with_tail = jax.jit(dense.log_softmax), jax.jit(dense.with_tail)


@partial(jax.jit, static_argnames=("beta", "temperature"))
def jsd_and_slope(student, teacher, mask, beta, temperature=1.0):
    """The sum and its gradient."""
    return jax.value_and_grad(
        lambda z: jsd(z, teacher, mask, beta=beta, temperature=temperature)[0]
    )(student)


@partial(jax.jit, static_argnames="beta")
def topk_and_slope(student, ids, logprobs, tail, mask, beta):
    return jax.value_and_grad(
        lambda z: topk_divergence(z, ids, logprobs, tail, mask, beta=beta)[0]
    )(student)


BETAS = and_slow([0.0, 0.7, 1.0], [0.1, 0.5])
B, T, V = 3, 4, 11


def rand(*shape, seed=0, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


@pytest.fixture
def student():
    return rand(B, T, V, seed=1)


@pytest.fixture
def teacher():
    return rand(B, T, V, seed=2)


MASK = np.random.default_rng(3).random((B, T)) < 0.7


def reference(student, teacher, beta, temperature=1.0):
    """D of each row by its definition, in float64: M = beta P + (1 - beta) Q."""

    def softmax(z):
        z = np.asarray(z, np.float64) / temperature
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def kl(a, b):
        return (a * np.log(a / b)).sum(-1)

    p, q = softmax(teacher), softmax(student)
    if beta == 0:
        return kl(p, q)
    if beta == 1:
        return kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def finite_differences(f, x, step=1e-5):
    """Gradient of a scalar numpy function in float64."""
    x = np.asarray(x, np.float64)
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        gradient[i] = (f(up) - f(down)) / (2 * step)
    return gradient


def topk_of(teacher, k, temperature=1.0):
    """What a teacher ships: ids, log-probs, tail."""
    logprobs = exact_log_softmax(teacher, temperature)
    ids = np.argsort(-logprobs, -1)
    ordered = np.take_along_axis(logprobs, ids, -1)
    rest = np.exp(ordered[..., k:]).sum(-1)
    tail = np.log(rest, out=np.full_like(rest, MIN), where=rest > 0)
    return ids[..., :k].astype(np.int32), *(x.astype(np.float32) for x in (ordered[..., :k], tail))


def test_two_tokens_by_hand():
    """P = (3/4, 1/4), Q = (1/2, 1/2), nats."""
    teacher = np.log(np.array([[[0.75, 0.25]]], np.float32))
    student = np.zeros((1, 1, 2), np.float32)
    mask = np.ones((1, 1), bool)
    by_hand = {
        0.0: 0.75 * np.log(1.5) + 0.25 * np.log(0.5),
        1.0: 0.5 * np.log(2 / 3) + 0.5 * np.log(2),
        # M = 0.2 P + 0.8 Q = (0.55, 0.45)
        0.2: 0.2 * (0.75 * np.log(0.75 / 0.55) + 0.25 * np.log(0.25 / 0.45))
        + 0.8 * (0.5 * np.log(0.5 / 0.55) + 0.5 * np.log(0.5 / 0.45)),
    }
    for beta, value in by_hand.items():
        total, count = jsd(student, teacher, mask, beta=beta)
        assert count == 1
        np.testing.assert_allclose(total, value, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("beta", BETAS)
def test_value_is_the_definition(student, teacher, beta, temperature):
    total, count = jsd(student, teacher, MASK, beta=beta, temperature=temperature)
    expected = reference(student, teacher, beta, temperature)[np.asarray(MASK)].sum()
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert count == MASK.sum()


@pytest.mark.parametrize("beta", BETAS)
def test_gradient_is_that_of_the_definition(student, teacher, beta):
    row, target, temperature = student[:1, :1], teacher[:1, :1], 1.5
    _, gradient = jsd_and_slope(row, target, np.ones((1, 1), bool), beta, temperature)
    expected = finite_differences(
        lambda z: reference(z, target, beta, temperature).sum(), np.asarray(row)
    )
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.7])
def test_bounds(beta):
    """0 <= D <= H(beta), also where the two hardly overlap."""
    apart = np.array([[[60.0, 0, 0], [0, 0, 0], [9, 8, 0]]], np.float32)
    other = np.array([[[0.0, 60, 0], [0, 30, 0], [9, 8, 1e-4]]], np.float32)
    entropy = -(beta * np.log(beta) + (1 - beta) * np.log(1 - beta))
    for t in range(3):
        value, _ = jsd(apart[:, t : t + 1], other[:, t : t + 1], np.ones((1, 1), bool), beta=beta)
        assert -1e-6 <= value <= entropy + 1e-6
    far, _ = jsd(apart[:, :1], other[:, :1], np.ones((1, 1), bool), beta=beta)
    np.testing.assert_allclose(far, entropy, rtol=1e-5)


@pytest.mark.parametrize("end", [0, 1])
def test_limits_at_both_ends(student, teacher, end):
    """D / beta -> KL(P || Q) as beta -> 0, and D / (1 - beta) -> KL(Q || P) as beta -> 1."""
    near, scale = (1e-3, 1e-3) if end == 0 else (1 - 1e-3, 1e-3)
    student, teacher = student / 4, teacher / 4
    limit, _ = jsd(student, teacher, MASK, beta=float(end))
    value, _ = jsd(student, teacher, MASK, beta=near)
    np.testing.assert_allclose(value / scale, limit, rtol=1e-2)


@pytest.mark.parametrize("beta", BETAS)
def test_zero_and_stationary_where_student_is_teacher(teacher, beta):
    """Also over the top k and a tail, which a renormalised or a dropped tail is not."""
    ids, logprobs, tail = topk_of(teacher, 3)
    losses = [
        lambda z: jsd(z, teacher, MASK, beta=beta)[0],
        lambda z: topk_divergence(z, ids, logprobs, tail, MASK, beta=beta)[0],
        lambda z: entropy_aware(z, teacher, MASK, term=EntropyAware(top_k=3))[0],
    ]
    for value, gradient in jax.jit(lambda z: [jax.value_and_grad(f)(z) for f in losses])(teacher):
        np.testing.assert_allclose(value, 0, atol=1e-5)
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_topk_with_tail_is_a_lower_bound_and_exact_at_k_equal_v(student, teacher, beta):
    full, exact = jsd_and_slope(student, teacher, MASK, beta)
    values = []
    for k in (1, 4, V - 1):
        value, _ = topk_divergence(student, *topk_of(teacher, k), MASK, beta=beta)
        values.append(float(value))
    value, coarse = topk_and_slope(student, *topk_of(teacher, V), MASK, beta)
    values.append(float(value))
    assert values == sorted(values)
    assert values[1] < full - 0.01
    np.testing.assert_allclose(values[-1], full, rtol=1e-5)
    np.testing.assert_allclose(coarse, exact, atol=1e-6)


def test_tail_does_not_cancel():
    """1 - 1e-9 is 1 in float32: the tail's log must come from the tail itself."""
    logprobs = log_softmax(np.log(np.array([1.0, 1e-9, 2e-9], np.float32)))
    outcomes = with_tail(logprobs, np.array([0]))
    np.testing.assert_allclose(outcomes[1], np.log(3e-9), rtol=1e-5)
    assert np.asarray(with_tail(logprobs, np.array([0, 1, 2])))[3] == np.float32(MIN)


@pytest.mark.parametrize("beta", BETAS)
def test_impossible_tokens_make_no_nan(student, teacher, beta):
    """A logit of -inf on both sides is a smaller vocabulary."""
    shut = np.arange(V) >= 8
    small, gradient = jsd_and_slope(student[..., :8], teacher[..., :8], MASK, beta)
    masked = [np.where(shut, np.float32(-np.inf), x) for x in (student, teacher)]
    value, wide = map(np.asarray, jsd_and_slope(*masked, MASK, beta))
    np.testing.assert_allclose(value, small, rtol=1e-5)
    np.testing.assert_allclose(wide[..., :8], gradient, atol=1e-6)
    np.testing.assert_array_equal(wide[..., 8:], 0)


def test_what_is_masked_never_matters(student, teacher):
    """Nor does padding, the order of rows or vocabulary, or the split into micro-batches."""
    expected, count = jsd(student, teacher, MASK, beta=0.3)
    hole = MASK[..., None]
    junk = (np.where(hole, x, np.float32(np.nan)) for x in (student, teacher))
    value, gradient = jsd_and_slope(*junk, MASK, 0.3)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.isfinite(gradient).all()

    longer = [np.pad(x, ((0, 2), (3, 1), (0, 0))) for x in (student, teacher)]
    padded = np.pad(MASK, ((0, 2), (3, 1)))
    np.testing.assert_allclose(jsd(*longer, padded, beta=0.3)[0], expected, rtol=1e-6)

    rows, words = np.array([2, 0, 1]), np.random.default_rng(4).permutation(V)
    value, _ = jsd(student[rows][..., words], teacher[rows][..., words], MASK[rows], beta=0.3)
    np.testing.assert_allclose(value, expected, rtol=1e-6)

    parts = [
        jsd(student[i : i + 1], teacher[i : i + 1], MASK[i : i + 1], beta=0.3) for i in range(B)
    ]
    np.testing.assert_allclose(sum(float(p[0]) for p in parts), expected, rtol=1e-6)
    assert sum(float(p[1]) for p in parts) == count

    assert jsd(student, teacher, np.zeros_like(MASK), beta=0.3) == (0, 0)


def test_gradient_knows_the_teacher_and_spares_it(student, teacher):
    slopes = jax.jit(jax.grad(lambda z, t: jsd(z, t, MASK, beta=0.5)[0], argnums=(0, 1)))
    mine, theirs = map(np.asarray, slopes(student, teacher))
    np.testing.assert_array_equal(theirs, 0)
    other, _ = slopes(student, rand(B, T, V, seed=9))
    assert np.abs(mine - other).max() > 1e-2


def test_entropy_aware_term_acts_where_the_teacher_is_unsure():
    """One confident position (H about 0), one flat one (H = log 11 = 2.4 nats)."""
    teacher = np.zeros((1, 2, V), np.float32)
    teacher[0, 0, 3], teacher[0, 1, :2] = 30, 0.1
    student = rand(1, 2, V, seed=5)
    mask, term = np.ones((1, 2), bool), EntropyAware(coef=0.5, threshold=0.8, top_k=4)
    total, count = entropy_aware(student, teacher, mask, term=term)
    p, q = (np.exp(x[0, 1].astype(np.float64)) for x in (teacher, student))
    p, q = p / p.sum(), q / q.sum()
    ids = np.argsort(-teacher[0, 1], kind="stable")[:4]
    rest = np.setdiff1d(np.arange(V), ids)
    p, q = (np.append(x[ids], x[rest].sum()) for x in (p, q))
    np.testing.assert_allclose(total, 0.5 * (p * np.log(p / q)).sum(), rtol=1e-5)
    assert count == 2


def test_sampled_estimator_is_the_reverse_kl_in_expectation(student, teacher):
    """Every token once, weighted by the probability of sampling it: value and gradient."""
    z, one_token = student[0, 0], np.ones((1, 1), bool)
    target = np.asarray(log_softmax(teacher[0, 0]))

    def expected(z, sampler):
        logprobs = log_softmax(z)[:, None]

        def one(lp, t, mu):
            return sampled_reverse_kl(
                lp[None], t[None], one_token, sampler_logprobs=mu[None], ratio_cap=1e6
            )[0]

        values = jax.vmap(one)(logprobs, target[:, None], sampler[:, None])
        return (jnp.exp(sampler) * values).sum()

    exact, slope = jsd_and_slope(z[None, None], target[None, None], one_token, 1.0)
    both = jax.jit(jax.value_and_grad(expected))
    on_policy = log_softmax(z)
    off_policy = log_softmax(z + rand(V, seed=8, scale=0.3))
    for sampler in (on_policy, off_policy):
        value, gradient = both(z, sampler)
        np.testing.assert_allclose(value, exact, rtol=1e-4)
        np.testing.assert_allclose(gradient, slope[0, 0], atol=1e-5)


def test_sampled_ratio_is_capped_and_the_mask_holds():
    """r = (4, 0.5), cap 2: weights 2 and 0.5; the third token is masked and not even finite."""
    logprobs = np.log(np.array([[0.8, 0.1, np.nan]], np.float32))
    sampler = np.log(np.array([[0.2, 0.2, 0.5]], np.float32))
    teacher = np.log(np.array([[0.4, 0.4, 0.5]], np.float32))
    mask = np.array([[True, True, False]])

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def both(lp):
        total, *more = sampled_reverse_kl(lp, teacher, mask, sampler_logprobs=sampler)
        return total, more

    (value, (count, metrics)), gradient = both(logprobs)
    np.testing.assert_allclose(gradient, [[2 * np.log(2), 0.5 * np.log(0.25), 0]], rtol=1e-5)
    np.testing.assert_allclose(value, 2 * np.log(2) + 0.5 * np.log(0.25), rtol=1e-5)
    assert count == 2 and metrics["ratio_capped"] == (1, 2)
    np.testing.assert_allclose(
        metrics["reverse_kl_k1"][0], [[np.log(2), np.log(0.25), 0]], rtol=1e-5
    )


@jax.jit
def sampled_and_slope(logprobs, teacher, mask):
    def loss(x):
        total, _, metrics = sampled_reverse_kl(x, teacher, mask)
        return total, metrics

    return jax.value_and_grad(loss, has_aux=True)(logprobs)


@pytest.mark.parametrize("impossible", [-1e4, -1e30, -np.inf])
def test_no_single_token_is_the_gradient_of_a_batch(impossible):
    """A token that the teacher finds impossible, or a student nearly so, counts 20 nats."""
    logprobs = np.full((8, 16), -1.0, np.float32)
    teacher = logprobs - rand(8, 16, seed=4, scale=0.1)
    teacher[3, 5], logprobs[2, 2], mask = impossible, -90.0, np.ones((8, 16), bool)
    mask[0, 0], teacher[0, 0] = False, np.nan

    (total, metrics), slope = sampled_and_slope(logprobs, teacher, mask)
    gap = np.clip(np.where(mask, logprobs - teacher, 0).astype(np.float64), -20, 20)
    np.testing.assert_allclose(slope, gap, rtol=1e-5, atol=1e-6)
    assert (gap[3, 5], gap[2, 2]) == (20, -20)
    np.testing.assert_allclose(total, gap.sum(), rtol=1e-4)
    assert metrics["gap_clamped"] == (2, 127)


def test_bad_settings_are_refused(student, teacher):
    with pytest.raises(ValueError, match=r"beta is 1\.5.*\[0, 1\]"):
        jsd(student, teacher, MASK, beta=1.5)
    with pytest.raises(ValueError, match="ratio_cap is 0"):
        sampled_reverse_kl(student[..., 0], teacher[..., 0], MASK, ratio_cap=0)
