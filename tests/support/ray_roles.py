"""Roles for the tests of the launcher `ray`, without models: deterministic, slow where asked."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import UserError
from jaxrl.runtime.worker import detail, phase
from jaxrl.sharding.placement import Placement
from jaxrl.sharding.reshard import reshard


@dataclass(frozen=True)
class Sent:
    version: int
    params: Any


class Role:
    """Numbers in place of weights and rollouts, on a mesh of its pool's devices."""

    def __init__(self, devices: Sequence[Any], marks: str):
        self.mesh = Mesh(np.array(devices), ("x",))
        self.rows = NamedSharding(self.mesh, PartitionSpec("x"))
        self.marks = marks
        self.version, self.params = 0, self._make(lambda i: i)

    def _make(self, value: Any) -> jax.Array:
        whole = np.asarray([value(i) for i in range(8)], np.float32)
        return jax.make_array_from_callback((8,), self.rows, lambda index: whole[index])

    def variable(self, name: str) -> str:
        return os.environ.get(name, "")

    # actor
    def update(self, rollout: Any, scores: Any) -> dict[str, float]:
        self._once("update")
        total = sum(reshard(part, self.rows) for part in scores)
        self.params = jax.jit(lambda p, s: p * 0.5 + s)(self.params, total)
        self.version += 1
        return {"sum": float(np.sum(_host(self.params) * np.arange(8)))}

    def publish(self, version: int) -> Sent:
        assert version == self.version
        return Sent(version, {"w": self.params, "b": self.params.astype(jnp.bfloat16)})

    # rollout
    def load(self, sent: Sent) -> int:
        self._once("load")
        self.params, self.version = reshard(sent.params, self.rows)["w"], sent.version
        return self.version

    def generate(self, index: int) -> dict[str, Any]:
        self._once("generate")
        return {"index": index, "version": self.version, "values": _host(self.params) + index}

    # teacher
    def score(self, rollout: dict[str, Any], part: int = 0) -> jax.Array:
        self._once("score")
        values = rollout["values"] * (part + 1)
        return jax.make_array_from_callback((8,), self.rows, lambda index: values[index])

    # faults
    def fail(self, message: str) -> None:
        raise ZeroDivisionError(message)

    def refuse(self) -> None:
        raise UserError("batch_size=0 must be at least 1")

    def exhaust(self) -> None:
        exhaust()

    def hang(self, seconds: float) -> None:
        with phase("waiting for a collective"):
            detail("3 of 4 done")
            time.sleep(seconds)

    def later(self, seconds: float, message: str) -> None:
        time.sleep(seconds)
        self.fail(message)

    def pair(self, seconds: float) -> float:
        """A sum over the processes of the pool, which each reaches a while after it was asked."""
        time.sleep(seconds)
        ones = jax.make_array_from_callback(
            (2,), self.rows, lambda index: np.ones(2, np.float32)[index]
        )
        return float(np.sum(_host(ones)))

    def alive(self) -> int:
        """Arrays on the devices of this process."""
        gc.collect()
        return len(jax.live_arrays())

    def facts(self) -> tuple[int, int, int]:
        return os.getpid(), len(jax.local_devices()), len(jax.devices())

    def _once(self, stage: str) -> None:
        """Carries out what a file named `ROLE-free stage.FAULT` asks for, once."""
        for fault in ("kill", "stop"):
            path = os.path.join(self.marks, f"{stage}.{fault}")
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


def exhaust() -> None:
    """Asks a device for more than the system gives this process, with some room for threads."""
    value = np.zeros(1 << 30, np.int8)
    size = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    jax.device_put(value).block_until_ready()
    raise AssertionError("there was room")


def _host(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable:
        return np.asarray(x)
    everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(x))


def make(marks: str, placement: Placement, pool: int, devices: Sequence[Any]) -> dict[str, Any]:
    return {role: lambda: Role(devices, marks) for role in placement.pools[pool].roles}
