"""From config and placement to the numbers that the memory planner takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.schema import Config, DistillConfig, OptimizerConfig, ParallelConfig
from jaxrl.errors import UserError
from jaxrl.models.activations import whole_rows
from jaxrl.models.config import DecoderConfig
from jaxrl.models.decoder import abstract_params
from jaxrl.models.encoder_config import EncoderConfig
from jaxrl.models.kernels import Target, round_up
from jaxrl.models.rules import param_shardings
from jaxrl.plan.frozen_memory import grouper_account, reward_account
from jaxrl.plan.memory import (
    ACCOUNTS,
    ITEMSIZE,
    Account,
    DType,
    MemoryInputs,
    layer_bytes,
    peak,
    shards,
    upcast,
)
from jaxrl.plan.turns import take_turns
from jaxrl.roles.microbatch import shares
from jaxrl.roles.optimizer import make_optimizer, state_shardings
from jaxrl.sampling.engine import PREFILL_TOKENS, power_of_two
from jaxrl.sharding.placement import AXIS_NAMES, Axes, Placement, resolve_axes

JSD_ARRAYS, KL_ARRAYS, LEAN_ARRAYS, SCORE_ARRAYS = 7, 6, 5, 3
"""Float32 arrays [chunk, V] alive at once in a loss of both models' logits that keeps its gradients
(a divergence between the two ends, at one of them), in one that does not, and in one that reads a
few log-probs of one model's."""
TEMPLATE_TOKENS = 128
"""Room for the reward model's own template, and for a tokenizer that needs more tokens."""
ENTROPY_ARRAYS = 2
"""And with the entropy-aware term."""
GATHERED_BY_MUON = 7
"""Arrays of the largest kernel's size, whole in `fsdp`, that are alive while muon has its kernels
gathered; 6 to 8, as XLA schedules them."""


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
class HostMemory:
    """A host whose emulated devices share its memory."""

    name: str
    limit: int
    """Bytes that are free before the run."""
    beside: int
    """Bytes that the run takes there beside its arrays: processes and mapped files."""
    devices: tuple[int, ...]
    """How many devices of each pool it emulates."""

    def needed(self, sizes: Sequence[int]) -> int:
        """Bytes of the run, given those of one device of each pool."""
        return self.beside + sum(n * size for n, size in zip(self.devices, sizes, strict=True))

    def left(self, pool: int, sizes: Sequence[int]) -> int | None:
        """Bytes that the other pools leave to a device of this one; None where it has none here."""
        n, size = self.devices[pool], sizes[pool]
        return (self.limit - self.needed(sizes)) // n + size if n else None


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
    target: Target
    """The device that all of them are, or can do as much as."""
    reward: DecoderConfig | None = None
    grouper: EncoderConfig | None = None
    hosts: tuple[HostMemory, ...] = ()
    """Those of emulated devices; the `limits` are None then."""

    @property
    def on_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def widths(self, config: Config) -> tuple[int, int]:
        """Of the longest prompts and completions, as arrays have them."""
        multiple = self.target.width_multiple
        asked = config.max_prompt_tokens, config.max_new_tokens
        return round_up(asked[0], multiple), round_up(asked[1], multiple)

    def model(self, role: str) -> DecoderConfig | EncoderConfig:
        own = {"teacher": self.teacher, "reward": self.reward, "grouper": self.grouper}
        return own.get(role) or self.student

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
        found = self._accounts(config)
        if self.on_cpu and any(config.roles[role].dtype == "bfloat16" for role in found):
            found = self._upcast(config, found)
        return {
            role: account
            for pool in self.placement.pools
            for role, account in take_turns(found, pool.roles, config.offload).items()
        }

    def _upcast(self, config: Config, found: Mapping[str, Account]) -> dict[str, Account]:
        """The accounts where bfloat16 is computed in float32, from copies of the weights."""
        axes = self.axes(config)
        float32 = config.model_copy(
            update={
                role: section.model_copy(update={"dtype": "float32"})
                for role, section in config.roles.items()
            }
        )
        computed = self._accounts(float32)
        return {
            role: account
            if config.roles[role].dtype != "bfloat16"
            else upcast(account, computed[role], self._copies(role, axes[role]))
            for role, account in found.items()
        }

    def _copies(self, role: str, axes: Axes) -> dict[str, int]:
        """Phase -> bytes of a role's weights that XLA's CPU holds in float32 too."""
        model = self.model(role)
        if not isinstance(model, DecoderConfig) or role not in ("rollout", "teacher", "reference"):
            return {}
        layers = layer_bytes(model, axes, "float32")
        head = whole_rows(model.vocab_size, model.d_model, axes, ITEMSIZE["float32"])
        return {"prefill": layers, "decode": layers + head, "score": layers}

    def _accounts(self, config: Config) -> dict[str, Account]:
        """Memory of each role by itself, computed in the dtypes of the config."""
        axes = self.axes(config)
        inputs = memory_inputs(config, self, axes)
        found = {role: ACCOUNTS[role](inputs) for role in self.roles if role in ACCOUNTS}
        longest = config.max_prompt_tokens + config.max_new_tokens
        if self.reward is not None:
            r = config.reward
            found["reward"] = reward_account(
                self.reward,
                axes["reward"],
                r.compute_dtype,
                batch_tokens=r.batch_tokens,
                longest=r.max_tokens or longest + TEMPLATE_TOKENS,
                target=self.target,
            )
        if self.grouper is not None:
            g = config.grouper
            found["grouper"] = grouper_account(
                self.grouper,
                axes["grouper"],
                g.compute_dtype,
                batch_tokens=g.batch_tokens,
                longest=config.max_new_tokens,
                target=self.target,
            )
        return found

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
            found.append(PoolMemory(*max(loads, default=(0, "nothing")), limit))
        return self._shared(found) if self.hosts else tuple(found)

    def _shared(self, pools: Sequence[PoolMemory]) -> tuple[PoolMemory, ...]:
        """Each with what the others leave of its hosts: one fits where all do."""
        sizes = [pool.bytes for pool in pools]
        left = [[host.left(i, sizes) for host in self.hosts] for i in range(len(pools))]
        return tuple(
            replace(pool, limit=min((n for n in each if n is not None), default=None))
            for pool, each in zip(pools, left, strict=True)
        )

    def together(self, a: str, b: str) -> bool:
        """Whether two roles share a worker."""
        return self.placement.roles[a].pool == self.placement.roles[b].pool

    def same_mesh(self, a: str, b: str, axes: Mapping[str, Axes]) -> bool:
        where = self.placement.roles
        return where[a].devices == where[b].devices and axes[a] == axes[b]


def parallel(config: Config, role: str) -> ParallelConfig:
    section = config.roles.get(role)
    return ParallelConfig() if section is None else section.parallel


def memory_inputs(config: Config, scene: Scene, axes: Mapping[str, Axes]) -> MemoryInputs:
    """What the planner needs of the config."""
    a, d, teacher = config.actor, config.distill, scene.teacher
    rows = config.batch_size * config.group_size
    prompt, new = scene.widths(config)
    evaluated = config.eval.max_new_tokens if config.data.eval is not None else None
    samples = d.seq_kd or (config.eval.teacher and config.data.eval is not None)
    signal = None if teacher is None else d.signal
    return MemoryInputs(
        student=scene.student,
        teacher=teacher,
        axes=axes,
        sequences=rows,
        prompt_tokens=prompt,
        new_tokens=new,
        sample_tokens=max(config.max_new_tokens, evaluated or 0),
        slots=config.rollout.slots or rows,
        prefill_rows={role: _prefill_rows(config, prompt, sizes) for role, sizes in axes.items()},
        remat=a.remat,
        minibatches=config.minibatches,
        micro_batch_tokens=a.micro_batch_tokens,
        chunk_tokens=d.chunk_tokens,
        loss_arrays=_loss_arrays(d, signal, axes["actor"]),
        loss_fused=signal in ("hidden", "topk", "student_topk") and not d.lean,
        score_arrays={None: 0, "hidden": 0, "sampled": 2}.get(signal, SCORE_ARRAYS),
        actor_dtype=a.compute_dtype,
        param_dtype=a.param_dtype,
        rollout_dtype=config.rollout.compute_dtype,
        teacher_dtype=config.teacher.compute_dtype,
        optimizer_bytes=optimizer_bytes(
            scene.student, axes["actor"], config.optimizer, a.param_dtype, a.moment_dtype
        ),
        optimizer_scratch=optimizer_scratch(
            scene.student, axes["actor"], config.optimizer, a.moment_dtype
        ),
        signal_bytes=0
        if teacher is None
        else signal_bytes(d, config.teacher.compute_dtype, teacher),
        student_topk=teacher is not None and d.signal == "student_topk",
        teacher_microbatches=config.teacher.num_microbatches,
        teacher_samples=teacher is not None and samples,
        signals_in_flight=_signals_in_flight(config, scene, axes),
        head_on_actor=teacher is not None and d.signal == "hidden",
        rollout_layout=config.rollout.layout,
        one_mesh=scene.same_mesh("actor", "rollout", axes),
        one_pool=scene.together("actor", "rollout"),
        target=scene.target,
        shared_group=_shared_group(config, prompt, new),
        reference_dtype=config.reference.compute_dtype,
        reference_microbatches=config.reference.num_microbatches,
    )


def _shared_group(config: Config, prompt: int, new: int) -> int:
    """Completions that share a prompt in an update of full widths, as the actor decides it."""
    group, budget = config.group_size, config.actor.micro_batch_tokens
    off_policy = config.distill.on_policy_fraction < 1
    if config.spec.learns_from == "data" or (off_policy and not config.learns_from_rewards):
        return 1
    whole = config.batch_size % config.minibatches == 0
    return group if whole and shares(group, prompt, new, budget) else 1


def _loss_arrays(d: DistillConfig, signal: str | None, axes: Axes) -> int:
    """Float32 arrays [chunk, V] alive at once in the actor's loss."""
    if signal in (None, "sampled"):  # one log-prob of each token; tile by tile in the backward pass
        return 2
    if signal != "hidden":
        return SCORE_ARRAYS
    extra = ENTROPY_ARRAYS if d.entropy_aware else 0
    if d.lean:
        return LEAN_ARRAYS + (axes.tensor > 1) + extra  # both models' exponentials stay
    return (JSD_ARRAYS if 0 < d.jsd_beta < 1 else KL_ARRAYS) + extra


def _prefill_rows(config: Config, width: int, axes: Axes) -> int:
    """Prompts of `width` in the largest prefill of a role that samples, as the engine does it."""
    shards = axes.data * axes.fsdp
    slots = config.rollout.slots or config.batch_size * config.group_size
    asked = [(config.batch_size, config.group_size)]
    if config.data.eval is not None:
        asked.append((config.eval.prompts, config.eval.samples))
    wanted = max(min(-(-slots // n), prompts) for prompts, n in asked)
    allowed = max(1, PREFILL_TOKENS * shards // width)
    rows = min(power_of_two(wanted), power_of_two(allowed))
    return -(-rows // shards) * shards


def signal_bytes(d: DistillConfig, dtype: str, teacher: DecoderConfig) -> int:
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


@lru_cache(maxsize=64)
def optimizer_scratch(
    model: DecoderConfig, axes: Axes, optimizer: OptimizerConfig, moment_dtype: DType
) -> int:
    """Bytes that an optimizer step writes out beside the gradient and its state, on one device.

    An optimizer that reads the gradient in two places has its clipped form written out, lion and
    adafactor their update; the rest is fused, but for one leaf at a time. What muon writes out is
    in `_muon_scratch`.
    """
    item = ITEMSIZE[moment_dtype]
    sizes = [shard.size for shard in shards(model, axes)]
    weights, leaf = item * sum(sizes), item * max(sizes)
    if optimizer.name == "muon":
        return max(weights, _muon_scratch(model, axes, moment_dtype))
    copies = {"lion": 1, "adafactor": 1}.get(optimizer.name, 0)
    if optimizer.clip_norm is not None:
        copies = {"sgd": 0, "adafactor": 2}.get(optimizer.name, 1)
    last = 0 if optimizer.name == "adafactor" or (copies and optimizer.name != "lion") else leaf
    return copies * weights + last


def _muon_scratch(model: DecoderConfig, axes: Axes, moment_dtype: DType) -> int:
    """Bytes on one device while muon orthogonalises the kernels of the blocks.

    Their update is there twice. A step of Newton and Schulz takes products X @ X.T, and squares of
    these: on one device XLA computes all kernels side by side, two such arrays each; on several one
    after the other, with a third array. `fsdp` has kernels gathered, several at once.
    """
    item = ITEMSIZE[moment_dtype]
    kernels = [s for s in shards(model, axes._replace(fsdp=1)) if s.path.endswith("kernel")]
    kernels = [s for s in kernels if len(s.shape) == 3]
    squares = [s.shape[0] * min(s.shape[1:]) ** 2 * item for s in kernels]
    if axes.fsdp > 1:
        work = GATHERED_BY_MUON * max(s.size for s in kernels) * item
    else:
        work = 2 * sum(squares) if axes.size == 1 else 3 * max(squares)
    return 2 * layer_bytes(model, axes, moment_dtype) + work


def _check_heads(role: str, model: DecoderConfig | EncoderConfig, axes: Axes) -> None:
    if model.n_heads % axes.tensor == 0:
        return
    allowed = [t for t in range(1, axes.size + 1) if model.n_heads % t == 0 and axes.size % t == 0]
    raise UserError(
        f"{role}.parallel.tensor={axes.tensor} does not divide its model's n_heads={model.n_heads}:"
        f" on {axes.size} devices, use {' or '.join(map(str, allowed))}"
    )
