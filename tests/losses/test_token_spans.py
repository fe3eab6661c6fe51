"""The loss from a teacher with another vocabulary: equal to the dense formulas over outcomes and
spans, by finite differences, on every mesh."""

import itertools
import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from numpy_losses import jsd, log_softmax, value_and_gradients

from jaxrl.losses import token_spans
from jaxrl.losses.token_spans import Outcomes, SampledTokens, aligned_signal, span_sums
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Aligned, AlignedSignal

B, C, CHUNK = 4, 5, 3
V, VT, D, DT = 26, 37, 12, 10
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 1), (1, 2, 1, 2)]


def rand(*shape, seed):
    return np.random.default_rng(seed).normal(0, 0.6, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2)
THEIRS, THEIR_HEAD = rand(B, C, DT, seed=3), rand(VT, DT, seed=4)
MASK = np.random.default_rng(5).random((B, C)) < 0.7
TOKENS = np.random.default_rng(10).integers(0, V, (B, C))
SAMPLER = -abs(rand(B, C, seed=11))
EXACT = np.full((B, C), Aligned.EXACT)


def outcomes(with_others=True):
    """16 common tokens, and others in the outcome of one of them or, if asked, in the last one."""
    draw = np.random.default_rng(7)
    common = draw.permutation(V)[:16]
    student = draw.choice([*common, V] if with_others else common, V).astype(np.int32)
    student[common] = common
    if with_others:
        student[np.setdiff1d(np.arange(V), common)[:2]] = V
    teacher = draw.choice([*common, V if with_others else V + 1], VT).astype(np.int32)
    teacher[draw.permutation(VT)[:16]] = common
    return Outcomes(student, teacher)


OUTCOMES = outcomes()
SAME = partial(np.testing.assert_allclose, atol=3e-5, rtol=3e-5)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def logprobs(logits, softcap=None, temperature=1.3):
    """Of float64 logits, which may be complex."""
    z = logits if softcap is None else softcap * np.tanh(logits / softcap)
    return log_softmax(z, temperature)


def in_outcomes(logp, outcome_of, given=OUTCOMES):
    """Log-probs of the outcomes that the student has tokens of."""
    numbers = np.unique(given.student)
    sums = np.stack([np.exp(logp)[..., outcome_of == n].sum(-1) for n in numbers], -1)
    sums = sums / sums.sum(-1, keepdims=True)
    return np.log(np.where(sums.real > 1e-37, sums, 1e-37))


def of_teacher(given=OUTCOMES, softcap=None):
    """The teacher's log-probs of the same outcomes."""
    logits = THEIRS.astype(np.float64) @ THEIR_HEAD.astype(np.float64).T
    return in_outcomes(logprobs(logits, softcap), given.teacher, given)


def sent(kinds=EXACT, **fields):
    """What a teacher sends: its hidden states unless `fields` say otherwise."""
    fields = fields or {"hidden": THEIRS}
    zero, one = np.zeros((B, C), np.float32), np.ones((B, C), np.int32)
    return AlignedSignal(**{"kinds": kinds, "sizes": one, "span_logprobs": zero} | fields)


@cache
def program(**settings):
    """Of the loss, its metrics and its gradients, at some settings: all else is an argument."""

    def loss(hidden, head, mask, signal, given):
        total, _, metrics = token_spans.span_loss(
            *(hidden, head, SampledTokens(TOKENS, mask, SAMPLER)),
            *(signal, given, THEIR_HEAD),
            **settings,
        )
        return total, metrics

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def loss_of(given=OUTCOMES, signal=None, *, mask=MASK, **settings):
    signal = sent() if signal is None else signal
    plain = {"beta": 0.4, "ratio_cap": 2.0, "temperature": 1.3, "chunk": CHUNK}

    def with_metrics(hidden, head):
        return jax.device_get(program(**plain | settings)(hidden, head, mask, signal, given))

    def value(hidden, head):
        (total, _), slopes = with_metrics(hidden, head)
        return total, slopes

    value.with_metrics = with_metrics
    return value


def dense_loss(given=OUTCOMES, *, beta=0.4, softcap=None, teacher_softcap=None):
    """Value and gradients."""
    teacher = of_teacher(given, teacher_softcap)

    def of_logits(z):
        student = in_outcomes(logprobs(z, softcap), given.student, given)
        return jsd(student, teacher, beta)

    return value_and_gradients(of_logits, HIDDEN, HEAD, MASK)


@cache
def on_one_device():
    return jax.device_get(loss_of()(HIDDEN, HEAD))


@pytest.mark.parametrize(
    ("others", "beta"),
    and_slow([(True, 0.0), (True, 1.0), (False, 0.4)], [(True, 0.4), (False, 0.0), (False, 1.0)]),
)
def test_the_loss_is_the_divergence_over_outcomes(beta, others):
    """Value and gradient; also where no token of the student is in the last outcome."""
    given = outcomes(others)
    wanted = dense_loss(given, beta=beta)
    jax.tree.map(SAME, loss_of(given, beta=beta)(HIDDEN, HEAD), wanted)


def test_either_model_s_logits_may_be_capped():
    caps = {"softcap": 1.5, "teacher_softcap": 2.0}
    jax.tree.map(SAME, loss_of(**caps)(HIDDEN, HEAD), dense_loss(**caps))


def test_with_an_outcome_for_each_token_it_is_the_loss_of_one_vocabulary():
    order = np.random.default_rng(8).permutation(V)
    teacher = np.argsort(order)  # the teacher's token k is the student's teacher[k]
    given = Outcomes(np.arange(V), teacher)

    def other(hidden, head):
        return token_spans.span_loss(
            *(hidden, head, SampledTokens(TOKENS, MASK, SAMPLER), sent(), given, THEIR_HEAD[:V]),
            beta=0.4,
            ratio_cap=2.0,
            temperature=1.3,
        )[0]

    theirs = log_softmax(THEIRS.astype(np.float64) @ THEIR_HEAD[:V][order].T, 1.3)
    plain = value_and_gradients(lambda z: jsd(log_softmax(z, 1.3), theirs, 0.4), HIDDEN, HEAD, MASK)
    found = jax.jit(jax.value_and_grad(other, argnums=(0, 1)))(HIDDEN, HEAD)
    jax.tree.map(SAME, found, plain)


def test_the_spelling_of_a_text_is_left_to_the_student():
    """Tokens of an outcome get the gradient by their shares in it: no share within one changes. A
    head that is the identity makes hidden states the logits."""
    logits = rand(B, C, V, seed=9)
    _, (slope, _) = loss_of(temperature=1.0)(logits, np.eye(V, dtype=np.float32))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    student = OUTCOMES.student
    shared = [n for n in np.unique(student) if (student == n).sum() > 1]
    assert len(shared) > 1 and np.abs(slope[MASK]).max() > 1e-3
    for outcome in shared:
        each = (slope / p)[MASK][:, student == outcome]
        np.testing.assert_allclose(each, np.repeat(each[:, :1], each.shape[1], 1), atol=2e-5)


def test_the_gradient_is_that_of_finite_differences():
    value = loss_of()
    _, (d_hidden, d_head) = value(HIDDEN, HEAD)
    for seed in range(3):
        a, b = rand(*HIDDEN.shape, seed=20 + seed), rand(*HEAD.shape, seed=30 + seed)
        up, down = (value(HIDDEN + h * a, HEAD + h * b)[0] for h in (1e-2, -1e-2))
        slope = float((d_hidden * a).sum() + (d_head * b).sum())
        np.testing.assert_allclose((up - down) / 2e-2, slope, rtol=2e-2, atol=2e-2)


def best_outcomes(k, **settings):
    given = {"signal": "topk", "top_k": k, "temperature": 1.3, "chunk": CHUNK} | settings
    tokens = np.zeros((B, C), np.int32)
    send = jax.jit(lambda h, w: aligned_signal(h, w, tokens, OUTCOMES, **given))
    return jax.device_get(send(THEIRS, THEIR_HEAD))


@pytest.mark.parametrize("shape", and_slow(MESHES[3:], [(shape,) for shape in MESHES[:3]]), ids=str)
def test_a_mesh_computes_what_one_device_does(shape):
    mesh = mesh_of(shape)
    jax.tree.map(SAME, loss_of(mesh=mesh)(HIDDEN, HEAD), on_one_device())
    found, numbers = best_outcomes(4, mesh=mesh), np.unique(OUTCOMES.student)
    every = of_teacher()
    SAME(found.topk_logprobs, np.sort(every, -1)[..., ::-1][..., :4])
    index = np.searchsorted(numbers, found.topk_ids)
    SAME(np.take_along_axis(every, index, -1), found.topk_logprobs)


def test_the_teacher_s_best_outcomes_and_a_tail_are_a_lower_bound():
    """Equal to the loss over all outcomes where all are sent."""

    def loss(k):
        found = best_outcomes(k)
        names = "topk_ids", "topk_logprobs", "tail_logprob"
        signal = sent(**{name: getattr(found, name) for name in names})
        return loss_of(signal=signal)(HIDDEN, HEAD)

    count = len(np.unique(OUTCOMES.student))
    jax.tree.map(SAME, loss(count), on_one_device())
    assert loss(3)[0] < on_one_device()[0]


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_teacher_without_tokens_of_the_last_outcome_leaves_the_loss_finite(beta):
    """Its probability there is 0, and the student's is not."""
    teacher = np.where(OUTCOMES.teacher == V, OUTCOMES.student[0], OUTCOMES.teacher)
    given = OUTCOMES._replace(teacher=teacher)
    value, slopes = loss_of(given, beta=beta)(HIDDEN, HEAD)
    assert np.isfinite(value) and value > 0
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_a_span_has_the_sum_of_its_tokens():
    values = rand(2, 6, seed=8)
    starts = np.array([[1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1]], bool)
    found = np.asarray(jax.jit(span_sums)(values, starts))
    for row, ends in enumerate([(0, 3, 4, 6), (0, 1, 5, 6)]):
        for first, last in itertools.pairwise(ends):
            SAME(found[row, first:last], np.full(last - first, values[row, first:last].sum()))
    # Every token's log-prob is in one span: the sum over all is conserved.
    SAME((found * starts).sum(-1)[0], values.sum(-1)[0])


CAP = 1.5
KINDS = np.array([[2, 3, 2, 3, 1], [1, 0, 2, 3, 3], [4, 0, 1, 1, 0], [2, 3, 3, 3, 3]])
SPANS = [(0, 0, 2), (0, 2, 4), (1, 2, 5), (3, 0, 5)]
"""Row, first token and end of the spans of several tokens."""


def of_own_token(logp):
    return np.take_along_axis(logp, TOKENS[..., None], -1)[..., 0]


def of_own_outcome(logp):
    """Log-prob of the outcome of each token."""
    members = OUTCOMES.student == OUTCOMES.student[TOKENS][..., None]
    return np.log(np.where(members, np.exp(logp), 0).sum(-1))


@pytest.mark.parametrize("distributions", [True, False])
def test_a_span_of_several_tokens_is_one_sampled_action(distributions):
    """Value and gradient of both parts against dense formulas; without distributions, spans of one
    token are sampled too. Values where nothing is sent may be anything."""
    sums = -abs(rand(B, C, seed=12)) * 4
    theirs = np.where((KINDS == Aligned.NOT) | (KINDS == Aligned.START_ONLY), np.nan, sums)
    fields = {"hidden": THEIRS} if distributions else {}
    signal = sent(KINDS, span_logprobs=theirs.astype(np.float32), **fields)
    spans, cap, every = list(SPANS), CAP, np.ones((B, C), bool)
    if not distributions:
        spans += [(row, at, at + 1) for row, at in np.argwhere(KINDS == Aligned.EXACT)]
    starts = (KINDS != Aligned.NOT) & (KINDS != Aligned.INSIDE)

    own = of_own_token(logprobs(HIDDEN.astype(np.float64) @ HEAD.T.astype(np.float64)))
    in_span, at_first = np.zeros((B, C)), np.zeros((B, C))
    for row, first, end in spans:
        q, mu = own[row, first:end].sum(), SAMPLER[row, first:end].sum()
        in_span[row, first:end] = min(np.exp(q - mu), cap) * (q - sums[row, first])
        at_first[row, first] = in_span[row, first]

    def of_logits(z):
        """Of which the score's value is not counted: a span's is its weight times its gap."""
        logp = logprobs(z)
        score = in_span * of_own_token(logp)
        if not distributions:
            return score - score.real + at_first
        score = score - at_first * of_own_outcome(logp)
        student = in_outcomes(logp, OUTCOMES.student)
        return score - score.real + at_first + starts * jsd(student, of_teacher(), 0.4)

    expected = value_and_gradients(of_logits, HIDDEN, HEAD, every)
    loss = loss_of(signal=signal, mask=every, ratio_cap=cap)
    jax.tree.map(partial(SAME, atol=3e-4), loss(HIDDEN, HEAD), expected)
    (_, metrics), _ = loss.with_metrics(HIDDEN, HEAD)
    assert metrics["aligned_bytes"] == (16, 20) and metrics["exact_bytes"] == (4, 20)
    assert metrics["reverse_kl_k1"][1].sum() == len(spans)


def test_spans_of_one_token_are_the_sampled_reverse_kl():
    theirs = -abs(rand(B, C, seed=12))
    signal = sent(span_logprobs=theirs)

    logp = logprobs(HIDDEN.astype(np.float64) @ HEAD.T.astype(np.float64))
    gap = of_own_token(logp) - theirs
    weight = np.minimum(np.exp(of_own_token(logp) - SAMPLER), CAP) * gap

    def of_logits(z):
        score = weight * of_own_token(logprobs(z))
        return score - score.real + weight

    wanted = value_and_gradients(of_logits, HIDDEN, HEAD, MASK)
    assert replace(signal, span_logprobs=None).hidden is None
    jax.tree.map(SAME, loss_of(signal=signal, ratio_cap=CAP)(HIDDEN, HEAD), wanted)


def test_the_estimate_is_unbiased():
    """Its expectation over all spans of two tokens, each drawn with its probability under the
    student, has the value and the gradient of KL(student || teacher) of the span."""
    first, second = jnp.asarray(rand(3, seed=12)), jnp.asarray(rand(3, 3, seed=13))
    theirs = jax.nn.log_softmax(jnp.asarray(rand(9, seed=14)))  # in tokens of its own
    head = np.eye(3, dtype=np.float32)
    tokens = np.array(list(itertools.product(range(3), repeat=2)))
    kinds = np.tile([Aligned.START, Aligned.INSIDE], (9, 1))
    given = Outcomes(np.arange(3), np.arange(3))
    signal = AlignedSignal(
        kinds=kinds, sizes=np.ones((9, 2)), span_logprobs=np.repeat(theirs[:, None], 2, 1)
    )

    def logits(first, second):
        return jnp.stack([jnp.repeat(first[None], 9, 0), jnp.repeat(second, 3, 0)], 1)

    def path(z):
        own = jax.nn.log_softmax(z, -1)
        return jnp.take_along_axis(own, tokens[..., None], -1)[..., 0]

    def exact(first, second):
        student = path(logits(first, second)).sum(-1)
        return (jnp.exp(student) * (student - theirs)).sum()

    def expected(first, second):
        z = logits(first, second)
        own = jax.lax.stop_gradient(path(z))
        share = jnp.exp(own.sum(-1))

        def one(z, tokens, signal, own):
            z, tokens, signal, own = jax.tree.map(lambda x: x[None], (z, tokens, signal, own))
            mask = np.ones((1, 2), bool)
            settings = {"beta": 1.0, "ratio_cap": 2.0}
            sampled = SampledTokens(tokens, mask, own)
            return token_spans.span_loss(z, head, sampled, signal, given, **settings)[0]

        return (share * jax.vmap(one)(z, tokens, signal, own)).sum()

    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (expected, exact)]
    jax.tree.map(SAME, *(f(first, second) for f in both))


def test_no_single_span_is_the_gradient_of_a_batch():
    """The second span is impossible for the teacher, the third masked."""
    z = np.zeros((1, 6, 2), np.float32)
    kinds = np.tile([Aligned.START, Aligned.INSIDE], (1, 3))
    teacher = np.array([[-1, -1, -np.inf, -np.inf, np.nan, np.nan]], np.float32)
    signal = AlignedSignal(kinds=kinds, sizes=np.ones((1, 6)), span_logprobs=teacher)
    mask = np.array([[True] * 4 + [False] * 2])
    given = Outcomes(np.arange(2), np.arange(2))
    own, head = np.full((1, 6), np.log(0.5), np.float32), np.eye(2, dtype=np.float32)

    def loss(z):
        tokens, settings = np.zeros((1, 6), int), {"beta": 1.0, "ratio_cap": 2.0}
        total, _, metrics = token_spans.span_loss(
            z, head, SampledTokens(tokens, mask, own), signal, given, **settings
        )
        return total, metrics

    (total, metrics), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(z)
    gap = np.log(0.25) + 1
    np.testing.assert_allclose(slope[0, :, 0], np.array([gap, gap, 20, 20, 0, 0]) / 2, rtol=1e-6)
    np.testing.assert_allclose(total, gap + 20, rtol=1e-6)
    assert metrics["gap_clamped"] == (1, 2)


@pytest.mark.parametrize("n", [1, 2, 8, 40])
def test_a_baseline_is_of_the_other_spans_of_several_tokens(n):
    """Of rows with such a span of a few tokens, one of a single token, one that is not aligned: by
    hand, and the same whatever the span itself sampled."""
    draw = np.random.default_rng(n)
    kinds = np.full((n, 6), Aligned.INSIDE)
    kinds[:, 0], kinds[:, 4], kinds[:, 5] = Aligned.START, Aligned.EXACT, Aligned.NOT
    mask = np.ones((n, 6), bool)
    mask[n // 2 + 1 :] = False
    own = draw.normal(size=(n, 6)).astype(np.float32)
    theirs = np.repeat(draw.normal(size=(n, 1)), 6, 1).astype(np.float32)
    theirs[0] -= 1000 * (n > 2)
    gaps = np.clip(own[:, :4].sum(-1) - theirs[:, 0], -20, 20)
    expected = np.zeros((n, 6))
    for row in np.flatnonzero(mask[:, 0]):
        others = [gaps[i] for i in range(n) if mask[i, 0] and i != row]
        expected[row, 0] = np.mean(others) if others else 0
    SAME(token_spans.span_baseline(kinds, theirs, own, mask), expected)
    own[0] += 1
    SAME(token_spans.span_baseline(kinds, theirs, own, mask)[0], expected[0])


def test_a_baseline_changes_the_gradient_of_spans_of_several_tokens_only():
    """By b times the gradient of the score, and no value; not where all spans are sampled."""
    sums, b = -abs(rand(B, C, seed=12)), abs(rand(B, C, seed=15))
    every, no_cap = np.ones((B, C), bool), 1e9

    def both(**fields):
        signals = (sent(KINDS, span_logprobs=sums, baseline=x, **fields) for x in (0 * b, b))
        return [loss_of(signal=x, mask=every, ratio_cap=no_cap)(HIDDEN, HEAD) for x in signals]

    def taken():
        """In float64: the weight of a token's logits in what the baseline takes off."""
        hidden, head = (x.astype(np.float64) for x in (HIDDEN, HEAD))
        p = np.exp(hidden @ head.T / 1.3)
        p /= p.sum(-1, keepdims=True)
        own, slope = np.log(np.take_along_axis(p, TOKENS[..., None], -1)[..., 0]), np.zeros_like(p)
        for row, first, end in SPANS:
            weight = b[row, first] * np.exp((own - SAMPLER)[row, first:end].sum()) / 1.3
            for at in range(first, end):  # of the score, the span's log-prob
                slope[row, at] += weight * ((np.arange(V) == TOKENS[row, at]) - p[row, at])
            # ... less that of the first token's outcome
            members = OUTCOMES.student == OUTCOMES.student[TOKENS[row, first]]
            share = np.where(members, p[row, first], 0)
            slope[row, first] -= weight * (share / share.sum() - p[row, first])
        return slope @ head, np.einsum("bcv,bcd->vd", slope, hidden)

    (value, plain), (same, found) = both(hidden=THEIRS)
    SAME(value, same)
    for slope, wanted, more in zip(found, plain, taken(), strict=True):
        assert np.abs(more).max() > 1e-3
        np.testing.assert_allclose(slope, wanted - more, atol=3e-4, rtol=1e-4)
    (_, plain), (_, found) = both()
    jax.tree.map(SAME, found, plain)
