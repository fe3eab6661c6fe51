"""Sampling: equal lengths, and heavy-tailed ones with and without refill. One JSON line.

    python benchmarks/sampling.py [--layers 6 --d-model 256 --vocab 8192 --slots 16 ...]
    python benchmarks/sampling.py --model FOLDER --equal-prompt 64 --equal-new 64

`equal`: as many prompts as there are slots, every completion `--equal-new` tokens long. `refill`
and `naive`: `--prompts` x `--group` completions with imposed log-normal lengths, cut at
`--max-new`. `naive` runs the same programs as a fixed-length loop would: every prompt prefilled for
each of its samples, batches of as many sequences as there are slots, each decoded to --max-new
tokens. Lengths are imposed, so that random weights do. `paged` is `refill` with a pool of pages for
a part of what the slots could hold (`--pool`).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.checkpoint.model_source import resolve_model
from jaxrl.models import parameters
from jaxrl.models.config import DecoderConfig
from jaxrl.sampling.engine import Engine, EngineStats, SamplingParams
from jaxrl.sampling.partial_completion import RandomKey, SampleRequest


def main() -> None:
    arguments = parse()
    common.start(arguments)
    config, params = make_model(arguments)
    rng = np.random.default_rng(0)
    cases = make_cases(arguments, config, rng)
    stats: dict[str, list[EngineStats]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(arguments.repeats + 1):
        for name, case in cases.items():
            started = time.process_time()
            told = case.run(params)
            if i > 0:  # the first round compiles
                stats[name].append(told)
                cpu[name].append(time.process_time() - started)
    machine = common.ceilings(
        arguments.dtype,
        (arguments.slots, config.d_model, config.d_ff),
        (arguments.slots, config.d_model, config.vocab_size),
    )
    itemsize = jnp.dtype(arguments.dtype).itemsize
    figures = {}
    for name, case in cases.items():
        lengths = np.asarray(case.useful)
        each = [len(prompt) for prompt in case.distinct]
        parts = common.sampling_work(config, each, lengths, arguments.slots, itemsize)
        figures[name] = common.figure([s.seconds for s in stats[name]], parts, machine)
        seconds, last = figures[name]["seconds"], stats[name][-1]
        figures[name] |= {
            "tokens": int(lengths.sum()),
            "tokens_per_second": common.rounded(lengths.sum() / seconds),
            "decode_steps": last.decode_steps,
            "ideal_steps": max(int(lengths.max()), -(-int(lengths.sum()) // arguments.slots)),
            "prefill_rows": last.prefill_rows,
            "prefill_seconds": common.rounded(median(s.prefill_seconds for s in stats[name])),
            "decode_seconds": common.rounded(median(s.decode_seconds for s in stats[name])),
            "cpu_seconds": common.rounded(median(cpu[name])),
            "launches": last.launches,
            "sent_back": last.preemptions,
            "recomputed": last.recomputed,
        }
    speedup = {}
    for fast, slow in (("refill", "naive"), ("paged", "refill")):
        if {fast, slow} <= figures.keys():
            for of in ("seconds", "decode_seconds", "cpu_seconds"):
                ratio = figures[slow][of] / figures[fast][of]
                speedup[f"{of}_{fast}_over_{slow}"] = common.rounded(ratio)
    print(common.line(arguments, machine, figures, benchmark="sampling", **speedup))


def parse() -> argparse.Namespace:
    told = common.parser(__doc__, repeats=3)
    told.add_argument("--model", help="a checkpoint; without it, random weights of these sizes:")
    sizes = {
        "layers": 6,
        "d-model": 256,
        "heads": 8,
        "kv-heads": 4,
        "d-ff": 704,
        "vocab": 8192,
        "prompts": 16,
        "group": 8,
        "slots": 16,
        "prompt": 192,
        "max-new": 192,
        "launch-tokens": 32,
        "equal-prompt": 64,
        "equal-new": 64,
    }
    for name, value in sizes.items():
        told.add_argument(f"--{name}", type=int, default=value)
    told.add_argument("--pool", type=float, default=0.5, help="of `paged`: pages, as a share")
    told.add_argument("--cases", nargs="+", default=["equal", "refill", "naive"])
    return told.parse_args()


def make_model(arguments: argparse.Namespace) -> tuple[DecoderConfig, Any]:
    dtype = jnp.dtype(arguments.dtype)
    if arguments.model is not None:
        source = resolve_model(arguments.model)
        return source.config, source.load(None, dtype, "unstacked")
    config = DecoderConfig(
        family="llama",
        vocab_size=arguments.vocab,
        d_model=arguments.d_model,
        n_layers=arguments.layers,
        n_heads=arguments.heads,
        n_kv_heads=arguments.kv_heads,
        head_dim=arguments.d_model // arguments.heads,
        d_ff=arguments.d_ff,
        tie_embeddings=True,
        max_positions=arguments.prompt + arguments.max_new,
    )
    return config, parameters.init_params(config, jax.random.key(0), dtype, "unstacked")


@dataclass
class Case:
    """One batch to sample, on an engine of its own."""

    engine: Engine
    prompts: list[list[int]]
    limits: np.ndarray
    """[len(prompts), n] tokens that are decoded."""
    distinct: list[list[int]]
    """Prompts that need a prefill."""
    useful: np.ndarray
    """[len(distinct), n] tokens that are wanted."""

    def run(self, params: Any) -> EngineStats:
        sampling = SamplingParams(max_new_tokens=self.engine.max_new_tokens)
        requests = [
            SampleRequest(prompt, sampling, RandomKey(0, prompt=i, sample=k), limit)
            for i, (prompt, row) in enumerate(zip(self.prompts, self.limits.tolist(), strict=True))
            for k, limit in enumerate(row)
        ]
        self.engine.generate(params, requests)
        return self.engine.stats


def make_cases(
    arguments: argparse.Namespace, config: DecoderConfig, rng: np.random.Generator
) -> dict[str, Case]:
    def engine(prompt: int, new: int, cache_tokens: int | None = None) -> Engine:
        return Engine(
            config,
            None,
            slots=arguments.slots,
            max_prompt_tokens=prompt,
            max_new_tokens=new,
            launch_tokens=min(arguments.launch_tokens, new),
            cache_tokens=cache_tokens,
        )

    def prompts(count: int, width: int) -> list[list[int]]:
        return rng.integers(0, config.vocab_size, (count, width)).tolist()

    long = engine(arguments.prompt, arguments.max_new)
    mean = np.log(arguments.max_new) - 1.6
    shape = arguments.prompts, arguments.group
    lengths = np.exp(rng.normal(mean, 0.8, shape)).clip(4, arguments.max_new).astype(int)
    heavy = prompts(arguments.prompts, arguments.prompt)
    repeated = [prompt for prompt in heavy for _ in range(arguments.group)]
    longest = np.full((len(repeated), 1), arguments.max_new)
    same = prompts(arguments.slots, arguments.equal_prompt)
    full = np.full((arguments.slots, 1), arguments.equal_new)
    pool = round(arguments.pool * arguments.slots * arguments.max_new)
    paged = engine(arguments.prompt, arguments.max_new, max(pool, arguments.max_new))
    cases = {
        "equal": Case(engine(arguments.equal_prompt, arguments.equal_new), same, full, same, full),
        "refill": Case(long, heavy, lengths, heavy, lengths),
        "naive": Case(long, repeated, longest, heavy, lengths),
        "paged": Case(paged, heavy, lengths, heavy, lengths),
    }
    return {name: case for name, case in cases.items() if name in arguments.cases}


if __name__ == "__main__":
    main()
