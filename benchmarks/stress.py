"""Runs the same short training many times on loaded cores and counts how each run ends.

    python benchmarks/stress.py --runs 50 --load 2 schedule=one_step_off

An undisturbed run must end with exit code 0, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter

COMMAND = (
    "--mesh=actor+rollout=2,teacher=1",
    "algorithm=gkd",
    "distill.seq_kd=true",
    "distill.on_policy_fraction=0.5",
    "batch_size=4",
    "group_size=4",
    "data.eval=null",
    "logging.console=quiet",
    "checkpoint.every=0",
)


def spin(parent: int) -> None:
    """Keeps a core busy until `parent` is gone."""
    while os.getppid() == parent:
        sum(range(100_000))


def one_run(arguments: list[str], timeout: float) -> tuple[str, str]:
    """How a run ended, and the last lines it printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl.train", *COMMAND, f"run_dir={folder}/run"]
        try:
            done = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return "no end", ""
    return f"exit {done.returncode}", "\n".join((done.stdout + done.stderr).splitlines()[-20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--load", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run")
    parser.add_argument("overrides", nargs="*", help="key=value, as for jaxrl.train")
    options = parser.parse_args()
    for _ in range(options.load):
        multiprocessing.Process(target=spin, args=(os.getpid(),), daemon=True).start()
    ends: Counter[str] = Counter()
    began = time.monotonic()
    for _ in range(options.runs):
        end, output = one_run(["steps=20", *options.overrides], options.timeout)
        ends[end] += 1
        if end != "exit 0":
            print(output, file=sys.stderr)
    seconds = round(time.monotonic() - began)
    result = {"overrides": options.overrides, "load": options.load, "ends": ends, "s": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
