"""Runs of roles that only take time, through the loop and the workers of real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl.algorithms.protocols import Sources
from jaxrl.config.schema import Config
from jaxrl.plan.simulate import Stage
from jaxrl.profile.waits import Span, read_calls
from jaxrl.run.loop import Calls, Loop
from jaxrl.runtime.worker import LocalWorkerGroup
from jaxrl.sharding.placement import parse
from jaxrl.telemetry.timeline import Timeline


class Sleeper:
    """Any role: each of its methods takes some seconds a step."""

    def __init__(self, seconds: Mapping[str, float]):
        self._seconds = seconds

    def _work(self, method: str, parts: int = 1) -> None:
        time.sleep(self._seconds.get(method, 0.0) / parts)

    def generate(self, prompts: Any, step: int, attempt: int = 0) -> None:
        self._work("generate")

    def score(self, rollout: Any, part: int, parts: int) -> None:
        self._work("score", parts)

    def update(self, rollout: Any, scores: Any, step: int) -> None:
        self._work("update")

    def publish(self, version: int) -> None:
        self._work("publish")

    def load(self, weights: Any) -> None:
        self._work("load")

    def save(self, folder: Any, step: int) -> int:
        return step

    def saved(self, step: int) -> None:
        return None


class Saves:
    """Stands for the checkpoint writer: only the end of the run is saved."""

    def due(self, step: int) -> bool:
        return False

    def folder(self, step: int) -> None:
        return None

    def begin(self, step: int, saved: Any, rollouts: Any, schedule: Any) -> None:
        pass


class Rows:
    stream = None

    def row(self, step: int, futures: Mapping[str, Any]) -> None:
        for future in futures.values():
            future.result()


def sleeping_run(
    config: Config,
    stages: Mapping[Stage, float],
    timeline: Path,
    **made: Callable[[], object],
) -> Sequence[Span]:
    """The calls of a run by its `mesh` and `schedule` whose stages take so many seconds a step.

    Args:
        made: role -> makes it, in place of a `Sleeper`.
    """
    workers = LocalWorkerGroup(stop_s=5)
    for pool in parse(config.mesh).pools:
        makers = {
            role: partial(
                Sleeper, {method: s for (whose, method), s in stages.items() if whose == role}
            )
            for role in pool.roles
        } | {role: made[role] for role in pool.roles if role in made}
        for started in workers.start(pool.name, (), makers, deadline=30).values():
            started.result()
    with Timeline(timeline) as written:
        roles: Any = {role: workers.handle(role) for role in workers.roles}
        calls = Calls(config, roles, recorders=(written.record,))
        sources = Sources(config, lambda i: [i], {}, calls.call, calls.wait)  # type: ignore[arg-type, list-item, return-value]
        Loop(sources, calls, Rows(), Saves()).run()  # type: ignore[arg-type]
    workers.stop()
    return read_calls(timeline)
