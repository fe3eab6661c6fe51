"""A function in a process of its own: a compiler that ends its process does not end ours."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer);"
    " from jaxrl.aot.apart import answer; answer()"
)
FATAL = re.compile(r"F\d{4}.*?\] *(.*)")
"""How C++ logs what it ends its process for."""


class Died(RuntimeError):
    """The process ended before the function had returned; says how, and what it printed of why."""


def apart(ended: threading.Event, work: Callable[..., Iterable[T]], *args: object) -> Iterator[T]:
    """Yields what `work(*args)` yields in a new Python process, while it runs.

    Args:
        ended: kills the process once another thread sets it; to be set in the end.
        work: a function of a module that can be imported. What it is given and yields is pickled;
            what it prints is dropped.

    Raises:
        Died: the process has ended.
        Exception: of `work`.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert child.stdin is not None and child.stdout is not None
        threading.Thread(target=_kill, args=(child, ended), daemon=True).start()
        try:
            with suppress(BrokenPipeError), child.stdin as given:  # it may end before it reads
                given.write(pickle.dumps(sys.path) + pickle.dumps((work, args)))
            while True:
                try:
                    item = pickle.load(child.stdout)
                except (EOFError, pickle.UnpicklingError):  # nothing more, or a part of an item
                    break
                if isinstance(item, Exception):
                    raise item
                yield item
            if child.wait() != 0:
                log.seek(0)
                raise Died(_reason(child.returncode, log.read().decode(errors="replace")))
        finally:
            child.kill()
            child.wait()
            child.stdout.close()


def _kill(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    ended.wait()
    child.kill()


def answer() -> None:
    """The other process: runs what stands on its stdin, and writes to stdout what that yields."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not come between
    work, args = pickle.load(sys.stdin.buffer)
    try:
        for item in work(*args):
            out.write(pickle.dumps(item))
            out.flush()
    except Exception as error:
        out.write(pickle.dumps(error))
    out.close()
    os._exit(0)  # without the compilers' farewell


def _reason(code: int, printed: str) -> str:
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    fatal = next((found[1] for line in lines if (found := FATAL.match(line))), None)
    last = fatal or next(iter(lines[-1:]), "it printed nothing")
    return f"its process ended ({how}): {last}"
