"""Runs in which everything takes times of its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from jaxrl.roles.actor import Actor
from jaxrl.roles.rollout import Sampler


def at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Launches, updates and saves take random times."""
    draw = np.random.default_rng(seed)

    def slowly(cls: type, name: str, most: float) -> None:
        real = getattr(cls, name)

        def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(draw.uniform(0, most))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, slow)

    slowly(Sampler, "_work_on", 0.01)
    slowly(Actor, "update", draw.choice([0.0, 0.1, 0.4]))
    slowly(Actor, "save", 0.05)
