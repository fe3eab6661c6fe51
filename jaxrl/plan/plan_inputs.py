"""What a plan starts from: the models, where the roles are placed and what a device has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.models.batching import round_up
from jaxrl.models.config import DecoderConfig
from jaxrl.models.encoder_config import EncoderConfig
from jaxrl.models.kernels import Target, Use
from jaxrl.sharding.axes import Axes, resolve_axes
from jaxrl.sharding.placement import Placement, Pool

GB = 1e9
Column = Literal["weights", "gradients", "optimizer", "cache", "activations"]


@dataclass(frozen=True)
class Entry:
    """Some bytes of a role on one device."""

    column: Column
    """Temporary copies of weights count as activations."""
    name: str
    bytes: int
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
        return sum(p.bytes for p in self.entries if p.phase is None)

    def phases(self) -> dict[str, int]:
        """Maps each phase to its bytes beyond what is resident."""
        found: dict[str, int] = {}
        for entry in self.entries:
            if entry.phase is not None:
                found[entry.phase] = found.get(entry.phase, 0) + entry.bytes
        return found

    def column(self, column: Column) -> int:
        """Returns what is resident of a column, and the most that one phase adds to it."""
        mine = Account(self.role, tuple(e for e in self.entries if e.column == column))
        return mine.peak

    @property
    def peak(self) -> int:
        return peak((self,))[0]


def peak(accounts: Iterable[Account]) -> tuple[int, str]:
    """Returns the peak bytes of a device that holds these roles, and the moment of it (`actor:
    update`)."""
    accounts = tuple(accounts)
    moments = {f"{a.role}: {name}": size for a in accounts for name, size in a.phases().items()}
    resident = [entry for a in accounts for entry in a.entries if entry.phase is None]

    def total(moment: str) -> int:
        there = sum(entry.bytes for entry in resident if entry.there(moment))
        return there + moments.get(moment, 0)

    moment = max(moments, key=total, default="")
    return total(moment), moment


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
        needed = self.needed([pool.bytes for pool in pools])
        if needed <= self.limit:
            return ""
        each = [
            f"{f'{n} x ' if n > 1 else ''}{peak.bytes / GB:.1f} {peak.pool.name}"
            for peak, n in zip(pools, self.devices, strict=True)
            if n
        ]
        parts = " + ".join([*each, f"{self.beside / GB:.1f} processes and mapped files"])
        return (
            f"{self.name} needs {needed / GB:.1f} GB of {self.limit / GB:.1f} ({parts}),"
            f" {(needed - self.limit) / GB:.1f} too much"
        )

    def left(self, pool: int, sizes: Sequence[int]) -> int | None:
        """Returns the bytes that the other pools leave to a device of this one; None where it has
        none here."""
        n, size = self.devices[pool], sizes[pool]
        return (self.limit - self.needed(sizes)) // n + size if n else None


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
        asked = config.max_prompt_tokens, config.max_new_tokens
        return round_up(asked[0], multiple), round_up(asked[1], multiple)

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
            UserError: axes that do not divide the role's devices or the model's heads.
        """
        found = {}
        for role in self.roles:
            n = len(self.placement.roles[role].devices)
            given = config.roles[role].parallel
            sizes = {axis: getattr(given, axis) for axis in type(given).model_fields}
            axes = resolve_axes(role, n, **sizes)
            if config.teacher.tokenizer == "own" and role in ("actor", "teacher"):
                _check_whole(role, axes)
            for model in self.models(role):
                _check_heads(role, model, axes)
                _check_experts(role, model, axes)
            found[role] = axes
        balances = config.student.router_aux_loss_coef
        if balances and self.student.experts is None:
            raise UserError(
                f"student.router_aux_loss_coef={balances:g} needs a mixture of experts, and"
                f" student.model is of the family {self.student.family}: set it to 0"
            )
        if balances and config.spec.method is not None:
            raise UserError(
                f"student.router_aux_loss_coef={balances:g} is a term of jaxrl's losses, and"
                f" algorithm={config.algorithm} has its own method: set it to 0"
            )
        if config.policy.router_replay and self.student.experts is None:
            raise UserError(
                "policy.router_replay=true needs a mixture of experts, and student.model is of the"
                f" family {self.student.family}: set policy.router_replay=false"
            )
        return found

    def pools(self, accounts: Mapping[str, Account]) -> tuple[PoolPeak, ...]:
        """Returns the fullest device of each pool; roles on the same device add up.

        Where devices are emulated, the limit of a pool is what the others leave of its hosts: one
        fits where all do.
        """
        where, found = self.placement.roles, []
        for pool, limit in zip(self.placement.pools, self.limits, strict=True):
            loads = [
                peak(
                    accounts[r] for r in pool.roles if r in accounts and device in where[r].devices
                )
                for device in pool.devices
            ]
            found.append(PoolPeak(pool, *max(loads, default=(0, "nothing")), limit))
        if not self.hosts:
            return tuple(found)
        sizes = [pool.bytes for pool in found]
        left = [[host.left(i, sizes) for host in self.hosts] for i in range(len(found))]
        return tuple(
            replace(pool, limit=min((n for n in each if n is not None), default=None))
            for pool, each in zip(found, left, strict=True)
        )

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
    evaluated = config.eval.teacher and config.data.eval is not None and config.mixture is None
    return role == "rollout" or (role == "teacher" and (config.distill.seq_kd or evaluated))


def _check_heads(role: str, model: DecoderConfig | EncoderConfig, axes: Axes) -> None:
    if model.n_heads % axes.heads == 0:
        return
    allowed = [t for t in range(1, axes.size + 1) if model.n_heads % t == 0 and axes.size % t == 0]
    asked = {"tensor": axes.tensor, "context": axes.context}
    given = [f"{role}.parallel.{axis}={size}" for axis, size in asked.items() if size > 1]
    product = f" times {given[1]}, {axes.heads}," if len(given) > 1 else ""
    raise UserError(
        f"{given[0]}{product} does not divide its model's n_heads={model.n_heads}:"
        f" on {axes.size} devices, use {' or '.join(map(str, allowed))}"
    )


def _check_experts(role: str, model: DecoderConfig | EncoderConfig, axes: Axes) -> None:
    experts = model.experts if isinstance(model, DecoderConfig) else None
    count = 1 if experts is None else experts.count
    if count % axes.expert:
        has = "has no experts" if experts is None else f"has num_experts={count}"
        raise UserError(
            f"{role}.parallel.expert={axes.expert} does not divide the experts of its model, which"
            f" {has}: use " + ("data or fsdp" if experts is None else f"a divisor of {count}")
        )


def _check_whole(role: str, axes: Axes) -> None:
    if axes.tensor > 1:
        raise UserError(
            f"{role}.parallel.tensor={axes.tensor} splits the vocabulary, and a teacher with"
            f" teacher.tokenizer=own needs all of it at once: set {role}.parallel.tensor=1, and"
            " fsdp or data"
        )
