"""Which host gets which pool: by hand, on clusters that are only described."""

import itertools
import queue
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import psutil
import pytest

from jaxrl.errors import UserError
from jaxrl.models.kernels import target_of
from jaxrl.runtime.cluster import (
    Host,
    ProcessSlot,
    Resource,
    ask_driver,
    devices_of,
    hosts_table,
    process_slots,
    worker_variables,
)
from jaxrl.runtime.ray import local_cluster
from jaxrl.runtime.role_server import InputLost
from jaxrl.sharding import mesh
from jaxrl.sharding.placement import ROLES, parse
from jaxrl.sharding.targets import ridge

GIB = 1 << 30


def host(name, cpus=0, gpus=0, free=None, gpu_memory=()):
    has = {"CPU": cpus, "GPU": gpus, "TPU": 0, "memory": 8 * GIB}
    left = {"CPU": cpus if free is None else free, "GPU": gpus if free is None else free, "TPU": 0}
    return Host(name, name, f"10.0.0.{name}", has, {**left, "memory": 6 * GIB}, gpu_memory)


def placed(mesh, hosts, kind="GPU", most=None):
    """(pool, rank, host, devices) of each process."""
    found = process_slots(parse(mesh), hosts, kind, most)
    return [(slot.pool, slot.rank, slot.host.name, slot.devices) for slot in found]


def test_a_pool_goes_whole_to_the_first_host_with_room():
    hosts = [host("1", gpus=4), host("2", gpus=8)]
    assert placed("actor=4,rollout=2,teacher=4", hosts) == [
        (0, 0, "1", 4),
        (1, 0, "2", 2),
        (2, 0, "2", 4),
    ]
    # 3 do not fit beside 2 on the first; the last 2 do again.
    assert placed("actor=2,rollout=3,teacher=2", hosts) == [
        (0, 0, "1", 2),
        (1, 0, "2", 3),
        (2, 0, "1", 2),
    ]


def test_what_no_host_has_room_for_is_shared_evenly_by_the_fewest():
    hosts = [host("1", gpus=4), host("2", gpus=4), host("3", gpus=2)]
    assert placed("actor=8,rollout=2", hosts) == [(0, 0, "1", 4), (0, 1, "2", 4), (1, 0, "3", 2)]
    # 6 = 3 + 3 on two hosts; 1 is left on each.
    assert placed("actor=6,rollout=1,teacher=1", hosts) == [
        (0, 0, "1", 3),
        (0, 1, "2", 3),
        (1, 0, "1", 1),
        (2, 0, "2", 1),
    ]
    # 5 devices are shared by no two hosts evenly, and five hosts there are not.
    with pytest.raises(UserError, match="no room for actor"):
        placed("actor=5", hosts)


def test_a_share_of_a_host_is_cut_into_processes():
    hosts = [host("1", cpus=8), host("2", cpus=8)]
    assert placed("actor=4,rollout=1", hosts, kind="CPU", most=2) == [
        (0, 0, "1", 2),
        (0, 1, "1", 2),
        (1, 0, "1", 1),
    ]
    assert [slot[1:] for slot in placed("actor=16", hosts, kind="CPU", most=4)] == [
        (0, "1", 4),
        (1, "1", 4),
        (2, "2", 4),
        (3, "2", 4),
    ]
    with pytest.raises(UserError, match="devices_per_worker=2 does not divide the 3 devices"):
        placed("actor=3", hosts, kind="CPU", most=2)


def test_only_what_is_free_counts_and_gpus_or_cpus_do():
    hosts = [host("1", gpus=8, free=1), host("2", gpus=8, free=2)]
    assert placed("actor=2", hosts) == [(0, 0, "2", 2)]
    assert placed("actor=2,rollout=1", hosts) == [(0, 0, "2", 2), (1, 0, "1", 1)]
    mixed = [host("1", cpus=64), host("2", cpus=1, gpus=2)]
    assert placed("actor=2", mixed) == [(0, 0, "2", 2)]
    assert placed("actor=2", mixed, kind="CPU") == [(0, 0, "1", 2)]


def test_a_cluster_that_is_too_small_is_told_with_both_tables():
    hosts = [host("1", cpus=4, gpus=2, free=1), host("2", cpus=4)]
    with pytest.raises(UserError) as error:
        placed("actor=2,rollout=1", hosts)
    told = str(error.value).splitlines()
    assert told[0] == (
        "the cluster is too small: the mesh 'actor=2,rollout=1' needs 3 GPUs, 1 are free; there is"
        " no room for actor"
    )
    assert told[1:3] == ["  needs: actor    2 GPU", "  needs: rollout  1 GPU"]
    assert told[3:5] == hosts_table(hosts).splitlines()
    assert told[3] == "  has: 1 (10.0.0.1)  1 of 4 CPU  1 of 2 GPU  6.4 of 8.6 GB memory"
    assert "`ray start --address=HEAD:PORT`" in told[5]


def test_devices_are_numbered_in_the_order_of_the_placement_with_the_limit_of_their_host():
    hosts = [host("1", gpus=4, gpu_memory=(24 * GIB, 16 * GIB)), host("2", gpus=4)]
    placement = parse("actor=4,rollout=2")
    found = devices_of(placement, process_slots(placement, hosts, "GPU", None), "GPU")
    assert [(d.id, d.host, d.process_index) for d in found] == [
        *((i, "1", 0) for i in range(4)),
        *((i, "2", 1) for i in (4, 5)),
    ]
    # The share that jax takes of the smallest GPU of the host; where the driver tells nothing, no
    # limit is known.
    usable = round(0.92 * 16 * GIB)
    assert [d.limit for d in found] == [usable] * 4 + [None] * 2
    assert found[0].memory_stats() == {"bytes_limit": usable}
    assert found[5].memory_stats() is None


def test_emulated_devices_share_the_memory_that_is_free_on_their_host():
    hosts = [host("1", cpus=3), host("2", cpus=8)]
    placement = parse("actor=2,rollout=1,teacher=2")
    found = devices_of(placement, process_slots(placement, hosts, "CPU", None), "CPU")
    # 6 GiB of host 1 for its three devices together, 6 GiB of host 2 for its two.
    assert [d.limit for d in found] == [6 * GIB] * 5
    assert {d.platform for d in found} == {"cpu"}


def tpus(name, chips, free=None):
    found = host(name, cpus=8)
    left = {**found.free, "TPU": chips if free is None else free}
    return replace(found, has={**found.has, "TPU": chips}, free=left)


def chips_of(mesh, *hosts, most=None):
    return {
        slot.pool: (slot.host.name, slot.chips)
        for slot in process_slots(parse(mesh), hosts, "TPU", most)
    }


def test_pools_get_blocks_of_neighbouring_chips() -> None:
    assert chips_of("actor=2,rollout=2,teacher=4", tpus("1", 8)) == {
        0: ("1", (0, 1)),
        1: ("1", (2, 3)),
        2: ("1", (4, 5, 6, 7)),
    }
    # A block starts at a multiple of its size, whatever the order of the mesh.
    assert chips_of("actor=1,rollout=4,teacher=2,reference=1", tpus("1", 8)) == {
        0: ("1", (0,)),
        1: ("1", (4, 5, 6, 7)),
        2: ("1", (2, 3)),
        3: ("1", (1,)),
    }
    assert chips_of("actor=4,rollout=4", tpus("1", 4), tpus("2", 4)) == {
        0: ("1", (0, 1, 2, 3)),
        1: ("2", (0, 1, 2, 3)),
    }


@pytest.mark.parametrize("sizes", set(itertools.permutations((1, 1, 2, 4))))
def test_blocks_of_any_sizes_use_up_a_host(sizes) -> None:
    mesh = ",".join(f"{role}={n}" for role, n in zip(ROLES, sizes, strict=False))
    taken = [chips for _, chips in chips_of(mesh, tpus("1", 8)).values()]
    assert sorted(chip for chips in taken for chip in chips) == list(range(8))
    assert [len(chips) for chips in taken] == list(sizes)


@pytest.mark.parametrize(
    ("mesh", "hosts", "most", "told"),
    [
        ("actor=3,rollout=1", [tpus("1", 4)], None, "gives actor 3 TPU chips; .* 1, 2, 4 chips"),
        (
            "actor=8",
            [tpus("1", 4), tpus("2", 4)],
            None,
            "gives actor 8 TPU chips; .* 1, 2, 4 chips",
        ),
        ("actor=6,rollout=2", [tpus("1", 8)], None, "gives actor 6 TPU chips; .* 1, 2, 4, 8 chips"),
        ("actor=4", [tpus("1", 4)], 2, r"4 TPU chips in processes of 2 \(ray.devices_per_worker\)"),
        ("actor=4,rollout=1", [tpus("1", 4)], None, "needs 5 TPU chips .* no room for rollout"),
        # Nobody knows which chips another run of Ray's has taken.
        ("actor=1", [tpus("1", 4, free=3)], None, r"(?s)0 are free.*3 of 4 TPU"),
    ],
)
def test_what_is_no_block_of_chips_is_refused(mesh, hosts, most, told) -> None:
    with pytest.raises(UserError, match=told):
        process_slots(parse(mesh), hosts, "TPU", most)


def test_each_process_is_given_its_own_chips() -> None:
    placement = parse("actor=2,rollout=1,teacher=4")
    slots = process_slots(placement, [tpus("1", 8)], "TPU", None)
    actor, rollout, teacher = (worker_variables(slot, "TPU", placement) for slot in slots)
    for name, values in {
        "JAX_PLATFORMS": ("tpu,cpu", "tpu,cpu", "tpu,cpu"),
        "TPU_VISIBLE_CHIPS": ("0,1", "2", "4,5,6,7"),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": ("1,2,1", "1,1,1", "2,2,1"),
        "TPU_PROCESS_BOUNDS": ("1,1,1", "1,1,1", "1,1,1"),
        "TPU_PROCESS_PORT": ("8476", "8478", "8480"),
        "TPU_PROCESS_ADDRESSES": ("localhost:8476", "localhost:8478", "localhost:8480"),
        "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": ("1", "1", "1"),
    }.items():
        assert (actor[name], rollout[name], teacher[name]) == values
    found = devices_of(placement, slots, "TPU")
    assert {(d.platform, d.limit) for d in found} == {("tpu", None)}


def test_a_process_with_the_whole_host_has_its_usual_chips() -> None:
    placement = parse("actor=4")
    (slot,) = process_slots(placement, [tpus("1", 4)], "TPU", None)
    assert worker_variables(slot, "TPU", placement) == {
        "JAX_PLATFORMS": "tpu,cpu",
        "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS": "1",
    }


@pytest.mark.parametrize("kind", ["GPU", "TPU", "CPU"])
def test_a_process_without_devices_takes_none(kind) -> None:
    """Else jax would take memory of every GPU of the host."""
    where = tpus("1", 4)
    found = worker_variables(ProcessSlot(0, 0, where, 0), kind, parse("actor=2"))
    assert (found["JAX_PLATFORMS"], found["JAX_NUM_CPU_DEVICES"]) == ("cpu", "1")
    assert worker_variables(ProcessSlot(0, 0, where, 2), "GPU", parse("actor=2")) == {
        "JAX_PLATFORMS": "cuda,cpu"
    }


def test_a_process_cuts_its_work_as_one_with_all_devices_would(monkeypatch) -> None:
    """XLA adds up a large matrix product in an order that depends on the number of its threads."""
    slot = ProcessSlot(0, 0, host("1", cpus=2), 2)

    def threads(spec: str) -> int:
        return int(worker_variables(slot, "CPU", parse(spec))["NPROC"])

    monkeypatch.setenv("NPROC", "3")
    assert threads("actor=2") == jax.device_count(), "the number that was asked for is kept"
    monkeypatch.setattr(mesh, "_count_asked_for", lambda: None)
    assert [threads("actor=2"), threads("actor=2,rollout=2")] == [3, 4]


def test_a_plan_knows_the_kind_of_the_gpus_of_a_cluster(monkeypatch):
    """That of the weakest, as the driver names it: the ridge of a decode step follows from it."""
    rows = [["81559", "9.0", "NVIDIA H100 80GB HBM3"], ["23034", "8.9", "NVIDIA L4"]]
    for told, capability, kind in ((rows[:1], (9, 0), rows[0][2]), (rows, (8, 9), "NVIDIA L4")):
        monkeypatch.setattr("jaxrl.runtime.cluster.nvidia_smi", lambda query, told=told: told)
        has: dict[Resource, int] = {"CPU": 8, "GPU": len(told), "TPU": 0, "memory": 1}
        host = Host("a", "a", "a", has, has, **ask_driver(None))
        placement = parse(f"actor={len(told)}")
        slots = process_slots(placement, [host], "GPU", None)
        target = target_of(devices_of(placement, slots, "GPU"))
        assert (target.capability, target.kind) == (capability, kind)
        assert 50 < ridge(target.kind) < 1000


@pytest.mark.parametrize("name", local_cluster.DAEMONS)
@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGSTOP, "is stopped"), (signal.SIGKILL, "has ended")]
)
def test_the_guard_of_a_run_tells_which_daemon_of_its_cluster_is_lost(
    monkeypatch, name, number, told
):
    monkeypatch.setattr(local_cluster, "POLL_S", 0.01)
    processes = {daemon: subprocess.Popen(["sleep", "60"]) for daemon in local_cluster.DAEMONS}
    daemons = {daemon: psutil.Process(process.pid) for daemon, process in processes.items()}
    cluster = local_cluster.LocalCluster(processes["raylet"], daemons, Path())
    monkeypatch.setattr(local_cluster, "_cluster", cluster)
    lost: queue.Queue[str] = queue.Queue()
    guard = local_cluster.Guard(lost.put)
    guard.start()
    try:
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.1)
        assert local_cluster.usable()
        pid = processes[name].pid
        processes[name].send_signal(number)
        line = f"the {name} (pid {pid}) of the run's own Ray cluster {told}"
        assert lost.get(timeout=60) == line and not local_cluster.usable()
    finally:
        guard.stop()
        for process in processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("imported_for", [None, "joined"])
def test_a_session_that_the_caller_began_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, imported_for: str | None
) -> None:
    """One that ray was imported for without a session cannot become the run's own."""
    connect = pytest.importorskip("jaxrl.runtime.ray.connect")
    ray = ModuleType("ray")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv(connect.MODE, raising=False)
    monkeypatch.setattr(connect, "_imported_for", imported_for)
    monkeypatch.setattr(ray, "is_initialized", lambda: True, raising=False)
    assert connect.import_ray(None) is ray
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="imported in this process before"):
        connect.import_ray(None)


def test_a_cluster_of_this_process_is_not_taken_for_the_one_at_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends once the other is known to answer, and can be joined."""
    connect = pytest.importorskip("jaxrl.runtime.ray.connect")
    ray, asked = ModuleType("ray"), list[str]()
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name in ("in_cluster", "started_here", "usable"):
        monkeypatch.setattr(connect, name, lambda: True)
    monkeypatch.setattr(connect, "import_ray", asked.append)
    monkeypatch.setattr(connect, "leave", lambda: pytest.fail("it left"))
    connect.join("127.0.0.1:1", 1)
    with socket.socket() as taken:  # nobody listens
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="does not answer"):
            connect.join(f"127.0.0.1:{taken.getsockname()[1]}", 1)
        assert not asked
        taken.listen()
        with pytest.raises(pytest.fail.Exception, match="it left"):
            connect.join(f"127.0.0.1:{taken.getsockname()[1]}", 1)
        assert len(asked) == 1


def test_an_input_that_does_not_arrive_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    remote_calls = pytest.importorskip("jaxrl.runtime.ray.remote_calls")
    monkeypatch.setattr(remote_calls, "FETCH_S", 0.05)
    monkeypatch.setattr(remote_calls.ray, "wait", lambda refs, **_: (time.sleep(0.02), refs))
    with pytest.raises(InputLost, match="what rollout made has not arrived"):
        remote_calls.RemoteRef("rollout", (object(),)).arrive()
