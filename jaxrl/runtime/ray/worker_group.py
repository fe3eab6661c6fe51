"""The workers of a run, all of them processes of a Ray cluster: how they start, side by side,
bounded and verified; how the loop calls them; the thread that handles their reports, enforces
deadlines, and restarts processes that are lost; and how they end.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ray
from ray.actor import ActorClass
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jaxrl.config.settings import RayConfig
from jaxrl.errors import RunError, Stopped, StopTraining, UserError
from jaxrl.process.awake_clock import awake_clock
from jaxrl.process.child_python import SAFE, program_paths
from jaxrl.process.compilations import Compilations
from jaxrl.process.json_types import Keywords
from jaxrl.process.waiting import waiting, waits
from jaxrl.runtime.cluster import hosts_table, needs_table, worker_variables
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.connect import address_of, find_hosts, find_seats, join, on_node, python_on
from jaxrl.runtime.ray.remote_calls import FETCH_S, STATEFUL, STAYS, RayFuture, RayPool, Sender
from jaxrl.runtime.role_server import (
    CallReport,
    CallRequest,
    InputLost,
    ProcessStatus,
    WorkerServer,
    examine_process,
)
from jaxrl.runtime.worker import POLL_S, PROFILE, RunLost, WorkerError, WorkerState
from jaxrl.sharding.placement import Placement, device_list

Log = Callable[[str], None]
MakeRoles = Callable[[Placement, int, Sequence[jax.Device]], Mapping[str, Callable[[], object]]]
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""
CONTROL = ("info", "free_port", "answer", "state", "stacks", "stop")
"""Methods of a `WorkerServer` that answer while calls run."""
BUNDLE_S = 60.0
"""Longest wait for what the cluster has free already."""
LOOK_S = 0.2
"""Seconds between two looks at processes that start: one that cannot run ends within a second."""
END_S = 10.0
"""Longest wait for Ray to end the workers, before they are ended without it."""
STACKS_S = 5.0
"""Longest wait for the stacks of a late worker, before the kernel is asked instead."""
SILENT_S = 3.0
"""Seconds without an answer from which on that is told."""
ASK_S = 1.0
"""Seconds between two questions to a worker about its state."""
DOUBT_S = 3.0
"""How long the error of one process of several waits for the news that another has died: who
computes with a process that dies sees an error of its own, and may be heard first."""
OF_PEERS = ("JaxRuntimeError", "XlaRuntimeError")
"""Classes of errors that a process has where another one ends."""
PROGRESS = ("actor", "update")
"""The call that resets the count of restarts."""
JOIN_S = 5.0
"""Longest wait at the end for all threads together."""


class NotStarted(RunError):
    """A process ended, or hung, while it started."""


class NeverRan(NotStarted):
    """A process ended before Ray knew it, or has never answered."""


@dataclass(frozen=True)
class RayHandle:
    """A role of a pool, as the loop sees it."""

    sender: Sender
    pool: RayPool
    role: str

    def call(
        self,
        method: str,
        *args: object,
        deadline: float,
        aside: bool = False,
        own_error: bool = False,
        **kwargs: object,
    ) -> RayFuture:
        pool, sender = self.pool, self.sender
        keeps = STAYS.get((self.role, method)) in pool.roles
        what = self.role, method, args, kwargs, deadline, aside, own_error
        with sender.lock:
            future = RayFuture(*what, sender, pool, next(sender.numbers), keeps)
            failed = [needed._error for needed in future.inputs() if needed._error is not None]
            if failed:
                raise failed[0]
            if keeps:
                weakref.finalize(future, pool.released.append, future.number)
            if pool.drops and not aside:
                raise Stopped("the run ends, and a call before this one was dropped")
            sender.calls[future.number] = future
            sender.flush(pool)
        return future


class RayWorkerGroup:
    """Makes the processes of all pools, with their devices and roles, takes calls to the roles,
    looks after the processes, and ends them."""

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
        self._config, self._placement, self._log = config, placement, log
        self._make_roles = make_roles
        self._startup_s, self._lazy = startup_s, lazy
        self._environment, self._protocols = environment, protocols
        self._longest_s = BUNDLE_S + startup_s + 2 * FETCH_S
        """Bound on a start of pools, for where Ray itself does not answer."""
        self._sender = Sender()
        self._restarts = 0
        """Since the last update of the policy."""
        self._states: dict[tuple[int, str], RayFuture] = {}
        """Pool and role -> the call that made its state, if it can be repeated."""
        self._threads: list[threading.Thread] = []
        self._reserved: Any = None
        self.ending: str | None = None
        self.stop_asked: StopTraining | None = None
        own = local_cluster.started_here()
        self._guard = local_cluster.Guard(self._lose_cluster if own else self._lose_head)

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

        self._begin("launch", run)
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
        self._begin("supervisor", self._supervise)

    def _begin(self, name: str, target: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads[-1].start()

    def _reserve(self) -> None:
        kind: str = self._kind
        self._reserved = placement_group(
            [{kind: slot.devices} if slot.devices else {"memory": 1} for slot in self._bundles],
            bundle_label_selector=[{"ray.io/node-id": slot.host.id} for slot in self._bundles],
        )
        end = time.monotonic() + BUNDLE_S
        with waiting("places for the workers in the Ray cluster", most=BUNDLE_S):
            while not self._reserved.wait(POLL_S):
                if time.monotonic() >= end:
                    raise UserError(
                        f"the cluster did not start the workers within {BUNDLE_S:g} s;"
                        " other jobs may use its resources\n"
                        f"{needs_table(self._placement, self._kind)}\n{hosts_table(find_hosts())}"
                    )

    def _launch(self, pools: Sequence[RayPool]) -> None:
        starts = local_cluster.Starts() if local_cluster.started_here() else None
        get = partial(self._get_all, began=time.monotonic(), starts=starts)
        for pool in pools:
            pool.born, pool.answers, pool.asked, pool.info = time.monotonic(), {}, set(), []
            pool.position, pool.doubt = 0, None
            pool.workers = [self._process(pool, rank) for rank in range(len(pool.process_slots))]
        asked: list[tuple[RayPool, int, ray.ObjectRef]] = []
        for pool in pools:
            n, joins = len(pool.process_slots), None
            if n > 1:  # one SPMD program
                (port,) = get([(pool, 0, pool.workers[0].free_port.remote())])
                address = f"{pool.process_slots[0].host.address}:{port}"
                joins = address, n, pool.process_slots[0].devices, self._startup_s
            asked += [(pool, i, worker.info.remote(joins)) for i, worker in enumerate(pool.workers)]
        names = ", ".join(pool.name for pool in pools)
        with waiting(f"the processes of {names}, which Ray starts", most=self._startup_s):
            infos = get(asked)
        for (pool, _, _), info in zip(asked, infos, strict=True):
            pool.info.append(info)
        self._verify()
        starting: list[tuple[RayPool, str, int, ray.ObjectRef]] = []
        for pool in pools:
            for role in pool.roles:
                make = partial(make_role, self._make_roles, self._placement, pool.index, role)
                args = make, role in self._lazy, self._protocols.get(role)
                request = CallRequest(-1, pool.position, role, "start", args)
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
                self._log(f"{role}: ready in {seconds:.1f} s, {on}; {pool.state(0).where}")

    def _process(self, pool: RayPool, rank: int) -> Any:
        slot = pool.process_slots[rank]
        env = {
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            **SAFE,
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
        folders = os.getcwd(), program_paths()
        return actor.remote(pool.label(rank), rank, *folders, ray.put)

    def _verify(self) -> None:
        """Raises unless each process sees as many devices as it was given, no device serves two,
        and all have the same packages."""
        owners: dict[tuple[str, str], str] = {}
        versions: dict[tuple[tuple[str, str], ...], str] = {}
        for pool in self._pools:
            for rank, (slot, info) in enumerate(zip(pool.process_slots, pool.info, strict=False)):
                where = pool.state(rank).where
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
        starts: local_cluster.Starts | None,
    ) -> list[Any]:
        """Waits for what processes were asked for, for `deadlines.startup` since `began`; the first
        that has died or failed ends the wait. The error of one that names a cause counts more than
        the deaths of others, which may follow it, for as long as `DOUBT_S`."""
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
                    failed = f"{pool.state(rank).where} failed while it started:\n{error}"
                    raise WorkerError(failed) from error
                except RayError as error:
                    others, _ = ray.wait(waiting, num_returns=len(waiting), timeout=DOUBT_S)
                    for other in others:
                        with suppress(RayError):
                            check_cause(ray.get(other, timeout=FETCH_S))
                    reported = f"{pool.state(rank).where} died while it started: {last_line(error)}"
                    raise NotStarted(reported) from error
                check_cause(values[ref])
            if ready:
                continue
            pool, rank = owner[waiting[0]]
            check_nodes(pool)
            if starts is not None and (trouble := starts.trouble()) is not None:
                raise NeverRan(f"{pool.state(rank).where} could not be started: {trouble}")
            if awake_clock().awake_since(began) <= self._startup_s:
                continue
            limit = f"deadlines.startup={self._startup_s:g} s"
            late = f"{pool.state(rank).where} has not started within {limit}"
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
        return tuple(role for pool in self._pools for role in pool.roles)

    def handle(self, role: str) -> RayHandle:
        pool = next(pool for pool in self._pools if role in pool.roles)
        return RayHandle(self._sender, pool, role)

    def states(self) -> list[WorkerState]:
        return [pool.state(slot.rank) for pool in self._pools for slot in pool.process_slots]

    def peaks(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for pool in self._pools:
            answers = list(pool.answers.values())
            reported = [answer.peak for answer in answers if answer.peak is not None]
            if reported:
                peaks |= dict.fromkeys(pool.roles, max(reported))
        return peaks

    def compiled(self) -> Compilations:
        answers = (answer for pool in self._pools for answer in list(pool.answers.values()))
        return sum((answer.compiled for answer in answers), Compilations())

    def profile(self, folder: Path | None, dtype: str, deadline: float) -> dict[str, RayFuture]:
        handles = [RayHandle(self._sender, pool, pool.roles[0]) for pool in self._pools]
        return {
            handle.pool.name: handle.call(PROFILE, folder, dtype, deadline=deadline)
            for handle in handles
        }

    # How they are looked after.

    def _supervise(self) -> None:
        notes: dict[str, Callable[..., None]] = {
            "report": self._reported,
            "answer": self._answered,
            "made": self._made,
        }
        asked = 0.0
        while self._sender.failure is None:
            try:
                with suppress(queue.Empty):
                    kind, *news = self._sender.news.get(timeout=0.2)
                    while True:
                        notes[kind](*news)
                        kind, *news = self._sender.news.get_nowait()
                for pool in self._pools:
                    with self._sender.lock:
                        self._sender.flush(pool)
                    # An error of one process, once no other has been heard to die.
                    if pool.doubt is not None and time.monotonic() - pool.doubt[0] > DOUBT_S:
                        raise pool.doubt[1]
                if time.monotonic() - asked > ASK_S:
                    asked = time.monotonic()
                    self._ask()
                    self._find_late()
            except (RunError, UserError) as error:
                self._sender.fail(error)
            except Exception as error:
                reported = f"the supervisor failed: {type(error).__name__}: {error}"
                self._sender.fail(RunError(reported))

    def _answered(
        self, pool: RayPool, life: int, rank: int, reported: Future[ProcessStatus]
    ) -> None:
        if life != pool.life or not pool.alive:
            return
        pool.asked.discard(rank)
        failed = reported.exception()
        if isinstance(failed, ActorDiedError):
            self._lose(pool, self._death(pool, rank, failed))
        if failed is not None:
            return
        answer, now = reported.result(), time.monotonic()
        shift = now - answer.state.heard  # from the clock of the process to this one's
        state = replace(answer.state, since=answer.state.since + shift, heard=now)
        pool.answers[rank] = replace(answer, state=state)
        if rank == 0:
            waits.mirror(pool.name, state.waits)
        for number, started in answer.running:
            future = self._sender.calls.get(number)
            if future is not None:
                future.times.started = started + shift

    def _reported(
        self, pool: RayPool, tries: int, rank: int, future: RayFuture, reported: Future[CallReport]
    ) -> None:
        if tries != future.tries or future.done():
            return  # of processes that are gone, or of a call that is sent again
        failed, call = reported.exception(), f"{future.role}.{future.method}"
        if failed is not None:
            if isinstance(failed, RayTaskError):
                raise WorkerError(f"{call} failed in {pool.state(rank).where}:\n{failed}")
            self._lose(pool, self._death(pool, rank, failed))
            return
        report = reported.result()
        error = report.error
        if report.stop is not None and self.stop_asked is None:
            message, by = report.stop
            self.stop_asked = StopTraining(message).from_code(by)
        if isinstance(error, Stopped):
            with self._sender.lock:
                self._drop(future, error)
            return
        if isinstance(error, InputLost):  # what its process has kept until then is in no other
            raise RunLost(
                f"an input of {call} was made, but is lost ({error}): its node may be gone"
            )
        if error is not None:
            if future.aside or (future.own_error and len(pool.process_slots) == 1):
                self._finished(future, error)
            elif len(pool.process_slots) > 1 and may_follow(error):
                pool.doubt = pool.doubt or (time.monotonic(), error)
            else:
                raise error
            return
        future.reports[rank] = report
        if len(future.reports) == len(pool.process_slots):
            self._finished(future, None)

    def _finished(self, future: RayFuture, error: BaseException | None) -> None:
        pool = future.pool
        if error is not None:
            for call in self._sender.unfinished():
                if future in call.inputs() and not call.own_error:
                    raise error
                if future in call.inputs():
                    self._finished(call, error)
        with self._sender.lock:
            if future.reports:
                first = future.reports[min(future.reports)].times
                now = time.monotonic()
                shift = now - (first.finished or now)
                future.times.finished = now
                future.times.started = now - first.seconds
                future.times.made_s, future.times.noted = first.made_s, first.noted
                future.times.moves = tuple(move.later(shift) for move in first.moves)
            stays = STATEFUL.get(future.role) == future.method and error is None
            if stays and not pool.trains:
                self._states[pool.index, future.role] = future
            self._sender.calls.pop(future.number, None)
            future.finish(error)
        if (future.role, future.method) == PROGRESS and error is None:
            self._restarts = 0

    def _drop(self, future: RayFuture, error: Stopped) -> None:
        """Ends a call without a value, with those unsent that need it, and those behind any of
        these in their pools. With the lock held."""
        self._sender.calls.pop(future.number, None)
        future.finish(error)
        future.pool.drops |= not future.aside
        for call in self._sender.unfinished():
            ordered = call.pool is future.pool and not (call.aside or future.aside)
            behind = ordered and call.number > future.number
            if not (call.refs or call.done()) and (behind or future in call.inputs()):
                self._drop(call, error)

    def settle(self) -> None:
        with self._sender.lock:
            for pool in self._pools:
                pool.drops = False

    def _ask(self) -> None:
        for pool in self._pools:
            if not pool.alive:
                continue
            released: list[int] = []
            while pool.released and not pool.asked:  # all of its processes hear of all
                released.append(pool.released.popleft())
            for rank, worker in enumerate(pool.workers):
                if rank not in pool.asked:
                    pool.asked.add(rank)
                    heard = partial(self._sender.hear, "answer", pool, pool.life, rank)
                    worker.answer.remote(released).future().add_done_callback(heard)

    def _find_late(self) -> None:
        awake_since = awake_clock().awake_since
        for pool in self._pools:
            if not pool.alive and awake_since(pool.born) > self._longest_s:
                raise RunLost(f"Ray has not answered while {pool.name} was restarted")
        for future in self._sender.unfinished():
            pool = future.pool
            if not pool.alive or not future.refs:
                continue
            begun = future.times.started
            if begun is None:
                heard = min(pool.state(slot.rank).heard for slot in pool.process_slots)
                if awake_since(heard) <= future.deadline:
                    continue
                begun = future.sent
            if awake_since(begun) > future.deadline:
                self._late(future, awake_since(begun))

    def _late(self, future: RayFuture, elapsed: float) -> None:
        pool = future.pool
        silent = [r for r in range(len(pool.process_slots)) if r not in future.reports]
        found = (diagnosis(pool, rank, future.number) for rank in silent)
        late = future.late(elapsed, "\n".join(found))
        if future.aside:  # it blocks no other, and who asked for it decides what it means
            self._finished(future, late)
            return
        if pool.trains or self._restarts >= self._config.max_restarts:
            kill([pool])
            raise RunLost(str(late)) if pool.trains else late
        self._log(str(late))
        self._lose(pool, f"{pool.name} was late")

    def _death(self, pool: RayPool, rank: int, error: BaseException) -> str:
        """Tells which process ended, in which call, and what Ray knows of it."""
        running = [f for f in self._sender.unfinished(pool) if f.refs and not f.aside]
        during = f" in {running[0].role}.{running[0].method}" if running else ""
        return f"{pool.state(rank).where} died{during}: {last_line(error)}"

    def _lose(self, pool: RayPool, why: str) -> None:
        waits.mirror(pool.name, ())
        kill([pool])
        if pool.trains:
            raise RunLost(why)
        check_nodes(pool)
        most = self._config.max_restarts
        self._restarts += 1
        if self._restarts > most:
            raise RunError(
                f"{why}\nworkers were restarted {most} times since the last trained step"
                " (ray.max_restarts): the run gives up"
            )
        self._log(f"{why}; restarting {pool.name} ({self._restarts} of {most})")
        with self._sender.lock:
            pool.life, pool.born = pool.life + 1, time.monotonic()
            for future in self._sender.unfinished(pool):
                future.unsend()

        def launch() -> None:
            error: BaseException | None = None
            try:
                with waiting(f"{pool.name}, which is restarted", most=self._longest_s):
                    self._launch([pool])
            except BaseException as failed:
                error = failed
            self._sender.news.put(("made", pool, error))

        self._begin(f"restart:{pool.name}", launch)  # the other pools go on meanwhile

    def _made(self, pool: RayPool, error: BaseException | None) -> None:
        if isinstance(error, NotStarted):
            self._lose(pool, str(error))
            return
        if error is not None:
            raise error
        with self._sender.lock:
            for key in [key for key in self._states if key[0] == pool.index]:
                again = replace(self._states.pop(key))  # not sent yet; the old one keeps its result
                self._sender.calls[again.number] = again
                # Also before calls that were asked for earlier: those that go on between others.
                self._sender.send(again)
            pool.alive = True
        self._log(f"{pool.name} is back after {time.monotonic() - pool.born:.1f} s")

    # How they end.

    def _lose_cluster(self, why: str) -> None:
        local_cluster.end_daemons()  # so that whoever waits for one hears of it
        self._sender.fail(RunLost(why))

    def _lose_head(self, why: str) -> None:
        """Notes the loss: workers and calls do without the head for a minute, time to save."""
        self.ending = why

    def stop(self) -> None:
        """Asks every process to end, then kills it. Who still waits for a call gets an error. Where
        Ray does not answer, they are ended without it, and the cluster is left."""
        self._guard.stop()
        self._sender.fail(Stopped("the run is over"))
        for pool in self._pools:
            waits.mirror(pool.name, ())
        end = time.monotonic() + JOIN_S
        for thread in [*self._threads]:
            if thread.is_alive():  # it may never have been started
                thread.join(max(0.0, end - time.monotonic()))
        answers = not self.ending and local_cluster.usable()
        if not (answers and local_cluster.call_within(self._end, END_S)):
            end_here(self._pools)
            local_cluster.leave(answers=False)

    def _end(self) -> None:
        for pool in self._pools:
            for worker in pool.workers:
                with suppress(RayError):
                    worker.stop.remote()
        kill(self._pools)
        if self._reserved is not None and local_cluster.in_cluster():
            with suppress(Exception):
                remove_placement_group(self._reserved)


def check_cause(value: object) -> None:
    """Raises the error that a process reports of a call, where it names a cause."""
    if isinstance(value, CallReport) and value.error is not None and not may_follow(value.error):
        raise value.error


def may_follow(error: Exception) -> bool:
    """Returns whether the end of another process may have caused an error: what XLA says of one
    that it computes with. Any other names what was wrong in its own process."""
    last = str(error).strip().splitlines()[-1:]
    return isinstance(error, WorkerError) and any(name in "".join(last) for name in OF_PEERS)


def worker_class(pool: str) -> ActorClass:
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
    return make_roles(placement, pool, jax.devices())[role]()


def check_nodes(pool: RayPool) -> None:
    """Raises `RunLost` where a pool cannot come back, since its node has left the cluster."""
    if local_cluster.started_here():  # its GCS, which Ray would ask, may be what has ended
        if (trouble := local_cluster.ended_daemon()) is not None:
            raise RunLost(trouble)
        return
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for slot in pool.process_slots:
        if slot.host.id not in alive:
            reported = f"the node {slot.host.name} ({slot.host.address}) of {pool.name} is gone"
            raise RunLost(reported)


def diagnosis(pool: RayPool, rank: int, number: int) -> str:
    """Tells what a process does, whose call of that number is late, as far as anybody can tell."""
    answer, state, found = pool.answers.get(rank), pool.state(rank), stacks(pool, rank, number)
    if answer is None:
        return f"{state.where} has never answered; {found}"
    ago = time.monotonic() - state.heard
    silent = f" (it last answered {ago:.1f} s ago)" if ago > SILENT_S else ""
    return state.diagnosis(answer.memory, found, silent)


def stacks(pool: RayPool, rank: int, number: int | None = None) -> str:
    """Returns the stacks of a process, from itself (`WorkerServer.stacks`) or, where it does not
    answer, from its host."""
    try:
        return ray.get(pool.workers[rank].stacks.remote(number), timeout=STACKS_S)
    except RayError:
        pass
    if rank >= len(pool.info):
        return "(it has never answered)"
    info = pool.info[rank]
    try:
        found = _there(pool, rank, examine_process, info.pid, info.stacks_file)
        if isinstance(found, ray.ObjectRef):
            found = ray.get(found, timeout=2 * STACKS_S)
        return str(found)
    except RayError as error:
        return f"its host does not answer ({type(error).__name__})"


def kill(pools: Sequence[RayPool]) -> None:
    """Ends their processes, stopped ones too."""
    asked: list[object] = []
    for pool in pools:
        pool.alive = False
    # Ray would wait for its GCS, and end this process then.
    if local_cluster.started_here() and not local_cluster.usable():
        end_here(pools)
        return
    for pool in pools:
        for rank, worker in enumerate(pool.workers):
            with suppress(Exception):
                ray.kill(worker, no_restart=True)
            if rank < len(pool.info):  # a stopped process does not hear Ray
                with suppress(Exception):
                    asked.append(_there(pool, rank, _end_process, pool.info[rank].pid))
    refs = [ref for ref in asked if isinstance(ref, ray.ObjectRef)]
    if refs:
        with suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=2 * STACKS_S)


def end_here(pools: Sequence[RayPool]) -> None:
    """Ends the processes that are on this host, without Ray."""
    for info in (info for pool in pools for info in pool.info):
        if info.host == socket.gethostname():
            _end_process(info.pid)


def _there(pool: RayPool, rank: int, function: Callable[..., object], *args: object) -> object:
    """Runs a function on the host of a process: its result, or where that will be. Hosts may have
    the same name, as containers often do: only the node's number tells them apart."""
    host = pool.process_slots[rank].host.id
    if host in ("", ray.get_runtime_context().get_node_id()):
        return function(*args)
    return on_node(host, function, *args)


def last_line(error: BaseException) -> str:
    """Returns the part of an error of Ray that tells."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _end_process(pid: int) -> None:
    """Kills the process of a worker, if the number is not another's by now."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if title.startswith(b"ray::jaxrl:"):
            os.kill(pid, signal.SIGKILL)
