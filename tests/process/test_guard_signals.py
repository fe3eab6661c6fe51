"""Processes of users' code and the signals that ask a run to end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from jaxrl.process.interrupt import ASKING
from jaxrl.rewards.functions import find
from jaxrl.rewards.reward_pool import Item, RewardPool

CODE = """
import os, pathlib, signal, subprocess, sys, time

def waits(completions, folder, **_):
    pathlib.Path(folder[0], "begun").write_text("")
    end = time.monotonic() + 20
    while not pathlib.Path(folder[0], "go").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return [len(text) for text in completions]

def ends_its_own(completions, **_):
    number = getattr(signal, completions[0])
    sleeps = "import time; print(flush=True); time.sleep(60)"
    program = subprocess.Popen([sys.executable, "-c", sleeps], stdout=subprocess.PIPE)
    program.stdout.readline()
    program.send_signal(number)
    forked = os.fork()
    if forked == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(forked, number)
    _, status = os.waitpid(forked, 0)
    program.wait(10)
    return [1.0 if os.waitstatus_to_exitcode(status) == -number else 0.0]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(CODE)
    return path


def test_users_code_outlives_what_ends_a_run(file: Path, tmp_path: Path) -> None:
    """A signal to all processes of a run asks it to finish its step, which needs the answer."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    with RewardPool([find(f"{file}:waits")], workers=1, timeout=30, startup=60) as pool:
        future = pool.judge(0, [Item("p", "abc", "5", {"folder": str(tmp_path)})])
        while not (tmp_path / "begun").exists():
            time.sleep(0.02)
        for process in psutil.Process().children(recursive=True):
            for number in () if process.pid in before else ASKING:
                process.send_signal(number)
        time.sleep(0.2)
        (tmp_path / "go").write_text("")
        scores = future.result(60)
    assert scores.values == [3] and not scores.failures


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_users_code_may_end_processes_that_it_has_begun(file: Path, number: int) -> None:
    """Also in a worker of Ray, which has these signals blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        with RewardPool([find(f"{file}:ends_its_own")], workers=1, timeout=30, startup=60) as pool:
            name = signal.Signals(number).name
            scores = pool.judge(0, [Item("p", name, "5", {})]).result(60)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert scores.values == [1.0], scores.failures
