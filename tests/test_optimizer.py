"""Schedules by hand, the state's dtype and place, what is decayed, and each optimizer's first step
downhill.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from jaxrl.config import OptimizerConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import init_params
from jaxrl.optimizer import decayed, learning_rate, make_optimizer, state_shardings
from jaxrl.sharding.rules import param_shardings

MODEL = DecoderConfig("qwen2", 32, 16, 2, 4, 2, 4, 24, attention_bias=True)
NAMES = ["adamw", "adam", "sgd", "lion", "adafactor", "muon"]


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


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_goes_downhill(name):
    params = init_params(MODEL, jax.random.key(0))
    optimizer = make_optimizer(config(name=name, learning_rate=1e-3), 10, jnp.float32)

    def loss(p):
        return sum(jnp.sum((x - 0.3) ** 2) for x in jax.tree.leaves(p))

    @jax.jit
    def step(params, state):
        changes, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, changes), state

    state, before = optimizer.init(params), float(loss(params))
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
    mask = decayed(init_params(MODEL, jax.random.key(0)))
    assert mask["layers"]["attn"]["q"] == {"kernel": True, "bias": False}
    assert not any(jax.tree.leaves((mask["embed"], mask["norm"], mask["lm_head"])))
    assert not mask["layers"]["attn_norm"]["scale"]


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("schedule", [{}, {"lr_schedule": "cosine", "warmup_steps": 4}])
def test_without_a_gradient_only_weight_decay_moves_a_kernel(name, schedule):
    """kernel *= 1 - lr_t * weight_decay at update t, whatever the optimizer."""
    chosen, updates = config(name=name, weight_decay=0.01, **schedule), 10
    optimizer, rate = make_optimizer(chosen, updates, jnp.float32), learning_rate(chosen, updates)
    params = start = init_params(MODEL, jax.random.key(0))

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
        *map(jax.tree.leaves, (params, start, decayed(start))), strict=True
    ):
        np.testing.assert_allclose(moved, first * (left if is_kernel else 1.0), rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_moments_lie_where_their_parameters_do(name):
    axes = ("data", "fsdp", "tensor")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    shardings = param_shardings(MODEL, mesh)
    params = jax.device_put(init_params(MODEL, jax.random.key(0)), shardings)
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
            assert leaf.dtype == jnp.bfloat16 or name == "adafactor"
    assert matched == {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1, "adafactor": 1, "muon": 1}[name]
