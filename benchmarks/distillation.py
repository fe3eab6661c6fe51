"""What distillation learns from what, on one task, from the same weights, with several seeds.

    python benchmarks/distillation.py [key=value ...] [--steps 250] [--seeds 0 1 2] [--only TABLE]

Writes the page `docs/distillation-compared.md`, or with `--only` those of its sections alone; the
task is the quickstart's, and that of `walks.py`, whose models it trains first. `--steps` are those
of a run that samples itself; where cost is compared, others get as many FLOPs. A stopped comparison
resumes where it was (`comparison.py`). Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import walks
from comparison import (
    EDGE,
    Row,
    cells,
    complete,
    mean,
    parse,
    spread,
    table,
    trained,
    write,
    written_by,
)

from jaxrl import Config, evaluate
from jaxrl.checkpoint.model_source import resolve_model

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

ON_OWN = (8.0, 2.0)


@dataclass(frozen=True)
class Case:
    """A row of a table."""

    table: str
    label: str
    overrides: tuple[str, ...] = ()
    passes: tuple[float, float] = ON_OWN
    """FLOPs a token, over the parameters of student and teacher: 2 for a forward pass, 6 for an
    update. By default the student samples and learns, and the teacher scores; 0 and 0: no run."""
    models: tuple[str, str] = ("builtin:student", "builtin:teacher")
    shorter: float = 1.0
    """Tokens of the student's own completions, by those of this row's."""

    @property
    def name(self) -> str:
        return f"{self.table}/{self.label}"


SFT = ("algorithm=sft", "teacher.model=null")
FEW = ("data.train=arithmetic:size=512",)
SOURCES = (
    ("its own samples (GKD)", ON, ON_OWN),
    ("the teacher's samples (`distill.seq_kd`)", (*OFF, "distill.seq_kd=true"), (6, 4)),
    ("the data's completions, with the teacher", OFF, (6, 2)),
    ("the data's completions alone (SFT)", SFT, (6, 0)),
)
WALKS = (*walks.KEYS, "optimizer.learning_rate=1e-3")
WALKERS = (str(walks.STUDENT), str(walks.TEACHER))
STRAYING = 1.2
"""Tokens of the student's walks by those of shortest ones, as a mean over a run of the first
divergence (found by running it)."""
CASES = (
    *(Case("data", label, keys, passes) for label, keys, passes in SOURCES),
    *(Case("few", label, (*FEW, *keys), passes) for label, keys, passes in SOURCES),
    Case("beta", "0: KL(teacher to student)", ("distill.jsd_beta=0",)),
    Case("beta", "0.5: the symmetric JSD", ("distill.jsd_beta=0.5",)),
    Case("beta", "1: KL(student to teacher)", REVERSE),
    *(
        Case("walks", label, (*WALKS, *keys), passes, WALKERS, shorter)
        for label, keys, passes, shorter in (
            ("none: the student as it begins", (), (0, 0), 1),
            ("its own samples (GKD), KL(teacher to student)", (), ON_OWN, 1),
            ("its own samples (GKD), KL(student to teacher)", REVERSE, ON_OWN, 1),
            *((*source, STRAYING) for source in SOURCES[1:]),
            ("the same (SFT), for a quarter of the FLOPs", SFT, (6, 0), STRAYING / 4),
        )
    ),
    *(
        Case(
            "lag", f"{name}, {lag} behind", (*WALKS, *keys, f"schedule={schedule}"), ON_OWN, WALKERS
        )
        for name, keys in (("hidden", REVERSE), ("sampled", SAMPLED))
        for lag, schedule in enumerate(("serial", "one_step_off", "two_step_off"))
    ),
    Case("flat", "without", FLAT),
    Case("flat", "entropy_aware", (*FLAT, "distill.entropy_aware=true", "distill.entropy_top_k=8")),
)
SAME = {"data/its own samples (GKD)": "beta/0: KL(teacher to student)"}
"""Cases that are another one's runs."""
SAME["lag/hidden, 0 behind"] = "walks/its own samples (GKD), KL(student to teacher)"


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


def cost(case: Case, passes: tuple[float, float]) -> float:
    """FLOPs a token."""
    sizes = [resolve_model(model).config.n_params for model in case.models]
    return sum(n * size for n, size in zip(passes, sizes, strict=True))


def steps_of(case: Case, steps: int) -> int:
    """The steps that cost the FLOPs of `steps` of a run that samples itself."""
    share = cost(case, CASES[0].passes) / cost(case, case.passes)
    return round(steps * share * case.shorter)


def run(case: Case, arguments: argparse.Namespace, seed: int) -> Row:
    """One run's figures."""
    if case.models == WALKERS:
        walks.make()
    if case.passes == (0, 0):
        return as_it_begins(seed, arguments)
    steps = steps_of(case, arguments.steps)
    common = ("eval.prompts=512", "eval.teacher=false", "mesh=actor+rollout+teacher=1")
    with tempfile.TemporaryDirectory() as folder:
        keys = (*common, *case.overrides, *arguments.overrides, f"run_dir={folder}/run")
        _, *done = trained("builtin:quickstart", steps, seed, keys)
        last = done[-EDGE:]
        found: Row = {"steps run": steps, "accuracy": done[-1].get("eval/accuracy")}
        if case.models == WALKERS:
            found |= on_its_own(f"{folder}/run", seed, arguments)
    tokens = sum(row["actor/tokens"] for row in done)
    found["TFLOPs"] = tokens * cost(case, case.passes) / 1e12
    for key in ("top1_agreement", "student_entropy", "teacher_entropy"):
        if f"distill/{key}" in last[0]:
            found[key] = mean(last, f"distill/{key}")
    for share in POINTS:
        until = round(share * steps)
        if "distill/top1_agreement" in last[0]:
            rows = done[max(0, until - EDGE) : until]
            found[f"agreement at {share:g}"] = mean(rows, "distill/top1_agreement")
    return found


def as_it_begins(seed: int, arguments: argparse.Namespace) -> Row:
    """The figures of the walks' student before any run."""
    config = Config.load("builtin:quickstart", [*WALKS, *arguments.overrides])
    result = evaluate(str(walks.STUDENT), config)
    found = {"steps run": 0, "TFLOPs": 0.0, "accuracy": result["metrics"]["eval/accuracy"]}
    return found | on_its_own(str(walks.STUDENT), seed, arguments)


def on_its_own(student: str, seed: int, arguments: argparse.Namespace) -> Row:
    """What a student does at temperature 1 in place of greedily: how many held-out walks arrive,
    and at how many of its tokens the teacher's most probable token is its own.

    The second comes from steps of distillation with the learning rate 0.
    """
    keys = (*WALKS, *ON, *arguments.overrides, f"student.model={student}", "eval.temperature=1")
    keys = (*keys, "eval.teacher=false", "mesh=actor+rollout+teacher=1")
    keys = (*keys, f"data.train={walks.HELD_OUT}", "optimizer.learning_rate=0")
    before, *done = trained("builtin:quickstart", 4, seed, keys)
    agreement = mean(done, "distill/top1_agreement")
    return {"sampled accuracy": before["eval/accuracy"], "own agreement": agreement}


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
special to the sums. Their data have worked solutions without end and without error, from which it
is cheapest to learn directly; distillation on one's own samples is for data that have none, or few.
And all rows share one learning rate. The keys are those of [distillation.md](distillation.md) and
[config.md](config.md#distill)."""
ABOUT_WALKS = """\
GKD's own setting: the student comes from fine-tuning on few solutions, is smaller than its teacher,
and an error changes all that follows it, as in DAgger (arXiv 1011.0686). The task is to walk
through a fixed building of 36 rooms by its 37 doors: `54-51=` is solved by `4443424151`, or by any
detour that arrives ([walks.py](../benchmarks/walks.py)). The student (2 layers, 102 thousand
weights) has learnt from 512 shortest ways, 19 tokens long on average; its teacher (3 layers, 606
thousand) from all pairs of rooms, also after half random walks, and solves all of 256 held-out
prompts. Every row has the same 512 prompts, batches of 64 and the learning rate 0.001; the last
three rows alone read the solutions.

The steps give each row the FLOPs of the first GKD run, whose walks are a fifth longer than the
data's; the column has what was spent, by the tokens of the runs. Held-out walks arrive greedily or
sampled at temperature 1; the agreement is that on the student's own samples of the held-out
prompts."""
LEARNT_FROM_WALKS = """\
- Greedily, the student's own samples under KL(teacher to student) win at equal FLOPs, as in GKD's
  paper; then come the teacher's samples, the data with the teacher and the data alone.
- Sampled at temperature 1, own samples win under KL(student to teacher), with a seventh fewer
  FLOPs. Under KL(teacher to student) own samples gain nothing there over the beginning: the
  student has an entropy of 0.27 nats a token at the end where the teacher has 0.07 (0.03 and 0.04
  under the other divergence, seed 0), and so gives wrong doors a probability that greedy walks
  never use.
- SFT meets each solution 75 times; a quarter of that gives no better result.

With the learning rate 0.003 (seed 0 only; four of the rows) each learns more and the winners stay:
75.0% greedy and 38.7% sampled for the first GKD run, 57.4% and 50.4% for the second, 58.6% and
42.2% for the teacher's samples, 39.5% and 38.7% for the quarter of SFT. Accuracies of 256 prompts
have a 95% interval of 6 points to each side, which the spread over seeds does not show: all runs
share prompts, first weights and teacher.

What was tried before, with one seed each: from 128 or 256 shortest ways alone a student learns to
solve 2% to 7%, too little to compare anything. From a student at 16%, with the learning rate 0.002,
own samples first lost nearly all (1% after 40 steps) and had 35% after 200. Other sizes and
buildings were not compared."""
ABOUT_LAG = """\
KL(student to teacher) on the walks, on samples of weights that are 0, 1 or 2 batches old
(`schedule`). With the signal `hidden` the divergence is computed again under the current student;
`sampled` has one number a token, which an importance ratio weighs."""
LEARNT_FROM_LAG = """\
- The whole distribution teaches more than the sampled token, whatever the age of the samples.
- Two batches of lag cost neither signal more than the spread over seeds, at this learning rate.
- One number a token needs a student that is right now and then. On the sums, of which the student
  solves 7%, `sampled` ended at 1.1% ± 0.5% after 250 steps and `hidden` at 52.7% ± 11.4% (three
  seeds, learning rate 0.003)."""
AGREED = tuple((f"agreement at {share:g}", "{:.1%}") for share in POINTS)
LEARNT = (("steps run", "{:.0f}"), ("accuracy", "{:.1%}"), *AGREED)
HEAD = ("steps", "held-out accuracy", *(f"agreement after {share:.0%}" for share in POINTS))


UNSURE_HEAD = (
    "entropy-aware term",
    "agreement",
    "student's entropy, nats",
    "teacher's entropy, nats",
)
UNSURE = (
    ("top1_agreement", "{:.1%}"),
    ("student_entropy", "{:.3f}"),
    ("teacher_entropy", "{:.3f}"),
)
ARRIVED_HEAD = ("steps", "TFLOPs", "greedy", "sampled", "agreement on its own samples")
ARRIVED = (
    ("steps run", "{:.0f}"),
    ("TFLOPs", "{:.2f}"),
    ("accuracy", "{:.1%}"),
    ("sampled accuracy", "{:.1%}"),
    ("own agreement", "{:.1%}"),
)


def page(rows: list[Row], arguments: argparse.Namespace) -> list[str]:
    """The parts of the page. A section without a run among `rows` stays as the page has it."""
    config = Config.load("builtin:quickstart", arguments.overrides)
    asked = [f"--seeds {' '.join(map(str, arguments.seeds))}"]
    if arguments.only:
        asked.append(f"--only {' '.join(arguments.only)}")
    stamp = written_by("distillation.py", arguments, *asked)
    parts = [
        "# What distillation learns from what",
        f"The task is the quickstart's but for the walks: {config.batch_size} three-term sums a"
        f" step, learning rate {config.optimizer.learning_rate:g}, a student of 2 layers that\n"
        "solves 7% of the held-out sums and a teacher of 3 that solves 99.6%. The accuracy is that"
        " of greedy completions of 512 held-out\nprompts after the last step; agreement is the"
        " share of tokens of training batches where both models have the same\nmost probable"
        f" token, as a mean over {EDGE} steps. ± is the standard deviation over the runs.",
    ]
    ran, old = {row["label"].split("/")[0] for row in rows}, sections_of(arguments.out)
    for heading, (names, *texts) in sections(rows, arguments).items():
        if ran & set(names.split()):
            parts += [f"## {heading}", stamp, *texts]
        elif heading in old:
            parts.append(old[heading])
    return [*parts, NOTES]


def sections(rows: list[Row], arguments: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Heading -> the names of its tables, and what stands below it."""
    return {
        "On whose completions (GKD, arXiv 2306.13649)": (
            "data few",
            "Runs have equal FLOPs: sampling and scoring count 2 for each parameter and token, an"
            f" update 6, so that the cheaper ones take more than\nthe {arguments.steps} steps of"
            " the first. Divergence: KL(teacher to student). The agreement of each row is on its"
            " own batches.",
            compared("data", ("completions", *HEAD), LEARNT, rows),
            "With 512 prompts in place of a million, which every run meets dozens of times:",
            compared("few", ("completions", *HEAD), LEARNT, rows),
        ),
        "The same where errors compound": (
            "walks",
            ABOUT_WALKS,
            compared("walks", ("completions", *ARRIVED_HEAD), ARRIVED, rows),
            LEARNT_FROM_WALKS,
        ),
        "Which divergence": (
            "beta",
            "`distill.jsd_beta`, on the student's own samples. The scale of the loss differs, and"
            " with Adam hardly matters.",
            compared("beta", ("beta", *HEAD), LEARNT, rows),
        ),
        "Samples of older weights (AsyncOPD, arXiv 2606.24143)": (
            "lag",
            ABOUT_LAG,
            compared("lag", ("signal", *ARRIVED_HEAD), ARRIVED, rows),
            LEARNT_FROM_LAG,
        ),
        "A teacher that is unsure (arXiv 2603.07079)": (
            "flat",
            "Products in place of sums, which the teacher has never seen. KL(student to teacher)"
            " narrows the student's distribution;\nthe entropy-aware term adds KL(teacher to"
            " student) where the teacher's entropy is above 0.8 nats.",
            compared("flat", UNSURE_HEAD, UNSURE, rows),
        ),
    }


def sections_of(file: Path) -> dict[str, str]:
    """Heading -> the section, of a page there may be."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = [f"## {section.strip()}" for section in text.split("\n## ")[1:]]
    return {section.split("\n")[0].removeprefix("## "): section for section in found}


if __name__ == "__main__":
    main()
