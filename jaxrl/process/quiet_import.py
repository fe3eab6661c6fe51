"""The compilers of GPUs, installed on a host without one, say at their import that it has none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "nvmap", "dxg", "kfd", "accel*", "vfio/[0-9]*")
"""Below /dev: NVIDIA's GPUs (also Jetson's and WSL's), AMD's, TPUs."""
PLUGINS = ("jax_cuda12_plugin.", "jax_cuda13_plugin.", "jax_plugins.xla_cuda")
"""Modules that `import jax` and its start load where they are installed."""


def has_accelerator() -> bool:
    """Whether this host may have a GPU or TPU; asks no driver."""
    if not sys.platform.startswith("linux"):
        return True
    return any(found for pattern in DEVICE_FILES for found in Path("/dev").glob(pattern))


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drops what is written to stderr, from C++ too."""
    try:
        kept = os.dup(2)
    except OSError:  # the process was started without one
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    hole = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(hole, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(hole)


class QuietPlugins(MetaPathFinder, Loader):
    """Imports the extension modules of jax's plugins without a word where no accelerator is."""

    def __init__(self) -> None:
        self._loaders: dict[str, Loader] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(PLUGINS) or has_accelerator():
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        with silenced():
            return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with silenced():
            self._loaders[module.__name__].exec_module(module)
        start = getattr(module, "initialize", None)  # of a plugin: called when jax starts
        if start is not None:
            vars(module)["initialize"] = silenced()(start)
