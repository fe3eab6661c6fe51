"""What happens in a process of its own, and what is said of one that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jaxrl.aot.subprocess_compile import Died, apart
from jaxrl.errors import UserError

EVENT = threading.Event()
FAILED = "F0000 00:00:17 123 motion.cc:1125] Check failed: user->opcode() == kAdd"


def squares(n: int) -> Iterator[tuple[int, int]]:
    for i in range(n):
        print("a word between")
        yield i * i, os.getpid()


def refuses() -> Iterator[int]:
    yield 1
    raise UserError("it does not suit")


def crashes(text: str) -> Iterator[int]:
    yield 1
    print(text + "\n*** Stack ***\nframe", file=sys.stderr, flush=True)
    os.abort()


def sleeps() -> Iterator[int]:
    yield os.getpid()
    time.sleep(600)


@dataclass(frozen=True)
class Row:
    """What is read here of a program's row; the real one would import jax in each process."""

    name: str
    role: str = "actor"
    seconds_to_compile: float = 0.0
    compiled: int | None = None
    error: str | None = None


def programs(config: str, target: str, turn: int, done: int) -> Iterator[Row]:
    """As `compiled_programs`, of a compiler that the second of three programs kills."""
    for name in ("first", "second", "third")[done:]:
        yield Row(name)
        if name == "second":
            print(FAILED, file=sys.stderr, flush=True)
            os.abort()
        yield replace(Row(name), compiled=done)


def test_what_is_yielded_comes_back_from_another_process():
    found = list(apart(EVENT, squares, 3))
    assert [square for square, _ in found] == [0, 1, 4]
    assert {pid for _, pid in found}.isdisjoint({os.getpid()})


def test_the_process_ends_when_it_is_no_longer_wanted():
    ended = threading.Event()
    rows = apart(ended, sleeps)
    pid = next(rows)
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(Died, match="SIGKILL"):
        next(rows)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_ends_when_ours_is_killed():
    """Without a chance to clean up, as by the kernel where memory runs out."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import os, threading\n"
        "from jaxrl.aot.subprocess_compile import apart\n"
        "from test_apart import sleeps\n"
        "print(next(apart(threading.Event(), sleeps)), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    ours = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ours.returncode == -9, ours.stderr
    command = Path(f"/proc/{int(ours.stdout)}/cmdline")
    end = time.monotonic() + 20
    while command.exists() and command.read_bytes():  # empty: it has ended, nobody has asked how
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_error_is_raised_here():
    rows = apart(EVENT, refuses)
    assert next(rows) == 1
    with pytest.raises(UserError, match="it does not suit"):
        next(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [(FAILED, "Check failed: user->opcode() == kAdd"), ("no log line", "frame")],
    ids=["log", "other"],
)
def test_a_crash_says_the_signal_and_why(text, said):
    rows = apart(EVENT, crashes, text)
    assert next(rows) == 1
    with pytest.raises(Died) as died:
        next(rows)
    assert str(died.value) == f"its process ended (SIGABRT): {said}"


def test_the_other_programs_are_compiled_after_a_crash(monkeypatch):
    from jaxrl.aot import compile_report  # not above: other processes import this module

    monkeypatch.setattr(compile_report, "compiled_programs", programs)
    lines: list[str] = []
    rows = compile_report._rows("config", "tpu-v5e", lines.append, EVENT, 0)  # type: ignore[arg-type]
    assert [row.name for row in rows] == ["first", "second", "third"]
    assert [row.compiled for row in rows] == [0, None, 2]
    assert [row.error is None for row in rows] == [True, False, True]
    assert rows[1].error is not None and rows[1].error.endswith(
        "Check failed: user->opcode() == kAdd"
    )
    assert lines == [f"compiling actor: {row.name}" for row in rows]
