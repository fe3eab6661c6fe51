"""Pools, and the calls to them: their futures in the driver, how arguments travel, and when each
call is sent.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from jaxrl.errors import Stopped
from jaxrl.process.awake_clock import awake_clock
from jaxrl.runtime.cluster import ProcessSlot
from jaxrl.runtime.role_server import (
    STARTING,
    CallReport,
    CallRequest,
    InputLost,
    LocalRef,
    ProcessInfo,
    ProcessStatus,
)
from jaxrl.runtime.serialization import unpack
from jaxrl.runtime.worker import (
    POLL_S,
    Future,
    LocalFuture,
    RunLost,
    WorkerState,
    map_leaves,
)

LOCK_S = 5.0
"""Longest wait for the lock at the end of a run; Ray may keep who holds it, once a daemon of the
cluster is gone."""
FETCH_S = 60.0
"""Longest wait for one bucket of arrays."""
STATEFUL = {"rollout": "load", "teacher": "load", "reward": "use"}
"""Role -> the call that makes its state: the last one is sent again to a new process."""
STAYS = {
    ("actor", "publish"): "rollout",
    ("actor", "publish_to_teacher"): "teacher",
    ("teacher", "score"): "actor",
}
"""Call -> the one role that reads its result: in one pool with it, nothing leaves the process."""


@dataclass(eq=False)
class RayPool:
    """The processes that share the devices of one pool."""

    index: int
    name: str
    roles: tuple[str, ...]
    process_slots: tuple[ProcessSlot, ...]
    workers: list[Any] = field(default_factory=list)
    """Ray actors, by rank."""
    info: list[ProcessInfo] = field(default_factory=list)
    """Of the processes that there are; empty while they start."""
    answers: dict[int, ProcessStatus] = field(default_factory=dict)
    """Rank -> what it last said."""
    asked: set[int] = field(default_factory=set)
    """Ranks that have been asked, and have not answered."""
    born: float = 0.0
    life: int = 0
    """How many times its processes were restarted."""
    position: int = 0
    """Of the next call, in the order of its processes."""
    alive: bool = False
    drops: bool = False
    """Whether a call of the queue was dropped, and with it those that come after, until the driver
    knows (`WorkerGroup.settle`)."""
    doubt: tuple[float, BaseException] | None = None
    """An error that another process's death may have caused, and when it was reported."""
    released: deque[int] = field(default_factory=deque)
    """Results that stay in its processes, and that nobody needs any more."""

    @property
    def trains(self) -> bool:
        return "actor" in self.roles

    def label(self, rank: int) -> str:
        return self.name if len(self.process_slots) == 1 else f"{self.name}.{rank}"

    def state(self, rank: int) -> WorkerState:
        """Tells what a process does, as far as it was heard; `heard` is when it was started, if it
        never was."""
        host, pid, names = self.process_slots[rank].host.name, 0, tuple[str, ...]()
        if rank < len(self.info):
            info = self.info[rank]
            host, pid, names = info.host, info.pid, tuple(name for name, _ in info.devices)
        about = self.label(rank), host, pid, self.roles, names
        answer = self.answers.get(rank)
        if answer is None:
            return WorkerState(*about, STARTING, "", self.born, self.born, self.life)
        state = answer.state
        phase, compiling = (state.phase, state.compiling) if self.alive else ("died", "")
        times = state.detail, state.since, state.heard
        return WorkerState(*about, phase, *times, self.life, compiling)


@dataclass(eq=False)
class RayFuture(Future[Any]):
    """The result of one call to a pool."""

    sender: Sender
    pool: RayPool
    number: int
    keeps: bool = False
    """Whether its result stays in the processes of its pool."""
    refs: list[ray.ObjectRef] = field(default_factory=list, init=False)
    """Of the results, one for each process; empty while unsent."""
    reports: dict[int, CallReport] = field(default_factory=dict, init=False)
    sent: float = field(default=0.0, init=False)
    tries: int = field(default=0, init=False)
    """Reports about an earlier one are ignored."""

    def cancel(self) -> bool:
        """Cancels a call that was not sent (`Future.cancel`). One that was counts as begun, since
        the processes of a pool might not agree."""
        with self.sender.lock:
            if self.refs or self.done():
                return False
            self.finish(Stopped("the run was asked to end before this call began"))
            return True

    def consume(self) -> RayFuture:
        return self  # each reader has a copy of its own

    def check(self) -> None:
        self.sender.check()

    def result(self) -> Any:
        """Waits for the value and fetches it into the driver (`Future.result`); None where it is of
        no use outside its pool."""
        super().result()
        if self.keeps:
            return None
        try:
            return unpack(_get_all(self.refs, self.check), fetch)
        except RayError as error:
            raise RunLost(
                f"what {self.role}.{self.method} made is lost: {type(error).__name__}"
            ) from error

    def unsend(self) -> None:
        """Forgets that it was sent: its processes are gone."""
        self.refs, self.reports = [], {}
        self.times.started = None
        self.tries += 1

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        if STATEFUL.get(self.role) != self.method:  # never sent again
            self.args, self.kwargs = (), {}
        self._done.set()


@dataclass(frozen=True)
class RemoteRef:
    """An argument that another pool made."""

    role: str
    refs: tuple[ray.ObjectRef, ...]

    def arrive(self) -> object:
        """Fetches it into the process that needs it: it was made before the call was sent."""
        began, awake_since = time.monotonic(), awake_clock().awake_since

        def check() -> None:
            if awake_since(began) > FETCH_S:
                raise InputLost(f"what {self.role} made has not arrived within {FETCH_S:g} s")

        try:
            return unpack(_get_all(self.refs, check), fetch)
        except RayError as error:
            raise InputLost(f"what {self.role} made is lost: {type(error).__name__}") from error


def _get_all(refs: Sequence[ray.ObjectRef], check: Callable[[], None]) -> list[Any]:
    """Fetches the parcels of processes; `check` may end the wait."""
    waiting = list(refs)
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        check()
    return [ray.get(ref, timeout=FETCH_S) for ref in refs]


def fetch(place: object) -> Any:
    """Fetches the value at a place in a parcel."""
    if not isinstance(place, ray.ObjectRef):
        return place  # in the parcel itself
    try:
        return ray.get(place, timeout=FETCH_S)
    except RayError as error:
        raise InputLost(f"arrays on their way are lost: {type(error).__name__}") from error


def wire(values: object, pool: RayPool) -> Any:
    """Returns arguments with every future as the place of its value."""

    def place(value: object) -> object:
        if isinstance(value, RayFuture):
            if value.pool is pool and value.keeps:
                return LocalRef(value.number)
            return RemoteRef(value.role, tuple(value.refs))
        if isinstance(value, LocalFuture):
            return value.result()  # the driver's own, which is there
        return value

    return map_leaves(values, place)


class Sender:
    """Sends each call once its inputs are there, so that no loss of the process that made one is
    its own; those of a pool in the order of asking."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """Why the workers cannot continue; all waits look at it."""
        self.lock = threading.RLock()
        """Around the calls, and what of a pool and of a call decides whether it may be sent."""
        self.news: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """(kind, ...) of what processes reported."""
        self.numbers = itertools.count(1)
        """Those of the next calls. With the lock held."""
        self.calls: dict[int, RayFuture] = {}
        """Those that have not ended, by number. Changed with the lock held."""

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """Ends all calls: whoever waits gets the first error. Where the thread with the lock
        does not come back from Ray, they find it by themselves (`check`)."""
        self.failure = self.failure or error
        if not self.lock.acquire(timeout=LOCK_S):
            return
        try:
            for future in self.calls.values():
                future.finish(self.failure)
            self.calls.clear()
        finally:
            self.lock.release()

    def flush(self, pool: RayPool) -> None:
        """Sends what is unsent, in order, up to the first call whose inputs are not there yet.
        With the lock held."""
        for future in self.unfinished(pool) if pool.alive else ():
            if future.refs:
                continue
            # What stays in the processes is there by the order of their calls.
            if all(
                needed.done() or (needed.keeps and needed.pool is pool and needed.refs)
                for needed in future.inputs()
            ):
                self.send(future)
            elif not future.aside:
                return

    def unfinished(self, pool: RayPool | None = None) -> list[RayFuture]:
        """Returns calls that have not ended, in the order in which they were asked for."""
        with self.lock:
            calls = sorted(self.calls.items())
        return [f for _, f in calls if pool in (f.pool, None) and not f.done()]

    def send(self, future: RayFuture) -> None:
        """Sends a call whose inputs are there to the processes of its pool. With the lock held."""
        pool = future.pool
        position = -1
        if not future.aside:
            position, pool.position = pool.position, pool.position + 1
        request = CallRequest(
            number=future.number,
            position=position,
            role=future.role,
            method=future.method,
            args=tuple(wire(list(future.args), pool)),
            kwargs=wire(dict(future.kwargs), pool),
            keeps=future.keeps,
            stores=pool.trains and not future.keeps,
        )
        future.unsend()
        future.sent = time.monotonic()
        # Of several processes each reads the one copy in the object store of its host.
        sent: Any = ray.put(request) if len(pool.workers) > 1 else request
        for rank, worker in enumerate(pool.workers):
            report, value = worker.run.remote(sent)
            future.refs.append(value)
            heard = partial(self.hear, "report", pool, future.tries, rank, future)
            report.future().add_done_callback(heard)

    def hear(self, kind: str, *news: object) -> None:
        """Notes what a process reported; on a thread of Ray."""
        self.news.put((kind, *news))
