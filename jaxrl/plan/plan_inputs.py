"""A run as the plan sees it: what each role holds on a device, the fullest devices, what the
devices have, and the passes and transfers of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import jax.numpy as jnp
from pydantic import BeforeValidator, Field

from jaxrl.algorithms.methods import sampled_share
from jaxrl.errors import counted
from jaxrl.roles.actor import receivers
from jaxrl.roles.run_shapes import RunInputs, RunShapes
from jaxrl.sharding.placement import Pool

GB, MB = 1e9, 1e6
STORE = 1.1e9
"""Bytes per second from a process to another through Ray's object store, packed and loaded: the
least of docs/cluster.md's best rounds, of hosts without GPUs."""
Column = Literal["weights", "optimizer", "cache", "activations"]
ReadColumn = Annotated[Column, BeforeValidator(lambda x: "activations" if x == "gradients" else x)]
"""In a `plan.json`: those of earlier versions had gradients apart."""
Size = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Entry:
    """Some bytes of a role on one device."""

    column: ReadColumn
    """Gradients and temporary copies of weights count as activations."""
    name: str
    bytes: Size
    phase: str | None = None
    """The phase that it exists in; None: it is resident."""
    away: frozenset[str] = frozenset()
    """Of a resident entry, the moments (`actor: publish`) at which it is freed, or on the host."""

    def there(self, moment: str) -> bool:
        """Returns whether a resident entry is on the device at `ROLE: PHASE`."""
        return moment not in self.away


@dataclass(frozen=True)
class Account:
    """Everything that one role holds on one of its devices."""

    role: str
    entries: tuple[Entry, ...]

    @property
    def kept(self) -> tuple[Entry, ...]:
        """Returns the residents' entries."""
        return tuple(entry for entry in self.entries if entry.phase is None)

    @property
    def resident(self) -> int:
        return sum(entry.bytes for entry in self.kept)

    def phases(self) -> dict[str, int]:
        """Maps each phase to its bytes beyond what is resident."""
        sizes: dict[str, int] = defaultdict(int)
        for entry in self.entries:
            if entry.phase is not None:
                sizes[entry.phase] += entry.bytes
        return dict(sizes)

    def column(self, column: Column) -> int:
        """Returns the most bytes of a column that are on the device in a phase of the role."""
        mine = [entry for entry in self.entries if entry.column == column]
        moments = {f"{self.role}: {e.phase}" for e in self.entries if e.phase is not None}
        sizes = (
            sum(
                e.bytes
                for e in mine
                if (e.there(moment) if e.phase is None else f"{self.role}: {e.phase}" == moment)
            )
            for moment in moments or {""}
        )
        return max(sizes)

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


@dataclass(frozen=True, kw_only=True)
class PlanInputs(RunInputs):
    """What stays the same while keys of the config are tried, with what the devices have."""

    limits: tuple[int | None, ...]
    """Bytes of the smallest device of each pool."""
    hosts: tuple[HostMemory, ...] = ()
    """Those of emulated devices; the `limits` are None then."""

    def pools(self, accounts: Mapping[str, Account]) -> tuple[PoolPeak, ...]:
        """Returns the fullest device of each pool; roles on the same device add up.

        Where devices are emulated, the limit of a pool is what the others leave of its hosts: one
        fits where all do.
        """
        pairs = zip(self.placement.pools, self.limits, strict=True)
        pools = [PoolPeak(pool, *self.load(pool, accounts), limit) for pool, limit in pairs]
        sizes = [pool.bytes for pool in pools]
        for i, pool_peak in enumerate(pools if self.hosts else ()):
            left = [
                (host.limit - host.needed(sizes)) // host.devices[i] + sizes[i]
                for host in self.hosts
                if host.devices[i]
            ]
            pools[i] = replace(pool_peak, limit=min(left, default=None))
        return tuple(pools)

    def load(self, pool: Pool, accounts: Mapping[str, Account]) -> tuple[int, str]:
        """Returns the peak bytes of the fullest device of a pool, and the moment of it."""
        where, mine = self.placement.roles, [role for role in pool.roles if role in accounts]
        loads = (
            peak([accounts[role] for role in mine if device in where[role].devices])
            for device in pool.devices
        )
        return max(loads, default=(0, "nothing"))


class Setting(RunShapes):
    """A config with the mesh axes of its roles: all inputs from which the memory is computed."""

    inputs: PlanInputs

    @property
    def sent(self) -> dict[tuple[str, str], int]:
        """Maps (sender, receiver) to the bytes that all devices of a role send to those of another
        in a step, 0 where both have the same: the policy's weights, and the teacher's signal."""
        c, sent = self.config, {}
        idle = () if sampled_share(c) > 0 else ("rollout",)
        for role in (role for role in receivers(c) if role in self.axes and role not in idle):
            whole = self.student.n_trained * jnp.dtype(c.roles[role].compute_dtype).itemsize
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
