"""Weights arrive bit-equal whatever the two layouts."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl.sharding.reshard import nbytes, put_pieces, reshard

AXES = ("data", "fsdp", "tensor")


def mesh(devices, shape):
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


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


@pytest.mark.parametrize(
    ("move", "dtype"),
    [(reshard, jnp.float32), (reshard, jnp.bfloat16), (put_pieces, jnp.bfloat16)],
)
def test_every_pair_of_layouts_is_bit_equal(move, dtype):
    values = np.asarray(jax.random.normal(jax.random.key(0), (8, 16)).astype(dtype))
    for source, target in itertools.product(layouts().values(), repeat=2):
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
    assert nbytes(tree) == 8 * 16 * 4
