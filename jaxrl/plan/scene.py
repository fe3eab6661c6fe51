"""From config and placement to the numbers that the memory planner takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.config import Config, DistillConfig, OptimizerConfig, ParallelConfig, RoleConfig
from jaxrl.errors import UserError
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import abstract_params
from jaxrl.optimizer import make_optimizer, state_shardings
from jaxrl.sampling.engine import PREFILL_TOKENS
from jaxrl.schedule import SCHEDULES
from jaxrl.sharding.memory import ACCOUNTS, ITEMSIZE, Account, MemoryInputs, peak
from jaxrl.sharding.placement import AXIS_NAMES, Axes, Placement, resolve_axes
from jaxrl.sharding.rules import param_shardings


@dataclass(frozen=True)
class PoolMemory:
    """The fullest device of a pool."""

    bytes: int
    moment: str
    """What goes on at the peak, as in `actor: update`."""
    limit: int | None
    """Bytes that the device has; None where nobody knows."""

    @property
    def fits(self) -> bool:
        return self.limit is None or self.bytes <= self.limit


@dataclass(frozen=True)
class Scene:
    """What stays the same while keys of the config are tried."""

    placement: Placement
    roles: tuple[str, ...]
    """Those of the run; others may be placed, but hold nothing."""
    student: DecoderConfig
    teacher: DecoderConfig | None
    limits: tuple[int | None, ...]
    """Bytes of the smallest device of each pool."""
    fused_attention: bool

    def model(self, role: str) -> DecoderConfig:
        return self.teacher if role == "teacher" and self.teacher is not None else self.student

    def axes(self, config: Config) -> dict[str, Axes]:
        """Mesh axes of each role of the run.

        Raises:
            UserError: axes that do not divide the role's devices or the model's heads.
        """
        found = {}
        for role in self.roles:
            p = parallel(config, role)
            n = len(self.placement.roles[role].devices)
            found[role] = resolve_axes(role, n, p.data, p.fsdp, p.tensor)
            _check_heads(role, self.model(role), found[role])
        return found

    def accounts(self, config: Config) -> dict[str, Account]:
        """Memory of each role of the run."""
        inputs = memory_inputs(config, self, self.axes(config))
        return {role: ACCOUNTS[role](inputs) for role in self.roles if role in ACCOUNTS}

    def pools(self, accounts: Mapping[str, Account]) -> tuple[PoolMemory, ...]:
        """The fullest device of each pool; roles on the same device add up."""
        where, found = self.placement.roles, []
        for pool, limit in zip(self.placement.pools, self.limits, strict=True):
            loads = [
                peak(
                    accounts[r] for r in pool.roles if r in accounts and device in where[r].devices
                )
                for device in pool.devices
            ]
            found.append(PoolMemory(*max(loads), limit))
        return tuple(found)

    def together(self, a: str, b: str) -> bool:
        """Whether two roles share a worker."""
        return self.placement.roles[a].pool == self.placement.roles[b].pool

    def same_mesh(self, a: str, b: str, axes: Mapping[str, Axes]) -> bool:
        where = self.placement.roles
        return where[a].devices == where[b].devices and axes[a] == axes[b]


def sections(config: Config) -> dict[str, RoleConfig]:
    """Role -> its section of the config; other roles have only defaults."""
    return {"actor": config.actor, "rollout": config.rollout, "teacher": config.teacher}


def parallel(config: Config, role: str) -> ParallelConfig:
    section = sections(config).get(role)
    return ParallelConfig() if section is None else section.parallel


def memory_inputs(config: Config, scene: Scene, axes: Mapping[str, Axes]) -> MemoryInputs:
    """What the planner needs of the config."""
    a, d, teacher = config.actor, config.distill, scene.teacher
    rows = config.batch_size * config.group_size
    one_mesh = scene.same_mesh("actor", "rollout", axes)
    evaluated = config.eval.max_new_tokens if config.data.eval is not None else None
    samples = d.seq_kd or (config.eval.teacher and config.data.eval is not None)
    return MemoryInputs(
        student=scene.student,
        teacher=teacher,
        axes=axes,
        sequences=rows,
        prompt_tokens=config.max_prompt_tokens,
        new_tokens=config.max_new_tokens,
        sample_tokens=max(config.max_new_tokens, evaluated or 0),
        slots=config.rollout.slots or rows,
        prefill_tokens=PREFILL_TOKENS,
        remat=a.remat,
        minibatches=a.minibatches,
        micro_batch_tokens=a.micro_batch_tokens,
        chunk_tokens=d.chunk_tokens,
        lean=d.lean,
        actor_dtype=a.dtype,
        param_dtype=a.param_dtype,
        rollout_dtype=config.rollout.dtype,
        teacher_dtype=config.teacher.dtype,
        optimizer_bytes=optimizer_bytes(
            scene.student, axes["actor"], config.optimizer, a.param_dtype, a.moment_dtype
        ),
        signal_bytes=0 if teacher is None else _signal_bytes(d, config.teacher.dtype, teacher),
        student_topk=teacher is not None and d.signal == "student_topk",
        teacher_microbatches=config.teacher.num_microbatches,
        teacher_samples=teacher is not None and samples,
        signals_in_flight=_signals_in_flight(config, scene, axes),
        head_on_actor=teacher is not None and d.signal == "hidden",
        shared_weights=one_mesh and config.rollout.dtype == a.param_dtype,
        copies_at_sync=0 if one_mesh else 2 if scene.together("actor", "rollout") else 1,
        fused_attention=scene.fused_attention,
    )


def _signal_bytes(d: DistillConfig, dtype: str, teacher: DecoderConfig) -> int:
    """Bytes that the teacher sends for each completion token."""
    if d.signal == "hidden":
        return teacher.d_model * ITEMSIZE[dtype]  # type: ignore[index]
    sent = 4 if d.signal == "sampled" else 8 * d.top_k + 4
    return sent + (8 * d.entropy_top_k + 8 if d.entropy_aware else 0)


def _signals_in_flight(config: Config, scene: Scene, axes: Mapping[str, Axes]) -> int:
    """Signals that wait on the teacher's devices while something else runs there."""
    if scene.teacher is None or "teacher" not in axes:
        return 0
    moved = not scene.same_mesh("actor", "teacher", axes)
    waits = SCHEDULES[config.schedule] > 0 or scene.together("actor", "teacher")
    return int(moved and waits)


@lru_cache(maxsize=64)
def optimizer_bytes(
    model: DecoderConfig,
    axes: Axes,
    optimizer: OptimizerConfig,
    param_dtype: str,
    moment_dtype: str,
) -> int:
    """Bytes of the optimizer's state on one device of the actor; exact."""
    mesh = AbstractMesh(tuple(axes), AXIS_NAMES)
    params = abstract_params(model, jnp.dtype(param_dtype))
    maker = make_optimizer(optimizer, 1, jnp.dtype(moment_dtype))
    shardings = state_shardings(maker, params, param_shardings(model, mesh), mesh)  # type: ignore[arg-type]
    leaves = jax.tree.leaves(jax.eval_shape(maker.init, params))
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    )


def _check_heads(role: str, model: DecoderConfig, axes: Axes) -> None:
    if model.n_heads % axes.tensor == 0:
        return
    allowed = [t for t in range(1, axes.size + 1) if model.n_heads % t == 0 and axes.size % t == 0]
    raise UserError(
        f"{role}.parallel.tensor={axes.tensor} does not divide its model's n_heads={model.n_heads}:"
        f" on {axes.size} devices, use {' or '.join(map(str, allowed))}"
    )
