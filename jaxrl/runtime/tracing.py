"""JAX's profiler in a process, which all of its workers share."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxrl.sharding.ceilings import Ceilings, ceilings_of

PROFILE = "profile"
"""The method of a worker, and of no role, that begins and ends a trace."""


@dataclass(frozen=True)
class Traced:
    """A worker's report about a trace that it began or ended."""

    problem: str | None = None
    """Why there is none."""
    ceilings: Ceilings | None = None
    """Of its first device, once the trace has ended; None where another worker of the process tells
    them, or it has no device."""


@dataclass
class Tracer:
    """Begins the trace once every worker of the process has come to where it shall begin, in the
    order of its own calls, and ends it likewise: what is asked for in between is in it, and as
    little else as can be.
    """

    name: str = ""
    """Of the process, and of its folder; empty where there is one process."""
    workers: int = 1
    """Those that will come."""
    _arrived: Counter[Path | None] = field(default_factory=Counter)
    _device: jax.Device | None = None
    _tracing: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, folder: Path | None, dtype: str, devices: tuple[jax.Device, ...]) -> Traced:
        """A worker has come to the beginning of a trace (folder None: to its end).

        Args:
            folder: of all traces of the run.
            dtype: of the products that tell what an unknown device can do.
            devices: of the worker.
        """
        with self._lock:
            self._device = self._device or next(iter(devices), None)
            self._arrived[folder] += 1
            if self._arrived[folder] < self.workers:
                return Traced()
            del self._arrived[folder]
            try:
                if folder is not None:
                    self._begin(folder / self.name)
                elif self._tracing:
                    self._end()
            except Exception as error:  # a profiler that refuses ends no run
                return Traced(problem=str(error).strip() or type(error).__name__)
            if folder is not None or self._device is None:
                return Traced()
            return Traced(ceilings=ceilings_of(self._device, dtype))

    def _begin(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call: slow, and nothing but noise here
        jax.profiler.start_trace(str(folder), profiler_options=options)
        self._tracing = True

    def _end(self) -> None:
        self._tracing = False  # also where it cannot be written: the next one starts over
        jax.profiler.stop_trace()
