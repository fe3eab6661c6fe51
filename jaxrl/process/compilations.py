"""How many programs this process has compiled, so that a step that compiles again is seen."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX records for each program that it compiles, or reads from the compilation cache."""


@dataclass(frozen=True)
class Compilations:
    """Programs that were compiled, or read from the compilation cache."""

    programs: int = 0
    seconds: float = 0.0

    def __add__(self, other: Compilations) -> Compilations:
        return Compilations(self.programs + other.programs, self.seconds + other.seconds)

    def since(self, before: Compilations) -> Compilations:
        """Returns what came after `before`; never negative, though a new process starts from 0."""
        programs, seconds = self.programs - before.programs, self.seconds - before.seconds
        return Compilations(max(0, programs), max(0.0, seconds))


_lock = threading.Lock()
_so_far = Compilations()


def compilations() -> Compilations:
    """Returns what this process has compiled so far."""
    return _so_far


def _record(event: str, duration_secs: float, **_: object) -> None:
    global _so_far
    if event == EVENT:
        with _lock:  # roles compile side by side
            _so_far += Compilations(1, duration_secs)


jax.monitoring.register_event_duration_secs_listener(_record)
