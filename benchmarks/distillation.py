"""What distillation learns from what, on one task, from the same weights, with several seeds.

    python benchmarks/distillation.py [--steps 250] [--seeds 0 1 2] [--only TABLE] [key=value ...]

Writes the page `docs/distillation-compared.md`; the task is the quickstart's. Every run that ends
is a line of `--results`, and is not run again: a stopped comparison resumes where it was, and the
page has all the runs of the file with the same steps and keys. Run it from the root of the
repository.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import run_all
from losses import asked, cells, mean, read, spread

from jaxrl import Config, train
from jaxrl.checkpoint.source import resolve_model

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "distillation-compared.md"
RESULTS = Path("runs/distillation.jsonl")
EDGE = 10
"""Steps at the end that a figure of training batches is the mean of."""
POINTS = (0.25, 0.5, 1.0)
"""Shares of a run at which the agreement is shown."""
ON = ("distill.on_policy_fraction=1",)
OFF = ("distill.on_policy_fraction=0",)
REVERSE = ("distill.jsd_beta=1",)
SAMPLED = (*REVERSE, "distill.signal=sampled")
FLAT = (*REVERSE, "data.train=arithmetic:operators=*,size=1000000", "data.eval=null")
"""Products, which the teacher has never seen: it is unsure of most digits."""

Row = dict[str, Any]


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=250, help="of a run that samples itself")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="tables to run now: data, beta, lag, flat")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON lines, one a run")
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = parser.parse_intermixed_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in CASES if arguments.only is None or c.table in arguments.only]
    for seed in arguments.seeds:
        for case in chosen:
            if case.name in SAME or (case.name, seed) in read(arguments):
                continue
            row = run(case, seed, arguments)
            row |= {"label": case.name, "seed": seed, **asked(arguments)}
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{case.name}, seed {seed}: {row['seconds']:.0f} s", flush=True)
    rows = [row for row in read(arguments).values() if row["seed"] in arguments.seeds]
    arguments.out.write_text(page(rows, arguments), encoding="utf-8")
    print(f"wrote {arguments.out}")


def steps_of(case: Case, steps: int) -> int:
    """The steps that cost the FLOPs of `steps` of a run that samples itself."""
    sizes = [resolve_model(f"builtin:{who}").config.n_params for who in ("student", "teacher")]

    def cost(passes: tuple[float, float]) -> float:
        return sum(n * size for n, size in zip(passes, sizes, strict=True))

    return round(steps * cost(CASES[0].passes) / cost(case.passes))


def run(case: Case, seed: int, arguments: argparse.Namespace) -> Row:
    """One run's figures."""
    start, steps = time.monotonic(), steps_of(case, arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            f"run_dir={folder}/run",
            f"steps={steps}",
            f"seed={seed}",
            f"eval.every={steps}",
            "eval.prompts=512",
            "eval.teacher=false",
            "checkpoint.every=0",
            "mesh=actor+rollout+teacher=1",
            "logging.console=quiet",
            "logging.samples=0",
            "logging.tensorboard=false",
            "logging.timeline=false",
        ]
        keys += [*case.overrides, *arguments.overrides]
        _, *done = train(Config.load("builtin:quickstart", keys)).metrics
    last = done[-EDGE:]
    found: Row = {"steps run": steps, "seconds": time.monotonic() - start}
    found["accuracy"] = done[-1].get("eval/accuracy")
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


def table(
    name: str, head: tuple[str, ...], columns: tuple[tuple[str, str], ...], rows: list[Row]
) -> str:
    """One line a case: its runs' means, with their spread."""
    lines = [cells(*head), "|---" * len(head) + "|"]
    for case in (case for case in CASES if case.table == name):
        found = [row for row in rows if row["label"] == SAME.get(case.name, case.name)]
        if found:
            lines.append(cells(case.label, *(over(found, *column) for column in columns)))
    return "\n".join(lines)


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


def page(rows: list[Row], arguments: argparse.Namespace) -> str:
    config = Config.load("builtin:quickstart", arguments.overrides)
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    command = ["python benchmarks/distillation.py", f"--steps {arguments.steps}"]
    command.append(f"--seeds {' '.join(map(str, arguments.seeds))}")
    today = datetime.datetime.now(datetime.UTC).date()
    parts = [
        "# What distillation learns from what",
        f"Written by `{' '.join([*command, *arguments.overrides])}` on {today},\n"
        f"{run_all.machine()} Load at the end {os.getloadavg()[0]:.1f}.",
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
        table("data", ("completions", *HEAD), LEARNT, rows),
        "With 512 prompts in place of a million, which every run meets dozens of times:",
        table("few", ("completions", *HEAD), LEARNT, rows),
        "## Which divergence",
        "`distill.jsd_beta`, on the student's own samples. The scale of the loss differs, and with"
        " Adam hardly matters.",
        table("beta", ("beta", *HEAD), LEARNT, rows),
        "## Samples of older weights (AsyncOPD, arXiv 2606.24143)",
        "KL(student to teacher) on samples of weights that are 0, 1 or 2 batches old (`schedule`)."
        " With the signal `hidden` the divergence is computed\nagain under the current student;"
        " `sampled` weighs the sampled tokens by importance ratios.",
        table("lag", ("signal", *HEAD), LEARNT, rows),
        "## A teacher that is unsure (arXiv 2603.07079)",
        "Products in place of sums, which the teacher has never seen. KL(student to teacher)"
        " narrows the student's distribution;\nthe entropy-aware term adds KL(teacher to student)"
        " where the teacher's entropy is above 0.8 nats.",
        table(
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
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
