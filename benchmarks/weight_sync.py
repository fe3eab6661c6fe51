"""New weights from the actor to the role that samples, beside a plain copy. One JSON line.

    python benchmarks/weight_sync.py [--model builtin:student]
    python benchmarks/weight_sync.py --model FOLDER --dtype bfloat16

Each case is `Actor.publish` and `Sampler.load` from one mesh and layout to another, on emulated
devices: `same` (one mesh; the blocks are taken apart, nothing travels), `disjoint` (one device to
another), `fsdp_to_data` and `fsdp_to_tensor` (two devices to two others, other shards),
`reshard_in_place` (the same two devices, other shards). The parameters are float32; `--dtype` is
what is sent. `plain` is one `device_put` of the same bytes as a single array to another device,
`copy` the same bytes by memcpy; all take turns. The floor: float32 read once, the sent bytes
written once to each device that keeps them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import step as whole_step

from jaxrl.plan import make_plan
from jaxrl.profile.work import Work
from jaxrl.run.job import make_job
from jaxrl.run.launch import make_actor, make_rollout_role
from jaxrl.sharding.mesh import ensure_devices, role_meshes

CASES: dict[str, dict[str, str]] = {
    "same": {"mesh": "actor+rollout=1,teacher=1"},
    "disjoint": {"mesh": "actor=1,rollout=1,teacher=1"},
    "fsdp_to_data": {
        "mesh": "actor=2,rollout=2,teacher=1",
        "actor.parallel.fsdp": "2",
        "rollout.parallel.data": "2",
    },
    "fsdp_to_tensor": {
        "mesh": "actor=2,rollout=2,teacher=1",
        "actor.parallel.fsdp": "2",
        "rollout.parallel.tensor": "2",
    },
    "reshard_in_place": {
        "mesh": "actor+rollout=2,teacher=1",
        "actor.parallel.fsdp": "2",
        "rollout.parallel.tensor": "2",
    },
}
DEVICES = 5


def main() -> None:
    told = common.parser(__doc__, devices=DEVICES)
    told.add_argument("--model", default="builtin:student")
    arguments = told.parse_args()
    if arguments.devices < DEVICES:
        told.error(f"--devices {arguments.devices}: the cases need {DEVICES}")
    common.start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        cases = {name: make_case(arguments, keys, folder) for name, keys in CASES.items()}
    size = common.tree_bytes(cases["same"]().params)
    flat = jax.block_until_ready(jnp.ones(size // 4, jnp.float32))
    target = jax.devices()[-1]
    source, copied = np.ones(size, np.uint8), np.empty(size, np.uint8)
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: jax.device_put(flat, target),
        "copy": lambda: np.copyto(copied, source),
        **{name: partial(sent, run) for name, run in cases.items()},
    }
    seconds = common.alternate(ways, arguments.repeats)
    machine = common.ceilings(arguments.dtype)
    read = size * 4 // jnp.dtype(arguments.dtype).itemsize
    figures = {}
    for name in ways:
        copies = 2 if name == "fsdp_to_data" else 1
        work = Work(0, (read if name in CASES else size) + copies * size)
        speed = common.rounded(size / statistics.median(seconds[name]) / 1e9)
        figures[name] = common.figure(seconds[name], [work], machine, gb_per_s=speed)
    print(common.line(arguments, machine, figures, benchmark="weight_sync", sent_bytes=size))


def sent(run: Callable[[], Any]) -> Any:
    return run().params


def make_case(
    arguments: argparse.Namespace, keys: dict[str, str], folder: str
) -> Callable[[], Any]:
    """Builds both roles; the result sends one version and waits for it."""
    options = argparse.Namespace(
        dtype=arguments.dtype,
        repeats=1,
        teacher=arguments.model,
        student=arguments.model,
        data="arithmetic:size=100000",
        batch=4,
        group=1,
        prompt=16,
        new=16,
        endless=False,
        mesh=keys["mesh"],
        beta=1.0,
        overrides=[
            "distill.signal=sampled",  # no teacher's head in the actor
            "actor.dtype=float32",
            *(f"{key}={value}" for key, value in keys.items() if key != "mesh"),
        ],
    )
    config = whole_step.make_config(options, Path(folder))
    plan = make_plan(config, ("actor", "rollout", "teacher"), ensure_devices)
    meshes = role_meshes(plan.devices, plan.placement, plan.axes)
    job = make_job(config)
    setup = job.for_workers(plan.axes, Path(folder))
    actor, sampler = make_actor(setup, meshes), make_rollout_role(setup, meshes)

    def send() -> Any:
        actor.version += 1
        weights = actor.publish(actor.version, arguments.dtype)
        sampler.load(weights)
        return weights

    return send


if __name__ == "__main__":
    main()
