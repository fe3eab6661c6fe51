"""The losses from a teacher with another vocabulary: equal to the dense formulas over cells, by
finite differences, on every mesh."""

import itertools
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow

from jaxrl.losses import divergence as dense
from jaxrl.losses.cells import LEFT_OUT, LONGER, NEVER, OTHERS, WORDS, Borders, Cells, Side, opened
from jaxrl.losses.distill import divergence_from_hidden, topk_divergence_from_hidden
from jaxrl.losses.head import (
    PathLogprobs,
    path_logprobs_from_hidden,
    topk_from_hidden,
)
from jaxrl.losses.stretches import increments, stretch_reverse_kl, stretch_sums
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
    bits = np.where(np.arange(V + 2) < V, draw.integers(97, 104, V + 2), NEVER)
    bits[V] = OTHERS
    return Cells(side(mine), side(theirs), bits)


def side(cells):
    """Tokens in any order of their bytes, each the beginning of up to 8 others."""
    draw, n = np.random.default_rng(6), len(cells)
    rank = draw.permutation(n)
    common = np.isin(np.arange(n), np.unique(cells, return_index=True)[1]).astype(np.int32)
    return Side(cells, rank, np.minimum(rank + draw.integers(0, 9, n), n - 1), common)


def borders(given):
    """Every other token follows a text that may have gone on with some bytes."""
    draw = np.random.default_rng(12)
    bits = [sum(1 << int(byte) for byte in draw.integers(97, 104, 3)) for _ in range(B * C)]
    words = np.stack([np.frombuffer((b | 1 << OTHERS).to_bytes(36, "little"), "<i4") for b in bits])
    left_out = words.reshape(B, C, WORDS) * (np.arange(C, dtype=np.int32) % 2)[:, None]
    assert left_out.shape[-1] == WORDS
    return Borders(given, left_out, *np.where(left_out.any(-1), abs(rand(2, B, C, seed=15)), 0))


CELLS = cells()
BORDERS = borders(CELLS)
NUMBERS = np.array([*np.unique(CELLS.student.cells), V + 1])
"""Of the cells that have a token, and the outcome of those left out."""
SAME = partial(np.testing.assert_allclose, atol=3e-5, rtol=3e-5)


def mesh_of(shape):
    return role_mesh(jax.devices()[: math.prod(shape)], Axes(*shape))


def logprobs(hidden, head, softcap=None, temperature=1.3):
    z = jnp.einsum("bcd,vd->bcv", hidden, head)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return jax.nn.log_softmax(z / temperature, -1)


def is_out(left_out, bits):
    """[B, C, cells]: whether a cell is left out, bit by bit."""
    whole = [[int.from_bytes(words.tobytes(), "little") for words in row] for row in left_out]
    return np.array([[[one >> int(bit) & 1 for bit in bits] for one in row] for row in whole], bool)


def in_cells(logp, cell_of, open, given=CELLS):
    """Log-probs of the cells that have a token and are not left out, and of all others."""
    numbers = np.unique(given.student.cells)
    sums = jnp.stack([jnp.exp(logp)[..., cell_of == n].sum(-1) for n in numbers], -1)
    out = is_out(BORDERS.left_out, given.bits[numbers])
    sums /= sums.sum(-1, keepdims=True)
    kept = jnp.where(out, 0, sums * jnp.exp(-open)[..., None])
    others = 1 - jnp.exp(-open) + (jnp.where(out, sums, 0).sum(-1) * jnp.exp(-open))
    each = jnp.concatenate([kept, others[..., None]], -1)
    return jnp.log(jnp.maximum(each, 1e-37))


def loss_of(given=CELLS, *, beta, **settings):
    def loss(hidden, kernel, open):
        return divergence_from_hidden(
            hidden,
            kernel,
            THEIRS,
            THEIR_HEAD,
            MASK,
            beta=beta,
            temperature=1.3,
            chunk=CHUNK,
            borders=BORDERS._replace(cells=given, student=open),
            **settings,
        )[0]

    each = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return lambda hidden, kernel, open=BORDERS.student: _where_open(each(hidden, kernel, open))


def _where_open(found):
    """Nothing is open where no cell is left out, whatever the slope there."""
    value, (*slopes, by_open) = found
    return value, (*slopes, np.where(BORDERS.student > 0, by_open, 0))


def dense_loss(given=CELLS, *, beta, softcap=None, teacher_softcap=None):
    theirs = logprobs(THEIRS, THEIR_HEAD, teacher_softcap)
    teacher = in_cells(theirs, given.teacher.cells, BORDERS.teacher, given)

    def loss(hidden, kernel, open):
        student = in_cells(logprobs(hidden, kernel, softcap), given.student.cells, open, given)
        return dense.jsd(student, teacher, MASK, beta=beta)[0]

    each = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    return lambda hidden, kernel: _where_open(each(hidden, kernel, BORDERS.student))


@cache
def on_one_device():
    return jax.device_get(loss_of(beta=0.4)(HIDDEN, HEAD))


@pytest.mark.parametrize(
    ("others", "beta"),
    and_slow(
        [*((True, beta) for beta in (0.0, 0.4, 1.0)), (False, 0.4)], [(False, 0.0), (False, 1.0)]
    ),
)
def test_the_loss_is_the_divergence_over_cells(beta, others):
    """Value and gradient; also where no token of the student is in the last cell."""
    given = cells(others)
    wanted = dense_loss(given, beta=beta)(HIDDEN, HEAD)
    jax.tree.map(SAME, loss_of(given, beta=beta)(HIDDEN, HEAD), wanted)


def test_either_model_s_logits_may_be_capped():
    caps = {"softcap": 1.5, "teacher_softcap": 2.0}
    found = loss_of(beta=0.4, **caps)(HIDDEN, HEAD)
    jax.tree.map(SAME, found, dense_loss(beta=0.4, **caps)(HIDDEN, HEAD))


def test_with_a_cell_for_each_token_it_is_the_loss_of_one_vocabulary():
    order = np.random.default_rng(8).permutation(V)
    theirs = np.argsort(order)  # the teacher's token k is the student's theirs[k]
    bits = np.full(V + 2, NEVER)
    given = Cells(side(np.arange(V)), side(theirs), bits)
    nothing = Borders(given, *(np.zeros_like(one) for one in BORDERS[1:]))

    def plain(hidden, kernel):
        head = THEIR_HEAD[:V][order]
        return divergence_from_hidden(hidden, kernel, THEIRS, head, MASK, beta=0.4)[0]

    def other(hidden, kernel):
        head = THEIR_HEAD[:V]
        settings = {"beta": 0.4, "borders": nothing}
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
        settings = {"beta": 0.4, "borders": BORDERS}
        return divergence_from_hidden(z, same, THEIRS, THEIR_HEAD, MASK, **settings)[0]

    slope, p = np.asarray(gradient(logits)), np.asarray(jax.jit(jax.nn.softmax)(logits))
    mine = given.student.cells
    shared = [n for n in np.unique(mine) if (mine == n).sum() > 1]
    assert len(shared) > 1 and np.abs(slope[MASK]).max() > 1e-3
    for cell in shared:
        each = (slope / p)[MASK][:, mine == cell]
        np.testing.assert_allclose(each, np.repeat(each[:, :1], each.shape[1], 1), atol=2e-5)


def test_the_gradient_is_that_of_finite_differences():
    value = loss_of(beta=0.4)
    _, (d_hidden, d_head, d_open) = value(HIDDEN, HEAD)
    for seed in range(3):
        a, b = rand(*HIDDEN.shape, seed=20 + seed), rand(*HEAD.shape, seed=30 + seed)
        c = np.where(BORDERS.student > 0, rand(B, C, seed=40 + seed), 0)
        up, down = (
            value(HIDDEN + step * a, HEAD + step * b, BORDERS.student + step * c)[0]
            for step in (1e-2, -1e-2)
        )
        slope = float((d_hidden * a).sum() + (d_head * b).sum() + (d_open * c).sum())
        np.testing.assert_allclose((up - down) / 2e-2, slope, rtol=2e-2, atol=2e-2)


@cache
def in_all_cells():
    """The teacher's log-probs of all cells."""
    own = CELLS.teacher.cells, BORDERS.teacher
    return jax.jit(lambda h, w: in_cells(logprobs(h, w), *own))(THEIRS, THEIR_HEAD)


@pytest.mark.parametrize("shape", and_slow(MESHES[2:], [(shape,) for shape in MESHES[:2]]), ids=str)
def test_a_mesh_computes_what_one_device_does(shape):
    mesh = mesh_of(shape)
    jax.tree.map(SAME, loss_of(beta=0.4, mesh=mesh)(HIDDEN, HEAD), on_one_device())
    settings = {"borders": BORDERS, "temperature": 1.3, "mesh": mesh}
    best = jax.jit(lambda h, w: topk_from_hidden(h, w, 4, **settings))(THEIRS, THEIR_HEAD)
    best, every = jax.device_get((best, in_all_cells()))
    SAME(best.logprobs, np.sort(every, -1)[..., ::-1][..., :4])
    SAME(
        np.take_along_axis(every, np.searchsorted(NUMBERS, best.ids), -1),
        best.logprobs,
    )


def test_the_teacher_s_best_cells_and_a_tail_are_a_lower_bound():
    """Equal to the loss over all cells where all are sent."""
    count = len(NUMBERS)

    def loss(hidden, k):
        settings = {"borders": BORDERS, "temperature": 1.3}
        best = topk_from_hidden(THEIRS, THEIR_HEAD, k, **settings)
        sent = best.ids, best.logprobs, best.tail_logprob
        return topk_divergence_from_hidden(hidden, HEAD, *sent, MASK, beta=0.4, **settings)[0]

    whole, (wanted, *_) = on_one_device()
    each = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, slope = each(HIDDEN, count)
    SAME(value, whole)
    SAME(slope, wanted)
    assert each(HIDDEN, 3)[0] < whole


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_teacher_without_tokens_of_the_last_cell_leaves_the_loss_finite(beta):
    """Its probability there is 0, and the student's is not."""
    own = CELLS.teacher.cells
    theirs = side(np.where(own == V, CELLS.student.cells[0], own))
    value, slopes = loss_of(CELLS._replace(teacher=theirs), beta=beta)(HIDDEN, HEAD)
    assert np.isfinite(value) and value > 0
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (1, 2, 1, 2)], ids=str)
def test_log_probs_on_a_path_are_of_the_sets_that_are_known(shape):
    """Value and gradient: given a cell, given one of those left out, and given nothing; of all
    tokens that begin with one, of those of its cell, and of it alone."""
    draw = np.random.default_rng(10)
    tokens, side, bits = draw.integers(0, V, (B, C)), CELLS.student, CELLS.bits
    first = np.where(draw.random((B, C)) < 0.5, side.cells[tokens], -1)
    out = is_out(BORDERS.left_out, bits[side.cells])
    first = np.where(np.take_along_axis(out, tokens[..., None], -1)[..., 0], LEFT_OUT, first)
    known = first
    first = np.where(side.common[tokens] == 0, LONGER - side.cells[tokens], first)
    assert len(np.unique(np.clip(first, LONGER, 0))) == 4
    ends = draw.integers(0, 3, (B, C))

    def found(hidden, head):
        given = {"mask": MASK, "temperature": 1.3, "chunk": CHUNK, "mesh": mesh_of(shape)}
        each = path_logprobs_from_hidden(
            hidden, head, tokens, side, bits, first, known, ends, BORDERS.left_out, **given
        )
        return jnp.where(MASK, each.conditional + 0.7 * each.extra, 0).sum(), each

    def members(code):
        code = code[..., None]
        longer = (side.cells == LONGER - code) & (side.common == 0) & (code <= LONGER)
        return np.where(code == LEFT_OUT, out, (side.cells == code) | longer | (code == -1))

    rank, low, high = side.rank, side.rank[tokens][..., None], side.last[tokens][..., None]
    more = (rank >= low) & (rank <= np.where(ends[..., None] == 0, low, high))
    more &= (side.cells == side.cells[tokens][..., None]) | (ends != 1)[..., None]

    def wanted(hidden, head):
        logp = logprobs(hidden, head)
        own = jnp.take_along_axis(logp, tokens[..., None], -1)[..., 0]
        of = [
            jax.nn.logsumexp(jnp.where(x, logp, -jnp.inf), -1)
            for x in (members(first), more, members(known))
        ]
        conditional, extra = own - of[0], of[1] - own
        total = jnp.where(MASK, conditional + 0.7 * extra, 0).sum()
        return total, PathLogprobs(conditional, extra, own, of[2])

    compare = [
        jax.device_get(jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD))
        for f in (found, wanted)
    ]
    ((value, each), slopes), ((same, every), expected) = compare
    SAME(value, same)
    jax.tree.map(SAME, slopes, expected)
    for got, want in zip(each, every, strict=True):
        SAME(np.where(MASK, got, 0), np.where(MASK, want, 0))


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
        own = student, student, teacher, student, sampler
        return stretch_reverse_kl(*own, starts, MASK, zero, ratio_cap=1.2)[0]

    def by_token(student):
        given = {"sampler_logprobs": sampler, "ratio_cap": 1.2}
        return dense.sampled_reverse_kl(student, teacher, MASK, **given)[0]

    each = [jax.jit(jax.value_and_grad(f))(student) for f in (by_stretch, by_token)]
    jax.tree.map(SAME, *each)


def test_increments_are_of_all_texts_that_begin_alike():
    """Two tokens, a border, one token: the increments over stretches of log F, given a cell, given
    those left out, or given nothing."""
    whole, known = -abs(rand(1, 3, seed=16)), -abs(rand(1, 3, seed=17))
    extra = abs(rand(1, 3, seed=18))
    path = PathLogprobs(whole - known, extra * np.array([0, 1, 1]), whole, known)
    left_out = np.zeros((1, 3, WORDS), np.int32)
    left_out[0, 2, 3] = 5
    before = extra[0, 1]
    SAME(opened(path.extra, left_out), [[0, 0, before]])
    whole, known, extra = whole[0], known[0], extra[0]
    out = 1 - (1 - np.exp(known[2])) * np.exp(-before)
    for first, given in ((-1, before), (3, known[2]), (LEFT_OUT, before + np.log(out))):
        found = increments(path, np.array([[7, -1, first]]), left_out)
        wanted = [whole[0] - known[0], whole[1] + before, whole[2] + extra[2] - given]
        SAME(found[0], wanted)


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
            own, sums = own[None], jnp.full((1, 2), theirs)
            sampler = jax.lax.stop_gradient(own)
            return stretch_reverse_kl(own, own, sums, own, sampler, starts, mask, b)[0]

        return (share * jax.vmap(one)(own, theirs)).sum()

    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1))) for f in (expected, exact)]
    jax.tree.map(SAME, *(f(first, second) for f in both))
