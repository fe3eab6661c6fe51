"""Seconds from the start of the process until the first step of a run is done, of two checkouts in
turns: one JSON line for each pair, and their medians.

    python benchmarks/first_step.py BEFORE [--pairs 5] [--config FILE] [key=value ...]

BEFORE is another checkout of this repository; the other side is the one that this file is in. Every
run has an empty compile cache. `cpu` is the processor time of all threads until then; `first_row`
the time until the policy was evaluated, where it is. Other work on the machine shows in `load`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
import json, os, sys, time
from jaxrl.config.schema import Config
from jaxrl.train import train

began, rows = float(sys.argv[1]), {}

def on_step(row):
    rows[row["step"]] = time.time() - began
    if row["step"] == 1:
        cpu = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        print(json.dumps({"first_row": rows.get(0), "step": rows[1], "cpu": cpu}), flush=True)
        os._exit(0)

if __name__ == "__main__":
    train(Config.load(sys.argv[2] or None, sys.argv[3:]), on_step=on_step)
"""


def first_step(checkout: Path, config: str, keys: list[str]) -> dict[str, float]:
    """Runs the checkout's code until its first step is done; returns seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.py"
        script.write_text(RUN)
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, [str(checkout), before]))
        environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        own = [f"run_dir={folder}/run", f"compile_cache={folder}/cache", "steps=2", *keys]
        done = subprocess.run(
            [sys.executable, script, str(time.time()), config, *own],
            env=environment | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_row"')]
        if not lines:
            raise SystemExit(
                f"{checkout}: no first step\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return json.loads(lines[-1])


def main() -> None:
    told = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    told.add_argument("before", type=Path)
    told.add_argument("--pairs", type=int, default=5)
    told.add_argument("--config", default="builtin:quickstart")
    told.add_argument("keys", nargs="*")
    given = told.parse_intermixed_args()
    sides = {"before": given.before.resolve(), "after": Path(__file__).resolve().parents[1]}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(given.pairs):
        line: dict[str, object] = {"load": os.getloadavg()[0]}
        for side in sorted(sides, reverse=bool(pair % 2)):
            line[side] = found = first_step(sides[side], given.config, given.keys)
            seconds[side].append(found["step"])
        print(json.dumps(line), flush=True)
    gains = [1 - b / a for a, b in zip(seconds["before"], seconds["after"], strict=True)]
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    print(json.dumps(medians | {"sooner": statistics.median(gains)}))


if __name__ == "__main__":
    main()
