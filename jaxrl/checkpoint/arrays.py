"""The arrays of one role to a folder and back, through Orbax."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl.types import Tree

logging.getLogger("absl").setLevel(logging.CRITICAL)  # what Orbax logs, it raises as well


@dataclass(frozen=True)
class _QuietLateWrites:
    """Drops what TensorStore's threads print where a save has failed: each of its writes that ends
    after that finds the event loop of Orbax closed. `Saving.wait` raises why it failed."""

    before: Callable[[Any], object]
    """The hook that is asked about everything else."""

    def __call__(self, unraisable: Any) -> None:
        is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
        if not (is_foreign and str(unraisable.exc_value) == "Event loop is closed"):
            self.before(unraisable)


class Saving:
    """A save that is being written while its role works on. Any thread may wait, at any time."""

    def __init__(self, finish: Callable[[], object] | None = None, failed: Exception | None = None):
        self._finish, self._failed = finish, failed
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Waits until everything is on disk. Raises what went wrong."""
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish()
                except Exception as error:
                    self._failed = error
        if self._failed is not None:
            raise self._failed


def save_arrays(path: Path, items: Mapping[str, Tree]) -> Saving:
    """Writes named trees (of `jax.Array`, or of plain numbers) to the new folder `path`.

    Returns once the arrays have left the devices: they may be donated then. Raises nothing: a disk
    that refuses is no reason to stop training, so `Saving.wait` raises it. Processes that share the
    arrays' mesh must all call, with one folder that all of them see.
    """
    try:
        from orbax.checkpoint import v1 as orbax  # it takes seconds to import

        if not isinstance(sys.unraisablehook, _QuietLateWrites):
            sys.unraisablehook = _QuietLateWrites(sys.unraisablehook)
        path.parent.mkdir(parents=True, exist_ok=True)  # else Orbax leaves threads that wait
        return Saving(orbax.save_checkpointables_async(path.resolve(), dict(items)).result)
    except Exception as error:
        return Saving(failed=error)


def load_arrays(path: Path, abstract: Mapping[str, Tree]) -> dict[str, Tree]:
    """Reads the named trees, each array with the shape, dtype and sharding that `abstract` asks.

    Args:
        abstract: trees of `jax.ShapeDtypeStruct` with shardings; None for plain numbers. Trees
            that are not named are not read.
    """
    from orbax.checkpoint import v1 as orbax

    return orbax.load_checkpointables(path.resolve(), dict(abstract))
