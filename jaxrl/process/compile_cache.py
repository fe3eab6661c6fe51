"""Compiled programs kept on disk, so that the second run starts quickly."""

from __future__ import annotations

import copy
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import jax
from jax._src import cache_key, compilation_cache  # the cache has no public hook

from jaxrl.errors import UserError, user_path
from jaxrl.process.streams import to_stderr

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(-start)?\("
)


def enable_compile_cache(path: str | None) -> None:
    """Keeps compiled programs in `path`, unless JAX_COMPILATION_CACHE_DIR names a place; None
    changes nothing. A folder that cannot be written is reported on stderr: only time is lost."""
    if path is None:
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = user_path(path)
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written to")
        except (OSError, UserError) as error:
            message = f"compile_cache={path} is not used: {error}; every run compiles again"
            to_stderr(message)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def leave_out_of_keys(flags: Sequence[str]) -> None:
    """Makes the value of these flags of XLA, such as `--xla_x`, no part of a program's key in the
    compile cache, in this process: files that differ from process to process.

    With a key of its own, a process of a mesh of several would compile what the others find in the
    cache, and wait for their share of the autotuning for ever.
    """
    if flags[0] in cache_key.xla_flags_to_exclude_from_cache_key:
        return
    cache_key.xla_flags_to_exclude_from_cache_key += flags  # of the environment
    hash_options: Callable[..., None] = cache_key._hash_serialized_compile_options

    @wraps(hash_options)
    def hash_without(hash_obj: object, options: Any, *args: Any, **kwargs: Any) -> None:
        options = copy.deepcopy(options)  # jax compiles with the other one
        for flag in flags:
            setattr(options.executable_build_options.debug_options, flag.lstrip("-"), "")
        hash_options(hash_obj, options, *args, **kwargs)

    setattr(cache_key, hash_options.__name__, hash_without)


_KEPT: OrderedDict[str, tuple[object, int]] = OrderedDict()
"""Key in the cache (on a CPU it names the devices too) -> an unordered program that this process
compiled, and the seconds that took; the one used last stands at the end."""
_KEPT_AT_MOST = 256


def compile_unordered_programs_again() -> None:
    """Keeps programs whose collectives lose their order on disk out of the compile cache, in this
    process from now on: each process compiles them once, and holds the last `_KEPT_AT_MOST` of
    them for its later runs. Call it before programs run on several CPU devices of one process.

    XLA's CPU runtime runs the operations of a program as a graph, on each device by itself. What
    makes every device enter two collectives in the same order is an edge between them, which comes
    from one resource that all collectives of a compiled program share. When a program is read back
    from disk, each computation (the body of a loop, a branch) gets a resource of its own, so that
    nothing orders a collective inside a loop after one outside of it (jaxlib 0.10.2 and 0.12.0).
    One device then waits in the first and another in the second, for ever: XLA ends the process
    after 40 s (`rendezvous.cc: Termination timeout`). Seen with two emulated devices on two loaded
    cores: of runs of 60 to 100 updates whose programs came from the cache, 2 of 3 hung with jaxlib
    0.10.2 and 4 of 4 with 0.12.0; whose programs were compiled by the process itself, none did.
    """
    read: Callable[..., Any] = compilation_cache.get_executable_and_time
    write: Callable[..., None] = compilation_cache.put_executable_and_time
    if hasattr(read, "__wrapped__"):
        return

    @wraps(read)
    def read_ordered(key: str, *args: object) -> tuple[object, int | None]:
        if key in _KEPT:
            _KEPT.move_to_end(key)
            return _KEPT[key]
        program, seconds = read(key, *args)
        return (None, None) if _is_unordered(program) else (program, seconds)

    @wraps(write)
    def write_ordered(
        key: str, name: str, program: Any, backend: Any, seconds: int, *more: Any
    ) -> None:
        if not _is_unordered(program):
            write(key, name, program, backend, seconds, *more)
            return
        _KEPT[key] = program, seconds
        while len(_KEPT) > _KEPT_AT_MOST:
            _KEPT.popitem(last=False)

    setattr(compilation_cache, read.__name__, read_ordered)
    setattr(compilation_cache, write.__name__, write_ordered)


def collectives_lose_order(hlo: str) -> bool:
    """Returns whether the collectives of an HLO module, given as text, stand in more than one
    computation; a line that is `}` ends each of these."""
    return len({hlo.rfind("\n}", 0, found.start()) for found in COLLECTIVE.finditer(hlo)}) > 1


def _is_unordered(program: Any) -> bool:
    if not hasattr(program, "hlo_modules") or program.local_devices()[0].platform != "cpu":
        return False
    # Half the text, in half the time; no public module has its options.
    form = import_module("jax._src.lib").hlo.HloPrintOptions()
    form.print_metadata = form.print_operand_shape = form.print_backend_config = False
    form.print_large_constants = False
    return any(collectives_lose_order(module.to_string(form)) for module in program.hlo_modules())
