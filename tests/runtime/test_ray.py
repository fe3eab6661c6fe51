"""Workers as processes: order, futures, deadlines and errors as in one process; and processes that
die, freeze or are late, in each stage of a step.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest
from cases import and_slow, needs_ray

needs_ray()

import ray  # noqa: E402
import ray_roles  # noqa: E402
from ray._private import worker as ray_worker  # noqa: E402

from jaxrl.config import cli  # noqa: E402
from jaxrl.config.settings import RayConfig  # noqa: E402
from jaxrl.errors import RunError, UserError  # noqa: E402
from jaxrl.process.xla_flags import (  # noqa: E402
    DETERMINISTIC,
    PATIENT,
    worker_environment,
)
from jaxrl.runtime.ray import worker_group as group_module  # noqa: E402
from jaxrl.runtime.ray.connect import connect, join  # noqa: E402
from jaxrl.runtime.ray.local_cluster import DAEMONS, leave  # noqa: E402
from jaxrl.runtime.ray.remote_calls import RayFuture, RayPool, Sender  # noqa: E402
from jaxrl.runtime.ray.worker_group import RayWorkerGroup  # noqa: E402
from jaxrl.runtime.role_server import CallRequest  # noqa: E402
from jaxrl.runtime.worker import (  # noqa: E402
    DeadlineExceeded,
    LocalWorkerGroup,
    OutOfMemory,
    RunLost,
    Stopped,
    WorkerError,
)
from jaxrl.sharding.placement import parse  # noqa: E402
from jaxrl.train import main  # noqa: E402

pytestmark = pytest.mark.ray

MESH = "actor=2,rollout=1,teacher=2"
ROLES = ("actor", "rollout", "teacher")
SHORT = 5.0


@pytest.fixture(scope="module", autouse=True)
def cluster():
    support = str(Path(__file__).parent.parent / "support")
    here = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONPATH"] = here.rstrip(os.pathsep)  # the workers make this module's roles
    join(None, 8)
    yield
    leave()


@pytest.fixture
def start(tmp_path):
    """Starts crews, and ends them with the test."""
    crews = []

    def begin(mesh=MESH, log=lambda text: None, environment=None, **options):
        make = partial(ray_roles.make, str(tmp_path))
        worker_group = RayWorkerGroup(
            RayConfig(**options),
            parse(mesh),
            make,
            log,
            startup_s=60,
            roles=ROLES,
            environment=environment or {},
        )
        crews.append(worker_group)
        worker_group.start()
        return worker_group

    yield begin
    for worker_group in crews:
        worker_group.stop()


def local_crew(marks, mesh=MESH):
    worker_group, placement = LocalWorkerGroup(5.0), parse(mesh)
    for index, pool in enumerate(placement.pools):
        devices = [jax.devices()[i] for i in pool.devices]
        makers = ray_roles.make(str(marks), placement, index, devices)
        for started in worker_group.start(pool.name, devices, makers, 60).values():
            started.result()
    return worker_group


def train(worker_group, steps, deadline=60.0, parts=2, first=0):
    """What the loop does; returns what each update told."""
    actor, rollout, teacher = (worker_group.handle(role) for role in ROLES)
    updates = []
    for index in range(first, first + steps):
        sent = actor.call("publish", version=index, deadline=deadline)
        rollout.call("load", sent, deadline=deadline)
        batch = rollout.call("generate", index, deadline=deadline)
        scores = [
            teacher.call("score", batch, part=part, deadline=deadline) for part in range(parts)
        ]
        updates.append(actor.call("update", batch, scores, deadline=deadline))
    return [update.result()["sum"] for update in updates]


@ray.remote(num_cpus=0)
class Keeper:
    """A process that owns an array in the object store."""

    def put(self):
        return [ray.put([np.zeros(1 << 18, np.float32)])]


def references(settle=2.0, until=-1):
    """How many objects this process keeps alive in the object store, once no more than `until`."""
    end, last = time.monotonic() + settle, until + 1
    while time.monotonic() < end and last > until:  # what workers borrowed comes back later
        gc.collect()
        last = len(ray_worker.global_worker.core_worker.get_all_reference_counts())
        time.sleep(0.2)
    return last


def gone(pid, within=10.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    worker_group = local_crew(tmp_path_factory.mktemp("marks"))
    told = train(worker_group, 4)
    worker_group.stop()
    return told


def test_processes_compute_what_threads_compute_and_leave_nothing(start, expected, tmp_path):
    """Each has the deterministic flag beside its own, also on a host whose Ray was started before
    the run, with flags of its own."""
    worker_group = start(environment=worker_environment(True, tmp_path))
    for role in ROLES:
        flags = worker_group.handle(role).call("variable", "XLA_FLAGS", deadline=60.0).result()
        own = os.environ.get("XLA_FLAGS", "").split()
        assert flags.split() == [*own, PATIENT, DETERMINISTIC]
    assert train(worker_group, 4) == expected
    states = worker_group.states()
    assert [s.name for s in states] == list(ROLES) and len({s.pid for s in states}) == 3
    titles = [Path(f"/proc/{s.pid}/cmdline").read_text().split("\0")[0] for s in states]
    assert [t.split()[0].partition(".")[0] for t in titles] == [f"ray::jaxrl:{r}" for r in ROLES]
    before = references()
    train(worker_group, 8, first=4)
    left = references(settle=20.0, until=before + 2)
    assert left <= before + 2, "what is no longer needed is still in the object store"
    a_run_that_is_over_keeps_nobody_waiting(worker_group)
    assert all(gone(state.pid) for state in states)


def a_run_that_is_over_keeps_nobody_waiting(worker_group):
    """Ends it while a call works."""
    waiting = worker_group.handle("actor").call("hang", 60.0, deadline=600)
    thread = threading.Thread(target=worker_group.stop)
    thread.start()
    with pytest.raises(Stopped):
        waiting.result()
    thread.join(20)
    assert not thread.is_alive()


def listening():
    """(process, address) of every port that the processes of the cluster of this one listen on."""
    me = psutil.Process()
    return {
        (process.name(), connection.laddr.ip)
        for process in [me, *me.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def is_loopback(ip):
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def reached_from_this_host_only_and_with_its_token():
    """What is asserted of a cluster of this process, while a run has processes in it."""
    found = listening()
    names = {name for name, _ in found}
    assert {"raylet", "gcs_server"} <= names and any("jaxrl" in name for name in names)
    assert not [(name, ip) for name, ip in found if not is_loopback(ip)]
    words = [word for p in psutil.Process().children(recursive=True) for word in p.cmdline()]
    assert any(word.endswith("/raylet") for word in words)
    assert not [word for word in words if word.endswith(("monitor.py", "dashboard.py"))]
    address = ray.get_runtime_context().gcs_address
    ask = f"from ray._raylet import GcsClient as C; C({address!r}).internal_kv_keys(b'', None)"
    for shown in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}):
        environment = os.environ | {"RAY_AUTH_MODE": "token"} | shown
        command = [sys.executable, "-c", ask]
        stranger = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120
        )
        assert stranger.returncode == 1 and "InvalidAuthToken" in stranger.stderr, stranger.stderr


def test_a_pool_of_two_processes_is_one_program_on_a_private_cluster(start, expected, monkeypatch):
    """Each order is put into the object store once for both processes."""
    put, orders = ray.put, []

    def spied(value, **options):
        if isinstance(value, CallRequest):
            orders.append((value.role, value.number))
        return put(value, **options)

    monkeypatch.setattr(ray, "put", spied)
    worker_group = start("actor=2,rollout=1,teacher=1", devices_per_worker=1)
    assert worker_group.handle("actor").call("facts", deadline=SHORT).result()[1:] == (1, 2)
    np.testing.assert_allclose(train(worker_group, 4), expected, rtol=1e-6)
    assert [s.name for s in worker_group.states()][:2] == ["actor.0", "actor.1"]
    assert {role for role, _ in orders} == {"actor"}  # the others are one process each
    assert len(orders) == len(set(orders)) >= 4 * 2
    reached_from_this_host_only_and_with_its_token()


@pytest.mark.slow
def test_one_pool_keeps_its_weights_in_the_process(start, expected):
    worker_group = start("actor+rollout=2,teacher=2")
    assert train(worker_group, 4) == expected
    alive = worker_group.handle("actor").call("alive", deadline=SHORT).result()
    train(worker_group, 8, first=4)
    time.sleep(3.0)  # the process is told each second what nobody needs any more
    assert worker_group.handle("actor").call("alive", deadline=SHORT).result() <= alive + 1
    sent = worker_group.handle("actor").call("publish", version=12, deadline=SHORT)
    assert sent.keeps and sent.result() is None


FAILURES = {
    "exception": (("fail", "boom"), WorkerError, "ZeroDivisionError: boom"),
    "user": (("refuse",), UserError, "batch_size=0"),
    "memory": (("exhaust",), OutOfMemory, "out of memory on cpu:0"),
}


@pytest.mark.parametrize("failure", and_slow(["user", "memory"], ["exception"]))
def test_an_exception_reaches_whoever_waits_at_once(start, failure):
    """By default a run of tests/laws/test_ray_train.py ends by an exception."""
    call, error, told = FAILURES[failure]
    worker_group = start("actor=1,rollout=1")
    waiting = worker_group.handle("actor").call("hang", 30.0, deadline=600)
    began = time.monotonic()
    worker_group.handle("rollout").call(*call, deadline=600)
    with pytest.raises(error, match=told):
        waiting.result()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("score", "kill"),
        ("load", "kill"),
        ("load", "stop"),
        ("generate", "kill"),
        ("generate", "stop"),
        ("score", "stop"),
    ],
)
@pytest.mark.slow
def test_frozen_roles_are_made_anew_and_nothing_changes(start, expected, tmp_path, stage, fault):
    said = []
    (tmp_path / f"{stage}.{fault}").touch()
    worker_group = start(log=said.append)
    assert train(worker_group, 4, deadline=60.0 if fault == "kill" else 8.0) == expected
    anew = [line for line in said if "restarting" in line and "(1 of 3)" in line]
    assert len(anew) == 1 and ("died" in anew[0] if fault == "kill" else "late" in anew[0])
    if fault == "stop":
        late = [line for line in said if "has run for" in line]
        assert len(late) == 1 and "process stopped" in late[0], "\n".join(said)


def test_a_late_call_is_told_with_its_phase_and_stack_then_replaced(start):
    said = []
    worker_group = start("rollout=1", log=said.append, max_restarts=0)
    late = worker_group.handle("rollout").call("hang", 60.0, deadline=2.0)
    with pytest.raises(DeadlineExceeded) as error:
        late.result()
    for part in (
        "rollout.hang has run for",
        "deadline is 2 s",
        "waiting for a collective",
        "3 of 4 done",
        "time.sleep(seconds)",
        "pid",
    ):
        assert part in str(error.value)


def test_the_budget_of_restarts_ends_the_run(start):
    worker_group = start("rollout=1", max_restarts=1)
    rollout = worker_group.handle("rollout")
    for _ in range(2):
        state = next(s for s in worker_group.states() if s.name == "rollout")
        os.kill(state.pid, signal.SIGKILL)
        time.sleep(0.1)
        try:
            rollout.call("generate", 0, deadline=60).result()
        except RunError as error:
            assert "ray.max_restarts" in str(error)
            return
    raise AssertionError("the second death did not end the run")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [("kill", 0), ("kill", 1), ("stop", 1)])
def test_one_of_two_processes_takes_the_other_with_it(start, expected, fault, rank):
    """The survivor's own error, of a collective with the dead one, is not what ends the run."""
    said = []
    worker_group = start("actor=1,rollout=1,teacher=2", devices_per_worker=1, log=said.append)
    victim = next(s for s in worker_group.states() if s.name == f"teacher.{rank}")
    pair = worker_group.handle("teacher").call("pair", 1.0, deadline=8.0)
    time.sleep(0.5)
    os.kill(victim.pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    assert pair.result() == 2.0
    assert sum("restarting teacher" in line for line in said) == 1


@pytest.mark.slow
def test_a_call_beside_the_queue_fails_for_who_asked(start):
    worker_group = start("actor=1,rollout=1")
    actor, rollout = worker_group.handle("actor"), worker_group.handle("rollout")
    failed = actor.call("fail", "aside", deadline=SHORT, aside=True)
    with pytest.raises(WorkerError, match="aside"):
        failed.result()
    late = actor.call("hang", 30.0, deadline=1.0, aside=True)
    with pytest.raises(DeadlineExceeded, match=r"actor\.hang has run for"):
        late.result()
    assert rollout.call("generate", 1, deadline=SHORT).result()["index"] == 1
    assert actor.call("publish", version=0, deadline=SHORT).result().version == 0
    # Unless somebody needs what it was to make.
    slow = actor.call("later", 1.0, "aside", deadline=SHORT, aside=True)
    needs = rollout.call("load", slow, deadline=600)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="ZeroDivisionError: aside"):
        needs.result()
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_an_error_that_is_the_caller_s_own_ends_nothing(start):
    """Nor does that of a call that needed the value, and is its caller's own too."""
    worker_group = start("actor=1,rollout=1")
    actor, rollout = worker_group.handle("actor"), worker_group.handle("rollout")
    failed = actor.call("later", 1.0, "own", deadline=SHORT, own_error=True)
    needs = rollout.call("load", failed, deadline=SHORT, own_error=True)
    for future in (failed, needs):
        with pytest.raises(WorkerError, match="ZeroDivisionError: own"):
            future.result()
        future.check()
    assert rollout.call("generate", 1, deadline=SHORT).result()["index"] == 1


@pytest.mark.slow
def test_a_value_that_nobody_makes_anew_is_told_as_lost(start):
    worker_group = start("actor=1,rollout=1")
    sent = worker_group.handle("actor").call("publish", version=0, deadline=SHORT)
    while not sent.done():
        time.sleep(0.1)
    keeper = Keeper.remote()
    place = ray.get(keeper.put.remote(), timeout=SHORT)[0]
    ray.kill(keeper)  # and soon what it had put, as with a node
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            ray.get(place, timeout=SHORT)
        except ray.exceptions.RayError:
            break
        time.sleep(0.2)
    parcel = ray.get(sent.refs[0], timeout=SHORT)
    sent.refs = [ray.put(replace(parcel, buckets=(place,) * len(parcel.buckets)))]
    began = time.monotonic()
    with pytest.raises(RunLost, match=r"an input of rollout\.load was made, but is lost"):
        worker_group.handle("rollout").call("load", sent, deadline=600).result()
    assert time.monotonic() - began < 20


def test_a_cluster_that_is_too_small_is_refused_with_both_tables():
    with pytest.raises(UserError) as error:
        connect(RayConfig(), parse("actor=600,rollout=2"))
    for part in ("needs 602 CPUs", "needs: rollout", "has: ", " of 512 CPU"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "does not answer: Connection refused"),
        ("127.0.0.1", "not the address of a Ray cluster"),
        ("127.0.0.1:port", "not the address of a Ray cluster"),
        ("127.0.0.1:65536", "not the address of a Ray cluster"),
        ("ray://127.0.0.1:10001", "not the address of a Ray cluster"),
    ],
)
@pytest.mark.parametrize("by", ["key", "environment"])
def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch, address, told, by):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    if by == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    config = RayConfig(address=address) if by == "key" else RayConfig()
    began = time.monotonic()
    with pytest.raises(UserError, match=re.escape(told)):
        connect(config, parse("actor=1"))
    assert time.monotonic() - began < 5


DRIVER = """
import sys
from functools import partial
import ray_roles
from jaxrl.config.settings import RayConfig
from jaxrl.runtime.ray.connect import join
join(None, 1)
from jaxrl.runtime.ray.worker_group import RayWorkerGroup
from jaxrl.sharding.placement import parse
make = partial(ray_roles.make, sys.argv[1])
worker_group = RayWorkerGroup(
    RayConfig(max_restarts=0), parse("rollout=1"), make, print, startup_s=60, roles=("rollout",)
)
worker_group.start()
call = worker_group.handle("rollout").call("hang", 6.0, deadline=5.0)
while call.times.started is None:
    call._done.wait(0.1)
print("begun", flush=True)
call.result()
worker_group.stop()
print("ended")
"""
STOPPED = """
import os, signal, sys, threading
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.ray.connect import join
join(None, 1)
import ray
daemon, leaves = sys.argv[-2:]
if leaves == "never":
    local_cluster.LEAVE_S, ray.shutdown = 0.5, threading.Event().wait
daemons = local_cluster.daemons()
os.kill(daemons[daemon].pid, signal.SIGSTOP)
print(*(process.pid for process in daemons.values()), flush=True)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Exit code and output of a driver that is stopped for a while, and whose GCS is stopped where
    it ends: two laws of one cluster."""
    code, folder = DRIVER + STOPPED, str(tmp_path_factory.mktemp("driver"))
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder, *STOPPED_CASES[0]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
    )
    told = ""
    while "begun" not in told:
        line = process.stdout.readline()
        assert line, told
        told += line
    process.send_signal(signal.SIGSTOP)
    time.sleep(4.0)
    process.send_signal(signal.SIGCONT)
    told += process.communicate(timeout=240)[0]
    return process.returncode, told


def test_a_stopped_driver_finds_nobody_late(driver):
    """4 s of a call of 6 s, whose deadline is 5 s: no restart is left to spend on it."""
    assert "ended" in driver[1], driver[1]


STOPPED_CASES = [
    *((daemon, leaves) for daemon in DAEMONS for leaves in ("leaves", "never")),
]


def left_nobody(code, pids, told):
    assert code == 7, told
    assert len(pids.split()) == len(DAEMONS) and all(gone(int(pid)) for pid in pids.split())


def test_a_process_ends_with_its_code_beside_a_stopped_daemon(driver):
    """Ray's own handler at exit waits for it without limit."""
    code, told = driver
    left_nobody(code, told.partition("ended\n")[2].splitlines()[0], told)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [STOPPED_CASES[1:3], STOPPED_CASES[3:]], ids=str)
def test_whatever_is_stopped_a_process_ends_with_its_code(cases):
    """Also where Ray does not leave in time: what its threads use is not freed under them. By
    default a driver of tests/runtime/test_ray_starts.py ends so."""
    command = [sys.executable, "-c", STOPPED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = [subprocess.Popen([*command, *case], **pipes) for case in cases]
    for process in begun:
        pids, told = process.communicate(timeout=240)
        left_nobody(process.returncode, pids, told)


def test_once_a_daemon_is_gone_processes_are_ended_without_ray(monkeypatch):
    """Ray asks its GCS to kill an actor, waits a minute for it, and then ends this process."""
    monkeypatch.setattr(group_module.local_cluster, "started_here", lambda: True)
    monkeypatch.setattr(group_module.local_cluster, "usable", lambda: False)
    monkeypatch.setattr(ray, "kill", lambda *_, **__: pytest.fail("Ray was asked"))
    with subprocess.Popen(["ray::jaxrl:rollout", "60"], executable="sleep") as process:
        title = Path(f"/proc/{process.pid}/cmdline")
        while not title.read_bytes().startswith(b"ray::jaxrl:"):  # set a moment after it began
            time.sleep(0.01)
        info = SimpleNamespace(host=socket.gethostname(), pid=process.pid)
        pool = SimpleNamespace(alive=True, workers=[object()], info=[info])
        group_module.kill([pool])
        assert process.wait(timeout=10) == -signal.SIGKILL and not pool.alive


def test_the_end_of_a_run_is_known_though_ray_keeps_a_thread_with_the_lock(monkeypatch):
    monkeypatch.setattr("jaxrl.runtime.ray.remote_calls.LOCK_S", 0.1)
    sender, over = Sender(), threading.Event()
    held = threading.Event()

    def stuck():
        with sender.lock:
            held.set()
            assert over.wait(60)

    thread = threading.Thread(target=stuck)
    thread.start()
    assert held.wait(10)
    future = RayFuture("rollout", "generate", (), {}, 60.0, False, False, sender, None, 1)
    sender.calls[future.number] = future
    sender.fail(RunLost("the GCS has ended"))
    with pytest.raises(RunLost, match="the GCS has ended"):
        future.result()
    over.set()
    thread.join(10)


def sent_calls():
    """Pools without processes, what makes a call to one of them, and what was sent."""
    sent = []

    def remote(request):
        sent.append((request.role, request.position, request.method))
        return SimpleNamespace(future=Future), None

    worker = SimpleNamespace(run=SimpleNamespace(remote=remote))
    sender = Sender()
    pools = [RayPool(i, name, (name,), (), [worker], alive=True) for i, name in enumerate(ROLES)]

    def call(pool, *args, method="m", keeps=False):
        what = pool.name, method, args, {}, 60, False, False
        future = RayFuture(*what, sender, pool, next(sender.numbers), keeps)
        sender.calls[future.number] = future
        sender.flush(pool)
        return future

    return sender, pools, call, sent


def ended(sender, future):
    sender.calls.pop(future.number)
    future.finish()


def test_a_call_is_sent_once_its_inputs_are_there():
    """So the loss of a process is that of its own calls; what stays in a process comes in order."""
    sender, (actor, rollout, teacher), call, sent = sent_calls()
    made = call(actor)
    needs, behind = call(rollout, [made]), call(rollout)
    kept = call(teacher, keeps=True)
    call(teacher, {"a": kept})
    assert sent == [("actor", 0, "m"), ("teacher", 0, "m"), ("teacher", 1, "m")]
    ended(sender, made)
    sender.flush(rollout)
    assert [x[:2] for x in sent[3:]] == [("rollout", 0), ("rollout", 1)]
    assert needs.refs and behind.refs


def test_a_new_process_gets_its_weights_before_calls_that_went_on_as_they_came():
    """Batches that are being streamed were asked for before the weights that came meanwhile."""
    sender, (_, rollout, _), call, sent = sent_calls()
    group = RayWorkerGroup.__new__(RayWorkerGroup)
    group._sender, group._log, group._states = sender, print, {}
    first = call(rollout, method="load")
    ended(sender, first)
    streamed = call(rollout, method="generate")
    load = call(rollout, method="load")
    ended(sender, load)
    group._states[rollout.index, "rollout"] = load
    behind = call(rollout, method="load")
    rollout.alive, rollout.position = False, 0
    for future in (streamed, behind):
        future.unsend()
    sent.clear()
    group._made(rollout, None)
    sender.flush(rollout)
    assert [x[2] for x in sent] == ["load", "generate", "load"]
    assert [x[1] for x in sent] == [0, 1, 2]


def test_a_tpu_host_gives_its_chips_or_says_why_not(monkeypatch):
    """It emulated CPU devices, and trained on them."""
    monkeypatch.setattr("jaxrl.sharding.mesh.tpu_chips_here", lambda: 4)
    seen = connect(RayConfig(), parse("actor=2,rollout=1,teacher=1"))
    assert not seen.emulated and [device.platform for device in seen.devices] == ["tpu"] * 4
    with pytest.raises(UserError, match="gives actor 3 TPU chips"):
        connect(RayConfig(), parse("actor=3,rollout=1"))
    with pytest.raises(UserError, match="needs 6 TPU chips .* 4 are free"):
        connect(RayConfig(), parse("actor=4,rollout=2"))


def test_a_plan_starts_no_cluster(monkeypatch):
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: started.append(options))
    seen = connect(RayConfig(), parse("actor=2,rollout=2,teacher=4"))
    assert len(seen.devices) == 8 and seen.launcher == "ray" and not started
    assert seen.why == "a new cluster on this host"


def test_without_the_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("jaxrl.runtime.ray")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.run(main, ["--launcher", "ray", "--dry-run"]) == cli.EXIT_BAD_INPUT
    assert "pip install 'jaxrl[ray]'" in capsys.readouterr().err
