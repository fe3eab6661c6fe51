"""Sampling a heavy-tailed batch: refilled slots against fixed batches, beside the machine's floor.

    python benchmarks/sampling.py [--layers 6 --d-model 256 --vocab 8192 --slots 16 ...]

Prints one JSON line. Lengths are imposed (log-normal, cut at --max-new), so that random weights do.
`naive` runs the same programs as a fixed-length loop would: every prompt prefilled for each of its
samples, batches of as many sequences as there are slots, each decoded to --max-new tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import decoder
from jaxrl.models.config import DecoderConfig
from jaxrl.sampling.engine import Engine, EngineStats
from jaxrl.sampling.sampler import SamplingParams


def main() -> None:
    arguments = parse()
    config = make_config(arguments)
    dtype = jnp.dtype(arguments.dtype)
    params = decoder.init_params(config, jax.random.key(0), dtype, "unstacked")
    rng = np.random.default_rng(0)
    shape = (arguments.prompts, arguments.group)
    lengths = np.exp(rng.normal(np.log(arguments.max_new) - 1.6, 0.8, shape))
    lengths = np.clip(lengths, 4, arguments.max_new).astype(int)
    prompts = rng.integers(0, config.vocab_size, (arguments.prompts, arguments.prompt)).tolist()

    refill = measure(arguments, config, params, prompts, lengths)
    repeated = [prompt for prompt in prompts for _ in range(arguments.group)]
    longest = np.full((len(repeated), 1), arguments.max_new)
    naive = measure(arguments, config, params, repeated, longest)
    tokens = int(lengths.sum())
    ideal = max(int(lengths.max()), -(-tokens // arguments.slots))
    floor = ideal * step_floor(config, params, arguments.slots, arguments.prompt, lengths)
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **vars(arguments),
        "useful_tokens": tokens,
        "decode_steps": {
            "ideal": ideal,
            "refill": refill.decode_steps,
            "naive": naive.decode_steps,
        },
        "prefill_rows": {"refill": refill.prefill_rows, "naive": naive.prefill_rows},
        "seconds": {
            "floor": round(floor, 4),
            "refill": round(refill.seconds, 4),
            "refill_prefill": round(refill.prefill_seconds, 4),
            "refill_decode": round(refill.decode_seconds, 4),
            "naive": round(naive.seconds, 4),
        },
        "tokens_per_second": {
            "floor": round(tokens / floor),
            "refill": round(tokens / refill.seconds),
            "naive": round(tokens / naive.seconds),
        },
        "launches": refill.launches,
        "speedup": round(naive.seconds / refill.seconds, 2),
        "seconds_over_floor": round(refill.seconds / floor, 2),
    }
    print(json.dumps(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, value in {
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
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


def make_config(arguments: argparse.Namespace) -> DecoderConfig:
    return DecoderConfig(
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


def measure(
    arguments: argparse.Namespace,
    config: DecoderConfig,
    params: Any,
    prompts: list[list[int]],
    lengths: np.ndarray,
) -> EngineStats:
    """The second of two runs: the first one compiles."""
    engine = Engine(
        config,
        None,
        slots=arguments.slots,
        max_prompt_tokens=arguments.prompt,
        max_new_tokens=arguments.max_new,
        launch_tokens=arguments.launch_tokens,
    )
    for _ in range(2):
        engine.generate(
            params,
            prompts,
            n=lengths.shape[1],
            sampling=SamplingParams(max_new_tokens=arguments.max_new),
            seed=0,
            limits=lengths.tolist(),
        )
    return engine.stats


def step_floor(
    config: DecoderConfig, params: Any, slots: int, prompt: int, lengths: np.ndarray
) -> float:
    """Seconds of a decode step: max(FLOPs / peak, (parameter + slots * KV bytes) / bandwidth).

    Peak and bandwidth are measured here; the KV bytes are those of the mean context.
    """
    weights = jax.tree.leaves(params)
    dtype = weights[0].dtype
    context = prompt + float((lengths**2).sum() / lengths.sum()) / 2
    kv_bytes = 2 * config.n_layers * config.n_kv_heads * config.head_dim * dtype.itemsize * context
    attention = 4 * config.n_layers * config.n_heads * config.head_dim * context
    flops = slots * (2 * sum(x.size for x in weights) + attention)
    moved = sum(x.nbytes for x in weights) + slots * kv_bytes
    return max(flops / peak_flops(dtype), moved / bandwidth())


def peak_flops(dtype: Any) -> float:
    size = 2048 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / best_seconds(jax.jit(lambda a: a @ a), x)


def bandwidth() -> float:
    """Bytes read per second by a sum: decoding reads."""
    x = jnp.ones(2**26, jnp.float32)
    return x.nbytes / best_seconds(jax.jit(jnp.sum), x)


def best_seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
