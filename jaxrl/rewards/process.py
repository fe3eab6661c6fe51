"""The process that runs reward functions, and the guard beside it.

Orders come as length-prefixed pickles, answers go back as lines of JSON that carry the number of
their order: the run unpickles nothing that a function made, and takes nothing else for an answer.
The process that the run starts is the guard. It forks the one that works, passes on some of what
that one prints, reports how it ended, and kills everything when the run is gone, however it went,
or when there are too many processes: also what a function started, and also while a function keeps
the interpreter to itself.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import asdict
from functools import partial
from typing import Any, BinaryIO

from jaxrl.errors import UserError
from jaxrl.rewards.family import family, kill_family
from jaxrl.rewards.functions import Function
from jaxrl.rewards.items import next_order

LOOK_S = 0.25
"""Seconds between two looks whether the run is still there."""
COUNT_S = 1.0
"""Seconds between two counts of the processes."""
OUTPUT_BYTES, OUTPUT_S = 1 << 14, 60.0
"""Bytes of what functions print that are shown in so many seconds."""
MORE = b"\n(more output of this reward process is not shown)\n"
PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below this process become its own children, so that it can find them."""


def main(orders: int, answers: int, stacks: int, parent: int, max_processes: int) -> None:
    """
    Args:
        orders, answers: file descriptors.
        stacks: file descriptor that gets the Python stack at a crash, or at SIGUSR1.
        parent: process id of the run.
        max_processes: the working one and those that its functions have started.
    """
    sys.argv = ["jaxrl-rewards"]
    for descriptor in (orders, answers, stacks):
        os.set_inheritable(descriptor, False)
    with contextlib.suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    printed, prints = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.dup2(prints, 1)  # what a function prints must not stand in the output of the run
        os.dup2(prints, 2)
        os.close(printed)
        os.close(prints)
        _work(orders, answers, stacks)
    os.close(orders)
    os.close(prints)
    output = _thread(_show, printed)
    _thread(_watch, parent)
    _thread(_count, answers, max_processes)
    ended = status = 0
    while ended != worker:  # orphans end here too
        ended, status = os.waitpid(-1, 0)
    output.join(LOOK_S)
    _end(answers, os.waitstatus_to_exitcode(status))
    kill_family(os.getpid())


def _thread(run: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    return thread


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    kill_family(os.getpid())


def _count(answers: int, max_processes: int) -> None:
    while len(family(os.getpid())) <= max_processes:
        time.sleep(COUNT_S)
    _end(answers, f"had more than reward.max_processes={max_processes} processes")
    kill_family(os.getpid())


def _show(printed: int) -> None:
    """Passes on what functions print, as far as it may be shown."""
    since, left = time.monotonic(), OUTPUT_BYTES
    while data := os.read(printed, 1 << 16):
        if time.monotonic() - since > OUTPUT_S:
            since, left = time.monotonic(), OUTPUT_BYTES
        shown = data[: max(left, 0)] + (MORE if 0 <= left < len(data) else b"")
        left -= len(data)
        with contextlib.suppress(OSError):  # a run whose stderr is closed
            _write(2, shown)


def _end(answers: int, how: int | str) -> None:
    """Reports the exit code of the process that works, or why it is killed."""
    with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
        _write(answers, _line({"ended": how}))


def _work(orders: int, answers: int, stacks: int) -> None:
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
    # Where memory runs out, this process is the one to end, not the run.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with contextlib.suppress(BrokenPipeError):  # the run has closed the pipes
        _serve(os.fdopen(orders, "rb"), answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(orders: BinaryIO, answers: int) -> None:
    first = next_order(orders)
    assert first is not None, "the first order names the functions"
    number, (sources, timeout, memory_mb) = first
    say = partial(_say, answers, os.getpid(), number)
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 10**6, memory_mb * 10**6))
    try:
        functions = [Function(source, memory_mb) for source in sources]
    except UserError as error:
        say({"refused": str(error)})
        return
    say({"ready": os.getpid(), "signatures": [asdict(f.signature) for f in functions]})
    while (order := next_order(orders)) is not None:
        number, (index, items) = order
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
