"""Processes for the user's code, which can be killed with all that they have started.

`process.guard` is their other side.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from jaxrl.errors import short
from jaxrl.process.guard import MOST_BYTES, family, kill_family
from jaxrl.process.plain import JsonObject

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from jaxrl.process.guard import main; main(*sys.argv[2:4], *map(int, sys.argv[4:]))"
)
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""The accelerators are the roles'."""
STACK_S = 0.5
"""Longest wait for the stack of a process that is late."""
STACK_BYTES, STACK_LINES = 1 << 14, 12
"""Limits of the part of it that is read, and shown."""
END_S = 1.0
"""Longest wait for a process that has nothing to do to end by itself."""
MAX_PROCESSES = 256
"""Default of `max_processes`."""
_NAMES = {number.value: number.name for number in signal.Signals}


class Lost(Exception):
    """A process was late or has ended, and must be replaced."""

    def __init__(self, kind: Literal["timeout", "exception"], text: str):
        super().__init__(text)
        self.kind: Literal["timeout", "exception"] = kind


class ProcessAnswer(BaseModel, extra="forbid"):
    """The shape of an answer; services have further ones."""

    order: int
    """Number of the order that is answered."""


class RefusedAnswer(ProcessAnswer):
    refused: str
    """Why what was to be loaded, or done, is a mistake of the user's."""


class BegunAnswer(ProcessAnswer):
    begin: Literal[True]
    """The user's code is called."""


class KillableProcess:
    """A process that runs the user's code, as the run sees it. All but `kill` is for one event
    loop."""

    def __init__(
        self,
        service: str,
        section: str,
        ours: str,
        max_processes: int,
        shape: TypeAdapter[Any],
        files: Sequence[int] = (),
    ):
        """Starts it.

        Args:
            service: module with the `serve` of `process.guard`.
            section: of the config, for messages.
            ours: end of the path of the file that calls the user's code: a stack is shown down to
                the user's last frame, above the first line with it.
            max_processes: number that it may grow to, itself and all below it.
            shape: of the service's answers.
            files: descriptors that the service gets.
        """
        self.worker: int | None = None
        """Process id of the one that runs the user's code, under the guard."""
        self.killed = False
        self.fresh = True
        """Whether it was asked for nothing yet but to load the user's code."""
        self._ours, self._shape = ours, shape
        self._number = 0
        """Of the last order."""
        self._answers = asyncio.StreamReader(limit=MOST_BYTES)
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `kill`)
        stacks = self._stacks.fileno()
        numbers = [str(number) for number in (stacks, os.getpid(), max_processes, *files)]
        paths = json.dumps([str(path) for path in sys.path])
        self._guard = subprocess.Popen(
            [sys.executable, "-c", BOOT, paths, service, section, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(stacks, *files),
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
        self._pipes: list[Any] = [self._guard.stdin, self._guard.stdout]

    async def connect(self) -> None:
        """Lets the event loop read and write its pipes."""
        loop = asyncio.get_running_loop()
        self._orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._guard.stdin)
        self._pipes[0] = self._orders
        self._pipes[1], _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._answers), self._guard.stdout
        )

    def order(self, content: object) -> int:
        """Sends an order; returns its number."""
        self._number += 1
        self._orders.write(pickle.dumps((self._number, content)))
        return self._number

    async def hear(self, within: float) -> JsonObject:
        """The next answer to the last order; raises Lost where none comes in `within` seconds, or
        the process has ended."""
        for seconds in (within, 0.0):  # an answer that has arrived by now still counts
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while True:
                        answer = await self.answer()
                        if answer["order"] == self._number:
                            return answer
        raise await self.late(within)

    async def answer(self) -> JsonObject:
        """The next answer to any order, whose number is its `order`; raises Lost where the process
        has ended. Cancelling it loses nothing."""
        noise = 0
        while noise <= MOST_BYTES:
            try:
                line = await self._answers.readline()
            except ValueError:  # a longer line than that
                break
            if not line.endswith(b"\n"):
                raise Lost("exception", f"its process is gone{self._stack()}")
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                answer = None
            if isinstance(answer, dict):
                if isinstance(ended := answer.get("ended"), int | str):
                    raise Lost("exception", f"its process {_how(ended)}{self._stack()}")
                if answer.get("order") in range(1, self._number + 1):
                    return self._checked(answer, line)
            noise += len(line)
        raise Lost("exception", f"it wrote {MOST_BYTES} bytes that are no answer")

    def _checked(self, answer: JsonObject, line: bytes) -> JsonObject:
        """An answer of the service's; raises Lost where its shape is another, so that the user's
        code has written it."""
        try:
            self._shape.validate_json(line, strict=True)
        except ValidationError:
            raise no_answer(answer) from None
        return answer

    async def late(self, seconds: float) -> Lost:
        """What to raise where no answer came in time, with the stack of the process."""
        return Lost("timeout", f"no answer after {seconds:g} s{await self._late_stack()}")

    async def end(self) -> None:
        """Lets a process that has nothing to do end by itself, and kills any other."""
        self._orders.close()
        with suppress(Lost):
            while True:
                await self.hear(END_S)
        self.kill()

    def kill(self) -> None:
        """Ends it, and all that it has started, at once."""
        self.killed = True
        kill_family(self._guard.pid)  # it is not reaped: the id is its own
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        for pipe in self._pipes:
            pipe.close()
        self._stacks.close()

    async def _late_stack(self) -> str:
        """Where it is, even if the GIL is never released, as in a regular expression."""
        # A process that is none of its own may have the id that the user's code has written.
        worker = self.worker
        if worker is not None and worker in [each.pid for each in family(self._guard.pid)]:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGUSR1)
            end = time.monotonic() + STACK_S
            while not os.fstat(self._stacks.fileno()).st_size and time.monotonic() < end:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)  # the lines after the first
        return self._stack()

    def _stack(self) -> str:
        """Where the user's code is or, after a crash, was."""
        lines = os.pread(self._stacks.fileno(), STACK_BYTES, 0).decode(errors="replace")
        shown = itertools.takewhile(lambda line: self._ours not in line, lines.splitlines())
        return "".join(f"\n{line}" for line in list(shown)[:STACK_LINES] if line)


def no_answer(answer: JsonObject) -> Lost:
    """What to raise about an answer that is none."""
    text = json.dumps(answer, ensure_ascii=True)
    return Lost("exception", f"it wrote what is no answer: {short(text)}")


def _how(code: int | str) -> str:
    """How a process ended, by its exit code or in the guard's words."""
    if isinstance(code, str):
        return code
    if code < 0:
        return f"was ended by {_NAMES.get(-code, f'signal {-code}')}"
    return f"ended with exit code {code}"
