"""Rewards and environments that write into the answers of their process, or break it."""

import fcntl
import json
import os
import pickle

from jaxrl.environments import Answer, Environment


def write(answer):
    """Writes an answer to any of the first orders into each pipe of the process."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                for order in range(1, 9):
                    line = json.dumps({"order": order, **answer}) + "\n"
                    os.write(int(name), b"\n" + line.encode())
        except OSError:
            pass


def break_down(what):
    """Does what a name says to the process."""
    if what == "load":
        pickle.load = lambda *_: (99, None)
    if what == "deaf":
        silent, keep_open = os.pipe()
        for name in os.listdir("/proc/self/fd"):
            try:
                reads = fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
                if int(name) > 2 and reads and "pipe:" in os.readlink(f"/proc/self/fd/{name}"):
                    os.dup2(silent, int(name))
            except OSError:
                pass
    if what == "write":
        os.write = lambda descriptor, data: 0
    if what == "close":
        os.closerange(0, 100)
    if what.startswith("{"):
        write(json.loads(what))


def judge(completions):
    for completion in completions:
        break_down(completion)
    return [float(len(c)) for c in completions]


def talks(completions):
    return [(1.0, "x" * int(c)) for c in completions]


class Garbles(Environment):
    """Breaks its process where the turn says so."""

    def __init__(self):
        self.heard = 0

    def step(self, text, messages):
        break_down(text)
        self.heard += 1
        return Answer(f"heard {self.heard}")


class Messages(Environment):
    """Returns what the turn names."""

    def reset(self, row):
        return "x" * row["size"] if "size" in row else "go"

    def step(self, text, messages):
        def breaks():
            yield {"role": "user", "content": "a"}
            raise KeyError("no more")

        class Odd(dict):
            def get(self, name):
                raise OSError("odd")

        return {
            "generator": lambda: Answer({"role": "tool", "content": c} for c in "ab"),
            "breaks": lambda: Answer(breaks()),
            "odd": lambda: Answer([Odd(role="user", content="x")]),
            "fields": lambda: Answer([{"role": "tool", "content": "7", "name": "f", "id": (1, 2)}]),
            "no json": lambda: Answer([{"role": "tool", "content": "7", "name": {1, 2}}]),
            "none": lambda: Answer([{"role": "tool", "content": None}]),
            "parts": lambda: Answer([{"role": "tool", "content": [{"type": "text", "text": "x"}]}]),
            "dict": lambda: Answer({"role": "tool", "content": "x"}),
            "big": lambda: Answer("🙂" * 3_000_000),
            "many": lambda: Answer([{"role": "tool", "content": "\x00" * 60_000}] * 5),
            "big field": lambda: Answer(
                [{"role": "tool", "content": "x", "name": "y" * 3_000_000}]
            ),
            "big error": lambda: [][int("x" * 4000)],
            "half": lambda: Answer([{"role": "tool", "content": "x", "name": "\ud83d"}]),
        }[text]()


def tool(item: str) -> str:
    """Does nothing.

    Args:
        item: what.
    """
    return item


class ManyTools(Environment):
    """10,000 tools."""

    def __init__(self, long=False):
        from jaxrl.environments.tool_calls import SchemaTool

        words, many = ("y" * 5_000_000, 1) if long else ("Does something with an item.", 10_000)
        parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
        self.tools = [
            SchemaTool(f"tool_{number}", words, parameters, lambda name, given: "")
            for number in range(many)
        ]
