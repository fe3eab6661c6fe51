"""GSPO and GRPO on a mixture of experts in bfloat16, with and without replayed routes; writes a
page.

    python benchmarks/mixtures.py [key=value ...] [--steps 100] [--seeds 0 1 2] [--only gspo grpo]

The page is `docs/experts-compared.md`. First what rounding alone does to the importance ratios of
one policy, which are 1 in exact arithmetic: those of tokens, which GRPO has, and of whole
completions, which GSPO has. Then runs of both on the task of `configs/quickstart_gspo_moe.yaml`. A
stopped comparison resumes where it was (`comparison.py`). Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
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

from jaxrl.algorithms.signals import completion_logprobs
from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.config.schema import Config
from jaxrl.data.batch import make_rollout
from jaxrl.models import parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.models.experts import Experts
from jaxrl.sampling.engine import Engine, SamplingParams
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest
from jaxrl.sharding.axes import Axes
from jaxrl.sharding.mesh import role_mesh
from jaxrl.types import Prompt

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "quickstart_gspo_moe.yaml"
PAGE = ROOT / "docs" / "experts-compared.md"
RESULTS = Path("runs/mixtures.jsonl")
PROMPTS, PROMPT, NEW, EACH = 16, 12, 64, 4
"""Of the first table: prompts of random tokens, their length, tokens of a completion, completions
of a prompt."""
RUN = (
    "mesh=actor+rollout=1",
    "actor.parallel.fsdp=1",
    "actor.parallel.expert=1",
    "actor.dtype=bfloat16",
    "rollout.dtype=bfloat16",
    "actor.minibatches=4",
)
CLIPS = {"grpo": (0.2, 0.2), "gspo": (0.03, 0.04)}
"""GRPO's own, and that of the quickstart of GSPO."""


def models() -> dict[str, tuple[DecoderConfig, Any]]:
    """What the first table is about -> the model and its weights, in float32."""
    built_in = resolve_model("builtin:student_moe")
    small = DecoderConfig(
        *("qwen3_moe", 64, 64, 8, 4, 2, 16, 32),
        experts=Experts(count=64, chosen=8, normalised=True, dense_width=32),
        tie_embeddings=True,
    )
    return {
        "`builtin:student_moe`: 2 layers, 2 of 8 experts": (built_in.config, built_in.load()),
        "random weights: 8 layers, 8 of 64 experts": (
            small,
            parameters.init_params(small, jax.random.key(0)),
        ),
    }


def ratios(config: DecoderConfig, params: Any) -> dict[bool, np.ndarray]:
    """Replayed or not -> [completions, NEW]: log of what the learner gives a token's probability,
    divided by the sampler's, both in bfloat16 with the same weights."""
    random = np.random.default_rng(0)
    drawn = random.integers(3, config.vocab_size, (PROMPTS, PROMPT))
    prompts = [Prompt(i, tuple(map(int, tokens)), "") for i, tokens in enumerate(drawn)]
    lengths = {"max_prompt_tokens": PROMPT, "max_new_tokens": NEW}
    low = parameters.cast(params, "bfloat16")
    engine = Engine(config, None, slots=PROMPTS * EACH, launch_tokens=NEW, **lengths)
    requests = [
        SampleRequest(
            *(prompt.tokens, SamplingParams(NEW), RandomKey(0, prompt=i, sample=k), NEW),
            record_experts=True,
        )
        for i, prompt in enumerate(prompts)
        for k in range(EACH)
    ]
    done = engine.generate(jax.jit(parameters.unstack)(low), requests)
    found = [done[i * EACH : (i + 1) * EACH] for i in range(PROMPTS)]
    rollout = make_rollout(prompts, found, policy_version=0, pad_id=0, **lengths)
    mesh = role_mesh(jax.devices()[:1], Axes())
    run = jax.jit(
        lambda params, sequences: completion_logprobs(
            config, params, sequences, mesh, temperature=1.0, chunk=4096
        )
    )
    none = np.full_like(rollout.experts, -1)
    return {
        replayed: np.asarray(run(low, replace(rollout.sequences, experts=experts)))
        - np.asarray(rollout.logprobs)
        for replayed, experts in ((False, none), (True, rollout.experts))
    }


def noise_line(label: str, replayed: bool, found: np.ndarray) -> str:
    each, whole = found.reshape(-1), found.mean(1)
    outside = np.abs(np.expm1(each)) > CLIPS["grpo"][0]
    return cells(
        label,
        "yes" if replayed else "no",
        f"{np.mean(np.expm1(each) - each):.2g}",
        f"{each.std():.2g}",
        f"{np.abs(each).max():.2g}",
        f"{outside.mean():.2%}",
        f"{whole.std():.2g}",
    )


NOISE = (
    "model",
    "replayed",
    "mismatch k3, nats",
    "std of a token's log ratio",
    "largest",
    "tokens outside 0.8 to 1.2",
    "std of a completion's log ratio",
)


def main() -> None:
    arguments = parse(__doc__, steps=100, only=CLIPS, results=RESULTS, page=PAGE)
    runs: dict[str, Callable[[int], Row]] = {
        f"`{name}`, {'replayed' if replayed else 'routers free'}": partial(
            run, name, replayed, arguments
        )
        for name in arguments.only or CLIPS
        for replayed in (False, True)
    }
    rows = list(complete(runs, arguments).values())
    lines = [
        noise_line(label, replayed, found)
        for label, given in models().items()
        for replayed, found in ratios(*given).items()
    ]
    write(arguments, page(lines, rows, arguments))


def run(name: str, replayed: bool, arguments: argparse.Namespace, seed: int) -> Row:
    """One run's figures."""
    low, high = CLIPS[name]
    keys = [*RUN, f"algorithm={name}", f"policy.clip_low={low}", f"policy.clip_high={high}"]
    keys += [f"policy.router_replay={str(replayed).lower()}", *arguments.overrides]
    before, *done = trained(CONFIG, arguments.steps, seed, keys)
    edge = min(EDGE, len(done))
    first, last = done[:edge], done[-edge:]
    return {
        "reward first": mean(first, "reward/mean"),
        "reward": mean(last, "reward/mean"),
        "accuracy first": before["eval/accuracy"],
        "accuracy": done[-1]["eval/accuracy"],
        "mismatch": mean(done, "policy/mismatch_k3"),
        "moved": mean(done, "policy/old_kl_k3"),
        "clipped": mean(done, "policy/clip_fraction"),
        "gradient": statistics.stdev(x["actor/grad_norm"] for x in last),
    }


HEAD = (
    "run",
    "runs",
    "reward",
    "held-out accuracy",
    "mismatch k3, nats",
    "KL of a batch's updates, nats",
    "tokens clipped",
    "std of the gradient's norm",
)


def line(label: str, rows: list[Row]) -> str:
    def over(key: str, form: str) -> str:
        return spread([row[key] for row in rows], form)

    return cells(
        label,
        str(len(rows)),
        f"{over('reward first', '{:.3f}')} to {over('reward', '{:.3f}')}",
        f"{over('accuracy first', '{:.1%}')} to {over('accuracy', '{:.1%}')}",
        over("mismatch", "{:.1e}"),
        over("moved", "{:.1e}"),
        over("clipped", "{:.1%}"),
        over("gradient", "{:.2f}"),
    )


NOTES = """\
GSPO's ratio of a completion is several times less noisy than the ratios of its tokens, and
replay takes most of the noise out of both: that much of the paper's case (arXiv 2507.18071,
section 5.3) shows in models this small. That it decides what is learned does not: here
completions have three tokens, and both learn alike within the spread, with and without replay.
What replay leaves of the mismatch is rounding outside of the routers, which weighs more in the
runs, whose tokens are those that the model is sure of, than in the first table, whose tokens go
far beyond what it was trained on."""


def page(noise: list[str], rows: list[Row], arguments: argparse.Namespace) -> list[str]:
    of: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["label"]):
        of.setdefault(row["label"], []).append(row)
    config = Config.load(CONFIG, arguments.overrides)
    return [
        "# GSPO and GRPO on a mixture of experts",
        written_by("mixtures.py", arguments),
        "## What rounding alone does to importance ratios",
        "Sampler and learner have the same weights, both in bfloat16, so that every ratio would be"
        " 1 without rounding.\nThe sampler decodes a token at a time, the learner reads"
        f" {PROMPTS * EACH} completions of {NEW} tokens at once, and where\ntwo experts are nearly"
        " equal they choose different ones. GRPO has a ratio for each token; GSPO one for a"
        " completion,\nthe exponential of its tokens' mean log ratio. Replayed"
        " ([`policy.router_replay`](models.md#mixtures-of-experts)), the learner's tokens\npass the"
        " experts that the sampler chose.",
        table(NOISE, noise),
        "## Runs",
        "The task is that of"
        " [configs/quickstart_gspo_moe.yaml](../configs/quickstart_gspo_moe.yaml), with four"
        f" updates of each batch in bfloat16: {arguments.steps} steps\nof {config.batch_size}"
        f" prompts with {config.group_size} completions each, from the same weights, with the seeds"
        f" {seeds_of(rows)}. GRPO clips ratios\nat 0.2, GSPO at 0.03 and 0.04. Reward is the mean"
        f" over the first and last {EDGE} steps; the accuracy is that of greedy completions\nof"
        f" {config.eval.prompts} held-out prompts, before and after; the gradient's norm is that of"
        f" the last {EDGE} steps. ± is the standard deviation\nover the runs.",
        table(HEAD, [line(label, found) for label, found in of.items()]),
        NOTES,
    ]


if __name__ == "__main__":
    main()
