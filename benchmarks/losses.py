"""All policy losses on one task, from the same weights, with several seeds; writes a page.

    python benchmarks/losses.py [--steps 100] [--seeds 0 1 2] [--only gspo grpo] [key=value ...]

The task is that of `configs/quickstart_gspo.yaml`, the page `docs/losses-compared.md`. Each loss
has its paper's own settings and number of updates per batch; the learning rate is the same for all.
Every run that ends is a line of `--results`, and is not run again: a stopped comparison resumes
where it was, and the page has all the runs of the file with the same steps and keys. Run it from
the root of the repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_all

from jaxrl import Config, train
from jaxrl.algorithms.objective import configured
from jaxrl.losses.algorithm_table import ALGORITHMS

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart_gspo.yaml"
PAGE = ROOT / "docs" / "losses-compared.md"
RESULTS = Path("runs/losses.jsonl")
OWN = ("policy.clip_low=null", "policy.clip_high=null")
EDGE = 10
"""Steps at each end that a figure is the mean of: one batch's reward is noise."""

Row = dict[str, Any]


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="losses to run now")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = parser.parse_intermixed_args()
    chosen = {
        label: case
        for label, case in cases().items()
        if arguments.only is None or case.name in arguments.only
    }
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(arguments)
    for seed in arguments.seeds:  # all losses with one seed, then with the next
        for label, case in chosen.items():
            if (label, seed) in done:
                continue
            row = run(case, seed, arguments)
            row |= {"label": label, "seed": seed, **asked(arguments)}
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{label}, seed {seed}: {row['seconds']:.0f} s", flush=True)
    arguments.out.write_text(page(list(read(arguments).values()), arguments), encoding="utf-8")
    print(f"wrote {arguments.out}")


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


def loaded(case: Case, overrides: list[str], *more: str) -> Config:
    return Config.load(CONFIG, [*more, *case.overrides, *overrides])


def run(case: Case, seed: int, arguments: argparse.Namespace) -> Row:
    """One run's figures."""
    start, steps = time.monotonic(), arguments.steps
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
        before, *done = train(loaded(case, arguments.overrides, *quiet)).metrics
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
        "seconds": time.monotonic() - start,
    }


def line(label: str, rows: list[Row], same: str | None, overrides: list[str]) -> str:
    """A loss in the table: its runs' means, with their spread."""
    case = cases()[label]
    config = loaded(case, overrides)
    term = vars(configured(config).term)
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


def spread(values: list[float], form: str) -> str:
    """The mean, and the standard deviation where it is not 0 in the digits that are shown."""
    middle = form.format(statistics.fmean(values))
    deviation = form.format(statistics.stdev(values)) if len(values) > 1 else form.format(0)
    return middle if deviation == form.format(0) else f"{middle} ± {deviation}"


def identity(config: Config) -> tuple[Any, ...]:
    """Two configs of one identity train alike, whatever their losses are called.

    With one update per batch every ratio is 1, where each term's gradient is A grad log pi. With
    one advantage a completion the ratio of gspo_token has the gradient of gspo's.
    """
    objective, plain = configured(config), config.updates_per_batch == 1
    ratio = "sequence" if objective.ratio == "sequence_token" else objective.ratio
    shape = () if plain else (type(objective.term), *vars(objective.term).values(), ratio)
    penalty, scaled = config.rewards.overlong_buffer, config.spec.scale_by_std
    batch = (config.updates_per_batch, config.dynamic_sampling, penalty, scaled)
    return (*shape, objective.aggregation, *batch)


def mean(rows: list[dict[str, Any]], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def cells(*values: str) -> str:
    return f"| {' | '.join(values)} |"


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


def page(rows: list[Row], arguments: argparse.Namespace) -> str:
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
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    command = ["python benchmarks/losses.py", f"--steps {arguments.steps}", *arguments.overrides]
    today = datetime.datetime.now(datetime.UTC).date()
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
    parts = [
        "# All losses on one task",
        f"Written by `{' '.join(command)}` on {today},\n{run_all.machine()} Load at the end"
        f" {os.getloadavg()[0]:.1f}.",
        task,
        "\n".join([cells(*HEAD), "|---" * len(HEAD) + "|", *lines]),
        NOTES,
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
