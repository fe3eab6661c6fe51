"""What comparisons of runs on one task share: options, runs that resume, and the page's lines.

Every run that ends is a line of `--results`, and is not run again: a stopped comparison resumes
where it was, and the page has all the runs of the file with the same steps and keys.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import run_all

from jaxrl import Config, train

EDGE = 10
"""Steps at an end of a run that a figure is the mean of: one batch's is noise."""

Row = dict[str, Any]


def parse(
    about: str | None, *, steps: int, only: Iterable[str], results: Path, page: Path
) -> argparse.Namespace:
    """The options of a comparison, from the command line.

    Args:
        steps: of a run, by default.
        only: what can be chosen to be run.
    """
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    names = list(dict.fromkeys(only))
    parser.add_argument("--steps", type=int, default=steps, help=f"of a run ({steps})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = f"what to run now: {', '.join(names)}"
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=chosen)
    parser.add_argument("--results", type=Path, default=results, help="JSON lines, one a run")
    parser.add_argument("--out", type=Path, default=page)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    return parser.parse_intermixed_args()


def asked(arguments: argparse.Namespace) -> Row:
    """What runs must have in common to stand in one table."""
    return {"steps": arguments.steps, "overrides": arguments.overrides}


def read(arguments: argparse.Namespace) -> dict[tuple[str, int], Row]:
    """(label, seed) -> a run that ended, of this comparison."""
    if not arguments.results.exists():
        return {}
    lines = arguments.results.read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.items() >= asked(arguments).items()]
    return {(row["label"], row["seed"]): row for row in rows}


def complete(
    runs: Mapping[str, Callable[[int], Row]], arguments: argparse.Namespace
) -> dict[tuple[str, int], Row]:
    """Runs what the file lacks, all labels with one seed, then with the next. Returns what `read`
    does then.

    Args:
        runs: label -> (seed -> the figures of a run).
    """
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for label, run in runs.items():
            if (label, seed) in read(arguments):
                continue
            began = time.monotonic()
            row = run(seed) | {"label": label, "seed": seed, **asked(arguments)}
            row["seconds"] = time.monotonic() - began
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{label}, seed {seed}: {row['seconds']:.0f} s", flush=True)
    return read(arguments)


def trained(base: str | Path, steps: int, seed: int, overrides: Sequence[str]) -> list[Row]:
    """The rows of a run that is evaluated at its end and leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = (
            f"run_dir={folder}/run",
            f"steps={steps}",
            f"seed={seed}",
            f"eval.every={steps}",
            "checkpoint.every=0",
            "logging.console=quiet",
            "logging.samples=0",
            "logging.tensorboard=false",
            "logging.timeline=false",
        )
        return list(train(Config.load(base, [*quiet, *overrides])).metrics)


def mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the standard deviation where it is not 0 in the digits that are shown."""
    middle = form.format(statistics.fmean(values))
    deviation = form.format(statistics.stdev(values)) if len(values) > 1 else form.format(0)
    return middle if deviation == form.format(0) else f"{middle} ± {deviation}"


def cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


def table(head: Sequence[str], lines: Iterable[str]) -> str:
    return "\n".join([cells(*head), "|---" * len(head) + "|", *lines])


def seeds_of(rows: Iterable[Row]) -> str:
    return ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))


def written_by(script: str, arguments: argparse.Namespace, *options: str) -> str:
    """The command of a page, the day and the machine."""
    today = datetime.datetime.now(datetime.UTC).date()
    options = (f"--steps {arguments.steps}", *options)
    # Keys come first: after an option that takes several values they would be its own.
    command = ("python", f"benchmarks/{script}", *arguments.overrides, *options)
    return (
        f"Written by `{' '.join(command)}` on {today},\n"
        f"{run_all.machine()} Load at the end {os.getloadavg()[0]:.1f}."
    )


def write(arguments: argparse.Namespace, parts: Sequence[str]) -> None:
    arguments.out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {arguments.out}")
