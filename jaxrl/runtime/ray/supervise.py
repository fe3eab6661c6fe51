"""The thread that supervises the processes of a run: it handles their reports, enforces deadlines,
and restarts processes that are lost."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ray.exceptions import ActorDiedError, RayTaskError

from jaxrl.config.settings import RayConfig
from jaxrl.errors import RunError, UserError
from jaxrl.runtime.ray.hosts import check_nodes, diagnosis, kill, last_line
from jaxrl.runtime.ray.remote_calls import STATEFUL, RayFuture, RayPool, Sender
from jaxrl.runtime.role_server import CallReport, InputLost, ProcessStatus
from jaxrl.runtime.worker import RunLost, WorkerError, wall_clock

Log = Callable[[str], None]
ASK_S = 1.0
"""Seconds between two questions to a worker about its state."""
DOUBT_S = 3.0
"""How long the error of one process of several waits for the news that another has died: who
computes with a process that dies sees an error of its own, and may be heard first."""
TOGETHER_S = 5.0
"""Seconds after the first process of a pool has reported a lost input within which the others must
have reported it."""
PROGRESS = ("actor", "update")
"""The call that resets the count of restarts."""
JOIN_S = 5.0
"""Longest wait at the end for all threads together."""


class NotStarted(RunError):
    """A process ended, or hung, while it started."""


class NeverRan(NotStarted):
    """A process ended before Ray knew it, or has never answered."""


class Supervisor:
    """Looks after the processes of a run until its end."""

    def __init__(
        self,
        config: RayConfig,
        sender: Sender,
        pools: Sequence[RayPool],
        log: Log,
        launch: Callable[[Sequence[RayPool]], None],
        longest_s: float,
    ):
        """
        Args:
            launch: starts new processes for these pools, with their roles.
            longest_s: after so many seconds Ray itself does not answer.
        """
        self._config, self._sender, self._pools, self._log = config, sender, pools, log
        self._launch, self._longest_s = launch, longest_s
        self._restarts = 0
        """Since the last update of the policy."""
        self._states: dict[tuple[int, str], RayFuture] = {}
        """Pool and role -> the call that made its state, if it can be repeated."""
        self._threads = [threading.Thread(target=self._tend, name="supervisor", daemon=True)]

    def start(self) -> None:
        """Begins, once the pools have started."""
        self._threads[0].start()

    def join(self) -> None:
        """Waits for the threads, after the end."""
        end = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))

    def _tend(self) -> None:
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
                    self._bring_back(pool)
                    with self._sender.lock:
                        self._sender.flush(pool)
                    self._check_doubt(pool)
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
            self._lost(pool, self._death(pool, rank, failed))
        if failed is not None:
            return
        now = time.monotonic()
        answer = reported.result()
        shift = now - answer.at  # from the clock of the process to this one's
        phase = replace(answer.phase, since=answer.phase.since + shift)
        pool.answers[rank] = replace(answer, at=now, phase=phase)
        for number, started in answer.running:
            future = self._sender.calls.get(number)
            if future is not None and future.times.started is None:
                future.times.started = started + shift

    def _reported(
        self, pool: RayPool, tries: int, rank: int, future: RayFuture, reported: Future[CallReport]
    ) -> None:
        if tries != future.tries or future.done():
            return  # of processes that are gone, or of a call that is sent again
        failed = reported.exception()
        if failed is not None:
            call = f"{future.role}.{future.method}"
            if isinstance(failed, RayTaskError):
                raise WorkerError(f"{call} failed in {pool.where(rank)}:\n{failed}")
            self._lost(pool, self._death(pool, rank, failed))
            return
        report = reported.result()
        now, error = time.monotonic(), report.error
        if isinstance(error, InputLost):
            future.bounced.add(rank)
            if not future.aside:
                pool.lost_at = pool.lost_at or now
            elif len(future.bounced) == len(pool.process_slots):  # it blocks no other
                self._check_settled(future)
                future.unsend()
            return
        if error is not None:
            if future.aside:
                self._finished(future, error)
            elif len(pool.process_slots) > 1 and isinstance(error, WorkerError):
                pool.doubt = pool.doubt or (now, error)
            else:
                raise error
            return
        future.reports[rank] = report
        if len(future.reports) == len(pool.process_slots):
            self._finished(future, None)

    def _finished(self, future: RayFuture, error: BaseException | None) -> None:
        pool = future.pool
        if error is not None and any(future in call.inputs() for call in self._sender.unfinished()):
            raise error
        with self._sender.lock:
            if future.reports:
                first = future.reports[min(future.reports)].times
                now = time.monotonic()
                shift = now - (first.finished or now)
                future.times.finished = now
                future.times.started = now - first.seconds
                future.times.made_s = first.made_s
                future.times.moves = tuple(move.later(shift) for move in first.moves)
            if STATEFUL.get(future.role) == future.method and not pool.trains:
                self._states[pool.index, future.role] = future
            self._sender.calls.pop(future.number, None)
            future.finish(error)
        if (future.role, future.method) == PROGRESS and error is None:
            self._restarts = 0

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
        awake_since = wall_clock().awake_since
        for pool in self._pools:
            if not pool.alive and awake_since(pool.born) > self._longest_s:
                raise RunLost(f"Ray has not answered while {pool.name} was restarted")
        for future in self._sender.unfinished():
            pool = future.pool
            if not pool.alive or not future.refs:
                continue
            begun = future.times.started
            if begun is None:
                heard = min(pool.heard(slot.rank) for slot in pool.process_slots)
                if awake_since(heard) <= future.deadline:
                    continue
                begun = future.sent
            if awake_since(begun) > future.deadline:
                self._late(future, awake_since(begun))

    def _late(self, future: RayFuture, elapsed: float) -> None:
        pool = future.pool
        silent = [r for r in range(len(pool.process_slots)) if r not in future.reports]
        late = future.late(elapsed, "\n".join(diagnosis(pool, rank) for rank in silent))
        if future.aside:  # it blocks no other, and who asked for it decides what it means
            self._finished(future, late)
            return
        if pool.trains or self._restarts >= self._config.max_restarts:
            kill([pool])
            raise RunLost(str(late)) if pool.trains else late
        self._log(str(late))
        self._lost(pool, f"{pool.name} was late")

    def _death(self, pool: RayPool, rank: int, error: BaseException) -> str:
        """Tells which process ended, in which call, and what Ray knows of it."""
        running = [f for f in self._sender.unfinished(pool) if f.refs and not f.aside]
        during = f" in {running[0].role}.{running[0].method}" if running else ""
        return f"{pool.where(rank)} died{during}: {last_line(error)}"

    def _lost(self, pool: RayPool, why: str) -> None:
        """Handles a process that has ended or does not answer: its pool cannot continue."""
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
        thread = threading.Thread(
            target=self._restart_pool, args=(pool,), name=f"restart:{pool.name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _restart_pool(self, pool: RayPool) -> None:
        """Restarts a pool, on a separate thread so that the other pools continue."""
        error: BaseException | None = None
        try:
            self._launch([pool])
        except BaseException as failed:
            error = failed
        self._sender.news.put(("made", pool, error))

    def _made(self, pool: RayPool, error: BaseException | None) -> None:
        if isinstance(error, NotStarted):
            self._lost(pool, str(error))
            return
        if error is not None:
            raise error
        with self._sender.lock:
            for key in [key for key in self._states if key[0] == pool.index]:
                again = replace(self._states.pop(key))  # not sent yet; the old one keeps its result
                self._sender.calls[again.number] = again
            pool.alive = True
        self._log(f"{pool.name} is back after {time.monotonic() - pool.born:.1f} s")

    def _bring_back(self, pool: RayPool) -> None:
        """Unsends, after a lost input, every call that did not run, once all have ended."""
        if pool.lost_at is None or not pool.alive:
            return
        n = len(pool.process_slots)
        sent = [
            future for future in self._sender.unfinished(pool) if future.refs and not future.aside
        ]
        if sent and not sent[0].bounced:  # one before is still at work
            pool.lost_at = time.monotonic()
            return
        apart = any(future.bounced and future.reports for future in sent)
        if not apart and any(len(future.bounced) < n for future in sent):
            apart = n > 1 and time.monotonic() - pool.lost_at > TOGETHER_S
            if not apart:
                return
        if apart:
            self._lost(pool, f"only some processes of {pool.name} got the input of a call")
            return
        for future in sent[:1]:
            self._check_settled(future)
        with self._sender.lock:
            pool.epoch, pool.position, pool.lost_at = pool.epoch + 1, 0, None
            for future in sent:
                future.unsend()

    def _check_doubt(self, pool: RayPool) -> None:
        """Raises an error of one process once no other has been heard to die."""
        if pool.doubt is not None and time.monotonic() - pool.doubt[0] > DOUBT_S:
            raise pool.doubt[1]

    def _check_settled(self, future: RayFuture) -> None:
        """Raises where no call makes the lost input of this one again."""
        if future.settled:
            call = f"{future.role}.{future.method}"
            raise RunLost(f"an input of {call} was made, but is lost: its node may be gone")
