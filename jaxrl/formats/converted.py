"""One conversion of a quantised file for all roles of a host that load it at the same time.

The first to need a tensor writes it, dequantised, into a folder that stands while the run starts;
the others map what was written. A file appears there only whole.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from jaxrl.errors import RunError
from jaxrl.formats.weights import Derived, Index

if TYPE_CHECKING:
    from jaxrl.formats.gguf import GgufFile  # slow to import, and not every model is such a file

BAND = 1 << 22
"""Elements that are dequantised at once."""
POLL_S = 0.05


class NotConverted(RunError):
    """Another role has been converting a tensor for too long."""


@dataclass(frozen=True)
class Scratch:
    """Where the converted tensors of one model file are, until the roles have started."""

    folder: Path
    """A role that does not find it, on another host or after the start, converts for itself."""
    dtype: str
    """One that holds every value of the roles' dtypes, so that the cast to theirs is exact or is
    the same rounding as from float32."""
    wait_s: float
    """Longest wait for another's conversion of one tensor."""


@dataclass(frozen=True)
class Converted(Derived):
    """The tensors of a GGUF file, of which the quantised ones are read from a `Scratch`."""

    tensors: GgufFile
    scratch: Scratch

    def read(self, name: str, index: Index) -> np.ndarray:
        if not self.tensors.is_quantised(name):
            return self.tensors.read(name, index)
        try:
            return self._whole(name)[index]
        except OSError:  # the folder is gone, or has no room
            return self.tensors.read(name, index)

    def _whole(self, name: str) -> np.ndarray:
        file = self.scratch.folder / name
        if not file.exists():
            with self._alone(name):
                if not file.exists():
                    self._convert(name, file)
        dtype, shape = jnp.dtype(self.scratch.dtype), self.tensors.shape(name)
        return np.memmap(file, dtype, "r", shape=shape).view(np.ndarray)

    def _convert(self, name: str, file: Path) -> None:
        shape = self.tensors.shape(name)
        assert shape is not None
        dtype, step = jnp.dtype(self.scratch.dtype), max(1, BAND // math.prod(shape[1:]))
        rest = (slice(None),) * (len(shape) - 1)
        part = file.with_name(f"{name}.part")
        with part.open("wb") as out:
            for at in range(0, shape[0], step):
                band = self.tensors.read(name, (slice(at, at + step), *rest))
                out.write(np.ascontiguousarray(band, dtype).view(np.uint8).data)
        os.replace(part, file)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Only one at a time, thread or process; the system takes the lock from one that dies."""
        lock, end = self.scratch.folder / f"{name}.lock", time.monotonic() + self.scratch.wait_s
        with lock.open("a+") as held:
            while not _locked(held.fileno()):
                if time.monotonic() > end:
                    raise NotConverted(
                        f"{self.tensors.file(name)}: process {lock.read_text()} has been converting"
                        f" tensor {name} for more than deadlines.startup={self.scratch.wait_s:g} s"
                    )
                time.sleep(POLL_S)
                lock.stat()  # raises once the start has ended and the folder is gone
            held.truncate(0)
            print(os.getpid(), end="", file=held, flush=True)
            yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
