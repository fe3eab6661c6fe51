"""Which signals ask a run to save and end, and which it ignores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from jaxrl.process.interrupt import Interrupt, Interrupted


@pytest.fixture(autouse=True)
def a_terminal() -> Iterator[None]:
    """The tests may themselves run under `nohup`, which ignores a hangup from the start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_and_the_second_ends(number: int) -> None:
    before = signal.getsignal(number)
    interrupt = Interrupt(60)
    with interrupt.listening(), interrupt.patient():
        os.kill(os.getpid(), number)
        assert interrupt.asked
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_hangup_that_is_ignored_from_the_start_stays_ignored() -> None:
    """As `nohup` asks for."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        interrupt = Interrupt(60)
        with interrupt.listening(), interrupt.patient():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", gone)
    interrupt = Interrupt(60)
    with interrupt.listening(), interrupt.patient():
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.asked
