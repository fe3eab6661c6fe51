"""The arrays of one role to a folder and back, through Orbax."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logging.getLogger("absl").setLevel(logging.CRITICAL)  # what Orbax logs, it raises as well


class Saving:
    """A save that is being written while its role works on. Any thread may wait, at any time."""

    def __init__(self, response: Any = None, failed: Exception | None = None):
        self._response, self._failed = response, failed
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until everything is on disk. Raises what went wrong."""
        with self._lock:
            response, self._response = self._response, None
            if response is not None:
                try:
                    response.result()
                except Exception as error:
                    self._failed = error
        if self._failed is not None:
            raise self._failed


def save_arrays(path: Path, items: Mapping[str, Any]) -> Saving:
    """Writes named trees (of `jax.Array`, or of plain numbers) to the new folder `path`.

    Returns once the arrays have left the devices: they may be donated then. Raises nothing: a disk
    that refuses is no reason to stop training, so `Saving.wait` raises it. Processes that share the
    arrays' mesh must all call, with one folder that all of them see.
    """
    try:
        from orbax.checkpoint import v1 as orbax  # it takes seconds to import

        path.parent.mkdir(parents=True, exist_ok=True)  # else Orbax leaves threads that wait
        return Saving(orbax.save_checkpointables_async(path.resolve(), dict(items)))
    except Exception as error:
        return Saving(failed=error)


def load_arrays(path: Path, abstract: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the named trees, each array with the shape, dtype and sharding that `abstract` asks.

    Args:
        abstract: trees of `jax.ShapeDtypeStruct` with shardings; None for plain numbers. Trees
            that are not named are not read.
    """
    from orbax.checkpoint import v1 as orbax

    loaded: dict[str, Any] = orbax.load_checkpointables(path.resolve(), dict(abstract))
    return loaded
