"""Losses from hidden states are the dense ones, value and gradient, on one device and on eight.

Dense = logits of everything, and `jax.grad`. The chunked code has its gradients written by hand.
"""

import math
import re
from functools import cache, partial

import dense_losses as dense
import jax
import jax.numpy as jnp
import numpy as np
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

B, C, D, DT, V, VT, K = 4, 5, 12, 10, 50, 53, 6
"""V and VT divide by neither 4 nor 8, DT not by 4, B not by 8, and B * C not by the chunk."""
CHUNK = 3
MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]
TERM = EntropyAware(coef=0.7, threshold=2.4, top_k=4)


def rand(*shape, seed, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


HIDDEN, HEAD = rand(B, C, D, seed=1), rand(V, D, seed=2, scale=0.6)
TEACHER, TEACHER_HEAD = rand(B, C, DT, seed=3), rand(VT, DT, seed=4, scale=0.6)
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, V, (B, C)))
MASK = jnp.asarray(np.random.default_rng(6).random((B, C)) < 0.7)
WEIGHT = rand(B, C, seed=7)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def logits(hidden, head):
    return jnp.einsum("bcd,vd->bcv", hidden, head)


def value_and_grads(loss, hidden=HIDDEN, head=HEAD):
    return jax.jit(jax.value_and_grad(lambda h, w: loss(h, w), argnums=(0, 1)))(hidden, head)


def assert_same(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance), a, b
    )


def dense_divergence(hidden, head, *, beta, temperature=1.0, term=None):
    student, teacher = logits(hidden, head), logits(TEACHER, TEACHER_HEAD[:V])
    total, _ = dense.jsd(student, teacher, MASK, beta=beta, temperature=temperature)
    if term is not None:
        total += dense.entropy_aware(student, teacher, MASK, term=term, temperature=temperature)[0]
    return total


def chunked_divergence(hidden, head, *, chunk=CHUNK, term=None, **settings):
    total, _, _ = divergence_from_hidden(
        hidden, head, TEACHER, TEACHER_HEAD, MASK, chunk=chunk, entropy_aware=term, **settings
    )
    return total


@cache
def shipped(k, temperature=1.0, mesh=None):
    settings = {"chunk": CHUNK, "mesh": mesh, "v": V}

    def send(h, w):
        return topk_from_hidden(h, w, k, temperature=temperature, **settings)

    return jax.jit(send)(TEACHER, TEACHER_HEAD)


LOSSES = ["fused", "lean", "topk", "topk_lean", "entropy", "logprobs"]


def make_loss(name, mesh=None):
    """A scalar of (hidden, head) for each kind of loss; what it divides by is the caller's."""
    lean = name.endswith("lean")
    if name in ("fused", "lean"):
        return partial(
            chunked_divergence, beta=0.3, temperature=1.3, lean=lean, term=TERM, mesh=mesh
        )
    if name.startswith("topk"):
        sent = shipped(K)[:3]
        settings = {"beta": 0.6, "chunk": CHUNK, "lean": lean, "mesh": mesh}
        return lambda h, w: topk_divergence_from_hidden(h, w, *sent, MASK, **settings)[0]
    if name == "entropy":
        ids, logprobs, tail, entropy = shipped(K)
        return lambda h, w: entropy_aware_from_topk(
            h, w, ids, logprobs, entropy, MASK, term=TERM, teacher_tail=tail, chunk=CHUNK, mesh=mesh
        )[0]

    def policy(h, w):
        logprobs, entropy = logprobs_and_entropy_from_hidden(
            h, w, TOKENS, temperature=0.8, chunk=CHUNK, mesh=mesh
        )
        return masked_sum(WEIGHT * logprobs + jnp.square(entropy), MASK)

    return policy


@pytest.mark.parametrize(
    ("beta", "term"), and_slow([(0.0, TERM), (0.3, TERM), (1.0, None)], [(0.3, None)]), ids=str
)
def test_divergence_is_the_dense_one(beta, term):
    settings = {"beta": beta, "temperature": 1.3, "term": term}
    expected = value_and_grads(partial(dense_divergence, **settings))
    for lean in (False, True):
        assert_same(value_and_grads(partial(chunked_divergence, lean=lean, **settings)), expected)


@pytest.mark.parametrize(
    ("signal", "beta"),
    and_slow([("topk", 0.3), ("student_topk", 1.0)], [("topk", 0.0)]),
    ids=str,
)
def test_topk_divergence_is_the_dense_one(signal, beta):
    temperature = 0.7
    if signal == "topk":
        ids, logprobs, tail, _ = shipped(K, temperature)
    else:
        ids = jax.jit(partial(topk_from_hidden, k=K, chunk=CHUNK))(HIDDEN, HEAD).ids
        look_up = jax.jit(partial(logprobs_at, temperature=temperature, chunk=CHUNK, v=V))
        logprobs, tail = look_up(TEACHER, TEACHER_HEAD, ids)
    settings = {"beta": beta, "temperature": temperature}
    expected = value_and_grads(
        lambda h, w: dense.topk_divergence(logits(h, w), ids, logprobs, tail, MASK, **settings)[0]
    )
    for lean in (False, True):
        value = value_and_grads(
            lambda h, w, lean=lean: topk_divergence_from_hidden(
                h, w, ids, logprobs, tail, MASK, chunk=CHUNK, lean=lean, **settings
            )[0]
        )
        assert_same(value, expected)


def test_topk_at_k_equal_v_is_the_full_divergence():
    sent = shipped(V)[:3]
    full = value_and_grads(partial(chunked_divergence, beta=0.4))

    def coarse(h, w):
        return topk_divergence_from_hidden(h, w, *sent, MASK, beta=0.4, chunk=CHUNK)[0]

    assert_same(value_and_grads(coarse), full)


def test_entropy_term_from_shipped_topk_is_the_dense_one():
    """K = 6 were sent and the term uses 4: the other two belong to the tail."""
    teacher = logits(TEACHER, TEACHER_HEAD[:V])
    expected = value_and_grads(
        lambda h, w: dense.entropy_aware(logits(h, w), teacher, MASK, term=TERM)[0]
    )
    assert expected[0] > 0.1
    assert_same(value_and_grads(make_loss("entropy")), expected)


def test_logprobs_and_entropy_are_the_dense_ones():
    def policy(h, w):
        logprobs = dense.log_softmax(logits(h, w), 0.8)
        entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
        chosen = jnp.take_along_axis(logprobs, TOKENS[..., None], -1)[..., 0]
        return masked_sum(WEIGHT * chosen + jnp.square(entropy), MASK)

    assert_same(value_and_grads(make_loss("logprobs")), value_and_grads(policy))
    alone = jax.jit(partial(logprobs_from_hidden, chunk=CHUNK))
    both = jax.jit(partial(logprobs_and_entropy_from_hidden, chunk=CHUNK))
    np.testing.assert_array_equal(alone(HIDDEN, HEAD, TOKENS), both(HIDDEN, HEAD, TOKENS)[0])
    assert (alone(HIDDEN, HEAD, TOKENS + V) < MIN / 2).all()


def test_topk_and_logprobs_at_are_the_dense_ones():
    logprobs = dense.log_softmax(logits(TEACHER, TEACHER_HEAD)[..., :V], 1.7)
    values, ids = jax.lax.top_k(logprobs, K)
    sent = shipped(K, 1.7)
    np.testing.assert_array_equal(sent.ids, ids)
    assert_same(sent.logprobs, values)
    assert_same(sent.tail_logprob, dense.with_tail(logprobs, ids)[..., -1])
    assert_same(sent.entropy, -(jnp.exp(logprobs) * logprobs).sum(-1))
    some = jnp.asarray(
        np.random.default_rng(8).permuted(np.tile(np.arange(V), (B, C, 1)), axis=-1)[..., :K]
    )
    look_up = jax.jit(partial(logprobs_at, temperature=1.7, chunk=CHUNK, v=V))
    at, tail = look_up(TEACHER, TEACHER_HEAD, some)
    assert_same(jnp.concatenate([at, tail[..., None]], -1), dense.with_tail(logprobs, some))


@cache
def every_loss(shape=None):
    """Value and gradients of each of LOSSES, from one compiled function."""
    losses = [make_loss(name, shape and mesh_of(shape)) for name in LOSSES]
    both = [jax.value_and_grad(loss, argnums=(0, 1)) for loss in losses]
    return jax.jit(lambda h, w: [f(h, w) for f in both])(HIDDEN, HEAD)


@pytest.mark.parametrize("shape", and_slow(MESHES[3:], [(shape,) for shape in MESHES[:3]]), ids=str)
def test_eight_devices_are_one(shape):
    """With sizes that the mesh does not divide, and teacher rows that the student does not have."""
    for many, one in zip(every_loss(shape), every_loss(), strict=True):
        assert_same(many, one)


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
    tokens = rand(8, 3, 16, seed=13), rand(8, 3, 8, seed=14), jnp.ones((8, 3), bool)

    def loss(h, w, t, tw, m, mesh=None):
        return divergence_from_hidden(h, w, t, tw, m, beta=0.5, chunk=2, lean=lean, mesh=mesh)[0]

    args = tokens[0], heads[0], tokens[1], heads[1], tokens[2]
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    rows = ("data", "fsdp")
    placed = [
        place(args[0], rows),
        place(args[1], "tensor", "fsdp"),
        place(args[2], rows),
        place(args[3], "tensor", "fsdp"),
        place(args[4], rows),
    ]
    step = jax.jit(jax.value_and_grad(partial(loss, mesh=mesh), argnums=(0, 1)))
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
            h, w, teacher, teacher_head, jnp.ones((8, 6), bool), beta=0.5, chunk=2, mesh=mesh
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
    value, gradients = value_and_grads(loss)
    _, after = value_and_grads(lambda h, w: jnp.square(loss(h, w)) + 3 * loss(h, w))
    assert_same(after, jax.tree.map(lambda g: (2 * value + 3) * g, gradients))


def test_gradient_is_that_of_the_loss_by_finite_differences():
    """Along random directions, in float32: a step of 1e-2 leaves about 1e-4."""
    loss = jax.jit(partial(chunked_divergence, beta=0.3, term=TERM))
    _, gradients = value_and_grads(partial(chunked_divergence, beta=0.3, term=TERM))
    for i, x in enumerate((HIDDEN, HEAD)):
        direction, step = rand(*x.shape, seed=20 + i), 1e-2
        moved = [[HIDDEN, HEAD], [HIDDEN, HEAD]]
        moved[0][i], moved[1][i] = x + step * direction, x - step * direction
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose(slope, (gradients[i] * direction).sum(), rtol=2e-3)


def test_teacher_and_metrics_carry_no_gradient():
    def loss(h, w, t, tw, metric):
        total, count, metrics = divergence_from_hidden(
            h, w, t, tw, MASK, beta=0.5, chunk=CHUNK, entropy_aware=TERM
        )
        return sum(x.sum() for x, _ in metrics.values()) if metric else total / count

    args = HIDDEN, HEAD, TEACHER, TEACHER_HEAD
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)), static_argnums=4)
    of_loss, of_metrics = gradient(*args, False), gradient(*args, True)
    assert all(jnp.abs(g).max() > 1e-4 for g in of_loss[:2])
    for zero in (*of_loss[2:], *of_metrics):
        np.testing.assert_array_equal(zero, 0)
    other = gradient(HIDDEN, HEAD, -TEACHER, TEACHER_HEAD, False)
    assert jnp.abs(other[0] - of_loss[0]).max() > 1e-3


def test_metrics():
    student, teacher = logits(HIDDEN, HEAD), logits(TEACHER, TEACHER_HEAD[:V])
    mine, theirs = dense.log_softmax(student), dense.log_softmax(teacher)

    def entropy(lp):
        return -(jnp.exp(lp) * lp).sum(-1)

    agree = mine.argmax(-1) == theirs.argmax(-1)
    gate = entropy(theirs) >= TERM.threshold
    settings = {"beta": 0.5, "chunk": CHUNK}
    loss = jax.jit(partial(divergence_from_hidden, entropy_aware=TERM, **settings))
    total, count, metrics = loss(HIDDEN, HEAD, TEACHER, TEACHER_HEAD, MASK)
    assert {float(c.sum()) for _, c in metrics.values()} == {float(MASK.sum())} == {float(count)}
    assert_same(metrics["student_entropy"][0], masked_sum(entropy(mine), MASK))
    assert_same(metrics["teacher_entropy"][0], masked_sum(entropy(theirs), MASK))
    np.testing.assert_array_equal(metrics["top1_agreement"][0], agree & MASK)
    np.testing.assert_array_equal(metrics["top1_agreement"][1], MASK)
    assert (
        0 < (gate & MASK).sum() < MASK.sum() and metrics["entropy_gate"][0] == (gate & MASK).sum()
    )
    assert_same(metrics["divergence"][0].sum() + metrics["entropy_aware"][0], total)

    # With the student's own logits as the teacher, every token agrees.
    sent = jax.jit(partial(topk_from_hidden, k=K, chunk=CHUNK))(HIDDEN, HEAD)
    loss = jax.jit(partial(topk_divergence_from_hidden, **settings))
    _, _, metrics = loss(HIDDEN, HEAD, *sent[:3], MASK)
    for told in metrics["top1_agreement"]:
        np.testing.assert_array_equal(told, MASK)
    for side in ("teacher", "student"):
        tail = masked_sum(jnp.exp(sent.tail_logprob), MASK)
        assert_same(metrics[f"{side}_tail_mass"][0], tail)


@pytest.mark.parametrize("lean", and_slow([False], [True]))
def test_chunks_padding_and_micro_batches_never_matter(lean):
    loss = partial(chunked_divergence, beta=0.5, lean=lean)
    expected = value_and_grads(loss)
    for chunk in (7, 1000):
        assert_same(value_and_grads(partial(loss, chunk=chunk)), expected)

    junk = [jnp.where(MASK[..., None], x, jnp.nan) for x in (HIDDEN, TEACHER)]
    settings = {"beta": 0.5, "chunk": CHUNK, "lean": lean}

    def with_junk(h, w):
        return divergence_from_hidden(h, w, junk[1], TEACHER_HEAD, MASK, **settings)[0]

    assert_same(value_and_grads(with_junk, junk[0]), expected)

    def part(h, w, rows):
        return divergence_from_hidden(
            h[rows], w, TEACHER[rows], TEACHER_HEAD, MASK[rows], beta=0.5, chunk=CHUNK, lean=lean
        )[0]

    def split(h, w):
        return part(h, w, slice(0, 1)) + part(h, w, slice(1, B))

    assert_same(value_and_grads(split), expected)

    empty = jax.jit(partial(divergence_from_hidden, beta=0.5, chunk=CHUNK, lean=lean))
    total, count, _ = empty(HIDDEN, HEAD, TEACHER, TEACHER_HEAD, jnp.zeros_like(MASK))
    assert (total, count) == (0, 0)


@pytest.mark.parametrize("name", and_slow(["fused"], ["lean"]))
def test_permuting_the_vocabulary_permutes_the_gradient(name):
    words = np.random.default_rng(9).permutation(V)
    loss = partial(divergence_from_hidden, mask=MASK, beta=0.5, chunk=CHUNK, lean=name == "lean")
    one = value_and_grads(lambda h, w: loss(h, w, TEACHER, TEACHER_HEAD[:V])[0])
    other = value_and_grads(
        lambda h, w: loss(h, w, TEACHER, TEACHER_HEAD[:V][words])[0], HIDDEN, HEAD[words]
    )
    assert_same((one[0], (one[1][0], one[1][1][words])), other)


def test_temperature_may_be_traced():
    loss = jax.jit(lambda t: chunked_divergence(HIDDEN, HEAD, beta=0.5, temperature=t))
    values = [loss(jnp.float32(t)) for t in (0.5, 2.0)]
    for t, value in zip((0.5, 2.0), values, strict=True):
        assert_same(value, dense_divergence(HIDDEN, HEAD, beta=0.5, temperature=t))
    assert values[0] > 1.5 * values[1]


def test_bfloat16_is_near_float32():
    """Logits and sums are float32; only the operands of the products are rounded (2^-9)."""
    low = [x.astype(jnp.bfloat16) for x in (HIDDEN, HEAD, TEACHER, TEACHER_HEAD)]
    exact = [x.astype(jnp.float32) for x in low]

    def loss(h, w, t, tw, lean):
        return divergence_from_hidden(h, w, t, tw, MASK, beta=0.5, chunk=CHUNK, lean=lean)[0]

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=4)
    expected, gradients = step(*exact, False)
    for lean in (False, True):
        value, found = step(*low, lean)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for x, y in zip(found, gradients, strict=True):
            assert x.dtype == jnp.bfloat16
            assert jnp.linalg.norm(x.astype(jnp.float32) - y) < 0.01 * jnp.linalg.norm(y)


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
    mask = jnp.ones(tokens, bool)

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
    sent = shipped(2)
    with pytest.raises(ValueError, match="top 4 and 2 were sent"):
        entropy_aware_from_topk(
            HIDDEN,
            HEAD,
            sent.ids,
            sent.logprobs,
            sent.entropy,
            MASK,
            term=TERM,
            teacher_tail=sent.tail_logprob,
        )
