"""The workers of a run, all of them processes of a Ray cluster, as the loop sees them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ray.exceptions import RayError

from jaxrl.config.settings import RayConfig
from jaxrl.process.compilations import Compilations
from jaxrl.runtime.ray.calls import STAYS, RayFuture, Sender
from jaxrl.runtime.ray.connect import address_of, find_hosts, find_seats, join
from jaxrl.runtime.ray.own import (
    Guard,
    Head,
    Health,
    bounded,
    end_daemons,
    leave,
    started_here,
    usable,
)
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.ray.start import Log, MakeRoles, NeverRan, NotStarted, Starter, launch_all
from jaxrl.runtime.ray.supervise import Supervisor
from jaxrl.runtime.ray.watch import end_here, kill
from jaxrl.runtime.server import STARTING
from jaxrl.runtime.tracing import PROFILE
from jaxrl.runtime.worker import Phase, RunLost, Stopped, WorkerState
from jaxrl.sharding.placement import Placement

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
        pool, sender = self.pool, self.sender
        keeps = STAYS.get((self.role, method)) in pool.roles
        with sender.lock:
            future = RayFuture(
                self.role,
                method,
                args,
                kwargs,
                deadline,
                aside,
                sender,
                pool,
                next(sender.numbers),
                keeps,
            )
            failed = [needed._error for needed in future.inputs() if needed._error is not None]
            if failed:
                raise failed[0]
            if keeps:
                weakref.finalize(future, pool.released.append, future.number)
            sender.calls[future.number] = future
            sender.flush(pool)
        return future


class RayWorkerGroup:
    """Makes them, takes calls to their roles, and ends them."""

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
            roles: those of the run; others may be placed.
            lazy: of these, those that are made at their first call.
            environment: further variables of every process; `${NAME}` is its own value.
            protocols: role -> its Protocol, as in `LocalWorker.start_role`.
        """
        join(address_of(config), placement.n_devices)
        kind, places = find_seats(config, placement, find_hosts)
        pools = [
            RayPool(
                index,
                pool.name,
                tuple(role for role in pool.roles if role in roles),
                tuple(slot for slot in places if slot.pool == index),
            )
            for index, pool in enumerate(placement.pools)
        ]
        self._pools = [pool for pool in pools if pool.roles]
        self._sender = Sender()
        self._starter = Starter(
            placement,
            self._pools,
            make_roles,
            log,
            self._sender,
            kind,
            startup_s,
            lazy,
            environment,
            protocols,
        )
        self._supervisor = Supervisor(config, self._starter)
        self._ending: str | None = None
        self._guard = (
            Guard(Health().trouble, self._lost)
            if started_here()
            else Guard(Head().trouble, self._lose_head)
        )

    def start(self) -> None:
        """Processes, devices, roles: side by side, bounded, verified.

        Raises:
            RunLost: a process died or hung meanwhile; another try may do.
            NeverRan: what ended a process, or kept it silent, will do so again.
        """
        self._guard.start()
        try:
            launch_all(self._starter)
        except NeverRan as error:
            self._ending = str(error)  # a raylet starts no other process for a minute
            raise
        except NotStarted as error:
            raise RunLost(str(error)) from error
        for pool in self._pools:
            pool.alive = True
        self._supervisor.start()

    def _lost(self, why: str) -> None:
        end_daemons()  # so that whoever waits for one hears of it
        self._sender.fail(RunLost(why))

    def _lose_head(self, why: str) -> None:
        """Workers and calls do without the head for a minute: time to save."""
        self._ending = why

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for pool in self._pools for role in pool.roles)

    def handle(self, role: str) -> RayHandle:
        pool = next(pool for pool in self._pools if role in pool.roles)
        return self._handle(pool, role)

    def _handle(self, pool: RayPool, role: str) -> RayHandle:
        return RayHandle(self._sender, pool, role)

    def ending(self) -> str | None:
        return self._ending

    def states(self) -> list[WorkerState]:
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
        )

    def peaks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pool in self._pools:
            answers = list(pool.answers.values())
            reported = [answer.peak for answer in answers if answer.peak is not None]
            if reported:
                found |= dict.fromkeys(pool.roles, max(reported))
        return found

    def compiled(self) -> Compilations:
        answers = (answer for pool in self._pools for answer in list(pool.answers.values()))
        return sum((answer.compiled for answer in answers), Compilations())

    def profile(self, folder: Path | None, dtype: str, deadline: float) -> dict[str, RayFuture]:
        return {
            pool.name: self._handle(pool, pool.roles[0]).call(
                PROFILE, folder, dtype, deadline=deadline
            )
            for pool in self._pools
        }

    def stop(self) -> None:
        """Asks every process to end, then kills it. Who still waits for a call gets an error. Where
        Ray does not answer, they are ended without it, and the cluster is left.
        """
        self._guard.stop()
        self._sender.fail(Stopped("the run is over"))
        self._supervisor.join()
        if self._ending or not usable() or not bounded(self._end, END_S):
            end_here(self._pools)
            leave(answers=False)

    def _end(self) -> None:
        for pool in self._pools:
            for worker in pool.workers:
                with suppress(RayError):
                    worker.stop.remote()
        kill(self._pools)
        self._starter.release()
