"""A call to a pool: its future in the driver, and how its arguments travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from jaxrl.runtime.local import LocalFuture
from jaxrl.runtime.parcel import unpack
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.server import CallReport, InputLost, LocalRef
from jaxrl.runtime.worker import POLL_S, CallFuture, RunLost, Stopped, replaced

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


@dataclass(eq=False)
class RayFuture(CallFuture):
    """The result of one call to a pool."""

    end: End
    pool: RayPool
    number: int
    lock: Any
    """Of the sender: held by who decides whether the call is sent."""
    keeps: bool = False
    """Whether its result stays in the processes of its pool."""
    refs: list[ray.ObjectRef] = field(default_factory=list, init=False)
    """Of the results, one for each process; empty while unsent."""
    reports: dict[int, CallReport] = field(default_factory=dict, init=False)
    bounced: set[int] = field(default_factory=set, init=False)
    """Processes where an input was lost, so that it did not run."""
    settled: bool = field(default=False, init=False)
    """Whether its inputs existed when it was sent; if one is lost, no other call recreates it."""
    sent: float = field(default=0.0, init=False)
    tries: int = field(default=0, init=False)
    """Reports about an earlier one are ignored."""

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

    def _fetch(self) -> object:
        """The value, here in the driver; None where it is of no use outside its pool."""
        if self.keeps:
            return None
        try:
            return unpack(_get_all(self.refs, self.check), fetched)
        except RayError as error:
            raise RunLost(
                f"what {self.role}.{self.method} made is lost: {type(error).__name__}"
            ) from error

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

        def check() -> None:
            if stopping():
                raise InputLost("the run is over")

        try:
            parcels = _get_all(self.refs, check)
        except RayError as error:
            raise InputLost(f"what {self.role} made is lost: {type(error).__name__}") from error
        if any(parcel is None for parcel in parcels):
            raise InputLost(f"{self.role} did not make it")
        return unpack(parcels, fetched)


def _get_all(refs: Sequence[ray.ObjectRef], check: Callable[[], None]) -> list[Any]:
    """What processes packed, or None for one that did not; `check` may end the wait."""
    waiting = list(refs)
    while waiting:
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        check()
    return [ray.get(ref, timeout=FETCH_S) for ref in refs]


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
