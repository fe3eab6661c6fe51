"""Roles that are struck in a stage of a run: what `tests/laws/test_ray_train.py` puts in place of
`jaxrl.run.launch.pool_makers`.

Workers import it; a file `ROLE.STAGE.FAULT.NTH` asks for a fault, in
the first call of that kind from the n-th on; calls of processes that were lost count too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import psutil
from ray_roles import exhaust

from jaxrl.run import launch

real_pool_makers = launch.pool_makers
FOLDER = "faults"
"""Beside the run's folder."""
CALLS = "calls"
"""Folder with a file for each kind of call, a byte for each call."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
"""Of the worker itself; with `raylet-` or `gcs_server-` before it, of that daemon."""


def pool_makers(packed: bytes, *args: Any) -> dict[str, Callable[[], Any]]:
    """In a worker: the real makers, of roles that are struck where it is asked for."""
    folder = cloudpickle.loads(packed).run_dir.parent / FOLDER
    makers = real_pool_makers(packed, *args)
    return {role: partial(make, folder, role, maker) for role, maker in makers.items()}


def make(folder: Path, role: str, maker: Callable[[], Any]) -> Any:
    strike(folder, role, "startup", 0)
    made = maker()
    for stage in {path.name.split(".")[1] for path in folder.glob(f"{role}.*.*.*")}:
        if stage in ("generate", "sample"):
            during_generation(folder, role, stage, made)
        elif hasattr(made, stage):
            after(folder, role, stage, made)
    return made


def after(folder: Path, role: str, stage: str, made: Any) -> None:
    """Struck once the work is done, and before anybody hears of it."""
    real = getattr(made, stage)

    def method(*args: Any, **kwargs: Any) -> Any:
        nth = count(folder, role, stage)
        value = real(*args, **kwargs)
        strike(folder, role, stage, nth)
        return value

    setattr(made, stage, method)


def during_generation(folder: Path, role: str, stage: str, made: Any) -> None:
    """Struck with the first tokens of a call, in the middle of the batch."""
    engine = made.engine if role == "rollout" else made._sampler.engine
    real, method = engine.generate, getattr(made, stage)
    inside = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        inside[0] = count(folder, role, stage)
        try:
            return method(*args, **kwargs)
        finally:
            inside[0] = 0

    def generate(*args: Any, on_tokens: Callable[[int, int], None], **kwargs: Any) -> Any:
        def tokens(n: int, done: int) -> None:
            on_tokens(n, done)
            if inside[0]:
                strike(folder, role, stage, inside[0])

        return real(*args, on_tokens=tokens, **kwargs)

    setattr(made, stage, counted)
    engine.generate = generate


def count(folder: Path, role: str, stage: str) -> int:
    """The number of this call among those of its kind, from 1."""
    (folder / CALLS).mkdir(exist_ok=True)
    with open(folder / CALLS / f"{role}.{stage}.{jax.process_index()}", "ab") as file:
        file.write(b".")
        return file.tell()


def asked(folder: Path) -> list[Path]:
    """The faults that have not struck yet."""
    return sorted(path for path in folder.glob("*.*.*.*") if path.is_file())


def strike(folder: Path, role: str, stage: str, nth: int) -> None:
    """Carries out what the file of this moment asks for, in the last process of the pool."""
    if jax.process_index() != jax.process_count() - 1:
        return
    for path in asked(folder):
        *where, fault, first = path.name.split(".")
        if where == [role, stage] and nth >= int(first):
            path.unlink()
            carry_out(fault, f"{role}.{stage}")
            return


def carry_out(fault: str, where: str) -> None:
    if fault == "raise":
        raise ZeroDivisionError(f"struck in {where}")
    if fault == "slow":
        time.sleep(3600)
    if fault == "memory":
        exhaust()
    victim, _, name = fault.rpartition("-")
    os.kill(daemon(victim) if victim else os.getpid(), SIGNALS[name])
    # A signal may take a moment. Few calls need a daemon: without a call that lasts until its loss
    # is found, a short run is over before.
    time.sleep(30 if victim else 1)


def daemon(name: str) -> int:
    """The process id of a daemon of the cluster that this worker belongs to."""
    raylet = psutil.Process().parent()
    if name == "raylet":
        return raylet.pid
    return next(each.pid for each in raylet.parent().children() if each.name() == name)
