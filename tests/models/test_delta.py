"""Laws of layers with a state: the chunks are the recurrence, and a row knows nothing of others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from tiny_models import make_mesh, tiny_model

from jaxrl.models import decoder, delta, parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.delta import Delta, Filters, Inputs
from jaxrl.models.kinds import LayerKind
from jaxrl.models.packing import pack
from jaxrl.types import Sequences

SIZES = Delta(k_heads=2, v_heads=4, k_dim=8, v_dim=6)


def inputs(rows: int, tokens: int, alike: float = 0.0) -> tuple[Inputs, Filters]:
    """Random ones whose keys have so much in common."""
    draw = np.random.default_rng(0)
    d = SIZES

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    k = (1 - alike) * normal(rows, tokens, d.k_heads, d.k_dim) + alike
    v = normal(rows, tokens, d.v_heads, d.v_dim)
    g = -jnp.exp(normal(rows, tokens, d.v_heads))
    rate = jax.nn.sigmoid(2 + normal(rows, tokens, d.v_heads))
    filters = (0.5 * normal(width, 1, d.conv) for width in (d.k_width, d.k_width, d.v_width))
    return Inputs(normal(*k.shape), k, v, g * (1 - alike), rate), Filters(*filters)


def by_steps(mask: jax.Array, given: Inputs, filters: Filters) -> tuple[jax.Array, Any]:
    """One call for each token, in a scan."""

    def step(kept: Any, one: Any) -> tuple[Any, jax.Array]:
        real, token = one
        token = jax.tree.map(lambda x: x[:, None], token)
        out, kept = delta.recur_rows(SIZES, None, real[:, None], token, filters, kept)
        return kept, out[:, 0]

    start = delta.nothing_read(SIZES, len(mask), jnp.dtype("float32"))
    first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (mask, given))
    kept, out = jax.lax.scan(step, start, first)
    return jnp.moveaxis(out, 0, 1), kept


@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_chunks_are_the_recurrence_step_by_step(alike: float) -> None:
    """Of rows that end within a chunk, at its end and in the third one, values and gradients; also
    where all keys are one and little is forgotten, whose changes nearly cancel."""
    given, filters = inputs(3, 150, alike)
    mask = jnp.arange(150)[None] < jnp.array([150, 128, 31])[:, None]

    def sums(run: Any, given: Inputs, filters: Filters) -> Any:
        out, kept = run(mask, given, filters)
        out = jnp.where(mask[..., None, None], out, 0)
        return jnp.sin(out).sum() + sum(jnp.sin(x).sum() for x in kept), (out, kept)

    chunks, steps = (
        jax.jit(jax.value_and_grad(partial(sums, run), (0, 1), has_aux=True))(given, filters)
        for run in (partial(delta.recur_rows, SIZES, None), by_steps)
    )
    for a, b in zip(jax.tree.leaves(chunks), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


def test_rows_in_two_parts_are_the_rows() -> None:
    given, filters = inputs(2, 90)
    mask = jnp.arange(90)[None] < jnp.array([90, 50])[:, None]
    recur = jax.jit(partial(delta.recur_rows, SIZES, None))
    whole, end = recur(mask, given, filters)
    kept, parts = None, []
    for part in (slice(0, 2), slice(2, 70), slice(70, 90)):
        own = jax.tree.map(lambda x, part=part: x[:, part], given)
        out, kept = recur(mask[:, part], own, filters, kept)
        parts.append(out)
    seen = mask[..., None, None]
    joined = jnp.concatenate(parts, 1)
    np.testing.assert_allclose(jnp.where(seen, joined, 0), jnp.where(seen, whole, 0), atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), kept, end)


@pytest.mark.parametrize("axes", and_slow([(1, 1, 2, 2)], [None]), ids=str)
def test_streams_hold_the_same_rows(axes: tuple[int, ...] | None) -> None:
    """Rows by themselves, and groups that share a prompt, whose state and last inputs are then
    those at the prompt's end, one of which is shorter than the convolution; on a mesh too, where
    `context` divides the tokens."""
    mesh = None if axes is None else make_mesh(*axes)
    config, params = tiny_model("qwen3_5", mesh)
    draw = np.random.RandomState(3)
    prompts = np.repeat(draw.randint(3, config.vocab_size, (4, 7)), 2, 0)
    real = np.arange(7)[None] >= np.repeat([0, 5, 2, 6], 2)[:, None]
    completions = draw.randint(3, config.vocab_size, (8, 6))
    live = np.arange(6)[None] < np.array([6, 1, 3, 2, 0, 4, 6, 5])[:, None]
    tokens = jnp.asarray(np.concatenate([prompts, completions], 1), jnp.int32)
    mask = jnp.asarray(np.concatenate([real, live], 1))

    def scored(params: Any, group: int) -> tuple[jax.Array, jax.Array]:
        if group:
            packing = pack(Sequences(tokens, mask, jnp.asarray(live), group), mesh)
            hidden = decoder.forward_packed(config, params, packing, mesh=mesh, remat="full")
            own = packing.unpack(packing.predicting(hidden, mesh))
        else:
            own = decoder.forward(config, params, tokens, mask, mesh=mesh)[:, 6:-1]
        own = jnp.where(live[..., None], own, 0)
        return jnp.sin(own).sum(), own

    run = jax.jit(jax.value_and_grad(scored, has_aux=True), static_argnums=1)
    expected = run(params, 0)
    for group in (1, 2):
        for a, b in zip(
            jax.tree.leaves(run(params, group)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("remat", ["dots", "full"])
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
