"""Compiled programs kept on disk, so that the second run starts quickly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax


def enable_compile_cache(path: str | None) -> None:
    """Keeps compiled programs in `path`, unless JAX_COMPILATION_CACHE_DIR names a place; None
    changes nothing. A folder that cannot be written is told on stderr: nothing but time is lost.
    """
    if path is None:
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = Path(path).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written to")
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user without a home
            told = f"compile_cache={path} is not used: {error}; every run compiles anew"
            print(told, file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
