"""What the plan and the compiled programs predict, measured on the devices that are here.

    python benchmarks/gpu.py --size 1.5b --out gpu.jsonl
    python benchmarks/gpu.py --size tiny --only decode,update    # a CPU will do

Models are those of `described.py`, with random weights: nothing is downloaded. Sections run in the
order of their importance, each in a process of its own, so that one that fails, or takes the
device's memory with it, leaves the others alone; what does not fit in `--budget` seconds is left
out, and the table says so. The full numbers are JSON lines in `--out`: first the devices, versions
and the command, then a row for each measurement (`gpu_sections.Bench.row`). Nothing is kept in a
compile cache, so that each program's seconds to compile are its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from described import SIZES
from gpu_sections import GB, PREALLOCATE, SECTIONS, Bench, Row

from jaxrl.process.gpu_memory import take_share
from jaxrl.sharding.targets import Ceilings

HERE = Path(__file__).parent
WIDTH, MOST_LINES = 120, 40
ELSEWHERE = ("step", "torch")
"""Sections whose work is done by processes of their own, which need the device's memory."""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "torch", "transformers")
COLUMNS = (16, 7, 13, 13, 18)
"""Widths of the table's columns, after the section and what is measured."""
LEAST_S, GRACE_S = 5.0, 15.0
"""Seconds without which no section begins, and those that a section has beyond the budget to end
what it began."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.section is not None:
        run_section(arguments)
        return
    arguments.out.unlink(missing_ok=True)
    limit = time.time() + arguments.budget
    for section in dict.fromkeys(("ceilings", *arguments.only)):
        run(section, arguments, limit)
    rows = read(arguments.out)
    head = next((row for row in rows if "section" not in row), {})
    print("\n".join(table(head, [row for row in rows if "section" in row], arguments.out)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--size", choices=SIZES, default="1.5b", help="of the student")
    options.add_argument(
        "--only",
        type=sections,
        default=tuple(SECTIONS),
        help=f"some of {','.join(SECTIONS)}; the ceilings are always measured",
    )
    options.add_argument("--budget", type=float, default=540.0, help="seconds for all sections")
    options.add_argument("--devices", type=int, help="of those that are here; all where absent")
    options.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    options.add_argument("--section", help=argparse.SUPPRESS)
    options.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options.add_argument("--command", help=argparse.SUPPRESS)
    return options.parse_args(argv)


def sections(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(
            f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}"
        )
    return tuple(name for name in SECTIONS if name in chosen)


# One process for each section.


def run(section: str, arguments: argparse.Namespace, limit: float) -> None:
    """A process for a section; whatever ends it early is a row."""
    left = limit - time.time()
    if left < LEAST_S:
        write(arguments.out, {"section": section, "error": "left out: the time budget is spent"})
        return
    words = ["--section", section, "--size", arguments.size, "--out", str(arguments.out)]
    words += ["--until", str(limit), "--command", shlex.join(sys.orig_argv)]
    if arguments.devices is not None:
        words += ["--devices", str(arguments.devices)]
    environment = dict(os.environ)
    if section in ELSEWHERE:
        environment[PREALLOCATE] = "false"
    begin = time.time()
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            env=environment,
            timeout=left + GRACE_S,
            stderr=subprocess.PIPE,
            text=True,
        )
    except subprocess.TimeoutExpired:
        write(arguments.out, {"section": section, "error": "cut short: the time budget is spent"})
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        error = f"the process ended with {done.returncode}: {last}"[:400]
        write(arguments.out, {"section": section, "error": error})
    print(f"{section}: {time.time() - begin:.0f} s", flush=True)


def run_section(arguments: argparse.Namespace) -> None:
    """In its own process."""
    take_share()
    devices = jax.local_devices()[: arguments.devices]
    bench = Bench(SIZES[arguments.size], devices, arguments.until)
    if arguments.section == "ceilings":
        write(arguments.out, header(devices, arguments))
    else:
        bench.measured = measured(read(arguments.out))
    for row in SECTIONS[arguments.section](bench):
        write(arguments.out, row)
    if bench.measured is not None and arguments.section == "ceilings":
        write(arguments.out, {"section": "ceilings", "ceilings": vars(bench.measured)})


def measured(rows: Sequence[Row]) -> Ceilings:
    """What the section `ceilings` found.

    Raises:
        ValueError: it found nothing.
    """
    found = next((row["ceilings"] for row in rows if "ceilings" in row), None)
    if found is None:
        raise ValueError("the ceilings could not be measured, and shares are shares of them")
    return Ceilings(**found)


def write(out: Path, row: Row) -> None:
    with out.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def read(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def header(devices: Sequence[jax.Device], arguments: argparse.Namespace) -> Row:
    """What the numbers are numbers of."""
    limits = (devices[0].memory_stats() or {}).get("bytes_limit")
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "bytes_limit": limits,
        "driver": words_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": words_of("git", "-C", str(HERE), "rev-parse", "--short", "HEAD"),
        "versions": {"python": platform.python_version(), **dict(versions())},
        "platform_version": devices[0].client.platform_version,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "command": arguments.command,
        "size": arguments.size,
    }


def words_of(*command: str) -> str | None:
    """What a command prints on its first line; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return next(iter(done.stdout.splitlines()), "") if done.returncode == 0 else None


def versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


# The table.


def table(head: Row, rows: Sequence[Row], out: Path) -> list[str]:
    """At most `MOST_LINES` lines of `WIDTH` characters."""
    jax_version = head.get("versions", {}).get("jax")
    before, largest = "", max((max(sizes(row).values(), default=0) for row in rows), default=0)
    unit, name = (GB, "GB") if largest >= GB else (1e6, "MB")
    lines = [
        f"{head.get('devices')} x {head.get('device')}, jax {jax_version}, driver"
        f" {head.get('driver')}, commit {head.get('commit')}, size {head.get('size')}",
        line("", "", "result", "ms", "predicted ms", "share", f"{name} on a device"),
        line("section", "what", "", "a call", "meas./publ.", "of", "plan/compiled/has"),
    ]
    for row in rows:
        if "ceilings" in row:
            continue
        section = row["section"]
        lines.append(cells("" if section == before else section, row, unit))
        before = section
    last = [*notes(rows), f"all numbers: {out}"]
    room = MOST_LINES - len(last)
    if len(lines) > room:
        last.insert(0, f"{len(lines) - room + 1} rows more in the file")
        lines = lines[: room - 1]
    return [x[:WIDTH].rstrip() for x in (*lines, *last)]


def line(section: str, what: str, *columns: str) -> str:
    parts = [f"{x:>{n}}" for x, n in zip(columns, COLUMNS, strict=True)]
    return f"{section:<10} {what[:36]:<36} {' '.join(parts)}"


def sizes(row: Row) -> dict[str, int]:
    """Those of `planned`, `compiled` and `device` that are known."""
    return {key: row[key] for key in ("planned", "compiled", "device") if row.get(key)}


def cells(section: str, row: Row, unit: float) -> str:
    if "error" in row:
        return f"{section:<10} {row.get('name', '')[:36]:<36} {row['error']}"
    predicted, share, known = row.get("predicted", {}), row.get("share"), sizes(row)
    return line(
        section,
        row["name"],
        f"{number(row['value'])} {row['unit']}" if "value" in row else "",
        milliseconds(row.get("seconds")),
        "/".join(milliseconds(predicted.get(k)) for k in ("measured", "published"))
        if predicted
        else "",
        "" if share is None else f"{share:.0%} {row['share_of']}",
        "/".join(
            number(known[key] / unit) if key in known else "-"
            for key in ("planned", "compiled", "device")
        )
        if known
        else "",
    )


def number(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else number(1e3 * seconds)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """The attention kernels and CUDA graphs of the programs' texts; what a step is made of."""
    kernels: dict[str, list[str]] = {}
    for row in rows:
        if row.get("attention"):
            kernels.setdefault(row["attention"], []).append(row["name"].split(",")[0])
    for kernel, names in kernels.items():
        yield f"{kernel}: {'; '.join(dict.fromkeys(names))}"
    graphs = [row for row in rows if row.get("graphs")]
    if graphs:
        found = graphs[-1]["graphs"]
        yield (
            f"{graphs[-1]['name']}: of the kernels of its loops {found['inside']} are in"
            f" {found['graphs']} CUDA graphs, and the host launches {found['outside']}"
        )
    for row in rows:
        if "note" in row and "error" not in row:
            yield f"{row['name']}: {row['note']}"


if __name__ == "__main__":
    main()
