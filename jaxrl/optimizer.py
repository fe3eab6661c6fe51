"""The optax optimizer of a run, and where its state lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers, muon

from jaxrl.config import OptimizerConfig

Schedule = Callable[[Any], Any]


def learning_rate(config: OptimizerConfig, updates: int) -> Schedule:
    """Learning rate as a function of the number of updates done; it reaches its end at `updates`.

    Rises linearly from peak / (warmup_steps + 1), so that no update is wasted at rate 0.
    """
    peak, warmup = config.learning_rate, min(config.warmup_steps, max(updates - 1, 0))
    rest, end = max(updates - warmup, 1), config.learning_rate * config.min_lr_ratio
    shapes: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, config.min_lr_ratio),
    }
    after = shapes[config.lr_schedule]()
    if warmup == 0:
        return after
    before = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([before, after], [warmup])


def make_optimizer(
    config: OptimizerConfig, updates: int, moment_dtype: Any
) -> optax.GradientTransformation:
    """Clipping by the global norm, then the named optimizer under its schedule.

    Gradients enter, and moments are kept, in `moment_dtype`.
    """
    c, rate = config, learning_rate(config, updates)
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(
            rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=decayed
        ),
        "adam": lambda: optax.adam(rate, c.b1, c.b2, c.eps),
        "sgd": lambda: optax.sgd(rate, momentum=c.b1 or None),
        "lion": lambda: optax.lion(rate, c.b1, c.b2, weight_decay=c.weight_decay, mask=decayed),
        # With a learning rate of its own, optax's adafactor would leave the decay unscaled by it.
        "adafactor": lambda: optax.chain(
            optax.adafactor(
                None,
                multiply_by_parameter_scale=False,
                weight_decay_rate=c.weight_decay or None,
                weight_decay_mask=decayed,
            ),
            optax.scale_by_learning_rate(rate, flip_sign=False),
        ),
        "muon": lambda: muon(
            rate,
            weight_decay=c.weight_decay,
            weight_decay_mask=decayed,
            adam_b1=c.b1,
            adam_b2=c.b2,
            adam_weight_decay=0.0,
            eps=c.eps,
            muon_weight_dimension_numbers=_muon_dims,
        ),
    }
    clip = [] if c.clip_norm is None else [optax.clip_by_global_norm(c.clip_norm)]
    return in_dtype(optax.chain(*clip, makers[c.name]()), moment_dtype)


def in_dtype(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """`inner` with its gradients and its state in `dtype`, whatever the parameters' dtype."""

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map(lambda x: x.astype(dtype), params))

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        grads = jax.tree.map(lambda x: x.astype(dtype), grads)
        params = None if params is None else jax.tree.map(lambda x: x.astype(dtype), params)
        return inner.update(grads, state, params)

    return optax.GradientTransformation(init, update)


def decayed(params: Any) -> Any:
    """True for the kernels of the blocks: embeddings, head, norms and biases are not decayed."""

    def is_kernel(path: Any, _: Any) -> bool:
        names = [getattr(key, "key", "") for key in path]
        return names[0] == "layers" and names[-1] == "kernel"

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def state_shardings(
    optimizer: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh
) -> Any:
    """Shardings of the optimizer's state: a moment lies where its parameter does, all else is
    replicated.

    Args:
        params: the parameters or their `jax.ShapeDtypeStruct`s.
        shardings: the parameters' shardings.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    placed = dict(zip([path for path, _ in leaves], jax.tree.leaves(shardings), strict=True))
    shapes = {path: leaf.shape for path, leaf in leaves}

    def place(path: Any, leaf: Any) -> NamedSharding:
        """A moment's path ends with the path of its parameter."""
        own = next((path[i:] for i in range(len(path)) if path[i:] in shapes), None)
        return placed[own] if own and leaf.shape == shapes[own] else everywhere

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))


def _muon_dims(params: Any) -> Any:
    """Muon for the kernels of the blocks [L, in, out]; Adam, its fallback, for the rest."""
    dims = MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda kernel: dims if kernel else None, decayed(params))
