"""Runs every benchmark and writes the table in `benchmarks/RESULTS.md`.

    python benchmarks/run_all.py                    # built-in models, minutes
    python benchmarks/run_all.py --teacher FOLDER --student FOLDER --data FILE    # SmolLM2 besides

Each benchmark is a process of its own. FOLDERs are Hugging Face folders; FILE is a JSONL file of
prompts of at most 64 tokens. The machine should do nothing else: the load at the end of each
process stands in the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SMALL = [
    ["step.py"],
    ["train_step.py"],
    ["weight_sync.py"],
    ["sampling.py"],
    ["divergence.py"],
]
COLUMNS = ("seconds", "floor_seconds", "over_floor", "gflop", "gbytes")
MORE = ("tokens_per_second", "gb_per_s", "decode_steps", "ideal_steps", "over_naive")


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("--teacher")
    told.add_argument("--student")
    told.add_argument("--data")
    told.add_argument("--limit", type=float, default=1800.0, help="seconds for one benchmark")
    told.add_argument("--only", nargs="+", help="names of scripts, as in: step.py")
    told.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    arguments = told.parse_args()
    large = (arguments.teacher, arguments.student, arguments.data)
    if any(large) and not all(large):
        told.error("--teacher, --student and --data go together")
    chosen = SMALL + (smollm2(*large) if all(large) else [])
    if arguments.only:
        chosen = [command for command in chosen if command[0] in arguments.only]
    done = []
    for command in chosen:
        print("python benchmarks/" + " ".join(command), flush=True)
        row = run(command, arguments.limit)
        print(json.dumps(row) if row else "failed", flush=True)
        done.append((command, row))
    arguments.out.write_text(text(done))
    print(f"wrote {arguments.out}")


def smollm2(teacher: str, student: str, data: str) -> list[list[str]]:
    """On-policy distillation of 8 x 64 tokens, 135M parameters teaching 64M, and its parts."""
    models = ["--teacher", teacher, "--student", student, "--data", data]
    size = ["--batch", "8", "--prompt", "64", "--new", "64"]
    sampler = ["sampling.py", "--model", teacher, "--repeats", "3"]
    jsd = ["--tokens", "1024", "--width", "576", "--vocab", "49152", "--chunk", "512"]
    return [
        ["step.py", *models, *size, "--endless", "--repeats", "6"],
        ["train_step.py", *models, *size],
        [*sampler, "--cases", "equal"],
        [*sampler, "--prompts", "64", "--group", "1", "--prompt", "64"],
        ["divergence.py", *jsd, "--no-memory", "--repeats", "5"],
    ]


def run(command: list[str], limit: float) -> dict[str, Any] | None:
    """The JSON line of one benchmark; a failure is told and left out."""
    whole = [sys.executable, str(HERE / command[0]), *command[1:]]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def text(done: list[tuple[list[str], dict[str, Any] | None]]) -> str:
    """The page: machine, then a section for each command."""
    today = datetime.datetime.now(datetime.UTC).date()
    parts = [
        "# Benchmark results",
        "Written by `python benchmarks/run_all.py`. Seconds are medians. The floor is the longer of"
        " FLOPs and bytes of the\nreal tokens at what the machine reached in the same process"
        " (`ceilings`), summed over parts that follow one another.",
        f"{today}, {machine()}",
    ]
    for command, row in done:
        parts.append("## `python benchmarks/" + " ".join(shown(command)) + "`")
        parts.append("failed" if row is None else section(row))
    return "\n\n".join(parts) + "\n"


def section(row: dict[str, Any]) -> str:
    c = row["ceilings"]
    more = [name for name in MORE if any(name in f for f in row["figures"].values())]
    head = ["figure", *COLUMNS, *more]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, figure in row["figures"].items():
        cells = [name, *(cell(figure.get(key)) for key in (*COLUMNS, *more))]
        lines.append(f"| {' | '.join(cells)} |")
    at = ", ".join(f"{shape}: {x:g}" for shape, x in c["gflop_per_s_at"].items())
    told = f"Ceilings: {c['gflop_per_s']:g} GFLOP/s ({at}), {c['gb_per_s']:g} GB/s;"
    told += f" load at the end {row['load']:g}."
    if "memory" in row:
        sizes = ", ".join(f"{k} {v}" for k, v in row["memory"]["temporaries_mb"].items())
        where = f"{row['memory']['tokens']} tokens x {row['memory']['vocab']:,} words, bfloat16"
        told += f" Temporaries at {where}, in MB: {sizes}."
    return "\n".join(lines) + "\n\n" + told


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def shown(command: list[str]) -> list[str]:
    """Without the folders of the machine at hand."""
    return [Path(word).name if "/" in word else word for word in command]


def machine() -> str:
    names = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    for told in Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc") else ():
        if told.startswith("model name"):
            cpu = told.partition(":")[2].strip()
            break
    python = platform.python_version()
    return f"{os.cpu_count()} cores ({cpu}), Python {python}, {', '.join(versions)}."


if __name__ == "__main__":
    main()
