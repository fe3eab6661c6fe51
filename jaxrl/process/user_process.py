"""A process that runs the user's code, and the guard beside it (`process.user_code` starts both).

Calls come as pickles, answers go back as lines of JSON that carry the number of their call: the run
unpickles nothing that the user's code made, and takes nothing else for an answer. The process that
the run starts is the guard. It forks the one that works, passes on some of what that one prints,
reports how it ended, and kills everything when the run is gone, however it went, or when there are
too many processes: also what the user's code started, and also while it holds the GIL.

The process answers its calls in one event loop: those that wait run at the same time, others one
after the other. A cell of memory that it shares with the run always has the number of the call in
whose name it is running, so that the run knows what to blame for a process that hangs or ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import inspect
import json
import mmap
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Literal, NoReturn

import psutil

from jaxrl.errors import StopTraining, UserError, short
from jaxrl.process.awake_clock import TICK_S, AwakeClock
from jaxrl.process.interrupt import ASKING
from jaxrl.process.json_types import JsonObject

_os_write, _unpickled = os.write, pickle.loads  # whatever the user's code puts in their place
LOOK_S = 1.0
"""Seconds between two looks whether the run is still there, and how many processes there are."""
DEAD_S = 5.0
"""Longest wait for processes to be dead once they are killed; one that waits for a disk is not."""
PRINTED_S = 0.25
"""Longest wait for the last of what the user's code printed."""
OUTPUT_BYTES, OUTPUT_S = 1 << 14, 60.0
"""At most so many bytes of what it prints are shown in so many seconds."""
PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans below this process become its own children, so that it can find them."""
MOST_BYTES = 1 << 20
"""Of a message to the run, and of other text between two of them."""
LONGEST_TRACEBACK, LONGEST_REASON = 4000, 10_000
"""Characters of a traceback (its last ones), and of any text that says why there is no answer."""
READ_BYTES = 1 << 16
"""Of calls, at a time."""
LENGTH = CELL = 8
"""Bytes of the length before a pickle, and of the shared cell: a call's number, little endian; 0:
none is running."""
Trouble = Literal["timeout", "exception", "user", "stop"]
"""Why there is no answer; `user`: the data is wrong, as the text says; `stop`: the code raised
StopTraining, with that text."""
clock = AwakeClock()
"""Looked at by what is awaited, and round each step of the user's code: a thread that looks would
make forks of that code unsafe."""
_NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)


class TooLong(Exception):
    """A message to the run that was not sent."""


class CodeFailed(Exception):
    """The user's code has no answer."""

    def __init__(self, kind: Trouble, text: str, error: object = None):
        super().__init__(text)
        self.kind: Trouble = kind
        self.error = error
        """The exception that it raised, if it did."""


class Call:
    """A call of the run's, in the process that answers it."""

    def __init__(self, number: int, answers: int, timeout: float, hint: str = ""):
        """
        Args:
            answers: descriptor that takes the answers.
            timeout: seconds for what the user's code awaits.
            hint: follows the text of a MemoryError.
        """
        self._number, self._answers, self._timeout, self._hint = number, answers, timeout, hint
        self._process, self._begun, self._awaits = os.getpid(), 0, False

    def say(self, message: JsonObject) -> None:
        """Sends a message to the run. A process that was forked from this one ends here instead.
        Raises TooLong where the message has more than MOST_BYTES."""
        if os.getpid() != self._process:
            os._exit(0)  # the user's code forked, and its child has returned as well
        line = _line({"order": self._number, **message})
        if len(line) > MOST_BYTES:
            raise TooLong(f"{len(line) / 2**20:.1f} MB, longer than {MOST_BYTES >> 20} MB")
        try:
            _write(self._answers, line)
        except OSError:  # the user's code has closed it, or the run has: nothing can be said
            os._exit(1)

    def begin(self) -> None:
        """Reports that the user's code is called now: its time begins."""
        self._begun, self._awaits = self._begun + 1, False
        self.say({"begin": self._begun})

    def fail(self, kind: Trouble, text: str) -> None:
        """Reports that there is no answer, also where the user's code was never called: another
        call is not to blame for it."""
        if not self._begun:
            self.begin()
        self.say({"failure": [kind, short(text, LONGEST_REASON)]})

    async def run(
        self, function: Callable[..., object], /, *args: object, **columns: object
    ) -> Any:
        """Calls the user's code and awaits what it returns, if that can be awaited. Raises
        StopTraining where it does, and CodeFailed where it raises anything else, or what is awaited
        is late."""
        limit, loop = None, asyncio.get_running_loop()
        try:
            if not inspect.iscoroutinefunction(function):
                asyncio._set_running_loop(None)  # it may call `asyncio.run`
            try:
                result = function(*args, **columns)
            finally:
                asyncio._set_running_loop(loop)
            if inspect.isawaitable(result):
                if not self._awaits:
                    self._awaits = True
                    self.say({"begin": self._begun, "awaits": True})
                async with asyncio.timeout(None) as limit:
                    call_off = _expire(limit, self._timeout)
                    try:
                        result = await result
                    finally:
                        call_off()
        except StopTraining:
            raise
        except BaseException as error:
            if limit is not None and limit.expired():
                text = f"no answer after {self._timeout:g} s; the awaited call was cancelled"
                raise CodeFailed("timeout", text) from None
            hint = self._hint if isinstance(error, MemoryError) else ""
            raise CodeFailed("exception", traceback_of_user(error) + hint, error) from None
        return result


Answerer = Callable[..., Awaitable[None]]
"""Answers a call, given it and its content: says what was found, or raises CodeFailed, or UserError
where the run is to end."""


def main(
    service: str, section: str, paths: str, shared: int, parent: int, max_processes: int
) -> None:
    """Calls come on standard input, answers go to standard output.

    Args:
        service: module with `load(setup, first, ready)`, which loads the user's code, calls
            `ready` with what the run must know of it, and returns an `Answerer`. It raises
            UserError where the code cannot be loaded. `first`: whether the run knows nothing yet.
        section: of the config, for messages.
        paths: where the run looks for modules, as JSON; the user's are found as in the run.
        shared: descriptor of the file that begins with the cell, and gets the Python stack at a
            crash, or at SIGUSR1.
        parent: process id of the run.
        max_processes: the working one and those that the user's code has started.
    """
    sys.argv = [f"jaxrl-{section}"]
    load = import_module(service).load
    sys.path[:] = json.loads(paths)
    calls, answers = os.dup(0), os.dup(1)  # a program that is started below inherits no copy
    os.set_inheritable(shared, False)
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
        # Processes that the user's code forks have the default handlers; no signal is lost.
        block, unblock = (
            partial(signal.pthread_sigmask, how, ASKING)
            for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
        )
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=_heed_signals)
        faulthandler.enable(shared)
        faulthandler.register(signal.SIGUSR1, shared, all_threads=False)
        # Where memory runs out, this process is the one to end, not the run.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        with suppress(BrokenPipeError):  # the run has closed the pipes
            _answer_calls(load, section, calls, answers, mmap.mmap(shared, CELL))
        _leave()
    os.close(calls)
    os.close(prints)
    output = threading.Thread(target=_show, args=(printed, section), daemon=True)
    output.start()
    watched = (parent, answers, max_processes, section)
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    ended = status = 0
    while ended != worker:  # orphans end here too
        ended, status = os.waitpid(-1, 0)
    output.join(PRINTED_S)
    code = os.waitstatus_to_exitcode(status)
    names = {number.value: number.name for number in signal.Signals}
    by = f"was ended by {names.get(-code, f'signal {-code}')}"
    _end(answers, by if code < 0 else f"ended with exit code {code}")


def _ignore(*_: object) -> None:
    """Takes a signal."""


def _heed_signals() -> None:
    for number in ASKING:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def _watch(parent: int, answers: int, max_processes: int, section: str) -> None:
    """Ends everything once the run is gone, or there are too many processes."""
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


def _end(answers: int, how: str) -> None:
    with suppress(BrokenPipeError):  # nobody is left to read it
        _write(answers, _line({"order": 0, "ended": how}))
    kill_family(os.getpid())


def kill_family(guard: int) -> None:
    """Kills a guard and all processes below it, those that have left its group too, and those that
    they start before they are dead. The guard comes last: nobody finds its orphans without it.

    A list that is made while the guard kills and reaps too may lack the children of a process that
    has just been reaped: nobody is left when two lists have shown nobody."""
    empty, until = 0, time.monotonic() + DEAD_S
    while empty < 2 and time.monotonic() < until:
        found = family(guard)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        empty = 0 if found else empty + 1
        time.sleep(0.001 if found else 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(guard, signal.SIGKILL)


def family(pid: int) -> list[psutil.Process]:
    """Returns all processes that run below one, without those that ended and are not reaped."""

    def runs(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        return False

    with suppress(psutil.Error):
        return [child for child in psutil.Process(pid).children(recursive=True) if runs(child)]
    return []


def _leave() -> NoReturn:
    for printed in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            printed.flush()
    os._exit(0)  # what still waits is of no use to anybody


def _answer_calls(
    load: Callable[..., Answerer], section: str, calls: int, answers: int, cell: mmap.mmap
) -> None:
    """Loads the user's code, as the first call says: (setup, whether the run knows nothing of it
    yet, seconds for a call, megabytes of memory or None). Answers the other calls until the run has
    no more."""
    with os.fdopen(calls, "rb", closefd=False) as stream:
        content = stream.read(int.from_bytes(stream.read(LENGTH), "little"))
    if not content:
        return
    number, (setup, first, timeout, memory_mb) = _unpickled(content)
    hint = ""
    if memory_mb is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 10**6, memory_mb * 10**6))
        hint = f" ({section}.memory_mb={memory_mb} is the limit)"
    call = Call(number, answers, timeout, hint)

    def ready(facts: object) -> None:
        call.say({"ready": os.getpid(), "facts": facts})

    try:
        answerer = load(setup, first, ready)
    except (UserError, StopTraining) as error:
        why = str(error) if isinstance(error, UserError) else f"StopTraining while loaded: {error}"
        call.say({"refused": short(why, LONGEST_REASON)})
        return
    loop, tasks, received = asyncio.new_event_loop(), set[asyncio.Task[None]](), bytearray()
    loop.set_task_factory(partial(_marked_task, cell))

    async def answer(call: Call, content: tuple[Any, ...]) -> None:
        try:
            await answerer(call, *content)
        except UserError as error:
            call.say({"refused": short(str(error), LONGEST_REASON)})
        except StopTraining as stop:
            call.fail("stop", str(stop))
        except CodeFailed as failed:
            call.fail(failed.kind, str(failed))
        except Exception as error:  # such as of an attribute that the user's class computes
            call.fail("exception", traceback_of_user(error))

    def receive() -> None:
        try:
            data = os.read(calls, READ_BYTES)
        except OSError:
            data = b""
        if not data:  # the run has closed the pipe
            _leave()
        received.extend(data)
        while len(received) >= (end := LENGTH + int.from_bytes(received[:LENGTH], "little")):
            number, content = _unpickled(received[LENGTH:end])
            del received[:end]
            context = contextvars.copy_context()
            context.run(_NUMBER.set, number)
            work = answer(Call(number, answers, timeout, hint), content)
            tasks.add(task := loop.create_task(work, context=context))
            task.add_done_callback(tasks.discard)

    loop.add_reader(calls, receive)
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _marked_task(
    cell: mmap.mmap, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """Makes a task; while it does not wait, the cell has the number of its call."""

    @types.coroutine
    def marked() -> Generator[object, object, Any]:
        go: Callable[..., object] = coroutine.send
        value: object = None
        while True:
            cell[:] = _NUMBER.get().to_bytes(CELL, "little")
            clock.look()
            try:
                waits_for = go(value)
            except StopIteration as end:
                return end.value
            finally:
                clock.look(busy=True)
                cell[:] = bytes(CELL)
            try:
                value = yield waits_for
                go = coroutine.send
            except BaseException as error:
                go, value = coroutine.throw, error

    async def awaited() -> Any:
        return await marked()

    return asyncio.Task(awaited(), loop=loop, **options)


def _expire(limit: asyncio.Timeout, seconds: float) -> Callable[[], None]:
    """Lets a limit expire after so many seconds awake. Returns what calls that off."""
    loop, end = asyncio.get_running_loop(), clock.awake() + seconds
    handle: asyncio.Handle

    def look() -> None:
        nonlocal handle
        if (left := end - clock.awake()) > 0:
            handle = loop.call_later(min(left, TICK_S), look)
        else:
            limit.reschedule(loop.time())

    handle = loop.call_soon(look)
    return lambda: handle.cancel()


def traceback_of_user(error: BaseException) -> str:
    """Returns the last characters of an exception's traceback, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return text[-LONGEST_TRACEBACK:].rstrip()


def _line(message: JsonObject) -> bytes:
    """Returns a line of its own, whatever was written before it."""
    text = json.dumps(message, ensure_ascii=False)
    return b"\n" + text.encode(errors="replace") + b"\n"


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[_os_write(descriptor, data) :]
