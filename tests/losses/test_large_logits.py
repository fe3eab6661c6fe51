"""Log-probs and gradients are as exact as the differences of the logits, however large these are.

The logits are given as they are, as hidden states whose head is the identity.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_losses as dense
import pytest
from rounding import tolerance
from tiny_models import make_mesh

from jaxrl.losses import normaliser, token_spans
from jaxrl.losses.distill import divergence_from_hidden, topk_divergence_from_hidden
from jaxrl.losses.divergence import MIN, EntropyAware
from jaxrl.losses.head import (
    TeacherMixture,
    logprobs_and_entropy_from_hidden,
    logprobs_at,
    topk_from_hidden,
)
from jaxrl.sampling.sampler import SamplingParams, draw_tokens, sampling_arrays
from jaxrl.score.score_data import _kl
from jaxrl.types import Aligned, AlignedSignal

V, K, T = 47, 5, 0.7
SCALES = np.array([1, 30, 100, 130, 1000], np.float32)
SHIFTS = (1e4, -1e4)
HEAD = np.eye(V, dtype=np.float32)
HALF = np.full((len(SCALES), 4, 2), 0.5, np.float32)
TERM = EntropyAware(coef=0.7, threshold=0.1, top_k=K)
MASK = np.ones((len(SCALES), 4), bool)


def logits(seed):
    """[scales, 4, V]: spread as far as the scale says; close to it; a confident token, on its other
    side of 0; and flat logits. Multiples of 2^-8, to which 1e4 is added without rounding."""
    draw, scale = np.random.default_rng(seed), SCALES[:, None]
    near = draw.normal(0, 1, (len(SCALES), 4, V))
    near[:, 0] *= scale
    near[:, 1] += scale
    near[:, 2] -= scale
    near[np.arange(len(SCALES)), 2, draw.integers(0, V, len(SCALES))] += 9
    near[:, 3] /= 64
    return (np.round(near * 256) / 256).astype(np.float32)


STUDENT, TEACHER, OTHER = map(logits, range(3))
TOKENS = STUDENT.argmax(-1)
TOKENS[:, 1] = 7


@cache
def program(tensor):
    """Of everything that makes log-probs of logits, and of gradients with respect to them."""
    mesh = None if tensor == 1 else make_mesh(1, 1, tensor)
    options = {"temperature": T, "chunk": 11, "mesh": mesh}

    def graded(loss, z):
        (_, more), gradient = jax.value_and_grad(loss, has_aux=True)(z)
        return more, gradient

    def run(z, t, other, tokens):
        def policy(z):
            found = logprobs_and_entropy_from_hidden(z, HEAD, tokens, **options)
            return sum(x.sum() for x in found), found

        def divergence(z, beta, teachers=t, heads=HEAD, **more):
            settings = {"beta": beta, **options, **more}
            total, _, metrics = divergence_from_hidden(z, HEAD, teachers, heads, MASK, **settings)
            return total, metrics["divergence"][0]

        sent = topk_from_hidden(t, HEAD, K, **options)

        def coarse(z):
            settings = {"beta": 0.3, **options}
            total, _, metrics = topk_divergence_from_hidden(z, HEAD, *sent[:3], MASK, **settings)
            return total, metrics["divergence"][0]

        found = {"policy": graded(policy, z), "topk": graded(coarse, z), "sent": sent}
        for name, more in {
            "fused": {},
            "lean": {"lean": True},
            "term": {"entropy_aware": TERM},
        }.items():
            betas = (0.3,) if more else (0.0, 0.3, 1.0)
            found |= {f"{name} {b}": graded(partial(divergence, beta=b, **more), z) for b in betas}
        two = {"teachers": [t, other], "heads": [HEAD, HEAD]}
        for kind in ("arithmetic", "geometric"):
            mixture = TeacherMixture(kind, HALF)
            found[kind] = graded(partial(divergence, beta=0.3, mixture=mixture, **two), z)
            found[f"{kind} at"] = logprobs_at(
                (t, other), (HEAD, HEAD), sent.ids, mixture=mixture, **options
            )
        return found

    return jax.jit(run)


@cache
def found(tensor, shift=0.0):
    shifted = [z + np.float32(shift) for z in (STUDENT, TEACHER, OTHER)]
    return jax.device_get(program(tensor)(*shifted, TOKENS))


LOGS, THEIRS, THIRD = (dense.log_softmax(z, T) for z in (STUDENT, TEACHER, OTHER))
IDS = np.argsort(-TEACHER, -1, kind="stable")[..., :K]
MIXED = {
    "arithmetic": np.logaddexp(THEIRS, THIRD) + np.log(0.5),
    "geometric": (THEIRS + THIRD) / 2 - dense.log_sum((THEIRS + THIRD) / 2),
}


def slopes(of_logits):
    """Of each token's value with respect to its logits, in float64."""
    return dense.value_and_gradients(of_logits, STUDENT, HEAD, MASK)[1][0]


def close(found, expected, size):
    """Asserts that values have no other error than float32 has by itself: sizes as in
    `tolerance`."""
    size = np.broadcast_to(size, np.shape(expected))
    excess = np.abs(found - expected) - tolerance(np.float32, V, size) - 1e-30
    assert (excess <= 0).all(), (excess.max(), np.argwhere(excess > 0)[:5])


def error(logs):
    """The size of what rounds in log-probs: that of the differences, and of the log of a sum."""
    return 1 + np.abs(logs)


def divergence_sizes(q, p, p_error=None):
    """Of a divergence of log-probs, and of its gradient: what each outcome adds, times the relative
    error of its probability, and its probability times the errors of the logs."""
    q_error, p_error = error(q), error(p) if p_error is None else p_error
    each = np.abs(p - q) * np.maximum(q_error, p_error) + q_error + p_error
    value = ((np.exp(p) + np.exp(q)) * each).sum(-1)
    slope = np.exp(q) * (each + q_error * value[..., None]) + np.exp(p) * p_error
    return value, slope.max(-1, keepdims=True) / T


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_policy_s_log_probs_entropies_and_their_gradients(tensor):
    (logprobs, entropy), gradient = found(tensor)["policy"]
    own = np.take_along_axis(LOGS, TOKENS[..., None], -1)[..., 0]
    shares = np.exp(LOGS)
    close(logprobs, own, error(own))
    close(entropy, -(shares * LOGS).sum(-1), (shares * error(LOGS) ** 2).sum(-1))

    def policy(z):
        logs = dense.log_softmax(z, T)
        chosen = np.take_along_axis(logs, TOKENS[..., None], -1)[..., 0]
        return chosen - (np.exp(logs) * logs).sum(-1)

    inherited = (shares * error(LOGS) ** 2).sum(-1, keepdims=True)
    size = shares * error(LOGS) * (error(LOGS) + inherited)
    close(gradient, slopes(policy), (1 + size.max(-1, keepdims=True)) / T)


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_teachers_send(tensor):
    results = found(tensor)
    wanted = dense.with_tail(THEIRS, IDS)
    sent = results["sent"]
    np.testing.assert_array_equal(np.sort(sent.ids), np.sort(IDS))
    order = np.take_along_axis(THEIRS, sent.ids, -1)
    close(sent.logprobs, order, error(order))
    close(sent.tail_logprob, wanted[..., -1], error(wanted[..., -1]))
    close(
        sent.entropy,
        -(np.exp(THEIRS) * THEIRS).sum(-1),
        (np.exp(THEIRS) * error(THEIRS) ** 2).sum(-1),
    )
    for kind, logs in MIXED.items():
        both = dense.with_tail(logs, sent.ids)
        parts = [np.abs(dense.with_tail(x, sent.ids)) for x in (THEIRS, THIRD)]
        logprobs, tail = results[f"{kind} at"]
        size = 1 + np.abs(both) + sum(parts)
        close(np.concatenate([logprobs, tail[..., None]], -1), both, size)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(
    ("name", "beta"),
    [("fused", 0.0), ("fused", 0.3), ("fused", 1.0), ("lean", 0.3), ("term", 0.3)],
)
def test_divergences_and_their_gradients(name, beta, tensor):
    value, gradient = found(tensor)[f"{name} {beta}"]
    of_value, of_slope = divergence_sizes(LOGS, THEIRS)
    close(value, dense.jsd(LOGS, THEIRS, beta), of_value)
    term = TERM if name == "term" else None

    def divergence(z):
        student = dense.log_softmax(z, T)
        more = 0 if term is None else dense.entropy_aware(student, THEIRS, term)
        return dense.jsd(student, THEIRS, beta) + more

    if term is not None:
        listed = (dense.with_tail(x, IDS) for x in (LOGS, THEIRS))
        of_slope = of_slope + TERM.coef * divergence_sizes(*listed)[1]
    close(gradient, slopes(divergence), of_slope)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_divergence_of_the_most_probable_tokens(tensor):
    value, gradient = found(tensor)["topk"]
    listed = dense.with_tail(THEIRS, IDS)
    of_value, of_slope = divergence_sizes(dense.with_tail(LOGS, IDS), listed)

    def divergence(z):
        return dense.jsd(dense.with_tail(dense.log_softmax(z, T), IDS), listed, 0.3)

    close(value, divergence(STUDENT), of_value)
    close(gradient, slopes(divergence), of_slope)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("kind", MIXED)
def test_mixtures_of_teachers(kind, tensor):
    value, gradient = found(tensor)[kind]
    logs = MIXED[kind]
    sizes = divergence_sizes(LOGS, logs, error(logs) + np.abs(THEIRS) + np.abs(THIRD))
    close(value, dense.jsd(LOGS, logs, 0.3), sizes[0])
    close(gradient, slopes(lambda z: dense.jsd(dense.log_softmax(z, T), logs, 0.3)), sizes[1])


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_constant_in_all_logits_changes_no_bit(shift, tensor):
    jax.tree.map(np.testing.assert_array_equal, found(tensor, shift), found(tensor))


@cache
def elsewhere():
    """Of what no mesh divides: a teacher's other vocabulary, and the error of stored states."""
    draw = np.random.default_rng(5)
    common = np.append(np.arange(20), draw.integers(0, 21, V - 20)).astype(np.int32)
    common[common == 20] = V
    outcomes = token_spans.Outcomes(*map(jnp.asarray, (common, draw.permutation(common))))
    kinds = np.where(np.arange(4) % 2 > 0, Aligned.EXACT, Aligned.START) * MASK
    options = {"temperature": T, "chunk": 11}

    def run(z, t, tokens, logprobs):
        settings = {"signal": "topk", "top_k": K, **options}
        sent = token_spans.aligned_signal(t, HEAD, tokens, outcomes, **settings)
        signal = AlignedSignal(logprobs, hidden=t, kinds=kinds, sizes=jnp.ones_like(logprobs))

        def loss(z):
            settings = {"beta": 0.3, "ratio_cap": 2.0, **options}
            return token_spans.span_loss(
                *(z, HEAD, token_spans.SampledTokens(tokens, MASK, logprobs)),
                *(signal, outcomes, HEAD),
                **settings,
            )[0]

        flat = [x.reshape(-1, V) for x in (z, t)]
        stored = _kl(*flat, HEAD, jnp.float32(1 / T), None)
        return sent, jax.value_and_grad(loss)(z), stored

    return jax.jit(run)


def test_other_vocabularies_and_stored_states_know_no_constant_either():
    own = np.take_along_axis(LOGS, TOKENS[..., None], -1)[..., 0].astype(np.float32)
    first, *others = (
        jax.device_get(elsewhere()(STUDENT + shift, TEACHER + shift, TOKENS, own))
        for shift in map(np.float32, (0, *SHIFTS))
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
    sent, _, stored = first
    theirs = np.take_along_axis(THEIRS, TOKENS[..., None], -1)[..., 0]
    close(sent.span_logprobs, theirs, error(theirs))
    sizes = divergence_sizes(THEIRS, LOGS)[0]
    close(stored, dense.jsd(THEIRS, LOGS, 0).reshape(-1), sizes.reshape(-1))


@pytest.mark.parametrize("temperature", [0.0, T])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}])
def test_the_sampler_s_log_probs_are_the_learner_s(truncation, temperature):
    """To the rounding of one sum in two orders."""
    knobs = sampling_arrays(SamplingParams(1, temperature, **truncation))
    rows, random = STUDENT.reshape(-1, V), np.random.default_rng(6).random((4 * len(SCALES), 2))
    run = jax.jit(draw_tokens)
    draw, *shifted = (
        jax.device_get(run(rows + np.float32(shift), random.astype(np.float32), knobs))
        for shift in (0, *SHIFTS)
    )
    for other in shifted:
        jax.tree.map(np.testing.assert_array_equal, other, draw)
    tokens, used = draw.tokens.reshape(MASK.shape), temperature or 1.0
    logs = dense.log_softmax(STUDENT, used)
    own = np.take_along_axis(logs, tokens[..., None], -1)[..., 0]
    learner = jax.jit(partial(logprobs_and_entropy_from_hidden, temperature=used))
    for logprobs in (draw.logprobs.reshape(MASK.shape), learner(STUDENT, HEAD, tokens)[0]):
        close(logprobs, own, error(own))


def test_one_read_gives_what_two_do():
    """The reduction of a GPU's program: any order, equal logits, none, and what is no number."""
    draw = np.random.default_rng(8)
    rows = np.concatenate([STUDENT.reshape(-1, V), draw.normal(0, 50, (20, V)).astype(np.float32)])
    rows[1], rows[2], rows[3, ::2], rows[4] = 5, -np.inf, -np.inf, MIN
    rows[5, 3], rows[6, 3] = np.nan, np.inf
    scale = np.float32(1 / T)
    one, two = (
        jax.device_get(jax.jit(read)(rows, scale))
        for read in (normaliser._in_one_read, normaliser._in_two_reads)
    )
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_allclose(one[1], two[1], rtol=tolerance(np.float32, V))
    assert np.isnan(one[1][5]) and np.isnan(one[1][6]) and one[1][2] == 0
