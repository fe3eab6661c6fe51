"""The calls of a run that have not ended, and when each is sent to its processes."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from functools import partial
from typing import Any

from jaxrl.runtime.ray.calls import RayFuture, wire
from jaxrl.runtime.ray.pool import RayPool
from jaxrl.runtime.server import CallRequest

LOCK_S = 5.0
"""Longest wait for the lock at the end of a run; Ray may keep who holds it, once a daemon of the
cluster is gone."""


class Sender:
    """Sends each call once its inputs can be had; those of a pool in the order of asking."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Around the calls, and what of a pool and of a call decides whether it may be sent."""
        self.news: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """(kind, ...) of what processes reported."""
        self.numbers = itertools.count(1)
        """Those of the next calls. With the lock held."""
        self._calls: dict[int, RayFuture] = {}
        """By number, so in the order in which they were asked for."""

    def add(self, future: RayFuture) -> None:
        """With the lock held."""
        self._calls[future.number] = future

    def remove(self, future: RayFuture) -> None:
        """It has ended. With the lock held."""
        self._calls.pop(future.number, None)

    def find(self, number: int) -> RayFuture | None:
        """One that has not ended."""
        return self._calls.get(number)

    def fail(self, error: BaseException) -> None:
        """Ends all of them. Where the thread with the lock does not come back from Ray, whoever
        waits finds the failure of the run by itself (`RayFuture.check`).
        """
        if not self.lock.acquire(timeout=LOCK_S):
            return
        try:
            for future in self._calls.values():
                future.finish(error)
            self._calls.clear()
        finally:
            self.lock.release()

    def flush(self, pool: RayPool) -> None:
        """Sends what is unsent, in order, up to the first call whose inputs cannot be had yet.
        With the lock held.
        """
        if not pool.alive or pool.lost_at is not None:
            return
        for future in self.unfinished(pool):
            if future.refs:
                continue
            if all(self._available(needed) for needed in future.inputs()):
                self._send(future)
            elif not future.aside:
                return

    def unfinished(self, pool: RayPool | None = None) -> list[RayFuture]:
        """In the order in which they were asked for."""
        with self.lock:
            calls = sorted(self._calls.items())
        return [f for _, f in calls if pool in (f.pool, None) and not f.done()]

    def _available(self, future: RayFuture) -> bool:
        return future.done() or (
            bool(future.refs) and future.pool.alive and future.pool.lost_at is None
        )

    def _send(self, future: RayFuture) -> None:
        """To every process of the pool."""
        pool = future.pool
        position = -1
        if not future.aside:
            position, pool.position = pool.position, pool.position + 1
        request = CallRequest(
            number=future.number,
            epoch=pool.epoch,
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
        future.settled = all(needed.done() for needed in future.inputs())
        for rank, worker in enumerate(pool.workers):
            report, value = worker.run.remote(request)
            future.refs.append(value)
            heard = partial(self.hear, "report", pool, future.tries, rank, future)
            report.future().add_done_callback(heard)

    def hear(self, kind: str, *news: object) -> None:
        """On a thread of Ray: only notes it."""
        self.news.put((kind, *news))
