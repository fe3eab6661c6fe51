"""Compiled programs kept on disk, so that the second run starts quickly."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxrl.errors import UserError


def enable_compile_cache(path: str | None) -> None:
    """Keeps compiled programs in `path`, unless JAX_COMPILATION_CACHE_DIR names a place; None
    changes nothing.
    """
    if path is None:
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = Path(path).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"compile_cache={path} cannot be made: {error}; name another folder, or null"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
