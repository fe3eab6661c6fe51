"""The process that runs reward functions, and the guard beside it.

Orders come as length-prefixed pickles, answers go back as lines of JSON: the run unpickles nothing
that a function made. The process that the run starts is the guard. It forks the one that works,
tells how that one ended, and ends the whole process group when the run is gone, however it went:
also what a function started, and also while a function keeps the interpreter to itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import Any, BinaryIO

from jaxrl.errors import UserError
from jaxrl.rewards.functions import Function
from jaxrl.rewards.items import next_order

LOOK_S = 0.25
"""Seconds between two looks whether the run is still there."""


def main(orders: int, answers: int, stacks: int, parent: int) -> None:
    """
    Args:
        orders, answers: file descriptors.
        stacks: file descriptor that gets the Python stack at a crash, or at SIGUSR1.
        parent: process id of the run.
    """
    sys.argv = ["jaxrl-rewards"]
    os.dup2(2, 1)  # what a function prints must not stand in the output of the run
    worker = os.fork()
    if worker == 0:
        _work(orders, answers, stacks)
    os.close(orders)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _, status = os.waitpid(worker, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear of it
        _write(answers, b"\n" + _line({"ended": os.waitstatus_to_exitcode(status)}))
    os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(0, signal.SIGKILL)


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
    def say(message: dict[str, Any]) -> None:
        _write(answers, _line(message))

    first = next_order(orders)
    assert first is not None, "the first order names the functions"
    sources, timeout = first
    try:
        functions = [Function(source) for source in sources]
    except UserError as error:
        say({"refused": str(error)})
        return
    say({"ready": os.getpid(), "signatures": [asdict(f.signature) for f in functions]})
    while (order := next_order(orders)) is not None:
        index, items = order
        try:
            functions[index].prepare(items)
            say({"begin": True})
            functions[index].run(items, timeout, say)
        except UserError as error:  # a result that is none
            say({"refused": str(error)})


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
