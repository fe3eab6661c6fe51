"""The process that runs reward functions, and the guard beside it.

Orders come as pickles, answers go back as lines of JSON that carry the number of their order: the
run unpickles nothing that a function made, and takes nothing else for an answer. The process that
the run starts is the guard. It forks the one that works, passes on some of what that one prints,
reports how it ended, and kills everything when the run is gone, however it went, or when there are
too many processes: also what a function started, and also while a function holds the GIL.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from jaxrl.errors import UserError
from jaxrl.rewards.family import family, kill_family
from jaxrl.rewards.functions import Function

LOOK_S = 1.0
"""Seconds between two looks whether the run is still there, and how many processes there are."""
PRINTED_S = 0.25
"""Longest wait for the last of what functions printed."""
OUTPUT_BYTES, OUTPUT_S = 1 << 14, 60.0
"""At most so many bytes of what functions print are shown in so many seconds."""
MORE = b"\n(more output of this reward process is not shown)\n"
PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below this process become its own children, so that it can find them."""


def main(stacks: int, parent: int, max_processes: int) -> None:
    """Orders come on standard input, answers go to standard output.

    Args:
        stacks: file descriptor that gets the Python stack at a crash, or at SIGUSR1.
        parent: process id of the run.
        max_processes: the working one and those that its functions have started.
    """
    sys.argv = ["jaxrl-rewards"]
    orders, answers = os.dup(0), os.dup(1)  # a program that a function starts inherits no copy
    os.set_inheritable(stacks, False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    with suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    printed, prints = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.dup2(prints, 1)  # what a function prints must not stand in the output of the run
        os.dup2(prints, 2)
        for descriptor in (nothing, printed, prints):
            os.close(descriptor)
        _work(orders, answers, stacks)
    os.close(orders)
    os.close(prints)
    output = threading.Thread(target=_show, args=(printed,), daemon=True)
    output.start()
    threading.Thread(target=_watch, args=(parent, answers, max_processes), daemon=True).start()
    ended = status = 0
    while ended != worker:  # orphans end here too
        ended, status = os.waitpid(-1, 0)
    output.join(PRINTED_S)
    _end(answers, os.waitstatus_to_exitcode(status))


def _watch(parent: int, answers: int, max_processes: int) -> None:
    while os.getppid() == parent:
        if len(family(os.getpid())) > max_processes:
            _end(answers, f"had more than reward.max_processes={max_processes} processes")
        time.sleep(LOOK_S)
    kill_family(os.getpid())


def _show(printed: int) -> None:
    """Copies what functions print to stderr, up to a limit."""
    since, left = time.monotonic(), OUTPUT_BYTES
    while data := os.read(printed, 1 << 16):
        if time.monotonic() - since > OUTPUT_S:
            since, left = time.monotonic(), OUTPUT_BYTES
        shown = data[: max(left, 0)] + (MORE if 0 <= left < len(data) else b"")
        left -= len(data)
        with suppress(OSError):  # a run whose stderr is closed
            _write(2, shown)


def _end(answers: int, how: int | str) -> None:
    """Reports the exit code of the process that works, or why it is killed; ends everything."""
    with suppress(BrokenPipeError):  # nobody is left to read it
        _write(answers, _line({"ended": how}))
    kill_family(os.getpid())


def _work(orders: int, answers: int, stacks: int) -> None:
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    # Where memory runs out, this process is the one to end, not the run.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # The run has closed the pipes.
    with suppress(BrokenPipeError, EOFError):
        _serve(os.fdopen(orders, "rb"), answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(orders: BinaryIO, answers: int) -> None:
    """Answers orders until there are no more (EOFError).

    The content of the first is (sources, seconds for an awaited call, megabytes of memory or None),
    that of each other one (index of the function, items).
    """
    number, (sources, timeout, memory_mb) = pickle.load(orders)
    say = partial(_say, answers, os.getpid(), number)
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 10**6, memory_mb * 10**6))
    try:
        functions = [Function(source, memory_mb) for source in sources]
    except UserError as error:
        say({"refused": str(error)})
        return
    say({"ready": os.getpid(), "signatures": [asdict(f.signature) for f in functions]})
    while True:
        number, (index, items) = pickle.load(orders)
        # An awaited call that outlives its order must not speak for the next one.
        say = partial(_say, answers, os.getpid(), number)
        try:
            functions[index].prepare(items)
            say({"begin": True})
            functions[index].run(items, timeout, say)
        except UserError as error:  # a result that is none
            say({"refused": str(error)})


def _say(answers: int, worker: int, number: int, message: dict[str, Any]) -> None:
    if os.getpid() != worker:
        os._exit(0)  # a function forked, and its child has returned as well
    _write(answers, _line({"order": number, **message}))


def _line(message: dict[str, Any]) -> bytes:
    """A line of its own, whatever a function has written before it."""
    return b"\n" + json.dumps(message).encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
