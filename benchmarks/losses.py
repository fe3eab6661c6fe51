"""All policy losses on one task, from the same weights, prompts and seeds; writes a page.

    python benchmarks/losses.py [--steps 100] [--only gspo grpo] [key=value ...]

The task is that of `configs/quickstart_gspo.yaml`, the page `docs/losses-compared.md`. Each loss
has its paper's own settings (`policy.*` at null); the learning rate is the same for all. Run it
from the root of the repository.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_all

from jaxrl import Config, train
from jaxrl.losses.policy import PRESETS
from jaxrl.objective import configured

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart_gspo.yaml"
PAGE = ROOT / "docs" / "losses-compared.md"
OWN = ("policy.clip_low=null", "policy.clip_high=null")
EDGE = 10
"""Steps at each end that a figure is the mean of: one batch's reward is noise."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    overrides: tuple[str, ...]


def cases() -> dict[str, Case]:
    """Label -> case: every loss with its own settings, and GSPO with the quickstart's clip."""
    found = {name: Case(name, (f"algorithm={name}", *OWN)) for name in PRESETS}
    clip = Config.load(CONFIG).policy
    label = f"gspo, clip {clip.clip_low:g}/{clip.clip_high:g}"
    return found | {label: Case("gspo", ())}


def main() -> None:
    told = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    told.add_argument("--steps", type=int, default=100)
    told.add_argument("--only", nargs="+", help="losses to run; the page then has only these")
    told.add_argument("--out", type=Path, default=PAGE)
    told.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = told.parse_intermixed_args()
    chosen = {
        label: case
        for label, case in cases().items()
        if arguments.only is None or case.name in arguments.only
    }
    lines = []
    for label, case in chosen.items():
        lines.append(row(label, case, arguments.steps, arguments.overrides))
        print(lines[-1], flush=True)
    arguments.out.write_text(page(lines, arguments))
    print(f"wrote {arguments.out}")


def row(label: str, case: Case, steps: int, overrides: list[str]) -> str:
    """Runs one loss; a line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = (
            f"run_dir={folder}/run",
            f"steps={steps}",
            f"eval.every={steps}",
            "checkpoint.every=0",
            "logging.console=quiet",
            "logging.samples=0",
            "logging.tensorboard=false",
            "logging.timeline=false",
        )
        config = Config.load(CONFIG, [*quiet, *case.overrides, *overrides])
        rows = train(config).metrics
    before, *done = rows
    term = configured(config).term
    return cells(
        f"`{case.name}`" + label.removeprefix(case.name),
        ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in vars(term).items()),
        str(config.updates_per_batch),
        change(done, "reward/mean", "{:.3f}"),
        f"{before['eval/accuracy']:.1%} to {done[-1]['eval/accuracy']:.1%}",
        f"{mean(done, 'policy/clip_fraction'):.1%}",
        f"{mean(done, 'policy/clip_fraction_sequences'):.1%}",
        change(done, "policy/entropy", "{:.2f}"),
        f"{mean(done, 'actor/tokens'):.0f}",
        f"{statistics.median(x['time/step_s'] for x in done[1:]):.2f}",
    )


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def change(rows: list[dict[str, Any]], key: str, form: str) -> str:
    """The mean over the first steps, and over the last."""
    edge = min(EDGE, len(rows))
    return f"{form} to {form}".format(mean(rows[:edge], key), mean(rows[-edge:], key))


def cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


HEAD = (
    "loss",
    "settings",
    "updates a step",
    "reward",
    "held-out accuracy",
    "tokens clipped",
    "completions clipped",
    "entropy, nats",
    "tokens trained a step",
    "s/step",
)


NOTES = """\
This is one seed and one learning rate, on a model of 0.4 million weights: no ranking. Losses with
one update a step never clip, for their ratio is 1. GSPO's own clip range is meant for large models;
an update of one this small moves a completion's probability further."""


def page(lines: list[str], arguments: argparse.Namespace) -> str:
    command = f"python benchmarks/losses.py --steps {arguments.steps}"
    words = [f"--only {' '.join(arguments.only)}"] if arguments.only else []
    config = Config.load(CONFIG, arguments.overrides)
    today = datetime.datetime.now(datetime.UTC).date()
    table = "\n".join([cells(*HEAD), "|---" * len(HEAD) + "|", *lines])
    written = " ".join([command, *words, *arguments.overrides])
    task = (
        "The task is that of [configs/quickstart_gspo.yaml](../configs/quickstart_gspo.yaml):"
        f" {arguments.steps} steps of {config.batch_size} prompts\nwith {config.group_size}"
        " completions each, from the same weights, with the same prompts, the same random bits and"
        f" the same\nlearning rate, {config.optimizer.learning_rate:g}. Each loss has its paper's"
        " own settings; [reinforcement-learning.md](reinforcement-learning.md) has the\nformulas."
        f" Reward and entropy are means over the first and last {EDGE} steps; the accuracy is that"
        f" of greedy completions\nof {config.eval.prompts} held-out prompts, before and after; what"
        " is clipped is the mean over all steps."
    )
    parts = [
        "# All losses on one task",
        f"Written by `{written}` on {today},\n{run_all.machine()} Load at the end"
        f" {os.getloadavg()[0]:.1f}.",
        task,
        table,
        NOTES,
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
