"""Environments as a user may write them, good and bad; run in processes by the tests."""

import asyncio
import contextlib
import ctypes
import os
import random
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

from jaxrl.environments import Answer, Environment


class Echo(Environment):
    """Answers with what it has heard so far; does what the turn asks for."""

    def __init__(self):
        self.heard = []

    def step(self, text, messages):
        self.heard.append(text)
        trouble(text, messages)
        if text == "done":
            return Answer("bye", reward=1.0, done=True)
        return {"messages": " ".join(self.heard), "reward": 0.5 if text == "half" else None}


class Late(Environment):
    """Answers two turns and ends at the third, each after some time; `draws` random numbers, or
    says what its row and the turn decide."""

    def __init__(self, draws=False):
        self.draws = draws

    def reset(self, row):
        return "say " + row["prompt"]

    async def step(self, text, messages):
        await asyncio.sleep(random.random() * 0.03)
        if len(messages) > 4:
            return Answer(reward=1.0, done=True)
        number = random.randrange(100) if self.draws else zlib.crc32(text.encode()) % 100
        return Answer(f"{number}+", reward=0.5)


class Stages(Environment):
    """Gets into trouble in the method that its row, or for `__init__` a file, names; writes down
    the instances whose `reset` has returned, and those that are closed."""

    def __init__(self, folder):
        self.folder, self.heard = Path(folder), []
        with contextlib.suppress(FileNotFoundError):  # for the first one that comes
            os.rename(self.folder / "__init__", self.folder / "taken")
            self._trouble("__init__", (self.folder / "taken").read_text())

    def reset(self, row):
        self._trouble("reset", row.get("reset"))
        self.log = self.folder / "log"
        self._note("begun")
        return row["prompt"]

    def step(self, text, messages):
        self._trouble("step", self.row.get("step"))
        self.heard.append(text)
        return Answer(" ".join(self.heard), reward=1.0)

    def close(self):
        self._note("closed")
        self._trouble("close", self.row.get("close"))

    def _note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {id(self)} {os.getpid()}\n")

    def _trouble(self, stage, what):
        if what == "wait":
            time.sleep(0.3)
        elif what == "hang":
            time.sleep(100)
        elif what:
            trouble(what, stage)


class Doors(Environment):
    """Says how many doors there are before each prompt, and ends."""

    def __init__(self, doors=3):
        self.doors = doors

    def reset(self, row):
        return f"{self.doors} doors: {row['prompt']}"

    def step(self, text, messages):
        return Answer(str(self.doors), reward=1.0, done=True)


def trouble(text, messages):
    if text == "raise":
        raise KeyError("no such thing")
    if text == "leave":
        sys.exit("bye")
    if text == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "exit":
        os._exit(3)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "fork" and os.fork() == 0:
        return
    if text == "run":
        assert asyncio.run(asyncio.sleep(0.01, "ran")) == "ran"
    if text == "slow":
        time.sleep(0.4)
    if text == "flood":
        while True:
            for name in os.listdir("/proc/self/fd"):
                try:
                    if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                        os.write(int(name), b"x" * 10_000)
                except OSError:
                    pass
    if text.startswith("child "):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(text.removeprefix("child ")).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(100)


class Waits(Environment):
    """Awaits; blocks or ignores that it is cancelled, where asked."""

    async def reset(self, row):
        await asyncio.sleep(0.01)
        return f"begin {row['prompt']}"

    async def step(self, text, messages):
        if text == "block":
            await asyncio.gather(asyncio.sleep(0.01), blocks())
        if text == "hang":
            await asyncio.sleep(100)
        while text == "stay":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(100)
        await asyncio.sleep(0.3)
        return [Answer("yes"), Answer(done=True)][text == "done"]


async def blocks():
    time.sleep(100)


class Random(Environment):
    """Its answers are of no rule; what it was asked is in a file."""

    def reset(self, row):
        self.log = row.get("log")
        if row.get("random_reset"):
            return f"prompt {os.urandom(4).hex()}"
        return row["prompt"]

    def step(self, text, messages):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{text}\n")
        if text == "exit":
            os._exit(1)
        return Answer(os.urandom(4).hex(), reward=float(len(messages)), done=text == "done")


class Garbage(Environment):
    """Returns what the turn names."""

    def step(self, text, messages):
        return {
            "nothing": None,
            "text": "hello",
            "key": {"message": "hello"},
            "nan": Answer("x", reward=float("nan")),
            "word": Answer("x", reward="much"),
            "half": Answer("\ud83d"),
            "done": {"messages": "x", "done": 1},
            "silence": Answer(),
            "role": Answer([{"role": "assistant", "content": "x"}]),
            "shape": Answer([{"content": "x"}]),
            "number": Answer(7),
        }[text]


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second one.
    """
    return a + b


async def later(word: str) -> str:
    """Says a word, later.

    Args:
        word: what to say.
    """
    await asyncio.sleep(0.01)
    return word.upper()


class Tools(Environment):
    tools = [add, later]


def bare(a, b):
    return a


class NoSchema(Environment):
    tools = [bare]


class Nothing(Environment):
    pass


class NeedsArguments(Environment):
    def __init__(self, level):
        self.level = level

    def step(self, text, messages):
        return Answer(done=True)


class NoEnvironment:
    pass
