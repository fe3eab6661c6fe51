"""Ctrl-C, SIGTERM and SIGHUP: the first asks the run to save and end, the second ends it at once.

SIGHUP comes when the terminal of a run is closed. A process that ignores it from its start, as
`nohup` asks for, keeps ignoring it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""


left_behind: list[threading.Thread] = []
"""Threads that compute on a device or fetch a file, and did not end when they were asked to. Python
must not end while one of them runs: when it comes back from XLA there is no interpreter any more,
and the process aborts; and it would wait for the file (`config.cli.exit_process`).
"""


class Interrupted(KeyboardInterrupt):
    """The run was asked to end; the message says what is saved."""


class Interrupt:
    """Whether the run has been asked to end. Only the main thread hears of it."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        """From the first signal on; then whatever is unsaved is given up."""
        self.asked = False
        """Whether to save and end."""
        self._patient = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Lets a signal inside this block end the run at once, but inside `patient`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        asking = ASKING[:-1] if ignored else ASKING
        handlers: dict[int, Any] = {number: signal.signal(number, self._heard) for number in asking}
        handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._late)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Notes the first signal inside this block, without more, and sets the clock."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
            if self.asked:
                signal.setitimer(signal.ITIMER_REAL, 0)  # what was to be saved in time is saved

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._patient:
            raise Interrupted("interrupted")
        self.asked = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        reported = (
            f"\n{signal.Signals(number).name}: finishing the current update and saving, for at"
            f" most {self.seconds:g} s; a second signal ends at once\n"
        )
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, reported.encode())  # print is not safe in a signal handler

    def _late(self, number: int, frame: FrameType | None) -> None:
        raise Interrupted(
            f"interrupted; what was trained could not be saved within {self.seconds:g} s"
            " (deadlines.interrupt)"
        )
