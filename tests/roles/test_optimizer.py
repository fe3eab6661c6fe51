"""Schedules by hand, the state's dtype and place, what is decayed, and each optimizer's first step
downhill.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import and_slow
from optax.contrib import MuonDimensionNumbers, muon
from tiny_models import random_params, tiny_config

from jaxrl.config.settings import OptimizerConfig
from jaxrl.models import parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.parameters import param_shardings
from jaxrl.roles.optimizer import (
    MUON_DECAY,
    apply_changes,
    decay_mask,
    learning_rate,
    make_optimizer,
    round_at_random,
    state_shardings,
    warmup_note,
)
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh

MODEL = DecoderConfig("qwen2", 32, 16, 2, 4, 2, 4, 24)
NAMES = ["adamw", "adam", "sgd", "lion", "adafactor", "muon"]


def few(tree):
    """A leaf of each kind of MODEL's: embeddings, a kernel, a bias and a scale. An update computes
    the same for each leaf, and compiles it for each."""
    layers = tree["layers"]
    attn = {"q": layers["attn"]["q"]}
    return {"embed": tree["embed"], "layers": {"attn": attn, "attn_norm": layers["attn_norm"]}}


def few_params():
    return jax.device_get(few(random_params(MODEL)))


def config(**changes):
    return OptimizerConfig(**({"learning_rate": 0.1, "warmup_steps": 0} | changes))


def test_schedules_by_hand():
    def rates(**c):
        return [float(learning_rate(config(**c), 10)(i)) for i in range(10)]

    assert rates() == pytest.approx([0.1] * 10)
    assert rates(lr_schedule="linear") == pytest.approx([0.1 - 0.01 * i for i in range(10)])
    warm = rates(lr_schedule="linear", warmup_steps=4, min_lr_ratio=0.1)
    assert warm[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert float(learning_rate(config(lr_schedule="linear", min_lr_ratio=0.1), 10)(10)) == (
        pytest.approx(0.01)
    )
    cosine = rates(lr_schedule="cosine")
    assert cosine[5] == pytest.approx(0.05) and cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_warm_up_is_as_long_as_asked_for_whatever_the_length_of_the_run(shape):
    """Also where the run ends within it, so that a resume with more steps goes on at its rate."""
    asked = config(lr_schedule=shape, warmup_steps=30)
    for updates in (1, 20, 29, 30, 31, 1000):
        found = [float(learning_rate(asked, updates)(i)) for i in range(min(updates, 30))]
        asked_for = [0.1 * (i + 1) / 31 for i in range(min(updates, 30))]
        # the rise is subtracted from the peak, in float32
        assert found == pytest.approx(asked_for, abs=0.1 * 2**-23)
        note = warmup_note(asked, updates)
        assert (note is None) == (updates > 30)
        if note is not None:
            assert f"{found[-1]:.3g} of 0.1" in note


@jax.jit
def loss(p):
    return sum(jnp.sum((x - 0.3) ** 2) for x in jax.tree.leaves(p))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_downhill(name):
    params = few_params()
    optimizer = make_optimizer(config(name=name, learning_rate=1e-3), 10, jnp.float32)

    @jax.jit
    def step(params, state):
        changes, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, changes), state

    state, before = jax.jit(optimizer.init)(params), float(loss(params))
    for _ in range(3):
        params, state = step(params, state)
    assert float(loss(params)) < before


def test_clipping_bounds_the_step_and_small_gradients_pass():
    optimizer = make_optimizer(config(name="sgd", b1=0.0, learning_rate=1.0), 10, jnp.float32)
    for scale, norm in ((10.0, 1.0), (0.1, 0.1)):
        grads = {"layers": {"kernel": jnp.full((4,), scale / 2)}}
        changes, _ = optimizer.update(grads, optimizer.init(grads), grads)
        assert float(optax.tree.norm(changes)) == pytest.approx(norm, rel=1e-6)


def test_only_the_kernels_of_the_blocks_are_decayed():
    mask = decay_mask(random_params(MODEL))
    assert mask["layers"]["attn"]["q"] == {"kernel": True, "bias": False}
    assert not any(jax.tree.leaves((mask["embed"], mask["norm"], mask["lm_head"])))
    assert not mask["layers"]["attn_norm"]["scale"]
    layers = decay_mask(parameters.abstract_params(tiny_config("gpt_oss")))["layers"]
    assert not layers["attn"]["sinks"] and layers["mlp"]["router"]["kernel"]
    assert layers["mlp"]["experts"]["gate"] == {"kernel": True, "bias": False}


COSINE = {"lr_schedule": "cosine", "warmup_steps": 4}


@pytest.mark.parametrize(
    ("name", "schedule"),
    and_slow(
        [("adamw", COSINE), ("lion", {}), ("adafactor", COSINE), ("muon", {})],
        [("adamw", {}), ("lion", COSINE), ("adafactor", {}), ("muon", COSINE)],
    ),
)
def test_without_a_gradient_only_weight_decay_moves_a_kernel(name, schedule):
    """kernel *= 1 - lr_t * weight_decay at update t, whatever the optimizer."""
    chosen, updates = config(name=name, weight_decay=0.01, **schedule), 10
    optimizer, rate = make_optimizer(chosen, updates, jnp.float32), learning_rate(chosen, updates)
    params = start = few_params()

    @jax.jit
    def step(params, state):
        zeros = jax.tree.map(jnp.zeros_like, params)
        changes, state = optimizer.update(zeros, state, params)
        return optax.apply_updates(params, changes), state

    state = jax.jit(optimizer.init)(params)
    for _ in range(updates):
        params, state = step(params, state)
    left = np.prod([1 - float(rate(t)) * chosen.weight_decay for t in range(updates)])
    assert 0.99 < left < 0.995
    for moved, first, is_kernel in zip(
        *map(jax.tree.leaves, (jax.device_get(params), start, decay_mask(start))), strict=True
    ):
        np.testing.assert_allclose(moved, first * (left if is_kernel else 1.0), rtol=2e-6)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_small_moves_of_bfloat16_weights_arrive_in_the_mean(name):
    """100 steps of 1e-5: rounded to the nearest, weights above 0.005 would not move at all."""
    optimizer = make_optimizer(config(name=name, learning_rate=1e-5), 100, jnp.float32)
    start = 0.02 * jax.random.normal(jax.random.key(3), (512, 512))
    start = {"w": start.astype(jnp.bfloat16)}

    @partial(jax.jit, donate_argnums=0)
    def step(carry, updates):
        params, state = carry
        changes, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        return apply_changes(params, changes, 0, updates), state

    carry = jax.tree.map(jnp.copy, start), optimizer.init(start)
    for updates in range(100):
        carry = step(carry, jnp.int32(updates))
    before = np.asarray(start["w"], np.float64)
    moved = np.asarray(carry[0]["w"], np.float64) - before
    assert moved.mean() == pytest.approx(-1e-3, rel=0.05)
    assert moved[np.abs(before) > 0.01].mean() == pytest.approx(-1e-3, rel=0.05)


def test_rounding_at_random_keeps_the_mean_and_what_needs_none():
    """1 + 2^-9 lies a quarter of the way from 1 to the next bfloat16 number, 1 + 2^-7."""
    between, at_random = np.full((256, 1024), 1 + 2**-9, np.float32), jax.jit(round_at_random)
    one, other = (np.asarray(at_random(between, jax.random.key(seed))) for seed in (0, 1))
    for rounded in (one, other):
        up = rounded == 1 + 2**-7
        assert (up | (rounded == 1)).all()
        for axis in (None, 0, 1):  # no row and no column is favoured either
            share = up.mean(axis)
            limit = 5 * np.sqrt(0.25 * 0.75 * np.size(share) / up.size)
            assert np.abs(share - 0.25).max() < limit
    both = ((one > 1) & (other > 1)).mean()
    assert both == pytest.approx(1 / 16, abs=5 * np.sqrt(1 / 16 / between.size))
    exact = np.array([0.0, -1.5, np.inf, -np.inf, np.nan], np.float32)
    kept = np.asarray(at_random(exact, jax.random.key(0))).astype(np.float32)
    np.testing.assert_array_equal(kept, exact)


def test_random_rounding_is_the_same_on_every_mesh_and_another_at_every_update():
    mesh = role_mesh(jax.devices(), Axes(2, 2, 2))
    whole = few_params()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), whole)
    whole = jax.tree.map(lambda x: x.astype(np.float32), params)
    changes = jax.tree.map(lambda x: np.full(x.shape, 1e-4, np.float32), params)
    step = jax.jit(apply_changes, static_argnums=2)
    alone = jax.device_get(step(params, changes, 7, np.int32(3)))
    placed = jax.device_put((params, changes), (few(param_shardings(MODEL, mesh)),) * 2)
    spread = step(*placed, 7, np.int32(3))
    jax.tree.map(np.testing.assert_array_equal, alone, jax.device_get(spread))
    for other in (step(params, changes, 7, np.int32(4)), step(params, changes, 8, np.int32(3))):
        pairs = zip(jax.tree.leaves(alone), jax.tree.leaves(other), strict=True)
        assert not all((a == np.asarray(b)).all() for a, b in pairs)
    expected = jax.tree.map(np.add, whole, changes)
    jax.tree.map(np.testing.assert_array_equal, step(whole, changes, 7, np.int32(3)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_moments_lie_where_their_parameters_do(name):
    mesh = role_mesh(jax.devices(), Axes(2, 2, 2))
    shardings = param_shardings(MODEL, mesh)
    params = jax.device_put(random_params(MODEL), shardings)
    optimizer = make_optimizer(config(name=name), 10, jnp.bfloat16)
    placed = state_shardings(optimizer, params, shardings, mesh)
    state = jax.jit(optimizer.init, out_shardings=placed)(params)
    matched = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.ndim == 3 and jax.tree_util.keystr(path).endswith("['q']['kernel']"):
            matched += leaf.shape == params["layers"]["attn"]["q"]["kernel"].shape
            assert (
                leaf.shape != (2, 16, 16)
                or leaf.sharding == (shardings["layers"]["attn"]["q"]["kernel"])
            )
            averages = jax.tree_util.keystr(path).count(".mu") or name == "sgd"
            half = averages and name in ("adamw", "adam", "sgd")  # lion's and muon's decays are .95
            assert leaf.dtype == (jnp.bfloat16 if half else jnp.float32)
    assert matched == {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1, "adafactor": 1, "muon": 1}[name]


@pytest.mark.parametrize("dtype", and_slow(["float32"], ["bfloat16"]))
def test_muon_by_layer_is_optaxs_muon(dtype):
    """Kernels, wide and tall, and those of experts, each matrix by itself: the changes and the
    state, by path, are those of optax's `muon`, which orthogonalises all layers at once."""
    c = config(name="muon", weight_decay=0.1, clip_norm=None)
    shapes = {"up": (2, 6, 8), "down": (2, 8, 6), "experts": (2, 3, 8, 6)}
    mlp = {name: {"kernel": np.ones(shape, np.float32)} for name, shape in shapes.items()}
    params = {
        "layers": {"mlp": mlp, "norm": np.ones((2, 8), np.float32)},
        "head": np.ones((8, 4), np.float32),
    }
    dtype = jnp.dtype(dtype)

    def dims(tree):
        kernel = MuonDimensionNumbers(-2, -1)
        return jax.tree.map(lambda k: kernel if k else None, decay_mask(tree))

    whole = muon(
        learning_rate(c, 10),
        beta=MUON_DECAY,
        weight_decay=c.weight_decay,
        weight_decay_mask=decay_mask,
        adam_b1=c.b1,
        adam_b2=c.b2,
        eps=c.eps,
        muon_weight_dimension_numbers=dims,
    )
    ours = make_optimizer(c, 10, dtype)
    state, theirs = (jax.jit(each.init)(params) for each in (ours, whole))
    updates, draw = [jax.jit(each.update) for each in (ours, whole)], np.random.default_rng(0)
    for _ in range(2):
        grads = jax.tree.map(lambda x: draw.standard_normal(x.shape).astype(dtype), params)
        full = jax.tree.map(lambda x: x.astype(np.float32), grads)
        change, state = updates[0](grads, state, params)
        expected, theirs = updates[1](full, theirs, params)
    for actual, other in (((change,), (expected,)), (state, (theirs,))):  # one chain around ours
        by_path, of_optax = map(jax.tree_util.tree_leaves_with_path, (actual, other))
        assert [path for path, _ in by_path] == [path for path, _ in of_optax]
        for (path, x), (_, y) in zip(by_path, of_optax, strict=True):
            if dtype == jnp.float32 or "kernel" in jax.tree_util.keystr(path):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", and_slow(["adafactor", "muon"], ["adamw", "adam", "sgd", "lion"]))
def test_how_layers_and_experts_are_stacked_changes_no_update(name):
    """Three updates of a stack, in which one layer's gradient grows by 100, are those of each layer
    and expert by itself; 130 layers, or experts, are as long as the dims of a matrix."""
    shapes = {
        ("attn", "kernel"): (3, 130, 160),
        ("attn", "bias"): (3, 160),
        ("norm", "scale"): (130, 140),
        ("experts", "kernel"): (2, 130, 4, 129),
        ("experts", "bias"): (2, 130, 129),
    }
    draw, decay = np.random.default_rng(0), {} if name in ("adam", "sgd") else {"weight_decay": 0.1}
    optimizer = make_optimizer(config(name=name, clip_norm=None, **decay), 10, jnp.float32)
    update = jax.jit(optimizer.update)
    weights = {path: draw.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    grads = [{k: draw.standard_normal(x.shape, np.float32) for k, x in weights.items()}] * 3
    grads[1:] = [{k: np.stack([x[0], 100 * x[1], *x[2:]]) for k, x in grads[0].items()}] * 2

    def updated(i=None, expert=None, layout=dict):
        """Returns the leaves after each update: of the whole stack, of a layer, or of an expert."""

        def part(path, x):
            if i is not None:
                x = x[i] if layout is list else x[i : i + 1]
            cut = expert is not None and path == ("experts", "kernel")
            return x[..., expert : expert + 1, :, :] if cut else x

        def tree(flat):
            layers = {}
            for (group, leaf), x in flat.items():
                layers.setdefault(group, {})[leaf] = part((group, leaf), x)
            return {"layers": layers if layout is dict else [layers]}

        params, found = tree(weights), []
        state = optimizer.init(params)
        for given in grads:
            changes, state = update(tree(given), state, params)
            params = optax.apply_updates(params, changes)
            leaves = jax.tree_util.tree_leaves_with_path(params)
            found.append({tuple(key.key for key in path[-2:]): np.asarray(x) for path, x in leaves})
        return found

    whole = updated()
    for i in range(2):
        for expert in (None, 1):
            for layout in (dict, list):
                for together, alone in zip(whole, updated(i, expert, layout), strict=True):
                    for path, x in alone.items():
                        of = together[path][i] if layout is list else together[path][i : i + 1]
                        if expert is not None and path == ("experts", "kernel"):
                            of = of[..., expert : expert + 1, :, :]
                        np.testing.assert_allclose(x, of, rtol=2e-5, atol=1e-5, err_msg=f"{path}")


SETTINGS = [
    *({"name": "adamw", "b1": b1, "b2": b2} for b1, b2 in ((0.9, 0.95), (0.99, 0.9999))),
    {"name": "muon", "b1": 0.9, "b2": 0.999},
    {"name": "lion", "b2": 0.99},
    {"name": "sgd", "b1": 0.999},
    {"name": "adafactor"},
]
MORE_SETTINGS = [
    *({"name": "adamw", "b1": b1, "b2": b2}
      for b1, b2 in ((0.9, 0.999), (0.95, 0.98), (0.0, 0.999))),
    {"name": "adam", "b1": 0.92, "b2": 0.99},
    *({"name": "lion", "b2": b2} for b2 in (0.9, 0.95)),
    *({"name": "sgd", "b1": b1} for b1 in (0.0, 0.9, 0.95)),
]  # fmt: skip
"""With faster decays, whose averages lose less."""


@pytest.mark.parametrize(
    "settings", and_slow(SETTINGS, MORE_SETTINGS), ids=lambda s: "-".join(map(str, s.values()))
)
def test_averages_in_bfloat16_follow_a_fall_of_the_gradients(settings):
    """Gradients of 1 to 2, then of a hundredth and a thousandth: every change is within 5% of that
    with moments in float32."""
    params = {"layers": {"q": {"kernel": jnp.zeros((1, 4, 8))}}, "norm": jnp.zeros(8)}
    size = jnp.linspace(1.0, 2.0, 8)
    fall = jnp.where(jnp.arange(2000) < 100, 1.0, 0.01).at[1500:].set(0.001)

    @partial(jax.jit, static_argnums=0)
    def changes(dtype):
        optimizer = make_optimizer(config(**settings, clip_norm=None), 10**6, dtype)

        def step(state, scale):
            grads = jax.tree.map(lambda x: jnp.broadcast_to(scale * size, x.shape), params)
            change, new = optimizer.update(grads, state, params)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
                lambda x: (x.shape, x.dtype), state
            )
            return new, change

        return jax.lax.scan(step, optimizer.init(params), fall)[1]

    full, half = changes(jnp.float32), changes(jnp.bfloat16)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.05), half, full)
