"""Weights arrive bit-equal whatever the two layouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import and_slow
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.sharding import reshard as module
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.sharding.reshard import put_pieces, reshard


def mesh(devices, shape):
    return role_mesh(devices, Axes(*shape))


def layouts():
    devices = jax.devices()
    meshes = {
        "one": mesh(devices[:1], (1, 1, 1)),
        "fsdp2": mesh(devices[:2], (1, 2, 1)),
        "data2": mesh(devices[2:4], (2, 1, 1)),
        "tensor4": mesh(devices[4:], (1, 1, 4)),
        "all": mesh(devices, (2, 2, 2)),
    }
    rows, columns, both = ("fsdp",), (None, "tensor"), (("data", "fsdp"), "tensor")
    specs = {  # of those that split a mesh alike, one or two
        "one": [(), both],
        "fsdp2": [(), rows, ("tensor", "fsdp")],
        "data2": [rows, both],
        "tensor4": [(), columns, ("tensor", "fsdp")],
        "all": [(), rows, columns, ("tensor", "fsdp"), both],
    }
    return {
        f"{name}-{spec}": NamedSharding(m, PartitionSpec(*spec))
        for name, m in meshes.items()
        for spec in specs[name]
    }


def pieces(x, target):
    return put_pieces([x], [target])[0]


@pytest.mark.parametrize(
    ("move", "dtype", "every"),
    and_slow(
        [(reshard, jnp.float32, 1), (reshard, jnp.bfloat16, 3), (pieces, jnp.bfloat16, 3)],
        [(reshard, jnp.bfloat16, 1), (pieces, jnp.bfloat16, 2)],
    ),
)
def test_every_pair_of_layouts_is_bit_equal(move, dtype, every):
    """Of pieces, which take a program for each pair, a part of the layouts: each mesh is there."""
    chosen = list(layouts().items())[::every]
    assert len({layout.mesh for _, layout in chosen}) == 5
    values = np.asarray(jax.random.normal(jax.random.key(0), (8, 16)).astype(dtype))
    for source, target in itertools.product([layout for _, layout in chosen], repeat=2):
        x = jax.device_put(values, source)
        moved = move(x, target)
        assert moved.sharding == target
        assert np.asarray(moved).tobytes() == values.tobytes()
        np.testing.assert_array_equal(np.asarray(x), values)  # the source is intact


def test_a_leaf_that_is_in_place_is_not_copied():
    sharding = layouts()["fsdp2-('fsdp',)"]
    tree = {"a": jax.device_put(np.ones((8, 16), np.float32), sharding)}
    moved = reshard(tree, {"a": sharding})
    assert moved["a"] is tree["a"]


def test_many_arrays_in_layouts_of_their_own_move_together():
    """Each to where the next one was; one is in place, and one goes from numpy."""
    targets = list(layouts().values())
    values = [np.random.default_rng(i).normal(size=(8, 16)) for i in range(len(targets))]
    values = [x.astype(np.float32) for x in values]
    xs = [jax.device_put(x, at) for x, at in zip(values, targets[1:] + targets[:1], strict=True)]
    for moved in reshard(xs, targets), put_pieces(xs, targets):
        for x, value, target in zip(moved, values, targets, strict=True):
            assert x.sharding == target
            np.testing.assert_array_equal(np.asarray(x), value)
    mixed = reshard({"a": xs[0], "b": values[1], "c": xs[2]}, targets[1])
    assert mixed["a"] is xs[0]
    np.testing.assert_array_equal(np.asarray(mixed["b"]), values[1])
    np.testing.assert_array_equal(np.asarray(mixed["c"]), values[2])


def test_the_parts_that_move_at_once_are_bounded(monkeypatch):
    monkeypatch.setattr(module, "TOGETHER", 10)
    parts = [(part.start, part.stop) for part in module._parts([4, 4, 4, 30, 1, 9, 1])]
    assert parts == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert list(module._parts([])) == []
