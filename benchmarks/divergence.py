"""Distillation loss with gradients, in three ways: memory at V = 151936, and time. One JSON line.

    python benchmarks/divergence.py [--tokens 256 --width 256 --rounds 7]

naive: all logits, the formula as usually written, jax.grad. fused: the default. lean: recomputes.
Memory is `compiled.memory_analysis()` at 4096 tokens, bfloat16, widths 1024 and 2048: nothing runs.
Time is measured with float32 at `--tokens` and `--width`, the three taking turns; medians, and the
median over the rounds of the ratio within a round, which a busy machine disturbs least. The floor
is the products' FLOPs (naive and fused: 2 logits + 2 gradients; lean: 2 more) over what a plain
matrix product reaches in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.losses.distill import divergence_from_hidden

VOCAB = 151936
PRODUCTS = {"naive": 4, "fused": 4, "lean": 6}


def naive(
    hidden: jax.Array, head: jax.Array, teacher: jax.Array, teacher_head: jax.Array
) -> jax.Array:
    product = partial(jnp.einsum, "bcd,vd->bcv", preferred_element_type=jnp.float32)
    q = jax.nn.log_softmax(product(hidden, head))
    p = jax.nn.log_softmax(product(teacher, teacher_head))
    m = jnp.logaddexp(q, p) - jnp.log(2.0)
    return (jnp.exp(p) * (p - m) + jnp.exp(q) * (q - m)).sum() / 2


def chunked(
    hidden: jax.Array,
    head: jax.Array,
    teacher: jax.Array,
    teacher_head: jax.Array,
    *,
    lean: bool,
    chunk: int,
) -> jax.Array:
    mask = jnp.ones(hidden.shape[:2], bool)
    return divergence_from_hidden(
        hidden, head, teacher, teacher_head, mask, beta=0.5, lean=lean, chunk=chunk
    )[0]


def losses(chunk: int) -> dict[str, Any]:
    ways: dict[str, Any] = {
        "naive": naive,
        "fused": partial(chunked, lean=False, chunk=chunk),
        "lean": partial(chunked, lean=True, chunk=chunk),
    }
    return {name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))) for name, loss in ways.items()}


def memory(chunk: int) -> dict[str, float]:
    """Temporaries in MB."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    student = array(8, 512, 1024), array(VOCAB, 1024)
    args = *student, array(8, 512, 2048), array(VOCAB, 2048)
    found = {}
    for name, step in losses(chunk).items():
        analysis = step.lower(*args).compile().memory_analysis()
        found[name] = round(analysis.temp_size_in_bytes / 2**20)
    return found


def times(tokens: int, width: int, rounds: int, chunk: int) -> dict[str, list[float]]:
    """Seconds of each round, the ways and a plain matrix product taking turns."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = 2 * [(1, tokens, width), (VOCAB, width)]
    args = [
        jax.random.normal(k, s) * (1 if len(s) == 3 else width**-0.5)
        for k, s in zip(keys, shapes, strict=True)
    ]
    plain = jax.jit(lambda h, w, *_: jnp.einsum("bcd,vd->bcv", h, w))
    steps = losses(chunk) | {"product": plain}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(*args))
            if i > 0:  # the first round compiles
                found[name].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=256, help="at 4096 tokens; timed: a quarter")
    args = parser.parse_args()
    megabytes = memory(args.chunk)
    # As many chunks as there would be with more tokens, or the loop would not be measured.
    seconds = times(args.tokens, args.width, args.rounds, min(args.chunk, args.tokens // 4))
    product = statistics.median(seconds.pop("product"))
    flops = {name: n * 2 * args.tokens * args.width * VOCAB for name, n in PRODUCTS.items()}
    report = {
        "device": jax.devices()[0].device_kind,
        "memory": {"tokens": 4096, "chunk": args.chunk, "temporaries_mb": megabytes},
        "memory_naive_over": {k: round(megabytes["naive"] / v, 1) for k, v in megabytes.items()},
        "time": {"tokens": args.tokens, "width": args.width, "chunk": args.tokens // 4},
        "seconds": {k: round(statistics.median(v), 3) for k, v in seconds.items()},
        "time_over_naive": {
            name: round(
                statistics.median(a / b for a, b in zip(v, seconds["naive"], strict=True)), 2
            )
            for name, v in seconds.items()
        },
        "floor_gflop": {k: round(v / 1e9, 1) for k, v in flops.items()},
        "floor_seconds": {k: round(n * product, 3) for k, n in PRODUCTS.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
