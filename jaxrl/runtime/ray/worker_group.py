"""The workers of a run, all of them processes of a Ray cluster: how they start, side by side,
bounded and verified; how the loop calls them; and how they end.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ray
from ray.actor import ActorClass
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.config.settings import RayConfig
from jaxrl.errors import RunError, UserError
from jaxrl.process.compilations import Compilations
from jaxrl.process.json_types import Keywords
from jaxrl.runtime.cluster import hosts_table, needs_table, worker_variables
from jaxrl.runtime.ray.connect import address_of, find_seats, join
from jaxrl.runtime.ray.hosts import (
    check_nodes,
    end_here,
    find_hosts,
    kill,
    last_line,
    python_on,
    stacks,
)
from jaxrl.runtime.ray.local_cluster import (
    Guard,
    Starts,
    bounded,
    end_daemons,
    in_cluster,
    leave,
    started_here,
    usable,
    watch_starts,
)
from jaxrl.runtime.ray.remote_calls import FETCH_S, STAYS, RayFuture, RayPool, Sender
from jaxrl.runtime.ray.supervise import Log, NeverRan, NotStarted, Supervisor
from jaxrl.runtime.role_server import STARTING, CallRequest, WorkerServer
from jaxrl.runtime.worker import (
    POLL_S,
    PROFILE,
    Phase,
    RunLost,
    Stopped,
    WorkerError,
    WorkerState,
    wall_clock,
)
from jaxrl.sharding.placement import Placement, device_list

MakeRoles = Callable[[Placement, int, Sequence[jax.Device]], Mapping[str, Callable[[], object]]]
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""
CONTROL = ("info", "free_port", "join", "open", "answer", "state", "stacks", "stop")
"""Methods of a `WorkerServer` that answer while calls run."""
BUNDLE_S = 60.0
"""Longest wait for what the cluster has free already."""
LOOK_S = 0.2
"""Seconds between two looks at processes that start: one that cannot run ends within a second."""
END_S = 10.0
"""Longest wait for Ray to end the workers, before they are ended without it."""


@dataclass(frozen=True)
class RayHandle:
    """A role of a pool, as the loop sees it."""

    sender: Sender
    pool: RayPool
    role: str

    def call(
        self, method: str, *args: object, deadline: float, aside: bool = False, **kwargs: object
    ) -> RayFuture:
        """Queues a call (`Handle.call`)."""
        pool, sender = self.pool, self.sender
        keeps = STAYS.get((self.role, method)) in pool.roles
        what = self.role, method, args, kwargs, deadline, aside
        with sender.lock:
            future = RayFuture(*what, sender, pool, next(sender.numbers), keeps)
            failed = [needed._error for needed in future.inputs() if needed._error is not None]
            if failed:
                raise failed[0]
            if keeps:
                weakref.finalize(future, pool.released.append, future.number)
            sender.calls[future.number] = future
            sender.flush(pool)
        return future


class RayWorkerGroup:
    """Makes the processes of all pools, with their devices and roles, takes calls to the roles, and
    ends them."""

    def __init__(
        self,
        config: RayConfig,
        placement: Placement,
        make_roles: MakeRoles,
        log: Log,
        *,
        startup_s: float,
        roles: Sequence[str],
        lazy: Collection[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        protocols: Mapping[str, type] = MappingProxyType({}),
    ):
        """
        Args:
            make_roles: (placement, pool, devices) -> role -> what makes it; runs in the worker.
            startup_s: within how many seconds processes must have started (`deadlines.startup`).
            roles: those of the run; others may be placed.
            lazy: of these, those that are made at their first call.
            environment: further variables of every process; `${NAME}` is its own value.
            protocols: role -> its Protocol, as in `LocalWorker.start_role`.
        """
        join(address_of(config), placement.n_devices)
        self._kind, slots = find_seats(config, placement, find_hosts)
        pools = [
            RayPool(
                index,
                pool.name,
                tuple(role for role in pool.roles if role in roles),
                tuple(slot for slot in slots if slot.pool == index),
            )
            for index, pool in enumerate(placement.pools)
        ]
        self._pools = [pool for pool in pools if pool.roles]
        self._bundles = [slot for pool in self._pools for slot in pool.process_slots]
        self._placement, self._make_roles, self._log = placement, make_roles, log
        self._startup_s, self._lazy = startup_s, lazy
        self._environment, self._protocols = environment, protocols
        self._longest_s = BUNDLE_S + startup_s + 2 * FETCH_S
        """Bound on a start of pools, for where Ray itself does not answer."""
        self._sender = Sender()
        self._supervisor = Supervisor(
            config, self._sender, self._pools, log, self._launch, self._longest_s
        )
        self._reserved: Any = None
        self.ending: str | None = None
        self._guard = Guard(self._lost if started_here() else self._lose_head)

    # How they start.

    def start(self) -> None:
        """Starts processes, devices and roles: on a thread of its own, because Ray's calls may wait
        without limit, and who needs the pools must hear of the end of the run.

        Raises:
            RunLost: a process died or hung meanwhile; another try may do.
            NeverRan: what ended a process, or kept it silent, will do so again.
        """
        self._guard.start()
        end_at = time.monotonic() + self._longest_s
        started: Future[None] = Future()

        def run() -> None:
            try:
                self._reserve()
                self._launch(self._pools)
                started.set_result(None)
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=run, name="launch", daemon=True).start()
        try:
            while not wait([started], POLL_S).done:
                self._sender.check()
                if time.monotonic() > end_at:
                    raise NotStarted("Ray has not answered while the workers were started")
            started.result(timeout=0)
        except NeverRan as error:
            self.ending = str(error)  # a raylet starts no other process for a minute
            raise
        except NotStarted as error:
            raise RunLost(str(error)) from error
        for pool in self._pools:
            pool.alive = True
        self._supervisor.start()

    def _reserve(self) -> None:
        """Takes a bundle of the cluster for each process; what is free was compared before."""
        kind: str = self._kind
        self._reserved = placement_group(
            [{kind: slot.devices} if slot.devices else {"memory": 1} for slot in self._bundles],
            bundle_label_selector=[{"ray.io/node-id": slot.host.id} for slot in self._bundles],
        )
        end = time.monotonic() + BUNDLE_S
        while not self._reserved.wait(POLL_S):
            if time.monotonic() >= end:
                raise UserError(
                    f"the cluster did not start the workers within {BUNDLE_S:g} s;"
                    " other jobs may use its resources\n"
                    f"{needs_table(self._placement, self._kind)}\n{hosts_table(find_hosts())}"
                )

    def _launch(self, pools: Sequence[RayPool]) -> None:
        """Starts new processes for these pools, with their roles: also after a loss."""
        get = partial(self._get_all, began=time.monotonic(), starts=watch_starts())
        for pool in pools:
            pool.born, pool.answers, pool.asked, pool.info = time.monotonic(), {}, set(), []
            pool.epoch, pool.position = pool.epoch + 1, 0
            pool.lost_at = pool.doubt = None
            pool.workers = [self._process(pool, rank) for rank in range(len(pool.process_slots))]
        joining: list[tuple[RayPool, int, ray.ObjectRef]] = []
        for pool in pools:
            n = len(pool.process_slots)
            if n > 1:  # one SPMD program
                (port,) = get([(pool, 0, pool.workers[0].free_port.remote())])
                address = f"{pool.process_slots[0].host.address}:{port}"
                joining += [
                    (pool, slot.rank, worker.join.remote(address, n, slot.devices, self._startup_s))
                    for slot, worker in zip(pool.process_slots, pool.workers, strict=True)
                ]
        get(joining)
        workers = [(pool, *each) for pool in pools for each in enumerate(pool.workers)]
        infos = get([(pool, rank, worker.info.remote()) for pool, rank, worker in workers])
        for (pool, _, _), info in zip(workers, infos, strict=True):
            pool.info.append(info)
        self._verify()
        get([(pool, rank, worker.open.remote()) for pool, rank, worker in workers])
        starting: list[tuple[RayPool, str, int, ray.ObjectRef]] = []
        for pool in pools:
            for role in pool.roles:
                make = partial(make_role, self._make_roles, self._placement, pool.index, role)
                request = CallRequest(
                    number=-1,
                    epoch=pool.epoch,
                    position=pool.position,
                    role=role,
                    method="start",
                    args=(make, role in self._lazy, self._protocols.get(role)),
                    kwargs={},
                    keeps=False,
                    stores=False,
                )
                for rank, worker in enumerate(pool.workers):
                    report, _ = worker.run.remote(request)
                    starting.append((pool, role, rank, report))
                pool.position += 1
        reports = get([(pool, rank, ref) for pool, _, rank, ref in starting])
        for (pool, role, rank, _), report in zip(starting, reports, strict=True):
            if report.error is not None:
                raise report.error
            if rank == 0:
                ids = device_list(self._placement.roles[role].devices)
                on = f"on devices {ids}" if ids else "without devices"
                seconds = report.times.seconds
                self._log(f"{role}: ready in {seconds:.1f} s, {on}; {pool.where(0)}")

    def _process(self, pool: RayPool, rank: int) -> Any:
        """Starts one process; returns its Ray actor."""
        slot = pool.process_slots[rank]
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
                self._reserved, placement_group_bundle_index=self._bundles.index(slot)
            ),
            runtime_env={"env_vars": env, **python_on(slot.host.id)},
        )
        return actor.remote(pool.label(rank), rank, os.getcwd(), ray.put)

    def _verify(self) -> None:
        """Raises unless each process sees as many devices as it was given, no device serves two,
        and all have the same packages."""
        owners: dict[tuple[str, str], str] = {}
        versions: dict[tuple[tuple[str, str], ...], str] = {}
        for pool in self._pools:
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
                f"{where}: " + ", ".join(f"{name} {version}" for name, version in packages)
                for packages, where in versions.items()
            )
            raise UserError(f"the nodes of the cluster have different packages: {reported}")

    def _get_all(
        self,
        asked: Sequence[tuple[RayPool, int, ray.ObjectRef]],
        began: float,
        starts: Starts | None,
    ) -> list[Any]:
        """Waits for all; the first that has died or failed ends the wait.

        Args:
            asked: pool, rank, what it was asked for.
            began: from then on they may take `deadlines.startup`; `time.monotonic` seconds.
            starts: what looks at processes that start here.
        """
        owner = {ref: (pool, rank) for pool, rank, ref in asked}
        values: dict[ray.ObjectRef, Any] = {}
        while waiting := [ref for ref in owner if ref not in values]:
            self._sender.check()
            ready, _ = ray.wait(waiting, num_returns=1, timeout=LOOK_S)
            for ref in ready:
                pool, rank = owner[ref]
                try:
                    values[ref] = ray.get(ref, timeout=FETCH_S)
                except RayTaskError as error:
                    failed = f"{pool.where(rank)} failed while it started:\n{error}"
                    raise WorkerError(failed) from error
                except RayError as error:
                    reported = f"{pool.where(rank)} died while it started: {last_line(error)}"
                    raise NotStarted(reported) from error
            if ready:
                continue
            pool, rank = owner[waiting[0]]
            check_nodes(pool)
            trouble = None if starts is None else starts.trouble()
            if trouble is not None:
                raise NeverRan(f"{pool.where(rank)} could not be started: {trouble}")
            if wall_clock().awake_since(began) <= self._startup_s:
                continue
            late = (
                f"{pool.where(rank)} has not started within deadlines.startup={self._startup_s:g} s"
            )
            if rank < len(pool.info):
                raise NotStarted(f"{late}\nstack of the worker:\n{stacks(pool, rank)}")
            raise NeverRan(
                f"{late}: its process has never answered. The file raylet.err in the folder"
                " session_latest/logs of Ray (in /tmp/ray unless it was started with another) on"
                f" {pool.process_slots[rank].host.name} may have the reason"
            )
        return [values[ref] for _, _, ref in asked]

    # What the loop sees.

    @property
    def roles(self) -> tuple[str, ...]:
        """Returns the roles that there are."""
        return tuple(role for pool in self._pools for role in pool.roles)

    def handle(self, role: str) -> RayHandle:
        """Returns what calls a role."""
        pool = next(pool for pool in self._pools if role in pool.roles)
        return RayHandle(self._sender, pool, role)

    def states(self) -> list[WorkerState]:
        """Tells what each process does, as far as it was heard."""
        return [
            self._state(pool, rank)
            for pool in self._pools
            for rank in range(len(pool.process_slots))
        ]

    def _state(self, pool: RayPool, rank: int) -> WorkerState:
        info = pool.info[rank] if rank < len(pool.info) else None
        answer = pool.answers.get(rank)
        phase = Phase(STARTING, pool.born) if answer is None else answer.phase
        died = answer is not None and not pool.alive
        return WorkerState(
            pool.label(rank),
            pool.process_slots[rank].host.name if info is None else info.host,
            0 if info is None else info.pid,
            pool.roles,
            () if info is None else tuple(name for name, _ in info.devices),
            "died" if died else phase.name,
            phase.detail,
            phase.since,
            pool.heard(rank),
            pool.life,
            "" if died or answer is None else answer.compiling,
        )

    def peaks(self) -> dict[str, int]:
        """Returns role -> peak bytes of its fullest device (`WorkerGroup.peaks`)."""
        peaks: dict[str, int] = {}
        for pool in self._pools:
            answers = list(pool.answers.values())
            reported = [answer.peak for answer in answers if answer.peak is not None]
            if reported:
                peaks |= dict.fromkeys(pool.roles, max(reported))
        return peaks

    def compiled(self) -> Compilations:
        """Counts the programs that all processes have compiled so far."""
        answers = (answer for pool in self._pools for answer in list(pool.answers.values()))
        return sum((answer.compiled for answer in answers), Compilations())

    def profile(self, folder: Path | None, dtype: str, deadline: float) -> dict[str, RayFuture]:
        """Begins or ends a trace in every process (`WorkerGroup.profile`)."""
        handles = [RayHandle(self._sender, pool, pool.roles[0]) for pool in self._pools]
        return {
            handle.pool.name: handle.call(PROFILE, folder, dtype, deadline=deadline)
            for handle in handles
        }

    # How they end.

    def _lost(self, why: str) -> None:
        end_daemons()  # so that whoever waits for one hears of it
        self._sender.fail(RunLost(why))

    def _lose_head(self, why: str) -> None:
        """Notes the loss: workers and calls do without the head for a minute, time to save."""
        self.ending = why

    def stop(self) -> None:
        """Asks every process to end, then kills it. Who still waits for a call gets an error. Where
        Ray does not answer, they are ended without it, and the cluster is left."""
        self._guard.stop()
        self._sender.fail(Stopped("the run is over"))
        self._supervisor.join()
        if self.ending or not usable() or not bounded(self._end, END_S):
            end_here(self._pools)
            leave(answers=False)

    def _end(self) -> None:
        for pool in self._pools:
            for worker in pool.workers:
                with suppress(RayError):
                    worker.stop.remote()
        kill(self._pools)
        if self._reserved is not None and in_cluster():
            with suppress(Exception):
                remove_placement_group(self._reserved)


def worker_class(pool: str) -> ActorClass:
    """Makes a Ray actor class whose name, and so its process title, tells the roles."""
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
    """Makes a role on its pool's devices, in the worker."""
    return make_roles(placement, pool, jax.devices())[role]()
