"""Attention in an accelerator's kernel is the attention of matrix products.

No kernel runs here: cuDNN's is stood in for by the same function in XLA, the TPU's is interpreted.
What accelerators' compilers make of it is in test_kernels_aot.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding
from prompt_of_a_slot import a_seat_each, attend_alone, interpret_step_kernels
from tiny_models import make_mesh, random_params, tiny_model

from jaxrl.models import (
    attention,
    bert,
    cudnn,
    decoder,
    flash_decode,
    parameters,
    splash,
    split_k,
)
from jaxrl.models.bert import EncoderConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.family import LayerKind
from jaxrl.models.kernels import CPU, Target, compiling_for, target_of, why_no_step_kernel
from jaxrl.models.packing import pack_streams
from jaxrl.models.parameters import param_shardings
from jaxrl.sampling.decode import cache_specs
from jaxrl.types import Sequences

P, G, W, C, N, KV, H = 2, 3, 7, 5, 4, 2, 8
PROMPTS = np.array([7, 3], np.int32)
LENGTHS = np.array([5, 1, 3, 2, 5, 4], np.int32)
NAN = float("nan")
SMALLEST = (8, 9)
"""Compute capability of GPUs whose blocks have little shared memory."""


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def gradients(function: Any, *given: Any) -> tuple[Any, Any]:
    """A value and its gradient along a fixed direction."""

    def both(*given: Any) -> tuple[Any, Any]:
        out, back = jax.vjp(function, *given)
        return out, back(arrays(out.shape, seed=9)[0])

    return jax.jit(both)(*given)


def assert_close(found: Any, expected: Any, limit: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=limit * max(1.0, float(np.abs(b).max())))


def by_hand(
    q: Any, k: Any, v: Any, allowed: Any, seen: Any, sinks: Any = None
) -> tuple[Any, tuple[Any, ...]]:
    """What `gradients` finds of softmax attention where `allowed` [B,T,S], which is 0 where a query
    is not `seen` [B,T]: in numpy and float64, so that nothing is compiled. A sink is one more key
    whose score is given and whose value is 0, as gpt-oss has it."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    many, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    keys, values = (np.repeat(x, many, 2) for x in (k, v))
    found = np.where(allowed[:, None], np.einsum("btnh,bsnh->bnts", q, keys) * scale, -1e30)
    none = np.full(q.shape[2], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    more = np.broadcast_to(none[None, :, None, None], (*found.shape[:3], 1))
    raised = np.concatenate([found, more], -1)
    raised = np.exp(raised - raised.max(-1, keepdims=True))
    weights = raised / raised.sum(-1, keepdims=True)
    weights, of_sinks = weights[..., :-1], weights[..., -1]
    seen = seen[..., None, None]
    out = np.where(seen, np.einsum("bnts,bsnh->btnh", weights, values), 0)
    d = np.where(seen, np.asarray(arrays(out.shape, seed=9)[0]), 0)
    d_weights = np.einsum("btnh,bsnh->bnts", d, values)
    inner = (weights * d_weights).sum(-1)
    d_scores = weights * (d_weights - inner[..., None]) * scale

    def whole(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, many, x.shape[-1]).sum(3)

    d_k = whole(np.einsum("bnts,btnh->bsnh", d_scores, q))
    d_v = whole(np.einsum("bnts,btnh->bsnh", weights, d))
    of_q = np.einsum("bnts,bsnh->btnh", d_scores, keys)
    more = () if sinks is None else (-(of_sinks * inner).sum((0, 2)),)
    return out, (of_q, d_k, d_v, *more)


def by_terms(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
    """As `shared_prompts.attend_by_products` has it, in numpy: q [R,KV,M,H], k, v [R,KV,S,H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    found = np.einsum("rkmh,rksh->rkms", q, k) * q.shape[-1] ** -0.5
    found = np.where(mask[:, None], found, -np.inf)
    top = found.max(-1, keepdims=True)
    raised = np.exp(found - top)
    mass = raised.sum(-1, keepdims=True)
    return np.einsum("rkms,rksh->rkmh", raised / mass, v), (np.log(mass) + top)[..., 0]


def scores(
    q: Any, k: Any, queries: Any, keys: Any, causal: bool, window: int | None = None
) -> jax.Array:
    """[B,N,T,S], -inf where cuDNN computes nothing."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2)
    found = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    t, s = (jnp.arange(n) for n in found.shape[2:])
    seen = (t[None, :, None] < queries[:, None, None]) & (s[None, None] < keys[:, None, None])
    if causal:
        seen &= (s[None] <= t[:, None])[None]
    if window is not None:
        seen &= (s[None] > t[:, None] - window)[None]
    return jnp.where(seen[:, None], found, -jnp.inf)


def block(
    q: Any, k: Any, v: Any, queries: Any, keys: Any, *, causal: bool, window: int | None = None
) -> Any:
    """One call of cuDNN; where a query is padding, anything may stand."""
    found = scores(q, k, queries, keys, causal, window)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(found, -1), v)
    real = jnp.arange(q.shape[1])[None] < queries[:, None]
    normaliser = jnp.where(real[:, None], jax.nn.logsumexp(found, -1), NAN)
    return jnp.where(real[:, :, None, None], out, NAN), normaliser


def block_gradients(
    q: Any,
    k: Any,
    v: Any,
    queries: Any,
    keys: Any,
    results: Any,
    *,
    causal: bool,
    window: int | None = None,
) -> Any:
    """As FlashAttention-2 has them (arXiv 2307.08691, algorithm 2), of a given normaliser."""
    lse, out, d = results
    many, scale = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    probs = jnp.exp(scores(q, k, queries, keys, causal, window) - lse[..., None])
    values, keys_of = (jnp.repeat(x, many, 2) for x in (v, k))
    inner = jnp.einsum("btnh,bsnh->bnts", d, values) - (d * out).sum(-1).swapaxes(1, 2)[..., None]
    d_scores = probs * inner * scale

    def whole(x: Any) -> Any:
        return x.reshape(*x.shape[:2], -1, many, x.shape[-1]).sum(3)

    d_k = whole(jnp.einsum("bnts,btnh->bsnh", d_scores, q))
    d_v = whole(jnp.einsum("bnts,btnh->bsnh", probs, d))
    return jnp.einsum("bnts,bsnh->btnh", d_scores, keys_of), d_k, d_v


@pytest.fixture
def as_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is cuDNN's, and XLA computes what it would."""
    given = jax.nn.dot_product_attention

    def public(*args: Any, implementation: str, **kw: Any) -> jax.Array:
        assert implementation == "cudnn" and not {"mask", "bias"} & set(kw)
        return given(*args, **kw, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", public)
    monkeypatch.setattr(cudnn, "_block", block)
    monkeypatch.setattr(cudnn, "_block_gradients", block_gradients)


def test_the_calls_of_a_group_are_joined_to_the_attention_of_whole_rows(as_cudnn: None) -> None:
    q, *pairs = arrays((P * G, C, N, H), *[(P, W, KV, H)] * 2, *[(P * G, C, KV, H)] * 2)
    shared, own = tuple(pairs[:2]), tuple(pairs[2:])
    before = np.arange(W)[None] < np.repeat(PROMPTS, G)[:, None]
    real = np.arange(C)[None] < LENGTHS[:, None]
    keys = np.concatenate([before, real], 1)

    def joined(q: Any, shared: Any, own: Any) -> jax.Array:
        out = cudnn.attend_groups(q, shared, own, PROMPTS, LENGTHS)
        return jnp.where(real[..., None, None], out, 0)

    rows = [np.concatenate([np.repeat(x, G, 0), y], 1) for x, y in zip(shared, own, strict=True)]
    out, (d_q, *d_rows) = by_hand(q, *rows, reach(keys, C, True, None), real)
    d_shared = [d[:, :W].reshape(P, G, W, KV, H).sum(1) for d in d_rows]
    expected = out, (d_q, d_shared, [d[:, W:] for d in d_rows])
    assert_close(gradients(joined, q, shared, own), expected)
    run = jax.jit(cudnn.attend_groups)
    assert np.isfinite(run(q, shared, own, PROMPTS, LENGTHS)).all()


REACH = [(True, None), (True, 3), (True, 1), (False, None)]
"""Of a token: all before it, a window, only itself, everything."""


def reaches(name: str, default: list[int], more: list[int]) -> Any:
    """Cases (causal, window, `name`): of the values that are `default` with a window and with
    everything, and others that are slow. Without a window each kernel is causal in the tests of
    sinks and of models."""
    every = [(*reach, value) for value in (*default, *more) for reach in REACH]
    usual = [(*reach, value) for value in default for reach in (REACH[1], REACH[3])]
    slow = [case for case in every if case not in usual]
    return pytest.mark.parametrize(("causal", "window", name), and_slow(usual, slow))


def reach(
    keys: Any, width: int, causal: bool, window: int | None, counted: Any = None
) -> np.ndarray:
    """[B,T,S]: who attends to whom, from positions, which count a row's real tokens; or all that
    are `counted`."""
    positions = np.cumsum(keys if counted is None else counted, 1)
    before = positions[:, -width:, None] - positions[:, None]
    near = (before >= 0) | (not causal)
    return keys[:, None] & near & (before < (window or keys.shape[1] + 1))


@pytest.mark.parametrize("blocks", [512, 4])
@reaches("behind", [3], [0])
def test_a_window_counts_positions(
    causal: bool, window: int | None, behind: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and a block of queries after the other; padding on either side."""
    monkeypatch.setattr(attention, "BLOCK", blocks)
    width = 9 + behind
    q, k, v = arrays((3, 9, N, H), *[(3, width, KV, H)] * 2)
    at = np.arange(width)[None]
    keys = (at >= np.array([[0], [behind + 2], [0]])) & (at < np.array([[width], [width], [7]]))
    queries = keys[:, behind:]

    def found(*x: Any) -> jax.Array:
        run = attention.attender(None, keys, None, queries=queries, causal=causal, window=window)
        return jnp.where(queries[..., None, None], run(*x), 0)

    expected = by_hand(q, k, v, reach(keys, 9, causal, window), queries)
    assert_close(gradients(found, q, k, v), expected)


@reaches("width", [C], [2 * C])  # odd, even
def test_a_row_of_any_width_is_attended_to_up_to_its_length(
    as_cudnn: None, width: int, causal: bool, window: int | None
) -> None:
    q, k, v = arrays((P * G, width, N, H), *[(P * G, width, KV, H)] * 2)
    real = np.arange(width)[None] < LENGTHS[:, None]

    def run(*x: Any) -> jax.Array:
        attend = attention.attender("cudnn", real, None, causal=causal, window=window)
        return jnp.where(real[..., None, None], attend(*x), 0)

    assert_close(
        gradients(run, q, k, v), by_hand(q, k, v, reach(real, width, causal, window), real)
    )


@pytest.mark.parametrize("devices", and_slow([6], [2, 4]))  # parts of two groups of heads
def test_each_device_picks_the_keys_of_its_heads(as_cudnn: None, devices: int) -> None:
    """12 heads in groups of 3."""
    q, k, v = arrays((2, C, 12, H), *[(2, C, 4, H)] * 2)
    real = np.ones((2, C), bool)
    expected = by_hand(q, k, v, reach(real, C, True, None), real)

    def run(*x: Any) -> jax.Array:
        return attention.attender("cudnn", real, make_mesh(1, 1, devices))(*x)

    assert_close(gradients(run, q, k, v), expected)


@reaches("width", [W + C], [C])  # with other keys before its own, and without
def test_splash_attention_is_that_of_matrix_products(
    width: int, causal: bool, window: int | None
) -> None:
    """Padding on either side, and in the middle of the keys; both count a window in keys."""
    q, k, v = arrays((2, C, N, H), *[(2, width, KV, H)] * 2)
    real = np.array([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]], bool)
    before = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], bool)
    keys = np.concatenate([before, real], 1)[:, -width:]
    seen = real[..., None, None]

    def kernel(*x: Any) -> jax.Array:
        out = splash.attend_tiles(*x, real, keys, causal, window, interpret=True)
        return jnp.where(seen, out, 0)

    allowed = reach(keys, C, causal, window, counted=np.ones_like(keys))
    expected = by_hand(q, k, v, allowed, real)
    assert_close(gradients(kernel, q, k, v), expected)

    @jax.jit
    def products(*x: Any) -> jax.Array:
        return attention.attender(None, keys, None, queries=real, causal=causal, window=window)(*x)

    assert_close(np.where(seen, products(q, k, v), 0), expected[0])


SINKS = np.array([0.5, -1.0, 3.0, -20.0], np.float32)


@pytest.mark.parametrize(
    ("path", "window"),
    [
        *(("products", 3), ("blocks", 3), ("context", None), ("splash", 3)),
        *(("cudnn", None), ("cudnn", 3), ("divided", 3)),
    ],
)
def test_a_sink_takes_its_share_of_the_softmax_in_each_kernel(
    as_cudnn: None, path: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, those of the sinks too; where heads are divided, each has its own."""
    q, k, v = arrays((P * G, W, N, H), *[(P * G, W, KV, H)] * 2)
    real = np.arange(W)[None] < LENGTHS[:, None] + 2
    kernel = {"splash": "splash", "cudnn": "cudnn", "divided": "cudnn"}.get(path)
    meshes = {"context": (1, 1, 1, 2), "divided": (1, 1, 4)}
    mesh = make_mesh(*meshes[path]) if path in meshes else None
    monkeypatch.setattr(splash, "attend_tiles", partial(splash.attend_tiles, interpret=True))
    if path == "blocks":
        monkeypatch.setattr(attention, "BLOCK", 4)

    def run(*x: Any) -> jax.Array:
        attend = attention.attender(kernel, real, mesh, window=window)
        return jnp.where(real[..., None, None], attend(*x), 0)

    found = gradients(run, q, k, v, SINKS)
    assert_close(found, by_hand(q, k, v, reach(real, W, True, window), real, SINKS))


def of_groups(kernel: str | None, window: int | None) -> tuple[Any, Any]:
    """What `gradients` finds of attention with sinks in streams of groups."""
    tokens, real = whole_rows(64)
    *_, live = rows(64)
    packing = jax.jit(pack_streams)(Sequences(tokens, real, live, 2))
    n = packing.tokens.shape[1]
    q, k, v = arrays((1, n, N, H), *[(1, n, KV, H)] * 2)

    def run(*x: Any) -> Any:
        return attention.attend_packed(kernel, packing, None, window)(*x)

    return gradients(run, q, k, v, SINKS)


@cache
def of_groups_in_products(window: int | None) -> tuple[Any, Any]:
    return of_groups(None, window)


@pytest.mark.parametrize(
    ("kernel", "window"),
    # cuDNN's window has as many queries as keys: rows are whole there, else joined.
    [("cudnn", None), ("cudnn", 3), ("splash", 3)],
)
def test_completions_that_share_a_prompt_have_its_sinks_once(
    as_cudnn: None, kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for the prompt and once for themselves, in streams of groups."""
    monkeypatch.setattr(splash, "attend_tiles", partial(splash.attend_tiles, interpret=True))
    assert_close(of_groups(kernel, window), of_groups_in_products(window))


@pytest.mark.parametrize(
    # Those of kernels are in test_prompt_terms.py too.
    ("name", "window"),
    and_slow([(None, None)], [("split-k", 100), ("flash-decode", 100)]),
)
def test_a_decode_step_has_the_sinks(
    name: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_decode, "BLOCK_BYTES", 1 << 14)
    q, k, v = arrays((3, 1, N, 16), *[(3, KV, 320, 16)] * 2)
    lengths = np.array([1, 150, 320], np.int32)
    interpret_step_kernels(monkeypatch)
    found = jax.jit(attend_alone(name, lengths - 1, window))(q, k, v, SINKS)
    at = np.arange(320)[None, None]
    allowed = (at < lengths[:, None, None]) & (at >= lengths[:, None, None] - (window or 320))
    expected, _ = by_hand(
        q, *(x.swapaxes(1, 2) for x in (k, v)), allowed, np.ones((3, 1)) > 0, SINKS
    )
    np.testing.assert_allclose(found, expected, 2e-6, 2e-6)


def test_rows_are_rolled_and_rolled_back_and_nothing_is_added_up() -> None:
    (x,) = arrays((3, 6, 2))
    by = jnp.array([0, 2, 5])
    found, (d, *_) = gradients(lambda x: attention.roll_rows(x, by), x)
    expected = np.stack([np.roll(row, -n, 0) for row, n in zip(x, by, strict=True)])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(attention.roll_rows(found, -by), x)
    (direction,) = arrays(x.shape, seed=9)
    np.testing.assert_array_equal(attention.roll_rows(d, by), direction)
    differentiated = jax.make_jaxpr(jax.grad(lambda x: attention.roll_rows(x, by).sum()))(x)
    assert "scatter" not in str(differentiated)


def rows(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Left-padded prompts and right-padded completions of them, with their masks."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, vocab, (4, W)).astype(np.int32)
    completions = rng.integers(0, vocab, (8, C)).astype(np.int32)
    real = np.arange(W)[None] >= np.array([0, 4, 6, 2])[:, None]
    lengths = np.array([5, 1, 3, 2, 5, 4, 1, 2])
    return prompts, real, completions, np.arange(C)[None] < lengths[:, None]


WINDOWS = (LayerKind(window=3), LayerKind(rotates=False))


def whole_rows(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt and its completion, twice, with their mask."""
    prompts, real, completions, live = rows(vocab)
    halves = (prompts, completions), (real, live)
    tokens, mask = (np.concatenate([np.repeat(x, 2, 0), y], 1) for x, y in halves)
    return tokens, mask


def to_the_start(x: Any, mask: np.ndarray) -> np.ndarray:
    """Rows whose padding, which is 0, is moved behind them."""
    order = np.argsort(~mask, 1, stable=True).reshape(*mask.shape, *[1] * (x.ndim - 2))
    return np.take_along_axis(np.asarray(x), order, 1)


@cache
def of_model() -> DecoderConfig:
    """With layers with a window and without."""
    return replace(tiny_model("qwen2")[0], kinds=WINDOWS)


Entry = Literal["rows", "streams", "groups", "prefill"]
ENTRIES: tuple[Entry, ...] = get_args(Entry)


def loss_of_model(
    mesh: Any, entries: tuple[Entry, ...], params: Any
) -> tuple[jax.Array, dict[Entry, Any]]:
    """Hidden states of whole sequences, of streams of them and of groups, and of a prefill of the
    prompts. The value, and so the gradient, is of the first of `entries`, in which prompts count
    once for a group."""
    config, of = of_model(), dict.fromkeys(ENTRIES, jax.lax.stop_gradient(params))
    of[entries[0]] = params
    tokens, mask = whole_rows(config.vocab_size)
    prompts, real, _, live = rows(config.vocab_size)
    found: dict[Entry, Any] = {}
    if "rows" in entries:
        plain = decoder.forward(config, of["rows"], tokens, mask, mesh=mesh)
        found["rows"] = jnp.where(mask[..., None], plain, 0)
    streams: list[tuple[Entry, int]] = [("streams", 1), ("groups", 2)]
    for entry, group in streams:
        if entry in entries:
            packing = pack_streams(Sequences(tokens, mask, live, group), mesh)
            hidden = decoder.forward_packed(config, of[entry], packing, mesh=mesh)
            found[entry] = [each.unpack(hidden) for each in packing.rows]
    if "prefill" in entries:
        first, own = (to_the_start(x, real) for x in (np.where(real, prompts, 0), real))
        filled, _ = decoder.prefill(config, of["prefill"], first, own, mesh=mesh)
        found["prefill"] = jnp.where(own[..., None], filled, 0)
    valued = found["groups"] if entries[0] == "groups" else of_groups_once(found["rows"])
    return sum(jnp.sin(x).sum() for x in valued), found


def of_groups_once(rows: Any) -> list[Any]:
    """Of rows of prompts and completions."""
    return [rows[::2, :W], rows[:, W:]]


@cache
def by_model_of_products() -> tuple[tuple[Any, dict[Entry, Any]], Any]:
    """What `loss_of_model` finds of all entries, and its gradient: of whole sequences alone, in
    matrix products on one device."""
    config = of_model()
    tokens, mask = whole_rows(config.vocab_size)
    _, real, *_ = rows(config.vocab_size)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden = decoder.forward(config, params, tokens, mask)
        hidden = jnp.where(mask[..., None], hidden, 0)
        return sum(jnp.sin(x).sum() for x in of_groups_once(hidden)), hidden

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, hidden), gradient = jax.device_get(run(tiny_model("qwen2")[1]))
    of_prompts, streams = to_the_start(hidden[::2, :W], real), [to_the_start(hidden, mask)]
    groups = [of_prompts, of_groups_once(hidden)[1]]
    found = {"rows": hidden, "streams": streams, "groups": groups, "prefill": of_prompts}
    return (total, found), gradient


@pytest.mark.parametrize(
    ("kernel", "axes", "entries"),
    and_slow(
        # Whole rows are rolled for cuDNN's kernel. Streams of groups are above, in both.
        [("cudnn", (2, 1, 4), ("rows",)), ("splash", None, ("groups", "prefill"))],
        [
            ("cudnn", (2, 1, 4), ("groups", "rows", "streams", "prefill")),
            ("splash", None, ("groups", "rows", "streams")),
        ],
    ),
    ids=str,
)
def test_a_model_is_the_same_function_in_each_kernel(
    as_cudnn: None,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    axes: tuple[int, int, int] | None,
    entries: tuple[Entry, ...],
) -> None:
    """With cuDNN's gradients; of 2 KV heads each of four devices picks its own. Expected is what
    matrix products compute of whole sequences on one device."""
    (total, every), gradient = by_model_of_products()
    expected: Any = (total, {entry: every[entry] for entry in entries})
    mesh = None if axes is None else make_mesh(*axes)
    monkeypatch.setattr(decoder, "kernel_of", lambda *_: kernel)
    monkeypatch.setattr(splash, "attend_tiles", partial(splash.attend_tiles, interpret=True))
    # Of its own: jax keeps the traces of one function.
    run: Any = partial(loss_of_model, mesh, entries)
    if kernel == "cudnn":
        run, expected = jax.value_and_grad(run, has_aux=True), (expected, gradient)
    assert_close(jax.jit(run)(tiny_model("qwen2", mesh)[1]), expected, 1e-4)


def test_an_encoder_is_the_same_function_in_cudnn(
    as_cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole rows, whose padding may be on either side."""
    config = EncoderConfig("bert", 50, 32, 2, 4, 48, 20, 0, 2, 1e-12, "mean", 20)
    shapes = bert.shapes(config)
    values = zip(shapes, map(np.asarray, arrays(*shapes.values())), strict=True)
    params = bert.tree({path: jnp.asarray(np.float32(0.1) * x) for path, x in values})
    prompts, real, completions, live = rows(config.vocab_size)
    behind = (np.pad(x, ((0, 0), (0, W - C))) for x in (completions, live))
    given = [np.concatenate(pair) for pair in zip((prompts, real), behind, strict=True)]

    def run() -> Any:
        return jax.jit(lambda: bert.encode(config, params, *given))()

    expected = run()
    monkeypatch.setattr(bert, "kernel_of", lambda *_: "cudnn")
    assert_close(run(), expected)


@pytest.mark.parametrize(
    ("width", "behind", "causal"),
    and_slow(
        [(14, 3, True)],
        [
            (5, 3, False),  # as a window that is counted above
            *((width, behind, True) for width, behind in ((5, 0), (5, 3), (14, 0))),
            *((8, behind, True) for behind in (0, 3)),
            *((width, 0, False) for width in (5, 8, 14)),
            *((width, 3, False) for width in (8, 14)),
        ],
    ),
)
def test_attention_by_blocks_is_attention(
    width: int, behind: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its gradients, where blocks do not divide the width too, and rows are padded."""
    q, k, v = arrays((3, width, 4, 8), (3, width + behind, 2, 8), (3, width + behind, 2, 8))
    keys = np.arange(width + behind)[None] < np.array([[width + behind], [behind + 2], [1]])
    queries = keys[:, behind:]

    def run(q: Any, k: Any, v: Any) -> Any:
        attend = attention.attender(None, keys, None, queries=queries, causal=causal)
        return jnp.where(queries[..., None, None], attend(q, k, v), 0)

    monkeypatch.setattr(attention, "BLOCK", 4)
    jaxpr = str(jax.make_jaxpr(run)(q, k, v))
    assert f"3,2,2,{width},{width + behind}]" not in jaxpr
    expected = by_hand(q, k, v, reach(keys, width, causal, None), queries)
    assert_close(gradients(run, q, k, v), expected)


@pytest.mark.parametrize(("window", "share"), [(None, 1), (256, 4)])
def test_long_rows_keep_no_scores(window: int | None, share: int) -> None:
    """4096 tokens: the scores of a head are 67 MB. Those of a block with a window are fewer."""
    width, heads = 4096, 4
    shapes = [jax.ShapeDtypeStruct((1, width, heads, 16), jnp.float32)] * 3
    keys = jnp.ones((1, width), bool)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return attention.attender(None, keys, None, window=window)(q, k, v).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes).compile()
    scores = heads * width * width * 4
    held = program.memory_analysis().temp_size_in_bytes
    assert held < scores / share  # where all exist: 3 times them


@pytest.mark.parametrize("kernel", [split_k, flash_decode], ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    ("positions", "dtype", "limit", "window"),
    and_slow(
        [
            (320, "float32", 2e-6, None),
            (1024, "bfloat16", 1e-2, 100),
        ],
        [
            *((320, "float32", 2e-6, window) for window in (1, 100)),
            *((64, "float32", 2e-6, window) for window in (None, 1, 100)),
            *((1024, "float32", 2e-6, window) for window in (None, 1, 100)),
            *((positions, "bfloat16", 1e-2, 100) for positions in (64, 320)),
        ],
    ),
)
def test_a_decode_step_in_a_kernel_is_the_step_of_products(
    positions: int,
    dtype: str,
    limit: float,
    window: int | None,
    kernel: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stands behind a slot's own position or before its window; several blocks of keys,
    the last not full."""
    monkeypatch.setattr(flash_decode, "BLOCK_BYTES", 1 << 16)
    shapes = (5, 1, 6, 16), (5, 2, positions, 16), (5, 2, positions, 16)
    lengths = np.array([1, 2, positions // 2, positions - 1, positions], np.int32)
    seen = np.arange(positions)[None] < lengths[:, None]
    if window is not None:
        seen &= np.arange(positions)[None] >= lengths[:, None] - window
    q, k, v = (np.asarray(x) for x in arrays(*shapes))
    k, v = (np.where(seen[:, None, :, None], x, np.float32(7)) for x in (k, v))
    q, k, v = (x.astype(jnp.dtype(dtype)) for x in (q, k, v))
    interpret_step_kernels(monkeypatch)
    name = "split-k" if kernel is split_k else "flash-decode"
    found = jax.jit(attend_alone(name, lengths - 1, window))(q, k, v)
    assert found.dtype == q.dtype
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    all_seen = np.ones((5, 1), bool)
    expected, _ = by_hand(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen[:, None], all_seen)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, limit, limit)


def test_parts_of_the_keys_are_put_together_in_float32() -> None:
    """Each head's result is the right one times a factor that the sum of its weights makes."""
    q, k, v = arrays((8, 2, 3, 64), *[(8, 2, 1024, 64)] * 2)
    v = np.asarray(v) + 1  # far from 0: the factor is seen
    q, k, v = (np.asarray(x).astype(jnp.bfloat16) for x in (q, k, v))
    lengths = np.arange(8, dtype=np.int32) * 128 + 100
    attend = partial(split_k.attend_parts, capabilities=[SMALLEST], interpret=True)
    read, total = map(np.asarray, jax.jit(attend)(q, k, v, lengths))
    mask = (np.arange(1024)[None] < lengths[:, None])[:, None]
    expected, of = by_terms(q, k, v, mask)
    factors = (read * expected).sum(-1) / (expected * expected).sum(-1)
    assert np.std(factors - 1) < 3e-4  # of a sum in bfloat16: 1e-3
    np.testing.assert_allclose(total, of, atol=1e-3)


@pytest.mark.parametrize(("queries", "head_dim"), and_slow([(64, 512)], [(64, 256), (8, 512)]))
def test_wide_heads_are_read_in_smaller_tiles(queries: int, head_dim: int) -> None:
    rows, keys = split_k.tile_of(queries, head_dim, [SMALLEST])
    assert keys < split_k.KEYS
    q, k, v = arrays((2, 1, queries, head_dim), *[(2, 1, 128, head_dim)] * 2)
    lengths = np.array([128, 40], np.int32)
    attend = partial(split_k.attend_parts, capabilities=[SMALLEST], interpret=True)
    read, total = jax.jit(attend)(q, k, v, lengths)
    mask = (np.arange(128)[None] < lengths[:, None])[:, None]
    expected, of = by_terms(q, k, v, mask)
    np.testing.assert_allclose(read, expected, 2e-5, 2e-5)
    np.testing.assert_allclose(total, of, 2e-5)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize(
    ("capability", "kib", "widest"),
    [((8, 0), 163, 1024), ((8, 6), 99, 1024), ((8, 9), 99, 1024), ((9, 0), 227, 2048)]
    + [((10, 0), 227, 2048), ((10, 3), 227, 2048), ((12, 0), 99, 1024)]
    + [((8, 7), 99, 1024), ((12, 1), 99, 1024)],  # of no target
)
def test_a_tile_fits_the_shared_memory_of_its_gpu_or_there_is_no_kernel(
    capability: tuple[int, int], kib: int, widest: int, head_dim: int
) -> None:
    """Of CUDA's table of compute capabilities, and no smaller tile where a larger one fits."""
    target = Target("gpu", capability)
    reason = why_no_step_kernel(target, head_dim, "bfloat16")
    for queries in (1, 16, 40, 64, 1000):
        tile = split_k.tile_of(queries, head_dim, [capability])
        assert (tile is None) == (reason is not None) == (head_dim > widest)
        if tile is not None:
            rows, keys = tile
            taken = (split_k.shared_by(rows, n, head_dim, capability) for n in (keys, 2 * keys))
            fits, more = (size <= kib * 1024 for size in taken)
            assert fits and rows >= min(queries, 16)
            assert keys == split_k.KEYS or not more


@pytest.mark.parametrize(
    ("positions", "rows", "parts"),
    [(1024, 1, 16), (1024, 33, 16), (1024, 100, 4), (1024, 1000, 1), (320, 8, 5), (64, 1, 1)],
)
def test_keys_are_divided_until_the_gpu_is_full(positions: int, rows: int, parts: int) -> None:
    assert split_k.parts_of(positions, rows) == parts


@pytest.mark.parametrize(
    ("name", "sizes"),
    and_slow([("split-k", (1, 1, 4))], [("flash-decode", (1, 2, 2)), ("split-k", (2, 1, 2))]),
    ids=str,
)
def test_a_model_decodes_in_the_kernel(
    name: str, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV heads divided by the mesh, or whole on each device (tensor=4)."""
    kinds = (LayerKind(window=70), LayerKind())
    config = DecoderConfig("qwen2", 32, 64, 2, 4, 2, 16, 128, kinds=kinds)
    mesh = make_mesh(*sizes)
    params = parameters.unstack(jax.device_get(random_params(config)))
    params = jax.device_put(params, param_shardings(config, mesh, "unstacked"))
    tokens = np.arange(4, dtype=np.int32)
    seats = a_seat_each([5, 0, 64, 40], shards=sizes[0] * sizes[1])
    positions = np.asarray(seats.lengths) + np.array([0, 63, 64, 127], np.int32)
    pairs = arrays(*[(4, 2, 128, 16)] * 8)
    spec = NamedSharding(mesh, cache_specs(mesh, [(pairs[0], pairs[1])])[0][0])
    given = [jax.device_put(x, spec) for x in pairs]
    cache, prompts = (
        list(zip(some[::2], some[1::2], strict=True)) for some in (given[:4], given[4:])
    )
    shared = decoder.Shared(prompts, seats, seats.lengths)

    def run() -> Any:
        step = partial(decoder.decode_step, config, mesh=mesh)
        slot_tokens = decoder.SlotTokens(tokens, positions)
        return jax.jit(step)(params, cache, slot_tokens, shared)

    expected = run()
    monkeypatch.setattr(decoder, "step_kernel_of", lambda *_: name)
    interpret_step_kernels(monkeypatch)
    assert_close(run(), expected)


def test_compiling_for_a_gpu_leaves_no_trace() -> None:
    before = dict(vars(fused_attention_stablehlo))
    with pytest.raises(RuntimeError, match="stop"), compiling_for(Target("gpu", (9, 0))):
        check = fused_attention_stablehlo.check_compute_capability
        assert check("9.0") and check("8.0") and not check("10.0")
        raise RuntimeError("stop")
    assert dict(vars(fused_attention_stablehlo)) == before
    with compiling_for(CPU):
        assert dict(vars(fused_attention_stablehlo)) == before


@pytest.mark.gpu
@pytest.mark.parametrize("positions", [64, 320, 4096])
def test_the_kernel_of_a_decode_step_is_near_matrix_products(positions: int) -> None:
    """At the head dims and groups of Qwen2.5, Qwen3 and Llama 3, in bfloat16."""
    target = target_of(jax.devices()[:1])
    name: Any = "flash-decode" if target.platform == "tpu" else "split-k"
    for heads, kv_heads, head_dim in ((12, 2, 128), (32, 8, 64), (28, 4, 128), (16, 8, 128)):
        why = why_no_step_kernel(target, head_dim, "bfloat16")
        if why is not None:
            if target.platform == "tpu":
                continue  # head dims of 64
            pytest.skip(why)
        shapes = (5, 1, heads, head_dim), *[(5, kv_heads, positions, head_dim)] * 2
        q, k, v = (x.astype(jnp.bfloat16) for x in arrays(*shapes))
        lengths = jnp.array([1, 2, positions // 2, positions - 1, positions], jnp.int32)
        seen = jnp.arange(positions)[None] < lengths[:, None]
        run = jax.jit(attend_alone(name, np.asarray(lengths) - 1))
        found = np.asarray(run(q, k, v), np.float32)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        exact = attention.attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), seen[:, None])
        np.testing.assert_allclose(found, exact, 0.02, 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [(LayerKind(),), WINDOWS], ids=["alike", "windows"])
def test_the_kernel_of_an_accelerator_is_near_matrix_products(
    kinds: tuple[LayerKind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where both round; what stands at padding is finite."""
    if jax.devices()[0].platform == "cpu":
        pytest.skip("no accelerator: unset JAX_PLATFORMS on a machine that has one")
    config = DecoderConfig("qwen2", 64, 256, 2, 4, 2, 64, 128, kinds=kinds)
    params = parameters.init_params(config, jax.random.key(0))
    prompts, real, completions, live = rows(config.vocab_size)
    halves = (prompts, completions), (real, live)
    whole = [np.concatenate([np.repeat(x, 2, 0), y], 1) for x, y in halves]

    def loss(params: Any) -> tuple[jax.Array, Any]:
        found = [decoder.forward(config, params, *whole, dtype=jnp.bfloat16)]
        seen = [jnp.where(whole[1][..., None], found[0], 0)]
        for group in (1, 2):
            packing = pack_streams(Sequences(*whole, live, group))
            found += [decoder.forward_packed(config, params, packing, dtype=jnp.bfloat16)]
            seen += [rows.unpack(found[-1]) for rows in packing.rows]
        found, seen = ([x.astype(jnp.float32) for x in each] for each in (found, seen))
        return sum(jnp.sin(x).sum() for x in seen), (found, seen)

    def run() -> Any:
        (_, (found, seen)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, grads)))
        return [np.asarray(x) for x in jax.tree.leaves((seen, grads))]

    fused = run()
    monkeypatch.setattr(decoder, "kernel_of", lambda *_: None)
    for a, b in zip(fused, run(), strict=True):
        assert np.sqrt(np.mean((a - b) ** 2)) <= 0.05 * np.sqrt(np.mean(b**2)) + 1e-6
