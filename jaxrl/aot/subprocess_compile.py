"""A function in a process of its own: a compiler that crashes ends that process, not ours."""

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

from jaxrl.process.child_python import python_command

T = TypeVar("T")
START = "from jaxrl.aot.subprocess_compile import answer; answer()"
FATAL = re.compile(r"F\d{4}.*?\] *(.*)")
"""A fatal error in the log of C++; the group is its text."""


class Died(RuntimeError):
    """The process ended before the function did. The message has its signal or exit code, and the
    fatal error that it printed, or else its last line."""


def apart(ended: threading.Event, work: Callable[..., Iterable[T]], *args: object) -> Iterator[T]:
    """Yields what `work(*args)` yields in a new Python process, while it runs.

    The process ends with this generator or, whatever becomes of ours, with our process.

    Args:
        ended: once it is set, by any thread, the process is killed. The caller must set it in the
            end: a thread waits for it.
        work: a function of a module that can be imported. Its arguments and what it yields are
            pickled; what it prints is dropped.

    Raises:
        Died: the process ended before `work` did.
        Exception: what `work` raised.
    """
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            python_command(START), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        assert child.stdin is not None and child.stdout is not None
        threading.Thread(target=_kill, args=(child, ended), daemon=True).start()
        try:
            with suppress(BrokenPipeError):  # it may end before it reads
                child.stdin.write(pickle.dumps((work, args)))
                child.stdin.flush()
            while True:
                try:
                    item = pickle.load(child.stdout)
                except (EOFError, pickle.UnpicklingError):  # nothing more, or a part of an item
                    break
                if isinstance(item, Exception):
                    raise item
                yield item
            if child.wait() != 0:
                code = child.returncode
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                log.seek(0)
                text = log.read().decode(errors="replace")
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                fatal = next((found[1] for line in lines if (found := FATAL.match(line))), None)
                last = fatal or next(iter(lines[-1:]), "it printed nothing")
                raise Died(f"its process ended ({how}): {last}")
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
            with suppress(BrokenPipeError):  # of what is still to be written
                child.stdin.close()


def _kill(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    ended.wait()
    child.kill()


def answer() -> None:
    """Runs, as the other process, the call that it reads from stdin, and writes what that yields to
    stdout. It ends when its stdin does, which the other side keeps open while it lives."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed must not come between
    work, args = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        for item in work(*args):
            out.write(pickle.dumps(item))
            out.flush()
    except Exception as error:
        out.write(pickle.dumps(error))
    out.close()
    os._exit(0)  # at once: destructors of the compilers may crash or print


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
