"""Losses from hidden states are the dense ones, value and gradient, on one device and on eight.

Dense = logits of everything, and imaginary steps. The chunked code has its gradients written by
hand.
"""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy_losses as dense
import pytest
from cases import and_slow
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.losses.chunked import Term, shard_inputs
from jaxrl.losses.distill import (
    divergence_from_hidden,
    entropy_aware_from_topk,
    topk_divergence_from_hidden,
)
from jaxrl.losses.divergence import MIN, EntropyAware, masked_sum
from jaxrl.losses.head import (
    logprobs_and_entropy_from_hidden,
    logprobs_at,
    logprobs_from_hidden,
    topk_from_hidden,
)
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Uncertainty

B, C, D, DT, V, VT, K = 4, 5, 12, 10, 50, 53, 6
"""V and VT divide by neither 4 nor 8, DT not by 4, B not by 8, and B * C not by the chunk."""
CHUNK = 3
MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]
TERM = EntropyAware(coef=0.7, threshold=2.4, top_k=4)


def rand(*shape, seed, scale=1.0):
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2, scale=0.6)
TEACHER, TEACHER_HEAD = rand(B, C, DT, seed=3), rand(VT, DT, seed=4, scale=0.6)
TOKENS = np.random.default_rng(5).integers(0, V, (B, C))
MASK = np.random.default_rng(6).random((B, C)) < 0.7
WEIGHT = rand(B, C, seed=7)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def of_teacher(temperature=1.0):
    """The teacher's log-probs."""
    logits = TEACHER.astype(np.float64) @ TEACHER_HEAD[:V].astype(np.float64).T
    return dense.log_softmax(logits, temperature)


def in_numpy(of_logits, mask=MASK):
    return dense.value_and_gradients(of_logits, HIDDEN, HEAD, mask)


def value_and_grads(loss, hidden=HIDDEN, head=HEAD):
    both = jax.value_and_grad(lambda h, w: loss(h, w), argnums=(0, 1))
    return jax.device_get(jax.jit(both)(hidden, head))


def assert_same(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance), a, b
    )


def dense_divergence(*, beta, temperature=1.0, term=None):
    """Value and gradients."""
    teacher = of_teacher(temperature)

    def of_logits(z):
        student = dense.log_softmax(z, temperature)
        more = 0 if term is None else dense.entropy_aware(student, teacher, term)
        return dense.jsd(student, teacher, beta) + more

    return in_numpy(of_logits)


def chunked_divergence(hidden, head, *, chunk=CHUNK, term=None, **settings):
    total, _, _ = divergence_from_hidden(
        hidden, head, TEACHER, TEACHER_HEAD, MASK, chunk=chunk, entropy_aware=term, **settings
    )
    return total


@cache
def program(chunk, term, lean):
    """Of the divergence, its count and metrics, and its gradients: all else is an argument."""

    def loss(h, w, t, tw, mask, temperature):
        total, *more = divergence_from_hidden(
            *(h, w, t, tw, mask),
            **{"beta": 0.5, "chunk": chunk, "lean": lean, "entropy_aware": term},
            temperature=temperature,
        )
        return total, more

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def found(*changed, chunk=CHUNK, term=None, lean=False, mask=MASK, temperature=1.0):
    """(total, count, metrics), gradients: of HIDDEN, HEAD, TEACHER and TEACHER_HEAD, or of those
    given in place of the first of them."""
    given = *changed, *(HIDDEN, HEAD, TEACHER, TEACHER_HEAD)[len(changed) :]
    each = program(chunk, term, lean)(*given, mask, np.float32(temperature))
    (total, more), gradients = jax.device_get(each)
    return (total, *more), gradients


def halved(*changed, **settings):
    """The value and the gradients of the same."""
    (total, *_), gradients = found(*changed, **settings)
    return total, gradients


@cache
def shipped(k, temperature=1.0, mesh=None):
    settings = {"chunk": CHUNK, "mesh": mesh, "v": V}

    def send(h, w):
        return topk_from_hidden(h, w, k, temperature=temperature, **settings)

    return jax.device_get(jax.jit(send)(TEACHER, TEACHER_HEAD))


@cache
def own_topk():
    """Of the student."""
    return jax.device_get(jax.jit(partial(topk_from_hidden, k=K, chunk=CHUNK))(HIDDEN, HEAD))


FULL = {"beta": 0.3, "temperature": 1.3, "term": TERM}
COARSE = {"beta": 0.3, "temperature": 0.7}
LOSSES = ["fused", "lean", "topk", "topk_lean", "entropy", "logprobs"]


def make_loss(name, mesh=None):
    """A scalar of (hidden, head) for each kind of loss; what it divides by is the caller's."""
    lean = name.endswith("lean")
    if name in ("fused", "lean"):
        return partial(chunked_divergence, **FULL, lean=lean, mesh=mesh)
    if name.startswith("topk"):
        sent = shipped(K, COARSE["temperature"])[:3]
        settings = COARSE | {"chunk": CHUNK, "lean": lean, "mesh": mesh}
        return lambda h, w: topk_divergence_from_hidden(h, w, *sent, MASK, **settings)[0]
    if name == "entropy":
        ids, logprobs, tail, entropy = shipped(K)
        return lambda h, w: entropy_aware_from_topk(
            *(h, w, as_sent(ids, logprobs, tail, entropy), MASK),
            term=TERM,
            chunk=CHUNK,
            mesh=mesh,
        )[0]

    def policy(h, w):
        logprobs, entropy = logprobs_and_entropy_from_hidden(
            h, w, TOKENS, temperature=0.8, chunk=CHUNK, mesh=mesh
        )
        return masked_sum(WEIGHT * logprobs + jnp.square(entropy), MASK)

    return policy


def as_sent(ids, logprobs, tail, entropy):
    return Uncertainty(best_ids=ids, best_logprobs=logprobs, best_tail=tail, entropy=entropy)


@cache
def every_loss(shape=None):
    """Value and gradients of each of LOSSES, from one compiled function."""
    losses = [make_loss(name, shape and mesh_of(shape)) for name in LOSSES]
    both = [jax.value_and_grad(loss, argnums=(0, 1)) for loss in losses]
    found = jax.jit(lambda h, w: [f(h, w) for f in both])(HIDDEN, HEAD)
    return dict(zip(LOSSES, jax.device_get(found), strict=True))


@pytest.mark.parametrize(
    ("beta", "term"), and_slow([(0.0, TERM), (0.3, TERM), (1.0, None)], [(0.3, None)]), ids=str
)
def test_divergence_is_the_dense_one(beta, term):
    settings = {"beta": beta, "temperature": 1.3, "term": term}
    expected = dense_divergence(**settings)
    for lean in (False, True):
        if settings == FULL:
            assert_same(every_loss()["lean" if lean else "fused"], expected)
        else:
            value = value_and_grads(partial(chunked_divergence, lean=lean, **settings))
            assert_same(value, expected)


@pytest.mark.parametrize(
    ("signal", "beta"),
    and_slow([("topk", 0.3), ("student_topk", 1.0)], [("topk", 0.0)]),
    ids=str,
)
def test_topk_divergence_is_the_dense_one(signal, beta):
    temperature = COARSE["temperature"]
    if signal == "topk":
        ids, logprobs, tail, _ = shipped(K, temperature)
    else:
        ids = own_topk().ids
        look_up = jax.jit(partial(logprobs_at, temperature=temperature, chunk=CHUNK, v=V))
        logprobs, tail = jax.device_get(look_up(TEACHER, TEACHER_HEAD, ids))
    settings = {"beta": beta, "temperature": temperature}
    sent = np.concatenate([logprobs, tail[..., None]], -1).astype(np.float64)
    expected = in_numpy(
        lambda z: dense.jsd(dense.with_tail(dense.log_softmax(z, temperature), ids), sent, beta)
    )
    for lean in (False, True):
        if (signal, settings) == ("topk", COARSE):
            value = every_loss()["topk_lean" if lean else "topk"]
        else:
            value = value_and_grads(
                lambda h, w, lean=lean: topk_divergence_from_hidden(
                    h, w, ids, logprobs, tail, MASK, chunk=CHUNK, lean=lean, **settings
                )[0]
            )
        assert_same(value, expected)


def test_topk_at_k_equal_v_is_the_full_divergence():
    sent = shipped(V)[:3]

    def coarse(h, w):
        return topk_divergence_from_hidden(h, w, *sent, MASK, beta=0.5, chunk=CHUNK)[0]

    assert_same(value_and_grads(coarse), halved())


def test_entropy_term_from_shipped_topk_is_the_dense_one():
    """K = 6 were sent and the term uses 4: the other two belong to the tail."""
    teacher = of_teacher()
    expected = in_numpy(lambda z: dense.entropy_aware(dense.log_softmax(z), teacher, TERM))
    assert expected[0] > 0.1
    assert_same(every_loss()["entropy"], expected)


def test_logprobs_and_entropy_are_the_dense_ones():
    def policy(z):
        logprobs = dense.log_softmax(z, 0.8)
        entropy = -(np.exp(logprobs) * logprobs).sum(-1)
        chosen = np.take_along_axis(logprobs, TOKENS[..., None], -1)[..., 0]
        return WEIGHT * chosen + np.square(entropy)

    assert_same(every_loss()["logprobs"], in_numpy(policy))
    alone = jax.jit(partial(logprobs_from_hidden, chunk=CHUNK))
    both = jax.jit(partial(logprobs_and_entropy_from_hidden, chunk=CHUNK))
    np.testing.assert_array_equal(alone(HIDDEN, HEAD, TOKENS), both(HIDDEN, HEAD, TOKENS)[0])
    assert (np.asarray(alone(HIDDEN, HEAD, TOKENS + V)) < MIN / 2).all()


def test_topk_and_logprobs_at_are_the_dense_ones():
    logprobs = of_teacher(1.7)
    ids = np.argsort(-logprobs, -1)[..., :K]
    sent, wanted = shipped(K, 1.7), dense.with_tail(logprobs, ids)
    np.testing.assert_array_equal(sent.ids, ids)
    assert_same(sent.logprobs, wanted[..., :-1])
    assert_same(sent.tail_logprob, wanted[..., -1])
    assert_same(sent.entropy, -(np.exp(logprobs) * logprobs).sum(-1))
    some = np.random.default_rng(8).permuted(np.tile(np.arange(V), (B, C, 1)), axis=-1)[..., :K]
    look_up = jax.jit(partial(logprobs_at, temperature=1.7, chunk=CHUNK, v=V))
    at, tail = map(np.asarray, look_up(TEACHER, TEACHER_HEAD, some))
    assert_same(np.concatenate([at, tail[..., None]], -1), dense.with_tail(logprobs, some))


@pytest.mark.parametrize("shape", and_slow(MESHES[3:], [(shape,) for shape in MESHES[:3]]), ids=str)
def test_eight_devices_are_one(shape):
    """With sizes that the mesh does not divide, and teacher rows that the student does not have."""
    assert_same(every_loss(shape), every_loss())


@pytest.mark.parametrize(
    ("shape", "lean"),
    and_slow([((1, 2, 4), True)], [((2, 2, 2), False), ((1, 8, 1), False)]),
    ids=str,
)
def test_eight_devices_are_one_with_heads_split_by_the_rules(shape, lean):
    mesh = mesh_of(shape)

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    heads = rand(64, 16, seed=11, scale=0.5), rand(64, 8, seed=12, scale=0.5)
    tokens = rand(8, 3, 16, seed=13), rand(8, 3, 8, seed=14), np.ones((8, 3), bool)

    def loss(h, w, t, tw, m):
        return divergence_from_hidden(h, w, t, tw, m, beta=0.5, chunk=2, lean=lean, mesh=mesh)[0]

    args = tokens[0], heads[0], tokens[1], heads[1], tokens[2]
    teacher = dense.log_softmax(args[2].astype(np.float64) @ args[3].T)
    expected = dense.value_and_gradients(
        lambda z: dense.jsd(dense.log_softmax(z), teacher, 0.5), *args[:2], args[4]
    )
    rows = ("data", "fsdp")
    placed = [
        place(args[0], rows),
        place(args[1], "tensor", "fsdp"),
        place(args[2], rows),
        place(args[3], "tensor", "fsdp"),
        place(args[4], rows),
    ]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, gradients = step(*placed)
    assert_same((value, gradients), expected)
    assert gradients[1].sharding.is_equivalent_to(placed[1].sharding, 2)


@pytest.mark.parametrize("shape", and_slow(MESHES[3:], [(MESHES[2],)]), ids=str)
def test_topk_of_a_split_vocabulary(shape):
    one, many = shipped(K), shipped(K, mesh=mesh_of(shape))
    np.testing.assert_array_equal(one.ids, many.ids)
    assert_same(one, many)
    look_up = jax.jit(partial(logprobs_at, chunk=CHUNK, v=V, mesh=mesh_of(shape)))
    assert_same(look_up(TEACHER, TEACHER_HEAD, one.ids), (one.logprobs, one.tail_logprob))


def test_gradient_of_the_head_is_reduced_after_the_loop():
    """In it, it would be sent once for each chunk."""
    mesh = mesh_of((1, 8, 1))
    head, teacher_head = rand(V, 16, seed=1), rand(V, 8, seed=2)
    hidden, teacher = rand(8, 6, 16, seed=3), rand(8, 6, 8, seed=4)

    def loss(h, w):
        return divergence_from_hidden(
            h, w, teacher, teacher_head, np.ones((8, 6), bool), beta=0.5, chunk=2, mesh=mesh
        )[0]

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, head).compile().as_text()
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    assert bodies
    computation, inside = None, 0
    for line in text.splitlines():
        if opened := re.match(r"%?([\w.\-]+) \(.*\{$", line):
            computation = opened.group(1)
        inside += computation in bodies
        found = re.search(r" (all-reduce|reduce-scatter|all-gather|all-to-all)(-start)?\(", line)
        assert not (found and computation in bodies), line
    assert inside and "reduce-scatter" in text


@pytest.mark.parametrize("lean", and_slow([False], [True]))
def test_gradient_scales_with_what_comes_after(lean):
    """d f(loss) = f'(loss) d loss, and two losses add up."""
    loss = partial(chunked_divergence, beta=0.5, lean=lean)
    value, gradients = halved(lean=lean)
    _, after = value_and_grads(lambda h, w: jnp.square(loss(h, w)) + 3 * loss(h, w))
    assert_same(after, jax.tree.map(lambda g: (2 * value + 3) * g, gradients))


def test_gradient_is_that_of_the_loss_by_finite_differences():
    """Along random directions, in float32: a step of 1e-2 leaves about 1e-4."""
    _, gradients = halved(term=TERM)
    for i, x in enumerate((HIDDEN, HEAD)):
        direction, step = rand(*x.shape, seed=20 + i), 1e-2
        moved = [[HIDDEN, HEAD], [HIDDEN, HEAD]]
        moved[0][i], moved[1][i] = x + step * direction, x - step * direction
        ahead, behind = (halved(*each, term=TERM)[0] for each in moved)
        slope = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(slope, (gradients[i] * direction).sum(), rtol=2e-3)


def test_teacher_and_metrics_carry_no_gradient():
    def loss(h, w, t, tw, metric):
        total, count, metrics = divergence_from_hidden(
            h, w, t, tw, MASK, beta=0.5, chunk=CHUNK, entropy_aware=TERM
        )
        return sum(x.sum() for x, _ in metrics.values()) if metric else total / count

    args = HIDDEN, HEAD, TEACHER, TEACHER_HEAD
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), static_argnums=4)
    of_loss, of_metrics = jax.device_get((gradient(*args, False), gradient(*args, True)))
    assert all(np.abs(g).max() > 1e-4 for g in of_loss[:2])
    for zero in (*of_loss[2:], *of_metrics):
        np.testing.assert_array_equal(zero, 0)
    other = gradient(HIDDEN, HEAD, -TEACHER, TEACHER_HEAD, False)
    assert np.abs(np.asarray(other[0]) - of_loss[0]).max() > 1e-3


def test_metrics():
    mine, theirs = dense.log_softmax(HIDDEN @ HEAD.T), of_teacher()

    def entropy(lp):
        return -(np.exp(lp) * lp).sum(-1)

    agree = mine.argmax(-1) == theirs.argmax(-1)
    gate = entropy(theirs) >= TERM.threshold
    (total, count, metrics), _ = found(term=TERM)
    assert {float(c.sum()) for _, c in metrics.values()} == {float(MASK.sum())} == {float(count)}
    assert_same(metrics["student_entropy"][0], entropy(mine)[MASK].sum())
    assert_same(metrics["teacher_entropy"][0], entropy(theirs)[MASK].sum())
    np.testing.assert_array_equal(metrics["top1_agreement"][0], agree & MASK)
    np.testing.assert_array_equal(metrics["top1_agreement"][1], MASK)
    assert (
        0 < (gate & MASK).sum() < MASK.sum() and metrics["entropy_gate"][0] == (gate & MASK).sum()
    )
    assert_same(metrics["divergence"][0].sum() + metrics["entropy_aware"][0], total)

    # With the student's own logits as the teacher, every token agrees.
    sent = own_topk()
    loss = jax.jit(partial(topk_divergence_from_hidden, beta=0.5, chunk=CHUNK))
    _, _, metrics = loss(HIDDEN, HEAD, *sent[:3], MASK)
    for told in metrics["top1_agreement"]:
        np.testing.assert_array_equal(told, MASK)
    for side in ("teacher", "student"):
        tail = np.exp(sent.tail_logprob)[MASK].sum()
        assert_same(metrics[f"{side}_tail_mass"][0], tail)


@pytest.mark.parametrize("lean", and_slow([False], [True]))
def test_chunks_padding_and_micro_batches_never_matter(lean):
    expected = halved(lean=lean)
    for chunk in (7, 1000):
        assert_same(halved(chunk=chunk, lean=lean), expected)

    hidden, teacher = (np.where(MASK[..., None], x, np.nan) for x in (HIDDEN, TEACHER))
    assert_same(halved(hidden, HEAD, teacher, lean=lean), expected)

    def part(h, w, rows):
        return divergence_from_hidden(
            h[rows], w, TEACHER[rows], TEACHER_HEAD, MASK[rows], beta=0.5, chunk=CHUNK, lean=lean
        )[0]

    def split(h, w):
        return part(h, w, slice(0, 1)) + part(h, w, slice(1, B))

    assert_same(value_and_grads(split), expected)

    (total, count, _), _ = found(lean=lean, mask=np.zeros_like(MASK))
    assert (total, count) == (0, 0)


@pytest.mark.parametrize("name", and_slow(["fused"], ["lean"]))
def test_permuting_the_vocabulary_permutes_the_gradient(name):
    words = np.random.default_rng(9).permutation(V)
    lean, rows = name == "lean", np.concatenate([words, np.arange(V, VT)])
    one = halved(lean=lean)
    other = halved(HIDDEN, HEAD[words], TEACHER, TEACHER_HEAD[rows], lean=lean)
    assert_same((one[0], (one[1][0], one[1][1][words])), other)


def test_temperature_may_be_traced():
    values = [halved(temperature=t)[0] for t in (0.5, 2.0)]
    for t, value in zip((0.5, 2.0), values, strict=True):
        assert_same(value, dense_divergence(beta=0.5, temperature=t)[0])
    assert values[0] > 1.5 * values[1]


def test_bfloat16_is_near_float32():
    """Logits and sums are float32; only the operands of the products are rounded (2^-9)."""
    low = [x.astype(jnp.bfloat16) for x in (HIDDEN, HEAD, TEACHER, TEACHER_HEAD)]
    exact = [x.astype(jnp.float32) for x in low]

    expected, gradients = halved(*exact)
    for lean in (False, True):
        value, found = halved(*low, lean=lean)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for x, y in zip(found, gradients, strict=True):
            assert x.dtype == jnp.bfloat16
            assert np.linalg.norm(x.astype(np.float32) - y) < 0.01 * np.linalg.norm(y)


@pytest.mark.parametrize(
    ("dtype", "lean"),
    and_slow([("float32", False), ("bfloat16", True)], [("float32", True), ("bfloat16", False)]),
)
def test_memory_at_152k_tokens_of_vocabulary(dtype, lean):
    """4096 tokens, widths 1024 and 2048: temporaries against the formula as usually written."""
    tokens, vocab = (8, 512), 151936

    def shape(*s):
        return jax.ShapeDtypeStruct(s, dtype)

    args = shape(*tokens, 1024), shape(vocab, 1024), shape(*tokens, 2048), shape(vocab, 2048)
    mask = np.ones(tokens, bool)

    def naive(h, w, t, tw):
        product = partial(jnp.einsum, "bcd,vd->bcv", preferred_element_type=jnp.float32)
        q, p = jax.nn.log_softmax(product(h, w)), jax.nn.log_softmax(product(t, tw))
        m = jnp.logaddexp(q, p) - jnp.log(2.0)
        value = (jnp.exp(p) * (p - m) + jnp.exp(q) * (q - m)).sum(-1) / 2
        return masked_sum(value, mask)

    def chunked(h, w, t, tw):
        return divergence_from_hidden(h, w, t, tw, mask, beta=0.5, lean=lean)[0]

    def temporaries(loss):
        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(chunked) * (17 if lean else 12) <= temporaries(naive)


@pytest.mark.parametrize("name", LOSSES)
def test_no_array_of_all_tokens_by_all_vocabulary(name):
    """In the whole traced program, loops and both passes included."""
    largest = 0

    def visit(jaxpr):
        nonlocal largest
        for equation in jaxpr.eqns:
            for out in equation.outvars:
                if V in out.aval.shape:
                    largest = max(largest, int(np.prod(out.aval.shape)))
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    loss = make_loss(name)
    visit(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(HIDDEN, HEAD).jaxpr)
    assert 0 < largest <= max(V * D, CHUNK * V) < B * C * V


def test_bad_settings_are_refused():
    call = partial(divergence_from_hidden, HIDDEN, HEAD, TEACHER, TEACHER_HEAD, MASK)
    with pytest.raises(ValueError, match=r"beta is -0\.1"):
        call(beta=-0.1)
    with pytest.raises(ValueError, match="temperature is 0"):
        call(beta=0.5, temperature=0)
    with pytest.raises(ValueError, match="chunk is 0"):
        call(beta=0.5, chunk=0)
    with pytest.raises(ValueError, match="top_k is 51.*50 tokens"):
        call(beta=0.5, entropy_aware=EntropyAware(top_k=51))
    with pytest.raises(ValueError, match="12 wide and their head 10"):
        shard_inputs(Term(), [(HIDDEN, TEACHER_HEAD)], MASK, {}, chunk=8)
    with pytest.raises(ValueError, match="v is 51; .* 50 rows"):
        logprobs_from_hidden(HIDDEN, HEAD, TOKENS, v=51)
    with pytest.raises(ValueError, match="top-k is 0"):
        topk_from_hidden(HIDDEN, HEAD, 0)
    sent = jax.tree.map(lambda x: x[..., :2], shipped(K))
    with pytest.raises(ValueError, match="top 4 and 2 were sent"):
        entropy_aware_from_topk(
            *(HIDDEN, HEAD, as_sent(sent.ids, sent.logprobs, *shipped(K)[2:]), MASK), term=TERM
        )
