"""A process that runs the user's code, and the guard beside it (`process.killable` starts both).

Orders come as pickles, answers go back as lines of JSON that carry the number of their order: the
run unpickles nothing that the user's code made, and takes nothing else for an answer. The process
that the run starts is the guard. It forks the one that works, passes on some of what that one
prints, reports how it ended, and kills everything when the run is gone, however it went, or when
there are too many processes: also what the user's code started, and also while it holds the GIL.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import BinaryIO

import psutil

from jaxrl.process.interrupt import ASKING
from jaxrl.process.plain import JsonObject

_os_write = os.write  # whatever the user's code puts in its place
LOOK_S = 1.0
"""Seconds between two looks whether the run is still there, and how many processes there are."""
PRINTED_S = 0.25
"""Longest wait for the last of what the user's code printed."""
OUTPUT_BYTES, OUTPUT_S = 1 << 14, 60.0
"""At most so many bytes of what it prints are shown in so many seconds."""
PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below this process become its own children, so that it can find them."""

MOST_BYTES = 1 << 20
"""Of a message to the run, and of other text between two of them."""

Say = Callable[[JsonObject], None]
"""Sends a message to the run; raises TooLong where it has more than MOST_BYTES."""


class TooLong(Exception):
    """A message to the run that was not sent."""


def main(
    service: str, section: str, stacks: int, parent: int, max_processes: int, *files: int
) -> None:
    """Orders come on standard input, answers go to standard output.

    Args:
        service: module with `serve(orders, answers, *files)`, which works until there are no more
            orders (EOFError).
        section: of the config, for messages.
        stacks: file descriptor that gets the Python stack at a crash, or at SIGUSR1.
        parent: process id of the run.
        max_processes: the working one and those that the user's code has started.
        files: further descriptors for the service.
    """
    sys.argv = [f"jaxrl-{section}"]
    serve = import_module(service).serve
    orders, answers = os.dup(0), os.dup(1)  # a program that is started below inherits no copy
    for descriptor in (stacks, *files):
        os.set_inheritable(descriptor, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    with suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # What ends a run may signal all of its processes, and the step that the run then finishes needs
    # these. Handlers, since programs that the user's code starts would inherit a mask, as this one
    # has from a worker of Ray.
    for number in ASKING:
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    printed, prints = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.dup2(prints, 1)  # what is printed must not stand in the output of the run
        os.dup2(prints, 2)
        for descriptor in (nothing, printed, prints):
            os.close(descriptor)
        _work(serve, orders, answers, stacks, files)
    os.close(orders)
    os.close(prints)
    output = threading.Thread(target=_show, args=(printed, section), daemon=True)
    output.start()
    watched = (parent, answers, max_processes, section)
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    ended = status = 0
    while ended != worker:  # orphans end here too
        ended, status = os.waitpid(-1, 0)
    output.join(PRINTED_S)
    _end(answers, os.waitstatus_to_exitcode(status))


def _ignore(*_: object) -> None:
    pass


def _heed_signals() -> None:
    """In a process that the user's code has forked."""
    for number in ASKING:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def kill_family(guard: int) -> None:
    """Kills a guard and all processes below it, those that have left its group too."""
    for process in family(guard):
        with suppress(psutil.Error):
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)


def family(pid: int) -> list[psutil.Process]:
    """All processes that run below one; those that have ended and are not reaped do not count."""

    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        return False

    with suppress(psutil.Error):
        return [each for each in psutil.Process(pid).children(recursive=True) if runs(each)]
    return []


def sayer(answers: int, number: int) -> Say:
    """What sends answers to the order of this number. A process that was forked from this one ends
    where it has something to say."""
    return partial(_say, answers, os.getpid(), number)


def limit_memory(memory_mb: int | None) -> None:
    """Limits the megabytes that this process may address; None: no limit."""
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 10**6, memory_mb * 10**6))


def _watch(parent: int, answers: int, max_processes: int, section: str) -> None:
    while os.getppid() == parent:
        if len(family(os.getpid())) > max_processes:
            _end(answers, f"had more than {section}.max_processes={max_processes} processes")
        time.sleep(LOOK_S)
    kill_family(os.getpid())


def _show(printed: int, section: str) -> None:
    """Copies what the user's code prints to stderr, up to a limit."""
    more = f"\n(more output of this {section} process is not shown)\n".encode()
    since, left = time.monotonic(), OUTPUT_BYTES
    while data := os.read(printed, 1 << 16):
        if time.monotonic() - since > OUTPUT_S:
            since, left = time.monotonic(), OUTPUT_BYTES
        shown = data[: max(left, 0)] + (more if 0 <= left < len(data) else b"")
        left -= len(data)
        with suppress(OSError):  # a run whose stderr is closed
            _write(2, shown)


def _end(answers: int, how: int | str) -> None:
    """Reports the exit code of the process that works, or why it is killed; ends everything."""
    with suppress(BrokenPipeError):  # nobody is left to read it
        _write(answers, _line({"ended": how}))
    kill_family(os.getpid())


def _work(
    serve: Callable[..., None], orders: int, answers: int, stacks: int, files: tuple[int, ...]
) -> None:
    os.register_at_fork(  # none is lost between
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, ASKING),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ASKING),
        after_in_child=_heed_signals,
    )
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    # Where memory runs out, this process is the one to end, not the run.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    stream: BinaryIO = os.fdopen(orders, "rb")
    # The run has closed the pipes.
    with suppress(BrokenPipeError, EOFError):
        serve(stream, answers, *files)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say(answers: int, worker: int, number: int, message: JsonObject) -> None:
    if os.getpid() != worker:
        os._exit(0)  # the user's code forked, and its child has returned as well
    line = _line({"order": number, **message})
    if len(line) > MOST_BYTES:
        raise TooLong(f"{len(line) / 2**20:.1f} MB, longer than {MOST_BYTES >> 20} MB")
    try:
        _write(answers, line)
    except OSError:  # the user's code has closed it, or the run has: nothing can be said any more
        os._exit(1)


def _line(message: JsonObject) -> bytes:
    """A line of its own, whatever was written before it."""
    text = json.dumps(message, ensure_ascii=False)
    return b"\n" + text.encode(errors="replace") + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[_os_write(descriptor, data) :]
