"""Laws of the ledger: what is needed is never away, nothing is lost, every byte is counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import make_mesh

from jaxrl.errors import UserError
from jaxrl.sharding.ledger import HOST, Ledger, current, use


class Role:
    """Holds a tree, as the roles of a worker do."""

    def __init__(self, ledger, name, tree, stages, **options):
        self.name, self.tree = name, tree
        ledger.resident(name, lambda: self.tree, self.write, stages=stages, **options)

    def write(self, tree):
        self.tree = tree

    @property
    def kinds(self):
        return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(self.tree)}


def arrays(first=0.0, mesh=None):
    """8 KiB in two leaves, on a device of two 4 KiB: the second is sharded."""
    mesh = mesh or make_mesh(1, 2, 1)
    whole, split = PartitionSpec(None), PartitionSpec("fsdp")
    return {
        "a": jax.device_put(jnp.arange(512.0) + first, NamedSharding(mesh, whole)),
        "b": jax.device_put(jnp.arange(1024.0) + first, NamedSharding(mesh, split)),
    }


def same(tree, first=0.0):
    np.testing.assert_array_equal(tree["a"], np.arange(512.0) + first)
    np.testing.assert_array_equal(tree["b"], np.arange(1024.0) + first)


def test_what_a_stage_does_not_need_is_on_the_host_and_comes_back_as_it_was():
    ledger = Ledger()
    away = Role(ledger, "teacher/params", arrays(), ("teacher.score",), offload=True)
    stays = Role(ledger, "actor/params", arrays(7), ("actor.update",))
    before = jax.tree.map(lambda x: x.sharding, away.tree)
    old = jax.tree.leaves(away.tree)
    ledger.enter("actor.update")
    assert (away.kinds, stays.kinds) == ({HOST}, {"device"})
    assert all(leaf.is_deleted() for leaf in old)
    ledger.enter("teacher.score")
    assert (away.kinds, stays.kinds) == ({"device"}, {"device"})
    assert jax.tree.map(lambda x: x.sharding, away.tree) == before
    same(away.tree)
    same(stays.tree, 7)
    moves = ledger.take_moves()
    # On both devices: [512] float32 whole, and half of [1024] each.
    assert [(m.name, m.to, m.nbytes) for m in moves] == [
        ("teacher/params", "host", 8192),
        ("teacher/params", "device", 8192),
    ]
    assert all(m.started <= m.finished and m.waited >= 0 for m in moves)
    assert ledger.take_moves() == ()


def test_a_stage_that_needs_what_is_there_moves_nothing():
    ledger = Ledger()
    role = Role(ledger, "a/params", arrays(), ("a.x", "a.y"), offload=True)
    ledger.enter("a.x")
    held = jax.tree.leaves(role.tree)
    ledger.enter("a.y")
    assert all(a is b for a, b in zip(held, jax.tree.leaves(role.tree), strict=True))
    assert ledger.take_moves() == ()


def test_shared_memory_stays_while_one_of_its_holders_works():
    ledger, tree = Ledger(), arrays()
    mesh = make_mesh(2, 1, 1)
    seen = jax.device_put(tree["a"], NamedSharding(mesh, PartitionSpec(None)))  # no copy
    actor = Role(ledger, "actor/params", tree, ("actor.update",), offload=True)
    rollout = Role(ledger, "rollout/params", {"a": seen}, ("rollout.generate",), offload=True)
    ledger.enter("rollout.generate")
    assert actor.tree["a"].sharding.memory_kind == "device"
    assert actor.tree["b"].sharding.memory_kind == HOST
    np.testing.assert_array_equal(rollout.tree["a"], np.arange(512.0))
    ledger.enter("teacher.score")  # nobody needs it: one copy on the host
    assert (actor.kinds, rollout.kinds) == ({HOST}, {HOST})
    sizes = [m.nbytes for m in ledger.take_moves()]
    assert sizes == [4096, 4096, 0]
    ledger.enter("actor.update")
    same(actor.tree)
    ledger.enter("rollout.generate")
    np.testing.assert_array_equal(rollout.tree["a"], np.arange(512.0))


def test_what_is_on_its_way_is_not_taken_from_under_it():
    ledger, tree = Ledger(), arrays()
    Role(ledger, "actor/params", tree, ("actor.publish",), offload=True)
    ledger.enter("actor.publish")
    ledger.put("sent", tree)
    ledger.enter("rollout.load")
    same(tree)
    ledger.drop("sent")
    ledger.enter("rollout.generate")
    assert tree["a"].is_deleted()


def test_stale_arrays_are_freed_but_not_what_others_share():
    ledger, tree = Ledger(), arrays()
    actor = Role(ledger, "actor/params", tree, ("actor.update",))
    mine = {"a": tree["a"], "b": tree["b"] + 0}
    rollout = Role(ledger, "rollout/params", mine, ("rollout.load",), stale_at=("actor.update",))
    ledger.enter("actor.update")
    assert rollout.tree is None
    assert mine["b"].is_deleted()
    same(actor.tree)
    assert ledger.take_moves() == ()


def test_the_peak_is_that_of_the_fullest_device():
    ledger = Ledger()
    Role(ledger, "a/params", arrays(), ("a.x",), offload=True)
    assert ledger.peak == 4096
    one = jax.device_put(jnp.zeros(256), jax.devices()[1])
    ledger.put("cache", [one])
    assert ledger.peak == 4096 + 1024
    ledger.drop("cache")
    ledger.put("cache", [one])
    assert ledger.peak == 4096 + 1024  # not more: it came again, not twice
    ledger.enter("b.y")
    ledger.put("more", [jnp.zeros(1024)])
    assert ledger.peak == 4096 + 1024  # a/params is away: 1024 and 4096 on different devices


def test_a_program_holds_its_temporaries_while_it_runs():
    ledger = Ledger()

    @jax.jit
    def program(x):
        return jnp.sort(x @ x.T, axis=0).sum()

    x = jnp.ones((64, 64))
    found = program.lower(x).compile().memory_analysis()
    expected = found.temp_size_in_bytes + found.output_size_in_bytes
    assert expected > 64 * 64 * 4
    with ledger.running(program, x):
        program(x)
    assert ledger.peak == expected
    with ledger.running(program, x):  # asked once
        pass
    assert program._cache_size() == 1
    ledger.put("x", x)
    assert ledger.peak == max(expected, x.nbytes)


def test_what_comes_next_comes_back_early_only_below_the_peak():
    ledger = Ledger()
    role = Role(ledger, "actor/params", arrays(), ("actor.update",), offload=True)
    for _ in range(2):  # the first time it learns what follows
        ledger.enter("actor.update")
        ledger.enter("rollout.generate")
    ledger.put("cache", [jnp.zeros(2048)])
    assert (role.kinds, ledger.peak) == ({HOST}, 8192)
    ledger.put("full", [jnp.zeros(1024)])  # 4 KiB more: 12 in all
    ledger.drop("cache")
    ledger.put("cache", [jnp.zeros(2560)])  # 10 + 4, and 4 would come: above 14
    ledger.prefetch_next()
    assert role.kinds == {HOST}
    ledger.drop("cache")
    ledger.prefetch_next()
    assert role.kinds == {"device"}
    peak = ledger.peak
    ledger.enter("actor.update")
    same(role.tree)
    assert ledger.peak == peak


def test_devices_without_host_memory_are_told(monkeypatch):
    ledger, tree = Ledger(), arrays()
    monkeypatch.setattr("jaxrl.sharding.ledger.HOST", "moon")
    with pytest.raises(UserError, match=r"cpu devices have no memory moon, only device, pinned"):
        ledger.resident("a/params", lambda: tree, print, stages=(), offload=True)


def test_each_thread_has_its_own():
    mine = current()
    assert current() is mine
    other = Ledger()
    use(other)
    assert current() is other
    use(mine)
