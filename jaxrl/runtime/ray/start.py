"""New processes with their devices and roles: side by side, bounded, verified."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.errors import RunError, UserError
from jaxrl.runtime.awake import awake_since
from jaxrl.runtime.cluster import Kind, hosts_table, needs_table, worker_variables
from jaxrl.runtime.local import POLL_S
from jaxrl.runtime.ray.calls import FETCH_S, End, raised
from jaxrl.runtime.ray.connect import find_hosts
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.ray.process import MakeRoles, make_role, worker_class
from jaxrl.runtime.ray.watch import check_nodes, last_line, stacks
from jaxrl.runtime.server import CallRequest
from jaxrl.runtime.worker import WorkerError
from jaxrl.sharding.placement import Placement, device_list

Log = Callable[[str], None]
BUNDLE_S = 60.0
"""Longest wait for what the cluster has free already."""


class NotStarted(RunError):
    """A process ended, or hung, while it started."""


class Starter:
    """Makes the processes of pools, with their devices and roles."""

    def __init__(
        self,
        placement: Placement,
        pools: Sequence[RayPool],
        make_roles: MakeRoles,
        log: Log,
        end: End,
        *,
        kind: Kind,
        startup_s: float,
        lazy: Collection[str],
        environment: Mapping[str, str],
        protocols: Mapping[str, type],
    ):
        """
        Args:
            make_roles: (placement, pool, devices) -> role -> what makes it; runs in the worker.
            lazy: roles that are made at their first call.
            environment: further variables of every process.
            protocols: role -> its Protocol, as in `LocalWorker.start_role`.
        """
        self._placement, self._pools, self._make_roles = placement, pools, make_roles
        self._log, self._end, self._kind = log, end, kind
        self._startup_s, self._lazy, self._environment = startup_s, lazy, environment
        self._protocols = protocols
        self._group: Any = None

    @property
    def longest_s(self) -> float:
        """Bound on a start of pools, for where Ray itself does not answer."""
        return BUNDLE_S + self._startup_s + 2 * FETCH_S

    def reserve(self) -> None:
        """A bundle of the cluster for each process; what is free was compared before."""
        kind: str = self._kind
        places = [slot for pool in self._pools for slot in pool.process_slots]
        group = placement_group(
            [{kind: slot.devices} if slot.devices else {"memory": 1} for slot in places],
            bundle_label_selector=[{"ray.io/node-id": slot.host.id} for slot in places],
        )
        end = time.monotonic() + BUNDLE_S
        while not group.wait(POLL_S):
            if time.monotonic() < end:
                continue
            remove_placement_group(group)
            raise UserError(
                f"the cluster did not give the workers their places within {BUNDLE_S:g} s; someone"
                f" else may have taken them\n{needs_table(self._placement, self._kind)}\n"
                f"{hosts_table(find_hosts())}"
            )
        self._group = group

    def launch(self, pools: Sequence[RayPool]) -> None:
        """New processes for these pools, with their roles."""
        begun = time.monotonic()
        for pool in pools:
            pool.born, pool.answers, pool.asked, pool.info = time.monotonic(), {}, set(), []
            pool.epoch, pool.position = pool.epoch + 1, 0
            pool.lost_at = pool.doubt = None
            pool.workers = [self._process(pool, rank) for rank in range(len(pool.process_slots))]
        joining: list[tuple[RayPool, int, ray.ObjectRef]] = []
        for pool in pools:
            n = len(pool.process_slots)
            if n > 1:
                port = self._get(pool, 0, pool.workers[0].free_port.remote(), begun)
                where = f"{pool.process_slots[0].host.address}:{port}"
                joining += [
                    (pool, slot.rank, worker.join.remote(where, n, slot.devices, self._startup_s))
                    for slot, worker in zip(pool.process_slots, pool.workers, strict=True)
                ]
        self._get_all(joining, begun)
        asking = [
            (pool, rank, worker.info.remote())
            for pool in pools
            for rank, worker in enumerate(pool.workers)
        ]
        info = self._get_all(asking, begun)
        for pool in pools:
            pool.info = [f for (p, _, _), f in zip(asking, info, strict=True) if p is pool]
        self._verify()
        opening = [
            (pool, rank, worker.open.remote())
            for pool in pools
            for rank, worker in enumerate(pool.workers)
        ]
        self._get_all(opening, begun)
        starting: list[tuple[RayPool, str, int, ray.ObjectRef]] = []
        for pool in pools:
            for role in pool.roles:
                request = partial(self._order_start, pool, role)
                for rank, worker in enumerate(pool.workers):
                    report, _ = worker.run.remote(request())
                    starting.append((pool, role, rank, report))
                pool.position += 1
        reports = self._get_all([(pool, rank, ref) for pool, _, rank, ref in starting], begun)
        for (pool, role, rank, _), report in zip(starting, reports, strict=True):
            if report.error is not None:
                raise raised(report.error)
            if rank == 0:
                seconds = report.finished - (report.started or report.finished)
                ids = device_list(self._placement.roles[role].devices)
                where = f"on devices {ids}" if ids else "without devices"
                self._log(f"{role}: ready in {seconds:.1f} s, {where}; {pool.where(0)}")

    def release(self) -> None:
        """Gives the cluster its bundles back."""
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)

    def _process(self, pool: RayPool, rank: int) -> Any:
        slot = pool.process_slots[rank]
        before = [s for p in self._pools for s in p.process_slots]
        bundle = next(i for i, s in enumerate(before) if s is slot)
        env = {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **self._environment,
            **worker_variables(slot, self._kind, self._placement),
        }
        actor = worker_class(pool.name).options(
            name=f"jaxrl:{pool.label(rank)}:{uuid.uuid4().hex[:12]}",
            num_gpus=slot.devices if self._kind == "GPU" else 0,
            resources={"TPU": slot.devices} if slot.chips else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": env},
        )
        return actor.remote(pool.label(rank), rank, os.getcwd())

    def _order_start(self, pool: RayPool, role: str) -> CallRequest:
        make = partial(make_role, self._make_roles, self._placement, pool.index, role)
        number, given = -1, (make, role in self._lazy, self._protocols.get(role))
        return CallRequest(
            number, pool.epoch, pool.position, role, "start", given, {}, False, False
        )

    def _verify(self) -> None:
        """Each process sees as many devices as it was given, and no device serves two."""
        owners: dict[tuple[str, str], str] = {}
        versions: dict[tuple[tuple[str, str], ...], str] = {}
        for pool in self._pools:
            for rank, (slot, info) in enumerate(zip(pool.process_slots, pool.info, strict=False)):
                where = pool.where(rank)
                if slot.devices and info.local != slot.devices:
                    two = "; a chip of TPU v2, v3 and v7x is two devices: set launcher=local"
                    raise RunError(
                        f"{where} was given {slot.devices} devices, but sees {info.local}"
                        f"{two if slot.chips else ''}"
                    )
                for _, _, hardware in info.devices:
                    if hardware:
                        other = owners.setdefault((info.host, hardware), where)
                        if other != where:
                            raise RunError(
                                f"device {hardware} of {info.host} is seen by {other} and {where}"
                            )
                versions.setdefault(info.versions, where)
        if len(versions) > 1:
            reported = "; ".join(
                f"{where}: " + ", ".join(f"{name} {version}" for name, version in found)
                for found, where in versions.items()
            )
            raise UserError(f"the nodes of the cluster have different packages: {reported}")

    def _get(self, pool: RayPool, rank: int, ref: ray.ObjectRef, begun: float) -> Any:
        return self._get_all([(pool, rank, ref)], begun)[0]

    def _get_all(
        self, asked: Sequence[tuple[RayPool, int, ray.ObjectRef]], begun: float
    ) -> list[Any]:
        """Waits for all; the first that has died or failed ends the wait.

        Args:
            begun: `time.monotonic` seconds, from which on they may take `deadlines.startup`.
        """
        owner = {ref: (pool, rank) for pool, rank, ref in asked}
        waiting = list(owner)
        while waiting:
            if self._end.failure is not None:
                raise self._end.failure
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
            for ref in ready:
                self._value(ref, *owner[ref])
            if waiting and not ready:
                pool, rank = owner[waiting[0]]
                check_nodes(pool)
                if awake_since(begun) > self._startup_s:
                    raise NotStarted(
                        f"{pool.where(rank)} has not started within"
                        f" deadlines.startup={self._startup_s:g} s\nstack of the worker:\n"
                        f"{stacks(pool, rank)}"
                    )
        return [self._value(ref, pool, rank) for pool, rank, ref in asked]

    def _value(self, ref: ray.ObjectRef, pool: RayPool, rank: int) -> Any:
        try:
            return ray.get(ref, timeout=FETCH_S)
        except RayTaskError as error:
            raise WorkerError(f"{pool.where(rank)} failed while it started:\n{error}") from error
        except RayError as error:
            reported = f"{pool.where(rank)} died while it started: {last_line(error)}"
            raise NotStarted(reported) from error


class Launch:
    """The first start of all pools, on a thread of its own: Ray's calls may wait without limit, and
    who needs the pools must hear of the end of the run.
    """

    def __init__(self, starter: Starter, pools: Sequence[RayPool]):
        self._starter, self._pools = starter, pools
        self._end_at = time.monotonic() + starter.longest_s
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="launch", daemon=True).start()

    def wait(self, end: End) -> None:
        """Raises what kept the pools from starting."""
        while not self._done.wait(POLL_S):
            if end.failure is not None:
                raise end.failure
            if time.monotonic() > self._end_at:
                raise NotStarted("Ray has not answered while the workers were started")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._starter.reserve()
            self._starter.launch(self._pools)
        except BaseException as error:
            self._error = error
        self._done.set()
