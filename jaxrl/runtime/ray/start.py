"""New processes with their devices and roles: side by side, bounded, verified."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import ray
from ray.actor import ActorClass
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.errors import RunError, UserError
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.awake import awake_since
from jaxrl.runtime.cluster import Kind, hosts_table, needs_table, worker_variables
from jaxrl.runtime.ray.calls import FETCH_S, Sender
from jaxrl.runtime.ray.connect import find_hosts, python_on
from jaxrl.runtime.ray.own import Starts, started_here
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.ray.watch import check_nodes, last_line, stacks
from jaxrl.runtime.server import CallRequest, WorkerServer
from jaxrl.runtime.worker import POLL_S, WorkerError
from jaxrl.sharding.placement import Placement, device_list

Log = Callable[[str], None]
MakeRoles = Callable[[Placement, int, Sequence[jax.Device]], Mapping[str, Callable[[], object]]]
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""
CONTROL = ("info", "free_port", "join", "open", "answer", "state", "stacks", "stop")
"""Methods of a `WorkerServer` that answer while calls run."""
BUNDLE_S = 60.0
"""Longest wait for what the cluster has free already."""
LOOK_S = 0.2
"""Seconds between two looks at processes that start: one that cannot run ends within a second."""


def worker_class(pool: str) -> ActorClass:
    """A Ray actor class whose name, and so its process title, tells the roles."""
    methods: dict[str, object] = {
        name: ray.method(concurrency_group="control")(getattr(WorkerServer, name))
        for name in CONTROL
    }
    methods["run"] = ray.method(concurrency_group="calls", num_returns=2)(WorkerServer.run)
    cls = type(f"jaxrl:{pool}", (WorkerServer,), methods)
    options: Keywords = {"concurrency_groups": {"calls": CALLS, "control": 4}}
    options |= {"enable_task_events": False}  # nobody reads them, and the GCS keeps 100,000
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)(cls)


def make_role(make_roles: MakeRoles, placement: Placement, pool: int, role: str) -> object:
    """In the worker: a role on this pool's devices."""
    return make_roles(placement, pool, jax.devices())[role]()


class Begun(NamedTuple):
    """A start of processes: when, in `time.monotonic` seconds, and what looks at them here."""

    at: float
    starts: Starts | None


class NotStarted(RunError):
    """A process ended, or hung, while it started."""


class NeverRan(NotStarted):
    """A process ended before Ray knew it, or has never answered."""


@dataclass
class Starter:
    """Makes the processes of pools, with their devices and roles; fields as of `RayWorkerGroup`."""

    placement: Placement
    pools: Sequence[RayPool]
    make_roles: MakeRoles
    log: Log
    sender: Sender
    kind: Kind
    startup_s: float
    lazy: Collection[str]
    environment: Mapping[str, str]
    protocols: Mapping[str, type]
    _group: Any = None

    @property
    def longest_s(self) -> float:
        """Bound on a start of pools, for where Ray itself does not answer."""
        return BUNDLE_S + self.startup_s + 2 * FETCH_S

    def reserve(self) -> None:
        """A bundle of the cluster for each process; what is free was compared before."""
        kind: str = self.kind
        places = [slot for pool in self.pools for slot in pool.process_slots]
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
                f" else may have taken them\n{needs_table(self.placement, self.kind)}\n"
                f"{hosts_table(find_hosts())}"
            )
        self._group = group

    def launch(self, pools: Sequence[RayPool]) -> None:
        """New processes for these pools, with their roles."""
        begun = Begun(time.monotonic(), Starts() if started_here() else None)
        for pool in pools:
            pool.born, pool.answers, pool.asked, pool.info = time.monotonic(), {}, set(), []
            pool.epoch, pool.position = pool.epoch + 1, 0
            pool.lost_at = pool.doubt = None
            pool.workers = [self._process(pool, rank) for rank in range(len(pool.process_slots))]
        joining: list[tuple[RayPool, int, ray.ObjectRef]] = []
        for pool in pools:
            n = len(pool.process_slots)
            if n > 1:
                (port,) = self._get_all([(pool, 0, pool.workers[0].free_port.remote())], begun)
                where = f"{pool.process_slots[0].host.address}:{port}"
                joining += [
                    (pool, slot.rank, worker.join.remote(where, n, slot.devices, self.startup_s))
                    for slot, worker in zip(pool.process_slots, pool.workers, strict=True)
                ]
        self._get_all(joining, begun)
        workers = [(pool, *each) for pool in pools for each in enumerate(pool.workers)]
        asking = [(pool, rank, worker.info.remote()) for pool, rank, worker in workers]
        for (pool, _, _), info in zip(workers, self._get_all(asking, begun), strict=True):
            pool.info.append(info)
        self._verify()
        opening = [(pool, rank, worker.open.remote()) for pool, rank, worker in workers]
        self._get_all(opening, begun)
        starting: list[tuple[RayPool, str, int, ray.ObjectRef]] = []
        for pool in pools:
            for role in pool.roles:
                request = self._order_start(pool, role)
                for rank, worker in enumerate(pool.workers):
                    report, _ = worker.run.remote(request)
                    starting.append((pool, role, rank, report))
                pool.position += 1
        reports = self._get_all([(pool, rank, ref) for pool, _, rank, ref in starting], begun)
        for (pool, role, rank, _), report in zip(starting, reports, strict=True):
            if report.error is not None:
                raise report.error
            if rank == 0:
                ids = device_list(self.placement.roles[role].devices)
                where = f"on devices {ids}" if ids else "without devices"
                self.log(f"{role}: ready in {report.times.seconds:.1f} s, {where}; {pool.where(0)}")

    def release(self) -> None:
        """Gives the cluster its bundles back."""
        if self._group is not None and ray.is_initialized():
            with suppress(Exception):
                remove_placement_group(self._group)

    def _process(self, pool: RayPool, rank: int) -> Any:
        slot = pool.process_slots[rank]
        places = [each for pool in self.pools for each in pool.process_slots]
        env = {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **self.environment,
            **worker_variables(slot, self.kind, self.placement),
        }
        actor = worker_class(pool.name).options(
            name=f"jaxrl:{pool.label(rank)}:{uuid.uuid4().hex[:12]}",
            num_gpus=slot.devices if self.kind == "GPU" else 0,
            resources={"TPU": slot.devices} if slot.chips else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=places.index(slot)
            ),
            runtime_env={"env_vars": env, **python_on(slot.host.id)},
        )
        return actor.remote(pool.label(rank), rank, os.getcwd(), ray.put)

    def _order_start(self, pool: RayPool, role: str) -> CallRequest:
        make = partial(make_role, self.make_roles, self.placement, pool.index, role)
        return CallRequest(
            number=-1,
            epoch=pool.epoch,
            position=pool.position,
            role=role,
            method="start",
            args=(make, role in self.lazy, self.protocols.get(role)),
            kwargs={},
            keeps=False,
            stores=False,
        )

    def _verify(self) -> None:
        """Each process sees as many devices as it was given, and no device serves two."""
        owners: dict[tuple[str, str], str] = {}
        versions: dict[tuple[tuple[str, str], ...], str] = {}
        for pool in self.pools:
            for rank, (slot, info) in enumerate(zip(pool.process_slots, pool.info, strict=False)):
                where = pool.where(rank)
                if slot.devices and len(info.devices) != slot.devices:
                    two = "; a chip of TPU v2, v3 and v7x is two devices: set launcher=local"
                    raise RunError(
                        f"{where} was given {slot.devices} devices, but sees {len(info.devices)}"
                        f"{two if slot.chips else ''}"
                    )
                for _, hardware in info.devices:
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

    def _get_all(
        self, asked: Sequence[tuple[RayPool, int, ray.ObjectRef]], begun: Begun
    ) -> list[Any]:
        """Waits for all; the first that has died or failed ends the wait.

        Args:
            begun: from then on they may take `deadlines.startup`.
        """
        owner = {ref: (pool, rank) for pool, rank, ref in asked}
        waiting = list(owner)
        while waiting:
            self.sender.check()
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=LOOK_S)
            for ref in ready:
                self._value(ref, *owner[ref])
            if not waiting or ready:
                continue
            pool, rank = owner[waiting[0]]
            check_nodes(pool)
            trouble = None if begun.starts is None else begun.starts.trouble()
            if trouble is not None:
                raise NeverRan(f"{pool.where(rank)} could not be started: {trouble}")
            if awake_since(begun.at) <= self.startup_s:
                continue
            late = (
                f"{pool.where(rank)} has not started within deadlines.startup={self.startup_s:g} s"
            )
            if rank < len(pool.info):
                raise NotStarted(f"{late}\nstack of the worker:\n{stacks(pool, rank)}")
            raise NeverRan(
                f"{late}: its process has never answered. The file raylet.err in the folder"
                " session_latest/logs of Ray (in /tmp/ray unless it was started with another) on"
                f" {pool.process_slots[rank].host.name} may tell why"
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


def launch_all(starter: Starter) -> None:
    """The first start of all pools, on a thread of its own: Ray's calls may wait without limit, and
    who needs the pools must hear of the end of the run.
    """
    end_at = time.monotonic() + starter.longest_s
    started: Future[None] = Future()

    def run() -> None:
        try:
            starter.reserve()
            starter.launch(starter.pools)
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)

    threading.Thread(target=run, name="launch", daemon=True).start()
    while not wait([started], POLL_S).done:
        starter.sender.check()
        if time.monotonic() > end_at:
            raise NotStarted("Ray has not answered while the workers were started")
    started.result(timeout=0)
