"""A call: in order, with futures as arguments, with every wait bounded and every error told."""

import gc
import threading
import time
import weakref
from typing import Protocol

import jax
import numpy as np
import pytest

from jaxrl.errors import RunError, UserError
from jaxrl.process.compilations import Compilations
from jaxrl.runtime.worker import (
    DeadlineExceeded,
    Later,
    LocalWorker,
    LocalWorkerGroup,
    Stopped,
    WorkerError,
    detail,
    done_future,
    phase,
    stop_all,
)


class Role:
    def __init__(self):
        self.calls = []
        self.release = threading.Event()

    def add(self, a, b=0):
        self.calls.append(a)
        return a + b

    def size(self, array):
        return array.size

    def fail(self, message):
        raise ZeroDivisionError(message)

    def refuse(self):
        raise UserError("batch_size=0 must be at least 1")

    def count_to(self, end, fails=False):
        """Goes on between other calls, one number at a time, together with others of its kind."""
        self.counts = getattr(self, "counts", {})
        self.counts[end] = 0

        def work():
            time.sleep(0.002)
            for end in self.counts:
                self.counts[end] += 1
                if fails and self.counts[end] == 3:
                    raise ZeroDivisionError("at three")

        return Later(work, lambda: self.counts[end] if self.counts[end] >= end else None)

    def sleep(self, seconds):
        time.sleep(seconds)

    def counted(self):
        return dict(self.counts)

    def hang(self):
        with phase("waiting for a collective"):
            detail("3 of 4 done")
            self.release.wait(30)
        return "late"


@pytest.fixture
def worker():
    worker = LocalWorker("rollout")
    role = Role()
    worker.start_role("rollout", lambda: role, deadline=5).result()
    yield worker, worker.handle("rollout"), role
    role.release.set()
    assert worker.stop(5)


def other_worker(name):
    worker = LocalWorker(name)
    worker.start_role(name, Role, deadline=5).result()
    return worker.handle(name)


def test_calls_run_in_order_and_futures_are_arguments(worker):
    _, handle, role = worker
    teacher = other_worker("teacher")
    first = teacher.call("add", 1, b=2, deadline=5)
    second = handle.call("add", first, b=done_future(10), deadline=5)
    third = handle.call("add", 7, deadline=5)
    assert (third.result(), second.result()) == (7, 13)
    assert role.calls == [3, 7]
    assert second.done() and second.times.seconds >= 0


def test_an_exception_arrives_at_once_with_the_worker_s_traceback(worker):
    _, handle, _ = worker
    start = time.monotonic()
    failed = handle.call("fail", "boom", deadline=600)
    dependent = other_worker("actor").call("add", failed, deadline=600)
    for future in (failed, dependent):
        with pytest.raises(WorkerError, match=r"rollout.fail failed in worker rollout") as error:
            future.result()
        assert "ZeroDivisionError: boom" in str(error.value) and "def fail" not in str(error.value)
        assert "line" in str(error.value)
    assert time.monotonic() - start < 5
    assert handle.call("add", 4, deadline=5).result() == 4  # the worker goes on


def test_an_error_that_is_the_caller_s_own_ends_nothing(worker):
    """Nor does that of a call that needed the value, and is its caller's own too."""
    group, handle, _ = worker
    failed = handle.call("fail", "boom", deadline=5, own_error=True)
    needs = handle.call("add", failed, deadline=5, own_error=True)
    for future in (failed, needs):
        with pytest.raises(WorkerError, match="boom"):
            future.result()
        assert isinstance(future.error, WorkerError)
        future.check()
    assert handle.call("add", 4, deadline=5).result() == 4 and group.failure is None


def test_a_user_s_mistake_stays_short(worker):
    with pytest.raises(UserError, match="^batch_size=0 must be at least 1$"):
        worker[1].call("refuse", deadline=5).result()


@pytest.mark.parametrize("aside", [False, True])
def test_a_missed_deadline_says_who_what_how_long_and_where(worker, aside):
    _, handle, _ = worker
    with pytest.raises(DeadlineExceeded) as error:
        handle.call("hang", deadline=0.3, aside=aside).result()
    text = str(error.value)
    assert "rollout.hang has run for" in text and "its deadline is 0.3 s" in text
    assert "pid" in text and "phase 'rollout.hang: waiting for a collective'" in text
    assert "in hang" in text and "device memory" in text and ", 3 of 4 done" in text


def test_the_late_call_is_named_not_those_that_wait_for_it(worker):
    """A call queued behind a late one, and one whose argument is late, both blame the late one."""
    _, handle, _ = worker
    late = handle.call("hang", deadline=0.3)
    queued = handle.call("add", 1, deadline=600)
    waiting = other_worker("actor").call("add", late, deadline=600)
    for future in (queued, waiting):
        with pytest.raises(DeadlineExceeded, match="rollout.hang has run"):
            future.result()


def test_time_in_the_queue_does_not_count(worker):
    _, handle, role = worker
    handle.call("hang", deadline=600)
    queued = handle.call("add", 5, deadline=0.2)
    time.sleep(0.6)
    queued.check()
    role.release.set()
    assert queued.result() == 5


def test_roles_start_side_by_side():
    barrier = threading.Barrier(2, timeout=10)
    workers = [LocalWorker(name) for name in ("a", "b")]
    started = [w.start_role(w.name, barrier.wait, deadline=10) for w in workers]
    for future in started:
        future.result()  # each start waits for the other one


def test_a_finished_call_keeps_no_argument_alive(worker):
    _, handle, _ = worker
    future = handle.call("add", 3, deadline=5)
    assert future.result() == 3
    time.sleep(0.05)
    assert future.args == () and future.kwargs == {}


def test_whoever_waits_hears_of_the_first_failure_of_the_crew():
    worker_group = []
    workers = [LocalWorker(name, worker_group=worker_group) for name in ("actor", "rollout")]
    roles = [Role(), Role()]
    for worker, role in zip(workers, roles, strict=True):
        worker.start_role(worker.name, lambda role=role: role, deadline=5).result()
    slow = workers[0].handle("actor").call("hang", deadline=600)
    workers[1].handle("rollout").call("fail", "elsewhere", deadline=600)
    with pytest.raises(WorkerError, match="elsewhere"):
        slow.result()
    roles[0].release.set()
    assert stop_all(workers, 5)


def test_stopping_drops_the_calls_that_wait(worker):
    owner, handle, role = worker
    handle.call("hang", deadline=600)
    queued = handle.call("add", 1, deadline=600)
    while "hang" not in owner.phase.name:
        time.sleep(0.01)
    assert not owner.stop(0.1)
    role.release.set()
    with pytest.raises(Stopped):
        queued.result()
    assert role.calls == []


def test_a_value_taken_once_is_dropped(worker):
    _, handle, _ = worker
    big = np.zeros(1000)
    alive = weakref.ref(big)
    value = done_future(big)
    del big
    assert handle.call("size", value.consume(), deadline=5).result() == 1000
    handle.call("add", 1, deadline=5).result()
    gc.collect()
    assert alive() is None


def test_a_call_that_has_not_begun_can_be_cancelled_and_one_that_runs_cannot(worker):
    """Also one that the worker holds already, while it waits for its argument."""
    owner, handle, role = worker
    running = handle.call("hang", deadline=600)
    waiting = other_worker("actor")
    taken = waiting.call("add", running, deadline=600)
    queued = [handle.call("add", 1, deadline=600), waiting.call("add", taken, deadline=600)]
    while "hang" not in owner.phase.name or "waiting" not in waiting.worker.phase.name:
        time.sleep(0.01)
    assert not running.cancel()
    assert all(future.cancel() for future in [*reversed(queued), taken])
    for future in (*queued, taken):
        with pytest.raises(Stopped):
            future.result()
    role.release.set()
    assert running.result() == "late" and not running.cancel()
    assert role.calls == [] and waiting.worker.failure is None
    assert waiting.call("add", 5, deadline=600).result() == 5


def test_calls_that_go_on_between_others_end_when_they_have_their_value(worker):
    """Others come in between, and one whose argument is not there yet holds nothing up."""
    local, handle, role = worker
    other = other_worker("teacher")
    release, never = threading.Event(), 10**9
    long, short = (handle.call("count_to", n, deadline=60) for n in (never, 5))
    other.worker._roles["teacher"].size = lambda array: release.wait(5) and 3
    slow = other.call("size", np.zeros(1), deadline=5)
    behind = handle.call("add", slow, deadline=5)
    assert short.result() >= 5 and not long.done() and not behind.done()
    assert local.state().phase.startswith("rollout.count_to") or local.state().phase == "idle"
    between = handle.call("counted", deadline=5)
    assert not between.wait(0.05)  # in order: what waits for its argument is before it
    release.set()
    assert behind.result() == 3 and 0 < between.result()[never] < never
    assert not long.done() and not behind.cancel()
    role.counts[never] = never
    assert long.result() >= never
    assert short.times.finished <= long.times.started  # their seconds are counted once


def test_the_seconds_of_calls_that_go_on_are_counted_once(worker):
    """Whichever ends first, and whatever comes in between: together they are those of the worker,
    and what comes in between makes none of them late."""
    local, handle, role = worker
    begun = time.monotonic()
    calls = [handle.call("count_to", n, deadline=1.0) for n in (30, 10)]
    calls += [handle.call("sleep", 1.2, deadline=5), handle.call("count_to", 31, deadline=1.0)]
    for call in calls:
        call.result()
    took, spent = time.monotonic() - begun, [call.times.seconds for call in calls]
    assert min(spent) >= 0 and took - 0.5 < sum(spent) <= took
    assert local.state().phase == "idle" and not local.state().detail


def test_a_run_ends_while_the_next_call_waits_for_its_argument(worker):
    local, handle, role = worker
    hung = other_worker("teacher").call("hang", deadline=60)
    call = handle.call("count_to", 10**6, deadline=60)
    behind = handle.call("add", hung, deadline=60)
    while call.times.started is None:
        time.sleep(0.001)
    assert stop_all([local], 1)
    for dropped in (call, behind):
        with pytest.raises(Stopped):
            dropped.result()


def test_an_error_between_calls_ends_all_that_go_on(worker):
    _, handle, _ = worker
    calls = [
        handle.call("count_to", n, fails, deadline=5) for n, fails in ((9, True), (800, False))
    ]
    for call in calls:
        with pytest.raises(WorkerError, match="(?s)count_to failed in worker rollout.*at three"):
            call.result()


def test_what_goes_on_when_the_run_ends_is_dropped(worker):
    local, handle, _ = worker
    call = handle.call("count_to", 10**6, deadline=60)
    while call.times.started is None:
        time.sleep(0.001)
    assert stop_all([local], 5)
    with pytest.raises(Stopped):
        call.result()


def test_work_between_calls_that_hangs_is_late(worker):
    _, handle, role = worker
    role.count_to = lambda end: Later(role.hang, lambda: None)
    with pytest.raises(DeadlineExceeded, match="(?s)rollout.count_to has run for .*3 of 4 done"):
        handle.call("count_to", 1, deadline=0.3).result()


class Adder(Protocol):
    def add(self, a, b=0): ...


@pytest.mark.parametrize("lazy", [False, True])
def test_a_role_that_lacks_a_method_of_its_protocol_is_refused_when_it_is_made(lazy):
    worker = LocalWorker("rollout")
    started = worker.start_role("rollout", threading.Event, 5, lazy, protocol=Adder)
    called = worker.handle("rollout").call("add", 1, deadline=5) if lazy else started
    with pytest.raises(RunError, match="^rollout: Event lacks the method add$"):
        called.result()
    assert worker.stop(5)


def test_only_what_the_protocol_names_may_be_called():
    worker = LocalWorker("rollout")
    worker.start_role("rollout", Role, 5, protocol=Adder).result()
    assert worker.handle("rollout").call("add", 1, b=2, deadline=5).result() == 3
    refused = worker.handle("rollout").call("refuse", deadline=5)
    with pytest.raises(RunError, match=r"^rollout.refuse may not be called: Adder names only add$"):
        refused.result()
    assert worker.stop(5)


def test_what_was_compiled_before_a_run_is_not_its_own():
    """A notebook trains again and again in one process."""
    jax.jit(lambda x: x + 1)(np.float32(1))
    worker_group = LocalWorkerGroup(1.0)
    assert worker_group.compiled() == Compilations()
    jax.jit(lambda x: x * 2)(np.float32(1))
    found = worker_group.compiled()
    assert found.programs == 1 and found.seconds > 0
