"""The `--mesh` language: which devices each role gets. Handles text and integers only, no jax.

    actor=2,rollout=2,teacher=4        three disjoint pools of 2, 2 and 4 devices
    actor+rollout=6,teacher=2          actor and rollout share 6 devices

Pools take devices in order and never overlap. Device numbers are positions in `jax.devices()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxrl.errors import UserError, counted, unknown
from jaxrl.sharding.axes import DEFAULT_AXES

ROLES: tuple[str, ...] = tuple(DEFAULT_AXES)
"""Every role that `--mesh` can name."""


@dataclass(frozen=True)
class Pool:
    """Devices owned by one worker that holds `roles`."""

    roles: tuple[str, ...]
    devices: range
    """Empty where the worker needs none."""

    @property
    def name(self) -> str:
        """Returns the name as written in the spec: `actor+rollout`."""
        return "+".join(self.roles)


@dataclass(frozen=True)
class RolePlacement:
    """Where one role runs."""

    pool: int
    """Index into `Placement.pools`."""
    devices: range
    """All devices of the pool, or a slice of them."""


@dataclass(frozen=True)
class Placement:
    """Every pool and role of a run."""

    spec: str
    pools: tuple[Pool, ...]
    roles: Mapping[str, RolePlacement]
    notes: tuple[str, ...] = ()
    """What was decided without being asked for, one line each."""

    @property
    def n_devices(self) -> int:
        """Returns the number of devices needed in all."""
        return self.pools[-1].devices.stop

    def pool_of(self, role: str) -> Pool:
        return self.pools[self.roles[role].pool]


def parse(spec: str) -> Placement:
    """Reads a `--mesh` spec.

    Raises:
        UserError: syntax, an unknown role, a role twice, or a count below 1.
    """
    if not spec.strip():
        raise UserError("the mesh is empty: write ROLE=DEVICES, as in actor=2,rollout=2,teacher=4")
    pools: list[Pool] = []
    roles: dict[str, RolePlacement] = {}
    for part in spec.split(","):
        named, equals, count = (text.strip() for text in part.partition("="))
        if not named or not equals:
            raise UserError(
                f"{part.strip()!r} in the mesh {spec!r} is not ROLE=DEVICES,"
                " as in actor=2 or actor+rollout=2"
            )
        names = tuple(name.strip() for name in named.split("+"))
        for role in names:
            if role not in ROLES:
                raise unknown(f"role in the mesh {spec!r}:", role, ROLES)
        if not re.fullmatch(r"[0-9]+", count) or int(count) < 1:
            raise UserError(
                f"{named}={count} in the mesh {spec!r}: a pool has at least 1 device,"
                " in whole numbers"
            )
        start = pools[-1].devices.stop if pools else 0
        pool = Pool(names, range(start, start + int(count)))
        for role in names:
            if role in roles:
                raise UserError(f"role {role!r} is placed twice in the mesh {spec!r}: name it once")
            roles[role] = RolePlacement(len(pools), pool.devices)
        pools.append(pool)
    return Placement(spec, tuple(pools), roles)


def place(
    spec: str, needed: Iterable[str] = (), slices: Mapping[str, str | None] | None = None
) -> Placement:
    """Reads a `--mesh` spec and completes it: needed roles that it leaves out join the actor's
    pool, and `slices` restrict roles to some devices of their pool.

    Args:
        needed: the roles that the algorithm asks for.
        slices: role -> `start:stop` within its pool (`ROLE.devices`); None keeps the whole pool.

    Raises:
        UserError: as `parse` and `narrow`; or a needed role is missing and there is no actor.
    """
    placement = parse(spec)
    needed = tuple(needed)
    for role in (role for role in needed if role not in placement.roles):
        actor = placement.roles.get("actor")
        if actor is None:
            raise UserError(f"the mesh {placement.spec!r} places no {role}: add {role}=DEVICES")
        pools = list(placement.pools)
        pool = pools[actor.pool]
        pools[actor.pool] = replace(pool, roles=(*pool.roles, role))
        roles = {**placement.roles, role: RolePlacement(actor.pool, pool.devices)}
        placement = _note(
            replace(placement, pools=tuple(pools), roles=roles),
            f"{role} is not in the mesh {placement.spec!r}: it joins the actor's pool",
        )
    for role in placement.roles:
        if needed and role not in needed:
            placement = _note(placement, f"{role} is placed, but this run does not use it")
    for role, text in (slices or {}).items():
        if text is not None and role in placement.roles:
            placement = narrow(placement, role, text)
    return placement


def place_without_devices(placement: Placement, role: str) -> Placement:
    """Moves `role` to a pool of its own that has no devices. If it shared a pool, the other roles
    keep that pool.

    Raises:
        UserError: the spec gives the role devices of its own, which would stay unused.
    """
    if role in placement.roles:
        index = placement.roles[role].pool
        pools, shared = list(placement.pools), placement.pools[index]
        if shared.roles == (role,):
            raise UserError(
                f"{role} takes no devices in this run: leave it out of the mesh {placement.spec!r}"
            )
        pools[index] = replace(shared, roles=tuple(r for r in shared.roles if r != role))
        others = {name: where for name, where in placement.roles.items() if name != role}
        notes = tuple(note for note in placement.notes if not note.startswith(f"{role} is placed"))
        placement = replace(placement, pools=tuple(pools), roles=others, notes=notes)
    n = placement.n_devices
    pool = Pool((role,), range(n, n))
    placed = RolePlacement(len(placement.pools), pool.devices)
    return replace(
        placement, pools=(*placement.pools, pool), roles={**placement.roles, role: placed}
    )


def narrow(placement: Placement, role: str, text: str) -> Placement:
    """Restricts `role` to the slice `start:stop` of its pool's devices.

    Raises:
        UserError: not a slice, an empty one, or one that leaves the pool.
    """
    pool = placement.pool_of(role)
    n = len(pool.devices)
    match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", text)
    if match is None:
        raise UserError(
            f"{role}.devices={text!r} is not a slice of devices: write start:stop, as in 0:{n}"
        )
    start = int(match[1] or 0)
    stop = int(match[2] or n)
    if stop > n or start >= n:
        raise UserError(
            f"{role}.devices={text} leaves its pool: {pool.name} has {counted(n, 'device')},"
            f" so stop is at most {n}"
        )
    if start >= stop:
        raise UserError(
            f"{role}.devices={text} holds no device: start {start} is not below stop {stop}"
        )
    narrowed = replace(placement.roles[role], devices=pool.devices[start:stop])
    return replace(placement, roles={**placement.roles, role: narrowed})


def check_visible(placement: Placement, visible: int) -> Placement:
    """Adds a note on devices that are left over.

    Raises:
        UserError: the placement needs more than the `visible` devices.
    """
    needed = placement.n_devices
    if needed > visible:
        raise UserError(
            f"the mesh {placement.spec!r} needs {counted(needed, 'device')}, but {visible} "
            f"{'is' if visible == 1 else 'are'} visible"
        )
    if needed < visible:
        return _note(
            placement,
            f"{visible - needed} of {counted(visible, 'device')} left over: the mesh uses {needed}",
        )
    return placement


def device_list(devices: Iterable[int]) -> str:
    """Writes numbers as ranges: `0-3`, `5`, `0,2-3`."""
    runs: list[list[int]] = []
    for i in sorted(devices):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _note(placement: Placement, text: str) -> Placement:
    return replace(placement, notes=(*placement.notes, text))
