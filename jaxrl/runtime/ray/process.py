"""A process of a pool, as Ray starts it: a `WorkerServer` that is a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import ray
from ray.actor import ActorClass

from jaxrl.process.plain import Keywords
from jaxrl.runtime.server import WorkerServer
from jaxrl.sharding.placement import Placement

MakeRoles = Callable[[Placement, int, Sequence[jax.Device]], Mapping[str, Callable[[], object]]]
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""


CONTROL = ("info", "free_port", "join", "open", "answer", "state", "stacks", "stop")


def worker_class(pool: str) -> ActorClass:
    """A Ray actor class whose name, and so its process title, tells the roles."""
    methods: dict[str, object] = {
        name: ray.method(concurrency_group="control")(getattr(WorkerServer, name))
        for name in CONTROL
    }
    methods["run"] = ray.method(concurrency_group="calls", num_returns=2)(WorkerServer.run)
    cls = type(f"jaxrl:{pool}", (WorkerServer,), methods)
    options: Keywords = {"concurrency_groups": {"calls": CALLS, "control": 4}}
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)(cls)


def make_role(make_roles: MakeRoles, placement: Placement, pool: int, role: str) -> object:
    """In the worker: a role on this pool's devices."""
    return make_roles(placement, pool, jax.devices())[role]()
