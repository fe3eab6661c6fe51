"""Which programs this process compiles, and how many it has compiled, so that nobody takes a
compilation for a hang and a step that compiles again is seen."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX records for each program that it compiles, or reads from the compilation cache."""
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""What it records before that, while it writes the program for the compiler."""


@dataclass(frozen=True)
class Compilations:
    """Programs that were compiled, or read from the compilation cache."""

    programs: int = 0
    seconds: float = 0.0

    def __add__(self, other: Compilations) -> Compilations:
        return Compilations(self.programs + other.programs, self.seconds + other.seconds)

    def since(self, before: Compilations) -> Compilations:
        """Subtracts `before`; never negative, though a new process starts from 0."""
        programs, seconds = self.programs - before.programs, self.seconds - before.seconds
        return Compilations(max(0, programs), max(0.0, seconds))


_lock = threading.Lock()
_so_far = Compilations()
_running: dict[int, list[str]] = {}
"""Thread -> the programs that it is compiling, the innermost last."""


def compilations() -> Compilations:
    """Returns the compilations of this process so far."""
    return _so_far


def compiling(thread: int | None) -> str:
    """Returns the name of the program that a thread compiles now, as jitted; "" where it compiles
    none. Any thread may ask."""
    programs = _running.get(thread or -1)
    return programs[0] if programs else ""


def _begin(event: str, value: float, **details: object) -> None:
    """Takes the beginning of a compilation, which JAX records in the thread that compiles."""
    if event in (LOWERING, EVENT):
        name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        name = name.strip("_<>") or "a program"
        thread = threading.get_ident()
        _running[thread] = [*_running.get(thread, ()), name]


def _end(event: str, duration_secs: float, **_: object) -> None:
    """Takes the end of a compilation, also of one that failed."""
    global _so_far
    if event in (LOWERING, EVENT):
        thread = threading.get_ident()
        _running[thread] = _running.get(thread, [])[:-1]
        if not _running[thread]:
            del _running[thread]
    if event == EVENT:
        with _lock:  # roles compile side by side
            programs, seconds = _so_far.programs + 1, _so_far.seconds + duration_secs
            _so_far = Compilations(programs, seconds)


jax.monitoring.register_scalar_listener(_begin)
jax.monitoring.register_event_duration_secs_listener(_end)
