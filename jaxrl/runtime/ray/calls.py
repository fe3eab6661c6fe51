"""A call to a pool: its future in the driver, and how its arguments travel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from jaxrl.runtime.local import POLL_S, LocalFuture
from jaxrl.runtime.parcel import unpack
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.server import KINDS, CallReport, InputLost, LocalRef
from jaxrl.runtime.worker import RunLost, Stopped, Times, leaves, replaced

FETCH_S = 60.0
"""Longest wait for one bucket of arrays."""
STATEFUL = {"rollout": "load", "teacher": "load"}
"""Role -> the call that makes its state: the last one is sent again to a new process."""
STAYS = {
    ("actor", "publish"): "rollout",
    ("actor", "publish_to_teacher"): "teacher",
    ("teacher", "score"): "actor",
}
"""Call -> the one role that reads its result: in one pool with it, nothing leaves the process."""


@dataclass
class End:
    """Whether the workers can continue; all waits share it."""

    failure: BaseException | None = None
    """Why not."""
    came: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class RayFuture:
    """The result of one call to a pool."""

    end: End
    pool: RayPool
    role: str
    method: str
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    deadline: float
    aside: bool
    number: int
    times: Times = field(default_factory=Times)
    refs: list[ray.ObjectRef] = field(default_factory=list)
    """Of the results, one for each process; empty while unsent."""
    reports: dict[int, CallReport] = field(default_factory=dict)
    bounced: set[int] = field(default_factory=set)
    """Processes where an input was lost, so that it did not run."""
    settled: bool = False
    """Whether its inputs existed when it was sent; if one is lost, no other call recreates it."""
    keeps: bool = False
    nbytes: int = 0
    sent: float = 0.0
    tries: int = 0
    """Reports about an earlier one are ignored."""
    lock: Any = field(default_factory=threading.RLock)
    """Of the sender: held by who decides whether the call is sent."""
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def cancel(self) -> bool:
        """A call that was sent counts as begun: else the processes of a pool might not agree."""
        with self.lock:
            if self.refs or self.done():
                return False
            self.finish(Stopped("the run was asked to end before this call began"))
            return True

    def consume(self) -> RayFuture:
        return self  # each reader has a copy of its own

    def check(self) -> None:
        if self.end.failure is not None:
            raise self.end.failure

    def result(self) -> Any:
        while not self._done.wait(POLL_S):
            self.check()
        if self._error is not None:
            raise self._error
        if self.keeps:
            return None  # of no use outside its pool
        return self._fetch()

    def _fetch(self) -> object:
        """The value of a call that has ended, here in the driver."""
        waiting = list(self.refs)
        while waiting:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            self.check()
        try:
            return unpack([ray.get(ref, timeout=FETCH_S) for ref in self.refs], fetched)
        except RayError as error:
            raise RunLost(
                f"what {self.role}.{self.method} made is lost: {type(error).__name__}"
            ) from error

    def inputs(self) -> list[RayFuture]:
        values = leaves([list(self.args), dict(self.kwargs)])
        return [value for value in values if isinstance(value, RayFuture)]

    def again(self) -> RayFuture:
        """The same call, not sent yet; this one keeps its result."""
        return RayFuture(
            self.end,
            self.pool,
            self.role,
            self.method,
            self.args,
            self.kwargs,
            self.deadline,
            self.aside,
            self.number,
        )

    def unsend(self) -> None:
        """Forgets that it was sent: its processes are gone, or could not run it."""
        self.refs, self.reports, self.bounced = [], {}, set()
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

    number: int
    role: str
    refs: tuple[ray.ObjectRef, ...]

    def arrive(self, stopping: Callable[[], bool]) -> object:
        """Waits in the process that needs it; the driver bounds the wait."""
        waiting = list(self.refs)
        try:
            while waiting:
                _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
                if stopping():
                    raise InputLost("the run is over")
            parcels = [ray.get(ref, timeout=FETCH_S) for ref in self.refs]
        except RayError as error:
            raise InputLost(f"what {self.role} made is lost: {type(error).__name__}") from error
        if any(parcel is None for parcel in parcels):
            raise InputLost(f"{self.role} did not make it")
        return unpack(parcels, fetched)


def fetched(place: object) -> Any:
    """What lies at a place in a parcel."""
    if not isinstance(place, ray.ObjectRef):
        return place  # in the parcel itself
    try:
        return ray.get(place, timeout=FETCH_S)
    except RayError as error:
        raise InputLost(f"arrays on their way are lost: {type(error).__name__}") from error


def wire(values: object, pool: RayPool) -> Any:
    """Arguments with every future as the place of its value."""

    def place(value: object) -> object:
        if isinstance(value, RayFuture):
            if value.pool is pool and value.keeps:
                return LocalRef(value.number)
            return RemoteRef(value.number, value.role, tuple(value.refs))
        if isinstance(value, LocalFuture):
            return value.result()  # the driver's own, which is there
        return value

    return replaced(values, place)


def raised(error: tuple[str, str]) -> BaseException:
    """The exception for the error in a report."""
    kind, text = error
    return KINDS[kind](text)
