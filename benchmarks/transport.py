"""Weights from one process to another through the object store, beside a plain memory copy.

    python benchmarks/transport.py [--mb 256] [--repeats 5]

An actor of two devices (fsdp=2, each holds half) publishes bfloat16 arrays to a rollout of two
devices (data=2, each holds all), once as one process for each pool and once as two. GB/s are bytes
of the weights / seconds, each byte counted once however many devices receive it: `pack` takes them
off the devices into the object store, `load` puts them on the receiver's devices, `whole` is from
the order to publish to the end of the load. `copy` is a memcpy of the same bytes in this process,
taking turns with the transfers. The best of the rounds and their median, since others may use the
machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config.settings import RayConfig
from jaxrl.sharding.placement import Placement, parse
from jaxrl.sharding.reshard import reshard

MESH = "actor=2,rollout=2"
LAYERS = 16
DEADLINE = 300.0
GB = 1e9


class Sender:
    """Holds weights as an actor with fsdp=2 does."""

    def __init__(self, devices: Sequence[Any], mb: int):
        rows = NamedSharding(Mesh(np.array(devices), ("fsdp",)), PartitionSpec("fsdp"))
        shape = (512, mb * (1 << 20) // LAYERS // 2 // 512)
        values = np.random.default_rng(0).integers(0, 1 << 15, shape, np.uint16)
        brain = values.view(jax.numpy.bfloat16)
        self.params = {
            f"layer{i}": jax.make_array_from_callback(shape, rows, lambda index: brain[index])
            for i in range(LAYERS)
        }

    def publish(self) -> dict[str, jax.Array]:
        return self.params


class Receiver:
    """Takes weights as a rollout with data=2 does."""

    def __init__(self, devices: Sequence[Any]):
        self.everywhere = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec())

    def load(self, sent: Mapping[str, Any]) -> int:
        self.params = None  # the old version is freed first
        self.params = jax.block_until_ready(reshard(sent, self.everywhere))
        return sum(x.nbytes for x in jax.tree.leaves(self.params))


def make_roles(mb: int, placement: Placement, pool: int, devices: Sequence[Any]) -> dict[str, Any]:
    role = placement.pools[pool].roles[0]
    return {role: partial(Sender, devices, mb) if role == "actor" else partial(Receiver, devices)}


def main() -> None:
    told = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    told.add_argument("--mb", type=int, default=256, help="size of the weights, in MiB")
    told.add_argument("--repeats", type=int, default=5, help="rounds, after one to warm up")
    arguments = told.parse_args()
    here = str(Path(__file__).parent)  # where the workers find this module
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    copies: list[float] = []
    rows = [measure(arguments.mb, arguments.repeats, n, copies) for n in (1, 2)]
    size = arguments.mb * (1 << 20)
    print(f"\n{size / 1e6:.0f} MB of bfloat16, GB/s: best (median) of {arguments.repeats} rounds")
    print(f"{'processes of a pool':22}{'pack':>16}{'load':>16}{'whole':>16}")
    for n, row in zip((1, 2), rows, strict=True):
        print(f"{n:<22}" + "".join(f"{rate(size, seconds):>16}" for seconds in row))
    print(f"{'plain memory copy':22}{rate(size, copies):>16}")


def measure(mb: int, repeats: int, processes: int, copies: list[float]) -> list[list[float]]:
    """Seconds of each round for pack, load and both."""
    import transport  # by name, not as __main__: so that the workers find it

    from jaxrl.runtime.ray.connect import import_ray  # an optional package

    import_ray(None)
    from jaxrl.runtime.ray.worker_group import RayWorkerGroup  # an optional package

    worker_group = RayWorkerGroup(
        RayConfig(devices_per_worker=2 // processes),
        parse(MESH),
        partial(transport.make_roles, mb),
        print,
        startup_s=DEADLINE,
        roles=("actor", "rollout"),
    )
    source = np.ones(mb << 20, np.uint8)
    target = np.zeros_like(source)
    seconds: list[list[float]] = [[], [], []]
    try:
        worker_group.start()
        for i in range(repeats + 1):
            begun = time.perf_counter()
            sent = worker_group.handle("actor").call("publish", deadline=DEADLINE)
            loaded = worker_group.handle("rollout").call("load", sent, deadline=DEADLINE)
            loaded.result()
            whole = time.perf_counter() - begun
            if i > 0:
                for total, took in zip(
                    seconds, (sent.times.seconds, loaded.times.seconds, whole), strict=True
                ):
                    total.append(took)
                begun = time.perf_counter()
                np.copyto(target, source)
                copies.append(time.perf_counter() - begun)
    finally:
        worker_group.stop()
    return seconds


def rate(nbytes: int, seconds: Sequence[float]) -> str:
    best, median = nbytes / min(seconds) / GB, nbytes / statistics.median(seconds) / GB
    return f"{best:.2f} ({median:.2f})"


if __name__ == "__main__":
    main()
