"""Lost standard output ends nothing: the log says it once, and the exit code is as without."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
from cases import and_slow

from jaxrl.config.settings import LoggingConfig
from jaxrl.errors import UserError
from jaxrl.process.streams import Output, raise_file_limit
from jaxrl.run.reporting import Notifier
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import RunLog

PROGRAM = """
import sys
from jaxrl.config import cli
from jaxrl.config.settings import LoggingConfig
from jaxrl.telemetry.console import Console
from jaxrl.telemetry.lines import RunLog
from jaxrl.run.reporting import Notifier

def main(argv):
    path, mode, code = argv
    sys.stdin.readline()
    with Console(LoggingConfig(console=mode), steps=3) as console:
        notify = Notifier(console)
        notify("before the log")
        with notify.into(RunLog(path)):
            for step in range(4):
                console.step({"step": step, "sft/loss": 1.0})
                notify(f"after step {step}")
    return int(code)

cli.exit_process(cli.run(main, sys.argv[1:]))
"""


class Gone(io.StringIO):
    """A stream that takes nothing."""

    name = "<stdout>"

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_a_lost_output_is_reported_once_in_the_log(
    tmp_path: Path, mode: Literal["plain", "rich"]
) -> None:
    with Console(LoggingConfig(console=mode), steps=3, out=Gone()) as console:
        notify = Notifier(console)
        notify("first")
        with notify.into(RunLog(tmp_path / "log.txt")):
            for step in range(4):
                console.step({"step": step, "sft/loss": 1.0})
                notify(f"after {step}")
    log = (tmp_path / "log.txt").read_text()
    assert log.count("standard output cannot be written to: Broken pipe") == 1
    assert "first" in log and "after 3" in log


def test_an_output_that_takes_text_again_gets_it() -> None:
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    reported: list[str] = []
    stream = Full()
    output = Output(stream)
    output.lost = reported.append
    output.line("lost")
    output.line("lost too")
    stream.full = False
    output.line("kept")
    assert stream.getvalue() == "kept\n" and len(reported) == 1


def test_no_output_and_characters_that_it_does_not_have() -> None:
    output = Output(None)
    output.line("nobody")
    assert not output.isatty()
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    Output(narrow).line("2 × 3")
    assert narrow.buffer.getvalue() == b"2 \\xd7 3\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lost", "mode", "code"),
    # A closed pipe is in the default suite of tests/commands/test_cli.py too.
    and_slow(
        [("full disk", "rich", 1), ("none at all", "plain", 0)], [("closed pipe", "plain", 0)]
    ),
)
def test_the_exit_code_is_as_without(tmp_path: Path, lost: str, mode: str, code: int) -> None:
    log = tmp_path / "log.txt"
    assert start(lost, log, mode, code).wait(300) == code
    text = log.read_text()
    assert "before the log" in text and "after step 3" in text
    assert text.count("standard output cannot be written to") == int(lost != "none at all")


def start(lost: str, log: Path, mode: str, code: int) -> subprocess.Popen[str]:
    """A process whose outputs are gone before it writes anything."""
    command = [sys.executable, "-c", PROGRAM, str(log), mode, str(code)]
    if lost == "none at all":
        command = ["sh", "-c", '"$@" >&- 2>&-', "sh", *command]
    where: int = subprocess.DEVNULL
    readers: tuple[int, ...] = ()
    if lost == "closed pipe":
        reader, where = os.pipe()
        readers = (reader,)
    elif lost == "full disk":
        where = os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=where, stderr=where, text=True, close_fds=True
    )
    for reader in readers:
        os.close(reader)
    if where >= 0:
        os.close(where)
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.close()
    return process


def test_lost_stderr_ends_nothing_either() -> None:
    program = (
        "import sys; from jaxrl.config import cli; from jaxrl.errors import RunError\n"
        "def main(argv): raise RunError('it failed')\n"
        "cli.exit_process(cli.run(main, []))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, timeout=120)
    assert done.returncode == 1


def test_a_worker_that_still_computes_at_the_end_does_not_abort_the_process() -> None:
    """The thread is inside XLA, and comes back when Python has ended."""
    program = (
        "import jax, jax.numpy as jnp, sys, threading, time\n"
        "from jaxrl.config import cli; from jaxrl.process import interrupt\n"
        "def main(argv):\n"
        "    x = jnp.ones((64, 64))\n"
        "    f = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda i, x: x @ x / 64, x))\n"
        "    f.lower(x).compile()\n"
        "    thread = threading.Thread(target=lambda: f(x).block_until_ready(), daemon=True)\n"
        "    thread.start()\n"
        "    time.sleep(1)\n"
        "    interrupt.left_behind.append(thread)\n"
        "    raise KeyboardInterrupt('interrupted')\n"
        "cli.exit_process(cli.run(main, []))"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 130 and done.stderr.strip().endswith("interrupted")
    assert time.monotonic() - begun < 300


@pytest.mark.parametrize(
    ("limits", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((4096, 4096), None),
        ((10**6, 10**6), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        ((128, 128), None),
        ((32, 127), "may open 127 files at once .ulimit -Hn.; a run needs at least 128"),
        ((1, 1), "may open 1 file at once"),
    ],
)
def test_a_run_may_open_as_many_files_as_the_host_allows(monkeypatch, limits, after):
    """With 32, a run went on without checkpoints."""
    changed = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: changed.append(new))
    if isinstance(after, str):
        with pytest.raises(UserError, match=after):
            raise_file_limit()
    else:
        raise_file_limit()
    assert changed == ([after] if isinstance(after, tuple) else [])
