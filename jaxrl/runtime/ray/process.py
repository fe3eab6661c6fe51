"""A process of a pool, as Ray starts it: a Ray actor that hands everything to its server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ray
from ray.actor import ActorClass

from jaxrl.process.plain import Keywords
from jaxrl.runtime.server import WorkerServer
from jaxrl.sharding.placement import Placement

MakeRoles = Callable[[Placement, int, Sequence[jax.Device]], Mapping[str, Callable[[], object]]]
CALLS = 256
"""Calls that a process takes at once; all but one wait for their turn."""


def worker_class(pool: str) -> ActorClass:
    """A Ray actor class whose name, and so its process title, tells the roles."""
    methods = {"run": "calls"} | dict.fromkeys(
        ("info", "free_port", "join", "open", "answer", "state", "stacks", "stop"), "control"
    )
    body = {
        name: ray.method(concurrency_group=group)(_forward(name)) for name, group in methods.items()
    }
    body["run"] = ray.method(concurrency_group="calls", num_returns=2)(_forward("run"))
    body["__init__"] = _begin
    cls = type(f"jaxrl:{pool}", (), body)
    options: Keywords = {"concurrency_groups": {"calls": CALLS, "control": 4}}
    return ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)(cls)


def _begin(self: Any, name: str, rank: int, cwd: str) -> None:
    self.server = WorkerServer(name, rank, cwd, ray.put)


def _forward(name: str) -> Callable[..., object]:
    def method(self: Any, *args: object) -> object:
        return getattr(self.server, name)(*args)

    method.__name__ = name
    return method


def make_role(make_roles: MakeRoles, placement: Placement, pool: int, role: str) -> object:
    """In the worker: a role on this pool's devices."""
    return make_roles(placement, pool, jax.devices())[role]()
