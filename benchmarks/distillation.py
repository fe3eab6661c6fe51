"""What distillation learns from what, on one task, from the same weights, with several seeds.

    python benchmarks/distillation.py [key=value ...] [--steps 250] [--seeds 0 1 2] [--only TABLE]

Writes the page `docs/distillation-compared.md`; the task is the quickstart's. `--steps` are those
of a run that samples itself; where cost is compared, others get as many FLOPs. A stopped comparison
resumes where it was (`comparison.py`). Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
from jaxrl.checkpoint.source import resolve_model

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "distillation-compared.md"
RESULTS = Path("runs/distillation.jsonl")
POINTS = (0.25, 0.5, 1.0)
"""Shares of a run at which the agreement is shown."""
ON = ("distill.on_policy_fraction=1",)
OFF = ("distill.on_policy_fraction=0",)
REVERSE = ("distill.jsd_beta=1",)
SAMPLED = (*REVERSE, "distill.signal=sampled")
FLAT = (*REVERSE, "data.train=arithmetic:operators=*,size=1000000", "data.eval=null")
"""Products, which the teacher has never seen: it is unsure of most digits."""


@dataclass(frozen=True)
class Case:
    """A row of a table."""

    table: str
    label: str
    overrides: tuple[str, ...] = ()
    passes: tuple[float, float] = field(default=(8.0, 2.0))
    """FLOPs a token, over the parameters of student and teacher: 2 for a forward pass, 6 for an
    update. By default the student samples and learns, and the teacher scores."""

    @property
    def name(self) -> str:
        return f"{self.table}/{self.label}"


SFT = ("algorithm=sft", "teacher.model=null")
FEW = ("data.train=arithmetic:size=512",)
SOURCES = (
    ("its own samples (GKD)", ON, (8, 2)),
    ("the teacher's samples (`distill.seq_kd`)", (*OFF, "distill.seq_kd=true"), (6, 4)),
    ("the data's completions, with the teacher", OFF, (6, 2)),
    ("the data's completions alone (SFT)", SFT, (6, 0)),
)
CASES = (
    *(Case("data", label, keys, passes) for label, keys, passes in SOURCES),
    *(Case("few", label, (*FEW, *keys), passes) for label, keys, passes in SOURCES),
    Case("beta", "0: KL(teacher to student)", ("distill.jsd_beta=0",)),
    Case("beta", "0.5: the symmetric JSD", ("distill.jsd_beta=0.5",)),
    Case("beta", "1: KL(student to teacher)", REVERSE),
    *(
        Case("lag", f"{name}, {lag} behind", (*keys, f"schedule={schedule}"))
        for name, keys in (("hidden", REVERSE), ("sampled", SAMPLED))
        for lag, schedule in enumerate(("serial", "one_step_off", "two_step_off"))
    ),
    Case("flat", "without", FLAT),
    Case("flat", "entropy_aware", (*FLAT, "distill.entropy_aware=true", "distill.entropy_top_k=8")),
)
SAME = {"data/its own samples (GKD)": "beta/0: KL(teacher to student)"}
"""Cases that are another one's runs."""
SAME["lag/hidden, 0 behind"] = "beta/1: KL(student to teacher)"


def main() -> None:
    tables = (case.table for case in CASES)
    arguments = parse(__doc__, steps=250, only=tables, results=RESULTS, page=PAGE)
    runs: dict[str, Callable[[int], Row]] = {
        case.name: partial(run, case, arguments)
        for case in CASES
        if case.name not in SAME and case.table in (arguments.only or [case.table])
    }
    rows = complete(runs, arguments).values()
    write(arguments, page([row for row in rows if row["seed"] in arguments.seeds], arguments))


def steps_of(case: Case, steps: int) -> int:
    """The steps that cost the FLOPs of `steps` of a run that samples itself."""
    sizes = [resolve_model(f"builtin:{who}").config.n_params for who in ("student", "teacher")]

    def cost(passes: tuple[float, float]) -> float:
        return sum(n * size for n, size in zip(passes, sizes, strict=True))

    return round(steps * cost(CASES[0].passes) / cost(case.passes))


def run(case: Case, arguments: argparse.Namespace, seed: int) -> Row:
    """One run's figures."""
    steps = steps_of(case, arguments.steps)
    keys = ("eval.prompts=512", "eval.teacher=false", "mesh=actor+rollout+teacher=1")
    keys = (*keys, *case.overrides, *arguments.overrides)
    _, *done = trained("builtin:quickstart", steps, seed, keys)
    last = done[-EDGE:]
    found: Row = {"steps run": steps, "accuracy": done[-1].get("eval/accuracy")}
    for key in ("top1_agreement", "student_entropy", "teacher_entropy"):
        if f"distill/{key}" in last[0]:
            found[key] = mean(last, f"distill/{key}")
    for share in POINTS:
        until = round(share * steps)
        if "distill/top1_agreement" in last[0]:
            rows = done[max(0, until - EDGE) : until]
            found[f"agreement at {share:g}"] = mean(rows, "distill/top1_agreement")
    return found


def over(rows: list[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows if row.get(key) is not None]
    return spread(values, form) if values else "-"


def compared(
    name: str, head: tuple[str, ...], columns: tuple[tuple[str, str], ...], rows: list[Row]
) -> str:
    """One line a case: its runs' means, with their spread."""
    lines = []
    for case in (case for case in CASES if case.table == name):
        found = [row for row in rows if row["label"] == SAME.get(case.name, case.name)]
        if found:
            lines.append(cells(case.label, *(over(found, *column) for column in columns)))
    return table(head, lines)


NOTES = """\
## How far this goes

One learning rate and few seeds, on models of half a million weights: no ranking. Two things are
special to the task. Its data have worked solutions without end and without error, from which it is
cheapest to learn directly; distillation on one's own samples is for data that have none. And all
rows share one learning rate, which suits `hidden`: `sampled`, one number a token in place of a
distribution, has noisier gradients, and other rates were not tried. The keys are those of
[distillation.md](distillation.md) and [config.md](config.md#distill)."""
AGREED = tuple((f"agreement at {share:g}", "{:.1%}") for share in POINTS)
LEARNT = (("steps run", "{:.0f}"), ("accuracy", "{:.1%}"), *AGREED)
HEAD = ("steps", "held-out accuracy", *(f"agreement after {share:.0%}" for share in POINTS))


def page(rows: list[Row], arguments: argparse.Namespace) -> list[str]:
    config = Config.load("builtin:quickstart", arguments.overrides)
    seeds = seeds_of(rows)
    asked = f"--seeds {' '.join(map(str, arguments.seeds))}"
    return [
        "# What distillation learns from what",
        written_by("distillation.py", arguments, asked),
        f"The task is the quickstart's: {config.batch_size} three-term sums a step, learning rate"
        f" {config.optimizer.learning_rate:g}, a student of 2 layers that solves 7% of the\n"
        f"held-out sums and a teacher of 3 that solves 99.6%, with the seeds {seeds}. The accuracy"
        " is that of greedy completions of 512 held-out\nprompts after the last step; agreement is"
        " the share of tokens of training batches where both models have the same\nmost probable"
        f" token, as a mean over {EDGE} steps. ± is the standard deviation over the runs.",
        "## On whose completions (GKD, arXiv 2306.13649)",
        "Runs have equal FLOPs: sampling and scoring count 2 for each parameter and token, an"
        f" update 6, so that the cheaper ones take more than\nthe {arguments.steps} steps of the"
        " first. Divergence: KL(teacher to student). The agreement of each row is on its own"
        " batches.",
        compared("data", ("completions", *HEAD), LEARNT, rows),
        "With 512 prompts in place of a million, which every run meets dozens of times:",
        compared("few", ("completions", *HEAD), LEARNT, rows),
        "## Which divergence",
        "`distill.jsd_beta`, on the student's own samples. The scale of the loss differs, and with"
        " Adam hardly matters.",
        compared("beta", ("beta", *HEAD), LEARNT, rows),
        "## Samples of older weights (AsyncOPD, arXiv 2606.24143)",
        "KL(student to teacher) on samples of weights that are 0, 1 or 2 batches old (`schedule`)."
        " With the signal `hidden` the divergence is computed\nagain under the current student;"
        " `sampled` weighs the sampled tokens by importance ratios.",
        compared("lag", ("signal", *HEAD), LEARNT, rows),
        "## A teacher that is unsure (arXiv 2603.07079)",
        "Products in place of sums, which the teacher has never seen. KL(student to teacher)"
        " narrows the student's distribution;\nthe entropy-aware term adds KL(teacher to student)"
        " where the teacher's entropy is above 0.8 nats.",
        compared(
            "flat",
            (
                "entropy-aware term",
                "agreement",
                "student's entropy, nats",
                "teacher's entropy, nats",
            ),
            (
                ("top1_agreement", "{:.1%}"),
                ("student_entropy", "{:.3f}"),
                ("teacher_entropy", "{:.3f}"),
            ),
            rows,
        ),
        NOTES,
    ]


if __name__ == "__main__":
    main()
