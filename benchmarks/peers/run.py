"""jaxrl beside TRL, tunix and transformers on the same work, in one session, taking turns.

    python benchmarks/peers/run.py --trl-python A/bin/python --tunix-python B/bin/python \
        --teacher FOLDER --student FOLDER --prompts FILE [--only sampler jsd] [--rounds 2]

A has trl, torch and transformers; B has google-tunix; the python that runs this has jaxrl. The
models are Hugging Face folders (`python -m jaxrl.export` writes them); `work.py` defines the work
and the prompts. Every measurement is a process of its own, after its own warm-up. Prints a line
for each, then a table of medians, with how many times as fast as the best peer jaxrl is. The
machine should do nothing else: the load of each measurement is in the lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import work

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
EXPECTED = {
    "distill": work.trained_tokens("distill"),
    "distill-tail": work.trained_tokens("distill-tail"),
    "sampler": work.SAMPLER_BATCH * work.NEW,
    "heavy": sum(work.heavy_lengths()),
    "gspo": work.trained_tokens("gspo"),
    "gspo-tail": work.trained_tokens("gspo-tail"),
    "jsd": work.JSD[0],
}


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    told.add_argument("--trl-python", type=Path)
    told.add_argument("--tunix-python", type=Path)
    told.add_argument("--teacher", required=True)
    told.add_argument("--student", required=True)
    told.add_argument("--prompts", required=True)
    told.add_argument("--only", nargs="+", choices=tuple(EXPECTED), default=list(EXPECTED))
    told.add_argument("--rounds", type=int, default=2, help="each takes its turn so often")
    told.add_argument("--repeats", type=int, default=4, help="measured in each turn")
    told.add_argument("--limit", type=float, default=900.0, help="seconds for one measurement")
    arguments = told.parse_args()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for command in commands(arguments):
            row = measure(command, arguments.limit)
            if row is not None:
                found.setdefault((row["what"], row["library"]), []).append(row)
    print(table(found))


def commands(arguments: argparse.Namespace) -> list[list[str]]:
    """One process each; jaxrl first, then its peers, for one kind of work after another."""
    models = ["--teacher", arguments.teacher, "--student", arguments.student]
    rest = ["--prompts", arguments.prompts, "--repeats", str(arguments.repeats)]
    torch_rest = ["--teacher", arguments.teacher, *rest]
    trl, tunix = arguments.trl_python, arguments.tunix_python
    made = []
    for what in arguments.only:
        ours = [sys.executable, str(HERE.parent / "peer_work.py"), what, *models, *rest]
        distills, rewards = what.startswith("distill"), what.startswith("gspo")
        if rewards:
            ours = [sys.executable, str(HERE.parent / "gspo_step.py"), "--what", what, *torch_rest]
        made.append(ours)
        if tunix and what != "jsd":
            made.append([str(tunix), str(HERE / "tunix_work.py"), what, *models, *rest])
        if trl and distills:
            for trainer in ("distillation", "gkd"):
                script = [str(trl), str(HERE / "trl_distill.py"), trainer, "--what", what]
                made.append([*script, *models, *rest])
        if trl and rewards:
            made.append([str(trl), str(HERE / "trl_gspo.py"), "--what", what, *torch_rest])
        if trl and not (distills or rewards):
            made.append([str(trl), str(HERE / "torch_work.py"), what, *torch_rest])
        if trl and what == "jsd":
            made.append([str(trl), str(HERE / "torch_work.py"), what, "--compile", *torch_rest])
        if distills and tunix:  # tunix has only the forward KL: jaxrl on that too
            made.append([*ours, "--beta", "0"])
    return made


def measure(command: list[str], limit: float) -> dict[str, Any] | None:
    """The line of one process; a failure is told and left out."""
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=limit
    )
    if done.returncode:
        print(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    row = json.loads(done.stdout.strip().splitlines()[-1])
    if "--beta" in command:
        row["library"] += " forward KL"
    wrong = [n for n in row["tokens"] if n != EXPECTED[row["what"]]]
    row["tokens_wrong"] = wrong
    print(json.dumps(row), flush=True)
    return row


def table(found: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Markdown: median seconds and tokens per second of each, and jaxrl over the best peer."""
    lines = [
        "| work | library | seconds | best | tokens/s | jaxrl is so many times as fast | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = {}
    for (what, library), rows in found.items():
        seconds = [s for row in rows for s in row["seconds"]]
        middle = statistics.median(seconds)
        if library == "jaxrl":
            ours[what] = middle
        ratio = "" if library.startswith("jaxrl") else f"{middle / ours.get(what, middle):.2f}"
        wrong = [n for row in rows for n in row["tokens_wrong"]]
        remark = f"token counts differ: {wrong}" if wrong else ""
        lines.append(
            f"| {what} | {library} | {middle:.3g} | {min(seconds):.3g} |"
            f" {EXPECTED[what] / middle:.0f} | {ratio} | {remark} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
