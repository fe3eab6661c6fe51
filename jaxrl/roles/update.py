"""The jitted programs of the actor: an optimizer update, the log-probs under the policy at the
start of the batch, and the conversion of the weights for the rollout or for a teacher that follows
the policy.

They hold no arrays, so that `aot` can compile them for a machine that is not present.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxrl.algorithms.methods import InspectTokens, tokens_to_balance
from jaxrl.algorithms.signals import completion_logprobs
from jaxrl.config.schema import Config
from jaxrl.config.settings import OptimizerConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import target_of
from jaxrl.models.lora import frozen_and_trained, join_adapters
from jaxrl.models.parameters import (
    Layout,
    Params,
    abstract_params,
    cast,
    head,
    head_sharding,
    param_shardings,
    unstack,
)
from jaxrl.roles.declared import placed
from jaxrl.roles.microbatch import micro_batch, micro_batch_shape, rows_of_groups, split_rows
from jaxrl.roles.optimizer import apply_changes, make_optimizer, schedule_at, state_shardings
from jaxrl.sharding.axes import ROWS, TOKENS, row_shards
from jaxrl.types import Array, Frozen, Loss, Sequences, Totals, TrainBatch, Tree

BASE = "base"
"""Key of the frozen base weights (with adapters) among the frozen arrays of an update."""
PLANNED = "planned"
"""Key, among the same, of the number of updates planned before this one (scalar int32), which the
learning rate follows; without it, of those applied."""
Capacity = tuple[int, int] | None
"""`Sequences.capacity`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an update changes. Each update takes the old state as a donated argument."""

    params: Params
    """Stacked layout, in `actor.param_dtype`; with `student.lora` the adapters alone."""
    opt_state: Tree
    updates: jax.Array
    """Scalar int32: number of optimizer updates applied."""
    ema: Tree = None
    """The moving average of the parameters (`teacher.ema`) of self-distillation (OPSD, arXiv
    2601.18734; SDFT, arXiv 2601.19897): stacked, float32. None: none is kept."""


class ActorPrograms:
    """The programs that the actor runs on one mesh. The caller owns all arrays."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        mesh: Mesh,
        loss: Loss,
        inspect_tokens: InspectTokens,
    ):
        self.config, self.model, self.mesh, self._loss = config, model, mesh, loss
        c = config.actor
        self.budget = None
        if c.micro_batch_tokens is not None:
            self.budget = c.micro_batch_tokens * mesh.shape[TOKENS]
        """The largest number of tokens of a micro-batch in one row shard: those of a device, times
        the devices along `context`, which share its tokens. None: no limit."""
        self.row_sharding = NamedSharding(mesh, PartitionSpec(ROWS))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        updates = config.steps * config.updates_per_batch
        self.optimizer = make_optimizer(config.optimizer, updates, jnp.dtype(c.moment_dtype))
        _, self.abstract = frozen_and_trained(abstract_params(model, jnp.dtype(c.param_dtype)))
        """The parameters that are trained, as `jax.ShapeDtypeStruct`s."""
        self.base_shardings, params = frozen_and_trained(param_shardings(model, mesh))
        _, unstacked = frozen_and_trained(param_shardings(model, mesh, "unstacked"))
        targets: dict[Layout, Params] = {"stacked": params, "unstacked": unstacked}
        moments = state_shardings(self.optimizer, self.abstract, params, mesh)
        ema = params if config.keeps_ema else None
        self.shardings = TrainState(params, moments, self.replicated, ema)  # type: ignore[arg-type]
        """A sharding for each leaf of the state."""
        self.update = jax.jit(
            self._make_update(),
            donate_argnums=0,
            static_argnums=(4, 5),
            out_shardings=(self.shardings, self.replicated),
        )
        """(state, frozen arrays, batch, rows, group, capacity) -> (new state, (sums, maxima,
        per_row, last)).

        rows [n, b] are the row numbers of n micro-batches, -1 for padding; `group` consecutive rows
        share a prompt; `capacity` is that of each micro-batch. With adapters, the frozen base
        weights are the entry `BASE` of the frozen arrays.

        sums: metric -> (sum, count), scalars; `loss` is among them, in nats.
        maxima: metric -> scalar.
        per_row: metric -> (sum, count), each [n, b].
        last: `grad_norm`, `finite` (False: the update was skipped) and `trains` (False: there was
        no token to train on, so it was skipped too)."""

        def old(
            params: Params,
            batch: TrainBatch,
            rows: jax.Array,
            group: int,
            capacity: Capacity = None,
        ) -> jax.Array:
            weights = cast(params, jnp.dtype(c.dtype))
            out = jnp.zeros(batch.sequences.loss_mask.shape, jnp.float32)
            temperature, chunk = config.sampling.temperature, config.distill.loss_chunk

            def body(out: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
                micro = micro_batch(batch, index, mesh, group, capacity).sequences
                logprobs = completion_logprobs(
                    model, weights, micro, mesh, temperature=temperature, chunk=chunk
                )
                index = jnp.where(index < 0, len(out), index)  # dropped below
                return out.at[index].set(logprobs, mode="drop"), None

            return jax.lax.scan(body, out, rows)[0]

        self.old = jax.jit(old, static_argnums=(3, 4), out_shardings=self.row_sharding)
        """(parameters, batch, rows, group, capacity) -> [B, C] float32 log-probs of the
        completion tokens."""

        def inspect(
            params: Params,
            frozen: Frozen,
            batch: TrainBatch,
            rows: jax.Array,
            group: int,
            capacity: Capacity,
        ) -> dict[str, jax.Array]:
            policy = join_adapters(frozen.get(BASE, {}), params)
            mask = batch.sequences.loss_mask

            def body(_: None, index: jax.Array) -> tuple[None, dict[str, jax.Array]]:
                micro = micro_batch(batch, index, mesh, group, capacity)
                return None, inspect_tokens(policy, frozen, micro)

            _, found = jax.lax.scan(body, None, rows)
            at = jnp.where(rows < 0, len(mask), rows)
            zeros = jnp.zeros(mask.shape, jnp.float32)
            return {name: zeros.at[at].set(x, mode="drop") for name, x in found.items()}

        self.inspect = jax.jit(inspect, static_argnums=(4, 5), out_shardings=self.replicated)
        """(parameters, frozen arrays, batch, rows, group, capacity) -> the arrays of `TokenValues`
        by name, [B, C] float32. Arguments as of `update`; no run calls it, only who works a batch
        by hand."""

        def convert(params: Params, dtype: DTypeLike, layout: Layout) -> Params:
            params = cast(params, dtype)
            params = params if layout == "stacked" else unstack(params)
            return {
                name: jax.lax.with_sharding_constraint(tree, targets[layout][name])
                for name, tree in params.items()
            }

        self.convert = jax.jit(convert, static_argnums=(1, 2))
        """(some top-level entries of the parameters, dtype, layout) -> the same entries in that
        dtype and layout, on the actor's mesh."""

        def copy_head(params: Params) -> jax.Array:
            kernel = jnp.copy(head(params).astype(config.teacher.compute_dtype))
            at = head_sharding(kernel.shape, mesh)
            return jax.lax.with_sharding_constraint(kernel, at)

        self.copy_head = jax.jit(copy_head)
        """Parameters -> the LM head [V, D] of a teacher that has them, in the teacher's dtype: a
        copy, since updates donate the parameters."""

        def initial_ema(params: Params) -> Params:
            return jax.tree.map(jnp.copy, cast(params, jnp.float32))

        self.initial_ema = jax.jit(initial_ema, out_shardings=params)
        """Parameters -> the moving average before the first update: a float32 copy of them."""

        def optimizer_state(params: Params) -> Tree:
            return self.optimizer.init(params)

        self.start = jax.jit(optimizer_state, out_shardings=moments)
        """Parameters -> the optimizer's state before the first update."""

    def abstract_base(self) -> Params:
        """Returns the frozen base weights of adapters, or {} without adapters:
        `jax.ShapeDtypeStruct`s, placed."""
        base, _ = frozen_and_trained(abstract_params(self.model, jnp.dtype(self.config.base_dtype)))
        return placed(base, self.base_shardings)

    def abstract_state(self) -> TrainState:
        """Returns the state as `jax.ShapeDtypeStruct`s with shardings."""
        opt_state = jax.eval_shape(self.optimizer.init, self.abstract)
        updates = jax.ShapeDtypeStruct((), jnp.int32)
        ema = abstract_params(self.model, jnp.float32) if self.config.keeps_ema else None
        state = TrainState(self.abstract, opt_state, updates, ema)  # type: ignore[arg-type]
        return placed(state, self.shardings)

    def differing(self, params: Params, dtype: jnp.dtype, layout: Layout) -> Params:
        """Returns the top-level entries of stacked parameters whose dtype or layout differs in the
        role that gets them."""
        if dtype != jax.tree.leaves(params)[0].dtype:
            return params
        return {"layers": params["layers"]} if layout == "unstacked" else {}

    def micro_batches(
        self, chosen: np.ndarray, lengths: np.ndarray, sequences: Sequences, group: int, padded: int
    ) -> np.ndarray:
        """Cuts a minibatch into micro-batches: [n, b] row numbers, -1 for padding.

        b is a multiple of the number of devices that split the rows, and of `group`. The shape of
        the result depends on `padded` but not on `chosen`, so that few programs are compiled.

        Args:
            chosen: numbers of the rows (with group > 1: of the groups) of the minibatch.
            lengths: tokens of each row or group of the batch.
            sequences: of the batch; only their shapes count.
            group: consecutive rows that share a prompt.
            padded: number of rows or groups to make room for, at least len(chosen).
        """
        size, shards = self._most_rows(sequences, group, padded), row_shards(self.mesh.shape)
        return rows_of_groups(split_rows(chosen, lengths, size, shards, padded), group)

    def micro_batch_shape(self, sequences: Sequences, group: int, padded: int) -> tuple[int, int]:
        """Returns the shape of the `micro_batches` of a minibatch."""
        size, shards = self._most_rows(sequences, group, padded), row_shards(self.mesh.shape)
        n, per_shard = micro_batch_shape(size, shards, padded)
        return n, shards * per_shard * group

    def _most_rows(self, sequences: Sequences, group: int, padded: int) -> int:
        completion = sequences.loss_mask.shape[1]
        width = sequences.tokens.shape[1] + (group - 1) * completion
        if self.budget is None:
            return padded
        return max(1, self.budget // width) * row_shards(self.mesh.shape)

    def _make_update(self) -> Callable[..., Tree]:
        def micro_loss(
            params: Params, frozen: Frozen, batch: TrainBatch, totals: Totals
        ) -> tuple[Array, Tree]:
            policy = join_adapters(frozen.get(BASE, {}), params)
            pair, metrics, maxima = self._loss(policy, frozen, batch, totals)
            per_row = {name: pair for name, pair in metrics.items() if pair[0].ndim > 0}
            return pair[0], ({"loss": pair, **jax.tree.map(jnp.sum, metrics)}, maxima, per_row)

        value_and_grad = jax.value_and_grad(micro_loss, has_aux=True)

        on_cpu = target_of(self.mesh.devices.flat).platform == "cpu"
        decay = self.config.teacher.ema

        def apply(state: TrainState, grads: Tree, planned: Array) -> TrainState:
            opt_state = schedule_at(state.opt_state, planned)
            changes, opt_state = self.optimizer.update(grads, opt_state, state.params)
            opt_state = schedule_at(opt_state, state.updates + 1)
            params = apply_changes(state.params, changes, self.config.seed, state.updates)
            ema = state.ema and jax.tree.map(
                lambda old, new: decay * old + (1 - decay) * new.astype(jnp.float32),
                state.ema,
                params,
            )
            return TrainState(params, opt_state, state.updates + 1, ema)

        def update(
            state: TrainState,
            frozen: Frozen,
            batch: TrainBatch,
            rows: jax.Array,
            group: int = 1,
            capacity: Capacity = None,
        ) -> Tree:
            # What all micro-batches of this update train on.
            params, sequences, size = state.params, batch.sequences, len(batch.sequences.loss_mask)
            chosen = jnp.zeros(size, bool)
            chosen = chosen.at[jnp.where(rows < 0, size, rows)].set(True, mode="drop")
            trained = replace(sequences, loss_mask=sequences.loss_mask & chosen[:, None])
            mask, policy = trained.loss_mask, replace(batch, sequences=trained).policy_mask
            counts = mask.sum(), policy.sum(), policy.any(-1).sum()
            totals = Totals(*(jnp.maximum(count.astype(jnp.float32), 1) for count in counts))
            if self.config.student.router_aux_loss_coef > 0 and len(rows) > 1:
                assert self.model.experts is not None
                policy_params = join_adapters(frozen.get(BASE, {}), params)

                def count_experts(added: Array, index: jax.Array) -> tuple[Array, None]:
                    micro = micro_batch(batch, index, self.mesh, group, capacity)
                    arguments = self.config, self.model, self.mesh, policy_params, micro
                    return added + tokens_to_balance(*arguments), None

                # A forward pass first: the loss of each micro-batch needs the tokens of all.
                start = jnp.zeros(self.model.experts.count + 1)
                of_experts, _ = jax.lax.scan(count_experts, start, rows)
                totals = replace(totals, of_experts=of_experts)

            # The gradient of the loss summed over all micro-batches, the sums and maxima for
            # metrics, and the metrics of each row, [n, b].
            def accumulate(added: Params | None, index: jax.Array) -> tuple[Params, Tree]:
                micro = micro_batch(batch, index, self.mesh, group, capacity)
                (_, metrics), grads = value_and_grad(params, frozen, micro, totals)
                if added is None:
                    return grads, metrics
                # Else XLA may scatter into the carried sum and take its reduction out of the loop:
                # libtpu then fails, or keeps sums of whole parameters on each device.
                grads = jax.lax.optimization_barrier(grads)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), added, grads), metrics

            # All micro-batches are in the loop: of a first one outside, and of a single one in a
            # loop, which XLA removes, it may keep the activations of both at once.
            if len(rows) == 1:
                grads, (sums, maxima, per_row) = accumulate(None, rows[0])
                per_row = jax.tree.map(lambda x: x[None], per_row)
            else:
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
                zeros = jax.lax.with_sharding_constraint(zeros, self.shardings.params)
                grads, (sums, maxima, per_row) = jax.lax.scan(accumulate, zeros, rows)
                sums = jax.tree.map(lambda x: x.sum(0), sums)
                maxima = jax.tree.map(lambda x: x.max(0), maxima)
            count = jnp.maximum(sums["loss"][1], 1)
            grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
            norm = optax.tree.norm(grads)
            finite = jnp.isfinite(norm) & jnp.isfinite(sums["loss"][0])
            # Without a token to train on, momentum and weight decay would still move the weights.
            trains = sums["loss"][1] > 0
            ok = finite & trains
            changed = state, grads, frozen.get(PLANNED, state.updates)
            if on_cpu:  # this needs less temporary memory there
                new = jax.lax.cond(ok, apply, lambda state, *_: state, *changed)
            else:  # `cond` would copy the whole state beside the donated one; a select is in place
                new = jax.tree.map(lambda new, old: jnp.where(ok, new, old), apply(*changed), state)
            last = {"grad_norm": norm, "finite": finite, "trains": trains}
            return new, (sums, maxima, per_row, last)

        return update


def first_rows_program(rows: int, width: int, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns the jitted program that maps an LM head [V, width] to its first rows, those of tokens
    that two models share."""

    def first_rows(head: jax.Array) -> jax.Array:
        return head[:rows]

    return jax.jit(first_rows, out_shardings=head_sharding((rows, width), mesh))


@lru_cache(maxsize=64)
def abstract_moments(
    model: DecoderConfig,
    mesh: Mesh,
    optimizer: OptimizerConfig,
    param_dtype: str,
    moment_dtype: str,
) -> Tree:
    """Returns the optimizer's state for the trained parameters of a model, as
    `jax.ShapeDtypeStruct`s with shardings."""
    _, params = frozen_and_trained(abstract_params(model, jnp.dtype(param_dtype)))
    _, shardings = frozen_and_trained(param_shardings(model, mesh))
    maker = make_optimizer(optimizer, 1, jnp.dtype(moment_dtype))
    where = state_shardings(maker, params, shardings, mesh)
    return placed(jax.eval_shape(maker.init, params), where)
