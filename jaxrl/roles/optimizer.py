"""The optax optimizer of a run, and where its state lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from jaxrl.config.settings import OptimizerConfig
from jaxrl.errors import counted
from jaxrl.models.lora import NAMES
from jaxrl.sharding.reshard import mix_bits
from jaxrl.types import Array, Tree

Schedule = Callable[[int | jax.Array], float | jax.Array]
ROUNDING_SEED = 0x0DD
"""Added to the seed of a run for the rounding of bfloat16 weights."""
MUON_DECAY = 0.95
"""Decay of muon's momentum."""
AVERAGE_ERROR = 0.05
"""Largest relative error at rest of an average of gradients that is not kept in float32."""


def learning_rate(config: OptimizerConfig, updates: int) -> Schedule:
    """Returns the learning rate as a function of the number of updates planned before; it reaches
    its end at `updates`.

    Rises linearly from peak / (warmup_steps + 1), so that no update is wasted at rate 0. The
    warm-up is never shortened: the rate of an update does not depend on the length of the run,
    which a resume may change.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
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


def warmup_note(config: OptimizerConfig, updates: int) -> str | None:
    """Returns a note where a run of `updates` updates ends before its learning rate reaches the
    peak, else None."""
    if updates > config.warmup_steps or config.learning_rate == 0:
        return None
    last = config.learning_rate * updates / (config.warmup_steps + 1)
    return (
        f"optimizer.warmup_steps={config.warmup_steps}: the run ends within its warm-up, after"
        f" {counted(updates, 'update')}; the learning rate reaches {last:.3g} of"
        f" {config.learning_rate:g}"
    )


def schedule_at(state: Tree, number: jax.Array) -> Tree:
    """Returns the optimizer's state with its schedule at update `number`, a scalar int32."""
    schedule = optax.ScaleByScheduleState
    states, form = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, schedule))
    moved = [x._replace(count=number) if isinstance(x, schedule) else x for x in states]
    return jax.tree.unflatten(form, moved)


def make_optimizer(
    config: OptimizerConfig, updates: int, moment_dtype: DTypeLike
) -> optax.GradientTransformation:
    """Makes the optimizer: clipping by the global norm, then the named optimizer under its
    schedule.

    Gradients enter in `moment_dtype`, and their average is kept in `average_dtype`, whatever the
    parameters' dtype. All else is kept and computed in float32: an average of squared gradients
    falls by less than bfloat16 resolves, and in bfloat16 would never fall.
    """
    c, rate = config, learning_rate(config, updates)
    average = average_dtype(config, moment_dtype)
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.adamw(
            rate, c.b1, c.b2, c.eps, 0.0, average, c.weight_decay, decay_mask
        ),
        "adam": lambda: optax.adam(rate, c.b1, c.b2, c.eps, 0.0, average),
        "sgd": lambda: optax.sgd(rate, c.b1 or None, accumulator_dtype=average),
        "lion": lambda: optax.lion(rate, c.b1, c.b2, average, c.weight_decay, decay_mask),
        # The chain of optax's adafactor, but each matrix by itself, and the decay scaled by the
        # learning rate.
        "adafactor": lambda: optax.chain(
            optax.chain(
                scale_by_factored_matrix(),
                optax.stateless(_clip_by_matrix),
                *(
                    [optax.add_decayed_weights(c.weight_decay, decay_mask)]
                    if c.weight_decay
                    else []
                ),
                optax.scale(-1),
            ),
            optax.scale_by_learning_rate(rate, flip_sign=False),
        ),
        "muon": lambda: optax.partition(
            {
                "muon": optax.chain(
                    muon_by_layer(average, c.eps),
                    optax.stateless_with_tree_map(_scale_by_shape),
                    optax.add_decayed_weights(c.weight_decay),
                    optax.scale_by_learning_rate(rate),
                ),
                "adam": optax.adamw(
                    rate, c.b1, c.b2, c.eps, mu_dtype=average, weight_decay=0.0, nesterov=True
                ),
            },
            lambda params: jax.tree.map(lambda k: "muon" if k else "adam", decay_mask(params)),
        ),
    }
    clip = [] if c.clip_norm is None else [optax.clip_by_global_norm(c.clip_norm)]
    return keep_in_float32(optax.chain(*clip, makers[c.name]()), moment_dtype)


def stacked_dims(params: Tree) -> list[int]:
    """Returns how many leading dims of each leaf count layers and experts, as [leaves]: what comes
    after them is one matrix or vector of a model whose layers are apart."""
    layers = params.get("layers") if isinstance(params, dict) else None
    paths = [
        [getattr(key, "key", "") for key in path]
        for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    by_layer = 0 if isinstance(layers, list) else 1
    return [by_layer + ("experts" in path) if path[:1] == ["layers"] else 0 for path in paths]


def scale_by_factored_matrix() -> optax.GradientTransformation:
    """Returns optax's `scale_by_factored_rms`, each matrix by itself. Its state is as optax has it
    of arrays whose two largest dims are those of their matrices."""
    inner = optax.scale_by_factored_rms()

    def axes_of(leaf: Array, dims: int) -> optax.FactoredState:
        """Returns the axis that counts matrices in each part of a leaf's state, None where that
        part is a placeholder."""
        matrix = jax.ShapeDtypeStruct(leaf.shape[dims:], leaf.dtype)
        factored = jax.eval_shape(inner.init, matrix).v.shape != matrix.shape
        row = 0 if factored else None
        return optax.FactoredState(None, row, row, None if factored else 0)

    def assemble(count: Array, tree: Any, states: list[optax.FactoredState]) -> Tree:
        parts = zip(*((s.v_row, s.v_col, s.v) for s in states), strict=True)
        return optax.FactoredState(count, *(jax.tree.unflatten(tree, part) for part in parts))

    def init(params: Tree) -> Tree:
        leaves, tree = jax.tree.flatten(params)
        states = []
        for leaf, dims in zip(leaves, stacked_dims(params), strict=True):
            first = inner.init
            for _ in range(dims):
                first = jax.vmap(first, out_axes=axes_of(leaf, dims))
            states.append(first(leaf))
        return assemble(jnp.zeros([], jnp.int32), tree, states)

    def update(grads: Tree, state: optax.FactoredState, params: Tree = None) -> tuple[Tree, Tree]:
        leaves, tree = jax.tree.flatten(grads)
        parts = map(jax.tree.leaves, (params, state.v_row, state.v_col, state.v))
        moved = []
        for grad, dims, param, *moments in zip(leaves, stacked_dims(grads), *parts, strict=True):
            step, axes = inner.update, axes_of(param, dims)
            for _ in range(dims):
                step = jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes))
            moved.append(step(grad, optax.FactoredState(state.count, *moments), param))
        changes, states = map(list, zip(*moved, strict=True))
        count = optax.safe_increment(state.count)
        return jax.tree.unflatten(tree, changes), assemble(count, tree, states)

    return optax.GradientTransformation(init, update)


def _clip_by_matrix(changes: Tree, _: Tree) -> Tree:
    """Returns the changes, each matrix clipped by optax's `clip_by_block_rms` to an RMS of 1."""
    leaves, tree = jax.tree.flatten(changes)

    def clip(change: Array) -> Array:
        return optax.clip_by_block_rms(1.0).update(change, optax.EmptyState())[0]

    clipped = []
    for leaf, dims in zip(leaves, stacked_dims(changes), strict=True):
        clip_all = clip
        for _ in range(dims):
            clip_all = jax.vmap(clip_all)
        clipped.append(clip_all(leaf))
    return jax.tree.unflatten(tree, clipped)


def muon_by_layer(average: DTypeLike, eps: float) -> optax.GradientTransformation:
    """Returns optax's `scale_by_muon` for kernels of the blocks [L, in, out] and of experts
    [L, E, in, out], each matrix by itself.

    A loop goes over the layers and writes over gradients and momentum: what orthogonalising needs
    beside them is of one layer.
    """
    inner = scale_by_muon(
        beta=MUON_DECAY,
        eps=eps,
        mu_dtype=average,
        weight_dimension_numbers=MuonDimensionNumbers(-2, -1),
    )

    def update(grads: Tree, state: MuonState, params: Tree = None) -> tuple[Tree, MuonState]:
        def kernel(grad: Array, momentum: Array) -> tuple[Array, Array]:
            if grad.ndim == 2:  # of a layer apart
                own = grad.astype(jnp.float32), state._replace(mu=momentum)
                change, moved = inner.update(*own)
                return change, moved.mu

            def layer(i: Array, arrays: tuple[Array, Array]) -> tuple[Array, Array]:
                grad, momentum = arrays
                change, moved = inner.update(grad[i], state._replace(mu=momentum[i]))
                return grad.at[i].set(change), momentum.at[i].set(moved.mu)

            start = grad.astype(jnp.float32), momentum
            return jax.lax.fori_loop(0, len(grad), layer, start)

        leaves, tree = jax.tree.flatten(grads)
        moved = [kernel(*pair) for pair in zip(leaves, jax.tree.leaves(state.mu), strict=True)]
        changes, momenta = (jax.tree.unflatten(tree, part) for part in zip(*moved, strict=True))
        return changes, state._replace(count=optax.safe_increment(state.count), mu=momenta)

    return optax.GradientTransformation(inner.init, update)


def _scale_by_shape(change: Array, _: object) -> Array:
    """Returns Muon's change of kernels [..., in, out] times sqrt(max(1, out / in))."""
    fan_in, fan_out = change.shape[-2:]
    return change * max(1, fan_out / fan_in) ** 0.5


def average_dtype(config: OptimizerConfig, moment_dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which the average of gradients (first moment, momentum) is kept:
    `moment_dtype`, or float32 if it would not come within 5% of a gradient that stays the same.

    An average stops where its next step, (1 - decay) of the rest, is less than half a unit in its
    last place. So bfloat16 allows a decay of up to 0.92: adamw's usual one, but not muon's.
    """
    decays = {"lion": config.b2, "muon": max(MUON_DECAY, config.b1)}
    decay, half = decays.get(config.name, config.b1), float(jnp.finfo(moment_dtype).eps) / 2
    return jnp.dtype(moment_dtype if half <= (1 - decay) * AVERAGE_ERROR else jnp.float32)


def keep_in_float32(
    inner: optax.GradientTransformation, dtype: DTypeLike
) -> optax.GradientTransformation:
    """Returns `inner` with gradients in `dtype`, and with all that it keeps computed in float32: in
    bfloat16 the decays themselves are rounded, 0.999 to 1."""

    def full(tree: Tree) -> Tree:
        floating = jnp.floating
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, floating) else x, tree
        )

    def init(params: Tree) -> Tree:
        return inner.init(full(params))

    def update(grads: Tree, state: Tree, params: Tree = None) -> Tree:
        grads = jax.tree.map(lambda x: x.astype(dtype), grads)
        return inner.update(grads, full(state), None if params is None else full(params))

    return optax.GradientTransformation(init, update)


def apply_changes(params: Tree, changes: Tree, seed: int, updates: jax.Array) -> Tree:
    """Computes params + changes; what is held in bfloat16 is rounded up or down at random.

    Rounded to the nearest, most of Adam's moves are lost: at a learning rate of 1e-5 they are
    smaller than half of bfloat16's step at all but the smallest weights. The random numbers depend
    on the seed, the updates done, the leaf and the place in it, never on the mesh.
    """
    key = jax.random.key((seed + ROUNDING_SEED) % 2**32, impl="threefry2x32")
    key = jax.random.fold_in(key, updates)
    leaves, tree = jax.tree.flatten(params)
    moved = []
    for i, (x, change) in enumerate(zip(leaves, jax.tree.leaves(changes), strict=True)):
        if x.dtype == jnp.bfloat16:
            exact = x.astype(jnp.float32) + change.astype(jnp.float32)
            moved.append(round_at_random(exact, jax.random.fold_in(key, i)))
        else:
            moved.append(optax.apply_updates(x, change))
    return jax.tree.unflatten(tree, moved)


def round_at_random(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two nearest bfloat16 numbers, each with a probability
    proportional to the distance of the other: the mean is x. What is not finite stays so."""
    # Key and place of each number are hashed to uint32, which is fused into the update: with
    # `jax.random.bits` a CPU takes 16 bytes a number, and seven to nine times as long to round.
    first, last = jax.random.key_data(key)
    random = jnp.broadcast_to(first, x.shape)
    for axis in range(x.ndim):
        random = mix_bits(random ^ jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis))
    random = mix_bits(random ^ last)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + (random >> 16)
    upper = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), upper, x).astype(jnp.bfloat16)


def decay_mask(params: Tree) -> Tree:
    """Returns True for the kernels of the blocks, and for adapters: embeddings, head, norms, biases
    and sinks are not decayed."""
    leaves, form = jax.tree_util.tree_flatten_with_path(params)
    paths = [[getattr(key, "key", "") for key in path] for path, _ in leaves]
    kernels = [path[0] == "layers" and path[-1] in ("kernel", *NAMES) for path in paths]
    return jax.tree.unflatten(form, kernels)


def state_shardings(
    optimizer: optax.GradientTransformation, params: Tree, shardings: Tree, mesh: Mesh
) -> Tree:
    """Returns the shardings of the optimizer's state: a moment lies where its parameter does,
    everything else is replicated.

    Args:
        params: the parameters or their `jax.ShapeDtypeStruct`s.
        shardings: the parameters' shardings.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    leaves = jax.tree_util.tree_leaves_with_path(params)
    placed = dict(zip([path for path, _ in leaves], jax.tree.leaves(shardings), strict=True))
    shapes = {path: leaf.shape for path, leaf in leaves}

    def place(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Returns the sharding of a leaf: a moment's path ends with the path of its parameter."""
        parameter = next((path[i:] for i in range(len(path)) if path[i:] in shapes), None)
        return placed[parameter] if parameter and leaf.shape == shapes[parameter] else everywhere

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, params))
