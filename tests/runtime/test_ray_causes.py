"""Which error of several processes is told: the one that names a cause, whoever is heard first."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cases import needs_ray

needs_ray()

from ray.exceptions import RayError  # noqa: E402

from jaxrl.errors import RunError, UserError  # noqa: E402
from jaxrl.runtime.ray import worker_group as module  # noqa: E402
from jaxrl.runtime.ray.worker_group import NotStarted, RayWorkerGroup, may_follow  # noqa: E402
from jaxrl.runtime.role_server import CallReport  # noqa: E402
from jaxrl.runtime.worker import Times, WorkerError  # noqa: E402

PEER = WorkerError(
    "teacher.start failed in worker teacher.1:\nTraceback (most recent call last):\n"
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer"
)
CAUSES = [
    RunError("version 2 of the weights arrived damaged: 1 of 9 arrays, the first layers/0/mlp"),
    UserError("model.safetensors: truncated, damaged"),
    WorkerError("teacher.start failed:\nRuntimeError: layers/0/mlp is float32[3], it must be [4]"),
]


def test_what_names_a_cause_follows_no_death() -> None:
    assert may_follow(PEER) and not any(map(may_follow, CAUSES))


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("heard", ["cause", "death", "peer"])
def test_the_cause_is_told_whoever_is_heard_first(
    heard: str, cause: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Any:
        raise RayError("The worker died unexpectedly")

    values: dict[str, Callable[[], Any]] = {
        "cause": lambda: CallReport(Times(), cause),
        "death": fail,
        "peer": lambda: CallReport(Times(), PEER),
    }
    order = [heard, *(name for name in values if name != heard)]

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ready = [name for name in order if name in refs][:num_returns]
        return ready, [name for name in refs if name not in ready]

    ray = SimpleNamespace(wait=wait, get=lambda ref, timeout: values[ref]())
    monkeypatch.setattr(module, "ray", ray)
    group: Any = RayWorkerGroup.__new__(RayWorkerGroup)
    group._sender = SimpleNamespace(check=lambda: None)
    pool: Any = SimpleNamespace(state=lambda rank: SimpleNamespace(where=f"teacher.{rank}"))
    asked: Any = [(pool, rank, name) for rank, name in enumerate(order)]
    with pytest.raises((RunError, UserError)) as caught:
        group._get_all(asked, time.monotonic(), None)
    assert str(caught.value) == str(cause)


def test_a_death_alone_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(ref: str, timeout: float) -> Any:
        raise RayError("The worker died unexpectedly")

    ray = SimpleNamespace(wait=lambda refs, num_returns, timeout: (refs[:1], refs[1:]), get=get)
    monkeypatch.setattr(module, "ray", ray)
    group: Any = RayWorkerGroup.__new__(RayWorkerGroup)
    group._sender = SimpleNamespace(check=lambda: None)
    pool: Any = SimpleNamespace(state=lambda rank: SimpleNamespace(where="teacher.0"))
    with pytest.raises(NotStarted, match="died while it started: The worker died"):
        group._get_all([(pool, 0, "a")], time.monotonic(), None)
