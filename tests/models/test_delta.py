"""Laws of layers with a state: the chunks are the recurrence, and a row knows nothing of others."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from tiny_models import Memory, make_mesh, tiny_config, tiny_tensors

from jaxrl.formats import weights
from jaxrl.models import decoder, delta, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta, Filters, Inputs, Recurrent
from jaxrl.models.family import LayerKind
from jaxrl.models.packing import pack_streams
from jaxrl.types import Sequences

SIZES = Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=6)


def inputs(rows: int, tokens: int, alike: float = 0.0) -> tuple[Inputs, Filters]:
    """Random ones whose keys have so much in common."""
    draw = np.random.default_rng(0)
    d = SIZES

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    k = (normal(rows, tokens, d.k_heads, d.k_dim) * np.float32(1 - alike)) + np.float32(alike)
    v = normal(rows, tokens, d.v_heads, d.v_dim)
    g = -np.exp(normal(rows, tokens, d.v_heads)) * np.float32(1 - alike)
    rate = 1 / (1 + np.exp(-2 - normal(rows, tokens, d.v_heads)))
    filters = (normal(width, 1, d.conv) / 2 for width in (d.k_width, d.k_width, d.v_width))
    given = Inputs(normal(*k.shape), k, v, g, rate), Filters(*filters)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(given))
    return jax.tree.map(jnp.asarray, given)


def by_steps(
    mask: jax.Array, given: Inputs, filters: Filters, start: Recurrent
) -> tuple[jax.Array, Any]:
    """One call for each token, in a scan."""

    def step(kept: Any, one: Any) -> tuple[Any, jax.Array]:
        real, token = one
        token = jax.tree.map(lambda x: x[:, None], token)
        out, kept = delta.recur_rows(SIZES, None, real[:, None], token, filters, kept)
        return kept, out[:, 0]

    first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (mask, given))
    kept, out = jax.lax.scan(step, start, first)
    return jnp.moveaxis(out, 0, 1), kept


ENDING = jnp.asarray(np.arange(150)[None] < np.array([150, 128, 31])[:, None])


@cache
def chunks_and_steps() -> list[Any]:
    """Values and gradients of either, of rows that end within a chunk, at its end and in the third
    one."""

    def sums(run: Any, given: Inputs, filters: Filters, start: Recurrent) -> Any:
        out, kept = run(ENDING, given, filters, start)
        out = jnp.where(ENDING[..., None, None], out, 0)
        return jnp.sin(out).sum() + sum(jnp.sin(x).sum() for x in kept), (out, kept)

    runs = partial(delta.recur_rows, SIZES, None), by_steps
    graded = partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    return [jax.jit(graded(partial(sums, run))) for run in runs]


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_chunks_are_the_recurrence_step_by_step(alike: float) -> None:
    """Also where all keys are one and little is forgotten, whose changes nearly cancel; behind
    other tokens, with the gradient of what is kept of them."""
    draw = np.random.default_rng(1)
    like = delta.initial_state(SIZES, 3, jnp.dtype("float32"))
    start = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), like)
    chunks, steps = (run(*inputs(3, 150, alike), start) for run in chunks_and_steps())
    for a, b in zip(jax.tree.leaves(chunks), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


def test_rows_in_two_parts_are_the_rows() -> None:
    given, filters = inputs(2, 138)
    mask = np.arange(138)[None] < np.array([138, 50])[:, None]
    recur = jax.jit(partial(delta.recur_rows, SIZES, None))
    whole, end = recur(mask, given, filters)
    kept, parts = None, []
    for part in (slice(0, 2), slice(2, 70), slice(70, 138)):  # two of them by one program
        own = jax.tree.map(lambda x, part=part: np.asarray(x)[:, part], given)
        out, kept = recur(mask[:, part], own, filters, kept)
        parts.append(out)
    seen = mask[..., None, None]
    joined = np.concatenate(parts, 1)
    np.testing.assert_allclose(np.where(seen, joined, 0), np.where(seen, whole, 0), atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), kept, end)


PROMPTS = np.repeat(np.random.RandomState(3).randint(3, 64, (4, 7)), 2, 0)
REAL = np.arange(7)[None] >= np.repeat([0, 5, 2, 6], 2)[:, None]
COMPLETIONS = np.random.RandomState(4).randint(3, 64, (8, 6))
LIVE = np.arange(6)[None] < np.array([6, 1, 3, 2, 0, 4, 6, 5])[:, None]


def scored(
    axes: tuple[int, ...] | None, group: int, layers: tuple[int, ...], graded: bool
) -> list[Any]:
    """Hidden states of rows (group 0) or streams; where `graded`, with a value of them and its
    gradient."""
    mesh = None if axes is None else make_mesh(*axes)
    config = tiny_config("qwen3_5").with_layers(layers)
    tensors = Memory(tiny_tensors("qwen3_5", config=config))
    params = weights.load_params(tensors, config, mesh, jnp.float32)
    tokens = np.concatenate([PROMPTS, COMPLETIONS], 1).astype(np.int32)
    mask = np.concatenate([REAL, LIVE], 1)

    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        if group:
            packing = pack_streams(Sequences(tokens, mask, LIVE, group), mesh)
            hidden = decoder.forward_packed(config, params, packing, mesh=mesh)
            own = packing.completions.unpack(packing.select_predictors(hidden, mesh))
        else:
            own = decoder.forward(config, params, tokens, mask, mesh=mesh)[:, 6:-1]
        own = jnp.where(LIVE[..., None], own, 0)
        return jnp.sin(own).sum(), own

    return jax.tree.leaves(
        jax.jit(jax.value_and_grad(run, has_aux=True) if graded else run)(params)
    )


EVERY, STATES = (0, 1, 2, 3), (1, 3)
"""Layers: every other one attends, as models in test_attention.py do."""


@cache
def of_rows(layers: tuple[int, ...], graded: bool) -> list[Any]:
    """On one device."""
    return scored(None, 0, layers, graded)


@pytest.mark.parametrize(
    ("axes", "group", "layers", "graded"),
    and_slow(
        [((1, 1, 2, 2), 2, STATES, False)],  # gradients of what a layer reads are above
        [
            *((axes, group, STATES, True) for axes, group in (((1, 1, 2, 2), 2), (None, 1))),
            *((axes, group, EVERY, True) for axes in (None, (1, 1, 2, 2)) for group in (1, 2)),
            ((1, 1, 2, 2), 0, EVERY, True),
        ],
    ),
    ids=str,
)
def test_streams_hold_the_same_rows(
    axes: tuple[int, ...] | None, group: int, layers: tuple[int, ...], graded: bool
) -> None:
    """Rows by themselves, and groups that share a prompt, whose state and last inputs are then
    those at the prompt's end, one of which is shorter than the convolution; on a mesh too, where
    `context` divides the tokens."""
    for a, b in zip(scored(axes, group, layers, graded), of_rows(layers, graded), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("group", and_slow([1], [2]))
def test_a_stream_is_read_as_its_rows_are(group: int) -> None:
    """By themselves, and in groups; on four devices that each have both key heads."""
    (given, filters), mesh = inputs(8, 13), make_mesh(1, 1, 4)
    before, own = (
        jax.tree.map(lambda x, part=part: np.asarray(x)[part], given)
        for part in (np.s_[::2, :7], np.s_[:, 7:])
    )
    given = joined(before, own)
    tokens, mask = np.zeros((8, 13), np.int32), np.concatenate([np.ones((8, 7), bool), LIVE], 1)

    @jax.jit
    def read(*each: Inputs) -> tuple[jax.Array, list[jax.Array]]:
        packing = pack_streams(Sequences(tokens, mask, LIVE, group), mesh)
        parts = [jax.tree.map(at.pack, x) for at, x in zip(packing.rows, each, strict=True)]
        stream = jax.tree.map(lambda *x: sum(x), *parts)
        found, _ = delta.recur_packed(SIZES, mesh, packing)(stream, filters)
        rows, _ = delta.recur_rows(SIZES, None, mask, given, filters)
        return rows, [at.unpack(found) for at in packing.rows]

    rows, found = read(*((given,) if group == 1 else (before, own)))
    found = found[0] if group == 1 else joined(*found)
    seen = mask[..., None, None]
    np.testing.assert_allclose(found, np.where(seen, rows, 0), atol=1e-5)


def joined(before: Any, own: Any) -> Any:
    """Each of `before` twice, with its own behind it."""
    return jax.tree.map(lambda x, y: np.concatenate([np.repeat(x, 2, 0), y], 1), before, own)


@pytest.mark.parametrize("remat", and_slow(["full"], ["dots"]))
def test_the_backward_pass_keeps_no_second_copy_of_the_weights(remat: decoder.Remat) -> None:
    """In a scan over cycles, layers of one kind in turn: 14 of the 46 GB of an update of 9B."""
    kinds = (*[LayerKind(recurs=True)] * 3, LayerKind()) * 2
    config = DecoderConfig(
        "qwen3_5_text", 96, 48, len(kinds), 4, 2, 16, 72, kinds=kinds, delta=SIZES
    )
    tokens, mask = jnp.zeros((2, 5), jnp.int32), jnp.ones((2, 5), bool)

    def loss(params: Any) -> jax.Array:
        return decoder.forward(config, params, tokens, mask, remat=remat).sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(parameters.abstract_params(config)))
    assert "f32[2,48,72]" in text  # of each place in the cycle, stacked
    assert "f32[2,3,2,5,48]" in text  # the inputs of layers, which are kept
    assert "f32[2,3,48,72]" not in text
