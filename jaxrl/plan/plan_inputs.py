"""A run as the plan sees it: models, placement and what a device has, its config with mesh axes and
widths, and what follows from them of how roles cut and share their work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from jaxrl.algorithms.methods import sampled_share
from jaxrl.algorithms.schedule import SCHEDULES
from jaxrl.config.schema import Config
from jaxrl.config.section import DType, shown
from jaxrl.errors import UserError, counted
from jaxrl.models.batching import round_up
from jaxrl.models.bert import EncoderConfig
from jaxrl.models.config import DecoderConfig
from jaxrl.models.kernels import Target, Use, fuses
from jaxrl.models.parameters import Layout
from jaxrl.models.shared_prompts import PAGE, why_not_paged
from jaxrl.plan.array_bytes import F32, Pass, layer_bytes, trained_bytes, weight_bytes
from jaxrl.roles.microbatch import scored_group, shares
from jaxrl.sampling.engine import ANSWER_TOKENS, prefill_batch
from jaxrl.sampling.slots import pool_pages, rows_at_most, seats_of_row
from jaxrl.sharding.axes import Axes, resolve_axes
from jaxrl.sharding.placement import Placement, Pool
from jaxrl.teacher.protocol import Options

GB = 1e9
STORE = 1.1e9
"""Bytes per second from a process to another through Ray's object store, packed and loaded: the
least of docs/cluster.md's best rounds, of hosts without GPUs."""
Column = Literal["weights", "gradients", "optimizer", "cache", "activations"]
Size = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Entry:
    """Some bytes of a role on one device."""

    column: Column
    """Temporary copies of weights count as activations."""
    name: str
    bytes: Size
    phase: str | None = None
    """The phase that it exists in; None: it is resident."""
    away: frozenset[str] = frozenset()
    """Of a resident entry, the moments (`actor: publish`) and roles while which it is freed, or on
    the host."""

    def there(self, moment: str) -> bool:
        """Returns whether a resident entry is on the device at `ROLE: PHASE`."""
        return not self.away & {moment, moment.partition(":")[0]}


@dataclass(frozen=True)
class Account:
    """Everything that one role holds on one of its devices."""

    role: str
    entries: tuple[Entry, ...]

    @property
    def resident(self) -> int:
        return sum(e.bytes for e in self.entries if e.phase is None)

    def phases(self) -> dict[str, int]:
        """Maps each phase to its bytes beyond what is resident."""
        sizes: dict[str, int] = defaultdict(int)
        for entry in self.entries:
            if entry.phase is not None:
                sizes[entry.phase] += entry.bytes
        return dict(sizes)

    def column(self, column: Column) -> int:
        """Returns what is resident of a column, and the most that one phase adds to it."""
        return Account(self.role, tuple(e for e in self.entries if e.column == column)).peak

    @property
    def peak(self) -> int:
        return peak((self,))[0]


def peak(accounts: Sequence[Account]) -> tuple[int, str]:
    """Returns the peak bytes of a device that holds these roles, and the moment of it (`actor:
    update`)."""
    moments = {f"{a.role}: {name}": size for a in accounts for name, size in a.phases().items()}
    resident = [entry for a in accounts for entry in a.entries if entry.phase is None]
    totals = {
        moment: size + sum(entry.bytes for entry in resident if entry.there(moment))
        for moment, size in (moments or {"": 0}).items()
    }
    moment = max(totals, key=totals.__getitem__)
    return totals[moment], moment


@dataclass(frozen=True)
class PoolPeak:
    """The fullest device of a pool."""

    pool: Pool
    bytes: int
    moment: str
    """Role and phase at the peak, as in `actor: loss`."""
    limit: int | None
    """Bytes that the device has; None where nobody knows."""

    @property
    def fits(self) -> bool:
        return self.limit is None or self.bytes <= self.limit

    @property
    def excess(self) -> str:
        """Says by how much it does not fit."""
        assert self.limit is not None
        return (
            f"{self.pool.name} needs {self.bytes / GB:.1f} GB ({self.moment}) of"
            f" {self.limit / GB:.1f}, {(self.bytes - self.limit) / GB:.1f} too much"
        )


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
        """Returns the bytes of the run, given those of one device of each pool."""
        return self.beside + sum(n * size for n, size in zip(self.devices, sizes, strict=True))

    def excess(self, pools: Sequence[PoolPeak]) -> str:
        """Says by how much a run of these pools does not fit; empty where it fits."""
        over = self.needed([pool.bytes for pool in pools]) - self.limit
        if over <= 0:
            return ""
        parts = [
            f"{f'{n} x ' if n > 1 else ''}{peak.bytes / GB:.1f} {peak.pool.name}"
            for peak, n in zip(pools, self.devices, strict=True)
            if n
        ]
        parts.append(f"{self.beside / GB:.1f} processes and mapped files")
        return (
            f"{self.name} needs {(self.limit + over) / GB:.1f} GB of {self.limit / GB:.1f}"
            f" ({' + '.join(parts)}), {over / GB:.1f} too much"
        )

    def note(self, sizes: Sequence[int]) -> str:
        """Says what the run takes of the host, given the bytes of one device of each pool."""
        devices = sum(self.devices)
        return (
            f"{self.name}: {counted(devices, 'emulated device')} share{'s' if devices == 1 else ''}"
            f" its free memory of {self.limit / GB:.1f} GB; the run needs"
            f" {self.needed(sizes) / GB:.1f} GB of it, {self.beside / GB:.1f} GB of that for"
            " processes and mapped files. A limit in the table is what the others leave"
        )


@dataclass(frozen=True)
class PlanInputs:
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
    several: tuple[DecoderConfig, ...] = ()
    """All teachers where there are several; `teacher` is then the largest of them."""
    adapted: bool = False
    """The student begins with adapters that were trained before, which its reference keeps."""
    host_of: tuple[int, ...] = ()
    """Number of each device's host; empty where all are on one, or not known."""
    hosts: tuple[HostMemory, ...] = ()
    """Those of emulated devices; the `limits` are None then."""

    @property
    def teachers(self) -> tuple[DecoderConfig, ...]:
        return self.several or (() if self.teacher is None else (self.teacher,))

    @property
    def on_cpu(self) -> bool:
        return self.target.platform == "cpu"

    def widths(self, config: Config) -> tuple[int, int]:
        """Returns the widths of the longest prompts and completions, as arrays have them."""
        multiple = self.target.width_multiple
        tokens = config.max_prompt_tokens, config.max_new_tokens
        return round_up(tokens[0], multiple), round_up(tokens[1], multiple)

    def model(self, role: str) -> DecoderConfig | EncoderConfig:
        own = {"teacher": self.teacher, "reward": self.reward, "grouper": self.grouper}
        return own.get(role) or self.student

    def models(self, role: str) -> tuple[DecoderConfig | EncoderConfig, ...]:
        return self.teachers if role == "teacher" else (self.model(role),)

    def kernel_uses(self, config: Config, roles: Iterable[str]) -> list[Use]:
        """Returns what these roles need of attention kernels (`kernels.try_kernels`)."""
        return [
            (dim, config.roles[role].compute_dtype, generates(config, role))
            for role in roles
            for model in self.models(role)
            for dim in model.head_dims
        ]

    def axes(self, config: Config) -> dict[str, Axes]:
        """Returns the mesh axes of each role of the run.

        Raises:
            UserError: axes that do not divide the role's devices or the model's heads; keys that
                need a mixture of experts, of a model that is none.
        """
        found = {}
        for role in self.roles:
            n = len(self.placement.roles[role].devices)
            given = config.roles[role].parallel
            sizes = {axis: getattr(given, axis) for axis in type(given).model_fields}
            axes = found[role] = resolve_axes(role, n, **sizes)
            whole = config.teacher.tokenizer == "own" and role in ("actor", "teacher")
            if whole and axes.tensor > 1:
                raise UserError(
                    f"{role}.parallel.tensor={axes.tensor} splits the vocabulary, and a teacher"
                    " with teacher.tokenizer=own needs all of it at once: set"
                    f" {role}.parallel.tensor=1, and fsdp or data"
                )
            for model in self.models(role):
                heads, experts = model.n_heads, None
                if isinstance(model, DecoderConfig) and model.experts is not None:
                    experts = model.experts.count
                if heads % axes.heads:
                    allowed = [t for t in range(1, n + 1) if heads % t == 0 and n % t == 0]
                    asked = {"tensor": axes.tensor, "context": axes.context}
                    keys = [f"{role}.parallel.{axis}={k}" for axis, k in asked.items() if k > 1]
                    product = f" times {keys[1]}, {axes.heads}," if len(keys) > 1 else ""
                    raise UserError(
                        f"{keys[0]}{product} does not divide its model's n_heads={heads}:"
                        f" on {n} devices, use {' or '.join(map(str, allowed))}"
                    )
                if (experts or 1) % axes.expert:
                    has, use = f"has num_experts={experts}", f"a divisor of {experts}"
                    if experts is None:
                        has, use = "has no experts", "data or fsdp"
                    raise UserError(
                        f"{role}.parallel.expert={axes.expert} does not divide the experts of its"
                        f" model, which {has}: use {use}"
                    )
        balances = config.student.router_aux_loss_coef
        for key, now, off in (
            ("student.router_aux_loss_coef", balances, 0),
            ("policy.router_replay", config.policy.router_replay, False),
        ):
            if now and self.student.experts is None:
                raise UserError(
                    f"{key}={shown(now)} needs a mixture of experts, and student.model is of the"
                    f" family {self.student.family}: set it to {shown(off)}"
                )
        if balances and config.spec.method is not None:
            raise UserError(
                f"student.router_aux_loss_coef={balances:g} is a term of jaxrl's losses, and"
                f" algorithm={config.algorithm} has its own method: set it to 0"
            )
        return found

    def pools(self, accounts: Mapping[str, Account]) -> tuple[PoolPeak, ...]:
        """Returns the fullest device of each pool; roles on the same device add up.

        Where devices are emulated, the limit of a pool is what the others leave of its hosts: one
        fits where all do.
        """
        where, pools = self.placement.roles, []
        for pool, limit in zip(self.placement.pools, self.limits, strict=True):
            mine = [role for role in pool.roles if role in accounts]
            loads = (
                peak([accounts[role] for role in mine if device in where[role].devices])
                for device in pool.devices
            )
            pools.append(PoolPeak(pool, *max(loads, default=(0, "nothing")), limit))
        sizes = [pool.bytes for pool in pools]
        for i, pool_peak in enumerate(pools if self.hosts else ()):
            left = [
                (host.limit - host.needed(sizes)) // host.devices[i] + sizes[i]
                for host in self.hosts
                if host.devices[i]
            ]
            pools[i] = replace(pool_peak, limit=min(left, default=None))
        return tuple(pools)

    def spanned(self, role: str) -> int:
        """Returns the number of hosts among which the devices of a role are divided evenly; 1 where
        they are not, or on one host."""
        devices = self.placement.roles[role].devices
        hosts = [self.host_of[i] for i in devices] if self.host_of else []
        count = len(set(hosts))
        even = count > 1 and all(hosts.count(host) * count == len(hosts) for host in set(hosts))
        return count if even and hosts == sorted(hosts) else 1

    def together(self, a: str, b: str) -> bool:
        """Returns whether two roles share a worker."""
        return self.placement.roles[a].pool == self.placement.roles[b].pool


def generates(config: Config, role: str) -> bool:
    """Returns whether a role generates: the teacher where the student learns from what it writes,
    or is evaluated beside it."""
    if role != "teacher":
        return role == "rollout"
    return config.distill.seq_kd or evaluated(config, role)


class Setting:
    """A config with the mesh axes of its roles: all inputs from which the memory is computed."""

    def __init__(self, config: Config, inputs: PlanInputs):
        self.config, self.inputs, self.axes = config, inputs, inputs.axes(config)
        self.student, self.teacher = inputs.student, inputs.teacher
        self.sequences = config.batch_rows  # B
        self.prompt_tokens, self.new_tokens = inputs.widths(config)
        self.width = self.prompt_tokens + self.new_tokens
        self.update_rows = self.rows("actor", -(-self.sequences // config.minibatches))
        # With its padding, so that every mesh divides it.
        multiple = math.lcm(*(sizes.rows for sizes in self.axes.values()))
        self.padded_rows = -(-self.sequences // multiple) * multiple
        # Whether the teacher reads completions in its own tokens.
        self.aligned = self.teacher is not None and config.teacher.tokenizer == "own"
        self.teacher_widths = [model.d_model for model in inputs.teachers]
        self.signal: str | None = None
        self.signal_bytes = 0  # bytes that the teacher sends per completion token
        self.vocab = self.student.vocab_size  # V of the losses: rows common to both heads
        if self.teacher is not None:
            self.signal = config.distill.signal
            combine = max if config.mixture is None else sum
            width, dtype = combine(self.teacher_widths), config.teacher.compute_dtype
            tensors = Options.of(config.distill, 1).tensors(dtype, width).values()
            self.signal_bytes = 3 * F32 * self.aligned + sum(
                np.dtype(dtype).itemsize * math.prod(dims) for dtype, dims in tensors
            )
            if not self.aligned:
                self.vocab = min(self.vocab, *(model.vocab_size for model in inputs.teachers))
        # Rows of a teacher's LM head on the actor.
        self.teacher_rows = self.teacher.vocab_size if self.teacher and self.aligned else self.vocab
        # The most tokens of a micro-batch in one row shard (`roles.update.ActorPrograms.budget`).
        tokens = config.actor.micro_batch_tokens
        self.budget = None if tokens is None else tokens * self.axes["actor"].context
        # The policy before training: with adapters that were trained before, merged weights.
        self.reference = self.student.plain if inputs.adapted else self.student.base

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Maps (sender, receiver) to the bytes that all devices of a role send to those of another
        in a step, 0 where both have the same: the policy's weights, and the teacher's signal."""
        c, sent = self.config, {}
        follow = {"rollout": sampled_share(c) > 0, "teacher": c.teacher_follows}
        for role in (role for role, gets in follow.items() if gets and role in self.axes):
            whole = trained_bytes(self.student, Axes(), c.roles[role].compute_dtype)
            sent["actor", role] = 0 if self.on_actors_mesh(role) else whole
        if "teacher" in self.axes:
            whole = self.sequences * self.new_tokens * self.signal_bytes
            sent["teacher", "actor"] = 0 if self.on_actors_mesh("teacher") else whole
        return sent

    def store_seconds(self, sender: str, receiver: str) -> float | None:
        """Returns the seconds that this part of `sent` takes through the object store; None where
        the run has one host, or the roles are in one process."""
        inputs = self.inputs
        if not inputs.host_of or inputs.together(sender, receiver):
            return None
        devices = (inputs.placement.roles[role].devices for role in (sender, receiver))
        # Each host has a process of its own, which sends or takes its part.
        processes = min(len({inputs.host_of[i] for i in numbers}) for numbers in devices)
        return self.sent[sender, receiver] / (STORE * processes)

    def on_actors_mesh(self, role: str) -> bool:
        """Returns whether a role has the actor's devices and axes."""
        where = self.inputs.placement.roles
        same = where["actor"].devices == where[role].devices
        return same and self.axes["actor"] == self.axes[role]

    def sampled(self, role: str) -> DecoderConfig:
        """Returns the model that a role samples from."""
        if role == "teacher":
            assert self.teacher is not None
            return self.teacher
        return self.student.plain if self.config.rollout.merge else self.student

    def layout(self, role: str) -> Layout:
        """Returns the layout of a role's weights: one array per layer where it samples."""
        return "unstacked" if generates(self.config, role) else "stacked"

    def published_dtype(self, role: str) -> DType:
        """Returns the dtype in which the actor holds the weights that it publishes to a role."""
        averaged = role == "teacher" and self.config.keeps_ema
        return "float32" if averaged else self.config.actor.param_dtype

    def shared_bytes(self, role: str) -> int:
        """Returns the bytes on one device of the policy's trained weights in arrays that the
        rollout, or a teacher that follows the policy, shares with the actor."""
        c, dtype = self.config, self.config.roles[role].compute_dtype
        own = c.rollout.merge  # or, of a teacher, where each gets arrays of its own from the host
        if role == "teacher":
            own = not c.teacher_follows or c.offloads_follower
        if own or not self.on_actors_mesh(role) or dtype != self.published_dtype(role):
            return 0
        whole = trained_bytes(self.student, self.axes["actor"], dtype)
        if self.layout(role) == "stacked":
            return whole
        # Adapters are in the layers, which the actor has stacked.
        lora = self.student.lora is not None
        return 0 if lora else whole - layer_bytes(self.student, self.axes["actor"], dtype)

    def base_bytes(self, role: str) -> int:
        """Returns the bytes on one device of the frozen base weights, in arrays of the role's own:
        what it shares with the actor is the actor's. 0 without adapters."""
        if self.student.lora is None or self._shares_base(role):
            return 0
        c = self.config
        dtype = c.base_dtype if role == "actor" else c.roles[role].compute_dtype
        model = self.reference if role == "reference" else self.student.base
        return weight_bytes(model, self.axes[role], dtype)

    def _shares_base(self, role: str) -> bool:
        """Returns whether the frozen base weights are arrays of the actor's."""
        c = self.config
        if role == "actor" or (role == "reference" and self.inputs.adapted):
            return False
        stacked = c.rollout.merge or self.layout(role) == "stacked"
        same = c.roles[role].compute_dtype == c.base_dtype and stacked and not c.offload.params
        return same and self.on_actors_mesh(role)

    def counted_as_the_actors(self, role: str) -> int:
        """Returns the bytes of the arrays of a role on one device that are among the actor's
        entries."""
        shared = self.shared_bytes(role) if role in ("rollout", "teacher") else 0
        reads = role == "reference" or (role == "rollout" and not self.config.rollout.merge)
        if self.student.lora is not None and reads and self._shares_base(role):
            shared += weight_bytes(self.student.base, self.axes[role], self.config.base_dtype)
        return shared

    def prompts(self, role: str) -> int:
        """Returns the width of the longest prompts that a role reads."""
        if role != "teacher" or (self.config.teacher.prompt is None and not self.aligned):
            return self.prompt_tokens
        return round_up(self.config.teacher_prompt_tokens, self.inputs.target.width_multiple)

    def completions(self, role: str) -> int:
        """Returns the width of the longest completions that a role reads."""
        if role != "teacher" or not self.aligned:
            return self.new_tokens
        return round_up(self.config.teacher_new_tokens, self.inputs.target.width_multiple)

    @property
    def in_flight(self) -> int:
        """Returns the bytes of a batch's signal that stay on a device of the teacher while
        something else runs there."""
        waits = SCHEDULES[self.config.schedule] > 0 or self.inputs.together("actor", "teacher")
        if not waits or self.on_actors_mesh("teacher"):
            return 0
        return self.rows("teacher", self.sequences) * self.new_tokens * self.signal_bytes

    @cached_property
    def shared_group(self) -> int:
        """Returns the number of completions that share a prompt in an update, if all prompts and
        completions are as long as allowed; 1 if the actor would not share prompts then."""
        c = self.config
        return 1 if c.batch_size % c.minibatches else self._shared("actor", self.budget)

    def _shared(self, role: str, budget: int | None) -> int:
        """Returns the number of completions for which a role computes one prompt once.

        Args:
            budget: most tokens of a micro-batch on one device.
        """
        c = self.config
        off_policy = c.distill.on_policy_fraction < 1 and not c.learns_from_rewards
        if c.only_data or off_policy:
            return 1
        shared = shares(c.group_size, self.prompts(role), self.completions(role), budget)
        return c.group_size if shared else 1

    def scored(self, role: str, model: DecoderConfig, parts: int) -> Pass:
        """Returns a role's forward pass over one of `parts` slices of the batch, as
        `roles.microbatch.scored_part` cuts it."""
        shards, prompts = self.axes[role].rows, self.prompts(role)
        apart = role == "teacher" and self.config.teacher_gets_feedback  # each its own prompt
        shared = 1 if apart else self._shared(role, None)
        group = scored_group(self.sequences, parts, shards, shared)
        rows = -(-self.sequences // (parts * shards * group)) * group
        return self.run(role, model, rows, prompts + self.completions(role), group)

    def rows(self, role: str, sequences: int) -> int:
        """Returns how many of `sequences` are on one device of a role."""
        return -(-sequences // self.axes[role].rows)

    def run(self, role: str, model: DecoderConfig, rows: int, width: int, group: int = 1) -> Pass:
        """Returns a role's pass over rows of a device, of which so many share each prompt."""
        dtype, shared = self.config.roles[role].compute_dtype, (group, self.prompts(role))
        fused = all(fuses(self.inputs.target, dim, dtype, group > 1) for dim in model.head_dims)
        axes = self.axes[role]
        return Pass(model, axes, rows, width, dtype, fused, shared if group > 1 else None)

    def chunk(self, rows: int, role: str = "actor") -> int:
        """Returns how many completion tokens of `rows` sequences are projected onto the vocabulary
        at once."""
        return min(self.config.distill.loss_chunk, rows * self.completions(role))

    def micro_batches(self) -> tuple[int, int]:
        """Returns the number of micro-batches of an update, and the rows of one on a device."""
        group = self.shared_group
        tokens = self.prompt_tokens + group * self.new_tokens  # of a group, its prompt once
        groups = -(-self.update_rows // group)
        most = groups if self.budget is None else max(1, self.budget // tokens)
        count = -(-groups // most)
        return count, -(-groups // count) * group

    def prefill_rows(self, role: str) -> int:
        """Returns the number of prompts of each data shard in the largest prefill of a role."""
        width, slots = self.prompts(role), self.sampling_slots(role)
        return max(prefill_batch(slots, *way, width) for way in asked(self.config, role))

    def sampling_slots(self, role: str) -> int:
        """Returns the number of slots of each data shard of a role that samples."""
        slots, axes = self.config.slots, self.axes[role]
        return -(-slots // axes.size) * axes.size // axes.rows

    def slots(self, role: str) -> CacheSizes:
        """Returns the slots of the sampling engine of a role: the larger of those of training and
        of evaluations.

        Raises:
            UserError: `rollout.cache_tokens`, where the cache cannot be in pages, and why.
        """
        c, count = self.config, self.sampling_slots(role)
        multiple = self.inputs.target.width_multiple
        most = c.teacher_new_tokens if role == "teacher" else c.max_new_tokens
        if c.data.eval is not None:
            most = max(most, c.eval.max_new_tokens or 0)
        episodes = role == "rollout" and c.environment.name is not None
        tokens = c.rollout.cache_tokens if role == "rollout" else None
        if tokens is not None:
            target, dtype = self.inputs.target, c.rollout.compute_dtype
            why = why_not_paged(self.student, target, dtype, episodes=episodes)
            if why is not None:
                raise UserError(
                    f"rollout.cache_tokens={tokens} needs prompts apart from completions, and here"
                    f" a cache holds both: {why}; set it to null"
                )
        pages = 0 if tokens is None else pool_pages(tokens, count, most)
        whole = round_up(self.prompts(role) + most, multiple)
        positions = round_up(most + ANSWER_TOKENS[1] * episodes, multiple)
        ways = (
            (rows_at_most(count, self.axes[role].rows, samples, prompts), samples)
            for prompts, samples in asked(c, role)
        )
        each = [(rows, seats_of_row(count, samples)) for rows, samples in ways]
        rows, seats = max(each, key=lambda way: way[0] * (way[1] + 1))
        return CacheSizes(count, positions, rows, seats, pages, whole)


class CacheSizes(NamedTuple):
    """The slots of a device that samples, and the prompts that they share."""

    slots: int
    positions: int
    """Of each slot's cache, or of the longest completion in a pool of pages."""
    rows: int
    """Shared prompts, at most."""
    seats: int
    """Slots that read one of them, at most."""
    pages: int
    """Of the pool, where there is one in place of the slots' caches."""
    whole: int
    """Positions of the longest sequence with its prompt."""

    @property
    def own(self) -> tuple[int, int]:
        """Returns rows and positions of the cache."""
        return (self.pages, PAGE) if self.pages else (self.slots, self.positions)


def asked(config: Config, role: str) -> list[tuple[int, int]]:
    """Returns the prompts, and samples of each, for which a role is asked at once: those of
    training batches, where it samples any, and of evaluations, where it does so for them."""
    trains, evaluates = sampled_share(config) > 0, evaluated(config, role)
    if role == "teacher":
        trains = config.distill.seq_kd
    found = [(config.batch_size, config.group_size)] * trains
    return found + [(config.eval.prompts, config.eval.samples)] * evaluates


def evaluated(config: Config, role: str) -> bool:
    """Returns whether a role that samples is evaluated."""
    return config.data.eval is not None and (role != "teacher" or config.evaluates_teacher)
