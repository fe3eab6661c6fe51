"""A whole step of on-policy distillation: generate, score, update, send the weights. One JSON line.

    python benchmarks/step.py [--batch 8 --group 1 --prompt 64 --new 64] [--mesh MESH]
    python benchmarks/step.py --teacher FOLDER --student FOLDER --data prompts.jsonl --endless

It is `jaxrl.train` itself that runs, with its loop and its roles; the seconds are those of
`metrics.jsonl`. `--endless` makes the last word of the vocabulary the end token, so that nearly
every completion has `--new` tokens. The step is the wall time from the end of an update to the end
of the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import jax.numpy as jnp
import numpy as np

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.profile.work import Work, forward_work
from jaxrl.run.job import Job, make_job
from jaxrl.sampling.engine import Engine
from jaxrl.train import train

WARM = 2
"""Steps left out: the first compiles, the second may meet another width."""


def main() -> None:
    told = common.parser(__doc__, repeats=10)
    model_options(told)
    told.add_argument("--mesh", default="actor+rollout+teacher=1")
    told.add_argument("--beta", type=float, default=0.5, help="of the Jensen-Shannon divergence")
    told.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = told.parse_intermixed_args()
    print(run(arguments))


def model_options(told: argparse.ArgumentParser) -> None:
    told.add_argument("--teacher", default="builtin:teacher")
    told.add_argument("--student", default="builtin:student")
    told.add_argument("--data", default="arithmetic:size=100000")
    told.add_argument("--batch", type=int, default=64, help="prompts")
    told.add_argument("--group", type=int, default=1, help="completions of each")
    told.add_argument("--prompt", type=int, default=16, help="most tokens of a prompt")
    told.add_argument("--new", type=int, default=16, help="most tokens of a completion")
    told.add_argument("--endless", action="store_true", help="no completion ends before --new")


def run(arguments: argparse.Namespace) -> str:
    common.start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(arguments, Path(folder))
        job = make_job(config)
        rows = train(config).metrics[1 + WARM :]
    machine = common.ceilings(jnp.dtype(arguments.dtype), *shapes(arguments, job))
    return common.line(arguments, machine, figures(job, rows, machine), benchmark="step")


def make_config(arguments: argparse.Namespace, folder: Path) -> Config:
    """The quickstart with everything that this benchmark is not about switched off."""
    teacher, student = arguments.teacher, arguments.student
    if arguments.endless:
        teacher, student = (
            endless(teacher, folder / "teacher"),
            endless(student, folder / "student"),
        )
    keys = {
        "name": "benchmark",
        "run_dir": folder / "run",
        "mesh": arguments.mesh,
        "steps": WARM + arguments.repeats,
        "batch_size": arguments.batch,
        "group_size": arguments.group,
        "max_prompt_tokens": arguments.prompt,
        "max_new_tokens": arguments.new,
        "student.model": student,
        "teacher.model": teacher,
        "teacher.dtype": arguments.dtype,
        "actor.dtype": arguments.dtype,
        "rollout.dtype": arguments.dtype,
        "rollout.launch_tokens": min(arguments.new, 32),
        "data.train": arguments.data,
        "data.eval": "null",
        "distill.jsd_beta": getattr(arguments, "beta", 0.5),
        "optimizer.learning_rate": 1e-5,
        "optimizer.lr_schedule": "constant",
        "checkpoint.every": 0,
        "logging.console": "quiet",
        "logging.samples": 0,
    }
    given = [f"{key}={value}" for key, value in keys.items()]
    return Config.load("builtin:quickstart", [*given, *getattr(arguments, "overrides", [])])


@contextlib.contextmanager
def lengths(of_step: Callable[[int, int], list[int]] | None) -> Iterator[None]:
    """While this is open, completions have the tokens that `of_step(step, completions)` says, as if
    they ended there; None: each has as many as the config allows."""
    generate = Engine.generate

    def limited(self: Engine, params: Any, prompts: Any, *, n: int, step: int, **more: Any) -> Any:
        assert of_step is not None
        each = np.reshape(of_step(step, len(prompts) * n), (len(prompts), n)).tolist()
        return generate(self, params, prompts, n=n, step=step, limits=each, **more)

    if of_step is not None:
        Engine.generate = limited
    try:
        yield
    finally:
        Engine.generate = generate


def endless(model: str, folder: Path) -> str:
    """A copy of a Hugging Face folder (its files as links) whose end token hardly ever comes."""
    from jaxrl.checkpoint.model_source import resolve_model

    source = resolve_model(model)
    folder.mkdir()
    for file in source.path.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source.path / "config.json").read_text())
    config |= {"eos_token_id": source.config.vocab_size - 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def shapes(arguments: argparse.Namespace, job: Job) -> list[tuple[int, int, int]]:
    """The products that most of the time goes to: MLP and head of the update, head of decoding."""
    c, rows = job.student.config, arguments.batch * arguments.group
    return [
        (rows * (arguments.prompt + arguments.new), c.d_model, c.d_ff),
        (rows * arguments.new, c.d_model, c.vocab_size),
        (rows, c.d_model, c.vocab_size),
    ]


def figures(
    job: Job, rows: list[dict[str, Any]], machine: common.Ceilings
) -> dict[str, dict[str, Any]]:
    """Each stage and the whole step; the floors are those of the real tokens, mean over steps."""
    config, student = job.config, job.student.config
    teacher = job.teacher.models["teacher"].config
    itemsize = jnp.dtype(config.rollout.dtype).itemsize
    group, n = config.group_size, config.batch_size * config.group_size
    each: dict[str, list[Any]] = {"rollout": [], "score": [], "update": []}
    for row in rows:
        prompts = [len(prompt.tokens) for prompt in job.train.batch(int(row["step"]) - 1)]
        mean = row["tokens/generated"] / n
        lengths = [p + mean for p in prompts for _ in range(group)]
        new = np.full((len(prompts), group), mean)
        each["rollout"].append(common.sampling_work(student, prompts, new, n, itemsize))
        each["score"].append([forward_work(teacher, lengths, itemsize)])
        each["update"].append(update_work(student, job, lengths, round(mean * n), itemsize))
    parts = {stage: mean_work(steps) for stage, steps in each.items()}
    parts["weight_sync"] = [Work(0, 2 * student.n_params * itemsize)]  # read and written
    # The last weights are sent nowhere.
    seconds = {
        stage: [row[key] for row in rows if (key := f"time/{stage}_s") in row] for stage in parts
    }
    tokens = sum(row["tokens/generated"] for row in rows) / len(rows)
    told = {stage: common.figure(seconds[stage], parts[stage], machine) for stage in parts}
    whole = [part for stage in parts.values() for part in stage]
    steps = [row["time/step_s"] for row in rows]
    told["step"] = common.figure(steps, whole, machine, tokens=tokens)
    told["step"]["tokens_per_second"] = common.rounded(tokens / told["step"]["seconds"])
    return told


def update_work(
    student: DecoderConfig, job: Job, lengths: list[float], tokens: int, itemsize: int
) -> list[Work]:
    width = job.teacher.models["teacher"].config.d_model
    return common.train_work(student, width, job.vocab_size, lengths, tokens, itemsize)


def mean_work(steps: list[list[Work]]) -> list[Work]:
    """The mean of each part over the steps."""
    n = len(steps)
    return [
        Work(sum(w.flops for w in part) / n, sum(w.bytes for w in part) / n)
        for part in zip(*steps, strict=True)
    ]


if __name__ == "__main__":
    main()
