"""A whole step of GSPO: sample, reward, update, send the weights. One JSON line.

    python benchmarks/gspo_step.py --teacher FOLDER --prompts FILE [--profile FOLDER] [key=value]

It is `jaxrl.train` itself that runs, on the work that `peers/work.py` calls gspo; FOLDER is a
Hugging Face model, FILE comes from `peers/prompts.py`. The seconds are those of `metrics.jsonl`: a
step is the wall time from the end of an update to the end of the next.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import step as whole_step

from jaxrl.config.schema import Config
from jaxrl.models.config import DecoderConfig
from jaxrl.run.job import make_job
from jaxrl.train import train

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import work

STAGES = ("rollout", "reward", "update", "weight_sync")


def main() -> None:
    told = common.parser(__doc__, repeats=4)
    told.add_argument("--teacher", required=True, help="the policy; peers/run.py calls it so")
    told.add_argument("--prompts", required=True)
    told.add_argument("--what", choices=("gspo", "gspo-tail"), default="gspo")
    told.add_argument("--mesh", default="actor+rollout=1")
    told.add_argument("--profile", help="folder for a trace of all steps")
    told.add_argument("overrides", nargs="*", metavar="key=value", help="as of jaxrl.train")
    arguments = told.parse_intermixed_args()
    common.start(arguments)
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(arguments, Path(folder))
        job = make_job(config)
        if arguments.profile is not None:
            jax.profiler.start_trace(arguments.profile)
        tail = arguments.what == "gspo-tail"
        with whole_step.lengths(work.tail_lengths if tail else None):
            rows = train(config).metrics[1 + whole_step.WARM :]
        if arguments.profile is not None:
            jax.profiler.stop_trace()
        steps = [int(row["step"]) - 1 for row in rows]
        prompts = [[len(prompt.tokens) for prompt in job.train.batch(i)] for i in steps]
    c, samples, new = job.student.config, math.prod(work.GSPO), work.new_tokens(arguments.what)
    machine = common.ceilings(
        arguments.dtype,
        (samples * (work.WIDTH + new), c.d_model, c.d_ff),
        (samples * new, c.d_model, c.vocab_size),
        (samples, c.d_model, c.vocab_size),
    )
    each = [work.tail_lengths(i, samples) if tail else [new] * samples for i in steps]
    drawn = np.reshape(each, (len(steps), *work.GSPO))
    figures = make_figures(c, rows, prompts, drawn, jnp.dtype(arguments.dtype).itemsize, machine)
    more = {
        "library": "jaxrl",
        "what": arguments.what,
        "seconds": [row["time/step_s"] for row in rows],
        "tokens": [int(row["tokens/generated"]) for row in rows],
        "padding": [row["actor/padding"] for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
    }
    print(common.line(arguments, machine, figures, **more))


def make_config(arguments: argparse.Namespace, folder: Path) -> Config:
    data = folder / "prompts.jsonl"
    rows = work.prompts(arguments.prompts)
    data.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
    return Config.parse(
        {
            "name": "benchmark",
            "run_dir": str(folder / "run"),
            "mesh": arguments.mesh,
            "algorithm": "gspo",
            "steps": whole_step.WARM + arguments.repeats,
            "batch_size": work.GSPO[0],
            "group_size": work.GSPO[1],
            "max_prompt_tokens": work.WIDTH,
            "max_new_tokens": work.new_tokens(arguments.what),
            "student": {"model": whole_step.endless(arguments.teacher, folder / "policy")},
            "data": {"train": str(data), "shuffle": False},
            "reward": {"functions": f"{work.__file__}:digits"},
            "policy": {"clip_low": work.GSPO_CLIP[0], "clip_high": work.GSPO_CLIP[1]},
            "optimizer": {"learning_rate": 1e-6},
            "actor": {
                "dtype": arguments.dtype,
                "minibatches": 1,
                "micro_batch_tokens": None,
                "remat": "none",
            },
            "rollout": {"dtype": arguments.dtype, "launch_tokens": 32},
            "checkpoint": {"every": 0},
            "logging": {"console": "quiet", "samples": 0},
        }
    )


def make_figures(
    c: DecoderConfig,
    rows: list[dict[str, Any]],
    prompts: list[list[int]],
    drawn: np.ndarray,
    itemsize: int,
    machine: common.Ceilings,
) -> dict[str, dict[str, Any]]:
    """Each stage and the whole step, over the floor of the mean step.

    Args:
        prompts: of each step, the tokens of its prompts.
        drawn: [steps, prompts, group]: of its completions.
    """
    each: dict[str, list[Any]] = {"rollout": [], "update": []}
    for batch, lengths in zip(prompts, drawn, strict=True):
        each["rollout"].append(common.sampling_work(c, batch, lengths, lengths.size, itemsize))
        whole = (np.array(batch)[:, None] / lengths.shape[1] + lengths).ravel()  # each prompt once
        total = int(lengths.sum())
        each["update"].append(common.train_work(c, 0, c.vocab_size, whole, total, itemsize))
    parts = {stage: whole_step.mean_work(steps) for stage, steps in each.items()}
    told: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        seconds = [row[key] for row in rows if (key := f"time/{stage}_s") in row]
        if stage in parts:
            told[stage] = common.figure(seconds, parts[stage], machine)
        else:
            told[stage] = {"seconds": common.rounded(float(np.median(seconds)))}
    step = [row["time/step_s"] for row in rows]
    told["step"] = common.figure(step, parts["rollout"] + parts["update"], machine)
    return told


if __name__ == "__main__":
    main()
