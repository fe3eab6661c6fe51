"""What a process that runs reward functions does; `process.guard` has the rest of it."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from typing import BinaryIO

from jaxrl.errors import UserError
from jaxrl.process.guard import limit_memory, sayer
from jaxrl.rewards.functions import Function


def serve(orders: BinaryIO, answers: int) -> None:
    """Answers orders until there are no more (EOFError).

    The content of the first is (sources, seconds for an awaited call, megabytes of memory or None),
    that of each other one (index of the function, items).
    """
    number, (sources, timeout, memory_mb) = pickle.load(orders)
    say = sayer(answers, number)
    limit_memory(memory_mb)
    try:
        functions = [Function(source, memory_mb) for source in sources]
    except UserError as error:
        say({"refused": str(error)})
        return
    say({"ready": os.getpid(), "signatures": [asdict(f.signature) for f in functions]})
    while True:
        number, (index, items) = pickle.load(orders)
        # An awaited call that outlives its order must not speak for the next one.
        say = sayer(answers, number)
        try:
            functions[index].prepare(items)
            say({"begin": True})
            functions[index].run(items, timeout, say)
        except UserError as error:  # a result that is none
            say({"refused": str(error)})
