"""Which host gets which pool: by hand, on clusters that are only described."""

import pytest

from jaxrl.errors import UserError
from jaxrl.runtime.cluster import Host, devices_of, hosts_table, process_slots
from jaxrl.sharding.placement import parse

GIB = 1 << 30


def host(name, cpus=0, gpus=0, free=None, gpu_memory=()):
    cpus_free = cpus if free is None else free
    gpus_free = gpus if free is None else free
    return Host(
        name, name, f"10.0.0.{name}", cpus, cpus_free, gpus, gpus_free, 8 * GIB, 6 * GIB, gpu_memory
    )


def placed(mesh, hosts, on_gpu=True, most=None):
    """(pool, rank, host, devices) of each process."""
    found = process_slots(parse(mesh), hosts, on_gpu, most)
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
    assert placed("actor=4,rollout=1", hosts, on_gpu=False, most=2) == [
        (0, 0, "1", 2),
        (0, 1, "1", 2),
        (1, 0, "1", 1),
    ]
    assert [slot[1:] for slot in placed("actor=16", hosts, on_gpu=False, most=4)] == [
        (0, "1", 4),
        (1, "1", 4),
        (2, "2", 4),
        (3, "2", 4),
    ]
    with pytest.raises(UserError, match="devices_per_worker=2 does not divide the 3 devices"):
        placed("actor=3", hosts, on_gpu=False, most=2)


def test_only_what_is_free_counts_and_gpus_or_cpus_do():
    hosts = [host("1", gpus=8, free=1), host("2", gpus=8, free=2)]
    assert placed("actor=2", hosts) == [(0, 0, "2", 2)]
    assert placed("actor=2,rollout=1", hosts) == [(0, 0, "2", 2), (1, 0, "1", 1)]
    mixed = [host("1", cpus=64), host("2", cpus=1, gpus=2)]
    assert placed("actor=2", mixed) == [(0, 0, "2", 2)]
    assert placed("actor=2", mixed, on_gpu=False) == [(0, 0, "1", 2)]


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
    found = devices_of(placement, process_slots(placement, hosts, True, None), True)
    assert [(d.id, d.host, d.process_index) for d in found] == [
        *((i, "1", 0) for i in range(4)),
        *((i, "2", 1) for i in (4, 5)),
    ]
    # The smallest GPU of the host; where the driver tells nothing, no limit is known.
    assert [d.limit for d in found] == [16 * GIB] * 4 + [None] * 2
    assert found[0].memory_stats() == {"bytes_limit": 16 * GIB}
    assert found[5].memory_stats() is None


def test_emulated_devices_share_the_memory_that_is_free_on_their_host():
    hosts = [host("1", cpus=3), host("2", cpus=8)]
    placement = parse("actor=2,rollout=1,teacher=2")
    found = devices_of(placement, process_slots(placement, hosts, False, None), False)
    # 6 GiB of host 1 for its three devices together, 6 GiB of host 2 for its two.
    assert [d.limit for d in found] == [6 * GIB] * 5
    assert {d.platform for d in found} == {"cpu"}
