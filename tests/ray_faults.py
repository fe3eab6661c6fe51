"""Roles that are struck once, in a stage of a run: what `tests/test_ray_train.py` puts in place of
`jaxrl.launch.pool_makers`. Workers import it; a file `ROLE.STAGE.FAULT.NTH` asks for the fault.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxrl import launch

real_pool_makers = launch.pool_makers
FOLDER = "faults"
"""Beside the run's folder."""
FAULTS = ("kill", "stop", "raise", "slow")


def pool_makers(setup: Any, *args: Any) -> dict[str, Callable[[], Any]]:
    """In a worker: the real makers, of roles that are struck where it is asked for."""
    folder = setup.run_dir.parent / FOLDER
    makers = real_pool_makers(setup, *args)
    return {role: partial(make, folder, role, maker) for role, maker in makers.items()}


def make(folder: Path, role: str, maker: Callable[[], Any]) -> Any:
    strike(folder, role, "startup", 0)
    made = maker()
    for path in folder.glob(f"{role}.*.*.*"):
        stage = path.name.split(".")[1]
        if stage in ("generate", "sample"):
            during_generation(folder, role, stage, made)
        elif hasattr(made, stage):
            after(folder, role, stage, made)
    return made


def after(folder: Path, role: str, stage: str, made: Any) -> None:
    """Struck once the work is done, and before anybody hears of it."""
    real, count = getattr(made, stage), [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        value = real(*args, **kwargs)
        strike(folder, role, stage, count[0])
        return value

    setattr(made, stage, method)


def during_generation(folder: Path, role: str, stage: str, made: Any) -> None:
    """Struck with the first tokens of a call, in the middle of the batch."""
    engine = made.engine if role == "rollout" else made._sampler.engine
    real, method, count = engine.generate, getattr(made, stage), [0]
    inside = [False]

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        inside[0] = True
        try:
            return method(*args, **kwargs)
        finally:
            inside[0] = False

    def generate(*args: Any, on_tokens: Callable[[int, int], None], **kwargs: Any) -> Any:
        def tokens(n: int, done: int) -> None:
            on_tokens(n, done)
            if inside[0]:
                strike(folder, role, stage, count[0])

        return real(*args, on_tokens=tokens, **kwargs)

    setattr(made, stage, counted)
    engine.generate = generate


def strike(folder: Path, role: str, stage: str, nth: int) -> None:
    """Carries out what the file of this moment asks for; once, in the last process of the pool."""
    if jax.process_index() != jax.process_count() - 1:
        return
    for fault in FAULTS:
        try:
            (folder / f"{role}.{stage}.{fault}.{nth}").unlink()
        except FileNotFoundError:
            continue
        if fault == "raise":
            raise ZeroDivisionError(f"struck in {role}.{stage}")
        if fault == "slow":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        time.sleep(1)  # a signal to oneself may take a moment
