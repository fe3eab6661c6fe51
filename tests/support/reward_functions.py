"""Reward functions as a user may write them, good and bad; run in processes by the tests."""

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

THREE = 3


def length(prompts, completions, **columns):
    return [len(c) for c in completions]


def with_messages(prompts, completions):
    """The length, with a message about completions that are not empty."""
    return [(len(c), f"{c[:3]} has {len(c)}") if c else 0.0 for c in completions]


def as_of_trl(prompts, completions, **kwargs):
    """The length of the completion and 100 times that of the prompt's first message: a function in
    TRL's form for conversational data."""
    lengths = [len(completion[0]["content"]) for completion in completions]
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [n + 100 * len(p[0]["content"]) for n, p in zip(lengths, prompts, strict=True)]


async def of_texts(completion_texts):
    return [float(len(text)) for text in completion_texts]


def stripped(completions):
    """The length without white space, of text alone."""
    return [len(completion.strip()) for completion in completions]


def arguments(prompts, completions, answer, level=None, absent="default"):
    """1 where everything is as `test_rewards_pool` sends it."""
    rows = zip(prompts, completions, answer, level, strict=True)
    return [float(row == ("p", "c", "5", 2) and absent == "default") for row in rows]


def names(completions, **columns):
    """The sum of 1 for each column that is a list as long as the completions."""
    return [sum(len(column) == len(completions) for column in columns.values())] * len(completions)


def as_numpy(completions):
    return np.array([len(c) for c in completions], np.float32)


def as_told(completions):
    """True, False or None, as the completion says."""
    return [{"true": True, "false": False}.get(c) for c in completions]


def trouble(completions):
    """What the completion asks for; else its length."""
    for c in completions:
        if c == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if c == "exit":
            os._exit(3)
        if c == "leave":
            sys.exit("bye")
        if c == "raise":
            raise KeyError("no such thing")
        if c == "segfault":
            ctypes.string_at(0)
    return [float(len(c)) for c in completions]


def sometimes(completions):
    """It applies to nothing, and fails where the completion says so."""
    if "raise" in completions:
        raise RuntimeError("no such thing")
    return [None] * len(completions)


def slow(completions):
    time.sleep(0.4 * len(completions))
    return [1.0] * len(completions)


def result(completions):
    """What the completion names, as the whole result of the call."""
    return {
        "too few": [],
        "too many": [1.0, 2.0],
        "a number": 1.0,
        "text": "1",
        "a dict": {0: 1.0},
        "nan": [float("nan")],
        "inf": [-float("inf")],
        "texts": ["1"],
        "huge": [10**400],
        "an array": [np.zeros(2)],
    }[completions[0]]


async def waits(prompts, completions):
    assert len(completions) == 1
    await asyncio.sleep(100 if completions[0] == "hang" else 0.3)
    return [1.0]


async def blocks(completions):
    if completions[0] == "block":
        time.sleep(100)
    return [2.0]


_lock = asyncio.Lock()


async def shares(completions):
    """A lock of one event loop: another loop would refuse it."""
    async with _lock:
        await asyncio.sleep(0.01)
    return [1.0]


_asked = asyncio.Semaphore(1)


async def one_at_a_time(completions):
    async with _asked:
        await asyncio.sleep(0.7)
    return [1.0]


def imported(completions):
    """1 where what a run needs is not loaded here, and no accelerator is in sight."""
    heavy = {"jax", "flax", "transformers", "torch"} & set(sys.modules)
    clean = not heavy and os.environ["CUDA_VISIBLE_DEVICES"] == ""
    return [float(clean and threading.current_thread() is threading.main_thread())]


def family(completions):
    """Starts a process, writes both ids to the file that the completion names, and hangs."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(completions[0]).write_text(f"{os.getpid()} {child.pid}")
    re.match(r"(a+)+$", "a" * 60 + "b")
    return [0.0]


def forks(completions):
    """Its length; a child that it forks returns too, a wrong reward and some exception."""
    for _ in range(2):
        if os.fork() == 0:
            return [-1.0] * len(completions)
    if os.fork() == 0:
        raise KeyError("of the child")
    time.sleep(0.1)  # the children are first
    return [float(len(c)) for c in completions]


async def forks_awaited(completions):
    if os.fork() == 0:
        return [-1.0]
    await asyncio.sleep(0.1)
    return [float(len(completions[0]))]


NO_ANSWERS = (
    b"half a line",
    b"\xff\xfe\n",
    b"[1]\n7\nnull\n" + b"[" * 100_000 + b"\n",
    b'{"ended": null}\n{"begin": true}\n{"items": [7], "values": [0]}\n',
    b'{"order": -1, "items": [0], "values": [9]}\n{"refused": "no"}\n',
)


def _pipes():
    """Descriptors that lead to other processes."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                yield int(name)


def writes(completions):
    """Its length; what is no answer goes to whoever listens, without an end where asked so."""
    for c in completions:
        for pipe, text in itertools.product(_pipes(), NO_ANSWERS):
            with contextlib.suppress(OSError):
                os.write(pipe, text)
                while c == "flood":
                    os.write(pipe, text)
    return [float(len(c)) for c in completions]


def hungry(completions):
    for c in completions:
        if c == "hungry":
            bytearray(1 << 40)
    return [float(len(c)) for c in completions]


def prints(completions):
    for _ in range(100):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr)
    return [float(len(c)) for c in completions]


def breeds(completions, folder):
    """Starts processes, which leave its session, and writes their ids; then it hangs or ends."""
    for c, place in zip(completions, folder, strict=True):
        for _ in range(30 if c in ("breeds", "leaves") else 0):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(place, str(child.pid)).touch()
        if c == "leaves":
            os._exit(3)
        time.sleep(100 if c == "breeds" else 0)
    return [float(len(c)) for c in completions]


def parts(completions, parts):
    """Share of the texts in the column `parts` that occur in the completion."""
    return [
        None if wanted is None else sum(part in c for part in wanted) / len(wanted)
        for c, wanted in zip(completions, parts, strict=True)
    ]


def no_completions(prompts, answers):
    return []


def positional(prompts, completions, /):
    return []


class Judge:
    pass
