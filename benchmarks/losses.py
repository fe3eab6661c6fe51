"""All policy losses on one task, from the same weights, with several seeds; writes a page.

    python benchmarks/losses.py [key=value ...] [--steps 100] [--seeds 0 1 2] [--only gspo grpo]

The task is that of `configs/quickstart_gspo.yaml`, the page `docs/losses-compared.md`. Each loss
has its paper's own settings and number of updates per batch; the learning rate is the same for all.
A stopped comparison resumes where it was (`comparison.py`). Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comparison import (
    EDGE,
    Row,
    cells,
    complete,
    mean,
    parse,
    seeds_of,
    spread,
    table,
    trained,
    write,
    written_by,
)

from jaxrl import Config
from jaxrl.algorithms.methods import objective_of
from jaxrl.losses.algorithm_table import ALGORITHMS

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart_gspo.yaml"
PAGE = ROOT / "docs" / "losses-compared.md"
RESULTS = Path("runs/losses.jsonl")
OWN = ("policy.clip_low=null", "policy.clip_high=null")


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    overrides: tuple[str, ...]


def cases() -> dict[str, Case]:
    """Label -> case: every loss with its own settings, and GSPO with the quickstart's clip."""
    rewarded = [name for name, spec in ALGORITHMS.items() if spec.learns_from == "rewards"]
    found = {name: Case(name, (f"algorithm={name}", *OWN)) for name in rewarded}
    clip = Config.load(CONFIG).policy
    label = f"gspo, clip {clip.clip_low:g}/{clip.clip_high:g}"
    return found | {label: Case("gspo", ())}


def main() -> None:
    names = (case.name for case in cases().values())
    arguments = parse(__doc__, steps=100, only=names, results=RESULTS, page=PAGE)
    runs: dict[str, Callable[[int], Row]] = {
        label: partial(run, case, arguments)
        for label, case in cases().items()
        if case.name in (arguments.only or [case.name])
    }
    write(arguments, page(list(complete(runs, arguments).values()), arguments))


def loaded(case: Case, overrides: list[str]) -> Config:
    return Config.load(CONFIG, [*case.overrides, *overrides])


def run(case: Case, arguments: argparse.Namespace, seed: int) -> Row:
    """One run's figures."""
    keys = [*case.overrides, *arguments.overrides]
    before, *done = trained(CONFIG, arguments.steps, seed, keys)
    edge = min(EDGE, len(done))
    first, last = done[:edge], done[-edge:]
    return {
        "reward first": mean(first, "reward/mean"),
        "reward": mean(last, "reward/mean"),
        "accuracy first": before["eval/accuracy"],
        "accuracy": done[-1]["eval/accuracy"],
        "clipped": mean(done, "policy/clip_fraction"),
        "clipped sequences": mean(done, "policy/clip_fraction_sequences"),
        "entropy first": mean(first, "policy/entropy"),
        "entropy": mean(last, "policy/entropy"),
        "s/step": statistics.median(x["time/step_s"] for x in done[1:]),
    }


def line(label: str, rows: list[Row], same: str | None, overrides: list[str]) -> str:
    """A loss in the table: its runs' means, with their spread."""
    case = cases()[label]
    config = loaded(case, overrides)
    term = vars(objective_of(config).term)
    settings = [f"{k.replace('_', ' ')} {v:g}" for k, v in term.items() if v is not None]

    def over(key: str, form: str) -> str:
        return spread([row[key] for row in rows], form)

    return cells(
        f"`{case.name}`" + label.removeprefix(case.name) + (f" (= `{same}`)" if same else ""),
        ", ".join(settings),
        str(config.updates_per_batch),
        str(len(rows)),
        f"{over('reward first', '{:.3f}')} to {over('reward', '{:.3f}')}",
        f"{over('accuracy first', '{:.1%}')} to {over('accuracy', '{:.1%}')}",
        over("clipped", "{:.1%}"),
        over("clipped sequences", "{:.1%}"),
        f"{over('entropy first', '{:.2f}')} to {over('entropy', '{:.2f}')}",
        f"{statistics.median(row['s/step'] for row in rows):.2f}",
    )


def identity(config: Config) -> tuple[Any, ...]:
    """Two configs of one identity train alike, whatever their losses are called.

    With one update per batch every ratio is 1, where each term's gradient is A grad log pi. With
    one advantage a completion the ratio of gspo_token has the gradient of gspo's.
    """
    objective, plain = objective_of(config), config.updates_per_batch == 1
    ratio = "sequence" if objective.ratio == "sequence_token" else objective.ratio
    shape = () if plain else (type(objective.term), *vars(objective.term).values(), ratio)
    penalty, scaled = config.rewards.overlong_buffer, config.spec.scale_by_std
    batch = (config.updates_per_batch, config.dynamic_sampling, penalty, scaled)
    return (*shape, objective.aggregation, *batch)


HEAD = (
    "loss",
    "settings",
    "updates per batch",
    "runs",
    "reward",
    "held-out accuracy",
    "tokens clipped",
    "completions clipped",
    "entropy, nats",
    "s/step",
)


NOTES = """\
This is one learning rate, on a model of 0.4 million weights: no ranking. A loss that makes more
updates of a batch moves further in as many steps, for a step of Adam does not shrink with the
gradient; compare losses with equally many updates first. GSPO's own clip range is meant for large
models; an update of one this small moves a completion's probability further."""


def page(rows: list[Row], arguments: argparse.Namespace) -> list[str]:
    of: dict[str, list[Row]] = {}
    for label in cases():
        of[label] = [row for row in rows if row["label"] == label]
    of = {label: found for label, found in of.items() if found}
    seen: dict[tuple[Any, ...], str] = {}
    lines = []
    for label, found in of.items():
        who = identity(loaded(cases()[label], arguments.overrides))
        lines.append(line(label, found, seen.get(who), arguments.overrides))
        seen.setdefault(who, label)
    config = Config.load(CONFIG, arguments.overrides)
    seeds = seeds_of(rows)
    task = (
        "The task is that of [configs/quickstart_gspo.yaml](../configs/quickstart_gspo.yaml):"
        f" {arguments.steps} steps of {config.batch_size} prompts\nwith {config.group_size}"
        f" completions each, from the same weights, with the seeds {seeds} and the same learning"
        f" rate,\n{config.optimizer.learning_rate:g}. Each loss has its paper's own settings and"
        " updates per batch; [reinforcement-learning.md](reinforcement-learning.md)\nhas the"
        f" formulas. Reward and entropy are means over the first and last {EDGE} steps; the"
        f" accuracy is that of greedy\ncompletions of {config.eval.prompts} held-out prompts,"
        " before and after; what is clipped is the mean over all steps. ± is the standard\n"
        "deviation over the runs. A loss marked (= another) is the same objective here, by another"
        " name:\nwhat differs between their rows is rounding."
    )
    return [
        "# All losses on one task",
        written_by("losses.py", arguments),
        task,
        table(HEAD, lines),
        NOTES,
    ]


if __name__ == "__main__":
    main()
